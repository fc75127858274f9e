"""The contract of all passes, over small whole steps; see `_passes/program.py`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bit_equal, relative_error
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P
from programs import normal, weights

from jmp_rewrite import Policy, _compat, _rewrite, mixed_precision, use_passes
from jmp_rewrite._emit import program
from jmp_rewrite._emit.later import Later
from jmp_rewrite._passes import PASSES, Program
from jmp_rewrite._passes.by_device import DEVICES, TPU, Where, resolve
from jmp_rewrite._passes.edit import Editor

T, D, F = 16, 8, 12
# The bound is of the whole step's results: one rounding more or less of a bfloat16.
TOLERANCE = {"nothing": 0.0, "order of sums": 2**-8, "rounding": 2**-6}


def gelu(params, x):
    w, out = params
    return jnp.square(jax.nn.gelu(x @ w, approximate=False) @ out).mean()


def softplus(params, x):
    w, out = params
    return jnp.square(jnp.logaddexp(x @ w, 0.5) @ out).mean()


def one_example(params, x):
    """Of a vector one element is set, by an index and a number without dimensions."""
    w, out = params
    logits = jnp.tanh(x[0] @ w) @ out
    label = jnp.argmax(x[0, :4])
    return jax.nn.logsumexp((logits - logits[label]).at[label].set(0.0))


def half_already(params, x):
    """A user's own half values, where passes look for float32."""
    w, out = params
    h = (x @ w).astype(jnp.bfloat16)
    h = jax.nn.softplus(h) * jax.nn.silu(h) + jax.nn.softmax(h) * jnp.tanh(h)
    return jnp.square(h.astype(jnp.float32) @ out).mean()


def attention(params, x):
    w, out = params
    h = x @ w
    return jnp.square(jax.nn.softmax(h @ h.T) @ h @ out).mean()


def heads(params, x):
    w, out = params
    h = (x @ w + out[:, 0][None]).reshape(len(x), 3, 2, 2)
    q, k, v = h[:, 0], h[:, 1], h[:, 2]
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    h = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    return jnp.square(h.reshape(len(x), 4) @ out[:4]).mean()


def heads_of_many(params, x):
    """More places than a TPU has lanes."""
    return heads(params, jnp.tile(x, (9, 1)))


def grouped(params, x):
    """Two queries for each key: their scores are transposed, and larger than both."""
    w, out = params
    q, k = (x @ w).reshape(len(x), 3, 2, 2), (x @ w[:, :6]).reshape(len(x), 3, 2)
    p = jax.nn.softmax(jnp.einsum("qgnd,kgd->gnqk", q, k))
    h = jnp.einsum("gnqk,kgd->qgnd", p, k)
    return jnp.square(h.reshape(len(x), F) @ out).mean()


def silu_of_a_norm(params, x):
    w, out = params
    h = x @ w + out[:, 0][None] + out[:, 1][None]
    for _ in range(3):
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
    return jnp.square(jax.nn.silu(h) @ out).mean()


def upsampled(params, x):
    w, out = params
    h = jnp.repeat(jnp.tanh(x @ w), 2, axis=0, total_repeat_length=2 * T)
    a, b = jnp.split(h, 2)
    for _ in range(3):
        a = jnp.tanh(a @ out @ w)
    return jnp.square((a + b) @ out).mean()


