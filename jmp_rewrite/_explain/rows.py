"""A row for each equation of the rewritten program: what, where, and why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from jmp_rewrite._explain import residuals
from jmp_rewrite._explain.reasons import (
    CALL,
    CAST,
    INSERTED,
    INTERNAL,
    NONE,
    Verdict,
    Verdicts,
)
from jmp_rewrite._explain.walk import Draft
from jmp_rewrite._graph import Place
from jmp_rewrite._precision import Plan
from jmp_rewrite._rules import PRODUCTS
from jmp_rewrite._source import Line


@dataclasses.dataclass(frozen=True, slots=True)
class Equation:
    """An equation of the rewritten program.

    Attributes:
      primitive: its name, as a printed jaxpr shows it.
      category: "allow", "infer", "deny", "clear", "unknown" (no rule), "cast" (put in
        by the rewrite), "inserted" (as well, but it moves nothing), "call" (holds a
        program, which has rows of its own), "internal" (inside something that is left
        alone), or "none" (no float32 value).
      dtype: what it computes in: the dtype of a product's operands, and of any other
        equation's first floating-point result.
      reason: why, as a sentence.
      line: the user's source line, such as "model.py:41"; "" if it is unknown.
      file: the path of that line's file.
      function: the qualified name of the function that the line stands in.
      scope: the path of name scopes, outermost first, joined by "/".
      layer: what reports group it by: the scope, else the path of the parameter that
        it uses, else the function.
      phase: "forward", "backward", or "update" for what follows from a backward pass.
      operands: the types of its operands, such as "bf16[8,512]".
      results: the types of its results.
      trips: how often it runs in one call: trips of loops times members of a mesh.
      dimensions: of a product its rows and features, which are its features alone in a
        convolution; the features come last.
      flops: multiplications and additions of a product, all trips together.
      bytes: bytes of its results, all trips together; 0 for calls, whose results the
        equations inside make, and for views (reshapes and broadcasts).
      stored_bytes: those of them that a compiler writes to memory, as `stored.py`
        models it; the rest stays in registers.
      stored: the dtype of most of these bytes.
    """

    primitive: str
    category: str
    dtype: str
    reason: str
    line: str
    file: str
    function: str
    scope: str
    layer: str
    phase: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    trips: int
    dimensions: tuple[int, ...]
    flops: int
    bytes: int
    stored_bytes: int
    stored: str

    @property
    def kind(self) -> str:
        """What its results are: "half", "full", "cast", or "other".

        Others are integers, float64, and what has no bytes of its own: calls.
        """
        if self.category == CAST:
            return CAST
        if self.category in (CALL, INSERTED, INTERNAL):
            return "other"
        if self.stored in residuals.HALVES:
            return "half"
        return "full" if self.stored == "float32" else "other"

    @property
    def memory(self) -> str:
        """Where its results are: "half" or "full" in memory, "register", or "other"."""
        if self.category in (CALL, INSERTED, INTERNAL) or not self.bytes:
            return "other"
        if not self.stored_bytes:
            return "register"
        if self.stored in residuals.HALVES:
            return "half"
        return "full" if self.stored == "float32" else "other"


class Labels(NamedTuple):
    """What is known of nodes beyond their verdict.

    Attributes:
      layers: node -> the path of the parameter that it uses.
      late: nodes that follow from a backward pass.
    """

    layers: Mapping[int, str]
    late: frozenset[int]


def rows(
    drafts: Sequence[Draft],
    plan: Plan | None,
    labels: Labels,
    stored: Container[int],
) -> list[Equation]:
    """Returns a row for each equation of the rewritten program.

    Args:
      drafts: as `walk` finds them.
      plan: what is done with the original program; None if nothing is.
      labels: what is known of its nodes.
      stored: `id` of each variable that is written to memory.
    """
    lines = {d.node: d.line for d in drafts if d.verdict is None}
    verdicts = None
    if plan is not None:
        verdicts = Verdicts(plan, lambda node: str(lines.get(node, "")))
    writer = _Writer(verdicts, labels, stored)
    return [writer.row(draft) for draft in drafts]


class _Type(NamedTuple):
    """What rows say of a value's type: its dtype, its bytes, and how it is written."""

    dtype: str
    nbytes: int
    text: str


