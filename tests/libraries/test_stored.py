"""Stored weights change no bit of other people's models: the zoo's forward passes.

`stored_bits.py` counts over all of them; here are those whose libraries the tests need
anyway.
"""

import jax
import pytest
import stored_bits
import zoo_models

QUICK = ("equinox_gru",)
LIBRARIES = ("linen_", "nnx_", "haiku_", "equinox_", "keras_")


NAMES = [n for n in zoo_models.PROGRAMS if n.startswith(LIBRARIES)]


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.clear_caches()  # one test compiles hundreds of programs


@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize("policy", stored_bits.POLICIES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES],
)
def test_stored_weights_change_no_bit(name, policy):
    bits = stored_bits.measure(zoo_models.PROGRAMS[name](), policy)
    assert bits.numbers > 0 and bits.stored > 0
    assert bits.bytes_after < bits.bytes_before
    assert (bits.unstored_differ, bits.stored_differ) == (0, 0)
