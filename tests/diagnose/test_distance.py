"""How far two arrays are apart: against the definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_rewrite._diagnose.counts import ORDINARY, SPOILT, UNKNOWN, Counts, joined
from jmp_rewrite._diagnose.distance import (
    BINS,
    LOWEST,
    SAMPLE,
    Measured,
    exponents,
    measure,
)

# Sums of a thousand float32 numbers are exact to a thousand roundings.
CLOSE = 1e-4


def error(x, reference):
    """The definition: the larger one of two relative errors, each at most 1."""
    x, r = np.float64(x), np.float64(reference)
    with np.errstate(all="ignore"):
        own = np.minimum(np.abs(x - r) / np.abs(r), 1)
    own[x == r] = 0
    occupied = (x != 0) | (r != 0)
    mean = own[occupied].mean() if occupied.any() else 0
    norm = np.linalg.norm(x - r) / np.linalg.norm(r) if r.any() else 0
    return max(mean, min(norm, 1))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def counted(value, reference, inherited=(), exact=(), terms=()):
    """Counts on the host and in a jaxpr, and asserts that both say the same."""
    arrays = Measured([value], [reference], list(exact), list(terms))
    host = Counts(*map(float, measure(arrays, inherited)[1]))
    traced = jax.jit(lambda a, i: measure(a, i))(arrays, list(inherited))
    np.testing.assert_allclose(host, Counts(*traced[1]), rtol=CLOSE, atol=1e-7)
    assert float(traced[0]) == pytest.approx(host.error, rel=CLOSE)
    return host


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(), (7,), (16, 33), (0,)])
def test_error(dtype, shape):
    reference = jnp.asarray(numbers(*shape) if shape else np.float32(1.3))
    value = (reference * np.float32(1.01)).astype(dtype)
    counts = counted(value, reference)
    flat = [np.asarray(x, np.float64).reshape(-1) for x in (value, reference)]
    assert counts.error == pytest.approx(error(*flat), rel=CLOSE)
    assert counts.size == reference.size
    assert counts.left == counts.right == UNKNOWN


def test_a_mask_hides_nothing():
    """By the norm alone the error of the numbers beside -1e9 would be 1e-9."""
    reference = np.concatenate([numbers(100), np.full(100, -1e9, "f4")])
    value = np.where(np.abs(reference) < 100, reference * np.float32(1.1), reference)
    assert counted(value, reference).error == pytest.approx(0.05, rel=CLOSE)


def test_large_elements_weigh():
    """By the mean alone one lost element in a thousand would be 1e-3."""
    reference = np.ones(1000, "f4")
    reference[3] = 1e3
    value = reference.copy()
    value[3] = 0
    assert counted(value, reference).error > 0.7


def test_no_square_leaves_the_range():
    reference = np.full(10, 3e38, "f4")
    assert counted(reference * np.float32(0.5), reference).error == pytest.approx(0.5)


def test_overflow_and_underflow():
    reference = jnp.asarray([1e5, 1.0, 1e-9, 0.0, np.inf], jnp.float32)
    exact = jnp.asarray([1e5, 1.0, 1e-9, 0.0, 1.0], jnp.float32)
    value = jnp.asarray([np.inf, 1.0, 0.0, 0.0, np.inf], jnp.float16)
    counts = counted(value, reference, exact=[exact])
    assert counts.nonfinite == 1 and counts.overflowed == 2
    assert counts.zeroed == 1 and counts.underflowed == 1
    assert counts.nonfinite_before == 1
    assert SPOILT < counts.error <= SPOILT + 1
    assert counts.largest == pytest.approx(1e5)


def test_integers_are_right_or_wrong():
    counts = counted(np.array([1, 2, 3, 4]), np.array([1, 2, 0, 0]))
    assert counts.error == 0.5 and counts.nonfinite == 0


def test_errors_of_operands_are_no_error_of_the_equation():
    """An error up to eight times theirs is theirs."""
    reference = np.ones(100, "f4")
    value = reference * np.float32(1.5)
    for inherited, expected in ((0.5 / ORDINARY, 0.0), (0.01, 0.5 - 0.01 * ORDINARY)):
        counts = counted(value, reference, [np.float32(inherited)])
        assert counts.appeared == pytest.approx(expected, abs=CLOSE)


def test_new_infinities_appear_once():
    reference, value = np.ones(4, "f4"), np.full(4, np.inf, "f4")
    assert counted(value, reference, [np.float32(0)]).appeared >= SPOILT
    handed_on = counted(value, reference, [np.float32(SPOILT + 1)])
    assert handed_on.appeared < SPOILT


def test_a_term_explains_what_it_brings():
    """One that is all noise, and small, explains nothing of a sum's error."""
    large, noise = np.ones(100, "f4"), np.full(100, 1e-6, "f4")
    reference = large + noise
    value = reference * np.float32(1.2)
    terms = [(large, large, None), (-noise, noise, None)]
    counts = counted(value, reference, [np.float32(0), np.float32(1)], terms=terms)
    assert counts.left == 0 and counts.right == pytest.approx(2e-6, rel=0.2)
    assert counts.appeared == pytest.approx(0.2, rel=1e-3)


