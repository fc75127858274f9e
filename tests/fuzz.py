"""Random programs: descriptions, how they are drawn, and the functions they stand for.

Every value of a program is f32[4,4], so that any value may follow any other; what an
operation needs of other shapes it makes inside. A program is a block: a list of
statements `(name, picks, children)`, each of which adds a value made of earlier ones
(`picks`, modulo their number) and, for control flow, of blocks of its own. It prints as
it is written: what fails can be pasted into a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from jmp_rewrite import full_precision, mixed_precision

N = 4
SHAPE = (N, N)
MASK = np.tril(np.ones(SHAPE, bool))
IDS = np.array([2, 0, 3, 3])

f32 = np.float32
Values = list[Any]


def _mean_product(a: Any, b: Any, **kwargs: Any) -> Any:
    return jnp.matmul(a, b, **kwargs) * f32(1 / N)


def _conv(a: Any, b: Any) -> Any:
    out = lax.conv_general_dilated(
        a[None, :, :, None],
        b[:3, :3, None, None],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return out[0, :, :, 0] * f32(1 / 9)


def _rows(x: Any) -> Any:
    """Broadcasts one number a row over its row."""
    return jnp.broadcast_to(x, SHAPE)


def _random_bits(a: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, SHAPE)
    return jnp.where(keep, a, jnp.zeros_like(a))


def _window(a: Any) -> Any:
    return lax.reduce_window(a, -np.inf, lax.max, (2, 2), (1, 1), "SAME")


# Continuous functions of one or two values; |x| <= 1 gives |f(x)| of a few units.
PLAIN: dict[str, Callable[..., Any]] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "exp": lambda a: jnp.exp(-jnp.abs(a)),
    "exp2": lambda a: jnp.exp2(jnp.tanh(a)),
    "neg": jnp.negative,
    "abs": jnp.abs,
    "square": jnp.square,
    "cube": lambda a: a**3,
    "logistic": jax.nn.sigmoid,
    "rsqrt": lambda a: lax.rsqrt(f32(1) + a * a),
    "sqrt": lambda a: jnp.sqrt(f32(1) + a * a),
    "log1p": lambda a: jnp.log1p(a * a),
    "erf": lax.erf,
    "relu": jax.nn.relu,
    "hard_tanh": jax.nn.hard_tanh,
    "gelu": jax.nn.gelu,
    "transpose": jnp.transpose,
    "reverse": lambda a: a.reshape(-1)[::-1].reshape(SHAPE),
    "cumsum": lambda a: jnp.cumsum(a, 0) * f32(1 / N),
    "sort": lambda a: jnp.sort(a, 1),
    "top_k": lambda a: lax.top_k(a, N)[0],
    "softmax": lambda a: jax.nn.softmax(a, axis=1),
    "masked_softmax": lambda a: jax.nn.softmax(jnp.where(MASK, a, f32(-1e9)), axis=1),
    "logsumexp": lambda a: _rows(jax.nn.logsumexp(a, 1, keepdims=True)),
    "normalize": lambda a: (
        (a - a.mean(1, keepdims=True)) / jnp.sqrt(f32(1) + a.var(1, keepdims=True))
    ),
    "mean": lambda a: _rows(a.mean(0, keepdims=True)),
    "max_of_rows": lambda a: _rows(a.max(1, keepdims=True)),
    "sum": lambda a: _rows(a.sum()[None, None]) * f32(1 / 16),
    "window": _window,
    "epsilon": lambda a: a / (jnp.abs(a) + f32(1e-8)) * (a * a),
    "small_and_large": lambda a: (a * f32(1e-6) + f32(1e-7)) * f32(1e6),
    "stop_gradient": lax.stop_gradient,
    "half_inside": lambda a: (a.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "reduce_precision": lambda a: lax.reduce_precision(a, 8, 7),
    "dropout": _random_bits,
    "gather": lambda a: a[IDS],
    "scatter_add": lambda a: jnp.zeros_like(a).at[IDS].add(a),
    "scatter_set": lambda a: a.at[1].set(a[2]),
    "segment_sum": lambda a: jax.ops.segment_sum(a, IDS, N),
    "segment_max": lambda a: jnp.zeros_like(a).at[IDS].max(a),
    "roll": lambda a: jnp.roll(a, 1, 0),
    "pad": lambda a: jnp.pad(a[1:, :-1], ((1, 0), (0, 1))),
    "split": lambda a: jnp.concatenate([a[:, 2:], a[:, :2]], 1),
    "positions": lambda a: a * (jnp.arange(N, dtype=jnp.float32)[None] / f32(N)),
    "complex": lambda a: jnp.fft.ifft(jnp.fft.fft(a)).real,
    "map": lambda a: lax.map(jnp.sin, a),
    "scan_add": lambda a: lax.associative_scan(jnp.add, a) * f32(1 / N),
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lambda a, b: a / (f32(1) + b * b),
    "max": jnp.maximum,
    "where": lambda a, b: jnp.where(MASK, a, b),
    "update_slice": lambda a, b: lax.dynamic_update_slice(a, b[:2, :2], (1, 1)),
    "atan2": lambda a, b: jnp.arctan2(a, f32(2) + b * b),
    "matmul": _mean_product,
    "matmul_t": lambda a, b: _mean_product(a, b.T),
    "highest": lambda a, b: _mean_product(a, b, precision="highest"),
    "vector": lambda a, b: _rows((a @ b[0])[:, None]) * f32(1 / N),
    "outer": lambda a, b: a[:, 0][:, None] * b[0][None],
    "inner": lambda a, b: _rows(jnp.vdot(a[0], b[0])[None, None]) * f32(1 / N),
    "batched": lambda a, b: (
        jnp.einsum("bij,bjk->bik", jnp.stack([a, b]), jnp.stack([b, a])).mean(0)
        * f32(1 / N)
    ),
    "attention": lambda a, b: jax.nn.softmax(a @ b.T, axis=1) @ b,
    "conv": _conv,
}

# ---- what holds blocks: (values, functions of two values, i32[]) -> value


def _scan(v: Values, f: Values, n: Any) -> Any:
    step = lambda c, x: (f[0](c, x), f[1](x, c))  # noqa: E731
    end, ys = lax.scan(step, v[0], jnp.stack([v[1], v[0]]))
    return end + ys.mean(0)


def _scan_reversed(v: Values, f: Values, n: Any) -> Any:
    step = lambda c, w: (f[0](c @ w, v[0]), None)  # noqa: E731
    return lax.scan(step, v[0], jnp.stack([v[1]] * 3), reverse=True, unroll=2)[0]


def _while(v: Values, f: Values, n: Any) -> Any:
    more = lambda s: s[0] < n  # noqa: E731
    return lax.while_loop(more, lambda s: (s[0] + 1, f[0](s[1], v[1])), (0, v[0]))[1]


def _custom_jvp(v: Values, f: Values, n: Any) -> Any:
    fun = jax.custom_jvp(f[0])
    fun.defjvp(lambda primals, tangents: jax.jvp(f[0], primals, tangents))
    return fun(*v)


def _custom_vjp(v: Values, f: Values, n: Any) -> Any:
    fun = jax.custom_vjp(f[0])
    fun.defvjp(
        lambda a, b: (f[0](a, b), (a, b)),
        lambda kept, ct: jax.vjp(f[0], *kept)[1](ct),
    )
    return fun(*v)


def _twice(v: Values, f: Values, n: Any) -> Any:
    shared = jax.jit(f[0])
    return shared(shared(v[0], v[1]), shared(v[1], v[0]))


def _jvp(v: Values, f: Values, n: Any) -> Any:
    value, tangent = jax.jvp(lambda a: f[0](a, v[1]), (v[0],), (v[1],))
    return value + tangent * f32(0.1)


def _checkpoint(policy: Any = None) -> Callable[..., Any]:
    return lambda v, f, n: jax.checkpoint(f[0], policy=policy)(*v)


def _scope(v: Values, f: Values, n: Any) -> Any:
    with jax.named_scope("layer"):
        return f[0](*v)


NESTED: dict[str, Callable[..., Any]] = {
    "jit": lambda v, f, n: jax.jit(f[0])(*v),
    "jit_twice": _twice,
    "scan": _scan,
    "scan_layers": _scan_reversed,
    "fori": lambda v, f, n: lax.fori_loop(0, 3, lambda _, c: f[0](c, v[1]), v[0]),
    "while": _while,
    "cond": lambda v, f, n: lax.cond(n > 1, f[0], f[1], *v),
    "switch": lambda v, f, n: lax.switch(n, [f[0], f[1], lambda a, b: a], *v),
    "checkpoint": _checkpoint(),
    "checkpoint_dots": _checkpoint(jax.checkpoint_policies.dots_saveable),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "grad": lambda v, f, n: jax.grad(lambda a: jnp.sum(f[0](a, v[1])))(v[0]),
    "jvp": _jvp,
    "vmap": lambda v, f, n: jax.vmap(f[0], (0, None))(jnp.stack(v), v[1]).mean(0),
    "scope": _scope,
    "full_precision": lambda v, f, n: full_precision(f[0])(*v),
    "inner_float32": lambda v, f, n: mixed_precision(f[0], "float32")(*v),
    "inner_float16": lambda v, f, n: mixed_precision(f[0], "mixed_float16")(*v),
}
_TWO = frozenset({"scan", "cond", "switch"})
# The forward pass alone: nothing can be differentiated in reverse through it.
_FORWARD_ONLY = frozenset({"while"})


def blocks(depth: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draws a block whose statements hold blocks of at most `depth` levels."""
    pick = st.integers(0, 7)
    plain = st.tuples(
        st.sampled_from(sorted(PLAIN)), st.tuples(pick, pick), st.just(())
    )
    if not depth:
        return st.lists(plain, min_size=1, max_size=3).map(tuple)
    inner = blocks(depth - 1)
    nested = st.tuples(
        st.sampled_from(sorted(NESTED)), st.tuples(pick, pick), st.tuples(inner, inner)
    )
    return st.lists(plain | nested, min_size=1, max_size=5).map(tuple)


