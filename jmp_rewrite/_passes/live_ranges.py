"""Values that a GPU would hold in memory for longer, or in more bytes, than needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from jmp_rewrite._passes.by_device import GPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import (
    carried,
    enters,
    feeding,
    is_float,
    is_float32,
    is_half_product,
    is_widening,
    made_inside,
    makers,
    number_of,
    on_device,
    uses,
)
from jmp_rewrite._passes.program import CASTS
from jmp_rewrite._rules import PRODUCTS

# A part of a cotangent waits if its reader has to wait for so many products more.
_PRODUCTS = 2
# What is read through these is stored behind them.
_VIEWS = frozenset(
    {"convert_element_type", "expand_dims", "reshape", "slice", "squeeze", "transpose"}
)


def live_ranges(editor: Editor) -> None:
    """A waiting cotangent is written when it is complete, and zeros are filled late.

    Of a skip connection's cotangent, which waits until the backward pass is through
    with all that lies below, XLA:GPU keeps whatever it is made of. And it fills the
    zeros that a sum starts from when the program begins, because that reads nothing.
    Both are large in a program that adds up in float32. The zeros wait for what is
    stored of the terms, or for one of them: terms that are computed as they are added
    would be written to be waited for. What is read at once is not written.

    On NVIDIA GPUs, in whole train steps.

    Gain: U-Net 13 % less memory on an H200; zeros that wait for one term in place of
    all save an interatomic potential 13 % of its bytes there, a graph network 6 %.
    """
    _write_waiting(editor)
    _fill_late(editor)


def _write_waiting(editor: Editor) -> None:
    """Writes the parts of half cotangents that wait for other products."""
    parts = [
        (body, index, eqn)
        for body, index, eqn in editor.find("slice", "split")
        if eqn.outvars[0].aval.dtype == editor.half and editor.is_backward(body, index)
    ]
    if not parts:
        return
    depths = _Depths(editor)
    for body, index, eqn in parts:
        own = depths.of[body, index]
        for var in eqn.outvars:  # the others are read in the kernels that read them
            later = [depths.of.get(place, -1) for place in _readers(body, var)]
            waits = max(later, default=-1) - own >= _PRODUCTS
            if waits and not editor.was_here(body, var):
                branches = {Where((GPU,)): _written}
                editor.choose_instead(body, var, [], branches)


def _readers(body: Body, var: Any) -> Iterator[tuple[Body, int]]:
    """Yields the equations that read a value, or a cast of it."""
    for place, index, _ in uses(body, var):
        eqn = place.eqns[index]
        if index >= 0 and eqn.primitive.name in CASTS:
            yield from _readers(place, eqn.outvars[0])
        else:
            yield place, index


def _written(x: Any) -> Any:
    return [lax.optimization_barrier(x)]


def _fill_late(editor: Editor) -> None:
    """Fills the zeros of sums in the midst of a backward pass once terms are there.

    The gradient of an embedding's table is none: it comes last.
    """
    sums = [
        (body, index, eqn)
        for body, index, eqn in editor.find("scatter-add")
        if is_float32(eqn.outvars[0])
        and editor.is_backward(body, index)
        and number_of(body, eqn.invars[0]) == 0
    ]
    if not sums:
        return
    leads = feeding(
        (body, v)
        for body, _, eqn in editor.find(*PRODUCTS)
        if is_half_product(eqn, editor.half)
        for v in eqn.invars[:2]
    )
    for body, index, eqn in sums:
        zeros, _, terms = eqn.invars
        laid_out = not zeros.aval.sharding.mesh.empty  # or it may vary
        if (body, eqn.outvars[0]) not in leads or laid_out:
            continue
        if hasattr(zeros, "val") or editor.was_here(body, zeros):
            continue
        made, views = _behind_views(body, terms)
        if _is_stored(editor, body, made):
            behind = {Where((GPU,)): _filled_behind}
            late = editor.choose(
                body, index, [zeros, terms], [made], behind, views=views
            )
            editor.read(body, index, 2, late[1])
        else:
            by_one = {Where((GPU,)): _filled_by_one}
            late = editor.choose(body, index, [zeros], [terms], by_one)
        editor.read(body, index, 0, late[0])


def _behind_views(body: Body, var: Any) -> tuple[Any, Any]:
    """Returns that of which a value is a view on a GPU, and what makes the view."""
    views: list[Any] = []
    while True:
        var = on_device(body, var, GPU)
        eqn = body.made_by(var, "split", *_VIEWS)
        if eqn is None or hasattr(eqn.invars[0], "val") or len(eqn.invars) > 1:
            return var, tuple(views[::-1])
        if eqn.primitive.name == "split":
            views.append((lax.slice_p, _part(eqn, var)))
        else:
            views.append((eqn.primitive, tuple(eqn.params.items())))
        (var,) = eqn.invars


def _part(split: Any, var: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the parameters of the slice that a part of a value is."""
    axis, sizes = split.params["axis"], split.params["sizes"]
    position = split.outvars.index(var)
    start = [0] * var.aval.ndim
    start[axis] = sum(sizes[:position])
    limit = [a + n for a, n in zip(start, var.aval.shape, strict=True)]
    return (
        ("start_indices", tuple(start)),
        ("limit_indices", tuple(limit)),
        ("strides", None),
    )


