"""What passes ask of a program: half products, and what leads where, through calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jmp_rewrite import _compat
from jmp_rewrite._graph import FLOAT32, HALVES
from jmp_rewrite._passes.by_device import BY_DEVICE
from jmp_rewrite._passes.edit import Body
from jmp_rewrite._rules import CALLS, MAKES_DATA, MOVES_NUMBER, PRODUCTS

_FLOATS = HALVES | {FLOAT32}


def is_float32(atom: Any) -> bool:
    """Whether a variable or literal is a float32 array."""
    return getattr(atom.aval, "dtype", None) is FLOAT32


def is_half_product(eqn: Any, half: np.dtype) -> bool:
    """Whether an equation is a product of two half operands."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    return all(v.aval.dtype == half for v in eqn.invars[:2])


def is_widening(eqn: Any, half: np.dtype) -> bool:
    """Whether an equation casts half to float32."""
    if eqn is None or eqn.primitive.name != "convert_element_type":
        return False
    return eqn.invars[0].aval.dtype == half and is_float32(eqn.outvars[0])


def widened(body: Body, var: Any, half: np.dtype) -> list[Any]:
    """Returns the float32 copies of a half value."""
    readers = [body.eqns[at] for at, _ in body.reads(var) if at >= 0]
    return [eqn.outvars[0] for eqn in readers if is_widening(eqn, half)]


def is_float(atom: Any) -> bool:
    """Whether an atom is an array of float32 or half numbers."""
    return getattr(atom.aval, "dtype", None) in _FLOATS


def only_reader(body: Body, var: Any, device: str) -> tuple[int, Any] | None:
    """Returns the index of the equation that alone reads a value on a device, once.

    And the variable that it reads: a choice that the device has no part in is a copy.
    """
    while True:
        reads = [
            (index, position)
            for index, position in body.reads(var)
            if index < 0 or not _is_elsewhere(body.eqns[index], position, device)
        ]
        if len(reads) != 1 or reads[0][0] < 0:
            return None
        index, position = reads[0]
        eqn = body.eqns[index]
        if eqn.primitive is not BY_DEVICE or has_branch(eqn, device):
            return index, var
        var = eqn.outvars[position]


def _is_elsewhere(eqn: Any, position: int, device: str) -> bool:
    """Whether a choice reads an operand on other devices alone."""
    if eqn.primitive is not BY_DEVICE or has_branch(eqn, device):
        return False
    return position >= int(eqn.params["results"])


def has_branch(eqn: Any, device: str) -> bool:
    return any(device in b.where.devices for b in eqn.params["branches"])


def on_device(body: Body, var: Any, device: str) -> Any:
    """Returns what a value is a copy of where choices have no part for a device."""
    while (eqn := body.made_by(var, "by_device")) is not None:
        if has_branch(eqn, device):
            break
        var = eqn.invars[eqn.outvars.index(var)]
    return var


# ---- across the boundaries of jaxprs

_Call = tuple[Body, int]


def enters(body: Body, index: int, position: int) -> list[tuple[Body, int]]:
    """Returns the parameters that an operand of a call becomes inside."""
    eqn, held = body.eqns[index], body.held[index]
    name = eqn.primitive.name
    if name == "cond":
        return [(inner, position - 1) for inner in held] if position else []
    if name != "while":
        return [(held[0], position)]
    tests, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if position < tests:
        return [(held[0], position)]
    if position < tests + own:
        return [(held[1], position - tests)]
    carry = position - tests - own
    return [(held[0], tests + carry), (held[1], own + carry)]


def made_inside(body: Body, index: int, position: int) -> list[tuple[Body, Any]]:
    """Returns the results inside that become a result of a call."""
    held = body.held[index]
    if body.eqns[index].primitive.name == "while":
        held = held[1:]
    return [(inner, inner.outvars[position]) for inner in held]


def carried(eqn: Any) -> range:
    """Returns which operands of a loop are carries; of anything else, none."""
    if eqn.primitive.name == "scan":
        consts, carries = _compat.scan_split(eqn.params)
        return range(consts, consts + carries)
    if eqn.primitive.name == "while":
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(first, len(eqn.invars))
    return range(0)


