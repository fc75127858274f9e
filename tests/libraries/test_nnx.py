"""Flax NNX modules as `nnx.jit` takes them: arguments, results, changes in place."""

import functools
import gc
import subprocess
import sys
import weakref

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    EPS,
    arrays,
    dtypes_in,
    eqns,
    products,
    relative_error,
    shape_of,
    trace,
)

from jmp_rewrite import (
    Policy,
    diagnose,
    explain,
    full_precision,
    loss_scale_state,
    loss_scaling,
    mixed_precision,
    scale_loss,
    unscale,
    use_policy,
)

nnx = pytest.importorskip("flax.nnx")

BF16 = "mixed_bfloat16"
X = jnp.arange(32.0).reshape(4, 8) / 32


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Net(nnx.Module):
    """Counts its calls; two of its attributes are one layer."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.same = self.up
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(jnp.tanh(self.up(x)))

    @mixed_precision(BF16)
    def decorated(self, x):
        return self(x)


def call(net, x):
    return net(x)


def halves(fun, *args):
    return [dtypes_in(e)[0] for e in products(trace(fun, *args))]


@pytest.mark.parametrize(
    "run",
    [
        mixed_precision(call, BF16),
        nnx.jit(mixed_precision(call, BF16)),
        mixed_precision(nnx.jit(call), BF16),
        nnx.jit(mixed_precision(mixed_precision(call, BF16), BF16)),
        nnx.jit(mixed_precision(call, BF16), graph=False),
        lambda net, x: mixed_precision(net, BF16)(x),
        lambda net, x: mixed_precision(net.__call__, BF16)(x),
        lambda net, x: mixed_precision(lambda *, n, x: n(x), BF16)(n=net, x=x),
        lambda net, x: mixed_precision(lambda t: t["a"][0](x), BF16)({"a": [net]}),
        Net.decorated,
        nnx.jit(Net.decorated),
        mixed_precision(call, "float32"),
    ],
)
@pytest.mark.filterwarnings("ignore:mixed_precision traces")  # some are not jitted
def test_a_change_in_place_is_seen_outside(run):
    net = Net()
    if getattr(run, "graph", None) is False or "SimpleJit" in type(run).__name__:
        net.same = None  # the tree mode of NNX takes no shared references
    out = run(net, X)
    assert out.dtype == jnp.float32 and net.calls[...] == 1
    np.testing.assert_allclose(out, Net()(X), atol=0.02)
    run(net, X)
    assert net.calls[...] == 2


def test_products_are_half():
    net = Net()
    for fun in (mixed_precision(call, BF16), lambda n, x: mixed_precision(n, BF16)(x)):
        assert halves(lambda x, f=fun: f(Net(), x), X) == ["bfloat16"] * 2
    assert halves(mixed_precision(call, BF16), net, X) == ["bfloat16"] * 2


def test_float32_changes_nothing():
    """Law 2 holds with modules as arguments."""
    plain = trace(lambda x: call(Net(), x), X)
    same = trace(lambda x: mixed_precision(call, "float32")(Net(), x), X)
    assert shape_of(same) == shape_of(plain)


def test_structure_may_change():
    """New parameters, static attributes, and shared references go out as well."""

    @mixed_precision(BF16)
    def change(net, x):
        net.extra = nnx.Param(net(x))
        net.flag = "on"
        net.alias = net.down
        del net.same
        return net, net.extra

    net = Net()
    same, extra = change(net, X)
    assert same is net and extra is net.extra and extra.shape == (4, 8)
    assert net.flag == "on" and net.alias is net.down and not hasattr(net, "same")


def test_references_stay_shared():
    seen = []

    @mixed_precision(BF16)
    def look(a, b, x):
        seen.append((a is b, a.up is a.same))
        return a.up(x)

    net = Net()
    look(net, net, X)
    assert seen == [(True, True)]
    assert net.up is net.same


@pytest.mark.slow
def test_what_arguments_of_jit_share_is_diagnosed_as_shared():
    @mixed_precision(BF16)
    def changed(net, down, x):
        down.kernel[...] += 1.0
        return net(x)

    net = Net()
    for look in (lambda f: len(explain(f)(net, net.down, X).jaxpr.in_avals),
                 lambda f: diagnose(f)(net, net.down, X).results):  # fmt: skip
        assert look(nnx.jit(changed)) == look(changed)


@pytest.mark.slow
def test_new_modules_may_be_results():
    net = mixed_precision(lambda x: Net(), BF16)(X)
    assert type(net) is Net and net.up is net.same
    made = mixed_precision(lambda other, x: Net(), BF16)(Net(), X)
    assert type(made) is Net and made.up is made.same


def test_modules_in_a_closure_may_not_change():
    """As inside `jax.jit`: Flax says so."""
    net = Net()
    with pytest.raises(Exception, match="Cannot mutate .* different trace level"):
        mixed_precision(lambda x: net(x), BF16)(X)
    out = mixed_precision(lambda x: net.down(net.up(x)), BF16)(X)
    assert out.dtype == jnp.float32


def test_an_error_leaves_modules_as_they_were():
    def fails(net, x):
        net.calls[...] += 1
        raise RuntimeError("mine")

    net = Net()
    with pytest.raises(RuntimeError, match="mine"):
        mixed_precision(fails, BF16)(net, X)
    assert net.calls[...] == 0
    assert mixed_precision(call, BF16)(net, X).shape == (4, 8)
    assert net.calls[...] == 1


def test_messages_name_the_function():
    def branches(net, x):
        return net(x) if x.sum() > 0 else x

    for fun in (branches, functools.partial(branches, x=X)):
        half = mixed_precision(fun, BF16)
        assert half.__name__ == "branches"
        # JAX 0.10 names no function whose arguments it cannot bind.
        known = "the function (branches|<unknown>)"
        with pytest.raises(jax.errors.TracerBoolConversionError, match=known):
            half(Net()) if fun is not branches else half(Net(), X)


@pytest.mark.parametrize(
    "partial_of",
    [
        functools.partial,
        lambda net: functools.partial(net.__call__),
        lambda net: functools.partial(call, net),
        lambda net: functools.partial(functools.partial(call), net=net),
        lambda net: functools.partial(
            lambda nets, shape, x: call(nets["net"], x).reshape(shape),
            {"net": net, "size": np.int64(3)},
            (np.int64(4), 8),  # sizes stay known
        ),
    ],
)
def test_what_a_partial_was_given_are_arguments(partial_of):
    net = Net()
    part = partial_of(net)
    named = {"x": X} if "net" in part.keywords else {}
    found = mixed_precision(part, BF16)(*([] if named else [X]), **named)
    assert relative_error(found, Net()(X)) < 8 * EPS[BF16]
    assert net.calls[...] == 1


@pytest.mark.parametrize(
    "closed_over",
    [
        lambda net: nnx.jit(mixed_precision(functools.partial(call, net), BF16)),
        lambda net: jax.jit(mixed_precision(net, BF16)),
        lambda net: jax.jit(lambda x: mixed_precision(call, BF16)(net, x)),
    ],
)
def test_a_module_that_must_not_be_changed_stays_as_it_was(closed_over):
    """It counts its calls, and belongs to the trace outside."""
    net = Net()
    with pytest.raises(flax.errors.TraceContextError):
        closed_over(net)(X)
    assert relative_error(net(X), Net()(X)) == 0
    assert net.calls[...] == 1


def test_nothing_is_kept():
    net = Net()
    mixed_precision(call, BF16)(net, X)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_gradients_outside_and_inside():
    def loss(net, x):
        return (net(x) ** 2).sum()

    exact = nnx.grad(loss)(Net(), X)
    outside, inside = Net(), Net()
    for net, grads in (
        (outside, nnx.grad(mixed_precision(loss, BF16))(outside, X)),
        (inside, mixed_precision(nnx.grad(loss), BF16)(inside, X)),
    ):
        assert net.calls[...] == 1
        assert jax.tree.structure(grads) == jax.tree.structure(exact)
        for g, e in zip(arrays(grads), arrays(exact), strict=True):
            assert g.dtype == jnp.float32
            np.testing.assert_allclose(g, e, atol=0.03 * float(jnp.abs(e).max()))


@pytest.mark.slow
def test_states_and_transformations():
    """The functional form, `nnx.vmap` and `nnx.cond`, as before."""
    net = Net()
    graphdef, state = nnx.split(net)
    run = jax.jit(mixed_precision(lambda s, x: nnx.merge(graphdef, s)(x), BF16))
    np.testing.assert_allclose(run(state, X), Net()(X), atol=0.02)
    rows = nnx.vmap(mixed_precision(lambda n, x: n.up(x), BF16), in_axes=(None, 0))
    assert rows(net, X).shape == (4, 16)

    def branch(net, x):
        return nnx.cond(x[0, 0] > 0, call, lambda n, x: n(n(x)), net, x)

    mixed_precision(branch, BF16)(net, X)
    assert net.calls[...] == 2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dropout(self.norm(self.linear(x))))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0,), out_axes=0)
def stack(rngs):
    return Block(rngs)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat_over_layers(remat):
    """Stacked layers: half inside, and statistics and keys move on."""
    block = nnx.remat(call) if remat else call
    through = nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)

    def step(blocks, optimizer, x):
        loss = lambda b: (through(b, x) ** 2).sum()  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(blocks)
        optimizer.update(blocks, grads)
        return value

    def train(decorate):
        blocks = stack(nnx.Rngs(0))
        # A rate at which the loss falls: at 1e-2 it rises, and any rounding grows.
        optimizer = nnx.Optimizer(blocks, optax.sgd(3e-3), wrt=nnx.Param)
        run = nnx.jit(decorate(step))
        return [float(run(blocks, optimizer, X)) for _ in range(4)], blocks

    losses, blocks = train(lambda fun: mixed_precision(fun, BF16))
    exact, other = train(lambda fun: fun)
    np.testing.assert_allclose(losses, exact, rtol=0.01)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(blocks.norm.mean[...], other.norm.mean[...], atol=0.01)
    assert (blocks.dropout.rngs.count[...] == 4).all()

    half = trace(mixed_precision(step, BF16), *fresh(blocks), X)
    inside = [e for loop in eqns(half, "scan") for e in products(loop.params["jaxpr"])]
    assert len(inside) == (4 if remat else 3)
    assert {d for e in inside for d in dtypes_in(e)} == {"bfloat16"}


def fresh(blocks):
    return blocks, nnx.Optimizer(blocks, optax.sgd(1e-2), wrt=nnx.Param)


class Stacked(nnx.Module):
    def __init__(self):
        self.blocks = stack(nnx.Rngs(0))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        through = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(through(self.blocks, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "full"),
    [("^head/kernel$", 3), ("^head", 3), ("^blocks/linear/kernel", 3), ("norm", 0)],
)
def test_scopes_are_paths_of_attributes(pattern, full):
    """Forward and backward; the variables around the arrays are no part of a path."""
    net = Stacked()
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    def step(net, optimizer, x):
        grads = nnx.grad(lambda net: (net(x) ** 2).sum())(net)
        optimizer.update(net, grads)

    policy = Policy(BF16, scopes={pattern: "float32"})
    found = halves(mixed_precision(step, policy), net, optimizer, X)
    assert len(found) == 6 and found.count("float32") == full


def test_optimizer_state_never_matches():
    net = Net()
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    policy = Policy(BF16, scopes={"opt_state|mu|nu": "float32"})
    with pytest.warns(UserWarning, match="matched nothing"):
        trace(mixed_precision(lambda n, o, x: n(x), policy), net, optimizer, X)


def test_full_precision_and_default_policies():
    net = Net()

    @mixed_precision
    def fun(net, x):
        with full_precision():
            h = net.up(x)
        return net.down(h)

    with use_policy("mixed_float16"):
        assert halves(fun, net, X) == ["float32", "float16"]
    with use_policy("float32"):
        assert halves(fun, net, X) == ["float32"] * 2


@pytest.mark.slow
def test_loss_scaling_reads_the_optimizer_s_variables():
    """`nnx.Optimizer` keeps every array of its state in a variable."""
    net = Net()
    tx = loss_scaling(optax.sgd(0.5), 1024.0)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    state = loss_scale_state(optimizer.opt_state)
    assert all(isinstance(x, jax.Array) for x in state[:-1])
    assert loss_scale_state(optimizer).loss_scale == 1024.0

    @nnx.jit
    @mixed_precision("mixed_float16")
    def step(net, optimizer, x):
        def loss_fn(net):
            return scale_loss((net(x) ** 2).mean(), optimizer.opt_state)

        grads = unscale(nnx.grad(loss_fn)(net), optimizer.opt_state)
        optimizer.update(net, grads, grads_unscaled=True)
        return grads

    before = np.asarray(net.up.kernel[...])
    exact = nnx.grad(lambda net: (net(X) ** 2).mean())(Net())
    grads = step(net, optimizer, X)
    for g, e in zip(arrays(grads), arrays(exact), strict=True):
        np.testing.assert_allclose(g, e, atol=0.01 * float(jnp.abs(e).max()))
    moved = before - np.asarray(net.up.kernel[...])
    np.testing.assert_allclose(moved, 0.5 * grads.same.kernel[...], atol=1e-6)
    step(net, optimizer, X * jnp.nan)
    assert loss_scale_state(optimizer.opt_state).skipped_steps == 1


@pytest.mark.slow
def test_variables_of_an_outer_trace_are_read():
    """What a function only reads is not written back: NNX would forbid it."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(nnx.relu(self.linear(x)))

    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch, calls):
        x, rest = batch
        calls[...] += 1  # written, beside what is only read
        model = nnx.merge(graphdef, params, rest, copy=True)
        out = jnp.square(model(x) - x[:, :1]).mean()
        return out, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def gradient(fun):
        def counted(params, batch):
            calls = nnx.Variable(jnp.array(0))
            out, stats = fun(params, batch, calls)
            return out, (stats, calls[...])

        return jax.jit(jax.grad(counted, has_aux=True))

    batch = jax.random.normal(jax.random.key(0), (16, 16)), rest
    before = jax.tree.leaves(nnx.to_pure_dict(rest))
    exact, (stats, _) = gradient(loss)(params, batch)
    half, (means, calls) = gradient(mixed_precision(loss, BF16))(params, batch)
    assert calls == 1
    assert 0 < relative_error(half, exact) < 4 * EPS[BF16]
    assert relative_error(means, stats) < 4 * EPS[BF16]
    after = jax.tree.leaves(nnx.to_pure_dict(rest))
    assert all(a is b for a, b in zip(after, before, strict=True))


@pytest.mark.slow
def test_an_nnx_without_pytree_is_no_obstacle():
    """Before Flax 0.12, which other libraries bring along, the class had no name."""
    code = """
from flax import nnx
del nnx.Pytree
import jax, jax.numpy as jnp
from jmp_rewrite import mixed_precision
fun = mixed_precision(lambda x: x @ x, "mixed_bfloat16")
print(jax.jit(fun)(jnp.ones((32, 32)))[0, 0])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "32.0", run.stderr
