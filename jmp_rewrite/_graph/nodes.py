"""The program as one graph: nodes, values and the jaxprs that hold them.

A jaxpr with all its sub-jaxprs becomes a flat list of nodes joined by float32 values.
Calls are transparent (a value inside is the value outside); a loop adds two nodes for
each carry and a branch one for each result, because those must agree on a dtype, and a
scan one for each result that it stacks, because a stack may be stored in another one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import ml_dtypes
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph.distinct import NOWHERE
from jmp_rewrite._graph.region import FLOAT32
from jmp_rewrite._graph.scopes import Place

HALVES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
# Nodes without an equation, which hold loops and branches together.
JOINTS = frozenset({"carry_in", "carry_out", "join", "stack_out"})
# Each of these is one of several values: the first or what an iteration hands on, or
# that of a branch.
EITHER = frozenset({"carry_in", "join"})
# Names of the casts at the edges of a kernel of half operands: down, and back up.
KERNEL_OPERAND, KERNEL_RESULT = "kernel_operand", "kernel_result"
# What a dimension counts that is a symbol when a program is exported.
SYMBOLIC = 64

_T = TypeVar("_T")


class Value:
    """A float32 value of the program (or a known number of another type).

    Attributes:
      aval: its type where it was made: shape and dtype.
      node: index of the node that makes it; -1 for arguments and constants.
      constant: its number, where that is known while tracing.
      argument: index of the program's argument that it is; of a captured array a number
        below -1; -1 if none.
      made_of_data: False for what comes from integers, literals and NumPy constants
        alone.
      slice_of: the loops whose `xs` it is a slice of, outermost first.
      result: which result of the node it is.
      distinct: dimensions along which its integers are distinct: `distinct.py`.
      name: of what is no float32 and no known number: what makes it, or a name of its
        own; None for others.
    """

    __slots__ = (
        "argument",
        "aval",
        "constant",
        "distinct",
        "made_of_data",
        "name",
        "node",
        "result",
        "slice_of",
    )

    def __init__(
        self,
        aval: Any,
        node: int = -1,
        constant: Any = None,
        argument: int = -1,
        made_of_data: bool = True,
        slice_of: tuple[int, ...] = (),
        distinct: frozenset[int] = NOWHERE,
        result: int = 0,
        name: Hashable = None,
    ) -> None:
        self.aval = aval
        self.node = node
        self.constant = constant
        self.argument = argument
        self.made_of_data = made_of_data
        self.slice_of = slice_of
        self.distinct = distinct
        self.result = result
        self.name = name

    @property
    def size(self) -> int:
        """How many elements it has."""
        return _elements(self.aval.shape)

    def unknown(self) -> Value:
        """Returns the same value, of whose numbers nothing is known."""
        if self.constant is None:
            return self
        return Value(
            self.aval,
            self.node,
            argument=self.argument,
            made_of_data=True,
            result=self.result,
            name=self.name,
        )

    def at(self, aval: Any, slice_of: tuple[int, ...] = ()) -> Value:
        """Returns the same value seen with another shape: a slice, or a stack."""
        constant, distinct = self.constant, self.distinct
        if self.aval.shape != aval.shape:
            constant = None if np.ndim(constant) else constant
            distinct = NOWHERE
        return Value(
            aval,
            self.node,
            constant,
            self.argument,
            self.made_of_data,
            slice_of,
            distinct,
            self.result,
            self.name,
        )


class Made:
    """What makes values that are no float32: indices, masks, keys.

    Attributes:
      eqn: an equation.
      name: its primitive's name.
      operands: what it reads; None for what has no name.
      drawn: its results are made of random bits alone.
    """

    __slots__ = "drawn", "eqn", "name", "operands"

    def __init__(self, eqn: Any, operands: Sequence[Value | None], drawn: bool) -> None:
        self.eqn = eqn
        self.name = eqn.primitive.name
        self.operands = operands
        self.drawn = drawn


class Count(NamedTuple):
    """The name of the number of an iteration, which a loop carries.

    Attributes:
      token: what `Value.slice_of` says of slices of the loop's `xs`: the number is one
        of `arange`.
    """

    token: int


class Node:
    """What has one precision: an equation, one lane of it, a carry, or a join.

    Attributes:
      index: its place in program order.
      name: the primitive's name, or that of a view for what is one; "carry_in",
        "carry_out", "stack_out" or "join" for what holds loops and branches together.
      eqn: the equation, or None.
      place: where it stands.
      inputs: its float32 operands; literals are left out.
      others: its other operands: indices, masks, keys, known numbers.
      avals: the types of its float32 results.
      size: how many elements these have.
      literals: operand position -> number, for operands that are known numbers.
      trips: how often it runs, 1 outside of loops.
      given: a cast of an argument of the program that was half when it came in.
      mixed: another floating-point dtype stands beside float32.
      drawn: it is made of random bits alone, as a draw or noise is.
      of_bits: the node of whose bits it is made, masked or shifted; -1 if they are an
        argument's, None if it is no such float.
      through: the nodes whose results it depends on through a kernel of half values.
      disjoint: of a `scatter-add`: no two updates meet; of a sum, also over
        windows: no two terms do.
    """

    __slots__ = (
        "avals",
        "disjoint",
        "drawn",
        "eqn",
        "given",
        "index",
        "inputs",
        "literals",
        "mixed",
        "name",
        "of_bits",
        "others",
        "place",
        "size",
        "through",
        "trips",
    )

    def __init__(
        self,
        index: int,
        name: str,
        eqn: Any,
        place: Place,
        inputs: list[Value],
        avals: list[Any],
        literals: dict[int, Any],
        trips: int,
    ) -> None:
        self.index = index
        self.name = name
        self.eqn = eqn
        self.place = place
        self.inputs = inputs
        self.avals = avals
        self.size = elements(avals)
        self.literals = literals
        self.trips = trips
        self.given = False
        self.mixed = False
        self.drawn = False
        self.others: Sequence[Value | None] = ()
        self.of_bits: int | None = None
        self.through: frozenset[int] = frozenset()
        self.disjoint = False


class Instance:
    """One use of a jaxpr.

    Attributes:
      jaxpr: the jaxpr, open or closed as its equation holds it.
      nodes: an entry an equation: a node's index, a tuple of them (one a lane, None
        where that lane is no float32), or None where nothing is float32.
      inner: equation index -> what it holds.
      instead: equation index -> (operand, the variable that is read in its place).
      partial: equation index -> the equation that adds up a partial sum in its place.
      arguments: the numbers of its parameters that are arguments of the program; none
        in a loop.
    """

    __slots__ = (
        "__weakref__",
        "arguments",
        "inner",
        "instead",
        "jaxpr",
        "nodes",
        "partial",
    )

    def __init__(self, jaxpr: Any, arguments: frozenset[int] = frozenset()) -> None:
        self.jaxpr = jaxpr
        self.arguments = arguments
        self.nodes: list[Any] = []
        self.inner: dict[int, Inner] = {}
        self.instead: dict[int, tuple[Any, Any]] = {}
        self.partial: dict[int, Any] = {}

    def operands(self, index: int, eqn: Any) -> list[Any]:
        """Returns the variables and literals that an equation reads."""
        operand, instead = self.instead.get(index, (None, None))
        return [instead if v is operand else v for v in eqn.invars]


@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """What an equation holds that is rewritten inside.

    Attributes:
      kind: "call", "custom_jvp", "custom_vjp", "custom_vmap", "shard_map", "scan",
        "while" or "cond".
      place: where it stands.
      bodies: the uses of its jaxprs, in the order of the parameters.
      carry_in: a node for each carry (None: not float32).
      carry_out: the node of what an iteration hands on, for each carry.
      stacks: a node for each result that the iterations of a scan stack.
      joins: a node for each result of a branch, or for each parameter of a shared body.
    """

    kind: str
    place: Place
    bodies: tuple[Instance, ...]
    carry_in: tuple[int | None, ...] = ()
    carry_out: tuple[int | None, ...] = ()
    stacks: tuple[int | None, ...] = ()
    joins: tuple[int | None, ...] = ()

    @property
    def joints(self) -> tuple[int | None, ...]:
        """All of these nodes."""
        return (*self.carry_in, *self.carry_out, *self.stacks, *self.joins)


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

    @property
    def length(self) -> int:
        """How often its body runs: a guess where nobody knows, 1 for a `while`."""
        length = self.eqn.params.get("length", 1)
        return length if isinstance(length, int) else SYMBOLIC


class Opaque(NamedTuple):
    """An equation that is left alone.

    Attributes:
      eqn: the equation; it holds a jaxpr or a kernel.
      place: where it stands.
      why: the reason.
      where: the user's source line, or that of the call it stands in.
    """

    eqn: Any
    place: Place
    why: str
    where: str


@dataclasses.dataclass(eq=False)
class Graph:
    """The whole program.

    Attributes:
      top: the use of the outermost jaxpr.
      nodes: all nodes, in program order.
      loops: all loops.
      arguments: the float32 arguments and captured arrays of the program.
      results: the float32 values that the program returns.
      opaque: the equations that are left alone.
      has_backward_rules: whether it holds a `custom_vjp`, whose backward pass is a
        Python function that nobody has traced yet.
    """

    top: Instance
    nodes: list[Node]
    loops: list[Loop]
    arguments: list[Value]
    results: list[Value]
    opaque: list[Opaque]
    has_backward_rules: bool
    _edges: tuple[list[list[int]], list[list[int]]] | None = None
    _large: list[list[Value]] | None = None

    def uses(self) -> list[Instance]:
        """Returns all uses of jaxprs, each once, the outermost first."""
        found: dict[Instance, None] = {}
        stack = [self.top]
        while stack:
            use = stack.pop()
            if use not in found:
                found[use] = None
                for inner in use.inner.values():
                    stack += inner.bodies
        return list(found)

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

    def innermost_loops(self) -> list[int]:
        """Returns for each node the number of its innermost loop; -1 if none."""
        inside = [-1] * len(self.nodes)
        by_size = sorted(enumerate(self.loops), key=lambda x: -len(x[1].nodes))
        for number, loop in by_size:
            for node in loop.nodes:
                inside[node] = number
        return inside

    def large_operands(self) -> list[list[Value]]:
        """Returns of each node the operands that have to be read to compute it."""
        if self._large is None:
            self._large = [
                [v for v in node.inputs if has_to_be_read(v, node.size)]
                for node in self.nodes
            ]
        return self._large


def has_to_be_read(value: Value, size: int) -> bool:
    """Whether an operand is data, and large beside what is made of it."""
    if value.constant is not None or not value.made_of_data:
        return False
    return 2 * value.size >= size


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
        for source in sorted(node.through):
            sources.append(source)
            readers[source].append(index)
        reads.append(sources)
    return reads, readers


def is_float32(aval: Any) -> bool:
    # NumPy's dtypes of one kind are one object.
    if getattr(aval, "dtype", None) is not FLOAT32:
        return False
    return type(aval) is jax.core.ShapedArray or not _compat.is_reference(aval)


def is_drawn(value: Value | None, nodes: Sequence[Node]) -> bool:
    """Whether a value is made of random bits alone."""
    if value is None or value.node >= 0:
        return value is not None and nodes[value.node].drawn
    return isinstance(value.name, Made) and value.name.drawn


def is_drawn_anew(eqn: Any) -> bool:
    """Whether an equation has other results than an equal one."""
    return bool(eqn.effects) or eqn.primitive.name == "rng_uniform"


def is_half(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in HALVES


def is_literal(atom: Any) -> bool:
    """Whether an atom is a literal."""
    return hasattr(atom, "val")


def is_backward(node: Node) -> bool:
    """Whether a node is one of a backward pass, and not computed once more."""
    return node.place.backward and not node.place.recomputed


def reads_float32(eqn: Any) -> bool:
    """Whether an equation has a float32 operand or result."""
    return any(is_float32(v.aval) for v in [*eqn.invars, *eqn.outvars])


def elements(avals: Sequence[Any]) -> int:
    """Returns how many elements values of these types have together."""
    return sum([_elements(a.shape) for a in avals])


@functools.lru_cache(maxsize=4096)
def _elements(shape: tuple[Any, ...]) -> int:
    return math.prod(d if isinstance(d, int) else SYMBOLIC for d in shape)


class _Edges(Protocol[_T]):
    def __getitem__(self, node: _T, /) -> Iterable[_T]: ...


def reached(
    starts: Iterable[_T],
    edges: _Edges[_T],
    enters: Callable[[_T], bool] | None = None,
) -> set[_T]:
    """Returns these nodes, and those that edges lead to from them.

    Args:
      starts: where to begin.
      edges: node -> the next ones.
      enters: whether a path goes on through a node; None for all nodes.
    """
    found = set(starts)
    stack = list(found)
    while stack:
        for node in edges[stack.pop()]:
            if node not in found and (enters is None or enters(node)):
                found.add(node)
                stack.append(node)
    return found
