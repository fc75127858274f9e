"""What one node must be, judged by itself.

Who wins where two disagree: an inner `mixed_precision`, `full_precision`, `scopes`,
`rules`, an explicit precision on a product, the range of literals, the table. A scope
"half" asks for products, whatever the rules say of them, and leaves `DENY` of a rule,
or of the table, as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph import (
    JOINTS,
    KERNEL_OPERAND,
    KERNEL_RESULT,
    Made,
    Node,
    is_backward,
    is_half,
)
from jmp_rewrite._policy import Policy
from jmp_rewrite._precision.products import request
from jmp_rewrite._rules import Category, table

ALLOW, INFER, DENY, CLEAR = Category

# Casts at the edges of kernels.
KERNEL_EDGES = frozenset({KERNEL_OPERAND, KERNEL_RESULT})

REWRITTEN = "full: an inner mixed_precision has decided"
FULL_PRECISION = "full: inside full_precision"
SCOPE = "full: the scope"
SCALAR = "full: a 0-d value"


class Local:
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
            if self._default(node) is ALLOW:
                category = ALLOW
        covered = node.index in forced
        reason = self._must_be_full(node, category)
        if reason is None and node.name not in JOINTS and not (by_rule or covered):
            if category is ALLOW:
                reason = request(node)
            reason = reason or self._range(node)
        return category, reason

    def _scope(self, path: str) -> tuple[str, str] | None:
        if path not in self._by_path:
            found = [(p, kind) for p, regex, kind in self._scopes if regex.search(path)]
            full = [match for match in found if match[1] == "float32"]
            self._by_path[path] = next(iter(full or found), None)
        return self._by_path[path]

    def _category(self, node: Node) -> tuple[Category | None, bool]:
        """Returns the category of a node, and whether a user's rule says so."""
        if node.name in JOINTS:
            return CLEAR, False
        primitive = node.eqn.primitive
        if primitive in self._rules:
            return self._rules[primitive], True
        name = node.name if node.name in KERNEL_EDGES else primitive.name
        if name in self._rules:
            return self._rules[name], True
        return self._default(node), False

    def _default(self, node: Node) -> Category | None:
        if node.name in KERNEL_EDGES:
            # It rounds what the kernel reads, and hands on what it has rounded.
            return ALLOW if self._dtype in _dtypes(node.eqn) else DENY
        special = _SPECIAL.get(node.name)
        if special is not None:
            return special(node)
        if node.name in JOINTS:
            return CLEAR
        return self._defaults.get(node.name)

    def _must_be_full(self, node: Node, category: Category | None) -> str | None:
        if category is None:
            return f"full: no rule for {node.name}"
        if category is DENY:
            return f"full: {table.reason(node.name, DENY)}"
        if is_scalar(node):
            return SCALAR
        if node.mixed and node.name not in ("convert_element_type", *KERNEL_EDGES):
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
        if fill is not None:
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
    largest = float(ml_dtypes.finfo(dtype).max)
    inside = np.where(np.isfinite(exact), np.clip(exact, -largest, largest), exact)
    rounded = inside.astype(np.float32).astype(dtype).astype(np.float64)
    error = np.abs(rounded - exact)
    eps = float(ml_dtypes.finfo(dtype).eps)
    lost = np.isfinite(exact) & ~(error <= eps * np.abs(exact))
    return float(exact[lost].flat[0]) if lost.any() else None


def is_scalar(node: Node) -> bool:
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
    before, after = node.eqn.invars[0].aval, node.eqn.outvars[0].aval
    if after.dtype != np.float32:
        return CLEAR if node.inputs and is_half(after) else DENY
    if before.dtype == np.float32 or before.dtype == np.bool_:
        return CLEAR  # 0 and 1 are exact
    if is_half(before) and (node.given or _is_cotangent(node)):
        # A program's half argument, or the cotangent of a cast to half: nobody asked
        # for more digits of it.
        return CLEAR
    return DENY  # integers above 256 round; what was half the user wants full


def _is_cotangent(node: Node) -> bool:
    """Whether a cast is one of a half cotangent, which JAX makes.

    What a backward rule of the program's own casts up may also be a residual, which the
    forward pass has cast down.
    """
    if not is_backward(node):
        return False
    (value,) = node.others or (None,)
    made = value.name if value is not None else None
    if not isinstance(made, Made) or made.name != "convert_element_type":
        return True
    elements = _compat.scope_elements(made.eqn.source_info.name_stack)
    return any(e.name == "transpose" and not _compat.is_scope(e) for e in elements)


def _dtypes(eqn: Any) -> list[np.dtype]:
    return [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]


def _reduce_precision(node: Node) -> Category | None:
    """Rounding to float32's own format, which JAX adds in checkpoints, is none."""
    params = node.eqn.params
    same = (params["exponent_bits"], params["mantissa_bits"]) == (8, 23)
    return CLEAR if same else DENY


def _scatter(node: Node) -> Category | None:
    if node.eqn.primitive.name == "scatter-add":  # one that sets elements
        return CLEAR
    return DENY if node.eqn.params.get("update_jaxpr") is not None else CLEAR


def _scatter_add(node: Node) -> Category:
    """Where no two updates meet it is a sum of two terms, or with zeros none.

    So it is with the transpose of `take_along_axis`, with which losses pick a label's
    logit, and of a permutation.
    """
    if not node.disjoint:
        return DENY
    return CLEAR if node.literals.get(0) == 0.0 else INFER


def _sum(node: Node) -> Category:
    """Where no two terms meet it is a concatenation of padded arrays."""
    return CLEAR if node.disjoint else INFER


def _window_sum(node: Node) -> Category:
    """Where no window has two terms it moves values, between zeros."""
    return CLEAR if node.disjoint else DENY


_SPECIAL = {
    "add": _sum,
    "add_any": _sum,
    "convert_element_type": _convert,
    "scatter-add": _scatter_add,
    "reduce_precision": _reduce_precision,
    "reduce_window_sum": _window_sum,
    "scatter": _scatter,
}
