"""Stacks that a later loop computes again in place of reading them.

Differentiating a loop stacks whatever its backward pass multiplies by. Of a gate that
is both `s` and `s (1 - s)`, the derivative of the sigmoid; of a `tanh` both `t` and
`1 - t t`. No compiler sees through two loops, so all of it is written and kept. But
what is a function of one stacked value alone is as cheap to compute again from a slice
of that stack, which the backward loop reads as well: five of the twelve stacks of an
LSTM need not be there.

By hand such a function is computed from the rounded value too. Only polynomials of a
sigmoid or a `tanh` are: what lies between -1 and 1 is rounded by no more than half an
epsilon, and a polynomial of it by a few. A logarithm or a quotient of `1 - s` could
become infinite. What is stacked in float32 is computed from a float32 stack alone, and
nothing for which a user asked for float32. See `benchmarks/NOTES.md`, 36.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jmp_rewrite import _compat
from jmp_rewrite._graph.nodes import Graph, Inner, Instance, is_float32
from jmp_rewrite._precision.pins import NO_PRODUCT, STATE, Pins

# Results of these lie between -1 and 1.
_BOUNDED = frozenset({"logistic", "tanh"})
_POLYNOMIALS = frozenset(
    {
        "add",
        "add_any",
        "copy",
        "integer_pow",
        "mul",
        "neg",
        "one_minus_square",
        "square",
        "sub",
    }
)
# Longer computations are not followed.
_LONGEST = 4
# Reasons for float32 that nobody asked for.
_UNASKED = (None, NO_PRODUCT, STATE)


class Chain(NamedTuple):
    """How a value is computed again.

    Attributes:
      base: the position of what it is computed from: among the results of the body that
        stacks it, or the parameters of the one that computes it. The parameter's own
        position says that it is given a slice of the base's stack.
      source: this value's variable, in the body that stacks it.
      equations: what computes it, in order.
      target: its variable.
    """

    base: int
    source: Any
    equations: tuple[Any, ...]
    target: Any


class Rest(NamedTuple):
    """What is left of a scan's body.

    Attributes:
      left_out: position among its results -> how others compute it again.
      computed: position among its parameters -> how it is computed from the parameter
        that `base` tells.
    """

    left_out: Mapping[int, Chain] = MappingProxyType({})
    computed: Mapping[int, Chain] = MappingProxyType({})

    def kept(self, outs: Sequence[Any]) -> list[Any]:
        """Returns of the results of a body, in its order, those that it still has."""
        return [x for i, x in enumerate(outs) if i not in self.left_out]

    @property
    def key(self) -> Any:
        """What tells it from others of the same jaxpr."""
        computed = tuple((p, c.base, id(c.target)) for p, c in self.computed.items())
        return tuple(self.left_out), computed


class Again(NamedTuple):
    """What loops compute again.

    Attributes:
      left_out: body -> position among its results -> how others compute it again.
      computed: body -> position among its parameters -> how it is computed from the
        parameter that `base` tells.
    """

    left_out: dict[Instance, dict[int, Chain]]
    computed: dict[Instance, dict[int, Chain]]


def computed_again_in_loops(
    graph: Graph,
    pins: Pins,
    halves: Sequence[bool],
) -> Again:
    """Returns which stacks are not there, and what computes them again.

    Args:
      graph: the program, a whole step.
      pins: what numerics said.
      halves: which nodes are emitted in half.
    """
    again = Again({}, {})
    for use in graph.uses():
        _Scans(use, pins, halves).add_to(again)
    return again


class _Scans:
    """The scans of one use of a jaxpr, and what they hand to each other."""

    def __init__(
        self,
        use: Instance,
        pins: Pins,
        halves: Sequence[bool],
    ) -> None:
        self._pins, self._halves = pins, halves
        body = _compat.open_jaxpr(use.jaxpr)
        self._eqns = body.eqns
        self._outvars = body.outvars
        self._scans = {i: x for i, x in use.inner.items() if x.kind == "scan"}
        self._given: dict[tuple[int, Any], int] = {}

    def add_to(self, again: Again) -> None:
        """Adds what these scans compute again."""
        if len(self._scans) < 2:
            return
        readers: dict[Any, list[tuple[int, int]]] = {}
        for index, eqn in enumerate(self._eqns):
            for position, atom in enumerate(eqn.invars):
                if not hasattr(atom, "val"):
                    readers.setdefault(atom, []).append((index, position))
        for var in self._outvars:
            if not hasattr(var, "val"):
                readers.setdefault(var, []).append((-1, 0))
        for index, inner in self._scans.items():
            (use,), eqn = inner.bodies, self._eqns[index]
            for position, chain in _chains(eqn, inner, self._pins).items():
                uses = readers.get(eqn.outvars[position], [])
                slices = [self._is_slice(reader, p) for reader, p in uses]
                if not uses or not all(slices) or not self._is_emitted(use):
                    continue
                if not self._is_as_exact(inner, eqn, position, chain):
                    continue
                again.left_out.setdefault(use, {})[position] = chain
                for reader, p in uses:
                    (other,) = self._scans[reader].bodies
                    base = self._base(reader, p, eqn.outvars[chain.base])
                    computed = again.computed.setdefault(other, {})
                    computed[p] = chain._replace(base=base)

    def _is_as_exact(self, inner: Inner, eqn: Any, position: int, chain: Chain) -> bool:
        """Tells a stack that is half, or one whose base is no more rounded than it."""
        _, carries = _compat.scan_split(eqn.params)
        target, base = (inner.stacks[p - carries] for p in (position, chain.base))
        if target is None:
            return False
        return self._halves[target] or base is None or not self._halves[base]

    def _is_emitted(self, use: Instance) -> bool:
        return any(self._halves[n] for n in use.nodes if isinstance(n, int))

    def _is_slice(self, index: int, position: int) -> bool:
        """Tells an operand of which each iteration reads a slice, and nothing else."""
        if index not in self._scans:
            return False
        (use,) = self._scans[index].bodies
        first = sum(_compat.scan_split(self._eqns[index].params))
        return position >= first and self._is_emitted(use)

    def _base(self, index: int, position: int, base: Any) -> int:
        """Returns which operand of a loop the base is; the one itself if none is."""
        eqn = self._eqns[index]
        given = self._given.setdefault((index, base), position)
        positions = range(sum(_compat.scan_split(eqn.params)), len(eqn.invars))
        return next((p for p in positions if eqn.invars[p] is base), given)


def _chains(eqn: Any, inner: Inner, pins: Pins) -> dict[int, Chain]:
    """Returns the stacks that are functions of another one, by position."""
    (use,) = inner.bodies
    body = _compat.open_jaxpr(use.jaxpr)
    _, carries = _compat.scan_split(eqn.params)
    maker = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}
    stacked: dict[Any, int] = {}
    chains: dict[int, Chain] = {}
    results = [(p, v) for p, v in enumerate(body.outvars) if not hasattr(v, "val")]
    results.sort(key=lambda pair: maker.get(pair[1], -1))
    for position, var in results:
        if position < carries or var in stacked or not is_float32(var.aval):
            continue
        node = inner.stacks[position - carries]
        source, equations = _polynomial_of(var, body.eqns, maker, stacked)
        asked = [use.nodes[i] for i in (*equations, maker.get(source, -1)) if i >= 0]
        unasked = all(isinstance(n, int) and pins.full[n] in _UNASKED for n in asked)
        if source is not None and node is not None and unasked:
            made = tuple(body.eqns[i] for i in sorted(equations))
            chains[position] = Chain(stacked[source], source, made, var)
        else:
            stacked[var] = position
    return chains


def _polynomial_of(
    var: Any, eqns: Sequence[Any], maker: dict[Any, int], stacked: dict[Any, int]
) -> tuple[Any, set[int]]:
    """Returns the one stacked gate that a value is computed from, and by what."""
    sources: set[Any] = set()
    equations: set[int] = set()
    left = [var]
    while left:
        one = left.pop()
        if one in stacked:
            sources.add(one)
            continue
        index = maker.get(one, -1)
        if index < 0 or not _is_polynomial(eqns[index]) or len(equations) == _LONGEST:
            return None, set()
        equations.add(index)
        left += [v for v in eqns[index].invars if not hasattr(v, "val")]
    source = sources.pop() if len(sources) == 1 else None
    index = maker.get(source, -1)
    if index < 0 or eqns[index].primitive.name not in _BOUNDED:
        return None, set()
    return source, equations


def _is_polynomial(eqn: Any) -> bool:
    return eqn.primitive.name in _POLYNOMIALS and eqn.params.get("y", 1) > 0
