"""Differences that read unrounded values.

A difference of two values that an exact one was added to leaves the error that rounding
has put on the exact part: what is measured with an offset is rounded before the offset
is added, or not at all. One that counts by its own size, as `1 - exp(-a)` of a small
`a`, leaves the error of what it is small beside.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from jmp_rewrite._graph import (
    EITHER,
    Graph,
    Made,
    Node,
    Value,
    is_backward,
    reached,
)
from jmp_rewrite._precision.origins import (
    VIEWS,
    followed,
    is_indicator,
    leads_to_product,
)
from jmp_rewrite._precision.shares import takes_off_share
from jmp_rewrite._precision.sums import follow_back, is_exact, promoted_nodes
from jmp_rewrite._precision.terms import (
    KEEPS_OFFSET,
    MOST_TERMS,
    SCALES,
    between_cotangents,
    is_made_of,
    is_relative,
    on_the_way_to_shared,
    source_of,
    takes_off_sum,
    terms_of,
    turned_cotangents,
)
from jmp_rewrite._rules import (
    COMPARES,
    COPIES,
    EXPONENTIALS,
    JOINS,
    LOGARITHMS,
    ORDERS,
    PICKS,
    PRODUCTS,
    SUMS,
    SUMS_OVER_DEVICES,
    TAKES_APART,
)

# Half an epsilon of float16. A number up to that keeps a quotient finite.
_GUARD = 2.0**-11
# A relative error of an operand is one of the result.
_KEEPS_RELATIVE = (
    SCALES
    | VIEWS
    | COPIES
    | PICKS
    | {
        "abs",
        "integer_pow",
        "reduce_sum",
        "square",
    }
)
# A gradient is held behind these, of one operand with no gradient in the others.
_BOUNDED = VIEWS | TAKES_APART | {"clamp", "max", "min"}
# Their sum along a dimension is another one.
_MIXED = PRODUCTS | {"cumsum", "gather", "reduce_sum"}
HOLDS_GRADIENT = SCALES | _BOUNDED | SUMS_OVER_DEVICES | _MIXED
_CHOICES = EITHER | {"select_n"}
# Indices of the largest or smallest elements are comparisons of all of them.
_SELECTS = frozenset({"argmax", "argmin", "sort", "top_k"})
_EXTREMES = frozenset({"reduce_max", "reduce_min"})


def differences(
    graph: Graph,
    products: set[int],
    made: set[int],
    small: set[int],
    ends: set[int],
    contrasts: AbstractSet[int],
    shares: Mapping[int, Sequence[int]],
    positive: AbstractSet[int],
) -> dict[int, int]:
    """Returns the nodes that a difference reads unrounded, and that difference.

    Both operands are float32 by JAX's promotion, one of them perhaps exact, or a number
    if a root, a quotient or a layer reads the difference; or one still holds the exact
    value that was added to it, and an exact value or a number is taken off; or both are
    sums of one value and others, which is added with its other sign in a backward pass.
    A number that is added to what may be negative is such a difference, too, and so is
    a sum of what a backward pass has made of one cotangent and of its negative. A
    logarithm is one of exponents, and a comparison that a forward pass asks is one, as
    of a value with the largest around it. So is what they are made of, back to the
    matrix multiplications; beside an exact value, elementwise.

    Args:
      graph: the program.
      products: the matrix multiplications of half operands.
      made: the nodes that have a matrix multiplication upstream.
      small: statistics, which a normalization subtracts from what they are of.
      ends: gradients that an update reads, through which nothing is followed.
      contrasts: differences of two gradients.
      shares: what a softmax hands back and is summed along it, as `summed_along` says.
      positive: what is nowhere negative.
    """
    ends = ends | products
    promoted, offset = promoted_nodes(graph, made, products), _holds_offset(graph, made)
    turned = turned_cotangents(graph)
    in_layers = _in_layers(graph, products)
    loss = _read_by_results(graph) - in_layers
    relative = _read_relatively(graph, products, made)
    outside = _terms_outside(graph, in_layers, made)
    deciding = _deciding(graph, (in_layers | loss) & _read_forward(graph, products))
    found: dict[int, int] = {}
    near: dict[int, int] = {}  # apart: they end where others go on
    for index in sorted(contrasts):
        node = graph.nodes[index]
        follow_back(node, promoted | products, graph, found, products)
    for node in sorted(graph.nodes, key=lambda n: n.name not in LOGARITHMS):
        in_loss = node.index in loss
        if node.index in in_layers:
            is_sum = is_backward(node) and node.name in SUMS and len(node.inputs) == 2
            if is_sum and any(v.node in outside for v in node.inputs):
                if takes_off_share(node, graph, positive):
                    follow_back(node, promoted, graph, found, ends)
            if node.index in shares:
                follow_back(node, made, graph, found, ends)
                found |= {n: node.index for n in shares[node.index] if n not in found}
            if _normalizes(node, graph, small):
                continue
        elif is_backward(node) and _projects(node, graph):
            follow_back(node, promoted, graph, found, ends)
            continue
        if node.name in LOGARITHMS or _is_log_of_difference(node, positive):
            follow_back(node, promoted, graph, near, ends, near=True)
        elif _adds_number(node, positive):
            if in_loss or node.index in relative:
                follow_back(node, promoted, graph, found, ends)
        elif _comparison(node.eqn, node.inputs) in deciding:
            if _cancels(node, promoted, node.name in _SELECTS):
                follow_back(node, promoted, graph, found, ends)
        elif _is_difference(node, graph):
            exact = [v for v in node.inputs if is_exact(v, graph, made)]
            known = bool(exact) or any(node.literals.values())
            beside = any(v.made_of_data for v in exact)
            if not beside and (exact or any(map(np.any, node.literals.values()))):
                beside = in_loss or node.index in relative
            if _cancels(node, promoted, beside):
                to = near if exact else found
                follow_back(node, promoted, graph, to, ends, near=bool(exact))
            if _cancels(node, offset, known):
                follow_back(node, offset, graph, found, ends)
            if any(source_of(v, graph).size == node.size for v in exact if beside):
                taken_off = _scaled_product(node, products, graph)
                found |= {n: node.index for n in taken_off if n not in found}
            if len(node.inputs) == 2:
                follow_back(node, on_the_way_to_shared(node, graph), graph, found, ends)
        if node.index in turned and node.name in SUMS and len(node.inputs) == 2:
            stops = products | small if node.index in in_layers else products
            turns = between_cotangents(node, graph, stops) & promoted
            found |= {n: node.index for n in turns if n not in found}
    return found | near


# A gradient: the node, which of its results, and how that was taken apart, or summed.
_Gradient = tuple[int, int, tuple[Hashable, ...]]
# Of each its sign.
_Gradients = dict[_Gradient, int]


def contrasted(graph: Graph) -> dict[int, set[int]]:
    """Returns the differences of two gradients, as of two phases, and what made these.

    A gradient is what code outside of the backward passes reads of one: an optimizer,
    or a loss. It may have been scaled, bounded, chosen and added to others before.
    """
    found: dict[int, set[int]] = {}
    holds: dict[int, _Gradients] = {}
    for node in graph.nodes:
        if is_backward(node):
            continue
        operands = [_gradients_in(v, holds, graph) for v in node.inputs]
        if not any(operands):
            continue
        if node.name in SUMS and len(operands) == 2:
            first, second = operands
            if node.name == "sub":
                second = _negated(second)
            apart = {g: (first | second)[g] for g in first.keys() ^ second.keys()}
            signs = [{apart[g] for g in each if g in apart} for each in operands]
            if all(signs) and len(signs[0] | signs[1]) == 2:
                found[node.index] = {_maker(index, graph) for index, *_ in apart}
            own = first | second
        elif node.name in SUMS:
            is_taken_off = node.name == "sub" and 0 in node.literals
            own = _negated(operands[0]) if is_taken_off else operands[0]
        else:
            own = _same_gradients(node, operands)
            if node.name in _MIXED and len(set(own.values())) == 2:
                found[node.index] = {_maker(index, graph) for index, *_ in own}
        is_many = len(own) > MOST_TERMS and node.name in SUMS
        if own and not is_many:
            holds[node.index] = own
    return found


def _gradients_in(
    value: Value, holds: dict[int, _Gradients], graph: Graph
) -> _Gradients:
    """Returns the gradients that a value is a sum of."""
    if value.node < 0:
        return {}
    node = graph.nodes[value.node]
    if is_backward(node):
        return {(value.node, value.result, ()): 1}
    own = holds.get(value.node, {})
    if own and node.name in TAKES_APART | _MIXED:
        if len(own) > MOST_TERMS:
            return {}
        part = node.name, str(node.eqn.params), value.result
        return {(n, r, (*parts, part)): sign for (n, r, parts), sign in own.items()}
    return own


def _same_gradients(node: Node, operands: list[_Gradients]) -> _Gradients:
    """Returns the gradients that a node hands on, of those in its operands."""
    holding = [i for i, own in enumerate(operands) if own]
    if node.name not in _CHOICES | JOINS:
        is_linear = node.name in HOLDS_GRADIENT and len(holding) == 1
        if not is_linear or (node.name == "div" and holding[0] != 0):
            return {}
    found = {g: sign for i in holding for g, sign in operands[i].items()}
    is_negated = node.name == "neg" or any(np.any(x < 0) for x in _factors(node))
    return _negated(found) if is_negated else found


def _negated(gradients: _Gradients) -> _Gradients:
    return {g: -sign for g, sign in gradients.items()}


def _maker(index: int, graph: Graph) -> int:
    """Returns the node that made what a node is a view of."""
    node = graph.nodes[index]
    is_view = node.name in VIEWS and len(node.inputs) == 1
    return source_of(node.inputs[0], graph).node if is_view else index


def _factors(node: Node) -> Iterable[Any]:
    return node.literals.values() if node.name in ("div", "mul") else ()


def _projects(node: Node, graph: Graph) -> bool:
    """Whether a backward pass takes off a cotangent what it has in common, a sum of it.

    A softmax does, as `g - softmax * sum(g)`.
    """
    if node.name not in SUMS or len(node.inputs) != 2:
        return False
    first, second = (v.node for v in node.inputs)
    if is_made_of(first, second, graph) or is_made_of(second, first, graph):
        return True
    return takes_off_sum(node, graph)


def _read_by_results(graph: Graph) -> set[int]:
    """Returns what leads to a result through nodes of the forward pass alone."""
    nodes = graph.nodes
    results = {v.node for v in graph.results if v.node >= 0}
    results = {n for n in results if not is_backward(nodes[n])}
    before = graph.predecessors()
    return results | leads_to_product(results, before, lambda n: is_backward(nodes[n]))


def _read_forward(graph: Graph, products: set[int]) -> set[int]:
    """Returns what leads to a forward product or result, with no gradient between.

    How a gradient was chosen is asked by no forward pass that follows it, as in
    meta-learning.
    """
    nodes = graph.nodes
    forward = [n for n in products if not is_backward(nodes[n])]
    before = graph.predecessors()
    leads = leads_to_product(forward, before, lambda n: is_backward(nodes[n]))
    return leads | _read_by_results(graph)


# Which equation, and the nodes of what it reads.
_Comparison = tuple[Any, tuple[int, ...]]


def _comparison(eqn: Any, inputs: Iterable[Value | None]) -> _Comparison:
    return eqn, tuple(v.node for v in inputs if v is not None)


def _deciding(graph: Graph, layers: set[int]) -> set[_Comparison]:
    """Returns the comparisons that a forward pass chooses by, or multiplies by.

    One is made of masks and indices, as a router's are. The derivative of a maximum
    asks which elements are as large as it: that is a backward pass, also of a gradient
    that a forward pass follows.

    Args:
      graph: the program.
      layers: the nodes whose masks and indices are looked at.
    """
    found: set[_Comparison] = set()
    seen: set[Made] = set()
    for node in graph.nodes:
        if node.index not in layers or is_backward(node):
            continue
        stack = [v.name for v in node.others if v is not None]
        while stack:
            made = stack.pop()
            if not isinstance(made, Made) or made in seen:
                continue
            seen.add(made)
            compared = _comparison(made.eqn, made.operands)
            is_nan = made.name in COMPARES and len(set(compared[1])) == 1
            if made.name in COMPARES | ORDERS | _SELECTS and not is_nan:
                found.add(compared)
            stack += [v.name for v in made.operands if v is not None]
    return found


def _terms_outside(graph: Graph, in_layers: set[int], made: set[int]) -> set[int]:
    """Returns the cotangents that hold one that the loss alone has made, and those."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.index in made and node.inputs and is_backward(node):
            is_sum = node.name in SUMS | VIEWS
            if node.index not in in_layers:
                found.add(node.index)
            elif is_sum and any(v.node in found for v in node.inputs):
                found.add(node.index)
    return found


