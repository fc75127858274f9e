"""What a GPU computes in the kernel of a product, and sums of neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, choices, devices_of, eqns, relative_error, trace, walk
from jax import lax
from programs import normal, weights

from jmp_rewrite import _compat, mixed_precision, use_passes

IMAGES = (2, 8, 8, 4)


def step_of(loss):
    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    return step


def traced(loss, params, x, device=None):
    with use_passes("all", device=device):
        return trace(mixed_precision(step_of(loss), "mixed_bfloat16"), params, x)


def convolve(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def kernels(groups=1):
    first, last = weights((9 * 4 // groups, 8), (9 * 8, 4))
    shapes = (3, 3, 4 // groups, 8), (3, 3, 8, 4)
    bias = jnp.asarray(normal(1, 1, 1, 8))
    return first.reshape(shapes[0]), last.reshape(shapes[1]), bias


def biased(params, x):
    first, last, bias = params
    h = jax.nn.relu(convolve(x, first) + bias)
    return jnp.square(convolve(h, last)).mean()


def broadcast_bias(params, x):
    first, last, bias = params
    h = convolve(x, first)
    h = jnp.tanh(h + jnp.broadcast_to(bias, h.shape))
    return jnp.square(convolve(h, last)).mean()


def mapped(params, x):
    """A bias is broadcast to an image, and that to the batch."""
    first, last, bias = params

    def one(x):
        h = convolve(x[None], first)
        return jnp.tanh(h + jnp.broadcast_to(bias, h.shape))[0]

    return jnp.square(convolve(jax.vmap(one)(x), last)).mean()


def grouped(params, x):
    first, last, bias = params
    h = jax.nn.relu(convolve(x, first, groups=2) + bias)
    return jnp.square(convolve(h, last)).mean()


def pooled(params, x):
    """What is one row of each image, with a bias, is added to all rows."""
    first, last, bias = params
    h = jax.nn.relu(convolve(x, first))
    rows = jax.nn.relu(convolve(h.mean(1, keepdims=True), last))
    with jax.numpy_rank_promotion("allow"):
        h = h + (convolve(rows, first) + bias[0, 0, 0])
    return jnp.square(convolve(jax.nn.relu(convolve(h, last)), first)).mean()


def residual(params, x):
    first, last, _ = params
    h = convolve(x, first) + jnp.concatenate([x, x], -1)
    return jnp.square(convolve(h, last)).mean()


def read_twice(params, x):
    first, last, bias = params
    h = convolve(x, first)
    return jnp.square(convolve(jnp.tanh(h + bias) * h, last)).mean()


def reconstructed(params, x):
    """A residual is a layer's operand, and its square a term of the loss."""
    first, last, bias = params
    residual = convolve(x, first) + bias - jnp.concatenate([x, x], -1)
    return jnp.square(convolve(residual, last)).mean() + jnp.square(residual).mean()


def centred(params, x):
    """A number is taken off, as large as the bias may be."""
    first, last, bias = params
    h = jnp.tanh(convolve(x, first) + bias - 10.0)
    return jnp.square(convolve(h, last)).mean()


def pixels(params, x):
    """So it is where the units of an image change first."""
    first, last, bias = params
    h = jnp.tanh((convolve(x, first) + bias) / 127.5 - 1.0)
    return jnp.square(convolve(h, last)).mean()


def turned(params, x):
    """And where a number is added to the negative, behind a bound."""
    first, last, bias = params
    h = jnp.tanh(1.0 - jnp.maximum(convolve(x, first) + bias, 0))
    return jnp.square(convolve(h, last)).mean()


def streamed(params, x):
    """Two sums with a stream: behind a bias, and without one."""
    first, last, bias = params
    h = convolve(x, first)
    inner = jnp.concatenate([last, last], 3), jnp.concatenate([first, first], 2)
    h = h + (convolve(jnp.tanh(h), inner[0]) + bias)
    h = h + convolve(jnp.tanh(h), inner[1])
    return jnp.square(convolve(h, last)).mean()


def images():
    return jnp.asarray(normal(*IMAGES))


