"""Loss scaling as an optax transformation: float16 gradients that do not vanish.

The technique is Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740,
section 3.2): multiply the loss by a scale, so that small gradients are representable
in float16, divide the gradients by it in float32, and skip a step that overflowed.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_rewrite._loss_scaling.leaves import (
    all_finite,
    as_dtype_of,
    is_array,
    is_half,
    is_inexact,
    select,
    unscale_tree,
    widen,
)
from jmp_rewrite._loss_scaling.schedule import (
    Schedule,
    check_arrays,
    check_loss_scale,
    check_schedule,
    next_state,
)
from jmp_rewrite._loss_scaling.state import LossScaleState, find_states
from jmp_rewrite._loss_scaling.step import true_derivatives
from jmp_rewrite._misuse import update_scope, warn_of_misuse


def loss_scaling(
    inner: optax.GradientTransformation | optax.MultiSteps | None = None,
    loss_scale: Any = "dynamic",
    *,
    init_scale: Any = 2.0**15,
    growth_interval: Any = 2000,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    min_scale: Any = 2.0**-14,
    max_scale: Any = 2.0**24,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes the gradients of a scaled loss.

    Gradients in float16 become zero below 6e-8. `scale_loss` multiplies them by the
    loss scale, and this transformation divides them again before the optimizer sees
    them, skips steps in which they overflowed, and looks for the largest scale that
    does not overflow. bfloat16 has the range of float32 and needs no scaling: pass
    `loss_scale=None` there.

    Wrap everything: `loss_scaling(optax.chain(optax.clip_by_global_norm(1.0),
    optax.adamw(1e-3)))` clips true gradients, and `loss_scaling(optax.MultiSteps(tx,
    k))` skips a non-finite micro-step and keeps the accumulated gradients. (Inside
    `MultiSteps`, the NaN has been added before anyone looks, and one bad micro-step
    skips the whole accumulated step.) `loss_scaling(optax.multi_transform(...))`
    serves several parameter groups with one scale.

    Without `inner` it is an element of a chain. Put it first: it unscales the
    gradients, and turns those of a skipped step into zeros. The transformations after
    it still take a step on zeros: Adam's moments decay, its count and every schedule
    advance, and momentum and weight decay move the parameters. Gradients of half
    parameters are half again behind it, and what is too small for that is zero. So
    prefer the wrapping form.

    A skipped step returns updates of -0.0, which change no parameter by a bit, and
    leaves all of `inner_state` as it was. Use `where_applied` for everything else that
    the step carries. Half leaves of gradients, parameters and state are computed in
    float32 and stored in their own dtypes.

    The update takes `grads_unscaled=True` for gradients that went through `unscale`.
    All other keyword arguments reach `inner`: `grad=` is taken to be scaled just as
    the gradients are and is unscaled with them; `value=` is that of the loss itself,
    which `scale_loss` does not change. Functions (`value_fn=`, `obj_fn=`) may be the
    loss that you differentiate: `scale_loss` does nothing where `inner` calls them, so
    that a line search sees true slopes. The gradient that it stores is a true one, too;
    take the gradients of a step from `jax.value_and_grad`, not from
    `optax.value_and_grad_from_state`.

    An update that is traced looks at how its gradients were made, and warns if the loss
    was not scaled, if they are divided by the scale twice, or if they were clipped
    while they were scaled.

    Args:
        inner: the optax transformation to protect, or None for an element of a chain.
        loss_scale: `"dynamic"`; or a number above 0, which never changes (a step that
            is not finite is skipped all the same); or None, which passes everything
            through. It may differ from what a restored state was saved under.
        init_scale: the first dynamic scale. 2**15 is TensorFlow's (`tf.keras`,
            `LossScaleOptimizer(initial_scale=2**15)`).
        growth_interval: finite steps in a row, at least 1, after which the scale grows.
            2000 is TensorFlow's (`dynamic_growth_steps`) and PyTorch's `GradScaler`'s.
        growth_factor: factor by which it grows, above 1; 2.0 in both.
        backoff_factor: factor by which a skipped step reduces it, between 0 and 1;
            0.5 in both. Powers of two make scaling exact.
        min_scale: the floor. 2**-14 is the smallest normal float16 number. Without a
            floor a scale can reach 0 and turn gradients into NaN.
        max_scale: the ceiling. 2**24 is NVIDIA Apex's (`amp.initialize`'s
            `max_loss_scale`). Without one a scale can reach inf and never come back.
        axis_name: the mapped axis or axes, under `jax.shard_map` or `jax.pmap`, whose
            members have to skip together, if their gradients may differ. Under
            `jax.jit` with sharded arrays it is not needed.

    Returns:
        A transformation whose state holds one `LossScaleState`. To add it to an
        existing checkpoint: `tx.init(params)._replace(inner_state=old_opt_state)`.

    Raises:
        ValueError: an argument is out of range (what an array holds is looked at by
            `init`, unless it is traced: `optax.inject_hyperparams` makes arrays of the
            parameters' dtype, so with half parameters give it
            `hyperparam_dtype=jnp.float32`), `inner` is not a transformation, or, at
            `init`, it contains loss scaling already.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jmp_rewrite import scale_loss
        >>> tx = loss_scaling(optax.sgd(0.5))
        >>> params = jnp.array([1.0, 2.0])
        >>> opt_state = tx.init(params)
        >>> loss = lambda p: scale_loss(jnp.sum(p**2), opt_state)
        >>> grads = jax.grad(loss)(params)
        >>> print(grads)
        [ 65536. 131072.]
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> print(optax.apply_updates(params, updates))
        [0. 0.]
    """
    schedule = Schedule(
        None if isinstance(loss_scale, str) else loss_scale,
        init_scale,
        growth_interval,
        growth_factor,
        backoff_factor,
        min_scale,
        max_scale,
    )
    check_loss_scale(loss_scale)
    check_schedule(schedule)
    _check_axis_name(axis_name)
    transformation = _as_transformation(inner)

    def init_fn(params: Any) -> LossScaleState:
        check_arrays(loss_scale, schedule)
        inner_state = transformation.init(params)
        _check_not_nested(inner_state)
        first = 1.0 if loss_scale is None else init_scale
        if schedule.fixed is not None:
            first = schedule.fixed
        return LossScaleState(
            loss_scale=jnp.asarray(first, jnp.float32),
            finite_steps=jnp.zeros([], jnp.int32),
            skipped_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            last_step_finite=jnp.array(True),
            inner_state=_keep_dtypes(inner_state, inner_state),
        )

    def pass_through(grads: Any, state: Any, params: Any, extra_args: Any) -> Any:
        updates, inner_state = transformation.update(
            grads, state.inner_state, params, **extra_args
        )
        return updates, state._replace(
            loss_scale=jnp.ones([], jnp.float32),
            finite_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            last_step_finite=jnp.array(True),
            inner_state=_keep_dtypes(inner_state, state.inner_state),
        )

    def apply_or_skip(
        finite: jax.Array, grads: Any, state: Any, params: Any, extra_args: Any
    ) -> Any:
        updates, inner_state = _update_wide(
            transformation, grads, state.inner_state, params, extra_args
        )
        # As a chain's element it feeds the next one, which may negate: +0.0 then.
        updates = _or_zero(finite, updates, negative=inner is not None)
        return updates, next_state(schedule, state, finite)._replace(
            inner_state=select(finite, inner_state, state.inner_state)
        )

    def looked_at(grads: Any, scale: Any, grads_unscaled: bool) -> Any:
        leaves = [g for g in jax.tree.leaves(grads) if is_inexact(g)]
        if loss_scale is None or warn_of_misuse(
            leaves, scale, schedule.fixed, grads_unscaled
        ):
            return contextlib.nullcontext()
        return jax.named_scope(update_scope(schedule.fixed))

    def update_fn(
        updates: Any,
        state: LossScaleState,
        params: Any = None,
        *,
        grads_unscaled: bool = False,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        _check_update(state, grads_unscaled)
        to_true = _true_gradients(state, grads_unscaled, loss_scale is None)
        with looked_at(updates, state.loss_scale, grads_unscaled):
            grads = to_true(updates)
            finite = all_finite(grads if loss_scale is not None else ())
        if "grad" in extra_args:
            same = extra_args["grad"] is updates
            extra_args["grad"] = grads if same else to_true(extra_args["grad"])
        with true_derivatives():  # a line search calls the loss
            if loss_scale is None:
                return pass_through(grads, state, params, extra_args)
            finite = _agree(finite, axis_name)
            return apply_or_skip(finite, grads, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _true_gradients(
    state: LossScaleState, unscaled: bool, passes: bool
) -> Callable[[Any], Any]:
    """Returns the function that undoes the scale that the gradients were made with."""
    if unscaled:
        return lambda grads: grads
    if not passes:
        return lambda grads: unscale_tree(grads, state.loss_scale)
    # The scale is 1 but for a state that was saved under another `loss_scale`.
    scaled = state.loss_scale != 1
    return lambda grads: jax.tree.map(
        lambda g: (
            select(scaled, unscale_tree(g, state.loss_scale), g) if is_inexact(g) else g
        ),
        grads,
    )


def _update_wide(
    transformation: optax.GradientTransformationExtraArgs,
    grads: Any,
    inner_state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs the inner update, in float32 throughout where there are half leaves.

    Its state would else change dtype at the first step, or lose the small gradients
    that scaling has saved.
    """
    update = transformation.update
    if not any(is_half(x) for x in jax.tree.leaves((grads, params, inner_state))):
        return update(grads, inner_state, params, **extra_args)
    updates, inner_state = update(
        widen(grads), widen(inner_state), widen(params), **extra_args
    )
    if params is not None:
        updates = jax.tree.map(
            lambda u, p: u.astype(p.dtype) if is_half(p) and is_inexact(u) else u,
            updates,
            params,
            is_leaf=lambda x: x is None,
        )
    return updates, inner_state


def _or_zero(finite: jax.Array, updates: Any, *, negative: bool) -> Any:
    """Returns updates, or zeros: x + -0.0 is x bit for bit, also where x is -0.0."""

    def zero(u: Any) -> Any:
        if not is_array(u):
            return u
        zeros = jnp.zeros_like(u)
        return -zeros if negative and is_inexact(u) else zeros

    return select(finite, updates, jax.tree.map(zero, updates))


def _keep_dtypes(new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: as_dtype_of(n, o) if is_array(o) else n, new, old)


def _agree(finite: jax.Array, axis_name: Any) -> jax.Array:
    """Makes one decision of all members' along the mapped axes."""
    if axis_name is None:
        return finite
    try:
        lax.axis_size(axis_name)  # raises whatever `shard_map` checks
        return lax.pmin(finite.astype(jnp.int32), axis_name) == 1
    except NameError as error:
        raise ValueError(
            f"expected axis_name={axis_name!r} to be an axis that is mapped over "
            f"where the update is called, got: {error}. Call it inside jax.shard_map "
            "or jax.pmap over that axis, or leave axis_name out: jax.jit needs none"
        ) from error


def _as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    if inner is None:
        return optax.with_extra_args_support(optax.identity())
    if isinstance(inner, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if isinstance(inner, optax.GradientTransformation):
        return optax.with_extra_args_support(inner)
    hint = ""
    if callable(inner):
        hint = f": call it first, as in {getattr(inner, '__name__', 'it')}(...)"
    elif isinstance(inner, str | int | float):
        hint = ": a loss scale comes second, as in loss_scaling(tx, 1024.0)"
    raise ValueError(
        "expected inner to be an optax.GradientTransformation, such as "
        f"optax.adamw(1e-3), got {reprlib.repr(inner)}{hint}"
    )


def _check_not_nested(inner_state: Any) -> None:
    if found := find_states(inner_state):
        places = ", ".join(f"inner_state{path}" for path, _ in found)
        raise ValueError(
            "expected an inner transformation without loss scaling, found a "
            f"LossScaleState at {places}: remove the inner loss_scaling, one around "
            "everything is enough"
        )


def _check_update(state: Any, grads_unscaled: Any) -> None:
    if not isinstance(state, LossScaleState):
        raise ValueError(
            "expected a state from this transformation's init, a LossScaleState, got "
            f"{type(state).__name__}: to go on from a state without loss scaling, "
            "pass tx.init(params)._replace(inner_state=opt_state)"
        )
    if not isinstance(grads_unscaled, bool):
        raise ValueError(
            "expected grads_unscaled as a Python bool, True for gradients that went "
            f"through unscale, got {grads_unscaled!r}"
        )


def _check_axis_name(axis_name: Any) -> None:
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    if axis_name is not None and not all(isinstance(n, str) for n in names):
        raise ValueError(
            "expected axis_name as the name of a mapped axis, a tuple of names or "
            f"None, got {axis_name!r}"
        )
