"""On a CPU a value is read before it is rounded, in the pass that computes it.

Whole train steps of a small pre-norm network, run, and lowered for other platforms.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from helpers import choices, devices_of, relative_error, trace
from jax import lax
from programs import normal, weights

from jmp_rewrite import mixed_precision, use_passes

T, D, F = 64, 32, 96  # tokens, features, features of the hidden layer
LAYERS = 12
POLICIES = ["mixed_bfloat16", "mixed_float16"]


@pytest.fixture
def rounded():
    """Returns a function after which CPUs read what accelerators read."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(use_passes("-read_before_rounding"))


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def stream(params, x):
    """Many blocks, which change a residual stream little."""
    table, first, last, biases, _ = params
    x = x @ table
    for w, out, bias in zip(first, last, biases, strict=True):
        x = x + (jax.nn.silu(norm(x) @ w) @ out + bias[None]) * 0.1
    return x


def loss(params, x):
    return jnp.square(norm(stream(params, x)) @ params[-1]).mean()


def step(params, x):
    """Returns the new parameters, the loss, and the gradients."""
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value, grads


def arguments():
    layers = [weights(*[shape] * LAYERS) for shape in ((D, F), (F, D), (D,))]
    return (normal(12, D, seed=8), *layers, normal(D, 8, seed=9)), normal(T, 12)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_more_exact_on_a_cpu(policy, rounded):
    _, _, exact = jax.jit(step)(*arguments())

    def error():
        _, _, grads = jax.jit(mixed_precision(step, policy))(*arguments())
        return relative_error(grads, exact)

    on_a_cpu = error()
    rounded()
    assert on_a_cpu < 0.95 * error()  # 0.92 and 0.93; of a BERT 0.77


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("outside", [False, True], ids=["step", "gradient outside"])
def test_accelerators_run_the_same_program(outside, platform, policy, rounded):
    """What is read there is what was rounded; derivatives follow it."""

    def text():
        fun = step
        if outside:
            half = mixed_precision(loss, policy)
            fun = jax.grad(lambda params, x: half(params, x))
        else:
            fun = mixed_precision(step, policy)
        lowered = jax.jit(fun).trace(*arguments()).lower(lowering_platforms=(platform,))
        return lowered.as_text()

    before = text()
    rounded()
    assert text() == before


@pytest.mark.slow
def test_without_jit_it_is_the_same():
    compiled = jax.jit(mixed_precision(step, "mixed_bfloat16"))(*arguments())
    at_once = mixed_precision(step, "mixed_bfloat16")(*arguments())
    assert relative_error(at_once, compiled) < 1e-3


@jax.custom_vjp
def peak(h, top):
    """Returns `top`, the maxima of `h`; the gradient is theirs."""
    return top


def peak_backward(residuals, g):
    h, top = residuals
    which = (h == top).astype(h.dtype)
    return which * g / which.sum(-1, keepdims=True), jnp.zeros_like(top)


peak.defvjp(lambda h, top: (top, (h, top)), peak_backward)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_values_compared_in_the_backward_pass_are_read_rounded(policy):
    """If none equals the maximum, the gradient is 0 / 0."""

    def picked(params, x):
        h = stream(params, x)
        top = lax.stop_gradient(lax.reduce(h, -jnp.inf, lax.max, (1,)))[:, None]
        return jnp.square((norm(h) + peak(h, top)) @ params[-1]).mean()

    def descend(params, x):
        return jax.grad(picked)(params, x)

    lowered = jax.jit(mixed_precision(descend, policy)).lower(*arguments())
    options = {"xla_allow_excess_precision": False}  # or it leaves out the rounding
    half = lowered.compile(compiler_options=options)(*arguments())
    assert relative_error(half, descend(*arguments())) < 0.1


def test_unrounded_reads_are_reported():
    """It is a step of the rewritten program, with a name."""
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *arguments())
    found = choices(jaxpr, "read_before_rounding")
    assert found and {devices_of(e) for e in found} == {("cpu",)}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["prediction - label", "label - prediction"])
def test_a_bias_adds_up_unrounded_cotangents(order):
    """Residuals that cancel over a batch would leave the rounding."""
    w, b = jnp.asarray(normal(D, 4)) / D, jnp.zeros((1, 4))
    x, y = normal(T, D, seed=1), 100 * normal(T, 4, seed=2)

    def step(w, b, x, y):
        def loss(w, b):
            prediction = jnp.tanh(x) @ w + b
            signed = order == "prediction - label"
            return jnp.square(prediction - y if signed else y - prediction).mean()

        return jax.grad(loss, argnums=(0, 1))(w, b)

    args = w, b, x, y - y.mean(0, keepdims=True)
    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(*args)[1]
    assert relative_error(found, step(*args)[1]) < 0.02
