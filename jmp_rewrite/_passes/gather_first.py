"""Gathers of what arithmetic makes of a stored value, for TPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import TPU, Where, inlined
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import is_float, is_float32, makers, on_device
from jmp_rewrite._rules import PRODUCTS

# Arithmetic on each number by itself that makes NaN of NaN.
_ARITHMETIC = frozenset(
    {
        "add",
        "convert_element_type",
        "copy",
        "div",
        "exp",
        "log",
        "max",
        "min",
        "mul",
        "neg",
        "stop_gradient",
        "sub",
        "tanh",
    }
)


# What is made of more operands, or of one by more ways, is not computed again.
_MOST = 32


class _Step(NamedTuple):
    """An operation of a recipe, or an operand and how it is picked.

    Attributes:
      primitive: the operation; None for an operand.
      params: its parameters; of an operand the dimensions of the result that it has, or
        () for what is taken by the gather itself.
      reads: recipes of the operation's operands, or (number of the operand,).
    """

    primitive: Any
    params: tuple[Any, ...]
    reads: tuple[Any, ...]


def gather_first(editor: Editor) -> None:
    """One value a row is taken before the arithmetic, not of its result.

    `take_along_axis(log_softmax(logits), labels)` is a language model's loss. XLA:TPU
    fuses no arithmetic into a gather: it writes the logarithms, in float32, of batch x
    length x vocabulary, of which one a row is read. The same arithmetic of what is
    taken from the logits, which are stored anyway, gives the same number.

    On TPUs, in whole train steps.

    Gain: a language model's head of 512 by 8192, with its loss, 20 % fewer cycles and
    28 % fewer bytes on a TPU v5e, and none of 135 MB of temporary memory.
    """
    while any(_opens(editor, *place) for place in list(editor.find("gather"))):
        editor.commit()
    for body, _, eqn in list(editor.find("gather")):
        (out,) = eqn.outvars
        if not _is_pick(eqn) or editor.was_here(body, out):
            continue
        leaves: list[Any] = []
        recipe = _recipe(body, eqn.invars[0], eqn.invars[0].aval.shape, leaves)
        if recipe is None or recipe.primitive is None:
            continue
        if not _brings_nan(recipe, leaves, eqn.invars[0].aval.ndim - 1):
            continue
        editor.choose_instead(
            body,
            out,
            [eqn.invars[1], *leaves],
            {Where((TPU,)): _picked},
            recipe=recipe,
            params=tuple(eqn.params.items()),
        )


def _is_pick(eqn: Any) -> bool:
    """Whether a gather takes single numbers along the last dimension of each row."""
    operand, indices = eqn.invars
    last = operand.aval.ndim - 1
    numbers, rows = eqn.params["dimension_numbers"], tuple(range(last))
    fill = eqn.params["fill_value"]
    return (
        last >= 0
        and is_float32(operand)
        and operand.aval.sharding.mesh.empty
        and numbers.collapsed_slice_dims == numbers.start_index_map == (last,)
        and numbers.operand_batching_dims == numbers.start_indices_batching_dims == rows
        and indices.aval.ndim == last + 2
        and set(eqn.params["slice_sizes"]) == {1}
        and (fill is None or np.isnan(fill))
    )


def _opens(editor: Editor, body: Body, index: int, eqn: Any) -> bool:
    """Puts a call's equations in its place, if it hides what a gather is taken of."""
    (out,) = eqn.outvars
    var = eqn.invars[0]
    if not _is_pick(eqn) or editor.was_here(body, out):
        return False
    if not _is_made(makers(body, var)):
        return False
    return open_around(editor, body, var)


def _is_made(places: Sequence[tuple[Body, int]]) -> bool:
    """Whether arithmetic makes a value, wherever it stands."""
    return len(places) == 1 and all(
        at >= 0 and inner.eqns[at].primitive.name in _ARITHMETIC for inner, at in places
    )


def open_around(editor: Editor, body: Body, var: Any) -> bool:
    """Opens the one call that a value comes from; returns whether it is a plain one."""
    if var in body.parameter:
        calls = dict.fromkeys(body.calls)
        return len(calls) == 1 and _open(editor, *next(iter(calls)))
    return _open(editor, body, body.maker[var])


