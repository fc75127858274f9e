"""A decorated step leaves its process: exported, compiled, cached, checkpointed."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, bit_equal, relative_error
from programs import normal

from jmp_rewrite import (
    Policy,
    loss_scale_state,
    loss_scaling,
    mixed_precision,
    scale_loss,
)

POLICIES = ["mixed_bfloat16", "mixed_float16"]
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes integers to floats, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def net(params, x):
    for name in ("first", "second"):
        x = jax.nn.gelu(x @ params[name])
    return jax.nn.log_softmax(x @ params["head"])


def start(policy):
    """Returns the optimizer, and the state at the beginning."""
    # Small steps of the scale, so that it has moved when a run is interrupted.
    scale = Policy(policy).loss_scale
    tx = loss_scaling(TX, scale, growth_interval=2)
    params = {
        "first": normal(8, 16),
        "second": normal(16, 16, seed=1),
        "head": normal(16, 4, seed=2),
    }
    params = jax.tree.map(jnp.asarray, params)
    return tx, (params, tx.init(params))


def batch(i):
    x = normal(32, 8, seed=100 + i)
    return x, np.argmax(x[:, :4], 1)


def train_step(tx, policy):
    @mixed_precision(policy)
    def step(state, x, y):
        params, opt_state = state

        def loss_fn(params):
            picked = jnp.take_along_axis(net(params, x), y[:, None], 1)
            return scale_loss(-picked.mean(), opt_state)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


@functools.cache
def ready(policy):
    """Returns the compiled step, and its state after three steps."""
    tx, state = start(policy)
    step = jax.jit(train_step(tx, policy))
    for i in range(3):
        state, _ = step(state, *batch(i))
    return step, state


# ---- export, ahead-of-time compilation, the compilation cache


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_export_for_all_platforms(policy):
    """The train step for cpu, cuda and tpu: it serializes, loads, and runs."""
    step, state = ready(policy)
    leaves, tree = jax.tree.flatten((state, *batch(3)))

    def flat(*leaves):  # optax's states have no serialized form of their own
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(flat), platforms=platforms)(*leaves)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == platforms
    expected = jax.tree.leaves(step(state, *batch(3)))
    result = loaded.call(*leaves)
    assert [x.dtype for x in result] == [x.dtype for x in expected]
    # Compiled as another program, whose fusions round elsewhere.
    assert relative_error(result, expected) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_export_is_differentiable(policy):
    """An exported loss keeps its gradient, in float32."""
    _, (params, _) = ready(policy)
    x, _ = batch(0)
    loss = jax.jit(mixed_precision(lambda p, x: (net(p, x) ** 2).sum(), policy))
    exported = jax.export.export(loss, platforms=("cpu", "cuda", "tpu"))(params, x)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    grads = jax.grad(loaded.call)(params, x)
    assert {g.dtype for g in arrays(grads)} == {jnp.dtype("float32")}
    assert relative_error(grads, jax.grad(loss)(params, x)) < 1e-2


@pytest.mark.slow
def test_export_with_symbolic_shapes():
    _, (params, _) = ready("mixed_bfloat16")
    half = jax.jit(mixed_precision(net, "mixed_bfloat16"))
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
    exported = jax.export.export(half)(params, rows)
    loaded = jax.export.deserialize(exported.serialize())
    for n in (1, 5):
        x = normal(n, 8)
        assert relative_error(loaded.call(params, x), half(params, x)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_export_of_a_step_with_symbolic_shapes(policy):
    """No pass can tell which of two sizes is larger."""

    def step(w, x):
        def loss(w):
            h = jax.nn.gelu(x @ w + w[0][None], approximate=False)
            h = jax.nn.softmax((h @ w) @ h.T) @ h
            return -jax.nn.log_softmax(h @ w)[:, 0].mean()

        return w - jax.grad(loss)(w)

    half = jax.jit(mixed_precision(step, policy))
    types = (
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32),
    )
    exported = jax.export.export(half, platforms=("cpu", "cuda", "tpu"))(*types)
    w, x = normal(8, 8, seed=1) / 4, normal(5, 8)
    assert relative_error(exported.call(w, x), step(w, x)) < 1e-2


@pytest.mark.slow
def test_export_counts_what_has_a_symbol_for_its_size():
    def step(w, x):
        def loss(w):
            logits, rows = x @ w, jnp.arange(x.shape[0])
            return -jax.nn.log_softmax(logits)[rows, rows % 8].mean()

        return w - jax.grad(loss)(w), jax.lax.map(lambda row: jnp.tanh(row @ w) @ w, x)

    half = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
    w, x = normal(8, 8, seed=1) / 4, normal(5, 8)
    exported = jax.export.export(half)(jax.ShapeDtypeStruct((8, 8), jnp.float32), rows)
    for found, exact in zip(exported.call(w, x), step(w, x), strict=True):
        assert relative_error(found, exact) < 2e-2


def test_export_with_a_scope_of_a_parameter_that_each_row_gets():
    """Neither can be told which is larger: the parameter, or what is made of it."""

    def fun(params, x):
        first = jnp.broadcast_to(params["embed"]["first"], (x.shape[0], 1, 8))
        x = jnp.concatenate([first, x @ params["embed"]["w"]], 1)
        return jnp.tanh(x) @ params["head"]

    policy = Policy("mixed_bfloat16", scopes={"embed": "float32"})
    params = {"embed": {"w": normal(8, 8), "first": normal(1, 8)}, "head": normal(8, 8)}
    half = jax.jit(mixed_precision(fun, policy))
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4, 8"), jnp.float32)
    exported, x = jax.export.export(half)(params, rows), normal(5, 4, 8)
    assert relative_error(exported.call(params, x), half(params, x)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ahead_of_time(policy):
    """Lowered from types alone and compiled: the same program, to the bit."""
    step, state = ready(policy)
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)),
        (state, *batch(3)),
    )
    compiled = step.lower(*types).compile()
    bit_equal(compiled(state, *batch(3)), step(state, *batch(3)))
    assert "bf16" in compiled.as_text() or "f16" in compiled.as_text()


CACHED = """
    import sys
    import jax
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    events = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

    import jax.numpy as jnp
    import jmp_rewrite

    @jax.jit
    @jmp_rewrite.mixed_precision("mixed_float16")
    def step(w, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))
        return jax.lax.fori_loop(0, 2, lambda _, w: w - 0.1 * grad(w), w)

    args = jax.numpy.ones((8, 8)), jax.numpy.ones((4, 8))
    lowered = step.lower(*args)
    events.clear()
    lowered.compile()
    print(*(name.rsplit("/", 1)[1] for name in events if "compilation_cache" in name))
