"""The law of accuracy over what all but cancels, behind what moves, picks or guards."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from amplifying import judge, normal
from by_hand import DEVICES
from jax import lax

from jmp_rewrite import explain, mixed_precision, mixed_precision_jaxpr

f32 = np.float32
OFFSET = np.full((32, 6), 300, f32)

# What is done with values in units of their own before the offset is taken off.
MOVED = {
    "stack": lambda y: jnp.stack([y, y[::-1]]),
    "tile": lambda y: jnp.tile(y, (2, 1)),
    "unstack": lambda y: sum(jnp.unstack(y.reshape(4, 8, 6))) / 4,
    "max": lambda y: y.max(0),
    "sort": lambda y: jnp.sort(y, 0),
    "median": lambda y: jnp.median(y, 0),
    "set": lambda y: y.at[0].set(300.0),
    "cummax": lambda y: lax.cummax(y),
    "max_pool": lambda y: lax.reduce_window(
        y, -np.inf, lax.max, (2, 1), (2, 1), "SAME"
    ),
    "segment_max": lambda y: jax.ops.segment_max(y, np.arange(32) // 4, 8),
}

# What is near one, and what counts by its difference from that.
NEAR_ONE = {
    "bounded": lambda a: 1 / jnp.maximum(1 - a, 1e-4),
    "clipped": lambda a: 1 / jnp.clip(1 - a, 1e-4, 1),
    "a negative power": lambda a: (1 - a + 1e-4) ** -1,
    "a share": lambda a: (1 - a) / jnp.sum(1 - a),
    "an angle": lambda a: jnp.arctan2(1 - a, 0.01 * a),
    "a polynomial": lambda a: jnp.sqrt(jnp.polyval(np.array([-1, 0, 1], f32), a)),
    "a logarithm": lambda a: jnp.log2(a),
    "a power": lambda a: jnp.ones_like(a) * a * a * (0.99 * a) * jnp.minimum(a, 9) * -a,
}


def network_args(rng):
    ws = normal(rng, 8, 32, scale=0.5), normal(rng, 32, 6, scale=0.3)
    return (*ws, normal(rng, 6, scale=0.3), normal(rng, 6, 4)), normal(rng, 32, 8)


def without_offset(move):
    def fun(ws, x):
        y = jnp.tanh(x @ ws[0]) @ ws[1] + ws[2] + OFFSET
        return jnp.tanh(move(y) - f32(300)) @ ws[3]

    return fun


def beside_a_layer(function):
    def fun(ws, x):
        a = jax.nn.sigmoid(jnp.tanh(x @ ws[0]) @ ws[1] + ws[2] + 5)
        return a @ ws[3], function(a) @ ws[3]

    return fun


PROGRAMS = {n: without_offset(move) for n, move in MOVED.items()}
PROGRAMS |= {n: beside_a_layer(function) for n, function in NEAR_ONE.items()}


@pytest.mark.breadth(one_in=2)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_cancels_is_read_unrounded(name, policy):
    judged = judge(PROGRAMS[name], network_args)
    rewritten = mixed_precision_jaxpr(judged.closed, policy)
    for verdict in judged.verdicts(policy, "cuda", rewritten):
        assert verdict.holds, verdict


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
def test_a_pool_and_its_derivative_choose_alike(stride):
    """Both compare the values that the other one has compared."""

    def fun(ws, x, mean):
        def loss(ws):
            y = jnp.tanh(x @ ws[0]) @ ws[1] + ws[2] + mean
            window, steps = (4 - stride, 1), (stride, 1)
            y = lax.reduce_window(y, -np.inf, lax.max, window, steps, "SAME")
            return jnp.square(jnp.tanh(y - mean) @ ws[3] - 1).mean()

        return jax.grad(loss)(ws)

    judged = judge(fun, lambda rng: (*network_args(rng), OFFSET[0]))
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", "cuda", rewritten):
        assert verdict.holds, verdict


def free_energy(w, a, b, v):
    return jnp.mean(-v @ a - jnp.sum(jax.nn.softplus(v @ w + b), -1))


def divergence(w, a, b, v):
    """Contrastive divergence, of data and of what is near it."""
    gradient = jax.grad(free_energy, argnums=(0, 1, 2))
    near = v + f32(0.02) * jnp.sin(9 * v)
    return tuple(map(jnp.subtract, gradient(w, a, b, v), gradient(w, a, b, near)))


def phases(w, a, b, h):
    """Gradients of an energy by two states that are arguments."""

    def energy(w, b, h):
        return -jnp.sum(jax.nn.sigmoid(h) * (jnp.tanh(h) @ w + b[: w.shape[1]]))

    gradient = jax.grad(energy, argnums=(0, 1))
    free, clamped = gradient(w, b, h), gradient(w, b, 0.98 * h)
    return tuple(map(jnp.subtract, clamped, free))


def _contrasted(w, a, b, v):
    gradient = jax.grad(free_energy, argnums=(0, 1, 2))
    return gradient(w, a, b, v), gradient(w, a, b, v + f32(0.02) * jnp.sin(9 * v))


def weighted(*args):
    """With the sign in a factor."""
    mix = functools.partial(jax.tree.map, lambda g, h: f32(0.5) * g + f32(-0.5) * h)
    return mix(*_contrasted(*args))


def bounded(*args):
    def clip(gradients):
        return jax.tree.map(lambda g: jnp.clip(g, -f32(1), f32(1)), gradients)

    return jax.tree.map(jnp.subtract, *map(clip, _contrasted(*args)))


def batched(w, a, b, v):
    """Rows of one gradient."""
    gradient = jax.vmap(jax.grad(free_energy, argnums=(0, 1, 2)), (None,) * 3 + (0,))
    both = gradient(w, a, b, jnp.stack([v, v + f32(0.02) * jnp.sin(9 * v)]))
    return jax.tree.map(lambda g: g[0] - g[1], both)


def guarded(*args):
    """Behind what an optimizer does to each: a guard, weight decay, the norm's clip."""

    def updated(gradients):
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
        scale = jnp.minimum(f32(1), 10 / norm)
        is_finite = jnp.isfinite(norm)
        return [
            jnp.where(is_finite, g, 0) * scale + f32(1e-4) * w
            for g, w in zip(gradients, args, strict=False)
        ]

    return [a - b for a, b in zip(*map(updated, _contrasted(*args)), strict=True)]


