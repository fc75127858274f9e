"""Custom derivatives and batching: rules are kept, and rewritten like bodies.

A rule is a Python function that JAX calls later, with the dtypes of the values that
were bound. It sees the original ones: what is half is cast back before, and its results
are cast to what the body returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._graph import Inner, Place, region


def custom_jvp(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    """The rule sees the original dtypes; it is rewritten like a body."""
    closed, values, avals = _custom_body(e, eqn, inner, cells)
    params = eqn.primitive.get_bind_params(eqn.params)
    fun, jvp = params["subfuns"]
    outs = [v.dtype for v in closed.out_avals]

    def new_jvp(*args: Any) -> list[Any]:
        flat = [_cast_like(a, t) for a, t in zip(args, [*avals, *avals], strict=True)]
        results = _rule(e, inner.place, jvp.call_wrapped, flat)
        return [_cast(r, d) for r, d in zip(results, [*outs, *outs], strict=True)]

    new_fun = _compat.wrap(jex.jaxpr_as_fun(closed), fun)
    params["subfuns"] = (new_fun, _compat.wrap(new_jvp, jvp))
    return [Cell(x) for x in eqn.primitive.bind(*values, **params)]


def custom_vjp(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    """Both rules see the original dtypes; they are rewritten like bodies."""
    closed, values, avals = _custom_body(e, eqn, inner, cells)
    params = eqn.primitive.get_bind_params(eqn.params)
    fun, fwd, bwd = params["subfuns"]
    out_avals = [v.aval for v in eqn.outvars]
    outs = [v.dtype for v in closed.out_avals]
    ins = [getattr(v, "dtype", None) for v in values]

    def new_fwd(*args: Any) -> list[Any]:
        primals = [_cast_like(a, t) for a, t in zip(args[::2], avals, strict=True)]
        pairs = [x for pair in zip(primals, args[1::2], strict=True) for x in pair]
        results = _rule(e, inner.place, fwd.call_wrapped, pairs)
        kept = len(results) - len(outs)
        made = [_cast(r, d) for r, d in zip(results[kept:], outs, strict=True)]
        return [*results[:kept], *made]

    def new_bwd(*args: Any) -> Any:
        forwarded = params["out_trees"]()[2]
        kept = len(args) - len(out_avals)
        residuals = [
            a if f is None else _cast_like(a, avals[f])
            for a, f in zip(args[:kept], forwarded, strict=True)
        ]
        cts = [_cast_like(c, t) for c, t in zip(args[kept:], out_avals, strict=True)]
        results = _rule(e, inner.place, bwd.call_wrapped, [*residuals, *cts])
        return _compat.map_cotangents(_cast, results, ins)

    params["subfuns"] = (
        _compat.wrap(jex.jaxpr_as_fun(closed), fun),
        _compat.wrap(new_fwd, fwd),
        _compat.wrap(new_bwd, bwd),
    )
    return [Cell(x) for x in eqn.primitive.bind(*values, **params)]


def custom_vmap(e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
    """The batching rule sees the original dtypes; it is rewritten like a body."""
    closed, values, avals = _custom_body(e, eqn, inner, cells)
    outs = [v.dtype for v in closed.out_avals]
    rule = eqn.params["rule"]

    @functools.wraps(rule)
    def new_rule(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args)
        full = [_cast_like(a, t) for a, t in zip(leaves, avals, strict=True)]
        made: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            args = jax.tree.unflatten(tree, leaves)
            out, is_batched = rule(axis_size, in_batched, *args)
            made.append((jax.tree.structure(out), is_batched))
            return jax.tree.leaves(out)

        results = _rule(e, inner.place, flat, full)
        structure, is_batched = made[-1]
        cast = [_cast(r, d) for r, d in zip(results, outs, strict=True)]
        return jax.tree.unflatten(structure, cast), is_batched

    (body,) = inner.bodies
    params = dict(eqn.params, call=_compat.like(body.jaxpr, closed), rule=new_rule)
    return [Cell(x) for x in _compat.bind(eqn, values, params)]


def _custom_body(
    e: Emitter, eqn: Any, inner: Inner, cells: list[Cell]
) -> tuple[Any, list[Any], list[Any]]:
    (body,) = inner.bodies
    values = [c.value for c in cells]
    avals = [v.aval for v in eqn.invars]
    closed = e.body(body, values, avals)
    return closed, values, avals


def _rule(
    e: Emitter, place: Place, rule: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Runs a derivative rule rewritten: it is a program of its own."""
    arrays = [i for i, a in enumerate(args) if _compat.is_array(a)]
    tree: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        full = list(args)
        for i, x in zip(arrays, values, strict=True):
            full[i] = x
        leaves, structure = _compat.flatten_rule(rule(*full))
        known = [None if _compat.is_array(x) else x for x in leaves]
        tree.append((known, structure))
        return [x for x in leaves if _compat.is_array(x)]

    with region.at(e.plan.region, place.path, place.full):
        closed = jax.make_jaxpr(flat)(*(args[i] for i in arrays))
    plan = e.plan.nested(closed, place)
    consts = _compat.constants(closed)
    results = iter(e.later.run(plan, consts, [args[i] for i in arrays]))
    known, structure = tree[-1]
    leaves = [next(results) if x is None else x for x in known]
    return _compat.unflatten_rule(structure, leaves)


def _cast(x: Any, dtype: Any) -> Any:
    """Casts between float32 and half; symbolic zeros are what they are.

    So are integers and booleans, and the tangents of these, which have no numbers.
    """
    if not _compat.is_array(x) or dtype is None or x.dtype == dtype:
        return x
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return x
    return _compat.convert(x, dtype)


def _cast_like(x: Any, aval: Any) -> Any:
    if _compat.is_symbolic_zero(x):
        return _compat.symbolic_zero_like(x, aval)
    return _cast(x, aval.dtype)
