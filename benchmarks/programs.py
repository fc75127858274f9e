"""Compiled programs of the benchmarks, made once and kept.

    PYTHONPATH=. python benchmarks/programs.py MODEL MODE TARGET SIZE

Each is kept under a hash of the lowered program (see `jmp_rewrite/_cost/store.py`), so
a change of source that changes no program compiles nothing again.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import devices  # it chooses the backend, so it comes before jax
import models
import modes

from jmp_rewrite._cost.store import Compiled


class Key(NamedTuple):
    """Which program: names in `models`, `modes` and `devices`, and the model's size.

    `options` are compiler options, `name=value`.
    """

    model: str
    mode: str
    target: str
    size: str = "full"
    options: tuple[str, ...] = ()


def compiled(key: Key, fresh: bool = False) -> tuple[Compiled, int]:
    """A compiled program, and the number of casts in the step's jaxpr.

    Raises:
      RuntimeError: if it cannot be compiled.
    """
    module = models.load(key.model)
    made = modes.MODES[key.mode](module, getattr(module, key.size.upper()))
    return devices.compiled(
        key.target,
        made.step,
        made.arguments,
        (0, 1, 2),
        dict(option.split("=", 1) for option in key.options),
        fresh,
    )


if __name__ == "__main__":
    print(compiled(Key(*sys.argv[1:5], tuple(sys.argv[5:])))[0].text)