def fed_by(body: Body, position: int, call: _Call) -> Iterator[tuple[Body, Any]]:
    """Yields what a parameter is at one call: its operand, and what is handed on."""
    caller, index = call
    eqn = caller.eqns[index]
    carries = carried(eqn)
    for operand, atom in enumerate(eqn.invars):
        if (body, position) in enters(caller, index, operand):
            yield caller, atom
            if operand in carries:
                yield from made_inside(caller, index, operand - carries[0])


def given(
    body: Body, var: Any, *, whole: bool = False, calls: tuple[_Call, ...] = ()
) -> list[tuple[Body, Any]]:
    """Returns a parameter's operand at each call; nothing if it is a carry.

    An argument of the program is none either.

    Args:
      body: the jaxpr.
      var: the parameter.
      whole: whether to return nothing if it is a part of an operand: what a scan reads
        of its `xs` in each iteration, or a device of what is split among several.
      calls: those that were entered on the way here: the last one is left, and none of
        the others that hold the same jaxpr.
    """
    found = []
    for caller, index in calls[-1:] or tuple(dict.fromkeys(body.calls)):
        eqn = caller.eqns[index]
        carries = carried(eqn)
        for operand, atom in enumerate(eqn.invars):
            if (body, body.parameter.get(var)) in enters(caller, index, operand):
                if operand in carries or (whole and not _is_whole(atom, var)):
                    return []
                found.append((caller, atom))
    return found


def _is_whole(outside: Any, inside: Any) -> bool:
    """Whether a value is the same on both sides of a boundary, and not a part."""
    return bool(outside.aval.shape == inside.aval.shape)


def is_call(eqn: Any) -> bool:
    """Whether an equation calls one jaxpr once."""
    return eqn.primitive.name in CALLS


def feeding(
    starts: Iterable[tuple[Body, Any]],
    through: Callable[[Body, int], bool] = lambda body, index: True,
) -> set[tuple[Body, Any]]:
    """Returns the float values that lead to these, and these, through calls and loops.

    Args:
      starts: variables, with the bodies that they stand in.
      through: whether an equation without a jaxpr is followed from its results to its
        operands.
    """
    # With the calls that were entered: one is left where it was entered.
    found: dict[tuple[Body, tuple[_Call, ...]], set[Any]] = {}
    stack: list[tuple[Body, Any, tuple[_Call, ...]]] = [(b, v, ()) for b, v in starts]
    while stack:
        body, start, calls = stack.pop()
        seen, left = found.setdefault((body, calls), set()), [start]
        while left:
            var = left.pop()
            if hasattr(var, "val") or var in seen or not is_float(var):
                continue
            seen.add(var)
            index = body.maker.get(var, -1)
            if index < 0:
                stack += _outside(body, var, calls)
                continue
            eqn = body.eqns[index]
            if index in body.held:
                stack += _inside(body, index, var, calls)
            elif eqn.primitive is BY_DEVICE:
                left.append(eqn.invars[eqn.outvars.index(var)])
            elif through(body, index):
                left += eqn.invars
    return {(body, var) for (body, _), seen in found.items() for var in seen}


def is_no_product(body: Body, index: int) -> bool:
    """Whether an equation is no matrix multiplication, which ends what is followed."""
    return body.eqns[index].primitive.name not in PRODUCTS


def _outside(
    body: Body, var: Any, calls: tuple[_Call, ...]
) -> Iterator[tuple[Body, Any, tuple[_Call, ...]]]:
    """Yields what a parameter is at the call that was entered, or else at all."""
    if var in body.parameter:
        for call in calls[-1:] or tuple(dict.fromkeys(body.calls)):
            for place, atom in fed_by(body, body.parameter[var], call):
                inside = place is not call[0]
                yield place, atom, calls if inside else calls[:-1]


def _inside(
    body: Body, index: int, var: Any, calls: tuple[_Call, ...]
) -> Iterator[tuple[Body, Any, tuple[_Call, ...]]]:
    """Yields what becomes a result of an equation that holds jaxprs."""
    eqn = body.eqns[index]
    position = eqn.outvars.index(var)
    for inner, result in made_inside(body, index, position):
        yield inner, result, (*calls, (body, index))
    if carries := carried(eqn)[position : position + 1]:
        yield body, eqn.invars[carries[0]], calls


