"""Train an image classifier with `fit` in bfloat16 (Keras 3 on JAX).

Usage:
    python examples/digits_keras.py
    python examples/digits_keras.py --policy mixed_float16   # scales the loss as well
    python examples/digits_keras.py --scale 14 --width 128 --batch 256  # GPU or TPU

The images are scikit-learn's 8 x 8 handwritten digits; `--scale` enlarges them.
Decorate `train_step` before the first `fit`: Keras compiles it there.

Expected output (2 CPU cores, JAX 0.12):
    epoch 1  loss 0.98  accuracy 80.0%
    epoch 2  loss 0.29  accuracy 95.3%
    epoch 3  loss 0.14  accuracy 96.4%
    epoch 4  loss 0.08  accuracy 98.1%
    epoch 5  loss 0.05  accuracy 98.1%
    epoch 6  loss 0.03  accuracy 98.6%
    epoch 7  loss 0.02  accuracy 98.6%
    epoch 8  loss 0.02  accuracy 98.1%
    mixed_bfloat16: the weights are float32
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers
from sklearn import datasets, model_selection

import jmp_rewrite as jmpr


def make_model(size: int, width: int) -> keras.Model:
    """Three convolutions with batch norm, then a linear layer."""
    model = keras.Sequential([keras.Input((size, size, 1))])
    for i in range(3):
        model.add(layers.Conv2D(2**i * width, 3, strides=2 if i else 1, padding="same"))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10, name="head"))
    return model


class Print(keras.callbacks.Callback):
    """One line an epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        """Prints the loss, and the accuracy on the test images."""
        loss, score = logs["loss"], logs["val_accuracy"]
        print(f"epoch {epoch + 1}  loss {loss:.2f}  accuracy {score:.1%}", flush=True)


def load_digits(scale: int) -> list[np.ndarray]:
    """Returns images f32[n, 8 * scale, 8 * scale, 1] and labels: train, then test."""
    digits = datasets.load_digits()
    images = np.kron(digits.images, np.ones((scale, scale)))[..., None] / 16
    x, x_test, y, y_test = model_selection.train_test_split(
        images.astype("f4"), digits.target.astype("i4"), test_size=0.2, random_state=0
    )
    return [x, y, x_test, y_test]


def main(argv: list[str] | None = None) -> float:
    """Trains; returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--scale", type=int, default=1)
    args = parser.parse_args(argv)

    keras.utils.set_random_seed(0)
    x, y, x_test, y_test = load_digits(args.scale)
    model = make_model(8 * args.scale, args.width)
    optimizer = keras.optimizers.Adam(3e-3)
    if jmpr.Policy(args.policy).loss_scale is not None:  # float16
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.train_step = jmpr.mixed_precision(model.train_step, args.policy)
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        batch_size=args.batch,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        verbose=0,
        callbacks=[Print()],
    )
    weights = {variable.dtype for variable in model.trainable_variables}
    print(f"{args.policy}: the weights are {', '.join(weights)}")
    return history.history["val_accuracy"][-1]


if __name__ == "__main__":
    main()
