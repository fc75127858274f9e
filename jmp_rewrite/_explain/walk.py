"""Walks the original and the rewritten program side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core as jex

from jmp_rewrite import _compat, _passes
from jmp_rewrite._explain.provenance import Emitted, Origin
from jmp_rewrite._explain.reasons import (
    CALL,
    CAST,
    CLEAR,
    INSERTED,
    INTERNAL,
    NONE,
    UNKNOWN,
    Verdict,
    why_call,
)
from jmp_rewrite._explain.residuals import CASTS, HALVES
from jmp_rewrite._graph import PASS, TOP, Graph, Inner, Instance, Place, inner_place
from jmp_rewrite._precision import Plan
from jmp_rewrite._rules import held_jaxprs, held_parameters
from jmp_rewrite._source import Caller, Line, Lines

_STORES_CARRIES = (
    "loops carry in half what is read rounded alone; if it is differentiated, they "
    "carry it in float32"
)
_MERGES_STOPPED = (
    "what stop_gradient stops is computed once with what it does not; if it is "
    "differentiated, each is computed"
)


class Draft(NamedTuple):
    """A row before reasons are known, which name other rows' lines."""

    eqn: Any
    origin: Any  # the original equation; None for a cast that joins
    node: int  # -1: no node of its own
    verdict: Verdict | None  # None: what the plan says of the node
    place: Place
    line: Line
    trips: int


def walk(graph: Graph, plan: Plan | None, emitted: Emitted) -> list[Draft]:
    """Returns a draft for each equation of the rewritten program.

    A body that the plan analyses once for all its uses comes once, with the trips of
    all uses.

    Args:
      graph: the original program.
      plan: what is done with it; None if nothing is.
      emitted: the rewritten program.
    """
    walking = _Walk(graph, plan, emitted)
    if emitted.program is not emitted.closed:
        walking.whole(emitted.closed, graph.top)
    walking.visit(emitted.program, graph.top, TOP, None)
    return walking.drafts


