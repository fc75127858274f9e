"""Solvers: loops that update a state until a comparison of its values ends them.

An integrator with a controlled error accepts a step or takes a shorter one; a
root-finder goes on until its change is small. Which steps are taken depends on every
value of the loop, and a backward pass that takes them again (an adjoint that stores
nothing, a replay from checkpoints) has to come to the same ones. Where values are
rounded is chosen by what the program stores, which is not the same in both. So between
the matrix multiplications of a solver nothing is rounded, and nothing in a loop that
runs the same lines again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph import Graph, Loop
from jmp_rewrite._rules import held_jaxprs
from jmp_rewrite._source import Lines

_COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})


def inside_solvers(graph: Graph, products: set[int], state: set[int]) -> set[int]:
    """Returns the nodes of solvers, and of loops that run the same lines again.

    Args:
      graph: the program.
      products: its matrix multiplications on half operands.
      state: the nodes that hold state.
    """
    own = [x for x in graph.loops if _updates(x, state) and ends_by_floats(x.eqn)]
    inside = {n for loop in own for n in loop.nodes}
    if inside.isdisjoint(products):
        return set()
    lines = Lines()
    own_lines = {lines.of(graph.nodes[n].eqn, None) for n in inside & products}
    for node in products - inside:
        line = lines.of(graph.nodes[node].eqn, None)
        if line.file and line in own_lines:
            around = [x.nodes for x in graph.loops if node in x.nodes]
            inside.update(*sorted(around, key=len)[:1])
    return inside


def _updates(loop: Loop, state: set[int]) -> bool:
    """Whether a loop's length is not known, and it carries state."""
    carries = loop.carries if loop.eqn.primitive.name == "while" else ()
    return any(received in state for received, _ in carries)


def ends_by_floats(eqn: Any) -> bool:
    """Whether the end of a `while` depends on a comparison of float values.

    An integer that is made of floats, as the next token is, asks for none.
    """
    test, body = (
        _compat.open_jaxpr(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr")
    )
    asks, read = _asked(test, [0])
    first, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    left = {n - first for n in read if n >= first}
    seen: set[int] = set()
    while left and not asks:
        seen |= left
        asks, read = _asked(body, left)
        left = {n - own for n in read if n >= own} - seen
    return asks


def _asked(jaxpr: Any, results: Iterable[int]) -> tuple[bool, set[int]]:
    """Follows booleans and integers of a jaxpr back to where they come from.

    Returns:
      Whether a comparison of floats is among it, and the parameters that are.
    """
    makers = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
    stack, seen = [jaxpr.outvars[n] for n in results], set[Any]()
    while stack:
        atom = stack.pop()
        if hasattr(atom, "val") or atom in seen or _is_float(atom):
            continue
        seen.add(atom)
        eqn, position = makers.get(atom, (None, 0))
        if eqn is None:
            continue
        operands: Sequence[Any] = eqn.invars
        if eqn.primitive.name in _COMPARISONS and any(map(_is_float, operands)):
            return True, set()
        if held := held_jaxprs(eqn):
            asks, operands = _asked_inside(eqn, held, position)
            if asks:
                return True, set()
        stack += operands
    return False, {n for n, v in enumerate(jaxpr.invars) if v in seen}


def _asked_inside(
    eqn: Any, held: Sequence[Any], position: int
) -> tuple[bool, list[Any]]:
    """Follows a result of an equation that holds jaxprs, whose operands are its last.

    A branch asks for the number of the branch, and a loop for its end, besides.
    """
    operands = [v for v in eqn.invars if not getattr(v.aval, "shape", ())]
    for jaxpr in map(_compat.open_jaxpr, held):
        if position < len(jaxpr.outvars):
            asks, read = _asked(jaxpr, [position])
            if asks:
                return True, []
            shift = len(eqn.invars) - len(jaxpr.invars)
            operands += [eqn.invars[n + shift] for n in read if n + shift >= 0]
    return False, operands


def _is_float(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)
