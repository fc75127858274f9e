"""The law of accuracy over iterations: what updates itself by one weight is state.

However the weight is picked, masked, scaled or computed anew in each step, and however
the state is moved or what function of it is updated; but a network is none, whose
layers have weights of their own.
"""

from collections import Counter

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from amplifying import judge, normal, trace
from by_hand import DEVICES
from helpers import eqns
from jax import lax

from jmp_rewrite import explain, mixed_precision, mixed_precision_jaxpr

f32 = np.float32
RATE = f32(1.5e-3)
MASK = np.tril(np.ones((8, 8), bool))


def draws(*more):
    """A state near one, a weight, and what reads the state."""

    def draw(rng):
        first = normal(rng, 32, 8, mean=1), normal(rng, 8, 8, scale=0.4)
        return (*first, normal(rng, 8, 5, scale=0.4), *(m(rng) for m in more))

    return draw


def by_weight(of, *more):
    """Steps whose weight is a function of the one that is given."""

    def fun(s, w, v, *others):
        for _ in range(40):
            s = s + RATE * jnp.tanh(s @ of(w, *others))
        return s @ v

    return fun, draws(*more)


def by_state(step):
    """Steps that are a function of the state, and of the state and its update."""

    def fun(s, w, v):
        for _ in range(40):
            s = step(s, RATE * jnp.tanh(s @ w))
        return s @ v

    return fun, draws()


def sorted_beside(s, u):
    key = s.sum(-1, keepdims=True) + 0 * s
    return lax.sort((key, s + u), num_keys=1, dimension=0)[1]


def spectral(s, w, v):
    """A weight that is divided by its largest singular value, found by iteration."""
    u = jnp.ones(8, f32)
    for _ in range(40):
        u = w.T @ (w @ u)
        u = u / jnp.linalg.norm(u)
        s = s + RATE * jnp.tanh(s @ (w / jnp.linalg.norm(w @ u)))
    return s @ v


def layers(s, ws, v):
    """Steps by a network, whose layers are scanned over."""
    for _ in range(24):
        u, _ = lax.scan(lambda u, w: (jnp.tanh(u @ w), None), s, ws)
        s = s + f32(2e-3) * u
    return s @ v


def scanned(of):
    """Steps of a scan over what is made of one weight."""

    def fun(s, w, v, t):
        def step(s, w):
            return s + RATE * jnp.tanh(s @ w), None

        return lax.scan(step, s, of(w, t))[0] @ v

    return fun, draws(lambda rng: np.abs(normal(rng, 40)))


def least_mean_squares(w, t):
    x, y = t
    return w + f32(1e-3) * jnp.outer(x, y - x @ w)


def temporal_differences(w, t):
    now, later, reward = t
    return w + f32(1e-3) * now.T @ (reward + f32(0.9) * (later @ w) - now @ w)


def hebb(w, x):
    return w + f32(1e-3) * x[:, None] * jnp.tanh(x @ w)


def learned(rule, *examples):
    """A weight that learns from one example in each iteration of a scan."""

    def fun(w, v, *xs):
        xs = xs[0] if len(xs) == 1 else xs
        return lax.scan(lambda w, x: (rule(w, x), None), w, xs)[0] @ v

    def draw(rng):
        first = normal(rng, 8, 4, scale=0.4), normal(rng, 4, 5)
        return (*first, *(normal(rng, 60, *shape) for shape in examples))

    return fun, draw


