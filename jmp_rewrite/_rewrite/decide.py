"""Decides in which precision every equation of a traced program runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp_rewrite import _collector, _compat
from jmp_rewrite._graph import (
    Place,
    Region,
    build,
    computed_once,
    live,
    matched,
    nodes,
    plain,
    report_unused,
    stops_gradients,
)
from jmp_rewrite._policy import Policy
from jmp_rewrite._precision import decide as _plan
from jmp_rewrite._precision import is_whole_step
from jmp_rewrite._precision import parameters as _parameters
from jmp_rewrite._precision import pinning as _pin
from jmp_rewrite._rewrite.traced import Traced
from jmp_rewrite._rules import Category

_LOGGER = logging.getLogger("jmp_rewrite")


def decide_quietly(
    traced: Traced, policy: Policy
) -> tuple[nodes.Graph, _plan.Plan | None, list[str]]:
    """Decides for a traced function, and warns of nothing.

    Returns:
      The program, what is done with it (None under a float32 policy), and the patterns
      of `scopes` that matched nothing.
    """
    if policy.compute_dtype == np.float32:
        return build.build(traced.closed), None, []
    plan, used = _decide(
        traced.closed,
        policy,
        Place(),
        _parameters.argument_paths(traced.arguments),
        _parameters.result_paths(traced.results.paths),
    )
    # Inside derivative rules, which nobody has traced yet, there may be more scopes.
    known = [] if plan.graph.has_backward_rules else policy.scopes
    return plan.graph, plan, [p for p in known if p not in used]


def decide_traced(traced: Traced, policy: Policy) -> _plan.Plan:
    """Decides for a traced function; `scopes` know the paths of its parameters."""
    values = [*traced.arrays, *_compat.constants(traced.closed)]
    differentiated = any(map(_compat.is_being_differentiated, values))
    if not policy.scopes:
        return decide(traced.closed, policy, differentiated=differentiated)
    return decide(
        traced.closed,
        policy,
        _parameters.argument_paths(traced.arguments),
        _parameters.result_paths(traced.results.paths),
        differentiated,
    )


def decide(
    closed: Any,
    policy: Policy,
    arguments: Sequence[str | None] = (),
    results: Sequence[str] = (),
    differentiated: bool = False,
    placement: _plan.Placement = _plan.cheapest,
) -> _plan.Plan:
    """Decides for every equation of a program in which precision it runs.

    Args:
      closed: the program, a closed jaxpr.
      policy: what the user asks for.
      arguments: for each parameter the path in its argument, keys joined by "/"; None
        for optimizer state.
      results: for each result its path.
      differentiated: whether the program is being differentiated from outside.
      placement: chooses where values are rounded, among the places where they may be.
    """
    place = Place()
    plan, used = _decide(
        closed, policy, place, arguments, results, differentiated, placement
    )
    if not plan.graph.has_backward_rules:  # a scope may be inside one
        report_unused(policy, used)
    return plan


@_collector.held()
def _decide(
    closed: Any,
    policy: Policy,
    place: Place,
    arguments: Sequence[str | None] = (),
    results: Sequence[str] = (),
    differentiated: bool = False,
    placement: _plan.Placement = _plan.cheapest,
    merges: bool = True,
) -> tuple[_plan.Plan, frozenset[str]]:
    """Decides for a program that stands somewhere, a derivative rule in its scope."""
    table = policy.table()

    def is_opaque(eqn: Any) -> bool:
        return table.get(eqn.primitive.name) is Category.DENY

    # bfloat16 has float32's range: it rounds no positive number to 0.
    by_sign = policy.compute_dtype != np.float16
    by_path = bool(policy.scopes)

    def graph_of(closed: Any) -> nodes.Graph:
        dtype = policy.compute_dtype
        return build.build(closed, is_opaque, place, by_path, by_sign, dtype)

    closed = live(plain(closed))

    def unmerged() -> _plan.Plan:
        own = closed, policy, place, arguments, results
        return _decide(*own, placement=placement, merges=False)[0]

    graph = graph_of(closed)
    whole_step = not differentiated and is_whole_step(graph)
    if_differentiated = None
    # What is merged may have to be another program where it is differentiated.
    may_merge = _compat.allows_rule(closed.effects) or not stops_gradients(closed)
    if whole_step and merges and may_merge:
        merged = computed_once(closed, by_path)
        if merged is not closed:
            if stops_gradients(closed):
                if_differentiated = unmerged
            graph = graph_of(merged)
            whole_step = is_whole_step(graph)
    overrides, used = _parameters.overrides(graph, policy, arguments, results)
    pins = _pin.pin(graph, policy, overrides, whole_step)
    _log_opaque(_pin.left_alone(graph, pins))
    plan = _plan.make_plan(
        graph,
        pins,
        placement,
        # A rule is no whole step: what it computes again must round as it did before.
        lambda rule, place: _decide(
            rule,
            policy,
            place,
            differentiated=True,
            placement=_plan.products,
        )[0],
    )
    plan.region, plan.is_differentiated = Region(policy), differentiated
    plan.if_differentiated = if_differentiated
    return plan, used | matched(policy, (n.place.path for n in graph.nodes))


def _log_opaque(left_alone: Sequence[nodes.Opaque]) -> None:
    """Logs what was left alone; silence is the worst answer."""
    for eqn, place, why, where in left_alone:
        _LOGGER.info(
            "%s at %s%s is not rewritten: %s",
            eqn.primitive.name,
            where,
            f" (in {place.path})" if place.path else "",
            why,
        )
