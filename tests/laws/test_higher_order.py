"""Every primitive that holds a program is rewritten inside, or reported."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EPS,
    HALF,
    bit_equal,
    dtypes_in,
    dtypes_out,
    eqns,
    open_jaxpr,
    products,
    relative_error,
    trace,
)
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.compute_on import compute_on
from jax.extend import core as jex
from programs import BY_NAME, W, own_batching, weights

from jmp_rewrite import _compat, mixed_precision, mixed_precision_jaxpr
from jmp_rewrite._graph import TOP, inner_place

BF16 = "mixed_bfloat16"


def w_and_x():
    return weights((W, W), (4, W))


def half_products_inside(jaxpr, name):
    """Counts half products in the jaxprs that equations of this name hold."""
    inside = [
        e
        for eqn in eqns(jaxpr, name)
        for inner in jex.jaxprs_in_params(eqn.params)
        for e in products(inner)
    ]
    assert {d for e in inside for d in dtypes_in(e)} == {"bfloat16"}
    return len(inside)


@pytest.mark.parametrize(
    ("program", "primitive", "count"),
    [
        ("rnn", "scan", 2),
        ("layers", "scan", 2),
        ("lstm", "scan", 1),
        ("while", "while", 1),
        ("cond", "cond", 1),
        ("switch", "cond", 2),
        ("checkpoint", "remat2", 2),
        ("custom_vjp", "custom_vjp_call", 2),
        ("custom_vmap", "custom_vmap_call", 1),
        ("jit", "jit", 3),
        ("shard_map", "shard_map", 2),
    ],
)
def test_products_inside(program, primitive, count):
    """What the equation holds runs on half operands."""
    program = BY_NAME[program]
    rewritten = trace(mixed_precision(program.fun, BF16), *program.args())
    assert half_products_inside(rewritten, primitive) >= count


def test_products_inside_custom_jvp():
    w, x = w_and_x()

    @jax.custom_jvp
    def layer(x):
        return jnp.tanh(x @ w)

    layer.defjvps(lambda t, y, x: (t @ w) * (1 - y * y))
    rewritten = trace(mixed_precision(lambda x: layer(x) @ w, BF16), x)
    # The last one has a float32 result, and for that a rule of its own.
    assert half_products_inside(rewritten, "custom_jvp_call") == 2
    held = [e.params["call_jaxpr"] for e in eqns(rewritten, "custom_jvp_call")]
    (inside,) = [products(jaxpr) for jaxpr in held if eqns(jaxpr, "tanh")]
    assert [dtypes_out(e) for e in inside] == [["bfloat16"]]
    tangent = trace(jax.grad(lambda x: mixed_precision(layer, BF16)(x).sum()), x)
    assert {d for e in products(tangent) for d in dtypes_in(e)} == {"bfloat16"}


def test_a_derivative_of_a_boolean_has_no_numbers():
    w, x = w_and_x()

    @jax.custom_jvp
    def spike(v, w):
        return (v @ w > 0).astype(jnp.float32), v @ w > 0

    @spike.defjvp
    def _(primals, tangents):
        (v, w), (dv, dw) = primals, tangents
        slope = (dv @ w + v @ dw) / (1 + jnp.abs(v @ w))
        fired = spike(v, w)
        return fired, (slope, np.zeros(fired[1].shape, jax.dtypes.float0))

    def loss(w):
        return jnp.sum((spike(x @ w, w)[0] @ w) ** 2)

    found = jax.grad(mixed_precision(loss, BF16))(w)
    assert relative_error(found, jax.grad(loss)(w)) < 16 * EPS[BF16]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_batching_rules_are_rewritten(shared):
    """By `jax.vmap` outside; a derivative's own rule is made of it by JAX."""
    w, x = w_and_x()
    ws = w if shared else jnp.stack([w, 2 * w, -w])
    xs = jnp.stack([x, -x, 2 * x])
    half = mixed_precision(lambda w, x: own_batching(jnp.tanh(x @ w), w) @ w, BF16)
    over = (None if shared else 0, 0)

    def plain(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w) @ w

    batched = trace(jax.vmap(half, over), ws, xs)
    assert not eqns(batched, "custom_vmap_call")
    assert [dtypes_in(e) for e in products(batched)] == [["bfloat16"] * 2] * 3
    one_product = [e for e in products(batched) if e.invars[0].aval.shape == (12, W)]
    assert len(one_product) == shared
    bound = 16 * EPS[BF16]
    exact = jax.vmap(plain, over)(ws, xs)
    assert relative_error(jax.vmap(half, over)(ws, xs), exact) < bound
    slope = lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x))[1]  # noqa: E731
    exact = jax.vmap(slope(plain), over)(ws, xs)
    assert relative_error(jax.vmap(slope(half), over)(ws, xs), exact) < bound


