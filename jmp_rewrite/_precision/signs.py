"""Which values are known to be zero or positive.

A number that is added to them takes nothing off.
"""

from __future__ import annotations

import numpy as np

from jmp_rewrite._graph import Graph, Node
from jmp_rewrite._rules import COPIES

_ALWAYS = frozenset(
    {"abs", "acosh", "cosh", "erfc", "exp", "exp2", "logistic", "rsqrt", "sqrt"}
)
# So are these, of values that are.
_OF_SUCH = COPIES | {
    "add",
    "add_any",
    "carry_out",
    "convert_element_type",
    "cumsum",
    "div",
    "dot_general",
    "log1p",
    "min",
    "mul",
    "reduce_max",
    "reduce_min",
    "reduce_precision",
    "reduce_sum",
    "scatter-add",
    "select_n",
    "stack_out",
    "tanh",
}


def nonnegative(graph: Graph) -> set[int]:
    """Returns the nodes that are never below zero, by what makes them."""
    found: set[int] = set()
    for node in graph.nodes:
        if _is_nonnegative(node, found):
            found.add(node.index)
    return found


def _is_nonnegative(node: Node, known: set[int]) -> bool:
    numbers = [bool(np.all(x >= 0)) for x in node.literals.values()]
    name = node.name
    if name in _ALWAYS or name == "square":
        return True
    if name == "integer_pow":
        return bool(node.eqn.params["y"] % 2 == 0)
    if name == "mul" and len(node.inputs) == 2:
        first, second = node.inputs
        if first.node >= 0 and (first.node, first.result) == (
            second.node,
            second.result,
        ):
            return True
    if name == "max":
        return any(numbers) or any(v.node in known for v in node.inputs)
    if name == "clamp":  # its smallest value comes first
        return 0 in node.literals and bool(np.all(node.literals[0] >= 0))
    of_such = all(v.node in known for v in node.inputs) and all(numbers)
    return name in _OF_SUCH and bool(node.inputs) and of_such
