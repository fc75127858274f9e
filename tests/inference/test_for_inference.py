"""`for_inference`: weights and state that are stored in half, and change no bit."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import flash, inputs, layer
from attending import weights as layer_weights
from flax import nnx
from helpers import HALF, eqns, same_types, trace
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec
from programs import PROGRAMS

from jmp_rewrite import (
    Policy,
    diagnose,
    explain,
    for_inference,
    full_precision,
    half_precision,
    mixed_precision,
)

BF16 = "mixed_bfloat16"
POLICIES = tuple(HALF)


def dtypes(tree):
    return [str(x.dtype) for x in jax.tree.leaves(tree)]


def same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if not isinstance(x, (jax.Array, np.ndarray)):
            assert x == y
        elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            same_bits(jax.random.key_data(x), jax.random.key_data(y))
        else:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def serves(fun, policy, *args, **options):
    """Checks that stored and unstored arguments give the decorated function's bits."""
    serve = for_inference(fun, policy, **options)
    stored = serve.store(*args)
    want = jax.jit(mixed_precision(fun, policy))(*args)
    same_bits(jax.jit(serve)(*stored), want)
    same_bits(jax.jit(serve)(*args), want)
    return stored


# ---- weights


def apply(params, x):
    hidden = jnp.tanh((x * params["scale"]) @ params["up"] + params["bias"])
    return hidden @ params["down"]


def params_of(width=32):
    one, two = jax.random.split(jax.random.key(0))
    return {
        "bias": jnp.linspace(0, 1, width)[None],
        "down": jax.random.normal(one, (width, width)),
        "scale": jnp.linspace(1, 2, width)[None],
        "unread": jnp.ones((3, 3)),
        "up": jax.random.normal(two, (width, width)),
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_products_alone_read_are_stored(policy):
    half = HALF[policy]
    (params, x) = serves(apply, policy, params_of(), inputs(width=32))
    kept = {k: str(v.dtype) for k, v in params.items()}
    assert (kept["up"], kept["down"]) == (half, half)
    assert (kept["scale"], kept["unread"], str(x.dtype)) == ("float32",) * 3
    same_bits(params["up"], params_of()["up"].astype(half))


def test_a_stored_weight_is_read_as_it_is():
    """Nothing casts it, up or down."""
    serve = for_inference(apply, BF16)
    stored = serve.store(params_of(), inputs(width=32))
    jaxpr = trace(serve, *stored)
    of_weights = [str(v) for v in jaxpr.jaxpr.invars if v.aval.shape == (32, 32)]
    casts = eqns(jaxpr, "convert_element_type")
    assert not {str(e.invars[0]) for e in casts} & set(of_weights)
    assert len(of_weights) == 2


@pytest.mark.breadth
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.grad], ids=lambda p: p.name
)
def test_weights_change_no_bit(program):
    serves(program.fun, BF16, *program.args())


@pytest.mark.slow
def test_data_movement_is_looked_through():
    def fun(params, x):
        q, k = jnp.split(params["qk"].reshape(32, 2, 16), 2, axis=1)
        w = jnp.concatenate([q[:, 0], k[:, 0][::-1]], axis=1)
        rows = params["table"][jnp.arange(8)]
        x = jax.jit(lambda x, w: x @ w.T)(x, w)
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
        x = jax.lax.cond(x[0, 0] > 0, lambda x, w: x @ w, lambda x, w: x, x, w)
        return x @ rows.T

    key = iter(jax.random.split(jax.random.key(0), 3))
    params = {
        "qk": jax.random.normal(next(key), (32, 32)),
        "table": jax.random.normal(next(key), (10, 32)),
        "layers": jax.random.normal(next(key), (3, 32, 32)),
    }
    stored, _ = serves(fun, BF16, params, inputs(width=32))
    assert dtypes(stored) == ["bfloat16"] * 3


def test_weights_read_unrounded_stay_float32():
    def fun(params, x):
        y = x @ params["both"] + jnp.sum(params["both"])
        y = y @ params["precise"].T
        with jax.named_scope("head"):
            y = y @ params["scoped"]
        y = full_precision(jnp.matmul)(y, params["full"])
        y = y @ params["free"]
        return y @ params["free"], params["returned"]

    names = ("both", "free", "full", "precise", "returned", "scoped")
    params = dict.fromkeys(names, layer_weights()["q"])
    policy = Policy(BF16, scopes={"head": "float32"})
    serve = for_inference(fun, policy)
    stored, _ = serve.store(params, inputs())
    found = {k for k, v in stored.items() if v.dtype == jnp.bfloat16}
    assert found == {"free", "precise"}
    report = serve.report(params, inputs())
    why = {x.path: x.reason for x in report.leaves}
    assert "inside full_precision" in why["0/full"]
    assert "the scope 'head' is float32" in why["0/scoped"]
    assert why["0/returned"] == "it is returned"
    assert "reduce_sum reads it unrounded at" in why["0/both"]
    assert {x.path for x in report.stored} == {"0/free", "0/precise"}


def test_the_report_counts_bytes():
    serve = for_inference(apply, BF16)
    params, x = params_of(), inputs(width=32)
    report = serve.report(params, x)
    stored = serve.store(params, x)
    assert report.bytes_before == sum(v.nbytes for v in params.values())
    assert report.bytes_after == sum(v.nbytes for v in stored[0].values())
    text = str(report)
    assert "0/scale" in text and "0/up" not in text and "nothing reads it" in text
    same = serve.report(*stored)
    assert (same.bytes_before, same.bytes_after) == (
        report.bytes_before,
        report.bytes_after,
    )


@pytest.mark.parametrize("jitted", [False, True])
def test_what_the_function_captures_is_told(jitted):
    """A closure's weights are no argument, and half of nothing is no success."""
    params, x = params_of(), inputs(width=32)
    fun = lambda x: apply(params, x)  # noqa: E731
    serve = for_inference(jax.jit(fun) if jitted else fun, BF16)
    given = for_inference(apply, BF16).report(params, x)
    size = sum(leaf.bytes_before for leaf in given.stored)
    assert serve.report(x).captured_bytes == size > 0
    with pytest.warns(UserWarning, match="that the function captures are not stored"):
        serve.store(x)
    assert "give them as an argument" in str(serve.report(x))
    assert for_inference(apply, BF16).report(params, x).captured_bytes == 0


