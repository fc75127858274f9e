"""Scopes for frameworks that set none: patterns found in the paths of parameters.

Flax NNX and Equinox put no usable names on the name stack. There a pattern of `scopes`
is searched in the path of the parameter in its argument's tree, and holds for every
product that uses the parameter, forward and backward, and for what the parameter flows
through before the next product.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from jax import tree_util

from jmp_rewrite._graph import Graph, Node, Value
from jmp_rewrite._policy import Policy

_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})


def paths(arguments: Any) -> list[str | None]:
    """Returns for each traced argument its path in its argument, "/" between keys.

    None stands for optimizer state: a leaf inside a NamedTuple whose name ends in
    "State", as all states of optax are, or under a key `opt_state`.
    """
    tree = tree_util.tree_unflatten(arguments.tree, range(len(arguments.leaves)))
    states: set[int] = set()
    tree_util.tree_map(lambda x: states.update(_optimizer_leaves(x)), tree,
                       is_leaf=_is_optimizer_state)
    flat = tree_util.tree_flatten_with_path(tree)[0]
    named = {leaf: _join(path) for path, leaf in flat}
    return [
        None if i in states or "opt_state" in named[i].split("/") else named[i]
        for i in arguments.arrays
    ]


def _is_optimizer_state(x: Any) -> bool:
    fields = isinstance(x, tuple) and hasattr(x, "_fields")
    return fields and type(x).__name__.endswith("State")


def _optimizer_leaves(x: Any) -> list[int]:
    return tree_util.tree_leaves(x) if _is_optimizer_state(x) else []


def _join(path: Sequence[Any]) -> str:
    """Joins the keys of a path; (args, kwargs) and the argument's name are left out."""
    return "/".join(_key(key) for key in path[2:])


def _key(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def overrides(graph: Graph, policy: Policy, argument_paths: Sequence[str | None],
              ) -> tuple[dict[int, tuple[str, str]], frozenset[str]]:
    """Finds the nodes for which a scope holds through a parameter's path.

    Returns:
      Node -> (pattern, "float32" or "half"); and the patterns that matched.
    """
    found: dict[int, tuple[str, str]] = {}
    used: set[str] = set()
    if not policy.scopes or not any(argument_paths):
        return found, frozenset()
    flow = _Flow(graph)
    # "float32" is written last, so that it wins over "half".
    for pattern, kind in sorted(policy.scopes.items(), key=lambda item: item[1] != "half"):
        regex = re.compile(pattern)
        matched = {
            i for i, path in enumerate(argument_paths) if path and regex.search(path)
        }
        if matched:
            used.add(pattern)
            found.update(dict.fromkeys(flow.of(matched), (pattern, kind)))
    return found, frozenset(used)


class _Flow:
    """Follows parameters through the program."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._consumers = graph.consumers()
        self._readers: dict[int, list[int]] = {}
        for node in graph.nodes:
            for value in node.inputs:
                if value.node < 0 <= value.argument:
                    self._readers.setdefault(value.argument, []).append(node.index)

    def of(self, arguments: set[int]) -> set[int]:
        """Returns the nodes that parameters flow through, and their products."""
        through: set[int] = set()
        products: set[int] = set()
        stack = [n for a in arguments for n in self._readers.get(a, ())]
        while stack:
            node = stack.pop()
            if node in through or node in products:
                continue
            if self._graph.nodes[node].name in _PRODUCTS:
                products.add(node)
                continue
            through.add(node)
            stack.extend(self._consumers[node])
        return through | products | self._gradients(arguments, through, products)

    def _gradients(self, arguments: set[int], through: set[int],
                   products: set[int]) -> set[int]:
        """Returns the products that make the gradients of the parameters.

        A product y = x w has two transposes: dx = dy w, which reads w as well, and
        dw = x dy, which shares x with the first and dy with the second.
        """
        nodes = self._graph.nodes
        own = [nodes[p] for p in sorted(products)]
        activations = {r for n in own if not n.place.backward
                       for r in self._others(n, arguments, through)}
        cotangents = {r for n in own if n.place.backward
                      for r in self._others(n, arguments, through)}
        shapes = {self._parameter_size(n, arguments, through) for n in own}
        gradients = set()
        for node in nodes:
            if node.name not in _PRODUCTS or not node.place.backward:
                continue
            roots = {self._root(v) for v in node.inputs}
            size = int(node.avals[0].size)
            shares = roots & activations and (not cotangents or roots & cotangents)
            if shares and size in shapes and node.index not in products:
                gradients.add(node.index)
        return gradients

    def _others(self, product: Node, arguments: set[int], through: set[int]) -> set[Any]:
        return {self._root(v) for v in product.inputs
                if not self._is_own(v, arguments, through)}

    def _parameter_size(self, product: Node, arguments: set[int],
                        through: set[int]) -> int:
        own = [v for v in product.inputs if self._is_own(v, arguments, through)]
        return int(own[0].aval.size) if own else -1

    def _is_own(self, value: Value, arguments: set[int], through: set[int]) -> bool:
        return value.node in through or (value.node < 0 and value.argument in arguments)

    def _root(self, value: Value) -> Any:
        """Returns what a value is a moved copy of."""
        seen = set()
        while value.node >= 0 and value.node not in seen:
            node = self._graph.nodes[value.node]
            seen.add(value.node)
            if node.name not in _MOVES or len(node.inputs) != 1:
                return value.node
            value = node.inputs[0]
        return ("argument", value.argument) if value.node < 0 else value.node


_MOVES = frozenset({
    "convert_element_type", "copy", "optimization_barrier", "reduce_precision",
    "reshape", "squeeze", "transpose", "name", "sharding_constraint",
})


def warn_unused(pattern: str) -> None:
    """Warns once that a pattern of `scopes` matched nothing."""
    warnings.warn(
        f"the scope pattern {pattern!r} matched no name scope and no parameter path; "
        "look at the scopes that jax.make_jaxpr shows, or add a jax.named_scope.",
        stacklevel=5,
    )
