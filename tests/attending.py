"""An attention that is a Pallas kernel: it refuses float32 operands."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HALVES = ("bfloat16", "float16")


def call(kernel, *arrays, results=1):
    """Runs a kernel on whole half arrays, with results like the first of them."""
    assert {str(x.dtype) for x in arrays} <= set(HALVES), [x.dtype for x in arrays]
    out = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    outs = pl.pallas_call(kernel, out_shape=[out] * results, interpret=True)(*arrays)
    return outs[0] if results == 1 else outs


def softmax(q, k):
    scores = jnp.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def wide(ref):
    return ref[...].astype(jnp.float32)


def forward_kernel(q, k, v, out):
    out[...] = (softmax(wide(q), wide(k)) @ wide(v)).astype(out.dtype)


def backward_kernel(q, k, v, ct, *outs):
    def reference(q, k, v):
        return softmax(q, k) @ v

    _, pull = jax.vjp(reference, wide(q), wide(k), wide(v))
    for out, grad in zip(outs, pull(wide(ct)), strict=True):
        out[...] = grad.astype(out.dtype)


@jax.custom_vjp
def flash(q, k, v):
    return call(forward_kernel, q, k, v)


def flash_forward(q, k, v):
    return flash(q, k, v), (q, k, v)


def flash_backward(kept, ct):
    assert ct.dtype.name in HALVES, ct.dtype
    return tuple(call(backward_kernel, *kept, ct, results=3))


flash.defvjp(flash_forward, flash_backward)


def layer(attend, w, x):
    """A layer of a transformer, without its norms."""
    q, k, v = (x @ w[name] for name in "qkv")
    x = x + attend(q, k, v) @ w["o"]
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


@functools.cache
def weights(layers=None, width=16):
    """Weights of a layer, or of several, stacked."""
    shape = (width, width) if layers is None else (layers, width, width)
    names = ("q", "k", "v", "o", "up", "down")
    keys = jax.random.split(jax.random.key(0), len(names))
    draws = (0.3 * jax.random.normal(key, shape) for key in keys)
    return dict(zip(names, draws, strict=True))


def inputs(rows=24, width=16):
    return jax.random.normal(jax.random.key(1), (rows, width))
