"""Compiled programs of the benchmarks, made once and kept.

    PYTHONPATH=. python benchmarks/programs.py MODEL MODE TARGET SIZE

Each program is lowered and compiled in a process of its own. It is kept under a hash of
the lowered program, so a change of source that changes no program compiles nothing
again; a hash of the sources leads there without lowering.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import devices  # it sets up the environment, so it comes before jax
import jax
import models
import modes

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent / "jmp_rewrite"
CACHE = pathlib.Path(tempfile.gettempdir()) / "jmp_rewrite_benchmarks"


class Key(NamedTuple):
    """Which program: names in `models`, `modes` and `devices`, and the model's size.

    `options` are compiler options, `name=value`.
    """

    model: str
    mode: str
    target: str
    size: str = "full"
    options: tuple[str, ...] = ()


def compiled(key: Key, fresh: bool = False) -> tuple[str, dict[str, Any]]:
    """A compiled program's text, and what the compiler said beside it.

    Raises:
      RuntimeError: if it cannot be compiled.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    index = CACHE / f"{_hash(*key[:4], *key.options, *_sources(key))}.key"
    if fresh or not index.exists():
        command = [sys.executable, __file__, *key[:4], *key.options]
        done = subprocess.run(
            [*command, "--fresh"] if fresh else command, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-3000:])
        index.write_text(done.stdout.split()[-1])
    stem = CACHE / index.read_text()
    with gzip.open(stem.with_suffix(".txt.gz"), "rt") as file:
        text = file.read()
    facts = json.loads(stem.with_suffix(".json").read_text())
    return text, facts | {"casts": int(stem.with_suffix(".casts").read_text())}


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _sources(key: Key) -> list[str]:
    parts = [jax.__version__, models.source(key.model)]
    parts += [inspect.getsource(f) for f in (modes.MODES[key.mode], modes.float32)]
    parts.append(inspect.getsource(devices))
    if key.mode in modes.OURS:
        parts += [p.read_text() for p in sorted(PACKAGE.rglob("*.py"))]
    return parts


def make(key: Key, fresh: bool) -> str:
    """Lowers a program, compiles it unless it is kept already; returns its hash."""
    module = models.load(key.model)
    made = modes.MODES[key.mode](module, getattr(module, key.size.upper()))
    lowered, casts = devices.lower_for(key.target, made.step, made.arguments, (0, 1, 2))
    parts = (lowered.as_text(), jax.__version__, *key.options)
    stem = CACHE / f"{key.model}-{key.target}-{key.size}-{_hash(*parts)}"
    stem.with_suffix(".casts").write_text(str(casts))
    if fresh or not stem.with_suffix(".json").exists():
        options = dict(o.split("=", 1) for o in key.options)
        program, facts = devices.compile_lowered(lowered, options)
        with gzip.open(f"{stem}.txt.gz", "wt", compresslevel=3) as file:
            file.write(program.as_text())
        stem.with_suffix(".json").write_text(json.dumps(facts))
    return stem.name


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--fresh"]
    print(make(Key(*arguments[:4], tuple(arguments[4:])), "--fresh" in sys.argv))
