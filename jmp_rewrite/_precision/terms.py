"""What sums are made of: their terms, and what both operands of one share."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Set as AbstractSet

import numpy as np

from jmp_rewrite._graph import EITHER, Graph, Node, Value, is_backward
from jmp_rewrite._precision.origins import MOVES, VIEWS
from jmp_rewrite._rules import COPIES, LOGARITHMS, PICKS, PRODUCTS, SUMS

# A sum with an exact value still holds it, moved, picked or averaged.
KEEPS_OFFSET = MOVES | COPIES | PICKS | {"neg", "reduce_sum", "reduce_window_sum"}
PARTS = VIEWS | {"slice"}
# A value is the same but for a number behind these, if they read nothing else.
SCALES = (MOVES - EITHER - {"split", "unstack"}) | {"div", "mul", "neg"}
# An error relative to what these read is one of their result, or a larger one.
_RELATIVE = LOGARITHMS | {"atan2", "cbrt", "pow", "rsqrt", "sqrt"}
# A sum of more values is followed no further back.
MOST_TERMS = 64
# Linear in a cotangent; a product is in the factor that is one.
_FACTORS = PRODUCTS | {"div", "mul"}
_SLICES = frozenset({"slice", "split", "unstack"})
_LINEAR = (
    MOVES
    | SUMS
    | _FACTORS
    | {
        "broadcast_in_dim",
        "gather",
        "neg",
        "pad",
        "reduce_sum",
        "scatter-add",
        "scatter-sub",
        "select_n",
        "slice",
        "tile",
    }
)


def on_the_way_to_shared(node: Node, graph: Graph) -> set[int]:
    """Returns the sums through which both operands of a difference hold one term.

    A sum of a cotangent and of its negative is such a difference, too.
    """
    first, second = (terms_of(v, graph) for v in node.inputs)
    turn = 1 if node.name == "sub" else -1
    shared = {n for n, sign in first.items() if second.get(n) == turn * sign}
    return {n for n, _ in (first | second).keys() - shared} if shared else set()


def terms_of(value: Value, graph: Graph) -> dict[tuple[int, int], int]:
    """Returns what a value is a sum of, scaled and moved: node, result and sign.

    Itself is one of them.
    """
    if value.node < 0:
        return {}
    found = {(value.node, value.result): 1}
    stack = list(found)
    while stack and len(found) < MOST_TERMS:
        term = stack.pop()
        node, sign = graph.nodes[term[0]], found[term]
        is_scaled = node.name in SCALES and len(node.inputs) == 1
        if not is_scaled and node.name not in SUMS | EITHER | {"reduce_sum"}:
            continue
        is_factor = is_scaled and any(np.any(x < 0) for x in node.literals.values())
        if node.name == "neg" or is_factor:
            sign = -sign
        for position, read in enumerate(node.inputs):
            key = read.node, read.result
            if read.node >= 0 and key not in found:
                is_taken = node.name == "sub" and (position or 0 in node.literals)
                found[key] = -sign if is_taken else sign
                stack.append(key)
    return found


def between_cotangents(node: Node, graph: Graph, ends: set[int]) -> set[int]:
    """Returns what is made of one cotangent, to be added to its negative.

    A variance that is computed as the difference of two means hands such a cotangent to
    both of them. What they make of it cancels where the values are near their mean.
    """
    first, second = (_shares(v, graph, ends) for v in node.inputs)
    turn = 1 if node.name == "sub" else -1
    shared = {x[0] for x, sign in first.items() if second.get(x) == turn * sign}
    found: set[int] = set()
    for index in sorted({x[0] for x in (*first, *second)} - shared):
        reads = {v.node for v in graph.nodes[index].inputs}
        if not reads.isdisjoint(found | shared):
            found.add(index)
    return found


def turned_cotangents(graph: Graph) -> set[int]:
    """Returns the cotangents that are linear in the negative of another one."""
    found: set[int] = set()
    for node in graph.nodes:
        if is_backward(node) and node.name in _LINEAR:
            turns = node.name in ("neg", "sub") or any(
                np.any(x < 0) for x in node.literals.values()
            )
            if turns or any(v.node in found for v in node.inputs):
                found.add(node.index)
    return found


def _shares(
    value: Value, graph: Graph, ends: set[int]
) -> dict[tuple[int, int, tuple[Hashable, ...]], int]:
    """Returns the cotangents that a value is linear in, up to an end, and their signs.

    Each is a node and which of its results, and the slices that were taken of it since.
    The signs of what it is multiplied by in the forward pass are not known.
    """
    nodes = graph.nodes
    found: dict[tuple[int, int, tuple[Hashable, ...]], int] = {}
    stack: list[tuple[Value, int, tuple[Hashable, ...]]] = [(value, 1, ())]
    while stack and len(found) < MOST_TERMS:
        read, sign, part = stack.pop()
        key = read.node, read.result, part
        if key in found or read.node < 0 or read.node in ends:
            continue
        node = nodes[read.node]
        if not is_backward(node):
            continue
        found[key] = sign
        reads = [v for v in node.inputs if _is_cotangent(v, graph)]
        if node.name not in _LINEAR or (node.name in _FACTORS and len(reads) > 1):
            continue
        is_factor = any(np.any(x < 0) for x in node.literals.values())
        if node.name == "neg" or (node.name in ("mul", "div") and is_factor):
            sign = -sign
        if node.name in _SLICES:
            part = (*part, (str(node.eqn.params), read.result))
        for v in reads:
            is_taken = node.name == "sub" and v.node == node.inputs[-1].node
            is_taken &= len(reads) > 1 or 0 in node.literals
            stack.append((v, -sign if is_taken else sign, part))
    return found


def _is_cotangent(value: Value, graph: Graph) -> bool:
    """Whether a backward pass makes a value; it moves some of the forward pass, too."""
    node = source_of(value, graph).node
    return node >= 0 and is_backward(graph.nodes[node])


def source_of(
    value: Value,
    graph: Graph,
    views: AbstractSet[str] = VIEWS,
) -> Value:
    """Returns what a value is a view of, or spread from, as a bias is over a batch."""
    while value.node >= 0:
        node = graph.nodes[value.node]
        if node.name not in views or len(node.inputs) != 1:
            break
        (value,) = node.inputs
    return value


def is_made_of(node: int, source: int, graph: Graph) -> bool:
    """Whether a node is made of another one in a few steps."""
    reads = graph.predecessors()
    found = [node]
    for index in found:
        found += [n for n in reads[index] if n not in found]
        if source in found or len(found) > MOST_TERMS:
            break
    return source in found


def takes_off_sum(node: Node, graph: Graph) -> bool:
    """Whether one of two terms is made of a sum over dimensions of the other one.

    Or of what the other one is scaled from, as `g / s` of a softmax that divides by s.
    """
    first, second = (v.node for v in node.inputs)
    return any(
        _is_sum_of(a, source, graph)
        for a, b in ((first, second), (second, first))
        for source in (b, _unscaled(b, graph))
    )


def _unscaled(index: int, graph: Graph) -> int:
    """Returns the cotangent of which a node is a multiple."""
    while graph.nodes[index].name in SCALES:
        read = {v.node for v in graph.nodes[index].inputs if v.node >= 0}
        found = [n for n in read if is_backward(graph.nodes[n])]
        if len(found) != 1:
            break
        (index,) = found
    return index


def _is_sum_of(node: int, source: int, graph: Graph) -> bool:
    """Whether a node is made of a sum over dimensions of another one."""
    reads = graph.predecessors()
    found = [node]
    for index in found:
        if graph.nodes[index].name == "reduce_sum" and is_made_of(index, source, graph):
            return True
        found += [n for n in reads[index] if n not in found and n != source]
        if len(found) > MOST_TERMS:
            break
    return False


def is_relative(node: Node, operand: int) -> bool:
    """Whether an error relative to an operand is one of the result, or a larger one."""
    if node.name == "div":
        return 1 not in node.literals and node.inputs[-1].node == operand
    if node.name == "integer_pow":
        return bool(node.eqn.params["y"] < 0)
    return node.name in _RELATIVE
