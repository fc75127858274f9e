"""`benchmarks/on_device.py` measures on the device that is there: here a CPU."""

import json
import pathlib

import matplotlib.image
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "on_device.py"


@pytest.fixture
def command(run_python, tmp_path):
    def run(*arguments):
        done = run_python(str(SCRIPT), "--size", "small", "--rounds", "3", *arguments)
        return done, tmp_path

    return run


@pytest.mark.slow
def test_a_train_step_and_decoding(command):
    pytest.importorskip("flax")
    done, folder = command(
        *("--models", "mlp", "decode", "--modes", "float32", "ours"),
        *("--json", "rows.json", "--png", "rows.png"),
    )
    assert done.returncode == 0, done.stderr
    assert "mlp" in done.stdout and "decode" in done.stdout and "cpu" in done.stdout
    kept = json.loads((folder / "rows.json").read_text())
    assert kept["device"] == ["cpu"] and kept["date"] and kept["versions"]["jax"]
    for model in ("mlp", "decode"):
        for mode in ("float32", "ours"):
            cells = kept["measured"][model][mode]
            low, high = cells["quartiles"]
            assert 0 < low <= cells["ms"] <= high
            assert "estimated_mb_temp" not in cells  # a CPU is nobody's target
    assert matplotlib.image.imread(folder / "rows.png").std() > 0


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")


@pytest.mark.slow
def test_failures_are_a_line_each(no_device, command):
    done, _ = command("--models", "decode", "--modes", "float32")
    assert done.returncode == 1
    assert "no_such_platform" in done.stdout and "Traceback" not in done.stdout
