"""Builds the graph of a program: walks its jaxprs once and collects nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_rewrite import _collector, _compat
from jmp_rewrite._graph.distinct import (
    LARGEST_INDEX,
    NOWHERE,
    distinct_along,
    folded_index,
    sets_elements,
    updates_are_disjoint,
    windows_are_disjoint,
)
from jmp_rewrite._graph.higher_order import HANDLERS
from jmp_rewrite._graph.joined import Padded
from jmp_rewrite._graph.kernels import Kernels
from jmp_rewrite._graph.nodes import (
    FLOAT32,
    Graph,
    Inner,
    Instance,
    Loop,
    Made,
    Node,
    Opaque,
    Value,
    elements,
    is_drawn,
    is_drawn_anew,
    is_float32,
    is_half,
    reads_float32,
)
from jmp_rewrite._graph.scopes import TOP, Place, inner_place
from jmp_rewrite._rules import (
    ELEMENTWISE,
    LANES,
    LEFT_ALONE,
    MAKES_DATA,
    MOVES,
    MOVES_NUMBER,
    PRODUCTS,
    held_jaxprs,
)
from jmp_rewrite._source import where

# Larger constants are not searched for values that half precision cannot hold (they
# are treated like arguments); 2**22 elements are 16 MiB.
_LARGEST_CONSTANT = 2**22

# A jaxpr that is used several times is analysed once for all its uses only where
# copies of its nodes would be many more than the program has equations.
_COPIES_PER_EQUATION = 4
_SMALL = 64

# A partial sum is read in place of its terms if it is smaller by this factor.
_FEWER = 8

_NO_LITERALS: dict[int, Any] = {}

# What makes random bits of a key.
_RANDOM = frozenset({"random_bits", "rng_bit_generator", "threefry2x32"})

# Comparisons with 0 of which `max(x, 0)` knows as much as `x`, and where `x` stands.
_ASKS_SIGN = {"gt": 0, "le": 0, "lt": 1, "ge": 1}
# A norm has no more operations than this, and a layer no more equations.
_FEW = 16
_SOON = 256

_LOOPS = frozenset({"scan", "while"})
# A known number stays known through these, and is known behind a sign.
_KEEPS_NUMBER = MOVES_NUMBER | {"neg"}
# What may take one element of an array.
_TAKES_ELEMENT = frozenset({"reshape", "slice", "squeeze"})


@_collector.held()
def build(
    closed: Any,
    is_opaque: Callable[[Any], bool] = lambda eqn: False,
    place: Place = TOP,
    by_path: bool = False,
    by_sign: bool = False,
    half: np.dtype | None = None,
) -> Graph:
    """Builds the graph of a closed jaxpr.

    Args:
      closed: the program.
      is_opaque: tells which equations that hold jaxprs are to be left alone.
      place: where the program stands.
      by_path: whether a body that is used often is analysed anew in each scope.
      by_sign: whether `x > 0` may be asked of `max(x, 0)`, that is, whether no positive
        number is rounded to 0.
      half: the compute dtype; kernels of another half dtype round for themselves.
    """
    builder = Builder(closed, is_opaque, by_path, by_sign, half)
    jaxpr = _compat.open_jaxpr(closed)
    consts = builder.constants(jaxpr.constvars, _compat.constants(closed))
    arguments: list[Value | None] = [
        Value(v.aval, argument=i, name=None if is_float32(v.aval) else ("argument", i))
        for i, v in enumerate(jaxpr.invars)
    ]
    top, results = builder.use(closed, consts, arguments, place, 1)
    return Graph(
        top,
        builder.nodes,
        builder.loops,
        [v for v in [*consts, *arguments] if v is not None],
        [v for v in results if v is not None and is_float32(v.aval)],
        builder.opaque,
        builder.has_backward_rules,
    )


class Builder:
    """Walks the program once and collects nodes."""

    def __init__(
        self,
        closed: Any,
        is_opaque: Callable[[Any], bool],
        by_path: bool,
        by_sign: bool,
        half: np.dtype | None,
    ) -> None:
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []
        self.opaque: list[Opaque] = []
        self.has_backward_rules = False
        self._calls: list[Any] = []
        self.tokens = itertools.count()
        self._is_opaque = is_opaque
        self._by_path = by_path
        self._by_sign = by_sign
        self._often = shared_jaxprs(closed)
        self._bits: dict[Any, int] = {}
        self._kernels = Kernels(self.nodes, half)
        self._padded = Padded()
        self._made_by: dict[Any, Any] = {}
        self._captured: dict[int, int] = {}
        self._own_names = itertools.count()
        self.shared: dict[Any, tuple[Inner, list[Value | None]]] = {}

    def sharing_key(self, jaxpr: Any, place: Place) -> Any:
        """Returns the key of uses of a body that are analysed as one; None if alone."""
        if id(jaxpr) not in self._often:
            return None
        return id(jaxpr), place if self._by_path else place._replace(path="")

    def captured(self, jaxpr: Any) -> list[Value | None]:
        """Returns the values of the arrays that a closed jaxpr carries."""
        return self.constants(_compat.constvars(jaxpr), _compat.constants(jaxpr))

    def constants(self, constvars: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        """Returns the values of captured arrays."""
        return [
            Value(
                v.aval,
                constant=_number(c),
                argument=self._captured.setdefault(id(c), -2 - len(self._captured)),
                made_of_data=not _is_numpy(c),
            )
            if is_float32(v.aval)
            else _known_index(v.aval, c)
            for v, c in zip(constvars, consts, strict=True)
        ]

    def use(
        self,
        jaxpr: Any,
        consts: Sequence[Value | None],
        args: Sequence[Value | None],
        place: Place,
        trips: int,
    ) -> tuple[Instance, list[Value | None]]:
        """Adds the nodes of one use of a jaxpr; returns it and its results."""
        body = _compat.open_jaxpr(jaxpr)
        if self._calls:
            self._kernels.enter(self._calls[-1], jaxpr)
        in_loop = any(e.primitive.name in _LOOPS for e in self._calls)
        given = [i for i, v in enumerate(args) if v is not None and v.argument >= 0]
        instance = Instance(jaxpr, frozenset(() if in_loop else given))
        env = {
            var: value
            for var, value in zip(
                [*body.constvars, *body.invars], [*consts, *args], strict=True
            )
            if value is not None
        }
        for var in (*body.constvars, *body.invars):
            if var not in env and _is_named(var.aval):
                env[var] = self._own(var.aval)
        rectified: dict[Any, Any] = {}
        sums: dict[Any, list[Any]] = {}
        for index, eqn in enumerate(body.eqns):
            instead = _asks_sign(eqn, rectified)
            if instead is None:
                partial = _adds_up(eqn, sums)
                if partial is not None:
                    instance.partial[index] = partial
                self._equation(instance, index, partial or eqn, env, place, trips)
            else:
                operand, var = instance.instead[index] = instead
                reads = {operand: env[var]}
                self._equation(instance, index, eqn, reads, place, trips)
            if self._by_sign:
                self._note_rectified(body.eqns, index, env, rectified)
        return instance, [_read(env, v) for v in body.outvars]

    def _note_rectified(
        self,
        eqns: Sequence[Any],
        index: int,
        env: dict[Any, Value],
        rectified: dict[Any, Any],
    ) -> None:
        """Notes which results are `max(x, 0)` of a variable that the equation reads.

        An equation that holds a jaxpr makes one as well (`jax.nn.relu` is two calls):
        what it passes in is the same value inside.
        """
        eqn = eqns[index]
        for var in eqn.outvars:
            value = env.get(var)
            if value is None or value.node < 0:
                continue
            node = self.nodes[value.node]
            if node.name != "max" or list(node.literals.values()) != [0.0]:
                continue
            for atom in eqn.invars:
                source = None if hasattr(atom, "val") else env.get(atom)
                if source is None or source.constant is not None:
                    continue
                is_operand = any(source is v for v in node.inputs)
                if not is_operand or source.aval.shape != value.aval.shape:
                    continue
                soon = eqns[index + 1 : index + _SOON]
                if self._is_scaled_product(source) and _is_multiplied(var, soon):
                    continue  # the result is stored, and what the argument is made of
                rectified.setdefault(atom, var)

    def _is_scaled_product(self, value: Value) -> bool:
        """Whether a value is that of one product, scaled by another array, as in norms.

        The backward pass reads what is scaled, and makes the value of it again.
        """
        found: set[int] = set()
        is_scaled = False
        todo, seen = [value.node], {-1}
        while todo:
            index = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            node = self.nodes[index]
            if node.name in PRODUCTS:
                found.add(index)
                continue
            if node.name not in ELEMENTWISE | MOVES or len(seen) > _FEW:
                return False
            whole = [v for v in node.inputs if not self._is_repeated(v, node)]
            is_scaled |= node.name in ("div", "mul") and len(whole) < len(node.inputs)
            todo += [v.node for v in whole]
            if any(v.node < 0 for v in whole):
                return False
        return is_scaled and len(found) == 1

    def _is_repeated(self, value: Value, node: Node) -> bool:
        """Whether a node's operand is a smaller array that is repeated for it."""
        if value.size < node.size:
            return True
        maker = self.nodes[value.node] if value.node >= 0 else None
        return (
            maker is not None
            and maker.name == "broadcast_in_dim"
            and all(v.size < maker.size for v in maker.inputs)
        )

    def _equation(
        self,
        instance: Instance,
        index: int,
        eqn: Any,
        env: dict[Any, Value],
        place: Place,
        trips: int,
    ) -> None:
        here = inner_place(place, _compat.scope_elements(eqn.source_info.name_stack))
        name = eqn.primitive.name
        holds = name in HANDLERS and not here.rewritten
        if holds and not self._is_opaque(eqn):
            args = [_read(env, v) for v in eqn.invars]
            self._calls.append(eqn)
            inner, results = HANDLERS[name](self, eqn, args, here, trips)
            self._calls.pop()
            instance.nodes.append(None)
            instance.inner[index] = inner
            for held in inner.bodies:
                self._kernels.leave(held.jaxpr, eqn)
        else:
            why = "a rule denies it" if holds else LEFT_ALONE.get(name)
            if why and not here.rewritten and reads_float32(eqn):
                line = where(eqn, *reversed(self._calls))
                self.opaque.append(Opaque(eqn, here, why, line))
            nodes, results = self._leaf(eqn, env, here, trips)
            instance.nodes.append(nodes)
            if not isinstance(nodes, tuple):
                self._kernels.follow(eqn, nodes, here)
        for var, value in zip(eqn.outvars, results, strict=True):
            if value is not None:
                env[var] = value
            elif _is_named(var.aval):
                env[var] = self._own(var.aval)

    def _own(self, aval: Any) -> Value:
        """Returns a value that is no float32, with a name of its own."""
        return Value(aval, name=("own", next(self._own_names)))

    def _named(
        self, eqn: Any, operands: Sequence[Value | None], results: list[Value | None]
    ) -> list[Value | None]:
        """Gives names to the results of an equation that are no float32."""
        if is_drawn_anew(eqn):
            return results
        drawn = eqn.primitive.name in _RANDOM or any(map(self._is_drawn, operands))
        made = Made(eqn, operands, drawn)
        for i, var in enumerate(eqn.outvars):
            if is_float32(var.aval) or not _is_named(var.aval):
                continue
            value = results[i]
            if value is None:
                results[i] = Value(var.aval, result=i, name=made)
            elif value.constant is None:
                value.name, value.result = made, i
        return results

    def _is_drawn(self, value: Value | None) -> bool:
        return is_drawn(value, self.nodes)

    def _leaf(
        self, eqn: Any, env: dict[Any, Value], place: Place, trips: int
    ) -> tuple[Any, list[Value | None]]:
        """Adds the node (or the lanes) of an equation that holds no jaxpr."""
        name = _name(eqn)
        self._made_by.update(dict.fromkeys(eqn.outvars, eqn))
        if name == "scatter-add" and sets_elements(eqn, self._made_by):
            name = "scatter"
        operands = [_read(env, v) for v in eqn.invars]
        of_bits = self._follow_bits(eqn, operands)
        if name in LANES:
            return self._lanes(eqn, operands, place, trips)
        inputs: list[Value] = []
        literals = _NO_LITERALS
        given = data = False
        for position, value in enumerate(operands):
            if value is None:
                continue
            given |= value.argument >= 0
            if not is_float32(value.aval):
                continue
            if value.constant is not None and not value.constant.ndim:
                literals = {**literals, position: value.constant}
                if value.node < 0:
                    continue
            data |= value.made_of_data
            inputs.append(value)
        avals = [v.aval for v in eqn.outvars if is_float32(v.aval)]
        number = _kept_number(eqn, operands)
        others: list[Value | None] = [None] * len(eqn.outvars)
        if len(avals) < len(others):
            others = self._named(eqn, operands, _not_float32(eqn, operands, number))
        if not (inputs or literals or avals):
            return None, others
        filled = self._padded.filled(eqn, inputs, literals)
        index = self.add(name, eqn, place, inputs, avals, literals, trips)
        node = self.nodes[index]
        self._padded.remember(index, eqn, filled)
        node.given = given
        node.mixed = _mixes(eqn)
        node.of_bits = of_bits
        node.disjoint = len(filled) > 1
        beside = [v for v in operands if v is None or not is_float32(v.aval)]
        node.others = beside
        made_of = [v for v in inputs if v.made_of_data]
        is_drawn = map(self._is_drawn, made_of or beside)
        node.drawn = all(is_drawn) if made_of else any(is_drawn)
        if name == "scatter-add":
            indices = operands[1]
            node.disjoint = updates_are_disjoint(
                eqn, _distinct(indices), _constant(indices)
            )
        elif name == "reduce_window_sum":
            node.disjoint = windows_are_disjoint(eqn, self._made_by)
        of_half = not inputs and any(is_half(v.aval) for v in eqn.invars)
        data = data or of_half or name in MAKES_DATA
        return index, [
            Value(v.aval, index, number, made_of_data=data, result=i)
            if number is not None or is_float32(v.aval)
            else other
            for i, (v, other) in enumerate(zip(eqn.outvars, others, strict=True))
        ]

    def _follow_bits(self, eqn: Any, operands: Sequence[Value | None]) -> int | None:
        """Remembers integers that are made of the bits of floats.

        Returns:
          The node of whose bits the equation reads some, -1 if they are an argument's;
          None if it reads none.
        """
        if not self._bits and eqn.primitive.name != "bitcast_convert_type":
            return None
        known = [self._bits.get(v) for v in eqn.invars if not hasattr(v, "val")]
        read = max((n for n in known if n is not None), default=None)
        source = read
        if eqn.primitive.name == "bitcast_convert_type":
            (value,) = operands
            if value is not None and is_float32(value.aval):
                source = value.node
        if source is not None:
            integers = (v for v in eqn.outvars if not is_float32(v.aval))
            self._bits.update(dict.fromkeys(integers, source))
        return read

    def _lanes(
        self, eqn: Any, operands: Sequence[Value | None], place: Place, trips: int
    ) -> tuple[Any, list[Value | None]]:
        nodes: list[int | None] = []
        results: list[Value | None] = []
        for var, value in zip(eqn.outvars, operands, strict=True):
            if value is None or not is_float32(var.aval):
                nodes.append(None)
                results.append(value)
                continue
            node = self.add(
                eqn.primitive.name, eqn, place, [value], [var.aval], {}, trips
            )
            nodes.append(node)
            results.append(Value(var.aval, node, made_of_data=value.made_of_data))
        return tuple(nodes), results

    def add(
        self,
        name: str,
        eqn: Any,
        place: Place,
        inputs: list[Value],
        avals: list[Any],
        literals: dict[int, Any],
        trips: int,
    ) -> int:
        """Adds a node and returns its index."""
        index = len(self.nodes)
        self.nodes.append(Node(index, name, eqn, place, inputs, avals, literals, trips))
        return index


