"""Train steps of families that the other zoos lack: tables, games, text, pixels."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from models.common import Workload, cross_entropy
from zoo2_libraries import cast
from zoo2_unseen_third import f32, of_linen

# ---- features of tables as tokens, NNX


class FeatureBlock(nnx.Module):
    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            8, width, dtype=dtype, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 8 * width // 3 * 2, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(8 * width // 3, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: Any, key: Any) -> Any:
        a, b = jax.random.split(key)
        h = self.attention(self.norm1(x))
        x = x + self.dropout(h, rngs=a, deterministic=False)
        h, gate = jnp.split(self.up(self.norm2(x)), 2, -1)
        h = self.dropout(h * nnx.relu(gate), rngs=b, deterministic=False)
        return x + self.down(h)


class FeatureTransformer(nnx.Module):
    """Numbers by a weight and a bias each, categories by tables, and a class token."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        width, self.dtype = 192, dtype
        normal = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(normal(rngs.params(), (40, width)))
        self.bias = nnx.Param(normal(rngs.params(), (52, width)))
        self.table = nnx.Embed(12 * 500, width, dtype=dtype, rngs=rngs)
        self.cls = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.blocks = nnx.List([FeatureBlock(width, dtype, rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, 1, dtype=dtype, rngs=rngs)

    def __call__(self, numbers: Any, ids: Any, key: Any) -> Any:
        x = numbers.astype(self.dtype)[..., None] * self.weight.astype(self.dtype)
        y = self.table(ids + 500 * jnp.arange(12))
        x = jnp.concatenate([x, y], 1) + self.bias.astype(self.dtype)
        cls = jnp.broadcast_to(self.cls.astype(self.dtype), (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], 1)
        for block, k in zip(self.blocks, jax.random.split(key, 3), strict=True):
            x = block(x, k)
        return f32(self.head(nnx.relu(self.norm(x[:, 0]))))[:, 0]


def tabular(dtype: Any) -> Workload:
    """FT-Transformer, regression with a Huber loss."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: FeatureTransformer(dtype, nnx.Rngs(0))))

    def init(key: Any) -> Any:
        return nnx.split(FeatureTransformer(dtype, nnx.Rngs(params=key)))[1], ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        numbers, ids, wanted, key = batch
        out = nnx.merge(graph, params)(numbers, ids, key)
        return optax.huber_loss(out, wanted).mean(), state

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (1024, 12), 0, 500)
        wanted = jax.random.normal(key, (1024,))
        return jax.random.normal(key, (1024, 40)), ids, wanted, key

    return Workload(init, loss, batch, optax.adamw(1e-4, weight_decay=1e-5))


# ---- MuZero, Haiku


def muzero(dtype: Any) -> Workload:
    """A model of a game, unrolled five steps from a representation of frames."""
    actions, bins = 18, 601

    def norm(x: Any) -> Any:
        return hk.LayerNorm((-3, -2, -1), True, True)(f32(x)).astype(dtype)

    def block(x: Any, width: int) -> Any:
        h = jax.nn.relu(norm(hk.Conv2D(width, 3, with_bias=False)(x)))
        h = norm(hk.Conv2D(width, 3, with_bias=False)(h))
        return jax.nn.relu(x + h)

    def scaled(x: Any) -> Any:
        """The hidden state in [0, 1]."""
        low, high = x.min((1, 2, 3), keepdims=True), x.max((1, 2, 3), keepdims=True)
        return (x - low) / (high - low + 1e-5)

    def represent(x: Any) -> Any:
        x = hk.Conv2D(64, 3, 2)(x)
        x = hk.Conv2D(128, 3, 2)(block(x, 64))
        x = hk.avg_pool(block(x, 128), (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return scaled(block(x, 128))

    def dynamics(x: Any, action: Any) -> Any:
        plane = jax.nn.one_hot(action, actions, dtype=x.dtype)[:, None, None]
        plane = jnp.broadcast_to(plane, (*x.shape[:3], actions))
        h = hk.Conv2D(128, 3)(jnp.concatenate([x, plane], -1))
        h = block(block(jax.nn.relu(norm(h) + x), 128), 128)
        reward = jax.nn.relu(hk.Conv2D(16, 1)(h))
        return scaled(h), f32(hk.Linear(bins)(hk.Flatten()(reward)))

    def predict(x: Any) -> Any:
        x = block(x, 128)
        p = hk.Flatten()(jax.nn.relu(hk.Conv2D(16, 1)(x)))
        v = hk.Flatten()(jax.nn.relu(hk.Conv2D(16, 1)(x)))
        v = jax.nn.relu(hk.Linear(256)(v))
        return f32(hk.Linear(actions)(p)), f32(hk.Linear(bins)(v))

    nets = [
        hk.without_apply_rng(hk.transform(f)) for f in (represent, dynamics, predict)
    ]

    def init(key: Any) -> Any:
        x = jnp.zeros((1, 64, 64, 12))
        h = jnp.zeros((1, 8, 8, 128))
        a = jnp.zeros((1,), jnp.int32)
        return {
            "represent": nets[0].init(key, x),
            "dynamics": nets[1].init(key, h, a),
            "predict": nets[2].init(key, h),
        }, ()

    def two_hot(x: Any) -> Any:
        x = jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x
        x = jnp.clip(x, -300, 300) + 300
        low = jnp.floor(x)
        part = x - low
        low = low.astype(jnp.int32)
        return (1 - part)[..., None] * jax.nn.one_hot(low, bins) + part[
            ..., None
        ] * jax.nn.one_hot(low + 1, bins)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        frames, played, rewards, values, policies = batch
        keep = lambda path: "layer_norm" in path  # noqa: E731
        p = cast(params, dtype, keep)
        h = nets[0].apply(p["represent"], frames.astype(dtype) / 255)

        def one(h: Any, seen: Any) -> Any:
            action, reward, value, policy = seen
            logits, v = nets[2].apply(p["predict"], h)
            h, r = nets[1].apply(p["dynamics"], h, action)
            h = 0.5 * h + 0.5 * jax.lax.stop_gradient(h)
            total = optax.softmax_cross_entropy(logits, policy)
            total += 0.25 * optax.softmax_cross_entropy(v, two_hot(value))
            return h, total + optax.softmax_cross_entropy(r, two_hot(reward))

        _, losses = jax.lax.scan(one, h, (played, rewards, values, policies))
        return losses.mean(), state

    def batch(key: Any) -> Any:
        frames = jax.random.randint(key, (128, 64, 64, 12), 0, 255).astype(jnp.uint8)
        played = jax.random.randint(key, (5, 128), 0, actions)
        x = jax.random.normal(key, (5, 128))
        policies = jax.nn.softmax(jax.random.normal(key, (5, 128, actions)))
        return frames, played, x, x, policies

    tx = optax.chain(
        optax.clip_by_global_norm(5.0),
        optax.add_decayed_weights(1e-4),
        optax.sgd(0.05, momentum=0.9),
    )
    return Workload(init, loss, batch, tx)


# ---- multi-head latent attention, Linen


class LatentAttention(nn.Module):
    """DeepSeek's: keys and values from a small latent, one rotary key for all heads."""

    dtype: Any
    heads: int = 8
    plain: int = 64
    turned: int = 32
    latent: int = 128

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size, length, width = x.shape

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, use_bias=False, dtype=self.dtype)

        def rotate(x: Any) -> Any:
            rates = 1e4 ** -(jnp.arange(0, self.turned, 2) / self.turned)
            angles = jnp.arange(length)[:, None] * rates
            sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
            a, b = jnp.split(f32(x), 2, -1)
            turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return turned.astype(self.dtype)

        q = nn.RMSNorm(dtype=self.dtype)(dense(256)(x))
        q = dense(self.heads * (self.plain + self.turned))(q)
        q = q.reshape(size, length, self.heads, -1)
        q, q_turned = q[..., : self.plain], rotate(q[..., self.plain :])
        small = dense(self.latent + self.turned)(x)
        k_turned = rotate(small[..., None, self.latent :])
        small = nn.RMSNorm(dtype=self.dtype)(small[..., : self.latent])
        kv = dense(self.heads * 2 * self.plain)(small)
        k, v = jnp.split(kv.reshape(size, length, self.heads, -1), 2, -1)
        k_turned = jnp.broadcast_to(k_turned, (*k.shape[:3], self.turned))
        q = jnp.concatenate([q, q_turned], -1)
        k = jnp.concatenate([k, k_turned], -1)
        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        out = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(self.dtype), v)
        return dense(width)(out.reshape(size, length, -1))


