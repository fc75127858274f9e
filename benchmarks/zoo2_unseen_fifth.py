"""Train steps of families that the other zoos lack: filters, volumes, proteins."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from models.common import Workload, cross_entropy
from zoo2_libraries import cast
from zoo2_unseen_third import f32, of_linen

# ---- Hyena, Linen


class Filters(nn.Module):
    """Implicit filters as long as the sequence: a sine network of the place."""

    width: int

    @nn.compact
    def __call__(self, length: int) -> Any:
        t = jnp.linspace(0, 1, length)[:, None]
        angles = 2 * math.pi * t * jnp.arange(1, 17)
        h = jnp.concatenate([t, jnp.cos(angles), jnp.sin(angles)], -1)
        for i in range(3):
            rate = self.param(f"rate{i}", nn.initializers.constant(4.0), (64,))
            h = jnp.sin(rate * nn.Dense(64)(h))
        h = nn.Dense(self.width, use_bias=False)(h)
        decay = jnp.linspace(math.log(100) / 1.5, math.log(100) / 0.3, self.width)
        return h * (jnp.exp(-t * decay) + 0.05)


class HyenaBlock(nn.Module):
    """Gates and long convolutions by the Fourier transform, which is float32."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        length, width = x.shape[1:]

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, dtype=self.dtype)

        def convolve(u: Any, h: Any, skip: Any) -> Any:
            u = f32(u)
            a = jnp.fft.rfft(u, 2 * length, axis=1)
            b = jnp.fft.rfft(h, 2 * length, axis=0)
            y = jnp.fft.irfft(a * b, 2 * length, axis=1)[:, :length]
            return (y + u * skip).astype(self.dtype)

        h = dense(3 * width)(nn.LayerNorm(dtype=self.dtype)(x))
        h = nn.Conv(
            3 * width,
            (3,),
            padding="CAUSAL",
            feature_group_count=3 * width,
            dtype=self.dtype,
        )(h)
        v, first, second = jnp.split(h, 3, -1)
        filters = jnp.split(Filters(2 * width)(length), 2, -1)
        skips = self.param("skips", nn.initializers.normal(1.0), (2, width))
        for gate, h, skip in zip((first, second), filters, skips, strict=True):
            v = gate * convolve(v, h, skip)
        x = x + dense(width)(v)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + dense(width)(nn.gelu(dense(4 * width)(h)))


class HyenaModel(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(4096, 384, dtype=self.dtype)
        x = embed(ids)
        for _ in range(3):
            x = HyenaBlock(self.dtype)(x)
        return f32(embed.attend(nn.LayerNorm(dtype=self.dtype)(x)))


def hyena(dtype: Any, size: int = 4, length: int = 2048) -> Workload:
    """A language model by long convolutions."""

    def loss(apply: Any, ids: Any) -> Any:
        return cross_entropy(apply(ids[:, :-1]), ids[:, 1:]).mean()

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, 4096)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.98))
    example = (jnp.zeros((1, 64), jnp.int32),)
    return of_linen(HyenaModel(dtype), example, loss, batch, tx)


# ---- segmentation of volumes, Haiku


