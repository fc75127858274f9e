"""Zeros that one value a row is scattered into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite._graph import counts_up, is_as_wide
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import is_float, makers, number_of

_SCATTERS = ("scatter", "scatter-add")


def scatter_as_select(editor: Editor) -> None:
    """One value a row that is scattered into zeros is selected where its index is.

    So a loss' gradient with respect to the logits begins, the transpose of
    `take_along_axis` or of `x[arange, labels]`. Compilers fuse no scatter: zeros of
    batch x length x vocabulary are written, changed in place and read. A comparison
    with an `iota` is computed in the kernel that reads it. Indices out of range are
    dropped or clipped as before. (A -0 stays one, where a sum with zero made it 0.)

    On all devices, in whole train steps.

    Gain: a state-space language model 4 % fewer bytes and 9 % less memory on an H200.
    """
    for body, index, eqn in list(editor.find(*_SCATTERS)):
        zeros, indices, updates = eqn.invars
        if not is_float(zeros) or not zeros.aval.sharding.mesh.empty:  # or it varies
            continue
        if number_of(body, zeros) != 0 or not _is_plain(eqn):
            continue
        rows = _rows(body, eqn)
        if rows is not None:
            editor.replace(
                body,
                index,
                _selected,
                indices,
                updates,
                shape=zeros.aval.shape,
                numbers=eqn.params["dimension_numbers"],
                rows=rows,
                clips=eqn.params["mode"] is lax.GatherScatterMode.CLIP,
            )


def _is_plain(eqn: Any) -> bool:
    """Whether windows are whole and only what they leave out is looked for."""
    zeros, _, updates = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:
        return False  # it applies a function
    if not set(numbers.scatter_dims_to_operand_dims) <= set(
        numbers.inserted_window_dims
    ):
        return False
    sizes = [updates.aval.shape[d] for d in numbers.update_window_dims]
    return sizes == [zeros.aval.shape[d] for d in _window(zeros.aval.ndim, numbers)]


def _window(ndim: int, numbers: Any) -> list[int]:
    """Returns the dimensions of the result that a window covers."""
    others = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return [d for d in range(ndim) if d not in others]


def _rows(body: Body, eqn: Any) -> tuple[tuple[int, int], ...] | None:
    """Returns which dimension of the result each of the indices' is, (it, theirs).

    None if there is more than one index a row.
    """
    zeros, indices, _ = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    shape = indices.aval.shape[:-1]
    rows = dict(
        zip(
            numbers.scatter_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    if math.prod(n for d, n in enumerate(shape) if d not in rows) != 1:
        counted = _counted(body, indices)
        for part, at in enumerate(numbers.scatter_dims_to_operand_dims):
            d = counted.get(part)
            if d is not None and d not in rows and shape[d] == zeros.aval.shape[at]:
                rows[d] = at
    if math.prod(n for d, n in enumerate(shape) if d not in rows) != 1:
        return None
    return tuple((at, d) for d, at in rows.items())


def _counted(body: Body, indices: Any) -> dict[int, int]:
    """Returns which parts of joined indices count along a dimension: 0, 1, 2, ..."""
    ((body, index), *others) = makers(body, indices, whole=True)
    if others or index < 0 or body.eqns[index].primitive.name != "concatenate":
        return {}
    eqn, last = body.eqns[index], indices.aval.ndim - 1
    parts = eqn.invars
    if eqn.params["dimension"] != last or any(v.aval.shape[last] != 1 for v in parts):
        return {}
    along = {part: _counts(body, v) for part, v in enumerate(parts)}
    return {part: d for part, d in along.items() if d is not None and d != last}


def _counts(body: Body, atom: Any) -> int | None:
    """Returns along which dimension a value is 0, 1, 2, ...; None if along none."""
    ((body, index), *others) = makers(body, atom, whole=True)
    if others or index < 0:
        return None
    eqn = body.eqns[index]
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return int(params["dimension"]) if counts_up(eqn) else None
    if name == "select_n":  # a negative index counts from the end, and none is
        least, same = body.made_by(eqn.invars[0], "lt"), eqn.invars[1]
        if least is None or least.invars[0] is not same:
            return None
        return _counts(body, same) if _is_zero(least.invars[1]) else None
    if name == "convert_element_type":
        return _counts(body, eqn.invars[0]) if is_as_wide(eqn) else None
    if name == "broadcast_in_dim":
        d, before = _counts(body, eqn.invars[0]), eqn.invars[0].aval.shape
        after = None if d is None else int(params["broadcast_dimensions"][d])
        return after if after is None or params["shape"][after] == before[d] else None
    return None


def _is_zero(atom: Any) -> bool:
    return hasattr(atom, "val") and not np.any(atom.val)


def _selected(
    indices: Any,
    updates: Any,
    *,
    shape: tuple[int, ...],
    numbers: Any,
    rows: tuple[tuple[int, int], ...],
    clips: bool,
) -> Any:
    known = dict(rows)
    window = _window(len(shape), numbers)
    outer = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    of_updates = {at: outer[d] for at, d in known.items()}
    of_updates |= dict(zip(window, numbers.update_window_dims, strict=True))
    values = _laid_out(updates, of_updates, shape)
    where = None
    for part, at in enumerate(numbers.scatter_dims_to_operand_dims):
        if at in known:
            continue
        index = lax.index_in_dim(indices, part, indices.ndim - 1, keepdims=False)
        if index.dtype.itemsize < 4:
            index = lax.convert_element_type(index, np.int32)
        if clips:
            limit = np.asarray(shape[at] - 1, index.dtype)
            index = lax.clamp(np.zeros((), index.dtype), index, limit)
        index = _laid_out(index, known, shape)
        found = lax.broadcasted_iota(index.dtype, shape, at) == index
        where = found if where is None else where & found
    if where is None:
        return [values]
    return [lax.select(where, values, lax.full_like(values, 0))]


def _laid_out(x: Any, of: dict[int, int], shape: tuple[int, ...]) -> Any:
    """Broadcasts, where `of` says which dimension of `x` each of the result's is."""
    order = [of[d] for d in sorted(of)]
    left = [d for d in range(x.ndim) if d not in order]  # of size 1
    x = lax.squeeze(lax.transpose(x, (*order, *left)), range(len(order), x.ndim))
    return lax.broadcast_in_dim(x, shape, sorted(of))
