"""The exponential of a softmax, from the quotient that is stored."""

from __future__ import annotations

from typing import Any

from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import GPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import (
    FLOAT32,
    feeding,
    is_float32,
    is_half_product,
    is_no_product,
    is_widening,
    uses,
    widened,
)
from jmp_rewrite._passes.program import CASTS
from jmp_rewrite._passes.read_before_rounding import is_read_widened
from jmp_rewrite._passes.recompute_activations import half_of, late_reads, origin_of
from jmp_rewrite._rules import EXACT


def softmax_from_quotient(editor: Editor) -> None:
    """A softmax's derivative reads its quotient times its sum, not the exponential.

    A forward pass reads the exponential twice, in the sum and in the quotient, and
    XLA:GPU computes it twice if nothing else wants it. A derivative does; but a matrix
    multiplication reads the quotient, so that is stored. Of another divisor the product
    need not be the exponential: it may be infinite where rows are masked. Neither of a
    softmax of parameters, which is exact: its derivative takes off what is common to a
    row of cotangents, and that may be 30 times what is left.

    On NVIDIA GPUs, in whole train steps, for bfloat16: float16 has no numbers for the
    small elements of a row, so that a learned score of -14 got no gradient.

    Gain: GPT-2 17 % less memory on an H200.
    """
    if editor.half.name != "bfloat16":
        return
    for body, index, eqn in editor.find("exp"):
        if editor.is_asked(body, index):
            continue
        quotient = quotient_of(editor, body, index)
        stored = None if quotient is None else multiplied(editor, body, quotient)
        if stored is None:
            continue
        (x,) = eqn.invars
        if not is_of_product(body, x):
            continue
        half = half_of(body, eqn.outvars[0], editor.half)
        if half is not None and not _forward_again(editor, body, half, x):
            continue
        reads = list(late_reads(editor, body, eqn.outvars[0]))
        if any(editor.is_asked(body, at) for at, *_ in reads):
            continue  # what is summed along the softmax adds up to nothing
        divisor = quotient.invars[1]
        chosen: dict[Any, Any] = {}
        for at, position, var in reads:
            if not is_float32(var) or editor.was_here(body, var):
                continue
            if var not in chosen:
                branches = {Where((GPU,)): _multiplied}
                (chosen[var],) = editor.choose(
                    body, at, [var], [stored, divisor], branches
                )
            editor.read(body, at, position, chosen[var])


def is_of_product(body: Body, x: Any) -> bool:
    """Whether a matrix multiplication has made a value."""
    made = feeding([(body, x)], is_no_product)
    makers = ((b, b.maker.get(v, -1)) for b, v in made)
    return any(index >= 0 and not is_no_product(b, index) for b, index in makers)


def quotient_of(editor: Editor, body: Body, index: int) -> Any:
    """Returns the division of an exponential by its sum; None if there is none.

    That is a softmax, and not a loss' logarithm of a sum of exponentials.
    """
    if editor.is_backward(body, index):
        return None
    readers: list[int] = []
    left = [body.eqns[index].outvars[0]]
    while left:
        for at, _ in body.reads(left.pop()):
            if at < 0 or at in body.held:
                return None
            eqn = body.eqns[at]
            if eqn.primitive.name in CASTS:
                left += eqn.outvars
            elif eqn.primitive.name != "by_device":
                readers.append(at)
    forward = {at for at in readers if not editor.is_backward(body, at)}
    divisions = [at for at in forward if body.eqns[at].primitive.name == "div"]
    names = {body.eqns[at].primitive.name for at in forward}
    if len(divisions) != 1 or not names <= {"div", "reduce_sum"}:
        return None
    eqn = body.eqns[divisions[0]]
    numerator, divisor = eqn.invars
    if origin_of(body, numerator) != index or not _is_sum(body, divisor, index):
        return None
    return eqn


def multiplied(editor: Editor, body: Body, quotient: Any) -> Any:
    """Returns a quotient as a matrix multiplication reads it; None if none does."""
    stored = half_of(body, quotient.outvars[0], editor.half)
    places = [] if stored is None else uses(body, stored)
    at = [b.eqns[i] for b, i, _ in places if i >= 0]
    return stored if any(is_half_product(e, editor.half) for e in at) else None


def _is_sum(body: Body, atom: Any, of: int) -> bool:
    """Whether a value is the sum of another one's elements, whatever its shape."""
    while True:
        index = origin_of(body, atom)
        if index < 0:
            return False
        eqn = body.eqns[index]
        if eqn.primitive.name == "reduce_sum":
            return origin_of(body, eqn.invars[0]) == of
        if eqn.primitive.name not in EXACT or len(eqn.invars) != 1:
            return False
        (atom,) = eqn.invars


def _forward_again(editor: Editor, body: Body, half: Any, x: Any) -> bool:
    """Makes a forward pass compute a rounded exponential again; whether it may."""
    readers = [b.eqns[i] for b, i, _ in uses(body, half) if i >= 0]
    if any(is_widening(eqn, editor.half) for eqn in readers):
        if not is_read_widened(body, half, editor.half):
            return False
    for wide in widened(body, half, editor.half):
        if editor.was_here(body, wide):
            continue
        branches, at = {Where((GPU,)): _exponential}, body.maker[wide]
        (again,) = editor.choose(body, at, [wide], [x], branches, after=True)
        for at, position in body.reads(wide):
            if at >= 0 and not editor.is_backward(body, at):
                editor.read(body, at, position, again)
    return True


def _exponential(stored: Any, x: Any) -> Any:
    return [lax.exp(x)]


def _multiplied(stored: Any, quotient: Any, divisor: Any) -> Any:
    quotient = _compat.convert(lax.optimization_barrier(quotient), FLOAT32)
    return [lax.mul(quotient, divisor)]
