"""What a GPU holds no longer, and in no more bytes, than it has to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EPS,
    HALF,
    choices,
    devices_of,
    dtypes_in,
    eqns,
    relative_error,
    trace,
)
from programs import normal, weights

from jmp_rewrite import diagnose, explain, mixed_precision, use_passes

POLICIES = sorted(HALF)


def gradient_step(loss):
    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def u_shaped(params, x):
    """A skip connection around three layers, joined to what comes out of them."""
    first, *layers, last = params
    skip = h = jnp.tanh(x @ first)
    for w in layers:
        h = jnp.tanh(h @ w)
    joined = jnp.concatenate([h, skip], -1)
    joined = joined * jax.lax.rsqrt(jnp.square(joined).mean(-1, keepdims=True) + 1e-3)
    return jnp.square(joined @ last).mean()


def u_shape():
    shapes = [(16, 32), (32, 32), (32, 32), (32, 32), (64, 8)]
    return weights(*shapes), normal(24, 16)


def rotated(params, x):
    """Halves that are read at once, as in rotary embeddings."""
    first, last = params
    a, b = jnp.split(x @ first, 2, -1)
    h = jnp.concatenate([a * 0.6 - b * 0.8, a * 0.8 + b * 0.6], -1)
    return jnp.square(h @ last).mean()


def upsampled(params, x):
    """Each row goes to two places, so its cotangents are added up."""
    first, last = params
    h = jnp.repeat(jnp.tanh(x @ first), 2, axis=0, total_repeat_length=48)
    return jnp.square(h @ last).mean()


def gathered(params, x):
    """The cotangent of what is gathered is computed where it is added up."""
    first, last = params
    h = jnp.tanh(x @ first)[jnp.arange(48) % 24]
    weights = jnp.arange(48.0)[:, None] * jnp.cos(jnp.arange(32.0))[None]
    return jnp.square((h * weights).reshape(24, 2, 32).sum(1) @ last).mean()


def sliced(params, x):
    """A part of what a product has made is added up."""
    first, last = params
    h = jnp.tanh(x @ first)
    both = jnp.concatenate([h[jnp.arange(24) % 5], h], -1)
    return jnp.square(both @ jnp.concatenate([last, last])).mean()


def embedded(params, x):
    table, last = params
    tokens = jnp.arange(24) % 5
    return jnp.square(jnp.tanh(table[tokens]) @ last + x[:, :8]).mean()


def pair():
    return weights((16, 32), (32, 8)), normal(24, 16)


PROGRAMS = {
    "u_shaped": (u_shaped, u_shape),
    "rotated": (rotated, pair),
    "upsampled": (upsampled, pair),
    "gathered": (gathered, pair),
    "sliced": (sliced, pair),
    "embedded": (embedded, pair),
}


def restored(jaxpr):
    """Returns the shapes of what is read from behind a barrier on GPUs alone."""
    found = choices(jaxpr, "live_ranges")
    assert all(devices_of(e) == ("cuda",) for e in found)
    return [v.aval.shape for e in found for v in e.outvars]


def test_a_waiting_cotangent_is_written_in_half():
    """The skip's, not that of what it was joined to, which is read at once."""
    step, args = gradient_step(u_shaped), u_shape()
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    found = choices(jaxpr, "live_ranges")
    parts = [e for e in found if e.outvars[0].aval.shape == (24, 32)]
    assert [str(e.outvars[0].aval.dtype) for e in parts] == ["bfloat16"]


def test_cotangents_read_at_once_do_not_wait():
    step, args = gradient_step(rotated), pair()
    assert restored(trace(mixed_precision(step, "mixed_bfloat16"), *args)) == []


@pytest.mark.parametrize(
    ("name", "shapes", "tied"),
    [
        # Zeros, and what is added to them, which a product has made.
        ("upsampled", [(24, 32), (48, 32)], ["f32[]", "f32[48,32]"]),
        # What is stored, of which it is a part, widened.
        ("sliced", [(24, 32), (24, 32)], ["f32[]", "bf16[24,64]"]),
        # Nothing is stored of it: zeros alone, which wait for one of the terms.
        ("gathered", [(24, 32)], ["u32[]"]),
        ("embedded", [], []),  # nothing waits for the gradient of a table
    ],
)
def test_zeros_are_filled_when_something_is_added(name, shapes, tied):
    loss, arguments = PROGRAMS[name]
    jaxpr = trace(mixed_precision(gradient_step(loss), "mixed_bfloat16"), *arguments())
    sums = [dtypes_in(e)[0] for e in eqns(jaxpr, "scatter-add")]
    assert sums.count("float32") == 1 and "bfloat16" not in sums
    assert restored(jaxpr) == shapes
    with use_passes("live_ranges", device="NVIDIA GPU"):
        there = trace(
            mixed_precision(gradient_step(loss), "mixed_bfloat16"), *arguments()
        )
    barriers = eqns(there, "optimization_barrier")
    found = [v.aval.str_short(short_dtypes=True) for e in barriers for v in e.outvars]
    assert found == tied


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gpu_computes_the_same(name, policy):
    loss, arguments = PROGRAMS[name]
    step, args = gradient_step(loss), arguments()

    def change(step):
        return jax.tree.map(lambda a, w: a - w, jax.jit(step)(*args), args[0])

    here, exact = change(mixed_precision(step, policy)), change(step)
    with use_passes("-keep_rounding", device="NVIDIA GPU"):  # which this CPU drops
        there = change(mixed_precision(step, policy))
    assert relative_error(here, there) < EPS[policy]
    with use_passes("all", device="NVIDIA GPU"):
        kept = change(mixed_precision(step, policy))
    assert relative_error(kept, exact) < 8 * EPS[policy]


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_mapped_and_differentiated(name):
    loss, arguments = PROGRAMS[name]
    step = mixed_precision(gradient_step(loss), "mixed_bfloat16")
    params, x = arguments()
    both = jax.jit(jax.vmap(step, (None, 0)))(params, np.stack([x, -x]))
    for i, one in enumerate((x, -x)):
        alone = jax.jit(step)(params, one)
        same = jax.tree.map(lambda leaf, i=i: leaf[i], both)
        assert relative_error(same, alone) < EPS["mixed_bfloat16"]

    def norm(step):
        return lambda x: sum(jnp.square(w).sum() for w in step(params, x))

    found = jax.grad(norm(step))(x)
    plain = jax.grad(norm(gradient_step(loss)))(x)
    assert relative_error(found, plain) < 16 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_it_is_reported():
    step, args = gradient_step(u_shaped), u_shape()
    report = explain(step, "mixed_bfloat16")(*args)
    assert report.flops == explain(step, "float32")(*args).flops
    diagnosis = diagnose(step, "mixed_bfloat16")(*args)
    assert max(diagnosis.results.values()) < diagnosis.tolerance
