"""Train steps that scale what they do not unscale, or the reverse, are heard.

Each of these mistakes is one line, and stops training without an error: an optimizer
that is fed gradients divided by 32768 takes no step that anyone would notice. Torch
raises in two of them (`torch.amp.GradScaler`); here the step is looked at while it is
traced, whatever the policy, and nothing of it is left in the program.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from jmp_rewrite import _compat
from jmp_rewrite._misuse.degree import (
    FINITE,
    IN_RULE,
    MIXED,
    MOVED,
    Degree,
    degrees,
)
from jmp_rewrite._misuse.inlined import Equation, Value, programs
from jmp_rewrite._misuse.lineage import (
    OTHER,
    OWN,
    Lineage,
    Scales,
    in_order,
    is_inexact,
    lineage,
    scaling,
)
from jmp_rewrite._rules import held_jaxprs
from jmp_rewrite._source import (
    UNSCALED,
    UPDATED,
    Lines,
    is_scaling,
    scope_with,
    user_level,
)

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
CLIPPED_IN_RULE = (
    "a backward rule (jax.custom_vjp) compares a cotangent with a fixed number, as "
    "clipping does, or adds a fixed one, while it is multiplied by the loss scale: "
    "multiply the number by jmp_rewrite.loss_scale_state(opt_state).loss_scale, or "
    "clip the gradients in the optimizer, inside loss_scaling"
)
MADE_FINITE = (
    "an Inf or NaN in these gradients is replaced by a number before this update looks "
    "for it, so the loss scale never steps back, and training stands still where the "
    "loss overflows: put it inside, as in "
    "loss_scaling(optax.chain(optax.zero_nans(), optax.adam(1e-3)))"
)
MOVES = (
    "a gradient that is still multiplied by the loss scale moves parameters inside of "
    "this step, as an inner step of SAM or MAML does, or is compared with a fixed "
    "number, as in a gradient penalty: pass it through "
    "jmp_rewrite.unscale(grads, opt_state) first, or differentiate the loss itself "
    "there, without scale_loss"
)
OTHER_STATE = (
    "this loss is multiplied by the loss scale of another state than that of this "
    "update, which divides by its own: pass the same opt_state to scale_loss and to "
    "the update; where one loss feeds two optimizers, pass the gradients through "
    "jmp_rewrite.unscale with the state of scale_loss, and grads_unscaled=True to the "
    "other update"
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


def warn_of_misuse(
    grads: Sequence[Any], scale: Any, fixed: Any, grads_unscaled: bool
) -> bool:
    """Warns if an update that is being traced is given gradients of the wrong scale.

    Args:
        grads: floating-point gradients, as the update is given them.
        scale: the loss scale of its state, `f32[]`.
        fixed: the loss scale if it is fixed; None for a dynamic one.
        grads_unscaled: whether the update is told not to divide by the scale.

    Returns:
        Whether the jaxpr that is being traced shows who made the gradients. If not, a
        program that calls it may: see `warn_in_program`.
    """
    leaves = [_compat.staged(g) for g in grads]
    staged_scale = _compat.staged(scale)
    if staged_scale is None or not leaves:
        return False
    if not all(_compat.is_in_one_jaxpr(g, staged_scale) for g in leaves):
        return False
    made = lineage(leaves, staged_scale)
    if message := _judge(made, leaves, staged_scale, fixed, grads_unscaled):
        warnings.warn(message, stacklevel=user_level())
    return made.backward


def update_scope(fixed: Any) -> str:
    """Returns the scope of an update that `warn_in_program` is to look at."""
    return f"{UPDATED}{float(fixed)!r}" if isinstance(fixed, int | float) else UPDATED


def warn_in_program(closed: Any, judged: str) -> None:
    """Warns of updates in jitted functions, whose gradients a program makes outside.

    Args:
        closed: the program, a closed jaxpr.
        judged: the scope of what was looked at before.
    """
    if not _has_update(closed, set()):
        return
    for equations in programs(closed):
        for end in _ends(equations):
            if scope_with(judged, end) is not None:
                continue
            grads, scale = _operands(end)
            if message := _judge_update(end, grads, scale):
                _warn_at(end, message)


def _has_update(jaxpr: Any, seen: set[int]) -> bool:
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    return any(
        (e.primitive.name == "is_finite" and scope_with(UPDATED, e) is not None)
        or any(_has_update(held, seen) for held in held_jaxprs(e))
        for e in _compat.open_jaxpr(jaxpr).eqns
    )


def _ends(equations: Sequence[Equation]) -> list[Equation]:
    """Returns for each update the last equation that looks at its gradients."""
    marked = [e for e in equations if scope_with(UPDATED, e) is not None]
    read = {id(x) for e in marked for x in e.in_tracers}
    return [
        e for e in marked if e.primitive.name == "and" and id(e.outvars[0]) not in read
    ]


def _operands(end: Equation) -> tuple[list[Value], Value | None]:
    """Returns an update's gradients, and what it divides them by."""
    grads, scale, todo = [], None, list(end.in_tracers)
    while todo:
        value = todo.pop()
        eqn = value.parent
        if eqn is None or scope_with(UPDATED, eqn) is None:
            grads += [value] if is_inexact(value) else []
        elif eqn.primitive.name == "div":
            gradient, divisor = eqn.in_tracers
            grads.append(gradient)
            scale = _origin(divisor)
        else:
            todo += eqn.in_tracers
    return grads, scale


