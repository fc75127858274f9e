"""The largest values of a program, where no compiler says which it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._cost.estimate import Buffer
from jmp_rewrite._source import Caller, Lines

_LARGEST = 5


def largest_values(closed: Any) -> list[Buffer]:
    """Returns the largest results of a program's equations, with their lines.

    A compiler need not write each of them.
    """
    lines = Lines()
    found: dict[tuple[str, str], Buffer] = {}
    for eqn, caller in _equations(closed, None):
        for v in eqn.outvars:
            size = getattr(v.aval, "size", 0) * getattr(v.aval.dtype, "itemsize", 0)
            array = v.aval.str_short(short_dtypes=True)  # "f32[8,128]"
            line = str(lines.of(eqn, caller))
            buffer = Buffer(size, array, str(eqn.primitive), line)
            known = found.setdefault((array, line), buffer)
            if size > known.bytes:
                found[array, line] = buffer
    return sorted(found.values(), key=lambda b: -b.bytes)[:_LARGEST]


def _equations(
    jaxpr: Any, caller: Caller | None
) -> Iterator[tuple[Any, Caller | None]]:
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        inner = list(jex.jaxprs_in_params(eqn.params))
        for body in inner:
            yield from _equations(body, Caller(eqn, caller))
        if not inner:
            yield eqn, caller
