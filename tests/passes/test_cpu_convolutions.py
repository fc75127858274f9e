"""A convolution on a CPU reads its weights rounded, as it reads stored ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import choices, trace
from programs import normal

from jmp_rewrite import mixed_precision, use_passes

BF16 = "mixed_bfloat16"
NUMBERS = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS
    )


def network(weights, x):
    first, second, third = weights
    h = jax.nn.relu(convolve(x, first))
    return jax.nn.relu(convolve(h, second)).mean((1, 2)) @ third


def in_a_call(weights, x):
    return jax.jit(network)(weights, x)


def in_a_loop(weights, x):
    first, second, third = weights

    def body(h, kernel):
        return h, jax.nn.relu(convolve(h, kernel)).mean((1, 2)) @ third

    h = jax.nn.relu(convolve(x, first))
    return jax.lax.scan(body, h, jnp.stack([second, 2 * second]))[1]


def arguments():
    # So many that XLA:CPU multiplies them in a kernel of YNNPACK.
    weights = normal(3, 3, 3, 16), normal(3, 3, 16, 32, seed=1), normal(32, 10, seed=2)
    return [jnp.asarray(w) for w in weights], jnp.asarray(normal(8, 16, 16, 3))


def rounded(weights):
    return [w.astype(jnp.bfloat16).astype(jnp.float32) for w in weights]


@pytest.mark.slow
@pytest.mark.parametrize("fun", [network, in_a_call, in_a_loop])
def test_weights_are_read_rounded(fun):
    weights, x = arguments()
    half = jax.jit(mixed_precision(fun, BF16))
    np.testing.assert_array_equal(half(weights, x), half(rounded(weights), x))


@pytest.mark.slow
def test_without_the_pass_a_compiler_reads_them_unrounded():
    """If this fails, XLA keeps roundings, and the pass is not needed any more."""
    weights, x = arguments()
    with use_passes("-cpu_convolutions"):
        half = jax.jit(mixed_precision(network, BF16))
        assert (half(weights, x) != half(rounded(weights), x)).any()


def test_computed_kernels_and_whole_steps_are_left_alone():
    weights, x = arguments()
    jaxpr = trace(mixed_precision(network, BF16), weights, x)
    # Both kernels, and the images; what is computed is no matter.
    assert len(choices(jaxpr, "cpu_convolutions")) == 3

    def step(weights, x):
        grads = jax.grad(lambda w: jnp.square(network(w, x)).mean())(weights)
        return jax.tree.map(jnp.subtract, weights, grads)

    jaxpr = trace(mixed_precision(step, BF16), weights, x)
    assert not choices(jaxpr, "cpu_convolutions")
    jaxpr = trace(mixed_precision(network, "mixed_float16"), weights, x)
    assert not choices(jaxpr, "cpu_convolutions")


@pytest.mark.slow
def test_it_is_differentiated_and_mapped():
    weights, x = arguments()
    half = mixed_precision(network, BF16)
    grads = jax.jit(jax.grad(lambda w: jnp.square(half(w, x)).mean()))(weights)
    exact = jax.grad(lambda w: jnp.square(network(w, x)).mean())(weights)
    for g, e in zip(grads, exact, strict=True):
        assert jnp.linalg.norm(g - e) < 0.02 * jnp.linalg.norm(e)
    mapped = jax.vmap(half, (None, 0))(weights, jnp.stack([x, x]))
    np.testing.assert_allclose(mapped[1], half(weights, x), rtol=0.02, atol=0.02)