def _judge_update(
    end: Equation, grads: list[Value], divisor: Value | None
) -> str | None:
    scale = divisor or _scale_of(grads)
    if scale is None:
        return None
    made = lineage(grads, scale)
    return _judge(made, grads, scale, _fixed(end), divisor is None)


def _fixed(end: Equation) -> float | None:
    """Reads the fixed scale of an update, if it is a number, from its scope."""
    spelled = str(scope_with(UPDATED, end)).rpartition(":")[2]
    return float(spelled) if spelled else None


def _scale_of(grads: list[Value]) -> Value | None:
    """Returns the loss scale that has made some gradients, if it is one."""
    factors = (
        _origin(eqn.in_tracers[1])
        for eqn in in_order(grads)
        if (eqn.primitive.name == "mul" and is_scaling(eqn))
        or (eqn.primitive.name == "div" and scope_with(UNSCALED, eqn) is not None)
    )
    scales = {id(scale): scale for scale in factors}
    return next(iter(scales.values())) if len(scales) == 1 else None


def _origin(scale: Value) -> Value:
    """Returns the loss scale before it was cast or broadcast to multiply by it."""
    while (eqn := scale.parent) is not None and _is_marked(eqn):
        scale = eqn.in_tracers[0]
    return scale


def _is_marked(eqn: Equation) -> bool:
    return is_scaling(eqn) or scope_with(UNSCALED, eqn) is not None


def _warn_at(end: Equation, message: str) -> None:
    line = Lines().of(end.eqn, end.caller)
    if line.file:
        warnings.warn_explicit(message, UserWarning, line.file, line.number)
    else:
        warnings.warn(message, stacklevel=user_level())


def _judge(
    made: Lineage, leaves: list[Any], scale: Any, fixed: Any, grads_unscaled: bool
) -> str | None:
    if not made.backward or _is_by_hand(made, fixed):
        return None
    if not made.scaled and made.scale_is_read_before:
        return None
    if not (made.scaled or made.scale_is_read or grads_unscaled):
        return NOT_SCALED
    cotangents = scaling(leaves, scale, fixed is None)

    def found(is_linear: bool) -> list[Degree]:
        return degrees(leaves, scale, cotangents.by, made.parameters, is_linear)

    whose = frozenset().union(*map(cotangents.of, leaves))
    if grads_unscaled and OTHER in whose and OWN not in whose:
        other = _scale_of(leaves)
        if other is not None:
            made = lineage(leaves, other)
            return _judge(made, leaves, other, fixed, grads_unscaled)
    if cotangents.moves and MOVED in found(is_linear=False):
        return MOVES
    if made.scale_is_read_before:
        return None
    if cotangents.twice:
        return SCALED_TWICE
    if cotangents.partly:
        return PARTLY_SCALED
    if any({OWN, OTHER} <= scales for scales in cotangents.by.values()):
        return OTHER_STATE
    known = found(not cotangents.compared)
    for degree, message in _MIXED:
        if degree in known and (degree != FINITE or fixed is None):
            return message
    wanted = 0 if grads_unscaled else 1
    lost = [g for g, d in zip(leaves, known, strict=True) if d == wanted - 1]
    if lost:
        return _of_lost(*([cotangents.of(g) for g in x] for x in (lost, leaves)))
    if wanted + 1 in known and grads_unscaled:
        return NOT_UNSCALED
    return None


_MIXED = (
    (MOVED, MOVES),
    (IN_RULE, CLIPPED_IN_RULE),
    (MIXED, CLIPPED),
    (FINITE, MADE_FINITE),
)


def _of_lost(lost: list[Scales], known: list[Scales]) -> str:
    """Says what went wrong with gradients that all but vanish.

    Args:
        lost: the scales that each of them was multiplied by.
        known: those of all gradients.
    """
    if any(OTHER in scales for scales in lost):
        return OTHER_STATE
    if all(lost):
        return DIVIDED_TWICE
    return PARTLY_SCALED if any(known) else NOT_SCALED


def _is_by_hand(made: Lineage, fixed: Any) -> bool:
    """Whether the loss is multiplied by a fixed scale that the user wrote down."""
    is_number = isinstance(fixed, int | float)
    return is_number and not made.scaled and (fixed == 1 or fixed in made.factors)
