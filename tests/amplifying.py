"""Programs that multiply an error of rounding: what half precision by hand survives.

`python tests/amplifying.py` prints a table of their errors, by policy and device.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from by_hand import DEVICES
from jax import lax
from judge import EPS, Judge, Verdict
from programs import PROGRAMS

from jmp_rewrite import mixed_precision, mixed_precision_jaxpr

f32 = np.float32
POLICIES = ("mixed_bfloat16", "mixed_float16")
# The tests' programs but those that hold collectives, mutable arrays or calls of
# Python: of these no equation stands for what a device computes.
_UNSUITED = {"shard_map", "pmap", "references", "callbacks"}
SUITED = [p for p in PROGRAMS if p.name not in _UNSUITED]


class Case(NamedTuple):
    """A program, and how its arguments are drawn.

    Attributes:
      name: names the test.
      fun: returns a tree of arrays.
      draw: makes the arguments, with a `numpy.random.RandomState`.
      grad: which arguments are differentiated with respect to; empty for none.
      exact: whether it copies or counts, so that half may change nothing.
    """

    name: str
    fun: Callable[..., Any]
    draw: Callable[[np.random.RandomState], tuple[Any, ...]]
    grad: tuple[int, ...] = (0,)
    exact: bool = False

    def __repr__(self) -> str:
        return self.name


def normal(rng: Any, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Any:
    return np.asarray(rng.randn(*shape) * scale + mean, f32)


def shuffled(leaves: list[Any], seed: int) -> list[Any]:
    """Returns arrays of floats with their numbers in another order, others as given."""
    rng = np.random.RandomState(seed)

    def move(x: Any) -> Any:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return rng.permutation(np.ravel(x)).reshape(x.shape)

    return [move(x) for x in leaves] if seed else leaves


def scalar(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss: the sum of the results, each with a weight of its own."""

    def loss(*args: Any) -> Any:
        total = f32(0)
        for x in jax.tree.leaves(fun(*args)):
            if jnp.issubdtype(x.dtype, jnp.floating):
                weights = np.cos(np.arange(x.size, dtype=f32)).reshape(x.shape)
                total += jnp.sum(x * weights)
        return total

    return loss


def gradient(case: Case) -> Callable[..., Any]:
    return jax.value_and_grad(scalar(case.fun), case.grad)


def forms(case: Case) -> dict[str, Callable[..., Any]]:
    """Returns the functions to judge: the program, and its gradient."""
    if not case.grad:
        return {"forward": case.fun}
    return {"forward": case.fun, "gradient": gradient(case)}


# ---- 1. state: slices and draws, updated in steps


def ensemble_member(ws, x, y):
    """One member of a stacked ensemble, trained for four steps; its change."""
    w = ws[0]
    for _ in range(4):
        w = w - f32(1e-3) * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
    return w - ws[0]


def ensemble_args(rng):
    return normal(rng, 2, 16, 8, scale=0.5), normal(rng, 32, 16), normal(rng, 32, 8)


def drawn_member(x, y):
    """A network whose weights are drawn inside, trained for four steps."""
    start = jax.random.normal(jax.random.key(0), (16, 8)) * f32(0.5)
    w = start
    for _ in range(4):
        w = w - f32(1e-3) * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
    return w - start


def rollout(traj, w):
    """A trajectory near 1000 from a slice of the data; its change."""
    y = traj[0]
    for _ in range(3):
        y = y + f32(1e-2) * jnp.tanh((y - f32(1000)) @ w)
    return y - traj[0]


def rollout_args(rng):
    return normal(rng, 2, 8, 8, mean=1000), normal(rng, 8, 8, scale=0.5)


def mean_of_members(ws, x):
    """The mean of stacked weights, updated; its change."""
    start = ws.mean(0)
    w = start
    for _ in range(3):
        w = w - f32(1e-3) * (x.T @ jnp.tanh(x @ w)) / f32(32)
    return w - start


def padded(w, x):
    """A padded weight, updated; its change."""
    start = jnp.pad(w, ((0, 4), (0, 0)))
    w = start
    for _ in range(3):
        w = w - f32(1e-3) * (x.T @ jnp.tanh(x @ w)) / f32(32)
    return w - start


# ---- 2. offsets and units


def units(x, w1, w2, mean, std):
    y = (x @ w1) * std + mean
    return ((y - mean) / std) @ w2


def units_args(rng):
    mean, std = np.full(16, 101325, f32), np.full(16, 1000, f32)
    x, w1, w2 = normal(rng, 32, 8), normal(rng, 8, 16, scale=0.35), normal(rng, 16, 8)
    return x, w1, w2 * f32(0.25), mean, std


def td_error(params, s, t, r):
    """A temporal difference of values near 5000."""
    w1, w2, mean = params
    value = lambda x: (jnp.tanh(x @ w1) @ w2) * f32(50) + mean  # noqa: E731
    return r + f32(0.99) * value(t) - value(s)


def td_args(rng):
    params = (
        normal(rng, 8, 16, scale=0.35),
        normal(rng, 16, 1, scale=0.25),
        np.full((1, 1), 5000, f32),
    )
    s, r = normal(rng, 32, 8), normal(rng, 32, 1, mean=50)
    return params, s, s + normal(rng, 32, 8, scale=0.5), r


