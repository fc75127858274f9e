"""XLA:CPU of JAX 0.10 rounds a product's float32 result, which is four times as fast.

Run as JAX 0.10 runs it, whatever version is installed.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import eqns, relative_error, trace
from jax import lax
from programs import normal

from jmp_rewrite import _products, mixed_precision

# Two multiplied shapes, and what is contracted and what is mapped over in each.
PRODUCTS = {
    "matrices": ((6, 8), (8, 4), ((1,), (0,)), ((), ())),
    "transposed": ((6, 8), (4, 8), ((1,), (1,)), ((), ())),
    "columns": ((8, 6), (8, 4), ((0,), (0,)), ((), ())),
    "odd columns": ((7, 6), (7, 4), ((0,), (0,)), ((), ())),
    "both reversed": ((8, 6), (4, 8), ((0,), (1,)), ((), ())),
    "a vector": ((6, 8), (8,), ((1,), (0,)), ((), ())),
    "tokens": ((2, 6, 8), (8, 4), ((2,), (0,)), ((), ())),
    "two contracted": ((2, 6, 8), (2, 6, 4), ((0, 1), (0, 1)), ((), ())),
    "scores": ((2, 6, 3, 8), (2, 5, 3, 8), ((3,), (3,)), ((0, 2), (0, 2))),
    "weighted values": ((2, 3, 6, 5), (2, 5, 3, 8), ((3,), (1,)), ((0, 1), (0, 2))),
    "empty": ((0, 8), (8, 4), ((1,), (0,)), ((), ())),
}
every_product = pytest.mark.parametrize("name", PRODUCTS)


@pytest.fixture(autouse=True)
def as_jax_0_10(monkeypatch):
    monkeypatch.setattr(_products, "_ROUNDS_SLOWLY", True)


def product_of(name):
    """Returns a product, the same of half operands as a step has it, and operands."""
    left, right, contracting, batch = PRODUCTS[name]
    args = (8 * normal(*left), normal(*right, seed=1))

    def fun(x, y):
        return lax.dot_general(x, y, (contracting, batch))

    (eqn,) = trace(fun, *args).eqns
    params = dict(eqn.params, preferred_element_type=jnp.bfloat16.dtype)

    def half(x, y):
        operands = [x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)]
        (out,) = _products.half_product(eqn, operands, params)
        return out.astype(jnp.float32)

    return fun, half, args


@every_product
def test_it_is_the_product_rounded_once(name):
    fun, half, args = product_of(name)
    operands = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in args]
    expected = fun(*operands).astype(jnp.bfloat16).astype(jnp.float32)
    result = jax.jit(half)(*args)
    assert result.shape == expected.shape
    if result.size:
        assert relative_error(result, expected) < 2**-10  # few at a tie


@every_product
def test_accelerators_run_the_product_itself(name, monkeypatch):
    _, half, args = product_of(name)

    def text(platform):
        traced = jax.jit(lambda *args: half(*args)).trace(*args)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    texts = {p: text(p) for p in ("cpu", "cuda", "tpu")}
    monkeypatch.setattr(_products, "_ROUNDS_SLOWLY", False)
    for platform in ("cuda", "tpu"):
        assert text(platform) == texts[platform]
    assert text("cpu") != texts["cpu"]


@every_product
def test_it_is_mapped_differentiated_and_transposed(name):
    fun, half, (x, y) = product_of(name)
    found = jax.jit(jax.vmap(half, (0, None)))(jnp.stack([x, 2 * x]), y)
    if not found.size:
        return
    assert relative_error(found[1], 2 * half(x, y)) < 2**-10
    for at in (0, 1):
        ours, full = (
            jax.grad(lambda *args, f=f: jnp.square(f(*args)).sum(), at)(x, y)
            for f in (half, fun)
        )
        assert relative_error(ours, full) < 2**-6
    (back,) = jax.linear_transpose(lambda x: half(x, y), x)(jnp.ones_like(fun(x, y)))
    (full,) = jax.linear_transpose(lambda x: fun(x, y), x)(jnp.ones_like(fun(x, y)))
    assert relative_error(back, full) < 2**-6


def test_what_is_no_whole_step_has_the_product_alone():
    """What is inserted are casts."""

    def fun(x, w):
        return jnp.tanh(x @ w) @ w

    args = normal(6, 8), normal(8, 8)
    names = [e.primitive.name for e in trace(mixed_precision(fun), *args).eqns]
    assert set(names) == {"convert_element_type", "dot_general", "tanh"}


def test_a_whole_step_runs_on_it():
    """In loops and branches too; its weight gradients are float32 as they are."""
    w, x = normal(8, 8), normal(6, 8)

    def step(w, x):
        def loss(w):
            def body(h, _):
                return lax.cond(h.sum() > 0, jnp.tanh, jnp.sin, h @ w), None

            return jnp.square(lax.scan(body, x, length=3)[0] @ w).mean()

        return w - jax.grad(loss)(w)

    rewritten = mixed_precision(step, "mixed_bfloat16")
    assert eqns(trace(rewritten, w, x), "cpu_product")
    error = relative_error(jax.jit(rewritten)(w, x) - w, step(w, x) - w)
    assert error < 0.03
