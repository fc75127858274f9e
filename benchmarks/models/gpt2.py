"""GPT-2 small: learned positions, pre-norm, causal attention, tied head; 8 x 512."""

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
    length: int = 512
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257


FULL = Size()
QUICK = Size(layers=3)
SMALL = Size(4, 64, 4, 128, 4, 1000)


class Attention(nn.Module):
    """Causal self-attention, written out."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        heads = self.size.heads
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(x)
        qkv = qkv.reshape(batch, length, 3, heads, width // heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
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
        h = nn.LayerNorm(dtype=self.dtype, name="norm1")(x)
        x = x + Attention(self.size, self.dtype, name="attention")(h)
        h = nn.LayerNorm(dtype=self.dtype, name="norm2")(x)
        h = nn.Dense(4 * width, dtype=self.dtype, name="up")(h)
        h = nn.gelu(h, approximate=True)
        return x + nn.Dense(width, dtype=self.dtype, name="down")(h)


class GPT2(nn.Module):
    """The language model; `logits` is their dtype, `dtype` if it is None."""

    size: Size
    dtype: Any
    logits: Any = None

    @nn.compact
    def __call__(self, tokens):
        size = self.size
        embed = nn.Embed(size.vocabulary, size.width, dtype=self.dtype, name="tokens")
        places = nn.Embed(size.length, size.width, dtype=self.dtype, name="positions")
        x = embed(tokens) + places(jnp.arange(size.length))
        for i in range(size.layers):
            x = Block(size, self.dtype, name=f"block{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        if self.logits is None:
            return embed.attend(x)
        table = embed.embedding.astype(self.dtype)
        return jnp.einsum("bld,vd->blv", x, table, preferred_element_type=self.logits)


def make(dtype: Any, size: Size = FULL, logits: Any = None) -> Workload:
    """The workload; by hand, `dtype` is the half dtype, perhaps not of the logits."""
    model = GPT2(size, dtype, logits)

    def init(key):
        return model.init(key, jnp.zeros((1, size.length), jnp.int32))["params"], ()

    def loss(params, state, batch):
        logits = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:]).mean(), state

    def batch(key):
        shape = (size.batch, size.length + 1)
        return jax.random.randint(key, shape, 0, size.vocabulary)

    return Workload(init, loss, batch, optax.adamw(3e-4))
