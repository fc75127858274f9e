"""Train steps of families that the other zoos lack: mixtures of sounds, teams, tours.

Each size is an argument, so that the step also runs small, on a CPU.
"""

from __future__ import annotations

import functools
import itertools
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

# ---- separation of speakers, Linen


class DilatedBlock(nn.Module):
    """A depthwise convolution between two products, norms over all of the time."""

    dtype: Any
    inner: int
    dilation: int

    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        width, dtype = x.shape[-1], self.dtype
        h = nn.PReLU()(nn.Dense(self.inner, dtype=dtype)(x))
        h = nn.GroupNorm(1, dtype=dtype)(h)
        h = nn.Conv(
            self.inner,
            (3,),
            kernel_dilation=self.dilation,
            feature_group_count=self.inner,
            dtype=dtype,
        )(h)
        h = nn.GroupNorm(1, dtype=dtype)(nn.PReLU()(h))
        return x + nn.Dense(width, dtype=dtype)(h), nn.Dense(width, dtype=dtype)(h)


class Separation(nn.Module):
    dtype: Any
    filters: int
    width: int
    inner: int
    repeats: int
    depth: int
    speakers: int

    @nn.compact
    def __call__(self, sound: Any) -> Any:
        """Sounds of each speaker, f32[size, speakers, samples]."""
        dtype, (size, samples) = self.dtype, sound.shape
        encode = nn.Conv(self.filters, (16,), (8,), use_bias=False, dtype=dtype)
        coded = nn.relu(encode(sound[..., None]))
        x = nn.Dense(self.width, dtype=dtype)(nn.GroupNorm(1, dtype=dtype)(coded))
        total = jnp.zeros_like(x)
        for _ in range(self.repeats):
            for i in range(self.depth):
                x, skip = DilatedBlock(dtype, self.inner, 2**i)(x)
                total = total + skip
        masks = nn.Dense(self.speakers * self.filters, dtype=dtype)(nn.PReLU()(total))
        masks = nn.sigmoid(masks).reshape(*x.shape[:2], self.speakers, -1)
        each = (coded[:, :, None] * masks).swapaxes(1, 2)
        each = each.reshape(size * self.speakers, -1, self.filters)
        decode = nn.ConvTranspose(1, (16,), (8,), use_bias=False, dtype=dtype)
        return f32(decode(each)).reshape(size, self.speakers, samples)


def separation(
    dtype: Any,
    size: int = 4,
    samples: int = 32000,
    filters: int = 512,
    width: int = 128,
    inner: int = 512,
    repeats: int = 2,
    depth: int = 5,
    speakers: int = 2,
) -> Workload:
    """Conv-TasNet: who is who in a mixture is what fits best."""
    orders = np.array(list(itertools.permutations(range(speakers))))

    def ratio(found: Any, wanted: Any) -> Any:
        """Signal to noise whatever the scale, in decibels."""
        found = found - found.mean(-1, keepdims=True)
        wanted = wanted - wanted.mean(-1, keepdims=True)
        square = (wanted**2).sum(-1, keepdims=True)
        part = (found * wanted).sum(-1, keepdims=True) / (square + 1e-8) * wanted
        rest = ((found - part) ** 2).sum(-1)
        return 10 / np.log(10) * jnp.log((part**2).sum(-1) / (rest + 1e-8) + 1e-8)

    def loss(apply: Any, batch: Any) -> Any:
        found = apply(batch.sum(1))
        pairs = ratio(found[:, :, None], batch[:, None])
        each = pairs[:, np.arange(speakers), orders].mean(-1)
        return -each.max(-1).mean()

    def batch(key: Any) -> Any:
        return jax.random.normal(key, (size, speakers, samples))

    model = Separation(dtype, filters, width, inner, repeats, depth, speakers)
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3))
    return of_linen(model, (jnp.zeros((1, samples)),), loss, batch, tx)


# ---- pictures from one domain to another and back, Equinox


def instance_norm(x: Any) -> Any:
    """Of one picture, [channels, rows, columns]; statistics in float32."""
    y = f32(x)
    y = y - y.mean((1, 2), keepdims=True)
    y = y * jax.lax.rsqrt((y**2).mean((1, 2), keepdims=True) + 1e-5)
    return y.astype(x.dtype)


def reflected(x: Any, n: int) -> Any:
    return jnp.pad(x, ((0, 0), (n, n), (n, n)), "reflect")


class Painter(eqx.Module):
    """Down, residual blocks, and up again."""

    first: eqx.nn.Conv2d
    down: list[eqx.nn.Conv2d]
    blocks: list[list[eqx.nn.Conv2d]]
    up: list[eqx.nn.ConvTranspose2d]
    last: eqx.nn.Conv2d

    def __init__(self, width: int, depth: int, key: Any) -> None:
        conv, keys = eqx.nn.Conv2d, iter(jax.random.split(key, 2 * depth + 6))
        self.first = conv(3, width, 7, key=next(keys))
        self.down = [
            conv(width << i, width << i + 1, 3, 2, 1, key=next(keys)) for i in (0, 1)
        ]
        self.blocks = [
            [conv(4 * width, 4 * width, 3, key=next(keys)) for _ in range(2)]
            for _ in range(depth)
        ]
        self.up = [
            eqx.nn.ConvTranspose2d(
                width << i + 1, width << i, 3, 2, 1, 1, key=next(keys)
            )
            for i in (1, 0)
        ]
        self.last = conv(width, 3, 7, key=next(keys))

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(instance_norm(self.first(reflected(x, 3))))
        for conv in self.down:
            x = jax.nn.relu(instance_norm(conv(x)))
        for one, two in self.blocks:
            h = jax.nn.relu(instance_norm(one(reflected(x, 1))))
            x = x + instance_norm(two(reflected(h, 1)))
        for conv in self.up:
            x = jax.nn.relu(instance_norm(conv(x)))
        return jnp.tanh(f32(self.last(reflected(x, 3))))


