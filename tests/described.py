"""A small train step, to be compiled for devices that are not there."""

import jax
import jax.numpy as jnp

import jmp_rewrite as jmpr


@jax.jit
@jmpr.mixed_precision("mixed_bfloat16")
def step(params, batch):
    def loss_fn(params):
        h = jnp.tanh(batch["x"] @ params["w"])
        return jnp.mean((h @ params["v"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(rows=32, width=64):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"v": array(width, 8), "w": array(16, width)}
    return params, {"x": array(rows, 16), "y": array(rows, 8)}
