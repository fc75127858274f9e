"""`explain`: what mixed precision does to a function, without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from jax import tree_util

from jmp_rewrite import _cost, _rewrite, _transform
from jmp_rewrite._arguments import not_a_function
from jmp_rewrite._explain.report import Decision, Report
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._precision import parameters
from jmp_rewrite._source import check_kind, name_of

P = ParamSpec("P")


def explain(fun: Callable[P, Any], policy: PolicyLike = None) -> Callable[P, Report]:
    """Says what `mixed_precision` does to a function, and why.

    Which matrix multiplications run in half, which values are stored in float32 and
    why, what the backward pass reads, and what would make it faster. The function is
    traced as `mixed_precision` traces it, and nothing is computed: arrays may be given
    as `jax.ShapeDtypeStruct`, so that a model of any size can be looked at.

    Args:
      fun: the function, a whole train step best of all, with or without
        `mixed_precision` and `jax.jit` around it.
      policy: a `Policy`, a string or a dtype; None for that of a decorated `fun`,
        otherwise for the default policy.

    Returns:
      A function of the arguments of `fun` that returns a `Report`.

    Raises:
      TypeError: if `fun` is no function.
      ValueError: for an unknown policy, and for shapes of symbolic sizes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> def f(x, w):
      ...     return jax.nn.softmax(x @ w) @ w
      >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
      >>> report = jmpr.explain(f, "mixed_bfloat16")(x, x)
      >>> report.half_flops, report.casts
      (1.0, 5)
      >>> [e.reason for e in report.equations if e.primitive == "reduce_sum"]
      ['full: a sum: its terms are kept and accumulated in float32']
    """
    if not callable(fun):
        raise TypeError(
            f"explain expected a function, got {not_a_function(fun)}: "
            "call it as explain(fun, policy)(*args)."
        )
    fixed = None if policy is None else as_policy(policy)
    inner = _transform.undecorated(fun)
    check_kind(inner.fun, "explain")

    @functools.wraps(fun, updated=())
    def explained(*args: P.args, **kwargs: P.kwargs) -> Report:
        chosen = as_policy(fixed or inner.policy)
        given, named = inner.hide(*inner.received(args, kwargs))
        traced = _rewrite.trace_types(inner.fun, given, named, policy=chosen)
        _check_sizes(traced)
        given, named = _cost.types_of((given, named))

        def under(policy: Policy) -> _rewrite.Traced:
            return _rewrite.trace_types(inner.fun, given, named, policy=policy)

        def jitted() -> _rewrite.Traced | None:
            outermost = inner.jitted(kwargs)
            return outermost and _rewrite.trace_types(outermost, given, named)

        call = _cost.call_of(fun, args, kwargs, traced, jitted, again)
        return _report(inner.fun, traced, chosen, call, under)

    def again(*args: Any, **kwargs: Any) -> _cost.Subject:
        return explained(*args, **kwargs).subject

    return explained


def _check_sizes(traced: _rewrite.Traced) -> None:
    """Raises a `ValueError` for arguments of symbolic sizes: bytes are numbers."""
    for aval in traced.closed.in_avals:
        if any(not isinstance(size, int) for size in getattr(aval, "shape", ())):
            raise ValueError(
                "explain counts bytes and operations, and expected known sizes, got "
                f"{aval.str_short()}: give it an example. `mixed_precision` and "
                "`jax.export` take symbolic sizes."
            )


def _report(
    fun: Any,
    traced: _rewrite.Traced,
    policy: Policy,
    call: _cost.Call,
    under: Callable[[Policy], _rewrite.Traced],
) -> Report:
    graph, plan, unused = _rewrite.decide_quietly(traced, policy)
    return Report(
        Decision(
            name=name_of(fun).rpartition("<locals>.")[2],
            policy=policy,
            closed=traced.closed,
            graph=graph,
            plan=plan,
            arguments=parameters.argument_paths(traced.arguments),
            results=traced.result_paths,
            unused_scopes=unused,
            weights=len(tree_util.tree_leaves(traced.arguments[0][:1])),
            call=call,
            under=under,
        )
    )
