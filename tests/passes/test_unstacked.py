"""What a later loop computes again from a stack is not stacked itself.

Judged on the rewritten jaxpr, and run beside the program that stacks everything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, HALF, eqns, relative_error, trace
from jax import lax
from programs import normal, weights

from jmp_rewrite import diagnose, explain, full_precision, mixed_precision, use_passes

T, B, H = 6, 16, 32  # iterations, rows, hidden units
POLICIES = sorted(HALF)


def lstm(params, state, x):
    """Stacks four gates, a cell and its tanh, and five functions of these."""
    w, u = params
    h, c = state
    i, f, g, o = jnp.split(x @ w + h @ u, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def tanh_cell(params, state, x):
    w, u = params
    h = jnp.tanh(x @ w[:, :H] + state[0] @ u[:, :H])
    return (h, state[1]), h


def loss_of(cell):
    def loss(params, xs):
        zeros = jnp.zeros((B, H))
        _, hs = lax.scan(functools.partial(cell, params), (zeros, zeros), xs)
        return jnp.square(hs).mean()

    return loss


def step_of(loss):
    def step(params, xs):
        grads = jax.grad(loss)(params, xs)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def arguments():
    return weights((H, 4 * H), (H, 4 * H)), normal(T, B, H)


def stacked(step, *args, policy="mixed_bfloat16"):
    """Returns how many stacks of hidden states the forward loop returns."""
    scan = eqns(trace(mixed_precision(step, policy), *args), "scan")[0]
    return sum(v.aval.shape == (T, B, H) for v in scan.outvars)


@pytest.fixture
def with_all_stacks():
    """Runs a program that stacks everything."""

    def run(fun, *args, **kwargs):
        with use_passes("-recompute_stacks"):
            return fun(*args, **kwargs)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_derivatives_of_gates_are_not_stacked(policy, with_all_stacks):
    step, args = step_of(loss_of(lstm)), arguments()
    everything = with_all_stacks(stacked, step, *args, policy=policy)
    assert everything - stacked(step, *args, policy=policy) == 5
    with jax.enable_x64(True):
        exact = jax.jit(step)(*jax.tree.map(lambda x: x.astype("f8"), args))
    found = jax.jit(mixed_precision(step, policy))(*args)
    before = with_all_stacks(jax.jit(mixed_precision(step, policy)), *args)
    change = [
        relative_error(_less(x, args[0]), _less(exact, args[0]))
        for x in (found, before)
    ]
    assert change[0] < min(1.1 * change[1], 4 * EPS[policy])
    assert relative_error(found, before) > 0


def _less(found, params):
    return jax.tree.map(lambda x, w: np.asarray(w, "f8") - np.asarray(x), found, params)


def test_the_rest_is_stacked_in_half():
    step, args = step_of(loss_of(lstm)), arguments()
    scan = eqns(trace(mixed_precision(step, "mixed_bfloat16"), *args), "scan")[0]
    kept = [v.aval.dtype.name for v in scan.outvars if v.aval.shape == (T, B, H)]
    # Four gates, two states before the cell, its tanh, and the results; the cell is
    # multiplied by one of the gates in each iteration, which is unrounded.
    assert sorted(kept) == ["bfloat16"] * 7 + ["float32"]


@pytest.mark.slow
def test_fewer_bytes_are_kept(with_all_stacks):
    step, args = step_of(loss_of(lstm)), arguments()
    reports = [
        explain(step, "mixed_bfloat16")(*args),
        with_all_stacks(explain(step, "mixed_bfloat16"), *args),
    ]
    few, many = (r.residual_bytes for r in reports)
    assert many - few == 5 * 2 * T * B * H
    again = [e for e in reports[0].equations if "recompute_stacks" in e.reason]
    # JAX < 0.11 writes 1 - t * t in two equations.
    assert {e.primitive for e in again} | {"one_minus_square"} == {
        "convert_element_type",
        "mul",
        "one_minus_square",
        "sub",
    }
    assert {e.phase for e in again} == {"backward"}


def returns(t, s, r):
    """Returns the derivative of tanh as well, written like JAX's."""
    return t, lax.sub(1.0, lax.mul(t, t))


