"""Casts: to half, to half without making infinities, and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
from jax import lax

from jmp_rewrite import _compat


def narrow(x: Any, dtype: np.dtype, saturate: bool = False) -> Any:
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


def rounded(x: Any, dtype: np.dtype, saturate: bool) -> Any:
    """Rounds a result where it is computed, once for all that reads it.

    Passes tell it from other casts; in the end it is one of `narrow`.

    Args:
      x: f32[...].
      dtype: the compute dtype.
      saturate: as of `narrow`.
    """
    into = _SATURATING_CAST if saturate else None
    return _ROUNDING.bind(x, dtype=dtype, into=into)


def _narrowed(x: Any, *, dtype: np.dtype, into: Any) -> Any:
    return narrow(x, dtype, into is not None)


_ROUNDING = _compat.cast_primitive("rounding", _narrowed)


def scalar(number: float, dtype: np.dtype) -> np.ndarray:
    """Returns a known number as a half scalar, saturated."""
    return _scalar(number, math.copysign(1.0, number), dtype)  # 0.0 == -0.0


@functools.lru_cache(maxsize=4096)
def _scalar(number: float, _: float, dtype: np.dtype) -> np.ndarray:
    largest = float(ml_dtypes.finfo(dtype).max)
    if math.isfinite(number):
        number = min(max(number, -largest), largest)
    return np.asarray(number, np.float32).astype(dtype)
