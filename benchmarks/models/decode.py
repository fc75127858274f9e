"""One step of decoding with GPT-2 small's dimensions and a key-value cache.

Not one of the compared models: it has no loss. By hand weights and cache are stored in
half, as people serve.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Size(NamedTuple):
    """Dimensions; a cache of so many positions."""

    batch: int = 8
    length: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257


FULL = Size()
QUICK = Size(layers=3)
SMALL = Size(2, 32, 2, 64, 4, 500)
CPU = Size(length=256, layers=2, vocabulary=16384)  # what runs in a second or two


def _norm(x: Any) -> Any:
    full = x.astype(jnp.float32)
    centered = full - full.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
    return (centered * scale).astype(x.dtype)


class Decoding(NamedTuple):
    """Decoding in one dtype: `step(params, cache, at, token)`."""

    dtype: Any
    size: Size

    def init(self, key: Any) -> tuple[Any, Any]:
        """Weights, stacked over layers, and an empty cache."""
        s = self.size
        shapes = {
            "qkv": (s.layers, s.width, 3 * s.width),
            "out": (s.layers, s.width, s.width),
            "up": (s.layers, s.width, 4 * s.width),
            "down": (s.layers, 4 * s.width, s.width),
            "embed": (s.vocabulary, s.width),
        }
        keys = jax.random.split(key, len(shapes))
        params = {
            name: 0.02 * jax.random.normal(k, shape, self.dtype)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        heads = (s.layers, s.batch, s.length, s.heads, s.width // s.heads)
        return params, {n: jnp.zeros(heads, self.dtype) for n in ("k", "v")}

    def step(self, params: Any, cache: Any, at: Any, token: Any) -> tuple[Any, ...]:
        """Reads one token a text, and returns the next and the cache."""
        size = self.size
        x = params["embed"][token]

        def layer(x: Any, inputs: Any) -> tuple[Any, Any]:
            w, k, v = inputs
            shape = (size.batch, 1, 3, size.heads, size.width // size.heads)
            qkv = (_norm(x) @ w["qkv"]).reshape(shape)
            k = jax.lax.dynamic_update_slice_in_dim(k, qkv[:, :, 1], at, 1)
            v = jax.lax.dynamic_update_slice_in_dim(v, qkv[:, :, 2], at, 1)
            scores = jnp.einsum("bhd,bkhd->bhk", qkv[:, 0, 0], k)
            scores = scores.astype(jnp.float32) * shape[-1] ** -0.5
            seen = jnp.arange(size.length) <= at
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
            out = jnp.einsum("bhk,bkhd->bhd", weights.astype(x.dtype), v)
            x = x + out.reshape(x.shape) @ w["out"]
            return x + jax.nn.gelu(_norm(x) @ w["up"]) @ w["down"], (k, v)

        weights = {n: params[n] for n in ("qkv", "out", "up", "down")}
        x, (k, v) = jax.lax.scan(layer, x, (weights, cache["k"], cache["v"]))
        logits = (_norm(x) @ params["embed"].T).astype(jnp.float32)
        return {"k": k, "v": v}, jnp.argmax(logits, -1)


def make(dtype: Any, size: Size = FULL) -> Decoding:
    """Decoding; by hand, `dtype` is the half dtype."""
    return Decoding(dtype, size)
