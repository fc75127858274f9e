"""JAX's primitives on NumPy arrays, one by one.

Small arrays are computed faster so than by eager JAX, and no compiler keeps more digits
than a dtype has. A kernel is given `(params, *arrays)` of float32, float64, complex
numbers, integers or booleans, never of a half dtype, and returns an array or a list.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
from jax import lax

Kernel = Callable[..., Any]


def _elementwise(fun: Kernel) -> Kernel:
    return lambda params, *xs: fun(*xs)


def _divide(x: Any, y: Any) -> Any:
    if not np.issubdtype(x.dtype, np.integer):
        return x / y
    quotient = np.where(y == 0, -1, np.abs(x) // np.maximum(np.abs(y), 1))
    return np.where(y == 0, quotient, quotient * np.sign(x) * np.sign(y))


def _integer_pow(params: Any, x: Any) -> Any:
    return x ** params["y"]


def _round(params: Any, x: Any) -> Any:
    if params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.round(x)
    return np.trunc(x + np.copysign(np.asarray(0.5, x.dtype), x))


def _clamp(params: Any, low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


def _select(params: Any, which: Any, *cases: Any) -> Any:
    out = cases[0]
    for i, case in enumerate(cases[1:], 1):
        out = np.where(which == i, case, out)
    return out


def _shift_right_logical(x: Any, y: Any) -> Any:
    unsigned = x.view(f"u{x.dtype.itemsize}")
    return (unsigned >> y.astype(unsigned.dtype)).view(x.dtype)


# ---- what moves values


def _broadcast(params: Any, x: Any, *_: Any) -> Any:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        inner[dim] = size
    return np.broadcast_to(x.reshape(inner), shape)


def _slice(params: Any, x: Any) -> Any:
    strides = params["strides"] or [1] * x.ndim
    starts, limits = params["start_indices"], params["limit_indices"]
    return x[tuple(map(slice, starts, limits, strides))]


def _dynamic_slice(params: Any, x: Any, *starts: Any) -> Any:
    return x[_window(x.shape, params["slice_sizes"], starts)]


def _dynamic_update_slice(params: Any, x: Any, update: Any, *starts: Any) -> Any:
    out = np.array(x)
    out[_window(x.shape, update.shape, starts)] = update
    return out


def _window(shape: Any, sizes: Any, starts: Any) -> Any:
    pairs = zip(shape, sizes, starts, strict=True)
    first = [min(max(int(start), 0), n - size) for n, size, start in pairs]
    return tuple(slice(i, i + n) for i, n in zip(first, sizes, strict=True))


def _reshape(params: Any, x: Any) -> Any:
    x = x if params["dimensions"] is None else x.transpose(params["dimensions"])
    return x.reshape(params["new_sizes"])


def _pad(params: Any, x: Any, value: Any) -> Any:
    config = params["padding_config"]
    shape = [
        low + high + n + max(n - 1, 0) * inner
        for n, (low, high, inner) in zip(x.shape, config, strict=True)
    ]
    out = np.full(shape, value, x.dtype)
    target, source = [], []
    for n, size, (low, _, inner) in zip(x.shape, shape, config, strict=True):
        places = low + np.arange(n) * (inner + 1)
        inside = (places >= 0) & (places < size)
        target.append(places[inside])
        source.append(np.arange(n)[inside])
    out[np.ix_(*target)] = x[np.ix_(*source)]
    return out


def _iota(params: Any, *_: Any) -> Any:
    shape, dim = params["shape"], params["dimension"]
    row = np.arange(shape[dim]).astype(params["dtype"])
    dims = [-1 if d == dim else 1 for d in range(len(shape))]
    return np.broadcast_to(row.reshape(dims), shape)


def _split(params: Any, x: Any) -> Any:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


# ---- what adds up


def _reduce(fun: Any) -> Kernel:
    return lambda params, x: fun(x, axis=tuple(params["axes"]))


def _extreme(fun: Any, least: bool) -> Kernel:
    def run(params: Any, x: Any) -> Any:
        if x.size:
            return fun(x, axis=tuple(params["axes"]))
        return fun(x, axis=tuple(params["axes"]), initial=np.inf if least else -np.inf)

    return run


def _arg(fun: Any) -> Kernel:
    return lambda params, x: fun(x, axis=params["axes"][0])


def _cumulative(fun: Any) -> Kernel:
    def run(params: Any, x: Any) -> Any:
        axis = params["axis"]
        if not params["reverse"]:
            return fun(x, axis=axis)
        return np.flip(fun(np.flip(x, axis), axis=axis), axis)

    return run


def dot_general(params: Any, first: Any, second: Any) -> Any:
    """A matrix product, added up in the dtype of its operands."""
    contracted, mapped = params["dimension_numbers"]
    sides, frees = [], []
    for x, dims, batch, last in zip(
        (first, second), contracted, mapped, (True, False), strict=True
    ):
        free = [d for d in range(x.ndim) if d not in (*dims, *batch)]
        order = [*batch, *free, *dims] if last else [*batch, *dims, *free]
        rows = int(np.prod([x.shape[d] for d in free], dtype=int))
        inner = int(np.prod([x.shape[d] for d in dims], dtype=int))
        shape = [x.shape[d] for d in batch]
        shape += [rows, inner] if last else [inner, rows]
        sides.append(x.transpose(order).reshape(shape))
        frees.append([x.shape[d] for d in free])
    batch = [first.shape[d] for d in mapped[0]]
    return np.matmul(*sides).reshape((*batch, *frees[0], *frees[1]))


UNARY: dict[str, Any] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "conj": np.conj,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "cos": np.cos,
    "cosh": np.cosh,
    "digamma": scipy.special.digamma,
    "erf": scipy.special.erf,
    "erf_inv": scipy.special.erfinv,
    "erfc": scipy.special.erfc,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "imag": np.imag,
    "is_finite": np.isfinite,
    "lgamma": scipy.special.gammaln,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": scipy.special.expit,
    "neg": np.negative,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "not": np.invert,
    "optimization_barrier": lambda *xs: list(xs),
    "real": np.real,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "tan": np.tan,
    "tanh": np.tanh,
}
BINARY: dict[str, Any] = {
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "atan2": np.arctan2,
    "complex": lambda x, y: x + 1j * y,
    "div": _divide,
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": operator.ne,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": np.fmod,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": _shift_right_logical,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
MOVES: dict[str, Kernel] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "convert_element_type": lambda params, x: x,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": lambda params, x: np.expand_dims(x, params["dimensions"]),
    "pad": _pad,
    "reshape": _reshape,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
}
KERNELS: dict[str, Kernel] = {
    **{name: _elementwise(fun) for name, fun in {**UNARY, **BINARY}.items()},
    **MOVES,
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "clamp": _clamp,
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
    "cumprod": _cumulative(np.cumprod),
    "cumsum": _cumulative(np.cumsum),
    "dot_general": dot_general,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "reduce_and": _reduce(np.bitwise_and.reduce),
    "reduce_max": _extreme(np.max, least=False),
    "reduce_min": _extreme(np.min, least=True),
    "reduce_or": _reduce(np.bitwise_or.reduce),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "round": _round,
}


def cast(x: Any, dtype: Any) -> Any:
    """Casts as XLA does: beyond the range of integers lies the last one, NaN is 0."""
    if x.dtype == dtype:
        return x
    is_float = not (np.issubdtype(x.dtype, np.integer) or x.dtype == bool)
    if not is_float or not np.issubdtype(dtype, np.integer):
        return x.astype(dtype)
    limits = np.iinfo(dtype)
    wide = np.where(np.isnan(x), 0, np.asarray(x, np.float64))
    inside = np.clip(np.trunc(wide), limits.min, limits.max)
    return np.where(inside >= limits.max, limits.max, inside).astype(dtype)
