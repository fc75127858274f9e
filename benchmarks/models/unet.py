"""A U-Net as diffusion models have it: group norms, SiLU, skips; 32 images of 64 x 64.

Residual blocks with an embedded time, self-attention at the lowest resolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.common import Workload, at_least_float32


class Size(NamedTuple):
    """Dimensions."""

    batch: int = 32
    pixels: int = 64
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: int = 2


FULL = Size()
QUICK = Size(blocks=1)
SMALL = Size(8, 16, (32, 64), 1)


class ResBlock(nn.Module):
    """Norm, SiLU, convolution, twice, with the time added between."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x, time):
        dtype = self.dtype
        h = nn.silu(nn.GroupNorm(32, dtype=dtype, name="norm1")(x))
        h = nn.Conv(self.width, (3, 3), dtype=dtype, name="conv1")(h)
        shift = nn.Dense(self.width, dtype=dtype, name="time")(nn.silu(time))
        h = h + shift[:, None, None, :]
        h = nn.silu(nn.GroupNorm(32, dtype=dtype, name="norm2")(h))
        h = nn.Conv(self.width, (3, 3), dtype=dtype, name="conv2")(h)
        if x.shape[-1] != self.width:
            x = nn.Conv(self.width, (1, 1), dtype=dtype, name="skip")(x)
        return x + h


class Attention(nn.Module):
    """Self-attention over the pixels."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        h = nn.GroupNorm(32, dtype=self.dtype, name="norm")(x)
        h = h.reshape(x.shape[0], -1, x.shape[-1])
        h = nn.MultiHeadDotProductAttention(4, dtype=self.dtype, name="heads")(h)
        return x + h.reshape(x.shape)


class UNet(nn.Module):
    """Predicts the noise."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x, time):
        size, dtype = self.size, self.dtype
        channels = x.shape[-1]
        half = size.widths[0] // 2
        frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / half)
        angles = time[:, None] * frequencies
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        t = t.astype(x.dtype)
        t = nn.Dense(4 * size.widths[0], dtype=dtype, name="time1")(t)
        t = nn.Dense(4 * size.widths[0], dtype=dtype, name="time2")(nn.silu(t))
        x = nn.Conv(size.widths[0], (3, 3), dtype=dtype, name="stem")(x)
        skips = [x]
        for i, width in enumerate(size.widths):
            for j in range(size.blocks):
                x = ResBlock(width, dtype, name=f"down{i}_{j}")(x, t)
                skips.append(x)
            if i < len(size.widths) - 1:
                conv = nn.Conv(width, (3, 3), (2, 2), dtype=dtype, name=f"shrink{i}")
                x = conv(x)
                skips.append(x)
        x = ResBlock(size.widths[-1], dtype, name="middle1")(x, t)
        x = Attention(dtype, name="attention")(x)
        x = ResBlock(size.widths[-1], dtype, name="middle2")(x, t)
        for i, width in reversed(list(enumerate(size.widths))):
            for j in range(size.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = ResBlock(width, dtype, name=f"up{i}_{j}")(x, t)
            if i:
                shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
                x = jax.image.resize(x, shape, "nearest")
                x = nn.Conv(width, (3, 3), dtype=dtype, name=f"grow{i}")(x)
        x = nn.silu(nn.GroupNorm(32, dtype=dtype, name="norm")(x))
        return nn.Conv(channels, (3, 3), dtype=dtype, name="out")(x)


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = UNet(size, dtype)

    def init(key):
        images = jnp.zeros((1, size.pixels, size.pixels, 3))
        return model.init(key, images, jnp.zeros((1,)))["params"], ()

    def loss(params, state, batch):
        guess = model.apply({"params": params}, batch["x"], batch["time"])
        return jnp.mean((at_least_float32(guess) - batch["noise"]) ** 2), state

    def batch(key):
        keys = jax.random.split(key, 3)
        shape = (size.batch, size.pixels, size.pixels, 3)
        return {
            "x": jax.random.normal(keys[0], shape),
            "noise": jax.random.normal(keys[1], shape),
            "time": jax.random.uniform(keys[2], (size.batch,), maxval=1000.0),
        }

    return Workload(init, loss, batch, optax.adamw(1e-4))
