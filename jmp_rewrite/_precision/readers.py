"""Values that are read unrounded: by code that multiplies an error.

Two kinds of code do, and neither is on the way to a matrix multiplication alone. Some
primitives are steep or jump: a decomposition, a sine, a cast to an integer. And a
difference of two values that an exact one was added to leaves the error that rounding
has put on the exact part: what is measured with an offset is rounded before the offset
is added, or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Set as AbstractSet

import numpy as np

from jmp_rewrite._graph import Graph, Node, Value, reached
from jmp_rewrite._precision.origins import (
    MOVES,
    SMALL,
    is_backward,
    is_zero,
    leads_to_product,
    up_to_exponents,
)
from jmp_rewrite._precision.signs import nonnegative
from jmp_rewrite._rules import PRODUCTS, SHARP

# A sum with an exact value still holds it behind these.
_KEEPS_OFFSET = MOVES | {
    "broadcast_in_dim",
    "clamp",
    "dynamic_slice",
    "gather",
    "max",
    "min",
    "neg",
    "pad",
    "reduce_sum",
    "select_n",
    "slice",
}


_SUMS = frozenset({"add", "add_any", "sub"})
_TURNS = frozenset({"neg"})
_VIEWS = MOVES | {"broadcast_in_dim"}
_PARTS = _VIEWS | {"slice"}
# What a loop hands on, to its next iteration or behind it, is one of these.
_CARRIES = frozenset({"carry_in", "join"})
# A value is the same but for a number behind these, if they read nothing else.
_SCALES = (MOVES - _CARRIES - {"split"}) | {"div", "mul", "neg"}
# A rounding, half an epsilon, is two epsilons in this power: what the law allows.
_POWER = 4
# Half an epsilon of float16. A number up to that keeps a quotient finite.
_GUARD = 2.0**-11
# A sum of more values is followed no further back.
_MOST_TERMS = 64


def read_sharply(
    graph: Graph,
    products: set[int],
    out_of_range: frozenset[int],
    nonlinearities: AbstractSet[int],
) -> dict[int, int]:
    """Returns the nodes that a sharp primitive reads, and which one.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands, which end what is read.
      out_of_range: nodes with a number that the compute dtype cannot hold. What is
        multiplied by such a number may be out of its range, too.
      nonlinearities: sharp nodes that are those of layers.
    """
    found: dict[int, int] = {}
    powers = _high_powers(graph)
    before = up_to_exponents(graph) if powers else []
    for node in graph.nodes:
        if node.index in nonlinearities:
            continue
        is_scaled = node.index in out_of_range and node.name in ("div", "mul")
        is_power = node.index in powers
        if _is_sharp(node) or is_power or is_scaled:
            read = leads_to_product(
                [node.index],
                before if is_power else graph.predecessors(),
                lambda n: n in found or n in products,
            )
            direct = _products_before(graph, [node.index, *read], products)
            for source in (*read, *direct):
                found.setdefault(source, node.index)
    return found


def _products_before(graph: Graph, nodes: list[int], products: set[int]) -> set[int]:
    reads = graph.predecessors()
    return {s for n in nodes for s in reads[n] if s in products}


def _is_sharp(node: Node) -> bool:
    if node.name == "convert_element_type" and node.inputs:
        return np.dtype(node.eqn.params["new_dtype"]).kind in "iu"
    if node.name == "pow" and 0 not in node.literals:  # of a number it is an `exp`
        power = node.literals.get(1)
        return power is None or bool(np.any(abs(power) > _POWER))
    return node.name in SHARP


def _high_powers(graph: Graph) -> set[int]:
    """Returns the nodes that are a high power of another one, however it is taken.

    So is a product of many parts of one value, as `associative_scan` takes it.
    """
    of: dict[int, tuple[Hashable, int]] = {}  # node -> what it is a power of, and which
    for node in graph.nodes:
        if node.name == "integer_pow":
            power = abs(node.eqn.params["y"])
        elif node.name in ("mul", "square") and not node.literals:
            power = 2 if node.name == "square" else 1
        else:
            continue
        sources = [source_of(v, graph, _PARTS) for v in node.inputs]
        factors = [of.get(v.node, (_key(v), 1)) for v in sources]
        bases = {base for base, _ in factors}
        if len(bases) == 1:
            of[node.index] = bases.pop(), power * sum(n for _, n in factors)
    return {index for index, (_, power) in of.items() if power > _POWER}


def _key(value: Value) -> Hashable:
    return value.node, value.result, value.argument


def differences(
    graph: Graph, products: set[int], made: set[int], small: set[int]
) -> dict[int, int]:
    """Returns the nodes that a difference reads unrounded, and that difference.

    Both operands are float32 by JAX's promotion, one of them perhaps exact, or a number
    if a root, a quotient or a layer reads the difference; or one still holds the exact
    value that was added to it, and an exact value or a number is taken off; or both are
    sums of one value and others, which is added with its other sign in a backward pass.
    A logarithm is a difference as well, of exponents. So is what they are made of, back
    to the matrix multiplications; beside an exact value, elementwise.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands.
      made: the nodes that have a matrix multiplication upstream.
      small: statistics, which a normalization subtracts from what they are of.
    """
    promoted, offset = _promoted(graph, made), _holds_offset(graph, made)
    in_layers, positive = _in_layers(graph, products), nonnegative(graph)
    found: dict[int, int] = {}
    for node in sorted(graph.nodes, key=lambda n: n.name != "log"):
        if node.index in in_layers:
            if _normalizes(node, graph, small):
                continue
        elif is_backward(node) and _projects(node, graph):
            _follow_back(node, promoted, graph, found)
            continue
        if node.name == "log":
            _follow_back(node, promoted, graph, found, near=True)
        elif _adds_number(node, positive):
            if _is_read_relatively(node, graph, products, made):
                _follow_back(node, promoted, graph, found)
        elif _is_difference(node, graph):
            exact = [v for v in node.inputs if _is_exact(v, graph, made)]
            known = bool(exact) or any(node.literals.values())
            beside = any(v.made_of_data for v in exact)
            if not beside and any(map(np.any, node.literals.values())):
                beside = _is_read_relatively(node, graph, products, made)
            if _cancels(node, promoted, beside):
                _follow_back(node, promoted, graph, found, near=bool(exact))
            if _cancels(node, offset, known):
                _follow_back(node, offset, graph, found)
            if len(node.inputs) == 2:
                _follow_back(node, _on_the_way_to_shared(node, graph), graph, found)
        if is_backward(node) and node.name in _SUMS and len(node.inputs) == 2:
            ends = small if node.index in in_layers else set[int]()
            between = _between_cotangents(node, graph, ends) & promoted
            _follow_back(node, between, graph, found)
    return found


# Linear in a cotangent, and no part of it; a product is in the factor that is one.
_PARTS_OF_ONE = {"dynamic_slice", "slice", "split"}
_LINEAR = (_KEEPS_OFFSET | _SUMS | {"div", "mul", "scatter-add"}) - _PARTS_OF_ONE


def _between_cotangents(node: Node, graph: Graph, ends: set[int]) -> set[int]:
    """Returns what is made of one cotangent, to be added to its negative.

    A variance that is computed as the difference of two means hands such a cotangent to
    both of them. What they make of it cancels where the values are near their mean.
    """
    first, second = (_shares(v, graph, ends) for v in node.inputs)
    turn = 1 if node.name == "sub" else -1
    shared = {n for n, sign in first.items() if second.get(n) == turn * sign}
    found: set[int] = set()
    for index in sorted(first.keys() | second.keys()):
        if index not in shared:
            reads = {v.node for v in graph.nodes[index].inputs}
            if not reads.isdisjoint(found | shared):
                found.add(index)
    return found


def _shares(value: Value, graph: Graph, ends: set[int]) -> dict[int, int]:
    """Returns the cotangents that a value is linear in, up to an end, and their signs.

    Those of what they are multiplied by in the forward pass are not known.
    """
    nodes = graph.nodes
    found: dict[int, int] = {}
    stack = [(value.node, 1)]
    while stack and len(found) < _MOST_TERMS:
        index, sign = stack.pop()
        if index in found or index < 0 or index in ends:
            continue
        node = nodes[index]
        if not is_backward(node) or len(node.avals) > 1:
            continue
        found[index] = sign
        reads = [v.node for v in node.inputs if v.node >= 0]
        reads = [n for n in reads if is_backward(nodes[n])]
        if node.name not in _LINEAR or (node.name in ("mul", "div") and len(reads) > 1):
            continue
        is_factor = any(np.any(x < 0) for x in node.literals.values())
        if node.name == "neg" or (node.name in ("mul", "div") and is_factor):
            sign = -sign
        for n in reads:
            is_taken = node.name == "sub" and n == node.inputs[-1].node
            is_taken &= len(reads) > 1 or 0 in node.literals
            stack.append((n, -sign if is_taken else sign))
    return found


def _projects(node: Node, graph: Graph) -> bool:
    """Whether a backward pass takes off a cotangent what it has in common, a sum of it.

    A softmax does, as `g - softmax * sum(g)`.
    """
    if node.name not in _SUMS or len(node.inputs) != 2:
        return False
    first, second = (v.node for v in node.inputs)
    return _is_made_of(first, second, graph) or _is_made_of(second, first, graph)


def _in_layers(graph: Graph, products: set[int]) -> set[int]:
    """Returns the nodes that lead to a matrix multiplication of the forward pass.

    Of the backward pass it is those that one of its own leads to; what is left is the
    loss and its cotangents.
    """
    nodes = graph.nodes
    backward = {n for n in products if is_backward(nodes[n])}

    def is_number(index: int) -> bool:
        return not any(aval.shape for aval in nodes[index].avals)

    forward = leads_to_product(products - backward, graph.predecessors(), is_number)
    return forward | reached(backward, graph.consumers())


# An error relative to what these read is one of their result, or a larger one.
_RELATIVE = frozenset({"cbrt", "log", "pow", "rsqrt", "sqrt"})


def _is_read_relatively(
    node: Node, graph: Graph, products: set[int], made: set[int]
) -> bool:
    """Whether a difference from a number counts by its own size where it is read.

    A gate's `1 - z` that scales an activation does not: the error is small beside the
    sum that follows. Neither does the derivative of a nonlinearity. One from an
    exponential always does: `1 - exp(-a)` of a small `a` is `a`.
    """
    consumers, nodes = graph.consumers(), graph.nodes
    if node.index in {v.node for v in graph.results} or _is_expm1(node, graph):
        return True
    stack, seen = [node.index], {node.index}
    while stack:
        index = stack.pop()
        for reader in consumers[index]:
            read = nodes[reader]
            if is_backward(read) or reader in seen:
                continue
            seen.add(reader)
            divides = read.name == "div" and 1 not in read.literals
            divides = divides and read.inputs[-1].node == index
            if reader in products or read.name in _RELATIVE or divides:
                return True
            others = [v for v in read.inputs if v.node != index]
            is_scaled = read.name in _SCALES | _VIEWS | {"add", "sub"}
            if is_scaled and not any(v.node in made for v in others):
                stack.append(reader)
    return False


def _is_expm1(node: Node, graph: Graph) -> bool:
    """Whether a difference is one of an exponential and the number 1."""
    is_one = any(np.all(np.abs(x) == 1) for x in node.literals.values())
    sources = [source_of(v, graph, _VIEWS | {"neg"}).node for v in node.inputs]
    return is_one and any(n >= 0 and graph.nodes[n].name == "exp" for n in sources)


def _on_the_way_to_shared(node: Node, graph: Graph) -> set[int]:
    """Returns the sums through which both operands of a difference hold one term.

    A sum of a cotangent and of its negative is such a difference, too.
    """
    first, second = (_terms(v, graph) for v in node.inputs)
    turn = 1 if node.name == "sub" else -1
    shared = {n for n, sign in first.items() if second.get(n) == turn * sign}
    return {n for n, _ in (first | second).keys() - shared} if shared else set()


def _cancels(node: Node, held: set[int], known: bool) -> bool:
    """Whether a difference is of two of these values, or of one and a known one."""
    count = sum(v.node in held for v in node.inputs)
    return count == 2 or (known and count == 1)


def _is_exact(value: Value, graph: Graph, made: set[int]) -> bool:
    """Whether a value is exact, and none that is made of the bits of another one."""
    if value.node in made or is_zero(value):
        return False
    return value.node < 0 or graph.nodes[value.node].of_bits is None


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
        if node.name not in ("add", "sub") or node.index not in made:
            continue
        if is_backward(node):
            continue
        for value, other in zip(node.inputs, node.inputs[::-1], strict=True):
            is_own = value.made_of_data and source_of(value, graph).size == node.size
            if is_own and _is_exact(value, graph, made):
                found[node.index] = value
            elif value.node in found and other.size == node.size:
                exact = found[value.node]
                if node.index in state or not is_layer(other.node, exact):
                    found.setdefault(node.index, exact)
    return set(found)


def summed_gradients(graph: Graph, made: set[int], useful: set[int]) -> dict[int, int]:
    """Returns the cotangents that a gradient is a sum of, and that sum.

    A gradient is what the backward pass returns, or hands on to an optimizer. Its terms
    may cancel, as those of a difference of near values do, and the sum is stored in
    float32 anyway. So is what these are made of, in their size, back to the matrix
    multiplications and to the sums that are cotangents themselves. A gradient that is
    summed over a batch is none of these: there the roundings average out.

    Args:
      graph: the program.
      made: the nodes that have a matrix multiplication upstream.
      useful: the nodes that lead to a matrix multiplication.
    """
    found: dict[int, int] = {}
    ends = {n.index for n in graph.nodes if n.name in _SUMS} & useful
    promoted = _promoted(graph, made)
    gradients = {v.node for v in graph.results}
    for node in reversed(graph.nodes):
        if not is_backward(node):
            gradients.update(v.node for v in node.inputs)
        elif node.index in gradients and node.index not in useful:
            gradients.update(_elementwise(node))
            terms = _summed(node)
            if node.name in _SUMS and len(terms) > 1 and made.issuperset(terms):
                _follow_back(node, set(terms) | promoted, graph, found, ends, near=True)
                found.update({n: node.index for n in terms if n not in found})
    return found


def _summed(node: Node) -> list[int]:
    """Returns what a node adds up elementwise, or over a few terms, moves or turns."""
    if node.name not in _SUMS | _TURNS | MOVES | {"reduce_sum"}:
        return []
    return [v.node for v in node.inputs if _is_near(v, node)]


def _elementwise(node: Node) -> list[int]:
    """Returns what a node reads, but for what it adds up many terms of."""
    adds_up = node.name == "scatter-add" and not node.disjoint
    if adds_up or node.name in PRODUCTS:
        return []
    return [v.node for v in node.inputs if v.size < SMALL * node.size]


def _is_near(value: Value, node: Node) -> bool:
    """Whether a value has the size of a node's result, or a few times that."""
    return node.size <= value.size < SMALL * node.size


