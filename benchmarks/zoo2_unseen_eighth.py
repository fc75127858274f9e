"""Train steps of families that the other zoos lack: two streams, prompts, two passes.

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
from zoo2_unseen_third import f32, of_linen

# ---- a rectified flow of two streams, NNX


class Stream(nnx.Module):
    """What one of the streams, pixels or words, has for itself in a block."""

    def __init__(self, width: int, last: bool, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(a: int, b: int, **kw: Any) -> nnx.Module:
            return nnx.Linear(a, b, dtype=dtype, rngs=rngs, **kw)

        def norm() -> nnx.Module:
            return nnx.LayerNorm(
                width,
                epsilon=1e-6,
                use_bias=False,
                use_scale=False,
                dtype=dtype,
                rngs=rngs,
            )

        self.last = last
        zeros = nnx.initializers.zeros_init()
        self.modulation = linear(width, (2 if last else 6) * width, kernel_init=zeros)
        self.norm1, self.qkv = norm(), linear(width, 3 * width)
        self.norm_q = nnx.RMSNorm(64, dtype=dtype, rngs=rngs)
        self.norm_k = nnx.RMSNorm(64, dtype=dtype, rngs=rngs)
        if not last:
            self.out, self.norm2 = linear(width, width), norm()
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def read(self, x: Any, c: Any) -> tuple[Any, Any, Any, Any]:
        """Queries, keys and values, and how the results are modulated."""
        parts = self.modulation(nnx.silu(c))[:, None]
        shift, scale, *rest = jnp.split(parts, 2 if self.last else 6, -1)
        h = self.norm1(x) * (1 + scale) + shift
        h = self.qkv(h).reshape(*x.shape[:2], 3, -1, 64)
        return self.norm_q(h[:, :, 0]), self.norm_k(h[:, :, 1]), h[:, :, 2], rest

    def write(self, x: Any, h: Any, rest: Any) -> Any:
        gate, shift, scale, gate2 = rest
        x = x + gate * self.out(h)
        h = self.norm2(x) * (1 + scale) + shift
        return x + gate2 * self.down(nnx.gelu(self.up(h)))


class JointBlock(nnx.Module):
    """Each stream by weights of its own, and one attention over both."""

    def __init__(self, width: int, last: bool, dtype: Any, rngs: nnx.Rngs) -> None:
        self.pixels = Stream(width, False, dtype, rngs)
        self.words = Stream(width, last, dtype, rngs)
        self.dtype, self.last = dtype, last

    def __call__(self, x: Any, y: Any, c: Any) -> tuple[Any, Any]:
        *first, rest_x = self.pixels.read(x, c)
        *second, rest_y = self.words.read(y, c)
        q, k, v = (jnp.concatenate(both, 1) for both in zip(second, first, strict=True))
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / 8
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        h = h.reshape(*h.shape[:2], -1)
        x = self.pixels.write(x, h[:, y.shape[1] :], rest_x)
        if not self.last:
            y = self.words.write(y, h[:, : y.shape[1]], rest_y)
        return x, y


def placed(side: int, width: int) -> Any:
    """Sines and cosines of rows and columns, as constants."""
    rates = 1e4 ** -(np.arange(width // 4) / (width // 4))
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    angles = np.stack([rows.reshape(-1, 1) * rates, columns.reshape(-1, 1) * rates], 1)
    found = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    return found.reshape(side * side, width).astype(np.float32)


class JointTransformer(nnx.Module):
    """MM-DiT on latents of 16 channels, in patches of two by two."""

    def __init__(
        self, width: int, layers: int, text: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        def linear(a: int, b: int, **kw: Any) -> nnx.Module:
            return nnx.Linear(a, b, dtype=dtype, rngs=rngs, **kw)

        self.dtype, self.width = dtype, width
        self.enter, self.context = linear(64, width), linear(text, width)
        self.time = nnx.List([linear(256, width), linear(width, width)])
        self.pooled = nnx.List([linear(text, width), linear(width, width)])
        self.blocks = nnx.List(
            [JointBlock(width, i == layers - 1, dtype, rngs) for i in range(layers)]
        )
        zeros = nnx.initializers.zeros_init()
        self.modulation = linear(width, 2 * width, kernel_init=zeros)
        self.norm = nnx.LayerNorm(
            width, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs
        )
        self.leave = linear(width, 64, kernel_init=zeros)

    def __call__(self, latents: Any, time: Any, text: Any, pooled: Any) -> Any:
        size, side, _, channels = latents.shape
        x = latents.reshape(size, side // 2, 2, side // 2, 2, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(size, -1, 4 * channels)
        x = self.enter(x.astype(self.dtype))
        x = x + jnp.asarray(placed(side // 2, self.width), self.dtype)
        angles = 1000 * time[:, None] * 1e4 ** -(jnp.arange(128) / 128)
        c = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(self.dtype)
        c = self.time[1](nnx.silu(self.time[0](c)))
        pooled = self.pooled[0](pooled.astype(self.dtype))
        c = c + self.pooled[1](nnx.silu(pooled))
        y = self.context(text.astype(self.dtype))
        for block in self.blocks:
            x, y = block(x, y, c)
        shift, scale = jnp.split(self.modulation(nnx.silu(c))[:, None], 2, -1)
        x = self.leave(self.norm(x) * (1 + scale) + shift)
        x = x.reshape(size, side // 2, side // 2, 2, 2, channels)
        return f32(x.transpose(0, 1, 3, 2, 4, 5).reshape(latents.shape))


def joint_flow(
    dtype: Any,
    size: int = 32,
    side: int = 32,
    words: int = 77,
    width: int = 512,
    layers: int = 4,
    text: int = 768,
) -> Workload:
    """Stable Diffusion 3: a rectified flow by a transformer of two streams."""
    make = lambda key: JointTransformer(width, layers, text, dtype, nnx.Rngs(key))  # noqa: E731
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        latents, embedded, pooled, key = batch
        keys = jax.random.split(key, 3)
        time = jax.nn.sigmoid(jax.random.normal(keys[0], (size,)))
        noise = jax.random.normal(keys[1], latents.shape)
        kept = jax.random.bernoulli(keys[2], 0.9, (size, 1))  # for free guidance
        embedded, pooled = embedded * kept[..., None], pooled * kept
        at = time[:, None, None, None]
        noisy = (1 - at) * latents + at * noise
        found = nnx.merge(graph, params)(noisy, time, embedded, pooled)
        return ((found - (noise - latents)) ** 2).mean(), state

    def batch(key: Any) -> Any:
        return (
            jax.random.normal(key, (size, side, side, 16)),
            jax.random.normal(key, (size, words, text)),
            jax.random.normal(key, (size, text)),
            key,
        )

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01)
    )
    return Workload(init, loss, batch, tx)


# ---- Griffin, Linen


class GatedRecurrence(nn.Module):
    """RG-LRU: a diagonal recurrence in float32, gates by blocks along the diagonal."""

    dtype: Any
    heads: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size, length, width = x.shape
        each = width // self.heads

        def gate(name: str) -> Any:
            init = nn.initializers.lecun_normal(batch_axis=0)
            w = self.param(f"{name}_w", init, (self.heads, each, each))
            b = self.param(f"{name}_b", nn.initializers.zeros, (self.heads, each))
            h = x.reshape(size, length, self.heads, each)
            h = jnp.einsum("blhi,hij->blhj", h, w.astype(self.dtype))
            return nn.sigmoid(h + b.astype(self.dtype)).reshape(x.shape)

        def init(key: Any, shape: Any) -> Any:
            decay = jax.random.uniform(key, shape, minval=0.9, maxval=0.999)
            return jnp.log(jnp.expm1(-jnp.log(decay) / 8))

        rate = nn.softplus(self.param("rate", init, (width,)))
        log_a = -8 * f32(gate("decay")) * rate
        a = jnp.exp(log_a)
        scale = jnp.sqrt(-jnp.expm1(2 * log_a))
        scale = jnp.where(jnp.arange(length)[:, None] == 0, 1.0, scale)
        x = x * gate("enter") * scale.astype(self.dtype)

        def step(h: Any, seen: Any) -> tuple[Any, Any]:
            a, x = seen
            h = a * h + f32(x)
            return h, h.astype(self.dtype)

        seen = jnp.moveaxis(a, 1, 0), jnp.moveaxis(x, 1, 0)
        _, out = jax.lax.scan(step, jnp.zeros((size, width)), seen)
        return jnp.moveaxis(out, 0, 1)


class RecurrentMixer(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = x.shape[-1]
        gate = nn.gelu(nn.Dense(width, dtype=self.dtype)(x))
        h = nn.Dense(width, dtype=self.dtype)(x)
        h = nn.Conv(
            width, (4,), padding="CAUSAL", feature_group_count=width, dtype=self.dtype
        )(h)
        h = GatedRecurrence(self.dtype)(h)
        return nn.Dense(width, dtype=self.dtype)(h * gate)


class LocalMixer(nn.Module):
    """One key-value head; each block of places sees itself and the one before it."""

    dtype: Any
    window: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size, length, width = x.shape
        window, count, heads = self.window, length // self.window, width // 64

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, use_bias=False, dtype=self.dtype)

        angles = jnp.arange(length)[:, None] * 1e4 ** -(jnp.arange(16) / 16)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

        def rotate(x: Any) -> Any:  # one half of each head
            x, rest = jnp.split(x, 2, -1)
            a, b = jnp.split(f32(x), 2, -1)
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return jnp.concatenate([x.astype(self.dtype), rest], -1)

        def seen(x: Any) -> Any:
            x = x.reshape(size, count, window, 64)
            before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
            return jnp.concatenate([before, x], 2)

        q = rotate(dense(width)(x).reshape(size, length, heads, 64))
        q = q.reshape(size, count, window, heads, 64)
        k = rotate(dense(64)(x)[:, :, None])[:, :, 0]
        k, v = seen(k), seen(dense(64)(x))
        scores = f32(jnp.einsum("bnqhd,bnkd->bnhqk", q, k)) / 8
        ago = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)
        mask = (ago >= 0) & (ago < window)
        real = (jnp.arange(count) > 0)[:, None] | (jnp.arange(2 * window) >= window)
        mask = mask & real[:, None]
        scores = jnp.where(mask[:, None], scores, -2e38)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bnhqk,bnkd->bnqhd", weights, v)
        return nn.Dense(width, dtype=self.dtype)(h.reshape(x.shape))


class Griffin(nn.Module):
    dtype: Any
    width: int
    window: int
    vocabulary: int

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        dtype, width = self.dtype, self.width
        embed = nn.Embed(self.vocabulary, width, dtype=dtype)
        x = embed(ids) * jnp.asarray(width**0.5, dtype)
        for i in range(3):
            h = nn.RMSNorm(dtype=dtype)(x)
            x = x + (
                LocalMixer(dtype, self.window) if i == 2 else RecurrentMixer(dtype)
            )(h)
            h = nn.RMSNorm(dtype=dtype)(x)
            init = nn.initializers.lecun_normal(batch_axis=0)
            up = self.param(f"up{i}", init, (2, width, 3 * width)).astype(dtype)
            gate, h = jnp.einsum("bld,cdf->cblf", h, up)
            x = x + nn.Dense(width, dtype=dtype)(nn.gelu(gate) * h)
        logits = f32(embed.attend(nn.RMSNorm(dtype=dtype)(x)))
        return 30 * jnp.tanh(logits / 30)


def griffin(
    dtype: Any,
    size: int = 8,
    length: int = 1024,
    width: int = 512,
    window: int = 256,
    vocabulary: int = 8192,
) -> Workload:
    """Griffin: two gated linear recurrences, then attention to a window."""

    def loss(apply: Any, ids: Any) -> Any:
        return cross_entropy(apply(ids[:, :-1]), ids[:, 1:]).mean()

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, vocabulary)

    rates = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 1000, 100000)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.96, weight_decay=0.1)
    )
    example = (jnp.zeros((1, window), jnp.int32),)
    return of_linen(Griffin(dtype, width, window, vocabulary), example, loss, batch, tx)


# ---- BigGAN, Haiku


class Spectral(hk.Module):
    """A convolution or product whose weight is divided by its largest singular value.

    The power iteration is float32, as the weight.
    """

    def __init__(
        self, outs: int, kernel: int | None, dtype: Any, bias: bool = True
    ) -> None:
        super().__init__()
        self.outs, self.kernel, self.dtype, self.bias = outs, kernel, dtype, bias

    def __call__(self, x: Any) -> Any:
        sides = () if self.kernel is None else (self.kernel, self.kernel)
        init = hk.initializers.Orthogonal()
        w = hk.get_parameter("w", (*sides, x.shape[-1], self.outs), init=init)
        w = hk.SpectralNorm(eps=1e-4)(w).astype(self.dtype)
        if self.kernel is None:
            x = x @ w
        else:
            x = jax.lax.conv_general_dilated(
                *(x, w, (1, 1), "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        if self.bias:
            x = x + hk.get_parameter("b", (self.outs,), init=jnp.zeros).astype(x.dtype)
        return x


def pooled(x: Any) -> Any:
    size, rows, columns, width = x.shape
    return x.reshape(size, rows // 2, 2, columns // 2, 2, width).mean((2, 4))


def doubled(x: Any) -> Any:
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


class BigGan(NamedTuple):
    """Hinge losses, a projection of the class, an average of the generator."""

    dtype: Any
    size: int = 64
    side: int = 64
    width: int = 64
    classes: int = 1000
    optimizer: Any = optax.adam(1e-4, 0.0, 0.999, 1e-6)

    def attend(self, x: Any) -> Any:
        size, rows, columns, width = x.shape

        def conv(n: int) -> hk.Module:
            return Spectral(n, 1, self.dtype, bias=False)

        def reduced(x: Any) -> Any:
            x = x.reshape(size, rows // 2, 2, columns // 2, 2, -1).max((2, 4))
            return x.reshape(size, rows * columns // 4, -1)

        q = conv(width // 8)(x).reshape(size, rows * columns, -1)
        k, v = reduced(conv(width // 8)(x)), reduced(conv(width // 2)(x))
        scores = f32(jnp.einsum("bqd,bkd->bqk", q, k))
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bqk,bkd->bqd", weights, v).reshape(size, rows, columns, -1)
        gain = hk.get_parameter("gain", (), init=jnp.zeros).astype(self.dtype)
        return x + gain * conv(width)(h)

    def generator(self, z: Any, labels: Any) -> Any:
        """Images of latents, f32[size, 120], and classes."""
        dtype, width = self.dtype, self.width
        y = hk.Embed(self.classes, 128)(labels).astype(dtype)
        z, *rest = jnp.split(z.astype(dtype), 5, -1)

        def norm(x: Any, c: Any) -> Any:
            """Statistics in float32; scales and shifts of the class and the latent."""
            x = hk.BatchNorm(False, False, 0.99)(f32(x), True).astype(dtype)
            scale = Spectral(x.shape[-1], None, dtype, bias=False)(c)
            shift = Spectral(x.shape[-1], None, dtype, bias=False)(c)
            return x * (1 + scale[:, None, None]) + shift[:, None, None]

        x = Spectral(self.side**2 // 256 * 8 * width, None, dtype)(z)
        x = x.reshape(len(z), self.side // 16, self.side // 16, 8 * width)
        for i, outs in enumerate((8 * width, 4 * width, 2 * width, width)):
            c = jnp.concatenate([y, rest[i]], -1)
            h = doubled(jax.nn.relu(norm(x, c)))
            h = Spectral(outs, 3, dtype)(h)
            h = Spectral(outs, 3, dtype)(jax.nn.relu(norm(h, c)))
            x = h + Spectral(outs, 1, dtype)(doubled(x))
            if i == 2:
                x = self.attend(x)
        x = hk.BatchNorm(True, True, 0.99)(f32(x), True).astype(dtype)
        return jnp.tanh(f32(Spectral(3, 3, dtype)(jax.nn.relu(x))))

    def judge(self, images: Any, labels: Any) -> Any:
        dtype, width = self.dtype, self.width
        x = images.astype(dtype)
        for i, outs in enumerate((width, 2 * width, 4 * width, 8 * width)):
            h = Spectral(outs, 3, dtype)(x if i == 0 else jax.nn.relu(x))
            h = pooled(Spectral(outs, 3, dtype)(jax.nn.relu(h)))
            if i == 0:
                x = Spectral(outs, 1, dtype)(pooled(x))
            else:
                x = pooled(Spectral(outs, 1, dtype)(x))
            x = h + x
            if i == 0:
                x = self.attend(x)
        x = f32(jax.nn.relu(x)).sum((1, 2)).astype(dtype)
        table = hk.get_parameter(
            *("table", (self.classes, 8 * width)),
            init=hk.initializers.RandomNormal(0.02),
        )
        y = hk.SpectralNorm(eps=1e-4)(table).astype(dtype)[labels]
        return f32(Spectral(1, None, dtype)(x)[:, 0]) + f32((x * y).sum(-1))

    def networks(self) -> tuple[Any, Any]:
        return tuple(
            hk.without_apply_rng(hk.transform_with_state(f))
            for f in (self.generator, self.judge)
        )

    def step(
        self, params: Any, opt_state: Any, state: Any, average: Any, batch: Any
    ) -> Any:
        generator, judge = self.networks()
        images, labels, z, wanted = batch

        def loss_d(params_d: Any) -> Any:
            fake, state_g = generator.apply(params["g"], state["g"], z[0], wanted[0])
            both = jnp.concatenate([images, jax.lax.stop_gradient(fake)])
            classes = jnp.concatenate([labels, wanted[0]])
            seen, state_d = judge.apply(params_d, state["d"], both, classes)
            real, fake = jnp.split(seen, 2)
            value = jax.nn.relu(1 - real).mean() + jax.nn.relu(1 + fake).mean()
            return value, {"g": state_g, "d": state_d}

        def loss_g(params_g: Any, params_d: Any, state: Any) -> Any:
            fake, state_g = generator.apply(params_g, state["g"], z[1], wanted[1])
            seen, _ = judge.apply(params_d, state["d"], fake, wanted[1])
            return -seen.mean(), {"g": state_g, "d": state["d"]}

        (value_d, state), grads = jax.value_and_grad(loss_d, has_aux=True)(params["d"])
        updates, opt_d = self.optimizer.update(grads, opt_state["d"])
        params_d = optax.apply_updates(params["d"], updates)
        (value_g, state), grads = jax.value_and_grad(loss_g, has_aux=True)(
            params["g"], params_d, state
        )
        updates, opt_g = self.optimizer.update(grads, opt_state["g"])
        params_g = optax.apply_updates(params["g"], updates)
        average = optax.incremental_update(params_g, average, 1e-3)
        params, opt_state = {"g": params_g, "d": params_d}, {"g": opt_g, "d": opt_d}
        return params, opt_state, state, average, (value_d, value_g)

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        generator, judge = self.networks()
        images = jax.random.uniform(key, (self.size, self.side, self.side, 3))
        images = 2 * images - 1
        z = jax.random.normal(key, (2, self.size, 120))
        labels = jax.random.randint(key, (3, self.size), 0, self.classes)
        params, state = {}, {}
        params["g"], state["g"] = generator.init(key, z[0, :1], labels[0, :1])
        params["d"], state["d"] = judge.init(key, images[:1], labels[0, :1])
        opt_state = {name: self.optimizer.init(p) for name, p in params.items()}
        batch = images, labels[0], z, labels[1:]
        return params, opt_state, state, params["g"], batch


# ---- TabNet, NNX


class GhostNorm(nnx.Module):
    """Batch normalization of each part of the batch by itself."""

    def __init__(self, width: int, part: int, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones((width,)))
        self.shift = nnx.Param(jnp.zeros((width,)))
        self.mean = nnx.BatchStat(jnp.zeros((width,)))
        self.var = nnx.BatchStat(jnp.ones((width,)))
        self.part, self.dtype = part, dtype

    def __call__(self, x: Any) -> Any:
        parts = f32(x).reshape(-1, self.part, x.shape[-1])
        mean, var = parts.mean(1, keepdims=True), parts.var(1, keepdims=True)
        self.mean[...] = 0.98 * self.mean[...] + 0.02 * mean.mean((0, 1))
        self.var[...] = 0.98 * self.var[...] + 0.02 * var.mean((0, 1))
        parts = (parts - mean) * (jax.lax.rsqrt(var + 1e-5) * self.scale[...])
        return (parts + self.shift[...]).reshape(x.shape).astype(self.dtype)


class GluLayer(nnx.Module):
    """A gated layer, whose product may be shared by the steps."""

    def __init__(self, product: nnx.Module, width: int, part: int, dtype: Any) -> None:
        self.product, self.norm = product, GhostNorm(2 * width, part, dtype)

    def __call__(self, x: Any) -> Any:
        return nnx.glu(self.norm(self.product(x)))


def sparsemax(x: Any) -> Any:
    """The nearest point of the simplex, along the last axis."""
    order = -jnp.sort(-jax.lax.stop_gradient(x))
    total = jnp.cumsum(order, -1) - 1
    inside = order * jnp.arange(1, x.shape[-1] + 1) > total
    count = inside.sum(-1, keepdims=True)
    least = jnp.take_along_axis(total, count - 1, -1) / count
    inside = jax.lax.stop_gradient(x) > least
    level = (jnp.where(inside, x, 0).sum(-1, keepdims=True) - 1) / count
    return jnp.where(inside, x - level, 0)


class TabNet(nnx.Module):
    def __init__(
        self,
        numbers: int,
        categories: int,
        width: int,
        steps: int,
        part: int,
        classes: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, use_bias=False, dtype=dtype, rngs=rngs)

        features = numbers + 4 * categories
        shared = [linear(features, 4 * width), linear(2 * width, 4 * width)]

        def layers() -> nnx.Module:
            products = [*shared, *(linear(2 * width, 4 * width) for _ in range(2))]
            return nnx.List([GluLayer(p, 2 * width, part, dtype) for p in products])

        self.dtype, self.width = dtype, width
        self.tables = nnx.List(
            [nnx.Embed(64, 4, dtype=dtype, rngs=rngs) for _ in range(categories)]
        )
        self.norm = GhostNorm(features, part, dtype)
        self.first = layers()
        self.transform = nnx.List([layers() for _ in range(steps)])
        self.attend = nnx.List([linear(width, features) for _ in range(steps)])
        self.norms = nnx.List([GhostNorm(features, part, dtype) for _ in range(steps)])
        self.out = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, numbers: Any, categories: Any) -> tuple[Any, Any]:
        """Logits, and how many features each step looks at, as an entropy."""

        def transformed(layers: Any, x: Any) -> tuple[Any, Any]:
            x = layers[0](x)
            for layer in list(layers)[1:]:
                x = (x + layer(x)) * 0.5**0.5
            return jnp.split(x, 2, -1)

        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        x = jnp.concatenate([numbers.astype(self.dtype), *found], -1)
        x = self.norm(x)
        prior, entropy, out = jnp.ones(x.shape), 0.0, 0
        _, h = transformed(self.first, x)
        for attend, norm, layers in zip(
            self.attend, self.norms, self.transform, strict=True
        ):
            mask = sparsemax(prior * f32(norm(attend(h))))
            entropy = entropy - (mask * jnp.log(mask + 1e-5)).sum(-1).mean()
            prior = prior * (1.3 - mask)
            d, h = transformed(layers, mask.astype(self.dtype) * x)
            out = out + nnx.relu(d)
        return f32(self.out(out)), entropy / len(self.attend)


def tab_net(
    dtype: Any,
    size: int = 32768,
    numbers: int = 64,
    categories: int = 16,
    width: int = 64,
    steps: int = 4,
    part: int = 512,
    classes: int = 7,
) -> Workload:
    """TabNet: steps that each choose their features, by sparse attention."""

    def make(key: Any) -> TabNet:
        rngs = nnx.Rngs(key)
        return TabNet(numbers, categories, width, steps, part, classes, dtype, rngs)

    shapes = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, _, _ = nnx.split(shapes, nnx.Param, nnx.BatchStat)

    def init(key: Any) -> Any:
        return nnx.split(make(key), nnx.Param, nnx.BatchStat)[1:]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        *features, labels = batch
        model = nnx.merge(graph, params, state, copy=True)
        logits, entropy = model(*features)
        _, _, state = nnx.split(model, nnx.Param, nnx.BatchStat)
        return cross_entropy(logits, labels).mean() + 1e-3 * entropy, state

    def batch(key: Any) -> Any:
        return (
            jax.random.normal(key, (size, numbers)),
            jax.random.randint(key, (size, categories), 0, 64),
            jax.random.randint(key, (size,), 0, classes),
        )

    rates = optax.exponential_decay(0.02, 500, 0.95, staircase=True)
    tx = optax.chain(optax.clip_by_global_norm(2.0), optax.adam(rates))
    return Workload(init, loss, batch, tx)


# ---- segmentation by prompts, Equinox


def each(layer: Any, x: Any) -> Any:
    """A layer of vectors, along all other axes; norms in float32."""
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(layer, eqx.nn.LayerNorm):
        flat = jax.vmap(layer)(f32(flat)).astype(x.dtype)
    else:
        flat = jax.vmap(layer)(flat)
    return flat.reshape(*x.shape[:-1], -1)


def of_channels(norm: eqx.nn.LayerNorm, x: Any) -> Any:
    """A norm over the channels of an image, which are first."""
    return jnp.moveaxis(each(norm, jnp.moveaxis(x, 0, -1)), -1, 0)


class RelativeBlock(eqx.Module):
    """Attention with places relative by row and by column, perhaps in windows."""

    norms: list[eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    rows: jax.Array
    columns: jax.Array
    side: int = eqx.field(static=True)
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, side: int, key: Any) -> None:
        keys = jax.random.split(key, 6)
        self.side, self.heads = side, width // 64
        self.norms = [eqx.nn.LayerNorm(width, eps=1e-6) for _ in range(2)]
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.rows = 0.02 * jax.random.normal(keys[4], (2 * side - 1, 64))
        self.columns = 0.02 * jax.random.normal(keys[5], (2 * side - 1, 64))

    def attend(self, x: Any) -> Any:
        """Of one window, [side * side, width]."""
        side, heads = self.side, self.heads
        parts = jax.vmap(self.qkv)(x).reshape(len(x), 3, heads, 64)
        q, k, v = jnp.moveaxis(parts, 1, 0)
        apart = np.arange(side)[:, None] - np.arange(side) + side - 1
        grid = q.reshape(side, side, heads, 64)
        rows = jnp.einsum("rchd,rkd->hrck", grid, self.rows[apart])
        columns = jnp.einsum("rchd,ckd->hrck", grid, self.columns[apart])
        bias = f32(rows)[..., :, None] + f32(columns)[..., None, :]
        scores = f32(jnp.einsum("qhd,khd->hqk", q, k)) / 8
        scores = scores + bias.reshape(scores.shape)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        h = jnp.einsum("hqk,khd->qhd", weights, v)
        return jax.vmap(self.out)(h.reshape(x.shape))

    def __call__(self, x: Any) -> Any:
        """Of one image, [rows, columns, width]."""
        side, (rows, columns, width) = self.side, x.shape
        h = each(self.norms[0], x)
        h = h.reshape(rows // side, side, columns // side, side, width)
        h = h.transpose(0, 2, 1, 3, 4).reshape(-1, side * side, width)
        h = jax.vmap(self.attend)(h)
        h = h.reshape(rows // side, columns // side, side, side, width)
        x = x + h.transpose(0, 2, 1, 3, 4).reshape(x.shape)
        h = jax.nn.gelu(each(self.up, each(self.norms[1], x)), approximate=False)
        return x + each(self.down, h)


class ImageEncoder(eqx.Module):
    patches: eqx.nn.Conv2d
    places: jax.Array
    blocks: list[RelativeBlock]
    neck: list[Any]

    def __init__(self, width: int, side: int, window: int, key: Any) -> None:
        keys = iter(jax.random.split(key, 8))
        self.patches = eqx.nn.Conv2d(3, width, 16, 16, key=next(keys))
        self.places = 0.02 * jax.random.normal(next(keys), (side, side, width))
        self.blocks = [
            RelativeBlock(width, n, next(keys)) for n in (window, window, side)
        ]
        self.neck = [
            eqx.nn.Conv2d(width, 256, 1, use_bias=False, key=next(keys)),
            eqx.nn.LayerNorm(256, eps=1e-6),
            eqx.nn.Conv2d(256, 256, 3, padding=1, use_bias=False, key=next(keys)),
            eqx.nn.LayerNorm(256, eps=1e-6),
        ]

    def __call__(self, image: Any) -> Any:
        x = self.patches(image.astype(self.patches.weight.dtype))
        x = jnp.moveaxis(x, 0, -1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.neck[0](jnp.moveaxis(x, -1, 0))
        x = self.neck[2](of_channels(self.neck[1], x))
        return of_channels(self.neck[3], x)


class Looking(eqx.Module):
    """Attention of one set of vectors to another, in fewer features."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, inner: int, key: Any) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.query = eqx.nn.Linear(256, inner, key=a)
        self.key = eqx.nn.Linear(256, inner, key=b)
        self.value = eqx.nn.Linear(256, inner, key=c)
        self.out = eqx.nn.Linear(inner, 256, key=d)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        q, k, v = each(self.query, q), each(self.key, k), each(self.value, v)
        q, k, v = (x.reshape(len(x), 8, -1) for x in (q, k, v))
        scores = f32(jnp.einsum("qhd,khd->hqk", q, k)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores).astype(q.dtype)
        h = jnp.einsum("hqk,khd->qhd", weights, v)
        return each(self.out, h.reshape(len(h), -1))