def _in_layers(graph: Graph, products: set[int]) -> set[int]:
    """Returns the nodes that lead to a matrix multiplication of the forward pass.

    Of the backward pass it is those that one of its own leads to, and what computes
    such nodes once more; what is left is the loss and its cotangents.
    """
    nodes = graph.nodes
    backward = {n for n in products if is_backward(nodes[n])}

    def source(index: int) -> Hashable:
        eqn = nodes[index].eqn
        return nodes[index].name, eqn and id(eqn.source_info.traceback)

    forward = followed(graph, products)
    again = {n.index for n in nodes if n.place.recomputed and n.eqn is not None}
    known = {source(n) for n in forward - again} if again else set()
    forward |= {n for n in again if source(n) in known}
    return forward | reached(backward, graph.consumers())


def _read_relatively(graph: Graph, products: set[int], made: set[int]) -> set[int]:
    """Returns the nodes that count by their own size where they are read.

    Products and quotients keep relative errors. A gate's `1 - z` that scales what is
    added to another activation does not: the error is small beside the sum. Nor does
    one that scales what it is made of, as that of a GELU, unless a root or a quotient
    reads each element, or it is returned: it is small for a part of the values. Neither
    does the derivative of a nonlinearity. One from an exponential always does: `1 -
    exp(-a)` of a small `a` is `a`.
    """
    consumers, nodes = graph.consumers(), graph.nodes
    returned = {v.node for v in graph.results}
    found: set[int] = set()
    if_scaled: set[int] = set()  # what they scale counts
    each: set[int] = set()  # of all elements, whatever the others are
    for index in reversed(range(len(nodes))):
        if index in returned or _is_expm1(nodes[index], graph):
            found.add(index)
        if index in returned:
            if_scaled.add(index)
        for reader in consumers[index]:
            read = nodes[reader]
            if is_backward(read):
                continue
            if reader in products or is_relative(read, index):
                found.add(index)
                if reader not in products:
                    each.add(index)
                continue
            others = [v for v in read.inputs if v.node != index and v.node in made]
            if read.name in ("add", "sub"):
                if reader in found and not others:
                    found.add(index)
                if reader in each and not others:
                    each.add(index)
            elif read.name in _KEEPS_RELATIVE or _guards(read):
                if reader in if_scaled:
                    if_scaled.add(index)
                if reader in each and read.name != "reduce_sum":
                    each.add(index)
                if (
                    index in if_scaled
                    or index in each
                    or (reader in found and not _scales_its_own(index, others, graph))
                ):
                    found.add(index)
    return found


