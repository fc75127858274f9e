"""Image models of the second zoo, written as their users write them."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32

# ---- a GAN

IMAGES, LATENT = 256, 128


class Generator(nn.Module):
    """A DCGAN's: transposed convolutions with batch norm."""

    dtype: Any

    @nn.compact
    def __call__(self, z: Any) -> Any:
        x = nn.Dense(4 * 4 * 512, use_bias=False, dtype=self.dtype)(z)
        x = x.reshape(-1, 4, 4, 512)
        for width in (256, 128, 64):
            x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
            x = nn.relu(x)
            x = nn.ConvTranspose(
                width, (4, 4), (2, 2), use_bias=False, dtype=self.dtype
            )(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2), dtype=self.dtype)(x))


class Discriminator(nn.Module):
    """A DCGAN's: strided convolutions with batch norm."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.leaky_relu(nn.Conv(64, (4, 4), (2, 2), dtype=self.dtype)(x), 0.2)
        for width in (128, 256, 512):
            x = nn.Conv(width, (4, 4), (2, 2), use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
            x = nn.leaky_relu(x, 0.2)
        return at_least_float32(nn.Dense(1, dtype=self.dtype)(x.reshape(len(x), -1)))


class Gan(NamedTuple):
    """A step with two networks, two losses and two optimizers."""

    dtype: Any
    optimizer: Any = optax.adam(2e-4, b1=0.5)

    def step(self, params: Any, states: Any, batch: Any) -> Any:
        """Updates the discriminator, then the generator, of the same fake images."""
        real, key = batch
        generator, discriminator = Generator(self.dtype), Discriminator(self.dtype)
        z = jax.random.normal(key, (len(real), LATENT))

        def apply(module: Any, params: Any, x: Any) -> Any:
            out, _ = module.apply({"params": params}, x, mutable=["batch_stats"])
            return out

        def discriminator_loss(own: Any, other: Any) -> Any:
            fake = jax.lax.stop_gradient(apply(generator, other, z))
            logits = [apply(discriminator, own, x) for x in (real, fake)]
            losses = map(
                optax.sigmoid_binary_cross_entropy, logits, map(jnp.float32, (1, 0))
            )
            return sum(x.mean() for x in losses)

        def generator_loss(own: Any, other: Any) -> Any:
            logits = apply(discriminator, other, apply(generator, own, z))
            return optax.sigmoid_binary_cross_entropy(logits, jnp.float32(1)).mean()

        g, d = params
        d_loss, d_grads = jax.value_and_grad(discriminator_loss)(d, g)
        g_loss, g_grads = jax.value_and_grad(generator_loss)(g, d)
        updated = []
        for own, grads, state in zip((g, d), (g_grads, d_grads), states, strict=True):
            updates, state = self.optimizer.update(grads, state, own)
            updated.append((optax.apply_updates(own, updates), state))
        params, states = zip(*updated, strict=True)
        return params, states, (g_loss, d_loss)

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the step's arguments."""

        def make(key: Any) -> Any:
            images = jax.random.normal(key, (IMAGES, 64, 64, 3))
            g = Generator(self.dtype).init(key, jnp.zeros((1, LATENT)))["params"]
            d = Discriminator(self.dtype).init(key, images[:1])["params"]
            states = tuple(map(self.optimizer.init, (g, d)))
            return (g, d), states, (images, key)

        return jax.eval_shape(make, jax.random.key(0))


# ---- self-supervision with a target network


class Residual(nn.Module):
    """A block of a ResNet with group norm."""

    dtype: Any
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(size: int, stride: int) -> nn.Module:
            return nn.Conv(
                self.width,
                (size, size),
                (stride, stride),
                use_bias=False,
                dtype=self.dtype,
            )

        y = nn.relu(nn.GroupNorm(dtype=self.dtype)(conv(3, self.stride)(x)))
        y = nn.GroupNorm(dtype=self.dtype)(conv(3, 1)(y))
        if x.shape != y.shape:
            x = nn.GroupNorm(dtype=self.dtype)(conv(1, self.stride)(x))
        return nn.relu(x + y)


