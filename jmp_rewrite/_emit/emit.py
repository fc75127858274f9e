"""Emits equations according to a plan, casts at the boundaries; judges nothing.

The interpreter is JAX's own twenty lines (`jax.core.eval_jaxpr`) with a cell instead of
a value for each variable: what was computed, and its cast copies once somebody asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._emit.casts import narrow, rounded, scalar
from jmp_rewrite._emit.demand import AS_HALF, Demand
from jmp_rewrite._emit.later import Later
from jmp_rewrite._emit.products import float32_result
from jmp_rewrite._graph import FLOAT32, FULL_PRECISION, Inner, Instance, Node
from jmp_rewrite._passes import TPU, Where, by_device
from jmp_rewrite._precision import Label, Plan
from jmp_rewrite._rules import Category


class Cell:
    """A variable's value: as it was computed, and its cast copies.

    Attributes:
      value: the array, in float32, half, or any other dtype.
      half: its rounded copy, if somebody asked for it.
      full: its copy cast back to float32, if somebody asked for it.
      unrounded: the float32 value that it was rounded from, if it was rounded where it
        was computed.
    """

    __slots__ = (
        "full",
        "half",
        "unrounded",
        "value",
    )

    def __init__(self, value: Any, half: Any = None) -> None:
        self.value = value
        self.half = half
        self.unrounded: Any = None
        self.full: Any = None


# These repeat an operand along its dimensions of size one.
_REPEATS = frozenset({"add", "div", "max", "min", "mul", "sub"})


def _spread(cell: Cell, eqn: Any) -> Cell:
    """Repeats a float32 operand as the equation does.

    The transpose is a sum, which has to be float32: its operand is repeated before it
    is rounded, as it is in front of an explicit broadcast.
    """
    shape = eqn.outvars[0].aval.shape
    value = cell.value
    is_smaller = value.ndim == len(shape) and value.shape != shape
    if eqn.primitive.name not in _REPEATS or value.dtype != FLOAT32 or not is_smaller:
        return cell
    return Cell(jax.lax.broadcast_in_dim(value, shape, range(len(shape))))


# Emits an equation that holds jaxprs, from its operands' cells.
Handler = Callable[["Emitter", Any, Inner, list[Cell]], list[Cell]]


class Emitter:
    """Emits the uses of jaxprs of one plan."""

    def __init__(
        self,
        plan: Plan,
        handlers: Mapping[str, Handler],
        later: Later,
    ) -> None:
        self.plan = plan
        self.later = later
        self._handlers = handlers
        self.demand = Demand(plan)
        self._jaxprs: dict[Any, Any] = {}
        self._keys: dict[Instance, int] = {}
        self._numbers: dict[Any, int] = {}

    # ---- values

    def read_full(self, cell: Cell, aval: Any) -> Any:
        """Returns a value in the dtype that it has in the original program."""
        if getattr(cell.value, "dtype", None) != self.plan.half:
            return cell.value
        if getattr(aval, "dtype", None) != FLOAT32:
            return cell.value
        if cell.full is None:
            with _compat.in_own_mesh(cell.value):
                cell.full = _compat.convert(cell.value, FLOAT32)
        return cell.full

    def read_half(self, cell: Cell) -> Any:
        """Returns a float32 value of the program in half."""
        if cell.value.dtype == self.plan.half:
            return cell.value
        if cell.half is not None:
            return cell.half
        with _compat.in_own_mesh(cell.value):
            half = narrow(cell.value, self.plan.half)
        if self.plan.shared:
            cell.half = half
        return half

    # ---- one jaxpr

    def evaluate(self, instance: Instance, cells: Sequence[Cell]) -> list[Cell]:
        """Emits the equations of one use of a jaxpr; returns its results."""
        body = _compat.open_jaxpr(instance.jaxpr)
        env = dict(zip([*body.constvars, *body.invars], cells, strict=True))
        outer = _compat.current_name_stack()
        staging = _compat.Staging.of(instance.jaxpr)
        for index, eqn in enumerate(body.eqns):
            outs = None
            if staging is not None and self._stays(instance, index):
                outs = self._copy(staging, eqn, env)
            if outs is None:
                with _compat.user_context(eqn, outer), eqn.ctx.manager:
                    outs = self._in_scope(instance, index, eqn, env)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [cell_of(env, v) for v in body.outvars]

    def _stays(self, instance: Instance, index: int) -> bool:
        """Whether an equation is emitted as it was, if its operands are."""
        node = instance.nodes[index]
        if index in instance.inner:
            return not self.demand.touched_inside(instance.inner[index])
        if node is None:
            return True
        if isinstance(node, tuple) or self.plan.labels[node] is not Label.FLOAT32:
            return False
        is_other = index in instance.instead or index in instance.partial
        return not is_other and node not in self.plan.asked

    def _copy(
        self, staging: _compat.Staging, eqn: Any, env: dict[Any, Cell]
    ) -> list[Cell] | None:
        """Adds an equation as it was; None if it has to be bound anew."""
        reads = [v.val if hasattr(v, "val") else env[v].value for v in eqn.invars]
        outs = staging.copy(eqn, reads)
        return None if outs is None else [Cell(x) for x in outs]

    def _in_scope(
        self, instance: Instance, index: int, eqn: Any, env: dict[Any, Cell]
    ) -> list[Cell]:
        if instance.nodes[index] not in self.plan.asked:
            return self._equation(instance, index, eqn, env)
        with jax.named_scope(FULL_PRECISION):
            return self._equation(instance, index, eqn, env)

    def _equation(
        self, instance: Instance, index: int, eqn: Any, env: dict[Any, Cell]
    ) -> list[Cell]:
        inner = instance.inner.get(index)
        if inner is not None:
            cells = [cell_of(env, v) for v in eqn.invars]
            if not self.demand.touched_inside(inner):
                return self._as_it_was(eqn, env)
            return self._handlers[inner.kind](self, eqn, inner, cells)
        entry = instance.nodes[index]
        if isinstance(entry, tuple):
            return self._lanes(eqn, entry, env)
        label = Label.FLOAT32 if entry is None else self.plan.labels[entry]
        if index in instance.instead:
            operand, instead = instance.instead[index]
            env = {operand: env[instead]}
        if index in instance.partial:
            eqn, env = _of_partial(eqn, instance.partial[index], env)
        if entry is None or label is Label.FLOAT32:
            return self._as_it_was(eqn, env)
        if label is Label.ROUNDED:
            return self._wide(eqn, entry, env)
        is_product = self.plan.pins.categories[entry] is Category.ALLOW
        if is_product and "preferred_element_type" in eqn.params:
            return self._product(eqn, label, env)
        return self._native(eqn, env, self.plan.graph.nodes[entry])

    def _as_it_was(self, eqn: Any, env: dict[Any, Cell]) -> list[Cell]:
        values = [self.read_full(cell_of(env, v), v.aval) for v in eqn.invars]
        return [Cell(x) for x in _compat.bind(eqn, values, eqn.params)]

    def _product(self, eqn: Any, label: Label, env: dict[Any, Cell]) -> list[Cell]:
        """Emits a product of half operands, accumulated in float32."""
        values = self._half_operands(eqn, env, {})
        dtype = FLOAT32 if label is Label.WIDENED else self.plan.half
        params = dict(eqn.params, preferred_element_type=dtype)
        if label is Label.WIDENED and not self.plan.pins.whole_step:
            return [Cell(float32_result(eqn, values, self.later))]
        return [Cell(x) for x in _compat.bind(eqn, values, params)]

    def _wide(self, eqn: Any, node: int, env: dict[Any, Cell]) -> list[Cell]:
        """Emits in float32 and rounds the results once."""
        if node in self.plan.pins.lookups:
            found = self._as_it_was(eqn, env)
            return [Cell(narrow(x.value, self.plan.half)) for x in found]
        saturates = node in self.plan.saturates
        cells = []
        for cell in self._as_it_was(eqn, env):
            if cell.value.dtype == FLOAT32:
                exact = cell.value
                cell = Cell(rounded(exact, self.plan.half, saturates))
                cell.unrounded = exact
            cells.append(cell)
        return cells

    def _native(self, eqn: Any, env: dict[Any, Cell], node: Node) -> list[Cell]:
        """Emits on half operands, with half results."""
        values = self._half_operands(eqn, env, node.literals)
        if eqn.primitive.name == "convert_element_type":
            target = eqn.params["new_dtype"]
            dtype = self.plan.half if target == FLOAT32 else target
            (x,) = values
            return [Cell(x if x.dtype == dtype else _compat.convert(x, dtype))]
        if eqn.primitive.name in _compat.SCATTERS:
            never_meet = node.name == "scatter-add"  # or it would be float32
            sets = never_meet and node.literals.get(0) == 0.0
            outs = _compat.scatter_half(eqn, values, never_meet, sets)
        elif eqn.primitive.name == "reduce_sum" and _is_view(eqn):
            outs = [jax.lax.squeeze(values[0], eqn.params["axes"])]
        else:
            outs = _compat.bind(eqn, values, eqn.params)
        return [Cell(x) for x in outs]

    def _half_operands(
        self, eqn: Any, env: dict[Any, Cell], literals: dict[int, Any]
    ) -> list[Any]:
        values = []
        for position, atom in enumerate(eqn.invars):
            if atom.aval.dtype != FLOAT32:
                values.append(cell_of(env, atom).value)
            elif position in literals and not atom.aval.shape:
                values.append(scalar(float(literals[position]), self.plan.half))
            else:
                cell = cell_of(env, atom)
                if not self.plan.shared:
                    cell = _spread(cell, eqn)
                values.append(self.read_half(cell))
        return values

    def _lanes(
        self, eqn: Any, entry: tuple[int | None, ...], env: dict[Any, Cell]
    ) -> list[Cell]:
        """Emits an equation whose operands have a precision each."""
        cells = [cell_of(env, v) for v in eqn.invars]
        halves = [n is not None and bool(self.plan.labels[n]) for n in entry]
        values = [
            self.read_half(c) if is_half else self.read_full(c, v.aval)
            for c, v, is_half in zip(cells, eqn.invars, halves, strict=True)
        ]
        outs = _compat.bind(eqn, values, eqn.params)
        return [Cell(x) for x in outs]

    # ---- jaxprs inside

    def joint_dtype(self, node: int | None) -> np.dtype | None:
        """Returns the dtype of a carry or a join; None where it is no float32."""
        if node is None:
            return None
        is_half = self.plan.labels[node]
        return self.plan.half if is_half else FLOAT32

    def to_joint(self, cell: Cell, node: int | None, aval: Any) -> Any:
        if self.joint_dtype(node) == self.plan.half:
            return self.read_half(cell)
        return self.read_full(cell, aval)

    def passed(self, cell: Cell, demand: int) -> Any:
        """Returns the operand of a body: the value, or its half copy.

        A value that is only read in half inside is cast outside, once for all bodies
        and iterations, unless gradients of those reads have yet to be added up.
        """
        if demand == AS_HALF and self.plan.shared:
            return self.read_half(cell)
        return cell.value

    def body(
        self,
        instance: Instance,
        values: Sequence[Any],
        avals: Sequence[Any],
        joints: Sequence[int | None] | None = None,
        halves: Sequence[tuple[int, Any]] = (),
    ) -> Any:
        """Returns the rewritten jaxpr of one use.

        Args:
          instance: the use.
          values: what is passed, for its dtypes.
          avals: the types of the body's parameters in the original program.
          joints: the carries, stacks or joins that the results have to agree with;
            None for a result that is no float32, or that nothing is to agree with.
          halves: (parameter, type) of half copies that are passed in front.
        """
        dtypes = tuple(getattr(v, "dtype", None) for v in values)
        positions = tuple(p for p, _ in halves)
        out = None if joints is None else tuple(map(self.joint_dtype, joints))
        key = (self._key(instance), dtypes, out, positions)
        if key not in self._jaxprs:
            types = [h for _, h in halves]
            types += map(_retyped, avals, dtypes)
            fun = self._body_function(instance, joints, positions)
            self._jaxprs[key] = jax.make_jaxpr(fun)(*types)
        return self._jaxprs[key]

    def _body_function(
        self,
        instance: Instance,
        joints: Sequence[int | None] | None,
        positions: Sequence[int],
    ) -> Callable[..., list[Any]]:
        outvars = _compat.open_jaxpr(instance.jaxpr).outvars

        def body(*values: Any) -> list[Any]:
            halves = dict(zip(positions, values[: len(positions)], strict=True))
            consts = [Cell(c) for c in _compat.constants(instance.jaxpr)]
            given = enumerate(values[len(positions) :])
            cells = [Cell(x, halves.get(i)) for i, x in given]
            results = self.evaluate(instance, consts + cells)
            if joints is None:
                return [c.value for c in results]
            return [
                c.value if node is None else self.to_joint(c, node, v.aval)
                for c, node, v in zip(results, joints, outvars, strict=True)
            ]

        return body

    def _key(self, instance: Instance) -> int:
        """Two uses of a jaxpr with equal keys are emitted once."""
        if instance not in self._keys:
            labels = tuple(
                tuple(self._entry(n) for n in e)
                if isinstance(e, tuple)
                else self._entry(e)
                for e in instance.nodes
            )
            inner = tuple(
                (
                    tuple(self._key(b) for b in i.bodies),
                    tuple(map(self.joint_dtype, i.joints)),
                )
                for i in instance.inner.values()
            )
            other = (*instance.instead.items(), *instance.partial)
            key = (id(instance.jaxpr), labels, inner, other)
            # Numbers nest where tuples would be hashed to their full depth each time.
            self._keys[instance] = self._numbers.setdefault(key, len(self._numbers))
        return self._keys[instance]

    def _entry(self, node: int | None) -> Any:
        if node is None:
            return None
        label, pins = int(self.plan.labels[node]), self.plan.pins
        # Numbers that one use was passed, and another not: they are emitted as such.
        numbers = self.plan.graph.nodes[node].literals
        passed = tuple((i, str(x)) for i, x in numbers.items())
        marks = (
            node in self.plan.saturates,
            node in pins.lookups,
            node in self.plan.asked,
        )
        return label, marks, passed


def cell_of(env: dict[Any, Cell], atom: Any) -> Cell:
    return Cell(atom.val) if hasattr(atom, "val") else env[atom]


def _is_view(eqn: Any) -> bool:
    """Whether a sum is of one term, which may be half where no sum may."""
    return bool(eqn.invars[0].aval.size == eqn.outvars[0].aval.size)


def _of_partial(
    eqn: Any, partial: Any, env: dict[Any, Cell]
) -> tuple[Any, dict[Any, Cell]]:
    """Returns a sum and what it reads: a partial sum, if that is there unrounded."""
    (var,) = partial.invars
    if var not in env:
        return eqn, env
    cell = env[var]
    value = cell.value if cell.unrounded is None else cell.unrounded
    if getattr(value, "dtype", None) != FLOAT32:
        return eqn, env
    return partial, {var: Cell(_kept(value))}


def _kept(partial: Any) -> Any:
    """Returns a partial sum that XLA:TPU does not merge with the sum of it.

    It would take both for sums of the same value, and read that once for each.
    """
    apart = {Where((TPU,)): lambda x: [jax.lax.optimization_barrier(x)]}
    (same,) = by_device([partial], [], apart)
    return same


def _retyped(aval: Any, dtype: Any) -> Any:
    if dtype is None or aval.dtype == dtype:
        return aval
    return aval.update(dtype=dtype, weak_type=False)
