"""Three ways to run a program, to judge rewritten ones by.

`reference` runs it in float64. `by_hand` runs it as an expert would have written it in
half precision. `as_device` runs a rewritten one in the form that a device is given.
All of them run op by op, so that no compiler keeps more digits than the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from eager import BF16, F16, F32, F64, HALVES, Evaluator, bind, is_key
from jax import lax
from kernels import KERNELS, cast

Run = Callable[[Sequence[Any]], list[np.ndarray]]
DTYPES = {"mixed_bfloat16": BF16, "mixed_float16": F16, "float32": F32}
DEVICES = ("cpu", "cuda", "tpu", "TPU v5 lite")
PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})


def reference(closed: Any) -> Run:
    """Runs a closed float32 jaxpr in float64."""
    return lambda args: _Reference()(closed, args)


def by_hand(closed: Any, half: Any, careful: bool = True, outside: bool = False) -> Run:
    """Runs a closed float32 jaxpr as an expert's half precision would.

    Matrix multiplications and convolutions run on half operands, add up in float32 and
    round to half; or to float32, where float32 code alone reads their result, as an
    expert asks for with `preferred_element_type`. Everything else follows
    JAX's own promotion: half with half is half, with a float32 array float32, and so is
    half with a 0-d float32 array, which JAX takes for any other; with a number (a
    literal, or what is made of literals alone) half. Reductions add up in float32 and
    round. Arguments, constants, carries of loops and results of branches
    are float32; decompositions and FFTs have no half form, so their operands are cast
    back. A product for which the program names a precision is left as it is.

    Args:
      closed: the program.
      half: the dtype.
      careful: what counts as float32 code. For most experts that is what reaches no
        other product, or only through `_SHARP` code or the state of a loop. A careful
        one asks for a float32 result as well where it is promoted to float32 on its way
        to the next product, by a bias or a mask that is a float32 array.

    Returns:
      A function of the arguments. Which products have half results is found in its
      first call.
    """
    half = np.dtype(half)
    if half == F32:
        return as_device(closed, "cpu")
    read: set[Any] = set()
    seen: set[Any] = set()

    def run(args: Sequence[Any]) -> list[np.ndarray]:
        if not seen:
            _ByHand(half, read, seen, frozenset(), careful, outside)(closed, args)
        full = frozenset(seen - read)
        return _ByHand(half, set(), set(), full, careful, outside)(closed, args)

    return run


def as_device(closed: Any, device: str) -> Run:
    """Runs a rewritten closed jaxpr in the form that a device is given.

    Args:
      closed: the program.
      device: a platform ("cpu", "cuda", "tpu"), or a generation of TPUs ("TPU v5
        lite").
    """
    return lambda args: _AsDevice(device)(closed, args)


# ---- float64

_WIDER = {F32: F64, np.dtype(np.complex64): np.dtype(np.complex128)}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}
_DTYPE_PARAMS = ("dtype", "new_dtype", "preferred_element_type")
# What is about the bits of a float.
_OF_BITS = frozenset({"bitcast_convert_type", "nextafter"})


def _up(x: Any) -> Any:
    return x if is_key(x) else cast(x, _WIDER.get(x.dtype, x.dtype))


def _down(x: Any) -> Any:
    return x if is_key(x) else cast(x, _NARROWER.get(x.dtype, x.dtype))


class _Reference(Evaluator):
    """Holds each float32 value in float64."""

    def hold(self, x: Any) -> Any:
        return _up(x)

    def stack(self, xs: Sequence[Any], aval: Any) -> Any:
        return _up(super().stack(xs, aval))

    def compute(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, dict(eqn.params)
        if name in _OF_BITS:
            return [_up(x) for x in bind(eqn, [_down(x) for x in values], params)]
        if name == "reduce_precision" and params["mantissa_bits"] >= 23:
            return values
        for key in _DTYPE_PARAMS:
            if params.get(key) is not None and not is_key(params[key]):
                dtype = np.dtype(params[key]) if name != "random_wrap" else None
                params[key] = _WIDER.get(dtype, params[key])
        kernel = KERNELS.get(name)
        if kernel is not None and not any(map(is_key, values)):
            outs = kernel(
                params, *[x.astype(F64) if x.dtype in HALVES else x for x in values]
            )
            outs = outs if isinstance(outs, list) else [outs]
            dtypes = [v.aval.dtype for v in eqn.outvars]
            pairs = zip(outs, dtypes, strict=True)
            return [cast(np.asarray(x), _WIDER.get(d, d)) for x, d in pairs]
        for key in ("jaxpr", "update_jaxpr"):
            if name.startswith("reduce") and params.get(key) is not None:
                params[key] = _retrace(params[key])
        with jax.enable_x64(True):
            return [_up(x) for x in bind(eqn, values, params)]


def _retrace(jaxpr: Any) -> Any:
    """Traces the jaxpr of a reduction again, in float64."""
    avals = [
        v.aval.update(dtype=_WIDER.get(v.aval.dtype, v.aval.dtype))
        for v in getattr(jaxpr, "jaxpr", jaxpr).invars
    ]

    def run(*xs: Any) -> list[Any]:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        env = dict(zip(body.invars, xs, strict=True))

        def read(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return env[atom]
            dtype = np.dtype(atom.aval.dtype)
            return np.asarray(atom.val, _WIDER.get(dtype, dtype))

        for eqn in body.eqns:
            outs = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
            env[eqn.outvars[0]] = outs
        return list(map(read, body.outvars))

    with jax.enable_x64(True):
        return jax.make_jaxpr(run)(*avals)


# ---- by hand


class _Value(NamedTuple):
    """A value of the program by hand.

    Attributes:
      array: half, float32 or of another kind.
      weak: whether it is made of numbers alone, so that half values stay half with it.
      made: the products from which half values lead to it; if nobody is careful, the
        products that it is made of.
    """

    array: Any
    weak: bool = False
    made: frozenset[Any] = frozenset()


# No kernel of these has a half form.
_FULL = frozenset(
    {
        "bitcast_convert_type",
        "cholesky",
        "eig",
        "eigh",
        "fft",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "nextafter",
        "ormqr",
        "qr",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    }
)
# Code that is float32, and whose result says little of an operand's last digits.
_SHARP = _FULL | frozenset({"ceil", "cos", "floor", "round", "sign", "sin", "tan"})


def _is_exact(params: Any) -> bool:
    """Whether a product's precision is named: it was asked for."""
    precision = params.get("precision")
    kinds = precision if isinstance(precision, tuple) else (precision,)
    return any(p not in (None, lax.Precision.DEFAULT) for p in kinds)


def _is_backward(eqn: Any) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


class _ByHand(Evaluator):
    """Runs a program by JAX's promotion.

    Args:
      half: the compute dtype.
      read: products whose half results reach another product are added to it.
      seen: products that ran are added to it.
      full: products with a float32 result.
      careful: as for `by_hand`.
      outside: as for `by_hand`.
    """

    def __init__(
        self,
        half: Any,
        read: set[Any],
        seen: set[Any],
        full: Any,
        careful: bool,
        outside: bool,
    ) -> None:
        self.half, self.read, self.seen, self.full = half, read, seen, full
        self.careful, self.outside = careful, outside
        self.path: tuple[int, ...] = ()
        self.in_backward = False

    def hold(self, x: Any) -> _Value:
        return _Value(x)

    def literal(self, x: Any) -> _Value:
        return _Value(x, True)

    def result(self, x: _Value) -> Any:
        return self.carry(x).array

    def carry(self, x: _Value) -> _Value:
        is_half = not is_key(x.array) and x.array.dtype == self.half
        return _Value(x.array.astype(F32) if is_half else x.array)

    def number(self, x: _Value) -> Any:
        return x.array

    def index(self, x: _Value, i: int) -> _Value:
        return x._replace(array=x.array[i])

    def stack(self, xs: Sequence[_Value], aval: Any) -> _Value:
        stacked = super().stack([x.array for x in xs], aval)
        return _Value(stacked, False, frozenset().union(*(x.made for x in xs)))

    def call(self, eqn: Any, values: list[Any]) -> list[Any]:
        before = self.path, self.in_backward
        self.path = (*self.path, id(eqn))
        self.in_backward |= _is_backward(eqn)
        outs = super().call(eqn, values)
        self.path, self.in_backward = before
        return outs

    def compute(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        dtypes = [v.aval.dtype for v in eqn.outvars]
        if any(v.aval.dtype in HALVES for v in (*eqn.invars, *eqn.outvars)):
            return self._as_written(eqn, values)
        if name in PRODUCTS and dtypes == [F32] and not _is_exact(eqn.params):
            return [self._product(eqn, values)]
        floats = [x for x in values if not is_key(x.array) and self._is_float(x.array)]
        strong = [x for x in floats if not x.weak]
        is_half = bool(strong) and name not in _FULL
        is_half &= all(x.array.dtype == self.half for x in strong)
        if is_half:
            made = frozenset().union(*(x.made for x in strong))
            outs = super().compute(eqn, [self._rounded(x.array) for x in values])
            return [
                _Value(x.astype(self.half), False, made)
                if x.dtype == F32
                else _Value(x)
                for x in outs
            ]
        weak = bool(floats) and not strong
        outs = super().compute(eqn, [self.carry(x).array for x in values])
        made = frozenset()
        if not (self.careful or name in _SHARP):
            made = made.union(*(x.made for x in values))
        return [_Value(x, weak, made if x.dtype == F32 else frozenset()) for x in outs]

    def _product(self, eqn: Any, values: list[_Value]) -> _Value:
        key = (*self.path, id(eqn))
        if not (self.outside and (self.in_backward or _is_backward(eqn))):
            self.seen.add(key)
        for x in values:
            self.read |= x.made
        arrays = [self._rounded(x.array) for x in values]
        (out,) = super().compute(eqn, arrays)
        if key in self.full:
            return _Value(out)
        return _Value(out.astype(self.half), False, frozenset({key}))

    def _as_written(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        """Runs what the user wrote in half."""
        arrays = [
            x.array if is_key(x.array) else cast(x.array, v.aval.dtype)
            for x, v in zip(values, eqn.invars, strict=True)
        ]
        return [_Value(x) for x in super().compute(eqn, arrays)]

    def _rounded(self, x: Any) -> Any:
        """Rounds an array of floats to half, held in float32."""
        if is_key(x) or not self._is_float(x):
            return x
        return x.astype(self.half).astype(F32)

    def _is_float(self, x: Any) -> bool:
        return x.dtype in (F32, self.half)


# ---- as a device is given it


class _AsDevice(Evaluator):
    """Runs a rewritten program as it is lowered for a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.platform = "tpu" if device.startswith("TPU") else device

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        outs = self._resolved(eqn, values)
        return super().equation(eqn, values) if outs is None else outs

    def _resolved(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        """Runs the package's own primitives: the one place that knows their names."""
        name, params = eqn.primitive.name, eqn.params
        kinds = {self.device, self.platform}
        if name == "by_device":
            for where, jaxpr in params["branches"]:
                if not kinds.isdisjoint(where.devices):
                    return self.run(jaxpr, values)
            return values[: params["results"]]
        if name == "saturating_cast":
            return [_saturated(values[0], params["dtype"])]
        return None

    def compute(self, eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive.name == "conv_general_dilated":
            # Exact in float32, and rounded once.
            wide = [x.astype(F32) if x.dtype in HALVES else x for x in values]
            params = dict(eqn.params)
            dtype = eqn.outvars[0].aval.dtype
            if dtype in HALVES or values[0].dtype in HALVES:
                params["preferred_element_type"] = F32
            return [cast(x, dtype) for x in bind(eqn, wide, params)]
        if eqn.primitive.name == "reduce_precision":
            bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
            if values[0].dtype == F32 and bits == (8, 23):
                return values
        return super().compute(eqn, values)


def _rounded(x: Any, dtype: Any) -> Any:
    return x.astype(dtype).astype(x.dtype)


def _saturated(x: Any, dtype: Any) -> Any:
    largest = F32.type(ml_dtypes.finfo(dtype).max)
    inside = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
    return inside.astype(dtype)
