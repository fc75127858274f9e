"""A function traced for one call: a closed jaxpr, and what goes in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util

from jmp_rewrite._arguments import Flat, show, user_result
from jmp_rewrite._precision import parameters


class Traced(NamedTuple):
    """A function traced for one call.

    Attributes:
      closed: its closed jaxpr.
      arrays: the call's arrays, for the jaxpr's parameters.
      arguments: the call's `(args, kwargs)`, what is no array hidden.
      results: the function's result, what is no array hidden.
    """

    closed: Any
    arrays: list[Any]
    arguments: Any
    results: Flat

    @property
    def result_paths(self) -> list[str]:
        """The path of each array in the result; of what changed in place, first.

        That is the number of the argument, and the path in it.
        """
        result, ahead = user_result(self.results)
        inside = parameters.result_paths(self.results.paths[:ahead])
        changes = [path.split("/", 2)[-1] for path in inside]
        return changes + parameters.result_paths(result.paths)

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Makes the function's result from the jaxpr's results."""
        return show(tree_util.tree_unflatten(self.results.structure, arrays))