def trained(w, a, b, v):
    """In each of two steps, one behind the other."""

    def step(ws, _):
        first, second = _contrasted(*ws, v)
        change = jax.tree.map(jnp.subtract, first, second)
        return jax.tree.map(lambda w, c: w - f32(0.1) * c, ws, change), change

    return jax.lax.scan(step, (w, a, b), None, length=2)[1]


def conditioned(*args):
    """Behind what is linear in each: factors, rows, sums, a running one, a product."""

    def of(w, a, b):
        mixed = jnp.cumsum(jnp.linspace(f32(0.5), 1, 64).reshape(8, 8) @ w, 0)
        return mixed, a[jnp.arange(1, 7, 2)].mean(), jnp.roll(b, 1) * (b.size + args[2])

    return jax.tree.map(jnp.subtract, *(of(*g) for g in _contrasted(*args)))


def accumulated(w, a, b, v):
    """Sums over many parts, whose roundings average out."""
    parts = [_contrasted(w, a, b, v * f32(1 + i / 1000)) for i in range(8)]
    sums = [
        functools.reduce(functools.partial(jax.tree.map, jnp.add), g)
        for g in zip(*parts, strict=True)
    ]
    return jax.tree.map(lambda g, h: (g - h) / 8, *sums)


def averaged(w, a, b, v):
    """The same of parts of a batch, in a loop."""

    def mean(v):
        gradients = jax.grad(free_energy, argnums=(0, 1, 2))
        return jax.lax.map(lambda v: gradients(w, a, b, v), v.reshape(4, 8, 8))

    first, second = mean(v), mean(v + f32(0.02) * jnp.sin(9 * v))
    return jax.tree.map(lambda g, h: g.mean(0) - h.mean(0), first, second)


