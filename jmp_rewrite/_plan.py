"""What is done with each node: pins and placement, put together as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jmp_rewrite import _rules, _state
from jmp_rewrite._graph import Graph, Node
from jmp_rewrite._pin import Pins, bare
from jmp_rewrite._place import BareGraph, settle
from jmp_rewrite._rules import Category
from jmp_rewrite._scopes import Place


class Action:
    """How a node is emitted: bits of plain integers, which are read for each equation.

    Attributes:
      HALF: its operands and its results are half. Without it they are float32.
      WIDE: with HALF: it computes in float32, and its results are rounded once.
      EMITS_FULL: with HALF: a product of half operands whose result is float32.
      SATURATES: with WIDE: rounding never makes an infinity of a finite number.
      ARGUMENT: its results hold nothing but an argument's values, so that rounding
        them saturates as well.
    """

    FULL = 0
    HALF = 1
    WIDE = 2
    EMITS_FULL = 4
    SATURATES = 8
    ARGUMENT = 16


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
    """

    graph: Graph
    pins: Pins
    half: np.dtype
    actions: list[int]
    shared: bool
    nested: Callable[[Any, Place], Plan]

    @property
    def rewrites(self) -> bool:
        """Whether anything is half at all."""
        return any(a & Action.HALF for a in self.actions)


def make_plan(
    graph: Graph,
    pins: Pins,
    half: np.dtype,
    placement: Callable[[BareGraph], list[bool]],
    nested: Callable[[Any, Place], Plan],
) -> Plan:
    """Places what the pins leave free and says what to do with each node."""
    graph_seen = bare(graph, pins)
    labels = placement(graph_seen)
    for node in pins.forced:
        if graph_seen.categories[node] is Category.ALLOW:
            labels[node] = True
    wide = {n.index: _width(n, graph, pins) for n in graph.nodes}
    reads_full = frozenset(n for n, w in wide.items() if w & Action.WIDE)
    returned = frozenset(v.node for v in graph.results)
    labels = settle(
        graph_seen, labels, pins.emits_full, reads_full, returned, pins.sinks
    )
    actions = []
    for node, is_half in enumerate(labels):
        saturates = node in pins.moved and (
            half == np.float16 or node in pins.out_of_range
        )
        action = Action.ARGUMENT if saturates else Action.FULL
        if is_half:
            emits = node in pins.emits_full
            action |= Action.HALF | (Action.EMITS_FULL if emits else wide[node])
        actions.append(action)
    return Plan(graph, pins, half, actions, pins.whole_step, nested)


def _width(node: Node, graph: Graph, pins: Pins) -> int:
    """Tells what computes in float32 although its result is rounded to half."""
    if node.name in ("add", "sub"):
        # A mask of -1e9 may come as data: a sum with it saturates. A bias does not.
        ranks = [_state.argument_rank(v, pins.moved) for v in node.inputs]
        if max(ranks, default=-1) > 1:
            return Action.WIDE | Action.SATURATES
    if node.name in _rules.ACCUMULATES or node.name in _TYPED:
        return Action.WIDE
    if node.name in _SPREADS and not pins.whole_step:
        return Action.WIDE
    if node.name not in ("carry_in", "carry_out", "join") and any(
        not v.aval.shape and v.constant is None for v in node.inputs
    ):
        return Action.WIDE  # it reads a 0-d value, and those are never half
    return Action.FULL
