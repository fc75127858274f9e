"""Time and memory of train steps and of decoding on the device that is there.

    PYTHONPATH=. python benchmarks/on_device.py [--models mlp gpt2 ...] [--rounds 30]
        [--size full] [--json FILE] [--png FILE] [--no-estimates]

Each model runs in float32 exactly (`highest`: no TF32, no bfloat16 passes), in float32
as JAX computes it by default (TF32 on GPUs of compute capability 8.0 and more, one
bfloat16 pass on TPUs), as an expert writes it by hand in bfloat16, and as this package
rewrites it; each in a process of its own, so that the peak of memory is its own. A step
is timed from its call until its results are there; the first five do not count. Beside
what was measured stands what the device's compiler estimates ahead of time, where it is
installed: see `report.cost`.

Nothing is said of a device that it did not run on. Times mean something only on a
device that nobody else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MODES = ("float32_highest", "float32", "by_hand", "ours")
MODELS = ("mlp", "gpt2", "resnet50", "vit", "bert", "scan", "lstm", "unet", "decode")
_WARM = 5


# ---- in a process of its own


def made(model: str, mode: str, size: str) -> tuple[Callable[..., Any], Any, int]:
    """A step, its real arguments, and how many of its results are arguments again."""
    import jax
    import jax.numpy as jnp
    import models

    from jmp_rewrite import mixed_precision

    module = models.load(model)
    dtype = jnp.bfloat16 if mode == "by_hand" else jnp.float32
    workload = module.make(dtype, getattr(module, size.upper()))
    keys = jax.random.split(jax.random.key(0))
    if model == "decode":
        params, cache = jax.jit(workload.init)(keys[0])
        token = jnp.zeros(workload.size.batch, jnp.int32)

        def step(cache: Any, params: Any, token: Any) -> Any:
            cache, token = workload.step(params, cache, jnp.int32(7), token[:, None])
            return cache, params, token[:, 0]

        args: Any = (cache, params, token)
    else:
        params, state = jax.jit(workload.init)(keys[0])
        step = workload.step
        opt_state = jax.jit(workload.optimizer.init)(params)
        args = (params, opt_state, state, workload.batch(keys[1]))
    if mode == "ours":
        step = mixed_precision(step, "mixed_bfloat16")
    return step, args, len(args) - 1


def serve(model: str, mode: str, size: str, rounds: int) -> dict[str, Any]:
    """Measures one model in one mode, in this process."""
    import jax

    precision = "highest" if mode == "float32_highest" else None
    with jax.default_matmul_precision(precision):
        step, args, again = made(model, mode, size)
        jitted = jax.jit(step, donate_argnums=tuple(range(again)))
        start = time.perf_counter()
        compiled = jitted.lower(*args).compile()
        seconds = time.perf_counter() - start
    times = []
    for _ in range(_WARM + rounds):
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - start))
        args = (*results[:again], args[-1])
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    quarters = statistics.quantiles(times[_WARM:], n=4)
    return {
        "ms": statistics.median(times[_WARM:]),
        "quartiles": [quarters[0], quarters[2]],
        "peak_bytes": peak,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compile_seconds": seconds,
        "device": device.device_kind,
        "platform": device.platform,
    }


# ---- in the process that asks


def measure(model: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Lets a process measure; a failure is a line."""
    command = [sys.executable, __file__, "--serve", model, mode]
    command += ["--size", options.size, "--rounds", str(options.rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return {"error": lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def estimated(model: str, mode: str, size: str, kind: str) -> dict[str, Any]:
    """What the device's compiler says ahead of time; empty where nobody can say."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process leaves the device alone
    import devices
    import jax

    from jmp_rewrite._cost.devices import named

    name = named(kind)
    if name is None:
        return {}
    with jax.default_matmul_precision("highest" if "highest" in mode else None):
        shapes: list[Any] = []

        def arguments() -> Any:
            step, args, again = made(model, mode, size)
            shapes.append((step, again))
            return args

        args = jax.eval_shape(arguments)
        step, again = shapes[0]
        try:
            found, casts = devices.compiled(name, step, args, tuple(range(again)))
        except (ImportError, RuntimeError) as error:
            return {"estimate_error": str(error).splitlines()[0]}
    cost = devices.measure(name, found, casts)
    return {"estimated_mb_temp": cost.mb_temp, "estimated_mcycles": cost.mcycles}


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measures everything behind a progress bar."""
    from rich.progress import Progress

    rows: dict[str, dict[str, Any]] = {}
    pairs = [(model, mode) for model in options.models for mode in options.modes]
    with Progress() as bar:
        task = bar.add_task("", total=len(pairs))
        for model, mode in pairs:
            bar.update(task, description=f"{model}, {mode}")
            found = measure(model, mode, options)
            if options.estimates and "error" not in found:
                found |= estimated(model, mode, options.size, found["device"])
            rows.setdefault(model, {})[mode] = found
            bar.advance(task)
    return rows


def table(rows: dict[str, dict[str, Any]]) -> Any:
    """The rows as a table: measured, then estimated."""
    from rich.table import Table

    grid = Table(title="measured on this device")
    for title in ("model", "mode", "ms a step", "quartiles", "of float32", "peak MB"):
        grid.add_column(
            title, justify="left" if title in ("model", "mode") else "right"
        )
    grid.add_column("temporary MB", justify="right")
    grid.add_column("estimated: temporary MB, Mcycles", justify="right")
    for model, by_mode in rows.items():
        base = by_mode.get("float32", {}).get("ms")
        for mode, cells in by_mode.items():
            grid.add_row(model, mode, *_cells(cells, base))
    return grid


def _cells(cells: dict[str, Any], base: float | None) -> list[str]:
    if "error" in cells:
        return ["failed"]
    low, high = cells["quartiles"]
    peak, temporary = cells["peak_bytes"], cells["temporary_bytes"]
    guesses = (cells.get("estimated_mb_temp"), cells.get("estimated_mcycles"))
    return [
        f"{cells['ms']:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{cells['ms'] / base:.2f}" if base else "",
        f"{peak / 1e6:,.0f}" if peak else "",
        f"{temporary / 1e6:,.0f}",
        ", ".join(f"{x:,.1f}" for x in guesses if x is not None),
    ]


def picture(rows: dict[str, dict[str, Any]], path: str) -> None:
    """Draws the time of each mode, a group of bars a model, by default float32."""
    from matplotlib.figure import Figure

    models = [m for m, by_mode in rows.items() if "ms" in by_mode.get("float32", {})]
    figure = Figure(figsize=(8, 1.5 + 0.7 * max(len(models), 1)), dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for n, mode in enumerate(MODES):
        shown = [m for m in models if "ms" in rows[m].get(mode, {})]
        places = [models.index(m) + (n - 1.5) / 5 for m in shown]
        ratios = [rows[m][mode]["ms"] / rows[m]["float32"]["ms"] for m in shown]
        axes.barh(places, ratios, 0.18, label=mode)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, by float32 as JAX computes it")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--size", choices=["full", "quick", "small"], default="full")
    parser.add_argument("--rounds", type=int, default=30, help="steps that are timed")
    parser.add_argument("--json", metavar="FILE", help="add the rows to this file")
    parser.add_argument("--png", metavar="FILE", help="draw them into this one")
    parser.add_argument("--no-estimates", dest="estimates", action="store_false")
    options = parser.parse_args()
    if options.serve:
        try:
            found = serve(*options.serve, options.size, options.rounds)
        except Exception as error:  # a device's own: out of memory, not there, ...
            line = str(error).strip().splitlines() or [""]
            found = {"error": f"{type(error).__name__}: {line[0][:200]}"}
        print(json.dumps(found))
        return
    rows = run(options)
    found = [c for by_mode in rows.values() for c in by_mode.values() if "device" in c]
    kinds = sorted({c["device"] for c in found})
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(rows))
    for model, by_mode in rows.items():
        for mode, cells in by_mode.items():
            if "error" in cells:
                print(f"{model}, {mode}: {cells['error']}")
    print(f"{time.strftime('%Y-%m-%d')}, {', '.join(kinds) or 'nothing ran'}")
    if options.png:
        picture(rows, options.png)
    if options.json:
        sys.path.insert(0, str(pathlib.Path(__file__).parent))
        import results

        results.merge(options.json, "measured", rows, device=kinds, size=options.size)
    if not found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
