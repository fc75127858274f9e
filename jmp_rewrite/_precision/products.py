"""Which matrix multiplications are not worth half operands, and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jmp_rewrite._graph import (
    Graph,
    Node,
    Value,
    elements,
    is_backward,
    is_half,
    reached,
)
from jmp_rewrite._precision.origins import is_indicator, is_zero, thresholded
from jmp_rewrite._precision.phases import products_of_phases
from jmp_rewrite._precision.terms import source_of
from jmp_rewrite._rules import PRODUCTS, Category

# A multiplication that adds up no more than this many terms is arithmetic, unless its
# operands are so large beside its result that half ones save bytes.
SHORT = 4
_FEW_TERMS = f"full: a sum of no more than {SHORT} products of exact values"

# Precisions of a product that ask for no more than the default.
_NO_REQUEST = frozenset({"NONE", "DEFAULT", "FASTEST", "BFLOAT16"})


def request(node: Node) -> str | None:
    """Returns why a multiplication by itself stays float32; None if it need not."""
    if node.name not in PRODUCTS:
        return None
    if asked := explicit_precision(node.eqn):
        by = " by jax_default_matmul_precision" if _is_configured() else ""
        return f"full: precision {asked} was asked for{by}"
    if not node.avals[0].shape:
        return "full: a product with a 0-d result reuses nothing"
    if not any(v.made_of_data for v in node.inputs):
        return "full: a product of integers, iota and constants"
    return None


def is_short(node: Node) -> bool:
    """Whether half operands of a matrix multiplication of few terms save nothing."""
    if node.name not in PRODUCTS or node.name == "ragged_dot_general":
        return False
    # Half operands save two bytes an element; the float32 result takes four.
    saved = 2 * elements([v.aval for v in node.eqn.invars])
    return 0 <= _terms(node.eqn) <= SHORT and saved < 4 * node.size


def _terms(eqn: Any) -> int:
    """Returns how many products each number of the result is a sum of; -1: unknown."""
    numbers = eqn.params.get("dimension_numbers")
    first, second = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if eqn.primitive.name == "dot_general":
        sizes = [first[d] for d in numbers[0][0]]
    else:
        sizes = [second[d] for d in numbers.rhs_spec[1:]]
    return math.prod(sizes) if all(isinstance(d, int) for d in sizes) else -1


def explicit_precision(eqn: Any) -> str:
    """Returns the precision that a product asks for, or ""."""
    asked = eqn.params.get("precision")
    if hasattr(asked, "_fields"):
        return "of an algorithm"
    for part in asked if isinstance(asked, tuple) else (asked,):
        name = str(getattr(part, "name", part)).upper()
        if name not in _NO_REQUEST:
            return name
    return ""


def _is_configured() -> bool:
    """Whether JAX's configuration asks for a precision of all products."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return asked is not None and str(asked).upper() not in _NO_REQUEST


def exact_products(
    graph: Graph, categories: Sequence[Category | None], candidates: set[int]
) -> dict[int, str]:
    """Returns the matrix multiplications that stay float32, with the reason.

    Args:
      graph: the program.
      categories: of each node.
      candidates: the multiplications that may run on half operands so far.
    """
    found = dict.fromkeys(
        products_of_phases(graph, candidates), "full: a phase of sin or cos"
    )
    cast = _casts_up(graph, categories, candidates)
    found |= dict.fromkeys(cast, "full: an operand was cast to float32")
    return found | _of_exact_values(graph, candidates - found.keys())


def _casts_up(
    graph: Graph, categories: Sequence[Category | None], candidates: set[int]
) -> set[int]:
    """Returns products of what the user had made half and then cast to float32."""
    cast_up: set[int] = set()
    found: set[int] = set()
    for node in graph.nodes:
        category, read = categories[node.index], [v.node for v in node.inputs]
        if node.name == "convert_element_type" and category is Category.DENY:
            if node.avals and is_half(node.eqn.invars[0].aval):
                cast_up.add(node.index)
        elif category is Category.CLEAR and len(read) == 1 and read[0] in cast_up:
            cast_up.add(node.index)
        elif node.index in candidates and not cast_up.isdisjoint(read):
            found.add(node.index)
    return found


def _of_exact_values(graph: Graph, candidates: set[int]) -> dict[int, str]:
    """Returns the products of exact values that half operands gain nothing for.

    One of zeros and ones by construction copies, counts or selects exact values, and so
    its result is exact; one of few terms is arithmetic. Activations and cotangents are
    rounded anyway, and an activation that was compared with a threshold is one.
    """
    consumers, nodes = graph.consumers(), graph.nodes
    why: dict[int, str] = {}
    others: dict[int, list[int]] = {}
    for n in candidates:
        if any(map(is_zero, nodes[n].inputs)):
            continue  # a recurrent layer's first step: exact in half, too
        ones = [v for v in nodes[n].inputs if is_indicator(v, nodes)]
        others[n] = [v.node for v in nodes[n].inputs if v not in ones]
        others[n] += [x for v in ones for x in thresholded(v, nodes)]
        if ones:
            why[n] = "full: it copies, counts or selects exact values"
        elif is_short(nodes[n]):
            why[n] = _FEW_TERMS
    cotangents = {n.index for n in nodes if is_backward(n)}
    made = reached(candidates - why.keys(), consumers) | cotangents
    while True:
        of_made = [n for n in why if not made.isdisjoint(others[n])]
        if not of_made:
            return why
        made |= reached(of_made, consumers)
        for node in of_made:
            del why[node]


def first_layers(graph: Graph, why: Sequence[str | None]) -> set[int]:
    """Returns the layers whose inputs are so few that they are computed in float32.

    As the first one of a network of coordinates, or of a small state: a weight is an
    operand, of which a backward pass makes a gradient of its size, and the result is
    twice as large as both operands. It is an activation, as that of any other layer.

    Args:
      graph: the program, a whole step.
      why: of each node the reason why it is float32.
    """
    found: set[int] = set()
    nodes = graph.nodes
    short = [n for n in nodes if why[n.index] == _FEW_TERMS and not is_backward(n)]
    gradients = [n for n in nodes if n.name in PRODUCTS and is_backward(n)]
    sizes: dict[Hashable, set[int]] = {}
    for node in gradients if short else ():
        for value in node.inputs:
            sizes.setdefault(_origin(value, graph), set()).add(node.size)
    for node in short:
        if 2 * max(v.size for v in node.inputs) <= node.size:
            for data, weight in itertools.permutations(node.inputs, 2):
                origin = _origin(data, graph)
                if origin != _origin(weight, graph):
                    if weight.size in sizes.get(origin, ()):
                        found.add(node.index)
    return found


def _origin(value: Value, graph: Graph) -> Hashable:
    source = source_of(value, graph)
    return source.node, source.argument


def contracted(product: Node, value: Value) -> str:
    """Returns the dimensions of an operand that a product sums up."""
    numbers = product.eqn.params.get("dimension_numbers")
    if product.name == "dot_general":
        operand = next(n for n, v in enumerate(product.inputs) if v is value)
        numbers = numbers[0][operand] if len(product.inputs) == 2 else numbers[0]
    elif product.name == "conv_general_dilated":
        numbers = numbers.rhs_spec
    return str(numbers)
