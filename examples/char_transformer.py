"""Train a character-level transformer in bfloat16 (Flax Linen).

Usage:
    python examples/char_transformer.py
    python examples/char_transformer.py --policy float32        # to compare
    python examples/char_transformer.py --layers 12 --width 768 --heads 12 \
        --length 512 --batch 64 --steps 2000                    # for a GPU or TPU

The text is Python's own help (`pydoc_data.topics`), so nothing is downloaded. The only
line that mixed precision adds is the decorator of `train_step`.

Expected output (2 CPU cores, JAX 0.12):
    431,720 parameters, 104 characters
    mixed_bfloat16: 100% of the matrix multiplications in half precision
    step  200  loss 2.57
    step  400  loss 2.15
    step  600  loss 1.80
    step  800  loss 1.59
    parameters and optimizer state: float32
    19 ms a step
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jmp_rewrite as jmpr


class Block(nn.Module):
    """A pre-norm transformer layer."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps f32[batch, length, width] to the same shape."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(self.heads)(
            nn.LayerNorm()(x), mask=mask
        )
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class Transformer(nn.Module):
    """A decoder-only language model over characters."""

    vocabulary: int
    length: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps i32[batch, length] to the logits of the next characters."""
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (self.length, self.width)
        )
        x = nn.Embed(self.vocabulary, self.width)(tokens) + positions[: tokens.shape[1]]
        for i in range(self.layers):
            x = Block(self.heads, name=f"layer_{i}")(x)
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm()(x))


def make_step(policy: str) -> Any:
    """Returns a jitted train step: `(state, tokens) -> (state, loss)`."""

    @jax.jit
    @jmpr.mixed_precision(policy)
    def train_step(
        state: TrainState, tokens: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def load_text() -> tuple[np.ndarray, str]:
    """Returns Python's help as numbers i32[n], and its alphabet."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(alphabet)}
    return np.array([index[c] for c in text], np.int32), alphabet


def batches(data: np.ndarray, batch: int, length: int) -> Iterator[np.ndarray]:
    """Yields random windows of the text, one character longer than the model reads."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(data) - length - 1, batch)
        yield np.stack([data[i : i + length + 1] for i in starts])


def main(argv: list[str] | None = None) -> list[float]:
    """Trains; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args(argv)

    data, alphabet = load_text()
    model = Transformer(len(alphabet), args.length, args.width, args.layers, args.heads)
    stream = batches(data, args.batch, args.length)
    params = jax.jit(model.init)(jax.random.key(0), next(stream)[:, :-1])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{count:,} parameters, {len(alphabet)} characters")

    train_step = make_step(args.policy)
    report = jmpr.explain(train_step)(state, next(stream))
    share = f"{report.half_flops:.0%} of the matrix multiplications in half precision"
    print(f"{args.policy}: {share}")

    losses, start, every = [], time.perf_counter(), max(1, args.steps // 4)
    for step in range(1, args.steps + 1):
        state, loss = train_step(state, next(stream))
        losses.append(float(loss))
        if step == 1:  # compiled
            start = time.perf_counter()
        if step % every == 0:
            print(f"step {step:4}  loss {np.mean(losses[-every:]):.2f}", flush=True)
    dtypes = {x.dtype.name for x in jax.tree.leaves((state.params, state.opt_state))}
    print("parameters and optimizer state:", ", ".join(sorted(dtypes - {"int32"})))
    per_step = 1e3 * (time.perf_counter() - start) / max(1, args.steps - 1)
    print(f"{per_step:.0f} ms a step")
    return losses


if __name__ == "__main__":
    main()