@pytest.mark.parametrize(
    "fun",
    [
        lambda e, x: x @ e[0],
        lambda e, x: (x @ e[0]).sum() + jnp.linalg.det(e).sum(),
        lambda e, x: x @ e[0] + e[1],
        lambda e, x: (x @ e[0], e),
        lambda e, x: lax.cond(x[0, 0] > 0, lambda h: h @ e[0], lambda h: h, x),
        lambda e, x: jax.jit(lambda x: x @ e[0] @ e[0].T)(x @ e[1]),
        jax.jit(lambda e, x: lax.scan(lambda h, w: (h @ w, None), x, e)[0]),
        jax.jit(lambda e, x: lax.scan(lambda h, w: (h + w, None), x @ x.T, e)[0]),
    ],
)
def test_what_is_captured_counts_as_if_it_were_given(fun):
    """Nobody is told to give as weights what would not be stored either."""
    e, x = jnp.ones((3, 4, 4)), jnp.ones((4, 4))
    given = for_inference(fun, BF16).report(e, x)
    held = for_inference(lambda x: fun(e, x), BF16).report(x)
    assert held.captured_bytes == sum(leaf.bytes_before for leaf in given.stored)


def test_several_weights_and_arguments_by_name():
    def fun(x, first, second):
        return x @ first @ second

    w = layer_weights()["q"]
    serve = for_inference(fun, BF16, weights=(1, 2))
    stored = serve.store(inputs(), second=w, first=w)
    assert dtypes(stored) == ["float32", "bfloat16", "bfloat16"]
    want = jax.jit(mixed_precision(fun, BF16))(inputs(), w, w)
    same_bits(jax.jit(serve)(*stored), want)
    same_bits(jax.jit(serve)(stored[0], second=stored[2], first=stored[1]), want)


def test_a_decorated_function_keeps_its_policy():
    fun = jax.jit(mixed_precision(apply, "mixed_float16"))
    params, _ = for_inference(fun).store(params_of(), inputs(width=32))
    assert params["up"].dtype == jnp.float16
    # As where two policies nest: the inner one decides inside itself.
    stored = for_inference(fun, BF16).store(params_of(), inputs(width=32))
    assert stored[0]["up"].dtype == jnp.float16
    nested = jax.jit(mixed_precision(fun, BF16))(params_of(), inputs(width=32))
    same_bits(jax.jit(for_inference(fun, BF16))(*stored), nested)


def test_under_float32_nothing_changes():
    serve = for_inference(apply, "float32")
    params, x = params_of(), inputs(width=32)
    stored = serve.store(params, x)
    same_bits(stored, (params, x))
    same_bits(jax.jit(serve)(*stored), jax.jit(apply)(params, x))
    assert serve.report(params, x).bytes_after == serve.report(params, x).bytes_before


def test_half_weights_count_as_stored():
    """They cannot be told from stored ones: results are those of float32 weights."""

    def fun(params, x):
        x = x.astype(params["w"].dtype) * params["scale"]
        return x @ params["w"]

    half = {"scale": jnp.ones((1, 16)), "w": layer_weights()["q"]}
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), half)
    full = jax.tree.map(lambda w: w.astype(jnp.float32), half)
    stored = serves(fun, BF16, full, inputs())
    serve = for_inference(fun, BF16)
    same_bits(serve.store(half, inputs())[0], half)
    same_bits(serve(half, inputs()), serve(*stored))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_stored_serves_any_call(policy):
    """Of a batch of one a bias is read unrounded, of a mean the whole table."""

    def apply(w, tokens):
        hidden = jax.nn.relu(w["table"][tokens] @ w["up"] + w["bias"])
        return hidden @ w["down"]

    def mean(w, tokens):
        return w["table"][tokens].mean(0)

    full = {"table": random(50, 64), "up": random(64, 64)}
    full |= {"bias": random(1, 64), "down": random(64, 50)}
    stored, _ = for_inference(apply, policy).store(full, jnp.arange(8))
    assert set(dtypes(stored)) == {HALF[policy]}
    values = jax.tree.map(lambda w: w.astype(jnp.float32), stored)
    for fun in (apply, mean):
        serve = for_inference(fun, policy)
        for tokens in (jnp.arange(1), jnp.arange(8)):
            same_bits(serve(stored, tokens), serve(values, tokens))


def cached(w, cache, x, at):
    """A cache that the program keeps in bfloat16 itself."""
    key = (x @ w["key"]).astype(jnp.bfloat16)
    cache = jax.lax.dynamic_update_slice(cache, key[None], (at, 0))
    scores = jax.nn.softmax((x @ w["query"]) @ cache.T.astype(jnp.float32))
    return cache, scores @ cache.astype(jnp.float32)


@pytest.mark.parametrize("policy", [*POLICIES, "float32"])
def test_half_arrays_of_the_functions_own(policy):
    """It does not take them as float32; beside them weights are stored."""
    w = {"key": random(16, 16), "query": random(16, 16)}
    args = w, jnp.zeros((8, 16), jnp.bfloat16), random(16), 3
    want = jax.jit(mixed_precision(cached, policy))(*args)
    serve = for_inference(cached, policy, state={1: 0})
    stored = serve.store(*args)
    half = HALF.get(policy, "float32")
    assert dtypes(stored[0]) == [half, half] and stored[1].dtype == jnp.bfloat16
    elsewhere = for_inference(cached, policy, state={1: 0})
    same_bits(jax.jit(serve)(*args), want)
    same_bits(jax.jit(elsewhere)(*stored), want)
    report = serve.report(*args)
    assert report.leaves[-1].before == report.leaves[-1].after == "bfloat16"
    explain(serve)(*args)
    explain(serve)(*stored)
    diagnose(serve)(*stored)


def test_a_report_of_arguments_by_name_is_of_what_runs():
    def fun(w, x):
        return jax.lax.dot(jnp.tanh(x), w)

    serve = for_inference(fun, BF16)
    w, x = serve.store(random(16, 16), random(4, 16))
    same_bits(serve(w=w, x=x), serve(w, x))
    assert explain(serve)(w=w, x=x).half_flops == explain(serve)(w, x).half_flops == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_what_could_not_be_told_from_own_arrays_is_not_stored(policy):
    """One layer takes its weights in half alone, and one in float32 alone."""

    def layer(x, w):
        return jax.lax.conv(x, w, (1,), "SAME")

    def fun(w, x):
        hidden = jnp.tanh(layer(x, w["full"]))
        return layer(hidden.astype(HALF[policy]), w["half"]).astype(x.dtype)

    w = {"full": random(16, 16, 3), "half": random(16, 16, 3).astype(HALF[policy])}
    args = w, random(4, 16, 8)
    serve = for_inference(fun, policy)
    stored = serve.store(*args)
    assert dtypes(stored[0]) == ["float32", HALF[policy]]
    assert "told from" in serve.report(*args).leaves[0].reason
    same_bits(jax.jit(serve)(*stored), jax.jit(mixed_precision(fun, policy))(*args))