PROGRAMS = {
    "picked by an index": by_weight(
        lambda w, ws, i: ws[i],
        lambda rng: normal(rng, 4, 8, 8, scale=0.4),
        lambda rng: np.int32(rng.randint(4)),
    ),
    "masked": by_weight(lambda w: jnp.where(MASK, w, 0)),
    "masked by a draw": by_weight(
        lambda w: w * jax.random.bernoulli(jax.random.key(0), 0.5, w.shape)
    ),
    "masked by numbers": by_weight(jnp.tril),
    "without a diagonal": by_weight(
        lambda w: jnp.fill_diagonal(w, 0, inplace=False),
    ),
    "a triangle": by_weight(
        lambda w, v: jnp.zeros((8, 8), f32).at[jnp.triu_indices(8)].set(v),
        lambda rng: normal(rng, 36, scale=0.4),
    ),
    "of few bits": by_weight(
        lambda w: jnp.round(w * 64).astype(np.int8).astype(f32) * f32(1 / 64)
    ),
    "an inverse": by_weight(lambda w: jnp.linalg.inv(3 * jnp.eye(8, dtype=f32) + w)),
    "of integers": by_weight(
        lambda w, q: q.astype(f32) * f32(4e-3),
        lambda rng: rng.randint(-127, 127, (8, 8)).astype(np.int8),
    ),
    "a Gram matrix": by_weight(lambda w: w @ w.T),
    "made by another network": by_weight(
        lambda w, c, a: (c @ a).reshape(8, 8),
        lambda rng: normal(rng, 8),
        lambda rng: normal(rng, 8, 64, scale=0.2),
    ),
    "spectral norm": (spectral, draws()),
    "layers": (
        lambda s, w, v, ws: layers(s, ws, v),
        draws(lambda rng: normal(rng, 3, 8, 8, scale=0.4)),
    ),
    "spread": scanned(lambda w, t: jnp.broadcast_to(w, (40, 8, 8))),
    "repeated": scanned(lambda w, t: jnp.repeat(w[None], 40, 0)),
    "looked up": scanned(lambda w, t: w[None][jnp.zeros(40, int)]),
    "of zeros": scanned(lambda w, t: jnp.zeros((40, 8, 8), f32).at[:].set(w)),
    "in turn": scanned(lambda w, t: jnp.tile(jnp.stack([w, w.T]), (20, 1, 1))),
    "inverses": scanned(
        lambda w, t: jnp.linalg.inv(
            3 * jnp.eye(8, dtype=f32)[None] + t[:, None, None] * w
        )
    ),
    "of a branch": scanned(
        lambda w, t: lax.cond(
            w[0, 0] > 0,
            lambda w: jnp.tile(w, (40, 1, 1)),
            lambda w: w + 0 * t[:, None, None],
            w,
        )
    ),
    "handed on by a loop": scanned(lambda w, t: lax.map(lambda x: w, t)),
    "in a loop": scanned(lambda w, t: lax.map(lambda x: w * x, t)),
    "quantized": scanned(
        lambda w, t: jnp.repeat((w * 64).astype("i1")[None], 40, 0).astype(f32) / 64
    ),
    "scaled by time": scanned(lambda w, t: w * t[:, None, None]),
    "least mean squares": learned(least_mean_squares, (8,), (4,)),
    "temporal differences": learned(temporal_differences, (16, 8), (16, 8), (16, 4)),
    "Hebb": learned(hebb, (8,)),
    "reflected": by_state(lambda s, u: jnp.abs(s + u)),
    "its square": by_state(lambda s, u: jnp.sqrt(jnp.square(s) + u**2)),
    "sorted": by_state(lambda s, u: lax.top_k(s + u, 8)[0]),
    "sorted beside a key": by_state(sorted_beside),
    "rolled by tiles": by_state(lambda s, u: jnp.tile(s + u, (1, 2))[:, 6:14]),
}


@pytest.mark.breadth(one_in=8)
@pytest.mark.parametrize("device", DEVICES[:2])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_one_weight_updates_is_state(name, policy, device):
    judged = judge(*PROGRAMS[name])
    rewritten = mixed_precision_jaxpr(judged.closed, policy)
    for verdict in judged.verdicts(policy, device, rewritten):
        assert verdict.holds, verdict


@pytest.mark.parametrize(
    "pick",
    [
        lambda bank, x: bank[3],
        lambda bank, x: bank.mean(0) * 4,
        lambda bank, x: bank[0] / (1 + jnp.square(x).mean()),
        lambda bank, x: bank.reshape(-1)[64:128].reshape(8, 8),
        lambda bank, x: bank.reshape(-1, 8)[jnp.arange(8) * 3],
    ],
)
def test_one_weight_of_many_is_one(pick):
    """A stack holds no more numbers than what it was picked from."""

    def fun(s, bank, v, x):
        stack = jnp.repeat(pick(bank, x)[None], 40, 0)
        step = lambda s, w: (s + RATE * jnp.tanh(s @ w), None)  # noqa: E731
        return lax.scan(step, s, stack)[0] @ v

    def draw(rng):
        s, _, v = draws()(rng)
        return s, normal(rng, 64, 8, 8, scale=0.4), v, normal(rng, 256, 8)

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", "cuda", rewritten):
        assert verdict.holds, verdict


