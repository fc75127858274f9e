"""What a backward pass makes of what is stored anyway, in place of storing more.

Whole train steps of small models, judged on the rewritten jaxpr, and run with what is
computed again in place of what is stored, as a GPU or a TPU v5e runs them.
"""

import functools
import re

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
    dtypes_out,
    eqns,
    names_in,
    relative_error,
    trace,
    walk,
)
from programs import normal, weights

from jmp_rewrite import diagnose, explain, mixed_precision, use_passes

T, D, F = 16, 32, 48  # tokens, features, features of the hidden layer
GPU, TPU_V5E, TPU_V6E = "cuda", "TPU v5 lite", "TPU v6 lite"


def attended(h):
    """Softmax of a masked product, as of scores."""
    h = jnp.where(jnp.arange(h.shape[-1]) % 5 > 0, h, -1e9)
    return jax.nn.softmax(h)


def exact_gelu(h):
    return jax.nn.gelu(h, approximate=False)


def written_gelu(h):
    return 0.5 * h * (1.0 + jax.lax.erf(h * 0.5**0.5))


def loss_of(activation, *, gated=False, biased=True):
    """Returns the mean square of a network with one hidden layer."""

    def loss(params, x):
        w, gate, bias, out = params
        y = activation(x @ w + bias[None] if biased else x @ w)
        y = y * (x @ gate) if gated else y
        return jnp.square((y @ out).astype(jnp.float32)).mean()

    return loss


def step_of(activation, *, gated=False, biased=True):
    """Returns an SGD step of a hidden layer, and its arguments."""
    w, gate, out = weights((D, F), (D, F), (F, D))
    (bias,) = weights((F,))

    loss = loss_of(activation, gated=gated, biased=biased)

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step, [w, gate, bias, out], normal(T, D)


@pytest.fixture(autouse=True)
def rounded_on_cpus():
    """What is tested here is for accelerators, which read what was rounded."""
    with use_passes("-read_before_rounding"):
        yield


def variables(eqn):
    return [v for v in eqn.invars if not hasattr(v, "val")]


def bits(x):
    return np.asarray(x).tobytes()


def restored(step, params, x):
    """Returns what is computed again: (dtype, name of what reads it) -> devices."""
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    found = {}
    for eqn in choices(jaxpr, "recompute_activations"):
        (out,) = eqn.outvars
        for reader in (e for e in walk(jaxpr) if out in variables(e)):
            key = out.aval.dtype.name, reader.primitive.name
            found[key] = frozenset(devices_of(eqn))
    return found


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [exact_gelu, written_gelu])
def test_erf_is_computed_again(activation, biased):
    """On GPUs where the backward pass reads it, on a TPU v5e its product as well."""
    found = restored(*step_of(activation, biased=biased))
    assert found.pop(("float32", "mul")) == {GPU, TPU_V5E}
    # The weight gradient's operand, as it is or behind what XLA:CPU needs.
    (((dtype, _), devices),) = found.items()
    assert dtype == "bfloat16" and devices == {TPU_V5E}


def test_tanh_is_computed_again_on_gpus():
    found = restored(*step_of(jax.nn.gelu))
    assert found and set(found.values()) == {frozenset({GPU})}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("activation", [jax.nn.gelu, exact_gelu])
