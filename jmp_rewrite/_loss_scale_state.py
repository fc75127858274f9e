"""What a train step asks of the loss-scale state: scale, unscale, check and protect.

The transformation that keeps this state is `loss_scaling`, in `_loss_scale.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class LossScaleState(NamedTuple):
    """The state of `loss_scaling`: arrays only, the same tree for every loss scale.

    Every field is a leaf, so that `jax.tree.map`, `lax.scan`, donation and a
    checkpoint keep all of it, and a checkpoint may be continued under another
    `loss_scale`.

    Attributes:
        loss_scale: `f32[]`, what `scale_loss` multiplies the next gradients by.
        finite_steps: `i32[]`, applied steps since the scale last changed (or since it
            was last held at its ceiling).
        skipped_steps: `i32[]`, steps skipped in all.
        consecutive_skips: `i32[]`, steps skipped in a row until now. A few are how a
            dynamic scale finds its place; a number that keeps growing is a loss that is
            itself Inf or NaN, which no scale cures.
        last_step_finite: `bool[]`, whether the last step was applied; True at first.
        inner_state: the state of the wrapped transformation.
    """

    loss_scale: jax.Array
    finite_steps: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    last_step_finite: jax.Array
    inner_state: Any


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
        return lax.select(pred, as_dtype_of(new, old), as_dtype_of(old, old))

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

    return jax.tree.map(leaf, grads)


def find_states(tree: Any) -> list[tuple[str, LossScaleState]]:
    """Lists every `LossScaleState` in a tree with its path, nested ones too."""
    found: list[tuple[str, LossScaleState]] = []
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, LossScaleState)
    )
    for path, leaf in leaves:
        if isinstance(leaf, LossScaleState):
            name = jax.tree_util.keystr(path)
            found.append((name, leaf))
            for inner, state in find_states(leaf.inner_state):
                found.append((f"{name}.inner_state{inner}", state))
    return found


def loss_scale_state(opt_state: Any) -> LossScaleState:
    """Finds the loss-scale state anywhere in a nested or chained optax state.

    Log it to see what scaling does: a float16 run starts with a few skipped steps
    and then skips about one in `growth_interval`.

    Args:
        opt_state: an optax state, or any pytree that holds one, such as a Flax
            `TrainState`.

    Returns:
        The one `LossScaleState` in it.

    Raises:
        ValueError: there is none, or there are several; the message says where.

    Example:
        >>> import jax, optax
        >>> from jmp_rewrite import loss_scaling
        >>> tx = optax.chain(loss_scaling(optax.sgd(0.1)), optax.identity())
        >>> opt_state = tx.init({"w": jax.numpy.ones(3)})
        >>> print(loss_scale_state(opt_state).loss_scale)
        32768.0
    """
    found = find_states(opt_state)
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise ValueError(
            "expected an optimizer state with loss scaling, but found no "
            f"LossScaleState in this {type(opt_state).__name__}: wrap the whole "
            "optimizer, tx = loss_scaling(tx), and take the state from its init; a "
            "checkpoint that was read without a target must be restored into one"
        )
    places = ", ".join(f"opt_state{path}" for path, _ in found)
    raise ValueError(
        f"expected one LossScaleState, found {len(found)}, at {places}: wrap once, "
        "outside, as in loss_scaling(optax.multi_transform(...)); for several losses "
        "with an optimizer each, pass the state of the optimizer that is meant"
    )


def scale_loss(loss: jax.Array, opt_state: Any) -> jax.Array:
    """Marks the loss whose gradient is to be multiplied by the loss scale.

    float16 gradients below 6e-8 vanish; scaled gradients do not. The value is
    unchanged, so that the loss can be logged as it is; only what is differentiated
    through it is scaled, linearly, forward and backward and to every order.

    A gradient penalty takes its inner gradient of the **unscaled** loss, and the sum
    is scaled once: `scale_loss(loss + penalty(jax.grad(raw_loss)(x)), opt_state)`.
    The scale of a float16 loss passes through float16 itself, where scales above
    2**15 overflow and are backed off from: let the loss be float32.

    Args:
        loss: a floating-point array, usually `f32[]`; not a `(loss, aux)` pair.
        opt_state: the optimizer state *before* the update, holding one
            `LossScaleState`.

    Returns:
        The loss, bit for bit, in its own dtype.

    Raises:
        ValueError: `loss` is no floating-point array, or `opt_state` holds no
            `LossScaleState` or several.

    Example:
        >>> import jax, optax
        >>> from jmp_rewrite import loss_scaling
        >>> opt_state = loss_scaling(optax.sgd(0.1), 1024.0).init(1.0)
        >>> print(*jax.value_and_grad(lambda x: scale_loss(x**2, opt_state))(3.0))
        9.0 6144.0
    """
    if not is_inexact(loss):
        raise ValueError(
            "expected the loss as a floating-point array, got "
            f"{_describe(loss)}: scale the loss alone, as in "
            "return scale_loss(loss, opt_state), aux"
        )
    return _scale_gradient(loss, loss_scale_state(opt_state).loss_scale)


def _describe(x: Any) -> str:
    return f"dtype {jnp.result_type(x)}" if is_array(x) else type(x).__name__


@jax.custom_jvp
def _scale_gradient(loss: jax.Array, scale: jax.Array) -> jax.Array:
    return loss


@_scale_gradient.defjvp
def _scale_gradient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    loss, scale = primals
    # Primal and tangent both stay marked: a second derivative is scaled too.
    return _scale_gradient(loss, scale), _times(tangents[0], scale)


def _times(t: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies in float32 or wider: a scale above 65504 is inf as float16."""
    wide = widen(t)
    return (wide * jnp.asarray(scale, wide.dtype)).astype(t.dtype)


