"""`half_precision` and `compute_dtype`: kernels that are traced on half operands."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attending import flash, inputs, layer, softmax, weights
from flax import nnx
from helpers import (
    HALF,
    dtypes_in,
    dtypes_out,
    eqns,
    products,
    relative_error,
    same_types,
    trace,
)
from jax.sharding import PartitionSpec

import jmp_rewrite as jmpr
from jmp_rewrite import Policy, compute_dtype, half_precision, mixed_precision

BF16 = "mixed_bfloat16"
POLICIES = tuple(HALF)
attend = half_precision(flash)


def reference(q, k, v):
    return softmax(q, k) @ v


def forward(attend, w, x):
    return layer(attend, w, x) @ w["o"]


def loss(attend, w, x):
    return jnp.mean(forward(attend, w, x) ** 2)


def outside_of_kernels(jaxpr):
    """The equations of a jaxpr, but those inside of Pallas kernels."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from outside_of_kernels(inner)


def product_dtypes(jaxpr):
    """The operand dtypes of all matrix multiplications that no kernel holds."""
    found = [e for e in outside_of_kernels(jaxpr) if e.primitive.name == "dot_general"]
    assert found
    return {d for e in found for d in dtypes_in(e)}


def casts(jaxpr):
    """The dtypes of all casts that no kernel holds, from and to."""
    found = [
        e
        for e in outside_of_kernels(jaxpr)
        if e.primitive.name.endswith("element_type")
    ]
    return [(dtypes_in(e)[0], dtypes_out(e)[0]) for e in found]


# ---- what the function is given


@pytest.mark.parametrize("policy", POLICIES)
def test_it_gets_half_arrays_and_float32_comes_back(policy):
    seen = []

    @half_precision
    def kernel(tree, n, *, scale):
        seen.append(jax.tree.map(lambda x: getattr(x, "dtype", x), (tree, n, scale)))
        return tree["x"] * scale, n, tree["i"], "name"

    def fun(x, scale):
        i = jnp.arange(3)
        return kernel({"x": x, "i": i, "f": max, "n": None}, 2.0, scale=scale)

    x = jnp.ones((3,))
    half = jnp.dtype(HALF[policy])
    y, n, i, name = mixed_precision(fun, policy)(x, x)
    same_types((y, i), (x, jnp.arange(3)))
    assert (n, name) == (2.0, "name")
    ((tree, n, scale),) = seen
    assert tree == {"x": half, "i": jnp.int32, "f": max, "n": None}
    assert (n, scale) == (2.0, half)


