"""What a GPU would hold in memory for longer, or in more bytes, than it has to.

XLA:GPU fills what a sum starts from, zeros, when the program begins, because that reads
nothing; and of a skip connection's cotangent, which waits until the backward pass is
through with all that lies below, it keeps whatever it is made of. Both are large in a
program that adds up in float32. So zeros are filled once their terms are there, and
such a cotangent is written when it is complete. See `benchmarks/NOTES.md`, 37.
"""

from __future__ import annotations

from collections.abc import Sequence

from jmp_rewrite._graph.nodes import Graph
from jmp_rewrite._passes.again import is_backward
from jmp_rewrite._precision.cost import reads_half
from jmp_rewrite._precision.origins import leads_to_product
from jmp_rewrite._precision.pins import Pins
from jmp_rewrite._rules.table import Category

# A part of a cotangent waits if its reader has to wait for so many products more.
_PRODUCTS = 2
_PARTS = frozenset({"slice", "split"})


def waits(graph: Graph, pins: Pins, halves: Sequence[bool]) -> list[int]:
    """Returns the parts of cotangents that wait for other products, in half.

    Args:
      graph: the program, a whole step.
      pins: what numerics said.
      halves: which results are half, that is, stored.
    """
    parts = [
        n.index
        for n in graph.nodes
        if n.name in _PARTS and halves[n.index] and is_backward(n)
    ]
    if not parts:
        return []
    depths = _depths(graph, pins)
    readers = graph.consumers()
    return [
        n for n in parts if any(depths[r] - depths[n] >= _PRODUCTS for r in readers[n])
    ]


def _depths(graph: Graph, pins: Pins) -> list[int]:
    """Returns for each node the longest chain of products that lead to it."""
    depths: list[int] = []
    for index, sources in enumerate(graph.predecessors()):
        is_product = pins.categories[index] is Category.ALLOW
        before = [depths[s] for s in sources if s < index]
        depths.append(max(before, default=0) + is_product)
    return depths


def starts_late(graph: Graph, pins: Pins, halves: Sequence[bool]) -> list[int]:
    """Returns the float32 sums in the midst of a backward pass that start from zeros.

    The gradient of an embedding's table is none: it comes last.
    """
    sums = [
        n.index
        for n in graph.nodes
        if n.name == "scatter-add"
        and not halves[n.index]
        and is_backward(n)
        and n.literals.get(0) == 0
    ]
    if not sums:
        return []
    products = [n.index for n in graph.nodes if reads_half(n.index, pins)]
    leads = leads_to_product(products, graph.predecessors(), lambda node: False)
    return [n for n in sums if n in leads]
