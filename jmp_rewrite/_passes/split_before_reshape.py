"""Parts of an array that are taken out before it is reshaped, or put in afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import TPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import is_float
from jmp_rewrite._passes.program import ROUNDING
from jmp_rewrite._rules import ADDS, JOINS

_PLAIN_CAST = "convert_element_type"


def split_before_reshape(editor: Editor) -> None:
    """Parts are taken of an array before it is reshaped, and joined after they are.

    A layer that computes queries, keys and values in one product takes them apart as
    `qkv.reshape(..., 3, heads, features)[..., i, :, :]`. XLA:TPU reads such a slice in
    the product of the scores, and then no longer joins that with its softmax. The
    cotangent is a sum of three arrays, each padded with zeros, that is reshaped for the
    gradients of the layer: laid out with its parts outermost, it is copied as a whole
    into the order that those need. If the slice is taken of what was reshaped, and each
    part of the cotangent is reshaped by itself, there is neither. Nothing is computed,
    so no value differs. A sum over the other dimensions, a bias' gradient, XLA:TPU
    takes of each part in the kernel of the product that makes it; XLA:GPU would read
    each of them once more.

    A forward function of fewer rows than features, as one step of decoding, is left
    alone: XLA:TPU would slice the weights, which are larger.

    On all devices; the sums on TPUs.

    Gain: GPT-2 18 % fewer cycles on a TPU v5e (`benchmarks/NOTES.md`, 46).
    """
    joined: dict[tuple[Body, Any], tuple[Joined, list[Any]]] = {}
    for body, index, eqn in editor.find("reshape", "reduce_sum", *_TAKEN):
        (out, *_) = eqn.outvars
        if not is_float(out) or editor.was_here(body, out):
            continue
        is_late = editor.is_backward(body, index)
        if is_late and eqn.primitive.name == "reshape":
            if (found := _joined(body, eqn)) is not None:
                joined[body, out] = how, parts = found
                editor.replace(body, index, how.array, *parts)
        elif is_late and eqn.primitive.name == "reduce_sum":
            if (total := _summed(body, eqn, joined)) is not None:
                how, parts, axes = total
                by_parts = {Where((TPU,)): _sum_of_parts}
                editor.choose_instead(body, out, parts, by_parts, how=how, axes=axes)
        elif not is_late and eqn.primitive.name in _TAKEN:
            taken = _taken(body, eqn)
            if taken is not None and (editor.whole_step or _has_rows(*taken)):
                editor.replace(body, index, taken[0].parts, taken[1])


class Taken(NamedTuple):
    """How parts are taken of an array before it is reshaped.

    Attributes:
      axis: its dimension along which they lie.
      bounds: of each part, along the dimension `at`.
      at: a dimension of the reshaped array, the outermost of those that `axis` becomes.
      reshaped: the reshaped array's dimensions.
      order: the order in which the parts have these.
      shapes: the shapes of the parts.
      dtype: theirs.
    """

    axis: int
    bounds: tuple[tuple[int, int], ...]
    at: int
    reshaped: tuple[int, ...]
    order: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: Any

    def parts(self, x: Any) -> list[Any]:
        """Returns the parts of an array."""
        inner = x.shape[self.axis] // self.reshaped[self.at]
        x = lax.convert_element_type(x, self.dtype)
        parts = []
        for (start, limit), shape in zip(self.bounds, self.shapes, strict=True):
            part = lax.slice_in_dim(x, start * inner, limit * inner, axis=self.axis)
            part = part.reshape(_with(self.reshaped, self.at, limit - start))
            parts.append(lax.transpose(part, self.order).reshape(shape))
        return parts


class Joined(NamedTuple):
    """How an array is put together of parts that were reshaped.

    Attributes:
      bounds: of each part, along the dimension `axis`.
      axis: the dimension of the array along which they lie.
      dim: that of the parts; those of a stack do not have it.
      order: the order in which their dimensions are reshaped.
      shape: the array's.
      dtype: the array's.
    """

    bounds: tuple[tuple[int, int], ...]
    axis: int
    dim: int
    order: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    def array(self, *parts: Any) -> list[Any]:
        """Returns the array, from its parts in the order in which they lie."""
        return [lax.concatenate(self.pieces(parts), self.axis)]

    def pieces(self, parts: Sequence[Any]) -> list[Any]:
        """Returns the reshaped parts, and zeros where there is none, in order."""
        pieces, at = [], 0
        for x, (start, limit) in zip(parts, self.bounds, strict=True):
            x = lax.convert_element_type(x, self.dtype)
            if x.ndim < len(self.order):
                x = lax.expand_dims(x, [self.dim])
            x = lax.transpose(x, self.order)
            pieces += self._zeros(start - at)
            pieces.append(x.reshape(_with(self.shape, self.axis, limit - start)))
            at = limit
        return pieces + self._zeros(self.shape[self.axis] - at)

    def _zeros(self, size: int) -> list[Any]:
        shape = _with(self.shape, self.axis, size)
        return [lax.full(shape, 0, self.dtype)] if size else []


def _sum_of_parts(
    stored: Any, *parts: Any, how: Joined, axes: tuple[int, ...]
) -> list[Any]:
    if all(x.dtype == how.dtype for x in parts):  # a cast to that narrows none
        how = how._replace(dtype=stored.dtype)
    pieces = (lax.convert_element_type(x, stored.dtype) for x in how.pieces(parts))
    sums = [lax.reduce_sum(x, axes) for x in pieces]
    return [lax.concatenate(sums, how.axis - sum(a < how.axis for a in axes))]


# ---- what is taken apart, and what is joined


def _unmoved(body: Body, var: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the array behind transposes and casts, and their order.

    The casts are one: none but the last narrows.
    """
    order, dtype = tuple(range(var.aval.ndim)), var.aval.dtype
    while (eqn := body.made_by(var, "transpose", _PLAIN_CAST)) is not None:
        if not is_float(eqn.invars[0]):
            break
        if eqn.primitive.name == "transpose":
            order = tuple(eqn.params["permutation"][d] for d in order)
        elif not _is_one_cast(eqn, dtype):
            break
        (var,) = eqn.invars
    return var, order


