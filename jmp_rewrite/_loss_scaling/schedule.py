"""How the loss scale moves from step to step, and which schedules are refused."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_rewrite._loss_scaling.state import LossScaleState

# The normal numbers of float32: outside, a scale would be flushed to zero or be inf.
_SMALLEST, _LARGEST = (
    float(f(np.float32))
    for f in (lambda t: np.finfo(t).tiny, lambda t: np.finfo(t).max)
)


class Schedule(NamedTuple):
    """How the scale moves; `fixed` is None for a dynamic scale."""

    fixed: Any
    init_scale: Any
    growth_interval: Any
    growth_factor: Any
    backoff_factor: Any
    min_scale: Any
    max_scale: Any


def next_state(
    schedule: Schedule, state: LossScaleState, finite: jax.Array
) -> LossScaleState:
    increment = optax.safe_increment
    skipped = state.skipped_steps
    steps = jnp.where(finite, increment(state.finite_steps), 0)
    scale, steps = _next_scale(schedule, state.loss_scale, steps, finite)
    return state._replace(
        loss_scale=scale,
        finite_steps=steps,
        skipped_steps=jnp.where(finite, skipped, increment(skipped)),
        consecutive_skips=jnp.where(finite, 0, increment(state.consecutive_skips)),
        last_step_finite=finite,
    )


def _next_scale(
    schedule: Schedule, scale: jax.Array, steps: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scale for the next step, and the finite steps that it has seen."""
    fixed, _, interval, *factors = schedule
    if fixed is not None:
        return jnp.asarray(fixed, jnp.float32), steps
    growth, backoff, low, high = (jnp.asarray(x, jnp.float32) for x in factors)
    grows = steps >= jnp.asarray(interval).astype(jnp.int32)
    factor = jnp.where(grows, growth, jnp.where(finite, jnp.float32(1), backoff))
    return jnp.clip(scale * factor, low, high), jnp.where(grows, 0, steps)


def check_loss_scale(loss_scale: Any) -> None:
    if is_value(loss_scale):
        return _check_shape("loss_scale", loss_scale)
    if loss_scale is None or loss_scale == "dynamic":
        return
    if not _is_number(loss_scale):
        raise ValueError(
            'expected loss_scale as "dynamic", a number above 0 or None, got '
            f"{loss_scale!r}"
        )
    _check_number("loss_scale", loss_scale, _SMALLEST, _LARGEST)


def check_schedule(schedule: Schedule) -> None:
    _check_number("min_scale", schedule.min_scale, _SMALLEST, _LARGEST)
    _check_number("max_scale", schedule.max_scale, _SMALLEST, _LARGEST)
    _check_number("growth_factor", schedule.growth_factor, 1, _LARGEST, open_low=True)
    _check_number("backoff_factor", schedule.backoff_factor, 0, 1, open_both=True)
    interval = schedule.growth_interval
    _check_number("growth_interval", interval, 1, 2**31 - 1, integer=True)
    low, high = schedule.min_scale, schedule.max_scale
    if _is_number(low) and _is_number(high):
        if low > high:
            raise ValueError(
                f"expected min_scale <= max_scale, got min_scale={low} and "
                f"max_scale={high}"
            )
        _check_number("init_scale", schedule.init_scale, low, high)
    else:
        _check_number("init_scale", schedule.init_scale, _SMALLEST, _LARGEST)


def check_arrays(loss_scale: Any, schedule: Schedule) -> None:
    """Checks what the arrays hold, where that is known."""
    try:
        check_loss_scale(_known(loss_scale))
        check_schedule(Schedule(*map(_known, schedule)))
    except ValueError as error:
        raise ValueError(
            f"{error}; optax.inject_hyperparams makes arrays in the dtype of the "
            "parameters, unless it is given hyperparam_dtype=jnp.float32"
        ) from None


def _known(x: Any) -> Any:
    if not is_value(x) or isinstance(x, jax.core.Tracer) or np.ndim(x):
        return x
    number = float(x)
    return int(number) if number.is_integer() else number


def _check_number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    integer: bool = False,
    open_low: bool = False,
    open_both: bool = False,
) -> None:
    if is_value(value):
        return _check_shape(name, value)
    inside = _is_number(value) and low <= value <= high
    if inside and (open_low or open_both) and value == low:
        inside = False
    if inside and open_both and value == high:
        inside = False
    if not inside or (integer and not isinstance(value, int)):
        kind = "an integer" if integer else "a number"
        ends = f"{'(' if open_low or open_both else '['}{low}, {high}"
        raise ValueError(
            f"expected {name} to be {kind} in {ends}{')' if open_both else ']'}, "
            f"got {value!r}"
        )


def _check_shape(name: str, value: Any) -> None:
    if np.ndim(value):
        shape = list(np.shape(value))
        raise ValueError(f"expected {name} to be a number, got an array of {shape}")


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def is_value(x: Any) -> bool:
    """Whether `x` is an array or a tracer, whose value need not be known."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and not isinstance(
        x, float
    )
