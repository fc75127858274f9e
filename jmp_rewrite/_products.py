"""Products and convolutions in half precision, as each platform is fast at them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jmp_rewrite import _compat, _on_device

# XLA:CPU is slow at products that it rounds itself.
_ROUNDS_SLOWLY = jax.__version_info__ < (0, 11)


def _cpu_barrier_primitive() -> jex.Primitive:
    """Makes the identity of many operands that is a barrier where a CPU runs it.

    With `transposed` the first operand is a transpose, and copied there.
    """
    primitive = jex.Primitive("cpu_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, transposed: list(xs))
    primitive.def_abstract_eval(lambda *xs, transposed: list(xs))

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), list(tangents)

    def barrier(*xs: Any, transposed: bool) -> Any:
        first = _copied_transpose(xs[0]) if transposed else xs[0]
        return lax.optimization_barrier([first, *xs[1:]])

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda cts, *_, **params: list(cts)
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (
        primitive.bind(*xs, **params),
        list(axes),
    )
    mlir.register_lowering(primitive, lambda ctx, *xs, transposed: list(xs))
    lowering = mlir.lower_fun(barrier, multiple_results=True)
    mlir.register_lowering(primitive, lowering, platform="cpu")
    return primitive


def _copied_transpose(x: Any) -> Any:
    """Returns a transposed matrix so that XLA copies it.

    A transpose alone, and a barrier behind it, become a view; one that goes through
    three dimensions cannot.
    """
    if x.ndim != 2:  # mapped over
        return x
    columns, rows = x.shape
    halves = lax.reshape(lax.transpose(x, (1, 0)), (2, rows // 2, columns))
    return lax.reshape(lax.transpose(halves, (2, 0, 1)), (columns, rows))


_CPU_BARRIER = _cpu_barrier_primitive()


def _rounded_product_primitive() -> jex.Primitive:
    """Makes what reads a product's float32 result; one GPU rounds it in the product."""
    primitive = jex.Primitive("rounded_product")

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), tangents[2]

    def rounded(
        first: Any, second: Any, out: Any, *, swapped: bool, **params: Any
    ) -> Any:
        if swapped:
            contracting, batch = params["dimension_numbers"]
            params["dimension_numbers"] = (contracting[::-1], batch[::-1])
            first, second = second, first
        half = lax.dot_general(
            first, second, preferred_element_type=first.dtype, **params
        )
        full = _compat.convert(half, out.dtype)
        if not swapped:
            return full
        rows = first.ndim - len(contracting[1])
        return lax.transpose(full, (*range(rows, full.ndim), *range(rows)))

    on_gpu = mlir.lower_fun(rounded, multiple_results=False)

    def lower(ctx: Any, first: Any, second: Any, out: Any, **params: Any) -> Any:
        context = ctx.module_context
        if not _compat.is_for(
            context, (_on_device.GPU,)
        ) or not _compat.is_for_one_device(context):
            return [out]
        return on_gpu(ctx, first, second, out, **params)

    primitive.def_impl(lambda first, second, out, **params: out)
    primitive.def_abstract_eval(lambda first, second, out, **params: out)
    ad.primitive_jvps[primitive] = jvp
    # Mapped over, the product is another one; its result is not rounded.
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (xs[2], axes[2])
    mlir.register_lowering(primitive, lower)
    return primitive


_ROUNDED_PRODUCT = _rounded_product_primitive()


def shielded_product(
    eqn: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    half_on_gpu: bool = False,
    swapped: bool = False,
) -> list[Any]:
    """Emits a bfloat16 product with a float32 result so that XLA:CPU can run it.

    With `half_on_gpu` it is rounded where the program is one for a single NVIDIA GPU: a
    weight gradient is written, and read by the optimizer, in half as many bytes, as it
    is by hand. Several devices add up what each of them computes, in float32. If it is
    transposed where it is read, it is `swapped` there: XLA:GPU folds no transpose into
    a product behind a cast, and moves it behind the optimizer's arithmetic instead.

    XLA:CPU folds transposes into products after it has chosen a kernel, and has none
    for what comes out ("Unsupported element type for DotThunk::Execute: BF16 x BF16 =
    F32", JAX 0.10.2 to 0.12.0). A barrier keeps the operands from it, on the CPU only;
    rounding to float32's own format, which is no rounding, keeps the result.
    """
    operands, params = _shielded(operands, params)
    (out,) = _compat.bind(eqn, operands, params)
    out = lax.reduce_precision(out, exponent_bits=8, mantissa_bits=23)
    if half_on_gpu and eqn.primitive.name == "dot_general":
        rest = _without_result(params)
        out = _ROUNDED_PRODUCT.bind(*operands, out, swapped=swapped, **rest)
    return [out]