class TwoWay(eqx.Module):
    """Tokens attend to each other and to the image, and the image to the tokens."""

    among: Looking
    to_image: Looking
    to_tokens: Looking
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: Any) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.among, self.to_image = Looking(256, a), Looking(128, b)
        self.to_tokens = Looking(128, c)
        self.mlp = eqx.nn.MLP(256, 256, 2048, 1, key=d)
        self.norms = [eqx.nn.LayerNorm(256) for _ in range(4)]

    def __call__(self, x: Any, image: Any, start: Any, places: Any) -> Any:
        q = x + start
        x = each(self.norms[0], x + self.among(q, q, x))
        h = self.to_image(x + start, image + places, image)
        x = each(self.norms[1], x + h)
        x = each(self.norms[2], x + each(self.mlp, x))
        h = self.to_tokens(image + places, x + start, x)
        return x, each(self.norms[3], image + h)


# Frequencies that no one learns.
FREQUENCIES = np.random.default_rng(0).normal(size=(2, 128)).astype(np.float32)


def fourier(places: Any) -> Any:
    """Sines and cosines of places in [0, 1], in float32."""
    angles = 2 * jnp.pi * ((2 * places - 1) @ FREQUENCIES)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class MaskDecoder(eqx.Module):
    """Four masks of what points are on, and how good each is."""

    labels: jax.Array
    tokens: jax.Array
    layers: list[TwoWay]
    last: Looking
    norm: eqx.nn.LayerNorm
    up: list[Any]
    hyper: list[eqx.nn.MLP]
    quality: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        keys = iter(jax.random.split(key, 16))
        self.labels = 0.02 * jax.random.normal(next(keys), (2, 256))
        self.tokens = 0.02 * jax.random.normal(next(keys), (5, 256))
        self.layers = [TwoWay(next(keys)) for _ in range(2)]
        self.last, self.norm = Looking(128, next(keys)), eqx.nn.LayerNorm(256)
        self.up = [
            eqx.nn.ConvTranspose2d(256, 64, 2, 2, key=next(keys)),
            eqx.nn.LayerNorm(64, eps=1e-6),
            eqx.nn.ConvTranspose2d(64, 32, 2, 2, key=next(keys)),
        ]
        self.hyper = [eqx.nn.MLP(256, 32, 256, 2, key=next(keys)) for _ in range(4)]
        self.quality = eqx.nn.MLP(256, 4, 256, 2, key=next(keys))

    def __call__(self, image: Any, points: Any, kinds: Any) -> tuple[Any, Any]:
        dtype, side = image.dtype, image.shape[1]
        grid = (jnp.arange(side) + 0.5) / side
        grid = jnp.stack(jnp.meshgrid(grid, grid), -1).reshape(-1, 2)
        places = fourier(grid).astype(dtype)
        prompts = fourier(points).astype(dtype) + self.labels[kinds]
        start = jnp.concatenate([self.tokens, prompts])
        x, pixels = start, image.reshape(256, -1).T
        for layer in self.layers:
            x, pixels = layer(x, pixels, start, places)
        h = self.last(x + start, pixels + places, pixels)
        x = each(self.norm, x + h)
        pixels = self.up[0](pixels.T.reshape(image.shape))
        pixels = jax.nn.gelu(of_channels(self.up[1], pixels), approximate=False)
        pixels = jax.nn.gelu(self.up[2](pixels), approximate=False)
        weights = jnp.stack([mlp(x[i + 1]) for i, mlp in enumerate(self.hyper)])
        masks = jnp.einsum("mc,cij->mij", weights, pixels)
        return f32(masks), f32(self.quality(x[0]))


