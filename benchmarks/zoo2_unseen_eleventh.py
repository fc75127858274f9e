"""Train steps of families that the other zoos lack: privacy, retrieval and energies.

Each size is an argument, so that the step also runs small, on a CPU.
"""

from __future__ import annotations

import functools
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
from zoo2_unseen_third import f32, of_linen

# ---- privacy, Haiku


class Private(NamedTuple):
    """DP-SGD: gradients of each example, clipped, summed, with noise added to them."""

    dtype: Any
    size: int = 256
    part: int = 64
    side: int = 32
    width: int = 64
    classes: int = 10
    clip: float = 1.0
    optimizer: Any = optax.sgd(2.0, momentum=0.9)

    def network(self, x: Any) -> Any:
        """A residual network with group norms, whose statistics are float32."""

        def act(x: Any) -> Any:
            return jax.nn.relu(hk.GroupNorm(16)(f32(x)).astype(self.dtype))

        x = hk.Conv2D(self.width, 3)(x)
        for stage in range(3):
            outs = self.width << stage
            for i in range(2):
                stride = 2 if stage and i == 0 else 1
                h = act(x)
                if x.shape[-1] != outs:
                    x = hk.Conv2D(outs, 1, stride)(h)
                h = hk.Conv2D(outs, 3, stride)(h)
                x = x + hk.Conv2D(outs, 3)(act(h))
        return f32(hk.Linear(self.classes)(act(x).mean((1, 2))))

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """Some examples at a time, each with a gradient of its own."""
        net = hk.without_apply_rng(hk.transform(self.network))
        *data, key = batch

        def loss(params: Any, image: Any, label: Any) -> Any:
            half = cast(params, self.dtype, lambda path: "group_norm" in path)
            logits = net.apply(half, image[None].astype(self.dtype))
            return cross_entropy(logits, label[None])[0]

        def more(total: Any, part: Any) -> Any:
            each = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))
            values, grads = each(params, *part)
            square = sum(
                (g**2).sum(tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)
            )
            scale = jnp.minimum(1, self.clip * jax.lax.rsqrt(square + 1e-12))

            def clipped(total: Any, g: Any) -> Any:
                return total + (g * scale.reshape(-1, *(1,) * (g.ndim - 1))).sum(0)

            return jax.tree.map(clipped, total, grads), values.mean()

        parts = jax.tree.map(lambda x: x.reshape(-1, self.part, *x.shape[1:]), data)
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = jax.lax.scan(more, zeros, tuple(parts))
        leaves, kind = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            (x + self.clip * jax.random.normal(k, x.shape)) / self.size
            for x, k in zip(leaves, keys, strict=True)
        ]
        grads = jax.tree.unflatten(kind, noisy)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, values.mean()

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        net = hk.without_apply_rng(hk.transform(self.network))
        images = jax.random.normal(key, (self.size, self.side, self.side, 3))
        labels = jax.random.randint(key, (self.size,), 0, self.classes)
        params = net.init(key, images[:1])
        return params, self.optimizer.init(params), (images, labels, key)


# ---- replaced words, Linen


class PostNormBlock(nn.Module):
    """A transformer block as BERT's."""

    dtype: Any
    heads: int

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        width = x.shape[-1]
        h = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, force_fp32_for_softmax=True
        )(x, mask=mask)
        x = nn.LayerNorm(dtype=self.dtype)(x + h)
        h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(x), approximate=False)
        h = nn.Dense(width, dtype=self.dtype)(h)
        return nn.LayerNorm(dtype=self.dtype)(x + h)


class Replaced(nn.Module):
    """A small network fills gaps, a large one tells which words it has made up."""

    dtype: Any
    width: int
    layers: int
    vocabulary: int

    @nn.compact
    def __call__(self, ids: Any, at: Any, key: Any) -> tuple[Any, Any, Any]:
        """Logits of what is hidden, one number a word, and which words are real."""
        dtype, width = self.dtype, self.width
        words = nn.Embed(self.vocabulary, width, dtype=dtype, name="words")
        normal = nn.initializers.normal(0.02)
        places = self.param("places", normal, (ids.shape[1], width))
        norm = nn.LayerNorm(dtype=dtype)
        mask = nn.make_attention_mask(ids > 0, ids > 0)
        rows = jnp.arange(len(ids))[:, None]

        def embedded(ids: Any) -> Any:
            return norm(words(ids) + places.astype(dtype))

        x = nn.Dense(width // 4, dtype=dtype)(embedded(ids.at[rows, at].set(1)))
        for _ in range(self.layers):
            x = PostNormBlock(dtype, 4)(x, mask)
        x = jnp.take_along_axis(x, at[..., None], 1)
        x = nn.gelu(nn.Dense(width, dtype=dtype)(x), approximate=False)
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        logits = words.attend(nn.LayerNorm(dtype=dtype)(x))
        logits = f32(logits) + bias
        noise = jax.random.gumbel(key, logits.shape)
        found = jnp.argmax(jax.lax.stop_gradient(logits) + noise, -1)
        mixed = ids.at[rows, at].set(found)
        x = embedded(mixed)
        for _ in range(self.layers):
            x = PostNormBlock(dtype, 8)(x, mask)
        x = nn.gelu(nn.Dense(width, dtype=dtype)(x), approximate=False)
        verdicts = f32(nn.Dense(1, dtype=dtype)(x))[..., 0]
        return logits, verdicts, mixed == ids


def replaced(
    dtype: Any,
    size: int = 64,
    length: int = 128,
    width: int = 512,
    layers: int = 4,
    vocabulary: int = 16384,
) -> Workload:
    """ELECTRA: two networks that share their words."""
    hidden = length * 3 // 20

    def loss(apply: Any, batch: Any) -> Any:
        ids, at, key = batch
        logits, verdicts, real = apply(ids, at, key)
        of_words = cross_entropy(logits, jnp.take_along_axis(ids, at, 1)).mean()
        each = optax.sigmoid_binary_cross_entropy(verdicts, 1.0 - real)
        counted = ids > 0
        return of_words + 50 * jnp.where(counted, each, 0).sum() / counted.sum()

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        ids = jax.random.randint(a, (size, length), 2, vocabulary)
        at = jnp.argsort(jax.random.uniform(b, (size, length)), -1)[:, :hidden]
        return ids, at, key

    model = Replaced(dtype, width, layers, vocabulary)
    example = jnp.ones((1, length), int), jnp.ones((1, hidden), int), jax.random.key(0)
    rates = optax.warmup_cosine_decay_schedule(0.0, 5e-4, 10000, 1000000)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, eps=1e-6, weight_decay=0.01)
    )
    return of_linen(model, example, loss, batch, tx)


# ---- hashed attention, plain JAX


@jax.custom_vjp
def permuted(x: Any, order: Any, undo: Any) -> Any:
    """Rows of `x` along the last axis but one, by a permutation and its inverse."""
    return jnp.take_along_axis(x, order[..., None], -2)


def permuted_forward(x: Any, order: Any, undo: Any) -> Any:
    return permuted(x, order, undo), undo


def permuted_backward(undo: Any, ct: Any) -> Any:
    # a gather, where the transpose of a gather is a scatter
    return jnp.take_along_axis(ct, undo[..., None], -2), None, None


permuted.defvjp(permuted_forward, permuted_backward)


def plain_norm(p: Any, x: Any) -> Any:
    """Statistics in float32; the result is of the type of what is read."""
    y = f32(x)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6)
    return (y * p["scale"] + p["shift"]).astype(x.dtype)


def plain_norm_of(width: int) -> Any:
    return {"scale": jnp.ones((width,)), "shift": jnp.zeros((width,))}


def drawn(key: Any, *shape: int) -> Any:
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def hashed(
    dtype: Any,
    size: int = 2,
    length: int = 4096,
    width: int = 512,
    heads: int = 8,
    layers: int = 2,
    rounds: int = 2,
    bucket: int = 64,
    vocabulary: int = 8192,
) -> Workload:
    """Reformer: each place attends to those that fall into the same bucket."""
    head, buckets = width // heads, length // bucket

    def init(key: Any) -> Any:
        def layer(key: Any) -> Any:
            keys = jax.random.split(key, 5)
            return {
                "qk": drawn(keys[0], width, width),
                "v": drawn(keys[1], width, width),
                "out": drawn(keys[2], width, width),
                "up": drawn(keys[3], width, 4 * width),
                "down": drawn(keys[4], 4 * width, width),
                "norms": [plain_norm_of(width) for _ in range(2)],
            }

        keys = jax.random.split(key, layers + 3)
        return {
            "words": 0.02 * jax.random.normal(keys[0], (vocabulary, width)),
            "places": 0.02 * jax.random.normal(keys[1], (length, width)),
            "out": drawn(keys[2], width, vocabulary),
            "layers": [layer(k) for k in keys[3:]],
            "norm": plain_norm_of(width),
        }, ()

    def attention(p: Any, x: Any, key: Any) -> Any:
        def split(x: Any) -> Any:
            return x.reshape(size, length, heads, head).swapaxes(1, 2)

        qk, v = split(x @ p["qk"]), split(x @ p["v"])
        turns = jax.random.normal(key, (heads, head, rounds, buckets // 2))
        fixed = jax.lax.stop_gradient(qk)
        y = jnp.einsum("bhld,hdrn->bhrln", fixed, turns.astype(dtype))
        of_place = jnp.argmax(jnp.concatenate([y, -y], -1), -1)
        order = jnp.argsort(of_place * length + jnp.arange(length), -1)
        undo = jnp.argsort(order, -1)

        def chunks(x: Any) -> Any:
            return x.reshape(*x.shape[:3], buckets, bucket, *x.shape[4:])

        def both(x: Any) -> Any:
            """A chunk and the one before it."""
            return jnp.concatenate([x, jnp.roll(x, 1, 3)], 4)

        shape = size, heads, rounds, length, head
        q = chunks(permuted(jnp.broadcast_to(qk[:, :, None], shape), order, undo))
        v = chunks(permuted(jnp.broadcast_to(v[:, :, None], shape), order, undo))
        at = chunks(order)
        where = chunks(jnp.take_along_axis(of_place, order, -1))
        k = f32(q)
        k = k * jax.lax.rsqrt((k**2).mean(-1, keepdims=True) + 1e-6)
        k = both(k.astype(dtype))
        scores = f32(jnp.einsum("bhrcqd,bhrckd->bhrcqk", q, k)) * head**-0.5
        at_q, at_k = at[..., None], both(at)[..., None, :]
        hidden = (at_q < at_k) | (where[..., None] != both(where)[..., None, :])
        scores = jnp.where(hidden, -1e9, scores)
        scores = jnp.where(at_q == at_k, -1e5, scores)
        total = jax.nn.logsumexp(scores, -1, keepdims=True)
        weights = jnp.exp(scores - total).astype(dtype)
        out = jnp.einsum("bhrcqk,bhrckd->bhrcqd", weights, both(v))
        out = permuted(out.reshape(shape), undo, order)
        total = permuted(total.reshape(*shape[:-1], 1), undo, order)
        out = (out * jax.nn.softmax(total, 2).astype(dtype)).sum(2)
        return out.swapaxes(1, 2).reshape(size, length, width) @ p["out"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, key = batch
        p = cast(params, dtype, lambda path: "norm" in path)
        x = p["words"][ids[:, :-1]] + p["places"]
        for i, layer in enumerate(p["layers"]):
            h = plain_norm(layer["norms"][0], x)
            x = x + attention(layer, h, jax.random.fold_in(key, i))
            h = plain_norm(layer["norms"][1], x)
            x = x + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
        logits = plain_norm(p["norm"], x) @ p["out"]
        return cross_entropy(logits, ids[:, 1:]).mean(), state

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, vocabulary), key

    return Workload(init, loss, batch, optax.adafactor(1e-3))


# ---- retrieval, NNX


class Looking(nnx.Module):
    """Attention of one sequence to another, with rotary places where it is one."""

    def __init__(
        self, width: int, context: int, heads: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, use_bias=False, dtype=dtype, rngs=rngs)

        self.q, self.kv = linear(width, width), linear(context, 2 * width)
        self.out, self.heads, self.dtype = linear(width, width), heads, dtype

    def rotate(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[-3])[:, None] * 1e4 ** -(jnp.arange(half) / half)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(f32(x), 2, -1)
        x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return x.astype(self.dtype)

    def __call__(self, x: Any, y: Any, placed: bool = False, mask: Any = None) -> Any:
        q, (k, v) = self.q(x), jnp.split(self.kv(y), 2, -1)
        q, k, v = (z.reshape(*z.shape[:-1], self.heads, -1) for z in (q, k, v))
        if placed:
            q, k = self.rotate(q), self.rotate(k)
        scores = f32(jnp.einsum("...qhd,...khd->...hqk", q, k)) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = jnp.where(mask, scores, -1e30)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        return self.out(h.reshape(x.shape))


class RetrievalBlock(nnx.Module):
    """Attention, perhaps attention to something else, and a gated network."""

    def __init__(
        self, width: int, context: int | None, heads: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def norm() -> nnx.Module:
            return nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

        self.norms = nnx.List([norm() for _ in range(3)])
        self.own = Looking(width, width, heads, dtype, rngs)
        other = context and Looking(width, context, heads, dtype, rngs)
        self.other = nnx.data(other)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.up, self.down = linear(width, 4 * width), linear(2 * width, width)

    def attend(self, x: Any, mask: Any = None) -> Any:
        h = self.norms[0](x)
        return x + self.own(h, h, True, mask)

    def rest(self, x: Any) -> Any:
        gate, up = jnp.split(self.up(self.norms[2](x)), 2, -1)
        return x + self.down(nnx.gelu(gate) * up)


class Retrieval(nnx.Module):
    def __init__(
        self,
        width: int,
        inner: int,
        layers: int,
        part: int,
        vocabulary: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.words = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.enter = nnx.Linear(width, inner, dtype=dtype, rngs=rngs)
        self.encoder = nnx.List(
            [RetrievalBlock(inner, width, 4, dtype, rngs) for _ in range(2)]
        )
        self.decoder = nnx.List(
            [
                RetrievalBlock(width, inner if i % 2 else None, 8, dtype, rngs)
                for i in range(layers)
            ]
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)
        self.part = part

    def encode(self, found: Any, x: Any) -> Any:
        """Neighbours, i32[size, parts, count, length], and the parts they are of."""
        size, parts, count, length = found.shape
        y = self.enter(self.words(found))
        x = x.reshape(size, parts, 1, self.part, -1)
        x = jnp.broadcast_to(x, (size, parts, count, *x.shape[3:]))
        for block in self.encoder:
            y = block.attend(y)
            y = block.rest(y + block.other(block.norms[1](y), x))
        return y.reshape(size, parts, count * length, -1)

    def chunked(self, block: Any, x: Any, memory: Any) -> Any:
        """The last of each part and what follows it read that part's neighbours."""
        size, length, width = x.shape
        more = self.part - 1
        h = jnp.pad(block.norms[1](x)[:, more:], ((0, 0), (0, more), (0, 0)))
        h = h.reshape(size, -1, self.part, width)
        h = block.other(h, memory).reshape(size, length, width)
        return x + jnp.pad(h, ((0, 0), (more, 0), (0, 0)))[:, :length]

    def __call__(self, ids: Any, found: Any) -> Any:
        x, memory = self.words(ids), None
        mask = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
        for block in self.decoder:
            x = block.attend(x, mask)
            if block.other is not None:
                memory = self.encode(found, x) if memory is None else memory
                x = self.chunked(block, x, memory)
            x = block.rest(x)
        return f32(self.out(self.norm(x)))


def retrieval(
    dtype: Any,
    size: int = 8,
    length: int = 512,
    width: int = 512,
    inner: int = 256,
    layers: int = 4,
    part: int = 64,
    neighbours: int = 2,
    vocabulary: int = 16384,
) -> Workload:
    """RETRO: a decoder that reads, part by part, what is like the part before."""

    def make(key: Any) -> Retrieval:
        rngs = nnx.Rngs(key)
        return Retrieval(width, inner, layers, part, vocabulary, dtype, rngs)

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, found = batch
        logits = nnx.merge(graph, params)(ids[:, :-1], found)
        return cross_entropy(logits, ids[:, 1:]).mean(), state

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        shape = size, length // part, neighbours, 2 * part
        ids = jax.random.randint(a, (size, length + 1), 0, vocabulary)
        return ids, jax.random.randint(b, shape, 0, vocabulary)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(2e-4, b2=0.95, weight_decay=0.1)
    )
    return Workload(init, loss, batch, tx)


# ---- late interaction, Haiku


def late_interaction(
    dtype: Any,
    size: int = 32,
    asked: int = 32,
    length: int = 192,
    width: int = 512,
    layers: int = 4,
    heads: int = 8,
    outs: int = 128,
    vocabulary: int = 16384,
) -> Workload:
    """ColBERT v2: each word of a question finds its best one in a passage."""

    def norm(x: Any) -> Any:  # in float32
        return hk.LayerNorm(-1, True, True)(f32(x)).astype(dtype)

    def network(ids: Any, kind: Any) -> Any:
        """Embeddings of words, of length one."""
        words = hk.Embed(vocabulary, width, name="words")
        x = words(ids) + hk.Embed(512, width, name="places")(jnp.arange(ids.shape[1]))
        x = norm(x + hk.Embed(2, width, name="kinds")(kind))
        mask = (ids > 0)[:, None, None]
        for _ in range(layers):
            q, k, v = (hk.Linear(width)(x) for _ in range(3))
            q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
            scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
            scores = jnp.where(mask, scores, -1e30)
            weights = jax.nn.softmax(scores).astype(dtype)
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = norm(x + hk.Linear(width)(h))
            h = hk.Linear(4 * width)(x)
            x = norm(x + hk.Linear(width)(jax.nn.gelu(h, approximate=False)))
        x = f32(hk.Linear(outs, with_bias=False)(x))
        x = x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-12)
        return jnp.where((ids > 0)[..., None], x, 0).astype(dtype)

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.ones((1, 8), int), 0), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        questions, passages, teacher = batch
        half = cast(params, dtype, lambda path: "layer_norm" in path)
        q = net.apply(half, questions, 0)
        p = net.apply(half, passages.reshape(-1, length), 1)
        each = jnp.einsum("qid,pjd->qpij", q, p)
        hidden = (passages.reshape(-1, length) == 0)[:, None]
        scores = f32(jnp.where(hidden, -2, each).max(-1)).sum(-1)
        # of its own passages, the first is the right one
        rows = jnp.arange(size)
        own = scores.reshape(size, size, -1)[rows, rows]
        wanted, found = jax.nn.softmax(teacher), jax.nn.log_softmax(own)
        apart = (wanted * (jax.nn.log_softmax(teacher) - found)).sum(-1).mean()
        count = passages.shape[1]
        return apart + cross_entropy(scores, rows * count).mean(), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        return (
            jax.random.randint(keys[0], (size, asked), 1, vocabulary),
            jax.random.randint(keys[1], (size, 2, length), 1, vocabulary),
            jax.random.normal(keys[2], (size, 2)),
        )

    return Workload(init, loss, batch, optax.adamw(1e-5, weight_decay=0.01))


# ---- swapped assignments, Linen


class BasicBlock(nn.Module):
    dtype: Any
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(kernel: int, stride: int = 1) -> nn.Module:
            return nn.Conv(
                self.width,
                (kernel, kernel),
                (stride, stride),
                use_bias=False,
                dtype=self.dtype,
            )

        def norm(**kw: Any) -> nn.Module:
            return nn.BatchNorm(False, momentum=0.9, dtype=self.dtype, **kw)

        h = nn.relu(norm()(conv(3, self.stride)(x)))
        h = norm(scale_init=nn.initializers.zeros)(conv(3)(h))
        if x.shape != h.shape:
            x = norm()(conv(1, self.stride)(x))
        return nn.relu(x + h)


class Swapped(nn.Module):
    dtype: Any
    width: int
    outs: int

    @nn.compact
    def __call__(self, crops: Any) -> Any:
        """Features of length one, float32, of crops of several sizes."""
        dtype, conv = self.dtype, nn.Conv(self.width, (7, 7), (2, 2), dtype=self.dtype)
        norm = nn.BatchNorm(False, momentum=0.9, dtype=dtype)
        blocks = [
            BasicBlock(dtype, self.width << stage, 2 if stage and not i else 1)
            for stage in range(3)
            for i in range(2)
        ]
        found = []
        for x in crops:
            x = nn.relu(norm(conv(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for block in blocks:
                x = block(x)
            found.append(f32(x).mean((1, 2)).astype(dtype))
        x = nn.Dense(2048, dtype=dtype)(jnp.concatenate(found))
        x = nn.relu(nn.BatchNorm(False, momentum=0.9, dtype=dtype)(x))
        x = f32(nn.Dense(self.outs, dtype=dtype)(x))
        return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-12)


def sinkhorn(scores: Any, iterations: int = 3) -> Any:
    """Assignments that use all prototypes alike, f32[size, prototypes]."""
    q = jnp.exp((scores - scores.max()) / 0.05)
    size, count = q.shape
    for _ in range(iterations):
        q = q / (q.sum(0, keepdims=True) * count)
        q = q / (q.sum(1, keepdims=True) * size)
    return q * size


def swapped(
    dtype: Any,
    size: int = 64,
    side: int = 96,
    small: int = 48,
    width: int = 64,
    outs: int = 128,
    prototypes: int = 1024,
) -> Workload:
    """SwAV: each crop foretells to which prototypes another one is assigned."""
    model = Swapped(dtype, width, outs)

    def init(key: Any) -> Any:
        crops = [jnp.zeros((2, n, n, 3)) for n in (side, small)]
        made = model.init(key, crops)
        params = {"net": made["params"], "prototypes": drawn(key, outs, prototypes)}
        return params, made["batch_stats"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        variables = {"params": params["net"], "batch_stats": state}
        x, new = model.apply(variables, batch, mutable=["batch_stats"])
        w = params["prototypes"]
        w = w * jax.lax.rsqrt((w**2).sum(0, keepdims=True) + 1e-12)
        scores = f32(x.astype(dtype) @ w.astype(dtype)).reshape(-1, size, prototypes)
        log_p, total = jax.nn.log_softmax(scores / 0.1), 0.0
        for i in range(2):
            q = sinkhorn(jax.lax.stop_gradient(scores[i]))
            rest = sum(log_p[j] for j in range(len(scores)) if j != i)
            total -= (q * rest).sum(-1).mean() / (len(scores) - 1)
        return total / 2, new["batch_stats"]

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        return (
            jax.random.normal(a, (2 * size, side, side, 3)),
            jax.random.normal(b, (4 * size, small, small, 3)),
        )

    return Workload(init, loss, batch, optax.lars(0.6, 1e-6, momentum=0.9))


# ---- angles between bonds, Equinox


def on(layer: eqx.nn.Linear, x: Any) -> Any:
    """A linear layer along all axes but the last."""
    x = x @ layer.weight.T
    return x if layer.bias is None else x + layer.bias


class Residual(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]

    def __call__(self, x: Any) -> Any:
        h = x
        for layer in self.layers:
            h = jax.nn.silu(on(layer, h))
        return x + h


class Interaction(eqx.Module):
    """Messages along bonds, of those that arrive where they begin."""

    radial: list[eqx.nn.Linear]
    angular: list[eqx.nn.Linear]
    own: eqx.nn.Linear
    other: eqx.nn.Linear
    down: eqx.nn.Linear
    up: eqx.nn.Linear
    skip: eqx.nn.Linear
    before: Residual
    after: list[Residual]

    def __init__(self, width: int, inner: int, sizes: Any, key: Any) -> None:
        keys = iter(jax.random.split(key, 16))

        def linear(a: int, b: int, bias: bool = False) -> eqx.nn.Linear:
            return eqx.nn.Linear(a, b, use_bias=bias, key=next(keys))

        self.radial = [linear(sizes[0], 8), linear(8, width)]
        self.angular = [linear(sizes[1], 8), linear(8, inner)]
        self.own, self.other = linear(width, width, True), linear(width, width, True)
        self.down, self.up = linear(width, inner), linear(inner, width)
        self.skip = linear(width, width, True)
        self.before = Residual(width, next(keys))
        self.after = [Residual(width, next(keys)) for _ in range(2)]

    def __call__(self, x: Any, basis: Any, triplets: Any) -> Any:
        radial, angular = basis
        into, out_of = triplets
        own = jax.nn.silu(on(self.own, x))
        other = jax.nn.silu(on(self.other, x))
        other = other * on(self.radial[1], on(self.radial[0], radial))
        other = jax.nn.silu(on(self.down, other))
        other = other[into] * on(self.angular[1], on(self.angular[0], angular))
        other = jax.ops.segment_sum(other, out_of, len(x))
        h = self.before(own + jax.nn.silu(on(self.up, other)))
        x = x + jax.nn.silu(on(self.skip, h))
        for layer in self.after:
            x = layer(x)
        return x


class Output(eqx.Module):
    radial: eqx.nn.Linear
    up: eqx.nn.Linear
    layers: list[eqx.nn.Linear]
    last: eqx.nn.Linear

    def __init__(self, width: int, sizes: Any, key: Any) -> None:
        keys = jax.random.split(key, 5)
        self.radial = eqx.nn.Linear(sizes[0], width, use_bias=False, key=keys[0])
        self.up = eqx.nn.Linear(width, 2 * width, use_bias=False, key=keys[1])
        self.layers = [eqx.nn.Linear(2 * width, 2 * width, key=k) for k in keys[2:4]]
        self.last = eqx.nn.Linear(2 * width, 1, use_bias=False, key=keys[4])

    def __call__(self, x: Any, radial: Any, receivers: Any, atoms: int) -> Any:
        x = jax.ops.segment_sum(x * on(self.radial, radial), receivers, atoms)
        x = on(self.up, x)
        for layer in self.layers:
            x = jax.nn.silu(on(layer, x))
        return f32(on(self.last, x))[:, 0]


class Directional(eqx.Module):
    species: jax.Array
    first: eqx.nn.Linear
    enter: eqx.nn.Linear
    interactions: list[Interaction]
    outputs: list[Output]
    frequencies: jax.Array

    def __init__(self, width: int, inner: int, layers: int, key: Any) -> None:
        keys = jax.random.split(key, 2 * layers + 4)
        sizes = 6, 42
        self.species = jax.random.normal(keys[0], (95, width))
        self.first = eqx.nn.Linear(6, width, key=keys[1])
        self.enter = eqx.nn.Linear(3 * width, width, key=keys[2])
        self.interactions = [
            Interaction(width, inner, sizes, k) for k in keys[3 : 3 + layers]
        ]
        self.outputs = [Output(width, sizes, k) for k in keys[3 + layers :]]
        self.frequencies = jnp.pi * jnp.arange(1.0, 7.0)

    def __call__(self, positions: Any, species: Any, edges: Any, triplets: Any) -> Any:
        """Energies of atoms; distances and angles and their bases are float32."""
        (senders, receivers), (into, out_of) = edges, triplets
        dtype, atoms = self.species.dtype, len(positions)
        apart = positions[senders] - positions[receivers]
        distance = jnp.sqrt((apart**2).sum(-1, keepdims=True) + 1e-6)
        short = jnp.clip(distance / 5, 1e-2, 1)
        fall = 1 / short - 28 * short**5 + 48 * short**6 - 21 * short**7
        radial = fall * jnp.sin(self.frequencies * short)
        unit = apart / distance
        cosine = -(unit[into] * unit[out_of]).sum(-1)
        legendre = [jnp.ones_like(cosine), cosine]
        for n in range(2, 7):
            more = (2 * n - 1) * cosine * legendre[-1] - (n - 1) * legendre[-2]
            legendre.append(more / n)
        angular = jnp.stack(legendre, -1)[..., None] * radial[into][:, None]
        angular = angular.reshape(len(cosine), -1).astype(dtype)
        radial = radial.astype(dtype)
        h = self.species[species]
        first = jax.nn.silu(on(self.first, radial))
        x = jnp.concatenate([h[senders], h[receivers], first], -1)
        x = jax.nn.silu(on(self.enter, x))
        energies = self.outputs[0](x, radial, receivers, atoms)
        for layer, output in zip(self.interactions, self.outputs[1:], strict=True):
            x = layer(x, (radial, angular), triplets)
            energies = energies + output(x, radial, receivers, atoms)
        return energies


def triplets(
    dtype: Any,
    atoms: int = 1024,
    edges: int = 16384,
    count: int = 131072,
    molecules: int = 64,
    width: int = 128,
    inner: int = 64,
    layers: int = 3,
) -> Workload:
    """DimeNet++: energies of molecules, by distances and the angles between bonds."""
    shapes = eqx.filter_eval_shape(Directional, width, inner, layers, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(Directional(width, inner, layers, key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        positions, species, pairs, angles, wanted = batch
        half = cast(params, dtype, lambda path: "frequencies" in path)
        each = eqx.combine(half, static)(positions, species, pairs, angles)
        molecule = jnp.arange(atoms) * molecules // atoms
        found = jax.ops.segment_sum(each, molecule, molecules)
        return jnp.abs(found - wanted).mean(), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 5)
        return (
            2 * jax.random.normal(keys[0], (atoms, 3)),
            jax.random.randint(keys[1], (atoms,), 0, 95),
            jax.random.randint(keys[2], (2, edges), 0, atoms),
            jax.random.randint(keys[3], (2, count), 0, edges),
            jax.random.normal(keys[4], (molecules,)),
        )

    return Workload(init, loss, batch, optax.amsgrad(1e-3))


# ---- quantiles of returns, Haiku


class Noisy(hk.Module):
    """A product whose weight has learnt noise of rank one, in float32."""

    def __init__(self, outs: int, dtype: Any, name: str | None = None) -> None:
        super().__init__(name)
        self.outs, self.dtype = outs, dtype

    def __call__(self, x: Any) -> Any:
        ins, outs = x.shape[-1], self.outs
        bound = ins**-0.5
        init = hk.initializers.RandomUniform(-bound, bound)
        size = hk.initializers.Constant(0.5 * bound)
        w = hk.get_parameter("w", (ins, outs), init=init)
        b = hk.get_parameter("b", (outs,), init=init)
        of_w = hk.get_parameter("noise_w", (ins, outs), init=size)
        of_b = hk.get_parameter("noise_b", (outs,), init=size)

        def noise(n: int) -> Any:
            x = jax.random.normal(hk.next_rng_key(), (n,))
            return jnp.sign(x) * jnp.sqrt(jnp.abs(x))

        left, right = noise(ins), noise(outs)
        w = w + of_w * left[:, None] * right
        b = b + of_b * right
        return x @ w.astype(self.dtype) + b.astype(self.dtype)


class Quantiles(NamedTuple):
    """IQN: quantiles of returns at random fractions, with noisy layers and a target."""

    dtype: Any
    size: int = 128
    side: int = 84
    width: int = 512
    fractions: int = 32
    actions: int = 18
    optimizer: Any = optax.adam(5e-5, eps=1e-2 / 32)

    def network(self, frames: Any, fractions: Any) -> Any:
        """Values, f32[size, fractions, actions]."""
        x = frames.astype(self.dtype) / 255
        for n, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = jax.nn.relu(hk.Conv2D(n, kernel, stride, padding="VALID")(x))
        x = x.reshape(len(x), 1, -1)
        # the angles in float32
        waves = jnp.cos(jnp.pi * jnp.arange(1, 65) * fractions[..., None])
        h = hk.Linear(x.shape[-1], name="fractions")(waves.astype(self.dtype))
        x = x * jax.nn.relu(h)
        value = Noisy(1, self.dtype)(jax.nn.relu(Noisy(self.width, self.dtype)(x)))
        gain = jax.nn.relu(Noisy(self.width, self.dtype)(x))
        gain = f32(Noisy(self.actions, self.dtype)(gain))
        return f32(value) + gain - gain.mean(-1, keepdims=True)

    def step(self, params: Any, target: Any, opt_state: Any, batch: Any) -> Any:
        net = hk.transform(self.network)
        frames, played, rewards, discounts, after, weights, key = batch
        keys = jax.random.split(key, 6)

        def of(params: Any, frames: Any, key: Any, draw: Any) -> tuple[Any, Any]:
            fractions = jax.random.uniform(draw, (self.size, self.fractions))
            half = cast(params, self.dtype, lambda path: "noisy" in path)
            return net.apply(half, key, frames, fractions), fractions

        def chosen(values: Any, played: Any) -> Any:
            return jnp.take_along_axis(values, played[:, None, None], -1)[..., 0]

        best = of(params, after, keys[0], keys[1])[0].mean(1).argmax(-1)
        later, _ = of(target, after, keys[2], keys[3])
        wanted = rewards[:, None] + discounts[:, None] * chosen(later, best)

        def loss(params: Any) -> Any:
            found, fractions = of(params, frames, keys[4], keys[5])
            apart = wanted[:, None] - chosen(found, played)[..., None]
            weight = jnp.abs(fractions[..., None] - (apart < 0))
            each = (weight * optax.huber_loss(apart)).mean(2).sum(1)
            return (weights * each).mean(), each

        (value, each), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        target = optax.incremental_update(params, target, 0.005)
        return params, target, opt_state, (value, each)

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        keys = jax.random.split(key, 6)
        shape = self.size, self.side, self.side, 4
        frames, after = (
            jax.random.randint(k, shape, 0, 256).astype(jnp.uint8) for k in keys[:2]
        )
        net = hk.transform(self.network)
        params = net.init(key, frames[:1], jnp.zeros((1, 2)))
        batch = (
            frames,
            jax.random.randint(keys[2], (self.size,), 0, self.actions),
            jax.random.normal(keys[3], (self.size,)),
            0.99 * jax.random.bernoulli(keys[4], 0.9, (self.size,)),
            after,
            jax.random.uniform(keys[5], (self.size,)),
            key,
        )
        target = jax.tree.map(jnp.copy, params)
        return params, target, self.optimizer.init(params), batch


# ---- restoration, NNX


class GatedConvs(nnx.Module):
    """NAFNet's block: gates by halves of the channels in place of nonlinearities."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def conv(a: int, b: int, kernel: int = 1, groups: int = 1) -> nnx.Module:
            return nnx.Conv(
                *(a, b, (kernel, kernel)),
                feature_group_count=groups,
                dtype=dtype,
                rngs=rngs,
            )

        self.norms = nnx.List(
            [nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.enter = conv(width, 2 * width)
        self.spread = conv(2 * width, 2 * width, 3, 2 * width)
        self.whole = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.leave = conv(width, width)
        self.up, self.down = conv(width, 2 * width), conv(width, width)
        self.scales = nnx.Param(jnp.full((2, width), 0.1))
        self.dtype = dtype

    def __call__(self, x: Any) -> Any:
        def gated(x: Any) -> Any:
            a, b = jnp.split(x, 2, -1)
            return a * b

        scales = self.scales[...].astype(self.dtype)
        h = gated(self.spread(self.enter(self.norms[0](x))))
        whole = f32(h).mean((1, 2)).astype(self.dtype)
        h = h * self.whole(whole)[:, None, None]
        x = x + self.leave(h) * scales[0]
        h = gated(self.up(self.norms[1](x)))
        return x + self.down(h) * scales[1]


class Restoration(nnx.Module):
    def __init__(
        self, width: int, depths: tuple[int, ...], dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def blocks(n: int, width: int) -> nnx.Module:
            return nnx.List([GatedConvs(width, dtype, rngs) for _ in range(n)])

        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        self.first = conv(3, width, (3, 3))
        self.down, self.up = nnx.List([]), nnx.List([])
        self.left, self.right = nnx.List([]), nnx.List([])
        for depth in depths[:-1]:
            self.left.append(blocks(depth, width))
            self.down.append(conv(width, 2 * width, (2, 2), (2, 2)))
            self.up.append(conv(2 * width, 4 * width, (1, 1), use_bias=False))
            self.right.append(blocks(1, width))
            width *= 2
        self.middle = blocks(depths[-1], width)
        self.last = conv(width >> (len(depths) - 1), 3, (3, 3))
        self.dtype = dtype

    def __call__(self, images: Any) -> Any:
        x, kept = self.first(images.astype(self.dtype)), []
        for blocks, down in zip(self.left, self.down, strict=True):
            for block in blocks:
                x = block(x)
            kept.append(x)
            x = down(x)
        for block in self.middle:
            x = block(x)
        for up, blocks in reversed(list(zip(self.up, self.right, strict=True))):
            x = up(x)
            n, rows, columns, width = x.shape
            x = x.reshape(n, rows, columns, 2, 2, width // 4)
            x = x.swapaxes(2, 3).reshape(n, 2 * rows, 2 * columns, width // 4)
            x = x + kept.pop()
            for block in blocks:
                x = block(x)
        return images + f32(self.last(x))


def restoration(
    dtype: Any,
    size: int = 16,
    side: int = 128,
    width: int = 32,
    depths: tuple[int, ...] = (1, 1, 2, 2),
) -> Workload:
    """NAFNet: what is left of noise in pictures, by its logarithm."""

    def make(key: Any) -> Restoration:
        return Restoration(width, depths, dtype, nnx.Rngs(key))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        noisy, clean = batch
        found = nnx.merge(graph, params)(noisy)
        each = ((found - clean) ** 2).mean((1, 2, 3))
        return 10 / np.log(10) * jnp.log(each + 1e-8).mean(), state

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        clean = jax.random.uniform(a, (size, side, side, 3))
        return clean + 0.2 * jax.random.normal(b, clean.shape), clean

    rates = optax.cosine_decay_schedule(1e-3, 200000, 1e-4)
    return Workload(init, loss, batch, optax.adamw(rates, 0.9, 0.9, weight_decay=0.0))


# ---- films at two speeds, Linen


class FilmBlock(nn.Module):
    """A bottleneck over frames, rows and columns."""

    dtype: Any
    inner: int
    frames: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(n: int, *kernel: int, stride: int = 1) -> nn.Module:
            strides = 1, stride, stride
            return nn.Conv(n, kernel, strides, use_bias=False, dtype=self.dtype)

        def norm(**kw: Any) -> nn.Module:
            return nn.BatchNorm(False, momentum=0.9, dtype=self.dtype, **kw)

        outs = 4 * self.inner
        h = nn.relu(norm()(conv(self.inner, self.frames, 1, 1)(x)))
        h = nn.relu(norm()(conv(self.inner, 1, 3, 3, stride=self.stride)(h)))
        h = norm(scale_init=nn.initializers.zeros)(conv(outs, 1, 1, 1)(h))
        if x.shape != h.shape:
            x = norm()(conv(outs, 1, 1, 1, stride=self.stride)(x))
        return nn.relu(x + h)


class TwoSpeeds(nn.Module):
    """Few frames in many channels, beside many frames in few, which it reads."""

    dtype: Any
    width: int
    apart: int
    depths: tuple[int, ...]
    classes: int

    @nn.compact
    def __call__(self, film: Any, kept: Any) -> Any:
        dtype, apart, fast_width = self.dtype, self.apart, self.width // 8

        def start(x: Any, n: int, frames: int) -> Any:
            conv = nn.Conv(n, (frames, 7, 7), (1, 2, 2), use_bias=False, dtype=dtype)
            x = nn.relu(nn.BatchNorm(False, momentum=0.9, dtype=dtype)(conv(x)))
            return nn.max_pool(x, (1, 3, 3), (1, 2, 2), "SAME")

        def joined(slow: Any, fast: Any) -> Any:
            n = 2 * fast.shape[-1]
            conv = nn.Conv(n, (5, 1, 1), (apart, 1, 1), use_bias=False, dtype=dtype)
            x = nn.relu(nn.BatchNorm(False, momentum=0.9, dtype=dtype)(conv(fast)))
            return jnp.concatenate([slow, x], -1)

        film = film.astype(dtype)
        slow = start(film[:, ::apart], self.width, 1)
        fast = start(film, fast_width, 5)
        for stage, depth in enumerate(self.depths):
            slow = joined(slow, fast)
            for i in range(depth):
                stride = 2 if stage and not i else 1
                frames = 3 if stage > 1 else 1
                slow = FilmBlock(dtype, self.width << stage, frames, stride)(slow)
                fast = FilmBlock(dtype, fast_width << stage, 3, stride)(fast)
        x = [f32(x).mean((1, 2, 3)) for x in (slow, fast)]
        x = jnp.concatenate(x, -1).astype(dtype)
        x = jnp.where(kept, x * 2, 0)
        return f32(nn.Dense(self.classes, dtype=dtype)(x))


def two_speeds(
    dtype: Any,
    size: int = 8,
    frames: int = 32,
    side: int = 112,
    width: int = 64,
    apart: int = 8,
    depths: tuple[int, ...] = (1, 1, 1),
    classes: int = 400,
) -> Workload:
    """SlowFast: what is done in a film."""
    model = TwoSpeeds(dtype, width, apart, depths, classes)
    features = (width + width // 8) * 4 << (len(depths) - 1)

    def init(key: Any) -> Any:
        film = jnp.zeros((1, frames, side, side, 3))
        made = model.init(key, film, jnp.ones((1, features), bool))
        return made["params"], made["batch_stats"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        film, labels, key = batch
        variables = {"params": params, "batch_stats": state}
        kept = jax.random.bernoulli(key, 0.5, (size, features))
        logits, new = model.apply(variables, film, kept, mutable=["batch_stats"])
        return cross_entropy(logits, labels).mean(), new["batch_stats"]

    def batch(key: Any) -> Any:
        film = jax.random.normal(key, (size, frames, side, side, 3))
        return film, jax.random.randint(key, (size,), 0, classes), key

    tx = optax.chain(
        optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True)
    )
    return Workload(init, loss, batch, tx)


# ---- energies of pictures, Equinox


class EnergyBlock(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    skip: eqx.nn.Conv2d | None

    def __init__(self, ins: int, outs: int, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.convs = [
            eqx.nn.Conv2d(ins, outs, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(outs, outs, 3, padding=1, key=keys[1]),
        ]
        self.skip = None
        if ins != outs:
            self.skip = eqx.nn.Conv2d(ins, outs, 1, key=keys[2])

    def __call__(self, x: Any) -> Any:
        h = self.convs[1](jax.nn.silu(self.convs[0](jax.nn.silu(x))))
        return h + (x if self.skip is None else self.skip(x))


class Energy(eqx.Module):
    first: eqx.nn.Conv2d
    blocks: list[EnergyBlock]
    last: eqx.nn.Linear

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key, 5)
        self.first = eqx.nn.Conv2d(3, width, 3, padding=1, key=keys[0])
        ends = (width, width), (width, 2 * width), (2 * width, 2 * width)
        self.blocks = [EnergyBlock(*e, k) for e, k in zip(ends, keys[1:4], strict=True)]
        self.last = eqx.nn.Linear(2 * width, 1, key=keys[4])

    def __call__(self, x: Any) -> Any:
        """Of one picture, [channels, rows, columns]."""
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < 2:
                channels, rows, columns = x.shape
                x = x.reshape(channels, rows // 2, 2, columns // 2, 2).mean((2, 4))
        x = jax.nn.silu(x).sum((1, 2))
        return f32(self.last(x))[0]


class Energies(NamedTuple):
    """An energy-based model: samples walk downhill, and are kept for the next step."""

    dtype: Any
    size: int = 128
    side: int = 32
    width: int = 64
    walk: int = 10
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(1e-4, b1=0.0)
    )

    def step(self, params: Any, opt_state: Any, samples: Any, batch: Any) -> Any:
        images, key = batch
        a, b, c = jax.random.split(key, 3)
        shapes = eqx.filter_eval_shape(Energy, self.width, jax.random.key(0))
        _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

        def energies(params: Any, x: Any) -> Any:
            model = eqx.combine(cast(params, self.dtype), static)
            return jax.vmap(model)(x.astype(self.dtype))

        # a few of them begin anew
        anew = jax.random.bernoulli(a, 0.05, (self.size, 1, 1, 1))
        start = jax.random.uniform(b, images.shape, minval=-1.0)
        samples = jnp.where(anew, start, samples)

        def walk(x: Any, key: Any) -> Any:
            x = x + 0.005 * jax.random.normal(key, x.shape)
            slope = jax.grad(lambda x: energies(params, x).sum())(x)
            x = x - 10 * jnp.clip(slope, -0.03, 0.03)
            return jnp.clip(x, -1, 1), None

        samples, _ = jax.lax.scan(walk, samples, jax.random.split(c, self.walk))

        def loss(params: Any) -> Any:
            both = energies(params, jnp.concatenate([images, samples]))
            real, made = jnp.split(both, 2)
            return real.mean() - made.mean() + 0.1 * (both**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, samples, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        a, b = jax.random.split(key)
        shape = self.size, 3, self.side, self.side
        params = eqx.filter(Energy(self.width, key), eqx.is_array)
        samples = jax.random.uniform(a, shape, minval=-1.0)
        images = jax.random.uniform(b, shape, minval=-1.0)
        return params, self.optimizer.init(params), samples, (images, key)


# ---- learning while reading, plain JAX


def reading(
    dtype: Any,
    size: int = 8,
    length: int = 1024,
    width: int = 512,
    heads: int = 8,
    layers: int = 2,
    part: int = 32,
    vocabulary: int = 16384,
) -> Workload:
    """TTT: the state is a linear model's weight, which gradient descent updates."""
    head = width // heads

    def init(key: Any) -> Any:
        def layer(key: Any) -> Any:
            keys = jax.random.split(key, 6)
            return {
                "qkv": drawn(keys[0], width, 3 * width),
                "rate": drawn(keys[1], width, heads),
                "gate": drawn(keys[2], width, width),
                "out": drawn(keys[3], width, width),
                "up": drawn(keys[4], width, 4 * width),
                "down": drawn(keys[5], 2 * width, width),
                "state": {
                    "w": 0.02 * jax.random.normal(key, (heads, head, head)),
                    "b": jnp.zeros((heads, 1, head)),
                    "norm": {
                        "scale": jnp.ones((heads, 1, head)),
                        "shift": jnp.zeros((heads, 1, head)),
                    },
                },
                "norms": [plain_norm_of(width) for _ in range(3)],
            }

        keys = jax.random.split(key, layers + 1)
        return {
            "words": 0.02 * jax.random.normal(keys[0], (vocabulary, width)),
            "layers": [layer(k) for k in keys[1:]],
            "norm": plain_norm_of(width),
        }, ()

    def mixed(p: Any, x: Any) -> Any:
        """What is read of weights that each part of the text has changed."""
        state = p["state"]
        norm = state["norm"]

        def split(x: Any) -> Any:
            x = x.reshape(size, length // part, part, heads, -1)
            return x.transpose(1, 0, 3, 2, 4)

        q, k, v = (split(y) for y in jnp.split(x @ p["qkv"], 3, -1))
        rate = jax.nn.sigmoid(f32(x @ p["rate"]))
        rate = split(rate) / (head * (jnp.arange(part)[:, None] + 1))
        before = jnp.tril(jnp.ones((part, part)))

        def short(z: Any, k: Any, v: Any) -> Any:
            """How far off the model is, in float32."""
            apart = plain_norm(norm, f32(z)) + f32(k) - f32(v)
            return 0.5 * (apart**2).sum()

        def one(carry: Any, seen: Any) -> Any:
            w, b = carry
            q, k, v, rate = seen
            half = w.astype(dtype)
            z = k @ half + b.astype(dtype)
            slope = jax.grad(short)(f32(z), k, v)
            moved = (rate * slope).astype(dtype)
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * before.astype(dtype)
            bias = b - jnp.cumsum(rate * slope, 2)
            z = q @ half - scores @ moved + bias.astype(dtype)
            out = q + plain_norm(norm, z)
            w = w - f32(jnp.einsum("bhkd,bhke->bhde", k, moved))
            return (w, bias[:, :, -1:]), out

        start = [
            jnp.broadcast_to(f32(y), (size, *y.shape)) for y in (state["w"], state["b"])
        ]
        _, out = jax.lax.scan(jax.checkpoint(one), tuple(start), (q, k, v, rate))
        out = out.transpose(1, 0, 3, 2, 4).reshape(x.shape)
        out = plain_norm(p["norms"][2], out) * jax.nn.gelu(x @ p["gate"])
        return out @ p["out"]

    def keep(path: str) -> bool:
        return "norm" in path or "state" in path

    def loss(params: Any, state: Any, ids: Any) -> Any:
        p = cast(params, dtype, keep)
        x = p["words"][ids[:, :-1]]
        for layer in p["layers"]:
            x = x + mixed(layer, plain_norm(layer["norms"][0], x))
            h = plain_norm(layer["norms"][1], x) @ layer["up"]
            gate, up = jnp.split(h, 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        logits = plain_norm(p["norm"], x) @ p["words"].T
        return cross_entropy(logits, ids[:, 1:]).mean(), state

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, vocabulary)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1)
    )
    return Workload(init, loss, batch, tx)
