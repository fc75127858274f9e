"""Language models of the second zoo, written as their users write them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY = 8, 512, 512, 2, 8192


def tokens(key: Any) -> Any:
    """A batch of token sequences, one token longer than the model reads."""
    return jax.random.randint(key, (BATCH, LENGTH + 1), 0, VOCABULARY)


def next_token_loss(logits: Any, labels: Any) -> Any:
    """Mean cross entropy, by `log_softmax` and `take_along_axis`."""
    log_p = jax.nn.log_softmax(at_least_float32(logits))
    return -jnp.take_along_axis(log_p, labels[..., None], -1).mean()


def language_model(model: nn.Module, optimizer: Any, extra: Any = None) -> Workload:
    """The workload of a model from tokens to logits.

    Args:
      model: a module; it returns logits, or logits and a loss to add.
      optimizer: of optax.
      extra: the factor of that loss; None if there is none.
    """

    def init(key: Any) -> Any:
        return model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"], ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        out = model.apply({"params": params}, batch[:, :-1])
        logits, more = (out, 0.0) if extra is None else out
        value = next_token_loss(logits, batch[:, 1:])
        return value + (extra or 0.0) * more, state

    return Workload(init, loss, tokens, optimizer)


# ---- a decoder with grouped queries


def rotated(x: Any) -> Any:
    """Rotary position embeddings; angles in float32, as everyone has learnt."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class GroupedAttention(nn.Module):
    """Causal attention of 8 heads over 2 key-value heads, in a sliding window."""

    dtype: Any
    heads: int = 8
    groups: int = 2
    window: int = 256

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size = x.shape[-1] // self.heads

        def project(heads: int, name: str) -> Any:
            return nn.DenseGeneral(
                (heads, size), use_bias=False, dtype=self.dtype, name=name
            )(x)

        q, k = rotated(project(self.heads, "q")), rotated(project(self.groups, "k"))
        v = project(self.groups, "v")
        q = q.reshape(*q.shape[:2], self.groups, -1, size)
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k) * size**-0.5
        ago = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
        seen = (ago >= 0) & (ago < self.window)
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(at_least_float32(scores)).astype(scores.dtype)
        out = jnp.einsum("bgrts,bsgd->btgrd", weights, v)
        out = out.reshape(*x.shape[:2], self.heads, size)
        return nn.DenseGeneral(
            x.shape[-1], axis=(-2, -1), use_bias=False, dtype=self.dtype, name="o"
        )(out)


