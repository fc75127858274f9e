"""Parts of an array that are taken out before it is reshaped, or put in afterwards.

A layer that computes queries, keys and values in one product takes them apart as
`qkv.reshape(..., 3, heads, features)[..., i, :, :]`. XLA:TPU reads such a slice in the
product of the scores, and then no longer joins that with its softmax. The cotangent is
a sum of three arrays, each padded with zeros, that is reshaped for the gradients of the
layer: laid out with its parts outermost, it is copied as a whole into the order that
those need. If the slice is taken of what was reshaped, and each part of the cotangent
is reshaped by itself, there is neither. Nothing is computed, so no value differs:
`benchmarks/NOTES.md`, 46.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._graph.nodes import Graph, Instance, is_backward, is_literal

_ADDS = ("add", "add_any")
_JOINS = ("concatenate", "stack")


class Taken(NamedTuple):
    """How parts are taken of an array before it is reshaped.

    Attributes:
      variables: that of the array.
      axis: its dimension along which they lie.
      bounds: of each part, along the dimension `at`.
      at: a dimension of the reshaped array, the outermost of those that `axis` becomes.
      reshaped: the reshaped array's dimensions.
      order: the order in which the parts have these.
      shapes: the shapes of the parts.
    """

    variables: tuple[Any, ...]
    axis: int
    bounds: tuple[tuple[int, int], ...]
    at: int
    reshaped: tuple[int, ...]
    order: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def emit(self, values: Sequence[Any]) -> list[Any]:
        """Returns the parts."""
        (x,) = values
        inner = x.shape[self.axis] // self.reshaped[self.at]
        parts = []
        for (start, limit), shape in zip(self.bounds, self.shapes, strict=True):
            part = lax.slice_in_dim(x, start * inner, limit * inner, axis=self.axis)
            part = part.reshape(_with(self.reshaped, self.at, limit - start))
            parts.append(lax.transpose(part, self.order).reshape(shape))
        return parts


class Joined(NamedTuple):
    """How an array is put together of parts that were reshaped.

    Attributes:
      variables: those of the parts, in the order in which they lie.
      bounds: of each part, along the dimension `axis`.
      axis: the dimension of the array along which they lie.
      dim: that of the parts; those of a stack do not have it.
      order: the order in which their dimensions are reshaped.
      shape: the array's.
    """

    variables: tuple[Any, ...]
    bounds: tuple[tuple[int, int], ...]
    axis: int
    dim: int
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def emit(self, values: Sequence[Any]) -> list[Any]:
        """Returns the array."""
        return [lax.concatenate(self.pieces(values), self.axis)]

    def pieces(self, values: Sequence[Any]) -> list[Any]:
        """Returns the reshaped parts, and zeros where there is none, in order."""
        pieces, at = [], 0
        for x, (start, limit) in zip(values, self.bounds, strict=True):
            if x.ndim < len(self.order):
                x = lax.expand_dims(x, [self.dim])
            x = lax.transpose(x, self.order)
            pieces += self._zeros(start - at, x.dtype)
            pieces.append(x.reshape(_with(self.shape, self.axis, limit - start)))
            at = limit
        return pieces + self._zeros(self.shape[self.axis] - at, values[0].dtype)

    def _zeros(self, size: int, dtype: Any) -> list[Any]:
        shape = _with(self.shape, self.axis, size)
        return [lax.full(shape, 0, dtype)] if size else []


class Summed(NamedTuple):
    """How a sum over other dimensions of such an array is put together, on TPUs.

    XLA:TPU adds each part up in the kernel of the product that makes it; XLA:GPU reads
    each of them once more.

    Attributes:
      array: how the array is.
      axes: the dimensions that are summed over.
    """

    array: Joined
    axes: tuple[int, ...]

    @property
    def variables(self) -> tuple[Any, ...]:
        """Those of the parts."""
        return self.array.variables

    def emit(self, values: Sequence[Any]) -> list[Any]:
        """Returns the sum."""
        sums = [lax.reduce_sum(x, self.axes) for x in self.array.pieces(values)]
        axis = self.array.axis - sum(a < self.array.axis for a in self.axes)
        return [lax.concatenate(sums, axis)]


# Equation -> how its results are made.
Parts = dict[int, Taken | Joined | Summed]


def parts_apart(graph: Graph) -> dict[Instance, Parts]:
    """Returns for each use of a whole step's jaxprs what is taken apart otherwise."""
    found: dict[Instance, Parts] = {}
    for use in graph.uses():
        body = _Body(use)
        joined: dict[Any, Joined | None] = {}
        for index, eqn in enumerate(body.eqns):
            node = use.nodes[index]
            if not isinstance(node, int):
                continue
            is_late = is_backward(graph.nodes[node])
            parts: Taken | Joined | Summed | None = None
            if is_late and eqn.primitive.name == "reshape":
                parts = joined[eqn.outvars[0]] = body.joined(eqn)
            elif is_late and eqn.primitive.name == "reduce_sum":
                parts = _summed(eqn, joined)
            elif not is_late and eqn.primitive.name in _TAKEN:
                parts = body.taken(eqn)
            if parts is not None:
                found.setdefault(use, {})[index] = parts
    return found


