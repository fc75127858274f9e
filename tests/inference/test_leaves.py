"""Which leaves of two decoders stay float32, as `docs/serving.md` lists them."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_rewrite import Policy, explain, for_inference, mixed_precision

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "serving.md"
WIDTH, HEADS, LENGTH = 64, 4, 16


def attend(q, k, v):
    heads = [x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v)]
    return jax.nn.dot_product_attention(*heads, is_causal=True).reshape(q.shape)


class GPT2(nn.Module):
    """Learned positions, LayerNorm, biases, a tied head."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(100, WIDTH, name="tokens")
        x = embed(tokens) + nn.Embed(LENGTH, WIDTH, name="positions")(
            jnp.arange(LENGTH)[None]
        )
        for i in range(2):
            h = nn.LayerNorm(name=f"norm{i}1")(x)
            h = attend(*jnp.split(nn.Dense(3 * WIDTH, name=f"qkv{i}")(h), 3, -1))
            x = x + nn.Dense(WIDTH, name=f"out{i}")(h)
            h = nn.LayerNorm(name=f"norm{i}2")(x)
            h = nn.gelu(nn.Dense(4 * WIDTH, name=f"up{i}")(h))
            x = x + nn.Dense(WIDTH, name=f"down{i}")(h)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def rotated(x):
    """Rotary positions."""
    first, second = jnp.split(x.reshape(*x.shape[:2], HEADS, -1), 2, -1)
    rates = 1e4 ** -jnp.linspace(0, 1, first.shape[-1], endpoint=False)[None]
    angles = (jnp.arange(float(x.shape[1]))[:, None] * rates)[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    both = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(both, -1).reshape(x.shape)


class Llama(nn.Module):
    """Rotary positions, RMSNorm, SwiGLU, no bias, a head of its own."""

    @nn.compact
    def __call__(self, tokens):
        def dense(width, name):
            return nn.Dense(width, use_bias=False, name=name)

        x = nn.Embed(100, WIDTH, name="tokens")(tokens)
        for i in range(2):
            h = nn.RMSNorm(name=f"norm{i}1")(x)
            q, k, v = (dense(WIDTH, f"{n}{i}")(h) for n in "qkv")
            x = x + dense(WIDTH, f"out{i}")(attend(rotated(q), rotated(k), v))
            h = nn.RMSNorm(name=f"norm{i}2")(x)
            h = nn.silu(dense(3 * WIDTH, f"gate{i}")(h)) * dense(3 * WIDTH, f"up{i}")(h)
            x = x + dense(WIDTH, f"down{i}")(h)
        return dense(100, "head")(nn.RMSNorm(name="norm")(x))


class Untied(nn.Module):
    """An embedding that no head shares, in front of a norm."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(100, WIDTH, name="tokens")(tokens)
        x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(100)(nn.LayerNorm()(x))


class UntiedNNX(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(100, WIDTH, rngs=rngs)
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.head = nnx.Linear(WIDTH, 100, rngs=rngs)
        self.norm, self.last = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, tokens):
        x = self.tokens(tokens)
        x = x + self.down(nnx.relu(self.up(self.norm(x))))
        return self.head(self.last(x))


def listed(module):
    """The leaves of a module that stay float32, layers merged, and the reasons."""
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    params = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
    serve = for_inference(
        lambda params, tokens: module.apply({"params": params}, tokens),
        "mixed_bfloat16",
    )
    report = serve.report(params, tokens)
    rows = {}
    for leaf in report.kept:
        name = re.sub(r"\d", "*", leaf.path.removeprefix("0/"))
        reason = re.sub(r" at \S+:\d+", "", leaf.reason)
        rows.setdefault(f"| `{name}` | {reason} |")
    count = f"{len(report.stored)} of {len(report.leaves)} arrays are stored in half."
    return "\n".join([count, "", "| leaf | reason |", "| --- | --- |", *sorted(rows)])


def text():
    return "\n\n".join(
        f"**{type(m).__name__}**: {listed(m)}" for m in (GPT2(), Llama())
    )


@pytest.mark.slow
def test_the_list_in_the_guide_is_the_reports():
    found = DOCUMENT.read_text().partition("<!-- leaves -->\n")[2]
    assert found.partition("\n<!-- leaves: end -->")[0] == text()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_scope_stores_a_table_that_is_looked_up_alone(framework):
    """By name or by the parameter's path, and to the decorated function's bits.

    The statistics of the norm that reads its rows stay float32.
    """
    model, weights = Untied(), 0
    if framework == "linen":
        tokens = jnp.arange(LENGTH)[None]
        weights = model.init(jax.random.key(0), tokens)["params"]
        apply = lambda w, tokens: model.apply({"params": w}, tokens)  # noqa: E731
    else:
        tokens, weights = jnp.arange(LENGTH)[None], UntiedNNX(nnx.Rngs(0))
        apply = lambda model, tokens: model(tokens)  # noqa: E731
    policy = Policy("mixed_bfloat16", scopes={"tokens": "half"})

    def dtype_of(serve):
        (leaf,) = (
            x for x in serve.report(weights, tokens).leaves if "tokens" in x.path
        )
        return leaf.after, leaf.reason

    assert 'a scope "half"' in dtype_of(for_inference(apply, "mixed_bfloat16"))[1]
    serve = for_inference(apply, policy)
    assert dtype_of(serve)[0] == "bfloat16"
    want = jax.jit(mixed_precision(apply, policy))(weights, tokens)
    for args in (weights, tokens), serve.store(weights, tokens):
        np.testing.assert_array_equal(jax.jit(serve)(*args), want)
    report = explain(apply, policy)(weights, tokens)
    roots = [e for e in report.equations if e.primitive == "rsqrt"]
    assert len(roots) == 2
    assert all(e.dtype == "float32" and "statistic" in e.reason for e in roots)
