"""Casts: to half, to half without making infinities, and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

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


def after_cast(x: Any, sharding: Any) -> Any:
    """Keeps a sharding constraint on a cast weight from being moved to the weight.

    XLA's partitioners give a constraint's operand the constraint's sharding where it
    has none of its own, as the result of a cast has. A weight that is sharded (FSDP)
    would then be gathered in float32 and cast after that: twice the bytes
    (jax-ml/jax#23543). A constraint that leaves everything open is one of its own.

    Args:
      x: the cast weight.
      sharding: what the program asks for.
    """
    if not isinstance(sharding, NamedSharding):
        return x
    if sharding.memory_kind not in (None, "device"):  # it is a transfer as well
        return x
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
    return lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))


def _saturated(x: Any, *, dtype: np.dtype) -> Any:
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    inside = lax.clamp(-largest, x, largest)
    return _compat.convert(lax.select(lax.is_finite(x), inside, x), dtype)


_SATURATING_CAST = _compat.cast_primitive("saturating_cast", _saturated)


@functools.lru_cache(maxsize=4096)
def scalar(number: float, dtype: np.dtype) -> np.ndarray:
    """Returns a known number as a half scalar, saturated."""
    largest = float(ml_dtypes.finfo(dtype).max)
    if math.isfinite(number):
        number = min(max(number, -largest), largest)
    return np.asarray(number, np.float32).astype(dtype)
