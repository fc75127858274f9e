"""Casts: to half, to half without making infinities, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from jax import lax

from jmp_rewrite import _compat


def narrow(x: Any, dtype: np.dtype, saturate: bool) -> Any:
    """Rounds a float32 array to half.

    Args:
      x: f32[...].
      dtype: the compute dtype.
      saturate: whether a finite number beyond the range becomes the largest finite
        one instead of an infinity. Infinities and NaN stay what they are. Its
        derivative, and its transpose, are plain casts.
    """
    if saturate:
        return _SATURATING_CAST.bind(x, dtype=dtype)
    return _compat.convert(x, dtype)


def _saturated(x: Any, *, dtype: np.dtype) -> Any:
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    inside = lax.clamp(-largest, x, largest)
    return _compat.convert(lax.select(lax.is_finite(x), inside, x), dtype)


_SATURATING_CAST = _compat.cast_primitive("saturating_cast", _saturated)


def scalar(number: Any, dtype: np.dtype) -> np.ndarray:
    """Returns a known number as a half scalar, saturated."""
    limits = ml_dtypes.finfo(dtype)
    value = np.asarray(number, np.float32).reshape(())
    if np.isfinite(value):
        value = np.clip(value, np.float32(limits.min), np.float32(limits.max))
    return value.astype(dtype)
