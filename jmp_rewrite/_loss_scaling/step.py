"""What a train step asks of the loss-scale state: scale, unscale and protect."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from jmp_rewrite._loss_scaling.leaves import (
    is_array,
    is_inexact,
    select,
    unscale_tree,
    widen,
)
from jmp_rewrite._loss_scaling.state import loss_scale_state
from jmp_rewrite._source import SCALED

# Whether derivatives are those of the loss itself. It is in the keys of jit's caches.
_IS_TRUE = jax.make_user_context(False)


def true_derivatives() -> contextlib.AbstractContextManager[None]:
    """Within it `scale_loss` does nothing: derivatives are those of the loss itself."""
    return _IS_TRUE(True)


def scale_loss(loss: jax.Array, opt_state: Any) -> jax.Array:
    """Marks the loss whose gradient is to be multiplied by the loss scale.

    float16 gradients below 6e-8 vanish, and scaling the loss prevents that. The value
    of the loss is unchanged, so it can be logged as it is. Its derivatives are scaled,
    forward and backward and of every order.

    A gradient penalty takes its inner gradient of the **unscaled** loss, and the sum
    is scaled once: `scale_loss(loss + penalty(jax.grad(raw_loss)(x)), opt_state)`.
    If the loss itself is float16, so is the scale on its way back, and scales above
    2**15 overflow: let the loss be float32.

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
    scale = loss_scale_state(opt_state).loss_scale
    return loss if _IS_TRUE.value else _scale_gradient(loss, scale)


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
    with jax.named_scope(SCALED):
        return (wide * jnp.asarray(scale, wide.dtype)).astype(t.dtype)


def unscale(grads: Any, opt_state: Any) -> Any:
    """Returns the true gradients, to log or to clip before the update.

    The optimizer inside `loss_scaling` sees the true gradients without it. If you use
    it, tell the update, so that the gradients are not divided again:
    `tx.update(grads, opt_state, params, grads_unscaled=True)`.

    Args:
        grads: gradients of a `scale_loss`. Half leaves are unscaled in float32, other
            floating-point leaves in their own dtype, and all others pass through.
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
    """Protects everything else that a step carries from a step that was skipped.

    A forward pass that overflowed has also written its Inf into batch-norm
    statistics, and an average, a step counter or a random key would move on. Pass
    them all through here.

    Args:
        opt_state: the state that this step's update *returned*.
        new: a pytree that the step computed.
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
