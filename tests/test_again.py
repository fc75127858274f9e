"""What a backward pass computes again: activation functions of what is stored anyway.

Whole train steps of small models, judged on the rewritten jaxpr, and run with what is
computed again in place of what is stored, as a GPU or a TPU v5e runs them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dtypes_in, eqns, trace, walk
from programs import normal, weights

from jmp_rewrite import _compat, mixed_precision

T, D, F = 16, 32, 48  # tokens, features, features of the hidden layer
GPU, TPU_V5E = "cuda", "TPU v5 lite"


def exact_gelu(h):
    return jax.nn.gelu(h, approximate=False)


def written_gelu(h):
    return 0.5 * h * (1.0 + jax.lax.erf(h * 0.5**0.5))


def step_of(activation, *, gated=False, biased=True):
    """Returns an SGD step of a hidden layer, and its arguments."""
    w, gate, out = weights((D, F), (D, F), (F, D))
    (bias,) = weights((F,))

    def loss(params, x):
        w, gate, bias, out = params
        y = activation(x @ w + bias[None] if biased else x @ w)
        y = y * (x @ gate) if gated else y
        return jnp.square(y @ out).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step, [w, gate, bias, out], normal(T, D)


def variables(eqn):
    return [v for v in eqn.invars if not hasattr(v, "val")]


def bits(x):
    return np.asarray(x).tobytes()


def restored(step, params, x):
    """Returns what is computed again: (dtype, name of what reads it) -> devices."""
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    found = {}
    for eqn in eqns(jaxpr, "restore"):
        (out,) = eqn.outvars
        for reader in (e for e in walk(jaxpr) if out in variables(e)):
            key = out.aval.dtype.name, reader.primitive.name
            found[key] = frozenset(eqn.params["on"])
    return found


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [exact_gelu, written_gelu])
def test_erf_is_computed_again(activation, biased):
    """On GPUs where the backward pass reads it, on a TPU v5e its product as well."""
    found = restored(*step_of(activation, biased=biased))
    assert found.pop(("float32", "mul")) == {GPU, TPU_V5E}
    # The weight gradient's operand, as it is or behind what XLA:CPU needs.
    (((dtype, _), devices),) = found.items()
    assert dtype == "bfloat16" and devices == {TPU_V5E}


def test_tanh_is_computed_again_on_gpus():
    found = restored(*step_of(jax.nn.gelu))
    assert found and set(found.values()) == {frozenset({GPU})}


def test_what_is_computed_again_starts_from_what_is_stored():
    """From the product's rounded result, behind a barrier; no product runs twice."""
    step, params, x = step_of(exact_gelu, gated=True)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    barriers = eqns(jaxpr, "optimization_barrier")
    assert [dtypes_in(e) for e in barriers] == [["bfloat16"], ["bfloat16"]]
    products = eqns(jaxpr, "dot_general")
    made = {v for e in products for v in e.outvars}
    assert all(v in made for e in barriers for v in e.invars)
    assert len(products) == len(eqns(trace(step, params, x), "dot_general"))


def transformed(h):
    return jnp.fft.irfft(jnp.fft.rfft(h), n=F)


def test_only_arithmetic_is_computed_again():
    """A transform between the product and the function is not run twice."""
    step, params, x = step_of(lambda h: exact_gelu(transformed(h)))
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    assert len(eqns(jaxpr, "fft")) == len(eqns(trace(step, params, x), "fft"))
    assert not restored(step, params, x)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.lax.erf])
def test_an_argument_is_not_kept_for_it(activation):
    """The derivative of `tanh` is made of its result, that of `erf` of an `exp`."""
    assert not restored(*step_of(activation))


@pytest.mark.parametrize("activation", [exact_gelu, written_gelu, jax.nn.gelu])
@pytest.mark.parametrize("gated", [False, True])
def test_the_gradient_is_as_good_where_it_is_computed_again(
    activation, gated, monkeypatch
):
    step, params, x = step_of(activation, gated=gated)

    def error():
        half = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, x)
        full = step(params, x)
        return [
            jnp.linalg.norm(a - b) / jnp.linalg.norm(b - w)
            for a, b, w in zip(half, full, params, strict=True)
            if (b != w).any()
        ]

    stored = error()
    monkeypatch.setattr(_compat, "restore", lambda stored, again, on: again)
    again = error()
    assert again != stored
    for a, b in zip(again, stored, strict=True):
        assert a < 1.1 * b  # other roundings, up to 1.07 times as far off here


def test_nothing_is_computed_again_in_a_loop():
    """What a scan stacks is read from the stack."""
    step, params, x = step_of(exact_gelu)

    def scanned(params, x):
        def loss(params):
            def body(x, _):
                w, _, bias, out = params
                return jnp.tanh(exact_gelu(x @ w + bias[None]) @ out), None

            return jnp.square(jax.lax.scan(body, x, length=3)[0]).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    assert eqns(trace(scanned, params, x), "scan")
    assert not restored(scanned, params, x)


def test_a_checkpoint_is_left_to_itself():
    """It says what to keep, and what to compute again."""
    step, params, x = step_of(jax.checkpoint(exact_gelu))
    assert not restored(step, params, x)
    step, params, x = step_of(exact_gelu)

    def before(params, x):  # its backward pass has not been made yet
        return jnp.square(exact_gelu(x @ params[0]) @ params[3]).mean()

    assert not restored(before, params, x)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_softmax_of_a_product_is_one_kernel_on_a_tpu_v5e(scaled):
    """XLA:TPU moves no cast over a rounding; nor over what else stands between."""

    def step(w, x):
        def loss(w):
            logits = (x @ w) @ x.T
            return jnp.square(
                jax.nn.softmax(logits / 4 if scaled else logits) @ x
            ).sum()

        return w - jax.grad(loss)(w)

    (w,) = weights((D, D))
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), w, normal(T, D))
    settled = [e for e in eqns(jaxpr, "restore") if e.params["on"] == (TPU_V5E,)]
    assert len(settled) == (0 if scaled else 1)
    made = {v for e in settled for v in e.outvars}
    readers = {e.primitive.name for e in walk(jaxpr) if made.intersection(variables(e))}
    assert scaled or {"reduce_max", "sub"} <= readers


def test_what_is_settled_is_what_it_was(monkeypatch):
    monkeypatch.setattr(_compat, "restore", lambda stored, again, on: again)
    x = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, 3e38, 1e-37, 1 / 3])
    assert bits(jax.jit(_compat.settled)(x)) == bits(x)
    assert jnp.isnan(_compat.settled(jnp.array(jnp.nan)))
