"""`full_precision`, `scopes` and `rules`: where they hold, and who wins."""

import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dtypes_in, dtypes_out, eqns, products, trace, walk
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from programs import normal

from jmp_rewrite import (
    Policy,
    compute_dtype,
    explain,
    full_precision,
    mixed_precision,
    use_passes,
)

W = jnp.eye(4) * 0.3
X = jnp.arange(8.0).reshape(2, 4) / 8
BF16 = "mixed_bfloat16"


def kinds(fun, *args, policy=BF16, **options):
    """Returns the dtypes of the first operands of all products, sorted."""
    rewritten = trace(mixed_precision(fun, Policy(policy, **options)), *args)
    return sorted(dtypes_in(e)[0] for e in products(rewritten))


def named(name, fun):
    """Calls a function in a name scope."""
    with jax.named_scope(name):
        return fun()


# ---- full_precision


def with_context(x, w):
    with full_precision():
        x = x @ w
    return x @ w


@full_precision
def bare(x, w):
    return x @ w


@full_precision()
def called(x, w):
    return x @ w


@pytest.mark.parametrize(
    "fun",
    [
        with_context,
        lambda x, w: bare(x, w) @ w,
        lambda x, w: called(x, w) @ w,
        lambda x, w: full_precision(jnp.matmul)(x, w) @ w,
        lambda x, w: full_precision(functools.partial(jnp.matmul, b=w))(x) @ w,
    ],
)
def test_full_precision(fun):
    assert kinds(fun, X, W) == ["bfloat16", "float32"]


def test_full_precision_looks_like_the_function():
    assert bare.__name__ == "bare" and bare.__wrapped__
    np.testing.assert_array_equal(bare(X, W), X @ W)


def test_full_precision_nests_and_is_re_entrant():
    again = full_precision()

    def f(x, w):
        with again:
            x = x @ w
            with again, full_precision():
                x = x @ w
            x = bare(x @ w, w)
        x = x @ w
        with again:
            return x @ w

    assert kinds(f, X, W) == ["bfloat16"] + ["float32"] * 5


def test_full_precision_of_a_module_serves_several_threads():
    """Each leaves what it has entered itself."""
    shared, found = full_precision(), {}
    first_in, second_in, first_out, end = [threading.Event() for _ in range(4)]
    begin = threading.Event()
    begin.set()

    def run(policy, begins, enters, leaves, left):
        def fun(x):
            begins.wait(10)
            with shared:
                enters.set()
                leaves.wait(10)
            found[policy] = str(compute_dtype())
            left.set()
            return x @ x

        trace(mixed_precision(fun, policy), jnp.eye(8))

    first = "mixed_bfloat16", begin, first_in, second_in, first_out
    second = "mixed_float16", first_in, second_in, first_out, end
    threads = [threading.Thread(target=run, args=args) for args in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


def test_full_precision_is_left_when_an_error_leaves_it():
    def f(x, w):
        try:
            with full_precision():
                raise KeyError
        except KeyError:
            return x @ w

    assert kinds(f, X, W) == ["bfloat16"]


@pytest.mark.parametrize("wrong", [3, "float32", X])
def test_full_precision_of_no_function(wrong):
    """The message is one line, whatever came."""
    said = rf"expected a function to decorate, got {type(wrong).__name__}\. Use.*\.$"
    with pytest.raises(TypeError, match=said):
        full_precision(wrong)
    with pytest.raises(TypeError, match=said):
        full_precision()(wrong)


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda r, g: (2 * g @ r[1].T, 2 * r[0].T @ g)
)


def settings():
    """Returns functions that run `inner(x, w)` inside of something."""

    def scanned(inner, x, w):
        return lax.scan(lambda c, _: (inner(c, w), None), x, None, length=2)[0]

    def branched(inner, x, w):
        return lax.cond(x[0, 0] > 0, inner, lambda x, w: x, x, w)

    def looped(inner, x, w):
        return lax.while_loop(lambda c: c[0, 0] < 9, lambda c: inner(c, w), x)

    return {
        "plain": lambda inner, x, w: inner(x, w),
        "jit": lambda inner, x, w: jax.jit(inner)(x, w),
        "scan": scanned,
        "cond": branched,
        "while": looped,
        "checkpoint": lambda inner, x, w: jax.checkpoint(inner)(x, w),
        "vmap": lambda inner, x, w: jax.vmap(inner, (0, None))(x[None], w)[0],
        "custom_vjp": lambda inner, x, w: jax.checkpoint(doubled)(inner(x, w), w),
    }


