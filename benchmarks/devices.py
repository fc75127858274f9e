"""The real compilers of TPU and NVIDIA GPU, without the devices.

`lower_for` and `compile_lowered` compile ahead of time; `measure` says what the
compiler says. They need `jax[tpu]`'s `libtpu` for "v5e" and "v6e", and `jax[cuda13]`'s
plugin (no driver) for "h200", whose description is in `h200.txtpb`.

A program on no device is not tuned on one: on the GPU the library's choice among
algorithms and tiles is the default one, so bytes and memory are comparable between two
programs and times are not given.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
os.environ.update(ENVIRONMENT)

import hlo  # noqa: E402
import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.extend import core as jex  # noqa: E402

TARGETS = ("v5e", "v6e", "h200")
_H200 = pathlib.Path(__file__).parent / "h200.txtpb"


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


def device_of(target: str) -> Any:
    """A device to compile for, of a topology that is only described."""
    if target == "h200":
        topology = topologies.get_topology_desc(
            "h200",
            platform="cuda",
            target_config=_H200.read_text(),
            topology="1x1x1",
        )
    else:
        topology = topologies.get_topology_desc(f"{target}:2x2", platform="tpu")
    return topology.devices[0]


def lower_for(
    target: str, step: Callable[..., Any], args: Any, donate: tuple[int, ...] = ()
) -> tuple[Any, int]:
    """Lowers a step for shapes on one device.

    Returns:
      A `jax.stages.Lowered` and the number of casts in the step's jaxpr.
    """
    sharding = jax.sharding.SingleDeviceSharding(device_of(target))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    traced = jax.jit(step, donate_argnums=donate).trace(*args)
    return traced.lower(), casts(traced.jaxpr)


def casts(jaxpr: Any) -> int:
    """Counts the casts between float32 and half in a jaxpr and all that it holds."""
    count = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        count += sum(casts(inner) for inner in jex.jaxprs_in_params(eqn.params))
        if eqn.primitive.name in ("convert_element_type", "restore"):
            ends = {eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name}
            count += "float32" in ends and bool(ends & {"bfloat16", "float16"})
    return count


def compile_lowered(
    lowered: Any, options: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Compiles.

    Returns:
      A `jax.stages.Compiled`, and what the compiler says beside the program's text.
    """
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options or None)
    seconds = time.perf_counter() - start
    analysis = compiled.cost_analysis() or {}
    return compiled, {
        "accessed": analysis.get("bytes accessed"),
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": seconds,
    }


def measure(text: str, facts: dict[str, Any]) -> Cost:
    """Reads a compiled program's text and the facts beside it."""
    module = hlo.parse(text)
    cycles, accessed = module.cycles(), facts["accessed"]
    if accessed:
        accessed += module.bytes_repeated()
    return Cost(
        mcycles=cycles / 1e6 if cycles else None,
        gb_accessed=accessed / 1e9 if accessed else None,
        gb_written=module.bytes_written() / 1e9,
        mb_temp=facts["temp"] / 1e6,
        casts=facts["casts"],
        converts=module.converts(),
        lone_converts=len(module.lone_converts()),
        kernels=sum(k.times for k in module.kernels()),
        seconds=facts["seconds"],
    )