@pytest.mark.parametrize(
    "spread", [jnp.broadcast_to, lambda w, s: jnp.tile(w, (32, 1, 1))]
)
def test_as_many_iterations_as_a_weight_has_rows(spread):
    """What a stack is made of is no stack for having as many rows."""

    def fun(s, w):
        def step(s, w):
            return s + f32(0.02) * jnp.tanh(s @ w), None

        return lax.scan(step, s, spread(w, (32, 32, 32)))[0] @ w

    judged = judge(
        fun, lambda rng: (normal(rng, 8, 32), normal(rng, 32, 32, scale=0.2))
    )
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", "cuda", rewritten):
        assert verdict.holds, verdict


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_nobody_reads_decides_nothing(is_inside):
    """A sampler inside of the loss, where JAX stacks what no backward pass reads."""

    def energy(p, x):
        def layer(x, w):
            size = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + f32(1e-6))
            return x + jax.nn.gelu(x * size @ w), None

        return (lax.scan(layer, x @ p["in"], p["w"])[0] @ p["out"])[:, 0]

    def sample(p, z, noise):
        def step(z, e):
            return z - 0.1 * jax.grad(lambda z: energy(p, z).sum())(z) + 0.05 * e, None

        return lax.stop_gradient(lax.scan(step, z, noise)[0])

    def step(p, x, z, noise):
        outside = None if is_inside else sample(p, z, noise)

        def loss(p):
            z_ = sample(p, z, noise) if is_inside else outside
            return energy(p, x).mean() - energy(p, z_).mean()

        return jax.grad(loss)(p)

    x = jax.ShapeDtypeStruct((64, 32), f32)
    shapes = {"in": (32, 32), "w": (4, 32, 32), "out": (32, 1)}
    p = {k: jax.ShapeDtypeStruct(s, f32) for k, s in shapes.items()}
    noise = jax.ShapeDtypeStruct((5, 64, 32), f32)
    rewritten = trace(mixed_precision(step, "mixed_bfloat16"), (p, x, x, noise))
    kept = [v.aval for e in eqns(rewritten, "scan") for v in e.outvars]
    assert {str(a.dtype) for a in kept if a.shape == (4, 64, 32)} == {"bfloat16"}
    carried = Counter(str(a.dtype) for a in kept if a.shape == (64, 32))
    assert carried["float32"] == 1  # the samples themselves


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize(
    ("hand_on", "dtype"),
    [
        (lambda k, v: (k[::-1], v[::-1]), "half"),
        (lambda k, v: (v, k[::-1]), "half"),
        (lambda k, v: (v, 0.5 * k), "float32"),
    ],
    ids=["moved", "exchanged", "scaled"],
)
def test_a_carry_that_is_only_moved_is_no_state(hand_on, dtype, policy):
    """As the keys and values that ring attention sends from device to device."""

    def fun(w, x):
        q, k, v = jnp.split(x @ w, 3, -1)

        def attend(carry, _):
            k, v, total = carry
            total = total + jax.nn.softmax(q @ k.T) @ v
            return (*hand_on(k, v), total), None

        return lax.scan(attend, (k, v, jnp.zeros_like(q)), None, length=4)[0][2]

    def draw(rng):
        return normal(rng, 16, 48, scale=0.25), normal(rng, 32, 16)

    judged = judge(fun, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, policy)
    (loop,) = eqns(rewritten, "scan")
    expected = policy.removeprefix("mixed_") if dtype == "half" else dtype
    found = sorted(str(v.aval.dtype) for v in loop.outvars)
    assert found == sorted([expected, expected, "float32"])
    for verdict in judged.verdicts(policy, "cuda", rewritten):
        assert verdict.holds, verdict


EPSILON = f32(0.2)


def cost_of_transport(z, y):
    """Squared distances of f32[n, d] and f32[m, d], expanded."""
    norms = jnp.sum(z * z, -1)[:, None] + jnp.sum(y * y, -1)
    return norms - f32(2) * z @ y.T


def potentials(z, y):
    """Sinkhorn's, by iterations that compute the cost themselves."""

    def iterate(state):
        _, g, _, n = state
        cost = cost_of_transport(z, y)
        f = -EPSILON * jax.nn.logsumexp((g - cost) / EPSILON, 1)
        new = -EPSILON * jax.nn.logsumexp((f[:, None] - cost) / EPSILON, 0)
        return f, new, jnp.max(jnp.abs(new - g)), n + 1

    start = jnp.zeros(len(z)), jnp.zeros(len(y)), f32(1), 0
    return lax.while_loop(lambda s: (s[2] > 1e-3) & (s[3] < 100), iterate, start)[:2]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("is_returned", [False, True])
def test_what_a_solver_has_come_to_fits_what_is_computed_behind_it(is_returned, policy):
    """A plan is that of its potentials: both of one cost, whoever computes it."""

    def loss(p, x, y):
        z = jnp.tanh(x @ p["a"]) @ p["b"]
        f, g = map(lax.stop_gradient, potentials(lax.stop_gradient(z), y))
        plan = jnp.exp((f[:, None] + g - cost_of_transport(z, y)) / EPSILON)
        value = jnp.mean(f) + jnp.mean(g) - EPSILON * jnp.mean(plan)
        return value, (plan if is_returned else ())

    def step(p, x, y):
        value, grads = jax.value_and_grad(loss, has_aux=True)(p, x, y)
        return value, jax.tree.map(lambda w, g: w + f32(-1e-3) * g, p, grads), grads

    def draw(rng):
        p = {"a": normal(rng, 4, 32, scale=0.5), "b": normal(rng, 32, 3, scale=0.2)}
        return p, normal(rng, 32, 4), normal(rng, 32, 3)

    judged = judge(step, draw)
    rewritten = mixed_precision_jaxpr(judged.closed, policy)
    for verdict in judged.verdicts(policy, "cuda", rewritten):
        assert verdict.holds, verdict


