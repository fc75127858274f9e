"""Flax Linen, Flax NNX, Haiku and Equinox: scopes by layer, and training.

Other people's models run under JAX's defaults, so the strict settings are off here.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, dtypes_in, products, trace
from jax import lax
from programs import normal

from jmp_rewrite import (
    Policy,
    explain,
    loss_scaling,
    mixed_precision,
    scale_loss,
    use_passes,
)

BF16 = "mixed_bfloat16"
# Every layer has its own width, so that a shape tells whose product it is.
SIZES = (5, 6, 7, 3)


pytestmark = pytest.mark.passes


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def batch():
    rng = np.random.RandomState(0)
    x = rng.randn(16, SIZES[0]).astype("f4")
    return jnp.asarray(x), jnp.asarray(np.argmax(x[:, :3], 1))


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def is_layer(eqn, widths):
    """Tells whether a product multiplies or makes a weight of this shape."""
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    return any(sorted(s[-2:]) == sorted(widths) for s in shapes)


def split(fun, *args, widths, scopes):
    """Returns the kinds of the layer's products, and of all others."""
    rewritten = trace(mixed_precision(fun, Policy(BF16, scopes=scopes)), *args)
    own, others = [], []
    for eqn in products(rewritten):
        (own if is_layer(eqn, widths) else others).append(dtypes_in(eqn)[0])
    return own, others


def only_this_layer(fun, *args, widths, scope, count=3):
    """Asserts that all products of one layer, and no others, are float32."""
    own, others = split(fun, *args, widths=widths, scopes={scope: "float32"})
    assert own == ["float32"] * count
    assert others and set(others) == {"bfloat16"}


def layers_of(fun, *args):
    """Returns the layers that `explain` names for the products of a function."""
    report = explain(fun, BF16)(*args)
    assert report.half_flops == 1.0 and str(report)
    return {row.layer for row in report.equations if row.flops}


def learns(step, state, *, steps=12):
    """Asserts that a step lowers its loss and keeps every dtype."""
    before = [x.dtype for x in arrays(state)]
    losses = []
    for _ in range(steps):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert [x.dtype for x in arrays(state)] == before
    assert not {jnp.dtype("bfloat16"), jnp.dtype("float16")} & set(before)


# ---- parameter paths, on plain trees


def weight(i, o, seed=0):
    return jnp.asarray(np.random.RandomState(seed).randn(i, o), "f4") / math.sqrt(i)


def mlp_params(sizes=SIZES):
    pairs = zip(sizes, sizes[1:], strict=False)
    return {"layers": [{"w": weight(i, o), "b": jnp.zeros(o)} for i, o in pairs]}


