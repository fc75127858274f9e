"""The law of accuracy: a rewritten program is not worse than one written by hand.

For each result the error of ours, against float64, may be at most the largest of

- two epsilons of the compute dtype times the result's norm: what an expert loses by
  rounding a result's last product and what is made of it;
- 1.5 times the error by hand. A result that is a small difference of large half
  activations, or a decomposition of a rounded matrix, is off by much more than two
  epsilons of itself; by hand it is as well. The factor is there because two ways of
  rounding are two draws of an error of the same size;
- 1.5 times the error of float32, for what float32 cannot compute either.

The scale is the norm of the result itself and not of what is computed on the way to it:
a scale of intermediate values would excuse the rounded state that this law is to find.

Norms are taken over an array and over several draws of the arguments together. A number
may be off by little by hand, by luck: what breaks the law with a few draws is judged
again with more, and breaks it only if it breaks it with all of them.

Of a result of integers or booleans the error is the share of numbers that differ.

A result may be non-finite only where by hand or float32 is non-finite too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from by_hand import DTYPES, as_device, by_hand, reference
from eager import F64, is_key

EPS = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11, "float32": 2.0**-24}
EPSILONS, FACTOR = 2.0, 1.5
DRAWS = (2, 8, 32, 128)


class Verdict(NamedTuple):
    """How one result was judged.

    Attributes:
      ours: the relative error of the rewritten program; NaN if it is non-finite where
        nothing else is.
      hand: the one by hand; NaN if some of it is non-finite.
      limit: what is allowed.
    """

    ours: float
    hand: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.ours <= self.limit

    def __str__(self) -> str:
        return f"ours {self.ours:.2e}, by hand {self.hand:.2e}, limit {self.limit:.2e}"


class Judge:
    """Judges rewritings of one program.

    Args:
      closed: the program, in float32.
      draw: returns its flat arguments for a seed.
      careful: how careful the expert is by whose hand it was written; see `by_hand`.
      outside: whether the expert's loss was differentiated by JAX; see there, too.
    """

    def __init__(
        self,
        closed: Any,
        draw: Callable[[int], Sequence[Any]],
        careful: bool = True,
        outside: bool = False,
    ) -> None:
        self.closed, self.draw = closed, draw
        self.careful, self.outside = careful, outside
        self._runs: dict[Any, Any] = {
            "reference": reference(closed),
            "float32": as_device(closed, "cpu"),
        }
        self._args: dict[int, Sequence[Any]] = {}
        self._results: dict[Any, list[Any]] = {}

    def args(self, seed: int) -> Sequence[Any]:
        if seed not in self._args:
            self._args[seed] = self.draw(seed)
        return self._args[seed]

    def results(self, kind: Any, seed: int) -> list[Any]:
        """Returns the results of "reference", "float32" or a half dtype, as float64."""
        if kind not in self._runs:
            self._runs[kind] = by_hand(self.closed, kind, self.careful, self.outside)
        if (kind, seed) not in self._results:
            outs = self._runs[kind](self.args(seed))
            self._results[kind, seed] = [_numbers(x) for x in outs]
        return self._results[kind, seed]

    def errors(self, kind: Any, draws: int = DRAWS[0]) -> list[float]:
        """Returns the relative error of each result."""
        return [self._error(pairs) for pairs in self._columns(kind, draws)]

    @staticmethod
    def _error(pairs: Sequence[tuple[Any, Any]]) -> float:
        """Returns a relative error over all draws; what is non-finite is left out."""
        error = norm = 0.0
        for value, exact in pairs:
            if exact.dtype != F64:
                value, exact = value != exact, np.ones(exact.shape)
                value = 1.0 - value
            known = np.isfinite(value) & np.isfinite(exact)
            error += float(np.sum((value - exact)[known] ** 2))
            norm += float(np.sum(exact[known] ** 2))
        return float(np.sqrt(error / norm)) if norm else float(error > 0)

    def verdicts(self, policy: str, device: str, rewritten: Any) -> list[Verdict]:
        """Judges each result of a rewritten closed jaxpr, as a device is given it."""
        half = DTYPES[policy]
        ours = as_device(rewritten, device)
        found: list[list[Any]] = []
        for draws in DRAWS:
            for seed in range(len(found), draws):
                found.append([_numbers(x) for x in ours(self.args(seed))])
            verdicts = self._verdicts(found, half, EPS[policy])
            if all(v.holds for v in verdicts):
                break
        return verdicts

    def _verdicts(self, found: Any, half: Any, epsilon: float) -> list[Verdict]:
        ours, hand = self._columns(found), self._columns(half, len(found))
        verdicts = []
        for mine, theirs in zip(ours, hand, strict=True):
            error, other = self._error(mine), self._error(theirs)
            limit = max(EPSILONS * epsilon, FACTOR * other)
            if any(map(_is_worse, mine, theirs)):
                error = float("nan")
            if not all(np.isfinite(x).all() for x, _ in theirs):
                other = float("nan")
            verdicts.append(Verdict(error, other, limit))
        if all(v.holds for v in verdicts):
            return verdicts
        full = self._columns("float32", len(found))
        return list(map(self._excused, verdicts, ours, full))

    def _columns(self, kind: Any, draws: int = 0) -> list[list[tuple[Any, Any]]]:
        """Returns what was computed of each result in each draw, and what is exact."""
        rows = kind if not draws else [self.results(kind, s) for s in range(draws)]
        exact = [self.results("reference", s) for s in range(len(rows))]
        paired = zip(zip(*rows, strict=True), zip(*exact, strict=True), strict=True)
        return [list(zip(*columns, strict=True)) for columns in paired]

    def _excused(self, verdict: Verdict, ours: Any, full: Any) -> Verdict:
        """Allows for the error of float32, and for where that is non-finite."""
        limit = max(verdict.limit, FACTOR * self._error(full))
        if not np.isnan(verdict.ours) or any(map(_is_worse, ours, full)):
            return verdict._replace(limit=limit)
        return verdict._replace(ours=self._error(ours), limit=limit)


def _is_worse(ours: Any, other: Any) -> bool:
    """Whether a result is non-finite where it is not, nor another way to compute it."""
    fine = np.isfinite(ours[1]) & np.isfinite(other[0])
    return bool(np.any(fine & ~np.isfinite(ours[0])))


def _numbers(x: Any) -> Any:
    """Returns floats in float64, a complex number's parts apart; others as they are."""
    if is_key(x):
        return np.zeros(0)
    if np.issubdtype(x.dtype, np.complexfloating):
        return np.stack([x.real, x.imag]).astype(F64)
    whole = x.dtype == bool or np.issubdtype(x.dtype, np.integer)
    return x if whole else np.asarray(x, F64)