def test_what_two_kernels_read_is_stored(activation, mixed):
    """A gate's cotangent is put beside that of its argument, which a product ends."""
    (mix,) = weights((F // 2, F // 2))

    def gated(h):
        value, gate = jnp.split(h, 2, axis=1)
        value = activation(value @ mix if mixed else value)
        return jnp.tile(value * gate, 2)

    found = restored(*step_of(gated, biased=False))
    on_gpu = [devices for devices in found.values() if GPU in devices]
    assert bool(on_gpu) != mixed


def test_recomputation_starts_from_stored_values():
    """From the product's rounded result, behind a barrier; no product runs twice."""
    step, params, x = step_of(exact_gelu, gated=True)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    barriers = eqns(jaxpr, "optimization_barrier")
    assert [dtypes_in(e) for e in barriers] == [["bfloat16"], ["bfloat16"]]
    products = eqns(jaxpr, "dot_general")
    on_cpu = choices(jaxpr, "cpu_products")  # JAX 0.10
    made = {v for e in (*products, *on_cpu) for v in e.outvars}
    assert all(v in made for e in barriers for v in e.invars)
    assert len(products) == len(eqns(trace(step, params, x), "dot_general"))


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("device", ["NVIDIA H200", "TPU v5e"])
def test_the_argument_is_one_of_several_results(which, device):
    """A product is split, and a part is the argument, whichever it is."""

    def gated(h):
        parts = jnp.split(h, 2, axis=1)
        return jnp.tile(exact_gelu(parts[which]) * parts[1 - which], 2)

    step, params, x = step_of(gated, biased=False)
    assert ("float32", "mul") in restored(step, params, x)
    with use_passes(device=device):
        ours = mixed_precision(step, "mixed_bfloat16")(params, x)
    with use_passes("-recompute_activations", device=device):
        without = mixed_precision(step, "mixed_bfloat16")(params, x)
    for a, b in zip(ours, without, strict=True):
        atol = 2 * EPS["mixed_bfloat16"] * abs(b).max()  # one rounding
        np.testing.assert_allclose(a, b, atol=atol)


def transformed(h):
    return jnp.fft.irfft(jnp.fft.rfft(h), n=F)


@pytest.mark.slow
def test_only_arithmetic_is_computed_again():
    """A transform between the product and the function is not run twice."""
    step, params, x = step_of(lambda h: exact_gelu(transformed(h)))
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    assert len(eqns(jaxpr, "fft")) == len(eqns(trace(step, params, x), "fft"))
    assert not restored(step, params, x)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.lax.erf])
def test_an_argument_is_not_kept_for_it(activation):
    """The derivative of `tanh` is made of its result, that of `erf` of an `exp`."""
    assert not restored(*step_of(activation))


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("activation", [exact_gelu, written_gelu, jax.nn.gelu])
@pytest.mark.parametrize("gated", [False, True])
def test_the_gradient_is_as_good_where_it_is_computed_again(activation, gated):
    step, params, x = step_of(activation, gated=gated)

    def error():
        half = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, x)
        full = step(params, x)
        return [
            jnp.linalg.norm(a - b) / jnp.linalg.norm(b - w)
            for a, b, w in zip(half, full, params, strict=True)
            if (b != w).any()
        ]

    with use_passes("none"):
        stored = error()
    with use_passes("recompute_activations", device="NVIDIA GPU"):
        again = error()
    assert again != stored
    for a, b in zip(again, stored, strict=True):
        assert a < 1.1 * b  # other roundings, up to 1.07 times as far off here


@pytest.mark.slow
def test_the_gradient_of_a_softmax_is_better_than_by_hand():
    """Although its exponential is made of rounded quotients, which do not add up to 1.

    By hand they do not either.
    """
    step, params, x = step_of(attended)
    full = step(params, x)

    def by_hand(params, x):
        halves = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        grads = jax.grad(loss_of(attended))(halves, x.astype(jnp.bfloat16))
        return [w - g.astype("f4") for w, g in zip(params, grads, strict=True)]

    with use_passes("softmax_from_quotient", device="NVIDIA GPU"):
        half = mixed_precision(step, "mixed_bfloat16")(params, x)
    compared = zip(half, by_hand(params, x), full, params, strict=True)
    errors = [
        (relative_error(a - w, c - w), relative_error(b - w, c - w))
        for a, b, c, w in compared
        if (c != w).any()
    ]
    assert len(errors) == 3
    assert all(ours < hand for ours, hand in errors)  # 0.6 of by hand's here


@pytest.mark.slow
def test_nothing_is_computed_again_in_a_loop():
    """What a scan stacks is read from the stack."""
    step, params, x = step_of(exact_gelu)

    def scanned(params, x):
        def loss(params):
            def body(x, _):
                w, _, bias, out = params
                return jnp.tanh(exact_gelu(x @ w + bias[None]) @ out), None

            return jnp.square(jax.lax.scan(body, x, length=3)[0]).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    assert eqns(trace(scanned, params, x), "scan")
    assert not restored(scanned, params, x)


