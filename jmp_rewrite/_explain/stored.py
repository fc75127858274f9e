"""Which values of a program are written to memory, as a compiler would fuse it.

Most values exist in registers alone: a report that weighs all of them alike shows what
does not matter. Written are

- operands and results of matrix multiplications, results of the program, and whatever
  a loop or a branch is given and hands on;
- results of reductions, gathers and the like, which end a fusion;
- what a later kernel reads, if computing it again takes a costly function or several
  stored values. What is cheaply made of one stored value is computed again.

It is a model, the one of `_precision/cost.py`, read off the program with its casts:
what a compiler writes is known when it has compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jmp_rewrite import _compat
from jmp_rewrite._explain.residuals import CASTS, HALVES, VIEWS, nbytes, operands
from jmp_rewrite._precision import ENDS_KERNEL
from jmp_rewrite._rules import CALLS, COSTLY, PRODUCTS, held_jaxprs

# A body is followed at each of its uses, until there are so many values: functions that
# call each other twice would take forever. Then calls are taken for loops.
LIMIT = 200_000


class _Value:
    """A result of an equation, or what a jaxpr is given.

    Attributes:
      variable: what holds it.
      reads: what it is made of; nothing if it is given.
      level: how many kernels end before it.
      ends: whether a kernel ends with it, or it is in memory from the start.
      anchor: what has to be read to compute it again; None for what is made of numbers.
    """

    __slots__ = ("anchor", "ends", "level", "reads", "variable")

    def __init__(
        self, variable: Any, reads: Sequence[_Value], ends: bool, costly: bool
    ) -> None:
        self.variable = variable
        self.reads = reads
        self.ends = ends
        self.level: int = max((r.level + r.ends for r in reads), default=0)
        sources = _sources(variable, reads)
        is_own = ends or costly or len(sources) > 1
        self.anchor = self if is_own else next(iter(sources), None)


def stored(closed: Any, limit: int = LIMIT) -> frozenset[int]:
    """Returns the `id` of each variable, at any depth, that is written to memory.

    Args:
      closed: the program, a closed jaxpr.
      limit: how many values are followed inside calls.
    """
    model = _Model(limit)
    body = _compat.open_jaxpr(closed)
    results = model.run(body, model.given(body))
    model.write(results)
    return model.written()


class _Model:
    """Follows the values of a program; calls are followed inside."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: list[_Value] = []
        self._needed: set[_Value] = set()
        self._seen: set[int] = set()

    def given(self, body: Any) -> list[_Value]:
        """Returns the parameters of a jaxpr, all of them in memory."""
        return [self._add(v, ends=True) for v in body.invars]

    def run(self, body: Any, given: Sequence[_Value]) -> list[_Value | None]:
        """Follows a jaxpr; returns its results, None for literals."""
        known: dict[Any, _Value] = dict(zip(body.invars, given, strict=True))
        known |= {v: self._add(v, ends=True) for v in body.constvars}
        for eqn in body.eqns:
            known.update(zip(eqn.outvars, self._results(eqn, known), strict=True))
        return [None if _is_literal(v) else known[v] for v in body.outvars]

    def _results(self, eqn: Any, values: Mapping[Any, _Value]) -> list[_Value]:
        name, known = eqn.primitive.name, [values[v] for v in operands(eqn)]
        if name == "by_device":
            passed = eqn.invars[: len(eqn.outvars)]
            return [self._add() if _is_literal(v) else values[v] for v in passed]
        if name in VIEWS and len(known) == 1:
            return known
        held = [_compat.open_jaxpr(j) for j in held_jaxprs(eqn)]
        if name in CALLS and len(self._values) < self._limit:
            given = [None if _is_literal(v) else values[v] for v in eqn.invars]
            found = self.run(held[0], [g or self._add() for g in given])
            return [r or self._add() for r in found]
        if held:
            self.write(known)
            for body in held:
                if id(body) not in self._seen:
                    self._seen.add(id(body))
                    self.write(self.run(body, self.given(body)))
        if name in PRODUCTS:
            self.write(known)
        ends, costly = bool(held) or _ends_kernel(eqn), _is_costly(eqn, known)
        return [self._add(v, known, ends, costly) for v in eqn.outvars]

    def write(self, values: Sequence[_Value | None]) -> None:
        """Notes that these are written to memory."""
        self._needed.update(v for v in values if v is not None)

    def _add(
        self,
        variable: Any = None,
        reads: Sequence[_Value] = (),
        ends: bool = False,
        costly: bool = False,
    ) -> _Value:
        value = _Value(variable, reads, ends, costly)
        self._values.append(value)
        for source in reads:
            is_later = value.level > source.level + source.ends
            if is_later and not source.ends and source.anchor is not None:
                self._needed.add(source.anchor)
        return value

    def written(self) -> frozenset[int]:
        """Returns the variables that are written."""
        found = (v for v in self._values if v.ends or v in self._needed)
        return frozenset(id(v.variable) for v in found)


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _ends_kernel(eqn: Any) -> bool:
    name = eqn.primitive.name
    many = len(eqn.outvars) != 1
    return name in ENDS_KERNEL or name in PRODUCTS or many or bool(eqn.effects)


def _is_costly(eqn: Any, reads: Sequence[_Value]) -> bool:
    """Whether a result is not computed twice.

    Of a value that is rounded, and not in memory, the rounded one is written.
    """
    if eqn.primitive.name in CASTS and str(eqn.outvars[0].aval.dtype) in HALVES:
        return not all(r.ends for r in reads)
    return eqn.primitive.name in COSTLY


def _sources(variable: Any, reads: Sequence[_Value]) -> set[_Value]:
    """Returns the stored values from which a value is recomputed.

    Values that are much smaller do not count, a norm's statistics for example.
    """
    size = _size(variable)
    anchors = {r.anchor for r in reads if r.anchor is not None}
    return {a for a in anchors if 2 * _size(a.variable) >= size}


def _size(variable: Any) -> int:
    return 0 if variable is None else nbytes(variable.aval)