class _Walk:
    """Walks the original and the rewritten program side by side."""

    def __init__(self, graph: Graph, plan: Plan | None, emitted: Emitted) -> None:
        self.drafts: list[Draft] = []
        self._plan = plan
        self._origins = emitted.origins
        self._trips = _trips(graph.top)
        self._lines = Lines()
        self._visited: set[Instance] = set()

    def whole(self, closed: Any, use: Instance) -> None:
        """Drafts the row of what holds a program that is not differentiated."""
        (eqn,) = _compat.open_jaxpr(closed).eqns
        step = _Step(use, -1, None, TOP, None, self._trips[use])
        merges = self._plan is not None and self._plan.if_differentiated is not None
        why = _MERGES_STOPPED if merges else _STORES_CARRIES
        self._draft(eqn, step, verdict=Verdict(INSERTED, why))

    def visit(
        self, jaxpr: Any, use: Instance, place: Place, caller: Caller | None
    ) -> None:
        """Drafts the rows of one use of a jaxpr."""
        if use in self._visited:
            return
        self._visited.add(use)
        body = _compat.open_jaxpr(jaxpr)
        origins = self._origins.get(body)
        if origins is None:
            origins = _aligned(body, _compat.open_jaxpr(use.jaxpr))
        if origins is None:
            step = _Step(use, -1, None, place, caller, self._trips[use])
            self._unknown(jaxpr, step, _AS_IT_WAS)
            return
        rows = [
            (part, origin, step)
            for eqn, origin in zip(body.eqns, origins, strict=True)
            for step in [self._step(origin, use, place, caller)]
            for part in _opened(eqn, step.eqn)
        ]
        eqns, steps = [row[0] for row in rows], [row[2] for row in rows]
        origins = [row[1] for row in rows]
        made = self._made(eqns, origins, steps)
        for index, (eqn, step) in enumerate(zip(eqns, steps, strict=True)):
            if made.get(origins[index]) == index:
                self._made_from(eqn, step)
            else:
                self._inserted(eqn, step, made.get(origins[index], -1) > index)

    def _step(
        self, origin: Origin, use: Instance, place: Place, caller: Caller | None
    ) -> _Step:
        """Finds the original equation.

        It stands in another jaxpr if a call was dissolved, or behind the loop that it
        stood in.
        """
        trips = self._trips[use]
        step = _Step(use, -1, None, place, caller, trips)
        for index in origin:
            if step.eqn is not None:  # a call
                (use,) = step.use.inner[step.position].bodies
                caller = Caller(step.eqn, step.caller)
            eqn = _compat.open_jaxpr(use.jaxpr).eqns[index]
            step = _Step(use, index, eqn, _inside(eqn, step.place), caller, trips)
        return step

    def _made(
        self, eqns: Sequence[Any], origins: Sequence[Origin], steps: Sequence[_Step]
    ) -> dict[Origin, int]:
        """Returns which equation each original one has become."""
        return {
            origin: index
            for index, (eqn, origin, step) in enumerate(
                zip(eqns, origins, steps, strict=True)
            )
            if step.eqn is not None and self._continues(eqn, step.eqn)
        }

    def _continues(self, eqn: Any, original: Any) -> bool:
        names = original.primitive.name, eqn.primitive.name
        is_view = names == ("reduce_sum", "squeeze")  # a sum of one term
        if names[0] != names[1] and not is_view or _pass_of(eqn) is not None:
            return False
        if eqn.primitive.name != "convert_element_type" or self._plan is None:
            return True
        before, after = _dtypes(original), _dtypes(eqn)
        return after == before or set(after) != {"float32", self._plan.half.name}

    def _made_from(self, eqn: Any, step: _Step) -> None:
        """Drafts the row of an equation, and those of what it holds."""
        inner = step.use.inner.get(step.position)
        entry = step.use.nodes[step.position]
        if inner is not None:
            self._call(eqn, step, inner)
        elif held_parameters(eqn.primitive.name):
            self._untouched(eqn, step, step.trips)
        elif isinstance(entry, tuple):
            verdict = Verdict(CLEAR, "each operand keeps its own dtype")
            self._draft(eqn, step, verdict=verdict)
        elif entry is None:
            verdict = _DECIDED if step.place.rewritten else _without_float32(eqn)
            self._draft(eqn, step, verdict=verdict)
            self._internal(eqn, step)
        else:
            self._draft(eqn, step, entry)
            self._internal(eqn, step)

    def _call(self, eqn: Any, step: _Step, inner: Inner) -> None:
        """Drafts the rows of what is rewritten inside."""
        why = why_call(self._plan, _name(step.eqn), inner.carry_in)
        self._draft(eqn, step, verdict=Verdict(CALL, why))
        caller = Caller(step.eqn, step.caller)
        for jaxpr, body in zip(held_jaxprs(eqn), inner.bodies, strict=True):
            self.visit(jaxpr, body, inner.place, caller)

    def _untouched(self, eqn: Any, step: _Step, trips: int) -> None:
        """Drafts the rows of what could be rewritten inside, and is not."""
        name = _name(eqn)
        by_rule = Verdict(UNKNOWN, f"full: {name} is left alone by a rule")
        verdict = _DECIDED if step.place.rewritten else by_rule
        self._draft(eqn, step, verdict=Verdict(CALL, verdict.reason), trips=trips)
        here = step._replace(caller=Caller(eqn, step.caller))
        for held in held_jaxprs(eqn):
            self._unknown(held, here, verdict, trips * _repeats(eqn))

    def _unknown(
        self, jaxpr: Any, step: _Step, verdict: Verdict, trips: int | None = None
    ) -> None:
        """Drafts rows of which no more is known than the jaxpr itself says."""
        for eqn in _compat.open_jaxpr(jaxpr).eqns:
            here = step._replace(eqn=eqn, place=_inside(eqn, step.place))
            if held_parameters(eqn.primitive.name):
                self._untouched(eqn, here, trips or step.trips)
            else:
                self._draft(eqn, here, verdict=verdict, trips=trips)
                self._internal(eqn, here)

    def _internal(self, eqn: Any, step: _Step) -> None:
        """Drafts the rows of what a kernel or a callback holds."""
        verdict = Verdict(INTERNAL, f"inside {step.eqn.primitive.name}")
        for held in jex.jaxprs_in_params(eqn.params):
            for inner in _compat.open_jaxpr(held).eqns:
                self._draft(inner, step, verdict=verdict)
                self._internal(inner, step)

    def _inserted(self, eqn: Any, step: _Step, before: bool) -> None:
        """Drafts the row of what the rewrite put in."""
        node = -1
        if step.eqn is not None:
            entry = step.use.nodes[step.position]
            node = entry if isinstance(entry, int) else -1
        verdict = _why_inserted(eqn, step.eqn, before or node < 0)
        self._draft(eqn, step, node, verdict)

    def _draft(
        self,
        eqn: Any,
        step: _Step,
        node: int = -1,
        verdict: Verdict | None = None,
        trips: int | None = None,
    ) -> None:
        line = self._lines.of(step.eqn or eqn, step.caller)
        trips = step.trips if trips is None else trips
        self.drafts.append(Draft(eqn, step.eqn, node, verdict, step.place, line, trips))


def _inside(eqn: Any, place: Place) -> Place:
    """Returns the place of an equation of a jaxpr that stands somewhere."""
    return inner_place(place, _compat.scope_elements(eqn.source_info.name_stack))