@pytest.mark.parametrize("decorate", [half_precision, half_precision()])
def test_both_forms(decorate):
    fun = decorate(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float32 else x * 2)
    assert fun(jnp.ones(2)).tolist() == [1, 1]
    assert mixed_precision(fun, BF16)(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("wrong", [3, "mixed_bfloat16", jnp.ones(2)])
def test_non_functions_raise(wrong):
    with pytest.raises(TypeError, match="half_precision expected a function"):
        half_precision(wrong)


def test_it_wraps_methods_and_partial_objects():
    class Model(eqx.Module):
        w: jax.Array

        @half_precision
        def __call__(self, x):
            """Multiplies."""
            assert self.w.dtype == x.dtype == jnp.bfloat16
            return x @ self.w

    assert Model.__call__.__doc__ == "Multiplies."
    model = Model(jnp.eye(4))
    x = jnp.ones((2, 4))
    same_types(mixed_precision(lambda m, x: m(x), BF16)(model, x), x)
    part = half_precision(functools.partial(reference, jnp.ones((2, 4))))
    assert part(x, x).dtype == jnp.float32


def test_half_arrays_stay_half():
    x = jnp.ones((2, 16), jnp.bfloat16)
    same_types(mixed_precision(lambda x: attend(x, x, x), BF16)(x), x)
    y = jnp.ones(2, np.float64 if jax.config.jax_enable_x64 else np.float32)
    assert mixed_precision(half_precision(lambda x, i: i), BF16)(y, jnp.int8(3)) == 3


# ---- where it does nothing


def test_it_is_called_as_it_is():
    """Outside, under float32, under full_precision, and in a float32 scope."""
    seen = []

    @half_precision
    def kernel(x):
        seen.append((x.dtype.name, compute_dtype().name))
        return x * 2

    def in_scope(x):
        with jax.named_scope("head"):
            return kernel(x)

    def in_full(x):
        with jmpr.full_precision():
            return kernel(x)

    x = jnp.ones(2)
    kernel(x)
    mixed_precision(kernel, "float32")(x)
    mixed_precision(in_full, BF16)(x)
    mixed_precision(jmpr.full_precision(kernel), BF16)(x)
    mixed_precision(in_scope, Policy(BF16, scopes={"head": "float32"}))(x)
    assert set(seen) == {("float32", "float32")}
    seen.clear()
    with pytest.warns(UserWarning, match="'tail'"):
        mixed_precision(in_scope, Policy(BF16, scopes={"tail": "float32"}))(x)
    assert set(seen) == {("bfloat16", "bfloat16")}


def test_under_float32_the_program_is_the_same():
    w, x = weights(), inputs()
    plain = trace(functools.partial(loss, reference), w, x)
    fun = mixed_precision(functools.partial(loss, half_precision(reference)), "float32")
    assert [str(e.primitive) for e in trace(fun, w, x).eqns] == [
        str(e.primitive) for e in plain.eqns
    ]


def test_full_precision_reaches_into_jitted_functions():
    @jax.jit
    def kernel(x):
        return half_precision(lambda x: x + jnp.asarray(x.dtype.itemsize, x.dtype))(x)

    def fun(x):
        with jmpr.full_precision():
            y = kernel(x)
        return kernel(x), y

    x = jnp.zeros(2)
    half, full = mixed_precision(fun, BF16)(x)
    assert (half[0], full[0], kernel(x)[0]) == (2, 4, 4)


def test_nested_policies():
    """The inner one decides inside itself."""
    sizes = []

    @half_precision
    def kernel(x):
        sizes.append(str(x.dtype))
        return x

    inner = mixed_precision(kernel, "float32")
    mixed_precision(lambda x: kernel(inner(kernel(x))), BF16)(jnp.ones(2))
    assert sizes == ["bfloat16", "float32", "bfloat16"]
    sizes.clear()
    inner = mixed_precision(kernel, "mixed_float16")
    mixed_precision(lambda x: kernel(inner(kernel(x))), "float32")(jnp.ones(2))
    assert sizes == ["float32", "float16", "float32"]


def test_the_region_is_in_the_key_of_jits_cache():
    @jax.jit
    def kernel(x):
        return half_precision(lambda x: x * 0 + x.dtype.itemsize)(x)

    x = jnp.zeros(2)
    for _ in range(2):
        assert kernel(x)[0] == 4
        for policy in (*POLICIES, "float32"):
            size = 4 if policy == "float32" else 2
            assert jax.jit(mixed_precision(kernel, policy))(x)[0] == size


def test_the_default_policy_is_read_when_it_is_called():
    fun = mixed_precision(lambda x: x * 0 + compute_dtype().itemsize)
    for policy, size in (("float32", 4), (BF16, 2)):
        with jmpr.use_policy(policy):
            assert jax.jit(fun)(jnp.ones(2))[0] == size


def test_an_error_leaves_the_region():
    def fun(x):
        raise KeyError

    with pytest.raises(KeyError):
        mixed_precision(fun, BF16)(jnp.ones(2))
    assert compute_dtype() == jnp.float32


# ---- the program around it


@pytest.mark.parametrize("policy", POLICIES)
def test_no_value_is_float32_around_a_kernel(policy):
    w, x = weights(), inputs()
    half = HALF[policy]
    jaxpr = trace(mixed_precision(functools.partial(forward, attend), policy), w, x)
    (kernel,) = eqns(jaxpr, "pallas_call")
    assert set(dtypes_in(kernel) + dtypes_out(kernel)) == {half}
    assert product_dtypes(jaxpr) == {half}
    made = {v: e for e in outside_of_kernels(jaxpr) for v in e.outvars}
    call = next(e for e in made.values() if e.primitive.name == "custom_vjp_call")
    assert {made[v].primitive.name for v in call.invars} == {"dot_general"}


def step(attend, w, x):
    value, grads = jax.value_and_grad(functools.partial(loss, attend))(w, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_whole_steps(policy):
    w, x = weights(), inputs()
    decorated = mixed_precision(functools.partial(step, attend), policy)
    jaxpr = trace(decorated, w, x)
    forward, backward = eqns(jaxpr, "pallas_call")
    for kernel in (forward, backward):
        assert set(dtypes_in(kernel) + dtypes_out(kernel)) == {HALF[policy]}
    assert product_dtypes(jaxpr) == {HALF[policy]}
    got, want = jax.jit(decorated)(w, x), step(reference, w, x)
    same_types(got, want)
    assert relative_error(got, want) < 0.01


@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint, jax.jit])
def test_derivatives(transform, outside, policy):
    w, x = weights(), inputs()
    fun = functools.partial(loss, lambda *a: transform(attend)(*a))
    grad = (
        jax.grad(mixed_precision(fun, policy))
        if outside
        else mixed_precision(jax.grad(fun), policy)
    )
    got = jax.jit(grad)(w, x)
    want = jax.grad(functools.partial(loss, reference))(w, x)
    same_types(got, want)
    assert relative_error(got, want) < 0.03


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(policy, remat):
    # Smaller ones than of a single layer, so that layers do not multiply an error.
    ws, x = jax.tree.map(lambda w: w / 2, weights(3)), inputs()

    def fun(attend, ws, x):
        def body(x, w):
            return layer(attend, w, x), None

        body = jax.checkpoint(body) if remat else body
        return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)

    for grad in (
        mixed_precision(jax.grad(functools.partial(fun, attend)), policy),
        jax.grad(mixed_precision(functools.partial(fun, attend), policy)),
    ):
        jaxpr = trace(grad, ws, x)
        assert product_dtypes(jaxpr) == {HALF[policy]}
        want = jax.grad(functools.partial(fun, reference))(ws, x)
        assert relative_error(jax.jit(grad)(ws, x), want) < 0.03


