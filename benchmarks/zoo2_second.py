"""The second half of the second zoo, written after the rules stood."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32

# ---- an encoder-decoder

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 256, 512, 8192


class RelativeAttention(nn.Module):
    """Attention with a learnt bias by bucketed distance, as T5's."""

    dtype: Any
    causal: bool = False
    heads: int = 8

    @nn.compact
    def __call__(self, x: Any, memory: Any) -> Any:
        def heads(y: Any) -> Any:
            size = x.shape[-1] // self.heads
            return nn.DenseGeneral(
                (self.heads, size), use_bias=False, dtype=self.dtype
            )(y)

        q, k, v = heads(x), heads(memory), heads(memory)
        apart = jnp.arange(memory.shape[1]) - jnp.arange(x.shape[1])[:, None]
        near = jnp.sign(apart) * jnp.floor(4 * jnp.log1p(jnp.abs(apart)))
        bias = nn.Embed(64, self.heads, dtype=self.dtype)(
            near.astype(jnp.int32).clip(-31, 31) + 32
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias.transpose(2, 0, 1)
        if self.causal:
            scores = jnp.where(apart <= 0, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(at_least_float32(scores)).astype(self.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(
            x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype
        )(out)


class EncoderDecoder(nn.Module):
    """Two layers each, pre-norm, with a gated GELU."""

    dtype: Any

    @nn.compact
    def __call__(self, source: Any, target: Any) -> Any:
        def norm(x: Any) -> Any:
            return nn.RMSNorm(dtype=self.dtype)(x)

        def dense(width: int) -> nn.Module:
            return nn.Dense(width, use_bias=False, dtype=self.dtype)

        def feed_forward(x: Any) -> Any:
            h = norm(x)
            h = nn.gelu(dense(2 * WIDTH)(h)) * dense(2 * WIDTH)(h)
            return x + dense(WIDTH)(h)

        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embed(source)
        for _ in range(2):
            h = norm(x)
            x = feed_forward(x + RelativeAttention(self.dtype)(h, h))
        memory, y = norm(x), embed(target)
        for _ in range(2):
            h = norm(y)
            y = y + RelativeAttention(self.dtype, causal=True)(h, h)
            y = feed_forward(y + RelativeAttention(self.dtype)(norm(y), memory))
        return dense(VOCABULARY)(norm(y))


def encoder_decoder(dtype: Any) -> Workload:
    """Relative positions, cross-attention, Adafactor."""
    model = EncoderDecoder(dtype)

    def batch(key: Any) -> Any:
        shape = (2, BATCH, LENGTH + 1)
        return jax.random.randint(key, shape, 0, VOCABULARY)

    def init(key: Any) -> Any:
        ids = jnp.zeros((1, LENGTH), jnp.int32)
        return model.init(key, ids, ids)["params"], ()

    def loss(params: Any, state: Any, x: Any) -> Any:
        source, target = x
        logits = at_least_float32(
            model.apply({"params": params}, source[:, 1:], target[:, :-1])
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:])
        padding = target[:, 1:] != 0
        return (losses * padding).sum() / padding.sum(), state

    return Workload(init, loss, batch, optax.adafactor(1e-3))


# ---- distillation


class Mixer(nn.Module):
    """An MLP-Mixer."""

    dtype: Any
    width: int
    layers: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def mlp(x: Any, width: int) -> Any:
            h = nn.gelu(nn.Dense(2 * width, dtype=self.dtype)(x))
            return nn.Dense(x.shape[-1], dtype=self.dtype)(h)

        x = nn.Conv(self.width, (8, 8), (8, 8), dtype=self.dtype)(x)
        x = x.reshape(len(x), -1, self.width)
        for _ in range(self.layers):
            h = nn.LayerNorm(dtype=self.dtype)(x).swapaxes(1, 2)
            x = x + mlp(h, 128).swapaxes(1, 2)
            x = x + mlp(nn.LayerNorm(dtype=self.dtype)(x), self.width)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return at_least_float32(nn.Dense(100, dtype=self.dtype)(x))


def distillation(dtype: Any) -> Workload:
    """A student that follows a frozen teacher and the labels."""
    teacher, student = Mixer(dtype, 512, 4), Mixer(dtype, 256, 3)
    images = (64, 64, 64, 3)

    def init(key: Any) -> Any:
        x = jnp.zeros((1, *images[1:]))
        return student.init(key, x)["params"], teacher.init(key, x)["params"]

    def loss(params: Any, frozen: Any, batch: Any) -> Any:
        x, labels = batch
        logits = student.apply({"params": params}, x)
        soft = jax.nn.softmax(teacher.apply({"params": frozen}, x) / 4)
        follows = optax.softmax_cross_entropy(logits / 4, soft).mean()
        labelled = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return 0.5 * labelled.mean() + 8 * follows, frozen

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, images)
        return x, jax.random.randint(key, images[:1], 0, 100)

    return Workload(init, loss, batch, optax.lion(1e-4))


# ---- diffusion


class Denoiser(nn.Module):
    """A small U-Net with group norm and a time embedding."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        rates = jnp.exp(-jnp.arange(64) / 8.0)
        phases = time[:, None] * 1000.0 * rates
        t = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)
        t = nn.silu(nn.Dense(256, dtype=self.dtype)(t))

        def block(x: Any, width: int) -> Any:
            h = nn.silu(nn.GroupNorm(dtype=self.dtype)(x))
            h = nn.Conv(width, (3, 3), dtype=self.dtype)(h)
            h = h + nn.Dense(width, dtype=self.dtype)(t)[:, None, None]
            h = nn.silu(nn.GroupNorm(dtype=self.dtype)(h))
            h = nn.Conv(width, (3, 3), dtype=self.dtype)(h)
            if x.shape[-1] != width:
                x = nn.Conv(width, (1, 1), dtype=self.dtype)(x)
            return x + h

        skips = []
        x = nn.Conv(64, (3, 3), dtype=self.dtype)(x)
        for width in (64, 128):
            x = block(x, width)
            skips.append(x)
            x = nn.Conv(width, (3, 3), (2, 2), dtype=self.dtype)(x)
        x = block(x, 256)
        for width in (128, 64):
            shape = (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
            x = nn.Conv(width, (3, 3), dtype=self.dtype)(
                jax.image.resize(x, shape, "nearest")
            )
            x = block(jnp.concatenate([x, skips.pop()], -1), width)
        x = nn.silu(nn.GroupNorm(dtype=self.dtype)(x))
        return at_least_float32(nn.Conv(3, (3, 3), dtype=self.dtype)(x))


def diffusion(dtype: Any) -> Workload:
    """Denoising at random times, with an average of the parameters."""
    model = Denoiser(dtype)
    images = (32, 32, 32, 3)

    def init(key: Any) -> Any:
        params = model.init(key, jnp.zeros((1, *images[1:])), jnp.zeros(1))["params"]
        return params, params

    def loss(params: Any, average: Any, batch: Any) -> Any:
        x, key = batch
        first, second = jax.random.split(key)
        time = jax.random.uniform(first, images[:1])
        noise = jax.random.normal(second, images)
        signal = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
        noisy = signal * x + jnp.sqrt(1 - signal**2) * noise
        out = model.apply({"params": params}, noisy, time)
        average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, average, params)
        return jnp.mean((out - noise) ** 2), jax.lax.stop_gradient(average)

    def batch(key: Any) -> Any:
        return jax.random.normal(key, images), key

    return Workload(init, loss, batch, optax.adamw(1e-4))


# ---- reinforcement learning


class Values(nn.Module):
    """A DQN's network on stacked frames, with duelling heads."""

    dtype: Any

    @nn.compact
    def __call__(self, frames: Any) -> Any:
        x = frames.astype(self.dtype) / 255
        for width, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.Conv(
                width, (size, size), (stride, stride), "VALID", dtype=self.dtype
            )(x)
            x = nn.relu(x)
        x = x.reshape(len(x), -1)
        value, advantage = (
            nn.Dense(n, dtype=self.dtype)(nn.relu(nn.Dense(512, dtype=self.dtype)(x)))
            for n in (1, 18)
        )
        advantage = at_least_float32(advantage)
        return at_least_float32(value) + advantage - advantage.mean(-1, keepdims=True)


def double_dqn(dtype: Any) -> Workload:
    """Double Q-learning of a batch of transitions, with a target network."""
    model = Values(dtype)
    frames = (256, 84, 84, 4)

    def init(key: Any) -> Any:
        params = model.init(key, jnp.zeros((1, *frames[1:]), jnp.uint8))["params"]
        return params, params

    def loss(params: Any, target: Any, batch: Any) -> Any:
        def values(params: Any, x: Any) -> Any:
            return model.apply({"params": params}, x)

        now = values(params, batch["now"])
        chosen = jnp.take_along_axis(now, batch["action"][:, None], -1)[:, 0]
        best = values(params, batch["next"]).argmax(-1)
        later = values(target, batch["next"])[jnp.arange(len(best)), best]
        wanted = batch["reward"] + 0.99 * batch["goes_on"] * later
        error = chosen - jax.lax.stop_gradient(wanted)
        moved = jax.tree.map(lambda t, p: 0.995 * t + 0.005 * p, target, params)
        return optax.losses.huber_loss(error).mean(), jax.lax.stop_gradient(moved)

    def batch(key: Any) -> Any:
        seen = jax.random.randint(key, (2, *frames), 0, 256).astype(jnp.uint8)
        return {
            "now": seen[0],
            "next": seen[1],
            "action": jax.random.randint(key, frames[:1], 0, 18),
            "reward": jax.random.normal(key, frames[:1]),
            "goes_on": jnp.ones(frames[:1]),
        }

    tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(6e-5))
    return Workload(init, loss, batch, tx)
