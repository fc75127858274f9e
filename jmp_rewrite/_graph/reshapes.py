"""Reshapes that permute first, as two equations.

`x.ravel(order="F")` is one `reshape` with `dimensions`. What follows numbers or
dimensions through a reshape would have to know of them in each place.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._rules import held_jaxprs, with_held


def plain_reshapes(jaxpr: Any) -> Any:
    """Returns a jaxpr whose reshapes permute nothing; the same object if it was one."""
    return _plain(jaxpr, {})


def _plain(jaxpr: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if id(jaxpr) not in known:  # kept with it, or its number is used again
        old = _compat.open_jaxpr(jaxpr).eqns
        new = [e for eqn in old for e in _equations(eqn, known)]
        is_same = len(new) == len(old) and all(map(operator.is_, new, old))
        plain = jaxpr if is_same else _compat.with_body(jaxpr, eqns=new)
        known[id(jaxpr)] = jaxpr, plain
    return known[id(jaxpr)][1]


def _equations(eqn: Any, known: dict[int, tuple[Any, Any]]) -> list[Any]:
    dims = eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None
    if dims is None:
        held = held_jaxprs(eqn)
        return [with_held(eqn, [_plain(j, known) for j in held]) if held else eqn]

    def run(x: Any) -> Any:
        params = dict(eqn.params, dimensions=None)
        return eqn.primitive.bind(lax.transpose(x, dims), **params)

    with eqn.ctx.manager:  # its mesh
        made = _compat.open_jaxpr(jax.make_jaxpr(run)(eqn.invars[0].aval)).eqns
    if len(made) == 1:  # it permutes nothing
        return [eqn.replace(params=made[0].params)]
    transpose, reshape = made
    return [
        eqn.replace(
            primitive=transpose.primitive,
            params=transpose.params,
            outvars=transpose.outvars,
        ),
        eqn.replace(params=reshape.params, invars=transpose.outvars),
    ]
