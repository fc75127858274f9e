"""What is done with each node: pins and placement, put together as plain data."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmp_rewrite._graph import JOINTS, Graph, Node, Place, Region, is_backward
from jmp_rewrite._precision import origins
from jmp_rewrite._precision import placement as _place
from jmp_rewrite._precision.cost import SORTS, storage
from jmp_rewrite._precision.local import SCOPE
from jmp_rewrite._precision.pins import NO_PRODUCT, Pins, bare
from jmp_rewrite._precision.terms import source_of
from jmp_rewrite._rules import CHOOSES, COMPARISONS, MOVES, SUMS, Category, table


class Label(enum.IntEnum):
    """How a node is emitted.

    Attributes:
      FLOAT32: its operands and its results are float32.
      HALF: they are half.
      ROUNDED: it computes in float32, and its results are rounded once.
      WIDENED: a product of half operands whose result is float32.
    """

    FLOAT32 = 0
    HALF = 1
    ROUNDED = 2
    WIDENED = 3


_POOLS = frozenset({"reduce_window_max", "reduce_window_min"})
_AGREES_OR_REDUCES = (JOINTS - {"stack_out"}) | origins.REDUCTIONS


# Every result of these reads its operand several times; the transpose is a sum, which
# has to be float32 (8192 cotangents of 1 add up to 256 in bfloat16).
_SPREADS = frozenset(
    {
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "broadcast_in_dim",
        "gather",
        "pbroadcast",
        "pvary",
        "tile",
    }
)


@dataclasses.dataclass(eq=False)
class Plan:
    """A program and what is done with it.

    Attributes:
      graph: the program.
      pins: what numerics said.
      labels: how each node is emitted.
      saturates: the nodes of which rounding makes no infinities.
      shared: whether a value is cast once for all its readers. True for a whole step,
        which holds its own backward pass; before differentiation each reader casts for
        itself, so that its cotangents are added up in float32.
      nested: makes the plan of a program that is only known later: a derivative rule.
      asked: the nodes whose float32 no pass may round: what a scope of the policy asks
        for, or a difference of two gradients, or a sum along a softmax, and sums that a
        matrix multiplication could hold.
      region: what it was traced as; None if nobody said.
      is_differentiated: whether it is known to be differentiated from outside.
      if_differentiated: makes the plan that holds where somebody differentiates it;
        None if that is this one.
    """

    graph: Graph
    pins: Pins
    labels: list[Label]
    shared: bool
    nested: Callable[[Any, Place], Plan]
    saturates: frozenset[int] = frozenset()
    asked: frozenset[int] = frozenset()
    region: Region | None = None
    is_differentiated: bool = False
    if_differentiated: Callable[[], Plan] | None = None

    @property
    def half(self) -> np.dtype:
        """The compute dtype."""
        return self.pins.half

    @property
    def rewrites(self) -> bool:
        """Whether anything is half at all."""
        return any(self.labels)


# Says of each node whether its result is half; products run on half operands anyway.
Placement = Callable[[Graph, Pins], list[bool]]


def cheapest(graph: Graph, pins: Pins) -> list[bool]:
    """Rounds what is written to memory: the minimum cut of what storing costs.

    Before differentiation a backward pass that nobody has seen keeps values in the
    dtype that they are computed in, so that there what TensorFlow's pass computes in
    half is half as well.
    """
    labels = _place.cheapest(storage(graph, pins))
    if not pins.whole_step:
        native = propagation(graph, pins)
        forward = [not is_backward(n) for n in graph.nodes]
        both = zip(labels, native, forward, strict=True)
        labels = [a or (b and c) for a, b, c in both]
    return [x and n not in pins.emits_full for n, x in enumerate(labels)]


def propagation(graph: Graph, pins: Pins) -> list[bool]:
    """TensorFlow's propagation, less what buys nothing."""
    seen = bare(graph, pins)
    labels = _place.propagate(seen)
    for node in pins.forced:
        if seen.categories[node] is Category.ALLOW:
            labels[node] = True
    wide = frozenset(n.index for n in graph.nodes if _is_wide(n, pins))
    returned = frozenset(v.node for v in graph.results)
    return _place.prune(seen, labels, pins.emits_full, wide, returned, pins.sinks)


def products(graph: Graph, pins: Pins) -> list[bool]:
    """Matrix products alone.

    For the rules of custom derivatives. A backward rule may compute the forward pass
    again, as a program of its own; where both round the same values, whatever else the
    programs hold, a solver accepts the same steps in both.
    """
    return [pins.reads_half(n) for n in range(len(graph.nodes))]


