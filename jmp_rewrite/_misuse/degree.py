"""How values grow with the loss scale: their degree of homogeneity in it.

The gradients of a scaled loss are of degree 1 (twice the scale, twice the gradient),
and divided by the scale they are of degree 0. A norm is of the degree of its operand, a
variance of twice that. What compares a value of degree 1 with a fixed number, as
clipping does, or adds one to it, as weight decay does, has no degree: what it makes is
right for one scale only. What the backward pass reads, as parameters, is of degree 0;
what only the update reads, as moments, is of the degree of what is added to it. Zeros
are of every degree, also those that a backward rule returns.

It is dimensional analysis, in one scale; that of another state is of degree 0 in it. A
backward pass is linear in what is scaled, and is taken for it, but where a rule of its
own (`jax.custom_vjp`) compares a cotangent, or where it reads what a gradient moved.
Where it does not know, it says so, and nobody is warned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._misuse.lineage import (
    BOUNDS,
    OWN,
    RELATED,
    Scales,
    in_order,
    is_backward,
    is_inexact,
)
from jmp_rewrite._rules import CALLS, ORDERS

# A number, or one of the words below.
Degree: TypeAlias = Fraction | str
ANY = "any"  # of zero and infinity, which no factor changes
SPOILT = "spoilt"  # of a number that is Inf or NaN: the same, and nothing is hidden
GUARD = "guard"  # of a number too small to be a threshold
UNKNOWN = "unknown"
STATE = "state"  # of what only the update reads: that of what is added to it
MIXED = "mixed"  # values of two degrees compared or added
IN_RULE = "mixed in a rule"  # the same in a backward pass
MOVED = "mixed before"  # the same before a backward pass, which reads it
ASKS = "asks"  # of what asks whether a scaled value is finite
FINITE = "finite"  # of a scaled value, with another number where it is not finite

# Numbers up to this guard a division by zero; nobody clips gradients there. The largest
# default of optax is the 1e-3 of `adaptive_grad_clip`, against a parameter's norm.
_SMALL = 1e-4
# And these are what `nan_to_num` has in place of infinity.
_LARGEST = float(np.finfo(np.float32).max)
_SCAN_ROUNDS = 3

# The result has the degree of the operands.
_KEEP = frozenset(
    "abs add add_any all_gather all_to_all broadcast_in_dim complex concatenate "
    "convert_element_type copy copy_p cumsum dynamic_slice expand_dims imag neg pad "
    "pmax pmin ppermute psum psum2 psum_invariant pvary real reduce_max reduce_min "
    "reduce_precision reduce_scatter reduce_sum reshape rev sharding_constraint slice "
    "squeeze sub transpose optimization_barrier".split()
)
# Whatever the degree of the operand, that of the result is 0.
_DROP = frozenset({"eq", "is_finite", "ne", "sign"})
# Linear in both operands.
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})


def degrees(
    tracers: Sequence[Any],
    scale: Any,
    scaled: Mapping[int, Scales],
    parameters: Iterable[Any],
    is_linear: bool = True,
) -> list[Degree]:
    """Returns the degree of each value of the jaxpr that is being traced.

    Args:
      tracers: tracers of `jit`.
      scale: that of the loss scale.
      scaled: equation, by its `id` -> the scales of the cotangents that it makes.
      parameters: tracers of arguments that the backward pass reads.
      is_linear: whether the backward pass is linear in what is scaled; if nobody knows,
        it is looked at.
    """
    fixed = {id(p) for p in parameters}
    known: dict[int, Sequence[Degree]] = {}

    def of(tracer: Any) -> Degree:
        if tracer is scale:
            return Fraction(1)
        if (value := _compat.number(tracer)) is not None:
            return _of_number(value)
        eqn = _compat.maker(tracer)
        if eqn is None:
            is_moment = is_inexact(tracer) and id(tracer) not in fixed
            return STATE if is_moment else Fraction(0)
        found = known[id(eqn)]
        return found[_compat.result_index(eqn, tracer)]

    def stops(eqn: Any) -> bool:
        return is_linear and is_backward(eqn) and bool(scaled[id(eqn)])

    for eqn in in_order(tracers, stops):
        scales = scaled[id(eqn)]
        gradient = UNKNOWN if RELATED in scales else Fraction(OWN in scales)
        if stops(eqn):
            known[id(eqn)] = [gradient] * len(eqn.outvars)
        else:
            operands = [of(x) for x in _compat.reads(eqn)]
            known[id(eqn)] = _results(eqn, operands, gradient)
    return [of(tracer) for tracer in tracers]


def _of_cotangent(found: Degree, operands: list[Degree], gradient: Degree) -> Degree:
    """Returns the degree of what a backward pass makes, of what its operands say."""
    if MIXED in operands:
        return MOVED
    if found == MIXED and gradient:
        return IN_RULE
    if found in (ANY, IN_RULE, MOVED) or isinstance(found, Fraction):
        return found
    factors = set(operands) - {Fraction(0), *_NEUTRAL}
    if found == UNKNOWN and gradient and factors:  # linear in one of them
        return factors.pop() if len(factors) == 1 else UNKNOWN
    return gradient


def _of_number(value: Any) -> Degree:
    size = np.abs(np.asarray(value)).astype(np.float64)
    if size.size and not np.isfinite(size).any():
        return SPOILT
    if np.all((size == 0) | (size >= _LARGEST)):
        return ANY
    return GUARD if np.all(size <= _SMALL) else Fraction(0)


def _results(eqn: Any, operands: list[Degree], gradient: Degree) -> list[Degree]:
    found = _computed_results(eqn, operands, gradient)
    if is_backward(eqn):
        return [_of_cotangent(d, operands, gradient) for d in found]
    return found


def _computed_results(
    eqn: Any, operands: list[Degree], gradient: Degree
) -> list[Degree]:
    name = eqn.primitive.name
    if name in CALLS:
        inner = eqn.params[CALLS[name][1]]
        return _of_jaxpr(inner, operands, gradient)
    if name == "scan":
        return _of_scan(eqn, operands, gradient)
    if name == "optimization_barrier":
        return operands
    return [_result(eqn, operands)] * len(eqn.outvars)


def _result(eqn: Any, operands: list[Degree]) -> Degree:
    name = eqn.primitive.name
    if found := _MIXED & set(operands):
        if found != {FINITE} or not any(map(_is_scaled, operands)):
            return next(d for d in (MOVED, IN_RULE, MIXED, FINITE) if d in found)
        # What stands beside it is as little finite as it was.
        operands = [Fraction(1) if d == FINITE else d for d in operands]
    if name == "select_n":
        which, *cases = operands
        degree = UNKNOWN if which == UNKNOWN else _same(cases)
        hides = which == ASKS and _is_scaled(degree) and SPOILT not in cases
        return FINITE if hides else degree
    if ASKS in operands:
        if eqn.outvars[0].aval.dtype == np.bool_:
            return ASKS
        operands = [Fraction(0) if d == ASKS else d for d in operands]
    if name in _KEEP:
        return _same(operands)
    if name in _DROP:
        return ASKS if _asks_finite(eqn, operands) else Fraction(0)
    if name in ORDERS | BOUNDS:
        return _ordered(eqn, operands)
    if name in _ARITHMETIC:
        return _computed(eqn, operands)
    if not all(d in (0, *_NEUTRAL) for d in operands):
        return UNKNOWN
    return STATE if STATE in operands else Fraction(0)


def _is_scaled(degree: Degree) -> bool:
    return isinstance(degree, Fraction) and degree != 0


_NEUTRAL = (ANY, SPOILT, GUARD, STATE)
_MIXED = frozenset({MIXED, IN_RULE, MOVED, FINITE})


def _asks_finite(eqn: Any, operands: list[Degree]) -> bool:
    """Whether an equation asks if a scaled value is finite, Inf or NaN."""
    if not any(map(_is_scaled, operands)):
        return False
    if eqn.primitive.name == "is_finite":
        return True
    reads = _compat.reads(eqn)
    is_itself = reads[0] is reads[-1]  # NaN is not
    values = map(_compat.number, reads)
    is_infinity = any(v is not None and np.isinf(v).all() for v in values)
    return eqn.primitive.name in ("eq", "ne") and (is_itself or is_infinity)


def _computed(eqn: Any, operands: list[Degree]) -> Degree:
    name = eqn.primitive.name
    if UNKNOWN in operands:
        return UNKNOWN
    if ANY in operands or SPOILT in operands:  # zero, but where zero divides
        divides = name == "rsqrt" or (name == "div" and operands[1] == ANY)
        return UNKNOWN if divides else ANY
    numbers = [Fraction(0) if d == GUARD else d for d in operands]
    if STATE in numbers:
        return STATE if set(numbers) <= {STATE, 0} else UNKNOWN
    return _ARITHMETIC[name](eqn.params, *numbers)


def _same(operands: Sequence[Degree]) -> Degree:
    """The degree of a sum: that of all its terms."""
    distinct = set(operands) - {*_NEUTRAL}
    if not distinct:
        return next((d for d in (STATE, GUARD, SPOILT) if d in operands), ANY)
    if len(distinct) == 1:
        return distinct.pop()
    return UNKNOWN if UNKNOWN in distinct else MIXED


def _ordered(eqn: Any, operands: list[Degree]) -> Degree:
    """The degree of a comparison, or of the larger or smaller of two values."""
    found = _same(operands)
    is_degree = found not in (UNKNOWN, MIXED)
    return Fraction(0) if is_degree and eqn.primitive.name in ORDERS else found


_ARITHMETIC: Mapping[str, Callable[..., Fraction]] = {
    **dict.fromkeys(_PRODUCTS, lambda params, x, y: x + y),
    "div": lambda params, x, y: x - y,
    "square": lambda params, x: 2 * x,
    "integer_pow": lambda params, x: params["y"] * x,
    "sqrt": lambda params, x: x / 2,
    "rsqrt": lambda params, x: -x / 2,
}


def _of_jaxpr(held: Any, operands: list[Degree], gradient: Degree) -> list[Degree]:
    """Returns the degrees of the results of a jaxpr."""
    jaxpr = _compat.open_jaxpr(held)
    known: dict[Any, Degree] = dict(zip(jaxpr.invars, operands, strict=True))

    def of(atom: Any) -> Degree:
        if (value := _compat.number(atom)) is not None:
            return _of_number(value)
        return known.get(atom, UNKNOWN)

    for eqn in jaxpr.eqns:
        found = _results(eqn, [of(x) for x in eqn.invars], gradient)
        known.update(zip(eqn.outvars, found, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _of_scan(eqn: Any, operands: list[Degree], gradient: Degree) -> list[Degree]:
    """Returns the degrees of a scan's results: its carries must keep theirs."""
    consts, carries = _compat.scan_split(eqn.params)
    body = eqn.params["jaxpr"]
    given = list(operands)
    for _ in range(_SCAN_ROUNDS):
        found = _of_jaxpr(body, given, gradient)
        carried = [
            found[i] if found[i] in _MIXED else _same([given[consts + i], found[i]])
            for i in range(carries)
        ]
        if carried == given[consts : consts + carries]:
            return carried + found[carries:]
        given[consts : consts + carries] = carried
    return [UNKNOWN] * len(eqn.outvars)
