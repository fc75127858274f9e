"""What `diagnose` costs: time and memory against the eager float32 run.

    python benchmarks/diagnose_cost.py [--width 256] [--layers 12] [--json OUT]

The program is a train step (Adam) of a transformer with 12 layers. It is run equation
by equation, without `jax.jit`, as `diagnose` runs it. Cold: the first run of the
process, which compiles each kind of equation. Warm: the best of the runs after it.
Each number comes from a process of its own; memory is the largest resident set.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_rewrite as jmpr


def make_step(layers: int, heads: int, scanned: bool) -> Callable[..., Any]:
    optimizer = optax.adam(1e-3)

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def block(x: Any, p: Any) -> Any:
        b, t, d = x.shape
        h = (norm(x) @ p["qkv"]).reshape(b, t, 3, heads, d // heads)
        q, k, v = (h[:, :, i] for i in range(3))
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / np.float32((d // heads) ** 0.5)
        causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, logits, -1e9))
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss_fn(params: Any, ids: Any) -> Any:
        x = params["embed"][ids[:, :-1]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
        else:
            for i in range(layers):
                with jax.named_scope(f"block_{i}"):
                    x = block(x, jax.tree.map(lambda w, i=i: w[i], params["blocks"]))
        logits = norm(x) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, ids[:, 1:]
        ).mean()

    def step(params: Any, state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, ids)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def arguments(layers: int, width: int, batch: int, length: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def dense(*shape: int) -> Any:
        scale = np.float32(shape[-2] ** -0.5)
        return jax.random.normal(next(keys), shape) * scale

    blocks = {
        "qkv": dense(layers, width, 3 * width),
        "out": dense(layers, width, width),
        "up": dense(layers, width, 4 * width),
        "down": dense(layers, 4 * width, width),
    }
    params = {"blocks": blocks, "embed": dense(1024, width)}
    ids = jax.random.randint(next(keys), (batch, length + 1), 0, 1024)
    return params, optax.adam(1e-3).init(params), ids


def measure(what: str, options: argparse.Namespace) -> dict[str, float]:
    """Runs one of the programs in this process."""
    step = make_step(options.layers, options.width // 32, options.scanned)
    args = arguments(options.layers, options.width, options.batch, options.length)
    jax.block_until_ready(args)
    run = {
        "eager": lambda: jax.block_until_ready(step(*args)),
        "bfloat16": lambda: jmpr.diagnose(step, "mixed_bfloat16")(*args),
        "float16": lambda: jmpr.diagnose(step, "mixed_float16")(*args),
    }[what]
    seconds = []
    for _ in range(1 + options.repeat):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cold": seconds[0], "warm": min(seconds[1:]), "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--scanned", action="store_true", help="a scan over layers")
    parser.add_argument("--json")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    results: dict[str, Any] = {}
    for what in ("eager", "bfloat16", "float16"):
        command = [sys.executable, *sys.argv, "--only", what]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results[what] = json.loads(done.stdout.splitlines()[-1])
        own = results[what]
        ratios = {k: own[k] / results["eager"][k] for k in own}
        print(
            f"{what:9s} cold {own['cold']:6.1f} s ({ratios['cold']:4.1f}x)  "
            f"warm {own['warm']:6.2f} s ({ratios['warm']:4.1f}x)  "
            f"peak {own['peak_mib']:6.0f} MiB ({ratios['peak_mib']:4.2f}x)"
        )
    if options.json:
        about = {"jax": jax.__version__, "machine": platform.machine()}
        with open(options.json, "w") as file:
            json.dump({**about, **vars(options), **results}, file, indent=1)


if __name__ == "__main__":
    main()
