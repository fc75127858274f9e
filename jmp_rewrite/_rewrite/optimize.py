"""Emits what was decided as a program with explicit casts, and runs the passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jmp_rewrite import _collector, _compat, _passes
from jmp_rewrite._emit import Emitter, Later, program, store
from jmp_rewrite._precision import decide as _plan


@_collector.held()
def optimized(
    plan: _plan.Plan,
    choice: _passes.Choice | None = None,
    emitter_type: type[Emitter] = Emitter,
) -> _passes.Optimized:
    """Emits a program and runs the passes over it.

    Args:
      plan: the program, and what is done with each equation.
      choice: the passes; None for those that are switched on now.
      emitter_type: what emits the equations.

    Returns:
      A closed jaxpr of the program's constants and arguments, and what was done.
    """
    choice = _passes.current() if choice is None else choice
    explicit = emitted(plan, choice, emitter_type)
    done = finished(plan, explicit, choice)
    if (make := plan.if_differentiated) is not None:

        def original() -> Any:
            return optimized(make(), choice, emitter_type).closed

        return done._replace(closed=_unless_differentiated(done.closed, original))
    if not _may_store(plan):
        return done
    stored = store(explicit, plan.half).closed
    if stored is explicit:
        return done
    less = finished(plan, stored, choice)
    return less._replace(
        closed=_unless_differentiated(less.closed, lambda: done.closed)
    )


def emitted(
    plan: _plan.Plan,
    choice: _passes.Choice | None = None,
    emitter_type: type[Emitter] = Emitter,
) -> Any:
    """Emits a program with explicit casts, before any pass; see `optimized`."""
    choice = _passes.current() if choice is None else choice
    again = functools.partial(run, choice=choice, emitter_type=emitter_type)
    later = Later(again, functools.partial(_finish, plan.half, choice))
    return program.emit(plan, later, emitter_type)


@_collector.held()
def finished(
    plan: _plan.Plan, explicit: Any, choice: _passes.Choice | None = None
) -> _passes.Optimized:
    """Runs the passes over a program with explicit casts; see `optimized`.

    A program of which nothing is half stays as it was.
    """
    if not plan.rewrites:
        return _passes.Optimized(explicit, {})
    choice = _passes.current() if choice is None else choice
    explicit = _passes.Program(explicit, plan.half, plan.pins.whole_step)
    return _passes.optimize(explicit, choice.passes, choice.device)


def _may_store(plan: _plan.Plan) -> bool:
    """Whether what loops carry may be stored as `store` does it."""
    is_forward = not (plan.pins.whole_step or plan.is_differentiated)
    return bool(plan.graph.loops) and is_forward


def _unless_differentiated(closed: Any, original: Callable[[], Any]) -> Any:
    """Returns a program that is another one where somebody differentiates it.

    Cotangents of what a loop carries in half would be added up in half, and what is
    stopped and what is not were computed once.

    Args:
      closed: the program, a closed jaxpr.
      original: makes the other one, of the same types.
    """
    if not _has_derivative(closed):
        return closed
    if not _compat.allows_rule(closed.effects):
        return original()

    @jax.custom_jvp
    def undifferentiated(*args: Any) -> list[Any]:
        return _compat.evaluate(closed, args)

    def rule(primals: Any, tangents: Any) -> Any:
        # What nobody differentiates has no tangent, as in the program itself: that of
        # `sqrt` at 0 is infinite, and NaN times zero.
        moved = [n for n, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def fun(*some: Any) -> list[Any]:
            args = dict(enumerate(primals)) | dict(zip(moved, some, strict=True))
            return _compat.evaluate(original(), list(args.values()))

        return jax.jvp(fun, [primals[n] for n in moved], [tangents[n] for n in moved])

    undifferentiated.defjvp(rule, symbolic_zeros=True)

    return jax.make_jaxpr(undifferentiated)(*closed.in_avals)


def _has_derivative(closed: Any) -> bool:
    """Whether a program returns a number that has a derivative."""
    dtypes = (getattr(a, "dtype", np.dtype(bool)) for a in closed.out_avals)
    return any(jnp.issubdtype(d, jnp.inexact) for d in dtypes)


def _finish(
    half: np.dtype,
    choice: _passes.Choice,
    fun: Callable[..., list[Any]],
    args: Sequence[Any],
) -> list[Any]:
    """Runs a function that emits equations itself, in no whole step, with the passes.

    It holds no program: JAX keeps derivative rules longer than the tracers in one.
    """
    closed = jax.make_jaxpr(fun)(*map(jax.typeof, args))
    explicit = _passes.Program(closed, half, False)
    optimized = _passes.optimize(explicit, choice.passes, choice.device)
    return _compat.evaluate(optimized.closed, args)


def run(
    plan: _plan.Plan,
    consts: Sequence[Any],
    args: Sequence[Any],
    choice: _passes.Choice | None = None,
    emitter_type: type[Emitter] = Emitter,
) -> list[Any]:
    """Runs a program rewritten, on its constants and arguments; see `optimized`."""
    closed = optimized(plan, choice, emitter_type).closed
    return _compat.evaluate(closed, [*consts, *args])
