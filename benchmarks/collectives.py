"""What a sharded train step communicates: bytes of collectives in the compiled text.

    python benchmarks/collectives.py [--target v5e:4x4 | cpu] [--json OUT]

A stack of layers under FSDP: each device holds a part of every weight, weights are
gathered where they are used, and gradients are reduced. Nothing is run: XLA compiles
ahead of time for the TPU topology (with libtpu, no TPU is needed) or for eight CPU
devices. Reported for each way to write the step, in MiB a device and step:

- gathered: what the all-gathers of weights make;
- reduced: what the all-reduces and reduce-scatters of gradients read, by dtype.

XLA:CPU has no bfloat16 collectives and widens them; look at float16 there. XLA:TPU
runs float32 products at default precision in one bfloat16 pass and moves the cast in
front of the gather by itself, so "float32, highest" is what float32 costs. "by hand" is
the same model with `astype(bfloat16)` in the layer, as Flax' `dtype=` does it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jmp_rewrite import Policy, explain, mixed_precision  # noqa: E402
from jmp_rewrite._cost import devices, hlo  # noqa: E402
from jmp_rewrite._cost.compile import Job, compile_jobs  # noqa: E402
from jmp_rewrite._cost.program import lower  # noqa: E402
from jmp_rewrite._policy import as_policy  # noqa: E402

WIDTH, LAYERS, ROWS = 1024, 4, 512
TX = optax.adam(1e-3)
MIB = 2.0**20
# Losses, counters and biases are smaller than this.
LEAST = 4 * WIDTH * WIDTH / 64
TIME_LIMIT = 1800.0


def mesh_of(target: str) -> Mesh | AbstractMesh:
    """Returns a mesh of eight CPU devices, or of the chips of a TPU topology."""
    if target == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
        return Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    sizes, auto = (devices.target(target).devices,), (AxisType.Auto,)
    return AbstractMesh(sizes, ("data",), axis_types=auto)


# ---- models


def models(mesh: Mesh) -> dict[str, Callable[..., Any]]:
    """Returns ways to write the forward pass."""
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def layer(w: Any, x: Any) -> Any:
        return lax.with_sharding_constraint(jnp.tanh(x @ w), rows)

    def by_hand(w: Any, x: Any) -> Any:
        half = jnp.bfloat16
        return layer(w.astype(half), x.astype(half))

    def gathered(w: Any, x: Any) -> Any:
        return layer(lax.with_sharding_constraint(w, whole), x)

    def unrolled(one: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, x: Any) -> Any:
            for i in range(LAYERS):
                x = one(params[i], x)
            return x.astype(jnp.float32)

        return run

    def scanned(one: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, x: Any) -> Any:
            x = lax.scan(lambda x, w: (one(w, x), None), x, params)[0]
            return x.astype(jnp.float32)

        return run

    return {
        "layers": unrolled(layer),
        "layers, by hand": unrolled(by_hand),
        "layers, checkpointed": unrolled(jax.checkpoint(layer)),
        "layers, gathered by the user": unrolled(gathered),
        "scan": scanned(layer),
        "scan, checkpointed": scanned(jax.checkpoint(layer)),
    }


def make_step(net: Callable[..., Any], policy: str | Policy, outside: bool) -> Any:
    """Returns the train step; `outside` decorates the loss alone."""
    half = mixed_precision

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((net(params, x) - y) ** 2)

    inner = half(loss, policy) if outside else loss

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(inner)(params, x, y)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step if outside else half(step, policy)


def compile_text(
    net: Any, policy: str | Policy, outside: bool, mesh: Any, scan: bool, target: str
) -> str:
    """Compiles a train step ahead of time and returns its text."""

    def placed(x: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def parameter(x: Any) -> Any:
        spec = P(None, "data") if x.ndim == 3 else P("data")
        return placed(x, spec if x.ndim > 1 else P())

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    stack = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    params = stack if scan else [square] * LAYERS
    state = jax.tree.map(parameter, (params, jax.eval_shape(TX.init, params)))
    batch = placed(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), P("data"))
    out = (*jax.tree.map(lambda x: x.sharding, state), None)
    step = jax.jit(make_step(net, policy, outside), out_shardings=out)
    if target == "cpu":
        return step.lower(*state, batch, batch).compile().as_text()
    # An explicit policy wins over that of a decorated step.
    given = Policy("float32") if outside else as_policy(policy)
    subject = explain(step, given)(*state, batch, batch).subject
    on = devices.target(target)
    job = Job(on, lower(subject.program(given), on))
    [found] = compile_jobs([job], TIME_LIMIT)
    if "error" in found.answer:
        raise RuntimeError(found.answer["error"])
    return found.text


def traffic(text: str) -> dict[str, float]:
    """Sums what the collectives of weights and gradients move, in bytes."""
    found: dict[str, float] = collections.Counter()
    for (kind, dtype), size in hlo.parse(text).collectives(LEAST).items():
        found["gathered" if kind == "all-gather" else f"reduced {dtype}"] += size
    return dict(found)


REDUCED = Policy("mixed_bfloat16", reduce_dtype="bfloat16")
WAYS = {
    # name: (policy, decorates the loss alone, matrix precision)
    "float32": ("float32", False, None),
    "float32, highest": ("float32", False, "highest"),
    "mixed_bfloat16": ("mixed_bfloat16", False, None),
    "mixed_bfloat16, reduced in half": (REDUCED, False, None),
    "mixed_float16": ("mixed_float16", False, None),
    "mixed_bfloat16, loss alone": ("mixed_bfloat16", True, None),
    "mixed_float16, loss alone": ("mixed_float16", True, None),
}


def measure(target: str) -> list[dict[str, Any]]:
    """Compiles every model in every way."""
    mesh = mesh_of(target)
    rows = []
    for model, net in models(mesh).items():
        for way, (policy, outside, precision) in WAYS.items():
            if "by hand" in model and way != "float32":
                continue
            with jax.default_matmul_precision(precision):
                scan = model.startswith("scan")
                text = compile_text(net, policy, outside, mesh, scan, target)
            name = "bfloat16 by hand" if "by hand" in model else way
            row = {"model": model, "way": name, **traffic(text)}
            rows.append(row)
            sizes = (f"{k} {v / MIB:6.2f}" for k, v in row.items() if k not in NAMES)
            print(f"{model:30s} {name:28s} {'  '.join(sizes)}", flush=True)
    return rows


NAMES = ("model", "way")


def main() -> None:
    """Prints a table, and keeps it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v5e:4x4")
    parser.add_argument("--json", help="file to keep the figures in")
    options = parser.parse_args()
    rows = measure(options.target)
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "jax": jax.__version__,
            "target": options.target,
            "bytes": rows,
        }
        with open(options.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
