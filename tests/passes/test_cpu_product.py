"""XLA:CPU is given products in the order, and with the result, that it is fast at.

JAX 0.10 rounds a float32 result behind the product, which is four times as fast; all
versions contract the rows of the first operand.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import choices, relative_error, trace
from jax import lax
from programs import normal

from jmp_rewrite import _compat, mixed_precision
from jmp_rewrite._passes import Program, optimize

# Two multiplied shapes, and what is contracted and what is mapped over in each.
PRODUCTS = {
    "matrices": ((6, 8), (8, 4), ((1,), (0,)), ((), ())),
    "transposed": ((6, 8), (4, 8), ((1,), (1,)), ((), ())),
    "a vector": ((6, 8), (8,), ((1,), (0,)), ((), ())),
    "tokens": ((2, 6, 8), (8, 4), ((2,), (0,)), ((), ())),
    "two contracted": ((2, 6, 8), (2, 6, 4), ((0, 1), (0, 1)), ((), ())),
    "scores": ((2, 6, 3, 8), (2, 5, 3, 8), ((3,), (3,)), ((0, 2), (0, 2))),
    "weighted values": ((2, 3, 6, 5), (2, 5, 3, 8), ((3,), (1,)), ((0, 1), (0, 2))),
    "empty": ((0, 8), (8, 4), ((1,), (0,)), ((), ())),
    "odd in all": ((7, 9), (7, 11), ((0,), (0,)), ((), ())),
    "groups": ((2, 10, 2, 8), (2, 10, 8), ((1,), (1,)), ((0,), (0,))),
}
# These contract columns of their first operand, and a CPU does not.
BY_ROWS = {
    "both reversed": ((8, 6), (4, 8), ((0,), (1,)), ((), ())),
    "odd columns": ((7, 6), (7, 4), ((0,), (0,)), ((), ())),
    "columns": ((8, 6), (8, 4), ((0,), (0,)), ((), ())),
    "a small result": ((64, 16), (12, 64), ((0,), (1,)), ((), ())),
    "experts": ((2, 10, 24), (2, 10, 16), ((1,), (1,)), ((0,), (0,))),
    "keys": ((2, 3, 10, 12), (2, 3, 10, 8), ((2,), (2,)), ((0, 1), (0, 1))),
    "keys of heads": ((2, 3, 10, 12), (2, 10, 3, 8), ((2,), (1,)), ((0, 1), (0, 2))),
    "values": ((2, 3, 10, 8), (2, 3, 10, 12), ((2,), (2,)), ((0, 1), (0, 1))),
}
PRODUCTS |= BY_ROWS
every_product = pytest.mark.parametrize("name", PRODUCTS)


ROUNDS_SLOWLY = jax.__version_info__ < (0, 11)


def product_of(name):
    """Returns a product, the same of half operands as a step has it, and operands."""
    left, right, contracting, batch = PRODUCTS[name]
    return product(8 * normal(*left), normal(*right, seed=1), contracting, batch)


def product(left, right, contracting, batch=((), ())):
    args = left, right

    def fun(x, y):
        return lax.dot_general(x, y, (contracting, batch))

    (eqn,) = trace(fun, *args).eqns
    params = dict(eqn.params, preferred_element_type=jnp.bfloat16.dtype)

    def half(x, y):
        operands = [x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)]
        (out,) = optimized(eqn, params, operands)
        return out.astype(jnp.float32)

    return fun, half, args


def optimized(eqn, params, operands):
    """Multiplies as a whole step does."""

    def fun(*operands):
        return _compat.bind(eqn, operands, params)

    closed = jax.make_jaxpr(fun)(*operands)
    program = Program(closed, np.dtype(jnp.bfloat16), whole_step=True)
    return _compat.evaluate(optimize(program).closed, operands)


@pytest.mark.breadth
@every_product
def test_it_is_the_product_rounded_once(name):
    """Others are XLA's own on JAX 0.11, which may not round them at all."""
    is_ours = ROUNDS_SLOWLY or name in BY_ROWS
    fun, half, args = product_of(name)
    operands = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in args]
    expected = fun(*operands).astype(jnp.bfloat16).astype(jnp.float32)
    result = jax.jit(half)(*args)
    assert result.shape == expected.shape
    if result.size:
        # Few are at a tie; half an epsilon, where one of both is not rounded.
        assert relative_error(result, expected) < (2**-10 if is_ours else 2**-8)


