"""Watch float16 loss scaling survive an overflow (plain JAX).

Usage:
    python examples/float16_overflow.py
    python examples/float16_overflow.py --width 4096 --batch 8192    # for a GPU

A few batches are multiplied by 30,000, so that the first layer leaves the range of
float16. Those steps are skipped: no parameter changes, and the loss scale is halved.

Expected output (2 CPU cores, JAX 0.12):
    step  10  loss    1.474  gradient norm  1.107  scale  32768  applied
    step  20  loss      nan  gradient norm    nan  scale  16384  skipped
    step  21  loss      nan  gradient norm    nan  scale   8192  skipped
    step  30  loss    0.355  gradient norm  0.640  scale   8192  applied
    step  40  loss      nan  gradient norm    nan  scale   4096  skipped
    step  50  loss    0.158  gradient norm  0.379  scale   4096  applied
    step  60  loss    0.127  gradient norm  0.390  scale   8192  applied
    3 of 60 steps skipped, which changed no parameter
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import jmp_rewrite as jmpr


def init_params(key: jax.Array, width: int) -> dict[str, jax.Array]:
    """Returns the weights of a three-layer network, in float32."""
    shapes = {"in": (64, width), "hidden": (width, width), "out": (width, 10)}
    init = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(shapes))
    return {
        name: init(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of the labels, f32[]."""
    x = jax.nn.relu(batch["x"] @ params["in"])
    x = jax.nn.relu(x @ params["hidden"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["out"], batch["y"]
    )
    return losses.mean()


def make_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns a jitted step that also logs the norm of the true gradients."""

    @jax.jit
    @jmpr.mixed_precision("mixed_float16")
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jmpr.scale_loss(loss_of(params, batch), opt_state)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jmpr.unscale(grads, opt_state)
        norm = optax.tree.norm(grads)
        updates, opt_state = tx.update(grads, opt_state, params, grads_unscaled=True)
        return optax.apply_updates(params, updates), opt_state, loss, norm

    return train_step


def main(argv: list[str] | None = None) -> jmpr.LossScaleState:
    """Trains; returns the final state of the loss scale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args(argv)

    digits = datasets.load_digits()
    rng = np.random.default_rng(0)
    params = init_params(jax.random.key(0), args.width)
    # The scale usually doubles after 2000 good steps; 20 show it in a short run.
    tx = jmpr.loss_scaling(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        growth_interval=20,
    )
    opt_state = tx.init(params)
    train_step, unchanged = make_step(tx), True
    overflows = {args.steps // 3, args.steps // 3 + 1, 2 * args.steps // 3}
    for step in range(1, args.steps + 1):
        chosen = rng.integers(0, len(digits.target), args.batch)
        batch = {
            "x": jnp.asarray(digits.data[chosen] / 16, jnp.float32),
            "y": jnp.asarray(digits.target[chosen], jnp.int32),
        }
        if step in overflows:
            batch["x"] *= 30_000
        before = params
        params, opt_state, loss, norm = train_step(params, opt_state, batch)
        state = jmpr.loss_scale_state(opt_state)
        if not state.last_step_finite:
            unchanged &= jax.tree.all(jax.tree.map(jnp.array_equal, params, before))
        if step in overflows or step % (args.steps // 6) == 0:
            done = "applied" if state.last_step_finite else "skipped"
            print(
                f"step {step:3}  loss {loss:8.3f}  gradient norm {norm:6.3f}"
                f"  scale {state.loss_scale:6.0f}  {done}"
            )
    changed = "changed no parameter" if unchanged else "CHANGED PARAMETERS"
    print(f"{state.skipped_steps} of {args.steps} steps skipped, which {changed}")
    return state


if __name__ == "__main__":
    main()
