"""Train steps of families that the other zoos lack: memories, merged tokens, and more.

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
import optax.contrib
from flax import nnx
from models.common import Workload, cross_entropy
from zoo2_libraries import cast
from zoo2_unseen_third import f32

# ---- average velocities of a flow, Linen


class VelocityBlock(nn.Module):
    """Shifted, scaled and gated by the times; norms of queries and keys."""

    dtype: Any
    heads: int

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        width, dtype = x.shape[-1], self.dtype
        dense = functools.partial(nn.Dense, dtype=dtype)
        norm = functools.partial(nn.RMSNorm, dtype=dtype)
        six = dense(6 * width, kernel_init=nn.initializers.zeros)(time)[:, None]
        a, b, c, d, e, f = jnp.split(six, 6, -1)
        h = norm(use_scale=False)(x) * (1 + a) + b
        shape = *x.shape[:2], self.heads, width // self.heads
        q, k, v = (dense(width, use_bias=False)(h).reshape(shape) for _ in range(3))
        q, k = norm()(q), norm()(k)
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * shape[-1] ** -0.5
        weights = jax.nn.softmax(scores).astype(dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + c * dense(width)(h)
        h = norm(use_scale=False)(x) * (1 + d) + e
        h = nn.silu(dense(3 * width)(h)) * dense(3 * width)(h)
        return x + f * dense(width)(h)


class Velocities(nn.Module):
    dtype: Any
    width: int
    heads: int
    layers: int
    classes: int

    @nn.compact
    def __call__(self, z: Any, start: Any, end: Any, labels: Any) -> Any:
        dtype, width = self.dtype, self.width
        dense = functools.partial(nn.Dense, dtype=dtype)
        size, side, _, channels = z.shape

        def of_time(t: Any) -> Any:
            angles = t[:, None] * 1e3 * 1e4 ** -(jnp.arange(128) / 128)
            h = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
            return dense(width)(nn.silu(dense(width)(h)))

        x = nn.Conv(width, (2, 2), (2, 2), dtype=dtype)(z).reshape(size, -1, width)
        places = nn.initializers.normal(0.02)
        x = x + self.param("places", places, x.shape[1:]).astype(dtype)
        time = of_time(end) + of_time(end - start)
        time = nn.silu(time + nn.Embed(self.classes + 1, width, dtype=dtype)(labels))
        for _ in range(self.layers):
            x = VelocityBlock(dtype, self.heads)(x, time)
        a, b = jnp.split(dense(2 * width)(time)[:, None], 2, -1)
        x = nn.RMSNorm(dtype=dtype, use_scale=False)(x) * (1 + a) + b
        x = dense(4 * channels)(x).reshape(size, side // 2, side // 2, 2, 2, channels)
        return f32(x.swapaxes(2, 3).reshape(z.shape))


class Average(NamedTuple):
    """MeanFlow: a derivative along the flow is part of what is to be foretold."""

    dtype: Any
    size: int = 32
    side: int = 32
    width: int = 384
    heads: int = 6
    layers: int = 2
    classes: int = 1000
    optimizer: Any = optax.adamw(1e-4, b2=0.95, weight_decay=0.0)

    @property
    def model(self) -> nn.Module:
        return Velocities(self.dtype, self.width, self.heads, self.layers, self.classes)

    def step(self, params: Any, average: Any, opt_state: Any, batch: Any) -> Any:
        images, labels, key = batch
        keys = jax.random.split(key, 4)
        times = jax.nn.sigmoid(jax.random.normal(keys[0], (2, self.size)) - 0.4)
        start, end = times.min(0), times.max(0)
        start = jnp.where(jax.random.bernoulli(keys[1], 0.75, end.shape), end, start)
        noise = jax.random.normal(keys[2], images.shape)
        t = end[:, None, None, None]
        z, v = (1 - t) * images + t * noise, noise - images
        drop = jax.random.bernoulli(keys[3], 0.1, labels.shape)
        labels = jnp.where(drop, self.classes, labels)

        def loss(params: Any) -> Any:
            def u_of(z: Any, start: Any, end: Any) -> Any:
                return self.model.apply({"params": params}, z, start, end, labels)

            u, along = jax.jvp(
                u_of, (z, start, end), (v, jnp.zeros_like(start), jnp.ones_like(end))
            )
            wanted = jax.lax.stop_gradient(v - (t - start[:, None, None, None]) * along)
            square = ((u - wanted) ** 2).sum((1, 2, 3))
            weight = jax.lax.stop_gradient(1 / (square + 1e-3))
            return (weight * square).mean(), square.mean()

        (value, square), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1e-4)
        metrics = {"loss": value, "square": square, "norm": optax.global_norm(grads)}
        return params, average, opt_state, metrics

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        images = jax.random.normal(key, (self.size, self.side, self.side, 4))
        labels = jax.random.randint(key, (self.size,), 0, self.classes)
        time = jnp.ones((1,))
        made = self.model.init(key, images[:1], time, time, labels[:1])["params"]
        return made, made, self.optimizer.init(made), (images, labels, key)


# ---- who is speaking, Linen


class SpeakerBlock(nn.Module):
    """Convolutions of parts of the channels, each reads what the last one made."""

    dtype: Any
    dilation: int
    parts: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, dtype, old = x.shape[-1], self.dtype, x
        dense = functools.partial(nn.Dense, dtype=dtype)

        def norm(x: Any) -> Any:
            return nn.BatchNorm(False, momentum=0.9, dtype=dtype)(nn.relu(x))

        first, *rest = jnp.split(norm(dense(width)(x)), self.parts, -1)
        found, y = [first], jnp.zeros_like(first)
        for part in rest:
            y = nn.Conv(
                part.shape[-1], (3,), kernel_dilation=self.dilation, dtype=dtype
            )(part + y)
            y = norm(y)
            found.append(y)
        x = norm(dense(width)(jnp.concatenate(found, -1)))
        gate = nn.relu(dense(128)(x.mean(1, keepdims=True)))
        return old + x * nn.sigmoid(dense(width)(gate))


class Speaker(nn.Module):
    dtype: Any
    width: int
    parts: int
    outs: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Vectors of recordings, f32[size, outs]."""
        dtype, width = self.dtype, self.width
        norm = functools.partial(nn.BatchNorm, False, momentum=0.9, dtype=dtype)
        x = norm()(nn.relu(nn.Conv(width, (5,), dtype=dtype)(x)))
        kept = []
        for dilation in (2, 3, 4):
            x = SpeakerBlock(dtype, dilation, self.parts)(x)
            kept.append(x)
        x = nn.relu(nn.Dense(3 * width, dtype=dtype)(jnp.concatenate(kept, -1)))

        def moments(weights: Any) -> tuple[Any, Any]:
            mean = (f32(x) * weights).sum(1, keepdims=True)
            square = (f32(x) ** 2 * weights).sum(1, keepdims=True)
            return mean, jnp.sqrt(jnp.maximum(square - mean**2, 1e-6))

        context = [jnp.broadcast_to(y, x.shape) for y in moments(1 / x.shape[1])]
        h = jnp.concatenate([x, *(y.astype(dtype) for y in context)], -1)
        h = nn.tanh(norm()(nn.relu(nn.Dense(128, dtype=dtype)(h))))
        weights = jax.nn.softmax(f32(nn.Dense(x.shape[-1], dtype=dtype)(h)), 1)
        h = jnp.concatenate(moments(weights), -1)[:, 0].astype(dtype)
        return f32(norm()(nn.Dense(self.outs, dtype=dtype)(norm()(h))))


