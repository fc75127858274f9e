"""Scans that are put together anew, with other operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import inlined


def scan_anew(
    scan: Any, jaxpr: Any, consts: int, carries: int, operands: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns a scan of another body, as equations and their results.

    Args:
      scan: the equation, in whose place it is to stand.
      jaxpr: the body, closed.
      consts: how many of its parameters are the same in each iteration.
      carries: how many of the next are handed on.
      operands: variables and literals for all of them.
    """
    params = _compat.scan_params(scan.params, jaxpr, consts, carries)
    avals = [v.aval for v in operands]
    with _compat.place_of(scan, avals):
        closed = jax.make_jaxpr(lambda *xs: _compat.bind(scan, xs, params))(*avals)
    return inlined(closed, operands, scan)
