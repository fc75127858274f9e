"""Roundings that XLA:GPU would drop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite._passes.by_device import GPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import (
    feeding,
    given,
    is_call,
    is_widening,
    made_inside,
    makers,
    uses,
)
from jmp_rewrite._passes.program import ROUNDING
from jmp_rewrite._rules import ARITHMETIC, COSTLY, EXACT, MOVES, PRODUCTS


def keep_rounding(editor: Editor) -> None:
    """A value that was rounded to be stored is read as it was rounded.

    XLA:GPU drops casts float32 -> half -> float32 between two kernels, and then writes
    the value in float32, often beside its half copy (openxla/xla#41605). A product with
    a 1 that the compiler does not know to be one is exact, and fused. An `exp` or the
    like of one stored half array is left out, unless a matrix multiplication reads it:
    XLA:GPU computes it again in each kernel that reads it, and writes it nowhere.

    On NVIDIA GPUs.

    Gain: GPT-2 small 5262 -> 4216 MB on an H200.
    """
    widened = [
        (body, eqn.invars[0])
        for body, _, eqn in editor.find("convert_element_type")
        if is_widening(eqn, editor.half)
    ]

    def moves(body: Body, index: int) -> bool:
        return body.eqns[index].primitive.name in EXACT

    read = feeding(widened, moves)
    for body, index, eqn in editor.find(ROUNDING):
        (out,) = eqn.outvars
        if (body, out) not in read or editor.was_here(body, out):
            continue
        if _is_read_by_product(body, out) or not _is_remade(editor, body, *eqn.invars):
            branches = {Where((GPU,)): _times_one}
            (kept,) = editor.choose(body, index, [out], [], branches, after=True)
            editor.read_instead(body, out, kept)


def _is_read_by_product(body: Body, var: Any) -> bool:
    """Whether a product reads a value, seen through moves and calls."""
    stack, seen = [(body, var)], set[tuple[Body, Any]]()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        for place, index, _ in uses(*at):
            name = place.eqns[index].primitive.name if index >= 0 else ""
            if name in PRODUCTS:
                return True
            if name in MOVES:
                stack += [(place, v) for v in place.eqns[index].outvars]
    return False


def _is_remade(editor: Editor, body: Body, value: Any) -> bool:
    """Whether a value is a costly function of one half array, and of small ones."""
    made = makers(editor, body, value)
    if not all(i >= 0 and b.eqns[i].primitive.name in COSTLY for b, i in made):
        return False
    size = math.prod(value.aval.shape)
    stack, found = [(body, value)], set[tuple[Body, Any]]()
    seen: set[tuple[Body, Any]] = set()
    while stack and len(found) < 2:
        body, atom = stack.pop()
        if hasattr(atom, "val") or 2 * math.prod(atom.aval.shape) < size:
            continue
        if (body, atom) in seen:
            continue
        seen.add((body, atom))
        index = body.maker.get(atom, -1)
        if atom.aval.dtype == editor.half:
            found.add((body, atom))
        elif index in body.held and is_call(body.eqns[index]):
            stack += made_inside(body, index, body.eqns[index].outvars.index(atom))
        elif index >= 0 and body.eqns[index].primitive.name in ARITHMETIC | COSTLY:
            stack += [(body, v) for v in body.eqns[index].invars]
        elif index < 0 and (sources := given(body, atom)):
            stack += sources
        else:
            return False
    return len(found) == 1


def _times_one(x: Any) -> Any:
    one = lax.optimization_barrier(np.ones((), x.dtype))
    return [x * lax.broadcast(one, x.shape)]
