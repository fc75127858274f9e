"""The one way in which a pass edits a program.

A program is its bodies: each distinct jaxpr once, however often it is called. A body
knows who makes and who reads each of its variables. Edits are collected while a pass
runs, so that the pass sees the program as it found it, and are applied by `commit`.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._graph import PASS, TOP, Place, inner_place
from jmp_rewrite._passes.by_device import Where, by_device, inlined
from jmp_rewrite._passes.program import ROUNDING, Program
from jmp_rewrite._rules import held_jaxprs, with_held
from jmp_rewrite._source import name_of


class Body:
    """One jaxpr of a program, with its def-use index.

    Attributes:
      jaxpr: as the first equation that holds it does, open or closed.
      eqns: its equations.
      outvars: its results.
      calls: (body, index of the equation) for each place that holds it.
      held: index of an equation -> the bodies that it holds.
      names: how often each primitive occurs.
      parameter: variable -> its position among the parameters.
      data: its values that depend on inputs, once somebody asked.
      edits: what a pass has asked for.
    """

    def __init__(self, jaxpr: Any) -> None:
        body = _compat.open_jaxpr(jaxpr)
        self.jaxpr = jaxpr
        self.invars: Sequence[Any] = body.invars
        self.eqns: list[Any] = body.eqns
        self.outvars: Sequence[Any] = body.outvars
        self.calls: list[tuple[Body, int]] = []
        self.held: dict[int, tuple[Body, ...]] = {}
        self.parameter = {v: i for i, v in enumerate(self.invars)}
        self.edits = _Edits()
        self.is_changed = False
        self._marks: frozenset[Place] | None = None
        self._index()

    def _index(self) -> None:
        """Notes what it is made of; who makes and reads what, once a pass asks."""
        self.names = collections.Counter(e.primitive.name for e in self.eqns)
        # An equation keeps its number when others are put before it.
        self._numbers: list[int] = list(range(len(self.eqns)))
        self._new_numbers = itertools.count(len(self.eqns))
        self._forget()
        self._readers: dict[Any, list[tuple[int, int]]] | None = None

    def _forget(self) -> None:
        """Forgets what holds for the indices of now alone."""
        self.data: set[Any] | None = None
        self._maker: dict[Any, int] | None = None
        self._places: dict[int, int] | None = None
        self._found: dict[str, list[int]] | None = None
        self._reads: dict[Any, Sequence[tuple[int, int]]] = {}

    @property
    def maker(self) -> dict[Any, int]:
        """Variable -> the index of the equation that makes it."""
        if self._maker is None:
            pairs = enumerate(self.eqns)
            self._maker = {v: i for i, eqn in pairs for v in eqn.outvars}
        return self._maker

    def place_of(self, number: int) -> int:
        """Returns the index that an equation has now; -1 for the results."""
        if self._places is None:
            self._places = {n: i for i, n in enumerate(self._numbers)}
            self._places[-1] = -1
        return self._places[number]

    def reads(self, atom: Any) -> Sequence[tuple[int, int]]:
        """Returns where a variable is read: (index, position); the results last.

        The index of the results is -1. A literal is read nowhere else.
        """
        if hasattr(atom, "val"):
            return ()
        if atom not in self._reads:
            if self._readers is None:
                self._readers = _readers(self._numbers, self.eqns, self.outvars)
            found = [(self.place_of(n), p) for n, p in self._readers.get(atom, ())]
            self._reads[atom] = sorted(found, key=_results_last)
        return self._reads[atom]

    def find(self, *names: str) -> Iterator[tuple[int, Any]]:
        """Yields the equations of these primitives, with their indices."""
        if self._found is None:
            self._found = collections.defaultdict(list)
            for index, eqn in enumerate(self.eqns):
                self._found[eqn.primitive.name].append(index)
        found = [self._found[name] for name in names if name in self._found]
        for index in found[0] if len(found) == 1 else sorted(itertools.chain(*found)):
            yield index, self.eqns[index]

    def made_by(self, atom: Any, *names: str) -> Any:
        """Returns the equation that makes a value; None if it is none of these."""
        index = -1 if hasattr(atom, "val") else self.maker.get(atom, -1)
        if index < 0 or (names and self.eqns[index].primitive.name not in names):
            return None
        return self.eqns[index]

    def apply(self) -> None:
        """Applies the edits that were asked for."""
        edits, self.edits = self.edits, _Edits()
        numbers, eqns = self._numbers, self.eqns
        self.eqns, self._numbers = [], []
        start = 0
        for index in sorted(edits.touched()):
            self._extend(eqns[start:index], numbers[start:index])
            self._insert(edits.before.get(index, ()))
            if index in edits.instead:
                self._insert(edits.instead[index])
            else:
                eqn = self._edited(eqns[index], numbers[index], index, edits)
                self._extend([eqn], [numbers[index]])
            self._insert(edits.after.get(index, ()))
            start = index + 1
        self._extend(eqns[start:], numbers[start:])
        outvars = self.outvars
        self.outvars = [edits.operands.get((-1, p), v) for p, v in enumerate(outvars)]
        self._move_reads(-1, outvars, self.outvars)
        self.is_changed = True
        self._forget()
        self._keep_calls(numbers)
        if edits.gone or edits.instead:
            self.eqns = [_reading(eqn, edits.instead_of) for eqn in self.eqns]
            self.outvars = [edits.instead_of(v) for v in self.outvars]
            self._index()

    def _extend(self, eqns: Sequence[Any], numbers: Sequence[int]) -> None:
        self.eqns.extend(eqns)
        self._numbers.extend(numbers)

    def _insert(self, eqns: Sequence[Any]) -> None:
        """Adds new equations."""
        for eqn in eqns:
            number = next(self._new_numbers)
            self._extend([eqn], [number])
            self.names[eqn.primitive.name] += 1
            self._move_reads(number, (), eqn.invars)

    def _edited(self, eqn: Any, number: int, index: int, edits: _Edits) -> Any:
        """Returns an equation with other operands or parameters."""
        operands = edits.operands
        invars = [operands.get((index, p), v) for p, v in enumerate(eqn.invars)]
        params = edits.params.get(index)
        if params is None and all(map(operator.is_, invars, eqn.invars)):
            return eqn
        self._move_reads(number, eqn.invars, invars)
        return eqn.replace(invars=invars, params={**eqn.params, **(params or {})})

    def _move_reads(self, number: int, old: Sequence[Any], new: Sequence[Any]) -> None:
        """Notes that an equation, or the results, reads other variables."""
        if self._readers is None:
            return
        for position, (before, now) in enumerate(itertools.zip_longest(old, new)):
            if before is now:
                continue
            if before is not None and not isinstance(before, jex.Literal):
                self._readers[before].remove((number, position))
            if not isinstance(now, jex.Literal):
                self._readers.setdefault(now, []).append((number, position))

    def _keep_calls(self, numbers: Sequence[int]) -> None:
        """Notes where equations that hold jaxprs stand now, of what they held before.

        Args:
          numbers: the equations, by the indices that they had.
        """
        kept = set(self._numbers) if self.held else set()
        moved = {i: self.place_of(numbers[i]) for i in self.held if numbers[i] in kept}
        before = self.held
        self.held = {moved[i]: held for i, held in before.items() if i in moved}
        for inner in {inner for held in before.values() for inner in held}:
            inner.calls = [
                (caller, moved[i] if caller is self else i)
                for caller, i in inner.calls
                if caller is not self or i in moved
            ]


def _readers(
    numbers: Sequence[int], eqns: Sequence[Any], outvars: Sequence[Any]
) -> dict[Any, list[tuple[int, int]]]:
    """Returns which equations read a variable, by their numbers, and where."""
    readers: collections.defaultdict[Any, list[tuple[int, int]]]
    readers = collections.defaultdict(list)
    for number, eqn in zip(numbers, eqns, strict=True):
        for position, atom in enumerate(eqn.invars):
            if not isinstance(atom, jex.Literal):
                readers[atom].append((number, position))
    for position, atom in enumerate(outvars):
        if not isinstance(atom, jex.Literal):
            readers[atom].append((-1, position))
    return dict(readers)


def _results_last(read: tuple[int, int]) -> tuple[bool, tuple[int, int]]:
    return read[0] < 0, read


class _Edits:
    """What is to become of a body.

    Attributes:
      before: index -> equations to put before that one.
      after: index -> equations to put behind it.
      operands: (index, position) -> what it reads there.
      instead: index -> what stands in its place.
      params: index -> other parameters.
      gone: a result of what is replaced -> what is read in its place.
    """

    def __init__(self) -> None:
        self.before: dict[int, list[Any]] = {}
        self.after: dict[int, list[Any]] = {}
        self.operands: dict[tuple[int, int], Any] = {}
        self.instead: dict[int, list[Any]] = {}
        self.params: dict[int, dict[str, Any]] = {}
        self.gone: dict[Any, Any] = {}

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def touched(self) -> set[int]:
        """Returns the indices of the equations that edits touch."""
        own = {index for index, _ in self.operands if index >= 0}
        return own.union(self.before, self.after, self.instead, self.params)

    def instead_of(self, atom: Any) -> Any:
        """Returns the variable that stands in place of one that is gone."""
        while not isinstance(atom, jex.Literal) and atom in self.gone:
            atom = self.gone[atom]
        return atom


class Editor:
    """A program that is edited.

    Attributes:
      half: the compute dtype.
      whole_step: whether the program is a whole train step.
      bodies: its bodies, callers before what they call.
      done: name of a pass -> how often it has edited.
    """

    def __init__(self, program: Program) -> None:
        self.half, self.whole_step = program.half, program.whole_step
        self._closed = program.closed
        self._bodies: dict[int, Body] = {}
        self._top = self._body_of(program.closed)
        self.done: collections.Counter[str] = collections.Counter()
        self._name = ""
        self._traced: dict[Any, Any] = {}
        self._connect()

    @property
    def bodies(self) -> list[Body]:
        """Its bodies, callers before what they call."""
        return self._order[::-1]

    def has(self, names: frozenset[str]) -> bool:
        """Whether any of these primitives occurs."""
        return any(not names.isdisjoint(b.names) for b in self._order)

    def find(self, *names: str) -> Iterator[tuple[Body, int, Any]]:
        """Yields equations of these primitives: their bodies, indices, and themselves.

        What an inner `mixed_precision` has rewritten is finished, and left out. So is
        what reads or makes an array without elements: there is nothing to gain.
        """
        for body in self.bodies:
            for index, eqn in body.find(*names):
                is_rewritten = any(m.rewritten for m in self.marks(body, index))
                if not is_rewritten and not _is_empty(eqn):
                    yield body, index, eqn

    def was_here(self, body: Body, var: Any) -> bool:
        """Whether this pass has made, or reads, a variable already."""
        indices = [index for index, _ in body.reads(var) if index >= 0]
        indices += [body.maker[var]] if var in body.maker else []
        return any(self._is_own(body.eqns[index]) for index in indices)

    def in_own_scope(self, eqn: Any) -> Any:
        """Returns an equation in the scope of the pass."""
        return _compat.in_scope(eqn, f"{PASS}{self._name}")

    def _is_own(self, eqn: Any) -> bool:
        scope = f"{PASS}{self._name}"
        elements = _compat.scope_elements(eqn.source_info.name_stack)
        # Most names do not hold it at all.
        return any(scope in e.name and scope in e.name.split("/") for e in elements)

    # ---- what the name stack says

    def marks(self, body: Body, index: int) -> frozenset[Place]:
        """Returns where an equation stands, for each way in which it is reached.

        The path and the number of a kernel's call are left out.
        """
        stack = body.eqns[index].source_info.name_stack
        key = id(body), id(stack)
        if key not in self._said:  # kept with it, or its number is used again
            elements = _compat.scope_elements(stack)
            places = (inner_place(outer, elements) for outer in self._outer(body))
            marks = frozenset(p._replace(path="", call=-1) for p in places)
            self._said[key] = stack, marks
        return self._said[key][1]

    def _outer(self, body: Body) -> frozenset[Place]:
        if body._marks is None:
            own = frozenset({TOP} if body is self._top else ())
            body._marks = own.union(*(self.marks(*call) for call in body.calls))
        return body._marks

    def is_backward(self, body: Body, index: int) -> bool:
        """Whether an equation is one of a backward pass, wherever it is reached from.

        What a checkpoint computes once more belongs to the forward pass.
        """
        marks = self.marks(body, index)
        return all(m.backward and not m.recomputed for m in marks)

    def is_asked(self, body: Body, index: int) -> bool:
        """Whether an equation may not be rounded: a user said so, or numerics do."""
        return any(m.full for m in self.marks(body, index))

    # ---- edits

    def insert(
        self,
        body: Body,
        index: int,
        fun: Callable[..., Any],
        *operands: Any,
        after: bool = False,
        **static: Any,
    ) -> list[Any]:
        """Computes something before or behind an equation.

        Args:
          body: the body that holds the equation.
          index: of the equation.
          fun: takes arrays and returns a sequence of them. A function of a module: it
            is traced once for each kind of operands.
          *operands: variables of the body, or literals.
          after: whether behind the equation.
          **static: for `fun`; hashable.

        Returns:
          The new variables.
        """
        eqns, outs = self._spliced(body.eqns[index], fun, operands, static)
        place = body.edits.after if after else body.edits.before
        place.setdefault(index, []).extend(eqns)
        return outs

    def choose(
        self,
        body: Body,
        index: int,
        stored: Sequence[Any],
        operands: Sequence[Any],
        branches: dict[Where, Callable[..., Any]],
        after: bool = False,
        required: bool = False,
        forward_only: bool = False,
        **static: Any,
    ) -> list[Any]:
        """Computes, before or behind an equation, what some devices read instead.

        Args:
          body: the body that holds the equation.
          index: of the equation.
          stored: variables that all other devices read.
          operands: what else the branches need.
          branches: where -> a function of `stored`, `operands` and `static` that
            returns what is read there; functions of a module.
          after: whether behind the equation.
          required: whether a device cannot run the program without its branch.
          forward_only: whether it is gone where somebody differentiates the program.
          **static: for the branches; hashable.

        Returns:
          The new variables, of the same types as `stored`.

        Raises:
          TypeError: if a branch returns other types.
        """
        static |= {
            "_branches": tuple(branches.items()),
            "_count": len(stored),
            "_required": required,
            "_forward_only": forward_only,
        }
        return self.insert(
            body, index, _choice, *stored, *operands, after=after, **static
        )

    def replace(
        self,
        body: Body,
        index: int,
        fun: Callable[..., Any],
        *operands: Any,
        **static: Any,
    ) -> None:
        """Computes the results of an equation in another way; see `insert`.

        Raises:
          TypeError: if they have other types than those of the equation.
        """
        eqn = body.eqns[index]
        eqns, outs = self._spliced(eqn, fun, operands, static)
        _check_types(fun, [v.aval for v in outs], [v.aval for v in eqn.outvars])
        body.edits.instead[index] = eqns
        body.edits.gone.update(zip(eqn.outvars, outs, strict=True))

    def put(
        self, body: Body, index: int, eqns: Sequence[Any], outs: Sequence[Any]
    ) -> None:
        """Puts equations in the place of one; they may hold jaxprs.

        Args:
          body: the body that holds the equation.
          index: of the equation.
          eqns: what stands there instead.
          outs: what is read in place of its results.
        """
        self.done[self._name] += 1
        self._is_rewired = True
        body.edits.instead[index] = list(eqns)
        pairs = zip(body.eqns[index].outvars, outs, strict=True)
        body.edits.gone.update((old, new) for old, new in pairs if new is not old)

    def jaxpr_of(self, body: Body) -> Any:
        """Returns the open jaxpr of a body, with all edits that are applied."""
        made: dict[Body, Any] = {}
        in_place_of = _Replacements()
        for one in self._order:  # what is called before its callers
            made[one] = _rebuilt(one, made, in_place_of, False)
            if one is body:
                break
        return made[body]

    def read(self, body: Body, index: int, position: int, var: Any) -> None:
        """Makes an equation read another variable; index -1 for the results."""
        body.edits.operands[index, position] = var

    def read_instead(self, body: Body, var: Any, new: Any) -> None:
        """Makes all that reads a variable read another one."""
        for index, position in body.reads(var):
            body.edits.operands[index, position] = new

    def choose_instead(
        self,
        body: Body,
        var: Any,
        operands: Sequence[Any],
        branches: dict[Where, Callable[..., Any]],
        **options: Any,
    ) -> Any:
        """Makes all that reads a result read, on some devices, another value.

        Args:
          body: the body in which an equation makes it.
          var: the result; all other devices read it.
          operands: what else the branches need.
          branches: as of `choose`.
          **options: as of `choose`.

        Returns:
          The new variable.
        """
        (new,) = self.choose(
            body, body.maker[var], [var], operands, branches, after=True, **options
        )
        self.read_instead(body, var, new)
        return new

    def set_params(self, body: Body, index: int, **params: Any) -> None:
        """Gives an equation other parameters, of which no type depends."""
        body.edits.params.setdefault(index, {}).update(params)

    def _spliced(
        self, like: Any, fun: Callable[..., Any], operands: Any, static: Any
    ) -> tuple[list[Any], list[Any]]:
        """Returns a function's equations, in the scope of the pass, and its results."""
        self.done[self._name] += 1
        avals = tuple(v.aval for v in operands)
        key = (fun, avals, tuple(static.items()))
        if key not in self._traced:
            with _compat.place_of(like, avals):
                self._traced[key] = _tracer(fun, key[2])(*avals)
        eqns, outs = inlined(self._traced[key], operands, self.in_own_scope(like))
        self._is_rewired |= any(map(held_jaxprs, eqns))
        return eqns, outs

    # ---- passes

    def run(self, name: str, fun: Callable[[Editor], None]) -> None:
        """Runs a pass, and applies what it asked for.

        Of symbolic shapes nobody knows which is larger. A pass that asks is stopped:
        what it has not committed by then is left out.
        """
        self._name, done = name, self.done[name]
        try:
            fun(self)
        except jax.errors.InconclusiveDimensionOperation:
            for body in self._order:
                body.edits = _Edits()
            self.done[name] = done
            self.done = +self.done
        self.commit()

    def commit(self) -> None:
        """Applies what was asked for."""
        for body in self._order:
            if body.edits:
                body.apply()
        if self._is_rewired:
            self._connect()

    def _connect(self) -> None:
        """Notes what equations hold, and who calls what now."""
        self._order: list[Body] = []
        self._said: dict[tuple[int, int], tuple[Any, frozenset[Place]]] = {}
        self._is_rewired = False
        self._visit(self._top, set())
        for body in self._order:
            for index, held in body.held.items():
                for inner in held:
                    inner.calls.append((body, index))

    def _visit(self, body: Body, seen: set[Body]) -> None:
        if body in seen:
            return
        seen.add(body)
        body.calls, body._marks, body.data = [], None, None
        for index, eqn in enumerate(body.eqns):
            if index not in body.held and (jaxprs := held_jaxprs(eqn)):
                body.held[index] = tuple(map(self._body_of, jaxprs))
            for inner in body.held.get(index, ()):
                self._visit(inner, seen)
        self._order.append(body)

    def _body_of(self, jaxpr: Any) -> Body:
        key = id(_compat.open_jaxpr(jaxpr))
        if key not in self._bodies:
            self._bodies[key] = Body(jaxpr)
        return self._bodies[key]

    def finish(self, plain: bool = False) -> Any:
        """Returns the program, the same object if nothing was edited.

        Args:
          plain: whether what was decided to be rounded becomes a plain cast.
        """
        made: dict[Body, Any] = {}
        in_place_of = _Replacements()
        for body in self._order:  # what is called before its callers
            made[body] = _rebuilt(body, made, in_place_of, plain)
        for body in self._order:  # a cycle would wait for the garbage collector
            body.calls = []
        return in_place_of(self._closed, made[self._top])


