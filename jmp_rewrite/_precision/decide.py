"""What is done with each node: pins and placement, put together as plain data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmp_rewrite._graph.nodes import Graph, Instance, Node
from jmp_rewrite._graph.scopes import Place
from jmp_rewrite._passes.again import computed_again, is_backward
from jmp_rewrite._passes.attention import FeatureSum, sums_over_features
from jmp_rewrite._passes.on_device import GPU, TPU_V5E
from jmp_rewrite._passes.parts import Parts, parts_apart
from jmp_rewrite._passes.sums import NO_SUMS, sums_behind_loops
from jmp_rewrite._passes.unstacked import Rest, computed_again_in_loops
from jmp_rewrite._passes.waiting import starts_late, waits
from jmp_rewrite._precision import origins
from jmp_rewrite._precision import placement as _place
from jmp_rewrite._precision.cost import (
    COSTLY,
    REDUCTIONS,
    REMADE_ON_GPU,
    moves_exactly,
    reads_half,
    storage,
)
from jmp_rewrite._precision.pins import NO_PRODUCT, Pins, bare
from jmp_rewrite._rules import table
from jmp_rewrite._rules.table import Category


class Action:
    """How a node is emitted: bits of plain integers, which are read for each equation.

    Attributes:
      HALF: its operands and its results are half. Without it they are float32.
      WIDE: with HALF: it computes in float32, and its results are rounded once.
      EMITS_FULL: with HALF: a product of half operands whose result is float32.
      HALF_ON_GPU: with EMITS_FULL: a gradient that no product reads; one GPU rounds it.
      SATURATES: with WIDE: rounding never makes an infinity of a finite number.
      ARGUMENT: its results hold nothing but an argument's values, so that rounding
        them saturates as well.
      HELD: with WIDE: something reads the rounded result in float32, and has to read
        that one.
      EXACT_ON_GPU: with HELD: there XLA computes it again where it is read in float32,
        so that what reads it takes the value that was not rounded.
      EXACT_ON_CPU: with HELD: there what was not rounded is read in its place, but for
        what a backward pass reads of a forward pass.
      AGAIN_ON_GPU: there a backward pass computes its results again to read them in
        float32.
      AGAIN_ON_V5E: on a TPU v5e a backward pass computes its results again.
      CHAIN: it lies between one of these and what is stored, or is one.
      ANCHOR: it is what is stored, and read behind a barrier.
      DIVIDES: a backward pass computes what is divided here again from the quotient, on
        GPUs.
      WAITS: a part of a cotangent, which a GPU writes when it is complete.
      STARTS_LATE: a sum whose zeros a GPU fills when its terms are there.
      SETTLES: it is the maximum of a product's half result, whose cast stays before it.
    """

    FULL = 0
    HALF = 1
    WIDE = 2
    EMITS_FULL = 4
    SATURATES = 8
    ARGUMENT = 16
    HELD = 32
    EXACT_ON_GPU = 64
    AGAIN_ON_GPU = 128
    AGAIN_ON_V5E = 256
    CHAIN = 512
    ANCHOR = 1024
    SETTLES = 2048
    HALF_ON_GPU = 4096
    DIVIDES = 8192
    WAITS = 16384
    STARTS_LATE = 32768
    EXACT_ON_CPU = 65536


_JOINTS = frozenset({"carry_in", "carry_out", "join"})


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


# The results of these are elements of their operands.
_PICKS = frozenset(
    {
        "broadcast_in_dim",
        "clamp",
        "cummax",
        "cummin",
        "expand_dims",
        "max",
        "min",
        "pmax",
        "pmin",
        "reduce_max",
        "reduce_min",
        "reduce_window_max",
        "reduce_window_min",
        "reshape",
        "select_n",
        "sort",
        "squeeze",
        "stack_out",
        "stop_gradient",
        "transpose",
    }
)


# These ask which elements are the same.
_COMPARES = frozenset({"eq", "ne"})


# These hold a jaxpr that takes float32 scalars.
_TYPED = frozenset({"scatter-max", "scatter-min"})


@dataclasses.dataclass(eq=False)
class Plan:
    """A program and what is done with it.

    Attributes:
      graph: the program.
      pins: what numerics said.
      half: the compute dtype.
      actions: of each node.
      shared: whether a value is cast once for all its readers. True for a whole step,
        which holds its own backward pass; before differentiation each reader casts for
        itself, so that its cotangents are added up in float32.
      nested: makes the plan of a program that is only known later: a derivative rule.
      rests: what is left of a scan's body, if that is not all of it.
      feature_sums: use of a jaxpr -> equation index -> how a TPU takes this sum.
      parts: use of a jaxpr -> what is taken apart or joined otherwise.
    """

    graph: Graph
    pins: Pins
    half: np.dtype
    actions: list[int]
    shared: bool
    nested: Callable[[Any, Place], Plan]
    rests: dict[Instance, Rest] = dataclasses.field(default_factory=dict)
    feature_sums: dict[Instance, dict[int, FeatureSum]] = dataclasses.field(
        default_factory=dict
    )
    parts: dict[Instance, Parts] = dataclasses.field(default_factory=dict)

    @property
    def rewrites(self) -> bool:
        """Whether anything is half at all."""
        return any(a & Action.HALF for a in self.actions)

    @functools.cached_property
    def computes_again(self) -> bool:
        """Whether a backward pass computes anything again."""
        return any(a & (Action.ANCHOR | Action.DIVIDES) for a in self.actions)


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
        labels = [a or b for a, b in zip(labels, native, strict=True)]
    return [x and n not in pins.emits_full for n, x in enumerate(labels)]


def propagation(graph: Graph, pins: Pins) -> list[bool]:
    """TensorFlow's propagation, less what buys nothing."""
    seen = bare(graph, pins)
    labels = _place.propagate(seen)
    for node in pins.forced:
        if seen.categories[node] is Category.ALLOW:
            labels[node] = True
    wide = frozenset(
        n.index for n in graph.nodes if _width(n, graph, pins) & Action.WIDE
    )
    returned = frozenset(v.node for v in graph.results)
    return _place.settle(seen, labels, pins.emits_full, wide, returned, pins.sinks)


