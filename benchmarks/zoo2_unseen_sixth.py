"""Train steps of families that the other zoos lack: pictures, speech, flows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, cross_entropy
from zoo2_libraries import cast
from zoo2_unseen_third import f32

# ---- a controlled diffusion model, Linen


class TimedBlock(nn.Module):
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        def conv(x: Any) -> Any:
            return nn.Conv(self.width, (3, 3), dtype=self.dtype)(x)

        h = conv(nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x)))
        h = h + nn.Dense(self.width, dtype=self.dtype)(time)[:, None, None]
        h = conv(nn.silu(nn.GroupNorm(32, dtype=self.dtype)(h)))
        if x.shape[-1] != self.width:
            x = nn.Dense(self.width, dtype=self.dtype)(x)
        return x + h


class CrossBlock(nn.Module):
    """Attention among the pixels, then to the text, then a gated network."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, text: Any) -> Any:
        size, rows, columns, width = x.shape

        def attend(x: Any, y: Any) -> Any:
            return nn.MultiHeadDotProductAttention(
                4, dtype=self.dtype, force_fp32_for_softmax=True
            )(x, y)

        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=self.dtype)(x)

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, dtype=self.dtype)

        h = nn.GroupNorm(32, dtype=self.dtype)(x)
        h = dense(width)(h.reshape(size, rows * columns, width))
        h = h + attend(norm(h), norm(h))
        h = h + attend(norm(h), text)
        a, b = jnp.split(dense(8 * width)(norm(h)), 2, -1)
        h = h + dense(width)(a * nn.gelu(b))
        return x + dense(width)(h).reshape(x.shape)


class Encoder(nn.Module):
    """The first half, of which the control has a copy."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, hint: Any, time: Any, text: Any) -> tuple[Any, Any]:
        rates = jnp.exp(-math.log(1e4) * jnp.arange(64) / 64)
        angles = time[:, None] * rates
        t = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        t = nn.silu(nn.Dense(512, dtype=self.dtype)(t.astype(self.dtype)))
        t = nn.silu(nn.Dense(512, dtype=self.dtype)(t))
        x = nn.Conv(128, (3, 3), dtype=self.dtype)(x.astype(self.dtype)) + hint
        skips = [x]
        x = TimedBlock(128, self.dtype)(x, t)
        skips.append(x)
        x = nn.Conv(128, (3, 3), (2, 2), dtype=self.dtype)(x)
        skips.append(x)
        x = CrossBlock(self.dtype)(TimedBlock(256, self.dtype)(x, t), text)
        skips.append(x)
        x = nn.Conv(256, (3, 3), (2, 2), dtype=self.dtype)(x)
        skips.append(x)
        x = CrossBlock(self.dtype)(TimedBlock(256, self.dtype)(x, t), text)
        return x, (skips, t)


class Decoder(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, skips: Any, time: Any, text: Any) -> Any:
        def join(x: Any, skip: Any, width: int) -> Any:
            return TimedBlock(width, self.dtype)(jnp.concatenate([x, skip], -1), time)

        def up(x: Any) -> Any:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            return nn.Conv(x.shape[-1], (3, 3), dtype=self.dtype)(x)

        skips = list(skips)
        x = up(join(x, skips.pop(), 256))
        x = CrossBlock(self.dtype)(join(x, skips.pop(), 256), text)
        x = up(join(x, skips.pop(), 256))
        x = join(join(x, skips.pop(), 128), skips.pop(), 128)
        x = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))
        return f32(nn.Conv(4, (3, 3), dtype=self.dtype)(x))


class Control(nn.Module):
    """A copy of the encoder that sees a hint, behind convolutions that begin at 0."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, hint: Any, time: Any, text: Any) -> tuple[Any, Any]:
        h = hint.astype(self.dtype)
        for width, stride in ((16, 1), (32, 2), (64, 1), (96, 2)):
            strides = (stride, stride)
            h = nn.silu(nn.Conv(width, (3, 3), strides, dtype=self.dtype)(h))

        def zero(x: Any) -> Any:
            return nn.Dense(
                x.shape[-1], dtype=self.dtype, kernel_init=nn.initializers.zeros
            )(x)

        h = nn.Conv(128, (3, 3), dtype=self.dtype, kernel_init=nn.initializers.zeros)(h)
        x, (skips, _) = Encoder(self.dtype)(x, h, time, text)
        return zero(x), [zero(s) for s in skips]


