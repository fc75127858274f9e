"""What a backward pass computes again in place of reading it from memory.

The derivative of an activation function needs its argument and its result: a GELU of
`x` keeps `x`, and `erf` or `tanh` of it, because compilers compute neither twice. Where
the argument is stored anyway, the result need not be: the backward pass computes it
again, from the argument behind a barrier, in the kernel that reads it.

On GPUs that saves the write of each such function, and its bytes until it is read. On a
TPU v5e what is made of it, the operand of the next product, is computed again as well,
inside the product. Other TPUs multiply faster, but do not compute `erf` faster: there
it costs more than to read it; and `tanh` is computed twice by XLA:TPU anyway. Source:
what was measured, `benchmarks/NOTES.md`, 28.

The exponential of a softmax is not even computed again on GPUs: it is the quotient,
which is stored for a product, times the sum (there, 33).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jmp_rewrite._graph.nodes import Graph, Instance, Node
from jmp_rewrite._passes.on_device import GPU, TPU_V5E
from jmp_rewrite._precision.cost import large_inputs, moves_exactly, reads_half
from jmp_rewrite._precision.pins import Pins

# What is computed again, and where.
_BOTH = frozenset({GPU, TPU_V5E})
DEVICES = {"erf": _BOTH, "erfc": _BOTH, "tanh": frozenset({GPU})}
# What else may be computed again: what a compiler puts into the kernel that reads it.
# No collective is run twice, and nothing that is not as cheap as this.
ARITHMETIC = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "broadcast_in_dim",
        "clamp",
        "convert_element_type",
        "copy",
        "div",
        "expand_dims",
        "integer_pow",
        "max",
        "min",
        "mul",
        "name",
        "neg",
        "one_minus_square",
        "polynomial",
        "reshape",
        "select_n",
        "sign",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "transpose",
    }
)
# Results that are made of more stored values than this are not followed: what one
# kernel would read to compute them grows, and so would the time that this takes.
MANY_VALUES = 4


class Again(NamedTuple):
    """What is computed again, and from what.

    Attributes:
      devices: node -> the devices on which the backward pass computes it again.
      chain: these nodes, and those that lie between them and what is stored.
      anchors: the stored nodes that all this starts from.
      quotients: what is divided -> the quotient from which it is computed again.
    """

    devices: dict[int, frozenset[str]]
    chain: set[int]
    anchors: frozenset[int]
    quotients: dict[int, int]


def computed_again(graph: Graph, pins: Pins, halves: Sequence[bool]) -> Again:
    """Returns what a whole step's backward pass computes again.

    Args:
      graph: the program.
      pins: what numerics said.
      halves: which results are half, that is, stored.
    """
    quotients = _quotients(graph, pins)
    functions = {n.index for n in graph.nodes if n.name in DEVICES and halves[n.index]}
    if not functions:
        return Again({}, set(), frozenset(), quotients)
    made_of = _made_of(graph, pins, halves, functions)
    kept = _kept(graph, made_of, functions)
    devices: dict[int, frozenset[str]] = {}
    for index, stored in made_of.items():
        node = graph.nodes[index]
        if not stored or not stored <= kept:
            continue
        if index in functions:
            devices[index] = DEVICES[node.name]
            continue
        found = [devices[s] for s in large_inputs(node) if s in devices]
        if found:
            on = found[0].intersection(*found[1:])
            if halves[index]:
                on -= {GPU}  # it is stored there, for a product
            if on:
                devices[index] = on
    chain: set[int] = set()
    stack = list(devices)
    while stack:
        index = stack.pop()
        if index not in chain:
            chain.add(index)
            between = set(large_inputs(graph.nodes[index])) - made_of[index]
            stack += [s for s in between if s in made_of]
    anchors = frozenset().union(*(made_of[n] for n in devices))
    return Again(devices, chain, anchors, quotients)


def _quotients(graph: Graph, pins: Pins) -> dict[int, int]:
    """Returns the exponentials that a softmax divides by their sum, and the quotients.

    A forward pass reads such an exponential twice, in the sum and in the quotient, and
    XLA:GPU computes it twice if nothing else wants it. A derivative does; but a product
    reads the quotient, so that is stored, and the exponential is quotient times sum.
    Of another divisor that need not be true: it may be infinite where rows are masked.
    """
    owners, consumers = _owners(graph), graph.consumers()
    returned = {v.node for v in graph.results}
    found: dict[int, int] = {}
    for node in graph.nodes:
        index = node.index
        if node.name != "exp" or is_backward(node) or index in returned:
            continue
        readers = [graph.nodes[r] for r in consumers[index]]
        if any(owners.get(r.index) is not owners.get(index) for r in readers):
            continue
        forward = [r for r in readers if not is_backward(r)]
        divisions = [r for r in forward if r.name == "div"]
        if len(divisions) != 1 or any(
            r.name not in ("div", "reduce_sum") for r in forward
        ):
            continue
        (quotient,) = divisions
        is_softmax = not quotient.literals and quotient.inputs[0].node == index
        is_softmax &= _is_sum(quotient.inputs[-1].node, index, graph, pins)
        is_stored = any(reads_half(r, pins) for r in consumers[quotient.index])
        if is_softmax and is_stored:
            found[index] = quotient.index
    return found


def _is_sum(node: int, of: int, graph: Graph, pins: Pins) -> bool:
    """Tells the sum of a node's elements, whatever its shape."""
    while node >= 0 and graph.nodes[node].name != "reduce_sum":
        inputs = graph.nodes[node].inputs
        if len(inputs) != 1 or not moves_exactly(graph.nodes[node], pins):
            return False
        node = inputs[0].node
    return node >= 0 and graph.nodes[node].inputs[0].node == of


