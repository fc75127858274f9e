"""The rules of docs/precision.md, one by one, with both sides of each line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import EPS, dtypes_in, dtypes_out, eqns, products, trace, walk
from jax import lax
from programs import weights

from jmp_rewrite import explain, for_inference, mixed_precision, use_passes

W = 8
POLICIES = ["mixed_bfloat16", "mixed_float16"]
both = pytest.mark.parametrize("policy", POLICIES)


def rewritten(fun, *args, policy="mixed_bfloat16"):
    return trace(mixed_precision(fun, policy), *args)


def sums(jaxpr, shape):
    """Returns the dtypes of the sums of a shape that are no bias' or gradient's."""
    return [
        dtypes_out(e)[0]
        for e in eqns(jaxpr, "add", "sub")
        if e.outvars[0].aval.shape == shape and len(e.invars) == 2
    ]


def is_stored_in_half(jaxpr, shape):
    """Whether a sum of this shape is half, or rounded behind float32 arithmetic."""
    added = [
        e.outvars[0]
        for e in eqns(jaxpr, "add", "sub")
        if e.outvars[0].aval.shape == shape
    ]
    narrow = {
        e.invars[0]
        for e in walk(jaxpr)
        if e.primitive.name in ("convert_element_type", "round", "saturating_cast")
        and e.outvars[0].aval.dtype.itemsize == 2
    }
    return any(v.aval.dtype.itemsize == 2 or v in narrow for v in added)


# ---- 1. Exact values


def tied(p, ids):
    """A residual stream that begins with rows of the table of its head."""
    x = p["table"][ids]
    return (x + jnp.tanh(x @ p["w"])) @ p["table"].T


def untied(p, ids):
    x = p["table"][ids]
    return (x + jnp.tanh(x @ p["w"])) @ p["head"].T


def rows_of_data(p, ids):
    """Rows of an array that parameters alone are multiplied by."""
    x = p["table"][ids]
    return (x + jnp.tanh(p["table"] @ p["w"])[ids]) @ p["w"]


def differences_of_rows(p, ids):
    x = p["table"][ids] - p["table"][ids - 1]
    return (x + jnp.tanh(x @ p["w"])) @ p["table"].T


def table(width=W):
    return {"table": np.ones((16, width), "f"), "w": np.zeros((width, width), "f")}


@both
@pytest.mark.parametrize(
    ("fun", "is_stored"),
    [
        (tied, True),
        (untied, False),
        (rows_of_data, False),
        (differences_of_rows, False),
    ],
)
def test_rows_of_a_tied_table_are_activations(fun, is_stored, policy):
    p = {**table(), "head": np.ones((16, W), "f")}
    kept = for_inference(fun, policy).report(p, np.arange(1, 5)).kept
    assert ("0/table" not in [leaf.path for leaf in kept]) == is_stored


@pytest.mark.slow
@both
def test_cotangents_of_a_tied_table_are_added_up_in_float32(policy):
    ids = np.zeros(4096, int)

    def grad(fun):
        loss = jax.grad(lambda p: jnp.mean(fun(p, ids)[:, 0]))
        return jax.jit(loss)(table())["table"]

    found, exact = grad(mixed_precision(tied, policy)), grad(tied)
    np.testing.assert_allclose(found, exact, rtol=EPS[policy])


def test_a_table_that_much_exact_arithmetic_makes():
    """What is read twice at each of sixty steps has 2^60 paths to it."""

    def fun(p, ids):
        made = p["table"]
        for _ in range(60):
            made = made * made + made
        return tied({"table": made, "w": p["w"]}, ids)

    kept = for_inference(fun, "mixed_bfloat16").report(table(), np.arange(4)).kept
    assert [leaf.path for leaf in kept] == ["0/table"]


def test_explain_names_a_tied_table():
    report = explain(tied, "mixed_bfloat16")(table(), np.arange(64))
    assert "as an activation is multiplied by the table" in " ".join(
        str(report).split()
    )


# ---- 2. State


def stack(x, *ws):
    """A residual stream: each layer has weights of its own."""
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return x


def iterate(x, w):
    for _ in range(3):
        x = x + 1e-3 * jnp.tanh(x @ w)
    return x


ORIGINS = {
    "argument": lambda x: x,
    "slice": lambda x: jnp.stack([x, x])[0],
    "gather": lambda x: x[jnp.arange(W)],
    "mean": lambda x: jnp.stack([x, x]).mean(0),
    "pad": lambda x: jnp.pad(x, ((1, 1), (0, 0)))[1:-1],
    "draw": lambda x: jax.random.normal(jax.random.key(0), x.shape),
    "product": lambda x: x @ x,
}


@both
@pytest.mark.parametrize("origin", ORIGINS)
def test_states_and_layers(origin, policy):
    """An iteration is exact wherever it starts; layers are half as by hand."""
    w1, w2, w3, head, x = weights(*[(W, W)] * 5)

    def state(x, w):
        start = ORIGINS[origin](x)
        return iterate(start, w) - start

    exact = np.asarray(state(x, w1))
    change = np.asarray(mixed_precision(state, policy)(x, w1))
    error = np.linalg.norm(change - exact) / np.linalg.norm(exact)
    assert error < 4 * EPS[policy]

    def layers(ws, x):
        *ws, head = ws
        return jnp.sum((stack(ORIGINS[origin](x), *ws) @ head) ** 2)

    ws = (w1, w2, w3, head)
    plain = jax.make_jaxpr(lambda x: ORIGINS[origin](x))(x)
    own = len(eqns(plain, "add", "sub"))
    jaxpr = rewritten(jax.grad(layers), ws, x, policy=policy)
    assert len(sums(jaxpr, (W, W))) > own
    assert is_stored_in_half(jaxpr, (W, W))


@both
def test_a_gradient_step_is_state_of_any_origin(policy):
    ws, x, y = weights((2, W, W), (W, W), (W, W))

    def member(ws):
        w = ws[0]
        for _ in range(2):
            loss = lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2)  # noqa: E731
            w = w - 1e-4 * jax.grad(loss)(w)
        return w - ws[0]

    exact, found = (
        np.asarray(member(ws)),
        np.asarray(mixed_precision(member, policy)(ws)),
    )
    assert np.linalg.norm(found - exact) < 4 * EPS[policy] * np.linalg.norm(exact)


@both
def test_an_operator_and_its_transpose_are_a_gradient(policy):
    a, b, w = weights((W, W), (W, W), (2, W, W))

    def descend(w):
        new = w[0] - 1e-4 * (a.T @ (a @ w[0] - b))
        return jnp.tanh(new @ b) @ a, new - w[0]

    exact = np.asarray(descend(w)[1])
    found = np.asarray(mixed_precision(descend, policy)(w)[1])
    assert np.linalg.norm(found - exact) < 4 * EPS[policy] * np.linalg.norm(exact)


def test_a_gate_that_two_statistics_share_is_a_layer():
    """One network of a mean and of a maximum is no operator and its transpose."""

    def layers(ws, x):
        *ws, head = ws
        for down, up in ws:
            mean, largest = (jax.nn.relu(s @ down) @ up for s in (x.mean(1), x.max(1)))
            x = x + jnp.tanh(x * jax.nn.sigmoid(mean + largest)[:, None])
        return jnp.sum((x @ head) ** 2)

    first, *ws, head = weights(*[(W, W)] * 6)
    ws = list(zip(ws[::2], ws[1::2], strict=True))
    (x,) = weights((2, 64, W))
    gradient = jax.grad(lambda ws, x: layers(ws, x @ first))
    report = explain(gradient)([*ws, head], x)
    assert not any("state" in e.reason for e in report.equations)


@pytest.mark.slow
def test_scanned_layers_are_no_state():
    """What a scan carries leads from each weight to itself: another one, by then."""
    seen = jnp.tril(jnp.ones((1, 4, 4), bool))

    def norm(x):
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def layer(x, ws):
        h = norm(x)
        scores = (h @ ws[0]) @ (h @ ws[1]).swapaxes(-1, -2)
        weight = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + weight @ (h @ ws[2]) @ ws[3]
        return x + jax.nn.silu(norm(x) @ ws[4]) @ ws[5], None

    def loss(params, tokens):
        table, ws, head = params
        x, _ = lax.scan(layer, table[tokens], ws)
        return jnp.mean(jnp.square(x @ head))

    params = weights((W, W), (3, 6, W, W), (W, W))
    jaxpr = rewritten(jax.grad(loss), params, jnp.arange(8).reshape(2, 4))
    scores, *_ = (e for e in products(jaxpr) if e.outvars[0].aval.shape == (2, 4, 4))
    assert dtypes_out(scores) == ["bfloat16"]


def coupled(streams, ws):
    a, b = streams
    a = a + jnp.tanh(b @ ws[0]) @ ws[1]
    return a, b + jnp.tanh(a @ ws[2]) @ ws[3]


def uncoupled(streams, ws):
    a, b = streams
    b = b - jnp.tanh(a @ ws[2]) @ ws[3]
    return a - jnp.tanh(b @ ws[0]) @ ws[1], b


def reversible(ws, x, inverse, scanned):
    """Layers of two streams, and their inverse, or as many layers more."""
    streams, depth = (x @ ws[0, 0], x @ ws[0, 1]), len(ws) // 2
    back = uncoupled if inverse else coupled
    first = ws[:depth]
    second = first if inverse else ws[depth:]
    if scanned:
        both = [(coupled, first), (back, second)]
        for layer, own in both:
            step = lambda c, w, layer=layer: (layer(c, w), None)  # noqa: E731
            streams, _ = lax.scan(step, streams, own, reverse=layer is uncoupled)
    else:
        for i in range(depth):
            streams = coupled(streams, first[i])
        for i in range(depth):
            streams = back(streams, second[depth - 1 - i if inverse else i])
    return (streams[0] + streams[1]) @ ws[0, 2]


@both
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_stream_that_is_taken_apart_again_is_state(inverse, scanned, policy):
    """A reversible network computes its input again, and its errors with it."""
    (ws,) = weights((6, 4, W, W))
    x = jnp.ones((32, W))
    fun = lambda w, x: reversible(w, x, inverse, scanned)  # noqa: E731
    jaxpr = rewritten(fun, ws, x, policy=policy)
    # What the last product reads is one sum more.
    streams = sums(jaxpr, (32, W))[:-1]
    if scanned:
        streams = [d for e in eqns(jaxpr, "scan") for d in dtypes_out(e)]
    assert len(streams) > 3
    if inverse:
        assert set(streams) == {"float32"}
    elif scanned:
        assert set(streams) == {policy.removeprefix("mixed_")}
    else:
        assert is_stored_in_half(jaxpr, (32, W))


def test_a_carry_through_a_denied_primitive_is_float32():
    w, x = weights((W, W), (4, W))

    def f(w, x):
        def body(a, t):
            return jnp.log(jnp.sum(jnp.exp(a[:, None] + t), 0)), None

        return lax.scan(body, x[0], (x @ w)[:, :, None] * jnp.ones((1, 1, W)))[0]

    (scan,) = eqns(rewritten(f, w, x), "scan")
    assert dtypes_out(scan)[0] == "float32"


# ---- 3. Code that multiplies an error


@both
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(W)),
        lambda x: jnp.sin(3 * (x @ x.T)),
        lambda x: jnp.floor(10 * (x @ x.T)),
        lambda x: (10 * (x @ x.T)).astype(jnp.int32),
        lambda x: x @ x.T,
        lambda x: jnp.mean((x @ x.T) ** 2),
    ],
    ids=["cholesky", "sin", "floor", "integer", "result", "loss"],
)
def test_a_product_that_float32_code_alone_reads_is_not_rounded(fun, policy):
    (x,) = weights((W, W))
    (product,) = products(rewritten(fun, x, policy=policy))
    assert dtypes_out(product) == ["float32"]


@both
def test_its_cotangent_is_rounded_before_it_is_multiplied(policy):
    """No product of a float32 cotangent and a half operand is left to XLA."""
    x, w = weights((W, W), (W, W))
    loss = mixed_precision(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2), policy)
    found = products(trace(jax.grad(loss), w))
    assert len(found) == 2
    assert all(len(set(dtypes_in(e))) == 1 for e in found)
    assert {dtypes_in(e)[0] for e in found} == {policy.removeprefix("mixed_")}


def snakes(ws, x):
    """A vocoder's nonlinearity: a sine, and what it is added to."""
    for w in ws:
        h = x @ w
        x = h + jnp.sin(h) ** 2
    return x @ ws[0]


