"""A float64 reference for any float32 program: its jaxpr, run in float64.

Many libraries name float32 in their source, so casting a program's inputs to float64 is
not enough. Here the traced float32 program is evaluated equation by equation with each
float32 value held in float64, inside loops and branches too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
C64, C128 = np.dtype(np.complex64), np.dtype(np.complex128)
_WIDER = {F32: F64, C64: C128}
_DTYPES = ("dtype", "new_dtype", "preferred_element_type")
_CALLS = {
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def run(closed: Any, args: list[Any]) -> list[Any]:
    """Evaluates a closed float32 jaxpr in float64; returns its results."""
    return reference(closed)(args)


def reference(closed: Any) -> Callable[[list[Any]], list[Any]]:
    """A closed float32 jaxpr as a jitted function that runs in float64."""
    evaluate = jax.jit(lambda *xs: _closed(closed, xs))

    def run(args: list[Any]) -> list[Any]:
        with jax.enable_x64(True):
            return evaluate(*[_up(a) for a in args])

    return run


def _up(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    if dtype in (F32, C64):
        if isinstance(x, jax.Array):
            return lax.convert_element_type(x, _WIDER[dtype])
        return np.asarray(x).astype(_WIDER[dtype])
    return x


def _closed(jaxpr: Any, args: Any) -> list[Any]:
    body = getattr(jaxpr, "jaxpr", jaxpr)
    consts = [_up(c) for c in getattr(jaxpr, "consts", ())]
    return _open(body, consts, args)


def _open(body: Any, consts: Any, args: Any) -> list[Any]:
    env = dict(zip([*body.constvars, *body.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        if hasattr(atom, "val"):
            return _up(np.asarray(atom.val, atom.aval.dtype))
        return env[atom]

    for eqn in body.eqns:
        outs = _equation(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in body.outvars]


def _retrace(jaxpr: Any, avals: Any) -> Any:
    wide = [
        a.update(dtype=_WIDER.get(getattr(a, "dtype", None), a.dtype), weak_type=False)
        for a in avals
    ]
    return jax.make_jaxpr(lambda *xs: _closed(jaxpr, xs))(*wide)


def _equation(eqn: Any, values: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _CALLS:
        return _closed(params[_CALLS[name]], values)
    if name in ("scan", "while", "cond", "custom_linear_solve"):
        return globals()["_" + name](eqn, params, values)
    if name == "reduce_precision":
        return values if params["mantissa_bits"] >= 23 else _bind(eqn, values, params)
    if name in ("bitcast_convert_type", "iota", "nextafter"):
        narrow = [_down(v) for v in values]
        return _bind(eqn, narrow, params)
    for key in _DTYPES:
        if params.get(key) in (F32, C64):
            params[key] = _WIDER[np.dtype(params[key])]
    if params.get("update_jaxpr") is not None:
        inner = params["update_jaxpr"]
        consts = params.get("update_consts") or ()
        aval = jax.core.ShapedArray((), values[2].dtype)
        closed = jax.make_jaxpr(lambda *xs: _open(inner, consts, xs))(aval, aval)
        params["update_jaxpr"], params["update_consts"] = (
            closed.jaxpr,
            tuple(closed.consts),
        )
    if name in ("reduce", "reduce_window") and "jaxpr" in params:
        params["jaxpr"] = _retrace(
            params["jaxpr"], [v.aval for v in params["jaxpr"].jaxpr.invars]
        )
    return _bind(eqn, values, params)


def _down(x: Any) -> Any:
    narrow = {v: k for k, v in _WIDER.items()}.get(getattr(x, "dtype", None))
    return x if narrow is None else lax.convert_element_type(x, narrow)


def _bind(eqn: Any, values: list[Any], params: Any) -> list[Any]:
    bind_params = eqn.primitive.get_bind_params(params)
    subfuns = bind_params.pop("subfuns", ()) if isinstance(bind_params, dict) else ()
    outs = eqn.primitive.bind(*subfuns, *values, **bind_params)
    return [_up(x) for x in (outs if eqn.primitive.multiple_results else [outs])]


def _scan(eqn: Any, params: Any, values: list[Any]) -> list[Any]:
    consts, carry = _split(params)
    head, init, xs = values[:consts], values[consts:carry], values[carry:]

    def body(state: Any, x: Any) -> Any:
        outs = _closed(params["jaxpr"], [*head, *state, *x])
        return outs[: len(init)], outs[len(init) :]

    state, ys = lax.scan(
        body, init, xs, length=params["length"], reverse=params["reverse"]
    )
    return [*state, *ys]


def _split(params: Any) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_consts"] + params["num_carry"]
    from jmp_rewrite import _compat

    consts, carry = _compat.scan_split(params)
    return consts, consts + carry


def _while(eqn: Any, params: Any, values: list[Any]) -> list[Any]:
    split = params["cond_nconsts"]
    first = split + params["body_nconsts"]
    cond, body = values[:split], values[split:first]
    return lax.while_loop(
        lambda s: _closed(params["cond_jaxpr"], [*cond, *s])[0],
        lambda s: _closed(params["body_jaxpr"], [*body, *s]),
        [jnp.asarray(v) if not _is_key(v) else v for v in values[first:]],
    )


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def _cond(eqn: Any, params: Any, values: list[Any]) -> list[Any]:
    branches = [(lambda *xs, b=branch: _closed(b, xs)) for branch in params["branches"]]
    if values[0].dtype == np.bool_:
        return lax.cond(values[0], branches[1], branches[0], *values[1:])
    return lax.switch(values[0], branches, *values[1:])


def _custom_linear_solve(eqn: Any, params: Any, values: list[Any]) -> list[Any]:
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    total = start + lengths.solve + lengths.transpose_solve
    consts = values[start : start + lengths.solve]
    return _closed(jaxprs.solve, [*consts, *values[total:]])
