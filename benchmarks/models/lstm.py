"""Two bidirectional LSTM layers over 64 texts of 256 words.

By hand the states are in the half dtype, as Keras' are under a mixed policy. (Flax
alone starts them in float32, and then everything after the products is float32 too.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.common import Workload, cross_entropy


class Size(NamedTuple):
    """Dimensions."""

    batch: int = 64
    length: int = 256
    width: int = 512
    vocabulary: int = 20000
    classes: int = 20


FULL = Size()
QUICK = FULL
SMALL = Size(16, 32, 64, 500, 20)


class Classifier(nn.Module):
    """Words to a class."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.width, dtype=dtype, name="words")(tokens)
        zeros = jnp.zeros((x.shape[0], size.width), x.dtype)
        for i in range(2):
            forward = nn.RNN(nn.OptimizedLSTMCell(size.width, dtype=dtype))
            backward = nn.RNN(nn.OptimizedLSTMCell(size.width, dtype=dtype))
            both = nn.Bidirectional(forward, backward, name=f"layer{i}")
            x = both(x, initial_carry=((zeros, zeros), (zeros, zeros)))
        return nn.Dense(size.classes, dtype=dtype, name="head")(x.mean(axis=1))


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = Classifier(size, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, size.length), jnp.int32))["params"], ()

    def loss(params, state, batch):
        logits = model.apply({"params": params}, batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), state

    def batch(key):
        keys = jax.random.split(key)
        shape = (size.batch, size.length)
        return {
            "x": jax.random.randint(keys[0], shape, 0, size.vocabulary),
            "y": jax.random.randint(keys[1], (size.batch,), 0, size.classes),
        }

    return Workload(init, loss, batch, optax.adam(1e-3))
