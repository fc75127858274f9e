"""Equal computations are computed once, before anything is decided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALF, dtypes_in, eqns, open_jaxpr, products, relative_error
from jax import lax
from jax.extend import core as jex
from programs import normal, weights

from jmp_rewrite import Policy, _compat, explain, full_precision, mixed_precision
from jmp_rewrite._graph.equal import computed_once

T, D, F = 16, 24, 32


def generator(params, z):
    w, out = params
    h = z @ w
    h = (h - h.mean(0, keepdims=True)) * lax.rsqrt(jnp.var(h, 0, keepdims=True) + 1e-5)
    return jnp.tanh(jax.nn.silu(h) @ out)


def discriminator(params, x):
    w, out = params
    return jax.nn.softplus(jax.nn.leaky_relu(x @ w) @ out)


def gan(g, d, x, z, generate=generator, again=generator):
    """A step of a GAN: both losses are of the same fake images."""

    def d_loss(d):
        fake = lax.stop_gradient(generate(g, z))
        return discriminator(d, x).mean() - discriminator(d, fake).mean()

    def g_loss(g):
        return discriminator(d, again(g, z)).mean()

    (d_value, d_grads), (g_value, g_grads) = (
        jax.value_and_grad(d_loss)(d),
        jax.value_and_grad(g_loss)(g),
    )
    new = jax.tree.map(lambda w, s: w - s, (g, d), (g_grads, d_grads))
    return new, d_value, g_value


def arguments():
    g, d = weights((D, F), (F, D)), weights((D, F), (F, 1))
    return g, d, jnp.asarray(normal(T, D)), jnp.asarray(normal(T, D)) / 2


def once(step, *args, by_path=False):
    """Returns a step as it is and with equal computations once; checks the values."""
    closed = jax.make_jaxpr(step)(*args)
    merged = computed_once(closed, by_path)
    jex.check_jaxpr(open_jaxpr(merged))
    leaves = jax.tree.leaves(args)
    for a, b in zip(
        _compat.evaluate(merged, leaves), _compat.evaluate(closed, leaves), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert computed_once(merged, by_path) is merged
    return closed, merged


def is_same(step, *args, by_path=False):
    before, after = once(step, *args, by_path=by_path)
    return after is before


@pytest.mark.slow
def test_fake_images_are_made_once():
    """And judged once, where both losses judge them."""
    before, after = once(gan, *arguments())
    assert len(products(before)) - len(products(after)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALF)
def test_the_rewritten_step_holds_them_once(policy):
    args = arguments()
    rewritten = jax.make_jaxpr(mixed_precision(gan, policy))(*args)
    plain = jax.make_jaxpr(gan)(*args)
    assert len(products(plain)) - len(products(rewritten)) == 4
    found = mixed_precision(gan, policy)(*args)
    assert relative_error(found, gan(*args)) < 2**-5


@pytest.mark.slow
def test_in_float32_nothing_is_touched():
    args = arguments()
    assert str(jax.make_jaxpr(mixed_precision(gan, "float32"))(*args)) == str(
        jax.make_jaxpr(gan)(*args)
    )


@pytest.mark.slow
def test_a_loop_is_a_program_of_its_own():
    def epoch(g, d, x, z):
        def body(carry, row):
            return gan(*carry, row, z)[0], None

        return lax.scan(body, (g, d), x[None])[0]

    before, after = once(epoch, *arguments())
    assert len(products(before)) - len(products(after)) == 4


@pytest.mark.slow
def test_rematerialized_products_stay():
    def step(params, x):
        def loss(params):
            return jax.checkpoint(generator)(params, x).mean()

        return jax.grad(loss)(params)

    g, _, x, _ = arguments()
    assert is_same(step, g, x)


def apart(params, z):
    return generator(params, lax.optimization_barrier(z))


def asked(params, z):
    with full_precision():
        return generator(params, z)


def exact(params, z):
    w, out = params
    return jnp.matmul(z, w, precision="highest") @ out


def inner(params, z):
    return mixed_precision(generator, "float32")(params, z)


@pytest.mark.slow
@pytest.mark.parametrize("again", [apart, asked, exact, inner])
def test_products_that_a_user_tells_apart_are_other_values(again):
    def step(*args):
        return gan(*args, again=again)

    assert is_same(step, *arguments())


@pytest.mark.slow
def test_products_under_other_scopes_are_other_values():
    def step(*args):
        return gan(*args, again=jax.named_scope("second")(generator))

    args = arguments()
    assert not is_same(step, *args)
    assert is_same(step, *args, by_path=True)
    policy = Policy("mixed_bfloat16", scopes={"second": "float32"})
    dtypes = [
        dtypes_in(e)[0]
        for e in products(jax.make_jaxpr(mixed_precision(step, policy))(*args))
        if "second" in str(e.source_info.name_stack)
    ]
    assert dtypes and set(dtypes) == {"float32"}


def test_draws_are_equal_if_their_keys_are():
    def step(w, first, second):
        def loss(w, key):
            return jnp.tanh(jax.random.normal(key, (T, D)) @ w).mean()

        return jax.grad(loss)(w, first), loss(w, second)

    (w,), key = weights((D, F)), jax.random.key(0)
    assert is_same(step, w, key, jax.random.key(1))
    assert not is_same(lambda w, key: step(w, key, key), w, key)


def test_each_draw_of_a_stateful_generator_is_another_one():
    def step(w):
        return [lax.rng_uniform(0.0, 1.0, (T, D)) @ w for _ in range(2)]

    closed = jax.make_jaxpr(step)(*weights((D, F)))
    assert computed_once(closed) is closed


@pytest.mark.slow
def test_effects_happen_as_often_as_they_did(capfd):
    def noisy(params, z):
        h = z @ params[0]
        jax.debug.print("seen")
        return h @ params[1]

    def step(*args):
        return gan(*args, generate=noisy, again=noisy)

    args = arguments()
    assert not is_same(step, *args)
    capfd.readouterr()
    jax.block_until_ready(jax.jit(mixed_precision(step, "mixed_bfloat16"))(*args))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2


@jax.custom_jvp
def straight(x):
    return x


straight.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


@pytest.mark.slow
def test_before_differentiation_a_rule_stays_with_its_call():
    def loss(w, x):
        return (straight(x @ w) + x @ w).mean()

    (w,), x = weights((D, F)), jnp.asarray(normal(T, D))
    found = jax.grad(mixed_precision(loss, "mixed_bfloat16"))(w, x)
    assert relative_error(found, jax.grad(loss)(w, x)) < 2**-6


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(
    lambda x, w: (doubled(x, w), (x, w)),
    lambda read, g: (2 * g @ read[1].T, 2 * read[0].T @ g),
)


@pytest.mark.slow
def test_a_step_that_is_differentiated_keeps_its_rules():
    """Under `jit` nobody sees that somebody will."""
    (w,), x = weights((D, D)), jnp.asarray(normal(T, D))

    def step(w, x):
        def loss(w):
            return jnp.square(doubled(x, w) + jnp.tanh(x @ w)).mean()

        return w - jax.grad(loss)(w)

    def meta(step):
        return jax.grad(lambda w: jnp.square(jnp.tanh(x @ step(w, x))).mean())(w)

    found = meta(jax.jit(mixed_precision(step, "mixed_bfloat16")))
    assert relative_error(found, meta(step)) < 2**-5


@jax.custom_jvp
def rectified(x):
    return jnp.maximum(x, 0)


rectified.defjvp(
    lambda read, moved: (rectified(*read), jnp.where(read[0] > 0, moved[0], 0))
)


@jax.custom_jvp
def passed_through(x):
    return jnp.maximum(x, 0)


passed_through.defjvp(lambda read, moved: (passed_through(*read), moved[0]))


def network(w, v, x, activation=jnp.tanh):
    return activation(x @ w) @ v


def stopped_again(w, v, x):
    """A teacher that is the network itself, without a derivative."""
    return network(w, v, x), network(lax.stop_gradient(w), v, x)


def by_other_rules(w, v, x):
    return network(w, v, x, rectified), network(w, v, x, passed_through)


@pytest.mark.parametrize("outside", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("twice", [stopped_again, by_other_rules])
def test_a_step_with_forces_is_differentiated_as_it_is(twice, outside):
    """Its values are equal, and their derivatives are not."""
    (w, v), x = weights((D, D), (D, D)), jnp.asarray(normal(T, D))

    def loss(w, v, x):
        forces = jax.grad(lambda x: jnp.square(twice(w, v, x)[0]).sum())(x)
        first, second = twice(w, v, x)
        return (first * second).mean() + 0.01 * jnp.square(forces).mean(), forces

    half = outside(mixed_precision(loss, "mixed_bfloat16"))
    found, _ = jax.grad(half, has_aux=True)(w, v, x)
    right, _ = jax.grad(loss, has_aux=True)(w, v, x)
    assert relative_error(found, right) < 2**-5


def times(table):
    """A gain without a derivative, in a function that is jitted."""

    @jax.custom_jvp
    def scaled(x):
        return jax.jit(lambda x: x * table)(x)

    scaled.defjvp(lambda read, moved: (scaled(*read), moved[0]))
    return scaled


def with_gradient(table):
    """The other way round."""

    @jax.custom_jvp
    def passed(x):
        return jnp.tanh(x)

    passed.defjvp(
        lambda read, moved: (passed(*read), jax.jit(lambda t: t * table)(moved[0]))
    )
    return passed


@pytest.mark.parametrize("made", [times, with_gradient])
def test_what_differs_in_what_a_jitted_function_captured_is_not_equal(made):
    (w, v), x = weights((D, D), (D, D)), jnp.asarray(normal(T, D))
    first, second = (made(jnp.asarray(normal(T, D, seed=seed))) for seed in (1, 2))

    def loss(w, v, x):
        def network(activation, x):
            return activation(x @ w) @ v

        forces = jax.grad(lambda x: jnp.square(network(first, x)).sum())(x)
        both = network(first, x) * jnp.sin(network(second, x))
        return both.mean() + 0.01 * jnp.square(forces).mean()

    half = mixed_precision(loss, "mixed_bfloat16")
    assert relative_error(jax.jit(half)(w, v, x), loss(w, v, x)) < 2**-5
    found, right = (jax.grad(f)(w, v, x) for f in (jax.jit(half), loss))
    assert relative_error(found, right) < 2**-5


def test_equal_calls_of_one_rule_are_computed_once():
    """The rule calls a jitted function, and itself."""
    (w,), x = weights((D, F)), jnp.asarray(normal(T, D))
    scaled = times(jnp.asarray(normal(T, F)))

    def loss(w, x):
        return jnp.square(scaled(x @ w)).mean()

    def step(w, x):
        return jax.grad(loss)(w, x), loss(w, x)

    before, after = once(step, w, x)
    assert len(eqns(after, "dot_general")) < len(eqns(before, "dot_general"))


@jax.custom_jvp
def refusing(x):
    return jnp.tanh(x)


@refusing.defjvp
def _(read, moved):
    raise TypeError("not differentiable")


@jax.custom_jvp
def constant(x):
    return jnp.sign(x)


def zero(read, moved):
    out = constant(*read)
    return out, jax.custom_derivatives.zero_from_primal(out, symbolic_zeros=True)


constant.defjvp(zero, symbolic_zeros=True)


@pytest.mark.parametrize("fun", [refusing, constant])
def test_a_rule_that_nobody_asks_may_refuse(fun):
    (w,), x = weights((D, D)), jnp.asarray(normal(T, D))

    def step(w, x):
        g = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ w).mean())(w)
        return w - g, fun(x @ w).sum(0), fun(x @ w).mean()

    found = mixed_precision(step, "mixed_bfloat16")(w, x)
    assert relative_error(found[0] - w, step(w, x)[0] - w) < 2**-5


def distilled(w, x):
    """In bfloat16, as the user wrote it."""
    w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    own, stopped = jnp.tanh(x @ w) @ w, jnp.tanh(x @ lax.stop_gradient(w)) @ w
    return jnp.square((own - 0.9 * stopped).astype(jnp.float32) - 1).mean()


def test_what_is_stopped_in_half_is_told_apart_too():
    (w,), x = weights((D, D)), jnp.asarray(normal(T, D))

    def step(w, x):
        value, g = jax.value_and_grad(distilled)(w, x)
        return w - 0.1 * g, value + jnp.square(jnp.tanh(x @ w) @ w).mean()

    def meta(step):
        return jax.grad(lambda w: step(w, x)[1])(w)

    found = meta(jax.jit(mixed_precision(step, "mixed_bfloat16")))
    assert relative_error(found, meta(step)) < 2**-5


@pytest.mark.parametrize("says", [lambda x: None, lambda x: jax.debug.print("{}", x)])
def test_a_step_that_prints_is_merged_and_explained(says):
    (w,), x = weights((D, D)), jnp.asarray(normal(T, D))

    def step(w, x):
        def loss(w):
            stopped = lax.stop_gradient(w)
            own, target = network(w, w, x), network(stopped, stopped, x)
            return jnp.square(own - 0.9 * target - x).mean()

        value, g = jax.value_and_grad(loss)(w)
        says(value)
        return w - g, value

    rows = explain(step, "mixed_bfloat16")(w, x).equations
    assert sum(row.primitive == "dot_general" for row in rows) == 5


def test_results_without_a_name_can_be_read():
    """The second copy of what has several results may read more of them."""

    def step(w, x):
        def loss(w):
            values, _ = lax.top_k(jnp.tanh(x @ w), 2)
            return values.mean()

        def other(w):
            _, places = lax.top_k(jnp.tanh(x @ w), 2)
            return places

        return jax.grad(loss)(w), other(w)

    (w,), x = weights((D, F)), jnp.asarray(normal(T, D))
    before, after = once(step, w, x)
    assert len(eqns(after, "dot_general")) < len(eqns(before, "dot_general"))
