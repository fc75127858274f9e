"""How often a loop of a compiled program runs its body, where its text proves that.

What the condition reads is computed as the program computes it, iteration by iteration:
a counter and its step, whatever it starts at, but nothing that depends on arrays.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jmp_rewrite._cost.hlo import Instruction

# Iterations that are computed one by one: more would take seconds.
_MOST = 2 * 10**4
# After so many of them a counter of whole numbers that has kept its step keeps it.
_ENOUGH = 100

# Integers of a program are smaller.
_LARGEST = 2**64

_NUMBERS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_COMPARE = {
    "EQ": operator.eq,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "NE": operator.ne,
}
_COMPUTE = {
    "add": operator.add,
    "and": operator.and_,
    "multiply": operator.mul,
    "or": operator.or_,
    "subtract": operator.sub,
}
_SAME = frozenset({"bitcast", "copy", "copy-done", "copy-start"})

Computations = Mapping[str, Mapping[str, "Instruction"]]
# Returns an element of a parameter, by their numbers; None for all of it.
Given = Callable[[int, int | None], Any]


class _UnknownError(Exception):
    """Raised for what the text does not say."""


def count(computations: Computations, home: str, loop: Instruction) -> int | None:
    """Returns how often a loop runs its body; None where that is not known.

    Args:
      computations: of the program.
      home: the name of the one that the loop stands in.
      loop: a `while`.
    """
    found = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", loop.attributes)
    if found is None:
        return None
    try:
        with np.errstate(all="ignore"):
            return _count(computations, home, loop, found[1], found[2])
    except _UnknownError:
        return None


def _count(
    computations: Computations, home: str, loop: Instruction, condition: str, body: str
) -> int:
    carried: dict[int, Any] = {}

    def nothing(number: int, index: int | None) -> Any:
        raise _UnknownError

    def state(number: int, index: int | None) -> Any:
        if index is None:
            raise _UnknownError
        if index not in carried:  # in the first iteration
            start = loop.operands[0]
            carried[index] = _value(computations, home, start, nothing, index)
        return carried[index]

    steps: dict[int, Any] = {}
    for trips in range(_MOST):
        if not _value(computations, condition, None, state):
            return trips
        if trips >= _ENOUGH and steps and all(type(s) is int for s in steps.values()):
            break
        following: dict[int, Any] = {}
        while missing := carried.keys() - following.keys():
            for index in missing:
                following[index] = _value(computations, body, None, state, index)
        if following == carried:
            raise _UnknownError  # it never ends
        new = {i: x - carried[i] for i, x in following.items()}
        steps = new if trips == 0 or new == steps else {}
        carried.update(following)
    else:
        return _MOST
    start = dict(carried)

    def goes_on(more: int) -> bool:
        carried.update({i: start[i] + more * s for i, s in steps.items()})
        return bool(_value(computations, condition, None, state))

    return trips + _first_end(goes_on)


def _first_end(goes_on: Callable[[int], bool]) -> int:
    """Returns the first number for which a condition fails that fails for all after."""
    end = 1
    while goes_on(end):
        end *= 2
        if end > _LARGEST:
            raise _UnknownError
    low, high = end // 2, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return high


def _value(
    computations: Computations,
    home: str,
    name: str | None,
    given: Given,
    index: int | None = None,
) -> Any:
    """Computes a number.

    Args:
      computations: of the program.
      home: the one that it is computed in.
      name: of the instruction; None for the root.
      given: the parameters.
      index: of the element, where the instruction makes a tuple.
    """
    inside = computations[home]
    i = inside[name] if name else next(x for x in inside.values() if x.root)

    def of(name: str, index: int | None = None) -> Any:
        return _value(computations, home, name, given, index)

    if i.opcode == "parameter":
        return given(i.number, index)
    if i.opcode == "constant":
        return _constant(i)
    if i.opcode == "get-tuple-element":
        return of(i.operands[0], int(i.attributes.split("index=")[1].split(",")[0]))
    if i.opcode == "tuple" and index is not None:
        return of(i.operands[index])
    if i.opcode in _SAME:
        return of(i.operands[0], index)
    if i.opcode == "fusion" and (fused := i.fused):
        operands = i.operands
        return _value(computations, fused, None, lambda n, k: of(operands[n], k), index)
    if i.opcode in _COMPUTE:
        return _COMPUTE[i.opcode](*map(of, i.operands))
    direction = re.search(r"direction=(\w+)", i.attributes)
    if i.opcode == "compare" and direction:
        return _COMPARE[direction[1]](*map(of, i.operands))
    raise _UnknownError


def _constant(i: Instruction) -> Any:
    dtype = i.arrays[0].dtype
    if i.arrays[0].shape:
        raise _UnknownError
    if dtype == "pred":
        return i.literal == "true"
    if dtype[0] in "su" and dtype[1:].isdecimal():
        return int(i.literal)
    if dtype in _NUMBERS:
        return _NUMBERS[dtype](i.literal)
    raise _UnknownError
