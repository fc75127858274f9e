"""Tokens a second of a decoding loop on this CPU.

    PYTHONPATH=. python benchmarks/cpu_decode.py [--size cpu] [--repeats 7] [--json F]

GPT-2 small's width (2 layers, 16384 words, 8 texts, a cache of 256 positions), 64
tokens in one `scan` that holds its cache: in float32; by hand in bfloat16 with float32
weights and with bfloat16 ones; and as `for_inference` makes it, unstored and stored.
All modes take turns, so that all share what else runs on the machine; medians, and the
load.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import inference
import jax
import jax.numpy as jnp
import models
import results


def model_name() -> str:
    """Returns what the processor calls itself."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    lines = (x for x in text.splitlines() if x.startswith("model name"))
    return next(lines, ": " + platform.processor()).partition(": ")[2]


def arrays(types: Any) -> Any:
    """Returns numbers for each type: the same ones, whatever the dtype."""

    def array(path: Any, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        key = jax.random.key(sum(map(ord, jax.tree_util.keystr(path))))
        return (0.02 * jax.random.normal(key, x.shape)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(array, types)


def seconds(compiled: Any, args: Any) -> tuple[float, float]:
    """Returns the time, and the CPU time, of one run."""
    start, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measures, prints, and keeps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--size", default="cpu", choices=["full", "quick", "cpu", "small"]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    ready = {}
    for mode in inference.MODES:
        fun, types = inference.made("loop", mode, options.size)
        args = arrays(types)
        ready[mode] = jax.jit(fun).lower(*args).compile(), args
        seconds(*ready[mode])  # once to warm up
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in ready}
    loads = []
    for _ in range(options.repeats):
        for mode, (compiled, args) in ready.items():
            times[mode].append(seconds(compiled, args))
        loads.append(os.getloadavg()[0])
    size = getattr(models.load("decode"), options.size.upper())
    tokens = inference.TOKENS * size.batch
    rows = {}
    for mode, found in times.items():
        wall, cpu = (statistics.median(t) for t in zip(*found, strict=True))
        rows[mode] = {
            "tokens_per_second": tokens / wall,
            "tokens_per_cpu_second": tokens / cpu,
        }
        print(f"{mode:26}{tokens / wall:10.1f} tokens/s{tokens / cpu:10.1f} / CPU s")
    facts = {
        "cpu": model_name(),
        "cores": os.cpu_count(),
        "median load": statistics.median(loads),
        "repeats": options.repeats,
    }
    print(f"JAX {jax.__version__}, {facts}")
    if options.json:
        results.merge(str(options.json), "rows", {options.size: rows}, **facts)


if __name__ == "__main__":
    main()
