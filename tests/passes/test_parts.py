"""What is taken apart after a reshape is taken apart before it, and so put together."""

import jax
import jax.numpy as jnp
import pytest
from helpers import EPS, HALF, bit_equal, eqns, relative_error, trace
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import normal, weights

from jmp_rewrite import diagnose, explain, mixed_precision, use_passes

POLICIES = sorted(HALF)
B, T, H, D = 2, 6, 3, 4  # examples, places, heads, features of each
WIDTH = H * D


@pytest.fixture(params=["CPU", "TPU v5e"])
def as_tpu(request):
    """Runs a test twice: with the sums of this CPU, and with those of a TPU."""
    with use_passes(device=request.param):
        yield


def without(step, *args, policy="mixed_bfloat16"):
    """What a step returns where everything is reshaped first."""
    with use_passes("-split_before_reshape"):
        return mixed_precision(step, policy)(*args)


def indexed(h):
    """GPT-2 as many write it in JAX."""
    h = h.reshape(B, T, 3, H, D)
    return h[:, :, 0], h[:, :, 1], h[:, :, 2]


def transposed(h):
    """As vision transformers are written in PyTorch."""
    h = h.reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)
    return tuple(h[i].swapaxes(1, 2) for i in range(3))


def split(h):
    parts = jnp.split(h.reshape(B, T, 3, H, D), 3, axis=2)
    return tuple(x.squeeze(2) for x in parts)


def unstacked(h):
    return tuple(jnp.unstack(h.reshape(B, T, 3, H, D), axis=2))


def repeated(h):
    """One part twice: its cotangents are added, not joined."""
    h = h.reshape(B, T, 3, H, D)
    return h[:, :, 0], h[:, :, 1] + h[:, :, 0], h[:, :, 2]


WAYS = {f.__name__: f for f in (indexed, transposed, split, unstacked)}


def step_of(way, wrap=lambda f: f):
    def attend(qkv, out, x):
        weights, bias = qkv
        q, k, v = way(x @ weights + bias[None, None])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return x + h.reshape(B, T, -1) @ out

    def loss(params, x):
        qkv, out, head = params
        return jnp.square(wrap(attend)(qkv, out, x) @ head).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def arguments():
    weight, bias, out, head = weights(
        (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH)
    )
    return ((weight, bias), out, head), jnp.asarray(normal(B, T, WIDTH))


def emitted(step, *args, policy="mixed_bfloat16"):
    return trace(mixed_precision(step, policy), *args)


def joined_of(jaxpr, *shape):
    """Returns what puts together an array of this shape."""
    found = eqns(jaxpr, "concatenate")
    return [e for e in found if e.outvars[0].aval.shape == shape]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_slices_are_of_the_product_and_parts_are_joined_for_it(way):
    """Nothing of five dimensions is read by a kernel, but each part of four."""
    jaxpr = emitted(step_of(way), *arguments())
    (joined,) = joined_of(jaxpr, B, T, 3 * WIDTH)
    assert {v.aval.shape for v in joined.invars} == {(B, T, WIDTH)}
    taken = [
        e for e in eqns(jaxpr, "slice") if e.invars[0].aval.shape == (B, T, 3 * WIDTH)
    ]
    assert {e.params["start_indices"][2] for e in taken} == {0, WIDTH, 2 * WIDTH}


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", (*WAYS.values(), repeated), ids=(*WAYS, "repeated"))
def test_every_value_is_the_same(way, policy):
    """To the bit: nothing is computed. Operation by operation, as XLA:CPU rounds."""
    params, x = arguments()
    apart = mixed_precision(step_of(way), policy)(params, x)
    bit_equal(apart, without(step_of(way), params, x, policy=policy))


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", (*WAYS.values(), repeated), ids=(*WAYS, "repeated"))
def test_the_gradients_are_as_good(way, policy, as_tpu):
    params, x = arguments()
    step = step_of(way)
    reference = step(params, x)
    values = jax.jit(mixed_precision(step, policy))(params, x)
    assert relative_error(values, reference) < 3 * EPS[policy]


@pytest.mark.slow
def test_on_tpus_a_bias_is_the_sum_of_each_part():
    found = {}
    for device in ("CPU", "TPU v5e"):
        with use_passes(device=device):
            jaxpr = emitted(step_of(indexed), *arguments())
        sums = joined_of(jaxpr, 3 * WIDTH)
        found[device] = [[v.aval.shape for v in e.invars] for e in sums]
    assert found == {"CPU": [], "TPU v5e": [[(WIDTH,)] * 3]}


def loss_of(take):
    """A step whose gradient is joined of what `take` takes out of a product."""

    def step(w, x):
        def loss(w):
            return sum(jnp.square(y).sum() for y in take(x @ w))

        return w - jax.grad(loss)(w)

    return step


def gap(h):
    h = h.reshape(T, 4, 2, 3)
    return h[:, :2] @ jnp.ones((3, 3)), h[:, 3] @ jnp.ones((3, 3))


def last(h):
    """The parts are not the outermost of what was one dimension."""
    h = h.reshape(T, 2, 4, 3)
    return h[:, :, :2] @ jnp.ones((3, 3)), h[:, :, 3] @ jnp.ones((3, 3))