def make_plan(
    graph: Graph,
    pins: Pins,
    placement: Placement,
    nested: Callable[[Any, Place], Plan],
) -> Plan:
    """Places what the pins leave free and says what to do with each node."""
    labels = placement(graph, pins)
    if pins.whole_step and placement is not propagation:
        _follow_exactly(graph, pins, labels)
        _move_operands(graph, pins, labels)
    if not pins.whole_step:
        _round_each_use(graph, pins, labels)
    _stack_alike(graph, pins, labels)
    _compare_alike(graph, labels)
    for node in pins.reduced | pins.lookups:
        labels[node] = True
    alike = _chosen_alike(graph, labels)
    made = [_label(n, pins, labels, n.index in alike) for n in graph.nodes]
    for node in _asks_half(graph, pins, labels):
        made[node] = Label.HALF
    rounded = (n for n in graph.nodes if made[n.index] is Label.ROUNDED)
    saturates = frozenset(n.index for n in rounded if _saturates(n, pins))
    asked = {i for i, why in enumerate(pins.full) if why and why.startswith(SCOPE)}
    asked |= pins.contrasts | pins.shares | _unrounded_sums(graph, pins)
    return Plan(graph, pins, made, pins.whole_step, nested, saturates, frozenset(asked))


def _unrounded_sums(graph: Graph, pins: Pins) -> set[int]:
    """Returns the sums with a matrix multiplication's result that may not be rounded.

    A compiler could compute them inside of it, in its own dtype.
    """
    return {
        node.index
        for node in graph.nodes
        if node.name in SUMS
        and not pins.may_round(node.index)
        and any(
            v.node >= 0 and pins.reads_half(source_of(v, graph).node)
            for v in node.inputs
        )
    }


def _follow_exactly(graph: Graph, pins: Pins, labels: list[bool]) -> None:
    """Moves half values in half, whoever reads them: that is exact.

    A loss picks a label's logit; cast first, all logits would be written in float32.
    """
    for node in graph.nodes:
        index = node.index
        if labels[index] or node.name in _AGREES_OR_REDUCES:
            continue
        if not (node.avals and node.inputs):
            continue
        asked = pins.full[index] not in (None, NO_PRODUCT) and pins.upstream[index] < 0
        if not asked and pins.moves_exactly(node):
            labels[index] = all(v.node >= 0 and labels[v.node] for v in node.inputs)


def _move_operands(graph: Graph, pins: Pins, labels: list[bool]) -> None:
    """Moves the rounded copy of what matrix multiplications alone read behind a move.

    No number changes. A convolution's kernel is reversed for the gradient of its input,
    and XLA:GPU knows such a convolution by the reversal that stands right before it.
    """
    nodes = graph.nodes
    alone = origins.read_alone(
        graph, pins.reads_half, lambda n: pins.moves_exactly(nodes[n])
    )
    for node in (nodes[n] for n in alone):
        is_asked = (pins.full[node.index] or "").startswith(SCOPE)
        if node.name in MOVES and len(node.inputs) == 1 and not is_asked:
            labels[node.index] |= pins.moves_exactly(node)


def _round_each_use(graph: Graph, pins: Pins, labels: list[bool]) -> None:
    """Moves an exact value in float32 where several readers would share a rounded copy.

    Whoever differentiates the program adds up their cotangents: behind the copy in
    half, before it in float32. A reader in a loop that the value comes from outside of
    is as many as the loop has iterations.
    """
    consumers, loops = graph.consumers(), graph.innermost_loops()
    uses: collections.Counter[int] = collections.Counter()
    for node in graph.nodes:
        for value in node.inputs:
            is_held = node.name in JOINTS or bool(value.slice_of)
            is_inside = loops[node.index] not in (-1, loops[value.node])
            uses[value.node] += 2 if is_inside and not is_held else 1
    shared: set[int] = set()
    for node in reversed(graph.nodes):
        index = node.index
        if labels[index] and index in pins.exact and index not in pins.forced:
            if uses[index] > 1 or not shared.isdisjoint(consumers[index]):
                shared.add(index)
                labels[index] = False


def _stack_alike(graph: Graph, pins: Pins, labels: list[bool]) -> None:
    """Stacks half values in half; what is float32 too, but in a whole step."""
    for node in graph.nodes:
        if node.name == "stack_out":
            source = labels[node.inputs[0].node]
            labels[node.index] = source or (pins.whole_step and labels[node.index])


