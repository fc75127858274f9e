"""Where values come from: made by a matrix multiplication, or exact.

Half precision is worth something for activations and cotangents: values that a matrix
multiplication on half operands has made, and that are as inexact as its result. Every
other value is exact: an argument, a draw, a constant, a slice, gather or mean of one,
and all arithmetic on them. Rounding an exact value puts an error where none was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from jmp_rewrite import _rules
from jmp_rewrite._graph import (
    EITHER,
    JOINTS,
    Graph,
    Made,
    Node,
    Value,
    is_backward,
    is_drawn,
    is_drawn_anew,
    reached,
)
from jmp_rewrite._rules import (
    CHOOSES,
    COMPARES,
    COPIES,
    DECOMPOSITIONS,
    ELEMENTWISE,
    EXPONENTIALS,
    ORDERS,
    PICKS,
    Category,
)

# The elements of a result are elements of the operands, each used once.
MOVES = _rules.MOVES | JOINTS | {"convert_element_type", "reduce_precision"}
# And these: the elements may be repeated.
VIEWS = MOVES | {"broadcast_in_dim"}

# A reduction by less than this is no statistic, but a large value itself.
SMALL = 8

REDUCTIONS = frozenset(
    {
        "argmax",
        "argmin",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_sum",
    }
)


def made_by_products(graph: Graph, categories: Sequence[Category | None]) -> set[int]:
    """Returns the nodes that have a matrix multiplication upstream."""
    products = (n for n, c in enumerate(categories) if c is Category.ALLOW)
    return reached(products, graph.consumers())


def made_by(products: Iterable[int], graph: Graph) -> set[int]:
    """Returns these matrix multiplications, and all that depends on them.

    What a decomposition makes of it is as exact as any float32 code's, not as a half
    product: it read unrounded values.
    """
    nodes, consumers = graph.nodes, graph.consumers()
    return reached(products, consumers, lambda n: nodes[n].name not in DECOMPOSITIONS)


def leads_to_product(
    products: Iterable[int],
    predecessors: Sequence[Sequence[int]],
    stops: Callable[[int], bool],
) -> set[int]:
    """Returns the nodes that a matrix product depends on without a stop between."""
    read = {s for n in products for s in predecessors[n] if not stops(s)}
    return reached(read, predecessors, lambda n: not stops(n))


def gradients(graph: Graph, products: set[int]) -> set[int]:
    """Returns what a backward pass hands to code that leads to no product: an update.

    That of a loop leads to none before the next iteration. A gradient is a float32 sum.
    What an optimizer asks of it asks nothing of its terms.
    """
    nodes = graph.nodes

    def ends_iteration(node: int) -> bool:
        return nodes[node].name == "carry_out"

    before = graph.predecessors()
    leads = products | leads_to_product(products, before, ends_iteration)
    return {
        value.node
        for node in nodes
        if node.index not in leads and not is_backward(node)
        for value in node.inputs
        if value.node >= 0 and is_backward(nodes[value.node])
    }


def up_to_exponents(graph: Graph) -> list[list[int]]:
    """Returns for each node those that it reads, but for what is an exponent.

    Of a rate, the relative error of an exponent is that of the rate alone, in however
    many factors it stands.
    """
    reads = graph.predecessors()
    return [
        [] if node.name in EXPONENTIALS else read
        for node, read in zip(graph.nodes, reads, strict=True)
    ]


def is_zero(value: Value) -> bool:
    """Whether a value is known to be zeros: what a norm without a mean takes off."""
    return value.constant is not None and not np.any(value.constant)


def is_indicator(value: Value, nodes: Sequence[Node]) -> bool:
    """Whether a value holds zeros and ones by construction: a mask, a one-hot, `eye`.

    That is a cast of booleans, a choice between the numbers 0 and 1, or a constant of
    such numbers, moved or spread in any way. The cotangent of a sum is none.
    """
    value = _seen_through(value, nodes)
    if value.node >= 0 and is_backward(nodes[value.node]):
        return False
    if value.node < 0 or value.constant is not None:
        known = value.constant
        return known is not None and bool(np.all((known == 0) | (known == 1)))
    node = nodes[value.node]
    if node.inputs:
        return False
    if node.name == "convert_element_type":
        return node.eqn.invars[0].aval.dtype == np.bool_
    numbers = list(node.literals.values())
    is_choice = node.name == "select_n" and bool(numbers)
    return is_choice and all(number in (0, 1) for number in numbers)


_LOGIC = frozenset({"and", "broadcast_in_dim", "not", "or", "xor"})


def thresholded(value: Value, nodes: Sequence[Node]) -> set[int]:
    """Returns what was compared with a threshold to make zeros and ones.

    Of a product's results they are activations, as those of a network of spikes: they
    select nothing.
    """
    value = _seen_through(value, nodes)
    stack = list(nodes[value.node].others) if value.node >= 0 else []
    found: set[int] = set()
    while stack:
        read = stack.pop()
        if read is None or not isinstance(read.name, Made):
            continue
        if read.name.name in ORDERS:
            found |= {v.node for v in read.name.operands if v is not None}
        elif read.name.name in MOVES | _LOGIC:
            stack += read.name.operands
    return found - {-1}


def _seen_through(value: Value, nodes: Sequence[Node]) -> Value:
    """Returns what zeros and ones are moved, or spread, from."""
    while value.node >= 0 and value.constant is None:
        node = nodes[value.node]
        is_view = node.name in MOVES or node.name in ("broadcast_in_dim", "slice")
        if not is_view or len(node.inputs) != 1 or is_backward(node):
            break
        (value,) = node.inputs
    return value


def counts(graph: Graph, half: np.dtype) -> set[int]:
    """Returns the counts that are exact in half: sums of few zeros and ones.

    The derivative of a maximum divides by the number of elements that equal it.
    """
    found: set[int] = set()
    for node in graph.nodes:
        if node.name == "reduce_sum" and len(node.inputs) == 1:
            (value,) = node.inputs
            terms = value.size // max(node.size, 1)
            exact = terms <= 2 ** (ml_dtypes.finfo(half).nmant + 1)
            if exact and is_indicator(value, graph.nodes):
                found.add(node.index)
    return found


# The results of these are elements of their operands.
_COPIES = COPIES | {"stack_out"}
_PICKS = PICKS | _COPIES


def compared_picks(graph: Graph) -> list[tuple[int, list[Value]]]:
    """Returns what is picked, and what it is picked from, if both are compared later.

    A rectifier picks as well, but what it has picked from is not compared: the largest
    of a rectifier's results is one of these.
    """
    compares = [
        n.index
        for n in graph.nodes  # a known number was picked from nothing
        if n.name in COMPARES | CHOOSES or (n.name in ORDERS and len(n.inputs) > 1)
    ]

    def picks(node: int) -> bool:
        return graph.nodes[node].name in _PICKS

    def copies(node: int) -> bool:
        return graph.nodes[node].name in _COPIES

    sources = graph.predecessors()
    read = (s for n in compares for s in sources[n])
    compared = reached(read, [s if copies(n) else () for n, s in enumerate(sources)])
    found: list[tuple[int, list[Value]]] = []
    either = set(compared)  # or picked from what is compared
    for node in sorted(filter(picks, reached(compares, sources, picks))):
        inputs = [v for v in graph.nodes[node].inputs if v.made_of_data]
        if any(v.node < 0 or v.node in either for v in inputs):
            either.add(node)
            found.append((node, inputs))
    return found


_LOOKUPS = frozenset({"dynamic_slice", "gather"})

# Known arrays up to this many elements are named by their numbers.
_SHORT = 2**16


class Roots:
    """Names of values, which are equal for equal ones.

    Values are seen through moves, and what is computed is the same if its operands are:
    two slices of one array at the same place are equal, at different places different
    (the weights of two layers that were stacked), whichever loop takes them. What is
    computed of parameters element by element is known by these, so that a weight that
    each iteration scales by a number, drops at random or normalizes anew is one weight.

    Args:
      nodes: the program.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._known: dict[Node | Made, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}

    def root(self, value: Value | None) -> Hashable:
        """Returns the name of a value."""
        maker = self._maker(value)
        if value is None or maker is None:
            return _given(value)
        stack = [] if maker in self._known else [maker]
        while stack:
            makers = map(self._maker, _reads(stack[-1]))
            unknown = [m for m in makers if m is not None and m not in self._known]
            if unknown:
                stack += unknown
                continue
            last = stack.pop()
            self._known[last] = self._name(last)
        known = self._known[maker]
        if isinstance(maker, Made):
            return known, value.result, bool(value.slice_of)
        return (known, value.result) if len(maker.avals) > 1 else known

    def _maker(self, value: Value | None) -> Node | Made | None:
        if value is None or value.node < 0:
            return value.name if value and isinstance(value.name, Made) else None
        return self._nodes[value.node]

    def _name(self, maker: Node | Made) -> Hashable:
        if _is_own(maker):
            return self._number(maker)
        if isinstance(maker, Node):
            known = self._known_by(maker)
            if known is not None:
                return known
        operands = tuple(map(self.root, _reads(maker)))
        literals = maker.literals if isinstance(maker, Node) else {}
        numbers = tuple((i, str(number)) for i, number in literals.items())
        eqn = maker.eqn
        key = maker.name, str(eqn.params if eqn else None), operands, numbers
        return self._number(key)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _known_by(self, node: Node) -> Hashable:
        """Returns the name of what a node moves, or scales; None if it is another."""
        if node.name == "join":  # of a branch that hands on a weight, and others zeros
            found = {self.root(v) for v in node.inputs if v.made_of_data}
            return found.pop() if len(found) == 1 else self._number(node)
        if node.name in MOVES and len(node.inputs) == len(node.avals) == 1:
            return self.root(node.inputs[0])
        if node.name not in ELEMENTWISE or node.drawn:
            return None
        large = (v for v in node.inputs if self._spread_from(v).size > 1)
        read = [*large, *node.others]
        of = {self.root(v) for v in read if not is_drawn(v, self._nodes)}
        return of.pop() if len(of) == 1 else self._number(frozenset(of)) if of else None

    def _spread_from(self, value: Value) -> Value:
        """Returns what a value is repeated from, or moved."""
        while value.node >= 0:
            node = self._nodes[value.node]
            if node.name not in VIEWS or len(node.inputs) != 1:
                break
            (value,) = node.inputs
        return value


