"""Gradients that are summed over devices in half, where a policy asks for it.

A partitioner reduces a matrix multiplication in the dtype of its result, so a gradient
of weights has a float32 result: it is summed over devices in float32, in twice the
bytes of what is written by hand. With `Policy(reduce_dtype=...)` the result is half,
and so are explicit sums over devices (`psum` and its kind, `reduce_scatter`) of what a
backward pass has made. Each device still adds up its own part in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jmp_rewrite._graph import Graph, Node, is_backward, reached
from jmp_rewrite._rules import SUMS_OVER_DEVICES, Category, table


def summed_in_half(
    graph: Graph,
    gradients: Iterable[int],
    useful: Collection[int],
    full: Sequence[str | None],
) -> frozenset[int]:
    """Returns the nodes whose results are summed over devices in half.

    Args:
      graph: a whole step.
      gradients: matrix multiplications of half operands that no other one follows.
      useful: the nodes that lead to a matrix multiplication; they are activations.
      full: why each node is float32: a sum may be for no reason but that it is one.
    """
    nodes = graph.nodes
    after = reached((n.index for n in nodes if is_backward(n)), graph.consumers())
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


def _is_float32(node: Node) -> bool:
    """Whether a sum is one of float32 arrays alone: 0-d values are never half."""
    is_all = len(node.inputs) == len(node.eqn.invars)
    return is_all and all(v.aval.shape for v in node.inputs)