class LatentDecoder(nn.Module):
    """And a head that predicts the token after the next one (MTP)."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> tuple[Any, Any]:
        def norm(x: Any) -> Any:
            return nn.RMSNorm(dtype=self.dtype)(x)

        def dense(n: int) -> nn.Module:
            return nn.Dense(n, use_bias=False, dtype=self.dtype)

        def block(x: Any) -> Any:
            x = x + LatentAttention(self.dtype)(norm(x))
            h = norm(x)
            return x + dense(512)(nn.silu(dense(1408)(h)) * dense(1408)(h))

        embed = nn.Embed(16384, 512, dtype=self.dtype)
        head = dense(16384)
        x = embed(ids)
        for _ in range(3):
            x = block(x)
        logits = f32(head(norm(x)))
        after = jnp.roll(embed(ids), -1, 1)
        y = block(dense(512)(jnp.concatenate([norm(x), norm(after)], -1)))
        return logits, f32(head(norm(y)))


def latent_attention(dtype: Any) -> Workload:
    """Next token and the one after, with a z loss."""

    def loss(apply: Any, ids: Any) -> Any:
        first, second = apply(ids[:, :-2])
        z = jax.nn.logsumexp(first, -1)
        value = cross_entropy(first, ids[:, 1:-1]).mean() + 1e-4 * (z**2).mean()
        return value + 0.3 * cross_entropy(second, ids[:, 2:]).mean()

    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 2000, 100000)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1),
    )
    return of_linen(
        LatentDecoder(dtype),
        (jnp.zeros((1, 16), jnp.int32),),
        loss,
        lambda key: jax.random.randint(key, (4, 514), 0, 16384),
        tx,
    )


# ---- disentangled attention, Linen


class Disentangled(nn.Module):
    """DeBERTa's: content to content, content to place and place to content."""

    dtype: Any
    heads: int = 8

    @nn.compact
    def __call__(self, x: Any, table: Any, mask: Any) -> Any:
        size, length, width = x.shape
        query, key, value = (
            nn.DenseGeneral((self.heads, width // self.heads), dtype=self.dtype)
            for _ in range(3)
        )
        q, k, v = query(x), key(x), value(x)
        kr, qr = key(table), query(table)  # shared, as in version 3
        span = table.shape[0] // 2
        apart = jnp.arange(length)[:, None] - jnp.arange(length)
        index = jnp.clip(apart + span, 0, 2 * span - 1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        c2p = jnp.einsum("bqhd,rhd->bhqr", q, kr)
        c2p = jnp.take_along_axis(c2p, index[None, None], -1)
        p2c = jnp.einsum("bkhd,rhd->bhkr", k, qr)
        p2c = jnp.take_along_axis(p2c, index.T[None, None], -1).swapaxes(-1, -2)
        scores = f32(scores + c2p + p2c) * (3 * q.shape[-1]) ** -0.5
        scores = jnp.where(mask[:, None, None], scores, -1e9)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(width, (-2, -1), dtype=self.dtype)(out)


class Deberta(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, ids: Any, mask: Any, key: Any) -> Any:
        keys = iter(jax.random.split(key, 16))

        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=self.dtype)(x)

        def drop(x: Any) -> Any:
            return nn.Dropout(0.1, deterministic=False)(x, rng=next(keys))

        embed = nn.Embed(16384, 512, dtype=self.dtype)
        normal = nn.initializers.normal(0.02)
        table = self.param("places", normal, (256, 512))
        table = norm(table.astype(self.dtype))
        x = drop(norm(embed(ids)) * mask[..., None].astype(self.dtype))
        for _ in range(4):
            x = norm(x + drop(Disentangled(self.dtype)(x, table, mask)))
            h = nn.gelu(nn.Dense(2048, dtype=self.dtype)(x), approximate=False)
            x = norm(x + drop(nn.Dense(512, dtype=self.dtype)(h)))
        h = norm(nn.gelu(nn.Dense(512, dtype=self.dtype)(x), approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (16384,))
        return f32(embed.attend(h)) + bias


def deberta(dtype: Any) -> Workload:
    """Masked tokens, Adafactor."""

    def loss(apply: Any, batch: Any) -> Any:
        ids, labels, mask, chosen, key = batch
        losses = cross_entropy(apply(ids, mask, key), labels)
        return (losses * chosen).sum() / (chosen.sum() + 1)

    def batch(key: Any) -> Any:
        ids = jax.random.randint(key, (16, 256), 0, 16384)
        mask = jax.random.bernoulli(key, 0.9, ids.shape)
        return ids, ids, mask, mask.astype(jnp.float32), key

    ids = jnp.zeros((1, 256), jnp.int32)
    example = ids, ids == 0, jax.random.key(0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3))
    return of_linen(Deberta(dtype), example, loss, batch, tx)


# ---- Mamba-2, plain JAX


def state_duality(dtype: Any) -> Workload:
    """Chunked state-space duality in scanned, checkpointed layers; Lion."""
    width, heads, size, states, chunk, layers = 512, 16, 64, 64, 128, 4
    inner = heads * size
    joined = inner + 2 * states
    vocabulary = 16384

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 8))

        def normal(*shape: int) -> Any:
            return 0.02 * jax.random.normal(next(keys), shape)

        blocks = {
            "norm": jnp.ones((layers, width)),
            "in": normal(layers, width, inner + joined + heads),
            "conv": normal(layers, 4, joined),
            "conv_bias": jnp.zeros((layers, joined)),
            "dt_bias": jnp.zeros((layers, heads)),
            "a_log": jnp.zeros((layers, heads)),
            "skip": jnp.ones((layers, heads)),
            "gate_norm": jnp.ones((layers, inner)),
            "out": normal(layers, inner, width),
        }
        return {
            "embed": normal(vocabulary, width),
            "blocks": blocks,
            "norm": jnp.ones(width),
        }, ()

    def norm(x: Any, scale: Any) -> Any:
        x = f32(x)
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return (x * scale).astype(dtype)

    def ssd(x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
        n, length = x.shape[:2]

        def chunks(y: Any) -> Any:
            return y.reshape(n, length // chunk, chunk, *y.shape[2:])

        x, dt, b, c = chunks(x), chunks(dt), chunks(b), chunks(c)
        total = jnp.cumsum(dt * a, 2)  # float32: n, chunks, chunk, heads
        apart = total[:, :, :, None] - total[:, :, None]
        mask = jnp.tril(jnp.ones((chunk, chunk), bool))[..., None]
        decay = jnp.exp(jnp.where(mask, apart, -jnp.inf))
        scores = jnp.einsum("bcln,bcsn->bcls", c, b)
        weights = f32(scores)[..., None] * decay * dt[:, :, None]
        y = jnp.einsum("bclsh,bcshp->bclhp", weights.astype(dtype), x)
        rest = jnp.exp(total[:, :, -1:] - total) * dt
        fed = x * rest[..., None].astype(dtype)
        added = jnp.einsum(
            "bcsn,bcshp->bchpn", b, fed, preferred_element_type=jnp.float32
        )
        whole = jnp.exp(total[:, :, -1])

        def carry(h: Any, seen: Any) -> Any:
            new, by = seen
            return h * by[..., None, None] + new, h

        start = jnp.zeros((n, heads, size, states), jnp.float32)
        seen = added.swapaxes(0, 1), whole.swapaxes(0, 1)
        _, before = jax.lax.scan(carry, start, seen)
        before = before.swapaxes(0, 1).astype(dtype)
        far = jnp.einsum("bcln,bchpn->bclhp", c, before)
        y = y + far * jnp.exp(total)[..., None].astype(dtype)
        return y.reshape(n, length, heads, size)

    def block(x: Any, p: Any) -> Any:
        n, length, _ = x.shape
        h = norm(x, p["norm"]) @ p["in"].astype(dtype)
        z, xbc, dt = jnp.split(h, [inner, inner + joined], -1)
        padded = jnp.pad(xbc, ((0, 0), (3, 0), (0, 0)))
        kernel = p["conv"].astype(dtype)
        xbc = sum(padded[:, i : i + length] * kernel[i] for i in range(4))
        xbc = jax.nn.silu(xbc + p["conv_bias"].astype(dtype))
        u, b, c = jnp.split(xbc, [inner, inner + states], -1)
        u = u.reshape(n, length, heads, size)
        dt = jax.nn.softplus(f32(dt) + p["dt_bias"])
        y = ssd(u, dt, -jnp.exp(p["a_log"]), b, c)
        y = y + u * p["skip"].astype(dtype)[:, None]
        y = norm(y.reshape(n, length, inner) * jax.nn.silu(z), p["gate_norm"])
        return x + y @ p["out"].astype(dtype), None

    def loss(params: Any, state: Any, ids: Any) -> Any:
        embed = params["embed"].astype(dtype)
        x = embed[ids[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
        logits = f32(norm(x, params["norm"]) @ embed.T)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        return losses.mean(), state

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4, weight_decay=0.1))
    return Workload(
        init,
        loss,
        lambda key: jax.random.randint(key, (4, 1025), 0, vocabulary),
        tx,
    )


# ---- wav2vec 2.0, Linen


class Speech(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any, key: Any) -> tuple[Any, Any, Any]:
        def dense(n: int) -> nn.Module:
            return nn.Dense(n, dtype=self.dtype)

        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=self.dtype)(x)

        x = x[..., None]
        shapes = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))
        for i, (kernel, stride) in enumerate(shapes):
            x = nn.Conv(256, (kernel,), (stride,), use_bias=False, dtype=self.dtype)(x)
            if i == 0:
                x = nn.GroupNorm(None, 1, dtype=self.dtype)(x)
            x = nn.gelu(x, approximate=False)
        features = norm(x)
        # what is to be found
        groups, entries = 2, 320
        logits = f32(dense(groups * entries)(features))
        logits = logits.reshape(*features.shape[:2], groups, entries)
        noise = jax.random.gumbel(key, logits.shape)
        soft = jax.nn.softmax((logits + noise) / 2.0)
        hard = jax.nn.one_hot(soft.argmax(-1), entries)
        drawn = hard + soft - jax.lax.stop_gradient(soft)
        book = self.param("book", nn.initializers.uniform(1.0), (groups, entries, 128))
        codes = jnp.einsum(
            "btgv,gvd->btgd", drawn.astype(self.dtype), book.astype(self.dtype)
        )
        targets = dense(256)(codes.reshape(*codes.shape[:2], -1))
        usage = jax.nn.softmax(logits).mean((0, 1))
        # what finds it
        x = dense(384)(features)
        filler = self.param("mask", nn.initializers.uniform(1.0), (384,))
        x = jnp.where(mask[..., None], filler.astype(self.dtype), x)
        place = nn.Conv(384, (64,), feature_group_count=16, dtype=self.dtype)(x)
        x = norm(x + nn.gelu(place, approximate=False))
        for _ in range(4):
            q, k, v = (nn.DenseGeneral((6, 64), dtype=self.dtype)(x) for _ in range(3))
            scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / 8
            weights = jax.nn.softmax(scores).astype(self.dtype)
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            h = nn.DenseGeneral(384, (-2, -1), dtype=self.dtype)(h)
            x = norm(x + h)
            h = nn.gelu(dense(1536)(x), approximate=False)
            x = norm(x + dense(384)(h))
        return dense(256)(x), targets, usage


