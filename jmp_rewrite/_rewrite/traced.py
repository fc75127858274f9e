"""A function traced for one call: a closed jaxpr, and what goes in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util

from jmp_rewrite._arguments import show


class Traced(NamedTuple):
    """A function traced for one call.

    Attributes:
      closed: its closed jaxpr.
      arrays: the call's arrays, for the jaxpr's parameters.
      arguments: the call's `(args, kwargs)`, what is no array hidden.
      results: the function's result, with types in place of arrays, the rest hidden.
    """

    closed: Any
    arrays: list[Any]
    arguments: Any
    results: Any

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Makes the function's result from the jaxpr's results."""
        return show(
            tree_util.tree_unflatten(tree_util.tree_structure(self.results), arrays)
        )
