"""One value a row, taken from what arithmetic makes, and its cotangent's sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bit_equal, choices, eqns, trace, walk
from programs import normal, weights

from jmp_rewrite import full_precision, mixed_precision, use_passes

ROWS, WORDS, WIDTH = (3, 4), 24, 16
LABELS = jnp.asarray(np.random.RandomState(0).randint(0, WORDS, (*ROWS, 1)))
TWO = jnp.concatenate([LABELS, LABELS[..., ::-1, :]], -1)
OUTSIDE = LABELS.at[0, 0, 0].set(WORDS).at[1, 1, 0].set(-WORDS - 1)
OWN = "gather_first", "sum_of_scattered"
DEVICE = "TPU v5e"


def log_probability(logits, labels, **mode):
    log_p = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, labels, -1, **mode)


def capped(logits, labels):
    return log_probability(30 * jnp.tanh(logits / 30), labels)


def clipped(logits, labels):
    return log_probability(logits, labels, mode="clip")


def inside(logits, labels):
    return log_probability(logits, labels, mode="promise_in_bounds")


def scaled_by_row(logits, labels):
    return log_probability(logits * jnp.arange(1.0, 4.0)[:, None, None], labels)


PRIOR = jnp.log(jnp.arange(1.0, WORDS + 1))[None, None]


@jax.jit
def with_prior(logits):
    return jax.nn.log_softmax(logits + PRIOR)


def called(logits, labels):
    """By a call that holds a call alone."""
    log_p = jax.jit(jax.nn.log_softmax)(logits)
    return jnp.take_along_axis(log_p, labels, -1)


def captured(logits, labels):
    """By a call with a constant of its own."""
    return jnp.take_along_axis(with_prior(logits), labels, -1)


def step_of(read, labels, bias=True):
    def loss(params, x):
        first, second, shift = params
        logits = jnp.tanh(x @ first) @ second + (shift[None, None] if bias else 0.0)
        return -jnp.nanmean(read(logits, labels))

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    return mixed_precision(step, "mixed_bfloat16")


@pytest.mark.slow
def test_what_is_the_same_for_the_whole_batch():
    """JAX 0.12 adds (1, T, V) to (B, T, V) without a broadcast."""
    params, x = arguments()

    def loss(params, x):
        first, second, _ = params
        h = jnp.tanh(x @ first)
        logits = h @ second + h.mean(0, keepdims=True) @ second
        return -jnp.mean(log_probability(logits, LABELS))

    step = jax.value_and_grad(loss)
    with jax.numpy_rank_promotion("allow"), use_passes(device=DEVICE):
        found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, x)
    assert abs(found[0] - loss(params, x)) < 2**-6


def relaxed(logits, labels):
    for _ in range(24):
        logits = logits - 0.1 * jnp.tanh(logits)
    return log_probability(logits, labels)


@pytest.mark.slow
def test_what_is_read_by_many_ways_is_not_computed_again():
    """Its recipe would be as long as there are ways: 2 to the power of 24."""
    params, x = arguments()
    found = trace(step_of(relaxed, LABELS), params, x)
    assert not choices(found, "gather_first")
    assert sum(1 for _ in walk(found)) < 2_000


def arguments():
    first, second = weights((WIDTH, WIDTH), (WIDTH, WORDS))
    return [first, second, jnp.asarray(normal(WORDS))], jnp.asarray(
        normal(*ROWS, WIDTH)
    )


def traced(step, passes):
    with use_passes(passes, device=DEVICE):
        return trace(step, *arguments())


def traced_for_all(step, passes):
    with use_passes(passes):
        return trace(step, *arguments())


def run(step, passes):
    with use_passes(passes, device=DEVICE):
        return jax.jit(lambda *a: step(*a))(*arguments())


READS = (log_probability, capped, clipped, inside, scaled_by_row, called)
CASES = [
    *(functools.partial(step_of, read, LABELS) for read in READS),
    functools.partial(step_of, captured, LABELS),
    functools.partial(step_of, log_probability, LABELS, bias=False),
    functools.partial(step_of, log_probability, OUTSIDE),
    functools.partial(step_of, clipped, OUTSIDE),
    functools.partial(step_of, log_probability, TWO),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES)
def test_the_numbers_are_the_same(make):
    bit_equal(run(make(), ",".join(OWN)), run(make(), "none"))


def largest_read(jaxpr):
    """Returns the dtypes of the large arrays that gathers read, where it is run."""
    used = {id(v) for e in eqns(jaxpr, *NAMES) for v in e.invars}
    found = [e for e in eqns(jaxpr, "gather") if id(e.outvars[0]) in used]
    return {str(e.invars[0].aval.dtype) for e in found if e.invars[0].aval.ndim == 3}


NAMES = ("sub", "convert_element_type", "div", "add")


@pytest.mark.parametrize("read", READS)
def test_labels_are_looked_for_in_the_stored_logits(read):
    step = step_of(read, LABELS)
    assert largest_read(traced(step, "gather_first")) == {"bfloat16"}


@pytest.mark.slow
def test_a_sum_of_zeros_and_a_label_is_none_over_words():
    step = step_of(log_probability, LABELS)
    (chosen,) = choices(traced_for_all(step, "sum_of_scattered"), "sum_of_scattered")
    assert [v.aval.shape for v in chosen.outvars] == [ROWS]
    assert all(v.aval.shape[-1:] != (WORDS,) for v in chosen.invars)


@pytest.mark.slow
def test_two_labels_in_a_row_are_added_up():
    step = step_of(log_probability, jnp.concatenate([LABELS, LABELS], -1))
    bit_equal(run(step, "sum_of_scattered"), run(step, "none"))


@pytest.mark.slow
def test_a_call_with_a_wish_inside_stays_a_call():
    @jax.jit
    def scaled(logits, labels):
        with full_precision():
            scale = jnp.cos(labels.astype(jnp.float32))
        return logits * scale

    def asked(logits, labels):
        return jnp.take_along_axis(scaled(logits, labels), labels, -1)

    step = step_of(asked, LABELS)
    assert choices(traced_for_all(step_of(log_probability, LABELS), OWN[0]), OWN[0])
    assert not choices(traced_for_all(step, OWN[0]), OWN[0])


def test_what_no_product_stores_is_left_alone():
    def step(params, x):
        def loss(params):
            h = jnp.cumsum(x @ params[0], -1) * 2.0
            return jnp.take_along_axis(h, LABELS % WIDTH, -1).sum()

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    wanted = mixed_precision(step, "mixed_bfloat16")
    assert not choices(traced_for_all(wanted, "gather_first"), "gather_first")


def test_an_index_out_of_range_finds_no_number():
    """Also where all that is computed is the same along a row."""
    w, x = weights((16, 40))[0], jnp.asarray(normal(24, 16))

    def step(w, x):
        def loss(w):
            z = jnp.tanh(x @ w)
            z = z @ z.T @ z
            c = jnp.tanh(jnp.broadcast_to(z.mean(-1, keepdims=True), z.shape) * 2)
            labels = 2 * jnp.arange(24)[:, None]
            return jnp.nansum(jnp.take_along_axis(c, labels, 1, mode="fill"))

        return jax.value_and_grad(loss)(w)

    exact, _ = jax.jit(step)(w, x)
    with use_passes("all", device="TPU v5e"):
        found, _ = jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, x)
    assert abs(found - exact) < 0.05 * abs(exact)
