"""Gradients that are sums of what a softmax hands back, along the softmax."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from jmp_rewrite._graph import Graph, Node, Value, is_backward
from jmp_rewrite._precision.terms import MOST_TERMS, source_of, takes_off_sum
from jmp_rewrite._rules import SUMS

_PARTS = frozenset({"pad", "slice"})
# What these return has the dimensions of their operand.
_SAME_AXES = frozenset(
    {"convert_element_type", "neg", "pad", "reduce_precision", "slice"}
)
# These may add or take away dimensions of size one.
_VIEWS = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
# Between what a sum is taken off, and what is summed.
_LINEAR = _SAME_AXES | _VIEWS | SUMS | {"div", "mul", "reduce_sum"}


def summed_along(graph: Graph, positive: AbstractSet[int]) -> dict[int, list[int]]:
    """Returns what a softmax hands back, if a gradient is its sum along the softmax.

    All of it cancels there, or all but the share of what else the softmax normalizes:
    the squared length of a query that is compared with centres, a bias of the scores
    that an attention with a sink pools positions by. A bias that is summed over a batch
    as well has no gradient but roundings, unless there is a sink.

    Returns:
      The sum of two cotangents that takes off what they have in common -> it and the
      nodes behind it, up to the gradient's sum.
    """
    found: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.name != "reduce_sum" or not is_backward(node) or node.eqn is None:
            continue
        axes = frozenset(node.eqn.params["axes"])
        behind: list[int] = []
        is_weighed = False
        cotangents = _cotangents(node, graph)
        while len(cotangents) == 1:
            (index,) = cotangents
            at, cotangents = graph.nodes[index], _cotangents(graph.nodes[index], graph)
            behind.append(index)
            is_weighed |= _is_weighed(at, positive)
            if at.name in SUMS and len(cotangents) == 2:
                is_weighed |= any(
                    _is_weighed(graph.nodes[n], positive) for n in cotangents
                )
                is_part = any(graph.nodes[n].name in _PARTS for n in behind)
                is_part = is_part or _divides_by_more(cotangents, graph)
                if is_weighed and takes_off_sum(at, graph):
                    along = _axes_of_sum(at, graph)
                    if along is not None and (
                        along == axes or (is_part and along < axes)
                    ):
                        found[index] = behind
            elif at.name == "transpose":
                order = at.eqn.params["permutation"]
                axes = frozenset(order[n] for n in axes)
            elif at.name in ("div", "mul"):
                factors = [v for v in at.inputs if v.node not in cotangents]
                unknown = [v for v in factors if v.node not in positive]
                if not all(_is_same_along(v, axes, graph) for v in unknown):
                    break
            elif at.name == "select_n":  # or nothing, as behind a bound
                if any(np.any(x != 0) for x in at.literals.values()):
                    break
            elif at.name in _VIEWS:
                axes = _before(at, axes)
            elif at.name not in _SAME_AXES:
                break
    return found


def takes_off_share(node: Node, graph: Graph, positive: AbstractSet[int]) -> bool:
    """Whether a cotangent loses a sum that is weighed by shares, as a softmax' does.

    What a norm takes off is weighed by the values that it normalizes, of either sign.
    """
    axes = _axes_of_sum(node, graph)
    if axes is None or not takes_off_sum(node, graph):
        return False
    left = [v.node for v in node.inputs if v.node >= 0]
    for index in left:
        at = graph.nodes[index]
        if not is_backward(at) or at.name not in _LINEAR:
            continue
        if at.name == "mul" and any(
            v.node in positive and not _is_same_along(v, axes, graph)
            for v in at.inputs
            if v.size == node.size
        ):
            return True
        left += [n for n in graph.predecessors()[index] if n not in left]
        if len(left) > MOST_TERMS:
            break
    return False


def _before(view: Node, axes: frozenset[int]) -> frozenset[int]:
    """Returns the dimensions that a view, but for those of size one, shows as these."""
    if len(view.inputs) != 1:
        return frozenset()
    shapes = view.avals[0].shape, view.inputs[0].aval.shape
    after, before = ([n for n, d in enumerate(s) if d != 1] for s in shapes)
    if [shapes[0][n] for n in after] != [shapes[1][n] for n in before]:
        return frozenset()
    return frozenset(b for a, b in zip(after, before, strict=True) if a in axes)


def _cotangents(node: Node, graph: Graph) -> list[int]:
    """Returns what a node reads of a backward pass, but for zeros."""
    read = (graph.nodes[v.node] for v in node.inputs if v.node >= 0)
    return [n.index for n in read if is_backward(n) and n.inputs]


def _is_weighed(node: Node, positive: AbstractSet[int]) -> bool:
    """Whether a cotangent is multiplied by what is nowhere negative, as a share is."""
    return node.name == "mul" and any(
        v.node in positive and v.size == node.size for v in node.inputs
    )


def _divides_by_more(terms: Sequence[int], graph: Graph) -> bool:
    """Whether a term is divided by a sum and something else: `exp(x) / (1 + sum)`."""
    near = {n for t in terms for n in (t, *graph.predecessors()[t])}
    quotients = (graph.nodes[n] for n in near if graph.nodes[n].name == "div")
    divisors = (q.inputs[1] for q in quotients if len(q.inputs) == 2)
    sources = (source_of(v, graph).node for v in divisors)
    return any(n >= 0 and graph.nodes[n].name == "add" for n in sources)


def _is_same_along(value: Value, axes: frozenset[int], graph: Graph) -> bool:
    """Whether a factor is one number along these dimensions."""
    shape, dims = value.aval.shape, tuple(range(len(value.aval.shape)))
    node = graph.nodes[value.node] if value.node >= 0 else None
    if node is not None and node.name == "broadcast_in_dim" and node.inputs:
        shape, dims = node.inputs[0].aval.shape, node.eqn.params["broadcast_dimensions"]
    return all(size == 1 for d, size in zip(dims, shape, strict=True) if d in axes)


def _axes_of_sum(node: Node, graph: Graph) -> frozenset[int] | None:
    """Returns along which dimensions what two cotangents have in common is a sum."""
    reads = graph.predecessors()
    found = [v.node for v in node.inputs if v.node >= 0]
    for index in found:
        made = graph.nodes[index]
        if made.name == "reduce_sum" and made.eqn is not None:
            if [v.size for v in made.inputs] == [node.size]:
                return frozenset(made.eqn.params["axes"])
        found += [n for n in reads[index] if n not in found]
        if len(found) > MOST_TERMS:
            break
    return None
