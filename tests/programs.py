"""One list of programs, over which every law runs. A new program is one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

W = 8  # width of most layers


class Program(NamedTuple):
    """A function of the list, and arguments for it.

    Attributes:
      name: names the test.
      fun: the function.
      args: its arguments, made when a test asks for them.
      grad: whether its result is a float array and it can be differentiated with
        respect to its first argument, in reverse mode.
      products: how many matrix products its jaxpr shows at least that must be half.
    """

    name: str
    fun: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    grad: bool = True
    products: int = 1

    def __repr__(self) -> str:
        return self.name


def normal(*shape: int, seed: int = 0, scale: float = 0.5) -> np.ndarray:
    """Returns f32 numbers, the same ones each time."""
    return np.random.RandomState(seed + sum(shape)).randn(*shape).astype("f4") * scale


def weights(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns jax arrays of these shapes."""
    return tuple(jnp.asarray(normal(*s, seed=i)) for i, s in enumerate(shapes))


def mlp(params, x):
    w1, b1, w2 = params
    return jax.nn.relu(x @ w1 + b1[None]) @ w2


def mlp_args():
    return weights((W, W), (W,), (W, W)), *weights((4, W))


def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def attention(params, x):
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, w) for w in params)
    logits = jnp.einsum("bhte,bhse->bhts", q, k) / np.float32(2.0)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    logits = jnp.where(mask[None, None], logits, np.float32(-1e9))
    return jnp.einsum("bhts,bhse->bhte", jax.nn.softmax(logits), v)


def attention_args():
    return weights(*[(W, 2, 4)] * 3), *weights((2, 5, W))


def layer_norm(params, x):
    w1, scale, w2 = params
    h = x @ w1
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(
        h.var(-1, keepdims=True) + np.float32(1e-6)
    )
    return (h * scale[None]) @ w2


def conv_net(params, x):
    k1, k2 = params
    dn = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, k1, (1, 1), "SAME", dimension_numbers=dn)
    h = lax.reduce_window(
        jax.nn.relu(h), -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    h = lax.conv_general_dilated(h, k2, (1, 1), "SAME", dimension_numbers=dn)
    return h.mean((1, 2))


def conv_args():
    return weights((3, 3, 2, 4), (3, 3, 4, 2)), *weights((2, 8, 8, 2))


def cross_entropy(params, x, labels):
    logits = mlp(params, x)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def embedding(params, ids):
    table, w = params
    return jnp.tanh(table[ids] @ w)


def rnn(params, x):
    w, u = params

    def cell(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, h

    return lax.scan(cell, jnp.zeros((x.shape[1], W), jnp.float32), x)


def lstm(params, x):
    (w,) = params

    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], 1) @ w, 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros((x.shape[1], W), jnp.float32)
    return lax.scan(cell, (zero, zero), x)[0][0]


def layers(params, x):
    def block(x, ws):
        w1, w2 = ws
        return x + jnp.tanh(x @ w1) @ w2, None

    return lax.scan(block, x @ params[0], params[1:])[0] @ params[0]


def layers_args():
    return weights((W, W), (3, W, W), (3, W, W)), *weights((4, W))


def checkpointed(params, x):
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def block(x, w):
        return jnp.tanh(x @ w)

    for w in params:
        x = block(x, w)
    return x


def named_checkpoint(params, x):
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_only_these_names("h")

    @functools.partial(jax.checkpoint, policy=policy)
    def net(params, x):
        for w in params:
            x = checkpoint_name(jnp.tanh(x @ w), "h")
        return x

    return net(params, x)


def while_loop(params, x):
    (w,) = params

    def body(state):
        i, x = state
        return i + 1, jnp.tanh(x @ w)

    return lax.while_loop(lambda s: s[0] < 3, body, (0, x))[1] @ w


def fori(params, x):
    (w,) = params
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)


def branch(params, x):
    w1, w2 = params
    h = x @ w1
    h = lax.cond(h.sum() > 0, lambda h: jnp.tanh(h @ w2), lambda h: h - w2[:4], h)
    return h @ w2


def switch(params, x):
    (w,) = params
    arms = [lambda x: x @ w, lambda x: jnp.exp(x), lambda x: jnp.tanh(x @ w)]
    return lax.switch(jnp.argmax(x[0]) % 3, arms, x @ w) @ w


@jax.custom_vjp
def scaled_product(x, w):
    return jnp.tanh(x @ w)


