"""Convolutions that accumulate in float32, for cuDNN."""

from __future__ import annotations

from typing import Any

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import GPU, Where
from jmp_rewrite._passes.edit import Editor
from jmp_rewrite._passes.match import is_float32, is_half_product


def cudnn_convolutions(editor: Editor) -> None:
    """A convolution with a float32 result is rounded on GPUs: cuDNN has none.

    XLA:GPU casts half operands back to float32 where the result is float32, and reads
    and multiplies those. The gradients of convolution kernels have float32 results.

    On NVIDIA GPUs.

    Gain: without it every weight gradient of a ResNet-50 is a float32 convolution.
    """
    for body, _, eqn in editor.find("conv_general_dilated"):
        (out,) = eqn.outvars
        if not is_half_product(eqn, editor.half) or not is_float32(out):
            continue
        if editor.was_here(body, out):
            continue
        editor.choose_instead(
            body,
            out,
            eqn.invars,
            {Where((GPU,)): _rounded},
            primitive=eqn.primitive,
            params=tuple(eqn.params.items()),
        )


def _rounded(stored: Any, *operands: Any, primitive: Any, params: Any) -> Any:
    params = dict(params, preferred_element_type=operands[0].dtype)
    return [_compat.convert(primitive.bind(*operands, **params), np.float32)]
