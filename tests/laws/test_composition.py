"""What people stack on top of a train step still does what it did.

Each recipe is a train step for handwritten digits, written with a decorator to be put
on; it is trained in float32 and in half, and its own promise is checked.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import HALF, arrays, dtypes_in, products, relative_error, trace
from jax.experimental import checkify
from stacks import cross_entropy, digits

from jmp_rewrite import (
    Policy,
    loss_scale_state,
    loss_scaling,
    mixed_precision,
    scale_loss,
    where_applied,
)
from jmp_rewrite._graph import computed_once

POLICIES = ["mixed_bfloat16", "mixed_float16"]
WIDTH, BATCH, STEPS = 32, 128, 24


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes integers to floats, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def net(params, x):
    for w in params["hidden"]:
        x = jnp.tanh(x @ w)
    return x @ params["head"]


def init_params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)
    first, second, head = (
        jax.random.normal(k, s) / np.sqrt(s[0])
        for k, s in zip(keys, shapes, strict=True)
    )
    return {"hidden": [first, second], "head": head}


def loss_of(params, x, y):
    return cross_entropy(net(params, x), y)


def plain_step(tx, loss=loss_of):
    def step(state, x, y):
        params, opt_state = state

        def loss_fn(params):
            return scale_loss(loss(params, x, y), opt_state)

        value, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


class Recipe(NamedTuple):
    """A train step, and the state that it starts from."""

    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    state: Any


def scaling(policy):
    # A first scale that fits, so that all policies take the same steps.
    kind = Policy(policy).loss_scale
    return functools.partial(loss_scaling, loss_scale=kind, init_scale=2.0**10)


def multi_steps(policy):
    """Gradients of four batches make one update."""
    tx = scaling(policy)(optax.MultiSteps(optax.adam(1e-2), 4))
    params = init_params()
    return Recipe(plain_step(tx), (params, tx.init(params)))


def ema(policy):
    """An average of the parameters is carried along."""
    tx = scaling(policy)(optax.adam(1e-2))
    one = plain_step(tx)

    def step(state, x, y):
        *inner, average = state
        (params, opt_state), value = one(tuple(inner), x, y)
        new = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return (params, opt_state, where_applied(opt_state, new, average)), value

    params = init_params()
    return Recipe(step, (params, tx.init(params), params))


def lookahead(policy):
    """Slow weights follow fast ones every five steps."""
    tx = scaling(policy)(optax.lookahead(optax.adam(1e-2), 5, 0.5))

    def step(state, x, y):
        params, opt_state = state

        def loss_fn(fast):
            return scale_loss(loss_of(fast, x, y), opt_state)

        value, grads = jax.value_and_grad(loss_fn)(params.fast)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = optax.LookaheadParams.init_synced(init_params())
    return Recipe(step, (params, tx.init(params)))


def sharpness_aware(policy):
    """The gradient is taken at weights that are moved uphill first."""
    tx = scaling(policy)(optax.adam(1e-2))

    def step(state, x, y):
        params, opt_state = state

        def loss_fn(params):
            return scale_loss(loss_of(params, x, y), opt_state)

        value, uphill = jax.value_and_grad(loss_fn)(params)
        size = 0.05 / optax.tree.norm(uphill)  # the loss scale cancels out
        moved = jax.tree.map(lambda p, g: p + size * g, params, uphill)
        updates, opt_state = tx.update(jax.grad(loss_fn)(moved), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = init_params()
    return Recipe(step, (params, tx.init(params)))


def gradient_penalty(policy):
    """A gradient inside the loss; the sum is scaled once."""

    def loss(params, x, y):
        slope = jax.grad(lambda x: loss_of(params, x, y))(x)
        return loss_of(params, x, y) + 10.0 * jnp.sum(slope**2)

    tx = scaling(policy)(optax.adam(1e-2))
    params = init_params()
    return Recipe(plain_step(tx, loss), (params, tx.init(params)))


def low_rank(policy):
    """LoRA: the base is frozen by a mask, products of narrow matrices are trained."""

    def adapted(params):
        pairs = zip(params["base"]["hidden"], params["lora"], strict=True)
        hidden = [w + p["a"] @ p["b"] for w, p in pairs]
        return {"hidden": hidden, "head": params["base"]["head"]}

    labels = {"base": "frozen", "lora": "trained"}
    tx = scaling(policy)(
        optax.multi_transform(
            {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, labels
        )
    )
    base = init_params()
    keys = jax.random.split(jax.random.key(1), 2)
    lora = [
        {"a": jax.random.normal(k, (w.shape[0], 6)) / 4, "b": jnp.zeros((6, WIDTH))}
        for k, w in zip(keys, base["hidden"], strict=True)
    ]
    params = {"base": base, "lora": lora}
    step = plain_step(tx, lambda p, x, y: loss_of(adapted(p), x, y))
    return Recipe(step, (params, tx.init(params)))


RECIPES = (
    multi_steps,
    ema,
    lookahead,
    sharpness_aware,
    gradient_penalty,
    low_rank,
)


@functools.cache
def trained(make, policy):
    """Returns the state after each step, and the losses."""
    x, y = digits()
    step, state = make(policy)
    step = jax.jit(mixed_precision(step, policy))
    states, losses = [state], []
    for i in range(STEPS):
        rows = slice(i % 10 * BATCH, (i % 10 + 1) * BATCH)
        state, loss = step(state, x[rows], y[rows])
        states.append(state)
        losses.append(float(loss))
    return states, losses


@pytest.mark.breadth
@pytest.mark.parametrize("make", RECIPES)
def test_trains_like_float32(make):
    """Every loss along the way, within three times the largest difference seen."""
    _, exact = trained(make, "float32")
    states, losses = trained(make, "mixed_float16")
    np.testing.assert_allclose(losses, exact, rtol=0.002)
    assert losses[-1] < 0.8 * losses[0]
    assert loss_scale_state(states[-1]).skipped_steps == 0
    before, after = ([x.dtype for x in arrays(s)] for s in (states[0], states[-1]))
    assert before == after


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", RECIPES)
def test_products_are_half(make, policy):
    step, state = make(policy)
    x, y = digits()
    rewritten = trace(mixed_precision(step, policy), state, x[:8], y[:8])
    found = [tuple(dtypes_in(e)) for e in products(rewritten)]
    assert set(found) == {(HALF[policy],) * 2}
    plain = computed_once(trace(step, state, x[:8], y[:8]))
    assert len(found) == len(products(plain))


@pytest.mark.slow
def test_micro_steps_change_nothing_but_the_accumulator():
    states, _ = trained(multi_steps, "mixed_float16")
    for i in range(1, STEPS + 1):
        moved = relative_error(states[i][0], states[i - 1][0]) > 0
        assert moved == (i % 4 == 0)


@pytest.mark.slow
def test_the_average_is_float32_arithmetic():
    """To the last bit but one: XLA may contract the sum."""
    states, _ = trained(ema, "mixed_float16")
    for (_, _, before), (params, _, after) in zip(states, states[1:], strict=False):
        expected = jax.tree.map(
            lambda a, p: 0.9 * np.asarray(a, "f8") + 0.1 * np.asarray(p, "f8"),
            before,
            params,
        )
        assert relative_error(after, expected) < 2.0**-22


def test_slow_weights_are_those_of_the_fast_ones():
    states, _ = trained(lookahead, "mixed_float16")
    for i in range(1, STEPS + 1):
        moved = relative_error(states[i][0].slow, states[i - 1][0].slow) > 0
        assert moved == (i % 5 == 0)


@pytest.mark.slow
def test_frozen_parameters_stay_to_the_bit():
    states, _ = trained(low_rank, "mixed_float16")
    first, last = states[0][0], states[-1][0]
    assert relative_error(last["base"], first["base"]) == 0
    assert relative_error(last["lora"], first["lora"]) > 0.1


# ---- rematerialization


CHECKPOINT_POLICIES = {
    "nothing_saveable": 2,
    "dots_saveable": 0,
    "dots_with_no_batch_dims_saveable": 0,
    "everything_saveable": 0,
}


@pytest.mark.breadth
@pytest.mark.parametrize("name", CHECKPOINT_POLICIES)
@pytest.mark.parametrize("decorate", ["step", "loss"])
def test_checkpoint_policies_save_what_they_did(name, decorate):
    """The same products are computed again; and all of them are half."""
    save = getattr(jax.checkpoint_policies, name)
    body = jax.checkpoint(net, policy=save)
    loss = lambda p, x, y: cross_entropy(body(p, x), y)  # noqa: E731
    x, y = digits()
    args = init_params(), x[:8], y[:8]
    plain = trace(jax.grad(loss), *args)
    half = {
        "step": mixed_precision(jax.grad(loss), "mixed_bfloat16"),
        "loss": jax.grad(mixed_precision(loss, "mixed_bfloat16")),
    }[decorate]
    rewritten = trace(half, *args)
    assert len(products(rewritten)) == len(products(plain))
    again = len(products(plain)) - len(products(trace(jax.grad(loss_of), *args)))
    assert again == CHECKPOINT_POLICIES[name]
    assert {d for e in products(rewritten) for d in dtypes_in(e)} == {"bfloat16"}
    exact = jax.jit(jax.grad(loss))(*args)
    assert relative_error(jax.jit(half)(*args), exact) < 0.03


# ---- looking inside a running step


@pytest.mark.parametrize("policy", POLICIES)
def test_debug_print_and_callbacks(policy, capfd):
    """They see the values in float32, in order, inside loops and gradients too."""
    seen = []

    def spy(i, h):
        seen.append((int(i), h.dtype, h.shape))

    def fun(params, x):
        def layer(h, i):
            h = jnp.tanh(h @ params["hidden"][1])
            jax.debug.callback(spy, i, h, ordered=True)
            jax.debug.print("layer {i} at {m:.3f}", i=i, m=jnp.abs(h).max())
            return h, None

        h, _ = jax.lax.scan(layer, x @ params["hidden"][0], jnp.arange(3))
        return jnp.sum(h**2)

    x, _ = digits()
    half = jax.jit(mixed_precision(jax.value_and_grad(fun), policy))
    jax.block_until_ready(half(init_params(), x[:8]))
    jax.effects_barrier()
    assert [i for i, _, _ in seen] == [0, 1, 2]
    assert {(d, s) for _, d, s in seen} == {(np.dtype("f4"), (8, WIDTH))}
    printed = sorted(capfd.readouterr().out.split("\n"))
    assert sum(line.startswith("layer ") for line in printed) == 3


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False])
def test_checkify(outside):
    """Its checks fire as in float32, from outside and from inside."""
    x, y = digits()

    def fun(params, x, y):
        loss = loss_of(params, x, y)
        checkify.check(loss < 100.0, "the loss is {loss}", loss=loss)
        return jax.grad(loss_of)(params, x, y)

    errors = checkify.user_checks | checkify.nan_checks
    if outside:
        half = checkify.checkify(mixed_precision(fun, "mixed_float16"), errors)
    else:
        half = mixed_precision(checkify.checkify(fun, errors), "mixed_float16")
    half = jax.jit(half)
    error, grads = half(init_params(), x[:8], y[:8])
    error.throw()
    exact = jax.grad(loss_of)(init_params(), x[:8], y[:8])
    assert relative_error(grads, exact) < 0.01
    error, _ = half(init_params(), np.full_like(x[:8], np.nan), y[:8])
    with pytest.raises(checkify.JaxRuntimeError, match="nan generated|the loss is"):
        error.throw()


@pytest.mark.slow
def test_profiler_annotations_and_names(tmp_path):
    """Names of scopes are in the compiled program; annotations run as before."""

    @jax.profiler.annotate_function
    def fun(params, x):
        with jax.named_scope("encoder"), jax.profiler.TraceAnnotation("trace"):
            h = jnp.tanh(x @ params["hidden"][0])
        with jax.named_scope("decoder"):
            return (h @ params["head"]).sum()

    x, _ = digits()
    half = jax.jit(mixed_precision(jax.grad(fun), "mixed_bfloat16"))
    text = half.lower(init_params(), x[:8]).compile().as_text()
    for name in ("jvp(encoder)", "transpose(jvp(decoder))"):  # and a pass' own behind
        assert re.search(rf'{re.escape(name)}/[^"]*dot_general', text)
    with jax.profiler.trace(tmp_path), jax.profiler.StepTraceAnnotation("train"):
        half(init_params(), x[:8])["head"].block_until_ready()


@pytest.mark.slow
def test_debug_nans():
    """A skipped step of a jitted function returns no NaN, so nothing is reported.

    Op by op the overflow itself is seen: it is how the largest scale is found.
    """
    x, y = digits()
    tx = loss_scaling(optax.adam(0.1), init_scale=2.0**24)
    params = jax.tree.map(lambda p: 4 * p, init_params())
    state = params, tx.init(params)
    step = mixed_precision(plain_step(tx), "mixed_float16")
    with jax.debug_nans(True):
        new, _ = jax.jit(step)(state, x[:8], y[:8])
        assert loss_scale_state(new).skipped_steps == 1
        with pytest.raises(FloatingPointError, match="nan"):
            step(state, x[:8], y[:8])
        _, loss = jax.jit(step)(state, np.full_like(x[:8], 0), y[:8])
        with pytest.raises(FloatingPointError, match="nan"):
            jax.jit(step)(state, np.full_like(x[:8], np.inf), y[:8])
