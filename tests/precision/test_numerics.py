"""The twelve numerical rules of the design, each with a test that it can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    walk,
)
from jax import lax
from programs import OPTIMIZERS, W, cross_entropy, mlp, mlp_args, normal, weights

from jmp_rewrite import Policy, explain, mixed_precision, use_passes

POLICIES = ["mixed_bfloat16", "mixed_float16"]
both = pytest.mark.parametrize("policy", POLICIES)


pytestmark = pytest.mark.passes


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes integers to floats, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def halves(policy, fun, *args):
    """Returns how many products run on half operands, and how many there are."""
    found = products(trace(mixed_precision(fun, policy), *args))
    return sum(set(dtypes_in(e)) == {HALF[policy]} for e in found), len(found)


# 1. Only float32 values are candidates.


@pytest.mark.slow
@both
def test_other_dtypes_stay(policy):
    """float64, complex, integers, keys and what is half already are not retyped."""
    with jax.enable_x64(True):
        x64 = jnp.ones((4, 4), jnp.float64)
        values = [
            x64,
            x64 + 1j,
            jnp.arange(16).reshape(4, 4),
            jnp.ones((4, 4), jnp.bfloat16),
        ]

        def f(key, *xs):
            return jax.random.normal(key, (4,)), *(x @ x for x in xs)

        args = (jax.random.key(0), *values)
        bit_equal(mixed_precision(f, policy)(*args), f(*args))
        assert halves("mixed_float16", f, *args)[0] == 0


# 2. Downstream of a deny node everything is full until the next product.


@both
def test_deny_reaches_to_the_next_product(policy):
    w, x = weights((W, W), (4, W))

    def f(x):
        h = jnp.exp(x @ w)  # deny
        h = jnp.maximum(jnp.tanh(h).reshape(2, 2, W), 0)  # infer, clear
        return jnp.tanh(h.reshape(4, W) @ w) @ w

    jaxpr = trace(mixed_precision(f, policy), x)
    first, second = eqns(jaxpr, "tanh")
    assert dtypes_in(first) == ["float32"] and dtypes_in(second) == [HALF[policy]]
    assert dtypes_in(eqns(jaxpr, "reshape")[0]) == ["float32"]
    assert len(products(jaxpr)) == 3


# 3. Train state.


def train(optimizer, loss=cross_entropy):
    def step(params, state, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return step


def data():
    params, x = mlp_args()
    return params, x, jnp.array([0, 1, 2, 3])


@both
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_untouched(name, policy):
    """State and update are bit-equal to those that the same gradients give."""
    optimizer = OPTIMIZERS[name]
    params, x, labels = data()
    state = optimizer.init(params)
    step = mixed_precision(train(optimizer), policy)
    new, new_state, grads = step(params, state, x, labels)

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # Op by op: XLA fuses the two programs differently, with other last digits.
    plain = trace(update, params, state, grads)
    leaves = jax.core.eval_jaxpr(
        open_jaxpr(plain), plain.consts, *jax.tree.leaves((params, state, grads))
    )
    bit_equal(jax.tree.leaves((new, new_state)), leaves)


def float32_arithmetic_of_state(fun, *args, policy="mixed_float16"):
    """Asserts that no elementwise equation of a parameter's shape is half, but casts.

    Parameters have shapes that nothing else in these programs has.
    """
    jaxpr = trace(mixed_precision(fun, policy), *args)
    seen = 0
    for eqn in walk(jaxpr):
        shapes = {v.aval.shape for v in eqn.outvars}
        if eqn.primitive.name in ("add", "sub", "mul", "div", "sqrt", "add_any"):
            if shapes & {(5, 7), (7, 3)}:
                seen += 1
                assert HALF[policy] not in dtypes_in(eqn) + dtypes_out(eqn), eqn
    half, count = halves(policy, fun, *args)
    assert half == count > 0
    return seen


def small():
    """Two layers whose weights have shapes of their own."""
    params = weights((5, 7), (7, 3))
    return params, jnp.asarray(normal(4, 5))


def net(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def loss(params, x):
    return jnp.mean(net(params, x) ** 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unrolled_steps(name):
    """Two steps in one program: the second's products do not make the first's half."""
    optimizer = OPTIMIZERS[name]
    params, x = small()

    def two(params, state, x):
        for _ in range(2):
            grads = jax.grad(loss)(params, x)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    assert float32_arithmetic_of_state(two, params, optimizer.init(params), x) > 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_epoch(name):
    """A scan over steps, then evaluation: every carry is float32."""
    optimizer = OPTIMIZERS[name]
    params, x = small()

    def epoch(params, state, xs):
        def body(carry, x):
            params, state = carry
            grads = jax.grad(loss)(params, x)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss(params, x)

        (params, state), losses = lax.scan(body, (params, state), xs)
        return params, state, losses, loss(params, xs[0])

    args = params, optimizer.init(params), jnp.stack([x, x + 1])
    assert float32_arithmetic_of_state(epoch, *args) > 4
    (scan,) = eqns(trace(mixed_precision(epoch, "mixed_float16"), *args), "scan")
    assert "float16" not in {str(v.aval.dtype) for v in scan.outvars}


def test_sharpness_aware():
    """SAM: the perturbed weights are float32; products read a rounded copy."""
    params, x = small()

    def step(params, x):
        first = jax.grad(loss)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in first))
        near = jax.tree.map(lambda p, g: p + 1e-3 * g / norm, params, first)
        grads = jax.grad(loss)(near, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    assert float32_arithmetic_of_state(step, params, x) >= 4


def test_meta_learning():
    """MAML: a gradient through an inner update."""
    params, x = small()

    def outer(params, x):
        fast = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))
        return loss(fast, x + 1)

    def step(params, x):
        return jax.tree.map(
            lambda p, g: p - 0.1 * g, params, jax.grad(outer)(params, x)
        )

    jaxpr = trace(mixed_precision(step, "mixed_float16"), params, x)
    shapes = {p.shape for p in params}
    updates = [e for e in eqns(jaxpr, "sub") if e.outvars[0].aval.shape in shapes]
    assert len(updates) == 4  # of the fast weights, and of the weights
    assert {d for e in updates for d in dtypes_in(e)} == {"float32"}
    half, count = halves("mixed_float16", step, params, x)
    assert half == count > 10


def test_adversarial():
    """A GAN step: one network's new weights are used for the other's loss."""
    params, x = small()
    generator = weights((5, 5))

    def step(generator, params, x):
        fake = x @ generator[0]
        grads = jax.grad(lambda p: loss(p, x) - loss(p, fake))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        ggrads = jax.grad(lambda g: loss(params, x @ g[0]))(generator)
        return jax.tree.map(lambda p, g: p - 0.1 * g, generator, ggrads), params

    assert float32_arithmetic_of_state(step, generator, params, x) >= 2


def test_flat_optimizer():
    """Parameters that an optimizer flattens into one vector stay state."""
    params, x = small()
    optimizer = optax.flatten(optax.adam(1e-2))

    def two(params, state, x):
        for _ in range(2):
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    args = params, optimizer.init(params), x
    jaxpr = trace(mixed_precision(two, "mixed_float16"), *args)
    for eqn in walk(jaxpr):
        if eqn.outvars[0].aval.shape == (5 * 7 + 7 * 3,):
            assert "float16" not in dtypes_out(eqn)


def test_parameters_made_inside():
    """Parameters that the program draws itself are state as well."""
    _, x = small()

    def run(key, x):
        params = [jax.random.normal(key, (5, 7)), jax.random.normal(key, (7, 3))]
        for _ in range(2):
            grads = jax.grad(loss)(params, x)
            params = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
        return params

    assert float32_arithmetic_of_state(run, jax.random.key(0), x) >= 4


@both
def test_states_of_loops(policy):
    """An ODE's state, an LSTM's cell and a running sum are float32 carries."""
    w, x = weights((W, W), (4, W))

    def f(x):
        ode = lax.fori_loop(0, 3, lambda _, y: y + 0.1 * jnp.tanh(y @ w), x)
        total = lax.scan(lambda s, y: (s + y @ w, None), x, jnp.stack([x, x]))[0]
        return ode @ w, total @ w

    for eqn in eqns(trace(mixed_precision(f, policy), x), "add"):
        assert dtypes_out(eqn)[0] in ("float32", "int32")


def integrate(w, y):
    """Heun's method with a controlled error."""

    def step(state):
        t, h, y = state
        first = jnp.tanh(y @ w)
        second = jnp.tanh((y + h * first) @ w)
        error = jnp.abs(h * (second - first)).max() / 2
        accepted = error < 1e-3
        t = jnp.where(accepted, t + h, t)
        y = jnp.where(accepted, y + h / 2 * (first + second), y)
        h = h * jnp.clip(0.9 * jnp.sqrt(1e-3 / error), 0.2, 5.0)
        return t, jnp.minimum(h, 1 - t + 1e-9), y

    start = jnp.float32(0), jnp.float32(0.1), y
    return lax.while_loop(lambda state: state[0] < 1, step, start)[2]


