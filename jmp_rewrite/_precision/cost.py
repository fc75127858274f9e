"""What a placement costs: which values are written to memory, and their bytes.

A compiler fuses arithmetic, so most values of a program exist in registers alone, where
half precision saves nothing and loses digits. Bytes move where a value is *stored*:

- operands and results of matrix products, and results of what no compiler fuses with
  its readers (gathers, scatters, sorts, sums, windows, what loops hand on);
- what is taken apart by slices, and the parts of what is joined;
- a value that a later kernel reads, if it is costly (`exp`, `tanh`) or made of several
  stored values. One that is cheaply made of a single stored value is computed again:
  a layer norm's `x - mean` from `x`, but not the sum of two streams, because two values
  would have to be read in place of one, nor what takes several operations and many
  kernels read.

A stored element costs 4 bytes in float32, 2 in half, and 6 if a product wants it half
while others read it in float32. Rounding costs accuracy: an eighth of a byte an element
is less than any saving, so that what is stored is rounded, and nothing else is. All of
it is counted as often as it runs.

Sources: XLA duplicates a cheap producer into its consumers, never an expensive one
(xla/service/instruction_fusion.cc, `IsExpensive`), and ends a fusion at a reduction or
a product (its producers, and on TPUs its consumers, are fused). What was measured is in
`benchmarks/NOTES.md`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from jmp_rewrite._graph import (
    JOINTS,
    Graph,
    Node,
    Value,
    has_to_be_read,
    is_backward,
    reached,
)
from jmp_rewrite._precision import loops, origins
from jmp_rewrite._precision.origins import REDUCTIONS, SMALL, is_zero, read_alone
from jmp_rewrite._precision.pins import Pins
from jmp_rewrite._precision.placement import Storage
from jmp_rewrite._rules import (
    COPIES,
    COSTLY,
    MOVES,
    PICKS,
    PRODUCTS,
    TAKES_APART,
    VIEWS,
    Category,
)

FLOAT32_BYTES, HALF_BYTES = 4, 2
ROUNDINGS_PER_BYTE = 8
# No more elements than this take one line of a cache: half of it saves nothing.
ONE_LINE = 16

# Of costly arithmetic, that of which a rounded result is as good as any: it is used as
# a factor, while differences of logarithms are taken, and exponentials of them.
ACTIVATIONS = frozenset(
    {"cos", "erf", "erfc", "exp", "exp2", "logistic", "sin", "tanh"}
)
# From this many kernels on, XLA:GPU stores what it could compute again in each (there,
# 23: a norm is five; a GELU is three, where it does not).
MANY_KERNELS = 4
# Of a forward function, whose backward pass is not there, or will be (ViT: statistics
# and result of a norm, and the residual stream; 39 -> 19 MB of 177 on an H200).
FORWARD_KERNELS = 3
# And what is made of several stored values, or by this many operations, and read for
# statistics along different axes: from this many kernels on (there, 32).
SEVERAL_KERNELS = 3
SEVERAL_OPERATIONS = 4
# What compilers do not fuse with its readers.
ENDS_KERNEL = JOINTS | frozenset(
    {
        "approx_top_k",
        "argmax",
        "argmin",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "gather",
        "psum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_sum",
        "reduce_window_max",
        "reduce_window_min",
        "reduce_window_sum",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
        "select_and_gather_add",
        "select_and_scatter_add",
        "sort",
        "top_k",
    }
)

# These read their operand from memory: no compiler computes it inside of them.
SORTS = frozenset({"approx_top_k", "sort", "top_k"})
# What stands between a matrix multiplication and a sort of its biased result.
_BIASES = MOVES | {"add", "max", "min", "neg", "select_n", "sub"}

# How a share of a cotangent is computed.
_SHARES = frozenset({"convert_element_type", "div", "mul", "select_n"})

# Sums of which an average may be computed.
_SUMS = frozenset({"reduce_sum", "reduce_window_sum"})
# How an average comes back to what it is one of.
_ENLARGE = frozenset({"add", "broadcast_in_dim", "div", "mul", "sub"})


def storage(graph: Graph, pins: Pins) -> Storage:
    """Returns the cost of storing each value of a program in half or in float32."""
    stored = _stored(graph, pins)
    returned = frozenset(v.node for v in graph.results)
    weighed = _weighed(graph, pins)

    def moves(node: int) -> bool:
        return pins.moves_exactly(graph.nodes[node])

    # What products and weighed cotangents read, or what moves it there, alone.
    factors = read_alone(graph, lambda n: pins.reads_half(n) or n in weighed, moves)
    operands = read_alone(graph, pins.reads_half, moves)
    wants = {n for n in operands if graph.nodes[n].name in MOVES} | pins.products()
    activations = _activations(graph, pins)
    may, saved, edges = [], [], []
    ties = [pair for loop in graph.loops for pair in loop.carries]
    for node in graph.nodes:
        index, rounding = node.index, _price(node.size, node.trips)
        free = pins.may_round(index)
        keeps = index in pins.emits_full or node.size <= ONE_LINE
        if node.name == "stack_out":
            source = node.inputs[0].node
            origin = _moved(source, graph, pins)
            if pins.may_round(origin):
                ties.append((source, index))
            elif pins.is_asked_full(origin):
                keeps = True
            elif origin in pins.decays:
                keeps = True  # the backward pass multiplies by it in each iteration
            elif index not in factors and origin not in activations:
                keeps = True
        may.append(free and not keeps)
        saving = _saving(node, graph, wants, stored[index], index in returned)
        if pins.moves_exactly(node):
            for value in node.inputs:
                if value.node >= 0:
                    price = _price(value.size, node.trips)
                    edges.append((value.node, index, price))
        elif pins.categories[index] is not Category.ALLOW:
            saving -= rounding
        if index in pins.moved and may[-1]:
            saving += rounding  # products share the argument's rounded copy
        saved.append(saving)
    return Storage(saved, edges, may, ties, _needs(graph, wants))


def _needs(graph: Graph, wants: set[int]) -> list[tuple[int, int]]:
    """Returns (pick, operand) where a product reads an extreme that is compared.

    The gradient of a maximum asks which elements equal it: it is half only if they are.
    What no product reads is no activation, such as a router's largest probability.
    A number may take its place first: `where(isneginf(largest), 0, largest)`.
    """
    consumers, picked = graph.consumers(), dict(origins.compared_picks(graph))

    def picks_one(node: int) -> bool:
        data = [v for v in graph.nodes[node].inputs if v.made_of_data]
        return graph.nodes[node].name in PICKS and len(data) == 1

    wants = reached(wants, graph.predecessors(), picks_one)
    extremes = (n for n in picked if graph.nodes[n].name not in COPIES)
    read = (n for n in extremes if not wants.isdisjoint(consumers[n]))
    found = reached(read, graph.predecessors(), picked.__contains__)
    return [(n, v.node) for n in sorted(found) for v in picked[n] if v.node >= 0]


def _activations(graph: Graph, pins: Pins) -> set[int]:
    """Returns activation functions' results, their products, and what one makes.

    A stack of these may be rounded where they themselves stay float32 (an LSTM's output
    is carried). What activation functions are taken of may not: the scores of a CRF are
    carried, and a backward pass takes the exponential of their differences.
    """
    if pins.half == np.float16:  # states may be larger than float16's largest number
        return set()
    found: set[int] = set()
    for node, large in zip(graph.nodes, graph.large_operands(), strict=True):
        follows = (len(large) == 1 or node.name == "mul") and all(
            v.node in found for v in large
        )
        ends = pins.categories[node.index] is Category.ALLOW or node.name in COSTLY
        if node.name in ACTIVATIONS or (large and follows and not ends):
            found.add(node.index)
    return found


def _moved(node: int, graph: Graph, pins: Pins) -> int:
    """Returns the node that computes, or carries, the numbers that one only moves."""
    while pins.moves_exactly(graph.nodes[node]):
        sources = [v.node for v in graph.nodes[node].inputs]
        if len(sources) != 1 or sources[0] < 0 or graph.nodes[node].eqn is None:
            break
        (node,) = sources
    return node


def _unpadded(node: int, graph: Graph, pins: Pins) -> int:
    """Returns the node that computes what is moved and padded with zeros."""
    node = _moved(node, graph, pins)
    while graph.nodes[node].name == "pad" and graph.nodes[node].inputs[0].node >= 0:
        node = _moved(graph.nodes[node].inputs[0].node, graph, pins)
    return node


def _price(size: int, trips: int) -> int:
    return max(1, size * trips // ROUNDINGS_PER_BYTE)


def _saving(
    node: Node, graph: Graph, wants: set[int], stored: bool, returned: bool
) -> int:
    """Returns the bytes that a half result of a node saves.

    Args:
      node: the node.
      graph: the program.
      wants: the products of half operands, and what moves these there alone.
      stored: whether the result is written to memory.
      returned: whether the program returns it.
    """
    readers = graph.consumers()[node.index]
    products = [r for r in readers if r in wants]
    half = full = 0
    if stored or 0 < len(products) < len(readers):
        half, full = HALF_BYTES, FLOAT32_BYTES
    if products:
        half, full = HALF_BYTES, full + HALF_BYTES
    if returned:
        half, full = half + FLOAT32_BYTES, max(full, FLOAT32_BYTES)
    return (full - half) * node.size * node.trips


def _weighed(graph: Graph, pins: Pins) -> set[int]:
    """Returns the multiplications of cotangents in a backward pass.

    A rounded factor changes them by as much as it was rounded, and so all that follows
    up to the next product or sum, if that is linear: no exponential of a difference.
    """
    if pins.half == np.float16:  # states may be larger than float16's largest number
        return set()

    def ends(node: int) -> bool:
        is_product = pins.categories[node] is Category.ALLOW
        return is_product or graph.nodes[node].name in REDUCTIONS

    costly = [n.index for n in graph.nodes if n.name in COSTLY]
    curved = origins.leads_to_product(costly, graph.predecessors(), ends)
    return {
        n.index
        for n in graph.nodes
        if n.name == "mul" and is_backward(n) and n.index not in curved
    }


def _stored(graph: Graph, pins: Pins) -> list[bool]:
    """Returns for each node whether its result is written to memory.

    What a node of a later level reads is needed again, and so is its anchor, from which
    it is computed.
    """
    stored = [
        n.name in ENDS_KERNEL or pins.categories[n.index] is Category.ALLOW
        for n in graph.nodes
    ]
    parts = _taken_apart(graph, pins) | _joined(graph, pins)
    windows = _cut(graph, pins) | _windows(graph)
    for apart in parts | windows | _sorted(graph, pins):
        stored[apart] = True
    for total, mean in _means(graph, pins):
        stored[total], stored[mean] = False, True
    innermost = graph.innermost_loops()
    anchors = _anchors(graph, stored)
    sources = [_sources(n) for n in graph.nodes]
    levels = _levels(sources, stored)
    needed: set[int | None] = set()
    for node in graph.nodes:
        for source in sources[node.index]:
            if innermost[source] != innermost[node.index]:
                needed.add(source)  # passed into a loop, or stacked by one
            elif levels[node.index] > levels[source] + stored[source]:
                if not stored[node.index]:
                    needed.add(anchors[source])
    if not pins.whole_step:
        # The backward pass has yet to be made, and may need any of them again. But the
        # derivatives of costly functions use their own result, before it is rounded.
        forward = (n.index for n in graph.nodes if not is_backward(n))
        needed.update(anchors[n] for n in forward)
        needed = {a for a in needed if a and graph.nodes[a].name not in COSTLY}
    else:
        needed |= _biased_convolutions(graph, pins)
        needed |= _read_by_several(graph, anchors, stored, levels)
    needed |= _bottlenecks(graph, pins, anchors, stored, levels)
    for index in needed - _partial_sums_of_scatters(graph):
        if index is not None:
            stored[index] = True
    return stored


def _partial_sums_of_scatters(graph: Graph) -> set[int]:
    """Returns the sums of scatters into zeros that another such scatter is added to.

    They are the cotangents of an array that several lookups read. XLA makes one scatter
    of all of them, unless a partial sum is rounded.
    """
    nodes, consumers = graph.nodes, graph.consumers()

    def is_scattered(value: Value) -> bool:
        maker = nodes[value.node] if value.node >= 0 else None
        return (
            maker is not None
            and maker.name == "scatter-add"
            and is_zero(maker.inputs[0])
            and len(consumers[value.node]) == 1
        )

    sums = {
        n.index
        for n in nodes
        if n.name in ("add", "add_any") and any(map(is_scattered, n.inputs))
    }
    return {n for n in sums if len(consumers[n]) == 1 and consumers[n][0] in sums}


def _taken_apart(graph: Graph, pins: Pins) -> set[int]:
    """Returns what is computed as a whole, and read in parts.

    The gate and the values of a gated layer are made by one product and a bias, and
    halves of a norm's result are rotated by a position. XLA:TPU ends a kernel in front
    of a slice, and stores what it slices: in float32, unless it is rounded. Not the
    gates of a cell, which are small and stay where they are computed, nor what a number
    was added to: the next line may take it off.
    """
    parts: dict[int, int] = {}
    for node in graph.nodes:
        if node.name in TAKES_APART and node.inputs and node.inputs[0].node >= 0:
            source = node.inputs[0].node
            parts[source] = parts.get(source, 0) + node.size
    whole = (n for n, size in parts.items() if size >= graph.nodes[n].size)
    found = {_moved(n, graph, pins) for n in whole} - _offset(graph)
    return found - loops.of_carried_states(graph, pins.reads_half)


def _sorted(graph: Graph, pins: Pins) -> set[int]:
    """Returns what is sorted of the biased results of products.

    Their order is that of half numbers in any case. The probabilities of a router are
    float32 values, and half of them would be ties.
    """
    products: set[int] = set()
    biased: set[int] = set()
    for node, large in zip(graph.nodes, graph.large_operands(), strict=True):
        index, sources = node.index, {v.node for v in large}
        if pins.categories[index] is Category.ALLOW:
            products.add(index)
        elif node.name in _BIASES and (made := sources & (products | biased)):
            others = sources - made
            if all(n < 0 or n in pins.exact for n in others):
                is_moved = node.name in MOVES and made <= products
                (products if is_moved else biased).add(index)
    sorts = (n for n in graph.nodes if n.name in SORTS)
    return {v.node for n in sorts for v in n.inputs} & biased


def _cut(graph: Graph, pins: Pins) -> set[int]:
    """Returns what a forward pass cuts into windows by a reshape, and reduces.

    As in a mean or a maximum of `x.reshape(n, h // 2, 2, w // 2, 2, c)`. XLA:TPU stores
    what it takes dimensions apart of.
    """
    consumers = graph.consumers()
    found: set[int] = set()
    for node in graph.nodes:
        if node.name != "reshape" or not node.inputs or is_backward(node):
            continue
        readers = (graph.nodes[r] for r in consumers[node.index])
        reduced = (r.size for r in readers if r.name in REDUCTIONS)
        source = node.inputs[0].node
        if source >= 0 and node.size < SMALL * max(reduced, default=0):
            found.add(_moved(source, graph, pins))
    return found


def _windows(graph: Graph) -> set[int]:
    """Returns the cotangents of windows that a reshape has cut, put together again.

    A mean or a maximum of `x.reshape(n, h // 2, 2, w // 2, 2, c)` hands each element of
    a window its share. XLA:TPU copies what it merges the dimensions of.
    """
    grown: set[int] = set()
    found: set[int] = set()
    for node in graph.nodes:
        index = node.index
        if not is_backward(node) or not node.inputs:
            continue
        if node.name == "broadcast_in_dim":
            if any(1 < v.size < node.size for v in node.inputs):
                grown.add(index)
        elif node.name in _SHARES and any(v.node in grown for v in node.inputs):
            grown.add(index)
        elif node.name == "reshape" and node.inputs[0].node in grown:
            found.add(index)
    return found


def _means(graph: Graph, pins: Pins) -> list[tuple[int, int]]:
    """Returns (sum, mean) of sums of which nothing but a mean is computed.

    Compilers divide in the kernel that adds up, and store the mean: that of a pool. One
    that is spread over what it is the mean of is a statistic, of however few, and so
    are means in a backward pass, of what a norm's statistics hand back.
    """
    consumers, nodes = graph.consumers(), graph.nodes

    def is_spread(index: int) -> bool:
        return any(
            (nodes[r].size > nodes[index].size and nodes[r].name in _ENLARGE)
            or (nodes[r].name in VIEWS and is_spread(r))
            for r in consumers[index]
        )

    found = []
    for node, large in zip(nodes, graph.large_operands(), strict=True):
        is_scaled = node.name in ("mul", "div") and len(large) == 1
        if is_scaled and not is_backward(node):
            total, mean = large[0].node, node.index
            is_sum = total >= 0 and nodes[total].name in _SUMS
            if is_sum and len(consumers[total]) == 1 and pins.may_round(mean):
                if not is_spread(mean):
                    found.append((total, mean))
    return found


def _offset(graph: Graph) -> set[int]:
    """Returns the values that a number was added to, up to the next product."""
    found: set[int] = set()
    for node, large in zip(graph.nodes, graph.large_operands(), strict=True):
        if node.name in PRODUCTS or node.name in COSTLY:
            continue
        is_sum = node.name in ("add", "sub")
        by_number = is_sum and (
            any(np.any(x) for x in node.literals.values())
            or any(not v.aval.shape for v in node.inputs)
        )
        is_scaled = node.name not in ("mul", "div") or len(large) == 1
        if by_number or (is_scaled and any(v.node in found for v in large)):
            found.add(node.index)
    return found


def _joined(graph: Graph, pins: Pins) -> set[int]:
    """Returns the cotangents that are computed in parts, and read as a whole.

    So it is with those of what was taken apart. Compilers write the parts, or copy them
    to where they are joined. A forward pass may join an exact array, with an offset.
    """
    found: set[int] = set()
    for node in graph.nodes:
        of_pads = node.disjoint and node.name != "scatter-add"
        if is_backward(node) and (node.name in ("concatenate", "stack") or of_pads):
            parts = {_unpadded(v.node, graph, pins) for v in node.inputs if v.node >= 0}
            sizes = sorted(graph.nodes[n].size for n in parts)
            if len(sizes) > 1 and 2 * sizes[-2] >= sizes[-1]:
                found |= parts
    return found


def _sources(node: Node) -> list[int]:
    """Returns the nodes that a node reads: their results, or bits; through kernels."""
    found = [v.node for v in node.inputs if v.node >= 0]
    if node.of_bits is not None and node.of_bits >= 0:
        found.append(node.of_bits)
    return [*found, *node.through]


def _levels(sources: Sequence[Sequence[int]], stored: Sequence[bool]) -> list[int]:
    """Returns for each node, of which it is said what it reads, its level.

    That is how many kernels end before it, in one iteration of a loop.
    """
    levels = [0] * len(sources)
    for index, read in enumerate(sources):
        levels[index] = max([levels[s] + stored[s] for s in read], default=0)
    return levels


def _bottlenecks(
    graph: Graph,
    pins: Pins,
    anchors: Sequence[int | None],
    stored: Sequence[bool],
    levels: Sequence[int],
) -> set[int]:
    """Returns what all readers of a stored value read in its place, if they are many.

    A norm is five kernels on a GPU: the statistics, the result, and three of the
    backward pass. If a bias or a shift is added to a product before it, XLA does not
    add it in each of them, but once, and stores the sum beside the product, or in its
    place: in float32, unless it is rounded. What is joined to it, if that is small (a
    token for the class), and what moves it, are on the way.
    """
    many = MANY_KERNELS if pins.whole_step else FORWARD_KERNELS
    consumers, innermost = graph.consumers(), graph.innermost_loops()
    sizes = [n.size for n in graph.nodes]
    spread = _spread(graph)

    def is_remade(index: int, size: int) -> bool:
        node = graph.nodes[index]
        is_one = len(node.avals) == 1 and size <= sizes[index] < 2 * size
        return is_one and not stored[index] and node.name not in COSTLY

    def follows(index: int, source: int) -> bool:
        size = sizes[source]
        inputs = graph.nodes[index].inputs
        large = sum(has_to_be_read(v, size) and v.node not in spread for v in inputs)
        same_loop = innermost[index] == innermost[source]
        return same_loop and large == 1 and is_remade(index, size)

    found: set[int] = set()
    for node in graph.nodes:
        last = computed = node.index
        if pins.categories[last] is not Category.ALLOW or len(node.avals) != 1:
            continue
        while len(consumers[last]) == 1 and follows(consumers[last][0], last):
            (last,) = consumers[last]
            if not pins.moves_exactly(graph.nodes[last]):
                computed = last
        if computed == node.index or not pins.may_round(computed):
            continue
        kernels: set[int] = set()
        seen, stack = {last}, [last]
        while stack and len(kernels) < many:
            for reader in consumers[stack.pop()]:
                kernels.add(levels[reader])
                is_same = anchors[reader] == node.index
                if reader not in seen and is_same and is_remade(reader, sizes[last]):
                    seen.add(reader)
                    stack.append(reader)
        if len(kernels) >= many:
            found.add(computed)
    return found


def _biased_convolutions(graph: Graph, pins: Pins) -> set[int]:
    """Returns the sums of convolutions and their biases.

    A compiler adds a bias inside of the convolution, or in its epilogue, so that what
    is stored is the sum.
    """
    consumers, spread = graph.consumers(), _spread(graph)
    found: set[int] = set()
    for node in graph.nodes:
        if node.name != "conv_general_dilated" or not pins.reads_half(node.index):
            continue
        readers = consumers[node.index]
        while len(readers) == 1 and graph.nodes[readers[0]].name in VIEWS:
            readers = consumers[readers[0]]
        if len(readers) == 1 and graph.nodes[readers[0]].name == "add":
            total = graph.nodes[readers[0]]
            large = [v for v in total.inputs if has_to_be_read(v, total.size)]
            if len([v for v in large if v.node not in spread]) == 1:
                found.add(total.index)
    return found


def _read_by_several(
    graph: Graph,
    anchors: Sequence[int | None],
    stored: Sequence[bool],
    levels: Sequence[int],
) -> set[int]:
    """Returns what several kernels read, and is made of several stored values.

    The cotangent of a norm behind a SiLU is one: made of what the next product hands
    back and of the norm's operand, and read for the gradients of bias and scale, for
    two statistics and for its own result. Sums along different axes are kernels of
    their own on a GPU, and there XLA stores it: in float32, unless it is rounded.

    Or that a forward pass makes of one by several operations, and reduces: a rectified
    norm of which a mean is taken, and which is multiplied by a gate that is computed of
    the mean.
    """
    found: set[int] = set()
    operations = _operations(graph, anchors)
    for node in reversed(graph.nodes):
        made = node.index
        anchor = anchors[made]
        if anchor is None or stored[made] or node.name in COSTLY:
            continue
        is_one = anchor != made
        is_cheap = operations[made] < SEVERAL_OPERATIONS or is_backward(node)
        if is_one and (is_cheap or node.size < graph.nodes[anchor].size):
            continue
        kernels = _kernels(graph, made, anchors, levels, found)
        is_reduced = any(name for name, *_ in kernels)
        if len(kernels) >= SEVERAL_KERNELS and (is_reduced or not is_one):
            found.add(made)
    return found


def _operations(graph: Graph, anchors: Sequence[int | None]) -> list[int]:
    """Returns for each node how many operations, in a row, make it of its anchor."""
    found = [0] * len(graph.nodes)
    for node, large in zip(graph.nodes, graph.large_operands(), strict=True):
        if anchors[node.index] not in (None, node.index):
            before = max([found[v.node] for v in large if v.node >= 0], default=0)
            found[node.index] = before + (node.name not in MOVES)
    return found


def _kernels(
    graph: Graph,
    made: int,
    anchors: Sequence[int | None],
    levels: Sequence[int],
    stored: Set[int],
) -> set[tuple[str, Any, int]]:
    """Returns the kernels that read a value, or what is computed again of it.

    Each is the name of a reduction and its axes, or none, and its level.
    """
    consumers = graph.consumers()
    kernels: set[tuple[str, Any, int]] = set()
    seen, stack = {made}, [made]
    while stack:
        for reader in consumers[stack.pop()]:
            reads = graph.nodes[reader]
            if reads.name in REDUCTIONS and reads.eqn is not None:
                axes = reads.eqn.params.get("axes")
                kernels.add((reads.name, axes, levels[reader]))
            elif anchors[reader] != anchors[made] or reader in stored:
                kernels.add(("", None, levels[reader]))
            elif reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return kernels


def _spread(graph: Graph) -> set[int]:
    """Returns the nodes that repeat small values, as a bias is for each position."""
    found: set[int] = set()
    for node in graph.nodes:
        if len(node.inputs) == 1 and node.name in VIEWS:
            (value,) = node.inputs
            if value.node in found or not has_to_be_read(value, node.size):
                found.add(node.index)
    return found


def _anchors(graph: Graph, stored: Sequence[bool]) -> list[int | None]:
    """Returns for each node the one node from which it is cheaply computed again.

    That is the node itself if it is stored, costly, or made of several values of its
    size; None if it is made of an argument, or of small values.
    """
    anchors: list[int | None] = [None] * len(graph.nodes)
    for node, large in zip(graph.nodes, graph.large_operands(), strict=True):
        found: set[Any] = {
            anchors[v.node] if v.node >= 0 else ("argument", v.argument) for v in large
        }
        found.discard(None)
        if stored[node.index] or node.name in COSTLY or len(found) > 1:
            anchors[node.index] = node.index
        else:
            anchor = next(iter(found), None)
            anchors[node.index] = anchor if isinstance(anchor, int) else None
    return anchors
