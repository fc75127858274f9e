"""One contract over optax's public optimizers, and how scaling combines with optax."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jmp_rewrite import (
    all_finite,
    loss_scale_state,
    loss_scaling,
    scale_loss,
    where_applied,
)

# Optax leans on implicit promotion; what is ours is strict all the same, because
# tests/loss_scaling/test_loss_scale.py runs it so.
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def optax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


contrib = optax.contrib
OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "lbfgs": lambda: optax.lbfgs(),
    "lion": lambda: optax.lion(0.1),
    "nadam": lambda: optax.nadam(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic_adam": lambda: optax.optimistic_adam(0.1),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.1),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "rprop": lambda: optax.rprop(0.1),
    "sgd": lambda: optax.sgd(0.1),
    "sgd momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "signum": lambda: optax.signum(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.1),
    "contrib.acprop": lambda: contrib.acprop(0.1),
    "contrib.ademamix": lambda: contrib.ademamix(0.1),
    "contrib.adopt": lambda: contrib.adopt(0.1),
    "contrib.cocob": lambda: contrib.cocob(),
    "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(0.1),
    "contrib.dog": lambda: contrib.dog(),
    "contrib.dowg": lambda: contrib.dowg(),
    "contrib.galore": lambda: contrib.galore(0.1, rank=2),
    "contrib.madgrad": lambda: contrib.madgrad(0.1),
    "contrib.momo": lambda: contrib.momo(0.1),
    "contrib.momo_adam": lambda: contrib.momo_adam(0.1),
    "contrib.muon": lambda: contrib.muon(0.1),
    "contrib.prodigy": lambda: contrib.prodigy(),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(0.1),
    "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.1),
    "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(0.1),
    "contrib.sophia": lambda: contrib.sophia(0.1),
    "contrib.mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "contrib.sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.01)),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.1), contrib.reduce_on_plateau()
    ),
    "line search": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
    ),
    "lookahead-like": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(1)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.cosine_decay_schedule(0.1, 5)
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
}
# An update of its own signature, against optax's convention.
TAKES_NO_EXTRA_ARGUMENTS = {"contrib.sam"}
# Built from the per-example gradients of a batch, or around one's own optimizer.
NOT_HERE = {"dpsgd", "differentially_private_aggregate", "schedule_free"}


def test_every_public_optimizer_is_listed():
    listed = {name.split(".")[-1] for name in OPTIMIZERS}
    for module in (optax, contrib):
        for name, f in vars(module).items():
            if not inspect.isfunction(f) or not inspect.signature(f).parameters:
                continue
            first = next(iter(inspect.signature(f).parameters))
            if first == "learning_rate" and not name.startswith("scale_by"):
                if name.startswith("_") or name in NOT_HERE:
                    continue
                assert name in listed, name


def params():
    key = jax.random.key(0)
    return {"w": jax.random.normal(key, (4, 3)), "b": jnp.array([0.5, -0.0, 0.25])}


def loss_fn(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - 0.5) ** 2)


@jax.jit
def value_and_grads(p, x, state):
    def loss(p):
        return loss_fn(p, x) if state is None else scale_loss(loss_fn(p, x), state)

    return jax.value_and_grad(loss)(p)


def make_step(name, tx, scaled):
    """A step whose update is not compiled as a whole.

    Compiled, XLA:CPU contracts a product and a sum into one rounding where both fall
    into one loop, and another operation between them is another program.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    tx = optax.with_extra_args_support(tx)

    def step(p, state, x):
        value, grads = value_and_grads(p, x, state if scaled else None)

        def value_fn(p):  # the function that is differentiated
            loss = jax.jit(loss_fn)(p, x)
            return scale_loss(loss, state) if scaled else loss

        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        if name == "contrib.sophia":
            extra["obj_fn"] = value_fn
        if name in TAKES_NO_EXTRA_ARGUMENTS:
            extra = {}
        updates, state = tx.update(grads, state, p, **extra)
        return optax.apply_updates(p, updates), state

    return step


