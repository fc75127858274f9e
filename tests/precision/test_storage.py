"""What is written to memory is half, what stays in registers is float32.

Whole train steps of small models, judged on the rewritten jaxpr.
"""

import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from helpers import (
    HALF,
    choices,
    devices_of,
    dtypes_in,
    dtypes_out,
    eqns,
    names_in,
    open_jaxpr,
    trace,
    walk,
)
from jax import lax
from jax.extend import core as jex
from programs import normal, weights

from jmp_rewrite import _compat, explain, mixed_precision, use_passes
from jmp_rewrite._passes.by_device import Where, by_device

T, D = 16, 32  # tokens and features; 48 is the width of the hidden layer
OPTIMIZER = optax.sgd(0.1)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes integers to floats, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale[None]


def block(params, x, post):
    wq, wk, wv, wo, w1, w2, s1, s2 = params

    def attend(h):
        logits = (h @ wq) @ (h @ wk).T
        logits = jnp.where(jnp.tri(T, dtype=bool), logits * 0.25, -jnp.inf)
        return jax.nn.softmax(logits) @ (h @ wv) @ wo

    def feed(h):
        return jax.nn.gelu(h @ w1) @ w2

    if post:
        x = norm(x + attend(x), s1)
        return norm(x + feed(x), s2)
    x = x + attend(norm(x, s1))
    return x + feed(norm(x, s2))


def layer_params():
    return (
        *weights((D, D), (D, D), (D, D), (D, D), (D, 48), (48, D)),
        jnp.ones(D),
        jnp.ones(D),
    )


def step_of(post, scanned=False):
    """A step of two layers and a head, and its arguments."""

    def loss(params, ids, labels):
        table, layers, head, last = params
        x = table[ids]
        if scanned:
            x, _ = lax.scan(lambda x, p: (block(p, x, post), None), x, layers)
        else:
            for layer in layers:
                x = block(layer, x, post)
        logits = norm(x, last) @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, state, ids, labels):
        value, grads = jax.value_and_grad(loss)(params, ids, labels)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    layers = [layer_params(), layer_params()]
    if scanned:
        layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    head = normal(D, 11, seed=3)
    params = (normal(9, D, seed=2), layers, head, jnp.ones(D))
    params = jax.tree.map(jnp.asarray, params)
    ids = jnp.arange(T) % 9
    return step, (params, OPTIMIZER.init(params), ids, ids + 1)


STEPS = {
    "pre-norm": dict(post=False),
    "post-norm": dict(post=True),
    "pre-norm scan": dict(post=False, scanned=True),
    "post-norm scan": dict(post=True, scanned=True),
}
every_step = pytest.mark.parametrize("kind", STEPS)


def rewritten(kind, policy="mixed_bfloat16"):
    step, args = step_of(**STEPS[kind])
    return trace(mixed_precision(step, policy), *args)


