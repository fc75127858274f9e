"""Which leaves of a call are weights, which are state, and what takes their place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import tree_util

from jmp_rewrite._arguments import Flat
from jmp_rewrite._precision import key_names
from jmp_rewrite._source import name_of

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
WEIGHT, STATE = "weight", "state"


class Numbers(NamedTuple):
    """What `for_inference` was told.

    Attributes:
      weights: numbers of arguments.
      state: number of an argument -> number of the result that takes its place.
    """

    weights: tuple[int, ...]
    state: Mapping[int, int]

    @classmethod
    def of(cls, fun: Any, weights: Any, state: Any) -> Numbers:
        """Reads `weights` and `state`.

        Raises:
          TypeError: for what is no number, or no mapping of numbers.
          ValueError: for an argument that the function does not have, or that is named
            twice.
        """
        numbers = _numbers(weights, "weights")
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                "state expected a mapping of argument numbers to result numbers, such "
                f"as {{1: 0}}, got {state!r}."
            )
        pairs = {
            _number(k, "state"): _number(v, "state") for k, v in (state or {}).items()
        }
        for number in (*numbers, *pairs):
            _check_range(fun, number)
        twice = sorted({n for n in numbers if n in pairs})
        if twice:
            raise ValueError(
                f"argument {twice[0]} of {name_of(fun)} is named as weights and as "
                "state: name it in one of them (weights=() if there are none)."
            )
        if len(set(pairs.values())) < len(pairs):
            raise ValueError(
                f"state expected another result for each argument, got {dict(pairs)!r}."
            )
        return cls(numbers, pairs)

    def kind_of(self, number: int) -> str | None:
        """Returns "weight", "state", or None for any other argument."""
        if number in self.state:
            return STATE
        return WEIGHT if number in self.weights else None


def _numbers(given: Any, name: str) -> tuple[int, ...]:
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)):
        return tuple(dict.fromkeys(_number(n, name) for n in given))
    return (_number(given, name),)


def _number(given: Any, name: str) -> int:
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(
            f"{name} expected numbers of arguments, got {given!r} of type "
            f"{type(given).__name__}."
        )
    number = operator.index(given)
    if number < 0:
        raise ValueError(f"{name} expected numbers from 0 on, got {number}.")
    return number


def _check_range(fun: Any, number: int) -> None:
    """Checks an argument's number, where the signature tells how many there are."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # functions of C tell nothing
        return
    kinds = [p.kind for p in parameters]
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and number >= len(names):
        raise ValueError(
            f"expected a number of the {len(names)} positional arguments "
            f"({', '.join(names)}) of {name_of(fun)}, got {number}."
        )


class Leaf(NamedTuple):
    """An array of a call.

    Attributes:
      number: of its argument.
      kind: "weight", "state", or None for any other.
      path: its keys, joined by "/", the argument's number first.
      value: the array, tracer or type.
    """

    number: int
    kind: str | None
    path: str
    value: Any


def leaves_of(arguments: Any, numbers: Numbers, hidden: int) -> list[Leaf]:
    """Returns the arrays of a call, in their order.

    Args:
      arguments: `(args, kwargs)`, what is no array hidden.
      numbers: which arguments are what.
      hidden: how many arguments stand before those of the user's call: a module whose
        method is called.
    """
    found = []
    for path, value in tree_util.tree_flatten_with_path(arguments)[0]:
        is_positional = path[0].idx == 0
        number = path[1].idx - hidden if is_positional else -1
        names = [n for key in path[2:] for n in key_names(key)]
        text = "/".join([str(number), *names])
        found.append(Leaf(number, numbers.kind_of(number), text, value))
    return found


def check_call(fun: Any, numbers: Numbers, args: Sequence[Any]) -> None:
    """Checks that a call has the arguments that are weights or state.

    Raises:
      ValueError: for an argument that it has not.
    """
    for number in (*numbers.weights, *numbers.state):
        if number >= len(args):
            raise ValueError(
                f"argument {number} of {name_of(fun)} is its weights or its state, but "
                f"the call has {len(args)} positional arguments."
            )


def result_leaves(results: Flat, number: int, fun: Any) -> tuple[int, Flat]:
    """Returns where the leaves of a result begin among all, and the result.

    Raises:
      ValueError: if there is no such result.
    """
    several = results.parts() or [results]
    if number >= len(several):
        raise ValueError(
            f"state names result {number} of {name_of(fun)}, which returns "
            f"{len(several)}."
        )
    before = sum(len(r.types) for r in several[:number])
    return before, several[number]
