"""What must be half, what must be float32, and why; the rest is free.

Numerics alone decides here. Who wins where two disagree: an inner `mixed_precision`,
`full_precision`, `scopes`, `rules`, an explicit precision on a product, the range of
literals, the table. The float32 of train state, and a `DENY`, nobody overrides but a
rule of the user's own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from jmp_rewrite._graph.nodes import (
    Graph,
    Node,
    Opaque,
    Value,
    elements,
    reached,
    reads_float32,
)
from jmp_rewrite._policy import Policy
from jmp_rewrite._precision import loops, origins, train_state, whole_step
from jmp_rewrite._precision.origins import (
    REDUCTIONS,
    SMALL,
    has_to_be_read,
    leads_to_product,
)
from jmp_rewrite._precision.placement import BareGraph
from jmp_rewrite._precision.products import exact_products, request
from jmp_rewrite._precision.readers import offsets, read_sharply
from jmp_rewrite._rules import table
from jmp_rewrite._rules.table import Category

ALLOW, INFER, DENY, CLEAR = Category

_JOINTS = frozenset({"carry_in", "carry_out", "join", "stack_out"})
_HALVES = ("bfloat16", "float16")

REWRITTEN = "full: an inner mixed_precision has decided"
FULL_PRECISION = "full: inside full_precision"
SCOPE = "full: the scope"
SCALAR = "full: a 0-d value"
STATE = "full: state: updated in its own shape"
NO_PRODUCT = "full: no matrix product depends on it (optimizer, metrics, outputs)"
EXACT = "full: exact: no matrix product made it (an argument, a draw, a constant)"
STATISTIC = "full: a statistic: it is small, and much is computed from it"


@dataclasses.dataclass(eq=False)
class Pins:
    """What numerics says of each node.

    Attributes:
      categories: the category that holds for it; None for what nobody knows.
      full: the reason why it must be float32; None if it may be half.
      upstream: the deny node that endangers it; -1 if none.
      forced: nodes that a scope "half" covers.
      half: the compute dtype.
      emits_full: products whose result no product needs in half: they emit float32.
      whole_step: whether the program is a whole step, which nobody differentiates.
      out_of_range: nodes with a number that the compute dtype cannot hold.
      moved: nodes that only move arguments' values -> dimensions of the arguments.
      sinks: nodes without a float32 result that take the precision of what they read.
      rounds_after: nodes that compute in float32, whose result may be rounded once.
      lossy: clear nodes with a number that the compute dtype rounds.
      read_by: products -> why their result is read unrounded.
      blame: nodes -> the node whose source line belongs into their reason.
      factors: nodes that a product reads, or what moves them to it.
      exact: nodes without a matrix multiplication upstream.
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
    sinks: frozenset[int] = frozenset()
    rounds_after: frozenset[int] = frozenset()
    lossy: frozenset[int] = frozenset()
    read_by: Mapping[int, str] = dataclasses.field(default_factory=dict)
    factors: frozenset[int] = frozenset()
    exact: frozenset[int] = frozenset()
    blame: dict[int, int] = dataclasses.field(default_factory=dict)

    def products(self) -> set[int]:
        """Returns the matrix multiplications that run on half operands."""
        return {
            n
            for n, category in enumerate(self.categories)
            if category is ALLOW and self.full[n] is None
        }

    def may_round(self, node: int) -> bool:
        """Tells whether a result may be half."""
        return self.full[node] is None or node in self.rounds_after

    def reason(self, graph: Graph, node: int) -> str:
        """Returns why a node is what it is, as a sentence."""
        source = self.upstream[node]
        if self.full[node] is None:
            return table.reason(graph.nodes[node].name, self.categories[node] or CLEAR)
        if node in self.blame:
            info = graph.nodes[self.blame[node]].eqn.source_info
            return f"{self.full[node]} at {source_info_util.summarize(info)}"
        if source < 0:
            return self.full[node] or ""
        danger = graph.nodes[source]
        where = source_info_util.summarize(danger.eqn.source_info)
        return f"full: downstream of {danger.name} at {where}"