class Promptable(eqx.Module):
    encoder: ImageEncoder
    decoder: MaskDecoder

    def __init__(self, width: int, side: int, window: int, key: Any) -> None:
        a, b = jax.random.split(key)
        self.encoder, self.decoder = (
            ImageEncoder(width, side, window, a),
            MaskDecoder(b),
        )


def promptable(
    dtype: Any,
    size: int = 16,
    side: int = 32,
    window: int = 8,
    width: int = 384,
    prompts: int = 4,
) -> Workload:
    """Segment Anything: masks of points; the best of three is learnt from."""
    shapes = eqx.filter_eval_shape(Promptable, width, side, window, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(Promptable(width, side, window, key), eqx.is_array), ()

    def mask_loss(logits: Any, wanted: Any) -> tuple[Any, Any]:
        """Focal and Dice losses of each mask, and how much of each is right."""
        p = jax.nn.sigmoid(logits)
        wrong = optax.sigmoid_binary_cross_entropy(logits, wanted)
        focal = wrong * (1 - jnp.where(wanted > 0, p, 1 - p)) ** 2
        focal = (focal * jnp.where(wanted > 0, 0.25, 0.75)).mean((-2, -1))
        both, total = (p * wanted).sum((-2, -1)), p.sum((-2, -1)) + wanted.sum()
        dice = 1 - (2 * both + 1) / (total + 1)
        found = jax.lax.stop_gradient(logits) > 0
        inside = jnp.where(found, wanted, 0).sum((-2, -1))
        union = jnp.where(found, 1, wanted).sum((-2, -1))
        return 20 * focal + dice, inside / jnp.maximum(union, 1)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        half = cast(params, dtype, lambda path: "norm" in path or "neck[1]" in path)
        model = eqx.combine(half, static)

        def of_prompt(image: Any, points: Any, kinds: Any, wanted: Any) -> Any:
            masks, quality = model.decoder(image, points, kinds)
            values, right = mask_loss(masks, wanted)
            return values.min() + ((quality - right) ** 2).mean()

        def of_image(image: Any, points: Any, kinds: Any, wanted: Any) -> Any:
            image = model.encoder(image)
            return jax.vmap(of_prompt, (None, 0, 0, 0))(image, points, kinds, wanted)

        return jax.vmap(of_image)(*batch).mean(), state

    def batch(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        points = jax.random.uniform(b, (size, prompts, 6, 2))
        grid = (jnp.arange(4 * side) + 0.5) / (4 * side)
        grid = jnp.stack(jnp.meshgrid(grid, grid), -1)
        apart = jnp.linalg.norm(grid - points[..., :1, None, :], axis=-1)
        return (
            jax.random.normal(a, (size, 3, 16 * side, 16 * side)),
            points,
            jax.random.randint(c, (size, prompts, 6), 0, 2),
            f32(apart < 0.2),
        )

    rates = optax.warmup_cosine_decay_schedule(0.0, 8e-4, 250, 90000)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.1)
    )
    return Workload(init, loss, batch, tx)