def ravelled(w, a, b, v):
    """Gradients of more parameters than a sum may have terms."""

    def energy(layers, v):
        for w, b in layers:
            v = v + jnp.tanh(v @ w + b[None])
        return jnp.mean(v**2)

    def gradient(v):
        layers = [
            (jnp.roll(w[:, :8], n, 0) * f32(0.25), a * f32(0.1)) for n in range(40)
        ]
        return jax.flatten_util.ravel_pytree(jax.grad(energy)(layers, v))[0]

    return gradient(v) - gradient(v + f32(0.02) * jnp.sin(9 * v))


def stacked(*args):
    first, second = _contrasted(*args)
    return jax.tree.map(lambda g, h: jnp.stack([g, -h]).sum(0), first, second)


@pytest.mark.parametrize(
    "fun",
    [
        divergence,
        phases,
        weighted,
        bounded,
        batched,
        guarded,
        trained,
        conditioned,
        accumulated,
        averaged,
        ravelled,
        stacked,
    ],
)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_two_gradients_that_contrast_are_unrounded(fun, device):
    columns = 8 if fun is phases else 16

    def draw(rng):
        w = normal(rng, 8, columns, scale=0.4)
        return w, normal(rng, 8), normal(rng, 16), normal(rng, 32, 8)

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("features", [3, 8])
def test_squared_distances_of_points_read_an_unrounded_product(features, policy):
    """Expanded, `|x|^2 + |c|^2 - 2 x @ c.T`, they take off nearly all of it."""

    def loss(p, x):
        centres, w, o = p
        norms = jnp.sum(x * x, -1)[:, None] + jnp.sum(centres * centres, -1)[None]
        near = jnp.exp((f32(2) * x @ centres.T - norms) / f32(features))
        return jnp.mean((jnp.tanh(near @ w) @ o) ** 2)

    def distance(p, x):
        centres, w, o = p
        norms = jnp.sum(x * x, -1)[:, None] + jnp.sum(centres * centres, -1)[None]
        near = jnp.exp(-(norms - f32(2) * x @ centres.T) / f32(features))
        return jnp.mean((jnp.tanh(near @ w) @ o) ** 2)

    def draw(rng):
        centres = normal(rng, 16, features, mean=6)
        w, o = normal(rng, 16, 32, scale=0.25), normal(rng, 32, 8, scale=0.2)
        return (centres, w, o), normal(rng, 64, features, mean=6)

    for fun in (loss, distance):
        judged = judge(jax.value_and_grad(fun), draw)
        rewritten = mixed_precision_jaxpr(judged.closed, policy)
        for verdict in judged.verdicts(policy, "cuda", rewritten):
            assert verdict.holds, verdict


def test_a_sum_of_gradients_is_no_difference():
    """Python's `sum` begins with a zero: a product of the Hessian and a direction."""

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p[0] + p[1][None]) @ p[2]) ** 2)

    def product(p, v, x):
        def along(p):
            grads = jax.grad(loss)(p, x)
            return sum(jnp.vdot(g, d) for g, d in zip(grads, v, strict=True))

        return jax.grad(along)(p)

    rng = np.random.RandomState(0)
    p = normal(rng, 64, 64), normal(rng, 64), normal(rng, 64, 16)
    report = explain(product, "mixed_bfloat16")(p, p, normal(rng, 256, 64))
    assert not any("read unrounded" in e.reason for e in report.equations)


def test_gradients_that_were_ravelled_are_told_apart():
    rng = np.random.RandomState(0)
    args = normal(rng, 8, 16), normal(rng, 8), normal(rng, 16), normal(rng, 32, 8)
    reasons = [
        e.reason
        for e in explain(ravelled, "mixed_bfloat16")(*args).equations
        if e.primitive == "dot_general"
    ]
    assert "read unrounded by a difference" in " ".join(reasons)


