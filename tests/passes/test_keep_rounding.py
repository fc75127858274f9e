"""On GPUs a rounded value is kept as such, unless XLA would write it nowhere."""

import jax
import jax.numpy as jnp
import pytest
from helpers import choices, trace, walk
from programs import normal, weights

from jmp_rewrite import mixed_precision
from jmp_rewrite._rules import COSTLY

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


@pytest.mark.slow
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


def tanh(h):
    return jnp.tanh(h + 1)


def silu(h):
    return jax.nn.silu(h + 1)


def softmax(h):
    return jax.nn.softmax(h)


def softmax_with_dropout(h):
    mask = jax.random.bernoulli(jax.random.key(0), 0.9, h.shape)
    return jnp.where(mask, jax.nn.softmax(h) / 0.9, 0)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (tanh, ["tanh"]),
        (silu, []),
        (softmax, []),
        (softmax_with_dropout, ["exp"]),
    ],
)
def test_what_is_not_computed_again_is_kept(function, kept):
    """A `tanh` is costly, and a softmax's kernel writes its exponential."""

    def step(params, x):
        def loss(params):
            w, v = params
            return jnp.square(function((x @ w) @ (x @ v).T) @ (x @ v)).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    params, x = [*weights((D, F), (D, F))], normal(4 * F, D)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    found = [made_by(jaxpr, e.invars[0]) for e in choices(jaxpr, "keep_rounding")]
    assert [name for name in found if name in COSTLY] == kept


@pytest.mark.slow
@pytest.mark.parametrize("grown", [True, False])
def test_what_has_grown_of_small_arrays_is_computed_again(grown):
    """Splines of degree two on seven intervals, by recursion."""
    knots = jnp.arange(8.0)[None, None] - 4

    def splines(x):
        b = ((x >= knots[..., :-1]) & (x < knots[..., 1:])).astype(jnp.float32)
        for n in (1, 2):
            left = (x - knots[..., : -n - 1]) * b[..., :-1]
            b = (left + (knots[..., n + 1 :] - x) * b[..., 1:]) / n
        return b

    def average(x):
        y = jnp.tanh(x)
        y = (y[..., :-1] + y[..., 1:]) / 2 * x[..., :-1]
        return (y[..., :-1] + y[..., 1:]) / 2

    def step(params, x):
        def loss(params):
            w, v = params
            h = x @ w
            h = splines(h[..., None]) if grown else average(h.reshape(T, D, 7))
            return jnp.square(h.reshape(T, -1) @ v).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    params = [*weights((D, D if grown else 7 * D), (5 * D, D))]
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, normal(T, D))
    rounded = [e.outvars[0].aval.shape for e in walk(jaxpr) if made_in_half(e)]
    assert (T, D, 6) in rounded
    kept = [e.outvars[0].aval.shape for e in choices(jaxpr, "keep_rounding")]
    assert ((T, D, 6) in kept) is not grown


def made_in_half(eqn):
    return bool(eqn.outvars) and eqn.outvars[0].aval.dtype == jnp.bfloat16


def made_by(jaxpr, value):
    """Returns the name of the primitive that makes a value, before it is cast."""
    (eqn,) = [e for e in walk(jaxpr) if value in e.outvars]
    cast = eqn.primitive.name in ("rounding", "convert_element_type")
    return made_by(jaxpr, eqn.invars[0]) if cast else eqn.primitive.name