def test_what_a_function_takes_in_no_dtype():
    serve = for_inference(lambda w, x: jax.lax.dot(x, w), BF16)
    with pytest.raises(ValueError, match=r"lhs_shape=\(4, 3\) rhs_shape=\(2, 4\)"):
        serve(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3)))


def test_one_array_in_two_places_is_stored_once():
    def fun(w, x):
        return jnp.tanh(x @ w["in"]) @ w["out"].T

    tied = random(16, 16)
    stored, _ = for_inference(fun, BF16).store({"in": tied, "out": tied}, random(4, 16))
    assert stored["in"] is stored["out"] and stored["in"].dtype == jnp.bfloat16


def test_two_functions_share_stored_weights():
    """What one has stored, another one may read unrounded."""

    def prefill(w, x):
        return x @ w["table"].T * w["scale"]

    def decode(w, tokens):
        h = w["table"][tokens] * w["scale"][:, :16]
        return w["table"] @ (h * jax.lax.rsqrt(jnp.square(h).mean()))[0]

    w, tokens = {"scale": jnp.ones((1, 20)), "table": random(20, 16)}, jnp.arange(3)
    stored, _ = for_inference(prefill, BF16).store(w, random(8, 16))
    assert dtypes(stored) == ["float32", "bfloat16"]
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), stored)
    serve = jax.jit(for_inference(decode, BF16))
    same_bits(serve(stored, tokens), serve(rounded, tokens))


def test_a_report_of_symbolic_shapes():
    rows, length = jax.export.symbolic_shape("b, t")
    cache, x = (jax.ShapeDtypeStruct((n, 16), jnp.float32) for n in (length, rows))

    def fun(w, cache, x):
        return cache + 1, jax.nn.softmax(x @ w @ cache.T) @ cache

    serve = for_inference(fun, BF16, state={1: 0})
    assert "state    64*t B -> 64*t B" in str(serve.report(random(16, 16), cache, x))


# ---- other shapes than those of `store`


def policy_network(params, x):
    """Four observations: few terms, which from some batch on are float32."""
    hidden = jnp.tanh(jnp.tanh(x @ params["first"]) @ params["middle"])
    return hidden @ params["last"]


def with_bias(params, x):
    """Of one example a bias has the activation's own size."""
    hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
    return hidden @ params["middle"] @ params["last"]


def of_weights(params, x):
    """A result's dtype is that of weights alone."""
    latents = params["last"].T @ params["middle"]
    return latents * 1.0, jnp.tanh(x @ params["first"]).sum(0) @ params["last"]


def random(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "width", "batches", "is_here"),
    [
        (policy_network, 4, (1, 64), True),
        (policy_network, 4, (1, 64), False),
        (with_bias, 32, (8, 1), True),
        (with_bias, 32, (8, 1), False),
        (of_weights, 4, (1, 64), True),  # elsewhere its half arrays may be its own
    ],
)
def test_what_was_stored_serves_other_shapes(fun, width, batches, is_here):
    """As float32 arrays of its values do, in this process or in another."""
    params = {
        "bias": random(64),
        "first": random(width, 64),
        "last": random(64, 32),
        "middle": random(64, 64),
    }
    serve = for_inference(fun, BF16)
    stored, _ = serve.store(params, random(batches[0], width))
    if not is_here:
        serve = for_inference(fun, BF16)
    rounded = jax.tree.map(lambda w: w.astype(jnp.float32), stored)
    for batch in batches:
        x = random(batch, width)
        got, want = jax.jit(serve)(stored, x), jax.jit(serve)(rounded, x)
        same_bits(got, want)
        same_types(got, fun(params, x))
        products = [
            [
                str(e.invars[0].aval.dtype)
                for e in eqns(trace(serve, w, x), "dot_general")
            ]
            for w in (stored, rounded)
        ]
        assert products[0] == products[1] and "bfloat16" in products[0]
        same_bits(serve.store(stored, x)[0], stored)
    why = {leaf.path: leaf.reason for leaf in serve.report(stored, x).leaves}
    widened = {path for path in why if why[path].startswith("stored for another call")}
    assert widened


def test_a_state_that_is_widened_returns_as_it_came():
    def fun(w, state, x):
        return jnp.tanh(x @ state) @ w, state.at[0].set(w.sum(1))

    serve = for_inference(fun, BF16, state={1: 1})
    w, state, _ = serve.store(random(64, 32), random(4, 64), random(1, 4))
    assert state.dtype == jnp.bfloat16
    x = random(64, 4)
    reasons = [leaf.reason for leaf in serve.report(w, state, x).leaves]
    assert reasons[1].startswith("stored for another call; here dot_general reads it")
    out, new = jax.jit(serve)(w, state, x)
    want, wide = jax.jit(serve)(w, state.astype(jnp.float32), x)
    same_bits((out, new), (want, wide.astype(jnp.bfloat16)))


def test_a_state_of_half_that_nothing_reads_returns_in_half():
    def fun(w, state, x):
        return x @ w, jnp.tanh(x @ w)

    serve = for_inference(fun, BF16, state={1: 1})
    state = jnp.zeros((64, 16), jnp.bfloat16)
    assert serve(layer_weights()["q"], state, random(64, 16))[1].dtype == jnp.bfloat16


# ---- state


def attend_to(cache, q, k, v, position):
    keys = jax.lax.dynamic_update_slice(cache["k"], k, (position, 0))
    values = jax.lax.dynamic_update_slice(cache["v"], v, (position, 0))
    mask = jnp.arange(keys.shape[0]) <= position
    scores = jnp.where(mask[None], q @ keys.T, -1e9)
    return jax.nn.softmax(scores) @ values, {"k": keys, "v": values}


def decode(params, cache, x, position):
    q, k, v = (x @ params[name] for name in "qkv")
    out, cache = attend_to(cache, q, k, v, position)
    return jnp.tanh(out @ params["o"]), cache


