"""What is fast on which device, by fake devices, and how it is said."""

import types

import jax
import numpy as np
import pytest

from jmp_rewrite import _devices
from jmp_rewrite._devices import (
    DeviceCheck,
    auto_compute_dtype,
    check_devices,
    default_device,
    fast_dtypes,
    has_bfloat16_flag,
)

FLOAT16 = np.dtype("float16")
BFLOAT16 = jax.numpy.dtype("bfloat16")
FLOAT32 = np.dtype("float32")


def gpu(capability, kind="Tesla V100-SXM2-16GB"):
    return types.SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability
    )


def device(platform, kind):
    return types.SimpleNamespace(platform=platform, device_kind=kind)


@pytest.fixture(params=[True, False], ids=["with bfloat16", "without bfloat16"])
def native(request, monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", str(int(request.param)))
    return request.param


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ("6.1", "float32"),
        ("7.0", "float16"),
        ("7.5", "float16"),
        ("8.0", "bfloat16"),
        ("8.9", "bfloat16"),
        ("9.0", "bfloat16"),
        ("10.0", "bfloat16"),  # more than 8.0, though not as text
        ("12.1", "bfloat16"),
        ("gfx906", "float16"),
        ("gfx908", "float16"),
        ("gfx90a", "bfloat16"),
        ("gfx942", "bfloat16"),
        ("gfx942:sramecc+:xnack-", "bfloat16"),
        ("gfx1100", "bfloat16"),
        ("gfx1030", "float32"),
        ("gfx900", "float32"),
        ("unknown", "float32"),
        (None, "float32"),
    ],
)
def test_auto_on_gpus(capability, dtype):
    assert auto_compute_dtype(gpu(capability)) == dtype


def test_auto_on_other_devices(native):
    assert auto_compute_dtype(device("tpu", "TPU v5 lite")) == "bfloat16"
    expected = "bfloat16" if native else "float32"
    assert auto_compute_dtype(device("cpu", "cpu")) == expected
    assert auto_compute_dtype(device("METAL", "Apple M1")) == "float32"


def test_auto_says_why_it_is_float32(native):
    assert _devices.why_auto_is_float32(device("tpu", "TPU v5 lite")) is None
    assert _devices.why_auto_is_float32(gpu("8.0")) is None
    old = _devices.why_auto_is_float32(gpu("6.1", "Tesla P100"))
    assert "float32 on this device (Tesla P100)" in old and "at least 7.0" in old
    why = _devices.why_auto_is_float32(device("cpu", "cpu"))
    assert why is None if native else "no instructions for bfloat16" in why


def test_auto_takes_the_default_device(native):
    expected = "bfloat16" if native else "float32"
    assert auto_compute_dtype() == expected
    with jax.default_device(jax.local_devices()[1]):
        assert auto_compute_dtype() == expected
    with jax.default_device("cpu"):
        assert auto_compute_dtype() == expected


def test_auto_asks_the_configured_device():
    first, second = jax.local_devices()[:2]
    assert default_device() == first
    with jax.default_device(second):
        assert default_device() == second


def test_the_environment_knows_the_cpu_better(monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "yes")
    with pytest.raises(ValueError, match="CPU_BFLOAT16 expected 0 or 1, got 'yes'"):
        auto_compute_dtype()


def test_float16_is_fast_wherever_bfloat16_is_on_gpus_only():
    assert fast_dtypes(gpu("8.0")) == (BFLOAT16, FLOAT16)
    assert fast_dtypes(gpu("7.0")) == (FLOAT16,)
    assert fast_dtypes(device("tpu", "TPU v4")) == (BFLOAT16,)


@pytest.mark.parametrize(
    ("system", "machine", "flags", "expected"),
    [
        ("Linux", "x86_64", "flags : fpu avx512_bf16 avx512_fp16", True),
        ("Linux", "x86_64", "flags : fpu amx_bf16 amx_tile", True),
        ("Linux", "x86_64", "flags : fpu avx512f avx2", False),
        ("Linux", "x86_64", "flags : no_avx512_bf16x", False),
        ("Linux", "x86_64", "", False),
        ("Linux", "aarch64", "Features : fp asimd bf16", False),
        ("Darwin", "arm64", "1\n", True),
        ("Darwin", "arm64", "0\n", False),
        ("Darwin", "arm64", "", False),
        ("Darwin", "x86_64", "1\n", False),
        ("Windows", "AMD64", "avx512_bf16", False),
    ],
)
def test_cpu_flags(system, machine, flags, expected):
    assert has_bfloat16_flag(system, machine, flags) is expected


