"""What a compiler says of a program, read from its answer and the compiled text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmp_rewrite._cost import hlo, liveness
from jmp_rewrite._cost.compile import is_too_large
from jmp_rewrite._cost.devices import Target
from jmp_rewrite._cost.store import Compiled
from jmp_rewrite._units import bytes_text

_LARGEST = 5


class Buffer(NamedTuple):
    """A large array that a program holds at its peak.

    Attributes:
      bytes: its size in the device's memory.
      array: its type, "f32[8192,4096]".
      op: the path of name scopes of what makes it.
      line: the user's source line, where the compiler says it.
    """

    bytes: float
    array: str
    op: str
    line: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a compiler says of one program on one device; None where it says nothing.

    Attributes:
      argument_bytes: what the arguments take.
      output_bytes: what the results take, donated arguments included.
      alias_bytes: of these, what lies in donated arguments.
      temporary_bytes: what is neither, at most.
      peak_bytes: all of it, at most.
      fits: whether the device has that much memory.
      bytes_accessed: what all kernels read and write, loops by their trip counts.
      bytes_read: what all kernels read, as counted in the text.
      bytes_written: what they write, as counted in the text.
      estimated_cycles: of all kernels, loops by their trip counts; of a TPU.
      kernels: how many kernels run.
      converts: casts between float dtypes in the compiled program.
      lone_converts: kernels that do nothing but cast.
      collectives: bytes that a device takes part in moving, by kind and dtype.
      seconds: that the compilation took.
      problem: why there are no figures, in a line; else empty.
      over: what it needs by what there is, of a program that does not fit.
      largest: what takes most memory in a program that does not fit.
    """

    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    bytes_accessed: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    estimated_cycles: int | None = None
    kernels: int | None = None
    converts: int | None = None
    lone_converts: int | None = None
    collectives: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    seconds: float | None = None
    problem: str = ""
    over: float | None = None
    largest: Sequence[Buffer] = ()


def estimate(compiled: Compiled, target: Target) -> Estimate:
    """Reads what a compiler answered for a target."""
    answer = compiled.answer
    if "error" in answer:
        if is_too_large(answer):
            return _too_large(answer["error"])
        return Estimate(problem=_in_a_line(answer["error"]))
    module = hlo.parse(compiled.text)
    peak = _peak(answer)
    fits = target.platform == "tpu" or peak <= target.memory
    over = None if fits else peak / target.memory
    problem = "" if fits else _over_text(peak, target)
    return Estimate(
        argument_bytes=answer["argument"],
        output_bytes=answer["output"],
        alias_bytes=answer["alias"],
        temporary_bytes=answer["temporary"],
        peak_bytes=peak,
        fits=fits,
        bytes_accessed=_accessed(answer, module, target),
        bytes_read=round(module.bytes_read()),
        bytes_written=round(module.bytes_written()),
        estimated_cycles=module.cycles() or None,
        kernels=sum(k.times for k in module.kernels()),
        converts=module.converts(),
        lone_converts=len(module.lone_converts()),
        collectives={k: round(v) for k, v in sorted(module.collectives().items())},
        seconds=answer["seconds"],
        problem=problem,
        over=over,
        largest=() if fits else _largest(module),
    )


def _over_text(peak: int, target: Target) -> str:
    return (
        f"does not fit: the peak of {bytes_text(peak)} is more than the "
        f"{bytes_text(target.memory)} of {target.name}"
    )


def _peak(answer: dict[str, Any]) -> int:
    """Returns the compiler's peak; before JAX 0.11 the sum of what it consists of."""
    if answer["peak"]:
        return int(answer["peak"])
    fresh = answer["output"] - answer["alias"]
    return int(answer["argument"] + fresh + answer["temporary"])


def _accessed(answer: dict[str, Any], module: hlo.Module, target: Target) -> int | None:
    """Returns the bytes read and written.

    XLA's own analysis takes a loop for one iteration; and of GPUs there is none.
    """
    if target.platform == "cuda":
        return round(module.bytes_read() + module.bytes_written())
    accessed = answer["accessed"]
    if accessed is None or not 0 <= accessed < 2**62:
        return None
    return round(accessed + module.bytes_repeated())


def _largest(module: hlo.Module) -> list[Buffer]:
    """Returns the buffers alive at the peak whose line the compiler knows."""
    known = [b for b in liveness.peak(module).buffers if module.source(b.instruction)]
    held = sorted(known, key=lambda b: -b.array.padded)
    return [
        Buffer(
            b.array.padded,
            str(b.array),
            b.instruction.op_name,
            module.source(b.instruction),
        )
        for b in held[:_LARGEST]
    ]


def _in_a_line(message: str) -> str:
    return re.sub(r"\s+", " ", message.strip().split("\n\n")[0])[:400]


# libtpu: "the total memory required for HLO temporaries (46.73G) exceeds available HBM
# (15.75G)".
_SIZE = r"([\d.]+)([KMGT]?)"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _too_large(message: str) -> Estimate:
    sizes = [
        float(n) * _UNITS[unit] for n, unit in re.findall(rf"\({_SIZE}\)", message)
    ]
    over = sizes[0] / sizes[1] if len(sizes) > 1 and sizes[1] else None
    said = re.sub(r"^.*(CompileTimeHbmOom|RESOURCE_EXHAUSTED): ", "", message.strip())
    sentence = _in_a_line(said.splitlines()[0]).split(". HLO module")[0]
    return Estimate(fits=False, over=over, problem=f"does not fit: {sentence}")
