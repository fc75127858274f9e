"""Train an image classifier with batch norm in bfloat16 (Flax NNX).

Usage:
    python examples/digits_nnx.py
    python examples/digits_nnx.py --policy mixed_float16   # scales the loss as well
    python examples/digits_nnx.py --scale 14 --width 128 --batch 256  # GPU or TPU

The images are scikit-learn's 8 x 8 handwritten digits; `--scale` enlarges them.

Expected output (2 CPU cores, JAX 0.12):
    epoch 1  loss 1.16  accuracy 91.4%
    epoch 2  loss 0.39  accuracy 96.7%
    epoch 3  loss 0.19  accuracy 96.9%
    epoch 4  loss 0.10  accuracy 97.2%
    epoch 5  loss 0.06  accuracy 98.3%
    epoch 6  loss 0.04  accuracy 98.3%
    epoch 7  loss 0.03  accuracy 98.3%
    epoch 8  loss 0.02  accuracy 98.6%
    mixed_bfloat16: 0 steps skipped
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn import datasets, model_selection

import jmp_rewrite as jmpr


class Classifier(nnx.Module):
    """Three convolutions with batch norm, then a linear layer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        """Makes the parameters."""
        widths = [1, width, 2 * width, 4 * width]
        self.convs = nnx.List(
            nnx.Conv(a, b, (3, 3), strides=2 if a > 1 else 1, rngs=rngs)
            for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        self.norms = nnx.List(
            nnx.BatchNorm(w, momentum=0.9, rngs=rngs) for w in widths[1:]
        )
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps f32[batch, height, width, 1] to logits f32[batch, 10]."""
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean(axis=(1, 2)))


def make_step(policy: str):
    """Returns a jitted step that changes the model and the optimizer in place."""

    @nnx.jit
    @jmpr.mixed_precision(policy)
    def train_step(
        model: Classifier, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        def loss_fn(model: Classifier) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return jmpr.scale_loss(losses.mean(), optimizer.opt_state)

        old = nnx.as_pure(nnx.state((model, optimizer.step)))
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        # A skipped float16 step leaves the batch statistics as they were.
        new = nnx.as_pure(nnx.state((model, optimizer.step)))
        kept = jmpr.where_applied(optimizer.opt_state, new, old)
        nnx.update((model, optimizer.step), kept)
        return loss

    return train_step


@nnx.jit
def accuracy(model: Classifier, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the share of images that are recognized."""
    return (model(x).argmax(-1) == y).mean()


def load_digits(scale: int) -> list[np.ndarray]:
    """Returns images f32[n, 8 * scale, 8 * scale, 1] and labels: train, then test."""
    digits = datasets.load_digits()
    images = np.kron(digits.images, np.ones((scale, scale)))[..., None] / 16
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
    model = Classifier(args.width, nnx.Rngs(0))
    tx = jmpr.loss_scaling(optax.adam(3e-3), jmpr.Policy(args.policy).loss_scale)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_step = make_step(args.policy)
    score = 0.0
    for i in range(args.epochs):
        model.train()
        losses = [
            train_step(model, optimizer, *images)
            for images in epoch(x, y, args.batch, seed=i)
        ]
        model.eval()
        score = float(accuracy(model, x_test, y_test))
        loss = float(jnp.mean(jnp.stack(losses)))
        print(f"epoch {i + 1}  loss {loss:.2f}  accuracy {score:.1%}", flush=True)
    skipped = jmpr.loss_scale_state(optimizer.opt_state).skipped_steps
    print(f"{args.policy}: {int(skipped)} steps skipped")
    return score


if __name__ == "__main__":
    main()
