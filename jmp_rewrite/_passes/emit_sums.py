"""How what a scan adds up is emitted behind it: products of the stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmp_rewrite import _compat
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._graph.nodes import Inner
from jmp_rewrite._passes import on_device
from jmp_rewrite._passes.sums import Sums


def behind(
    e: Emitter, inner: Inner, sums: Sums, cells: list[Cell], stacked: list[Cell]
) -> dict[int, Cell]:
    """Emits what a scan leaves to be computed behind it.

    Args:
      e: the emitter.
      inner: what the scan holds.
      sums: what of it is left.
      cells: the scan's operands.
      stacked: what it has stacked for these.

    Returns:
      The results that it no longer has, by position.
    """
    (use,) = inner.bodies
    body = _compat.open_jaxpr(use.jaxpr)
    consts = [Cell(c) for c in _compat.constants(use.jaxpr)]
    env = dict(zip([*body.constvars, *body.invars], consts + cells, strict=True))
    env.update(zip(sums.stacks, stacked, strict=True))
    stacks = {v: e.read_half(env[s]) for v, s in sums.stack_of.items()}
    env.update((v, Cell(x)) for v, x in stacks.items())
    merged: dict[tuple[Any, int], Cell] = {}
    for index in sorted(sums.equations):
        eqn = body.eqns[index]
        values = {v: env[v] for v in eqn.invars}
        if eqn.primitive.name == "dot_general":
            _product(e, use, index, values, sums.stack_of, merged)
        else:
            over = _sum(eqn) if eqn.primitive.name == "reduce_sum" else eqn
            e.equations(use, [(index, over)], values)
        env.update((v, values[v]) for v in eqn.outvars)
    joints = [*inner.carry_in, *inner.stacks]
    results = {}
    for position in (*sums.carries, *sums.results):
        var = body.outvars[position]
        value = e.to_joint(env[var], joints[position], var.aval)
        results[position] = Cell(value)
    return results


def _sum(eqn: Any) -> Any:
    """Returns a sum over the iterations as well."""
    axes = (0, *(a + 1 for a in eqn.params["axes"]))
    return eqn.replace(params=dict(eqn.params, axes=axes))


def _product(
    e: Emitter,
    use: Any,
    index: int,
    values: dict[Any, Cell],
    stack_of: Mapping[Any, Any],
    merged: dict[tuple[Any, int], Cell],
) -> None:
    """Emits a product of stacks, or of a stack and what is the same everywhere.

    Args:
      e: the emitter.
      use: the body.
      index: of the product in there.
      values: its operands; its result is added.
      stack_of: what has the iterations as its first dimension -> its stack.
      merged: stacks whose first dimensions are one, which are added.
    """
    eqn = _compat.open_jaxpr(use.jaxpr).eqns[index]
    on = [v in stack_of for v in eqn.invars]
    numbers = eqn.params["dimension_numbers"]
    contracted, batch = (
        tuple(tuple(d + by for d in dims) for dims, by in zip(side, on, strict=True))
        for side in numbers
    )
    if all(on):
        contracted = tuple((0, *dims) for dims in contracted)
        # As matrices, or XLA:TPU lays out the stacks for the product alone, and slices
        # of them are spread over all of memory in the forward pass.
        count = len(contracted[0])
        first = tuple(range(count))
        leading = contracted == (first, first) and batch == ((), ())
        if leading and all(map(_may_merge, values.values())):
            contracted = ((0,), (0,))
            for var, cell in values.items():
                key = stack_of[var], count
                if key not in merged:
                    x = cell.value.reshape(-1, *cell.value.shape[count:])
                    merged[key] = Cell(on_device.apart(x))
                values[var] = merged[key]
    params = dict(eqn.params, dimension_numbers=(contracted, batch))
    e.equations(use, [(index, eqn.replace(params=params))], values)
    if not all(on):
        (var,) = eqn.outvars
        rows = eqn.invars[0].aval.ndim - len(contracted[0]) - len(batch[0])
        axis = len(batch[0]) + (0 if on[0] else rows)
        values[var] = Cell(jnp.moveaxis(values[var].value, axis, 0))


def _may_merge(cell: Cell) -> bool:
    """Tells an array of which no dimension is sharded in the type."""
    return all(axis is None for axis in jax.typeof(cell.value).sharding.spec)
