"""A decoder as a scan over checkpointed layers, as large models are written; 8 x 512.

RMS norms, gated SiLU and rotary positions; the head is not tied.
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
    length: int = 512
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 32000


FULL = Size()
QUICK = FULL  # a scan's body is compiled once, however many layers there are
SMALL = Size(4, 64, 4, 128, 4, 1000)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions; angles are float32, or the reference's float64."""
    exact = jnp.promote_types(x.dtype, jnp.float32)
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=exact) / half)
    angles = jnp.arange(x.shape[1], dtype=exact)[:, None, None] * frequencies
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nn.Module):
    """Pre-norm block, in the form that `nn.scan` asks for."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x, _):
        size, dtype = self.size, self.dtype
        heads = (size.heads, size.width // size.heads)
        h = nn.RMSNorm(dtype=dtype, name="norm1")(x)
        q, k, v = (
            nn.DenseGeneral(heads, use_bias=False, dtype=dtype, name=n)(h)
            for n in ("query", "key", "value")
        )
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]), dtype=bool)
        h = nn.dot_product_attention(rotate(q), rotate(k), v, mask=mask, dtype=dtype)
        x = x + nn.DenseGeneral(
            size.width, axis=(-2, -1), use_bias=False, dtype=dtype, name="out"
        )(h)
        h = nn.RMSNorm(dtype=dtype, name="norm2")(x)
        gate = nn.Dense(3 * size.width, use_bias=False, dtype=dtype, name="gate")(h)
        up = nn.Dense(3 * size.width, use_bias=False, dtype=dtype, name="up")(h)
        h = nn.silu(gate) * up
        x = x + nn.Dense(size.width, use_bias=False, dtype=dtype, name="down")(h)
        return x, None


class Decoder(nn.Module):
    """The language model."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.width, dtype=dtype, name="tokens")(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=size.layers,
        )
        x, _ = layers(size, dtype, name="layers")(x, None)
        x = nn.RMSNorm(dtype=dtype, name="norm")(x)
        return nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")(x)


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = Decoder(size, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, size.length), jnp.int32))["params"], ()

    def loss(params, state, batch):
        logits = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:]).mean(), state

    def batch(key):
        shape = (size.batch, size.length + 1)
        return jax.random.randint(key, shape, 0, size.vocabulary)

    return Workload(init, loss, batch, optax.adamw(3e-4))