def sines(ws, x):
    """A network of sines between its layers, which begins with coordinates."""
    for w in ws:
        x = jnp.sin(3 * (x @ w))
    return x @ ws[0]


@both
def test_a_sine_of_an_activation_that_is_read_elsewhere_too(policy):
    """It is no phase: the product's half result is read by both, as by hand."""
    ws, x = weights((3, W, W), (W, W))
    half = policy.removeprefix("mixed_")
    for fun in (snakes, jax.grad(lambda ws, x: jnp.mean(snakes(ws, x) ** 2))):
        jaxpr = rewritten(fun, list(ws), x, policy=policy)
        assert all(set(dtypes_in(e)) == {half} for e in products(jaxpr))
        forward = products(jaxpr)[:3]
        assert {dtypes_out(e)[0] for e in forward} == {half}
    report = explain(snakes, policy)(list(ws), x)
    assert not any("read unrounded by sin" in e.reason for e in report.equations)


@both
def test_a_network_of_sines(policy):
    """Its layers have half operands and float32 results; what reads data is exact."""
    ws, x = weights((3, W, W), (W, W))
    half = policy.removeprefix("mixed_")
    first, *layers, last = products(rewritten(sines, list(ws), x, policy=policy))
    assert set(dtypes_in(first)) == {"float32"}
    assert all(set(dtypes_in(e)) == {half} for e in layers)
    assert {dtypes_out(e)[0] for e in layers} == {"float32"}
    assert set(dtypes_in(last)) == {half}


