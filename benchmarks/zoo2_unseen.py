"""Train steps that no rule was made on: written, compiled once, and reported."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32, cross_entropy


def of_model(
    model: nn.Module, example: Any, loss: Any, batch: Any, optimizer: Any
) -> Workload:
    """A workload whose state is nothing but parameters.

    Args:
      model: the network.
      example: what it is initialized with: its arguments.
      loss: `(apply, batch) -> loss`, with `apply` the network with its parameters.
      batch: `key -> batch`.
      optimizer: of optax.
    """

    def init(key: Any) -> Any:
        return model.init(key, *example)["params"], ()

    def of_params(params: Any, state: Any, data: Any) -> Any:
        def apply(*args: Any) -> Any:
            return model.apply({"params": params}, *args)

        return loss(apply, data), state

    return Workload(init, of_params, batch, optimizer)


class Block(nn.Module):
    """A pre-norm transformer block."""

    dtype: Any
    heads: int = 6

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(h))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(h)


# ---- a masked autoencoder


class MaskedAutoencoder(nn.Module):
    """Encodes a quarter of the patches, in a random order, and decodes all."""

    dtype: Any

    @nn.compact
    def __call__(self, patches: Any, noise: Any) -> tuple[Any, Any]:
        size, places, channels = patches.shape
        kept = places // 4
        order = jnp.argsort(noise, 1)
        back = jnp.argsort(order, 1)
        normal = nn.initializers.normal(0.02)
        x = nn.Dense(384, dtype=self.dtype)(patches)
        x = x + self.param("places", normal, (1, places, 384)).astype(x.dtype)
        x = jnp.take_along_axis(x, order[:, :kept, None], 1)
        for _ in range(4):
            x = Block(self.dtype)(x)
        y = nn.Dense(192, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        mask = self.param("mask", normal, (1, 1, 192)).astype(y.dtype)
        fill = jnp.broadcast_to(mask, (size, places - kept, 192))
        y = jnp.take_along_axis(jnp.concatenate([y, fill], 1), back[:, :, None], 1)
        y = y + self.param("orders", normal, (1, places, 192)).astype(y.dtype)
        for _ in range(2):
            y = Block(self.dtype)(y)
        y = nn.Dense(channels, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(y))
        return at_least_float32(y), back >= kept


def masked_autoencoder(dtype: Any) -> Workload:
    """Normalized pixels of what was left out."""

    def loss(apply: Any, batch: Any) -> Any:
        x, key = batch
        out, mask = apply(x, jax.random.uniform(key, x.shape[:2]))
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        errors = ((out - (x - mean) / jnp.sqrt(variance + 1e-6)) ** 2).mean(-1)
        return (errors * mask).sum() / mask.sum()

    example = jnp.zeros((2, 196, 768)), jnp.zeros((2, 196))
    return of_model(
        MaskedAutoencoder(dtype),
        example,
        loss,
        lambda key: (jax.random.normal(key, (64, 196, 768)), key),
        optax.adamw(1.5e-4, b2=0.95),
    )


# ---- a critic with a gradient penalty


class Critic(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (64, 128, 256):
            x = nn.Conv(width, (5, 5), (2, 2), dtype=self.dtype)(x)
            x = nn.leaky_relu(x, 0.2)
        x = nn.Dense(1, dtype=self.dtype)(x.reshape(len(x), -1))
        return at_least_float32(x)[:, 0]


def gradient_penalty(dtype: Any) -> Workload:
    """A Wasserstein critic: second derivatives of convolutions."""

    def loss(apply: Any, batch: Any) -> Any:
        real, fake, mix = batch
        x = mix * real + (1 - mix) * fake
        slope = at_least_float32(jax.grad(lambda x: apply(x).sum())(x))
        norm = jnp.sqrt((slope**2).sum((1, 2, 3)) + 1e-12)
        return (apply(fake) - apply(real) + 10 * (norm - 1) ** 2).mean()

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, (64, 32, 32, 3))
        return x, x, jax.random.uniform(key, (64, 1, 1, 1))

    example = (jnp.zeros((1, 32, 32, 3)),)
    return of_model(Critic(dtype), example, loss, batch, optax.adam(1e-4, 0.0, 0.9))


# ---- a quantized autoencoder


class Quantized(nn.Module):
    """Convolutions, the nearest of 512 codes, transposed convolutions."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        def residual(h: Any) -> Any:
            r = nn.Conv(128, (3, 3), dtype=self.dtype)(nn.relu(h))
            return h + nn.Conv(128, (1, 1), dtype=self.dtype)(nn.relu(r))

        h = nn.relu(nn.Conv(64, (4, 4), (2, 2), dtype=self.dtype)(x))
        h = nn.Conv(128, (4, 4), (2, 2), dtype=self.dtype)(h)
        h = residual(residual(h))
        z = at_least_float32(nn.Conv(64, (1, 1), dtype=self.dtype)(h))
        uniform = nn.initializers.variance_scaling(1.0, "fan_in", "uniform")
        codes = self.param("codes", uniform, (512, 64))
        flat = z.reshape(-1, 64)
        distances = (flat**2).sum(1, keepdims=True) - 2 * flat @ codes.T
        nearest = jnp.argmin(distances + (codes**2).sum(1), 1)
        code = codes[nearest].reshape(z.shape)
        commitment = 0.25 * ((jax.lax.stop_gradient(code) - z) ** 2).mean()
        commitment += ((code - jax.lax.stop_gradient(z)) ** 2).mean()
        h = nn.Conv(128, (3, 3), dtype=self.dtype)(z + jax.lax.stop_gradient(code - z))
        h = residual(residual(h))
        h = nn.relu(nn.ConvTranspose(64, (4, 4), (2, 2), dtype=self.dtype)(h))
        out = nn.ConvTranspose(3, (4, 4), (2, 2), dtype=self.dtype)(h)
        return at_least_float32(out), commitment