class Encoder(nn.Module):
    """A small ResNet with a projection."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(64, (3, 3), dtype=self.dtype)(x)
        for width, stride in ((64, 1), (128, 2), (256, 2)):
            x = Residual(self.dtype, width, stride)(x)
        x = x.mean((1, 2))
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x))
        return nn.Dense(128, dtype=self.dtype)(x)


class Predictor(nn.Module):
    """What the online network has more."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x))
        return nn.Dense(128, dtype=self.dtype)(x)


def byol(dtype: Any) -> Workload:
    """Two views, an online network that predicts a target network, and its EMA."""
    encoder, predictor = Encoder(dtype), Predictor(dtype)
    views = (128, 32, 32, 3)

    def init(key: Any) -> Any:
        online = encoder.init(key, jnp.zeros((1, *views[1:])))["params"]
        head = predictor.init(key, jnp.zeros((1, 128)))["params"]
        return {"encoder": online, "predictor": head}, online

    def distance(a: Any, b: Any) -> Any:
        a, b = at_least_float32(a), at_least_float32(b)
        a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
        b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        return 2 - 2 * (a * b).sum(-1).mean()

    def loss(params: Any, target: Any, batch: Any) -> Any:
        def predicted(x: Any) -> Any:
            h = encoder.apply({"params": params["encoder"]}, x)
            return predictor.apply({"params": params["predictor"]}, h)

        def targeted(x: Any) -> Any:
            return jax.lax.stop_gradient(encoder.apply({"params": target}, x))

        a, b = batch
        value = distance(predicted(a), targeted(b)) + distance(
            predicted(b), targeted(a)
        )
        moved = jax.tree.map(
            lambda t, p: 0.99 * t + 0.01 * p, target, params["encoder"]
        )
        return value, jax.lax.stop_gradient(moved)

    def batch(key: Any) -> Any:
        return tuple(jax.random.normal(k, views) for k in jax.random.split(key))

    return Workload(init, loss, batch, optax.sgd(0.1, momentum=0.9))


# ---- a diffusion transformer with checkpoints

EXAMPLES, PATCHES, CHANNELS, WIDTH = 32, 256, 16, 768


class Modulated(nn.Module):
    """Attention and a feed-forward network, shifted, scaled and gated by the time."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        def norm(x: Any, scale: Any, shift: Any) -> Any:
            norm = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)
            return norm(x) * (1 + scale) + shift

        six = nn.Dense(6 * WIDTH, dtype=self.dtype)(nn.silu(time))[:, None]
        shift, scale, gate, late_shift, late_scale, late_gate = jnp.split(six, 6, -1)
        h = norm(x, scale, shift)
        x = x + gate * nn.MultiHeadDotProductAttention(12, dtype=self.dtype)(h, h)
        h = nn.Dense(4 * WIDTH, dtype=self.dtype)(norm(x, late_scale, late_shift))
        return x + late_gate * nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(h))


class DiffusionTransformer(nn.Module):
    """Six blocks, unrolled, each checkpointed."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = nn.Dense(WIDTH, dtype=self.dtype)(x + positions)
        phases = time[:, None] * jnp.exp(-jnp.linspace(0.0, 9.0, 128))
        waves = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)
        time = nn.silu(nn.Dense(WIDTH, dtype=self.dtype)(waves))
        time = nn.Dense(WIDTH, dtype=self.dtype)(time)
        for i in range(6):
            x = nn.remat(Modulated)(self.dtype, name=f"block{i}")(x, time)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return at_least_float32(nn.Dense(CHANNELS, dtype=self.dtype)(x))


def diffusion_transformer(dtype: Any) -> Workload:
    """Predicts the noise."""
    model = DiffusionTransformer(dtype)
    shape = EXAMPLES, PATCHES, CHANNELS

    def init(key: Any) -> Any:
        return model.init(key, jnp.zeros(shape), jnp.zeros(EXAMPLES))["params"], ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        clean, noise, time = batch
        near = time[:, None, None]
        noisy = jnp.sqrt(1 - near) * clean + jnp.sqrt(near) * noise
        found = model.apply({"params": params}, noisy, 1000 * time)
        return jnp.square(found - noise).mean(), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        clean, noise = (jax.random.normal(k, shape) for k in keys[:2])
        return clean, noise, jax.random.uniform(keys[2], (EXAMPLES,))

    return Workload(init, loss, batch, optax.adamw(1e-4))