def empty_cache(length=24, width=16):
    return {"k": jnp.zeros((length, width)), "v": jnp.zeros((length, width))}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_is_stored(policy):
    serve = for_inference(decode, policy, weights=0, state={1: 1})
    params, cache = layer_weights(), empty_cache()
    x = inputs(1)
    first, second, *_ = stored = serve.store(params, cache, x, 3)
    assert {*dtypes(first["q"]), *dtypes(second)} == {HALF[policy]}
    plain = jax.jit(mixed_precision(decode, policy))
    step = jax.jit(serve, donate_argnums=1)
    new = stored[1]
    for position in range(4):
        x_out, cache = plain(params, cache, x, position)
        y_out, new = step(stored[0], new, x, position)
        same_bits(y_out, x_out)
        assert {*dtypes(new)} == {HALF[policy]}
        same_bits(new, jax.tree.map(lambda a: a.astype(HALF[policy]), cache))
    # As it came in, so it is returned.
    same_types(jax.jit(serve)(params, empty_cache(), x, 0)[1], empty_cache())


def test_accumulators_are_no_caches():
    def fun(w, state, x):
        moved = jnp.concatenate([state["window"][1:], x @ w])
        new = {
            "sum": state["sum"] + x @ w,
            "hidden": jnp.tanh(x @ w + state["hidden"] @ w),
            "window": moved,
            "read": state["read"] * 0.5,
        }
        return moved @ w, new

    state = {
        "hidden": jnp.ones((1, 16)),
        "read": jnp.ones((1, 16)),
        "sum": jnp.ones((1, 16)),
        "window": jnp.ones((8, 16)),
    }
    serve = for_inference(fun, BF16, state={1: 1})
    _, stored, _ = serve.store(layer_weights()["q"], state, inputs(1))
    assert {k: str(v.dtype) for k, v in stored.items()} == {
        "hidden": "bfloat16",
        "read": "float32",
        "sum": "float32",
        "window": "bfloat16",
    }
    report = serve.report(layer_weights()["q"], state, inputs(1))
    why = {x.path: x.reason for x in report.leaves}
    assert "add reads it unrounded" in why["1/sum"]


def test_cache_updates_are_not_widened():
    """Rows of a half product go into a half cache as they are, sliced and reshaped."""

    def fun(params, cache, x):
        both = (x @ params).reshape(4, 2, 32)
        cache = jax.lax.dynamic_update_slice(cache, both[:, 1], (0, 0))
        return x @ both[:, 0].T @ cache[:4], cache

    key = jax.random.key(0)
    args = jax.random.normal(key, (32, 64)), jnp.zeros((8, 32)), inputs(width=32)[:4]
    serve = for_inference(fun, BF16, state={1: 1})
    jaxpr = trace(serve, *serve.store(*args))
    widened = [
        e
        for e in eqns(jaxpr, "convert_element_type")
        if e.params["new_dtype"] == jnp.float32 and e.invars[0].aval.shape != (4, 32)
    ]
    assert widened == []


def test_a_cache_that_another_result_shows_is_kept():
    def fun(w, cache, x):
        cache = jax.lax.dynamic_update_slice(cache, x @ w, (2, 0))
        return cache @ w, cache, cache[2]

    serve = for_inference(fun, BF16, state={1: 1})
    _, cache, _ = serve.store(layer_weights()["q"], jnp.zeros((24, 16)), inputs(1))
    assert cache.dtype == jnp.float32


def test_caches_of_a_scan_over_layers():
    def fun(params, cache, x, position):
        def body(x, inputs):
            out, cache = decode(*inputs, x, position)
            return x + out, cache

        x, cache = jax.lax.scan(body, x, (params, cache))
        return cache, x @ params["o"][0]

    cache = jax.tree.map(lambda x: jnp.stack([x] * 3), empty_cache())
    serve = for_inference(fun, BF16, state={1: 0})
    stored = serve.store(layer_weights(3), cache, inputs(1), 3)
    assert {*dtypes(stored[1])} == {"bfloat16"}
    new, out = jax.jit(serve)(*stored)
    _, want = jax.jit(mixed_precision(fun, BF16))(layer_weights(3), cache, inputs(1), 3)
    same_bits(out, want)
    (loop,) = eqns(trace(serve, *stored), "scan")
    assert not [v for v in loop.invars if v.aval.str_short() == "float32[3,24,16]"]


def test_caches_that_are_not_stored_are_stacked_in_half():
    """A stack is no update of the argument, so float32 would be twice the memory."""

    def fun(params, cache, total, x, position):
        def body(x, inputs):
            params, cache, total = inputs
            out, cache = decode(params, cache, x, position)
            return x + out, (cache, total + out)

        x, (cache, total) = jax.lax.scan(body, x, (params, cache, total))
        return cache, total, jnp.argmax(x @ params["o"][0])

    cache = jax.tree.map(lambda x: jnp.stack([x + 0.1] * 3), empty_cache())
    args = layer_weights(3), cache, jnp.ones((3, 1, 16)), inputs(1), 3
    serve = for_inference(fun, BF16, state={1: 0, 2: 1})
    (loop,) = eqns(trace(serve, *args), "scan")
    types = [v.aval.str_short() for v in loop.outvars]
    assert types.count("bfloat16[3,24,16]") == 2
    assert "float32[3,1,16]" in types  # what is added to
    unstored = jax.jit(serve)(*args)
    same_types(unstored, fun(*args))
    stored = jax.jit(serve)(*serve.store(*args))
    assert {*dtypes(stored[0])} == {"bfloat16"}
    same_bits(unstored, jax.tree.map(lambda x, y: x.astype(y.dtype), stored, unstored))
    # Of a function whose result may be read by anybody they are float32.
    (loop,) = eqns(trace(for_inference(fun, BF16), *args), "scan")
    assert "bfloat16[3,24,16]" not in [v.aval.str_short() for v in loop.outvars]


def test_a_cache_that_a_loop_carries_is_updated_as_it_comes():
    """A loop updates a donated argument in place, and needs no memory for it."""

    def fun(params, cache, x):
        def body(i, carry):
            x, cache = carry
            return decode(params, cache, x, i)

        return jax.lax.fori_loop(0, 4, body, (x, cache))

    args = layer_weights(), empty_cache(), inputs(1)
    serve = for_inference(fun, BF16, state={1: 1})
    (loop,) = eqns(trace(serve, *args), "scan", "while")
    assert "float32[24,16]" in [v.aval.str_short() for v in loop.outvars]
    (loop,) = eqns(trace(serve, *serve.store(*args)), "scan", "while")
    assert "float32[24,16]" not in [v.aval.str_short() for v in loop.outvars]


# ---- loops that hold the cache