def _is_own(maker: Node | Made) -> bool:
    """Whether a value is another one than all others: what a loop or a draw makes."""
    if isinstance(maker, Node) and maker.eqn is None:
        return maker.name != "join" or not maker.inputs
    return is_drawn_anew(maker.eqn)


def _reads(maker: Node | Made) -> Sequence[Value | None]:
    if isinstance(maker, Made):
        return maker.operands
    return () if _is_own(maker) else [*maker.inputs, *maker.others]


def _given(value: Value | None) -> Hashable:
    """Returns the name of what no equation makes."""
    if value is None:
        return None
    if value.name is not None:
        return value.name, value.aval.shape
    if value.constant is None or value.argument != -1:
        return value.argument, bool(value.slice_of)
    number = np.asarray(value.constant)
    known = number.tobytes() if number.size <= _SHORT else id(value.constant)
    return number.dtype.str, number.shape, known


def tied_lookups(graph: Graph, products: set[int], made: set[int]) -> set[int]:
    """Returns the lookups in tables that an activation is multiplied by.

    An embedding that a language model's head shares is one. A lookup is a product with
    one-hot vectors, and its rows are as inexact as the other product reads them: what
    it finds is an activation. What is looked up in a table of data, or in one of which
    only a gradient is taken, is exact.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands.
      made: the nodes that have one upstream.
    """
    roots = Roots(graph.nodes)
    tables = {
        roots.root(value)
        for node in map(graph.nodes.__getitem__, products)
        if len(node.inputs) == 2 and not is_backward(node)
        for value, other in zip(node.inputs, node.inputs[::-1], strict=True)
        if other.node in made and value.node not in made
    }
    return {
        n
        for n in lookups(graph, made)
        if roots.root(graph.nodes[n].inputs[0]) in tables
    }


