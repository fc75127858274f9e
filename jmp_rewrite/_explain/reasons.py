"""Why each node of a program is what it is, as a sentence.

This is all that a report knows of pins and placement: a new reason is a line here. The
dtypes in a report are read from the rewritten jaxpr itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jmp_rewrite._graph import Graph, Node
from jmp_rewrite._precision import FLOAT32_BYTES, HALF_BYTES, Label, Plan
from jmp_rewrite._rules import COMPARISONS, PRODUCTS, Category
from jmp_rewrite._units import bytes_text

# Categories beside those of the rules.
CALL = "call"
CAST = "cast"
INSERTED = "inserted"
INTERNAL = "internal"
NONE = "none"
UNKNOWN = "unknown"
CLEAR = Category.CLEAR.value

_PRODUCTS = {
    "conv_general_dilated": "convolution",
    "dot_general": "matrix product",
    "kernel_operand": "an operand of a kernel",
    "kernel_result": "the result of a kernel",
    "ragged_dot_general": "ragged matrix product",
}


class Verdict(NamedTuple):
    """What was decided for a node.

    Attributes:
      category: "allow", "infer", "deny", "clear", or "unknown" without a rule.
      reason: a sentence that begins with "half: " or "full: ".
    """

    category: str
    reason: str


class Verdicts:
    """Says of each node of a plan what was decided, and why."""

    def __init__(self, plan: Plan, line_of: Callable[[int], str]) -> None:
        """Keeps the plan.

        Args:
          plan: the program and what is done with it.
          line_of: returns a node's source line, "" where it is unknown.
        """
        self._plan = plan
        self._line_of = line_of

    def of(self, index: int) -> Verdict:
        """Returns the decision for a node, and its reason."""
        category = self._plan.pins.categories[index]
        name = UNKNOWN if category is None else category.value
        label = self._plan.labels[index]
        if label is Label.ROUNDED:
            why = _rounded(self._graph.nodes[index])
            if index in self._plan.pins.lookups:
                why = _LOOKUP
            elif category is Category.ALLOW:
                why = f"{self._why_full(index)}; {why}"
            return Verdict(name, f"full: {why}")
        if label is not Label.FLOAT32:
            return Verdict(name, f"half: {self._why_half(index)}")
        if self._graph.nodes[index].place.rewritten:
            return Verdict(name, "an inner mixed_precision has decided")
        return Verdict(name, f"full: {self._why_full(index)}")

    def _why_half(self, index: int) -> str:
        label = self._plan.labels[index]
        node = self._graph.nodes[index]
        category = self._plan.pins.categories[index]
        is_reduced = index in self._plan.pins.reduced
        if is_reduced and category is not Category.ALLOW:
            return _REDUCED
        if category is Category.ALLOW:
            what = _PRODUCTS.get(node.name, "a rule allows it")
            if label is not Label.WIDENED or node.name not in PRODUCTS:
                return f"{what}; {_REDUCED}" if is_reduced else what
            why = self._plan.pins.read_by.get(index, "").removeprefix("full: ")
            why += self._at(self._plan.pins.blame.get(index, -1)) if why else ""
            return f"{what}, with a float32 result" + (f": {why}" if why else "")
        if index in self._plan.pins.sinks or category is Category.CLEAR:
            return f"{_effect(node)} half values"
        return "safe between half values"

    def _why_full(self, index: int) -> str:
        pins = self._plan.pins
        pinned = pins.full[index]
        if pinned is None:
            return self._why_not_half(index)
        node = self._graph.nodes[index]
        is_cast = node.name == "convert_element_type"
        if is_cast and pins.categories[index] is Category.DENY:
            return _why_no_half_cast(node, self._plan.half)
        source = pins.upstream[index]
        if source < 0:
            why = pinned.removeprefix("full: ")
            return why + self._at(pins.blame.get(index, -1))
        line = self._line_of(source)
        name = self._graph.nodes[source].name
        return f"downstream of {name}" + (f" at {line}" if line else "")

    def _at(self, node: int) -> str:
        """Returns the source line of a node, as a part of a sentence."""
        line = self._line_of(node) if node >= 0 else ""
        return f" at {line}" if line else ""

    def _why_not_half(self, index: int) -> str:
        """Returns why the placement left a result float32 that may be half."""
        if self._any_half(self._graph.consumers()[index]):
            return "what reads it casts, which costs no memory"
        return "it stays in registers, where half would save nothing"

    def _any_half(self, nodes: list[int]) -> bool:
        return any(self._plan.labels[n] for n in nodes)

    @property
    def _graph(self) -> Graph:
        return self._plan.graph


_LOOKUP = "its result is rounded as an activation is multiplied by the table"
_REDUCED = "reduce_dtype sums gradients over devices in half"


def _rounded(node: Node) -> str:
    """Says what rounding the result of float32 arithmetic saves."""
    saved = node.trips * (FLOAT32_BYTES - HALF_BYTES) * node.size
    return f"only its result is rounded, once, which saves {bytes_text(saved)} stored"


_SELECTS = frozenset({"argmax", "argmin", "clamp", "max", "min", "select_n", "sort"})


def why_call(plan: Plan | None, name: str, carries: Sequence[int | None]) -> str:
    """Says what became of an equation that holds a program.

    Args:
      plan: what is done with the program; None if nothing is.
      name: what a reader calls the equation.
      carries: the nodes of a loop's carries, None for those that are not float32.
    """
    nodes = [node for node in carries if node is not None]
    why = f"{name} is rewritten inside"
    if plan is None or not nodes:
        return why
    half = sum(bool(plan.labels[node]) for node in nodes)
    return f"{why}; {half} of {len(nodes)} carries are half"


def _why_no_half_cast(node: Node, half: np.dtype) -> str:
    source = node.eqn.invars[0].aval.dtype
    if source.kind in "iu":
        exact = 2 / float(ml_dtypes.finfo(half).eps)
        return f"integers above {exact:g} are not exact in {half.name}"
    if source.name == "float32":
        return f"a cast to {node.eqn.params['new_dtype'].name} keeps its operand"
    return f"a cast from {source.name} to float32 is obeyed"


def _effect(node: Node) -> str:
    if node.name in COMPARISONS:
        return "compares"
    if node.name in _SELECTS or node.name.startswith(("reduce_", "top_k")):
        return "selects from"
    return "moves"
