"""`mixed_precision` as a function of functions: forms, arguments, caches, errors."""

import functools
import gc
import inspect
import re
import sys
import traceback
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    bit_equal,
    dtypes_in,
    eqns,
    open_jaxpr,
    products,
    relative_error,
    same_types,
    trace,
)
from jax import lax
from jax.extend import source_info_util

from jmp_rewrite import (
    Policy,
    diagnose,
    explain,
    for_inference,
    full_precision,
    half_precision,
    mixed_precision,
    mixed_precision_jaxpr,
    set_policy,
    use_policy,
)

W = jnp.eye(4) * 0.3
X = jnp.arange(8.0).reshape(2, 4) / 8


@pytest.fixture(autouse=True)
def no_default():
    yield
    set_policy(None)


def f(x, w):
    """Multiplies."""
    return jnp.tanh(x @ w) @ w


def halves(fun, *args):
    """Returns the dtypes of the first operands of all products."""
    return [dtypes_in(e)[0] for e in products(trace(fun, *args))]


# ---- forms


@pytest.mark.parametrize(
    "decorate",
    [
        mixed_precision("mixed_bfloat16"),
        mixed_precision(jnp.bfloat16),
        mixed_precision(jnp.dtype("bfloat16")),
        mixed_precision(Policy("mixed_bfloat16")),
        mixed_precision(policy="mixed_bfloat16"),
        mixed_precision(policy=Policy("mixed_bfloat16"), static_argnums=()),
        lambda fun: mixed_precision(fun, "mixed_bfloat16"),
        lambda fun: mixed_precision(fun, policy=jnp.bfloat16),
        lambda fun: mixed_precision("c=bf16")(fun),
        lambda fun: mixed_precision(None, "mixed_bfloat16")(fun),
    ],
)
def test_forms(decorate):
    assert halves(decorate(f), X, W) == ["bfloat16"] * 2


@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, np.dtype("float16")])
def test_a_dtype_is_a_policy_even_where_it_is_callable(dtype):
    assert halves(mixed_precision(dtype)(f), X, W) == ["float16"] * 2


def test_bare_decorator_takes_the_default_policy():
    @mixed_precision
    def g(x, w):
        return x @ w

    with use_policy("mixed_float16"):
        assert halves(g, X, W) == ["float16"]
    with use_policy("float32"):
        assert halves(g, X, W) == ["float32"]


def test_auto(monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "1")
    assert halves(mixed_precision("auto")(f), X, W) == ["bfloat16"] * 2
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "0")
    policy = Policy("auto", scopes={".": "half"})
    assert halves(mixed_precision(policy)(f), X, W) == ["float32"] * 2


def test_looks_like_the_function():
    g = mixed_precision(f, "mixed_bfloat16")
    assert (g.__name__, g.__doc__, g.__module__) == ("f", "Multiplies.", f.__module__)
    assert inspect.signature(g) == inspect.signature(f)
    assert g.__wrapped__ is f


def test_carries_the_function_s_attributes():
    def g(x):
        return x

    g.note = "kept"
    assert mixed_precision(g).note == "kept"


def test_partial():
    part = functools.partial(f, w=W)
    g = mixed_precision(part, "mixed_bfloat16")
    assert g.__name__ == "f" and g.__wrapped__ is part
    assert list(inspect.signature(g).parameters) == ["x", "w"]
    assert halves(g, X) == ["bfloat16"] * 2
    tree = jax.tree_util.Partial(f, w=W)
    assert halves(mixed_precision(tree, "mixed_bfloat16"), X) == ["bfloat16"] * 2


class OfArrays:
    """A tree node that takes arrays alone, and what JAX itself puts in their place."""

    def __init__(self, array):
        if not (isinstance(array, jax.Array) or type(array) is object or array is None):
            raise TypeError(f"expected an array, got {type(array)}")
        self.array = array


jax.tree_util.register_pytree_node(
    OfArrays, lambda x: ((x.array,), None), lambda _, leaves: OfArrays(*leaves)
)


