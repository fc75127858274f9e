"""`diagnose` names the line, says why, and finds what mends it."""

import contextlib
import html
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted_faults
import pytest
from flax import nnx
from jax.extend.core import Primitive
from programs import normal

from jmp_rewrite import Policy, diagnose, loss_scaling, mixed_precision, scale_loss
from jmp_rewrite._diagnose import results


@pytest.fixture(autouse=True)
def standard_promotion():
    """Other people's programs run under JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def written(ref, w, x):
    ref[...] += jnp.mean(x @ w)
    return jnp.tanh(x @ w)


ODD = {
    "a reference": (written, lambda: jax.new_ref(jnp.zeros(()))),
    "float8": (lambda _, w, x: jnp.tanh(x @ w).astype(jnp.float8_e5m2), lambda: 0),
    "complex numbers": (
        lambda c, w, x: jnp.abs(jnp.fft.rfft(x @ w) * c).sum(),
        lambda: jnp.ones(17, jnp.complex64) * 1j,
    ),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_odd_types_are_diagnosed(name, policy, recwarn):
    fun, first = ODD[name]
    given = first()
    found = diagnose(fun, policy)(given, normal(16, 32) / 4, normal(24, 16))
    assert 0 < max(found.results.values()) < 2**-4
    assert not recwarn.list
    if name == "a reference":
        assert given[...] == 0  # what runs write, they write to copies


@pytest.mark.slow
def test_results_of_one_name_are_told_apart():
    """What changes in place is named after its argument, as the first result is."""

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((4, 4), 300.0))

    def step(model, x):
        model.w[...] = (x @ model.w[...]) @ (x @ model.w[...])
        return ({"w": x.sum()},)

    x = jnp.full((4, 4), 300.0)
    found = diagnose(step, "mixed_float16")(Model(), x)
    assert len(found.results) == 2 and found.error > 0.5


@pytest.mark.slow
def test_arguments_may_be_donated_before_a_diagnosis_is_printed():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ w).sum())(w)

    w, x = jnp.asarray(normal(24, 24)), normal(16, 24)
    found = diagnose(step, "mixed_bfloat16", tolerance=1e-9)(w, x)
    w.delete()
    x[:] = np.nan
    assert found.policy is None or found.policy_error < 1
    assert "step" in str(found)


@pytest.mark.slow
def test_brackets_in_a_scope_are_its_own():
    def f(w, x):
        with jax.named_scope("block[attn]"), jax.named_scope("x[/head]"):
            return jnp.tanh(x @ w) @ w

    found = diagnose(f, "mixed_bfloat16")(normal(24, 24), normal(16, 24))
    assert "block[attn]" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [False, True])
def test_a_mesh_in_the_types_is_diagnosed(is_set):
    """`jax.make_mesh` makes such meshes, which equations outside of `jit` must hold."""
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("data",))
    rows, all_of_it = (
        jax.NamedSharding(mesh, jax.P(*names)) for names in (("data",), ())
    )
    x, w = normal(8 * devices, 16), normal(16, 32) / 4

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        given = jax.device_put(w, all_of_it), jax.device_put(x, rows)
        found = diagnose(jax.value_and_grad(loss), "mixed_bfloat16")(*given)
    plain = diagnose(jax.value_and_grad(loss), "mixed_bfloat16")(w, x)
    assert found.worst.line == plain.worst.line
    for name, error in plain.results.items():
        assert abs(found.results[name] - error) < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        pytest.param(
            fault,
            policy,
            id=f"{fault.name}-{policy}",
        )
        for fault in planted_faults.FAULTS
        for policy in fault.dtypes
    ],
)
def test_the_planted_line_is_named_first(fault, policy):
    """In a train step; and what is found to mend it does."""
    found = planted_faults.run(fault, policy)
    assert found["named"] == fault.line, found["why"]
    if found["found"] is not None:
        assert found["error after"] <= 0.25


def overflows(x, w):
    with jax.named_scope("first"):
        h = x @ w
    with jax.named_scope("second"):
        h = jnp.square(h)
    with jax.named_scope("third"):
        return h @ w


ARGS = (20 * jnp.ones((4, 16)), jnp.ones((16, 16)))


@pytest.mark.slow
def test_a_policy_that_mends_it():
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    assert diagnosis.worst.primitive == "square"
    assert diagnosis.worst.scope == "second"
    assert diagnosis.worst.overflowed == 4 * 16
    assert diagnosis.first_nonfinite.index == diagnosis.worst.index
    assert diagnosis.error == np.inf
    mended = diagnose(overflows, diagnosis.policy)(*ARGS)
    assert mended.error == diagnosis.policy_error <= diagnosis.tolerance
    assert mended.policy == mended.diagnosed
    assert f"policy = jmpr.{diagnosis.policy!r}" in str(diagnosis)


def test_nothing_is_wrong():
    diagnosis = diagnose(overflows, "mixed_bfloat16")(*ARGS)
    assert diagnosis.error < diagnosis.tolerance
    assert diagnosis.policy == Policy("mixed_bfloat16")
    assert "no policy" not in str(diagnosis)


def test_values_not_finite_in_float32_either_are_named(monkeypatch):
    """It is said first, with the line, and no policy is offered."""
    monkeypatch.setenv("COLUMNS", "400")  # a long path is not folded

    def fun(x, w):
        h = x @ w
        return jnp.log(h - h) @ w

    diagnosis = diagnose(fun, "mixed_bfloat16")(*ARGS)
    line = diagnosis.spoilt.line
    assert diagnosis.is_spoilt and diagnosis.spoilt.primitive == "log"
    said = str(diagnosis).splitlines()
    assert said[1] == (
        f"in float32 as well results are Inf or NaN, from {line} on: no policy mends "
        "that"
    )
    assert said[2].startswith("largest error of the other results (by norm): 0, within")
    assert str(diagnosis).count("in float32 as well") == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_skipped_in_float32_as_well_is_told(monkeypatch, steps):
    """It returns what it was given, so that no result shows what happened."""
    monkeypatch.setenv("COLUMNS", "400")
    tx = loss_scaling(optax.adam(1e-3))

    def step(carry, x):
        w, state = carry

        def loss(w):
            norm = jnp.linalg.norm(x @ w, axis=-1, keepdims=True)
            return scale_loss((norm @ jnp.ones((1, 8))).sum(), state)

        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    def steps_(w, state, x):
        if steps == 1:
            return step((w, state), x)[0]
        return jax.lax.scan(step, (w, state), jnp.stack([x] * steps))[0]

    state = tx.init(ARGS[1])
    spoilt = diagnose(steps_, "mixed_float16")(0 * ARGS[1], state, ARGS[0])
    assert spoilt.error == 0 and spoilt.is_skipped and not spoilt.is_spoilt
    assert str(spoilt).splitlines()[1] == (
        "in float32 as well the step is skipped: gradients are Inf or NaN, from "
        f"{spoilt.spoilt.line} on: no policy mends that"
    )
    with open(__file__) as file:
        assert "linalg.norm" in file.readlines()[spoilt.spoilt.line.number - 1]
    sound = diagnose(steps_, "mixed_float16")(ARGS[1], state, ARGS[0])
    assert not sound.is_skipped and "skipped" not in str(sound)


@pytest.mark.parametrize("is_updated", [True, False])
def test_a_step_that_was_skipped_before_is_none_that_is_skipped(is_updated):
    """An evaluation hands on the state of a step that was."""
    tx = loss_scaling(optax.sgd(1e-3))

    def step(w, state, x):
        value = lambda w: jnp.mean((x @ w) ** 2)  # noqa: E731
        if not is_updated:
            return value(w), state
        grads = jax.grad(lambda w: scale_loss(value(w), state))(w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    state = tx.init(ARGS[1])
    zeros = jax.tree.map(jnp.zeros_like, ARGS[1])
    _, state = tx.update(zeros + jnp.inf, state, ARGS[1])
    assert not state.last_step_finite
    found = diagnose(step, "mixed_float16")(ARGS[1], state, ARGS[0])
    assert not found.is_skipped and "skipped" not in str(found)


@pytest.mark.slow
def test_the_first_line_that_is_not_finite():
    """Of the batch that gave Inf; with the state after it, that this is what is bad."""
    tx = optax.adam(1e-3)

    def step(w, state, x):
        loss, gradient = jax.value_and_grad(lambda w: overflows(x, w).mean())(w)
        updates, state = tx.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, loss

    before = ARGS[1], tx.init(ARGS[1])
    diagnosed = diagnose(step, "mixed_float16")
    diagnosis = diagnosed(*before, ARGS[0])
    assert diagnosis.first_nonfinite.scope == diagnosis.worst.scope == "second"
    assert diagnosis.worst.line == diagnosis.first_nonfinite.line
    after = mixed_precision(step, "mixed_float16")(*before, ARGS[0])[:2]
    told = " ".join(str(diagnosed(*after, ARGS[0])).split())
    assert "among the arguments some are so already (argument 0, " in told


def test_an_argument_is_called_as_in_the_call():
    """Not by its place among all arrays."""

    def fun(params, x, *, scale):
        return jnp.square(x * scale @ params["first"] @ params["last"]).mean()

    w = ARGS[1]
    params = {"first": w, "last": w.T}
    x = ARGS[0].at[0, 0].set(jnp.inf)
    found = diagnose(fun, "mixed_bfloat16")(params, x, scale=x)
    assert found.spoilt_arguments == ["argument 1", "argument scale"]


def test_a_decorated_step_is_taken_as_it_is():
    """With its own policy, under `jit`, and it gives none of its arguments away."""
    decorated = mixed_precision(overflows, "mixed_float16")
    step = jax.jit(decorated, donate_argnums=0)
    x, w = ARGS[0] + 0, ARGS[1]
    diagnosis = diagnose(step)(x, w)
    assert diagnosis.diagnosed == Policy("mixed_float16")
    assert diagnosis.worst.scope == "second"
    assert not x.is_deleted()


@pytest.mark.slow
def test_gradients_that_vanish_want_a_scale():
    x, w = normal(4, 16), normal(16, 16)
    grad = jax.grad(lambda w: 1e-9 * jnp.square(jnp.tanh(x @ w) @ w).mean())
    diagnosis = diagnose(grad, "mixed_float16")(w)
    assert "gradients vanish in float16, and the loss is not scaled" in " ".join(
        str(diagnosis).split()
    )
    assert "scale_loss" not in str(diagnose(grad, "mixed_bfloat16")(w))


def test_tolerance():
    exact = diagnose(overflows, "mixed_bfloat16", tolerance=1e-6)
    x = normal(4, 16)
    diagnosis = exact(x, normal(16, 16))
    assert diagnosis.error > diagnosis.tolerance == 1e-6
    assert diagnosis.policy_error <= 1e-6


@pytest.mark.parametrize("tolerance", [0, -1.0, np.nan, "small", True])
def test_no_tolerance(tolerance):
    with pytest.raises(ValueError, match="expected a tolerance above 0"):
        diagnose(overflows, "mixed_float16", tolerance=tolerance)


def test_no_function():
    with pytest.raises(TypeError, match="expected a function, got 3"):
        diagnose(3)


def test_inside_a_transformation():
    with pytest.raises(TypeError, match="diagnose"):
        jax.jit(lambda *args: diagnose(overflows, "mixed_float16")(*args).error)(*ARGS)


def test_pictures():
    plt = pytest.importorskip("matplotlib.pyplot")
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    figure = diagnosis.plot()
    assert any("square" in t.get_text() for a in figure.axes for t in a.texts)
    plt.close(figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "square" in diagnosis._repr_html_()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_reference_of_any_dtype(dtype, is_given):
    """What is kept in a half one is rounded in the reference program too."""

    def fun(ref, w, x):
        own = ref if is_given else jax.new_ref(x.astype(dtype))
        own[...] = own[...] @ w.astype(dtype)
        own[...] += 1
        jax.ref.addupdate(own, ..., x.astype(dtype))
        return own[...].astype(jnp.float32) @ w

    x, w = jnp.ones((16, 32)) / 3, jnp.ones((32, 32)) / 32
    ref = jax.new_ref(x.astype(dtype))
    diagnosis = diagnose(fun, "mixed_bfloat16")(ref, w, x)
    assert diagnosis.error < 0.01
    assert all(f.introduced < 0.01 for f in diagnosis.equations)
    assert (ref[...] == x.astype(dtype)).all()


def test_each_error_says_what_it_measures(tmp_path):
    """One array has two errors: by norm as a result, and by its values."""
    x = jax.random.normal(jax.random.key(0), (4, 8))
    w = jax.random.normal(jax.random.key(0), (8, 8))
    diagnosis = diagnose(lambda x, w: jnp.tanh(x @ w) @ w, "mixed_bfloat16")(x, w)
    last = diagnosis.in_order[-1]
    assert last.primitive == "dot_general" and last.error > 5 * diagnosis.error
    diagnosis.save_html(tmp_path / "diagnosis.html")
    for page in (str(diagnosis), (tmp_path / "diagnosis.html").read_text()):
        said = " ".join(html.unescape(page).split())
        assert "(by norm)" in said
        assert "the mean of the values' own relative errors" in said
    pytest.importorskip("matplotlib")
    assert diagnosis.plot().axes[0].get_ylabel() == "relative error, mean or norm"


def test_a_page_in_the_style_of_the_report(tmp_path):
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    diagnosis.save_html(tmp_path / "diagnosis.html")
    page = (tmp_path / "diagnosis.html").read_text()
    assert "--half: #0e8a7d" in page and "</main>" in page  # the report's colors
    assert diagnosis.why(diagnosis.worst) in html.unescape(page)
    assert f"policy = jmpr.{diagnosis.policy!r}" in html.unescape(page)
    assert html.unescape(diagnosis._repr_html_()).count("<main>") == 1


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    with pytest.raises(ImportError, match=r"pip install 'jmp_rewrite\[report\]'"):
        diagnosis.plot()


def test_an_argument_that_overflows_is_named():
    big = 30 * ARGS[0]
    for _ in range(2):
        big = 30 * big
    batch = {"big": big}
    fun = diagnose(lambda batch, w: batch["big"] @ w, "mixed_float16")
    diagnosis = fun(batch, ARGS[1])
    assert diagnosis.why(diagnosis.worst).startswith("big, rounded for dot_general")


def test_shapes_in_place_of_arrays():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARGS)
    with pytest.raises(TypeError, match="needs arrays, .*explain, which takes shapes"):
        diagnose(overflows, "mixed_float16")(*shapes)


@pytest.mark.slow
def test_it_says_what_it_is_doing(capfd):
    slow = []

    def wait(x):
        while slow:
            time.sleep(slow.pop())
        return x

    def fun(x, w):
        same = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return overflows(jax.pure_callback(wait, same, x), w)

    diagnose(fun, "mixed_float16")(*ARGS)
    assert capfd.readouterr().err == ""  # it took a moment
    slow.append(2.5)
    diagnosis = diagnose(fun, "mixed_float16")(*ARGS)
    assert "diagnose: running fun in float32 and" in capfd.readouterr().err
    slow.append(2.5)
    print(diagnosis)
    assert "diagnose: searching the fewest overrides" in capfd.readouterr().err


def vanishing(params, x, scale=1.0):
    def loss(params):
        with jax.named_scope("net"):
            return scale * 1e-7 * jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)

    return jax.grad(loss)(params)


@pytest.mark.slow
def test_gradients_that_vanish_want_a_scale_and_no_policy():
    args = (normal(16, 16, seed=1), normal(16, 4, seed=2)), normal(8, 16, seed=3)
    diagnosis = diagnose(vanishing, "mixed_float16")(*args)
    assert diagnosis.error > diagnosis.tolerance and diagnosis.policy is None
    lines = str(diagnosis).splitlines()
    assert lines[2].startswith("fix: ") and "scale" in lines[2] + lines[3]
    assert "scopes=" not in str(diagnosis) and diagnosis.tried == []
    assert "loss_scaling" in html.unescape(html.unescape(diagnosis._repr_html_()))
    scaled = diagnose(lambda p, x: vanishing(p, x, 2.0**15), "mixed_float16")(*args)
    assert scaled.scaling == "" and scaled.error < scaled.tolerance


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_vanish_beside_a_loss_want_a_scale(clips):
    """The update is what they are missing from, not the parameter."""
    clip = optax.clip_by_global_norm(1.0)

    def step(params, x):
        def loss(params):
            return 1e-7 * jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        if clips:
            grads, _ = clip.update(grads, clip.init(params))
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    args = (normal(16, 16, seed=1), normal(16, 4, seed=2)), normal(8, 16, seed=3)
    diagnosis = diagnose(step, "mixed_float16")(*args)
    assert "vanish" in diagnosis.scaling and diagnosis.policy is None
    assert str(diagnosis).splitlines()[2].startswith("fix: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "size", "fix"),
    [
        (2.0, 1e-7, "vanish in float16 at the loss scale 2: a scale of 2**24 fits"),
        (2.0**15, 1e4, "overflow at the loss scale 32768: a dynamic scale skips"),
    ],
)
def test_another_scale_mends_what_the_scale_has_spoilt(scale, size, fix):
    tx = loss_scaling(optax.adam(1e-3), scale)

    def step(w, state, x):
        def loss(w):
            return scale_loss(size * jnp.mean(jnp.square(jnp.tanh(x @ w) @ w)), state)

        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    w = 0.1 * normal(32, 32, seed=1)
    diagnosis = diagnose(step, "mixed_float16")(w, tx.init(w), normal(16, 32, seed=2))
    assert fix in diagnosis.scaling and diagnosis.policy is None


@pytest.mark.slow
def test_what_is_within_the_tolerance_wants_no_scale():
    """A step that is NaN in float32 too has no other error either."""
    args = (normal(16, 16, seed=1), normal(16, 4, seed=2)), normal(8, 16, seed=3)
    diagnosis = diagnose(vanishing, "mixed_float16", tolerance=10.0)(*args)
    assert diagnosis.scaling == "" and "fix: " not in str(diagnosis)


@pytest.mark.parametrize("size", [1e25, np.inf])
def test_large_results_draw_no_warning(size):
    """Each warning is an error here: squares of 1e25 are infinite in float32."""
    found = diagnose(lambda x: (x, 2 * x), "mixed_bfloat16")(jnp.full((4, 4), size))
    assert found.error == 0


def test_an_overflow_is_not_mended_by_a_scale():
    diagnosis = diagnose(overflows, "mixed_float16")(*ARGS)
    assert diagnosis.scaling == "" and diagnosis.policy is not None


def contrastive(w, x, y):
    a, b = jnp.tanh(x @ w), jnp.tanh(y @ w)
    with jax.named_scope("similarity"):
        similarity = a @ b.T
    with jax.named_scope("loss"):
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(similarity / 1e-4)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_line_that_has_rounded_and_not_the_one_that_amplifies(policy):
    """A temperature of 1e-4, and a loss of differences of what it divides."""

    def step(w, x, y):
        loss, gradient = jax.value_and_grad(contrastive)(w, x, y)
        return w - 1e-3 * gradient, loss

    x, y = (normal(1, 32) + 0.03 * normal(16, 32, seed=s) for s in (1, 2))
    args = 0.1 * normal(32, 32, seed=3), x, y
    for fun in (step, contrastive):
        worst = diagnose(fun, policy)(*args).worst
        assert (worst.primitive, worst.scope) == ("dot_general", "similarity")


def test_the_first_inf_in_a_loop_is_where_it_appears():
    """The line before it in the body has it an iteration later."""

    def fun(w, x):
        def body(x, _):
            with jax.named_scope("before"):
                h = x @ w
            with jax.named_scope("after"):
                return 6.0 * h, h.mean()

        return jax.lax.scan(body, x, None, length=8)[0] @ w

    diagnosis = diagnose(fun, "mixed_float16")(jnp.eye(16), jnp.full((4, 16), 3.6))
    assert diagnosis.first_nonfinite.scope == "after"
    assert diagnosis.first_nonfinite.iteration == (5,)


def test_one_layer_is_mended_and_not_its_class():
    """All layers stand in the same scope, as those of Equinox do."""

    def fun(params, x):
        for name in "abcdef":
            with jax.named_scope("Linear"):
                x = jnp.square(x @ params[name])
        return x @ params["a"]

    params = {name: jnp.eye(16) for name in "abcde"} | {"f": 1e3 * jnp.eye(16)}
    diagnosis = diagnose(fun, "mixed_float16")(params, jnp.ones((8, 16)))
    assert diagnosis.error == np.inf
    assert diagnosis.policy_error < diagnosis.tolerance
    assert "Linear" not in diagnosis.policy.scopes


@pytest.mark.slow
def test_modules_that_change_in_place_are_judged():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: 1e-9 * jnp.square(m(x)).mean())(model)
        optimizer.update(model, grads)

    for fun in (step, nnx.jit(mixed_precision(step, "mixed_float16"))):
        diagnosis = diagnose(fun, "mixed_float16")(model, optimizer, normal(8, 16))
        assert diagnosis.results["0/kernel"] == 1 and "vanish" in diagnosis.scaling


def test_static_arguments_are_static():
    @mixed_precision("mixed_bfloat16", static_argnums=1)
    def fun(x, flags):
        return x @ x if flags[0] else x

    assert diagnose(fun)(normal(8, 8), np.array([True])).error > 0


def test_a_result_that_is_a_constant():
    """Without loss scaling `last_step_finite` is a constant of the step."""
    diagnosis = diagnose(lambda x: (x @ x, jnp.array(True)), "mixed_bfloat16")(
        normal(8, 8, seed=1)
    )
    assert diagnosis.error < 0.01


def test_a_step_is_judged_by_what_it_changes():
    """A parameter hardly moves in a step: a lost step is an error of the step."""
    start = jnp.ones((100, 10))
    step = jnp.where(jnp.arange(1000).reshape(100, 10) % 2 == 0, 1e-3, -1e-3)
    reference = results.Reference([start + step], [start], [step])
    lost = jnp.where(jnp.arange(100)[:, None] < 10, start, start + step)
    assert reference.errors([lost]) == pytest.approx([0.1**0.5], rel=1e-3)
    assert reference.errors([start]) == pytest.approx([1.0])


def test_an_element_of_a_step_counts_as_much_as_its_gradient():
    """The first step of Adam is as large for the smallest gradient as for any other."""
    start, gradient = jnp.ones(1000), jnp.ones(1000).at[:100].set(1e-3)
    step = 1e-3 * jnp.sign(gradient)
    lost = start + step.at[:100].multiply(-1.0)
    reference = results.Reference([start + step], [start], [gradient])
    plain = results.Reference([start + step], [start])
    assert plain.errors([lost])[0] == pytest.approx((4 * 0.1) ** 0.5, rel=1e-3)
    expected = (4 * 0.1 * 1e-3 / (0.9 + 0.1 * 1e-3)) ** 0.5
    assert reference.errors([lost])[0] == pytest.approx(expected, rel=1e-2)
    large = start + step.at[900:].multiply(-1.0)  # these gradients are no noise
    assert reference.errors([large])[0] > 0.6
    # A bias that was zero is no small change of anything.
    bias = results.Reference([step], [0 * start], [gradient])
    assert bias.errors([lost - start])[0] == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_a_healthy_first_step_of_adam_is_called_healthy():
    """Where large terms cancel, small gradients change their sign, and so do steps."""
    tx = loss_scaling(optax.adam(1e-3))
    x, y = normal(512, 64, seed=2) + 16, normal(512, 8, seed=3)
    y = y - y.mean(0)

    def step(params, opt_state):
        def loss(params):
            out = jnp.tanh(x @ params[0]) @ params[1]
            return scale_loss(jnp.mean((out - y) ** 2), opt_state)

        updates, _ = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates)

    params = normal(64, 32, seed=1) / 20, normal(32, 8, seed=5)
    # By its norm alone the step is off by a third in float16, and by half in bfloat16.
    for policy, error in (("mixed_float16", 0.05), ("mixed_bfloat16", 0.15)):
        diagnosis = diagnose(step, policy)(params, tx.init(params))
        assert 0 < diagnosis.error < error


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_noise_is_not_judged_by_the_state_that_it_is_added_to(policy):
    """In the middle of training a moment holds the noise of another run."""
    x, y = normal(64, 16, seed=1), normal(64, 4, seed=2)
    tx = loss_scaling(optax.adam(1e-3), None)

    @jax.jit  # its update is a function of several results
    def change(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params, state):
        def loss(params):
            query, key = x @ params["q"], x @ params["k"] + params["b"]
            shares = jax.nn.softmax(query @ key.T)  # whatever b is
            return jnp.mean((shares @ x @ params["v"] - y) ** 2)

        return change(jax.grad(loss)(params), state, params)

    params = {
        "q": normal(16, 16, seed=3),
        "k": normal(16, 16, seed=4),
        "v": normal(16, 4, seed=5),
        "b": jnp.zeros(16),
    }
    first = tx.init(params)
    params, state = step(params, first)
    moments = optax.tree_utils.tree_get(state, "nu")
    moments["b"] = moments["b"] + 3e-12  # of a run in half precision
    state = optax.tree_utils.tree_set(state, nu=moments)
    diagnosis = diagnose(step, policy)(params, state)
    assert diagnosis.error < diagnosis.tolerance
    assert {n.rpartition("/")[2] for n in diagnosis.noise} == {"b"}


def test_a_gradient_that_is_no_noise_is_judged():
    start = jnp.ones(4)
    gradients = [jnp.full(4, 1e-9), jnp.ones(4), None]
    reference = results.Reference([start] * 3, [], gradients)
    reference.shaken_gradients(lambda _: [jnp.full(4, 2e-9), jnp.ones(4), None])
    assert reference.is_noise == [True, False, False]
    assert reference.errors([2 * start] * 3) == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_healthy_layers_are_called_healthy():
    """Rounding closes gates and opens others, and signs of small gradients change."""
    tx = optax.adam(1e-3)
    x, y = normal(64, 32, seed=1), jnp.arange(64) % 8

    def step(params, state):
        def loss(params):
            h = x
            for w, b in params[:-1]:
                h = jax.nn.relu(h @ w + b)
            logits = h @ params[-1][0]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(3):
        params = [
            (normal(32, 32, seed=10 * seed + i) / 4, jnp.zeros(32)) for i in range(4)
        ]
        diagnosis = diagnose(step, "mixed_bfloat16")(params, tx.init(params))
        assert diagnosis.error < diagnosis.tolerance


def test_where_no_overrides_are_enough_the_least_error_is_told():
    w = normal(32, 32)

    def fun(x):
        with jax.named_scope("net"):
            y = jnp.tanh(x @ w)
        return y.astype(jnp.bfloat16).astype(jnp.float32) @ w

    diagnosis = diagnose(fun, "mixed_bfloat16", tolerance=1e-5)(normal(4, 32))
    assert diagnosis.policy is None
    assert len(diagnosis.tried) == len(diagnosis.tried_errors)
    least = min(diagnosis.tried_errors)
    assert 1e-4 < least < diagnosis.error
    said = f"the least of {len(diagnosis.tried)} runs is {least:.2g}"
    assert said in " ".join(str(diagnosis).split())


def test_a_number_among_the_results():
    """A learning rate among the metrics, for instance."""

    def fun(x):
        return jnp.tanh(x @ x), {"rate": jnp.asarray(0.1)}

    assert diagnose(fun, "mixed_bfloat16")(normal(4, 4)).error < 0.02


@pytest.mark.slow
def test_a_loop_that_never_ends_in_half_is_named():
    w = normal(8, 8, scale=0.2)

    def step(state):
        new = jnp.tanh(state[0] @ w + normal(4, 8))
        return new, jnp.abs(new - state[0]).max()

    def fun(x):
        return jax.lax.while_loop(lambda s: s[1] > 1e-6, step, (x, jnp.float32(1)))[0]

    diagnosis = diagnose(fun, "mixed_bfloat16")(normal(4, 8, seed=1))
    (said,) = diagnosis.endless
    assert "test_diagnose.py" in said and said in " ".join(str(diagnosis).split())
    assert diagnosis.error == np.inf and diagnosis.policy is None
    assert not diagnose(fun, "float32")(normal(4, 8, seed=1)).endless


@pytest.mark.parametrize("kind", ["labels", "mask"])
def test_integers_written_as_floats_are_exact(kind):
    """No rounding changes them, so an Inf behind them is no rounding noise."""

    def fun(w, x, integers):
        h = jnp.square(x @ (100 * w)) @ w  # overflows
        if kind == "mask":
            return jax.nn.softmax(jnp.where(integers == 1, 1e-4 * h, -1e9))
        logits = 1e-4 * h
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, integers[-1].astype(jnp.int32)
        ).mean()

    integers = jnp.asarray(np.tril(np.ones((8, 8), np.float32)))
    found = diagnose(fun, "mixed_float16")(normal(8, 8), 3 * normal(8, 8), integers)
    assert found.error == np.inf and not found.noise
    assert found.worst.primitive == "square"


def test_what_is_infinite_is_no_noise():
    """Although its float32 value, a product with rounding errors, is nothing else."""

    def fun(w, x):
        h = jnp.square(x @ (100 * w)) @ w
        return h * (x * (1 / 3) * 3 - x)

    args = jnp.abs(normal(8, 8)), 3 * normal(8, 8)
    assert diagnose(fun, "mixed_float16")(*args).error == np.inf


def orthogonal(size):
    return jnp.asarray(np.linalg.qr(normal(size, size))[0])


def decaying(w, x):
    for _ in range(40):
        x = jnp.maximum((x @ w) * 0.997, -10.0)
    return x @ w


def decaying_in_a_loop(w, x):
    def body(x, _):
        return jnp.maximum((x @ w) * 0.997, -10.0), None

    return jax.lax.scan(body, x, None, length=100)[0] @ w


def decaying_by_hand(w, x):
    def body(x, _):
        half = x.astype(jnp.bfloat16) * jnp.bfloat16(1) * jnp.bfloat16(0.997)
        return half.astype(jnp.float32) @ w, None

    return jax.lax.scan(body, x, None, length=100)[0] @ w


@pytest.mark.parametrize("fun", [decaying, decaying_in_a_loop, decaying_by_hand])
def test_noise_is_float32_against_float32(fun):
    """Not against half: neither a rounded literal, nor a user's own half in a loop."""
    args = orthogonal(16), normal(8, 16)
    found = diagnose(fun, "mixed_bfloat16")(*args)
    assert not found.noise
    half = mixed_precision(fun, "mixed_bfloat16")(*args)
    if fun is not decaying_by_hand:
        away = jnp.linalg.norm(half - fun(*args)) / jnp.linalg.norm(fun(*args))
        assert abs(found.error - away) < 2**-8
    assert found.error > 2**-5


