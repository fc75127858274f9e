"""The real compilers of TPU and NVIDIA GPU, without the devices.

They are the package's own, behind `report.cost`: `jmp_rewrite/_cost`. They need
`jax[tpu]`'s `libtpu` for TPUs and `jax[cuda13]`'s plugin (no driver) for GPUs.

A program on no device is not tuned on one: on the GPU the library's choice among
algorithms and tiles is the default one, so bytes and memory are comparable between two
programs and times are not given.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on a device here

import jax  # noqa: E402
from jax.extend import core as jex  # noqa: E402

from jmp_rewrite._cost.compile import Job, compile_jobs  # noqa: E402
from jmp_rewrite._cost.devices import target as target_of  # noqa: E402
from jmp_rewrite._cost.estimate import estimate  # noqa: E402
from jmp_rewrite._cost.program import Program, lower  # noqa: E402
from jmp_rewrite._cost.store import Compiled  # noqa: E402

TARGETS = {"v5e": "TPU v5e", "v6e": "TPU v6e", "h200": "NVIDIA H200"}
# A U-Net takes 25 minutes of two cores.
_TIME_LIMIT = 7200.0


@dataclasses.dataclass
class Cost:
    """What a compiler says of one program.

    Attributes:
      mcycles: estimated cycles in millions, of a TPU.
      gb_accessed: gigabytes read and written, of a TPU by XLA's own cost analysis,
        which takes a loop for one iteration; the others are added, as they are counted
        in the text.
      gb_written: gigabytes that all kernels write, loops by their trip counts.
      mb_temp: peak temporary memory in megabytes (1e6 bytes).
      casts: casts between float32 and half in the step's jaxpr.
      converts: casts between float32 and half in the compiled program.
      lone_converts: kernels that do nothing but cast.
      kernels: how many kernels run.
      seconds: to compile.
    """

    mcycles: float | None
    gb_accessed: float | None
    gb_written: float
    mb_temp: float
    casts: int
    converts: int
    lone_converts: int
    kernels: int
    seconds: float


def compiled(
    target: str,
    step: Callable[..., Any],
    args: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> tuple[Compiled, int]:
    """Compiles a step for shapes on one device, unless it is kept already.

    Returns:
      What the compiler made of it, and the number of casts in the step's jaxpr.

    Raises:
      RuntimeError: if it cannot be compiled.
    """
    closed = jax.make_jaxpr(lambda *a: step(*a))(*args)
    donated = [n in donate for n, a in enumerate(args) for _ in jax.tree.leaves(a)]
    program = Program(
        "step", closed, donated, [None] * len(donated), [None] * len(closed.out_avals)
    )
    on = target_of(TARGETS.get(target, target))
    job = Job(on, lower(program, on), tuple((options or {}).items()))
    [found] = compile_jobs([job], _TIME_LIMIT, fresh=fresh)
    if "error" in found.answer:
        raise RuntimeError(found.answer["error"])
    return found, casts(closed)


def casts(jaxpr: Any) -> int:
    """Counts the casts between float32 and half in a jaxpr and all that it holds."""
    count = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        count += sum(casts(inner) for inner in jex.jaxprs_in_params(eqn.params))
        if eqn.primitive.name in ("convert_element_type", "restore"):
            ends = {eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name}
            count += "float32" in ends and bool(ends & {"bfloat16", "float16"})
    return count


def measure(target: str, found: Compiled, casts: int) -> Cost:
    """Reads a compiled program."""
    on = target_of(TARGETS.get(target, target))
    seen = estimate(found, on)
    cycles, is_tpu = seen.estimated_cycles, on.platform == "tpu"
    return Cost(
        mcycles=cycles / 1e6 if cycles else None,
        gb_accessed=seen.bytes_accessed / 1e9 if is_tpu else None,
        gb_written=seen.bytes_written / 1e9,
        mb_temp=seen.temporary_bytes / 1e6,
        casts=casts,
        converts=seen.converts,
        lone_converts=seen.lone_converts,
        kernels=seen.kernels,
        seconds=seen.seconds,
    )
