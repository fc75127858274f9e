"""Stored weights change no bit of other people's models: the zoo's forward passes.

`benchmarks/stored_bits.py` counts over all of them; here are those whose libraries the
tests need anyway.
"""

import importlib.util
import pathlib
import sys

import jax
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
QUICK = ("linen_cnn", "nnx_transformer", "equinox_gru")
LIBRARIES = ("linen_", "nnx_", "haiku_", "equinox_", "keras_")


def load(name):
    """Returns a module of the benchmarks, under its name there."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RESULTS, ZOO = load("results"), load("zoo_models")
BITS = load("stored_bits")
NAMES = [n for n in ZOO.PROGRAMS if n.startswith(LIBRARIES)]


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize("policy", BITS.POLICIES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES],
)
def test_stored_weights_change_no_bit(name, policy):
    bits = BITS.measure(ZOO.PROGRAMS[name](), policy)
    assert bits.numbers > 0 and bits.stored > 0
    assert bits.bytes_after < bits.bytes_before
    assert (bits.unstored_differ, bits.stored_differ) == (0, 0)
