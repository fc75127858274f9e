"""One device's overflow skips the step on all: no divergence, no deadlock."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import two_processes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_rewrite import loss_scaling, scale_loss, where_applied

DEVICES = 8
SGD = optax.sgd(0.125, momentum=0.5)


def batches():
    """Four batches, one row a device; in the second one row of one device is inf."""
    x = np.arange(1, 4 * DEVICES + 1, dtype=np.float32).reshape(4, DEVICES, 1) / 64
    x[1, 5] = np.inf
    return x


def loss_fn(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)


def expected():
    """A single device that never saw the second batch."""
    w, state = jnp.zeros((1, 1)), SGD.init(jnp.zeros((1, 1)))
    for i, x in enumerate(batches()):
        if i != 1:
            updates, state = SGD.update(jax.grad(loss_fn)(w, x), state)
            w = optax.apply_updates(w, updates)
    return w


def check(w, state):
    assert (state.skipped_steps == 1).all() and (state.loss_scale == 2.0**14).all()
    np.testing.assert_allclose(w, np.broadcast_to(expected(), w.shape), rtol=1e-5)


@pytest.mark.slow
def test_jit_with_sharded_batches():
    mesh = jax.make_mesh((DEVICES,), ("data",))
    tx = loss_scaling(SGD)

    @jax.jit
    def step(w, state, x):
        grads = jax.grad(lambda w: scale_loss(loss_fn(w, x), state))(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.zeros((1, 1))
    w, state = jax.device_put((w, tx.init(w)), NamedSharding(mesh, P()))
    for x in batches():
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        w, state = step(w, state, x)
    check(w, state)
    assert w.sharding.is_fully_replicated and state.loss_scale.is_fully_replicated


@pytest.mark.slow
def test_jit_with_sharded_parameters_and_state():
    mesh = jax.make_mesh((DEVICES,), ("data",))
    tx = loss_scaling(optax.adam(0.1))
    w = jnp.ones((DEVICES, 2))
    sharding = NamedSharding(mesh, P("data"))
    with jax.numpy_dtype_promotion("standard"):
        state = tx.init(jax.device_put(w, sharding))
        grads = jax.device_put(w.at[3, 0].set(jnp.nan), sharding)
        updates, after = jax.jit(tx.update)(grads, state, w)
    np.testing.assert_array_equal(updates, 0.0)
    assert after.skipped_steps == 1
    assert updates.sharding.is_equivalent_to(sharding, updates.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_shard_map(check_vma, reduced):
    """Gradients that are summed before the update, and ones that stay apart."""
    mesh = jax.make_mesh(
        (DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    tx = loss_scaling(SGD, axis_name="data")
    spec = P() if reduced else P("data")

    def local_step(w, state, x):
        scaled = functools.partial(
            lambda w, x: scale_loss(loss_fn(w[:1], x), state), x=x
        )
        if not check_vma or not reduced:
            grads = jax.grad(scaled)(w)
            if reduced:
                grads = jax.lax.pmean(grads, "data")
        else:  # a replicated parameter's gradient is summed by JAX
            grads = jax.grad(scaled)(w) / DEVICES
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.zeros((1 if reduced else DEVICES, 1))
    state = tx.init(w)
    specs = jax.tree.map(lambda x: P(), state)._replace(
        inner_state=jax.tree.map(lambda x: spec, state.inner_state)
    )
    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(spec, specs, P("data")),
            out_specs=(spec, specs),
            check_vma=check_vma,
        )
    )
    momentum = []
    for x in batches():
        w, state = step(w, state, x)
        momentum.append(jax.tree.leaves(state.inner_state)[0])
    assert state.skipped_steps == 1 and state.loss_scale == 2.0**14
    assert np.isfinite(w).all()
    np.testing.assert_array_equal(momentum[1], momentum[0])
    if reduced:
        check(w, state)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_misspelt_axis_is_named(check_vma):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = loss_scaling(SGD, axis_name="dta")
    w = jnp.ones(8)
    update = jax.shard_map(
        lambda w, s: tx.update(w, s, w),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match="expected axis_name='dta' to be an axis"):
        jax.jit(update)(w, tx.init(w))


@pytest.mark.parametrize("placed", [True, False])
def test_a_state_takes_the_placement_of_its_update(placed):
    """Along explicit axes, as without loss scaling."""
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=kind)
    tx = loss_scaling(optax.sgd(0.1, momentum=0.9))
    w = jnp.ones((8, 4))
    rows = jax.device_put(w, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        state = tx.init(rows if placed else w)
        updates, state = jax.jit(tx.update)(rows, state, rows)
        (momentum,) = jax.tree.leaves(state.inner_state)
        assert jax.typeof(updates).sharding == jax.typeof(rows).sharding
        assert jax.typeof(momentum).sharding == jax.typeof(rows).sharding


@pytest.mark.slow
def test_shard_map_without_axis_name_would_diverge():
    """What axis_name is for: the members' verdicts differ."""
    mesh = jax.make_mesh((DEVICES,), ("data",))

    def finite(axis_name, g):
        tx = loss_scaling(optax.sgd(1.0), axis_name=axis_name)
        _, state = tx.update(g[0], tx.init(g[0]))
        return state.last_step_finite[None]

    grads = jnp.ones(DEVICES).at[5].set(jnp.nan)
    grads = jax.device_put(grads, NamedSharding(mesh, P("data")))
    for name, want in ((None, DEVICES - 1), ("data", 0), (("data",), 0)):
        run = jax.shard_map(
            functools.partial(finite, name),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,
        )
        assert run(grads).sum() == want


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pmap():
    tx = loss_scaling(SGD, axis_name="data")

    @functools.partial(jax.pmap, axis_name="data")
    def step(w, state, x):
        grads = jax.grad(lambda w: scale_loss(loss_fn(w, x), state))(w)
        updates, state = tx.update(jax.lax.pmean(grads, "data"), state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.zeros((1, 1))
    w, state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (DEVICES, *x.shape)), (w, tx.init(w))
    )
    for x in batches():
        w, state = step(w, state, x[:, None])
    check(w, state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pmap_of_gradients_that_differ():
    tx = loss_scaling(optax.sgd(1.0), axis_name="data")
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), tx.init(1.0))
    grads = jnp.full(8, 2.0**15).at[2].set(jnp.inf)
    update = jax.pmap(tx.update, axis_name="data")
    updates, state = update(grads, state)
    np.testing.assert_array_equal(updates, 0.0)
    np.testing.assert_array_equal(state.loss_scale, 2.0**14)
    kept = jax.pmap(where_applied)(state, grads, jnp.arange(8.0))
    np.testing.assert_array_equal(kept, np.arange(8.0))


