"""A finished program, with its calls inlined, as the tracers of `jit` show it.

A function that is jitted on its own sees parameters alone. Who made the gradients that
it is given, the program around it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jmp_rewrite import _compat
from jmp_rewrite._rules import CALLS, held_jaxprs
from jmp_rewrite._source import Caller


class Value:
    """What an equation reads or makes.

    Attributes:
      aval: its type.
      val: the number that it is, if it is a literal.
      parent: the equation that made it; None for parameters, constants and literals.
    """

    def __init__(self, aval: Any, val: Any = None, parent: Any = None) -> None:
        self.aval, self.val, self.parent = aval, val, parent


class Equation:
    """An equation of a program in which calls are inlined.

    Attributes:
      eqn: that of its jaxpr.
      caller: what that jaxpr stands in.
      primitive: its primitive.
      params: its parameters.
      source_info: where it stands, in the scopes of all its callers.
      in_tracers: what it reads.
      outvars: what it makes.
    """

    def __init__(
        self, eqn: Any, caller: Caller | None, scopes: Any, reads: Sequence[Value]
    ) -> None:
        self.eqn, self.caller = eqn, caller
        self.primitive, self.params = eqn.primitive, eqn.params
        self.source_info = _compat.with_name_stack(eqn, scopes, {}).source_info
        self.in_tracers = reads
        self.outvars = [Value(v.aval, parent=self) for v in eqn.outvars]


def programs(closed: Any) -> Iterator[list[Equation]]:
    """Yields the equations of a program, and of each loop's body, as its own program.

    Those of branches are among the equations of what holds them.

    Args:
      closed: a closed jaxpr.
    """
    todo = [closed]
    while todo:
        equations: list[Equation] = []
        held = todo.pop()
        parameters = [Value(v.aval) for v in _compat.open_jaxpr(held).invars]
        _inline(held, parameters, (), None, equations, todo)
        yield equations


def _inline(
    jaxpr: Any,
    operands: Sequence[Value],
    scopes: tuple[Any, ...],
    caller: Caller | None,
    equations: list[Equation],
    bodies: list[Any],
) -> list[Value]:
    """Adds the equations of a jaxpr, and what its loops hold; returns its results."""
    body = _compat.open_jaxpr(jaxpr)
    values = {v: Value(v.aval) for v in body.constvars}
    values.update(zip(body.invars, operands, strict=True))

    def read(atom: Any) -> Value:
        return Value(atom.aval, atom.val) if hasattr(atom, "val") else values[atom]

    for eqn in body.eqns:
        reads = [read(x) for x in eqn.invars]
        inside = (*scopes, *_compat.scope_elements(eqn.source_info.name_stack))
        name, held = eqn.primitive.name, held_jaxprs(eqn)

        def inline(jaxpr: Any, given: Sequence[Value]) -> list[Value]:
            outer = Caller(eqn, caller)  # noqa: B023
            return _inline(jaxpr, given, inside, outer, equations, bodies)  # noqa: B023

        if name in CALLS and CALLS[name][0] == "call":
            made = inline(held[0], reads)
        else:
            equations.append(Equation(eqn, caller, inside, reads))
            made = equations[-1].outvars
            if name == "cond":
                for branch in held:
                    inline(branch, reads[1:])
            else:
                bodies += held
        values.update(zip(eqn.outvars, made, strict=True))
    return [read(x) for x in body.outvars]
