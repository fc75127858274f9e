"""What type checkers say of decorated functions; `test_typing.py` asks them.

Each `reveal_type` has the type that is expected, each wrong line that it is wrong.
"""

from typing import TYPE_CHECKING, reveal_type

import jax
import jax.numpy as jnp
import numpy as np

import jmp_rewrite as jmpr


def step(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.mixed_precision
def bare(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.mixed_precision("mixed_bfloat16")
def named(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.mixed_precision(policy="mixed_float16", static_argnames="n")
def by_keyword(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.mixed_precision()
def default(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.full_precision
def full(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.full_precision()
def full_called(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.half_precision
def half(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jmpr.half_precision()
def half_called(x: jax.Array, n: int) -> jax.Array:
    return x * n


class Model:
    @jmpr.mixed_precision("bf16")
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Called:
    """A module that is called, and has a dtype, is no scalar type."""

    dtype: np.dtype

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return inputs


called = Called()
policy = jmpr.Policy("mixed_bfloat16", rules={"tanh": "deny"}, scopes={"a": "half"})
x = jnp.ones(2)

if TYPE_CHECKING:
    reveal_type(bare)  # (x: Array, n: int) -> Array
    reveal_type(named)  # (x: Array, n: int) -> Array
    reveal_type(by_keyword)  # (x: Array, n: int) -> Array
    reveal_type(default)  # (x: Array, n: int) -> Array
    reveal_type(full)  # (x: Array, n: int) -> Array
    reveal_type(full_called)  # (x: Array, n: int) -> Array
    reveal_type(half)  # (x: Array, n: int) -> Array
    reveal_type(half_called)  # (x: Array, n: int) -> Array
    reveal_type(jmpr.half_precision(step))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(step, "float32"))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(step, policy))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(step, np.float16))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(step, jnp.float16))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(jnp.bfloat16)(step))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(policy)(step))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(np.float16)(step))  # (x: Array, n: int) -> Array
    reveal_type(jmpr.mixed_precision(called)(x))  # Array
    reveal_type(jmpr.Policy(jnp.float16, reduce_dtype=jnp.float16))  # Policy
    reveal_type(jmpr.explain(step, jnp.bfloat16))  # (x: Array, n: int) -> Report
    reveal_type(jmpr.explain(step, "fp16"))  # (x: Array, n: int) -> Report
    reveal_type(jmpr.diagnose(step))  # (x: Array, n: int) -> Diagnosis
    reveal_type(jmpr.for_inference(step).__call__)  # (x: Array, n: int) -> Array
    reveal_type(jmpr.for_inference(step, state={0: 0})(x, 3))  # Array
    reveal_type(jmpr.for_inference(step).store(x, 3))  # tuple[Any, ...]
    reveal_type(Model()(x))  # Array
    with jmpr.full_precision():
        reveal_type(named(x, 3))  # Array

    named("oops", 3, 4)  # wrong
    jmpr.mixed_precision(step, 3.0)  # wrong
    jmpr.mixed_precision(step, "mixed_bflaot16")  # wrong
    jmpr.mixed_precision("mixed_bflaot16")  # wrong
    jmpr.mixed_precision(x)  # wrong
    jmpr.Policy("mixed_bfloat16", rules={"tanh": "dney"})  # wrong
    jmpr.Policy("mixed_bfloat16", scopes={"head": "full"})  # wrong
    jmpr.explain(step, "mixed_bflaot16")  # wrong
    jmpr.diagnose(step, tolerance="small")  # wrong
