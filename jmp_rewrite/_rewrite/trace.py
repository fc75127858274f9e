"""Traces a function for one call, of arrays or of their types."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util

from jmp_rewrite._arguments import Flat, hide, pure_call, show, show_types, wraps
from jmp_rewrite._graph import FLOAT32, Region, has_half_precision, nodes, region
from jmp_rewrite._policy import Policy
from jmp_rewrite._rewrite.decide import decide_quietly
from jmp_rewrite._rewrite.traced import Traced


def trace_call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | None = None,
) -> Traced:
    """Traces a function for one call.

    Args:
      fun: the function.
      args: positional arguments.
      kwargs: arguments by name.
      policy: what will rewrite the program; None if nothing will.
    """
    return trace_for(policy, fun, *hide((args, kwargs)))


_TRACED = (
    "mixed_precision traces a function as jax.jit does: branch with jax.lax.cond or "
    "jnp.where, or name the arguments that decide in static_argnums or static_argnames."
)


def trace_for(
    policy: Policy | None, fun: Callable[..., Any], args: Any, kwargs: Any
) -> Traced:
    """Traces a function that a policy will rewrite.

    A call of a half-precision function sees the scopes that it stands in from the
    innermost loop or jitted function on. If one further out, or the path of a
    parameter, makes the call float32, the function is traced anew, and told so.
    """
    if policy is None:
        return _trace_hidden(fun, args, kwargs)
    here = Region(policy)
    while True:
        with region.tracing(here):
            traced = _trace_hidden(fun, args, kwargs)
        found = _calls_in_float32(traced, policy)
        if found <= here.in_float32:
            return traced
        known = here.in_float32 | found if here.again else frozenset()
        here = here._replace(in_float32=known, again=next(_AGAIN))


_AGAIN = itertools.count(1)


def _calls_in_float32(traced: Traced, policy: Policy) -> frozenset[int]:
    """Returns the half-precision calls that should have been traced in float32."""
    if not policy.scopes or policy.compute_dtype == FLOAT32:
        return frozenset()
    if not has_half_precision(traced.closed):
        return frozenset()
    graph, plan, _ = decide_quietly(traced, policy)
    assert plan is not None
    return frozenset(
        node.place.call
        for node in graph.nodes
        if node.name == nodes.KERNEL_OPERAND
        and node.place.call >= 0
        and not node.place.rewritten
        and plan.pins.is_asked_full(node.index)
    )


def _trace_hidden(fun: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
    """Traces `fun` through a fresh function, so that nothing it captured is cached."""
    found: list[tuple[Any, tuple[Any, ...]]] = []

    def fresh(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = show((args, kwargs))
        result = hide(fun(*args, **kwargs))
        leaves, structure = tree_util.tree_flatten_with_path(result)
        found.append((structure, tuple(path for path, _ in leaves)))
        return result

    # Errors then name the user's function and its arguments, as those of jax.jit do.
    wraps(fun, fresh)
    try:
        closed = jax.make_jaxpr(fresh)(*args, **kwargs)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(_TRACED)
        raise
    arguments = (args, kwargs)
    results = Flat(*found[-1], tuple(closed.out_avals))
    return Traced(closed, tree_util.tree_leaves(arguments), arguments, results)


def trace_types(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hide_static: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
    policy: Policy | None = None,
) -> Traced:
    """Traces `fun` for a call whose arrays may be given as `jax.ShapeDtypeStruct`.

    Args:
      fun: the function.
      args: positional arguments.
      kwargs: arguments by name.
      hide_static: `Decorated.hide`; None if no argument is static.
      policy: what will rewrite the program; None if nothing will.
    """
    arguments = (args, kwargs) if hide_static is None else hide_static(args, kwargs)
    with pure_call(fun, *arguments) as (pure, pure_args, pure_kwargs, _):
        given = show_types(hide((pure_args, pure_kwargs)))
        return trace_for(policy, pure, *given)