def test_nodes_of_a_result_are_made_of_arrays_alone():
    def fun(x, w):
        return {"y": OfArrays(x @ w), "z": (x, OfArrays(w))}

    half = mixed_precision(fun, "mixed_bfloat16")
    for wrap in (jax.jit, jax.checkpoint, lambda f: f):
        found = wrap(half)(X, W)
        assert relative_error(found["y"].array, X @ W) < 2**-7
        np.testing.assert_array_equal(found["z"][1].array, W)
    assert explain(half)(X, W).half_flops == 1
    assert set(diagnose(half)(X, W).results) == {"y/0", "z/0", "z/1/0"}


class Layer:
    """A callable object."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return x @ self.w

    @mixed_precision("mixed_bfloat16")
    def method(self, x, *, twice=False):
        return self(self(x)) if twice else self(x)

    @classmethod
    @mixed_precision("mixed_bfloat16")
    def made(cls, x):
        return cls(W)(x)

    @staticmethod
    @mixed_precision("mixed_bfloat16")
    def static(x):
        return x @ W


def test_objects_and_methods():
    layer = Layer(W)
    whole = mixed_precision(layer, "mixed_bfloat16")
    assert list(inspect.signature(whole).parameters) == ["x"]
    assert not hasattr(whole, "w")
    for fun in (layer.method, Layer.made, layer.static, whole):
        assert halves(fun, X) == ["bfloat16"]
    bound = mixed_precision(layer.__call__, "mixed_bfloat16")
    assert bound.__name__ == "__call__"
    assert halves(bound, X) == ["bfloat16"]
    assert halves(lambda x: layer.method(x, twice=True), X) == ["bfloat16"] * 2


def test_classes():
    class Pair(NamedTuple):
        a: jax.Array
        b: jax.Array

    made = mixed_precision(Pair, "mixed_bfloat16")(X, b=W)
    assert isinstance(made, Pair)
    bit_equal(tuple(made), (X, W))


@pytest.mark.slow
def test_numbers_among_the_results_are_arrays():
    """So they are behind `jax.jit`, with its dtypes and weak types."""

    def fun(x):
        return x @ x, jnp.asarray(2.0), jnp.asarray(3), np.arange(3), np.ones(2)

    x = jnp.ones((4, 4))
    made = mixed_precision(fun, "mixed_bfloat16")(x)
    for a, b in zip(made, jax.jit(fun)(x), strict=True):
        assert isinstance(a, jax.Array) and jax.typeof(a) == jax.typeof(b)
    _, aux = jax.grad(
        mixed_precision(lambda x: ((x @ x).sum(), jnp.asarray(2.0)), "mixed_bfloat16"),
        has_aux=True,
    )(x)
    assert isinstance(aux, jax.Array)
    grad = jax.grad(lambda i, x: (x[i] @ x).sum(), (0, 1), allow_int=True)
    first, _ = mixed_precision(grad, "mixed_bfloat16")(jnp.arange(4), x)
    assert type(first) is np.ndarray and first.dtype == jax.dtypes.float0


def generator(x):
    yield x


async def coroutine(x):
    return x


class Called:
    def __call__(self, x):
        return x


class Computes:
    def __init__(self, w):
        self.w = w

    def apply(self, x):
        return x @ self.w


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (generator, "generator, which runs after the call"),
        (coroutine, "coroutine, which runs after the call"),
        (Called, "class, whose objects are called: decorate its method __call__"),
        (Computes, "class: decorate the methods that compute"),
        (staticmethod(f), "static method: put @staticmethod above"),
    ],
)
def test_what_a_call_does_not_run(wrong, what):
    """It is refused wherever a function is taken, by name."""
    for make in (
        lambda fun: mixed_precision(fun, "mixed_bfloat16"),
        full_precision,
        half_precision,
        explain,
        diagnose,
        for_inference,
    ):
        with pytest.raises(TypeError, match=f"expected a function, got .*{what}"):
            make(wrong)


@pytest.mark.parametrize("make", [mixed_precision, mixed_precision("mixed_bfloat16")])
def test_a_class_method_is_refused(make):
    with pytest.raises(TypeError, match="class method: put @classmethod above"):
        make(classmethod(f))


def test_jitted_functions():
    assert halves(mixed_precision(jax.jit(f), "mixed_bfloat16"), X, W) == [
        "bfloat16",
        "bfloat16",
    ]


@pytest.mark.parametrize("wrong", [3, [f], {"a": 1}, np.ones(2)])
def test_no_function(wrong):
    with pytest.raises(
        (TypeError, ValueError), match="expected a (function or a )?pol"
    ):
        mixed_precision(wrong)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(X, r"an array, float32\[2, 4\]"), (np.ones(2), "an array"), ((X, W), "a tuple")],
)
def test_a_result_in_place_of_a_function(wrong, what):
    for make in (mixed_precision, explain, diagnose):
        with pytest.raises(TypeError, match="was the function called"):
            make(wrong)
    with pytest.raises(TypeError, match=f"got {what}.*was the function called"):
        mixed_precision(wrong, "mixed_bfloat16")


@pytest.mark.slow
def test_auto_that_is_float32_is_logged_once(run_python, monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "0")
    ran = run_python(
        "-c",
        "import numpy as np; from jmp_rewrite import mixed_precision; "
        "x = np.ones((2, 2), 'f'); mixed_precision(abs, 'float32')(x); print('then'); "
        "mixed_precision(abs)(x); mixed_precision(abs)(x)",
    )
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert "'auto' means float32 on this device (cpu)" in line
    assert "nothing runs in half precision" in line


@pytest.mark.parametrize(
    "decorator", [lambda: mixed_precision("bf16"), mixed_precision]
)
@pytest.mark.parametrize("wrong", [None, 3, "float16"])
def test_what_is_decorated_is_a_function(decorator, wrong):
    with pytest.raises(TypeError, match="expected a function to decorate, got"):
        decorator()(wrong)


def test_two_policies():
    with pytest.raises(TypeError, match="expected a function .*'mixed_bfloat16', got"):
        mixed_precision("mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize("wrong", ["mixed_half", "float64", np.int32, float])
def test_unknown_policy(wrong):
    for make in (lambda: mixed_precision(f, wrong), lambda: mixed_precision(wrong)):
        with pytest.raises(ValueError, match="expected a policy: 'mixed_float16'"):
            make()


# ---- arguments and results


def test_non_arrays_pass_through():
    seen = []

    def g(params, fun, name, *, flag, number, nothing=None):
        seen.append((fun, name, flag, number, nothing))
        out = fun(params["x"] @ params["w"]) if flag else None
        return {"out": out, "fun": fun, "name": name, "n": number, "none": nothing}

    args = {"x": X, "w": W}, jnp.tanh, "layer"
    for policy in ("mixed_bfloat16", "float32"):
        half = mixed_precision(g, policy)
        result = half(*args, flag=True, number=2.5)
        same_types(g(*args, flag=True, number=2.5), result)
        assert result["fun"] is jnp.tanh
        assert half(*args, flag=False, number=1)["out"] is None
    assert set(seen) >= {(jnp.tanh, "layer", True, 2.5, None)}


def test_none_and_empty_trees():
    g = mixed_precision(lambda a, b, c: (a, (), b, {}, c), "mixed_bfloat16")
    assert g(None, [], {}) == (None, (), [], {}, {})


def test_strings_and_objects_of_numpy_pass_through():
    names = np.array(["a", "b"])
    result = mixed_precision(lambda n, x: (n, x @ W), "mixed_bfloat16")(names, X)
    assert result[0] is names


def test_types_and_shapes_as_arguments():
    spec = jax.ShapeDtypeStruct((4,), jnp.float32)
    g = mixed_precision(lambda s, x: x @ jnp.ones(s.shape + (4,)), "mixed_bfloat16")
    assert g(spec, jnp.ones((2, 4))).shape == (2, 4)
    shape = jax.eval_shape(mixed_precision(f, "mixed_float16"), X, W)
    assert (shape.shape, shape.dtype) == ((2, 4), jnp.float32)


def test_numpy():
    x, w = np.asarray(X), np.asarray(W)
    same_types(f(x, w), mixed_precision(f, "mixed_bfloat16")(x, w))
    g = mixed_precision(lambda x, s, n: (x @ W) * s + n, "mixed_bfloat16")
    with pytest.warns(UserWarning, match="again at each call"):
        assert g(X, np.float32(2), 3).dtype == np.float32
        assert g(X, np.float32(2), np.float32(1)).dtype == np.float32


def test_scalars_of_python_stay_weak():
    g = mixed_precision(lambda x, s: (x @ W * s, s, jnp.asarray(s)), "mixed_bfloat16")
    plain = (X @ W * 2.0, 2.0, jnp.asarray(2.0))
    same_types(plain, g(X, 2.0))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_weak_types_are_kept(policy):
    def g(x, weak):
        return x @ W, weak * 2, jnp.tanh(weak), lax.stop_gradient(weak), weak @ weak

    weak = lax.full((3, 3), 1.0)
    weak = weak * 1.0 if jax.typeof(weak).weak_type else jnp.broadcast_to(1.0, (3, 3))
    assert jax.typeof(weak).weak_type
    same_types(g(X, weak), mixed_precision(g, policy)(X, weak))


def test_other_dtypes():
    values = (
        jnp.arange(3),
        jnp.ones(3, bool),
        jnp.ones(3, jnp.complex64),
        jnp.ones(3, jnp.bfloat16),
        jax.random.key(0),
        jnp.ones(3, jnp.int4),
        np.zeros(3, jax.dtypes.float0),
    )
    with jax.enable_x64(True):
        doubles = (jnp.ones(3, "float64"),)
        result = mixed_precision(lambda x: x, "mixed_float16")(doubles)
        assert result[0].dtype == np.float64
    result = mixed_precision(lambda x: (x, X @ W), "mixed_float16")(values[:-1])[0]
    same_types(values[:-1], result)
    assert result[4].dtype == values[4].dtype


def test_references():
    def g(ref, x):
        ref[...] = x @ W
        return ref[...] @ W

    ref = jax.new_ref(jnp.zeros_like(X))
    out = mixed_precision(g, "mixed_bfloat16")(ref, X)
    assert out.dtype == ref[...].dtype == jnp.float32
    np.testing.assert_allclose(ref[...], X @ W, atol=0.01)


def test_positional_and_keyword_arguments():
    def g(x, /, w, *rest, scale, **more):
        return sum(rest, x @ w) * scale + more["bias"]

    half = jax.jit(mixed_precision(g, "mixed_bfloat16"))
    kwargs = {"scale": jnp.float32(2), "bias": X}
    bit_equal(half(X, W, X, **kwargs), half(X, W, X, bias=X, scale=jnp.float32(2)))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        half(X, scale=1.0)
    with pytest.raises(TypeError, match="missing 1 required keyword-only"):
        half(X, W)


# ---- static arguments


def power(x, n, *, w=W):
    for _ in range(n):
        x = x @ w
    return x


def repeated(x, n=2, w=W):
    return power(x, int(n), w=w)


@pytest.mark.parametrize(
    "static",
    [
        {"static_argnums": 1},
        {"static_argnums": (1,)},
        {"static_argnums": [np.int64(1)]},
        {"static_argnums": -2},
        {"static_argnums": (1, -2, 1)},
        {"static_argnames": "n"},
        {"static_argnames": ("n",)},
        {"static_argnums": 1, "static_argnames": ["n"]},
    ],
)
def test_static_arguments(static):
    half = mixed_precision(repeated, "mixed_bfloat16", **static)
    count = jnp.asarray(3)  # an array, whose number only a static argument can tell
    assert len(halves(lambda x: half(x, count), X)) == 3
    assert len(halves(lambda x: half(x, n=count), X)) == 3
    assert len(halves(lambda x: half(x), X)) == 2
    with pytest.raises(jax.errors.ConcretizationTypeError):
        mixed_precision(repeated, "mixed_bfloat16")(X, count)


def test_static_arguments_of_any_number():
    half = mixed_precision(
        lambda *a: power(a[0], int(a[-1])), "mixed_float16", static_argnums=-1
    )
    count = jnp.asarray(3)
    assert len(halves(lambda x: half(x, count), X)) == 3
    beyond = mixed_precision(lambda *a: a[0], "mixed_float16", static_argnums=5)
    with pytest.raises(ValueError, match="static_argnums .* which has 1, got 5"):
        beyond(X)


def test_static_arguments_may_be_unhashable():
    half = mixed_precision(lambda x, c: x @ c["w"], "mixed_float16", static_argnums=1)
    assert len(halves(lambda x: half(x, {"w": W}), X)) == 1


@pytest.mark.parametrize(
    ("static", "error", "message"),
    [
        ({"static_argnums": 3}, ValueError, r"3 positional arguments \(x, n, w\) of "),
        ({"static_argnums": -4}, ValueError, "static_argnums .* of repeated, got -4"),
        ({"static_argnames": "m"}, ValueError, r"names of arguments \(x, n, w\) .*'m'"),
        ({"static_argnames": "nn"}, ValueError, "got 'nn'; did you mean 'n'"),
        ({"static_argnames": 1}, TypeError, "static_argnames expected str .*got 1"),
        ({"static_argnums": "n"}, TypeError, "static_argnums expected int .*got 'n'"),
        ({"static_argnums": True}, TypeError, "expected int .*got True of type bool"),
        ({"static_argnums": 1.0}, TypeError, "expected int .*got 1.0 of type float"),
        ({"static_argnums": (0, None)}, TypeError, "expected int .*got None"),
    ],
)
def test_wrong_static_arguments(static, error, message):
    with pytest.raises(error, match=message):
        mixed_precision(repeated, "mixed_float16", **static)


# ---- closures and caches


@pytest.mark.slow
def test_closures_are_read_at_each_call():
    box = {"w": W}
    half = mixed_precision(lambda x: x @ box["w"], "mixed_bfloat16")
    one = half(X)
    box["w"] = 2 * W
    with pytest.warns(UserWarning, match="again at each call"):
        two = half(X)
    np.testing.assert_allclose(two, 2 * one)

    def outer(x, w):
        box["w"] = w
        try:
            return half(x)
        finally:
            del box["w"]

    with jax.checking_leaks():
        a = jax.jit(outer)(X, W)
        b = jax.jit(outer)(X, 2 * W)
        grads = jax.grad(lambda w: outer(X, w).sum())(W)
        batch = jax.vmap(outer, (None, 0))(X, jnp.stack([W, W]))
    np.testing.assert_allclose(b, 2 * a)
    assert grads.dtype == jnp.float32
    np.testing.assert_allclose(batch[0], a, rtol=1e-2)


def test_a_fresh_trace_sees_changed_globals():
    box = {"w": W}

    def g(x):
        return x @ box["w"]

    first = jax.make_jaxpr(mixed_precision(g, "mixed_bfloat16"))(X)
    box["w"] = jnp.ones((4, 5))
    second = jax.make_jaxpr(mixed_precision(g, "mixed_bfloat16"))(X)
    assert [j.out_avals[0].shape for j in (first, second)] == [(2, 4), (2, 5)]


def counted():
    calls = []

    def g(x, w):
        calls.append(None)
        return x @ w

    return g, calls


@pytest.mark.parametrize("inside", [lambda g: g, jax.jit])
def test_eager_calls_trace_each_time_and_the_second_is_heard(inside):
    g, calls = counted()
    half = mixed_precision(inside(g), "mixed_bfloat16")
    half(X, W)
    with pytest.warns(UserWarning, match="put @jax.jit above @mixed_prec") as heard:
        half(X, W)
        half(X, W)
    assert [w.filename for w in heard] == [__file__]
    assert inside is jax.jit or len(calls) == 3


def test_an_eager_method_is_told_to_jit_what_calls_it():
    class Model:
        @mixed_precision("mixed_bfloat16")
        def apply(self, x):
            return x @ W

    model = Model()
    model.apply(X)
    with pytest.warns(UserWarning, match=r"Model.apply .* jit what calls it"):
        model.apply(X)


def test_an_equal_policy_inside_decides_nothing():
    """What is around it sees both passes, and decides the same."""

    def step(block):
        def loss(w):
            return jnp.mean(block(block(X, w), w) ** 2)

        return lambda w: w - 0.1 * jax.grad(loss)(w)

    def block(x, w):
        return jnp.tanh(x @ w)

    w = jnp.eye(X.shape[1])
    inside = mixed_precision(block, "mixed_bfloat16")
    expected = jax.make_jaxpr(mixed_precision(step(block), "mixed_bfloat16"))(w)
    found = jax.make_jaxpr(mixed_precision(step(inside), "mixed_bfloat16"))(w)
    assert str(found) == str(expected)
    other = jax.make_jaxpr(mixed_precision(step(inside), "mixed_float16"))(w)
    assert "bf16" in str(other) and "f16[" not in str(other).replace("bf16[", "")


@pytest.mark.parametrize(
    "call",
    [
        lambda half: jax.jit(lambda x: half(x, W) + half(X, W))(X),
        lambda half: jax.vmap(half, (0, None))(X, W),
        lambda half: jax.grad(lambda x: half(x, W).sum())(X),
        lambda half: jax.eval_shape(half, X, W),
        lambda half: jax.make_jaxpr(half)(X, W),
    ],
    ids=["jit", "vmap", "grad", "eval_shape", "make_jaxpr"],
)
def test_traced_calls_are_not_heard(call):
    half = mixed_precision(f, "mixed_bfloat16")
    call(half)
    call(half)


def test_eager_calls_that_were_asked_for_are_not_heard():
    plain = mixed_precision(f, "float32")  # traces nothing
    half = mixed_precision(f, "mixed_bfloat16")
    with jax.disable_jit():
        for _ in range(2):
            plain(X, W)
            half(X, W)


def test_a_constant_that_is_returned_is_no_eager_call():
    half = jax.jit(mixed_precision(lambda x, w: (x @ w, W), "mixed_bfloat16"))
    half(X, W)
    half(X[:1], W)  # warnings are errors here


def test_jitted_calls_trace_once():
    g, calls = counted()
    half = jax.jit(mixed_precision(g, "mixed_bfloat16"))
    half(X, W)
    half(X, W)
    assert len(calls) == 1
    half(X[:1], W)
    assert len(calls) == 2


def test_a_new_default_policy_traces_again():
    g, calls = counted()
    half = jax.jit(mixed_precision(g))
    with use_policy("mixed_bfloat16"):
        one = half(X, W)
        half(X, W)
    assert len(calls) == 1
    set_policy("float32")
    exact = half(X, W)
    assert len(calls) == 2
    assert not np.array_equal(one, exact)
    np.testing.assert_array_equal(exact, X @ W)
    with use_policy("mixed_bfloat16"):
        bit_equal(half(X, W), one)
    assert len(calls) == 2


@pytest.mark.slow
def test_no_leaks_in_transformations():
    half = mixed_precision(f, "mixed_bfloat16")
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda w: half(X, w).sum()))(W)
        jax.vmap(half, (0, None))(jnp.stack([X, X]), W)
        lax.scan(lambda c, _: (half(c, W), None), X, None, length=2)


# ---- errors


def branches(x):
    if x.sum() > 0:  # the line in question
        return x
    return -x


def raised(fun, *args):
    with pytest.raises(Exception) as info:
        fun(*args)
    return info.value


def test_a_function_that_cannot_be_traced():
    ours = raised(mixed_precision(branches, "mixed_bfloat16"), X)
    theirs = raised(jax.jit(branches), X)
    assert type(ours) is type(theirs) is jax.errors.TracerBoolConversionError
    assert "the line in question" in "".join(traceback.format_exception(ours))
    # The message names the user's function and argument, as that of jax.jit does.
    assert "the function branches at" in str(ours)
    assert "depends on the value of the argument x" in str(ours)
    assert any("name the arguments that decide in static" in n for n in ours.__notes__)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: float(x[0, 0]),
        lambda x: np.asarray(x),
        lambda x: x[x > 0],
        lambda x: range(x.astype(int)[0, 0]),
        lambda x: {x: 1},
        lambda x: jnp.ones(x.astype(int)[0, 0]),
    ],
)
def test_errors_are_those_of_jit(fun):
    ours = raised(mixed_precision(fun, "mixed_bfloat16"), X)
    theirs = raised(jax.jit(fun), X)
    assert type(ours) is type(theirs)


def test_errors_of_the_user_propagate():
    class MyError(Exception):
        pass

    error = MyError("mine")

    def g(x):
        raise error

    for policy in ("mixed_bfloat16", "float32"):
        assert raised(mixed_precision(g, policy), X) is error
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        mixed_precision(lambda x: x @ x, "mixed_bfloat16")(X)


# ---- jaxprs


def test_jaxpr_of_the_wrong_type():
    with pytest.raises(TypeError, match="expected a closed jaxpr, .*, got function"):
        mixed_precision_jaxpr(f, "mixed_bfloat16")
    with pytest.raises(ValueError, match="expected a policy"):
        mixed_precision_jaxpr(jax.make_jaxpr(f)(X, W), "half")


def test_jaxpr_keeps_constants_types_and_names():
    weak = jnp.asarray(2.0)

    def g(x, scale):
        return {"y": (x @ W) * scale, "scale": scale}

    closed = jax.make_jaxpr(g)(X, weak)
    half = mixed_precision_jaxpr(closed, "mixed_bfloat16")
    assert half.in_avals == closed.in_avals
    assert half.out_avals == closed.out_avals
    assert [dtypes_in(e)[0] for e in products(half)] == ["bfloat16"]
    values = jax.core.eval_jaxpr(open_jaxpr(half), half.consts, X, weak)
    np.testing.assert_allclose(values[1], (X @ W) * 2, atol=0.02)
    names = open_jaxpr(closed).debug_info
    assert open_jaxpr(half).debug_info.arg_names == names.arg_names == ("x", "scale")
    assert open_jaxpr(half).debug_info.func_name == names.func_name


def test_jaxpr_without_change_is_itself():
    closed = jax.make_jaxpr(f)(X, W)
    assert mixed_precision_jaxpr(closed, "float32") is closed
    nothing = jax.make_jaxpr(jnp.sin)(X)
    assert mixed_precision_jaxpr(nothing, "mixed_float16") is nothing
    with use_policy("mixed_float16"):
        assert len(eqns(mixed_precision_jaxpr(closed), "convert_element_type")) > 0


def test_jaxpr_takes_the_default_policy():
    closed = jax.make_jaxpr(f)(X, W)
    with use_policy("mixed_float16"):
        half = mixed_precision_jaxpr(closed)
    assert [dtypes_in(e)[0] for e in products(half)] == ["float16"] * 2


# ---- nested policies


def test_the_inner_policy_decides():
    exact = mixed_precision(f, "float32")
    other = mixed_precision(f, "mixed_float16")

    def both(x, w):
        return exact(x, w) @ w, other(x, w) @ w

    kinds = halves(mixed_precision(both, "mixed_bfloat16"), X, W)
    assert kinds == ["float32"] * 2 + ["bfloat16"] + ["float16"] * 2 + ["bfloat16"]


def wrappers():
    def scanned(inner, x, w):
        return lax.scan(lambda c, _: (inner(c, w), None), x, None, length=2)[0]

    def branched(inner, x, w):
        return lax.cond(x[0, 0] > 0, inner, lambda x, w: x, x, w)

    def looped(inner, x, w):
        return lax.fori_loop(0, 2, lambda _, c: inner(c, w), x)

    return {
        "jit": lambda inner, x, w: jax.jit(inner)(x, w),
        "scan": scanned,
        "cond": branched,
        "while": looped,
        "checkpoint": lambda inner, x, w: jax.checkpoint(inner)(x, w),
        "grad": lambda inner, x, w: jax.grad(lambda w: inner(x, w).sum())(w),
        "grad_jit": lambda inner, x, w: jax.grad(
            jax.jit(lambda w: jax.checkpoint(inner)(x, w).sum())
        )(w),
        "vmap": lambda inner, x, w: jax.vmap(inner, (0, None))(x[None], w),
    }


@pytest.mark.parametrize("name", wrappers())
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_inner_policy_decides_inside(name, policy):
    """Through transformations too: the mark survives, backward passes included."""
    inner = mixed_precision(f, policy)
    outer = mixed_precision(
        functools.partial(wrappers()[name], inner), "mixed_bfloat16"
    )
    kinds = {k for e in products(trace(outer, X, W)) for k in dtypes_in(e)}
    assert kinds <= ({"float32"} if policy == "float32" else {"float16", "float32"})
    assert ("float16" in kinds) == (policy == "mixed_float16")


def test_full_precision_of_a_decorated_function():
    """The inner decision comes first: it has been made already."""
    inner = mixed_precision(f, "mixed_bfloat16")
    assert set(halves(full_precision(inner), X, W)) == {"bfloat16"}


def test_names_the_call_in_messages():
    """The name of the library's functions is in no message that users get."""
    message = str(raised(mixed_precision(branches, "mixed_bfloat16"), X))
    assert not re.search(r"\b(fresh|wrapped)\b(?!/)", message)  # but as a folder