def taken_off(gradient):
    """The mean over the inputs of a layer."""
    return gradient - gradient.mean(0, keepdims=True)


def spread(gradients):
    """Of the parts of a batch, by which a step is divided."""
    return gradients.mean(0) / (jnp.sqrt(gradients.var(0)) + f32(1e-8))


@pytest.mark.parametrize("of", [taken_off, spread])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_what_is_common_to_a_gradient_is_taken_off_it_unrounded(of, device):
    def loss(ws, x):
        return jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1] - 10) ** 2)

    def fun(ws, x):
        if of is taken_off:
            return jax.tree.map(of, jax.grad(loss)(ws, x))
        parts = jax.vmap(jax.grad(loss), (None, 0))(ws, x.reshape(8, 128, 8))
        return jax.tree.map(of, parts)

    def draw(rng):
        ws = normal(rng, 8, 32, scale=0.4), normal(rng, 32, 8, scale=0.2)
        return ws, 1 + np.abs(normal(rng, 1024, 8, scale=0.3))

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


def knots_of(a, c, x):
    """Positions of a spline's knots, and their slopes."""
    h = x @ a + c[None]
    return jnp.cumsum(jax.nn.softmax(h), -1) * 6 - 3, jax.nn.softplus(h)


def joined(a, c, b, x, y):
    """The cotangents of a difference reach a running sum through a stack."""
    knots, slopes = jnp.stack(knots_of(a, c, x))
    width = knots[:, 1:] - knots[:, :-1]
    return jnp.mean(((jnp.log(width) * slopes[:, 1:]) @ b - y) ** 2)


def picked(a, c, b, x, y):
    """A mask picks two knots, of whose difference a logarithm is taken."""
    knots, slopes = knots_of(a, c, x)
    is_bin = (y[:, :1] >= knots[:, :-1]) & (y[:, :1] < knots[:, 1:])
    columns = jnp.stack([knots, slopes], axis=-1)
    mask = is_bin[..., None].astype(f32)
    left = jnp.sum(mask * columns[:, :-1], axis=1)
    right = jnp.sum(mask * columns[:, 1:], axis=1)
    width = jnp.maximum(right[:, 0] - left[:, 0], f32(1e-2))
    moved = jnp.stack([left[:, 1], jnp.log(width)], axis=-1)
    return jnp.mean((jnp.tanh(moved @ b[:2]) @ b[:8] - y) ** 2)


@pytest.mark.parametrize("loss", [joined, picked])
@pytest.mark.parametrize("device", DEVICES)
def test_knots_of_a_spline_are_unrounded(loss, device):
    def draw(rng):
        ws = normal(rng, 8, 32, scale=0.3), normal(rng, 32, scale=0.3)
        return (
            (*ws, normal(rng, 31, 8, scale=0.2)),
            normal(rng, 16, 8),
            normal(rng, 16, 8),
        )

    def fun(ws, x, y):
        grads = jax.grad(lambda ws: loss(*ws, x, y))(ws)
        return jax.tree.map(lambda w, g: w - f32(0.1) * g, ws, grads), grads

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


def test_a_difference_is_followed_where_a_logarithm_ends():
    """A logarithm asks for nothing behind a reduction, a difference does."""
    args = jnp.ones((8, 32)), jnp.zeros(32), jnp.ones((31, 8))
    data = jnp.ones((16, 8)), jnp.ones((16, 8))
    step = mixed_precision(jax.grad(picked, argnums=(0, 1, 2)), "mixed_bfloat16")
    equations = explain(step)(*args, *data).equations
    stacked = next(e for e in equations if e.primitive == "stack")
    assert "read unrounded" in stacked.reason


def in_units_of_its_range(a):
    low, high = (f(a, -1, keepdims=True) for f in (jnp.min, jnp.max))
    return (a - low) / (high - low)


def deviation(probability):
    return jnp.sqrt(probability * (1 - probability))


