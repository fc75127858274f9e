"""Integers that are distinct along a dimension, and updates that therefore never meet.

The gradient of `x[order]` is a `scatter-add`. Where `order` is a permutation it adds
nothing up: it moves values, and what moves values has no precision of its own.

What is known of an integer array is a set of its dimensions. Along each of them its
numbers are distinct, whatever the other coordinates are, and none is negative. If
`ROWS` is among them, that holds of whole rows: of numbers that were joined along the
last dimension, as an index has its coordinates, of which some may be equal or negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

NOWHERE: frozenset[int] = frozenset()
ROWS = -1
# Longer constants are not looked at: an index of 2**16 numbers takes 1 ms to sort.
LARGEST_INDEX = 2**16

# These move single numbers, and leave dimensions where they were.
_IN_PLACE = frozenset({"copy", "optimization_barrier", "rev", "select_n"})
# And these leave some out: of a row, too.
_CUTS = frozenset({"dynamic_slice", "slice"})


def distinct_along(eqn: Any, known: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Returns the dimensions along which the integers of each result are distinct.

    Args:
      eqn: any equation; of a `select_n`, the case is known.
      known: the same of its operands; of a `select_n`, of its case alone.
    """
    name = eqn.primitive.name
    if name == "top_k":
        return [NOWHERE, frozenset({eqn.params["axis"]})]
    if name == "sort":
        return [_sorted(eqn, k) for k in known]
    if len(eqn.outvars) == 1:
        return [_of_result(eqn, known)]
    return [NOWHERE] * len(eqn.outvars)


def _of_result(eqn: Any, known: Sequence[frozenset[int]]) -> frozenset[int]:
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return frozenset({params["dimension"]}) if counts_up(eqn) else NOWHERE
    if not any(known):
        return NOWHERE
    if name in _IN_PLACE:
        return known[0]
    if name == "concatenate":
        joined = params["dimension"]
        is_last = joined == eqn.outvars[0].aval.ndim - 1
        found = NOWHERE.union(*known) - {joined, ROWS}
        return found | {ROWS} if is_last and found else NOWHERE
    if name == "convert_element_type":
        return known[0] if is_as_wide(eqn) else NOWHERE
    if ROWS in known[0]:
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        keeps = name in _CUTS and before[-1] == after[-1]
        return known[0] if keeps else NOWHERE
    if name in _CUTS:
        return known[0]
    if name == "broadcast_in_dim":
        dims, before = params["broadcast_dimensions"], eqn.invars[0].aval.shape
        kept = (d for d in known[0] if params["shape"][dims[d]] == before[d])
        return frozenset(dims[d] for d in kept)
    if name in ("reshape", "squeeze"):
        return _without_ones(eqn, known[0])
    return NOWHERE


def _sorted(eqn: Any, known: frozenset[int]) -> frozenset[int]:
    """A sort permutes along its dimension.

    Unless that is the last one, it takes apart rows that are joined along the last one.
    """
    last = eqn.outvars[0].aval.ndim - 1
    return known & {last} if eqn.params["dimension"] == last else NOWHERE


def folded_index(
    eqn: Any, constants: Sequence[Any], known: Sequence[frozenset[int]]
) -> Any:
    """Returns the number or the numbers that a result is, if they are known.

    It follows what JAX writes in front of a gather: negative numbers count from the
    end, and the coordinates are joined.

    Args:
      eqn: any equation.
      constants: the numbers that each operand is, None if unknown.
      known: dimensions along which its integers are distinct.
    """
    name = eqn.primitive.name
    if name == "lt" and constants[1] is not None:
        first, other = constants
        if not other.ndim and other == 0:
            if first is None:
                is_never = bool(known[0]) and ROWS not in known[0]
            else:
                is_never = not (first < 0).any()
            return np.asarray(False) if is_never else None
    if name == "select_n":
        which, *cases = constants
        is_known = which is not None and which.size and (which == which.flat[0]).all()
        return cases[int(which.flat[0])] if is_known else None
    if any(c is None or not c.ndim for c in constants):
        return None
    if name == "concatenate":
        return np.concatenate(constants, eqn.params["dimension"])
    if name == "broadcast_in_dim" and eqn.outvars[0].aval.size == constants[0].size:
        return constants[0].reshape(eqn.outvars[0].aval.shape)
    return None


