"""What must be half, what must be float32, and why; the rest is free.

Numerics alone decides here, by the principle of `docs/precision.md`. The float32 of
train state, and a `DENY`, nobody overrides but a rule of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend import core as jex

from jmp_rewrite._graph import Graph, Opaque, is_backward, reads_float32
from jmp_rewrite._policy import Policy
from jmp_rewrite._precision import (
    downstream,
    loops,
    origins,
    reduction,
    solvers,
    train_state,
    whole_step,
)
from jmp_rewrite._precision.differences import contrasted, differences
from jmp_rewrite._precision.few import few_of_a_loss
from jmp_rewrite._precision.local import KERNEL_EDGES, Local
from jmp_rewrite._precision.origins import leads_to_product, statistics
from jmp_rewrite._precision.phases import nonlinearities
from jmp_rewrite._precision.pins import (
    ADDED,
    DECAY,
    DIFFERENCE,
    EXACT,
    FEW,
    NO_PRODUCT,
    SOLVER,
    STATE,
    STATISTIC,
    SUMMED,
    Pins,
)
from jmp_rewrite._precision.products import exact_products, first_layers
from jmp_rewrite._precision.shares import summed_along
from jmp_rewrite._precision.sharp import read_sharply
from jmp_rewrite._precision.signs import nonnegative
from jmp_rewrite._precision.sums import summed_gradients, sums_with_exact
from jmp_rewrite._rules import LOGARITHMS, Category, table
from jmp_rewrite._source import where

ALLOW, INFER, DENY, CLEAR = Category


def pin(
    graph: Graph,
    policy: Policy,
    overrides: Mapping[int, tuple[str, str]] = MappingProxyType({}),
    is_whole_step: bool = False,
) -> Pins:
    """Pins the nodes of a graph.

    Args:
      graph: the program.
      policy: what the user asks for; its compute dtype is half.
      overrides: node -> (pattern, "float32" or "half") for what `scopes` found through
        the paths of parameters.
      is_whole_step: whether the program is a whole step, which nobody differentiates.
    """
    local = Local(policy, overrides)
    size = len(graph.nodes)
    half = policy.compute_dtype
    pins = Pins([None] * size, [None] * size, [-1] * size, set(), half)
    for node in graph.nodes:
        category, reason = local.judge(node, pins.forced)
        pins.categories[node.index] = category
        pins.full[node.index] = reason
    pins.whole_step = is_whole_step
    _pin_products(graph, pins)
    if policy.compute_dtype == np.float16:
        local.out_of_range |= downstream.unknown_epsilons(graph, pins)
    downstream.spread(graph, pins, local.out_of_range)
    pins.rounds_after = downstream.rounds_after(graph, pins, policy)
    pins.lossy = downstream.lossy(graph, policy.compute_dtype)
    pins.out_of_range = frozenset(local.out_of_range)
    _pin_values(graph, pins, policy)
    pins.moved = origins.moved_arguments(
        graph, pins.categories, pins.out_of_range, pins.trained
    )
    _pin_stacks(graph, pins)
    return pins


def _pin_products(graph: Graph, pins: Pins) -> None:
    """Pins the matrix multiplications that are not worth half operands."""
    products = (n for n in pins.products() if graph.nodes[n].name not in KERNEL_EDGES)
    free = {n for n in products if n not in pins.forced}
    for node, why in exact_products(graph, pins.categories, free).items():
        pins.full[node] = why


def _pin_values(graph: Graph, pins: Pins, policy: Policy) -> None:
    """Pins what is no activation or cotangent on its way to a matrix multiplication."""
    products = pins.products()
    made = origins.made_by(products, graph)
    made |= {n.index for n in graph.nodes if is_backward(n)}
    lookups = origins.tied_lookups(graph, products, made)
    lookups |= origins.lookups(graph, made) & pins.forced
    made |= origins.made_by(lookups, graph)
    streams = loops.residual_streams(graph, pins.categories)
    state = train_state.train_state(graph, pins.categories, products, made, streams)
    blame = {n: n for n in state if graph.nodes[n].eqn is not None}
    _pin_all(pins, dict.fromkeys(state, STATE), blame)
    _full_carries(graph, pins, streams)
    solved: set[int] = set()
    layers: set[int] = set()
    if pins.whole_step:
        layers = first_layers(graph, pins.full) & origins.followed(graph, products)
        layers -= state
        made |= origins.made_by(layers, graph)
        pins.rounds_after |= layers
        pins.trained = origins.trained_arguments(graph, state)
        solved = solvers.inside_solvers(graph, products, state)
        _pin_all(pins, dict.fromkeys(solved - products, SOLVER))
        solved |= solvers.equal_products(graph, products, solved)
        ours = whole_step.optimizer_products(graph, pins.categories, state)
        _pin_all(pins, dict.fromkeys(ours, "full: a product of the optimizer"))
        products = pins.products()
    small = statistics(graph, pins.categories)
    _pin_read_unrounded(graph, pins, products, layers, made, small)
    decays = loops.decays(graph, products, made, streams)
    _pin_all(pins, dict.fromkeys(decays, DECAY), decays)
    pins.decays = frozenset(decays)
    added = sums_with_exact(graph, products, made, state)
    _pin_all(pins, dict.fromkeys(added, ADDED))
    ends = state | {n.index for n in graph.nodes if origins.is_number(n)}
    useful = leads_to_product(products, graph.predecessors(), ends.__contains__)
    useful |= loops.cotangents_into_loops(graph, products, state)
    sums = summed_gradients(graph, made, useful, products)
    cotangents = {n: sums[n] for n in sums.keys() - products}
    _pin_all(pins, dict.fromkeys(cotangents, SUMMED), cotangents)
    pins.rounds_after = (pins.rounds_after & useful) - state
    # A whole step reads its tables unrounded anyway: their rows are as cheap.
    rounded = made - lookups if pins.whole_step else made
    _pin_the_rest(graph, pins, products, rounded, useful, small)
    pins.rounds_after |= _exact_counts(graph, pins, useful)
    few = few_of_a_loss(graph, pins, products)
    _pin_all(pins, dict.fromkeys(few - products, FEW))
    pins.read_by = {
        **pins.read_by,
        **dict.fromkeys((few & products) - pins.forced, FEW),
    }
    pins.factors = _factors(graph, pins, products)
    pins.exact = frozenset(range(len(graph.nodes))) - made
    if not pins.whole_step:
        pins.lookups = frozenset(n for n in lookups if pins.may_round(n))
    if pins.whole_step and policy.reduce_dtype == pins.half:
        last = products - useful - pins.read_by.keys()
        pins.reduced = reduction.summed_in_half(
            graph, last, useful, pins.full, pins.half
        )
    full = products - useful | (products & solved) | pins.read_by.keys()
    pins.emits_full = frozenset(full) - pins.reduced


def _pin_all(
    pins: Pins,
    reasons: Mapping[int, str],
    blame: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Pins nodes for a reason, unless a scope of the user's makes them half.

    Args:
      pins: is changed.
      reasons: nodes -> the reason, which yields to one that holds already.
      blame: nodes -> the node whose source line belongs into that reason.
    """
    for index, why in reasons.items():
        free = pins.full[index] is None and index not in pins.forced
        if free or index in pins.rounds_after:
            pins.full[index], pins.upstream[index] = why, -1
            if index in blame:
                pins.blame[index] = blame[index]
    pins.rounds_after -= reasons.keys()


