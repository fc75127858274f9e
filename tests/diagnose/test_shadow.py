"""A run with shadows computes the rewritten program and the one in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays, relative_error
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import BY_NAME, PROGRAMS, W, mesh, normal

from jmp_rewrite import _compat, _rewrite, diagnose, use_passes
from jmp_rewrite._diagnose import shadow as _shadow
from jmp_rewrite._diagnose.calls import HANDLERS
from jmp_rewrite._diagnose.findings import findings_of
from jmp_rewrite._diagnose.numbers import Numbers
from jmp_rewrite._passes.by_device import resolve
from jmp_rewrite._policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore:.*donated.*:UserWarning")

# What one `jit` fuses, XLA:CPU may round in another place, in the last bit of float32.
FUSED = 1e-6
# These hold a scan that one of the programs compiles as a whole. In a loop the `tanh`
# of `map` differs in its last bit, unless LLVM optimizes.
COMPILED = {"epoch", "lstm", "map", "step_adam"}
# What these hold is compiled as a whole, and XLA:CPU leaves out roundings, unless told.
ROUNDED_LESS = {"epoch", "fori", "jit", "lstm", "pmap"}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes integers to floats, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def rounded_on_cpus():
    """What is diagnosed is what accelerators run: a CPU reads some values unrounded."""
    with use_passes("-read_before_rounding"):
        yield


def shadowed(fun, args, policy="mixed_bfloat16", few=_shadow.FEW):
    """Runs the rewritten program with shadows."""
    traced = _rewrite.trace_call(fun, args, {})
    plan = _rewrite.decide_traced(traced, Policy(policy))
    consts = _compat.constants(traced.closed)
    closed = resolve(_rewrite.optimized(plan).closed, "", required=False)
    numbers = Numbers(plan.graph.nodes)
    pairs, run = _shadow.run(closed, consts, traced.arrays, HANDLERS, few, numbers)
    return pairs, run, traced, plan


def both(fun, args, policy="mixed_bfloat16", rounded_less=False, few=_shadow.FEW):
    """Returns pairs of values and shadows, those expected, and the findings."""
    pairs, run, traced, plan = shadowed(fun, args, policy, few)
    consts = _compat.constants(traced.closed)
    rewritten = as_written(plan, consts, traced.arrays, rounded_less)
    original = _shadow.unrounded(traced.closed, traced.arrays, HANDLERS)
    findings, _ = findings_of(run, [None] * len(traced.arrays))
    return pairs, rewritten, original, findings


def as_written(plan, consts, args, rounded_less):
    """Runs the rewritten program with all of its roundings."""
    rewritten = functools.partial(_rewrite.run, plan, consts)
    if not rounded_less:
        return rewritten(args)
    options = {"xla_allow_excess_precision": False}
    return jax.jit(rewritten).lower(args).compile(compiler_options=options)(args)


def same(xs, ys, is_compiled):
    if is_compiled:
        assert relative_error(arrays(xs), arrays(ys)) < FUSED
        return
    for x, y in zip(xs, ys, strict=True):
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def alike(shadows, original):
    """Shadows run the passes' program, which adds up in another order."""
    for shadow, expected in zip(shadows, original, strict=True):
        if not jnp.issubdtype(shadow.dtype, jnp.inexact):
            same([shadow], [expected], False)
        else:
            assert relative_error([shadow], [expected]) < FUSED


@pytest.mark.breadth
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_both_programs(program):
    pairs, rewritten, original, findings = both(
        program.fun, program.args(), rounded_less=program.name in ROUNDED_LESS
    )
    is_compiled = program.name in COMPILED
    same([p.value for p in pairs], rewritten, is_compiled)
    alike([p.shadow for p in pairs], original)
    assert all(0 <= f.error < 2 for f in findings)
    assert all(i < f.index for f in findings for i in f.reads)


@pytest.mark.slow
def test_float16_too():
    for name in ("attention", "rnn", "step_momentum"):
        program = BY_NAME[name]
        pairs, rewritten, original, _ = both(
            program.fun, program.args(), "mixed_float16"
        )
        same([p.value for p in pairs], rewritten, False)
        alike([p.shadow for p in pairs], original)


def test_the_reference_knows_no_half():
    """What the program makes half itself is float32 in the reference."""

    def fun(x, w):
        h = (x.astype(jnp.float16) @ w.astype(jnp.float16)) * jnp.float16(3)
        return h.astype(jnp.float32) + jnp.float32(1)

    x, w = normal(4, W), normal(W, W)
    pairs, *_ = both(fun, (x, w))
    expected = jnp.asarray(x) @ w * np.float32(3) + np.float32(1)
    np.testing.assert_array_equal(pairs[0].shadow, expected)
    assert pairs[0].error > 1e-4