class Judge(eqx.Module):
    """Whether each patch of a picture is real."""

    convs: list[eqx.nn.Conv2d]

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key, 4)
        ends = (3, width, 2), (width, 2 * width, 2), (2 * width, 4 * width, 2)
        ends = (*ends, (4 * width, 1, 1))
        self.convs = [
            eqx.nn.Conv2d(a, b, 4, stride, 1, key=k)
            for (a, b, stride), k in zip(ends, keys, strict=True)
        ]

    def __call__(self, x: Any) -> Any:
        x = jax.nn.leaky_relu(self.convs[0](x), 0.2)
        for conv in self.convs[1:-1]:
            x = jax.nn.leaky_relu(instance_norm(conv(x)), 0.2)
        return f32(self.convs[-1](x))


class Cycles(NamedTuple):
    """CycleGAN: two painters and two judges, who also see what was painted before."""

    dtype: Any
    size: int = 4
    side: int = 128
    width: int = 32
    depth: int = 3
    optimizer: Any = optax.adam(
        optax.linear_schedule(2e-4, 0.0, 100000, 100000), b1=0.5
    )

    def run(self, static: Any, params: Any, x: Any) -> Any:
        model = eqx.combine(cast(params, self.dtype), static)
        return jax.vmap(model)(x.astype(self.dtype))

    def step(self, params: Any, opt_state: Any, pool: Any, batch: Any) -> Any:
        shapes = eqx.filter_eval_shape(self.models, jax.random.key(0))
        _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))
        paint = functools.partial(self.run, static[0][0])
        judge = functools.partial(self.run, static[1][0])
        pictures, key = batch
        painters, judges = params

        def of_painters(painters: Any) -> Any:
            value, made = 0.0, []
            for i in range(2):
                both = jnp.concatenate([pictures[i], pictures[1 - i]])
                painted, same = jnp.split(paint(painters[i], both), 2)
                back = paint(painters[1 - i], painted)
                verdicts = judge(judges[1 - i], painted)
                value += ((verdicts - 1) ** 2).mean()
                value += 10 * jnp.abs(back - pictures[i]).mean()
                value += 5 * jnp.abs(same - pictures[1 - i]).mean()
                made.append(painted)
            return value, jnp.stack(made[::-1])

        (painted, made), of_paint = jax.value_and_grad(of_painters, has_aux=True)(
            painters
        )
        # half of what the judges see is older
        older = jax.random.bernoulli(key, 0.5, (2, self.size, 1, 1, 1))
        pool, seen = jnp.where(older, pool, made), jnp.where(older, pool, made)

        def of_judges(judges: Any) -> Any:
            value = 0.0
            for i in range(2):
                real, made = judge(judges[i], pictures[i]), judge(judges[i], seen[i])
                value += 0.5 * (((real - 1) ** 2).mean() + (made**2).mean())
            return value

        judged, of_judge = jax.value_and_grad(of_judges)(judges)
        grads = of_paint, of_judge
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, pool, {"painters": painted, "judges": judged}

    def models(self, key: Any) -> Any:
        a, b, c, d = jax.random.split(key, 4)
        painters = [Painter(self.width, self.depth, k) for k in (a, b)]
        return painters, [Judge(2 * self.width, k) for k in (c, d)]

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        params = eqx.filter(self.models(key), eqx.is_array)
        shape = 2, self.size, 3, self.side, self.side
        pictures = jax.random.uniform(key, shape, minval=-1.0)
        pool = jnp.zeros(shape)
        return params, self.optimizer.init(params), pool, (pictures, key)


# ---- a policy of words, beside others of its group, NNX