def products(graph: Graph, pins: Pins) -> list[bool]:
    """Matrix products alone.

    For the rules of custom derivatives. A backward rule may compute the forward pass
    again, as a program of its own; where both round the same values, whatever else the
    programs hold, a solver accepts the same steps in both.
    """
    return [reads_half(n, pins) for n in range(len(graph.nodes))]


def make_plan(
    graph: Graph,
    pins: Pins,
    half: np.dtype,
    placement: Placement,
    nested: Callable[[Any, Place], Plan],
) -> Plan:
    """Places what the pins leave free and says what to do with each node."""
    labels = placement(graph, pins)
    if pins.whole_step and placement is not propagation:
        _follow_exactly(graph, pins, labels)
    _stack_alike(graph, pins, labels)
    _compare_alike(graph, labels)
    actions = [_action(n, graph, pins, half, labels) for n in graph.nodes]
    for node in _read_in_both(graph, pins, actions):
        actions[node] |= Action.HELD
        if not _is_read_in_float32(node, graph, pins, actions):
            continue
        if _is_exact_on_cpus(node, graph):
            actions[node] |= Action.EXACT_ON_CPU
        if pins.whole_step and graph.nodes[node].name in REMADE_ON_GPU:
            actions[node] |= Action.EXACT_ON_GPU
    if pins.whole_step and half != np.float16:  # its sums may be too large for it
        for node in _last_gradients(graph, pins):
            actions[node] |= Action.HALF_ON_GPU
    if pins.whole_step and placement is cheapest:
        _compute_again(graph, pins, actions)
        _settle_maxima(graph, pins, actions)
        halves = [_is_half(a) for a in actions]
        for node in waits(graph, pins, halves):
            actions[node] |= Action.WAITS
        for node in starts_late(graph, pins, halves):
            actions[node] |= Action.STARTS_LATE
    plan = Plan(graph, pins, half, actions, pins.whole_step, nested)
    if pins.whole_step and placement is cheapest:
        plan.rests = _rests(graph, pins, actions)
        plan.feature_sums = sums_over_features(graph, pins, halves)
        plan.parts = parts_apart(graph)
    return plan


