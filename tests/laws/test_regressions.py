"""What reviewers and other people's programs broke once, a few lines each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    EPS,
    bit_equal,
    dtypes_in,
    dtypes_out,
    eqns,
    products,
    relative_error,
    trace,
    walk,
)
from jax import lax
from jax.extend import core as jex
from programs import W, normal, weights

from jmp_rewrite import Policy, full_precision, mixed_precision

BF16, F16 = "mixed_bfloat16", "mixed_float16"
ZEROS = jnp.zeros((4, W), jnp.float32)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda h, e: h / (jnp.abs(h) + e),
        lambda h, e: h / jnp.maximum(jnp.abs(h), e),
        lambda h, e: h / jnp.sqrt(h * h + e),
        lambda h, e: h * jnp.log(jnp.abs(h) + e),
        lambda h, e: jnp.where(jnp.abs(h) > e, h, e) / (jnp.abs(h) + e),
    ],
    ids=["div", "max", "sqrt", "log", "where"],
)
def test_an_epsilon_that_is_no_literal(use, captured):
    """A captured array or an argument: float16 would turn 1e-8 into 0."""
    (w,) = weights((W, W))
    eps = jnp.float32(1e-8)
    if captured:
        f, args = (lambda x: use(x @ w, eps) @ w), (ZEROS,)
    else:
        f, args = (lambda x, e: use(x @ w, e) @ w), (ZEROS, eps)
    assert np.isfinite(mixed_precision(f, F16)(*args)).all()


@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("method", ["max", "min"])
def test_scatter_with_a_typed_function(method, policy):
    """`.at[].max` holds a jaxpr of float32 scalars."""
    w, x = weights((W, W), (4, W))
    ids = jnp.array([0, 1, 1, 3])

    def f(x):
        return getattr((x @ w).at[ids], method)(x) @ w

    assert (
        relative_error(jax.jit(mixed_precision(f, policy))(x), f(x)) < 16 * EPS[policy]
    )


def test_inner_products_stay_full():
    """A product with a 0-d result, and an outer product written as a matmul."""
    x, y = weights((W,), (W,))
    (inner,) = products(trace(mixed_precision(jnp.dot, F16), x, y))
    assert dtypes_in(inner) == ["float32"] * 2

    def outer(t, frequencies):
        return jnp.tanh(t[:, None] @ frequencies[None, :])

    (product,) = products(trace(mixed_precision(outer, F16), x, y))
    assert dtypes_in(product) == ["float32"] * 2


def test_a_head_of_width_one_is_half():
    """Its transpose contracts one element, and is a product like any other."""
    w, v, x = weights((W, W), (W, 1), (4, W))

    def loss(w, v):
        return jnp.mean((jnp.tanh(x @ w) @ v) ** 2)

    found = products(trace(mixed_precision(jax.grad(loss, (0, 1)), F16), w, v))
    assert [set(dtypes_in(e)) for e in found] == [{"float16"}] * len(found)


def test_full_precision_of_a_block_that_is_used_often():
    """A body that is analysed once for many uses does not decide for another place."""
    (w,) = weights((W, W))
    (x,) = weights((4, W))

    @jax.jit
    def block(x):
        for _ in range(33):
            x = jnp.tanh(x @ w)
        return x

    def f(x):
        y = x
        for _ in range(400):
            y = block(y)
        with full_precision():
            return block(x) + y

    blocks = {
        id(e.params["jaxpr"]): {
            d for p in products(e.params["jaxpr"]) for d in dtypes_in(p)
        }
        for e in trace(mixed_precision(f, BF16), x).eqns
        if e.primitive.name == "jit"
    }
    assert sorted(map(sorted, blocks.values())) == [["bfloat16"], ["float32"]]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BF16, F16])
def test_saturating_casts_are_linear(policy):
    """Derivative rules with products, and `linear_transpose`, in float16 too."""
    w, x = weights((W, W), (4, W))

    @jax.custom_jvp
    def product(x, w):
        return jnp.tanh(x @ w)

    @product.defjvp
    def _(primals, tangents):
        (x, w), (tx, tw) = primals, tangents
        y = product(x, w)
        return y, (1 - y * y) * (tx @ w + x @ tw)

    def f(w):
        return jnp.sum(jnp.tanh(product(x, w)) @ w)

    exact = jax.grad(f)(w)
    assert (
        relative_error(jax.grad(mixed_precision(f, policy))(w), exact)
        < 32 * EPS[policy]
    )
    linear = mixed_precision(lambda x: x @ w, policy)
    (ct,) = jax.linear_transpose(linear, x)(x @ w)
    assert relative_error(ct, (x @ w) @ w.T) < 4 * EPS[policy]
    assert jax.vmap(jax.grad(lambda x: jnp.sum(linear(x))))(x[None]).shape == (1, 4, W)


def test_products_of_the_optimizer():
    """Shampoo's statistics and Muon's orthogonalization are float32 and bit-equal."""
    params, x = weights((W, W)), jnp.asarray(normal(4, W))

    def shampoo(p, statistics, x):
        g = jax.grad(lambda p: 1e-6 * jnp.sum(jnp.tanh(x @ p[0])))(p)[0]
        statistics = statistics + g @ g.T
        return (p[0] - statistics @ g,), statistics, g

    args = params, jnp.zeros((W, W), jnp.float32), x
    _, statistics, g = mixed_precision(shampoo, F16)(*args)
    bit_equal(statistics, g @ g.T)

    tx = optax.contrib.muon(1e-3)

    def step(p, state, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p[0]) @ p[0]))(p)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    with jax.numpy_dtype_promotion("standard"):
        jaxpr = trace(mixed_precision(step, BF16), params, tx.init(params), x)
    used = [set(dtypes_in(e)) for e in products(jaxpr)]
    assert used.count({"bfloat16"}) == 5 and {"float32"} in used


def test_gathers_before_differentiation():
    """The transpose of an all_gather is a sum, which is float32."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    (w,) = weights((W, W))
    x = jnp.asarray(normal(4, W))

    def local(w, x):
        return jnp.tanh(x @ lax.all_gather(w, "i", tiled=True)).sum()[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P("i"), jax.P("i")),
        out_specs=jax.P("i"),
        check_vma=False,
    )

    def f(w):
        return jnp.sum(mapped(w, x))

    jaxpr = trace(jax.grad(mixed_precision(f, BF16)), w)
    for eqn in eqns(jaxpr, "reduce_scatter", "psum_scatter"):
        assert "bfloat16" not in dtypes_in(eqn)


