"""What all models of the benchmarks share: a workload and its train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Workload(NamedTuple):
    """A model with its loss, made for one compute dtype.

    Attributes:
      init: `key -> (params, state)`; `state` is what is no parameter, such as batch
        statistics.
      loss: `(params, state, batch) -> (loss, state)`.
      batch: `key -> batch`.
      optimizer: of optax.
    """

    init: Callable[[Any], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[Any, Any]]
    batch: Callable[[Any], Any]
    optimizer: optax.GradientTransformation

    def step(
        self, params: Any, opt_state: Any, state: Any, batch: Any
    ) -> tuple[Any, ...]:
        """One whole train step."""
        (loss, state), grads = jax.value_and_grad(self.loss, has_aux=True)(
            params, state, batch
        )
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, loss

    def gradients(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        """Loss and gradients, to be judged against float64."""
        (loss, _), grads = jax.value_and_grad(self.loss, has_aux=True)(
            params, state, batch
        )
        return loss, grads

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the step's arguments."""

        def make(key: Any) -> tuple[Any, ...]:
            params, state = self.init(key)
            return params, self.optimizer.init(params), state, self.batch(key)

        return jax.eval_shape(make, jax.random.key(0))


def at_least_float32(x: Any) -> Any:
    """What a loss is computed in: float32, or float64 for the reference."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Cross entropy of each row, in float32 at least."""
    return optax.softmax_cross_entropy_with_integer_labels(
        at_least_float32(logits), labels
    )