def _name(eqn: Any) -> str:
    """Returns the name of what an equation does, that of a view for what is one.

    The transpose of `x[None]` is a sum of one term, and that of `x[0]` a broadcast that
    repeats nothing.
    """
    name: str = eqn.primitive.name
    if name == "reduce_sum":
        shape = eqn.invars[0].aval.shape
        if all(shape[axis] == 1 for axis in eqn.params["axes"]):
            return "squeeze"
    elif name == "broadcast_in_dim":
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if before and len(eqn.invars) == 1 and _is_one(before, after):
            return "reshape"
    return name


def _is_one(before: Any, after: Any) -> bool:
    """Whether two shapes are one but for dimensions of size one."""
    return [d for d in before if d != 1] == [d for d in after if d != 1]


def _is_multiplied(var: Any, soon: Sequence[Any]) -> bool:
    """Whether a product reads a variable, as it is or moved, in the next equations."""
    same = {var}
    for eqn in soon:
        if not any(not hasattr(v, "val") and v in same for v in eqn.invars):
            continue
        if eqn.primitive.name in PRODUCTS:
            return True
        if eqn.primitive.name in MOVES | {"convert_element_type", "pad"}:
            same.update(eqn.outvars)
    return False


def _asks_sign(eqn: Any, rectified: dict[Any, Any]) -> tuple[Any, Any] | None:
    """Returns the operand `x` of `x > 0`, and a variable that holds `max(x, 0)`.

    The derivative of a rectifier asks for the sign of its argument. Its result tells it
    as well, and is stored in any case if a product reads it: then the argument need not
    be.
    """
    position = _ASKS_SIGN.get(eqn.primitive.name)
    if position is None or not rectified:
        return None
    operand, other = eqn.invars[position], eqn.invars[1 - position]
    if hasattr(operand, "val") or not hasattr(other, "val"):
        return None
    var = rectified.get(operand)
    if var is None or np.ndim(other.val) or other.val != 0:
        return None
    return operand, var


