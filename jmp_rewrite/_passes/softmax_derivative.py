"""What the derivative of a forward function's softmax reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import GPU, TPU, Where, by_device
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import FLOAT32, is_float32
from jmp_rewrite._passes.recompute_activations import origin_of
from jmp_rewrite._passes.softmax_from_quotient import is_of_product
from jmp_rewrite._passes.softmax_rounded import is_multiplied

# A dropout of an attention's weights.
_DROPS = frozenset({"div", "mul", "select_n"})
# These spread sums over what was summed.
_SPREADS = frozenset({"broadcast_in_dim", "expand_dims", "reshape"})


def softmax_derivative(editor: Editor) -> None:
    """The derivative of a forward function's softmax reads its result alone.

    JAX's own derivative reads exponential and quotient as they were computed, and both
    are kept in float32 for a backward pass that whoever differentiates the function
    makes. A matrix multiplication reads the quotient rounded, so GPUs keep that alone.
    TPUs keep the rounded exponential and divide again, as in a whole step. Rounded
    numbers do not add up to 1, so that their sum is divided by: what is common to a row
    of cotangents is taken off exactly. A program that nobody differentiates is as it
    was.

    On all devices, in functions that are no whole train steps, for bfloat16: float16
    has no numbers for the small elements of a row.

    Gain: the gradient of a decorated loss of two blocks of a transformer takes 27 %
    fewer cycles and half the memory on a TPU v5e, a third less memory on an H200.
    """
    if editor.whole_step or editor.half.name != "bfloat16":
        return
    for body, index, eqn in editor.find("div"):
        found = None if editor.is_backward(body, index) else _operand(body, eqn)
        if found is None or editor.is_asked(body, index):
            continue
        x, axes = found
        (out,) = eqn.outvars
        if not is_multiplied(editor, body, out, _DROPS) or not is_of_product(body, x):
            continue
        operands, static = (x, *eqn.invars, out), {"axes": axes, "half": editor.half}
        (same,) = editor.insert(
            body, index, _differentiable, *operands, after=True, **static
        )
        editor.read_instead(body, out, same)


def _operand(body: Body, quotient: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Returns what a softmax is taken of and its axes; None if it is no softmax.

    Each element is divided by the sum of its own row, and by nothing that a user holds
    constant.
    """
    numerator, divisor = quotient.invars
    if not (is_float32(quotient.outvars[0]) and is_float32(numerator)):
        return None
    exponential, total = _maker(body, numerator), _maker(body, divisor)
    spreads: list[Any] = []
    while total is not None and total.primitive.name in _SPREADS:
        spreads.append(total)
        total = _maker(body, total.invars[0])
    if exponential is None or exponential.primitive.name != "exp" or total is None:
        return None
    is_sum = total.primitive.name == "reduce_sum"
    if not is_sum or _maker(body, total.invars[0]) is not exponential:
        return None
    axes = tuple(total.params["axes"])
    shape = exponential.outvars[0].aval.shape
    return (exponential.invars[0], axes) if _is_row(shape, axes, spreads) else None


def _is_row(shape: Sequence[int], axes: Sequence[int], spreads: Sequence[Any]) -> bool:
    """Whether sums over axes are spread over these very axes.

    Args:
      shape: of what is summed.
      axes: of the sums.
      spreads: what spreads them, the last equation first.
    """
    kept = [d for d in range(len(shape)) if d not in axes]
    dims: list[int | None] = [d if shape[d] != 1 else None for d in kept]
    for eqn in reversed(spreads):
        (out,) = eqn.outvars
        new: list[int | None] = [None] * out.aval.ndim
        if eqn.primitive.name == "broadcast_in_dim":
            places = list(eqn.params["broadcast_dimensions"])
        else:
            places = [d for d, size in enumerate(out.aval.shape) if size != 1]
            dims = [d for d in dims if d is not None]
            if len(places) != len(dims):
                return False
        for place, dim in zip(places, dims, strict=True):
            new[place] = dim
        dims = new
    wanted = [d if d in kept and shape[d] != 1 else None for d in range(len(shape))]
    return dims == wanted


def _maker(body: Body, atom: Any) -> Any:
    """Returns the equation that makes a value, before casts and choices of a device."""
    index = origin_of(body, atom)
    return body.eqns[index] if index >= 0 else None


def _differentiable(
    x: Any, numerator: Any, divisor: Any, out: Any, *, axes: tuple[int, ...], half: Any
) -> list[Any]:
    branches = {
        Where((GPU,)): lambda out, *_: [out, _kept(out, half)],
        Where((TPU,)): lambda _, __, *parts: [_divided(parts, half)] * 2,
    }
    choice = by_device([out, out], [numerator, divisor], branches)
    return [_softmax(axes, x, *choice, out)]


def _kept(quotient: Any, half: Any) -> Any:
    """Returns a quotient as the matrix multiplication reads it, and stores it."""
    rounded = lax.optimization_barrier(_compat.convert(quotient, half))
    return _compat.convert(rounded, FLOAT32)


def _divided(parts: Sequence[Any], half: Any) -> Any:
    """Returns the quotient of a rounded exponential."""
    numerator, divisor = parts
    return _compat.convert(_compat.convert(numerator, half), FLOAT32) / divisor


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _softmax(
    axes: tuple[int, ...], x: Any, returned: Any, factor: Any, out: Any
) -> Any:
    """Returns a softmax.

    Args:
      axes: those that it adds up over.
      x: what it is taken of, less its maximum, f32[...].
      returned: it, as a differentiated program reads it, f32[...].
      factor: it, as the derivative reads it, f32[...].
      out: it, as other programs read it, f32[...].
    """
    return out


@_softmax.defjvp
def _rule(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, returned, factor, _ = primals
    change = factor * tangents[0]
    total, whole = (jnp.sum(a, axes, keepdims=True) for a in (change, factor))
    return returned, change - factor * (total / whole)
