"""What numerics says of each node: its category, and why it must be float32 if it must.

`pinning.py` fills it in; the placement chooses among what is left free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jmp_rewrite._graph import Graph, Node
from jmp_rewrite._precision.local import FULL_PRECISION, SCOPE
from jmp_rewrite._precision.placement import BareGraph
from jmp_rewrite._rules import SHARP, Category, table
from jmp_rewrite._source import where

STATE = "full: state: updated in its own shape"
NO_PRODUCT = "full: no matrix product depends on it (optimizer, metrics, outputs)"
EXACT = "full: exact: no matrix product made it (an argument, a draw, a constant)"
FEW = "full: few numbers of a loss, of which half saves nothing"
ADDED = "full: an exact array is added, and would be rounded with it"
DIFFERENCE = "full: read unrounded by a difference of float32 values"
SUMMED = "full: a gradient is a sum of it and others, which may cancel"
STATISTIC = "full: a statistic: it is small, and much is computed from it"
DECAY = "full: a loop multiplies what it carries by it, in each iteration"
SOLVER = "full: a solver: what it stops at depends on each of its values"


@dataclasses.dataclass(eq=False)
class Pins:
    """What numerics says of each node.

    Attributes:
      categories: the category that holds for it; None for what nobody knows.
      full: the reason why it must be float32; None if it may be half.
      upstream: the deny node upstream of it; -1 if none.
      forced: nodes that a scope "half" covers.
      half: the compute dtype.
      emits_full: products whose result no product needs in half: they emit float32.
      whole_step: whether the program is a whole step, which nobody differentiates.
      out_of_range: nodes with a number that the compute dtype cannot hold.
      moved: nodes that only move arguments' values -> dimensions of the arguments.
      trained: the arguments that are parameters, in a whole step.
      sinks: nodes without a float32 result that take the precision of what they read.
      rounds_after: nodes that compute in float32, whose result may be rounded once.
      lossy: clear nodes with a number that the compute dtype rounds.
      read_by: products -> why their result is read unrounded.
      blame: nodes -> the node whose source line belongs into their reason.
      factors: nodes that a product reads, or what moves them to it.
      exact: nodes without a matrix multiplication upstream.
      lookups: of no whole step, lookups in tables that an activation is multiplied by:
        rounded where they are made, so that the table may be stored in half.
      reduced: nodes whose results are summed over devices in half.
      decays: what loops multiply the states by that they carry.
      contrasts: the products that make gradients of which a difference is taken.
      shares: the nodes that sum along a softmax what that hands back.
    """

    categories: list[Category | None]
    full: list[str | None]
    upstream: list[int]
    forced: set[int]
    half: np.dtype
    emits_full: frozenset[int] = frozenset()
    whole_step: bool = False
    out_of_range: frozenset[int] = frozenset()
    moved: Mapping[int, int] = dataclasses.field(default_factory=dict)
    trained: frozenset[int] = frozenset()
    sinks: frozenset[int] = frozenset()
    rounds_after: frozenset[int] = frozenset()
    lossy: frozenset[int] = frozenset()
    read_by: Mapping[int, str] = dataclasses.field(default_factory=dict)
    factors: frozenset[int] = frozenset()
    exact: frozenset[int] = frozenset()
    lookups: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()
    decays: frozenset[int] = frozenset()
    contrasts: frozenset[int] = frozenset()
    shares: frozenset[int] = frozenset()
    blame: dict[int, int] = dataclasses.field(default_factory=dict)

    def products(self) -> set[int]:
        """Returns the matrix multiplications that run on half operands."""
        return {n for n in range(len(self.full)) if self.reads_half(n)}

    def reads_half(self, node: int) -> bool:
        """Whether a node is a matrix multiplication of half operands."""
        return self.categories[node] is Category.ALLOW and self.full[node] is None

    def moves_exactly(self, node: Node) -> bool:
        """Whether a node computes no new numbers: its half result is exact."""
        is_clear = self.categories[node.index] is Category.CLEAR
        return is_clear and node.index not in self.lossy and node.name not in SHARP

    def may_round(self, node: int) -> bool:
        """Whether a result may be half."""
        return self.full[node] is None or node in self.rounds_after

    def is_asked_full(self, node: int) -> bool:
        """Whether `full_precision` or a scope of the user's makes it float32."""
        why = self.full[node] or ""
        return why == FULL_PRECISION or why.startswith(SCOPE)

    def reason(self, graph: Graph, node: int) -> str:
        """Returns why a node is what it is, as a sentence."""
        source = self.upstream[node]
        if self.full[node] is None:
            return table.reason(
                graph.nodes[node].name, self.categories[node] or Category.CLEAR
            )
        if node in self.blame:
            return f"{self.full[node]} at {where(graph.nodes[self.blame[node]].eqn)}"
        if source < 0:
            return self.full[node] or ""
        denied = graph.nodes[source]
        return f"full: downstream of {denied.name} at {where(denied.eqn)}"


def bare(graph: Graph, pins: Pins) -> BareGraph:
    """Returns the graph as the placement sees it: pinned nodes are walls."""
    categories = [
        c if full is None or c is Category.DENY else None
        for c, full in zip(pins.categories, pins.full, strict=True)
    ]
    carries = [(o, i) for loop in graph.loops for i, o in loop.carries]
    return BareGraph(categories, graph.predecessors(), graph.consumers(), carries)
