"""What TPUs store of a softmax in a function that nobody differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import choices, devices_of, relative_error, trace
from programs import normal, weights

from jmp_rewrite import for_inference, mixed_precision, use_passes
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


@both
def test_it_is_as_exact_as_by_hand(softmax):
    def fun(w, x):
        return attend(softmax, w, x)

    w, x = arguments()
    by_hand = fun(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, x)))
    with jax.enable_x64(True):
        exact = fun([np.float64(a) for a in w], np.float64(x))
    for device in ("TPU v5e", "TPU v6e"):
        with use_passes("all", device=device):
            serve = for_inference(fun, BF16)
            one = jax.jit(serve)(w, x)
            two = jax.jit(serve)(*serve.store(w, x))
        np.testing.assert_array_equal(one, two)
        assert relative_error(one, exact) < relative_error(by_hand, exact)
        assert relative_error(one, exact) < 2**-7