def _guards(node: Node) -> bool:
    """Whether a node keeps a value from zero, as `max(x, 1e-6)`."""
    numbers = node.literals.values() if node.name == "max" else ()
    return any(np.all((x > 0) & (x <= _GUARD)) for x in numbers)


def _scales_its_own(index: int, factors: Iterable[Value], graph: Graph) -> bool:
    """Whether a value is made of one of these factors, element by element."""
    sources = (source_of(v, graph, SCALES) for v in factors)
    own = [v.node for v in sources if v.size == graph.nodes[index].size]
    return any(is_made_of(index, n, graph) for n in own)


def _is_expm1(node: Node, graph: Graph) -> bool:
    """Whether a difference is one of an exponential and the number 1."""
    is_one = any(np.all(np.abs(x) == 1) for x in node.literals.values())
    sources = [source_of(v, graph, VIEWS | {"neg"}).node for v in node.inputs]
    return is_one and any(
        n >= 0 and graph.nodes[n].name in EXPONENTIALS for n in sources
    )


def _cancels(node: Node, held: set[int], known: bool) -> bool:
    """Whether a difference is of two of these values, or of one and a known one."""
    count = sum(v.node in held for v in node.inputs)
    return count == 2 or (known and count == 1)


def _scaled_product(node: Node, products: set[int], graph: Graph) -> list[int]:
    """Returns a forward product that a node reads scaled or moved, and what scales it.

    As squared distances that are expanded do: the product is nearly all of them.
    """
    found: list[int] = []
    for value in node.inputs:
        way: list[int] = []
        while value.node >= 0:
            way.append(value.node)
            read = graph.nodes[value.node]
            large = [v for v in read.inputs if v.size == value.size]
            if value.node in products and not is_backward(read):
                found += way
            if value.node in products or len(large) != 1:
                break
            if read.name not in SCALES | VIEWS:
                break
            (value,) = large
    return found


