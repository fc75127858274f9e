"""What a program costs on devices that nobody here holds, under one policy or another.

Compilers are asked, each in a process of its own; nothing is run, and nothing is said
that no compiler said.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jmp_rewrite._cost import html, plot, text
from jmp_rewrite._cost.batch import LargestBatch, largest_batch
from jmp_rewrite._cost.compile import Job, compile_jobs
from jmp_rewrite._cost.devices import Target, compiler, target
from jmp_rewrite._cost.estimate import Estimate, estimate
from jmp_rewrite._cost.largest import argument_bytes, largest_values
from jmp_rewrite._cost.program import Program, lower
from jmp_rewrite._cost.progress import progress
from jmp_rewrite._cost.subject import Subject
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._units import bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A U-Net's train step took 1,465 s on two busy cores: `benchmarks/README.md`.
TIME_LIMIT = 1800.0


class CostRow(NamedTuple):
    """What a compiler says of a program on a device, under a policy.

    Figures are of one device of several, and None where the compiler says nothing.

    Attributes:
      device: its name.
      policy: the policy, as it is written.
      argument_bytes: what the arguments take; their own bytes where a compiler says no
        more than that the program does not fit.
      temporary_bytes: what is neither argument nor result, at most.
      peak_bytes: all of it, at most.
      fits: whether the device has that much memory; None if it was not compiled.
      bytes_accessed: what all kernels read and write, loops by their trip counts.
      estimated_cycles: of all kernels, loops by their trip counts; None for a GPU.
      compiler: its package and version.
    """

    device: str
    policy: str
    argument_bytes: int | None
    temporary_bytes: int | None
    peak_bytes: int | None
    fits: bool | None
    bytes_accessed: int | None
    estimated_cycles: int | None
    compiler: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs on devices, as their compilers say; `report.cost` makes it.

    `print(cost)` shows a table with the ratios to float32 and, under it, whose word
    each number is. A notebook shows the same.

    Attributes:
      name: of the function.
      rows: a row for each device and policy: `device`, `policy`, `argument_bytes`,
        `temporary_bytes`, `peak_bytes`, `fits`, `bytes_accessed`, `estimated_cycles`,
        `compiler`, of one device of several; None where the compiler says nothing.
      estimates: of each row, all that the compiler says of it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
      >>> report = jmpr.explain(lambda x, w: x @ w, "mixed_bfloat16")(x, x)
      >>> try:
      ...     fits = [row.fits for row in report.cost("TPU v5e").rows]
      ... except ImportError:  # the compiler: pip install 'jax[tpu]'
      ...     fits = [True, True]
      >>> fits
      [True, True]
    """

    name: str
    rows: list[CostRow]
    estimates: list[Estimate]
    _subject: Subject = dataclasses.field(repr=False)
    _targets: Sequence[Target] = dataclasses.field(repr=False)
    _policies: Sequence[Policy] = dataclasses.field(repr=False)
    _time_limit: float = dataclasses.field(repr=False)

    def largest_batch(
        self, axis: int = 0, *, argnums: int | Collection[int] | None = None
    ) -> LargestBatch:
        """Searches the largest batch that fits, by the compilers' own verdict.

        Two small batches are compiled for a first guess, and then one batch after the
        other between what fits and what does not: eight compilations for each device
        and policy at most. What was compiled before is not compiled again.

        Args:
          axis: the axis of the batch's arrays along which examples are counted.
          argnums: which positional arguments are the batch, also where the call named
            them. None for those whose arrays all have the same size along the axis, and
            which the function does not return a new value of.

        Returns:
          A row for each device and policy: the largest batch that was seen to fit, and
          the smallest that was not.

        Raises:
          TypeError: if the axis or a number of an argument is no integer.
          ValueError: if it is not clear which arguments are the batch, or they have no
            such axis.
        """
        return largest_batch(
            self._subject,
            self._targets,
            self._policies,
            axis,
            argnums,
            self._time_limit,
            policy_text,
        )

    def __str__(self) -> str:
        return text.render(self)

    def __repr__(self) -> str:
        return f"<Cost of {self.name}: {len(self.rows)} rows>"

    def _repr_html_(self) -> str:
        return html.table(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as an HTML file, which needs no network.

        Args:
          path: of the file to write.
        """
        pathlib.Path(path).write_text(html.page(self), encoding="utf-8")

    def plot(self) -> Figure:
        """Draws memory, bytes and cycles of each policy by those of the first.

        Returns:
          A matplotlib figure: a notebook shows it, `savefig` keeps it.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        return plot.plot(self)


def cost(
    subject: Subject,
    devices: Sequence[str],
    policies: PolicyLike | Sequence[PolicyLike] = None,
    time_limit: float = TIME_LIMIT,
) -> Cost:
    """Compiles a program for devices under policies, and says what it costs there.

    Args:
      subject: the program.
      devices: their names.
      policies: None for float32 and the subject's own.
      time_limit: seconds for each compilation.

    Raises:
      ImportError: if a compiler is not installed.
      TypeError: for a name that is no string, or a policy that is none.
      ValueError: for an unknown device or policy, no device, or a time limit that is no
        positive number.
    """
    if not devices:
        raise ValueError(
            "cost expected at least one device, as in report.cost('TPU v5e', "
            "'NVIDIA H100')."
        )
    if isinstance(time_limit, bool) or not time_limit > 0:
        raise ValueError(f"time_limit expected seconds above 0, got {time_limit!r}.")
    if not subject.call.shardings:
        raise ValueError(
            f"{subject.name} was explained without an array: give its arguments as "
            "arrays or jax.ShapeDtypeStruct."
        )
    targets = [target(name) for name in dict.fromkeys(devices)]
    compilers = {t.platform: compiler(t.platform) for t in targets}
    chosen = _policies(subject, policies)
    programs = {p: subject.program(p) for p in chosen}
    pairs = [(t, p) for t in targets for p in chosen]
    jobs = [Job(t, lower(programs[p], t)) for t, p in pairs]
    titles = [f"{t.name}, {p.name}" for t, p in pairs]
    with progress(titles, "compiling for") as done:
        compiled = compile_jobs(jobs, time_limit, done)
    estimates = [
        _with_values(estimate(c, t), programs[p], t)
        for c, (t, p) in zip(compiled, pairs, strict=True)
    ]
    rows = [
        _row(t, p, e, compilers[t.platform])
        for (t, p), e in zip(pairs, estimates, strict=True)
    ]
    return Cost(subject.name, rows, estimates, subject, targets, chosen, time_limit)


def _policies(
    subject: Subject, given: PolicyLike | Sequence[PolicyLike]
) -> list[Policy]:
    if given is None:
        return list(dict.fromkeys([Policy("float32"), subject.policy]))
    if isinstance(given, str) or not isinstance(given, Iterable):  # one, bare
        return [as_policy(given)]
    chosen = list(dict.fromkeys(as_policy(p) for p in given))
    if not chosen:
        raise ValueError("policies expected at least one policy, or None.")
    return chosen


def _with_values(found: Estimate, program: Program, on: Target) -> Estimate:
    """Adds what is known without a compiled text of a program that does not fit.

    That is what its arguments take, and its largest values.
    """
    if found.fits is not False or found.largest:
        return found
    held = argument_bytes(program)
    problem = found.problem
    if held > on.memory:
        said = problem.removeprefix("does not fit: ")
        alone = f"the arguments alone take {bytes_text(held)}"
        has = f"{on.name} has {bytes_text(on.memory)}"
        problem = f"does not fit: {alone}, and {has}. {said}"
    values = largest_values(program)
    return dataclasses.replace(
        found, argument_bytes=held, problem=problem, largest=values
    )


def _row(on: Target, policy: Policy, found: Estimate, by: str) -> CostRow:
    return CostRow(
        on.name,
        policy_text(policy),
        found.argument_bytes,
        found.temporary_bytes,
        found.peak_bytes,
        found.fits,
        found.bytes_accessed,
        found.estimated_cycles,
        by,
    )


def policy_text(policy: Policy) -> str:
    """Returns a policy in a word, if it is no more than its dtype."""
    return policy.name if policy == Policy(policy.name) else repr(policy)