def test_a_literal_that_is_rounded_is_a_rounding_like_any_other():
    def fun(w, x):
        with jax.named_scope("a"):
            return jnp.tanh((x @ w) * 1e-8 * 1e8) @ w

    policy = Policy("mixed_float16", scopes={"a": "half"})
    found = diagnose(fun, policy)(orthogonal(16), normal(8, 16))
    assert found.error == 1.0 and not found.noise
    assert found.worst.underflowed == 1 and found.worst.scope == "a"
    assert found.why(found.worst).startswith("a constant, rounded for mul: 1 of 1")
    assert found.policy_error < 2**-8


def test_a_value_where_float32_has_zeros_is_infinitely_wrong(recwarn):
    reference = results.Reference([jnp.zeros(3)], [])
    assert reference.errors([jnp.ones(3)]) == [np.inf] and not recwarn.list


@pytest.mark.parametrize("times", [0, 1])
def test_a_loop_hands_on_what_has_entered_it(times):
    """Also where its condition does not hold even once."""

    def fun(w, x, n):
        h = jnp.square(x @ (1e3 * w)) @ w  # overflows
        return jax.lax.fori_loop(0, n, lambda _, h: 0.5 * h, h)

    found = diagnose(fun, "mixed_float16")(jnp.eye(8), normal(8, 8), jnp.int32(times))
    assert found.error == np.inf and found.worst.primitive == "square"