def tanh_product(x, w):
    return jnp.tanh(x @ w)


SETTINGS = [s for s in settings() if s != "custom_vjp"]


def scoped_kinds(setting, enter, grad, **options):
    """Returns the kinds of products inside and outside of `enter`."""

    def inner(x, w):
        with enter():
            return tanh_product(x, w)

    def f(x, w, v):
        return settings()[setting](inner, x, w) @ v

    fun = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)) if grad else f
    v = jnp.ones((4, 3))  # the shape tells the product outside
    rewritten = trace(mixed_precision(fun, Policy(BF16, **options)), X, W, v)
    inside, outside = set(), set()
    for eqn in products(rewritten):
        shapes = {s for a in (*eqn.invars, *eqn.outvars) for s in a.aval.shape}
        (outside if 3 in shapes else inside).update(dtypes_in(eqn))
    return inside, outside


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("grad", [False, True])
def test_full_precision_inside(setting, grad):
    if grad and setting == "while":
        pytest.skip("a while loop has no backward pass")
    inside, outside = scoped_kinds(setting, full_precision, grad)
    assert inside == {"float32"} and outside == {"bfloat16"}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("grad", [False, True])
def test_scopes_inside(setting, grad):
    if grad and setting == "while":
        pytest.skip("a while loop has no backward pass")
    enter = functools.partial(jax.named_scope, "decoder/head")
    scopes = {"decoder/head": "float32"}
    inside, outside = scoped_kinds(setting, enter, grad, scopes=scopes)
    assert inside == {"float32"} and outside == {"bfloat16"}


def in_full_precision(x, w):
    with full_precision():
        return jnp.tanh(x @ w)


def in_scope(x, w):
    with jax.named_scope("here"):
        return jnp.tanh(x @ w)


def at_highest_precision(x, w):
    return jnp.tanh(jnp.dot(x, w, precision="highest"))


@pytest.mark.parametrize("layer", [in_full_precision, in_scope, at_highest_precision])
@pytest.mark.parametrize("reads_half", [False, True])
def test_what_a_loop_stacks_of_a_float32_layer(layer, reads_half):
    """The backward pass reads it as it was computed."""

    def loss(w, x):
        out, _ = lax.scan(lambda x, w: (layer(x, w), None), x, w)
        return jnp.square(out @ w[0] if reads_half else out).mean()

    scopes = {"here": "float32"} if layer is in_scope else {}
    policy = Policy(BF16, scopes=scopes)
    x, w = normal(8, 16), normal(3, 16, 16, scale=0.2)
    rewritten = trace(mixed_precision(jax.grad(loss), policy), w, x)
    loop = eqns(rewritten, "scan")[0]
    stacks = [v.aval.dtype for v in loop.outvars if v.aval.shape == (3, *x.shape)]
    assert stacks and set(stacks) == {jnp.dtype("float32")}


@pytest.mark.parametrize("enter", [full_precision, lambda: jax.named_scope("here")])
@pytest.mark.parametrize("decorate", ["step", "loss"])
def test_around_custom_vjp(enter, decorate):
    def loss(x, w):
        with enter():
            y = doubled(x, w)
        return (y @ w).sum()

    policy = Policy(
        BF16, scopes={"here": "float32"} if enter is not full_precision else {}
    )
    fun = (
        mixed_precision(jax.grad(loss, (0, 1)), policy)
        if decorate == "step"
        else jax.grad(mixed_precision(loss, policy), (0, 1))
    )
    rewritten = trace(fun, X, W)
    full = [e for e in products(rewritten) if "bfloat16" not in dtypes_in(e)]
    assert len(full) >= 3  # forward, dx and dw