def _pin_read_unrounded(
    graph: Graph,
    pins: Pins,
    products: set[int],
    layers: set[int],
    made: set[int],
    small: set[int],
) -> None:
    """Pins what is read by code that multiplies an error."""
    makers = products | layers
    layered = nonlinearities(graph, makers, made)
    ends = origins.gradients(graph, products)
    sharp = read_sharply(graph, makers, pins.out_of_range, layered, ends)
    contrasts = contrasted(graph)
    positive = nonnegative(graph)
    shares = summed_along(graph, positive)
    found = differences(
        graph, products, made, small, ends, contrasts.keys(), shares, positive
    )
    pins.shares = frozenset().union(*shares.values())
    pins.contrasts = frozenset(products & set().union(*contrasts.values()))
    held = {n: r for n, r in found.items() if n not in sharp}
    blame = {**sharp, **held}
    logs = {n: r for n, r in held.items() if graph.nodes[r].name in LOGARITHMS}
    reasons: dict[int, str] = dict.fromkeys(held, DIFFERENCE)
    for node, reader in (*sharp.items(), *logs.items()):
        reasons[node] = f"full: read unrounded by {graph.nodes[reader].name}"
    _pin_all(pins, {n: r for n, r in reasons.items() if n not in products}, blame)
    pins.read_by = {n: reasons[n] for n in reasons.keys() & (products - pins.forced)}
    pins.blame |= {n: blame[n] for n in pins.read_by if pins.full[n] is None}


