"""The equations that made a gradient, in the jaxpr that is being traced.

A tracer of `jax.jit` knows the equation that made it, and that one its operands. So an
update can see, before anything runs, whether its gradients are those of a scaled loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._rules import held_jaxprs

# The name scope of the multiplication by the loss scale.
SCALED = "jmp_rewrite.scale_loss"


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
    """Follows gradients back to the parameters of the jaxpr that is being traced.

    Args:
      gradients: tracers of `jit`.
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
        if any(map(_is_scaling, inside)):
            scaled = True
        elif any(x is scale for x in _compat.reads(eqn)):
            readers.add(is_before)
        factors.update(f for e in inside for f in _factors(e))
        todo += [(x, is_before) for x in _compat.reads(eqn)]
    read, before = bool(readers), True in readers
    return Lineage(backward, scaled, read, before, frozenset(factors), parameters)


def is_backward(eqn: Any) -> bool:
    """Whether reverse-mode differentiation made an equation."""
    return any(
        e.name == "transpose" and not _compat.is_scope(e) for e in _elements(eqn)
    )


def _is_scaling(eqn: Any) -> bool:
    return any(_compat.is_scope(e) and SCALED in e.name for e in _elements(eqn))


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