def wav2vec(dtype: Any) -> Workload:
    """A contrastive task over quantized features, and a diversity loss."""

    def loss(apply: Any, batch: Any) -> Any:
        x, mask, others, key = batch
        context, targets, usage = apply(x, mask, key)
        wrong = jax.vmap(lambda t, i: t[i])(targets, others)
        each = jnp.concatenate([targets[:, :, None], wrong], 2)

        def unit(x: Any) -> Any:
            x = f32(x)
            return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-8)

        alike = jnp.einsum("btd,btnd->btn", unit(context), unit(each)) / 0.1
        losses = -jax.nn.log_softmax(alike)[..., 0]
        value = (losses * mask).sum() / mask.sum()
        entropy = -(usage * jnp.log(usage + 1e-7)).sum(-1)
        return value + 0.1 * (1 - jnp.exp(entropy) / 320).mean()

    def batch(key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, (16, 100))
        others = jax.random.randint(key, (16, 100, 50), 0, 100)
        return jax.random.normal(key, (16, 32000)), mask, others, key

    example = jnp.zeros((1, 32000)), jnp.zeros((1, 100), bool), jax.random.key(0)
    return of_linen(Speech(dtype), example, loss, batch, optax.adamw(5e-4, b2=0.98))


# ---- convolutional LSTM, Equinox