def bodies(jaxpr):
    """All jaxprs inside, this one first."""
    jaxpr = open_jaxpr(jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from bodies(inner)


@pytest.mark.slow
@every_step
def test_no_value_is_kept_in_two_dtypes(kind):
    """What is computed and rounded is read rounded by everybody."""
    rounded = 0
    for body in bodies(rewritten(kind)):
        readers = {}
        for eqn in body.eqns:
            for atom in eqn.invars:
                if not hasattr(atom, "val"):
                    readers.setdefault(atom, []).append(eqn)
        made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        for eqn in body.eqns:
            if eqn.primitive.name != "convert_element_type":
                continue
            source, target = eqn.invars[0], eqn.params["new_dtype"]
            if source not in made or source.aval.dtype != "float32":
                continue
            if made[source].primitive.name in ("jit", "gather", "broadcast_in_dim"):
                continue  # an argument's values: a row of the embedding table
            if "pass:recompute_stacks" in str(made[source].source_info.name_stack):
                continue  # made again of a stacked value, and kept in neither
            if str(target) == HALF["mixed_bfloat16"]:
                rounded += 1
                others = [e for e in readers[source] if e is not eqn]
                assert all(e.primitive.name == "by_device" for e in others), source
                assert source not in body.outvars
    assert rounded > 20


@pytest.mark.slow
@every_step
def test_values_that_cpus_read_unrounded_are_no_residuals(kind):
    """There a value is read as it was computed, but in the pass that computes it."""
    read = 0
    for body in bodies(rewritten(kind)):
        made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        late = {v: is_late(eqn) for eqn in body.eqns for v in eqn.outvars}
        found = choices(body, "read_before_rounding")
        exact = {e.outvars[0] for e in found}.intersection(made)
        for eqn in body.eqns:
            for var in exact.intersection(vars_in(eqn)):
                read += 1
                assert late[made[var].invars[1]] or not is_late(eqn)
        assert exact.isdisjoint(body.outvars)
    assert read > 2


def vars_in(eqn):
    return [v for v in eqn.invars if not hasattr(v, "val")]


def is_late(eqn):
    return "transpose(" in str(eqn.source_info.name_stack)


@pytest.mark.slow
@every_step
def test_the_residual_stream_is_half(kind):
    """Between layers and between their gradients the stream is written in half."""
    half = HALF["mixed_bfloat16"]
    streams, gradients = 0, 0
    for body in bodies(rewritten(kind)):
        rounded = {
            e.invars[0]
            for e in body.eqns
            if e.primitive.name in ("convert_element_type", "saturating_cast")
            and str(e.outvars[0].aval.dtype) == half
        }
        for eqn in body.eqns:
            (out, *_) = eqn.outvars
            is_half = str(out.aval.dtype) == half or out in rounded
            if out.aval.shape == (T, D) and is_half:
                streams += eqn.primitive.name == "add"
                gradients += eqn.primitive.name == "add_any"
            if eqn.primitive.name == "scan":
                carried = [v.aval for v in eqn.outvars if v.aval.shape == (T, D)]
                assert [str(a.dtype) for a in carried] == [half]
    layers = 1 if "scan" in kind else 2
    # The first sum is with the exact argument, and rounded before it.
    assert streams >= 2 * layers - 1
    assert gradients >= 2 * layers - 1


@pytest.mark.slow
@pytest.mark.breadth
@every_step
@pytest.mark.parametrize("policy", HALF)
def test_interiors_are_float32(kind, policy):
    """Softmax, norms, their statistics and derivatives: half at the edges only."""
    jaxpr = rewritten(kind, policy)
    for name in ("exp", "rsqrt", "reduce_sum", "reduce_max", "div", "sub", "log"):
        for eqn in eqns(jaxpr, name):
            # GELU's 1 - tanh is no interior: JAX 0.10 stacks it for the backward pass.
            if eqn.outvars[0].aval.shape != (T, 48):
                assert HALF[policy] not in dtypes_in(eqn) + dtypes_out(eqn), eqn
    for eqn in eqns(jaxpr, "add", "mul", "max", "integer_pow", "square"):
        if eqn.outvars[0].aval.shape in ((T,), (T, 1)):
            assert HALF[policy] not in dtypes_out(eqn), eqn


@every_step
def test_picked_logits_are_moved_in_half(kind):
    """The labels' logits come from the rounded ones; all are not cast for them."""
    with use_passes("-scatter_as_select"):
        jaxpr = rewritten(kind)
    half = HALF["mixed_bfloat16"]
    picked = [e for e in eqns(jaxpr, "gather") if e.invars[0].aval.shape == (T, 11)]
    assert picked and all(dtypes_out(e) == [half] for e in picked)
    placed = eqns(jaxpr, "scatter")
    assert placed and all(dtypes_out(e) == [half] for e in placed)
    tables = eqns(jaxpr, "scatter-add")
    assert tables and all(dtypes_out(e) == ["float32"] for e in tables)


def test_residuals_are_half():
    """GELU's tanh, from which its derivative is computed, and nothing between."""
    jaxpr = rewritten("pre-norm")
    half = HALF["mixed_bfloat16"]
    arithmetic = [
        e
        for e in walk(jaxpr)
        if e.primitive.name in ("add", "mul", "sub", "tanh", "integer_pow", "add_any")
        and e.outvars[0].aval.shape == (T, 48)
    ]
    assert len(arithmetic) > 20
    assert not [e for e in arithmetic if half in dtypes_in(e)]
    made = {e.outvars[0] for e in eqns(jaxpr, "tanh")}
    casts = [e for e in eqns(jaxpr, "convert_element_type") if dtypes_out(e) == [half]]
    assert len([e for e in casts if e.invars[0] in made]) == 2  # one a layer


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("bias", [False, True])
def test_a_maximum_that_a_product_reads_is_half_as_what_it_is_of(bias, policy):
    """Its derivative asks which elements equal it, and counts them: exact in half."""

    def loss(params, x):
        h = x @ params[0] + (params[2][None] if bias else 0.0)
        h = h.reshape(T, 24, 2).max(-1)
        return jnp.square(h @ params[1]).mean()

    params = (*weights((D, 48), (24, D)), jnp.ones(48))
    jaxpr = trace(mixed_precision(jax.grad(loss), policy), params, normal(T, D))
    half = HALF[policy]
    (largest,) = eqns(jaxpr, "reduce_max")
    assert dtypes_in(largest) == dtypes_out(largest) == [half]
    (count,) = [e for e in eqns(jaxpr, "reduce_sum") if e.params["axes"] == (2,)]
    read = {
        e.invars[0]
        for e in eqns(jaxpr, "convert_element_type")
        if dtypes_out(e) == [half]
    }
    assert count.outvars[0] in read


EMPTY = {
    "kept": lambda y: jnp.maximum(y, -1e3),
    "a float": lambda y: jnp.where(jnp.isneginf(y), 0.0, y),
    "an integer": lambda y: jnp.where(jnp.isneginf(y), 0, y),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("segment", [jax.ops.segment_max, jax.ops.segment_min])
def test_a_largest_neighbour_is_half_as_what_it_is_of(segment, empty, policy):
    """Whatever stands for one of none; what equals it is counted in float32."""
    of = jnp.arange(T) // 3 % 4

    def loss(params, x, of):
        h = jax.nn.relu(x @ params[0])
        found = segment(h if segment is jax.ops.segment_max else -h, of, 6)
        if segment is jax.ops.segment_min:
            found = -found
        return jnp.square(EMPTY[empty](found) @ params[1]).mean()

    params, x = weights((D, 48), (48, D)), normal(T, D)
    gradient = jax.grad(loss)
    jaxpr = trace(mixed_precision(gradient, policy), params, x, of)
    name = "scatter-max" if segment is jax.ops.segment_max else "scatter-min"
    (extreme,) = eqns(jaxpr, name)
    assert dtypes_out(extreme) == [HALF[policy]]
    counts = eqns(jaxpr, "scatter-add")
    assert counts and all(dtypes_out(e) == ["float32"] for e in counts)
    half = jax.jit(mixed_precision(gradient, policy))(params, x, of)
    exact = gradient(params, x, of)
    for a, b in zip(half, exact, strict=True):
        assert jnp.linalg.norm(a - b) < 2**-5 * jnp.linalg.norm(b)


def test_the_largest_probability_is_float32_as_all_are():
    """A router that compares them would choose two experts of two equal ones."""

    def loss(params, x):
        p = jax.nn.softmax(x @ params[0])
        largest = p.max(-1, keepdims=True)
        chosen = jnp.where(p == largest, p, 0.0)
        return jnp.square(chosen @ params[1]).mean()

    jaxpr = trace(
        mixed_precision(jax.grad(loss)), weights((D, 48), (48, D)), normal(T, D)
    )
    compared = [e for e in eqns(jaxpr, "eq") if e.invars[0].aval.shape == (T, 48)]
    assert compared and all(dtypes_in(e) == ["float32"] * 2 for e in compared)


def test_the_gradient_of_an_exact_gelu_is_half():
    """Its derivative makes floats of masked bits, which are no random parameters."""

    def loss(params, x):
        h = jax.nn.gelu(x @ params[0], approximate=False)
        return jnp.square(h @ params[1]).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    params = weights((D, 48), (48, D))
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, normal(T, D))
    products = eqns(jaxpr, "dot_general")
    hidden = [e for e in products if e.outvars[0].aval.shape == (T, 48)]
    assert [dtypes_out(e) for e in hidden] == [["bfloat16"]] * 2  # there and back


def normed(params, x):
    """A product with two biases, a group norm, and SiLU: a block of a U-Net."""
    w, bias, shift, scale, out = params
    h = (x @ w + bias[None] + shift[None]).reshape(T, 6, 8)
    mean = h.mean(-1, keepdims=True)
    variance = jnp.square(h).mean(-1, keepdims=True) - jnp.square(mean)
    h = ((h - mean) * lax.rsqrt(variance + 1e-5)).reshape(T, 48) * scale[None]
    return jnp.square(jax.nn.silu(h) @ out).mean()


def normed_step():
    w, bias, shift, scale, out = weights((D, 48), (48,), (48,), (48,), (48, D))
    params = [w, bias, shift, 1.0 + scale, out]

    def step(params, x):
        grads = jax.grad(normed)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return mixed_precision(step, "mixed_bfloat16"), params, normal(T, D)


def maker(jaxpr, var):
    return next(e for e in walk(jaxpr) if var in e.outvars)


def test_the_input_of_a_norm_is_rounded_after_the_bias():
    """XLA stores it, for it is read in five kernels."""
    jaxpr = trace(*normed_step())
    (on_gpu,) = choices(jaxpr, "recompute_logistic")
    assert devices_of(on_gpu) == ("cuda",) and names_in(on_gpu) == ["logistic"]
    casts = [maker(jaxpr, e.invars[0]) for e in choices(jaxpr, "keep_rounding")]
    rounded = [maker(jaxpr, e.invars[0]) for e in casts]
    (last,) = [e for e in rounded if e.primitive.name == "add"]
    first = next(v for v in last.invars if v.aval.shape == (T, 48))
    assert maker(jaxpr, first).primitive.name == "add"  # after the second one


@pytest.mark.parametrize("kernels", ["few", "many"])
def test_a_bias_that_few_kernels_add_is_not_rounded(kernels):
    """Without a norm the sum is cheaper computed again in each of them."""
    (w, out), (bias,) = weights((D, 48), (48, D)), weights((48,))

    def loss(params, x):
        w, bias, out = params
        h = x @ w + bias[None]
        if kernels == "many":
            for _ in range(3):
                h = h - jnp.square(h).mean(-1, keepdims=True)
        return jnp.square(jnp.tanh(h) @ out).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    step = mixed_precision(step, "mixed_bfloat16")
    jaxpr = trace(step, [w, bias, out], normal(T, D))
    rounded = [
        maker(jaxpr, maker(jaxpr, e.invars[0]).invars[0])
        for e in choices(jaxpr, "keep_rounding")
    ]
    assert [e.primitive.name for e in rounded].count("add") == (kernels == "many")


@pytest.mark.parametrize("norms", [0, 1])
def test_a_forward_function_rounds_the_start_of_a_residual_stream(norms):
    """Two kernels of a norm and the stream read it; without a norm one reads it."""

    def fun(params, x):
        w, bias, shift, out = params
        x = x @ w + bias[None]
        x = jnp.concatenate([bias[None], x]) + shift[None]
        h = x
        for _ in range(norms):
            h = norm(h, bias)
        return x + jnp.tanh(h @ out) @ out

    args = weights((D, 48), (48,), (48,), (48, 48)), normal(T, D)
    jaxpr = trace(mixed_precision(fun, "mixed_bfloat16"), *args)
    made = [maker(jaxpr, e.invars[0]) for e in choices(jaxpr, "keep_rounding")]
    rounded = [maker(jaxpr, e.invars[0]) for e in made]
    sums = [e for e in rounded if e.primitive.name == "add"]
    assert len(sums) == norms
    for eqn in sums:
        assert maker(jaxpr, eqn.invars[0]).primitive.name == "concatenate"


def test_a_residual_sum_is_rounded_once():
    """Many kernels read the sum of two streams, not the biased product in it."""

    def loss(params, x):
        first, w, bias, scale, out = params
        x = x @ first
        x = x + (jnp.tanh(x) @ w + bias[None])
        return jnp.square(norm(norm(x, scale), scale) @ out).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    first, w, bias, scale, out = weights((D, 48), (48, 48), (48,), (48,), (48, D))
    args = [first, w, bias, 1.0 + scale, out], normal(T, D)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    rounded = [maker(jaxpr, e.invars[0]) for e in choices(jaxpr, "keep_rounding")]
    rounded = [e for e in rounded if e.primitive.name != "tanh"]
    stream = maker(jaxpr, rounded[0].invars[0])
    assert [maker(jaxpr, v).primitive.name for v in stream.invars] == [
        "convert_element_type",  # a product's half result
        "add",  # with the bias, and not rounded
    ]


def test_both_operands_of_a_skip_are_half():
    """Also where a norm reads one side of it, at the skip's other end."""

    def loss(params, x):
        first, bias, scale, w, both = params
        h = x @ first + bias[None]
        y = jax.nn.silu(norm(norm(h, scale), scale)) @ w
        joined = jnp.concatenate([y, h], -1)
        joined = norm(joined, jnp.concatenate([scale, scale]))
        return jnp.square(joined @ both).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    first, bias, scale, w, both = weights((D, 48), (48,), (48,), (48, 48), (96, D))
    args = [first, bias, 1.0 + scale, w, both], normal(T, D)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    joins = [e for e in eqns(jaxpr, "concatenate") if e.outvars[0].aval.shape[0] == T]
    assert [dtypes_out(e) for e in joins] == [["bfloat16"]]


@pytest.mark.parametrize("statistics", ["of the batch", "of groups"])
def test_values_of_several_kernels_are_rounded(statistics):
    """The cotangent of a norm behind SiLU, beside one that comes from a skip.

    It is read for the gradients of scale and shift, for the cotangents of mean and
    variance, which are sums along other axes if the norm is one of groups, and for its
    own sum with what the skip hands back.
    """
    rows, pixels, groups = 2, T // 2, 6

    def mean(h):
        if statistics == "of the batch":
            return h.mean((0, 1))[None, None]
        h = h.mean(1).reshape(rows, groups, -1).mean(-1)
        return h.repeat(48 // groups, 1)[:, None]

    def loss(params, x):
        w, scale, shift, out, skip = params
        y = x @ w
        center, square = mean(y), mean(jnp.square(y))
        h = (y - center) * lax.rsqrt(square - jnp.square(center) + 1e-5)
        h = jax.nn.silu(h * scale[None, None] + shift[None, None])
        return jnp.square(h @ out + y @ skip).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    w, scale, shift, out, skip = weights((D, 48), (48,), (48,), (48, D), (48, D))
    params = [w, 1.0 + scale, shift, out, skip]
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, normal(2, T // 2, D))
    held = [
        maker(jaxpr, maker(jaxpr, e.invars[0]).invars[0]).primitive.name
        for e in choices(jaxpr, "keep_rounding")
        if e.outvars[0].aval.shape == (rows, pixels, 48)
    ]
    assert held == ["add_any"] * (2 if statistics == "of groups" else 1)


def test_the_partial_sums_of_scatters_are_not_rounded():
    """XLA makes one scatter of the gradients of several lookups in one array."""

    def loss(params, x, indices):
        first, second, inner, out = params
        table, h = (x @ first) @ (x @ second).T, x
        for index in indices:
            picked = jax.vmap(lambda row, i: row[i])(table, index)
            h = jnp.tanh(h @ inner + picked @ out)
        return jnp.square(h @ first).mean()

    def step(params, *batch):
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    indices = (jnp.arange(T * D).reshape(1, T, D) * jnp.arange(3, 6)[:, None, None]) % T
    args = weights((D, 48), (D, 48), (D, D), (D, D)), normal(T, D), indices
    with use_passes("none"):
        jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    scattered = {v for e in eqns(jaxpr, "scatter-add") for v in e.outvars}
    sums = [e for e in eqns(jaxpr, "add_any") if not scattered.isdisjoint(e.invars)]
    assert len(scattered) == 3 and len(sums) == 2
    (between,) = set(sums[0].outvars) & set(sums[1].invars)
    assert between.aval.dtype == jnp.float32


@pytest.mark.parametrize("operations", [3, 4])
def test_what_takes_several_operations_is_stored(operations):
    """A mean and a maximum of it are taken, and it is multiplied by what they say."""

    def loss(params, x):
        first, gate, scale, shift, out = params
        h = (x @ first).reshape(4, T // 4, 48)
        h = (h - h.mean(1, keepdims=True)) * scale[None, None] + shift[None, None]
        if operations > 3:
            h = jax.nn.relu(h)
        gated = h * jax.nn.sigmoid((h.mean(1) + h.max(1)) @ gate)[:, None]
        return jnp.square(gated.reshape(T, 48) @ out).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    args = weights((D, 48), (48, 48), (48,), (48,), (48, D)), normal(T, D)
    with use_passes("none"):
        jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    (extreme,) = eqns(jaxpr, "reduce_max")
    assert (dtypes_in(extreme) == ["bfloat16"]) == (operations > 3)


def chosen(stored, again, devices):
    (value,) = by_device([stored], [again], {Where(devices): lambda s, a: [a]})
    return value


@pytest.mark.parametrize("window", [2, 1])
def test_the_cotangents_of_windows_are_stored(window):
    """A window that a reshape has cut is put together again by a copy on a TPU."""
    rows, pixels = 2, T // 2

    def loss(params, x):
        w, scale, out = params
        h = x @ w
        h = jax.nn.relu((h - h.mean((0, 1))[None, None]) * scale[None, None])
        h = h.reshape(rows, pixels // window, window, 48).max(2)
        return jnp.square(h @ out).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    w, scale, out = weights((D, 48), (48,), (48, D))
    args = [w, scale, out], normal(rows, pixels, D)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    shares = [
        e
        for e in eqns(jaxpr, "reshape")
        if e.invars[0].aval.shape == (rows, pixels // window, window, 48)
    ]
    expected = "bfloat16" if window > 1 else "float32"
    assert {d for e in shares for d in dtypes_out(e)} == {expected}


@pytest.mark.parametrize("back", [False, True])
def test_the_cotangent_of_a_cast_to_half_asks_for_no_float32(back):
    """Who casts logits down saves memory; JAX casts their cotangent up."""

    def loss(w, x):
        logits = (jnp.tanh(x @ w) @ w).astype(jnp.bfloat16)
        logits = logits.astype(jnp.float32) if back else logits
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    report = explain(step, "mixed_bfloat16")(normal(D, D), normal(T, D))
    assert report.half_flops == 1


def test_a_cast_to_float32_in_a_layer_is_obeyed():
    def loss(w, x):
        h = (x @ w).astype(jnp.bfloat16)
        return jnp.mean((jnp.tanh(h).astype(jnp.float32) @ w) ** 2)

    report = explain(jax.grad(loss), "mixed_bfloat16")(normal(D, D), normal(T, D))
    rows = [r for r in report.equations if r.primitive == "dot_general"]
    full = [r for r in rows if r.reason == "full: an operand was cast to float32"]
    assert {r.phase for r in full} == {"forward", "backward"}


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("inputs", [1, 2, 4, 5])
def test_a_layer_of_few_inputs_makes_an_activation(inputs, policy):
    """Its operands are read in float32, but what is stored of it is half."""

    def loss(params, x):
        w1, b, w2, w3 = params
        return jnp.mean((jax.nn.gelu(jax.nn.gelu(x @ w1 + b[None]) @ w2) @ w3) ** 2)

    args = (normal(inputs, 256), normal(256), normal(256, 256), normal(256, 8))
    report = explain(jax.grad(loss), policy)(args, normal(512, inputs))
    rows = [r for r in report.equations if r.primitive == "dot_general"]
    first = next(r for r in rows if r.phase == "forward")
    assert first.dtype == ("float32" if inputs <= 4 else policy.removeprefix("mixed_"))
    if policy == "mixed_bfloat16":  # in float16 a gelu keeps a float32 value
        assert report.residual_bytes < 0.52 * report.residual_bytes_before
    else:
        assert report.residual_bytes < 0.67 * report.residual_bytes_before


@pytest.mark.parametrize("policy", HALF)
def test_arithmetic_of_coordinates_makes_no_activation(policy):
    """A rotation that is learned, and distances between points, stay float32."""

    def loss(params, x):
        turn, w = params
        x = x @ turn
        return jnp.mean((jnp.exp(-2 * (x @ x.T)) @ w) ** 2)

    args = normal(3, 3), normal(64, 8)
    report = explain(jax.grad(loss), policy)(args, normal(64, 3))
    rows = [r for r in report.equations if r.primitive == "dot_general"]
    short = [r for r in rows if r.phase == "forward"][:2]
    assert all("no more than 4" in r.reason for r in short)
    assert not any("rounded" in r.reason for r in short)


@pytest.mark.parametrize("name", ["top_k", "sort", "tanh"])
def test_what_is_sorted_is_stored(name):
    """A sort reads its operand from memory; other readers add the bias themselves."""

    def step(w1, b, w2, x):
        def loss(w1):
            h = x @ w1 + b[None]
            h = lax.top_k(h, D)[0] if name == "top_k" else getattr(lax, name)(h)
            return jnp.mean((h @ w2) ** 2)

        return jax.grad(loss)(w1)

    args = normal(D, D), normal(D), normal(D, D), normal(T, D)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    read = dtypes_in(eqns(jaxpr, name)[0])[0]
    assert read == ("float32" if name == "tanh" else "bfloat16")


def test_the_probabilities_of_a_router_are_sorted_in_float32():
    """Half numbers would make ties of them."""

    def step(w1, b, w2, x):
        def loss(w1):
            chosen, experts = lax.top_k(jax.nn.softmax(x @ w1 + b[None]), 4)
            found = jnp.tanh(x @ w2)[experts[:, 0]] * chosen[:, :1]
            return jnp.mean((found @ w2) ** 2)

        return jax.grad(loss)(w1)

    args = normal(D, D), normal(D), normal(D, D), normal(T, D)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    assert dtypes_in(eqns(jaxpr, "top_k")[0])[0] == "float32"


def test_each_platform_reads_its_own():
    """The exact value where XLA computes it again, the stored one elsewhere."""

    def function(stored, again):
        return chosen(stored, again, ("cuda", "TPU v5 lite"))

    traced = jax.jit(function).trace(jnp.zeros(3), jnp.zeros(3))
    for platforms in (("cpu",), ("cuda",), ("tpu",), ("cuda", "tpu")):
        text = traced.lower(lowering_platforms=platforms).as_text()
        stored, again = re.findall(r"(%\w+): tensor<3xf32>", text)
        (read,) = re.findall(r"return (%\w+) : tensor<3xf32>", text)
        assert read == (again if platforms == ("cuda",) else stored)


@pytest.mark.parametrize(
    "version, on, reads_again",
    [
        ("TFRT TPU v5 lite\nBuilt on Nov 5", ("cuda", "TPU v5 lite"), True),
        ("TFRT TPU v5\nBuilt on Nov 5", ("cuda", "TPU v5 lite"), False),
        ("TFRT TPU v6 lite\nBuilt on Nov 5", ("cuda", "TPU v5 lite"), False),
        ("TFRT TPU v6 lite\nBuilt on Nov 5", ("tpu",), True),
        ("cpu", ("TPU v5 lite",), False),  # exported from a machine without one
        (None, ("TPU v5 lite",), False),
    ],
)
def test_a_generation_of_tpus_reads_its_own(version, on, reads_again):
    backend = version and types.SimpleNamespace(platform_version=version)
    context = types.SimpleNamespace(backend=backend, platforms=("tpu",))
    assert _compat.is_for(context, on) == reads_again
    for platforms in (("cpu",), ("cpu", "tpu")):  # lowered on such a machine for others
        context.platforms = platforms
        assert not _compat.is_for(context, on)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("compared", ["logistic", "sum", "moved"])
def test_compared_values_are_equal_on_every_platform(compared):
    """A maximum equals what it was picked from, whichever of the two is read.

    So a value that something other than a product reads in half is the same everywhere:
    the sum of which a `logistic` is half.
    """

    def loss(params, x):
        w, bias, shift, scale, out = params
        h = jnp.einsum("td,dgk->tgk", x, w.reshape(D, 24, 2))
        h = h + bias.reshape(1, 24, 2) + shift.reshape(1, 24, 2)
        mean = h.mean((1, 2), keepdims=True)
        variance = jnp.square(h - mean).mean((1, 2), keepdims=True)
        y = jax.nn.silu((h - mean) * lax.rsqrt(variance + 1e-5))
        if compared == "moved":
            h = h.transpose(0, 2, 1).reshape(T, 24, 2)
        elif compared == "logistic":
            h = jax.nn.sigmoid(h)
        y = (y + h.max(-1, keepdims=True)).reshape(T, 48)
        return jnp.square(y * scale[None] @ out).mean()

    _, params, x = normed_step()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    assert choices(jaxpr, "recompute_logistic")
    with use_passes("all", device="NVIDIA GPU"):
        half = mixed_precision(step, "mixed_bfloat16")(params, x)
    full = step(params, x)
    for a, b in zip(half, full, strict=True):
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(b)


@pytest.mark.slow
def test_a_restored_value_is_mapped_and_differentiated():
    exact = normal(3, 5)
    rounded = exact.astype(jnp.bfloat16).astype(jnp.float32)

    def restore(stored, again):
        return chosen(stored, again, ("tpu",))

    assert (restore(rounded, exact) == rounded).all()
    for axes in ((0, 0), (1, 1)):
        assert (jax.vmap(restore, axes, axes[0])(rounded, exact) == rounded).all()
    moved = jax.vmap(restore, (1, 0))(rounded.T, exact)
    assert (moved == rounded).all()
    repeated = jax.vmap(restore, (None, 0))(rounded, jnp.stack([exact, exact]))
    assert (repeated == jnp.stack([rounded, rounded])).all()

    def square(x):
        return jnp.sum(restore(x.astype(jnp.bfloat16).astype(jnp.float32), x) ** 2)

    assert (jax.grad(square)(exact) == 2 * rounded).all()


def test_bits_of_a_float_are_as_late_as_the_float():
    """The derivative of `erfc` splits a number's bits; its `exp` is read at once."""

    def factor(h):
        bits = lax.bitcast_convert_type(h, jnp.int32) & -4096
        high = lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.exp(-high * high) * (1.0 + (h - high) * h)

    def step(w, x):
        def loss(w):
            h = x @ w
            return jnp.square((h * factor(lax.stop_gradient(h))) @ w.T).mean()

        return w - jax.grad(loss)(w)

    (w,) = weights((D, 48))
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), w, normal(T, D))
    (made,) = eqns(jaxpr, "exp")
    readers = [e for e in walk(jaxpr) if made.outvars[0] in e.invars]
    assert [e.primitive.name for e in readers] == ["mul"]


def test_a_target_is_not_rounded():
    """A regression target that a product reads too stays exact for the loss."""
    (w,) = weights((D, D))
    x, y = normal(T, D), normal(T, D, seed=5)

    def step(w, x, y):
        def loss(w):
            y2 = y.reshape(D, T).T
            return jnp.square(x @ w + y2 @ w - y2).sum()

        return w - 0.1 * jax.grad(loss)(w)

    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), w, x, y)
    (difference,) = [e for e in eqns(jaxpr, "sub") if e.outvars[0].aval.shape == (T, D)]
    assert dtypes_in(difference) == ["float32"] * 2
    (moved,) = [v for v in difference.invars if v.aval.shape == (T, D)][1:]
    maker = next(e for e in walk(jaxpr) if moved in e.outvars)
    assert maker.primitive.name == "transpose"
    assert dtypes_in(maker) == ["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pre-norm scan", "post-norm scan"])
def test_stacked_weights_are_cast_inside(kind):
    """The scans take the float32 stacks; no half copy of all layers is made."""
    stacks = {(2, D, D), (2, D, 48), (2, 48, D)}
    jaxpr = rewritten(kind)
    for eqn in eqns(jaxpr, "convert_element_type", "saturating_cast"):
        assert eqn.outvars[0].aval.shape not in stacks
    scans = eqns(jaxpr, "scan")
    assert len(scans) == 2
    for eqn in scans:
        taken = [v.aval for v in eqn.invars if v.aval.shape in stacks]
        assert len(taken) >= 6 and {str(a.dtype) for a in taken} == {"float32"}


def stacks(fun, *args, policy="mixed_bfloat16"):
    """Returns the dtypes that the forward scan of a gradient stacks."""
    jaxpr = trace(mixed_precision(jax.grad(fun), policy), *args)
    scan, *_ = eqns(jaxpr, "scan")
    return sorted(str(v.aval.dtype) for v in scan.outvars if v.aval.ndim == 3)


def gated(params, x):
    """A recurrent layer with a cell, as an LSTM has one, in few equations."""
    w, u = params

    def cell(carry, x):
        c, h = carry
        gate = jax.nn.sigmoid(x @ w + h @ u)
        c = gate * c + x
        return (c, jnp.tanh(c)), jnp.tanh(c)

    start = jnp.zeros(x.shape[1:])
    return jnp.sum(lax.scan(cell, (start, start), x)[1] ** 2)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_stack_is_stored_in_its_own_dtype(policy):
    """The cell is carried in float32; what the backward pass reads of it is half.

    But not the gate that it is multiplied by in each iteration, in both passes. In
    float16, where a state may leave the range, that is what products alone read.
    """
    params, (x,) = weights((D, D), (D, D)), weights((6, T, D))
    args = tuple(map(jnp.asarray, params)), jnp.asarray(x)
    found = stacks(gated, *args, policy=policy)
    floats = found.count("float32")
    assert len(found) >= 4
    assert floats == 1 if policy == "mixed_bfloat16" else 1 < floats < len(found)
    plain = stacks(gated, *args, policy="float32")
    assert plain.count("float32") == len(plain)


def cubed(state, x):
    return (0.5 * state - x) ** 3 + state


@jax.custom_vjp
def spike(state):
    return (state > 1.0).astype(jnp.float32)


spike.defvjp(
    lambda state: (spike(state), state),
    lambda state, ct: (ct * jnp.exp(-jnp.abs(2 * state - 2)),),
)


def fired(state, x):
    return 0.9 * state + x - spike(state)


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("step", [jax.checkpoint(cubed), fired])
def test_a_state_is_stacked_in_float32_where_it_is_no_factor(step, compared):
    """A rounded state would be compared with a target, or an exponential taken of it.

    What a checkpoint computes again in the backward pass is no arithmetic of
    cotangents, although it stands there; nor is all that a custom rule does, here the
    surrogate gradient of a spiking neuron.
    """
    (w,), (x,) = weights((D, D)), weights((6, T, D))

    def loss(w, x):
        def body(state, x):
            return (step(state, x @ w),) * 2

        states = lax.scan(body, jnp.zeros((T, D)), x)[1]
        return jnp.sum((states - x) ** 2) if compared else jnp.sum(states[-1] @ w)

    jaxpr = trace(mixed_precision(jax.grad(loss), "mixed_bfloat16"), w, x)
    scan, *_ = eqns(jaxpr, "scan")
    kept = [str(v.aval.dtype) for v in scan.outvars if v.aval.shape == (6, T, D)]
    assert kept.count("bfloat16") == (0 if compared else 1) and "float32" in kept


def test_a_cotangent_between_recurrent_layers_is_half():
    """It leads to products through the lower layer's carry alone, and is no carry."""
    params, (x,) = weights((D, D), (D, D), (D, D), (D, D)), weights((6, T, D))

    def layer(w, u, x):
        def cell(c, x):
            c = 0.9 * c + jnp.tanh(x @ w + jnp.tanh(c) @ u)
            return c, jnp.tanh(c)

        return lax.scan(cell, jnp.zeros(x.shape[1:]), x)[1]

    def loss(params, x):
        w1, u1, w2, u2 = params
        return jnp.sum(layer(w2, u2, layer(w1, u1, x)) ** 2)

    jaxpr = trace(mixed_precision(jax.grad(loss), "mixed_bfloat16"), params, x)
    backward = eqns(jaxpr, "scan")[2]
    (carried,) = [v for v in backward.outvars if v.aval.shape in [(T, D), (D, D)]]
    assert str(carried.aval.dtype) == "float32"
    # What leads to no other iteration is computed behind the loop, see `test_sums.py`.
    own = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    behind = [e.outvars[0].aval for e in own]
    assert [a.dtype.name for a in behind if a.shape == (6, T, D)] == ["bfloat16"]
    assert [a.dtype.name for a in behind if a.shape == (D, D)] == ["float32"] * 4


@pytest.mark.slow
def test_data_prepared_for_a_loop_stay_float32():
    """Coefficients of a spline, the times between them, and a solver's first state."""
    (w, v), (x,) = weights((D, D), (D, D)), weights((6, T, D))
    times, order = jnp.cumsum(jnp.abs(x[:, 0, 0]) + 0.1), jnp.array([1, 0, 3, 2, 4])

    def loss(params, x, times):
        w, v = params
        slopes = (x[1:] - x[:-1]) / (times[1:] - times[:-1])[:, None, None]
        slopes = jnp.take(slopes, order, axis=0)
        slopes = slopes - 0.5 * jnp.take(slopes, order, axis=0)

        def step(state, i):
            slope = jnp.take(slopes, i, axis=0) + jnp.take(x, i, axis=0)
            width = jnp.take(times, i + 1) - jnp.take(times, i)
            field = jnp.tanh(state @ w)
            return state + width * jnp.einsum("td,td->t", field, slope)[:, None], None

        start = jnp.tanh(slopes[0] * 2.0)
        return jnp.square(lax.scan(step, start, jnp.arange(5))[0] @ v).mean()

    def train(params, x, times):
        grads = jax.grad(loss)(params, x, times)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    jaxpr = trace(mixed_precision(train, "mixed_bfloat16"), [w, v], x, times)
    forward = eqns(jaxpr, "scan")[0]
    assert {d for e in eqns(jaxpr, "gather") for d in dtypes_out(e)} == {"float32"}
    passed = [v.aval for v in forward.invars if v.aval.shape in [(T, D), (5, T, D)]]
    assert len(passed) >= 2 and {str(a.dtype) for a in passed} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("shifted", [True, False])
def test_carried_scores_are_float32(shifted):
    """A CRF's backward pass takes the exponential of their differences."""
    params, (x,) = weights((D, 8), (8, 8)), weights((6, 1, D))

    def total(paths):
        if shifted:
            return jax.scipy.special.logsumexp(paths, axis=0)
        return jnp.log(jnp.exp(paths).sum(0))

    def score(params, x):
        w, transitions = params
        emissions = (x @ w)[:, 0]
        scale = 1e3 if shifted else 4.0

        def step(alpha, emission):
            paths = alpha[:, None] + transitions + emission[None]
            return total(paths), alpha[None]

        last, alphas = lax.scan(step, emissions[0] * scale, emissions[1:])
        weighed = jnp.exp(alphas[:, 0] - jax.scipy.special.logsumexp(last)) @ w.T
        return jnp.sum(weighed**2)

    jaxpr = trace(mixed_precision(jax.grad(score), "mixed_bfloat16"), params, x)
    scan, *_ = eqns(jaxpr, "scan")
    carried = [v for v in scan.outvars if v.aval.shape in [(8,), (5, 1, 8)]]
    assert [str(v.aval.dtype) for v in carried] == ["float32"] * 2
    half = mixed_precision(score, "mixed_bfloat16")(params, x)
    assert abs(half - score(params, x)) < 0.1 * score(params, x)


def halves_by_split(h):
    return jnp.split(h, 2, axis=1)


def halves_by_slices(h):
    return h[:, :48], h[:, 48:]


def gated_step(halves, activation=jax.nn.silu):
    """A step of a layer whose values and gate one product and a bias make."""
    w, bias, out = weights((D, 96), (96,), (48, D))

    def loss(params, x):
        w, bias, out = params
        values, gate = halves(x @ w + bias[None])
        return jnp.square(values * activation(gate) @ out).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    return mixed_precision(step, "mixed_bfloat16"), [w, bias, out], normal(T, D)


@pytest.mark.parametrize("halves", [halves_by_split, halves_by_slices])
@pytest.mark.parametrize("activation", [jax.nn.silu, jnp.tanh])
def test_what_is_taken_apart_and_joined_is_rounded(halves, activation):
    """XLA:TPU stores what it slices, and compilers store what they join."""
    jaxpr = trace(*gated_step(halves, activation))
    names = ("split", "slice", "concatenate", "pad")
    moved = [e for n in names for e in eqns(jaxpr, n) if T in e.outvars[0].aval.shape]
    assert len(moved) == (2 if halves is halves_by_split else 4)
    assert {d for e in moved for d in dtypes_out(e)} == {"bfloat16"}


def test_what_is_read_in_part_alone_is_not_rounded():
    """Of the last place of a sequence, say, nothing whole is stored."""

    def head(h):
        return jnp.tile(h[:, :24], 2), jnp.tile(h[:, 24:48], 2)

    jaxpr = trace(*gated_step(head))
    slices = [e for e in eqns(jaxpr, "slice") if e.outvars[0].aval.shape[0] == T]
    assert {d for e in slices for d in dtypes_out(e)} == {"float32"}


def test_the_gates_of_a_cell_are_not_rounded_before_they_are_split():
    params = weights((D, 4 * D), (D, 4 * D))

    def cell(params, state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ params[0] + h @ params[1], 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    def step(params, xs):
        def loss(params):
            zeros = jnp.zeros((T, D))
            (h, _), _ = lax.scan(lambda s, x: cell(params, s, x), (zeros, zeros), xs)
            return jnp.square(h).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    step = mixed_precision(step, "mixed_bfloat16")
    (split,) = eqns(trace(step, params, normal(3, T, D)), "split")
    assert set(dtypes_out(split)) == {"float32"}


def predicted_step(outputs):
    """A step of a network with so many outputs, whose loss takes an exponential."""
    params = weights((D, 64), (64, outputs), (outputs,))

    def loss(params, x):
        w, out, bias = params
        return jnp.log(jnp.exp(jnp.tanh(x @ w) @ out + bias[None]).mean())

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    return mixed_precision(step, "mixed_bfloat16"), params, normal(64, D)


@pytest.mark.parametrize(("outputs", "few"), [(1, True), (16, True), (32, False)])
def test_a_loss_of_few_numbers_is_float32(outputs, few):
    """Half of what a last layer makes of four times as much saves nothing."""
    jaxpr = trace(*predicted_step(outputs))
    products = eqns(jaxpr, "dot_general")
    made = products[1]  # the last of the forward pass
    assert dtypes_out(made) == ["float32" if few else "bfloat16"]
    made_of = [e.outvars[0] for e in eqns(jaxpr, "exp")]
    casts = [e for e in walk(jaxpr) if any(v in e.invars for v in made_of)]
    rounds = any(d == "bfloat16" for e in casts for d in dtypes_out(e))
    assert rounds == (not few)
    # The bias adds up what the loss hands back, and the layer reads a rounded copy.
    assert all(set(dtypes_in(e)) == {"bfloat16"} for e in products)


@pytest.mark.parametrize(("second", "meet"), [(24, False), (20, True)])
def test_padded_arrays_that_never_meet_are_joined(second, meet):
    """A sum of two that do meet adds up, in float32."""
    params = weights((D, 48), (24, D))

    def loss(params, x):
        h = x @ params[0]
        parts = h[:, :24], h[:, second : second + 24]
        return jnp.square(parts[0] * jax.nn.silu(parts[1]) @ params[1]).mean()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, normal(T, D))
    (total,) = (
        e for e in eqns(jaxpr, "add_any") if all(
            maker(jaxpr, v).primitive.name == "pad" for v in e.invars
        )
    )  # fmt: skip
    assert dtypes_out(total) == ["float32" if meet else "bfloat16"]


def pooled_step(pool, channels=48, rows=2, side=4):
    """A train step of layers that add to a stream, which is pooled in between."""

    def step(params, x):
        def loss(params):
            first, inner, out = params
            h = x @ first
            h = h + jax.nn.silu(h) @ inner
            h = pool(h)
            h = h + jax.nn.silu(h) @ inner
            return jnp.square(h @ out).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    args = weights((D, channels), (channels, channels), (channels, D))
    return step, (list(args), normal(rows, side, side, D))


def readers(jaxpr, eqn):
    (out,) = eqn.outvars
    return [e for e in walk(jaxpr) if any(v is out for v in e.invars)]


def mean_of_windows(x):
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))


