"""The program as one graph: nodes, values and the jaxprs that hold them.

A jaxpr with all its sub-jaxprs becomes a flat list of nodes joined by float32 values.
This is the only place that knows which parameter of which primitive holds a jaxpr.
Calls are transparent (a value inside is the value outside); a loop adds two nodes for
each carry and a branch one for each result, because those must agree on a dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._scopes import Place, inner_place

FLOAT32 = np.dtype(np.float32)

# Larger constants are not searched for values that half precision cannot hold (they
# are treated like arguments); 2**22 elements are 16 MiB.
_LARGEST_CONSTANT = 2**22

# A jaxpr that is used several times is analysed once for all its uses only where
# copies of its nodes would be many more than the program has equations.
_COPIES_PER_EQUATION = 4
_SMALL = 64


_NO_LITERALS: dict[int, Any] = {}


class Value:
    """A float32 value of the program (or a known number of another type).

    Attributes:
      aval: its type where it was made: shape and dtype.
      node: index of the node that makes it; -1 for arguments and constants.
      constant: its number, where that is known while tracing.
      argument: index of the program's argument that it is; -1 if none.
      made_of_data: False for what comes from integers, literals and NumPy constants
        alone.
      slice_of: the loop whose `xs` it is a slice of; -1 if none.
    """

    __slots__ = ("argument", "aval", "constant", "made_of_data", "node", "slice_of")

    def __init__(self, aval: Any, node: int = -1, constant: Any = None,
                 argument: int = -1, made_of_data: bool = True,
                 slice_of: int = -1) -> None:
        self.aval = aval
        self.node = node
        self.constant = constant
        self.argument = argument
        self.made_of_data = made_of_data
        self.slice_of = slice_of

    def at(self, aval: Any, slice_of: int = -1) -> Value:
        """Returns the same value seen with another shape: a slice, or a stack."""
        constant = self.constant
        if np.ndim(constant) and self.aval.shape != aval.shape:
            constant = None
        return Value(aval, self.node, constant, self.argument, self.made_of_data,
                     slice_of)


class Node:
    """What has one precision: an equation, one lane of it, a carry, or a join.

    Attributes:
      index: its place in program order.
      name: the primitive's name; "carry_in", "carry_out" or "join" for what holds
        loops and branches together.
      eqn: the equation, or None.
      place: where it stands.
      inputs: its float32 operands; literals are left out.
      avals: the types of its float32 results.
      literals: operand position -> number, for operands that are known numbers.
      trips: how often it runs, 1 outside of loops.
      given: a cast of an argument of the program that was half when it came in.
      mixed: another floating-point dtype stands beside float32.
    """

    __slots__ = ("avals", "eqn", "given", "index", "inputs", "literals", "mixed",
                 "name", "place", "trips")

    def __init__(self, index: int, name: str, eqn: Any, place: Place,
                 inputs: list[Value], avals: list[Any], literals: dict[int, Any],
                 trips: int) -> None:
        self.index = index
        self.name = name
        self.eqn = eqn
        self.place = place
        self.inputs = inputs
        self.avals = avals
        self.literals = literals
        self.trips = trips
        self.given = False
        self.mixed = False


class Instance:
    """One use of a jaxpr.

    Attributes:
      jaxpr: the jaxpr, open or closed as its equation holds it.
      nodes: an entry an equation: a node's index, a tuple of them (one a lane, None
        where that lane is no float32), or None where nothing is float32.
      inner: equation index -> what it holds.
    """

    __slots__ = ("__weakref__", "inner", "jaxpr", "nodes")

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.nodes: list[Any] = []
        self.inner: dict[int, Inner] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """What an equation holds that is rewritten inside.

    Attributes:
      kind: "call", "custom_jvp", "custom_vjp", "shard_map", "scan", "while" or "cond".
      bodies: the uses of its jaxprs, in the order of the parameters.
      carry_in: a node for each carry (None: not float32).
      carry_out: the node of what an iteration hands on, for each carry.
      joins: a node for each result of a branch, or for each parameter of a shared body.
    """

    kind: str
    bodies: tuple[Instance, ...]
    carry_in: tuple[int | None, ...] = ()
    carry_out: tuple[int | None, ...] = ()
    joins: tuple[int | None, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop of the program.

    Attributes:
      eqn: its equation, a `scan` or a `while`.
      place: where it stands.
      carries: (carry_in, carry_out) nodes of its float32 carries.
      token: what `Value.slice_of` says of slices of its `xs`.
      nodes: range of the nodes of its bodies.
    """

    eqn: Any
    place: Place
    carries: tuple[tuple[int, int], ...]
    token: int
    nodes: range