class GatedMLP(nn.Module):
    """SwiGLU."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def dense(width: int) -> nn.Module:
            return nn.Dense(width, use_bias=False, dtype=self.dtype)

        width = x.shape[-1]
        gate, up = dense(8 * width // 3)(x), dense(8 * width // 3)(x)
        return dense(width)(nn.silu(gate) * up)


class Decoder(nn.Module):
    """Pre-norm decoder with tied embeddings and capped logits."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embed(ids) * jnp.asarray(WIDTH**0.5, self.dtype)
        for _ in range(LAYERS):
            x = x + GroupedAttention(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
            x = x + GatedMLP(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
        logits = embed.attend(nn.RMSNorm(dtype=self.dtype)(x))
        return 30.0 * jnp.tanh(at_least_float32(logits) / 30.0)


def decoder(dtype: Any) -> Workload:
    """RMSNorm, rotary positions, grouped queries, SwiGLU, tied and capped logits."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95))
    return language_model(Decoder(dtype), tx)


# ---- routed experts


class Experts(nn.Module):
    """Two of eight experts a token: sorted by expert, then `ragged_dot`."""

    dtype: Any
    experts: int = 8
    chosen: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, wide = x.shape[-1], 2 * x.shape[-1]
        flat = x.reshape(-1, width)
        router = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32)
        probabilities = jax.nn.softmax(router(flat.astype(jnp.float32)))
        gates, expert = jax.lax.top_k(probabilities, self.chosen)
        gates = gates / gates.sum(-1, keepdims=True)
        order = jnp.argsort(expert.reshape(-1))
        sizes = jnp.bincount(expert.reshape(-1), length=self.experts)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, wide))
        down = self.param("down", init, (self.experts, wide, width))
        rows = flat[order // self.chosen].astype(self.dtype)
        hidden = nn.gelu(jax.lax.ragged_dot(rows, up.astype(self.dtype), sizes))
        rows = jax.lax.ragged_dot(hidden, down.astype(self.dtype), sizes)
        back = rows[jnp.argsort(order)].reshape(-1, self.chosen, width)
        out = jnp.einsum("tkd,tk->td", back, gates.astype(self.dtype))
        share = jax.nn.one_hot(expert[:, 0], self.experts).mean(0)
        balance = self.experts * (share * probabilities.mean(0)).sum()
        return out.reshape(x.shape), balance


class DispatchedExperts(nn.Module):
    """One of eight experts a token, of limited capacity: dense dispatch."""

    dtype: Any
    experts: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        groups, length, width = x.shape
        capacity = 2 * length // self.experts
        logits = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32)(
            x.astype(jnp.float32)
        )
        probabilities = jax.nn.softmax(logits)
        expert = jax.nn.one_hot(probabilities.argmax(-1), self.experts)
        place = jnp.cumsum(expert, axis=1) * expert - 1
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=self.dtype)
        gate = (probabilities * expert).astype(self.dtype)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, 4 * width))
        down = self.param("down", init, (self.experts, 4 * width, width))
        sent = jnp.einsum("gtec,gtd->egcd", slot, x)
        hidden = nn.gelu(jnp.einsum("egcd,edf->egcf", sent, up.astype(self.dtype)))
        back = jnp.einsum("egcf,efd->egcd", hidden, down.astype(self.dtype))
        out = jnp.einsum("gtec,gte,egcd->gtd", slot, gate, back)
        balance = expert.mean((0, 1)) * probabilities.mean((0, 1))
        return out, self.experts * balance.sum()


class MixtureDecoder(nn.Module):
    """A decoder whose second layer of each block is routed."""

    dtype: Any
    routed: type[nn.Module]

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(ids)
        mask = nn.make_causal_mask(ids)
        losses = 0.0
        for _ in range(2):
            h = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.SelfAttention(8, dtype=self.dtype)(h, mask)
            h = nn.LayerNorm(dtype=self.dtype)(x)
            out, balance = self.routed(self.dtype)(h)
            x, losses = x + out, losses + balance
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(x), losses


def experts(dtype: Any) -> Workload:
    """Routed experts by sorting and `ragged_dot`, with a loss that balances them."""
    return language_model(MixtureDecoder(dtype, Experts), optax.adamw(3e-4), 0.01)


def dispatch(dtype: Any) -> Workload:
    """Routed experts by dense dispatch to slots of limited capacity."""
    model = MixtureDecoder(dtype, DispatchedExperts)
    return language_model(model, optax.adamw(3e-4), 0.01)


# ---- a state-space model


class StateSpace(nn.Module):
    """A gated layer with a diagonal, data-dependent recurrence."""

    dtype: Any
    states: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def dense(width: int, **options: Any) -> nn.Module:
            return nn.Dense(width, dtype=self.dtype, **options)

        inner = 2 * x.shape[-1]
        x, gate = jnp.split(dense(2 * inner, use_bias=False)(x), 2, axis=-1)
        x = nn.Conv(
            inner,
            (4,),
            padding="CAUSAL",
            feature_group_count=inner,
            dtype=self.dtype,
        )(x)
        x = nn.silu(x)
        rank = inner // 16
        low, b, c = jnp.split(
            dense(rank + 2 * self.states, use_bias=False)(x),
            [rank, rank + self.states],
            axis=-1,
        )
        step = nn.softplus(at_least_float32(dense(inner)(low)))
        rates = -jnp.exp(
            self.param(
                "rates",
                lambda *_: jnp.log(
                    jnp.tile(jnp.arange(1.0, self.states + 1), (inner, 1))
                ),
            )
        )
        decay = jnp.exp(step[..., None] * rates)
        drive = (step * x)[..., None] * b[..., None, :]

        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, h = jax.lax.associative_scan(combine, (decay, drive), axis=1)
        y = jnp.einsum("btds,bts->btd", h, at_least_float32(c)).astype(self.dtype)
        y = y + x * self.param("skip", nn.initializers.ones, (inner,)).astype(
            self.dtype
        )
        return dense(gate.shape[-1] // 2, use_bias=False)(y * nn.silu(gate))


class StateSpaceModel(nn.Module):
    """Pre-norm state-space layers."""

    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH // 2, dtype=self.dtype)(ids)
        for _ in range(2):
            x = x + StateSpace(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(x)


def state_space(dtype: Any) -> Workload:
    """A selective state-space model by `associative_scan`."""
    return language_model(StateSpaceModel(dtype), optax.adamw(3e-4))
