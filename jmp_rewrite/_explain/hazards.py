"""Programs that half precision makes wrong whoever writes it: said as advice.

A loop that waits for a difference smaller than the compute dtype resolves may never
end; a number far larger than the values that it is added to leaves few of their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes

from jmp_rewrite._graph import Graph, Node
from jmp_rewrite._precision import Plan, unreachable


def hazards(plan: Plan, line_of: Callable[[Any], str]) -> list[str]:
    """Returns sentences about what the compute dtype cannot resolve.

    Args:
      plan: the program, and what is done with each equation.
      line_of: returns the source line of an equation, "" where it is unknown.
    """
    epsilon = float(ml_dtypes.finfo(plan.half).eps)
    made = set(range(len(plan.graph.nodes))) - plan.pins.exact
    found = [*_waits(plan, epsilon), *_hides(plan.graph, made, epsilon)]
    sentences = []
    for node, text in found:
        line = line_of(node.eqn)
        where = f" at {line}" if line else ""
        sentences.append(text.format(where=where, half=plan.half.name))
    return list(dict.fromkeys(sentences))


def _waits(plan: Plan, epsilon: float) -> Iterator[tuple[Node, str]]:
    """Yields what loops wait for, below the resolution."""
    for node, tolerance, _ in unreachable(plan):
        number = "a number that it is given"
        below = number if tolerance is None else f"{tolerance:g}"
        yield (
            node,
            f"A while_loop{{where}} waits for a value below {below}, which differences "
            f"of {{half}} values may never reach (its epsilon is {epsilon:.2g}): bound "
            "the number of iterations, or run the loop in full_precision().",
        )


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
