"""Whether what the notebooks run compiles for a TPU, and in how much memory.

    PYTHONPATH=. python benchmarks/notebooks.py [--target v5e] [--json FILE]

Of each notebook the cells with the tag `tpu` are run: they define its model and its
steps. These are compiled ahead of time, for shapes of the size that the notebook takes
on an accelerator. What the notebook itself shows is checked by `tests/`, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import devices
import jax
import jax.numpy as jnp
import optax
import results

import jmp_rewrite as jmpr

HERE = pathlib.Path(__file__).parent
NOTEBOOKS = HERE.parent / "notebooks"
KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)

Programs = Iterator[tuple[str, Any, tuple[Any, ...]]]


def cells(name: str) -> dict[str, Any]:
    """What the cells of a notebook with the tag `tpu` define."""
    path = NOTEBOOKS / f"{name}.ipynb"
    module = types.ModuleType(f"notebook_{name}")  # Flax looks a class's module up
    sys.modules[module.__name__] = module
    found = vars(module)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if "tpu" in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), str(path), "exec"), found)
    return found


def quickstart(found: dict[str, Any]) -> Programs:
    """The transformer's step, in float32 and in bfloat16."""
    shapes = found["shapes_of"](found["LARGE"])
    for policy in ("float32", "mixed_bfloat16"):
        yield policy, found["make_step"](policy), shapes


def float16_and_loss_scaling(found: dict[str, Any]) -> Programs:
    """The logged step with loss scaling."""
    size = found["LARGE"]
    tx = jmpr.loss_scaling(optax.adam(1e-3))
    state = jax.eval_shape(lambda k: found["init_state"](tx, k, 784, size.units), KEY)
    batch = {
        "image": jax.ShapeDtypeStruct((size.batch, 784), jnp.float32),
        "label": jax.ShapeDtypeStruct((size.batch,), jnp.int32),
        "weight": jax.ShapeDtypeStruct((size.batch,), jnp.float32),
    }
    yield "mixed_float16", found["make_step"](tx), (state, batch)


def how_it_works(found: dict[str, Any]) -> Programs:
    """The small program, plain and rewritten, and its train step."""
    params = jax.eval_shape(found["init_params"], KEY)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    batch = {"x": x, "y": jax.ShapeDtypeStruct((16, 10), jnp.float32)}
    forward = found["forward"]
    half = jmpr.mixed_precision(forward, "mixed_bfloat16")
    yield "float32", forward, (params, x)
    yield "mixed_bfloat16", half, (params, x)
    yield "train step", found["train_step"], (params, batch)


def row(target: str, step: Any, args: tuple[Any, ...], found: dict[str, Any]) -> Any:
    """Compiles a program; says what went wrong if it does not."""
    try:
        compiled, casts = devices.compiled(target, step, args)
    except Exception as error:  # the compiler's errors are of many types
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    if "kernels" in found and not found["kernels"](compiled.text):
        return {"ok": False, "error": "the notebook finds no kernels in the text"}
    cost = devices.measure(target, compiled, casts)
    return {
        "ok": True,
        "mb_temp": round(cost.mb_temp, 1),
        "mcycles": cost.mcycles and round(cost.mcycles, 3),
        "casts": casts,
    }


def main() -> None:
    """Compiles all programs of all notebooks; fails if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=devices.TARGETS, default="v5e")
    parser.add_argument("--json", help="file that the result is added to")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for programs in (quickstart, float16_and_loss_scaling, how_it_works):
        name = programs.__name__
        found = cells(name)
        for program, step, args in programs(found):
            result = row(options.target, step, args, found)
            rows.setdefault(name, {})[program] = result
            print(f"{name:25} {program:27} {result}", flush=True)
    if options.json:
        results.merge(options.json, "notebooks", rows, target=options.target)
    if not all(result["ok"] for name in rows for result in rows[name].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