@pytest.mark.parametrize("is_on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_on):
    """It is held while a program is rewritten, and not while the user's code runs."""
    seen = []

    def fun(x):
        seen.append(gc.isenabled())
        return x @ x

    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        jax.make_jaxpr(mixed_precision(fun, "mixed_bfloat16"))(jnp.ones((8, 8)))
        assert gc.isenabled() == is_on
        with pytest.raises(ZeroDivisionError):
            mixed_precision(lambda x: x / (1 // 0), "mixed_bfloat16")(jnp.ones(8))
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert seen and set(seen) == {is_on}


def test_equations_keep_their_lines_and_scopes_where_they_are_copied():
    def scoped(x, w):
        with jax.named_scope("inside"):
            return jnp.tanh(x @ w) + jnp.exp(x)

    @jax.jit
    def outer(x, w):
        with jax.named_scope("outside"):
            return mixed_precision(scoped, "mixed_bfloat16")(x, w)

    (call,) = jax.make_jaxpr(outer)(X, W).eqns
    for eqn in open_jaxpr(call.params["jaxpr"]).eqns:
        stack = str(eqn.source_info.name_stack)
        if eqn.primitive.name in ("dot_general", "exp"):
            assert stack == "outside/jmp_rewrite.mixed_precision/inside"
            assert "test_transform.py" in source_info_util.summarize(eqn.source_info)
        assert stack.startswith("outside/jmp_rewrite.mixed_precision")


@pytest.mark.slow
def test_captured_arrays_of_a_jitted_function_are_read():
    table = np.arange(8, dtype=np.float32).reshape(2, 4)

    def looked_up(x, w):
        return (x + table) @ w, jnp.asarray(table, jnp.int32), x * jnp.float32(2)

    half = mixed_precision(looked_up, "mixed_bfloat16")
    bit_equal(jax.jit(lambda w: half(X, w))(W), jax.jit(half)(X, W))
    bit_equal(jax.jit(lambda w: half(table, w))(W), jax.jit(half)(table, W))


@pytest.mark.slow
def test_a_copied_program_holds_no_tracer_when_it_is_traced():
    half = mixed_precision(f, "mixed_bfloat16")
    with jax.checking_leaks():
        jax.jit(lambda x, w: half(x, w)).lower(X, W)
        jax.jit(jax.vmap(lambda x: half(x, W))).lower(jnp.stack([X, X]))
        jax.jit(jax.grad(lambda w: half(X, w).sum())).lower(W)


@pytest.mark.parametrize("keras", [None, types.ModuleType("keras")])
def test_a_method_is_decorated_where_keras_is_none(keras, monkeypatch):
    """One that is blocked, or a stub, and a method of what has no name."""

    class Trainer:
        def train_step(self, x):
            return x @ x

    monkeypatch.setitem(sys.modules, "keras", keras)
    of_partial = types.MethodType(functools.partial(Trainer.train_step), Trainer())
    for method in (Trainer().train_step, of_partial):
        assert products(trace(mixed_precision(method, "bfloat16"), jnp.eye(8)))