def generate(loop, params, x, length=6):
    """Decodes from a cache of its own; returns what it chose."""

    def body(i, carry):
        x, cache, chosen = carry
        out, cache = decode(params, cache, x, i)
        number = jnp.argmax(out)
        x = params["up"][number][None]
        return x, cache, chosen.at[i].set(number)

    first = (x, empty_cache(), jnp.zeros((length,), jnp.int32))
    if loop == "fori":
        return jax.lax.fori_loop(0, length, body, first)[2]
    if loop == "while":
        end = jax.lax.while_loop(
            lambda c: c[0] < length,
            lambda c: (c[0] + 1, body(c[0], c[1])),
            (jnp.asarray(0), first),
        )
        return end[1][2]

    def step(carry, i):
        return body(i, carry), None

    return jax.lax.scan(step, first, jnp.arange(length))[0][2]


@pytest.mark.parametrize("loop", ["fori", "while", "scan"])
@pytest.mark.parametrize("decorate", [mixed_precision, for_inference])
def test_a_loop_carries_its_cache_in_half(loop, decorate):
    fun = functools.partial(generate, loop)
    jaxpr = trace(decorate(fun, BF16), layer_weights(), inputs(1))
    (eqn,) = eqns(jaxpr, "scan", "while")
    carried = [v.aval.str_short() for v in eqn.outvars]
    assert "bfloat16[24,16]" in carried and "float32[24,16]" not in carried
    # Weights are cast once, in front of it.
    body = eqn.params.get("jaxpr") or eqn.params["body_jaxpr"]
    shapes = [e.invars[0].aval.shape for e in eqns(body, "convert_element_type")]
    assert (16, 16) not in shapes
    same_bits(
        jax.jit(decorate(fun, BF16))(layer_weights(), inputs(1)),
        jax.jit(mixed_precision(lambda *a: (fun(*a), a[1]), BF16))(
            layer_weights(), inputs(1)
        )[0],
    )


def test_beam_search_gathers_its_caches():
    def fun(params, x):
        def step(carry, i):
            x, cache = carry
            out, cache = jax.vmap(decode, (None, 0, 0, None))(params, cache, x, i)
            order = jnp.argsort(out[:, 0, 0])
            cache = jax.tree.map(lambda c: c[order], cache)
            return (out[order], cache), order

        cache = jax.tree.map(lambda c: jnp.stack([c] * 4), empty_cache())
        return jax.lax.scan(step, (x, cache), jnp.arange(5))[1]

    jaxpr = trace(mixed_precision(fun, BF16), layer_weights(), inputs(4)[:, None])
    (loop,) = eqns(jaxpr, "scan")
    assert "bfloat16[4,24,16]" in [v.aval.str_short() for v in loop.outvars]


VOCABULARY, LAYERS, LENGTH, END = 24, 2, 8, 3


def language_model(params, tokens, caches, at):
    """Reads a token of each sequence; caches as a dict of layers, as Flax has them."""
    x, new = params["embed"][tokens], {}
    for name, block in params["layers"].items():
        cache = caches[name]
        rows = {n: (x @ block[n])[:, None] for n in ("k", "v")}
        kept = {
            n: jax.lax.dynamic_update_slice(cache[n], rows[n], (0, at, 0)) for n in rows
        }
        scores = jnp.einsum("bd,bkd->bk", x @ block["q"], kept["k"])
        scores = jnp.where(jnp.arange(LENGTH)[None] <= at, scores, -1e9)
        x = x + jnp.einsum("bk,bkd->bd", jax.nn.softmax(scores), kept["v"])
        new[name] = {**kept, "index": cache["index"] + 1}
    return x @ params["embed"].T, new


def empty_caches(batch):
    zeros = jnp.zeros((batch, LENGTH, 16))
    layer = {"index": jnp.asarray(0), "k": zeros, "v": zeros}
    return {f"layer{i}": dict(layer) for i in range(LAYERS)}


def language_params():
    keys = iter(jax.random.split(jax.random.key(3), 3 * LAYERS + 1))
    layers = {
        f"layer{i}": {n: jax.random.normal(next(keys), (16, 16)) / 4 for n in "qkv"}
        for i in range(LAYERS)
    }
    return {"embed": jax.random.normal(next(keys), (VOCABULARY, 16)), "layers": layers}


def greedy(params, first):
    """As `generate()` of Hugging Face: it ends once every sequence has ended."""
    batch = first.shape[0]
    state = {
        "at": jnp.asarray(0),
        "caches": empty_caches(batch),
        "finished": jnp.zeros(batch, bool),
        "sequences": jnp.zeros((batch, LENGTH), jnp.int32),
        "token": first,
    }

    def goes_on(state):
        return (state["at"] < LENGTH) & ~jnp.all(state["finished"])

    def step(state):
        at = state["at"]
        logits, caches = language_model(params, state["token"], state["caches"], at)
        token = jnp.where(state["finished"], END, jnp.argmax(logits, -1))
        update = token[:, None].astype(jnp.int32)
        return {
            "at": at + 1,
            "caches": caches,
            "finished": state["finished"] | (token == END),
            "sequences": jax.lax.dynamic_update_slice(
                state["sequences"], update, (0, at)
            ),
            "token": token.astype(first.dtype),
        }

    return jax.lax.while_loop(goes_on, step, state)["sequences"]


def beams(params, first, width=3):
    """Beam search: the caches of all beams are flattened, and gathered by parent."""
    batch = first.shape[0]

    def flat(x):
        return x.reshape(-1, *x.shape[2:]) if x.ndim else x

    def parted(x):
        return x.reshape(batch, width, *x.shape[1:]) if x.ndim else x

    def gathered(x, parents):
        return x[jnp.arange(batch)[:, None], parents] if x.ndim else x

    def step(state):
        at, scores, tokens, sequences, caches = state
        logits, caches = language_model(params, flat(tokens), caches, at)
        log_p = parted(jax.nn.log_softmax(logits)) + scores[..., None]
        scores, best = jax.lax.top_k(log_p.reshape(batch, -1), width)
        parents, tokens = best // VOCABULARY, best % VOCABULARY
        caches = jax.tree.map(lambda c: flat(gathered(parted(c), parents)), caches)
        sequences = gathered(sequences, parents).at[:, :, at].set(tokens)
        return at + 1, scores, tokens, sequences, caches

    def goes_on(state):
        at, scores, *_ = state
        return (at < LENGTH) & (jnp.max(scores) > -50)

    start = (
        jnp.asarray(0),
        jnp.linspace(0, -1, width)[None].repeat(batch, 0),
        jnp.stack([first] * width, 1),
        jnp.zeros((batch, width, LENGTH), jnp.int32),
        empty_caches(batch * width),
    )
    return jax.lax.while_loop(goes_on, step, start)[3]