def _is_empty(eqn: Any) -> bool:
    """Whether an equation reads or makes an array without elements."""
    return any(0 in getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))


def _check_types(fun: Any, new: Sequence[Any], old: Sequence[Any]) -> None:
    """Checks that results have the types of those in whose place they stand."""
    found, expected = ([(a.shape, a.dtype) for a in avals] for avals in (new, old))
    if found != expected:
        raise TypeError(
            f"{name_of(fun)} of a pass expected to return the types of what it stands "
            f"in place of, {_listed(old)}, got {_listed(new)}."
        )


def _listed(avals: Sequence[Any]) -> str:
    return ", ".join(a.str_short(short_dtypes=True) for a in avals) or "nothing"


def _reading(eqn: Any, instead_of: Callable[[Any], Any]) -> Any:
    """Returns an equation with other operands; itself if they are the same."""
    invars = [instead_of(v) for v in eqn.invars]
    if all(a is b for a, b in zip(invars, eqn.invars, strict=True)):
        return eqn
    return eqn.replace(invars=invars)


def _rebuilt(
    body: Body, made: dict[Body, Any], in_place_of: _Replacements, plain: bool
) -> Any:
    """Returns the open jaxpr of a body, with those that it holds as they are now."""
    eqns = list(body.eqns)
    is_changed = body.is_changed
    if plain:
        for index, eqn in body.find(ROUNDING):
            eqns[index] = _compat.as_cast(eqn)
            is_changed = True
    for index, held in body.held.items():
        old = eqns[index]
        pairs = zip(held_jaxprs(old), held, strict=True)
        eqns[index] = with_held(old, [in_place_of(j, made[b]) for j, b in pairs])
        is_changed |= eqns[index] is not old
    before = _compat.open_jaxpr(body.jaxpr)
    if not is_changed:
        return before
    return before.replace(eqns=eqns, outvars=list(body.outvars))