def mlp(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def loss_of(net):
    return lambda params, x, y: cross_entropy(net(params, x), y)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def train_step(net, tx=TX):
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_of(net))(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("pattern", ["layers/1", "^layers/1/w$", ".*1.*", r"s/1\b"])
@pytest.mark.parametrize("what", ["step", "grad", "loss"])
def test_a_layer_of_a_tree(pattern, what):
    params, (x, y) = mlp_params(), batch()
    if what == "step":
        fun, args = train_step(mlp), (params, TX.init(params), x, y)
    else:
        fun, args = loss_of(mlp), (params, x, y)
        fun = jax.grad(fun) if what == "grad" else fun
    count = 1 if what == "loss" else 3
    only_this_layer(fun, *args, widths=(6, 7), scope=pattern, count=count)


@pytest.mark.parametrize("what", ["step", "grad"])
def test_the_first_layer_has_no_dx(what):
    params, (x, y) = mlp_params(), batch()
    fun, args = jax.grad(loss_of(mlp)), (params, x, y)
    if what == "step":
        fun, args = train_step(mlp), (params, TX.init(params), x, y)
    only_this_layer(fun, *args, widths=(5, 6), scope="layers/0", count=2)


def paths_of_scoped(fun, *args, scope):
    """Returns the number of float32 products, and of all, before passes."""
    with use_passes("none"):
        rewritten = trace(
            mixed_precision(fun, Policy(BF16, scopes={scope: "float32"})), *args
        )
    found = [dtypes_in(e)[0] for e in products(rewritten)]
    return found.count("float32"), len(found)


def siblings(params, x):
    """Three layers of one shape share their input."""
    q, k, v = (x @ params[name] for name in "qkv")
    return jnp.tanh(q) * jax.nn.sigmoid(k) + jax.nn.relu(v)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("what", ["step", "grad"])
def test_siblings_that_share_their_input(first, what):
    params = {n: weight(5, 5, i) for i, n in enumerate("qkv")}
    params["in"], params["out"] = weight(5, 5, 7), weight(5, 3)

    def net(p, x):
        h = x if first else jnp.tanh(x @ p["in"])
        return siblings(p, h) @ p["out"]

    x, y = batch()
    fun, args = jax.grad(loss_of(net)), (params, x, y)
    if what == "step":
        fun, args = train_step(net), (params, TX.init(params), x, y)
    full, _ = paths_of_scoped(fun, *args, scope="^k$")
    assert full == (2 if first else 3)  # forward, dw, and dx where there is one


def test_a_residual_stream():
    params = {f"l{i}": {"w": weight(5, 5, i), "b": jnp.zeros(5)} for i in range(4)}

    def net(p, x):
        for layer in p.values():
            x = x + jax.nn.gelu(x @ layer["w"] + layer["b"])
        return x[:, :3]

    x, y = batch()
    full, count = paths_of_scoped(jax.grad(loss_of(net)), params, x, y, scope="l2")
    assert (full, count) == (3, 11)


def test_tied_weights():
    """A table that is looked up and multiplied: its products alone."""
    params = {"embed": weight(9, 6), "w": weight(6, 6)}

    def loss(p, ids, y):
        h = jnp.tanh(p["embed"][ids] @ p["w"])
        return cross_entropy(h @ p["embed"].T, y)

    ids = jnp.arange(4)
    full, count = paths_of_scoped(jax.grad(loss), params, ids, ids, scope="embed")
    assert (full, count) == (3, 6)


@pytest.mark.slow
def test_an_embedding_does_not_reach_the_next_product():
    params = {"embed": weight(9, 6), "pos": weight(4, 6), "w": weight(6, 9)}

    def loss(p, ids, y):
        return cross_entropy((p["embed"][ids] + p["pos"]) @ p["w"], y)

    def alone(p, ids, y):
        return cross_entropy(p["embed"][ids] @ p["w"], y)

    ids = jnp.arange(8).reshape(2, 4)
    for scope, fun in (("embed", loss), ("pos", loss), ("embed", alone)):
        full, count = paths_of_scoped(jax.grad(fun), params, ids, ids, scope=scope)
        assert (full, count) == (0, 3)


def test_a_bias_flows_to_the_next_product():
    params = mlp_params()

    def net(p, x):
        return p["layers"][0]["b"] + x @ p["layers"][0]["w"]

    def fun(p, x):
        return jax.nn.relu(net(p, x)) @ p["layers"][1]["w"]

    policy = Policy(BF16, scopes={"0/b": "float32"})
    rewritten = trace(mixed_precision(fun, policy), params, batch()[0])
    assert [dtypes_in(e)[0] for e in products(rewritten)] == ["bfloat16"] * 2
    adds = [e for e in rewritten.eqns if e.primitive.name == "add"]
    assert [dtypes_in(e) for e in adds] == [["float32"] * 2]


@pytest.mark.slow
def test_derived_weights():
    """Weight normalization and low-rank updates: made of parameters, then used."""
    params = {
        "norm": {"v": weight(5, 6), "g": jnp.ones(6)},
        "lora": {"w": weight(6, 7), "a": weight(6, 6), "b": weight(6, 7)},
        "out": weight(7, 3),
    }

    def net(p, x):
        v = p["norm"]["v"]
        x = jnp.tanh(x @ (p["norm"]["g"] * v / jnp.linalg.norm(v, axis=0)))
        x = jnp.tanh(x @ (p["lora"]["w"] + p["lora"]["a"] @ p["lora"]["b"]))
        return x @ p["out"]

    x, y = batch()
    fun = jax.grad(loss_of(net))
    assert paths_of_scoped(fun, params, x, y, scope="norm") == (2, 11)
    assert paths_of_scoped(fun, params, x, y, scope="lora") == (6, 11)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_scan_over_stacked_layers(checkpoint):
    params = {
        "blocks": {"up": jnp.ones((3, 5, 6)), "down": jnp.ones((3, 6, 5))},
        "out": weight(5, 3),
    }

    def block(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    body = jax.checkpoint(block) if checkpoint else block

    def net(p, x):
        return lax.scan(body, x, p["blocks"])[0] @ p["out"]

    x, y = batch()
    args = params, TX.init(params), x, y
    own, others = split(
        train_step(net), *args, widths=(5, 6), scopes={"blocks/up": "float32"}
    )
    # What is computed again in a checkpoint is one product more.
    assert own.count("float32") == (4 if checkpoint else 3)
    assert set(others) == {"bfloat16"}


def test_vmap():
    params, (x, y) = mlp_params(), batch()

    def loss(p, x, y):
        one = lambda x: mlp(p, x)  # noqa: E731
        return cross_entropy(jax.vmap(one)(x), y)

    only_this_layer(jax.grad(loss), params, x, y, widths=(6, 7), scope="layers/1")


@pytest.mark.slow
def test_unrolled_steps_and_epochs():
    """The updated parameter is still the parameter."""
    params, (x, y) = mlp_params(), batch()
    step = train_step(mlp)

    def unrolled(params, opt_state, x, y):
        params, opt_state, _ = step(params, opt_state, x, y)
        return step(params, opt_state, x, y)

    def epoch(params, opt_state, xs, ys):
        def body(carry, batch):
            *carry, loss = step(*carry, *batch)
            return tuple(carry), loss

        return lax.scan(body, (params, opt_state), (xs, ys))

    args = params, TX.init(params)
    only_this_layer(unrolled, *args, x, y, widths=(6, 7), scope="layers/1", count=6)
    only_this_layer(epoch, *args, x[None], y[None], widths=(6, 7), scope="layers/1")


def test_half_by_path():
    """A pattern "half" takes back what a rule keeps, for one layer."""
    params, (x, y) = mlp_params(), batch()
    policy = Policy(BF16, rules={"dot_general": "deny"}, scopes={"layers/1": "half"})
    rewritten = trace(mixed_precision(jax.grad(loss_of(mlp)), policy), params, x, y)
    for eqn in products(rewritten):
        expected = "bfloat16" if is_layer(eqn, (6, 7)) else "float32"
        assert dtypes_in(eqn)[0] == expected


def test_float32_by_name_wins_over_half_by_path():
    def fun(params, x):
        with jax.named_scope("here"):
            return x @ params["w"]

    for kinds in (("half", "float32"), ("float32", "half"), ("float32", "float32")):
        scopes = dict(zip(("^w$", "here"), kinds, strict=True))
        half = mixed_precision(fun, Policy(BF16, scopes=scopes))
        (product,) = products(trace(half, {"w": weight(5, 5)}, batch()[0]))
        assert dtypes_in(product)[0] == "float32"


class MyTrainState(NamedTuple):
    params: dict
    opt_state: tuple


def test_optimizer_state_never_matches():
    params, (x, y) = mlp_params(), batch()
    step = train_step(mlp)
    unmatched = Policy(BF16, scopes={"(mu|nu|trace|count)": "float32"})
    with pytest.warns(UserWarning, match="matched nothing"):
        trace(mixed_precision(step, unmatched), params, TX.init(params), x, y)

    def whole(state, x, y):
        params, opt_state, loss = step(*state, x, y)
        return MyTrainState(params, opt_state), loss

    state = MyTrainState(params, TX.init(params))
    only_this_layer(whole, state, x, y, widths=(6, 7), scope="layers/1")


# ---- Flax Linen


def linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        remat: bool = False

        @nn.compact
        def __call__(self, x):
            dense = nn.remat(nn.Dense) if self.remat else nn.Dense
            for i, size in enumerate(SIZES[1:]):
                x = jnp.tanh(dense(size, name=f"layer_{i}")(x))
            return x

    return Net


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_linen_scopes(remat):
    model, (x, y) = linen()(remat=remat), batch()
    params = model.init(jax.random.key(0), x)
    step = train_step(model.apply)
    args = params, TX.init(params), x, y
    own, others = split(step, *args, widths=(6, 7), scopes={"Net/layer_1": "float32"})
    assert len(own) >= 3 and set(own) == {"float32"} and set(others) == {"bfloat16"}
    assert layers_of(step, *args) == {f"Net/layer_{i}" for i in range(3)}


@pytest.mark.parametrize("name", ["state", "keys", "packed", "scope_of"])
def test_a_method_of_a_linen_module_has_its_own_names(name):
    nn = pytest.importorskip("flax.linen")

    def call(self, x, **named):
        return nn.Dense(4)(x + named[name])

    half = mixed_precision(BF16)(nn.compact(call))
    module = type("Net", (nn.Module,), {"__call__": half})()
    x = normal(8, 16)
    variables = module.init(jax.random.key(0), x, **{name: x})
    apply = jax.jit(lambda v, x: module.apply(v, x, **{name: x}))
    assert apply(variables, x).shape == (8, 4)


@pytest.mark.slow
@pytest.mark.parametrize("compact_inside", [False, True])
def test_a_method_of_a_linen_module(compact_inside):
    """It makes parameters, draws, and changes its statistics, where it runs."""
    nn = pytest.importorskip("flax.linen")

    def call(self, x, train=True):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))

    half = mixed_precision(BF16, static_argnames="train")
    own = half(nn.compact(call)) if compact_inside else nn.compact(half(call))
    plain, module = (
        type("Net", (nn.Module,), {"__call__": c})() for c in (nn.compact(call), own)
    )
    x, keys = normal(8, 16), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, x)
    assert jax.tree.structure(variables) == jax.tree.structure(plain.init(keys, x))
    rngs = {"dropout": jax.random.key(2)}
    found, expected = (
        jax.jit(functools.partial(m.apply, rngs=rngs, mutable=["batch_stats"]))(
            variables, x
        )
        for m in (module, plain)
    )
    for a, b in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)
    jaxpr = trace(lambda v, x: module.apply(v, x, train=False), variables, x)
    assert {d for e in products(jaxpr) for d in dtypes_in(e)} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BF16, "mixed_float16"])