# ---- 3. products that float32 code alone reads


def gram_cholesky(x):
    eye = jnp.eye(64, dtype=jnp.float32)
    return jnp.linalg.cholesky(x @ x.T + f32(1e-2) * eye)


def covariance(x):
    return jnp.cov(x.T)


def counts(i):
    return (i @ i.T).astype(jnp.int32)


# ---- 4. the range of float16


def quadratic_form(d):
    return jnp.einsum("bi,ij,bj->b", d, f32(1e6) * jnp.eye(8, dtype=jnp.float32), d)


def squared_norms(r):
    return jnp.einsum("ij,ij->i", r, r)


# ---- 5. copies


def patches(x):
    """Patches of 12-bit pixels."""
    return lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "SAME")


def pixels(rng):
    return (rng.randint(0, 4096, (1, 2, 8, 8)).astype(f32),)


# ---- 6. coordinates


def pair_energy(w, positions):
    """An interatomic potential: sines of distances, and messages of differences."""
    w1, w2, frequencies = w
    d = positions[:, None] - positions[None]
    r = jnp.sqrt((d * d).sum(-1) + f32(1e-2))
    waves = jnp.sin(r[..., None] * frequencies) / r[..., None]
    vectors = jnp.einsum("ijf,ijc->ifc", jnp.tanh(waves @ w1), d)
    return jnp.sum((vectors**2).sum(-1) @ w2)


def energy_and_forces(w, positions):
    return jax.value_and_grad(pair_energy, 1)(w, positions)


def potential_args(rng):
    frequencies = np.arange(1, 9, dtype=f32) * f32(np.pi / 2)
    w = normal(rng, 8, 16, scale=0.3), normal(rng, 16, 1, scale=0.25), frequencies
    return w, normal(rng, 12, 3, scale=3)


def potential_loss(w, positions, energy, forces):
    """The loss of an interatomic potential, of its energy and forces."""
    e, f = energy_and_forces(w, positions)
    return (e - energy) ** 2 * f32(1e-2) + jnp.mean((f + forces) ** 2)


def potential_loss_args(rng):
    w, positions = potential_args(rng)
    return w, positions, normal(rng), normal(rng, 12, 3)


# ---- 7. a small value whose sum is a bias' gradient


