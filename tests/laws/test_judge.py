"""The judge itself: what is by hand, what a device is given, and what is caught."""

import itertools

import amplifying
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from amplifying import CASES, POLICIES, SUITED, normal, trace
from by_hand import DEVICES, DTYPES, as_device, by_hand, reference
from helpers import arrays
from jax import lax
from jax.extend import core as jex
from judge import EPS, Judge

from jmp_rewrite import mixed_precision_jaxpr

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
EXACT = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
RNG = np.random.RandomState(0)
X, W, V = (normal(RNG, 8, 8) for _ in range(3))


def half(x, dtype=bf16):
    """Rounds to half."""
    return np.asarray(x, f32).astype(dtype).astype(f32)


def run(fun, *args, dtype=bf16):
    return by_hand(trace(fun, args), dtype)(jax.tree.leaves(args))


def same(found, *expected):
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_product_has_half_operands(dtype):
    """Alone it emits float32: no other product reads it."""
    found = run(lambda x, w: x @ w, X, W, dtype=dtype)
    same(found, half(X, dtype) @ half(W, dtype))


def test_a_product_that_a_product_reads_is_half():
    found = run(lambda x, w, v: jnp.tanh(x @ w) @ v, X, W, V)
    same(found, half(np.tanh(half(half(X) @ half(W)))) @ half(V))


def test_a_product_may_be_one_number():
    same(run(lambda x, y: x @ y, X[0], X[1]), half(X[0]) @ half(X[1]))


def test_half_with_float32_is_float32():
    """The sum is float32, so no half value leads from one product to the other."""
    found = run(lambda x, w, v: (x @ w + x) @ v, X, W, V)
    same(found, half(half(X) @ half(W) + X) @ half(V))


@pytest.mark.parametrize("careful", [True, False])
def test_who_asks_for_a_float32_result(careful):
    """A careful expert, where a float32 array is added before the next product."""
    closed = trace(lambda x, w, v: (x @ w + x) @ v, (X, W, V))
    product = half(X) @ half(W)
    expected = half((product if careful else half(product)) + X) @ half(V)
    same(by_hand(closed, bf16, careful)([X, W, V]), expected)


@pytest.mark.parametrize("careful", [True, False])
def test_values_without_a_product_behind_are_float32_by_any_hand(careful):
    """Not through a decomposition or a comparison either, nor in a loop's state."""

    def fun(x, w, v):
        step = lambda c, _: (c + x @ w, None)  # noqa: E731
        chosen = jnp.where(x @ w > 0, x, v) @ v
        solved = jnp.linalg.inv(x @ w + 9 * jnp.eye(8, dtype=f32)) @ v
        return chosen, solved, lax.scan(step, x, None, length=2)[0] @ v

    product = half(X) @ half(W)
    found = by_hand(trace(fun, (X, W, V)), bf16, careful)([X, W, V])
    inverse = np.linalg.inv(product + 9 * np.eye(8))
    same(found[:1], half(np.where(product > 0, X, V)) @ half(V))
    np.testing.assert_allclose(found[1], half(inverse) @ half(V), atol=2e-2)
    same(found[2:], half(X + product + product) @ half(V))


def test_half_with_a_number_is_half():
    found = run(lambda x, w, v: ((x @ w) * 0.3 + 1e-8) @ v, X, W, V)
    scaled = half(half(half(X) @ half(W)) * half(0.3))
    same(found, half(scaled + half(1e-8)) @ half(V))


def test_a_scalar_argument_is_no_number():
    """As in JAX, where a float32 array promotes whatever its rank is."""
    found = run(lambda x, w, s, v: ((x @ w) * s) @ v, X, W, f32(0.3), V)
    same(found, half((half(X) @ half(W)) * f32(0.3)) @ half(V))


def test_reductions_add_up_in_float32():
    def fun(x, w, v):
        h = x @ w
        return (h - h.sum(1, keepdims=True)) @ v

    found = run(fun, X, W, V)
    h = half(half(X) @ half(W))
    same(found, half(h - half(h.sum(1, keepdims=True))) @ half(V))