def bits(tree):
    def leaf(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return str(x.dtype), x.shape, np.asarray(x).tobytes()

    return jax.tree.map(leaf, tree)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_contract(name):
    """Applied steps are the bare optimizer's, bit for bit; skipped ones are nothing."""
    bare, tx = OPTIMIZERS[name](), loss_scaling(OPTIMIZERS[name](), growth_interval=2)
    want, got = params(), params()
    want_state, state = bare.init(want), tx.init(got)
    avals = jax.tree.map(jax.typeof, state)
    bare_step, step = make_step(name, bare, False), make_step(name, tx, True)
    xs = jax.random.normal(jax.random.key(1), (4, 8, 4))
    for i, x in enumerate(xs):
        if i == 2:
            before = bits((got, state.inner_state))
            got, state = step(got, state, x.at[0, 0].set(jnp.nan))
            assert bits((got, state.inner_state)) == before
            assert state.skipped_steps == 1 and state.consecutive_skips == 1
        want, want_state = bare_step(want, want_state, x)
        got, state = step(got, state, x)
        assert bits(got) == bits(want)
        assert bits(state.inner_state) == bits(want_state)
    assert jax.tree.map(jax.typeof, state) == avals


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "MultiSteps", "adafactor"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_parameters_keep_all_dtypes(name, dtype):
    tx = loss_scaling(OPTIMIZERS[name]())
    p = jax.tree.map(lambda x: x.astype(dtype), params())
    state = tx.init(p)
    avals = jax.tree.map(jax.typeof, (p, state))
    update = jax.jit(tx.update)
    for bad in (1.0, jnp.inf, 1.0):
        grads = jax.tree.map(lambda x, bad=bad: x * 100 * bad, p)
        updates, state = update(grads, state, p)
        p = optax.apply_updates(p, updates)
        assert jax.tree.map(jax.typeof, (p, state)) == avals
    assert update._cache_size() == 1 and all_finite((p, state))


@pytest.mark.slow
def test_clipping_sees_true_gradients():
    tx = loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = tx.init(jnp.zeros(2))
    updates, _ = tx.update(jnp.array([0.3, 0.4]) * 2**15, state)
    np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)  # norm 0.5: as it is
    updates, _ = tx.update(jnp.array([3.0, 4.0]) * 2**15, state)
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)
    updates, _ = tx.update(jnp.array([3.0, jnp.inf]) * 2**15, state)
    np.testing.assert_array_equal(updates, 0.0)  # skipped, not clipped


def test_schedules_do_not_advance_on_a_skipped_step():
    tx = loss_scaling(optax.sgd(optax.piecewise_constant_schedule(1.0, {2: 0.5})), 1.0)
    state, seen = tx.init(jnp.float32(0)), []
    for g in (1.0, jnp.nan, jnp.nan, 1.0, 1.0):
        updates, state = tx.update(jnp.float32(g), state)
        seen.append(float(updates))
    assert seen == [-1.0, 0.0, 0.0, -1.0, -0.5]


def test_around_multi_steps_the_micro_step_is_skipped():
    tx = loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2))
    state, out = tx.init(jnp.float32(0)), []
    for g in (1.0, jnp.nan, 3.0):
        updates, state = tx.update(jnp.float32(g) * state.loss_scale, state)
        out.append(float(updates))
    assert out == [0.0, 0.0, -2.0]  # the mean of 1 and 3
    assert state.skipped_steps == 1


def test_inside_multi_steps_the_accumulated_step_is_skipped():
    tx = optax.MultiSteps(loss_scaling(optax.sgd(1.0), 1.0), 2)
    state, out = tx.init(jnp.float32(0)), []
    for g in (1.0, jnp.nan, 3.0, 5.0):
        updates, state = tx.update(jnp.float32(g), state)
        out.append(float(updates))
    assert out[:2] == [0.0, 0.0]
    assert loss_scale_state(state).skipped_steps >= 1


def test_chain_element():
    tx = optax.chain(loss_scaling(), optax.sgd(1.0, momentum=0.5))
    p = jnp.array([1.0, -0.0])
    state = tx.init(p)
    updates, state = tx.update(jnp.full(2, 2.0**15), state, p)
    np.testing.assert_array_equal(updates, -1.0)
    updates, state = tx.update(jnp.full(2, jnp.nan), state, p)
    np.testing.assert_array_equal(updates, -0.5)  # momentum moves on, as documented
    assert loss_scale_state(state).skipped_steps == 1
    updates, state = tx.update(jnp.ones(2), state, p, grads_unscaled=True)
    np.testing.assert_array_equal(updates, -1.25)