def test_linen_trains(policy):
    model, (x, y) = linen()(), batch()
    train_state = pytest.importorskip("flax.training.train_state")
    tx = loss_scaling(optax.adam(0.05), Policy(policy).loss_scale)
    params = model.init(jax.random.key(0), x)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.replace(step=jnp.asarray(0))

    @jax.jit
    @mixed_precision(policy)
    def step(state, x, y):
        def loss_fn(params):
            loss = cross_entropy(state.apply_fn(params, x), y)
            return scale_loss(loss, state.opt_state)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    learns(functools.partial(step, x=x, y=y), state)


@pytest.mark.slow
def test_train_state_by_path():
    """`TrainState.opt_state` holds the same names, and never matches."""
    model, (x, y) = linen()(), batch()
    train_state = pytest.importorskip("flax.training.train_state")
    params = model.init(jax.random.key(0), x)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    def step(state, x, y):
        loss = lambda p: cross_entropy(state.apply_fn(p, x), y)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    scope = "^params/params/layer_1/kernel$"
    only_this_layer(step, state, x, y, widths=(6, 7), scope=scope)


# ---- Haiku


def haiku():
    hk = pytest.importorskip("haiku")
    return hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP(SIZES[1:], activation=jnp.tanh)(x))
    )


@pytest.mark.slow
def test_haiku_scopes():
    model, (x, y) = haiku(), batch()
    params = model.init(jax.random.key(0), x)
    args = params, TX.init(params), x, y
    step = train_step(model.apply)
    only_this_layer(step, *args, widths=(6, 7), scope="mlp/.*linear_1")
    assert layers_of(step, *args) == {f"mlp/linear_{i}" for i in range(3)}


