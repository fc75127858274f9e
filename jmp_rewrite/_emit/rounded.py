"""Which values of an emitted program are read rounded alone, through moves as well.

Rounding commutes with what moves values: a slice of a rounded array is the rounded
slice. So a value that nothing reads before it is rounded may be stored in half, with
the same results to the last bit: a weight that products read, a key-value cache that is
updated in place. Nothing is judged here; the program says where it rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph import FLOAT32, JOINTS, Graph, Node, Value, is_float32
from jmp_rewrite._rules import PRODUCTS, SELECTS

_CAST = "convert_element_type"
# A value is told by its node; an argument and a result of the program are nodes, too.
RETURNED = None


def argument(number: int) -> int:
    """Returns the number of an argument in place of a node's."""
    return -1 - number


def node_of(value: Value) -> int | None:
    """Returns the node of a value, or what stands for its argument; else None."""
    if value.node >= 0:
        return value.node
    return argument(value.argument) if value.argument >= 0 else None


def is_cast(node: Node, half: np.dtype) -> bool:
    """Whether a node rounds a float32 value to half."""
    return (
        node.eqn is not None
        and node.eqn.primitive.name == _CAST
        and node.eqn.params["new_dtype"] == half
        and bool(node.inputs)
    )


def is_widened(node: Node, half: np.dtype) -> bool:
    """Whether a node makes float32 of a half value, which rounding gives back."""
    if node.eqn is None or node.eqn.primitive.name != _CAST:
        return False
    return bool(node.eqn.invars[0].aval.dtype == half)


class Roundings:
    """What is rounded where it is made, and read by matrix multiplications alone.

    On some devices a pass lets other code read what is not rounded yet.
    """

    def __init__(self, graph: Graph) -> None:
        self._readers: dict[Any, list[Any]] = {}
        for use in graph.uses():
            body = _compat.open_jaxpr(use.jaxpr)
            for atom in body.outvars:
                self._readers.setdefault(_key(atom), []).append(None)
            for eqn in body.eqns:
                for atom in eqn.invars:
                    self._readers.setdefault(_key(atom), []).append(eqn)

    def __contains__(self, node: Node) -> bool:
        if node.eqn is None or node.eqn.primitive.name != "rounding":
            return False
        if node.eqn.params["into"] is not None:
            return False
        stack = [*node.eqn.outvars]
        while stack:
            for eqn in self._readers.get(_key(stack.pop()), ()):
                if eqn is None:
                    return False
                name = eqn.primitive.name
                if name in SELECTS:
                    stack += eqn.outvars
                elif name not in PRODUCTS and name != "custom_jvp_call":
                    return False
        return True


def _key(atom: Any) -> Any:
    """Returns a variable, or one name for all literals."""
    return None if hasattr(atom, "val") else atom


def is_move(node: Node, half: np.dtype) -> bool:
    """Whether a node's results are elements of its operands, in any dtype."""
    if node.name in JOINTS:
        return True
    name = node.eqn.primitive.name
    if name not in SELECTS | {_CAST} or not node.avals or node.mixed:
        return False
    if name == "scatter" and node.eqn.params.get("update_jaxpr") is not None:
        return False
    numbers = [float(np.asarray(n)) for n in node.literals.values()]
    fill = node.eqn.params.get("fill_value")
    numbers += [] if fill is None else [float(fill)]
    return all(_is_kept(n, half) for n in numbers)


def _is_kept(number: float, half: np.dtype) -> bool:
    """Whether rounding a number is no matter of how it is rounded."""
    with np.errstate(all="ignore"):
        rounded = float(np.asarray(number, FLOAT32).astype(half))
    return rounded == number or math.isnan(number)


def results_of(graph: Graph) -> dict[int, Value]:
    """Returns the float32 results of a program by their numbers."""
    outvars = _compat.open_jaxpr(graph.top.jaxpr).outvars
    numbers = [i for i, v in enumerate(outvars) if is_float32(v.aval)]
    return dict(zip(numbers, graph.results, strict=True))


class Unrounded:
    """What is read in float32, and by what.

    Attributes:
      readers: node, or what stands for an argument -> the node that reads it before it
        is rounded; `RETURNED` for one that the program returns.
      read: all that is read at all.
    """

    def __init__(
        self, graph: Graph, half: np.dtype, kept: Mapping[int, int] | None = None
    ) -> None:
        """Finds them.

        Args:
          graph: the emitted program.
          half: the compute dtype.
          kept: number of a result -> the argument whose place it takes in the next
            call, so that it may be returned as that one is stored.
        """
        self._graph = graph
        self._kept: dict[int, list[int]] = {}
        self.readers: dict[int, int | None] = {}
        self.read = {
            s for n in graph.nodes for v in n.inputs if (s := node_of(v)) is not None
        }
        found: list[tuple[int, int | None]] = []
        for number, value in results_of(graph).items():
            source = node_of(value)
            if source is None:
                continue
            self.read.add(source)
            if kept is not None and number in kept:
                self._kept.setdefault(argument(kept[number]), []).append(source)
            else:
                found.append((source, RETURNED))
        roundings = Roundings(graph)
        for node in graph.nodes:
            is_exact = is_cast(node, half) or is_move(node, half)
            if not is_exact and node not in roundings:
                found += [(s, node.index) for s in _sources(node)]
        self._spread(found)

    def _spread(self, found: Iterable[tuple[int, int | None]]) -> None:
        """What moves a value that is read unrounded reads one as well."""
        stack = list(found)
        while stack:
            source, reader = stack.pop()
            if source in self.readers:
                continue
            self.readers[source] = reader
            if source >= 0:
                moved = _sources(self._graph.nodes[source])
                stack += [(s, reader) for s in moved if self._moves(source)]
            stack += [(s, reader) for s in self._kept.get(source, ())]

    def _moves(self, node: int) -> bool:
        """Whether a node hands its operands on as they are."""
        made = self._graph.nodes[node]
        return made.name in JOINTS or made.eqn.primitive.name in SELECTS | {_CAST}

    def __contains__(self, source: int | None) -> bool:
        return source is None or source in self.readers


def _sources(node: Node) -> list[int]:
    return [s for v in node.inputs if (s := node_of(v)) is not None]
