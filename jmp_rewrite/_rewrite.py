"""Emits a program according to its plan, casts at the boundaries; judges nothing.

The interpreter is JAX's own twenty lines (`jax.core.eval_jaxpr`) with a cell instead of
a value for each variable: what was computed, and its cast copies once somebody asked.
Jaxprs inside are emitted by evaluating them under `jax.make_jaxpr`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._cast import narrow, scalar
from jmp_rewrite._graph import CALLS, FLOAT32, Inner, Instance
from jmp_rewrite._plan import Action, Plan
from jmp_rewrite._rules import Category

# Calls that leave nothing behind but their equations.
_INLINED = frozenset({"call", "closed_call", "core_call", "eval_jaxpr"})

# How a value is read inside: bits of what `_Demand` collects.
AS_HALF, AS_FULL = 1, 2


class Cell:
    """A variable's value: as it was computed, and its cast copies.

    Attributes:
      value: the array, in float32, half, or any other dtype.
      saturate: whether rounding it must not make an infinity of a finite number.
      half: its rounded copy, if somebody asked for it.
      full: its copy cast back to float32, if somebody asked for it.
    """

    __slots__ = ("full", "half", "saturate", "value")

    def __init__(self, value: Any, saturate: bool = False, half: Any = None) -> None:
        self.value = value
        self.saturate = saturate
        self.half = half
        self.full: Any = None


def run(plan: Plan, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a program on its constants and arguments, as its plan says.

    Returns:
      Its results with the dtypes and weak types that they had.
    """
    emitter = _Emitter(plan)
    saturate = plan.half == np.float16
    cells = [Cell(x, saturate) for x in [*consts, *args]]
    outvars = _compat.open_jaxpr(plan.graph.top.jaxpr).outvars
    results = emitter.evaluate(plan.graph.top, cells)
    return [
        _as_before(emitter.read_full(cell, var.aval), var.aval)
        for cell, var in zip(results, outvars, strict=True)
    ]


def _as_before(x: Any, aval: Any) -> Any:
    weak = getattr(aval, "weak_type", False)
    if getattr(jax.typeof(x), "weak_type", False) != weak:
        return _compat.convert(x, aval.dtype, weak)
    return x


