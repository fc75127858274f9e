"""NVIDIA GPUs that nobody here holds, described for XLA's compiler.

The facts and where each is from stand in `gpus.toml`.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from typing import Any

# The same for all of them: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability". cuDNN's version is that of the CUDA plugin's wheels.
_TEMPLATE = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_block}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: {extension}
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {capability}"
  name: "{description}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{
  major: 9
  minor: 10
  patch: 0
}}
device_description_str: "{description}"
"""


@functools.cache
def facts() -> dict[str, dict[str, Any]]:
    """Returns the description of each GPU, by its name."""
    file = importlib.resources.files("jmp_rewrite._cost").joinpath("gpus.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def described(name: str) -> str:
    """Returns the description of a GPU that XLA's compiler is given."""
    gpu = facts()[name]
    major, minor = gpu["capability"].rstrip("a").split(".")
    # "9.0a": code for this very architecture, as its tensor cores want it.
    extension = "ACCELERATED_FEATURES" if gpu["capability"].endswith("a") else "NONE"
    return _TEMPLATE.format(**gpu, major=major, minor=minor, extension=extension)