def _holds_offset(graph: Graph, made: set[int]) -> set[int]:
    """Returns the made nodes that an exact value was added to, with no end between."""
    holds: set[int] = set()
    for node in graph.nodes:
        if node.index not in made or not node.avals:
            continue
        exact = [v for v in node.inputs if is_exact(v, graph, made)]
        known = bool(exact) or any(node.literals.values())
        held = any(v.node in holds for v in node.inputs)
        if node.name in ("add", "sub"):
            on = known or held
        elif node.name in EITHER:
            on = bool(exact) or held
        elif node.name in ("mul", "div"):
            others = [v for v in node.inputs if v.node not in holds]
            on = held and all(is_exact(v, graph, made) for v in others)
        else:
            on = held and node.name in KEEPS_OFFSET
        if on:
            holds.add(node.index)
    return holds


def _is_log_of_difference(node: Node, positive: AbstractSet[int]) -> bool:
    """Whether a node is `log1p` of what may be negative, as `log1p(-tanh(a) ** 2)`."""
    if node.name != "log1p" or not node.inputs:
        return False
    return node.inputs[0].node not in positive


def _adds_number(node: Node, positive: AbstractSet[int]) -> bool:
    """Whether a node adds a number to what may be the negative of it.

    One that guards against zero is small beside all other values.
    """
    unknown = [v for v in node.inputs if v.constant is None]
    if node.name != "add" or len(unknown) != 1 or is_backward(node):
        return False
    is_sum = unknown[0].node in positive
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
    first, second = (terms_of(v, graph) for v in node.inputs)
    return any(second.get(n) == -sign for n, sign in first.items())


