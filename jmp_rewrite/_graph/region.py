"""The region that is being traced: which policy will rewrite it.

What JAX cannot look into needs half operands while it is traced, before anything is
decided. So `mixed_precision` says here what it will do with what it traces. The region
is a user context, so it takes part in the keys of all of JAX's caches: a jitted
function that is called in several regions is traced for each.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jmp_rewrite._policy import Policy

FLOAT32 = np.dtype(np.float32)


class Region(NamedTuple):
    """What is being traced.

    Attributes:
      policy: what will rewrite it.
      path: the scopes that it stands in, joined by "/": a derivative rule's.
      full: whether `full_precision` covers it.
      in_float32: the calls of half-precision functions, counted from 0, that stand in
        a scope that is float32.
      again: how often the region has been traced before, so that no cache knows it.
    """

    policy: Policy
    path: str = ""
    full: bool = False
    in_float32: frozenset[int] = frozenset()
    again: int = 0


_REGION = jax.make_user_context(None)


def current() -> Region | None:
    """Returns the region that is being traced; None outside of `mixed_precision`."""
    return _REGION.value


class _Calls(threading.local):
    """Counts the calls of half-precision functions, of each trace by itself."""

    def __init__(self) -> None:
        self.counters: list[Iterator[int]] = []


_CALLS = _Calls()


def next_call() -> int | None:
    """Counts a call of a half-precision function in the region that is being traced.

    Returns:
      Its number; None if there is no region, or the call stands in float32.
    """
    region = current()
    if region is None or not _CALLS.counters:
        return None
    number = next(_CALLS.counters[-1])
    return None if number in region.in_float32 else number


@contextlib.contextmanager
def tracing(region: Region) -> Iterator[None]:
    """Traces what a region holds."""
    _CALLS.counters.append(itertools.count())
    try:
        with _REGION(region):
            yield
    finally:
        _CALLS.counters.pop()


@contextlib.contextmanager
def in_full_precision() -> Iterator[None]:
    """Traces what `full_precision` covers."""
    region = current()
    if region is None or region.full:
        yield
    else:
        with _REGION(region._replace(full=True)):
            yield


def at(
    region: Region | None, path: str, full: bool
) -> contextlib.AbstractContextManager[None]:
    """Traces a derivative rule that stands somewhere in a region."""
    if region is None:
        return contextlib.nullcontext()
    return tracing(region._replace(path=path, full=full))