def _compute_again(graph: Graph, pins: Pins, actions: list[int]) -> None:
    """Adds what the backward pass computes again."""
    again = computed_again(graph, pins, [_is_half(a) for a in actions])
    for node, devices in again.devices.items():
        actions[node] |= Action.AGAIN_ON_GPU if GPU in devices else 0
        actions[node] |= Action.AGAIN_ON_V5E if TPU_V5E in devices else 0
    for node in again.chain:
        actions[node] |= Action.CHAIN
    for node in again.anchors:
        actions[node] |= Action.ANCHOR
    for numerator, quotient in again.quotients.items():
        if actions[numerator] & Action.HELD:
            if not _is_read_in_float32(numerator, graph, pins, actions):
                continue
            actions[numerator] |= Action.EXACT_ON_GPU
        actions[quotient] |= Action.DIVIDES


def _rests(graph: Graph, pins: Pins, actions: Sequence[int]) -> dict[Instance, Rest]:
    """Returns what is left of the bodies of scans."""
    sums = sums_behind_loops(graph, pins, [_is_half(a) for a in actions])
    halves = [bool(a & Action.HALF) for a in actions]
    again = computed_again_in_loops(graph, pins, halves, sums)
    return {
        body: Rest(
            sums.get(body, NO_SUMS),
            again.left_out.get(body, {}),
            again.computed.get(body, {}),
        )
        for body in {*sums, *again.left_out, *again.computed}
    }


def _settle_maxima(graph: Graph, pins: Pins, actions: list[int]) -> None:
    """Marks the maxima that a softmax takes of a product's half result."""
    for node in graph.nodes:
        if node.name == "reduce_max" and _reads_full(actions[node.index]):
            (source,) = [v.node for v in node.inputs] or [-1]
            if source >= 0 and reads_half(source, pins) and _is_half(actions[source]):
                actions[node.index] |= Action.SETTLES


def _is_half(action: int) -> bool:
    """Tells whether a node that is emitted so has half results."""
    return bool(action & Action.HALF) and not action & Action.EMITS_FULL


