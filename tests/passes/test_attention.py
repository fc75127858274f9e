"""The sum over keys in an attention's backward pass is one over features on TPUs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, HALF, bit_equal, eqns, relative_error, trace
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import normal, weights

from jmp_rewrite import (
    Policy,
    diagnose,
    explain,
    full_precision,
    mixed_precision,
    use_passes,
)

POLICIES = sorted(HALF)
B, T, H, D = 2, 136, 3, 8  # examples, places (more than lanes), heads, features
WIDTH = H * D
DROPPED = np.random.RandomState(0).rand(B, H, T, T) < 0.2
SHORT = np.arange(T) < np.asarray([[T], [T - 9]])  # which keys are there


@pytest.fixture(params=["CPU", "TPU v4"])
def as_tpu(request):
    """Runs a test twice: with the sums of this CPU, and with those of a TPU."""
    with use_passes(device=request.param):
        yield


def sums_of(fun, *args):
    """Returns the sums that a TPU takes over features."""
    with use_passes("attention_feature_sums"):
        jaxpr = trace(fun, *args)
    name = "pass:attention_feature_sums"
    chosen = eqns(jaxpr, "by_device")
    return [e for e in chosen if name in str(e.source_info.name_stack)]


def softmax(scores):
    return jax.nn.softmax(scores)


def written_softmax(scores):
    e = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def causal(scores):
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))


def masked(scores):
    """With a mask that is added, as Hugging Face writes it."""
    bias = jnp.where(SHORT, 0.0, jnp.finfo(scores.dtype).min)
    return softmax(scores + bias[:, None, None])


def dropout(scores):
    """As Flax writes it."""
    return softmax(scores) * ((~DROPPED).astype(scores.dtype) / 0.8)


def scaled(scores):
    return 0.5 * softmax(scores) * 3.0


def with_masked_heads(scores):
    """As Hugging Face writes it."""
    return jnp.einsum("bhqk,h->bhqk", softmax(scores), np.asarray([1, 1, 0], "f4"))


def gated(scores):
    """By what may be zero in a whole row; its own gradient is another sum."""
    return softmax(scores) * jax.nn.relu(scores.sum(-1, keepdims=True))


def divided(scores):
    return softmax(scores) / (1 + jnp.square(scores).sum(-1, keepdims=True))


ROWS = {
    f.__name__: f
    for f in (
        softmax,
        written_softmax,
        causal,
        masked,
        dropout,
        scaled,
        with_masked_heads,
        gated,
        divided,
    )
}


def first_heads(q, k, v, rows):
    """[B, T, H, D], as Flax has them."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(D))
    return jnp.einsum("bhqk,bkhd->bqhd", rows(scores), v)


