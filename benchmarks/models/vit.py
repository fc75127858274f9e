"""ViT-B/16 with Flax's own attention; 64 images of 224 x 224."""

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
    pixels: int = 224
    patch: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    classes: int = 1000


FULL = Size()
QUICK = Size(layers=3)
SMALL = Size(16, 64, 8, 4, 128, 4, 100)


class Block(nn.Module):
    """Pre-norm block."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width, dtype = self.size.width, self.dtype
        h = nn.LayerNorm(1e-6, dtype=dtype, name="norm1")(x)
        attention = nn.MultiHeadDotProductAttention(
            self.size.heads, dtype=dtype, deterministic=True, name="attention"
        )
        x = x + attention(h)
        h = nn.LayerNorm(1e-6, dtype=dtype, name="norm2")(x)
        h = nn.gelu(nn.Dense(4 * width, dtype=dtype, name="up")(h), approximate=False)
        return x + nn.Dense(width, dtype=dtype, name="down")(h)


class ViT(nn.Module):
    """The classifier, on a class token."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, images):
        size, dtype = self.size, self.dtype
        patch = (size.patch, size.patch)
        x = nn.Conv(size.width, patch, patch, "VALID", dtype=dtype, name="patches")(
            images
        )
        x = x.reshape(x.shape[0], -1, size.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, size.width))
        token = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, size.width))
        x = jnp.concatenate([token, x], axis=1)
        places = self.param(
            "positions", nn.initializers.normal(0.02), (1, *x.shape[1:])
        )
        x = x + places.astype(x.dtype)
        for i in range(size.layers):
            x = Block(size, dtype, name=f"block{i}")(x)
        x = nn.LayerNorm(1e-6, dtype=dtype, name="norm")(x)
        return nn.Dense(size.classes, dtype=dtype, name="head")(x[:, 0])


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = ViT(size, dtype)

    def init(key):
        images = jnp.zeros((1, size.pixels, size.pixels, 3))
        return model.init(key, images)["params"], ()

    def loss(params, state, batch):
        logits = model.apply({"params": params}, batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), state

    def batch(key):
        keys = jax.random.split(key)
        return {
            "x": jax.random.normal(keys[0], (size.batch, size.pixels, size.pixels, 3)),
            "y": jax.random.randint(keys[1], (size.batch,), 0, size.classes),
        }

    return Workload(init, loss, batch, optax.adamw(1e-3))