VARIED = {
    "scaled": lambda w, t: w * t,
    "picked": lambda w, t: jnp.stack([w, w * f32(0.9)])[(3 * t).astype(int) % 2],
    "masked": lambda w, t: jnp.where(MASK | (t < 0.5), w, 0),
    "mixed": lambda w, t: w + t * w.T,
}


@pytest.mark.breadth(one_in=2)
@pytest.mark.parametrize("device", DEVICES[:2])
@pytest.mark.parametrize("name", VARIED)
def test_the_cotangent_of_a_state_is_one(name, device):
    """Also where each iteration has stored the one weight in another form."""

    def fun(s, w, v, t):
        def loss(w):
            def step(s, t):
                return s + RATE * jnp.tanh(s @ VARIED[name](w, t)), None

            s_end, _ = lax.scan(step, s, t)
            return jnp.mean((s_end @ v) ** 2)

        return jax.grad(loss)(w)

    judged = judge(fun, draws(lambda rng: np.abs(normal(rng, 200))))
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", device, rewritten):
        assert verdict.holds, verdict


def network(ws, x):
    for first, second in ws:
        x = x + jax.nn.gelu(x @ first) @ second
    return x @ ws[0][0]


def of_a_stack(ws, x):
    first, second = jnp.stack([a for a, _ in ws]), jnp.stack([b for _, b in ws])

    @jax.jit
    def block(i, x):
        return x + jax.nn.gelu(x @ first[i]) @ second[i]

    for i in range(len(ws)):
        x = block(i, x)
    return x @ first[0]


def taken_apart(ws, x):
    first, second = jnp.stack([a for a, _ in ws]), jnp.stack([b for _, b in ws])
    return network(list(zip(first, second, strict=True)), x)


def of_one_vector(ws, x):
    flat, undo = jax.flatten_util.ravel_pytree(ws)
    return network(undo(flat), x)


def of_shared_weights(ws, x):
    """Layers that mask, or scale, the same weight by an array of their own."""
    shared, other = ws[0][0][:, :64], ws[0][0][:, 64:]
    masks = np.random.RandomState(1).rand(4, 64, 64) < 0.5
    for mask, (first, _) in zip(masks, ws, strict=True):
        x = x + jnp.tanh(x @ jnp.where(mask, shared, 0))
        x = x + jnp.tanh(x @ (other * first[:, :1]))
    return x @ shared


NETWORKS = network, of_a_stack, taken_apart, of_one_vector, of_shared_weights


@pytest.mark.parametrize("fun", NETWORKS)
@pytest.mark.parametrize("captured", [True, False])
def test_layers_are_told_apart(fun, captured):
    """By their weights, also by those that the function has captured."""
    rng = np.random.RandomState(0)
    shapes = (64, 128), (128, 64)
    ws = [tuple(jnp.asarray(normal(rng, *s) * 0.1) for s in shapes) for _ in range(4)]
    x = normal(rng, 32, 64)
    report = (
        explain(lambda x: fun(ws, x), "mixed_bfloat16")(x)
        if captured
        else explain(fun, "mixed_bfloat16")(ws, x)
    )
    sums = [row for row in report.equations if row.primitive == "add" and row.bytes]
    assert sums and not any("state" in row.reason for row in sums)


def test_a_decay_of_a_state_that_is_rolled_is_read_unrounded():
    def fun(ws, xs):
        def step(h, x):
            h = jnp.roll(h, 1, -1) * jax.nn.sigmoid(x @ ws[0] + 5) + x @ ws[1] * 0.01
            return h, h

        return jnp.square(lax.scan(step, jnp.ones((8, 8)), xs)[1] @ ws[2]).mean()

    def draw(rng):
        ws = tuple(normal(rng, 8, 8, scale=0.4) for _ in range(3))
        return ws, normal(rng, 40, 8, 8)

    judged = judge(jax.grad(fun), draw)
    rewritten = mixed_precision_jaxpr(judged.closed, "mixed_bfloat16")
    for verdict in judged.verdicts("mixed_bfloat16", "cuda", rewritten):
        assert verdict.holds, verdict


