"""Programs that half precision makes wrong whoever writes it: said as advice.

A loop that waits for a difference smaller than the compute dtype resolves may never
end; a number far larger than the values that it is added to leaves few of their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes

from jmp_rewrite._graph import Graph, Loop, Node
from jmp_rewrite._precision import Plan

_COMPARISONS = frozenset({"ge", "gt", "le", "lt"})


def hazards(plan: Plan, line_of: Callable[[Any], str]) -> list[str]:
    """Returns sentences about what the compute dtype cannot resolve.

    Args:
      plan: the program, and what is done with each equation.
      line_of: returns the source line of an equation, "" where it is unknown.
    """
    epsilon = float(ml_dtypes.finfo(plan.half).eps)
    made = set(range(len(plan.graph.nodes))) - plan.pins.exact
    found = [*_waits(plan.graph, made, epsilon), *_hides(plan.graph, made, epsilon)]
    sentences = []
    for node, text in found:
        line = line_of(node.eqn)
        where = f" at {line}" if line else ""
        sentences.append(text.format(where=where, half=plan.half.name))
    return list(dict.fromkeys(sentences))


def _waits(graph: Graph, made: set[int], epsilon: float) -> Iterator[tuple[Node, str]]:
    """Yields comparisons of a `while` with a tolerance below the resolution."""
    for loop in graph.loops:
        if loop.eqn.primitive.name != "while":
            continue
        for node in _compared(graph, loop):
            tolerance = next(iter(node.literals.values()))
            if 0 < abs(float(tolerance)) < epsilon and _reads(node, made):
                yield (
                    node,
                    f"A while_loop{{where}} waits for a value below {tolerance:g}, "
                    f"which differences of {{half}} values may never reach (its "
                    f"epsilon is {epsilon:.2g}): bound the number of iterations, or "
                    "run the loop in full_precision().",
                )


def _compared(graph: Graph, loop: Loop) -> Sequence[Node]:
    inside = (graph.nodes[n] for n in loop.nodes)
    return [n for n in inside if n.name in _COMPARISONS and len(n.literals) == 1]


def _hides(graph: Graph, made: set[int], epsilon: float) -> Iterator[tuple[Node, str]]:
    """Yields sums of a half value and a number that takes most of its digits."""
    for node in graph.nodes:
        if node.name not in ("add", "sub") or not _reads(node, made):
            continue
        for number in node.literals.values():
            if 1 / epsilon <= abs(float(number)) < 1 / epsilon**2:
                yield (
                    node,
                    f"{number:g} is added to values of matrix multiplications"
                    "{where}: rounded to {half} behind it, they keep few digits. Add "
                    "it last, or to float32 values.",
                )


def _reads(node: Node, made: set[int]) -> bool:
    return any(value.node in made for value in node.inputs)