class ConvCell(eqx.Module):
    gates: eqx.nn.Conv2d
    peephole: jax.Array

    def __init__(self, inputs: int, width: int, side: int, key: Any) -> None:
        self.gates = eqx.nn.Conv2d(inputs + width, 4 * width, 3, padding=1, key=key)
        self.peephole = jnp.zeros((3, width, 1, 1))

    def __call__(self, carry: Any, x: Any) -> Any:
        h, c = carry  # h in the dtype of products, c in float32
        y = f32(self.gates(jnp.concatenate([x, h])))
        i, f, g, o = jnp.split(y, 4)
        a, b, d = f32(self.peephole)
        i, f = jax.nn.sigmoid(i + a * c), jax.nn.sigmoid(f + b * c + 1)
        c = f * c + i * jnp.tanh(g)
        h = jax.nn.sigmoid(o + d * c) * jnp.tanh(c)
        return (h.astype(x.dtype), c)


class Nowcast(eqx.Module):
    down: eqx.nn.Conv2d
    encoder: list[ConvCell]
    decoder: list[ConvCell]
    up: eqx.nn.ConvTranspose2d
    out: eqx.nn.Conv2d
    width: int = eqx.field(static=True)

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 7)
        self.width = width = 64
        self.down = eqx.nn.Conv2d(1, width, 4, 2, 1, key=keys[0])
        self.encoder = [ConvCell(width, width, 32, k) for k in keys[1:3]]
        self.decoder = [ConvCell(width, width, 32, k) for k in keys[3:5]]
        self.up = eqx.nn.ConvTranspose2d(width, 32, 4, 2, padding=1, key=keys[5])
        self.out = eqx.nn.Conv2d(32, 1, 3, padding=1, key=keys[6])

    def __call__(self, frames: Any) -> Any:
        def embed(x: Any) -> Any:
            return jax.nn.silu(self.down(x[None]))

        def run(cells: Any, carries: Any, x: Any) -> tuple[Any, Any]:
            new = []
            for cell, carry in zip(cells, carries, strict=True):
                new.append(cell(carry, x))
                x = new[-1][0]
            return tuple(new), x

        side = frames.shape[-1] // 2
        h = jnp.zeros((self.width, side, side), frames.dtype)
        start = tuple((h, f32(h)) for _ in self.encoder)

        def encode(carries: Any, frame: Any) -> Any:
            return run(self.encoder, carries, embed(frame))[0], None

        def decode(carry: Any, _: Any) -> Any:
            carries, frame = carry
            carries, h = run(self.decoder, carries, embed(frame))
            out = f32(self.out(jax.nn.silu(self.up(h))))[0]
            return (carries, out.astype(frames.dtype)), out

        carries, _ = jax.lax.scan(encode, start, frames)
        _, outs = jax.lax.scan(decode, (carries, frames[-1]), None, length=8)
        return outs


