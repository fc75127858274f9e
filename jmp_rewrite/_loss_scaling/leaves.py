"""What loss scaling does to leaves: tell their kinds, widen, select, unscale, check."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._source import UNSCALED


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or a number that JAX computes with."""
    known = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    return isinstance(x, known) and getattr(x, "dtype", None) != jax.dtypes.float0


def is_inexact(x: Any) -> bool:
    """Whether a leaf is real or complex floating point."""
    return is_array(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_half(x: Any) -> bool:
    """Whether a leaf is floating point of fewer bits than float32."""
    return (
        is_array(x)
        and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and jnp.result_type(x).itemsize < 4
    )


def widen(tree: Any) -> Any:
    """Returns the tree with its half leaves in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def select(pred: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` or `old`, leaf by leaf, in the dtypes of `old`, never weak.

    A select, no `lax.cond`: it fuses with what computes `new` and is partitioned
    like it, and what is not selected leaves no trace, a NaN included.
    """

    def leaf(new: Any, old: Any) -> Any:
        if not (is_array(new) and is_array(old)):
            return new
        new, old = as_dtype_of(new, old), as_dtype_of(old, old)
        return lax.select(pred, new, _compat.placed_like(old, new))

    return jax.tree.map(leaf, new, old)


def as_dtype_of(x: Any, like: Any) -> Any:
    """Returns an array in another's dtype, strongly typed."""
    dtype = jnp.result_type(like)
    if not is_array(x) or jnp.issubdtype(dtype, jax.dtypes.extended):
        return x
    return lax.convert_element_type(x, dtype)


def unscale_tree(grads: Any, scale: jax.Array) -> Any:
    """Divides by the scale in float32, or in the leaf's own wider dtype.

    Divided, not multiplied by a reciprocal: exact for every power of two, also above
    2**126, where the reciprocal would be subnormal and flushed to zero.
    """

    def leaf(g: Any) -> Any:
        if not is_inexact(g):
            return g
        g = widen(jnp.asarray(g))
        if jnp.issubdtype(g.dtype, jnp.complexfloating):  # no NaN out of inf * 0
            return lax.complex(leaf(g.real), leaf(g.imag))
        return g / jnp.asarray(scale, g.dtype)

    with jax.named_scope(UNSCALED):
        return jax.tree.map(leaf, grads)


def all_finite(tree: Any) -> jax.Array:
    """Whether a tree has neither Inf nor NaN, as one array.

    Args:
        tree: any pytree; leaves that are not floating-point count as finite.

    Returns:
        `bool[]`; True for an empty tree.

    Example:
        >>> import jax.numpy as jnp
        >>> print(all_finite({"w": jnp.ones(3), "n": 7, "none": None}))
        True
        >>> print(all_finite([jnp.ones(3), jnp.array([1.0, jnp.nan])]))
        False
    """
    checks = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if is_inexact(x)]
    return functools.reduce(jnp.logical_and, checks, jnp.array(True))