def multiplies(t, s, r):
    """Keeps a product of two values that are stacked as well."""
    return t * s * r, 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("made", "fewer"), [(returns, 1), (multiplies, 3)])
def test_derivatives_of_tanh_alone_are_unstacked(made, fewer, with_all_stacks):
    """Derivatives of tanh alone are left out."""

    def loss(params, xs):
        w, u = params

        def body(h, x):
            t, s, r, _ = jnp.split(jnp.tanh(x @ w) + 0.1 * jnp.tanh(h @ u), 4, -1)
            t, s, r = map(jnp.tanh, (t, s, r))
            h, returned = made(t, s, r)
            return h, (h, returned)

        _, (hs, returned) = lax.scan(body, jnp.zeros((B, H)), xs)
        return jnp.square(hs).mean(), returned

    def step(params, xs):
        grads, returned = jax.grad(loss, has_aux=True)(params, xs)
        return jax.tree.map(lambda w, g: w - g, params, grads), returned

    args = arguments()
    assert with_all_stacks(stacked, step, *args) - stacked(step, *args) == fewer
    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(*args)
    plain = jax.jit(step)(*args)
    assert relative_error(found, plain) < 4 * EPS["mixed_bfloat16"]


def update_of(step, *args):
    found = jax.jit(step)(*args)
    return jax.tree.map(lambda w, new: new - w, args[0], found)


def beyond_one(y):
    return 1 / (y + 0.01)


def cube(y):
    return y * y * y


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("last", [jnp.log, jnp.sqrt, beyond_one, cube])
def test_full_precision_is_not_recomputed_from_half(last, policy, with_all_stacks):
    """A product reads a rounded gate; 1 less the gate is exact, as the user said."""
    (w,), xs = weights((8, 8)), normal(5, 3, 8)

    def loss(w, xs):
        def body(h, x):
            with full_precision():
                p = jax.nn.sigmoid(4 * (x @ w))
                y = last(1 - p + 1e-6)
            h = jnp.tanh(h @ w * 0.1 + p @ w * 0.1)
            return h, (y.sum(), h)

        _, (ys, hs) = lax.scan(body, jnp.zeros((3, 8)), xs)
        return -ys.mean() + jnp.square(hs).mean()

    step = step_of(loss)
    found = update_of(mixed_precision(step, policy), w, xs)
    before = with_all_stacks(update_of, mixed_precision(step, policy), w, xs)
    exact = update_of(step, w, xs)
    as_before = relative_error(before, exact)
    # What is left is the rounding of the layer beside it, which is small here.
    assert as_before < EPS[policy] / 100
    assert relative_error(found, exact) < as_before + EPS[policy] / 2048


@pytest.mark.slow
def test_a_difference_that_cancels_is_stacked(with_all_stacks):
    """Of a softplus that a product reads, less a number of its size."""
    (w,), xs = weights((8, 8)), normal(5, 3, 8)

    def step(w, xs):
        def loss(w):
            def body(h, x):
                t = jax.nn.softplus(x @ w + 30.0)
                return h, (t, t - 30.0)

            _, (ts, ys) = lax.scan(body, 0.0, xs)

            def second(h, slices):
                t, y = slices
                return jnp.tanh(h + t @ w * 0.01), y.sum()

            h, sums = lax.scan(second, jnp.zeros((3, 8)), (ts, ys))
            return jnp.square(h).mean(), sums

        grad, sums = jax.grad(loss, has_aux=True)(w)
        return w - grad, sums

    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, xs)[1]
    before = with_all_stacks(jax.jit(mixed_precision(step, "mixed_bfloat16")), w, xs)
    assert relative_error(found, before[1]) < 1e-6


