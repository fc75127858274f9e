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
# A value is the same but for a number behind these, if they read nothing else.
_SCALES = (MOVES - {"carry_in", "join"}) | {"div", "mul", "neg"}
# A sum of more values is followed no further back.
_MOST_TERMS = 64


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


def differences(graph: Graph, made: set[int], small: set[int]) -> dict[int, int]:
    """Returns the nodes that a difference reads unrounded, and that difference.

    Both operands are float32 by JAX's promotion, or one still holds the exact value
    that was added to it, and the other is exact. So is what they are made of, back to
    the matrix multiplications.

    Args:
      graph: the program.
      made: the nodes that have a matrix multiplication upstream.
      small: statistics, which a normalization subtracts from what they are of.
    """
    promoted, offset = _promoted(graph, made), _holds_offset(graph, made)
    found: dict[int, int] = {}
    for node in graph.nodes:
        if not _is_difference(node, graph):
            continue
        if any(_spreads(v, graph, small) for v in node.inputs):
            continue
        for held in (promoted, offset):
            if _cancels(node, held, made, alone=held is offset):
                _follow_back(node, held, graph, found)
    return found


def sums_with_exact(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that an exact array of their size is added to.

    A rounding would be one of that array as well: it comes before the sum.
    """

    def is_exact(value: Value, size: int) -> bool:
        own = value.node not in made and value.made_of_data and not is_zero(value)
        return own and value.size == size

    return {
        n.index
        for n in graph.nodes
        if n.name in ("add", "sub") and n.index in made and not is_backward(n)
        if any(is_exact(v, n.size) for v in n.inputs)
    }


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


def _promoted(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that are float32 by JAX's promotion, as by hand.

    An exact array stands beside the half result of a matrix multiplication in what they
    are computed from, so that by hand their differences are of unrounded values.
    """
    promoted: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals or node.name in PRODUCTS:
            continue
        sources = [v.node for v in node.inputs if v.aval.shape]
        if any(n not in made or n in promoted for n in sources):
            promoted.add(node.index)
    return promoted


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


def _is_difference(node: Node, graph: Graph) -> bool:
    """Whether a node subtracts, or adds a value and the negative of it.

    A backward pass adds up cotangents, of which that of a subtracted value is negated.
    """
    if len(node.inputs) + len(node.literals) < 2:
        return False
    if node.name not in ("add", "add_any") or not is_backward(node):
        return node.name == "sub"
    if len(node.inputs) < 2:
        return False
    first, second = (_terms(v, graph) for v in node.inputs)
    return any(second.get(n) == -sign for n, sign in first.items())


def _terms(value: Value, graph: Graph) -> dict[int, int]:
    """Returns the nodes that a value is a sum of, scaled and moved, with their signs.

    Itself is one of them.
    """
    found = {value.node: 1}
    stack = [value.node] if value.node >= 0 else []
    while stack and len(found) < _MOST_TERMS:
        index = stack.pop()
        node, sign = graph.nodes[index], found[index]
        is_scaled = node.name in _SCALES and len(node.inputs) == 1
        if not is_scaled and node.name not in _SUMS:
            continue
        is_factor = is_scaled and any(np.any(x < 0) for x in node.literals.values())
        if node.name == "neg" or is_factor:
            sign = -sign
        for position, read in enumerate(node.inputs):
            if read.node >= 0 and read.node not in found:
                is_taken = node.name == "sub" and (position or 0 in node.literals)
                found[read.node] = -sign if is_taken else sign
                stack.append(read.node)
    found.pop(-1, None)
    return found


def _cancels(node: Node, held: set[int], made: set[int], alone: bool) -> bool:
    """Whether a difference is of two of these values.

    Args:
      node: the difference.
      held: the values.
      made: the nodes that have a matrix multiplication upstream.
      alone: whether an exact value, or a number, will do for one of them.
    """
    count = sum(v.node in held for v in node.inputs)
    exact = any(v.node not in made and not is_zero(v) for v in node.inputs)
    exact |= any(node.literals.values())
    return count == 2 or (alone and count == 1 and exact)


def _spreads(value: Value, graph: Graph, small: set[int]) -> bool:
    """Whether a value is a statistic, spread over what it is subtracted from."""
    while value.node >= 0 and value.node not in small:
        node = graph.nodes[value.node]
        is_view = node.name in MOVES or node.name in ("broadcast_in_dim", "gather")
        if not is_view or len(node.inputs) != 1:
            return False
        (value,) = node.inputs
    return value.node in small