@pytest.mark.slow
@both
def test_a_solver_and_its_replay_take_the_same_steps(policy):
    """An adjoint that stores nothing integrates again in the backward pass."""

    @jax.custom_vjp
    def solve(w, y):
        return integrate(w, y)

    solve.defvjp(
        lambda w, y: (integrate(w, y), (w, y)),
        lambda kept, _: (jnp.zeros_like(kept[0]), integrate(*kept)),
    )

    def step(w, y):
        def loss(y):
            out = solve(w, y)
            return jnp.square(jnp.tanh(out @ w) @ w).sum(), out

        (_, out), again = jax.value_and_grad(loss, has_aux=True)(y)
        return out, again

    w, y = normal(W, W, seed=1) / 4, normal(32, W, seed=2)
    out, again = jax.jit(mixed_precision(step, policy))(w, y)
    bit_equal(out, again)
    assert relative_error(out, integrate(w, y)) < 2 * EPS[policy]
    rows = explain(step, policy)(w, y).equations
    assert any(row.reason.startswith("full: a solver") for row in rows)


@both
def test_a_scan_over_train_steps_with_a_solver_is_none(policy):
    """A deep equilibrium network applies the layer that it solves for once more."""

    def layer(z, w, x):
        return jnp.tanh(z @ w + x)

    def goes_on(state):
        return (jnp.abs(state[0] - state[1]).max() > 1e-3) & (state[2] < 20)

    def loss(w, x):
        start = jnp.zeros_like(x), jnp.ones_like(x), 0
        solve = lambda s: (layer(s[0], w, x), s[0], s[2] + 1)  # noqa: E731
        z = lax.stop_gradient(lax.while_loop(goes_on, solve, start)[0])
        return jnp.square(jnp.tanh(layer(z, w, x) @ w) @ w).mean()

    def step(w, x):
        return w - jax.grad(loss)(w, x), None

    def solver_rows(fun, x):
        rows = explain(fun, policy)(normal(W, W) / 4, x).equations
        return sum(row.reason.startswith("full: a solver") for row in rows)

    epoch = lambda w, xs: lax.scan(step, w, xs)[0]  # noqa: E731
    assert 0 < solver_rows(epoch, normal(3, 64, W)) <= solver_rows(step, normal(64, W))