# Differences that another activation multiplies or divides.
SCALED = {
    "a quotient": lambda a, s: ((jax.nn.softplus(a) + 0.5) ** 0.3 - 1) / s,
    "Box-Cox": lambda a, s: ((jax.nn.softplus(a) + 0.5) ** s - 1) * s,
    "a distribution": lambda a, s: (1 + lax.erf(a - 2)) * s,
    "a carry gate": lambda a, s: (1 - jax.nn.sigmoid(a + 5)) / s,
    "min-max": lambda a, s: in_units_of_its_range(5 + a / 10),
    "a deviation": lambda a, s: deviation(jax.nn.sigmoid(a + 3)) * s,
    "a guarded one": lambda a, s: s / (deviation(jax.nn.sigmoid(a + 3)) ** 2 + 1e-4),
    "from the largest": lambda a, s: (a / 10 - jnp.max(a / 10, -1, keepdims=True)) * s,
}


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", SCALED)
def test_what_scales_a_difference_keeps_its_error(name, device):
    def fun(ws, x, y):
        def loss(ws):
            a, s = x @ ws[0] + ws[1][None], jax.nn.sigmoid(x @ ws[2])
            z = SCALED[name](a, f32(0.3) + f32(0.7) * s)
            return jnp.mean((jnp.tanh(z @ ws[3]) @ ws[4] - y) ** 2)

        return jax.value_and_grad(loss)(ws)

    def draw(rng):
        first = normal(rng, 8, 48, scale=0.2), normal(rng, 48, scale=0.2)
        more = (normal(rng, 8, 1, scale=0.3), normal(rng, 48, 16, scale=0.2))
        return (
            (*first, *more, normal(rng, 16, 4)),
            normal(rng, 32, 8),
            normal(rng, 32, 4),
        )

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


BOUNDS = {
    "no bound": lambda apart: apart,
    "a bound": lambda apart: jnp.maximum(apart, 0),
    "two bounds": lambda apart: jnp.clip(apart, 0, 1e4),
    "a mask": lambda apart: jnp.where(np.arange(48) < 40, apart, np.inf),
}


@pytest.mark.breadth(one_in=4)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("scale", ["a number", "a temperature"])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_what_a_softmax_takes_off_is_no_rest(scale, device, bound):
    """The squared length of a query changes no assignment to the nearest centre."""

    def fun(ws, x, y):
        def loss(ws):
            q, centres = x @ ws[0] + ws[1][None] - 3, ws[2]
            squares = (q**2).sum(-1, keepdims=True), (centres**2).sum(-1)[None]
            apart = BOUNDS[bound](squares[0] - 2 * q @ centres.T + squares[1])
            is_number = scale == "a number"
            rate = f32(0.1) if is_number else f32(0.1) * jax.nn.softplus(x @ ws[3])
            z = jax.nn.softmax(-rate * apart) @ ws[4]
            return jnp.mean((jnp.tanh(z) @ ws[5] - y) ** 2)

        return jax.value_and_grad(loss)(ws)

    def draw(rng):
        first = normal(rng, 8, 8, scale=0.2), normal(rng, 8, scale=0.2)
        more = (normal(rng, 48, 8, scale=0.1), normal(rng, 8, 1, scale=0.3))
        ws = (*first, *more, normal(rng, 48, 16, scale=0.2), normal(rng, 16, 4))
        return ws, normal(rng, 32, 8), normal(rng, 32, 4)

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


def peaks(z):
    window = (1, 3), (1, 1), "SAME"
    return z * (lax.reduce_window(z, -np.inf, lax.max, *window) == z)


def routed(z):
    top, indices = lax.top_k(z, 2)
    weights = top / top.sum(-1, keepdims=True)
    return (jax.nn.one_hot(indices, z.shape[-1]) * weights[..., None]).sum(1)


SELECTED = {
    "peaks": peaks,
    "a router": routed,
    "the largest": lambda z: z * jax.nn.one_hot(jnp.argmax(z, -1), z.shape[-1]),
    "as large as another": lambda z: z * (z >= jnp.roll(z, 1, -1)),
}