def speakers(
    dtype: Any,
    size: int = 32,
    frames: int = 304,
    bands: int = 80,
    width: int = 512,
    parts: int = 4,
    outs: int = 192,
    voices: int = 5994,
) -> Workload:
    """ECAPA-TDNN: voices by angles with a margin; parts of the spectra are hidden."""
    model = Speaker(dtype, width, parts, outs)

    def init(key: Any) -> Any:
        made = model.init(key, jnp.zeros((2, frames, bands)))
        voice = 0.1 * jax.random.normal(key, (voices, outs))
        return {"model": made["params"], "voices": voice}, made["batch_stats"]

    def unit(x: Any) -> Any:
        return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-8)

    def hide(x: Any, key: Any) -> Any:
        for i, most in ((1, frames // 8), (2, bands // 8)):
            a, b, key = jax.random.split(key, 3)
            long = jax.random.randint(a, (size, 1), 0, most)
            begin = jax.random.randint(b, (size, 1), 0, x.shape[i] - most)
            places = jnp.arange(x.shape[i])
            hidden = (places >= begin) & (places < begin + long)
            x = jnp.where(jnp.expand_dims(hidden, 3 - i), 0, x)
        return x

    def loss(params: Any, state: Any, batch: Any) -> Any:
        spectra, labels, key = batch
        spectra = spectra - spectra.mean(1, keepdims=True)
        variables = {"params": params["model"], "batch_stats": state}
        found, new = model.apply(variables, hide(spectra, key), mutable=["batch_stats"])
        cosines = unit(found).astype(dtype) @ unit(params["voices"]).T.astype(dtype)
        cosines = jnp.clip(f32(cosines), -1 + 1e-6, 1 - 1e-6)
        sines = jnp.sqrt(1 - cosines**2)
        harder = cosines * np.cos(0.2) - sines * np.sin(0.2)
        harder = jnp.where(cosines > -np.cos(0.2), harder, cosines - 0.04)
        right = jax.nn.one_hot(labels, voices, dtype=bool)
        logits = 30 * jnp.where(right, harder, cosines)
        return cross_entropy(logits, labels).mean(), new["batch_stats"]

    def batch(key: Any) -> Any:
        spectra = jax.random.normal(key, (size, frames, bands))
        return spectra, jax.random.randint(key, (size,), 0, voices), key

    rates = optax.cosine_onecycle_schedule(100000, 1e-3)
    tx = optax.chain(optax.add_decayed_weights(2e-5), optax.adam(rates))
    return Workload(init, loss, batch, tx)


# ---- pictures from some of their frequencies, Equinox


def to_frequencies(x: Any) -> Any:
    x = jnp.fft.ifftshift(x, (-2, -1))
    return jnp.fft.fftshift(jnp.fft.fft2(x, norm="ortho"), (-2, -1))


def to_places(x: Any) -> Any:
    x = jnp.fft.ifftshift(x, (-2, -1))
    return jnp.fft.fftshift(jnp.fft.ifft2(x, norm="ortho"), (-2, -1))


def channel_norm(x: Any) -> Any:
    """Of one picture, [channels, rows, columns], each channel by itself; in float32."""
    y = f32(x)
    mean, var = y.mean((1, 2), keepdims=True), y.var((1, 2), keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(var + 1e-5)).astype(x.dtype)


class Refiner(eqx.Module):
    """A U-Net of one complex picture."""

    down: list[list[eqx.nn.Conv2d]]
    up: list[eqx.nn.ConvTranspose2d]
    after: list[list[eqx.nn.Conv2d]]
    last: eqx.nn.Conv2d

    def __init__(self, width: int, depth: int, key: Any) -> None:
        keys = iter(jax.random.split(key, 8 * depth))

        def two(a: int, b: int) -> list[eqx.nn.Conv2d]:
            conv = functools.partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
            return [conv(i, b, use_bias=False, key=next(keys)) for i in (a, b)]

        widths = [width << i for i in range(depth)]
        self.down = [two(a, b) for a, b in zip([2, *widths], widths, strict=False)]
        self.up = [
            eqx.nn.ConvTranspose2d(2 * w, w, 2, 2, use_bias=False, key=next(keys))
            for w in widths[-2::-1]
        ]
        self.after = [two(2 * w, w) for w in widths[-2::-1]]
        self.last = eqx.nn.Conv2d(width, 2, 1, key=next(keys))

    def __call__(self, x: Any) -> Any:
        """From and to float32, [2, rows, columns]."""

        def act(x: Any) -> Any:
            return jax.nn.leaky_relu(channel_norm(x), 0.2)

        mean, scale = x.mean((1, 2), keepdims=True), x.std((1, 2), keepdims=True) + 1e-6
        x = ((x - mean) / scale).astype(self.last.weight.dtype)
        kept = []
        for i, convs in enumerate(self.down):
            if i:
                kept.append(x)
                c, rows, columns = x.shape
                x = x.reshape(c, rows // 2, 2, columns // 2, 2).mean((2, 4))
            for conv in convs:
                x = act(conv(x))
        for up, convs in zip(self.up, self.after, strict=True):
            x = jnp.concatenate([act(up(x)), kept.pop()])
            for conv in convs:
                x = act(conv(x))
        return f32(self.last(x)) * scale + mean


class Cascades(eqx.Module):
    nets: list[Refiner]
    strengths: Any

    def __init__(self, width: int, depth: int, count: int, key: Any) -> None:
        self.nets = [Refiner(width, depth, k) for k in jax.random.split(key, count)]
        self.strengths = jnp.ones((count,))

    def __call__(self, measured: Any, mask: Any, maps: Any) -> Any:
        """A picture, f32[rows, columns]."""

        def one(net: Refiner, strength: Any, k: Any) -> Any:
            image = (to_places(k) * maps.conj()).sum(0)
            x = net(jnp.stack([image.real, image.imag]))
            change = to_frequencies(jax.lax.complex(x[0], x[1]) * maps)
            return k - f32(strength) * jnp.where(mask, k - measured, 0) - change

        k = measured
        for i, net in enumerate(self.nets):
            k = eqx.filter_checkpoint(one)(net, self.strengths[i], k)
        x = to_places(k)
        return jnp.sqrt((x.real**2 + x.imag**2).sum(0) + 1e-12)


def cascades(
    dtype: Any,
    size: int = 4,
    coils: int = 8,
    side: int = 192,
    width: int = 32,
    depth: int = 3,
    count: int = 2,
) -> Workload:
    """A variational network: magnetic resonance from a quarter of the columns."""

    def make(key: Any) -> Cascades:
        return Cascades(width, depth, count, key)

    _, static = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)), lambda x: hasattr(x, "shape")
    )

    def init(key: Any) -> Any:
        return eqx.filter(make(key), eqx.is_array), ()

    def likeness(a: Any, b: Any, most: Any) -> Any:
        """SSIM in windows of 7 x 7."""

        def mean(x: Any) -> Any:
            return nn.avg_pool(x[..., None], (7, 7))[..., 0]

        c, d = ((k * most[:, None, None]) ** 2 for k in (0.01, 0.03))
        m, n = mean(a), mean(b)
        v, w, both = mean(a * a) - m**2, mean(b * b) - n**2, mean(a * b) - m * n
        above = (2 * m * n + c) * (2 * both + d)
        return (above / ((m**2 + n**2 + c) * (v + w + d))).mean()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        measured, mask, maps, wanted = batch
        keep = lambda path: "strengths" in path  # noqa: E731
        model = eqx.combine(cast(params, dtype, keep), static)
        found = jax.vmap(model)(measured, mask, maps)
        return 1 - likeness(found, wanted, wanted.max((1, 2))), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        shape = size, coils, side, side
        wanted = jax.random.uniform(keys[0], (size, side, side))
        maps = jax.random.normal(keys[1], (2, *shape))
        maps = jax.lax.complex(maps[0], maps[1])
        maps = maps / jnp.sqrt((jnp.abs(maps) ** 2).sum(1, keepdims=True))
        mask = jax.random.bernoulli(keys[2], 0.25, (size, 1, 1, side))
        k = jnp.where(mask, to_frequencies(maps * wanted[:, None]), 0)
        return k, mask, maps, wanted

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))
    return Workload(init, loss, batch, tx)


# ---- long texts by few blocks, NNX


