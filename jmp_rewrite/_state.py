"""Which nodes hold train state: what stays float32 without being told.

Parameters, optimizer moments, running statistics, an ODE's state and an LSTM's cell
have one thing in common: they come in as an argument, a captured array or a loop's
carry, and arithmetic of their own shape turns them into their next value. What such
arithmetic makes stays float32; a matrix product reads a rounded copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_rewrite._graph import Graph, Loop, Node, Value
from jmp_rewrite._rules import Category

# State stays state through these, but they do no arithmetic: they may be half (a
# weight is cast before it is transposed or gathered from other devices).
_MOVES = frozenset({
    "carry_in", "carry_out", "concatenate", "convert_element_type", "copy", "copy_p",
    "device_put", "expand_dims", "join", "name", "optimization_barrier", "pvary",
    "reduce_precision", "reshape", "reshard", "sharding_constraint", "split", "squeeze",
    "stop_gradient", "transpose",
})
# Clear primitives that make a new value of what they read, in its shape.
_UPDATES = frozenset({
    "abs", "clamp", "dynamic_update_slice", "max", "min", "neg", "scatter", "select_n",
})
# Of these the first operand alone is what is updated.
_UPDATES_FIRST = frozenset({"dynamic_update_slice", "scatter"})


def train_state(graph: Graph, categories: Sequence[Category | None],
                consumers: Sequence[Sequence[int]]) -> set[int]:
    """Returns the nodes whose arithmetic updates train state.

    Args:
      graph: the program.
      categories: of each node; allow nodes end what is followed.
      consumers: for each node the nodes that read it.

    Returns:
      Indices of nodes that stay float32.
    """
    exempt = _residual_streams(graph, categories, consumers)
    state: set[int] = set()
    pinned: set[int] = set()
    work = list(range(len(graph.nodes) - 1, -1, -1))
    while work:
        node = graph.nodes[work.pop()]
        if node.index in state:
            continue
        kind = _follows(node, categories[node.index], state, exempt)
        if kind:
            state.add(node.index)
            if kind == "update":
                pinned.add(node.index)
            work.extend(consumers[node.index])
    return pinned


def _follows(node: Node, category: Category | None, state: set[int],
             exempt: set[int]) -> str:
    """Tells whether a node moves or updates state, or neither ("")."""
    if category is Category.ALLOW or not node.avals:
        return ""
    if node.name == "carry_in" and node.index not in exempt:
        return "move"
    if not node.inputs:
        return "move" if _is_random(node) else ""

    def is_state(value: Value) -> bool:
        return value.node in state or _is_source(value)

    if node.name in _MOVES:
        kept = node.inputs if node.name == "concatenate" else node.inputs[:1]
        if node.name in ("carry_in", "join"):
            return "move" if any(map(is_state, node.inputs)) else ""
        return "move" if all(map(is_state, kept)) else ""
    if category is Category.INFER or node.name in _UPDATES:
        read = node.inputs[:1] if node.name in _UPDATES_FIRST else node.inputs
        shape = node.avals[0].shape
        if any(is_state(v) and v.aval.shape == shape for v in read) and shape:
            return "update"
    return ""


def _is_source(value: Value) -> bool:
    """Tells an argument, a captured array or a slice of a loop's `xs`."""
    if value.slice_of >= 0:
        return True
    return value.node < 0 and value.constant is None and value.made_of_data


def _is_random(node: Node) -> bool:
    """Parameters that a program draws itself start as random bits."""
    return node.name == "bitcast_convert_type" and bool(node.avals[0].shape)


def _residual_streams(graph: Graph, categories: Sequence[Category | None],
                      consumers: Sequence[Sequence[int]]) -> set[int]:
    """Returns the carries that are the residual stream of a scan over layers.

    There each iteration multiplies the carry by its own weights, slices of `xs`, and
    hands on what comes out. It is what runs through a stack of layers and no state.
    A loop over train steps also multiplies a carry (the weights) by slices (batches):
    it is told apart because its body holds a backward pass of its own.
    """
    streams: set[int] = set()
    for loop in graph.loops:
        if loop.eqn.primitive.name != "scan" or _trains(graph, loop):
            continue
        products = _layer_products(graph, loop, categories, consumers)
        for received, handed_on in loop.carries:
            ahead = _reach(received, consumers, loop.nodes)
            if any(
                product in ahead and handed_on in _reach(product, consumers, loop.nodes)
                and _multiplies(graph.nodes[product], ahead | {received})
                for product in products
            ):
                streams.add(received)
    return streams


def _trains(graph: Graph, loop: Loop) -> bool:
    return not loop.place.backward and any(
        graph.nodes[n].place.backward for n in loop.nodes
    )


def _layer_products(graph: Graph, loop: Loop, categories: Sequence[Category | None],
                    consumers: Sequence[Sequence[int]]) -> list[int]:
    """Returns the products of a loop with an operand that is a moved slice of `xs`."""
    moved: set[int] = set()

    def is_slice(value: Value) -> bool:
        return value.slice_of == loop.token or value.node in moved

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
    reached: set[int] = set()
    stack = [start]
    while stack:
        for node in consumers[stack.pop()]:
            if node in within and node not in reached and node != start:
                reached.add(node)
                stack.append(node)
    return reached


def leads_to_product(products: Iterable[int], predecessors: Sequence[Sequence[int]],
                     stops: Callable[[int], bool]) -> set[int]:
    """Returns the nodes that a matrix product depends on without a stop between."""
    reached: set[int] = set()
    stack = list(products)
    while stack:
        for node in predecessors[stack.pop()]:
            if node not in reached and not stops(node):
                reached.add(node)
                stack.append(node)
    return reached


def moved_arguments(graph: Graph, categories: Sequence[Category | None],
                    like_arguments: Iterable[int] = ()) -> dict[int, int]:
    """Returns the clear nodes whose result holds nothing but arguments' values.

    With each comes the number of dimensions that those arguments have.

    Args:
      graph: the program.
      categories: of each node.
      like_arguments: nodes that hold numbers as large as an argument may hold.
    """
    moved = {n: len(graph.nodes[n].avals[0].shape) for n in like_arguments
             if graph.nodes[n].avals}
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