def _adds_up(eqn: Any, sums: dict[Any, list[Any]]) -> Any:
    """Returns a sum as one of a partial sum, of the same variable over fewer axes.

    A bias and a shift of each example, added to the same value, have gradients that are
    sums of the same cotangent. Where one of the sums is rounded, XLA:TPU makes a kernel
    of each, and both read all of it.

    Args:
      eqn: any equation.
      sums: variable -> the equations before this one that add it up; added to.
    """
    if eqn.primitive.name != "reduce_sum" or not reads_float32(eqn):
        return None
    (operand,) = eqn.invars
    if hasattr(operand, "val"):
        return None
    axes = frozenset(eqn.params["axes"])
    before = sums.setdefault(operand, [])
    usable = [
        e
        for e in before
        if axes > set(e.params["axes"])
        and _FEWER * elements([e.outvars[0].aval]) <= elements([operand.aval])
    ]
    before.append(eqn)
    partial = min(usable, key=lambda e: e.outvars[0].aval.ndim, default=None)
    if partial is None:
        return None
    kept = [a for a in range(operand.aval.ndim) if a not in partial.params["axes"]]
    left = tuple(i for i, a in enumerate(kept) if a in axes)
    params = dict(eqn.params, axes=left)
    return eqn.replace(invars=list(partial.outvars), params=params)