def test_a_choice_takes_errors_from_what_it_chooses():
    chosen = np.arange(100) < 50
    one, other = numbers(100), numbers(100, seed=1)
    reference = np.where(chosen, one, other)
    wrong = one * np.float32(2)
    inherited = [np.float32(1), np.float32(0)]
    terms = [(wrong, one, chosen), (other, other, ~chosen)]
    counts = counted(reference, reference, inherited, terms=terms)
    expected = error(np.where(chosen, wrong, other), reference)
    assert counts.left == pytest.approx(expected, rel=CLOSE) and counts.right == 0
    terms = [(wrong, one, np.zeros(100, bool)), (other, other, np.ones(100, bool))]
    assert counted(reference, reference, inherited, terms=terms).left == 0


def test_large_arrays_are_sampled_but_for_infinities():
    reference = numbers(8 * SAMPLE + 3)
    value = reference.copy()
    value[1] = np.inf  # the sample takes every ninth
    counts = counted(jnp.asarray(value), jnp.asarray(reference))
    assert counts.nonfinite == 1 and counts.error >= SPOILT
    value = reference * np.float32(1.01)
    value[: len(value) // 2] = 0
    counts = counted(jnp.asarray(value), jnp.asarray(reference))
    assert counts.error == pytest.approx(0.7, abs=0.05)
    assert counts.zeroed == pytest.approx(len(value) / 2, rel=0.01)


def test_several_results_are_one_equation():
    one, two = np.ones(4, "f4"), np.ones(6, "f4")
    arrays = Measured([one * np.float32(1.1), two], [one, two])
    counts = Counts(*measure(arrays)[1])
    assert counts.error == pytest.approx(0.1, rel=CLOSE) and counts.size == 10


def test_iterations_add_up():
    first = np.array(Counts(error=0.1, appeared=0.1, overflowed=1, size=4), "f4")
    second = np.array(Counts(error=0.2, appeared=0.3, overflowed=2, size=4), "f4")
    counts, where = joined(first, np.array([0]), second, np.array([1]))
    counts = Counts(*counts)
    assert counts.error == np.float32(0.2) and counts.overflowed == 3
    assert counts.size == 8 and where.tolist() == [1]
    counts, where = joined(second, np.array([1]), first, np.array([2]))
    assert where.tolist() == [1]


def test_exponents():
    x = np.array([0, 1, -1.5, 2.0**-24, 3e-24, np.inf, np.nan, 1e30], "f4")
    found = exponents(x)
    np.testing.assert_array_equal(found, jax.jit(exponents)(x))
    expected = {0: 2, -24: 1, LOWEST: 1, LOWEST + BINS - 1: 1}
    assert {i + LOWEST: n for i, n in enumerate(found) if n} == expected
