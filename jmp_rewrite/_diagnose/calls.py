"""How equations that hold jaxprs run with shadows: one function for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jmp_rewrite._diagnose.counts import joined
from jmp_rewrite._diagnose.distance import Measured
from jmp_rewrite._diagnose.loops import scan, while_
from jmp_rewrite._diagnose.pair import Pair
from jmp_rewrite._diagnose.shadow import Shadow
from jmp_rewrite._diagnose.states import (
    State,
    Traced,
    compiled,
    error_of,
    state_of,
    types_of,
    varying,
)
from jmp_rewrite._rules import CALLS

# Runs a branch: its number and its operands in, its results out.
Branch = Callable[[int, Sequence[Pair]], list[Pair]]


def call(e: Shadow, eqn: Any, pairs: list[Pair]) -> list[Pair]:
    """Runs a call in place, the body of a custom derivative too."""
    with e.inside(eqn):
        return e.evaluate(eqn.params[CALLS[eqn.primitive.name][1]], pairs)


def cond(e: Shadow, eqn: Any, pairs: list[Pair]) -> list[Pair]:
    """Runs the branch that is taken; or both, where program and shadow take two."""
    which, operands = pairs[0], pairs[1:]
    branches = eqn.params["branches"]
    arms = len(branches)
    own, other = (_clamped(i, arms) for i in (which.value, which.shadow))

    def branch(arm: int, pairs: Sequence[Pair]) -> list[Pair]:
        with e.inside(eqn):
            return e.evaluate(branches[arm], list(pairs))

    if not isinstance(own, int) or not isinstance(other, int):
        return _traced_cond(e, own, other, pairs, branch, arms)
    if own == other:
        return branch(own, operands)
    with e.muted():
        values, shadows = branch(own, operands), branch(other, operands)
    row = _count_branches(e, which, own, other, [p.row for p in operands])
    mixed = [
        Pair(v.value, s.shadow, row=row) for v, s in zip(values, shadows, strict=True)
    ]
    return [p.like(p.value, p.shadow, error_of(p)) for p in mixed]


def _clamped(index: Any, arms: int) -> Any:
    """Returns the number of a branch, as `lax.switch` reads it."""
    if isinstance(index, jax.core.Tracer):
        return jnp.clip(index.astype(np.int32), 0, arms - 1)
    return min(max(int(index), 0), arms - 1)


def _count_branches(
    e: Shadow, which: Pair, own: Any, other: Any, reads: Sequence[int]
) -> int:
    row = e.add("branches", [which.row, *reads], dtype="int32")
    numbers = [jnp.asarray(own, np.int32)], [jnp.asarray(other, np.int32)]
    e.count(row, Measured(*numbers), [which.error])
    return row


def _traced_cond(
    e: Shadow, own: Any, other: Any, pairs: list[Pair], branch: Branch, arms: int
) -> list[Pair]:
    """Runs a `cond` inside a compiled loop: nobody knows yet which branch is taken."""
    which, operands = pairs[0], pairs[1:]
    arrays = [(*p.arrays(), jnp.asarray(p.error)) for p in operands]
    made: list[int] = []

    def arm(number: int) -> Callable[..., Any]:
        def run(arrays: Any) -> list[State]:
            inside = zip(operands, arrays, strict=True)
            outs = branch(number, [p.like(*a) for p, a in inside])
            made.extend(p.row for p in outs)
            return [state_of(e, p) for p in outs]

        return run

    traced = [Traced(e, arm(n), types_of(arrays)) for n in range(arms)]
    nothing = [t.nothing() for t in traced]

    def taken(number: int) -> Callable[..., Any]:
        def run(arrays: Any) -> Any:
            states, new = traced[number](arrays)
            return states, [*nothing[:number], new, *nothing[number + 1 :]]

        return run

    same = own == other
    runs = [taken(n) for n in range(arms)]
    states, counted = lax.switch(own, runs, arrays)
    shadows = lax.cond(
        same,
        lambda _: [s[1] for s in states],
        lambda a: [s[1] for s in lax.switch(other, runs, a)[0]],
        arrays,
    )
    for one, new, empty in zip(traced, counted, nothing, strict=True):
        one.keep(jax.tree.map(lambda n, z: jnp.where(same, n, z), new, empty))
    row = _count_branches(e, which, own, other, made)
    return [
        Pair(value, shadow, jnp.where(same, error, jnp.float32(1.0)), row)
        for (value, _, error), shadow in zip(states, shadows, strict=True)
    ]


def shard_map(e: Shadow, eqn: Any, pairs: list[Pair]) -> list[Pair]:
    """Runs each shard with its shadow; adds up what was counted over the devices."""
    params = eqn.params
    names = tuple(params["newly_manual_axes"])
    checked = names if params["check_vma"] else ()
    made: list[Pair] = []
    rows: list[int] = []

    def local(arrays: Any, errors: Any) -> Any:
        shards = zip(pairs, arrays, errors, strict=True)
        inside = [p.like(a[0], a[1], error) for p, a, error in shards]
        with e.counting() as frame, e.inside(eqn, checked):
            made[:] = e.evaluate(params["jaxpr"], inside)
            own = [jnp.asarray(p.error) for p in made]
            counted = varying(e, (own, frame.arrays()))
        rows[:] = frame.rows
        values, shadows = [p.value for p in made], [p.shadow for p in made]
        return values, shadows, jax.tree.map(lambda x: x[None], counted)

    out_specs = list(params["out_specs"])
    mapped = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=(
            [
                (spec, None if p.is_same else spec)
                for spec, p in zip(params["in_specs"], pairs, strict=True)
            ],
            PartitionSpec(),
        ),
        out_specs=(out_specs, out_specs, PartitionSpec(names)),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    values, shadows, (errors, (counts, where, exponents)) = compiled(
        mapped, [p.arrays() for p in pairs], [jnp.asarray(p.error) for p in pairs]
    )
    e.frame.blocks.append((list(rows), *_over_devices(counts, where)))
    e.frame.exponents.append(exponents.sum(0))
    return [
        p.like(value, shadow, jnp.max(error))
        for p, value, shadow, error in zip(made, values, shadows, errors, strict=True)
    ]


def _over_devices(counts: Any, where: Any) -> tuple[Any, Any]:
    """Adds up f32[devices, n, 12] and i32[devices, n, depth]."""
    total = counts[0], where[0]
    for own in zip(counts[1:], where[1:], strict=True):
        total = joined(*total, *own, jnp)
    return total


HANDLERS: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(CALLS, call),
        "cond": cond,
        "scan": scan,
        "shard_map": shard_map,
        "while": while_,
    }
)