@both
def test_a_loop_that_asks_a_token_is_no_solver(policy):
    """It ends where a certain token comes, and integers are no values to round."""

    def step(w, x):
        def generate(state):
            x, total, _ = state
            h = jnp.tanh(jnp.tanh(x @ w) @ w)
            return h @ w, total + h, h.argmax() == 3

        state = lax.while_loop(lambda s: ~s[2], generate, (x, x, jnp.array(False)))
        return w - jax.grad(lambda w: jnp.square(state[0] @ w @ w).sum())(w)

    rows = explain(step, policy)(normal(W, W), normal(64, W)).equations
    assert not any(row.reason.startswith("full: a solver") for row in rows)


@both
def test_residual_stream_of_layers(policy):
    """A scan over layers may keep its residual stream half, forward and backward."""
    w, ws, x = weights((5, W), (3, W, W), (4, 5))

    def f(params, x):
        w, ws = params
        body = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.sum(jnp.tanh(lax.scan(body, x @ w, ws)[0] @ w.T))

    jaxpr = trace(mixed_precision(jax.grad(f), policy), (w, ws), x)
    forward, backward = eqns(jaxpr, "scan")
    carries = [str(forward.outvars[0].aval.dtype), str(backward.outvars[0].aval.dtype)]
    assert carries == [HALF[policy]] * 2


ONE = jnp.ones((1, 1), jnp.float32)
IDS = jnp.zeros(1, jnp.int32)
ACCUMULATORS = {
    "sum": lambda s, x: s + x,
    "sum of products": lambda s, x: s + x @ ONE,
    "slice and concatenate": lambda s, x: jnp.concatenate([s[:1] + x, s[1:]]),
    "rows": lambda s, x: s.at[IDS].set(s[IDS] + x),
    "dynamic slice": lambda s, x: lax.dynamic_update_slice(
        s, lax.dynamic_slice(s, (0, 0), (1, 1)) + x, (0, 0)
    ),
}


@both
@pytest.mark.parametrize("start", ["zeros", "half"])
@pytest.mark.parametrize("name", ACCUMULATORS)
def test_accumulators_that_products_read(name, start, policy):
    """A carry that adds up is float32, also where a product reads the total."""

    def f(x):
        first = jnp.zeros((2, 1)) if start == "zeros" else (jnp.zeros((2, 1)) @ ONE * x)
        total = lax.fori_loop(0, 4096, lambda _, s: ACCUMULATORS[name](s, x), first)
        return total @ ONE

    with jax.numpy_rank_promotion("allow"):
        assert float(jax.jit(mixed_precision(f, policy))(ONE)[0, 0]) == 4096


@both
def test_returned_state_is_exact(policy):
    """Moved, sliced and merged arguments that are returned lose no digit."""
    w, x = weights((W, W), (4, W))

    def f(w, x):
        moved = w.T[::-1]
        ring = jnp.concatenate([w[4:], x @ w])
        branch = lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w.T, w)
        return (moved, ring, branch), (x @ moved, ring @ w, x @ branch)

    (moved, ring, branch), _ = mixed_precision(f, policy)(w, x)
    exact, _ = f(w, x)
    bit_equal((moved, ring[:4], branch), (exact[0], exact[1][:4], exact[2]))


def test_weights_that_start_at_zero():
    """A fresh head of a meta-learner, LoRA's B: zeros that are trained are state."""
    x, y = jnp.asarray(normal(6, 5)), jnp.asarray(normal(6, 7))

    def f(x, y):
        head = jnp.zeros((5, 7))
        for _ in range(3):
            fit = lambda h: jnp.mean((jnp.tanh(x @ h) - y) ** 2)  # noqa: E731
            head = head - 0.1 * jax.grad(fit)(head)
        return head, x @ head

    jaxpr = trace(mixed_precision(f, "mixed_bfloat16"), x, y)
    updates = [e for e in eqns(jaxpr, "sub") if e.outvars[0].aval.shape == (5, 7)]
    assert len(updates) == 3 and {d for e in updates for d in dtypes_in(e)} == {
        "float32"
    }


def test_fast_weights_are_no_residual_stream():
    """The delta rule: a state multiplied by slices of activations, not of weights."""
    w, x = weights((W, W), (2, W))

    def f(x, w):
        def rule(state, kv):
            k, v = kv
            error = v - jnp.einsum("bi,bij->bj", k, state)
            state = state + 0.5 * jnp.einsum("bi,bj->bij", k, error)
            return state, jnp.einsum("bi,bij->bj", k, state)

        xs = jnp.stack([x, x, x]) @ w
        return lax.scan(rule, jnp.zeros((2, W, W)), (xs, jnp.tanh(xs)))[1] @ w

    (scan,) = eqns(trace(mixed_precision(f, "mixed_bfloat16"), x, w), "scan")
    assert str(scan.outvars[0].aval.dtype) == "float32"


COUPLINGS = {
    "joined": lambda a, b: jnp.concatenate([b, a], -1),
    "set": lambda a, b: jnp.concatenate([a, a], -1).at[:, W:].set(b)[:, ::-1],
}


