"""State: values that are updated by adding to themselves, in their own shape.

Parameters, optimizer moments, running statistics, an ODE's state, an LSTM's cell and a
running sum have one thing in common, wherever they come from: a new value is made of
the old one, in its shape, without a matrix multiplication between. Rounding such a
value in each update loses updates that are smaller than its last digit, so it stays
float32, and a matrix multiplication reads a rounded copy.

A residual stream looks alike and is none: each layer adds to it what it has made of it
with *weights of its own*. So an update of a value `x` by `u(x)` is one of a state if

- `u` comes through a backward pass that the update itself is not part of: a gradient
  step, whatever `x` is;
- or all weights that stand between `x` and `u` have been used for an earlier update of
  the same value: an iteration, not a layer;
- or `u` is taken off, and an earlier update by the same weights was added: the inverse
  of a layer, by which a reversible network computes its input again;
- or each of them stands there twice: an operator and its transpose, as in the gradient
  of a square that somebody wrote by hand, not a layer that two inputs share;
- or `x` comes from an argument and its updates reach a result of the same shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from jmp_rewrite._graph import (
    Graph,
    Loop,
    Node,
    Value,
    elements,
    is_backward,
    is_float32,
    reached,
)
from jmp_rewrite._precision.origins import MOVES, SMALL, Roots
from jmp_rewrite._precision.products import contracted
from jmp_rewrite._rules import COPIES, ELEMENTWISE, JOINS, SUMS, Category

# Arithmetic that makes a new value of an old one and an update.
_SCATTERS = frozenset({"scatter-add", "scatter-sub"})
_UPDATES = frozenset({"add", "add_any", "div", "mul", "sub"}) | _SCATTERS
# A value is still the same one behind these: it is moved, scaled, clipped or chosen.
_CARRIES = MOVES | {"clamp", "div", "max", "min", "mul", "neg", "select_n"}
# And behind these, for what is added to it then: a cell's state is another value than
# the gated function of it.
_FUNCTIONS = ELEMENTWISE - SUMS - _CARRIES
# And behind these, if they have taken as many elements of it as it has.
_SELECTS = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "dynamic_update_slice",
        "gather",
        "scatter",
        "slice",
        "sort",
        "tile",
        "top_k",
    }
)
_FOLLOWED = _CARRIES | _FUNCTIONS | SUMS
# A state leads through these from one update to the next; through the linear ones also
# to an update in a backward pass.
_LINEAR = _CARRIES | _SELECTS | JOINS | SUMS
_BETWEEN = _LINEAR | _FUNCTIONS
# A walk that sees more nodes than this ends, and the value counts as state: a program
# is analysed in a time that grows with its length, not with its square.
_LONGEST_WALK = 4096
# What is added without a product is made in fewer nodes than this.
_SHORT_WALK = 64
_MOST_BASES = 8


# Of values that no node makes: an argument, and a slice of a loop's `xs`, which is
# another one in each iteration.
_ARGUMENT, _SLICE = _GIVEN = (-1, -2)


class Update(NamedTuple):
    """An update of a value by what a matrix multiplication has made of it.

    Attributes:
      node: what computes the new value.
      base: the node of the old value, or one of `_GIVEN`.
      weights: the operands of the multiplications between the old value and the update
        that do not depend on the old value, by name.
      is_state: whether this update alone tells that the value is state.
      depends: whether the update depends on the old value at all.
      since: with what weights the update was made since the last sums before it, if the
        program uses all of them more than once.
      sign: whether the update is added, 1, or taken off, -1.
      is_later: whether the update was made after the old value. What was made before it
        may be what the old value was made of, as with a straight-through estimator.
    """

    node: int
    base: int
    weights: frozenset[Hashable]
    is_state: bool
    depends: bool = True
    since: frozenset[Hashable] = frozenset()
    sign: int = 1
    is_later: bool = True


def train_state(
    graph: Graph,
    categories: Sequence[Category | None],
    products: set[int],
    made: set[int],
    streams: set[int],
) -> set[int]:
    """Returns the nodes that update state, or lie on its way.

    Args:
      graph: the program.
      categories: of each node.
      products: the matrix multiplications of half operands.
      made: the nodes that have one upstream.
      streams: carries that are the residual streams of scans over layers.
    """
    updated = {
        i for loop in graph.loops for i in updated_carries(graph, loop)
    } - streams
    walk = _Walk(graph, products, made, streams)
    updates = [u for node in graph.nodes for u in walk.updates(node)]
    state = _chains(updates, updated) | (_undone(updates) & walk.sums)
    layers = {u.node for u in updates if u.depends} - state
    state |= walk.between(state)
    state |= _paths(graph, categories, layers)
    return state | _carried(graph, categories, updated)


def updated_carries(graph: Graph, loop: Loop) -> set[int]:
    """Returns the carries that an iteration computes anew: others are only moved.

    So the keys and values of ring attention go from device to device, and parameters
    may be handed on as they are.
    """

    def origin(index: int) -> int:
        while index not in received and index in loop.nodes:
            node = graph.nodes[index]
            sources = {v.node for v in node.inputs if v.made_of_data}
            if node.name not in COPIES | {"carry_out"} or len(sources) != 1:
                break
            (index,) = sources
        return index

    received = {carry for carry, _ in loop.carries}
    origins = {carry: origin(handed_on) for carry, handed_on in loop.carries}
    updated = {carry for carry, of in origins.items() if of not in received}
    while more := {c for c, of in origins.items() if of in updated} - updated:
        updated |= more
    return updated


def _chains(updates: Sequence[Update], carried: set[int]) -> set[int]:
    """Returns the updates of state: all of a chain if one of them is no layer."""
    state: set[int] = set(carried)
    seen: dict[int, frozenset[Hashable]] = {}
    before: dict[int, set[int]] = {}
    for update in (u for u in updates if u.depends):
        earlier = seen.get(update.base)
        repeats = earlier is not None and update.weights <= earlier
        if update.base in seen:
            before.setdefault(update.node, set()).add(update.base)
        known = seen.get(update.node, frozenset())
        seen[update.node] = known | update.weights | (earlier or frozenset())
        if update.is_state or repeats or update.base in state:
            _add_chain(state, update.node, before)
    return state - carried


def _undone(updates: Sequence[Update]) -> set[int]:
    """Returns the chains of updates in which what is added is taken off again."""
    state: set[int] = set()
    added: dict[int, frozenset[Hashable]] = {}
    before: dict[int, set[int]] = {}
    for update in updates:
        earlier = added.get(update.base, frozenset())
        own = {(update.sign, w) for w in update.since}
        undone = {(-update.sign, w) for w in update.since}
        before.setdefault(update.node, set()).add(update.base)
        added[update.node] = added.get(update.node, frozenset()) | own | earlier
        is_undone = update.is_later and undone and undone <= earlier
        if is_undone or update.base in state:
            _add_chain(state, update.node, before)
    return state


def _add_chain(state: set[int], node: int, before: Mapping[int, set[int]]) -> None:
    """Adds an update, and all that came before it."""
    state.add(node)
    stack = [node]
    while stack:
        bases = before.get(stack.pop(), set()) - state
        state |= bases
        stack += bases


class _Walk:
    """Follows values back through a graph.

    Attributes:
      sums: what may be an update, of those that `updates` was asked for.
    """

    def __init__(
        self, graph: Graph, products: set[int], made: set[int], streams: set[int]
    ) -> None:
        self._nodes = graph.nodes
        self._predecessors = graph.predecessors()
        self._consumers = graph.consumers()
        self._streams = streams
        self._loops = {i: loop.nodes for loop in graph.loops for i, _ in loop.carries}
        self._products = products
        self._roots = Roots(graph.nodes)
        self._made = made
        backward = (n.index for n in graph.nodes if is_backward(n))
        self._after_backward = reached(backward, self._consumers)
        self._bases: dict[tuple[int, int, bool], frozenset[int]] = {}
        self._weights = {n: self._weights_of(graph.nodes[n]) for n in products}
        uses = Counter(w for read in self._weights.values() for w in read)
        self._reused = {weight for weight, count in uses.items() if count > 1}
        self.sums: set[int] = set()

    def updates(self, node: Node) -> Iterable[Update]:
        """Returns how a node updates values, of each that it may be an update of."""
        if node.name in _FOLLOWED and node.avals:
            for functions in (False, True):  # in program order: they ask for no more
                self.bases(Value(node.avals[0], node.index), functions)
        if node.name not in _UPDATES or not node.avals or len(node.inputs) < 2:
            return
        size = node.size
        # Of a scatter the first operand alone is updated.
        old_ones = node.inputs[:1] if node.name in _SCATTERS else node.inputs
        for position, old in enumerate(old_ones):
            if old.size != size:
                continue
            for other in [*node.inputs[:position], *node.inputs[position + 1 :]]:
                if other.node < 0 or other.node not in self._made:
                    continue
                is_sum = node.name in SUMS and not (node.name == "sub" and position)
                since = self._since(other.node) if is_sum else frozenset()
                sign = -1 if node.name == "sub" else 1
                for base in self.bases(old, node.name in SUMS):
                    update = None
                    if other.node > base and self._is_old(base, node, size):
                        update = self._update(node, base, other.node)
                    if update is None and since and self._is_forward(base, size):
                        update = Update(node.index, base, frozenset(), False, False)
                    if update is not None:
                        is_later = other.node > base
                        yield update._replace(since=since, sign=sign, is_later=is_later)
                if is_sum:
                    self.sums.add(node.index)

    def _is_old(self, base: int, node: Node, size: int) -> bool:
        """Whether a value has the size of its update, in the same pass."""
        if base < 0:
            return not is_backward(node)
        old = self._nodes[base]
        return old.size == size and is_backward(old) == is_backward(node)

    def _is_forward(self, base: int, size: int) -> bool:
        """Whether a value of this size is one of a forward pass, and no argument."""
        old = self._nodes[base]
        return base >= 0 and old.size == size and not is_backward(old)

    def _weights_of(self, product: Node) -> list[Hashable]:
        """Returns which exact arrays a product reads, and how, by name."""
        return [
            (self._roots.root(v), contracted(product, v))
            for v in product.inputs
            if v.node not in self._made
        ]

    def _since(self, node: int) -> frozenset[Hashable]:
        """Returns the weights of the products behind the sums that lead to a node.

        None if one of them is used only here.
        """
        found: set[Hashable] = set()
        seen: set[int] = set()
        stack = [node] if self._reused else []
        while stack:
            index = stack.pop()
            if index in seen or index in self.sums:
                continue
            seen.add(index)
            if len(seen) > _LONGEST_WALK:
                return frozenset()
            if index in self._products:
                found.update(self._weights[index])
                if not found <= self._reused:
                    return frozenset()
            stack += self._predecessors[index]
        return frozenset(found)

    def bases(self, value: Value, functions: bool = False) -> frozenset[int]:
        """Returns the old values that a value may be, moved and scaled.

        With `functions` also what is made of them element by element.
        """
        picked: list[tuple[int, int, bool]] = []
        while value.node >= 0:
            key = value.node, value.result, functions
            if key in self._bases:
                break
            self._bases[key] = frozenset({value.node})  # of a loop
            node = self._nodes[value.node]
            whole = self._whole(node, value.result)
            if whole is None:
                self._bases[key] = self._bases_of(node, functions)
                break
            picked.append(key)
            value = whole
        if value.node < 0:
            is_exact = value.constant is None and value.made_of_data
            given = _SLICE if value.slice_of else _ARGUMENT
            found = frozenset({given}) if is_exact else frozenset()
        else:
            found = self._bases[value.node, value.result, functions]
        for key in reversed(picked):
            found = self._bases[key] = found | {key[0]}
        return found

    def _bases_of(self, node: Node, functions: bool) -> frozenset[int]:
        """Returns the old values that a node's result may be, of those it reads."""
        own = frozenset({node.index})
        if self._carries(node, functions):
            same = [v for v in node.inputs if v.size == node.size]
            found = frozenset().union(*(self.bases(v, functions) for v in same))
            if node.name in _UPDATES:
                found |= own
            # The latest of many: what they are bases of goes on as a chain.
            latest = sorted(found)[-_MOST_BASES:]
            return found & {*_GIVEN, *latest}
        return self._moved(node, functions) | own if node.name in SUMS else own

    def _carries(self, node: Node, functions: bool) -> bool:
        """Whether a node's result is the same value as what it reads.

        A backward pass is linear in its cotangents: a function there is a factor.
        """
        if functions and node.name in _FUNCTIONS:
            return bool(node.inputs) and not is_backward(node)
        return bool(node.inputs) and node.name in _CARRIES - {"carry_in"}

    def _moved(self, node: Node, functions: bool) -> frozenset[int]:
        """Returns the old values to which a sum adds nothing that a product has made.

        Noise, a decay towards the start, or what is common to a row: that is no update
        by a layer, and the value is the same one.
        """
        found: set[int] = set()
        for position, old in enumerate(node.inputs):
            if old.size != node.size:
                continue
            others = [*node.inputs[:position], *node.inputs[position + 1 :]]
            bases = self.bases(old, functions) - self._products
            found.update(b for b in bases if not self._is_made_since(b, others))
        return frozenset(sorted(found)[-_MOST_BASES:])

    def _is_made_since(self, base: int, values: Sequence[Value]) -> bool:
        """Whether a product stands between an old value and others that follow it."""
        seen: set[int] = set()
        stack = [v.node for v in values]
        while stack:
            index = stack.pop()
            if index <= base or index in seen:
                continue
            if index in self._products or len(seen) > _SHORT_WALK:
                return True
            seen.add(index)
            stack += self._predecessors[index]
        return False

    def _whole(self, node: Node, result: int) -> Value | None:
        """Returns the value of the same size of which a result holds the elements.

        They are picked, as by a permutation, or put together from slices, as by a roll;
        some may be set to others.
        """
        if node.name not in _SELECTS or not node.inputs:
            return None
        size = elements([node.eqn.outvars[result].aval])
        if node.name == "sort":  # several arrays, by the first of them
            floats = [is_float32(v.aval) for v in node.eqn.outvars]
            is_known = sum(floats) == len(node.inputs)
            return node.inputs[sum(floats[:result])] if is_known else None
        if node.name == "slice" and (part := self._part(node)) is not None:
            return part
        parts = node.inputs if node.name == "concatenate" else node.inputs[:1]
        origins = []
        for value in parts:
            while value.size != size and value.node >= 0:
                maker = self._nodes[value.node]
                if maker.name not in _SELECTS - {"concatenate"} or not maker.inputs:
                    break
                value = maker.inputs[0]
            origins.append(value)
        one = origins[0]
        if node.name == "gather" and one.node < 0:
            return None  # rows of a table, as many as it has
        same = all(o.node == one.node and o.argument == one.argument for o in origins)
        return one if same and one.size == size else None

    def _part(self, node: Node) -> Value | None:
        """Returns the part of a concatenation that a slice takes out again.

        So the components of a state are told apart that are updated one by one.
        """
        joined = self._nodes[node.inputs[0].node] if node.inputs[0].node >= 0 else node
        if joined.name not in JOINS or len(joined.inputs) != len(joined.eqn.invars):
            return None
        of_stack = joined.name == "stack"
        dimension = joined.eqn.params["axis" if of_stack else "dimension"]
        start, at = node.eqn.params["start_indices"][dimension], 0
        for part in joined.inputs:
            if at == start and part.size == node.size:
                return part
            at += 1 if of_stack else part.aval.shape[dimension]
        return None

    def _update(self, node: Node, base: int, other: int) -> Update | None:
        """Returns the update, if `other` depends on the base through a product."""
        is_forward = not is_backward(node)
        is_after = other in self._after_backward
        if is_forward and is_after and base == _ARGUMENT:
            return Update(node.index, base, frozenset(), True)
        region = self._region(other, base, node)
        if region is None:
            return Update(node.index, base, frozenset(), True)
        inside, crosses = region
        depends = self._depends(base, inside)
        if other not in depends:
            return None
        if is_forward and crosses & depends:
            return Update(node.index, base, frozenset(), True)
        passed = depends & self._products
        if not passed:
            return None
        uses: dict[Hashable, list[tuple[int, Hashable]]] = {}
        for product in sorted(passed):
            for v in self._nodes[product].inputs:
                if v.node not in depends and v.node != base:
                    use = product, _contracted(self._nodes[product], v)
                    uses.setdefault(self._roots.root(v), []).append(use)
        # A second derivative goes through a network and back: its cotangents, too.
        twice = is_forward and bool(uses)
        twice = twice and all(self._stands_twice(u, depends) for u in uses.values())
        return Update(node.index, base, frozenset(uses), twice)

    def _stands_twice(
        self, uses: Sequence[tuple[int, Hashable]], depends: set[int]
    ) -> bool:
        """Whether a weight is an operator and its transpose, or is applied repeatedly.

        A layer that two inputs share, beside each other, is applied once. That a scan
        leads from a weight to itself says nothing: each iteration has another one.
        """
        if len(uses) < 2:
            return False
        if len({way for _, way in uses}) > 1:
            return True
        products = [product for product, _ in uses]
        readers = (r for p in products for r in self._consumers[p] if r in depends)
        behind = reached(readers, self._consumers, depends.__contains__)
        return not behind.isdisjoint(products)

    def _region(
        self, start: int, base: int, update: Node
    ) -> tuple[set[int], set[int]] | None:
        """Returns the nodes behind the base that lead to a node, and its gradients.

        Not those of the iteration before where that has another base, a slice, or
        other weights, as in a scan over layers. None if they are too many.
        """
        backward = update.place.backward

        def is_before(index: int, source: int) -> bool:
            """Whether a node is handed on to a carry of a loop around the update."""
            is_own = base == _SLICE or index in self._streams
            return is_own and source > index and update.index in self._loops[index]

        inside, crosses = {start}, set()
        stack = [start]
        while stack:
            index = stack.pop()
            if not backward and is_backward(self._nodes[index]):
                crosses.add(index)
            for source in self._predecessors[index]:
                if index in self._loops and is_before(index, source):
                    continue
                if source > base and source not in inside:
                    inside.add(source)
                    stack.append(source)
            if len(inside) > _LONGEST_WALK:
                return None
        return inside, crosses

    def _depends(self, base: int, inside: set[int]) -> set[int]:
        """Returns the nodes among these that depend on the base."""
        if base >= 0:
            found = {n for n in self._consumers[base] if n in inside}
        else:
            found = {n for n in inside if _reads_given(self._nodes[n], base)}
        return reached(found, self._consumers, inside.__contains__)

    def between(self, state: set[int]) -> set[int]:
        """Returns the nodes that carry a state from one update to the next.

        To one in a backward pass functions are factors, also those of the forward pass.
        """
        found: set[int] = set()
        ends = {*state, *_GIVEN}
        for index in state:
            is_linear = is_backward(self._nodes[index])
            stack = [v.node for v in self._nodes[index].inputs]
            while stack:
                source = stack.pop()
                if source < 0 or source in found or source in state:
                    continue
                node = self._nodes[source]
                if node.name not in (_LINEAR if is_linear else _BETWEEN):
                    continue
                count = len(node.eqn.outvars) if node.eqn is not None else 1
                keys = (
                    (source, result, functions)
                    for result in range(count)
                    for functions in (False, not is_linear)
                )
                bases = frozenset().union(*(self._bases.get(k, ()) for k in keys))
                if node.name in JOINS:  # of the components of a state
                    bases = bases.union(*map(self.bases, node.inputs))
                if bases & ends:
                    found.add(source)
                    stack.extend(v.node for v in node.inputs)
        return found