@both
@pytest.mark.parametrize(
    "phase",
    [lambda x, w: x @ w, lambda x, w: (x @ w) @ w],
    ids=["features", "a rotation before"],
)
def test_a_phase_is_a_product_of_data_that_sines_alone_read(phase, policy):
    x, w = weights((W, W), (W, W))
    jaxpr = rewritten(lambda x, w: jnp.sin(9 * phase(x, w)) @ w, x, w, policy=policy)
    assert set(dtypes_in(products(jaxpr)[-2])) == {"float32"}


@both
@pytest.mark.parametrize(
    "moved",
    [
        lambda x, w: x + jnp.tanh(x @ w) @ w,
        lambda x, w: jnp.concatenate([jnp.tanh(x @ w) @ w, x], 1),
        lambda x, w: x * (jnp.tanh(x @ w) @ w),
    ],
    ids=["added", "beside", "multiplied"],
)
def test_a_sine_of_data_and_activations_reads_unrounded_values(moved, policy):
    """Though other code reads them, too: coordinates that a network moves."""
    x, w, v = weights((W, W), (W, W), (2 * W, W))

    def f(x, w, v):
        h = 9 * moved(x, w)
        v = v[: h.shape[1]]
        return jnp.sin(h) @ v + h @ v

    report = explain(f, policy)(x, w, v)
    (scaled,) = [e for e in report.equations if e.primitive == "mul"][-1:]
    assert scaled.dtype == "float32" and "read unrounded by sin" in scaled.reason


