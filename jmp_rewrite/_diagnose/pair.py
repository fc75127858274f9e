"""A variable's value in two programs that run side by side."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.float32 import to_float32, touches_half
from jmp_rewrite._emit.emit import Cell
from jmp_rewrite._graph.nodes import FLOAT32

ZERO = np.float32(0.0)

# Sums and choices of two operands, and how many operands they have.
_SUMS = {"add": 2, "add_any": 2, "select_n": 3, "sub": 2}


class Pair(Cell):
    """A variable's value in the rewritten program and in the reference.

    Attributes:
      reference: the reference's value; the same object where nothing was rounded yet.
      error: f32[], its error.
      row: index of the row that made it; -1 for constants.
      half_error: the error of its rounded copy.
      half_row: the row of the cast that made the copy; -1 if none.
    """

    __slots__ = ("error", "half_error", "half_row", "reference", "row")

    def __init__(
        self,
        value: Any,
        reference: Any,
        error: Any = ZERO,
        row: int = -1,
    ) -> None:
        super().__init__(value)
        self.reference = reference
        self.error = error
        self.row = row
        self.half_error: Any = ZERO
        self.half_row = -1

    @classmethod
    def same(cls, value: Any, row: int = -1) -> Pair:
        """Returns a value that both programs have; the reference holds no half."""
        return cls(value, to_float32(value), row=row)

    @property
    def is_same(self) -> bool:
        """Whether both programs have the very same array."""
        return self.reference is self.value

    def copy(self) -> Pair:
        """Returns the pair for another jaxpr, whose casts are not to be kept here."""
        new = Pair(self.value, self.reference, self.error, self.row)
        new.half, new.half_error = self.half, self.half_error
        new.half_row = self.half_row
        return new

    def like(self, value: Any, reference: Any, error: Any = None) -> Pair:
        """Returns a pair with other arrays: a slice, a stack, or what is traced.

        Args:
          value: the value.
          reference: the reference's; None if it is the value.
          error: f32[]; None if it is the same.
        """
        reference = value if reference is None else reference
        error = self.error if error is None else error
        return Pair(value, reference, error, self.row)

    def arrays(self) -> tuple[Any, Any]:
        """Returns the value, and the reference or None, as `like` takes them."""
        return self.value, None if self.is_same else self.reference

    def read_as(self, value: Any) -> tuple[Any, int]:
        """Returns the error and the row of what was read: the value or its copy."""
        rounded = value is self.half and self.half_row >= 0
        return (self.half_error, self.half_row) if rounded else (self.error, self.row)


def pair_of(cell: Cell) -> Pair:
    """Returns a cell as a pair; one that is none holds a constant."""
    return cell if isinstance(cell, Pair) else Pair.same(cell.value)


def are_shared(eqn: Any, operands: list[Pair]) -> bool:
    """Tells whether an equation has the same results in both programs."""
    if touches_half(eqn) or not all(p.is_same for p in operands):
        return False
    return not any(_compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars))


def terms(eqn: Any, operands: list[Pair], native: bool) -> list[Any]:
    """Returns the two terms of a sum or a choice, as `Measured` has them.

    Args:
      eqn: the equation.
      operands: its operands.
      native: whether it reads their half copies.
    """
    name, aval = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if len(operands) != _SUMS.get(name) or aval is None:
        return []
    if not jnp.issubdtype(aval.dtype, np.floating):
        return []
    if any(v.aval.shape != aval.shape for v in eqn.invars):
        return []
    own = [(p.half if native and p.half is not None else p.value) for p in operands]
    pairs = [(x, p.reference) for x, p in zip(own, operands, strict=True)]
    if name == "select_n":
        (_, which), first, second = pairs
        if which.dtype != np.bool_ or not operands[0].is_same:
            return []
        return [(*first, ~which), (*second, which)]
    (x, reference), (y, other) = pairs
    if name == "sub":
        y, other = -y, -other
    return [(x, reference, None), (y, other, None)]


def as_computed(eqn: Any, operands: list[Pair], native: bool) -> list[Any]:
    """Returns the operands of an equation as it had them, in float32.

    A literal is the number that was written: rounding it is the equation's own doing.
    """
    values = []
    for atom, pair in zip(eqn.invars, operands, strict=True):
        rounded = native and pair.half is not None and atom.aval.dtype == FLOAT32
        values.append(to_float32(pair.half if rounded else pair.value))
    return values