@dataclasses.dataclass(eq=False)
class Graph:
    """The whole program.

    Attributes:
      top: the use of the outermost jaxpr.
      nodes: all nodes, in program order.
      loops: all loops.
      arguments: the float32 arguments and captured arrays of the program.
      results: the float32 values that the program returns.
      differentiated: whether the program holds its own backward pass.
      opaque: equations that hold a jaxpr or a kernel and are left alone, with why.
    """

    top: Instance
    nodes: list[Node]
    loops: list[Loop]
    arguments: list[Value]
    results: list[Value]
    differentiated: bool
    opaque: list[tuple[Any, Place, str]]
    _edges: tuple[list[list[int]], list[list[int]]] | None = None

    def predecessors(self) -> list[list[int]]:
        """Returns for each node the nodes that it reads, each once."""
        if self._edges is None:
            self._edges = _edges(self.nodes)
        return self._edges[0]

    def consumers(self) -> list[list[int]]:
        """Returns for each node the nodes that read it, each once."""
        if self._edges is None:
            self._edges = _edges(self.nodes)
        return self._edges[1]


def _edges(nodes: Sequence[Node]) -> tuple[list[list[int]], list[list[int]]]:
    reads: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        sources: list[int] = []
        for value in node.inputs:
            source = value.node
            if source >= 0 and source not in sources:
                sources.append(source)
                readers[source].append(index)
        reads.append(sources)
    return reads, readers


def build(closed: Any, is_opaque: Callable[[Any], bool] = lambda eqn: False) -> Graph:
    """Builds the graph of a closed jaxpr.

    Args:
      closed: the program.
      is_opaque: tells which equations that hold jaxprs are to be left alone.
    """
    builder = _Builder(closed, is_opaque)
    jaxpr = _compat.open_jaxpr(closed)
    consts = builder.constants(jaxpr.constvars, _compat.constants(closed))
    arguments = [Value(v.aval, argument=i) for i, v in enumerate(jaxpr.invars)]
    top, results = builder.use(closed, consts, arguments, Place(), 1)
    return Graph(
        top,
        builder.nodes,
        builder.loops,
        [v for v in [*consts, *arguments] if v is not None],
        [v for v in results if v is not None and _is_float32(v.aval)],
        builder.differentiated,
        builder.opaque,
    )


def _is_float32(aval: Any) -> bool:
    # NumPy's dtypes of one kind are one object, and references have `inner_aval`.
    return getattr(aval, "dtype", None) is FLOAT32 and not _compat.is_reference(aval)


def _mixes(eqn: Any) -> bool:
    """Tells whether another floating-point dtype stands beside float32."""
    for atom in (*eqn.invars, *eqn.outvars):
        dtype = getattr(atom.aval, "dtype", FLOAT32)
        if dtype is not FLOAT32 and getattr(dtype, "kind", "b") not in "biu":
            return True
    return False


