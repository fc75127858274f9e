"""The largest batch that fits, by the compilers' own verdict.

Memory is no straight line in the batch: where it is tight a compiler schedules
otherwise. So a line through two small batches is a first guess, and the compiler's
verdict the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, NamedTuple

from jmp_rewrite._cost.batch_arguments import (
    Place,
    batch_arguments,
    present,
    with_batch,
)
from jmp_rewrite._cost.compile import Job, compile_jobs
from jmp_rewrite._cost.devices import Target
from jmp_rewrite._cost.estimate import Estimate, estimate
from jmp_rewrite._cost.program import lower
from jmp_rewrite._cost.progress import progress
from jmp_rewrite._cost.subject import Subject
from jmp_rewrite._policy import Policy

# Compilations for each device and policy.
_MOST = 8
# As close as what fits and what does not have to be.
_CLOSE = 0.02
# What of the memory on the data sheet a compiler uses: libtpu 15.75 of 16 GiB on v5e.
_USABLE = 0.984
# How far to go from a guess, the first, second, ... time.
_STEPS = (1.04, 1.25, 1.6, 2.0)


class BatchRow(NamedTuple):
    """The largest batch of a program on a device, under a policy.

    Attributes:
      device: its name.
      policy: the policy, as it is written.
      batch: the largest that was seen to fit; None if none was.
      too_large: the smallest that was seen not to fit; None if none was.
      tried: each batch that was compiled and whether it fits, in order.
      problem: why the search ended early, in a line; else empty.
    """

    device: str
    policy: str
    batch: int | None
    too_large: int | None
    tried: tuple[tuple[int, bool], ...]
    problem: str

    @property
    def compilations(self) -> int:
        """How many batches were compiled."""
        return len(self.tried)


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batches that fit; `cost.largest_batch` makes it.

    Attributes:
      name: of the function.
      rows: a row for each device and policy.
    """

    name: str
    rows: list[BatchRow]

    def __str__(self) -> str:
        from jmp_rewrite._cost import text  # it knows how this is laid out

        return text.batches(self)


def largest_batch(
    subject: Subject,
    targets: Sequence[Target],
    policies: Sequence[Policy],
    axis: int,
    argnums: int | Collection[int] | None,
    time_limit: float,
    name_of: Callable[[Policy], str],
) -> LargestBatch:
    """Searches for all devices and policies at once; see `Cost.largest_batch`."""
    places = batch_arguments(subject, axis, argnums)
    size, unit = present(subject, places, axis)
    searches = {
        (t, p): _search(size, unit, t.memory * _USABLE)
        for t in targets
        for p in policies
    }
    asked = {pair: next(search) for pair, search in searches.items()}
    found: dict[Any, _Found] = {}
    resized: dict[int, Subject] = {}
    while asked:
        pairs = list(asked)
        answers = _ask(subject, places, axis, asked, resized, time_limit)
        for pair, answer in zip(pairs, answers, strict=True):
            try:
                asked[pair] = searches[pair].send(answer)
            except StopIteration as end:
                found[pair] = end.value
                del asked[pair]
    rows = [BatchRow(t.name, name_of(p), *found[t, p]) for t, p in searches]
    return LargestBatch(subject.name, rows)


class _Found(NamedTuple):
    """What a search ends with: see `BatchRow`."""

    batch: int | None
    too_large: int | None
    tried: tuple[tuple[int, bool], ...]
    problem: str


def _ask(
    subject: Subject,
    places: Sequence[Place],
    axis: int,
    asked: dict[tuple[Target, Policy], int],
    resized: dict[int, Subject],
    time_limit: float,
) -> list[Estimate]:
    """Compiles each device's and policy's next batch, beside each other."""
    answers: list[Estimate | None] = [None] * len(asked)
    jobs, titles = {}, []
    for index, ((on, policy), size) in enumerate(asked.items()):
        try:
            if size not in resized:
                resized[size] = with_batch(subject, places, axis, size)
            program = resized[size].program(policy)
        except Exception as error:  # the function's own: it may want other batches
            line = str(error).strip().splitlines() or [""]
            problem = f"a batch of {size:,}: {type(error).__name__}: {line[0]}"
            answers[index] = Estimate(problem=problem)
            continue
        jobs[index] = Job(on, lower(program, on))
        titles.append(f"a batch of {size:,} on {on.name}, {policy.name}")
    with progress(titles, "trying") as done:
        compiled = compile_jobs(list(jobs.values()), time_limit, done)
    for (index, job), result in zip(jobs.items(), compiled, strict=True):
        answers[index] = estimate(result, job.target)
    return [a for a in answers if a is not None]


# ---- the search


def _search(size: int, unit: int, memory: float) -> Generator[int, Estimate, _Found]:
    """Yields batches to be compiled, and is sent what the compiler says of each.

    Args:
      size: the batch of the call.
      unit: what a batch is a multiple of.
      memory: bytes of the device.
    """
    tried: list[tuple[int, bool]] = []
    peaks: dict[int, float] = {}
    fits, too_large = 0, None
    small = guess = max(size // 4 // unit, 1) * unit
    steps = iter(_STEPS)
    while len(tried) < _MOST:
        answer = yield guess
        if answer.fits is None:
            return _Found(fits or None, too_large, tuple(tried), answer.problem)
        tried.append((guess, answer.fits))
        if need := answer.peak_bytes or (answer.over or 0) * memory:
            peaks[guess] = need
        if answer.fits:
            fits = max(guess, fits)
        else:
            too_large = min(guess, too_large or guess)
        if too_large is None:
            guess = 2 * small
            if len(tried) == 2:
                guess = _line(peaks, memory)
            elif len(tried) > 2:  # no line is straight for more than twice as far
                line = min(_line(peaks, memory), 2 * fits)
                guess = max(line, int(fits * next(steps, 2)))
        elif too_large - fits <= max(unit, fits * _CLOSE):
            break
        elif not fits:
            guess = int(too_large / max(2.0, answer.over or 0.0))
        else:
            guess = _between(fits, too_large, peaks, memory)
        guess = _rounded(guess, unit, fits, too_large)
    return _Found(fits or None, too_large, tuple(tried), "")


def _line(peaks: dict[int, float], memory: float) -> int:
    """Returns the batch at which a line through the last two peaks meets the memory."""
    (a, low), (b, high) = sorted(peaks.items())[-2:]
    if high <= low:
        return 4 * b
    return int(a + (memory - low) * (b - a) / (high - low))


def _between(fits: int, too_large: int, peaks: dict[int, float], memory: float) -> int:
    """Returns a batch between what fits and what does not, on a line of their peaks."""
    low, high = peaks[fits], peaks.get(too_large, 0.0)
    share = (memory - low) / (high - low) if high > low else 0.5
    share = min(max(share, 1 / 16), 15 / 16)
    return int(fits + share * (too_large - fits))


def _rounded(guess: int, unit: int, fits: int, too_large: int | None) -> int:
    """Rounds to a number that people use, between what is known."""
    fine = unit * 2 ** max(int(math.log2(max(guess / unit / 64, 1))), 0)
    rounded = max(guess // fine * fine, unit)
    if rounded <= fits or (too_large and rounded >= too_large):
        rounded = max(guess // unit * unit, unit)
    if rounded <= fits:
        rounded = fits + unit
    if too_large and rounded >= too_large:
        rounded = too_large - unit
    return rounded