def volumes(dtype: Any, size: int = 2, side: int = 64) -> Workload:
    """nnU-Net: volumetric convolutions, instance norm, losses at three scales."""

    def network(x: Any) -> Any:
        def block(x: Any, width: int, stride: int = 1) -> Any:
            for s in (stride, 1):
                x = hk.Conv3D(width, 3, s)(x)
                x = hk.InstanceNorm(True, True)(f32(x))  # statistics in float32
                x = jax.nn.leaky_relu(x, 0.01).astype(dtype)
            return x

        x, skips = block(x, 32), []
        for width in (64, 128, 256):
            skips.append(x)
            x = block(x, width, 2)
        outs = []
        for width in (128, 64, 32):
            x = hk.Conv3DTranspose(width, 2, 2)(x)
            x = block(jnp.concatenate([x, skips.pop()], -1), width)
            outs.append(f32(hk.Conv3D(4, 1)(x)))
        return outs[::-1]

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, 16, 16, 16, 1))), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, labels = batch
        half = cast(params, dtype, lambda path: "instance_norm" in path)
        total = 0.0
        for i, logits in enumerate(net.apply(half, x.astype(dtype))):
            seen = labels[:, :: 2**i, :: 2**i, :: 2**i]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, seen)
            found, wanted = jax.nn.softmax(logits), jax.nn.one_hot(seen, 4)
            both = (found * wanted).sum((1, 2, 3))
            apart = found.sum((1, 2, 3)) + wanted.sum((1, 2, 3))
            dice = (2 * both + 1e-5) / (apart + 1e-5)
            total += (losses.mean() + 1 - dice[:, 1:].mean()) / 2**i
        return total, state

    def batch(key: Any) -> Any:
        shape = (size, side, side, side)
        labels = jax.random.randint(key, shape, 0, 4)
        return jax.random.normal(key, (*shape, 1)), labels

    tx = optax.chain(
        optax.clip_by_global_norm(12.0),
        optax.add_decayed_weights(3e-5),
        optax.sgd(
            optax.polynomial_schedule(1e-2, 0.0, 0.9, 250000), 0.99, nesterov=True
        ),
    )
    return Workload(init, loss, batch, tx)


# ---- the gated delta rule, Linen