def test_the_residual_stream_of_attention_layers_is_half():
    """A scan over layers is one although a kernel stands in each."""

    def fun(ws, x):
        def body(x, w):
            q, k, v = (x @ w[name] for name in "qkv")
            return x + attend(q, k, v) @ w["o"], None

        return jnp.mean(jax.lax.scan(body, x, ws)[0] @ ws["up"][0])

    jaxpr = trace(mixed_precision(jax.grad(fun), BF16), weights(3), inputs())
    loop = eqns(jaxpr, "scan")[0]
    assert "bfloat16[24,16]" in [v.aval.str_short() for v in loop.outvars]


@pytest.mark.parametrize("inside", [True, False])
def test_vmap(inside):
    w, x = weights(), jnp.stack([inputs(), 2 * inputs()])
    fun = functools.partial(forward, attend)
    got = (
        mixed_precision(jax.vmap(fun, (None, 0)), BF16)
        if inside
        else jax.vmap(mixed_precision(fun, BF16), (None, 0))
    )(w, x)
    want = jax.vmap(functools.partial(forward, reference), (None, 0))(w, x)
    same_types(got, want)
    assert relative_error(got, want) < 0.02


@pytest.mark.slow
def test_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    w, x = weights(), jnp.stack([inputs()] * 4)

    def fun(attend, w, x):
        local = jax.shard_map(
            lambda w, x: jax.vmap(lambda x: forward(attend, w, x))(x),
            mesh=mesh,
            in_specs=(PartitionSpec(), spec),
            out_specs=spec,
            check_vma=False,
        )
        return jnp.mean(local(w, x) ** 2)

    got = jax.jit(mixed_precision(jax.grad(functools.partial(fun, attend)), BF16))
    want = jax.grad(functools.partial(fun, reference))(w, x)
    assert relative_error(got(w, x), want) < 0.03
    assert product_dtypes(trace(got, w, x)) == {"bfloat16"}


