"""Stores in half what an emitted program reads rounded alone: weights, state, carries.

The program is emitted once more, with casts at other places: a stored argument comes in
half, a cache is carried through a loop in half, and a weight is cast once before a loop
and not in each iteration. No number changes, since rounding commutes with moves. Of a
program that somebody differentiates the casts stay where they are, because the
cotangents of a rounded value would be added up in half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._emit.higher_order import HANDLERS
from jmp_rewrite._emit.later import Later
from jmp_rewrite._emit.rounded import (
    Unrounded,
    argument,
    is_cast,
    is_move,
    is_widened,
    node_of,
)
from jmp_rewrite._graph import Graph, Node, Place, build
from jmp_rewrite._precision import ONE_LINE, Label, Pins, Plan


class Storage(NamedTuple):
    """What may be stored in half.

    Attributes:
      arguments: the numbers of arguments that are to come in half if that changes
        nothing.
      kept: number of a result -> the argument whose place it takes in the next call,
        so that nobody reads it but as the program reads that argument.
    """

    arguments: frozenset[int] = frozenset()
    kept: Mapping[int, int] = {}


NOTHING = Storage()
_HELD_BY_LOOPS = frozenset({"carry_in", "stack_out"})


class Stored(NamedTuple):
    """A program in which some of this is stored.

    Attributes:
      closed: a closed jaxpr; the arguments that are stored are half, and so are the
        results that take their places.
      arguments: the numbers of these arguments.
      why_not: of the others that were to be stored -> the equation that reads them
        unrounded; None if the program returns them as they are, or never reads them.
      unread: the numbers of those that are never read.
    """

    closed: Any
    arguments: frozenset[int]
    why_not: dict[int, Any]
    unread: frozenset[int]


def store(closed: Any, half: np.dtype, storage: Storage = NOTHING) -> Stored:
    """Stores in half what a program that nobody differentiates reads rounded alone.

    Args:
      closed: the program, with explicit casts.
      half: the compute dtype.
      storage: which arguments and results may be half.
    """
    graph = build.build(closed)
    kept = {r: n for r, n in storage.kept.items() if n in storage.arguments}
    unrounded = Unrounded(graph, half, kept)
    stacked = unrounded
    if len(kept) < len(storage.kept):
        stacked = Unrounded(graph, half, storage.kept)
    wanted = sorted(storage.arguments)
    unread = frozenset(n for n in wanted if argument(n) not in unrounded.read)
    stored = frozenset(
        n for n in wanted if n not in unread and argument(n) not in unrounded
    )
    why_not = {
        n: None if reader is None else graph.nodes[reader].eqn
        for n in wanted
        if n not in stored
        for reader in [unrounded.readers.get(argument(n))]
    }
    plan = _plan(graph, half, unrounded, stacked, stored)
    if not (stored or _changes(graph, plan)):
        return Stored(closed, stored, why_not, unread)
    results = {i for i, n in kept.items() if n in stored}
    return Stored(_emitted(closed, plan, stored, results), stored, why_not, unread)


def _changes(graph: Graph, plan: Plan) -> bool:
    """Whether anything is held, moved or cast in another way than before."""
    held = (
        n for n in graph.nodes if n.name in _HELD_BY_LOOPS or is_widened(n, plan.half)
    )
    if any(plan.labels[n.index] for n in held):
        return True
    inside = {n: loop for loop in graph.loops for n in loop.nodes}
    return any(
        source.node not in inside[index].nodes and not source.slice_of
        for index in inside
        if plan.labels[index]
        for source in graph.nodes[index].inputs
    )


def _plan(
    graph: Graph,
    half: np.dtype,
    unrounded: Unrounded,
    stacked: Unrounded,
    stored: frozenset[int],
) -> Plan:
    """Says what moves in half: what is stored, and what loops carry and stack.

    Args:
      graph: the program.
      half: the compute dtype.
      unrounded: what is read in float32 if the program returns in float32 all that
        takes the place of a float32 argument.
      stacked: what else reads in float32.
      stored: numbers of the arguments that come in half.
    """
    narrow = {argument(n) for n in stored}
    labels = [Label.FLOAT32] * len(graph.nodes)
    for node in graph.nodes:
        index = node.index
        if is_cast(node, half) or _rounds(node, narrow):
            labels[index] = Label.HALF
        elif index not in unrounded and _is_half(node, half, narrow):
            labels[index] = Label.HALF
            narrow.add(index)
        elif index not in stacked and _is_stacked(node, half, narrow):
            labels[index] = Label.HALF
            narrow.add(index)
    _close(graph, labels)
    return _labelled(graph, half, labels)


def _is_half(node: Node, half: np.dtype, narrow: set[int]) -> bool:
    if node.name in _HELD_BY_LOOPS:
        return node.size > ONE_LINE
    if node.name == "carry_out" or is_widened(node, half):
        return True
    return is_move(node, half) and any(node_of(v) in narrow for v in node.inputs)


def _is_stacked(node: Node, half: np.dtype, narrow: set[int]) -> bool:
    """Whether a node stacks what takes the place of a float32 argument, or moves it.

    A stack is an array of its own, and half of it is half the memory. What a loop
    carries, or the program updates, is updated in the argument's memory if that is
    donated: a half copy would come on top.
    """
    if node.eqn is None:
        return node.name == "stack_out" and node.size > ONE_LINE
    return is_move(node, half) and any(node_of(v) in narrow for v in node.inputs)


def _rounds(node: Node, narrow: set[int]) -> bool:
    """Whether a node rounds, where it is made, what is stored in half already."""
    is_rounding = node.eqn is not None and node.eqn.primitive.name == "rounding"
    return is_rounding and any(node_of(v) in narrow for v in node.inputs)


def _close(graph: Graph, labels: list[Label]) -> None:
    """What a loop carries has one dtype, before an iteration and after it."""
    for loop in graph.loops:
        for received, handed_on in loop.carries:
            labels[handed_on] = labels[received]


def _labelled(graph: Graph, half: np.dtype, labels: list[Label]) -> Plan:
    """Returns a plan with these labels; in derivative rules nothing changes."""

    def rule(closed: Any, place: Place) -> Plan:
        inner = build.build(closed)
        return _labelled(inner, half, [Label.FLOAT32] * len(inner.nodes))

    size = len(graph.nodes)
    pins = Pins([None] * size, [None] * size, [-1] * size, set(), half)
    return Plan(graph, pins, labels, True, rule)


def _run(plan: Plan, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    body = _compat.open_jaxpr(plan.graph.top.jaxpr)
    return list(jax.core.eval_jaxpr(body, consts, *args))


def _finish(fun: Any, args: Sequence[Any]) -> list[Any]:
    return list(fun(*args))


class _Emitter(Emitter):
    """Emits a program once more; what is rounded already is not rounded again."""

    def _native(self, eqn: Any, env: dict[Any, Cell], node: Node) -> list[Cell]:
        if eqn.primitive.name == "rounding":
            return [Cell(x) for x in self._half_operands(eqn, env, node.literals)]
        return super()._native(eqn, env, node)


def _emitted(
    closed: Any, plan: Plan, arguments: frozenset[int], results: set[int]
) -> Any:
    """Emits the program with half arguments and results at these numbers."""
    top = _compat.open_jaxpr(closed)

    def stored(*values: Any) -> list[Any]:
        emitter = _Emitter(plan, HANDLERS, Later(_run, _finish))
        cells = [Cell(x) for x in (*_compat.constants(closed), *values)]
        made = emitter.evaluate(plan.graph.top, cells)
        return [
            emitter.read_half(cell) if i in results else emitter.read_full(cell, v.aval)
            for i, (cell, v) in enumerate(zip(made, top.outvars, strict=True))
        ]

    avals = [
        v.aval.update(dtype=plan.half, weak_type=False) if i in arguments else v.aval
        for i, v in enumerate(top.invars)
    ]
    return jax.make_jaxpr(stored)(*avals)