class _Emitter:
    """Emits the uses of jaxprs of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._demand = _Demand(plan)
        self._jaxprs: dict[Any, Any] = {}
        self._keys: dict[Instance, Any] = {}

    # ---- values

    def read_full(self, cell: Cell, aval: Any) -> Any:
        """Returns a value in the dtype that it has in the original program."""
        if getattr(cell.value, "dtype", None) != self.plan.half:
            return cell.value
        if getattr(aval, "dtype", None) != FLOAT32:
            return cell.value
        if cell.full is None:
            cell.full = _compat.convert(cell.value, FLOAT32)
        return cell.full

    def read_half(self, cell: Cell) -> Any:
        """Returns a float32 value of the program in half."""
        if cell.value.dtype == self.plan.half:
            return cell.value
        if cell.half is not None:
            return cell.half
        half = self._narrow(cell.value, cell.saturate)
        if self.plan.shared:
            cell.half = half
        return half

    def _narrow(self, x: Any, saturate: bool) -> Any:
        return narrow(x, self.plan.half, saturate, not self.plan.shared)

    # ---- one jaxpr

    def evaluate(self, instance: Instance, cells: Sequence[Cell]) -> list[Cell]:
        """Emits the equations of one use of a jaxpr; returns its results."""
        body = _compat.open_jaxpr(instance.jaxpr)
        env = dict(zip([*body.constvars, *body.invars], cells, strict=True))
        outer = _compat.current_name_stack()
        for index, eqn in enumerate(body.eqns):
            with _compat.user_context(eqn, outer), eqn.ctx.manager:
                outs = self._equation(instance, index, eqn, env)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_cell(env, v) for v in body.outvars]

    def _equation(self, instance: Instance, index: int, eqn: Any,
                  env: dict[Any, Cell]) -> list[Cell]:
        inner = instance.inner.get(index)
        if inner is not None:
            cells = [_cell(env, v) for v in eqn.invars]
            if not any(self._touched(b) for b in inner.bodies):
                if not self._joints_are_half(inner):
                    return self._as_it_was(eqn, env)
            return _HANDLERS[inner.kind](self, eqn, inner, cells)
        entry = instance.nodes[index]
        if isinstance(entry, tuple):
            return self._lanes(eqn, entry, env)
        action = Action.FULL if entry is None else self.plan.actions[entry]
        if not action & Action.HALF:
            return self._as_it_was(eqn, env, bool(action & Action.ARGUMENT))
        if self.plan.pins.categories[entry] is Category.ALLOW:
            return self._product(eqn, action, env)
        if action & Action.WIDE:
            return self._wide(eqn, action, env)
        literals = self.plan.graph.nodes[entry].literals
        return self._native(eqn, action, env, literals)

    def _as_it_was(self, eqn: Any, env: dict[Any, Cell],
                   saturate: bool = False) -> list[Cell]:
        values = [self.read_full(_cell(env, v), v.aval) for v in eqn.invars]
        return [Cell(x, saturate) for x in _compat.bind(eqn, values, eqn.params)]

    def _product(self, eqn: Any, action: Action, env: dict[Any, Cell]) -> list[Cell]:
        """Emits a product of half operands, accumulated in float32."""
        values = self._half_operands(eqn, env, {})
        dtype = FLOAT32 if action & Action.EMITS_FULL else self.plan.half
        params = dict(eqn.params, preferred_element_type=dtype)
        is_bfloat16 = self.plan.half != np.float16
        if action & Action.EMITS_FULL and is_bfloat16 and len(values) == 2:
            return [Cell(x) for x in _compat.shielded_product(eqn, values, params)]
        return [Cell(x) for x in _compat.bind(eqn, values, params)]

    def _wide(self, eqn: Any, action: Action, env: dict[Any, Cell]) -> list[Cell]:
        """Emits in float32 and rounds the results once."""
        saturate = bool(action & Action.SATURATES)
        return [
            Cell(self._narrow(cell.value, saturate or cell.saturate), cell.saturate)
            if cell.value.dtype == FLOAT32 else cell
            for cell in self._as_it_was(eqn, env, bool(action & Action.ARGUMENT))
        ]

    def _native(self, eqn: Any, action: Action, env: dict[Any, Cell],
                literals: dict[int, Any]) -> list[Cell]:
        """Emits on half operands, with half results."""
        saturate = bool(action & Action.ARGUMENT)
        values = self._half_operands(eqn, env, literals)
        if eqn.primitive.name == "convert_element_type":
            target = eqn.params["new_dtype"]
            dtype = self.plan.half if target == FLOAT32 else target
            (x,) = values
            return [Cell(x if x.dtype == dtype else _compat.convert(x, dtype), saturate)]
        outs = _compat.bind(eqn, values, eqn.params)
        return [Cell(x, saturate) for x in outs]

    def _half_operands(self, eqn: Any, env: dict[Any, Cell],
                       literals: dict[int, Any]) -> list[Any]:
        values = []
        for position, atom in enumerate(eqn.invars):
            if atom.aval.dtype != FLOAT32:
                values.append(_cell(env, atom).value)
            elif position in literals and not atom.aval.shape:
                values.append(scalar(literals[position], self.plan.half))
            else:
                values.append(self.read_half(_cell(env, atom)))
        return values

    def _lanes(self, eqn: Any, entry: tuple[int | None, ...],
               env: dict[Any, Cell]) -> list[Cell]:
        """Emits an equation whose operands have a precision each."""
        cells = [_cell(env, v) for v in eqn.invars]
        halves = [
            n is not None and bool(self.plan.actions[n] & Action.HALF) for n in entry
        ]
        values = [
            self.read_half(c) if is_half else self.read_full(c, v.aval)
            for c, v, is_half in zip(cells, eqn.invars, halves, strict=True)
        ]
        outs = _compat.bind(eqn, values, eqn.params)
        return [Cell(x, c.saturate) for x, c in zip(outs, cells, strict=True)]

    # ---- jaxprs inside

    def _touched(self, instance: Instance) -> bool:
        return self._demand.touched(instance)

    def _joints_are_half(self, inner: Inner) -> bool:
        joints = (*inner.carry_in, *inner.carry_out, *inner.joins)
        return any(self._joint_dtype(n) == self.plan.half for n in joints)

    def _joint_dtype(self, node: int | None) -> np.dtype | None:
        """Returns the dtype of a carry or a join; None where it is no float32."""
        if node is None:
            return None
        is_half = self.plan.actions[node] & Action.HALF
        return self.plan.half if is_half else FLOAT32

    def _to_joint(self, cell: Cell, node: int | None, aval: Any) -> Any:
        if self._joint_dtype(node) == self.plan.half:
            return self.read_half(cell)
        return self.read_full(cell, aval)

    def _passed(self, cell: Cell, demand: int) -> Any:
        """Returns what is passed to a body: the value, or its half copy.

        A value that is only read in half inside is cast outside, once for all bodies
        and iterations, unless gradients of those reads have yet to be added up.
        """
        if demand == AS_HALF and self.plan.shared:
            return self.read_half(cell)
        return cell.value

    def _body(self, instance: Instance, values: Sequence[Any],
              avals: Sequence[Any], saturate: Sequence[bool],
              joints: Sequence[int | None] | None = None,
              halves: Sequence[tuple[int, Any]] = ()) -> Any:
        """Returns the rewritten jaxpr of one use.

        Args:
          instance: the use.
          values: what is passed, for its dtypes.
          avals: the types of the body's parameters in the original program.
          saturate: which parameters saturate when they are rounded.
          joints: the carries or joins that the results have to agree with.
          halves: (parameter, type) of half copies that are passed in front.
        """
        dtypes = tuple(getattr(v, "dtype", None) for v in values)
        positions = tuple(p for p, _ in halves)
        out = None if joints is None else tuple(map(self._joint_dtype, joints))
        key = (self._key(instance), dtypes, tuple(saturate), out, positions)
        if key not in self._jaxprs:
            types = [h for _, h in halves]
            types += [_retyped(a, d) for a, d in zip(avals, dtypes, strict=True)]
            fun = self._body_function(instance, saturate, joints, positions)
            self._jaxprs[key] = jax.make_jaxpr(fun)(*types)
        return self._jaxprs[key]

    def _body_function(self, instance: Instance, saturate: Sequence[bool],
                       joints: Sequence[int | None] | None,
                       positions: Sequence[int]) -> Callable[..., list[Any]]:
        outvars = _compat.open_jaxpr(instance.jaxpr).outvars

        def body(*values: Any) -> list[Any]:
            halves = dict(zip(positions, values[: len(positions)], strict=True))
            cells = [Cell(c) for c in _compat.constants(instance.jaxpr)]
            for i, (x, s) in enumerate(
                zip(values[len(positions):], saturate, strict=True)
            ):
                cells.append(Cell(x, s, halves.get(i)))
            results = self.evaluate(instance, cells)
            if joints is None:
                return [c.value for c in results]
            ends = [*joints, *([None] * (len(results) - len(joints)))]
            return [
                c.value if i >= len(joints) else self._to_joint(c, node, v.aval)
                for i, (c, node, v) in enumerate(
                    zip(results, ends, outvars, strict=True)
                )
            ]

        return body

    def _key(self, instance: Instance) -> Any:
        """Two uses of a jaxpr with equal keys are emitted once."""
        if instance not in self._keys:
            actions = tuple(
                tuple(self._entry(n) for n in e) if isinstance(e, tuple)
                else self._entry(e)
                for e in instance.nodes
            )
            inner = tuple(
                (tuple(self._key(b) for b in i.bodies),
                 tuple(map(self._joint_dtype,
                           (*i.carry_in, *i.carry_out, *i.joins))))
                for i in instance.inner.values()
            )
            self._keys[instance] = (id(instance.jaxpr), actions, inner)
        return self._keys[instance]

    def _entry(self, node: int | None) -> int:
        return -1 if node is None else int(self.plan.actions[node])

    def _call(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        (body,) = inner.bodies
        if eqn.primitive.name in _INLINED:
            consts = [Cell(c) for c in _compat.constants(body.jaxpr)]
            return self.evaluate(body, consts + cells)
        demands = self._demand.of(body)
        invars = _compat.open_jaxpr(body.jaxpr).invars
        if inner.joins:
            values = [self._to_joint(c, n, v.aval) for c, n, v in
                      zip(cells, inner.joins, invars, strict=True)]
        else:
            values = [self._passed(c, d) for c, d in zip(cells, demands, strict=True)]
        closed = self._body(body, values, [v.aval for v in invars],
                            [c.saturate for c in cells])
        jaxpr = _compat.like(body.jaxpr, closed)
        params = dict(eqn.params, **{CALLS[eqn.primitive.name][1]: jaxpr})
        return [Cell(x) for x in _compat.bind(eqn, values, params)]

    def _shard_map(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        (body,) = inner.bodies
        demands = self._demand.of(body)
        values = [self._passed(c, d) for c, d in zip(cells, demands, strict=True)]
        saturate = [c.saturate for c in cells]

        def local(*shards: Any) -> list[Any]:
            inside = [Cell(x, s) for x, s in zip(shards, saturate, strict=True)]
            return [c.value for c in self.evaluate(body, inside)]

        params = eqn.params
        mapped = jax.shard_map(
            local,
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=params["newly_manual_axes"],
        )
        return [Cell(x) for x in mapped(*values)]

    def _scan(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        (body,) = inner.bodies
        demands = self._demand.of(body)
        num_consts, num_carry = _compat.scan_split(eqn.params)
        first = num_consts + num_carry
        avals = [v.aval for v in _compat.open_jaxpr(body.jaxpr).invars]
        values, halves = [], []
        for i, (cell, demand) in enumerate(zip(cells, demands, strict=True)):
            if num_consts <= i < first:
                node = inner.carry_in[i - num_consts]
                values.append(self._to_joint(cell, node, avals[i]))
                continue
            values.append(self._passed(cell, demand))
            both = demand == AS_HALF | AS_FULL and self.plan.shared
            if i < num_consts and both and cell.value.dtype == FLOAT32:
                halves.append((i, self.read_half(cell)))
        types = [(i, jax.typeof(x)) for i, x in halves]
        closed = self._body(body, values, avals, [c.saturate for c in cells],
                            inner.carry_in, types)
        params = _compat.scan_params(eqn.params, closed, len(halves))
        outs = _compat.bind(eqn, [*(x for _, x in halves), *values], params)
        return [Cell(x) for x in outs]

    def _while(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        cond, body = inner.bodies
        split = eqn.params["cond_nconsts"]
        first = split + eqn.params["body_nconsts"]
        avals = [v.aval for v in eqn.outvars]
        carried = [self._to_joint(c, n, a) for c, n, a in
                   zip(cells[first:], inner.carry_in, avals, strict=True)]
        values, jaxprs = [], []
        for use, own, joints in ((cond, cells[:split], None),
                                 (body, cells[split:first], inner.carry_in)):
            demands = self._demand.of(use)[: len(own)]
            passed = [self._passed(c, d) for c, d in zip(own, demands, strict=True)]
            types = [v.aval for v in _compat.open_jaxpr(use.jaxpr).invars]
            saturate = [c.saturate for c in own] + [False] * len(carried)
            jaxprs.append(self._body(use, passed + carried, types, saturate, joints))
            values += passed
        params = dict(eqn.params, cond_jaxpr=jaxprs[0], body_jaxpr=jaxprs[1])
        return [Cell(x) for x in _compat.bind(eqn, values + carried, params)]

    def _cond(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        which, operands = cells[0].value, cells[1:]
        saturate = [c.saturate for c in operands]
        values = [c.value for c in operands]
        avals = [v.aval for v in eqn.invars[1:]]
        branches = tuple(
            self._body(body, values, avals, saturate, inner.joins)
            for body in inner.bodies
        )
        params = dict(eqn.params, branches=branches)
        return [Cell(x) for x in _compat.bind(eqn, [which, *values], params)]

    # ---- custom derivatives

    def _custom_jvp(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        """The rule sees the original dtypes; it is rewritten like a body."""
        closed, values, avals = self._custom_body(eqn, inner, cells)
        params = eqn.primitive.get_bind_params(eqn.params)
        fun, jvp = params["subfuns"]
        outs = [v.dtype for v in closed.out_avals]

        def new_jvp(*args: Any) -> list[Any]:
            args = [_cast_like(a, t) for a, t in zip(args, [*avals, *avals],
                                                     strict=True)]
            results = self._rule(jvp.call_wrapped, args)
            return [_cast(r, d) for r, d in zip(results, [*outs, *outs], strict=True)]

        new_fun = _compat.wrap(jex.jaxpr_as_fun(closed), fun)
        params["subfuns"] = (new_fun, _compat.wrap(new_jvp, jvp))
        return [Cell(x) for x in eqn.primitive.bind(*values, **params)]

    def _custom_vjp(self, eqn: Any, inner: Inner, cells: list[Cell]) -> list[Cell]:
        """Both rules see the original dtypes; they are rewritten like bodies."""
        closed, values, avals = self._custom_body(eqn, inner, cells)
        params = eqn.primitive.get_bind_params(eqn.params)
        fun, fwd, bwd = params["subfuns"]
        out_avals = [v.aval for v in eqn.outvars]
        outs = [v.dtype for v in closed.out_avals]
        ins = [getattr(v, "dtype", None) for v in values]

        def new_fwd(*args: Any) -> list[Any]:
            primals = [_cast_like(a, t) for a, t in zip(args[::2], avals, strict=True)]
            pairs = [x for pair in zip(primals, args[1::2], strict=True) for x in pair]
            results = self._rule(fwd.call_wrapped, pairs)
            kept = len(results) - len(outs)
            made = [_cast(r, d) for r, d in zip(results[kept:], outs, strict=True)]
            return [*results[:kept], *made]

        def new_bwd(*args: Any) -> Any:
            forwarded = params["out_trees"]()[2]
            kept = len(args) - len(out_avals)
            residuals = [
                a if f is None else _cast_like(a, avals[f])
                for a, f in zip(args[:kept], forwarded, strict=True)
            ]
            cts = [_cast_like(c, t) for c, t in zip(args[kept:], out_avals, strict=True)]
            results = self._rule(bwd.call_wrapped, [*residuals, *cts])
            return _compat.map_cotangents(_cast, results, ins)

        params["subfuns"] = (
            _compat.wrap(jex.jaxpr_as_fun(closed), fun),
            _compat.wrap(new_fwd, fwd),
            _compat.wrap(new_bwd, bwd),
        )
        return [Cell(x) for x in eqn.primitive.bind(*values, **params)]

    def _custom_body(self, eqn: Any, inner: Inner,
                     cells: list[Cell]) -> tuple[Any, list[Any], list[Any]]:
        (body,) = inner.bodies
        values = [c.value for c in cells]
        avals = [v.aval for v in eqn.invars]
        closed = self._body(body, values, avals, [c.saturate for c in cells])
        return closed, values, avals

    def _rule(self, rule: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Runs a derivative rule rewritten: it is a program of its own."""
        arrays = [i for i, a in enumerate(args) if _compat.is_array(a)]
        tree: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            full = list(args)
            for i, x in zip(arrays, values, strict=True):
                full[i] = x
            leaves, structure = _compat.flatten_rule(rule(*full))
            known = [None if _compat.is_array(x) else x for x in leaves]
            tree.append((known, structure))
            return [x for x in leaves if _compat.is_array(x)]

        closed = jax.make_jaxpr(flat)(*(args[i] for i in arrays))
        plan = self.plan.nested(closed)
        consts = _compat.constants(closed)
        results = iter(run(plan, consts, [args[i] for i in arrays]))
        known, structure = tree[-1]
        leaves = [next(results) if x is None else x for x in known]
        return _compat.unflatten_rule(structure, leaves)