def test_float16_keeps_a_vector_of_epsilons():
    def fun(w, x, epsilons):
        h = jax.nn.relu(x @ w - 1)
        return (h / (jnp.abs(h) + epsilons)) @ w

    rng = np.random.RandomState(0)
    args = normal(rng, 8, 8), normal(rng, 32, 8), np.full((8,), 1e-9, f32)
    rewritten = mixed_precision_jaxpr(trace(fun, args), "mixed_float16")
    assert np.isfinite(jax.jit(jax.extend.core.jaxpr_as_fun(rewritten))(*args)[0]).all()


X = jnp.ones((8, 16))
DRAWN = {
    "a stack": lambda key: jax.random.normal(key, (12, 16, 16)),
    "a batch": lambda key: jax.vmap(lambda key: jax.random.normal(key, (16, 16)))(
        jax.random.split(key, 12)
    ),
    "in a loop": lambda key: lax.map(
        lambda key: jax.random.normal(key, (16, 16)), jax.random.split(key, 12)
    ),
    "one": lambda key: jnp.tile(jax.random.normal(key, (16, 16)), (12, 1, 1)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_layers_that_are_drawn_inside_are_told_apart(name):
    def fun(key, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        x, _ = lax.scan(layer, x, DRAWN[name](key))
        return x @ jnp.ones((16, 16))

    rewritten = trace(mixed_precision(fun, "mixed_bfloat16"), (jax.random.key(0), X))
    carried = {v.aval for e in eqns(rewritten, "scan") for v in e.outvars}
    dtypes = {str(a.dtype) for a in carried if a.shape == X.shape}
    assert dtypes == {"float32" if name == "one" else "bfloat16"}


# What a layer multiplies by, made of its slices: three matrices, a vector and integers.
MADE = {
    "as it is": lambda w, a, b, g, q: w,
    "normalized": lambda w, a, b, g, q: w * (g / jnp.linalg.norm(w, axis=0))[None],
    "standardized": lambda w, a, b, g, q: (w - w.mean()) / (w.std() + f32(1e-3)),
    "merged": lambda w, a, b, g, q: w + a[:, :2] @ b[:2],
    "masked": lambda w, a, b, g, q: jnp.where(abs(a) > 0.5, w, 0),
    "rounded": lambda w, a, b, g, q: w + lax.stop_gradient(jnp.round(w * 7) / 7 - w),
    "dequantized": lambda w, a, b, g, q: q.astype(f32) * g[None] / 127,
}
# Numbers of an iteration that are too few for a weight of its own.
SHARED = {
    "a time": lambda w, a, b, g, q: w[0] + g[0] * w[1],
    "a scale": lambda w, a, b, g, q: w[0] * g[None],
    "a time, as a matrix": lambda w, a, b, g, q: w[0] * jnp.full((16, 16), g[0]),
    "a time alone": lambda w, a, b, g, q: jnp.full((16, 16), g[0]),
}


@pytest.mark.parametrize("name", MADE | SHARED)
def test_a_layer_of_a_scan_may_make_its_weights(name):
    """Of slices alone that are as large, and of what all iterations share."""

    def fun(ws, x):
        w, *others = ws

        def layer(x, ws):
            w, *others = ws
            return x + jnp.tanh(x @ MADE[name](w, *others)), None

        def iteration(x, others):
            return x + jnp.tanh(x @ SHARED[name](w, *others)), None

        step, xs = (layer, ws) if name in MADE else (iteration, others)
        return lax.scan(step, x, xs)[0] @ w[0]

    matrices = [jnp.ones((12, 16, 16)) for _ in "wab"]
    ws = (*matrices, jnp.ones((12, 16)), jnp.ones((12, 16, 16), jnp.int8))
    rewritten = trace(mixed_precision(fun, "mixed_bfloat16"), (ws, X))
    carried = {v.aval for e in eqns(rewritten, "scan") for v in e.outvars}
    dtypes = {str(a.dtype) for a in carried if a.shape == X.shape}
    assert dtypes == {"bfloat16" if name in MADE else "float32"}


def test_an_example_that_is_normalized_is_no_weight():
    """A scan over examples: a weight that learns from each is state."""

    def fun(w, examples, targets):
        def learn(w, seen):
            x, y = seen
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            return w - 1e-3 * x.T @ (x @ w - y), None

        return lax.scan(learn, w, (examples, targets))[0]

    args = jnp.ones((16, 4)), jnp.ones((12, 8, 16)), jnp.ones((12, 8, 4))
    rewritten = trace(mixed_precision(fun, "mixed_bfloat16"), args)
    (learned,) = (v.aval for e in eqns(rewritten, "scan") for v in e.outvars)
    assert learned.dtype == jnp.float32


NESTED = {
    "a scan of scans": lambda w: (w, None),
    "the same layers again": lambda w: (None, w[0]),
    "repeated": lambda w: (jnp.broadcast_to(w[:1], w.shape), None),
    "one layer repeated": lambda w: (jnp.broadcast_to(w[:, :1], w.shape), None),
    "both repeated": lambda w: (jnp.broadcast_to(w[0, 0], w.shape), None),
}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", NESTED)
def test_a_slice_of_a_slice_is_a_weight_of_both_loops(name, is_checkpointed):
    """Stages of layers, as Flax' `remat_scan` makes them, and iterations of stages."""

    def loss(w, x):
        slices, captured = NESTED[name](w)

        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        def stage(x, w):
            return lax.scan(layer, x, captured if w is None else w)

        stage = jax.checkpoint(stage) if is_checkpointed else stage
        return jnp.mean((lax.scan(stage, x, slices, length=6)[0] @ w[0, 0]) ** 2)

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    args = jnp.ones((6, 5, 16, 16)), X
    rewritten = trace(mixed_precision(step, "mixed_bfloat16"), args)
    (outer,) = (
        e
        for e in eqns(rewritten, "scan")
        if e.params["length"] == 6 and not e.params["reverse"]
    )
    dtypes = {str(v.aval.dtype) for v in outer.outvars if v.aval.shape == X.shape}
    assert dtypes == {"bfloat16" if name == "a scan of scans" else "float32"}
    if is_checkpointed:
        stacked = {
            str(v.aval.dtype) for v in outer.outvars if v.aval.shape[1:] == X.shape
        }
        assert stacked == dtypes


WIDTH, DEPTH = 64, 4


def scanned_network(p, x, start, penalty=None, skips=False):
    """A residual network, its layers scanned over."""

    def layer(x, p):
        size = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + f32(1e-6))
        return x + jax.nn.gelu(x * size @ p["w"]) @ p["u"]

    @jax.checkpoint
    def down(x, p):
        y = layer(x, p)
        return y, (y if penalty is None else penalty(y))

    @jax.checkpoint
    def up(x, p):
        return layer(x + p[1], p[0]), None

    x, ys = lax.scan(down, start(p, x), {k: p[k] for k in "wu"})
    if skips:
        more = {"w": p["more"][0], "u": p["more"][1]}
        x, _ = lax.scan(up, x, (more, ys), reverse=True)
    loss = jnp.mean((x @ p["head"]) ** 2)
    return loss if penalty is None else loss + jnp.sum(ys)


def embedded(p, x):
    return x @ p["embedding"]


def itself(p, x):
    return x


def sgd(loss):
    def step(p, x):
        return jax.tree.map(lambda w, g: w + f32(-0.1) * g, p, jax.grad(loss)(p, x))

    return step


def epoch(step):
    return lambda p, xs: lax.scan(lambda p, x: (step(p, x), None), p, xs)[0]


def twice(step):
    return lambda p, xs: step(step(p, xs[0]), xs[1])


def until(step):
    def train(p, xs):
        def go_on(state):
            return (jnp.sum(state[0]["head"] ** 2) > 1e-3) & (state[1] < 9)

        return lax.while_loop(
            go_on, lambda s: (step(s[0], xs[s[1] % 4]), s[1] + 1), (p, 0)
        )

    return train


def of(start=embedded, **options):
    return lambda p, x: scanned_network(p, x, start, **options)


SCANNED = {
    "an epoch": epoch(sgd(of())),
    "an epoch, of data": epoch(sgd(of(itself))),
    "two steps": twice(sgd(of())),
    "until": until(sgd(of())),
    "a penalty": lambda p, xs: sgd(of(itself, penalty=lambda y: jnp.mean(y**2)))(
        p, xs[0]
    ),
    "skips": lambda p, xs: sgd(of(skips=True))(p, xs[0]),
    "skips, of data": lambda p, xs: sgd(of(itself, skips=True))(p, xs[0]),
}


@pytest.mark.parametrize("name", SCANNED)
def test_a_stream_is_half_whatever_is_around_its_layers(name):
    """Train steps around them, a penalty on each, another stack's outputs."""
    matrices = {"embedding": (WIDTH, WIDTH), "head": (WIDTH, 8)}
    matrices |= dict.fromkeys("wu", (DEPTH, WIDTH, WIDTH))
    matrices |= {"more": (2, DEPTH, WIDTH, WIDTH)}
    p = {k: jax.ShapeDtypeStruct(s, f32) for k, s in matrices.items()}
    xs = jax.ShapeDtypeStruct((4, 256, WIDTH), f32)
    rewritten = trace(mixed_precision(SCANNED[name], "mixed_bfloat16"), (p, xs))
    kept = [v.aval for e in eqns(rewritten, "scan") for v in e.outvars]
    stacked = {str(a.dtype) for a in kept if a.shape == (DEPTH, 256, WIDTH)}
    assert stacked == {"bfloat16"}


def to_chosen_experts(x, p):
    """The best of four experts, chosen and scaled by what a router says."""
    normed = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + f32(1e-6))
    probabilities = jax.nn.softmax(normed @ p["w"][:, :4])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), 4)
    gate = jnp.sum(probabilities * chosen, -1, keepdims=True)
    hidden = jnp.einsum("be,bd,def->bef", chosen, normed, p["w"].reshape(WIDTH, 4, -1))
    experts = p["u"].reshape(4, -1, WIDTH)
    return x + gate * jnp.einsum("bef,efd->bd", jax.nn.gelu(hidden), experts)