class _Part(NamedTuple):
    """A part of an array that is put together along one dimension.

    Attributes:
      var: its variable.
      dim: the dimension.
      start: where it begins.
      limit: where it ends.
    """

    var: Any
    dim: int
    start: int
    limit: int


class _Body:
    """One use of a jaxpr: who makes what, and how many read it."""

    def __init__(self, use: Instance) -> None:
        body = _compat.open_jaxpr(use.jaxpr)
        self.eqns = body.eqns
        self._maker: dict[Any, Any] = {}
        self._readers: dict[Any, int] = {}
        for eqn in body.eqns:
            self._maker.update((v, eqn) for v in eqn.outvars)
            self._count(eqn.invars)
        self._count(body.outvars)

    def _count(self, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if not is_literal(atom):
                self._readers[atom] = self._readers.get(atom, 0) + 1

    def _made_by(self, var: Any, *names: str) -> Any:
        """Returns the equation that makes a value; None if it is none of these."""
        eqn = None if is_literal(var) else self._maker.get(var)
        return eqn if eqn is not None and eqn.primitive.name in names else None

    def _untransposed(self, var: Any) -> tuple[Any, tuple[int, ...]]:
        """Returns what was transposed, and the order in which it was."""
        order = tuple(range(var.aval.ndim))
        while (eqn := self._made_by(var, "transpose")) is not None:
            order = tuple(eqn.params["permutation"][d] for d in order)
            (var,) = eqn.invars
        return var, order

    def taken(self, eqn: Any) -> Taken | None:
        """Returns how parts are taken of what was reshaped; None if they are not."""
        dim, bounds = _TAKEN[eqn.primitive.name](eqn)
        var, order = self._untransposed(eqn.invars[0])
        reshape = self._made_by(var, "reshape")
        if reshape is None or not _is_plain(reshape) or not bounds:
            return None
        old, new = reshape.invars[0].aval.shape, var.aval.shape
        axis = _merged(new, order[dim], old)
        if axis is None:
            return None
        shapes = tuple(v.aval.shape for v in eqn.outvars)
        (source,) = reshape.invars
        return Taken((source,), axis, bounds, order[dim], new, order, shapes)

    def joined(self, reshape: Any) -> Joined | None:
        """Returns how a reshaped value is joined; None if it is no sum of parts."""
        (var,) = reshape.invars
        if not _is_plain(reshape) or self._readers[var] != 1:
            return None
        var, order = self._untransposed(var)
        parts = sorted(self._parts(var), key=lambda p: p.start)
        if len(parts) < 2 or len({p.dim for p in parts}) != 1:
            return None
        if any(p.start < q.limit for q, p in zip(parts, parts[1:], strict=False)):
            return None
        dim = parts[0].dim
        old = tuple(var.aval.shape[d] for d in order)
        new = reshape.outvars[0].aval.shape
        axis = _merged(old, order.index(dim), new)
        if axis is None:
            return None
        inner = new[axis] // var.aval.shape[dim]
        bounds = tuple((p.start * inner, p.limit * inner) for p in parts)
        return Joined(tuple(p.var for p in parts), bounds, axis, dim, order, new)

    def _parts(self, var: Any) -> list[_Part]:
        """Returns what an array is put together of; nothing if it is not."""
        parts: list[_Part] = []
        left = [var]
        while left:
            one = left.pop()
            eqn = self._made_by(one, "pad", *_ADDS, *_JOINS)
            if eqn is None or self._readers[one] != 1:
                return []
            if eqn.primitive.name in _ADDS:
                left += eqn.invars
                continue
            found = _padded(eqn) if eqn.primitive.name == "pad" else _side_by_side(eqn)
            if not found or any(is_literal(p.var) for p in found):
                return []
            parts += found
        return parts


def _summed(eqn: Any, joined: dict[Any, Joined | None]) -> Summed | None:
    """Returns how what is joined is summed up; None if it is along its parts."""
    (var,) = eqn.invars
    array = None if is_literal(var) else joined.get(var)
    axes = tuple(eqn.params["axes"])
    if (
        array is None
        or array.axis in axes
        or _compat.lays_out(eqn.params["out_sharding"])
    ):
        return None
    return Summed(array, axes)


def _is_plain(reshape: Any) -> bool:
    """Tells a reshape of known sizes that neither transposes nor shards."""
    (var,), (out,) = reshape.invars, reshape.outvars
    known = all(isinstance(d, int) for d in (*var.aval.shape, *out.aval.shape))
    params = reshape.params
    return (
        known
        and params["dimensions"] is None
        and not _compat.lays_out(params["sharding"])
    )


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """Returns a shape with another size of one dimension."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def _padded(eqn: Any) -> list[_Part]:
    """Returns the array around which zeros are put, along one dimension."""
    operand, zero = eqn.invars
    config = eqn.params["padding_config"]
    dims = [i for i, (low, high, _) in enumerate(config) if low or high]
    inside = any(among for _, _, among in config)
    if inside or len(dims) != 1 or not is_literal(zero):
        return []
    low, high, _ = (int(n) for n in config[dims[0]])
    if _compat.literal_value(zero) != 0 or min(low, high) < 0:
        return []
    return [_Part(operand, dims[0], low, low + operand.aval.shape[dims[0]])]


def _side_by_side(eqn: Any) -> list[_Part]:
    """Returns the arrays that are concatenated or stacked."""
    is_stack = eqn.primitive.name == "stack"
    dim = int(eqn.params["axis" if is_stack else "dimension"])
    parts, at = [], 0
    for var in eqn.invars:
        limit = at + (1 if is_stack else var.aval.shape[dim])
        parts.append(_Part(var, dim, at, limit))
        at = limit
    return parts


def _sliced(eqn: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Returns the dimension along which a part is taken, and its bounds."""
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    shape = eqn.invars[0].aval.shape
    whole = [a == 0 and b == n for a, b, n in zip(starts, limits, shape, strict=True)]
    if eqn.params["strides"] is not None or whole.count(False) != 1:
        return 0, ()
    dim = whole.index(False)
    return dim, ((int(starts[dim]), int(limits[dim])),)


def _split(eqn: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Returns the dimension along which an array is split, and where."""
    limits = [0]
    for size in eqn.params["sizes"]:
        limits.append(limits[-1] + int(size))
    return int(eqn.params["axis"]), tuple(zip(limits, limits[1:], strict=False))


def _unstacked(eqn: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Returns the dimension that an array loses, and the bounds of its elements."""
    return int(eqn.params["axis"]), tuple((i, i + 1) for i in range(len(eqn.outvars)))


_TAKEN = {"slice": _sliced, "split": _split, "unstack": _unstacked}


def _merged(old: Sequence[int], at: int, new: Sequence[int]) -> int | None:
    """Returns the dimension into which `at` and at least the next one are merged.

    It has to be the outermost of those that are, so that parts along it stay whole.
    """
    before = math.prod(old[:at])
    ends = range(at + 2, len(old) + 1)
    sizes = [math.prod(old[at:end]) for end in ends]
    for axis, size in enumerate(new):
        if math.prod(new[:axis]) == before and size > old[at] and size in sizes:
            return axis
    return None