def _mixes(eqn: Any) -> bool:
    """Whether another floating-point dtype stands beside float32."""
    for atom in (*eqn.invars, *eqn.outvars):
        dtype = getattr(atom.aval, "dtype", FLOAT32)
        if dtype is not FLOAT32 and getattr(dtype, "kind", "b") not in "biu":
            return True
    return False


def _read(env: dict[Any, Value], atom: Any) -> Value | None:
    """Returns the value of a variable or literal; None if it is nothing to follow."""
    if hasattr(atom, "val"):
        return Value(atom.aval, constant=_number(atom.val), made_of_data=False)
    return env.get(atom)


def _is_named(aval: Any) -> bool:
    """Whether a value of a type that is not float32 has a name."""
    return isinstance(aval, jax.core.ShapedArray) and not _compat.is_reference(aval)


def _number(value: Any) -> Any:
    """Returns a constant as NumPy sees it, or None if it is unknown or very large."""
    if _is_numpy(value):
        array = np.asarray(value)
        return array if array.size <= _LARGEST_CONSTANT else None
    if _compat.is_concrete(value) and value.ndim == 0:
        return np.asarray(value)  # an epsilon that a closure captured
    return None


def _is_numpy(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.ndarray, np.generic))


def _distinct(value: Value | None) -> frozenset[int]:
    return NOWHERE if value is None else value.distinct