@pytest.mark.slow
@pytest.mark.parametrize("search", [greedy, beams])
def test_a_loop_that_generates_until_all_have_ended(search):
    args = language_params(), jnp.array([1, 5, 7, 11])
    half = mixed_precision(search, BF16)
    (loop,) = eqns(trace(half, *args), "while")
    rows = 4 if search is greedy else 12
    types = [v.aval.str_short() for v in loop.outvars]
    assert types.count(f"bfloat16[{rows},{LENGTH},16]") == 2 * LAYERS
    assert f"float32[{rows},{LENGTH},16]" not in types
    want = jax.jit(half)(*args)
    serve = for_inference(search, BF16)
    stored, first = serve.store(*args)
    assert {*dtypes(stored["layers"])} == {"bfloat16"}
    same_bits(jax.jit(serve)(stored, first), want)
    same_bits(jax.jit(serve)(*args), want)
    assert len({*np.asarray(want).ravel().tolist()}) > 3


def test_a_window_that_rolls():
    def fun(w, x):
        def step(window, i):
            window = jnp.roll(window, -1, axis=0).at[-1].set((x @ w)[0] * i)
            return window, jnp.argmax(window @ w)

        return jax.lax.scan(step, jnp.zeros((8, 16)), jnp.arange(5.0))[1]

    jaxpr = trace(mixed_precision(fun, BF16), layer_weights()["q"], inputs(1))
    (loop,) = eqns(jaxpr, "scan")
    assert "bfloat16[8,16]" in [v.aval.str_short() for v in loop.outvars]


def test_a_running_sum_is_carried_in_float32():
    def fun(w, x):
        def step(total, i):
            return total + x @ w, jnp.argmax(total @ w)

        return jax.lax.scan(step, jnp.zeros((1, 16)), jnp.arange(5.0))[1]

    jaxpr = trace(for_inference(fun, BF16), layer_weights()["q"], inputs(1))
    (loop,) = eqns(jaxpr, "scan")
    assert "float32[1,16]" in [v.aval.str_short() for v in loop.outvars]


def fill(w, x):
    """Fills a cache in a loop, and returns numbers that have a derivative."""

    def step(cache, i):
        cache = jax.lax.dynamic_update_slice(cache, x @ w, (i, 0))
        return cache, None

    return jax.lax.scan(step, jnp.zeros((8, 16)), jnp.arange(5))[0] @ w


def carried(jaxpr):
    return {v.aval.str_short() for e in eqns(jaxpr, "scan") for v in e.outvars}


def test_a_loop_that_returns_numbers_carries_its_cache_in_half():
    w, x = layer_weights()["q"], inputs(1)
    fun = mixed_precision(fill, BF16)
    assert carried(trace(fun, w, x)) == {"bfloat16[8,16]"}
    same_bits(jax.jit(fun)(w, x), jax.jit(for_inference(fill, BF16))(w, x))
    got = jax.vmap(fun, (None, 0))(w, jnp.stack([x, x]))
    np.testing.assert_allclose(got[0], fun(w, x), rtol=0.02, atol=0.02)


def test_a_loop_that_is_differentiated_carries_cotangents_in_float32():
    """Of whatever is differentiated, the function or what is jitted."""
    w, x = layer_weights()["q"], inputs(1)
    fun = mixed_precision(lambda w, x: jnp.sum(fill(w, x)), BF16)
    for loss in (fun, jax.jit(fun), jax.checkpoint(fun)):
        jaxpr = trace(jax.grad(loss), w, x)
        assert "bfloat16[8,16]" not in carried(jaxpr)
        assert "float32[8,16]" in carried(jaxpr)
    same_bits(jax.jit(jax.grad(jax.jit(fun)))(w, x), jax.jit(jax.grad(fun))(w, x))


# ---- kernels


def test_kernels():
    attend = half_precision(flash)
    fun = functools.partial(layer, attend)
    stored, _ = serves(fun, BF16, layer_weights(), inputs())
    assert {*dtypes(stored)} == {"bfloat16"}


# ---- how it is called


def test_abstract_arguments():
    args = params_of(), inputs(width=32)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    serve = for_inference(apply, BF16)
    stored, real = serve.store(*types), serve.store(*args)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stored) == jax.tree.map(
        lambda x: (x.shape, x.dtype), real
    )
    assert str(serve.report(*types)) == str(serve.report(*args))
    assert jax.eval_shape(serve, *stored).dtype == jnp.float32


def test_export():
    serve = for_inference(apply, BF16)
    stored = serve.store(params_of(), inputs(width=32))
    exported = export.export(jax.jit(serve), platforms=["cpu", "cuda", "tpu"])(*stored)
    restored = export.deserialize(exported.serialize())
    same_bits(restored.call(*stored), jax.jit(serve)(*stored))
    assert "bfloat16" in {str(a.dtype) for a in exported.in_avals}


def test_sharded_weights():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    whole = NamedSharding(mesh, PartitionSpec())
    serve = for_inference(apply, BF16)
    params = {
        k: jax.device_put(v, columns if v.shape == (32, 32) else whole)
        for k, v in params_of().items()
    }
    stored, x = serve.store(params, inputs(width=32))
    assert stored["up"].sharding.is_equivalent_to(columns, 2)
    types = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), params
    )
    assert serve.store(types, x)[0]["up"].sharding == columns
    want = jax.jit(mixed_precision(apply, BF16))(params, x)
    np.testing.assert_allclose(jax.jit(serve)(stored, x), want, rtol=0.01, atol=0.02)


def test_storing_inside_jit():
    serve = for_inference(apply, BF16)
    params, x = params_of(), inputs(width=32)
    stored = jax.jit(lambda p: serve.store(p, x)[0])(params)
    same_bits(stored, serve.store(params, x)[0])


def test_storing_twice_changes_nothing():
    serve = for_inference(apply, BF16)
    once = serve.store(params_of(), inputs(width=32))
    same_bits(serve.store(*once), once)
    same_bits(for_inference(apply, BF16).store(*once), once)


def test_numpy_weights():
    params = jax.tree.map(np.asarray, params_of())
    serves(apply, BF16, params, inputs(width=32))


def test_it_has_the_function_s_name():
    serve = for_inference(apply, BF16)
    assert serve.__name__ == "apply" and serve.__wrapped__ is apply


# ---- frameworks