def test_compute_on_and_closed_call():
    w, x = w_and_x()
    f = jax.jit(lambda x: jnp.tanh(x @ w) @ w)
    if hasattr(jax, "closure_convert"):
        f = jax.closure_convert(f, x)[0]
    rewritten = trace(mixed_precision(lambda x: f(x), BF16), x)
    assert {d for e in products(rewritten) for d in dtypes_in(e)} == {"bfloat16"}

    def on_host(x):
        return jnp.tanh(x @ w) @ w

    try:
        device = jax.memory.Space.Device
        host = compute_on(
            on_host, compute_type="device_host", out_memory_spaces=device
        )  # JAX >= 0.12
    except TypeError:

        def host(x):
            with compute_on("device_host"):
                return on_host(x)

    rewritten = trace(mixed_precision(host, BF16), x)
    assert len(products(rewritten)) == 2
    assert {d for e in products(rewritten) for d in dtypes_in(e)} == {"bfloat16"}


# What is left alone is said.


def interpreted_kernel(x):
    def kernel(ref, out):
        out[...] = ref[...] * 2.0

    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


# By its name alone: the primitive of jax2tf needs TensorFlow.
call_tf = jex.Primitive("call_tf")
call_tf.def_abstract_eval(lambda x: x)
call_tf.def_impl(lambda x: x * 2)


OPAQUE = {
    "call_tf": call_tf.bind,
    "pallas_call": interpreted_kernel,
    "pure_callback": lambda x: jax.pure_callback(
        lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    ),
    "composite": lambda x: lax.composite(lambda x: jnp.sin(x), "my.sin")(x),
    "custom_linear_solve": lambda x: (
        jnp.linalg.solve(x.T @ x + 9 * jnp.eye(W, dtype=jnp.float32), x.T).T
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_unrewritten_bodies_are_reported(name, caplog):
    """It keeps its dtypes, and the log says where and why."""
    w, x = w_and_x()

    def f(x):
        return OPAQUE[name](x @ w) @ w

    with caplog.at_level(logging.INFO, "jmp_rewrite"):
        rewritten = trace(mixed_precision(f, BF16), x)
    (eqn,) = eqns(rewritten, name)
    assert "bfloat16" not in dtypes_in(eqn) + dtypes_out(eqn)
    (line,) = [
        r.getMessage() for r in caplog.records if r.getMessage().startswith(name)
    ]
    assert "test_higher_order.py" in line and "is not rewritten: " in line
    bound = 16 * EPS[BF16]
    assert relative_error(mixed_precision(f, BF16)(x), f(x)) < bound


def test_unknown_primitives_are_reported(caplog):
    """A primitive that nobody knows and that holds a program is named in the log."""
    own = jex.Primitive("own_call")
    own.def_abstract_eval(lambda x, fun: x)
    w, x = w_and_x()

    def f(x):
        return own.bind(x @ w, fun=jnp.tanh) @ w

    with caplog.at_level(logging.INFO, "jmp_rewrite"):
        rewritten = trace(mixed_precision(f, BF16), x)
    assert dtypes_in(eqns(rewritten, "own_call")[0]) == ["float32"]
    assert any("own_call at" in r.getMessage() for r in caplog.records)


def test_references_keep_their_dtype():
    """What is written to a reference and read from it is float32."""
    program = BY_NAME["references"]
    rewritten = trace(mixed_precision(program.fun, BF16), *program.args())
    for eqn in eqns(rewritten, "swap", "get", "addupdate", "new_ref", "ref"):
        assert "bfloat16" not in dtypes_in(eqn) + dtypes_out(eqn)


def test_callbacks_see_float32():
    """A callback downstream of a half value sees what the user wrote it for."""
    w, x = w_and_x()
    seen = []

    def f(x):
        h = jnp.tanh(x @ w)
        jax.debug.callback(lambda v: seen.append(np.asarray(v).dtype), h)
        return h @ w

    jax.block_until_ready(jax.jit(mixed_precision(f, BF16))(x))
    jax.effects_barrier()
    assert seen == [np.float32]


# Carries, branches, sharing.


def test_carry_that_starts_full_and_ends_half():
    """A carry has one dtype although the body would return another."""
    w, x = w_and_x()

    def f(x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), h @ w), x * 2, None, length=3)

    for policy in HALF:
        result = mixed_precision(f, policy)(x)
        assert relative_error(result, f(x)) < 16 * EPS[policy]


def test_swapped_carries():
    """Two carries that change places have the same dtype."""
    w, x = w_and_x()

    def f(x, y):
        body = lambda c, _: ((jnp.tanh(c[1] @ w), c[0]), None)  # noqa: E731
        return lax.scan(body, (x, y), None, length=4)[0]

    assert relative_error(mixed_precision(f, BF16)(x, x), f(x, x)) < 16 * EPS[BF16]


def test_branches_agree():
    """A denied result in one branch is cast to what the other returns."""
    w, x = w_and_x()

    def f(x, flag):
        h = x @ w
        h = lax.cond(flag, lambda h: jnp.exp(h), lambda h: jnp.tanh(h @ w), h)
        return h @ w

    rewritten = trace(mixed_precision(f, BF16), x, True)
    (cond,) = eqns(rewritten, "cond")
    outs = [
        [str(v.aval.dtype) for v in open_jaxpr(b).outvars]
        for b in cond.params["branches"]
    ]
    assert outs[0] == outs[1]
    for flag in (True, False):
        result = jax.jit(mixed_precision(f, BF16))(x, flag)
        assert relative_error(result, f(x, flag)) < 16 * EPS[BF16]


def distinct_blocks(jaxpr):
    return {
        id(e.params["jaxpr"]) for e in eqns(jaxpr, "jit") if e.params["name"] == "block"
    }


def test_a_shared_block_is_emitted_once():
    """Six calls of one block with the same precisions hold one jaxpr."""
    first, last, *ws = weights(*[(W, W)] * 14)
    (x,) = weights((4, W))

    @jax.jit
    def block(x, w, v):
        return x + jnp.tanh(x @ w) @ v

    def f(ws, x):
        x = x @ first
        for w, v in zip(ws[::2], ws[1::2], strict=True):  # or the stream is a state
            x = block(x, w, v)
        return x @ last

    assert len(distinct_blocks(trace(f, ws, x))) == 1
    assert len(distinct_blocks(trace(mixed_precision(f, BF16), ws, x))) == 1


BOUNDED = {
    "hard_tanh": jax.nn.hard_tanh,
    "nested": lambda x: jnp.where(x > 2, 2.0, jnp.where(x < -1, -0.5, x)),
    "calls": lambda x: limited(limited(x, 1.5) - 1.0, 0.5),
    "truncated": lambda x: truncated(truncated(x, 2.5), 1.5),
    "signs": lambda x: jnp.where(x > 1, 0.0, jnp.where(x < -1, -0.0, x)),
}


@jax.jit
def limited(x, bound):
    return jnp.minimum(x, bound)


@jax.jit
def truncated(x, bound):
    return x * bound.astype(jnp.int32).astype(x.dtype) / 2


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_shared_block_keeps_the_numbers_of_each_call(name, policy):
    """JAX traces `where` once: with 1 in one call, and with -1 in another."""
    params, (x,) = weights((W, W), (W, W)), weights((16, W))
    x = 4 * x

    def loss(params, x):
        return jnp.mean(jnp.tanh(BOUNDED[name](x @ params[0]) @ params[1]) ** 2)

    step = jax.value_and_grad(loss)
    exact, (first, second) = step(params, x)
    found, gradients = jax.jit(mixed_precision(step, policy))(params, x)
    assert abs(found - exact) < 2**-6 * exact
    for a, b in zip(gradients, (first, second), strict=True):
        assert jnp.linalg.norm(a - b) < 2**-2 * jnp.linalg.norm(b)  # a border moves


def test_zeros_have_signs():
    """Also in a process that has emitted the other one before."""
    params, (x,) = weights((W, W), (W, W)), weights((16, W))

    def literals(zero):
        def f(params, x):
            return jnp.maximum(x @ params[0], zero) @ params[1]

        (largest,) = eqns(trace(mixed_precision(f, BF16), params, x), "max")
        return [bool(jnp.signbit(v.val)) for v in largest.invars if hasattr(v, "val")]

    zeros = [-0.0, 0.0, -0.0]
    assert [literals(zero) for zero in zeros] == [[True], [False], [True]]


