"""More train steps that no rule was made on: world models, recommendation, points."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32, cross_entropy
from zoo2_unseen import of_model

# ---- a world model


class WorldCell(nn.Module):
    """A GRU, and categorical latents of what comes next and of what is seen."""

    dtype: Any

    @nn.compact
    def __call__(self, carry: Any, seen: Any) -> Any:
        (h, z), (features, action, key) = carry, seen

        def dense(width: int) -> nn.Module:
            return nn.Dense(width, dtype=self.dtype)

        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=self.dtype)(x)

        def latents(x: Any) -> Any:
            x = dense(256)(nn.silu(dense(256)(x)))
            return at_least_float32(x).reshape(-1, 16, 16)

        x = nn.silu(norm(dense(256)(jnp.concatenate([z, action], -1))))
        gates = norm(dense(768)(jnp.concatenate([x, h.astype(x.dtype)], -1)))
        reset, new, update = jnp.split(at_least_float32(gates), 3, -1)
        update = nn.sigmoid(update - 1)
        h = update * jnp.tanh(nn.sigmoid(reset) * new) + (1 - update) * h
        prior = latents(h)
        seen = jnp.concatenate([h.astype(features.dtype), features], -1)
        posterior = latents(seen)
        p = 0.99 * jax.nn.softmax(posterior) + 0.01 / 16
        drawn = jax.nn.one_hot(jax.random.categorical(key, jnp.log(p)), 16)
        z = (drawn + p - jax.lax.stop_gradient(p)).reshape(-1, 256)
        return (h, z), (h, z, prior, posterior)


class WorldModel(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, frames: Any, actions: Any, key: Any) -> tuple[Any, ...]:
        time, size = frames.shape[:2]
        x = frames.reshape(time * size, 64, 64, 3) - 0.5
        for width in (32, 64, 128, 256):
            x = nn.silu(nn.Conv(width, (4, 4), (2, 2), dtype=self.dtype)(x))
        cell = nn.scan(
            WorldCell, variable_broadcast="params", split_rngs={"params": False}
        )
        carry = jnp.zeros((size, 256)), jnp.zeros((size, 256))
        seen = x.reshape(time, size, -1), actions, jax.random.split(key, time)
        _, (h, z, prior, posterior) = cell(self.dtype)(carry, seen)
        state = jnp.concatenate([h, z], -1).reshape(time * size, -1)
        y = nn.Dense(4096, dtype=self.dtype)(state).reshape(-1, 4, 4, 256)
        for width in (128, 64, 32):
            up = nn.ConvTranspose(width, (4, 4), (2, 2), dtype=self.dtype)
            y = nn.silu(up(y))
        y = nn.ConvTranspose(3, (4, 4), (2, 2), dtype=self.dtype)(y)
        reward = nn.silu(nn.Dense(256, dtype=self.dtype)(state))
        reward = at_least_float32(nn.Dense(1, dtype=self.dtype)(reward))
        out = at_least_float32(y).reshape(frames.shape)
        return out, reward.reshape(time, size), prior, posterior


def world_model(dtype: Any) -> Workload:
    """Frames and rewards from a recurrent state, with balanced divergences."""

    def divergence(a: Any, b: Any) -> Any:
        a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        return jnp.maximum((jnp.exp(a) * (a - b)).sum((-1, -2)), 1)

    def loss(apply: Any, batch: Any) -> Any:
        frames, actions, rewards, key = batch
        x = frames.astype(jnp.float32) / 255
        out, reward, prior, posterior = apply(x, actions, key)
        stop = jax.lax.stop_gradient
        errors = ((out - x + 0.5) ** 2).sum((2, 3, 4)) + (reward - rewards) ** 2
        errors += 0.5 * divergence(stop(posterior), prior)
        return (errors + 0.1 * divergence(posterior, stop(prior))).mean()

    def batch(key: Any) -> Any:
        frames = jax.random.randint(key, (32, 16, 64, 64, 3), 0, 255)
        actions = jax.random.normal(key, (32, 16, 6))
        rewards = jax.random.normal(key, (32, 16))
        return frames.astype(jnp.uint8), actions, rewards, key

    example = jnp.zeros((2, 1, 64, 64, 3)), jnp.zeros((2, 1, 6)), jax.random.key(0)
    optimizer = optax.chain(optax.clip_by_global_norm(1000.0), optax.adam(1e-4))
    return of_model(WorldModel(dtype), example, loss, batch, optimizer)


# ---- recommendation


class Recommender(nn.Module):
    """26 embedding tables, and the products of all pairs of features."""

    dtype: Any

    @nn.compact
    def __call__(self, numbers: Any, ids: Any) -> Any:
        def layers(x: Any, widths: tuple[int, ...]) -> Any:
            for width in widths:
                x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
            return x

        x = layers(numbers, (512, 256, 64))
        tables = [nn.Embed(20000, 64, dtype=self.dtype) for _ in range(26)]
        rows = [table(ids[:, i]) for i, table in enumerate(tables)]
        features = jnp.stack([x, *rows], 1)
        pairs = jnp.einsum("bid,bjd->bij", features, features)
        first, second = jnp.tril_indices(27, -1)
        x = jnp.concatenate([x, pairs[:, first, second]], 1)
        x = nn.Dense(1, dtype=self.dtype)(layers(x, (1024, 1024, 512, 256)))
        return at_least_float32(x)[:, 0]


def recommender(dtype: Any) -> Workload:
    """Clicks, with Adagrad."""

    def loss(apply: Any, batch: Any) -> Any:
        numbers, ids, clicks = batch
        logits = apply(jnp.log1p(jnp.abs(numbers)), ids)
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (2048, 26), 0, 20000)
        clicks = jax.random.bernoulli(key, 0.3, (2048,)).astype(jnp.float32)
        return jax.random.normal(key, (2048, 13)), ids, clicks

    example = jnp.zeros((1, 13)), jnp.zeros((1, 26), jnp.int32)
    return of_model(Recommender(dtype), example, loss, batch, optax.adagrad(0.01))


# ---- points


class PointNetwork(nn.Module):
    """Layers shared by all points, learnt alignments, and maxima over points."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        def layers(x: Any, *widths: int) -> Any:
            for width in widths:
                x = nn.Dense(width, use_bias=False, dtype=self.dtype)(x)
                norm = nn.BatchNorm(use_running_average=False, dtype=self.dtype)
                x = nn.relu(norm(x))
            return x

        def alignment(x: Any, width: int) -> Any:
            h = layers(layers(x, 64, 128, 512).max(1), 256)
            zeros = nn.initializers.zeros
            h = nn.Dense(width**2, dtype=self.dtype, kernel_init=zeros)(h)
            return at_least_float32(h).reshape(-1, width, width) + jnp.eye(width)

        first = alignment(x, 3).astype(self.dtype)
        x = layers(jnp.einsum("bnk,bkj->bnj", x.astype(self.dtype), first), 64)
        second = alignment(x, 64)
        local = jnp.einsum("bnk,bkj->bnj", x, second.astype(self.dtype))
        whole = layers(local, 128, 1024).max(1)[:, None]
        whole = jnp.broadcast_to(whole, (*local.shape[:2], 1024))
        x = layers(jnp.concatenate([local, whole], -1), 512, 256, 128)
        return at_least_float32(nn.Dense(50, dtype=self.dtype)(x)), second


def points(dtype: Any) -> Workload:
    """The part of each point, with orthogonal alignments."""
    model = PointNetwork(dtype)

    def init(key: Any) -> Any:
        found = model.init(key, jnp.zeros((2, 64, 3)))
        return found["params"], found["batch_stats"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, labels = batch
        (logits, turn), state = model.apply(
            {"params": params, "batch_stats": state}, x, mutable=["batch_stats"]
        )
        square = jnp.einsum("bij,bkj->bik", turn, turn)
        penalty = ((jnp.eye(64) - square) ** 2).sum((1, 2)).mean()
        value = cross_entropy(logits, labels).mean() + 1e-3 * penalty
        return value, state["batch_stats"]

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (16, 1024), 0, 50)
        return jax.random.normal(key, (16, 1024, 3)), labels

    return Workload(init, loss, batch, optax.adam(1e-3))
