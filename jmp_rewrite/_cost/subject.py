"""What is to be estimated: a function's call, under any policy and with any batch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp_rewrite import _compat, _rewrite
from jmp_rewrite._arguments import Flat, mapped
from jmp_rewrite._cost.program import Program
from jmp_rewrite._policy import Policy


class Call(NamedTuple):
    """A call of a function, with types in place of arrays.

    Attributes:
      args: positional arguments.
      kwargs: arguments by name.
      results: the result.
      shardings: of each parameter of the traced program; None if on one device.
      jitted: traces the same call of the `jax.jit` around the function, with the same
        parameters; None if there is none.
      again: makes a subject of another call.
      names: of the parameters that have positions.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Flat
    shardings: Sequence[Any]
    jitted: Callable[[], _rewrite.Traced | None]
    again: Callable[..., Subject]
    names: tuple[str, ...] = ()


def call_of(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: _rewrite.Traced,
    jitted: Callable[[], _rewrite.Traced | None],
    again: Callable[..., Subject],
) -> Call:
    """Keeps a call that was traced, and none of its arrays."""
    args, kwargs = types_of((args, kwargs))
    shardings = [_sharding(x) for x in traced.arrays]
    names = _positional(fun)
    return Call(args, kwargs, traced.results, shardings, jitted, again, names)


def _positional(fun: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the parameters that have positions."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def types_of(tree: Any) -> Any:
    """Returns a tree with types in place of arrays."""
    return mapped(_type, tree)


def _type(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) or not _compat.is_array(x):
        return x
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=_sharding(x), weak_type=aval.weak_type
    )


def _sharding(x: Any) -> Any:
    """Returns how an array lies on several devices; None if it does not."""
    sharding = getattr(x, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and mesh.size > 1 else None


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function's call.

    Attributes:
      name: the function's.
      policy: the report's own.
      jaxpr: the program as a policy rewrites it, a closed jaxpr.
      call: the call.
    """

    name: str
    policy: Policy
    jaxpr: Callable[[Policy], Any]
    call: Call

    def program(self, policy: Policy) -> Program:
        """Returns the program under a policy."""
        closed = self.jaxpr(policy)
        donated, given, out = self.placement
        shardings = [a or b for a, b in zip(given, self.call.shardings, strict=True)]
        return Program(self.name, closed, donated, shardings, out)

    @functools.cached_property
    def placement(self) -> tuple[list[bool], list[Any], list[Any]]:
        """What `jax.jit` was told: of parameters and of results.

        Returns:
          Whether each parameter is donated, the parameters' shardings, and those of the
          results; None where nothing was said.
        """
        count = len(self.call.shardings)
        results = len(self.call.results.types)
        nothing = [False] * count, [None] * count, [None] * results
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = self.call.jitted()
        found = _placement(traced.closed) if traced else None
        if found is None:
            return nothing
        donated, given, returned = found
        ahead = count - len(donated)  # a module whose method was decorated
        donated, given = [False] * ahead + donated, [None] * ahead + given
        # `jit` returns Python numbers as arrays, and they are none here.
        is_same = len(returned) == results
        return donated, given, returned if is_same else [None] * results


def _placement(closed: Any) -> tuple[list[bool], list[Any], list[Any]] | None:
    """Reads what `jax.jit` was told from the one equation that it is."""
    body = _compat.open_jaxpr(closed)
    eqns = [e for e in body.eqns if "donated_invars" in e.params]
    if len(eqns) != 1 or any(v not in eqns[0].outvars for v in body.outvars):
        return None
    params = eqns[0].params
    inputs = dict(
        zip(
            map(id, eqns[0].invars),
            zip(params["donated_invars"], params["in_shardings"], strict=True),
            strict=True,
        )
    )
    outputs = dict(zip(eqns[0].outvars, params["out_shardings"], strict=True))
    found = [inputs.get(id(v), (False, None)) for v in body.invars]
    return (
        [donated for donated, _ in found],
        [_said(sharding) for _, sharding in found],
        [_said(outputs[v]) for v in body.outvars],
    )


def _said(sharding: Any) -> Any:
    is_one = isinstance(sharding, jax.sharding.Sharding)
    return _sharding_of_many(sharding) if is_one else None


def _sharding_of_many(sharding: Any) -> Any:
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and mesh.size > 1 else None
