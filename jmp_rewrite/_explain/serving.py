"""What a forward function's weights and caches take, and what storing them saves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jmp_rewrite import _compat, _rewrite
from jmp_rewrite._emit import Storage, argument, is_move, node_of, results_of, store
from jmp_rewrite._graph import Graph, build, elements, is_float32
from jmp_rewrite._precision import FLOAT32_BYTES, HALF_BYTES, ONE_LINE, Plan


class Held(NamedTuple):
    """Bytes of arguments, as the function takes them and as they may be stored.

    Attributes:
      before: in float32.
      after: as `for_inference` stores them.
    """

    before: int
    after: int


class Serving(NamedTuple):
    """What a forward function holds from call to call.

    Attributes:
      weights: its first argument.
      caches: arguments that a result holds again, moved or updated in places.
    """

    weights: Held
    caches: Held


def serving(plan: Plan, weights: int) -> Serving:
    """Returns the weights and caches of a forward function.

    Args:
      plan: of the function.
      weights: how many arrays its first argument has.
    """
    explicit = _rewrite.emitted(plan)
    graph = build.build(explicit)
    first = len(_compat.constvars(plan.graph.top.jaxpr))
    caches = _caches(graph, plan.half)
    of_weights = {first + i for i in range(weights)} - set(caches.values())
    wanted = frozenset(of_weights | set(caches.values()))
    stored = store(explicit, plan.half, Storage(wanted, caches)).arguments

    def held(numbers: set[int]) -> Held:
        avals = {n: explicit.in_avals[n] for n in numbers}
        sizes = {n: elements([a]) for n, a in avals.items() if is_float32(a)}
        half = sum(size for n, size in sizes.items() if n in stored)
        full = sum(sizes.values())
        saved = (FLOAT32_BYTES - HALF_BYTES) * half
        return Held(FLOAT32_BYTES * full, FLOAT32_BYTES * full - saved)

    return Serving(held(of_weights), held(set(caches.values())))


def _caches(graph: Graph, half: np.dtype) -> dict[int, int]:
    """Returns results that hold what an argument of their type held, moved.

    Result -> the argument; one result for each.
    """
    found: dict[int, int] = {}
    for number, value in results_of(graph).items():
        if value.node < 0 or value.size <= ONE_LINE:
            continue
        for other in _moved_from(graph, value.node, half):
            same = _type(graph, other) == (value.aval.shape, value.aval.dtype)
            if same and other not in found.values():
                found[number] = other
                break
    return found


def _moved_from(graph: Graph, node: int, half: np.dtype) -> list[int]:
    """Returns the arguments whose elements a node's result may hold."""
    found: list[int] = []
    seen, stack = {node}, [node]
    while stack:
        index = stack.pop()
        if index < 0:
            found.append(argument(index))
        elif is_move(graph.nodes[index], half):
            for value in graph.nodes[index].inputs:
                source = node_of(value)
                if source is not None and source not in seen:
                    seen.add(source)
                    stack.append(source)
    return sorted(found)


def _type(graph: Graph, number: int) -> Any:
    aval = _compat.open_jaxpr(graph.top.jaxpr).invars[number].aval
    return aval.shape, aval.dtype