def _normalizes(node: Node, graph: Graph, small: set[int]) -> bool:
    """Whether a node takes a statistic off what it is of, or off another one.

    The largest or smallest of the values is one where an exponential follows, as in a
    softmax; in a range it is one of two near values.
    """
    views = VIEWS | {"gather"}
    sources = {source_of(v, graph, views).node for v in node.inputs}
    statistics = {s for s in sources & small if not _is_picked(s, graph)}
    if any(graph.nodes[s].name in _EXTREMES for s in statistics):
        if not _is_exponent(node, graph):
            return False
    return bool(statistics) and all(
        is_made_of(s, n, graph) for s in statistics for n in sources - small
    )


def _is_picked(index: int, graph: Graph) -> bool:
    """Whether a mask picks what is summed, as one-hot vectors do: no statistic.

    Nor are parts of it, bounded, and differences of such.
    """
    left = [index]
    for index in left:
        node = graph.nodes[index]
        before = [v.node for v in node.inputs if v.node >= 0 and v.made_of_data]
        if not before or len(left) > MOST_TERMS:
            return False
        if node.name in _BOUNDED | SUMS:
            left += before
            continue
        terms = graph.nodes[before[0]]
        if node.name != "reduce_sum" or terms.name != "mul":
            return False
        if not any(is_indicator(v, graph.nodes) for v in terms.inputs):
            return False
    return True


def _is_exponent(node: Node, graph: Graph) -> bool:
    """Whether a value, scaled or masked, is what an exponential is taken of."""
    consumers = graph.consumers()
    stack, seen = [node.index], {node.index}
    while stack:
        for reader in consumers[stack.pop()]:
            name = graph.nodes[reader].name
            if name in EXPONENTIALS:
                return True
            if name in SCALES | VIEWS | {"select_n"} and reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return False
