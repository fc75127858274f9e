"""A sum over many axes is taken of the sum over fewer that is there already."""

import jax
import jax.numpy as jnp
import pytest
from helpers import EPS, HALF, dtypes_in, eqns, relative_error, trace
from jax import lax
from programs import normal, weights

from jmp_rewrite import diagnose, explain, mixed_precision, use_passes

POLICIES = sorted(HALF)
N, T, D = 4, 16, 24  # examples, places, features


def conditioned(params, x, time):
    """A bias, and what a time adds to each example: a block of a diffusion model."""
    first, bias, shift, last = params
    h = x @ first + bias[None, None]
    h = jnp.tanh(h + jnp.tanh(time @ shift)[:, None])
    return jnp.square(h @ last).mean()


def gradient_step(loss):
    def step(params, *batch):
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def arguments():
    params = weights((D, 32), (32,), (8, 32), (32, D))
    return params, normal(N, T, D), normal(N, 8)


def sums(jaxpr):
    """Returns (operand's shape, axes) of each sum."""
    found = eqns(jaxpr, "reduce_sum")
    return [(e.invars[0].aval.shape, e.params["axes"]) for e in found]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bias_gradient_is_the_sum_of_a_shifts(policy):
    """The cotangent is read once, and added up unrounded."""
    step = gradient_step(conditioned)
    whole, rewritten = (
        trace(f, *arguments()) for f in (step, mixed_precision(step, policy))
    )
    large, partial = ((N, T, 32), (0, 1)), ((N, 32), (0,))
    assert large in sums(whole) and partial not in sums(whole)
    assert partial in sums(rewritten) and large not in sums(rewritten)
    (sum_of_sums,) = [
        e for e in eqns(rewritten, "reduce_sum") if e.invars[0].aval.shape == (N, 32)
    ]
    assert dtypes_in(sum_of_sums) == ["float32"]
    found = eqns(rewritten, "by_device")
    (kept,) = [e for e in found if e.outvars == sum_of_sums.invars]
    assert [b.where.devices for b in kept.params["branches"]] == [("tpu",)]
    assert dtypes_in(kept) == ["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradients_are_as_good(policy):
    step = gradient_step(conditioned)
    reference = step(*arguments())
    for device in ("CPU", "TPU v5e"):
        with use_passes(device=device):
            values = mixed_precision(step, policy)(*arguments())
        assert relative_error(values, reference) < EPS[policy]


def test_partial_sums_are_smaller_than_their_array():
    """A sum over an axis of two would have to be written; another order is no part."""
    x = normal(6, 2, 3)

    def step(w, x):
        return [
            w - y.sum() for y in (x.sum(1), x.sum((1, 2)), x.sum((0, 1)), x.sum())
        ] + [w @ w]

    w = normal(6, 6)
    found = sums(trace(mixed_precision(step, "mixed_bfloat16"), w, x))
    assert ((6, 2, 3), (1,)) in found
    assert ((6, 2, 3), (1, 2)) in found  # smaller by 6
    assert ((6, 2, 3), (0, 1)) in found  # smaller by 12
    assert ((6, 2, 3), (0, 1, 2)) not in found
    assert ((3,), (0,)) in found


@pytest.mark.slow
def test_sums_in_a_scan_are_of_the_same_iteration():
    def loss(params, x, time):
        def body(carry, row):
            return carry + conditioned(params, row[None], time[:1]), None

        return lax.scan(body, 0.0, x)[0]

    step = gradient_step(loss)
    args = arguments()
    reference = step(*args)
    values = mixed_precision(step, "mixed_bfloat16")(*args)
    assert relative_error(values, reference) < EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_reports_know_partial_sums():
    step = gradient_step(conditioned)
    report = explain(step, "mixed_bfloat16")(*arguments())
    plain = explain(step, "float32")(*arguments())
    assert report.flops == plain.flops
    sums, all_sums = (
        [e for e in r.equations if e.primitive == "reduce_sum"] for r in (report, plain)
    )
    assert len(sums) == len(all_sums)  # none is taken for one that was inserted
    assert {e.line for e in sums} == {e.line for e in all_sums}
    diagnosis = diagnose(step, "mixed_bfloat16")(*arguments())
    assert max(diagnosis.results.values()) < diagnosis.tolerance