def makers(
    body: Body, atom: Any, *, whole: bool = False, calls: tuple[_Call, ...] = ()
) -> list[tuple[Body, int]]:
    """Returns the equations that make a value, seen through calls.

    An index of -1 stands for what no equation makes: a number, an argument of the
    program, or a carry.

    Args:
      body: the jaxpr.
      atom: the value.
      whole: whether what makes an array of which the value is a part is none (see
        `given`), nor what makes a part of the value: for those who ask for dimensions.
      calls: those that were entered on the way to the value.
    """
    if hasattr(atom, "val"):
        return [(body, -1)]
    index = body.maker.get(atom, -1)
    if index >= 0:
        eqn = body.eqns[index]
        if not is_call(eqn):
            return [(body, index)]
        position = eqn.outvars.index(atom)
        (inner, made), *_ = made_inside(body, index, position)
        if whole and not _is_whole(atom, made):
            return [(body, -1)]
        return makers(inner, made, whole=whole, calls=(*calls, (body, index)))
    found = [
        place
        for source in given(body, atom, whole=whole, calls=calls)
        for place in makers(*source, whole=whole, calls=calls[:-1])
    ]
    return found or [(body, -1)]


def uses(body: Body, var: Any) -> Iterator[tuple[Body, int, int]]:
    """Yields where a value is read: (body, index, position), seen through calls.

    An index of -1 stands for a result of the program, of a loop or of a branch. A loop
    reads its carries itself; what it is given beside them is read inside.
    """
    for index, position in body.reads(var):
        if index < 0:
            yield from _returned(body, position)
        elif index in body.held and position not in carried(body.eqns[index]):
            for inner, parameter in enters(body, index, position):
                yield from uses(inner, inner.invars[parameter])
        else:
            yield body, index, position


def _returned(body: Body, position: int) -> Iterator[tuple[Body, int, int]]:
    calls = dict.fromkeys(body.calls)
    if not calls:
        yield body, -1, position
    for caller, index in calls:
        eqn = caller.eqns[index]
        if is_call(eqn):
            yield from uses(caller, eqn.outvars[position])
        else:
            yield body, -1, position


def number_of(body: Body, atom: Any, calls: tuple[_Call, ...] = ()) -> Any:
    """Returns the number that all elements are, before any cast; through calls.

    Args:
      body: the jaxpr.
      atom: the value.
      calls: those that were entered on the way to it.
    """
    while not hasattr(atom, "val"):
        index = body.maker.get(atom, -1)
        if index < 0:
            sources = given(body, atom, calls=calls)
            found = {number_of(*source, calls[:-1]) for source in sources}
            return found.pop() if len(found) == 1 else None
        eqn = body.eqns[index]
        if is_call(eqn):
            position = eqn.outvars.index(atom)
            calls = *calls, (body, index)
            ((body, atom),) = made_inside(body, index, position)
        elif eqn.primitive.name in MOVES_NUMBER:
            (atom,) = eqn.invars
        else:
            return None
    return None if np.ndim(atom.val) else np.asarray(atom.val).item()


def depends_on_inputs(body: Body, atom: Any) -> bool:
    """Whether a value comes from more than integers, literals and constants."""
    return not hasattr(atom, "val") and atom in _data(body)


def _data(body: Body) -> set[Any]:
    """Returns the float values of a body that depend on inputs."""
    if body.data is None:
        body.data = {v for v in body.invars if _is_data(body, v)}
        for index, eqn in enumerate(body.eqns):
            if (
                index in body.held
                or eqn.primitive.name in MAKES_DATA
                or any([v in body.data for v in eqn.invars if not hasattr(v, "val")])
            ):
                body.data.update([v for v in eqn.outvars if is_float(v)])
    return body.data


def _is_data(body: Body, var: Any) -> bool:
    sources = given(body, var)
    return is_float(var) and (
        not sources or any(depends_on_inputs(*source) for source in sources)
    )
