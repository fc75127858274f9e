"""What the programs of `amplification.py` are made of.

Every value is f32[8,8], so that shapes are few and any value may follow any other. Its
class is "u", of about unit size, or "L", a level: large numbers near each other. An op
is given the environment, for weights and units, and its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N = 8
SHAPE = (N, N)
IDS = np.array([2, 0, 3, 3, 7, 1, 5, 6])
MASK = np.tril(np.ones(SHAPE, bool))
CAPTURED = np.random.RandomState(9).randn(*SHAPE).astype("f4") * 0.35
f32 = np.float32
# Names of arguments, and the class of those that ops may read: weights come first.
ARGUMENTS = {
    "x": "u",
    "w1": "u",
    "w2": "u",
    "stack": "stack",
    "y": "u",
    "level": "L",
    "levels": "levels",
    "bias": "bias",
    "mean": "unit",
    "std": "unit",
}
WEIGHTS = ("x", "w1", "w2", "stack")


def arguments(seed: int) -> tuple[Any, ...]:
    """Draws the arguments of a program."""
    rng = np.random.RandomState(seed)
    normal = lambda *shape: rng.randn(*shape).astype(f32)  # noqa: E731
    scale = f32(N**-0.5)
    values = {
        "x": normal(*SHAPE),
        "y": normal(*SHAPE),
        "w1": normal(*SHAPE) * scale,
        "w2": normal(*SHAPE) * scale,
        "stack": normal(3, *SHAPE) * scale,
        "level": 1000 + normal(*SHAPE),
        "levels": 1000 + normal(3, *SHAPE),
        "bias": normal(N) * f32(0.1),
        "mean": np.full(N, 1e5, f32),
        "std": np.full(N, 1e3, f32),
    }
    return tuple(values[name] for name in ARGUMENTS)


class Op(NamedTuple):
    """An op: its function, the classes of its operands and of its result, a group."""

    fun: Callable[..., Any]
    takes: str
    gives: str
    group: str


def _group(name: str, takes: str, gives: str, **funs: Any) -> dict[str, Op]:
    return {k: Op(f, takes, gives, name) for k, f in funs.items()}


def _norm(a: Any) -> Any:
    centered = a - a.mean(1, keepdims=True)
    return centered * lax.rsqrt((centered**2).mean(1, keepdims=True) + 1e-5)


def _rows(x: Any) -> Any:
    return jnp.broadcast_to(x, SHAPE)


def _attention(e: Any, a: Any) -> Any:
    scores = (a @ e["w1"]) @ (a @ e["w2"]).T * N**-0.5
    return jax.nn.softmax(jnp.where(MASK, scores, -1e9), axis=1) @ a


def _conv(e: Any, a: Any) -> Any:
    out = lax.conv_general_dilated(
        a[None, :, :, None],
        e["w1"][:3, :3, None, None],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return out[0, :, :, 0]


def _patches(e: Any, a: Any) -> Any:
    out = lax.conv_general_dilated_patches(a[None, None], (2, 2), (1, 1), "SAME")
    return out[0, 0] - out[0, 3]


def _distances(a: Any) -> Any:
    p = a[:, :3]
    d = p[:, None] - p[None]
    return d, jnp.sqrt((d**2).sum(-1) + 1e-2)


def _spd(a: Any) -> Any:
    return a @ a.T + jnp.eye(N)


def _split_joined(e: Any, a: Any) -> Any:
    left, right = jnp.split(a, 2, axis=1)
    return jnp.concatenate([right, left], 1)


def _fused(e: Any, a: Any) -> Any:
    """Two layers by one product."""
    return a @ jnp.concatenate([e["w1"], e["w2"]], 1)


def _in_slices(h: Any) -> Any:
    return h[:, :N], h[:, N:]


def _gated_by(activation: Any, parts: Any) -> Any:
    values, gate = parts
    return values * activation(gate)


def _rotated(e: Any, a: Any) -> Any:
    """Halves of a norm's result, turned by their position."""
    h = _norm(a @ e["w1"] + e["bias"])
    left, right = h[:, : N // 2], h[:, N // 2 :]
    angle = np.arange(N, dtype=f32)[:, None] * np.array([1, 0.3, 0.1, 0.03], f32)
    c, s = np.cos(angle), np.sin(angle)
    return jnp.concatenate([left * c - right * s, right * c + left * s], 1)


def _one_hot(e: Any) -> Any:
    return jax.nn.one_hot(IDS, N, dtype=jnp.float32)


def _returns(e: Any, a: Any) -> Any:
    """Discounted sums of rewards, from the last to the first."""
    step = lambda g, r: (r + 0.9 * g, r + 0.9 * g)  # noqa: E731
    return lax.scan(step, jnp.zeros(N, jnp.float32), a, reverse=True)[1]


def _sinkhorn(e: Any, a: Any, b: Any) -> Any:
    scores = a @ b.T / N
    for _ in range(3):
        scores = scores - jax.nn.logsumexp(scores, 1, keepdims=True)
        scores = scores - jax.nn.logsumexp(scores, 0, keepdims=True)
    return jnp.exp(scores)


def _unit(a: Any) -> Any:
    return a * lax.rsqrt((a**2).sum(1, keepdims=True) + 1e-6)


def _interpolated(a: Any, b: Any) -> Any:
    """Reads `b` at places between its rows."""
    place = 3.5 + 3 * jnp.tanh(a[:, 0])
    below = jnp.clip(jnp.floor(place), 0, N - 2).astype(jnp.int32)
    share = (place - below)[:, None]
    return b[below] * (1 - share) + b[below + 1] * share


def _newton_schulz(e: Any, a: Any, b: Any) -> Any:
    x = a / (1e-3 + jnp.sqrt((a**2).sum()))
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x + b


def _power_iteration(e: Any, a: Any, b: Any) -> Any:
    v = b[:, :1]
    for _ in range(3):
        v = (a.T @ (a @ v)) + 1e-3
        v = v / jnp.sqrt((v**2).sum())
    return a - (a @ v) @ v.T


def _fixed_point(e: Any, a: Any, b: Any) -> Any:
    z = jnp.zeros_like(a)
    for _ in range(4):
        z = jnp.tanh(0.5 * z @ e["w1"] + a)
    return 100 * (z - jnp.tanh(0.5 * z @ e["w1"] + a)) + b


def _runge_kutta(e: Any, a: Any, b: Any) -> Any:
    f = lambda y: jnp.tanh(y @ e["w1"] + b)  # noqa: E731
    y, h = a, 0.01
    for _ in range(2):
        k1 = f(y)
        k2 = f(y + h / 2 * k1)
        y = y + h * k2
    return (y - a) / (2 * h)


def _sharpness(e: Any, a: Any, b: Any) -> Any:
    """The gradient where the weights were moved by a small gradient (SAM)."""
    loss = lambda w: jnp.mean((jnp.tanh(b @ w) - a) ** 2)  # noqa: E731
    g = jax.grad(loss)(e["w1"])
    moved = e["w1"] + 1e-2 * g / (jnp.sqrt((g**2).sum()) + 1e-12)
    return (jax.grad(loss)(moved) - g) * 100


def _labels(a: Any) -> Any:
    return lax.stop_gradient(jnp.argmax(a, 1, keepdims=True))


def _signs(a: Any) -> Any:
    return (a > 0).astype(jnp.float32)


def _draw(e: Any) -> Any:
    return jax.random.normal(jax.random.key(1), SHAPE) * N**-0.5


def _dropout(e: Any, a: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, SHAPE)
    return jnp.where(keep, a / 0.5, 0.0)


OPS: dict[str, Op] = {
    # ---- what should be half: layers, activations, norms, softmaxes
    **_group(
        "layers",
        "u",
        "u",
        linear_1=lambda e, a: a @ e["w1"],
        linear_2=lambda e, a: jnp.tanh(a @ e["w2"]),
        biased=lambda e, a: a @ e["w1"] + e["bias"],
        mlp=lambda e, a: jax.nn.gelu(a @ e["w1"] + e["bias"]) @ e["w2"],
        residual=lambda e, a: a + jnp.tanh(a @ e["w1"]) @ e["w2"],
        pre_norm=lambda e, a: a + jax.nn.relu(_norm(a) @ e["w1"]) @ e["w2"],
        post_norm=lambda e, a: _norm(a + a @ e["w1"]),
        attention=_attention,
        conv=_conv,
        gated=lambda e, a: jax.nn.silu(a @ e["w1"]) * (a @ e["w2"]),
    ),
    **_group(
        "fused",
        "u",
        "u",
        glu=lambda e, a: _gated_by(jax.nn.sigmoid, jnp.split(_fused(e, a), 2, axis=1)),
        geglu=lambda e, a: _gated_by(
            lambda h: jax.nn.gelu(h, approximate=False),
            jnp.split(_fused(e, a), 2, axis=1),
        ),
        swiglu=lambda e, a: _gated_by(
            jax.nn.silu, _in_slices(_fused(e, a) + jnp.tile(e["bias"], 2))
        ),
        softplus_gate=lambda e, a: _gated_by(
            jax.nn.softplus, _in_slices(_fused(e, jnp.tanh(a)))[::-1]
        ),
        rotated=_rotated,
    ),
    **_group(
        "products",
        "uu",
        "u",
        linear=lambda e, a, b: a @ b * N**-0.5,
        linear_t=lambda e, a, b: a @ b.T * N**-0.5,
        sandwich=lambda e, a, b: jnp.einsum("ij,jk,lk->il", a, b, a) / N,
        inner=lambda e, a, b: jnp.einsum("ij,ij->i", a, b)[:, None] * a / N,
        contract=lambda e, a, b: jnp.einsum("ij,kj->ik", a[:, :2], b[:, :2]),
    ),
    **_group(
        "elementwise",
        "u",
        "u",
        tanh=lambda e, a: jnp.tanh(a),
        relu=lambda e, a: jax.nn.relu(a),
        hard_tanh=lambda e, a: jax.nn.hard_tanh(a),
        gelu=lambda e, a: jax.nn.gelu(a),
        norm=lambda e, a: _norm(a),
        rms=lambda e, a: a * lax.rsqrt((a**2).mean(1, keepdims=True) + 1e-6),
        softmax=lambda e, a: jax.nn.softmax(a, axis=1),
        log_softmax=lambda e, a: jax.nn.log_softmax(a, axis=1),
        logsumexp=lambda e, a: _rows(jax.nn.logsumexp(a, 1, keepdims=True)),
        square=lambda e, a: a * a,
        sin=lambda e, a: jnp.sin(a),
        exp=lambda e, a: jnp.exp(jnp.tanh(a)),
        log=lambda e, a: jnp.log(1 + a * a),
        sqrt=lambda e, a: jnp.sqrt(1 + a * a),
        transpose=lambda e, a: a.T,
        dropout=_dropout,
        mean=lambda e, a: _rows(a.mean(0)),
        center=lambda e, a: a - a.mean(0),
        cumsum=lambda e, a: jnp.cumsum(a, 0) / N,
        maximum=lambda e, a: _rows(a.max(1, keepdims=True)),
        sort=lambda e, a: jnp.sort(a, 1),
    ),
    **_group(
        "binary",
        "uu",
        "u",
        add=lambda e, a, b: a + b,
        sub=lambda e, a, b: a - b,
        mul=lambda e, a, b: a * b,
        div=lambda e, a, b: a / (1 + b * b),
        where=lambda e, a, b: jnp.where(MASK, a, b),
    ),
    **_group(
        "losses",
        "uu",
        "u",
        squared_error=lambda e, a, b: _rows(jnp.mean((a - b) ** 2)),
        cross_entropy=lambda e, a, b: _rows(
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(a), _labels(b), 1))
        ),
        contrastive=lambda e, a, b: _rows(
            -jnp.mean(jnp.diag(jax.nn.log_softmax(_norm(a) @ _norm(b).T / 0.1)))
        ),
        huber=lambda e, a, b: _rows(jnp.mean(jnp.minimum((a - b) ** 2, 1.0))),
        log_likelihood=lambda e, a, b: _rows(
            jnp.mean((a / (0.1 + jax.nn.softplus(b))) ** 2 + jnp.log(0.1 + b**2))
        ),
    ),
    # ---- where state comes from
    **_group(
        "origins",
        "",
        "u",
        slice=lambda e: e["stack"][0],
        gather=lambda e: e["stack"].reshape(-1, N)[IDS],
        mean_of_members=lambda e: e["stack"].mean(0),
        concatenated=lambda e: jnp.concatenate([e["w1"][:4], e["w2"][:4]]),
        padded=lambda e: jnp.pad(e["w1"][:6], ((0, 2), (0, 0))),
        row=lambda e: _rows(e["w1"][0]),
        draw=_draw,
        captured=lambda e: jnp.asarray(CAPTURED),
        uniform=lambda e: jax.random.uniform(jax.random.key(2), SHAPE),
        positions=lambda e: jnp.arange(64, dtype=jnp.float32).reshape(SHAPE) / 8,
    ),
    **_group(
        "moves",
        "u",
        "u",
        split=_split_joined,
        take=lambda e, a: a[IDS],
        scatter=lambda e, a: a.at[1].set(a[2]),
        scatter_add=lambda e, a: jnp.zeros_like(a).at[IDS].add(a),
        pad=lambda e, a: jnp.pad(a[1:, :-1], ((1, 0), (0, 1))),
        roll=lambda e, a: jnp.roll(a, 1, 0),
        reverse=lambda e, a: a[::-1],
    ),
    # ---- what multiplies an error
    **_group(
        "differences",
        "uu",
        "u",
        near=lambda e, a, b: ((a + 1e-2 * b) - a) * 100,
        finite=lambda e, a, b: (
            (jnp.tanh((a + 1e-2 * b) @ e["w1"]) - jnp.tanh(a @ e["w1"])) * 100
        ),
        quotient=lambda e, a, b: (a - b) / (jnp.abs(a - b) + 1e-2),
        log_of_difference=lambda e, a, b: jnp.log(jnp.abs(a - b) + 1e-2),
        relative=lambda e, a, b: (a - b) / (1e-2 + jnp.abs(a).max()),
        cosine=lambda e, a, b: 1 - (a * b) / (jnp.abs(a * b) + 1e-3),
        squared_distance=lambda e, a, b: (
            (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        ),
    ),
    **_group(
        "discrete",
        "u",
        "u",
        compare=lambda e, a: (a > a.mean()).astype(jnp.float32),
        round=lambda e, a: jnp.round(a * 4) / 4,
        integers=lambda e, a: (a * 8).astype(jnp.int32).astype(jnp.float32) / 8,
        argmax=lambda e, a: jax.nn.one_hot(jnp.argmax(a, 1), N),
        top=lambda e, a: jnp.where(a >= a.max(1, keepdims=True), a, 0.0),
        floor=lambda e, a: a - jnp.floor(a),
        sign=lambda e, a: jnp.sign(a),
    ),
    **_group(
        "coordinates",
        "u",
        "u",
        waves=lambda e, a: jnp.sin(_distances(a)[1] * 3),
        bonds=lambda e, a: jnp.cos(jnp.pi * _distances(a)[1]) / (1 + _distances(a)[1]),
        messages=lambda e, a: jnp.pad(
            jnp.einsum("ij,ijc->ic", jnp.sin(3 * _distances(a)[1]), _distances(a)[0]),
            ((0, 0), (0, 5)),
        ),
        phases=lambda e, a: jnp.sin(20 * a),
        rotary=lambda e, a: a * jnp.cos(np.arange(8, dtype=f32)[:, None] * a[0]),
    ),
    **_group(
        "decompositions",
        "u",
        "u",
        cholesky=lambda e, a: jnp.linalg.cholesky(_spd(a)),
        solve=lambda e, a: jnp.linalg.solve(_spd(a), e["w1"]),
        inverse=lambda e, a: jnp.linalg.inv(_spd(a)),
        eigenvalues=lambda e, a: _rows(jnp.linalg.eigvalsh(_spd(a))),
        singular_values=lambda e, a: _rows(jnp.linalg.svd(a, compute_uv=False)),
        triangle=lambda e, a: jnp.abs(jnp.linalg.qr(a)[1]),
        determinant=lambda e, a: _rows(jnp.linalg.slogdet(_spd(a))[1]),
        covariance=lambda e, a: jnp.cov(a.T),
    ),
    **_group(
        "copies",
        "u",
        "u",
        copied=lambda e, a: _one_hot(e) @ a,
        identity=lambda e, a: jnp.eye(N) @ a,
        summed=lambda e, a: MASK.astype(f32) @ a / N,
        counts=lambda e, a: (_one_hot(e).T @ _one_hot(e)) + a,
        matches=lambda e, a: (
            (a > 0).astype(jnp.float32) @ (a > 0).astype(jnp.float32).T / N
        ),
        patches=_patches,
        whole=lambda e, a: jnp.round(a * 50) @ jnp.round(a * 50).T / 2500,
    ),
    **_group(
        "ranges",
        "uu",
        "u",
        large_product=lambda e, a, b: (a * 60) @ (b * 60).T / 3600,
        large_norm=lambda e, a, b: (
            a / jnp.sqrt(((b * 300) ** 2).sum(1, keepdims=True) + 1) * 300
        ),
        large_variance=lambda e, a, b: a * (b * 200).var(1, keepdims=True) / 4e4,
        small_product=lambda e, a, b: (a * 1e-3) @ (b * 1e-3) * 1e6,
        small_factor=lambda e, a, b: (a * 1e-6) * b / 1e-6,
        masked=lambda e, a, b: jax.nn.softmax(a @ b.T + jnp.where(MASK, 0.0, -1e9), 1),
        epsilon=lambda e, a, b: a / (jnp.abs(b) + 1e-8) * b,
        second_moment=lambda e, a, b: (
            (a * 1e-4) / (jnp.sqrt((b * 1e-4) ** 2 + 1e-12) + 1e-8)
        ),
    ),
    **_group(
        "statistics",
        "u",
        "u",
        moments=lambda e, a: _rows((a**2).mean(0) - a.mean(0) ** 2),
        batch_norm=lambda e, a: (a - a.mean(0)) * lax.rsqrt(a.var(0) + 1e-5),
        whitened=lambda e, a: a / (1e-2 + jnp.sqrt(jnp.diag(jnp.cov(a.T) + 0.0))),
        correlation=lambda e, a: jnp.nan_to_num(jnp.corrcoef(a.T + 0.1 * e["x"])),
        partial_sums=lambda e, a: jnp.diff(jnp.cumsum(a, 0), axis=0, prepend=0.0),
        cumulative_product=lambda e, a: jnp.cumprod(1 + 0.1 * jnp.tanh(a), axis=0),
        returns=_returns,
        advantages=lambda e, a: (
            (_returns(e, a) - _returns(e, a).mean()) / (_returns(e, a).std() + 1e-3)
        ),
        correlated=lambda e, a: (a - a.mean(0)).T @ (a - a.mean(0)) / N,
    ),
    **_group(
        "probability",
        "uu",
        "u",
        divergence=lambda e, a, b: (
            jax.nn.softmax(a) * (jax.nn.log_softmax(a) - jax.nn.log_softmax(b))
        ),
        gaussian=lambda e, a, b: jnp.exp(jnp.tanh(a)) + b**2 - 1 - jnp.tanh(a),
        mixture=lambda e, a, b: _rows(
            jax.nn.logsumexp(-(((a[:, None] - b[None]) * 2) ** 2).sum(-1), 1)
        ),
        entropy=lambda e, a, b: _rows(
            -(jax.nn.softmax(a) * jax.nn.log_softmax(a + b)).sum(1)
        ),
        transport=_sinkhorn,
        flow=lambda e, a, b: jnp.log1p(-(jnp.tanh(a) ** 2) * 0.999) + b,
        odds=lambda e, a, b: jnp.log(jax.nn.sigmoid(a) / (1 - jax.nn.sigmoid(b))),
    ),
    **_group(
        "geometry",
        "uu",
        "u",
        cosines=lambda e, a, b: 1 - _unit(a) @ _unit(b).T,
        angles=lambda e, a, b: jnp.arccos(0.999 * (_unit(a) * _unit(b))),
        triplet=lambda e, a, b: jax.nn.relu(
            ((a - b) ** 2).sum(1)[:, None] - ((a - e["y"]) ** 2).sum(1) + 0.1
        ),
        kernel=lambda e, a, b: jnp.exp(
            -((a[:, None] - b[None]) ** 2).sum(-1) / (2 * N)
        ),
        gaussian_process=lambda e, a, b: jnp.linalg.solve(
            jnp.exp(-((a[:, None] - a[None]) ** 2).sum(-1) / N) + 0.1 * jnp.eye(N), b
        ),
        outer_angles=lambda e, a, b: (
            a * jnp.cos(jnp.einsum("i,j->ij", 10 * b[0], a[0]))
        ),
        fourier=lambda e, a, b: jnp.sin(2 * jnp.pi * a @ b),
        projected=lambda e, a, b: a - (a @ _unit(b).T) @ _unit(b) / N,
    ),
    **_group(
        "quantized",
        "uu",
        "u",
        fake_quantized=lambda e, a, b: a + lax.stop_gradient(jnp.round(a * 8) / 8 - a),
        codebook=lambda e, a, b: b[
            jnp.argmin(((a[:, None] - b[None]) ** 2).sum(-1), 1)
        ],
        nearest=lambda e, a, b: b[jnp.argmax(a @ b.T, 1)],
        sampled=lambda e, a, b: _interpolated(a, b),
        gated_experts=lambda e, a, b: (
            jnp.where(a >= lax.top_k(a, 2)[0][:, -1:], jax.nn.softmax(a), 0.0) @ b
        ),
        sorted_by=lambda e, a, b: b[jnp.argsort(a[:, 0])],
        bucketed=lambda e, a, b: b[
            jnp.clip(jnp.searchsorted(jnp.linspace(-2, 2, N), a[:, 0]), 0, N - 1)
        ],
    ),
    **_group(
        "dynamics",
        "uu",
        "u",
        laplacian=lambda e, a, b: (
            100
            * (
                (a + 1e-2 * (b @ e["w1"]))
                - (jnp.roll(a, 1, 0) + jnp.roll(a, -1, 0)) / 2
            )
            / 100
        ),
        filtered=lambda e, a, b: (
            _spd(a) - _spd(a) @ jnp.linalg.solve(_spd(a) + jnp.eye(N), _spd(a))
        ),
        orthogonal=_newton_schulz,
        power=_power_iteration,
        fixed_point=_fixed_point,
        runge_kutta=_runge_kutta,
        sharpness=_sharpness,
        clipped=lambda e, a, b: a * jnp.minimum(1.0, 1 / (jnp.sqrt((b**2).sum()))),
    ),
    # ---- levels: offsets and units
    **_group(
        "levels",
        "u",
        "L",
        units=lambda e, a: a * e["std"] + e["mean"],
        level_of=lambda e, a: a + e["level"],
        shifted=lambda e, a: a + 300.0,
    ),
    **_group("level_origins", "", "L", level_slice=lambda e: e["levels"][0]),
    **_group(
        "level_pairs",
        "Lu",
        "L",
        level_step=lambda e, a, b: a + 1e-2 * b,
        level_relaxed=lambda e, a, b: a * (1 + 1e-4 * b),
    ),
    **_group(
        "level_differences",
        "LL",
        "u",
        level_difference=lambda e, a, b: jnp.tanh((a - b) / 10),
        level_log=lambda e, a, b: jnp.tanh(jnp.log(a / b) * 100),
        level_return=lambda e, a, b: jnp.tanh((a / b - 1) * 100),
    ),
    **_group(
        "level_reads",
        "L",
        "u",
        standardized=lambda e, a: (a - a.mean(0)) / (a.std(0) + 1e-3),
        from_units=lambda e, a: jnp.tanh((a - e["mean"]) / e["std"]),
        level_diff=lambda e, a: jnp.tanh(jnp.diff(a, axis=0, append=a[-1:])),
        anomaly=lambda e, a: jnp.tanh(a - a.mean()),
    ),
}


