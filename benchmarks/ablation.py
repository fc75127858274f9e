"""What precision gains, and what each pass adds: programs with passes left out.

    PYTHONPATH=. python benchmarks/ablation.py --models lstm gpt2 --targets v5e h200
        [--json FILE]

The same train step in float32, with precision alone (no passes), with all passes, and
with all but one of those that are for the device. A pass that leaves a program as it is
costs nothing here: programs that have been compiled are kept (see `programs.py`). What
passes for CPUs are for, `accuracy.py` shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import devices
import models
import results
from compare import row
from programs import Key

from jmp_rewrite import use_passes
from jmp_rewrite._passes import PASSES

SHOWN = ("mcycles", "gb_accessed", "gb_written", "mb_temp")


def ablation(model: str, target: str, size: str) -> dict[str, dict[str, Any]]:
    """Returns the costs by what is left out.

    Keys are "float32", "none" (precision alone), "all", and "-name" for each pass
    whose absence changes a figure.
    """
    rows = {"float32": row(Key(model, "float32", target, size))}
    for spec in ("none", "all", *(f"-{name}" for name in _optional(target))):
        with use_passes(spec):
            cells = row(Key(model, "ours", target, size))
        if not spec.startswith("-") or _figures(cells) != _figures(rows["all"]):
            rows[spec] = cells
        print(f"{model:10} {target:6} {spec:28}", _shown(cells, rows), flush=True)
    return rows


def _optional(target: str) -> list[str]:
    """Returns the passes for a device; the required ones run in any case."""
    device = devices.TARGETS[target]
    return [
        p.name
        for p in PASSES
        if not p.required and (p.devices == ("all",) or device.startswith(p.devices))
    ]


def _figures(cells: Mapping[str, Any]) -> list[Any]:
    return [cells.get(c) for c in SHOWN]


def _shown(cells: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    """Returns the figures as shares of float32's."""
    if "error" in cells:
        return cells["error"]
    pairs = ((c, cells[c], rows["float32"].get(c)) for c in SHOWN)
    return "  ".join(f"{c} {a / b:.3f}" for c, a, b in pairs if a and b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=models.NAMES,
                        choices=models.NAMES)  # fmt: skip
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"],
                        choices=devices.TARGETS)  # fmt: skip
    parser.add_argument("--size", choices=["full", "quick"], default="full",
                        help="quick has fewer layers")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="add the rows to this file")
    options = parser.parse_args()
    for model in options.models:
        for target in options.targets:
            rows = ablation(model, target, options.size)
            if options.json:
                results.merge(options.json, "rows", {model: {target: rows}})


if __name__ == "__main__":
    main()