def test_a_checkpoint_is_left_to_itself():
    """It says what to keep, and what to compute again."""
    step, params, x = step_of(jax.checkpoint(exact_gelu))
    assert not restored(step, params, x)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_what_a_checkpoint_computes_again_need_not_be_stored(policy):
    """Inside of its backward pass there is a forward pass; a saved product is given."""
    loss = jax.checkpoint(loss_of(exact_gelu), policy=policy)
    _, params, x = step_of(exact_gelu)

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    assert restored(step, params, x)


def test_before_differentiation_nothing_is_computed_again():
    _, params, x = step_of(exact_gelu)

    def before(params, x):  # its backward pass has not been made yet
        return jnp.square(exact_gelu(x @ params[0]) @ params[3]).mean()

    assert not restored(before, params, x)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_softmax_of_a_product_is_one_kernel_on_tpus(scaled):
    """XLA:TPU moves no cast over a rounding; nor over what else stands between."""

    def step(w, x):
        def loss(w):
            logits = (x @ w) @ x.T
            return jnp.square(
                jax.nn.softmax(logits / 4 if scaled else logits) @ x
            ).sum()

        return w - jax.grad(loss)(w)

    (w,) = weights((D, D))
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), w, normal(T, D))
    chosen = choices(jaxpr, "softmax_in_one_kernel")
    assert all(devices_of(e) == (TPU_V5E, TPU_V6E) for e in chosen)
    assert len(chosen) == (0 if scaled else 1)
    made = {v for e in chosen for v in e.outvars}
    readers = {e.primitive.name for e in walk(jaxpr) if made.intersection(variables(e))}
    assert scaled or {"reduce_max", "sub"} <= readers


def test_reduce_precision_to_float32_is_the_identity():
    x = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, 3e38, 1e-37, 1 / 3])
    same = functools.partial(
        jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=23
    )
    assert bits(jax.jit(same)(x)) == bits(x)
    assert jnp.isnan(same(jnp.array(jnp.nan)))


def exponentials(step, params, x):
    """Returns what reads an exponential computed again, on GPUs.

    The equation that chooses, and the names of its readers.
    """
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    made = {v: e for e in walk(jaxpr) for v in e.outvars}
    read = []
    for eqn in choices(jaxpr, "softmax_from_quotient"):
        assert devices_of(eqn) == (GPU,)
        readers = [e for e in walk(jaxpr) if eqn.outvars[0] in variables(e)]
        read.append((eqn, [e.primitive.name for e in readers], made))
    return read


def test_an_exponential_is_made_of_the_quotient_that_is_stored():
    """A softmax's backward pass reads what a product reads, and the forward pass both.

    So XLA:GPU has no reason to store the exponential beside the quotient.
    """
    forward, backward = exponentials(*step_of(attended))
    again, readers, _ = forward
    assert names_in(again) == ["exp"] and sorted(readers) == ["div", "reduce_sum"]
    again, readers, made = backward
    assert set(readers) == {"mul"}
    assert names_in(again) == ["optimization_barrier", "convert_element_type", "mul"]
    _, quotient, divisor = again.invars
    while made[quotient].primitive.name == "by_device":  # XLA:GPU drops no rounding
        (quotient, *_) = made[quotient].invars
    rounded = made[quotient]
    assert rounded.outvars[0].aval.dtype == "bfloat16"
    assert made[rounded.invars[0]].primitive.name == "div"
    assert made[rounded.invars[0]].invars[1] is divisor


def masked_rows(h):
    """0 times an infinite divisor would be no exponential."""
    e = jnp.exp(h)
    return e / jnp.where(h[:, :1] > 0, e.sum(-1, keepdims=True), jnp.inf)


