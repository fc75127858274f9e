"""What the rewrite itself costs: tracing a decorated train step against a plain one.

    python benchmarks/overhead.py [--equations 5000 20000 100000] [--json OUT]

The program is a train step (Adam) of a stack of small residual layers, whose number is
chosen so that its jaxpr has about as many equations as asked for. Reported, as the
minimum over the repetitions, all in one process:

- plain: tracing the step; decorated: tracing the decorated step;
- identity: re-tracing the step's own jaxpr with `jax.core.eval_jaxpr`;
- decide and rewrite: the decisions alone, and jaxpr -> jaxpr.

Tracing is unusually cheap where JAX's caches know all inner functions; so the rewrite
is also held against the identity.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as jex

from jmp_rewrite import Policy, mixed_precision, mixed_precision_jaxpr
from jmp_rewrite._rewrite import decide

POLICY = Policy("mixed_bfloat16")


def make_step(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a train step and its arguments."""
    optimizer = optax.adam(1e-3)

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = x + jax.nn.gelu(x @ w + b) @ w
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = [(jnp.eye(8), jnp.zeros(8))] * layers
    return step, (params, optimizer.init(params), jnp.ones((4, 8)))


def count(jaxpr: Any) -> int:
    """Counts the equations of a jaxpr and of all that it holds."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return len(eqns) + sum(
        count(j) for e in eqns for j in jex.jaxprs_in_params(e.params)
    )


def best(fun: Callable[[], Any], repetitions: int) -> float:
    """Returns the shortest time in seconds."""
    times = []
    for _ in range(repetitions):
        gc.collect()
        start = time.perf_counter()
        fun()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(equations: int, repetitions: int) -> dict[str, float]:
    """Measures one size."""
    step, args = make_step(max(1, equations // 68))
    closed = jax.make_jaxpr(step)(*args)
    leaves = jax.tree.leaves(args)
    half = mixed_precision(step, POLICY)
    body, consts = getattr(closed, "jaxpr", closed), closed.consts
    times = {
        "plain": best(lambda: jax.make_jaxpr(lambda *a: step(*a))(*args), repetitions),
        "decorated": best(
            lambda: jax.make_jaxpr(lambda *a: half(*a))(*args), repetitions
        ),
        "identity": best(
            lambda: jax.make_jaxpr(lambda *a: jax.core.eval_jaxpr(body, consts, *a))(
                *leaves
            ),
            repetitions,
        ),
        "decide": best(lambda: decide(closed, POLICY), repetitions),
        "rewrite": best(lambda: mixed_precision_jaxpr(closed, POLICY), repetitions),
    }
    return {"equations": count(closed), **times}


def main() -> None:
    """Prints a table, and keeps it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--equations", type=int, nargs="+", default=[5000, 20000, 100000]
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="file to keep the figures in")
    options = parser.parse_args()
    rows = []
    print("equations   plain  decorated  identity  decide  rewrite | dec/plain rew/id")
    for equations in options.equations:
        row = measure(equations, options.repetitions)
        rows.append(row)
        print(
            f"{row['equations']:9d} {row['plain']:7.2f} {row['decorated']:10.2f} "
            f"{row['identity']:9.2f} {row['decide']:7.2f} {row['rewrite']:8.2f} | "
            f"{row['decorated'] / row['plain']:9.2f} "
            f"{row['rewrite'] / row['identity']:6.2f}"
        )
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "seconds": rows,
        }
        with open(options.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