def overlapping(h):
    h = h.reshape(T, 4, 2, 3)
    return h[:, :2] @ jnp.ones((3, 3)), h[:, 1:] @ jnp.ones((3, 3))


def strided(h):
    h = h.reshape(T, 4, 2, 3)
    return h[:, ::2] @ jnp.ones((3, 3)), h[:, 1] @ jnp.ones((3, 3))


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("take", [gap, last, overlapping, strided])
def test_gaps_are_zeros_and_other_arrays_are_left(take):
    w, x = (jnp.asarray(normal(*s)) for s in ((8, 24), (T, 8)))
    step = loss_of(take)
    found = joined_of(emitted(step, w, x), T, 24)
    assert len(found) == (take is gap)
    if take is gap:
        assert [v.aval.shape[1] for v in found[0].invars] == [12, 6, 6]
    values = mixed_precision(step, "mixed_bfloat16")(w, x)
    bit_equal(values, without(step, w, x))


@pytest.mark.slow
def test_a_part_that_is_there_twice():
    """Of a sum, both parts have the same cotangent: one variable."""

    def take(h):
        parts = jnp.split(h.reshape(T, 2, 4, 3), 2, axis=1)
        return [(parts[0] + parts[1]) @ jnp.ones((3, 3))]

    w, x = (jnp.asarray(normal(*s)) for s in ((8, 24), (T, 8)))
    step = loss_of(take)
    (joined,) = joined_of(emitted(step, w, x), T, 24)
    assert len(joined.invars) == 2
    values = mixed_precision(step, "mixed_bfloat16")(w, x)
    assert relative_error(values, step(w, x)) < 2 * EPS["mixed_bfloat16"]


def scanned(fun):
    """One layer twice: the gradient of its bias is added up behind the loop."""

    def layers(qkv, out, x):
        return lax.scan(lambda h, _: (fun(qkv, out, h), None), 0.1 * x, length=2)[0]

    return layers


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, scanned])
def test_inside_of_other_jaxprs(wrap, as_tpu):
    params, x = arguments()
    step = step_of(indexed, wrap)
    values = jax.jit(mixed_precision(step, "mixed_bfloat16"))(params, x)
    assert relative_error(values, step(params, x)) < 2 * EPS["mixed_bfloat16"]


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind, as_tpu):
    """Where the type says how the product is laid out, it is left alone."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType[kind],) * 2)
    (qkv, out, head), x = arguments()
    step = step_of(indexed)
    reference = step((qkv, out, head), x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        values = jax.jit(mixed_precision(step, "mixed_bfloat16"))((qkv, out, head), x)
    assert relative_error(values, reference) < 2 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_reports_know_parts():
    params, x = arguments()
    report = explain(step_of(indexed), "mixed_bfloat16")(params, x)
    plain = explain(step_of(indexed), "float32")(params, x)
    assert report.flops == plain.flops
    assert {e.line for e in report.equations} >= {e.line for e in plain.equations}
    inserted = [e for e in report.equations if "split_before_reshape" in e.reason]
    assert {e.primitive for e in inserted} >= {"concatenate"}
    diagnosis = diagnose(step_of(indexed), "mixed_bfloat16")(params, x)
    assert max(diagnosis.results.values()) < diagnosis.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_number_that_is_reshaped_is_left_alone(policy):
    """A literal has no readers."""

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, ()), lambda _, g: (g * jnp.reshape(2.0, (1, 1)),))

    def step(w, x):
        return w - jax.grad(lambda w: doubled(x @ w).sum())(w)

    args = normal(WIDTH, 8), normal(B * T, WIDTH)
    assert relative_error(mixed_precision(step, policy)(*args), step(*args)) < 0.01


@pytest.mark.slow
def test_forward_functions_take_parts_of_many_rows_alone():
    """One step of decoding has fewer rows than features: its weights would be cut."""

    def attend(weight, x):
        rows = (x @ weight).reshape(*x.shape[:2], 3, H, D)
        q, k, v = (rows[:, :, i] for i in range(3))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", scores, v)

    (weight, _), *_ = arguments()[0]
    many, few = (jnp.asarray(normal(B, n, WIDTH)) for n in (32, 2))
    for x, count in ((many, 3), (few, 0)):
        report = explain(attend, "mixed_bfloat16")(weight, x)
        assert report.passes.get("split_before_reshape", 0) == count
        bit_equal(
            mixed_precision(attend, "mixed_bfloat16")(weight, x),
            without(attend, weight, x),
        )


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_a_rounding_that_a_user_wrote_stays(half):
    x, w = jnp.asarray(normal(2, 64, 16)), weights((16, 48))[0]

    def fun(w, x):
        rounded = (x @ w).reshape(2, 64, 3, 2, 8).astype(half).astype(jnp.float32)
        return tuple(rounded[:, :, i] for i in range(3))

    for part in jax.jit(mixed_precision(fun, "mixed_bfloat16"))(w, x):
        bit_equal(part, part.astype(half).astype(jnp.float32))