def lookups(graph: Graph, made: Container[int] = ()) -> set[int]:
    """Returns the lookups of rows in tables that no matrix multiplication has made."""
    return {
        node.index
        for node in graph.nodes
        if node.name in _LOOKUPS and node.index not in made and node.inputs
        if len(node.inputs[0].aval.shape) > 1
    }


def is_number(node: Node) -> bool:
    """Whether a result is 0-d, and so no activation on its way to a multiplication."""
    return bool(node.avals) and not any(aval.shape for aval in node.avals)


def followed(graph: Graph, products: Iterable[int]) -> set[int]:
    """Returns the nodes that a matrix multiplication of the forward pass follows."""
    nodes = graph.nodes
    forward = [n for n in products if not is_backward(nodes[n])]
    before = graph.predecessors()
    return leads_to_product(forward, before, lambda n: is_number(nodes[n]))


def moves(graph: Graph, node: int) -> list[int]:
    """Returns the moves behind a node, back to the node that computes its numbers.

    The node comes first and its origin last; they are one if it moves nothing.
    """
    found: list[int] = []
    while node not in found:
        found.append(node)
        is_move = graph.nodes[node].name in MOVES - EITHER
        sources = [v.node for v in graph.nodes[node].inputs if v.node >= 0]
        if not is_move or len(sources) != 1:
            break
        (node,) = sources
    return found


