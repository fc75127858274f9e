"""What dynamic loss scaling costs in one train step, by the real compilers.

    PYTHONPATH=. python benchmarks/loss_scale_cost.py [--model gpt2] [--size full]
        [--pairs h200:float16 v5e:bfloat16 ...] [--json FILE]

The same decorated step with and without `loss_scaling`: estimated cycles, bytes
accessed and written, temporary memory. On NVIDIA GPUs with float16, which is what
scaling is for; on a TPU with bfloat16, the half precision that TPUs have, where scaling
is not needed and costs the same, and with float16, which they emulate. `_clip` after
the half dtype adds clipping by the global norm, as most such steps have it: like the
check it needs all gradients before any parameter can change.

From the compiled text it shows that the finiteness check reads each gradient once: how
many gradient elements meet an `is-finite`, of how many there are, and where the
division by the scale stands: in the same kernel, or in the kernel that makes the
gradient, so that what is written is true already; or in a kernel of its own.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import pathlib
import re
from typing import Any

import devices  # noqa: F401  it chooses the backend, so it comes before jax
import jax
import models
from compare import row
from programs import Key, compiled

from jmp_rewrite._cost import hlo

MEASURES = ("mcycles", "gb_accessed", "gb_written", "mb_temp", "kernels")
# The check stands outside of the model's scopes; rounding to float16 asks inside them.
_OF_GRADIENTS = re.compile(r"^jit\(step\)/jmp_rewrite\.mixed_precision/is_finite$")


def checked(module: hlo.Module) -> dict[str, int]:
    """Elements that are tested for being finite, by where they are unscaled."""
    found: collections.Counter[str] = collections.Counter()
    kernels = [k.instruction for k in module.kernels()]
    makers = {i.name: i for c in module.computations.values() for i in c.values()}
    for kernel in kernels:
        inside = module.computations.get(kernel.fused or "", {kernel.name: kernel})
        for test in inside.values():
            if test.opcode == "is-finite" and _OF_GRADIENTS.search(test.op_name):
                place = _unscaled_in(test, inside, kernel, makers, module)
                found[place] += math.prod(test.arrays[0].shape)
    return dict(found)


def _unscaled_in(
    test: hlo.Instruction,
    inside: dict[str, hlo.Instruction],
    kernel: hlo.Instruction,
    makers: dict[str, hlo.Instruction],
    module: hlo.Module,
) -> str:
    """Where what is tested was divided by the scale."""
    source = inside[test.operands[0]]
    while source.opcode in ("bitcast", "reshape", "copy", "convert", "transpose"):
        source = inside[source.operands[0]]
    if source.opcode in ("divide", "multiply"):
        return "in the kernel of the check"
    if source.opcode != "parameter":
        return f"after a {source.opcode} in the kernel of the check"
    maker = makers[kernel.operands[source.number]]
    while maker.opcode in ("bitcast", "get-tuple-element", "copy"):
        maker = makers[maker.operands[0]]
    made = module.computations.get(maker.fused or "", {})
    opcodes = {i.opcode for i in made.values()}
    if opcodes & {"divide", "multiply"}:
        return "in the kernel that makes the gradient"
    return f"elsewhere ({maker.opcode} {maker.name})"


def compare(model: str, size: str, target: str, half: str) -> dict[str, Any]:
    """Measures one pair of programs."""
    keys = [Key(model, m, target, size) for m in (half, f"{half}_scaled")]
    plain, scaled = (row(k) for k in keys)
    text = compiled(keys[1])[0].text
    module = models.load(model)
    workload = module.make(jax.numpy.float32, getattr(module, size.upper()))
    params = workload.arguments()[0]
    return {
        "plain": plain,
        "scaled": scaled,
        "ratio": {m: scaled[m] / plain[m] for m in MEASURES if plain[m]},
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "checked": checked(hlo.parse(text)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", choices=models.NAMES)
    parser.add_argument("--size", default="full", choices=["full", "quick"])
    pairs = [
        f"{pair}{clip}"
        for pair in ("h200:float16", "v5e:float16", "v5e:bfloat16")
        for clip in ("", "_clip")
    ]
    parser.add_argument("--pairs", nargs="+", metavar="TARGET:HALF", default=pairs)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = {"jax": jax.__version__, "model": options.model, "size": options.size}
    for pair in options.pairs:
        found = compare(options.model, options.size, *pair.split(":"))
        results[pair] = found
        print(pair)
        for name, ratio in found["ratio"].items():
            before, after = found["plain"][name], found["scaled"][name]
            print(f"  {name:12} {before:10.2f} -> {after:10.2f}  x {ratio:.4f}")
        print(f"  parameters {found['parameters']}; elements checked:")
        for place, count in found["checked"].items():
            print(f"    {count:12} unscaled {place}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
