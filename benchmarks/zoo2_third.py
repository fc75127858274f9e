"""More of the second zoo's second half, in Flax Linen, written before its figures."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32
from zoo2_language import GatedMLP, GroupedAttention, next_token_loss, rotated
from zoo2_vision import Encoder

# ---- a scanned decoder with checkpoints

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 512, 512, 8192


class Block(nn.Module):
    """Norms before and after, one key-value head, a window, capped scores, GeGLU."""

    dtype: Any
    heads: int = 8
    window: int = 128

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        def norm(x: Any) -> Any:
            return nn.RMSNorm(dtype=self.dtype)(x)

        def dense(width: int) -> nn.Module:
            return nn.Dense(width, use_bias=False, dtype=self.dtype)

        h, size = norm(x), WIDTH // self.heads
        q = rotated(dense(WIDTH)(h).reshape(*h.shape[:2], self.heads, size))
        k = rotated(dense(size)(h)[:, :, None])[:, :, 0]
        scores = jnp.einsum("bthd,bsd->bhts", q * size**-0.5, k)
        scores = 50.0 * jnp.tanh(scores / 50.0)
        ago = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
        seen = (ago >= 0) & (ago < self.window)
        scores = jnp.where(seen, at_least_float32(scores), -2.3e38)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        out = jnp.einsum("bhts,bsd->bthd", weights, dense(size)(h))
        x = x + norm(dense(WIDTH)(out.reshape(x.shape)))
        h = norm(x)
        h = nn.gelu(dense(4 * WIDTH)(h)) * dense(4 * WIDTH)(h)
        return x + norm(dense(WIDTH)(h)), None


class ScannedDecoder(nn.Module):
    """Four blocks in a scan, each checkpointed; tied embeddings, capped logits."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embed(ids) * jnp.asarray(WIDTH**0.5, self.dtype)
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        x, _ = blocks(self.dtype)(x, None)
        logits = embed.attend(nn.RMSNorm(dtype=self.dtype)(x))
        return 30.0 * jnp.tanh(at_least_float32(logits) / 30.0)


def ids_of(key: Any) -> Any:
    """A batch of token ids, i32[BATCH, LENGTH + 1]."""
    return jax.random.randint(key, (BATCH, LENGTH + 1), 0, VOCABULARY)


def language_model(model: nn.Module, optimizer: Any) -> Workload:
    """A model of the next token."""

    def init(key: Any) -> Any:
        return model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"], ()

    def loss(params: Any, state: Any, ids: Any) -> Any:
        logits = model.apply({"params": params}, ids[:, :-1])
        return next_token_loss(logits, ids[:, 1:]), state

    return Workload(init, loss, ids_of, optimizer)


