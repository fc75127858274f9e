"""Equal computations of a program, which are then computed once.

A step that evaluates a network twice on the same values (a GAN's fake images, a tower
that two losses share, an evaluation beside the loss) holds every matrix multiplication
of it twice. XLA computes them once. But the copy that is not differentiated would be
rounded at other places than the other one, and then nothing is equal any more. So the
second copy reads what the first one has made before anything is decided.

Values are numbered: two equations of one primitive, with the same parameters and with
operands of the same numbers, have results of the same numbers. What is equal has equal
derivatives, too, but for `stop_gradient`: a step that returns a gradient may be jitted,
checkpointed or scanned, and differentiated after that. So two calls with a `custom_jvp`
are equal if they and their rules are, with all that these have captured, and with a
`custom_vjp` none are. Other calls are looked into. A loop, a branch and a checkpoint
are programs of their own, so that what a checkpoint computes once more stays computed
once more.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._graph.build import shared_jaxprs
from jmp_rewrite._graph.scopes import TOP, Place, inner_place
from jmp_rewrite._rules import (
    IDENTITIES,
    LEFT_ALONE,
    PRODUCTS,
    held_jaxprs,
    held_parameters,
    with_held,
)

# Calls that are looked into.
_TRANSPARENT = frozenset(
    {
        "call",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "jit",
    }
)
# A barrier keeps apart what a user wants apart, and each draw of this is another one.
_APART = frozenset({"optimization_barrier", "rng_uniform", *LEFT_ALONE})


def computed_once(closed: Any, by_path: bool = False) -> Any:
    """Returns a program in which no matrix multiplication is computed twice.

    Nor is what is made of one. Where `stop_gradient` occurs, it must not be
    differentiated afterwards: what is stopped is the same value.

    Args:
      closed: a closed jaxpr.
      by_path: whether what stands in different scopes is different.

    Returns:
      The program; the same object if no matrix multiplication occurs twice, or if its
      bodies are used too often to look at each use.
    """
    if shared_jaxprs(closed):  # each use is looked at, and here they are too many
        return closed
    return _Program(by_path).once(closed, TOP)


def stops_gradients(jaxpr: Any) -> bool:
    """Whether `stop_gradient` occurs in a program, of any dtype."""
    return any(
        eqn.primitive.name == "stop_gradient"
        or any(map(stops_gradients, held_jaxprs(eqn)))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
    )


class _Program:
    """A program with all its bodies, each of which is looked at once."""

    def __init__(self, by_path: bool) -> None:
        self._by_path = by_path
        self._known: dict[tuple[int, Place], tuple[Any, Any]] = {}

    def once(self, jaxpr: Any, place: Place, merges: bool = True) -> Any:
        """Returns a jaxpr in which, and in whose loops, nothing is computed twice.

        Without `merges` only its loops are: whoever calls it looks into the rest.
        """
        key = id(jaxpr), place
        if key not in self._known:  # kept with it, or its number is used again
            inner = self._with_held(jaxpr, place)
            merged = self._merged(inner, place) if merges else inner
            self._known[key] = jaxpr, merged
        return self._known[key][1]

    def _with_held(self, jaxpr: Any, place: Place) -> Any:
        """Looks at what equations hold."""
        eqns = _compat.open_jaxpr(jaxpr).eqns
        new = [self._equation(e, place) for e in eqns]
        if all(a is b for a, b in zip(eqns, new, strict=True)):
            return jaxpr
        return _compat.with_body(jaxpr, eqns=new)

    def _equation(self, eqn: Any, place: Place) -> Any:
        held = held_jaxprs(eqn)
        if not held:
            return eqn
        here = inner_place(place, _compat.scope_elements(eqn.source_info.name_stack))
        merges = eqn.primitive.name not in _TRANSPARENT
        return with_held(eqn, [self.once(j, here, merges) for j in held])

    def _merged(self, jaxpr: Any, place: Place) -> Any:
        """Computes once what one body, with its calls, computes twice."""
        if not _Products().repeat(jaxpr):
            return jaxpr
        looked = _Numbers(self._by_path, None)
        looked.run(jaxpr, place)
        if not looked.repeated:
            return jaxpr
        merged = _Numbers(self._by_path, looked.opened)
        results = merged.run(jaxpr, place)
        return _compat.with_body(
            jaxpr, eqns=merged.eqns, outvars=[atom for atom, _ in results]
        )


class _Numbers:
    """Numbers the values of one body and of the calls in it.

    Run twice: first to see what is computed twice, and which calls have to be opened
    for that, then to write the body without it.

    Attributes:
      repeated: whether a matrix multiplication occurs twice.
      opened: calls, by their place in the walk, that hold an equation that is computed
        twice.
      eqns: the equations of the new body.
    """

    def __init__(self, by_path: bool, opened: set[int] | None) -> None:
        self.repeated = False
        self.opened: set[int] = set()
        self.eqns: list[Any] = []
        self._by_path = by_path
        self._inline, self._writes = opened or set(), opened is not None
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._table: dict[Any, tuple[int, ...]] = {}
        # Numbers that a matrix multiplication has made, and the first variable of each
        # with the calls that it stands in.
        self._made: set[int] = set()
        self._with_rules: dict[tuple[int, ...], Any] = {}
        self._first: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._contexts: dict[int, tuple[Any, str]] = {}

    def run(self, jaxpr: Any, place: Place) -> list[tuple[Any, Any]]:
        """Walks a body; returns its results, each an atom and its number."""
        body = _compat.open_jaxpr(jaxpr)
        env = {v: (v, next(self._numbers)) for v in [*body.constvars, *body.invars]}
        return self._body(body, env, place, (), ())

    def _body(
        self,
        body: Any,
        env: dict[Any, tuple[Any, Any]],
        place: Place,
        calls: tuple[int, ...],
        stack: tuple[Any, ...],
    ) -> list[tuple[Any, Any]]:
        for eqn in body.eqns:
            own = _compat.scope_elements(eqn.source_info.name_stack)
            here = inner_place(place, own)
            read = [_read(env, v) for v in eqn.invars]
            if _is_open_call(eqn) and not here.rewritten:
                outs = self._call(eqn, read, here, calls, (*stack, *own))
            else:
                outs = self._equation(eqn, read, here, calls, (*stack, *own))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_read(env, v) for v in body.outvars]

    def _call(
        self, eqn: Any, read: Sequence[Any], place: Place, calls: Any, stack: Any
    ) -> list[tuple[Any, Any]]:
        (jaxpr,) = held_jaxprs(eqn)
        body, index = _compat.open_jaxpr(jaxpr), next(self._calls)
        is_inlined = index in self._inline
        if is_inlined:
            env = dict(zip(body.invars, read, strict=True))
            return self._body(body, env, place, (*calls, index), stack)
        # Inside its variables are its own; the equations are written with the call.
        eqns, self.eqns = self.eqns, []
        pairs = zip(body.invars, read, strict=True)
        env = {v: (v, number) for v, (_, number) in pairs}
        inside = self._body(body, env, place, (*calls, index), stack)
        self.eqns = eqns
        outs = self._write(eqn, [atom for atom, _ in read], calls, stack)
        return [(v, n) for v, (_, n) in zip(outs, inside, strict=True)]

    def _equation(
        self, eqn: Any, read: Sequence[Any], place: Place, calls: Any, stack: Any
    ) -> list[tuple[Any, Any]]:
        atoms, numbers = [a for a, _ in read], tuple(n for _, n in read)
        name = eqn.primitive.name
        multiplies = name in PRODUCTS or _is_ruled_product(eqn)
        is_made = multiplies or any(n in self._made for n in numbers)
        if name in IDENTITIES and len(numbers) == 1:
            outs = self._write(eqn, atoms, calls, stack)
            return [(v, numbers[0]) for v in outs]
        key = None if place.rewritten else self._key(eqn, numbers, place)
        try:
            known = self._table.get(key)
        except TypeError:  # a parameter that has no hash
            key = known = None
        ruled = None if known is None else self._with_rules.get(known)
        if ruled is not None and not _are_one(eqn, ruled):
            key = known = None
        if known is not None and is_made:
            self.repeated |= multiplies
            self.opened.update(calls)
            found = [self._first[n] for n in known]
            self.opened.update(c for _, where in found for c in where)
            return [(v, n) for (v, _), n in zip(found, known, strict=True)]
        outs = self._write(eqn, atoms, calls, stack)
        new = known or tuple(next(self._numbers) for _ in outs)
        if known is None:
            self._first.update((n, (v, calls)) for n, v in zip(new, outs, strict=True))
            self._made.update(new if is_made else ())
            if key is not None:
                self._table[key] = new
                if name == "custom_jvp_call":
                    self._with_rules[new] = eqn
        return list(zip(outs, new, strict=True))

    def _key(self, eqn: Any, numbers: tuple[Any, ...], place: Place) -> Any:
        """Returns the key of equal equations; None if there are none."""
        params = eqn.params
        if eqn.primitive.name == "custom_jvp_call" and _is_closed(eqn):
            (jaxpr,) = held_jaxprs(eqn)  # of equal text the rest is looked at later
            params = {"call_jaxpr": str(jaxpr)}
        elif held_jaxprs(eqn):
            return None
        if eqn.primitive.name in _APART or eqn.effects:
            return None
        if any(_compat.is_reference(v.aval) for v in [*eqn.invars, *eqn.outvars]):
            return None
        return (
            eqn.primitive,
            numbers,
            place.full,
            place.path if self._by_path else "",
            self._context(eqn),
            *sorted(params.items(), key=_first),
        )

    def _context(self, eqn: Any) -> str:
        """Returns under which settings an equation was traced."""
        ctx = eqn.ctx
        if id(ctx) not in self._contexts:  # kept with it, or its number is used again
            self._contexts[id(ctx)] = ctx, repr(ctx)
        return self._contexts[id(ctx)][1]

    def _write(
        self, eqn: Any, atoms: list[Any], calls: tuple[int, ...], stack: Any
    ) -> list[Any]:
        """Writes an equation; returns its results."""
        outvars = list(eqn.outvars)
        if not self._writes:
            return outvars
        is_inlined = bool(calls) and calls[-1] in self._inline
        if is_inlined or any(map(_compat.is_dropped, outvars)):
            outvars = [jex.Var(v.aval) for v in outvars]
        if is_inlined:
            eqn = _compat.with_name_stack(eqn, stack, eqn.params)
        pairs = zip([*atoms, *outvars], [*eqn.invars, *eqn.outvars], strict=True)
        if not all(a is b for a, b in pairs):
            eqn = eqn.replace(invars=atoms, outvars=outvars)
        self.eqns.append(eqn)
        return outvars


_first = operator.itemgetter(0)
# Calls with a `custom_jvp` that are nested deeper are not compared: each holds the next
# one in what it computes and in its derivative, which is traced for that.
_MOST_NESTED = 4


class _Products:
    """Whether a body, with its calls, may compute a matrix multiplication twice.

    A quick look before the thorough one: of scopes and contexts it knows nothing.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._seen: set[int] = set()

    def repeat(self, jaxpr: Any) -> bool:
        """Whether two have equal operands."""
        body = _compat.open_jaxpr(jaxpr)
        env = {v: self._number(v) for v in [*body.constvars, *body.invars]}
        # What comes after the last one is mostly an optimizer.
        places = reversed(range(len(body.eqns)))
        last = next((i for i in places if _may_hold_product(body.eqns[i])), -1)
        return not self._walk(body.eqns[: last + 1], env)

    def _number(self, key: Any) -> int:
        """Returns a number that is equal for what is equal."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _walk(self, eqns: Sequence[Any], env: dict[Any, int]) -> bool:
        """Numbers the results of equations; returns whether no product is repeated."""
        for eqn in eqns:
            reads = [self._read(env, v) for v in eqn.invars]
            name = eqn.primitive.name
            if name in IDENTITIES:
                outs = reads
            elif _is_open_call(eqn) or (name == "custom_jvp_call" and _is_closed(eqn)):
                (jaxpr,) = held_jaxprs(eqn)
                inner = _compat.open_jaxpr(jaxpr)
                inside = dict(zip(inner.invars, reads, strict=True))
                if not self._walk(inner.eqns, inside):
                    return False
                outs = [self._read(inside, v) for v in inner.outvars]
            elif name in _APART or held_parameters(name):
                outs = list(map(self._number, eqn.outvars))
            else:
                key = self._equation(eqn, reads)
                if name in PRODUCTS:
                    if key in self._seen:
                        return False
                    self._seen.add(key)
                outs = [self._number((key, i)) for i in range(len(eqn.outvars))]
            env.update(zip(eqn.outvars, outs, strict=True))
        return True

    def _equation(self, eqn: Any, reads: list[int]) -> int:
        try:
            params = frozenset(eqn.params.items()) if eqn.params else None
            return self._number((eqn.primitive, params, *reads))
        except TypeError:  # a parameter that has no hash
            return self._number(id(eqn))

    def _read(self, env: dict[Any, int], atom: Any) -> int:
        return self._number(_number_of(atom)) if hasattr(atom, "val") else env[atom]


def _may_hold_product(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in PRODUCTS or bool(held_parameters(name))


def _number_of(literal: Any) -> tuple[Any, bytes]:
    return literal.aval, np.asarray(literal.val).tobytes()


def _is_open_call(eqn: Any) -> bool:
    """Whether an equation is nothing but a call of a jaxpr without constants."""
    if eqn.primitive.name not in _TRANSPARENT or not _compat.is_plain_call(eqn):
        return False
    return _is_closed(eqn)


def _is_closed(eqn: Any) -> bool:
    """Whether a call holds a jaxpr without constants."""
    (jaxpr,) = held_jaxprs(eqn)
    return not _compat.constvars(jaxpr) and not _compat.constants(jaxpr)


def _is_ruled_product(eqn: Any) -> bool:
    """Whether an equation is a matrix multiplication with a derivative of its own."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    return any(
        inner.primitive.name in PRODUCTS
        for jaxpr in held_jaxprs(eqn)
        for inner in _compat.open_jaxpr(jaxpr).eqns
    )


