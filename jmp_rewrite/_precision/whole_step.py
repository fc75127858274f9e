"""Whole steps: programs that hold their own backward pass, and their optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph import Graph, is_backward, is_half, reached
from jmp_rewrite._rules import PRODUCTS, Category
from jmp_rewrite._source import is_scaling

# A loss scale that is written down is larger, and what derivatives multiply by smaller.
_FACTOR = 64


def is_unscaled(graph: Graph) -> bool:
    """Whether a program holds a backward pass, and no loss scale.

    The loss is a number, and a scale another one that the backward pass multiplies it
    by and that no matrix multiplication made, or a literal: one that multiplies arrays
    is a power of two, or it is a temperature. The cotangent of the loss is 1: times a
    scale it is a copy of that. What `scale_loss` multiplies, of any shape and dtype, is
    marked.
    """
    bodies = (_compat.open_jaxpr(use.jaxpr) for use in graph.uses())
    if any(is_scaling(eqn) for body in bodies for eqn in body.eqns):
        return False
    backward = [node for node in graph.nodes if is_backward(node)]
    products = (n.index for n in graph.nodes if n.name in PRODUCTS)
    made = reached(products, graph.consumers()) if backward else set()
    for node in backward:
        is_number = not any(aval.shape for aval in node.avals)
        data = (v for v in node.inputs if v.made_of_data and v.node not in made)
        if is_number and node.name in ("copy", "mul") and any(data):
            return False
        for number in node.literals.values():
            factor = abs(1 / number) if node.name == "div" and number else abs(number)
            is_scale = is_number or np.all(np.frexp(factor)[0] == 0.5)
            is_factor = node.name in ("copy", "div", "mul") and is_scale
            if is_factor and np.any(factor >= _FACTOR):
                return False
    return bool(backward)


def rewritten_dtype(graph: Graph) -> str:
    """Returns the half dtype of what was rewritten before, inside of a program.

    A `mixed_precision` in it has done that while it was traced; "" if there is none.
    """
    for node in graph.nodes:
        if node.place.rewritten:
            for out in node.eqn.outvars:
                if is_half(out.aval):
                    return str(out.aval.dtype)
    return ""


def is_whole_step(graph: Graph) -> bool:
    """Whether nobody differentiates a program: it is a whole step, or a gradient.

    It holds a backward pass, and returns something that this has made in the shape of
    an argument: gradients, or new parameters. A loss with a gradient inside (a penalty,
    a physics-informed one) returns a number, and is differentiated once more.
    """
    backward = (n.index for n in graph.nodes if n.place.backward)
    made = reached(backward, graph.consumers())
    shapes = {v.aval.shape for v in graph.arguments} - {()}
    return any(v.node in made and v.aval.shape in shapes for v in graph.results)


def optimizer_products(
    graph: Graph, categories: Sequence[Category | None], state: set[int]
) -> list[int]:
    """Returns the products that make updates of gradients: Shampoo's, Muon's.

    Within one iteration they lie between a backward pass and a train state, and no
    backward pass follows: a second forward pass, as in SAM or a GAN step, is followed
    by its own, and an evaluation after the step leads to no state.
    """
    nodes = graph.nodes
    first = next((n.index for n in nodes if n.place.backward), len(nodes))
    forward = [
        n
        for n, category in enumerate(categories)
        if category is Category.ALLOW and n > first and not nodes[n].place.backward
    ]
    if not forward:
        return []
    steps = [
        [v.node for v in n.inputs if v.node >= 0 and nodes[v.node].name != "carry_out"]
        for n in nodes
    ]
    after = [n.place.backward for n in nodes]
    before = list(after)
    updates = [n.index in state for n in nodes]
    for index, sources in enumerate(steps):
        after[index] = after[index] or any(after[s] for s in sources)
    for index in range(len(nodes) - 1, -1, -1):
        for source in steps[index]:
            before[source] = before[source] or before[index]
            updates[source] = updates[source] or updates[index]
    return [n for n in forward if after[n] and not before[n] and updates[n]]