# The parameter that holds the jaxpr of a primitive that calls it once.
CALLS = {
    "call": ("call", "call_jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "compute_on": ("call", "jaxpr"),
    "core_call": ("call", "call_jaxpr"),
    "custom_jvp_call": ("custom_jvp", "call_jaxpr"),
    "custom_vjp_call": ("custom_vjp", "call_jaxpr"),
    "eval_jaxpr": ("call", "call_jaxpr"),
    "jit": ("call", "jaxpr"),
    "remat2": ("call", "jaxpr"),
    "shard_map": ("shard_map", "jaxpr"),
    "xla_metadata_call": ("call", "jaxpr"),
}
LOOPS_AND_BRANCHES = frozenset({"cond", "scan", "while"})

# Primitives that hold a jaxpr, or a kernel, and are left alone: the reason.
LEFT_ALONE = {
    "call_exported": "an exported program has fixed dtypes",
    "call_hi_primitive": "a hijax primitive is typed by its operands' dtypes",
    "composite": "a composite stands for a kernel that is chosen by its name",
    "cudnn_fusion": "a kernel is compiled for its dtypes",
    "custom_linear_solve": "a linear solve needs float32; XLA has no half solvers",
    "custom_partitioning": "its partitioning callbacks are typed by its dtypes",
    "custom_vmap_call": "its batching rule is a Python function of its dtypes",
    "ffi_call": "a foreign function is compiled for its dtypes",
    "io_callback": "a callback expects the dtypes that it was written for",
    "linear_call": "its transpose is a Python function of its dtypes",
    "pallas_call": "a Pallas kernel is written for its dtypes",
    "program_order": "an ordered effect keeps its operands",
    "pure_callback": "a callback expects the dtypes that it was written for",
    "remat_opt": "its optimized rule is a Python function of its dtypes",
    "run_state": "references have fixed dtypes",
    "tpu_custom_call": "a kernel is compiled for its dtypes",
}

# Operands of these are independent of one another: one precision each.
LANES = frozenset({"optimization_barrier"})

# What these make is data although they read no float32: random numbers, and the
# results of what cannot be looked into.
_DATA = frozenset({"bitcast_convert_type", *LEFT_ALONE})

# A known number stays known through these.
_KEEPS_NUMBER = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims",
    "neg", "reshape", "squeeze", "stop_gradient", "transpose",
})