# ---- what holds a block: (function of two values, operands) -> value

Body = Callable[[Any, Any], Any]
RATE = 1e-3
STEPS = 3


def _unrolled(f: Body, s: Any, b: Any) -> Any:
    for _ in range(STEPS):
        s = s + RATE * f(s, b)
    return s


def _scan_steps(f: Body, s: Any, b: Any) -> Any:
    return lax.scan(lambda s, _: (s + RATE * f(s, b), None), s, None, length=STEPS)[0]


def _fori_steps(f: Body, s: Any, b: Any) -> Any:
    return lax.fori_loop(0, STEPS, lambda _, s: s + RATE * f(s, b), s)


def _while_steps(f: Body, s: Any, b: Any) -> Any:
    body = lambda c: (c[0] + 1, c[1] + RATE * f(c[1], b))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < STEPS, body, (0, s))[1]


def _descent(f: Body, w: Any, b: Any) -> Any:
    for _ in range(STEPS):
        w = w - RATE * jax.grad(lambda w: jnp.mean((f(w, b) - b) ** 2) * N)(w)
    return w


def _descent_scan(f: Body, w: Any, b: Any) -> Any:
    loss = lambda w: jnp.mean((f(w, b) - b) ** 2) * N  # noqa: E731
    step = lambda w, _: (w - RATE * jax.grad(loss)(w), None)  # noqa: E731
    return lax.scan(step, w, None, length=STEPS)[0]


