"""Runs a program with a float32 shadow beside each value.

The program is the rewritten one, every rounding an equation of its own. A rounding
leaves the shadow alone, and what computes in half computes its shadow in float32, so
that the shadow is what the same program would be without half precision. Only what was
counted is kept: a value is freed after its last use. What no rounding has touched yet
is its own shadow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.bodies import Body, Step, rounds
from jmp_rewrite._diagnose.distance import Measured, exponents, measure
from jmp_rewrite._diagnose.evaluate import IN_PLACE, undonated
from jmp_rewrite._diagnose.float32 import (
    in_float32,
    passed_on,
    to_float32,
    touches_half,
)
from jmp_rewrite._diagnose.numbers import Numbers
from jmp_rewrite._diagnose.pair import ZERO, Pair, terms
from jmp_rewrite._diagnose.rows import Frame, Row
from jmp_rewrite._graph import TOP, Place, inner_place, is_half
from jmp_rewrite._passes import CASTS
from jmp_rewrite._rules import MOVES, PRODUCTS, VIEWS, held_jaxprs
from jmp_rewrite._source import Caller

_SAME_NUMBERS = MOVES | VIEWS
# A loop of so many iterations, with those in it, runs equation by equation. Compiling
# one with all that is counted took as long as 100 iterations of it (an Adam step of 150
# equations, 2 cores).
FEW = 64


class Shadow:
    """An interpreter of jaxprs on pairs of a value and its shadow.

    Attributes:
      rows: all rows, in program order.
      frame: what is counted in the jaxpr that runs now.
      axes: mesh axes of the `shard_map` around that checks what varies over them.
      few: how many iterations of a loop, with those in it, run equation by equation.
      endless: loops that the program was still in when it was stopped, each with the
        iterations of the program and of its shadow.
    """

    def __init__(
        self,
        handlers: Mapping[str, Any],
        few: int,
        numbers: Numbers | None,
        rounds_nothing: bool = False,
        looks_inside: bool = False,
    ) -> None:
        self.few = few
        self.endless: list[tuple[Any, int, int]] = []
        self.rows: list[Row] = []
        self.frame = Frame()
        self.axes: tuple[str, ...] = ()
        self._handlers = handlers
        self._numbers = numbers or Numbers()
        self._rounds_nothing = rounds_nothing
        self._looks_inside = looks_inside
        self._caller: Caller | None = None
        self._calls: tuple[int, ...] = ()
        self._place = TOP
        self._current: Any = None
        self._index: dict[Any, int] = {}
        self._bodies: dict[int, Body] = {}
        self._halves: dict[int, bool] = {}

    # ---- where it is

    @contextlib.contextmanager
    def inside(self, eqn: Any, axes: tuple[str, ...] = ()) -> Iterator[None]:
        """Enters the jaxprs that an equation holds, maybe on more mesh axes."""
        outer = self._caller, self._calls, self._place, self.axes
        self._caller = Caller(eqn, self._caller)
        self._calls, self._place = (*self._calls, id(eqn)), self._inner(eqn)
        self.axes += axes
        yield
        self._caller, self._calls, self._place, self.axes = outer
        self._current = eqn

    def _inner(self, eqn: Any, place: Place | None = None) -> Place:
        elements = _compat.scope_elements(eqn.source_info.name_stack)
        return inner_place(self._place if place is None else place, elements)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Frame]:
        """Counts in a frame of its own, for a jaxpr that is traced."""
        outer, self.frame = self.frame, Frame()
        yield self.frame
        self.frame = outer

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Runs without counting."""
        first, index = len(self.rows), dict(self._index)
        with self.counting():
            yield
        del self.rows[first:]
        self._index = index

    def add(self, kind: str, reads: Sequence[int], slot: int = 0, **fields: Any) -> int:
        """Adds a row for the current equation and returns its index.

        In another iteration of a loop it is the row of the first one.

        Args:
          kind: of the row.
          reads: the rows that made its operands; -1 is left out.
          slot: tells rows of one kind and equation apart.
          **fields: of the row.
        """
        eqn = self._current
        key = (kind, id(eqn), slot, self._calls)
        if key not in self._index:
            self._index[key] = len(self.rows)
            made_by = tuple(dict.fromkeys(r for r in reads if r >= 0))
            self.rows.append(
                Row(eqn, self._caller, self._inner(eqn), made_by, kind, **fields)
            )
        return self._index[key]

    def count(self, row: int, arrays: Measured, inherited: Sequence[Any]) -> Any:
        """Counts for a row; returns the error, f32[].

        Args:
          row: the row.
          arrays: what is compared.
          inherited: f32[] for each operand, its error.
        """
        kept = [i for i, r in enumerate(arrays.references) if _is_counted(r)]
        if not kept:
            return ZERO
        if len(kept) < len(arrays.references):
            lists = (arrays.values, arrays.references, arrays.exact)
            arrays = Measured(*([x[i] for i in kept] if x else () for x in lists))
        if not arrays.terms:
            inherited = [e for e in inherited if e is not ZERO]
        error, counts = measure(arrays, inherited)
        self.frame.blocks.append(([row], counts, None))
        return error

    # ---- one jaxpr

    def evaluate(self, jaxpr: Any, pairs: list[Pair]) -> list[Pair]:
        """Runs a jaxpr on pairs, which it takes out of the list; returns its results.

        Args:
          jaxpr: an open or a closed jaxpr.
          pairs: its arguments, constants that it does not carry first.
        """
        body = self._body(jaxpr)
        given = [*map(self.given, _compat.constants(jaxpr)), *pairs]
        pairs.clear()  # nothing but `env` keeps them from being freed
        env: dict[Any, Pair] = dict(zip(body.invars, given, strict=True))
        given.clear()
        for step in body.steps:
            self._current = step.eqn
            operands = [
                self._literal(v, place) if hasattr(v, "val") else env[v]
                for place, v in enumerate(step.eqn.invars)
            ]
            for var in step.dead:
                env.pop(var, None)
            with step.eqn.ctx.manager:
                outs = self._run(step, operands, body)
            self._note_gradients(operands, outs)
            env.update(zip((step.rounding or step.eqn).outvars, outs, strict=True))
            for var in step.dead:
                env.pop(var, None)
        return [
            self.given(v.val) if hasattr(v, "val") else env[v] for v in body.outvars
        ]

    def given(self, value: Any, row: int = -1) -> Pair:
        """Returns what no equation has made."""
        return Pair.same(to_float32(value) if self._rounds_nothing else value, row)

    def _literal(self, atom: Any, place: int) -> Pair:
        """Returns a number that the current equation reads, rounded or not."""
        if not is_half(atom.aval):
            return Pair.same(atom.val)
        exact = self._numbers.unrounded(self._current, atom.val)
        if exact is None or self._rounds_nothing:
            return self.given(atom.val if exact is None else exact)
        half = np.asarray(atom.val)
        row = self.add(
            "cast",
            [],
            place + 1,
            dtype=str(half.dtype),
            is_half=True,
            reader=Caller(self._current, self._caller),
        )
        error = self.count(row, Measured([half], [exact], [exact]), [])
        return Pair(atom.val, exact, error, row)

    def _note_gradients(self, operands: list[Pair], outs: list[Pair]) -> None:
        """Notes of which gradient each result is made, element by element.

        Nobody knows which of several it is if there are several results as well.
        """
        if not outs or self._is_backward(outs[0]):
            return
        read = [p.shadow if self._is_backward(p) else p.gradient for p in operands]
        read = [gradient for gradient in read if gradient is not None]
        for out in outs if read else ():
            own = [g for g in read if g.shape == out.shadow.shape != ()]
            if out.gradient is None and own and 1 in (len(outs), len(own)):
                out.gradient = own[0]

    def _is_backward(self, pair: Pair) -> bool:
        return pair.row >= 0 and self.rows[pair.row].place.backward

    def _body(self, jaxpr: Any) -> Body:
        if id(jaxpr) not in self._bodies:
            self._bodies[id(jaxpr)] = Body(jaxpr)
        return self._bodies[id(jaxpr)]

    def _run(self, step: Step, operands: list[Pair], body: Body) -> list[Pair]:
        eqn = step.eqn
        if held := held_jaxprs(eqn):
            is_same = not self._looks_inside and all(p.is_same for p in operands)
            if is_same and not any(map(self._is_half, held)):
                if not (self._rounds_nothing and eqn.primitive.name in IN_PLACE):
                    return self._shared(eqn, operands)
            if any(_compat.is_reference(v.aval) for v in eqn.invars):
                return self._beside(step, operands)
            return self._handlers[eqn.primitive.name](self, eqn, operands)
        if self._rounds_nothing:
            row = self.add("equation", [])
            made = in_float32(eqn, [p.value for p in operands])
            return [Pair.same(x, row) for x in made]
        if rounds(eqn):
            return [self._cast(step, operands[0], body)]
        if (kept := passed_on(eqn)) is not None and step.rounding is None:
            return _passed(eqn, operands, kept)
        if step.rounding is None and _are_shared(eqn, operands):
            return self._shared(eqn, operands)
        return self._beside(step, operands)

    def _is_half(self, jaxpr: Any) -> bool:
        """Whether a jaxpr has a half value anywhere."""
        if id(jaxpr) not in self._halves:
            self._halves[id(jaxpr)] = any(
                touches_half(eqn) or any(map(self._is_half, held_jaxprs(eqn)))
                for eqn in _compat.open_jaxpr(jaxpr).eqns
            )
        return self._halves[id(jaxpr)]

    def _shared(self, eqn: Any, operands: list[Pair]) -> list[Pair]:
        """Runs an equation whose results are their own shadows."""
        row = self.add("equation", [p.row for p in operands])
        return [Pair.same(x, row) for x in _values(eqn, operands)]

    def _cast(self, step: Step, pair: Pair, body: Body) -> Pair:
        """Rounds a value; its shadow stays as it is."""
        eqn = step.eqn
        (half,) = _values(eqn, [pair])
        fields: dict[str, Any] = {"dtype": str(half.dtype), "is_half": True}
        if step.inserted:
            fields |= {"of": pair.row, **self._reader(eqn, body)}
        kind = "cast" if step.inserted else "equation"
        row = self.add(kind, [pair.row], **fields)
        exact = to_float32(pair.value)
        error = self.count(row, Measured([half], [pair.shadow], [exact]), [pair.error])
        return Pair(half, pair.shadow, error, row)

    def _reader(self, cast: Any, body: Body) -> dict[str, Any]:
        """Returns for whom a value is rounded: what reads it, or hands it on."""
        found = body.reader(cast.outvars[0])
        if found is None:
            return {"reader": self._caller}
        *holders, eqn = found
        caller, place = self._caller, self._place
        for holder in holders:
            caller, place = Caller(holder, caller), self._inner(holder, place)
        return {
            "reader": Caller(eqn, caller),
            "reader_scope": self._inner(eqn, place).path,
        }

    def _beside(self, step: Step, operands: list[Pair]) -> list[Pair]:
        """Runs an equation, and its shadow in float32."""
        eqn = step.eqn
        has_reference = any(_compat.is_reference(v.aval) for v in eqn.invars)
        outs = _values(eqn, operands)
        if not eqn.outvars and not has_reference:
            return []  # it acts on the world: once is enough
        if _are_shared(eqn, operands):
            shadows = outs
        else:
            shadows = in_float32(eqn, [p.shadow for p in operands])
        is_move = eqn.primitive.name in _SAME_NUMBERS and step.rounding is None
        if is_move and len(operands) == len(outs) == 1:
            (pair,) = operands  # of the same error
            return [Pair(outs[0], shadows[0], pair.error, pair.row)]
        exact: list[Any] = []
        if step.rounding is not None:
            exact, cast = outs, step.rounding
            outs = _compat.bind(cast, outs, cast.params)
        elif touches_half(eqn) and outs and not has_reference:  # it would write twice
            values = _barred([to_float32(p.value) for p in operands])
            exact = in_float32(eqn, values)
        return self._counted(eqn, operands, Measured(outs, shadows, exact))

    def _counted(self, eqn: Any, operands: list[Pair], arrays: Measured) -> list[Pair]:
        """Counts how far an equation's results are from their shadows."""
        own = terms(eqn, operands)
        read = operands[-2:] if own else operands
        rows = [p.row for p in read]
        outs, shadows = arrays.values, arrays.references
        row = self.add(
            "equation",
            rows,
            dtype=str(getattr(outs[0], "dtype", "")) if outs else "",
            is_half=bool(arrays.exact),
            terms=tuple(rows) if own else (),
        )
        errors = [p.error for p in read]
        error = self.count(row, arrays._replace(terms=own), errors)
        if self.rows[row].place.backward and eqn.primitive.name in PRODUCTS:
            self.frame.exponents.append(exponents(shadows[0]))
        pairs = zip(outs, shadows, strict=True)
        return [Pair(value, shadow, error, row) for value, shadow in pairs]