def _scaled_fwd(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _scaled_bwd(res, g):
    x, w, y = res
    g = g * (1 - y * y)
    return g @ w.T, x.T @ g


scaled_product.defvjp(_scaled_fwd, _scaled_bwd)


@jax.custom_jvp
def swish(x):
    return x * jax.nn.sigmoid(x)


@swish.defjvp
def _swish_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    s = jax.nn.sigmoid(x)
    return swish(x), (s + x * s * (1 - s)) * t


@jax.custom_batching.custom_vmap
def own_batching(x, w):
    return jnp.tanh(x @ w)


@own_batching.def_vmap
def _own_batching_rule(axis_size, in_batched, x, w):
    """Rows of all members make one product, if they share the weight."""
    if in_batched[1]:
        axes = tuple(0 if b else None for b in in_batched)
        return jax.vmap(lambda x, w: jnp.tanh(x @ w), axes)(x, w), True
    return jnp.tanh(x.reshape(-1, x.shape[-1]) @ w).reshape(x.shape), True


def inner_jit(params, x):
    block = jax.jit(lambda x, w: jnp.tanh(x @ w))
    for w in params:
        x = block(x, w)
    return x


def mesh():
    return jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded_map(params, x):
    (w,) = params

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P("i"), P()), out_specs=P()
    )
    def block(x, w):
        return lax.psum(jnp.tanh(x @ w) @ w, "i")

    return block(x, w)


def pmapped(params, x):
    (w,) = params
    return jax.pmap(lambda x: jnp.tanh(x @ w) @ w)(x.reshape(2, 2, W))


def references(params, x):
    (w,) = params
    ref = jax.new_ref(jnp.zeros((4, W), jnp.float32))
    ref[...] = jnp.tanh(x @ w)
    ref[...] += x
    return ref[...] @ w


def callbacks(params, x):
    (w,) = params
    h = x @ w
    jax.debug.callback(lambda v: None, h)
    h = jax.pure_callback(
        lambda v: np.asarray(v),
        jax.ShapeDtypeStruct(h.shape, h.dtype),
        h,
        vmap_method="sequential",
    )
    return h @ w


def mixed_types(params, x):
    (w,) = params
    h = x @ w
    complex_part = jnp.fft.fft(h.astype(jnp.complex64)).real
    ids = jnp.argsort(h, axis=1)
    return {
        "h": h,
        "fft": complex_part @ w,
        "ids": ids,
        "none": None,
        "name": "x",
        "number": 3,
    }


def half_inside(params, x):
    """A part that the user wrote in half, and cast back."""
    (w,) = params
    h = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.tanh(h) @ w


def dropout(params, x, key):
    (w,) = params
    h = x @ w
    keep = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.where(keep, h / np.float32(0.5), np.float32(0)) @ w


def linear_solve(params, x):
    (w,) = params
    a = w @ w.T + np.float32(2) * jnp.eye(W, dtype=jnp.float32)
    return jnp.linalg.solve(a, x.T).T @ w


def rotary(params, x):
    (w,) = params
    positions = jnp.arange(4, dtype=jnp.float32)
    angles = jnp.outer(positions, np.float32(10000.0) ** -np.arange(4, dtype="f4"))
    h = (x @ w).reshape(4, 2, 4)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    return (h * cos + h[:, ::-1] * sin).reshape(4, W) @ w


def post_norm(params, x):
    w1, w2 = params
    for w in (w1, w2):
        x = x + jnp.tanh(x @ w)
        x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + np.float32(1))
    return x @ w1


def vmapped(params, x):
    (w,) = params
    return jax.vmap(lambda x: jnp.tanh(x @ w) @ w)(x)


def segments(params, x):
    (w,) = params
    ids = jnp.array([0, 1, 0, 1])
    return jax.ops.segment_sum(x @ w, ids, num_segments=2) @ w


def lora(params, x):
    w, a, b = params
    return jnp.tanh(x @ (w + a @ b)) @ w


def fixed_point(params, x):
    (w,) = params
    return lax.map(lambda row: jnp.tanh(row @ w) @ w, x)


def train_step(optimizer, loss=cross_entropy):
    """Returns a whole step of training `mlp`."""

    def step(params, state, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def step_args(optimizer):
    params, x = mlp_args()
    return params, optimizer.init(params), x, jnp.array([0, 1, 2, 3])


def two_losses(params, x, labels):
    """A step whose second loss, and whose metric, are of what the first one made."""

    def smooth(params):
        return jnp.square(mlp(params, x)).mean()

    value, grads = jax.value_and_grad(cross_entropy)(params, x, labels)
    more = jax.grad(smooth)(params)
    new = jax.tree.map(lambda w, a, b: w - a - b, params, grads, more)
    return new, value, (mlp(params, x).argmax(-1) == labels).mean()


def epoch(params, state, xs, labels):
    step = train_step(optax.adam(1e-2))

    def body(carry, x):
        params, state, value = step(*carry, x, labels)
        return (params, state), value

    (params, state), values = lax.scan(body, (params, state), xs)
    return params, state, values, cross_entropy(params, xs[0], labels)


def epoch_args():
    params, state, x, labels = step_args(optax.adam(1e-2))
    return params, state, jnp.stack([x, x * 2, x + 1]), labels


def one(*shapes):
    """Returns arguments: weights of these shapes, and a batch of 4 vectors."""
    return lambda: (weights(*shapes), *weights((4, W)))


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "rmsprop": optax.rmsprop(1e-2),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}

