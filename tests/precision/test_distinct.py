"""What moves values along distinct indices adds nothing up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import dtypes_out, eqns, relative_error
from jax import lax

from jmp_rewrite import mixed_precision, use_passes

N, D = 24, 16
KEYS = jax.random.normal(jax.random.key(0), (N,))
UPPER = np.triu_indices(D)


def rows(index):
    return lambda x, keys: x[index(keys)]


def joined(keys):
    """The places of all rows, and other ones beside them."""
    others = keys.astype(int) % 4
    return jnp.concatenate([jnp.arange(N)[:, None], others[:, None]], 1)


def columns(keys):
    return jnp.stack([keys, keys[::-1]] * 4, 1)


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
    "one column of joined ones": rows(lambda k: joined(k)[:, 1]),
    "one column, cut out by a number": rows(
        lambda k: lax.dynamic_index_in_dim(joined(k), k[0].astype(int), 1, False)
    ),
    "each by itself of joined ones": rows(lambda k: joined(k)[:, :, None][:, 1, 0]),
    "the third of three": rows(
        lambda k: lax.select_n(
            np.full(N, 2, np.int32),
            jnp.arange(N),
            jnp.argsort(k),
            jnp.zeros(N, int),
        )
    ),
    "the largest in each column": rows(
        lambda k: lax.top_k(columns(k), 1, axis=0)[1][0]
    ),
    "more than their dtype can count": lambda x, k: jax.ops.segment_sum(
        jnp.tile(x, (8, 1)), lax.iota(jnp.int8, 8 * N), 4 * N
    ),
    "from both ends": rows(lambda k: np.array([-1, N - 1])),
    "one coordinate of two": lambda x, k: x[
        jnp.argsort(k)[:D, None], jnp.zeros(2, int)
    ],
}


def step_of(take):
    """A step whose activations are taken by an index, and its arguments."""

    def step(w, x, keys):
        def loss(w):
            h = take(jnp.tanh(x @ w), keys)
            return jnp.mean(jnp.tanh(h @ jnp.ones((h.shape[-1], D)) / 9) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    x = jax.random.normal(jax.random.key(2), (N, 8))
    return step, (jnp.full((8, D), 0.2), x, KEYS)


def scatters(take, name):
    """The scatters of a step whose activations are taken by an index."""
    step, args = step_of(take)
    with use_passes("none"):
        decorated = mixed_precision(step, "mixed_bfloat16")
        return eqns(jax.make_jaxpr(decorated)(*args), name)


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


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("index", [*DISTINCT, *MEETING])
def test_no_update_is_lost(index):
    step, (w, *data) = step_of((DISTINCT | MEETING)[index])
    exact = w - step(w, *data)
    found = w - mixed_precision(step, "mixed_bfloat16")(w, *data)
    assert relative_error([found], [exact]) < 2**-5


def sets_rows(x, index):
    buffer = jnp.zeros((N, D))
    return buffer.at[index].set(x)


def sets_elements_of_it(x, index):
    return x.at[index, index % D].set(x[index % 4, 0] * 2.0)


def adds_to_it(x, index):
    return x.at[index].add(x * 2.0)


def picks_by_another_index(x, index):
    """What `set` becomes, but for the index that the numbers are gathered by."""
    numbers = lax.iota(jnp.uint32, N) + jnp.ones(N, jnp.uint32)
    found = jnp.zeros(N, jnp.uint32).at[index].set(numbers)[index[::-1]]
    kept = jnp.where((numbers == found)[:, None], x, jnp.zeros_like(x))
    return jnp.zeros_like(x).at[index].add(kept)


def step_that(changes):
    def step(w, x, index):
        def loss(w):
            h = changes(jnp.tanh(x @ w), index)
            return jnp.mean(jnp.tanh(h @ jnp.ones((D, D)) / 9) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    return step


X = jax.random.normal(jax.random.key(2), (N, 8))
W = jax.random.normal(jax.random.key(3), (8, D))
MEETS = jnp.arange(N) // 2  # each place has two updates


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("sets", [sets_rows, sets_elements_of_it])
def test_elements_that_are_set_are_moved_in_half(sets, policy):
    """JAX adds masked updates where a `set` is differentiated; one of them is kept."""
    step = mixed_precision(step_that(sets), policy)
    with use_passes("none"):
        jaxpr = jax.make_jaxpr(step)(W, X, MEETS)
    # The first one is of the forward pass.
    assert dtypes_out(eqns(jaxpr, "scatter-add")[0]) == [policy.removeprefix("mixed_")]
    expected = step_that(sets)(W, X, MEETS)
    np.testing.assert_allclose(step(W, X, MEETS), expected, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("adds", [adds_to_it, picks_by_another_index])
def test_what_is_added_is_no_element_that_is_set(adds):
    step = mixed_precision(step_that(adds), "mixed_bfloat16")
    with use_passes("none"):
        jaxpr = jax.make_jaxpr(step)(W, X, MEETS)
    assert dtypes_out(eqns(jaxpr, "scatter-add")[0]) == ["float32"]


@pytest.mark.parametrize(
    ("window", "stride", "dtype"),
    [(2, 2, "bfloat16"), (2, 3, "bfloat16"), (3, 2, "float32"), (1, 2, "bfloat16")],
)
def test_averages_of_windows_that_do_not_overlap_are_moved(window, stride, dtype):
    """Each element gets one share, so that the transposed sum adds nothing up."""

    @mixed_precision(policy="mixed_bfloat16")
    def step(w, x):
        def loss(w):
            h = jnp.tanh(x @ w)
            h = nn.pool(h, 0.0, lax.add, (window, 1), (stride, 1), "VALID") / 2.0
            return jnp.mean(jnp.tanh(h @ jnp.ones((D, D)) / 9) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    x = jax.random.normal(jax.random.key(2), (3, 17, 5, 8))
    with use_passes("none"):
        sums = eqns(jax.make_jaxpr(step)(jnp.ones((8, D)), x), "reduce_window_sum")
    (back,) = [e for e in sums if e.outvars[0].aval.shape == (3, 17, 5, D)]
    assert dtypes_out(back) == [dtype]
