"""Evaluates a jaxpr equation by equation: the plain run that others are held against.

Calls are evaluated in place, so that nothing is compiled as a whole and no `jit` inside
gives its arguments away; a value is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._rules import CALLS

# These run in place; a `shard_map` needs its mesh.
IN_PLACE = frozenset(CALLS) - {"shard_map", "compute_on", "xla_metadata_call"}


def evaluate(
    closed: Any, args: Iterable[Any], consts: Sequence[Any] | None = None
) -> list[Any]:
    """Returns the results of a closed jaxpr on arrays.

    Args:
      closed: the program.
      args: its arguments.
      consts: the values of its constants; None for those that it carries.
    """
    values = [*(_compat.constants(closed) if consts is None else consts), *args]
    return _evaluate(closed, values)


def _evaluate(jaxpr: Any, values: list[Any]) -> list[Any]:
    body = _compat.open_jaxpr(jaxpr)
    env = dict(zip([*body.constvars, *body.invars], values, strict=True))
    values.clear()
    last = last_uses(body)
    for eqn, dead in zip(body.eqns, last, strict=True):
        operands = [_read(env, v) for v in eqn.invars]
        for var in dead:
            env.pop(var, None)
        with eqn.ctx.manager:
            outs = _equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
        for var in dead:
            env.pop(var, None)
    return [_read(env, v) for v in body.outvars]


def _equation(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in IN_PLACE:
        held = eqn.params[CALLS[name][1]]
        return _evaluate(held, [*_compat.constants(held), *operands])
    return _compat.bind(eqn, operands, undonated(eqn))


def last_uses(body: Any) -> list[list[Any]]:
    """Returns for each equation of an open jaxpr the variables nobody reads after it.

    Among them are results of the equation that nobody reads at all.
    """
    read = {v for v in body.outvars if not isinstance(v, jex.Literal)}
    last: list[list[Any]] = []
    for eqn in reversed(body.eqns):
        own = [v for v in eqn.invars if not isinstance(v, jex.Literal)]
        last.append([v for v in dict.fromkeys([*own, *eqn.outvars]) if v not in read])
        read.update(own)
    return last[::-1]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def undonated(eqn: Any) -> dict[str, Any]:
    """Returns the parameters of an equation that gives none of its operands away."""
    params = eqn.params
    if "donated_invars" not in params:
        return params
    return dict(params, donated_invars=(False,) * len(params["donated_invars"]))
