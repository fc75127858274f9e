"""What is downstream of values that leave the range of half or lose their digits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jmp_rewrite._graph import Graph, Node, Value, reached
from jmp_rewrite._policy import Policy
from jmp_rewrite._precision.local import is_scalar
from jmp_rewrite._precision.origins import VIEWS, made_by_products
from jmp_rewrite._precision.pins import Pins
from jmp_rewrite._precision.products import explicit_precision, request
from jmp_rewrite._precision.terms import is_relative
from jmp_rewrite._rules import PRODUCTS, Category, table

ALLOW, INFER, DENY, CLEAR = Category


def spread(graph: Graph, pins: Pins, out_of_range: set[int]) -> None:
    """What lies downstream of a deny node is full, up to the next allow node.

    So is what follows from a number that half cannot hold: it is still in there. A
    known number, such as the 0 of `where(mask, 0, x)`, is judged where it is read.
    """
    stack = [n for n, c in enumerate(pins.categories) if c is DENY]
    stack += sorted(out_of_range)
    origin = {n: n for n in stack}
    consumers = graph.consumers()

    def is_number(node: int, reader: int) -> bool:
        read = [v.constant for v in graph.nodes[reader].inputs if v.node == node]
        return bool(read) and all(x is not None and not x.ndim for x in read)

    while stack:
        node = stack.pop()
        for reader in consumers[node]:
            if reader in origin or reader in pins.forced or is_number(node, reader):
                continue
            if pins.categories[reader] in (INFER, CLEAR):
                origin[reader] = origin[node]
                stack.append(reader)
                if pins.full[reader] is None:
                    pins.full[reader] = "full: downstream of a denied value"
                    pins.upstream[reader] = origin[node]


# What an epsilon is added to, or compared with.
_TAKES_EPSILON = frozenset({"add", "clamp", "max", "min", "select_n", "sub"})


def unknown_epsilons(graph: Graph, pins: Pins) -> set[int]:
    """Pins what a 0-d value is added to: it may be an epsilon, which float16 loses.

    A literal tells its number; an argument, or what is computed from one, does not. So
    it is with an exact array, where what it is added to is divided by.
    """
    spread: set[int] = set()
    found: set[int] = set()
    divided_by = _divided_by(graph)
    made = made_by_products(graph, pins.categories) if divided_by else set()

    def is_unknown(value: Value, node: Node) -> bool:
        if value.constant is not None:
            return False
        exact = node.index in divided_by and value.node not in made
        return not value.aval.shape or value.node in spread or exact

    for node in graph.nodes:
        index = node.index
        if not any(is_unknown(v, node) for v in node.inputs):
            continue
        if node.name == "broadcast_in_dim":
            spread.add(index)
        elif node.name in _TAKES_EPSILON and pins.full[index] is None:
            if index not in pins.forced:
                pins.full[index] = "full: an operand may be an epsilon"
                found.add(index)
    return found


def _divided_by(graph: Graph) -> set[int]:
    """Returns what is divided by, or is steep at zero, through views."""
    read = {
        value.node
        for node in graph.nodes
        for value in node.inputs
        if value.node >= 0 and is_relative(node, value.node)
    }

    def moves(index: int) -> bool:
        return graph.nodes[index].name in VIEWS

    return reached(read, graph.predecessors(), moves) if read else read


# Arithmetic whose own result may be rounded although it is computed in float32.
_ROUNDED_AFTER = frozenset(
    {
        "acos",
        "acosh",
        "asin",
        "atanh",
        "cos",
        "cosh",
        "erf_inv",
        "exp",
        "exp2",
        "expm1",
        "pow",
        "sin",
        "sinh",
        "tan",
    }
)


def rounds_after(graph: Graph, pins: Pins, policy: Policy) -> frozenset[int]:
    """Returns the nodes that compute in float32, and whose result may be rounded.

    That is what a denied value lies upstream of: a layer norm's result, the
    probabilities of a softmax; and in bfloat16, which has float32's range, an `exp`
    itself. In float16 it is only what a product reads, because that is rounded anyway.
    """
    downstream = {n for n, source in enumerate(pins.upstream) if source >= 0}
    downstream |= {n.index for n in graph.nodes if _is_resampled(n, pins)}
    if policy.compute_dtype != np.float16:
        return frozenset(
            downstream
            | {
                n.index
                for n in graph.nodes
                if n.name in _ROUNDED_AFTER
                and pins.full[n.index] == f"full: {table.reason(n.name, DENY)}"
                and n.name not in policy.rules
                and n.eqn.primitive not in policy.rules
                and not is_scalar(n)
            }
        )
    consumers = graph.consumers()
    read: set[int] = set()
    for node in reversed(graph.nodes):
        for reader in consumers[node.index]:
            if pins.reads_half(reader) or (
                reader in read and pins.categories[reader] is CLEAR
            ):
                read.add(node.index)
    return frozenset(downstream & read)


def _is_resampled(node: Node, pins: Pins) -> bool:
    """Whether a node averages one value with numbers, at the precision asked for.

    `jax.image.resize` does, at the highest one, with what it computes from positions.
    The result is an activation if what is averaged is one.
    """
    if node.name not in PRODUCTS or not explicit_precision(node.eqn):
        return False
    numbers = [v for v in node.inputs if not v.made_of_data and v.node >= 0]
    return len(numbers) == 1 and pins.full[node.index] == request(node)


def lossy(graph: Graph, dtype: Any) -> frozenset[int]:
    """Returns the nodes with a number that rounding to half changes."""
    return frozenset(
        n.index
        for n in graph.nodes
        if n.literals
        and not all(_is_exact(x.item(), x.dtype, dtype) for x in n.literals.values())
    )


@functools.lru_cache(maxsize=4096)
def _is_exact(number: Any, own: Any, dtype: Any) -> bool:
    return bool(np.asarray(number, own).astype(dtype).astype(own) == number)