def conv_lstm(dtype: Any) -> Workload:
    """Radar frames: eight seen, eight to come."""
    _, static = eqx.partition(
        eqx.filter_eval_shape(Nowcast, jax.random.key(0)), lambda x: hasattr(x, "shape")
    )

    def init(key: Any) -> Any:
        return eqx.filter(Nowcast(key), eqx.is_array), ()

    def loss(params: Any, state: Any, frames: Any) -> Any:
        model = eqx.combine(cast(params, dtype), static)
        out = jax.vmap(model)(frames[:, :8].astype(dtype))
        wanted = frames[:, 8:]
        weight = jnp.where(wanted > 0.5, 5.0, 1.0)
        apart = out - wanted
        return (weight * (apart**2 + jnp.abs(apart))).mean(), state

    def batch(key: Any) -> Any:
        return jax.random.uniform(key, (16, 16, 64, 64))

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return Workload(init, loss, batch, tx)


# ---- PixelCNN++, Linen


class ShiftedConv(nn.Module):
    """Down, or down and right, by padding."""

    width: int
    right: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.right:
            x = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
            return nn.Conv(self.width, (2, 2), padding="VALID", dtype=self.dtype)(x)
        x = jnp.pad(x, ((0, 0), (1, 0), (1, 1), (0, 0)))
        return nn.Conv(self.width, (2, 3), padding="VALID", dtype=self.dtype)(x)


