"""Programs that are only known when a derivative rule is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jmp_rewrite._precision import Plan


class Later(NamedTuple):
    """What runs a program that a derivative rule makes, long after emission.

    Attributes:
      run: decides nothing: runs the program of a plan on its constants and arguments.
      finish: runs a function of arrays that emits equations itself, a list of results.
    """

    run: Callable[[Plan, Sequence[Any], Sequence[Any]], list[Any]]
    finish: Callable[[Callable[..., list[Any]], Sequence[Any]], list[Any]]
