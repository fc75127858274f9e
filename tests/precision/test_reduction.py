"""`Policy(reduce_dtype=...)`: gradients are summed over devices in half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dtypes_in, dtypes_out, eqns, products, relative_error, trace
from jax.sharding import PartitionSpec as P

from jmp_rewrite import Policy, explain, mixed_precision

HALVES = ["bfloat16", "float16"]
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
DEVICES = 4


def parameters(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        "in": np.asarray(rng.normal(size=(32, 64)) / 6, dtype),
        "bias": np.asarray(rng.normal(size=(64,)) / 6, dtype),
        "out": np.asarray(rng.normal(size=(64, 24)) / 8, dtype),
    }


def batch(dtype=np.float32):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(128, 32)), rng.normal(size=(128, 24))
    return np.asarray(x, dtype), np.asarray(y, dtype)


def loss(params, x, y):
    h = jnp.tanh(x @ params["in"] + params["bias"][None])
    return jnp.square(h @ params["out"] - y).mean()


def gradients(params, x, y):
    return jax.value_and_grad(loss)(params, x, y)


def step(params, x, y):
    value, grads = gradients(params, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def summed(params, x, y):
    return jax.lax.pmean(gradients(params, x, y), "d")


def over_devices(fun, check_vma):
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": (P(), P())}
    return jax.shard_map(fun, mesh=mesh, check_vma=check_vma, **specs)


def gradient_products(jaxpr):
    """Returns the products whose results have the shape of a weight."""
    shapes = {w.shape for w in parameters().values()}
    return [
        e
        for e in products(jaxpr)
        if {e.outvars[0].aval.shape, e.outvars[0].aval.shape[::-1]} & shapes
    ]


@pytest.mark.parametrize("half", HALVES)
def test_a_partitioner_reduces_gradients_in_the_dtype_of_their_product(half):
    args = parameters(), *batch()
    by_default = trace(mixed_precision(step, half), *args)
    reduced = trace(mixed_precision(step, Policy(half, reduce_dtype=half)), *args)
    assert len(gradient_products(reduced)) == 2
    for jaxpr, dtype in ((by_default, "float32"), (reduced, half)):
        assert all(dtypes_out(e) == [dtype] for e in gradient_products(jaxpr))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("half", HALVES)
def test_explicit_sums_of_gradients_over_devices_are_half(half, check_vma):
    fun = over_devices(summed, check_vma)
    args = parameters(), *batch()
    for reduce_dtype in (None, half):
        policy = Policy(half, reduce_dtype=reduce_dtype)
        jaxpr = trace(mixed_precision(fun, policy), *args)
        sums = eqns(jaxpr, "psum", "psum_invariant")
        arrays = [e for e in sums if e.invars[0].aval.shape]
        scalars = [e for e in sums if not e.invars[0].aval.shape]
        assert len(arrays) >= 3 and scalars
        assert {d for e in arrays for d in dtypes_in(e)} == {reduce_dtype or "float32"}
        assert all(dtypes_in(e) == ["float32"] for e in scalars)


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_gradients_are_off_by_the_rounding_of_each_device(half):
    fun = over_devices(summed, False)
    policy = Policy(half, reduce_dtype=half)
    _, found = jax.jit(mixed_precision(fun, policy))(parameters(), *batch())
    with jax.enable_x64(True):
        _, exact = gradients(parameters(np.float64), *batch(np.float64))
    assert relative_error(found, exact) < 2 * EPS[half]


def test_a_sum_that_is_no_gradient_stays_float32():
    def mean_of_batch(params, x, y):
        h = x @ params["in"]
        h = h - jax.lax.pmean(h.mean(0), "d")[None]
        return jnp.square(h @ params["out"] - y).mean()

    def forward_and_backward(params, x, y):
        value, grads = jax.value_and_grad(mean_of_batch)(params, x, y)
        return grads, jax.lax.pmean(value, "d")

    fun = over_devices(forward_and_backward, check_vma=False)
    policy = Policy("bfloat16", reduce_dtype="bfloat16")
    jaxpr = trace(mixed_precision(fun, policy), parameters(), *batch())
    sums = eqns(jaxpr, "psum")
    assert len(sums) == 3  # the mean, its cotangent and the loss
    assert {d for e in sums for d in dtypes_in(e)} == {"float32"}


def clipped(params, x, y):
    value, grads = gradients(params, x, y)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads), value


def accumulated(params, x, y):
    def add(sums, batch):
        return jax.tree.map(jnp.add, sums, gradients(params, *batch)), None

    parts = x.reshape(4, -1, 32), y.reshape(4, -1, 24)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (value, sums), _ = jax.lax.scan(add, (jnp.float32(0), zeros), parts)
    return jax.tree.map(lambda g: g / 4, sums), value


def averaged(params, x, y):
    """Local steps, after which the parameters are averaged."""
    return step(*step(params, x, y)[:1], x, y)


def decayed(params, x, y):
    """A momentum that each device keeps."""
    value, grads = gradients(params, x, y)
    return jax.tree.map(lambda m, g: 0.9 * m + g, params, grads), value


def evaluated(params, x, y):
    params, _ = step(params, x, y)
    errors = jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - y)
    return dict.fromkeys(params, errors.mean(0)), errors.mean()


def squared(params, x, y):
    value, grads = gradients(params, x, y)
    return jax.tree.map(lambda g: g * g, grads), value


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (squared, "float32"),
        (clipped, "bfloat16"),
        (accumulated, "bfloat16"),
        (averaged, "float32"),
        (decayed, "float32"),
        (evaluated, "float32"),
    ],
)
def test_gradients_alone_are_summed_in_half(fun, dtype):
    """Parameters, a momentum and metrics are rounded nowhere."""

    def summed(params, x, y):
        return jax.lax.pmean(fun(params, x, y), "d")

    policy = Policy("bfloat16", reduce_dtype="bfloat16")
    sharded = over_devices(summed, check_vma=False)
    jaxpr = trace(mixed_precision(sharded, policy), parameters(), *batch())
    arrays = [e for e in eqns(jaxpr, "psum") if e.invars[0].aval.shape]
    assert len(arrays) >= 1
    assert {d for e in arrays for d in dtypes_in(e)} == {dtype}


def test_no_scale_is_taken_off_before_a_sum_in_float16():
    """Behind the loss scale gradients are too small for it."""

    def unscaled(params, x, y):
        value, grads = gradients(params, x, y)
        inverse = 1 / jnp.float32(2**15) ** jnp.sign(jnp.abs(y).sum())
        return jax.lax.pmean((jax.tree.map(lambda g: g * inverse, grads), value), "d")

    policy = Policy("float16", reduce_dtype="float16", loss_scale=None)
    sharded = over_devices(unscaled, check_vma=False)
    jaxpr = trace(mixed_precision(sharded, policy), parameters(), *batch())
    assert {d for e in eqns(jaxpr, "psum") for d in dtypes_in(e)} == {"float32"}


def test_explain_names_the_policy():
    policy = Policy("bfloat16", reduce_dtype="bfloat16")
    report = explain(step, policy)(parameters(), *batch())
    reasons = [e.reason for e in report.equations]
    assert sum("reduce_dtype" in r for r in reasons) == 2


def test_float32_changes_nothing():
    args = parameters(), *batch()
    found = trace(
        mixed_precision(step, Policy("bfloat16", reduce_dtype="float32")), *args
    )
    assert str(found) == str(trace(mixed_precision(step, "bfloat16"), *args))