def test_chain_element_before_plain_sgd_changes_no_bit():
    tx = optax.chain(loss_scaling(), optax.sgd(1.0))
    p = jnp.array([1.0, -0.0, 0.0])
    updates, _ = tx.update(p * jnp.nan, tx.init(p), p)
    assert bits(optax.apply_updates(p, updates)) == bits(p)


def test_inside_masked():
    tx = optax.masked(loss_scaling(optax.sgd(1.0)), {"a": True, "b": False})
    p = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = tx.init(p)
    updates, state = tx.update({"a": jnp.full(2, 2.0**15), "b": jnp.ones(2)}, state, p)
    np.testing.assert_array_equal(updates["a"], -1.0)
    np.testing.assert_array_equal(updates["b"], 1.0)
    assert loss_scale_state(state).last_step_finite


@pytest.mark.parametrize(
    "loss_scale, want", [("dynamic", [8, 16, 8]), (4.0, [4, 4, 4])]
)
def test_hyperparams_of_the_scale_itself_may_be_injected(loss_scale, want):
    make = optax.inject_hyperparams(loss_scaling, static_args=("inner",))
    tx = make(optax.adam(0.1), loss_scale, init_scale=4.0, growth_interval=1)
    p = jnp.ones(2)
    state, scales = tx.init(p), []
    for g in (1.0, 1.0, jnp.nan):
        _, state = jax.jit(tx.update)(p * g, state, p)
        scales.append(float(loss_scale_state(state).loss_scale))
    assert scales == want


def test_optimizers_that_give_up_are_not_reached():
    tx = loss_scaling(optax.apply_if_finite(optax.sgd(1.0), 1))
    p = jnp.ones(2)
    state = tx.init(p)
    for _ in range(5):
        updates, state = tx.update(p * jnp.nan, state, p)
        p = optax.apply_updates(p, updates)
    np.testing.assert_array_equal(p, 1.0)
    assert state.inner_state.notfinite_count == 0


def test_value_and_grad_that_reach_the_inner_transformation_are_true():
    seen = {}

    def update(grads, state, params=None, **extra):
        seen.update(extra)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx = loss_scaling(inner, 8.0)
    state = tx.init(jnp.ones(2))
    grads = {"scaled": jnp.full(2, 8.0)}
    tx.update(grads, state, value=3.0, grad=grads, note="as it is")
    assert seen["value"] == 3.0 and seen["note"] == "as it is"
    np.testing.assert_array_equal(seen["grad"]["scaled"], 1.0)
    assert "grads_unscaled" not in seen
    tx.update(grads, state, grad=grads, grads_unscaled=True)
    np.testing.assert_array_equal(seen["grad"]["scaled"], 8.0)


def test_two_optimizers_have_two_states():
    tx = loss_scaling(optax.sgd(1.0), 2.0), loss_scaling(optax.sgd(1.0), 8.0)
    states = tuple(t.init(jnp.ones(2)) for t in tx)
    grads = [jax.grad(lambda x, s=s: scale_loss(x, s))(1.0) for s in states]
    assert grads == [2.0, 8.0]
    with pytest.raises(ValueError, match="found 2, at opt_state.0., opt_state.1."):
        loss_scale_state(states)