class _Builder:
    """Walks the program once and collects nodes."""

    def __init__(self, closed: Any, is_opaque: Callable[[Any], bool]) -> None:
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []
        self.opaque: list[tuple[Any, Place, str]] = []
        self.differentiated = False
        self._tokens = itertools.count()
        self._is_opaque = is_opaque
        self._shared = {key: None for key in _shared_jaxprs(closed)}

    def constants(self, constvars: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        """Returns the values of captured arrays."""
        return [
            Value(v.aval, constant=_number(c), made_of_data=not _is_numpy(c))
            if _is_float32(v.aval) else None
            for v, c in zip(constvars, consts, strict=True)
        ]

    def use(self, jaxpr: Any, consts: Sequence[Value | None],
            args: Sequence[Value | None], place: Place,
            trips: int) -> tuple[Instance, list[Value | None]]:
        """Adds the nodes of one use of a jaxpr; returns it and its results."""
        body = _compat.open_jaxpr(jaxpr)
        instance = Instance(jaxpr)
        env = {
            var: value
            for var, value in zip(
                [*body.constvars, *body.invars], [*consts, *args], strict=True
            )
            if value is not None
        }
        for index, eqn in enumerate(body.eqns):
            self._equation(instance, index, eqn, env, place, trips)
        return instance, [_read(env, v) for v in body.outvars]

    def _equation(self, instance: Instance, index: int, eqn: Any,
                  env: dict[Any, Value], place: Place, trips: int) -> None:
        here = inner_place(place, _compat.scope_elements(eqn.source_info.name_stack))
        self.differentiated |= here.backward
        name = eqn.primitive.name
        holds = name in CALLS or name in LOOPS_AND_BRANCHES
        if holds and not here.rewritten and not self._is_opaque(eqn):
            args = [_read(env, v) for v in eqn.invars]
            nodes, inner, results = _HANDLERS[name](self, eqn, args, here, trips)
            instance.nodes.append(nodes)
            instance.inner[index] = inner
        else:
            if name in LEFT_ALONE and not here.rewritten:
                self.opaque.append((eqn, here, LEFT_ALONE[name]))
            nodes, results = self._leaf(eqn, env, here, trips)
            instance.nodes.append(nodes)
        for var, value in zip(eqn.outvars, results, strict=True):
            if value is not None:
                env[var] = value

    def _leaf(self, eqn: Any, env: dict[Any, Value], place: Place,
              trips: int) -> tuple[Any, list[Value | None]]:
        """Adds the node (or the lanes) of an equation that holds no jaxpr."""
        name = eqn.primitive.name
        operands = [_read(env, v) for v in eqn.invars]
        if name in LANES:
            return self._lanes(eqn, operands, place, trips)
        inputs: list[Value] = []
        literals = _NO_LITERALS
        given = False
        for position, value in enumerate(operands):
            if value is None:
                continue
            given |= value.argument >= 0
            if not _is_float32(value.aval):
                continue
            if value.constant is not None and not value.constant.ndim:
                literals = {**literals, position: value.constant}
                if value.node < 0:
                    continue
            inputs.append(value)
        avals = [v.aval for v in eqn.outvars if _is_float32(v.aval)]
        number = _kept_number(eqn, operands)
        if not (inputs or literals or avals):
            return None, [
                Value(v.aval, constant=number) if number is not None else None
                for v in eqn.outvars
            ]
        index = self.add(name, eqn, place, inputs, avals, literals, trips)
        node = self.nodes[index]
        node.given = given
        node.mixed = _mixes(eqn)
        data = name in _DATA or any([v.made_of_data for v in inputs])
        return index, [
            Value(v.aval, index, number, made_of_data=data)
            if number is not None or _is_float32(v.aval) else None
            for v in eqn.outvars
        ]

    def _lanes(self, eqn: Any, operands: Sequence[Value | None], place: Place,
               trips: int) -> tuple[Any, list[Value | None]]:
        nodes: list[int | None] = []
        results: list[Value | None] = []
        for var, value in zip(eqn.outvars, operands, strict=True):
            if value is None or not _is_float32(var.aval):
                nodes.append(None)
                results.append(value)
                continue
            node = self.add(eqn.primitive.name, eqn, place, [value], [var.aval], {},
                            trips)
            nodes.append(node)
            results.append(Value(var.aval, node, made_of_data=value.made_of_data))
        return tuple(nodes), results

    def add(self, name: str, eqn: Any, place: Place, inputs: list[Value],
            avals: list[Any], literals: dict[int, Any], trips: int) -> int:
        """Adds a node and returns its index."""
        index = len(self.nodes)
        self.nodes.append(Node(index, name, eqn, place, inputs, avals, literals, trips))
        return index

    # What follows handles one kind of primitive that holds jaxprs each: it returns the
    # equation's entry in `Instance.nodes`, what it holds, and its results.

    def call(self, eqn: Any, args: list[Any], place: Place, trips: int) -> Any:
        """A call is transparent: its parameters are the values that are passed."""
        kind, key = CALLS[eqn.primitive.name]
        jaxpr = eqn.params[key]
        consts = self.constants(_compat.constvars(jaxpr), _compat.constants(jaxpr))
        local = [_local(a, v) for a, v in
                 zip(args, _compat.open_jaxpr(jaxpr).invars, strict=True)]
        if id(jaxpr) in self._shared and kind == "call":
            return self._shared_call(jaxpr, consts, local, place, trips)
        body, results = self.use(jaxpr, consts, local, place, trips)
        results = [_local(r, v) for r, v in zip(results, eqn.outvars, strict=True)]
        return None, Inner(kind, (body,)), results

    def _shared_call(self, jaxpr: Any, consts: list[Any], args: list[Any],
                     place: Place, trips: int) -> Any:
        """A body that is analysed once for all uses joins the values that come in."""
        record = self._shared[id(jaxpr)]
        if record is None:
            joins = tuple(
                self.add("join", None, place, [], [v.aval], {}, trips)
                if _is_float32(v.aval) else None
                for v in _compat.open_jaxpr(jaxpr).invars
            )
            params = [None if j is None else Value(self.nodes[j].avals[0], j)
                      for j in joins]
            body, results = self.use(jaxpr, consts, params, place, trips)
            record = Inner("call", (body,), joins=joins), results
            self._shared[id(jaxpr)] = record
        inner, results = record
        for join, value in zip(inner.joins, args, strict=True):
            if join is not None and value is not None:
                self.nodes[join].inputs.append(value)
        return None, inner, list(results)

    def scan(self, eqn: Any, args: list[Any], place: Place, trips: int) -> Any:
        """A scan has constants, carries, and slices of its `xs`."""
        jaxpr = eqn.params["jaxpr"]
        num_consts, num_carry = _compat.scan_split(eqn.params)
        invars = _compat.open_jaxpr(jaxpr).invars
        trips *= max(eqn.params["length"], 1)
        start = len(self.nodes)
        carries = range(num_consts, num_consts + num_carry)
        carry_in = self._carry_in([args[i] for i in carries],
                                  [invars[i].aval for i in carries], place, trips)
        token = next(self._tokens)
        slices = [a and a.at(v.aval, token) for a, v in
                  zip(args[carries.stop:], invars[carries.stop:], strict=True)]
        inside = [_local(a, v) for a, v in
                  zip(args[:num_consts], invars[:num_consts], strict=True)]
        inside += [self._made_by(node) for node in carry_in] + slices
        consts = self.constants(_compat.constvars(jaxpr), _compat.constants(jaxpr))
        body, outs = self.use(jaxpr, consts, inside, place, trips)
        carry_out = self._carry_out(carry_in, outs[:num_carry], place, trips)
        self._loop(eqn, place, carry_in, carry_out, token, start)
        results = [self._made_by(node) for node in carry_in]
        results += [_local(v, o) for v, o in
                    zip(outs[num_carry:], eqn.outvars[num_carry:], strict=True)]
        return None, Inner("scan", (body,), carry_in, carry_out), results

    def while_(self, eqn: Any, args: list[Any], place: Place, trips: int) -> Any:
        """A while loop has constants for its condition and its body, and carries."""
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        split = eqn.params["cond_nconsts"]
        first = split + eqn.params["body_nconsts"]
        start = len(self.nodes)
        carry_in = self._carry_in(
            args[first:], [v.aval for v in eqn.outvars], place, trips
        )
        carried = [self._made_by(node) for node in carry_in]
        uses = []
        for jaxpr, consts in ((cond, args[:split]), (body, args[split:first])):
            captured = self.constants(_compat.constvars(jaxpr),
                                      _compat.constants(jaxpr))
            uses.append(self.use(jaxpr, captured, [*consts, *carried], place, trips))
        (cond_use, _), (body_use, outs) = uses
        carry_out = self._carry_out(carry_in, outs, place, trips)
        self._loop(eqn, place, carry_in, carry_out, next(self._tokens), start)
        inner = Inner("while", (cond_use, body_use), carry_in, carry_out)
        return None, inner, [self._made_by(node) for node in carry_in]

    def cond(self, eqn: Any, args: list[Any], place: Place, trips: int) -> Any:
        """The results of all branches join: they have one dtype each."""
        bodies, outs = [], []
        for jaxpr in eqn.params["branches"]:
            consts = self.constants(_compat.constvars(jaxpr), _compat.constants(jaxpr))
            body, results = self.use(jaxpr, consts, args[1:], place, trips)
            bodies.append(body)
            outs.append(results)
        joins = tuple(
            self.add("join", eqn, place, [b[i] for b in outs if b[i] is not None],
                     [var.aval], {}, trips) if _is_float32(var.aval) else None
            for i, var in enumerate(eqn.outvars)
        )
        results = [self._made_by(node) for node in joins]
        return None, Inner("cond", tuple(bodies), joins=joins), results

    def _carry_in(self, inits: Sequence[Value | None], avals: Sequence[Any],
                  place: Place, trips: int) -> tuple[int | None, ...]:
        return tuple(
            self.add("carry_in", None, place, [] if init is None else [init], [aval],
                     {}, trips) if _is_float32(aval) else None
            for init, aval in zip(inits, avals, strict=True)
        )

    def _carry_out(self, carry_in: Sequence[int | None], outs: Sequence[Value | None],
                   place: Place, trips: int) -> tuple[int | None, ...]:
        """Adds what an iteration hands on, and closes the circle."""
        nodes: list[int | None] = []
        for first, out in zip(carry_in, outs, strict=True):
            if first is None:
                nodes.append(None)
                continue
            aval = self.nodes[first].avals[0]
            node = self.add("carry_out", None, place, [] if out is None else [out],
                            [aval], {}, trips)
            self.nodes[first].inputs.append(Value(aval, node))
            nodes.append(node)
        return tuple(nodes)

    def _loop(self, eqn: Any, place: Place, carry_in: Sequence[int | None],
              carry_out: Sequence[int | None], token: int, start: int) -> None:
        carries = tuple(
            (i, o) for i, o in zip(carry_in, carry_out, strict=True)
            if i is not None and o is not None
        )
        nodes = range(start, len(self.nodes))
        self.loops.append(Loop(eqn, place, carries, token, nodes))

    def _made_by(self, node: int | None) -> Value | None:
        return None if node is None else Value(self.nodes[node].avals[0], node)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(CALLS, _Builder.call),
    "cond": _Builder.cond,
    "scan": _Builder.scan,
    "while": _Builder.while_,
}


