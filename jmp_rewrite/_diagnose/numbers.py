"""The numbers that emission has rounded: what a half literal was before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from jmp_rewrite._graph import FLOAT32


class Numbers:
    """The float32 numbers of a program, known by the equations that read them.

    An equation and what was emitted for it have one traceback.
    """

    def __init__(self, nodes: Iterable[Any] = ()) -> None:
        """Collects the numbers that nodes of a graph read."""
        self._known: dict[int, set[float]] = {}
        self._eqns: list[Any] = []  # kept, since tracebacks are known by their number
        for node in nodes:
            if node.literals and node.eqn is not None:
                self._eqns.append(node.eqn)
                own = self._known.setdefault(id(node.eqn.source_info.traceback), set())
                own.update(map(float, node.literals.values()))

    def unrounded(self, eqn: Any, half: Any) -> np.ndarray | None:
        """Returns the number that a half literal of an equation was; None if it is it.

        Args:
          eqn: an equation of the rewritten program.
          half: the literal's value, of a half dtype.
        """
        value = np.asarray(half)
        exact = np.asarray(value, FLOAT32)
        largest = float(ml_dtypes.finfo(value.dtype).max)
        known = self._known.get(id(eqn.source_info.traceback), ())
        if float(exact) in known:
            return None
        for number in known:
            clipped = np.clip(number, -largest, largest)
            if np.asarray(clipped, FLOAT32).astype(value.dtype) == value:
                return np.asarray(number, FLOAT32)
        return None