class _Writer:
    """Makes rows of drafts."""

    def __init__(
        self, verdicts: Verdicts | None, labels: Labels, stored: Container[int]
    ) -> None:
        self._stored = stored
        self._verdicts = verdicts
        self._labels = labels
        self._types: dict[int, tuple[Any, _Type]] = {}
        self._layers: dict[tuple[str, str, Line], str] = {}

    def row(self, draft: Draft) -> Equation:
        """Makes the row of a draft."""
        eqn, trips = draft.eqn, draft.trips
        category, reason = draft.verdict or self._verdict(draft.node)
        operands = [self._type(v.aval) for v in eqn.invars]
        results = [self._type(v.aval) for v in eqn.outvars]
        counts = category not in (CALL, INSERTED, INTERNAL)
        writes = counts and eqn.primitive.name not in residuals.VIEWS
        return Equation(
            primitive=eqn.primitive.name,
            category=category,
            dtype=_computed_in(eqn, operands, results),
            reason=reason,
            line=str(draft.line),
            file=draft.line.file,
            function=draft.line.function,
            scope=draft.place.path,
            layer=self._layer(draft),
            phase=_phase(draft.place, draft.node in self._labels.late),
            operands=tuple(t.text for t in operands),
            results=tuple(t.text for t in results),
            trips=trips,
            dimensions=residuals.aligned_dimensions(eqn),
            flops=residuals.flops(eqn) * trips if counts else 0,
            bytes=sum(t.nbytes for t in results) * trips if writes else 0,
            stored_bytes=self._stored_bytes(eqn, results) * trips if writes else 0,
            stored=max(results, key=lambda t: t.nbytes).dtype if results else "",
        )

    def _stored_bytes(self, eqn: Any, results: Sequence[_Type]) -> int:
        pairs = zip(eqn.outvars, results, strict=True)
        return sum(t.nbytes for v, t in pairs if id(v) in self._stored)

    def _verdict(self, node: int) -> Verdict:
        if self._verdicts is None:
            return Verdict(NONE, "full: the policy is float32")
        return self._verdicts.of(node)

    def _type(self, aval: Any) -> _Type:
        """Describes a type once; equations share them."""
        if id(aval) not in self._types:
            short = getattr(aval, "str_short", None)
            text = short(short_dtypes=True) if short else str(aval)
            dtype = str(getattr(aval, "dtype", ""))
            self._types[id(aval)] = aval, _Type(dtype, residuals.nbytes(aval), text)
        return self._types[id(aval)][1]

    def _layer(self, draft: Draft) -> str:
        if draft.origin is None and not names_layer(draft.place.path):
            return "(results)"
        late = draft.node in self._labels.late and not draft.place.backward
        parameter = "" if late else self._labels.layers.get(draft.node, "")
        key = (draft.place.path, parameter, draft.line)
        if key not in self._layers:
            self._layers[key] = _layer(*key)
        return self._layers[key]


def _computed_in(eqn: Any, operands: Sequence[_Type], results: Sequence[_Type]) -> str:
    is_product = eqn.primitive.name in PRODUCTS
    types = [*operands, *results] if is_product else [*results, *operands]
    for kind in ("float", "complex", ""):
        for t in types:
            if kind in t.dtype and t.dtype:
                return t.dtype
    return ""


def _phase(place: Place, late: bool) -> str:
    if place.backward:
        return "backward"
    return "update" if late else "forward"


def names_layer(path: str) -> bool:
    """Whether a path of scopes names a layer."""
    return any(p and not _is_anonymous(p) for p in path.split("/"))


def _layer(path: str, parameter: str, line: Line) -> str:
    """Returns a readable path: scopes that name no layer are left out."""
    if names_layer(path):
        names = [p for p in path.split("/") if p and not _is_anonymous(p)]
        # Flax names the model again inside of what it lifts.
        return "/".join(name for name, _ in itertools.groupby(names))
    if parameter:
        return parameter
    if not line.file:
        return "(no scope)"
    function = line.function.rpartition("<locals>.")[2]
    return str(line) if function.startswith("<") else f"{function}()"


def _is_anonymous(name: str) -> bool:
    """Whether a scope is of `jnp.einsum`, of an Equinox class, or our own."""
    return "->" in name or name.startswith(("eqx.nn.", "jmp_rewrite."))