@pytest.mark.parametrize(
    "activation",
    [
        lambda h: 1.0 / jnp.exp(h),  # divided by it
        lambda h: jnp.exp(h) / 2.0,
        lambda h: jnp.exp(h) / jnp.square(h),  # a divisor as large as itself
        lambda h: jnp.exp(h) / jnp.exp(h).max(-1, keepdims=True),
        lambda h: jnp.exp(h) / jnp.exp(2 * h).sum(-1, keepdims=True),
        masked_rows,
        lambda h: jnp.exp(h) / (h @ h.T).sum(-1, keepdims=True),
        lambda h: jnp.exp(h) / (h @ jnp.ones((F, 1))),
        lambda h: jnp.sin(jax.nn.softmax(h)),  # no product reads the quotient
    ],
)
def test_no_other_exponential_is(activation):
    read = exponentials(*step_of(activation))
    assert not [again for again, _, _ in read if "mul" in names_in(again)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_rectifier_keeps_its_result_alone(policy):
    """The sign of its argument is that of its result, which a product reads.

    Not in float16, which rounds small numbers to 0.
    """
    step, params, x = step_of(jax.nn.relu)
    jaxpr = trace(mixed_precision(step, policy), params, x)
    (sign,) = eqns(jaxpr, "gt")
    if policy == "mixed_float16":
        assert sign.invars[0].aval.dtype == "float32"
        return
    assert sign.invars[0].aval.dtype == HALF[policy]
    rectified = {
        e.outvars[0] for e in walk(jaxpr) if e.primitive.name == "custom_jvp_call"
    }
    for choice in eqns(jaxpr, "by_device"):  # GPUs compute it in the product
        if choice.invars[0] in rectified:
            rectified.add(choice.outvars[0])
    assert sign.invars[0] in rectified
    half = mixed_precision(step, policy)(params, x)
    for a, b, w in zip(half, step(params, x), params, strict=True):
        if (a != w).any():
            assert relative_error(a - w, b - w) < 8 * EPS[policy]


def test_a_rectified_norm_is_asked_for_its_sign():
    """The backward pass reads what the norm is of: its result would be one more."""

    def normalized(h):
        away = h - h.mean(0, keepdims=True)
        variance = jnp.square(away).mean(0, keepdims=True)
        return jax.nn.relu(away * jax.lax.rsqrt(variance + 1e-3))

    step, params, x = step_of(normalized)
    jaxpr = trace(mixed_precision(step, "mixed_bfloat16"), params, x)
    (sign,) = eqns(jaxpr, "gt")
    (maker,) = (e for e in walk(jaxpr) if sign.invars[0] in e.outvars)
    assert maker.primitive.name == "mul"


SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, jnp.inf, -jnp.inf, jnp.nan]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x > 0,
        lambda x: x <= 0,
        lambda x: jax.lax.lt(0.0, x),
        lambda x: jax.lax.ge(0.0, x),
        lambda x: x < 0,
        lambda x: x >= 0,
        lambda x: x > 1,
    ],
)
def test_signs_stay(ask):
    """Whether the rectified value or its argument is asked."""
    x = jnp.outer(jnp.array(SPECIAL), jnp.ones(D))
    (w,) = weights((D, D))

    def signs(w, x):
        h = jnp.maximum(x, 0.0)
        return (h @ w).sum(), ask(x)

    assert (mixed_precision(signs, "mixed_bfloat16")(w, x)[1] == ask(x)).all()


def differ_in_sign(x, y, w):
    return jnp.maximum(x, 0.0) @ w, y > 0


def of_arguments(x, y, w):
    """Rectifiers of two arguments, which are one node."""
    y = jax.nn.relu(x) @ w + jax.nn.relu(y) @ w
    return jnp.square(y).mean()


def of_parts(x, y, w):
    """Rectifiers of two results of one equation."""
    a, b = jnp.split(jnp.concatenate([x @ w, y @ w]), 2)
    return jnp.square(jax.nn.relu(a) @ w + jax.nn.relu(b) @ w).mean()


def of_slices(x, y, w):
    """A whole array is rectified, its slices' signs are asked."""

    def body(c, xi):
        return c + jnp.maximum(x, 0.0) @ w, xi > 0

    return jax.lax.scan(body, jnp.zeros_like(y), x)


@jax.jit
def long(x):
    for _ in range(200):
        x = x + 0.001 * jnp.sin(x)
    return x, jnp.maximum(x, 0.0)


