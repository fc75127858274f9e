"""Scores of few places are read in float32 on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bit_equal, choices, relative_error, trace
from programs import normal, weights

from jmp_rewrite import mixed_precision, use_passes

HEADS, FEATURES = 2, 8
WIDTH = HEADS * FEATURES


def causal(scores):
    seen = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(seen, scores, -1e30))


def step_of(weigh):
    def loss(params, x):
        w, out = params
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * FEATURES**-0.5
        h = jnp.einsum("bhqk,bkhd->bqhd", weigh(scores), v)
        return jnp.square(h.reshape(*x.shape[:2], -1) @ out).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def arguments(places):
    return weights((WIDTH, 3 * WIDTH), (WIDTH, WIDTH)), normal(2, places, WIDTH)


def edits(weigh, places, name="narrow_products"):
    step = mixed_precision(step_of(weigh), "mixed_bfloat16")
    with use_passes(name):
        return choices(trace(step, *arguments(places)), name)


@pytest.mark.parametrize("weigh", [jax.nn.softmax, causal])
def test_scores_of_few_places(weigh):
    (found,) = edits(weigh, 24)
    assert found.outvars[0].aval.dtype == np.float32
    assert found.outvars[0].aval.shape == (2, HEADS, 24, 24)


def test_more_places_than_lanes():
    assert not edits(jax.nn.softmax, 136)


@pytest.mark.parametrize("places", [24, 136])
def test_features_are_summed_where_keys_fill_the_lanes(places):
    found = edits(jax.nn.softmax, places, "attention_feature_sums")
    assert len(found) == (places == 136)


def test_a_product_without_a_softmax():
    assert not edits(jnp.tanh, 24)


@pytest.mark.slow
def test_it_rounds_less_and_on_tpus_alone():
    step = step_of(causal)
    mixed = mixed_precision(step, "mixed_bfloat16")
    args = arguments(24)

    def changes(passes, device):
        with use_passes(passes, device=device):
            new = jax.jit(lambda *a: mixed(*a))(*args)
        return [n - w for n, w in zip(new, args[0], strict=True)]

    exact = [n - w for n, w in zip(step(*args), args[0], strict=True)]
    before, after = (changes(p, "TPU v5e") for p in ("none", "narrow_products"))
    assert relative_error(after, exact) < 1.1 * relative_error(before, exact)
    with pytest.raises(AssertionError):
        bit_equal(before, after)
    for device in ("CPU", "NVIDIA H200"):
        bit_equal(changes("none", device), changes("narrow_products", device))