class SparseLayer(nnx.Module):
    """Each block of places sees its neighbours, the first one, and some by chance."""

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,
        chance: int,
        seed: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.norms = nnx.List(
            [nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.drop = nnx.Dropout(0.1)
        self.heads, self.block, self.chance, self.seed = heads, block, chance, seed
        self.dtype = dtype

    def seen(self, count: int) -> tuple[Any, Any]:
        """Blocks that each block but the first sees, and which are no repetitions."""
        rows = np.arange(1, count)
        draw = np.random.RandomState(self.seed)
        which = [np.zeros_like(rows), rows - 1, rows, (rows + 1) % count]
        which += [draw.randint(1, count, len(rows)) for _ in range(self.chance)]
        which = np.stack(which, 1)
        fresh = [
            [x not in row[:i] for i, x in enumerate(row)] for row in which.tolist()
        ]
        return which, np.array(fresh)

    def softmax(self, scores: Any, mask: Any) -> Any:
        scores = f32(scores) * (self.q.out_features // self.heads) ** -0.5
        return jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(self.dtype)

    def attend(self, x: Any, there: Any) -> Any:
        size, length, width = x.shape
        count = length // self.block
        shape = size, count, self.block, self.heads, width // self.heads
        q, k, v = (y(x).reshape(shape) for y in (self.q, self.k, self.v))
        # the first block sees all
        scores = jnp.einsum("bqhd,bnkhd->bhqnk", q[:, 0], k)
        scores = scores.reshape(*scores.shape[:3], length)
        weights = self.softmax(scores, there[:, None, None])
        weights = weights.reshape(*weights.shape[:3], count, self.block)
        first = jnp.einsum("bhqnk,bnkhd->bqhd", weights, v)
        which, fresh = self.seen(count)
        flat = size, count - 1, -1, *shape[3:]
        near_k, near_v = k[:, which].reshape(flat), v[:, which].reshape(flat)
        mask = there.reshape(size, count, self.block)[:, which] & fresh[..., None]
        mask = mask.reshape(size, count - 1, 1, 1, -1)
        scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q[:, 1:], near_k)
        weights = self.softmax(scores, mask)
        rest = jnp.einsum("bnhqk,bnkhd->bnqhd", weights, near_v)
        found = jnp.concatenate([first[:, None], rest], 1)
        return self.out(found.reshape(x.shape))

    def __call__(self, x: Any, there: Any, key: Any) -> Any:
        a, b = jax.random.split(key)
        x = self.norms[0](x + self.drop(self.attend(x, there), rngs=a))
        h = self.down(nnx.gelu(self.up(x)))
        return self.norms[1](x + self.drop(h, rngs=b))


class SparseText(nnx.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        block: int,
        length: int,
        vocabulary: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        norm = functools.partial(nnx.LayerNorm, width, dtype=dtype, rngs=rngs)
        self.words = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(length, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [SparseLayer(width, heads, block, 2, i, dtype, rngs) for i in range(layers)]
        )
        self.norm, self.last = norm(), norm()
        self.turn = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((vocabulary,)))

    def __call__(self, ids: Any, there: Any, asked: Any, key: Any) -> Any:
        """Logits at the places that are asked for."""
        x = self.words(ids) + self.places(jnp.arange(ids.shape[1]))
        x = self.norm(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, there, jax.random.fold_in(key, i))
        x = jnp.take_along_axis(x, asked[..., None], 1)
        x = self.last(nnx.gelu(self.turn(x)))
        return f32(self.words.attend(x)) + self.bias[...]


def sparse_text(
    dtype: Any,
    size: int = 4,
    length: int = 1024,
    width: int = 512,
    heads: int = 8,
    layers: int = 2,
    block: int = 64,
    vocabulary: int = 16384,
    hidden: int = 152,
) -> Workload:
    """BigBird: hidden words of long texts; LAMB."""

    def make(key: Any) -> SparseText:
        return SparseText(
            width, heads, layers, block, length, vocabulary, dtype, nnx.Rngs(key)
        )

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, many, asked, key = batch
        there = jnp.arange(length) < many[:, None]
        labels = jnp.take_along_axis(ids, asked, 1)
        seen = ids.at[jnp.arange(size)[:, None], asked].set(3)
        logits = nnx.merge(graph, params)(seen, there, asked, key)
        weights = (asked < many[:, None]).astype(jnp.float32)
        each = cross_entropy(logits, labels) * weights
        return each.sum() / jnp.maximum(weights.sum(), 1), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        return (
            jax.random.randint(keys[0], (size, length), 4, vocabulary),
            jax.random.randint(keys[1], (size,), length // 2, length + 1),
            jnp.sort(jax.random.randint(keys[2], (size, hidden), 0, length)),
            key,
        )

    rates = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 1000, 100000)
    return Workload(init, loss, batch, optax.lamb(rates, weight_decay=0.01))


# ---- tokens that become one, Linen


class MergingBlock(nn.Module):
    """Attention in proportion to sizes; what is most alike is averaged between."""

    dtype: Any
    heads: int
    prefix: int
    merged: int
    rate: float

    @nn.compact
    def __call__(self, x: Any, sizes: Any, keep: bool) -> tuple[Any, Any]:
        size, length, width = x.shape
        dtype, prefix = self.dtype, self.prefix
        dense = functools.partial(nn.Dense, dtype=dtype)
        norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=dtype)
        drop = nn.Dropout(self.rate, broadcast_dims=(1, 2), deterministic=keep)

        def scaled(name: str, x: Any) -> Any:
            by = self.param(name, nn.initializers.constant(1e-4), (width,))
            return drop(x * by.astype(dtype))

        qkv = dense(3 * width)(norm()(x)).reshape(size, length, 3, self.heads, -1)
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
        scores = scores + jnp.log(sizes)[:, None, None]
        h = jax.nn.softmax(scores).astype(dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", h, v).reshape(x.shape)
        x = x + scaled("first", dense(width)(h))
        if self.merged:
            x, sizes = self.merge(x, sizes, k[:, prefix:].mean(2))
        h = dense(width)(nn.gelu(dense(4 * width)(norm()(x))))
        return x + scaled("second", h), sizes

    def merge(self, x: Any, sizes: Any, keys: Any) -> tuple[Any, Any]:
        keys = f32(jax.lax.stop_gradient(keys))
        keys = keys * jax.lax.rsqrt((keys**2).sum(-1, keepdims=True) + 1e-6)
        keys = keys.astype(self.dtype)
        alike = f32(jnp.einsum("bad,bcd->bac", keys[:, ::2], keys[:, 1::2]))
        order = jnp.argsort(-alike.max(-1), -1)
        moved, kept = order[:, : self.merged], jnp.sort(order[:, self.merged :])
        to = jnp.take_along_axis(alike.argmax(-1), moved, 1)
        rows = jnp.arange(len(x))[:, None]

        def sums(x: Any) -> Any:
            a, b = x[:, ::2], x[:, 1::2]
            return jnp.concatenate(
                [a[rows, kept], b.at[rows, to].add(a[rows, moved])], 1
            )

        first, x = x[:, : self.prefix], x[:, self.prefix :]
        ones, sizes = sizes[:, : self.prefix], sizes[:, self.prefix :]
        total, sizes = sums(f32(x) * sizes[..., None]), sums(sizes)
        x = (total / sizes[..., None]).astype(self.dtype)
        return jnp.concatenate([first, x], 1), jnp.concatenate([ones, sizes], 1)


class Merging(nn.Module):
    dtype: Any
    width: int
    heads: int
    layers: int
    merged: int
    classes: int
    registers: int = 4

    @nn.compact
    def __call__(self, images: Any, keep: bool = False) -> Any:
        dtype, width, size = self.dtype, self.width, len(images)
        x = nn.Conv(width, (8, 8), (8, 8), dtype=dtype)(images)
        x = x.reshape(size, -1, width)
        normal = nn.initializers.normal(0.02)
        x = x + self.param("places", normal, x.shape[1:]).astype(dtype)
        prefix = 1 + self.registers
        first = self.param("first", normal, (prefix, width)).astype(dtype)
        first = jnp.broadcast_to(first, (size, prefix, width))
        x = jnp.concatenate([first, x], 1)
        sizes = jnp.ones(x.shape[:2])
        for i in range(self.layers):
            rate = 0.2 * i / max(self.layers - 1, 1)
            merged = self.merged if i < self.layers - 1 else 0
            block = MergingBlock(dtype, self.heads, prefix, merged, rate)
            x, sizes = block(x, sizes, keep)
        x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
        mean = (f32(x) * sizes[..., None])[:, prefix:].sum(1)
        mean = mean / sizes[:, prefix:].sum(1, keepdims=True)
        x = jnp.concatenate([x[:, 0], mean.astype(dtype)], -1)
        return f32(nn.Dense(self.classes, dtype=dtype)(x))


def merging(
    dtype: Any,
    size: int = 32,
    side: int = 128,
    width: int = 384,
    heads: int = 6,
    layers: int = 3,
    merged: int = 24,
    classes: int = 1000,
) -> Workload:
    """ToMe: a vision transformer with registers, schedule-free; mixed pictures."""
    model = Merging(dtype, width, heads, layers, merged, classes)

    def init(key: Any) -> Any:
        return model.init(key, jnp.zeros((1, side, side, 3)), True)["params"], ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, labels, key = batch
        a, b = jax.random.split(key)
        share = jax.random.beta(a, 0.8, 0.8)
        images = share * images + (1 - share) * images[::-1]
        labels = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
        labels = share * labels + (1 - share) * labels[::-1]
        logits = model.apply({"params": params}, images, rngs={"dropout": b})
        return optax.softmax_cross_entropy(logits, labels).mean(), state

    def batch(key: Any) -> Any:
        images = jax.random.normal(key, (size, side, side, 3))
        return images, jax.random.randint(key, (size,), 0, classes), key

    free = optax.contrib.schedule_free_adamw(1e-3, 1000, weight_decay=0.05)
    tx = optax.chain(optax.clip_by_global_norm(1.0), free)
    return Workload(init, loss, batch, tx)


# ---- depths from a moving camera, NNX


def ends_repeated(x: Any) -> Any:
    return jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")


class Residual(nnx.Module):
    def __init__(self, a: int, b: int, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, b, momentum=0.9, dtype=dtype, rngs=rngs)
        self.one, self.two = conv(a, b, (3, 3), 2), conv(b, b, (3, 3))
        self.short = conv(a, b, (1, 1), 2)
        self.norms = nnx.List([norm() for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.norms[0](self.one(x)))
        h = self.norms[1](self.two(h))
        return nnx.relu(h + self.norms[2](self.short(x)))


class Encoder(nnx.Module):
    def __init__(
        self, ins: int, width: int, depth: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.first = nnx.Conv(
            ins, width, (7, 7), 2, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm = nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)
        self.stages = nnx.List(
            [Residual(width << i, width << i + 1, dtype, rngs) for i in range(depth)]
        )

    def __call__(self, x: Any) -> list[Any]:
        found = [nnx.relu(self.norm(self.first(x)))]
        for stage in self.stages:
            found.append(stage(found[-1]))
        return found


class DepthDecoder(nnx.Module):
    """Up by repeated pixels, beside what the encoder has at that size."""

    def __init__(self, width: int, depth: int, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = functools.partial(
            nnx.Conv, kernel_size=(3, 3), padding="VALID", dtype=dtype, rngs=rngs
        )
        pairs = [(width << i, width << max(i - 1, 0)) for i in range(depth, -1, -1)]
        self.before = nnx.List([conv(a, b) for a, b in pairs])
        self.after = nnx.List(
            [conv(2 * b if i < depth else b, b) for i, (_, b) in enumerate(pairs)]
        )
        self.heads = nnx.List([conv(b, 1) for _, b in pairs[-3:]])

    def __call__(self, found: list[Any]) -> list[Any]:
        """Inverse depths at three sizes, f32[size, rows, columns] each."""
        kept = list(found)
        x, outs = kept.pop(), []
        for i, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            x = nnx.elu(before(ends_repeated(x)))
            x = x.repeat(2, 1).repeat(2, 2)
            if kept:
                x = jnp.concatenate([x, kept.pop()], -1)
            x = nnx.elu(after(ends_repeated(x)))
            j = i - (len(self.before) - len(self.heads))
            if j >= 0:
                y = f32(self.heads[j](ends_repeated(x)))
                outs.append(nnx.sigmoid(y[..., 0]))
        return outs


class Mover(nnx.Module):
    """How the camera moved between two pictures."""

    def __init__(self, width: int, depth: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(6, width, depth, dtype, rngs)
        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        self.inner = conv(width << depth, 256, (3, 3))
        self.last = conv(256, 6, (1, 1))

    def __call__(self, a: Any, b: Any) -> Any:
        x = self.encoder(jnp.concatenate([a, b], -1))[-1]
        x = f32(self.last(nnx.relu(self.inner(x))))
        return 0.01 * x.mean((1, 2))


class Camera(nnx.Module):
    def __init__(self, width: int, depth: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(3, width, depth, dtype, rngs)
        self.decoder = DepthDecoder(width, depth, dtype, rngs)
        self.mover = Mover(width, depth, dtype, rngs)

    def __call__(self, images: Any) -> tuple[Any, Any]:
        """Of [before, now, after]."""
        outs = self.decoder(self.encoder(images[1]))
        moves = [self.mover(images[1], images[i]) for i in (0, 2)]
        return outs, jnp.stack(moves)


def turned(move: Any) -> tuple[Any, Any]:
    """Matrices of rotations, by Rodrigues, and shifts."""
    axis, shift = move[:, :3], move[:, 3:]
    angle = jnp.sqrt((axis**2).sum(-1) + 1e-12)[:, None, None]
    x, y, z = (axis / angle[:, 0]).T
    zero = jnp.zeros_like(x)
    k = jnp.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(-1, 3, 3)
    square = jnp.einsum("bij,bjk->bik", k, k, precision="highest")
    return jnp.eye(3) + jnp.sin(angle) * k + (1 - jnp.cos(angle)) * square, shift


def sampled(images: Any, x: Any, y: Any) -> Any:
    """Pictures at places between their pixels, by their four neighbours."""
    size, rows, columns, _ = images.shape
    x, y = jnp.clip(x, 0, columns - 1.001), jnp.clip(y, 0, rows - 1.001)
    left, top = jnp.floor(x), jnp.floor(y)
    u, v = (x - left)[..., None], (y - top)[..., None]
    i, j = top.astype(int), left.astype(int)
    flat = images.reshape(size, rows * columns, -1)

    def at(i: Any, j: Any) -> Any:
        where = (i * columns + j).reshape(size, -1, 1)
        return jnp.take_along_axis(flat, where, 1).reshape(images.shape)

    above = at(i, j) * (1 - u) + at(i, j + 1) * u
    below = at(i + 1, j) * (1 - u) + at(i + 1, j + 1) * u
    return above * (1 - v) + below * v


def moving_camera(
    dtype: Any,
    size: int = 4,
    rows: int = 128,
    columns: int = 256,
    width: int = 32,
    depth: int = 3,
) -> Workload:
    """Monodepth2: a picture is painted from those before and after it."""
    focal = np.array([0.58 * columns, 1.92 * rows], np.float32)
    middle = np.array([columns / 2, rows / 2], np.float32)

    def make(key: Any) -> Camera:
        return Camera(width, depth, dtype, nnx.Rngs(key))

    shapes = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, _, _ = nnx.split(shapes, nnx.Param, ...)

    def init(key: Any) -> Any:
        _, params, state = nnx.split(make(key), nnx.Param, ...)
        return params, state

    def wrong(a: Any, b: Any) -> Any:
        """Of each pixel: structure and absolute values."""

        def mean(x: Any) -> Any:
            return nn.avg_pool(ends_repeated(x), (3, 3))

        m, n = mean(a), mean(b)
        v, w, both = mean(a * a) - m**2, mean(b * b) - n**2, mean(a * b) - m * n
        above = (2 * m * n + 1e-4) * (2 * both + 9e-4)
        like = above / ((m**2 + n**2 + 1e-4) * (v + w + 9e-4))
        like = jnp.clip((1 - like) / 2, 0, 1).mean(-1)
        return 0.85 * like + 0.15 * jnp.abs(a - b).mean(-1)

    def painted(image: Any, inverse: Any, move: Any) -> Any:
        turn, shift = turned(move)
        y, x = jnp.meshgrid(
            jnp.arange(rows, dtype=jnp.float32),
            jnp.arange(columns, dtype=jnp.float32),
            indexing="ij",
        )
        away = 1 / (0.01 + 9.99 * inverse)
        rays = [
            (x - middle[0]) / focal[0],
            (y - middle[1]) / focal[1],
            jnp.ones_like(x),
        ]
        points = [away * r for r in rays]
        seen = [
            sum(turn[:, i, j, None, None] * points[j] for j in range(3))
            + shift[:, i, None, None]
            for i in range(3)
        ]
        near = jnp.maximum(seen[2], 1e-3)
        x, y = seen[0] / near, seen[1] / near
        return sampled(image, x * focal[0] + middle[0], y * focal[1] + middle[1])

    def loss(params: Any, state: Any, images: Any) -> Any:
        model = nnx.merge(graph, params, state, copy=True)
        outs, moves = model(images)
        state = nnx.split(model, nnx.Param, ...)[2]
        now, others = images[1], (images[0], images[2])
        still = jnp.stack([wrong(other, now) for other in others]).min(0)
        total = 0.0
        for scale, out in enumerate(outs[::-1]):
            big = jax.image.resize(out, (size, rows, columns), "bilinear")
            each = [
                wrong(painted(other, big, move), now)
                for other, move in zip(others, moves, strict=True)
            ]
            total += jnp.minimum(jnp.stack(each).min(0), still).mean()
            out = out / (out.mean((1, 2), keepdims=True) + 1e-7)
            small = jax.image.resize(now, (*out.shape, 3), "bilinear")
            for axis in (1, 2):
                edge = jnp.abs(jnp.diff(small, axis=axis)).mean(-1)
                slope = jnp.abs(jnp.diff(out, axis=axis))
                total += 1e-3 / 2**scale * (slope * jnp.exp(-edge)).mean()
        return total / len(outs), state

    def batch(key: Any) -> Any:
        return jax.random.uniform(key, (3, size, rows, columns, 3))

    rates = optax.piecewise_constant_schedule(1e-4, {150000: 0.1})
    return Workload(init, loss, batch, optax.adam(rates))


# ---- tracks along a genome, Haiku


def place_features(length: int, count: int) -> Any:
    """Of relative places: exponentials and masks, with and without a sign."""
    places = np.arange(-length + 1, length, dtype=np.float32)
    half = np.exp(np.linspace(np.log(3.0), np.log(length), count))
    decays = np.exp2(-np.abs(places)[:, None] / half)
    widths = np.exp2(np.arange(1, count + 1)) - 1
    masks = (widths > np.abs(places)[:, None]).astype(np.float32)
    both = np.concatenate([decays, masks], -1)
    signed = np.sign(places)[:, None] * both
    return np.concatenate([both, signed], -1).astype(np.float32)


def genome(
    dtype: Any,
    size: int = 4,
    length: int = 4096,
    width: int = 384,
    levels: int = 4,
    heads: int = 8,
    layers: int = 1,
    tracks: int = 1024,
) -> Workload:
    """Enformer: a tower of convolutions, pools by attention, Poisson likelihoods."""

    def norm(x: Any) -> Any:  # statistics in float32
        return hk.BatchNorm(True, True, 0.9)(f32(x), True).astype(dtype)

    def act(x: Any) -> Any:
        return jax.nn.sigmoid(1.702 * x) * x

    def layer_norm(x: Any) -> Any:
        return hk.LayerNorm(-1, True, True)(f32(x)).astype(dtype)

    def pooled(x: Any) -> Any:
        n = x.shape[-1]
        x = x.reshape(size_of(x), -1, 2, n)
        start = hk.initializers.Identity(2.0)
        logits = hk.Linear(n, with_bias=False, w_init=start)(x)
        weights = jax.nn.softmax(f32(logits), -2).astype(dtype)
        return (x * weights).sum(-2)

    def size_of(x: Any) -> int:
        return x.shape[0]

    def attention(x: Any, features: Any) -> Any:
        size, length, n = x.shape
        key = 64

        def split(x: Any) -> Any:
            return x.reshape(*x.shape[:-1], heads, -1)

        linear = functools.partial(hk.Linear, with_bias=False)
        q, k = (split(linear(heads * key)(x)) for _ in range(2))
        v = split(linear(n)(x))
        r = split(linear(heads * key)(jnp.asarray(features, dtype)))
        normal = hk.initializers.RandomNormal(0.02)
        q = q * key**-0.5
        a = hk.get_parameter("content_bias", (heads, key), init=normal).astype(dtype)
        b = hk.get_parameter("place_bias", (heads, key), init=normal).astype(dtype)
        content = jnp.einsum("bqhd,bkhd->bhqk", q + a, k)
        place = jnp.einsum("bqhd,khd->bhqk", q + b, r)
        place = jnp.pad(place, ((0, 0), (0, 0), (0, 0), (1, 0)))
        place = place.reshape(size, heads, 2 * length, length)[:, :, 1:]
        place = place.reshape(size, heads, length, 2 * length - 1)[..., :length]
        weights = jax.nn.softmax(f32(content + place))
        weights = hk.dropout(hk.next_rng_key(), 0.05, weights).astype(dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return hk.Linear(n, w_init=jnp.zeros)(h)

    def network(x: Any) -> Any:
        x = hk.Conv1D(width // 2, 15)(x.astype(dtype))
        x = x + hk.Conv1D(width // 2, 1)(act(norm(x)))
        x = pooled(x)
        for i in range(1, levels):
            n = width // 2 + (width // 2 * i // (levels - 1)) // 32 * 32
            x = hk.Conv1D(n, 5)(act(norm(x)))
            x = x + hk.Conv1D(n, 1)(act(norm(x)))
            x = pooled(x)
        features = place_features(x.shape[1], 16)
        for _ in range(layers):
            h = attention(layer_norm(x), features)
            x = x + hk.dropout(hk.next_rng_key(), 0.4, h)
            h = jax.nn.relu(hk.Linear(2 * width)(layer_norm(x)))
            h = hk.dropout(hk.next_rng_key(), 0.4, h)
            x = x + hk.dropout(hk.next_rng_key(), 0.4, hk.Linear(width)(h))
        cut = x.shape[1] // 8
        x = x[:, cut:-cut]
        x = act(hk.Linear(2 * width)(act(norm(x))))
        return jax.nn.softplus(f32(hk.Linear(tracks)(x)))

    net = hk.transform_with_state(network)

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, length, 4)))

    def loss(params: Any, state: Any, batch: Any) -> Any:
        letters, counts, key = batch
        x = jax.nn.one_hot(letters, 4)
        half = cast(params, dtype, lambda path: "norm" in path)
        found, state = net.apply(half, state, key, x)
        return (found - counts * jnp.log(found + 1e-6)).mean(), state

    def batch(key: Any) -> Any:
        letters = jax.random.randint(key, (size, length), 0, 4)
        out = length >> levels
        shape = size, out - 2 * (out // 8), tracks
        return letters, jax.random.poisson(key, 1.0, shape).astype(jnp.float32), key

    rates = optax.linear_schedule(0.0, 5e-4, 5000)
    tx = optax.chain(optax.clip_by_global_norm(0.2), optax.adam(rates))
    return Workload(init, loss, batch, tx)


# ---- as many steps as it takes, plain JAX


class Halting(NamedTuple):
    """A universal transformer; each place halts by itself; batches in four parts."""

    dtype: Any
    parts: int = 4
    size: int = 8
    length: int = 256
    width: int = 384
    heads: int = 6
    steps: int = 6
    vocabulary: int = 4096

    @property
    def optimizer(self) -> Any:
        rates = optax.warmup_exponential_decay_schedule(0.0, 3e-4, 1000, 10000, 0.5)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates))

    def loss(self, params: Any, batch: Any) -> Any:
        dtype, width, heads = self.dtype, self.width, self.heads
        ids, labels, there = batch
        p = cast(params, dtype, lambda path: "norm" in path)

        def norm(p: Any, x: Any) -> Any:
            y = f32(x)
            y = y - y.mean(-1, keepdims=True)
            y = y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)
            return (y * p["scale"] + p["shift"]).astype(dtype)

        def signal(places: Any) -> Any:
            angles = places[..., None] * 1e4 ** -(jnp.arange(width // 2) * 2 / width)
            return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

        places = signal(jnp.arange(self.length, dtype=jnp.float32))
        mask = there[:, None, None]

        def one(carry: Any, time: Any) -> Any:
            x, halted, rest, count, total = carry
            x = x + (places + signal(time)).astype(dtype)
            chance = jax.nn.sigmoid(f32(x @ p["halt"])[..., 0] + p["norm_halt"])
            running = (halted < 1).astype(jnp.float32)
            after = halted + chance * running
            ends = (after > 0.99).astype(jnp.float32) * running
            goes = (after <= 0.99).astype(jnp.float32) * running
            halted = halted + chance * goes
            rest = rest + ends * (1 - halted)
            halted = halted + ends * rest
            count = count + goes + ends
            weight = (chance * goes + ends * rest)[..., None]
            q, k, v = jnp.split(norm(p["norms"][0], x) @ p["qkv"], 3, -1)
            q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
            scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
            h = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(dtype)
            h = jnp.einsum("bhqk,bkhd->bqhd", h, v).reshape(x.shape)
            x = x + h @ p["out"]
            h = norm(p["norms"][1], x)
            x = x + jax.nn.relu(h @ p["up"]) @ p["down"]
            total = f32(x) * weight + total * (1 - weight)
            return (x, halted, rest, count, total), None

        x = p["words"][ids]
        zeros = jnp.zeros(ids.shape)
        start = x, zeros, zeros, zeros, jnp.zeros(x.shape)
        times = jnp.arange(self.steps, dtype=jnp.float32)
        (_, _, rest, count, total), _ = jax.lax.scan(one, start, times)
        x = norm(p["norms"][2], total)
        each = cross_entropy(f32(x @ p["words"].T), labels)
        many = jnp.maximum(there.sum(), 1)
        value = jnp.where(there, each, 0).sum() / many
        ponder = jnp.where(there, rest + count, 0).sum() / many
        return value + 0.01 * ponder, {"ponder": ponder, "entropy": value}

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        def one(total: Any, part: Any) -> Any:
            found = jax.value_and_grad(self.loss, has_aux=True)(params, part)
            (value, metrics), grads = found
            return jax.tree.map(jnp.add, total, grads), metrics | {"loss": value}

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, metrics = jax.lax.scan(one, zeros, batch)
        grads = jax.tree.map(lambda x: x / self.parts, grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["norms"] = jax.tree.map(jnp.linalg.norm, grads)
        return params, opt_state, metrics

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        keys = jax.random.split(key, 9)
        width = self.width

        def drawn(key: Any, *shape: int) -> Any:
            return jax.random.normal(key, shape) * shape[0] ** -0.5

        ones, zeros = jnp.ones((width,)), jnp.zeros((width,))
        params = {
            "words": 0.02 * jax.random.normal(keys[0], (self.vocabulary, width)),
            "qkv": drawn(keys[1], width, 3 * width),
            "out": drawn(keys[2], width, width),
            "up": drawn(keys[3], width, 4 * width),
            "down": drawn(keys[4], 4 * width, width),
            "halt": drawn(keys[5], width, 1),
            "norm_halt": jnp.ones(()),
            "norms": [{"scale": ones, "shift": zeros} for _ in range(3)],
        }
        shape = self.parts, self.size, self.length
        many = jax.random.randint(
            keys[6], (*shape[:2], 1), self.length // 2, self.length + 1
        )
        batch = (
            jax.random.randint(keys[7], shape, 0, self.vocabulary),
            jax.random.randint(keys[8], shape, 0, self.vocabulary),
            jnp.arange(self.length) < many,
        )
        return params, self.optimizer.init(params), batch


# ---- a memory that is written and read, Haiku


def memory(
    dtype: Any,
    size: int = 32,
    time: int = 64,
    bits: int = 64,
    width: int = 256,
    slots: int = 128,
    inner: int = 64,
    heads: int = 4,
) -> Workload:
    """A neural Turing machine: what is copied is looked up by content and by place."""

    def address(raw: Any, store: Any, before: Any) -> Any:
        """Weights of slots, f32[size, heads, slots]; all in float32."""
        key, rest = raw[..., :inner], raw[..., inner:]
        sharp = jax.nn.softplus(rest[..., :1])
        gate = jax.nn.sigmoid(rest[..., 1:2])
        shift = jax.nn.softmax(rest[..., 2:5])
        power = 1 + jax.nn.softplus(rest[..., 5:6])
        key, store = jnp.tanh(key), f32(store)
        dots = jnp.einsum("bhd,bnd->bhn", key.astype(dtype), store.astype(dtype))
        long = jnp.sqrt((key**2).sum(-1) + 1e-6)[..., None]
        tall = jnp.sqrt((store**2).sum(-1) + 1e-6)[:, None]
        found = jax.nn.softmax(sharp * f32(dots) / (long * tall))
        found = gate * found + (1 - gate) * before
        found = sum(
            shift[..., i : i + 1] * jnp.roll(found, i - 1, -1) for i in range(3)
        )
        found = (found + 1e-6) ** power
        return found / found.sum(-1, keepdims=True)

    def network(x: Any) -> Any:
        count = heads + 1
        of_gates = hk.Linear(4 * width, name="gates")
        of_heads = hk.Linear(count * (inner + 6), name="heads")
        of_change = hk.Linear(2 * inner, name="change")

        def one(carry: Any, x: Any) -> Any:
            h, c, store, where, reads = carry
            seen = jnp.concatenate([x, reads.reshape(size_of(x), -1), h], -1)
            gates = f32(of_gates(seen.astype(dtype)))
            i, g, f, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            raw = of_heads(h.astype(dtype))
            raw = f32(raw).reshape(size_of(x), count, -1)
            where = address(raw, store, where)
            change = f32(of_change(h.astype(dtype)))
            erase, add = jnp.split(change, 2, -1)
            w = where[:, 0, :, None]
            erase, add = jax.nn.sigmoid(erase)[:, None], jnp.tanh(add)[:, None]
            store = store * (1 - w * erase) + w * add
            half = where[:, 1:].astype(dtype), store.astype(dtype)
            reads = f32(jnp.einsum("bhn,bnd->bhd", *half))
            out = jnp.concatenate([h, reads.reshape(size_of(x), -1)], -1)
            return (h, c, store, where, reads), out.astype(dtype)

        n = x.shape[1]
        normal = hk.initializers.RandomNormal(0.1)
        store = hk.get_parameter("norm_store", (slots, inner), init=normal)
        zeros = jnp.zeros((n, width))
        start = (
            zeros,
            zeros,
            jnp.broadcast_to(store, (n, slots, inner)),
            jnp.zeros((n, count, slots)).at[..., 0].set(1.0),
            jnp.zeros((n, heads, inner)),
        )
        _, x = hk.scan(one, start, x)
        return f32(hk.Linear(bits)(x))

    def size_of(x: Any) -> int:
        return x.shape[0]

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((2, 1, bits + 2))), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, wanted, mask = batch
        half = cast(params, dtype, lambda path: "norm_store" in path)
        each = optax.sigmoid_binary_cross_entropy(net.apply(half, x), wanted).sum(-1)
        return (each * mask).sum() / mask.sum(), state

    def batch(key: Any) -> Any:
        half = time // 2
        shown = jax.random.bernoulli(key, 0.5, (half, size, bits)).astype(jnp.float32)
        flags = jnp.zeros((time, size, 2)).at[0, :, 0].set(1.0).at[half, :, 1].set(1.0)
        nothing = jnp.zeros_like(shown)
        x = jnp.concatenate([jnp.concatenate([shown, nothing]), flags], -1)
        mask = jnp.broadcast_to((jnp.arange(time) >= half)[:, None], (time, size))
        return x, jnp.concatenate([nothing, shown]), mask.astype(jnp.float32)

    tx = optax.chain(optax.clip(10.0), optax.rmsprop(1e-4, 0.95, momentum=0.9))
    return Workload(init, loss, batch, tx)


# ---- adapters of integers, plain JAX


def adapters(
    dtype: Any,
    size: int = 4,
    length: int = 512,
    width: int = 768,
    heads: int = 12,
    few: int = 4,
    layers: int = 4,
    vocabulary: int = 16384,
    rank: int = 16,
    block: int = 64,
) -> Workload:
    """QLoRA: weights of eight bits that stay, in blocks; rates differ by adapter."""
    head = width // heads
    shapes = {
        "q": (width, width),
        "kv": (width, 2 * few * head),
        "out": (width, width),
        "gate": (width, 3 * width),
        "up": (width, 3 * width),
        "down": (3 * width, width),
    }

    def frozen(key: Any, *shape: int) -> Any:
        *more, ins, outs = shape
        w = 0.02 * jax.random.normal(key, (*more, ins // block, block, outs))
        scale = jnp.abs(w).max(-2, keepdims=True) / 127
        return {"ints": jnp.round(w / scale).astype(jnp.int8), "scale": scale}

    def thawed(p: Any) -> Any:
        w = p["ints"].astype(jnp.float32) * p["scale"]
        return w.reshape(-1, w.shape[-1]).astype(dtype)

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 3 * len(shapes) + 2))
        params = {
            name: {
                "a": jax.random.normal(next(keys), (layers, a, rank)) * a**-0.5,
                "b": jnp.zeros((layers, rank, b)),
            }
            for name, (a, b) in shapes.items()
        }
        state = {
            "words": 0.02 * jax.random.normal(next(keys), (vocabulary, width)),
            "last": frozen(next(keys), width, vocabulary),
            "norms": jnp.ones((layers, 2, width)),
            "norm": jnp.ones((width,)),
            "layers": {n: frozen(next(keys), layers, *s) for n, s in shapes.items()},
        }
        return params, state

    def norm(scale: Any, x: Any) -> Any:
        y = f32(x)
        y = y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6)
        return (y * scale).astype(dtype)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, asked, key = batch
        places = jnp.arange(length)
        angles = places[:, None] * 5e5 ** -(jnp.arange(head // 2) * 2 / head)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        causal = places[:, None] >= places

        def rotate(x: Any) -> Any:
            a, b = jnp.split(f32(x), 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        def one(x: Any, layer: Any) -> Any:
            p, fixed, norms, key = layer
            p = cast(p, dtype)
            keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))

            def on(name: str, x: Any) -> Any:
                kept = jax.random.bernoulli(keys[name], 0.95, x.shape)
                low = jnp.where(kept, x / 0.95, 0).astype(dtype) @ p[name]["a"]
                return x @ thawed(fixed[name]) + 2.0 * (low @ p[name]["b"])

            h = norm(norms[0], x)
            q = rotate(on("q", h).reshape(size, length, heads, head)).astype(dtype)
            k, v = jnp.split(on("kv", h).reshape(size, length, few, -1), 2, -1)
            k = rotate(k).astype(dtype)
            q = q.reshape(size, length, few, heads // few, head)
            scores = f32(jnp.einsum("bqfgd,bkfd->bfgqk", q, k)) * head**-0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(dtype)
            h = jnp.einsum("bfgqk,bkfd->bqfgd", weights, v).reshape(x.shape)
            x = x + on("out", h)
            h = norm(norms[1], x)
            x = x + on("down", jax.nn.silu(on("gate", h)) * on("up", h))
            return x, None

        x = state["words"].astype(dtype)[ids[:, :-1]]
        keys = jax.random.split(key, layers)
        scanned = params, state["layers"], state["norms"], keys
        x, _ = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), x, scanned)
        logits = f32(norm(state["norm"], x) @ thawed(state["last"]))
        counted = (places >= asked[:, None]).astype(jnp.float32)
        each = cross_entropy(logits, ids[:, 1:]) * counted
        return each.sum() / counted.sum(), state

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (size, length + 1), 0, vocabulary)
        return ids, jax.random.randint(key, (size,), 0, length // 2), key

    def kinds(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)

    each = {"a": optax.adamw(1e-4), "b": optax.adamw(1.6e-3)}
    tx = optax.chain(optax.clip_by_global_norm(0.3), optax.multi_transform(each, kinds))
    return Workload(init, loss, batch, tx)


# ---- complex states, Equinox


class ComplexStates(eqx.Module):
    """A diagonal recurrence of complex numbers, forwards and backwards."""

    poles: Any
    enter: Any
    leave: Any
    through: Any
    steps: Any

    def __init__(self, width: int, states: int, key: Any) -> None:
        keys = jax.random.split(key, 4)
        real = jnp.log(0.5 * jnp.ones(states))
        self.poles = jnp.stack([real, np.pi * jnp.arange(states)])
        self.enter = jax.random.normal(keys[0], (2, width, states)) * width**-0.5
        self.leave = jax.random.normal(keys[1], (4, states, width)) * states**-0.5
        self.through = jax.random.normal(keys[2], (width,))
        low, high = np.log(1e-3), np.log(1e-1)
        self.steps = jax.random.uniform(keys[3], (states,), minval=low, maxval=high)

    def __call__(self, u: Any) -> Any:
        """Of one sequence, [length, width]."""
        dtype = u.dtype
        poles = jax.lax.complex(-jnp.exp(self.poles[0]), self.poles[1])
        decay = jnp.exp(poles * jnp.exp(self.steps))
        real, imag = (f32(u @ w.astype(dtype)) for w in self.enter)
        x = (decay - 1) / poles * jax.lax.complex(real, imag)
        decays = jnp.broadcast_to(decay, x.shape)

        def join(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, there = jax.lax.associative_scan(join, (decays, x))
        _, back = jax.lax.associative_scan(join, (decays, x), reverse=True)
        parts = [there.real, -there.imag, back.real, -back.imag]
        parts = jnp.concatenate([y.astype(dtype) for y in parts], -1)
        y = parts @ self.leave.astype(dtype).reshape(-1, u.shape[-1])
        return y + self.through.astype(dtype) * u


class ComplexLayer(eqx.Module):
    norm: eqx.nn.LayerNorm
    states: ComplexStates
    gate: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, width: int, states: int, key: Any) -> None:
        a, b = jax.random.split(key)
        self.norm, self.drop = eqx.nn.LayerNorm(width), eqx.nn.Dropout(0.1)
        self.states = ComplexStates(width, states, a)
        self.gate = eqx.nn.Linear(width, width, key=b)

    def __call__(self, x: Any, key: Any) -> Any:
        a, b = jax.random.split(key)
        h = jax.vmap(self.norm)(f32(x)).astype(x.dtype)
        h = self.drop(jax.nn.gelu(self.states(h)), key=a)
        h = h * jax.nn.sigmoid(jax.vmap(self.gate)(h))
        return x + self.drop(h, key=b)


class ComplexModel(eqx.Module):
    words: eqx.nn.Embedding
    layers: list[ComplexLayer]
    last: eqx.nn.Linear

    def __init__(
        self, width: int, states: int, depth: int, classes: int, key: Any
    ) -> None:
        a, b, *keys = jax.random.split(key, depth + 2)
        self.words = eqx.nn.Embedding(256, width, key=a)
        self.layers = [ComplexLayer(width, states, k) for k in keys]
        self.last = eqx.nn.Linear(width, classes, key=b)

    def __call__(self, ids: Any, key: Any) -> Any:
        x = jax.vmap(self.words)(ids)
        for layer, k in zip(
            self.layers, jax.random.split(key, len(self.layers)), strict=True
        ):
            x = layer(x, k)
        return f32(self.last(f32(x).mean(0).astype(x.dtype)))


def complex_states(
    dtype: Any,
    size: int = 16,
    length: int = 1024,
    width: int = 256,
    states: int = 128,
    depth: int = 2,
    classes: int = 10,
) -> Workload:
    """S5: classes of long sequences; what recurs learns slower, and does not decay."""

    def make(key: Any) -> ComplexModel:
        return ComplexModel(width, states, depth, classes, key)

    _, static = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)), lambda x: hasattr(x, "shape")
    )

    def init(key: Any) -> Any:
        return eqx.filter(make(key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, labels, key = batch
        keep = lambda path: ".states" in path or ".norm" in path  # noqa: E731
        model = eqx.combine(cast(params, dtype, keep), static)
        logits = jax.vmap(model)(ids, jax.random.split(key, size))
        return cross_entropy(logits, labels).mean(), state

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (size, length), 0, 256)
        return ids, jax.random.randint(key, (size,), 0, classes), key

    def kinds(params: Any) -> Any:
        def kind(path: Any, _: Any) -> str:
            names = jax.tree_util.keystr(path)
            slow = any(n in names for n in (".poles", ".steps", ".enter"))
            return "slow" if slow else "usual"

        return jax.tree_util.tree_map_with_path(kind, params)

    rates = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 1000, 100000)
    each = {"slow": optax.adam(1e-3), "usual": optax.adamw(rates, weight_decay=0.05)}
    return Workload(init, loss, batch, optax.multi_transform(each, kinds))


# ---- what a robot does next, NNX


class SeenBlock(nnx.Module):
    def __init__(self, a: int, b: int, stride: int, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(
            nnx.GroupNorm, b, num_groups=b // 16, dtype=dtype, rngs=rngs
        )
        self.one, self.two = conv(a, b, (3, 3), stride), conv(b, b, (3, 3))
        self.short = conv(a, b, (1, 1), stride)
        self.norms = nnx.List([norm() for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.norms[0](self.one(x)))
        h = self.norms[1](self.two(h))
        return nnx.relu(h + self.norms[2](self.short(x)))


class Sight(nnx.Module):
    """Where each channel of a picture is brightest."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, width, (7, 7), 2, dtype=dtype, rngs=rngs)
        self.norm = nnx.GroupNorm(width, num_groups=4, dtype=dtype, rngs=rngs)
        ends = (width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)
        self.blocks = nnx.List([SeenBlock(*e, dtype, rngs) for e in ends])
        self.spots = nnx.Conv(4 * width, 32, (1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """f32[size, 64]."""
        x = nnx.relu(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        x = f32(self.spots(x))
        size, rows, columns, count = x.shape
        weights = jax.nn.softmax(x.reshape(size, -1, count), 1)
        y, x = jnp.meshgrid(
            jnp.linspace(-1, 1, rows), jnp.linspace(-1, 1, columns), indexing="ij"
        )
        found = [(weights * z.reshape(-1, 1)).sum(1) for z in (x, y)]
        return jnp.concatenate(found, -1)


class FilmConv(nnx.Module):
    """Two convolutions along the time; scaled and shifted by what is known."""

    def __init__(self, a: int, b: int, known: int, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.GroupNorm, b, num_groups=8, dtype=dtype, rngs=rngs)
        self.one, self.two = conv(a, b, (5,)), conv(b, b, (5,))
        self.norms = nnx.List([norm(), norm()])
        self.film = nnx.Linear(known, 2 * b, dtype=dtype, rngs=rngs)
        self.short = conv(a, b, (1,))

    def __call__(self, x: Any, known: Any) -> Any:
        def mish(x: Any) -> Any:
            return x * jnp.tanh(nnx.softplus(x))

        h = mish(self.norms[0](self.one(x)))
        scale, shift = jnp.split(self.film(mish(known))[:, None], 2, -1)
        h = h * (1 + scale) + shift
        return mish(self.norms[1](self.two(h))) + self.short(x)


class Robot(nnx.Module):
    def __init__(
        self,
        actions: int,
        seen: int,
        widths: tuple[int, ...],
        sight: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        film = functools.partial(FilmConv, dtype=dtype, rngs=rngs)
        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        self.sight = Sight(sight, dtype, rngs)
        known = 128 + seen * (64 + actions)
        self.times = nnx.List([linear(128, 512), linear(512, 128)])
        pairs = list(zip((actions, *widths), widths, strict=False))
        self.down = nnx.List([film(a, b, known) for a, b in pairs])
        self.less = nnx.List([conv(b, b, (3,), 2) for b in widths[:-1]])
        self.middle = film(widths[-1], widths[-1], known)
        back = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.more = nnx.List(
            [nnx.ConvTranspose(a, b, (4,), 2, dtype=dtype, rngs=rngs) for a, b in back]
        )
        self.up = nnx.List([film(2 * b, b, known) for _, b in back])
        self.last = conv(widths[0], actions, (1,))
        self.dtype = dtype

    def __call__(self, x: Any, times: Any, images: Any, places: Any) -> Any:
        """The noise in what is done, f32[size, horizon, actions]."""
        size = len(x)
        seen = self.sight(images.reshape(-1, *images.shape[2:])).reshape(size, -1)
        angles = times[:, None] * 1e4 ** -(jnp.arange(64) / 63)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = self.times[0](time)
        time = self.times[1](time * jnp.tanh(nnx.softplus(time)))
        known = [f32(time), seen, places.reshape(size, -1)]
        known = jnp.concatenate(known, -1).astype(self.dtype)
        kept = []
        for i, film in enumerate(self.down):
            x = film(x, known)
            if i < len(self.less):
                kept.append(x)
                x = self.less[i](x)
        x = self.middle(x, known)
        for more, film in zip(self.more, self.up, strict=True):
            x = film(jnp.concatenate([more(x), kept.pop()], -1), known)
        return f32(self.last(x))


class Doing(NamedTuple):
    """Diffusion policy: what is done next, from noise, by what is seen."""

    dtype: Any
    size: int = 64
    seen: int = 2
    side: int = 84
    horizon: int = 32
    actions: int = 8
    widths: tuple[int, ...] = (128, 256, 512)
    sight: int = 64

    @property
    def optimizer(self) -> Any:
        rates = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 500, 100000)
        return optax.adamw(rates, b1=0.95, weight_decay=1e-6)

    def model(self, key: Any) -> Robot:
        return Robot(
            self.actions, self.seen, self.widths, self.sight, self.dtype, nnx.Rngs(key)
        )

    def step(self, params: Any, average: Any, opt_state: Any, batch: Any) -> Any:
        graph, _ = nnx.split(nnx.eval_shape(lambda: self.model(jax.random.key(0))))
        images, places, acted, key, count = batch
        a, b, c = jax.random.split(key, 3)
        times = jax.random.randint(a, (self.size,), 0, 100)
        noise = jax.random.normal(b, acted.shape)
        angles = np.cos((np.arange(101) / 100 + 0.008) / 1.008 * np.pi / 2) ** 2
        kept = jnp.asarray(angles[1:] / angles[0], jnp.float32)[times, None, None]
        x = jnp.sqrt(kept) * acted + jnp.sqrt(1 - kept) * noise
        # pictures are cut out at random
        edge = self.side - 76
        corner = jax.random.randint(c, (2,), 0, edge + 1) if edge > 0 else (0, 0)
        cut = (self.size, self.seen, *(min(76, self.side),) * 2, 3)
        seen = jax.lax.dynamic_slice(images, (0, 0, *corner, 0), cut)
        seen = seen.astype(jnp.float32) / 127.5 - 1

        def loss(params: Any) -> Any:
            found = nnx.merge(graph, params)(x, times.astype(jnp.float32), seen, places)
            return ((found - noise) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        decay = jnp.clip(1 - (1 + count) ** -0.75, 0.0, 0.9999)
        average = optax.incremental_update(params, average, 1 - decay)
        return params, average, opt_state, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        params = nnx.state(self.model(key))
        shape = self.size, self.seen, self.side, self.side, 3
        batch = (
            jax.random.randint(key, shape, 0, 256).astype(jnp.uint8),
            jax.random.normal(key, (self.size, self.seen, self.actions)),
            jax.random.uniform(key, (self.size, self.horizon, self.actions)),
            key,
            jnp.zeros(()),
        )
        return params, params, self.optimizer.init(params), batch
