"""How far the results of a program are from those of the reference.

A result that is an argument with a small change, as parameters after a step are, is
judged by its change: a gradient that is lost altogether moves a parameter by a part in
a thousand. A result that is nothing but rounding noise in float32 already, as the
gradient of a bias in front of a normalization is, is not judged at all, nor is the
state that such a gradient changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.distance import at_least_float32

# Parameters move by much less than this in a step, and unrelated arrays differ by more.
_STEP = 0.5
# Elements that are looked at to find the argument that a result continues.
_SAMPLED = 64
# The arguments are shaken by two spacings of float32, and what then changes by more
# than a hundredth has no digits that half precision could lose.
_SHAKE = 2.0**-22
_NOISE = 0.01
# Up to here float32 holds all integers, and above nothing else.
_EXACT = 2.0**24


class Reference:
    """The results of the reference, to hold others against.

    Attributes:
      values: its results.
      is_noise: for each result whether it is rounding noise in float32 already.
      is_spoilt: for each result whether it holds Inf or NaN.
    """

    def __init__(
        self,
        values: Sequence[Any],
        arguments: Sequence[Any],
        gradients: Sequence[Any] | None = None,
    ) -> None:
        """Finds for each result the argument that it continues, if any.

        Args:
          values: the results of the reference.
          arguments: the arrays that the program was given.
          gradients: of each result the gradient that it is made of element by element,
            of its own shape; None where there is none.
        """
        self.values = [_array(x) for x in values]
        self.is_noise = [False] * len(self.values)
        self.is_spoilt = [not is_finite(x) for x in self.values]
        self._arguments = arguments
        self._start = _starts(self.values, arguments)
        self._gradients = gradients or [None] * len(values)

    def shaken(self, run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Finds the results that are noise, by another run with shaken arguments.

        Args:
          run: the program that made the reference's results.
        """
        arguments = self._shaken_arguments()
        for i, value in enumerate(map(_array, run(arguments))):
            start = self._start[i]
            if start is not None:
                # What the parameter itself was shaken by is no change of its step.
                shift = self._arguments[start] - arguments[start]
                value = value + shift.astype(value.dtype)
            self.is_noise[i] = self._error(i, value) > _NOISE

    def shaken_gradients(self, run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Finds the results whose gradients are noise, which state may hide.

        A moment holds the noise of the steps before: as large as that of another run
        in float32, while half precision's own is far larger.

        Args:
          run: returns for each result its gradient, as the reference was given them.
        """
        shaken = run(self._shaken_arguments())
        for i, (own, other) in enumerate(zip(self._gradients, shaken, strict=True)):
            if own is not None and other is not None and own.shape == other.shape:
                distance, size, _ = _distance(other, own, None, None)
                self.is_noise[i] |= bool(distance > _NOISE * size)

    def _shaken_arguments(self) -> list[Any]:
        return [_shake(x, i) for i, x in enumerate(self._arguments)]

    def errors(self, values: Sequence[Any]) -> list[float]:
        """Returns the error of each result: 0..inf, 0 for noise.

        It is the norm of the difference over the norm of the reference; inf if
        something is Inf or NaN that should not be, which no noise is; for integers and
        booleans the share of wrong elements. What is made of a gradient, an element
        counts in as much as its gradient is large: to the first order that is what it
        does to the loss. Adam divides gradients by their own size, so that its first
        step is as large for an element whose gradient is rounding noise as for any
        other.
        """
        return [self._error(i, _array(x)) for i, x in enumerate(values)]

    def _error(self, index: int, value: Any) -> float:
        reference, start = self.values[index], self._start[index]
        if jax.dtypes.issubdtype(reference.dtype, jax.dtypes.extended):
            return 0.0
        other = None if start is None else self._arguments[start]
        distance, size, spoilt = jax.device_get(
            _distance(value, reference, other, self._gradients[index])
        )
        if spoilt:
            return float("inf")
        if not distance or self.is_noise[index]:
            return 0.0
        return float(distance) / float(size) if size else float("inf")


def _array(x: Any) -> Any:
    """Returns a result as an array: a constant of the program may be a number."""
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def is_finite(x: Any) -> bool:
    """Whether nothing in an array is Inf or NaN."""
    x = _compat.dereferenced(x)
    return not jnp.issubdtype(x.dtype, np.inexact) or bool(_is_finite(x))


_is_finite = jax.jit(lambda x: jnp.isfinite(x).all())


@jax.jit
def _distance(
    value: Any, reference: Any, start: Any, gradient: Any
) -> tuple[Any, Any, Any]:
    """Returns the norm of the difference, that of the reference, and if all is lost."""
    if not jnp.issubdtype(reference.dtype, np.inexact):
        wrong = jnp.sum((value != reference).astype(np.float32))
        return wrong, jnp.float32(max(reference.size, 1)), jnp.bool_(False)
    dtype = at_least_float32(reference.dtype)
    value, reference = value.astype(dtype), reference.astype(dtype)
    known = jnp.isfinite(reference)
    spoilt = jnp.any(known & ~jnp.isfinite(value))
    moved = reference if start is None else reference - start.astype(dtype)
    moved = jnp.where(jnp.any(moved != 0), moved, reference)
    difference = jnp.where(known, value - reference, 0.0)
    moved = jnp.where(known, moved, 0.0)
    # Scaled, so that no square leaves float32's range.
    scale = jnp.maximum(
        jnp.abs(difference).max(initial=0.0), jnp.abs(moved).max(initial=0.0)
    )
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1.0)
    weight = 1.0 if gradient is None else _weight(gradient)
    return _norm(difference / scale, weight), _norm(moved / scale, weight), spoilt


def _weight(gradient: Any) -> Any:
    """Returns how much each element of what is made of a gradient counts: 0..1."""
    size = jnp.abs(gradient).astype(np.float32)
    size = jnp.where(jnp.isfinite(size), size, 0.0)
    largest = size.max(initial=0.0)
    return jnp.where(largest > 0, size / jnp.where(largest > 0, largest, 1.0), 1.0)


def _norm(x: Any, weight: Any) -> Any:
    return jnp.sqrt(jnp.sum(weight * jnp.abs(x) ** 2))


def _starts(values: Sequence[Any], arguments: Sequence[Any]) -> list[int | None]:
    """Returns for each result the argument of which it is a small change."""
    samples = jax.device_get([_sample(x) for x in arguments])
    found: list[int | None] = []
    for value in values:
        own = jax.device_get(_sample(value))
        best, least = None, _STEP
        for number, (argument, other) in enumerate(
            zip(arguments, samples, strict=True)
        ):
            if own is None or other is None or argument.shape != value.shape:
                continue
            if argument.dtype == value.dtype and value.shape:
                away = _change(own, other)
                if away < least:
                    best, least = number, away
        found.append(best)
    return found


def _change(x: Any, start: Any) -> float:
    """Returns how far an array is from another one, by its size; NaN if infinite."""
    x, start = np.float64(x), np.float64(start)
    with np.errstate(invalid="ignore"):
        size = float(np.linalg.norm(x))
        return float(np.linalg.norm(x - start)) / size if size else np.inf


def _sample(x: Any) -> Any:
    """Returns up to 64 elements of a float array in float32; None of anything else."""
    dtype = getattr(x, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, np.floating)
    if not is_float or _compat.is_reference(jax.typeof(x)):
        return None
    x = _compat.unsharded(x).reshape(-1)
    return x[:: max(1, x.size // _SAMPLED) | 1][:_SAMPLED].astype(np.float32)


def _shake(x: Any, seed: int) -> Any:
    """Changes each number of a float32 array by up to two spacings of float32.

    Integers stay: as labels or masks they are exact, and no rounding changes them.
    """
    if getattr(x, "dtype", None) != np.float32 or not x.shape:
        return x
    if _compat.is_reference(jax.typeof(x)):
        return x
    noise = np.random.default_rng(seed).uniform(-_SHAKE, _SHAKE, x.shape[-1:])
    shaken = x * jnp.broadcast_to(1 + noise.astype(np.float32), x.shape)
    return jnp.where((jnp.abs(x) <= _EXACT) & (x == jnp.round(x)), x, shaken)
