"""On GPUs a rounded value is kept as such, unless XLA would write it nowhere."""

import jax
import jax.numpy as jnp
import pytest
from helpers import choices, trace
from programs import normal, weights

from jmp_rewrite import mixed_precision

T, D, F = 16, 8, 48


def of_one(h, g, out):
    e = jnp.exp(h - h.max(-1, keepdims=True))
    return jnp.log(e.sum(-1)) - jnp.square(e).mean(-1)


def through_a_call(h, g, out):
    return jax.jit(of_one)(h, g, out)


def of_two(h, g, out):
    e = jnp.exp(h - h.max(-1, keepdims=True)) * g
    return jnp.log(jnp.square(e).sum(-1)) - jnp.square(e).mean(-1)


def many_paths(h, g, out):
    """Doubled again and again: there are 2^60 ways back to the stored array."""
    h = h - h.max(-1, keepdims=True)
    for _ in range(60):
        h = 0.5 * h + 0.5 * h
    e = jnp.exp(h)
    return jnp.log(e.sum(-1)) - jnp.square(e).mean(-1)


def read_by_a_product(h, g, out):
    e = jnp.exp(h - h.max(-1, keepdims=True))
    return jnp.square(e) @ out + e @ out


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (of_one, 0),
        (through_a_call, 0),
        (many_paths, 0),
        (of_two, 1),
        (read_by_a_product, 1),
    ],
)
def test_an_exponential_of_one_stored_array_is_computed_again(function, kept):
    """Each kernel reads that array as it would read the exponential."""

    def step(params, x):
        def loss(params):
            w, v, out = params
            return function(x @ w, x @ v, out).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    params = [*weights((D, F), (D, F), (F, D))]
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, normal(T, D))
    found = choices(jaxpr, "keep_rounding")
    shapes = [e.outvars[0].aval.shape for e in found]
    assert bool(shapes.count((T, F))) == bool(kept), shapes
