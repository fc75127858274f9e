"""Train steps of families that the other zoos lack: images, sound, points, graphs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from models.common import Workload, at_least_float32, cross_entropy
from zoo2_libraries import cast

f32 = at_least_float32


def of_linen(
    model: nn.Module, example: Any, loss: Any, batch: Any, tx: Any
) -> Workload:
    def init(key: Any) -> Any:
        return model.init(key, *example)["params"], ()

    def of_params(params: Any, state: Any, data: Any) -> Any:
        def apply(*args: Any, **kw: Any) -> Any:
            return model.apply({"params": params}, *args, **kw)

        return loss(apply, data), state

    return Workload(init, of_params, batch, tx)


# ---- DenseNet, Haiku


def densenet(dtype: Any) -> Workload:
    """DenseNet-BC on 64 x 64 images, growth 32, SGD with Nesterov momentum."""

    def network(x: Any) -> Any:
        def norm(x: Any) -> Any:  # statistics in float32
            y = hk.BatchNorm(True, True, 0.9)(f32(x), True)
            return jax.nn.relu(y).astype(dtype)

        x = hk.Conv2D(64, 3, with_bias=False)(x)
        for block, layers in enumerate((4, 6, 8, 6)):
            for _ in range(layers):
                h = hk.Conv2D(128, 1, with_bias=False)(norm(x))
                h = hk.Conv2D(32, 3, with_bias=False)(norm(h))
                x = jnp.concatenate([x, h], -1)
            if block < 3:
                x = hk.Conv2D(x.shape[-1] // 2, 1, with_bias=False)(norm(x))
                x = hk.avg_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = norm(x).mean((1, 2))
        return f32(hk.Linear(200)(x))

    net = hk.without_apply_rng(hk.transform_with_state(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((2, 64, 64, 3)))

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, labels = batch
        half = cast(params, dtype, lambda path: "batch_norm" in path)
        logits, state = net.apply(half, state, x.astype(dtype))
        labels = optax.smooth_labels(jax.nn.one_hot(labels, 200), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean(), state

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (64,), 0, 200)
        return jax.random.normal(key, (64, 64, 64, 3)), labels

    tx = optax.chain(
        optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True)
    )
    return Workload(init, loss, batch, tx)


# ---- audio codec with residual vector quantization, Equinox


class ResidualUnit(eqx.Module):
    alpha: jax.Array
    dilated: eqx.nn.Conv1d
    mix: eqx.nn.Conv1d

    def __init__(self, width: int, dilation: int, key: Any) -> None:
        a, b = jax.random.split(key)
        self.alpha = jnp.ones((2, width, 1))
        pad = 3 * dilation
        self.dilated = eqx.nn.Conv1d(
            width, width, 7, padding=pad, dilation=dilation, key=a
        )
        self.mix = eqx.nn.Conv1d(width, width, 1, key=b)

    def __call__(self, x: Any) -> Any:
        h = self.dilated(snake(x, self.alpha[0]))
        return x + self.mix(snake(h, self.alpha[1]))


def snake(x: Any, alpha: Any) -> Any:
    return x + jnp.sin(alpha * x) ** 2 / (alpha + 1e-6)


class Codec(eqx.Module):
    first: eqx.nn.Conv1d
    down: list[Any]
    middle: tuple[Any, Any]
    up: list[Any]
    last: eqx.nn.Conv1d

    def __init__(self, key: Any) -> None:
        keys = iter(jax.random.split(key, 64))
        width, strides = 32, (2, 4, 8)
        self.first = eqx.nn.Conv1d(1, width, 7, padding=3, key=next(keys))
        self.down, self.up = [], []
        for s in strides:
            units = [ResidualUnit(width, d, next(keys)) for d in (1, 3, 9)]
            conv = eqx.nn.Conv1d(
                width, 2 * width, 2 * s, stride=s, padding=s // 2, key=next(keys)
            )
            self.down.append((units, conv))
            width *= 2
        self.middle = (
            eqx.nn.Conv1d(width, 128, 3, padding=1, key=next(keys)),
            eqx.nn.Conv1d(128, width, 7, padding=3, key=next(keys)),
        )
        for s in reversed(strides):
            conv = eqx.nn.ConvTranspose1d(
                width, width // 2, 2 * s, stride=s, padding=s // 2, key=next(keys)
            )
            width //= 2
            units = [ResidualUnit(width, d, next(keys)) for d in (1, 3, 9)]
            self.up.append((conv, units))
        self.last = eqx.nn.Conv1d(width, 1, 7, padding=3, key=next(keys))

    def encode(self, x: Any) -> Any:
        x = self.first(x)
        for units, conv in self.down:
            for unit in units:
                x = unit(x)
            x = conv(jax.nn.elu(x))
        return self.middle[0](jax.nn.elu(x))

    def decode(self, z: Any) -> Any:
        x = self.middle[1](z)
        for conv, units in self.up:
            x = conv(jax.nn.elu(x))
            for unit in units:
                x = unit(x)
        return jnp.tanh(f32(self.last(jax.nn.elu(x))))


def spectral_loss(a: Any, b: Any) -> Any:
    """L1 of log magnitudes at three resolutions."""

    def magnitude(x: Any, size: int) -> Any:
        hop = size // 4
        places = jnp.arange(0, x.shape[-1] - size + 1, hop)[:, None] + jnp.arange(size)
        frames = x[:, places] * jnp.hanning(size)
        spectrum = jnp.fft.rfft(frames)
        return jnp.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-7)

    total = 0.0
    for size in (256, 512, 1024):
        p, q = magnitude(a, size), magnitude(b, size)
        total += jnp.abs(p - q).mean() + jnp.abs(jnp.log(p) - jnp.log(q)).mean()
    return total


def codec(dtype: Any) -> Workload:
    """SoundStream: snake activations, 4 codebooks kept as moving averages."""
    _, static = eqx.partition(
        eqx.filter_eval_shape(Codec, jax.random.key(0)), lambda x: hasattr(x, "shape")
    )

    def init(key: Any) -> Any:
        books = jax.random.normal(key, (4, 1024, 128))
        state = {"books": books, "sums": books, "counts": jnp.ones((4, 1024))}
        return eqx.filter(Codec(key), eqx.is_array), state

    def loss(params: Any, state: Any, x: Any) -> Any:
        model = eqx.combine(cast(params, dtype), static)
        z = f32(jax.vmap(model.encode)(x[:, None].astype(dtype)))
        z = z.swapaxes(1, 2)
        flat = z.reshape(-1, 128)
        rest, total, commitment, new = flat, jnp.zeros_like(flat), 0.0, []
        for book, sums, counts in zip(
            state["books"], state["sums"], state["counts"], strict=True
        ):
            distances = (rest**2).sum(1, keepdims=True) - 2 * rest @ book.T
            ids = jnp.argmin(distances + (book**2).sum(1), 1)
            code = book[ids]
            commitment += ((rest - jax.lax.stop_gradient(code)) ** 2).mean()
            hits = jax.nn.one_hot(ids, 1024)
            seen = jax.lax.stop_gradient(rest)
            counts = 0.99 * counts + 0.01 * hits.sum(0)
            sums = 0.99 * sums + 0.01 * hits.T @ seen
            new.append((sums / (counts[:, None] + 1e-5), sums, counts))
            total, rest = total + code, rest - code
        total = flat + jax.lax.stop_gradient(total - flat)
        z = total.reshape(z.shape).swapaxes(1, 2)
        out = jax.vmap(model.decode)(z.astype(dtype))[:, 0]
        out = out[:, : x.shape[1]]
        books, sums, counts = (jnp.stack(a) for a in zip(*new, strict=True))
        new_state = {"books": books, "sums": sums, "counts": counts}
        value = jnp.abs(out - x).mean() + spectral_loss(out, x) + 0.25 * commitment
        return value, new_state

    def batch(key: Any) -> Any:
        return jax.random.normal(key, (16, 16384))

    return Workload(init, loss, batch, optax.adamw(3e-4, 0.5, 0.9))


# ---- DINO, NNX


class VitBlock(nnx.Module):
    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.heads, self.dtype = heads, dtype
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.gamma1 = nnx.Param(jnp.full((width,), 1e-2))
        self.gamma2 = nnx.Param(jnp.full((width,), 1e-2))

    def __call__(self, x: Any) -> Any:
        size, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(size, length, 3, self.heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + self.gamma1.astype(self.dtype) * self.out(h)
        h = self.down(nnx.gelu(self.up(self.norm2(x))))
        return x + self.gamma2.astype(self.dtype) * h


class Dino(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        width, self.dtype = 256, dtype
        self.patches = nnx.Conv(3, width, (8, 8), (8, 8), dtype=dtype, rngs=rngs)
        normal = nnx.initializers.normal(0.02)
        self.cls = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.places = nnx.Param(normal(rngs.params(), (12, 12, width)))
        self.blocks = nnx.List([VitBlock(width, 4, dtype, rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.List(
            [
                nnx.Linear(width, 512, dtype=dtype, rngs=rngs),
                nnx.Linear(512, 512, dtype=dtype, rngs=rngs),
                nnx.Linear(512, 128, dtype=dtype, rngs=rngs),
            ]
        )
        self.prototypes = nnx.Param(normal(rngs.params(), (128, 4096)))

    def __call__(self, images: Any) -> Any:
        x = self.patches(images)
        size, side = x.shape[:2]
        places = jax.image.resize(
            self.places[...], (side, side, x.shape[-1]), "bilinear"
        )
        x = (x + places.astype(self.dtype)).reshape(size, side * side, -1)
        cls = jnp.broadcast_to(self.cls.astype(self.dtype), (size, 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)[:, 0]
        for i, layer in enumerate(self.head):
            x = layer(x) if i == 2 else nnx.gelu(layer(x))
        x = f32(x)
        x = x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)
        w = self.prototypes[...]
        w = w / (jnp.linalg.norm(w, axis=0, keepdims=True) + 1e-6)
        return f32(x.astype(self.dtype) @ w.astype(self.dtype))


class DinoStep(NamedTuple):
    """Two global and four local crops; a teacher and a center as averages."""

    dtype: Any
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(3.0), optax.adamw(5e-4, weight_decay=0.04)
    )

    def step(
        self, params: Any, opt_state: Any, teacher: Any, center: Any, batch: Any
    ) -> Any:
        graph, _ = nnx.split(nnx.eval_shape(lambda: Dino(self.dtype, nnx.Rngs(0))))
        large, small = batch

        def apply(params: Any, crops: Any) -> Any:
            views, size = crops.shape[:2]
            out = nnx.merge(graph, params)(crops.reshape(-1, *crops.shape[2:]))
            return out.reshape(views, size, -1)

        targets = apply(teacher, large)
        wanted = jax.lax.stop_gradient(jax.nn.softmax((targets - center) / 0.04))

        def loss(params: Any) -> Any:
            views = jnp.concatenate([apply(params, large), apply(params, small)])
            log_p = jax.nn.log_softmax(views / 0.1)
            total, count = 0.0, 0
            for i in range(2):
                for j in range(len(log_p)):
                    if i != j:
                        total += -(wanted[i] * log_p[j]).sum(-1).mean()
                        count += 1
            return total / count

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        teacher = optax.incremental_update(params, teacher, 0.004)
        center = 0.9 * center + 0.1 * targets.mean((0, 1))
        return params, opt_state, teacher, center, value

    def arguments(self) -> Any:
        def make(key: Any) -> Any:
            params = nnx.split(Dino(self.dtype, nnx.Rngs(params=key)))[1]
            crops = (
                jax.random.normal(key, (2, 64, 96, 96, 3)),
                jax.random.normal(key, (4, 64, 48, 48, 3)),
            )
            tx = self.optimizer
            return params, tx.init(params), params, jnp.zeros(4096), crops

        return jax.eval_shape(make, jax.random.key(0))


# ---- a point transformer, Linen


class VectorAttention(nn.Module):
    """Attention with a weight for each channel over the nearest neighbours."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, near: Any, apart: Any) -> Any:
        width = x.shape[-1]

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, dtype=self.dtype)

        h = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = dense(width)(h), dense(width)(h), dense(width)(h)
        take = jax.vmap(lambda a, i: a[i])
        place = dense(width)(nn.relu(dense(width)(apart)))
        relation = q[:, :, None] - take(k, near) + place
        relation = dense(width)(
            nn.relu(dense(width)(nn.LayerNorm(dtype=self.dtype)(relation)))
        )
        weights = jax.nn.softmax(f32(relation) / math.sqrt(width), 2)
        h = (weights.astype(self.dtype) * (take(v, near) + place)).sum(2)
        x = x + dense(width)(h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + dense(width)(nn.relu(dense(2 * width)(h)))


class PointTransformer(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, places: Any) -> Any:
        def nearest(a: Any, b: Any, k: int) -> tuple[Any, Any]:
            square = ((a[:, :, None] - b[:, None]) ** 2).sum(-1)
            _, near = jax.lax.top_k(-square, k)
            return near, a[:, :, None] - jax.vmap(lambda b, i: b[i])(b, near)

        x = nn.relu(nn.Dense(64, dtype=self.dtype)(places))
        near, apart = nearest(places, places, 16)
        for _ in range(2):
            x = VectorAttention(self.dtype)(x, near, apart)
        for width in (128, 256):
            fewer = places[:, ::4]
            near, _ = nearest(fewer, places, 16)
            x = nn.relu(
                nn.LayerNorm(dtype=self.dtype)(nn.Dense(width, dtype=self.dtype)(x))
            )
            x = jax.vmap(lambda a, i: a[i])(x, near).max(2)
            places = fewer
            near, apart = nearest(places, places, 16)
            for _ in range(2):
                x = VectorAttention(self.dtype)(x, near, apart)
        x = nn.relu(nn.Dense(256, dtype=self.dtype)(x.mean(1)))
        return f32(nn.Dense(40, dtype=self.dtype)(x))


def point_transformer(dtype: Any) -> Workload:
    """Classification of clouds of 1024 points."""

    def loss(apply: Any, batch: Any) -> Any:
        x, labels = batch
        return cross_entropy(apply(x), labels).mean()

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (16,), 0, 40)
        return jax.random.normal(key, (16, 1024, 3)), labels

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    example = (jnp.zeros((1, 256, 3)),)
    return of_linen(PointTransformer(dtype), example, loss, batch, tx)