SQUARE = (W, W)

PROGRAMS = [
    Program("mlp", mlp, mlp_args, products=2),
    Program("deep", deep, one(SQUARE, SQUARE, SQUARE), products=3),
    Program("attention", attention, attention_args, products=5),
    Program("layer_norm", layer_norm, one(SQUARE, (W,), SQUARE), products=2),
    Program("conv", conv_net, conv_args, products=2),
    Program(
        "cross_entropy",
        cross_entropy,
        lambda: (*mlp_args(), jnp.array([0, 1, 2, 3])),
        products=2,
    ),
    Program(
        "embedding",
        embedding,
        lambda: (weights((16, W), SQUARE), jnp.array([[1, 2], [3, 1]])),
    ),
    Program(
        "rnn", rnn, lambda: (weights(SQUARE, SQUARE), *weights((3, 4, W))), products=2
    ),
    Program("lstm", lstm, lambda: (weights((2 * W, 4 * W)), *weights((3, 4, W)))),
    Program("layers", layers, layers_args, products=4),
    Program("checkpoint", checkpointed, one(SQUARE, SQUARE), products=2),
    Program("checkpoint_name", named_checkpoint, one(SQUARE, SQUARE), products=2),
    Program("while", while_loop, one(SQUARE), grad=False, products=2),
    Program("fori", fori, one(SQUARE)),
    Program("cond", branch, one(SQUARE, SQUARE), products=3),
    Program("switch", switch, one(SQUARE), products=4),
    Program(
        "custom_vjp",
        lambda p, x: scaled_product(scaled_product(x, p[0]), p[1]),
        one(SQUARE, SQUARE),
        products=2,
    ),
    Program(
        "custom_jvp",
        lambda p, x: swish(x @ p[0]) @ p[1],
        one(SQUARE, SQUARE),
        products=2,
    ),
    Program(
        "custom_vmap",
        lambda p, x: own_batching(x, p[0]) @ p[1],
        one(SQUARE, SQUARE),
        grad=False,  # JAX has no reverse mode for it
        products=2,
    ),
    Program("jit", inner_jit, one(SQUARE, SQUARE, SQUARE), products=1),
    Program("shard_map", sharded_map, one(SQUARE), products=2),
    Program("pmap", pmapped, one(SQUARE), products=2),
    Program("references", references, one(SQUARE), grad=False, products=2),
    Program("callbacks", callbacks, one(SQUARE), grad=False, products=2),
    Program("mixed_types", mixed_types, one(SQUARE), grad=False, products=2),
    Program("half_inside", half_inside, one(SQUARE)),
    Program(
        "dropout", dropout, lambda: (*one(SQUARE)(), jax.random.key(0)), products=2
    ),
    Program("linear_solve", linear_solve, one(SQUARE), products=2),
    Program("rotary", rotary, one(SQUARE), products=2),
    Program("post_norm", post_norm, one(SQUARE, SQUARE), products=3),
    Program("vmap", vmapped, one(SQUARE), products=2),
    Program("segment_sum", segments, one(SQUARE), products=2),
    Program("lora", lora, one(SQUARE, (W, 6), (6, W)), products=3),
    Program("map", fixed_point, one(SQUARE), products=2),
    Program(
        "integers",
        lambda n: (n * 2, n.sum()),
        lambda: (jnp.arange(4),),
        grad=False,
        products=0,
    ),
    Program(
        "no_product",
        lambda x: jnp.tanh(x) / (jnp.exp(x) + 1),
        lambda: weights((4, W)),
        products=0,
    ),
    Program(
        "already_half",
        lambda w, x: jnp.tanh(x @ w),
        lambda: tuple(a.astype(jnp.bfloat16) for a in weights(SQUARE, (4, W))),
        grad=False,
        products=0,
    ),
    *(
        Program(
            f"step_{name}",
            train_step(tx),
            functools.partial(step_args, tx),
            grad=False,
            products=5,
        )
        for name, tx in OPTIMIZERS.items()
    ),
    Program(
        "two_losses",
        two_losses,
        lambda: (*mlp_args(), jnp.array([0, 1, 2, 3])),
        grad=False,
        products=6,
    ),
    Program("epoch", epoch, epoch_args, grad=False, products=7),
]

BY_NAME = {p.name: p for p in PROGRAMS}