@pytest.mark.slow
@both
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_couplings_in_a_scan_hand_on_what_they_do_not_change(coupling, policy):
    """A flow and its inverse, each decorated by itself, come back to where they began.

    So they do unrolled, and by hand: what is added is computed in half.
    """
    ws, x = normal(6, W, W) / 3, normal(64, 2 * W)

    def forward(x, w):
        a, b = jnp.split(x, 2, -1)
        return COUPLINGS[coupling](a, b + jnp.tanh(a @ w)), None

    def backward(x, w):
        if coupling == "joined":
            b, a = jnp.split(x, 2, -1)
        else:
            a, b = jnp.split(x[:, ::-1], 2, -1)
        return jnp.concatenate([a, b - jnp.tanh(a @ w)], -1), None

    def flow(ws, x):
        return lax.scan(forward, x, ws)[0]

    def inverse(ws, x):
        return lax.scan(backward, x, ws, reverse=True)[0]

    there = jax.jit(mixed_precision(flow, policy))(ws, x)
    back = jax.jit(mixed_precision(inverse, policy))(ws, there)
    assert jnp.abs(back - x).max() < 1e-5
    assert jnp.abs(there - flow(ws, x)).max() > 1e-5


@both
def test_an_accumulator_beside_a_residual_stream(policy):
    """In a scan over layers the stream may be half, the sum of its values not."""
    w, ws, x = weights((5, W), (3, W, W), (4, 5))

    def f(ws, x):
        def block(carry, w):
            x, total = carry
            return (x + jnp.tanh(x @ w), total + x), None

        x = x @ w
        (x, total), _ = lax.scan(block, (x, jnp.zeros_like(x)), ws)
        return x @ w.T + total @ w.T

    (scan,) = eqns(trace(mixed_precision(f, policy), ws, x), "scan")
    dtypes = [str(v.aval.dtype) for v in scan.outvars]
    assert dtypes == [HALF[policy], "float32"]


@both
def test_no_scalar_is_half(policy):
    """0-d values are float32, a learned temperature too."""
    params, x = small()

    def f(params, t, x):
        h = (x @ params[0]) * t
        return jnp.sum(jnp.tanh(h) @ params[1]) / t

    with use_passes("none"):
        jaxpr = trace(
            mixed_precision(jax.value_and_grad(f, (0, 1)), policy),
            params,
            jnp.float32(0.3),
            x,
        )
    for eqn in walk(jaxpr):
        for var in eqn.outvars:
            assert (str(var.aval.dtype), var.aval.shape) != (HALF[policy], ())


# 4. Accumulation is float32.

ONES = jnp.ones((8192, 1), jnp.float32)


@pytest.mark.slow
@both
def test_sums_of_ones(policy):
    """8192 ones add up to 8192: bfloat16 stops at 256, float16 at 2048."""
    one = jnp.ones((1, 1), jnp.float32)

    def sums(x):
        h = x @ one  # half, and every sum reads it
        ids = jnp.zeros(8192, jnp.int32)
        return [
            jnp.sum(h),
            jnp.cumsum(h[:, 0])[-1],
            jax.ops.segment_sum(h, ids, 1)[0, 0],
            jnp.zeros(1).at[ids].add(h[:, 0])[0],
            lax.scan(lambda s, v: (s + v[0], None), jnp.float32(0), h)[0],
            lax.scan(lambda s, v: (s + v @ one, None), jnp.zeros((1, 1)), h[:, None])[
                0
            ][0, 0],
            lax.fori_loop(0, 8192, lambda i, s: s + h[i, 0], jnp.float32(0)),
            (jnp.ones((1, 8192)) @ h)[0, 0],
        ]

    for value in jax.jit(mixed_precision(sums, policy))(ONES):
        assert float(value) == 8192


@both
@pytest.mark.parametrize("decorate", ["loss", "gradient"])
def test_gradients_of_ones(policy, decorate):
    """Embedding rows, shared weights and scan constants collect 8192 cotangents."""
    one = jnp.ones((1, 1), jnp.float32)

    def fun(params):
        table, shared, scanned = params
        rows = table[jnp.zeros(8192, jnp.int32)] @ one
        used = lax.scan(lambda c, x: (c, x @ scanned), 0.0, ONES[:, None])[1]
        gathered = (ONES @ shared)[jnp.zeros(4096, jnp.int32)] @ one
        return jnp.sum(rows) + jnp.sum(used) + jnp.sum(gathered)

    grad = (
        jax.grad(mixed_precision(fun, policy))
        if decorate == "loss"
        else (mixed_precision(jax.grad(fun), policy))
    )
    table, shared, scanned = jax.jit(grad)((one, one, one))
    assert float(table[0, 0]) == 8192 and float(scanned[0, 0]) == 8192
    assert float(shared[0, 0]) == 4096


@pytest.mark.slow
def test_a_bias_is_repeated_before_it_is_rounded():
    """So that its gradient is a float32 sum: 4097 is none of bfloat16's numbers."""

    @mixed_precision("mixed_bfloat16")
    def fun(b, x):
        return (jnp.tanh(x @ jnp.zeros((1, 8)) + b[None]) @ jnp.ones((8, 1))).sum()

    bias = jax.grad(fun)(jnp.zeros(8), jnp.ones((4097, 1)))
    assert bias.tolist() == [4097] * 8


@pytest.mark.parametrize("weight", ["computed", "given"])
def test_a_weight_is_rounded_in_each_iteration(weight):
    """Its cotangents, of 300 steps, are added up in float32."""

    @mixed_precision("mixed_bfloat16")
    def fun(w):
        read = jnp.exp(w) * 2 if weight == "computed" else w
        step = lambda c, x: (c, x @ read)  # noqa: E731
        return lax.scan(step, 0.0, jnp.ones((300, 4, 8)))[1].sum()

    program = jax.make_jaxpr(fun)(jnp.zeros((8, 8)))
    (scan,) = [e for e in program.eqns if e.primitive.name == "scan"]
    assert all(v.aval.dtype == jnp.float32 for v in scan.invars)
    slope = 2.0 if weight == "computed" else 1.0
    np.testing.assert_array_equal(jax.grad(fun)(jnp.zeros((8, 8))), slope * 1200)


