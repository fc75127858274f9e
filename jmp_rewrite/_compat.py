"""What differs between the JAX versions that are supported (0.10, 0.11, 0.12).

Every use of a private name stands here, each with the version at which it can go.
The rest of the library sees one JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax, tree_util
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.extend import linear_util as lu
from jax.extend import source_info_util
from jax.extend.core import primitives
from jax.interpreters import ad, batching, mlir

# JAX < 0.11 tells open from closed jaxprs; later versions have one class.
CLOSED_IS_OPEN = jex.ClosedJaxpr is jex.Jaxpr


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


def scan_params(params: dict[str, Any], jaxpr: Any, extra: int) -> dict[str, Any]:
    """Returns `scan` parameters for a body with `extra` more leading constants."""
    new = dict(params, jaxpr=jaxpr)
    if not extra:
        return new
    if "num_carry" in params:  # JAX < 0.11
        new["num_consts"] = params["num_consts"] + extra
        return new
    # JAX >= 0.11 keeps the arguments' structure in a private tree type.
    trees = importlib.import_module(type(params["ft_in"]).__module__)
    pack = getattr(trees, "pack", None) or trees.FlatTree.pack
    consts, carry, xs = params["ft_in"].unpack()
    new["ft_in"] = pack((_nones(trees, len(consts) + extra), carry, xs))
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
    """Makes the identity of many operands that is a barrier where a CPU runs it."""
    primitive = jex.Primitive("cpu_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs: list(xs))
    primitive.def_abstract_eval(lambda *xs: list(xs))

    def jvp(primals: Any, tangents: Any) -> Any:
        return primitive.bind(*primals), list(tangents)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda cts, *_: list(cts)
    batching.primitive_batchers[primitive] = lambda xs, axes: (
        primitive.bind(*xs),
        list(axes),
    )
    mlir.register_lowering(primitive, lambda ctx, *xs: list(xs))
    barrier = mlir.lower_fun(
        lambda *xs: lax.optimization_barrier(xs), multiple_results=True
    )
    mlir.register_lowering(primitive, barrier, platform="cpu")
    return primitive


_CPU_BARRIER = _cpu_barrier_primitive()


def shielded_product(
    eqn: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Emits a bfloat16 product with a float32 result so that XLA:CPU can run it.

    XLA:CPU folds transposes into products after it has chosen a kernel, and has none
    for what comes out ("Unsupported element type for DotThunk::Execute: BF16 x BF16 =
    F32", JAX 0.10.2 to 0.12.0). A barrier keeps the operands from it, on the CPU only;
    rounding to float32's own format, which is no rounding, keeps the result.
    """
    operands = _CPU_BARRIER.bind(*operands)
    (out,) = bind(eqn, operands, params)
    return [lax.reduce_precision(out, exponent_bits=8, mantissa_bits=23)]


def bind(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Emits the equation's primitive and returns its results as a list."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


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


def is_reference(aval: Any) -> bool:
    """Tells the type of a mutable array reference."""
    return hasattr(aval, "inner_aval")