def of_calls(x, y, w):
    """A body that is analysed once for all its uses."""
    found = []
    for i in range(120):
        a, r = long(x * (-1.0) ** i)
        found.append((r @ w, a > 0))
    return found


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize(
    "fun",
    [
        differ_in_sign,
        jax.grad(of_arguments, (0, 1, 2)),
        jax.grad(of_parts, (0, 1, 2)),
        of_slices,
        of_calls,
    ],
)
def test_a_sign_is_of_the_same_value(fun):
    x, y = jnp.asarray(normal(T, D)), jnp.asarray(normal(T, D, seed=5))
    (w,) = weights((D, D))
    found = jax.jit(mixed_precision(fun, "mixed_bfloat16"))(x, y, w)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(fun(x, y, w)), strict=True):
        assert a.shape == b.shape
        if b.dtype == bool:
            assert (a == b).all()
        else:
            assert relative_error(a, b) < 8 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_a_small_number_keeps_its_sign_in_float16():
    """Rounded to float16 it would be 0, and the square root NaN."""

    def fun(w, x):
        h = 1e-6 * (x @ w)
        s = h + jnp.flip(h, 0)
        return jnp.maximum(s, 0.0) @ w, jnp.where(s <= 0, jnp.sqrt(1e-20 - s), s)

    (w,) = weights((D, D))
    _, roots = jax.jit(mixed_precision(fun, "mixed_float16"))(w, normal(T, D))
    assert jnp.isfinite(roots).all()


@pytest.mark.slow
def test_diagnose_reads_signs_as_the_rewritten_program_does():
    step, params, x = step_of(jax.nn.relu)
    assert diagnose(step, "mixed_bfloat16")(params, x)


@pytest.mark.slow
def test_a_rectifier_in_a_loop():
    """In a scan the comparison stands in the body of the forward pass."""
    step, params, x = step_of(jax.nn.relu)

    def scanned(params, x):
        def loss(params):
            def body(x, _):
                return jax.nn.relu(x @ params[0]) @ params[3], None

            return jnp.square(jax.lax.scan(body, x, length=3)[0]).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    half = mixed_precision(scanned, "mixed_bfloat16")(params, x)
    for a, b, w in zip(half, scanned(params, x), params, strict=True):
        if (a != w).any():
            assert relative_error(a - w, b - w) < 8 * EPS["mixed_bfloat16"]


def lowered_products(step, args, platform, devices=1):
    """Returns the result types of the products of a step that is lowered elsewhere."""
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        args = jax.device_put(args[0], everywhere), jax.device_put(args[1], rows)
    traced = jax.jit(step).trace(*args)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"stablehlo.dot_general .*-> tensor<(\w+)>", text)
    return [f for f in found if f.startswith((f"{D}x{F}x", f"{F}x{D}x"))]


@pytest.mark.parametrize(
    "policy, platform, devices, rounded",
    [
        ("mixed_bfloat16", "cuda", 1, True),
        ("mixed_bfloat16", "cpu", 1, False),
        ("mixed_bfloat16", "tpu", 1, False),
        ("mixed_bfloat16", "cuda", 2, False),  # they are added up in float32
        ("mixed_float16", "cuda", 1, False),  # a sum may be too large for it
    ],
)
def test_one_gpu_rounds_weight_gradients(policy, platform, devices, rounded):
    """As by hand, and as TensorFlow's pass does; in the jaxpr they are float32."""
    step, params, x = step_of(jax.nn.relu, biased=False)
    half = mixed_precision(step, policy)
    gradients = [
        e
        for e in eqns(trace(half, params, x), "dot_general")
        if e.outvars[0].aval.shape in ((D, F), (F, D))
    ]
    assert [dtypes_out(e) for e in gradients] == [["float32"]] * 2
    types = [t[-4:] for t in lowered_products(half, (params, x), platform, devices)]
    # What is not read is dropped by XLA.
    assert types.count("bf16") == (2 if rounded else 0)
    assert types.count("xf32") == 2