def test_a_carry_is_float32():
    def fun(x, w):
        step = lambda c, _: (c + 1e-3 * jnp.tanh(c @ w), c @ w)  # noqa: E731
        return lax.scan(step, x, None, length=5)

    c = X
    stacked = []
    for _ in range(5):
        product = half(c) @ half(W)
        stacked.append(product)
        c = c + f32(1e-3) * np.tanh(product)
    same(run(fun, X, W), c, np.stack(stacked))


def test_a_stack_is_as_it_was_computed():
    """Half, where a product reads it behind the loop."""

    def fun(x, w, v):
        ys = lax.scan(lambda c, _: (c * 0.5, jnp.tanh(c @ w)), x, None, length=2)[1]
        return ys @ v

    steps = [half(np.tanh(half(half(c) @ half(W)))) for c in (X, X / 2)]
    same(run(fun, X, W, V), np.stack(steps) @ half(V))


def test_a_branch_gives_float32():
    def fun(x, w, v):
        return lax.cond(x[0, 0] > -9, lambda h: jnp.tanh(h), lambda h: h, x @ w) @ v

    # The product is read as half by a branch, but no half value leaves that.
    same(run(fun, X, W, V), half(np.tanh(half(X) @ half(W))) @ half(V))


def test_decompositions_and_named_precisions_are_float32():
    def fun(x, w):
        return jnp.linalg.inv(x), jnp.matmul(x, w, precision="highest")

    found = run(fun, X, W)
    np.testing.assert_allclose(found[0], np.linalg.inv(X), rtol=1e-3)
    same(found[1:], X @ W)


def test_the_range_is_that_of_half():
    """By hand nothing saturates."""
    (found,) = run(lambda x: (x * 1e5) @ x, X, dtype=f16)
    assert not np.isfinite(found).any()


def test_two_calls_of_one_function_are_two():
    """One product is read by a product, the other by float32 code."""
    product = jax.jit(lambda a, b: a @ b)
    found = run(lambda x, w: (product(product(x, w), x), product(w, x)), X, W)
    first = half(half(X) @ half(W)) @ half(X)
    same(found, first, half(W) @ half(X))


@pytest.mark.breadth
@pytest.mark.parametrize("program", SUITED, ids=str)
def test_programs_are_evaluated(program):
    """The evaluator agrees with JAX, and the reference with both."""
    args = program.args()
    fun = lambda *a: arrays(program.fun(*a))  # noqa: E731
    closed, leaves = trace(fun, args), jax.tree.leaves(args)
    run = jax.jit(jex.jaxpr_as_fun(closed), compiler_options=EXACT)
    expected = run(*leaves)
    found = as_device(closed, "cpu")(leaves), reference(closed)(leaves)
    for mine, exact, x in zip(*found, expected, strict=True):
        assert mine.dtype == x.dtype
        tolerance = 2e-2 if x.dtype in (bf16, f16) else 2e-5
        for value in (mine, exact):
            x, value = np.asarray(x, np.float64), np.asarray(value, np.float64)
            np.testing.assert_allclose(value, x, rtol=tolerance, atol=tolerance)


def test_the_reference_is_exact():
    (found,) = reference(trace(lambda x: jnp.sum(x * x), (X,)))([X])
    assert found.dtype == np.float64
    assert found == np.sum(X.astype(np.float64) ** 2)


