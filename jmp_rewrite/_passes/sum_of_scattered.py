"""Sums of rows of zeros that one value each is scattered into."""

from __future__ import annotations

from typing import Any

from jax import lax

from jmp_rewrite._passes.by_device import TPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.gather_first import open_around
from jmp_rewrite._passes.match import is_float32, makers, number_of

# What may stand between a scatter and the sum: a sum of these is these of a sum.
_LINEAR = frozenset({"convert_element_type", "copy", "neg"})


def sum_of_scattered(editor: Editor) -> None:
    """The sum of a row of zeros that a value is scattered into is that value.

    The derivative of `log_softmax` sums the cotangent along each row, and that of
    `take_along_axis` has one number in a row of zeros: a kernel of its own compares
    batch x length x vocabulary indices, in order to add up zeros. An index out of range
    is dropped or clipped as before. (The sum of a -0 is 0, as before.)

    On TPUs, in whole train steps.

    Gain: a language model's head of 512 by 8192, with its loss, 18 % fewer cycles on a
    TPU v5e.
    """
    while any(_opens(editor, *place) for place in list(editor.find("reduce_sum"))):
        editor.commit()
    for body, _, eqn in list(editor.find("reduce_sum")):
        chain, (out,) = _chain(body, eqn), eqn.outvars
        if chain is None or editor.was_here(body, out):
            continue
        scatter = body.made_by(chain[-1])
        if scatter is None or not _is_put(body, scatter):
            continue
        names = tuple(
            (made.primitive, tuple(made.params.items()))
            for made in (body.made_by(v) for v in reversed(chain[:-1]))
        )
        _, indices, updates = scatter.invars
        clips = scatter.params["mode"] is lax.GatherScatterMode.CLIP
        size = eqn.invars[0].aval.shape[-1]
        editor.choose_instead(
            body,
            out,
            [indices, updates],
            {Where((TPU,)): _sum},
            names=names,
            size=size,
            clips=clips,
        )


def _chain(body: Body, eqn: Any) -> list[Any] | None:
    """Returns what is summed up along rows, and what it is made of, one by one."""
    (var,) = eqn.invars
    if not is_float32(var) or tuple(eqn.params["axes"]) != (var.aval.ndim - 1,):
        return None
    chain = [var]
    while (made := body.made_by(chain[-1])) is not None:
        if made.primitive.name not in _LINEAR:
            break
        chain.append(made.invars[0])
    return chain


def _is_put(body: Body, eqn: Any) -> bool:
    """Whether single numbers are put into rows of zeros along the last dimension."""
    if eqn.primitive.name not in ("scatter", "scatter-add"):
        return False
    zeros, indices, updates = eqn.invars
    last = zeros.aval.ndim - 1
    numbers, rows = eqn.params["dimension_numbers"], tuple(range(last))
    if eqn.primitive.name == "scatter":  # two in one row would not be added up
        is_one = updates.aval.shape == (*zeros.aval.shape[:-1], 1)
        if eqn.params["update_jaxpr"] is not None or not is_one:
            return False
    return (
        last >= 0
        and zeros.aval.sharding.mesh.empty
        and numbers.update_window_dims == ()
        and numbers.inserted_window_dims == (last,)
        and numbers.scatter_dims_to_operand_dims == (last,)
        and numbers.operand_batching_dims == rows
        and numbers.scatter_indices_batching_dims == rows
        and indices.aval.ndim == last + 2
        and number_of(body, zeros) == 0
    )


def _opens(editor: Editor, body: Body, index: int, eqn: Any) -> bool:
    """Puts a call's equations in its place, if it hides a scatter from a sum."""
    chain = _chain(body, eqn)
    if chain is None:
        return False
    var = chain[-1]
    places = makers(body, var)
    if len(places) != 1 or places[0][1] < 0:
        return False
    inner, at = places[0]
    if not _is_put(inner, inner.eqns[at]) or (
        inner is body and body.maker.get(var) == at
    ):
        return False
    return open_around(editor, body, var)


def _sum(
    stored: Any,
    indices: Any,
    updates: Any,
    *,
    names: tuple[Any, ...],
    size: int,
    clips: bool,
) -> Any:
    index = lax.squeeze(indices, (indices.ndim - 1,))
    if not clips:
        known = (index >= 0) & (index < size)
        updates = lax.select(known, updates, lax.full_like(updates, 0))
    for primitive, params in names:
        updates = primitive.bind(updates, **dict(params))
    return [lax.reduce_sum(updates, (updates.ndim - 1,))]
