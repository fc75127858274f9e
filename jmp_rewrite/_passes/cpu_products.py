"""Products and convolutions in half precision, as each platform is fast at them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jmp_rewrite import _compat
from jmp_rewrite._passes import on_device

# XLA:CPU is slow at products that it rounds itself.
_ROUNDS_SLOWLY = jax.__version_info__ < (0, 11)


def _cpu_barrier_primitive() -> jex.Primitive:
    """Makes the identity of many operands that is a barrier where a CPU runs it.

    With `transposed` the first operand is a transpose, and copied there, unless devices
    share it: what is split for that may be laid out over them.
    """
    primitive = jex.Primitive("cpu_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, transposed: list(xs))
    primitive.def_abstract_eval(lambda *xs, transposed: list(xs))

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), list(tangents)

    def barrier(*xs: Any, transposed: bool) -> Any:
        first = xs[0]
        if transposed and first.ndim == 2:  # not mapped over
            first = _copied(lax.transpose(first, (1, 0)), (1, 0), 0)
        return lax.optimization_barrier([first, *xs[1:]])

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda cts, *_, **params: list(cts)
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (
        primitive.bind(*xs, **params),
        list(axes),
    )
    mlir.register_lowering(primitive, lambda ctx, *xs, transposed: list(xs))
    on_cpu = mlir.lower_fun(barrier, multiple_results=True)

    def lower(ctx: Any, *xs: Any, transposed: bool) -> Any:
        copied = transposed and _compat.holds_whole_arrays(ctx.module_context)
        return on_cpu(ctx, *xs, transposed=copied)

    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


def _copied(x: Any, order: Sequence[int], split: int) -> Any:
    """Returns an array with its dimensions in another order so that XLA:CPU copies it.

    A transpose alone, and a barrier behind it, become a view; one with a dimension that
    is `split`, which must be even, and put together again behind it, cannot.
    """
    before, size = x.shape[:split], x.shape[split]
    halves = lax.reshape(x, (*before, 2, size // 2, *x.shape[split + 1 :]))
    parts = [(d + (d > split),) if d != split else (d, d + 1) for d in order]
    moved = lax.transpose(halves, [d for part in parts for d in part])
    return lax.reshape(moved, [x.shape[d] for d in order])


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
            context, (on_device.GPU,)
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
    given, is_dot = (operands, params), eqn.primitive.name == "dot_general"
    operands, params = _shielded(operands, params)
    (out,) = _compat.bind(eqn, operands, params)
    out = lax.reduce_precision(out, exponent_bits=8, mantissa_bits=23)
    if is_dot and not _is_of_columns(given[0], given[1]["dimension_numbers"]):
        out = _on_cpu(given[0], out, given[1])
    if half_on_gpu and is_dot:
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


class _Rows(NamedTuple):
    """How a product that contracts the columns of its first operand contracts rows.

    Attributes:
      swapped: whether the second operand comes first, and the result is transposed.
      order: the first one's dimensions, in the order mapped, free, contracted.
      split: the one of them that is split to copy it; None if none has to be moved.
    """

    swapped: bool
    order: tuple[int, ...]
    split: int | None


def _contracts_columns(
    operands: Sequence[Any], dimension_numbers: Any, batch_first: bool
) -> bool:
    """Tells a product that contracts the columns of its first operand.

    XLA:CPU has bfloat16 kernels for products that contract the rows of their first
    operand. It folds a transpose of the last two dimensions into a product and computes
    what comes out number by number, as the gradients of an attention's keys and values
    (JAX 0.10.2 to 0.12.0; 96 of 256 x 256 x 64, two cores: 20 GFLOP/s for 500; float32
    100). If the second operand's dimensions have to be moved as well, JAX 0.12 even
    adds up in bfloat16: over 512 numbers the error is 2.4 % for 0.17 %.

    Args:
      operands: of the product.
      dimension_numbers: of the product.
      batch_first: whether mapped dimensions are moved to the front. Where XLA does
        that, it makes a copy, in the order that is fast.
    """
    (contracted, _), (mapped, _) = dimension_numbers
    free = [
        [d for d in range(x.ndim) if d not in (*dims, *front)]
        for x, dims, front in zip(operands, *dimension_numbers, strict=True)
    ]
    for x, dims in zip(operands, free, strict=True):
        if all(x.shape[d] == 1 for d in dims):
            return False  # a vector
    leads = batch_first or tuple(mapped) == tuple(range(len(mapped)))
    return leads and len(contracted) == len(free[0]) == 1 and contracted[0] < free[0][0]


def _by_rows(operands: Sequence[Any], dimension_numbers: Any) -> _Rows | None:
    """Finds how such a product contracts rows; None if nothing can be copied.

    What is moved is the smaller operand, or the result.
    """
    if not all(isinstance(d, int) for x in operands for d in x.shape):
        return None  # symbols, in an exported program
    if any(_compat.lays_out(jax.typeof(x).sharding) for x in operands):
        return None  # a dimension that is sharded in the type cannot be split
    orders, moves = [], []
    for x, contracted, mapped in zip(operands, *dimension_numbers, strict=True):
        rest = [d for d in range(x.ndim) if d not in mapped]
        free = [d for d in rest if d not in contracted]
        orders.append((*mapped, *free, *contracted))
        moves.append(rest != [*free, *contracted])
    mapped, (first, second) = len(dimension_numbers[1][0]), operands
    columns = math.prod(second.shape[d] for d in orders[1][mapped:-1])
    result = math.prod(first.shape[d] for d in orders[0][:-1]) * columns
    swapped = result + moves[1] * second.size < first.size
    order, x = orders[swapped], operands[swapped]
    if not moves[swapped]:
        return _Rows(swapped, order, None)
    even = [d for d in order[mapped:] if x.shape[d] % 2 == 0]
    return _Rows(swapped, order, even[-1]) if even else None


def _contract_rows(
    operands: Sequence[Any], params: dict[str, Any], how: _Rows, dtype: Any
) -> Any:
    """Computes a product of bfloat16 operands by rows of its first one, on a CPU."""
    contracted, mapped = params["dimension_numbers"]
    if how.swapped:
        operands, contracted, mapped = operands[::-1], contracted[::-1], mapped[::-1]
    head, tail = operands
    batch, rows = len(mapped[0]), head.ndim - len(contracted[0])
    if how.split is not None:
        head = _copied(head, how.order, how.split)
        contracted = (tuple(range(rows, head.ndim)), contracted[1])
        mapped = (tuple(range(batch)), mapped[1])
    numbers = {"dimension_numbers": (contracted, mapped)}
    operands, numbers = _batch_first([head, tail], numbers)
    operands = lax.optimization_barrier(operands)
    params = {**params, **numbers, "preferred_element_type": dtype}
    out = _unfolded(lax.dot_general(*operands, **params))
    if not how.swapped:
        return out
    order = (*range(batch), *range(rows, out.ndim), *range(batch, rows))
    return lax.transpose(out, order)


def _unfolded(out: Any) -> Any:
    """Returns a product's result so that XLA:CPU folds nothing into the product."""
    if out.dtype == np.float32:
        return lax.reduce_precision(out, exponent_bits=8, mantissa_bits=23)
    return lax.optimization_barrier(out)


