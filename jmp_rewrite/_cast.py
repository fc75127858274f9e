"""Casts: to half, to half without making infinities, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax

from jmp_rewrite import _compat


def narrow(x: Any, dtype: np.dtype, saturate: bool, differentiable: bool) -> Any:
    """Rounds a float32 array to half.

    Args:
      x: f32[...].
      dtype: the compute dtype.
      saturate: whether a finite number beyond the range becomes the largest finite
        one instead of an infinity. Infinities and NaN stay what they are.
      differentiable: whether the program may be differentiated afterwards; the
        derivative of the cast is then a cast, saturated or not.
    """
    if not saturate:
        return _compat.convert(x, dtype)
    if differentiable:
        return _saturating(dtype)(x)
    return _saturated(x, dtype)


def _saturated(x: Any, dtype: np.dtype) -> Any:
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    inside = lax.clamp(-largest, x, largest)
    return _compat.convert(lax.select(lax.is_finite(x), inside, x), dtype)


@functools.lru_cache
def _saturating(dtype: np.dtype) -> Any:
    @jax.custom_jvp
    def saturating_cast(x: Any) -> Any:
        return _saturated(x, dtype)

    @saturating_cast.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        (x,), (t,) = primals, tangents
        return saturating_cast(x), _compat.convert(t, dtype)

    return saturating_cast


def scalar(number: Any, dtype: np.dtype) -> np.ndarray:
    """Returns a known number as a half scalar, saturated."""
    limits = ml_dtypes.finfo(dtype)
    value = np.asarray(number, np.float32).reshape(())
    if np.isfinite(value):
        value = np.clip(value, np.float32(limits.min), np.float32(limits.max))
    return value.astype(dtype)