class GatedResidual(nn.Module):
    right: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, beside: Any, key: Any) -> Any:
        def both(x: Any) -> Any:
            return nn.elu(jnp.concatenate([x, -x], -1))

        width = x.shape[-1]
        h = ShiftedConv(width, self.right, self.dtype)(both(x))
        if beside is not None:
            h = h + nn.Dense(width, dtype=self.dtype)(both(beside))
        h = nn.Dropout(0.5, deterministic=False)(both(h), rng=key)
        h = ShiftedConv(2 * width, self.right, self.dtype)(h)
        a, b = jnp.split(h, 2, -1)
        return x + a * nn.sigmoid(b)


class PixelNetwork(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, key: Any) -> Any:
        keys = iter(jax.random.split(key, 8))
        x = jnp.concatenate([x, jnp.ones((*x.shape[:3], 1), x.dtype)], -1)
        above = jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        left = jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
        u = ShiftedConv(96, False, self.dtype)(above)
        v = u + ShiftedConv(96, True, self.dtype)(left)
        for _ in range(4):
            u = GatedResidual(False, self.dtype)(u, None, next(keys))
            v = GatedResidual(True, self.dtype)(v, u, next(keys))
        return f32(nn.Dense(100, dtype=self.dtype)(nn.elu(v)))


def pixel_cnn(dtype: Any) -> Workload:
    """A mixture of ten discretized logistics, by gated shifted convolutions."""
    mix = 10

    def likelihood(x: Any, out: Any) -> Any:
        logits, rest = out[..., :mix], out[..., mix:].reshape(*x.shape, 3 * mix)
        means, scales = rest[..., :mix], jnp.maximum(rest[..., mix : 2 * mix], -7.0)
        c = jnp.tanh(rest[..., 2 * mix :])
        x = x[..., None]
        second = means[..., 1, :] + c[..., 0, :] * x[..., 0, :]
        third = means[..., 2, :] + c[..., 1, :] * x[..., 0, :]
        third = third + c[..., 2, :] * x[..., 1, :]
        means = jnp.stack([means[..., 0, :], second, third], -2)
        apart, inverse = x - means, jnp.exp(-scales)
        above, below = inverse * (apart + 1 / 255), inverse * (apart - 1 / 255)
        first, last = above - jax.nn.softplus(above), -jax.nn.softplus(below)
        delta = jax.nn.sigmoid(above) - jax.nn.sigmoid(below)
        middle = inverse * apart
        dense = middle - scales - 2 * jax.nn.softplus(middle) - math.log(127.5)
        inside = jnp.where(delta > 1e-5, jnp.log(jnp.maximum(delta, 1e-12)), dense)
        log_p = jnp.where(x < -0.999, first, jnp.where(x > 0.999, last, inside))
        return jax.nn.logsumexp(log_p.sum(-2) + jax.nn.log_softmax(logits), -1)

    def loss(apply: Any, batch: Any) -> Any:
        frames, key = batch
        x = frames.astype(jnp.float32) / 127.5 - 1
        return -likelihood(x, apply(x.astype(dtype), key)).mean()

    def batch(key: Any) -> Any:
        x = jax.random.randint(key, (64, 32, 32, 3), 0, 256)
        return x.astype(jnp.uint8), key

    example = jnp.zeros((1, 32, 32, 3)), jax.random.key(0)
    return of_linen(PixelNetwork(dtype), example, loss, batch, optax.adam(2e-4))
