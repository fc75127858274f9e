"""What a scan adds up over its iterations, as one product behind it.

The backward pass of a recurrent network adds a product to each weight's gradient in
every iteration. In half that sum would stall, 256 + 1 being 256 in bfloat16, so it is
float32, and then each iteration reads and writes it at four bytes an element: more than
half of a bidirectional LSTM's cycles on a TPU v5e. But a product adds up what it
contracts in float32 as it goes, and over as many iterations as one likes:

    sum_t a_t' b_t  =  [a_1; ...; a_T]' [b_1; ...; b_T]

So the operands are stacked, in half, as the forward pass has stacked most of them
already, and the sum is one product behind the loop. What the iterations made of such an
operand and stacked, the gradient of the loop's inputs, is another one; and so is the
sum of the operand itself, the gradient of a bias.

This is done where it moves fewer bytes, and where the new stacks are no larger than
those that the loop reads: a loop over microbatches, which is there to save memory, has
none of its activations stacked. See `benchmarks/NOTES.md`, 35.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from jmp_rewrite import _compat
from jmp_rewrite._graph.nodes import (
    Graph,
    Inner,
    Instance,
    elements,
    is_float32,
    is_literal,
)
from jmp_rewrite._precision.cost import reads_half
from jmp_rewrite._precision.pins import Pins

# A sum over the iterations may be taken before these as well as after them.
_LINEAR = frozenset(
    {
        "add",
        "add_any",
        "concatenate",
        "copy",
        "expand_dims",
        "neg",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "sub",
        "transpose",
    }
)
_ADDS = ("add", "add_any")
# These compute nothing: of equal operands they have equal results, rounded or not.
_MOVES = _LINEAR - {"add", "add_any", "sub"}

# Bytes that an iteration moves: a sum is read and written in float32, an operand is
# written and read again in half.
_SUM_BYTES, _STACK_BYTES = 8, 4


class Sums(NamedTuple):
    """What of a scan is computed once, behind it.

    Attributes:
      carries: the carries that only add up products, by position.
      results: the results of the body that are stacked and are products of what is
        stacked for these, by position.
      equations: indices of the equations of the body that stand behind the loop.
      stacks: the variables of the body whose half copies are stacked.
      stack_of: variable that these equations read -> the one that is stacked for it.
    """

    carries: tuple[int, ...]
    results: tuple[int, ...]
    equations: frozenset[int]
    stacks: tuple[Any, ...]
    stack_of: dict[Any, Any]


NO_SUMS = Sums((), (), frozenset(), (), {})


def sums_behind_loops(
    graph: Graph, pins: Pins, halves: Sequence[bool]
) -> dict[Instance, Sums]:
    """Returns for the bodies of scans what is computed behind them.

    Args:
      graph: the program, a whole step.
      pins: what numerics said.
      halves: which results are half, that is, stored.
    """
    found = {}
    for eqn, inner in _scans(graph):
        (use,) = inner.bodies
        body = _Body(pins, halves, eqn, use)
        if any(map(body.is_full_product, range(len(body.eqns)))):
            body.read()
            sums = body.sums()
            if sums.carries:
                found[use] = sums
    return found


def _scans(graph: Graph) -> Iterator[tuple[Any, Inner]]:
    for use in graph.uses():
        eqns = _compat.open_jaxpr(use.jaxpr).eqns
        for index, inner in use.inner.items():
            length = eqns[index].params.get("length")
            if inner.kind == "scan" and isinstance(length, int) and length > 1:
                yield eqns[index], inner


class _Terms(NamedTuple):
    """What a sum adds up.

    Attributes:
      equations: what makes it of products, these included.
      products: the products.
      leaves: values that are summed up themselves.
    """

    equations: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()
    leaves: frozenset[Any] = frozenset()

    def and_(self, other: _Terms) -> _Terms:
        return _Terms(*(a | b for a, b in zip(self, other, strict=True)))


def _together(sums: Iterable[_Terms]) -> _Terms:
    return functools.reduce(_Terms.and_, sums, _Terms())


class _Body:
    """The body of a scan, and who makes and reads what in it."""

    def __init__(
        self, pins: Pins, halves: Sequence[bool], eqn: Any, use: Instance
    ) -> None:
        self._pins, self._halves, self._use = pins, halves, use
        body = _compat.open_jaxpr(use.jaxpr)
        self.eqns = body.eqns
        consts, carries = _compat.scan_split(eqn.params)
        self._consts = {*body.constvars, *body.invars[:consts]}
        self._carries = body.invars[consts : consts + carries]
        self._xs = body.invars[consts + carries :]
        self._handed_on = body.outvars[:carries]
        self._stacked = body.outvars[carries:]

    # ---- equations

    def is_full_product(self, index: int) -> bool:
        """Tells a product of half operands with a float32 result."""
        return self._is_full(index) and self._is_product(index)

    def _is_product(self, index: int) -> bool:
        node, eqn = self._node(index), self.eqns[index]
        if node < 0 or eqn.primitive.name != "dot_general":
            return False
        return reads_half(node, self._pins) and all(
            is_float32(v.aval) and not is_literal(v) for v in eqn.invars
        )

    def _is_full(self, index: int) -> bool:
        """Tells an equation of its own whose results are float32."""
        return self._node(index) >= 0 and not self._is_half(index)

    def _is_half(self, index: int) -> bool:
        node = self._node(index)
        return node >= 0 and self._halves[node]

    def _node(self, index: int) -> int:
        entry = self._use.nodes[index]
        alone = isinstance(entry, int) and index not in self._use.inner
        return entry if alone else -1

    # ---- who makes and reads what

    def read(self) -> None:
        """Notes who makes what, who reads it, and what is the same."""
        self._maker: dict[Any, int] = {}
        self._readers: dict[Any, set[int]] = {}
        self._varies = {*self._carries, *self._xs}
        self._first: dict[Any, Any] = {}
        self._rounded: dict[Any, Any] = {}
        self._terms: dict[Any, _Terms | None] = {}
        known: dict[Any, Sequence[Any]] = {}
        for index, eqn in enumerate(self.eqns):
            operands = self._use.operands(index, eqn)
            variables = [v for v in operands if not is_literal(v)]
            for var in variables:
                self._readers.setdefault(var, set()).add(index)
            if not self._varies.isdisjoint(variables):
                self._varies.update(eqn.outvars)
            alike: Sequence[Any] = eqn.outvars
            if eqn.primitive.name in _MOVES and len(variables) == len(operands):
                firsts = tuple(map(self._same, variables))
                key = eqn.primitive, firsts, str(eqn.params)
                alike = known.setdefault(key, alike)
            for var, first in zip(eqn.outvars, alike, strict=True):
                self._maker[var] = index
                self._first[var] = first
                if self._is_half(index):
                    self._rounded.setdefault(first, var)
        outvars = (*self._handed_on, *self._stacked)
        self._returned = collections.Counter(v for v in outvars if not is_literal(v))

    def _same(self, var: Any) -> Any:
        """Returns the first variable that holds the same value."""
        return self._first.get(var, var)

    def _stack_of(self, var: Any) -> Any:
        """Returns the variable that is stacked for this one: one that is half."""
        first = self._same(var)
        return self._rounded.get(first, first)

    # ---- sums

    def sums(self) -> Sums:
        """Returns what is computed behind the loop."""
        found = {k: self._sum(k) for k in range(len(self._carries))}
        sums = self._alone({k: t for k, t in found.items() if t is not None})
        sums = self._alone(self._worthwhile(sums))
        terms = _together(sums.values())
        read = [*self._operands(terms.products), *terms.leaves]
        stack_of = {v: self._stack_of(v) for v in read}
        results, equations = [], set(terms.equations)
        for position, var in enumerate(self._stacked, len(self._carries)):
            product = self._product_of_stacks(var, stack_of)
            if product >= 0:
                results.append(position)
                equations.add(product)
                varying = [v for v in self._operands([product]) if v in self._varies]
                stack_of.update((v, self._stack_of(v)) for v in varying)
        return Sums(
            tuple(sums),
            tuple(results),
            frozenset(equations),
            tuple(map(self._stack_of, self._new_stacks(terms))),
            stack_of,
        )

    def _sum(self, position: int) -> _Terms | None:
        """Returns what a carry adds up; None if it is more than a sum of products."""
        var, end = self._carries[position], self._handed_on[position]
        terms = _Terms()
        while var is not end:
            readers = self._readers.get(var, ())
            if len(readers) != 1 or self._returned[var]:
                return None
            (index,) = readers
            eqn = self.eqns[index]
            others = [v for v in eqn.invars if v is not var]
            if eqn.primitive.name not in _ADDS or len(others) != 1:
                return None
            made_of = self._made_of(others[0])
            if made_of is None or not self._is_full(index):
                return None
            terms = _together([terms, made_of, _Terms(frozenset({index}))])
            (var,) = eqn.outvars
        return terms if terms.equations else None

    def _made_of(self, var: Any) -> _Terms | None:
        """Returns of which products a value is made by linear operations alone."""
        if is_literal(var) or var not in self._maker:
            return None
        if var not in self._terms:
            self._terms[var] = self._made_by(self._maker[var])
        return self._terms[var]

    def _made_by(self, index: int) -> _Terms | None:
        eqn, here = self.eqns[index], frozenset({index})
        if self.is_full_product(index):
            varies = all(v in self._varies for v in eqn.invars)
            return _Terms(here, here) if varies else None
        if not self._is_full(index):
            return None
        if eqn.primitive.name == "reduce_sum":
            return _Terms(here, leaves=frozenset(eqn.invars))
        if eqn.primitive.name not in _LINEAR:
            return None
        terms = [self._made_of(v) for v in eqn.invars]
        known = [t for t in terms if t is not None]
        return _together([_Terms(here), *known]) if len(known) == len(terms) else None

    def _alone(self, sums: dict[int, _Terms]) -> dict[int, _Terms]:
        """Returns the sums of which nothing else reads any part."""
        while True:
            kept: dict[int, _Terms] = {}
            terms = _together(sums.values())
            stacked = set(map(self._same, self._operands(terms.products)))
            ends = {self._handed_on[k] for k in sums}
            for position, own in sums.items():
                alone = all(
                    self._is_read_in(terms.equations, ends, i) for i in own.equations
                )
                alone &= all(self._is_stacked(v, stacked) for v in own.leaves)
                read = self._operands(own.products)
                if alone and not any(
                    self._is_made_by(v, terms.equations) for v in read
                ):
                    kept[position] = own
            if len(kept) == len(sums):
                return kept
            sums = kept

    def _is_read_in(self, equations: Set[int], ends: Set[Any], index: int) -> bool:
        return all(
            self._readers.get(v, set()) <= equations
            and self._returned[v] == (v in ends)
            for v in self.eqns[index].outvars
        )

    def _is_made_by(self, var: Any, equations: Set[int]) -> bool:
        """Tells an operand that is a sum itself, or what is stacked for it."""
        makers = {self._maker.get(v, -1) for v in (var, self._stack_of(var))}
        return not makers.isdisjoint(equations)

    def _is_stacked(self, var: Any, stacked: Set[Any]) -> bool:
        """Tells a value that is read rounded, and whose rounded copies are stacked."""
        index = self._maker.get(var, -1)
        return index >= 0 and self._is_half(index) and self._same(var) in stacked

    def _operands(self, products: Iterable[int]) -> list[Any]:
        return [v for i in sorted(products) for v in self.eqns[i].invars]

    def _new_stacks(self, terms: _Terms) -> list[Any]:
        """Returns what products contract, each value once, that is no stack yet."""
        values = dict.fromkeys(map(self._same, self._operands(terms.products)))
        return [v for v in values if v not in self._xs]

    def _worthwhile(self, sums: dict[int, _Terms]) -> dict[int, _Terms]:
        """Returns the sums that move fewer bytes and need no more memory."""
        room = elements([v.aval for v in self._xs if is_float32(v.aval)])
        kept: dict[int, _Terms] = {}
        for group in self._groups(sums):
            added = elements([self._carries[k].aval for k in group])
            stacks = self._new_stacks(_together(sums[k] for k in group))
            stacked = elements([v.aval for v in stacks])
            if added * _SUM_BYTES > stacked * _STACK_BYTES and stacked <= room:
                room -= stacked
                kept.update((k, sums[k]) for k in group)
        return kept

    def _groups(self, sums: dict[int, _Terms]) -> list[set[int]]:
        """Returns the sums that have products, or what these contract, in common."""
        groups: list[tuple[set[Any], set[int]]] = []
        for position, terms in sums.items():
            read = {*self._operands(terms.products), *terms.leaves}
            parts = {*map(self._same, read), *terms.equations} - set(self._xs)
            members = {position}
            apart = []
            for others, group in groups:
                if parts.isdisjoint(others):
                    apart.append((others, group))
                else:
                    parts, members = parts | others, members | group
            groups = [*apart, (parts, members)]
        return [members for _, members in groups]

    def _product_of_stacks(self, var: Any, stack_of: dict[Any, Any]) -> int:
        """Returns what makes a stacked result of a stack and a constant; -1 if not."""
        if is_literal(var) or self._readers.get(var) or self._returned[var] != 1:
            return -1
        index = self._maker.get(var, -1)
        if index < 0 or not self._is_product(index):
            return -1
        eqn = self.eqns[index]
        fixed = [v in self._consts for v in eqn.invars]
        stacked = [self._stack_of(v) in stack_of.values() for v in eqn.invars]
        one_each = fixed == [not x for x in stacked] and any(fixed) and any(stacked)
        return index if one_each and eqn.params["out_sharding"] is None else -1