def test_each_device_reads_its_own_branch():
    """A value that is stored is rounded on a GPU, and not on a CPU."""
    from jmp_rewrite._passes.by_device import Where, by_device

    def fun(x):
        rounded = x.astype(bf16).astype(jnp.float32)
        return tuple(
            by_device([rounded], [x], {Where((device,)): lambda _, x: [x]})[0]
            for device in ("cpu", "tpu", "TPU v5 lite")
        )

    closed = jax.make_jaxpr(fun)(X)
    for device, exact in {
        "cpu": (True, False, False),
        "cuda": (False, False, False),
        "tpu": (False, True, False),
        "TPU v5 lite": (False, True, True),
    }.items():
        found = as_device(closed, device)([X])
        same(found, *(X if e else half(X) for e in exact))


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("program", "policy"), list(zip(SUITED, itertools.cycle(POLICIES), strict=False))
)
def test_emulation_matches_a_cpu(program, policy):
    """Values may be rounded to the other side, where their last bits differ.

    Without excess precision XLA:CPU rounds inside a half `logistic` as well.
    """
    args = program.args()
    closed = trace(lambda *a: arrays(program.fun(*a)), args)
    rewritten, leaves = mixed_precision_jaxpr(closed, policy), jax.tree.leaves(args)
    found = as_device(rewritten, "cpu")(leaves)
    run = jax.jit(jex.jaxpr_as_fun(rewritten), compiler_options=EXACT)
    for mine, x in zip(found, run(*leaves), strict=True):
        mine, x = np.asarray(mine, np.float64), np.asarray(x, np.float64)
        assert np.linalg.norm(mine - x) <= 2 * EPS[policy] * np.linalg.norm(x)


def rounds_everything(closed, dtype):
    """Rounds each float32 value: what no rewriting may do."""

    def fun(*args):
        env = dict(zip(closed.jaxpr.invars, args, strict=True))
        read = lambda v: v.val if hasattr(v, "val") else env[v]  # noqa: E731
        for eqn in closed.jaxpr.eqns:
            outs = eqn.primitive.bind(
                *map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params)
            )
            outs = outs if eqn.primitive.multiple_results else [outs]
            for var, x in zip(eqn.outvars, outs, strict=True):
                is_float = x.dtype == np.float32
                env[var] = x.astype(dtype).astype(f32) if is_float else x
        return [read(v) for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(fun)(*closed.in_avals)


def small_steps(x, w):
    s = x
    for _ in range(3):
        s = s + 1e-3 * jnp.tanh(s @ w)
    return s - x


def arguments(seed):
    rng = np.random.RandomState(seed)
    return [normal(rng, 8, 8), normal(rng, 8, 8)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wrong_rewriting_is_caught(policy):
    judge = Judge(trace(small_steps, arguments(0)), arguments)
    wrong = rounds_everything(judge.closed, DTYPES[policy])
    (found,) = judge.verdicts(policy, "cuda", wrong)
    assert not found.holds and found.ours > 0.1
    (found,) = judge.verdicts(policy, "cuda", judge.closed)
    assert found.holds and found.ours < EPS[policy]


def test_new_infinities_break_the_law():
    judge = Judge(trace(lambda x, w: 1e4 * (x @ w), arguments(0)), arguments)
    closed = jax.make_jaxpr(lambda x, w: (x @ w * f32(1e6)) * f32(1e-2))(*arguments(0))
    wrong = rounds_everything(closed, f16)
    (found,) = judge.verdicts("mixed_float16", "cuda", wrong)
    assert np.isnan(found.ours) and not found.holds


def test_integers_are_counted():
    """The error is the share that differs, however much they do."""
    judge = Judge(trace(lambda x, w: (x > 0, w), arguments(0)), arguments)
    other = jax.make_jaxpr(lambda x, w: (x > 0.1, w))(*arguments(0))
    found, _ = judge.verdicts("mixed_bfloat16", "cpu", other)
    assert 0.1 < found.ours < 0.5 and found.hand == 0 and not found.holds


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_float32_has_no_error(device):
    for case in CASES:
        judged = amplifying.judge_of(case, "forward")
        rewritten = mixed_precision_jaxpr(judged.closed, "float32")
        for found in judged.verdicts("float32", device, rewritten):
            assert found.ours == found.hand


def test_a_grouped_convolution_is_differentiated():
    """Its transpose is a reshape that permutes, in one equation."""

    def loss(w, x):
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=2
        )
        return jnp.sin(y).sum()

    args = normal(RNG, 3, 3, 2, 6), normal(RNG, 2, 5, 5, 4)
    closed = trace(jax.grad(loss, (0, 1)), args)
    found = as_device(closed, "cpu")(args)
    for a, b in zip(found, jax.grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