def controlled(dtype: Any, size: int = 8, side: int = 64) -> Workload:
    """ControlNet: gradients flow through a frozen network into what steers it."""
    control, encoder, decoder = Control(dtype), Encoder(dtype), Decoder(dtype)
    schedule = jnp.cumprod(1 - jnp.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)

    def init(key: Any) -> Any:
        x, time = jnp.zeros((1, 16, 16, 4)), jnp.zeros((1,))
        hint, text = jnp.zeros((1, 64, 64, 3)), jnp.zeros((1, 77, 512))
        params = control.init(key, x, hint, time, text)["params"]
        none = jnp.zeros((1, 16, 16, 128))
        (h, (skips, t)), first = encoder.init_with_output(key, x, none, time, text)
        last = decoder.init(key, h, skips, t, text)["params"]
        return params, {"encoder": first["params"], "decoder": last}

    def loss(params: Any, state: Any, batch: Any) -> Any:
        clean, noise, time, hint, text = batch
        level = schedule[time][:, None, None, None]
        x = jnp.sqrt(level) * clean + jnp.sqrt(1 - level) * noise
        time, text = time.astype(jnp.float32), text.astype(dtype)
        steered, sides = control.apply({"params": params}, x, hint, time, text)
        none = jnp.zeros((), dtype)
        h, (skips, t) = encoder.apply({"params": state["encoder"]}, x, none, time, text)
        skips = [a + b for a, b in zip(skips, sides, strict=True)]
        out = decoder.apply({"params": state["decoder"]}, h + steered, skips, t, text)
        return ((out - noise) ** 2).mean(), state

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, (size, side, side, 4))
        hint = jax.random.uniform(key, (size, 4 * side, 4 * side, 3))
        text = jax.random.normal(key, (size, 77, 512))
        return x, x[::-1], jax.random.randint(key, (size,), 0, 1000), hint, text

    return Workload(init, loss, batch, optax.adamw(1e-5))


# ---- StyleGAN2, Equinox


def leaky(x: Any) -> Any:
    return jax.nn.leaky_relu(x, 0.2) * math.sqrt(2)