def test_parts_of_a_value_are_not_the_value():
    """`concatenate([x, -x])`: its cotangent's halves are subtracted, and two values."""
    w, v, x = weights((W, W), (2 * W, W), (64, W))

    def loss(w, v, x):
        h = x @ w
        return jnp.mean((jax.nn.elu(jnp.concatenate([h, -h], 1)) @ v) ** 2)

    report = explain(jax.grad(loss), "mixed_bfloat16")(w, v, x)
    assert not any("difference" in e.reason for e in report.equations)


def test_explain_names_the_reader():
    (x,) = weights((W, W))
    report = explain(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(W)), "bfloat16")(x)
    text = " ".join(e.reason for e in report.equations)
    assert "read unrounded by cholesky at" in text and "test_principle.py" in text


def test_explain_names_the_update():
    (x, w) = weights((W, W), (W, W))
    report = explain(iterate, "bfloat16")(x, w)
    reasons = [e.reason for e in report.equations if e.primitive == "add"]
    assert any("state: updated in its own shape at" in r for r in reasons)


@pytest.mark.slow
@both
def test_an_offset_is_added_behind_the_rounding(policy):
    x, w1, w2 = weights((W, W), (W, W), (W, W))
    mean, std = jnp.full((1, W), 3000.0), jnp.full((1, W), 100.0)

    def units(x, mean, std):
        y = (x @ w1) * std + mean
        return ((y - mean) / std) @ w2

    exact = np.asarray(x, np.float64) @ np.asarray(w1, np.float64) @ np.asarray(w2)
    found = np.asarray(mixed_precision(units, policy)(x, mean, std), np.float64)
    assert np.linalg.norm(found - exact) < 3 * EPS[policy] * np.linalg.norm(exact)


