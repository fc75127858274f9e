"""Few numbers of a loss, each made of many by a last layer.

One prediction an example, what the loss makes of it, and the cotangents that it hands
back: half of these saves nothing beside the layer's operand, and a loss takes
differences and logarithms of them. The layer's backward pass reads a rounded copy.
"""

from __future__ import annotations

from jmp_rewrite._graph import Graph, Value, is_backward, reached
from jmp_rewrite._precision.origins import leads_to_product
from jmp_rewrite._precision.pins import Pins

# A last layer's result is few beside its operand where it is so many times smaller:
# half of it is an eighth of what the layer reads.
FEW = 4


def few_of_a_loss(graph: Graph, pins: Pins, products: set[int]) -> set[int]:
    """Returns what a loss computes of few numbers, each made of many by a last layer.

    Args:
      graph: the program.
      pins: what is known of it; parameters are no layer's operand.
      products: the matrix multiplications of half operands.
    """
    nodes = graph.nodes
    reads, readers = graph.predecessors(), graph.consumers()
    backward = {n for n in products if is_backward(nodes[n])}
    layers = leads_to_product(products - backward, reads, lambda n: False)
    # Derivatives of layers, too, lead to no layer.
    of_layers = reached(layers & products, readers, lambda n: n not in products)
    again = {n.index for n in nodes if n.place.recomputed}
    layered = layers | of_layers | again | reached(backward, readers)
    ours = set(range(len(nodes))) - layered
    # Of the layer before, and of the one that the cotangent is handed to.
    sizes = {
        n: [v.size for v in nodes[n].inputs if not _is_weight(v, graph, pins)]
        for n in products
    }
    operands = {n: max(of, default=0) for n, of in sizes.items()}
    before, after = [0] * len(nodes), [0] * len(nodes)
    for node in nodes:
        sources = [before[n] for n in reads[node.index]]
        before[node.index] = operands.get(node.index, max(sources, default=0))
    for node in reversed(nodes):
        found = [operands.get(n, after[n]) for n in readers[node.index]]
        after[node.index] = max(found, default=0)
    numbers = {n for n in ours if nodes[n].avals}
    return {n for n in numbers if FEW * nodes[n].size <= max(before[n], after[n])}


def _is_weight(value: Value, graph: Graph, pins: Pins) -> bool:
    """Whether a value is a parameter, as it is or moved."""
    while value.node >= 0:
        node = graph.nodes[value.node]
        if not pins.moves_exactly(node) or len(node.inputs) != 1:
            return False
        (value,) = node.inputs
    return value.argument in pins.trained