def reduced(z):
    return 1 / (1 + jnp.square(z).sum(-1)), lambda a: a[:, None]


def flattened(z):
    return (2 * jnp.tanh(z)).reshape(-1), lambda a: a.reshape(z.shape)


def transposed(z):
    return 2 * jnp.tanh(z).T, lambda a: a.T


@pytest.mark.slow
@pytest.mark.parametrize("gate", [reduced, flattened, transposed])
def test_a_gate_of_another_shape(gate):
    """It is returned, for a log; its derivative is computed from it."""
    (w,), xs = weights((8, 8)), normal(5, 3, 8)

    def step(w, xs):
        def loss(w):
            def body(h, x):
                z = x @ w + h @ w
                a, wide = gate(z)
                h = jnp.tanh(z * wide(a))
                return h, (h, a)

            _, (hs, a) = lax.scan(body, jnp.zeros((3, 8)), xs)
            return jnp.square(hs).mean(), a

        grad, a = jax.grad(loss, has_aux=True)(w)
        return w - grad, a

    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, xs)
    assert relative_error(found, jax.jit(step)(w, xs)) < 4 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_two_loops_of_one_body():
    """They share a jaxpr, and only one of them returns what both stack."""
    params, xs = arguments()

    def loss(params, xs):
        zeros = jnp.zeros((B, H))

        def body(state, x):
            (h, c), _ = tanh_cell(params, state, x)
            return (h, c), (h, 1 - h * h)

        _, (hs, first) = lax.scan(body, (zeros, zeros), xs)
        _, (hs, _) = lax.scan(body, (zeros, zeros), hs)
        return jnp.square(hs).mean(), first

    def step(params, xs):
        grads, first = jax.grad(loss, has_aux=True)(params, xs)
        return jax.tree.map(lambda w, g: w - g, params, grads), first

    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, xs)
    assert relative_error(found, jax.jit(step)(params, xs)) < EPS["mixed_bfloat16"] * 4


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.checkpoint])
def test_with_other_transformations(wrap, with_all_stacks):
    args = arguments()
    if wrap is jax.vmap:
        step = jax.vmap(step_of(loss_of(lstm)), (None, 0))
        args = args[0], jnp.stack([args[1], -args[1]])
    else:
        step = step_of(wrap(loss_of(lstm)))
    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(*args)
    before = with_all_stacks(jax.jit(mixed_precision(step, "mixed_bfloat16")), *args)
    assert relative_error(found, before) < EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_a_loop_over_steps():
    args = arguments()
    step = step_of(loss_of(lstm))

    def epoch(params, batches):
        return lax.scan(lambda p, xs: (step(p, xs), None), params, batches)[0]

    batches = jnp.stack([args[1], args[1] / 2, -args[1]])
    found = jax.jit(mixed_precision(epoch, "mixed_bfloat16"))(args[0], batches)
    plain = jax.jit(epoch)(args[0], batches)
    assert relative_error(found, plain) < EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_diagnose_runs_recomputed_values():
    """Its results are those of the rewritten program, which reads rounded gates."""
    step, args = step_of(loss_of(lstm)), arguments()
    plain = jax.jit(step)(*args)
    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(*args)
    diagnosis = diagnose(step, "mixed_bfloat16")(*args)
    changes = [_less(x, args[0]) for x in (found, plain)]
    errors = [_of_step(f, p) for f, p in zip(*changes, strict=True)]
    assert list(diagnosis.results.values()) == pytest.approx(errors, rel=1e-3)


def _of_step(found, plain):
    """The error of a step: each element counts as much as its gradient."""
    weight = jnp.abs(plain)  # the step is a multiple of the gradient
    square = jnp.sum(weight * (found - plain) ** 2) / jnp.sum(weight * plain**2)
    return float(square**0.5)
