"""Whether stored weights change a bit of other people's forward passes.

    PYTHONPATH=. python tests/libraries/stored_bits.py [--only NAME ...] [--json FILE]

For each program of the zoo (of the libraries that are installed), compiled on this CPU:
results of `for_inference` with stored and with unstored weights, beside those of
`mixed_precision`, bit by bit.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import pathlib
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import zoo_models  # noqa: E402

from jmp_rewrite import for_inference, mixed_precision  # noqa: E402

POLICIES = ("mixed_bfloat16", "mixed_float16")


class Bits(NamedTuple):
    """One program under one policy.

    Attributes:
      weights: arrays of weights.
      stored: those that are stored in half.
      bytes_before: of the weights.
      bytes_after: of the weights, once they are stored.
      numbers: of the results.
      unstored_differ: numbers that differ with unstored weights.
      stored_differ: numbers that differ with stored weights.
    """

    weights: int
    stored: int
    bytes_before: int
    bytes_after: int
    numbers: int
    unstored_differ: int
    stored_differ: int


def differ(one: Any, other: Any) -> int:
    """Returns how many numbers of two trees have other bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(_differ(np.asarray(x), np.asarray(y)) for x, y in pairs)


def _differ(x: np.ndarray, y: np.ndarray) -> int:
    if x.dtype != y.dtype:
        return x.size
    width = x.dtype.itemsize
    x, y = (
        np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, width)
        for a in (x, y)
    )
    return int((x != y).any(axis=1).sum())


def measure(case: zoo_models.Case, policy: str) -> Bits:
    """Compares the three forms of one program."""
    args = case.params, case.batch
    want = jax.jit(mixed_precision(case.loss, policy))(*args)
    serve = for_inference(case.loss, policy)
    stored = serve.store(*args)
    report = serve.report(*args)
    return Bits(
        len(report.leaves),
        len(report.stored),
        report.bytes_before,
        report.bytes_after,
        sum(np.size(x) for x in jax.tree.leaves(want)),
        differ(jax.jit(serve)(*args), want),
        differ(jax.jit(serve)(*stored), want),
    )


def main() -> None:
    """Prints a line a program, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(zoo_models.PROGRAMS))
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    total: collections.Counter[str] = collections.Counter()
    version = importlib.metadata.version("jax")
    print(f"JAX {version}\n{'':34}weights  stored    MB -> MB  numbers  other bits")
    for name in options.only or zoo_models.PROGRAMS:
        try:
            case = zoo_models.PROGRAMS[name]()
        except ImportError as problem:
            print(f"{name:22} skipped: {problem}")
            total["skipped"] += 1
            continue
        for policy in POLICIES:
            bits = measure(case, policy)
            total.update(bits._asdict(), programs=1)
            print(
                f"{name:20}{policy:15}{bits.weights:6}{bits.stored:8}"
                f"{bits.bytes_before / 1e6:8.2f} {bits.bytes_after / 1e6:5.2f}"
                f"{bits.numbers:9}{bits.unstored_differ:6}{bits.stored_differ:6}",
                flush=True,
            )
            rows.setdefault(name, {})[policy] = bits._asdict()
        jax.clear_caches()
    print(dict(total))
    if options.json:
        about = {"versions": {"jax": version}, "programs": rows}
        options.json.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
