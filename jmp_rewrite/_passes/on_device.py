"""Values that a program reads in another way on one kind of device.

Compilers differ in what they fuse and what they write. A rewritten program is one text
for all of them; these primitives choose where it is lowered, for a device, what is
read. A program for several platforms at once is for none, and reads what most do.
"""

from __future__ import annotations

from typing import Any

import jax
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


def apart(x: Any) -> Any:
    """Returns a value from which no compiler knows what else was computed of it."""
    return lax.optimization_barrier(x)


def kept(x: Any) -> Any:
    """Returns a partial sum that XLA:TPU does not merge with the sum of it.

    It would take both for sums of the same value, and read that once for each.
    """
    return restore(x, lax.optimization_barrier(x), ("tpu",))
