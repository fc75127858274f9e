"""What a device is good at: which compute dtype is fast on it, and saying so."""

import dataclasses
import functools
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)

_CPU_VARIABLE = "JMP_REWRITE_CPU_BFLOAT16"

# Tensor cores multiply float16 from Volta on and bfloat16 from Ampere on: CUDA C++
# Programming Guide, "Tensor Core Input Data Types per Compute Capability".
_NVIDIA_FLOAT16 = (7, 0)
_NVIDIA_BFLOAT16 = (8, 0)

# Matrix cores: CDNA2 and later (gfx90a, gfx94*, gfx95*) and RDNA3 and later (gfx11*,
# gfx12*) multiply both at one rate; gfx908 has bfloat16 at half of float16's rate, and
# gfx906 packed float16 only. AMD's instruction set guides, "Matrix Arithmetic"; the
# float16 list is TensorFlow's, auto_mixed_precision.cc, `FP16SupportedDevices`.
_AMD_BFLOAT16 = re.compile(r"gfx(90a|94\w|95\w|11\w\w|12\w\w)\b")
_AMD_FLOAT16 = re.compile(r"gfx(906|908)\b")

_IGNORABLE = (
    "If the program will run on another device than this process's, ignore this."
)


@dataclasses.dataclass(frozen=True)
class DeviceCheck:
    """Whether a policy is fast on the devices of this process.

    Attributes:
        policy: the policy's name, for example `"mixed_float16"`.
        platform: the devices' platform as JAX calls it: `"cpu"`, `"gpu"` or `"tpu"`.
        devices: one description a device, with its compute capability where it has one.
        ok: whether every device multiplies the policy's compute dtype fast.
        message: the whole check as text, which is also what `str()` gives.
    """

    policy: str
    platform: str
    devices: tuple[str, ...]
    ok: bool
    message: str

    def __str__(self) -> str:
        return self.message


def auto_compute_dtype(device: Any = None) -> np.dtype:
    """Return the compute dtype that `"auto"` stands for on a device.

    Args:
        device: a `jax.Device`; by default the one that JAX would compute on. It is this
            process's device: a program that is compiled or exported for another one
            names its policy.

    Returns:
        bfloat16 on TPUs, on NVIDIA GPUs of compute capability 8.0 or more, on AMD GPUs
        with bfloat16 matrix cores and on CPUs with native bfloat16 products; float16 on
        NVIDIA GPUs of compute capability 7.x and on AMD's gfx906 and gfx908; float32
        elsewhere, where half precision would be slower. `JMP_REWRITE_CPU_BFLOAT16=1`
        or `=0` in the environment says whether CPUs have native bfloat16 products: on
        Windows, and on ARM under Linux, nobody else does.

    Raises:
        ValueError: if that variable is something else.

    Example:
        >>> str(auto_compute_dtype()) in ("float32", "bfloat16", "float16")
        True
    """
    fast = fast_dtypes(default_device() if device is None else device)
    return fast[0] if fast else _FLOAT32


def why_auto_is_float32(device: Any = None) -> str | None:
    """Return why `"auto"` stands for float32 on a device, and None if it does not.

    Args:
        device: a `jax.Device`; by default the one that JAX would compute on.
    """
    device = default_device() if device is None else device
    if fast_dtypes(device):
        return None
    best = _FLOAT16 if device.platform == "gpu" else _BFLOAT16
    return (
        f"'auto' means float32 on this device ({device.device_kind}), because it has "
        f"no {_needed(best, device.platform)}"
    )


def fast_dtypes(device: Any) -> tuple[np.dtype, ...]:
    """Return the half dtypes whose products a device computes fast, best first.

    Args:
        device: a `jax.Device`, or anything with its `platform` and, for GPUs, its
            `compute_capability`: `"8.0"` of NVIDIA's, `"gfx90a"` of AMD's.
    """
    if device.platform == "tpu":
        return (_BFLOAT16,)  # float16 operands are widened: no gain
    if device.platform == "cpu":
        return (_BFLOAT16,) if cpu_multiplies_bfloat16() else ()
    return _gpu_dtypes(_capability(device))


def check_devices(
    policy: str, compute_dtype: np.dtype, devices: Sequence[Any] | None = None
) -> DeviceCheck:
    """Judge whether a compute dtype is fast on devices, in a sentence for people.

    Args:
        policy: the policy's name, to print.
        compute_dtype: float16, bfloat16 or float32.
        devices: `jax.Device`s of one platform; by default `jax.local_devices()`.

    Returns:
        A `DeviceCheck`. Its message has the form of Keras'
        `keras/src/mixed_precision/device_compatibility_check.py` (Keras 2).
    """
    devices = jax.local_devices() if devices is None else devices
    platform = devices[0].platform if devices else "no device"
    described = tuple(map(_describe, devices))
    slow = [d for d in devices if compute_dtype not in (*fast_dtypes(d), _FLOAT32)]
    ok = bool(devices) and not slow
    head = (
        f"Mixed precision compatibility check ({policy}): {'OK' if ok else 'WARNING'}"
    )
    if compute_dtype == _FLOAT32:
        text = "Nothing runs in half precision, so any device is suitable."
    elif ok:
        text = _fast_text(policy, compute_dtype, platform, described)
    else:
        text = _slow_text(policy, compute_dtype, platform, described, len(slow))
    return DeviceCheck(policy, platform, described, ok, f"{head}\n{text}")


