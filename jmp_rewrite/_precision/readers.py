"""Values that are read unrounded: by code that multiplies an error.

Two kinds of code do, and neither is on the way to a matrix multiplication alone. Some
primitives are steep or jump: a decomposition, a sine, a cast to an integer. And a
difference of two values that an exact one was added to leaves the error that rounding
has put on the exact part: what is measured with an offset is rounded before the offset
is added, or not at all.
"""

from __future__ import annotations

import numpy as np

from jmp_rewrite._graph import Graph, Node, Value
from jmp_rewrite._precision.origins import (
    MOVES,
    is_backward,
    is_zero,
    leads_to_product,
)
from jmp_rewrite._rules import PRODUCTS, SHARP

# A sum with an exact value still holds it behind these.
_KEEPS_OFFSET = MOVES | {
    "broadcast_in_dim",
    "clamp",
    "dynamic_slice",
    "gather",
    "max",
    "min",
    "neg",
    "pad",
    "reduce_sum",
    "select_n",
    "slice",
}


_SUMS = frozenset({"add", "add_any", "sub"})
_TURNS = frozenset({"neg"})
# A mean of a value is no part of it: normalizations subtract it.
_MOVES_TERMS = _KEEPS_OFFSET - {"reduce_sum"}
# A sum of more values is followed no further back.
_MOST_TERMS = 256


def read_sharply(graph: Graph, products: set[int]) -> dict[int, int]:
    """Returns the nodes that a sharp primitive reads, and which one.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands, which end what is read.
    """
    found: dict[int, int] = {}
    for node in graph.nodes:
        if _is_sharp(node):
            read = leads_to_product(
                [node.index],
                graph.predecessors(),
                lambda n: n in found or n in products,
            )
            direct = _products_before(graph, [node.index, *read], products)
            for source in (*read, *direct):
                found.setdefault(source, node.index)
    return found


def _products_before(graph: Graph, nodes: list[int], products: set[int]) -> set[int]:
    reads = graph.predecessors()
    return {s for n in nodes for s in reads[n] if s in products}


def _is_sharp(node: Node) -> bool:
    if node.name != "convert_element_type":
        return node.name in SHARP
    if not node.inputs:
        return False
    return np.dtype(node.eqn.params["new_dtype"]).kind in "iu"


def offsets(graph: Graph, made: set[int], small: set[int]) -> dict[int, int]:
    """Returns the nodes that hold an offset that is subtracted again, and where.

    Args:
      graph: the program.
      made: the nodes that have a matrix multiplication upstream.
      small: statistics, which a normalization subtracts from what they are of.
    """
    holds = _holds_offset(graph, made)
    mixed = _mixed(graph, made)
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.name not in _SUMS or len(node.inputs) + len(node.literals) < 2:
            continue
        for source in _added_between(node, graph, made):
            found.setdefault(source, node.index)
        if any(_spreads(v, graph, small) for v in node.inputs):
            continue
        if node.name != "sub":
            continue
        if _cancels(node, holds, made):
            _follow_back(node, holds, graph, found)
        if len(node.inputs) == 2 and all(v.node in mixed for v in node.inputs):
            _follow_back(node, mixed, graph, found)
    return found


def summed_gradients(graph: Graph, made: set[int], useful: set[int]) -> dict[int, int]:
    """Returns the cotangents that a returned gradient is a sum of, and that sum.

    They may cancel, as those of a difference of near values do, and the sum is stored
    in float32 anyway. A gradient that is summed over a batch is none of these: there
    the roundings average out.

    Args:
      graph: the program.
      made: the nodes that have a matrix multiplication upstream.
      useful: the nodes that lead to a matrix multiplication.
    """
    found: dict[int, int] = {}
    returned = {v.node for v in graph.results}
    for node in reversed(graph.nodes):
        if node.index not in returned or node.index in useful:
            continue
        if not is_backward(node) or node.name not in _SUMS | _TURNS | MOVES:
            continue
        size = node.size
        read = [v.node for v in node.inputs if v.size == size]
        returned.update(n for n in read if n >= 0)
        if node.name in _SUMS and all(n in made for n in read) and len(read) > 1:
            _follow_back(node, made & _backward_sums(graph, read), graph, found)
    return found


def _backward_sums(graph: Graph, starts: list[int]) -> set[int]:
    """Returns these nodes, and what they are sums of, moved and turned."""
    found = set(starts)
    stack = list(found)
    while stack:
        node = graph.nodes[stack.pop()]
        if node.name in _SUMS | _TURNS | MOVES:
            new = {v.node for v in node.inputs if v.node >= 0} - found
            found |= new
            stack += new
    return {n for n in found if is_backward(graph.nodes[n])}


