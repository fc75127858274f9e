"""Train an image classifier with batch norm in bfloat16 (Equinox).

Usage:
    python examples/digits_equinox.py
    python examples/digits_equinox.py --policy mixed_float16   # scales the loss as well
    python examples/digits_equinox.py --scale 14 --width 128 --batch 256  # GPU or TPU

The images are scikit-learn's 8 x 8 handwritten digits; `--scale` enlarges them.

Expected output (2 CPU cores, JAX 0.12):
    epoch 1  loss 1.29  accuracy 79.4%
    epoch 2  loss 0.46  accuracy 94.7%
    epoch 3  loss 0.20  accuracy 95.8%
    epoch 4  loss 0.09  accuracy 98.1%
    epoch 5  loss 0.06  accuracy 98.3%
    epoch 6  loss 0.03  accuracy 98.3%
    epoch 7  loss 0.02  accuracy 98.3%
    epoch 8  loss 0.02  accuracy 98.3%
    mixed_bfloat16: 0 steps skipped
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets, model_selection

import jmp_rewrite as jmpr


class Classifier(eqx.Module):
    """Three convolutions with batch norm, then a linear layer."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        """Makes the parameters."""
        widths = [1, width, 2 * width, 4 * width]
        *keys, last = jax.random.split(key, 4)
        self.convs = [
            eqx.nn.Conv2d(a, b, 3, 2 if a > 1 else 1, padding=1, key=k)
            for a, b, k in zip(widths[:-1], widths[1:], keys, strict=True)
        ]
        self.norms = [
            eqx.nn.BatchNorm(w, "batch", momentum=0.9, mode="batch") for w in widths[1:]
        ]
        self.head = eqx.nn.Linear(widths[-1], 10, key=last)

    def __call__(
        self, image: jax.Array, stats: eqx.nn.State
    ) -> tuple[jax.Array, eqx.nn.State]:
        """Maps f32[1, height, width] and the batch statistics to logits f32[10]."""
        x = image
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x, stats = norm(conv(x), stats)
            x = jax.nn.relu(x)
        return self.head(x.mean(axis=(1, 2))), stats


def apply(model: Classifier, stats: eqx.nn.State, x: jax.Array) -> Any:
    """Runs the model on a batch: logits f32[batch, 10], new batch statistics."""
    over = dict(axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return jax.vmap(model, **over)(x, stats)


def make_step(tx: optax.GradientTransformation, policy: str) -> Callable[..., Any]:
    """Returns a jitted step: `(model, stats, opt_state, x, y) -> (..., loss)`."""

    @eqx.filter_jit
    @jmpr.mixed_precision(policy)
    def train_step(
        model: Classifier, stats: eqx.nn.State, opt_state: Any, x: Any, y: Any
    ) -> Any:
        def loss_fn(model: Classifier) -> tuple[jax.Array, eqx.nn.State]:
            logits, new = apply(model, stats, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return jmpr.scale_loss(losses.mean(), opt_state), new

        grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = grad_fn(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        # A skipped float16 step leaves the batch statistics as they were.
        new = jmpr.where_applied(opt_state, new, stats)
        return eqx.apply_updates(model, updates), new, opt_state, loss

    return train_step


@eqx.filter_jit
def accuracy(
    model: Classifier, stats: eqx.nn.State, x: jax.Array, y: jax.Array
) -> jax.Array:
    """Returns the share of images that are recognized."""
    logits, _ = apply(eqx.nn.inference_mode(model), stats, x)
    return (logits.argmax(-1) == y).mean()


def load_digits(scale: int) -> list[np.ndarray]:
    """Returns images f32[n, 1, 8 * scale, 8 * scale] and labels: train, then test."""
    digits = datasets.load_digits()
    images = np.kron(digits.images, np.ones((scale, scale)))[:, None] / 16
    x, x_test, y, y_test = model_selection.train_test_split(
        images.astype("f4"), digits.target.astype("i4"), test_size=0.2, random_state=0
    )
    return [x, y, x_test, y_test]


def epoch(
    x: np.ndarray, y: np.ndarray, batch: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the training set in random batches of one size."""
    order = np.random.default_rng(seed).permutation(len(x))
    for start in range(0, len(x) - batch + 1, batch):
        chosen = order[start : start + batch]
        yield x[chosen], y[chosen]


def main(argv: list[str] | None = None) -> float:
    """Trains; returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--scale", type=int, default=1)
    args = parser.parse_args(argv)

    x, y, x_test, y_test = load_digits(args.scale)
    model, stats = eqx.nn.make_with_state(Classifier)(args.width, jax.random.key(0))
    tx = jmpr.loss_scaling(optax.adam(3e-3), jmpr.Policy(args.policy).loss_scale)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = make_step(tx, args.policy)
    score = 0.0
    for i in range(args.epochs):
        losses = []
        for images in epoch(x, y, args.batch, seed=i):
            model, stats, opt_state, loss = train_step(model, stats, opt_state, *images)
            losses.append(loss)
        score = float(accuracy(model, stats, x_test, y_test))
        loss = float(jnp.mean(jnp.stack(losses)))
        print(f"epoch {i + 1}  loss {loss:.2f}  accuracy {score:.1%}", flush=True)
    skipped = jmpr.loss_scale_state(opt_state).skipped_steps
    print(f"{args.policy}: {int(skipped)} steps skipped")
    return score


if __name__ == "__main__":
    main()