def _follow_exactly(graph: Graph, pins: Pins, labels: list[bool]) -> None:
    """Moves half values in half, whoever reads them: that is exact.

    A loss picks a label's logit; cast first, all logits would be written in float32.
    """
    for node in graph.nodes:
        index = node.index
        if labels[index] or node.name in _JOINTS or node.name in REDUCTIONS:
            continue
        if not (node.avals and node.inputs):
            continue
        asked = pins.full[index] not in (None, NO_PRODUCT) and pins.upstream[index] < 0
        if not asked and moves_exactly(node, pins):
            labels[index] = all(v.node >= 0 and labels[v.node] for v in node.inputs)


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
    """
    stack = [n.index for n in graph.nodes if n.name in _COMPARES]
    compared: set[int] = set()
    while stack:
        for value in graph.nodes[stack.pop()].inputs:
            source = value.node
            if source not in compared and source >= 0:
                if graph.nodes[source].name in _PICKS:
                    compared.add(source)
                    stack.append(source)
    for index in sorted(compared):
        picked = [v for v in graph.nodes[index].inputs if v.made_of_data]
        labels[index] &= all(v.node >= 0 and labels[v.node] for v in picked)


def _action(
    node: Node, graph: Graph, pins: Pins, half: np.dtype, labels: Sequence[bool]
) -> int:
    """Returns how a node is emitted, given which results are half."""
    index = node.index
    category = pins.categories[index]
    action = Action.FULL
    if reads_half(index, pins):
        return action | Action.HALF | (0 if labels[index] else Action.EMITS_FULL)
    sources = [v.node >= 0 and labels[v.node] for v in node.inputs]
    if index in pins.sinks:
        exact = bool(sources) and all(sources) and moves_exactly(node, pins)
        return action | (Action.HALF if exact else Action.FULL)
    if not labels[index]:
        return action
    native = category is Category.CLEAR or (
        category is Category.INFER
        and (
            (all(sources) and index not in pins.lossy)
            or (not pins.whole_step and pins.upstream[index] < 0)
        )
    )
    width = _width(node, graph, pins)
    return action | Action.HALF | (width if native else width | Action.WIDE)


def _last_gradients(graph: Graph, pins: Pins) -> set[int]:
    """Returns the products that make gradients of parameters: no product reads them.

    What a solver's backward pass computes again of its forward pass, and the cotangents
    of its states, lead to the products of its next step: rounded, a neural ODE's
    gradients were off by 10.6 epsilons in place of 0.8.
    """
    products = [n.index for n in graph.nodes if reads_half(n.index, pins)]
    reads = graph.predecessors()
    leads = origins.leads_to_product(products, reads, lambda n: False)
    return {n for n in products if n not in leads and is_backward(graph.nodes[n])}


def _read_in_both(graph: Graph, pins: Pins, actions: Sequence[int]) -> list[int]:
    """Returns the rounded results that something reads in float32.

    Where they are moved first, in half, as well: XLA moves the rounding with them.
    """
    consumers = graph.consumers()
    in_float32 = {v.node for v in graph.results}
    for node in reversed(graph.nodes):
        if any(
            _reads_full(actions[c])
            or (c in in_float32 and moves_exactly(graph.nodes[c], pins))
            for c in consumers[node.index]
        ):
            in_float32.add(node.index)
    return [n for n, a in enumerate(actions) if a & Action.WIDE and n in in_float32]


def _reads_full(action: int) -> bool:
    return not action & Action.HALF or bool(action & Action.WIDE)


def _is_read_in_float32(
    node: int, graph: Graph, pins: Pins, actions: Sequence[int]
) -> bool:
    """Tells whether nothing but products reads the rounded value as it is.

    Where the exact one is read in its place, a maximum that is picked from the rounded
    one would equal none of what it is compared with.
    """
    readers = graph.consumers()[node]
    return all(reads_half(r, pins) or _reads_full(actions[r]) for r in readers)


def _is_exact_on_cpus(node: int, graph: Graph) -> bool:
    """Tells whether a CPU may read a rounded value as it was before.

    A costly function's result is a factor, of which half is enough; XLA:CPU would keep
    it in float32 for the backward pass. What is picked from has to be what is compared:
    if a forward pass takes the maximum of exact values, a backward pass that compares
    rounded ones with it finds none.
    """
    names = {graph.nodes[r].name for r in graph.consumers()[node]}
    is_compared = not names.isdisjoint(_PICKS | _COMPARES)
    return graph.nodes[node].name not in COSTLY and not is_compared


def _width(node: Node, graph: Graph, pins: Pins) -> int:
    """Tells what computes in float32 although its result is rounded to half."""
    if node.name in ("add", "sub"):
        # A mask of -1e9 may come as data: a sum with it saturates. A bias does not,
        # nor does a factor, where an infinity must stay visible.
        ranks = [origins.argument_rank(v, pins.moved) for v in node.inputs]
        if max(ranks, default=-1) > 1 and node.index not in pins.factors:
            return Action.WIDE | Action.SATURATES
    if (
        node.name in table.ACCUMULATES
        and pins.categories[node.index] is not Category.CLEAR
    ) or node.name in _TYPED:
        return Action.WIDE
    if node.name in _SPREADS and not pins.whole_step:
        return Action.WIDE
    if node.name not in (*_JOINTS, "stack_out") and any(
        not v.aval.shape and v.constant is None for v in node.inputs
    ):
        return Action.WIDE  # it reads a 0-d value, and those are never half
    return Action.FULL
