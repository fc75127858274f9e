"""The ways to run a model's train step that are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from models.common import Workload

HALF = jnp.bfloat16
POLICY = "mixed_bfloat16"


class Made(NamedTuple):
    """A model in one mode.

    Attributes:
      step: a whole train step.
      gradients: `(params, state, batch) -> (loss, gradients)` alone.
      arguments: shapes and dtypes of the step's arguments.
    """

    step: Callable[..., Any]
    gradients: Callable[..., Any]
    arguments: tuple[Any, ...]


def _of(workload: Workload) -> Made:
    return Made(workload.step, workload.gradients, workload.arguments())


def float32(model: ModuleType, size: Any) -> Made:
    """The model as it is. On TPUs and recent GPUs its products are not exact."""
    return _of(model.make(jnp.float32, size))


def matmul_precision(model: ModuleType, size: Any) -> Made:
    """JAX's own: float32 arrays, products of operands rounded to bfloat16."""
    made = float32(model, size)

    def under(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def wrapped(*args: Any) -> Any:
            with jax.default_matmul_precision("bfloat16"):
                return fun(*args)

        return wrapped

    return Made(under(made.step), under(made.gradients), made.arguments)


def by_hand(model: ModuleType, size: Any) -> Made:
    """Flax' own: `dtype=bfloat16` on every layer, parameters and loss in float32."""
    return _of(model.make(HALF, size))


def jmp(model: ModuleType, size: Any) -> Made:
    """DeepMind's jmp: parameters and inputs cast, layers that follow their inputs."""
    from jmp import get_policy

    policy = get_policy("params=float32,compute=bfloat16,output=float32")
    workload = model.make(None, size)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        params, batch = policy.cast_to_compute((params, batch))
        value, state = workload.loss(params, state, batch)
        return policy.cast_to_output(value), state

    return _of(workload._replace(loss=loss))


def mpx(model: ModuleType, size: Any) -> Made:
    """MPX: the same, differentiated with respect to the cast parameters."""
    from mpx import (
        DynamicLossScaling,
        filter_value_and_grad,
        optimizer_update,
        set_half_precision_datatype,
    )

    set_half_precision_datatype(HALF)
    workload = model.make(None, size)
    scaling = DynamicLossScaling(jnp.float32(1), jnp.float32(1))

    def both(params: Any, state: Any, batch: Any, scaling: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            return workload.loss(params, state, batch)

        return filter_value_and_grad(loss, scaling, has_aux=True)(params, batch)

    def step(params: Any, opt_state: Any, carried: Any, batch: Any) -> Any:
        state, scaling = carried
        (loss, state), scaling, finite, grads = both(params, state, batch, scaling)
        params, opt_state = optimizer_update(
            params, workload.optimizer, opt_state, grads, finite
        )
        return params, opt_state, (state, scaling), loss

    def gradients(params: Any, state: Any, batch: Any) -> Any:
        (loss, _), _, _, grads = both(params, state, batch, scaling)
        return loss, grads

    params, opt_state, state, batch = workload.arguments()
    carried = (state, jax.eval_shape(lambda: scaling))
    return Made(step, gradients, (params, opt_state, carried, batch))


def propagation(model: ModuleType, size: Any) -> Made:
    """This package with TensorFlow's greedy placement."""
    from jmp_rewrite import Policy, _rewrite
    from jmp_rewrite._precision import decide

    made = float32(model, size)
    policy = Policy(POLICY)

    def placed(fun: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
            plan = _rewrite.decide(closed, policy, placement=decide.propagation)
            results = _rewrite.run(plan, closed.consts, jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shape), results)

        return wrapped

    return Made(placed(made.step), placed(made.gradients), made.arguments)


def ours(model: ModuleType, size: Any) -> Made:
    """This package: the float32 model, decorated."""
    from jmp_rewrite import mixed_precision

    made = float32(model, size)
    return Made(
        mixed_precision(made.step, POLICY),
        mixed_precision(made.gradients, POLICY),
        made.arguments,
    )


def _scaled(policy: str, loss_scale: Any, clip: bool) -> Callable[..., Made]:
    """This package with loss scaling around the optimizer ("dynamic"), or without."""

    def make(model: ModuleType, size: Any) -> Made:
        from jmp_rewrite import loss_scaling, mixed_precision, scale_loss

        workload = model.make(jnp.float32, size)
        tx = workload.optimizer
        if clip:
            tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
        if loss_scale is not None:
            tx = loss_scaling(tx, loss_scale)

        def step(params: Any, opt_state: Any, state: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                loss, new_state = workload.loss(params, state, batch)
                if loss_scale is not None:
                    loss = scale_loss(loss, opt_state)
                return loss, new_state

            (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, new, loss

        arguments = workload._replace(optimizer=tx).arguments()
        return Made(mixed_precision(step, policy), workload.gradients, arguments)

    return make


# To be compared in pairs: what dynamic loss scaling costs, with and without clipping.
SCALED = {
    f"{half}{clip and '_clip'}{scale and '_scaled'}": _scaled(
        f"mixed_{half}", scale or None, bool(clip)
    )
    for half in ("float16", "bfloat16")
    for clip in ("", "clip")
    for scale in ("", "dynamic")
}

MODES = {
    f.__name__: f
    for f in (float32, matmul_precision, by_hand, jmp, mpx, propagation, ours)
} | SCALED

# Those that depend on this package's own source.
OURS = ("propagation", "ours", *SCALED)
