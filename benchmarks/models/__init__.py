"""The models of the benchmarks.

Each module has `make(dtype, size) -> Workload` and three sizes: `FULL`, to be compiled,
`QUICK`, the same with fewer layers, and `SMALL`, to be judged against float64. With a
half dtype it is the model as a Flax user writes it by hand: parameters float32, `dtype`
on every layer, loss in float32. No model has dropout: random bits are the same in all.
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("mlp", "gpt2", "resnet50", "vit", "bert", "scan", "lstm", "unet")


def load(name: str) -> ModuleType:
    """The module of one model."""
    return importlib.import_module(f"models.{name}")