@pytest.mark.parametrize("fill", [-1e9, np.float32(-1e9)], ids=type)
def test_what_fills_in_for_missing_rows_is_a_number(fill):
    params, (x,) = weights((W, W), (W, W)), weights((16, W))
    index = jnp.asarray([0, 3, 99])

    def f(params, x):
        rows = jnp.take(x @ params[0], index, 0, mode="fill", fill_value=fill)
        return jax.nn.softplus(rows) @ params[1]

    found = jax.jit(mixed_precision(f, "mixed_float16"))(params, x)
    assert relative_error(found, f(params, x)) < 16 * EPS["mixed_float16"]


def test_a_scope_with_the_name_of_a_transformation():
    """Both are tuples of one name; neither takes the place of the other."""
    (w,), (x,) = weights((W, W)), weights((4, W))

    def f(w):
        with jax.named_scope("transpose"):
            return jnp.square(x @ w).sum()

    (product,) = eqns(jax.make_jaxpr(f)(w), "dot_general")
    (scope,) = _compat.scope_elements(product.source_info.name_stack)
    *_, last = eqns(jax.make_jaxpr(jax.grad(f))(w), "dot_general")
    transform, *_ = _compat.scope_elements(last.source_info.name_stack)
    assert scope == transform and type(scope) is not type(transform)
    assert inner_place(TOP, (scope,)).path == "transpose"
    assert inner_place(TOP, (transform,)).backward


@jax.custom_vjp
def one(a):
    return jnp.ones_like(a)


one.defvjp(lambda a: (one(a), a), lambda a, g: (g * a,))


@pytest.mark.slow
def test_a_number_with_a_derivative_of_its_own():
    params, (x,) = weights((W, W), (W, W)), weights((16, W))

    def loss(a):
        return jnp.mean((jnp.tanh(x @ params[0]) * one(a)) @ params[1])

    half = jax.jit(mixed_precision(loss, BF16))
    found, exact = jax.grad(half)(2.0), jax.grad(loss)(2.0)
    assert exact and abs(found - exact) < 2**-4 * abs(exact)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_turn_reads_a_part_of_what_was_padded(policy):
    """What a sequence is padded with says nothing of where one element is zero."""
    params, (x,) = weights((W, W), (W, W)), weights((4, W))

    def loss(params, x):
        h = lax.pad((x @ params[0])[:-1], 0.0, ((1, 0, 0), (0, 0, 0)))

        def body(carry, row):
            own = lax.pad(jnp.tanh(carry + row)[:2], 0.0, ((0, W - 2, 0),))
            return 0.5 * carry + row + own, (row + own) @ params[1]

        return jnp.mean(lax.scan(body, jnp.zeros(W), h)[1] ** 2)

    step = jax.value_and_grad(loss)
    found = jax.jit(mixed_precision(step, policy))(params, x)
    assert relative_error(found, step(params, x)) < 16 * EPS[policy]


@pytest.mark.slow
def test_what_nobody_differentiates_has_no_tangent():
    """The derivative of a norm at 0 is infinite, and zeros times it are NaN."""
    (w, own), x = weights((W, 4), (W, W)), weights((64, W))[0].at[0].set(0.0)

    def f(w, x):
        y, _ = lax.scan(lambda y, _: (jnp.tanh(y @ own), None), x, None, length=4)
        return jnp.sum((y @ w + jnp.linalg.norm(x, axis=-1, keepdims=True)) ** 2, 0)

    def tangent(f):
        return jax.jvp(lambda w: f(w, x), (w,), (w,))[1]

    found = tangent(jax.jit(mixed_precision(f, BF16)))
    assert relative_error(found, tangent(f)) < 16 * EPS[BF16]


def test_a_block_in_two_precisions_is_emitted_twice():
    """One use under full_precision does not make the other full."""
    from jmp_rewrite import full_precision

    w, x = w_and_x()

    @jax.jit
    def block(x):
        return jnp.tanh(x @ w) @ w

    def f(x):
        with full_precision():
            y = block(x)
        return block(y) @ w

    found = products(trace(mixed_precision(f, BF16), x))
    assert sorted(dtypes_in(e)[0] for e in found) == ["bfloat16"] * 3 + ["float32"] * 2


def test_deep_sharing_is_analysed_once():
    """2**20 uses of one block: an analysis of every use would not end."""
    (w,) = weights((W, W))

    def double(f, depth):
        if depth == 0:
            return f
        inner = jax.jit(double(f, depth - 1))
        return lambda x: inner(inner(x))

    f = double(lambda x: jnp.tanh(x @ w), 20)
    rewritten = trace(mixed_precision(f, BF16), jnp.ones((4, W)))
    seen = {}
    stack = [rewritten]
    while stack:
        jaxpr = open_jaxpr(stack.pop())
        if id(jaxpr) in seen:
            continue
        seen[id(jaxpr)] = jaxpr
        for eqn in jaxpr.eqns:
            stack += jex.jaxprs_in_params(eqn.params)
    half = [
        e for j in seen.values() for e in j.eqns if e.primitive.name == "dot_general"
    ]
    assert half and {d for e in half for d in dtypes_in(e)} == {"bfloat16"}