def test_a_sum_of_one_term_is_a_view():
    """The transpose of `x[None]` adds nothing up: its cotangent stays half."""

    def layer(x, kernel):
        return lax.conv(lax.max(x, 0.0)[None], kernel, (1, 1), "SAME")[0]

    def gradient(kernels, x):
        def loss(kernels):
            h = x
            for kernel in kernels:
                h = h + jax.vmap(layer, (0, None))(h, kernel)
            return jnp.mean(h**2)

        return jax.grad(loss)(kernels)

    args = [jnp.ones((8, 8, 3, 3))] * 3, jnp.ones((4, 8, 16, 16))

    def views(jaxpr):
        found = eqns(jaxpr, "reduce_sum", "squeeze")
        back = [e for e in found if "transpose" in str(e.source_info.name_stack)]
        return [e for e in back if e.invars[0].aval.ndim == 5]

    half = trace(mixed_precision(gradient, "mixed_bfloat16"), *args)
    assert [e.primitive.name for e in views(half)] == ["squeeze"] * 2
    assert list(map(dtypes_out, views(half))) == [["bfloat16"]] * 2
    # A user's rule holds for what the primitive is called.
    ruled = Policy("mixed_bfloat16", rules={"reduce_sum": "deny"})
    full = trace(mixed_precision(gradient, ruled), *args)
    assert [e.primitive.name for e in views(full)] == ["reduce_sum"] * 2
    assert list(map(dtypes_out, views(full))) == [["float32"]] * 2


def test_a_broadcast_that_repeats_nothing_is_a_view():
    """A vmapped convolution, as Equinox', is rounded where a batched one is.

    The transpose of `squeeze` is such a broadcast: the cotangent is rounded before it,
    for the bias too.
    """

    def conv(x, kernel):
        return lax.conv(x, kernel, (1, 1), "SAME")

    def one(x, kernel, bias):
        return jnp.squeeze(conv(x[None], kernel), 0) + bias

    def gradient(layer):
        def loss(params, x):
            for kernel, bias in params:
                x = jax.nn.gelu(layer(x, kernel, bias))
            return jnp.mean(x)

        return jax.grad(loss)

    batched = gradient(lambda x, k, b: conv(x, k) + b[None])
    vmapped = gradient(jax.vmap(one, (0, None, None)))
    args = [(normal(8, 8, 3, 3), normal(8, 1, 1))] * 3, normal(4, 8, 32, 32)

    def added_up(fun):
        report = explain(fun, "mixed_bfloat16")(*args)
        rows = [r for r in report.equations if r.primitive == "convert_element_type"]
        return sum(r.results[0].startswith("bf16[4,") for r in rows)

    with use_passes("none"):
        assert added_up(vmapped) == added_up(batched)
        half = trace(mixed_precision(vmapped, "mixed_bfloat16"), *args)
    spread = [e for e in eqns(half, "broadcast_in_dim") if e.outvars[0].aval.ndim == 5]
    assert spread and all(dtypes_in(e) == ["bfloat16"] for e in spread)


def test_user_cannot_break_accumulation():
    """A sum that a rule makes half still adds up in float32, and rounds once."""
    w = jnp.ones((1, 4), jnp.float32)
    policy = Policy("mixed_bfloat16", rules={"reduce_sum": "infer"})

    def f(x):
        return jnp.sum(x @ w, 0, keepdims=True) @ w.T

    jaxpr = trace(mixed_precision(f, policy), ONES)
    (total,) = eqns(jaxpr, "reduce_sum")
    assert dtypes_in(total) == ["float32"]
    assert float(mixed_precision(f, policy)(ONES)[0, 0]) == 4 * 8192


def test_psum_is_float32():
    """A sum over devices is float32."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    (w,) = weights((W, W))
    f = jax.shard_map(
        lambda x: lax.psum(x @ w, "i") @ w,
        mesh=mesh,
        in_specs=jax.P("i"),
        out_specs=jax.P(),
    )
    jaxpr = trace(mixed_precision(f, "mixed_bfloat16"), jnp.ones((4, W)))
    for eqn in walk(jaxpr):
        if eqn.primitive.name.startswith("psum"):
            assert dtypes_in(eqn) == ["float32"]


# 5. A product that no product depends on emits float32.


@both
def test_weight_gradients_are_float32(policy):
    params, x = small()
    jaxpr = trace(mixed_precision(jax.grad(loss), policy), params, x)
    out = {e.outvars[0].aval.shape: dtypes_out(e)[0] for e in products(jaxpr)}
    assert out[(7, 5)] == out[(3, 7)] == "float32"  # JAX transposes them afterwards
    assert all(set(dtypes_in(e)) == {HALF[policy]} for e in products(jaxpr))


@both
def test_transposed_products_are_half_as_well(policy):
    """Before differentiation no product may emit float32: its transposes would be."""
    params, x = small()
    half = mixed_precision(loss, policy)
    for eqn in products(trace(jax.grad(half), params, x)):
        assert set(dtypes_in(eqn)) == {HALF[policy]}


@pytest.mark.slow
def test_products_that_emit_float32_run_on_cpu():
    """XLA:CPU has no kernel for a transposed bfloat16 product that emits float32."""
    x, g = weights((2, 3, 5), (2, 3, 7))

    def f(x, g):
        h = jnp.einsum("bti,btj->ij", jnp.tanh(x), g)
        return jax.grad(lambda w: jnp.sum((jnp.tanh(x) @ w) * g))(h)

    with jax.named_scope("step"):
        result = jax.jit(mixed_precision(f, "mixed_bfloat16"))(x, g)
    assert relative_error(result, f(x, g)) < 8 * EPS["mixed_bfloat16"]


def test_weight_gradients_of_matrices_take_the_fast_kernel():
    """XLA:CPU multiplies no bfloat16 columns by columns: it would widen them."""

    def loss(w, x):
        return jnp.square(jax.nn.relu(x @ w) @ w).sum()

    def compiled(policy):
        step = jax.jit(mixed_precision(jax.grad(loss), policy))
        with use_passes("all", device="CPU"):
            return step.lower(jnp.ones((W, W)), jnp.ones((4, W))).compile().as_text()

    assert "lhs_contracting_dims={0}" in compiled("float32")
    assert "lhs_contracting_dims={0}" not in compiled("mixed_bfloat16")


@pytest.mark.slow
def test_vmapped_products_run_on_cpu():
    """`weight @ x` under vmap puts a transpose into a product's operand."""
    ws = [jnp.asarray(normal(*s, scale=0.1)) for s in ((48, 20), (48, 48), (10, 48))]

    def net(ws, x):
        for w in ws[:-1]:
            x = jax.nn.relu(w @ x)
        return ws[-1] @ x

    def f(ws, x):
        return jax.grad(lambda ws: jnp.mean(jax.vmap(net, (None, 0))(ws, x) ** 2))(ws)

    result = jax.jit(mixed_precision(f, "mixed_bfloat16"))(
        ws, jnp.asarray(normal(32, 20))
    )
    assert all(np.isfinite(g).all() for g in result)