def mean_of_many(x):
    n, h, w, c = x.shape
    return x.reshape(n, 1, h, 1, w, c).mean((2, 4))


@pytest.mark.parametrize(
    "pool", [mean_of_windows, lambda x: nn.avg_pool(x, (2, 2), (2, 2))]
)
def test_a_mean_of_few_is_stored_in_half(pool):
    """The kernel that adds up divides, and stores the mean."""
    step, args = pooled_step(pool)
    with use_passes("none"):
        jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    sums = [*eqns(jaxpr, "reduce_sum"), *eqns(jaxpr, "reduce_window_sum")]
    (total,) = [e for e in sums if e.outvars[0].aval.shape == (2, 2, 2, 48)]
    assert dtypes_out(total) == ["float32"]
    (mean,) = readers(jaxpr, total)
    assert mean.primitive.name == "div"
    assert [e.params.get("new_dtype") for e in readers(jaxpr, mean)] == [jnp.bfloat16]


def test_a_mean_of_many_is_a_statistic():
    step, args = pooled_step(mean_of_many)
    with use_passes("none"):
        jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    (total,) = [
        e
        for e in eqns(jaxpr, "reduce_sum")
        if e.outvars[0].aval.shape == (2, 1, 1, 48)
        and e.invars[0].aval.shape == (2, 1, 4, 1, 4, 48)
    ]
    (mean,) = readers(jaxpr, total)
    names = [e.primitive.name for e in readers(jaxpr, mean)]
    assert "convert_element_type" not in names


@pytest.mark.slow
def test_what_is_cut_into_windows_is_stored_in_half():
    """A residual sum is rounded in front of the reshape, where XLA:TPU copies it."""
    step, args = pooled_step(mean_of_windows)
    with use_passes("none"):
        jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), *args)
    (cut,) = [
        e for e in eqns(jaxpr, "reshape") if e.outvars[0].aval.shape[1:5] == (2,) * 4
    ]
    assert dtypes_in(cut) == ["bfloat16"]
