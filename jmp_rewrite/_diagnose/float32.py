"""An equation evaluated as if half precision did not exist.

What a program makes half itself (a cast, a layer with `dtype=bfloat16`, an inner
`mixed_precision`) is float32 here. Only what is typed for its dtypes, kernels above
all, is given the dtypes that it was written for; a mutable reference to a half array
stays one, and what is kept in it is rounded here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.evaluate import undonated
from jmp_rewrite._graph import FLOAT32, HALVES, is_half
from jmp_rewrite._rules import LANES, Category, table

_KINDS = HALVES | {FLOAT32}
_FLOAT32_BITS = (8, 23)
# Titles of `_rules/table.py` under which an equation means its dtypes.
_TYPED = ("opaque", "depends on the dtype", "draws random bits")
# This library's own: without rounding the first operand, on every device.
_OWN = frozenset({"rounding", "saturating_cast"})


def touches_half(eqn: Any) -> bool:
    """Whether an equation has a half operand or result."""
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
    if (kept := passed_on(eqn)) is not None:
        return values[:kept]
    if _is_typed(eqn):
        operands = [
            _to(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)
        ]
        return [to_float32(x) for x in _compat.bind(eqn, operands, eqn.params)]
    params = {k: FLOAT32 if _is_half_dtype(p) else p for k, p in eqn.params.items()}
    return _compat.bind(eqn, values, params)


def passed_on(eqn: Any) -> int | None:
    """Returns how many operands are an equation's results in float32, if any are.

    A cast leaves a number what it is, and so does what only some devices compute in
    another way. None for an equation that computes something.
    """
    name = eqn.primitive.name
    if name == "by_device":
        return int(eqn.params["results"])
    if name in LANES:
        return len(eqn.invars)
    if name == "reduce_precision":
        is_float32 = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
        return 1 if is_float32 == _FLOAT32_BITS else None
    if name == "convert_element_type":
        dtypes = {_dtype(v.aval) for v in (*eqn.invars, *eqn.outvars)}
        return 1 if dtypes <= _KINDS else None
    return 1 if name in _OWN else None


def to_float32(x: Any) -> Any:
    """Casts half arrays; everything else is what it is, a reference to one too."""
    return _compat.convert(x, FLOAT32) if _is_half_array(x) else x


def _to(x: Any, dtype: Any) -> Any:
    is_wide = _is_half_dtype(dtype) and x.dtype == FLOAT32
    return _compat.convert(x, dtype) if is_wide else x


def _is_half_array(x: Any) -> bool:
    is_half = _is_half_dtype(_dtype(x))
    return is_half and not _compat.is_reference(jax.typeof(x))


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _is_half_dtype(x: Any) -> bool:
    return isinstance(x, np.dtype) and x in HALVES


def _is_typed(eqn: Any) -> bool:
    if any(True for _ in jex.jaxprs_in_params(eqn.params)):
        return True
    name = eqn.primitive.name
    if name not in table.RULES:
        return True
    return table.reason(name, Category.DENY).startswith(_TYPED)