def gated(params, x):
    """An argument of an activation that is one of several results."""
    w, out = params
    a, b = jnp.split(x @ w, 2, axis=1)
    h = jax.nn.gelu(b, approximate=False) * a + jnp.tanh(a) * jax.nn.softmax(b)
    return jnp.square(h @ out[: F // 2]).mean()


def convolved(params, x):
    w, out = params
    images = x.reshape(T // 4, 4, 4, D // 4)
    kernel = w[:2, :8].reshape(2, 2, 2, 2)
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    h = jax.nn.relu(h + out[0, :2][None, None, None])
    return jnp.square(h.reshape(T, -1) @ out[:8]).mean()


def resized(params, x):
    w, out = params
    h = (x @ w).reshape(T // 4, 4, F)
    h = jax.image.resize(h, (T // 4, 8, F), "nearest")
    return jnp.square(h @ out).mean()


def scanned(params, x):
    w, out = params

    def body(h, rows):
        h = jnp.tanh(h + rows @ w)
        return h, h

    h = jax.lax.scan(body, 0 * (x[:4] @ w), x.reshape(T // 4, 4, D))[1]
    return jnp.square(h @ out).mean()


def labelled(params, x):
    w, out = params
    log_p = jax.nn.log_softmax(x @ w @ out)
    return -jnp.take_along_axis(log_p, jnp.arange(T)[:, None] % D, 1).mean()


LOSSES = (
    gelu,
    attention,
    heads,
    heads_of_many,
    grouped,
    silu_of_a_norm,
    softplus,
    half_already,
    one_example,
    gated,
    upsampled,
    convolved,
    resized,
    scanned,
    labelled,
)


def step_of(loss):
    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    return step


def arguments():
    return [*weights((D, F), (F, D))], jnp.asarray(normal(T, D))


def sharded(loss):
    """A step on two devices, which have a batch each, and the mean of gradients."""
    # JAX's own `erfc` fails there when not in a `jit`.
    check_vma = loss not in (gelu, gated)

    def step(params, x):
        own = jax.lax.pcast(params, "i", to="varying") if check_vma else params
        grads = jax.lax.pmean(jax.grad(loss)(own, x[0]), "i")
        return jax.tree.map(lambda w, g: w - g, params, grads)

    def split(params, x):
        specs = {"in_specs": (P(), P("i")), "out_specs": P(), "check_vma": check_vma}
        own = jax.shard_map(step, mesh=mesh(), **specs)
        return own(params, jnp.stack([x, x[::-1]]))

    return split


def mesh():
    return jax.sharding.Mesh(jax.devices()[:2], "i")


@functools.cache
def explicit(loss, step_of=step_of):
    """Returns the step of a loss as a program with explicit casts."""
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(step_of(loss))(*arguments())
    plan = _rewrite.decide(closed, Policy("mixed_bfloat16"))
    later = Later(_rewrite.run, lambda fun, args: fun(*args))
    emitted = program.emit(plan, later)
    return Program(emitted, plan.half, plan.pins.whole_step)


def optimized(own, before):
    """Returns the program after one pass, and how often that has edited."""
    editor = Editor(before)
    if editor.has(own.looks_for):
        editor.run(own.name, own.run)
    return before._replace(closed=editor.finish()), editor.done[own.name]


def as_it_is(fun, leaves):
    return fun, leaves


def mapped(fun, leaves):
    return jax.vmap(fun), [jnp.stack([x, -x]) for x in leaves]


def differentiated(fun, leaves):
    # Scores near 100 leave one weight of a softmax: second derivatives are noise there.
    leaves = [x / 2 for x in leaves]
    return lambda *xs: jax.jvp(fun, xs, tuple(leaves)), leaves


def on_two_devices(fun, leaves):
    def local(*xs):
        return [r[None] for r in fun(*(x[0] for x in xs))]

    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": False}
    own = jax.shard_map(local, mesh=mesh(), **specs)
    return own, [jnp.stack([x, -x]) for x in leaves]


@functools.cache
def results(closed, device, transformation=as_it_is):
    """What a program gives on a device, after a transformation."""
    fun, leaves = transformation(jex.jaxpr_as_fun(closed), jax.tree.leaves(arguments()))
    traced = jax.make_jaxpr(fun)(*leaves)
    return _compat.evaluate(resolve(traced, device), leaves)


def devices_of(own):
    prefixes = () if own.devices == ("all",) else own.devices
    return [d for d in DEVICES if d.startswith(prefixes)] if prefixes else []


by_pass = pytest.mark.parametrize("own", PASSES, ids=lambda p: p.name)
SLOW = pytest.mark.slow
by_loss = pytest.mark.parametrize(
    "loss", [pytest.param(x, marks=SLOW) if x is heads else x for x in LOSSES]
)


@pytest.mark.slow
@pytest.mark.breadth(one_in=16)
@pytest.mark.parametrize("form", [step_of, pytest.param(sharded, marks=SLOW)])
@by_loss
@by_pass
def test_the_contract(own, loss, form):
    before = explicit(loss, form)
    after, edits = optimized(own, before)
    if not edits:
        assert after.closed is before.closed
        return
    jex.check_jaxpr(_compat.open_jaxpr(after.closed))
    assert after.closed.in_avals == before.closed.in_avals
    assert after.closed.out_avals == before.closed.out_avals
    again, more = optimized(own, after)
    assert again.closed is after.closed and not more
    transformations = [as_it_is, mapped, differentiated]
    if form is step_of:
        transformations.append(on_two_devices)
    devices = ("", *devices_of(own)[-1:])
    for transformation, device in itertools.product(transformations, devices):
        found, expected = (
            results(p.closed, device, transformation) for p in (after, before)
        )
        is_for = bool(device) or own.devices == ("all",)
        if own.changes == "nothing" or not is_for:
            bit_equal(found, expected)
        else:
            if transformation is as_it_is:
                found, expected = map(change, (found, expected))
            assert relative_error(found, expected) < TOLERANCE[own.changes]


def change(results):
    return [a - w for a, w in zip(results, arguments()[0], strict=True)]


# A constraint needs a mesh: `tests/libraries/test_scale_out.py`. Of forward functions
# are `test_cpu_convolutions.py` and `test_forward.py`.
ELSEWHERE = (
    "cpu_convolutions",
    "sharded_casts",
    "softmax_derivative",
    "softmax_rounded",
)


@pytest.mark.parametrize("own", [p for p in PASSES if p.name not in ELSEWHERE])
def test_each_pass_finds_something(own):
    found = [optimized(own, explicit(loss))[1] for loss in LOSSES]
    # XLA:CPU of JAX 0.11 multiplies these shapes as they are.
    assert any(found) or own.name == "cpu_products"


@by_loss
def test_no_pass_hides_a_pattern_from_another(loss):
    # What is computed again is stacked no more, a sum needs no zeros, and a sigmoid is
    # no exponential: there is nothing to do for those.
    fewer, before, alone = explicit(loss), explicit(loss), set()
    first = ("recompute_stacks", "scatter_as_sum", "softplus_derivative")
    for own in (p for p in PASSES if p.name in first):
        fewer, edits = optimized(own, fewer)
        alone |= {own.name} if edits else set()
    alone |= {p.name for p in PASSES if optimized(p, fewer)[1]}
    together = set()
    for own in PASSES:
        before, edits = optimized(own, before)
        together |= {own.name} if edits else set()
    assert alone <= together


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("device", [None, "CPU", "NVIDIA H200", "TPU v5e"])
@pytest.mark.parametrize("loss", [attention, silu_of_a_norm])
def test_any_device_is_as_good(loss, device):
    """Mapped over and differentiated too, with all passes and with none."""
    params, x = arguments()
    exact = step_of(loss)(params, x)
    for passes in ("all", "none"):
        with use_passes(passes, device=device):
            half = jax.jit(mixed_precision(step_of(loss), "mixed_bfloat16"))
            found = half(params, x)
            mapped = jax.vmap(half, (None, 0))(params, jnp.stack([x, x]))
        assert relative_error(change(found), change(exact)) < 2**-4
        for a, b in zip(mapped, found, strict=True):
            assert relative_error(a[1], b) < 2**-7


@pytest.mark.slow
def test_the_switch_takes_part_in_the_cache_key():
    traced = []

    @jax.jit
    def step(params, x):
        traced.append(1)
        return mixed_precision(step_of(gelu), "mixed_bfloat16")(params, x)

    for passes in ("all", "none", "-keep_rounding", "all"):
        with use_passes(passes):
            step(*arguments())
    assert len(traced) == 3


@pytest.mark.parametrize(
    ("passes", "device", "message"),
    [
        ("keep_roundings", None, "did you mean 'keep_rounding'"),
        ("nonee", None, "did you mean 'none'"),
        ("NONE", None, "did you mean 'none'"),
        ("-all", None, "got 'all', which stands alone"),
        ("keep_rounding,-live_ranges", None, "got both"),
        ("", None, "expected"),
        ("all", "cuda", "did you mean 'NVIDIA GPU'"),
        ("all", "TPU v5", "expected one of the devices .* did you mean 'TPU v5"),
    ],
)
def test_misuse_is_heard(passes, device, message):
    with pytest.raises(ValueError, match=message), use_passes(passes, device=device):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("v5e", "TPU v5e"),
        ("TPU v5 lite", "TPU v5e"),
        ("v5litepod", "TPU v5e"),
        ("trillium", "TPU v6e"),
        ("h100", "NVIDIA H100"),
        ("A100 80GB", "NVIDIA A100"),
        ("cpu", "CPU"),
    ],
)
def test_a_device_is_spelled_as_for_its_cost(written, name):
    def program(device):
        with use_passes(device=device):
            return str(
                jax.make_jaxpr(mixed_precision(step_of(attention), "mixed_bfloat16"))(
                    *arguments()
                )
            )

    assert program(written) == program(name)


def test_the_environment_sets_the_default(monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_PASSES", "none")
    closed = jax.make_jaxpr(mixed_precision(step_of(gelu), "mixed_bfloat16"))(
        *arguments()
    )
    # Without it XLA:CPU could not run the program.
    stacks = {str(e.source_info.name_stack) for e in closed.eqns}
    names = {s.partition("pass:")[2].partition(")")[0] for s in stacks if "pass:" in s}
    assert names == {"cpu_shield"}
    monkeypatch.setenv("JMP_REWRITE_PASSES", "")
    program = mixed_precision(step_of(gelu), "mixed_bfloat16")
    empty = str(jax.make_jaxpr(program)(*arguments()))
    monkeypatch.delenv("JMP_REWRITE_PASSES")
    assert empty == str(jax.make_jaxpr(program)(*arguments()))
    monkeypatch.setenv("JMP_REWRITE_PASSES", "everything")
    with pytest.raises(ValueError, match="JMP_REWRITE_PASSES expected"):
        mixed_precision(step_of(gelu), "mixed_bfloat16")(*arguments())


def test_numbers_are_as_declared():
    assert np.unique([p.name for p in PASSES]).size == len(PASSES)
    for own in PASSES:
        assert own.reason and "Gain:" in own.run.__doc__
        assert own.devices == ("all",) or devices_of(own)


@by_loss
def test_a_body_knows_its_readers_and_makers_after_each_pass(loss):
    editor = Editor(explicit(loss))
    for own in PASSES:
        for body in editor.bodies:  # an index that is there before the pass edits
            read = [body.reads(v) for v in body.invars]
            assert len(read) == len(body.parameter)
        editor.run(own.name, own.run)
        for body in editor.bodies:
            readers = {}
            for index, eqn in enumerate(body.eqns):
                for position, atom in enumerate(eqn.invars):
                    if not hasattr(atom, "val"):
                        readers.setdefault(atom, []).append((index, position))
            for position, atom in enumerate(body.outvars):
                if not hasattr(atom, "val"):
                    readers.setdefault(atom, []).append((-1, position))
            makers = {v: i for i, eqn in enumerate(body.eqns) for v in eqn.outvars}
            assert {v: body.reads(v) for v in readers} == readers
            assert all(body.maker[v] == index for v, index in makers.items())
            assert not any(body.reads(v) for v in makers if v not in readers)


@pytest.mark.parametrize("edges", [0, 24])
def test_what_has_no_elements_is_left_alone(edges):
    """A graph without edges, a batch without selected rows."""
    w, x = jnp.eye(16), jnp.ones((20, 16))

    def step(w, x, senders, values):
        def loss(w):
            h = jnp.tanh(x @ w)
            read = jax.vmap(lambda i: h[i])(senders)
            return jnp.mean(((h + jnp.sin(read * values).sum(0)) @ w) ** 2)

        return jax.value_and_grad(loss)(w)

    args = w, x, jnp.arange(edges) % 20, jnp.ones((edges, 16))
    with jax.numpy_rank_promotion("allow"):
        half = jax.jit(mixed_precision(step, "mixed_bfloat16"))
        (found, _), (exact, _) = half(*args), step(*args)
    assert abs(found - exact) < 0.05 * abs(exact)


def narrowed(x):
    return [x.astype(jnp.bfloat16)]


def without_a_row(x):
    return [x[1:]]


@pytest.mark.parametrize("fun", [narrowed, without_a_row])
@pytest.mark.parametrize("edit", ["replace", "choose"])
def test_what_stands_in_place_of_a_value_has_its_type(edit, fun):
    def own(editor):
        body, index, eqn = next(editor.find("erf", "erfc"))
        (out,) = eqn.outvars
        if edit == "replace":
            editor.replace(body, index, fun, eqn.invars[0])
        else:
            editor.choose_instead(body, out, [], {Where((TPU,)): fun})

    message = rf"{fun.__name__} of a pass expected .*, f32\[16,12\], got "
    with pytest.raises(TypeError, match=message):
        Editor(explicit(gelu)).run("own", own)
