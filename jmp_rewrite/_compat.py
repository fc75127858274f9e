"""What differs between the JAX versions that are supported (0.10, 0.11, 0.12).

Every use of a private name stands here, each with the version at which it can go.
The rest of the library sees one JAX.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax, tree_util
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.extend import linear_util as lu
from jax.extend import source_info_util
from jax.extend.core import primitives
from jax.interpreters import ad, batching, mlir

# Devices as `restore` knows them: platforms, and generations of TPUs.
CPU, GPU, TPU_V5E, TPU_V6E = "cpu", "cuda", "TPU v5 lite", "TPU v6 lite"

# JAX < 0.11 tells open from closed jaxprs; later versions have one class.
CLOSED_IS_OPEN = jex.ClosedJaxpr is jex.Jaxpr

# XLA:CPU is slow at products that it rounds itself.
_ROUNDS_SLOWLY = jax.__version_info__ < (0, 11)


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr itself, without its constants."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def constants(jaxpr: Any) -> Sequence[Any]:
    """Returns the values of the constants that a jaxpr carries."""
    return getattr(jaxpr, "consts", ())


def constvars(jaxpr: Any) -> Sequence[Any]:
    """Returns the variables that stand for the constants."""
    return open_jaxpr(jaxpr).constvars


def like(original: Any, closed: Any) -> Any:
    """Gives `closed` the kind, open or closed, that `original` has."""
    if CLOSED_IS_OPEN or hasattr(original, "jaxpr"):  # JAX < 0.11: two kinds
        return closed
    if closed.consts:
        raise ValueError("an open jaxpr cannot hold constants")
    return closed.jaxpr


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and of carries of a `scan` equation."""
    if "num_carry" in params:  # JAX < 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_params(
    params: dict[str, Any], jaxpr: Any, consts: int, carries: int
) -> dict[str, Any]:
    """Returns `scan` parameters for a body with so many constants and carries."""
    new = dict(params, jaxpr=jaxpr)
    if "num_carry" in params:  # JAX < 0.11
        return dict(new, num_consts=consts, num_carry=carries)
    # JAX >= 0.11 keeps the arguments' structure in a private tree type.
    trees = importlib.import_module(type(params["ft_in"]).__module__)
    pack = getattr(trees, "pack", None) or trees.FlatTree.pack
    xs = len(jaxpr.in_avals) - consts - carries
    new["ft_in"] = pack(tuple(_nones(trees, n) for n in (consts, carries, xs)))
    ys = len(jaxpr.out_avals) - carries
    new["ft_out"] = pack(tuple(_nones(trees, n) for n in (carries, ys)))
    return new


def _nones(trees: Any, count: int) -> Any:
    """Returns the private tree of `count` leaves, all None."""
    if hasattr(trees, "nones"):
        return trees.nones(count)
    tree = trees.FlatTree.flatten([0] * count)
    return tree.map(lambda _: None)


def literal_value(literal: Any) -> Any:
    """Returns the value of a literal, a NumPy scalar or array."""
    return literal.val


def scope_elements(name_stack: Any) -> tuple[Any, ...]:
    """Returns the elements of a name stack: scopes and transformations."""
    return name_stack.stack


def is_scope(element: Any) -> bool:
    """Tells a `jax.named_scope` from the mark of a transformation."""
    return type(element).__name__ == "Scope"


def current_name_stack() -> Any:
    """Returns the name scopes that are entered now."""
    return source_info_util.current_name_stack()


def user_context(eqn: Any, outer: Any) -> Any:
    """Returns a context with the equation's name stack and the user's source line."""
    info = eqn.source_info
    return source_info_util.user_context(
        info.traceback, name_stack=outer + info.name_stack
    )


def frames(eqn: Any) -> list[tuple[Any, int]]:
    """Returns the Python frames that made an equation, inner first.

    Each is a code object and the index of an instruction.
    `jax.extend.source_info_util.summarize` shows the innermost frame outside of JAX
    alone, which is often one of another library.
    """
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))