def last_heads(q, k, v, rows):
    """[B, H, T, D], as most write them in PyTorch."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * np.float32(1 / np.sqrt(D))
    return (rows(scores) @ v).swapaxes(1, 2)


def keys_first(q, k, v, rows):
    """Scores that are transposed, and an output of another order."""
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q) / np.float32(np.sqrt(D))
    p = rows(scores.swapaxes(2, 3)).swapaxes(2, 3)
    return jnp.einsum("bkhd,bhkq->qbhd", v, p).swapaxes(0, 1)


def shared_values(q, k, v, rows):
    """Heads that share their keys and values."""
    k, v = (jnp.repeat(x[:, :, :1], H, axis=2) for x in (k, v))
    return first_heads(q, k, v, rows)


FORMS = {f.__name__: f for f in (first_heads, last_heads, keys_first, shared_values)}


def step_of(form=first_heads, rows=softmax):
    """A whole step of a residual layer of attention and a head."""

    def loss(params, x):
        qkv, out, head = params
        h = x @ qkv
        q, k, v = (y.reshape(B, T, H, D) for y in jnp.split(h, 3, axis=-1))
        h = form(q, k, v, rows).reshape(B, T, WIDTH)
        return jnp.square((x + h @ out) @ head).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def arguments():
    params = weights((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    return params, normal(B, T, WIDTH)


def updates(values, params):
    return jax.tree.map(lambda new, old: new - old, values, params)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_the_gradients_are_as_good(rows, policy, as_tpu):
    check_gradients(step_of(rows=rows), policy)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_in_whatever_order_dimensions_are(form, as_tpu):
    check_gradients(step_of(form), "mixed_bfloat16")


def check_gradients(step, policy):
    """Up to five roundings lie between a weight and its gradient, with either sum."""
    params, x = arguments()
    reference = updates(step(params, x), params)
    rewritten = jax.jit(mixed_precision(step, policy))
    (found,) = sums_of(rewritten, params, x)
    assert found.outvars[0].aval.shape == (B, H, T)
    values = updates(rewritten(params, x), params)
    assert relative_error(values, reference) < 4 * EPS[policy]


@pytest.mark.slow
def test_it_is_the_same_sum(as_tpu):
    """Of small whole numbers, which half holds, to the bit; a wrong order shows."""
    rng = np.random.RandomState(1)
    shapes = (B, H, T, T), (B, T, H, D), (B, T, H, D), (D, D)
    p, v, do, w = (jnp.asarray(rng.randint(-2, 3, s).astype("f4")) for s in shapes)

    def product(p, v):
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    attend = jax.custom_vjp(product)

    def backward(kept, do):
        p, v = kept
        dp = jnp.einsum("bqhd,bkhd->bhqk", do, v)
        rows = jnp.sum(-2.0 * (p * dp), axis=-1, keepdims=True)
        return jnp.broadcast_to(rows, p.shape), jnp.einsum("bhqk,bqhd->bkhd", p, do)

    attend.defvjp(lambda p, v: (product(p, v), (p, v)), backward)

    def step(p, w):
        def loss(p, w):
            return jnp.vdot(attend(p, v) @ w, do)

        return jax.grad(loss, (0, 1))(p, w)

    expected = step(p, w)
    rewritten = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    assert len(sums_of(rewritten, p, w)) == 1
    bit_equal(rewritten(p, w), expected)


@pytest.mark.slow
def test_it_is_another_sum_on_tpus_alone():
    """It is taken as it was on other platforms, and in a program for several."""
    step = jax.jit(mixed_precision(step_of(), "mixed_bfloat16"))

    def sums(*platforms):
        traced = step.trace(*arguments())
        text = traced.lower(lowering_platforms=platforms).as_text()
        return f"(tensor<{B}x{H}x{D}x{T}xf32>, tensor<f32>)" in text

    assert sums("tpu")
    assert not sums("cpu") and not sums("cuda") and not sums("tpu", "cuda")


def refused():
    def fewer_keys(q, k, v, rows):
        return first_heads(q, k[:, : D - 1], v[:, : D - 1], rows)

    def replaced(scores):
        return jnp.where(SHORT[:, None, None], softmax(scores), 0.0)

    @full_precision
    def in_float32(scores):
        return softmax(scores)

    @full_precision
    def whole_in_float32(q, k, v, rows):
        return first_heads(q, k, v, rows)

    return {
        "fewer keys than features": (fewer_keys, softmax),
        "rows that are replaced": (first_heads, replaced),
        "a softmax in float32": (first_heads, in_float32),
        "attention in float32": (whole_in_float32, softmax),
    }


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("why", refused())
def test_other_sums_stay(why, as_tpu):
    step = step_of(*refused()[why])
    params, x = arguments()
    rewritten = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    assert not sums_of(rewritten, params, x)
    reference = updates(step(params, x), params)
    values = updates(rewritten(params, x), params)
    assert relative_error(values, reference) < 4 * EPS["mixed_bfloat16"]


@pytest.mark.slow
def test_a_scope_of_the_policy_asks_as_well():
    def named(scores):
        with jax.named_scope("attend"):
            return softmax(scores)

    step, args = step_of(rows=named), arguments()
    policy = Policy("mixed_bfloat16", scopes={"attend": "float32"})
    assert len(sums_of(mixed_precision(step, "mixed_bfloat16"), *args)) == 1
    assert not sums_of(mixed_precision(step, policy), *args)


def test_a_loss_alone_is_left_alone():
    """Its backward pass is another program."""

    def loss(x, w):
        q, k, v = (y.reshape(B, T, H, D) for y in jnp.split(x @ w, 3, axis=-1))
        return first_heads(q, k, v, softmax).sum()

    wrapped = jax.grad(mixed_precision(loss, "mixed_bfloat16"))
    x, w = normal(B, T, WIDTH), normal(WIDTH, 3 * WIDTH)
    assert not sums_of(wrapped, x, w)


class Layer(nn.Module):
    """Flax' own attention, with its own dropout."""

    @nn.compact
    def __call__(self, x, _):
        attention = nn.MultiHeadDotProductAttention(
            H, dropout_rate=0.1, deterministic=False
        )
        return x + attention(nn.LayerNorm()(x)), None


