"""Roundings of weights that XLA:CPU would drop in front of a convolution."""

from __future__ import annotations

from typing import Any

from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import CPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import feeding, is_float, is_half_product, makers
from jmp_rewrite._rules import EXACT


def cpu_convolutions(editor: Editor) -> None:
    """A convolution reads its weights as they were rounded.

    XLA:CPU has no convolution of bfloat16 operands: it casts them to float32. A
    rounding in front of that is dropped where all is one kernel of YNNPACK,
    which then reads float32 weights unrounded, while those that are stored in half give
    other results. `reduce_precision` keeps the rounding of what the program is given.
    What it computes stays as exact as XLA leaves it, and so do the weights of a whole
    step, which nobody stores.

    On CPUs, for bfloat16.

    Gain: results of a CNN with stored weights are those of the decorated function to
    the last bit (without: a difference of 0.2 %).
    """
    if editor.whole_step or editor.half.name != "bfloat16":
        return
    operands = [
        (body, v)
        for body, _, eqn in editor.find("conv_general_dilated")
        if is_half_product(eqn, editor.half)
        for v in eqn.invars
    ]
    read = feeding(operands, _moves)
    for body, _, eqn in editor.find("convert_element_type"):
        (x,), (out,) = eqn.invars, eqn.outvars
        is_read = out.aval.dtype == editor.half and (body, out) in read
        if not is_read or not _is_given(body, x) or editor.was_here(body, out):
            continue
        branches = {Where((CPU,)): _reduced}
        editor.choose_instead(body, out, [x], branches)


def _moves(body: Body, index: int) -> bool:
    return body.eqns[index].primitive.name in EXACT


def _is_given(body: Body, atom: Any) -> bool:
    """Whether elements of a value are elements of an argument, or of a carry."""
    seen: set[tuple[Body, Any]] = set()
    stack = [(body, atom)]
    while stack:
        place, var = stack.pop()
        if hasattr(var, "val") or not is_float(var) or (place, var) in seen:
            continue
        seen.add((place, var))
        for inner, index in makers(place, var):
            if index < 0:
                return True
            if _moves(inner, index):
                stack += [(inner, v) for v in inner.eqns[index].invars]
    return False


def _reduced(stored: Any, exact: Any) -> Any:
    """Rounds in float32, by what compilers take for no cast."""
    rounded = lax.reduce_precision(exact, exponent_bits=8, mantissa_bits=7)
    return [_compat.convert(rounded, stored.dtype)]