_HANDLERS: dict[str, Callable[..., list[Cell]]] = {
    "call": _Emitter._call,
    "cond": _Emitter._cond,
    "custom_jvp": _Emitter._custom_jvp,
    "custom_vjp": _Emitter._custom_vjp,
    "scan": _Emitter._scan,
    "shard_map": _Emitter._shard_map,
    "while": _Emitter._while,
}


def _cell(env: dict[Any, Cell], atom: Any) -> Cell:
    return Cell(atom.val) if hasattr(atom, "val") else env[atom]


def _retyped(aval: Any, dtype: Any) -> Any:
    if dtype is None or aval.dtype == dtype:
        return aval
    return aval.update(dtype=dtype, weak_type=False)


def _cast(x: Any, dtype: Any) -> Any:
    """Casts between float32 and half; symbolic zeros are what they are."""
    if not _compat.is_array(x) or dtype is None or x.dtype == dtype:
        return x
    return _compat.convert(x, dtype)


def _cast_like(x: Any, aval: Any) -> Any:
    if _compat.is_symbolic_zero(x):
        return _compat.symbolic_zero_like(x, aval)
    return _cast(x, aval.dtype)


class _Demand:
    """Collects how a body reads its parameters: in half, in float32, or both."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[Instance, list[int]] = {}
        self._is_touched: dict[Instance, bool] = {}

    def touched(self, instance: Instance) -> bool:
        """Tells whether anything inside is half, so that it is emitted anew."""
        if instance not in self._is_touched:
            self._is_touched[instance] = self._any_half(instance)
        return self._is_touched[instance]

    def _any_half(self, instance: Instance) -> bool:
        for entry in instance.nodes:
            if any(self._is_half(n) for n in _as_tuple(entry)):
                return True
        for inner in instance.inner.values():
            joints = (*inner.carry_in, *inner.carry_out, *inner.joins)
            if any(map(self._is_half, joints)) or any(map(self.touched, inner.bodies)):
                return True
        return False

    def _is_half(self, node: int | None) -> bool:
        return node is not None and bool(self._plan.actions[node] & Action.HALF)

    def of(self, instance: Instance) -> list[int]:
        """Returns for each parameter of a body how it is read."""
        if instance not in self._known:
            body = _compat.open_jaxpr(instance.jaxpr)
            reads: dict[Any, int] = {}
            for index, eqn in enumerate(body.eqns):
                ways = self._ways(instance, index, eqn)
                for atom, way in zip(eqn.invars, ways, strict=True):
                    if not hasattr(atom, "val"):
                        reads[atom] = reads.get(atom, 0) | way
            for atom in body.outvars:
                if not hasattr(atom, "val"):
                    reads[atom] = reads.get(atom, 0) | AS_FULL
            self._known[instance] = [
                reads.get(v, 0) if getattr(v.aval, "dtype", None) == FLOAT32
                else AS_FULL for v in body.invars
            ]
        return self._known[instance]

    def _ways(self, instance: Instance, index: int, eqn: Any) -> list[int]:
        inner = instance.inner.get(index)
        if inner is not None:
            return self._ways_inside(eqn, inner)
        entry = instance.nodes[index]
        if isinstance(entry, tuple):
            return [AS_HALF if self._is_half(n) else AS_FULL for n in entry]
        action = Action.FULL if entry is None else self._plan.actions[entry]
        native = action & Action.HALF and not action & Action.WIDE
        return [AS_HALF if native else AS_FULL] * len(eqn.invars)

    def _ways_inside(self, eqn: Any, inner: Inner) -> list[int]:
        everything = [AS_FULL] * len(eqn.invars)
        if not any(map(self.touched, inner.bodies)):
            return everything
        if inner.kind in ("call", "shard_map") and not inner.joins:
            return self.of(inner.bodies[0])
        if inner.kind == "scan":
            ways = list(self.of(inner.bodies[0]))
            first, count = _compat.scan_split(eqn.params)
            for i, node in enumerate(inner.carry_in):
                ways[first + i] = AS_HALF if self._is_half(node) else AS_FULL
            del count
            return ways
        if inner.kind == "cond":
            own = [self.of(b) for b in inner.bodies]
            return [AS_FULL, *(_union(ways) for ways in zip(*own, strict=True))]
        return everything


def _union(ways: Sequence[int]) -> int:
    together = 0
    for way in ways:
        together |= way
    return together


def _as_tuple(entry: Any) -> tuple[int | None, ...]:
    return entry if isinstance(entry, tuple) else (entry,)