def test_loss_scaling():
    tx = jmpr.loss_scaling(optax.sgd(0.1))
    w, x = weights(), inputs()

    @jax.jit
    @mixed_precision("mixed_float16")
    def train(w, state, x):
        def scaled(w):
            return jmpr.scale_loss(loss(attend, w, x), state)

        grads = jax.grad(scaled)(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    new, state = train(w, tx.init(w), x)
    assert jmpr.loss_scale_state(state).last_step_finite
    want = step(reference, w, x)[1]
    moved = jax.tree.map(jnp.subtract, new, w)
    assert relative_error(moved, jax.tree.map(jnp.subtract, want, w)) < 0.03


def test_rules_of_custom_derivatives_see_the_region():
    """A rule that calls the function itself is traced when the gradient is taken."""
    seen = []

    @half_precision
    def double(x):
        seen.append(str(x.dtype))
        return x * 2

    @jax.custom_vjp
    def fun(x, w):
        return double(x @ w)

    def fwd(x, w):
        return double(x @ w), (x, w)

    def bwd(kept, ct):
        x, w = kept
        ct = double(ct)
        return ct @ w.T, x.T @ ct

    fun.defvjp(fwd, bwd)
    x, w = inputs(), weights()["q"]

    def loss(x, w):
        return jnp.sum(fun(x, w))

    for grad in (
        jax.grad(mixed_precision(loss, BF16), (0, 1)),
        mixed_precision(jax.grad(loss, (0, 1)), BF16),
    ):
        seen.clear()
        got = jax.jit(grad)(x, w)
        assert set(seen) == {"bfloat16"}
        want = jax.grad(lambda x, w: jnp.sum(2 * (x @ w)), (0, 1))(x, w)
        assert relative_error(got, want) < 0.02


# ---- scopes that are only known from outside


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scope_around_a_loop(policy):
    """A loop's body is traced without the scopes that it stands in."""
    seen = []

    @half_precision
    def kernel(x):
        seen.append(str(x.dtype))
        return x * 2

    @jax.jit
    def jitted(x):
        return kernel(x)

    def fun(x, ws):
        def body(x, w):
            return jitted(x @ w), None

        with jax.named_scope("first"):
            x, _ = jax.lax.scan(body, x, ws)
        with jax.named_scope("second"):
            x, _ = jax.lax.scan(lambda x, w: (kernel(x @ w), None), x, ws)
        return x

    scopes = {"first": "float32"}
    jaxpr = trace(
        mixed_precision(fun, Policy(policy, scopes=scopes)), inputs(), weights(2)["q"]
    )
    one, two = eqns(jaxpr, "scan")
    half = HALF[policy]
    assert product_dtypes(one.params["jaxpr"]) == {"float32"}
    assert product_dtypes(two.params["jaxpr"]) == {half}
    assert seen[-2:] == ["float32", half]
    assert not [d for d in casts(one.params["jaxpr"]) if half in d]


def test_a_scope_finds_a_parameters_path():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

        def __call__(self, x):
            for one in (self.first, self.second):
                x = multiply(x, one.kernel[...])
            return x

    @half_precision
    def multiply(x, w):
        return x @ w

    model = Model(nnx.Rngs(0))
    policy = Policy(BF16, scopes={"second": "float32"})
    jaxpr = trace(lambda x: mixed_precision(Model.__call__, policy)(model, x), inputs())
    assert [dtypes_in(e)[1] for e in products(jaxpr)] == ["bfloat16", "float32"]


# ---- casts that others write


def by_hand(q, k, v):
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return flash(*half).astype(jnp.float32)


def moved_by_hand(q, k, v):
    half = (x.astype(jnp.bfloat16)[None] for x in (q, k, v))
    out = jax.jit(lambda *a: jax.vmap(flash)(*a).swapaxes(0, 1))(*half)
    return out[:, 0].astype(jnp.float32)


@pytest.mark.parametrize("attend", [by_hand, moved_by_hand])
def test_a_cast_behind_a_kernel_is_no_wish(attend):
    w, x = weights(), inputs()
    for fun in (
        mixed_precision(functools.partial(forward, attend), BF16),
        mixed_precision(jax.grad(functools.partial(loss, attend)), BF16),
    ):
        assert product_dtypes(trace(fun, w, x)) == {"bfloat16"}


def test_a_cast_of_ones_own_half_arithmetic_is_a_wish():
    w, x = weights(), inputs()

    def attend(q, k, v):
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
        return (flash(q, k, v) * 2).astype(jnp.float32)

    def fun(w, x):
        return attend(x, x, x) @ w["o"]

    jaxpr = trace(mixed_precision(fun, BF16), w, x)
    assert product_dtypes(jaxpr) == {"float32"}


def test_callbacks_and_foreign_functions_are_kernels():
    def double(x):
        out = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        return jax.pure_callback(lambda x: x, out, x.astype(jnp.bfloat16))

    def fun(x, w):
        return double(x @ w).astype(jnp.float32) @ w

    jaxpr = trace(mixed_precision(fun, BF16), inputs(), weights()["q"])
    assert product_dtypes(jaxpr) == {"bfloat16"}
    assert casts(jaxpr).count(("bfloat16", "float32")) == 0


@pytest.mark.parametrize("other", ["bfloat16", "float16"])
def test_a_kernel_in_another_half_dtype(other):
    """It is rounded to the kernel's dtype from float32, and once."""
    policy = next(p for p, half in HALF.items() if half != other)

    def attend(q, k, v):
        return flash(*(x.astype(other) for x in (q, k, v))).astype(jnp.float32)

    w, x = weights(), inputs()
    jaxpr = trace(mixed_precision(functools.partial(forward, attend), policy), w, x)
    assert product_dtypes(jaxpr) == {HALF[policy]}
    assert ("float32", other) in casts(jaxpr)
    assert (HALF[policy], other) not in casts(jaxpr)


# ---- reports


@pytest.mark.slow
def test_explain_and_diagnose_name_the_kernel():
    w, x = weights(), inputs()
    fun = functools.partial(forward, attend)
    report = jmpr.explain(fun, BF16)(w, x)
    assert report.half_flops == 1
    assert "pallas_call" in {e.primitive for e in report.equations}
    diagnosis = jmpr.diagnose(fun, BF16)(w, x)
    assert max(diagnosis.results.values()) < 0.02
