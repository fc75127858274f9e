"""Which arguments of a call are the batch, and the same call with another one."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import tree_util

from jmp_rewrite._cost.subject import Subject


def batch_arguments(
    subject: Subject, axis: int, argnums: int | Sequence[int] | None
) -> list[int]:
    """Returns the positions of the arguments that are the batch.

    Raises:
      TypeError: if the axis is no integer.
      ValueError: if that is not clear, the axis is negative, or `argnums` are no
        arguments.
    """
    if operator.index(axis) < 0:
        raise ValueError(f"axis expected 0 or more, got {axis}.")
    args = subject.call.args
    if argnums is not None:
        given = [argnums] if isinstance(argnums, int) else list(argnums)
        wrong = [n for n in given if not -len(args) <= n < len(args)]
        if wrong or not given:
            raise ValueError(
                f"argnums expected positions of the {len(args)} positional arguments "
                f"of {subject.name}, got {argnums!r}."
            )
        return [n % len(args) for n in given]
    sizes = collections.defaultdict(list)
    for number, argument in enumerate(args):
        own = {s for x in _arrays(argument) if (s := _size(x, axis)) is not None}
        whole = all(_size(x, axis) is not None for x in _arrays(argument))
        if len(own) == 1 and whole and not _comes_back(subject, argument):
            sizes[own.pop()].append(number)
    if len(sizes) != 1:
        raise ValueError(
            f"largest_batch cannot tell which arguments of {subject.name} are the "
            f"batch: {_candidates(sizes, axis)} Say it: argnums=2 for the third."
        )
    return next(iter(sizes.values()))


def _candidates(sizes: dict[int, list[int]], axis: int) -> str:
    if not sizes:
        return f"no argument's arrays all have one size along axis {axis}."
    found = (f"{numbers} of size {size}" for size, numbers in sorted(sizes.items()))
    return f"it might be {' or '.join(found)} along axis {axis}."


def _arrays(tree: Any) -> list[jax.ShapeDtypeStruct]:
    leaves = tree_util.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]


def _size(x: Any, axis: int) -> int | None:
    return x.shape[axis] if -x.ndim <= axis < x.ndim else None


def _comes_back(subject: Subject, argument: Any) -> bool:
    """Whether the function returns a new value of an argument: it is state."""
    own = [(x.shape, x.dtype) for x in _arrays(argument)]
    return any(
        [(x.shape, x.dtype) for x in _arrays(result)] == own
        for result in _parts(subject.call.results)
    )


def _parts(results: Any) -> Iterator[Any]:
    """Yields a result and its parts: under NNX a result is nested in others."""
    yield results
    if isinstance(results, (tuple, list)):
        for part in results:
            yield from _parts(part)


def present(subject: Subject, numbers: Sequence[int], axis: int) -> tuple[int, int]:
    """Returns the batch of the call, and over how many devices it is spread.

    Raises:
      ValueError: if the arguments' arrays have no such axis.
    """
    arrays = [x for n in numbers for x in _arrays(subject.call.args[n])]
    sizes = [s for x in arrays if (s := _size(x, axis)) is not None]
    if not sizes:
        raise ValueError(
            f"largest_batch expected arrays with an axis {axis} in the arguments "
            f"{list(numbers)} of {subject.name}."
        )
    size = sizes[0]
    parts = [
        size // x.sharding.shard_shape(x.shape)[axis]
        for x in arrays
        if x.sharding is not None and _size(x, axis) == size
    ]
    return size, math.lcm(*parts)


def with_batch(
    subject: Subject, numbers: Sequence[int], axis: int, size: int
) -> Subject:
    """Explains the call again with another batch."""
    call = subject.call
    before = present(subject, numbers, axis)[0]

    def resized(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct) or _size(x, axis) != before:
            return x
        shape = list(x.shape)
        shape[axis] = size
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    args = list(call.args)
    for number in numbers:
        args[number] = tree_util.tree_map(resized, args[number])
    return call.again(*args, **call.kwargs)