class Equal(eqx.Module):
    """A product whose weight is scaled when it is read."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, inputs: int, outs: int, bias: float, key: Any) -> None:
        self.weight = jax.random.normal(key, (outs, inputs))
        self.bias = jnp.full((outs,), bias)

    def __call__(self, x: Any) -> Any:
        return (self.weight * self.weight.shape[1] ** -0.5) @ x + self.bias


class EqualConv(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __init__(self, inputs: int, outs: int, kernel: int, key: Any) -> None:
        self.weight = jax.random.normal(key, (outs, inputs, kernel, kernel))
        self.bias = jnp.zeros((outs, 1, 1))

    def __call__(self, x: Any) -> Any:
        kernel = self.weight * math.prod(self.weight.shape[1:]) ** -0.5
        return jax.lax.conv(x[None], kernel, (1, 1), "SAME")[0] + self.bias


class Modulated(eqx.Module):
    """A convolution of scaled channels, whose results are scaled back."""

    weight: jax.Array
    affine: Equal
    demodulate: bool = eqx.field(static=True)

    def __init__(
        self, inputs: int, outs: int, kernel: int, demodulate: bool, key: Any
    ) -> None:
        a, b = jax.random.split(key)
        self.weight = jax.random.normal(a, (outs, inputs, kernel, kernel))
        self.affine = Equal(512, inputs, 1.0, b)
        self.demodulate = demodulate

    def __call__(self, x: Any, w: Any) -> Any:
        kernel = self.weight * math.prod(self.weight.shape[1:]) ** -0.5
        scale = self.affine(w)
        y = jax.lax.conv(x[None] * scale[:, None, None], kernel, (1, 1), "SAME")[0]
        if self.demodulate:
            square = (f32(kernel) ** 2).sum((2, 3)) @ f32(scale) ** 2
            y = y * jax.lax.rsqrt(square + 1e-8).astype(y.dtype)[:, None, None]
        return y


def doubled(x: Any) -> Any:
    shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2])
    return jax.image.resize(x, shape, "bilinear")


class StyledConv(eqx.Module):
    conv: Modulated
    strength: jax.Array
    bias: jax.Array

    def __init__(self, inputs: int, outs: int, key: Any) -> None:
        self.conv = Modulated(inputs, outs, 3, True, key)
        self.strength = jnp.zeros(())
        self.bias = jnp.zeros((outs, 1, 1))

    def __call__(self, x: Any, w: Any, key: Any) -> Any:
        y = self.conv(x, w)
        noise = jax.random.normal(key, y.shape[1:]).astype(y.dtype)
        return leaky(y + self.strength * noise + self.bias)


class StyleGenerator(eqx.Module):
    mapping: list[Equal]
    start: jax.Array
    first: StyledConv
    blocks: list[Any]
    colors: list[Any]

    def __init__(self, key: Any) -> None:
        keys = iter(jax.random.split(key, 32))
        self.mapping = [Equal(512, 512, 0.0, next(keys)) for _ in range(4)]
        self.start = jax.random.normal(next(keys), (256, 4, 4))
        self.first = StyledConv(256, 256, next(keys))
        self.blocks, self.colors = [], [Modulated(256, 3, 1, False, next(keys))]
        inputs = 256
        for width in (256, 256, 128, 64):
            convs = (
                StyledConv(inputs, width, next(keys)),
                StyledConv(width, width, next(keys)),
            )
            self.blocks.append(convs)
            self.colors.append(Modulated(width, 3, 1, False, next(keys)))
            inputs = width

    def __call__(self, z: Any, key: Any) -> Any:
        keys = iter(jax.random.split(key, 9))
        w = f32(z) * jax.lax.rsqrt((f32(z) ** 2).mean() + 1e-8)
        w = w.astype(self.start.dtype)
        for layer in self.mapping:
            w = leaky(layer(w))
        x = self.first(self.start, w, next(keys))
        image = f32(self.colors[0](x, w))
        for (up, conv), color in zip(self.blocks, self.colors[1:], strict=True):
            x = conv(up(doubled(x), w, next(keys)), w, next(keys))
            image = doubled(image) + f32(color(x, w))
        return image


class StyleDiscriminator(eqx.Module):
    first: EqualConv
    blocks: list[Any]
    last: EqualConv
    hidden: Equal
    out: Equal

    def __init__(self, key: Any) -> None:
        keys = iter(jax.random.split(key, 32))
        self.first, self.blocks = EqualConv(3, 64, 1, next(keys)), []
        inputs = 64
        for width in (128, 256, 256, 256):
            self.blocks.append(
                (
                    EqualConv(inputs, inputs, 3, next(keys)),
                    EqualConv(inputs, width, 3, next(keys)),
                    EqualConv(inputs, width, 1, next(keys)),
                )
            )
            inputs = width
        self.last = EqualConv(257, 256, 3, next(keys))
        self.hidden = Equal(4096, 256, 0.0, next(keys))
        self.out = Equal(256, 1, 0.0, next(keys))

    def trunk(self, x: Any) -> Any:
        def half(x: Any) -> Any:
            return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2).mean(
                (2, 4)
            )

        x = leaky(self.first(x))
        for first, second, short in self.blocks:
            h = half(leaky(second(leaky(first(x)))))
            x = (h + short(half(x))) * math.sqrt(0.5)
        return x

    def __call__(self, images: Any) -> Any:
        x = jax.vmap(self.trunk)(images)
        groups = f32(x).reshape(4, -1, *x.shape[1:])
        groups = groups - groups.mean(0)
        spread = jnp.sqrt((groups**2).mean(0) + 1e-8).mean((1, 2, 3))
        spread = jnp.tile(spread, 4)[:, None, None, None].astype(x.dtype)
        x = jnp.concatenate([x, jnp.broadcast_to(spread, (len(x), 1, 4, 4))], 1)

        def head(x: Any) -> Any:
            x = leaky(self.last(x)).reshape(-1)
            return f32(self.out(leaky(self.hidden(x))))[0]

        return jax.vmap(head)(x)


class StyleGan(NamedTuple):
    """A discriminator with a penalty of its gradient, a generator, its average."""

    dtype: Any
    size: int = 32
    optimizer: Any = optax.adam(2e-3, 0.0, 0.99)

    def step(self, params: Any, opt_state: Any, average: Any, batch: Any) -> Any:
        shapes = eqx.filter_eval_shape(StyleGenerator, jax.random.key(0))
        judge = eqx.filter_eval_shape(StyleDiscriminator, jax.random.key(0))
        static, judge_static = (
            eqx.partition(m, lambda x: hasattr(x, "shape"))[1] for m in (shapes, judge)
        )
        real, z, key = batch
        key_d, key_g = jax.random.split(key)

        def generate(params: Any, z: Any, key: Any) -> Any:
            model = eqx.combine(cast(params, self.dtype), static)
            return jax.vmap(model)(z.astype(self.dtype), jax.random.split(key, len(z)))

        def score(params: Any, images: Any) -> Any:
            model = eqx.combine(cast(params, self.dtype), judge_static)
            return model(images.astype(self.dtype))

        def loss_d(params_d: Any) -> Any:
            fake = jax.lax.stop_gradient(generate(params["g"], z[0], key_d))
            seen, pull = jax.vjp(lambda x: score(params_d, x), real)
            (slope,) = pull(jnp.ones_like(seen))
            penalty = (slope**2).sum((1, 2, 3)).mean()
            value = jax.nn.softplus(score(params_d, fake)).mean()
            return value + jax.nn.softplus(-seen).mean() + 0.5 * penalty

        def loss_g(params_g: Any, params_d: Any) -> Any:
            fake = generate(params_g, z[1], key_g)
            return jax.nn.softplus(-score(params_d, fake)).mean()

        value_d, grads = jax.value_and_grad(loss_d)(params["d"])
        updates, state_d = self.optimizer.update(grads, opt_state["d"])
        params_d = optax.apply_updates(params["d"], updates)
        value_g, grads = jax.value_and_grad(loss_g)(params["g"], params_d)
        updates, state_g = self.optimizer.update(grads, opt_state["g"])
        params_g = optax.apply_updates(params["g"], updates)
        average = optax.incremental_update(params_g, average, 1e-3)
        params, opt_state = {"g": params_g, "d": params_d}, {"g": state_g, "d": state_d}
        return params, opt_state, average, (value_d, value_g)

    def arguments(self) -> Any:
        def make(key: Any) -> Any:
            params = {
                "g": eqx.filter(StyleGenerator(key), eqx.is_array),
                "d": eqx.filter(StyleDiscriminator(key), eqx.is_array),
            }
            state = {name: self.optimizer.init(p) for name, p in params.items()}
            real = jax.random.normal(key, (self.size, 3, 64, 64))
            z = jax.random.normal(key, (2, self.size, 512))
            return params, state, params["g"], (real, z, key)

        return jax.eval_shape(make, jax.random.key(0))


# ---- speech synthesis, Linen


class SpeechBlock(nn.Module):
    """Attention, and two convolutions along the time."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any, key: Any) -> Any:
        a, b = jax.random.split(key)

        def drop(x: Any, key: Any) -> Any:
            return nn.Dropout(0.2, deterministic=False)(x, rng=key)

        h = nn.MultiHeadDotProductAttention(
            2, dtype=self.dtype, force_fp32_for_softmax=True
        )(x, mask=mask[:, None, None])
        x = nn.LayerNorm(dtype=self.dtype)(x + drop(h, a))
        h = nn.relu(nn.Conv(1024, (9,), dtype=self.dtype)(x))
        h = nn.Conv(x.shape[-1], (1,), dtype=self.dtype)(h)
        x = nn.LayerNorm(dtype=self.dtype)(x + drop(h, b))
        return jnp.where(mask[..., None], x, 0)


