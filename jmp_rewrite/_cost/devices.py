"""The devices that a program can be compiled for without holding one."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import math
import re
from typing import NamedTuple

import jax

from jmp_rewrite._cost import gpus
from jmp_rewrite._spelling import DEVICE_ALIASES, short_device_name


class Target(NamedTuple):
    """A device, or several, that are only described.

    Attributes:
      name: as it is printed: "TPU v5e", "TPU v5e:4x4", "NVIDIA H200".
      platform: "tpu" or "cuda".
      topology: what the compiler is asked for: "v5e:2x2", "1x1x1".
      kind: `device_kind` of such a device.
      devices: how many a program is for; 1 unless the name says a topology.
      memory: bytes of one device, by its data sheet; of a GPU by its driver.
      options: further words of `get_topology_desc`.
    """

    name: str
    platform: str
    topology: str
    kind: str
    devices: int
    memory: int
    options: tuple[tuple[str, str], ...] = ()


class _Tpu(NamedTuple):
    """A generation of TPUs: one device of it, and how libtpu calls it."""

    topology: str
    kind: str
    gibibytes: int
    per_chip: int = 1
    options: tuple[tuple[str, str], ...] = ()


# Google Cloud, "TPU versions": memory of a chip. Chips of v2, v3 and TPU7x are two
# devices; those of v4 and v5p two cores that are one device, which libtpu has to be
# told of v4 ("megacore").
_TPUS = {
    "TPU v2": _Tpu("v2:2x2", "TPU v2", 8, 2),
    "TPU v3": _Tpu("v3:2x2", "TPU v3", 16, 2),
    "TPU v4": _Tpu("v4:2x2x1", "TPU v4", 32, 1, (("chip_config_name", "megacore"),)),
    "TPU v5e": _Tpu("v5e:2x2", "TPU v5 lite", 16),
    "TPU v5p": _Tpu("v5p:2x2x1", "TPU v5", 95),
    "TPU v6e": _Tpu("v6e:2x2", "TPU v6 lite", 32),
    "TPU7x": _Tpu("tpu7x:2x2x1", "TPU7x", 96, 2),
}

_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
_INSTALL = {
    "tpu": "pip install 'jax[tpu]=={0}', which brings libtpu",
    "cuda": "pip install jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0}",
}


def names() -> list[str]:
    """Returns the names of all devices."""
    return [*_TPUS, *gpus.facts()]


def named(kind: str) -> str | None:
    """Returns the name of a device by what JAX calls it, its `device_kind`."""
    tpus = {tpu.kind: name for name, tpu in _TPUS.items()}
    described = {fact["description"]: name for name, fact in gpus.facts().items()}
    return (tpus | described).get(kind)


def target(name: str) -> Target:
    """Finds a device by its name, in any of the forms that people write.

    Args:
      name: "TPU v5e", "v5litepod", "H100"; of several devices with their topology,
        "TPU v5e:4x4", or number, "H200:8".

    Raises:
      TypeError: if it is no string.
      ValueError: for an unknown device, or a topology that is none.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"expected the name of a device, as 'TPU v5e' or 'NVIDIA H100', got "
            f"{name!r} of type {type(name).__name__}."
        )
    device, colon, shape = name.partition(":")
    short = short_device_name(device)
    found = _by_short_name().get(short)
    if found is None:
        near = difflib.get_close_matches(short, _by_short_name(), 1, 0.4)
        hint = f"; did you mean {_by_short_name()[near[0]]!r}?" if near else "."
        raise ValueError(
            f"unknown device {name!r}{hint} Known are: {', '.join(names())}."
        )
    shape = shape.strip()
    if colon and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ValueError(
            f"expected the shape of a topology after the colon of {name!r}, as in "
            "'TPU v5e:4x4' or 'NVIDIA H200:8'."
        )
    return _tpu(found, shape) if found in _TPUS else _gpu(found, shape)


def _tpu(name: str, shape: str) -> Target:
    tpu = _TPUS[name]
    topology = tpu.topology
    if shape:
        topology = f"{topology.partition(':')[0]}:{shape}"
    if topology.count("x") != tpu.topology.count("x"):
        raise ValueError(
            f"expected a topology of {name} with as many dimensions as "
            f"'{name}:{tpu.topology.partition(':')[2]}', got {shape!r}."
        )
    return Target(
        f"{name}:{shape}" if shape else name,
        "tpu",
        topology,
        tpu.kind,
        _size(shape) * tpu.per_chip if shape else 1,
        tpu.gibibytes * 2**30,
        tpu.options,
    )


def _gpu(name: str, shape: str) -> Target:
    count = _size(shape)
    fact = gpus.facts()[name]
    return Target(
        f"{name}:{shape}" if shape else name,
        "cuda",
        f"1x1x{count}",  # of one host
        fact["description"],
        count,
        fact["memory"],
        (("target_config", gpus.described(name)),),
    )


def _size(shape: str) -> int:
    return math.prod(int(n) for n in shape.split("x")) if shape else 1


@functools.cache
def _by_short_name() -> dict[str, str]:
    known = {short_device_name(n): n for n in names()}
    # JAX's `device_kind` of a v5p is "TPU v5".
    return {**known, **DEVICE_ALIASES, "v5": "TPU v5p"}


def compiler(platform: str) -> str:
    """Returns the name and version of a platform's compiler: "libtpu 0.0.50".

    Raises:
      ImportError: if it is not installed.
    """
    for package in _PACKAGES[platform]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    what = {"tpu": "TPUs", "cuda": "NVIDIA GPUs"}[platform]
    raise ImportError(
        f"the compiler for {what} is not installed: "
        f"{_INSTALL[platform].format(jax.__version__)} (Linux on x86-64; no such "
        "device is needed)."
    )
