"""Compares ways to run a model in mixed precision, by the real compilers.

    PYTHONPATH=. python benchmarks/compare.py --models gpt2 resnet50
        --targets v5e h200 --modes float32 by_hand ours [--json FILE] [--fresh]

Programs that have been compiled are kept (see `programs.py`): after a change of the
package only its own are compiled again.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import devices
import models
import modes
import results
from programs import Key, compiled

COLUMNS = ("mcycles", "gb_accessed", "gb_written", "mb_temp", "casts", "converts",
           "lone_converts", "kernels", "seconds")  # fmt: skip


def row(key: Key, fresh: bool = False) -> dict[str, Any]:
    """One row of the table: see `devices.Cost`."""
    try:
        found, casts = compiled(key, fresh)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[-1]}
    return dataclasses.asdict(devices.measure(key.target, found, casts))


def print_rows(name: str, by_mode: Mapping[str, dict[str, Any]]) -> None:
    """Prints the modes of a model on a target, and what ours is of by hand's."""
    print(f"{name:32}" + "".join(f"{c:>14}" for c in COLUMNS))
    for mode, cells in by_mode.items():
        if "error" in cells:
            print(f"{'':14}{mode:18} {cells['error']}")
        else:
            shown = "".join(f"{_number(cells[c]):>14}" for c in COLUMNS)
            print(f"{'':14}{mode:18}{shown}")
    ours, hand = by_mode.get("ours", {}), by_mode.get("by_hand", {})
    if "mb_temp" in ours and "mb_temp" in hand:
        ratios = (
            f"{ours[c] / hand[c]:.3f}" if hand[c] and ours[c] else "-" for c in COLUMNS
        )
        print(f"{'':14}{'ours/by_hand':18}" + "".join(f"{r:>14}" for r in ratios))
    sys.stdout.flush()


def _number(x: Any) -> str:
    if x is None:
        return "-"
    return str(x) if isinstance(x, int) else f"{x:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50"],
                        choices=models.NAMES)  # fmt: skip
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"],
                        choices=devices.TARGETS)  # fmt: skip
    parser.add_argument("--modes", nargs="+", default=["float32", "by_hand", "ours"],
                        choices=modes.MODES)  # fmt: skip
    parser.add_argument("--size", choices=["full", "quick"], default="full",
                        help="quick has fewer layers, to try things out")  # fmt: skip
    parser.add_argument("--options", nargs="+", default=[], metavar="NAME=VALUE",
                        help="compiler options, of all modes")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="add the rows to this file")
    parser.add_argument("--fresh", action="store_true", help="compile again")
    options = parser.parse_args()
    for model in options.models:
        for target in options.targets:
            by_mode: dict[str, Any] = {}
            for mode in options.modes:
                key = Key(model, mode, target, options.size, tuple(options.options))
                by_mode[mode] = row(key, options.fresh)
            print_rows(f"{model} {target}", by_mode)
            if options.json:
                results.merge(options.json, "rows", {model: {target: by_mode}})


if __name__ == "__main__":
    main()
