"""How a report is shown: advice, text, HTML, picture."""

from __future__ import annotations

import functools
import html
import html.parser
import json
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from programs import BY_NAME, mlp, mlp_args

import jmp_rewrite as jmpr
from jmp_rewrite import Policy, explain, mixed_precision
from jmp_rewrite._explain import stored
from jmp_rewrite._explain.document import document
from jmp_rewrite._explain.summary import fold, largest_full, scopes
from jmp_rewrite._explain.text import render
from jmp_rewrite._units import bytes_text, flops_text


@pytest.fixture(autouse=True)
def optax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tower(params, x, labels):
    """A stack of layers with a softmax and a loss, in scopes as Flax sets them."""
    for i, (w, v) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("mlp"):
                h = jnp.tanh(x @ w) @ v
            with jax.named_scope("norm"):
                x = (x + h) / jnp.sqrt(jnp.mean(jnp.square(x + h), -1, keepdims=True))
    with jax.named_scope("head"):
        logits = x @ params[0][0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tower_step(layers, width=64, batch=32, optimizer=None, scale=True):
    """Returns a train step and the types of its arguments."""
    tx = optimizer or jmpr.loss_scaling(optax.adam(1e-3))

    def step(params, opt_state, x, labels):
        def loss(params):
            value = tower(params, x, labels)
            return jmpr.scale_loss(value, opt_state) if scale else value

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    pair = spec(width, 4 * width), spec(4 * width, width)
    params = [pair] * layers
    state = jax.eval_shape(tx.init, params)
    return step, (params, state, spec(batch, width), spec(batch, dtype=jnp.int32))


@pytest.fixture(scope="module")
def large():
    """A report on more than 10,000 equations."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step, args = tower_step(120)
        report = explain(step, "mixed_float16")(*args)
    assert len(report.equations) > 10_000
    return report


# ---- advice


def advice_on(fun, *args, policy="mixed_bfloat16"):
    return "\n".join(explain(fun, policy)(*args).advice)


LARGE = spec(4096, 4096)


def test_a_good_program_needs_no_advice():
    assert advice_on(jnp.matmul, LARGE, LARGE) == ""


@pytest.mark.slow
def test_advice_on_gradients_that_are_not_scaled():
    step, args = tower_step(1, optimizer=optax.adam(1e-3), scale=False)
    report = explain(step, "mixed_float16")(*args)
    assert report.advice[0].startswith("Scale the loss: gradients below 6e-8 are zero")
    scaled, args = tower_step(1)
    for fun, policy in (
        (scaled, "mixed_float16"),
        (scaled, "mixed_bfloat16"),
        (scaled, Policy("mixed_float16", loss_scale=None)),
    ):
        assert "Scale the loss" not in advice_on(fun, *args, policy=policy)
    forward = advice_on(mlp, *mlp_args(), policy="mixed_float16")
    assert "Scale the loss" not in forward


def test_advice_on_a_softmax_in_half():
    def fun(x, w):
        return jax.nn.softmax((x @ w).astype(jnp.bfloat16)).astype(jnp.float32) @ w

    line = fun.__code__.co_firstlineno + 1
    found = advice_on(fun, LARGE, LARGE)
    assert f"A softmax in bfloat16: exp at test_report.py:{line} computes" in found
    policy = Policy("mixed_bfloat16", rules={"exp": "infer", "reduce_sum": "infer"})
    assert "A softmax in bfloat16" in advice_on(
        lambda x, w: jnp.exp(x @ w) @ w, LARGE, LARGE, policy=policy
    )
    assert "softmax" not in advice_on(
        lambda x, w: jax.nn.softmax(x @ w) @ w, LARGE, LARGE
    )


def test_advice_on_a_loss_in_half():
    def fun(x, w):
        return jnp.max((x @ w).astype(jnp.bfloat16))

    assert "A loss in half: reduce_max at test_report.py" in advice_on(
        fun, LARGE, LARGE
    )


def test_advice_on_products_that_stay_float32():
    def fun(x, w):
        return jnp.matmul(x @ w, w, precision="highest")

    line = fun.__code__.co_firstlineno + 1
    assert (
        f"50% of the operations of matrix multiplications stay float32, at "
        f"test_report.py:{line}: "
        "precision HIGHEST was asked for." in advice_on(fun, LARGE, LARGE)
    )


@pytest.mark.parametrize("scope", ["muon", "", "everything"])
def test_advice_on_an_optimizer_with_products(scope):
    """Newton-Schulz is safe in float32; one scope frees it, around it alone."""
    tx = optax.contrib.muon(1e-3)
    params = {"w": jnp.zeros((16, 32)), "out": jnp.zeros((32, 8))}
    freed = scope if scope == "muon" else "optimizer"

    def step(params, state, x, around=scope):
        def loss(params):
            return jnp.square(jnp.tanh(x @ params["w"]) @ params["out"]).mean()

        with jax.named_scope(scope if scope == "everything" else "model"):
            grads = jax.grad(loss)(params)
        if around:
            with jax.named_scope(around):
                updates, state = tx.update(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params, tx.init(params), jnp.zeros((4, 16))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = explain(step, "mixed_bfloat16")(*args)
        (found,) = [a for a in report.advice if "a product of the optimizer" in a]
        policy = Policy("mixed_bfloat16", scopes={freed: "half"})
        after = explain(functools.partial(step, around=freed), policy)(*args)
    share = 1 - report.half_flops
    assert found.startswith(f"{share:.0%} of the operations of matrix multiplications")
    assert found.endswith(f'scopes={{"{freed}": "half"}}.')
    assert (f'jax.named_scope("{freed}")' in found) == (freed != scope)
    assert after.half_flops == 1
    assert not any("optimizer" in a for a in after.advice)


def test_advice_on_unrewritten_bodies():
    """Each line once, however often it runs, and three of them."""

    def fun(x, w):
        def called(x):
            return jax.pure_callback(lambda v: v, spec(4096, 4096), x @ w)

        for _ in range(5):
            x = called(x)
        x = jax.pure_callback(lambda v: v, spec(4096, 4096), x @ w)
        x = jax.pure_callback(lambda v: v, spec(4096, 4096), x @ w)
        x = jax.pure_callback(lambda v: v, spec(4096, 4096), x @ w)
        return jax.pure_callback(lambda v: v, spec(4096, 4096), x @ w)

    found = advice_on(fun, LARGE, LARGE)
    assert found.count("pure_callback at test_report.py") == 3
    assert "2 more like it are in report.not_rewritten." in found


def test_advice_on_unused_settings():
    policy = Policy(
        "mixed_bfloat16",
        rules={"erf_inv": "allow", "tanh": "deny"},
        scopes={"decoder/lm_head": "float32", "mlp": "float32"},
    )
    step, args = tower_step(1)
    found = advice_on(step, *args, policy=policy)
    assert "The rule for 'erf_inv' was not used" in found
    assert "The scope 'decoder/lm_head' was not used" in found
    assert "The rule for 'tanh'" not in found
    assert "The scope 'mlp'" not in found


def test_advice_on_small_products():
    found = advice_on(mlp, *mlp_args())
    assert "are too small to gain: the largest has 512 FLOP" in found


@pytest.mark.parametrize(
    ("width", "sentence"),
    [
        (4096, ""),
        (1000, "a dimension of 1000 misses multiples of 128 (TPU): pad it to 1024."),
        (100, "a dimension of 100 misses multiples of 8 (GPU): pad it to 104."),
        (
            511,
            "a dimension of 511 misses multiples of 8 (GPU) and 128 (TPU): pad it to "
            "512.",
        ),
        (
            50257,
            "a dimension of 50257 misses multiples of 8 (GPU) and 128 (TPU): pad it to "
            "50264 or 50304.",
        ),
    ],
)
def test_advice_on_dimensions(width, sentence):
    def fun(x, w):
        with jax.named_scope("lm_head"):
            return x @ w

    found = advice_on(fun, LARGE, spec(4096, width))
    assert found == (f"lm_head: {sentence}" if sentence else "")


def test_advice_on_features_of_convolutions():
    def fun(x, k):
        dn = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dn)

    assert advice_on(fun, spec(33, 56, 56, 64), spec(3, 3, 64, 64)) == ""
    assert "a dimension of 60 misses" in advice_on(
        fun, spec(32, 56, 56, 64), spec(3, 3, 64, 60)
    )


def test_only_the_worst_dimensions_are_listed():
    def fun(x, *ws):
        return [x @ w for w in ws]

    found = advice_on(fun, LARGE, *(spec(4096, 4097 + 2 * i) for i in range(6)))
    assert found.count("a dimension of") == 3
    assert "a dimension of 4107" in found  # the largest
    both = advice_on(fun, LARGE, spec(4096, 9000), spec(4096, 4097))
    assert both.index("4097 misses") < both.index("9000 misses")  # GPU, then TPU
    assert "3 more dimensions like these." in found


def test_an_upper_bound_is_called_one_and_advises_no_batch():
    def loss(ws, x):
        for w in ws:
            x = x @ w
        return x

    report = explain(loss, "mixed_bfloat16")([LARGE] * 4, LARGE)
    assert report.residual_bytes_before == 2 * report.residual_bytes
    assert report.advice == []
    text = " ".join(str(report).split())
    assert f"at most {bytes_text(report.residual_bytes)} of forward values" in text
    assert "before XLA fuses and rematerializes" in text


def test_a_model_that_is_half_already_is_told_so():
    half = spec(64, 64, dtype=jnp.bfloat16)
    (sentence,) = explain(jnp.matmul, "mixed_bfloat16")(half, half).advice
    assert sentence.startswith("100% of the operations of matrix multiplications are b")
    assert sentence.endswith("there is nothing to rewrite.")

    def mixed(x, y, w):
        return x @ x, y @ w

    found = advice_on(mixed, spec(4096, 4096, dtype=jnp.float16), LARGE, LARGE)
    assert "50% of the operations of matrix multiplications are float16" in found
    assert "they stay as they are" in found


def test_float64_is_told_apart_from_float32():
    with jax.enable_x64(True):
        wide = spec(4096, 4096, dtype=jnp.float64)
        report = explain(lambda x: jnp.tanh(x @ x), "mixed_bfloat16")(wide)
    (sentence,) = report.advice
    assert "stay float64" in sentence and "cast to float32 to use half" in sentence
    assert {row.kind for row in report.equations} == {"other"}
    assert sum(s.full for s in scopes(report.equations, report.layers)) == 0


def test_auto_that_is_float32_says_what_to_write(monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "0")
    (sentence,) = explain(jnp.matmul, "auto")(LARGE, LARGE).advice
    assert sentence.startswith("'auto' means float32 on this device (cpu)")
    assert 'explain(fun, "mixed_bfloat16")' in sentence


def test_an_explicit_policy_wins():
    half = mixed_precision(jnp.matmul, "mixed_bfloat16")
    for fun in (half, jax.jit(half)):
        assert explain(fun)(LARGE, LARGE).policy.name == "mixed_bfloat16"
        report = explain(fun, "mixed_float16")(LARGE, LARGE)
        assert report.policy.name == "mixed_float16"
        assert "f16[4096,4096]" in {t for r in report.equations for t in r.operands}


# ---- what is stored


def memory_of(fun, *args, policy="mixed_bfloat16"):
    """Primitive -> where its results are, for the primitives that appear once."""
    report = explain(fun, policy)(*args)
    found = {}
    for row in report.equations:
        found.setdefault(row.primitive, []).append(row.memory)
    return {name: where[0] for name, where in found.items() if len(where) == 1}


def test_arithmetic_between_matmuls_stays_in_registers():
    def fun(x, w):
        return jnp.abs(jnp.tanh(x @ w) * 2 + 1) @ w

    found = memory_of(fun, LARGE, LARGE)
    assert [found[p] for p in ("tanh", "mul", "add")] == ["register"] * 3
    assert found["abs"] == "half"  # an operand
    rows = explain(fun, "mixed_bfloat16")(LARGE, LARGE).equations
    stored = [r for r in rows if r.memory in ("half", "full") and r.category != "cast"]
    assert {r.primitive for r in stored} == {"dot_general", "abs"}
    assert all(r.stored_bytes == r.bytes for r in stored)


def test_cheap_values_are_recomputed_and_costly_ones_stored():
    def norm(x):
        centred = x - x.mean(1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(1, keepdims=True))

    found = memory_of(norm, LARGE, policy="float32")
    assert found["sub"] == "register"  # one large value is read again

    def softmax(x):
        e = jnp.exp(x)
        return e / e.sum(1, keepdims=True)

    assert memory_of(softmax, LARGE, policy="float32")["exp"] == "full"


def test_a_function_that_is_called_twice_is_followed_twice():
    @jax.jit
    def inner(x):
        return jnp.sin(x) * 2

    report = explain(lambda x, w: inner(inner(x @ w)) @ w, "float32")(LARGE, LARGE)
    where = [r.memory for r in report.equations if r.primitive == "sin"]
    assert set(where) == {"register"}


def test_functions_that_call_each_other_twice_end():

    def twice(fun):
        called = jax.jit(fun)
        return lambda x: called(called(x))

    fun = jnp.sin
    for _ in range(30):
        fun = twice(fun)
    closed = jax.make_jaxpr(fun)(1.0)
    assert stored.stored(closed, limit=1000)


def test_carries_are_stored():
    def fun(x):
        return lax.scan(lambda c, _: (c * 2 + 1, None), x, None, length=3)[0] + 1

    report = explain(fun, "float32")(LARGE)
    where = {r.trips: r.memory for r in report.equations if r.primitive == "add"}
    assert where == {3: "full", 1: "full"}
    assert {r.memory for r in report.equations if r.primitive == "mul"} == {"register"}


# ---- tables


def test_layers_that_differ_in_a_number_are_one_line():
    names = ["a/h_0/fc", "a/h_1/fc", "a/h_2/fc", "a/ln_1", "a/ln_2", "b/c"]
    assert [fold(names)[name] for name in names] == [
        *["a/h_*/fc"] * 3,
        "a/ln_1",
        "a/ln_2",
        "b/c",
    ]
    assert set(fold(["mlp", "mlp_1", "mlp_2"]).values()) == {"mlp_*"}
    assert fold(["GPT", "GPT/h", "loss()"]) == {
        "GPT": "GPT",
        "GPT/h": "h",
        "loss()": "loss()",
    }
    assert fold(["blocks/0", "blocks/1"])["blocks/0"] == "blocks/0"
    assert set(fold(["model.py:1", "model.py:2", "model.py:3"])) == set(
        fold(["model.py:1", "model.py:2", "model.py:3"]).values()
    )


@pytest.mark.slow
def test_scopes_add_up(large):
    found = scopes(large.equations, large.layers)
    assert sum(s.flops for s in found) == large.flops
    assert sum(s.casts for s in found) == large.casts
    counted = [r for r in large.equations if r.category != "internal"]
    assert sum(s.equations for s in found) == len(counted)
    sizes = [s.bytes for s in found]
    assert sizes == sorted(sizes, reverse=True)
    mlps = next(s for s in found if s.name == "layer_*/mlp")
    assert mlps.repeats == 120 and mlps.half_flops == mlps.flops > 0


@pytest.mark.slow
def test_the_largest_float32_values_come_first(large):
    first, *rest = largest_full(large.equations, large.layers)
    assert first.stored_bytes >= rest[0].stored_bytes > 0
    assert first.first.dtype == "float32"
    assert first.times > 1 and first.value.startswith(f"{first.times} × f32[")
    # Which are the very largest depends on how JAX's version derives a gelu.
    assert {g.layer for g in [first, *rest]} >= {"layer_*/norm", "layer_*/mlp"}
    assert "update" not in {g.first.phase for g in [first, *rest]}


# ---- text


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("with_rich", [True, False])
@pytest.mark.parametrize("which", ["large", "small"])
def test_text_fits_its_width(which, with_rich, width, large, monkeypatch):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    small = explain(mlp, "mixed_float16")(*mlp_args())
    report = large if which == "large" else small
    lines = render(report, width, equations=False).splitlines()
    assert len(lines) < 250
    text = render(report, width)
    assert text.startswith("\n".join(lines) + "\n\nEquations")
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert ("─" in text) == with_rich


@pytest.mark.parametrize("with_rich", [True, False])
def test_text_has_totals_and_reasons(large, with_rich, monkeypatch):
    reason = "full: downstream of reduce_sum at test_report.py"
    assert any(row.reason.startswith(reason) for row in large.equations)
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    text = " ".join(render(large, 400).split())
    for part in (
        "step under Policy('mixed_float16')",
        f"{large.half_flops:.1%} of {flops_text(large.flops)}",
        f"{large.casts:,}, {bytes_text(large.cast_bytes)} read and written",
        "Largest values stored in float32 (optimizer update excluded)",
        "layer_*/mlp",
        "full: ",
        "report.text(equations=False)",
        *large.advice,
    ):
        assert part in text


@pytest.mark.parametrize("with_rich", [True, False])
@pytest.mark.parametrize("which", ["large", "small"])
def test_print_has_a_row_for_each_equation(which, with_rich, large, monkeypatch):
    """Line, scope, primitive, category, dtype and reason; of 10,000 equations too."""
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    report = large
    if which == "small":
        report = explain(mlp, "mixed_bfloat16")(*mlp_args())
    assert str(report) == report.text()
    assert str(report).startswith(report.text(equations=False))
    text = render(report, 400)  # wide enough for a line a row
    _, _, body = text.partition("Equations, in program order\n\n")
    head, _, *lines = body.partition("\n\n")[0].splitlines()
    titles = ["line", "scope", "primitive", "category", "dtype", "reason"]
    assert head.split() == titles
    starts = [head.index(title) for title in titles] + [None]
    found = [
        [line[a:b].strip() for a, b in zip(starts, starts[1:], strict=False)]
        for line in lines
    ]
    assert found == [
        [r.line, r.layer, r.primitive, r.category, r.dtype, r.reason]
        for r in report.equations
    ]
    many = len(found) > 100
    assert many == (which == "large") == (f"{len(found):,} equations\n" in text)


@pytest.mark.slow
def test_text_is_the_same_every_time(run_python, large):
    assert render(large, 100) == render(large, 100)
    code = """
import jax, jax.numpy as jnp, jmp_rewrite as jmpr
x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
grad = jax.grad(lambda w, x: jnp.tanh(jax.nn.softmax(x @ w) @ w).sum())
print(jmpr.explain(grad, "mixed_float16")(x, x))
"""
    one, other = (run_python("-c", code) for _ in range(2))
    assert one.returncode == 0 and one.stdout == other.stdout != ""


def test_rich_prints_a_report_in_color():
    from rich.console import Console

    console = Console(force_terminal=True, width=100, color_system="standard")
    with console.capture() as captured:
        report = explain(mlp, "mixed_bfloat16")(*mlp_args())
        console.print(report)
    assert "\x1b[32mhalf: matrix" in captured.get()
    plain = re.sub(r"\x1b\[[\d;]*m", "", captured.get())
    assert plain.split() == render(report, 100).split()


def test_repr_is_short():
    report = explain(mlp, "mixed_bfloat16")(*mlp_args())
    assert repr(report) == "<Report on mlp under Policy('mixed_bfloat16')>"
    assert "\x1b" not in str(report)


# ---- HTML


class Page(html.parser.HTMLParser):
    """Collects what a page refers to, and its data."""

    def __init__(self, text):
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.links += [v for k, v in attributes if k in ("src", "href", "action")]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def test_the_page_holds_all_rows_and_needs_no_network(large, tmp_path):
    large.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.links == [] and page.open == []
    assert not re.search(r"https?:|@import|url\(", text)
    assert "{{" not in text
    data = json.loads(page.scripts[0])
    for n, row in enumerate(large.equations):
        for name in ("primitive", "reason", "layer", "line", "kind"):
            assert data["words"][name][data["rows"][name][n]] == getattr(row, name)
        assert data["rows"]["bytes"][n] == row.bytes
    assert len(text) < 100 * len(large.equations)


def test_names_cannot_break_the_page():
    evil = "</script><script>alert(1)</script><b>"

    def fun(x, w):
        with jax.named_scope(evil):
            return x @ w

    fun.__qualname__ = evil
    report = explain(fun, "mixed_bfloat16")(spec(8, 8), spec(8, 8))
    page = framed(report)
    assert len(page.scripts) == 2 and page.open == []
    data = json.loads(page.scripts[0])
    assert any(evil.split("/")[-1] in name for name in data["words"]["scope"])


def framed(report):
    """Returns the page that a notebook shows in a frame."""
    outer = report._repr_html_()
    assert Page(outer).scripts == []
    (inside,) = re.findall(r'srcdoc="([^"]*)"', outer)
    return Page(html.unescape(inside))


@pytest.mark.parametrize("name", ["integers", "already_half", "no_product", "epoch"])
def test_odd_programs_can_be_shown(name):
    report = explain(BY_NAME[name].fun, "mixed_bfloat16")(*BY_NAME[name].args())
    assert framed(report).open == []
    assert report.name in str(report)


# ---- picture


def test_the_picture_has_a_bar_a_scope(large):
    figure = large.plot()
    (axes,) = figure.axes
    found = scopes(large.equations, large.layers)[:16]
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == [s.title for s in found][::-1]
    widths = {c.get_label(): [p.get_width() for p in c] for c in axes.containers}
    assert widths == {
        "half": [s.half for s in found][::-1],
        "float32": [s.full for s in found][::-1],
        "registers": [s.register for s in found][::-1],
    }


def test_a_notebook_shows_the_picture_without_pyplot(large):
    assert large.plot()._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = explain(mlp, "mixed_bfloat16")(*mlp_args())
    with pytest.raises(ImportError, match=r"pip install 'jmp_rewrite\[report\]'"):
        report.plot()


def test_a_forward_function_leads_with_its_weights():
    """Bytes of weights and caches, and what `for_inference` would store them in."""

    def decode(params, cache, x):
        cache = lax.dynamic_update_slice(cache, x @ params["w"], (3, 0))
        return cache @ params["w"].T * params["scale"], cache

    params = {"scale": jnp.ones((1, 64)), "w": jnp.ones((64, 64))}
    args = params, jnp.zeros((32, 64)), jnp.ones((1, 64))
    report = explain(decode, "mixed_bfloat16")(*args)
    weights, caches = report.serving
    assert (weights.before, weights.after) == (4 * 65 * 64, (4 + 2 * 64) * 64)
    assert (caches.before, caches.after) == (4 * 32 * 64, 2 * 32 * 64)
    first, second = document(report).facts[:2]
    assert first == (
        "weights",
        "16.6 kB of float32; for_inference stores them in 8.45 kB",
    )
    assert second[0] == "caches"
    step = jax.grad(lambda *a: decode(*a)[0].sum())
    backward = explain(step, "mixed_bfloat16")(*args)
    assert backward.serving is None and "for_inference" not in str(backward)
    assert explain(decode, "float32")(*args).serving is None


def test_what_unrolled_steps_are_made_of_is_counted_once():
    """Each step reads the last one three times: 3 ** 24 paths lead to the first."""

    def loss(w, x):
        u = jnp.tanh(x @ w)
        for _ in range(24):
            u = u + 0.1 * u * (1 - u)
        return jnp.mean((u @ w) ** 2)

    report = explain(jax.value_and_grad(loss), "mixed_bfloat16")
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    assert 0 < report(w, x).residual_bytes < 2**20
