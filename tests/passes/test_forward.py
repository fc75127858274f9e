"""What is stored of a softmax in functions that are no whole train steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import choices, devices_of, relative_error, trace
from jax import export
from programs import normal, weights

from jmp_rewrite import explain, for_inference, mixed_precision, use_passes
from jmp_rewrite._passes.by_device import TPU_V5E, TPU_V6E

BF16, T, D = "mixed_bfloat16", 16, 8
PASSES = ("softmax_in_one_kernel", "softmax_rounded")


def written_out(x):
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def attend(softmax, w, x):
    q, k, v = (x @ part for part in w)
    return softmax(q @ k.T) @ v


def arguments():
    return [w for w in weights((D, D), (D, D), (D, D))], jnp.asarray(normal(T, D))


def draws(count):
    """As `arguments`, with other numbers each time."""
    for key in jax.random.split(jax.random.key(0), count):
        *keys, last = jax.random.split(key, 4)
        w = [jax.random.normal(k, (D, D)) / D**0.5 for k in keys]
        yield w, jax.random.normal(last, (T, D))


def found(fun, *args, policy=BF16):
    jaxpr = trace(mixed_precision(fun, policy), *args)
    return [len(choices(jaxpr, name)) for name in PASSES]


both = pytest.mark.parametrize("softmax", [jax.nn.softmax, written_out])


@both
def test_an_attention_stores_its_exponentials_rounded(softmax):
    def fun(w, x):
        return attend(softmax, w, x)

    assert found(fun, *arguments()) == [1, 1]
    jaxpr = trace(mixed_precision(fun, BF16), *arguments())
    for name in PASSES:
        (choice,) = choices(jaxpr, name)
        assert devices_of(choice) == (TPU_V5E, TPU_V6E)
    assert found(fun, *arguments(), policy="mixed_float16")[1] == 0


@pytest.mark.slow
@both
def test_where_it_is_differentiated_nothing_is_left_of_it(softmax):
    """Its derivative would read the exact exponential beside the rounded one."""

    def fun(w, x):
        return jnp.square(attend(softmax, w, x)).sum()

    args = arguments()
    for half in (mixed_precision(fun, BF16), jax.jit(mixed_precision(fun, BF16))):
        for derivative in (jax.grad(half), jax.grad(jax.checkpoint(half))):
            jaxpr = trace(derivative, *args)
            assert [len(choices(jaxpr, name)) for name in PASSES] == [0, 0]
    mapped = jax.vmap(mixed_precision(fun, BF16), (None, 0))
    jaxpr = trace(mapped, args[0], jnp.stack([args[1]] * 2))
    assert len(choices(jaxpr, "softmax_rounded")) == 1


def test_exponentials_that_no_product_reads_are_left_alone():
    def shares(w, x):
        return jax.nn.softmax(x @ w[0])

    def loss(w, x):
        return jax.nn.logsumexp(x @ w[0], axis=-1)

    def read_elsewhere(w, x):
        p = jax.nn.softmax((x @ w[0]) @ x.T)
        return p @ x, p

    for fun in (shares, loss, read_elsewhere):
        assert found(fun, *arguments())[1] == 0


@pytest.mark.slow
@both
@pytest.mark.parametrize("device", ["TPU v5e", "TPU v6e"])
def test_it_is_as_exact_as_by_hand(softmax, device):
    """In the mean: one draw has 0.6 to 2.3 times the error, 16 have 0.96 to 1.17."""

    def fun(w, x):
        return attend(softmax, w, x)

    ours, by_hand = [], []
    for w, x in draws(8):
        with jax.enable_x64(True):
            exact = fun([np.float64(a) for a in w], np.float64(x))
        half = fun(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, x)))
        with use_passes("all", device=device):
            serve = for_inference(fun, BF16)
            one = jax.jit(serve)(w, x)
            two = jax.jit(serve)(*serve.store(w, x))
        np.testing.assert_array_equal(one, two)
        ours.append(relative_error(one, exact))
        by_hand.append(relative_error(half, exact))
    assert np.mean(ours) < 1.25 * np.mean(by_hand)
    assert max(ours) < 2**-6


# ---- what its derivative reads

DERIVATIVE = "softmax_derivative"
DEVICES = ("CPU", "NVIDIA H200", "TPU v5e", "TPU v6e")


def gradient_of(loss, w, x, passes="all", device=None):
    with use_passes(passes, device=device):
        return jax.jit(jax.grad(mixed_precision(loss, BF16)))(w, x)


def attention_loss(softmax):
    def loss(w, x):
        return jnp.square(attend(softmax, w, x)).sum()

    return loss


@pytest.mark.slow
@both
def test_a_derivative_reads_what_the_product_reads(softmax):
    """On GPUs: all scores that are kept in float32 are half numbers."""

    def is_half(passes):
        with use_passes(passes, device="NVIDIA H200"):
            half = mixed_precision(attention_loss(softmax), BF16)
            _, backward = jax.vjp(half, *arguments())
        kept = [x for x in jax.tree.leaves(backward) if x.shape == (T, T)]
        return all((jax.lax.reduce_precision(x, 8, 7) == x).all() for x in kept)

    assert is_half("all")
    assert not is_half(f"-{DERIVATIVE}")


@pytest.mark.slow
@both
@pytest.mark.parametrize("device", DEVICES)
def test_its_gradients_are_as_exact_as_without(softmax, device):
    loss, (w, x) = attention_loss(softmax), arguments()
    with jax.enable_x64(True):
        exact = jax.grad(loss)([np.float64(a) for a in w], np.float64(x))
    found, without = (
        gradient_of(loss, w, x, passes, device) for passes in ("all", f"-{DERIVATIVE}")
    )
    assert relative_error(found, exact) < 2**-6
    assert relative_error(found, exact) < 1.5 * relative_error(without, exact)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_common_to_a_row_of_cotangents_is_taken_off(device):
    """Values near 1000: their softmax hands back what they differ in alone."""

    def loss(w, x):
        p = jax.nn.softmax((x @ w[0]) @ x.T / 8)
        return jnp.square(p @ (1000 + x @ w[1])).sum() / 1e3

    w, x = arguments()
    with jax.enable_x64(True):
        exact = jax.grad(loss)([np.float64(a) for a in w], np.float64(x))
    found, without = (
        gradient_of(loss, w, x, passes, device)[0]
        for passes in ("all", f"-{DERIVATIVE}")
    )
    assert relative_error(found, exact[0]) <= 1.1 * relative_error(without, exact[0])


@pytest.mark.slow
@both
def test_undifferentiated_it_changes_no_bit(softmax):
    def fun(w, x):
        return attend(softmax, w, x)

    for device in DEVICES:
        results = []
        for passes in ("all", f"-{DERIVATIVE}"):
            with use_passes(passes, device=device):
                results.append(jax.jit(mixed_precision(fun, BF16))(*arguments()))
        np.testing.assert_array_equal(*results)


@pytest.mark.slow
@both
def test_higher_derivatives_maps_and_checkpoints_of_it(softmax):
    loss, (w, x) = attention_loss(softmax), arguments()
    half = mixed_precision(loss, BF16)

    def along(f):
        return jax.grad(lambda w: sum(g.sum() for g in jax.grad(f)(w, x)))(w)

    assert relative_error(jax.jit(along, static_argnums=0)(half), along(loss)) < 2**-4
    xs = jnp.stack([x, 2 * x])
    mapped = jax.vmap(jax.grad(half), (None, 0))(w, xs)
    each = [jax.grad(half)(w, x) for x in xs]
    expected = jax.tree.map(lambda *a: jnp.stack(a), *each)
    assert relative_error(mapped, expected) < 2**-7
    again = jax.grad(jax.checkpoint(half))(w, x)
    assert relative_error(again, jax.grad(half)(w, x)) < 2**-7
    primals, tangents = jax.jvp(half, (w, x), (w, x))
    assert relative_error(tangents, jax.jvp(loss, (w, x), (w, x))[1]) < 2**-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "divided",
    [
        lambda e: e / jax.lax.stop_gradient(e.sum(-1, keepdims=True)),
        lambda e: e / e.sum(-1)[None],
        lambda e: e / e.sum(-1)[::-1, None],
        lambda e: e / e.sum(-1)[0],
        lambda e: e / e.sum(0)[:, None],
    ],
)
def test_other_quotients_keep_their_derivative(divided):
    """The sum of another row, or one that is held constant."""

    def loss(w, x):
        scores = (x @ w[0]) @ x.T
        return jnp.square(divided(jnp.exp(scores)) @ (x @ w[1])).sum()

    w, x = arguments()
    assert DERIVATIVE not in explain(loss, BF16)(w, x).passes
    found = gradient_of(loss, w, x)
    assert relative_error(found, jax.grad(loss)(w, x)) < 2**-5


@pytest.mark.slow
@pytest.mark.parametrize("axes", [-1, 0, (0, 1)])
@pytest.mark.parametrize("ones", [False, True])
def test_softmaxes_over_any_axes_have_one(axes, ones):
    def loss(w, x):
        scores = (x @ w[0]) @ x.T
        scores = scores[:, None, None] if ones else scores
        axis = (0, -1) if ones and isinstance(axes, tuple) else axes
        p = jax.nn.softmax(scores, axis)
        return jnp.square(p @ (x @ w[1])).sum()

    w, x = arguments()
    assert explain(loss, BF16)(w, x).passes[DERIVATIVE] == 1
    assert relative_error(gradient_of(loss, w, x), jax.grad(loss)(w, x)) < 2**-5


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
def test_dropped_weights_have_one(masked):
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, (T, T))

    def loss(w, x):
        p = jax.nn.softmax((x @ w[0]) @ x.T)
        p = jnp.where(keep, p / 0.8, 0) if masked else p * (keep.astype(x.dtype) / 0.8)
        return jnp.square(p @ (x @ w[1])).sum()

    w, x = arguments()
    assert explain(loss, BF16)(w, x).passes[DERIVATIVE] == 1
    for device in DEVICES:
        found = gradient_of(loss, w, x, device=device)
        assert relative_error(found, jax.grad(loss)(w, x)) < 2**-5


@pytest.mark.slow
def test_attentions_of_symbolic_sizes_are_exported():
    def loss(w, x):
        return jnp.square(attend(jax.nn.softmax, w, x)).mean()

    w, x = arguments()
    (size,) = export.symbolic_shape("t")
    args = w, jax.ShapeDtypeStruct((size, D), jnp.float32)
    for fun in (mixed_precision(loss, BF16), jax.grad(mixed_precision(loss, BF16))):
        exported = export.export(jax.jit(fun))(*args)
        assert relative_error(exported.call(w, x), fun(w, x)) < 2**-7


@pytest.mark.slow
def test_whole_steps_and_what_a_loss_reads_have_none():
    def step(w, x):
        return jax.grad(attention_loss(jax.nn.softmax))(w, x)

    def read_by_the_loss(w, x):
        p = jax.nn.softmax((x @ w[0]) @ x.T)
        return jnp.square(p @ x).sum() + (p * jnp.log(p)).sum()

    def of_parameters(w, x):
        return (jax.nn.softmax(w[0]) @ (w[1] @ w[2])).sum()

    for fun in (step, read_by_the_loss, of_parameters):
        report = explain(fun, BF16)(*arguments())
        assert DERIVATIVE not in report.passes
    fun = attention_loss(jax.nn.softmax)
    assert explain(fun, BF16)(*arguments()).passes[DERIVATIVE] == 1