def _open(editor: Editor, body: Body, index: int) -> bool:
    """Puts the equations of a plain call in its place; returns whether it is one."""
    eqn = body.eqns[index]
    if eqn.primitive.name != "jit" or not _compat.is_plain_call(eqn):
        return False
    (inner,) = body.held[index]
    if _compat.constvars(eqn.params["jaxpr"]):
        return False  # nothing in its place would hold them
    said = editor.marks(body, index)  # it takes the place of what is said inside
    if any(editor.marks(inner, at) != said for at in range(len(inner.eqns))):
        return False
    eqns, outs = inlined(editor.jaxpr_of(inner), eqn.invars, eqn)
    editor.put(body, index, eqns, outs)
    return True


def _brings_nan(step: _Step, leaves: Sequence[Any], last: int) -> bool:
    """Whether a recipe reads floats by the gather: NaN for an index out of range."""
    if step.primitive is not None:
        return any(_brings_nan(read, leaves, last) for read in step.reads)
    leaf = leaves[step.reads[0]]
    return is_float(leaf) and last in _long(step.params, leaf.aval.shape)


def _long(dims: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Returns the dimensions along which an operand is not repeated."""
    return [d for d, size in zip(dims, shape, strict=True) if size > 1]


def _recipe(
    body: Body, var: Any, shape: tuple[int, ...], leaves: list[Any]
) -> _Step | None:
    """Returns how a value is made of what is stored, and of rows and columns.

    Args:
      body: where the value stands.
      var: of the shape that the gather reads, or with ones in place of dimensions.
      shape: what the gather reads.
      leaves: what is read; it grows.
    """
    if len(leaves) > _MOST:
        return None
    var = on_device(body, var, TPU)
    if hasattr(var, "val") or not var.aval.shape:
        return _leaf(var, (), leaves)
    spread = body.made_by(var, "broadcast_in_dim")
    if spread is not None:
        (source,) = spread.invars
        dims = spread.params["broadcast_dimensions"]
        return _small(source, dims, var.aval.ndim, leaves)
    dims = tuple(range(var.aval.ndim))
    small = _small(var, dims, var.aval.ndim, leaves)
    if small is not None:
        return small
    eqn = body.made_by(var)
    if is_float32(var) and eqn is not None and eqn.primitive.name in _ARITHMETIC:
        reads = tuple(_recipe(body, v, shape, leaves) for v in eqn.invars)
        known = all(r is not None for r in reads)
        return _Step(eqn.primitive, tuple(eqn.params.items()), reads) if known else None
    is_stored = not is_float32(var) or _is_product(makers(body, var))
    is_whole = is_float(var) and var.aval.shape == shape
    return _leaf(var, dims, leaves) if is_whole and is_stored else None


def _is_product(places: Sequence[tuple[Body, int]]) -> bool:
    return all(at >= 0 and b.eqns[at].primitive.name in PRODUCTS for b, at in places)


def _leaf(var: Any, dims: Sequence[int], leaves: list[Any]) -> _Step:
    leaves.append(var)
    return _Step(None, tuple(dims), (len(leaves) - 1,))


def _small(var: Any, dims: Sequence[int], ndim: int, leaves: list[Any]) -> _Step | None:
    """Returns the operand that is the same along each row, or for all rows."""
    long = _long(dims, var.aval.shape)
    if ndim - 1 not in long or long == [ndim - 1]:
        return _leaf(var, dims, leaves)
    return None


def _picked(
    stored: Any, indices: Any, *leaves: Any, recipe: _Step, params: tuple[Any, ...]
) -> Any:
    return [_value(recipe, stored.shape, indices, leaves, dict(params))]


def _value(
    step: _Step,
    shape: tuple[int, ...],
    indices: Any,
    leaves: Sequence[Any],
    how: Mapping[str, Any],
) -> Any:
    if step.primitive is not None:
        values = [_value(r, shape, indices, leaves, how) for r in step.reads]
        return step.primitive.bind(*values, **dict(step.params))
    leaf, last = leaves[step.reads[0]], len(shape) - 1
    long = _long(step.params, leaf.shape)
    if last not in long:
        return lax.broadcast_in_dim(leaf, shape, step.params)
    if long != [last]:
        return lax.gather_p.bind(leaf, indices, **how)
    return lax.gather(
        lax.reshape(leaf, (leaf.size,)),
        indices,
        lax.GatherDimensionNumbers((), (0,), (0,)),
        (1,),
        mode=how["mode"],
        fill_value=how["fill_value"],
    )
