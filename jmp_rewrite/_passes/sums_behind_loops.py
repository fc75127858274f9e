"""What a scan adds up over its iterations, as one product behind it."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

from jmp_rewrite import _compat
from jmp_rewrite._graph import elements
from jmp_rewrite._passes.behind import put_behind
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import is_float, is_float32, is_half_product, is_widening
from jmp_rewrite._rules import ADDS, LINEAR, MOVES


def sums_behind_loops(editor: Editor) -> None:
    """What a loop adds up of products is one product of stacks, behind the loop.

    The backward pass of a recurrent network adds a product to each weight's gradient in
    every iteration. In half that sum would stall, 256 + 1 being 256 in bfloat16, so it
    is float32, and then each iteration reads and writes it at four bytes an element.
    But a product adds up what it contracts in float32 as it goes, and over as many
    iterations as one likes:

        sum_t a_t' b_t  =  [a_1; ...; a_T]' [b_1; ...; b_T]

    So the operands are stacked, in half, as the forward pass has stacked most of them
    already, and the sum is one product behind the loop. What the iterations made of
    such an operand and stacked, the gradient of the loop's inputs, is another one; and
    so is the sum of the operand itself, the gradient of a bias. This is done where it
    moves fewer bytes, and where the new stacks are no larger than those that the loop
    reads: a loop over microbatches, which is there to save memory, has none of its
    activations stacked.

    On all devices, in whole train steps.

    Gain: more than half of a bidirectional LSTM's cycles on a TPU v5e
    (`benchmarks/NOTES.md`, 35).
    """
    for body in reversed(editor.bodies):  # inner loops first, and later ones
        for index, eqn in reversed(list(body.find("scan"))):
            sums = _sums_of(editor, body, index, eqn)
            if sums is not None and sums.carries:
                put_behind(editor, body, index, sums)
                editor.commit()


def _sums_of(editor: Editor, body: Body, index: int, eqn: Any) -> Sums | None:
    length = eqn.params.get("length")
    if not isinstance(length, int) or length < 2:
        return None
    if any(m.rewritten for m in editor.marks(body, index)):
        return None
    (inner,) = body.held[index]
    loop = _Loop(editor, inner, eqn)
    if not any(map(loop.is_full_product, range(len(inner.eqns)))):
        return None
    loop.read()
    return loop.sums()


# These compute nothing: of equal operands they have equal results, rounded or not.
_CAST = "convert_element_type"
_MOVES = MOVES | {_CAST}

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
      stacks: the half variables of the body that are stacked for these.
      stack_of: variable that these equations read -> the one that is stacked for it.
      given: variable of the body -> the parameter that it is a slice, or a cast, of.
    """

    carries: tuple[int, ...]
    results: tuple[int, ...]
    equations: frozenset[int]
    stacks: tuple[Any, ...]
    stack_of: dict[Any, Any]
    given: dict[Any, Any]


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


