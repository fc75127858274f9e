"""Index arithmetic: what is gathered, scattered and added up goes where it went.

The rewrite knows of integers whether they are distinct, numbers, or parts of larger
arrays, and makes selections, sums and moves of scatters. Random steps compute indices
in many ways, none of which reads what may be rounded, and use them in as many.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative_error
from jax import lax
from programs import normal

from jmp_rewrite import mixed_precision, use_passes

N, D = 12, 8
ROWS = jnp.arange(3)[:, None]

# Integers of shape (N,), of data: f32[N], f32[N, 4] and i32[N].
BASES = {
    "arange": lambda d: jnp.arange(N),
    "argsort": lambda d: jnp.argsort(d[0]),
    "data": lambda d: d[2] % N,
    "top_k": lambda d: lax.top_k(d[0], N)[1],
    "top_k of columns": lambda d: lax.top_k(d[1], 3, axis=0)[1].reshape(-1),
    "argsort of columns": lambda d: jnp.argsort(d[1], axis=0)[:, 0],
    "argsort of rows": lambda d: jnp.argsort(d[1], axis=1).reshape(-1)[:N],
    "argmax": lambda d: jnp.argmax(d[1], 1),
    "twice": lambda d: jnp.concatenate([jnp.arange(6), jnp.arange(6)]),
    "repeat": lambda d: jnp.repeat(jnp.arange(6), 2),
    "tile": lambda d: jnp.tile(jnp.arange(4), 3),
    "constant": lambda d: jnp.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]),
    "permutation": lambda d: jax.random.permutation(jax.random.key(1), N),
    "searchsorted": lambda d: jnp.searchsorted(jnp.sort(d[0]), d[0]),
    "nonzero": lambda d: jnp.nonzero(d[0] > 0, size=N, fill_value=0)[0],
    "columns": lambda d: lax.broadcasted_iota(jnp.int32, (3, 4), 1).reshape(-1),
    "rows": lambda d: lax.broadcasted_iota(jnp.int32, (3, 4), 0).reshape(-1),
    "sorted along": lambda d: lax.sort((d[0], jnp.arange(N)), num_keys=1)[1],
}


def joined(x, d):
    return jnp.concatenate([x[:, None], (d[2] % N)[:, None]], 1)


# Other integers of the same shape, of such ones.
CHANGES = {
    "reversed": lambda x, d: x[::-1],
    "roll": lambda x, d: jnp.roll(x, 3),
    "modulo": lambda x, d: (x + 1) % N,
    "halved": lambda x, d: x // 2,
    "clip": lambda x, d: jnp.clip(x, 2, 9),
    "transposed": lambda x, d: x.reshape(3, 4).T.reshape(-1),
    "another order": lambda x, d: x.reshape(3, 4).ravel(order="F"),
    "where": lambda x, d: jnp.where(d[0] > 0, x, 0),
    "from the end": lambda x, d: x - N // 2,
    "inverse": lambda x, d: jnp.argsort(x),
    "gathered": lambda x, d: x[d[2] % N],
    "first column": lambda x, d: joined(x, d)[:, 0],
    "second column": lambda x, d: joined(x, d)[:, 1],
    "third of three": lambda x, d: lax.select_n(
        jnp.full(N, 2, jnp.int32), x, x[::-1], d[2] % N
    ),
    "call": lambda x, d: jax.jit(lambda x: x)(x),
    "sliced": lambda x, d: lax.dynamic_slice(jnp.tile(x, 2), (d[2][0] % 5,), (N,)),
    "first": lambda x, d: jnp.broadcast_to(x[:1], (N,)),
    "branch": lambda x, d: lax.cond(d[0][0] > 0, lambda: x, lambda: x[::-1]),
    "carried": lambda x, d: lax.scan(lambda c, a: (a, c), x[0], x)[1],
    "mapped": lambda x, d: lax.map(lambda a: a, x.reshape(3, 4)).reshape(-1),
}


def scanned(turn, h, xs):
    return lax.scan(jax.checkpoint(turn), h, xs)[1]


# What indices are used for, of f32[N, D] and two of them.
USES = {
    "rows": lambda h, x, y: h[x],
    "rows of both": lambda h, x, y: h[x] + h[y],
    "points": lambda h, x, y: h[x, y % D][:, None] * h,
    "clipped": lambda h, x, y: jnp.take(h, x, axis=0, mode="clip"),
    "one of each row": lambda h, x, y: h * jnp.take_along_axis(h, (x % D)[:, None], 1),
    "one of each": lambda h, x, y: jax.vmap(lambda r, a: r[a % D] + r)(h, x),
    "segments": lambda h, x, y: jax.ops.segment_sum(h, x, N),
    "added to zeros": lambda h, x, y: jnp.zeros((N, D)).at[x].add(h),
    "added to one of each": lambda h, x, y: jax.vmap(
        lambda r, a: r.at[a % D].add(1.5 * r[0])
    )(h, x),
    "added": lambda h, x, y: h.at[x].add(h),
    "taken off": lambda h, x, y: h.at[x].subtract(0.5 * h[y]),
    "set": lambda h, x, y: h.at[x].set(2 * h[y]),
    "set to": lambda h, x, y: jnp.zeros((N, D)).at[x].set(h),
    "points added": lambda h, x, y: h.at[x, y % D].add(h[:, 0]),
    "points set": lambda h, x, y: h.at[x, y % D].set(h[:, 0]),
    "batched": lambda h, x, y: h.reshape(3, 4, D)[ROWS, x.reshape(3, 4) % 4].reshape(
        N, D
    ),
    "turns": lambda h, x, y: scanned(lambda c, a: (c, h[a[0]] + h[a[1]]), 0, (x, y)),
    "points of turns": lambda h, x, y: (
        h * scanned(lambda c, t: (c, h[t[0], t[1] % D]), 0, (jnp.arange(N), x))[:, None]
    ),
    "segments of turns": lambda h, x, y: lax.scan(
        lambda c, t: (c + jax.ops.segment_sum(*t, N), None),
        jnp.zeros((N, D)),
        (h.reshape(3, 4, D), x.reshape(3, 4)),
    )[0],
    "one-hot": lambda h, x, y: jax.nn.one_hot(x, N) @ h,
}


def program(seed):
    """A whole train step, its arguments, and the names of what it does."""
    draw = random.Random(seed)

    def pick(table, most=1):
        return [draw.choice(list(table)) for _ in range(draw.randint(1, most))]

    bases, uses = [pick(BASES)[0], pick(BASES)[0]], pick(USES, 2)
    changes = [pick(CHANGES, 2), pick(CHANGES, 2)]

    def indices(data):
        for base, names in zip(bases, changes, strict=True):
            x = BASES[base](data).astype(jnp.int32)
            for name in names:
                x = CHANGES[name](x, data).astype(jnp.int32)
            yield x

    def loss(ws, x, data):
        h = jnp.tanh(x @ ws[0])
        one, other = indices(data)
        for name in uses:
            h = jnp.nan_to_num(USES[name](h, one, other))  # rows that are not there
        return jnp.square(jnp.tanh(h @ ws[1])).mean()

    def step(ws, x, data):
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x, data))

    numbers = np.random.RandomState(seed)
    ws = [jnp.asarray(normal(D, D, seed=seed + i)) for i in range(2)]
    data = normal(N, seed=seed), normal(N, 4, seed=seed), numbers.randint(0, 50, N)
    return step, (ws, jnp.asarray(normal(N, D)), jax.tree.map(jnp.asarray, data))


@pytest.mark.breadth(one_in=48)
@pytest.mark.parametrize("seed", range(240))
def test_what_indices_move(seed):
    step, (ws, x, data) = program(seed)
    device = (None, "NVIDIA H200", "TPU v5e")[seed % 3]
    policy = ("mixed_bfloat16", "mixed_float16")[seed // 3 % 2]
    exact = jax.jit(step)(ws, x, data)
    with use_passes("all", device=device):
        found = jax.jit(mixed_precision(step, policy))(ws, x, data)
    for w, a, b in zip(ws, found, exact, strict=True):
        assert relative_error([w - a], [w - b]) < 2**-4