@pytest.mark.parametrize("decorate", ["step", "loss"])
def test_inside_custom_vjp(decorate):
    """What a rule marks is marked, whoever runs the rule."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        return x @ w, (x, w)

    def backward(residuals, g):
        x, w = residuals
        with full_precision():
            dx = g @ w.T
        return dx, named("rule", lambda: x.T @ g)

    product.defvjp(forward, backward)
    policy = Policy(BF16, scopes={"rule": "float32"})

    def loss(x, w):
        return product(x, w).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loss alone does not show the rule
        fun = (
            mixed_precision(jax.grad(loss, (0, 1)), policy)
            if decorate == "step"
            else jax.grad(mixed_precision(loss, policy), (0, 1))
        )
        rewritten = trace(fun, X, W)
    found = [dtypes_in(e)[0] for e in products(rewritten)]
    assert found.count("float32") == 2


# ---- scopes


def two(x, w):
    x = named("encoder/layer_1", lambda: x @ w)
    return named("decoder", lambda: named("head", lambda: x @ w))


@pytest.mark.parametrize(
    ("pattern", "full"),
    [
        ("encoder", 1),
        ("decoder/head", 1),
        ("coder", 2),
        ("^head", 0),
        ("head$", 1),
        (r"layer_\d", 1),
        ("layer_1/.*", 0),
        (".", 2),
    ],
)
@pytest.mark.filterwarnings("ignore:expected the pattern")
def test_patterns_are_searched(pattern, full):
    assert kinds(two, X, W, scopes={pattern: "float32"}).count("float32") == full


def test_float32_wins_over_half():
    """Where several patterns match, "float32" wins, in whatever order they stand."""
    for scopes in (
        {"decoder": "half", "head": "float32"},
        {"head": "float32", "decoder": "half"},
    ):
        assert kinds(two, X, W, scopes=scopes) == ["bfloat16", "float32"]


def softmax_like(x, w):
    x = x @ w
    x = named("here", lambda: jnp.exp(x) * x + x)
    return x @ w


def test_half_frees_what_the_user_s_rules_keep():
    rules = {"dot_general": "deny", "mul": "deny"}
    half = {"here": "half"}

    def f(x, w):
        return named("here", lambda: tanh_product(x, w) @ w)

    assert kinds(f, X, W, rules=rules) == ["float32"] * 2
    assert kinds(f, X, W, rules=rules, scopes=half) == ["bfloat16"] * 2


def test_half_never_overrides_deny():
    policy = Policy("mixed_float16", scopes={"here": "half"})
    rewritten = trace(mixed_precision(softmax_like, policy), X, W)
    (exp,) = eqns(rewritten, "exp")
    assert dtypes_in(exp) == dtypes_out(exp) == ["float32"]


@pytest.mark.parametrize(
    ("category", "expected"),
    [("deny", "float32"), ("infer", "bfloat16"), ("clear", "bfloat16")],
)
@pytest.mark.parametrize("kind", ["tanh", "exp", "own"])
def test_a_rule_says_the_same_inside_a_scope_half(kind, category, expected):
    """A scope acts on categories; the user's rules say what they are."""
    twice = own_primitive()
    ops = {"tanh": jnp.tanh, "exp": jnp.exp, "own": twice.bind}

    def f(x, w):
        return named("a", lambda: jnp.maximum(ops[kind](-jnp.abs(x @ w)), 0.1)) @ w

    for scopes in ({}, {"a": "half"}):
        rules = {twice if kind == "own" else kind: category}
        rewritten = trace(
            mixed_precision(f, Policy(BF16, rules=rules, scopes=scopes)),
            *(jnp.ones((64, 8)), jnp.ones((8, 8))),
        )
        (eqn,) = eqns(rewritten, "twice" if kind == "own" else kind)
        assert dtypes_out(eqn) == [expected]