def long_scan(x, w):
    def body(h, u):
        return jnp.tanh(h @ w + u), (h @ w).sum()

    return lax.scan(body, x, jnp.stack([x * np.float32(i) for i in range(5)]))


def backwards(x, w):
    def body(h, u):
        return jnp.tanh(h @ w + u), h

    return lax.scan(body, x, jnp.stack([x] * 5), reverse=True)


def converging(x, w):
    def goes_on(state):
        i, h = state
        return (i < 9) & (jnp.abs(h).max() > np.float32(0.2))

    return lax.while_loop(goes_on, lambda s: (s[0] + 1, s[1] @ w), (0, x))


def each_for_itself(x, w):
    """Under `vmap` one of a batch leaves the loop before the others."""

    def iterated(h, times):
        return lax.fori_loop(0, times, lambda _, h: jnp.tanh(h @ w), h)

    times = jnp.arange(len(x)) * 2
    return jax.vmap(iterated)(x, times), jax.vmap(converging, (0, None))(x, w)


def branching(x, w):
    def body(h, i):
        arms = [lambda h: h @ w, lambda h: jnp.tanh(h) @ w, lambda h: h]
        return lax.switch(i % 3, arms, h), None

    return lax.scan(body, x, jnp.arange(5))[0]


def nested(x, w):
    def inner(h, _):
        return jnp.tanh(h @ w), None

    def outer(h, _):
        return lax.scan(inner, h, None, length=3)[0], h.sum()

    return lax.scan(outer, x, None, length=4)


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("few", [0, 2, 64], ids=["compiled", "both", "by equation"])
@pytest.mark.parametrize(
    "loop",
    [long_scan, backwards, converging, each_for_itself, branching, nested],
)
def test_loops(few, loop):
    """A loop is run equation by equation or compiled, with the same numbers."""
    x, w = normal(4, W), normal(W, W, scale=0.3)
    pairs, rewritten, original, findings = both(
        loop, (x, w), rounded_less=True, few=few
    )
    assert relative_error([p.value for p in pairs], rewritten) < FUSED
    assert relative_error([p.shadow for p in pairs], original) < FUSED
    inside = [f for f in findings if f.iteration]
    assert inside
    assert all(f.counts.size for f in inside)


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, 64])
def test_iterations_are_counted_from_the_front(few):
    """The iteration is an index into `xs`, in whichever order they are gone through."""

    def fun(w, xs, reverse):
        def body(c, x):
            return c, (jnp.square(x) @ w).sum()

        return lax.scan(body, jnp.float32(0), xs, reverse=reverse)[1]

    xs = jnp.ones((6, 4, W)).at[2].set(500)
    for reverse in (False, True):
        *_, findings = both(
            lambda w, xs, r=reverse: fun(w, xs, r),
            (jnp.eye(W), xs),
            "mixed_float16",
            few=few,
        )
        (spoilt,) = [f for f in findings if f.overflowed]
        assert spoilt.iteration == (2,) and spoilt.primitive == "square"
        assert spoilt.overflowed == 4 * W


def sharded(fun, ins, outs):
    return jax.shard_map(fun, mesh=mesh(), in_specs=ins, out_specs=outs)


SHARDED = {
    "sum": sharded(lambda x, w: lax.psum(jnp.tanh(x @ w) @ w, "i"), (P("i"), P()), P()),
    "scan": sharded(
        lambda x, w: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0],
        (P("i"), P()),
        P("i"),
    ),
    "cond": sharded(
        lambda x, w: lax.cond(
            (x @ w).sum() > 0, lambda h: h @ w, lambda h: h - np.float32(1), x @ w
        ),
        (P("i"), P()),
        P("i"),
    ),
}


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("name", SHARDED)
def test_shards(name):
    x, w = normal(4, W), normal(W, W)
    pairs, rewritten, original, findings = both(
        SHARDED[name], (x, w), rounded_less=True
    )
    assert relative_error([p.value for p in pairs], rewritten) < FUSED
    assert relative_error([p.shadow for p in pairs], original) < FUSED
    (product,) = [f for f in findings if f.primitive == "dot_general" and f.counts][:1]
    assert product.counts.size in (4 * W, 3 * 4 * W)  # all devices, all iterations


