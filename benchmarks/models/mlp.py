"""The model of Keras' mixed precision guide: two layers of 4096 units; batch 8192."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.common import Workload, cross_entropy


class Size(NamedTuple):
    """Dimensions."""

    batch: int = 8192
    inputs: int = 784
    units: int = 4096
    classes: int = 10


FULL = Size()
QUICK = FULL
SMALL = Size(256, 784, 256, 10)


class MLP(nn.Module):
    """Dense, dense, dense."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.size.units, dtype=self.dtype, name="dense1")(x))
        x = nn.relu(nn.Dense(self.size.units, dtype=self.dtype, name="dense2")(x))
        return nn.Dense(self.size.classes, dtype=self.dtype, name="logits")(x)


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = MLP(size, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, size.inputs)))["params"], ()

    def loss(params, state, batch):
        logits = model.apply({"params": params}, batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), state

    def batch(key):
        keys = jax.random.split(key)
        return {
            "x": jax.random.uniform(keys[0], (size.batch, size.inputs)),
            "y": jax.random.randint(keys[1], (size.batch,), 0, size.classes),
        }

    return Workload(init, loss, batch, optax.rmsprop(1e-3))