V100 = "Tesla V100-SXM2-16GB, compute capability 7.0"


def test_one_fast_gpu():
    check = check_devices("mixed_float16", FLOAT16, [gpu("7.0")])
    message = (
        "Mixed precision compatibility check (mixed_float16): OK\n"
        "Your GPU will likely run quickly with dtype policy mixed_float16 as it has "
        f"compute capability of at least 7.0. Your GPU: {V100}"
    )
    assert check == DeviceCheck("mixed_float16", "gpu", (V100,), True, message)
    assert str(check) == message


def test_fast_gpus_are_grouped():
    check = check_devices("mixed_float16", FLOAT16, [gpu("7.0")] * 3)
    assert check.ok and check.devices == (V100,) * 3
    assert "as they all have compute capability of at least 7.0" in check.message
    assert check.message.endswith(f"Your GPUs:\n  {V100} (x3)")


def test_bfloat16_needs_8_0():
    check = check_devices("mixed_bfloat16", BFLOAT16, [gpu("7.0")])
    assert not check.ok
    assert "check (mixed_bfloat16): WARNING\nYour GPU may run slowly" in check.message
    assert "because it has no compute capability of at least 8.0" in check.message
    assert check_devices("mixed_bfloat16", BFLOAT16, [gpu("8.0")]).ok


def test_some_gpus_are_slow():
    gpus = [gpu("7.0"), *[gpu("6.1", "GTX 1080")] * 3]
    check = check_devices("mixed_float16", FLOAT16, gpus)
    assert not check.ok
    assert "Some of your GPUs may run slowly" in check.message
    assert "because not all have compute capability of at least 7.0" in check.message
    listed = f"  {V100}\n  GTX 1080, compute capability 6.1 (x3)\n"
    assert listed in check.message
    assert check.message.endswith("ignore this.")


def test_all_gpus_are_slow():
    check = check_devices("mixed_float16", FLOAT16, [gpu("6.1", "GTX 1080")] * 2)
    assert "Your GPUs may run slowly" in check.message
    assert "because they have no compute capability of at least 7.0" in check.message


def test_a_gpu_without_compute_capability():
    check = check_devices("mixed_float16", FLOAT16, [gpu(None, "Some GPU")])
    assert not check.ok
    assert "Some GPU, no compute capability (probably no NVIDIA GPU)" in check.message


def test_no_device():
    check = check_devices("mixed_float16", FLOAT16, [])
    assert (check.ok, check.devices, check.platform) == (False, (), "no device")
    assert "There is no device" in check.message


def test_tpu():
    tpus = [device("tpu", "TPU v5 lite")] * 4
    good = check_devices("mixed_bfloat16", BFLOAT16, tpus)
    assert good.ok and "Your TPUs will likely run quickly" in good.message
    assert "TPU v5 lite (x4)" in good.message
    assert not check_devices("mixed_float16", FLOAT16, tpus).ok


def test_cpu(native):
    cpu = [device("cpu", "cpu")]
    check = check_devices("mixed_bfloat16", BFLOAT16, cpu)
    assert check.ok is native
    assert "instructions for bfloat16 matrix multiplication" in check.message
    assert not check_devices("mixed_float16", FLOAT16, cpu).ok


@pytest.mark.parametrize("any_device", [gpu("3.5"), device("cpu", "cpu")])
def test_float32_is_fine_anywhere(any_device):
    check = check_devices("float32", FLOAT32, [any_device])
    assert check.ok and "any device" in check.message


def test_devices_are_the_local_ones_by_default():
    check = check_devices("float32", FLOAT32)
    assert check.devices == tuple(d.device_kind for d in jax.local_devices())