def test_half_never_touches_scalars_and_state():
    def step(w, m, lr, x):
        with jax.named_scope("step"):
            g = jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
            m = 0.9 * m + g
            return w - lr * m, m, lr * 0.5

    policy = Policy("mixed_float16", scopes={"step": "half"})
    rewritten = trace(mixed_precision(step, policy), W, W, jnp.float32(0.1), X)
    for eqn in walk(rewritten):
        if "transpose" in str(eqn.source_info.name_stack):
            continue
        for var in eqn.outvars:
            assert var.aval.shape or var.aval.dtype != jnp.float16
        if eqn.primitive.name in ("add", "sub") and eqn.outvars[0].aval.shape == (4, 4):
            assert dtypes_out(eqn) == ["float32"]


# ---- who wins: full_precision, scopes, rules, explicit precision, literals, table


def highest(x, w):
    return jnp.matmul(x, w, precision="highest")


def masked(x, w):
    return jnp.where(x > 0, x, np.float32(-1e9)) @ w


PRECEDENCE = {
    "full_precision > scopes": (
        lambda x, w: named("a", lambda: bare(x, w)),
        {"scopes": {"a": "half"}},
        "float32",
    ),
    "full_precision > rules": (bare, {"rules": {"dot_general": "allow"}}, "float32"),
    "full_precision > table": (bare, {}, "float32"),
    "scopes > rules, half": (
        lambda x, w: named("a", lambda: x @ w),
        {"scopes": {"a": "half"}, "rules": {"dot_general": "deny"}},
        "bfloat16",
    ),
    "scopes > rules, float32": (
        lambda x, w: named("a", lambda: x @ w),
        {"scopes": {"a": "float32"}, "rules": {"dot_general": "allow"}},
        "float32",
    ),
    "scopes > precision": (
        lambda x, w: named("a", lambda: highest(x, w)),
        {"scopes": {"a": "half"}},
        "bfloat16",
    ),
    "scopes > table": (
        lambda x, w: named("a", lambda: x @ w),
        {"scopes": {"a": "float32"}},
        "float32",
    ),
    "rules > precision": (highest, {"rules": {"dot_general": "allow"}}, "bfloat16"),
    "rules > table": (
        lambda x, w: x @ w,
        {"rules": {"dot_general": "deny"}},
        "float32",
    ),
    "precision > table": (highest, {}, "float32"),
    "algorithm > table": (
        lambda x, w: lax.dot(x, w, precision="F32_F32_F32"),
        {},
        "float32",
    ),
}


@pytest.mark.parametrize("pair", PRECEDENCE)
def test_precedence_on_products(pair):
    fun, options, expected = PRECEDENCE[pair]
    assert kinds(fun, X, W, **options) == [expected]


def small(x, w):
    h = x @ w
    return named("a", lambda: jnp.tanh(h * np.float32(1e-9))) @ w


LITERALS = {
    "full_precision > literals": (
        lambda x, w: full_precision(lambda h: h * np.float32(2))(x @ w) @ w,
        {},
        "float32",
    ),
    "scopes > literals": (small, {"scopes": {"a": "half"}}, "float16"),
    "rules > literals": (small, {"rules": {"mul": "infer"}}, "float16"),
    "literals > table": (small, {}, "float32"),
}


@pytest.mark.parametrize("pair", LITERALS)
def test_precedence_on_literals(pair):
    fun, options, expected = LITERALS[pair]
    policy = Policy("mixed_float16", **options)
    (mul,) = eqns(trace(mixed_precision(fun, policy), X, W), "mul")
    assert dtypes_out(mul) == [expected]


# ---- warnings


@pytest.mark.slow
def test_a_pattern_without_match_warns_once():
    policy = Policy(BF16, scopes={"head": "float32", "nowhere": "half"})
    half = mixed_precision(two, policy)
    message = r"expected the pattern 'nowhere' of scopes .* matched nothing: .*named_sc"
    with pytest.warns(UserWarning, match=message) as caught:
        half(X, W)
        jax.jit(half)(X, W)
        jax.make_jaxpr(half)(X, W)
        mixed_precision(lambda x: two(x, W), policy)(X)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_every_policy_object_warns():
    for _ in range(2):
        with pytest.warns(UserWarning, match="'nowhere'"):
            mixed_precision(two, Policy(BF16, scopes={"nowhere": "half"}))(X, W)