def _is_stored(editor: Editor, body: Body, var: Any) -> bool:
    """Whether a value, or what it is widened from, is stored in any case."""
    if var.aval.dtype == editor.half:
        return True
    made = [b.eqns[i] for b, i in makers(body, var) if i >= 0]
    return bool(made) and all(
        e.primitive.name in PRODUCTS or is_widening(e, editor.half) for e in made
    )


def _filled_behind(zeros: Any, terms: Any, stored: Any, *, views: Any) -> Any:
    """Waits for what is stored; a view of it would be written for the barrier."""
    zero, x = lax.optimization_barrier((np.zeros((), zeros.dtype), stored))
    for primitive, params in views:
        x = primitive.bind(x, **primitive.get_bind_params(dict(params)))
    return [lax.broadcast_in_dim(zero, zeros.shape, ()), x]


def _filled_by_one(zeros: Any, terms: Any) -> Any:
    """Waits for one of the terms, which are computed as they are added.

    A compiler drops what nobody reads of a barrier, so the zero is made of the term.
    """
    first = lax.slice(terms, (0,) * terms.ndim, (1,) * terms.ndim)
    bits = np.dtype(f"uint{8 * terms.dtype.itemsize}")
    nothing = lax.optimization_barrier(np.zeros((), bits))
    number = lax.bitcast_convert_type(lax.squeeze(first, range(terms.ndim)), bits)
    zero = lax.bitcast_convert_type(number & nothing, zeros.dtype)
    return [lax.broadcast_in_dim(zero, zeros.shape, ())]


class _Depths:
    """For each equation the longest chain of products that lead to it.

    Attributes:
      of: (body, index) -> the length, the largest over all calls.
    """

    def __init__(self, editor: Editor) -> None:
        self.of: dict[tuple[Body, int], int] = {}
        self._known: dict[tuple[Body, tuple[int, ...]], list[int]] = {}
        top = editor.bodies[0]
        self._body(top, (0,) * len(top.invars))

    def _body(self, body: Body, given: Sequence[int]) -> list[int]:
        """Returns the depths of the results, from those of the parameters."""
        key = body, tuple(given)
        if key in self._known:
            return self._known[key]
        env = dict(zip(body.invars, given, strict=True))
        for index, eqn in enumerate(body.eqns):
            before = [0 if hasattr(v, "val") else env.get(v, 0) for v in eqn.invars]
            if index in body.held:
                outs = self._inside(body, index, before)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            depth = max(before, default=0) + (eqn.primitive.name in PRODUCTS)
            self.of[body, index] = max(depth, self.of.get((body, index), 0))
            env.update((v, depth) for v in eqn.outvars if is_float(v))
        outs = [0 if hasattr(v, "val") else env.get(v, 0) for v in body.outvars]
        self._known[key] = outs
        return outs

    def _inside(self, body: Body, index: int, before: Sequence[int]) -> list[int]:
        eqn, held = body.eqns[index], body.held[index]
        given = {inner: [0] * len(inner.invars) for inner in held}
        for operand, depth in enumerate(before):
            for inner, position in enters(body, index, operand):
                given[inner][position] = max(given[inner][position], depth)
        made = {inner: self._body(inner, depths) for inner, depths in given.items()}
        carries = carried(eqn)
        outs = []
        for position in range(len(eqn.outvars)):
            if position < len(carries):  # as before the first iteration
                outs.append(before[carries[position]])
                continue
            inside = made_inside(body, index, position)
            outs.append(max(made[inner][position] for inner, _ in inside))
        return outs