def _made_of(
    graph: Graph, pins: Pins, halves: Sequence[bool], functions: set[int]
) -> dict[int, frozenset[int]]:
    """Returns of which stored nodes each of a forward pass is made, in one jaxpr."""
    owners = _owners(graph)
    made_of: dict[int, frozenset[int]] = {}
    follows: set[int] = set()  # what is made of one of the functions
    for node in graph.nodes:
        index = node.index
        if node.place.backward or index not in owners:
            continue
        if node.name not in ARITHMETIC and index not in functions:
            continue
        found: set[int] = set()
        for source in large_inputs(node):
            if owners.get(source) is not owners[index]:
                break
            before = graph.nodes[source]
            is_stored = halves[source] and not moves_exactly(before, pins)
            if source in made_of and (source in follows or not is_stored):
                found |= made_of[source]
            elif halves[source]:
                found.add(source)
            else:
                break
        else:
            if len(found) <= MANY_VALUES:
                made_of[index] = frozenset(found)
                if index in functions or follows.intersection(large_inputs(node)):
                    follows.add(index)
    return made_of


def _kept(
    graph: Graph, made_of: dict[int, frozenset[int]], functions: set[int]
) -> set[int]:
    """Returns the stored nodes that a backward pass reads, whatever else is stored."""
    consumers = graph.consumers()
    direct: dict[int, frozenset[int]] = {}
    for index, stored in made_of.items():
        sources = large_inputs(graph.nodes[index])
        if index not in functions and not any(
            s in functions or (s in made_of and s not in direct) for s in sources
        ):
            direct[index] = stored
    read = {
        n
        for n in (*direct, *frozenset().union(*made_of.values()))
        if any(is_backward(graph.nodes[r]) for r in consumers[n])
    }
    return read.union(*(direct[n] for n in read if n in direct))


def is_backward(node: Node) -> bool:
    return node.place.backward and not node.place.recomputed


def _owners(graph: Graph) -> dict[int, Instance]:
    """Returns for each node that is an equation of its own the jaxpr it stands in."""
    found: dict[int, Instance] = {}
    for use in graph.uses():
        found.update((n, use) for n in use.nodes if isinstance(n, int))
    return found
