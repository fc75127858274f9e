"""The equations that made a gradient.

A tracer of `jax.jit` knows the equation that made it, and that one its operands. So an
update can see, before anything runs, whether its gradients are those of a scaled loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._rules import CALLS, ORDERS, held_jaxprs
from jmp_rewrite._source import is_scaling

BOUNDS = frozenset({"clamp", "max", "min"})

# Whose loss scale a cotangent is multiplied by: the one that the update divides by, or
# one that cannot be told from it; another state's; one that it is computed from, or
# that is computed from it, as that of the step before is.
OWN = "own"
OTHER = "other"
RELATED = "related"
Scales: TypeAlias = frozenset[str]

# The result is the first operand, in another type or shape.
_MOVES = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p expand_dims pvary reshape "
    "sharding_constraint squeeze stop_gradient".split()
)


class Lineage(NamedTuple):
    """What made some gradients.

    Attributes:
      backward: whether a backward pass did.
      scaled: whether it is that of a loss that went through `scale_loss`.
      scale_is_read: whether anything else reads the loss scale.
      scale_is_read_before: whether anything else before the end of the backward pass
        does.
      factors: the numbers that anything is multiplied by.
      parameters: the arguments that the backward pass reads, and what leads to it.
    """

    backward: bool
    scaled: bool
    scale_is_read: bool
    scale_is_read_before: bool
    factors: frozenset[float]
    parameters: Sequence[Any]


def lineage(gradients: Sequence[Any], scale: Any) -> Lineage:
    """Follows gradients back to the parameters of their jaxpr.

    Args:
      gradients: tracers of `jit`, or values of a finished program.
      scale: that of the loss scale.
    """
    backward = scaled = False
    readers: set[bool] = set()
    factors: set[float] = set()
    parameters: list[Any] = []
    seen: set[tuple[int, bool]] = set()
    todo = [(g, False) for g in gradients]
    while todo:
        tracer, is_before = todo.pop()
        eqn = _compat.maker(tracer)
        if eqn is None and is_before:
            parameters.append(tracer)
        if eqn is None or (id(eqn), is_before) in seen:
            continue
        seen.add((id(eqn), is_before))
        inside = list(_with_inner(eqn))
        if any(map(is_backward, inside)):
            backward = is_before = True
        if any(map(is_scaling, inside)):
            scaled = True
        elif _reads(eqn, scale):
            readers.add(is_before)
        factors.update(f for e in inside for f in _factors(e))
        todo += [(x, is_before) for x in _compat.reads(eqn)]
    read, before = bool(readers), True in readers
    return Lineage(backward, scaled, read, before, frozenset(factors), parameters)


def in_order(
    tracers: Sequence[Any], stops: Callable[[Any], bool] = lambda eqn: False
) -> Iterable[Any]:
    """Returns the equations that made these, each behind those that it reads.

    Args:
      tracers: tracers of `jit`.
      stops: whether nothing is followed back through an equation.
    """
    done: dict[int, Any] = {}
    todo = [_compat.maker(t) for t in tracers]
    while todo:
        eqn = todo[-1]
        if eqn is None or id(eqn) in done:
            todo.pop()
            continue
        reads = () if stops(eqn) else _compat.reads(eqn)
        missing = [m for m in map(_compat.maker, reads) if m and id(m) not in done]
        if missing:
            todo += missing
        else:
            done[id(eqn)] = todo.pop()
    return done.values()


class Scaling(NamedTuple):
    """How often the cotangents of a backward pass are multiplied by loss scales.

    Attributes:
      by: equation, by its `id` -> which scales what a backward pass makes in it is
        multiplied by; none where no backward pass does.
      behind: the same of the last backward pass before each equation.
      partly: whether one that is, is added to one that is not: a term of the loss.
      twice: whether one is multiplied again.
      compared: whether one may be compared: by a rule of the program's own, since all
        else is linear in it.
      moves: whether a backward pass reads what was computed from the result of another
        one, as parameters that a gradient has moved.
    """

    by: dict[int, Scales]
    behind: dict[int, Scales]
    partly: bool
    twice: bool
    compared: bool
    moves: bool

    def of(self, gradient: Any) -> Scales:
        """Returns the scales of the backward pass that made a gradient."""
        eqn = _compat.maker(gradient)
        return self.behind[id(eqn)] if eqn is not None else frozenset()


def scaling(gradients: Sequence[Any], scale: Any, is_dynamic: bool) -> Scaling:
    """Follows the cotangents of gradients back to where they are scaled.

    Args:
      gradients: tracers of `jit`, or values of a finished program.
      scale: that of the loss scale.
      is_dynamic: whether it moves: two states with fixed ones may have the same.
    """
    by: dict[int, Scales] = {}
    behind: dict[int, Scales] = {}
    whose: dict[int, str] = {}
    backward: dict[int, bool] = {}
    partly = twice = compared = moves = False
    for eqn in in_order(gradients):
        makers = [m for m in map(_compat.maker, _compat.reads(eqn)) if m is not None]
        cotangents = [m for m in makers if backward[id(m)] and not _is_zero(m)]
        others = {behind[id(m)] for m in makers if not backward[id(m)]}
        before = {by[id(m)] for m in cotangents}
        inner = list(_with_inner(eqn))
        found = frozenset().union(*before)
        scales = any(e.primitive.name == "mul" and is_scaling(e) for e in inner)
        if scales:
            for factor in _factors_of_scaling(eqn):
                if id(factor) not in whose:
                    whose[id(factor)] = _whose(factor, scale) if is_dynamic else OWN
                found |= {whose[id(factor)]}
        backward[id(eqn)] = is_backward(eqn)
        makes_cotangents = backward[id(eqn)] or any(map(is_backward, inner[1:]))
        by[id(eqn)] = found if makes_cotangents else frozenset()
        behind[id(eqn)] = found if makes_cotangents else found.union(*others)
        partly |= eqn.primitive.name == "add_any" and {not s for s in before} == {0, 1}
        twice |= scales and len(inner) == 1 and any(before)
        compared |= bool(by[id(eqn)]) and any(map(_compares, inner))
        moves |= makes_cotangents and any(OWN in s for s in others)
    return Scaling(by, behind, partly, twice, compared, moves)


def _factors_of_scaling(eqn: Any) -> Iterator[Any]:
    """Yields what an equation, or one inside, multiplies cotangents by: its operands.

    None stands for a factor that is no operand, or is not known to be one.
    """
    if eqn.primitive.name == "mul" and is_scaling(eqn):
        yield _compat.reads(eqn)[1]
    for held in held_jaxprs(eqn):
        jaxpr = _compat.open_jaxpr(held)
        given = _given(eqn, jaxpr)
        makers = {v: e for e in jaxpr.eqns for v in e.outvars}
        for inner in jaxpr.eqns:
            for factor in _factors_of_scaling(inner):
                yield given.get(_moved(factor, makers.get))


def _given(eqn: Any, jaxpr: Any) -> dict[Any, Any]:
    """Returns the operands that parameters of a jaxpr stand for in all iterations."""
    name, operands = eqn.primitive.name, _compat.reads(eqn)
    if name == "cond":
        operands = operands[1:]
    if name == "while" or len(operands) != len(jaxpr.invars):
        return {}
    count = _compat.scan_split(eqn.params)[0] if name == "scan" else len(operands)
    return dict(zip(jaxpr.invars[:count], operands[:count], strict=True))


def _moved(x: Any, maker: Callable[[Any], Any] = _compat.maker) -> Any:
    """Returns a value before it was cast, broadcast or reshaped; None for a number."""
    while x is not None and _compat.number(x) is None:
        if (eqn := maker(x)) is None or eqn.primitive.name not in _MOVES:
            return x
        x = _compat.reads(eqn)[0]
    return None


def _whose(factor: Any, scale: Any) -> str:
    factor, scale = _moved(factor), _moved(scale)
    if factor is None or scale is None or factor is scale:
        return OWN
    factors, scales = _made_from(factor), _made_from(scale)
    if id(scale) in factors or id(factor) in scales:
        return RELATED
    roots = [
        {i for i, x in made.items() if _compat.maker(x) is None}
        for made in (factors, scales)
    ]
    return OTHER if all(roots) and roots[0].isdisjoint(roots[1]) else OWN


def _made_from(x: Any) -> dict[int, Any]:
    """Returns a value and all floats that it was computed from, by their `id`."""
    found: dict[int, Any] = {}
    todo = [x]
    while todo:
        x = todo.pop()
        if id(x) in found or not is_inexact(x) or _compat.number(x) is not None:
            continue
        found[id(x)] = x
        todo += _compat.reads(eqn) if (eqn := _compat.maker(x)) is not None else ()
    return found


def _compares(eqn: Any) -> bool:
    """Whether an equation compares floats, or takes the larger or smaller of them."""
    if eqn.primitive.name not in ORDERS | BOUNDS:
        return False
    return any(map(is_inexact, _compat.reads(eqn)))


def _is_zero(eqn: Any) -> bool:
    """Whether an equation makes zeros, the cotangent of what nothing reads."""
    values = [_compat.number(x) for x in _compat.reads(eqn)]
    return bool(values) and all(v is not None and not np.any(v) for v in values)


def _reads(eqn: Any, scale: Any) -> bool:
    """Whether an equation reads the loss scale; one that a call does nothing with not.

    An optimizer's state is often passed on as a whole.
    """
    return _does(eqn, [i for i, x in enumerate(_compat.reads(eqn)) if x is scale])


def _does(eqn: Any, places: Sequence[int]) -> bool:
    """Whether an equation does anything with some of its operands."""
    if not places or eqn.primitive.name not in CALLS:
        return bool(places)
    inner = _compat.open_jaxpr(eqn.params[CALLS[eqn.primitive.name][1]])
    if len(inner.invars) != len(_compat.reads(eqn)):
        return True
    given = {inner.invars[i] for i in places}
    return any(
        _does(
            e,
            [i for i, x in enumerate(e.invars) if not hasattr(x, "val") and x in given],
        )
        for e in inner.eqns
    )


def is_inexact(tracer: Any) -> bool:
    """Whether a value is real or complex floating point."""
    dtype = getattr(tracer.aval, "dtype", np.dtype(bool))
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_backward(eqn: Any) -> bool:
    """Whether reverse-mode differentiation made an equation."""
    return any(
        e.name == "transpose" and not _compat.is_scope(e) for e in _elements(eqn)
    )


def _elements(eqn: Any) -> Sequence[Any]:
    return _compat.scope_elements(eqn.source_info.name_stack)


def _with_inner(eqn: Any) -> Iterator[Any]:
    """Yields an equation and those of the jaxprs that it holds."""
    yield eqn
    for held in held_jaxprs(eqn):
        for inner in _compat.open_jaxpr(held).eqns:
            yield from _with_inner(inner)


def _factors(eqn: Any) -> Iterator[float]:
    if eqn.primitive.name == "mul":
        for operand in _compat.reads(eqn):
            value = _compat.number(operand)
            if value is not None and np.size(value) == 1:
                yield float(np.real(np.asarray(value)).item())