def _compare_alike(graph: Graph, labels: list[bool]) -> None:
    """Picks from float32 values in float32 where the result is compared with them.

    The gradient of a maximum asks which elements equal it, and divides by their number.
    If the maximum were of rounded copies, none would, and the gradient would be NaN.
    A router asks which are as large as the second largest.
    """
    for index, picked in origins.compared_picks(graph):
        labels[index] &= all(v.node >= 0 and labels[v.node] for v in picked)


def _asks_half(graph: Graph, pins: Pins, labels: Sequence[bool]) -> list[int]:
    """Returns what compares a half value, or what only moves one, with a number.

    It asks with the number as half: the value may have been limited to that.
    """
    is_half, asks = list(labels), pins.sinks & pins.lossy
    found = []
    for node in graph.nodes:
        index = node.index
        held = [v.node >= 0 and is_half[v.node] for v in node.inputs]
        of_half = bool(held) and all(held)
        is_half[index] |= of_half and pins.moves_exactly(node)
        if of_half and node.name in COMPARISONS and index in asks:
            found.append(index)
    return found


def _chosen_alike(graph: Graph, labels: Sequence[bool]) -> set[int]:
    """Returns the derivatives of pools that have chosen from rounded values."""
    consumers, found = graph.consumers(), set[int]()
    for node in graph.nodes:
        if node.name in CHOOSES and node.inputs and node.inputs[-1].node >= 0:
            readers = consumers[node.inputs[-1].node]
            pools = [r for r in readers if graph.nodes[r].name in _POOLS]
            if pools and all(labels[r] for r in pools):
                found.add(node.index)
    return found


def _label(
    node: Node, pins: Pins, labels: Sequence[bool], chooses_alike: bool
) -> Label:
    """Returns how a node is emitted, given which results are half."""
    index = node.index
    category = pins.categories[index]
    if pins.reads_half(index):
        return Label.HALF if labels[index] else Label.WIDENED
    if index in pins.reduced:
        return Label.HALF
    sources = [v.node >= 0 and labels[v.node] for v in node.inputs]
    if index in pins.sinks:
        exact = bool(sources) and all(sources) and pins.moves_exactly(node)
        return Label.HALF if exact else Label.FLOAT32
    if not labels[index]:
        return Label.FLOAT32
    steps = node.name in table.SHARP  # `round`: not the same of a rounded operand
    # Half keys would make ties, and other indices.
    steps |= node.name in SORTS and not all(sources)
    # Nor is the largest of a window another one than in the forward pass.
    steps |= node.name in CHOOSES and not (sources[-1] or chooses_alike)
    # A sum beside the products is to find it as it was before it is rounded.
    steps |= node.name == "neg" and pins.whole_step and not all(sources)
    size = node.size
    # Not state, nor an exact value: a bias alone is rounded to be added, as by hand.
    large = [v for v in node.inputs if v.size == size]
    in_half = all(v.node >= 0 and labels[v.node] for v in large)
    native = (category is Category.CLEAR and not steps) or (
        category is Category.INFER
        and index not in pins.exact
        and (
            (all(sources) and index not in pins.lossy)
            or (not pins.whole_step and pins.upstream[index] < 0 and in_half)
        )
    )
    return Label.HALF if native and not _is_wide(node, pins) else Label.ROUNDED


def _saturates(node: Node, pins: Pins) -> bool:
    """Whether rounding a result never makes an infinity of a finite number.

    A mask of -1e9 may come as data: a sum with it saturates. A bias does not, nor does
    a factor, where an infinity must stay visible.
    """
    if node.name not in ("add", "sub") or node.index in pins.factors:
        return False
    ranks = [origins.argument_rank(v, pins.moved, pins.trained) for v in node.inputs]
    return max(ranks, default=-1) > 1


def _is_wide(node: Node, pins: Pins) -> bool:
    """Whether a node computes in float32 although its result is rounded to half."""
    if _saturates(node, pins):
        return True
    if (
        node.name in table.ACCUMULATES
        and pins.categories[node.index] is not Category.CLEAR
        and not (node.name == "scatter-add" and node.disjoint)
    ):
        return True
    if node.name in _SPREADS and not pins.whole_step:
        return True
    # What reads a 0-d value: those are never half.
    return node.name not in JOINTS and any(
        not v.aval.shape and v.constant is None for v in node.inputs
    )
