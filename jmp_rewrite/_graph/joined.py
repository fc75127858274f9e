"""Sums of padded arrays that never meet: they add nothing up.

The gradient of what is read in slices is a sum of cotangents, each padded with zeros.
Where no two of them meet it is their concatenation, and what moves values has no
precision of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jmp_rewrite._graph.nodes import Value
from jmp_rewrite._rules import ADDS

# Start and end along each dimension; all outside is zero.
Box = tuple[tuple[int, int], ...]


class Padded:
    """The places that the padded arrays of a program fill.

    A part of an array, which a scan or a device reads, has places of its own.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, Any], tuple[Box, ...]] = {}

    def filled(
        self, eqn: Any, inputs: Sequence[Value], literals: Mapping[int, Any]
    ) -> tuple[Box, ...]:
        """Returns the places that a result fills; none if that is not known.

        Of a sum they are known if no two of its terms meet.
        """
        name = eqn.primitive.name
        if name == "pad" and literals.get(1) == 0.0:
            return _of_pad(eqn)
        if name in ADDS and len(inputs) == 2:
            places = ((v.node, v.aval.shape) for v in inputs)
            first, second = (self._boxes.get(place, ()) for place in places)
            if first and second and not any(_meet(a, b) for a in first for b in second):
                return first + second
        return ()

    def remember(self, node: int, eqn: Any, boxes: tuple[Box, ...]) -> None:
        """Keeps what a node's result fills."""
        if boxes:
            self._boxes[node, eqn.outvars[0].aval.shape] = boxes


def _of_pad(eqn: Any) -> tuple[Box, ...]:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not all(isinstance(n, int) for n in (*before, *after)):
        return ()
    ends = ((low, n - high) for n, (low, high, _) in
            zip(after, eqn.params["padding_config"], strict=True))  # fmt: skip
    return (tuple(ends),)


def _meet(a: Box, b: Box) -> bool:
    """Whether two boxes have a place in common."""
    return all(s < f and e < g for (s, g), (e, f) in zip(a, b, strict=True))