def test_gradients_that_lead_to_products_are_not_rounded():
    """Those of a first step, from which a second one starts.

    What a solver's backward pass computes again of its forward pass is of that kind.
    """
    step, params, x = step_of(jax.nn.relu, biased=False)

    def steps(params, x):
        return step(step(params, x), x)

    half = mixed_precision(steps, "mixed_bfloat16")
    types = [t[-4:] for t in lowered_products(half, (params, x), "cuda")]
    assert types.count("xf32") == 4 and types.count("bf16") == 2


@pytest.mark.slow
@pytest.mark.parametrize("read", ["as JAX does", "untransposed"])
def test_a_rounded_product_is_as_it_is_read(read):
    """XLA:GPU folds no transpose into a product behind a cast."""
    x, w, out = normal(T, D), *weights((D, F), (F, D))

    def loss(w, x):
        h = x @ w if read == "as JAX does" else x @ w.T
        return jnp.square(jnp.tanh(h) @ out).mean()

    def step(w, x):
        return w - jax.grad(loss)(w, x)

    w = w if read == "as JAX does" else w.T
    half = mixed_precision(step, "mixed_bfloat16")
    (gradient,) = [
        t for t in lowered_products(half, (w, x), "cuda") if t.endswith("bf16")
    ]
    assert gradient == "x".join([*map(str, w.shape), "bf16"])
    error = relative_error(half(w, x) - w, step(w, x) - w)
    assert error < 8 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_a_rounded_product_of_stacked_weights_is_transposed_in_half():
    """Widened before it is transposed, it would be no view of the product."""
    w, x = jnp.asarray(normal(3, D, F)), jnp.asarray(normal(3, T, D))
    out = jnp.asarray(normal(3, F, D))

    def step(w, x):
        def loss(w):
            h = jnp.einsum("etd,edf->etf", x, w)
            return jnp.square(jnp.einsum("etf,efd->etd", jnp.tanh(h), out)).mean()

        return w - jax.grad(loss)(w)

    half = mixed_precision(step, "mixed_bfloat16")
    (choice,) = choices(jax.make_jaxpr(half)(w, x), "round_last_gradients")
    assert names_in(choice) == ["dot_general", "transpose", "convert_element_type"]
    assert choice.outvars[0].aval.shape == w.shape
    for device in ("NVIDIA H200", "CPU"):
        with use_passes(device=device):
            found = jax.jit(half)(w, x)
        assert relative_error(found - w, step(w, x) - w) < 8 * EPS["mixed_bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("activation", [jax.nn.softplus, jax.nn.mish])
def test_the_derivative_of_a_softplus_reads_its_argument(activation):
    """Not the result, which is stored in half for the next layer alone."""
    step, params, x = step_of(activation, biased=False)
    half = mixed_precision(step, "mixed_bfloat16")
    report = explain(step, "mixed_bfloat16")(params, x)
    assert report.passes["softplus_derivative"] == 1
    found, full = jax.jit(half)(params, x), step(params, x)
    for w, a, b in zip(params, found, full, strict=True):
        assert relative_error(a - w, b - w) < 8 * EPS["mixed_bfloat16"]


def test_a_softplus_of_half_values_is_computed_in_half():
    w, x = jnp.asarray(normal(D, D)), jnp.asarray(normal(T, D))

    def step(w, x):
        def loss(w):
            h = jax.nn.softplus((x @ w).astype(jnp.float16)).astype(jnp.float32)
            return jnp.square(h @ w).mean()

        return w - jax.grad(loss)(w)

    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, x)
    assert relative_error(found - w, step(w, x) - w) < 8 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_what_is_masked_is_no_derivative_of_a_softplus():
    (w,) = weights((D, D))
    x = jnp.asarray(normal(T, D))

    def step(w, x):
        def loss(w):
            h = x @ w
            masked = jax.lax.select(x > 0, jnp.full_like(h, -9.0), h)
            h = jnp.exp(masked - jnp.logaddexp(h, 0.0))
            return jnp.square(h @ w).mean()

        return w - jax.grad(loss)(w)

    report = explain(step, "mixed_bfloat16")(w, x)
    assert report.passes["softplus_derivative"] == 1  # that of the softplus itself
    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, x)
    assert relative_error(found - w, step(w, x) - w) < 8 * EPS["mixed_bfloat16"]


