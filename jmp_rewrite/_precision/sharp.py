"""Values that primitives read which are steep, or jump.

A decomposition, a sine, a cast to an integer, a high power. None of them is on the way
to a matrix multiplication alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Set as AbstractSet

import numpy as np

from jmp_rewrite._graph import Graph, Node
from jmp_rewrite._precision.origins import leads_to_product, up_to_exponents
from jmp_rewrite._precision.terms import PARTS, SCALES, source_of
from jmp_rewrite._rules import COPIES, SHARP, SUMS

# A rounding, half an epsilon, is two epsilons in this power: what the law allows.
_POWER = 4
_RUNNING_SUMS = frozenset({"cumsum"})
_MOVED = COPIES | SUMS
# Of a value and numbers these are that value, as far as its relative error goes.
_SAME_BASE = frozenset({"clamp", "max", "min", "neg", "select_n"})


def read_sharply(
    graph: Graph,
    products: set[int],
    out_of_range: frozenset[int],
    nonlinearities: AbstractSet[int],
    ends: AbstractSet[int],
) -> dict[int, int]:
    """Returns the nodes that a sharp primitive reads, and which one.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands, which end what is read.
      out_of_range: nodes with a number that the compute dtype cannot hold. What is
        multiplied by such a number may be out of its range, too.
      nonlinearities: sharp nodes that are those of layers.
      ends: gradients that an update reads, which end what is read as well.
    """
    found: dict[int, int] = {}
    powers, reads = _high_powers(graph), graph.predecessors()
    before = up_to_exponents(graph) if powers else []
    for node in graph.nodes:
        if node.index in nonlinearities:
            continue
        is_scaled = node.index in out_of_range and node.name in ("div", "mul")
        is_power = node.index in powers
        if _is_sharp(node) or is_power or is_scaled:
            read = leads_to_product(
                [node.index],
                before if is_power else reads,
                lambda n: n in found or n in products or n in ends,
            )
            direct = (s for n in (node.index, *read) for s in reads[n])
            for source in (*read, *products.intersection(direct)):
                found.setdefault(source, node.index)
    for node in graph.nodes:
        if node.name in _RUNNING_SUMS:
            for source in _summed_terms(node, graph, products | ends):
                found.setdefault(source, node.index)
    return found


def _summed_terms(node: Node, graph: Graph, stops: AbstractSet[int]) -> set[int]:
    """Returns the sums that a running sum adds up, and what moves them there.

    Of differences it leaves one term, and the errors of all: they telescope.
    """
    found: set[int] = set()
    stack = [v.node for v in node.inputs]
    is_sum = False
    while stack:
        index = stack.pop()
        if index < 0 or index in found or index in stops:
            continue
        term = graph.nodes[index]
        is_scaled = term.name in SCALES and len(term.inputs) == 1
        if is_scaled or term.name in _MOVED:
            found.add(index)
            is_sum |= term.name in SUMS
            stack += [v.node for v in term.inputs]
    return found if is_sum else set()


def _is_sharp(node: Node) -> bool:
    if node.name == "convert_element_type" and node.inputs:
        return np.dtype(node.eqn.params["new_dtype"]).kind in "iu"
    if node.name == "pow" and 0 not in node.literals:  # of a number it is an `exp`
        power = node.literals.get(1)
        return power is None or bool(np.any(abs(power) > _POWER))
    return node.name in SHARP


def _high_powers(graph: Graph) -> set[int]:
    """Returns the nodes that are a high power of another one, however it is taken.

    So is a product of many parts of one value, as `associative_scan` takes it. A value
    is the same one if it is scaled by a number, turned, bounded or masked.
    """
    of: dict[int, tuple[Hashable, int]] = {}  # node -> what it is a power of, and which
    for node in graph.nodes:
        unknown = [v for v in node.inputs if v.constant is None and v.made_of_data]
        if node.name == "integer_pow":
            power = abs(node.eqn.params["y"])
        elif node.name in ("mul", "square"):
            power = 2 if node.name == "square" else 1
        elif node.name in _SAME_BASE and len(unknown) == 1:
            power = 1
        else:
            continue
        sources = [source_of(v, graph, PARTS) for v in unknown]
        keys = [(v.node, v.result, v.argument) for v in sources]
        factors = [of.get(key[0], (key, 1)) for key in keys]
        bases = {base for base, _ in factors}
        if len(bases) == 1:
            of[node.index] = bases.pop(), power * sum(n for _, n in factors)
    return {index for index, (_, power) in of.items() if power > _POWER}
