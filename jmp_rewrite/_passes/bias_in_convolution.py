"""Biases that cuDNN adds inside of a convolution."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import GPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import (
    is_float32,
    is_half_product,
    is_widening,
    makers,
    number_of,
    only_reader,
)
from jmp_rewrite._passes.program import ROUNDING

# What may stand between a convolution and its bias: a view of all of it.
_VIEWS = frozenset({"copy", "expand_dims", "reshape", "squeeze", "transpose"})


def bias_in_convolution(editor: Editor) -> None:
    """A bias is added in half precision to a convolution's result, inside of it.

    cuDNN adds a bias to what it has accumulated in float32, before that is rounded, but
    only one of the result's own type. A bias that is added in float32 is a kernel of
    its own, which writes the sum beside the result, and in float32 if several kernels
    read it. A rectifier behind it is computed there as well. Convolutions in groups
    take no bias.

    On NVIDIA GPUs.

    Gain: a double DQN writes 15 % fewer bytes on an H200, proximal policy optimization
    13 %, a flow of convolutions 30 % with 25 % less memory.
    """
    for body, _, eqn in editor.find("conv_general_dilated"):
        if eqn.params["feature_group_count"] > 1 or eqn.outvars[0].aval.ndim < 4:
            continue
        if (
            is_half_product(eqn, editor.half)
            and eqn.outvars[0].aval.dtype == editor.half
        ):
            found = _biased(editor, body, eqn)
            if found is not None:
                _add_inside(editor, body, *found)


def _biased(editor: Editor, body: Body, conv: Any) -> tuple[Any, Any, Any] | None:
    """Returns the sum that alone reads a convolution, its half operand, and bias."""
    (half,) = conv.outvars
    dimension = conv.params["dimension_numbers"].out_spec[1]
    features = half.aval.shape[dimension]
    reader = only_reader(body, half, GPU)
    while reader is not None and body.eqns[reader[0]].primitive.name in _VIEWS:
        (half,) = body.eqns[reader[0]].outvars
        reader = only_reader(body, half, GPU)
    if reader is None or not is_widening(body.eqns[reader[0]], editor.half):
        return None
    reader = only_reader(body, body.eqns[reader[0]].outvars[0], GPU)
    if reader is None or body.eqns[reader[0]].primitive.name != "add":
        return None
    index, wide = reader
    (total,) = body.eqns[index].outvars
    if editor.is_asked(body, index) or editor.was_here(body, total):
        return None
    (bias,) = (v for v in body.eqns[index].invars if v is not wide)
    source = body.made_by(bias, "broadcast_in_dim")
    small = bias if source is None else source.invars[0]
    is_bias = is_float32(bias) and 1 < math.prod(small.aval.shape) <= features
    return (total, half, bias) if is_bias else None


def _add_inside(editor: Editor, body: Body, total: Any, half: Any, bias: Any) -> None:
    source = body.made_by(bias, "broadcast_in_dim")
    spread: tuple[Any, ...] = ()
    if source is not None:
        bias = source.invars[0]
        spread = source.params["shape"], source.params["broadcast_dimensions"]
    rounded = [
        body.eqns[at].outvars[0]
        for at, _ in body.reads(total)
        if at >= 0 and body.eqns[at].primitive.name == ROUNDING
    ]
    for var in (total, *rounded):
        branches = {Where((GPU,)): _sum}
        editor.choose_instead(body, var, [half, bias], branches, spread=spread)
    if rounded and only_reader(body, total, GPU) is not None:
        _keep_rectified(editor, body, rounded[0])


def _keep_rectified(editor: Editor, body: Body, total: Any) -> None:
    """Keeps XLA from asking a sum for the sign that its rectifier tells as well.

    A rectifier that alone reads the sum is a part of the convolution, and the sum is
    stored no more.
    """
    reader = only_reader(body, total, GPU)
    if reader is None:
        return
    eqn = body.eqns[reader[0]]
    if len(eqn.outvars) != 1:
        return
    (var,) = eqn.outvars
    ((inner, at), *others) = makers(body, var)
    if others or at < 0 or inner.eqns[at].primitive.name != "max":
        return
    if any(number_of(inner, v) == 0 for v in inner.eqns[at].invars):
        branches = {Where((GPU,)): _apart}
        editor.choose_instead(body, var, [], branches)


def _apart(x: Any) -> Any:
    return [lax.optimization_barrier(x)]


def _sum(stored: Any, half: Any, bias: Any, *, spread: tuple[Any, ...]) -> Any:
    bias = _compat.convert(bias, half.dtype)
    if spread:
        bias = lax.broadcast_in_dim(bias, *spread)
    return [_compat.convert(lax.add(half, bias), stored.dtype)]
