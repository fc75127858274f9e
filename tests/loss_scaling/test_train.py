"""The one-line forms: a whole train step, and TensorFlow's graph rewrite switch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_rewrite as jmpr
from jmp_rewrite._train import enable_mixed_precision_graph_rewrite, make_train_step


@pytest.fixture(autouse=True)
def default_policy():
    jmpr.set_policy(None)
    yield
    jmpr.set_policy(None)


def loss_fn(params, batch):
    prediction = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return jnp.mean((prediction - batch["y"]) ** 2)


def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": jax.random.normal(keys[0], (4, 8)),
        "v": jax.random.normal(keys[1], (8, 1)),
    }
    x = jax.random.normal(keys[2], (16, 4))
    return params, {"x": x, "y": jnp.sum(x, 1, keepdims=True)}


POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_trains_and_keeps_every_type(policy):
    params, batch = problem()
    tx = jmpr.loss_scaling(optax.sgd(0.1), jmpr.Policy(policy).loss_scale)
    step = make_train_step(loss_fn, tx, policy)
    opt_state = tx.init(params)
    avals = jax.tree.map(jax.typeof, (params, opt_state))
    losses = []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert jax.tree.map(jax.typeof, (params, opt_state)) == avals
    assert step._cache_size() == 1
    assert loss.dtype == jnp.float32 and losses[-1] < losses[0] / 4
    assert losses[0] < 100  # not the scaled one


@pytest.mark.slow
def test_float32_step_is_the_step_written_out():
    params, batch = problem()
    tx = optax.sgd(0.1)
    step = make_train_step(loss_fn, tx, "float32", donate=False)

    @jax.jit
    def by_hand(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    got, want = (f(params, tx.init(params), batch) for f in (step, by_hand))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_products_run_in_the_compute_dtype(policy):
    params, batch = problem()
    tx = jmpr.loss_scaling(optax.sgd(0.1))
    step = make_train_step(loss_fn, tx, policy, donate=False)
    text = str(jax.make_jaxpr(step)(params, tx.init(params), batch))
    assert (":f16[16,4]" in text) == (policy == "mixed_float16")
    assert (":bf16[16,4]" in text) == (policy == "mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_donation(donate):
    params, batch = problem()
    tx = jmpr.loss_scaling(optax.sgd(0.1, momentum=0.9))
    opt_state = tx.init(params)
    make_train_step(loss_fn, tx, "mixed_float16", donate=donate)(
        params, opt_state, batch
    )
    assert params["w"].is_deleted() == donate
    assert opt_state.loss_scale.is_deleted() == donate


@pytest.mark.slow
def test_an_overflowing_batch_is_skipped():
    params, batch = problem()
    tx = jmpr.loss_scaling(optax.sgd(0.1, momentum=0.9))
    step = make_train_step(loss_fn, tx, "mixed_float16", donate=False)
    bad = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
    after, opt_state, loss = step(params, tx.init(params), bad)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert np.isnan(loss) and opt_state.consecutive_skips == 1


def test_aux_comes_back():
    tx = jmpr.loss_scaling(optax.sgd(0.1), 8.0)

    def with_aux(w, x):
        return jnp.sum(w * x), {"mean": x.mean(), "n": 3}

    step = make_train_step(with_aux, tx, "mixed_float16", has_aux=True)
    w = jnp.ones(2)
    w, _, loss, aux = step(w, tx.init(w), jnp.ones(2))
    np.testing.assert_allclose(w, 0.9, rtol=1e-3)
    assert loss == 2 and aux["mean"] == 1 and aux["n"] == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_aux_that_is_not_finite_is_no_overflow(policy, bad):
    # Only gradients decide: a metric may be Inf or NaN by right (a perplexity, 0 / 0).
    tx = jmpr.loss_scaling(optax.sgd(0.5), 8.0)

    def with_aux(w, batch):
        return jnp.sum(w * batch["x"]), {
            "metric": batch["odd"] * w,
            "log": batch["odd"],
        }

    step = make_train_step(with_aux, tx, policy, has_aux=True, donate=False)
    batch = {"x": jnp.ones(2), "odd": jnp.array([1.0, bad])}
    w, opt_state, loss, aux = step(jnp.ones(2), tx.init(jnp.ones(2)), batch)
    np.testing.assert_array_equal(w, [0.5, 0.5])
    assert loss == 2 and opt_state.last_step_finite and opt_state.skipped_steps == 0
    for value in aux.values():
        np.testing.assert_array_equal(value, [1.0, bad])


@pytest.mark.parametrize("policy", POLICIES)
def test_aux_of_a_skipped_step_comes_back_as_computed(policy):
    # Hiding the Inf would hide the trouble: `where_applied` keeps it out of the state.
    tx = jmpr.loss_scaling(optax.sgd(0.5), 8.0)

    def with_aux(carry, batch):
        x = batch["x"] * carry["w"]
        return jnp.sum(x**2), 0.5 * carry["mean"] + 0.5 * x.mean()

    carry = {"w": jnp.ones(2), "mean": jnp.float32(1)}
    step = make_train_step(with_aux, tx, policy, has_aux=True, donate=False)
    batch = {"x": jnp.array([1.0, np.inf])}
    after, opt_state, loss, mean = step(carry, tx.init(carry), batch)
    jax.tree.map(np.testing.assert_array_equal, after, carry)
    assert np.isinf(loss) and np.isinf(mean) and opt_state.consecutive_skips == 1
    assert jmpr.where_applied(opt_state, mean, carry["mean"]) == 1
    after, opt_state, _, mean = step(after, opt_state, {"x": jnp.ones(2)})
    assert opt_state.consecutive_skips == 0 and mean == 1
    assert jmpr.where_applied(opt_state, mean, jnp.float32(7)) == 1


@pytest.mark.slow
def test_optimizers_that_ask_for_the_value_get_it():
    params, batch = problem()
    with jax.numpy_dtype_promotion("standard"):
        tx = jmpr.loss_scaling(optax.polyak_sgd(), 64.0)
        step = make_train_step(loss_fn, tx, "mixed_float16", donate=False)
        bare = optax.polyak_sgd()
        plain = make_train_step(loss_fn, bare, "float32", donate=False)
        got, *_ = step(params, tx.init(params), batch)
        want, *_ = plain(params, bare.init(params), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-2), got, want)


@pytest.mark.slow
def test_multi_steps_without_scaling():
    params, batch = problem()
    tx = optax.MultiSteps(optax.sgd(0.1), 2)
    with jax.numpy_dtype_promotion("standard"):
        step = make_train_step(loss_fn, tx, "mixed_bfloat16", donate=False)
        after, *_ = step(params, tx.init(params), batch)
    jax.tree.map(np.testing.assert_array_equal, after, params)


def test_the_default_policy_is_read_when_tracing():
    params, batch = problem()
    tx = optax.sgd(0.1)
    step = make_train_step(loss_fn, tx, donate=False)
    with jmpr.use_policy("float32"):
        step(params, tx.init(params), batch)
    with (
        jmpr.use_policy("mixed_float16"),
        pytest.raises(ValueError, match=r"loss_scaling\(tx, 'dynamic'\)"),
    ):
        step(params, tx.init(params), batch)


@pytest.mark.parametrize(
    "tx",
    [optax.sgd(0.1), optax.chain(optax.clip(1.0)), optax.MultiSteps(optax.sgd(1.0), 2)],
)
def test_float16_without_scaling_shows_the_wrapping(tx):
    with pytest.raises(
        ValueError, match=r"wrap it, tx = loss_scaling\(tx, 'dynamic'\)"
    ):
        make_train_step(loss_fn, tx, "mixed_float16")


def test_an_optimizer_that_refuses_the_probe_is_asked_again():
    tx = optax.masked(optax.sgd(0.1), {"w": True, "v": False})
    step = make_train_step(loss_fn, tx, "mixed_float16")
    params, batch = problem()
    with pytest.raises(ValueError, match="expected tx with loss scaling under"):
        step(params, tx.init(params), batch)


@pytest.mark.slow
def test_scaling_inside_a_chain_counts():
    tx = optax.chain(jmpr.loss_scaling(optax.sgd(0.1), 64.0), optax.scale(1.0))
    params, batch = problem()
    _, opt_state, _ = make_train_step(loss_fn, tx, "mixed_float16")(
        params, tx.init(params), batch
    )
    assert jmpr.loss_scale_state(opt_state).last_step_finite


@pytest.mark.parametrize("tx", [1e-3, "adam", None, optax.adam])
def test_wants_an_optimizer(tx):
    with pytest.raises(ValueError, match="expected tx to be an optax.Gradient"):
        make_train_step(loss_fn, tx, "float32")
    with pytest.raises(ValueError, match="expected tx to be an optax.Gradient"):
        enable_mixed_precision_graph_rewrite(tx)
    assert jmpr.get_policy() == jmpr.Policy("auto")


def test_wants_a_loss_function():
    with pytest.raises(ValueError, match="expected loss_fn as a function"):
        make_train_step(optax.sgd(0.1), loss_fn, "float32")


@pytest.mark.parametrize(
    ("wrong", "has_aux", "said"),
    [
        (
            lambda w, x: (jnp.sum(w * x), x),
            False,
            "a loss with has_aux=False, got a tup",
        ),
        (lambda w, x: jnp.sum(w * x), True, r"\(loss, aux\) with has_aux=True, got a "),
        (
            lambda w, x: (jnp.sum(w * x), x, w),
            True,
            r"\(loss, aux\) with .* tuple of 3",
        ),
    ],
)
def test_has_aux_decides_the_form_of_results(wrong, has_aux, said):
    tx = optax.sgd(0.1)
    step = make_train_step(wrong, tx, "mixed_bfloat16", has_aux=has_aux)
    with pytest.raises(ValueError, match=f"expected loss_fn to return {said}"):
        step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


@pytest.mark.slow
def test_enable_sets_the_policy_and_wraps():
    for _ in range(2):  # calling it twice is fine
        tx = enable_mixed_precision_graph_rewrite(optax.sgd(0.1), 8.0)
    assert jmpr.get_policy() == jmpr.Policy("mixed_float16")
    assert tx.init(jnp.ones(2)).loss_scale == 8
    params, batch = problem()
    step = make_train_step(loss_fn, tx)
    _, opt_state, _ = step(params, tx.init(params), batch)
    assert opt_state.last_step_finite


def test_enable_after_another_policy():
    jmpr.set_policy("mixed_bfloat16")
    with pytest.raises(ValueError, match="but it is .*mixed_bfloat16.*: leave out"):
        enable_mixed_precision_graph_rewrite(optax.sgd(0.1))
    assert jmpr.get_policy() == jmpr.Policy("mixed_bfloat16")


@pytest.mark.parametrize(
    "tx", [jmpr.loss_scaling(), optax.chain(optax.clip(1.0), jmpr.loss_scaling())]
)
def test_enable_of_a_wrapped_optimizer(tx):
    with pytest.raises(ValueError, match="expected tx without loss scaling"):
        enable_mixed_precision_graph_rewrite(tx)
    assert jmpr.get_policy() == jmpr.Policy("auto")


def test_enable_with_a_bad_scale_sets_nothing():
    with pytest.raises(ValueError, match="expected loss_scale"):
        enable_mixed_precision_graph_rewrite(optax.sgd(0.1), -1.0)
    assert jmpr.get_policy() == jmpr.Policy("auto")


@pytest.mark.slow
def test_the_state_of_an_optimizer_that_is_not_wrapped():
    """The optimizer is wrapped; the message says that the state is not its."""
    inner = optax.sgd(0.1)
    step = make_train_step(
        lambda w, x: jnp.mean((x @ w) ** 2),
        jmpr.loss_scaling(inner),
        "mixed_float16",
        donate=False,
    )
    w = jnp.ones((2, 1))
    with pytest.raises(ValueError, match="opt_state from the init of tx, which has"):
        step(w, inner.init(w), jnp.eye(2))