@both
@pytest.mark.parametrize("shape, rounded", [((W, W), False), ((W,), True)])
def test_an_exact_array_is_added_behind_the_rounding(shape, rounded, policy):
    """One of the sum's size, as a network's input; a bias is rounded with the sum."""
    x, w, v, added = weights((W, W), (W, W), (W, W), shape)

    def loss(w):
        h = x @ w + added[(None,) * (2 - added.ndim)]
        return jnp.sum((h * jnp.tanh(h) @ v) ** 2)

    report = explain(jax.grad(loss), policy)(w)
    why = " ".join(e.reason for e in report.equations if e.primitive == "add")
    assert ("an exact array is added" in why) is not rounded


@pytest.mark.parametrize("update, is_kept", [("running", True), ("layer", False)])
def test_a_running_sum_of_an_exact_array_is_not_rounded(update, is_kept):
    """What has weights between it and the array is a layer, and its sum a stream."""
    x, y, u, v, w = weights((W, W), (W, W), (W, W), (W, W), (W, W))

    def fun(x):
        h = x + jnp.tanh(y @ u)
        h = h + jnp.tanh((y if update == "running" else h) @ v)
        return (h - h.mean(1, keepdims=True)) @ w

    report = explain(fun, "mixed_bfloat16")(x)
    (_, last) = [e.reason for e in report.equations if e.primitive == "add"]
    assert ("an exact array is added" in last) is is_kept


def test_a_bias_that_is_spread_is_no_exact_array_of_its_sum():
    x, w, v, bias = weights((W, W), (W, W), (W, W), (W,))

    def loss(w):
        h = x @ w + jnp.broadcast_to(bias, (W, W))
        return jnp.sum((h * jnp.tanh(h) @ v) ** 2)

    report = explain(jax.grad(loss), "mixed_bfloat16")(w)
    why = " ".join(e.reason for e in report.equations if e.primitive == "add")
    assert "an exact array is added" not in why


@pytest.mark.parametrize("bias", [True, False])
def test_a_difference_from_an_exact_array_reads_unrounded_values(bias):
    """Only if the other operand is float32 by promotion as well."""
    x, y, w, v, b = weights((W, W), (W, W), (W, W), (W, W), (W, W))
    h = lambda x: jnp.tanh(x @ w + b if bias else x @ w)  # noqa: E731
    fun = lambda x: (h(x) - y) @ v  # noqa: E731
    report = explain(fun, "mixed_bfloat16")(x)
    (why,) = [e.reason for e in report.equations if e.primitive == "tanh"]
    assert ("read unrounded by a difference" in why) is bias


@pytest.mark.parametrize("own", [True, False])
def test_only_its_own_statistic_is_no_offset(own):
    """A normalization takes off a mean of its operand; another one's is an offset."""
    x, w, v = weights((64, W), (W, W), (W, W))

    def fun(x):
        mean = jnp.mean(x + 1000, -1, keepdims=True)
        h = mean + jnp.tanh(x @ w)
        return (h - (jnp.mean(h, -1, keepdims=True) if own else mean)) @ v

    report = explain(fun, "mixed_bfloat16")(x)
    why = [e.reason for e in report.equations if e.primitive == "add"][-1]
    assert ("read unrounded by a difference" in why) is not own


def test_explain_names_a_logarithm():
    x, w, v, b = weights((W, W), (W, W), (W, W), (W, W))
    fun = lambda x: jnp.log(2 + jnp.tanh(x @ w + b)) @ v  # noqa: E731
    report = explain(fun, "mixed_bfloat16")(x)
    (why,) = [e.reason for e in report.equations if e.primitive == "tanh"]
    assert "read unrounded by log at test_principle.py:" in why


@both
@pytest.mark.parametrize("scale", [1e6, 2.0])
def test_what_a_number_out_of_range_scales_is_not_rounded(scale, policy):
    x, w, v = weights((W, W), (W, W), (W, W))
    jaxpr = rewritten(lambda x: (x @ w) * scale @ v, x, policy=policy)
    first = dtypes_out(products(jaxpr)[0])
    fits = scale < 65504 or policy == "mixed_bfloat16"
    assert (first == ["float32"]) is not fits