@pytest.mark.slow
def test_haiku_trains():
    model, (x, y) = haiku(), batch()
    params = model.init(jax.random.key(0), x)
    tx = optax.adam(0.05)
    step = jax.jit(mixed_precision(train_step(model.apply, tx), BF16))

    def one(state):
        *state, loss = step(*state, x, y)
        return state, loss

    learns(one, [params, tx.init(params)])


# ---- Flax NNX


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            pairs = zip(SIZES, SIZES[1:], strict=False)
            self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    return nnx, Net(nnx.Rngs(0))


def nnx_step(nnx, graphdef):
    def step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], loss

    return step


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["layers/1", "1/kernel"])
def test_nnx_scopes(pattern):
    nnx, model = nnx_model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    step = nnx_step(nnx, graphdef)
    only_this_layer(step, state, *batch(), widths=(6, 7), scope=pattern)
    found = layers_of(step, state, *batch())
    assert {name.removeprefix("0/") for name in found} == {
        f"layers/{i}" for i in range(3)
    }


@pytest.mark.slow
def test_nnx_modules_are_trees():
    nnx, model = nnx_model()
    x, y = batch()

    def loss(model, x, y):
        return cross_entropy(model(x), y)

    only_this_layer(loss, model, x, y, widths=(6, 7), scope="layers/1", count=1)
    half = mixed_precision(loss, BF16)
    grads = nnx.grad(half)(model, x, y)
    assert {g.dtype for g in arrays(grads)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_nnx_trains():
    nnx, model = nnx_model()
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    step = jax.jit(mixed_precision(nnx_step(nnx, graphdef), BF16))
    x, y = batch()
    learns(functools.partial(step, x=x, y=y), state)


# ---- Equinox


def equinox():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        layers: list
        activation: object = eqx.field(static=True)
        function: object  # a leaf that is no array
        name: str = "net"

        def __call__(self, x):
            for layer in self.layers:
                x = self.activation(layer(x))
            return self.function(x)

    keys = jax.random.split(jax.random.key(0), 3)
    pairs = zip(SIZES, SIZES[1:], keys, strict=False)
    layers = [eqx.nn.Linear(i, o, key=key) for i, o, key in pairs]
    return eqx, Net(layers, jnp.tanh, lambda x: 2 * x)


def equinox_step(eqx, tx):
    def step(model, opt_state, x, y):
        def loss_fn(model):
            return cross_entropy(jax.vmap(model)(x), y)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(
            grads, opt_state, eqx.filter(model, eqx.is_array)
        )
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["layers/1", ".*1/weight.*"])
def test_equinox_scopes(pattern):
    eqx, model = equinox()
    opt_state = TX.init(eqx.filter(model, eqx.is_array))
    half = mixed_precision(
        equinox_step(eqx, TX), Policy(BF16, scopes={pattern: "float32"})
    )
    x, y = batch()
    rewritten = eqx.filter_make_jaxpr(half)(model, opt_state, x, y)[0]
    own = [dtypes_in(e)[0] for e in products(rewritten) if is_layer(e, (6, 7))]
    others = [dtypes_in(e)[0] for e in products(rewritten) if not is_layer(e, (6, 7))]
    assert own == ["float32"] * 3 and set(others) == {"bfloat16"}


