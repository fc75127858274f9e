"""Reads what an XLA compiler wrote: instructions, kernels, bytes, casts.

A *kernel* here is an instruction that runs on the device by itself: everything in the
entry computation and in what it runs (bodies of loops, branches, called computations)
that is neither bookkeeping (`tuple`, `bitcast`, ...) nor inside a fusion. What a loop's
body holds counts as often as the loop runs, where that is known: see `Module.trips`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from jmp_rewrite._cost import trips

WIDTH = {
    "pred": 1,
    "c64": 8,
    "c128": 16,
    "token": 0,
    "opaque": 0,
    "s4": 0.5,
    "u4": 0.5,
    "bf16": 2,
}

# These move nothing: they name, pack or view what is there.
BOOKKEEPING = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)

# These run other computations, whose kernels are counted in their place.
RUNS = frozenset({"call", "conditional", "while"})

# These move arrays between devices.
COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)

# What stands between the parentheses of these is no operand.
LITERAL = frozenset({"constant", "parameter"})

# These change a part of their first operand in place; the part is this operand.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}

# These read a part of their first operand.
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})

# A fusion of nothing else than these and a convert is a cast that stands alone.
LAYOUT = BOOKKEEPING | {"copy", "transpose", "reshape", "broadcast"}

# From here on a number of cycles is none: no kernel runs for a day.
_NO_CYCLES = 2**48

_HEAD = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_MANY = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """One array of a result: its dtype, shape and layout as XLA prints them."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> float:
        """Its size."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size * width(self.dtype)

    @property
    def padded(self) -> float:
        """Its size on a TPU, whose last two dimensions fill tiles such as T(8,128)."""
        order = re.match(r"\{([\d,]+):T\((\d+),(\d+)\)", self.layout)
        if not order or len(self.shape) < 2:
            return self.bytes
        minor = [int(d) for d in order[1].split(",")]
        size = self.bytes
        for dim, tile in zip(minor, (int(order[3]), int(order[2])), strict=False):
            count = self.shape[dim]
            size *= -(-count // tile) * tile / max(count, 1)
        return size

    @property
    def on_chip(self) -> bool:
        """Whether a TPU keeps it in its vector memory."""
        return "S(1)" in self.layout

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def width(dtype: str) -> float:
    """Bytes of one element."""
    if dtype in WIDTH:
        return WIDTH[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0


@dataclasses.dataclass
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: list[Array]
    operands: list[str]
    attributes: str
    root: bool
    literal: str = ""  # a parameter's number, a constant's value

    @property
    def number(self) -> int:
        """The number of a parameter."""
        return int(self.literal)

    @functools.cached_property
    def called(self) -> list[str]:
        """The computations that it names, in the order of the text."""
        names = _CALLED.findall(self.attributes)
        for many in _CALLED_MANY.findall(self.attributes):
            names += [n.strip().lstrip("%") for n in many.split(",")]
        return names

    @property
    def fused(self) -> str | None:
        """The computation of a fusion."""
        found = re.search(r"calls=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def cycles(self) -> int:
        """The compiler's estimate, of a TPU alone; 0 where there is none.

        Where it has none it may also write a number near 2**63.
        """
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found and int(found[1]) < _NO_CYCLES else 0

    @property
    def op_name(self) -> str:
        """The path of name scopes."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def frame(self) -> int:
        """Where in the user's source it comes from: see `Module.source`."""
        found = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(found[1]) if found else 0


class Kernel(NamedTuple):
    """An instruction that runs by itself, and how often it does."""

    instruction: Instruction
    times: int