def scan_of_layers():
    layers = nn.scan(
        nn.remat(Layer),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=2,
    )()
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    x = jnp.asarray(normal(B, T, WIDTH))
    params = layers.init(rngs, x, None)

    def loss(params, x):
        y, _ = layers.apply(params, x, None, rngs={"dropout": rngs["dropout"]})
        return jnp.square(y).mean()

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    return step, params, x


@pytest.mark.slow
@pytest.mark.breadth(one_in=2)
def test_in_a_scan_over_checkpointed_layers(as_tpu):
    """The output is computed again in the same iteration."""
    step, params, x = scan_of_layers()
    rewritten = jax.jit(mixed_precision(step, "mixed_bfloat16"))
    (found,) = sums_of(rewritten, params, x)
    assert found.outvars[0].aval.shape == (B, H, T)
    reference = updates(step(params, x), params)
    values = updates(rewritten(params, x), params)
    assert relative_error(values, reference) < 4 * EPS["mixed_bfloat16"]


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind, as_tpu):
    """Unless the type says how an operand is laid out."""
    axis_types = (jax.sharding.AxisType[kind],) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types)
    params, x = arguments()
    reference = updates(step_of()(params, x), params)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        rewritten = mixed_precision(step_of(), "mixed_bfloat16")
        found = sums_of(rewritten, params, x)
        values = jax.jit(rewritten)(params, x)
    assert len(found) == (kind == "Auto")
    assert (
        relative_error(updates(values, params), reference) < 4 * EPS["mixed_bfloat16"]
    )


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_shard_map(check_vma, as_tpu):
    """Each device adds up what it has; the same heads on all of them."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    params, x = arguments()

    def on_each(params, x):
        rewritten = mixed_precision(step_of(), "mixed_bfloat16")
        new = rewritten(jax.tree.map(lambda w: w[0], params), x)
        return jax.tree.map(lambda w: w[None], new)

    several = jax.tree.map(lambda w: jnp.stack([w, w]), params)
    everywhere = jax.shard_map(
        on_each,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    assert len(sums_of(everywhere, several, x)) == 1
    values = jax.tree.map(lambda w: w[1], jax.jit(everywhere)(several, x))
    reference = updates(step_of()(params, x), params)
    assert (
        relative_error(updates(values, params), reference) < 4 * EPS["mixed_bfloat16"]
    )


@pytest.mark.slow
@pytest.mark.breadth(one_in=2)
def test_it_is_mapped_and_differentiated(as_tpu):
    """Ensembles, and learning rates that are learned."""
    rewritten = jax.jit(mixed_precision(step_of(), "mixed_bfloat16"))
    params, x = arguments()
    several = jnp.stack([x, -x])
    mapped = jax.vmap(rewritten, (None, 0))(params, several)
    expected = jax.vmap(step_of(), (None, 0))(params, several)
    assert relative_error(mapped, expected) < 4 * EPS["mixed_bfloat16"]

    def after(fun, x):
        return sum(jnp.square(w).sum() for w in jax.tree.leaves(fun(params, x)))

    # Twice as many roundings, of what cancels in part.
    value = jax.grad(lambda x: after(rewritten, x))(x)
    reference = jax.grad(lambda x: after(step_of(), x))(x)
    assert relative_error(value, reference) < 0.05


@pytest.mark.slow
def test_reports_know_it():
    params, x = arguments()
    report = explain(step_of(), "mixed_bfloat16")(params, x)
    plain = explain(step_of(), "float32")(params, x)
    assert report.flops == plain.flops
    reasons = {e.reason for e in report.equations if e.primitive == "by_device"}
    assert any(r.startswith("attention_feature_sums: ") for r in reasons)
    diagnosis = diagnose(step_of(), "mixed_bfloat16")(params, x)
    assert max(diagnosis.results.values()) < diagnosis.tolerance
