"""Roundings that XLA:GPU would drop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite._passes.by_device import BY_DEVICE, GPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import (
    feeding,
    given,
    has_branch,
    is_call,
    is_widening,
    made_inside,
    makers,
    uses,
)
from jmp_rewrite._passes.program import ROUNDING
from jmp_rewrite._passes.softmax_from_quotient import multiplied, quotient_of
from jmp_rewrite._rules import ARITHMETIC, COSTLY, EXACT, MOVES, PRODUCTS

# What `GpuPriorityFusion` calls cheap, and a logistic is made of.
_REPEATED = frozenset({"exp", "exp2", "logistic", "rsqrt", "sqrt"})
_GROWS = ARITHMETIC | {ROUNDING, "slice"}


def keep_rounding(editor: Editor) -> None:
    """A value that was rounded to be stored is read as it was rounded.

    XLA:GPU drops casts float32 -> half -> float32 between two kernels, and then writes
    the value in float32, often beside its half copy (openxla/xla#41605). A product with
    a 1 that the compiler does not know to be one is exact, and fused. A `tanh` or the
    like of half numbers is such a value too, since XLA:GPU computes it in float32.

    An `exp` or a logistic of one stored half array is left out, unless a matrix
    multiplication reads it: XLA:GPU calls it cheap, computes it again in each kernel
    that reads it, and writes it nowhere. So it does with what arithmetic makes of
    smaller arrays, as the splines of a number are. A softmax's exponential is written,
    where dropout stands in front of the multiplication.

    On NVIDIA GPUs.

    Gain: GPT-2 small 5262 -> 4216 MB on an H200, WaveNet 265 -> 236 MB.
    """
    widened = [
        (body, eqn.invars[0])
        for body, _, eqn in editor.find("convert_element_type")
        if is_widening(eqn, editor.half)
    ]

    def moves(body: Body, index: int) -> bool:
        return body.eqns[index].primitive.name in EXACT

    read = feeding(widened, moves)
    for body, _, eqn in editor.find(ROUNDING, *COSTLY):
        out = eqn.outvars[0]
        if (body, out) not in read or editor.was_here(body, out):
            continue
        if out.aval.dtype != editor.half:
            continue
        value = eqn.invars[0] if eqn.primitive.name == ROUNDING else out
        is_remade = _is_remade(editor, body, value) or _is_grown(body, value)
        if _is_read_by_product(body, out) or not is_remade:
            branches = {Where((GPU,)): _times_one}
            editor.choose_instead(body, out, [], branches)


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
    """Whether what is repeated makes a value, of one half array and small ones."""
    made = makers(body, value)
    if not all(i >= 0 and b.eqns[i].primitive.name in _REPEATED for b, i in made):
        return False
    # One kernel computes a softmax up to its exponential, and writes that.
    quotients = [(b, quotient_of(editor, b, i)) for b, i in made]
    if any(q is not None and multiplied(editor, b, q) is None for b, q in quotients):
        return False
    size = math.prod(value.aval.shape)
    stack = [(b, v) for b, i in made for v in b.eqns[i].invars]
    found = set[tuple[Body, Any]]()
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
        elif index >= 0 and body.eqns[index].primitive.name in ARITHMETIC | _REPEATED:
            stack += [(body, v) for v in body.eqns[index].invars]
        elif index >= 0 and _is_same_on_gpus(body.eqns[index]):
            eqn = body.eqns[index]
            stack.append((body, eqn.invars[eqn.outvars.index(atom)]))
        elif index < 0 and (sources := given(body, atom)):
            stack += sources
        else:
            return False
    return len(found) == 1


def _is_grown(body: Body, value: Any) -> bool:
    """Whether arithmetic makes a value of arrays of half its size, and of bits."""
    size = math.prod(value.aval.shape)
    stack, seen = [(body, value)], set[tuple[Body, Any]]()
    while stack:
        body, atom = stack.pop()
        if hasattr(atom, "val") or 2 * math.prod(atom.aval.shape) <= size:
            continue
        if (body, atom) in seen or atom.aval.dtype == np.bool_:
            continue
        seen.add((body, atom))
        for inner, index in makers(body, atom):
            eqn = inner.eqns[index] if index >= 0 else None
            if eqn is None or eqn.primitive.name not in _GROWS:
                return False
            stack += [(inner, v) for v in eqn.invars]
    return True


def _is_same_on_gpus(eqn: Any) -> bool:
    return eqn.primitive is BY_DEVICE and not has_branch(eqn, GPU)


def _times_one(x: Any) -> Any:
    one = lax.optimization_barrier(np.ones((), x.dtype))
    return [x * lax.broadcast(one, x.shape)]
