"""Equations that do several things, as the equations that do one each.

`x.ravel(order="F")` is one `reshape` with `dimensions`, which permutes first; since JAX
0.12 `jnp.polyval` is one `polynomial`; and a product with the number 1 is a copy (a
layer's scale that nobody has set). What follows numbers, dimensions or differences
through a program would have to know of them in each place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._rules import held_jaxprs, with_held


def plain(jaxpr: Any) -> Any:
    """Returns a jaxpr of plain equations; the same object if it was one."""
    return _plain(jaxpr, {})


def _plain(jaxpr: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if id(jaxpr) not in known:  # kept with it, or its number is used again
        old = _compat.open_jaxpr(jaxpr).eqns
        new = [e for eqn in old for e in _equations(eqn, known)]
        is_same = len(new) == len(old) and all(map(operator.is_, new, old))
        made = jaxpr if is_same else _compat.with_body(jaxpr, eqns=new)
        known[id(jaxpr)] = jaxpr, made
    return known[id(jaxpr)][1]


def _equations(eqn: Any, known: dict[int, tuple[Any, Any]]) -> list[Any]:
    name = eqn.primitive.name
    if name == "reshape" and eqn.params.get("dimensions") is not None:
        return _written_as(eqn, lambda x: _permuted(eqn, x))
    if name == "polynomial":
        return _written_as(eqn, _horner)
    if name == "mul" and (operand := _times_one(eqn)) is not None:
        return _written_as(eqn.replace(invars=[operand]), jnp.copy)
    held = held_jaxprs(eqn)
    return [with_held(eqn, [_plain(j, known) for j in held]) if held else eqn]


def _times_one(eqn: Any) -> Any:
    """Returns what is multiplied by the number 1, of which the result is a copy."""
    for operand, other in (eqn.invars, eqn.invars[::-1]):
        is_one = hasattr(other, "val") and np.ndim(other.val) == 0 and other.val == 1
        if is_one and operand.aval == eqn.outvars[0].aval:
            return None if hasattr(operand, "val") else operand
    return None


def _permuted(eqn: Any, x: Any) -> Any:
    x = lax.transpose(x, eqn.params["dimensions"])
    return eqn.primitive.bind(x, **dict(eqn.params, dimensions=None))


def _horner(x: Any, *coefficients: Any) -> Any:
    """Evaluates a polynomial; the constant coefficient comes first."""
    *others, total = coefficients
    for coefficient in reversed(others):
        total = total * x + coefficient
    return total


def _written_as(eqn: Any, fun: Callable[..., Any]) -> list[Any]:
    """Returns the equations of a function in place of one of the same result."""
    with eqn.ctx.manager:  # its mesh
        made = jax.make_jaxpr(fun)(*(v.aval for v in eqn.invars))
    body = _compat.open_jaxpr(made)
    new = dict(zip(body.invars, eqn.invars, strict=True))
    new |= dict(zip(body.outvars, eqn.outvars, strict=True))
    return [
        eqn.replace(
            primitive=e.primitive,
            params=e.params,
            invars=[v if hasattr(v, "val") else new.get(v, v) for v in e.invars],
            outvars=[new.get(v, v) for v in e.outvars],
            ctx=e.ctx,
        )
        for e in body.eqns
    ]