# ---- graph attention, plain JAX


def graph_attention(dtype: Any) -> Workload:
    """GATv2 with a softmax over the edges of each node, residuals and dropout."""
    nodes, edges, heads, size = 16384, 131072, 8, 32
    width = heads * size

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 32))
        glorot = jax.nn.initializers.glorot_uniform()

        def layer() -> Any:
            return {
                "from": glorot(next(keys), (width, width)),
                "to": glorot(next(keys), (width, width)),
                "edge": glorot(next(keys), (16, width)),
                "a": glorot(next(keys), (heads, size)),
                "bias": jnp.zeros(width),
                "scale": jnp.ones(width),
                "offset": jnp.zeros(width),
            }

        return {
            "in": glorot(next(keys), (128, width)),
            "layers": [layer() for _ in range(3)],
            "out": glorot(next(keys), (width, 40)),
            "out_bias": jnp.zeros(40),
        }, ()

    def norm(x: Any, scale: Any, offset: Any) -> Any:
        x = f32(x)
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        return (y * scale + offset).astype(dtype)

    def attend(p: Any, x: Any, e: Any, source: Any, target: Any) -> Any:
        a = (x @ p["from"]).reshape(-1, heads, size)
        b = (x @ p["to"]).reshape(-1, heads, size)
        sent = a[source]
        mixed = sent + b[target] + (e @ p["edge"]).reshape(-1, heads, size)
        logits = f32((jax.nn.leaky_relu(mixed, 0.2) * p["a"]).sum(-1))
        top = jax.ops.segment_max(logits, target, nodes)
        weights = jnp.exp(logits - jax.lax.stop_gradient(top)[target])
        total = jax.ops.segment_sum(weights, target, nodes)
        weights = weights / (total[target] + 1e-9)
        sent = sent * weights[..., None].astype(dtype)
        out = jax.ops.segment_sum(sent, target, nodes)
        return out.reshape(-1, width) + p["bias"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, e, source, target, labels, train, key = batch
        p = cast(params, dtype, lambda path: "scale" in path or "offset" in path)
        x, e = x.astype(dtype) @ p["in"], e.astype(dtype)
        for layer, k in zip(p["layers"], jax.random.split(key, 3), strict=True):
            h = norm(x, layer["scale"], layer["offset"])
            h = jax.nn.elu(attend(layer, h, e, source, target))
            kept = jax.random.bernoulli(k, 0.8, h.shape)
            x = x + jnp.where(kept, h / 0.8, 0)
        logits = f32(x @ p["out"] + p["out_bias"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (losses * train).sum() / train.sum(), state

    def batch(key: Any) -> Any:
        ends = jax.random.randint(key, (2, edges), 0, nodes)
        labels = jax.random.randint(key, (nodes,), 0, 40)
        train = jax.random.bernoulli(key, 0.5, (nodes,)).astype(jnp.float32)
        x = jax.random.normal(key, (nodes, 128))
        e = jax.random.normal(key, (edges, 16))
        return x, e, ends[0], ends[1], labels, train, key

    return Workload(init, loss, batch, optax.adamw(1e-3))
