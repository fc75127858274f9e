"""What moves values along distinct indices adds nothing up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dtypes_out, eqns
from jax import lax

from jmp_rewrite import mixed_precision, use_passes

N, D = 24, 16
KEYS = jax.random.normal(jax.random.key(0), (N,))
UPPER = np.triu_indices(D)


def rows(index):
    return lambda x, keys: x[index(keys)]


DISTINCT = {
    "a permutation": rows(jnp.argsort),
    "its inverse": rows(lambda k: jnp.argsort(jnp.argsort(k))),
    "a part of one": rows(lambda k: jnp.argsort(k)[3:17][::-1]),
    "a drawn one": rows(lambda k: jax.random.permutation(jax.random.key(1), N)),
    "the largest": rows(lambda k: lax.top_k(k, 5)[1]),
    "each column by itself": lambda x, k: jax.vmap(lambda y: y[jnp.argsort(y)])(x.T),
    "columns": lambda x, k: x[:, jnp.argsort(k[:D])],
    "constants": rows(lambda k: np.array([5, 3, 9])),
    "an upper triangle": lambda x, k: (x.T @ x)[UPPER],
}
MEETING = {
    "an argument": rows(lambda k: k.astype(int)),
    "halved": rows(lambda k: jnp.argsort(k) // 2),
    "counted from the end": rows(lambda k: jnp.argsort(k) - N // 2),
    "clipped": lambda x, k: jnp.take(x, jnp.argsort(k) * 2, axis=0, mode="clip"),
    "a constant twice": rows(lambda k: np.array([5, 3, 5])),
    "from both ends": rows(lambda k: np.array([-1, N - 1])),
    "one coordinate of two": lambda x, k: x[
        jnp.argsort(k)[:D, None], jnp.zeros(2, int)
    ],
}


def scatters(take, name):
    """The scatters of a step whose activations are taken by an index."""

    @mixed_precision(policy="mixed_bfloat16")
    def step(w, x, keys):
        def loss(w):
            h = take(jnp.tanh(x @ w), keys)
            return jnp.mean(jnp.tanh(h @ jnp.ones((h.shape[-1], D)) / 9) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    x = jax.random.normal(jax.random.key(2), (N, 8))
    with use_passes("none"):
        return eqns(jax.make_jaxpr(step)(jnp.ones((8, D)), x, KEYS), name)


@pytest.mark.parametrize("index", DISTINCT)
def test_a_gradient_that_is_moved_is_moved_in_half(index):
    assert not scatters(DISTINCT[index], "scatter-add")
    (moved,) = scatters(DISTINCT[index], "scatter")
    assert dtypes_out(moved) == ["bfloat16"] and moved.params["unique_indices"]


@pytest.mark.breadth
@pytest.mark.parametrize("index", MEETING)
def test_a_gradient_that_may_be_added_up_is_added_up_in_float32(index):
    assert not scatters(MEETING[index], "scatter")
    for added in scatters(MEETING[index], "scatter-add"):
        assert dtypes_out(added) == ["float32"]