def pin(
    graph: Graph,
    policy: Policy,
    overrides: Mapping[int, tuple[str, str]] = MappingProxyType({}),
    differentiated: bool = False,
) -> Pins:
    """Pins the nodes of a graph.

    Args:
      graph: the program.
      policy: what the user asks for; its compute dtype is half.
      overrides: node -> (pattern, "float32" or "half") for what `scopes` found through
        the paths of parameters.
      differentiated: whether the program is known to be differentiated from outside.
    """
    local = _Local(policy, overrides)
    size = len(graph.nodes)
    half = policy.compute_dtype
    pins = Pins([None] * size, [None] * size, [-1] * size, set(), half)
    for node in graph.nodes:
        category, reason = local.judge(node, pins.forced)
        pins.categories[node.index] = category
        pins.full[node.index] = reason
    pins.whole_step = not differentiated and whole_step.is_whole_step(graph)
    _pin_products(graph, pins)
    if policy.compute_dtype == np.float16:
        local.out_of_range |= _unknown_epsilons(graph, pins)
    _danger(graph, pins, graph.consumers(), local.out_of_range)
    pins.rounds_after = _rounds_after(graph, pins, policy)
    pins.lossy = _lossy(graph, policy.compute_dtype)
    pins.out_of_range = frozenset(local.out_of_range)
    pins.moved = origins.moved_arguments(graph, pins.categories, pins.out_of_range)
    _pin_values(graph, pins)
    _pin_stacks(graph, pins)
    return pins


def _pin_products(graph: Graph, pins: Pins) -> None:
    """Pins the matrix multiplications that are not worth half operands."""
    free = {n for n in pins.products() if n not in pins.forced}
    for node, why in exact_products(graph, pins.categories, free).items():
        pins.full[node] = why


def _pin_values(graph: Graph, pins: Pins) -> None:
    """Pins what is no activation or cotangent on its way to a matrix multiplication."""
    products, consumers = pins.products(), graph.consumers()
    made = reached(products, consumers)
    made |= {
        n.index for n in graph.nodes if n.place.backward and not n.place.recomputed
    }
    streams = loops.residual_streams(graph, pins.categories, consumers)
    state = train_state.train_state(graph, pins.categories, products, made, streams)
    blame = {n: n for n in state if graph.nodes[n].eqn is not None}
    _pin_all(pins, dict.fromkeys(state, STATE), blame)
    _full_carries(graph, pins, streams)
    if pins.whole_step:
        ours = whole_step.optimizer_products(graph, pins.categories, state)
        _pin_all(pins, dict.fromkeys(ours, "full: a product of the optimizer"))
        products = pins.products()
    _pin_read_unrounded(graph, pins, products, made)
    useful = leads_to_product(products, graph.predecessors(), state.__contains__)
    useful |= loops.cotangents_into_loops(graph, graph.predecessors(), state)
    pins.rounds_after = (pins.rounds_after & useful) - state
    _pin_the_rest(graph, pins, products, made, useful)
    pins.factors = _factors(graph, pins, products)
    pins.exact = frozenset(range(len(graph.nodes))) - made
    pins.emits_full = frozenset(products - useful | pins.read_by.keys())


