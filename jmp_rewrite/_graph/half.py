"""`half_precision` and `compute_dtype`: for what needs half operands when traced.

A kernel (Pallas, a foreign function, cuDNN's attention) is traced for the dtypes that
it is given, and nothing rewrites it afterwards. So its operands are cast at once, with
a mark: these casts are the library's own, and no wish of the user's.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Set
from typing import Any, overload

import jax
import numpy as np
from jax import tree_util
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._graph import region
from jmp_rewrite._graph.region import FLOAT32, Region
from jmp_rewrite._graph.scopes import HALF_PRECISION, P, Place, R, inner_place
from jmp_rewrite._source import check_kind

_HALVES = frozenset({"bfloat16", "float16"})


def compute_dtype() -> np.dtype:
    """Returns the dtype in which matrix multiplications run where it is called.

    For code that makes its own choice while it is traced: the block sizes of a kernel,
    the dtype of a buffer. To call a kernel on half operands, use `half_precision`.

    Returns:
      The compute dtype of the innermost `mixed_precision` that is being traced.
      float32 outside of one, under `full_precision`, and in a scope that the policy
      says is float32. JAX names a scope inside a loop's body or a jitted function from
      there on: of scopes around these nothing is known here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> def f(x):
      ...     print(jmpr.compute_dtype())
      ...     return x
      >>> _ = jax.jit(jmpr.mixed_precision(f, "mixed_bfloat16"))(jnp.ones(2))
      bfloat16
      >>> _ = f(jnp.ones(2))
      float32
    """
    here = region.current()
    if here is None or here.full:
        return FLOAT32
    dtype = here.policy.compute_dtype
    return FLOAT32 if dtype == FLOAT32 or _is_in_float32(here) else dtype


def _is_in_float32(here: Region) -> bool:
    """Whether a scope that is entered now is float32."""
    scopes = _compat.scope_elements(_compat.current_name_stack())
    place = inner_place(Place(here.path), tuple(scopes))
    full = (p for p, kind in here.policy.scopes.items() if kind == "float32")
    return place.full or any(re.search(p, place.path) for p in full)


class _HalfPrecision:
    """The decorator that `half_precision()` returns."""

    def __call__(self, fun: Callable[P, R]) -> Callable[P, R]:
        return half_precision(fun)


@overload
def half_precision(fun: Callable[P, R]) -> Callable[P, R]: ...


@overload
def half_precision(fun: None = None) -> _HalfPrecision: ...


def half_precision(fun: Any = None) -> Any:
    """Gives a function half operands where the code around it runs in half precision.

    For what JAX cannot look into, and so nobody can rewrite: a Pallas kernel, a foreign
    function, cuDNN's attention. Inside of `mixed_precision` with a half policy it is
    called with its float32 arrays in the compute dtype, and half results come back as
    float32. Everywhere else it is called as it is: outside, under a float32 policy,
    under `full_precision`, and in a scope that is float32.

    These casts are no wish for float32, as a cast in your own code is: the matrix
    multiplication that makes an operand writes it in half, and the one that reads a
    result runs in half. A kernel with a `jax.custom_vjp` gets half cotangents.

    Args:
      fun: the function. Its arguments and results are pytrees, and what is no float32
        array passes through. An array that it closes over is not cast.

    Returns:
      A function of the same signature; without `fun`, a decorator.

    Raises:
      TypeError: if `fun` is not a function, or runs after the call, as a generator.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> @jmpr.half_precision
      ... def kernel(x):
      ...     print("it gets", x.dtype)
      ...     return x * 2
      >>> x = jnp.ones(2)
      >>> jax.jit(jmpr.mixed_precision(kernel, "mixed_bfloat16"))(x).dtype
      it gets bfloat16
      dtype('float32')
      >>> kernel(x).dtype
      it gets float32
      dtype('float32')
    """
    if fun is None:
        return _HalfPrecision()
    if not callable(fun):
        given = repr(fun) if isinstance(fun, str) else type(fun).__name__
        raise TypeError(f"half_precision expected a function to decorate, got {given}.")
    check_kind(fun, "half_precision")

    # What a function carries is copied; the fields of a module are no business here.
    @functools.wraps(fun, updated=("__dict__",) if inspect.isfunction(fun) else ())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        dtype = compute_dtype()
        call = region.next_call()
        if dtype == FLOAT32 or call is None:
            return fun(*args, **kwargs)
        before = _dtypes((args, kwargs))
        if "float32" not in before and before & _HALVES:
            return fun(*args, **kwargs)  # it is half already, and so are its results
        scope = f"{HALF_PRECISION}{call}"
        args, kwargs = _cast((args, kwargs), {"float32"}, dtype, scope)
        return _cast(fun(*args, **kwargs), _HALVES, FLOAT32, scope)

    return wrapped


def _dtypes(tree: Any) -> set[str]:
    return set(map(_dtype, tree_util.tree_leaves(tree)))


def _dtype(leaf: Any) -> str:
    """Returns the name of an array's dtype; "" for what is no array."""
    return getattr(leaf.dtype, "name", "") if _compat.is_array(leaf) else ""


def _cast(tree: Any, names: Set[str], dtype: np.dtype, scope: str) -> Any:
    """Casts the arrays of a tree that have a dtype of these names."""

    def cast(x: Any) -> Any:
        if _dtype(x) not in names:
            return x
        with jax.named_scope(scope):
            return _compat.convert(x, dtype)

    return tree_util.tree_map(cast, tree)


def has_half_precision(jaxpr: Any) -> bool:
    """Whether a program calls a half-precision function on half operands."""
    stack, seen = [jaxpr], set()
    while stack:
        body = _compat.open_jaxpr(stack.pop())
        if id(body) in seen:
            continue
        seen.add(id(body))
        for eqn in body.eqns:
            scopes = _compat.scope_elements(eqn.source_info.name_stack)
            if inner_place(Place(), tuple(scopes)).call >= 0:
                return True
            stack += jex.jaxprs_in_params(eqn.params)
    return False
