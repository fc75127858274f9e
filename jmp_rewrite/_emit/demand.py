"""How a body reads its parameters: in half, in float32, or both.

Emission asks before it passes a value into a jaxpr: what is read in half alone is cast
outside, once.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from jmp_rewrite import _compat
from jmp_rewrite._graph import FLOAT32, Inner, Instance
from jmp_rewrite._precision import Label, Plan

# Bits that are collected over all readers.
AS_HALF, AS_FULL = 1, 2


class Demand:
    """Collects how a body reads its parameters: in half, in float32, or both."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[Instance, list[int]] = {}
        self._is_touched: dict[Instance, bool] = {}

    def touched(self, instance: Instance) -> bool:
        """Whether anything inside is emitted anew: it is half, or marked as float32."""
        if instance not in self._is_touched:
            self._is_touched[instance] = self._any_touched(instance)
        return self._is_touched[instance]

    def _any_touched(self, instance: Instance) -> bool:
        nodes = (n for entry in instance.nodes for n in _as_tuple(entry))
        held = instance.inner.values()
        is_anew = any(self._is_half(n) or n in self._plan.asked for n in nodes)
        return is_anew or any(map(self.touched_inside, held))

    def touched_inside(self, inner: Inner) -> bool:
        """Whether what an equation holds is emitted anew, or its carries are half."""
        is_joined = any(map(self._is_half, inner.joints))
        return is_joined or any(map(self.touched, inner.bodies))

    def _is_half(self, node: int | None) -> bool:
        return node is not None and bool(self._plan.labels[node])

    def of(self, instance: Instance) -> list[int]:
        """Returns for each parameter of a body how it is read."""
        if instance not in self._known:
            body = _compat.open_jaxpr(instance.jaxpr)
            reads: dict[Any, int] = {}
            for index, eqn in enumerate(body.eqns):
                ways = self._ways(instance, index, eqn)
                operands = instance.operands(index, eqn)
                for atom, way in zip(operands, ways, strict=True):
                    if not hasattr(atom, "val"):
                        reads[atom] = reads.get(atom, 0) | way
            for atom in body.outvars:
                if not hasattr(atom, "val"):
                    reads[atom] = reads.get(atom, 0) | AS_FULL
            self._known[instance] = [
                reads.get(v, 0)
                if getattr(v.aval, "dtype", None) == FLOAT32
                else AS_FULL
                for v in body.invars
            ]
        return self._known[instance]

    def _ways(self, instance: Instance, index: int, eqn: Any) -> list[int]:
        inner = instance.inner.get(index)
        if inner is not None:
            return self._ways_inside(eqn, inner)
        entry = instance.nodes[index]
        if isinstance(entry, tuple):
            return [AS_HALF if self._is_half(n) else AS_FULL for n in entry]
        label = Label.FLOAT32 if entry is None else self._plan.labels[entry]
        if label in (Label.FLOAT32, Label.ROUNDED):
            return [AS_FULL] * len(eqn.invars)
        literals = self._plan.graph.nodes[entry].literals
        return [  # a known number is emitted as a literal
            0 if i in literals and not v.aval.shape else AS_HALF
            for i, v in enumerate(eqn.invars)
        ]

    def _ways_inside(self, eqn: Any, inner: Inner) -> list[int]:
        everything = [AS_FULL] * len(eqn.invars)
        if not any(map(self.touched, inner.bodies)):
            return everything
        if inner.kind in ("call", "shard_map") and not inner.joins:
            ways = list(self.of(inner.bodies[0]))
            for i in cast_again(eqn, inner.bodies[0]):
                ways[i] = AS_FULL
            return ways
        if inner.kind == "scan":
            ways = list(self.of(inner.bodies[0]))
            num_consts, _ = _compat.scan_split(eqn.params)
            for i, node in enumerate(inner.carry_in):
                ways[num_consts + i] = AS_HALF if self._is_half(node) else AS_FULL
            return ways
        if inner.kind == "cond":
            own = [self.of(b) for b in inner.bodies]
            together = (
                functools.reduce(operator.or_, w) for w in zip(*own, strict=True)
            )
            return [AS_FULL, *together]
        return everything


def cast_again(eqn: Any, body: Instance) -> frozenset[int]:
    """Returns the parameters that a body casts for itself, although they are weights.

    What a checkpoint computes again is cast again: a half copy of a weight would live
    from the forward pass on, beside the weight itself. In a loop it is cast once for
    all iterations.
    """
    is_again = bool(eqn.params.get("differentiated"))
    return body.arguments if is_again else frozenset()


def _as_tuple(entry: Any) -> tuple[int | None, ...]:
    return entry if isinstance(entry, tuple) else (entry,)
