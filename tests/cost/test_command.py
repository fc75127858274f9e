"""`python -m jmp_rewrite estimate`."""

import re
import textwrap

import pytest

from jmp_rewrite.__main__ import main

MODULE = """
import jax, jax.numpy as jnp
import jmp_rewrite as jmpr

def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

def step(w, x):
    return jnp.tanh(x @ w) @ w

def job():
    return step, (array(16, 16), array(4, 16))

@jmpr.mixed_precision("mixed_float16")
def decorated(w, x):
    return step(w, x)

def three():
    return 3

def wrong():
    return step, (array(16, 15), array(4, 16))

number = 5
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    path = tmp_path / "job_of_a_user.py"
    path.write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "job_of_a_user"


def test_a_function_that_returns_function_and_arguments(job, compiler, capsys):
    main(["estimate", f"{job}:job", "--device", "v5e", "--device", "h200"])
    out = capsys.readouterr().out
    assert out.count("mixed_bfloat16") == 2 and "NVIDIA H200" in out


def test_a_file_and_shapes(job, compiler, capsys, tmp_path):
    shapes = ["--shapes", "f32[16,16]", "f32[4,16]"]
    page = ["--html", str(tmp_path / "cost.html")]
    main(["estimate", f"{job}.py:decorated", "--device", "v5e", *shapes, *page])
    assert "mixed_float16" in capsys.readouterr().out  # its own
    shapes += ["--policy", "mixed_bfloat16"]
    main(["estimate", f"{job}.py:decorated", "--device", "v5e", *shapes])
    assert "mixed_bfloat16" in capsys.readouterr().out
    assert "TPU v5e" in (tmp_path / "cost.html").read_text()


def test_the_largest_batch(job, compiler, capsys):
    arguments = [f"{job}:step", "--shapes", "f32[16,16]", "i32[4]"]
    with pytest.raises(SystemExit) as end:
        main(["estimate", *arguments, "--device", "v5e", "--largest-batch"])
    assert end.value.code == 2  # x is a vector of integers here
    compiler.answers = lambda job, usual: usual
    main(["estimate", f"{job}:job", "--device", "h200", "--policy", "bfloat16"])
    assert "mixed_bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:step"], r"takes arguments \(w, x\): give their types with --shapes"),
        (["{}:three"], r"expected to return \(function, arguments\), .* got int"),
        (["{}:nothing"], "has no function 'nothing'; it has: array, step, job"),
        (["{}:number"], "is no function but int"),
        (["{}"], r"expected MODULE:FUNCTION, as in train:job, got 'job_of_a_user'"),
        (["nowhere.py:job"], "there is no file 'nowhere.py'"),
        (["{}:step", "--shapes", "f33[2]"], r"as f32\[8,128\] or i32\[\], got 'f33"),
        (["{}:wrong"], "dot_general requires contracting dimensions"),
        (["{}:job", "--policy", "bf17"], "expected a policy"),
        (["{}:job", "--time-limit", "-1"], "expected seconds above 0, got '-1'"),
    ],
)
def test_bad_input_is_a_line(job, compiler, capsys, arguments, message):
    arguments = [a.format(job) for a in arguments]
    with pytest.raises(SystemExit) as end:
        main(["estimate", *arguments, "--device", "v5e"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert re.search(message, error)
    assert not compiler.jobs


@pytest.mark.parametrize("device", ["v5x", "v5e:4x4", "v5e:four"])
def test_a_bad_device_is_a_line(job, compiler, capsys, device):
    with pytest.raises(SystemExit) as end:
        main(["estimate", f"{job}:job", "--device", device])
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_module_that_is_not_there(job, compiler, capsys):
    with pytest.raises(SystemExit) as end:
        main(["estimate", "no_such_module:job", "--device", "v5e"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "there is no module 'no_such_module': is it on the path?" in said
    assert said.count("\n") == 1


def test_a_module_that_lacks_another(tmp_path, monkeypatch, compiler, capsys):
    """That is no bad argument: something is to be installed."""
    (tmp_path / "lacks_one.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["estimate", "lacks_one:job", "--device", "v5e"])
    assert end.value.code == 1
    assert "No module named 'no_such_module'" in capsys.readouterr().err


def test_failed_compilations_set_the_exit_code(job, compiler, capsys):
    from jmp_rewrite._cost.store import Compiled

    compiler.answers = lambda job, usual: Compiled("", {"error": "INTERNAL: broken"})
    with pytest.raises(SystemExit) as end:
        main(["estimate", f"{job}:job", "--device", "v5e"])
    assert end.value.code == 1 and "INTERNAL: broken" in capsys.readouterr().out


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["estimate", "--help"])
    assert end.value.code == 0 and "--device NAME" in capsys.readouterr().out