def _pin_the_rest(
    graph: Graph,
    pins: Pins,
    products: set[int],
    made: set[int],
    useful: set[int],
    small: set[int],
) -> None:
    """Pins exact values, and what leads to no matrix multiplication."""
    recurrent = loops.recurrent_activations(graph, pins.categories)
    # Operands of matrix multiplications are rounded in any case.
    alone = origins.read_alone(
        graph,
        products.__contains__,
        lambda n: pins.categories[n] is CLEAR and n not in pins.lossy,
    )
    sinks = set()
    for node in graph.nodes:
        index = node.index
        if index in products:
            continue
        if index in small and index in useful:
            _pin_all(pins, {index: STATISTIC})
        if pins.full[index] is not None:
            if index not in made and index not in alone:
                pins.rounds_after -= {index}
            continue
        if not node.avals and pins.categories[index] is CLEAR:
            sinks.add(index)
        elif index not in useful:
            pins.full[index] = NO_PRODUCT
            if pins.whole_step and index in recurrent and index in made:
                pins.rounds_after |= {index}
        elif index not in made and index not in alone and index not in pins.forced:
            pins.full[index] = EXACT
    pins.sinks = frozenset(sinks)


def _exact_counts(graph: Graph, pins: Pins, useful: set[int]) -> set[int]:
    """Returns the sums that are exact in half, and on their way to a product."""
    why = f"full: {table.reason('reduce_sum', DENY)}"
    found = origins.counts(graph, pins.half) & useful
    return {n for n in found if pins.full[n] == why and graph.nodes[n].size > 1}


def _factors(graph: Graph, pins: Pins, products: set[int]) -> frozenset[int]:
    """Returns the nodes that matrix multiplications read, or what moves them there.

    They are never saturated: an infinity there must stay visible.
    """

    def stops(node: int) -> bool:
        return pins.categories[node] is not CLEAR

    reads = graph.predecessors()
    moved = leads_to_product(products, reads, stops)
    return frozenset(s for n in (*products, *moved) for s in reads[n])


def _pin_stacks(graph: Graph, pins: Pins) -> None:
    """Lets a stack be what it is a stack of.

    A stack of float32 values may be half in a whole step: the backward pass reads it.
    """
    for node in graph.nodes:
        if node.name != "stack_out":
            continue
        index, source = node.index, node.inputs[0].node
        if pins.may_round(source):
            if pins.full[index] == NO_PRODUCT:
                pins.full[index] = None
            elif pins.whole_step and pins.upstream[index] >= 0:
                pins.rounds_after |= {index}
        elif not pins.whole_step and pins.full[index] is None:
            pins.full[index] = pins.full[source]
            pins.upstream[index] = pins.upstream[source]


def _full_carries(graph: Graph, pins: Pins, streams: set[int]) -> None:
    """Pins the carries that an iteration computes in float32.

    Rounding what it hands on would add an error in every iteration; the copy that a
    product reads is rounded anyway. The residual stream of a scan over layers is
    rounded in every layer, as it is without the scan.
    """
    carries = [pair for loop in graph.loops for pair in loop.carries]
    changed = True
    while changed:
        changed = False
        for received, handed_on in carries:
            moved = origins.moves(graph, handed_on)
            origin = moved[-1]
            if received in streams and origin in pins.rounds_after:
                continue
            if pins.may_round(received) and pins.full[origin] is not None:
                pins.full[received] = pins.full[handed_on] = STATE
                pins.rounds_after -= {received, *moved}
                changed = True


def left_alone(graph: Graph, pins: Pins) -> list[Opaque]:
    """Returns the equations left alone: kernels, callbacks, unknown ones."""
    named = {id(o.eqn) for o in graph.opaque}
    others = [
        Opaque(node.eqn, node.place, why, where(node.eqn))
        for node, category in zip(graph.nodes, pins.categories, strict=True)
        if (category is None or category is DENY)
        and not node.place.rewritten
        and id(node.eqn) not in named
        and (why := _why_alone(node.eqn, category))
    ]
    return [*graph.opaque, *others]


def _why_alone(eqn: Any, category: Category | None) -> str | None:
    if category is None and _holds_program(eqn):
        return "no rule for it, and it holds a program or a function"
    why = table.opaque_reason(eqn.primitive.name) if category is DENY else None
    return why if why and reads_float32(eqn) else None


def _holds_program(eqn: Any) -> bool:
    held = any(True for _ in jex.jaxprs_in_params(eqn.params))
    return held or any(callable(p) for p in eqn.params.values())
