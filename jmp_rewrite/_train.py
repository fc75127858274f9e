"""Whole train steps in one line, for those who come from `opt.minimize()`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_rewrite._loss_scaling import find_states, loss_scaling, scale_loss
from jmp_rewrite._policy import (
    Policy,
    PolicyLike,
    as_policy,
    get_policy,
    is_policy_set,
    set_policy,
)
from jmp_rewrite._transform import mixed_precision


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    policy: PolicyLike = None,
    *,
    has_aux: bool = False,
    donate: bool = True,
) -> Callable[..., Any]:
    """Returns a jitted train step in mixed precision for a loss and an optimizer.

    Forward pass, backward pass, loss scaling and optimizer update are one program.
    The optimizer also gets `value`, `grad` and `value_fn`, if it asks for them. Return
    batch statistics, averages or keys through `aux`, and protect them with
    `where_applied`.

    Args:
        loss_fn: `(params, batch) -> loss`, or `(loss, aux)` with `has_aux`; the loss is
            a floating-point `[]` array.
        tx: the optimizer; `loss_scaling(...)` around it under a float16 policy.
        policy: a `Policy`, a string, a dtype, or None for the default policy at the
            time of tracing.
        has_aux: whether `loss_fn` returns a pair.
        donate: whether the buffers of `params` and `opt_state` are reused for the new
            ones. The arrays that you passed in are then deleted: pass False in a
            notebook, where you look at them again, and for an optimizer whose first
            state holds the parameters themselves (`optax.lbfgs`): no buffer can be
            given away twice.

    Returns:
        `(params, opt_state, batch) -> (params, opt_state, loss)`, and `aux` as a fourth
        with `has_aux`. The loss is not scaled.

    Raises:
        ValueError: `loss_fn` is not a function or does not return what `has_aux` says,
            `tx` is not an optax transformation, or the policy asks for loss scaling and
            `tx` has none (for a default policy, when the step is called).

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jmp_rewrite import loss_scaling
        >>> tx = loss_scaling(optax.sgd(0.25))
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> step = make_train_step(loss_fn, tx, "mixed_float16")
        >>> w = jnp.ones((2, 1))
        >>> w, opt_state, loss = step(w, tx.init(w), jnp.eye(2))
        >>> print(loss, w.ravel())
        1.0 [0.75 0.75]
    """
    if not callable(loss_fn):
        raise ValueError(
            "expected loss_fn as a function (params, batch) -> loss, got "
            f"{type(loss_fn).__name__}"
        )
    _check_transformation(tx)
    is_wrapped = _is_scaled(tx)
    if policy is not None and is_wrapped is False:
        _check_needs_no_scaling(policy)
    update = optax.with_extra_args_support(
        optax.GradientTransformation(tx.init, tx.update)
        if isinstance(tx, optax.MultiSteps)
        else tx
    ).update

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, ...]:
        scaled = bool(find_states(opt_state))
        if not scaled and is_wrapped:
            raise ValueError(
                "expected opt_state from the init of tx, which has loss scaling, got "
                f"{type(opt_state).__name__}, a state without it: an optimizer that "
                "was not wrapped has made it"
            )
        if not scaled:
            _check_needs_no_scaling(policy)

        def full_loss(params: Any) -> tuple[Any, Any]:
            loss, aux = _loss_and_aux(loss_fn(params, batch), has_aux)
            return (scale_loss(loss, opt_state) if scaled else loss), aux

        def value_fn(params: Any, **_: Any) -> Any:
            loss = loss_fn(params, batch)
            return loss[0] if has_aux else loss

        (loss, aux), grads = jax.value_and_grad(full_loss, has_aux=True)(params)
        extra = {"value": loss, "grad": grads, "value_fn": value_fn}
        updates, opt_state = update(grads, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, loss, aux) if has_aux else (params, opt_state, loss)

    return jax.jit(
        mixed_precision(step, policy), donate_argnums=(0, 1) if donate else ()
    )


def _loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    is_tuple = isinstance(out, tuple | list)
    if is_tuple != has_aux or (has_aux and len(out) != 2):
        what = f"a {type(out).__name__}" + (f" of {len(out)}" if is_tuple else "")
        raise ValueError(
            f"expected loss_fn to return {'(loss, aux)' if has_aux else 'a loss'} with "
            f"has_aux={has_aux}, got {what}"
        )
    return out if has_aux else (out, None)


def enable_mixed_precision_graph_rewrite(
    tx: optax.GradientTransformation, loss_scale: Any = "dynamic"
) -> optax.GradientTransformationExtraArgs:
    """Sets the policy to `"mixed_float16"` and wraps the optimizer, as in TensorFlow.

    Unlike in TensorFlow, the train step still has to be decorated with
    `@mixed_precision`, and its loss passed through `scale_loss`. `make_train_step` does
    both.

    Args:
        tx: an optax transformation without loss scaling.
        loss_scale: as in `loss_scaling`.

    Returns:
        `loss_scaling(tx, loss_scale)`.

    Raises:
        ValueError: another policy has been set, `tx` is not an optax transformation, or
            has loss scaling already. The policy is then left as it was.

    Example:
        >>> import optax
        >>> from jmp_rewrite import get_policy, set_policy
        >>> tx = enable_mixed_precision_graph_rewrite(optax.adam(1e-3))
        >>> get_policy()
        Policy('mixed_float16')
        >>> set_policy(None)
    """
    policy = Policy("mixed_float16")
    _check_transformation(tx)
    if _is_scaled(tx):
        raise ValueError(
            "expected tx without loss scaling, got one that contains a loss_scaling "
            "already: pass the bare optimizer, it is wrapped here"
        )
    wrapped = loss_scaling(tx, loss_scale)
    if is_policy_set() and get_policy() != policy:
        raise ValueError(
            f"expected no policy or {policy} to be set, but it is {get_policy()}: "
            "leave out set_policy, or keep it and wrap with loss_scaling(tx) yourself"
        )
    set_policy(policy)
    return wrapped


def _check_transformation(tx: Any) -> None:
    if not isinstance(tx, optax.GradientTransformation | optax.MultiSteps):
        raise ValueError(
            "expected tx to be an optax.GradientTransformation, such as "
            f"optax.adamw(1e-3), got {reprlib.repr(tx)}"
        )


def _check_needs_no_scaling(policy: PolicyLike) -> None:
    policy = as_policy(policy)
    if policy.loss_scale is not None:
        raise ValueError(
            f"expected tx with loss scaling under {policy}, got one without: wrap it, "
            f"tx = loss_scaling(tx, {policy.loss_scale!r}), and take opt_state from "
            "its init, or small gradients vanish"
        )


def _is_scaled(tx: Any) -> bool | None:
    """Whether a transformation has loss scaling; None if only its state will tell.

    A transformation is two opaque functions, so its state for made-up parameters is
    asked. One that is made for parameters of a certain form may refuse those.
    """
    probe = {"w": jax.ShapeDtypeStruct((1,), jnp.float32)}
    try:
        return bool(find_states(jax.eval_shape(tx.init, probe)))
    except Exception:
        return None
