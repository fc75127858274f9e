"""Which buffers are alive at the peak of a compiled program, from its schedule.

The compiler's own buffer assignment is not handed out, so it is worked out from the
text, which is in execution order: a buffer is alive from the kernel that writes it to
the last one that reads it. Arguments and results are not counted (XLA counts them
apart), nor what a TPU keeps on its chip.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from jmp_rewrite._cost.hlo import (
    BOOKKEEPING,
    RUNS,
    UPDATES,
    Array,
    Instruction,
    Module,
    in_place,
)

# A result of these is the operand's own buffer.
_VIEWS = BOOKKEEPING - {"constant", "parameter"}


class Buffer(NamedTuple):
    """An array in memory and the instruction that makes it."""

    array: Array
    instruction: Instruction


class Peak(NamedTuple):
    """The moment at which most memory is held."""

    bytes: float
    buffers: list[Buffer]
    at: str


def peak(module: Module, computation: str | None = None) -> Peak:
    """Finds the peak of a computation's own buffers."""
    body = list(module.computations[computation or module.entry].values())
    owners = _owners(body, module)
    last = {}
    for time, i in enumerate(body):
        for owner in _read(i, owners, body):
            last[owner] = time
    kept = {o for i in body if i.root for o in owners[i.name]}
    best = _NOTHING
    alive: dict[tuple[str, int], Buffer] = {}
    for time, i in enumerate(body):
        runs = i.called if i.opcode in RUNS else []  # one of them at a time
        inner = max((peak(module, c) for c in runs), key=_bytes, default=_NOTHING)
        for n, array in enumerate(i.arrays):
            key = (i.name, n)
            if key in owners[i.name] and key not in kept and not array.on_chip:
                if i.opcode not in ("parameter", "constant"):
                    alive[key] = Buffer(array, i)
        held = [*alive.values(), *inner.buffers]
        size = sum(b.array.padded for b in held)
        if size > best.bytes:
            best = Peak(size, held, i.name)
        for key in [k for k in alive if last.get(k, time) <= time]:
            del alive[key]
    return best


_NOTHING = Peak(0, [], "")
_bytes = operator.attrgetter("bytes")


def _owners(
    body: list[Instruction], module: Module
) -> dict[str, list[tuple[str, int]]]:
    """For each instruction the buffers that its results are."""
    owners: dict[str, list[tuple[str, int]]] = {}
    for i in body:
        operands = [owners.get(o, []) for o in i.operands]
        if i.opcode == "get-tuple-element":
            index = int(i.attributes.split("index=")[1].split(",")[0])
            owners[i.name] = operands[0][index : index + 1]
        elif i.opcode in _VIEWS or i.opcode == "while":
            owners[i.name] = [o for operand in operands for o in operand]
        elif i.opcode.endswith("-done"):
            start = operands[0]
            owners[i.name] = start[1 : 1 + len(i.arrays)] or start
        elif i.opcode == "copy-start":
            owners[i.name] = [operands[0][0], (i.name, 0)]
        elif i.opcode.endswith("-start"):
            given = sum(len(o) for o in operands)
            owners[i.name] = [(i.name, n) for n in range(given, len(i.arrays))]
            owners[i.name].insert(
                0, operands[0][0] if operands and operands[0] else (i.name, 0)
            )
        else:
            owners[i.name] = [(i.name, n) for n in range(len(i.arrays))]
            for n, operand in _changed(i, module):
                owners[i.name][n : n + 1] = owners.get(i.operands[operand], [])[:1]
    return owners


def _changed(i: Instruction, module: Module) -> list[tuple[int, int]]:
    """Pairs of a result and the operand that it changes in place."""
    if i.opcode in UPDATES:
        return [(0, 0)]
    if i.opcode != "fusion" or i.fused not in module.computations:
        return []
    inside = module.computations[i.fused]
    root = next(x for x in inside.values() if x.root)
    roots = [inside[o] for o in root.operands] if root.opcode == "tuple" else [root]
    found = []
    for n, result in enumerate(roots):
        update = in_place(result, inside)
        while update is not None and update.opcode in (*UPDATES, "bitcast"):
            update = inside[update.operands[0]]
        if update is not None and update.opcode == "parameter":
            found.append((n, update.number))
    return found


def _read(
    i: Instruction, owners: dict[str, list[tuple[str, int]]], body: list[Instruction]
) -> list[tuple[str, int]]:
    """The buffers that an instruction needs; views need nothing by themselves."""
    if i.opcode in _VIEWS and not i.root:
        return []
    read = [o for name in i.operands for o in owners.get(name, [])]
    return read + (owners[i.name] if i.root else [])
