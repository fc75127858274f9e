"""Train steps that scale what they do not unscale, or the reverse, are heard.

Each of these mistakes is one line, and stops training without an error: an optimizer
that is fed gradients divided by 32768 takes no step that anyone would notice. Torch
raises in two of them (`torch.amp.GradScaler`); here the step is looked at while it is
traced, whatever the policy, and nothing of it is left in the program.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax

from jmp_rewrite import _compat
from jmp_rewrite._loss_scaling.degree import MIXED, degrees
from jmp_rewrite._loss_scaling.leaves import is_inexact
from jmp_rewrite._loss_scaling.lineage import Lineage, lineage, scaling
from jmp_rewrite._source import user_level

NOT_SCALED = (
    "this update divides the gradients by the loss scale, but no loss is multiplied by "
    "it, so they all but vanish: return jmp_rewrite.scale_loss(loss, opt_state) from "
    "the loss function that is differentiated"
)
DIVIDED_TWICE = (
    "these gradients are divided by the loss scale already, by unscale or by a norm of "
    "their own, and this update divides them again, so they all but vanish: write "
    "tx.update(grads, opt_state, params, grads_unscaled=True), or, if an optimizer is "
    "chained before loss_scaling, put it inside, as in loss_scaling(optax.adam(1e-3))"
)
NOT_UNSCALED = (
    "this update is told that its gradients are unscaled, but they are still "
    "multiplied by the loss scale: pass them through "
    "jmp_rewrite.unscale(grads, opt_state), or leave out grads_unscaled=True"
)
CLIPPED = (
    "these gradients were compared with a fixed number, as clipping does, or added to "
    "what is not scaled, as weight decay is, while they were multiplied by the loss "
    "scale: put loss_scaling outside, as in "
    "loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))"
)
PARTLY_SCALED = (
    "a term of this loss, or the loss of some of these parameters, is not multiplied "
    "by the loss scale, and this update divides its gradients by it, so they all but "
    "vanish: pass the whole loss to scale_loss, as in "
    "scale_loss(loss + penalty, opt_state)"
)
SCALED_TWICE = (
    "this loss went through scale_loss twice, and its gradients are divided by the "
    "loss scale once: call scale_loss once, on the loss that is differentiated"
)


def warn_of_misuse(grads: Any, scale: Any, fixed: Any, grads_unscaled: bool) -> None:
    """Warns if an update that is being traced is given gradients of the wrong scale.

    Args:
        grads: a pytree of gradients, as the update is given them.
        scale: the loss scale of its state, `f32[]`.
        fixed: the loss scale if it is fixed; None for a dynamic one.
        grads_unscaled: whether the update is told not to divide by the scale.
    """
    leaves = [_compat.staged(g) for g in jax.tree.leaves(grads) if is_inexact(g)]
    staged_scale = _compat.staged(scale)
    if staged_scale is None or not leaves:
        return
    if not all(_compat.is_in_one_jaxpr(g, staged_scale) for g in leaves):
        return
    if message := _judge(leaves, staged_scale, fixed, grads_unscaled):
        warnings.warn(message, stacklevel=user_level())


def _judge(
    leaves: list[Any], scale: Any, fixed: Any, grads_unscaled: bool
) -> str | None:
    made = lineage(leaves, scale)
    if not made.backward or made.scale_is_read_before or _is_by_hand(made, fixed):
        return None
    if not (made.scaled or made.scale_is_read or grads_unscaled):
        return NOT_SCALED
    cotangents = scaling(leaves)
    if cotangents.twice:
        return SCALED_TWICE
    if cotangents.partly:
        return PARTLY_SCALED
    found = degrees(leaves, scale, cotangents.by, made.parameters)
    if MIXED in found:
        return CLIPPED
    wanted = 0 if grads_unscaled else 1
    lost = [g for g, d in zip(leaves, found, strict=True) if d == wanted - 1]
    if lost and all(lineage([g], scale).scaled for g in lost):
        return DIVIDED_TWICE
    if lost:
        return PARTLY_SCALED if made.scaled else NOT_SCALED
    if wanted + 1 in found and grads_unscaled:
        return NOT_UNSCALED
    return None


def _is_by_hand(made: Lineage, fixed: Any) -> bool:
    """Whether the loss is multiplied by a fixed scale that the user wrote down."""
    is_number = isinstance(fixed, int | float)
    return is_number and not made.scaled and (fixed == 1 or fixed in made.factors)
