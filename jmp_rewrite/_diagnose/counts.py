"""What is counted for an equation, and how the iterations of a loop add up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Counts(NamedTuple):
    """What is counted for an equation; reduced over the iterations of a loop.

    Attributes:
      error: of its results against the reference, 0..1, or 2..3 with Inf or NaN: the
        mean of the elements' own relative errors, or that of the norm if it is larger.
      appeared: what of it is more than the operands' errors explain (`ORDINARY`).
      introduced: error against the same equation in float32 on its own operands.
      overflowed: elements that became Inf or NaN here and would not in float32.
      underflowed: elements that became zero here and would not in float32.
      nonfinite: elements that are Inf or NaN and are finite in the reference.
      zeroed: elements that are zero and are not zero in the reference.
      nonfinite_before: elements that are Inf or NaN in the reference itself.
      size: elements; of a large array a sample tells the counts, but for Inf and NaN.
      largest: the largest finite magnitude in the reference.
      left: of a sum or a choice of two operands, the error that the first one alone
        brings; otherwise `UNKNOWN`.
      right: the same of the second.
    """

    error: float = 0.0
    appeared: float = 0.0
    introduced: float = 0.0
    overflowed: float = 0.0
    underflowed: float = 0.0
    nonfinite: float = 0.0
    zeroed: float = 0.0
    nonfinite_before: float = 0.0
    size: float = 0.0
    largest: float = 0.0
    left: float = 0.0
    right: float = 0.0


WIDTH = len(Counts._fields)
_APPEARED = Counts._fields.index("appeared")
_MAXIMA = {"appeared", "error", "introduced", "largest", "left", "right"}
IS_MAXIMUM = np.array([f in _MAXIMA for f in Counts._fields])
# More than any error: what nobody has measured.
UNKNOWN = 4.0
# What Inf and NaN add to an error.
SPOILT = 2.0
# Equations make errors of their operands larger: a sum by cancellation, a quotient by
# as much as its divisor. Up to so many times that is nobody's fault: in a transformer's
# step under a bfloat16 policy nothing but its optimizer's first step exceeds it.
ORDINARY = 8.0


def joined(
    counts: Any, where: Any, new: Any, new_where: Any, xp: Any = np
) -> tuple[Any, Any]:
    """Adds what was counted in an iteration of a loop to what was counted before.

    Args:
      counts: f32[..., 12].
      where: i32[..., d], the iterations in which most error appeared, of this loop the
        last one.
      new: f32[..., 12], of this iteration.
      new_where: i32[..., d].
      xp: NumPy or JAX.
    """
    worse = new[..., _APPEARED] > counts[..., _APPEARED]
    together = xp.where(IS_MAXIMUM, xp.maximum(counts, new), counts + new)
    return together, xp.where(worse[..., None], new_where, where)