"""


@pytest.mark.slow
def test_the_compilation_cache_hits_in_another_process(run_python, tmp_path):
    runs = [
        run_python("-c", textwrap.dedent(CACHED), str(tmp_path / "cache"))
        for _ in range(2)
    ]
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr
    first, second = (r.stdout.split() for r in runs)
    assert "cache_hits" not in first and "cache_misses" in first
    assert "cache_hits" in second and "cache_misses" not in second


# ---- checkpoints


def save_with_orbax(state, path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", abstract(state))


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def save_with_flax(state, path):
    serialization = pytest.importorskip("flax.serialization")
    (path / "state").write_bytes(serialization.to_bytes(state))
    fresh = jax.tree.map(jnp.zeros_like, state)
    restored = serialization.from_bytes(fresh, (path / "state").read_bytes())
    return jax.tree.map(jnp.asarray, restored)


def save_with_flax_as_a_dictionary(state, path):
    serialization = pytest.importorskip("flax.serialization")
    kept = serialization.msgpack_serialize(serialization.to_state_dict(state))
    fresh = jax.tree.map(jnp.zeros_like, state)
    restored = serialization.msgpack_restore(kept)
    restored = serialization.from_state_dict(fresh, restored)
    return jax.tree.map(jnp.asarray, restored)


SAVES = [save_with_orbax, save_with_flax, save_with_flax_as_a_dictionary]


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("policy", [*POLICIES, "float32"])
def test_the_next_step_after_a_checkpoint_is_the_same(save, policy, tmp_path):
    """Parameters, optimizer and loss scale, in the middle of a run, to the bit."""
    step, state = ready(policy)
    restored = save(state, tmp_path)
    bit_equal(restored, state)
    bit_equal(step(restored, *batch(3)), step(state, *batch(3)))
    scale = loss_scale_state(restored[1])
    assert scale.loss_scale == (2.0**16 if policy == "mixed_float16" else 1)


@pytest.mark.parametrize("before", [*POLICIES, "float32"])
@pytest.mark.parametrize("after", [*POLICIES, "float32"])
def test_a_run_may_go_on_under_another_policy(before, after, tmp_path):
    """One checkpoint, all policies: the same tree, and the same losses."""
    _, state = ready(before)
    step, other = ready(after)
    restored = save_with_flax(state, tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(other)
    losses = []
    for i in range(3, 6):
        restored, loss = step(restored, *batch(i))
        losses.append(float(loss))
    exact = run_on_in_float32(before)
    np.testing.assert_allclose(losses, exact, rtol=0.01)
    state = loss_scale_state(restored[1])
    assert state.skipped_steps == 0
    assert (state.loss_scale > 1) == (after == "mixed_float16")


@functools.cache
def run_on_in_float32(before):
    step, _ = ready("float32")
    _, state = ready(before)
    losses = []
    for i in range(3, 6):
        state, loss = step(state, *batch(i))
        losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_orbax_restores_into_shardings(tmp_path):
    """The state of eight devices comes back where it was."""
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    _, state = ready("mixed_float16")
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    state = jax.tree.map(
        lambda x: jax.device_put(x, rows if x.ndim == 2 else whole), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", abstract(state))
    bit_equal(restored, state)
    for a, b in zip(arrays(restored), arrays(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cast_stands_in_the_mesh_of_its_operand(policy):
    """`auto_axes` takes arrays from one mesh to another; where is the cast?"""
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",), axis_types=explicit)
    rows = jax.sharding.PartitionSpec("rows", None)

    def loss(w, x):
        layer = jax.sharding.auto_axes(lambda h, w: jnp.tanh(h @ w), out_sharding=rows)
        return jnp.mean((layer(jnp.tanh(x @ w), w) @ w) ** 2)

    w, x = normal(8, 8, seed=1) / 4, normal(16, 8)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, rows))
        w = jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.P()))
        found = jax.jit(jax.grad(mixed_precision(loss, policy)))(w, x)
        assert relative_error(found, jax.jit(jax.grad(loss))(w, x)) < 2**-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
def test_depthwise_convolutions_of_each_device(kind):
    """JAX's derivative of one permutes by a `reshape`, which is written as two."""
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",), axis_types=(kind,))
    rows = jax.sharding.PartitionSpec("rows")
    last = jnp.asarray(normal(8, 8, seed=2) / 4)

    def loss(w, x):
        h = jax.lax.conv_general_dilated(
            jnp.tanh(x @ last),
            w,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=8,
        )
        return jnp.square(jnp.tanh(h) @ last).mean()

    def own(w, x):
        return w - jax.lax.pmean(jax.grad(loss)(w, x), "rows")

    step = jax.shard_map(own, mesh=mesh, in_specs=(jax.P(), rows), out_specs=jax.P())
    with jax.set_mesh(mesh):
        w = jax.device_put(
            normal(3, 3, 1, 8), jax.sharding.NamedSharding(mesh, jax.P())
        )
        x = jax.device_put(normal(8, 4, 4, 8), jax.sharding.NamedSharding(mesh, rows))
        found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, x)
        assert relative_error(found - w, jax.jit(step)(w, x) - w) < 2**-5