class Predictor(nn.Module):
    """One number for each place."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, key: Any) -> Any:
        for k in jax.random.split(key):
            x = nn.relu(nn.Conv(256, (3,), dtype=self.dtype)(x))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            x = nn.Dropout(0.5, deterministic=False)(x, rng=k)
        return f32(nn.Dense(1, dtype=self.dtype)(x))[..., 0]


class Synthesis(nn.Module):
    dtype: Any
    frames: int

    @nn.compact
    def __call__(
        self, ids: Any, lengths: Any, pitch: Any, energy: Any, key: Any
    ) -> tuple[Any, ...]:
        keys = iter(jax.random.split(key, 16))

        def places(n: int) -> Any:
            angles = jnp.arange(n)[:, None] * 1e4 ** -(jnp.arange(128) / 128)
            table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
            return table.astype(self.dtype)

        mask = ids > 0
        x = nn.Embed(128, 256, dtype=self.dtype)(ids) + places(ids.shape[1])
        for _ in range(2):
            x = SpeechBlock(self.dtype)(x, mask, next(keys))
        log_length = Predictor(self.dtype)(x, next(keys))
        # each phoneme as often as it lasts
        ends = jnp.cumsum(jnp.where(mask, lengths, 0), 1)
        time = jnp.arange(self.frames)
        index = (ends[:, None] <= time[:, None]).sum(-1)
        seen = time < ends[:, -1:]
        index = jnp.minimum(index, ids.shape[1] - 1)
        x = jnp.take_along_axis(x, index[..., None], 1)
        x = jnp.where(seen[..., None], x, 0)
        found_pitch = Predictor(self.dtype)(x, next(keys))
        bins = jnp.linspace(-3, 3, 255)
        x = x + nn.Embed(256, 256, dtype=self.dtype)(jnp.digitize(pitch, bins))
        found_energy = Predictor(self.dtype)(x, next(keys))
        x = x + nn.Embed(256, 256, dtype=self.dtype)(jnp.digitize(energy, bins))
        x = x + places(self.frames)
        for _ in range(3):
            x = SpeechBlock(self.dtype)(x, seen, next(keys))
        first = nn.Dense(80, dtype=self.dtype)(x)
        h = first
        for i in range(4):
            h = nn.Conv(512 if i < 3 else 80, (5,), dtype=self.dtype)(h)
            h = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(h)
            h = nn.tanh(h) if i < 3 else h
            h = nn.Dropout(0.5, deterministic=False)(h, rng=next(keys))
        first = f32(first)
        return first, first + f32(h), log_length, found_pitch, found_energy, seen


def synthesis(dtype: Any, size: int = 16, frames: int = 768) -> Workload:
    """FastSpeech 2: mel spectra, lengths, pitch and energy."""
    model, phonemes = Synthesis(dtype, frames), frames // 6

    def init(key: Any) -> Any:
        ids, line = jnp.ones((2, 8), jnp.int32), jnp.zeros((2, frames))
        found = model.init(key, ids, ids, line, line, key)
        return found["params"], found["batch_stats"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, lengths, pitch, energy, mel, key = batch
        out, new = model.apply(
            {"params": params, "batch_stats": state},
            *(ids, lengths, pitch, energy, key),
            mutable=["batch_stats"],
        )
        first, second, log_length, found_pitch, found_energy, seen = out

        def mean(x: Any, mask: Any) -> Any:
            return jnp.where(mask, x, 0.0).sum() / mask.sum()

        value = mean(jnp.abs(first - mel).mean(-1), seen)
        value += mean(jnp.abs(second - mel).mean(-1), seen)
        value += mean((log_length - jnp.log1p(lengths)) ** 2, ids > 0)
        value += mean((found_pitch - pitch) ** 2, seen)
        return value + mean((found_energy - energy) ** 2, seen), new["batch_stats"]

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (size, phonemes), 1, 128)
        counts = jax.random.randint(key, (size, 1), phonemes // 2, phonemes + 1)
        ids = jnp.where(jnp.arange(phonemes) < counts, ids, 0)
        lengths = jax.random.randint(key, (size, phonemes), 2, 7)
        pitch = jax.random.normal(key, (size, frames))
        mel = jax.random.normal(key, (size, frames, 80))
        return ids, lengths, pitch, pitch[::-1], mel, key

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, 0.9, 0.98, 1e-9))
    return Workload(init, loss, batch, tx)


# ---- a ladder of latents, Equinox


class Bottleneck(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    residual: bool = eqx.field(static=True)

    def __init__(self, inputs: int, outs: int, residual: bool, key: Any) -> None:
        keys, middle = jax.random.split(key, 4), max(inputs, outs) // 4
        shapes = ((inputs, middle, 1), (middle, middle, 3), (middle, middle, 3))
        self.convs = [
            eqx.nn.Conv2d(a, b, k, padding=k // 2, key=key)
            for (a, b, k), key in zip((*shapes, (middle, outs, 1)), keys, strict=True)
        ]
        self.residual = residual

    def __call__(self, x: Any) -> Any:
        h = x
        for conv in self.convs:
            h = conv(jax.nn.gelu(h))
        return x + h if self.residual else h


class Rung(eqx.Module):
    posterior: Bottleneck
    prior: Bottleneck
    project: eqx.nn.Conv2d
    block: Bottleneck

    def __init__(self, width: int, key: Any) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.posterior = Bottleneck(2 * width, 32, False, a)
        self.prior = Bottleneck(width, 32 + width, False, b)
        self.project = eqx.nn.Conv2d(16, width, 1, key=c)
        self.block = Bottleneck(width, width, True, d)

    def __call__(self, x: Any, seen: Any, key: Any) -> tuple[Any, Any]:
        q = f32(self.posterior(jnp.concatenate([x, seen])))
        h = self.prior(x)
        p, h = f32(h[:32]), h[32:]
        (qm, qs), (pm, ps) = jnp.split(q, 2), jnp.split(p, 2)
        z = qm + jnp.exp(qs) * jax.random.normal(key, qm.shape)
        apart = 0.5 * (jnp.exp(2 * qs) + (qm - pm) ** 2) * jnp.exp(-2 * ps)
        x = x + h + self.project(z.astype(x.dtype))
        return self.block(x), (apart + ps - qs - 0.5).sum()


class Ladder(eqx.Module):
    first: eqx.nn.Conv2d
    up: list[Any]
    start: jax.Array
    down: list[Any]
    scale: jax.Array
    out: eqx.nn.Conv2d

    def __init__(self, key: Any) -> None:
        keys, width = iter(jax.random.split(key, 32)), 192
        self.first = eqx.nn.Conv2d(3, width, 3, padding=1, key=next(keys))
        self.up = [
            [Bottleneck(width, width, True, next(keys)) for _ in range(2)]
            for _ in range(3)
        ]
        self.start = jnp.zeros((width, 8, 8))
        self.down = [[Rung(width, next(keys)) for _ in range(2)] for _ in range(3)]
        self.scale = jnp.ones((width, 1, 1))
        self.out = eqx.nn.Conv2d(width, 6, 1, key=next(keys))

    def __call__(self, image: Any, key: Any) -> tuple[Any, Any]:
        x, levels = self.first(image), []
        for i, blocks in enumerate(self.up):
            if i:
                sides = x.shape[1] // 2
                x = x.reshape(len(x), sides, 2, sides, 2).mean((2, 4))
            for block in blocks:
                x = block(x)
            levels.append(x)
        keys = iter(jax.random.split(key, 8))
        x, total = self.start, 0.0
        for i, rungs in enumerate(self.down):
            if i:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            for rung in rungs:
                x, apart = rung(x, levels[2 - i], next(keys))
                total = total + apart
        return f32(self.out(x * self.scale)), total


def ladder(dtype: Any, size: int = 64) -> Workload:
    """A very deep VAE: six levels of latents, discretized logistics."""
    _, static = eqx.partition(
        eqx.filter_eval_shape(Ladder, jax.random.key(0)), lambda x: hasattr(x, "shape")
    )

    def init(key: Any) -> Any:
        return eqx.filter(Ladder(key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, key = batch
        x = images.astype(jnp.float32) / 127.5 - 1
        model = eqx.combine(cast(params, dtype), static)
        keys = jax.random.split(key, len(x))
        out, total = jax.vmap(model)(x.astype(dtype), keys)
        mean, scale = out[:, :3], jnp.maximum(out[:, 3:], -7.0)
        apart, inverse = x - mean, jnp.exp(-scale)
        above = jax.nn.sigmoid(inverse * (apart + 1 / 255))
        below = jax.nn.sigmoid(inverse * (apart - 1 / 255))
        above = jnp.where(x > 0.999, 1.0, above)
        below = jnp.where(x < -0.999, 0.0, below)
        likelihood = jnp.log(jnp.maximum(above - below, 1e-10)).sum((1, 2, 3))
        return (total - likelihood).mean() / x[0].size, state

    def batch(key: Any) -> Any:
        x = jax.random.randint(key, (size, 3, 32, 32), 0, 256)
        return x.astype(jnp.uint8), key

    tx = optax.chain(optax.clip_by_global_norm(200.0), optax.adamw(2e-4, 0.9, 0.9))
    return Workload(init, loss, batch, optax.apply_if_finite(tx, 10))


# ---- quantization in training, Linen


def rounded(x: Any, step: Any, low: int, high: int) -> Any:
    """Integers times a learnt step, straight through; in float32."""
    stop = jax.lax.stop_gradient
    rate = (x.size * high) ** -0.5
    step = step * rate + stop(step - step * rate)
    q = jnp.clip(f32(x) / step, low, high)
    return (q + stop(jnp.round(q) - q)) * step


class QuantizedConv(nn.Module):
    width: int
    kernel: int
    stride: int
    dtype: Any
    alone: bool = False  # each channel
    relu: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        groups = x.shape[-1] if self.alone else 1
        shape = (self.kernel, self.kernel, x.shape[-1] // groups, self.width)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        constant = nn.initializers.constant
        step = self.param("step", constant(0.01), (self.width,))
        spread = self.param("spread", constant(0.05), ())
        x = rounded(x, spread, -128, 127).astype(self.dtype)
        y = jax.lax.conv_general_dilated(
            x,
            rounded(kernel, step, -128, 127).astype(self.dtype),
            (self.stride, self.stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        y = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)
        return jax.nn.relu6(y) if self.relu else y


class MobileNet(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def conv(x: Any, width: int, kernel: int, stride: int = 1, **kw: Any) -> Any:
            return QuantizedConv(width, kernel, stride, self.dtype, **kw)(x)

        x = conv(x, 32, 3, 2)
        blocks = ((1, 16, 1), (6, 24, 2), (6, 24, 1), (6, 32, 2), (6, 32, 1),
                  (6, 64, 2), (6, 64, 1), (6, 96, 1))  # fmt: skip
        for expand, width, stride in blocks:
            h, wide = x, expand * x.shape[-1]
            h = conv(h, wide, 1) if expand > 1 else h
            h = conv(h, wide, 3, stride, alone=True)
            h = conv(h, width, 1, relu=False)
            x = x + h if h.shape == x.shape else h
        x = conv(x, 640, 1).mean((1, 2))
        return f32(nn.Dense(1000, dtype=self.dtype)(x))


def integers(dtype: Any, size: int = 64) -> Workload:
    """MobileNetV2 whose weights and activations are rounded to eight bits (LSQ)."""
    model = MobileNet(dtype)

    def init(key: Any) -> Any:
        found = model.init(key, jnp.zeros((2, 32, 32, 3)))
        return found["params"], found["batch_stats"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, labels = batch
        logits, new = model.apply(
            {"params": params, "batch_stats": state}, x, mutable=["batch_stats"]
        )
        return cross_entropy(logits, labels).mean(), new["batch_stats"]

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (size,), 0, 1000)
        return jax.random.normal(key, (size, 128, 128, 3)), labels

    tx = optax.sgd(optax.cosine_decay_schedule(0.01, 100000), 0.9, nesterov=True)
    return Workload(init, loss, batch, tx)


# ---- a continuous flow, Equinox


class Field(eqx.Module):
    """Where a picture moves at a time."""

    convs: list[eqx.nn.Conv2d]

    def __init__(self, key: Any) -> None:
        keys, widths = jax.random.split(key, 4), (3, 64, 64, 64, 3)
        self.convs = [
            eqx.nn.Conv2d(widths[i] + 1, widths[i + 1], 3, padding=1, key=keys[i])
            for i in range(4)
        ]

    def __call__(self, t: Any, x: Any) -> Any:
        dtype = self.convs[0].weight.dtype
        h, time = x.astype(dtype), jnp.full((1, *x.shape[1:]), t, dtype)
        for i, conv in enumerate(self.convs):
            h = jax.nn.softplus(h) if i else h
            h = conv(jnp.concatenate([h, time]))
        return f32(h)


def continuous(dtype: Any, size: int = 64, steps: int = 6) -> Workload:
    """FFJORD: Runge-Kutta steps, an estimated divergence, kinetic energies."""
    static = eqx.filter_eval_shape(Field, jax.random.key(0))
    _, static = eqx.partition(static, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(Field(key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, noise, probe = batch
        field = eqx.combine(cast(params, dtype), static)
        x = (images.astype(jnp.float32) + noise) / 256
        x = 0.05 + 0.9 * x
        volume = (-jnp.log(x) - jnp.log1p(-x)).sum((1, 2, 3))
        x = jnp.log(x) - jnp.log1p(-x)

        def slope(t: Any, y: Any) -> Any:
            def one(x: Any, probe: Any) -> Any:
                out, pull = jax.vjp(lambda x: field(t, x), x)
                (back,) = pull(probe)
                return out, (back * probe).sum(), (out**2).mean() + (back**2).mean()

            return jax.vmap(one)(y[0], probe)

        def advance(y: Any, t: Any) -> Any:
            h = 1 / steps

            def moved(k: Any, by: float) -> Any:
                return jax.tree.map(lambda a, b: a + by * b, y, k)

            a = slope(t, y)
            b = slope(t + h / 2, moved(a, h / 2))
            c = slope(t + h / 2, moved(b, h / 2))
            d = slope(t + h, moved(c, h))
            return jax.tree.map(
                lambda y, a, b, c, d: y + h / 6 * (a + 2 * b + 2 * c + d), y, a, b, c, d
            ), None

        zeros = jnp.zeros(len(x))
        times = jnp.arange(steps) / steps
        y, _ = jax.lax.scan(jax.checkpoint(advance), (x, zeros, zeros), times)
        z, trace, energy = y
        log_p = jax.scipy.stats.norm.logpdf(z).sum((1, 2, 3)) + trace + volume
        return (0.01 * energy - log_p / x[0].size).mean(), state

    def batch(key: Any) -> Any:
        shape = (size, 3, 32, 32)
        x = jax.random.randint(key, shape, 0, 256).astype(jnp.uint8)
        return (
            x,
            jax.random.uniform(key, shape),
            jax.random.rademacher(key, shape, jnp.float32),
        )

    tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3))
    return Workload(init, loss, batch, tx)
