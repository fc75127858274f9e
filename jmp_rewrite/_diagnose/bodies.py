"""What an interpreter has to know of a jaxpr: last uses, and the casts put into it.

The rewrite leaves its casts the user's line: a rounding that of what it rounds, the
cast of an operand that of what reads it. So they are told from the user's own casts.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.evaluate import last_uses
from jmp_rewrite._graph import FLOAT32, PASS, is_half
from jmp_rewrite._passes import CASTS
from jmp_rewrite._rules import CALLS, held_jaxprs

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JAX = os.path.dirname(_compat.jax.__file__ or "") + os.sep
# A pass puts these between a value and what reads it.
_BETWEEN = frozenset({"by_device", "optimization_barrier"})


class Step(NamedTuple):
    """An equation as it is run.

    Attributes:
      eqn: the equation.
      rounding: the cast behind it that alone reads its result; None if there is none.
      inserted: whether it is a cast that the rewrite has put in.
      dead: variables that nobody reads after it.
    """

    eqn: Any
    rounding: Any
    inserted: bool
    dead: list[Any]


class Body:
    """A jaxpr as it is run.

    Attributes:
      jaxpr: the jaxpr, open or closed; kept, since its number is what it is known by.
      invars: its parameters, constants first.
      outvars: its results.
      steps: its equations.
    """

    def __init__(self, jaxpr: Any) -> None:
        body = _compat.open_jaxpr(jaxpr)
        self.jaxpr = jaxpr
        self.invars = [*body.constvars, *body.invars]
        self.outvars = body.outvars
        self._readers: dict[Any, list[Any]] = {v: [None] for v in _variables(body)}
        makers = {}
        for eqn in body.eqns:
            for var in _variables(eqn, "invars"):
                self._readers.setdefault(var, []).append(eqn)
            makers.update(dict.fromkeys(eqn.outvars, eqn))
        self._makers = makers
        self.steps = self._steps(body)

    def _steps(self, body: Any) -> list[Step]:
        dead = last_uses(body)
        steps: list[Step] = []
        for eqn, last in zip(body.eqns, dead, strict=True):
            inserted = rounds(eqn) and self._is_inserted(eqn)
            if inserted and steps and self._is_rounding(eqn, steps[-1].eqn):
                before = steps.pop()
                steps.append(Step(before.eqn, eqn, False, [*before.dead, *last]))
            else:
                steps.append(Step(eqn, None, inserted, last))
        return steps

    def _is_inserted(self, cast: Any) -> bool:
        """Whether the rewrite has put a cast in."""
        (operand,), (out,) = cast.invars, cast.outvars
        around = [self._makers.get(operand), *self._readers.get(out, ())]
        line = cast.source_info.traceback
        if any(e is not None and e.source_info.traceback is line for e in around):
            return True
        return is_of_pass(cast) or _is_emissions(cast)

    def _is_rounding(self, cast: Any, before: Any) -> bool:
        """Whether a cast is of the result of the equation before, for all readers."""
        (operand,) = cast.invars
        return (
            before.outvars == [operand]
            and self._readers.get(operand) == [cast]
            and cast.source_info.traceback is before.source_info.traceback
            and not rounds(before)
            and not held_jaxprs(before)
        )

    def reader(self, var: Any) -> tuple[Any, ...] | None:
        """Returns the first reader of a variable: an equation, behind its holders.

        None if the jaxpr hands it on.
        """
        eqn = self._readers.get(var, [None])[0]
        while eqn is not None and (eqn.primitive.name in _BETWEEN or is_of_pass(eqn)):
            position = min(_position(eqn, var), len(eqn.outvars) - 1)
            var = eqn.outvars[position]
            eqn = self._readers.get(var, [None])[0]
        if eqn is None:
            return None
        if eqn.primitive.name in CALLS or eqn.primitive.name == "scan":
            (held,) = held_jaxprs(eqn)
            inner = Body(held)
            parameters = _compat.open_jaxpr(held).invars
            if inside := inner.reader(parameters[_position(eqn, var)]):
                return (eqn, *inside)
        return (eqn,)


def rounds(eqn: Any) -> bool:
    """Whether an equation is a cast to half, from float32 or the other half."""
    if eqn.primitive.name not in CASTS or not is_half(eqn.outvars[0].aval):
        return False
    source = eqn.invars[0].aval
    return source.dtype == FLOAT32 or is_half(source)


def is_of_pass(eqn: Any) -> bool:
    """Whether a pass has put an equation in."""
    elements = _compat.scope_elements(eqn.source_info.name_stack)
    return any(e.name.startswith(PASS) for e in elements)


def _is_emissions(eqn: Any) -> bool:
    """Whether emission made an equation for no equation's sake: at a jaxpr's end."""
    files = (code.co_filename for code, _ in _compat.frames(eqn))
    first = next((f for f in files if not f.startswith(_JAX)), "")
    return first.startswith(_OWN)


def _variables(holder: Any, which: str = "outvars") -> list[Any]:
    atoms = dict.fromkeys(v for v in getattr(holder, which) if not hasattr(v, "val"))
    return list(atoms)


def _position(eqn: Any, var: Any) -> int:
    return next(i for i, v in enumerate(eqn.invars) if v is var)
