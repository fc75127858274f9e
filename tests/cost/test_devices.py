"""Devices by the names that people write, and their descriptions."""

import importlib.metadata
import re

import pytest

from jmp_rewrite._cost import devices, gpus
from jmp_rewrite._passes.by_device import device_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TPU v5e", "TPU v5e"),
        ("v5e", "TPU v5e"),
        ("tpu-v5e", "TPU v5e"),
        ("v5litepod", "TPU v5e"),
        ("TPU v5 lite", "TPU v5e"),
        ("v5p", "TPU v5p"),
        ("Trillium", "TPU v6e"),
        ("TPU v7x", "TPU7x"),
        ("tpu7x", "TPU7x"),
        ("h100", "NVIDIA H100"),
        ("H100 SXM", "NVIDIA H100"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("A100-40GB", "NVIDIA A100 40GB"),
        ("nvidia_a100", "NVIDIA A100"),
        ("T4", "NVIDIA T4"),
    ],
)
def test_names(name, expected):
    assert devices.target(name).name == expected


def test_every_listed_name_is_known():
    for name in devices.names():
        found = devices.target(name)
        assert found.name == name and found.devices == 1 and found.memory > 2**32


@pytest.mark.parametrize("name", devices.names())
def test_the_passes_know_the_same_devices(name):
    """The program whose cost is asked for can be run here, by the same name."""
    target = devices.target(name)
    platform, *kinds = device_of(name)
    assert platform == target.platform
    assert kinds == ([target.kind] if platform == "tpu" else [])


def test_a_topology_says_how_many_devices():
    assert devices.target("v5e:4x4").devices == 16
    assert devices.target("v5e:4x4").topology == "v5e:4x4"
    assert devices.target("TPU v4:2x2x2").devices == 8
    assert devices.target("TPU v3:2x2").devices == 8  # two of each chip
    assert devices.target("TPU7x:2x2x1").devices == 8
    assert devices.target("H200:8").topology == "1x1x8"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "TPU v5q",
            r"unknown device 'TPU v5q'; did you mean 'TPU v5.'\? Known are: TPU",
        ),
        ("abacus", r"unknown device 'abacus'.* Known are: TPU v2, .*NVIDIA H200"),
        ("v5e:banana", r"expected the shape of a topology after the colon of 'v5e:ban"),
        ("v5e:", "expected the shape of a topology"),
        ("v5e:0x4", "expected the shape of a topology"),
        ("v5e:4x4x4", "expected a topology of TPU v5e with as many dimensions as"),
        ("v4:4x4", r"as 'TPU v4:2x2x1', got '4x4'"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        devices.target(name)


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="expected the name of a device, .* got 5 of"):
        devices.target(5)


@pytest.mark.parametrize("name", gpus.facts())
def test_a_gpu_is_described_by_facts_with_a_source(name):
    facts, text = gpus.facts()[name], gpus.described(name)
    assert facts["source"]
    device = text.partition("platform_name")[0]
    fields = dict(re.findall(r"^\s*(\w+): (\S+)$", device, re.M))
    assert int(fields["device_memory_size"]) == facts["memory"]
    assert int(fields["core_count"]) == facts["cores"]
    major, minor = int(fields["major"]), int(fields["minor"])
    assert facts["capability"].startswith(f"{major}.{minor}")
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("tpu", r"for TPUs is not installed: pip install 'jax\[tpu\]=="),
        ("cuda", "for NVIDIA GPUs is not installed: pip install jax-cuda13-plugin=="),
    ],
)
def test_a_compiler_that_is_not_installed(monkeypatch, platform, message):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(devices.importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=message):
        devices.compiler(platform)


def test_a_compiler_with_its_version(installed):
    assert devices.compiler("tpu") == "libtpu 1.2"
    assert devices.compiler("cuda") == "jax-cuda13-pjrt 1.2"


def test_a_device_that_is_there_by_its_kind():
    assert devices.named("TPU v5 lite") == "TPU v5e"
    assert devices.named("NVIDIA H100 80GB HBM3") == "NVIDIA H100"
    assert devices.named("cpu") is None