# 6. What the compute dtype cannot hold.


@pytest.mark.parametrize("as_data", [False, True])
@both
def test_masks_survive(policy, as_data):
    """A mask of -1e9, or of float32's lowest number, makes no NaN."""
    q, k = weights((4, W), (4, W))
    for lowest in (-1e9, float(jnp.finfo(jnp.float32).min)):
        mask = np.where(np.tri(4, dtype=bool), 0, lowest).astype("f4")

        def f(q, k, mask=mask):
            logits = q @ k.T + mask
            return jax.nn.softmax(logits) @ k

        args = (q, k, jnp.asarray(mask)) if as_data else (q, k)
        result = jax.jit(mixed_precision(f, policy))(*args)
        assert relative_error(result, f(*args)) < 8 * EPS[policy]


@both
def test_masked_rows_between_products(policy):
    """A sum with a large argument that a product reads saturates."""
    w, x = weights((W, W), (4, W))
    mask = jnp.full((4, W), -1e9, jnp.float32)
    result = mixed_precision(lambda x, m: jax.nn.relu(x @ w + m) @ w, policy)(x, mask)
    assert np.all(np.asarray(result) == 0)


@both
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_stack_of_biases_is_no_mask(policy, is_trained):
    """Of members of an ensemble, each with its own; what is not trained may be one."""
    params = weights((3, W, 64), (3, 64, W), (3, 64, W))
    (biases,) = weights((3, 64))

    def step(params, biases, x):
        def loss(params, biases):
            def member(params, bias):
                w, v, u = params
                h = x @ w + bias[None]
                h = h - h.mean(-1, keepdims=True)
                h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
                return jnp.square(jax.nn.silu(h) @ v @ u.T)

            return jax.vmap(member)(params, biases).mean()

        trained = (params, biases) if is_trained else (params,)
        fixed = () if is_trained else (biases,)
        grads = jax.grad(lambda trained: loss(*trained, *fixed))(trained)
        return jax.tree.map(lambda w, g: w - g, trained, grads)

    half = mixed_precision(step, policy)
    jaxpr = trace(half, params, biases, normal(64, W))
    assert bool(eqns(jaxpr, "saturating_cast")) != is_trained


def test_factors_are_never_saturated():
    """A loss scale has to see an infinity; a mask that is added is saturated."""
    x = jnp.full((8, 8), 1e6, jnp.float32)
    product = jax.jit(mixed_precision(lambda x, w: x @ w, "mixed_float16"))
    assert np.isinf(np.asarray(product(x, x))).all()
    assert np.isinf(np.asarray(product(x.T, x))).all()


def test_overflow_is_seen():
    """What overflows in half by itself is infinite: loss scaling has to see it."""
    v = jnp.full((2, 2), 2.0**10, jnp.float32)
    result = mixed_precision(lambda v: (v @ v) @ v, "mixed_float16")(v)
    assert np.isinf(np.asarray(result)).all()


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
def test_epsilons_survive(eps):
    """w / (|w| + eps) is 0 at 0, not NaN."""
    w = jnp.zeros((4, 4), jnp.float32)
    x = jnp.ones((4, 4), jnp.float32)

    def f(x):
        h = x @ w
        return (h / (jnp.abs(h) + np.float32(eps))) @ x

    assert np.all(np.asarray(mixed_precision(f, "mixed_float16")(x)) == 0)


# 7. What a user asked for is obeyed.


@pytest.mark.parametrize("precision", ["highest", "float32", "BF16_BF16_F32_X3"])
def test_explicit_precision(precision):
    w, x = weights((W, W), (4, W))

    def f(x):
        return jnp.tanh(jnp.dot(x, w, precision=precision)) @ w

    assert halves("mixed_float16", f, x) == (1, 2)


def test_a_precision_of_the_configuration_is_named():
    """Else the line of a product that asks for nothing would be blamed."""
    x, w = normal(4, W), normal(W, W)
    with jax.default_matmul_precision("highest"):
        report = explain(lambda x: jnp.tanh(x @ w) @ w, "mixed_bfloat16")(x)
    assert report.half_flops == 0
    assert any("by jax_default_matmul_precision" in text for text in report.advice)