def _are_one(first: Any, second: Any, assumed: frozenset[Any] = frozenset()) -> bool:
    """Whether two calls with a `custom_jvp` compute the same, and their derivatives.

    Args:
      first: a call.
      second: another, of operands of the same types.
      assumed: texts of calls that are equal if these are: a rule may call itself.
    """
    try:
        rules = _rule(first), _rule(second)
    except Exception:  # a rule that refuses: nobody has asked for a derivative
        return False
    pairs = [*zip(held_jaxprs(first), held_jaxprs(second), strict=True), rules]
    texts = tuple(str(one) for one, _ in pairs)
    if texts != tuple(str(other) for _, other in pairs):
        return False
    if texts in assumed:
        return True
    if len(assumed) == _MOST_NESTED:
        return False
    return all(_hold_the_same(*pair, assumed | {texts}) for pair in pairs)


def _hold_the_same(first: Any, second: Any, assumed: frozenset[Any]) -> bool:
    """Whether jaxprs of one text have captured the same arrays and functions."""
    captured = zip(*map(_compat.constants, (first, second)), strict=True)
    if not all(one is other for one, other in captured):
        return False
    bodies = (_compat.open_jaxpr(jaxpr).eqns for jaxpr in (first, second))
    for one, other in zip(*bodies, strict=True):
        if one.primitive.name == "custom_jvp_call":
            if not _are_one(one, other, assumed):
                return False
            continue
        held = zip(held_jaxprs(one), held_jaxprs(other), strict=True)
        rest = one.params.keys() - held_parameters(one.primitive.name)
        if not all(_hold_the_same(*pair, assumed) for pair in held):
            return False
        if not all(_is_equal(one.params[k], other.params[k]) for k in rest):
            return False
    return True


def _is_equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except ValueError:  # arrays
        return False


def _rule(eqn: Any) -> Any:
    """Returns the derivative of a call with a `custom_jvp`, a jaxpr."""
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    avals = [v.aval for v in eqn.invars]

    def called(*args: Any) -> list[Any]:
        return [
            jnp.zeros(x.aval.shape, x.aval.dtype) if _compat.is_symbolic_zero(x) else x
            for x in rule.call_wrapped(*args)
        ]

    return jax.make_jaxpr(called)(*avals, *(a.to_tangent_aval() for a in avals))


def _read(env: dict[Any, tuple[Any, Any]], atom: Any) -> tuple[Any, Any]:
    """Returns a value as it is read now, and its number; a literal is its own."""
    return (atom, _number_of(atom)) if hasattr(atom, "val") else env[atom]
