"""Train steps of families that the other zoos lack: packed texts, sets, flow, pairs.

Each size is an argument, so that the step also runs small, on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models.common import Workload, cross_entropy
from zoo2_libraries import cast
from zoo2_unseen_third import f32

# ---- packed texts, NNX


class PackedBlock(nnx.Module):
    """Gemma's: norms before and after, of queries and keys too; a gated GELU."""

    def __init__(
        self, width: int, window: int | None, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, use_bias=False, dtype=dtype, rngs=rngs)

        def norm(n: int) -> nnx.Module:
            return nnx.RMSNorm(n, dtype=dtype, rngs=rngs)

        self.window, self.dtype = window, dtype
        self.norms = nnx.List([norm(width) for _ in range(4)])
        self.norm_q, self.norm_k = norm(64), norm(64)
        self.query, self.out = linear(width, width), linear(width, width)
        self.keys, self.values = linear(width, width // 2), linear(width, width // 2)
        self.gate, self.up = linear(width, 4 * width), linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def attend(self, x: Any, segments: Any, places: Any) -> Any:
        size, length, width = x.shape
        groups = width // 128
        base = 1e6 if self.window is None else 1e4
        angles = places[..., None, None] * base ** -(jnp.arange(32) / 32)
        sin, cos = jnp.sin(angles), jnp.cos(angles)

        def rotate(x: Any) -> Any:
            a, b = jnp.split(f32(x), 2, -1)
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return x.astype(self.dtype)

        def heads(x: Any) -> Any:
            return x.reshape(size, length, -1, 64)

        q = rotate(self.norm_q(heads(self.query(x))))
        k = rotate(self.norm_k(heads(self.keys(x))))
        v = heads(self.values(x))
        q = q.reshape(size, length, groups, 2, 64)
        scores = f32(jnp.einsum("bqgnd,bkgd->bgnqk", q, k)) / 8
        ago = jnp.arange(length)[:, None] - jnp.arange(length)
        mask = (ago >= 0) & (segments[:, :, None] == segments[:, None])
        if self.window is not None:
            mask = mask & (ago < self.window)
        scores = jnp.where(mask[:, None, None], scores, -2.4e38)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bgnqk,bkgd->bqgnd", weights, v)
        return self.out(h.reshape(x.shape))

    def __call__(self, x: Any, segments: Any, places: Any) -> Any:
        h = self.attend(self.norms[0](x), segments, places)
        x = x + self.norms[1](h)
        h = self.norms[2](x)
        h = self.down(nnx.gelu(self.gate(h)) * self.up(h))
        return x + self.norms[3](h)


class PackedDecoder(nnx.Module):
    def __init__(
        self, width: int, window: int, vocabulary: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [PackedBlock(width, w, dtype, rngs) for w in (window, window, None)]
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.width, self.dtype = width, dtype

    def __call__(self, ids: Any, segments: Any, places: Any) -> Any:
        x = self.embed(ids) * jnp.asarray(self.width**0.5, self.dtype)
        for block in self.blocks:
            x = block(x, segments, places)
        return self.norm(x)


def packed_decoder(
    dtype: Any,
    size: int = 8,
    length: int = 1024,
    width: int = 512,
    window: int = 256,
    vocabulary: int = 32768,
    chunk: int = 1024,
) -> Workload:
    """Gemma 3 on packed texts; the logits of a chunk of tokens at a time, twice."""

    def make(key: Any) -> PackedDecoder:
        return PackedDecoder(width, window, vocabulary, dtype, nnx.Rngs(key))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, segments, places = batch
        model = nnx.merge(graph, params)
        x = model(ids[:, :-1], segments[:, :-1], places[:, :-1])
        table = model.embed.embedding[...].astype(dtype)
        same = segments[:, 1:] == segments[:, :-1]

        @jax.checkpoint
        def of_chunk(total: Any, seen: Any) -> Any:
            x, labels, counted = seen
            logits = f32(x @ table.T)
            each = cross_entropy(logits, labels)
            return total + jnp.where(counted, each, 0).sum(), None

        seen = (
            x.reshape(-1, chunk, width),
            *(y.reshape(-1, chunk) for y in (ids[:, 1:], same)),
        )
        total, _ = jax.lax.scan(of_chunk, jnp.zeros(()), seen)
        return total / jnp.maximum(same.sum(), 1), state

    def batch(key: Any) -> Any:
        starts = jax.random.bernoulli(key, 4 / length, (size, length + 1))
        at = jnp.arange(length + 1)
        first = jax.lax.cummax(jnp.where(starts, at, 0), axis=1)
        ids = jax.random.randint(key, (size, length + 1), 0, vocabulary)
        return ids, jnp.cumsum(starts, 1), at - first

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    )
    return Workload(init, loss, batch, tx)


# ---- normalized weights, plain JAX


def unit(x: Any, axis: int = -1) -> Any:
    """Of length one, computed in float32."""
    wide = f32(x)
    wide = wide * jax.lax.rsqrt((wide**2).sum(axis, keepdims=True) + 1e-12)
    return wide.astype(x.dtype)


class Normalized(NamedTuple):
    """nGPT: all is on a sphere. Gradients of four parts of the batch are summed."""

    dtype: Any
    parts: int = 4
    size: int = 4
    length: int = 1024
    width: int = 512
    layers: int = 3
    vocabulary: int = 16384
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(15e-4, b2=0.95)
    )

    def loss(self, params: Any, ids: Any) -> Any:
        dtype, width = self.dtype, self.width
        # What multiplies beside the products is small, and stays float32.
        p = cast(params, dtype, lambda path: "scale" in path)
        length = ids.shape[1] - 1
        angles = jnp.arange(length)[:, None, None] * 1e4 ** -(jnp.arange(32) / 32)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        mask = jnp.tril(jnp.ones((length, length), bool))

        def rotate(x: Any) -> Any:
            a, b = jnp.split(f32(x), 2, -1)
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return x.astype(dtype)

        def toward(x: Any, h: Any, scale: Any) -> Any:
            rate = jnp.abs(scale * (0.05 * width**0.5)).astype(dtype)
            return unit(x + rate * (unit(h) - x))

        x = p["embed"][ids[:, :-1]]
        for layer in p["layers"]:
            scale = layer["scale"]
            q, k, v = jnp.split(x @ layer["qkv"], 3, -1)
            q, k, v = (y.reshape(*y.shape[:2], -1, 64) for y in (q, k, v))
            s_qk = (scale["qk"] * width**0.5).astype(dtype)
            q, k = unit(rotate(q)) * s_qk, unit(rotate(k)) * s_qk
            scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * 8
            scores = jnp.where(mask, scores, -jnp.inf)
            weights = jax.nn.softmax(scores).astype(dtype)
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = toward(x, h @ layer["out"], scale["attend"])
            u, v = jnp.split(x @ layer["up"], 2, -1)
            u = u * scale["u"].astype(dtype)
            v = v * (scale["v"] * width**0.5).astype(dtype)
            x = toward(x, (u * jax.nn.silu(v)) @ layer["down"], scale["mlp"])
        logits = f32(x @ p["head"].T) * (p["scale"] * width**0.5)
        return cross_entropy(logits, ids[:, 1:]).mean()

    def onto(self, params: Any) -> Any:
        """Each weight's vectors along the features of the model, of length one."""

        def one(path: Any, w: Any) -> Any:
            if w.ndim < 2:
                return w
            name = jax.tree_util.keystr(path)
            return unit(w, 0 if "qkv" in name or "up" in name else -1)

        return jax.tree_util.tree_map_with_path(one, params)

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        def add(carry: Any, ids: Any) -> Any:
            value, grads = jax.value_and_grad(self.loss)(params, ids)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        summed, _ = jax.lax.scan(add, zeros, batch)
        value, grads = jax.tree.map(lambda x: x / self.parts, summed)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = self.onto(optax.apply_updates(params, updates))
        return params, opt_state, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        keys = iter(jax.random.split(key, 4 * self.layers + 3))
        width, n = self.width, self.width**-0.5

        def weight(*shape: int) -> Any:
            return jax.random.normal(next(keys), shape) * n

        def layer() -> Any:
            scale = {
                "qk": jnp.full((width // 64, 64), n),
                "u": jnp.ones((4 * width,)),
                "v": jnp.full((4 * width,), n),
                "attend": jnp.full((width,), n),
                "mlp": jnp.full((width,), n),
            }
            return {
                "qkv": weight(width, 3 * width),
                "out": weight(width, width),
                "up": weight(width, 8 * width),
                "down": weight(4 * width, width),
                "scale": scale,
            }

        params = {
            "embed": weight(self.vocabulary, width),
            "head": weight(self.vocabulary, width),
            "layers": [layer() for _ in range(self.layers)],
            "scale": jnp.full((self.vocabulary,), n),
        }
        params = self.onto(params)
        ids = (self.parts, self.size, self.length + 1)
        batch = jax.random.randint(next(keys), ids, 0, self.vocabulary)
        return params, self.optimizer.init(params), batch


# ---- a joint embedding, NNX


class EmbeddingBlock(nnx.Module):
    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, dtype=dtype, rngs=rngs)

        self.norms = nnx.List(
            [nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.dtype = dtype

    def __call__(self, x: Any) -> Any:
        h = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, -1, 64)
        q, k, v = jnp.moveaxis(h, 2, 0)
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / 8
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + self.out(h.reshape(x.shape))
        h = nnx.gelu(self.up(self.norms[1](x)), approximate=False)
        return x + self.down(h)


class PatchEncoder(nnx.Module):
    def __init__(
        self, width: int, layers: int, side: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.patches = nnx.Linear(768, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [EmbeddingBlock(width, dtype, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.side, self.width, self.dtype = side, width, dtype

    def __call__(self, patches: Any, kept: Any = None) -> Any:
        x = self.patches(patches.astype(self.dtype))
        x = x + jnp.asarray(sines(self.side, self.width), self.dtype)
        if kept is not None:
            x = jnp.take_along_axis(x, kept[..., None], 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class PatchPredictor(nnx.Module):
    """What is at some places, of what was seen at others."""

    def __init__(
        self,
        width: int,
        inner: int,
        layers: int,
        side: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.enter = nnx.Linear(width, inner, dtype=dtype, rngs=rngs)
        self.token = nnx.Param(0.02 * jax.random.normal(rngs.params(), (inner,)))
        self.blocks = nnx.List(
            [EmbeddingBlock(inner, dtype, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(inner, dtype=dtype, rngs=rngs)
        self.leave = nnx.Linear(inner, width, dtype=dtype, rngs=rngs)
        self.side, self.width, self.dtype = side, inner, dtype

    def __call__(self, x: Any, kept: Any, wanted: Any) -> Any:
        """`wanted` is of some blocks of each picture, i32[size, blocks, count]."""
        size, blocks, count = wanted.shape
        places = jnp.asarray(sines(self.side, self.width), self.dtype)
        x = self.enter(x) + places[kept]
        masked = self.token[...].astype(self.dtype) + places[wanted]
        masked = masked.reshape(size * blocks, count, -1)
        x = jnp.concatenate([jnp.repeat(x, blocks, 0), masked], 1)
        for block in self.blocks:
            x = block(x)
        x = self.leave(self.norm(x[:, -count:]))
        return x.reshape(size, blocks, count, -1)


def sines(side: int, width: int) -> Any:
    """Of rows and columns, f32[side * side, width]."""
    rates = 1e4 ** -(np.arange(width // 4) / (width // 4))
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    angles = np.stack([rows.reshape(-1, 1) * rates, columns.reshape(-1, 1) * rates], 1)
    found = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    return found.reshape(side * side, width).astype(np.float32)


class JointEmbedding(NamedTuple):
    """I-JEPA: features of blocks, by an average of the encoder, are predicted."""

    dtype: Any
    size: int = 64
    side: int = 14
    width: int = 384
    inner: int = 192
    seen: int = 96
    blocks: int = 4
    count: int = 30
    optimizer: Any = optax.adamw(1e-3, weight_decay=0.05)

    def networks(self, key: Any) -> tuple[Any, Any]:
        rngs, dtype, width = nnx.Rngs(key), self.dtype, self.width
        encoder = PatchEncoder(width, 3, self.side, dtype, rngs)
        predictor = PatchPredictor(width, self.inner, 2, self.side, dtype, rngs)
        return encoder, predictor

    def step(self, params: Any, opt_state: Any, average: Any, batch: Any) -> Any:
        shapes = nnx.eval_shape(lambda: self.networks(jax.random.key(0)))
        encoder, predictor = (nnx.split(x, nnx.Param)[0] for x in shapes)
        images, kept, wanted = batch
        size, n = len(images), self.side
        patches = images.reshape(size, n, 16, n, 16, 3)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(size, n * n, -1)

        h = f32(nnx.merge(encoder, average)(patches))
        mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
        h = (h - mean) * jax.lax.rsqrt(var + 1e-6)
        h = jnp.take_along_axis(h, wanted.reshape(size, -1, 1), 1)
        target = jax.lax.stop_gradient(h.reshape(*wanted.shape, -1))

        def loss(params: Any) -> Any:
            x = nnx.merge(encoder, params[0])(patches, kept)
            found = nnx.merge(predictor, params[1])(x, kept, wanted)
            return optax.huber_loss(f32(found), target).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params[0], average, 0.004)
        return params, opt_state, average, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        params = tuple(nnx.state(x, nnx.Param) for x in self.networks(key))
        order = jax.random.uniform(key, (self.size, self.side**2)).argsort(-1)
        shape = self.size, self.blocks, self.count
        batch = (
            jax.random.normal(key, (self.size, 16 * self.side, 16 * self.side, 3)),
            order[:, : self.seen],
            order[:, -self.blocks * self.count :].reshape(shape),
        )
        return params, self.optimizer.init(params), params[0], batch


# ---- sets of boxes, Linen


class Frozen(nn.Module):
    """A batch norm whose statistics, scale and shift no one learns."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shape = x.shape[-1:]
        scale = self.variable("frozen", "scale", jnp.ones, shape).value
        shift = self.variable("frozen", "shift", jnp.zeros, shape).value
        return x * scale.astype(x.dtype) + shift.astype(x.dtype)


class FrozenBottleneck(nn.Module):
    dtype: Any
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(n: int, side: int, stride: int = 1) -> nn.Module:
            sides, strides = (side, side), (stride, stride)
            return nn.Conv(n, sides, strides, use_bias=False, dtype=self.dtype)

        h = nn.relu(Frozen()(conv(self.width, 1)(x)))
        h = nn.relu(Frozen()(conv(self.width, 3, self.stride)(h)))
        h = Frozen()(conv(4 * self.width, 1)(h))
        if x.shape != h.shape:
            x = Frozen()(conv(4 * self.width, 1, self.stride)(x))
        return nn.relu(x + h)


class SetAttention(nn.Module):
    """Places are added to queries and keys, not to values."""

    dtype: Any

    @nn.compact
    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        width = q.shape[-1]

        def heads(x: Any) -> Any:
            x = nn.Dense(width, dtype=self.dtype)(x)
            return x.reshape(*x.shape[:2], 8, width // 8)

        q, k, v = heads(q), heads(k), heads(v)
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * (width // 8) ** -0.5
        weights = jax.nn.softmax(scores).astype(self.dtype)
        weights = nn.Dropout(0.1, deterministic=False)(weights)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(width, dtype=self.dtype)(h.reshape(*h.shape[:2], width))


class SetPrediction(nn.Module):
    """A residual network, an encoder, and a decoder of which each layer predicts."""

    dtype: Any
    width: int
    queries: int
    classes: int

    @nn.compact
    def __call__(self, images: Any) -> tuple[Any, Any]:
        """Logits and boxes, f32[layers, size, queries, classes + 1 or 4]."""
        dtype, width = self.dtype, self.width

        def dense(n: int, **kw: Any) -> nn.Module:
            return nn.Dense(n, dtype=dtype, **kw)

        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=dtype)(x)

        def dropped(x: Any) -> Any:
            return nn.Dropout(0.1, deterministic=False)(x)

        def network(x: Any) -> Any:
            h = dropped(nn.relu(dense(4 * width)(x)))
            return norm(x + dropped(dense(width)(h)))

        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=dtype)(
            images.astype(dtype)
        )
        x = nn.max_pool(nn.relu(Frozen()(x)), (3, 3), (2, 2), "SAME")
        for inner, stride in ((64, 1), (128, 2), (256, 2)):
            for i in range(2):
                x = FrozenBottleneck(dtype, inner, stride if i == 0 else 1)(x)
        side = x.shape[1]
        x = nn.Conv(width, (1, 1), dtype=dtype)(x).reshape(len(x), -1, width)
        places = jnp.asarray(sines(side, width), dtype)
        for _ in range(2):
            h = SetAttention(dtype)(x + places, x + places, x)
            x = network(norm(x + dropped(h)))
        init = nn.initializers.normal(1.0)
        asked = self.param("queries", init, (self.queries, width)).astype(dtype)
        asked = jnp.broadcast_to(asked, (len(x), *asked.shape))
        y, logits, boxes = jnp.zeros_like(asked), [], []
        last = nn.LayerNorm(dtype=dtype)
        head = dense(self.classes + 1)
        mlp = [dense(width), dense(width), dense(4)]
        for _ in range(3):
            h = SetAttention(dtype)(y + asked, y + asked, y)
            y = norm(y + dropped(h))
            h = SetAttention(dtype)(y + asked, x + places, x)
            y = network(norm(y + dropped(h)))
            h = last(y)
            logits.append(f32(head(h)))
            h = mlp[2](nn.relu(mlp[1](nn.relu(mlp[0](h)))))
            boxes.append(nn.sigmoid(f32(h)))
        return jnp.stack(logits), jnp.stack(boxes)


def corners(boxes: Any) -> Any:
    middle, size = jnp.split(boxes, 2, -1)
    return jnp.concatenate([middle - size / 2, middle + size / 2], -1)


def overlap(a: Any, b: Any) -> Any:
    """Generalized intersection over union of boxes by their corners."""
    (a0, a1), (b0, b1) = jnp.split(a, 2, -1), jnp.split(b, 2, -1)
    inside = jnp.maximum(jnp.minimum(a1, b1) - jnp.maximum(a0, b0), 0).prod(-1)
    union = (a1 - a0).prod(-1) + (b1 - b0).prod(-1) - inside
    around = (jnp.maximum(a1, b1) - jnp.minimum(a0, b0)).prod(-1)
    return inside / (union + 1e-6) - (around - union) / (around + 1e-6)


def set_prediction(
    dtype: Any,
    size: int = 16,
    side: int = 384,
    width: int = 256,
    queries: int = 100,
    classes: int = 91,
    most: int = 20,
) -> Workload:
    """DETR: boxes of queries, assigned to what is there; a loss of each layer."""
    model = SetPrediction(dtype, width, queries, classes)

    def init(key: Any) -> Any:
        example = jnp.zeros((1, side, side, 3))
        found = model.init({"params": key, "dropout": key}, example)
        return found["params"], found["frozen"]

    def of_image(logits: Any, boxes: Any, labels: Any, wanted: Any, real: Any) -> Any:
        """Class loss, and distances and overlaps of the boxes, of one layer."""
        p = jax.nn.softmax(logits)[:, labels]
        apart = jnp.abs(boxes[:, None] - wanted).sum(-1)
        near = overlap(corners(boxes)[:, None], corners(wanted))
        cost = jnp.where(real, 5 * apart - 2 * near - p, 1e3)
        rows, columns = optax.assignment.hungarian_algorithm(
            jax.lax.stop_gradient(cost)
        )
        real = real[columns]
        aim = jnp.full(len(logits), classes)
        aim = aim.at[rows].set(jnp.where(real, labels[columns], classes))
        weight = jnp.where(aim == classes, 0.1, 1.0)
        value = (weight * cross_entropy(logits, aim)).sum() / weight.sum()
        found, wanted = boxes[rows], wanted[columns]
        apart = jnp.abs(found - wanted).sum(-1)
        far = 1 - overlap(corners(found), corners(wanted))
        return value, jnp.where(real, 5 * apart + 2 * far, 0).sum()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, *aims, key = batch
        logits, boxes = model.apply(
            {"params": params, "frozen": state}, images, rngs={"dropout": key}
        )
        each = jax.vmap(of_image)
        values, apart = jax.vmap(lambda *x: each(*x, *aims))(logits, boxes)
        return values.mean(1).sum() + apart.sum() / aims[-1].sum(), state

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        places = jax.random.uniform(a, (size, most, 4), minval=0.1, maxval=0.5)
        return (
            jax.random.normal(key, (size, side, side, 3)),
            jax.random.randint(b, (size, most), 0, classes),
            places,
            jnp.arange(most) < jax.random.randint(b, (size, 1), 1, most),
            key,
        )

    tx = optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-4, weight_decay=1e-4)
    )
    return Workload(init, loss, batch, tx)


# ---- optical flow, Haiku


def optical_flow(
    dtype: Any,
    size: int = 6,
    sides: tuple[int, int] = (256, 320),
    steps: int = 3,
    radius: int = 4,
) -> Workload:
    """RAFT: correlations of all pairs of pixels, read again and again by a GRU."""

    def conv(x: Any, n: int, side: Any = 3, stride: int = 1) -> Any:
        return hk.Conv2D(n, side, stride)(x)

    def normed(x: Any) -> Any:  # of each image, in float32
        x = f32(x)
        mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
        return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5)).astype(dtype)

    def encoder(x: Any, outs: int) -> Any:
        x = normed(conv(x, 64, 7, 2))
        for n, stride in ((64, 1), (96, 2), (128, 2)):
            h = normed(conv(normed(conv(x, n, 3, stride)), n))
            if stride > 1:
                x = conv(x, n, 1, stride)
            x = jax.nn.relu(x + h)
        return conv(x, outs, 1)

    def sampled(image: Any, at: Any) -> Any:
        """Bilinear, zero outside; f32[rows, columns] and f32[..., 2] as x, y."""
        rows, columns = image.shape
        low = jnp.floor(at)
        part, total = at - low, 0.0
        low = low.astype(jnp.int32)
        for dy in (0, 1):
            for dx in (0, 1):
                x, y = low[..., 0] + dx, low[..., 1] + dy
                w = jnp.where(jnp.array([dx, dy]) > 0, part, 1 - part)
                inside = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
                y, x = jnp.clip(y, 0, rows - 1), jnp.clip(x, 0, columns - 1)
                total += jnp.where(inside, w.prod(-1) * image[y, x], 0)
        return total

    def looked_up(pyramid: Any, coords: Any) -> Any:
        """Correlations around where each pixel has moved, of each level."""
        apart = jnp.arange(-radius, radius + 1.0)
        apart = jnp.stack(jnp.meshgrid(apart, apart), -1)
        flat, found = coords.reshape(-1, 1, 1, 2), []
        for i, level in enumerate(pyramid):
            x = jax.vmap(sampled)(level, flat / 2**i + apart)
            found.append(x.reshape(*coords.shape[:-1], -1))
        return jnp.concatenate(found, -1)

    def network(a: Any, b: Any) -> list[Any]:
        count, (rows, columns) = len(a), (s // 8 for s in sides)
        both = hk.to_module(encoder)("features")(
            jnp.concatenate([a, b]).astype(dtype), 256
        )
        first, second = jnp.split(both.reshape(2 * count, -1, 256), 2)
        pairs = jnp.einsum(
            "bnd,bmd->bnm", first, second, preferred_element_type=jnp.float32
        )
        level = pairs.reshape(-1, rows, columns, 1) / 16
        pyramid = [level[..., 0]]
        for _ in range(3):
            level = hk.avg_pool(level, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            pyramid.append(level[..., 0])
        context = hk.to_module(encoder)("context")(a.astype(dtype), 256)
        h, context = jnp.split(context, 2, -1)
        h, context = jnp.tanh(h), jax.nn.relu(context)
        start = jnp.meshgrid(jnp.arange(float(columns)), jnp.arange(float(rows)))
        start = jnp.broadcast_to(jnp.stack(start, -1), (count, rows, columns, 2))

        def update(h: Any, context: Any, seen: Any, flow: Any) -> Any:
            seen, flow = seen.astype(dtype), flow.astype(dtype)
            x = jax.nn.relu(conv(seen, 256, 1))
            x = jax.nn.relu(conv(x, 192))
            y = jax.nn.relu(conv(jax.nn.relu(conv(flow, 128, 7)), 64))
            x = jax.nn.relu(conv(jnp.concatenate([x, y], -1), 126))
            x = jnp.concatenate([context, x, flow], -1)
            for side in ((1, 5), (5, 1)):
                z, r = jnp.split(conv(jnp.concatenate([h, x], -1), 256, side), 2, -1)
                z, r = jax.nn.sigmoid(z), jax.nn.sigmoid(r)
                q = jnp.tanh(conv(jnp.concatenate([r * h, x], -1), 128, side))
                h = (1 - z) * h + z * q
            moved = conv(jax.nn.relu(conv(h, 256)), 2)
            mask = conv(jax.nn.relu(conv(h, 256)), 64 * 9, 1)
            return h, f32(moved), f32(mask) / 4

        update = hk.to_module(update)("update")

        def upsampled(flow: Any, mask: Any) -> Any:
            """Each of 8 x 8 pixels is a mean of the nine coarse ones around it."""
            mask = jax.nn.softmax(mask.reshape(count, rows, columns, 9, 8, 8), 3)
            wide = jnp.pad(8 * flow, ((0, 0), (1, 1), (1, 1), (0, 0)))
            near = [
                wide[:, i : i + rows, j : j + columns]
                for i in range(3)
                for j in range(3)
            ]
            found = jnp.einsum("brcnij,brcnf->bricjf", mask, jnp.stack(near, 3))
            return found.reshape(count, 8 * rows, 8 * columns, 2)

        coords, flows = start, []
        for _ in range(steps):
            coords = jax.lax.stop_gradient(coords)
            seen = looked_up(pyramid, coords)
            h, moved, mask = update(h, context, seen, coords - start)
            coords = coords + moved
            flows.append(upsampled(coords - start, mask))
        return flows

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        return net.init(key, *jnp.zeros((2, 1, *sides, 3))), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        a, b, flow, valid = batch
        flows = net.apply(cast(params, dtype), a, b)
        valid = valid & (jnp.linalg.norm(flow, axis=-1) < 400)
        value = 0.0
        for i, found in enumerate(flows):
            apart = jnp.where(valid[..., None], jnp.abs(found - flow), 0)
            value += 0.8 ** (steps - i - 1) * apart.mean()
        return value, state

    def batch(key: Any) -> Any:
        a, b = jax.random.normal(key, (2, size, *sides, 3))
        flow = 4 * jax.random.normal(key, (size, *sides, 2))
        return a, b, flow, jax.random.bernoulli(key, 0.9, (size, *sides))

    rates = optax.linear_onecycle_schedule(100000, 4e-4)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=1e-4)
    )
    return Workload(init, loss, batch, tx)


# ---- pairs of residues, Haiku


def pair_stack(
    dtype: Any,
    size: int = 2,
    rows: int = 64,
    length: int = 160,
    width: int = 256,
    pair: int = 128,
    bins: int = 64,
) -> Workload:
    """AlphaFold's Evoformer: alignments, triangles of pairs, distances and letters."""

    def norm(x: Any) -> Any:  # in float32
        return hk.LayerNorm(-1, True, True)(f32(x)).astype(dtype)

    def linear(x: Any, n: int, bias: bool = True) -> Any:
        return hk.Linear(n, bias)(x)

    def gated(x: Any, bias: Any = None, heads: int = 4, each: int = 32) -> Any:
        """Attention along the last axis but one, gated by what asks."""
        x = norm(x)
        q, k, v = (
            linear(x, heads * each, False).reshape(*x.shape[:-1], heads, each)
            for _ in range(3)
        )
        scores = f32(jnp.einsum("...qhd,...khd->...hqk", q, k)) * each**-0.5
        scores = scores if bias is None else scores + f32(bias)
        weights = jax.nn.softmax(scores).astype(dtype)
        h = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        h = h.reshape(*x.shape[:-1], heads * each)
        return linear(h * jax.nn.sigmoid(linear(x, heads * each)), x.shape[-1])

    def biased(z: Any, heads: int) -> Any:
        """A bias of each head, of pairs: [size, 1, heads, queries, keys]."""
        return jnp.moveaxis(linear(norm(z), heads, False), -1, 1)[:, None]

    def transition(x: Any) -> Any:
        return linear(jax.nn.relu(linear(norm(x), 4 * x.shape[-1])), x.shape[-1])

    def triangle(z: Any, equation: str) -> Any:
        z = norm(z)
        a = linear(z, pair) * jax.nn.sigmoid(linear(z, pair))
        b = linear(z, pair) * jax.nn.sigmoid(linear(z, pair))
        h = linear(norm(jnp.einsum(equation, a, b)), pair)
        return h * jax.nn.sigmoid(linear(z, pair))

    def outer(m: Any) -> Any:
        m = norm(m)
        a, b = linear(m, 32), linear(m, 32)
        h = jnp.einsum("bsic,bsjd->bijcd", a, b) / rows
        return linear(h.reshape(*h.shape[:3], -1), pair)

    def dropped(x: Any, rate: float, axis: int) -> Any:
        """The same ones along an axis."""
        shape = list(x.shape)
        shape[axis] = 1
        kept = jax.random.bernoulli(hk.next_rng_key(), 1 - rate, shape)
        return x * (kept.astype(dtype) / jnp.asarray(1 - rate, dtype))

    def turned(z: Any) -> Any:
        return jnp.swapaxes(z, 1, 2)

    def network(letters: Any, target: Any) -> tuple[Any, Any]:
        first = linear(jax.nn.one_hot(target, 21, dtype=dtype), width)
        m = linear(jax.nn.one_hot(letters, 23, dtype=dtype), width) + first[:, None]
        left, right = jnp.split(
            linear(jax.nn.one_hot(target, 21, dtype=dtype), 2 * pair), 2, -1
        )
        apart = jnp.clip(jnp.arange(length)[:, None] - jnp.arange(length), -32, 32)
        z = linear(jax.nn.one_hot(apart + 32, 65, dtype=dtype), pair)
        z = z + left[:, :, None] + right[:, None]
        for _ in range(2):

            @hk.remat
            def block(m: Any, z: Any) -> tuple[Any, Any]:
                h = gated(m, biased(z, 8), 8)
                m = m + dropped(h, 0.15, 1)
                m = m + turned(gated(turned(m), None, 8))
                m = m + transition(m)
                z = z + outer(m)
                z = z + dropped(triangle(z, "bikc,bjkc->bijc"), 0.25, 1)
                z = z + dropped(triangle(z, "bkjc,bkic->bijc"), 0.25, 1)
                z = z + dropped(gated(z, biased(z, 4)), 0.25, 1)
                h = gated(turned(z), biased(turned(z), 4))
                z = z + dropped(turned(h), 0.25, 2)
                return m, z + transition(z)

            m, z = block(m, z)
        half = linear(z, bins)
        return f32(half + turned(half)), f32(linear(m, 23))

    net = hk.transform(network)

    def init(key: Any) -> Any:
        letters = jnp.zeros((1, rows, length), jnp.int32)
        return net.init(key, letters, letters[:, 0]), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        letters, masked, target, places, key = batch
        half = cast(params, dtype, lambda path: "layer_norm" in path)
        seen = jnp.where(masked, 22, letters)
        distances, found = net.apply(half, key, seen, target)
        apart = ((places[:, :, None] - places[:, None]) ** 2).sum(-1)
        edges = jnp.linspace(2.3125, 21.6875, bins - 1) ** 2
        labels = (apart[..., None] > edges).sum(-1)
        value = cross_entropy(distances, labels).mean()
        each = cross_entropy(found, letters)
        return value + 2 * jnp.where(masked, each, 0).sum() / masked.sum(), state

    def batch(key: Any) -> Any:
        letters = jax.random.randint(key, (size, rows, length), 0, 22)
        masked = jax.random.bernoulli(key, 0.15, letters.shape)
        target = jax.random.randint(key, (size, length), 0, 21)
        return letters, masked, target, jax.random.normal(key, (size, length, 3)), key

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-6))
    return Workload(init, loss, batch, tx)


# ---- a network of splines, Equinox


class SplineLayer(eqx.Module):
    """Each edge has a function of its own: a cubic spline beside a SiLU."""

    base: jax.Array
    spline: jax.Array
    scale: jax.Array
    count: int = eqx.field(static=True)

    def __init__(self, ins: int, outs: int, count: int, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.count = count
        self.base = jax.random.normal(a, (ins, outs)) * ins**-0.5
        self.spline = jax.random.normal(b, (ins, count + 3, outs)) * 0.1 / count
        self.scale = jax.random.normal(c, (ins, 1, outs)) * ins**-0.5

    def bases(self, x: Any) -> Any:
        """B-splines of third order on a grid over [-1, 1], in float32."""
        x = f32(x)[..., None]
        knots = jnp.arange(-3.0, self.count + 4) * (2 / self.count) - 1
        b = f32((x >= knots[:-1]) & (x < knots[1:])).astype(x.dtype)
        for n in range(1, 4):
            left = (x - knots[: -n - 1]) / (knots[n:-1] - knots[: -n - 1])
            right = (knots[n + 1 :] - x) / (knots[n + 1 :] - knots[1:-n])
            b = left * b[..., :-1] + right * b[..., 1:]
        return b

    def __call__(self, x: Any) -> Any:
        b = self.bases(x).astype(x.dtype)
        y = jax.nn.silu(x) @ self.base
        return y + jnp.einsum("nib,ibo->no", b, self.scale * self.spline)


def spline_network(
    dtype: Any, size: int = 16384, ins: int = 64, width: int = 256, count: int = 5
) -> Workload:
    """KAN: layers of learnt functions; classes of vectors."""
    sizes = (ins, width, width, 16)

    def make(key: Any) -> Any:
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            SplineLayer(a, b, count, k)
            for a, b, k in zip(sizes[:-1], sizes[1:], keys, strict=True)
        ]

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(make(key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, labels = batch
        x = x.astype(dtype)
        for layer in eqx.combine(cast(params, dtype), static):
            x = layer(x)
        return cross_entropy(x, labels).mean(), state

    def batch(key: Any) -> Any:
        x = jax.random.uniform(key, (size, ins), minval=-1.0)
        return x, jax.random.randint(key, (size,), 0, sizes[-1])

    return Workload(init, loss, batch, optax.adamw(1e-3, weight_decay=1e-4))


# ---- a flow of splines, NNX


def rational_spline(x: Any, parts: Any, bins: int, bound: float = 3.0) -> Any:
    """Monotonic rational quadratics within [-bound, bound], and log slopes."""
    inside = jnp.abs(x) < bound
    seen = jnp.clip(x, -bound, bound)

    def places(x: Any) -> tuple[Any, Any]:
        """Sizes of the bins, and where each begins and ends."""
        sizes = 1e-3 + (1 - 1e-3 * bins) * jax.nn.softmax(x)
        total = jnp.cumsum(sizes, -1)[..., :-1]
        pad = [(0, 0)] * (x.ndim - 1)
        total = jnp.pad(total, [*pad, (1, 0)])
        total = jnp.pad(total, [*pad, (0, 1)], constant_values=1.0)
        total = bound * (2 * total - 1)
        return jnp.diff(total), total

    widths, xs = places(parts[..., :bins])
    heights, ys = places(parts[..., bins : 2 * bins])
    slopes = 1e-3 + jax.nn.softplus(parts[..., 2 * bins :])
    edges = [(0, 0)] * (x.ndim) + [(1, 1)]
    slopes = jnp.pad(slopes, edges, constant_values=1.0)
    at = jnp.clip((seen[..., None] >= xs).sum(-1, keepdims=True) - 1, 0, bins - 1)

    def here(y: Any, ahead: int = 0) -> Any:
        return jnp.take_along_axis(y, at + ahead, -1)[..., 0]

    width, height = here(widths), here(heights)
    d0, d1, slope = here(slopes), here(slopes, 1), height / width
    t = (seen - here(xs)) / width
    both = t * (1 - t)
    below = slope + (d0 + d1 - 2 * slope) * both
    y = here(ys) + height * (slope * t**2 + d0 * both) / below
    top = slope**2 * (d1 * t**2 + 2 * slope * both + d0 * (1 - t) ** 2)
    log = jnp.log(top) - 2 * jnp.log(below)
    return jnp.where(inside, y, x), jnp.where(inside, log, 0)


class SplineCoupling(nnx.Module):
    """Splines of one half of the features by a residual network of the other."""

    def __init__(
        self, half: int, width: int, bins: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, dtype=dtype, rngs=rngs)

        self.bins, self.dtype = bins, dtype
        self.enter, self.leave = (
            linear(half, width),
            linear(width, half * (3 * bins - 1)),
        )
        self.layers = nnx.List([linear(width, width) for _ in range(4)])

    def __call__(self, x: Any) -> tuple[Any, Any]:
        kept, moved = jnp.split(x, 2, -1)
        h = self.enter(kept.astype(self.dtype))
        for a, b in zip(self.layers[::2], self.layers[1::2], strict=True):
            h = h + b(nnx.relu(a(nnx.relu(h))))
        parts = f32(self.leave(h)).reshape(*moved.shape, -1)
        width = self.enter.out_features**0.5
        cut = 2 * self.bins
        parts = jnp.concatenate([parts[..., :cut] / width, parts[..., cut:]], -1)
        moved, log = rational_spline(moved, parts, self.bins)
        return jnp.concatenate([kept, moved], -1), log.sum(-1)


class SplineFlow(nnx.Module):
    """Couplings; between two a shuffle and a product of triangles, in float32."""

    def __init__(
        self,
        features: int,
        width: int,
        layers: int,
        bins: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.couplings = nnx.List(
            [
                SplineCoupling(features // 2, width, bins, dtype, rngs)
                for _ in range(layers)
            ]
        )
        self.lower = nnx.Param(jnp.zeros((layers, features, features)))
        self.upper = nnx.Param(jnp.zeros((layers, features, features)))
        self.diagonal = nnx.Param(jnp.zeros((layers, features)))
        self.features = features

    def __call__(self, x: Any) -> Any:
        """Log densities of vectors."""
        log, eye = 0.0, jnp.eye(self.features)
        for i, coupling in enumerate(self.couplings):
            order = np.random.default_rng(i).permutation(self.features)
            size = jax.nn.softplus(self.diagonal[i] + np.log(np.e - 1)) + 1e-3
            x = x[:, order] @ (jnp.triu(self.upper[i], 1) + jnp.diag(size)).T
            x = x @ (jnp.tril(self.lower[i], -1) + eye).T
            x, more = coupling(x)
            log = log + more + jnp.log(size).sum()
        return log - 0.5 * (x**2 + np.log(2 * np.pi)).sum(-1)


def spline_flow(
    dtype: Any,
    size: int = 16384,
    features: int = 64,
    width: int = 256,
    layers: int = 4,
    bins: int = 8,
) -> Workload:
    """Neural spline flow: exact likelihood of vectors."""

    def make(key: Any) -> SplineFlow:
        return SplineFlow(features, width, layers, bins, dtype, nnx.Rngs(key))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, x: Any) -> Any:
        return -nnx.merge(graph, params)(x).mean(), state

    def batch(key: Any) -> Any:
        return jax.random.normal(key, (size, features))

    rates = optax.cosine_decay_schedule(5e-4, 100000)
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(rates))
    return Workload(init, loss, batch, tx)


# ---- a neural operator, Equinox


class SpectralLayer(eqx.Module):
    """A product of each low frequency by complex weights, in float32, and a linear."""

    weights: jax.Array
    skip: eqx.nn.Linear
    networks: list[eqx.nn.Linear]
    modes: int = eqx.field(static=True)

    def __init__(self, width: int, modes: int, key: Any) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.modes = modes
        # of both corners, real and imaginary parts
        shape = (2, 2, modes, modes, width, width)
        self.weights = jax.random.uniform(a, shape) / width**2
        self.skip = eqx.nn.Linear(width, width, key=b)
        self.networks = [
            eqx.nn.Linear(width, 2 * width, key=c),
            eqx.nn.Linear(2 * width, width, key=d),
        ]

    def convolved(self, x: Any) -> Any:
        n, (size, rows, columns, width) = self.modes, x.shape
        spectrum = jnp.fft.rfft2(f32(x), axes=(1, 2), norm="ortho")
        w = jax.lax.complex(self.weights[0], self.weights[1])

        def product(x: Any, w: Any) -> Any:
            return jnp.einsum("brci,rcio->brco", x, w)

        found = jnp.zeros((size, rows, columns // 2 + 1, width), spectrum.dtype)
        found = found.at[:, :n, :n].set(product(spectrum[:, :n, :n], w[0]))
        found = found.at[:, -n:, :n].set(product(spectrum[:, -n:, :n], w[1]))
        found = jnp.fft.irfft2(found, (rows, columns), axes=(1, 2), norm="ortho")
        return found.astype(x.dtype)

    def __call__(self, x: Any, last: bool) -> Any:
        def linear(layer: Any, x: Any) -> Any:
            return x @ layer.weight.T + layer.bias

        h = self.convolved(x)
        h = linear(self.networks[1], jax.nn.gelu(linear(self.networks[0], h)))
        x = h + linear(self.skip, x)
        return x if last else jax.nn.gelu(x)


class FourierOperator(eqx.Module):
    enter: list[eqx.nn.Linear]
    layers: list[SpectralLayer]
    leave: list[eqx.nn.Linear]

    def __init__(self, ins: int, width: int, modes: int, key: Any) -> None:
        keys = iter(jax.random.split(key, 8))
        self.enter = [
            eqx.nn.Linear(ins + 2, 2 * width, key=next(keys)),
            eqx.nn.Linear(2 * width, width, key=next(keys)),
        ]
        self.layers = [SpectralLayer(width, modes, next(keys)) for _ in range(4)]
        self.leave = [
            eqx.nn.Linear(width, 2 * width, key=next(keys)),
            eqx.nn.Linear(2 * width, 1, key=next(keys)),
        ]

    def __call__(self, x: Any) -> Any:
        def network(layers: Any, x: Any) -> Any:
            x = x @ layers[0].weight.T + layers[0].bias
            return jax.nn.gelu(x) @ layers[1].weight.T + layers[1].bias

        x = network(self.enter, x)
        for i, layer in enumerate(self.layers):
            x = layer(x, i == len(self.layers) - 1)
        return network(self.leave, x)


def fourier_operator(
    dtype: Any,
    size: int = 16,
    side: int = 128,
    steps: int = 10,
    width: int = 48,
    modes: int = 16,
) -> Workload:
    """FNO: the next vorticity of ten before it, by a relative error."""
    shapes = eqx.filter_eval_shape(
        FourierOperator, steps, width, modes, jax.random.key(0)
    )
    _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(FourierOperator(steps, width, modes, key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, wanted = batch
        grid = jnp.linspace(0, 1, side)
        grid = jnp.stack(jnp.meshgrid(grid, grid), -1)
        grid = jnp.broadcast_to(grid, (size, side, side, 2))
        x = jnp.concatenate([x, grid], -1).astype(dtype)
        half = cast(params, dtype, lambda path: ".weights" in path)
        apart = f32(eqx.combine(half, static)(x)) - wanted
        norm = lambda x: jnp.sqrt((x**2).sum((1, 2, 3)) + 1e-12)  # noqa: E731
        return (norm(apart) / norm(wanted)).mean(), state

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, (size, side, side, steps + 1))
        return x[..., :-1], x[..., -1:]

    rates = optax.cosine_decay_schedule(1e-3, 100000)
    return Workload(init, loss, batch, optax.adamw(rates, weight_decay=1e-4))


# ---- a soft actor and its critics, Linen


class FrameEncoder(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, frames: Any) -> Any:
        x = frames.astype(self.dtype) / 255 - 0.5
        for stride in (2, 1, 1, 1):
            init = nn.initializers.orthogonal(2**0.5)
            x = nn.Conv(
                *(32, (3, 3), (stride, stride), "VALID"),
                kernel_init=init,
                dtype=self.dtype,
            )(x)
            x = nn.relu(x)
        return x.reshape(len(x), -1)


class Trunk(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(50, dtype=self.dtype)(x)
        return jnp.tanh(nn.LayerNorm(dtype=self.dtype)(x))


class Judge(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = nn.relu(nn.Dense(1024, dtype=self.dtype)(x))
        return f32(nn.Dense(1, dtype=self.dtype)(x)[:, 0])


class SoftCritics(nn.Module):
    """Two values of frames and actions, on one encoder."""

    dtype: Any

    @nn.compact
    def __call__(self, frames: Any, actions: Any) -> tuple[Any, Any]:
        features = FrameEncoder(self.dtype, name="encoder")(frames)
        x = Trunk(self.dtype)(features)
        x = jnp.concatenate([x, actions.astype(self.dtype)], -1)
        twins = nn.vmap(
            Judge, {"params": 0}, {"params": True}, in_axes=None, axis_size=2
        )
        return twins(self.dtype)(x), features


class SoftActor(nn.Module):
    """Means and log deviations of actions, of features that it does not learn."""

    dtype: Any
    actions: int

    @nn.compact
    def __call__(self, features: Any) -> tuple[Any, Any]:
        x = Trunk(self.dtype)(features)
        for _ in range(2):
            x = nn.relu(nn.Dense(1024, dtype=self.dtype)(x))
        x = f32(nn.Dense(2 * self.actions, dtype=self.dtype)(x))
        mean, log = jnp.split(x, 2, -1)
        return mean, -10 + 6 * (jnp.tanh(log) + 1)


class SoftActorCritic(NamedTuple):
    """SAC from pixels, shifted at random (DrQ); a temperature, a slow copy."""

    dtype: Any
    size: int = 512
    side: int = 84
    actions: int = 6
    optimizer: Any = optax.adam(1e-3)

    def networks(self) -> tuple[Any, Any]:
        return SoftCritics(self.dtype), SoftActor(self.dtype, self.actions)

    def shifted(self, frames: Any, key: Any) -> Any:
        wide = jnp.pad(frames, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="edge")
        at = jax.random.randint(key, (len(frames), 2), 0, 9)

        def one(x: Any, at: Any) -> Any:
            return jax.lax.dynamic_slice(x, (at[0], at[1], 0), frames.shape[1:])

        return jax.vmap(one)(wide, at)

    def sample(self, params: Any, features: Any, key: Any) -> tuple[Any, Any]:
        """Actions in (-1, 1), and their log densities."""
        mean, log = self.networks()[1].apply({"params": params}, features)
        noise = jax.random.normal(key, mean.shape)
        raw = mean + jnp.exp(log) * noise
        density = -0.5 * noise**2 - log - 0.5 * np.log(2 * np.pi)
        density = density - 2 * (np.log(2) - raw - jax.nn.softplus(-2 * raw))
        return jnp.tanh(raw), density.sum(-1)

    def step(self, params: Any, opt_state: Any, slow: Any, batch: Any) -> Any:
        critics, _ = self.networks()
        frames, actions, rewards, masks, following, key = batch
        keys = jax.random.split(key, 4)
        frames = self.shifted(frames, keys[0])
        following = self.shifted(following, keys[1])
        heat = jnp.exp(params["heat"])

        def values(params: Any, frames: Any, actions: Any) -> Any:
            return critics.apply({"params": params}, frames, actions)

        def encoded(params: Any, frames: Any) -> Any:
            encoder = FrameEncoder(self.dtype)
            return encoder.apply({"params": params["encoder"]}, frames)

        features = encoded(params["critics"], following)
        chosen, density = self.sample(params["actor"], features, keys[2])
        ahead = values(slow, following, chosen)[0].min(0) - heat * density
        target = jax.lax.stop_gradient(rewards + 0.99 * masks * ahead)

        def of_critics(params: Any) -> Any:
            found, features = values(params, frames, actions)
            return ((found - target) ** 2).mean(), features

        (value, features), grads = jax.value_and_grad(of_critics, has_aux=True)(
            params["critics"]
        )
        features = jax.lax.stop_gradient(features)

        def of_actor(actor: Any) -> Any:
            chosen, density = self.sample(actor, features, keys[3])
            found = values(params["critics"], frames, chosen)[0].min(0)
            return (heat * density - found).mean(), density.mean()

        (value_a, density), grads_a = jax.value_and_grad(of_actor, has_aux=True)(
            params["actor"]
        )
        grads_h = jax.grad(lambda x: -jnp.exp(x) * (density - self.actions / 2))(
            params["heat"]
        )
        grads = {"critics": grads, "actor": grads_a, "heat": grads_h}
        updates, opt_state = self.optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        slow = optax.incremental_update(params["critics"], slow, 0.01)
        return params, opt_state, slow, (value, value_a)

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        critics, actor = self.networks()
        shape = self.size, self.side, self.side, 9
        frames = jax.random.randint(key, (2, *shape), 0, 256).astype(jnp.uint8)
        actions = jax.random.uniform(key, (self.size, self.actions), minval=-1.0)
        first = critics.init(key, frames[0, :1], actions[:1])["params"]
        features = jnp.zeros((1, 32 * ((self.side - 3) // 2 + 1 - 6) ** 2))
        params = {
            "critics": first,
            "actor": actor.init(key, features)["params"],
            "heat": jnp.log(0.1),
        }
        batch = (
            frames[0],
            actions,
            jax.random.normal(key, (self.size,)),
            jnp.ones((self.size,)),
            frames[1],
            key,
        )
        return params, self.optimizer.init(params), first, batch


# ---- physics, plain JAX


def physics(
    dtype: Any, size: int = 32768, width: int = 256, layers: int = 4
) -> Workload:
    """A network that obeys Allen and Cahn's equation: second derivatives of places."""

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, layers + 4))

        def layer(ins: int, outs: int) -> Any:
            w = jax.random.normal(next(keys), (ins, outs)) * ins**-0.5
            return {"w": w, "b": jnp.zeros((outs,))}

        params = {
            "u": layer(width, width),
            "v": layer(width, width),
            "layers": [layer(width, width) for _ in range(layers)],
            "last": layer(width, 1),
        }
        rates = 2.0 * jax.random.normal(next(keys), (3, width // 2))
        return params, rates

    def loss(params: Any, rates: Any, batch: Any) -> Any:
        p = cast(params, dtype)

        def linear(layer: Any, x: Any) -> Any:
            return x @ layer["w"] + layer["b"]

        def u(t: Any, x: Any) -> Any:
            """Of one place; periodic, its features in float32."""
            seen = jnp.stack([t, jnp.cos(jnp.pi * x), jnp.sin(jnp.pi * x)])
            angles = seen @ rates
            h = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)]).astype(dtype)
            a, b = jnp.tanh(linear(p["u"], h)), jnp.tanh(linear(p["v"], h))
            for layer in p["layers"]:
                h = jnp.tanh(linear(layer, h))
                h = h * a + (1 - h) * b
            return f32(linear(p["last"], h)[0])

        def residual(t: Any, x: Any) -> Any:
            u_t = jax.grad(u)(t, x)

            def slope(x: Any) -> Any:
                return jax.jvp(lambda x: u(t, x), (x,), (1.0,))[1]

            u_xx = jax.jvp(slope, (x,), (1.0,))[1]
            value = u(t, x)
            return u_t + 5 * value**3 - 5 * value - 1e-4 * u_xx

        (t, x), start = batch
        r = jax.vmap(residual)(t, x)
        first = jax.vmap(u, (None, 0))(0.0, start) - start**2 * jnp.cos(jnp.pi * start)
        return (r**2).mean() + 100 * (first**2).mean(), rates

    def batch(key: Any) -> Any:
        return (
            jax.random.uniform(key, (2, size)) * 2 - jnp.array([[0.0], [1.0]]),
            jax.random.uniform(key, (size // 32,), minval=-1.0),
        )

    rates = optax.exponential_decay(1e-3, 5000, 0.9)
    return Workload(init, loss, batch, optax.adam(rates))
