"""How loops run in lockstep.

The first iterations run equation by equation. What a longer loop has left is one loop
that is compiled, whose carry holds the values of both programs and what was counted, so
that memory does not grow with its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.distance import Measured
from jmp_rewrite._diagnose.lockstep import Lockstep
from jmp_rewrite._diagnose.lockstep_rows import Frame
from jmp_rewrite._diagnose.lockstep_states import (
    Carry,
    State,
    Traced,
    cast_outside,
    chosen,
    compiled,
    constants,
    error_of,
    is_traced,
    joint,
    passed,
    types_of,
)
from jmp_rewrite._diagnose.pair import Pair, pair_of
from jmp_rewrite._emit.emit import Cell
from jmp_rewrite._graph.nodes import Inner

# A scan of so many iterations runs equation by equation. Compiling one with all that is
# counted took as long as 100 iterations of it (an Adam step of 150 equations, 2 cores).
_FEW = 64


def scan(e: Lockstep, eqn: Any, inner: Inner, pairs: list[Pair]) -> list[Cell]:
    """Runs a `scan`, in the order in which it goes through its `xs`."""
    (body,) = inner.bodies
    num_consts, num_carry = _compat.scan_split(eqn.params)
    first = num_consts + num_carry
    demands = e.demand.of(body)
    consts = cast_outside(e, pairs[:num_consts], demands)
    stacks = zip(pairs[first:], demands[first:], strict=True)
    xs = [passed(e, p, d) for p, d in stacks]
    carry = Carry(e, inner, eqn.outvars[:num_carry])
    start = carry.start(pairs[num_consts:first])
    avals = [v.aval for v in _compat.open_jaxpr(body.jaxpr).outvars[num_carry:]]

    def step(states: Sequence[State], slices: Sequence[Any]) -> Any:
        """Runs an iteration; returns what it hands on, and what it makes."""
        sliced = [p.like(*arrays) for p, arrays in zip(xs, slices, strict=True)]
        own = [*constants(body), *(c.copy() for c in consts)]
        outs = e.evaluate(body, [*own, *carry.enter(states), *sliced])
        e.at(eqn)
        made = [
            pair_of(c) if node is None else joint(e, c, node, aval)
            for c, node, aval in zip(outs[num_carry:], inner.stacks, avals, strict=True)
        ]
        return carry.leave(outs[:num_carry]), made

    few = 0 < eqn.params["length"] <= _FEW
    run = _few if few and not is_traced((start, [p.arrays() for p in xs])) else _many
    states, stacked = run(e, eqn, inner, step, start, [p.arrays() for p in xs])
    return [*carry.results(states), *stacked]


def _few(
    e: Lockstep,
    eqn: Any,
    inner: Inner,
    step: Callable[..., Any],
    states: list[State],
    xs: list[Any],
) -> tuple[list[State], list[Pair]]:
    """Runs a short scan equation by equation."""
    frames: dict[int, Frame] = {}
    made: dict[int, list[Pair]] = {}
    for t in _order(eqn):
        slices = jax.tree.map(lambda x, t=t: _at(x, t), xs)
        with e.counting() as frames[t], e.inside(eqn, inner.place):
            states, made[t] = step(states, slices)
    e.frame.add_iterations(frames)
    stacks = zip(*(made[t] for t in sorted(made)), strict=True)
    return states, [_stacked(pairs) for pairs in stacks]


def _order(eqn: Any) -> range:
    times = range(eqn.params["length"])
    return times[::-1] if eqn.params["reverse"] else times


def _at(x: Any, t: int) -> Any:
    return lax.dynamic_index_in_dim(x, t, keepdims=False)


def _stacked(pairs: Sequence[Pair]) -> Pair:
    """Stacks what the iterations made; what is the same stays the same."""
    error = functools.reduce(np.maximum, (p.error for p in pairs))
    value, reference = jnp.stack([p.value for p in pairs]), None
    if not all(p.is_same for p in pairs):
        reference = jnp.stack([p.reference for p in pairs])
    return pairs[-1].like(value, reference, error)


def _many(
    e: Lockstep,
    eqn: Any,
    inner: Inner,
    step: Callable[..., Any],
    start: list[State],
    xs: list[Any],
) -> tuple[list[State], list[Pair]]:
    """Runs a scan as a loop that is compiled."""
    made: list[Pair] = []

    def traceable(states: list[State], slices: list[Any]) -> Any:
        states, made[:] = step(states, slices)
        return states, [(*p.arrays(), jnp.asarray(p.error)) for p in made]

    with e.inside(eqn, inner.place):
        types = jax.tree.map(_slice_type, xs)
        traced = Traced(e, traceable, types_of(start), types)
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def iteration(state: Any, slices: Any) -> Any:
        t, states, counted = state
        (states, ys), new = traced(states, slices)
        place = length - 1 - t if reverse else t
        return (t + 1, states, traced.merge(counted, new, place)), ys

    first = (jnp.int32(0), start, traced.nothing(1))
    loop = functools.partial(lax.scan, iteration, length=length, reverse=reverse)
    (_, states, counted), ys = compiled(loop, first, xs)
    traced.keep(counted)
    stacked = [
        p.like(value, reference, jnp.max(error, initial=0.0))
        for p, (value, reference, error) in zip(made, ys, strict=True)
    ]
    return states, stacked


def _slice_type(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def while_(e: Lockstep, eqn: Any, inner: Inner, pairs: list[Pair]) -> list[Cell]:
    """Goes on until both programs have left; what has left stays as it is."""
    cond, body = inner.bodies
    split = eqn.params["cond_nconsts"]
    first = split + eqn.params["body_nconsts"]
    tests = cast_outside(e, pairs[:split], e.demand.of(cond))
    consts = cast_outside(e, pairs[split:first], e.demand.of(body))
    carry = Carry(e, inner, eqn.outvars)
    start = carry.start(pairs[first:])

    def goes_on(states: Sequence[State]) -> tuple[Any, Any]:
        own = [*constants(cond), *(c.copy() for c in tests)]
        (cell,) = e.evaluate(cond, [*own, *carry.enter(states)])
        test = pair_of(cell)
        return jnp.asarray(test.value), jnp.asarray(test.reference)

    def step(states: Sequence[State], on: tuple[Any, Any]) -> Any:
        """Runs an iteration; returns what it hands on, and who is still in the loop."""
        own = [*constants(body), *(c.copy() for c in consts)]
        outs = e.evaluate(body, [*own, *carry.enter(states)])
        e.at(eqn)
        handed_on = zip(carry.leave(outs), states, strict=True)
        new = [chosen(on, n, o) for n, o in handed_on]
        after = goes_on(new)
        return new, (on[0] & after[0], on[1] & after[1])

    with e.inside(eqn, inner.place), e.muted():
        on = goes_on(start)
    times = tuple(jnp.zeros_like(o, np.int32) for o in on)
    state = _first_rounds(e, eqn, inner, step, (times, start, on))
    if is_traced(state) or any(state[2]):
        state = _other_rounds(e, eqn, inner, step, state)
    times, states, _ = state
    row = e.add("branches", [], dtype="int32")
    e.count(row, Measured(times[:1], times[1:]), [])
    return [p.like(p.value, p.reference, error_of(p)) for p in carry.results(states)]


def _first_rounds(
    e: Lockstep, eqn: Any, inner: Inner, step: Callable[..., Any], state: Any
) -> Any:
    """Runs the first iterations of a `while` equation by equation.

    The state is (iterations of both programs, carries, whether they go on).
    """
    frames: dict[int, Frame] = {}
    while not is_traced(state) and len(frames) < _FEW and any(state[2]):
        times, states, on = state
        with e.counting() as frame, e.inside(eqn, inner.place):
            states, after = step(states, on)
        if all(on):
            frames[int(times[0])] = frame
        state = _later(times, on), states, after
    e.frame.add_iterations(frames)
    return state


def _other_rounds(
    e: Lockstep, eqn: Any, inner: Inner, step: Callable[..., Any], state: Any
) -> Any:
    """Runs the other iterations of a `while` as a loop that is compiled."""
    with e.inside(eqn, inner.place):
        traced = Traced(e, step, *types_of(state[1:]))

    def iteration(both: Any) -> Any:
        (times, states, on), counted = both
        (states, after), new = traced(states, on)
        merged = traced.merge(counted, new, times[0])
        is_counted = on[0] & on[1]
        counted = jax.tree.map(
            lambda m, c: jnp.where(is_counted, m, c), merged, counted
        )
        return (_later(times, on), states, after), counted

    loop = functools.partial(
        lax.while_loop, lambda both: both[0][2][0] | both[0][2][1], iteration
    )
    state, counted = compiled(loop, (state, traced.nothing(1)))
    traced.keep(counted)
    return state


def _later(times: tuple[Any, Any], on: tuple[Any, Any]) -> tuple[Any, Any]:
    """Counts an iteration for each program that is still in the loop."""
    own, other = (t + o.astype(np.int32) for t, o in zip(times, on, strict=True))
    return own, other
