"""Results that several runs add to: one JSON file with versions, date and baselines."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax", "optax", "jmp",
            "mixed-precision-for-jax")  # fmt: skip

COMPILERS = ("libtpu", "jax-cuda13-plugin")

# What a float32 product is on each target, so that nobody takes it for an exact one.
BASELINES = {
    "v5e": "a float32 product at default precision is one bfloat16 pass",
    "v6e": "a float32 product at default precision is one bfloat16 pass",
    "h200": "a float32 product at default precision is TF32: the compiler's Triton "
    "code says `tt.dot ... inputPrecision = tf32`, and none at precision HIGHEST",
}


def versions() -> dict[str, str]:
    """The versions of what compiles and what is compared."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def merge(path: str, what: str, rows: dict[str, Any], **facts: Any) -> None:
    """Adds rows, `{model: {...: cells}}`, to a file of results.

    A file that was made with another JAX is begun anew: rows of one file compare.

    Raises:
      ValueError: if the file's rows are another compiler's.
    """
    file = pathlib.Path(path)
    kept = json.loads(file.read_text()) if file.exists() else {}
    if kept.get("versions", {}).get("jax") != versions()["jax"]:
        kept = {}
    before, now = kept.get("versions", {}), versions()
    for name in COMPILERS:
        if what != "rows":  # nothing that these compile
            now[name] = before.get(name, now.get(name))
        elif before.get(name, now.get(name)) != now.get(name):
            raise ValueError(
                f"The rows of {path} are those of {name} {before[name]}, and "
                f"{now.get(name)} is installed; take another file, or that version."
            )
    kept |= {"date": time.strftime("%Y-%m-%d"), "baselines": BASELINES, **facts}
    kept["versions"] = before | {k: v for k, v in now.items() if v}
    _update(kept.setdefault(what, {}), rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _update(old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            old[key].pop("error", None)  # of a run that failed
            _update(old[key], value)
        else:
            old[key] = value


def shown(
    rows: dict[str, dict[str, Any]],
    columns: Sequence[str],
    ours: str,
    others: Sequence[str],
) -> str:
    """A table of modes, in millions, and the ratios of one of them to others.

    Args:
      rows: mode -> column -> number, or None.
      columns: which to show.
      ours: the mode that is divided.
      others: by which of the modes.
    """

    def line(title: str, cells: list[str]) -> str:
        return f"{title:34}" + "".join(f"{c:>18}" for c in cells)

    lines = [line("", [n.replace("_", " ") for n in columns])]
    for mode, row in rows.items():
        cells = ["-" if row[n] is None else f"{row[n] / 1e6:,.1f} M" for n in columns]
        lines.append(line(mode, cells))
    for other in (m for m in others if m in rows):
        pairs = [(rows[ours][n], rows[other][n]) for n in columns]
        ratios = [f"{a / b:.2f}" if a and b else "-" for a, b in pairs]
        lines.append(line(f"{ours} / {other}", ratios))
    return "\n".join(lines)
