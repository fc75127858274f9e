"""What is known of a program's memory where no compiler says what it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._cost.estimate import Buffer
from jmp_rewrite._cost.program import Program
from jmp_rewrite._source import Caller, Lines

_LARGEST = 5


def argument_bytes(program: Program) -> int:
    """Returns what the arguments that a program reads take on one device."""
    return sum(_bytes(aval, sharding) for aval, sharding in _arguments(program))


def _arguments(program: Program) -> list[tuple[Any, Any]]:
    """Returns types and shardings of what a program reads; `jit` drops all else."""
    body = _compat.open_jaxpr(program.closed)
    read = {id(v) for e in body.eqns for v in e.invars} | set(map(id, body.outvars))
    pairs = zip(body.invars, program.shardings, strict=True)
    return [(v.aval, sharding) for v, sharding in pairs if id(v) in read]


def _bytes(aval: Any, sharding: Any = None) -> int:
    shape = getattr(aval, "shape", ())
    part = shape if sharding is None else sharding.shard_shape(shape)
    return math.prod(part) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def largest_values(program: Program) -> list[Buffer]:
    """Returns the largest arguments and results of equations, with their lines.

    A compiler need not write each of the latter.
    """
    lines = Lines()
    found: dict[tuple[str, str], Buffer] = {}
    for aval, sharding in _arguments(program):
        array = f"{aval.str_short(short_dtypes=True)} (argument)"
        found[array, ""] = Buffer(_bytes(aval, sharding), array, "argument", "")
    for eqn, caller in _equations(program.closed, None):
        for v in eqn.outvars:
            size = _bytes(v.aval)
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