@pytest.mark.slow
def test_batch_norm_survives_forced_overflows():
    """Everything carried equals the run that never saw the overflowing batches."""
    tx = loss_scaling(optax.adam(0.05))

    @jax.jit
    def step(carry, x):
        p, bn, ema, count, key, state = carry

        def loss(p):
            h = x @ p["w"]
            stats = {
                "mean": 0.9 * bn["mean"] + 0.1 * h.mean(0),
                "var": 0.9 * bn["var"] + 0.1 * h.var(0),
            }
            h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) + p["b"]
            return scale_loss(jnp.mean((h - 1) ** 2), state), stats

        grads, new_bn = jax.grad(loss, has_aux=True)(p)
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
        new_ema = optax.incremental_update(p, ema, 0.1)
        new = new_bn, new_ema, count + 1, jax.random.split(key)[0]
        kept = where_applied(state, new, (bn, ema, count, key))
        return p, *kept, state

    def run(batches):
        p = params()
        bn = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
        carry = p, bn, p, jnp.int32(0), jax.random.key(3), tx.init(p)
        for x in batches:
            carry = step(carry, x)
        return carry

    good = list(jax.random.normal(jax.random.key(2), (6, 8, 4)))
    bad = good[0].at[0, 0].set(jnp.inf)
    clean = run(good)
    dirty = run([bad, *good[:3], bad, bad, *good[3:], bad])
    assert all_finite(dirty[:-1]) and dirty[-1].skipped_steps == 4
    assert bits((dirty[:-1], dirty[-1].inner_state)) == bits(
        (clean[:-1], clean[-1].inner_state)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_complex_gradients(dtype):
    tx = loss_scaling(optax.adam(0.1))
    p = {"c": jnp.array([1 + 2j, -0.0 - 0.0j]), "w": jnp.ones(2, dtype)}
    state = tx.init(p)
    grads = {"c": jnp.array([2.0**15 * (3 + 4j), 1j]), "w": jnp.ones(2, dtype)}
    want, _ = optax.adam(0.1).update(
        {"c": jnp.array([3 + 4j, 2.0**-15 * 1j]), "w": jnp.full(2, 2.0**-15)},
        optax.adam(0.1).init({"c": p["c"], "w": jnp.ones(2)}),
    )
    got, _ = tx.update(grads, state, p)
    assert bits(got["c"]) == bits(want["c"])
    grads["c"] = grads["c"].at[0].set(complex(0, jnp.inf))
    updates, _ = tx.update(grads, state, p)
    assert bits(optax.apply_updates(p, updates)) == bits(p)


@pytest.mark.slow
def test_a_line_search_sees_the_slopes_of_the_loss():
    """Also of the very function that is differentiated, which `jit` has cached."""

    def rosenbrock(p):
        return jnp.sum(100 * (p[1:] - p[:-1] ** 2) ** 2 + (1 - p[:-1]) ** 2)

    search = optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15))
    start = jnp.array([-1.2, 1.0, 0.5, -0.7])
    gradients = []
    for tx in (search, loss_scaling(search)):
        p, state = start, tx.init(start)
        is_scaled = tx is not search

        @jax.jit
        def loss(p, state, is_scaled=is_scaled):
            return scale_loss(rosenbrock(p), state) if is_scaled else rosenbrock(p)

        for _ in range(2):
            fun = functools.partial(loss, state=state)
            value, grad = jax.value_and_grad(fun)(p)
            extra = {"value": value, "grad": grad, "value_fn": lambda p, f=fun: f(p)}
            updates, state = tx.update(grad, state, p, **extra)
            p = optax.apply_updates(p, updates)
        gradients.append(optax.tree.get(state, "grad"))
    assert jnp.array_equal(*gradients)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**17])
def test_a_scale_that_the_parameters_dtype_cannot_hold_is_refused(loss_scale):
    """`inject_hyperparams` makes it inf: every step would be skipped for ever."""
    make = functools.partial(
        optax.inject_hyperparams, loss_scaling, static_args=("inner",)
    )
    half = jnp.ones(3, jnp.float16)
    with pytest.raises(ValueError, match="got inf; .*hyperparam_dtype=jnp.float32"):
        make()(optax.sgd(0.1), loss_scale).init(half)
    tx = make(hyperparam_dtype=jnp.float32)(optax.sgd(0.1), loss_scale)
    _, state = tx.update(half, tx.init(half), half)
    state = loss_scale_state(state)
    assert jnp.isfinite(state.loss_scale) and state.skipped_steps == 0


@pytest.mark.slow
def test_what_an_array_holds_is_checked_at_init():
    with pytest.raises(ValueError, match="expected growth_factor to be a number"):
        loss_scaling(growth_factor=jnp.float32(1.0)).init(jnp.ones(3))
    jax.jit(loss_scaling(growth_interval=jnp.float32(2000.0)).init)(jnp.ones(3))
