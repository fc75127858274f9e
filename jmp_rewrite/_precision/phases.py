"""Sines and cosines: some take a phase, others are the nonlinearity of a layer.

A phase is measured: of positions and frequencies, of coordinates, of a state. What is
rounded there is off by radians. What a network has computed is an activation, though a
sine reads it, and by hand it is rounded as it is in front of a `tanh`. It is one if
other code reads it, too, as the `x + sin(a * x) ** 2 / a` of a vocoder does.

A network of sines has nothing but sines between its layers. These are matrix
multiplications with an operand that a nonlinear function of another one's result has
led to: they run on half operands, and their results are read unrounded. The first one
reads data, as a camera's rotation or a frequency does, and stays as it is.
"""

from __future__ import annotations

import numpy as np

from jmp_rewrite._graph import Graph, Node, Value, is_backward, reached
from jmp_rewrite._precision.terms import source_of
from jmp_rewrite._rules import COSTLY, PRODUCTS

_PHASES = frozenset({"cos", "sin"})
_NONLINEAR = COSTLY | {"max"}
# Of an array that is spread, as a bias is, these read no more than a few numbers.
_ELEMENTWISE = frozenset({"add", "div", "max", "min", "mul", "select_n", "sub"})


def products_of_phases(graph: Graph, candidates: set[int]) -> set[int]:
    """Returns the products that nothing but phases reads, and that are no layers."""
    if not any(n.name in _PHASES for n in graph.nodes):
        return set()
    products = {n.index for n in graph.nodes if n.name in PRODUCTS}
    alone = _read_by_phases_alone(graph, products)
    return (candidates & alone) - _layers(graph)


def nonlinearities(graph: Graph, products: set[int], made: set[int]) -> set[int]:
    """Returns the sines and cosines that may read what is rounded for other code.

    They read a product's result that is on its way elsewhere, too, and no exact array
    of its size beside it.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands.
      made: the nodes that have one upstream.
    """
    if not any(n.name in _PHASES for n in graph.nodes):
        return set()
    found, of_exact = set(), set[int]()
    of_product = products - _read_by_phases_alone(graph, products)
    for node in graph.nodes:
        if node.index in products or node.index not in made:
            continue
        read = [v.node for v in node.inputs]
        if not of_exact.isdisjoint(read) or _reads_exact(node, made, graph):
            of_exact.add(node.index)
        if not of_product.isdisjoint(read):
            of_product.add(node.index)
            if node.name in _PHASES and node.index not in of_exact:
                found.add(node.index)
    return found


def _layers(graph: Graph) -> set[int]:
    """Returns the products that read a nonlinear function of another one's result."""
    consumers, nodes = graph.consumers(), graph.nodes
    products = {n.index for n in nodes if n.name in PRODUCTS}
    made = reached(products, consumers)
    bent = reached({n for n in made if nodes[n].name in _NONLINEAR}, consumers)
    return {n for n in products if any(v.node in bent for v in nodes[n].inputs)}


def _read_by_phases_alone(graph: Graph, products: set[int]) -> set[int]:
    """Returns the nodes that nothing but sines and cosines reads, far or near.

    A backward pass, which reads them for a derivative, does not count.
    """
    nodes, consumers = graph.nodes, graph.consumers()
    alone: set[int] = set()
    for node in reversed(nodes):
        read_by = [n for n in consumers[node.index] if not is_backward(nodes[n])]
        if read_by and all(
            nodes[n].name in _PHASES or (n in alone and n not in products)
            for n in read_by
        ):
            alone.add(node.index)
    return alone


def _reads_exact(node: Node, made: set[int], graph: Graph) -> bool:
    """Whether an exact array of floats, that is not spread, is read beside others."""

    def is_exact(value: Value) -> bool:
        if value.node in made or not value.made_of_data or not value.aval.shape:
            return False
        if not np.issubdtype(value.aval.dtype, np.floating):
            return False
        whole = source_of(value, graph).size == node.size
        return whole or node.name not in _ELEMENTWISE

    return any(map(is_exact, node.inputs))