def _are_shared(eqn: Any, operands: Sequence[Pair]) -> bool:
    """Whether the results of an equation are their own shadows."""
    if touches_half(eqn) or not all(p.is_same for p in operands):
        return False
    return not any(_compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _values(eqn: Any, operands: Sequence[Pair]) -> list[Any]:
    """Runs an equation as the program has it."""
    values = [p.value for p in operands]
    if eqn.primitive.name not in PRODUCTS:
        return _compat.bind(eqn, values, undonated(eqn))
    return _barred(_compat.bind(eqn, _barred(values), eqn.params))


def _passed(eqn: Any, operands: list[Pair], kept: int) -> list[Pair]:
    """Runs an equation that leaves the numbers of some operands what they are."""
    outs = values = [p.value for p in operands]
    is_cast, rounded = eqn.primitive.name in CASTS, touches_half(eqn)
    if is_cast or any(isinstance(x, jax.core.Tracer) for x in values):
        outs = _compat.bind(eqn, values, eqn.params)  # a barrier is for a compiler
    pairs = zip(outs[:kept], operands[:kept], strict=True)
    return [
        Pair(x, x if p.is_same and not rounded else p.shadow, p.error, p.row)
        for x, p in pairs
    ]


def _barred(values: list[Any]) -> list[Any]:
    """Hides from XLA what is done to operands and results in a loop.

    XLA:CPU has no kernel for some products that it would make of them.
    """
    if any(isinstance(x, jax.core.Tracer) for x in values):
        return list(lax.optimization_barrier(values))
    return values


def _is_counted(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if hasattr(x, "aval") and _compat.is_reference(x.aval):
        return False
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def run(
    closed: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    handlers: Mapping[str, Any],
    few: int = FEW,
    numbers: Numbers | None = None,
) -> tuple[list[Pair], Shadow]:
    """Runs a program; returns its results with their shadows, and what happened.

    Args:
      closed: a closed jaxpr of the constants and the arguments.
      consts: the values of the constants.
      args: the arguments.
      handlers: how equations that hold jaxprs are run.
      few: how many iterations of a loop run equation by equation.
      numbers: those that the program holds rounded; None if it holds none.
    """
    shadow = Shadow(handlers, few, numbers)
    pairs = [Pair.same(x) for x in consts]
    for number, x in enumerate(args):
        shadow.rows.append(Row(None, None, TOP, (), "argument", of=number))
        # What the program writes to a reference its shadow does not read.
        pairs.append(Pair(x, _compat.renewed(to_float32(x)), row=number))
    found = shadow.evaluate(closed, pairs)
    values = _compat.as_arrays(closed, [pair.value for pair in found])
    same = zip(found, values, strict=True)
    return [p if p.value is x else Pair.same(x, p.row) for p, x in same], shadow


def unrounded(
    closed: Any, args: Sequence[Any], handlers: Mapping[str, Any], few: int = FEW
) -> list[Any]:
    """Runs a program without any rounding, its own ones in loops too.

    Args:
      closed: a closed jaxpr.
      args: its arguments.
      handlers: how equations that hold jaxprs are run.
      few: how many iterations of a loop run equation by equation.

    Returns:
      Its results, float32 in place of half.
    """
    shadow = Shadow(handlers, few, None, rounds_nothing=True)
    found = shadow.evaluate(closed, list(map(shadow.given, args)))
    values = _compat.as_arrays(closed, [pair.value for pair in found])
    return list(map(to_float32, values))


def gradients(
    closed: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    handlers: Mapping[str, Any],
    numbers: Numbers | None = None,
) -> list[Any]:
    """Runs a program as `run` does, without any rounding.

    Returns:
      For each result the gradient that it is made of element by element, or None.
    """
    shadow = Shadow(handlers, FEW, numbers, rounds_nothing=True, looks_inside=True)
    found = shadow.evaluate(closed, list(map(shadow.given, [*consts, *args])))
    return [pair.gradient for pair in found]