@pytest.mark.slow
def test_linen():
    model = nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.Dense(8)])
    x = inputs(width=16)
    stored, _ = serves(model.apply, BF16, model.init(jax.random.key(0), x), x)
    kernels = [v.dtype for v in jax.tree.leaves(stored) if v.ndim == 2]
    assert set(kernels) == {jnp.dtype("bfloat16")}
    assert "float32" in dtypes(stored)  # the norm's scale


@pytest.mark.slow
def test_haiku():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 8])(x)))
    x = inputs()
    stored, _ = serves(model.apply, BF16, model.init(jax.random.key(0), x), x)
    assert "bfloat16" in dtypes(stored)


@pytest.mark.slow
def test_equinox():
    model = eqx.nn.MLP(16, 8, 32, 2, key=jax.random.key(0))
    serve = for_inference(lambda model, x: jax.vmap(model)(x), BF16)
    x = inputs()
    stored, _ = serve.store(model, x)
    assert stored.activation is model.activation
    assert stored.layers[0].weight.dtype == jnp.bfloat16
    want = eqx.filter_jit(mixed_precision(lambda m, x: jax.vmap(m)(x), BF16))(model, x)
    same_bits(eqx.filter_jit(serve)(stored, x), want)
    same_bits(eqx.filter_jit(serve)(model, x), want)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.calls = nnx.Variable(jnp.asarray(0))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.up(self.norm(x))


def test_nnx():
    model, x = Block(nnx.Rngs(0)), inputs()

    def fun(model, x):
        return model(x)

    serve = for_inference(fun, BF16)
    stored, _ = serve.store(model, x)
    assert isinstance(stored, Block) and stored is not model
    assert model.up.kernel[...].dtype == jnp.float32
    assert stored.up.kernel[...].dtype == jnp.bfloat16
    assert stored.norm.scale[...].dtype == jnp.float32
    want = nnx.jit(mixed_precision(fun, BF16))(model, x)
    same_bits(nnx.jit(serve)(stored, x), want)
    assert (int(model.calls[...]), int(stored.calls[...])) == (1, 1)
    assert stored.up.kernel[...].dtype == jnp.bfloat16
    assert "0/norm/scale" in str(serve.report(model, x))


class Decoder(nnx.Module):
    """Writes its cache in place."""

    def __init__(self, rngs):
        self.w = nnx.Linear(16, 16, rngs=rngs)
        self.cache = nnx.Cache(jnp.zeros((8, 16)))

    def __call__(self, x, position):
        start = (position, 0)
        cache = jax.lax.dynamic_update_slice(self.cache[...], self.w(x), start)
        self.cache[...] = cache
        return x @ cache.T


@pytest.mark.slow
def test_nnx_caches_are_stored_in_place():
    model, plain, x = Decoder(nnx.Rngs(0)), Decoder(nnx.Rngs(0)), inputs(1)

    def fun(model, x, position):
        return model(x, position)

    serve = for_inference(fun, BF16)
    model, *_ = serve.store(model, x, 0)
    assert model.cache[...].dtype == jnp.bfloat16
    step, plain_step = nnx.jit(serve), nnx.jit(mixed_precision(fun, BF16))
    for position in range(3):
        same_bits(step(model, x, position), plain_step(plain, x, position))
        assert model.cache[...].dtype == jnp.bfloat16
    assert plain.cache[...].dtype == jnp.float32
    serve(plain, x, 0)
    assert plain.cache[...].dtype == jnp.float32


@pytest.mark.parametrize("copy", [False, True])
def test_nnx_caches_as_a_result(copy):
    """The functional form: the state of a module comes as an argument, and returns."""
    definition, weights, cache = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param, ...)

    def step(weights, cache, x):
        module = nnx.merge(definition, weights, cache, copy=copy)
        return module(x, 3), nnx.state(module, nnx.Cache)

    def swapped(weights, cache, x):
        return step(weights, cache, x)[0], weights

    args = weights, cache, inputs(1)
    want, full = jax.jit(mixed_precision(step, BF16))(*args)
    serve = for_inference(step, BF16, state={1: 1})
    stored = serve.store(*args)
    assert set(dtypes(stored[1])) == {"bfloat16"}
    got, new = jax.jit(serve)(*stored)
    same_bits(got, want)
    assert jax.tree.structure(new) == jax.tree.structure(full)
    same_bits(new, jax.tree.map(lambda x: x.astype(jnp.bfloat16), full))
    with pytest.raises(ValueError, match="the same tree"):
        for_inference(swapped, BF16, state={1: 1}).store(*args)


@pytest.mark.parametrize("jit", [nnx.jit, lambda fun: fun])
def test_under_float32_nnx_modules_change_in_place(jit):
    plain, served, x = Decoder(nnx.Rngs(0)), Decoder(nnx.Rngs(0)), inputs(1)

    def fun(model, x, position):
        return model(x, position)

    serve = for_inference(fun, "float32")
    for position in range(3):
        want = jit(fun)(plain, x, position)
        same_bits(jit(serve)(served, x, position), want)
    same_bits(served.cache[...], plain.cache[...])
    stored, *_ = serve.store(served, x, 0)
    assert stored is not served
    same_bits(nnx.state(stored), nnx.state(served))


@pytest.mark.slow
def test_keras():
    keras = pytest.importorskip("keras")
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(8)]
    )

    def fun(trainable, fixed, x):
        return model.stateless_call(trainable, fixed, x)[0]

    arrays = [v.value for v in model.trainable_variables]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        stored, *_ = serves(fun, BF16, arrays, [], inputs())
    assert [str(v.dtype) for v in stored if v.ndim == 2] == ["bfloat16"] * 2


def test_orbax(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    serve = for_inference(apply, BF16)
    params, x = serve.store(params_of(), inputs(width=32))
    types = serve.store(
        *jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding),
            (params_of(), inputs(width=32)),
        )
    )
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "stored", params)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "stored", types[0])
    same_bits(restored, params)
    again = for_inference(apply, BF16)  # as in another process
    same_bits(jax.jit(again)(restored, x), jax.jit(serve)(params, x))


# ---- bad input


def stateful(w, state, x):
    return x @ w, {"a": state["a"] + 1}


def calls(serve, *args):
    return [
        lambda: serve(*args),
        lambda: serve.store(*args),
        lambda: serve.report(*args),
    ]


