"""A scatter of one value a row into zeros is a comparison with an `iota`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from programs import normal

from jmp_rewrite import _compat, mixed_precision
from jmp_rewrite._passes import PASSES, Program, optimize

[OWN] = [p for p in PASSES if p.name == "scatter_as_select"]
X = jnp.asarray(normal(3, 4, 6))
VALUES = X[..., :1]
MODES = ("fill", "clip", "promise_in_bounds")


def transposed(read):
    """Returns the cotangent of `X` for the values that are read of it."""
    return lambda values, y: jax.vjp(lambda x: read(x, y), X)[1](values)[0]


def by_row(mode):
    return transposed(lambda x, y: jnp.take_along_axis(x, y, -1, mode=mode))


def by_arange(mode):
    def read(x, y):
        rows, columns = jnp.arange(3)[:, None], jnp.arange(4)
        return x.at[rows, columns, y[..., 0]].get(mode=mode)[..., None]

    return transposed(read)


def by_columns(mode):
    def read(x, y):
        return x.at[:, jnp.arange(4), y[0, :, 0]].get(mode=mode)[..., None]

    return transposed(read)


def mapped(mode):
    def row(x, y):
        return x.at[jnp.arange(4), y].get(mode=mode)

    return transposed(lambda x, y: jax.vmap(row)(x, y[..., 0])[..., None])


def whole_rows(mode):
    def write(values, y):
        rows = jnp.ones((3, 6)) * values[:, 0]
        return jnp.zeros((3, 4, 6)).at[jnp.arange(3), y[:, 0, 0]].set(rows, mode=mode)

    return write


def one_into_another(mode):
    """The updates of the second scatter are what the first one made."""

    def write(values, y):
        at = jnp.arange(3), y[:, 0, 0]
        rows = jnp.zeros((3, 6)).at[at].set(values[:, 0, 0], mode=mode)
        return jnp.zeros((3, 4, 6)).at[at].set(rows, mode=mode)

    return write


def inside_a_call(mode):
    return lambda values, y: jax.jit(by_arange(mode))(values, y)


SELECTED = (
    by_row,
    by_arange,
    by_columns,
    mapped,
    whole_rows,
    one_into_another,
    inside_a_call,
)


def optimized(fun, *args):
    """Returns a program after the pass, and how often that has edited."""
    closed = jax.make_jaxpr(fun)(*args)
    found = optimize(Program(closed, np.dtype(jnp.bfloat16), True), [OWN])
    jex.check_jaxpr(_compat.open_jaxpr(found.closed))
    return found.closed, found.done.get(OWN.name, 0)


def labels(mode, dtype):
    """Indices from far below to far above what is in range, where that is allowed."""
    least, most = (0, 4) if mode == "promise_in_bounds" else (-9, 9)
    least = max(least, np.iinfo(dtype).min)
    return np.random.default_rng(0).integers(least, most, (3, 4, 1)).astype(dtype)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fun", SELECTED)
def test_the_same_values_are_selected(fun, mode, dtype):
    args = (VALUES, jnp.asarray(labels(mode, dtype)))
    closed, edits = optimized(fun(mode), *args)
    assert edits
    assert "scatter" not in str(closed)
    (found,) = _compat.evaluate(closed, args)
    np.testing.assert_array_equal(found, fun(mode)(*args))


def several_a_row(values, y):
    return by_row("fill")(
        jnp.concatenate([values, values], -1), jnp.concatenate([y, y + 1], -1)
    )


def on_something(values, y):
    return X.at[jnp.arange(3), 1, y[:, 0, 0]].add(values[:, 0, 0])


def rows_that_may_meet(values, y):
    return jnp.zeros((3, 6)).at[jnp.arange(3) % 2, y[:, 0, 0]].add(values[:, 0, 0])


def some_of_the_rows(values, y):
    return jnp.zeros((3, 6)).at[jnp.arange(2), y[:2, 0, 0]].add(values[:2, 0, 0])


def another_origin(values, y):
    return jnp.zeros((3, 6)).at[jnp.arange(3) - 1, y[:, 0, 0]].add(values[:, 0, 0])


def places_that_a_scan_reads(values, y):
    """Of numbers that count along the stack, each iteration reads a part."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (3, 3), 0)

    def body(_, row):
        return None, jnp.zeros((3, 6)).at[row, y[:, 0, 0]].add(values[:, 0, 0])

    return jax.lax.scan(body, None, rows)[1]


def one_place_of_an_iteration(values, y):
    def body(_, row):
        return None, jnp.zeros((3, 6)).at[row, y[:, 0, 0]].add(values[:, 0, 0])

    return jax.lax.scan(body, None, jnp.arange(3))[1]


def one_place_many_times(values, y):
    rows, columns = jnp.broadcast_arrays(jnp.arange(1), y[:, 0, 0])
    return jnp.zeros((3, 6)).at[rows, columns].add(values[:, 0, 0])


def a_function(values, y):
    return jnp.zeros((3, 6)).at[jnp.arange(3), y[:, 0, 0]].apply(jnp.cos)


@pytest.mark.parametrize(
    "fun",
    [
        several_a_row,
        on_something,
        rows_that_may_meet,
        some_of_the_rows,
        another_origin,
        places_that_a_scan_reads,
        one_place_of_an_iteration,
        one_place_many_times,
        a_function,
    ],
)
def test_other_scatters_stay(fun):
    _, edits = optimized(fun, VALUES, jnp.asarray(labels("fill", np.int32)))
    assert not edits


wrap = jax.jit(lambda i: jnp.where(i < 0, i + 16, i))
turn = jax.jit(lambda a: a.T)


@pytest.mark.slow
@pytest.mark.parametrize(
    "indexed",
    [
        lambda h, x: h[wrap(wrap(jnp.arange(32) // 2))],
        lambda h, x: h[wrap(wrap(x[:, 0].astype(int)))],
        lambda h, x: turn(turn(h)).at[x[:, 0].astype(int)].add(jnp.tanh(h)),
    ],
    ids=["known", "data", "operand"],
)
def test_a_jitted_function_of_its_own_result(indexed):
    """A walk that enters a call leaves it there: it ended in a `RecursionError`."""

    def step(w, v, x):
        def loss(w):
            return jnp.square(indexed(jnp.tanh(x @ w), x) @ v).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    args = normal(8, 64), normal(64, 8), np.abs(normal(16, 8))
    want = step(*args)[1]
    half = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    np.testing.assert_allclose(half(*args)[1], want, rtol=0.05)
