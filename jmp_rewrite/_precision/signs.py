"""Which values are known to be zero or positive.

A number that is added to them takes nothing off.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jmp_rewrite._graph import Graph, Node, Value
from jmp_rewrite._rules import COPIES

_ALWAYS = frozenset(
    {
        "abs",
        "acosh",
        "cosh",
        "erfc",
        "exp",
        "exp2",
        "logistic",
        "rsqrt",
        "sqrt",
        "square",
    }
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
    name, inputs = node.name, node.inputs
    if name in _ALWAYS:
        return True
    if name in _OF_SUCH:
        if (inputs or node.literals) and all(v.node in known for v in inputs):
            return all(map(_is_positive, node.literals.values()))
        return name == "mul" and len(inputs) == 2 and _is_square(*inputs)
    if name == "integer_pow":
        return bool(node.eqn.params["y"] % 2 == 0)
    if name == "max":
        of_number = any(map(_is_positive, node.literals.values()))
        return of_number or any(v.node in known for v in inputs)
    # Its smallest value comes first.
    return name == "clamp" and 0 in node.literals and _is_positive(node.literals[0])


def _is_square(first: Value, second: Value) -> bool:
    same = (first.node, first.result) == (second.node, second.result)
    return same and first.node >= 0


def _is_positive(number: Any) -> bool:
    return bool(np.all(number >= 0))
