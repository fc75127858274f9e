"""Programs that half precision makes wrong whoever writes it: said as advice.

A loop that waits for a difference smaller than the compute dtype resolves may never
end; a number far larger than the values that it is added to leaves few of their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes

from jmp_rewrite._graph import JOINTS, Node
from jmp_rewrite._precision import Label, Plan, unreachable
from jmp_rewrite._rules import MOVES


def hazards(plan: Plan, line_of: Callable[[Any], str]) -> list[str]:
    """Returns sentences about what the compute dtype cannot resolve.

    Args:
      plan: the program, and what is done with each equation.
      line_of: returns the source line of an equation, "" where it is unknown.
    """
    epsilon = float(ml_dtypes.finfo(plan.half).eps)
    made = set(range(len(plan.graph.nodes))) - plan.pins.exact
    found = [*_waits(plan, epsilon), *_hides(plan, made, epsilon)]
    sentences = []
    for node, text in found:
        line = line_of(node.eqn)
        where = f" at {line}" if line else ""
        sentences.append(text.format(where=where, half=plan.half.name))
    return list(dict.fromkeys(sentences))


def _waits(plan: Plan, epsilon: float) -> Iterator[tuple[Node, str]]:
    """Yields what loops wait for, below the resolution."""
    for node, tolerance, is_bounded in unreachable(plan):
        number = "a number that it is given"
        below = number if tolerance is None else f"{tolerance:g}"
        bound = "" if is_bounded else "bound the number of iterations, or "
        yield (
            node,
            f"A while_loop{{where}} waits for a value below {below}, which differences "
            f"of {{half}} values may reach late or never (its epsilon is "
            f"{epsilon:.2g}): "
            f"{bound}run the loop in full_precision().",
        )


class _Offset(NamedTuple):
    """A number that stands in a value beside what matrix multiplications made.

    Attributes:
      number: what has been added, all in all.
      source: the node that added most of it.
    """

    number: float
    source: Node


def _hides(plan: Plan, made: set[int], epsilon: float) -> Iterator[tuple[Node, str]]:
    """Yields numbers that take most of the digits of what is rounded with them.

    A number is followed through moves, and sums, which may take it off again.
    """
    offsets: dict[int, _Offset] = {}
    for node in plan.graph.nodes:
        found = _offset(node, offsets) if node.index in made else None
        if found is None:
            continue
        offsets[node.index] = found
        number = abs(found.number)
        if 1 / epsilon <= number < 1 / epsilon**2 and _is_rounded(plan, node.index):
            yield (
                found.source,
                f"{number:g} is added to values of matrix multiplications"
                "{where}: rounded to {half} behind it, they keep few digits. Add "
                "it last, or to float32 values.",
            )


def _offset(node: Node, offsets: dict[int, _Offset]) -> _Offset | None:
    """Returns the number that stands in a node's result, given those of its inputs."""
    is_sum = node.name in ("add", "sub")
    if not is_sum and node.name not in MOVES | JOINTS:
        return None
    read = (v for v in node.inputs if v.constant is None or v.constant.ndim)
    inputs = [offsets.get(value.node) for value in read]
    if is_sum:
        for position, number in node.literals.items():
            inputs.insert(position, _Offset(float(number), node))
    if node.name == "sub" and (taken := inputs[-1]):
        inputs[-1] = taken._replace(number=-taken.number)
    known = [x for x in inputs if x]
    if not known:
        return None
    largest = max(known, key=lambda x: abs(x.number))
    return largest._replace(number=sum(x.number for x in known)) if is_sum else largest


def _is_rounded(plan: Plan, index: int) -> bool:
    """Whether the result of a node is half, or read as half."""
    readers = {plan.labels[n] for n in plan.graph.consumers()[index]}
    is_own = plan.labels[index] in (Label.HALF, Label.ROUNDED)
    return is_own or not readers.isdisjoint((Label.HALF, Label.WIDENED))