def _cpu_product_primitive() -> jex.Primitive:
    """Makes what reads a product's result; a CPU computes it as it is fast instead."""
    primitive = jex.Primitive("cpu_product")

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), tangents[2]

    def fast(
        first: Any, second: Any, out: Any, *, rows: _Rows | None, **params: Any
    ) -> Any:
        rounds = _ROUNDS_SLOWLY or rows is None
        dtype = np.dtype(np.float32) if rounds else out.dtype
        if rows is not None:
            product = _contract_rows((first, second), params, rows, dtype)
        else:
            operands, params = _shielded([first, second], params)
            params = dict(params, preferred_element_type=dtype)
            product = _unfolded(lax.dot_general(*operands, **params))
        return product if dtype == out.dtype else _compat.convert(product, out.dtype)

    def batched(xs: Any, axes: Any, *, rows: _Rows | None, **params: Any) -> Any:
        if None in axes[:2]:  # XLA makes a copy of an operand with another dimension
            return xs[2], axes[2]
        *operands, out = map(lambda x, axis: jnp.moveaxis(x, axis, 0), xs, axes)
        contracted, mapped = params["dimension_numbers"]
        contracted = tuple(tuple(d + 1 for d in dims) for dims in contracted)
        mapped = tuple((0, *(d + 1 for d in dims)) for dims in mapped)
        params["dimension_numbers"] = (contracted, mapped)
        return _on_cpu(operands, out, params), 0

    on_cpu = mlir.lower_fun(fast, multiple_results=False)

    def lower(ctx: Any, first: Any, second: Any, out: Any, **params: Any) -> Any:
        if params["rows"] and not _compat.holds_whole_arrays(ctx.module_context):
            params["rows"] = None
        return on_cpu(ctx, first, second, out, **params)

    @functools.cache
    def compiled(params: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    primitive.def_impl(lambda *xs, **params: compiled((*params.items(),))(*xs))
    primitive.def_abstract_eval(lambda first, second, out, **params: out)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda ct, *_, **params: [None, None, ct]
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, lambda ctx, first, second, out, **params: [out])
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


