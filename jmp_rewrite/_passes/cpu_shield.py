"""Products that XLA:CPU could not run otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes.by_device import CPU, Where
from jmp_rewrite._passes.edit import Editor
from jmp_rewrite._passes.match import is_float32, is_half_product

_Dims = tuple[Sequence[int], Sequence[int]]
Numbers = tuple[_Dims, _Dims]


def cpu_shield(editor: Editor) -> None:
    """XLA:CPU cannot fold a transpose into a product for which it then has no kernel.

    It folds after it has chosen a kernel, and has none for what comes out ("Unsupported
    element type for DotThunk::Execute: BF16 x BF16 = F32", JAX 0.10.2 to 0.12.0). A
    barrier keeps the operands from it; rounding to float32's own format, which is no
    rounding, keeps the result. Two matrices that are multiplied along their columns, as
    every weight gradient of a layer on matrices is, are multiplied a third as fast,
    unless the transpose is a copy.

    On CPUs, for bfloat16; the order of operands everywhere.

    Gain: the program runs.
    """
    if editor.half.name != "bfloat16":
        return
    for body, index, eqn in editor.find("dot_general"):
        (out,) = eqn.outvars
        if not is_half_product(eqn, editor.half) or not is_float32(out):
            continue
        if editor.was_here(body, out):
            continue
        numbers = eqn.params["dimension_numbers"]
        numbers, orders = batch_first(eqn.invars, numbers)
        operands = list(eqn.invars)
        for position, order in enumerate(orders):
            if order is not None:
                (operands[position],) = editor.insert(
                    body, index, _transposed, operands[position], order=order
                )
        copied = False
        if is_of_columns(operands, numbers):
            numbers = (((1,), (0,)), ((), ()))
            # A dimension that is sharded in the type cannot be split.
            copied = not _compat.lays_out(operands[0].aval.sharding)
            (operands[0],) = editor.insert(
                body, index, _transposed, operands[0], order=(1, 0)
            )
        # One choice an operand: a product may be linear in one of them alone.
        for position, var in enumerate(operands):
            branches = {Where((CPU,)): barrier}
            if copied and position == 0:
                branches = {Where((CPU,), "whole arrays"): _copied_barrier, **branches}
            (own,) = editor.choose(body, index, [var], [], branches, required=True)
            editor.read(body, index, position, own)
        editor.set_params(body, index, dimension_numbers=numbers)
        branches = {Where((CPU,)): _to_float32}
        editor.choose_instead(body, out, [], branches, required=True)


def batch_first(
    operands: Sequence[Any], numbers: Numbers
) -> tuple[Any, list[tuple[int, ...] | None]]:
    """Moves batch dimensions to the front of a product's operands.

    XLA does it as well, by transposes that it folds, on the wrong side of the barrier.

    Returns:
      The product's dimension numbers, and each operand's order, None if it stays.
    """
    contracting, batch = numbers
    orders: list[tuple[int, ...] | None] = []
    contracted = []
    for x, dims, front in zip(operands, contracting, batch, strict=True):
        ndim = len(x.aval.shape) if hasattr(x, "aval") else x.ndim
        order = (*front, *(d for d in range(ndim) if d not in front))
        orders.append(None if list(order) == sorted(order) else order)
        contracted.append(tuple(order.index(d) for d in dims))
    leading = tuple(range(len(batch[0])))
    return (tuple(contracted), (leading, leading)), orders


def is_of_columns(operands: Sequence[Any], numbers: Any) -> bool:
    """Whether two matrices with an even number of rows are multiplied along columns."""
    first, second = (x.aval.shape if hasattr(x, "aval") else x.shape for x in operands)
    return (
        numbers == (((0,), (0,)), ((), ()))
        and (len(first), len(second)) == (2, 2)
        and isinstance(first[0], int)  # no symbol, in an exported program
        and first[0] % 2 == 0
    )


def barrier(*xs: Any) -> Any:
    """Hides values from the compiler."""
    return lax.optimization_barrier(list(xs))


def _copied_barrier(first: Any) -> Any:
    """Hides an operand that is a transpose, and copied."""
    return barrier(copied(lax.transpose(first, (1, 0)), (1, 0), 0))


def copied(x: Any, order: Sequence[int], split: int) -> Any:
    """Returns an array with its dimensions in another order so that XLA:CPU copies it.

    A transpose alone, and a barrier behind it, become a view; one with a dimension that
    is `split`, which must be even, and put together again behind it, cannot.
    """
    before, size = x.shape[:split], x.shape[split]
    halves = lax.reshape(x, (*before, 2, size // 2, *x.shape[split + 1 :]))
    parts = [(d + (d > split),) if d != split else (d, d + 1) for d in order]
    moved = lax.transpose(halves, [d for part in parts for d in part])
    return lax.reshape(moved, [x.shape[d] for d in order])


def shielded(
    operands: Sequence[Any], numbers: Any, may_copy: bool
) -> tuple[list[Any], Any]:
    """Returns operands behind a barrier, and the dimension numbers of their product."""
    numbers, orders = batch_first(operands, numbers)
    values = [
        x if order is None else lax.transpose(x, order)
        for x, order in zip(operands, orders, strict=True)
    ]
    if not is_of_columns(values, numbers):
        return barrier(*values), numbers
    first, second = lax.transpose(values[0], (1, 0)), values[1]
    is_whole = may_copy and not _compat.lays_out(jax.typeof(first).sharding)
    (first,) = _copied_barrier(first) if is_whole else barrier(first)
    return [first, *barrier(second)], (((1,), (0,)), ((), ()))


def to_float32(x: Any) -> Any:
    """Rounds float32 to its own format, which is no rounding."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)


def _to_float32(x: Any) -> Any:
    return [to_float32(x)]


def _transposed(x: Any, *, order: tuple[int, ...]) -> Any:
    return [lax.transpose(x, order)]