def _follow_back(
    node: Node, among: set[int], graph: Graph, found: dict[int, int]
) -> None:
    """Adds the nodes among these that lead to a difference."""
    stack = [v.node for v in node.inputs if v.node in among]
    while stack:
        source = stack.pop()
        if source not in found:
            found[source] = node.index
            stack += [v.node for v in graph.nodes[source].inputs if v.node in among]


def _mixed(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that are float32 by JAX's promotion, as by hand.

    An exact array stands beside the half result of a matrix multiplication in what they
    are computed from, so that by hand their differences are of unrounded values.
    """
    mixed: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals or node.name in PRODUCTS:
            continue
        sources = [v.node for v in node.inputs if v.aval.shape]
        if any(n not in made or n in mixed for n in sources):
            mixed.add(node.index)
    return mixed


def _holds_offset(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that an exact value was added to, with no end between."""

    def is_exact(value: Value) -> bool:
        return value.node not in made and not is_zero(value)

    holds: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals:
            continue
        exact = any(map(is_exact, node.inputs)) or any(node.literals.values())
        held = any(v.node in holds for v in node.inputs)
        if node.name in ("add", "sub"):
            on = exact or held
        elif node.name in ("mul", "div"):
            others = [v for v in node.inputs if v.node not in holds]
            on = held and all(map(is_exact, others))
        else:
            on = held and node.name in _KEEPS_OFFSET
        if on:
            holds.add(node.index)
    return holds


def _added_between(node: Node, graph: Graph, made: set[int]) -> set[int]:
    """Returns the sums with a value that a difference takes out of them again."""
    operands = [v.node for v in node.inputs if v.node in made]
    if len(operands) < 2:
        return set()
    first, second = _terms_of_both(operands[0], operands[1], graph, made)
    sign = -1 if node.name == "sub" else 1
    common = {n for n, s in first.items() if -s * sign == second.get(n)}
    inside = first.keys() | second.keys()
    consumers = graph.consumers()
    found: set[int] = set()
    seen = set(common)
    stack = list(common)
    while stack:
        source = stack.pop()
        for reader in consumers[source]:
            is_sum = graph.nodes[reader].name in _SUMS or source in found
            if reader not in inside or reader in found or reader in common:
                continue
            if is_sum:
                found.add(reader)
            elif reader in seen:
                continue
            seen.add(reader)
            stack.append(reader)
    return found


def _terms_of_both(
    one: int, other: int, graph: Graph, made: set[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the terms of two values, as far back as they may have one in common.

    A residual stream is a long sum, and what is added to it mostly none. In a loop a
    carry reads what comes after it.
    """
    if graph.loops:
        return _terms(one, graph, made), _terms(other, graph, made)
    late, early = max(one, other), min(one, other)
    of_late = _terms(late, graph, made)
    oldest = min(of_late)
    of_early = _terms(early, graph, made, oldest) if oldest <= early else {early: 1}
    return (of_late, of_early) if one == late else (of_early, of_late)


def _terms(node: int, graph: Graph, made: set[int], oldest: int = 0) -> dict[int, int]:
    """Returns the values that a value is a sum of, scaled and moved, with their signs.

    Itself is one of them, and what comes before `oldest` is none.
    """
    found = {node: 1}
    stack = [node]
    while stack and len(found) < _MOST_TERMS:
        index = stack.pop()
        reads = graph.nodes[index]
        sign = found[index]
        if reads.name in ("mul", "div"):
            if sum(v.node in made for v in reads.inputs) > 1:
                continue
            if any(np.any(number < 0) for number in reads.literals.values()):
                sign = -sign
        elif reads.name not in _MOVES_TERMS | _SUMS:
            continue
        for position, value in enumerate(reads.inputs):
            is_new = value.node >= oldest and value.node not in found
            if is_new and value.node in made:
                is_taken = reads.name == "sub" and (position or 0 in reads.literals)
                turns = reads.name == "neg" or is_taken
                found[value.node] = -sign if turns else sign
                stack.append(value.node)
    return found


def _cancels(node: Node, holds: set[int], made: set[int]) -> bool:
    """Whether a difference is one of two values with an exact part."""
    held = [v for v in node.inputs if v.node in holds]
    exact = [v for v in node.inputs if v.node not in made and not is_zero(v)]
    return len(held) == 2 or (
        len(held) == 1 and (bool(exact) or any(node.literals.values()))
    )


def _spreads(value: Value, graph: Graph, small: set[int]) -> bool:
    """Whether a value is a statistic, spread over what it is subtracted from."""
    while value.node >= 0 and value.node not in small:
        node = graph.nodes[value.node]
        is_view = node.name in MOVES or node.name in ("broadcast_in_dim", "gather")
        if not is_view or len(node.inputs) != 1:
            return False
        (value,) = node.inputs
    return value.node in small
