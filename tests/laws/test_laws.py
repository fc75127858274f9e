"""Every law of the transformation, over every program of the list."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import (
    EPS,
    HALF,
    PRODUCTS,
    arrays,
    bit_equal,
    dtypes_in,
    dtypes_out,
    eqns,
    open_jaxpr,
    products,
    relative_error,
    same_types,
    shape_of,
    trace,
)
from jax.extend import core as jex
from programs import BY_NAME, PROGRAMS

from jmp_rewrite import mixed_precision, mixed_precision_jaxpr
from jmp_rewrite._policy import Policy
from jmp_rewrite._rewrite import decide

POLICIES = ["mixed_bfloat16", "mixed_float16"]
DIFFERENTIABLE = [p for p in PROGRAMS if p.grad]
# Results are compared by norm; a chain of products of width 8 stays below 32 roundings.
ROUNDINGS = 32

pytestmark = pytest.mark.filterwarnings("ignore:.*donated.*:UserWarning")


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax promotes integers to floats, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def total(fun):
    """Returns a scalar function of the same arguments, for `grad`."""
    return lambda *a: sum(jnp.sum(jnp.sin(x)) for x in arrays(fun(*a)))


def only_arrays(fun):
    return lambda *a: arrays(fun(*a))


@functools.cache
def results(program):
    return program.fun(*program.args())


@functools.cache
def gradients(program):
    return jax.jit(jax.grad(total(program.fun)))(*program.args())


@pytest.mark.passes
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_same_signature(program, policy):
    """Law 1: same tree, shapes, dtypes and weak types; values that are close."""
    expected = results(program)
    result = mixed_precision(program.fun, policy)(*program.args())
    same_types(expected, result)
    assert relative_error(result, expected) < ROUNDINGS * EPS[policy]


@pytest.mark.breadth
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_same_bits(program):
    """Law 2: under float32 the results are the same ones."""
    expected = results(program)
    result = mixed_precision(program.fun, "float32")(*program.args())
    same_types(expected, result)
    bit_equal(expected, result)


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_no_op(program):
    """Law 2: under float32 the jaxpr is the same one."""
    fun, args = only_arrays(program.fun), program.args()
    plain = trace(fun, *args)
    assert shape_of(trace(mixed_precision(fun, "float32"), *args)) == shape_of(plain)
    assert mixed_precision_jaxpr(plain, "float32") is plain


@pytest.mark.passes
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_idempotent(program, policy):
    """Law 3: what has been rewritten is not rewritten again."""
    fun, args = only_arrays(program.fun), program.args()
    once = mixed_precision(fun, policy)
    twice = mixed_precision(once, policy)
    assert shape_of(trace(twice, *args)) == shape_of(trace(once, *args))


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_inner_policy_decides(program):
    """Law 3: a float32 region inside a half one stays float32."""
    fun, args = only_arrays(program.fun), program.args()
    inner = mixed_precision(fun, "float32")
    outer = mixed_precision(lambda *a: inner(*a), "mixed_bfloat16")
    assert shape_of(trace(outer, *args)) == shape_of(trace(fun, *args))


@pytest.mark.passes
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_jit_outside_and_inside(program, policy):
    """Law 4: jit around it, and jit inside it, with the same values."""
    fun, args = only_arrays(program.fun), program.args()
    expected = arrays(results(program))
    outside = jax.jit(mixed_precision(fun, policy))(*args)
    inside = mixed_precision(jax.jit(fun), policy)(*args)
    for result in (outside, inside):
        same_types(expected, result)
        assert relative_error(result, expected) < ROUNDINGS * EPS[policy]


@pytest.mark.passes
@pytest.mark.breadth(one_in=10)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", DIFFERENTIABLE, ids=repr)
def test_grad_outside_and_inside(program, policy):
    """Law 4: gradients of the decorated function, and decorated gradients."""
    fun, args = total(program.fun), program.args()
    expected = gradients(program)
    half = mixed_precision(fun, policy)
    outside = jax.jit(jax.grad(half))(*args)
    inside = jax.jit(mixed_precision(jax.grad(fun), policy))(*args)
    for result in (outside, inside):
        same_types(expected, result)
        # A relu near zero turns a rounding into a whole entry of the gradient.
        assert relative_error(result, expected) < 2 * ROUNDINGS * EPS[policy]


@pytest.mark.passes
@pytest.mark.breadth(one_in=10)
@pytest.mark.parametrize("program", DIFFERENTIABLE, ids=repr)
def test_forward_mode_and_transforms(program):
    """Law 4: jvp, vjp, checkpoint, eval_shape and compilation ahead of time."""
    fun, args = total(program.fun), program.args()
    half = mixed_precision(fun, "mixed_bfloat16")
    value = half(*args)
    if program.name not in ("custom_vjp",):  # custom_vjp has no forward mode at all
        tangents = jax.tree.map(jnp.ones_like, args[0])
        same_types(
            value, jax.jvp(lambda p: half(p, *args[1:]), args[:1], (tangents,))[0]
        )
    same_types(value, jax.vjp(lambda p: half(p, *args[1:]), args[0])[0])
    same_types(value, jax.checkpoint(half)(*args))
    assert jax.eval_shape(half, *args).dtype == value.dtype
    compiled = jax.jit(half).lower(*args).compile()
    same_types(value, compiled(*args))


@pytest.mark.passes
@pytest.mark.breadth
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_products_are_half(program, policy):
    """Every product has half operands, or a reason why not."""
    fun, args = only_arrays(program.fun), program.args()
    rewritten = trace(mixed_precision(fun, policy), *args)
    half = [e for e in products(rewritten) if set(dtypes_in(e)) == {HALF[policy]}]
    assert len(half) >= program.products
    plan = decide(trace(fun, *args), Policy(policy))
    for node in plan.graph.nodes:
        if node.name in PRODUCTS and not plan.labels[node.index]:
            assert plan.pins.full[node.index]


@pytest.mark.passes
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_denied_are_full(program, policy):
    """Nothing denied runs in half."""
    rewritten = trace(
        mixed_precision(only_arrays(program.fun), policy), *program.args()
    )
    for eqn in eqns(rewritten, "exp", "pow", "reduce_sum", "cumsum", "scatter-add"):
        if program.name != "already_half":
            assert HALF[policy] not in dtypes_in(eqn) + dtypes_out(eqn)


@pytest.mark.passes
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_no_cast_undoes_another(program, policy):
    """No value is rounded to be cast back for a single reader, but by a pass."""
    rewritten = trace(
        mixed_precision(only_arrays(program.fun), policy), *program.args()
    )
    for body in bodies(rewritten):
        made = {e.outvars[0]: e for e in body.eqns if is_cast(e) and not of_pass(e)}
        reads = collections.Counter(v for e in body.eqns for v in inputs(e))
        reads.update(v for v in body.outvars if not hasattr(v, "val"))
        for cast in made.values():
            (source,), (out,) = cast.invars, cast.outvars
            before = made.get(source)
            if before is None or program.name == "half_inside":
                continue
            is_undone = before.invars[0].aval.dtype == out.aval.dtype
            if is_undone and str(source.aval.dtype) == HALF[policy]:
                assert reads[source] > 1 or reads[out] > 1  # it is stored


def is_cast(eqn):
    return eqn.primitive.name == "convert_element_type"


def of_pass(eqn):
    return "jmp_rewrite.pass:" in str(eqn.source_info.name_stack)


def inputs(eqn):
    return [v for v in eqn.invars if not hasattr(v, "val")]


def bodies(jaxpr):
    """Yields a jaxpr, and all that it holds."""
    yield open_jaxpr(jaxpr)
    for eqn in open_jaxpr(jaxpr).eqns:
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from bodies(inner)


STEPS = [p for p in PROGRAMS if p.name.startswith("step_")]


@pytest.mark.passes
@pytest.mark.parametrize("program", STEPS, ids=repr)
def test_weights_are_cast_once(program):
    """In a whole step no parameter is cast twice."""
    rewritten = trace(mixed_precision(program.fun, "mixed_bfloat16"), *program.args())
    cast = [
        e.invars[0]
        for e in open_jaxpr(rewritten).eqns
        if e.primitive.name == "convert_element_type"
    ]
    weights = [v for v in open_jaxpr(rewritten).invars if v.aval.ndim == 2]
    counts = [sum(v is c for c in cast) for v in weights]
    assert max(counts) == 1


@pytest.mark.passes
def test_hessian_and_vmap():
    """Law 4: grad of grad, and vmap outside and inside."""
    program = BY_NAME["deep"]
    fun, (params, x) = total(program.fun), program.args()
    half = mixed_precision(fun, "mixed_bfloat16")
    exact = jax.hessian(lambda x: fun(params, x))(x)
    assert relative_error(jax.hessian(lambda x: half(params, x))(x), exact) < 0.1
    batch = jnp.stack([x, 2 * x])
    outside = jax.vmap(half, (None, 0))(params, batch)
    inside = mixed_precision(jax.vmap(fun, (None, 0)), "mixed_bfloat16")(params, batch)
    assert relative_error(outside, inside) < 4 * EPS["mixed_bfloat16"]


@pytest.mark.passes
def test_scan_outside():
    """Law 4: as the body of a scan, of a while loop and of a branch."""
    (w,), x = BY_NAME["while"].args()
    body = mixed_precision(lambda x, w: jnp.tanh(x @ w), "mixed_bfloat16")
    scanned, _ = jax.lax.scan(lambda x, _: (body(x, w), None), x, None, length=3)
    looped = jax.lax.fori_loop(0, 3, lambda _, x: body(x, w), x)
    branch = jax.lax.cond(True, body, lambda x, w: x, x, w)
    # XLA:CPU may keep more digits than half inside one fusion, and fuses differently.
    assert relative_error(scanned, looped) < 4 * EPS["mixed_bfloat16"]
    assert relative_error(branch, body(x, w)) < 4 * EPS["mixed_bfloat16"]


@pytest.mark.slow
@pytest.mark.passes
def test_export_and_donation():
    """Law 4: an exported program runs after a reload; donation is kept."""
    program = BY_NAME["mlp"]
    args = program.args()
    half = jax.jit(mixed_precision(program.fun, "mixed_bfloat16"), donate_argnums=1)
    expected = mixed_precision(program.fun, "mixed_bfloat16")(*args)
    exported = jax.export.export(half)(*args)
    loaded = jax.export.deserialize(exported.serialize())
    assert relative_error(loaded.call(*args), expected) < EPS["mixed_bfloat16"]
    x = jnp.array(args[1])
    half(args[0], x)
    assert x.is_deleted() or jax.default_backend() == "cpu"


@pytest.mark.slow
@pytest.mark.passes
def test_sharded_arguments():
    """Law 4: shardings of arguments and results are kept."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("i"))
    (w,), x = BY_NAME["while"].args()
    x = jax.device_put(x, rows)
    half = jax.jit(
        mixed_precision(lambda x, w: jnp.tanh(x @ w) @ w, "mixed_bfloat16"),
        out_shardings=rows,
    )
    assert half(x, w).sharding.is_equivalent_to(rows, 2)
