"""JAX's own test harnesses under `mixed_precision`: each primitive in all its uses.

    python tests/libraries/harnesses.py [--only TEXT] [--part I/N] [--json OUT]

JAX ships with what its own tests and exporters are tried on:
`jax/_src/internal_test_util/test_harnesses.py`, 5,490 small functions with
their arguments. Each that JAX supports on a CPU is tried:

- "float32": the jaxpr is the same one; and under both half policies as well, where
  nothing is float32;
- as it is, under both half policies: types are kept, and values are near;
- between products: arguments and results are multiplied by identity matrices, so that
  what the harness tries stands between two products and may run in half. Types are
  kept, what was finite stays finite, and values move about as much as when the
  arguments are disturbed by the compute dtype's precision.

A failure is listed with its message. Discontinuous functions (rounding, comparisons,
sorting of keys, bit casts) may move by more, and are listed as "moved".
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
ARGUMENTS, sys.argv = sys.argv, sys.argv[:1]  # the harnesses read it when imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax._src.internal_test_util import test_harnesses  # noqa: E402
from jax.extend import core as jex  # noqa: E402

from jmp_rewrite import mixed_precision  # noqa: E402

HALVES = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
# Results may move by so many times what a disturbance of the arguments moves them.
FACTOR = 32


def shape_of(jaxpr: Any) -> Any:
    """Returns a jaxpr without the names of its variables."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}

    def atom(a: Any) -> Any:
        if hasattr(a, "val"):
            return str(a.val), str(a.aval)
        return numbers.setdefault(a, len(numbers)), str(a.aval)

    lines: list[Any] = [[atom(v) for v in [*jaxpr.constvars, *jaxpr.invars]]]
    for eqn in jaxpr.eqns:
        inner = [shape_of(j) for j in jex.jaxprs_in_params(eqn.params)]
        ins, outs = map(atom, eqn.invars), map(atom, eqn.outvars)
        lines.append((eqn.primitive.name, sorted(eqn.params), *ins, *outs, inner))
    return [*lines, [atom(v) for v in jaxpr.outvars]]