def unscale(grads: Any, opt_state: Any) -> Any:
    """Returns the true gradients, to log or to clip before the update.

    The optimizer inside `loss_scaling` sees true gradients without this. Say so when
    the update is given gradients that went through it:
    `tx.update(grads, opt_state, params, grads_unscaled=True)`.

    Args:
        grads: gradients of a `scale_loss`: half leaves are unscaled in float32, all
            other floating-point leaves in their own dtype; the rest passes through.
        opt_state: the state that `scale_loss` was given, before the update.

    Returns:
        The gradients divided by the loss scale, half leaves as float32.

    Raises:
        ValueError: `opt_state` holds no `LossScaleState` or several.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jmp_rewrite import loss_scaling
        >>> opt_state = loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.ones(2))
        >>> print(unscale(jnp.array([1024.0, 2048.0], jnp.float16), opt_state))
        [1. 2.]
    """
    return unscale_tree(grads, loss_scale_state(opt_state).loss_scale)


def where_applied(opt_state: Any, new: Any, old: Any) -> Any:
    """Keeps everything else that a step carries from a step that was skipped.

    A forward pass that overflowed has also written its Inf into batch-norm
    statistics, and an average, a step counter or a random key would move on. Pass
    them all through here.

    Args:
        opt_state: the state that this step's update *returned*.
        new: a pytree of what the step computed.
        old: the same tree from before the step.

    Returns:
        `new` if the step was applied, `old` if it was skipped, leaf by leaf, in the
        dtypes of `old`.

    Raises:
        ValueError: the two trees differ in structure, shape or kind of number, or
            `opt_state` holds no `LossScaleState` or several.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jmp_rewrite import loss_scaling
        >>> tx = loss_scaling(optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> _, opt_state = tx.update(jnp.array([1.0, jnp.inf]), opt_state)
        >>> print(where_applied(opt_state, {"mean": jnp.inf}, {"mean": 0.5})["mean"])
        0.5
    """
    applied = loss_scale_state(opt_state).last_step_finite
    structures: list[Any] = [jax.tree.structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        raise ValueError(
            "expected `new` and `old` as two trees of one structure, got "
            f"{structures[0]} and {structures[1]}"
        )
    leaves = jax.tree_util.tree_leaves_with_path(new)
    for (path, n), o in zip(leaves, jax.tree.leaves(old), strict=True):
        _check_alike(jax.tree_util.keystr(path), n, o)
    return select(applied, new, old)


def _check_alike(path: str, new: Any, old: Any) -> None:
    if not (is_array(new) and is_array(old)):
        return
    kinds = (jnp.inexact, jnp.complexfloating, jax.dtypes.extended)
    dtypes = jnp.result_type(new), jnp.result_type(old)
    if jnp.shape(new) != jnp.shape(old) or any(
        jnp.issubdtype(dtypes[0], k) != jnp.issubdtype(dtypes[1], k) for k in kinds
    ):
        raise ValueError(
            f"expected new{path} like old{path}, {dtypes[1]}{list(jnp.shape(old))}, "
            f"got {dtypes[0]}{list(jnp.shape(new))}"
        )


def all_finite(tree: Any) -> jax.Array:
    """Says whether a tree holds neither Inf nor NaN, as one array.

    Args:
        tree: any pytree; leaves that are not floating point count as finite.

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