def test_a_negative_of_a_term_is_a_difference():
    """In the backward pass of a finite difference; a GELU's adds what is no term."""

    def reasons(fun):
        w, x = weights((W, W), (4, W))
        loss = lambda w: jnp.sum(jnp.square(fun(x @ w + x) @ w))  # noqa: E731
        report = explain(jax.grad(loss), "mixed_bfloat16")(w)
        return " ".join(e.reason for e in report.equations if "add" in e.primitive)

    w = weights((W, W))[0]
    step = lambda h: (h + 1e-2 * jnp.tanh(h @ w)) - h  # noqa: E731
    assert "read unrounded by a difference" in reasons(step)
    gelu = lambda h: jax.nn.gelu(h, approximate=False)  # noqa: E731
    assert "read unrounded by a difference" not in reasons(gelu)


@both
def test_cotangents_that_a_returned_gradient_is_a_sum_of(policy):
    """The residual of a fixed point: what its gradient adds up nearly cancels."""
    (w,), x, b = weights((32, 32)), jnp.ones((16, 32)), jnp.zeros((16, 32))

    def loss(w, b):
        z = jnp.tanh(x @ w + b)
        return jnp.square(z - jnp.tanh(z @ w + b)).sum()

    with use_passes("none"):
        found = rewritten(jax.grad(loss, argnums=(0, 1)), w, b, policy=policy)
    widened = {
        e.outvars[0]
        for e in eqns(found, "convert_element_type")
        if e.invars[0].aval.dtype.itemsize == 2
    }
    of_b = found.jaxpr.outvars[1]
    (last,) = [e for e in eqns(found, "add_any") if e.outvars[0] is of_b]
    assert widened.isdisjoint(last.invars)


# ---- 5. Products that stay float32


@pytest.mark.slow
def test_zeros_and_ones_copy_exact_values():
    (pixels,) = weights((1, 6, 6, 1))
    patches = lambda x: lax.conv_general_dilated_patches(  # noqa: E731
        x, (3, 3), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    plain, found = patches(pixels), mixed_precision(patches, "mixed_bfloat16")(pixels)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(found))


@jax.custom_jvp
def spikes(v):
    return (v > 0).astype(jnp.float32)


spikes.defjvp(lambda read, moved: (spikes(*read), moved[0] / (1 + read[0] ** 2)))


@pytest.mark.parametrize(
    "activation",
    [
        spikes,
        lambda v: jnp.where((v > 0) & (v < 9), 1.0, 0.0),
        lambda v: jnp.where((v > 0) ^ (v[::-1] > 0), 1.0, 0.0),
    ],
)
def test_spikes_are_activations(activation):
    x, *ws = weights((W, W), (W, W), (W, W), (W, 8))

    def loss(ws, x):
        for w in ws:
            x = activation(x @ w)
        return x.sum()

    report = explain(jax.value_and_grad(loss), "mixed_bfloat16")(ws, x)
    assert report.half_flops == 1


def test_selected_activations_are_half():
    x, w = weights((W, W), (W, W))
    select = lambda x: jnp.eye(W)[::-1] @ jnp.tanh(x @ w) @ w  # noqa: E731
    assert all(
        set(dtypes_in(e)) == {"bfloat16"} for e in products(rewritten(select, x))
    )


@pytest.mark.parametrize("terms, kept", [(4, True), (5, False)])
def test_short_sums_of_exact_values_are_arithmetic(terms, kept):
    x, w = weights((32, terms), (terms, 32))
    (product,) = products(rewritten(lambda x, w: x @ w, x, w))
    assert (dtypes_in(product)[0] == "float32") is kept


# ---- 6. Small values