@dataclasses.dataclass
class Module:
    """A compiled program."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    frames: dict[int, str]

    def kernels(self) -> list[Kernel]:
        """All kernels that the program runs."""
        return list(self._walk(self.entry, 1))

    def _walk(self, computation: str, times: int) -> Iterator[Kernel]:
        for i in self.computations[computation].values():
            if i.opcode in RUNS:
                for name in i.called:
                    yield from self._walk(name, times * self.trips(i))
            elif i.opcode == "async-start":
                for name in i.called:
                    yield from self._walk(name, times)
            elif i.opcode in BOOKKEEPING or i.opcode in ("async-done", "async-update"):
                pass
            elif not i.opcode.endswith("-start"):
                yield Kernel(i, times)
            elif i.cycles:  # the estimate stands on the start, the result on the done
                bare = dataclasses.replace(i, arrays=[])
                yield Kernel(bare, times)

    def trips(self, i: Instruction) -> int:
        """How often a loop runs its body; 1 where that is not known.

        The compiler for GPUs writes it down where it knows it; else it is counted.
        """
        if i.opcode != "while":
            return 1
        if i.name not in self._trips:
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes)
            if known is None:
                found = trips.count(self.computations, self._homes[i.name], i)
            else:
                found = int(known[1])
            self._trips[i.name] = max(found or 1, 1)
        return self._trips[i.name]

    @functools.cached_property
    def _trips(self) -> dict[str, int]:
        return {}

    def written(self, i: Instruction) -> list[Array]:
        """What a kernel writes: of an update in place the updates alone.

        A scatter that adds several updates to each place keeps them in a cache until
        they are complete, so that it writes no more than its result.
        """
        arrays = i.arrays
        if i.opcode == "custom-call" and len(arrays) > 1:
            arrays = [a for a in arrays if a.dtype not in ("s8", "u8")]  # workspace
        if i.opcode in UPDATES:
            return [_updated(arrays[0], i, self._of(i))]
        fused = i.fused
        if i.opcode == "fusion-done":  # of a fusion that runs beside others
            fused = self._of(i)[i.operands[0]].fused
        if i.opcode.startswith("fusion") and fused in self.computations:
            inside = self.computations[fused]
            root = next(x for x in inside.values() if x.root)
            roots = (
                [inside[o] for o in root.operands] if root.opcode == "tuple" else [root]
            )
            if len(roots) == len(arrays):
                found = [
                    (a, in_place(r, inside)) for r, a in zip(roots, arrays, strict=True)
                ]
                return [_updated(a, x, inside) if x else a for a, x in found]
        return arrays

    def read(self, i: Instruction) -> list[Array]:
        """What a kernel reads: of what it slices the slices, of an update nothing."""
        if i.opcode.endswith("-start"):  # its -done counts
            return []
        if i.opcode == "fusion-done":  # what its start is given
            i = self._of(i)[i.operands[0]]
        elif i.opcode.endswith("-done"):  # a copy or a slice
            return i.arrays
        outside = self._of(i)
        arrays = [outside[o].arrays for o in i.operands if o in outside]
        inside, parameters = self._inside(i)
        found = []
        for number, operand in enumerate(arrays):
            if number in parameters and len(operand) == 1:
                found += self._used(parameters[number], inside)
            elif not (i.opcode in UPDATES and number == 0):
                found += operand
        return found

    def _inside(
        self, i: Instruction
    ) -> tuple[dict[str, Instruction], dict[int, Instruction]]:
        """Returns what a fusion computes, and its parameters by their numbers."""
        inside = self.computations.get(i.fused or "", {})
        return inside, {x.number: x for x in inside.values() if x.opcode == "parameter"}

    def _used(
        self, parameter: Instruction, inside: dict[str, Instruction]
    ) -> list[Array]:
        """What a fusion, and the fusions inside of it, use of an operand."""
        found: list[Array] = []
        for user in inside.values():
            for number, operand in enumerate(user.operands):
                if operand != parameter.name:
                    continue
                deeper, parameters = self._inside(user)
                if number in parameters:
                    found += self._used(parameters[number], deeper)
                elif number == 0 and user.opcode in _SLICES:
                    found += user.arrays
                elif number == 0 and user.opcode == "bitcast":
                    found += self._used(user, inside)
                elif not (number == 0 and user.opcode in UPDATES):
                    return parameter.arrays
        whole = sum(a.bytes for a in parameter.arrays)
        return found if sum(a.bytes for a in found) < whole else parameter.arrays

    def _of(self, i: Instruction) -> dict[str, Instruction]:
        return self.computations[self._homes[i.name]]

    @functools.cached_property
    def _homes(self) -> dict[str, str]:
        return {i: name for name, c in self.computations.items() for i in c}

    def bytes_written(self) -> float:
        """Bytes that all kernels write."""
        return sum(
            k.times * sum(a.bytes for a in self.written(k.instruction))
            for k in self.kernels()
        )

    def bytes_repeated(self) -> float:
        """Bytes that loops read and write beyond their first iterations."""
        return sum(
            (k.times - 1) * sum(a.bytes for a in arrays)
            for k in self.kernels()
            if k.times > 1
            for arrays in (self.read(k.instruction), self.written(k.instruction))
        )

    def bytes_read(self) -> float:
        """Bytes that all kernels read."""
        return sum(
            k.times * sum(a.bytes for a in self.read(k.instruction))
            for k in self.kernels()
        )

    def collectives(self, least: float = 0) -> dict[tuple[str, str], float]:
        """Bytes that a device takes part in moving, by kind of collective and dtype.

        Of a gather they are what it makes, of a reduction what it reads. An operation
        has one channel, also where the text shows it several times.

        Args:
          least: arrays of fewer bytes do not count.
        """
        found: dict[tuple[str, str], float] = {}
        seen = set()
        for i, times in self._everything(self.entry, 1):
            kind = i.opcode.removesuffix("-start")
            channel = re.search(r"channel_id=(\d+)", i.attributes)
            key = (kind, channel[1] if channel else i.name)
            if kind not in COLLECTIVES or key in seen:
                continue
            seen.add(key)
            arrays = i.arrays
            if kind in ("all-reduce", "reduce-scatter"):
                inside = self._of(i)
                arrays = [a for o in i.operands for a in inside[o].arrays]
            elif i.opcode.endswith("-start"):  # operands first, then results
                arrays = arrays[len(i.operands) : 2 * len(i.operands)]
            for array in (a for a in arrays if a.bytes >= least):
                place = (kind, array.dtype)
                found[place] = found.get(place, 0) + times * array.bytes
        return found

    def _everything(
        self, computation: str, times: int
    ) -> Iterator[tuple[Instruction, int]]:
        """All instructions that run, those inside of fusions too, and how often."""
        for i in self.computations.get(computation, {}).values():
            yield i, times
            trips = self.trips(i) if i.opcode == "while" else 1
            for name in i.called:
                yield from self._everything(name, times * trips)

    def cycles(self) -> int:
        """Estimated cycles of all kernels, on a TPU."""
        return sum(k.times * k.instruction.cycles for k in self.kernels())

    def converts(self) -> int:
        """Casts between float dtypes, wherever they stand."""
        return sum(
            self._is_cast(i, c) for c in self.computations.values() for i in c.values()
        )

    def _is_cast(self, i: Instruction, inside: dict[str, Instruction]) -> bool:
        if i.opcode != "convert" or i.operands[0] not in inside:
            return False
        ends = {i.arrays[0].dtype, inside[i.operands[0]].arrays[0].dtype}
        return len(ends) == 2 and ends <= {"f32", "bf16", "f16"}

    def lone_converts(self) -> list[Kernel]:
        """Kernels that do nothing but cast."""
        return [k for k in self.kernels() if self._only_casts(k.instruction)]

    def _only_casts(self, i: Instruction) -> bool:
        if i.opcode == "convert":
            return True
        if i.opcode != "fusion" or i.fused not in self.computations:
            return False
        inside = self.computations[i.fused]
        others = {x.opcode for x in inside.values()} - LAYOUT
        return others == {"convert"} and any(
            self._is_cast(x, inside) for x in inside.values()
        )

    def source(self, i: Instruction) -> str:
        """The user's line, `file:line`."""
        return self.frames.get(i.frame, "")


