"""Matrix multiplications of bfloat16, as XLA:CPU is fast at them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._passes import cpu_shield
from jmp_rewrite._passes.by_device import CPU, Where
from jmp_rewrite._passes.edit import Editor
from jmp_rewrite._passes.match import FLOAT32, is_float32, is_half_product

# XLA:CPU is slow at products that it rounds itself.
_ROUNDS_SLOWLY = jax.__version_info__ < (0, 11)


def cpu_products(editor: Editor) -> None:
    """A CPU multiplies in an order for which it has a fast bfloat16 kernel.

    XLA:CPU has bfloat16 kernels for products that contract the rows of their first
    operand. It folds a transpose of the last two dimensions into a product and computes
    the result number by number, as the gradients of an attention's keys and values are
    (JAX 0.10.2 to 0.12.0; 96 of 256 x 256 x 64, two cores: 20 GFLOP/s for 500; float32
    100). If the second operand's dimensions have to be moved as well, JAX 0.12 even
    adds up in bfloat16: over 512 numbers the error is 2.4 % instead of 0.17 %. In JAX
    0.10 its fast kernels are for float32 results alone: 240 GFLOP/s on two cores, 1100
    with a result that is rounded behind the product.

    On CPUs, for bfloat16; half results in whole train steps alone.

    Gain: GPT-2 small on a CPU with AVX512-BF16, see `benchmarks/results`.
    """
    if editor.half.name != "bfloat16":
        return
    for body, _, eqn in editor.find("dot_general"):
        (out,) = eqn.outvars
        numbers = eqn.params["dimension_numbers"]
        is_full = is_float32(out)
        if not is_half_product(eqn, editor.half) or editor.was_here(body, out):
            continue
        if not is_full and (not editor.whole_step or out.aval.dtype != editor.half):
            continue
        avals = [v.aval for v in eqn.invars]
        if is_full and cpu_shield.is_of_columns(eqn.invars, numbers):
            continue
        rounds = _ROUNDS_SLOWLY and not is_full
        columns = _contracts_columns(avals, numbers, batch_first=is_full or rounds)
        rows = _by_rows(avals, numbers) if columns else None
        if rows is None and (is_full or not (rounds or columns)):
            continue
        branches = {Where((CPU,)): _shielded}
        if rows is not None:
            branches = {Where((CPU,), "whole arrays"): _rows_contracted, **branches}
        elif cpu_shield.is_of_columns(eqn.invars, numbers):
            branches = {Where((CPU,), "whole arrays"): _copied, **branches}
        editor.choose_instead(
            body, out, eqn.invars, branches, rows=rows, params=tuple(eqn.params.items())
        )


def _rows_contracted(
    stored: Any, first: Any, second: Any, *, rows: _Rows, params: Any
) -> Any:
    dtype = FLOAT32 if _ROUNDS_SLOWLY else stored.dtype
    product = _contract_rows((first, second), dict(params), rows, dtype)
    return [lax.convert_element_type(product, stored.dtype)]


def _shielded(stored: Any, first: Any, second: Any, *, rows: Any, params: Any) -> Any:
    return _behind_barrier(stored, (first, second), dict(params), may_copy=False)


def _copied(stored: Any, first: Any, second: Any, *, rows: Any, params: Any) -> Any:
    return _behind_barrier(stored, (first, second), dict(params), may_copy=True)


def _behind_barrier(
    stored: Any, operands: Sequence[Any], params: dict[str, Any], may_copy: bool
) -> Any:
    numbers = params["dimension_numbers"]
    operands, numbers = cpu_shield.shielded(operands, numbers, may_copy)
    params |= {"dimension_numbers": numbers, "preferred_element_type": FLOAT32}
    product = _unfolded(lax.dot_general(*operands, **params))
    return [lax.convert_element_type(product, stored.dtype)]


class _Rows(NamedTuple):
    """How a product that contracts the columns of its first operand contracts rows.

    Attributes:
      swapped: whether the second operand comes first, and the result is transposed.
      order: the first one's dimensions, in the order mapped, free, contracted.
      split: the one of them that is split to copy it; None if none has to be moved.
    """

    swapped: bool
    order: tuple[int, ...]
    split: int | None


def _contracts_columns(
    operands: Sequence[Any], dimension_numbers: Any, batch_first: bool
) -> bool:
    """Whether a product contracts the columns of its first operand.

    Args:
      operands: the types of the operands.
      dimension_numbers: of the product.
      batch_first: whether mapped dimensions are moved to the front. Where XLA does
        that, it makes a copy, in the order that is fast.
    """
    (contracted, _), (mapped, _) = dimension_numbers
    free = [
        [d for d in range(x.ndim) if d not in (*dims, *front)]
        for x, dims, front in zip(operands, *dimension_numbers, strict=True)
    ]
    for x, dims in zip(operands, free, strict=True):
        if all(x.shape[d] == 1 for d in dims):
            return False  # a vector
    leads = batch_first or tuple(mapped) == tuple(range(len(mapped)))
    return leads and len(contracted) == len(free[0]) == 1 and contracted[0] < free[0][0]


def _by_rows(operands: Sequence[Any], dimension_numbers: Any) -> _Rows | None:
    """Finds how such a product contracts rows; None if nothing can be copied.

    What is moved is the smaller operand, or the result.
    """
    if not all(isinstance(d, int) for x in operands for d in x.shape):
        return None  # symbols, in an exported program
    if any(_compat.lays_out(x.sharding) for x in operands):
        return None  # a dimension that is sharded in the type cannot be split
    orders, moves = [], []
    for x, contracted, mapped in zip(operands, *dimension_numbers, strict=True):
        rest = [d for d in range(x.ndim) if d not in mapped]
        free = [d for d in rest if d not in contracted]
        orders.append((*mapped, *free, *contracted))
        moves.append(rest != [*free, *contracted])
    mapped, (first, second) = len(dimension_numbers[1][0]), operands
    columns = math.prod(second.shape[d] for d in orders[1][mapped:-1])
    result = math.prod(first.shape[d] for d in orders[0][:-1]) * columns
    swapped = result + moves[1] * second.size < first.size
    order, x = orders[swapped], operands[swapped]
    if not moves[swapped]:
        return _Rows(swapped, order, None)
    even = [d for d in order[mapped:] if x.shape[d] % 2 == 0]
    return _Rows(swapped, order, even[-1]) if even else None


def _contract_rows(
    operands: Sequence[Any], params: dict[str, Any], how: _Rows, dtype: Any
) -> Any:
    """Computes a product of bfloat16 operands by rows of its first one, on a CPU."""
    contracted, mapped = params["dimension_numbers"]
    if how.swapped:
        operands, contracted, mapped = operands[::-1], contracted[::-1], mapped[::-1]
    head, tail = operands
    batch, rows = len(mapped[0]), head.ndim - len(contracted[0])
    if how.split is not None:
        head = cpu_shield.copied(head, how.order, how.split)
        contracted = (tuple(range(rows, head.ndim)), contracted[1])
        mapped = (tuple(range(batch)), mapped[1])
    numbers, orders = cpu_shield.batch_first([head, tail], (contracted, mapped))
    operands = [
        x if order is None else lax.transpose(x, order)
        for x, order in zip([head, tail], orders, strict=True)
    ]
    operands = cpu_shield.barrier(*operands)
    params |= {"dimension_numbers": numbers, "preferred_element_type": dtype}
    out = _unfolded(lax.dot_general(*operands, **params))
    if not how.swapped:
        return out
    order = (*range(batch), *range(rows, out.ndim), *range(batch, rows))
    return lax.transpose(out, order)


def _unfolded(out: Any) -> Any:
    """Returns a product's result so that XLA:CPU folds nothing into the product."""
    if out.dtype == np.float32:
        return cpu_shield.to_float32(out)
    return lax.optimization_barrier(out)