def moved_arguments(
    graph: Graph,
    categories: Sequence[Category | None],
    like_arguments: Iterable[int],
    trained: Container[int],
) -> dict[int, int]:
    """Returns the clear nodes whose result holds nothing but arguments' values.

    With each comes the number of dimensions that those arguments have.

    Args:
      graph: the program.
      categories: of each node.
      like_arguments: nodes that hold numbers as large as an argument may hold.
      trained: the arguments that are parameters.
    """
    moved = {
        n: len(graph.nodes[n].avals[0].shape)
        for n in like_arguments
        if graph.nodes[n].avals
    }
    for node in graph.nodes:
        if categories[node.index] is Category.CLEAR and node.avals and node.inputs:
            ranks = [argument_rank(v, moved, trained) for v in node.inputs]
            if min(ranks) >= 0:
                moved[node.index] = max(ranks)
    return moved


def argument_rank(
    value: Value, moved: Mapping[int, int], trained: Container[int]
) -> int:
    """Returns the dimensions of the argument that a value holds; -1 if it is none.

    Those of a parameter are at most one: a stack of biases is one of vectors. Constants
    whose numbers are known have been checked against the compute dtype.
    """
    if value.node >= 0:
        return moved.get(value.node, -1)
    if value.constant is not None or not value.made_of_data:
        return -1
    rank = len(value.aval.shape)
    return min(rank, 1) if value.argument in trained else rank


def trained_arguments(graph: Graph, state: Container[int]) -> frozenset[int]:
    """Returns the arguments that an update of state reads as they are."""
    return frozenset(
        value.argument
        for node in graph.nodes
        if node.index in state
        for value in node.inputs
        if value.node < 0 and value.argument >= 0
    )


def statistics(graph: Graph, categories: Sequence[Category | None]) -> set[int]:
    """Returns the values of reductions alone: means, variances, maxima.

    They are small, and much is computed from each of them.
    """
    found: set[int] = set()
    for node, large in zip(graph.nodes, graph.large_operands(), strict=True):
        if node.name in REDUCTIONS:
            size = node.size
            before = max((v.size for v in node.inputs), default=0)
            is_statistic = before >= SMALL * size
        elif categories[node.index] is Category.ALLOW:
            is_statistic = False
        else:
            is_statistic = bool(large) and all(v.node in found for v in large)
        if is_statistic:
            found.add(node.index)
    return found


def read_alone(
    graph: Graph, reads: Callable[[int], bool], moves: Callable[[int], bool]
) -> set[int]:
    """Returns the nodes that readers of a kind alone read, or what moves them there.

    Args:
      graph: the program.
      reads: whether a node is such a reader.
      moves: whether a node hands on what it reads.
    """
    consumers = graph.consumers()
    returned = {v.node for v in graph.results}
    found: set[int] = set()
    for node in reversed(graph.nodes):
        readers = consumers[node.index]
        if readers and node.index not in returned:
            if all(reads(r) or (r in found and moves(r)) for r in readers):
                found.add(node.index)
    return found