def bias_step(params, state, x, y):
    """A step of SGD with momentum: the last layer has one output, four examples."""

    def loss(params):
        w1, w2, b = params
        out = jnp.tanh(x @ w1) @ w2 + b
        return jnp.mean((out - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optax.sgd(1e-2, momentum=0.9).update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def bias_args(rng):
    w1, w2 = normal(rng, 8, 16, scale=0.35), normal(rng, 16, 1, scale=0.25)
    params = w1, w2, np.zeros((1, 1), f32)
    x = normal(rng, 4, 8)
    y = np.tanh(x @ w1) @ w2 + normal(rng, 4, 1)
    y -= (y - np.tanh(x @ w1) @ w2).mean() * f32(0.98)  # differences nearly cancel
    return params, optax.sgd(1e-2, momentum=0.9).init(params), x, y


# ---- 8. a carry that is computed without a maximum


def carried_scores(t, xs, w, v):
    """A chain's scores, written without a maximum, and what a layer makes of them."""
    emissions = xs @ w

    def step(a, e):
        a = jnp.log(jnp.sum(jnp.exp(a[:, None] + t), 0)) + e
        return a, a

    return lax.scan(step, jnp.zeros(8, jnp.float32), emissions)[1] @ v


def scores_args(rng):
    t, xs = normal(rng, 8, 8), normal(rng, 24, 8)
    return t, xs, normal(rng, 8, 8, scale=0.3), normal(rng, 8, 8)


# ---- 9. tables that activations are multiplied by


def tied_stream(table, w, v):
    """A residual stream of rows of the table of its head, between two norms."""

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + f32(1e-5))

    x = table[np.arange(24) % 16]
    x = x + jnp.tanh(norm(x) @ w) @ v
    return jax.nn.log_softmax(norm(x) @ table.T)


def tied_args(rng):
    return normal(rng, 16, 8), normal(rng, 8, 16, scale=0.35), normal(rng, 16, 8)


def codebook(table, x, w, v):
    """The nearest codes, their distance from what was coded, and a layer of them."""
    z = jnp.tanh(x @ w)
    nearest = jnp.argmin((table * table).sum(-1) - 2 * z @ table.T, -1)
    q = table[lax.stop_gradient(nearest)]
    return q - z, (z + lax.stop_gradient(q - z)) @ v


def codebook_args(rng):
    codes, x = normal(rng, 4, 8, scale=0.5), normal(rng, 32, 8)
    return codes, x, normal(rng, 8, 8, scale=0.35), normal(rng, 8, 8)


# ---- 10. what a network computed, near a number or beside its mean


def network(ws, x):
    return jnp.maximum(x @ ws[0] + ws[1], 0) @ ws[2] + ws[3]


def network_args(rng):
    ws = normal(rng, 8, 32, scale=0.5), normal(rng, 32, scale=0.3)
    ws += normal(rng, 32, 6, scale=0.75), normal(rng, 6, scale=0.3)
    return (*ws, normal(rng, 6, 4), normal(rng, 6, 4)), normal(rng, 32, 8)


def wide_args(rng):
    ws = normal(rng, 16, 64, scale=0.25), normal(rng, 64, scale=0.1)
    ws += normal(rng, 64, 10, scale=0.12), normal(rng, 10, scale=0.1)
    return ws, normal(rng, 64, 16)


def noise_schedule(ws, x, e, t):
    """A diffusion model that learns how much noise to add: sqrt(1 - alpha ** 2)."""
    alpha = jax.nn.sigmoid(jnp.tanh(t @ ws[0] + ws[1]) @ ws[2] + 5 * t + 2)
    z = alpha * x + jnp.sqrt(1 - alpha**2) * e
    return jnp.mean((jnp.tanh(z @ ws[3]) @ ws[4] - e) ** 2)


def noise_args(rng):
    ws = normal(rng, 1, 16), normal(rng, 16), normal(rng, 16, 1, scale=0.2)
    ws += normal(rng, 8, 16, scale=0.4), normal(rng, 16, 8, scale=0.3)
    t = np.asarray(rng.uniform(0, 1, (32, 1)), f32)
    return ws, normal(rng, 32, 8), normal(rng, 32, 8), t


def complement(ws, x):
    """The quotient by what is left to one, beside a layer of the value itself."""
    a = jax.nn.sigmoid(network(ws, x))
    return a @ ws[4], (1 / (1 - a + 1e-4)) @ ws[5]


def excess(ws, x):
    a = jnp.exp(0.01 * network(ws, x))
    return a @ ws[4], (a - 1) @ ws[5]


def compound(ws, x):
    a = 1 + 0.01 * jnp.tanh(network(ws, x))
    return a @ ws[4], (a**200.0) @ ws[5]


def survival(ws, x):
    a = 1 - 0.01 * jax.nn.sigmoid(network(ws, x))
    return a @ ws[4], (1 - jnp.cumprod(a, -1)) @ ws[5]


def compound_by_squares(ws, x):
    a = 1 + 0.01 * jnp.tanh(network(ws, x))
    power = a
    for _ in range(7):
        power = power * power
    return a @ ws[4], power @ ws[5]


def survival_of_all(ws, x):
    a = 1 - 0.02 * jax.nn.sigmoid(network(ws, x))
    return a @ ws[4], jnp.prod(a, -1, keepdims=True) * jnp.tanh(a @ ws[5])


def turns(ws, x):
    """Positions near 500, of which the part after the point counts."""
    position = 3 * network(ws, x) + np.full(6, 500, "f4")
    return (position % 1.0) @ ws[4]


def leaky(ws, x):
    """A linear recurrence whose states last for a hundred steps."""
    decay = jax.nn.sigmoid(x @ ws[0] + 5)

    def step(state, now):
        decay, drive = now
        state = decay * state + drive
        return state, state

    start = jnp.zeros(decay.shape[1:])
    return lax.scan(step, start, (decay, x @ ws[1]))[1] @ ws[2]


def leaky_in_parallel(ws, x):
    decay = jax.nn.sigmoid(x @ ws[0] + 5)

    def combine(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    return lax.associative_scan(combine, (decay, x @ ws[1]))[1] @ ws[2]


def recurrence_args(rng):
    ws = normal(rng, 8, 16, scale=0.2), normal(rng, 8, 16, scale=0.3)
    return (*ws, normal(rng, 16, 8, scale=0.3)), normal(rng, 128, 2, 8)


def trained(fun):
    """Returns the gradient of a function, which is decorated with it."""

    def of(ws, x):
        return jax.grad(scalar(fun))(ws, x)

    return of


def returned(fun):
    """Returns the gradient of a loss of a function's result, and that result."""

    def of(ws, x):
        def loss(ws):
            value = fun(ws, x)
            of_each = value.reshape(len(x), -1).sum(-1)
            return jnp.square(3 * of_each - x[:, 0]).mean(), value

        return jax.grad(loss, has_aux=True)(ws)

    return of


def scaled_to_range(ws, x, there):
    """Between the smallest and the largest of a batch, near 300."""
    y = x @ ws[0] + there
    low, high = y.min(0), y.max(0)
    return ((y - low) / (high - low)) @ ws[2]


def relative_rewards(ws, x, rewards):
    """Rewards near 100, normalized in each group: no layer reads them."""
    log_p = jax.nn.log_softmax(network(ws, x)).reshape(4, 8, 6)
    reward = (jnp.exp(log_p) * rewards).sum(-1)
    spread = reward.std(1, keepdims=True) + 1e-4
    advantage = (reward - reward.mean(1, keepdims=True)) / spread
    return -(advantage * log_p.max(-1)).mean()


def actor(ws, x, advantages):
    """The loss of an actor over all its actions, whose values are near 500."""
    log_p = jax.nn.log_softmax(network(ws, x))
    values = 500 + advantages
    return (jnp.exp(log_p) * (0.2 * log_p - values)).sum(-1).mean()


def correlation(w, ws, x, y):
    """One minus the correlation of outputs near 300 with what is wanted."""
    a = network((*ws[:2], w, ws[3]), x) * 5 + 300
    a, b = a - a.mean(0), y - y.mean(0)
    return 1 - ((a * b).sum(0) / jnp.sqrt((a * a).sum(0) * (b * b).sum(0))).mean()


def correlation_args(rng):
    ws, x = network_args(rng)
    return ws[2], ws, x, normal(rng, 32, 6)


# ---- 11. what is spread over segments, transparencies, weights that are computed


def limited(ws, x):
    """What is limited to a number that half has not got, and compared with it."""
    h = network(ws, x)
    least, range_ = jnp.maximum(h, 0.3), jnp.clip(h, -0.9, 0.9)
    over = jnp.where(least > 0.3, least, 0.0)
    inside = jnp.where(jnp.abs(range_) >= 0.9, 0.0, range_)
    return over @ ws[4] + inside @ ws[5]


def segments(ws, x, of):
    """Mean, deviation and maximum of segments, some of which hold one row."""
    h = network(ws, x)
    count = jax.ops.segment_sum(np.ones((32, 1), "f4"), of, 12) + 1e-6
    mean = jax.ops.segment_sum(h, of, 12) / count
    variance = jax.ops.segment_sum(h * h, of, 12) / count - mean * mean
    spread = jnp.sqrt(jax.nn.relu(variance) + 1e-5)
    largest = jnp.where(count > 0.5, jax.ops.segment_max(h, of, 12), 0)
    return jnp.concatenate([mean, spread, largest], -1) @ ws[6]


def segments_args(rng):
    ws, x = network_args(rng)
    return (*ws, normal(rng, 18, 6, scale=0.3)), x, rng.randint(0, 12, 32)


def rendered(ws, x):
    """What is seen along rays through 128 places, each of which is almost clear."""
    h = network(ws, x)
    density = 0.03 * jax.nn.softplus(h[..., 0] - 1)
    alpha = 1 - jnp.exp(-density)
    left = jnp.exp(-jnp.cumsum(density, -1))
    seen = ((alpha * left)[..., None] * jax.nn.sigmoid(h[..., 1:4])).sum(1)
    return jnp.square(seen - 0.4).mean()


def merged(ws, x):
    """A recurrent layer whose weight is computed, of 128 steps."""
    w = ws[0] / jnp.linalg.norm(ws[0], axis=0) * 0.8

    def step(h, now):
        h = jnp.tanh(h @ w + now @ ws[1])
        return h, h

    return lax.scan(step, jnp.zeros((2, 16)), x)[1] @ ws[2]


def merged_args(rng):
    ws = normal(rng, 16, 16), normal(rng, 8, 16, scale=0.3)
    return (*ws, normal(rng, 16, 8, scale=0.3)), normal(rng, 128, 2, 8)


def stationary(w, x):
    """Where a Markov chain is after 40 steps."""
    moves, start = jax.nn.softmax(w), np.full((8, 32), 1 / 32, "f4")
    there = lax.scan(lambda d, _: (d @ moves, None), start, None, 40)[0]
    return jnp.mean(jnp.log(there + 1e-6) * x)


def certainty(ws, x):
    """How far a softmax of near values is from a uniform one."""
    p = jax.nn.softmax(0.3 * network(ws, x))
    return 1 + (p * jnp.log(p)).sum(-1) / np.log(10).astype("f4")


def bipolar(ws, x):
    """Sigmoids near a half, and what is left of them."""
    s = jax.nn.sigmoid(0.1 * network(ws, x))
    return (2 * s - 1) * (s + 1)


def similarity(w, x, seen):
    """Structural similarity in windows, whose sums ask for the highest precision."""
    window = np.full((5, 1, 1), 0.2, "f4")

    def mean(y):
        dims = ("NWC", "WIO", "NWC")
        highest = lax.Precision.HIGHEST
        return lax.conv_general_dilated(
            y[..., None],
            window,
            (1,),
            "VALID",
            dimension_numbers=dims,
            precision=highest,
        )[..., 0]

    y = jax.nn.sigmoid(jnp.tanh(x @ w[0]) @ w[1] + w[2])
    a, b = mean(y), mean(seen)
    spread = mean(y * y) - a * a + mean(seen * seen) - b * b
    shared = mean(y * seen) - a * b
    alike = (2 * a * b + 1e-4) * (2 * shared + 9e-4)
    return 1 - (alike / ((a * a + b * b + 1e-4) * (spread + 9e-4))).mean()


def similarity_args(rng):
    w = normal(rng, 8, 32, scale=0.4), normal(rng, 32, 64, scale=0.1)
    w += (normal(rng, 64, scale=0.1),)
    return w, normal(rng, 16, 8), rng.uniform(0.4, 0.6, (16, 64)).astype("f4")


def resampled(ws, x, seen, picked):
    """Particles that a network moves 30 times; after each, some are picked again."""
    loss = 0.0
    for now in picked:
        x = x + 0.1 * (jnp.tanh(x @ ws[0] + ws[1]) @ ws[2] + ws[3])
        loss += jnp.square(jnp.tanh(x @ ws[4]) @ ws[5] - seen).mean()
        x = x[now]
    return loss


def resampled_args(rng):
    ws = normal(rng, 4, 32, scale=0.5), normal(rng, 32, scale=0.1)
    ws += normal(rng, 32, 4, scale=0.2), normal(rng, 4, scale=0.1)
    ws += normal(rng, 4, 32, scale=0.5), normal(rng, 32, 4, scale=0.2)
    x, seen = normal(rng, 128, 4), normal(rng, 128, 4)
    return ws, x, seen, rng.randint(0, 128, (30, 128))


def components(ws, x, seen):
    """An integrator whose state is updated one component after the other."""
    loss = 0.0
    for _ in range(40):
        change = 0.1 * (jnp.tanh(x @ ws[0] + ws[1]) @ ws[2] + ws[3])
        x = jnp.stack([x[:, 0] + change[:, 0], x[:, 1] + change[:, 1]], -1)
        loss += jnp.square(jnp.tanh(x @ ws[4]) @ ws[5] - seen).mean()
    return loss


def components_args(rng):
    ws = normal(rng, 2, 32, scale=0.7), normal(rng, 32, scale=0.1)
    ws += normal(rng, 32, 2, scale=0.2), normal(rng, 2, scale=0.1)
    ws += normal(rng, 2, 32, scale=0.7), normal(rng, 32, 2, scale=0.2)
    return ws, normal(rng, 512, 2), normal(rng, 512, 2)


def moved(ws, s, how):
    """What a network adds to a state, small beside it, 24 times."""
    start = s = s @ ws[0]
    for step in range(24):
        s = how(lambda s: s + 0.01 * (jnp.tanh(s @ ws[1] + ws[2]) @ ws[3] + ws[4]), s)
        s = s + 1e-3 * (step % 3 - 1)  # what comes from outside
    return jnp.square((s - start) @ ws[5]).mean()


def moved_args(rng):
    ws = normal(rng, 6, 8), normal(rng, 8, 32, scale=0.4), normal(rng, 32, scale=0.1)
    ws += normal(rng, 32, 8, scale=0.2), normal(rng, 8, scale=0.1), normal(rng, 8, 8)
    return ws, normal(rng, 64, 6)


def branched(ws, s):
    return moved(ws, s, lambda f, s: lax.cond(s[0, 0] < 1e9, f, lambda s: s, s))


def chosen(ws, s):
    return moved(ws, s, lambda f, s: jnp.where(s < 1e9, f(s), s))


def on_a_sphere(ws, s):
    """Divided by its norm after each update."""

    def step(f, s):
        s = f(s)
        return s / jnp.linalg.norm(s, axis=1, keepdims=True)

    return moved(ws, s, step)


def growth(ws, s, target):
    """A state that is multiplied by a number near one, computed from itself."""

    def step(s, _):
        rate = jnp.tanh(jnp.log(s) @ ws[0] + ws[1]) @ ws[2] + ws[3]
        return s * (1 + 0.02 * rate), None

    s, _ = lax.scan(step, s, None, 100)
    return jnp.square(jnp.log(s) - jnp.log(target)).mean()


def growth_args(rng):
    ws = normal(rng, 8, 32, scale=0.4), normal(rng, 32, scale=0.1)
    ws += normal(rng, 32, 8, scale=0.2), normal(rng, 8, scale=0.1)
    return (
        ws,
        np.exp(normal(rng, 64, 8, scale=0.3)),
        np.exp(normal(rng, 64, 8, scale=0.3)),
    )


def slow_gate(ws, xs, target):
    """A gated recurrent unit whose update gate is open by bias."""
    w, u, v, bias, out = ws

    def step(h, x):
        a, b = x @ w + bias, h @ u
        z, r = (jax.nn.sigmoid(a[:, n : n + 16] + b[:, n : n + 16]) for n in (0, 16))
        return z * h + (1 - z) * jnp.tanh(a[:, 32:] + r * (h @ v)), None

    h, _ = lax.scan(step, jnp.zeros((32, 16)), xs)
    return jnp.square(h @ out - target).mean()


def slow_gate_args(rng):
    ws = normal(rng, 4, 48, scale=0.5), normal(rng, 16, 32, scale=0.12)
    ws += normal(rng, 16, 16, scale=0.25), np.full(48, 4, f32), normal(rng, 16, 4)
    ws[3][16:] = normal(rng, 32, scale=0.1)
    return ws, normal(rng, 100, 32, 4), normal(rng, 32, 4)


def picked(ws, x, target):
    """The bins of a spline: knots of two arrays that are stacked, one-hot vectors."""
    a, b, w, c, o, v = ws
    h = jnp.tanh(x @ a + b) @ w + c
    knots = jnp.cumsum(jax.nn.softmax(h[:, :32]), -1)
    both = jnp.stack([knots, jnp.tanh(h[:, 32:])], -1)
    mask = jax.nn.one_hot(jnp.arange(len(x)) * 7 % 31, 31)[..., None]
    right, left = (mask * both[:, 1:]).sum(1), (mask * both[:, :-1]).sum(1)
    width = 32 * (right - left)[:, :1]
    return jnp.square(jnp.tanh(width * o + both[:, 0, 1:]) @ v - target).mean()


def picked_args(rng):
    ws = normal(rng, 8, 32, scale=0.35), normal(rng, 32, scale=0.1)
    ws += normal(rng, 32, 64, scale=0.18), normal(rng, 64, scale=0.1)
    ws += normal(rng, 24), normal(rng, 24, 16, scale=0.2)
    return ws, normal(rng, 48, 8), normal(rng, 48, 16)


# ---- 12. what the loss itself takes off, beside layers that read the same values


def near_uniform(ws, x):
    """A discrete code whose divergence from a uniform one is small, and its decoder."""
    logs = jax.nn.log_softmax(0.05 * network(ws, x).reshape(-1, 2, 5))
    p = jnp.exp(logs)
    divergence = (p * (logs + np.log(5).astype("f4"))).sum((-1, -2))
    decoded = jnp.tanh(p.reshape(-1, 10) @ ws[4]) @ ws[5]
    return 1000 * divergence.mean() + jnp.square(decoded - x).mean()


def information(ws, x):
    """A thousand times what a softmax of near values lacks of the largest entropy."""
    p = jax.nn.softmax(0.05 * network(ws, x))
    return 1000 * (p * (jnp.log(p) + np.log(10).astype("f4"))).sum(-1).mean()


def critic(ws, batches):
    """A critic of two batches: the gradients of a weight's two uses all but cancel."""

    def score(x):
        for w in ws[:2]:
            x = jax.nn.softplus(x @ w)
        return (x @ ws[2]).mean()

    x, z = batches
    return score(x + z) - score(x)


def critic_args(rng):
    ws = normal(rng, 8, 48, scale=0.35), normal(rng, 48, 32, scale=0.15)
    return (*ws, normal(rng, 32, 1, scale=0.2)), normal(rng, 2, 64, 8)


def near_uniform_args(rng):
    ws, x = wide_args(rng)
    return (*ws, normal(rng, 10, 32, scale=0.3), normal(rng, 32, 16, scale=0.2)), x


def learned_sink(ws, x):
    """An attention with a learned score for nothing, far below the others."""
    query, value, score = ws
    scores = (x @ query) @ x.T / 4
    scores = jnp.concatenate([scores, jnp.broadcast_to(score, (len(x), 1))], -1)
    values = jnp.concatenate([x @ value, jnp.ones((1, 16), f32)])
    return jax.nn.softmax(scores) @ values


def pooled_with_sink(ws, x, y):
    """Positions pooled by a softmax that may choose none of them, with a bias."""
    hidden, score, bias, out = ws
    h = jnp.tanh(x @ hidden)
    scores = jnp.pad(h @ score + bias, ((0, 0), (0, 1), (0, 0)))
    weights = jax.nn.softmax(scores, 1)[:, :-1]
    pooled = jnp.einsum("bth,btd->bhd", weights, h).reshape(len(x), -1)
    return jnp.square(pooled @ out - y).mean()


def pooled_by_a_layer(ws, x, y):
    """With one score for each position, as a last layer of width one returns it."""
    hidden, score, bias, out = ws
    h = jnp.tanh(x @ hidden)
    scores = jnp.squeeze(h @ score[:, :1] + bias[:1], -1)
    weights = jax.nn.softmax(jnp.pad(scores, ((0, 0), (0, 1))))[:, :-1]
    return jnp.square(jnp.einsum("bt,btd->bd", weights, h) @ out[:24] - y).mean()


def pooled_beside_one(ws, x, y):
    hidden, score, bias, out = ws
    h = jnp.tanh(x @ hidden)
    weights = jnp.exp(h @ score + bias)
    weights = weights / (1 + weights.sum(1, keepdims=True))
    pooled = jnp.einsum("bth,btd->bhd", weights, h).reshape(len(x), -1)
    return jnp.square(pooled @ out - y).mean()


# ---- 13: losses of few numbers, each made of many


def predicted(ws, x):
    hidden, out, bias = ws
    return jnp.tanh(x @ hidden) @ out + bias


def few_args(outputs):
    def draw(rng):
        ws = normal(rng, 16, 64, scale=0.25), normal(rng, 64, outputs, scale=0.125)
        bias = normal(rng, outputs, scale=0.1)
        return (*ws, bias), normal(rng, 64, 16), normal(rng, 64, outputs)

    return draw


def with_gradient(loss):
    """Returns a loss and its gradient, as a whole step computes them."""
    return lambda ws, x, y: jax.value_and_grad(loss)(ws, x, y)


def entropic_risk(ws, x, y):
    """A logarithm of a mean of what is near one, as in deep hedging."""
    return 100 * jnp.log(jnp.exp(-0.01 * (predicted(ws, x) + y)).mean())


def free_energy(ws, x, y):
    work = 0.3 * predicted(ws, x) + 0.1 * y
    return -jnp.log(jnp.exp(-work).mean()) - work.mean()


def reweighted(ws, x, y):
    weight = jnp.exp(0.1 * predicted(ws, x))
    return (weight * y).sum() / weight.sum() - y.mean()


def log_returns(ws, x, y):
    """All but invariant to the last bias, whose gradient is a small sum."""
    prices = 300 + predicted(ws, x)
    return jnp.mean((300 * jnp.diff(jnp.log(prices), axis=0) - y[1:]) ** 2)


def value_differences(ws, x, y):
    value = lambda x: predicted(ws, x)[:, 0]  # noqa: E731
    gain = value(x) - 0.99 * value(x + 0.3 * y[:, :1])
    return jnp.log(jnp.exp(gain).mean()) - 0.01 * value(x[::-1]).mean()


def joined_features(ws, x, y):
    """Features with an offset are joined to what a network made, and normalized."""
    made = jnp.tanh(x @ ws[0]) @ ws[1]
    h = jnp.concatenate([made, 1000 + y], 1)
    h = (h - h.mean(0)) / (h.std(0) + 1e-3)
    return jnp.square(h @ ws[0][:12] - 0.5).mean()


def offset_in_halves(ws, x, y):
    """An offset that each half takes off again, in front of a layer."""
    parts = jnp.split(300 + predicted(ws, x), 2, axis=1)
    h = jnp.concatenate([a - a.mean(1, keepdims=True) for a in parts], 1)
    return jnp.square(h @ ws[1][:6] - y).mean()


def sink_args(rng):
    ws = normal(rng, 16, 16, scale=0.25), normal(rng, 16, 16, scale=0.25)
    return (*ws, np.asarray(-14, f32)), normal(rng, 32, 16)


def pooled_args(rng):
    ws = normal(rng, 8, 24, scale=0.35), normal(rng, 24, 4, scale=0.3)
    ws = (*ws, normal(rng, 4, scale=0.3), normal(rng, 96, 4, scale=0.2))
    return ws, normal(rng, 8, 64, 8), normal(rng, 8, 4)


def from_a_grid(ws, x):
    """How far exponentials near one are from numbers near one."""
    grid = np.linspace(0.99, 1.01, 10, dtype="f4")
    return grid - jnp.exp(0.1 * network(ws, x))


def _x(scale: float = 1.0, mean: float = 0.0, shape: Any = (32, 8)) -> Any:
    return lambda rng: (normal(rng, *shape, scale=scale, mean=mean),)


CASES = [
    Case("1_ensemble_member", ensemble_member, ensemble_args),
    Case("1_drawn_member", drawn_member, lambda r: ensemble_args(r)[1:]),
    Case("1_rollout", rollout, rollout_args, (0, 1)),
    Case(
        "1_mean_of_members",
        mean_of_members,
        lambda r: (normal(r, 4, 8, 8), normal(r, 32, 8)),
    ),
    Case("1_padded", padded, lambda r: (normal(r, 4, 8), normal(r, 32, 8))),
    Case("2_units", units, units_args, (0, 1, 2)),
    Case("2_td_error", td_error, td_args),
    Case("3_cholesky", gram_cholesky, _x(3, shape=(64, 8)), ()),
    Case("3_covariance", covariance, _x(1, 2000)),
    Case("3_counts", counts, lambda r: (r.randint(0, 64, (16, 8)).astype(f32),), ()),
    Case("4_quadratic_form", quadratic_form, _x()),
    Case("4_squared_norms", squared_norms, _x(1e3, 3e4)),
    Case("5_patches", patches, pixels, (), exact=True),
    Case("6_energy_and_forces", energy_and_forces, potential_args, ()),
    Case("6_potential", potential_loss, potential_loss_args),
    Case("7_bias", bias_step, bias_args, ()),
    Case("8_carried_scores", carried_scores, scores_args, (0, 1, 2)),
    Case("9_tied_stream", tied_stream, tied_args, (0, 1, 2)),
    Case("9_codebook", codebook, codebook_args, (0, 1, 2, 3)),
    Case("10_noise_schedule", noise_schedule, noise_args),
    Case("10_complement", complement, network_args, ()),
    Case("10_excess", excess, network_args, ()),
    Case("10_compound", compound, network_args, ()),
    Case("10_survival", survival, network_args, ()),
    Case("10_compound_by_squares", compound_by_squares, network_args, ()),
    Case("10_survival_of_all", survival_of_all, network_args, ()),
    # Decorated before they are differentiated, these are twice as far off as by hand.
    Case("10_leaky", leaky, recurrence_args, ()),
    Case("10_leaky_trained", trained(leaky), recurrence_args, ()),
    Case("10_leaky_in_parallel", leaky_in_parallel, recurrence_args, ()),
    Case(
        "10_leaky_in_parallel_trained", trained(leaky_in_parallel), recurrence_args, ()
    ),
    Case(
        "10_scaled_to_range",
        scaled_to_range,
        lambda r: (*network_args(r), normal(r, 32, mean=300)),
        (),
    ),
    Case("10_turns", turns, network_args, ()),
    Case(
        "10_relative_rewards",
        relative_rewards,
        lambda r: (*network_args(r), normal(r, 4, 8, 6, mean=100)),
    ),
    Case(
        "10_actor",
        actor,
        lambda r: (
            network_args(r)[0][:4],
            normal(r, 32, 8),
            normal(r, 32, 6, mean=500),
        ),
    ),
    Case("10_correlation", correlation, correlation_args),
    Case("11_limited", limited, network_args, ()),
    Case("11_segments", segments, segments_args),
    Case(
        "11_rendered",
        rendered,
        lambda r: (network_args(r)[0][:4], normal(r, 8, 128, 8)),
    ),
    Case("11_certainty", returned(certainty), wide_args, ()),
    Case("11_bipolar", returned(bipolar), wide_args, ()),
    Case("11_similarity", similarity, similarity_args),
    Case("11_merged", merged, merged_args),
    Case(
        "11_stationary_trained",
        trained(stationary),
        lambda r: (normal(r, 32, 32), normal(r, 8, 32, mean=3)),
        (),
    ),
    Case("1_resampled", resampled, resampled_args),
    Case("1_components", components, components_args),
    Case("1_branched", branched, moved_args),
    Case("1_chosen", chosen, moved_args),
    Case("1_on_a_sphere", on_a_sphere, moved_args),
    Case("1_growth", growth, growth_args),
    Case("1_slow_gate", slow_gate, slow_gate_args),
    Case("2_picked", picked, picked_args),
    # Decorated before it is differentiated, it is five times as far off as by hand.
    Case("12_near_uniform_trained", trained(near_uniform), near_uniform_args, ()),
    Case("12_critic_trained", trained(critic), critic_args, ()),
    Case("12_information_trained", trained(information), wide_args, ()),
    Case("12_from_a_grid", returned(from_a_grid), wide_args, ()),
    Case("12_learned_sink", learned_sink, sink_args),
    Case("12_pooled_with_sink", with_gradient(pooled_with_sink), pooled_args, ()),
    Case("12_pooled_by_a_layer", with_gradient(pooled_by_a_layer), pooled_args, ()),
    Case("12_pooled_beside_one", with_gradient(pooled_beside_one), pooled_args, ()),
    # Whole steps: by hand, a loss is float32 as well.
    Case("13_entropic_risk", with_gradient(entropic_risk), few_args(1), ()),
    Case("13_free_energy", with_gradient(free_energy), few_args(1), ()),
    Case("13_reweighted", with_gradient(reweighted), few_args(1), ()),
    Case("13_log_returns", with_gradient(log_returns), few_args(6), ()),
    Case("13_joined_features", with_gradient(joined_features), few_args(6), ()),
    Case("13_offset_in_halves", with_gradient(offset_in_halves), few_args(6), ()),
    Case("13_value_differences", with_gradient(value_differences), few_args(6), ()),
]


def trace(fun: Any, args: Any) -> Any:
    """Returns a function's jaxpr under JAX's own promotion, as users write programs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.make_jaxpr(lambda *a: fun(*a))(*args)


def judge(fun: Any, draw: Any) -> Judge:
    """Returns the judge of a function; its results by hand are computed once."""
    args = draw(np.random.RandomState(0))
    tree = jax.tree.structure(args)
    closed = trace(fun, args)

    def flat(seed: int) -> list[Any]:
        drawn = draw(np.random.RandomState(seed))
        assert jax.tree.structure(drawn) == tree
        return jax.tree.leaves(drawn)

    return Judge(closed, flat)


def verdicts(case: Case, form: str, policy: str, device: str) -> list[Verdict]:
    """Judges one form of a case.

    The form "outside" is the gradient of a function that was rewritten before it was
    differentiated; it is judged by the whole gradient by hand.
    """
    if form == "outside":
        whole = judge_of(case, "gradient")
        outside = case._replace(fun=mixed_precision(case.fun, policy))
        args = case.draw(np.random.RandomState(0))
        rewritten = trace(gradient(outside), args)
    else:
        whole = judge_of(case, form)
        rewritten = mixed_precision_jaxpr(whole.closed, policy)
    found = whole.verdicts(policy, device, rewritten)
    return [v._replace(limit=0.0) for v in found] if case.exact else found


@functools.cache
def judge_of(case: Case, form: str) -> Judge:
    return judge(forms(case)[form], case.draw)


def table(names: list[str], show_all: bool) -> None:
    """Prints the errors of each case, in epsilons: ours beside those by hand."""
    print("in epsilons of the compute dtype; ours / by hand (limit); ! breaks the law")
    broken = total = 0
    for case in CASES:
        if names and not any(n in case.name for n in names):
            continue
        for form in (*forms(case), *(["outside"] if case.grad else [])):
            for policy in POLICIES:
                for device in DEVICES:
                    found = verdicts(case, form, policy, device)
                    total += 1
                    fine = all(v.holds for v in found)
                    broken += not fine
                    if fine and not show_all:
                        continue
                    cells = "  ".join(_cell(v, EPS[policy]) for v in found)
                    print(f"{case.name:20} {form:8} {policy[6:]:8} {device:11} {cells}")
    print(f"{broken} of {total} break the law")


def _cell(v: Verdict, epsilon: float) -> str:
    mark = "" if v.holds else "!"
    ours, hand, limit = (x / epsilon for x in (v.ours, v.hand, v.limit))
    return f"{mark}{ours:.3g}/{hand:.3g}({limit:.3g})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of cases' names")
    parser.add_argument("--all", action="store_true", help="rows that hold as well")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    table(options.names, options.all)