def test_a_scope_that_matched_once_is_not_missed():
    """A train step and an evaluation share a policy, but not all scopes."""
    policy = Policy(BF16, scopes={"head": "float32"})
    mixed_precision(two, policy)(X, W)
    mixed_precision(lambda x: x @ W, policy)(X)


@pytest.mark.slow
def test_rules_of_derivatives_do_not_warn():
    policy = Policy(BF16, scopes={"head": "float32"})
    half = mixed_precision(lambda x, w: two(doubled(x, w), w), policy)
    jax.grad(lambda x: half(x, W).sum())(X)


def test_a_match_by_path_is_no_miss():
    policy = Policy(BF16, scopes={"head/kernel": "float32"})
    params = {"head": {"kernel": W}, "body": W}
    half = mixed_precision(lambda p, x: x @ p["body"] @ p["head"]["kernel"], policy)
    kinds = [dtypes_in(e)[0] for e in products(trace(half, params, X))]
    assert kinds == ["bfloat16", "float32"]


def test_a_layer_beside_complex_ones_is_found_by_its_path():
    def loss(params, x):
        y = jnp.tanh(x @ params["real"]) @ params["other"]
        return jnp.abs(y.astype(complex) @ (params["imaginary"] * 1j)).sum()

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    names = "real", "other", "imaginary"
    params = {name: jnp.eye(8) for name in names}
    policy = Policy("mixed_bfloat16", scopes={"real": "float32"})
    with jax.numpy_dtype_promotion("standard"):
        found = trace(mixed_precision(step, policy), params, params["other"])
    reads = [e.invars[0].aval.dtype.name for e in eqns(found, "dot_general")]
    assert reads.count("bfloat16") == 3 and reads.count("float32") == 2


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["loss", "step"])
def test_layers_that_a_scan_runs_over_are_one(transform):
    """One of them is float32 only if all are: their products are the same."""
    params = {f"layer_{i}": {"kernel": jnp.eye(8)} for i in range(3)}
    params["last"] = {"kernel": jnp.eye(8)}
    x = jnp.ones((4, 8))

    def loss(params, x):
        stacked = jnp.stack([params[f"layer_{i}"]["kernel"] for i in range(3)])
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)
        return ((x @ params["last"]["kernel"]) ** 2).mean()

    def found(name):
        return kinds(transform(loss), params, x, scopes={name: "float32"})

    count = len(found("last"))
    one = count // 2  # a product of each, forward and backward
    assert found("layer_1") == ["bfloat16"] * one + ["float32"] * (count - one)
    assert found("last") == found("layer_1")
    assert found("") == ["float32"] * count


# ---- rules