def is_float32(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.float32 and not hasattr(x, "aval_out")


def through_product(x: Any) -> Any:
    """Multiplies f32[...] by an identity matrix, along its last dimension."""
    if not is_float32(x) or not np.ndim(x) or 0 in x.shape:
        return x
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1:  # a product of one row is one, too
        rows = jnp.concatenate([rows, rows])
    out = rows @ jnp.eye(x.shape[-1], dtype=jnp.float32)
    return out[: x.size // x.shape[-1]].reshape(x.shape)


def between_products(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function between products."""

    def run(*args: Any) -> Any:
        out = fun(*(through_product(jnp.asarray(a)) if array(a) else a for a in args))
        return jax.tree.map(through_product, out)

    return run


def array(x: Any) -> bool:
    known = isinstance(x, (np.ndarray, np.generic, jax.Array))
    return known and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def leaves(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]


def types(tree: Any) -> list[Any]:
    avals = [jax.typeof(x) for x in leaves(tree)]
    return [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in avals]


def numeric(x: Any) -> np.ndarray | None:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    return np.asarray(x).astype(wide)


def distance(one: Any, other: Any) -> float:
    """Returns the largest difference, NaN and equal infinities left out."""
    worst = 0.0
    for a, b in zip(leaves(one), leaves(other), strict=True):
        a, b = numeric(a), numeric(b)
        if a is None or b is None or not a.size:
            continue
        with np.errstate(all="ignore"):
            both = np.isfinite(a) & np.isfinite(b)
            worst = max(worst, float(np.max(np.abs(a - b), initial=0.0, where=both)))
    return worst


def largest(tree: Any) -> float:
    return distance(tree, jax.tree.map(jnp.zeros_like, tree))


def newly_infinite(value: Any, exact: Any) -> bool:
    for a, b in zip(leaves(value), leaves(exact), strict=True):
        a, b = numeric(a), numeric(b)
        if a is not None and b is not None and (np.isfinite(b) & ~np.isfinite(a)).any():
            return True
    return False


def disturb(args: Any, size: float, seed: int) -> list[Any]:
    rng = np.random.RandomState(seed)

    def one(x: Any) -> Any:
        if not array(x) or x.dtype != np.float32:
            return x
        x = np.asarray(x)
        return (x * (1 + size * rng.uniform(-1, 1, x.shape))).astype("f4")

    return [one(x) for x in args]


class Failure(Exception):
    """What was expected and did not hold."""


def try_harness(harness: Any) -> str:
    """Runs one harness; returns what it counts as."""
    args = harness.dyn_args_maker(np.random.RandomState(0))
    fun = harness.dyn_fun
    traced = [x for x in args if array(x)]
    if len(traced) != len(args):
        return "skipped: arguments that are no arrays"
    plain = jax.make_jaxpr(lambda *a: fun(*a))(*args)
    same = jax.make_jaxpr(lambda *a: mixed_precision(fun, "float32")(*a))(*args)
    if shape_of(plain) != shape_of(same):
        raise Failure("float32 changes the jaxpr")
    if all(a.dtype != np.float32 for a in (*plain.in_avals, *plain.out_avals)):
        for policy in HALVES:
            half = jax.make_jaxpr(lambda *a, p=policy: mixed_precision(fun, p)(*a))
            if shape_of(half(*args)) != shape_of(plain):
                raise Failure(f"{policy} changes a program without float32")
        return "passed: nothing is float32"
    moved = False
    for form in (fun, between_products(fun)):
        exact = form(*args)
        for policy, eps in HALVES.items():
            value = mixed_precision(form, policy)(*args)
            if types(value) != types(exact):
                raise Failure(f"{policy} changes types: {types(value)}")
            reach = [form(*disturb(args, eps, seed)) for seed in range(2)]
            spread = max(distance(r, exact) for r in reach)
            limit = FACTOR * (spread + eps * max(1.0, largest(exact)))
            if distance(value, exact) > limit:
                moved = True
            elif newly_infinite(value, exact):
                if not any(newly_infinite(r, exact) for r in reach):
                    raise Failure(f"{policy} makes an infinity or NaN")
    return "moved" if moved else "passed"


def main() -> None:
    """Runs the harnesses and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the name")
    parser.add_argument("--part", default="1/1", help="this part of so many: 2/4")
    parser.add_argument("--json", help="file to keep the counts in")
    options = parser.parse_args(ARGUMENTS[1:])
    part, parts = map(int, options.part.split("/"))
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    listed: dict[str, str] = {}
    chosen = [
        h
        for h in test_harnesses.all_harnesses
        if options.only in h.fullname and h.filter("cpu")
    ][part - 1 :: parts]
    start = time.time()
    for number, harness in enumerate(chosen, 1):
        try:
            outcome = try_harness(harness)
        except Exception as error:
            outcome = "failed"
            try:  # does it run at all?
                harness.dyn_fun(*harness.dyn_args_maker(np.random.RandomState(0)))
            except Exception:
                outcome = "fails without mixed_precision"
            message = (str(error) or "?").splitlines()[0]
            listed[harness.fullname] = f"{outcome}: {type(error).__name__}: {message}"
        counts[outcome] += 1
        if outcome == "moved":
            listed[harness.fullname] = outcome
        if number % 50 == 0:
            jax.clear_caches()
            print(number, "of", len(chosen), dict(counts), flush=True)
    for name, message in listed.items():
        print(f"{name}: {message[:200]}")
    print(f"{len(chosen)} harnesses in {time.time() - start:.0f} s: {dict(counts)}")
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "jax": jax.__version__,
            "counts": counts,
            "listed": listed,
        }
        with open(options.json, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