def quantized(dtype: Any) -> Workload:
    """Reconstruction through a codebook, straight through."""

    def loss(apply: Any, x: Any) -> Any:
        out, commitment = apply(x)
        return ((out - x) ** 2).mean() + commitment

    return of_model(
        Quantized(dtype),
        (jnp.zeros((1, 64, 64, 3)),),
        loss,
        lambda key: jax.random.normal(key, (64, 64, 64, 3)),
        optax.adam(3e-4),
    )


# ---- a radiance field


class RadianceField(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, points: Any, directions: Any) -> tuple[Any, Any]:
        def encoded(x: Any, octaves: int) -> Any:
            phases = x[..., None, :] * 2.0 ** jnp.arange(octaves)[:, None]
            phases = phases.reshape(*x.shape[:-1], -1)
            return jnp.concatenate([x, jnp.sin(phases), jnp.cos(phases)], -1)

        place = h = encoded(points, 10)
        for layer in range(8):
            h = nn.relu(nn.Dense(256, dtype=self.dtype)(h))
            if layer == 4:
                h = jnp.concatenate([h, place.astype(h.dtype)], -1)
        density = at_least_float32(nn.Dense(1, dtype=self.dtype)(h))[..., 0]
        h = nn.Dense(256, dtype=self.dtype)(h)
        seen = encoded(directions, 4)[:, None]
        seen = jnp.broadcast_to(seen, (*h.shape[:2], seen.shape[-1]))
        h = jnp.concatenate([h, seen.astype(h.dtype)], -1)
        h = nn.relu(nn.Dense(128, dtype=self.dtype)(h))
        color = at_least_float32(nn.Dense(3, dtype=self.dtype)(h))
        return nn.sigmoid(color), nn.relu(density)


def radiance_field(dtype: Any) -> Workload:
    """Colors of rays, by volumetric rendering of 64 points each."""

    def loss(apply: Any, batch: Any) -> Any:
        origins, directions, colors, key = batch
        edges = jnp.linspace(2.0, 6.0, 65)
        depth = jax.random.uniform(key, (len(origins), 64))
        depth = edges[:-1] + (edges[1:] - edges[:-1]) * depth
        points = origins[:, None] + directions[:, None] * depth[..., None]
        color, density = apply(points, directions)
        apart = jnp.diff(depth, append=jnp.full((len(depth), 1), 1e10))
        opacity = 1 - jnp.exp(-density * apart)
        light = jnp.cumprod(1 - opacity + 1e-10, 1)
        light = jnp.concatenate([jnp.ones((len(depth), 1)), light[:, :-1]], 1)
        rendered = ((opacity * light)[..., None] * color).sum(1)
        return ((rendered - colors) ** 2).mean()

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, (1024, 3))
        return x, x, x, key

    example = jnp.zeros((1, 4, 3)), jnp.zeros((1, 3))
    return of_model(RadianceField(dtype), example, loss, batch, optax.adam(5e-4))