@every_product
def test_accelerators_run_the_product_itself(name):
    _, half, args = product_of(name)
    contracting, batch = PRODUCTS[name][2:]

    def plain(x, y):
        operands = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        dtype = jnp.bfloat16
        out = lax.dot_general(
            *operands, (contracting, batch), preferred_element_type=dtype
        )
        return out.astype(jnp.float32)

    def text(fun, platform):
        traced = jax.jit(lambda *args: fun(*args)).trace(*args)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for platform in ("cuda", "tpu"):
        assert text(half, platform) == text(plain, platform)
    is_slow = ROUNDS_SLOWLY and name != "empty"
    is_another = is_slow or name in BY_ROWS or name == "odd in all"
    assert (text(half, "cpu") != text(plain, "cpu")) == is_another


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_cpu_contracts_rows(name):
    """In what XLA compiles, behind all that it folds into a product."""
    _, half, args = product_of(name)
    text = jax.jit(half).lower(*args).compile().as_text()
    layouts = dict(re.findall(r"%(\S+) = \w+\[[\d,]*\]\{([\d,]*)", text))
    products = re.findall(
        r" dot\((?:\S+ )?%([\w.-]+), .*lhs_contracting_dims=\{(\d+)\}", text
    )
    assert products
    for first, contracted in products:
        assert layouts[first].split(",")[0] == contracted


@pytest.mark.parametrize("name", BY_ROWS)
def test_float32_results_are_of_rows_too(name):
    """Weight gradients: of experts, of models that are trained side by side."""
    fun, _, args = product_of(name)
    operands = [x.astype(jnp.bfloat16) for x in args]
    (eqn,) = trace(fun, *operands).eqns
    params = dict(eqn.params, preferred_element_type=np.dtype(np.float32))

    def full(x, y):
        (out,) = optimized(eqn, params, [x, y])
        return out

    exact = fun(*(x.astype(jnp.float32) for x in operands))
    assert relative_error(jax.jit(full)(*operands), exact) < 1e-6
    found = choices(trace(full, *operands), "cpu_products")
    assert bool(found) == (name != "columns")  # the shield copies it


@pytest.mark.parametrize("name", BY_ROWS)
def test_nothing_is_split_that_devices_share(name):
    _, half, args = product_of(name)
    mesh = jax.make_mesh((2,), ("devices",), devices=jax.devices()[:2])
    replicated = jax.NamedSharding(mesh, jax.P())

    def copies(fun, **placed):
        return jax.jit(fun, **placed).lower(*args).as_text().count("reshape")

    assert not copies(half, in_shardings=replicated)
    # Each device has arrays of its own inside of a `shard_map`.
    local = jax.shard_map(half, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    assert copies(local) == copies(half)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [((0,), (0,)), ((1,), (0,))])
def test_shapes_may_be_symbols(numbers):
    """What is not known to be even is not split."""
    rows = jax.export.symbolic_shape("rows")[0]
    shapes = {0: (rows, 24), 1: (24, rows)}[numbers[0][0]], (rows, 16)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    fun, half, _ = product(*args, numbers)
    exported = jax.export.export(jax.jit(half), platforms=["cpu"])(*args)
    x, y = normal(10, 24), normal(10, 16, seed=1)
    x = x if numbers[0] == (0,) else x.T
    assert relative_error(exported.call(x, y), fun(x, y)) < 0.01


@pytest.mark.slow
@pytest.mark.breadth
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


def test_forward_functions_keep_the_product():
    """What is inserted are casts, and the derivative of a float32 result."""

    def fun(x, w):
        return jnp.tanh(x @ w) @ w

    args = normal(6, 8), normal(8, 8)
    rewritten = mixed_precision(fun, "mixed_bfloat16")
    names = [e.primitive.name for e in trace(rewritten, *args).eqns]
    assert set(names) == {
        "convert_element_type",
        "custom_jvp_call",
        "dot_general",
        "tanh",
    }


@pytest.mark.slow
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
    found = choices(trace(rewritten, w, x), "cpu_products")
    assert bool(found) == ROUNDS_SLOWLY
    error = relative_error(jax.jit(rewritten)(w, x) - w, step(w, x) - w)
    assert error < 0.03


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("places", [512, 511])
def test_gradients_of_keys_are_added_up_in_float32(places, shared):
    """XLA:CPU of JAX 0.12 adds them up in bfloat16, which is off by 2 %."""
    scores, queries = normal(2, 3, places, 11), normal(2, places, 3, 7, seed=1)
    fun, half, _ = product(scores, queries, ((2,), (1,)), ((0, 1), (0, 2)))
    mesh = jax.make_mesh((2,), ("devices",), devices=jax.devices()[:2])
    placed = {"in_shardings": jax.NamedSharding(mesh, jax.P())} if shared else {}
    result = jax.jit(half, **placed)(scores, queries)
    operands = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (scores, queries)]
    assert relative_error(result, fun(*operands)) < 2**-8


def test_nothing_is_added_up():
    _, half, args = product(jnp.zeros((0, 8)), jnp.zeros((0, 4)), ((0,), (0,)))
    np.testing.assert_array_equal(jax.jit(half)(*args), np.zeros((8, 4)))