def _read(env: dict[Any, Value], atom: Any) -> Value | None:
    """Returns the value of a variable or literal; None if it is nothing to follow."""
    if hasattr(atom, "val"):
        number = _compat.literal_value(atom)
        return Value(atom.aval, constant=_number(number), made_of_data=False)
    return env.get(atom)


def _local(value: Value | None, var: Any) -> Value | None:
    """Returns the value as the other side of a boundary sees it: with its type."""
    if value is None or value.aval is var.aval:
        return value
    return value.at(var.aval, value.slice_of)


def _number(value: Any) -> Any:
    """Returns a constant as NumPy sees it, or None if it is unknown or very large."""
    if isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        array = np.asarray(value)
        return array if array.size <= _LARGEST_CONSTANT else None
    return None


def _is_numpy(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.ndarray, np.generic))


def _kept_number(eqn: Any, operands: Sequence[Value | None]) -> Any:
    """Returns the number that the result is, if one operand makes it known."""
    if eqn.primitive.name not in _KEEPS_NUMBER or len(operands) != 1:
        return None
    value = operands[0]
    if value is None or value.constant is None or np.ndim(value.constant) > 0:
        return None
    return -value.constant if eqn.primitive.name == "neg" else value.constant


def _shared_jaxprs(closed: Any) -> set[int]:
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


def held_jaxprs(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an equation holds and that are rewritten inside."""
    name = eqn.primitive.name
    if name in CALLS:
        return [eqn.params[CALLS[name][1]]]
    if name == "scan":
        return [eqn.params["jaxpr"]]
    if name == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return list(eqn.params["branches"]) if name == "cond" else []


def reads_float32(eqn: Any) -> bool:
    """Tells whether an equation has a float32 operand or result."""
    return any(_is_float32(v.aval) for v in [*eqn.invars, *eqn.outvars])