class DeltaRule(nn.Module):
    """Gated DeltaNet in chunks: a triangular system within, a scan between."""

    dtype: Any
    heads: int = 8
    chunk: int = 64

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size, length, width = x.shape
        heads, chunk, dtype = self.heads, self.chunk, self.dtype

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, use_bias=False, dtype=dtype)

        def mixed(x: Any) -> Any:
            x = nn.Conv(
                width,
                (4,),
                padding="CAUSAL",
                feature_group_count=width,
                use_bias=False,
                dtype=dtype,
            )(dense(width)(x))
            return nn.silu(x)

        def unit(x: Any) -> Any:
            x = f32(x)
            return (x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)).astype(
                dtype
            )

        def chunks(x: Any) -> Any:  # chunks, size, heads, chunk, ...
            x = x.reshape(size, length // chunk, chunk, heads, *x.shape[3:])
            return jnp.moveaxis(x, (1, 3), (0, 2))

        q, k, v = (
            mixed(x).reshape(size, length, heads, width // heads) for _ in range(3)
        )
        q, k = unit(q) * (width // heads) ** -0.5, unit(k)
        rate = self.param("rate", nn.initializers.zeros, (heads,))
        shift = self.param("shift", nn.initializers.constant(-4.0), (heads,))
        decay = -jnp.exp(rate) * nn.softplus(f32(dense(heads)(x)) + shift)
        beta = nn.sigmoid(f32(dense(heads)(x)))
        q, k, v, decay, beta = (chunks(a) for a in (q, k, v, decay, beta))

        total = jnp.cumsum(decay, -1)  # float32
        lower = jnp.tril(jnp.ones((chunk, chunk), bool))
        apart = total[..., :, None] - total[..., None, :]
        fade = jnp.exp(jnp.where(lower, apart, -jnp.inf))
        alike = f32(jnp.einsum("nbhqd,nbhkd->nbhqk", k, k))
        strict = jnp.tril(alike * fade * beta[..., None], -1)
        eye = jnp.eye(chunk)
        inverse = jax.scipy.linalg.solve_triangular(
            strict + eye,
            jnp.broadcast_to(eye, strict.shape),
            lower=True,
            unit_diagonal=True,
        ).astype(dtype)
        u = inverse @ (v * beta[..., None].astype(dtype))
        w = inverse @ (k * (beta * jnp.exp(total))[..., None].astype(dtype))
        inside = f32(jnp.einsum("nbhqd,nbhkd->nbhqk", q, k)) * fade
        far = q * jnp.exp(total)[..., None].astype(dtype)
        rest = jnp.exp(total[..., -1:] - total)
        near = k * rest[..., None].astype(dtype)

        def step(state: Any, seen: Any) -> Any:
            u, w, inside, far, near, last = seen
            half = state.astype(dtype)
            new = u - w @ half
            out = far @ half + inside @ new
            added = jnp.einsum(
                "bhkd,bhke->bhde", near, new, preferred_element_type=jnp.float32
            )
            return state * last[..., None, None] + added, out

        start = jnp.zeros((size, heads, width // heads, width // heads), jnp.float32)
        last = jnp.exp(total[..., -1])
        seen = (u, w, inside.astype(dtype), far, near, last)
        _, out = jax.lax.scan(step, start, seen)
        out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(size, length, heads, -1)
        out = nn.RMSNorm(dtype=dtype)(out).reshape(x.shape)
        return dense(width)(out * nn.silu(dense(width)(x)))


class DeltaModel(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        def norm(x: Any) -> Any:
            return nn.RMSNorm(dtype=self.dtype)(x)

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, use_bias=False, dtype=self.dtype)

        x = nn.Embed(8192, 512, dtype=self.dtype)(ids)
        for _ in range(3):
            x = x + DeltaRule(self.dtype)(norm(x))
            h = norm(x)
            x = x + dense(512)(nn.silu(dense(1408)(h)) * dense(1408)(h))
        return f32(dense(8192)(norm(x)))


def delta_rule(dtype: Any, size: int = 4, length: int = 1024) -> Workload:
    """A language model by the gated delta rule."""

    def loss(apply: Any, ids: Any) -> Any:
        return cross_entropy(apply(ids[:, :-1]), ids[:, 1:]).mean()

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, 8192)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(4e-4, b2=0.95, weight_decay=0.1)
    )
    example = (jnp.zeros((1, 64), jnp.int32),)
    return of_linen(DeltaModel(dtype), example, loss, batch, tx)


# ---- a detector, NNX


class BasicBlock(nnx.Module):
    def __init__(
        self, inputs: int, width: int, stride: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def conv(a: int, kernel: int, s: int) -> nnx.Module:
            return nnx.Conv(
                a,
                width,
                (kernel, kernel),
                s,
                use_bias=False,
                dtype=dtype,
                rngs=rngs,
            )

        def norm() -> nnx.Module:
            return nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)

        self.convs = nnx.List([conv(inputs, 3, stride), conv(width, 3, 1)])
        self.norms = nnx.List([norm(), norm()])
        self.short = conv(inputs, 1, stride) if stride > 1 else None
        self.short_norm = norm() if stride > 1 else None

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.norms[0](self.convs[0](x)))
        h = self.norms[1](self.convs[1](h))
        if self.short is not None:
            x = self.short_norm(self.short(x))
        return nnx.relu(x + h)


class Head(nnx.Module):
    """One tower of convolutions for all levels of the pyramid."""

    def __init__(
        self, width: int, outs: int, bias: float, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.outs = outs
        self.convs = nnx.List(
            [nnx.Conv(width, width, (3, 3), dtype=dtype, rngs=rngs) for _ in range(3)]
        )
        self.out = nnx.Conv(
            width,
            9 * outs,
            (3, 3),
            dtype=dtype,
            bias_init=nnx.initializers.constant(bias),
            rngs=rngs,
        )

    def __call__(self, x: Any) -> Any:
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return f32(self.out(x)).reshape(len(x), -1, self.outs)


class RetinaNet(nnx.Module):
    """A residual network, a pyramid of features, and two heads."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        width, self.dtype = 128, dtype
        self.stem = nnx.Conv(3, 64, (7, 7), 2, use_bias=False, dtype=dtype, rngs=rngs)
        self.stem_norm = nnx.BatchNorm(64, momentum=0.9, dtype=dtype, rngs=rngs)
        self.stages = nnx.List()
        inputs = 64
        for i, n in enumerate((64, 128, 256, 512)):
            first = BasicBlock(inputs, n, 1 if i == 0 else 2, dtype, rngs)
            second = BasicBlock(n, n, 1, dtype, rngs)
            self.stages.append(nnx.List([first, second]))
            inputs = n

        def conv(a: int, kernel: int, stride: int = 1) -> nnx.Module:
            return nnx.Conv(a, width, (kernel, kernel), stride, dtype=dtype, rngs=rngs)

        self.lateral = nnx.List([conv(n, 1) for n in (128, 256, 512)])
        self.smooth = nnx.List([conv(width, 3) for _ in range(3)])
        self.more = nnx.List([conv(512, 3, 2), conv(width, 3, 2)])
        self.classes = Head(width, 80, -math.log(99.0), dtype, rngs)
        self.boxes = Head(width, 4, 0.0, dtype, rngs)

    def __call__(self, images: Any) -> tuple[Any, Any]:
        x = nnx.relu(self.stem_norm(self.stem(images.astype(self.dtype))))
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        features = []
        for stage in self.stages:
            for block in stage:
                x = block(x)
            features.append(x)
        sides = [f(x) for f, x in zip(self.lateral, features[1:], strict=True)]
        for i in (1, 0):
            above = jnp.repeat(jnp.repeat(sides[i + 1], 2, 1), 2, 2)
            sides[i] = sides[i] + above
        levels = [f(x) for f, x in zip(self.smooth, sides, strict=True)]
        levels.append(self.more[0](features[-1]))
        levels.append(self.more[1](nnx.relu(levels[-1])))
        classes = jnp.concatenate([self.classes(x) for x in levels], 1)
        return classes, jnp.concatenate([self.boxes(x) for x in levels], 1)


def detector(dtype: Any, size: int = 8, side: int = 256) -> Workload:
    """RetinaNet: focal loss of all anchors and boxes of those that hold something."""
    shapes = nnx.eval_shape(lambda: RetinaNet(dtype, nnx.Rngs(0)))
    graph, _, _ = nnx.split(shapes, nnx.Param, nnx.BatchStat)
    anchors = 9 * sum(math.ceil(side / 2**i) ** 2 for i in range(3, 8))

    def init(key: Any) -> Any:
        model = RetinaNet(dtype, nnx.Rngs(params=key))
        return nnx.split(model, nnx.Param, nnx.BatchStat)[1:]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, labels, wanted = batch  # a label is -1 for nothing, -2 for ignored
        model = nnx.merge(graph, params, state, copy=True)
        logits, boxes = model(images)
        _, _, state = nnx.split(model, nnx.Param, nnx.BatchStat)
        hits = jax.nn.one_hot(labels, 80)
        p = jax.nn.sigmoid(logits)
        right = hits * p + (1 - hits) * (1 - p)
        weight = jnp.where(hits == 1, 0.25, 0.75) * (1 - right) ** 2
        losses = weight * optax.sigmoid_binary_cross_entropy(logits, hits)
        losses = jnp.where((labels == -2)[..., None], 0.0, losses)
        held = labels >= 0
        count = jnp.maximum(held.sum(), 1)
        apart = optax.huber_loss(boxes, wanted, delta=0.1).sum(-1)
        return (losses.sum() + jnp.where(held, apart, 0.0).sum()) / count, state

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (size, anchors), 0, 80)
        chance = jax.random.uniform(key, (size, anchors))
        labels = jnp.where(chance < 0.95, -1, jnp.where(chance < 0.97, -2, labels))
        wanted = jax.random.normal(key, (size, anchors, 4))
        return jax.random.normal(key, (size, side, side, 3)), labels, wanted

    tx = optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.add_decayed_weights(1e-4),
        optax.sgd(0.01, momentum=0.9),
    )
    return Workload(init, loss, batch, tx)


# ---- a protein's structure, Haiku


def structure(dtype: Any, size: int = 4, length: int = 256) -> Workload:
    """Invariant point attention, four times the same weights, and frame errors."""
    width, wide, heads, scalars, seekers, carriers = 256, 128, 8, 16, 4, 8

    def norm(x: Any) -> Any:
        return hk.LayerNorm(-1, True, True)(f32(x)).astype(dtype)

    class PointAttention(hk.Module):
        def __call__(self, s: Any, z: Any, turn: Any, place: Any) -> Any:
            size, length = s.shape[:2]

            def split(n: int) -> Any:
                return hk.Linear(heads * n)(s).reshape(size, length, heads, n)

            def points(n: int) -> Any:  # coordinates are float32
                p = f32(split(3 * n)).reshape(size, length, heads, n, 3)
                p = jnp.einsum("bnij,bnhpj->bnhpi", turn, p)
                return p + place[:, :, None, None]

            q, k, v = split(scalars), split(scalars), split(scalars)
            scores = f32(jnp.einsum("bqhc,bkhc->bhqk", q, k)) * (3 * scalars) ** -0.5
            bias = f32(hk.Linear(heads)(z)) * 3**-0.5
            a, b, c = points(seekers), points(seekers), points(carriers)
            apart = ((a[:, :, None] - b[:, None]) ** 2).sum((-1, -2))
            gamma = hk.get_parameter("gamma", (heads,), init=jnp.zeros)
            rate = jax.nn.softplus(gamma) * 0.5 * (27 * seekers) ** -0.5
            scores = scores + jnp.moveaxis(bias - rate * apart, -1, 1)
            weights = jax.nn.softmax(scores)
            half = weights.astype(dtype)
            out = jnp.einsum("bhqk,bkhc->bqhc", half, v)
            pairs = jnp.einsum("bhqk,bqkc->bqhc", half, z)
            seen = jnp.einsum("bhqk,bkhpi->bqhpi", weights, c) - place[:, :, None, None]
            seen = jnp.einsum("bnji,bnhpj->bnhpi", turn, seen)
            sizes = jnp.sqrt((seen**2).sum(-1) + 1e-8)
            parts = (out, pairs, seen.astype(dtype), sizes.astype(dtype))
            flat = [x.reshape(size, length, -1) for x in parts]
            return hk.Linear(width)(jnp.concatenate(flat, -1))

    def rotation(v: Any) -> Any:
        """Of the quaternion (1, v)."""
        q = jnp.concatenate([jnp.ones_like(v[..., :1]), v], -1)
        q = q * jax.lax.rsqrt((q**2).sum(-1, keepdims=True))
        a, b, c, d = jnp.moveaxis(q, -1, 0)
        rows = [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d],
        ]
        return jnp.stack([jnp.stack(row, -1) for row in rows], -2)

    def network(kinds: Any) -> Any:
        size, length = kinds.shape
        x = jax.nn.one_hot(kinds, 21, dtype=dtype)
        s = hk.Linear(width)(x)
        near = jnp.clip(jnp.arange(length)[:, None] - jnp.arange(length), -32, 32) + 32
        z = hk.Linear(wide)(x)[:, :, None] + hk.Linear(wide)(x)[:, None]
        z = z + hk.Linear(wide)(jax.nn.one_hot(near, 65, dtype=dtype))
        for _ in range(2):
            h = jax.nn.relu(hk.Linear(2 * wide)(norm(z)))
            z = z + hk.Linear(wide)(h)
        z = norm(z)
        bins = hk.Linear(64)(z)
        bins = f32(bins + bins.swapaxes(1, 2))
        attend = PointAttention()
        change = hk.nets.MLP((width, width, width))
        norms = [hk.LayerNorm(-1, True, True) for _ in range(2)]
        update = hk.Linear(6)
        turn = jnp.broadcast_to(jnp.eye(3), (size, length, 3, 3))
        place = jnp.zeros((size, length, 3))
        s, frames = hk.Linear(width)(norm(s)), []
        for _ in range(4):
            s = norms[0](f32(s + attend(s, z, turn, place))).astype(dtype)
            s = norms[1](f32(s + change(s))).astype(dtype)
            step = f32(update(s))
            place = place + jnp.einsum("bnij,bnj->bni", turn, step[..., 3:])
            turn = turn @ rotation(step[..., :3])
            frames.append((turn, place))
            turn = jax.lax.stop_gradient(turn)
        return frames, bins

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, 8), jnp.int32)), ()

    def frame_error(turn: Any, place: Any, true_turn: Any, true_place: Any) -> Any:
        def local(turn: Any, place: Any) -> Any:
            apart = place[:, None] - place[:, :, None]
            return jnp.einsum("bfji,bfpj->bfpi", turn, apart)

        square = (local(turn, place) - local(true_turn, true_place)) ** 2
        errors = jnp.sqrt(square.sum(-1) + 1e-4)
        return jnp.minimum(errors, 10.0).mean() / 10

    def loss(params: Any, state: Any, batch: Any) -> Any:
        kinds, turn, place = batch
        keep = lambda path: "layer_norm" in path or "gamma" in path  # noqa: E731
        frames, bins = net.apply(cast(params, dtype, keep), kinds)
        errors = [frame_error(*frame, turn, place) for frame in frames]
        apart = place[:, :, None] - place[:, None]
        apart = jnp.sqrt((apart**2).sum(-1) + 1e-8)
        which = jnp.clip((apart * 3).astype(jnp.int32), 0, 63)
        value = cross_entropy(bins, which).mean()
        return errors[-1] + sum(errors) / 4 + 0.3 * value, state

    def batch(key: Any) -> Any:
        kinds = jax.random.randint(key, (size, length), 0, 21)
        turn = rotation(jax.random.normal(key, (size, length, 3)))
        place = jnp.cumsum(jax.random.normal(key, (size, length, 3)), 1)
        return kinds, turn, place

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, b2=0.999))
    return Workload(init, loss, batch, tx)


# ---- preferences, NNX


class PolicyBlock(nnx.Module):
    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, use_bias=False, dtype=dtype, rngs=rngs)

        self.dtype = dtype
        self.norm1 = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.q, self.out = linear(width, width), linear(width, width)
        self.kv = linear(width, width // 2)
        self.gate, self.up = linear(width, 1408), linear(width, 1408)
        self.down = linear(1408, width)

    def __call__(self, x: Any, mask: Any, sin: Any, cos: Any) -> Any:
        size, length, width = x.shape

        def rotate(x: Any) -> Any:
            a, b = jnp.split(f32(x), 2, -1)
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return x.astype(self.dtype)

        h = self.norm1(x)
        q = self.q(h).reshape(size, length, 8, 64)
        k, v = jnp.split(self.kv(h).reshape(size, length, 4, 64), 2, 2)
        q = rotate(q).reshape(size, length, 2, 4, 64)
        scores = f32(jnp.einsum("bqgnd,bkgd->bgnqk", q, rotate(k))) / 8
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(self.dtype)
        h = jnp.einsum("bgnqk,bkgd->bqgnd", weights, v).reshape(x.shape)
        x = x + self.out(h)
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class PolicyModel(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(8192, 512, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([PolicyBlock(512, dtype, rngs) for _ in range(3)])
        self.norm = nnx.RMSNorm(512, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(512, 8192, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        length = ids.shape[1]
        angles = jnp.arange(length)[:, None] * 1e4 ** -(jnp.arange(32) / 32)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        mask = jnp.tril(jnp.ones((length, length), bool))
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask, sin, cos)
        return f32(self.head(self.norm(x)))


def preferences(dtype: Any, size: int = 4, length: int = 512) -> Workload:
    """DPO: a policy that prefers what was chosen, beside a frozen reference."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: PolicyModel(dtype, nnx.Rngs(0))))

    def init(key: Any) -> Any:
        params = nnx.split(PolicyModel(dtype, nnx.Rngs(params=key)))[1]
        return params, params  # the state is the reference

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, mask = batch  # what was chosen, and then what was rejected

        def likelihood(params: Any) -> Any:
            log_p = jax.nn.log_softmax(nnx.merge(graph, params)(ids[:, :-1]))
            each = jnp.take_along_axis(log_p, ids[:, 1:, None], -1)[..., 0]
            return jnp.split((each * mask).sum(-1), 2)

        chosen, rejected = likelihood(params)
        old_chosen, old_rejected = jax.lax.stop_gradient(likelihood(state))
        gain = (chosen - old_chosen) - (rejected - old_rejected)
        value = -jax.nn.log_sigmoid(0.1 * gain).mean()
        return value - 0.01 * (chosen / jnp.split(mask.sum(-1), 2)[0]).mean(), state

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (2 * size, length + 1), 0, 8192)
        starts = jax.random.randint(key, (2 * size, 1), 1, length // 2)
        return ids, (jnp.arange(length) >= starts).astype(jnp.float32)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-5, 100, 10000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    return Workload(init, loss, batch, tx)