def names(block: tuple[Any, ...]) -> set[str]:
    """Returns what a program is made of, blocks that are not used left out."""
    found = set()
    for name, _, children in block:
        found.add(name)
        used = children if name in _TWO else children[:1]
        found.update(*map(names, used))
    return found


def is_differentiable(block: tuple[Any, ...]) -> bool:
    """Tells whether a program has a gradient in reverse mode."""
    return _FORWARD_ONLY.isdisjoint(names(block))


def is_valid(block: tuple[Any, ...]) -> bool:
    """Tells whether all that a program differentiates inside has a gradient."""
    for name, _, children in block:
        if name in ("grad", "custom_vjp") and not is_differentiable(children[0]):
            return False
        if name in ("grad", "jvp", "custom_jvp") and "custom_vjp" in names(children[0]):
            return name == "grad"
        if not all(map(is_valid, children)):
            return False
    return True


def function(block: tuple[Any, ...], noise: float = 0.0, seed: int = 0) -> Any:
    """Returns the function `(x, y, w, n) -> f32[4,4]` that a program stands for.

    Args:
      block: the program.
      noise: relative size of a disturbance of every value, to see how much rounding
        may change the result.
      seed: which disturbance.
    """
    rng = np.random.RandomState(seed)

    def disturb(x: Any) -> Any:
        if not noise:
            return x
        return x * (1 + noise * rng.uniform(-1, 1, SHAPE)).astype("f4")

    def inner(block: Any, n: Any) -> Callable[..., Any]:
        return lambda a, b: jnp.tanh(run(block, [a, b], n))

    def run(block: Any, values: Values, n: Any) -> Any:
        env = list(values)
        for name, picks, children in block:
            operands = [env[p % len(env)] for p in picks]
            if name in PLAIN:
                count = PLAIN_ARITY[name]
                out = PLAIN[name](*operands[:count])
            else:
                # A rule may not close over what is being traced.
                inside = np.int32(1) if name.startswith("custom") else n
                functions = [inner(child, inside) for child in children]
                out = NESTED[name](operands, functions, n)
            env.append(disturb(out))
        return env[-1]

    return lambda x, y, w, n: run(block, [x, y, w], n)


PLAIN_ARITY = {
    name: 2 if name in list(PLAIN)[list(PLAIN).index("add") :] else 1 for name in PLAIN
}


def arguments(seed: int = 0) -> tuple[Any, ...]:
    """Returns three arrays of numbers between -1 and 1, and a number of iterations."""
    rng = np.random.RandomState(seed)
    arrays = [jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in range(3)]
    return *arrays, jnp.int32(seed % 3)