@pytest.mark.parametrize("wrong", [3, "apply", jnp.ones(3)])
def test_non_functions_raise(wrong):
    with pytest.raises(TypeError, match="for_inference expected a function"):
        for_inference(wrong)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"weights": 3}, ValueError, "3 positional arguments .w, state, x. .*got 3"),
        ({"weights": (0, 5)}, ValueError, "got 5"),
        ({"weights": -1}, ValueError, "from 0 on, got -1"),
        ({"weights": "w"}, TypeError, "weights expected numbers"),
        ({"weights": True}, TypeError, "weights expected numbers"),
        ({"state": {4: 0}}, ValueError, "got 4"),
        ({"state": 1}, TypeError, "state expected a mapping"),
        ({"state": {1: "a"}}, TypeError, "state expected numbers"),
        ({"state": {0: 1}}, ValueError, "as weights and as state"),
        ({"weights": (), "state": {1: 1, 2: 1}}, ValueError, "another result"),
    ],
)
def test_wrong_numbers(options, error, match):
    with pytest.raises(error, match=match):
        for_inference(stateful, BF16, **options)


STATE = {"a": jnp.ones((2, 16))}


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize(
    ("options", "args", "error", "match"),
    [
        ({"state": {1: 5}}, (STATE,), ValueError, "names result 5 of .* returns 2"),
        (
            {"state": {1: 0}},
            (STATE,),
            ValueError,
            r"same tree, got \['a'\] in the argument alone and an array in the result",
        ),
        (
            {"state": {1: 1}},
            ({"a": jnp.ones((1, 16)), "b": jnp.ones(2)},),
            ValueError,
            r"expected the same tree, got \['b'\] in the argument alone\.",
        ),
        ({"state": {1: 1}}, ({"a": "text"},), TypeError, "expected arrays in argument"),
        ({"state": {1: 1}}, ({"a": 1.5},), TypeError, "expected arrays in argument"),
        ({"weights": 1}, ("text",), TypeError, "expected arrays in argument 1"),
    ],
)
def test_wrong_calls(call, options, args, error, match):
    serve = for_inference(stateful, BF16, **options)
    w = layer_weights()["q"]
    with pytest.raises(error, match=match):
        calls(serve, w, *args, inputs(1))[call]()


@pytest.mark.parametrize("call", range(3))
def test_a_state_of_another_shape(call):
    def fun(w, state, x):
        return x @ w, {"a": jnp.concatenate([state["a"]] * 2)}

    serve = for_inference(fun, BF16, state={1: 1})
    with pytest.raises(ValueError, match=r"float32\[2, 16\] and float32\[4, 16\]"):
        calls(serve, layer_weights()["q"], STATE, inputs(1))[call]()


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("other", ["mixed_float16", "float32"])
def test_arguments_that_were_stored_under_another_policy(call, other):
    stored = for_inference(apply, BF16).store(params_of(), inputs(width=32))
    with pytest.raises(ValueError, match="stored under another policy"):
        calls(for_inference(apply, other), *stored)[call]()


def test_a_call_with_too_few_arguments():
    serve = for_inference(lambda *args: args[0], BF16, weights=2)
    with pytest.raises(ValueError, match="the call has 1 positional"):
        serve(jnp.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_stored", [False, True])
def test_explain_and_diagnose_know_its_policy(policy, is_stored):
    serve = for_inference(lambda w, x: jnp.tanh(x @ w) @ w, policy)
    args = jnp.eye(16), jnp.ones((4, 16))
    args = serve.store(*args) if is_stored else args
    report = explain(serve)(*args)
    products = [e.dtype for e in report.equations if e.primitive == "dot_general"]
    assert products == [HALF[policy]] * 2
    for shown in (report, diagnose(serve)(*args)):
        assert f"under Policy('{policy}')" in str(shown).splitlines()[0]
    asked = explain(serve, "float32")(*args)
    assert {e.dtype for e in asked.equations if e.flops} == {"float32"}


def test_static_arguments_of_a_decorated_function():
    @functools.partial(mixed_precision, policy=BF16, static_argnums=2)
    def apply(params, x, flags):
        return jnp.tanh(x @ params) @ params if flags[0] else x

    params, x, flags = jnp.eye(8), jnp.ones((4, 8)), np.ones(3)
    serve = for_inference(apply)
    (stored, *others) = serve.store(params, x, flags)
    assert str(stored.dtype) == "bfloat16" and others[-1] is flags
    same_bits(serve(stored, x, flags), serve(params, x, flags))
    serve = for_inference(functools.partial(apply, params))
    same_bits(serve(x, flags), apply(params, x, flags))


@pytest.mark.slow
def test_methods():
    class Model:
        factor = 2.0

        @functools.partial(for_inference, policy=BF16, weights=1, state={2: 1})
        def apply(self, w, state, x):
            return x @ w * self.factor @ state, state.at[0].set(0.0)

    model, w, x = Model(), layer_weights()["q"], inputs()
    stored = model.apply.store(w, w, x)
    assert dtypes(stored) == ["bfloat16", "bfloat16", "float32"]
    want = jax.jit(mixed_precision(Model.apply.__wrapped__, BF16), static_argnums=0)
    out, state = jax.jit(model.apply)(*stored)
    same_bits(out, want(model, w, w, x)[0])
    assert state.dtype == jnp.bfloat16
    assert len(model.apply.report(*stored).stored) == 2
    same_bits(Model.apply(model, *stored)[0], model.apply(*stored)[0])


def test_a_method_of_an_object_that_holds_the_weights():
    class Model(eqx.Module):
        w: jax.Array

        @functools.partial(for_inference, policy=BF16)
        def apply(self, x):
            return jnp.tanh(x @ self.w) @ self.w

    model, x = Model(layer_weights()["q"]), inputs()
    stored, _ = Model.apply.store(model, x)
    assert stored.w.dtype == jnp.bfloat16
    apply = jax.jit(lambda model, x: model.apply(x))
    same_bits(apply(stored, x), apply(model, x))


def test_a_state_by_name_behind_a_default():
    def decode(params, x=None, cache=None):
        x = jnp.ones((4, 8)) if x is None else x
        return x @ params, cache + (x @ params)[None]

    params, cache = jnp.eye(8), jnp.zeros((2, 4, 8))
    serve = for_inference(decode, BF16, state={2: 1})
    assert len(serve.store(params, cache=cache)) == 3
    assert serve(params, cache=cache)[1].shape == cache.shape


def test_a_weight_times_one_is_stored():
    """A scale that nobody has set, as that of maximal update parametrization."""
    w, x = layer_weights()["q"], inputs()
    serve = for_inference(lambda w, x: x @ (w * 1.0), BF16)
    stored, _ = serve.store(w, x)
    assert stored.dtype == jnp.bfloat16
    same_bits(serve(stored, x), serve(w, x))
