"""Casts at the edges of kernels: of their half operands, and of their half results.

A kernel that nobody can look into is typed by its operands. Who calls one on half
operands casts these down, and the results up; neither is a wish for a dtype of the
values themselves. So these casts are nodes of their own kind, and what a kernel makes
of its operands is an edge of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph.nodes import (
    KERNEL_OPERAND,
    KERNEL_RESULT,
    Node,
    is_float32,
    is_half,
    is_literal,
)
from jmp_rewrite._graph.scopes import Place
from jmp_rewrite._rules import COPIES, LEFT_ALONE, RULES, held_parameters, opaque_reason

# The transposes of what moves an operand: they add up a kernel's cotangents.
_ADDS_COTANGENTS = frozenset({"add_any", "reduce_sum"})


class _Half(NamedTuple):
    """What is known of a half variable.

    Attributes:
      made_of: the nodes of the casts that it is made of, through kernels as well.
      is_moved: whether it is one of these casts, moved.
      is_result: whether it is a kernel's result, moved.
    """

    made_of: frozenset[int]
    is_moved: bool
    is_result: bool


class Kernels:
    """Follows half values to kernels and behind them, while a graph is built."""

    def __init__(self, nodes: list[Node], half: np.dtype | None) -> None:
        self._nodes = nodes
        self._half = half
        self._known: dict[Any, _Half] = {}

    def enter(self, eqn: Any, body: Any) -> None:
        """Follows half operands of an equation into a jaxpr that it holds."""
        self._hand_on(eqn.invars, _compat.open_jaxpr(body).invars)

    def leave(self, body: Any, eqn: Any) -> None:
        """Follows half results of a jaxpr out of the equation that holds it."""
        self._hand_on(_compat.open_jaxpr(body).outvars, eqn.outvars)

    def _hand_on(self, given: Sequence[Any], received: Sequence[Any]) -> None:
        """Pairs variables from the end: what decides and counts comes first."""
        for atom, var in zip(reversed(given), reversed(received), strict=False):
            known = None if is_literal(atom) else self._known.get(atom)
            if known is not None and atom.aval.dtype == var.aval.dtype:
                self._known[var] = known
            elif not is_literal(var):
                self._known.pop(var, None)

    def follow(self, eqn: Any, node: int | None, place: Place) -> None:
        """Follows half values through an equation that holds nothing.

        Args:
          eqn: the equation.
          node: its node; None if nothing of it is float32.
          place: where it stands.
        """
        if eqn.primitive.name == "convert_element_type" and node is not None:
            self._cast(eqn, self._nodes[node], place)
        elif _is_kernel(eqn.primitive.name) or any(
            is_half(v.aval) for v in eqn.outvars
        ):
            self._compute(eqn, node, place)

    def _cast(self, eqn: Any, node: Node, place: Place) -> None:
        (atom,), (var,) = eqn.invars, eqn.outvars
        if var.aval.dtype == self._half:
            if place.call >= 0:
                node.name = KERNEL_OPERAND
            self._known[var] = _Half(frozenset({node.index}), True, False)
            return
        known = None if is_literal(atom) else self._known.get(atom)
        if is_float32(var.aval) and is_half(atom.aval):
            if place.call >= 0 or (known is not None and known.is_result):
                node.name = KERNEL_RESULT
                node.through = known.made_of if known is not None else frozenset()

    def _compute(self, eqn: Any, node: int | None, place: Place) -> None:
        read = [self._known.get(v) for v in eqn.invars if not is_literal(v)]
        known = [k for k in read if k is not None]
        made_of = frozenset().union(*(k.made_of for k in known))
        is_kernel = _is_kernel(eqn.primitive.name)
        if is_kernel:
            for moved in (k for k in known if k.is_moved):
                for cast in moved.made_of:
                    self._nodes[cast].name = KERNEL_OPERAND
            if node is not None:
                self._nodes[node].through = made_of
                made_of |= {node}
        # Behind these a kernel's result is still one, an operand still a cast value.
        moves = COPIES | _ADDS_COTANGENTS if place.backward else COPIES
        is_move = eqn.primitive.name in moves and bool(known)
        is_moved = is_move and all(k.is_moved for k in known)
        is_result = is_kernel or (is_move and all(k.is_result for k in known))
        for var in eqn.outvars:
            if is_half(var.aval):
                self._known[var] = _Half(made_of, is_moved, is_result)


@functools.lru_cache(maxsize=1024)
def _is_kernel(name: str) -> bool:
    """Whether nobody can look into a primitive."""
    if held_parameters(name):
        return False
    return name in LEFT_ALONE or name not in RULES or opaque_reason(name) is not None
