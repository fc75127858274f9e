"""Values that a program reads in another way on one kind of device.

Compilers differ in what they fuse and what they write. A rewritten program is one text
for all of them; these primitives choose where it is lowered, for a device, what is
read. A program for several platforms at once is for none, and reads what most do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jmp_rewrite import _compat

# Devices: platforms, and generations of TPUs.
CPU, GPU, TPU_V5E, TPU_V6E = "cpu", "cuda", "TPU v5 lite", "TPU v6 lite"


def _reading_primitive(name: str, differentiated: int) -> jex.Primitive:
    """Makes what reads one of two values, by device.

    Args:
      name: of the primitive.
      differentiated: which of the two its derivative is that of, on all devices.
    """
    primitive = jex.Primitive(name)

    def batched(operands: Any, axes: Any, *, on: tuple[str, ...]) -> Any:
        fronts = jax.vmap(lambda *xs: xs, axes)(*operands)
        return primitive.bind(*fronts, on=on), 0

    def jvp(primals: Any, tangents: Any, *, on: tuple[str, ...]) -> Any:
        return primitive.bind(*primals, on=on), tangents[differentiated]

    def lower(ctx: Any, stored: Any, again: Any, *, on: tuple[str, ...]) -> Any:
        return [again if _compat.is_for(ctx.module_context, on) else stored]

    def run(stored: Any, again: Any, *, on: tuple[str, ...]) -> Any:
        return again if jax.default_backend() in on else stored

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda stored, again, on: again)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, lower)
    return primitive


_RESTORE = _reading_primitive("restore", 1)


def restore(stored: Any, again: Any, on: tuple[str, ...]) -> Any:
    """Reads a value that was stored, or on some devices computes it again.

    Where a compiler computes a value again in each kernel that reads it, storing it
    rounded costs digits and saves nothing; where it stores the value, rounding halves
    it. Which of the two is faster is not the same on all devices.

    Args:
      stored: [...]; what is read on most devices, and wherever a program is for several
        platforms.
      again: [...] of the same dtype; what is read on some.
      on: platforms, as "cuda", and generations of TPUs, as "TPU v5 lite".
    """
    return _RESTORE.bind(stored, again, on=on)


class SumLayout(NamedTuple):
    """How a sum over features is taken of the product of two arrays.

    Attributes:
      order: the dimensions of the second array, in the order of those of the first.
      features: those of the first that are summed over.
      rows: the order of the others in the result.
      keys: of each factor the dimensions along which all its numbers are the same.
      factors: of each factor the order of its others; empty for a number.
      divides: whether it is a divisor.
      number: another factor.
    """

    order: tuple[int, ...]
    features: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    factors: tuple[tuple[int, ...], ...]
    divides: tuple[bool, ...]
    number: float


def _feature_sum_primitive() -> jex.Primitive:
    """Makes what reads a sum; a TPU takes another one, which is equal, instead."""
    primitive = jex.Primitive("feature_sum")

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), tangents[0]

    def instead(
        stored: Any, first: Any, second: Any, *factors: Any, layout: SumLayout
    ) -> Any:
        second = lax.transpose(_compat.convert(second, np.float32), layout.order)
        terms = lax.mul(_compat.convert(first, np.float32), second)
        total = lax.reduce_sum(terms, layout.features)
        total = lax.transpose(total, layout.rows)
        if layout.number != 1:
            total = total * np.float32(layout.number)
        how = zip(layout.keys, layout.factors, layout.divides, strict=True)
        for x, (keys, order, divides) in zip(factors, how, strict=True):
            for dim in reversed(keys):
                x = lax.index_in_dim(x, 0, dim, keepdims=False)
            x = lax.transpose(x, order) if order else x
            x = x if x.dtype == np.float32 else _compat.convert(x, np.float32)
            total = total / x if divides else total * x
        return total

    primitive.def_impl(lambda stored, *operands, layout: stored)
    primitive.def_abstract_eval(lambda stored, *operands, layout: stored)
    ad.primitive_jvps[primitive] = jvp
    # Mapped over, the dimensions lie elsewhere.
    batching.primitive_batchers[primitive] = lambda xs, axes, *, layout: (
        xs[0],
        axes[0],
    )
    on_tpu = mlir.lower_fun(instead, multiple_results=False)

    def lower(ctx: Any, stored: Any, *operands: Any, layout: SumLayout) -> Any:
        if not _compat.is_for(ctx.module_context, ("tpu",)):
            return [stored]
        return on_tpu(ctx, stored, *operands, layout=layout)

    mlir.register_lowering(primitive, lower)
    return primitive


_FEATURE_SUM = _feature_sum_primitive()


def feature_sum(
    stored: Any, first: Any, second: Any, factors: Sequence[Any], layout: SumLayout
) -> Any:
    """Reads a sum; on TPUs, takes one over the features of two arrays instead.

    Args:
      stored: [...]; the sum that is read on other devices.
      first: a half array.
      second: a half array of the same dimensions in another order.
      factors: float32 arrays by which the sum over features is multiplied or divided.
      layout: how their dimensions lie.
    """
    if any(
        _compat.lays_out(jax.typeof(x).sharding)
        for x in (stored, first, second, *factors)
    ):
        return stored
    return _FEATURE_SUM.bind(stored, first, second, *factors, layout=layout)


def apart(x: Any) -> Any:
    """Returns a value from which no compiler knows what else was computed of it."""
    return lax.optimization_barrier(x)


def kept(x: Any) -> Any:
    """Returns a partial sum that XLA:TPU does not merge with the sum of it.

    It would take both for sums of the same value, and read that once for each.
    """
    return restore(x, lax.optimization_barrier(x), ("tpu",))