def _shielded(
    operands: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    operands, params = _batch_first(operands, params)
    operands, params, transposed = _rows_by_columns(operands, params)
    # A dimension that is sharded in the type (`AxisType.Explicit`) cannot be split.
    spec = jax.typeof(operands[0]).sharding.spec
    transposed = transposed and all(axis is None for axis in spec)
    return _CPU_BARRIER.bind(*operands, transposed=transposed), params


def _without_result(params: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in params.items() if k != "preferred_element_type"}


def _cpu_product_primitive() -> jex.Primitive:
    """Makes what reads a product's half result; a CPU rounds a float32 one instead."""
    primitive = jex.Primitive("cpu_product")

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), tangents[2]

    def rounded(first: Any, second: Any, out: Any, **params: Any) -> Any:
        operands, params = _shielded([first, second], params)
        params = dict(params, preferred_element_type=np.float32)
        full = lax.dot_general(*operands, **params)
        full = lax.reduce_precision(full, exponent_bits=8, mantissa_bits=23)
        return _compat.convert(full, out.dtype)

    primitive.def_impl(lambda first, second, out, **params: out)
    primitive.def_abstract_eval(lambda first, second, out, **params: out)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda ct, *_, **params: [None, None, ct]
    # Mapped over, the product is another one.
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (xs[2], axes[2])
    mlir.register_lowering(primitive, lambda ctx, first, second, out, **params: [out])
    on_cpu = mlir.lower_fun(rounded, multiple_results=False)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


_CPU_PRODUCT = _cpu_product_primitive()


def half_product(
    eqn: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Emits a product of half operands with a half result, in a whole train step.

    XLA:CPU of JAX 0.10 has its fast bfloat16 kernels for float32 results alone: 240
    GFLOP/s on two cores, 1100 with a result that is rounded behind the product.
    """
    outs = _compat.bind(eqn, operands, params)
    if not _ROUNDS_SLOWLY or eqn.primitive.name != "dot_general":
        return outs
    if any(x.dtype != "bfloat16" for x in operands):
        return outs
    return [_CPU_PRODUCT.bind(*operands, *outs, **_without_result(params))]


def _full_convolution_primitive() -> jex.Primitive:
    """Makes a call of one convolution of half operands with a float32 result."""
    primitive = jex.Primitive("full_convolution")

    def run(*operands: Any, jaxpr: Any) -> Any:
        (out,) = jex.jaxpr_as_fun(jaxpr)(*operands)
        return out

    def rounded(*operands: Any, jaxpr: Any) -> Any:
        (eqn,) = _compat.open_jaxpr(jaxpr).eqns
        params = dict(eqn.params, preferred_element_type=operands[0].dtype)
        (out,) = _compat.bind(eqn, operands, params)
        return _compat.convert(out, np.float32)

    def batched(operands: Any, axes: Any, *, jaxpr: Any) -> Any:
        return jax.vmap(functools.partial(run, jaxpr=jaxpr), axes)(*operands), 0

    def jvp(primals: Any, tangents: Any, *, jaxpr: Any) -> Any:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(run, jaxpr=jaxpr), primals, tangents)

    primitive.def_impl(jax.jit(run, static_argnames="jaxpr"))
    primitive.def_abstract_eval(lambda *operands, jaxpr: jaxpr.out_avals[0])
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    on_gpu = mlir.lower_fun(rounded, multiple_results=False)
    mlir.register_lowering(primitive, on_gpu, platform="cuda")
    return primitive


_FULL_CONVOLUTION = _full_convolution_primitive()


def _batch_first(
    operands: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Moves batch dimensions to the front of a product's operands.

    XLA does it as well, by transposes that it folds, on the wrong side of the barrier.
    """
    if "dimension_numbers" not in params:  # a ragged product
        return list(operands), params
    contracting, batch = params["dimension_numbers"]
    moved, numbers = [], []
    for x, dims, front in zip(operands, contracting, batch, strict=True):
        order = [*front, *(d for d in range(x.ndim) if d not in front)]
        moved.append(x if order == sorted(order) else lax.transpose(x, order))
        numbers.append(tuple(order.index(d) for d in dims))
    leading = tuple(range(len(batch[0])))
    dims = (tuple(numbers), (leading, leading))
    return moved, dict(params, dimension_numbers=dims)


def _rows_by_columns(
    operands: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], bool]:
    """Transposes the first of two matrices that are multiplied along their columns.

    Every weight gradient of a layer on matrices is such a product. XLA:CPU has no
    bfloat16 kernel for it and takes the float32 one, a third as fast (JAX 0.10.2 to
    0.12.0), unless the transpose is a copy. Elsewhere it is a part of the product.
    """
    first, second = operands
    if (
        params.get("dimension_numbers") != (((0,), (0,)), ((), ()))
        or (first.ndim, second.ndim) != (2, 2)
        or not isinstance(first.shape[0], int)  # a symbol, in an exported program
        or first.shape[0] % 2
    ):
        return list(operands), params, False
    dims = (((1,), (0,)), ((), ()))
    params = dict(params, dimension_numbers=dims)
    return [lax.transpose(first, (1, 0)), second], params, True


def full_convolution(
    eqn: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Emits a convolution of half operands with a float32 result.

    cuDNN has none: XLA:GPU casts the operands back to float32, and reads and multiplies
    those. There the result is rounded to half instead.
    """
    jaxpr = jax.make_jaxpr(lambda *xs: _compat.bind(eqn, xs, params))(*operands)
    return [_FULL_CONVOLUTION.bind(*operands, jaxpr=jaxpr)]