@jax.custom_jvp
def softhinge(x, margin):
    """`log(exp(x) + exp(-margin))`: as a softplus is written, but of another number."""
    return jnp.maximum(x, -margin) + jnp.log1p(jnp.exp(-jnp.abs(x + margin)))


@softhinge.defjvp
def _(primals, tangents):
    result = softhinge(*primals)
    return result, jnp.exp(primals[0] - result) * tangents[0]


def eighths(x):
    return jnp.logaddexp(x.astype(jnp.float8_e4m3fn).astype(jnp.float32), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", [lambda x: softhinge(x, 1.0), eighths], ids=["softhinge", "float8"]
)
def test_what_is_no_softplus_of_its_argument(activation):
    step, params, x = step_of(activation, biased=False)
    with use_passes("-softplus_derivative"):
        exact = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, x)
    found = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, x)
    for w, a, b in zip(params, found, exact, strict=True):
        assert relative_error(a - w, b - w) < EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_a_gradient_that_a_user_reduces_is_reduced():
    w, x = jnp.asarray(normal(D, D)), jnp.asarray(normal(T, D))

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ x.T).mean())(w)
        return w - jax.lax.reduce_precision(gradient, 5, 1)

    with use_passes(device="NVIDIA H200"):
        update = w - jax.jit(mixed_precision(step, "mixed_bfloat16"))(w, x)
    exact = w - step(w, x)
    assert jnp.mean(jnp.abs(update - exact) < 2**-6 * jnp.abs(exact).max()) > 0.9


def test_a_gradient_that_a_decomposition_reads_is_not_rounded():
    """Solving with a preconditioner multiplies an error."""
    w, x = jnp.asarray(normal(D, D)), jnp.asarray(normal(T, D))

    def gradient(w, x):
        return jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ x.T).mean())(w)

    def solved(w, x):
        return w - jnp.linalg.solve(jnp.eye(D), gradient(w, x))

    def rounds(fun):
        half = mixed_precision(fun, "mixed_bfloat16")
        return bool(choices(jax.make_jaxpr(half)(w, x), "round_last_gradients"))

    assert rounds(lambda w, x: w - gradient(w, x)) and not rounds(solved)


@pytest.mark.parametrize(
    "contrast",
    [
        lambda of, w, v: of(w, w) - of(w, v),
        lambda of, w, v: 0.5 * of(w, w) - 0.5 * of(w, v),
        lambda of, w, v: jnp.clip(of(w, w), -1, 1) - jnp.clip(of(w, v), -1, 1),
        lambda of, w, v: jax.jit(of)(w, w) - jax.jit(of)(w, v),
        lambda of, w, v: jax.jit(jnp.subtract)(of(w, w), of(w, v)),
    ],
)
def test_gradients_that_contrast_are_not_rounded(contrast):
    w, x = jnp.asarray(normal(D, D)), jnp.asarray(normal(T, D))

    def gradient(w, v):
        return jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ v).mean())(w)

    def rounds(fun):
        half = mixed_precision(fun, "mixed_bfloat16")
        return bool(choices(jax.make_jaxpr(half)(w), "round_last_gradients"))

    assert rounds(lambda w: w - gradient(w, w))
    assert not rounds(lambda w: w - contrast(gradient, w, 1.01 * w))


@pytest.mark.slow
def test_a_rounded_product_is_mapped_and_differentiated():
    step, params, x = step_of(jax.nn.relu, biased=False)
    half = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    found = jax.vmap(half, (None, 0))(params, jnp.stack([x, 2 * x]))
    for a, b in zip(found, half(params, 2 * x), strict=True):
        assert relative_error(a[1], b) < EPS["mixed_bfloat16"]

    def meta(step, scale):
        return jnp.square(step([scale * w for w in params], x)[0]).sum()

    found, full = (
        jax.grad(lambda s, step=step: meta(step, s))(1.5) for step in (half, step)
    )
    assert relative_error(found, full) < 8 * EPS["mixed_bfloat16"]
