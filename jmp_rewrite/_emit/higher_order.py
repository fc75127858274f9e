"""How equations that hold jaxprs are emitted: one function for each kind.

Each is given the emitter, the equation, what it holds, and its operands' cells, and
returns the cells of its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from jmp_rewrite import _compat
from jmp_rewrite._emit.demand import AS_FULL, AS_HALF, cast_again
from jmp_rewrite._emit.derivatives import custom_jvp, custom_vjp, custom_vmap
from jmp_rewrite._emit.emit import Cell, Emitter, Handler
from jmp_rewrite._graph import FLOAT32, Inner
from jmp_rewrite._rules import CALLS

# Calls that leave nothing behind but their equations.
_INLINED = frozenset({"call", "closed_call", "core_call", "eval_jaxpr"})


def call(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    (body,) = inner.bodies
    if eqn.primitive.name in _INLINED:
        consts = [Cell(c) for c in _compat.constants(body.jaxpr)]
        return e.evaluate(body, consts + cells)
    demands = e.demand.of(body)
    invars = _compat.open_jaxpr(body.jaxpr).invars
    if inner.joins:
        values = [
            e.to_joint(c, n, v.aval)
            for c, n, v in zip(cells, inner.joins, invars, strict=True)
        ]
    else:
        values = [e.passed(c, d) for c, d in zip(cells, demands, strict=True)]
        for i in cast_again(eqn, body):
            values[i] = cells[i].value
    closed = e.body(body, values, [v.aval for v in invars])
    jaxpr = _compat.like(body.jaxpr, closed)
    params = dict(eqn.params, **{CALLS[eqn.primitive.name][1]: jaxpr})
    return [Cell(x) for x in _compat.bind(eqn, values, params)]


def shard_map(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    (body,) = inner.bodies
    demands = e.demand.of(body)
    values = [e.passed(c, d) for c, d in zip(cells, demands, strict=True)]

    def local(*shards: Any) -> list[Any]:
        return [c.value for c in e.evaluate(body, [Cell(x) for x in shards])]

    params = eqn.params
    mapped = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return [Cell(x) for x in mapped(*values)]


def scan(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    (body,) = inner.bodies
    demands = e.demand.of(body)
    num_consts, num_carry = _compat.scan_split(eqn.params)
    first = num_consts + num_carry
    avals = [v.aval for v in _compat.open_jaxpr(body.jaxpr).invars]
    values: list[Any] = []
    halves: list[tuple[int, Any]] = []
    for i, (cell, demand) in enumerate(zip(cells, demands, strict=True)):
        if num_consts <= i < first:
            node = inner.carry_in[i - num_consts]
            values.append(e.to_joint(cell, node, avals[i]))
            continue
        # Slices are cast inside: a half copy of all layers' weights would live through
        # the whole step, and to cut a slice out of it is a copy of its own.
        is_slice = i >= first and cell.half is None
        values.append(cell.value if is_slice else e.passed(cell, demand))
        both = demand == AS_HALF | AS_FULL and e.plan.shared
        if i < num_consts and both and cell.value.dtype == FLOAT32:
            halves.append((i, e.read_half(cell)))
    types = [(i, jax.typeof(x)) for i, x in halves]
    joints = [*inner.carry_in, *inner.stacks]
    closed = e.body(body, values, avals, joints, types)
    consts = num_consts + len(halves)
    params = _compat.scan_params(eqn.params, closed, consts, num_carry)
    passed = [*(x for _, x in halves), *values]
    return [Cell(x) for x in _compat.bind(eqn, passed, params)]


def while_(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    cond, body = inner.bodies
    split = eqn.params["cond_nconsts"]
    first = split + eqn.params["body_nconsts"]
    avals = [v.aval for v in eqn.outvars]
    carried = [
        e.to_joint(c, n, a)
        for c, n, a in zip(cells[first:], inner.carry_in, avals, strict=True)
    ]
    values, jaxprs = [], []
    for use, own, joints in (
        (cond, cells[:split], None),
        (body, cells[split:first], inner.carry_in),
    ):
        demands = e.demand.of(use)[: len(own)]
        passed = [e.passed(c, d) for c, d in zip(own, demands, strict=True)]
        types = [v.aval for v in _compat.open_jaxpr(use.jaxpr).invars]
        jaxprs.append(e.body(use, passed + carried, types, joints))
        values += passed
    params = dict(eqn.params, cond_jaxpr=jaxprs[0], body_jaxpr=jaxprs[1])
    return [Cell(x) for x in _compat.bind(eqn, values + carried, params)]


def cond(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    which, operands = cells[0].value, cells[1:]
    avals = [v.aval for v in eqn.invars[1:]]
    values = [c.value for c in operands]
    if not e.plan.shared:  # cotangents of what float32 reads are added up in float32
        demands = zip(*map(e.demand.of, inner.bodies), strict=True)
        for i, ways in enumerate(demands):
            if AS_FULL in ways or AS_HALF | AS_FULL in ways:
                values[i] = e.read_full(operands[i], avals[i])
    branches = tuple(e.body(b, values, avals, inner.joins) for b in inner.bodies)
    params = dict(eqn.params, branches=branches)
    return [Cell(x) for x in _compat.bind(eqn, [which, *values], params)]


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "call": call,
        "cond": cond,
        "custom_jvp": custom_jvp,
        "custom_vjp": custom_vjp,
        "custom_vmap": custom_vmap,
        "scan": scan,
        "shard_map": shard_map,
        "while": while_,
    }
)
