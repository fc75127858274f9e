"""Which arguments of a call are the batch, and the same call with another one."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import tree_util

from jmp_rewrite._arguments import Flat
from jmp_rewrite._cost.subject import Subject

# A positional argument's number, or the name of another.
Place = int | str


def batch_arguments(
    subject: Subject, axis: int, argnums: int | Collection[int] | None
) -> list[Place]:
    """Returns the places of the arguments that are the batch.

    Raises:
      TypeError: if the axis or an argument's number is no integer.
      ValueError: if that is not clear, the axis is negative, or `argnums` are no
        arguments.
    """
    if operator.index(axis) < 0:
        raise ValueError(f"axis expected 0 or more, got {axis}.")
    args = subject.call.args
    if argnums is not None:
        given = _numbers(argnums)
        named = {
            number: name
            for number, name in enumerate(subject.call.names)
            if name in subject.call.kwargs
        }
        wrong = [n for n in given if n not in named and not -len(args) <= n < len(args)]
        if wrong or not given:
            raise ValueError(
                f"argnums expected positions of the {len(args)} positional arguments "
                f"of {subject.name}, got {argnums!r}."
            )
        return [named[n] if n in named else n % len(args) for n in given]
    sizes = collections.defaultdict(list)
    for place, argument in _arguments(subject).items():
        own = {s for x in _arrays(argument) if (s := _size(x, axis)) is not None}
        whole = all(_size(x, axis) is not None for x in _arrays(argument))
        if len(own) == 1 and whole and not _comes_back(subject, argument):
            sizes[own.pop()].append(place)
    if len(sizes) != 1:
        raise ValueError(
            f"largest_batch cannot tell which arguments of {subject.name} are the "
            f"batch: {_candidates(sizes, axis)} Say it{_example(sizes)}."
        )
    return next(iter(sizes.values()))


def _numbers(argnums: Any) -> list[int]:
    try:
        given = argnums if isinstance(argnums, Iterable) else [argnums]
        return [operator.index(n) for n in given]
    except TypeError:
        raise TypeError(
            f"argnums expected an integer or a collection of them, got {argnums!r}."
        ) from None


def _arguments(subject: Subject) -> dict[Place, Any]:
    found: dict[Place, Any] = dict(enumerate(subject.call.args))
    return found | subject.call.kwargs


def _candidates(sizes: dict[int, list[Place]], axis: int) -> str:
    if not sizes:
        return f"no argument's arrays all have one size along axis {axis}."
    found = (f"{places} of size {size}" for size, places in sorted(sizes.items()))
    return f"it might be {' or '.join(found)} along axis {axis}."


def _example(sizes: dict[int, list[Place]]) -> str:
    """Returns how one of the candidates that have a position is named."""
    numbers = [p for places in sizes.values() for p in places if isinstance(p, int)]
    if not numbers:
        return " with argnums"
    return f", as in argnums={max(numbers)}"


def _arrays(tree: Any) -> list[jax.ShapeDtypeStruct]:
    leaves = tree_util.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]


def _size(x: Any, axis: int) -> int | None:
    return x.shape[axis] if -x.ndim <= axis < x.ndim else None


def _comes_back(subject: Subject, argument: Any) -> bool:
    """Whether the function returns a new value of an argument: it is state."""
    own = [(x.shape, x.dtype) for x in _arrays(argument)]
    return any(
        [(x.shape, x.dtype) for x in result.types] == own
        for result in _parts(subject.call.results)
    )


def _parts(results: Flat) -> Iterator[Flat]:
    """Yields a result and its parts: under NNX a result is nested in others."""
    yield results
    for part in results.parts():
        yield from _parts(part)


def present(subject: Subject, places: Sequence[Place], axis: int) -> tuple[int, int]:
    """Returns the batch of the call, and over how many devices it is spread.

    Raises:
      ValueError: if the arguments' arrays have no such axis.
    """
    arguments = _arguments(subject)
    arrays = [x for place in places for x in _arrays(arguments[place])]
    sizes = [s for x in arrays if (s := _size(x, axis)) is not None]
    if not sizes:
        raise ValueError(
            f"largest_batch expected arrays with an axis {axis} in the arguments "
            f"{list(places)} of {subject.name}."
        )
    size = sizes[0]
    parts = [
        size // x.sharding.shard_shape(x.shape)[axis]
        for x in arrays
        if x.sharding is not None and _size(x, axis) == size
    ]
    return size, math.lcm(*parts)


def with_batch(
    subject: Subject, places: Sequence[Place], axis: int, size: int
) -> Subject:
    """Explains the call again with another batch."""
    call = subject.call
    before = present(subject, places, axis)[0]

    def resized(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct) or _size(x, axis) != before:
            return x
        shape = list(x.shape)
        shape[axis] = size
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    args, kwargs = dict(enumerate(call.args)), dict(call.kwargs)
    for place in places:
        among: dict[Any, Any] = kwargs if isinstance(place, str) else args
        among[place] = tree_util.tree_map(resized, among[place])
    return call.again(*args.values(), **kwargs)