def _contracted(product: Node, value: Value) -> Hashable:
    """Returns which array a product reads, and which of its dimensions it sums up."""
    return value.node, value.argument, value.slice_of, contracted(product, value)


def _reads_given(node: Node, base: int) -> bool:
    given = [v for v in node.inputs if v.node < 0 and v.constant is None]
    return any(base == _ARGUMENT or v.slice_of for v in given)


def _paths(
    graph: Graph, categories: Sequence[Category | None], layers: set[int]
) -> set[int]:
    """Returns the nodes on paths from an argument to a result of the same shape.

    Only forward, through arrays that nothing denies, and not the layers of a
    residual stream: paths through the backward pass carry gradients.
    """
    returned = {v.aval.shape for v in graph.results if v.node >= 0}
    shapes = {v.aval.shape for v in graph.arguments if v.aval.shape} & returned
    bits = {shape: 1 << k for k, shape in enumerate(shapes)}
    size = len(graph.nodes)
    begins, ends = [0] * size, [0] * size
    for value in graph.results:
        if value.node >= 0:
            ends[value.node] |= bits.get(value.aval.shape, 0)
    follows = [
        -1
        if categories[n.index] in (Category.INFER, Category.CLEAR)
        and not n.place.backward
        and any(aval.shape for aval in n.avals)
        and n.index not in layers
        else 0
        for n in graph.nodes
    ]
    return _between(graph, begins, ends, follows, bits)