class _Replacements:
    """Makes open jaxprs as closed as those in whose place they stand.

    What was one object is one again: it is lowered once, however often it is called.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, old: Any, made: Any) -> Any:
        before = _compat.open_jaxpr(old)
        if before is made or before is old:
            return old if before is made else made
        if id(old) not in self._known:  # kept with it, or its number is used again
            new = old.replace(jaxpr=made)  # JAX < 0.11: two kinds
            self._known[id(old)] = old, new
        return self._known[id(old)][1]


@functools.lru_cache(maxsize=1024)
def _tracer(fun: Callable[..., Any], static: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a tracer of a function: one object, so that JAX's caches know it."""

    def flat(*values: Any) -> Any:
        return fun(*values, **dict(static))

    return jax.make_jaxpr(flat)


def _choice(
    *values: Any,
    _branches: tuple[tuple[Where, Callable[..., Any]], ...],
    _count: int,
    _required: bool,
    _forward_only: bool,
    **static: Any,
) -> list[Any]:
    stored = list(map(jax.typeof, values[:_count]))

    def bound(fun: Callable[..., Any]) -> Callable[..., Any]:
        def typed(*values: Any) -> Any:
            results = fun(*values, **static)
            _check_types(fun, list(map(jax.typeof, results)), stored)
            return results

        return typed

    branches = {where: bound(fun) for where, fun in _branches}
    return by_device(
        values[:_count], values[_count:], branches, _required, _forward_only
    )