@pytest.mark.slow
def test_equinox_layers_in_a_report():
    eqx, model = equinox()
    opt_state = TX.init(eqx.filter(model, eqx.is_array))
    half = eqx.filter_jit(mixed_precision(equinox_step(eqx, TX), BF16))
    found = layers_of(half, model, opt_state, *batch())
    assert found == {f"layers/{i}" for i in range(3)}


@pytest.mark.slow
def test_equinox_modules_pass_through():
    eqx, model = equinox()
    same = mixed_precision(lambda m: m, BF16)(model)
    assert type(same) is type(model)
    assert same.activation is model.activation and same.function is model.function
    assert same.name == "net"
    whole = mixed_precision(model, BF16)
    assert whole(batch()[0][0]).dtype == jnp.float32
    loss = mixed_precision(lambda m, x: m(x).sum(), BF16)
    grads = eqx.filter_grad(loss)(model, batch()[0][0])
    assert {g.dtype for g in arrays(grads)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_equinox_trains():
    eqx, model = equinox()
    tx = optax.adam(0.05)
    step = eqx.filter_jit(mixed_precision(equinox_step(eqx, tx), BF16))
    x, y = batch()

    def one(state):
        *state, loss = step(*state, x, y)
        return state, loss

    learns(one, [model, tx.init(eqx.filter(model, eqx.is_array))])