@pytest.mark.parametrize(
    ("loss", "groups", "found"),
    [
        (biased, 1, True),
        (broadcast_bias, 1, True),
        (mapped, 1, True),
        (grouped, 2, False),  # cuDNN takes none
        (residual, 1, False),  # no bias
        (read_twice, 1, False),  # the result itself is stored
        (reconstructed, 1, False),  # a difference reads the sum unrounded
        (centred, 1, False),
        (pixels, 1, False),
        (turned, 1, False),
    ],
)
def test_a_bias_is_added_in_the_result_of_a_convolution(loss, groups, found):
    args = kernels(groups), images()
    edits = choices(traced(loss, *args), "bias_in_convolution")
    assert bool(edits) is found
    assert all(devices_of(e) == ("cuda",) for e in edits)
    there = eqns(traced(loss, *args, device="NVIDIA GPU"), "add")
    half = [e for e in there if e.outvars[0].aval.dtype == jnp.bfloat16]
    assert bool(half) is found


def test_a_stream_is_added_in_the_result_of_a_convolution():
    args = kernels(), images()
    there = eqns(traced(streamed, *args, device="NVIDIA GPU"), "add")
    half = [e for e in there if e.outvars[0].aval.dtype == jnp.bfloat16]
    streams = [e for e in half if len({v.aval.shape for v in e.invars}) == 1]
    assert len(streams) == 2


def test_a_rectifier_is_a_part_of_the_convolution():
    """A compiler would ask the sum for the sign, and keep it for that."""
    args = kernels(), images()
    program = traced(biased, *args, device="NVIDIA GPU")
    made = {v: e.primitive.name for e in walk(program) for v in e.outvars}
    (sign,) = eqns(program, "gt")
    assert made[sign.invars[0]] == "optimization_barrier"


@pytest.mark.parametrize("mask", [-1e9, float(jnp.finfo(jnp.float32).min)])
def test_a_mask_that_is_a_bias_becomes_no_infinity(mask):
    """In float16, where other devices add it in float32."""
    first, last, bias = kernels()
    masked = jnp.where(jnp.arange(bias.size) < 3, mask, bias.ravel())

    def fun(first, last, bias, x):
        h = convolve(x, first) + bias[None, None, None]
        return convolve(jax.nn.gelu(h), last)

    args = first, last, masked, images()
    half = mixed_precision(fun, "mixed_float16")
    with use_passes("bias_in_convolution", device="NVIDIA H200"):
        program = trace(half, *args)
        found = jax.jit(half)(*args)
    added = [e.outvars[0].aval.dtype for e in eqns(program, "add")]
    assert jnp.float16 in added
    assert relative_error(found, fun(*args)) < 8 * EPS["mixed_float16"]


def on_a_gpu(loss, args):
    """Evaluates the program of a GPU, in the order in which it is written."""
    closed = traced(loss, *args, device="NVIDIA GPU")
    out = _compat.evaluate(closed, jax.tree.leaves(args))
    return [a - w for a, w in zip(out, jax.tree.leaves(args[0]), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [biased, broadcast_bias, mapped, streamed, pooled])
def test_gradients_of_convolutions(loss):
    args = kernels(), images()
    exact = [-g for g in jax.grad(loss)(*args)]
    assert relative_error(on_a_gpu(loss, args), exact) < 2**-6


# ---- products


def rectified(params, x):
    first, second, last = params
    h = jax.nn.relu(x @ first + second[:1])
    h = jax.nn.relu(h @ second + first[:1])
    return jnp.square(h @ last).mean()


def capped(params, x):
    first, second, last = params
    h = 30.0 * jnp.tanh(x @ first / 30.0)
    return jnp.square(jax.nn.softmax(h @ second) @ last).mean()


def gelu(params, x):
    first, _, last = params
    return jnp.square(jax.nn.gelu(x @ first) @ last).mean()


def gated(params, x):
    first, second, last = params
    h = jnp.tanh(x @ first) * jax.nn.relu(x @ second[:16])
    return jnp.square(h @ last).mean()


def capped_scores(params, x):
    first, second, last = params
    h = (x @ first).reshape(2, 12, 4, 8)
    scores = 5.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", h, h) / 5.0)
    h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), h)
    return jnp.square(h.reshape(24, 32) @ second @ last).mean()


def layers():
    return weights((16, 32), (32, 32), (32, 8)), jnp.asarray(normal(24, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (rectified, 2),
        (capped, 1),
        (gelu, 0),  # the argument is read several times
        (gated, 0),  # XLA merges two products of one operand
        (capped_scores, 0),  # and several batch dimensions, behind which it fuses none
    ],
)
def test_an_epilogue_is_computed_in_its_product(loss, count):
    args = layers()
    edits = choices(traced(loss, *args), "epilogue_in_product")
    assert len(edits) == count
    assert all(devices_of(e) == ("cuda",) for e in edits)
    program = traced(loss, *args, device="NVIDIA GPU")
    assert bool(eqns(program, "optimization_barrier")) or not count