def test_scopes_hold_inside_derivative_rules():
    """A named scope in a backward rule, also when the loss is decorated."""
    w, x = weights((W, W), (4, W))

    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    def backward(residuals, g):
        x, w = residuals
        with jax.named_scope("head"):
            return g @ w.T, x.T @ g

    layer.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    policy = Policy(BF16, scopes={"head": "float32"})
    grad = jax.grad(
        mixed_precision(lambda w: jnp.sum(jnp.tanh(layer(x, w)) @ w), policy)
    )
    full = [e for e in products(trace(grad, w)) if set(dtypes_in(e)) == {"float32"}]
    assert len(full) == 2


def test_a_backward_rule_rounds_like_the_forward_pass():
    """A rule that recomputes, as diffrax's adjoint does, is no whole step."""
    w, x = weights((W, W), (4, W))

    def solve(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w + x)

    recomputed = jax.custom_vjp(solve)
    recomputed.defvjp(
        lambda w, x: (solve(w, x), (w, x)),
        lambda residuals, g: jax.vjp(solve, *residuals)[1](g),
    )
    half = mixed_precision(lambda w: jnp.sum(recomputed(w, x)), BF16)
    found = products(trace(jax.grad(half), w))
    assert len(found) >= 6
    assert {d for e in found for d in dtypes_out(e)} == {"bfloat16"}


def test_a_users_own_scope_of_that_name():
    """A module called mixed_precision is rewritten like any other."""
    w, x = weights((W, W), (4, W))

    def f(x):
        with jax.named_scope("mixed_precision"), jax.named_scope("full_precision"):
            return x @ w

    (product,) = products(trace(mixed_precision(f, BF16), x))
    assert dtypes_in(product) == ["bfloat16"] * 2


def test_a_loop_through_an_unknown_primitive():
    """A state that passes through what nobody knows is a float32 carry."""
    select = jex.Primitive("select_own")
    select.def_abstract_eval(lambda a, b: a)
    w, x = weights((W, W), (4, W))

    def f(y):
        def body(carry):
            i, y = carry
            return i + 1, select.bind(y + 0.1 * jnp.tanh(y @ w), y)

        return lax.while_loop(lambda c: c[0] < 10, body, (0, jnp.copy(y)))[1]

    (loop,) = eqns(trace(mixed_precision(f, BF16), x), "while")
    assert "bfloat16" not in dtypes_out(loop)


@pytest.mark.slow
def test_attention_gradients_in_a_scan_run_on_the_cpu():
    """XLA:CPU has no kernel where it moves batch dimensions after choosing one."""
    x, w = jnp.ones((2, 16, 64)), jnp.ones((3, 64, 64)) * 0.01

    def loss(w, x):
        def layer(x, w):
            h = (x @ w).reshape(2, 16, 2, 32)
            logits = jnp.einsum("bthd,bshd->bhts", h, h)
            out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), h)
            return x + out.reshape(2, 16, 64), None

        return jax.lax.scan(layer, x, w)[0].sum()

    grads = jax.jit(mixed_precision(jax.grad(loss), "mixed_bfloat16"))(w, x)
    assert relative_error(grads, jax.grad(loss)(w, x)) < EPS["mixed_bfloat16"]


