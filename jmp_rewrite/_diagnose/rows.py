"""What is kept of a run with shadows: rows of equations, and what was counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_rewrite._diagnose.counts import WIDTH, joined
from jmp_rewrite._diagnose.distance import BINS
from jmp_rewrite._graph import Place
from jmp_rewrite._source import Caller


@dataclasses.dataclass(slots=True)
class Row:
    """An equation that was run, or a cast that the rewrite has put in.

    Attributes:
      eqn: the equation; None for an argument.
      caller: the equation whose jaxpr holds it.
      place: where it stands.
      reads: the rows that made its operands.
      kind: "equation", "argument", "cast", "carry" (what an iteration receives) or
        "branches" (the two programs may take different branches, or leave a loop at
        different times).
      dtype: what the rewritten program computes or rounds it in.
      is_half: whether that is a half dtype.
      terms: of a sum or a choice of two operands, the rows that made them; -1 for one
        that both programs have.
      of: for a cast the row that made the value; for an argument its number.
      carried: for a carry the row that made what an iteration hands on.
      reader: for a cast the equation that asked for it; None if nobody knows.
      reader_scope: its scope.
    """

    eqn: Any
    caller: Caller | None
    place: Place
    reads: tuple[int, ...]
    kind: str = "equation"
    dtype: str = ""
    is_half: bool = False
    terms: tuple[int, ...] = ()
    of: int = -1
    carried: int = -1
    reader: Caller | None = None
    reader_scope: str = ""


class Frame:
    """What was counted while one jaxpr ran.

    Attributes:
      blocks: (rows, counts, where) of one equation (f32[WIDTH], None) or of a loop's
        body (f32[n, WIDTH], i32[n, depth]), as `counts.joined` has them.
      exponents: f32[BINS], of the products of the backward pass.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[list[int], Any, Any]] = []
        self.exponents: list[Any] = []

    @property
    def rows(self) -> list[int]:
        """The row of each line of `arrays`; one that ran twice is there twice."""
        return [row for rows, _, _ in self.blocks for row in rows]

    def arrays(self, xp: Any = jnp) -> tuple[Any, Any, Any]:
        """Returns f32[n, WIDTH], i32[n, depth] and f32[BINS], of JAX or NumPy."""
        blocks = [(c, w) for _, c, w in self.blocks]
        if xp is np:
            blocks = jax.device_get(blocks)
        # XLA of JAX 0.11 dies of arrays without elements that a `shard_map` holds.
        depth = max([1, *(w.shape[1] for _, w in blocks if w is not None)])
        counts = [xp.zeros((0, WIDTH), np.float32)]
        where = [xp.zeros((0, depth), np.int32)]
        for own, loops in blocks:
            counts.append(own.reshape(-1, WIDTH))
            if loops is None:
                where.append(np.full((1, depth), -1, np.int32))
                continue
            missing = depth - loops.shape[1]
            where.append(xp.pad(loops, ((0, 0), (0, missing)), constant_values=-1))
        exponents = sum(self.exponents, xp.zeros(BINS, np.float32))
        return xp.concatenate(counts), xp.concatenate(where), exponents

    def add_iterations(self, frames: Mapping[int, Frame]) -> None:
        """Adds what was counted in the iterations of a loop: iteration -> frame."""
        known: dict[int, tuple[Any, Any]] = {}
        for iteration, frame in frames.items():
            counts, where, exponents = frame.arrays(np)
            self.exponents.append(exponents)
            here = np.full((len(where), 1), iteration, np.int32)
            there = np.concatenate([where, here], axis=1)
            for row, *own in zip(frame.rows, counts, there, strict=True):
                known[row] = _together(known.get(row), *own)
        if known:
            counts, where = zip(*known.values(), strict=True)
            depth = max(map(len, where))
            padded = [_deeper(w, depth) for w in where]
            self.blocks.append((list(known), np.stack(counts), np.stack(padded)))

    def by_row(self) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """Returns the counts and iterations of each row, and the exponents.

        They are f32[WIDTH], i32[depth] and f32[BINS].
        """
        known: dict[int, tuple[Any, Any]] = {}
        counts, where, exponents = self.arrays(np)
        for row, *own in zip(self.rows, counts, where, strict=True):
            known[row] = _together(known.get(row), *own)
        return known, exponents


def _together(known: Any, counts: Any, where: Any) -> tuple[Any, Any]:
    """Adds what was counted for one row in another iteration, maybe in deeper loops."""
    if known is None:
        return counts, where
    depth = max(len(known[1]), len(where))
    return joined(known[0], _deeper(known[1], depth), counts, _deeper(where, depth))


def _deeper(where: Any, depth: int) -> Any:
    """Pads iterations for a loop that a row is not in."""
    return np.pad(where, (0, depth - len(where)), constant_values=-1)
