"""Sums whose terms are read unrounded: with an exact array, or of a gradient."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Set as AbstractSet

from jmp_rewrite._graph import Graph, Node, Value, is_backward, reached
from jmp_rewrite._precision.origins import MOVES, SMALL, is_zero
from jmp_rewrite._precision.terms import source_of
from jmp_rewrite._rules import LOGARITHMS, PRODUCTS, SUMS


def sums_with_exact(
    graph: Graph, products: set[int], made: set[int], state: set[int]
) -> set[int]:
    """Returns the made nodes that an exact array of their size is added to.

    A rounding would be one of that array as well: it comes before the sum. So it does
    before a running sum, which goes on adding what no matrix multiplication has made of
    that array. What one has made of it is a layer's, and the sum the stream between
    layers. Of state nobody asks that: it is float32 anyway.
    """
    found: dict[int, Value] = {}
    readers: dict[Hashable, list[int]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault((value.node, value.argument), []).append(node.index)
    after: dict[Hashable, set[int]] = {}

    def is_layer(node: int, exact: Value) -> bool:
        key = exact.node, exact.argument
        if key not in after:
            consumers = graph.consumers()
            after[key] = reached(reached(readers[key], consumers) & products, consumers)
        return node in after[key]

    for node in graph.nodes:
        if node.name not in ("add", "scatter-add", "sub") or node.index not in made:
            continue
        if is_backward(node):
            continue
        scatters = node.name == "scatter-add"
        for value, other in zip(node.inputs, node.inputs[::-1], strict=True):
            is_own = value.made_of_data and source_of(value, graph).size == node.size
            if is_own and is_exact(value, graph, made):
                found[node.index] = value
            elif value.node in found and (scatters or other.size == node.size):
                exact = found[value.node]
                if node.index in state or not is_layer(other.node, exact):
                    found.setdefault(node.index, exact)
    return set(found)


def summed_gradients(
    graph: Graph, made: set[int], useful: set[int], products: set[int]
) -> dict[int, int]:
    """Returns the cotangents that a gradient is a sum of, and that sum.

    A gradient is what the backward pass returns, or hands on to an optimizer. Its terms
    may cancel, as those of a difference of near values do, and the sum is stored in
    float32 anyway. So is what these are made of, in their size, back to the matrix
    multiplications and to the sums that are cotangents themselves. A gradient that is
    summed over a batch is none of these: there the roundings average out. One of a
    single number is, as far as the loss alone has made its terms: in a likelihood they
    cancel.

    Args:
      graph: the program.
      made: the nodes that have a matrix multiplication upstream.
      useful: the nodes that lead to a matrix multiplication.
      products: the matrix multiplications of half operands.
    """
    found: dict[int, int] = {}
    sums = (n for n in graph.nodes if n.name in SUMS and not _scales(n, graph))
    ends = {n.index for n in sums} & useful | products
    promoted, consumers = promoted_nodes(graph, made, products), graph.consumers()
    gradients = {v.node for v in graph.results}
    layers = reached((n for n in products if is_backward(graph.nodes[n])), consumers)
    loss = {n.index for n in graph.nodes if is_backward(n)} - layers
    for node in reversed(graph.nodes):
        if not is_backward(node):
            gradients.update(v.node for v in node.inputs)
        elif node.index in gradients and node.index not in useful:
            gradients.update(_elementwise(node))
            terms = _summed(node)
            if node.name in SUMS and len(terms) > 1 and made.issuperset(terms):
                follow_back(node, set(terms) | promoted, graph, found, ends, near=True)
                found.update({n: node.index for n in terms if n not in found})
            elif node.name == "reduce_sum" and node.size == 1:
                follow_back(node, loss, graph, found, ends)
    return found


def _scales(node: Node, graph: Graph) -> bool:
    """Whether a sum is of a value and a multiple of it: `g + g * tanh(a)`."""
    read = {v.node for v in node.inputs}
    nodes = [graph.nodes[n] for n in read if n >= 0]
    return any(v.node in read for n in nodes if n.name == "mul" for v in n.inputs)


def _summed(node: Node) -> list[int]:
    """Returns what a node adds up elementwise, or over a few terms, moves or turns."""
    if node.name not in SUMS | MOVES | {"neg", "reduce_sum"}:
        return []
    return [v.node for v in node.inputs if _is_near(v, node)]


def _elementwise(node: Node) -> list[int]:
    """Returns what a node reads, but for what it adds up many terms of."""
    adds_up = node.name in ("scatter-add", "scatter-sub") and not node.disjoint
    if adds_up or node.name in PRODUCTS:
        return []
    return [v.node for v in node.inputs if v.size < SMALL * node.size]


def _is_near(value: Value, node: Node) -> bool:
    """Whether a value has the size of a node's result, or a few times that."""
    return node.size <= value.size < SMALL * node.size


def follow_back(
    node: Node,
    among: set[int],
    graph: Graph,
    found: dict[int, int],
    ends: AbstractSet[int],
    near: bool = False,
) -> None:
    """Adds the nodes among these that lead to a difference without a product between.

    Args:
      node: the difference.
      among: the nodes.
      graph: the program.
      found: is added to.
      ends: nodes that nothing is followed through, as is what an iteration receives:
        parameters are carried through loops as well.
      near: whether nothing is followed through a reduction: over the many terms of one
        roundings average out. So it is behind a logarithm.
    """
    stack = [(node, near)]
    while stack:
        reader, near = stack.pop()
        for value in reader.inputs:
            source = value.node
            if source not in among or source in found:
                continue
            if not near or _is_near(value, node):
                found[source] = node.index
                before = graph.nodes[source]
                if source not in ends and before.name != "carry_in":
                    stack.append((before, near or before.name in LOGARITHMS))


def promoted_nodes(graph: Graph, made: set[int], products: set[int]) -> set[int]:
    """Returns the made nodes that are float32 by JAX's promotion, as by hand.

    An exact array stands beside the half result of a matrix multiplication in what they
    are computed from, so that by hand their differences are of unrounded values.
    """
    promoted: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals or node.index in products:
            continue
        sources = [v.node for v in node.inputs if v.aval.shape]
        if node.size == 1:
            sources += [v.node for v in node.inputs if v.node in promoted]
        if any(n not in made or n in promoted for n in sources):
            promoted.add(node.index)
    return promoted


def is_exact(value: Value, graph: Graph, made: set[int]) -> bool:
    """Whether a value is exact, and none that is made of the bits of another one."""
    if value.node in made or is_zero(value):
        return False
    return value.node < 0 or graph.nodes[value.node].of_bits is None
