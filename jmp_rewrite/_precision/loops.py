"""Loops: which carries are a residual stream, and what stands on its way into one."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jmp_rewrite._graph import (
    EITHER,
    Count,
    Graph,
    Loop,
    Made,
    Node,
    Value,
    counts_up,
    elements,
    is_backward,
    is_drawn,
    reached,
)
from jmp_rewrite._precision.origins import (
    MOVES,
    leads_to_product,
    made_by_products,
    moves,
    up_to_exponents,
)
from jmp_rewrite._precision.products import contracted
from jmp_rewrite._rules import COPIES, PICKS, Category

# What takes a part of what it reads.
_PARTS = frozenset({"dynamic_slice", "gather", "slice", "split", "unstack"})
_ROWS = frozenset({"dynamic_slice", "gather"})
# Numbers that differ do so behind these, as where Python's negative ones are allowed.
_COUNTS = MOVES | {"add", "convert_element_type", "lt", "mul", "select_n", "sub"}
# What hands on elements as they were, some left out, repeated or set.
_COPIES = COPIES | {"carry_out", "dynamic_update_slice", "scatter"}


def residual_streams(graph: Graph, categories: Sequence[Category | None]) -> set[int]:
    """Returns the carries that are the residual stream of a scan over layers.

    There each iteration multiplies the carry by its own weights, slices of `xs`, and
    hands on what comes out. It is what runs through a stack of layers and no state.
    A loop over train steps also multiplies a carry (the weights) by slices (batches):
    it is told apart because its body holds a backward pass of its own. Nor is it a
    stream of which a part is handed on as it was, as by a coupling of a flow: a layer
    adds to all of it, and what none has changed is as exact as at the beginning. Nor
    is one whose slices stand twice in an iteration, as an operator and its transpose:
    they are examples, and the carry is a weight that learns from them.
    """
    streams: dict[int, set[Hashable]] = {}
    of: dict[int, Loop] = {}
    consumers, predecessors = graph.consumers(), graph.predecessors()
    made = _activations(graph, categories) if graph.loops else set()
    for loop in graph.loops:
        if loop.eqn.primitive.name != "scan" or trains(graph, loop):
            continue
        products, reads = _layer_products(graph, loop, categories, made)
        within = loop.nodes.__contains__

        def copies(index: int, loop: Loop = loop) -> bool:
            return index in loop.nodes and graph.nodes[index].name in _COPIES

        for received, handed_on in loop.carries:
            if handed_on in reached([received], consumers, copies):
                continue
            ahead = reached([received], consumers, within)
            behind = reached([handed_on], predecessors, within)
            between = {
                n
                for n in loop.nodes
                if n in behind and any(v.node in ahead for v in graph.nodes[n].inputs)
            }
            weights = {w for n in products.keys() & between for w in products[n]}
            ways = {(w, way) for w in weights for n, way in reads[w] if n in between}
            if weights and len(ways) == len(weights):
                streams[received] = set(map(_whole, weights))
                of[received] = loop
    return streams.keys() - _undone(graph, streams, of)


def _activations(graph: Graph, categories: Sequence[Category | None]) -> set[int]:
    """Returns what a forward pass makes of its matrix multiplications, and cotangents.

    Parameters are none that gradients have updated, by a step or by a number.
    """
    nodes = graph.nodes
    backward = {n.index for n in nodes if is_backward(n)}

    def stays(index: int) -> bool:
        return index not in backward and nodes[index].size > 1

    products = {n for n, c in enumerate(categories) if c is Category.ALLOW}
    readers = _readers(graph)

    def enters(reader: int | Made) -> bool:
        if isinstance(reader, Made):
            return elements([v.aval for v in reader.eqn.outvars]) > 1
        return stays(reader)

    found = backward | reached(products - backward, readers, enters)
    return {n for n in found if not isinstance(n, Made)}


def _readers(graph: Graph) -> dict[int | Made, list[int | Made]]:
    """Returns who reads each node, and each mask or index: a choice is made of both."""
    readers: dict[int | Made, list[int | Made]] = collections.defaultdict(list)
    readers.update((n, [*read]) for n, read in enumerate(graph.consumers()))
    left: list[tuple[Value | None, int | Made]] = [
        (v, node.index) for node in graph.nodes for v in node.others
    ]
    seen: set[Made] = set()
    while left:
        value, reader = left.pop()
        if value is None:
            continue
        made = value.name if isinstance(value.name, Made) else None
        if value.node >= 0:
            readers[value.node].append(reader)
        elif made is not None:
            readers[made].append(reader)
            if made not in seen:
                seen.add(made)
                left += [(v, made) for v in made.operands]
    return readers


def _undone(
    graph: Graph, streams: Mapping[int, set[Hashable]], of: Mapping[int, Loop]
) -> set[int]:
    """Returns the streams that a scan takes over from another one of the same weights.

    That is an iteration, or an inverse, as that of a reversible network. A scan inside
    of another one takes over its stream, and a part of its layers; and what computes
    layers once more begins where they began.
    """
    found: set[int] = set()
    for received, weights in streams.items():
        for value in graph.nodes[received].inputs[:1]:  # what it begins with
            before = moves(graph, value.node)[-1] if value.node >= 0 else -1
            if before not in streams or weights.isdisjoint(streams[before]):
                continue
            is_again = of[received].place.recomputed > of[before].place.recomputed
            if not is_again and received not in of[before].nodes:
                found |= {received, before}
    return found


def recurrent_activations(
    graph: Graph, categories: Sequence[Category | None]
) -> set[int]:
    """Returns the products' values inside forward loops: the gates of an LSTM.

    They lead to products through a carry alone, like an update of train state; but
    no backward pass lies before them.
    """
    inside = {
        n
        for loop in graph.loops
        if not loop.place.backward and not trains(graph, loop)
        for n in loop.nodes
    }
    if not inside:
        return inside
    return inside & made_by_products(graph, categories)


def of_carried_states(graph: Graph, products: Callable[[int], bool]) -> set[int]:
    """Returns what the cells of recurrent layers compute of the state they carry.

    A cell multiplies it by the same weights in each iteration, a stack of layers by
    slices of stacked ones.

    Args:
      graph: the program.
      products: whether a node is a matrix multiplication of half operands.
    """
    found: set[int] = set()
    consumers = graph.consumers()
    for loop in graph.loops:
        within = loop.nodes.__contains__
        carried = reached([r for r, _ in loop.carries], consumers, within)
        sliced = [
            n for n in loop.nodes
            if any(loop.token in v.slice_of for v in graph.nodes[n].inputs)
        ]  # fmt: skip
        varies = carried | reached(sliced, consumers, within)
        cells = [
            n
            for n in loop.nodes
            if products(n)
            and any(v.node in carried for v in graph.nodes[n].inputs)
            and not all(
                v.node in varies or loop.token in v.slice_of
                for v in graph.nodes[n].inputs
            )
        ]
        found |= reached(cells, consumers, within)
    return found


# A state is the same one behind these, apart from a factor and what is added to it.
_KEEPS = ((MOVES | PICKS | COPIES) - EITHER) | {
    "add",
    "add_any",
    "div",
    "mul",
    "neg",
    "sub",
}


def decays(
    graph: Graph, products: set[int], made: set[int], streams: set[int]
) -> dict[int, int]:
    """Returns the factors of what loops carry, and the node that multiplies by them.

    That is a running product: what rounds a factor near one changes how long a state
    lasts, by as much again in each iteration. So is what they are made of, back to the
    matrix multiplications, or to the exponent of the rate. A backward pass multiplies
    by the same ones. What is computed from the state without a product, as what
    normalizes it, follows it.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands.
      made: the nodes that have one upstream.
      streams: carries that are the residual streams of scans over layers.
    """
    found: dict[int, int] = {}
    consumers, reads = graph.consumers(), graph.predecessors()
    before = up_to_exponents(graph) if graph.loops else []
    for loop in graph.loops:
        if loop.place.backward and not loop.place.recomputed:
            continue

        def follows(index: int, loop: Loop = loop) -> bool:
            return index in loop.nodes and index not in products

        def keeps(index: int, loop: Loop = loop) -> bool:
            return index in loop.nodes and graph.nodes[index].name in _KEEPS

        own = reached([received for received, _ in loop.carries], consumers, follows)
        for received, handed_on in loop.carries:
            state = reached([received], consumers, keeps)
            if handed_on not in state or received in streams:
                continue
            for index in reached([handed_on], reads, state.__contains__):
                node = graph.nodes[index]
                factors = {v.node for v in node.inputs} - own
                if node.name in ("mul", "div") and factors and factors <= made:
                    factors |= leads_to_product(factors, before, products.__contains__)
                    found.update(dict.fromkeys(factors - products, index))
    return found


def cotangents_into_loops(
    graph: Graph, products: set[int], state: set[int]
) -> set[int]:
    """Returns the cotangents that one layer's backward pass hands to a loop of another.

    They lead to the loop's matrix multiplications through its carries alone, a cell's
    cotangent; but they are between two layers, as any others, and not carried
    themselves.
    """
    predecessors = graph.predecessors()
    backward = [
        x for x in graph.loops if x.place.backward and not products.isdisjoint(x.nodes)
    ]
    inner = {n for x in backward for y in _inside(x, backward) for n in y.nodes}
    found: set[int] = set()
    for loop in backward:
        inside = set(loop.nodes)
        entered = {
            n for n in (inside & state) - inner if graph.nodes[n].name != "carry_in"
        }
        stack = list(entered)
        while stack:
            for source in predecessors[stack.pop()]:
                if source in state or source in entered or source in found:
                    continue
                if source in inside:
                    entered.add(source)
                    stack.append(source)
                else:
                    found.add(source)
    found |= leads_to_product(found, predecessors, state.__contains__)
    found -= inner
    return {n for n in found if is_backward(graph.nodes[n])}


def _inside(loop: Loop, loops: Sequence[Loop]) -> list[Loop]:
    """Returns the loops that stand in a loop."""
    nodes = set(loop.nodes)
    return [x for x in loops if x is not loop and nodes.issuperset(x.nodes)]


def trains(graph: Graph, loop: Loop) -> bool:
    """Whether a loop of a forward pass holds a backward pass of its own."""
    return not loop.place.backward and any(
        graph.nodes[n].place.backward for n in loop.nodes
    )


def _is_shared(graph: Graph, slice_: Value, loop: Loop) -> bool:
    """Whether a stack is made of too few numbers for weights of its own in each row.

    Arguments and random numbers alone are numbers of their own, whatever is made of
    them, and no more than fit into what they pass on the way; a stack that is generated
    without any is shared. What is smaller than half a row scales weights, and random
    numbers drop some. Of loops around this one, one iteration counts.

    Args:
      graph: the program.
      slice_: of the stack, in one iteration of the loop and of loops inside of it.
      loop: a scan of a known length.
    """
    arguments = {v.argument: v for v in graph.arguments}
    lengths = {x.token: x.length for x in graph.loops}
    order = slice_.slice_of.index(loop.token)
    around = set(slice_.slice_of[:order])
    row = slice_.size * _product(lengths, slice_.slice_of[order + 1 :])
    times = max(1, graph.nodes[loop.nodes[0]].trips // loop.length)  # of the whole loop

    def size_of(value: Value) -> int:
        if value.node >= 0:  # anew in each iteration
            node = graph.nodes[value.node]
            inside_of = [x for x in graph.loops if node.index in x.nodes]
            if node.name in _ROWS and not any(_is_row_of(node, x) for x in inside_of):
                return node.size  # it may be the same row each time
            return node.size * max(1, node.trips // times)
        whole = arguments.get(value.argument)  # as large as it was given
        if whole is not None:
            return whole.size // _product(lengths, around.intersection(value.slice_of))
        inside = [token for token in value.slice_of if token not in around]
        return value.size * _product(lengths, inside)

    left, known = [slice_], dict[_Key, tuple[Value, list[Value]]]()
    sources: dict[bool, int] = collections.Counter()
    while left:
        value = left.pop()
        reads = _read_for(graph, value)
        is_number = value.constant is not None or (value.node >= 0 and not reads)
        if _key(value) in known or (is_number and not value.made_of_data):
            continue
        known[_key(value)] = value, reads
        left += reads
        if not reads and 2 * size_of(value) >= row:
            sources[is_drawn(value, graph.nodes)] += size_of(value)
    drawn = not sources[False]
    held: dict[_Key, int] = {}
    for key, (value, reads) in sorted(known.items(), key=lambda x: x[1][0].node):
        size = size_of(value)
        if reads:
            before = {_key(v) for v in reads} & known.keys()
            size = min(size, sum(held.get(k, size_of(known[k][0])) for k in before))
        elif is_drawn(value, graph.nodes) != drawn:
            size = 0
        held[key] = size if 2 * size >= row else 0
    numbers = min(sources[drawn], held.get(_key(slice_), 0))
    return 2 * numbers <= row * loop.length


def _product(lengths: Mapping[int, int], tokens: Iterable[int]) -> int:
    """Returns how often the innermost of loops runs in one iteration around them."""
    return math.prod(lengths[token] for token in tokens)


_Key: TypeAlias = tuple[int, int, Hashable]


def _key(value: Value) -> _Key:
    return value.node, value.argument, value.name


def _read_for(graph: Graph, value: Value) -> list[Value]:
    """Returns what a value is computed of: nothing for arguments and gradients."""
    if value.node >= 0:
        node = graph.nodes[value.node]
        if is_backward(node):
            return []
        if node.drawn:
            return [v for v in node.inputs if is_drawn(v, graph.nodes)]
        return [v for v in (*node.inputs, *node.others) if v is not None]
    if isinstance(value.name, Made):
        return [v for v in value.name.operands if v is not None]
    return []


def _whole(weight: Any) -> Hashable:
    """Returns the array of which a weight is a part."""
    while len(weight) > 2:  # a part: of what, and which result of which node
        weight = weight[0]
    return weight


class _Weight(NamedTuple):
    """A weight of one iteration.

    Attributes:
      of: the array that is sliced, and which part of a slice it is.
      turned: the permutations of its dimensions.
      size: how many elements the slice has.
    """

    of: Hashable
    turned: tuple[Any, ...]
    size: int


def _is_row_of(node: Node, loop: Loop) -> bool:
    """Whether an iteration picks a part by its own number, of what all are given."""
    if len(node.inputs) != 1 or node.inputs[0].node in loop.nodes:
        return False
    left, counts = [v for v in node.others if v is not None], False
    for value in left:
        made = value.name if isinstance(value.name, Made) else None
        if loop.token in value.slice_of:
            is_iota = made and made.name == "iota" and counts_up(made.eqn)
            counts = isinstance(value.name, Count) or bool(is_iota)
            if not counts or value.slice_of[-1] != loop.token:
                return False
        elif made is not None and made.name in _COUNTS:
            read = [v for v in made.operands if v is not None]
            factors = [v.constant for v in read] if made.name == "mul" else []
            if any(x is not None and not np.all(x) for x in factors):
                return False  # nothing differs any more
            left += read
        elif value.constant is None:
            return False
    return counts


def _layer_products(
    graph: Graph,
    loop: Loop,
    categories: Sequence[Category | None],
    made: set[int],
) -> tuple[dict[int, set[Hashable]], dict[Hashable, list[tuple[int, Hashable]]]]:
    """Returns the products of a loop with slices of weights, and of which arrays.

    What an iteration makes of a slice, and of nothing that it was handed, is that
    slice, unless it is made of others that are larger: weights may be masked,
    normalized, dequantized or added to. So is a row that it picks by its own number
    from an array that all are given. With the products comes, for each of these
    arrays, who reads a slice of it, and how. Parts of a slice are weights of their own.
    """
    moved: dict[int, _Weight] = {}
    picked: dict[int, Value] = {}  # rows, as slices of what they are rows of
    length = loop.eqn.params["length"]
    consumers, within = graph.consumers(), loop.nodes.__contains__
    carried = reached([received for received, _ in loop.carries], consumers, within)

    shared: dict[tuple[int, int], bool] = {}

    def is_own(value: Value) -> bool:
        if value.node in made or not isinstance(length, int):
            return value.node not in made
        key = value.node, value.argument
        if key not in shared:
            shared[key] = _is_shared(graph, value, loop)
        return not shared[key]

    def found(value: Value) -> _Weight | None:
        if value.node in picked:
            value = picked[value.node]
        if loop.token in value.slice_of:
            own = (value.node, value.argument), (), value.size
            return _Weight(*own) if is_own(value) else None
        weight = moved.get(value.node)
        if weight is None or graph.nodes[value.node].name not in _PARTS:
            return weight
        return weight._replace(of=(weight.of, value.node, value.result))

    products: dict[int, set[Hashable]] = {}
    reads: dict[Hashable, list[tuple[int, Hashable]]] = collections.defaultdict(list)
    for index in loop.nodes:
        node = graph.nodes[index]
        if node.name in _ROWS and _is_row_of(node, loop):
            array = node.inputs[0]
            picked[index] = array.at(node.avals[0], (*array.slice_of, loop.token))
            continue
        read = [*node.inputs, *(v for v in node.others if v is not None)]
        sources = [s for v in read if (s := found(v)) is not None]
        if categories[index] is Category.ALLOW:
            for value in node.inputs:
                if (source := found(value)) is not None:
                    products.setdefault(index, set()).add(source.of)
                    way = contracted(node, value), source.turned
                    reads[source.of].append((index, way))
        elif any(v.node in carried for v in read):
            if node.name == "mul":
                for source in sources:
                    reads[source.of].append((index, node.name))
        elif sources:
            weight = max(sources, key=lambda source: source.size)
            if node.name == "transpose":
                turn = node.eqn.params["permutation"]
                weight = weight._replace(turned=(*weight.turned, turn))
            if 2 * weight.size >= node.size:
                moved[index] = weight
    return products, reads
