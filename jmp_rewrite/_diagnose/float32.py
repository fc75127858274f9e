"""An equation evaluated as if half precision did not exist.

What a program makes half itself (a cast, a layer with `dtype=bfloat16`, an inner
`mixed_precision`) is float32 here. Only what is typed for its dtypes, kernels above
all, is given the dtypes that it was written for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.evaluate import undonated
from jmp_rewrite._graph.nodes import FLOAT32
from jmp_rewrite._rules import table
from jmp_rewrite._rules.table import Category

_HALVES = ("bfloat16", "float16")
# Titles of `_rules/table.py` under which an equation means its dtypes.
_TYPED = ("opaque", "depends on the dtype", "draws random bits")
# This library's own, which take any dtype.
_OWN = frozenset({"saturating_cast"})


def is_half(aval: Any) -> bool:
    """Tells the types of float16 and bfloat16 arrays."""
    return getattr(getattr(aval, "dtype", None), "name", "") in _HALVES


def touches_half(eqn: Any) -> bool:
    """Tells whether an equation has a half operand or result."""
    return any(is_half(v.aval) for v in (*eqn.invars, *eqn.outvars))


def in_float32(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation in float32.

    Args:
      eqn: the equation.
      values: its operands; half ones are cast.

    Returns:
      Its results, float32 where the equation has half ones.
    """
    if not touches_half(eqn):
        return _compat.bind(eqn, values, undonated(eqn))
    values = list(map(to_float32, values))
    if eqn.primitive.name == "saturating_cast":
        return values
    if eqn.primitive.name == "by_device":
        return values[: eqn.params["results"]]
    if _is_typed(eqn):
        operands = [
            _to(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)
        ]
        return [to_float32(x) for x in _compat.bind(eqn, operands, eqn.params)]
    params = {k: FLOAT32 if _is_half_dtype(p) else p for k, p in eqn.params.items()}
    return _compat.bind(eqn, values, params)


def to_float32(x: Any) -> Any:
    """Casts half arrays; everything else is what it is."""
    return _compat.convert(x, FLOAT32) if _is_half_dtype(_dtype(x)) else x


def _to(x: Any, dtype: Any) -> Any:
    return _compat.convert(x, dtype) if _is_half_dtype(dtype) else x


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _is_half_dtype(x: Any) -> bool:
    return isinstance(x, np.dtype) and x.name in _HALVES


def _is_typed(eqn: Any) -> bool:
    if any(True for _ in jex.jaxprs_in_params(eqn.params)):
        return True
    name = eqn.primitive.name
    if name not in table.RULES:
        return name not in _OWN
    return table.reason(name, Category.DENY).startswith(_TYPED)
