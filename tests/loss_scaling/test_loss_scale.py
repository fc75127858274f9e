"""The loss scale's state, arithmetic and errors, against a plain Python reference."""

import functools
import math

import flax.serialization
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jmp_rewrite import (
    LossScaleState,
    all_finite,
    loss_scale_state,
    loss_scaling,
    scale_loss,
    unscale,
    where_applied,
)

F32_MAX = float(np.finfo(np.float32).max)
INF, NAN = math.inf, math.nan


def lenient(tx):
    """Optax leans on implicit promotion: allow it inside, and only there."""

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    def update(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(*args, **kwargs)

    return optax.GradientTransformationExtraArgs(init, update)


def adam(*args, **kwargs):
    return lenient(optax.adamw(*args, **kwargs))


def bits(tree):
    """The tree's dtypes, shapes and bytes: equal only if nothing changed at all."""

    def leaf(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return str(x.dtype), x.shape, np.asarray(x).tobytes()

    return jax.tree.map(leaf, tree)


def reference(finite, init, interval, growth, backoff, low, high):
    """Micikevicius et al., section 3.2, in plain Python; one tuple a step."""
    scale, steps, skipped, consecutive, rows = init, 0, 0, 0, []
    for ok in finite:
        if ok:
            steps, consecutive = steps + 1, 0
            if steps == interval:
                scale, steps = min(scale * growth, high), 0
        else:
            scale, steps = max(scale * backoff, low), 0
            skipped, consecutive = skipped + 1, consecutive + 1
        rows.append((scale, steps, skipped, consecutive, ok))
    return rows


def trajectory(tx, finite):
    """The states that a sequence of steps leads through, in one `lax.scan`."""

    def step(carry, ok):
        params, state = carry
        grads = jnp.where(ok, state.loss_scale, jnp.float32(jnp.inf))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (*state[:5], params)

    params = jnp.zeros((), jnp.float32)
    _, rows = jax.lax.scan(step, (params, tx.init(params)), jnp.array(finite))
    return [tuple(row) for row in zip(*(x.tolist() for x in rows), strict=True)]


powers = st.integers(-10, 20).map(lambda k: 2.0**k)


def trajectories(examples):
    """Runs a law on so many sequences of finite and other steps."""
    drawn = hypothesis.given(
        finite=st.lists(st.booleans(), min_size=32, max_size=32),
        bounds=st.tuples(powers, powers, powers).map(sorted),
        interval=st.integers(1, 6),
        growth=st.sampled_from([2.0, 4.0]),
        backoff=st.sampled_from([0.5, 0.25]),
    )
    limits = hypothesis.settings(max_examples=examples)
    return lambda law: limits(drawn(law))


def check_trajectory(finite, bounds, interval, growth, backoff):
    low, init, high = bounds
    tx = loss_scaling(
        optax.sgd(1.0),
        init_scale=init,
        growth_interval=interval,
        growth_factor=growth,
        backoff_factor=backoff,
        min_scale=low,
        max_scale=high,
    )
    want = reference(finite, init, interval, growth, backoff, low, high)
    applied = np.cumsum(finite)
    got = trajectory(tx, finite)
    assert [row[:5] for row in got] == want
    # True gradients are 1 whatever the scale: the scale used is the one undone.
    assert [row[5] for row in got] == (-applied).tolist()


@pytest.mark.slow
@trajectories(30)
def test_trajectory_is_the_reference(finite, bounds, interval, growth, backoff):
    check_trajectory(finite, bounds, interval, growth, backoff)


@pytest.mark.slow
@trajectories(150)
def test_more_trajectories_are_the_reference(finite, bounds, interval, growth, backoff):
    check_trajectory(finite, bounds, interval, growth, backoff)


T, F = True, False
# TensorFlow, training/experimental/loss_scale_test.py: period, factor, first scale,
# steps, the scale after each.
TENSORFLOW = [
    (2, 2, 1, "TTTTTT", [1, 2, 2, 4, 4, 8]),
    (2, 2, F32_MAX / 4, "TTTTTT", [F32_MAX / d for d in (4, 2, 2, 1, 1, 1)]),
    (2, 2, 1024, "FFFFFF", [512, 256, 128, 64, 32, 16]),
    (2, 2, 16, "FFFFFF", [8, 4, 2, 1, 1, 1]),
    (2, 2, 1, "TTTFT", [1, 2, 2, 1, 1]),
    (2, 2, 32, "TFTFTFT", [32, 16, 16, 8, 8, 4, 4]),
    (2, 2, 4, "FTTTFTFTTTF", [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]),
    (1, 2, 1, "TTTFTT", [2, 4, 8, 4, 8, 16]),
    (1, 2, 1, "TFTFTFTFT", [2, 1, 2, 1, 2, 1, 2, 1, 2]),
    (2, 3, 4, "TTFTT", [4, 12, 4, 4, 12]),
    # Keras 3's, with the floor that it lacks
    (1, 2, 400, "FFFF", [200, 100, 50, 25]),
    (2, 2, 2, "TTTTTTTT", [2, 4, 4, 8, 8, 16, 16, 32]),
]


@pytest.mark.parametrize("period, factor, init, steps, want", TENSORFLOW)
def test_tensorflows_published_sequences(period, factor, init, steps, want):
    tx = loss_scaling(
        optax.sgd(1.0),
        init_scale=init,
        growth_interval=period,
        growth_factor=float(factor),
        backoff_factor=1 / factor,
        min_scale=1.0,
        max_scale=F32_MAX,
    )
    got = [row[0] for row in trajectory(tx, [s == "T" for s in steps])]
    np.testing.assert_allclose(got, want, rtol=1e-6)  # 1/3 is not exact


def test_recovers_from_floor_and_ceiling():
    tx = loss_scaling(optax.sgd(1.0), growth_interval=2)
    got = trajectory(tx, [False] * 200 + [True] * 120 + [False, True])
    scales = [row[0] for row in got]
    assert scales[199] == 2.0**-14 and scales[201] == 2.0**-13
    assert scales[319] == 2.0**24 and scales[320] == 2.0**23
    assert all(math.frexp(s)[0] == 0.5 for s in scales)
    assert got[-1][5] == -121.0


@pytest.mark.slow
def test_scale_at_float32_max_still_gives_true_gradients():
    tx = loss_scaling(optax.sgd(1.0), init_scale=2.0**127, max_scale=F32_MAX)
    updates, _ = tx.update(jnp.float32(2.0**127), tx.init(1.0))
    assert updates == -1.0


@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_fixed_scale_never_moves_and_skips(scale):
    tx = loss_scaling(optax.sgd(1.0), scale, growth_interval=1)
    got = trajectory(tx, [True, False, False, True])
    assert [row[0] for row in got] == [scale] * 4
    assert [row[2:5] for row in got] == [
        (0, 0, True),
        (1, 1, False),
        (2, 2, False),
        (2, 0, True),
    ]
    assert [row[5] for row in got] == [-1.0, -1.0, -1.0, -2.0]


@pytest.mark.slow
def test_none_passes_everything_through():
    bare, tx = adam(0.1), loss_scaling(adam(0.1), None)
    params = {"w": jnp.ones(3), "h": jnp.ones(2, jnp.bfloat16)}
    grads = {"w": jnp.array([1.0, INF, -0.0]), "h": jnp.ones(2, jnp.bfloat16)}
    state = tx.init(params)
    assert state.loss_scale == 1
    want, want_state = bare.update(grads, bare.init(params), params)
    got, state = tx.update(grads, state, params)
    assert bits(got) == bits(want) and bits(state.inner_state) == bits(want_state)
    assert state.last_step_finite and state.skipped_steps == 0


@pytest.mark.parametrize("before", ["dynamic", 1024.0, None])
@pytest.mark.parametrize("after", ["dynamic", 64.0, None])
def test_a_checkpoint_may_change_policy(before, after):
    old, new = (loss_scaling(optax.sgd(1.0), s) for s in (before, after))
    state = old.init(jnp.zeros(()))
    assert jax.tree.structure(state) == jax.tree.structure(new.init(jnp.zeros(())))
    grads = jax.grad(lambda p: scale_loss(3 * p, state))(jnp.zeros(()))
    updates, state = new.update(grads, state)
    assert updates == -3.0
    wanted = {"dynamic": old.init(1.0).loss_scale, 64.0: 64.0, None: 1.0}[after]
    assert state.loss_scale == wanted


def test_state_is_strongly_typed_from_the_start():
    tx = loss_scaling(optax.inject_hyperparams(optax.adam)(0.1))
    state = tx.init({"w": jnp.asarray(1.0), "b": jnp.ones(2)})
    dtypes = ["float32", "int32", "int32", "int32", "bool"]
    assert [str(x.dtype) for x in state[:5]] == dtypes
    assert not any(x.weak_type for x in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("donate", [False, True])
def test_one_compilation_serves_every_step(dtype, donate):
    tx = loss_scaling(adam(0.1), growth_interval=1, init_scale=256.0)
    params = {"w": jnp.ones(4, dtype), "b": jnp.asarray(0.5, dtype)}
    state = tx.init(params)
    avals = jax.tree.map(jax.typeof, state)

    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    def step(params, state, x):
        def loss(p):
            return scale_loss(jnp.sum(p["w"] * x) + p["b"], state)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for x in (1.0, INF, 2.0):
        params, state = step(params, state, jnp.asarray(x, dtype))
    assert step._cache_size() == 1
    assert jax.tree.map(jax.typeof, state) == avals
    assert state.skipped_steps == 1 and all_finite(params)


@pytest.mark.slow
def test_state_round_trips(tmp_path):
    tx = loss_scaling(optax.chain(optax.clip(1.0), adam(0.1)), min_scale=2.0)
    params = {"w": jnp.ones(3)}
    _, state = tx.update({"w": jnp.array([1.0, NAN, 2.0])}, tx.init(params), params)
    _, state = tx.update({"w": jnp.full(3, 16384.0)}, state, params)
    again = jax.tree.map(lambda x: x, state)
    assert bits(again) == bits(state) and isinstance(again, LossScaleState)
    blank = tx.init(params)
    raw = flax.serialization.to_bytes(state)
    assert bits(flax.serialization.from_bytes(blank, raw)) == bits(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", blank)
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


# What is computed: scale_loss


def cube(x):
    return jnp.sum(x**3)


@pytest.fixture
def state():
    return loss_scaling(optax.sgd(1.0), 1024.0).init(jnp.ones(3))


X = np.array([1.0, -2.0, 0.5], np.float32)
DERIVATIVES = {
    "grad": jax.grad,
    "jit": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "jvp of jvp": lambda f: (
        lambda x: jax.jvp(
            lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (jnp.ones_like(x),)
        )[1]
    ),
    "hessian": jax.hessian,
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 1)),
    "third": lambda f: jax.jacfwd(jax.jacrev(jax.jacfwd(f))),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "scan": lambda f: (
        lambda x: jax.lax.scan(
            lambda c, x: (c, jax.grad(f)(x)), None, jnp.stack([x, 2 * x])
        )[1]
    ),
    "grad of scan": lambda f: jax.grad(
        lambda x: jnp.sum(
            jax.lax.scan(lambda c, y: (c, f(y * x)), None, jnp.stack([x, x]))[1]
        )
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_derivative_is_multiplied_once(state, name):
    derivative = DERIVATIVES[name]
    want = 1024.0 * derivative(cube)(X)
    got = derivative(lambda x: scale_loss(cube(x), state))(X)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_value_and_dtype_are_unchanged(state, dtype):
    loss = jnp.asarray(1 / 3, dtype)
    value, grad = jax.value_and_grad(lambda x: scale_loss(x, state))(loss)
    assert bits(value) == bits(loss)
    assert grad == 1024 and grad.dtype == loss.dtype


def test_weak_type_of_the_loss_survives(state):
    out = jax.eval_shape(lambda x: scale_loss(x, state), 1.0)
    assert out.weak_type and out.dtype == jnp.float32


def test_float16_tangent_of_zero_survives_a_large_scale():
    state = loss_scaling(optax.sgd(1.0), 2.0**20).init(1.0)
    one = jnp.float16(1)
    for t, want in ((0.0, 0.0), (2.0**-20, 1.0)):
        got = jax.jvp(lambda x: scale_loss(x, state), (one,), (jnp.float16(t),))
        assert got[1] == want


def test_float16_loss_at_the_first_scale_is_finite():
    state = loss_scaling(optax.sgd(1.0)).init(1.0)
    assert jax.grad(lambda x: scale_loss(x, state))(jnp.float16(1)) == 32768


def test_gradient_penalty_of_the_unscaled_loss_is_scaled_once(state):
    def total(x):
        return cube(x) + jnp.sum(jax.grad(cube)(x) ** 2)

    want = 1024 * jax.grad(total)(X)
    got = jax.grad(lambda x: scale_loss(total(x), state))(X)
    np.testing.assert_array_equal(got, want)


# What is computed: unscaling


def test_small_half_gradients_survive():
    tx = loss_scaling(optax.sgd(1.0))
    true = 1e-8  # below float16's smallest number, 6e-8
    grads = jnp.full(2, true * 2**15, jnp.float16)
    updates, _ = tx.update(grads, tx.init(jnp.ones(2)), jnp.ones(2))
    assert updates.dtype == jnp.float32
    np.testing.assert_allclose(updates, -true, rtol=2**-10)
    np.testing.assert_allclose(unscale(grads, tx.init(1.0)), true, rtol=2**-10)


@pytest.mark.slow
def test_other_leaves_pass_and_wider_ones_keep_their_dtype(state):
    with jax.enable_x64(True):
        grads = {
            "c64": jnp.array([1024 + 2048j], jnp.complex64),
            "c128": jnp.array([1024e-30 + 2048j], jnp.complex128),
            "f64": jnp.array([1024 * (1 + 2.0**-40)], jnp.float64),
            "int": jnp.array([7], jnp.int32),
            "bool": jnp.array([True]),
            "none": None,
            "float0": np.zeros(2, jax.dtypes.float0),
            "key": jax.random.key(0),
        }
        out = unscale(grads, state)
        assert jax.tree.map(lambda x: x.dtype, out) == jax.tree.map(
            lambda x: x.dtype, grads
        )
        assert out["c64"][0] == 1 + 2j and out["c128"][0] == 1e-30 + 2j
        assert out["f64"][0] == 1 + 2.0**-40 and out["int"][0] == 7
        assert out["none"] is None


def test_finiteness_is_judged_on_true_gradients():
    # Finite scaled, infinite unscaled: Keras and torch let it through.
    tx = loss_scaling(optax.sgd(1.0), 2.0**-10)
    updates, state = tx.update(jnp.float32(2.0**120), tx.init(jnp.float32(1)))
    assert not state.last_step_finite and bits(updates) == bits(-jnp.float32(0))


@pytest.mark.breadth
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_skipped_step_changes_no_bit(bad, dtype):
    tx = loss_scaling(adam(0.1, weight_decay=0.1))
    params = jnp.array([0.0, -0.0, 1.5, -2.5], dtype)
    state = tx.init(params)
    _, state = tx.update(jnp.ones(4, dtype), state, params)
    grads = jnp.array([1.0, bad, 1.0, 1.0], dtype)
    updates, after = tx.update(grads, state, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert bits(after.inner_state) == bits(state.inner_state)


@pytest.mark.slow
def test_inner_keys_and_integers_are_kept():
    def init(params):
        return {"key": jax.random.key(0), "n": jnp.int32(3), "nan": jnp.float32(NAN)}

    def update(grads, state, params=None):
        key, _ = jax.random.split(state["key"])
        return grads, {"key": key, "n": state["n"] + 1, "nan": jnp.float32(0)}

    tx = loss_scaling(optax.GradientTransformation(init, update))
    state = tx.init(1.0)
    _, skipped = jax.jit(tx.update)(jnp.float32(NAN), state)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    _, applied = jax.jit(tx.update)(jnp.float32(1), state)
    assert applied.inner_state["n"] == 4 and applied.inner_state["nan"] == 0


def test_clip_then_update_of_unscaled_gradients():
    tx = loss_scaling(optax.sgd(1.0))
    state = tx.init(jnp.ones(2))
    grads = unscale(jnp.full(2, 3.0 * 2**15), state)
    np.testing.assert_array_equal(grads, 3.0)
    updates, _ = tx.update(jnp.minimum(grads, 1.0), state, grads_unscaled=True)
    np.testing.assert_array_equal(updates, -1.0)
    _, skipped = tx.update(grads * jnp.inf, state, grads_unscaled=True)
    assert skipped.loss_scale == 2**14


def test_integer_none_and_float0_leaves_pass_through_the_update():
    tx = loss_scaling(optax.identity())
    grads = {
        "w": jnp.full(2, 2.0**15),
        "n": jnp.int32(5),
        "no": None,
        "f0": np.zeros((), jax.dtypes.float0),
    }
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_array_equal(updates["w"], 1.0)
    assert updates["n"] == 5 and updates["no"] is None
    assert updates["f0"].dtype == jax.dtypes.float0
    assert state.last_step_finite
    updates, _ = tx.update({**grads, "w": grads["w"] * NAN}, state)
    assert updates["n"] == 0 and not updates["w"].any()


@pytest.mark.parametrize("tree", [(), None, {"a": None}, {"n": jnp.array([1])}])
def test_trees_without_floats_are_finite(tree):
    out = all_finite(tree)
    assert out and out.dtype == bool and out.shape == () and not out.weak_type


@pytest.mark.parametrize("bad", [INF, -INF, NAN, complex(0, INF)])
def test_all_finite_sees_every_leaf(bad):
    assert not all_finite({"a": jnp.ones(3), "b": [jnp.array([1.0, bad])]})
    assert not jax.jit(all_finite)([bad, 1])


def test_where_applied_chooses_leaf_by_leaf():
    tx = loss_scaling(optax.sgd(1.0))
    state = tx.init(jnp.float32(1))
    new = {"m": jnp.float32(NAN), "key": jax.random.key(1), "n": 1, "f": jnp.sum}
    old = {"m": jnp.float32(2), "key": jax.random.key(0), "n": 0, "f": jnp.sum}
    for grad, want in ((1.0, new), (NAN, old)):
        _, after = tx.update(jnp.float32(grad), state)
        kept = where_applied(after, new, old)
        assert kept.pop("f") is jnp.sum and kept["n"].dtype == jnp.int32
        want = {k: jnp.asarray(v) if k == "n" else v for k, v in want.items()}
        assert bits(kept) == bits({k: want[k] for k in kept})


@pytest.mark.slow
def test_ensembles_skip_one_by_one():
    tx = loss_scaling(adam(0.1))
    params = jnp.ones((3, 2))
    states = jax.vmap(tx.init)(params)
    grads = params.at[1, 0].set(NAN)
    updates, states = jax.vmap(tx.update)(grads, states, params)
    np.testing.assert_array_equal(states.last_step_finite, [True, False, True])
    np.testing.assert_array_equal(updates[1], 0.0)


def test_nothing_on_the_host_and_no_branch():
    tx = loss_scaling(optax.sgd(0.1, momentum=0.9))
    state = tx.init(jnp.ones(2))
    text = str(jax.make_jaxpr(tx.update)(jnp.ones(2), state))
    assert "callback" not in text and "cond" not in text


def test_a_loss_that_is_itself_nan_is_seen_in_consecutive_skips():
    tx = loss_scaling(optax.sgd(1.0), min_scale=1.0)
    got = trajectory(tx, [False] * 40)
    assert got[-1][:4] == (1.0, 0, 40, 40)


# Bad input

ARGUMENTS = {
    "init_scale": [0, -1.0, NAN, INF, 2.0**25, 2.0**-15, True, "x", None],
    "growth_interval": [0, -1, 2.5, True, NAN, 2**31],
    "growth_factor": [1.0, 0.5, -2.0, NAN, INF, "2"],
    "backoff_factor": [0.0, 1.0, 1.5, -0.5, NAN, None],
    "min_scale": [0.0, -1.0, NAN, INF, 1e-40],
    "max_scale": [0.0, -1.0, NAN, INF, 1e39],
    "axis_name": [3, ("x", 1), 2.0],
    "loss_scale": [0, -1.0, NAN, INF, True, "static", [1.0], 1e-40, 1e39, np.ones(3)],
}


@pytest.mark.parametrize(
    "name, value", [(k, v) for k, values in ARGUMENTS.items() for v in values]
)
def test_an_argument_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=rf"expected {name}.*got"):
        loss_scaling(optax.sgd(1.0), **{name: value})


def test_floor_above_ceiling():
    with pytest.raises(ValueError, match="expected min_scale <= max_scale, got"):
        loss_scaling(optax.sgd(1.0), min_scale=4.0, max_scale=2.0, init_scale=3.0)


def test_arrays_are_used_as_they_are():
    @jax.jit
    def scale_after(scale, interval):
        tx = loss_scaling(init_scale=scale, growth_interval=interval)
        return tx.update(scale, tx.init(scale))[1].loss_scale

    assert scale_after(jnp.float32(8), jnp.int32(1)) == 16


@pytest.mark.parametrize(
    ("inner", "hint"),
    [
        (1024.0, ": a loss scale comes second, as in loss_scaling.tx, 1024.0.$"),
        ("adam", ": a loss scale comes second"),
        (optax.adam, r": call it first, as in adam\(\.\.\.\)$"),
        ([], r"\[\]$"),
    ],
)
def test_an_optimizer_that_is_none(inner, hint):
    expected = f"expected inner to be an optax.GradientTransformation, .*{hint}"
    with pytest.raises(ValueError, match=expected):
        loss_scaling(inner)


def test_parameters_in_place_of_an_optimizer():
    """They are not printed whole."""
    with pytest.raises(ValueError) as raised:
        loss_scaling({"w": jnp.ones((200, 8))})
    assert len(str(raised.value)) < 200


def test_a_state_without_loss_scaling():
    state = optax.adam(0.1).init(jnp.ones(2))
    with pytest.raises(ValueError, match="found no LossScaleState .* wrap the whole"):
        loss_scale_state(state)
    with pytest.raises(ValueError, match="found no LossScaleState"):
        scale_loss(jnp.float32(1), state)
    tx = loss_scaling(optax.adam(0.1))
    with pytest.raises(ValueError, match=r"_replace\(inner_state=opt_state\)"):
        tx.update(jnp.ones(2), state)


def test_several_states_are_listed():
    tx = optax.chain(loss_scaling(), loss_scaling(optax.adam(0.1)))
    with pytest.raises(ValueError, match=r"found 2, at opt_state\[0\], opt_state\[1\]"):
        loss_scale_state(tx.init(jnp.ones(2)))


@pytest.mark.parametrize(
    "inner, path",
    [
        (loss_scaling(optax.sgd(1.0)), "at inner_state:"),
        (optax.chain(optax.clip(1.0), loss_scaling()), r"at inner_state\[1\]:"),
    ],
)
def test_wrapping_twice(inner, path):
    tx = loss_scaling(inner)
    with pytest.raises(ValueError, match=path):
        tx.init(jnp.ones(2))


@pytest.mark.parametrize("loss", [(jnp.float32(1), {}), jnp.int32(1), None])
def test_scale_loss_wants_a_floating_point_array(state, loss):
    with pytest.raises(ValueError, match="expected the loss as a floating-point"):
        scale_loss(loss, state)


def test_grads_unscaled_is_a_python_bool(state):
    tx = loss_scaling(optax.sgd(1.0), 1024.0)
    with pytest.raises(ValueError, match="expected grads_unscaled as a Python bool"):
        tx.update(jnp.ones(3), state, grads_unscaled=jnp.array(True))


@pytest.mark.parametrize(
    "new, old, message",
    [
        ({"a": 1.0}, {"b": 1.0}, "two trees of one structure"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, r"new\['a'\] like old\['a'\]"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(2, int)}, r"new\['a'\] like old\['a'\]"),
    ],
)
def test_where_applied_wants_trees_alike(state, new, old, message):
    with pytest.raises(ValueError, match=message):
        where_applied(state, new, old)