def _updated(array: Array, update: Instruction, among: dict[str, Instruction]) -> Array:
    """The part of an array that an update in place writes."""
    (part,) = among[update.operands[UPDATES[update.opcode]]].arrays
    written = array._replace(shape=part.shape)
    return min(array, written, key=lambda a: a.bytes)


def in_place(root: Instruction, inside: dict[str, Instruction]) -> Instruction | None:
    """The update in place that a fusion's result is, if it is one."""
    while root.opcode == "bitcast" and root.operands[0] in inside:
        root = inside[root.operands[0]]
    return root if root.opcode in UPDATES else None


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is None:
            if line.endswith("{") and "->" in line:
                name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
                current = computations.setdefault(name, {})
                entry = name if line.startswith("ENTRY") else entry
        else:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    return Module(computations, entry, _frames(text))


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    arrays = [_array(m) for m in _ARRAY.finditer(rest[:end])]
    rest = rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inside = rest[:opening], rest[opening + 1 : closing]
    return Instruction(
        head[2],
        opcode,
        arrays,
        _NAME.findall(inside),
        rest[closing + 1 :],
        bool(head[1]),
        inside if opcode in LITERAL else "",
    )


def _array(match: re.Match[str]) -> Array:
    dims = match[2].replace("<=", "")
    shape = tuple(int(d) for d in dims.split(",") if d)
    return Array(match[1], shape, match[3] or "")


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if not depth:
                return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _frames(text: str) -> dict[int, str]:
    """Reads the tables of source lines that stand before the computations."""
    files = dict(re.findall(r'^(\d+) "([^"]+)"$', _table(text, "FileNames"), re.M))
    places = {}
    for key, file, line in re.findall(
        r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)",
        _table(text, "FileLocations"),
        re.M,
    ):
        places[key] = f"{files.get(file, '?').rsplit('/', 1)[-1]}:{line}"
    frames = re.findall(
        r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M
    )
    return {int(key): places.get(place, "") for key, place in frames}


def _table(text: str, title: str) -> str:
    start = text.find(f"\n{title}\n")
    return "" if start < 0 else text[start:].split("\n\n", 1)[0]
