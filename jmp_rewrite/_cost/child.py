"""The process that holds a compiler: one program, for devices that are not there.

    python -m jmp_rewrite._cost.child FOLDER

The folder has `request.json` and `module`; the answer is put beside them. What the
compiler prints is the parent's to capture. The process ends with its parent.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# What a TPU compiler asks of a machine without TPUs, and that several may run at once
# (it takes a lock for the device that is not there). A description of a GPU works where
# JAX has not tried to start one.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# So much less urgent than what the user does meanwhile.
_NICE = 5


def compile_module(
    request: dict[str, Any], module: bytes
) -> tuple[dict[str, Any], str]:
    """Compiles a module as a request says; returns the answer and the program."""
    from jmp_rewrite import _compat

    devices = _devices(request)
    start = time.perf_counter()
    free = (request["free_parameters"], request["free_results"])
    options = request["compiler_options"]
    executable = _compat.compile_module(module, devices, free, options)
    seconds = time.perf_counter() - start
    memory = executable.get_compiled_memory_stats()
    analysis = executable.cost_analysis() if request["platform"] == "tpu" else None
    text = "\n\n".join(m.to_string() for m in executable.hlo_modules())
    return {
        "argument": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": getattr(memory, "peak_memory_in_bytes", None),
        "accessed": (analysis or {}).get("bytes accessed"),
        "seconds": seconds,
    }, text


def main(folder: pathlib.Path, compiled: Callable[..., Any] = compile_module) -> None:
    """Compiles what a folder has, and writes what the compiler said into it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICE)
    request = json.loads((folder / "request.json").read_text())
    try:
        answer, text = compiled(request, (folder / "module").read_bytes())
    except Exception as error:
        answer, text = {"error": f"{type(error).__name__}: {error}"}, ""
    with gzip.open(folder / "program.gz", "wt", compresslevel=3) as file:
        file.write(text)
    (folder / "answer.json").write_text(json.dumps(answer))


def _end_with_parent() -> None:
    sys.stdin.read()  # until the parent closes it, or is no more
    os._exit(1)


def _devices(request: dict[str, Any]) -> list[Any]:
    """Returns the devices of a described topology, as a mesh of that shape has them."""
    from jax.experimental import mesh_utils, topologies

    name, options = request["topology"], dict(request["options"])
    if request["platform"] == "cuda":
        name, options = "described", options | {"topology": name}
    topology = topologies.get_topology_desc(
        name, platform=request["platform"], **options
    )
    count = request["devices"]
    if count == 1:
        return list(topology.devices[:1])
    if len(topology.devices) != count:
        raise ValueError(
            f"the topology has {len(topology.devices)} devices, the program {count}"
        )
    shape = request["mesh"] or [count]
    return list(mesh_utils.create_device_mesh(shape, topology.devices).flatten())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