def _momentum(f: Body, w: Any, b: Any) -> Any:
    m = jnp.zeros_like(w)
    for _ in range(STEPS):
        m = 0.9 * m + f(w, b)
        w = w - RATE * m
    return w


def _average(f: Body, s: Any, b: Any) -> Any:
    mean = s
    for _ in range(STEPS):
        s = f(s, b)
        mean = 0.99 * mean + 0.01 * s
    return mean


def _levels(f: Body, level: Any, b: Any) -> Any:
    for _ in range(STEPS):
        level = level + 1e-2 * f(level - 1000.0, b)
    return level


def _levels_scan(f: Body, level: Any, b: Any) -> Any:
    step = lambda y, _: (y + 1e-2 * f((y - 1000.0), b), y)  # noqa: E731
    return lax.scan(step, level, None, length=STEPS)[0]


def _recurrence(f: Body, h: Any, b: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = f(h, x)
        return h, h

    return lax.scan(step, h, jnp.stack([b, -b, b * b]))[1].mean(0)


def _layers(f: Body, h: Any, b: Any) -> Any:
    return lax.scan(lambda h, w: (h + f(h @ w, b), None), h, jnp.stack([b, b.T]))[0]


def _change(steps: Any, scale: float) -> Any:
    return lambda f, s, b: (steps(f, s, b) - s) * scale


def _half_of(f: Body, a: Any, b: Any) -> Any:
    return lax.cond(a.mean() > 0, f, lambda a, b: f(b, a), a, b)


_STEPS = {
    "unrolled": _unrolled,
    "scan": _scan_steps,
    "fori": _fori_steps,
    "while": _while_steps,
    "descent": _descent,
    "descent_scan": _descent_scan,
    "momentum": _momentum,
    "average": _average,
}
# Nothing can be differentiated in reverse through these.
FORWARD_ONLY = frozenset({"while_state", "while_change"})
NESTED: dict[str, Op] = {
    **{f"{k}_state": Op(f, "uu", "u", "states") for k, f in _STEPS.items()},
    **{
        f"{k}_change": Op(_change(f, 1 / RATE), "uu", "u", "changes")
        for k, f in _STEPS.items()
    },
    **_group("levels", "Lu", "L", rollout=_levels, rollout_scan=_levels_scan),
    **_group(
        "level_changes",
        "Lu",
        "u",
        rollout_change=_change(_levels, 100),
        rollout_scan_change=_change(_levels_scan, 100),
    ),
    **_group(
        "structure",
        "uu",
        "u",
        recurrence=_recurrence,
        layers=_layers,
        jit=lambda f, a, b: jax.jit(f)(a, b),
        checkpoint=lambda f, a, b: jax.checkpoint(f)(a, b),
        cond=_half_of,
        map=lambda f, a, b: lax.map(lambda r: f(a, b * r[:, None])[0], b),
        vmap=lambda f, a, b: jax.vmap(f, (0, None))(jnp.stack([a, b]), b).mean(0),
        gradient=lambda f, a, b: jax.grad(lambda a: jnp.sum(f(a, b) ** 2))(a),
    ),
}
