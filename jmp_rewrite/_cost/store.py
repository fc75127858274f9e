"""Compiled programs, kept on disk: compiling one takes from seconds to minutes."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

# All kept programs together; the oldest go first.
MOST_BYTES = 2**29


class Compiled(NamedTuple):
    """What a compiler made of a program.

    Attributes:
      text: the compiled program; empty if there is none.
      answer: what the compiler said beside it, as `child.py` writes it.
    """

    text: str
    answer: dict[str, Any]


def folder() -> pathlib.Path:
    """Returns where programs are kept: in the user's cache, or for the session."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    try:
        path = pathlib.Path(base) / "jmp_rewrite" / "cost"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except (OSError, RuntimeError):  # a home that is not there, or not ours
        pass
    path = pathlib.Path(tempfile.gettempdir()) / f"jmp_rewrite-cost-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def key(*parts: str) -> str:
    """Returns the name of what these decide."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def load(name: str) -> Compiled | None:
    """Returns the entry of a name, or None."""
    path = folder() / name
    try:
        answer = json.loads(path.with_suffix(".json").read_text())
        with gzip.open(path.with_suffix(".gz"), "rt") as file:
            text = file.read()
        os.utime(path.with_suffix(".gz"))
    except Exception:  # whatever is wrong with an entry, it is not there
        return None
    return Compiled(text, answer)


def save(name: str, compiled: Compiled, most_bytes: int = MOST_BYTES) -> None:
    """Keeps a program, and of all of them so many bytes; a full disk is no error."""
    path = folder() / name
    try:
        _write(path.with_suffix(".gz"), gzip.compress(compiled.text.encode(), 3))
        _write(path.with_suffix(".json"), json.dumps(compiled.answer).encode())
        _forget_oldest(folder().glob("*.gz"), most_bytes)
    except OSError:
        pass


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file at once: another process may read it, or write the same."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _forget_oldest(paths: Iterable[pathlib.Path], most_bytes: int) -> None:
    sizes = {path: path.stat() for path in paths}
    total = sum(s.st_size for s in sizes.values())
    for path in sorted(sizes, key=lambda p: sizes[p].st_mtime):
        if total <= most_bytes:
            break
        total -= sizes[path].st_size
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
