"""Methods of Flax Linen modules, as `flax.linen.jit` lifts them.

A method of a bound module reads its variables, and may make and change some, where it
runs. So it is a function from arrays to arrays only once its variables and random keys
are handed in and out.

This module imports Flax, so nothing imports it before a program has done so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.core import lift


def is_bound(args: tuple[Any, ...]) -> bool:
    """Whether a call is one of a method of a module that has its variables."""
    return bool(args) and isinstance(args[0], nn.Module) and args[0].scope is not None


def call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rewritten: Callable[..., Any],
) -> Any:
    """Calls a method of a bound module.

    Args:
      fun: the method, as a function of the module.
      args: its arguments, the module first.
      kwargs: its arguments by name.
      rewritten: calls a function of arrays: `(function, args, kwargs) -> result`.
    """

    def lifted(method: Callable[..., Any]) -> Any:
        def inner(
            scope_of: Any,
            packed: Any,
            state: Any,
            keys: Any,
            /,
            *args: Any,
            **named: Any,
        ) -> Any:
            def pure(*given: Any, **named: Any) -> Any:  # with names of the user's
                state, keys, *args = given
                scope = scope_of(state, keys)
                return method(scope, *args, **named), packed(scope)

            return rewritten(pure, (state, keys, *args), named)

        everything = (True,)
        return lift.pack(
            inner, everything, everything, everything, "mixed_precision", True
        )

    return nn.transforms.decorator_lift_transform(lifted, fun)(*args, **kwargs)