def _opened(eqn: Any, original: Any) -> Sequence[Any]:
    """Returns an equation, and those of a call that the rewrite has made of one.

    A product before differentiation has a derivative of its own.
    """
    is_call = eqn.primitive.name == "custom_jvp_call"
    if not is_call or original is None or original.primitive is eqn.primitive:
        return (eqn,)
    (held,) = held_jaxprs(eqn)
    return [eqn, *_compat.open_jaxpr(held).eqns]


def _aligned(body: Any, original: Any) -> list[Origin] | None:
    """Returns of each equation the one that it was in a jaxpr that nothing rewrote.

    Passes may have edited it: what they put in belongs to what stands before it. None
    if equations have changed in another way.
    """
    left = enumerate(original.eqns)
    origins: list[Origin] = []
    index = 0
    for eqn in body.eqns:
        if body is original or _pass_of(eqn) is None:
            index = next((i for i, e in left if e.primitive is eqn.primitive), -1)
            if index < 0:
                return None
        origins.append((index,))
    return origins


_AS_IT_WAS = Verdict(UNKNOWN, "as it was")
_DECIDED = Verdict(UNKNOWN, "an inner mixed_precision has decided")


def _without_float32(eqn: Any) -> Verdict:
    dtypes = {str(getattr(v.aval, "dtype", "")) for v in (*eqn.invars, *eqn.outvars)}
    if dtypes.isdisjoint(HALVES):
        return Verdict(NONE, "no float32 value")
    return Verdict(NONE, "half: it was half before")


# Why the emitter puts a primitive in. What passes put in is told by its name scope.
_INSERTED = {
    "optimization_barrier": "keeps a compiler from seeing what it was made of",
    "by_device": "TPUs do not merge a sum with the sum of it",
}


def _why_inserted(eqn: Any, original: Any, before: bool) -> Verdict:
    if (name := _pass_of(eqn)) is not None:
        return Verdict(INSERTED, f"{name}: {_passes.REASONS[name]}")
    if eqn.primitive.name == "custom_jvp_call":
        return Verdict(CALL, "holds what has a derivative of half products")
    if (why := _INSERTED.get(eqn.primitive.name)) is not None:
        return Verdict(INSERTED, why)
    if eqn.primitive.name in ("reshape", "transpose") and original is not None:
        return Verdict(INSERTED, "gives a matrix multiplication operands in this order")
    if eqn.primitive.name not in CASTS:
        return Verdict(INSERTED, "computed again from what is stored")
    source, target = _dtypes(eqn)
    if source == target:
        return Verdict(INSERTED, "keeps a weak type")
    if original is None:
        return Verdict(CAST, f"cast: it is handed on in {target}")
    name = _name(original)
    if before:
        return Verdict(CAST, f"cast: {name} reads {target}")
    return Verdict(CAST, f"cast: {name} was computed in {source}")


def _pass_of(eqn: Any) -> str | None:
    """Returns the pass that has put an equation in, the last one if several."""
    for element in reversed(_compat.scope_elements(eqn.source_info.name_stack)):
        if element.name.startswith(PASS):
            return str(element.name).removeprefix(PASS)
    return None


class _Step(NamedTuple):
    """Where an original equation stands.

    Attributes:
      use: the use of the jaxpr that holds it.
      position: its index in there.
      eqn: the equation; None for what was put in at the end of a jaxpr.
      place: where it stands.
      caller: the equation that holds the jaxpr.
      trips: how often what it has become runs.
    """

    use: Instance
    position: int
    eqn: Any
    place: Place
    caller: Caller | None
    trips: int


def _name(eqn: Any) -> str:
    """Returns a readable name of an equation: of a `jit`, the function's."""
    name = eqn.primitive.name
    return str(eqn.params.get("name", name)) if name == "jit" else name


def _dtypes(cast: Any) -> tuple[str, str]:
    return str(cast.invars[0].aval.dtype), str(cast.outvars[0].aval.dtype)


def _trips(top: Instance) -> dict[Instance, int]:
    """Returns how often each use of a jaxpr runs in one call of the program."""
    order: list[Instance] = []
    seen: set[Instance] = set()

    def note(use: Instance) -> None:
        if use not in seen:
            seen.add(use)
            for inner in use.inner.values():
                for body in inner.bodies:
                    note(body)
            order.append(use)

    note(top)
    trips = dict.fromkeys(order, 0)
    trips[top] = 1
    for use in reversed(order):
        eqns = _compat.open_jaxpr(use.jaxpr).eqns
        for index, inner in use.inner.items():
            for body in inner.bodies:
                trips[body] += trips[use] * _repeats(eqns[index])
    return trips


def _repeats(eqn: Any) -> int:
    """Returns how often an equation runs what it holds; 1 where nobody knows."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":
        shape = dict(eqn.params["mesh"].shape)
        axes = eqn.params["newly_manual_axes"]
        return int(math.prod(shape.get(a, 1) for a in axes))
    return 1
