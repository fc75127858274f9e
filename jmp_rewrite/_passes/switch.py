"""Which passes run, and for which device: the switch."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jmp_rewrite._passes.by_device import device_of
from jmp_rewrite._passes.optimize import PASSES
from jmp_rewrite._passes.program import Pass

_VARIABLE = "JMP_REWRITE_PASSES"


class Choice(NamedTuple):
    """What is switched on.

    Attributes:
      names: of the passes, in their order.
      device: the device whose program is made; None for any.
    """

    names: tuple[str, ...]
    device: str | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes."""
        return tuple(p for p in PASSES if p.name in self.names)


# Takes part in the key of `jax.jit`'s cache. None: what the environment says.
_CURRENT = jax.make_user_context(None)


def current() -> Choice:
    """Returns the passes that are switched on."""
    if _CURRENT.value is None:
        # An empty variable is an unset one, as where containers and CI files clear it.
        return Choice(_names(os.environ.get(_VARIABLE) or "all", _VARIABLE))
    return _CURRENT.value


@contextlib.contextmanager
def use_passes(passes: str = "all", *, device: str | None = None) -> Iterator[None]:
    """Switches passes on or off for a block, in this thread.

    Precision is decided first, and written down as casts. A pass is a remedy for one
    compiler over that program: `python -m jmp_rewrite passes` lists them. What keeps a
    program right on a backend runs whatever is asked. Jitted code that depends on the
    switch is traced again.

    Args:
      passes: "all", "none", names to run, as "recompute_stacks,sums_behind_loops", or
        names to leave out, as "-recompute_stacks". The environment variable
        `JMP_REWRITE_PASSES` sets what holds outside of such blocks, in the same words.
      device: runs here the program that this device would be given, as "TPU v5e",
        "NVIDIA H100" or "CPU"; None for this process's own.

    Raises:
      ValueError: for an unknown pass or device, with the nearest name.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> f = jax.jit(jmpr.mixed_precision(lambda x: x @ x, "mixed_bfloat16"))
      >>> with jmpr.use_passes("none"):
      ...     y = f(jnp.ones((2, 2)))
      >>> y.dtype
      dtype('float32')
    """
    if device is not None:
        device_of(device)
    with _CURRENT(Choice(_names(passes, "use_passes"), device)):
        yield


def _names(spec: str, source: str) -> tuple[str, ...]:
    """Reads "all", "none", "name,name" or "-name,-name"."""
    known = tuple(p.name for p in PASSES)
    if not isinstance(spec, str):
        raise TypeError(
            f'{source} expected "all", "none" or names of passes, got {spec!r} of type '
            f"{type(spec).__name__}."
        )
    words = [word.strip() for word in spec.split(",") if word.strip()]
    if words == ["all"]:
        return known
    if words == ["none"]:
        return ()
    for word in words:
        _check(word.removeprefix("-"), known, source)
    left_out = [word[1:] for word in words if word.startswith("-")]
    if left_out and len(left_out) < len(words):
        raise ValueError(
            f"{source} expected names to run or names to leave out, got both: {spec!r}."
        )
    if not words:
        raise ValueError(
            f'{source} expected "all", "none" or names of passes, got {spec!r}.'
        )
    if left_out:
        return tuple(name for name in known if name not in left_out)
    return tuple(name for name in known if name in words)


def _check(name: str, known: tuple[str, ...], source: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name.lower(), ("all", "none", *known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    if name in ("all", "none"):
        hint = ", which stands alone."
    raise ValueError(
        f'{source} expected "all", "none" or names of passes '
        f"({', '.join(known)}), got {name!r}{hint}"
    )
