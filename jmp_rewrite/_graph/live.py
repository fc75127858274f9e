"""Programs without results of loops that nobody reads, which compilers leave out.

A loss that is differentiated holds a sampler under `stop_gradient`, or the targets of a
frozen network: what their loops stack for a backward pass that never comes is no value
that a backward pass reads.
"""

from __future__ import annotations

from typing import Any

from jmp_rewrite import _compat
from jmp_rewrite._graph.nodes import is_float32
from jmp_rewrite._rules import held_jaxprs

# What computes a result that is read together with one that is not.
_SEVERAL = frozenset({"cond", "scan", "while"})


def live(closed: Any) -> Any:
    """Returns a closed jaxpr without what no result depends on.

    The same object if all float32 results of loops and branches are read.
    """
    return _compat.without_dead_code(closed) if _Reads().misses(closed) else closed


class _Reads:
    """Asks which results of equations are read; each jaxpr once."""

    def __init__(self) -> None:
        self._holds: dict[int, bool] = {}
        self._misses: dict[int, bool] = {}

    def misses(self, jaxpr: Any) -> bool:
        """Whether a float32 result of a loop or a branch is not read."""
        if not self._holds_several(jaxpr):
            return False
        if id(jaxpr) not in self._misses:
            self._misses[id(jaxpr)] = self._misses_one(_compat.open_jaxpr(jaxpr))
        return self._misses[id(jaxpr)]

    def _misses_one(self, body: Any) -> bool:
        read = {v for v in body.outvars if not hasattr(v, "val")}
        for eqn in reversed(body.eqns):
            is_read = [v in read for v in eqn.outvars]
            if not (any(is_read) or eqn.effects):
                if self._is_several(eqn):
                    return True
                continue
            read.update(v for v in eqn.invars if not hasattr(v, "val"))
            floats = map(is_float32, (v.aval for v in eqn.outvars))
            unread = any(f and not r for f, r in zip(floats, is_read, strict=True))
            if unread and self._is_several(eqn):
                return True
            if any(map(self.misses, held_jaxprs(eqn))):
                return True
        return False

    def _is_several(self, eqn: Any) -> bool:
        held = held_jaxprs(eqn)
        return eqn.primitive.name in _SEVERAL or any(map(self._holds_several, held))

    def _holds_several(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._holds:
            eqns = _compat.open_jaxpr(jaxpr).eqns
            self._holds[id(jaxpr)] = any(map(self._is_several, eqns))
        return self._holds[id(jaxpr)]