def _carried(
    graph: Graph, categories: Sequence[Category | None], updated: set[int]
) -> set[int]:
    """Returns the nodes between the carries in and out of loops that update them.

    A rounding there is one in each iteration. Through what nothing denies from
    any carry to any, as an LSTM's hidden state leads to its cell; from a carry to its
    own next value through anything but a matrix multiplication. Not through a sum over
    a batch in a backward pass where the carries are also handed on as they are: so the
    cotangent of a bias leads to itself in a second derivative of train steps, and what
    is added up is a gradient.
    """
    carries = [
        (loop, n, received, handed_on)
        for n, loop in enumerate(graph.loops)
        for received, handed_on in loop.carries
        if received in updated
    ]
    if not carries:
        return set()
    safe = frozenset({Category.INFER, Category.CLEAR})
    together = {received: 1 << n for _, n, received, _ in carries}
    alone = {received: 1 << k for k, (_, _, received, _) in enumerate(carries)}
    pairs = [(loop, received, handed_on) for loop, _, received, handed_on in carries]
    in_turn = {i for _, i, o in pairs if not _hands_itself_on(graph, i, o)}
    state = _along(graph, pairs, together, [c in safe for c in categories])
    anything = [c is not Category.ALLOW for c in categories]
    return state | _along(graph, pairs, alone, anything, in_turn)


