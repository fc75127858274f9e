"""Sums of products over a scan's iterations, as one product behind the loop.

Judged on the rewritten jaxpr, on numbers that half holds exactly, and against float64.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, HALF, eqns, relative_error, trace
from jax import lax
from programs import normal, weights

from jmp_rewrite import diagnose, explain, mixed_precision, use_passes

T, B, D, H = 12, 4, 8, 16  # iterations, rows, features, hidden units
POLICIES = sorted(HALF)


def train(loss):
    """Returns an SGD step."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    return step


def elman(params, h, x):
    """A cell whose gates are one product of its input and one of its state."""
    h = jnp.tanh(x @ params["in"] + h @ params["state"] + params["bias"][None])
    return h, h


def gated(params, h, x):
    """A cell that concatenates its input and its state, as Haiku's do."""
    z = jnp.concatenate([x, h], -1) @ params["both"] + params["bias"][None]
    a, g = jnp.split(z, 2, -1)
    h = jax.nn.sigmoid(g) * jnp.tanh(a) + jax.nn.sigmoid(-g) * h
    return h, h


def einsum(params, h, x):
    """A cell whose products have a batch dimension: heads of their own."""
    heads = h.reshape(B, 4, H // 4)
    state = jnp.einsum("bnh,nhk->bnk", heads, params["heads"]).reshape(B, H)
    h = jnp.tanh(x @ params["in"] + state)
    return h, h


CELLS = {"elman": elman, "gated": gated, "einsum": einsum}


def parameters():
    names = {"in": (D, H), "state": (H, H), "both": (D + H, 2 * H), "out": (H, 3)}
    names["embed"] = (D, D)
    made = dict(zip(names, weights(*names.values()), strict=True))
    return made | {"heads": normal(4, H // 4, H // 4) / 2}


def params_of(cell):
    both = {"elman": ("in", "state"), "gated": ("both",), "einsum": ("in", "heads")}
    chosen = {k: parameters()[k] for k in (*both[cell], "embed", "out")}
    size = 2 * H if cell == "gated" else H
    return chosen | ({} if cell == "einsum" else {"bias": normal(size) / 4})


def recurrent(cell, reverse=False, unroll=1):
    """Returns a step of a recurrent network, and its arguments."""

    def loss(params, xs, y):
        xs = jnp.tanh(xs @ params["embed"])
        body = functools.partial(CELLS[cell], params)
        start = jnp.zeros((B, H))
        h, hs = lax.scan(body, start, xs, reverse=reverse, unroll=unroll)
        return jnp.square((hs + h[None]) @ params["out"] - y).mean()

    return train(loss), params_of(cell), normal(T, B, D), normal(T, B, 3)


def carried(jaxpr, carries):
    """Returns the shapes of what all scans carry from iteration to iteration."""
    scans = eqns(jaxpr, "scan")
    return [v.aval.shape for e in scans for v in e.outvars[: carries(e)]]


def num_carry(eqn):
    """Returns how many results of a scan are not stacked."""
    inside = [v.aval.shape for v in eqn.params["jaxpr"].jaxpr.outvars]
    outside = [v.aval.shape for v in eqn.outvars]
    return sum(a == b for a, b in zip(inside, outside, strict=True))


def summed_in_loops(step, *args, policy="mixed_bfloat16"):
    """Returns how many carries of the rewritten program have a weight's shape."""
    jaxpr = trace(mixed_precision(step, policy), *args)
    shapes = {np.shape(x) for x in jax.tree.leaves(args[0]) if np.ndim(x) > 1}
    return sum(s in shapes for s in carried(jaxpr, num_carry))


# Behind a loop a CPU reads what is stacked, inside what was not rounded yet.
AS_ROUNDED = "-read_before_rounding"


@pytest.fixture
def in_loops():
    """Runs a program with its sums where they were: in the loops."""

    def run(fun, *args):
        with use_passes(f"-sums_behind_loops,{AS_ROUNDED}"):
            return fun(*args)

    return run


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize(
    ("cell", "reverse", "policy"),
    [
        ("elman", False, "mixed_float16"),
        ("elman", True, "mixed_bfloat16"),
        ("gated", False, "mixed_bfloat16"),
        ("einsum", False, "mixed_bfloat16"),
    ],
)
def test_gradients_of_weights_leave_the_loop(cell, reverse, policy, in_loops):
    step, params, *batch = recurrent(cell, reverse)
    assert summed_in_loops(step, params, *batch, policy=policy) == 0
    with jax.enable_x64(True):
        exact = jax.jit(step)(*_as_float64((params, *batch)))
    with use_passes(AS_ROUNDED):
        found = jax.jit(mixed_precision(step, policy))(params, *batch)
        before = in_loops(jax.jit(mixed_precision(step, policy)), params, *batch)
    # What is summed is the same, in another order.
    assert relative_error(_less(found, params), _less(before, params)) < 1e-5
    change, as_before = (
        relative_error(_less(x, params), _less(exact, params)) for x in (found, before)
    )
    assert change < min(1.01 * as_before, 16 * EPS[policy])


@pytest.mark.slow
def test_the_loops_of_the_tests_have_sums(in_loops):
    for cell in CELLS:
        step, params, *batch = recurrent(cell)
        count = in_loops(summed_in_loops, step, params, *batch)
        assert count == (1 if cell == "gated" else 2)


def _as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _less(result, params):
    return jax.tree.map(
        lambda x, w: np.asarray(x, np.float64) - np.asarray(w), result[0], params
    )


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("cell", ["OptimizedLSTMCell", "LSTMCell", "GRUCell"])
def test_cells_of_flax(cell, in_loops):
    model = nn.RNN(getattr(nn, cell)(H))
    xs, y = normal(B, T, D), normal(B, T, H)
    params = model.init(jax.random.key(0), xs)

    def loss(params, xs, y):
        return jnp.square(model.apply(params, xs) - y).mean()

    step = train(loss)
    assert summed_in_loops(step, params, xs, y) == 0
    _is_the_same(step, (params, xs, y), in_loops)


def _is_the_same(step, args, in_loops, policy="mixed_bfloat16"):
    """Asserts that only the order of summation changes."""
    with use_passes(AS_ROUNDED):
        found = jax.jit(mixed_precision(step, policy))(*args)
        before = in_loops(jax.jit(mixed_precision(step, policy)), *args)
    assert relative_error(found, before) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_whole_numbers_add_up_exactly(policy):
    """In half 2048 + 1 is 2048, and 256 + 1 is 256."""
    iterations = 3000

    def loss(w, xs):
        _, ys = lax.scan(lambda c, x: (c, x @ w), 0.0, xs)
        _, zs = lax.scan(lambda h, x: (h @ w, h + x), jnp.zeros((1, 1)), ys)
        return zs.sum()

    step = train(loss)
    w, xs = jnp.ones((1, 1)), jnp.ones((iterations, 1, 1))
    found = jax.jit(mixed_precision(step, policy))(w, xs)
    assert found[0] == jax.jit(step)(w, xs)[0]


@pytest.mark.slow
def test_the_initial_value_is_added():
    """A sum that the user wrote, of products that a loop makes."""
    (w,) = weights((D, H))
    xs, ys, start = normal(T, B, D), normal(T, B, H), normal(D, H)

    def step(w, start, xs, ys):
        def covariance(c, slices):
            x, y = slices
            return c + 2 * x.T @ y, None

        c, _ = lax.scan(covariance, start, (xs, ys))
        grad = jax.grad(lambda w: jnp.square(xs[0] @ w).sum())(w)
        return w - grad, c

    found = mixed_precision(step, "mixed_bfloat16")(w, start, xs, ys)
    exact = start + np.einsum("tbi,tbj->ij", 2 * xs, ys)
    assert relative_error(found[1], exact) < EPS["mixed_bfloat16"]


def accumulated(params, xs, y):
    """Sums gradients over microbatches, of more activations than there are inputs."""

    def loss(params, x, y):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.square(x @ params["out"] - y).mean()

    def microbatch(grads, slices):
        new = jax.grad(loss)(params, *slices)
        return jax.tree.map(jnp.add, grads, new), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, _ = lax.scan(microbatch, zeros, (xs, y))
    return jax.tree.map(lambda w, g: w - g, params, grads)


def test_activations_of_microbatches_are_not_stacked():
    """They fit memory one microbatch at a time, which is why there are any."""
    first, *layers, out = weights((D, 64), *[(64, 64)] * 3, (64, 3))
    params = {"layers": [first, *layers], "out": out}
    args = params, normal(T, B, D), normal(T, B, 3)
    # All gradients are carried, and the weights' slices are no carries.
    assert summed_in_loops(accumulated, *args) == 5


@pytest.mark.slow
def test_a_sum_that_costs_less_than_its_operands_stays():
    """Of 4 kB a row, many rows are more bytes than the sum of their products."""
    params = {"in": weights((D, H))[0], "state": weights((H, H))[0]}

    def loss(params, xs):
        def cell(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["state"])
            return h, h

        return lax.scan(cell, jnp.zeros((xs.shape[1], H)), xs)[1].mean()

    few, many = normal(T, 4, D), normal(T, 8 * H, D)
    assert summed_in_loops(train(loss), params, few) == 0
    assert summed_in_loops(train(loss), params, many) == 2


def read_by_another(c, x, w):
    return c + x.T @ (x @ w), (c * 2.0).sum()


def product_is_returned(c, x, w):
    p = x.T @ (x @ w)
    return c + p, p.sum()


def not_linear(c, x, w):
    return c + jnp.tanh(x.T @ (x @ w)), x.sum()


def scaled_by_itself(c, x, w):
    return 0.9 * c + x.T @ (x @ w), x.sum()


def twice_itself(c, x, w):
    return c + c + x.T @ (x @ w), x.sum()


def of_a_constant(c, x, w):
    return c + w.T @ x.T, x.sum()


def handed_on_twice(c, x, w):
    c = c + x.T @ (x @ w)
    return c, c


NO_SUMS = [
    read_by_another,
    product_is_returned,
    not_linear,
    scaled_by_itself,
    twice_itself,
    of_a_constant,
    handed_on_twice,
]


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("body", NO_SUMS)
def test_carries_that_are_no_plain_sums_stay(body):
    def step(w, xs):
        size = D if body is not of_a_constant else H
        start = jnp.zeros((size, xs.shape[1] if body is of_a_constant else H))
        c, ys = lax.scan(lambda c, x: body(c, x, w), start, xs)
        grad = jax.grad(lambda w: jnp.square(xs[0] @ w).sum())(w)
        return w - grad, c, ys

    (w,), xs = weights((D, H)), normal(T, 2, D)
    rewritten = mixed_precision(step, "mixed_bfloat16")
    plain = jax.jit(step)(w, xs)
    assert relative_error(jax.jit(rewritten)(w, xs), plain) < 4 * EPS["mixed_bfloat16"]
    jaxprs = [trace(f, w, xs) for f in (step, rewritten)]
    assert carried(jaxprs[0], num_carry) == carried(jaxprs[1], num_carry)


@pytest.mark.slow
def test_a_sum_that_another_sum_reads_stays(in_loops):
    """A covariance that is used as it grows, as fast weights are."""
    (w,) = weights((H, H))
    xs, zs = normal(6, 2, H), normal(6, H, 256)

    def step(w, xs, zs):
        def body(sums, slices):
            x, z = slices
            covariance = sums[0] + x.T @ (x @ w)
            return (covariance, sums[1] + covariance @ z), None

        start = jnp.zeros((H, H)), jnp.zeros((H, 256))
        sums, _ = lax.scan(body, start, (xs, zs))
        return w - jax.grad(lambda w: jnp.square(xs[0] @ w).sum())(w), sums

    _is_the_same(step, (w, xs, zs), in_loops)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), w, xs, zs)
    assert carried(jaxpr, num_carry)[0] == (H, H)


@pytest.mark.slow
def test_products_with_batch_dimensions_last(in_loops):
    """They contract the first dimensions, and count rows in one behind these."""

    def loss(w, xs):
        def cell(h, x):
            h = jnp.tanh(jnp.einsum("ran,rnm->ram", x, w) + h)
            return h, h

        return lax.scan(cell, jnp.zeros((2, B, H)), xs)[1].mean()

    (w,), xs = weights((2, D, H)), normal(T, 2, B, D)
    _is_the_same(train(loss), (w, xs), in_loops)

    def step(w, xs):
        def body(c, x):
            return c + jnp.einsum("iar,ibr->rab", x, jnp.tanh(x)), None

        c, _ = lax.scan(body, jnp.zeros((B, D, D)), xs)
        return w - jax.grad(lambda w: jnp.square(xs[0, :, :, 0] @ w).sum())(w), c

    (w,), xs = weights((D, H)), normal(T, 2, D, B)
    _is_the_same(step, (w, xs), in_loops)


@pytest.mark.slow
def test_a_sum_of_several_products(in_loops):
    """A weight that a cell uses twice, one of them transposed, with a sign."""
    (w,) = weights((H, H))

    def loss(w, xs):
        def cell(h, x):
            h = jnp.tanh(h @ w - (x @ w.T)[:, ::-1])
            return h, h

        return lax.scan(cell, jnp.zeros((B, H)), xs)[1].mean()

    xs = normal(T, B, H)
    step = train(loss)
    assert summed_in_loops(step, w, xs) == 0
    _is_the_same(step, (w, xs), in_loops)


@pytest.mark.slow
def test_inside_an_epoch(in_loops):
    """A loop over steps, which hold loops over time, is a loop in a loop."""
    step, params, xs, y = recurrent("elman")

    def epoch(params, xs, y):
        return lax.scan(lambda p, batch: step(p, *batch), params, (xs, y))

    batches = jnp.stack([xs, xs + 0.1, xs - 0.1]), jnp.stack([y, y, y])
    _is_the_same(epoch, (params, *batches), in_loops)
    jaxpr = trace(mixed_precision(epoch, "mixed_bfloat16"), params, *batches)
    (outer,) = eqns(jaxpr, "scan")[:1]
    inner = [num_carry(e) for e in eqns(outer.params["jaxpr"], "scan")]
    assert inner == [1, 2]  # the state; its cotangent, and a bias' float32 sum


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("wrap", ["vmap", "checkpoint", "jit", "unroll"])
def test_with_other_transformations(wrap, in_loops):
    step, params, xs, y = recurrent("gated", unroll=4 if wrap == "unroll" else 1)
    if wrap == "vmap":
        xs, y = jnp.stack([xs, -xs]), jnp.stack([y, y])
        step = jax.vmap(step, (None, 0, 0))
    elif wrap == "checkpoint":
        step = train(jax.checkpoint(_loss_of_gated))
    elif wrap == "jit":
        step = jax.jit(step)
    _is_the_same(step, (params, xs, y), in_loops)


@pytest.mark.slow
def test_a_rewritten_step_is_mapped():
    step, params, xs, y = recurrent("elman")
    params = jax.tree.map(lambda w: w / 4, params)  # or roundings grow in time
    rewritten = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    both = jax.vmap(rewritten, (None, 0, 0))(
        params, jnp.stack([xs, -xs]), jnp.stack([y, y])
    )
    for i, x in enumerate((xs, -xs)):
        one = rewritten(params, x, y)
        same = jax.tree.map(lambda leaf, i=i: leaf[i], both)
        assert relative_error(same, one) < EPS["mixed_bfloat16"]


def _loss_of_gated(params, xs, y):
    body = functools.partial(gated, params)
    hs = lax.scan(body, jnp.zeros((B, H)), jnp.tanh(xs @ params["embed"]))[1]
    return jnp.square(hs @ params["out"] - y).mean()


@pytest.mark.slow
def test_reports_count_equations_behind_the_loop_once():
    step, params, *batch = recurrent("elman")
    report = explain(step, "mixed_bfloat16")(params, *batch)
    plain = explain(step, "float32")(params, *batch)
    assert report.flops == plain.flops
    behind = [e for e in report.equations if e.flops and e.trips == 1]
    # The embedding and the head with their gradients, two weights, and the inputs.
    assert len(behind) == 2 * 2 + 1 + 3


@pytest.mark.slow
def test_diagnose_runs_it():
    step, params, *batch = recurrent("gated")
    diagnosis = diagnose(step, "mixed_bfloat16")(params, *batch)
    assert max(diagnosis.results.values()) < diagnosis.tolerance