class _Numbers:
    """Numbers values: equal ones, moved and cast in any order, have one number."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._terms: list[Any] = []
        self._of: dict[Any, int] = {}

    def of_results(self, eqn: Any) -> list[int]:
        """Returns the numbers of the results of a cast or a move."""
        read = tuple(self._of[v] if v in self._of else self._own(v) for v in eqn.invars)
        params = str(eqn.params)
        if eqn.primitive.name == _CAST:
            found = [self._cast(read[0], params)]
        else:
            count = range(len(eqn.outvars))
            found = [self._number((eqn.primitive, read, params, k)) for k in count]
        self._of.update(zip(eqn.outvars, found, strict=True))
        return found

    def _own(self, var: Any) -> int:
        self._of[var] = self._number((None, (), "", var))
        return self._of[var]

    def _cast(self, number: int, params: str) -> int:
        """Numbers a cast of what is moved as what is cast and moved then."""
        primitive, read, how, k = self._terms[number]
        if primitive is None or primitive == _CAST:
            return self._number((_CAST, (number,), params, 0))
        inside = tuple(self._cast(n, params) for n in read)
        return self._number((primitive, inside, how, k))

    def _number(self, term: Any) -> int:
        if term not in self._known:
            self._known[term] = len(self._terms)
            self._terms.append(term)
        return self._known[term]


class _Loop:
    """The body of a scan, and who makes and reads what in it."""

    def __init__(self, editor: Editor, body: Body, eqn: Any) -> None:
        self._half, self._body, self.eqns = editor.half, body, body.eqns
        consts, carries = _compat.scan_split(eqn.params)
        self._consts = set(body.invars[:consts])
        self._carries = body.invars[consts : consts + carries]
        self._xs = set(body.invars[consts + carries :])
        self._handed_on = body.outvars[:carries]
        self._stacked = body.outvars[carries:]

    # ---- equations

    def is_full_product(self, index: int) -> bool:
        """Whether it is a product of half operands with a float32 result."""
        return self._is_full(index) and self._is_product(index)

    def _is_product(self, index: int) -> bool:
        eqn = self.eqns[index]
        if eqn.primitive.name != "dot_general":
            return False
        return is_half_product(eqn, self._half) and not any(
            map(_is_literal, eqn.invars)
        )

    def _is_full(self, index: int) -> bool:
        """Whether an equation that holds nothing has float32 results."""
        outvars = self.eqns[index].outvars
        return index not in self._body.held and bool(outvars) and is_float32(outvars[0])

    # ---- who makes and reads what

    def read(self) -> None:
        """Notes who makes what, who reads it, and what is the same."""
        self._maker = self._body.maker
        self._readers: dict[Any, set[int]] = {}
        self._varies = {*self._carries, *self._xs}
        self._first: dict[Any, Any] = {}
        self._given = {v: v for v in (*self._consts, *self._xs)}
        self._terms: dict[Any, _Terms | None] = {}
        numbers = _Numbers()
        first: dict[int, Any] = {}
        for index, eqn in enumerate(self.eqns):
            variables = [v for v in eqn.invars if not _is_literal(v)]
            for var in variables:
                self._readers.setdefault(var, set()).add(index)
            if not self._varies.isdisjoint(variables):
                self._varies.update(eqn.outvars)
            if eqn.primitive.name in _MOVES and len(variables) == len(eqn.invars):
                alike = zip(eqn.outvars, numbers.of_results(eqn), strict=True)
                self._first.update((v, first.setdefault(n, v)) for v, n in alike)
            if (
                eqn.primitive.name == _CAST
                and variables
                and variables[0] in self._given
            ):
                if eqn.outvars[0].aval.dtype == self._half:
                    self._given[eqn.outvars[0]] = self._given[variables[0]]
        outvars = (*self._handed_on, *self._stacked)
        self._returned = collections.Counter(v for v in outvars if not _is_literal(v))

    def _same(self, var: Any) -> Any:
        """Returns the first variable that holds the same value."""
        return self._first.get(var, var)

    def _is_slice(self, var: Any) -> bool:
        return self._given.get(var) in self._xs

    # ---- sums

    def sums(self) -> Sums:
        """Returns the sums and products that are computed behind the loop."""
        found = {k: self._sum(k) for k in range(len(self._carries))}
        sums = self._alone({k: t for k, t in found.items() if t is not None})
        sums = self._alone(self._worthwhile(sums))
        terms = _together(sums.values())
        read = [*self._operands(terms.products), *terms.leaves]
        stack_of = {v: self._same(v) for v in read}
        results, equations = [], set(terms.equations)
        for position, var in enumerate(self._stacked, len(self._carries)):
            products = self._products_of_stacks(var, stack_of)
            if products:
                results.append(position)
                equations.update(products)
                varying = [v for v in self._operands(products) if v in self._varies]
                stack_of.update((v, self._same(v)) for v in varying)
        return Sums(
            tuple(sums),
            tuple(results),
            frozenset(equations),
            tuple(map(self._same, self._new_stacks(terms))),
            stack_of,
            self._given,
        )

    def _sum(self, position: int) -> _Terms | None:
        """Returns the terms of a carry; None if it is more than a sum of products."""
        var, end = self._carries[position], self._handed_on[position]
        terms = _Terms()
        while var is not end:
            readers = self._readers.get(var, ())
            if len(readers) != 1 or self._returned[var]:
                return None
            (index,) = readers
            eqn = self.eqns[index]
            others = [v for v in eqn.invars if v is not var]
            if eqn.primitive.name not in ADDS or len(others) != 1:
                return None
            made_of = self._made_of(others[0])
            if made_of is None or not self._is_full(index):
                return None
            terms = _together([terms, made_of, _Terms(frozenset({index}))])
            (var,) = eqn.outvars
        return terms if terms.equations else None

    def _made_of(self, var: Any) -> _Terms | None:
        """Returns of which products a value is made by linear operations alone."""
        if _is_literal(var) or var not in self._maker:
            return None
        stack = [] if var in self._terms else [var]
        while stack:
            index = self._maker[stack[-1]]
            unknown = [v for v in self._linear(index) if v not in self._terms]
            if not unknown:
                self._terms[stack.pop()] = self._made_by(index)
            stack += unknown
        return self._terms[var]

    def _linear(self, index: int) -> list[Any]:
        """Returns of what values of the body an equation is a linear operation."""
        eqn = self.eqns[index]
        if eqn.primitive.name not in LINEAR or not self._is_full(index):
            return []
        read = (v for v in eqn.invars if not _is_literal(v))
        return [v for v in read if v in self._maker]

    def _made_by(self, index: int) -> _Terms | None:
        eqn, here = self.eqns[index], frozenset({index})
        if self.is_full_product(index):
            varies = all(v in self._varies for v in eqn.invars)
            return _Terms(here, here) if varies else None
        if not self._is_full(index):
            return None
        if eqn.primitive.name == "reduce_sum":
            cast = self._body.made_by(eqn.invars[0], _CAST)
            if not is_widening(cast, self._half):
                return None  # it is read unrounded
            return _Terms(here, leaves=frozenset(cast.invars))
        if eqn.primitive.name not in LINEAR:
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
                alone &= all(self._same(v) in stacked for v in own.leaves)
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
        """Whether an operand is a sum itself, or what is stacked for it."""
        makers = {self._maker.get(v, -1) for v in (var, self._same(var))}
        return not makers.isdisjoint(equations)

    def _operands(self, products: Iterable[int]) -> list[Any]:
        return [v for i in sorted(products) for v in self.eqns[i].invars]

    def _new_stacks(self, terms: _Terms) -> list[Any]:
        """Returns the operands of products, each once, that are no stacks yet."""
        values = dict.fromkeys(map(self._same, self._operands(terms.products)))
        return [v for v in values if not self._is_slice(v)]

    def _worthwhile(self, sums: dict[int, _Terms]) -> dict[int, _Terms]:
        """Returns the sums that move fewer bytes and need no more memory."""
        room = elements([v.aval for v in self._xs if is_float(v)])
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
            values = {v for v in map(self._same, read) if not self._is_slice(v)}
            parts = {*values, *terms.equations}
            members = {position}
            apart = []
            for others, group in groups:
                if parts.isdisjoint(others):
                    apart.append((others, group))
                else:
                    parts, members = parts | others, members | group
            groups = [*apart, (parts, members)]
        return [members for _, members in groups]

    def _products_of_stacks(self, var: Any, stack_of: dict[Any, Any]) -> list[int]:
        """Returns the product of a stack and a constant that makes a stacked result."""
        if _is_literal(var) or self._readers.get(var) or self._returned[var] != 1:
            return []
        index = self._maker.get(var, -1)
        if index < 0 or not self._is_product(index):
            return []
        eqn = self.eqns[index]
        fixed = [self._given.get(v) in self._consts for v in eqn.invars]
        stacked = [self._same(v) in stack_of.values() for v in eqn.invars]
        one_each = fixed == [not x for x in stacked] and any(fixed) and any(stacked)
        return [index] if one_each and eqn.params["out_sharding"] is None else []


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")
