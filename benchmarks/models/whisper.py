"""Whisper small's encoder: 8 spectrograms of 3000 x 80, with a head of languages.

Two convolutions, sinusoidal positions, pre-norm blocks with GELU; a linear classifier
of the mean feature, as for identifying the language. Not one of the compared models.
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

    batch: int = 8
    frames: int = 3000
    mels: int = 80
    layers: int = 12
    width: int = 768
    heads: int = 12
    classes: int = 99


FULL = Size()
QUICK = Size(layers=3)
SMALL = Size(4, 128, 16, 3, 64, 4, 20)


def sinusoids(length: int, width: int) -> Any:
    """Positions, as in the paper's code."""
    steps = jnp.log(10000.0) / (width // 2 - 1)
    rates = jnp.exp(-steps * jnp.arange(width // 2))
    angles = jnp.arange(length)[:, None] * rates[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class Attention(nn.Module):
    """Self-attention, whose keys have no bias."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        heads = self.size.heads

        def split(name, use_bias=True):
            dense = nn.Dense(width, use_bias, dtype=self.dtype, name=name)
            return dense(x).reshape(batch, length, heads, width // heads)

        q, k, v = split("query"), split("key", use_bias=False), split("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
        return nn.Dense(width, dtype=self.dtype, name="out")(out)


class Block(nn.Module):
    """Pre-norm block."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.LayerNorm(1e-5, dtype=self.dtype, name="norm1")(x)
        x = x + Attention(self.size, self.dtype, name="attention")(h)
        h = nn.LayerNorm(1e-5, dtype=self.dtype, name="norm2")(x)
        h = nn.Dense(4 * width, dtype=self.dtype, name="up")(h)
        h = nn.gelu(h, approximate=False)
        return x + nn.Dense(width, dtype=self.dtype, name="down")(h)


class Whisper(nn.Module):
    """The encoder and the classifier."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, mels):
        size, dtype = self.size, self.dtype
        x = nn.Conv(size.width, (3,), padding=1, dtype=dtype, name="conv1")(mels)
        x = nn.gelu(x, approximate=False)
        x = nn.Conv(size.width, (3,), 2, padding=1, dtype=dtype, name="conv2")(x)
        x = nn.gelu(x, approximate=False)
        x = x + sinusoids(x.shape[1], size.width).astype(x.dtype)
        for i in range(size.layers):
            x = Block(size, dtype, name=f"block{i}")(x)
        x = nn.LayerNorm(1e-5, dtype=dtype, name="norm")(x)
        return nn.Dense(size.classes, dtype=dtype, name="head")(x.mean(axis=1))


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = Whisper(size, dtype)

    def init(key):
        mels = jnp.zeros((1, size.frames, size.mels))
        return model.init(key, mels)["params"], ()

    def loss(params, state, batch):
        logits = model.apply({"params": params}, batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), state

    def batch(key):
        keys = jax.random.split(key)
        return {
            "x": jax.random.normal(keys[0], (size.batch, size.frames, size.mels)),
            "y": jax.random.randint(keys[1], (size.batch,), 0, size.classes),
        }

    return Workload(init, loss, batch, optax.adamw(1e-3))