def updates_are_disjoint(eqn: Any, known: frozenset[int], constant: Any) -> bool:
    """Whether a `scatter-add` adds at most one update to each place.

    Args:
      eqn: the equation.
      known: dimensions along which its indices are distinct.
      constant: its indices, if they are known; else None.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    _, indices, _ = eqn.invars
    batching = set(numbers.scatter_indices_batching_dims)
    shape = indices.aval.shape[:-1]
    several = {d for d, n in enumerate(shape) if n != 1 and d not in batching}
    if math.prod(shape[d] for d in several) == 1 or params["unique_indices"]:
        return True
    are_points = set(numbers.scatter_dims_to_operand_dims) <= set(
        numbers.inserted_window_dims
    )
    if not are_points or params["mode"] is lax.GatherScatterMode.CLIP:
        return False
    if np.ndim(constant) == 2 and not batching and (constant >= 0).all():
        return len(np.unique(constant, axis=0)) == len(constant)
    return len(several) == 1 and several <= known


def windows_are_disjoint(eqn: Any, made_by: Mapping[Any, Any]) -> bool:
    """Whether a `reduce_window_sum` finds at most one element in each window.

    So it is with the gradient of an average over windows that do not overlap: between
    its elements stand zeros, as far as a window reaches.

    Args:
      eqn: the equation.
      made_by: result -> the equation that makes it, in the jaxpr that it stands in.
    """
    params = eqn.params
    steps = list(params["base_dilation"])
    operand = eqn.invars[0]
    padded = None if hasattr(operand, "val") else made_by.get(operand)
    if padded is not None and padded.primitive.name == "pad":
        filler = padded.invars[1]
        if hasattr(filler, "val") and not np.any(filler.val):
            inner = [between + 1 for _, _, between in padded.params["padding_config"]]
            steps = [a * b for a, b in zip(steps, inner, strict=True)]
    reach = zip(params["window_dimensions"], params["window_dilation"], strict=True)
    sizes = [(size - 1) * dilation + 1 for size, dilation in reach]
    return all(size <= step for size, step in zip(sizes, steps, strict=True))


def sets_elements(eqn: Any, made_by: Mapping[Any, Any]) -> bool:
    """Whether a `scatter-add` is what JAX makes of a differentiated `x.at[i].set(y)`.

    Which of two updates of one place is kept, nobody knows. So JAX numbers the updates,
    scatters the numbers and gathers them again. An update that finds its own number is
    kept, the others become zeros, and so does `x` wherever there is a number: nothing
    is added up.

    Args:
      eqn: the equation.
      made_by: result -> the equation that makes it, in the jaxpr that it stands in.
    """

    def maker(atom: Any, name: str) -> Any:
        found = None if hasattr(atom, "val") else made_by.get(atom)
        return found if found is not None and found.primitive.name == name else None

    def is_zero(atom: Any) -> bool:
        filled = maker(atom, "broadcast_in_dim")
        atom = atom if filled is None else filled.invars[0]
        return hasattr(atom, "val") and not np.any(atom.val)

    def picked(atom: Any) -> Any:
        """The comparison that zeros take the place of a value where it fails."""
        select = maker(atom, "select_n")
        if select is None or len(select.invars) != 3 or not is_zero(select.invars[1]):
            return None
        return maker(select.invars[0], "eq")

    operand, indices, updates = eqn.invars
    kept = picked(updates)
    found = None if kept is None else maker(kept.invars[1], "gather")
    if found is None or found.invars[1] is not indices:
        return False
    numbered = maker(found.invars[0], "scatter")
    numbers = kept.invars[0]
    if numbered is None or any(
        a is not b for a, b in zip(numbered.invars[1:], (indices, numbers), strict=True)
    ):
        return False
    if not _counts(numbers, made_by) or not is_zero(numbered.invars[0]):
        return False
    free = picked(operand)
    return is_zero(operand) or (
        free is not None
        and free.invars[0] is numbered.outvars[0]
        and is_zero(free.invars[1])
    )


def _counts(atom: Any, made_by: Mapping[Any, Any]) -> bool:
    """Whether integers are 1, 2, 3, ..., maybe repeated along new dimensions."""
    plus_one = made_by.get(atom)
    if plus_one is None or plus_one.primitive.name != "add":
        return False
    atom, one = plus_one.invars
    filled = one if hasattr(one, "val") else made_by.get(one)
    number = filled if hasattr(filled, "val") else filled and filled.invars[0]
    if getattr(number, "val", None) != 1:
        return False
    while (made := made_by.get(atom)) is not None:
        if made.primitive.name == "iota":
            return True
        if made.primitive.name not in ("broadcast_in_dim", "reshape"):
            return False
        atom = made.invars[0]
    return False


def counts_up(eqn: Any) -> bool:
    """Whether an `iota` is 0, 1, 2, ..., and its integers are as long as it takes."""
    aval = eqn.outvars[0].aval
    if aval.dtype.kind not in "iu":
        return False
    size = aval.shape[eqn.params["dimension"]]
    if not isinstance(size, int):  # a symbol
        return bool(aval.dtype.itemsize >= 4)
    return bool(size - 1 <= np.iinfo(aval.dtype).max)


def is_as_wide(eqn: Any) -> bool:
    """Whether integers are cast to such as can hold them."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return old.kind in "iu" and new.kind in "iu" and new.itemsize >= old.itemsize


def _without_ones(eqn: Any, known: frozenset[int]) -> frozenset[int]:
    """Follows dimensions where only some of size 1 come or go."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    old = [d for d, n in enumerate(before) if n != 1]
    new = [d for d, n in enumerate(after) if n != 1]
    if [before[d] for d in old] != [after[d] for d in new]:
        return NOWHERE
    return frozenset(n for o, n in zip(old, new, strict=True) if o in known)