@pytest.mark.breadth(one_in=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SELECTED)
def test_what_is_selected_by_size_is_compared_unrounded(name, device):
    """Roundings make ties of values that are near each other."""

    def fun(ws, x, y):
        def loss(ws):
            z = jax.nn.sigmoid(x @ ws[0] + ws[1] + 2)
            return jnp.mean((SELECTED[name](z) @ ws[2] - y) ** 2)

        return jax.value_and_grad(loss)(ws)

    def draw(rng):
        ws = normal(rng, 8, 48, scale=0.3), normal(rng, 32, 48, scale=0.1)
        ws = (*ws, normal(rng, 48, 16, scale=0.3))
        return ws, normal(rng, 32, 8), normal(rng, 32, 16)

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


def test_how_a_gradient_was_chosen_is_asked_by_no_forward_pass():
    """Meta-learning: a pool's derivative compares what is stored."""

    def network(ws, x):
        z = jnp.einsum("nhwi,io->nhwo", x, ws[0])
        z = jax.nn.relu((z - z.mean((0, 1, 2), keepdims=True)) * ws[2] + ws[3])
        z = z.reshape(16, 4, 2, 4, 2, 32).max((2, 4))
        return z.reshape(16, -1) @ ws[1]

    def loss(ws, x, y):
        return jnp.mean((network(ws, x) - y) ** 2)

    def steps(ws, x, y):
        def one(ws, _):
            gradient = jax.grad(loss)(ws, x, y)
            ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradient)
            return ws, loss(ws, x, y)

        return lax.scan(one, ws, length=2)[1].sum()

    affine = jnp.ones((1, 1, 1, 32)), jnp.ones((1, 1, 1, 32))
    ws = jnp.ones((8, 32)), jnp.ones((4 * 4 * 32, 4)), *affine
    x, y = jnp.ones((16, 8, 8, 8)), jnp.ones((16, 4))
    report = explain(jax.value_and_grad(steps), "mixed_bfloat16")(ws, x, y)
    rectified = [e.dtype for e in report.equations if e.primitive == "max"]
    assert rectified == ["bfloat16"] * 2


@pytest.mark.parametrize("device", DEVICES[1:])
def test_what_a_likelihood_hands_to_one_number_is_unrounded(device):
    """The fit of a Gaussian process and its determinant pull at scales, and cancel."""

    def network(ws, x):
        return jnp.tanh(x @ ws[0] + ws[1]) @ ws[2] + ws[3]

    def kernel(ws, p, s, t):
        s, t = network(ws, s), network(ws, t)
        squares = jnp.square(s - t).sum()
        is_zero = squares == 0
        near = abs(s - t).sum()
        r = jnp.where(is_zero, near, jnp.sqrt(jnp.where(is_zero, 1, squares)))
        a = f32(5**0.5) * (r / jnp.exp(p["length"]))
        return jnp.exp(p["height"]) * ((1 + a + jnp.square(a) / 3) * jnp.exp(-a))

    def fun(ws, p, x, y):
        def loss(ws, p):
            of = functools.partial(kernel, ws, p)
            k = jax.vmap(lambda s: jax.vmap(lambda t: of(s, t))(x))(x)
            noise = jnp.exp(p["noise"]) * jnp.eye(64, dtype=f32)
            factor = jnp.linalg.cholesky(k + noise)
            fit = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
            return jnp.square(fit).sum() / 2 + jnp.log(jnp.diag(factor)).sum()

        return jax.value_and_grad(loss, (0, 1))(ws, p)

    def draw(rng):
        ws = normal(rng, 4, 16, scale=0.5), normal(rng, 16, scale=0.1)
        ws = (*ws, normal(rng, 16, 2, scale=0.25), normal(rng, 2, scale=0.1))
        p = {"length": f32(0), "height": f32(0), "noise": f32(-2)}
        return ws, p, normal(rng, 64, 4), normal(rng, 64)

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict
