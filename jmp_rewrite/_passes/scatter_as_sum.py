"""Sums of neighbours that are written as a scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import given, is_call, is_float, made_inside, number_of

# Longer indices are not looked at.
_LARGEST_INDEX = 2**16

# What indices are computed with, of known numbers.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": np.add,
        "clamp": lambda low, x, high: np.clip(x, low, high),
        "div": lambda x, y: x / y if x.dtype.kind == "f" else np.trunc(x / y),
        "floor": np.floor,
        "lt": np.less,
        "max": np.maximum,
        "min": np.minimum,
        "mul": np.multiply,
        "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
        "sub": np.subtract,
    }
)
_RESHAPES = frozenset({"expand_dims", "reshape", "squeeze"})


def scatter_as_sum(editor: Editor) -> None:
    """What is repeated in place has a gradient that is a sum of neighbours.

    So it is of `jax.image.resize` to a multiple of the size by the nearest pixel, whose
    transpose is a `scatter-add` of known indices: 0, 0, 1, 1, ... Compilers fuse no
    scatter: zeros are filled, the terms are written in float32 and added one by one.
    A sum over a dimension is computed in the kernel that reads it.

    On all devices, in whole train steps.

    Gain: a diffusion model with a U-Net writes 15 % fewer bytes on an H200.
    """
    for body, index, eqn in list(editor.find("scatter-add")):
        zeros, indices, updates = eqn.invars
        if not is_float(zeros) or not zeros.aval.sharding.mesh.empty:  # or it varies
            continue
        numbers = eqn.params["dimension_numbers"]
        if number_of(body, zeros) != 0 or not _is_along_one(eqn):
            continue
        (to,) = numbers.scatter_dims_to_operand_dims
        (of,) = set(range(updates.aval.ndim)) - set(numbers.update_window_dims)
        size = zeros.aval.shape[to]
        if _is_repeated(_Numbers().of(body, indices, ()), size):
            editor.replace(body, index, _summed, updates, of=of, to=to, size=size)


def _is_along_one(eqn: Any) -> bool:
    """Whether whole rows of the other dimensions are added along one dimension."""
    zeros, indices, updates = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    inserted, scattered = (
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
    )
    if len(scattered) != 1 or tuple(inserted) != tuple(scattered):
        return False
    if numbers.operand_batching_dims or indices.aval.ndim != 2:
        return False
    windows = [updates.aval.shape[d] for d in numbers.update_window_dims]
    others = [n for d, n in enumerate(zeros.aval.shape) if d != scattered[0]]
    return windows == others


def _is_repeated(indices: Any, size: int) -> bool:
    """Whether indices are 0, 0, ..., 1, 1, ..., each as often, up to a size."""
    if indices is None or not size or indices.size % size:
        return False
    expected = np.arange(size).repeat(indices.size // size)
    return indices.size > 0 and bool(np.array_equal(indices.ravel(), expected))


class _Numbers:
    """The numbers of values that no input is among, each computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, body: Body, atom: Any, calls: tuple[tuple[Body, int], ...]) -> Any:
        """Returns the numbers of a value; None if they are not known.

        Args:
          body: the jaxpr.
          atom: the value.
          calls: those that were entered on the way to it.
        """
        if hasattr(atom, "val"):
            return np.asarray(atom.val)
        key = body, atom, calls
        if key not in self._known:
            self._known[key] = self._made(body, atom, calls)
        return self._known[key]

    def _made(self, body: Body, atom: Any, calls: tuple[tuple[Body, int], ...]) -> Any:
        index = body.maker.get(atom, -1)
        if index < 0:
            sources = given(body, atom, whole=True, calls=calls)
            return _the_same([self.of(*source, calls[:-1]) for source in sources])
        eqn = body.eqns[index]
        if is_call(eqn):
            position = eqn.outvars.index(atom)
            ((inner, made),) = made_inside(body, index, position)
            is_whole = made.aval.shape == atom.aval.shape  # not one of several devices'
            return self.of(inner, made, (*calls, (body, index))) if is_whole else None
        if math.prod(atom.aval.shape) > _LARGEST_INDEX or not _is_known(eqn):
            return None
        operands = [self.of(body, v, calls) for v in eqn.invars]
        return None if any(x is None for x in operands) else _computed(eqn, operands)


def _the_same(numbers: Sequence[Any]) -> Any:
    """Returns what all callers of a body hand to it, if they hand the same."""
    first, *others = numbers or [None]
    same = first is not None and all(np.array_equal(first, n) for n in others)
    return first if same else None


def _is_known(eqn: Any) -> bool:
    known = {*_FUNCTIONS, *_RESHAPES, "broadcast_in_dim", "convert_element_type"}
    return eqn.primitive.name in known | {"iota"}


def _computed(eqn: Any, operands: Sequence[Any]) -> Any:
    name, aval, params = eqn.primitive.name, eqn.outvars[0].aval, eqn.params
    if name == "iota":
        line = np.arange(aval.shape[params["dimension"]], dtype=aval.dtype)
        return _spread(line, aval.shape, (params["dimension"],))
    if name in _RESHAPES:
        return operands[0].reshape(aval.shape)
    if name == "broadcast_in_dim":
        return _spread(operands[0], aval.shape, params["broadcast_dimensions"])
    if name == "convert_element_type":
        return operands[0].astype(aval.dtype)
    return np.asarray(_FUNCTIONS[name](*operands), aval.dtype)


def _spread(x: Any, shape: tuple[int, ...], dims: Any) -> Any:
    sizes = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        sizes[d] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def _summed(updates: Any, *, of: int, to: int, size: int) -> Any:
    order = [d for d in range(updates.ndim) if d != of]
    order.insert(to, of)
    x = lax.transpose(updates, order)
    x = lax.reshape(x, (*x.shape[:to], size, x.shape[to] // size, *x.shape[to + 1 :]))
    wide = lax.convert_element_type(x, np.float32)
    total = lax.reduce_sum(wide, [to + 1])
    return [lax.convert_element_type(total, updates.dtype)]
