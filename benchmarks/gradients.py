"""What gradients of a decorated loss cost: `jax.value_and_grad(mixed_precision(f))`.

    PYTHONPATH=. python benchmarks/gradients.py [--models gpt2 vit]
        [--targets v5e h200] [--size quick] [--json FILE]

The decorated function is no whole train step: JAX makes the backward pass of what was
rewritten, and keeps for it what the forward pass computed. Each is compiled ahead of
time, as by `report.cost`: in float32, by hand in bfloat16 with float32 weights, and
decorated. The last lines are ours / by hand and ours / float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import devices  # first: it keeps JAX off this machine's own accelerators
import jax
import jax.numpy as jnp
import models
import results

import jmp_rewrite as jmpr
from jmp_rewrite._cost.devices import target as target_of
from jmp_rewrite._cost.estimate import estimate

MODES = ("float32", "by hand", "ours")
COLUMNS = ("temporary_bytes", "bytes_accessed", "bytes_written", "estimated_cycles")
MODELS = ["bert", "gpt2", "lstm", "mlp", "resnet50", "unet", "vit"]
POLICY = "mixed_bfloat16"


def made(model: str, mode: str, size: str) -> tuple[Callable[..., Any], Any]:
    """Loss and gradients in one mode, and the types of its arguments."""
    module = models.load(model)
    dtype = jnp.bfloat16 if mode == "by hand" else jnp.float32
    workload = module.make(dtype, getattr(module, size.upper()))
    params, _, state, batch = workload.arguments()
    loss = workload.loss
    if mode == "ours":
        loss = jmpr.mixed_precision(loss, POLICY)
    return jax.value_and_grad(loss, has_aux=True), (params, state, batch)


def measure(model: str, mode: str, target: str, size: str) -> dict[str, Any]:
    """What a compiler says of one function in one mode."""
    fun, args = made(model, mode, size)
    found, _ = devices.compiled(target, fun, args)
    seen = estimate(found, target_of(devices.TARGETS[target]))
    return {name: getattr(seen, name) for name in COLUMNS}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"])
    parser.add_argument("--size", default="quick", choices=["full", "quick", "small"])
    parser.add_argument("--json")
    options = parser.parse_args()
    for model in options.models:
        for target in options.targets:
            rows = {m: measure(model, m, target, options.size) for m in MODES}
            print(f"{model} on {devices.TARGETS[target]}, {options.size}")
            table = results.shown(rows, COLUMNS, "ours", ("by hand", "float32"))
            print(table, end="\n\n", flush=True)
            if options.json:
                results.merge(options.json, "rows", {model: {target: rows}})


if __name__ == "__main__":
    main()
