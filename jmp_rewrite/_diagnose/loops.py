"""How loops run with shadows.

The first iterations run equation by equation. What a longer loop has left is one loop
that is compiled, whose carry holds values, shadows and what was counted, so that memory
does not grow with its length.
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
from jmp_rewrite._diagnose.pair import Pair
from jmp_rewrite._diagnose.rows import Frame
from jmp_rewrite._diagnose.shadow import Shadow
from jmp_rewrite._diagnose.states import (
    Carry,
    State,
    Traced,
    chosen,
    compiled,
    error_of,
    is_traced,
    types_of,
)
from jmp_rewrite._rules import held_jaxprs

# Once one of program and shadow has left a `while`, the other goes on for so many times
# as many iterations, and so many more: it may never leave.
_PATIENCE, _LEAST = 10, 1000
_MANY = 2**31


def scan(e: Shadow, eqn: Any, pairs: list[Pair]) -> list[Pair]:
    """Runs a `scan`, in the order in which it goes through its `xs`."""
    num_consts, num_carry = _compat.scan_split(eqn.params)
    first = num_consts + num_carry
    consts, xs = pairs[:num_consts], pairs[first:]
    carry = Carry(e, pairs[num_consts:first])

    def step(states: Sequence[State], slices: Sequence[Any]) -> Any:
        """Runs an iteration; returns what it hands on, and what it makes."""
        sliced = [p.like(*arrays) for p, arrays in zip(xs, slices, strict=True)]
        own = [*consts, *carry.enter(states), *sliced]
        outs = e.evaluate(eqn.params["jaxpr"], own)
        return carry.leave(outs[:num_carry]), outs[num_carry:]

    few = 0 < _iterations(eqn) <= e.few
    arrays = [p.arrays() for p in xs]
    run = _few if few and not is_traced((carry.start, arrays)) else _many
    states, stacked = run(e, eqn, step, carry.start, arrays)
    return [*carry.results(states), *stacked]


def _iterations(eqn: Any) -> int:
    """Returns how often what an equation holds runs, with the loops in it.

    How often a `while` runs nobody knows, and each time it is compiled anew.
    """
    if eqn.primitive.name == "while":
        return _MANY
    bodies = map(_compat.open_jaxpr, held_jaxprs(eqn))
    inside = [_iterations(e) for body in bodies for e in body.eqns if held_jaxprs(e)]
    length = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
    return length * max(inside, default=1)


def _few(
    e: Shadow,
    eqn: Any,
    step: Callable[..., Any],
    states: list[State],
    xs: list[Any],
) -> tuple[list[State], list[Pair]]:
    """Runs a short scan equation by equation."""
    frames: dict[int, Frame] = {}
    made: dict[int, list[Pair]] = {}
    for t in _order(eqn):
        slices = jax.tree.map(lambda x, t=t: _at(x, t), xs)
        with e.counting() as frames[t], e.inside(eqn):
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
    value, shadow = jnp.stack([p.value for p in pairs]), None
    if not all(p.is_same for p in pairs):
        shadow = jnp.stack([p.shadow for p in pairs])
    return pairs[-1].like(value, shadow, error)


def _many(
    e: Shadow,
    eqn: Any,
    step: Callable[..., Any],
    start: list[State],
    xs: list[Any],
) -> tuple[list[State], list[Pair]]:
    """Runs a scan as a loop that is compiled."""
    made: list[Pair] = []

    def traceable(states: list[State], slices: list[Any]) -> Any:
        states, made[:] = step(states, slices)
        return states, [(*p.arrays(), jnp.asarray(p.error)) for p in made]

    with e.inside(eqn):
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
        p.like(value, shadow, jnp.max(error, initial=0.0))
        for p, (value, shadow, error) in zip(made, ys, strict=True)
    ]
    return states, stacked


def _slice_type(x: Any) -> Any:
    """Returns the type of a row, which varies over a mesh as the array does."""
    return jax.typeof(x[0])


def while_(e: Shadow, eqn: Any, pairs: list[Pair]) -> list[Pair]:
    """Goes on until program and shadow have left; what has left stays as it is.

    A loop that waits for what half precision does not resolve never ends: after more
    iterations than `_goes_on` allows, what it holds counts as its result.
    """
    split = eqn.params["cond_nconsts"]
    first = split + eqn.params["body_nconsts"]
    tests, consts = pairs[:split], pairs[split:first]
    carry = Carry(e, pairs[first:])

    def goes_on(states: Sequence[State]) -> tuple[Any, Any]:
        own = [*tests, *carry.enter(states)]
        (test,) = e.evaluate(eqn.params["cond_jaxpr"], own)
        return jnp.asarray(test.value), jnp.asarray(test.shadow)

    def step(states: Sequence[State], on: tuple[Any, Any]) -> Any:
        """Runs an iteration; returns what it hands on, and who is still in the loop."""
        own = [*consts, *carry.enter(states)]
        outs = e.evaluate(eqn.params["body_jaxpr"], own)
        handed_on = zip(carry.leave(outs), states, strict=True)
        new = [chosen(on, n, o) for n, o in handed_on]
        after = goes_on(new)
        return new, (on[0] & after[0], on[1] & after[1])

    with e.inside(eqn), e.muted():
        on = goes_on(carry.start)
    times = tuple(jnp.int32(0) for o in on)
    state = _first_rounds(e, eqn, step, (times, carry.start, on))
    if is_traced(state) or any(_any(state[2])):
        state = _other_rounds(e, eqn, step, state)
    times, states, on = state
    if not is_traced(state) and on[0].any() and not on[1].any():
        e.endless.append((eqn, int(times[0]), int(times[1])))
    row = e.add("branches", [], dtype="int32")
    e.count(row, Measured(times[:1], times[1:]), [])
    return [p.like(p.value, p.shadow, error_of(p)) for p in carry.results(states)]


def _first_rounds(e: Shadow, eqn: Any, step: Callable[..., Any], state: Any) -> Any:
    """Runs the first iterations of a `while` equation by equation.

    The state is (iterations of program and shadow, carries, whether they go on).
    """
    frames: dict[int, Frame] = {}
    while not is_traced(state) and max(state[0]) < e.few and any(_any(state[2])):
        times, states, on = state
        with e.counting() as frame, e.inside(eqn):
            states, after = step(states, on)
        if all(_any(on)):
            frames[int(times[0])] = frame
        state = _later(times, on), states, after
    e.frame.add_iterations(frames)
    return state


def _other_rounds(e: Shadow, eqn: Any, step: Callable[..., Any], state: Any) -> Any:
    """Runs the other iterations of a `while` as a loop that is compiled."""
    with e.inside(eqn):
        traced = Traced(e, step, *types_of(state[1:]))

    def iteration(both: Any) -> Any:
        (times, states, on), counted = both
        (states, after), new = traced(states, on)
        merged = traced.merge(counted, new, times[0])
        is_counted = jnp.all(jnp.stack(_any(on)))
        counted = jax.tree.map(
            lambda m, c: jnp.where(is_counted, m, c), merged, counted
        )
        return (_later(times, on), states, after), counted

    loop = functools.partial(
        lax.while_loop, lambda both: _goes_on(both[0][0], both[0][2]), iteration
    )
    state, counted = compiled(loop, (state, traced.nothing(1)))
    traced.keep(counted)
    return state


def _goes_on(times: tuple[Any, Any], on: tuple[Any, Any]) -> Any:
    """Whether one of program and shadow is in the loop, and not far too long."""
    until = _LEAST + _PATIENCE * jnp.minimum(*times)
    own, other = _any(on)
    return (own & other) | ((own | other) & (jnp.maximum(*times) < until))


def _any(on: tuple[Any, Any]) -> tuple[Any, Any]:
    """Whether any of a batch is in the loop: the program's, the shadow's."""
    return on[0].any(), on[1].any()


def _later(times: tuple[Any, Any], on: tuple[Any, Any]) -> tuple[Any, Any]:
    """Counts an iteration for program and shadow, if they are still in the loop."""
    pairs = zip(times, _any(on), strict=True)
    own, other = (t + o.astype(np.int32) for t, o in pairs)
    return own, other
