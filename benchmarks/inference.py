"""What serving costs on devices: forward passes, one decoding step, a decoding loop.

    PYTHONPATH=. python benchmarks/inference.py [--models step loop gpt2 vit whisper]
        [--targets v5e h200] [--size quick] [--json FILE]

Each is compiled ahead of time, as by `report.cost`: in float32; by hand in bfloat16
with float32 weights; by hand with bfloat16 weights and caches, GPT-2 with float32
logits as well, which is what the loss reads of ours; and as `for_inference`
makes it of the float32 code, with unstored arguments and with stored ones. The last
line of each table is stored by for_inference / stored by hand.

- `step`: one step of decoding, GPT-2 small's dimensions, a cache of 1024 positions that
  is donated;
- `loop`: 64 tokens, a cache of its own;
- `gpt2`, `vit`, `whisper` (its encoder): forward passes that score a batch.
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

MODES = ("float32", "by hand, float32 weights", "by hand", "unstored", "stored")
WIDE = "by hand, float32 logits"
COLUMNS = ("argument_bytes", "temporary_bytes", "bytes_accessed", "estimated_cycles")
SHOWN = (*COLUMNS, "bytes_written")
MODELS = ["step", "loop", "gpt2", "vit", "whisper"]
TOKENS = 64
POLICY = "mixed_bfloat16"


def in_half(tree: Any) -> Any:
    """The float32 types of a tree in bfloat16."""

    def half(x: Any) -> Any:
        return x.update(dtype=jnp.bfloat16) if x.dtype == jnp.float32 else x

    return jax.tree.map(half, tree)


def decode_step(dtype: Any, size: str) -> tuple[Callable[..., Any], Any, Any]:
    """One step: `(params, cache, token) -> (cache, token)`."""
    module = models.load("decode")
    workload = module.make(dtype, getattr(module, size.upper()))
    params, cache = jax.eval_shape(workload.init, jax.random.key(0))
    token = jax.ShapeDtypeStruct((workload.size.batch, 1), jnp.int32)

    def step(params: Any, cache: Any, token: Any) -> Any:
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        cache, token = workload.step(params, cache, jnp.int32(7), token)
        return cache, token

    return step, (params, cache, token), {"state": {1: 0}}


def decode_loop(dtype: Any, size: str) -> tuple[Callable[..., Any], Any, Any]:
    """A loop with a cache of its own: `(params, token) -> tokens`."""
    module = models.load("decode")
    workload = module.make(dtype, getattr(module, size.upper()))
    params, cache = jax.eval_shape(workload.init, jax.random.key(0))
    token = jax.ShapeDtypeStruct((workload.size.batch, 1), jnp.int32)

    def loop(params: Any, token: Any) -> Any:
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)

        def one(carry: Any, at: Any) -> Any:
            cache, token = workload.step(params, carry[0], at, carry[1])
            return (cache, token), token

        return jax.lax.scan(one, (empty, token), jnp.arange(TOKENS))[1]

    return loop, (params, token), {}


def forward(
    model: str, dtype: Any, size: str, **options: Any
) -> tuple[Callable[..., Any], Any, Any]:
    """A forward pass: `(params, state, batch) -> loss`."""
    module = models.load(model)
    workload = module.make(dtype, getattr(module, size.upper()), **options)
    params, _, state, batch = workload.arguments()

    def score(params: Any, state: Any, batch: Any) -> Any:
        return workload.loss(params, state, batch)[0]

    return score, (params, state, batch), {}


def subject(model: str, dtype: Any, size: str) -> tuple[Callable[..., Any], Any, Any]:
    """A function, the types of its arguments, and what `for_inference` is told."""
    if model == "step":
        return decode_step(dtype, size)
    return decode_loop(dtype, size) if model == "loop" else forward(model, dtype, size)


def made(model: str, mode: str, size: str) -> tuple[Callable[..., Any], Any]:
    """A function in one mode, and the types of its arguments."""
    dtype = jnp.bfloat16 if mode.startswith("by hand") else jnp.float32
    fun, args, options = subject(model, dtype, size)
    own = subject(model, jnp.float32, size)[1]
    if mode == WIDE:
        fun, args, _ = forward(model, dtype, size, logits=jnp.float32)
    if mode in ("by hand", WIDE):
        return fun, (in_half(args[0]), *args[1:])
    if mode.startswith("by hand"):
        return fun, (own[0], *args[1:])
    if mode == "float32":
        return fun, args
    serve = jmpr.for_inference(fun, POLICY, **options)
    if mode == "stored":
        print(serve.report(*args), end="\n\n")
        args = serve.store(*args)
    return serve, args


def measure(model: str, mode: str, target: str, size: str) -> dict[str, Any]:
    """What a compiler says of one function in one mode."""
    fun, args = made(model, mode, size)
    donate = (1,) if model == "step" else ()
    found, _ = devices.compiled(target, fun, args, donate)
    seen = estimate(found, target_of(devices.TARGETS[target]))
    row = {name: getattr(seen, name) for name in COLUMNS}
    return {**row, "bytes_written": seen.bytes_written}


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
            modes = (*MODES, WIDE) if model == "gpt2" else MODES
            rows = {m: measure(model, m, target, options.size) for m in modes}
            print(f"{model} on {devices.TARGETS[target]}, {options.size}")
            table = results.shown(rows, SHOWN, "stored", ("by hand", WIDE))
            print(table, end="\n\n", flush=True)
            if options.json:
                results.merge(options.json, "rows", {model: {target: rows}})


if __name__ == "__main__":
    main()