def _hands_itself_on(graph: Graph, received: int, handed_on: int) -> bool:
    """Whether a carry's next value is the old one, moved or scaled, and an update."""
    nodes, size = graph.nodes, graph.nodes[received].size

    def keeps(index: int) -> bool:
        node = nodes[index]
        return node.size == size and node.name in _CARRIES | SUMS | {"carry_out"}

    return handed_on in reached([received], graph.consumers(), keeps)


def _sums_over_a_batch(node: Node) -> bool:
    is_sum = node.name == "reduce_sum" and bool(node.inputs)
    return is_sum and node.inputs[0].size >= SMALL * node.size


def _along(
    graph: Graph,
    carries: Sequence[tuple[Loop, int, int]],
    bits: Mapping[int, int],
    passes: Sequence[bool],
    in_turn: AbstractSet[int] = frozenset(),
) -> set[int]:
    """Returns the nodes between carries of the same bit, in the pass of their loop.

    Args:
      graph: the program.
      carries: the loop of each, the node that receives it, the one that hands it on.
      bits: the bit of each, by the node that receives it.
      passes: of each node, whether a path leads through it.
      in_turn: the carries that are made anew in each iteration.
    """
    size = len(graph.nodes)
    through_sums = 0  # of a backward pass, over a batch
    begins, ends = [0] * size, [0] * size
    of_pass = {False: 0, True: 0}
    for loop, received, handed_on in carries:
        bit = bits[received]
        of_pass[loop.place.backward and not loop.place.recomputed] |= bit
        begins[received] |= bit
        ends[handed_on] |= bit
        if received in in_turn:
            through_sums |= bit
    follows = [
        of_pass[is_backward(n)] if passes[n.index] and n.avals else 0
        for n in graph.nodes
    ]
    for node in graph.nodes:
        if is_backward(node) and _sums_over_a_batch(node):
            follows[node.index] &= through_sums
    return _between(graph, begins, ends, follows, {})


def _between(
    graph: Graph,
    begins: Sequence[int],
    ends: Sequence[int],
    follows: Sequence[int],
    bits: Mapping[tuple[int, ...], int],
) -> set[int]:
    ahead = _spread_forward(graph, begins, bits, follows)
    behind = _spread_backward(ends, graph.consumers(), follows)
    return {n for n in range(len(follows)) if ahead[n] & behind[n]}


def _spread_forward(
    graph: Graph,
    begins: Sequence[int],
    bits: Mapping[tuple[int, ...], int],
    follows: Sequence[int],
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
            mask &= follows[node.index]
            if mask & ~ahead[node.index]:
                ahead[node.index] |= mask
                changed |= node.name == "carry_out"
    return ahead


def _spread_backward(
    ends: Sequence[int],
    consumers: Sequence[Sequence[int]],
    follows: Sequence[int],
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
            mask &= follows[node]
            if mask & ~behind[node]:
                behind[node] |= mask
                changed |= any(reader <= node for reader in consumers[node])
    return behind