def to_some_rows(x, p):
    """Half of the rows alone, added to where they stand."""
    gate, rows = lax.top_k((x @ p["w"])[:, 0], len(x) // 2)
    picked = x[rows]
    size = lax.rsqrt(jnp.mean(picked * picked, -1, keepdims=True) + f32(1e-6))
    made = jax.nn.gelu(picked * size @ p["w"]) @ p["u"]
    return x.at[rows].add(jax.nn.sigmoid(gate)[:, None] * made)


def routed(layer, remat):
    def loss(p, x):
        step = jax.checkpoint(layer) if remat else layer
        layers = {k: p[k] for k in "wu"}
        x, _ = lax.scan(lambda x, p: (step(x, p), None), x @ p["embedding"], layers)
        return jnp.mean((x @ p["head"]) ** 2)

    return lambda p, xs: sgd(loss)(p, xs[0])


LAYERED = {
    f"{layer.__name__}, {remat=}": routed(layer, remat)
    for layer in (to_chosen_experts, to_some_rows)
    for remat in (False, True)
}


def post_norm(x, p):
    """A layer whose norm stands behind its sum, as those of the first transformers."""
    x = x + jax.nn.gelu(x @ p["w"]) @ p["u"]
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.var(x, -1, keepdims=True) + f32(1e-6))


