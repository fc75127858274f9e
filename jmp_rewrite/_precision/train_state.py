"""Which nodes hold train state: what stays float32 without being told.

Parameters, optimizer moments, running statistics, an ODE's state and an LSTM's cell
have one thing in common: they come in as an argument, a captured array or a loop's
carry, and arithmetic of their own shape turns them into their next value. What such
arithmetic makes stays float32; a matrix product reads a rounded copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_rewrite._graph.nodes import Graph, Loop, Node, Value, reached
from jmp_rewrite._rules.table import Category

# State stays state through these, but they do no arithmetic: they may be half (a
# weight is cast before it is transposed or gathered from other devices).
_MOVES = frozenset(
    {
        "carry_in",
        "carry_out",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "device_put",
        "expand_dims",
        "join",
        "name",
        "optimization_barrier",
        "pvary",
        "reduce_precision",
        "reshape",
        "reshard",
        "sharding_constraint",
        "split",
        "squeeze",
        "stack_out",
        "stop_gradient",
        "transpose",
    }
)
# Clear primitives that make a new value of what they read, in its shape.
_UPDATES = frozenset(
    {
        "abs",
        "clamp",
        "dynamic_update_slice",
        "max",
        "min",
        "neg",
        "scatter",
        "select_n",
    }
)
# Of these the first operand alone is what is updated.
_UPDATES_FIRST = frozenset({"dynamic_update_slice", "scatter"})


def train_state(
    graph: Graph,
    categories: Sequence[Category | None],
    consumers: Sequence[Sequence[int]],
    streams: set[int],
) -> set[int]:
    """Returns the nodes that update train state, or lie on its way.

    Args:
      graph: the program.
      categories: of each node; allow nodes end what is followed.
      consumers: for each node the nodes that read it.
      streams: carries that are no state: the residual streams of scans over layers.

    Returns:
      Indices of nodes that stay float32.
    """
    updates = _updates(graph, categories, consumers, streams)
    return updates | _paths(graph, categories, consumers, streams)


def _paths(
    graph: Graph,
    categories: Sequence[Category | None],
    consumers: Sequence[Sequence[int]],
    exempt: set[int],
) -> set[int]:
    """Returns what lies between a state's old and its new value.

    That is every path without a product from an argument to a result of the same shape,
    or from a loop's carry to what an iteration hands on. Paths through the backward
    pass are left out: what they carry are gradients, and the residual stream of a model
    reaches the new embedding that way. What a deny node makes is float32 anyway.
    """
    returned = {v.aval.shape for v in graph.results if v.node >= 0}
    shapes = {v.aval.shape for v in graph.arguments if v.aval.shape} & returned
    bits = {shape: 1 << k for k, shape in enumerate(shapes)}
    begins, ends = [0] * len(graph.nodes), [0] * len(graph.nodes)
    for value in graph.results:
        if value.node >= 0:
            ends[value.node] |= bits.get(value.aval.shape, 0)
    for k, loop in enumerate(graph.loops, len(bits)):
        for received, handed_on in loop.carries:
            if received not in exempt:
                begins[received] |= 1 << k
                ends[handed_on] |= 1 << k
    follows = [
        categories[n.index] in (Category.INFER, Category.CLEAR)
        and not n.place.backward
        and bool(n.avals)
        for n in graph.nodes
    ]
    ahead = _spread_forward(graph, begins, bits, follows)
    behind = _spread_backward(ends, consumers, follows)
    return {n for n, on in enumerate(follows) if on and ahead[n] & behind[n]}


def _spread_forward(
    graph: Graph,
    begins: Sequence[int],
    bits: Mapping[tuple[int, ...], int],
    follows: Sequence[bool],
) -> list[int]:
    """Returns for each node the states (a bit each) that lead to it."""
    arguments = {v.argument: bits.get(v.aval.shape, 0) for v in graph.arguments}
    ahead = [0] * len(begins)
    changed = True
    while changed:
        changed = False
        for node in graph.nodes:
            if not follows[node.index]:
                continue
            mask = begins[node.index]
            for value in node.inputs:
                if value.node >= 0:
                    mask |= ahead[value.node]
                elif value.argument >= 0:
                    mask |= arguments.get(value.argument, 0)
                elif value.constant is None:
                    mask |= bits.get(value.aval.shape, 0)
            if mask & ~ahead[node.index]:
                ahead[node.index] |= mask
                changed |= node.name == "carry_out"
    return ahead


def _spread_backward(
    ends: Sequence[int],
    consumers: Sequence[Sequence[int]],
    follows: Sequence[bool],
) -> list[int]:
    """Returns for each node the states (a bit each) that it leads to."""
    behind = [0] * len(ends)
    changed = True
    while changed:
        changed = False
        for node in range(len(ends) - 1, -1, -1):
            if not follows[node]:
                continue
            mask = ends[node]
            for reader in consumers[node]:
                mask |= behind[reader]
            if mask & ~behind[node]:
                behind[node] |= mask
                changed |= any(reader <= node for reader in consumers[node])
    return behind


def _updates(
    graph: Graph,
    categories: Sequence[Category | None],
    consumers: Sequence[Sequence[int]],
    exempt: set[int],
) -> set[int]:
    """Returns the arithmetic that makes a new value of a state, in its shape.

    It may lead to a product only, and to no result: the perturbed weights of SAM, the
    fast weights of MAML.
    """
    made = made_by_products(categories, consumers) if graph.loops else set()
    state: set[int] = set()
    pinned: set[int] = set()
    work = list(range(len(graph.nodes) - 1, -1, -1))
    while work:
        node = graph.nodes[work.pop()]
        if node.index in state:
            continue
        kind = _follows(node, categories[node.index], state, exempt, made)
        if kind:
            state.add(node.index)
            if kind == "update":
                pinned.add(node.index)
            work.extend(consumers[node.index])
    return pinned


def _follows(
    node: Node,
    category: Category | None,
    state: set[int],
    exempt: set[int],
    made: set[int],
) -> str:
    """Tells whether a node moves or updates state, or neither ("")."""
    if category is Category.ALLOW or not node.avals:
        return ""
    if node.name == "carry_in" and node.index not in exempt:
        return "move"
    if not node.inputs:
        return "move" if _is_random(node) or _is_filled(node) else ""

    def is_state(value: Value) -> bool:
        return value.node in state or _is_source(value, made)

    if node.name in ("carry_in", "join"):
        return "move" if any(map(is_state, node.inputs)) else ""
    if node.name in _MOVES:
        kept = node.inputs if node.name == "concatenate" else node.inputs[:1]
        return "move" if all(map(is_state, kept)) else ""
    shape = node.avals[0].shape
    if not shape or not (category is Category.INFER or node.name in _UPDATES):
        return ""
    read = node.inputs[:1] if node.name in _UPDATES_FIRST else node.inputs
    if node.name not in ("add", "sub"):
        # Numbers that fill an array are where a sum starts, and nothing else.
        read = [v for v in read if v.constant is None]
    if any(is_state(v) and v.aval.shape == shape for v in read):
        return "update"
    return ""


def _is_filled(node: Node) -> bool:
    """Parameters and sums that a program starts itself are zeros at first."""
    return node.name == "broadcast_in_dim" and bool(node.avals[0].shape)


def _is_source(value: Value, made: set[int]) -> bool:
    """Tells an argument, a captured array or a slice of a loop's `xs`.

    What a product has made and a loop slices are activations: a forward pass in a loop
    stacks them for the backward pass.
    """
    if value.slice_of >= 0:
        return value.node not in made
    return value.node < 0 and value.constant is None and value.made_of_data


def _is_random(node: Node) -> bool:
    """Parameters that a program draws itself start as random bits.

    The derivative of `erfc`, and so of an exact GELU, also makes floats of bits, but of
    those of another float.
    """
    is_float_of_bits = node.name == "bitcast_convert_type" and node.of_bits is None
    return is_float_of_bits and bool(node.avals[0].shape)


def residual_streams(
    graph: Graph,
    categories: Sequence[Category | None],
    consumers: Sequence[Sequence[int]],
) -> set[int]:
    """Returns the carries that are the residual stream of a scan over layers.

    There each iteration multiplies the carry by its own weights, slices of `xs`, and
    hands on what comes out. It is what runs through a stack of layers and no state.
    A loop over train steps also multiplies a carry (the weights) by slices (batches):
    it is told apart because its body holds a backward pass of its own.
    """
    streams: set[int] = set()
    made = made_by_products(categories, consumers) if graph.loops else set()
    for loop in graph.loops:
        if loop.eqn.primitive.name != "scan" or _trains(graph, loop):
            continue
        products = _layer_products(graph, loop, categories, made)
        for received, handed_on in loop.carries:
            ahead = _reach(received, consumers, loop.nodes)
            if any(
                product in ahead
                and handed_on in _reach(product, consumers, loop.nodes)
                and _multiplies(graph.nodes[product], ahead | {received})
                for product in products
            ):
                streams.add(received)
    return streams


def recurrent_activations(
    graph: Graph,
    categories: Sequence[Category | None],
    consumers: Sequence[Sequence[int]],
) -> set[int]:
    """Returns what products make inside forward loops: the gates of an LSTM.

    They lead to products through a carry alone, like an update of train state; but
    no backward pass lies before them.
    """
    inside = {
        n
        for loop in graph.loops
        if not loop.place.backward and not _trains(graph, loop)
        for n in loop.nodes
    }
    if not inside:
        return inside
    return inside & made_by_products(categories, consumers)


def cotangents_into_loops(
    graph: Graph, predecessors: Sequence[Sequence[int]], state: set[int]
) -> set[int]:
    """Returns the cotangents that one layer's backward pass hands to a loop of another.

    They lead to products through the loop's carries alone, a cell's cotangent; but
    they are between two layers, as any others, and not carried themselves.
    """
    backward = [x for x in graph.loops if x.place.backward]
    inner = {n for x in backward for y in _inside(x, backward) for n in y.nodes}
    found = {
        source
        for loop in backward
        for inside in [set(loop.nodes)]
        for node in (inside & state) - inner
        if graph.nodes[node].name != "carry_in"
        for source in predecessors[node]
        if source not in inside and source not in state
    }
    found |= leads_to_product(found, predecessors, state.__contains__)
    found -= inner
    places = ((n, graph.nodes[n].place) for n in found)
    return {n for n, place in places if place.backward and not place.recomputed}


def _inside(loop: Loop, loops: Sequence[Loop]) -> list[Loop]:
    """Returns the loops that stand in a loop."""
    nodes = set(loop.nodes)
    return [x for x in loops if x is not loop and nodes.issuperset(x.nodes)]


def _trains(graph: Graph, loop: Loop) -> bool:
    return not loop.place.backward and any(
        graph.nodes[n].place.backward for n in loop.nodes
    )


def made_by_products(
    categories: Sequence[Category | None], consumers: Sequence[Sequence[int]]
) -> set[int]:
    """Returns the nodes that have a product upstream: activations, and no weights."""
    products = (n for n, c in enumerate(categories) if c is Category.ALLOW)
    return reached(products, consumers)


def _layer_products(
    graph: Graph,
    loop: Loop,
    categories: Sequence[Category | None],
    made: set[int],
) -> list[int]:
    """Returns the products of a loop with an operand that is a slice of weights."""
    moved: set[int] = set()

    def is_slice(value: Value) -> bool:
        if value.slice_of == loop.token:
            return value.node not in made
        return value.node in moved

    products = []
    for index in loop.nodes:
        node = graph.nodes[index]
        if categories[index] is Category.ALLOW:
            if any(map(is_slice, node.inputs)):
                products.append(index)
        elif categories[index] is Category.CLEAR and len(node.inputs) == 1:
            if is_slice(node.inputs[0]):
                moved.add(index)
    return products


def _multiplies(product: Node, stream: set[int]) -> bool:
    return any(value.node in stream for value in product.inputs)


def _reach(start: int, consumers: Sequence[Sequence[int]], within: range) -> set[int]:
    """Returns what an iteration computes from a node, up to the next iteration."""
    found: set[int] = set()
    stack = [start]
    while stack:
        for node in consumers[stack.pop()]:
            if node in within and node not in found and node != start:
                found.add(node)
                stack.append(node)
    return found


def leads_to_product(
    products: Iterable[int],
    predecessors: Sequence[Sequence[int]],
    stops: Callable[[int], bool],
) -> set[int]:
    """Returns the nodes that a matrix product depends on without a stop between."""
    found: set[int] = set()
    stack = list(products)
    while stack:
        for node in predecessors[stack.pop()]:
            if node not in found and not stops(node):
                found.add(node)
                stack.append(node)
    return found


def moved_arguments(
    graph: Graph,
    categories: Sequence[Category | None],
    like_arguments: Iterable[int] = (),
) -> dict[int, int]:
    """Returns the clear nodes whose result holds nothing but arguments' values.

    With each comes the number of dimensions that those arguments have.

    Args:
      graph: the program.
      categories: of each node.
      like_arguments: nodes that hold numbers as large as an argument may hold.
    """
    moved = {
        n: len(graph.nodes[n].avals[0].shape)
        for n in like_arguments
        if graph.nodes[n].avals
    }
    for node in graph.nodes:
        if categories[node.index] is Category.CLEAR and node.avals and node.inputs:
            ranks = [argument_rank(v, moved) for v in node.inputs]
            if min(ranks) >= 0:
                moved[node.index] = max(ranks)
    return moved


def argument_rank(value: Value, moved: Mapping[int, int]) -> int:
    """Returns the dimensions of the argument that a value holds; -1 if it is none.

    Constants whose numbers are known have been checked against the compute dtype.
    """
    if value.node >= 0:
        return moved.get(value.node, -1)
    known = value.constant is not None or not value.made_of_data
    return -1 if known else len(value.aval.shape)


def is_whole_step(graph: Graph) -> bool:
    """Tells a program that nobody differentiates: a whole step, or a gradient.

    It holds a backward pass, and returns something that this has made in the shape of
    an argument: gradients, or new parameters. A loss with a gradient inside (a penalty,
    a physics-informed one) returns a number, and is differentiated once more.
    """
    backward = (n.index for n in graph.nodes if n.place.backward)
    made = reached(backward, graph.consumers())
    shapes = {v.aval.shape for v in graph.arguments} - {()}
    return any(v.node in made and v.aval.shape in shapes for v in graph.results)


def moves(graph: Graph, node: int) -> list[int]:
    """Returns what moves a node's numbers to it, back to what computes them.

    The node comes first and its origin last; they are one if it moves nothing.
    """
    found: list[int] = []
    while node not in found:
        found.append(node)
        is_move = graph.nodes[node].name in _MOVES - {"carry_in", "join"}
        sources = [v.node for v in graph.nodes[node].inputs if v.node >= 0]
        if not is_move or len(sources) != 1:
            break
        (node,) = sources
    return found


def optimizer_products(
    graph: Graph, categories: Sequence[Category | None], state: set[int]
) -> list[int]:
    """Returns the products that make updates of gradients: Shampoo's, Muon's.

    Within one iteration they lie between a backward pass and a train state, and no
    backward pass follows: a second forward pass, as in SAM or a GAN step, is followed
    by its own, and an evaluation after the step leads to no state.
    """
    nodes = graph.nodes
    steps = [
        [v.node for v in n.inputs if v.node >= 0 and nodes[v.node].name != "carry_out"]
        for n in nodes
    ]
    after = [n.place.backward for n in nodes]
    before = list(after)
    updates = [n.index in state for n in nodes]
    for index, sources in enumerate(steps):
        after[index] = after[index] or any(after[s] for s in sources)
    for index in range(len(nodes) - 1, -1, -1):
        for source in steps[index]:
            before[source] = before[source] or before[index]
            updates[source] = updates[source] or updates[index]
    return [
        n
        for n, category in enumerate(categories)
        if category is Category.ALLOW
        and not nodes[n].place.backward
        and after[n]
        and not before[n]
        and updates[n]
    ]