def test_a_resized_activation_is_one():
    """`jax.image.resize` asks for the highest precision, and its result goes on."""
    k, x = normal(3, 3, 8, 8), normal(2, 8, 8, 8)

    def net(x, k):
        dims = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)
        h = jax.image.resize(h, (2, 16, 16, 8), "bilinear")
        return lax.conv_general_dilated(h, k, (1, 1), "SAME", dimension_numbers=dims)

    def gradient(x, k):
        return jax.grad(lambda k: jnp.mean(net(x, k) ** 2))(k)

    half = trace(mixed_precision(gradient, "mixed_bfloat16"), x, k)
    averages = eqns(half, "dot_general")
    assert len(averages) == 4
    for eqn in averages:
        assert dtypes_in(eqn) == ["float32"] * 2 and dtypes_out(eqn) == ["float32"]
    report = explain(gradient, "mixed_bfloat16")(x, k)
    reasons = [r.reason for r in report.equations if r.primitive == "dot_general"]
    why = "full: precision HIGHEST was asked for; only its result is rounded"
    assert all(reason.startswith(why) for reason in reasons)


def test_explicit_cast_up():
    """A head that the user computes in float32 on purpose stays so."""
    w, x = weights((W, W), (4, W))

    def f(x):
        h = (x @ w).astype(jnp.bfloat16)
        return h.astype(jnp.float32) @ w

    assert halves("mixed_bfloat16", f, x) == (1, 2)
    given = x.astype(jnp.bfloat16)  # data that came in half asks for nothing
    assert halves("mixed_bfloat16", lambda x: x.astype(jnp.float32) @ w, given) == (
        1,
        1,
    )


# 8. Composites compute in float32 inside.


@both
@pytest.mark.parametrize(
    "composite",
    [
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.standardize,
        lambda h: jax.nn.logsumexp(h, axis=-1, keepdims=True),
    ],
    ids=["softmax", "log_softmax", "standardize", "logsumexp"],
)
def test_interiors(composite, policy):
    w, x = weights((W, W), (4, W))

    def f(x):
        h = composite(x @ w)
        return h @ jnp.ones((h.shape[1], W), jnp.float32)

    jaxpr = trace(mixed_precision(f, policy), x)
    for eqn in eqns(jaxpr, "sub", "exp", "log", "reduce_max", "square", "div", "mul"):
        assert HALF[policy] not in dtypes_in(eqn)


# 9. Custom derivatives, checkpoints, random bits.


@pytest.mark.slow
def test_random_bits_do_not_change():
    w, x = weights((W, W), (4, W))

    def f(key, x):
        noise = jax.random.normal(key, (4, W))
        keep = jax.random.bernoulli(key, 0.5, (4, W))
        jnp.where(keep, x @ w, 0) @ w
        return noise, keep, jax.random.gamma(key, 2.0, (4,))

    key = jax.random.key(1)
    bit_equal(mixed_precision(f, "mixed_float16")(key, x), f(key, x))


@pytest.mark.parametrize("decorate", ["loss", "gradient"])
def test_checkpoint_keeps_its_policy(decorate):
    """What is saved stays saved; a saved product is half."""
    w, x = weights((W, W), (4, W))

    def f(w, x):
        block = jax.checkpoint(
            lambda x: jnp.tanh(jnp.tanh(x @ w) @ w),
            policy=jax.checkpoint_policies.dots_saveable,
        )
        return jnp.sum(block(block(x)))

    plain = products(trace(jax.grad(f), w, x))
    grad = (
        jax.grad(mixed_precision(f, "mixed_bfloat16"))
        if decorate == "loss"
        else (mixed_precision(jax.grad(f), "mixed_bfloat16"))
    )
    with use_passes("none"):
        found = products(trace(grad, w, x))
    assert len(found) == len(plain)
    assert all(set(dtypes_in(e)) == {"bfloat16"} for e in found)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_checkpoint_casts_its_weights_again(wrap):
    """A half copy of a weight would live from the forward pass on."""
    v, w, x = weights((W, W), (W, W), (4, W))

    def loss(params, x):
        block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        for w in params:
            x = block(w, x)
        return jnp.sum(jnp.square(x))

    def step(params, x):
        grads = wrap(jax.grad(loss))(params, x)
        return [w - g for w, g in zip(params, grads, strict=True)]

    half = mixed_precision(step, "mixed_bfloat16")
    again = eqns(trace(half, [v, w], x), "remat2")
    assert len(again) == 2
    for eqn in again:
        given = [a.aval.dtype for a in eqn.invars if a.aval.shape == (W, W)]
        assert given == [np.float32]
        assert set(dtypes_in(products(eqn.params["jaxpr"])[0])) == {"bfloat16"}
    with use_passes("none"):
        apart = mixed_precision(step, "mixed_bfloat16")
        bit_equal(jax.jit(apart)([v, w], x), jax.jit(half)([v, w], x))


def in_a_scan(w, x):
    def loss(w):
        block = jax.checkpoint(lambda x: jnp.tanh(x @ w))
        return jnp.sum(jax.lax.scan(lambda x, _: (block(x), None), x, length=3)[0])

    return w - jax.grad(loss)(w)


def in_a_while_loop(w, x):
    """A descent to new inputs, and a step of the weights there."""
    block = jax.checkpoint(lambda x: jnp.tanh(x @ w))
    down = jax.grad(lambda x: jnp.sum(jnp.square(block(x))))
    _, x = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] - down(c[1])), (jnp.int32(0), x)
    )
    return w - jax.grad(lambda w: jnp.sum(x @ w))(w)


