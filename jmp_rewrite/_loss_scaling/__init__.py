"""Loss scaling as an optax transformation."""

from jmp_rewrite._loss_scaling.leaves import all_finite
from jmp_rewrite._loss_scaling.state import (
    LossScaleState,
    find_states,
    loss_scale_state,
)
from jmp_rewrite._loss_scaling.step import scale_loss, unscale, where_applied
from jmp_rewrite._loss_scaling.transformation import loss_scaling

__all__ = [
    "LossScaleState",
    "all_finite",
    "find_states",
    "loss_scale_state",
    "loss_scaling",
    "scale_loss",
    "unscale",
    "where_applied",
]
