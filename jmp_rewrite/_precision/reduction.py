"""Gradients that are summed over devices in half, where a policy asks for it.

A partitioner reduces a matrix multiplication in the dtype of its result, so a gradient
of weights has a float32 result: it is summed over devices in float32, in twice the
bytes of what is written by hand. With `Policy(reduce_dtype=...)` the result is half,
and so are explicit sums over devices (`psum` and its kind, `reduce_scatter`) of
gradients, scaled or added up before. Parameters that are averaged over devices, other
state and metrics are no gradients. Each device still adds up its own part in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from jmp_rewrite._graph import JOINTS, Graph, Node, is_backward, reached
from jmp_rewrite._precision.differences import HOLDS_GRADIENT
from jmp_rewrite._precision.terms import SCALES
from jmp_rewrite._rules import (
    JOINS,
    PRODUCTS,
    SUMS,
    SUMS_OVER_DEVICES,
    Category,
    table,
)

_MULTIPLIES = PRODUCTS | {"div", "mul"}
_HANDS_ON = HOLDS_GRADIENT | JOINTS | JOINS | SUMS | {"select_n"}


def summed_in_half(
    graph: Graph,
    gradients: Iterable[int],
    useful: Collection[int],
    full: Sequence[str | None],
    half: np.dtype,
) -> frozenset[int]:
    """Returns the nodes whose results are summed over devices in half.

    Args:
      graph: a whole step.
      gradients: matrix multiplications of half operands that no other one follows.
      useful: the nodes that lead to a matrix multiplication; they are activations.
      full: why each node is float32: a sum may be for no reason but that it is one.
      half: the dtype. What float16 gradients are multiplied by may be the inverse of a
        loss scale: behind that they are too small for it.
    """
    nodes = graph.nodes
    after = reached((n.index for n in nodes if is_backward(n)), graph.consumers())
    after -= _made_of_others(graph, keeps_range=half != np.float16)
    sums = {
        n.index
        for n in nodes
        if n.name in SUMS_OVER_DEVICES
        and full[n.index] == f"full: {table.reason(n.name, Category.DENY)}"
        and n.index in after
        and n.index not in useful
        and _is_float32(n)
    }
    return frozenset(sums | {n for n in gradients if is_backward(nodes[n])})


def _made_of_others(graph: Graph, keeps_range: bool) -> set[int]:
    """Returns what is not linear in gradients alone: an argument, or their squares.

    That is told outside of backward passes alone. A number may scale a gradient, if it
    may be any (`keeps_range`).
    """
    nodes = graph.nodes

    def scales(number: int, reader: int) -> bool:
        is_one = nodes[number].size == 1 < nodes[reader].size
        return keeps_range and is_one and nodes[reader].name in SCALES

    edges = [
        [r for r in readers if not is_backward(nodes[r]) and not scales(n, r)]
        for n, readers in enumerate(graph.consumers())
    ]
    others = [
        n.index
        for n in nodes
        if not is_backward(n)
        if n.name not in _HANDS_ON
        or (n.name in _MULTIPLIES and sum(v.size > 1 for v in n.inputs) > 1)
        or any(v.node < 0 and v.made_of_data and v.size > 1 for v in n.inputs)
    ]
    return reached(others, edges)


def _is_float32(node: Node) -> bool:
    """Whether a sum is one of float32 arrays alone: 0-d values are never half."""
    is_all = len(node.inputs) == len(node.eqn.invars)
    return is_all and all(v.aval.shape for v in node.inputs)