# ---- ConvNeXt V2 with masks, Linen


class ResponseNorm(nn.Module):
    """Each channel by its norm over the image, beside that of the others."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        shift = self.param("shift", nn.initializers.zeros, x.shape[-1:])
        total = jnp.sqrt((f32(x) ** 2).sum((1, 2), keepdims=True) + 1e-12)
        ratio = total / (total.mean(-1, keepdims=True) + 1e-6)
        h = x * ratio.astype(self.dtype)
        return scale.astype(self.dtype) * h + shift.astype(self.dtype) + x


class ResponseBlock(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any = None) -> Any:
        width, dtype = x.shape[-1], self.dtype
        h = nn.Conv(width, (7, 7), feature_group_count=width, dtype=dtype)(x)
        h = h if mask is None else h * mask
        h = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(h)
        h = nn.gelu(nn.Dense(4 * width, dtype=dtype)(h), approximate=False)
        h = h if mask is None else h * mask
        h = nn.Dense(width, dtype=dtype)(ResponseNorm(dtype)(h))
        return x + (h if mask is None else h * mask)


class SparseConvNeXt(nn.Module):
    dtype: Any
    width: int

    @nn.compact
    def __call__(self, images: Any, kept: Any) -> Any:
        """Patches of 32 x 32 pixels; `kept` says which are seen, [size, n, n]."""
        dtype = self.dtype

        def mask(x: Any) -> Any:
            times = x.shape[1] // kept.shape[1]
            wide = jnp.repeat(jnp.repeat(kept, times, 1), times, 2)
            return wide[..., None].astype(dtype)

        x = images.astype(dtype)
        for i in range(4):
            width, stride = self.width * 2**i, 4 if i == 0 else 2
            if i:
                x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            x = nn.Conv(width, (stride, stride), stride, "VALID", dtype=dtype)(x)
            if i == 0:
                x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            x = x * mask(x)
            for _ in range(2 if i < 3 else 1):
                x = ResponseBlock(dtype)(x, mask(x))
        x = nn.Dense(4 * self.width, dtype=dtype)(x)
        token = self.param("token", nn.initializers.normal(0.02), x.shape[-1:])
        x = jnp.where(kept[..., None], x, token.astype(dtype))
        x = ResponseBlock(dtype)(x)
        return f32(nn.Dense(32 * 32 * 3, dtype=dtype)(x))


def sparse_convnext(
    dtype: Any, size: int = 64, side: int = 128, width: int = 64
) -> Workload:
    """ConvNeXt V2: a masked autoencoder of convolutions, and response norms."""
    count = side // 32

    def loss(apply: Any, batch: Any) -> Any:
        images, key = batch
        order = jax.random.uniform(key, (size, count * count)).argsort(-1).argsort(-1)
        kept = (order < 0.4 * count * count).reshape(size, count, count)
        found = apply(images, kept)
        wanted = images.reshape(size, count, 32, count, 32, 3)
        wanted = wanted.transpose(0, 1, 3, 2, 4, 5).reshape(found.shape)
        mean, var = wanted.mean(-1, keepdims=True), wanted.var(-1, keepdims=True)
        wanted = (wanted - mean) * jax.lax.rsqrt(var + 1e-6)
        each = ((found - wanted) ** 2).mean(-1)
        return jnp.where(kept, 0, each).sum() / (~kept).sum()

    def batch(key: Any) -> Any:
        return jax.random.normal(key, (size, side, side, 3)), key

    rates = optax.warmup_cosine_decay_schedule(0.0, 1.5e-4, 1000, 100000)
    tx = optax.adamw(rates, 0.9, 0.95, weight_decay=0.05)
    example = (jnp.zeros((1, side, side, 3)), jnp.ones((1, count, count), bool))
    return of_linen(SparseConvNeXt(dtype, width), example, loss, batch, tx)


# ---- retrieval by cached gradients, Haiku


class GradientCache(NamedTuple):
    """Questions and passages, each to find the other in a batch beyond the memory.

    All are embedded in chunks without gradients, then the loss is differentiated by
    the embeddings, then each chunk is embedded again to bring these back to weights.
    """

    dtype: Any
    size: int = 128
    chunk: int = 32
    words: tuple[int, int] = (32, 128)
    width: int = 384
    layers: int = 3
    vocabulary: int = 8192
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(2e-5, weight_decay=0.01)
    )

    def network(self, ids: Any) -> Any:
        """Embeddings of texts, of length one, in float32; 0 is no word."""
        dtype, width, (size, length) = self.dtype, self.width, ids.shape

        def norm(x: Any) -> Any:  # in float32
            return hk.LayerNorm(-1, True, True)(f32(x)).astype(dtype)

        def dropped(x: Any) -> Any:
            return hk.dropout(hk.next_rng_key(), 0.1, x)

        mask = ids > 0
        places = hk.get_parameter(
            "places", (512, width), init=hk.initializers.RandomNormal(0.02)
        )
        x = hk.Embed(self.vocabulary, width)(ids) + places[:length]
        x = dropped(norm(x.astype(dtype)))
        for _ in range(self.layers):
            parts = hk.Linear(3 * width)(x).reshape(size, length, 3, -1, 64)
            q, k, v = jnp.moveaxis(parts, 2, 0)
            scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / 8
            scores = jnp.where(mask[:, None, None], scores, -1e9)
            weights = dropped(jax.nn.softmax(scores).astype(dtype))
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = norm(x + dropped(hk.Linear(width)(h)))
            h = jax.nn.gelu(hk.Linear(4 * width)(x), approximate=False)
            x = norm(x + dropped(hk.Linear(width)(h)))
        total = jnp.where(mask[..., None], f32(x), 0).sum(1)
        x = total / mask.sum(1, keepdims=True)
        return x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-12)

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        net = hk.transform(self.network)
        *texts, key = batch

        def embed(params: Any, ids: Any, key: Any) -> Any:
            half = cast(params, self.dtype, lambda path: "layer_norm" in path)
            return net.apply(half, key, ids)

        def chunks(ids: Any, key: Any) -> Any:
            ids = ids.reshape(-1, self.chunk, ids.shape[-1])
            return ids, jax.random.split(key, len(ids))

        def contrast(questions: Any, passages: Any) -> Any:
            logits = questions @ passages.T / 0.05
            return cross_entropy(logits, jnp.arange(len(questions))).mean()

        parts = [
            chunks(ids, k) for ids, k in zip(texts, jax.random.split(key), strict=True)
        ]
        found = [jax.lax.map(lambda x: embed(params, *x), part) for part in parts]
        value, pulls = jax.value_and_grad(contrast, (0, 1))(
            *(x.reshape(-1, self.width) for x in found)
        )

        def add(total: Any, seen: Any) -> tuple[Any, None]:
            ids, key, pull = seen
            _, back = jax.vjp(lambda params: embed(params, ids, key), params)
            return jax.tree.map(jnp.add, total, back(pull)[0]), None

        grads = jax.tree.map(jnp.zeros_like, params)
        for part, pull in zip(parts, pulls, strict=True):
            pull = pull.reshape(-1, self.chunk, self.width)
            grads, _ = jax.lax.scan(add, grads, (*part, pull))
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        net = hk.transform(self.network)
        params = net.init(key, jnp.ones((1, 8), jnp.int32))

        def texts(count: int, length: int) -> Any:
            ids = jax.random.randint(key, (count, length), 1, self.vocabulary)
            lengths = jax.random.randint(key, (count, 1), length // 2, length + 1)
            return jnp.where(jnp.arange(length) < lengths, ids, 0)

        # behind the passages that answer are as many that do not
        batch = texts(self.size, self.words[0]), texts(2 * self.size, self.words[1])
        return params, self.optimizer.init(params), (*batch, key)


# ---- soft experts, Linen


class SoftExperts(nn.Module):
    """Each slot reads a weighted mean of the tokens, each token one of the slots."""

    dtype: Any
    experts: int
    slots: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, dtype = x.shape[-1], self.dtype
        init = nn.initializers.lecun_normal()
        phi = self.param("phi", init, (width, self.experts * self.slots))
        scale = self.param("scale", nn.initializers.ones, ())
        phi = scale * phi / jnp.sqrt((phi**2).sum(0) + 1e-12)
        length = jnp.sqrt((f32(x) ** 2).sum(-1, keepdims=True) + 1e-12)
        unit = (f32(x) / length).astype(dtype)
        logits = f32(jnp.einsum("bnd,ds->bns", unit, phi.astype(dtype)))
        dispatch = jax.nn.softmax(logits, 1).astype(dtype)
        combine = jax.nn.softmax(logits, 2).astype(dtype)
        h = jnp.einsum("bns,bnd->bsd", dispatch, x)
        h = h.reshape(len(x), self.experts, self.slots, width)
        init = nn.initializers.lecun_normal(batch_axis=0)
        for i, outs in enumerate((4 * width, width)):
            shape = (self.experts, h.shape[-1], outs)
            w = self.param(f"w{i}", init, shape).astype(dtype)
            b = self.param(f"b{i}", nn.initializers.zeros, (self.experts, 1, outs))
            h = jnp.einsum("besd,edf->besf", h, w) + b.astype(dtype)
            h = nn.gelu(h) if i == 0 else h
        return jnp.einsum("bns,bsd->bnd", combine, h.reshape(len(x), -1, width))


class SoftMixture(nn.Module):
    """A vision transformer whose last blocks have soft experts."""

    dtype: Any
    width: int
    experts: int
    classes: int

    @nn.compact
    def __call__(self, images: Any) -> Any:
        dtype, width = self.dtype, self.width
        x = nn.Conv(width, (16, 16), (16, 16), dtype=dtype)(images.astype(dtype))
        x = x.reshape(len(x), -1, width)
        init = nn.initializers.normal(0.02)
        x = x + self.param("places", init, x.shape[1:]).astype(dtype)
        for i in range(4):
            h = nn.LayerNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                width // 64, dtype=dtype, force_fp32_for_softmax=True
            )(h)
            h = nn.LayerNorm(dtype=dtype)(x)
            if i < 2:
                h = nn.gelu(nn.Dense(4 * width, dtype=dtype)(h))
                h = nn.Dense(width, dtype=dtype)(h)
            else:
                slots = x.shape[1] // self.experts
                h = SoftExperts(dtype, self.experts, slots)(h)
            x = x + h
        x = nn.LayerNorm(dtype=dtype)(x)
        return f32(nn.Dense(self.classes, dtype=dtype)(x.mean(1)))


def soft_experts(
    dtype: Any,
    size: int = 64,
    side: int = 256,
    width: int = 384,
    experts: int = 16,
    classes: int = 4096,
) -> Workload:
    """Soft MoE: a vision transformer with experts of mixed tokens, many labels."""

    def loss(apply: Any, batch: Any) -> Any:
        images, labels = batch
        logits = apply(images)
        wanted = jax.nn.one_hot(labels, classes).sum(1)
        return optax.sigmoid_binary_cross_entropy(logits, wanted).sum(-1).mean()

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (size, 3), 0, classes)
        return jax.random.normal(key, (size, side, side, 3)), labels

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1)
    )
    example = (jnp.zeros((1, side, side, 3)),)
    model = SoftMixture(dtype, width, experts, classes)
    return of_linen(model, example, loss, batch, tx)