def _is_one_cast(eqn: Any, dtype: Any) -> bool:
    """Whether a cast, and a later one to a dtype, are one cast to that."""
    (before,), (after,) = (
        [v.aval.dtype for v in vs] for vs in (eqn.invars, eqn.outvars)
    )
    return bool(after == dtype or before.itemsize < after.itemsize)


def _taken(body: Body, eqn: Any) -> tuple[Taken, Any] | None:
    """Returns how parts are taken of what was reshaped; None if they are not."""
    dim, bounds = _TAKEN[eqn.primitive.name](eqn)
    var, order = _unmoved(body, eqn.invars[0])
    reshape = body.made_by(var, "reshape")
    if reshape is None or not _is_plain(reshape) or not bounds:
        return None
    (source,) = reshape.invars
    old, new = source.aval.shape, var.aval.shape
    axis = _merged(new, order[dim], old)
    if axis is None or _compat.lays_out(source.aval.sharding):
        return None
    shapes = tuple(v.aval.shape for v in eqn.outvars)
    dtype = eqn.outvars[0].aval.dtype
    return Taken(axis, bounds, order[dim], new, order, shapes, dtype), source


def _has_rows(how: Taken, source: Any) -> bool:
    """Whether an array has as many rows as features, unlike one step of decoding."""
    features = source.aval.shape[how.axis]
    return bool(source.aval.size // features >= features)


def _joined(body: Body, reshape: Any) -> tuple[Joined, list[Any]] | None:
    """Returns how a reshaped value is joined; None if it is no sum of parts."""
    (var,) = reshape.invars
    if not _is_plain(reshape) or len(body.reads(var)) != 1:
        return None
    dtype = var.aval.dtype
    var, order = _unmoved(body, var)
    parts = sorted(_parts(body, var, dtype), key=lambda p: p.start)
    if len(parts) < 2 or len({p.dim for p in parts}) != 1:
        return None
    if any(p.start < q.limit for q, p in zip(parts, parts[1:], strict=False)):
        return None
    dim = parts[0].dim
    old = tuple(var.aval.shape[d] for d in order)
    (out,) = reshape.outvars
    new = out.aval.shape
    axis = _merged(old, order.index(dim), new)
    if axis is None or any(_compat.lays_out(p.var.aval.sharding) for p in parts):
        return None
    inner = new[axis] // var.aval.shape[dim]
    bounds = tuple((p.start * inner, p.limit * inner) for p in parts)
    how = Joined(bounds, axis, dim, order, new, out.aval.dtype)
    return how, [p.var for p in parts]


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


def _parts(body: Body, var: Any, dtype: Any) -> list[_Part]:
    """Returns the parts of a joined array that is cast to a dtype; nothing if none."""
    parts: list[_Part] = []
    left = [var]
    while left:
        one = left.pop()
        eqn = body.made_by(one, "pad", _PLAIN_CAST, ROUNDING, *ADDS, *JOINS)
        if eqn is None or len(body.reads(one)) != 1:
            return []
        name = eqn.primitive.name
        if name in ADDS or (_casts(eqn) and _is_one_cast(eqn, dtype)):
            left += eqn.invars
            continue
        found = _padded(eqn) if name == "pad" else _side_by_side(eqn)
        if not found or any(hasattr(p.var, "val") for p in found):
            return []
        parts += found
    return parts


def _casts(eqn: Any) -> bool:
    """Whether an equation is a cast; what is zero beside a part stays zero."""
    name = eqn.primitive.name
    return name == _PLAIN_CAST or (name == ROUNDING and eqn.params["into"] is None)


def _summed(
    body: Body, eqn: Any, joined: dict[tuple[Body, Any], tuple[Joined, list[Any]]]
) -> tuple[Joined, list[Any], tuple[int, ...]] | None:
    """Returns how what is joined is summed up; None if it is along its parts."""
    (var,) = eqn.invars
    if (cast := body.made_by(var, _PLAIN_CAST)) is not None:
        (var,) = cast.invars
    axes = tuple(eqn.params["axes"])
    found = None if hasattr(var, "val") else joined.get((body, var))
    if found is None or _compat.lays_out(eqn.params["out_sharding"]):
        return None
    how, parts = found
    reads = body.reads(eqn.outvars[0])
    readers = {body.eqns[i].primitive.name for i, _ in reads if i >= 0}
    return None if how.axis in axes or ROUNDING in readers else (how, parts, axes)


def _is_plain(reshape: Any) -> bool:
    """Whether a reshape is of known sizes, without transpose or sharding."""
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
    if inside or len(dims) != 1 or not hasattr(zero, "val"):
        return []
    low, high, _ = (int(n) for n in config[dims[0]])
    if zero.val != 0 or min(low, high) < 0:
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
