"""ResNet-50 with batch normalization; 64 images of 224 x 224."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.common import Workload, cross_entropy


class Size(NamedTuple):
    """Dimensions."""

    batch: int = 64
    pixels: int = 224
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000


FULL = Size()
QUICK = Size(stages=(1, 1, 1, 1))
SMALL = Size(16, 64, (1, 1, 1, 1), 16, 100)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, as in ResNet v1.5."""

    width: int
    strides: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        h = nn.relu(self.norm()(self.conv(self.width, (1, 1))(x)))
        h = self.conv(self.width, (3, 3), (self.strides, self.strides))(h)
        h = nn.relu(self.norm()(h))
        h = self.conv(4 * self.width, (1, 1))(h)
        h = self.norm(scale_init=nn.initializers.zeros)(h)
        if x.shape != h.shape:
            strides = (self.strides, self.strides)
            x = self.conv(4 * self.width, (1, 1), strides, name="project")(x)
            x = self.norm(name="project_norm")(x)
        return nn.relu(x + h)


class ResNet(nn.Module):
    """As in Flax's ImageNet example."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x):
        size = self.size
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=False,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )
        x = conv(size.width, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="stem")(x)
        x = nn.relu(norm(name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, blocks in enumerate(size.stages):
            for j in range(blocks):
                strides = 2 if i > 0 and j == 0 else 1
                name = f"stage{i}_block{j}"
                x = Bottleneck(size.width * 2**i, strides, conv, norm, name=name)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(size.classes, dtype=self.dtype, name="head")(x)


def make(dtype: Any, size: Size = FULL) -> Workload:
    """The workload; by hand, `dtype` is the half dtype."""
    model = ResNet(size, dtype)

    def init(key):
        images = jnp.zeros((1, size.pixels, size.pixels, 3))
        variables = model.init(key, images)
        return variables["params"], variables["batch_stats"]

    def loss(params, state, batch):
        variables = {"params": params, "batch_stats": state}
        logits, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]).mean(), new["batch_stats"]

    def batch(key):
        keys = jax.random.split(key)
        shape = (size.batch, size.pixels, size.pixels, 3)
        return {
            "x": jax.random.normal(keys[0], shape),
            "y": jax.random.randint(keys[1], (size.batch,), 0, size.classes),
        }

    return Workload(init, loss, batch, optax.sgd(0.1, momentum=0.9, nesterov=True))