def test_infer_makes_exp_half():
    def f(x, w):
        return jnp.exp(x @ w) @ w

    rules = {"exp": "infer"}
    for policy, options, expected in (
        ("mixed_float16", {}, "float32"),
        ("mixed_float16", {"rules": rules}, "float16"),
    ):
        rewritten = trace(mixed_precision(f, Policy(policy, **options)), X, W)
        (exp,) = eqns(rewritten, "exp")
        assert dtypes_in(exp) == dtypes_out(exp) == [expected]


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("category", ["allow", "infer", "deny", "clear"])
@pytest.mark.parametrize(
    "name",
    ["tanh", "dot_general", "reduce_sum", "exp", "scan", "jit", "cond", "reshape"]
    + ["convert_element_type", "broadcast_in_dim", "select_n", "cumsum"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_rule_breaks_a_program(name, category, dtype):
    def f(x, w):
        def body(c, _):
            return jax.nn.relu(jax.nn.softmax(c @ w)), c.sum()

        x, sums = lax.scan(body, x, None, length=2)
        x = lax.cond(sums[0] > 0, jnp.tanh, lambda x: x, x)
        return (jnp.cumsum(x @ w, 1).reshape(-1) @ jnp.ones((8, 2), "f4")).sum()

    policy = Policy(dtype, rules={name: category})
    outside = jax.grad(mixed_precision(f, policy), (0, 1))
    inside = mixed_precision(jax.grad(f, (0, 1)), policy)
    for fun in (outside, inside):
        assert [g.dtype for g in jax.eval_shape(fun, X, W)] == [jnp.float32] * 2


@pytest.mark.parametrize("name", ["tanh", "exp", "reduce_sum"])
def test_values_under_allow(name):
    def f(x, w):
        return jnp.sum(jnp.exp(jnp.tanh(x @ w)))

    half = mixed_precision(f, Policy(BF16, rules={name: "allow"}))
    np.testing.assert_allclose(jax.jit(half)(X, W), f(X, W), rtol=0.02)


def test_a_scope_rounds_what_a_rounding_to_integers_reads():
    """Quantization-aware training is float32 where nobody asks for half."""

    def f(x, w):
        for _ in range(2):
            h = named("quantized", lambda x=x: x @ w)
            x = h + lax.stop_gradient(jnp.round(8 * h) / 8 - h)
        return x @ w

    def results(scopes):
        jaxpr = trace(mixed_precision(f, Policy(BF16, scopes=scopes)), X, W)
        return [str(e.outvars[0].aval.dtype) for e in products(jaxpr)]

    assert results({}) == ["float32"] * 3
    assert results({"quantized": "half"}) == ["bfloat16"] * 2 + ["float32"]


def test_deny_applies_to_a_body_as_a_whole():
    def f(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x @ w, None, length=2)[0]

    assert kinds(f, X, W) == ["bfloat16"] * 2
    assert kinds(f, X, W, rules={"scan": "deny"}) == ["bfloat16", "float32"]


def test_products_by_rule():
    def f(x, w):
        return tanh_product(x, w) @ w

    assert kinds(f, X, W, rules={"dot_general": "deny"}) == ["float32"] * 2
    assert set(kinds(f, X, W, rules={"dot_general": "infer"})) <= {"float32"}
    assert set(kinds(f, X, W, rules={"dot_general": "clear"})) <= {"float32"}


def test_allow_runs_on_half_operands():
    rewritten = trace(
        mixed_precision(jnp.tanh, Policy(BF16, rules={"tanh": "allow"})), X
    )
    (tanh,) = eqns(rewritten, "tanh")
    assert dtypes_in(tanh) == ["bfloat16"]
    assert rewritten.out_avals[0].dtype == jnp.float32


def in_a_scan(fun):
    return lambda x: lax.scan(lambda c, row: (c, fun(row)), None, x)[1]


@pytest.mark.parametrize("inside", [lambda fun: fun, jax.jit, in_a_scan])
def test_no_pass_rounds_what_a_scope_asks_for(inside):
    """Nor in a call that holds nothing half."""

    def f(x, w):
        scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
        soft = named("probs", lambda: inside(softmax)(scores))
        return jnp.einsum("bqk,bkd->bqd", soft, x) @ w

    def softmax(scores):
        exp = jnp.exp(scores - scores.max(-1, keepdims=True))
        return exp / exp.sum(-1, keepdims=True)

    x, w = jnp.asarray(normal(2, 32, 16)), jnp.asarray(normal(16, 16)) / 4
    policy = Policy(BF16, scopes={"probs": "float32"})
    with use_passes("all", device="TPU v5e"):
        passes = explain(f, policy)(x, w).passes
    assert passes and not {"softmax_rounded", "softmax_derivative"} & passes.keys()


def own_primitive():
    primitive = Primitive("twice")
    primitive.def_impl(lambda x: 2 * x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: 2 * x, False))
    return primitive


@pytest.mark.slow
def test_own_primitives():
    twice = own_primitive()

    def f(x, w):
        return twice.bind(x @ w) @ w

    for rules, expected in (
        ({}, "float32"),
        ({twice: "infer"}, "bfloat16"),
        ({twice: "clear"}, "bfloat16"),
        ({twice: "deny"}, "float32"),
        ({twice: "allow"}, "bfloat16"),
    ):
        half = mixed_precision(f, Policy(BF16, rules=rules))
        (eqn,) = eqns(trace(half, X, W), "twice")
        assert dtypes_in(eqn) == [expected]
        np.testing.assert_allclose(jax.jit(half)(X, W), f(X, W), atol=0.05)
