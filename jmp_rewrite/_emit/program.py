"""Emits a whole program according to its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jmp_rewrite import _compat
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._emit.higher_order import HANDLERS
from jmp_rewrite._precision.decide import Plan


def run(
    plan: Plan,
    consts: Sequence[Any],
    args: Sequence[Any],
    emitter_type: type[Emitter] = Emitter,
) -> list[Any]:
    """Evaluates a program on its constants and arguments, as its plan says.

    Returns:
      Its results with the dtypes and weak types that they had.
    """
    emitter = emitter_type(plan, HANDLERS, run)
    cells = [Cell(x) for x in [*consts, *args]]
    outvars = _compat.open_jaxpr(plan.graph.top.jaxpr).outvars
    results = emitter.evaluate(plan.graph.top, cells)
    return [
        _as_before(emitter.read_full(cell, var.aval), var.aval)
        for cell, var in zip(results, outvars, strict=True)
    ]


def _as_before(x: Any, aval: Any) -> Any:
    weak = getattr(aval, "weak_type", False)
    if getattr(jax.typeof(x), "weak_type", False) != weak:
        return _compat.convert(x, aval.dtype, weak)
    return x