def test_long_programs():
    """Analysis does not recurse over equations."""
    w, x = w_and_x()

    def f(x):
        for _ in range(3000):
            x = jnp.sin(x)
        return x @ w

    assert len(products(trace(mixed_precision(f, BF16), x))) == 1


# Custom derivatives.


@pytest.mark.slow
def test_custom_vjp_with_nondiff_and_symbolic_zeros():
    w, x = weights((W, W), (8, W))  # products of four terms are float32

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def apply(activation, x, w):
        return activation(x @ w)

    def fwd(activation, x, w):
        x, w = (v.value if hasattr(v, "value") else v for v in (x, w))
        return activation(x @ w), (x, w)

    def bwd(activation, res, g):
        x, w = res
        if isinstance(g, jax.custom_derivatives.SymbolicZero):
            g = jnp.zeros(g.shape, g.dtype)
        return g @ w.T, x.T @ g

    apply.defvjp(fwd, bwd, symbolic_zeros=True)

    def f(x, w):
        return jnp.sum(jnp.tanh(apply(jnp.tanh, jnp.tanh(x @ w), w) @ w))

    exact = jax.grad(f, (0, 1))(x, w)
    for grad in (
        jax.grad(mixed_precision(f, BF16), (0, 1)),
        mixed_precision(jax.grad(f, (0, 1)), BF16),
    ):
        result = jax.jit(grad)(x, w)
        assert relative_error(result, exact) < 16 * EPS[BF16]
        found = products(trace(grad, x, w))
        assert {d for e in found for d in dtypes_in(e)} == {"bfloat16"}


def test_a_rule_of_its_own_is_kept():
    """The derivative is the rule's, not that of the body: here it is doubled."""

    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    w, x = w_and_x()
    f = mixed_precision(lambda x: jnp.sum(doubled(x @ w)), BF16)
    plain = mixed_precision(lambda x: jnp.sum(x @ w), BF16)
    bit_equal(jax.grad(f)(x), 2 * jax.grad(plain)(x))


@pytest.mark.slow
def test_gradient_of_a_scanned_custom_vjp():
    w, x = w_and_x()

    @jax.custom_vjp
    def cell(h, w):
        return jnp.tanh(h @ w)

    cell.defvjp(
        lambda h, w: (jnp.tanh(h @ w), (h, w)), lambda r, g: (g @ r[1].T, r[0].T @ g)
    )

    def f(w):
        return jnp.sum(lax.scan(lambda h, _: (cell(h, w), None), x, None, length=3)[0])

    exact = jax.grad(f)(w)
    for grad in (
        jax.grad(mixed_precision(f, BF16)),
        mixed_precision(jax.grad(f), BF16),
    ):
        assert relative_error(jax.jit(grad)(w), exact) < 32 * EPS[BF16]


def test_residuals_are_half():
    """What the backward pass keeps of a decorated function is half where it may be."""
    ws = weights((W, W), (W, W), (W, W))
    (x,) = weights((64, W))

    def f(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    def kept(fun):
        leaves = jax.tree.leaves(jax.eval_shape(lambda ws: jax.vjp(fun, ws, x)[1], ws))
        return sum(v.size * v.dtype.itemsize for v in leaves if v.shape == x.shape)

    assert kept(mixed_precision(f, BF16)) <= 0.75 * kept(f)


# A jaxpr without a function.


@pytest.mark.slow
def test_jaxprs_of_every_kind():
    """`mixed_precision_jaxpr` agrees with `mixed_precision`, constants included."""
    for name in ("attention", "layers", "cond", "custom_vjp", "shard_map"):
        program = BY_NAME[name]
        args = program.args()
        closed = jax.make_jaxpr(program.fun)(*args)
        rewritten = mixed_precision_jaxpr(closed, BF16)
        leaves = jax.tree.leaves(args)
        result = jex.jaxpr_as_fun(rewritten)(*leaves)
        expected = jax.tree.leaves(mixed_precision(program.fun, BF16)(*args))
        assert [r.dtype for r in result] == [e.dtype for e in expected]
        assert relative_error(list(result), expected) < 4 * EPS[BF16]