def test_an_axis_that_is_not_mapped():
    tx = loss_scaling(optax.sgd(1.0), axis_name="data")
    with pytest.raises(ValueError, match="expected axis_name='data' to be an axis"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


WORKER = """
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import NamedSharding, PartitionSpec as P
    from jmp_rewrite import loss_scaling, scale_loss

    rank, address = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, rank, initialization_timeout=60)
    mesh = jax.make_mesh((2,), ("data",))
    tx = loss_scaling(optax.sgd(0.125, momentum=0.5))

    @jax.jit
    def step(w, state, x):
        def loss(w):
            return scale_loss(jnp.mean((x * w - 1.0) ** 2), state)
        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    replicated = NamedSharding(mesh, P())
    w, state = jax.jit(
        lambda: (jnp.float32(0), tx.init(jnp.float32(0))), out_shardings=replicated
    )()
    for i in range(4):
        bad = i == 1 and rank == 1  # an overflow that only one process sees
        local = np.full(3, np.inf if bad else 0.5 + rank, np.float32)
        x = jax.make_array_from_process_local_data(
            NamedSharding(mesh, P("data")), local, (6,)
        )
        w, state = step(w, state, x)
        row = [np.asarray(v.addressable_data(0)).item() for v in (w, *state[:5])]
        print("step", i, *row, flush=True)
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Gloo on localhost: both processes skip the step that one of them overflowed."""
    rows = two_processes(tmp_path, WORKER, 1)
    print(*rows, sep="\n")
    assert len(rows) == 4
    steps = [row.split()[2:] for row in rows]
    assert [s[1] for s in steps] == ["32768.0", "16384.0", "16384.0", "16384.0"]
    assert [s[-1] for s in steps] == ["True", "False", "True", "True"]
    assert steps[1][0] == steps[0][0] != steps[2][0]
