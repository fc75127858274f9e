"""BERT-base: post-norm, padding mask, masked language model; 16 x 128."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.common import Workload, cross_entropy


class Size(NamedTuple):
    """Dimensions."""

    batch: int = 16
    length: int = 128
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 30522


FULL = Size()
QUICK = Size(layers=3)
SMALL = Size(8, 64, 4, 128, 4, 1000)


class Attention(nn.Module):
    """Self-attention with a padding mask."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        heads = (self.size.heads, x.shape[-1] // self.size.heads)
        q, k, v = (
            nn.DenseGeneral(heads, dtype=self.dtype, name=n)(x)
            for n in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * heads[1] ** -0.5
        masked = jnp.finfo(scores.dtype).min
        scores = jnp.where(mask[:, None, None, :], scores, masked)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(
            x.shape[-1], axis=(-2, -1), dtype=self.dtype, name="out"
        )(out)


class Block(nn.Module):
    """Post-norm block."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        h = Attention(self.size, self.dtype, name="attention")(x, mask)
        x = nn.LayerNorm(1e-12, dtype=self.dtype, name="norm1")(x + h)
        h = nn.Dense(4 * width, dtype=self.dtype, name="up")(x)
        h = nn.gelu(h, approximate=False)
        h = nn.Dense(width, dtype=self.dtype, name="down")(h)
        return nn.LayerNorm(1e-12, dtype=self.dtype, name="norm2")(x + h)


class BERT(nn.Module):
    """The encoder with its masked language model head."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens, segments, mask):
        size, dtype = self.size, self.dtype
        embed = nn.Embed(size.vocabulary, size.width, dtype=dtype, name="tokens")
        places = nn.Embed(size.length, size.width, dtype=dtype, name="positions")
        kinds = nn.Embed(2, size.width, dtype=dtype, name="segments")
        x = embed(tokens) + places(jnp.arange(size.length)) + kinds(segments)
        x = nn.LayerNorm(1e-12, dtype=dtype, name="norm")(x)
        for i in range(size.layers):
            x = Block(size, dtype, name=f"block{i}")(x, mask)
        x = nn.Dense(size.width, dtype=dtype, name="transform")(x)
        x = nn.gelu(x, approximate=False)
        x = nn.LayerNorm(1e-12, dtype=dtype, name="transform_norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (size.vocabulary,))
        logits = embed.attend(x)
        return logits + bias.astype(logits.dtype)


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = BERT(size, dtype)

    def init(key):
        tokens = jnp.zeros((1, size.length), jnp.int32)
        return model.init(key, tokens, tokens, tokens > 0)["params"], ()

    def loss(params, state, batch):
        logits = model.apply(
            {"params": params}, batch["tokens"], batch["segments"], batch["mask"]
        )
        losses = cross_entropy(logits, batch["labels"])
        chosen = batch["chosen"]
        return (losses * chosen).sum() / jnp.maximum(chosen.sum(), 1), state

    def batch(key):
        keys = jax.random.split(key, 4)
        shape = (size.batch, size.length)
        places = jnp.arange(size.length)
        lengths = jax.random.randint(
            keys[0], (size.batch, 1), size.length // 2, size.length + 1
        )
        chosen = jax.random.bernoulli(keys[1], 0.15, shape) & (places < lengths)
        return {
            "tokens": jax.random.randint(keys[2], shape, 0, size.vocabulary),
            "segments": (places >= lengths // 2).astype(jnp.int32),
            "mask": places < lengths,
            "labels": jax.random.randint(keys[3], shape, 0, size.vocabulary),
            "chosen": chosen.astype(jnp.float32),
        }

    return Workload(init, loss, batch, optax.adamw(1e-4))
