"""Many devices: JAX's shardings are kept, weights are gathered in half.

XLA:CPU has no bfloat16 collectives and widens them, so sizes are asserted in float16;
`benchmarks/collectives.py` shows both in the text compiled for TPUs.
"""

import functools
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    EPS,
    arrays,
    choices,
    dtypes_in,
    products,
    relative_error,
    trace,
    two_processes,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_rewrite import (
    loss_scale_state,
    loss_scaling,
    mixed_precision,
    scale_loss,
    use_passes,
)

DEVICES, WIDTH, ROWS, LAYERS = 8, 64, 32, 3
F16 = "mixed_float16"
TX = optax.adam(1e-2)


@functools.cache
def mesh(*shape, kind=AxisType.Auto):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def numbers(*shape, seed=0, scale=1.0):
    return np.random.RandomState(seed).randn(*shape).astype("f4") * scale


def params_and_batch():
    params = [
        {"w": numbers(WIDTH, WIDTH, seed=i, scale=0.2), "b": np.zeros(WIDTH, "f4")}
        for i in range(LAYERS)
    ]
    return params, numbers(ROWS, WIDTH, seed=8), numbers(ROWS, WIDTH, seed=9)


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def net(params, x):
    for p in params:
        x = layer(p, x)
    return x


def update(params, opt_state, grads):
    with jax.numpy_dtype_promotion("standard"):  # of counters, inside optax
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def train_step(net=net):
    def step(params, opt_state, x, y):
        loss = lambda p: jnp.mean((net(p, x) - y) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        return *update(params, opt_state, grads), value

    return step


# ---- placements: how parameters lie, and how activations do


def placed(tree, on, spec_of):
    place = lambda x: jax.device_put(x, NamedSharding(on, spec_of(x)))  # noqa: E731
    return jax.tree.map(place, tree)


def constrained(net_layer, on, spec):
    def run(params, x):
        for p in params:
            x = lax.with_sharding_constraint(net_layer(p, x), NamedSharding(on, spec))
        return x

    return run


def matrices(spec):
    return lambda x: spec if jnp.ndim(x) == 2 else P()


def data_parallel():
    on = mesh(DEVICES)
    return on, constrained(layer, on, P("data")), lambda x: P(), P("data")


def fsdp():
    on = mesh(DEVICES)
    return on, constrained(layer, on, P("data")), matrices(P("data")), P("data")


def fsdp_of_the_other_dimension():
    on = mesh(DEVICES)
    spec = matrices(P(None, "data"))
    return on, constrained(layer, on, P("data")), spec, P("data")


def fsdp_with_checkpoints():
    on = mesh(DEVICES)
    run = constrained(jax.checkpoint(layer), on, P("data"))
    return on, run, matrices(P("data")), P("data")


def fsdp_gathered_by_the_user():
    """The weight is constrained to be whole: jax-ml/jax#23543."""
    on = mesh(DEVICES)

    def gathering(p, x):
        w = lax.with_sharding_constraint(p["w"], NamedSharding(on, P()))
        return layer({"w": w, "b": p["b"]}, x)

    return on, constrained(gathering, on, P("data")), matrices(P("data")), P("data")


def fsdp_transposed_by_the_user():
    on = mesh(DEVICES)

    def gathering(p, x):
        w = lax.with_sharding_constraint(p["w"].T, NamedSharding(on, P()))
        return layer({"w": w.T, "b": p["b"]}, x)

    return on, constrained(gathering, on, P("data")), matrices(P("data")), P("data")


def tensor_parallel():
    on = mesh(2, 4)
    return on, net, matrices(P(None, "model")), P("data")


def fsdp_and_tensor_parallel():
    on = mesh(4, 2)
    run = constrained(layer, on, P("data", "model"))
    return on, run, matrices(P("data", "model")), P("data")


FSDP = [
    fsdp,
    fsdp_of_the_other_dimension,
    fsdp_with_checkpoints,
    fsdp_gathered_by_the_user,
    fsdp_transposed_by_the_user,
]
LAYOUTS = [data_parallel, *FSDP, tensor_parallel, fsdp_and_tensor_parallel]


def arguments(layout):
    on, run, spec_of, rows = layout()
    params, x, y = params_and_batch()
    params = placed(params, on, spec_of)
    opt_state = placed(TX.init(params), on, spec_of)
    x, y = placed((x, y), on, lambda _: rows)
    return run, (params, opt_state, x, y)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def compiled(step, args):
    """Compiles a step whose new state lies as the old one."""
    out = (*shardings(args[:2]), None)
    return jax.jit(step, out_shardings=out).lower(*args).compile()


@functools.cache
def on_one_device(policy):
    params, x, y = params_and_batch()
    step = jax.jit(mixed_precision(train_step(), policy))
    return step(params, TX.init(params), x, y)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """The same step on eight devices: values, shardings, sizes of collectives."""
    run, args = arguments(layout)
    texts = {}
    for policy in ("float32", F16):
        step = compiled(mixed_precision(train_step(run), policy), args)
        params, opt_state, loss = step(*args)
        exact = on_one_device("float32")
        limit = 1e-5 if policy == "float32" else 32 * EPS[F16]
        assert relative_error(loss, exact[2]) < limit
        # Adam divides by the gradient's size: its first step is the sign of it.
        assert relative_error(opt_state[0].mu, exact[1][0].mu) < limit
        for before, after in zip(
            arrays(args[:2]), arrays((params, opt_state)), strict=True
        ):
            assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
            assert after.dtype == before.dtype
        texts[policy] = step.as_text()
    gathered = {p: gathered_bytes(t) for p, t in texts.items()}
    if layout in FSDP:
        times = 2 if layout is fsdp_with_checkpoints else 1
        assert gathered["float32"] == times * LAYERS * 4 * WIDTH * WIDTH
        assert gathered[F16] == gathered["float32"] / 2
    # Gradients of weights are reduced in float32.
    sizes = {WIDTH * WIDTH, WIDTH * WIDTH // DEVICES, WIDTH}
    for kind, dtype, size in collectives(texts[F16]):
        if kind in ("all-reduce", "reduce-scatter") and size in sizes:
            assert dtype == "f32" or layout in (
                tensor_parallel,  # activations are reduced, in half
                fsdp_and_tensor_parallel,
            )


def collectives(text):
    """Returns (kind, dtype, number of elements) of what a program communicates."""
    pattern = r"= (.*?) (all-gather|all-reduce|reduce-scatter)(?:-start)?\("
    found = []
    for shapes, kind in re.findall(pattern, text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = math.prod(int(d) for d in dims.split(",") if d)
            found.append((kind, dtype, size))
    return found


def gathered_bytes(text):
    width = {"f32": 4, "f16": 2}
    return sum(
        width[dtype] * size
        for kind, dtype, size in collectives(text)
        if kind == "all-gather" and size == WIDTH * WIDTH
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [fsdp, fsdp_gathered_by_the_user])
@pytest.mark.parametrize("scan", [False, True])
def test_gradients_from_outside_gather_half(layout, scan):
    """`grad` of a decorated loss: weights are cast before they are gathered, too."""
    on, run, spec_of, rows = layout()
    params, x, y = params_and_batch()
    if scan:
        one = run
        params = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
        run = lambda p, x: lax.scan(  # noqa: E731
            lambda x, p: (one([p], x), None), x, p
        )[0]
        spec_of = lambda x: P(None, "data") if jnp.ndim(x) == 3 else P()  # noqa: E731
    params = placed(params, on, spec_of)
    x, y = placed((x, y), on, lambda _: rows)
    loss = lambda p, x, y: jnp.mean((run(p, x) - y) ** 2)  # noqa: E731
    found = {}
    for policy in ("float32", F16):
        grad = jax.grad(mixed_precision(loss, policy))
        text = jax.jit(grad, out_shardings=shardings(params)).lower(params, x, y)
        found[policy] = gathered_bytes(text.compile().as_text())
    assert found["float32"] >= (1 if scan else LAYERS) * 4 * WIDTH * WIDTH
    assert found[F16] == found["float32"] / 2


@pytest.mark.slow
def test_reduction_of_gradients():
    """In a whole step gradients meet in float32; from outside they meet in half.

    Both against float64. The difference is what eight roundings more cost.
    """
    on, run, spec_of, rows = fsdp()
    params, x, y = params_and_batch()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype("f8"), (params, x, y))
        exact = jax.grad(lambda p, x, y: jnp.mean((net(p, x) - y) ** 2))(*wide)
        exact = jax.tree.map(np.asarray, exact)
    params = placed(params, on, spec_of)
    x, y = placed((x, y), on, lambda _: rows)

    def loss(p, x, y):
        return 1024 * jnp.mean((run(p, x) - y) ** 2)

    errors = {}
    for name, grad in (
        ("inside", mixed_precision(jax.grad(loss), F16)),
        ("outside", jax.grad(mixed_precision(loss, F16))),
    ):
        found = jax.jit(grad, out_shardings=shardings(params)).lower(params, x, y)
        found = found.compile()
        kinds = {
            dtype
            for kind, dtype, size in collectives(found.as_text())
            if kind != "all-gather" and size == WIDTH * WIDTH
        }
        assert kinds == ({"f32"} if name == "inside" else {"f16"})
        grads = jax.tree.map(lambda g: np.asarray(g, "f8") / 1024, found(params, x, y))
        errors[name] = relative_error(grads, exact)
    assert errors["inside"] < errors["outside"] < 4 * EPS[F16]


@pytest.mark.slow
def test_explicit_sharding():
    """Sharding in types: the types are the same ones."""
    on = mesh(DEVICES, kind=AxisType.Explicit)
    params, x, y = params_and_batch()

    def run(params, x):
        for p in params:
            w = jax.sharding.reshard(p["w"], P(None, None))
            x = jnp.tanh(x @ w + p["b"][None])
        return x

    params = placed(params, on, matrices(P("data")))
    opt_state = TX.init(params)
    x, y = placed((x, y), on, lambda _: P("data"))
    with jax.set_mesh(on):
        plain = jax.eval_shape(train_step(run), params, opt_state, x, y)
        half = mixed_precision(train_step(run), F16)
        assert jax.tree.map(typeof, jax.eval_shape(half, params, opt_state, x, y)) == (
            jax.tree.map(typeof, plain)
        )
        step = jax.jit(half)
        text = step.lower(params, opt_state, x, y).compile().as_text()
        new, opt_state, loss = step(params, opt_state, x, y)
    assert jax.tree.map(typeof, new) == jax.tree.map(typeof, params)
    assert gathered_bytes(text) == LAYERS * 2 * WIDTH * WIDTH
    assert relative_error(loss, on_one_device("float32")[2]) < 32 * EPS[F16]


def typeof(x):
    if isinstance(x, jax.Array):
        x = jax.typeof(x)
    return x.shape, x.dtype, x.sharding.spec


@pytest.mark.slow
def test_shard_map():
    """FSDP by hand: weights are gathered in half, gradients scattered in float32."""
    on = mesh(DEVICES)

    def local(params, opt_state, x, y):
        def loss(params):
            h = x
            for p in params:
                w = lax.all_gather(p["w"], "data", axis=0, tiled=True)
                h = jnp.tanh(h @ w + p["b"][None])
            return jnp.sum((h - y) ** 2) / (ROWS * WIDTH)

        value, grads = jax.value_and_grad(loss)(params)
        for g in grads:
            g["b"] = lax.psum(g["b"], "data")
        return *update(params, opt_state, grads), lax.psum(value, "data")

    params, x, y = params_and_batch()
    opt_state = TX.init(params)
    specs = jax.tree.map(matrices(P("data")), (params, opt_state))
    step = jax.shard_map(
        local,
        mesh=on,
        in_specs=(*specs, P("data"), P("data")),
        out_specs=(*specs, P()),
        check_vma=False,
    )
    half = jax.jit(mixed_precision(step, F16)).lower(params, opt_state, x, y).compile()
    new, new_state, loss = half(params, opt_state, x, y)
    exact = on_one_device("float32")
    assert relative_error(loss, exact[2]) < 32 * EPS[F16]
    assert relative_error(new_state[0].mu, exact[1][0].mu) < 32 * EPS[F16]
    kinds = {(k, d) for k, d, n in collectives(half.as_text()) if n != WIDTH and n > 1}
    assert ("all-gather", "f16") in kinds and ("reduce-scatter", "f32") in kinds
    assert not {("all-gather", "f32"), ("reduce-scatter", "f16")} & kinds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_pmap(inside):
    def local(params, opt_state, x, y):
        loss = lambda p: jnp.mean((net(p, x) - y) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        grads, value = lax.pmean((grads, value), "data")
        return *update(params, opt_state, grads), value

    params, x, y = params_and_batch()
    rows = lambda a: a.reshape(DEVICES, -1, WIDTH)  # noqa: E731
    args = params, TX.init(params), rows(x), rows(y)
    over = {"axis_name": "data", "in_axes": (None, None, 0, 0)}
    if inside:
        step = jax.pmap(mixed_precision(local, F16), **over)
    else:
        step = mixed_precision(jax.pmap(local, **over), F16)
    _, opt_state, loss = step(*args)
    first = jax.tree.map(lambda a: a[0], (opt_state, loss))
    exact = on_one_device("float32")
    assert relative_error(first[1], exact[2]) < 32 * EPS[F16]
    assert relative_error(first[0][0].mu, exact[1][0].mu) < 32 * EPS[F16]


def test_products_inside_pmap_are_half():
    run = jax.pmap(lambda x, w: jnp.tanh(x @ w) @ w, in_axes=(0, None))
    x, w = numbers(DEVICES, 2, WIDTH), numbers(WIDTH, WIDTH)
    found = products(trace(mixed_precision(run, F16), x, w))
    assert [dtypes_in(e) for e in found] == [["float16"] * 2] * 2


# ---- donation, memory kinds


@pytest.mark.slow
def test_donation_is_kept():
    """Every buffer of the state is used again, as in the original program."""
    run, args = arguments(fsdp)
    out = (*shardings(args[:2]), None)
    aliases = []
    for policy in ("float32", F16):
        half = mixed_precision(train_step(run), policy)
        step = jax.jit(half, donate_argnums=(0, 1), out_shardings=out)
        text = step.lower(*args).compile().as_text()
        aliases.append(re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1])
    assert aliases[0] == aliases[1]
    assert aliases[0].count("may-alias") + aliases[0].count("must-alias") == len(
        arrays(args[:2])
    )
    step(*args)
    assert all(x.is_deleted() for x in arrays(args[:2]))


@pytest.mark.slow
def test_memory_kinds_are_kept():
    """Optimizer state on the host goes to the device and back, in float32."""
    on = mesh(DEVICES)
    host = NamedSharding(on, P("data"), memory_kind="pinned_host")
    device = NamedSharding(on, P("data"))
    w = jax.device_put(numbers(WIDTH, WIDTH), device)
    m = jax.device_put(numbers(WIDTH, WIDTH, seed=1), host)
    x = jax.device_put(numbers(ROWS, WIDTH), device)

    def step(w, m, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        m = 0.9 * jax.device_put(m, device) + grads
        return w - 0.01 * m, jax.device_put(m, host)

    half = jax.jit(mixed_precision(step, F16), out_shardings=(device, host))
    new_w, new_m = half(w, m, x)
    assert new_m.sharding.memory_kind == "pinned_host" and new_m.dtype == jnp.float32
    assert new_w.sharding.memory_kind == w.sharding.memory_kind
    exact = jax.jit(step, out_shardings=(device, host))(w, m, x)
    assert relative_error((new_w, new_m), exact) < 32 * EPS[F16]


# ---- loss scaling and many processes


def scaled_step(policy, run):
    tx = loss_scaling(TX, init_scale=2.0**10)

    @mixed_precision(policy)
    def step(params, opt_state, x, y):
        def loss_fn(params):
            loss = jnp.mean((run(params, x) - y) ** 2)
            return scale_loss(loss, opt_state)

        value, grads = jax.value_and_grad(loss_fn)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

    return tx, step


@pytest.mark.slow
def test_loss_scaling_of_sharded_parameters():
    """An overflow on one device skips the step on all."""
    on, run, spec_of, rows = fsdp()
    params, x, y = params_and_batch()
    tx, step = scaled_step(F16, run)
    params = placed(params, on, spec_of)
    opt_state = placed(tx.init(params), on, spec_of)
    y[5] = np.inf
    x, y = placed((x, y), on, lambda _: rows)
    new, opt_state, _ = jax.jit(step)(params, opt_state, x, y)
    assert loss_scale_state(opt_state).skipped_steps == 1
    for a, b in zip(arrays(new), arrays(params), strict=True):
        np.testing.assert_array_equal(a, b)


WORKER = """
    import sys
    import jax, numpy as np
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, address, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path.insert(0, tests)
    jax.distributed.initialize(address, 2, rank, initialization_timeout=60)
    assert jax.device_count() == 8 and jax.local_device_count() == 4

    import test_scale_out as t

    on, run, spec_of, rows = t.fsdp()
    params, x, y = t.params_and_batch()
    tx, step = t.scaled_step(t.F16, run)

    def place(a, spec):  # each process holds the whole array and gives its part
        sharding = t.NamedSharding(on, spec)
        return jax.make_array_from_callback(a.shape, sharding, lambda i: a[i])

    x, y = (place(a, rows) for a in (x, y))
    state = jax.device_get((params, tx.init(params)))
    params, opt_state = jax.tree.map(lambda a: place(np.asarray(a), spec_of(a)), state)
    step = jax.jit(step, out_shardings=(*t.shardings((params, opt_state)), None))
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, x, y)
        print("step", float(loss), flush=True)
"""


@pytest.mark.slow
def test_two_processes_of_four_devices(tmp_path):
    """FSDP over two processes on localhost: the losses of one process with eight."""
    rows = two_processes(tmp_path, WORKER, 4, os.path.dirname(__file__))
    assert len(rows) == 3
    np.testing.assert_allclose(
        [float(r.split()[1]) for r in rows], one_process(), rtol=1e-5
    )


def one_process():
    on, run, spec_of, rows = fsdp()
    params, x, y = params_and_batch()
    tx, step = scaled_step(F16, run)
    params = placed(params, on, spec_of)
    opt_state = jax.jit(tx.init)(params)
    x, y = placed((x, y), on, lambda _: rows)
    losses = []
    step = jax.jit(step)
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("device", [None, "NVIDIA GPU", "TPU v5e"])
@pytest.mark.parametrize("how", ["explicit", "shard_map"])
def test_recomputed_values_are_sharded_like_stored_ones(how, device):
    """A GELU, and a softmax of a product: what a backward pass computes again."""
    with use_passes("all", device=device):
        check_what_is_computed_again(how, device)


def check_what_is_computed_again(how, device):

    def step(w, out, x):
        def loss(params):
            w, out = params
            h = jax.nn.gelu(x @ w) @ out
            return jnp.mean(jnp.square(jax.nn.softmax(h @ w) @ w.T - x))

        value, grads = jax.value_and_grad(loss)((w, out))
        if how == "shard_map":
            value, grads = lax.pmean((value, grads), "data")
        return value, *(p - 0.1 * g for p, g in zip((w, out), grads, strict=True))

    args = [numbers(WIDTH, WIDTH, seed=i, scale=0.2) for i in (0, 1)]
    args.append(numbers(ROWS, WIDTH, seed=8))
    half = mixed_precision(step, "mixed_bfloat16")
    if how == "shard_map":
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
        half = jax.shard_map(half, mesh=mesh(DEVICES), **specs)
        step = jax.shard_map(step, mesh=mesh(DEVICES), **specs)
        found, full = jax.jit(half)(*args), jax.jit(step)(*args)
    else:
        on = mesh(DEVICES, kind=AxisType.Explicit)
        args = placed(args, on, lambda x: P("data") if x.shape[0] == ROWS else P())
        with jax.set_mesh(on):
            jaxpr = jax.make_jaxpr(half)(*args)
            assert device or choices(jaxpr, "recompute_activations")
            found, full = jax.jit(half)(*args), jax.jit(step)(*args)
    assert [typeof(x) for x in found] == [typeof(x) for x in full]
    for a, b, before in zip(found[1:], full[1:], args, strict=False):
        assert relative_error(a - before, b - before) < 8 * EPS["mixed_bfloat16"]