def frame_line(eqn: Any, code: Any, instruction: int) -> int:
    """Returns the number of the source line of one of an equation's frames."""
    return int(type(eqn.source_info.traceback).code_addr2location(code, instruction)[0])


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """Returns a jaxpr, open or closed as it was, with other equations."""
    body = open_jaxpr(jaxpr)
    new = body.replace(eqns=list(eqns))
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)  # JAX < 0.11: two kinds


def with_name_stack(eqn: Any, elements: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns an equation with other name-stack elements and parameters."""
    stack = type(eqn.source_info.name_stack)(tuple(elements))
    info = eqn.source_info.replace(name_stack=stack)
    return eqn.replace(params=params, source_info=info)


def convert(x: Any, dtype: Any, weak_type: bool = False) -> Any:
    """Casts `x` to `dtype`; unlike `lax`, it can also make a weak type."""
    return primitives.convert_element_type_p.bind(
        x, new_dtype=dtype, weak_type=weak_type, sharding=None
    )


def cast_primitive(name: str, fun: Callable[..., Any]) -> jex.Primitive:
    """Makes a primitive of a cast, whose derivative and transpose are plain casts.

    Args:
      name: what a printed jaxpr shows.
      fun: casts `x` to the parameter `dtype`, elementwise.
    """
    primitive = jex.Primitive(name)

    def jvp(primals: Any, tangents: Any, *, dtype: Any) -> Any:
        (x,), (t,) = primals, tangents
        out = primitive.bind(x, dtype=dtype)
        if isinstance(t, ad.Zero):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, convert(t, dtype)

    def transpose(ct: Any, x: Any, *, dtype: Any) -> list[Any]:
        del dtype
        aval = x.aval
        zero = isinstance(ct, ad.Zero)
        return [ad.Zero(aval) if zero else convert(ct, aval.dtype)]

    primitive.def_impl(jax.jit(fun, static_argnames="dtype"))
    primitive.def_abstract_eval(lambda x, dtype: x.update(dtype=dtype, weak_type=False))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    return primitive


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
        full = convert(half, out.dtype)
        if not swapped:
            return full
        rows = first.ndim - len(contracting[1])
        return lax.transpose(full, (*range(rows, full.ndim), *range(rows)))

    on_gpu = mlir.lower_fun(rounded, multiple_results=False)

    def lower(ctx: Any, first: Any, second: Any, out: Any, **params: Any) -> Any:
        context = ctx.module_context
        if not _is_for(context, (GPU,)) or not _is_for_one_device(context):
            return [out]
        return on_gpu(ctx, first, second, out, **params)

    primitive.def_impl(lambda first, second, out, **params: out)
    primitive.def_abstract_eval(lambda first, second, out, **params: out)
    ad.primitive_jvps[primitive] = jvp
    # Mapped over, the product is another one; its result is not rounded.
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (xs[2], axes[2])
    mlir.register_lowering(primitive, lower)
    return primitive


def _is_for_one_device(context: Any) -> bool:
    """Tells a program of one device from one that others have a part in."""
    return getattr(context.axis_context, "num_devices", 0) == 1


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
    (out,) = bind(eqn, operands, params)
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
        return convert(full, out.dtype)

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
    outs = bind(eqn, operands, params)
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
        (eqn,) = open_jaxpr(jaxpr).eqns
        params = dict(eqn.params, preferred_element_type=operands[0].dtype)
        (out,) = bind(eqn, operands, params)
        return convert(out, np.float32)

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
    jaxpr = jax.make_jaxpr(lambda *xs: bind(eqn, xs, params))(*operands)
    return [_FULL_CONVOLUTION.bind(*operands, jaxpr=jaxpr)]


def _hold_primitive() -> jex.Primitive:
    """Makes an identity of half arrays through which XLA:GPU sees no cast."""
    primitive = jex.Primitive("hold")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (
        primitive.bind(*primals),
        tangents[0],
    )
    batching.primitive_batchers[primitive] = lambda xs, axes: (
        primitive.bind(*xs),
        axes[0],
    )

    def times_one(x: Any) -> Any:
        one = lax.optimization_barrier(np.ones((), x.dtype))
        return x * lax.broadcast(one, x.shape)

    mlir.register_lowering(primitive, lambda ctx, x: [x])
    on_gpu = mlir.lower_fun(times_one, multiple_results=False)
    mlir.register_lowering(primitive, on_gpu, platform="cuda")
    return primitive


_HOLD = _hold_primitive()


def hold(x: Any) -> Any:
    """Keeps a rounded value rounded where it is read in float32.

    XLA:GPU drops the casts float32 -> half -> float32 between two kernels, and then
    writes the value in float32, often beside its half copy (openxla/xla#41605). On GPUs
    alone this multiplies by a 1 that the compiler does not know to be one: exact, and
    fused.
    """
    return _HOLD.bind(x)


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
        return [again if _is_for(ctx.module_context, on) else stored]

    def run(stored: Any, again: Any, *, on: tuple[str, ...]) -> Any:
        return again if jax.default_backend() in on else stored

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda stored, again, on: again)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, lower)
    return primitive


def _is_for(context: Any, devices: tuple[str, ...]) -> bool:
    """Tells whether a program is lowered for one of some platforms or generations.

    A program for several platforms is for none of them. A generation of TPUs is told by
    the client that compiles; a program that is exported from elsewhere is for none.
    """
    if len(context.platforms) != 1:
        return False
    (platform,) = context.platforms
    version = getattr(context.backend, "platform_version", "")
    is_tpu = platform == "tpu"
    return any(d == platform or (is_tpu and f"{d}\n" in version) for d in devices)


_RESTORE = _reading_primitive("restore", 1)
_UNROUNDED = _reading_primitive("unrounded", 0)


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


def unrounded(rounded: Any, exact: Any) -> Any:
    """Reads a value as it was rounded to be stored; on CPUs, as it was before that.

    The derivative is that of the rounded value, so that outside of CPUs nothing depends
    on this.

    Args:
      rounded: [...], cast back.
      exact: [...] of the same dtype.
    """
    return _UNROUNDED.bind(rounded, exact, on=(CPU,))


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
        second = lax.transpose(convert(second, np.float32), layout.order)
        terms = lax.mul(convert(first, np.float32), second)
        total = lax.reduce_sum(terms, layout.features)
        total = lax.transpose(total, layout.rows)
        if layout.number != 1:
            total = total * np.float32(layout.number)
        how = zip(layout.keys, layout.factors, layout.divides, strict=True)
        for x, (keys, order, divides) in zip(factors, how, strict=True):
            for dim in reversed(keys):
                x = lax.index_in_dim(x, 0, dim, keepdims=False)
            x = lax.transpose(x, order) if order else x
            x = x if x.dtype == np.float32 else convert(x, np.float32)
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
        if not _is_for(ctx.module_context, ("tpu",)):
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
    if any(lays_out(jax.typeof(x).sharding) for x in (stored, first, second, *factors)):
        return stored
    return _FEATURE_SUM.bind(stored, first, second, *factors, layout=layout)


def settled(x: Any) -> Any:
    """Returns float32 `x`; on TPUs v5e and v6e rounded to float32: no rounding.

    XLA:TPU moves a cast behind a maximum, and then no longer finds the same value under
    the maximum and the difference of a softmax: it makes two kernels of it in place of
    one. It moves no cast over a rounding.
    """
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)
    return restore(x, rounded, (TPU_V5E, TPU_V6E))


def apart(x: Any) -> Any:
    """Returns a value from which no compiler knows what else was computed of it."""
    return lax.optimization_barrier(x)


def kept(x: Any) -> Any:
    """Returns a partial sum that XLA:TPU does not merge with the sum of it.

    It would take both for sums of the same value, and read that once for each.
    """
    return restore(x, lax.optimization_barrier(x), ("tpu",))


def written(x: Any) -> Any:
    """Returns a value that a GPU writes, in place of keeping what it is made of."""
    return restore(x, lax.optimization_barrier(x), (GPU,))


def filled_late(zeros: Any, terms: Any) -> tuple[Any, Any]:
    """Returns zeros and what is added to them; a GPU fills them when that is there."""
    if not jax.typeof(zeros).sharding.mesh.empty:  # they may be laid out, or vary
        return zeros, terms
    zero, then = lax.optimization_barrier((np.zeros((), zeros.dtype), terms))
    filled = lax.broadcast_in_dim(zero, zeros.shape, ())
    return restore(zeros, filled, (GPU,)), restore(terms, then, (GPU,))


def bind(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Emits the equation's primitive and returns its results as a list."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def scatter_into_zeros(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Emits a `scatter-add` into zeros of which no two updates meet.

    It adds nothing up, so it is a `scatter`; and that one, unlike `scatter-add`, holds
    no jaxpr of its old dtype.
    """
    params = eqn.params
    operand, indices, updates = values
    out = lax.scatter(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=True,
        mode=params["mode"],
    )
    return [out]


def wrap(fun: Callable[..., Any], like: Any) -> Any:
    """Wraps a flat function as JAX's rules for custom derivatives expect it."""
    return lu.wrap_init(fun, debug_info=like.debug_info)


def flatten_rule(result: Any) -> tuple[list[Any], Any]:
    """Takes apart what a derivative rule returns: a list, or (list, logs)."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list):
        return list(result[0]), (True, result[1])  # JAX >= 0.11: custom_vjp's bwd
    return list(result), (False, None)


def unflatten_rule(structure: Any, leaves: list[Any]) -> Any:
    """Puts together what `flatten_rule` took apart."""
    with_logs, logs = structure
    return (leaves, logs) if with_logs else leaves


def map_cotangents(fun: Callable[..., Any], result: Any, *rest: Sequence[Any]) -> Any:
    """Maps `fun` over the cotangents that a backward rule returns."""
    leaves, structure = flatten_rule(result)
    new = [fun(*items) for items in zip(leaves, *rest, strict=True)]
    return unflatten_rule(structure, new)


def is_symbolic_zero(x: Any) -> bool:
    """Tells the zeros that derivative rules are given instead of arrays."""
    return isinstance(x, SymbolicZero)


def symbolic_zero_like(x: Any, aval: Any) -> Any:
    """Returns a symbolic zero of another dtype."""
    return SymbolicZero(x.aval.update(dtype=aval.dtype))


def tree_paths(tree: Any) -> list[tuple[Any, ...]]:
    """Returns the key path of every leaf."""
    return [path for path, _ in tree_util.tree_flatten_with_path(tree)[0]]


def is_array(leaf: Any) -> bool:
    """Tells what JAX traces (arrays, tracers, references) from static values."""
    if isinstance(leaf, (bool, int, float, complex)):
        return False
    return isinstance(leaf, jax.Array) or bool(jex.valid_jaxtype(leaf))


def is_concrete(x: Any) -> bool:
    """Tells an array whose numbers this process can read."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return concrete and x.is_fully_addressable


def is_being_differentiated(x: Any) -> bool:
    """Tells a tracer of automatic differentiation, maybe inside one of `vmap`."""
    while type(x).__name__ == "BatchTracer":
        x = x.val
    return type(x).__name__ in ("JVPTracer", "LinearizeTracer")


def vary(x: Any, axes: Sequence[str]) -> Any:
    """Marks an array inside a `shard_map` as different on each device of its axes.

    Args:
      x: the array.
      axes: the mesh axes over which the `shard_map` checks what varies.
    """
    known = jax.typeof(x).mat.varying if axes else ()
    missing = tuple(a for a in axes if a not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def lays_out(sharding: Any) -> bool:
    """Tells a sharding in an equation's parameters that says more than the mesh."""
    return sharding is not None and any(axis is not None for axis in sharding.spec)


def is_reference(aval: Any) -> bool:
    """Tells the type of a mutable array reference."""
    return hasattr(aval, "inner_aval")