def test_two_branches():
    """Where the programs part, each goes its own way and the finding says so."""

    def fun(x, threshold):
        h = (x @ x).sum()
        return lax.cond(h > threshold, lambda x: x @ x, lambda x: -(x @ x), x)

    x = jnp.full((W, W), 1.001, jnp.float32)
    exact = float((x @ x).sum())
    half = float(sum(np.asarray(x.astype("bfloat16") @ x.astype("bfloat16")).flat))
    pairs, rewritten, original, findings = both(
        fun, (x, jnp.float32((exact + half) / 2))
    )
    same([p.value for p in pairs], rewritten, False)
    same([p.shadow for p in pairs], original, False)
    (parted,) = [f for f in findings if f.kind == "branches"]
    assert parted.error == 1 and pairs[0].error == 1


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, 64])
def test_two_exits(few):
    """Each program leaves a loop when it wants to."""

    def fun(x):
        def goes_on(state):
            i, h = state
            return (h[0, 0] < np.float32(2.0)) & (i < 2000)

        return lax.while_loop(
            goes_on,
            lambda s: (s[0] + 1, s[1] + (s[1] @ x) / np.float32(1000)),
            (0, x[:4]),
        )

    x = jnp.eye(W, dtype=jnp.float32) * np.float32(1.003)
    pairs, rewritten, original, findings = both(fun, (x,), few=few)
    assert int(pairs[0].value) == int(rewritten[0])
    assert int(pairs[0].shadow) == int(original[0]) != int(rewritten[0])
    assert relative_error([p.value for p in pairs[1:]], rewritten[1:]) < FUSED
    assert relative_error([p.shadow for p in pairs[1:]], original[1:]) < FUSED
    (parted,) = [f for f in findings if f.kind == "branches"]
    assert parted.error == 1


def test_effects_happen_in_one_program_only():
    seen = []

    def fun(x):
        h = x @ x
        jax.debug.callback(lambda v: seen.append(v.dtype), h)
        return h

    shadowed(fun, (jnp.eye(4),))
    jax.effects_barrier()
    assert seen == [np.float32]


def test_equal_value_and_shadow_are_computed_once():
    """Where nothing was rounded yet both programs share one array."""

    def fun(x, w):
        mask = jnp.tril(jnp.ones((4, 4), jnp.float32)) * jnp.exp(x).sum()
        return mask, x @ w

    pairs, *_ = both(fun, (normal(4, 4), normal(4, 4)))
    assert pairs[0].shadow is pairs[0].value
    assert pairs[1].shadow is not pairs[1].value


@pytest.mark.slow
def test_memory_is_freed_after_the_last_use():
    """At no time more values live than the jaxpr needs: not one a layer."""
    alive = []

    def fun(x, w):
        for _ in range(20):
            x = jnp.tanh(x @ w)
            x = jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x

    def count(x):
        alive.append(sum(a.nbytes for a in jax.live_arrays()))
        return np.asarray(x)

    x, w = jnp.ones((256, 256)), jnp.eye(256)
    shadowed(fun, (x, w))
    # The 20 layers in two programs, kept, would be 40 arrays.
    assert max(alive) - min(alive) < 8 * x.nbytes


def rounded(x, half):
    return x.astype(half) * jnp.asarray(1.25, half)


def scans(x, half):
    return lax.scan(lambda c, _: (rounded(c, half), c.sum()), rounded(x, half), None, 9)


def repeats(x, half):
    return lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, rounded(c[1], half)),
        (0, x.astype(half)),
    )


def chooses(x, half):
    def step(c, i):
        one, other = (lambda c: rounded(c, half)), (lambda c: c.astype(half) / 3)
        return lax.cond(i % 2 == 0, one, other, c).astype(jnp.float32), None

    return lax.scan(step, x, jnp.arange(4))[0]


def calls(x, half):
    f = jax.custom_jvp(jax.jit(lambda x: rounded(x, half)))
    f.defjvp(lambda p, t: (f(*p), t[0]))
    return f(x), jax.checkpoint(lambda x: rounded(x, half).sum())(x)


@pytest.mark.parametrize("few", [0, _shadow.FEW])
@pytest.mark.parametrize("fun", [scans, repeats, chooses, calls])
def test_without_rounding_a_programs_own_half_is_float32(fun, few):
    x = normal(4, 8)
    traced = _rewrite.trace_call(lambda x: fun(x, jnp.bfloat16), (x,), {})
    found = _shadow.unrounded(traced.closed, traced.arrays, HANDLERS, few)
    wanted = jax.tree.leaves(fun(x, jnp.float32))
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype and relative_error(got, want) < FUSED


@pytest.mark.parametrize("length", [pytest.param(2, marks=pytest.mark.slow), 40])
def test_a_gradient_through_a_scan_inside_of_a_shard_map(length):
    """What an iteration reads of a stack varies over the mesh as the stack does."""
    (axis,) = mesh().axis_names

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P(axis), P()), out_specs=P()
    )
    def layers(w, x):
        x = lax.pcast(x, axis, to="varying")
        last, rows = lax.scan(lambda h, _: (jnp.tanh(h @ w[0]), h), x, None, length)
        return lax.pmean(last + rows.mean(0), axis)

    gradient = jax.grad(lambda w, x: (layers(w, x) ** 2).sum())
    w = normal(mesh().size, 8, 8, scale=0.3)
    diagnosis = diagnose(gradient, "bf16")(w, normal(4, 8))
    assert 0 < diagnosis.error <= diagnosis.tolerance