@pytest.mark.parametrize("step", [in_a_scan, in_a_while_loop])
def test_a_checkpoint_in_a_loop_casts_its_weights_once(step):
    half = trace(mixed_precision(step, "mixed_bfloat16"), *weights((W, W), (4, W)))
    (again,) = [e for e in eqns(half, "remat2") if e.params["differentiated"]]
    given = [a.aval.dtype.name for a in again.invars if a.aval.shape == (W, W)]
    assert "bfloat16" in given and "float32" not in given


# 10. Not every product is worth half.


@both
def test_products_that_stay_full(policy):
    w, x = weights((W, W), (4, W))
    positions = jnp.arange(4)

    def outer(x):
        return jnp.tanh(jnp.einsum("i,j->ij", x[:, 0], w[0]))

    def rotary(x):
        angles = x @ w
        return jnp.sin(angles.reshape(-1)).reshape(4, W) @ w

    def constants(x):
        frequencies = positions.astype(jnp.float32)[:, None] @ np.ones((1, W), "f4")
        return (x * frequencies) @ w

    assert halves(policy, outer, x) == (0, 1)
    assert halves(policy, rotary, x) == (1, 2)
    assert halves(policy, constants, x) == (1, 2)


@both
def test_integers_become_floats_in_float32(policy):
    """257 is no bfloat16, 2049 no float16."""
    w = jnp.ones((1, 1), jnp.float32)
    ids = jnp.asarray([[257], [2049]])

    def f(ids):
        return (
            ids.astype(jnp.float32) + (ids.astype(jnp.float32) @ w) * 0
        ), jnp.arange(3000, dtype=jnp.float32)

    (kept, counted) = mixed_precision(f, policy)(ids)
    assert kept[:, 0].tolist() == [257, 2049] and int(counted[-1]) == 2999


# 11. Before differentiation.


def test_casts_before_differentiation():
    """A weight's cast stays inside the loop, one a use; so its gradient is exact.

    Of a loop that nobody differentiates it stands outside, once.
    """
    w, x = weights((W, W), (4, W))

    def f(w, x):
        return jnp.sum(
            lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]
        )

    decorated = mixed_precision(f, "mixed_bfloat16")
    for loss in (decorated, jax.jit(decorated)):
        loops = eqns(trace(jax.grad(loss), w, x), "scan")
        summed = [v.aval for e in loops for v in e.outvars if v.aval.shape == (W, W)]
        assert {str(a.dtype) for a in summed} == {"float32"}
    (scan,) = eqns(trace(decorated, w, x), "scan")
    read = [v.aval for v in scan.invars if v.aval.shape == (W, W)]
    assert {str(a.dtype) for a in read} == {"bfloat16"}
    gradient = trace(mixed_precision(jax.grad(f), "mixed_bfloat16"), w, x)
    for scan in eqns(gradient, "scan"):  # a whole step casts it once, outside
        inside = eqns(scan.params["jaxpr"], "convert_element_type")
        assert (W, W) not in [
            e.outvars[0].aval.shape for e in inside if dtypes_out(e) == ["bfloat16"]
        ]


@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_inside_a_loss(jit):
    """A loss with a gradient penalty holds a backward pass, and is no whole step."""
    one = jnp.ones((1, 1), jnp.float32)

    def f(w):
        total = lax.scan(
            lambda s, _: (s + jnp.sum(one @ w), None), jnp.float32(0), None, length=4096
        )[0]
        penalty = jax.grad(lambda z: jnp.sum((z @ w) ** 2))(one)
        return total + 1e-30 * jnp.sum(penalty)

    half = mixed_precision(f, "mixed_bfloat16")
    gradient = jax.grad(jax.jit(half) if jit else half)(one)
    assert float(gradient[0, 0]) == 4096


def test_an_update_that_is_differentiated():
    """A function that returns new weights, under an outer gradient."""
    w, x = weights((W, W), (4, W))

    def adapt(w, x):
        loss = lambda w: jnp.sum(jnp.tanh(x @ w) @ w)  # noqa: E731
        return w - 0.1 * jax.grad(loss)(w)

    half = mixed_precision(adapt, "mixed_bfloat16")
    outer = trace(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ half(w, x)))), w)
    found = [set(dtypes_in(e)) for e in products(outer)]
    assert found.count({"bfloat16"}) >= 8 and {"bfloat16", "float32"} not in found


# 12. Values against float64, side by side with the same model written by hand.


def by_hand(params, x, labels, dtype):
    w1, b1, w2 = (p.astype(dtype) for p in params)
    h = jax.nn.relu(x.astype(dtype) @ w1 + b1[None])
    logits = (h @ w2).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


@pytest.mark.slow
@both
def test_not_worse_than_by_hand(policy):
    """Loss and gradients are as near to float64 as those of the hand-written model."""
    params, x, labels = data()
    with jax.enable_x64(True):
        exact = jax.value_and_grad(cross_entropy)(
            *jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x)), labels
        )
    dtype = jnp.dtype(HALF[policy])
    hand = jax.jit(jax.value_and_grad(lambda *a: by_hand(*a, dtype)))(params, x, labels)
    for ours in (
        jax.value_and_grad(mixed_precision(cross_entropy, policy)),
        mixed_precision(jax.value_and_grad(cross_entropy), policy),
    ):
        result = jax.jit(ours)(params, x, labels)
        for mine, theirs, true in zip(result, hand, exact, strict=True):
            bound = 1.5 * relative_error(theirs, true) + EPS[policy]
            assert relative_error(mine, true) <= bound


def test_mlp_is_in_the_programs():
    """`mlp` of the list is what the hand-written model computes."""
    params, x, labels = data()
    exact = by_hand(params, x, labels, jnp.float32)
    assert relative_error(cross_entropy(params, x, labels), exact) < 1e-6
    assert open_jaxpr(trace(mlp, params, x)).outvars[0].aval.shape == (4, W)