@pytest.mark.parametrize("size, half", [(4, False), (32, True)])
def test_small_values_are_not_stored_in_half(size, half):
    """Sixteen numbers take a line of a cache in either dtype."""
    w, v, x = weights((4, 4), (4, 4), (size // 4, 4))

    def loss(w):
        h = jnp.tanh(x @ w)
        return jnp.sum((jnp.exp(-h) @ v + h) ** 2)

    jaxpr = rewritten(jax.grad(loss), w)
    cast = [
        e
        for e in walk(jaxpr)
        if e.primitive.name in ("convert_element_type", "tanh")
        and e.outvars[0].aval.dtype == jnp.bfloat16
        and e.outvars[0].aval.shape == (size // 4, 4)
    ]
    assert bool(cast)
    kept = [e for e in eqns(jaxpr, "tanh") if dtypes_out(e) == ["bfloat16"]]
    assert not kept or half


def fixed_point(is_near, w):
    """Iterates a layer until two results in a row are near."""

    def wait(state):
        return ~state[1]

    def step(state):
        new = jnp.tanh(state[0] @ w)
        return new, is_near(new, state[0])

    return lambda x: lax.while_loop(wait, step, (x, jnp.asarray(False)))[0]


NEAR = {
    "largest": lambda a, b, tol: jnp.max(jnp.abs(a - b)) < tol,
    "norm": lambda a, b, tol: jnp.linalg.norm(a - b) <= tol * (1 + jnp.linalg.norm(b)),
    "guarded": lambda a, b, tol: (
        jnp.linalg.norm(a - b) <= tol * (1e-6 + jnp.linalg.norm(b))
    ),
    "square": lambda a, b, tol: jnp.sum(jnp.square(a - b)) < tol**2,
    "share": lambda a, b, tol: (
        jnp.sqrt(jnp.mean(jnp.square((a - b) / (tol + tol * jnp.abs(b))))) < 1
    ),
    "allclose": lambda a, b, tol: jnp.allclose(a, b, rtol=tol, atol=tol),
}


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_advice_on_a_loop_that_may_never_end(near):
    w, x = weights((W, W), (W, W))

    def advice(tolerance):
        fun = fixed_point(lambda a, b: near(a, b, tolerance), w)
        return " ".join(explain(fun, "bfloat16")(x).advice)

    assert "waits for a value below 1e-" in advice(1e-5)
    assert "full_precision" in advice(1e-5)
    assert "waits" not in advice(0.25)


def test_advice_on_a_loop_whose_tolerance_is_an_argument():
    w, x = weights((W, W), (W, W))

    def fun(x, tolerance):
        return fixed_point(lambda a, b: NEAR["largest"](a, b, tolerance), w)(x)

    advice = " ".join(explain(fun, "bfloat16")(x, jnp.float32(1e-5)).advice)
    assert "waits for a value below a number that it is given" in advice


@pytest.mark.parametrize("bounded", [False, True])
def test_a_loop_that_may_never_end_is_logged_where_it_is_traced(bounded, caplog):
    w, x = weights((W, W), (W, W))

    def wait(state):
        is_far = state[1] > 1e-5
        return is_far & (state[2] < 100) if bounded else is_far

    def step(state):
        new = jnp.tanh(state[0] @ w)
        return new, jnp.max(jnp.abs(new - state[0])), state[2] + 1

    def fun(x):
        return lax.while_loop(wait, step, (x, jnp.float32(1), 0))[0]

    rewritten(fun, x)
    assert ("waits for a value below 1e-05" in caplog.text) != bounded
    assert bounded or "test_principle.py" in caplog.text
    advice = " ".join(explain(fun, "bfloat16")(x).advice)
    assert ("bound the number of iterations" in advice) != bounded


def test_the_cotangent_of_a_sum_is_made_of_nothing():
    w, x = weights((W, W), (W, W))
    rewritten(jax.grad(lambda w: jnp.sum(x @ w + w[:1])), w)


def test_a_loop_that_ends_by_a_carried_flag_is_not_logged(caplog):
    w, x = weights((W, W), (W, W))

    def step(state):
        x, _, number = state
        new = jnp.tanh(x @ w)
        ends = (jnp.max(jnp.abs(new - x)) < 1e-5) | (number >= 100)
        return new, ends, number + 1

    rewritten(lambda x: lax.while_loop(lambda s: ~s[1], step, (x, False, 0))[0], x)
    assert "waits for" not in caplog.text


def test_a_loop_in_which_nothing_is_rounded_gets_no_advice():
    w, x = weights((W, W), (W, W))

    def root(a):  # what it converges to has been rounded, and no more is
        def step(state):
            new = (state[0] + a / state[0]) / 2
            return new, jnp.max(jnp.abs(new - state[0]))

        begin = jnp.ones_like(a), jnp.float32(1)
        return lax.while_loop(lambda s: s[1] > 1e-5, step, begin)[0]

    report = explain(lambda x: root(jnp.exp(x @ w)), "bfloat16")(x)
    assert report.half_flops == 1
    assert "waits for" not in " ".join(report.advice)


def test_advice_on_a_number_that_hides_what_it_is_added_to():
    w, x = weights((W, W), (W, W))
    offset = lambda number: lambda x: jnp.tanh(x @ w + number) @ w  # noqa: E731
    assert any(
        "300 is added" in a for a in explain(offset(300.0), "bfloat16")(x).advice
    )
    assert not any("is added" in a for a in explain(offset(3.0), "bfloat16")(x).advice)


# ---- zeros


def test_a_norm_that_takes_off_zeros_subtracts_no_offset():
    """Norms without a mean are written with one of zeros, as Flax' RMSNorm is."""

    def layers(x, taken, *ws):
        for w in ws:
            scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            x = x + jnp.tanh(((x - jnp.full_like(x, taken)) * scale) @ w)
        return x @ ws[0]

    args = weights((64, W), (W, W), (W, W))

    def reasons(taken):
        report = explain(lambda x, *ws: layers(x, taken, *ws), "mixed_bfloat16")(*args)
        return [e.reason for e in report.equations]

    read = "read unrounded by a difference"
    assert not any(read in reason for reason in reasons(0.0))
    assert any(read in reason for reason in reasons(1000.0))


def test_a_product_with_zeros_asks_for_no_exact_weight():
    """A recurrent layer's first step, unrolled, multiplies its first carry: zeros."""

    def rnn(w, v, xs):
        h = jnp.zeros((4, W))
        for x in xs:
            h = jnp.tanh(x @ v + h @ w)
        return h @ w

    w, v, xs = (*weights((W, W), (W, W)), jnp.ones((3, 4, W)))
    for product in products(rewritten(rnn, w, v, xs)):
        assert dtypes_in(product)[:2] == ["bfloat16"] * 2


@pytest.mark.parametrize("name", ["adabelief", "optimistic_gradient_descent"])
def test_what_an_optimizer_subtracts_asks_nothing_of_layers(name):
    """A gradient is a float32 sum; its terms are stored as they are for Adam."""

    def kept(tx):
        def step(params, state, x):
            loss = lambda p: jnp.mean(jnp.tanh(jnp.tanh(x @ p[0] + p[1]) @ p[2]))  # noqa: E731
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        w, v, x = weights((W, W), (W, W), (64, W))
        params = w, jnp.zeros((1, W)), v
        args = params, tx.init(params), x
        return explain(step, "mixed_bfloat16")(*args).residual_bytes

    with jax.numpy_dtype_promotion("standard"):
        assert kept(getattr(optax, name)(1e-3)) == kept(optax.adam(1e-3))


def test_what_is_subtracted_in_each_iteration_asks_nothing_of_layers():
    """A gradient is a float32 sum, whatever the next iteration multiplies with."""

    def loss(params, x):
        for w, b in params:
            x = jnp.tanh(x @ w + b[None])
        return jnp.mean(x**2)

    def epoch(update):
        def step(params, x):
            return jax.tree.map(update, params, jax.grad(loss)(params, x)), None

        return lambda params, xs: lax.scan(step, params, xs)[0]

    params, xs = (
        [(w, jnp.zeros(W)) for w in weights(*[(W, W)] * 3)],
        jnp.ones((2, 4, W)),
    )
    xs = jnp.ones((2, 4, W))
    minus, plus = (lambda p, g: p - 0.1 * g), (lambda p, g: p + g * -0.1)
    kept = [
        explain(epoch(update), "mixed_bfloat16")(params, xs).residual_bytes
        for update in (minus, plus)
    ]
    assert kept[0] == kept[1]


def test_a_pool_and_its_derivative_read_the_same_rounded_values():
    """Neither keeps the float32 values that a norm has made."""

    def loss(params, x):
        w, scale, v = params
        y = x @ w
        y = jax.nn.relu((y - y.mean(0)[None]) * scale[None])
        y = lax.reduce_window(y, -jnp.inf, lax.max, (3, 1), (2, 1), "SAME")
        return jnp.mean((y @ v) ** 2)

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    w, v, x = weights((W, W), (W, W), (64, W))
    jaxpr = rewritten(step, (w, jnp.ones(W), v), x)
    both = eqns(jaxpr, "reduce_window_max", "select_and_scatter_add")
    assert len(both) == 2
    assert {d for e in both for d in dtypes_in(e)} == {"bfloat16"}
