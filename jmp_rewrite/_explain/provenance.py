"""Emits a program so that each equation knows the one that it was made from.

While the program is emitted, each of its equations enters a name scope with its index.
The scopes are taken off again, and what they said is kept beside the jaxpr.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jmp_rewrite import _compat, _passes, _rewrite
from jmp_rewrite._emit import Cell, Emitter
from jmp_rewrite._graph import REWRITTEN, Instance
from jmp_rewrite._precision import Plan
from jmp_rewrite._rules import held_jaxprs, with_held

_MARK = "jmp_rewrite.equation:"

Origin = tuple[int, ...]


class _Marking(Emitter):
    """An emitter that says of each equation which one it comes from."""

    def _stays(self, instance: Instance, index: int) -> bool:
        return False  # each equation enters its scope

    def _equation(
        self, instance: Instance, index: int, eqn: Any, env: dict[Any, Cell]
    ) -> list[Cell]:
        with jax.named_scope(f"{_MARK}{index}"):
            return super()._equation(instance, index, eqn, env)


class Emitted(NamedTuple):
    """A rewritten program.

    Attributes:
      closed: its closed jaxpr, the one that `mixed_precision` makes.
      origins: for each open jaxpr inside that was emitted anew, and each of its
        equations, the index of the original equation; several where a call was
        dissolved into the jaxpr that it stood in; none for casts at the end.
      passes: name of a pass -> how often it has edited; those that have.
    """

    closed: Any
    origins: dict[Any, list[Origin]]
    passes: Mapping[str, int] = MappingProxyType({})

    @property
    def program(self) -> Any:
        """The jaxpr itself, where `closed` is another one if it is differentiated."""
        body = _compat.open_jaxpr(self.closed)
        if self.origins.get(body) != [()]:  # an equation that comes from none
            return self.closed
        return body.eqns[0].params.get("call_jaxpr", self.closed)


def emit(plan: Plan, choice: _passes.Choice) -> Emitted:
    """Emits the program of a plan, and runs the chosen passes over it."""
    original = plan.graph.top.jaxpr
    before = _compat.open_jaxpr(original)
    optimized = _rewrite.optimized(plan, choice, emitter_type=_Marking)

    def rewritten(*args: Any) -> list[Any]:
        with jax.named_scope(REWRITTEN):
            consts = _compat.constants(original)
            return _compat.evaluate(optimized.closed, [*consts, *args])

    closed = jax.make_jaxpr(rewritten)(*(v.aval for v in before.invars))
    stripping = _Stripping()
    return Emitted(stripping.strip(closed), stripping.origins, optimized.done)


class _Stripping:
    """Takes the marks off a jaxpr and all that it holds."""

    def __init__(self) -> None:
        self.origins: dict[Any, list[Origin]] = {}
        self._done: dict[Any, Any] = {}

    def strip(self, jaxpr: Any) -> Any:
        body = _compat.open_jaxpr(jaxpr)
        if body not in self._done:
            self._done[body] = self._strip(jaxpr)
        return self._done[body]

    def _strip(self, jaxpr: Any) -> Any:
        body = _compat.open_jaxpr(jaxpr)
        eqns, origins = [], []
        for eqn in body.eqns:
            clean, origin = self._equation(eqn)
            eqns.append(clean)
            origins.append(origin)
        if all(a is b for a, b in zip(eqns, body.eqns, strict=True)):
            return jaxpr
        clean = _compat.with_body(jaxpr, eqns=eqns)
        self.origins[_compat.open_jaxpr(clean)] = origins
        return clean

    def _equation(self, eqn: Any) -> tuple[Any, Origin]:
        eqn = with_held(eqn, map(self.strip, held_jaxprs(eqn)))
        elements = _compat.scope_elements(eqn.source_info.name_stack)
        marks = [e.name for e in elements if e.name.startswith(_MARK)]
        if not marks:
            return eqn, ()
        kept = [e for e in elements if not e.name.startswith(_MARK)]
        clean = _compat.with_name_stack(eqn, kept, eqn.params)
        return clean, tuple(int(m.removeprefix(_MARK)) for m in marks)
