"""What the rewrite itself costs: tracing a decorated train step against a plain one.

    python benchmarks/overhead.py [--equations 5000 20000 100000] [--layers 96]
        [--json OUT]

The programs are train steps: of a stack of small residual layers (Adam), whose number
is chosen so that its jaxpr has about as many equations as asked for, and of decoders of
so many unrolled layers (AdamW). Reported, as the minimum over the repetitions, all in
one process, in seconds of CPU time, since few machines are idle:

- plain, decorated: tracing the step, and tracing and lowering it;
- decide and rewrite: the decisions alone, and jaxpr -> jaxpr.

What JAX and the library cache in a process is there already, for both of them.
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


def make_decoder(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the train step of a small decoder, its layers unrolled."""
    features, heads, vocabulary, length = 32, 2, 64, 8
    optimizer = optax.adamw(1e-3)

    def norm(x: Any, p: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]

    def block(x: Any, p: Any) -> Any:
        h = norm(x, p["first"])
        q, k, v = ((h @ p[n]).reshape(*h.shape[:2], heads, -1) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
        seen = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ p["o"]
        return x + jax.nn.gelu(norm(x, p["second"]) @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        for p in params["layers"]:
            x = block(x, p)
        logits = norm(x, params["last"]) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean()

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    a_norm = {"scale": array(features), "bias": array(features)}
    layer = {n: array(features, features) for n in "qkvo"}
    layer |= {
        "up": array(features, 4 * features),
        "down": array(4 * features, features),
    }
    layer |= {"first": a_norm, "second": a_norm}
    table = array(vocabulary, features)
    params = {"table": table, "last": a_norm, "layers": [layer] * layers}
    state = jax.eval_shape(optimizer.init, params)
    return step, (params, state, jax.ShapeDtypeStruct((2, length), jnp.int32))


def count(jaxpr: Any) -> int:
    """Counts the equations of a jaxpr and of all that it holds."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return len(eqns) + sum(
        count(j) for e in eqns for j in jex.jaxprs_in_params(e.params)
    )


def best(fun: Callable[[], Any], repetitions: int) -> float:
    """Returns the shortest time, in seconds of this process."""
    times = []
    for _ in range(repetitions):
        gc.collect()
        start = time.process_time()
        fun()
        times.append(time.process_time() - start)
    return min(times)


def measure(name: str, made: Any, repetitions: int) -> dict[str, Any]:
    """Measures one step."""
    step, args = made
    half = mixed_precision(step, POLICY)

    def fresh(fun: Callable[..., Any]) -> Any:
        return jax.jit(lambda *args: fun(*args))  # a new function: nothing is cached

    closed = jax.make_jaxpr(step)(*args)
    times = {
        "plain": best(lambda: fresh(step).trace(*args), repetitions),
        "decorated": best(lambda: fresh(half).trace(*args), repetitions),
        "plain_lowered": best(lambda: fresh(step).lower(*args), repetitions),
        "decorated_lowered": best(lambda: fresh(half).lower(*args), repetitions),
        "decide": best(lambda: decide(closed, POLICY), repetitions),
        "rewrite": best(lambda: mixed_precision_jaxpr(closed, POLICY), repetitions),
    }
    return {"step": name, "equations": count(closed), **times}


def main() -> None:
    """Prints a table, and keeps it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--equations", type=int, nargs="*", default=[5000, 20000, 100000]
    )
    parser.add_argument("--layers", type=int, nargs="*", default=[96])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="file to keep the figures in")
    options = parser.parse_args()
    rows = []
    steps = [("layers", make_step, max(1, n // 68)) for n in options.equations]
    steps += [("decoder", make_decoder, n) for n in options.layers]
    print("step        equations | traced: plain decorated | lowered, too: plain ours")
    for kind, make, number in steps:
        row = measure(f"{kind} {number}", make(number), options.repetitions)
        rows.append(row)
        print(
            f"{row['step']:12} {row['equations']:8d} | "
            f"{row['plain']:6.2f} {row['decorated']:6.2f} "
            f"{row['decorated'] / row['plain']:5.2f} | "
            f"{row['plain_lowered']:6.2f} {row['decorated_lowered']:6.2f} "
            f"{row['decorated_lowered'] / row['plain_lowered']:5.2f} | "
            f"decide {row['decide']:6.2f} rewrite {row['rewrite']:6.2f}",
            flush=True,
        )
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "CPU seconds": rows,
        }
        with open(options.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