class PolicyBlock(nnx.Module):
    """Rotary places, few key-value heads, norms of queries and keys."""

    def __init__(
        self, width: int, heads: int, few: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        head = width // heads
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([norm(width), norm(width)])
        self.of_q, self.of_k = norm(head), norm(head)
        self.q, self.kv = linear(width, width), linear(width, 2 * few * head)
        self.out = linear(width, width)
        self.gate, self.up = linear(width, 3 * width), linear(width, 3 * width)
        self.down = linear(3 * width, width)
        self.few, self.head, self.dtype = few, head, dtype

    def rotate(self, x: Any) -> Any:
        half = self.head // 2
        angles = jnp.arange(x.shape[1])[:, None] * 1e6 ** -(jnp.arange(half) / half)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(f32(x), 2, -1)
        x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        return x.astype(self.dtype)

    def __call__(self, x: Any, mask: Any) -> Any:
        size, length, width = x.shape
        h = self.norms[0](x)
        k, v = jnp.split(self.kv(h).reshape(size, length, self.few, -1), 2, -1)
        q = self.of_q(self.q(h).reshape(size, length, -1, self.head))
        q, k = self.rotate(q), self.rotate(self.of_k(k))
        h = jax.nn.dot_product_attention(q, k, v, mask=mask)
        x = x + self.out(h.reshape(size, length, width))
        h = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class WordPolicy(nnx.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        vocabulary: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.words = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [PolicyBlock(width, heads, heads // 4, dtype, rngs) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, ids: Any, padded: Any) -> Any:
        """Log probabilities of each next word, and entropies."""
        x = self.words(ids[:, :-1])
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        mask = (mask & padded[:, None, :-1])[:, None]
        for block in self.blocks:
            x = block(x, mask)
        each = jax.nn.log_softmax(f32(self.out(self.norm(x))))
        entropy = -(jnp.exp(each) * each).sum(-1)
        found = jnp.take_along_axis(each, ids[:, 1:, None], -1)[..., 0]
        return found, jax.lax.stop_gradient(entropy)


def group_policy(
    dtype: Any,
    groups: int = 4,
    group: int = 4,
    length: int = 384,
    asked: int = 128,
    width: int = 512,
    heads: int = 8,
    layers: int = 3,
    vocabulary: int = 16384,
) -> Workload:
    """GRPO: an answer's worth is relative to that of others to the same question."""
    size = groups * group

    def make(key: Any) -> WordPolicy:
        return WordPolicy(width, heads, layers, vocabulary, dtype, nnx.Rngs(key))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        params = nnx.state(make(key), nnx.Param)
        reference = nnx.state(make(key), nnx.Param)
        return params, {"reference": reference, "entropy": jnp.zeros(())}

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, before, rewards, ends = batch
        places = jnp.arange(length + 1)
        padded = places < ends[:, None]
        counted = (places >= asked)[1:] & padded[:, 1:]
        found, entropy = nnx.merge(graph, params)(ids, padded)
        fixed, _ = nnx.merge(graph, state["reference"])(ids, padded)
        fixed = jax.lax.stop_gradient(fixed)
        rewards = rewards.reshape(groups, group)
        better = rewards - rewards.mean(-1, keepdims=True)
        better = better / (rewards.std(-1, keepdims=True) + 1e-4)
        better = better.reshape(size, 1)
        ratio = jnp.exp(found - before)
        clipped = jnp.clip(ratio, 0.8, 1.28)
        gain = jnp.minimum(ratio * better, clipped * better)
        apart = jnp.exp(fixed - found) - (fixed - found) - 1
        each = jnp.where(counted, 0.04 * apart - gain, 0)
        count = jnp.maximum(counted.sum(), 1)
        mean = jnp.where(counted, entropy, 0).sum() / count
        return each.sum() / count, {**state, "entropy": mean}

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        return (
            jax.random.randint(keys[0], (size, length + 1), 0, vocabulary),
            0.2 * jax.random.normal(keys[1], (size, length)) - np.log(vocabulary),
            jax.random.bernoulli(keys[2], 0.4, (size,)).astype(jnp.float32),
            jax.random.randint(keys[3], (size,), (asked + length) // 2, length + 1),
        )

    rates = optax.warmup_constant_schedule(0.0, 1e-6, 100)
    tx = optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(rates, b2=0.95))
    return Workload(init, loss, batch, tx)


# ---- texts from masks, Linen


class Unmasking(nn.Module):
    """A block that sees both sides, shifted, scaled and gated by the time."""

    dtype: Any
    heads: int
    rate: float
    keep: bool

    @nn.compact
    def __call__(self, x: Any, time: Any) -> tuple[Any, None]:
        """The function of a scan over layers."""
        width, dtype = x.shape[-1], self.dtype
        dense = functools.partial(nn.Dense, dtype=dtype)
        norm = functools.partial(
            nn.LayerNorm, dtype=dtype, use_bias=False, use_scale=False
        )
        drop = nn.Dropout(self.rate, deterministic=self.keep)
        six = dense(6 * width, kernel_init=nn.initializers.zeros)(time)[:, None]
        a, b, c, d, e, f = jnp.split(six, 6, -1)
        h = norm()(x) * (1 + a) + b
        h = nn.MultiHeadDotProductAttention(
            self.heads, dtype=dtype, force_fp32_for_softmax=True
        )(h)
        x = x + c * drop(h)
        h = norm()(x) * (1 + d) + e
        h = dense(width)(nn.gelu(dense(4 * width)(h)))
        return x + f * drop(h), None


class MaskedDiffusion(nn.Module):
    dtype: Any
    width: int
    heads: int
    layers: int
    vocabulary: int
    rate: float

    @nn.compact
    def __call__(self, ids: Any, times: Any, keep: bool = False) -> Any:
        dtype, width = self.dtype, self.width
        x = nn.Embed(self.vocabulary + 1, width, dtype=dtype)(ids)
        places = nn.initializers.normal(0.02)
        places = self.param("places", places, (ids.shape[1], width))
        x = x + places.astype(dtype)
        angles = times[:, None] * 1e3 * 1e4 ** -(jnp.arange(128) / 128)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.Dense(width, dtype=dtype)(nn.silu(nn.Dense(width, dtype=dtype)(time)))
        time = nn.silu(time)
        scanned = nn.scan(
            nn.remat(Unmasking, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = scanned(dtype, self.heads, self.rate, keep)(x, time)
        x = nn.LayerNorm(dtype=dtype)(x)
        return f32(nn.Dense(self.vocabulary, dtype=dtype)(x))


class Masks(NamedTuple):
    """MDLM: words appear one by one where there were masks; an average of weights."""

    dtype: Any
    size: int = 32
    length: int = 256
    width: int = 512
    heads: int = 8
    layers: int = 4
    vocabulary: int = 8192
    rate: float = 0.1

    @property
    def model(self) -> nn.Module:
        return MaskedDiffusion(
            self.dtype, self.width, self.heads, self.layers, self.vocabulary, self.rate
        )

    @property
    def optimizer(self) -> Any:
        rates = optax.linear_schedule(0.0, 3e-4, 2500)
        adam = optax.adamw(rates, weight_decay=0.0)
        return optax.chain(optax.clip_by_global_norm(1.0), adam)

    def step(self, params: Any, average: Any, opt_state: Any, batch: Any) -> Any:
        ids, key = batch
        a, b, c = jax.random.split(key, 3)
        # one number for all, so that the times are spread evenly
        times = jax.random.uniform(a) + jnp.arange(self.size) / self.size
        times = (1 - 1e-3) * (times % 1) + 1e-3
        hidden = jax.random.uniform(b, ids.shape) < times[:, None]

        def loss(params: Any) -> Any:
            seen = jnp.where(hidden, self.vocabulary, ids)
            logits = self.model.apply(
                {"params": params}, seen, times, rngs={"dropout": c}
            )
            each = jnp.where(hidden, cross_entropy(logits, ids), 0)
            return (each / times[:, None]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1e-4)
        return params, average, opt_state, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        ids = jax.random.randint(key, (self.size, self.length), 0, self.vocabulary)
        made = self.model.init(key, ids[:1], jnp.ones((1,)), True)["params"]
        return made, made, self.optimizer.init(made), (ids, key)


# ---- capsules, Haiku


def squash(x: Any) -> Any:
    """Vectors of lengths below one, in float32."""
    square = (x**2).sum(-1, keepdims=True)
    return x * (square / (1 + square) * jax.lax.rsqrt(square + 1e-8))


def capsules(
    dtype: Any,
    size: int = 64,
    side: int = 28,
    width: int = 256,
    kinds: int = 32,
    classes: int = 10,
    rounds: int = 3,
) -> Workload:
    """CapsNet: parts agree on what they are parts of; pictures from the right one."""

    def network(images: Any, labels: Any) -> tuple[Any, Any]:
        x = jax.nn.relu(hk.Conv2D(width, 9, padding="VALID")(images.astype(dtype)))
        x = hk.Conv2D(8 * kinds, 9, 2, padding="VALID")(x)
        x = squash(f32(x).reshape(len(x), -1, 8)).astype(dtype)
        shape = x.shape[1], classes, 8, 16
        turn = hk.get_parameter("turn", shape, init=hk.initializers.RandomNormal(0.1))
        votes = jnp.einsum("bip,icpd->bicd", x, turn)
        fixed = jax.lax.stop_gradient(votes)
        logits = jnp.zeros(votes.shape[:3])
        for i in range(rounds):
            shares = jax.nn.softmax(logits, -1).astype(dtype)
            heard = votes if i == rounds - 1 else fixed
            found = squash(f32(jnp.einsum("bic,bicd->bcd", shares, heard)))
            if i < rounds - 1:
                agreed = jnp.einsum("bicd,bcd->bic", fixed, found.astype(dtype))
                logits = logits + f32(agreed)
        lengths = jnp.sqrt((found**2).sum(-1) + 1e-8)
        right = found * jax.nn.one_hot(labels, classes)[..., None]
        y = right.reshape(len(right), -1).astype(dtype)
        for n in (512, 1024):
            y = jax.nn.relu(hk.Linear(n)(y))
        return lengths, jax.nn.sigmoid(f32(hk.Linear(side * side)(y)))

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, side, side, 1)), jnp.zeros((1,), int)), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, labels = batch
        lengths, again = net.apply(cast(params, dtype), images, labels)
        wanted = jax.nn.one_hot(labels, classes)
        there = jax.nn.relu(0.9 - lengths) ** 2
        absent = jax.nn.relu(lengths - 0.1) ** 2
        margin = (wanted * there + 0.5 * (1 - wanted) * absent).sum(-1).mean()
        apart = ((again - images.reshape(size, -1)) ** 2).sum(-1).mean()
        return margin + 0.0005 * apart, state

    def batch(key: Any) -> Any:
        images = jax.random.uniform(key, (size, side, side, 1))
        return images, jax.random.randint(key, (size,), 0, classes)

    rates = optax.exponential_decay(1e-3, 2000, 0.9)
    return Workload(init, loss, batch, optax.adam(rates))


# ---- a team whose values are mixed, Linen


class Member(nn.Module):
    """One time step; what is remembered is float32, as in Flax."""

    dtype: Any
    width: int

    @nn.compact
    def __call__(self, state: Any, seen: tuple[Any, Any]) -> tuple[Any, Any]:
        x, anew = seen
        state = jnp.where(anew[:, None], 0.0, state)
        return nn.GRUCell(self.width, dtype=self.dtype)(state, x)


class Members(nn.Module):
    dtype: Any
    width: int
    actions: int

    @nn.compact
    def __call__(self, x: Any, anew: Any) -> Any:
        """Values, f32[time, size, actions]."""
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        scanned = nn.scan(
            Member, variable_broadcast="params", split_rngs={"params": False}
        )
        state = jnp.zeros((x.shape[1], self.width))
        _, x = scanned(self.dtype, self.width)(state, (x, anew))
        return f32(nn.Dense(self.actions, dtype=self.dtype)(x))


class Mixer(nn.Module):
    """Networks of the state make the weights, which are positive."""

    dtype: Any
    width: int
    inner: int

    @nn.compact
    def __call__(self, values: Any, state: Any) -> Any:
        """One value of those of all, [..., agents]."""
        dtype, agents = self.dtype, values.shape[-1]
        dense = functools.partial(nn.Dense, dtype=dtype)

        def made(n: int) -> Any:
            return dense(n)(nn.relu(dense(self.inner)(state)))

        first = jnp.abs(made(agents * self.width))
        first = first.reshape(*values.shape, self.width)
        x = jnp.einsum("...a,...aw->...w", values.astype(dtype), first)
        x = nn.elu(x + dense(self.width)(state))
        total = (f32(x) * f32(jnp.abs(made(self.width)))).sum(-1)
        return total + f32(made(1))[..., 0]


class Team(NamedTuple):
    """QMIX: recurrent agents, whose values of their own add up to that of the team."""

    dtype: Any
    size: int = 32
    time: int = 64
    agents: int = 8
    seen: int = 128
    state: int = 256
    width: int = 256
    actions: int = 16
    optimizer: Any = optax.chain(
        optax.clip_by_global_norm(10.0), optax.rmsprop(5e-4, 0.99, 1e-5)
    )

    def step(self, params: Any, target: Any, opt_state: Any, batch: Any) -> Any:
        seen, state, acted, allowed, rewards, done = batch
        members, mixer = self.models()
        time, size, agents = seen.shape[:3]
        names = jnp.broadcast_to(jnp.eye(agents), (time, size, agents, agents))
        x = jnp.concatenate([seen, names], -1).reshape(time, size * agents, -1)
        anew = jnp.concatenate([jnp.ones((1, size), bool), done[:-1]])
        anew = jnp.repeat(anew, agents, 1)

        def values(params: Any) -> Any:
            found = members.apply({"params": params["members"]}, x, anew)
            return found.reshape(time, size, agents, -1)

        later = values(target)

        def loss(params: Any) -> Any:
            each = values(params)
            chosen = jnp.take_along_axis(each, acted[..., None], -1)[..., 0]
            best = jnp.argmax(jnp.where(allowed, each, -1e9), -1)
            best = jnp.take_along_axis(later, best[..., None], -1)[..., 0]
            now = mixer.apply({"params": params["mixer"]}, chosen, state)
            then = mixer.apply({"params": target["mixer"]}, best, state)
            wanted = rewards[:-1] + 0.99 * jnp.where(done[:-1], 0, then[1:])
            wrong = now[:-1] - jax.lax.stop_gradient(wanted)
            return (wrong**2).mean(), {
                "value": now.mean(),
                "wrong": jnp.abs(wrong).max(),
            }

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        target = optax.incremental_update(params, target, 0.01)
        return params, target, opt_state, metrics | {"loss": value}

    def models(self) -> tuple[nn.Module, nn.Module]:
        members = Members(self.dtype, self.width, self.actions)
        return members, Mixer(self.dtype, 32, self.width)

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        keys = jax.random.split(key, 8)
        members, mixer = self.models()
        shape, ins = (self.time, self.size), self.seen + self.agents
        each = *shape, self.agents
        params = {
            "members": members.init(
                keys[0], jnp.zeros((1, 1, ins)), jnp.zeros((1, 1), bool)
            )["params"],
            "mixer": mixer.init(
                keys[1], jnp.zeros((1, self.agents)), jnp.zeros((1, self.state))
            )["params"],
        }
        batch = (
            jax.random.normal(keys[2], (*each, self.seen)),
            jax.random.normal(keys[3], (*shape, self.state)),
            jax.random.randint(keys[4], each, 0, self.actions),
            jax.random.bernoulli(keys[5], 0.8, (*each, self.actions)),
            jax.random.normal(keys[6], shape),
            jax.random.bernoulli(keys[7], 0.02, shape),
        )
        return params, params, self.optimizer.init(params), batch


# ---- neural processes, Equinox


def by_rows(layer: Any, x: Any) -> Any:
    """A layer of vectors, along the first axis."""
    return jax.vmap(layer)(x)


class Reader(eqx.Module):
    """Attention of one set of vectors to another, and a network of each vector."""

    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: Any) -> None:
        keys = jax.random.split(key, 5)
        self.q, self.k, self.v, self.out = (
            eqx.nn.Linear(width, width, key=k) for k in keys[:4]
        )
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, key=keys[4])
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.heads = heads

    def __call__(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        def split(x: Any) -> Any:
            return x.reshape(len(x), self.heads, -1)

        old = q
        q, k, v = (
            split(by_rows(layer, x))
            for layer, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        scores = f32(jnp.einsum("qhd,khd->hqk", q, k)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(v.dtype)
        h = jnp.einsum("hqk,khd->qhd", weights, v).reshape(old.shape)
        x = self.norm(0, old + by_rows(self.out, h))
        return self.norm(1, x + by_rows(self.mlp, x))

    def norm(self, i: int, x: Any) -> Any:
        return by_rows(self.norms[i], f32(x)).astype(x.dtype)


class NeuralProcess(eqx.Module):
    """A function from some of its values: what is certain, and a latent."""

    points: eqx.nn.MLP
    places: eqx.nn.MLP
    latent: eqx.nn.MLP
    moments: eqx.nn.MLP
    readers: list[Reader]
    last: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: Any) -> None:
        keys = jax.random.split(key, 8)
        mlp = eqx.nn.MLP
        self.points = mlp(5, width, width, 2, key=keys[0])
        self.places = mlp(2, width, width, 2, key=keys[1])
        self.latent = mlp(5, width, width, 2, key=keys[2])
        self.moments = mlp(width, 2 * width, width, 1, key=keys[3])
        self.readers = [Reader(width, heads, k) for k in keys[4:7]]
        self.last = mlp(3 * width, 6, width, 3, key=keys[7])

    def moments_of(self, x: Any, y: Any, mask: Any) -> tuple[Any, Any]:
        """Of the latent, f32[width] each."""
        h = by_rows(self.latent, jnp.concatenate([x, y], -1))
        h = self.readers[0](h, h, h, mask)
        mean = jnp.where(mask[:, None], f32(h), 0).sum(0) / mask.sum()
        mean, scale = jnp.split(f32(self.moments(mean.astype(h.dtype))), 2)
        return mean, 0.1 + 0.9 * jax.nn.sigmoid(scale)

    def __call__(self, x: Any, y: Any, mask: Any, at: Any, z: Any) -> tuple[Any, Any]:
        """Means and deviations of colors at places, f32[count, 3] each."""
        h = by_rows(self.points, jnp.concatenate([x, y], -1))
        h = self.readers[1](h, h, h, mask)
        q, k = by_rows(self.places, at), by_rows(self.places, x)
        found = self.readers[2](q, k, h, mask)
        z = jnp.broadcast_to(z.astype(q.dtype), q.shape)
        out = by_rows(self.last, jnp.concatenate([found, z, q], -1))
        mean, scale = jnp.split(f32(out), 2, -1)
        return mean, 0.01 + 0.99 * jax.nn.softplus(scale)


def neural_process(
    dtype: Any,
    size: int = 32,
    given: int = 128,
    count: int = 512,
    width: int = 256,
    heads: int = 8,
) -> Workload:
    """Attentive neural processes: pictures from some of their pixels."""

    def make(key: Any) -> NeuralProcess:
        return NeuralProcess(width, heads, key)

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(make(key), eqx.is_array), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        model = eqx.combine(cast(params, dtype, lambda path: "norms" in path), static)

        def one(x: Any, y: Any, number: Any, key: Any) -> Any:
            half_x, half_y = x.astype(dtype), y.astype(dtype)
            mask = jnp.arange(given) < number
            prior = model.moments_of(half_x[:given], half_y[:given], mask)
            posterior = model.moments_of(half_x, half_y, jnp.ones((count,), bool))
            mean, scale = posterior
            z = mean + scale * jax.random.normal(key, mean.shape)
            mean, scale = model(half_x[:given], half_y[:given], mask, half_x, z)
            likely = -0.5 * ((y - mean) / scale) ** 2 - jnp.log(scale)
            (a, b), (c, d) = posterior, prior
            apart = jnp.log(d / b) + (b**2 + (a - c) ** 2) / (2 * d**2) - 0.5
            return apart.sum() / count - likely.sum(-1).mean()

        return jax.vmap(one)(*batch).mean(), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        return (
            jax.random.uniform(keys[0], (size, count, 2), minval=-1.0),
            jax.random.uniform(keys[1], (size, count, 3)),
            jax.random.randint(keys[2], (size,), 3, given + 1),
            jax.random.split(keys[3], size),
        )

    return Workload(init, loss, batch, optax.adam(5e-5))


# ---- features without covariance, Haiku


def covariances(
    dtype: Any,
    size: int = 128,
    side: int = 64,
    width: int = 64,
    depth: int = 3,
    outs: int = 1024,
) -> Workload:
    """VICReg: two views alike, features that vary and do not covary; LARS."""

    def norm(x: Any, **kw: Any) -> Any:  # statistics in float32
        made = hk.BatchNorm(True, True, 0.9, **kw)
        return made(f32(x), True).astype(dtype)

    def network(x: Any) -> Any:
        x = hk.Conv2D(width, 7, 2, with_bias=False)(x.astype(dtype))
        x = jax.nn.relu(norm(x))
        x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage in range(depth):
            inner, stride = width << stage, 2 if stage else 1
            h = hk.Conv2D(inner, 1, with_bias=False)(x)
            h = hk.Conv2D(inner, 3, stride, with_bias=False)(jax.nn.relu(norm(h)))
            h = hk.Conv2D(4 * inner, 1, with_bias=False)(jax.nn.relu(norm(h)))
            h = norm(h, scale_init=jnp.zeros)
            x = norm(hk.Conv2D(4 * inner, 1, stride, with_bias=False)(x))
            x = jax.nn.relu(x + h)
        x = f32(x).mean((1, 2)).astype(dtype)
        for _ in range(2):
            x = jax.nn.relu(norm(hk.Linear(outs, with_bias=False)(x)))
        return f32(hk.Linear(outs, with_bias=False)(x))

    net = hk.without_apply_rng(hk.transform_with_state(network))

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((2, side, side, 3)))

    def spread(z: Any) -> tuple[Any, Any]:
        z = z - z.mean(0)
        scale = jnp.sqrt((z**2).mean(0) + 1e-4)
        product = (z.T @ z) / (len(z) - 1)
        square = (product**2).sum() - (jnp.diagonal(product) ** 2).sum()
        return jax.nn.relu(1 - scale).mean(), square / outs

    def loss(params: Any, state: Any, batch: Any) -> Any:
        half = cast(params, dtype, lambda path: "batch_norm" in path)
        one, state = net.apply(half, state, batch[0])
        two, state = net.apply(half, state, batch[1])
        same = ((one - two) ** 2).mean()
        (a, b), (c, d) = spread(one), spread(two)
        return 25 * same + 12.5 * (a + c) + b + d, state

    def batch(key: Any) -> Any:
        images = jax.random.normal(key, (size, side, side, 3))
        noise = 0.3 * jax.random.normal(jax.random.fold_in(key, 1), images.shape)
        return images, images[:, :, ::-1] + noise

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    rates = optax.warmup_cosine_decay_schedule(0.0, 0.2, 1000, 100000)
    tx = optax.lars(rates, 1e-6, is_matrix, trust_ratio_mask=is_matrix, momentum=0.9)
    return Workload(init, loss, batch, tx)


# ---- tours, plain JAX


def drawn(key: Any, *shape: int) -> Any:
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def tours(
    dtype: Any,
    size: int = 32,
    cities: int = 50,
    width: int = 128,
    heads: int = 8,
    layers: int = 4,
) -> Workload:
    """POMO: tours from each city, city by city; what is shorter than the mean is good.

    The choices are a policy's own, by REINFORCE through the scan that makes them.
    """
    head = width // heads

    def init(key: Any) -> Any:
        def layer(key: Any) -> Any:
            keys = jax.random.split(key, 4)
            return {
                "qkv": drawn(keys[0], width, 3 * width),
                "out": drawn(keys[1], width, width),
                "up": drawn(keys[2], width, 4 * width),
                "down": drawn(keys[3], 4 * width, width),
                "norms": [jnp.ones((width,)) for _ in range(2)],
            }

        keys = jax.random.split(key, layers + 6)
        return {
            "enter": drawn(keys[0], 2, width),
            "layers": [layer(k) for k in keys[6:]],
            "first": drawn(keys[1], width, width),
            "last": drawn(keys[2], width, width),
            "kv": drawn(keys[3], width, 2 * width),
            "out": drawn(keys[4], width, width),
        }, ()

    def norm(scale: Any, x: Any) -> Any:
        """Over the cities, in float32."""
        y = f32(x)
        y = y - y.mean(1, keepdims=True)
        y = y * jax.lax.rsqrt((y**2).mean(1, keepdims=True) + 1e-5)
        return (y * scale).astype(x.dtype)

    def split(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], heads, head)

    def attend(q: Any, k: Any, v: Any, hidden: Any = None) -> Any:
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", split(q), split(k))) * head**-0.5
        if hidden is not None:
            scores = jnp.where(hidden[:, None], -1e30, scores)
        weights = jax.nn.softmax(scores).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, split(v)).reshape(q.shape)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        places, key = batch
        p = cast(params, dtype, lambda path: "norms" in path)
        x = places.astype(dtype) @ p["enter"]
        for layer in p["layers"]:
            q, k, v = jnp.split(x @ layer["qkv"], 3, -1)
            h = attend(q, k, v) @ layer["out"]
            x = norm(layer["norms"][0], x + h)
            h = jax.nn.relu(x @ layer["up"]) @ layer["down"]
            x = norm(layer["norms"][1], x + h)
        k, v = jnp.split(x @ p["kv"], 2, -1)
        first, last = x @ p["first"], x @ p["last"]
        rows = jnp.arange(size)[:, None]
        start = jnp.broadcast_to(jnp.arange(cities), (size, cities))

        def one(carry: Any, key: Any) -> Any:
            at, hidden = carry
            q = first + jnp.take_along_axis(last, at[..., None], 1)
            h = attend(q, k, v, hidden) @ p["out"]
            scores = f32(jnp.einsum("bqd,bkd->bqk", h, x)) * width**-0.5
            scores = jnp.where(hidden, -1e30, 10 * jnp.tanh(scores))
            each = jax.nn.log_softmax(scores)
            at = jax.random.categorical(key, each)
            found = jnp.take_along_axis(each, at[..., None], -1)[..., 0]
            hidden = hidden.at[rows, jnp.arange(cities), at].set(True)
            return (at, hidden), (at, found)

        seen = jnp.broadcast_to(jnp.eye(cities, dtype=bool), (size, cities, cities))
        keys = jax.random.split(key, cities - 1)
        _, (order, found) = jax.lax.scan(one, (start, seen), keys)
        order = jnp.concatenate([start[None], order])
        path = places[rows, order]
        length = jnp.linalg.norm(path - jnp.roll(path, 1, 0), axis=-1).sum(0)
        better = length - length.mean(1, keepdims=True)
        return (better * found.sum(0)).mean(), state

    def batch(key: Any) -> Any:
        return jax.random.uniform(key, (size, cities, 2)), key

    return Workload(init, loss, batch, optax.adamw(1e-4, weight_decay=1e-6))


