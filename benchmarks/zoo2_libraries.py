"""The second zoo's second half in NNX, Equinox and Haiku, written before its figures.

By hand, an NNX layer takes `dtype`; Equinox and Haiku have no such argument, and their
users cast the parameters and the inputs at the head of the loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from models.common import Workload, at_least_float32


def cast(tree: Any, dtype: Any, keep: Any = lambda path: False) -> Any:
    """Casts float32 leaves to the compute dtype, float32 itself for the decorated.

    Args:
      tree: of arrays and others, which stay.
      dtype: the compute dtype.
      keep: whether a leaf stays, by its path as a string.
    """

    def one(path: Any, x: Any) -> Any:
        if keep(jax.tree_util.keystr(path)) or not eqx.is_inexact_array(x):
            return x
        return x.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


# ---- NNX: contrastive towers


class TowerBlock(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List(
            [nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.attention = nnx.MultiHeadAttention(
            8, width, dtype=dtype, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any, mask: Any = None) -> Any:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Towers(nnx.Module):
    """An image tower, a text tower and a learnt temperature."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        width, self.dtype = 256, dtype
        self.patches = nnx.Conv(3, width, (8, 8), (8, 8), dtype=dtype, rngs=rngs)
        self.tokens = nnx.Embed(4096, width, dtype=dtype, rngs=rngs)
        normal = nnx.initializers.normal(0.02)
        self.places = nnx.Param(normal(rngs.params(), (64, width)))
        self.orders = nnx.Param(normal(rngs.params(), (64, width)))
        make = TowerBlock
        self.image = nnx.List([make(width, dtype, rngs) for _ in range(3)])
        self.text = nnx.List([make(width, dtype, rngs) for _ in range(3)])
        self.heads = nnx.List(
            [nnx.Linear(width, 128, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.scale = nnx.Param(jnp.log(jnp.float32(10.0)))

    def __call__(self, images: Any, ids: Any) -> Any:
        x = self.patches(images)
        x = x.reshape(len(x), 64, -1) + self.places.astype(self.dtype)
        y = self.tokens(ids) + self.orders.astype(self.dtype)
        for block in self.image:
            x = block(x)
        mask = nnx.make_causal_mask(ids)
        for block in self.text:
            y = block(y, mask)
        features = []
        for head, z in zip(self.heads, (x.mean(1), y[:, -1]), strict=True):
            z = at_least_float32(head(z))
            features.append(z / jnp.linalg.norm(z, axis=-1, keepdims=True))
        return jnp.exp(self.scale[...]) * features[0] @ features[1].T


def contrastive(dtype: Any) -> Workload:
    """Images and texts, each to find the other in the batch."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Towers(dtype, nnx.Rngs(0))))

    def init(key: Any) -> Any:
        return nnx.split(Towers(dtype, nnx.Rngs(params=key)))[1], ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        logits = nnx.merge(graph, params)(*batch)
        found = optax.softmax_cross_entropy_with_integer_labels
        labels = jnp.arange(len(logits))
        value = found(logits, labels).mean() + found(logits.T, labels).mean()
        return value / 2, state

    def batch(key: Any) -> Any:
        images = jax.random.normal(key, (128, 64, 64, 3))
        return images, jax.random.randint(key, (128, 64), 0, 4096)

    return Workload(init, loss, batch, optax.adamw(5e-4))


# ---- Equinox: a normalizing flow


class Coupling(eqx.Module):
    """Scales and shifts one half of the channels by a network of the other."""

    net: eqx.nn.Sequential
    mixing: jax.Array

    def __init__(self, channels: int, width: int, key: Any) -> None:
        keys = jax.random.split(key, 4)
        half = channels // 2
        self.net = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(half, width, 3, padding=1, key=keys[0]),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(width, width, 1, key=keys[1]),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(width, channels, 3, padding=1, key=keys[2]),
            ]
        )
        self.mixing = jax.random.orthogonal(keys[3], channels)

    def __call__(self, x: Any, dtype: Any) -> tuple[Any, Any]:
        size = x.shape[1] * x.shape[2]
        volume = size * jnp.linalg.slogdet(self.mixing)[1]
        x = jnp.einsum("cd,dhw->chw", self.mixing, x)
        kept, moved = jnp.split(x, 2)
        out = at_least_float32(cast(self.net, dtype)(kept.astype(dtype)))
        scale, shift = jnp.split(out, 2)
        scale = jax.nn.sigmoid(scale + 2.0)
        moved = (moved + shift) * scale
        return jnp.concatenate([kept, moved]), volume + jnp.log(scale).sum()


def flow(dtype: Any) -> Workload:
    """Exact likelihood of images by eight coupling layers."""
    shape = (256, 12, 32, 32)

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 8)
        model = [Coupling(shape[1], 128, k) for k in keys]
        return eqx.filter(model, eqx.is_array), ()

    def likelihood(model: Any, x: Any) -> Any:
        total = 0.0
        for layer in model:
            x, volume = layer(x, dtype)
            total = total + volume
        return total + jax.scipy.stats.norm.logpdf(x).sum()

    static = eqx.filter_eval_shape(Coupling, shape[1], 128, jax.random.key(0))
    _, static = eqx.partition(static, lambda x: hasattr(x, "shape"))

    def loss(params: Any, state: Any, x: Any) -> Any:
        model = [eqx.combine(layer, static) for layer in params]
        values = jax.vmap(lambda x: likelihood(model, x))(x)
        return -values.mean() / x[0].size, state

    def batch(key: Any) -> Any:
        return jax.random.normal(key, shape)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return Workload(init, loss, batch, tx)


# ---- Equinox: recurrent sequence to sequence


class Recurrent(eqx.Module):
    """A GRU encoder, and a GRU decoder that attends to it."""

    embedding: jax.Array
    encoder: eqx.nn.GRUCell
    decoder: eqx.nn.GRUCell
    query: eqx.nn.Linear
    logits: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int, key: Any) -> None:
        keys = jax.random.split(key, 5)
        self.embedding = 0.02 * jax.random.normal(keys[0], (vocabulary, width))
        self.encoder = eqx.nn.GRUCell(width, width, key=keys[1])
        self.decoder = eqx.nn.GRUCell(2 * width, width, key=keys[2])
        self.query = eqx.nn.Linear(width, width, use_bias=False, key=keys[3])
        self.logits = eqx.nn.Linear(2 * width, vocabulary, key=keys[4])

    def __call__(self, source: Any, target: Any) -> Any:
        def encode(h: Any, x: Any) -> Any:
            h = self.encoder(x, h)
            return h, h

        def decode(carry: Any, x: Any) -> Any:
            h, read = carry
            h = self.decoder(jnp.concatenate([x, read]), h)
            scores = at_least_float32(memory @ self.query(h))
            weights = jax.nn.softmax(scores * len(h) ** -0.5)
            read = weights.astype(memory.dtype) @ memory
            return (h, read), jnp.concatenate([h, read])

        start = jnp.zeros_like(self.embedding[0])
        last, memory = jax.lax.scan(encode, start, self.embedding[source])
        _, out = jax.lax.scan(decode, (last, start), self.embedding[target])
        return jax.vmap(self.logits)(out)


def recurrent(dtype: Any) -> Workload:
    """Translation by recurrent networks with attention."""
    vocabulary, length = 8192, 64
    static = eqx.filter_eval_shape(Recurrent, vocabulary, 512, jax.random.key(0))
    _, static = eqx.partition(static, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(Recurrent(vocabulary, 512, key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        source, target = batch
        model = eqx.combine(cast(params, dtype), static)
        logits = at_least_float32(jax.vmap(model)(source, target[:, :-1]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:])
        return losses.mean(), state

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (2, 64, length + 1), 0, vocabulary)
        return ids[0, :, 1:], ids[1]

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return Workload(init, loss, batch, tx)


# ---- Haiku: proximal policy optimization


def policy_network(frames: Any) -> tuple[Any, Any]:
    """Logits of 15 actions and a value, of stacked frames."""
    x = frames
    for width in (16, 32, 32):
        x = hk.Conv2D(width, 3)(x)
        x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for _ in range(2):
            h = hk.Conv2D(width, 3)(jax.nn.relu(x))
            x = x + hk.Conv2D(width, 3)(jax.nn.relu(h))
    x = jax.nn.relu(hk.Linear(256)(hk.Flatten()(jax.nn.relu(x))))
    return at_least_float32(hk.Linear(15)(x)), at_least_float32(hk.Linear(1)(x))[:, 0]


class Proximal(NamedTuple):
    """One epoch of minibatches over a rollout, in a loop."""

    dtype: Any
    optimizer: Any = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(5e-4))

    def step(self, params: Any, opt_state: Any, rollout: Any) -> Any:
        """Advantages of the whole rollout, then four updates."""
        net = hk.without_apply_rng(hk.transform(policy_network))

        def apply(params: Any, frames: Any) -> Any:
            x = frames.astype(self.dtype) / 255
            return net.apply(cast(params, self.dtype), x)

        frames, actions, rewards, old = rollout
        time, runs = rewards.shape
        flat = frames.reshape(-1, *frames.shape[2:])
        _, values = apply(params, flat)
        values = values.reshape(time + 1, runs)

        def back(total: Any, x: Any) -> Any:
            reward, value, after = x
            total = reward + 0.99 * after - value + 0.99 * 0.95 * total
            return total, total

        xs = (rewards, values[:-1], values[1:])
        _, advantages = jax.lax.scan(back, jnp.zeros(runs), xs, reverse=True)
        returns = advantages + values[:-1]

        def loss(params: Any, batch: Any) -> Any:
            x, action, advantage, wanted, before = batch
            logits, value = apply(params, x)
            log_p = jax.nn.log_softmax(logits)
            chosen = jnp.take_along_axis(log_p, action[:, None], -1)[:, 0]
            ratio = jnp.exp(chosen - before)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
            entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
            return 0.5 * ((value - wanted) ** 2).mean() - gain - 0.01 * entropy

        def update(carry: Any, batch: Any) -> Any:
            params, opt_state = carry
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        data = (frames[:-1], actions, advantages, returns, old)
        minibatches = jax.tree.map(
            lambda x: x.reshape(4, time * runs // 4, *x.shape[2:]), data
        )
        (params, opt_state), values = jax.lax.scan(
            update, (params, opt_state), minibatches
        )
        return params, opt_state, values.mean()

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the step's arguments."""
        time, runs = 16, 128

        def make(key: Any) -> Any:
            frames = jax.random.randint(key, (time + 1, runs, 64, 64, 4), 0, 256)
            frames = frames.astype(jnp.uint8)
            net = hk.without_apply_rng(hk.transform(policy_network))
            params = net.init(key, frames[0].astype(jnp.float32))
            rollout = (
                frames,
                jax.random.randint(key, (time, runs), 0, 15),
                jax.random.normal(key, (time, runs)),
                jax.random.normal(key, (time, runs)),
            )
            return params, self.optimizer.init(params), rollout

        return jax.eval_shape(make, jax.random.key(0))


# ---- Haiku: segmentation


def segmentation_network(x: Any) -> Any:
    """A U-Net of separable convolutions with group norm."""

    def block(x: Any, width: int) -> Any:
        for _ in range(2):
            x = hk.DepthwiseConv2D(1, 3)(x)
            x = hk.Conv2D(width, 1)(x)
            x = jax.nn.relu(hk.GroupNorm(8)(x))
        return x

    x, skips = hk.Conv2D(32, 3)(x), []
    for width in (32, 64, 128):
        x = block(x, width)
        skips.append(x)
        x = hk.avg_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = block(x, 256)
    for width in (128, 64, 32):
        x = hk.Conv2DTranspose(width, 2, 2)(x)
        x = block(jnp.concatenate([x, skips.pop()], -1), width)
    return at_least_float32(hk.Conv2D(4, 1)(x))


def segmentation(dtype: Any) -> Workload:
    """Cross entropy and Dice loss of medical images, with Lion."""
    net = hk.without_apply_rng(hk.transform(segmentation_network))
    images = (16, 128, 128, 1)

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, *images[1:]))), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, labels = batch
        logits = net.apply(cast(params, dtype), x.astype(dtype))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        wanted = jax.nn.one_hot(labels, 4)
        found = jax.nn.softmax(logits)
        both = (found * wanted).sum((1, 2))
        dice = (2 * both + 1) / (found.sum((1, 2)) + wanted.sum((1, 2)) + 1)
        return losses.mean() + 1 - dice.mean(), state

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, images)
        return x, jax.random.randint(key, images[:3], 0, 4)

    return Workload(init, loss, batch, optax.lion(1e-4))