@pytest.mark.slow
def test_an_ensemble_is_diagnosed():
    """The states of loss scaling are stacked: of several scales the least counts."""
    tx = loss_scaling(optax.adam(1e-2))

    def step(w, state, x):
        grad = jax.grad(lambda w: scale_loss(jnp.mean((x @ w) ** 2), state))(w)
        updates, state = tx.update(grad, state, w)
        return optax.apply_updates(w, updates), state

    w = 0.1 * normal(3, 8, 4)
    state = jax.vmap(tx.init)(w)
    state = state._replace(loss_scale=state.loss_scale.at[1].multiply(0.5))
    ensemble = jax.vmap(step, (0, 0, None))
    found = diagnose(ensemble, "mixed_float16")(w, state, normal(8, 8))
    assert found.loss_scale == 2.0**14 and found.error < found.tolerance


@pytest.mark.slow
def test_a_policy_with_a_primitive_of_ones_own_is_extended():
    own = Primitive("my_gelu")
    own.def_impl(jax.nn.gelu)
    own.def_abstract_eval(lambda x: x)
    policy = Policy("mixed_float16", rules={own: "infer"})

    def fun(w, x):
        with jax.named_scope("layer"):
            return jnp.square(own.bind(x @ (1e3 * w))) @ w

    found = diagnose(fun, policy)(jnp.eye(16), normal(8, 16))
    assert found.policy == policy.replace(scopes={"layer": "float32"})
