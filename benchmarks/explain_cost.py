"""What `explain` costs, against tracing the step that it explains.

    python benchmarks/explain_cost.py [--repetitions 5] [--json OUT] [--report]

Two train steps: a GPT-2 small in Flax Linen (12 layers, AdamW), and a stack of small
residual layers (Adam) of about 5,000 equations, which is traced unusually fast because
JAX's caches know all of its inner functions. Reported are seconds of CPU time, the
least of the repetitions, all in one process:

- trace: tracing the step;
- explain: `explain(step, policy)(*args)`;
- print: the printed report, once that is made;
- page: the HTML page, after that.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from overhead import make_step

from jmp_rewrite import Report, explain

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH, LENGTH = 768, 12, 12, 50257, 8, 512


class Block(nn.Module):
    """A layer of GPT-2."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(name="ln_1")(x)
        mask = nn.make_causal_mask(jnp.ones(h.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attn")(h, h, mask=mask)
        h = nn.Dense(4 * WIDTH, name="fc")(nn.LayerNorm(name="ln_2")(x))
        return x + nn.Dense(WIDTH, name="proj")(nn.gelu(h))


class GPT2(nn.Module):
    """GPT-2 small."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        table = nn.Embed(VOCABULARY, WIDTH, name="wte")
        places = nn.Embed(LENGTH, WIDTH, name="wpe")
        x = table(ids) + places(jnp.arange(ids.shape[1]))
        for i in range(LAYERS):
            x = Block(name=f"h_{i}")(x)
        return table.attend(nn.LayerNorm(name="ln_f")(x))


def transformer() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a train step of GPT-2 small, and the types of its arguments."""
    model, optimizer = GPT2(), optax.adamw(1e-3)

    def train_step(params: Any, state: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model.apply(params, ids[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)
    return train_step, (params, jax.eval_shape(optimizer.init, params), ids)


def timed(fun: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU time of a call, in seconds, and its result."""
    gc.collect()
    start = time.process_time()
    result = fun()
    return time.process_time() - start, result


def measure(
    step: Callable[..., Any], args: tuple[Any, ...], repetitions: int
) -> dict[str, float]:
    """Measures one step."""
    best: dict[str, float] = {}

    def note(name: str, fun: Callable[[], Any]) -> Any:
        seconds, result = timed(fun)
        best[name] = min(seconds, best.get(name, seconds))
        return result

    jax.make_jaxpr(step)(*args)  # fills JAX's caches
    for _ in range(repetitions):
        note("trace", lambda: jax.make_jaxpr(lambda *a: step(*a))(*args))
        report: Report = note("explain", lambda: explain(step, "bfloat16")(*args))
        note("print", lambda r=report: str(r))
        note("page", lambda r=report: r._repr_html_())
        equations = len(report.equations)
        del report  # so that the next repetition does not pay for it
    return {"equations": equations, **best}


def main() -> None:
    """Prints a table, and keeps it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="file to keep the figures in")
    parser.add_argument(
        "--report", action="store_true", help="print the report of GPT-2 small instead"
    )
    options = parser.parse_args()
    if options.report:
        step, args = transformer()
        print(explain(step, "mixed_bfloat16")(*args))
        return
    programs = {"GPT-2 small": transformer(), "residual layers": make_step(73)}
    rows = {}
    print("program          equations  trace  explain  print   page | explain/trace")
    for name, (step, args) in programs.items():
        row = measure(step, args, options.repetitions)
        rows[name] = row
        print(
            f"{name:16} {row['equations']:9d} "
            f"{row['trace']:6.2f} {row['explain']:8.2f} "
            f"{row['print']:6.2f} {row['page']:6.2f} | "
            f"{row['explain'] / row['trace']:13.2f}"
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