def test_a_product_reads_what_was_computed_in_the_one_before():
    program = traced(rectified, *layers(), device="NVIDIA GPU")
    made = {v: e for e in walk(program) for v in e.outvars}
    wide = [e for e in eqns(program, "dot_general") if _is_wide(e)]
    second = next(e for e in wide if e.invars[0].aval.shape == (24, 32))
    assert made[second.invars[0]].primitive.name == "optimization_barrier"


def _is_wide(eqn):
    half = all(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
    return half and eqn.outvars[0].aval.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("loss", [rectified, capped])
def test_gradients_of_products(loss):
    args = layers()
    exact = [-g for g in jax.grad(loss)(*args)]
    assert relative_error(on_a_gpu(loss, args), exact) < 2**-6


# ---- sums of neighbours


def enlarged(size):
    def loss(params, x):
        first, last = params
        h = jax.image.resize((x @ first).reshape(2, 6, 8), (2, size, 8), "nearest")
        return jnp.square(h @ last).mean()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "scatters"),
    [(6, 0), (12, 0), (18, 0), (9, 1), (4, 1)],
)
def test_gradients_of_repeats_are_sums(size, scatters):
    args = weights((5, 8), (8, 3)), jnp.asarray(normal(12, 5))
    program = traced(enlarged(size), *args)
    assert len(eqns(program, "scatter-add")) == scatters
    with use_passes("-scatter_as_sum"):
        step = mixed_precision(step_of(enlarged(size)), "mixed_bfloat16")
        before = trace(step, *args)
    leaves = jax.tree.leaves(args)
    for one, other in zip(
        _compat.evaluate(program, leaves), _compat.evaluate(before, leaves), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2**-20, atol=2**-20)


@pytest.mark.slow
def test_an_index_in_another_order():
    """`order="F"` permutes: 0 1 2 3 0 1 2 3 are no neighbours, 0 0 1 1 2 2 3 3 are."""

    def loss(params, x):
        first, last = params
        index = jnp.broadcast_to(jnp.arange(6)[:, None], (6, 2)).ravel(order="F")
        return jnp.square(jnp.tanh((x @ first)[index]) @ last).mean()

    params, x = weights((5, 8), (8, 3)), jnp.asarray(normal(6, 5))
    step = mixed_precision(step_of(loss), "mixed_bfloat16")
    found = [w - v for w, v in zip(params, step(params, x), strict=True)]
    assert relative_error(found, list(jax.grad(loss)(params, x))) < 2**-5


def test_two_repeats_share_a_function():
    """JAX traces `resize` of equal shapes once: its transpose has two callers."""

    def loss(params, x):
        for w in params:
            x = jax.image.resize((x @ w).reshape(2, 6, 8), (2, 12, 8), "nearest")
            x = x[:, ::2].reshape(12, 8)
        return jnp.square(x).mean()

    args = weights((8, 8), (8, 8)), jnp.asarray(normal(12, 8))
    assert eqns(trace(step_of(loss), *args), "scatter-add")
    assert not eqns(traced(loss, *args), "scatter-add")


@pytest.mark.slow
def test_a_scan_reads_a_part_of_known_indices():
    """0, 0, 1, 1, ... in rows, one a turn: no turn adds up neighbours of its own."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def loss(params, x):
        first, last = params
        index = lax.div(lax.iota(jnp.int32, 16), 2).reshape(2, 8, 1)

        def body(total, turn):
            rows, at = turn
            h = jnp.tanh(rows @ first)
            return total + lax.scatter_add(jnp.zeros((8, 8)), at, h, numbers), None

        total, _ = lax.scan(body, jnp.zeros((8, 8)), (x, index))
        return jnp.square(total @ last).mean()

    params, x = weights((5, 8), (8, 3)), jnp.asarray(normal(2, 8, 5))
    gradients = [
        [w - v for w, v in zip(params, step(params, x), strict=True)]
        for step in (mixed_precision(step_of(loss), "mixed_bfloat16"), step_of(loss))
    ]
    assert relative_error(*gradients) < 2**-5


# ---- what products alone read


@pytest.mark.slow
def test_a_moved_kernel_is_reversed_in_half():
    """The gradient of its input, at weights that a gradient has moved."""

    def step(params, x):
        first, last, _ = params
        moved = step_of(biased)(params, x)
        grads = jax.grad(biased)(moved, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    args = kernels(), images()
    program = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    kinds = {str(e.outvars[0].aval.dtype) for e in eqns(program, "rev")}
    assert kinds == {"bfloat16"}
