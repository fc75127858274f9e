"""The small arrays of a matrix product are transposed, not the large one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, HALF, bit_equal, eqns, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex
from programs import normal, weights

from jmp_rewrite import explain, mixed_precision, use_passes
from jmp_rewrite._passes import PASSES, Program
from jmp_rewrite._passes.edit import Editor

POLICIES = sorted(HALF)
(PASS,) = (p for p in PASSES if p.name == "transpose_operands")
B, T, G, N, D = 2, 8, 3, 2, 4  # examples, places, groups, queries of each, features


def grouped(q, k, v):
    scores = jnp.einsum("bqgnd,bkgd->bgnqk", q, k)
    return jnp.einsum("bgnqk,bkgd->bqgnd", jax.nn.softmax(scores), v)


def one_key(q, k, v):
    scores = jnp.einsum(
        "bqhd,bkd->bhqk", q.reshape(B, q.shape[1], -1, q.shape[-1]), k[:, :, 0]
    )
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores), v[:, :, 0])


def step_of(attend, places=T, features=D):
    def loss(params, x):
        wq, wk, wv, out = params
        q = (x @ wq).reshape(B, places, G, N, features)
        k, v = (
            (x @ wk).reshape(B, places, G, features),
            (x @ wv).reshape(B, places, G, features),
        )
        return jnp.square(attend(q, k, v).reshape(B, places, -1) @ out).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return loss, step


def arguments(places=T, features=D):
    d = features
    shapes = (d, G * N * d), (d, G * d), (d, G * d), (G * N * d, d)
    return [*weights(*shapes)], jnp.asarray(normal(B, places, d))


def large_transposes(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    sizes = [e.outvars[0].aval.size for e in eqns(closed, "transpose")]
    places = args[-1].shape[1]
    return [n for n in sizes if n >= B * places**2 * G * N]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attend", [grouped, one_key])
def test_scores_have_one_order(attend, policy):
    """In a whole step, in a decorated loss and in a forward function."""
    loss, small = step_of(attend)
    _, step = step_of(attend, 16, 8)  # of four features it would be a first layer's
    half, half_loss = mixed_precision(step, policy), mixed_precision(loss, policy)
    gradient = jax.grad(half_loss)
    sizes = {half: (16, 8), half_loss: (T, D), gradient: (T, D)}
    for fun, size in sizes.items():
        assert not large_transposes(fun, *arguments(*size))
        with use_passes("-transpose_operands"):
            assert large_transposes(fun, *arguments(*size))
    assert explain(step, policy)(*arguments(16, 8)).passes["transpose_operands"] >= 2
    params, x = arguments()
    found = jax.jit(mixed_precision(small, policy))(params, x)
    exact = small(params, x)
    outside = jax.jit(gradient)(params, x)
    for w, a, b, g in zip(params, found, exact, outside, strict=True):
        assert relative_error(a - w, b - w) < 8 * EPS[policy]
        assert relative_error(-g, b - w) < 8 * EPS[policy]


def read_twice(q, k, v):
    scores = jnp.einsum("bqgnd,bkgd->bgkqn", q, k)
    other = scores.transpose(0, 1, 4, 3, 2)
    p = jax.nn.softmax(other) + jnp.tanh(scores.transpose(0, 1, 4, 2, 3))
    return jnp.einsum("bgnqk,bkgd->bqgnd", p, v)


def interleaved(q, k, v):
    """Keys stand between queries' own dimensions: no product is in this order."""
    p = jax.nn.softmax(jnp.einsum("bqgnd,bkgd->bgnkq", q, k), axis=3)
    return jnp.einsum("bgnkq,bkgd->bqgnd", p, v)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [read_twice, interleaved])
def test_other_orders_are_left(attend):
    loss, step = step_of(attend)
    half = mixed_precision(step, "mixed_bfloat16")
    params, x = arguments()
    report = explain(mixed_precision(loss, "mixed_bfloat16"))(params, x)
    assert "transpose_operands" not in report.passes
    found, exact = jax.jit(half)(params, x), step(params, x)
    for w, a, b in zip(params, found, exact, strict=True):
        assert relative_error(a - w, b - w) < 8 * EPS["mixed_bfloat16"]


@st.composite
def products(draw):
    """A product of two arrays in any order of dimensions, and transposed in any."""
    shared, left, right = (draw(st.integers(0, 2)) for _ in range(3))
    names = iter("abcdefghij")
    batch, rows, columns = (
        "".join(itertools.islice(names, n)) for n in (shared, left, right)
    )
    summed = "".join(itertools.islice(names, draw(st.integers(1, 2))))
    sizes = {name: draw(st.integers(2, 4)) for name in rows + columns + batch}
    sizes |= dict.fromkeys(summed, 2)
    terms = (batch + rows + summed, batch + columns + summed, batch + rows + columns)
    orders = ["".join(draw(st.permutations(term))) for term in terms]
    return f"{orders[0]},{orders[1]}->{orders[2]}", sizes


def check(drawn):
    """To the bit: sums of small integers are exact in half."""
    spec, sizes = drawn
    one, other, result = spec.replace("->", ",").split(",")
    random = np.random.RandomState(len(spec))
    a, b, c = (
        random.randint(-2, 3, [sizes[n] for n in term]).astype(np.float32)
        for term in (one, other, result)
    )

    def fun(a, b, c):
        product, vjp = jax.vjp(lambda a, b: jnp.einsum(spec, a, b), a, b)
        return product, *vjp(c)

    program = Program(jax.make_jaxpr(fun)(a, b, c), np.dtype(jnp.bfloat16), False)
    editor = Editor(program)
    editor.run(PASS.name, PASS.run)
    found = jax.jit(jex.jaxpr_as_fun(editor.finish()))(a, b, c)
    expected = (
        np.einsum(spec, a, b),
        np.einsum(f"{result},{other}->{one}", c, b),
        np.einsum(f"{result},{one}->{other}", c, a),
    )
    bit_equal(found, list(map(np.asarray, expected)))
    return editor.done[PASS.name]


def edited(examples, derandomize):
    """Checks random products; returns in how many the pass has edited something."""
    edits = []

    @settings(max_examples=examples, deadline=None, derandomize=derandomize)
    @given(products())
    def each(drawn):
        edits.append(check(drawn))

    each()
    return sum(map(bool, edits))


@pytest.mark.slow
def test_any_product_in_any_order():
    assert edited(40, derandomize=True) >= 3


@pytest.mark.slow
def test_more_products_in_any_order():
    assert edited(300, derandomize=False) >= 20