def cpu_multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16.

    They are AVX512-BF16 and AMX on x86 under Linux, and FEAT_BF16 on Apple's chips; of
    any other machine it is not known, which counts as no, unless the environment says.
    """
    said = os.environ.get(_CPU_VARIABLE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{_CPU_VARIABLE} expected 0 or 1, got {said!r}.")
    if said:
        return said == "1"
    return has_bfloat16_flag(platform.system(), platform.machine(), _cpu_flags())


def has_bfloat16_flag(system: str, machine: str, flags: str) -> bool:
    """Whether a CPU's description names bfloat16 products.

    Args:
        system: what `platform.system()` says.
        machine: what `platform.machine()` says.
        flags: the text of `/proc/cpuinfo` under Linux, or what
            `sysctl -n hw.optional.arm.FEAT_BF16` prints under macOS.
    """
    if system == "Linux" and machine in ("x86_64", "AMD64"):
        return re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) is not None
    return system == "Darwin" and machine == "arm64" and flags.strip() == "1"


@functools.cache
def _cpu_flags() -> str:
    try:
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
            return subprocess.run(command, capture_output=True, text=True).stdout
        with open("/proc/cpuinfo") as file:
            return file.read()
    except OSError:
        return ""


def default_device() -> Any:
    """Return the device that JAX would compute on."""
    # A device, a platform's name or None; the option is unknown to type checkers.
    configured = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(configured, str):
        return jax.local_devices(backend=configured)[0]
    return jax.local_devices()[0] if configured is None else configured


def _capability(device: Any) -> str:
    return str(getattr(device, "compute_capability", None) or "")


def _gpu_dtypes(capability: str) -> tuple[np.dtype, ...]:
    if version := re.fullmatch(r"(\d+)\.(\d+)", capability):
        numbers = (int(version[1]), int(version[2]))
        if numbers >= _NVIDIA_BFLOAT16:
            return (_BFLOAT16, _FLOAT16)
        return (_FLOAT16,) if numbers >= _NVIDIA_FLOAT16 else ()
    if _AMD_BFLOAT16.match(capability):
        return (_BFLOAT16, _FLOAT16)
    return (_FLOAT16,) if _AMD_FLOAT16.match(capability) else ()


def _describe(device: Any) -> str:
    capability = _capability(device)
    if capability:
        return f"{device.device_kind}, compute capability {capability}"
    if device.platform in ("cpu", "tpu"):
        return str(device.device_kind)
    return f"{device.device_kind}, no compute capability (probably no NVIDIA GPU)"


def _needed(compute_dtype: np.dtype, platform: str) -> str:
    """Say what a device of a platform has where the compute dtype is fast."""
    if platform == "cpu":
        return f"instructions for {compute_dtype} matrix multiplication"
    if platform == "tpu":
        return "matrix units for " + str(compute_dtype)
    least = _NVIDIA_BFLOAT16 if compute_dtype == _BFLOAT16 else _NVIDIA_FLOAT16
    return f"compute capability of at least {least[0]}.{least[1]}"


def _noun(platform: str) -> str:
    return platform.upper() if platform in ("cpu", "tpu") else "GPU"


def _fast_text(
    policy: str, compute_dtype: np.dtype, platform: str, described: Sequence[str]
) -> str:
    noun, needed = _noun(platform), _needed(compute_dtype, platform)
    if len(described) == 1:
        return (
            f"Your {noun} will likely run quickly with dtype policy {policy} as it has "
            f"{needed}. Your {noun}: {described[0]}"
        )
    return (
        f"Your {noun}s will likely run quickly with dtype policy {policy} as they all "
        f"have {needed}. Your {noun}s:\n{_grouped(described)}"
    )


def _slow_text(
    policy: str,
    compute_dtype: np.dtype,
    platform: str,
    described: Sequence[str],
    slow: int,
) -> str:
    noun, needed = _noun(platform), _needed(compute_dtype, platform)
    if not described:
        return f"There is no device to run dtype policy {policy} on.\n{_IGNORABLE}"
    if slow < len(described):
        who, why, owned = f"Some of your {noun}s", "not all have", f"Your {noun}s"
    elif slow == 1:
        who, why, owned = f"Your {noun}", "it has no", f"Your {noun}"
    else:
        who, why, owned = f"Your {noun}s", "they have no", f"Your {noun}s"
    return (
        f"{who} may run slowly with dtype policy {policy} because {why} {needed}. "
        f"{owned}:\n{_grouped(described)}\n{_IGNORABLE}"
    )


def _grouped(described: Sequence[str]) -> str:
    lines = Counter(described).items()
    return "\n".join(f"  {d} (x{n})" if n > 1 else f"  {d}" for d, n in lines)
