"""How far one value is from another: what is counted for each equation.

The error of an array is the larger one of two numbers, each at most 1. One is the norm
of the difference over the norm of the reference: it sees the elements that are large.
The other is the mean of the elements' own relative errors, over the elements that are
not zero in both: a mask of -1e9 cannot hide from it the numbers beside it. An array in
which something became Inf or NaN has 2 more: it is worse than any that has not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_rewrite._diagnose.counts import IS_MAXIMUM, ORDINARY, SPOILT, UNKNOWN, Counts

# Above, every so many-th element is compared: 2**15 of them tell a share of 1e-3.
SAMPLE = 2**15


class _Sums(NamedTuple):
    """What k comparisons of two arrays add up, f32[k] each.

    `distance` and `square` are the squares of the norms of the difference and of the
    reference, both in units of the same large number.
    """

    relative: Any
    counted: Any
    distance: Any
    square: Any
    nonfinite: Any
    zeroed: Any
    nonfinite_before: Any

    def errors(self, xp: Any) -> Any:
        """Returns f32[k], 0..1: the larger one of the mean and the norm."""
        mean = self.relative / xp.maximum(self.counted, 1.0)
        norm = xp.sqrt(self.distance / xp.where(self.square > 0, self.square, 1.0))
        return xp.maximum(mean, xp.minimum(norm, 1.0))


class Measured(NamedTuple):
    """What stands beside each other for one equation.

    Attributes:
      values: the results in the rewritten program.
      references: the results in the reference.
      exact: the results of the equation in float32 on the operands that it had in the
        rewritten program; empty if it computed in float32 itself.
      terms: of a sum or a choice of two operands, for each its value, its reference,
        and where it counts (None: everywhere); empty for anything else.
    """

    values: Sequence[Any]
    references: Sequence[Any]
    exact: Sequence[Any] = ()
    terms: Sequence[tuple[Any, Any, Any]] = ()


def measure(arrays: Measured, inherited: Sequence[Any] = ()) -> tuple[Any, Any]:
    """Measures the results of one equation.

    Of a large array a sample is compared; Inf and NaN are found wherever they are.
    Arrays are compared by NumPy, which has nothing to compile for each shape, and
    tracers by JAX.

    Args:
      arrays: what is compared.
      inherited: f32[] for each operand, its error.

    Returns:
      f32[], the error; and f32[12], all `Counts`.
    """
    leaves = jax.tree.leaves((arrays, inherited))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return _traced(arrays, tuple(inherited))
    found = [
        (x.size, _count_nonfinite(x, arrays, i)) for i, x in enumerate(arrays.values)
    ]
    host = jax.tree.map(_fetch, arrays)
    with np.errstate(all="ignore"):
        return _measure(host, inherited, found, np)


@jax.jit
def _traced(arrays: Measured, inherited: Sequence[Any]) -> tuple[Any, Any]:
    found = [
        (
            x.size,
            None if x.size <= SAMPLE else _nonfinite(x, _held_against(arrays, i)),
        )
        for i, x in enumerate(arrays.values)
    ]
    return _measure(jax.tree.map(_sample, arrays), inherited, found, jnp)


def _measure(
    arrays: Measured,
    inherited: Sequence[Any],
    found: Sequence[tuple[int, Any]],
    xp: Any,
) -> tuple[Any, Any]:
    """Measures samples.

    Args:
      arrays: samples of one dimension.
      inherited: f32[] for each operand.
      found: for each result its size, and what `_nonfinite` counted in all of it; None
        where the sample is all.
      xp: NumPy or JAX.
    """
    results = [_result(arrays, i, *own, xp) for i, own in enumerate(found)]
    counts = functools.reduce(functools.partial(_both, xp=xp), results)
    brought = (counts.left, counts.right) if arrays.terms else ()
    counts = counts._replace(appeared=_appeared(counts.error, inherited, brought, xp))
    vector = xp.stack([xp.asarray(c, np.float32) for c in counts])
    return vector[0], vector


def _both(one: Counts, other: Counts, xp: Any) -> Counts:
    pairs = zip(one, other, IS_MAXIMUM, strict=True)
    return Counts(*(xp.maximum(a, b) if m else a + b for a, b, m in pairs))


def _result(
    arrays: Measured, number: int, size: int, everywhere: Any, xp: Any
) -> Counts:
    """Counts for one result; what appeared is known only when all have been counted."""
    value, reference = arrays.values[number], arrays.references[number]
    exact, terms = arrays.exact[number : number + 1], arrays.terms
    nothing = Counts(left=UNKNOWN, right=UNKNOWN, size=size)
    if not jnp.issubdtype(reference.dtype, np.inexact):
        wrong = (value != reference).astype(np.float32)
        return nothing._replace(error=wrong.mean() if value.size else np.float32(0.0))  # type: ignore[arg-type]
    dtype = at_least_float32(reference.dtype)
    x, r, *own = (a.astype(dtype) for a in (value, reference, *exact))
    shifted = [r + _shift(*t, xp).astype(dtype) for t in terms]
    sums, largest = _compare(
        xp.stack([x, *(x for _ in own), *shifted]),
        xp.stack([r, *own, *(r for _ in shifted)]),
        xp,
    )
    errors = sums.errors(xp)
    spoilt = sums.nonfinite if everywhere is None else everywhere
    every = size / max(value.size, 1)
    counts = nothing._replace(
        error=errors[0] + xp.where(spoilt[0] > 0, SPOILT, 0.0),
        nonfinite=spoilt[0],
        zeroed=sums.zeroed[0] * every,
        nonfinite_before=sums.nonfinite_before[0] * every,
        largest=largest,
    )
    if exact:
        counts = counts._replace(
            introduced=errors[1] + xp.where(spoilt[1] > 0, SPOILT, 0.0),
            overflowed=spoilt[1],
            underflowed=sums.zeroed[1] * every,
        )
    return counts._replace(left=errors[-2], right=errors[-1]) if terms else counts


def _compare(x: Any, reference: Any, xp: Any) -> tuple[_Sums, Any]:
    """Compares [k, n] with [k, n]; returns the sums, and the largest reference."""
    size = xp.abs(reference)
    finite, known = xp.isfinite(x), xp.isfinite(reference)
    both = known & finite
    distance = xp.where(both, xp.abs(x - reference), 0.0)
    relative = xp.where(distance > 0, xp.minimum(distance / size, 1.0), 0.0)
    largest = xp.max(xp.where(known, size, 0.0), initial=0.0)
    # In units of the largest number, so that no square leaves float32's range.
    unit = xp.maximum(largest, xp.max(xp.where(both, xp.abs(x), 0.0), initial=0.0))
    unit = xp.where(unit > 0, unit, 1.0)
    sums = _Sums(
        relative=xp.where(known & ~finite, 1.0, relative),
        counted=known & ((x != 0) | (reference != 0)),
        distance=xp.square(distance / unit),
        square=xp.where(both, xp.square(size / unit), 0.0),
        nonfinite=known & ~finite,
        zeroed=known & (size > 0) & (x == 0),
        nonfinite_before=~known,
    )
    return _Sums(*(s.sum(-1, dtype=np.float32) for s in sums)), largest


def _shift(value: Any, reference: Any, where: Any, xp: Any) -> Any:
    """Returns by how much a term is off, where it counts."""
    shift = value.astype(np.float32) - reference.astype(np.float32)
    return shift if where is None else xp.where(where, shift, 0.0)


def _appeared(
    error: Any, inherited: Sequence[Any], brought: Sequence[Any], xp: Any
) -> Any:
    """Returns the part of an error that the operands do not explain.

    A term of a sum explains what it brings and no more: it may be all noise, and small.
    """
    spoilt, before = error >= SPOILT, np.bool_(False)
    explained = []
    for other in inherited:
        is_spoilt = other >= SPOILT
        before = before | is_spoilt
        explained.append(ORDINARY * (other - xp.where(is_spoilt, SPOILT, 0.0)))
    if brought:
        known = sum(map(xp.minimum, explained, brought))
    else:
        known = functools.reduce(xp.maximum, explained, np.float32(0.0))
    own = error - xp.where(spoilt, SPOILT, 0.0)
    return xp.maximum(own - known, 0.0) + xp.where(spoilt & ~before, SPOILT, 0.0)


# ---- samples


def _sample(x: Any) -> Any:
    """Returns up to 2**15 elements in one dimension, evenly spaced."""
    step = -(-x.size // SAMPLE) | 1 if x.size > SAMPLE else 1  # odd: rows are even
    return x.reshape(-1)[::step]


_sample_on_device = jax.jit(_sample)


def _fetch(x: Any) -> np.ndarray:
    """Returns a sample of an array as NumPy sees it."""
    if x.size > SAMPLE and isinstance(x, jax.Array):
        if any(d.platform != "cpu" for d in x.devices()):
            return np.asarray(_sample_on_device(x))
    return _sample(np.asarray(x))  # on a CPU no copy


def _held_against(arrays: Measured, number: int) -> list[Any]:
    """Returns the reference of one result, and its exact value."""
    return [arrays.references[number], *arrays.exact[number : number + 1]]


def _count_nonfinite(value: Any, arrays: Measured, number: int) -> Any:
    """Returns the counts of `_nonfinite`; None where the sample is all."""
    if value.size <= SAMPLE:
        return None
    return np.asarray(_nonfinite(value, _held_against(arrays, number)))


@jax.jit
def _nonfinite(value: Any, references: Sequence[Any]) -> Any:
    """Counts what is Inf or NaN and is finite in each reference: f32[k]."""
    if not jnp.issubdtype(value.dtype, np.inexact):
        return jnp.zeros(len(references), np.float32)

    def count() -> Any:
        spoilt = ~jnp.isfinite(value)
        counted = [jnp.sum(jnp.isfinite(r) & spoilt) for r in references]
        return jnp.stack(counted).astype(np.float32)

    return lax.cond(
        jnp.isfinite(value).all(),
        lambda: jnp.zeros(len(references), np.float32),
        count,
    )


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Returns float32 for smaller floats, of which JAX promotes not all to it."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


# The exponents that are counted: magnitudes from 2**-60 on, and up to 2**20.
LOWEST, HIGHEST = -60, 20
BINS = HIGHEST - LOWEST


def exponents(x: Any) -> Any:
    """Counts binary exponents of a float array: f32[80], from 2**-60 on.

    Zeros, Inf and NaN are left out. Of a large array a sample is counted.
    """
    if isinstance(x, jax.core.Tracer):
        return _exponents(_sample(x))
    sample = np.abs(_fetch(x)).astype(np.float32)
    _, powers = np.frexp(sample[(sample > 0) & np.isfinite(sample)])
    places = np.clip(powers - 1 - LOWEST, 0, BINS - 1)
    return np.bincount(places, minlength=BINS).astype(np.float32)


@jax.jit
def _exponents(x: Any) -> Any:
    sample = jnp.abs(x).astype(np.float32)
    counted = (sample > 0) & jnp.isfinite(sample)
    _, powers = jnp.frexp(jnp.where(counted, sample, 1.0))
    places = jnp.clip(powers - 1 - LOWEST, 0, BINS - 1)
    return jnp.zeros(BINS, np.float32).at[places].add(counted.astype(np.float32))