def scaled_first(x, p):
    """A layer that scales its input by numbers of its own: their gradient reads it."""
    return x + jax.nn.gelu((x * p["w"][0]) @ p["w"]) @ p["u"]


def behind_data(layer, prepare=lambda x: x):
    def loss(p, x):
        layers = {k: p[k] for k in "wu"}
        x, _ = lax.scan(lambda x, p: (layer(x, p), None), prepare(x), layers)
        return jnp.mean((x @ p["head"]) ** 2)

    return lambda p, xs: sgd(loss)(p, xs[0])


LAYERED |= {
    "post-norm, behind data": behind_data(jax.checkpoint(post_norm)),
    "scaled, behind normalized data": behind_data(scaled_first, jax.nn.standardize),
}


@pytest.mark.parametrize("name", LAYERED)
def test_a_stream_is_half_whatever_its_layers_do(name):
    """What is chosen is no example; rows that differ add a term; a norm is no loss."""
    matrices = {"embedding": (WIDTH, WIDTH), "head": (WIDTH, 8)}
    matrices |= dict.fromkeys("wu", (DEPTH, WIDTH, WIDTH))
    p = {k: jax.ShapeDtypeStruct(s, f32) for k, s in matrices.items()}
    xs = jax.ShapeDtypeStruct((1, 256, WIDTH), f32)
    rewritten = trace(mixed_precision(LAYERED[name], "mixed_bfloat16"), (p, xs))
    kept = [v.aval for e in eqns(rewritten, "scan") for v in e.outvars]
    of_stream = {str(a.dtype) for a in kept if a.shape[-2:] == (256, WIDTH)}
    assert of_stream == {"bfloat16"}


def through_steps(p, xs):
    """The gradient through train steps of a scan, of a network with a bias."""

    def loss(p, x):
        hidden = jax.nn.gelu(x @ p["embedding"] + p["bias"])
        return jnp.mean((jax.nn.gelu(hidden @ p["w"][0]) @ p["head"]) ** 2)

    def outer(p):
        step = sgd(loss)
        p, _ = lax.scan(lambda p, _: (step(p, xs[0]), None), p, None, length=3)
        return loss(p, xs[1])

    return jax.grad(outer)(p)