def _constant(value: Value | None) -> Any:
    return None if value is None else value.constant


def _known_index(aval: Any, constant: Any) -> Value | None:
    """Returns the value of a captured index; None if it is nothing to follow."""
    dtype = getattr(aval, "dtype", None)
    if getattr(dtype, "kind", None) not in ("i", "u", "b"):
        return None
    if aval.size > LARGEST_INDEX:
        return None
    is_known = _is_numpy(constant) or _compat.is_concrete(constant)
    return Value(aval, constant=np.asarray(constant)) if is_known else None


def _not_float32(
    eqn: Any, operands: Sequence[Value | None], number: Any
) -> list[Value | None]:
    """Returns the results' values as if none were float32."""
    avals = [v.aval for v in eqn.outvars]
    if number is not None:
        return [Value(aval, constant=number) for aval in avals]
    known = [_distinct(v) for v in operands]
    constants = [_constant(v) for v in operands]
    folded = folded_index(eqn, constants, known)
    if folded is not None:
        return [Value(avals[0], constant=folded)]
    if eqn.primitive.name == "select_n":
        if constants[0] is None or constants[0].ndim:
            return [None]
        known = [known[1 + int(constants[0])]]
    along = distinct_along(eqn, known)
    return [
        Value(aval, distinct=found) if found else None
        for aval, found in zip(avals, along, strict=True)
    ]


def _kept_number(eqn: Any, operands: Sequence[Value | None]) -> Any:
    """Returns the number that the result is, if one operand makes it known."""
    if len(operands) != 1 or operands[0] is None:
        return None
    name, number = eqn.primitive.name, operands[0].constant
    if np.ndim(number) > 0:
        return _element(eqn, number) if name in _TAKES_ELEMENT else None
    if name not in _KEEPS_NUMBER or number is None:
        return None
    if name == "convert_element_type":
        return _converted(number, eqn.params["new_dtype"])
    return -number if name == "neg" else number


def _element(eqn: Any, array: np.ndarray) -> np.ndarray | None:
    """Returns the one number of a known array that a result is, as a coefficient."""
    if any(size != 1 for size in eqn.outvars[0].aval.shape):
        return None
    if eqn.primitive.name == "slice":
        bounds = eqn.params["start_indices"], eqn.params["limit_indices"]
        array = array[tuple(itertools.starmap(slice, zip(*bounds, strict=True)))]
    return array.reshape(-1)[0] if array.size == 1 else None


def _converted(number: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Returns a number as a cast makes it; None if compilers may differ in that."""
    if number.dtype.kind == "c":
        return None
    if number.dtype.kind not in "biu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= np.trunc(number) <= limits.max:  # or it is NaN
            return None
    return number.astype(dtype)


def shared_jaxprs(closed: Any) -> set[int]:
    """Returns the jaxprs that are analysed once for all their uses.

    Every use has its own nodes, so that one use cannot decide for another, unless the
    copies would be many more than the equations that the program has.
    """
    sizes: dict[int, int] = {}
    uses: dict[int, int] = {}
    distinct = [0]

    def size(jaxpr: Any) -> int:
        uses[id(jaxpr)] = uses.get(id(jaxpr), 0) + 1
        if id(jaxpr) not in sizes:
            body = _compat.open_jaxpr(jaxpr)
            distinct[0] += len(body.eqns)
            inner = [size(j) for e in body.eqns for j in held_jaxprs(e)]
            sizes[id(jaxpr)] = len(body.eqns) + sum(inner)
        return sizes[id(jaxpr)]

    total = size(closed)
    if total <= _COPIES_PER_EQUATION * distinct[0] + 10_000:
        return set()
    return {key for key, n in uses.items() if n > 1 and sizes[key] > _SMALL}
