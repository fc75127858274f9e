"""The derivative of a softplus, from its argument alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import FLOAT32
from jmp_rewrite._passes.program import CASTS
from jmp_rewrite._passes.recompute_activations import uncast

# What `logaddexp` is made of.
_PARTS = frozenset({"abs", "exp", "log1p", "max"})


def softplus_derivative(editor: Editor) -> None:
    """The derivative of `logaddexp(x, number)` is a sigmoid.

    JAX writes it as `exp(x - logaddexp(x, number))`. That difference has to be one of
    unrounded values, so that a softplus was stored in float32 for it, beside its half
    copy for the next layer. Its argument is stored in half anyway.

    On all devices, in whole train steps.

    Gain: a network of convolutions with softplus 0.65 -> 0.44 GB written on an H200.
    """
    for body, index, eqn in editor.find("exp"):
        difference = body.made_by(eqn.invars[0], "sub")
        if difference is None:
            continue
        argument, result = (_source(body, v) for v in difference.invars)
        number = _softplus_of(body, argument, result)
        if number is not None:
            editor.replace(body, index, _sigmoid, argument, number=number)


def _source(body: Body, atom: Any) -> Any:
    """Returns what a value is but for infinities, before it was cast."""
    while (eqn := body.made_by(atom, "select_n", *CASTS)) is not None:
        is_select = eqn.primitive.name == "select_n"
        if is_select and not _is_where_infinite(body, eqn):
            break
        atom = eqn.invars[is_select]
    return atom


def _is_where_infinite(body: Body, select: Any) -> bool:
    """Whether a selection takes another number where a value is infinite."""
    asked, value, *_ = select.invars
    test = body.made_by(asked, "eq")
    if test is None or not hasattr(test.invars[1], "val"):
        return False
    is_own = uncast(body, test.invars[0])[0] is uncast(body, value)[0]
    return is_own and bool(np.all(np.isinf(test.invars[1].val)))


def _softplus_of(body: Body, argument: Any, result: Any) -> float | None:
    """Returns the number in `logaddexp(argument, number)`, if that is the result."""
    call = body.made_by(result, "custom_jvp_call")
    if call is None or len(call.invars) != 2 or len(call.outvars) != 1:
        return None
    read, number = call.invars
    is_literal = hasattr(number, "val") and np.ndim(number.val) == 0
    if not is_literal or _source(body, read) is not argument:
        return None
    (inside,) = body.held[body.maker[result]]
    is_softplus = inside.names.keys() >= _PARTS and inside.names["exp"] == 1
    is_same = argument.aval.shape == result.aval.shape
    return float(number.val) if is_softplus and is_same else None


def _sigmoid(x: Any, *, number: float) -> Any:
    x = _compat.convert(x, FLOAT32)
    return [lax.logistic(x - np.float32(number) if number else x)]