def _follow_back(
    node: Node,
    among: set[int],
    graph: Graph,
    found: dict[int, int],
    ends: AbstractSet[int] = frozenset(),
    near: bool = False,
) -> None:
    """Adds the nodes among these that lead to a difference without a product between.

    Args:
      node: the difference.
      among: the nodes.
      graph: the program.
      found: is added to.
      ends: nodes that nothing is followed through, as are products and what an
        iteration receives: parameters are carried through loops as well.
      near: whether nothing is followed through a reduction: over the many terms of one
        roundings average out.
    """
    stack = [node]
    while stack:
        for value in stack.pop().inputs:
            source = value.node
            if source not in among or source in found:
                continue
            if not near or _is_near(value, node):
                found[source] = node.index
                before = graph.nodes[source]
                if source not in ends and before.name not in PRODUCTS | {"carry_in"}:
                    stack.append(before)


def _promoted(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that are float32 by JAX's promotion, as by hand.

    An exact array stands beside the half result of a matrix multiplication in what they
    are computed from, so that by hand their differences are of unrounded values.
    """
    promoted: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals or node.name in PRODUCTS:
            continue
        sources = [v.node for v in node.inputs if v.aval.shape]
        if any(n not in made or n in promoted for n in sources):
            promoted.add(node.index)
    return promoted


def _holds_offset(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that an exact value was added to, with no end between."""
    holds: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals:
            continue
        exact = [v for v in node.inputs if _is_exact(v, graph, made)]
        known = bool(exact) or any(node.literals.values())
        held = any(v.node in holds for v in node.inputs)
        if node.name in ("add", "sub"):
            on = known or held
        elif node.name in _CARRIES:
            on = bool(exact) or held
        elif node.name in ("mul", "div"):
            others = [v for v in node.inputs if v.node not in holds]
            on = held and all(_is_exact(v, graph, made) for v in others)
        else:
            on = held and node.name in _KEEPS_OFFSET
        if on:
            holds.add(node.index)
    return holds


def _adds_number(node: Node, positive: AbstractSet[int]) -> bool:
    """Whether a node adds a number to what may be the negative of it.

    One that guards against zero is small beside all other values.
    """
    if node.name != "add" or len(node.inputs) != 1 or is_backward(node):
        return False
    is_sum = node.inputs[0].node in positive
    return any(
        np.any(abs(x) > _GUARD) and not (is_sum and np.all(x > 0))
        for x in node.literals.values()
    )


def _is_difference(node: Node, graph: Graph) -> bool:
    """Whether a node subtracts, or adds a value and the negative of it.

    A backward pass adds up cotangents, of which that of a subtracted value is negated.
    """
    if len(node.inputs) + len(node.literals) < 2:
        return False
    if node.name not in ("add", "add_any") or not is_backward(node):
        return node.name == "sub"
    if len(node.inputs) < 2:
        return False
    first, second = (_terms(v, graph) for v in node.inputs)
    return any(second.get(n) == -sign for n, sign in first.items())


def _terms(value: Value, graph: Graph) -> dict[tuple[int, int], int]:
    """Returns what a value is a sum of, scaled and moved: node, result and sign.

    Itself is one of them.
    """
    if value.node < 0:
        return {}
    found = {(value.node, value.result): 1}
    stack = list(found)
    while stack and len(found) < _MOST_TERMS:
        term = stack.pop()
        node, sign = graph.nodes[term[0]], found[term]
        is_scaled = node.name in _SCALES and len(node.inputs) == 1
        if not is_scaled and node.name not in _SUMS | _CARRIES | {"reduce_sum"}:
            continue
        is_factor = is_scaled and any(np.any(x < 0) for x in node.literals.values())
        if node.name == "neg" or is_factor:
            sign = -sign
        for position, read in enumerate(node.inputs):
            key = read.node, read.result
            if read.node >= 0 and key not in found:
                is_taken = node.name == "sub" and (position or 0 in node.literals)
                found[key] = -sign if is_taken else sign
                stack.append(key)
    return found


def _normalizes(node: Node, graph: Graph, small: set[int]) -> bool:
    """Whether a node takes a statistic off what it is of, or off another one.

    The largest or smallest of the values is one where an exponential follows, as in a
    softmax; in a range it is one of two near values.
    """
    views = _VIEWS | {"gather"}
    sources = {source_of(v, graph, views, small).node for v in node.inputs}
    statistics = sources & small
    if any(graph.nodes[s].name in _EXTREMES for s in statistics):
        if not _is_exponent(node, graph):
            return False
    return bool(statistics) and all(
        _is_made_of(s, n, graph) for s in statistics for n in sources - small
    )


_EXTREMES = frozenset({"reduce_max", "reduce_min"})


def _is_exponent(node: Node, graph: Graph) -> bool:
    """Whether a value, scaled or masked, is what an exponential is taken of."""
    consumers = graph.consumers()
    stack, seen = [node.index], {node.index}
    while stack:
        for reader in consumers[stack.pop()]:
            name = graph.nodes[reader].name
            if name in ("exp", "exp2"):
                return True
            if name in _SCALES | _VIEWS | {"select_n"} and reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return False


def source_of(
    value: Value,
    graph: Graph,
    views: AbstractSet[str] = _VIEWS,
    ends: AbstractSet[int] = frozenset(),
) -> Value:
    """Returns what a value is a view of, or spread from, as a bias is over a batch."""
    while value.node >= 0 and value.node not in ends:
        node = graph.nodes[value.node]
        if node.name not in views or len(node.inputs) != 1:
            break
        (value,) = node.inputs
    return value


def _is_made_of(node: int, source: int, graph: Graph) -> bool:
    """Whether a node is made of another one in a few steps."""
    reads = graph.predecessors()
    found = [node]
    for index in found:
        found += [n for n in reads[index] if n not in found]
        if source in found or len(found) > _MOST_TERMS:
            break
    return source in found