def test_a_number_that_padding_is_made_of_is_not_cast():
    """It is a literal where it is read; a body was given a half copy that none read."""
    w, x = weights((W, W), (4, W))

    def f(x):
        def body(_, x):
            return jnp.pad((x @ w)[1:], ((1, 0), (0, 0)))

        return jax.lax.fori_loop(0, 3, body, x)

    for var in (v for e in walk(trace(mixed_precision(f, BF16), x)) for v in e.outvars):
        assert var.aval.shape or str(var.aval.dtype) != "bfloat16"


@pytest.mark.parametrize("captured", [np.arange(5, dtype=np.float32), np.arange(5)])
def test_an_effect_without_results_reads_a_captured_array(captured):
    w, x = weights((W, W), (4, W))
    seen = []

    @mixed_precision(BF16)
    def f(x):
        jax.debug.callback(lambda a: seen.append(a.sum()), captured)
        return x @ w

    jax.block_until_ready(jax.jit(f)(x))
    jax.effects_barrier()
    assert seen == [10]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [jnp.sin, lambda y: -y, lambda y: y - 0.1],
    ids=["sin", "negation", "difference"],
)
def test_a_long_chain_before_a_sum(function):
    """No walk is as deep as a program is long."""
    w, x = weights((W, W), (4, W))

    def f(x):
        y = x @ w
        for _ in range(1500):
            y = function(y)
        return (y + x) @ w

    assert products(trace(mixed_precision(f, BF16), x))


@pytest.mark.slow
def test_outputs_that_are_set_one_after_the_other():
    """A walk back over what was set is no deeper than the program."""
    w, x = weights((W, W), (4, W))

    def f(x):
        out = jnp.zeros((1200, 4, W))
        for i in range(1200):
            x = jnp.tanh(x @ w)
            out = out.at[i].set(x)
        return (out + 1.0) @ w

    assert products(trace(mixed_precision(f, BF16), x))


@pytest.mark.slow
def test_a_long_chain_of_gradients_in_a_scan():
    w, xs = weights((W, W), (2, 4, W))

    def loss(w, x):
        for _ in range(600):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def f(w, xs):
        add = lambda sums, x: (sums + jax.grad(loss)(w, x), None)  # noqa: E731
        return jax.lax.scan(add, jnp.zeros_like(w), xs)[0]

    assert eqns(trace(mixed_precision(f, BF16), w, xs), "scan")


def test_iterations_that_no_machine_integer_counts():
    w, x = weights((W, W), (1024, W))

    def repeated(body, length):
        return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, None, length)[0]

    def f(w, x):
        body = lambda x: jnp.tanh(x @ w) @ w  # noqa: E731
        return repeated(repeated(repeated(body, 10**5), 10**5), 10**6)(x)

    assert products(trace(mixed_precision(f, BF16), w, x))


def test_a_weight_that_is_thresholded_often_before_a_scan():
    """Each step is looked at once: their number doubled with each."""
    w, x = weights((W, W), (4, W))

    def f(w, x):
        ws = jnp.broadcast_to(w, (8, W, W)) * jnp.arange(1.0, 9)[:, None, None]
        for _ in range(40):
            ws = jnp.sign(ws) * jnp.maximum(jnp.abs(ws) - 0.01, 0)
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]

    (loop,) = eqns(trace(mixed_precision(f, BF16), w, x), "scan")
    assert dtypes_out(loop) == ["float32"]


def test_numbers_that_leave_their_range_are_folded_in_silence():
    """As by JAX, also where warnings are errors."""
    (w,), x = weights((W, W)), jnp.ones((4, W))

    def fun(w, x):
        mask = jnp.full((W,), -1e9, jnp.float32).astype(jnp.float16)
        return x @ w + jnp.where(jnp.arange(W) > 3, mask, 0).astype(jnp.float32)

    with jax.numpy_rank_promotion("allow"):
        found = jax.jit(mixed_precision(fun, BF16))(w, x)
    assert jnp.isneginf(found[:, 4:]).all() and jnp.isfinite(found[:, :4]).all()


def test_a_guarded_division_of_indices_is_folded_in_silence():
    """Which of two rows a pass finds for each term of a sum."""
    (w,), x = weights((W, W)), jnp.ones((4, W))

    def step(w, x):
        def loss(w):
            place = lax.iota(jnp.int32, 8)
            by = [lax.div(place, lax.full_like(place, n)) for n in (2, 0)]
            rows = lax.select(place < 8, *by)
            h = jnp.tanh(x @ w)[rows] * jnp.cos(jnp.arange(8.0))[:, None]
            return jnp.square(h @ w).mean()

        return w - jax.grad(loss)(w)

    found = jax.jit(mixed_precision(step, BF16))(w, x)
    assert relative_error(found - w, step(w, x) - w) < 8 * EPS[BF16]
