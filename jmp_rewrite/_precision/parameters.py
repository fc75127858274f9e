"""Scopes for frameworks that set none: patterns found in the paths of parameters.

Flax NNX and Equinox put no usable names on the name stack. There a pattern of `scopes`
is searched in the path of the parameter in its argument's tree, and holds for every
product that uses the parameter, forward and backward, and for what the parameter flows
through before the next product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax import tree_util

from jmp_rewrite import _compat
from jmp_rewrite._graph import (
    EITHER,
    Graph,
    Node,
    Value,
    elements,
    is_float32,
    reached,
)
from jmp_rewrite._policy import Policy
from jmp_rewrite._precision.origins import MOVES, REDUCTIONS
from jmp_rewrite._precision.terms import source_of
from jmp_rewrite._rules import PRODUCTS, VIEWS

_UNJOINED = MOVES - EITHER - {"concatenate", "split", "stack", "unstack"}
# Fields of a NamedTuple that is somebody's whole train state, parameters included.
_TRAIN_STATE = frozenset({"model", "opt_state", "params"})


class ParameterPath(NamedTuple):
    """A key of a tree that stands for several, outermost first."""

    names: tuple[str, ...]


def argument_paths(arguments: Any) -> list[str | None]:
    """Returns for each array of a call the path in its argument, "/" between keys.

    The argument's name is left out. None stands for optimizer state: a leaf inside a
    NamedTuple whose name ends in "State", as all states of optax are, or under a key
    `opt_state`.

    Args:
      arguments: `(args, kwargs)`.
    """
    found: list[str | None] = []
    flat = tree_util.tree_flatten_with_path(arguments, is_leaf=_is_optimizer_state)[0]
    for path, leaf in flat:
        keys = [name for key in path for name in key_names(key)]
        if _is_optimizer_state(leaf):
            found += [None] * len(tree_util.tree_leaves(leaf))
        else:
            found.append(None if "opt_state" in keys else "/".join(keys[2:]))
    return found


def result_paths(paths: Iterable[tuple[Any, ...]]) -> list[str]:
    """Returns for each array of a result its path, "/" between keys."""
    return ["/".join(n for key in path for n in key_names(key)) for path in paths]


def _is_optimizer_state(x: Any) -> bool:
    kind = type(x)
    if not (isinstance(x, tuple) and hasattr(x, "_fields")):
        return False
    if kind.__module__.split(".")[0] == "optax":
        return kind.__name__.endswith("State")
    return kind.__name__.endswith("State") and _TRAIN_STATE.isdisjoint(x._fields)


def key_names(key: Any) -> tuple[str, ...]:
    """Returns the name of a key of a tree path."""
    if isinstance(key, ParameterPath):
        return key.names
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return (str(getattr(key, name)),)
    return (str(key),)


def overrides(
    graph: Graph,
    policy: Policy,
    arguments: Sequence[str | None],
    results: Sequence[str] = (),
) -> tuple[dict[int, tuple[str, str]], frozenset[str]]:
    """Finds the nodes for which a scope holds through a parameter's path.

    Where several patterns find a node, by path or by name scope, "float32" wins.

    Args:
      graph: the program.
      policy: what the user asks for.
      arguments: as `argument_paths` returns them.
      results: as `result_paths` returns them.

    Returns:
      Node -> (pattern, "float32" or "half"); and the patterns that matched.
    """
    found: dict[int, tuple[str, str]] = {}
    used: set[str] = set()
    if not policy.scopes or not any(arguments):
        return found, frozenset()
    program = _Program(graph, results)
    for kind in ("half", "float32"):  # what is written last wins
        for pattern in (p for p, k in policy.scopes.items() if k == kind):
            regex = re.compile(pattern)
            own = {i for i, path in enumerate(arguments) if path and regex.search(path)}
            if own:
                used.add(pattern)
                # A statistic is small, and much is computed from it.
                ends = REDUCTIONS if kind == "half" else frozenset()
                joined = kind == "float32"
                nodes = _Layer(program, own, regex, ends, joined).nodes()
                found.update(dict.fromkeys(nodes, (pattern, kind)))
    return _without_full_scopes(graph, policy, found), frozenset(used)


def layers(
    graph: Graph, arguments: Sequence[str | None], results: Sequence[str] = ()
) -> dict[int, str]:
    """Names nodes by the parameters that they use, where no scope names them.

    Args:
      graph: the program.
      arguments: as `argument_paths` returns them.
      results: as `result_paths` returns them.

    Returns:
      Node -> the path of its parameter, without the parameter's own key.
    """
    owned: dict[str, set[int]] = {}
    returned = {path.partition("/")[2] for path in results}
    is_step = not returned.isdisjoint(filter(None, arguments))
    for i, path in enumerate(arguments):
        if path and (path in returned or not is_step):  # data is not returned
            name = _layer_of(path)
            if any(map(str.isalpha, name)):  # numbers alone name no layer
                owned.setdefault(name, set()).add(i)
    program = _Program(graph, results)
    found: dict[int, str] = {}
    for name, own in owned.items():
        regex = re.compile(re.escape(name) + "(/|$)")
        for node in _Layer(program, own, regex).nodes():
            found.setdefault(node, name)  # parameters stand before data
    return found


# Keys above a model's own, and below a parameter's: those of Flax.
_WRAPPERS = frozenset({"model", "params"})
_BOXES = frozenset({"raw_value", "value"})


def _layer_of(path: str) -> str:
    keys = path.split("/")
    while len(keys) > 1 and keys[0] in _WRAPPERS:
        del keys[0]
    while len(keys) > 1 and keys[-1] in _BOXES:
        del keys[-1]
    return "/".join(keys[:-1] or keys)


def _without_full_scopes(
    graph: Graph, policy: Policy, found: dict[int, tuple[str, str]]
) -> dict[int, tuple[str, str]]:
    """Leaves out what is "half" by path where a name scope says "float32"."""
    full = [re.compile(p) for p, kind in policy.scopes.items() if kind == "float32"]
    return {
        node: match
        for node, match in found.items()
        if match[1] == "float32"
        or not any(regex.search(graph.nodes[node].place.path) for regex in full)
    }


class _Program:
    """What is the same for all patterns."""

    def __init__(self, graph: Graph, results: Sequence[str]) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.consumers = graph.consumers()
        backward = [n.index for n in graph.nodes if n.place.backward]
        self.after_backward = reached(backward, self.consumers)
        products = (n for n in backward if self.nodes[n].name in PRODUCTS)
        # Those of complex values have no float32 result.
        self.transposes = [n for n in map(self.nodes.__getitem__, products) if n.avals]
        self.readers: dict[int, list[int]] = {}
        for node in graph.nodes:
            for value in node.inputs:
                if value.node < 0 <= value.argument:
                    self.readers.setdefault(value.argument, []).append(node.index)
        self.results = self._results(results)

    def _results(self, paths: Sequence[str]) -> list[tuple[str, int]]:
        """Returns (path, node) of each float32 result."""
        outvars = _compat.open_jaxpr(self.graph.top.jaxpr).outvars
        if len(paths) != len(outvars):
            return []
        floats = [p for p, v in zip(paths, outvars, strict=True) if is_float32(v.aval)]
        if len(floats) != len(self.graph.results):  # some are literals
            return []
        return [(p, v.node) for p, v in zip(floats, self.graph.results, strict=True)]

    def unmoved(self, value: Value) -> Value:
        """Returns what a value is, seen through what changes nothing but its shape."""
        while value.node >= 0:
            node = self.nodes[value.node]
            if len(node.inputs) != 1 or node.name not in VIEWS:
                break
            if node.size != node.inputs[0].size:
                break
            (value,) = node.inputs
        return value

    def root(self, value: Value) -> Any:
        """Returns the source of a value, through moves."""
        source = source_of(value, self.graph, _UNJOINED)
        return source.node, source.argument


class _Layer:
    """The nodes of the parameters that one pattern has found.

    Three kinds of value are told apart. A value is *own* if it is made of the layer's
    parameters alone: a product that reads one uses the parameter. It is *exact* if it
    is an own one of which nothing was repeated: a parameter that was updated by
    its gradient is still the parameter. The parameters *flow* through what combines
    them with other values (a bias, a scale) and what follows from these, up to the
    next product, or to where it meets values from elsewhere (a residual stream), or to
    a primitive in `ends`.
    """

    def __init__(
        self,
        program: _Program,
        arguments: set[int],
        regex: re.Pattern[str],
        ends: frozenset[str] = frozenset(),
        joined: bool = False,
    ) -> None:
        self._program = program
        self._joined = joined
        self._ends = ends
        self._arguments = arguments
        self._regex = regex
        self._own: set[int] = set()
        self._exact: set[int] = set()
        self._updates: set[int] = set()
        self._largest = 0

    def nodes(self) -> set[int]:
        """Returns all nodes of the layer."""
        self._follow_own()
        products = {
            n for n in self._readers_of_own() if self._program.nodes[n].name in PRODUCTS
        }
        flow = self._follow_flow(products)
        return self._own | flow | products | self._gradients(products)

    def _is_own(self, value: Value) -> bool:
        if value.node < 0:
            return value.argument in self._arguments
        return value.node in self._own

    def _is_exact(self, value: Value) -> bool:
        return value.node in self._exact or (value.node < 0 and self._is_own(value))

    def _readers_of_own(self) -> set[int]:
        starts = {n for a in self._arguments for n in self._program.readers.get(a, ())}
        return starts.union(*(self._program.consumers[n] for n in self._own))

    # ---- own values

    def _follow_own(self) -> None:
        stack = sorted(self._readers_of_own(), reverse=True)
        for index in stack:
            for value in self._program.nodes[index].inputs:
                if value.node < 0 and self._is_own(value):
                    self._largest = max(self._largest, value.size)
        while stack:
            node = self._program.nodes[stack.pop()]
            if node.index not in self._own and self._makes_own(node):
                self._own.add(node.index)
                stack.extend(self._program.consumers[node.index])

    def _makes_own(self, node: Node) -> bool:
        if node.name in EITHER:  # one that comes from the parameter is enough
            if any(map(self._is_exact, node.inputs)):
                self._exact.add(node.index)
            return any(map(self._is_own, node.inputs))
        if _looks_up(node):
            return False
        if self._joined and self._joins_parameters(node):
            self._exact.add(node.index)
            return True
        own = [v for v in node.inputs if self._is_own(v)]
        others = [v for v in node.inputs if not (self._is_own(v) or _is_neutral(v))]
        if others:
            return self._is_update(node, others)
        size = max(_sizes(node), default=0)
        if own and all(map(self._is_exact, own)) and size <= max(v.size for v in own):
            self._exact.add(node.index)
        return size <= self._largest

    def _joins_parameters(self, node: Node) -> bool:
        """Whether parameters of one shape are stacked, this layer's among them."""
        if node.name not in ("concatenate", "stack"):
            return False
        if len({v.aval.shape for v in node.inputs}) > 1:
            return False
        roots = (self._program.unmoved(v) for v in node.inputs)
        return all(v.node < 0 <= v.argument for v in roots)

    def _is_update(self, node: Node, others: Sequence[Value]) -> bool:
        """Whether a parameter is moved along its gradient."""
        if node.place.backward or not node.avals or node.name in PRODUCTS:
            return False
        shape = node.avals[0].shape
        kept = any(v.aval.shape == shape and self._is_exact(v) for v in node.inputs)
        if not (shape and kept):
            return False
        if not all(v.node in self._program.after_backward for v in others):
            return False
        self._updates.add(node.index)
        self._exact.add(node.index)
        return True

    # ---- what the parameters flow through

    def _follow_flow(self, products: set[int]) -> set[int]:
        flow: set[int] = set()
        stack = sorted(self._readers_of_own(), reverse=True)
        while stack:
            node = self._program.nodes[stack.pop()]
            index = node.index
            if index in flow or index in self._own or node.name in PRODUCTS:
                continue
            if self._combines(node) or self._continues(node, flow | products):
                flow.add(index)
                stack.extend(self._program.consumers[index])
        return flow

    def _combines(self, node: Node) -> bool:
        return any(v.aval.shape and self._is_own(v) for v in node.inputs)

    def _continues(self, node: Node, flow: set[int]) -> bool:
        if node.name in self._ends:
            return False
        if node.index in self._program.after_backward and not node.place.backward:
            return False  # the optimizer
        return all(
            v.node in flow or self._is_own(v) or _is_neutral(v) for v in node.inputs
        )

    # ---- gradients

    def _gradients(self, products: set[int]) -> set[int]:
        """Returns the products that make the gradients of the parameters.

        A product y = x w has two transposes: dx = dy w, which reads w as well, and
        dw = x dy, which shares x with the first and dy with the second. Where there is
        no dx (a first layer), or x was computed again, one shared operand has to do,
        and layers that share it as well are told apart by what their product updates.
        """
        if not self._program.transposes:
            return set()
        pairs: dict[Any, tuple[set[Any], set[int]]] = {}
        for product in products:
            node = self._program.nodes[product]
            for value in filter(self._is_own, node.inputs):
                shared, sizes = pairs.setdefault(
                    self._program.root(value), (set(), set())
                )
                sizes.add(value.size)
                shared.update(
                    self._program.root(v) for v in node.inputs if not self._is_own(v)
                )
        sizes = set().union(*(sizes for _, sizes in pairs.values()))
        updating = self._updating(sizes)
        found: set[int] = set()
        for shared, own_sizes in pairs.values():
            found |= self._transposes_of(shared, own_sizes, updating, products)
        return found

    def _transposes_of(
        self, shared: set[Any], sizes: set[int], updating: set[int], products: set[int]
    ) -> set[int]:
        both, one = set(), set()
        for node in self._program.transposes:
            if node.index in products or _sizes(node)[0] not in sizes:
                continue
            common = [self._program.root(v) in shared for v in node.inputs]
            if any(common):
                one.add(node.index)
            if all(common):
                both.add(node.index)
        return one & updating or both or one

    def _updating(self, sizes: set[int]) -> set[int]:
        """Returns the backward products whose result updates the parameters.

        Or is returned under their path. Only values as large as the parameter, or as
        its part in one product, are followed: a norm of all gradients is none.
        """
        nodes = self._program.nodes
        sizes = sizes | {v.size for n in self._updates for v in nodes[n].inputs}
        stack = [
            v.node
            for n in self._updates
            for v in nodes[n].inputs
            if not self._is_own(v)
        ]
        stack += [n for path, n in self._program.results if self._matches(path)]
        seen: set[int] = set()
        found: set[int] = set()
        while stack:
            index = stack.pop()
            if index < 0 or index in seen or index in self._own:
                continue
            seen.add(index)
            node = nodes[index]
            if node.name in PRODUCTS:
                found.update({index} if node.place.backward else ())
            elif not sizes.isdisjoint(_sizes(node)):
                stack.extend(v.node for v in node.inputs)
        return found

    def _matches(self, path: str) -> bool:
        """A result's path starts with its place in the tuple that is returned."""
        inner = path.partition("/")[2]
        return any(map(self._regex.search, filter(None, (path, inner))))


def _sizes(node: Node) -> list[int]:
    """Returns how many elements each result has."""
    return [elements((aval,)) for aval in node.avals]


def _is_neutral(value: Value) -> bool:
    """Constants and 0-d values say nothing about where a value comes from."""
    return not value.aval.shape or (value.node < 0 and value.constant is not None)


def _looks_up(node: Node) -> bool:
    """Whether data picks rows from a table; one row may be a layer's."""
    if node.name != "gather":
        return False
    *rows, _ = node.eqn.invars[1].aval.shape
    return any(n != 1 for n in rows)