_CPU_PRODUCT = _cpu_product_primitive()


def half_product(
    eqn: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Emits a product of half operands with a half result, in a whole train step.

    XLA:CPU of JAX 0.10 has its fast bfloat16 kernels for float32 results alone: 240
    GFLOP/s on two cores, 1100 with a result that is rounded behind the product. All
    versions have none for products that contract columns (`_contracts_columns`).
    """
    outs = _compat.bind(eqn, operands, params)
    if eqn.primitive.name != "dot_general":
        return outs
    if any(x.dtype != "bfloat16" for x in operands):
        return outs
    return [_on_cpu(operands, out, params) for out in outs]


def _on_cpu(operands: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    """Reads a product; a CPU computes it in another way, where one is faster."""
    numbers, is_full = params["dimension_numbers"], out.dtype == np.float32
    rounds = _ROUNDS_SLOWLY and not is_full
    columns = _contracts_columns(operands, numbers, batch_first=is_full or rounds)
    rows = _by_rows(operands, numbers) if columns else None
    if rows is None and (is_full or not (rounds or columns)):
        return out
    return _CPU_PRODUCT.bind(*operands, out, rows=rows, **_without_result(params))


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
    if not _is_of_columns(operands, params.get("dimension_numbers")):
        return list(operands), params, False
    first, second = operands
    dims = (((1,), (0,)), ((), ()))
    params = dict(params, dimension_numbers=dims)
    return [lax.transpose(first, (1, 0)), second], params, True


def _is_of_columns(operands: Sequence[Any], dimension_numbers: Any) -> bool:
    """Tells two matrices with an even number of rows, multiplied along columns."""
    first, second = operands
    return (
        dimension_numbers == (((0,), (0,)), ((), ()))
        and (first.ndim, second.ndim) == (2, 2)
        and isinstance(first.shape[0], int)  # no symbol, in an exported program
        and first.shape[0] % 2 == 0
    )


def full_convolution(
    eqn: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Emits a convolution of half operands with a float32 result.

    cuDNN has none: XLA:GPU casts the operands back to float32, and reads and multiplies
    those. There the result is rounded to half instead.
    """
    jaxpr = jax.make_jaxpr(lambda *xs: _compat.bind(eqn, xs, params))(*operands)
    return [_FULL_CONVOLUTION.bind(*operands, jaxpr=jaxpr)]