# ---- speech


class Conformer(nn.Module):
    """Attention and depthwise convolutions between two half feed-forward layers."""

    dtype: Any
    width: int = 256

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def dense(width: int) -> nn.Module:
            return nn.Dense(width, dtype=self.dtype)

        def norm(h: Any) -> Any:
            return nn.LayerNorm(dtype=self.dtype)(h)

        def feed_forward(h: Any) -> Any:
            h = nn.swish(dense(4 * self.width)(norm(h)))
            return 0.5 * dense(self.width)(h)

        x = x[..., None]
        for _ in range(2):
            x = nn.relu(nn.Conv(64, (3, 3), (2, 2), dtype=self.dtype)(x))
        x = dense(self.width)(x.reshape(*x.shape[:2], -1))
        for _ in range(4):
            x = x + feed_forward(x)
            h = norm(x)
            x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(h, h)
            h = nn.glu(dense(2 * self.width)(norm(x)))
            h = nn.Conv(
                self.width, (31,), feature_group_count=self.width, dtype=self.dtype
            )(h)
            x = x + dense(self.width)(nn.swish(norm(h)))
            x = norm(x + feed_forward(x))
        return at_least_float32(dense(128)(x))


def conformer(dtype: Any) -> Workload:
    """Connectionist temporal classification of speech."""

    def loss(apply: Any, batch: Any) -> Any:
        x, labels = batch
        logits = apply(x)
        padding = (labels == 0).astype(jnp.float32)
        full = jnp.zeros(logits.shape[:2])
        return optax.ctc_loss(logits, full, labels, padding).mean()

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (16, 40), 0, 128)
        return jax.random.normal(key, (16, 400, 80)), labels

    example = (jnp.zeros((1, 400, 80)),)
    return of_model(Conformer(dtype), example, loss, batch, optax.adamw(1e-3))


# ---- latents that attend to pixels


class Perceiver(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        normal = nn.initializers.normal(0.02)
        latents = self.param("latents", normal, (128, 256)).astype(self.dtype)
        z = jnp.broadcast_to(latents, (len(x), 128, 256))
        for _ in range(2):
            attend = nn.MultiHeadDotProductAttention(
                1, dtype=self.dtype, qkv_features=256, out_features=256
            )
            memory = nn.LayerNorm(dtype=self.dtype)(x)
            z = z + attend(nn.LayerNorm(dtype=self.dtype)(z), memory)
            for _ in range(3):
                z = Block(self.dtype, 8)(z)
        return at_least_float32(nn.Dense(100, dtype=self.dtype)(z.mean(1)))


def perceiver(dtype: Any) -> Workload:
    """Images with Fourier features of their pixels' places, and LAMB."""

    def pixels(x: Any) -> Any:
        size, height, width, _ = x.shape
        sides = [jnp.linspace(-1, 1, n) for n in (height, width)]
        place = jnp.stack(jnp.meshgrid(*sides, indexing="ij"), -1)
        phases = place[..., None] * jnp.linspace(1, 16, 16) * jnp.pi
        phases = phases.reshape(height, width, -1)
        waves = jnp.concatenate([jnp.sin(phases), jnp.cos(phases), place], -1)
        waves = jnp.broadcast_to(waves, (size, *waves.shape))
        return jnp.concatenate([x, waves], -1).reshape(size, height * width, -1)

    def loss(apply: Any, batch: Any) -> Any:
        x, labels = batch
        return cross_entropy(apply(pixels(x)), labels).mean()

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (64,), 0, 100)
        return jax.random.normal(key, (64, 32, 32, 3)), labels

    example = (jnp.zeros((1, 1024, 69)),)
    return of_model(Perceiver(dtype), example, loss, batch, optax.lamb(1e-3))
