"""Errors of loss and gradients against float64, on a smaller copy of each model.

    PYTHONPATH=. python benchmarks/accuracy.py [--models gpt2 ...] [--modes ...]
        [--batches 8] [--as cuda] [--json FILE]

The same float32 parameters, trained for a few steps so that none is at its special
first value, and the same batches in every mode; the reference is the float32 model's
own jaxpr evaluated in float64. An error is the norm of the difference over all
gradients (or the loss) by the reference's norm, in units of bfloat16's epsilon, 2^-7.
One batch says little (a ratio of two modes differs by tens of percent from batch to
batch), so the geometric mean over `--batches` of the gradients' errors is shown, and
with it the standard error of the ratio of ours to by hand's.

It runs on the CPU. There a product of bfloat16 operands accumulates in float32, as on
the devices (XLA:CPU of JAX 0.12 adds up in bfloat16 where it folds a transpose into
one, so it is kept from it); what XLA fuses is rounded as on this CPU. With `--as` what
our program leaves to the device is as on that one ("cuda", "tpu", or "TPU v5 lite"):
what is computed again, and which products round their results, but for convolutions.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import devices  # noqa: F401  it chooses the backend, so it comes before jax
import jax
import jax.numpy as jnp
import models
import modes
import numpy as np
import results

from jmp_rewrite import _compat

LIBRARIES = pathlib.Path(__file__).parents[1] / "tests" / "libraries"
sys.path.append(str(LIBRARIES))
import zoo_float64  # noqa: E402

_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = _FLAGS + " --xla_disable_hlo_passes=transpose-folding"

EPSILON = float(jnp.finfo(jnp.bfloat16).eps)
STEPS = 5

Errors = dict[str, list[float]]


def measure(model: str, names: Sequence[str], batches: int) -> dict[str, Errors]:
    """Errors of the loss and of the gradients by mode and batch."""
    module = models.load(model)
    params, state, draw = _trained(module)
    plain = modes.float32(module, module.SMALL).gradients
    runs = {n: jax.jit(modes.MODES[n](module, module.SMALL).gradients) for n in names}
    exactly = zoo_float64.reference(jax.make_jaxpr(plain)(params, state, draw(0)))
    found: dict[str, Errors] = {n: {"loss": [], "gradients": []} for n in names}
    for number in range(batches):
        arguments = (params, state, draw(number))
        exact = [np.asarray(x) for x in exactly(jax.tree.leaves(arguments))]
        for name, run in runs.items():
            loss, *grads = map(np.asarray, jax.tree.leaves(run(*arguments)))
            found[name]["loss"].append(_error([loss], exact[:1]))
            found[name]["gradients"].append(_error(grads, exact[1:]))
    return found


def _trained(module: Any) -> tuple[Any, Any, Any]:
    """Parameters and state after a few steps in float32, and a source of batches."""
    workload = module.make(jnp.float32, module.SMALL)
    params, state = workload.init(jax.random.key(0))
    opt_state = workload.optimizer.init(params)
    step = jax.jit(workload.step)
    for number in range(STEPS):
        batch = workload.batch(jax.random.key(1000 + number))
        params, opt_state, state, _ = step(params, opt_state, state, batch)
    return params, state, lambda n: workload.batch(jax.random.key(1 + n))


def _error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """The relative error of all arrays together, in epsilons of bfloat16."""
    pairs = [
        (x.astype(np.float64), y.astype(np.float64))
        for x, y in zip(found, exact, strict=True)
    ]
    wrong = sum(float(np.sum((x - y) ** 2)) for x, y in pairs)
    size = sum(float(np.sum(y**2)) for _, y in pairs)
    return math.sqrt(wrong / size) / EPSILON


def mean(what: str, errors: Sequence[float]) -> float:
    """The error over all batches.

    A loss is one number, whose error may be near 0 by chance: root mean square. Of the
    gradients the geometric mean.
    """
    if what == "loss":
        return math.sqrt(statistics.mean(e**2 for e in errors))
    return statistics.geometric_mean(errors) if all(errors) else 0.0


def spread(ours: Sequence[float], other: Sequence[float]) -> float:
    """The relative standard error of the mean ratio of gradients' errors."""
    logs = [math.log(a / b) for a, b in zip(ours, other, strict=True) if a and b]
    return statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=models.NAMES,
                        choices=models.NAMES)  # fmt: skip
    parser.add_argument("--modes", nargs="+", default=["by_hand", "ours"],
                        choices=modes.MODES)  # fmt: skip
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--as", dest="device", help="a platform, or a kind of TPU")
    parser.add_argument("--json", metavar="FILE", help="add the errors to this file")
    options = parser.parse_args()
    if options.device:
        _compat.is_for = lambda context, devices: options.device in devices
    rows = {}
    for model in options.models:
        rows[model] = measure(model, options.modes, options.batches)
        for mode, errors in rows[model].items():
            means = {what: mean(what, e) for what, e in errors.items()}
            print(f"{model:10} {mode:18}", end="")
            print(*(f" {what} {e:8.4f}" for what, e in means.items()), end="")
            if mode == "ours" and "by_hand" in rows[model]:
                hand = rows[model]["by_hand"]
                print("  of by hand's:", end="")
                for what, e in means.items():
                    print(f" {what} {e / mean(what, hand[what]):.3f}", end="")
                grads = "gradients"
                print(f" +- {spread(errors[grads], hand[grads]):.3f}", end="")
            print(flush=True)
            if options.json:
                cells = means | {"batches": options.batches}
                results.merge(options.json, "accuracy", {model: {mode: cells}})


if __name__ == "__main__":
    main()
