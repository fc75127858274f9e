"""Solvers: loops that update a state until a comparison of its values ends them.

An integrator with a controlled error accepts a step or takes a shorter one; a
root-finder goes on until its change is small. Which steps are taken depends on every
value of the loop, and a backward pass that takes them again (an adjoint that stores
nothing, a replay from checkpoints) has to come to the same ones. Where values are
rounded is chosen by what the program stores, which is not the same in both. So between
the matrix multiplications of a solver nothing is rounded, and nothing in a loop that
runs the same lines again. A loop over train steps is none: it holds both passes, and
no other loop runs its lines again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph import Graph, Loop, is_backward
from jmp_rewrite._precision.origins import Roots
from jmp_rewrite._rules import COMPARISONS, held_jaxprs
from jmp_rewrite._source import Lines


def inside_solvers(graph: Graph, products: set[int], state: set[int]) -> set[int]:
    """Returns the nodes of solvers, and of loops that run the same lines again.

    Args:
      graph: the program.
      products: its matrix multiplications on half operands.
      state: the nodes that hold state.
    """
    own = [x for x in graph.loops if _updates(x, state) and ends_by_floats(x.eqn)]
    own = [x for x in own if not products.isdisjoint(x.nodes)]
    if not own:
        return set()
    lines = Lines()
    runs: dict[Any, list[range]] = {}  # the innermost loops of the products of a line
    for node in products:
        line = lines.of(graph.nodes[node].eqn, None)
        around = [x.nodes for x in graph.loops if node in x.nodes]
        if line.file and around:
            runs.setdefault(line, []).append(min(around, key=len))
    inside: set[int] = set()
    for loop in own:
        holds_both = len(_passes(graph, loop.nodes)) == 2
        again: set[range] = set()
        for each in runs.values():
            inner = {x for x in each if x[0] in loop.nodes}
            if loop.nodes in inner or (inner and not holds_both):
                others = set(each) - inner
                again |= {x for x in others if len(_passes(graph, x)) == 1}
        if again or not holds_both:
            inside.update(loop.nodes, *again)
    return inside


def equal_products(graph: Graph, products: set[int], solved: set[int]) -> set[int]:
    """Returns the matrix multiplications that a solver computes as well.

    What is made of them and of what the solver has come to, as a plan of transport of
    its potentials, fits together if they are the same numbers.
    """
    inside = products & solved
    if not inside:
        return set()
    roots = Roots(graph.nodes)

    def name(index: int) -> Hashable:
        node = graph.nodes[index]
        return str(node.eqn.params), tuple(map(roots.root, node.inputs))

    known = {name(index) for index in inside}
    return {index for index in products if name(index) in known}


def _passes(graph: Graph, nodes: Iterable[int]) -> set[bool]:
    """Returns of which passes nodes are: whether it is a backward pass."""
    return {is_backward(graph.nodes[n]) for n in nodes}


def _updates(loop: Loop, state: set[int]) -> bool:
    """Whether a loop's length is not known, and it carries state."""
    carries = loop.carries if loop.eqn.primitive.name == "while" else ()
    return any(received in state for received, _ in carries)


def ends_by_floats(eqn: Any) -> bool:
    """Whether the end of a `while` depends on a comparison of float values.

    An integer that is made of floats, as the next token is, asks for none.
    """
    return _ends_by(eqn, _is_float)


def ends_by_integers(eqn: Any) -> bool:
    """Whether the end of a `while` depends on a comparison of integers.

    That is one of a number of iterations, in the test or in a flag that is carried.
    """
    return _ends_by(eqn, _is_integer)


def _ends_by(eqn: Any, compared: Callable[[Any], bool]) -> bool:
    """Whether the end of a `while` depends on a comparison of values of a kind."""
    test, body = (
        _compat.open_jaxpr(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr")
    )
    asks, read = _asked(test, [0], compared)
    first, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    left = {n - first for n in read if n >= first}
    seen: set[int] = set()
    while left and not asks:
        seen |= left
        asks, read = _asked(body, left, compared)
        left = {n - own for n in read if n >= own} - seen
    return asks


def _asked(
    jaxpr: Any, results: Iterable[int], compared: Callable[[Any], bool]
) -> tuple[bool, set[int]]:
    """Follows booleans and integers of a jaxpr back to where they come from.

    Returns:
      Whether a comparison of such values is among it, and the parameters that are.
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
        if eqn.primitive.name in COMPARISONS and any(map(compared, operands)):
            return True, set()
        if held := held_jaxprs(eqn):
            asks, operands = _asked_inside(eqn, held, position, compared)
            if asks:
                return True, set()
        stack += operands
    return False, {n for n, v in enumerate(jaxpr.invars) if v in seen}


def _asked_inside(
    eqn: Any, held: Sequence[Any], position: int, compared: Callable[[Any], bool]
) -> tuple[bool, list[Any]]:
    """Follows a result of an equation that holds jaxprs, whose operands are its last.

    A branch asks for the number of the branch, and a loop for its end, besides.
    """
    operands = [v for v in eqn.invars if not getattr(v.aval, "shape", ())]
    for jaxpr in map(_compat.open_jaxpr, held):
        if position < len(jaxpr.outvars):
            asks, read = _asked(jaxpr, [position], compared)
            if asks:
                return True, []
            shift = len(eqn.invars) - len(jaxpr.invars)
            operands += [eqn.invars[n + shift] for n in read if n + shift >= 0]
    return False, operands


def _is_float(atom: Any) -> bool:
    return _is_of(atom, np.inexact)


def _is_integer(atom: Any) -> bool:
    return _is_of(atom, np.integer)


def _is_of(atom: Any, kind: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, kind)