# ---- speech from letters, Linen


class Spoken(nn.Module):
    """What is heard next, by two LSTMs and attention that knows where it has been."""

    dtype: Any
    width: int
    letters: int
    bands: int

    def convs(self, x: Any, widths: tuple[int, ...], keep: Any, act: Any) -> Any:
        """With batch norms and dropout; no `tanh` behind the last."""
        for i, width in enumerate(widths):
            x = nn.Conv(width, (5,), use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(False, momentum=0.9, dtype=self.dtype)(x)
            if act is nn.relu or i < len(widths) - 1:
                x = act(x)
            x = nn.Dropout(0.5, deterministic=keep)(x)
        return x

    @nn.compact
    def __call__(
        self, ids: Any, before: Any, keep: bool = False
    ) -> tuple[Any, Any, Any]:
        """Spectra before and after the last convolutions, and where it ends."""
        dtype, width = self.dtype, self.width
        x = nn.Embed(self.letters, width, dtype=dtype)(ids)
        x = self.convs(x, (width,) * 2, keep, nn.relu)
        cell = functools.partial(nn.OptimizedLSTMCell, width // 2, dtype=dtype)
        lengths = (ids > 0).sum(-1)
        memory = nn.Bidirectional(nn.RNN(cell()), nn.RNN(cell()))(
            x, seq_lengths=lengths
        ).astype(dtype)
        y = before.astype(dtype)
        for _ in range(2):
            y = nn.relu(nn.Dense(width // 2, dtype=dtype)(y))
            y = nn.Dropout(0.5, deterministic=keep)(y)
        step = nn.scan(
            SpokenStep,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=(1, nn.broadcast, nn.broadcast, nn.broadcast),
            out_axes=1,
        )(dtype, width)
        keys = nn.Dense(128, use_bias=False, dtype=dtype)(memory)
        size, length = ids.shape
        zeros = jnp.zeros((size, width))
        seen = jnp.zeros((size, length))
        start = (zeros, zeros), (zeros, zeros), zeros, seen, seen
        _, h = step(start, y, memory, keys, ids > 0)
        found = f32(nn.Dense(self.bands, dtype=dtype)(h))
        ends = f32(nn.Dense(1, dtype=dtype)(h))[..., 0]
        rest = self.convs(
            found.astype(dtype), (width, width, self.bands), keep, nn.tanh
        )
        return found, found + f32(rest), ends


class SpokenStep(nn.Module):
    dtype: Any
    width: int

    @nn.compact
    def __call__(self, carry: Any, y: Any, memory: Any, keys: Any, mask: Any) -> Any:
        dtype, width = self.dtype, self.width
        one, two, context, last, total = carry
        x = jnp.concatenate([y, context.astype(dtype)], -1)
        one, h = nn.OptimizedLSTMCell(width, dtype=dtype)(one, x)
        where = jnp.stack([last, total], -1)
        where = nn.Conv(32, (31,), use_bias=False, dtype=dtype)(where)
        where = nn.Dense(128, use_bias=False, dtype=dtype)(where)
        asked = nn.Dense(128, use_bias=False, dtype=dtype)(h)[:, None]
        scores = nn.Dense(1, use_bias=False, dtype=dtype)(nn.tanh(asked + where + keys))
        scores = jnp.where(mask, f32(scores)[..., 0], -1e30)
        last = jax.nn.softmax(scores)
        context = jnp.einsum("bt,btd->bd", last.astype(dtype), memory)
        x = jnp.concatenate([h.astype(dtype), context], -1)
        two, h = nn.OptimizedLSTMCell(width, dtype=dtype)(two, x)
        out = jnp.concatenate([h.astype(dtype), context], -1)
        return (one, two, f32(context), last, total + last), out


def spoken(
    dtype: Any,
    size: int = 16,
    length: int = 96,
    frames: int = 192,
    width: int = 512,
    letters: int = 80,
    bands: int = 80,
) -> Workload:
    """Tacotron 2: spectra frame by frame, each from those before it as they were."""
    model = Spoken(dtype, width, letters, bands)

    def init(key: Any) -> Any:
        ids, before = jnp.ones((2, 8), int), jnp.zeros((2, 4, bands))
        made = model.init(key, ids, before, True)
        return made["params"], made["batch_stats"]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, spectra, counts, key = batch
        before = jnp.pad(spectra[:, :-1], ((0, 0), (1, 0), (0, 0)))
        (one, two, ends), new = model.apply(
            {"params": params, "batch_stats": state},
            ids,
            before,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        mask = (jnp.arange(frames) < counts[:, None]).astype(jnp.float32)
        last = (jnp.arange(frames) >= counts[:, None] - 1).astype(jnp.float32)
        wrong = ((one - spectra) ** 2 + (two - spectra) ** 2).mean(-1)
        wrong = wrong + optax.sigmoid_binary_cross_entropy(ends, last)
        return (wrong * mask).sum() / mask.sum(), new["batch_stats"]

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        ids = jax.random.randint(keys[0], (size, length), 1, letters)
        many = jax.random.randint(keys[1], (size, 1), length // 2, length + 1)
        return (
            jnp.where(jnp.arange(length) < many, ids, 0),
            jax.random.normal(keys[2], (size, frames, bands)),
            jax.random.randint(keys[3], (size,), frames // 2, frames + 1),
            key,
        )

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-6, weight_decay=1e-6)
    )
    return Workload(init, loss, batch, tx)


# ---- slopes in place of places, plain JAX


def slopes(
    dtype: Any,
    size: int = 8,
    length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    vocabulary: int = 16384,
    every: int = 4,
) -> Workload:
    """ALiBi in parallel blocks, scanned; an update every fourth batch."""
    head = width // heads

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 6)

        def stack(key: Any, *shape: int) -> Any:
            return 0.02 * jax.random.normal(key, (layers, *shape))

        return {
            "words": 0.02 * jax.random.normal(keys[0], (vocabulary, width)),
            "layers": {
                "enter": stack(keys[1], width, 7 * width),
                "leave": stack(keys[2], 5 * width, width),
                "norm": {
                    "scale": jnp.ones((layers, width)),
                    "shift": jnp.zeros((layers, width)),
                },
            },
            "norm": {"scale": jnp.ones((width,)), "shift": jnp.zeros((width,))},
        }, ()

    def norm(p: Any, x: Any) -> Any:
        y = f32(x)
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)
        return (y * p["scale"] + p["shift"]).astype(x.dtype)

    def loss(params: Any, state: Any, ids: Any) -> Any:
        p = cast(params, dtype, lambda path: "norm" in path)
        places = jnp.arange(length)
        apart = places[:, None] - places
        steep = 2.0 ** (-8 / heads * (jnp.arange(heads) + 1))
        bias = jnp.where(apart >= 0, -steep[:, None, None] * apart, -1e9)

        def block(x: Any, layer: Any) -> Any:
            h = norm(layer["norm"], x) @ layer["enter"]
            qkv, up = jnp.split(h, [3 * width], -1)
            q, k, v = (
                y.reshape(size, length, heads, head) for y in jnp.split(qkv, 3, -1)
            )
            scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * head**-0.5 + bias
            weights = jax.nn.softmax(scores).astype(dtype)
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            h = jnp.concatenate([h, jax.nn.gelu(up)], -1)
            return x + h @ layer["leave"], None

        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        block = jax.checkpoint(block, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(block, p["words"][ids[:, :-1]], p["layers"])
        logits = f32(norm(p["norm"], x) @ p["words"].T)
        total = jax.nn.logsumexp(logits, -1)
        right = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
        return (total - right + 1e-4 * total**2).mean(), state

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, vocabulary)

    rates = optax.warmup_cosine_decay_schedule(0.0, 6e-4, 1000, 100000, 6e-5)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.95, weight_decay=0.1)
    )
    return Workload(init, loss, batch, optax.MultiSteps(tx, every))


# ---- moments of what neighbours say, NNX


class Moments(nnx.Module):
    """Means, extremes and deviations of messages, each at three scales of degrees."""

    def __init__(self, width: int, usual: float, dtype: Any, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.pre = linear(3 * width, width)
        self.post, self.last = linear(13 * width, width), linear(width, width)
        self.norm = nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.1)
        self.usual, self.dtype = usual, dtype

    def __call__(self, x: Any, bonds: Any, ends: Any, degrees: Any, key: Any) -> Any:
        count, (source, to) = len(x), ends
        m = nnx.relu(self.pre(jnp.concatenate([x[source], x[to], bonds], -1)))
        many = jnp.maximum(degrees, 1)[:, None]
        # of moments the sums are float32
        mean = jax.ops.segment_sum(f32(m), to, count) / many
        square = jax.ops.segment_sum(f32(m) ** 2, to, count) / many
        scale = jnp.sqrt(jax.nn.relu(square - mean**2) + 1e-5)
        most = jax.ops.segment_max(m, to, count)
        least = -jax.ops.segment_max(-m, to, count)
        most, least = (jnp.where(degrees[:, None] > 0, y, 0) for y in (most, least))
        found = [y.astype(self.dtype) for y in (mean, scale, most, least)]
        found = jnp.concatenate(found, -1)
        log = (jnp.log(many + 1.0) / self.usual).astype(self.dtype)
        found = jnp.concatenate([x, found, found * log, found / log], -1)
        h = self.last(nnx.relu(self.post(found)))
        h = self.drop(nnx.relu(self.norm(h)), rngs=key)
        return x + h


class MomentsNetwork(nnx.Module):
    def __init__(
        self, width: int, layers: int, usual: float, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        embed = functools.partial(nnx.Embed, features=width, dtype=dtype, rngs=rngs)
        self.atoms, self.bonds = embed(28), embed(4)
        self.layers = nnx.List(
            [Moments(width, usual, dtype, rngs) for _ in range(layers)]
        )
        self.first = nnx.Linear(width, width // 2, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(width // 2, 1, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Any, graphs: int, key: Any) -> Any:
        atoms, bonds, ends, of_graph = batch
        x, bonds = self.atoms(atoms), self.bonds(bonds)
        degrees = jax.ops.segment_sum(jnp.ones(ends.shape[1]), ends[1], len(x))
        for i, layer in enumerate(self.layers):
            x = layer(x, bonds, ends, degrees, jax.random.fold_in(key, i))
        total = jax.ops.segment_sum(f32(x), of_graph, graphs, indices_are_sorted=True)
        ones = jnp.ones(len(x))
        many = jax.ops.segment_sum(ones, of_graph, graphs, indices_are_sorted=True)
        x = (total / jnp.maximum(many, 1)[:, None]).astype(x.dtype)
        return f32(self.last(nnx.relu(self.first(x))))[:, 0]


def graph_moments(
    dtype: Any,
    graphs: int = 256,
    nodes: int = 6144,
    edges: int = 12288,
    width: int = 256,
    layers: int = 4,
) -> Workload:
    """PNA: solubilities of molecules; the last graph holds what pads the others."""

    def make(key: Any) -> MomentsNetwork:
        return MomentsNetwork(width, layers, np.log(3.0), dtype, nnx.Rngs(key))

    shapes = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, _, _ = nnx.split(shapes, nnx.Param, ...)

    def init(key: Any) -> Any:
        _, params, state = nnx.split(make(key), nnx.Param, ...)
        return params, state

    def loss(params: Any, state: Any, batch: Any) -> Any:
        data, wanted, key = batch
        model = nnx.merge(graph, params, state, copy=True)
        found = model(data, graphs, key)
        state = nnx.split(model, nnx.Param, ...)[2]
        return jnp.abs(found - wanted)[:-1].mean(), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 5)
        ends = jax.random.randint(keys[2], (2, edges), 0, nodes)
        data = (
            jax.random.randint(keys[0], (nodes,), 0, 28),
            jax.random.randint(keys[1], (edges,), 0, 4),
            ends,
            jnp.sort(jax.random.randint(keys[3], (nodes,), 0, graphs)),
        )
        return data, jax.random.normal(keys[4], (graphs,)), key

    rates = optax.cosine_decay_schedule(1e-3, 100000)
    return Workload(init, loss, batch, optax.adamw(rates, weight_decay=3e-6))
