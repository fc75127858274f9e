"""Roundings that XLA:GPU would drop."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite._passes.by_device import GPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import feeding, is_widening
from jmp_rewrite._passes.program import ROUNDING
from jmp_rewrite._rules import EXACT


def keep_rounding(editor: Editor) -> None:
    """A value that was rounded to be stored is read as it was rounded.

    XLA:GPU drops casts float32 -> half -> float32 between two kernels, and then writes
    the value in float32, often beside its half copy (openxla/xla#41605). A product with
    a 1 that the compiler does not know to be one is exact, and fused.

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
        if (body, out) in read and not editor.was_here(body, out):
            branches = {Where((GPU,)): _times_one}
            (kept,) = editor.choose(body, index, [out], [], branches, after=True)
            editor.read_instead(body, out, kept)


def _times_one(x: Any) -> Any:
    one = lax.optimization_barrier(np.ones((), x.dtype))
    return [x * lax.broadcast(one, x.shape)]