def _pin_all(
    pins: Pins,
    reasons: Mapping[int, str],
    blame: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Pins nodes for a reason, unless a scope of the user's makes them half.

    Args:
      pins: is changed.
      reasons: nodes -> the reason, which yields to one that holds already.
      blame: nodes -> the node whose source line belongs into that reason.
    """
    for index, why in reasons.items():
        free = pins.full[index] is None and index not in pins.forced
        if free or index in pins.rounds_after:
            pins.full[index], pins.upstream[index] = why, -1
            if index in blame:
                pins.blame[index] = blame[index]
    pins.rounds_after -= reasons.keys()


def _pin_read_unrounded(
    graph: Graph, pins: Pins, products: set[int], made: set[int]
) -> None:
    """Pins what is read by code that multiplies an error."""
    sharp = read_sharply(graph, products)
    small = statistics(graph, pins.categories)
    held = {n: r for n, r in offsets(graph, made, small).items() if n not in sharp}
    reasons = {
        n: f"full: read unrounded by {graph.nodes[reader].name}"
        for n, reader in sharp.items()
    }
    reasons |= dict.fromkeys(held, "full: a value is added, and subtracted again")
    blame = {**sharp, **held}
    _pin_all(pins, {n: r for n, r in reasons.items() if n not in products}, blame)
    pins.read_by = {n: r for n, r in reasons.items() if n in products}
    pins.blame |= {n: blame[n] for n in pins.read_by if pins.full[n] is None}


def _pin_the_rest(
    graph: Graph, pins: Pins, products: set[int], made: set[int], useful: set[int]
) -> None:
    """Pins exact values, and what leads to no matrix multiplication."""
    recurrent = loops.recurrent_activations(graph, pins.categories, graph.consumers())
    alone = _read_by_products_alone(graph, pins, products)
    small = statistics(graph, pins.categories)
    sinks = set()
    for node in graph.nodes:
        index = node.index
        if index in products:
            continue
        if index in small and index in useful:
            _pin_all(pins, {index: STATISTIC})
        if pins.full[index] is not None:
            if index not in made and index not in alone:
                pins.rounds_after -= {index}
            continue
        if not node.avals and pins.categories[index] is CLEAR:
            sinks.add(index)
        elif index not in useful:
            pins.full[index] = NO_PRODUCT
            if pins.whole_step and index in recurrent:
                pins.rounds_after |= {index}
        elif index not in made and index not in alone and index not in pins.forced:
            pins.full[index] = EXACT
    pins.sinks = frozenset(sinks)


def _factors(graph: Graph, pins: Pins, products: set[int]) -> frozenset[int]:
    """Returns the nodes that matrix multiplications read, or what moves them there.

    They are never saturated: an infinity there must stay visible.
    """

    def stops(node: int) -> bool:
        return pins.categories[node] is not CLEAR

    reads = graph.predecessors()
    moved = leads_to_product(products, reads, stops)
    return frozenset(s for n in (*products, *moved) for s in reads[n])


def _read_by_products_alone(graph: Graph, pins: Pins, products: set[int]) -> set[int]:
    """Returns the nodes that matrix multiplications alone read, or moves to them.

    Their operands are rounded in any case.
    """
    consumers = graph.consumers()
    returned = {v.node for v in graph.results}
    found: set[int] = set()
    for node in reversed(graph.nodes):
        readers = consumers[node.index]
        if readers and node.index not in returned:
            if all(
                r in products
                or (r in found and pins.categories[r] is CLEAR and r not in pins.lossy)
                for r in readers
            ):
                found.add(node.index)
    return found


def statistics(graph: Graph, categories: Sequence[Category | None]) -> set[int]:
    """Returns what is computed from reductions alone: means, variances, maxima.

    They are small, and much is computed from each of them.
    """
    found: set[int] = set()
    for node in graph.nodes:
        size = elements(node.avals)
        if node.name in REDUCTIONS:
            before = max((elements([v.aval]) for v in node.inputs), default=0)
            is_statistic = before >= SMALL * size
        elif categories[node.index] is ALLOW:
            is_statistic = False
        else:
            large = [v for v in node.inputs if has_to_be_read(v, size)]
            is_statistic = bool(large) and all(v.node in found for v in large)
        if is_statistic:
            found.add(node.index)
    return found


def _pin_stacks(graph: Graph, pins: Pins) -> None:
    """Lets a stack be what it is a stack of.

    A stack of float32 values may be half in a whole step: the backward pass reads it.
    """
    for node in graph.nodes:
        if node.name != "stack_out":
            continue
        index, source = node.index, node.inputs[0].node
        if pins.may_round(source):
            if pins.full[index] == NO_PRODUCT:
                pins.full[index] = None
        elif not pins.whole_step and pins.full[index] is None:
            pins.full[index] = pins.full[source]
            pins.upstream[index] = pins.upstream[source]


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


def _rounds_after(graph: Graph, pins: Pins, policy: Policy) -> frozenset[int]:
    """Returns what computes in float32 and may be rounded once, afterwards.

    That is what something dangerous lies upstream of: a layer norm's result, the
    probabilities of a softmax; and in bfloat16, which has float32's range, an `exp`
    itself. In float16 it is only what a product reads, because that is rounded anyway.
    """
    endangered = {n for n, source in enumerate(pins.upstream) if source >= 0}
    if policy.compute_dtype != np.float16:
        return frozenset(
            endangered
            | {
                n.index
                for n in graph.nodes
                if n.name in _ROUNDED_AFTER
                and pins.full[n.index] == f"full: {table.reason(n.name, DENY)}"
                and n.name not in policy.rules
                and n.eqn.primitive not in policy.rules
                and not _is_scalar(n)
            }
        )
    consumers = graph.consumers()
    read: set[int] = set()
    for node in reversed(graph.nodes):
        for reader in consumers[node.index]:
            product = pins.categories[reader] is ALLOW and pins.full[reader] is None
            if product or (reader in read and pins.categories[reader] is CLEAR):
                read.add(node.index)
    return frozenset(endangered & read)


def _lossy(graph: Graph, dtype: Any) -> frozenset[int]:
    """Returns the nodes with a number that rounding to half changes."""

    def is_exact(number: Any) -> bool:
        number = np.asarray(number)
        return bool(np.all(number.astype(dtype).astype(number.dtype) == number))

    with np.errstate(over="ignore"):
        return frozenset(
            n.index
            for n in graph.nodes
            if n.literals and not all(map(is_exact, n.literals.values()))
        )


def left_alone(graph: Graph, pins: Pins) -> list[Opaque]:
    """Returns what is not rewritten inside: kernels, callbacks, unknown primitives."""
    named = {id(o.eqn) for o in graph.opaque}
    others = [
        Opaque(node.eqn, node.place, why, source_info_util.summarize(info))
        for node in graph.nodes
        if not node.place.rewritten
        and id(node.eqn) not in named
        and (why := _why_alone(node.eqn, pins.categories[node.index]))
        for info in [node.eqn.source_info]
    ]
    return [*graph.opaque, *others]


def _why_alone(eqn: Any, category: Category | None) -> str | None:
    if category is None and _holds_program(eqn):
        return "no rule for it, and it holds a program or a function"
    if category is DENY and reads_float32(eqn):
        return table.opaque_reason(eqn.primitive.name)
    return None


def _holds_program(eqn: Any) -> bool:
    held = any(True for _ in jex.jaxprs_in_params(eqn.params))
    return held or any(callable(p) for p in eqn.params.values())


def bare(graph: Graph, pins: Pins) -> BareGraph:
    """Returns what the placement sees: what must be full is a wall."""
    categories = [
        c if full is None or c is DENY else None
        for c, full in zip(pins.categories, pins.full, strict=True)
    ]
    carries = [(o, i) for loop in graph.loops for i, o in loop.carries]
    return BareGraph(categories, graph.predecessors(), graph.consumers(), carries)


class _Local:
    """Judges one node by itself."""

    def __init__(
        self, policy: Policy, overrides: Mapping[int, tuple[str, str]]
    ) -> None:
        self._table = policy.table()
        self._defaults = table.default_rules(policy.compute_dtype)
        self._rules = policy.rules
        self._scopes = [(p, re.compile(p), kind) for p, kind in policy.scopes.items()]
        self._by_path: dict[str, tuple[str, str] | None] = {}
        self._overrides = overrides
        self._dtype = policy.compute_dtype
        self.out_of_range: set[int] = set()

    def judge(self, node: Node, forced: set[int]) -> tuple[Category | None, str | None]:
        """Returns a node's category, and why it must be float32 if it must."""
        if node.place.rewritten:
            return None, REWRITTEN
        category, by_rule = self._category(node)
        if node.place.full:
            return category, FULL_PRECISION
        scope = self._overrides.get(node.index) or self._scope(node.place.path)
        if scope:
            if scope[1] == "float32":
                return category, f"{SCOPE} {scope[0]!r} is float32"
            forced.add(node.index)
            by_rule, category = False, self._default(node)
        covered = node.index in forced
        reason = self._must_be_full(node, category)
        if reason is None and node.name not in _JOINTS and not (by_rule or covered):
            if category is ALLOW:
                reason = request(node)
            reason = reason or self._range(node)
        return category, reason

    def _scope(self, path: str) -> tuple[str, str] | None:
        if path not in self._by_path:
            found = [(p, kind) for p, regex, kind in self._scopes if regex.search(path)]
            full = [match for match in found if match[1] == "float32"]
            matches = [(p, kind) for p, kind in full or found]
            self._by_path[path] = matches[0] if matches else None
        return self._by_path[path]

    def _category(self, node: Node) -> tuple[Category | None, bool]:
        """Returns the category of a node, and whether a user's rule says so."""
        if node.name in _JOINTS:
            return CLEAR, False
        primitive = node.eqn.primitive
        if primitive in self._rules:
            return self._rules[primitive], True
        if node.name in self._rules:
            return self._rules[node.name], True
        return self._default(node), False

    def _default(self, node: Node) -> Category | None:
        special = _SPECIAL.get(node.name)
        if special is not None:
            return special(node)
        if node.name in _JOINTS:
            return CLEAR
        return self._defaults.get(node.name)

    def _must_be_full(self, node: Node, category: Category | None) -> str | None:
        if category is None:
            return f"full: no rule for {node.name}"
        if category is DENY:
            return f"full: {table.reason(node.name, DENY)}"
        if node.name in _JOINTS:
            return None if node.avals[0].shape else SCALAR
        if _is_scalar(node):
            return SCALAR
        if node.mixed and node.name != "convert_element_type":
            return "full: it mixes float32 with another float dtype"
        return None

    def _range(self, node: Node) -> str | None:
        """Keeps an equation full whose numbers the compute dtype cannot hold."""
        numbers = list(node.literals.values())
        numbers += [
            v.constant
            for v in node.inputs
            if v.constant is not None and v.constant.ndim
        ]
        fill = node.eqn.params.get("fill_value")
        if isinstance(fill, (int, float)):
            numbers.append(np.asarray(fill))
        for number in numbers:
            lost = (
                unrepresentable(number, self._dtype)
                if number.ndim
                else _unrepresentable(float(number), self._dtype)
            )
            if lost is not None:
                self.out_of_range.add(node.index)
                return f"full: {lost:.6g} does not fit into {self._dtype.name}"
        return None


@functools.lru_cache(maxsize=4096)
def _unrepresentable(number: float, dtype: Any) -> float | None:
    return unrepresentable(number, dtype)


def unrepresentable(number: Any, dtype: Any) -> float | None:
    """Returns a value that rounding to `dtype` would destroy, or None.

    That is a finite value that becomes infinite, and one other than zero that becomes
    zero or, among the subnormals, is off by more than an eps of the dtype.
    """
    exact = np.asarray(number, np.float64)
    with np.errstate(all="ignore"):
        largest = float(ml_dtypes.finfo(dtype).max)
        inside = np.where(np.isfinite(exact), np.clip(exact, -largest, largest), exact)
        rounded = inside.astype(np.float32).astype(dtype).astype(np.float64)
        error = np.abs(rounded - exact)
        eps = float(ml_dtypes.finfo(dtype).eps)
        lost = np.isfinite(exact) & ~(error <= eps * np.abs(exact))
    return float(exact[lost].flat[0]) if lost.any() else None


def _is_scalar(node: Node) -> bool:
    """0-d values are never half: they save nothing, and `eps` is one of them."""
    for aval in node.avals:
        if aval.shape:
            return False
    for value in node.inputs:
        if value.aval.shape:
            return False
    return bool(node.avals or node.inputs)


def _convert(node: Node) -> Category | None:
    """A cast is judged by its two dtypes."""
    source = node.eqn.invars[0].aval.dtype
    target = node.eqn.params["new_dtype"]
    if target != np.float32:
        return CLEAR if node.inputs and target.name in _HALVES else DENY
    if source == np.float32 or source == np.bool_:
        return CLEAR  # 0 and 1 are exact
    if source.name in _HALVES and node.given:
        return CLEAR  # a program's half argument; nobody asked for more digits of it
    return DENY  # integers above 256 round; what was half the user wants full


def _reduce_precision(node: Node) -> Category | None:
    """Rounding to float32's own format, which JAX adds in checkpoints, is none."""
    params = node.eqn.params
    same = (params["exponent_bits"], params["mantissa_bits"]) == (8, 23)
    return CLEAR if same else DENY


def _scatter(node: Node) -> Category | None:
    return DENY if node.eqn.params.get("update_jaxpr") is not None else CLEAR


def _scatter_add(node: Node) -> Category:
    """A sum of nothing: one update at most for each place of zeros.

    So is the transpose of `take_along_axis`, with which losses pick a label's logit.
    """
    if node.literals.get(0) != 0.0:
        return DENY
    numbers = node.eqn.params["dimension_numbers"]
    batching = numbers.scatter_indices_batching_dims
    shape = node.eqn.invars[1].aval.shape[:-1]
    several = math.prod(n for d, n in enumerate(shape) if d not in batching)
    return CLEAR if several == 1 else DENY


_SPECIAL = {
    "convert_element_type": _convert,
    "scatter-add": _scatter_add,
    "reduce_precision": _reduce_precision,
    "scatter": _scatter,
}


# What an epsilon is added to, or compared with.
_TAKES_EPSILON = frozenset({"add", "clamp", "max", "min", "select_n", "sub"})


def _unknown_epsilons(graph: Graph, pins: Pins) -> set[int]:
    """Pins what a 0-d value is added to: it may be an epsilon, which float16 loses.

    A literal tells its number; an argument, or what is computed from one, does not.
    """
    spread: set[int] = set()
    found: set[int] = set()

    def is_unknown(value: Value) -> bool:
        unknown = not value.aval.shape and value.constant is None
        return unknown or value.node in spread

    for node in graph.nodes:
        if not any(map(is_unknown, node.inputs)):
            continue
        index = node.index
        if node.name == "broadcast_in_dim":
            spread.add(index)
        elif node.name in _TAKES_EPSILON and pins.full[index] is None:
            if index not in pins.forced:
                pins.full[index] = "full: a 0-d operand may be an epsilon"
                found.add(index)
    return found


def _danger(
    graph: Graph, pins: Pins, consumers: Sequence[Sequence[int]], out_of_range: set[int]
) -> None:
    """What lies downstream of a deny node is full, up to the next allow node.

    So is what follows from a number that half cannot hold: it is still in there.
    """
    stack = [n for n, c in enumerate(pins.categories) if c is DENY]
    stack += sorted(out_of_range)
    origin = {n: n for n in stack}
    while stack:
        node = stack.pop()
        for reader in consumers[node]:
            if reader in origin or reader in pins.forced:
                continue
            if pins.categories[reader] in (INFER, CLEAR):
                origin[reader] = origin[node]
                stack.append(reader)
                if pins.full[reader] is None:
                    pins.full[reader] = "full: downstream of something dangerous"
                    pins.upstream[reader] = origin[node]


def _full_carries(graph: Graph, pins: Pins, streams: set[int]) -> None:
    """Pins the carries that an iteration computes in float32.

    Rounding what it hands on would add an error in every iteration; the copy that a
    product reads is rounded anyway. The residual stream of a scan over layers is
    rounded in every layer, as it is without the scan.
    """
    carries = [pair for loop in graph.loops for pair in loop.carries]
    changed = True
    while changed:
        changed = False
        for received, handed_on in carries:
            moved = origins.moves(graph, handed_on)
            origin = moved[-1]
            if received in streams and origin in pins.rounds_after:
                continue
            if pins.may_round(received) and pins.full[origin] is not None:
                pins.full[received] = pins.full[handed_on] = STATE
                pins.rounds_after -= {received, *moved}
                changed = True
