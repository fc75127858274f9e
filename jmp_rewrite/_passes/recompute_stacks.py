"""Stacks that a later loop computes again in place of reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import inlined
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import FLOAT32, is_float, is_float32, is_widening
from jmp_rewrite._passes.program import CASTS
from jmp_rewrite._passes.scans import scan_anew

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


def recompute_stacks(editor: Editor) -> None:
    """A backward loop computes the derivative of a gate again, from the gate.

    Differentiating a loop stacks whatever its backward pass multiplies by. Of a gate
    that is both `s` and `s (1 - s)`, the derivative of the sigmoid; of a `tanh` both
    `t` and `1 - t t`. No compiler sees through two loops, so all of it is written and
    kept. But what is a function of one stacked value alone is as cheap to compute again
    from a slice of that stack, which the backward loop reads as well: five of the
    twelve stacks of an LSTM need not be there. By hand such a function is computed from
    the rounded value too. Only polynomials of a sigmoid or a `tanh` are: what lies
    between -1 and 1 is rounded by no more than half an epsilon, and a polynomial of it
    by a few. A logarithm or a quotient of `1 - s` could become infinite. What is
    stacked in float32 is computed from a float32 stack alone, and nothing for which a
    user asked for float32.

    On all devices, in whole train steps.

    Gain: LSTM 30 % less memory (`benchmarks/NOTES.md`, 36).
    """
    for body in reversed(editor.bodies):  # inner loops first
        scans = [i for i, _ in body.find("scan") if _is_free(editor, body, i)]
        if len(scans) < 2:
            continue
        found = _Again(editor, body, frozenset(scans))
        for index in reversed(scans):  # and readers first
            if index in found.left_out or index in found.computed:
                found.put(index)
                editor.commit()


def _is_free(editor: Editor, body: Body, index: int) -> bool:
    return not any(m.rewritten for m in editor.marks(body, index))


class _Chain(NamedTuple):
    """How a value is computed again.

    Attributes:
      base: the position of what it is computed from among the results of the scan.
      source: this value's variable, before it is rounded.
      equations: what computes it, in order.
      target: its variable, before it is rounded.
    """

    base: int
    source: Any
    equations: tuple[Any, ...]
    target: Any


class _Again:
    """The scans of a body, and what they hand to each other.

    Attributes:
      left_out: index of a scan -> the results that others compute again.
      computed: index of a scan -> position of an operand -> the stack that a value is
        computed from in its place, and how.
    """

    def __init__(self, editor: Editor, body: Body, scans: frozenset[int]) -> None:
        self._editor, self._body, self._scans = editor, body, scans
        self.left_out: dict[int, set[int]] = {}
        self.computed: dict[int, dict[int, tuple[Any, _Chain]]] = {}
        for index in sorted(scans):
            self._look_at(index)

    def _look_at(self, index: int) -> None:
        eqn, (inner,) = self._body.eqns[index], self._body.held[index]
        for position, chain in _chains(self._editor, inner, eqn).items():
            uses = self._body.reads(eqn.outvars[position])
            if not uses or not all(self._is_slice(*use) for use in uses):
                continue
            base = eqn.outvars[chain.base]
            is_half = not is_float32(eqn.outvars[position])
            if not is_half and not is_float32(base):
                continue  # it would be rounded
            self.left_out.setdefault(index, set()).add(position)
            for reader, operand in uses:
                self.computed.setdefault(reader, {})[operand] = base, chain

    def _is_slice(self, index: int, position: int) -> bool:
        """Whether each iteration of a loop reads a slice of an operand."""
        if index not in self._scans:
            return False
        return position >= sum(_compat.scan_split(self._body.eqns[index].params))

    def put(self, index: int) -> None:
        """Puts a scan there that computes what it is no longer given."""
        scan, (inner,) = self._body.eqns[index], self._body.held[index]
        new = _NewBody(self._editor, scan, self._editor.jaxpr_of(inner))
        new.take(self.computed.get(index, {}))
        gone = self.left_out.get(index, set())
        kept = [i for i in range(len(scan.outvars)) if i not in gone]
        consts, carries = _compat.scan_split(scan.params)
        jaxpr = new.jaxpr(kept)
        eqns, made = scan_anew(scan, jaxpr, consts, carries, new.operands)
        results = dict(zip(kept, made, strict=True))
        outs = [results.get(i, v) for i, v in enumerate(scan.outvars)]
        self._editor.put(self._body, index, eqns, outs)


class _NewBody:
    """The body of a scan that computes some of what it was given.

    Attributes:
      operands: of the scan.
    """

    def __init__(self, editor: Editor, scan: Any, jaxpr: Any) -> None:
        self._half, self._scan, self._jaxpr = editor.half, scan, jaxpr
        self.operands: list[Any] = list(scan.invars)
        self._invars: list[Any] = list(jaxpr.invars)
        self._eqns: list[Any] = []
        # Variable -> what is read in its place, and what it is before it is rounded.
        self._instead: dict[Any, Any] = {}
        self._wide: dict[Any, Any] = {}
        bare = _compat.with_name_stack(scan, (), scan.params)
        self._like = editor.in_own_scope(bare)

    def take(self, computed: Mapping[int, tuple[Any, _Chain]]) -> None:
        """Takes operands away, and computes what they were from others."""
        kept = [i for i in range(len(self.operands)) if i not in computed]
        given = self._jaxpr.invars
        self.operands = [self._scan.invars[i] for i in kept]
        self._invars = [given[i] for i in kept]
        first = sum(_compat.scan_split(self._scan.params))
        slices = {
            self._scan.invars[i]: given[i]
            for i in kept
            if i >= first and not hasattr(self._scan.invars[i], "val")
        }
        for position, (base, chain) in computed.items():
            if base not in slices:
                aval = given[position].aval.update(dtype=base.aval.dtype)
                slices[base] = jex.Var(aval)
                self.operands.append(base)
                self._invars.append(slices[base])
            self._compute(given[position], self._float32(slices[base]), chain)

    def _float32(self, var: Any) -> Any:
        if var.aval.dtype == FLOAT32:
            return var
        if var not in self._wide:
            (self._wide[var],) = self._emit(_widened, var)
        return self._wide[var]

    def _compute(self, old: Any, base: Any, chain: _Chain) -> None:
        """Computes a parameter from a slice."""

        def again(x: Any) -> list[Any]:
            env = {chain.source: x}
            for eqn in chain.equations:
                values = [_float32_of(env, v) for v in eqn.invars]
                (env[eqn.outvars[0]],) = _compat.bind(eqn, values, eqn.params)
            return [env[chain.target]]

        (value,) = self._emit(again, base)
        self._instead[old] = value
        if old.aval.dtype != FLOAT32:
            dtype, self._wide[old] = old.aval.dtype, value
            (self._instead[old],) = self._emit(
                lambda x: [_compat.convert(x, dtype)], value
            )

    def _emit(self, fun: Callable[[Any], list[Any]], operand: Any) -> list[Any]:
        with _compat.place_of(self._like, [operand.aval]):
            closed = jax.make_jaxpr(fun)(operand.aval)
        eqns, outs = inlined(closed, [operand], self._like)
        self._eqns += eqns
        return outs

    def jaxpr(self, kept: Sequence[int]) -> Any:
        """Returns the body, closed, with these results."""
        eqns = [*self._eqns, *self._reading()]
        return _compat.with_body(
            self._scan.params["jaxpr"],
            invars=self._invars,
            eqns=eqns,
            outvars=[self._read(self._jaxpr.outvars[i]) for i in kept],
        )

    def _reading(self) -> Iterator[Any]:
        """Yields the equations of a body that read what is computed in it."""
        for eqn in self._jaxpr.eqns:
            if is_widening(eqn, self._half) and not hasattr(eqn.invars[0], "val"):
                (operand,), (out,) = eqn.invars, eqn.outvars
                if operand in self._wide:  # it need not be rounded first
                    self._instead[out] = self._wide[operand]
                    continue
            invars = [self._read(v) for v in eqn.invars]
            same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
            yield eqn if same else eqn.replace(invars=invars)

    def _read(self, atom: Any) -> Any:
        return atom if hasattr(atom, "val") else self._instead.get(atom, atom)


def _widened(x: Any) -> list[Any]:
    return [_compat.convert(x, FLOAT32)]


def _float32_of(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val.astype(FLOAT32) if hasattr(atom, "val") else env[atom]


def _chains(editor: Editor, body: Body, eqn: Any) -> dict[int, _Chain]:
    """Returns the stacks that are functions of another one, by position."""
    _, carries = _compat.scan_split(eqn.params)
    results = [
        (_exact(body, v), p)
        for p, v in enumerate(body.outvars)
        if p >= carries and not hasattr(v, "val") and is_float(v)
    ]
    results.sort(key=lambda pair: body.maker.get(pair[0], -1))
    stacked: dict[Any, int] = {}
    chains: dict[int, _Chain] = {}
    for var, position in results:
        if var in stacked or not is_float(var):
            continue
        source, equations = _polynomial_of(body, var, stacked)
        asked = [*equations, body.maker.get(source, -1)]
        if source is None or any(editor.is_asked(body, i) for i in asked):
            stacked[var] = position
            continue
        terms = tuple(_of_exact(body, i) for i in sorted(equations))
        chains[position] = _Chain(stacked[source], source, terms, var)
    return chains


def _exact(body: Body, var: Any) -> Any:
    """Returns the value behind casts."""
    while (eqn := body.made_by(var, *CASTS)) is not None and is_float(eqn.invars[0]):
        (var,) = eqn.invars
    return var


def _of_exact(body: Body, index: int) -> Any:
    """Returns an equation that reads what was not cast."""
    eqn = body.eqns[index]
    exact = [v if hasattr(v, "val") else _exact(body, v) for v in eqn.invars]
    return eqn.replace(invars=exact)


def _polynomial_of(
    body: Body, var: Any, stacked: dict[Any, int]
) -> tuple[Any, set[int]]:
    """Returns the one stacked gate that a value is computed from, and by what."""
    sources: set[Any] = set()
    equations: set[int] = set()
    left = [var]
    while left:
        one = _exact(body, left.pop())
        if one in stacked:
            sources.add(one)
            continue
        index = body.maker.get(one, -1)
        if index < 0 or not _is_polynomial(body, index) or len(equations) == _LONGEST:
            return None, set()
        equations.add(index)
        left += [v for v in body.eqns[index].invars if not hasattr(v, "val")]
    source = sources.pop() if len(sources) == 1 else None
    if body.made_by(source, *_BOUNDED) is None:
        return None, set()
    return source, equations


def _is_polynomial(body: Body, index: int) -> bool:
    eqn = body.eqns[index]
    known = eqn.primitive.name in _POLYNOMIALS and eqn.params.get("y", 1) > 0
    return known and is_float(eqn.outvars[0])
