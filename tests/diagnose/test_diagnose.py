"""`diagnose` names the line, says why, and finds what mends it."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import normal

from jmp_rewrite import Policy, diagnose, mixed_precision

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "planted_faults.py"


def planted_faults():
    spec = importlib.util.spec_from_file_location("planted_faults", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


FAULTS = planted_faults()


@pytest.fixture(autouse=True)
def standard_promotion():
    """Other people's programs run under JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    ("fault", "policy"),
    [pytest.param(f, p, id=f"{f.name}-{p}") for f in FAULTS.FAULTS for p in f.dtypes],
)
def test_the_planted_line_is_named_first(fault, policy):
    """In a train step; and what is found to mend it does."""
    found = FAULTS.run(fault, policy)
    assert found["named"] == fault.line, found["why"]
    if found["found"] is not None:
        assert found["error after"] <= 0.25


def overflows(x, w):
    with jax.named_scope("first"):
        h = x @ w
    with jax.named_scope("second"):
        h = jnp.square(h)
    with jax.named_scope("third"):
        return h @ w


ARGS = (20 * jnp.ones((4, 16)), jnp.ones((16, 16)))


def test_a_policy_that_mends_it():
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    assert diagnosis.worst.primitive == "square"
    assert diagnosis.worst.scope == "second"
    assert diagnosis.worst.overflowed == 4 * 16
    assert diagnosis.first_nonfinite.index == diagnosis.worst.index
    assert diagnosis.error == np.inf
    mended = diagnose(overflows, diagnosis.policy)(*ARGS)
    assert mended.error == diagnosis.policy_error <= diagnosis.tolerance
    assert mended.policy == mended.diagnosed
    assert f"policy = jmpr.{diagnosis.policy!r}" in str(diagnosis)


def test_nothing_is_wrong():
    diagnosis = diagnose(overflows, "mixed_bfloat16")(*ARGS)
    assert diagnosis.error < diagnosis.tolerance
    assert diagnosis.policy == Policy("mixed_bfloat16")
    assert "no policy" not in str(diagnosis)


def test_what_is_not_finite_in_float32_either(monkeypatch):
    """It is said first, with the line, and no policy is offered."""
    monkeypatch.setenv("COLUMNS", "400")  # a long path is not folded

    def fun(x, w):
        h = x @ w
        return jnp.log(h - h) @ w

    diagnosis = diagnose(fun, "mixed_bfloat16")(*ARGS)
    line = diagnosis.spoilt.line
    assert diagnosis.is_spoilt and diagnosis.spoilt.primitive == "log"
    said = str(diagnosis).splitlines()
    assert said[1] == (
        f"in float32 as well results are Inf or NaN, from {line} on: no policy mends "
        "that"
    )
    assert said[2].startswith("error of the other results: 0, within")
    assert str(diagnosis).count("in float32 as well") == 1


def test_a_decorated_step_is_taken_as_it_is():
    """With its own policy, under `jit`, and it gives none of its arguments away."""
    decorated = mixed_precision(overflows, "mixed_float16")
    step = jax.jit(decorated, donate_argnums=0)
    x, w = ARGS[0] + 0, ARGS[1]
    diagnosis = diagnose(step)(x, w)
    assert diagnosis.diagnosed == Policy("mixed_float16")
    assert diagnosis.worst.scope == "second"
    assert not x.is_deleted()


def test_gradients_that_vanish_want_a_scale():
    x, w = normal(4, 16), normal(16, 16)
    grad = jax.grad(lambda w: 1e-9 * jnp.square(jnp.tanh(x @ w) @ w).mean())
    diagnosis = diagnose(grad, "mixed_float16")(w)
    assert "gradients vanish in float16: scale the loss" in str(diagnosis)
    assert "scale_loss" not in str(diagnose(grad, "mixed_bfloat16")(w))


def test_tolerance():
    exact = diagnose(overflows, "mixed_bfloat16", tolerance=1e-6)
    x = normal(4, 16)
    diagnosis = exact(x, normal(16, 16))
    assert diagnosis.error > diagnosis.tolerance == 1e-6
    assert diagnosis.policy_error <= 1e-6


@pytest.mark.parametrize("tolerance", [0, -1.0, np.nan, "small", True])
def test_no_tolerance(tolerance):
    with pytest.raises(ValueError, match="expected a tolerance above 0"):
        diagnose(overflows, "mixed_float16", tolerance=tolerance)


def test_no_function():
    with pytest.raises(TypeError, match="expected a function, got 3"):
        diagnose(3)


def test_inside_a_transformation():
    with pytest.raises(TypeError, match="diagnose"):
        jax.jit(lambda *args: diagnose(overflows, "mixed_float16")(*args).error)(*ARGS)


def test_pictures():
    plt = pytest.importorskip("matplotlib.pyplot")
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    figure = diagnosis.plot()
    assert any("square" in t.get_text() for a in figure.axes for t in a.texts)
    plt.close(figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "square" in diagnosis._repr_html_()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    with pytest.raises(ImportError, match=r"diagnosis.plot\(\) needs matplotlib"):
        diagnosis.plot()
