"""Runs a program and its rewrite side by side, equation by equation.

The rewritten half is emitted by the library's own `Emitter`, so that what is diagnosed
is what accelerators run (a CPU reads some values before they are rounded); beside each
of its values stands the reference's, which is float32 everywhere. Only what was counted
is kept: a value is freed after its last use. What no rounding has touched yet is one
value for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jmp_rewrite import _compat, _transform
from jmp_rewrite._diagnose.distance import Measured, exponents, measure
from jmp_rewrite._diagnose.evaluate import last_uses, undonated
from jmp_rewrite._diagnose.float32 import in_float32, touches_half
from jmp_rewrite._diagnose.lockstep_rows import Frame, Row
from jmp_rewrite._diagnose.pair import (
    ZERO,
    Pair,
    are_shared,
    as_computed,
    pair_of,
    terms,
)
from jmp_rewrite._emit import higher_order
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._emit.later import Later
from jmp_rewrite._graph.nodes import Inner, Instance
from jmp_rewrite._graph.scopes import TOP, Place, inner_place
from jmp_rewrite._precision.decide import Action, Plan
from jmp_rewrite._rules.held import LANES, held_jaxprs
from jmp_rewrite._rules.table import PRODUCTS

# What these return has the numbers of their operand, and so its error.
_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "expand_dims",
        "name",
        "pvary",
        "reshape",
        "rev",
        "sharding_constraint",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)


class Lockstep(Emitter):
    """Emits a program beside its reference.

    Attributes:
      rows: all rows, in program order.
      plain: emits what is not looked into.
      frame: what is counted in the jaxpr that runs now.
      axes: mesh axes of the `shard_map` around that checks what varies over them.
    """

    def __init__(self, plan: Plan, handlers: Mapping[str, Any]) -> None:
        later = Later(_transform.run, lambda fun, args: fun(*args))
        super().__init__(plan, handlers, later)
        self.plain = Emitter(plan, higher_order.HANDLERS, later)
        self.rows: list[Row] = []
        self.frame = Frame()
        self.axes: tuple[str, ...] = ()
        self._calls: tuple[Any, ...] = ()
        self._place = TOP
        self._current: Any = None
        self._casts = 0
        self._index: dict[Any, int] = {}
        self._halves: dict[int, bool] = {}

    # ---- where it is

    @contextlib.contextmanager
    def inside(
        self, eqn: Any, place: Place, axes: tuple[str, ...] = ()
    ) -> Iterator[None]:
        """Enters the jaxprs that an equation holds, maybe on more mesh axes."""
        outer = self._calls, self._place, self.axes
        self._calls, self._place = (*self._calls, eqn), place
        self.axes += axes
        yield
        self._calls, self._place, self.axes = outer
        self.at(eqn)

    def at(self, eqn: Any) -> None:
        """Says which equation runs now."""
        self._current, self._casts = eqn, 0

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
        calls = tuple(id(c) for c in self._calls)
        key = (kind, id(self._current), slot, calls)
        if key not in self._index:
            self._index[key] = len(self.rows)
            place = inner_place(self._place, _scopes(self._current))
            made_by = tuple(dict.fromkeys(r for r in reads if r >= 0))
            self.rows.append(
                Row(self._current, self._calls, place, made_by, kind, **fields)
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

    # ---- values

    def read_half(self, cell: Cell) -> Any:
        """Rounds a value, and counts what that does to it."""
        half = super().read_half(cell)
        if isinstance(cell, Pair) and half is not cell.value and cell.half_row < 0:
            cell.half = half
            row = self.add(
                "cast",
                [cell.row],
                self._casts,
                dtype=str(half.dtype),
                is_half=True,
                of=cell.row,
            )
            self._casts += 1
            cell.half_row = row
            arrays = Measured([half], [cell.reference], [cell.value])
            cell.half_error = self.count(row, arrays, [cell.error])
        return half

    def _half_operands(
        self, eqn: Any, env: dict[Any, Cell], literals: dict[int, Any]
    ) -> list[Any]:
        return _barred(super()._half_operands(eqn, env, literals))

    def _product(self, eqn: Any, action: int, env: dict[Any, Cell]) -> list[Cell]:
        cells = super()._product(eqn, action, env)
        return [Cell(x) for x in _barred([c.value for c in cells])]

    # ---- one jaxpr

    def evaluate(self, instance: Instance, cells: Sequence[Cell]) -> list[Cell]:
        """Runs the equations of one use of a jaxpr on pairs; returns its results."""
        body = _compat.open_jaxpr(instance.jaxpr)
        env: dict[Any, Pair] = dict(
            zip([*body.constvars, *body.invars], map(pair_of, cells), strict=True)
        )
        if isinstance(cells, list):
            cells.clear()  # nothing but `env` keeps them from being freed
        reads = [instance.operands(i, e) for i, e in enumerate(body.eqns)]
        for index, (eqn, dead) in enumerate(
            zip(body.eqns, last_uses(body, reads), strict=True)
        ):
            operands = [_read(env, v) for v in reads[index]]
            for var in dead:
                env.pop(var, None)
            self.at(eqn)
            with eqn.ctx.manager:
                outs = self._run(instance, index, eqn, operands)
            env.update(zip(eqn.outvars, outs, strict=True))  # type: ignore[arg-type]
            for var in dead:
                env.pop(var, None)
        return [_read(env, v) for v in body.outvars]

    def _run(
        self, instance: Instance, index: int, eqn: Any, operands: list[Pair]
    ) -> list[Cell]:
        inner = instance.inner.get(index)
        if inner is None:
            return self._leaf(instance, index, eqn, operands)
        if all(p.is_same for p in operands) and self._is_untouched(eqn, inner):
            values = [p.value for p in operands]
            row = self.add("equation", [p.row for p in operands])
            outs = _compat.bind(eqn, values, undonated(eqn))
            return [Pair.same(x, row) for x in outs]
        if any(_compat.is_reference(v.aval) for v in eqn.invars):
            return self.opaque(eqn, inner, operands)
        return self._handlers[inner.kind](self, eqn, inner, operands)  # type: ignore[arg-type]

    def _is_untouched(self, eqn: Any, inner: Inner) -> bool:
        """Tells whether both programs compute the same in what an equation holds."""
        if any(map(self.demand.touched, inner.bodies)) or self._joints_are_half(inner):
            return False
        return not any(self._holds_half(j) for j in held_jaxprs(eqn))

    def _holds_half(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._halves:
            self._halves[id(jaxpr)] = any(
                touches_half(eqn) or any(map(self._holds_half, held_jaxprs(eqn)))
                for eqn in _compat.open_jaxpr(jaxpr).eqns
            )
        return self._halves[id(jaxpr)]

    def opaque(self, eqn: Any, inner: Inner, operands: list[Pair]) -> list[Cell]:
        """Runs an equation that holds jaxprs without looking into it."""
        cells = [Cell(p.value, p.half) for p in operands]
        outs = higher_order.HANDLERS[inner.kind](self.plain, eqn, inner, cells)
        return self._beside(eqn, operands, outs)

    def _leaf(
        self, instance: Instance, index: int, eqn: Any, operands: list[Pair]
    ) -> list[Cell]:
        """Runs an equation that holds nothing."""
        pairs = zip(instance.operands(index, eqn), operands, strict=True)
        env = {v: p for v, p in pairs if not hasattr(v, "val")}
        outs = self._equation(instance, index, eqn, env)  # type: ignore[arg-type]
        if eqn.primitive.name in LANES:
            return _lanes(operands, outs)
        entry = instance.nodes[index]
        action = self.plan.actions[entry] if isinstance(entry, int) else Action.FULL
        rounds = bool(action & Action.HALF)
        if not rounds and are_shared(eqn, operands):
            row = self.add("equation", [p.row for p in operands])
            return [Pair.same(c.value, row) for c in outs]
        native = rounds and not action & Action.WIDE
        return self._beside(eqn, operands, outs, rounds, native)

    def _beside(
        self,
        eqn: Any,
        operands: list[Pair],
        outs: list[Cell],
        rounds: bool = False,
        native: bool = False,
    ) -> list[Cell]:
        """Puts the reference's results beside the rewritten program's.

        Args:
          eqn: the equation.
          operands: its operands.
          outs: its results in the rewritten program.
          rounds: whether the rewrite makes it half.
          native: whether it reads half copies of its operands.
        """
        has_reference = any(_compat.is_reference(v.aval) for v in eqn.invars)
        if not eqn.outvars and not has_reference:
            return []  # it acts on the world: once is enough
        references = in_float32(eqn, [p.reference for p in operands])
        read = [p.read_as(p.half if native else p.value) for p in operands]
        moves = eqn.primitive.name in _MOVES and len(operands) == 1
        if moves and operands[0].row >= 0:
            ((error, row),) = read
        else:
            is_half = rounds or touches_half(eqn)
            dtype = _dtype(outs, self.plan.half if rounds else None)
            values = [c.value for c in outs]
            own = terms(eqn, operands, native)
            read = read[-2:] if own else read
            rows = [r for _, r in read]
            summed = tuple(rows) if own else ()
            row = self.add("equation", rows, dtype=dtype, is_half=is_half, terms=summed)
            exact: list[Any] = []
            if is_half and eqn.outvars:
                exact = in_float32(eqn, _barred(as_computed(eqn, operands, native)))
            arrays = Measured(values, references, exact, own)
            error = self.count(row, arrays, [e for e, _ in read])
        self._count_exponents(eqn, row, references)
        return [
            Pair(c.value, r, error, row) for c, r in zip(outs, references, strict=True)
        ]

    def _count_exponents(self, eqn: Any, row: int, references: list[Any]) -> None:
        """Counts how large the gradients are: the products of the backward pass."""
        if self.rows[row].place.backward and eqn.primitive.name in PRODUCTS:
            self.frame.exponents.append(exponents(references[0]))


def _lanes(operands: list[Pair], outs: list[Cell]) -> list[Cell]:
    """Pairs the results of an equation that hands its operands on as they are."""
    results: list[Cell] = []
    for pair, out in zip(operands, outs, strict=True):
        rounded = getattr(out.value, "dtype", None) != getattr(
            pair.value, "dtype", None
        )
        error, row = pair.read_as(pair.half if rounded else pair.value)
        results.append(Pair(out.value, pair.reference, error, row))
    return results


def _barred(values: list[Any]) -> list[Any]:
    """Hides from XLA what was done to operands and results in a loop.

    XLA:CPU has no kernel for some products that it makes of such: see the pass
    `cpu_shield`, which does not run here.
    """
    if any(isinstance(x, jax.core.Tracer) for x in values):
        return list(lax.optimization_barrier(values))
    return values


def _dtype(outs: list[Cell], half: Any) -> str:
    """Returns the name of the dtype that an equation computes or rounds in."""
    dtypes = [getattr(c.value, "dtype", None) for c in outs]
    return str(half if half is not None else next(iter(dtypes), ""))


def _is_counted(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if hasattr(x, "aval") and _compat.is_reference(x.aval):
        return False
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _scopes(eqn: Any) -> tuple[Any, ...]:
    return _compat.scope_elements(eqn.source_info.name_stack)


def _read(env: dict[Any, Pair], atom: Any) -> Pair:
    return Pair.same(atom.val) if hasattr(atom, "val") else env[atom]


def run(
    plan: Plan,
    handlers: Mapping[str, Any],
    consts: Sequence[Any],
    args: Sequence[Any],
) -> tuple[list[Pair], Lockstep]:
    """Runs a program and its rewrite; returns the results of both, and what happened.

    Args:
      plan: what is done with each equation.
      handlers: how equations that hold jaxprs are run.
      consts: the values of the constants.
      args: the arguments.
    """
    lockstep = Lockstep(plan, handlers)
    cells = [Pair.same(x) for x in consts]
    for number, x in enumerate(args):
        lockstep.rows.append(Row(None, (), TOP, (), "argument", of=number))
        cells.append(Pair.same(x, number))
    outvars = _compat.open_jaxpr(plan.graph.top.jaxpr).outvars
    results = lockstep.evaluate(plan.graph.top, cells)
    pairs = []
    for cell, var in zip(results, outvars, strict=True):
        pair = pair_of(cell)
        value = lockstep.read_full(pair, var.aval)
        pairs.append(Pair(value, pair.reference, pair.error, pair.row))
    return pairs, lockstep
