"""The maximum of a softmax, in the kernel of the rest of it."""

from __future__ import annotations

from typing import Any

from jax import lax

from jmp_rewrite._passes.by_device import TPU_V5E, TPU_V6E, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import is_half_product, is_widening, makers
from jmp_rewrite._passes.softmax_from_quotient import quotient_of


def softmax_in_one_kernel(editor: Editor) -> None:
    """The cast of a softmax's argument stays in front of its maximum.

    XLA:TPU moves the cast of a product's half result behind a maximum, no longer finds
    the same value under the maximum and the difference, and makes two kernels of the
    softmax. It moves no cast over a rounding, and to float32's own format that is none.
    A loss' logarithm of a sum of exponentials is left alone: of so many logits XLA
    would store the cast.

    On TPUs v5e and v6e.

    Gain: one kernel for two in each attention.
    """
    for body, _, eqn in editor.find("reduce_max"):
        widening = body.made_by(eqn.invars[0])
        if not is_widening(widening, editor.half):
            continue
        var = eqn.invars[0]
        if editor.was_here(body, var):
            continue
        if not _is_softmax(editor, body, var):
            continue
        made = makers(body, widening.invars[0])
        if all(_is_product(editor, *place) for place in made):
            branches = {Where((TPU_V5E, TPU_V6E)): _to_float32}
            editor.choose_instead(
                body, var, [], branches, forward_only=not editor.whole_step
            )


def _is_softmax(editor: Editor, body: Body, var: Any) -> bool:
    """Whether exponentials of a value less its maximum are divided by their sum."""
    left = [i for i, _ in body.reads(var) if i >= 0 and _names(body, i, "sub")]
    exponentials = (
        i
        for at in left
        for i, _ in body.reads(body.eqns[at].outvars[0])
        if i >= 0 and _names(body, i, "exp")
    )
    return any(quotient_of(editor, body, i) is not None for i in exponentials)


def _names(body: Body, index: int, name: str) -> bool:
    return bool(body.eqns[index].primitive.name == name)


def _is_product(editor: Editor, body: Body, index: int) -> bool:
    return index >= 0 and is_half_product(body.eqns[index], editor.half)


def _to_float32(x: Any) -> Any:
    return [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)]
