"""A variable's value, and its float32 shadow."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_rewrite._diagnose.float32 import to_float32

ZERO = np.float32(0.0)

# Sums and choices of two operands, and how many operands they have.
_SUMS = {"add": 2, "add_any": 2, "select_n": 3, "sub": 2}


class Pair:
    """A variable's value and its shadow.

    Attributes:
      value: what the program computes.
      shadow: what it would be without any rounding; the same object where nothing was
        rounded yet.
      error: f32[], how far the two are apart.
      row: index of the row that made it; -1 for constants.
      gradient: the shadow of the gradient that it is made of element by element, behind
        the backward pass; None if there is none.
    """

    __slots__ = ("error", "gradient", "row", "shadow", "value")

    def __init__(
        self, value: Any, shadow: Any, error: Any = ZERO, row: int = -1
    ) -> None:
        self.value = value
        self.shadow = shadow
        self.error = error
        self.row = row
        self.gradient: Any = None

    @classmethod
    def same(cls, value: Any, row: int = -1) -> Pair:
        """Returns a value that nothing has rounded; a half one is its own shadow."""
        return cls(value, to_float32(value), row=row)

    @property
    def is_same(self) -> bool:
        """Whether the value is its own shadow."""
        return self.shadow is self.value

    def like(self, value: Any, shadow: Any, error: Any = None) -> Pair:
        """Returns a pair with other arrays: a slice, a stack, or what is traced.

        Args:
          value: the value.
          shadow: the shadow; None if it is the value.
          error: f32[]; None if it is the same.
        """
        shadow = value if shadow is None else shadow
        return Pair(value, shadow, self.error if error is None else error, self.row)

    def arrays(self) -> tuple[Any, Any]:
        """Returns the value, and the shadow or None, as `like` takes them."""
        return self.value, None if self.is_same else self.shadow


def terms(eqn: Any, operands: list[Pair]) -> list[Any]:
    """Returns the two terms of a sum or a choice, as `Measured` has them."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if len(operands) != _SUMS.get(name) or aval is None:
        return []
    if not jnp.issubdtype(aval.dtype, np.floating):
        return []
    if any(v.aval.shape != aval.shape for v in eqn.invars):
        return []
    pairs = [(p.value, p.shadow) for p in operands]
    if name == "select_n":
        (_, which), first, second = pairs
        if which.dtype != np.bool_ or not operands[0].is_same:
            return []
        return [(*first, ~which), (*second, which)]
    (x, shadow), (y, other) = pairs
    if name == "sub":
        y, other = -y, -other
    return [(x, shadow, None), (y, other, None)]
