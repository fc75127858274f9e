"""Emits a whole program according to its plan: a closed jaxpr with explicit casts."""

from __future__ import annotations

from typing import Any

import jax

from jmp_rewrite import _compat
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._emit.higher_order import HANDLERS
from jmp_rewrite._emit.later import Later
from jmp_rewrite._precision import Plan


def emit(
    plan: Plan,
    later: Later,
    emitter_type: type[Emitter] = Emitter,
) -> Any:
    """Writes a program as its plan says.

    Args:
      plan: the program, and what is done with each equation.
      later: runs programs that are only known later, derivative rules.
      emitter_type: what emits the equations.

    Returns:
      A closed jaxpr of the program's constants and arguments, whose results have the
      dtypes and weak types that they had. Every rounding is an equation of its own.
    """
    top = _compat.open_jaxpr(plan.graph.top.jaxpr)

    def rewritten(*values: Any) -> list[Any]:
        emitter = emitter_type(plan, HANDLERS, later)
        results = emitter.evaluate(plan.graph.top, [Cell(x) for x in values])
        return [
            _as_before(emitter.read_full(cell, var.aval), var.aval)
            for cell, var in zip(results, top.outvars, strict=True)
        ]

    return jax.make_jaxpr(rewritten)(*(v.aval for v in [*top.constvars, *top.invars]))


def _as_before(x: Any, aval: Any) -> Any:
    weak = getattr(aval, "weak_type", False)
    if getattr(jax.typeof(x), "weak_type", False) != weak:
        return _compat.convert(x, aval.dtype, weak)
    return x
