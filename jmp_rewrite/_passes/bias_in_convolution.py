"""Biases and residual streams that cuDNN adds inside of a convolution."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
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
from jmp_rewrite._passes.program import CASTS, ROUNDING

# What may stand between a convolution and its bias: a view of all of it.
_VIEWS = frozenset({"copy", "expand_dims", "reshape", "squeeze", "transpose"})


def bias_in_convolution(editor: Editor) -> None:
    """A bias is added in half precision to a convolution's result, inside of it.

    cuDNN adds a bias to what it has accumulated in float32, before that is rounded, but
    only one of the result's own type. A bias that is added in float32 is a kernel of
    its own, which writes the sum beside the result, and in float32 if several kernels
    read it. So it is with a residual stream that the result is added to, if the sum is
    stored in half, as the stream is. A rectifier behind a bias is computed there as
    well. Convolutions in groups take neither.

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
            _add_inside(editor, body, eqn)


def _add_inside(editor: Editor, body: Body, conv: Any) -> None:
    read = _half_result(body, conv, editor.half)
    if read is None:
        return
    half, wide = read
    found = _biased(editor, body, conv, wide)
    total, bias = found or (wide, None)
    streamed = _streamed(editor, body, total)
    if streamed is not None:
        _add_stream(editor, body, half, bias, *streamed)
    elif found is not None:
        _add_bias(editor, body, total, half, bias)


def _half_result(body: Body, conv: Any, half: np.dtype) -> tuple[Any, Any] | None:
    """Returns a convolution's half result, and the float32 that alone is read of it."""
    (var,) = conv.outvars
    reader = only_reader(body, var, GPU)
    while reader is not None and body.eqns[reader[0]].primitive.name in _VIEWS:
        (var,) = body.eqns[reader[0]].outvars
        reader = only_reader(body, var, GPU)
    if reader is None or not is_widening(body.eqns[reader[0]], half):
        return None
    return var, body.eqns[reader[0]].outvars[0]


def _added(editor: Editor, body: Body, wide: Any) -> tuple[Any, Any] | None:
    """Returns the sum that alone reads a value, and what is added there."""
    reader = only_reader(body, wide, GPU)
    if reader is None or body.eqns[reader[0]].primitive.name != "add":
        return None
    index, read = reader
    (total,) = body.eqns[index].outvars
    if editor.is_asked(body, index) or editor.was_here(body, total):
        return None
    (other,) = (v for v in body.eqns[index].invars if v is not read)
    return total, other


def _biased(editor: Editor, body: Body, conv: Any, wide: Any) -> tuple[Any, Any] | None:
    """Returns the sum of a convolution's result and its bias, and the bias."""
    found = _added(editor, body, wide)
    if found is None:
        return None
    total, bias = found
    (result,) = conv.outvars
    features = result.aval.shape[conv.params["dimension_numbers"].out_spec[1]]
    small, _ = _spread(body, bias)
    is_bias = is_float32(bias) and 1 < math.prod(small.aval.shape) <= features
    return (total, bias) if is_bias else None


def _streamed(editor: Editor, body: Body, wide: Any) -> tuple[list[Any], Any] | None:
    """Returns the half casts of a sum with a half value of its size, and that value.

    They are all that is read of the sum.
    """
    reader = only_reader(body, wide, GPU)
    while reader is not None and body.eqns[reader[0]].primitive.name in CASTS:
        (wide,) = body.eqns[reader[0]].outvars
        reader = only_reader(body, wide, GPU)
    found = _added(editor, body, wide)
    if found is None:
        return None
    total, other = found
    if total.aval.shape != wide.aval.shape:  # it is spread over the stream
        return None
    cast = body.made_by(other, "convert_element_type")
    if cast is None or not is_widening(cast, editor.half):
        return None
    (stream,) = cast.invars
    rounded = _roundings(body, total, CASTS)
    if stream.aval.shape != total.aval.shape or len(rounded) != len(body.reads(total)):
        return None
    return (rounded, stream) if rounded else None


def _roundings(
    body: Body, var: Any, names: frozenset[str] = frozenset({ROUNDING})
) -> list[Any]:
    """Returns the results of the casts of these names that read a value."""
    readers = (body.eqns[at] for at, _ in body.reads(var) if at >= 0)
    return [eqn.outvars[0] for eqn in readers if eqn.primitive.name in names]


def _spread(body: Body, bias: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a bias, and shape and dimensions if it is broadcast, maybe in steps."""
    shape: tuple[int, ...] | None = None
    dimensions: tuple[int, ...] = tuple(range(bias.aval.ndim))
    while (source := body.made_by(bias, "broadcast_in_dim")) is not None:
        shape = shape or source.params["shape"]
        inner = source.params["broadcast_dimensions"]
        dimensions = tuple(dimensions[d] for d in inner)
        bias = source.invars[0]
    return bias, () if shape is None else (shape, dimensions)


def _add_stream(
    editor: Editor, body: Body, half: Any, bias: Any, rounded: list[Any], stream: Any
) -> None:
    operands, spread = [half, stream], ()
    if bias is not None:
        bias, spread = _spread(body, bias)
        operands.insert(1, bias)
    for var in rounded:
        branches = {Where((GPU,)): _sum}
        editor.choose_instead(body, var, operands, branches, spread=spread)


def _add_bias(editor: Editor, body: Body, total: Any, half: Any, bias: Any) -> None:
    bias, spread = _spread(body, bias)
    rounded = _roundings(body, total)
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


def _within(bias: Any, dtype: np.dtype) -> Any:
    """Returns a bias without what a dtype cannot hold: a mask of -1e9 is no infinity.

    It is half the largest number, so that no sum with an activation is one.
    """
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    inside = lax.clamp(-largest, bias, largest)
    is_mask = lax.is_finite(bias) & (inside != bias)
    return lax.select(is_mask, inside / 2, bias)


def _sum(stored: Any, half: Any, *added: Any, spread: tuple[Any, ...]) -> Any:
    total = half
    for value in added:
        if value.dtype != half.dtype:
            value = _compat.convert(_within(value, half.dtype), half.dtype)
        if spread and value.shape != half.shape:
            value = lax.broadcast_in_dim(value, *spread)
        total = lax.add(total, value)
    return [_compat.convert(total, stored.dtype)]