def test_a_bias_makes_no_state_of_what_its_gradient_is_summed_over():
    matrices = {"embedding": (WIDTH, WIDTH), "head": (WIDTH, 8), "bias": (WIDTH,)}
    matrices |= {"w": (DEPTH, WIDTH, WIDTH)}
    p = {k: jax.ShapeDtypeStruct(s, f32) for k, s in matrices.items()}
    xs = jax.ShapeDtypeStruct((2, 256, WIDTH), f32)
    rewritten = trace(mixed_precision(through_steps, "mixed_bfloat16"), (p, xs))
    kept = [v.aval for e in eqns(rewritten, "scan") for v in e.outvars]
    stacked = {str(a.dtype) for a in kept if a.shape == (3, 256, WIDTH)}
    assert stacked == {"bfloat16"}


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (lambda given: jnp.arange(12), "bfloat16"),
        (lambda given: jnp.arange(12) // 2, "float32"),
        (lambda given: given, "float32"),
    ],
    ids=["its own number", "two alike", "any"],
)
def test_a_layer_of_a_scan_may_pick_its_weights(rows, dtype):
    def fun(w, x, given):
        def layer(x, i):
            return x + jnp.tanh(x @ w[i]), None

        return lax.scan(layer, x, rows(given))[0] @ w[0]

    args = jnp.ones((12, 16, 16)), X, jnp.arange(12)
    rewritten = trace(mixed_precision(fun, "mixed_bfloat16"), args)
    carried = {v.aval for e in eqns(rewritten, "scan") for v in e.outvars}
    assert {str(a.dtype) for a in carried if a.shape == X.shape} == {dtype}


def numbered(p, xs):
    def loss(p, x):
        def layer(i, x):
            return x + jax.nn.gelu(x @ p["w"][i] + p["bias"]) @ p["u"][i]

        x = lax.fori_loop(0, DEPTH, layer, x @ p["embedding"])
        return jnp.mean((x @ p["head"]) ** 2)

    return sgd(loss)(p, xs[0])


HALF_STREAMS = SCANNED | LAYERED | {"numbered": numbered}
HALF_STREAMS |= {"through train steps": through_steps}


def by_number(layer, start, step):
    """Layers that a loop numbers itself."""

    def fun(w, x):
        def body(carry, _):
            i, x = carry
            return (i + step, layer(x, w[i])), None

        return lax.scan(body, (start, x), None, length=len(w))[0][1]

    return fun


def by_fori_loop(layer):
    def fun(w, x):
        return lax.fori_loop(0, len(w), lambda i, x: layer(x, w[len(w) - 1 - i]), x)

    return fun


def by_nested_loops(layer):
    """Twice through the same layers."""

    def again(w, x):
        return lax.fori_loop(0, 2, lambda _, x: by_fori_loop(layer)(w, x), x)

    return again


def residual(x, w):
    return x + jnp.tanh(x @ w)


NUMBERED = {
    "fori_loop": (by_fori_loop(residual), "bfloat16"),
    "checkpointed": (by_fori_loop(jax.checkpoint(residual)), "bfloat16"),
    "every other": (
        lambda w, x: lax.fori_loop(
            0, 6, lambda i, x: residual(residual(x, w[2 * i]), w[2 * i + 1]), x
        ),
        "bfloat16",
    ),
    "none": (
        lambda w, x: lax.fori_loop(0, 6, lambda i, x: residual(x, w[0 * i]), x),
        "float32",
    ),
    "a carry": (by_number(residual, 0, 1), "bfloat16"),
    "a carry, the same": (by_number(residual, 0, 0), "float32"),
    "nested": (by_nested_loops(residual), "float32"),
    "nested, checkpointed": (by_nested_loops(jax.checkpoint(residual)), "float32"),
}


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("name", NUMBERED)
def test_a_loop_may_number_its_layers(name, differentiated):
    run, dtype = NUMBERED[name]

    def loss(w, x):
        return jnp.mean((run(w, x @ w[0]) @ w[0]) ** 2)

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    fun = step if differentiated else loss
    args = jnp.ones((12, 16, 16)), jnp.ones((8, 16))
    rewritten = trace(mixed_precision(fun, "mixed_bfloat16"), args)
    kept = [v.aval for e in eqns(rewritten, "scan") for v in e.outvars]
    assert {str(a.dtype) for a in kept if a.shape == (8, 16)} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HALF_STREAMS)
def test_half_streams_hold_the_law(name, device, policy):
    def draw(rng):
        p = {
            "embedding": normal(rng, WIDTH, WIDTH, scale=WIDTH**-0.5),
            "head": normal(rng, WIDTH, 8, scale=WIDTH**-0.5),
            "more": normal(rng, 2, DEPTH, WIDTH, WIDTH, scale=WIDTH**-0.5),
            "bias": normal(rng, WIDTH, scale=0.1),
        }
        p |= {k: normal(rng, DEPTH, WIDTH, WIDTH, scale=WIDTH**-0.5) for k in "wu"}
        return p, normal(rng, 4, 64, WIDTH)

    judged = judge(HALF_STREAMS[name], draw)
    rewritten = mixed_precision_jaxpr(judged.closed, policy)
    for verdict in judged.verdicts(policy, device, rewritten):
        assert verdict.holds, verdict