def scanned_decoder(dtype: Any) -> Workload:
    """Multi-query attention in a window, soft caps, scan, checkpoint, clipping."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    return language_model(ScannedDecoder(dtype), tx)


# ---- linear attention


class TimeMix(nn.Module):
    """Attention with decaying state, in chunks: products within, a scan between."""

    dtype: Any
    heads: int = 8
    chunk: int = 64

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size, chunks = WIDTH // self.heads, LENGTH // self.chunk

        def dense(name: str) -> Any:
            y = nn.Dense(WIDTH, use_bias=False, dtype=self.dtype, name=name)(mixed)
            return y.reshape(len(x), chunks, self.chunk, self.heads, size)

        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        mix = self.param("mix", nn.initializers.constant(0.5), (WIDTH,))
        mixed = x + (before - x) * mix.astype(self.dtype)
        r, k, v = dense("r"), dense("k"), dense("v")
        rate = self.param("decay", nn.initializers.normal(1.0), (self.heads,))
        decay = -jnp.exp(rate)  # of the state's logarithm, a position
        at = jnp.arange(self.chunk)
        apart = at[:, None] - at
        within = jnp.where(
            apart >= 0, jnp.exp(apart * decay[:, None, None]), 0.0
        ).astype(self.dtype)
        scores = jnp.einsum("bcihd,bcjhd->bchij", r, k) * within
        inside = jnp.einsum("bchij,bcjhd->bcihd", scores, v)
        left = jnp.exp((self.chunk - 1 - at)[:, None] * decay).astype(self.dtype)
        added = jnp.einsum("bcjhd,bcjhe->cbhde", k * left[:, :, None], v)
        whole = jnp.exp(self.chunk * decay)[:, None, None]

        def carry(state: Any, new: Any) -> Any:
            return state * whole + at_least_float32(new), state

        start = jnp.zeros((len(x), self.heads, size, size))
        _, states = jax.lax.scan(carry, start, added)
        reach = jnp.exp((at + 1)[:, None] * decay).astype(self.dtype)
        outside = jnp.einsum(
            "bcihd,cbhde->bcihe", r * reach[:, :, None], states.astype(self.dtype)
        )
        out = nn.GroupNorm(self.heads, dtype=self.dtype)(
            (inside + outside).reshape(x.shape)
        )
        gate = nn.silu(nn.Dense(WIDTH, use_bias=False, dtype=self.dtype)(x))
        return nn.Dense(WIDTH, use_bias=False, dtype=self.dtype)(out * gate)


class LinearAttention(nn.Module):
    """Four layers; the feed-forward network is a squared ReLU."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=self.dtype)(x)

        x = norm(nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(ids))
        for _ in range(4):
            x = x + TimeMix(self.dtype)(norm(x))
            h = nn.Dense(3 * WIDTH, use_bias=False, dtype=self.dtype)(norm(x))
            x = x + nn.Dense(WIDTH, dtype=self.dtype)(jnp.square(nn.relu(h)))
        return at_least_float32(nn.Dense(VOCABULARY, dtype=self.dtype)(norm(x)))


def linear_attention(dtype: Any) -> Workload:
    """Chunked linear attention with a decaying float32 state."""
    return language_model(LinearAttention(dtype), optax.adamw(3e-4))


# ---- LoRA


class Adapted(nn.Module):
    """A frozen product and what is learnt beside it, of rank 16."""

    dtype: Any
    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        out = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="frozen")(x)
        down = nn.Dense(16, use_bias=False, dtype=self.dtype, name="lora_a")(x)
        up = nn.Dense(
            self.width,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=nn.initializers.zeros,
            name="lora_b",
        )
        return out + 2.0 * up(down)


class AdaptedDecoder(nn.Module):
    """A decoder whose feed-forward products are adapted."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        def norm(x: Any) -> Any:
            return nn.RMSNorm(dtype=self.dtype)(x)

        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(ids)
        for _ in range(4):
            x = x + GroupedAttention(self.dtype)(norm(x))
            h = norm(x)
            gate, up = (Adapted(self.dtype, 1408)(h) for _ in range(2))
            x = x + Adapted(self.dtype, WIDTH)(nn.silu(gate) * up)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(norm(x))


class LowRank(NamedTuple):
    """A step that differentiates the adapters alone; all other weights are frozen."""

    dtype: Any
    optimizer: Any = optax.adamw(1e-4)

    def step(self, adapters: Any, opt_state: Any, frozen: Any, ids: Any) -> Any:
        """One update of the adapters."""

        def loss(adapters: Any) -> Any:
            params = jax.tree.map(
                lambda a, f: f if a is None else a,
                adapters,
                frozen,
                is_leaf=lambda x: x is None,
            )
            logits = AdaptedDecoder(self.dtype).apply({"params": params}, ids[:, :-1])
            return next_token_loss(logits, ids[:, 1:])

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, opt_state = self.optimizer.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, frozen, value

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the step's arguments."""

        def make(key: Any) -> Any:
            ids = jnp.zeros((1, LENGTH), jnp.int32)
            params = AdaptedDecoder(self.dtype).init(key, ids)["params"]
            adapters = jax.tree_util.tree_map_with_path(
                lambda path, x: x if "lora" in jax.tree_util.keystr(path) else None,
                params,
            )
            return adapters, self.optimizer.init(adapters), params, ids_of(key)

        return jax.eval_shape(make, jax.random.key(0))


# ---- multi-task


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, an inverted bottleneck and a learnt scale."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = x.shape[-1]
        h = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(x)
        h = nn.LayerNorm(dtype=self.dtype)(h)
        h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(h))
        h = nn.Dense(width, dtype=self.dtype)(h)
        scale = self.param("scale", nn.initializers.constant(1e-2), (width,))
        return x + h * scale.astype(self.dtype)


class ManyHeads(nn.Module):
    """One trunk; a class, a box, and a segmentation by transposed convolutions."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(64, (4, 4), (4, 4), dtype=self.dtype)(x)
        for width in (64, 128):
            x = ConvNeXtBlock(self.dtype)(ConvNeXtBlock(self.dtype)(x))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            x = nn.Conv(2 * width, (2, 2), (2, 2), dtype=self.dtype)(x)
        pooled = nn.LayerNorm(dtype=self.dtype)(x.mean((1, 2)))
        classes = nn.Dense(100, dtype=self.dtype)(pooled)
        box = nn.sigmoid(nn.Dense(4, dtype=self.dtype)(pooled))
        for width in (128, 64):
            x = nn.ConvTranspose(width, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = nn.relu(nn.GroupNorm(dtype=self.dtype)(x))
        labels = nn.ConvTranspose(8, (4, 4), (4, 4), dtype=self.dtype)(x)
        return tuple(map(at_least_float32, (classes, box, labels)))


def multi_task(dtype: Any) -> Workload:
    """Three losses weighed by learnt uncertainties; gradients are accumulated."""
    model = ManyHeads(dtype)
    images = (128, 128, 128, 3)

    def init(key: Any) -> Any:
        net = model.init(key, jnp.zeros((1, *images[1:])))["params"]
        return {"net": net, "uncertainty": jnp.zeros(3)}, ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        x, kind, box, labels = batch
        classes, boxes, segments = model.apply({"params": params["net"]}, x)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        losses = jnp.stack(
            [
                cross_entropy(classes, kind).mean(),
                optax.losses.huber_loss(boxes, box).mean(),
                cross_entropy(segments, labels).mean(),
            ]
        )
        weight = params["uncertainty"]
        return (losses * jnp.exp(-weight) + weight).sum(), state

    def batch(key: Any) -> Any:
        return (
            jax.random.normal(key, images),
            jax.random.randint(key, images[:1], 0, 100),
            jax.random.uniform(key, (images[0], 4)),
            jax.random.randint(key, images[:3], 0, 8),
        )

    return Workload(init, loss, batch, optax.MultiSteps(optax.adamw(1e-3), 4))


# ---- optimizers


class Classifier(nn.Module):
    """A residual network with a head."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return at_least_float32(
            nn.Dense(100, dtype=self.dtype)(nn.relu(Encoder(self.dtype)(x)))
        )


class SmallDecoder(nn.Module):
    """Two layers."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(ids)
        for _ in range(2):
            x = x + GroupedAttention(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
            x = x + GatedMLP(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(x)


def muon(dtype: Any) -> Workload:
    """A decoder trained by orthogonalized momentum."""
    return language_model(SmallDecoder(dtype), optax.contrib.muon(2e-2))


class Sharpness(NamedTuple):
    """Sharpness-aware minimization: the gradient at the worst point nearby."""

    dtype: Any
    optimizer: Any = optax.sgd(0.1, momentum=0.9)

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """Two gradients, one update."""
        x, labels = batch

        def loss(params: Any) -> Any:
            logits = Classifier(self.dtype).apply({"params": params}, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        grads = jax.grad(loss)(params)
        size = 0.05 / (optax.global_norm(grads) + 1e-12)
        moved = jax.tree.map(lambda p, g: p + size * g, params, grads)
        value, grads = jax.value_and_grad(loss)(moved)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the step's arguments."""

        def make(key: Any) -> Any:
            x = jax.random.normal(key, (128, 32, 32, 3))
            params = Classifier(self.dtype).init(key, x[:1])["params"]
            labels = jax.random.randint(key, (128,), 0, 100)
            return params, self.optimizer.init(params), (x, labels)

        return jax.eval_shape(make, jax.random.key(0))
