"""Loops that wait for a difference smaller than the compute dtype resolves.

A fixed point is iterated until it moves by less than a tolerance. If a matrix
multiplication of half operands makes it, it may go on moving by half's last digit for
ever, whoever writes it. An integrator takes many small steps. Training until a loss is
small waits for no such difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes

from jmp_rewrite._graph import Graph, Loop, Node, Value
from jmp_rewrite._precision.decide import Plan
from jmp_rewrite._precision.loops import trains
from jmp_rewrite._precision.solvers import ends_by_floats, ends_by_integers
from jmp_rewrite._rules import MOVES, ORDERS

# Between a difference and what it is compared with: norms, and tolerances of their own.
_MEASURES = MOVES | {
    "abs",
    "add",
    "div",
    "integer_pow",
    "max",
    "mul",
    "reduce_max",
    "reduce_sum",
    "sqrt",
    "square",
}


class Ending(NamedTuple):
    """A comparison that a loop waits for.

    Attributes:
      node: the comparison.
      tolerance: what the difference has to fall below; None if it is an argument.
      is_bounded: whether the number of iterations is bounded as well.
    """

    node: Node
    tolerance: float | None
    is_bounded: bool


def unreachable(plan: Plan) -> Iterator[Ending]:
    """Yields what `while` loops wait for, and may never see in the compute dtype."""
    graph = plan.graph
    epsilon = float(ml_dtypes.finfo(plan.half).eps)
    loops = [x for x in graph.loops if x.eqn.primitive.name == "while"]
    for loop in (x for x in loops if ends_by_floats(x.eqn) and not trains(graph, x)):
        moves = plan.pins.moves_exactly
        if all(moves(graph.nodes[n]) for n in loop.nodes if plan.labels[n]):
            continue  # what it converges to was rounded before
        for index in loop.nodes:
            node = graph.nodes[index]
            exact = [v.node in plan.pins.exact or v.node < 0 for v in node.inputs]
            if node.name not in ORDERS or all(exact):
                continue
            small = [x for x in _numbers(graph, loop, node) if x < epsilon]
            is_given = any(_is_given(v) for v in node.inputs)
            if small or is_given:
                tolerance = None if is_given else min(small)
                yield Ending(node, tolerance, ends_by_integers(loop.eqn))


def _is_given(value: Value) -> bool:
    """Whether a value is a number that the program is called with."""
    return value.argument >= 0 and not value.aval.shape


def _numbers(graph: Graph, loop: Loop, node: Node) -> Iterator[float]:
    """Yields the positive numbers that a difference is compared with, or divided by.

    One that is added, or a bound, guards a norm against zero.
    """
    seen: set[int] = set()
    stack = [node.index]
    while stack:
        index = stack.pop()
        found = graph.nodes[index]
        if index in seen or index not in loop.nodes:
            continue
        if index != node.index and found.name not in _MEASURES:
            continue
        seen.add(index)
        if found.name not in ("add", "max"):
            yield from (abs(float(x)) for x in found.literals.values() if x)
        stack += [v.node for v in found.inputs]
