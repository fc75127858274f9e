"""Train steps of families that the other zoos lack: solvers, windows, segments, tasks.

Each size is an argument, so that the step also runs small, on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models.common import Workload, cross_entropy
from zoo2_libraries import cast
from zoo2_unseen_third import f32, of_linen

# ---- tensor products, Equinox


def harmonics(x: Any) -> list[Any]:
    """Real spherical harmonics of degrees 0, 1 and 2, of unit vectors."""
    n = np if isinstance(x, np.ndarray) else jnp
    a, b, c = x[..., 0], x[..., 1], x[..., 2]
    r = 3**0.5
    second = [a * b, b * c, (3 * c * c - 1) / (2 * r), a * c, (a * a - b * b) / 2]
    return [
        n.ones_like(x[..., :1]),
        r * x,
        (5 * 3) ** 0.5 * n.stack(second, -1),
    ]


@functools.cache
def couplings() -> dict[tuple[int, int, int], Any]:
    """Integrals of three harmonics over the sphere, where they are not all zero."""
    z, w = np.polynomial.legendre.leggauss(8)
    phi = 2 * np.pi * np.arange(16) / 16
    z, phi = (x.reshape(-1) for x in np.meshgrid(z, phi, indexing="ij"))
    s = np.sqrt(1 - z**2)
    seen = harmonics(np.stack([s * np.cos(phi), s * np.sin(phi), z], -1))
    w, found = np.repeat(w, 16) / 32, {}
    for path in np.ndindex(3, 3, 3):
        c = np.einsum("n,na,nb,nm->abm", w, *(seen[i] for i in path))
        if abs(c).max() > 1e-6:
            found[path] = (c / np.linalg.norm(c)).astype(np.float32)
    return found


class TensorProduct(eqx.Module):
    """Messages: products of what is sent with harmonics of where it goes."""

    radial: list[eqx.nn.Linear]
    enter: jax.Array
    leave: jax.Array
    skip: jax.Array
    gates: eqx.nn.Linear
    paths: tuple[Any, ...] = eqx.field(static=True)

    def __init__(self, width: int, ins: int, outs: int, key: Any) -> None:
        keys = jax.random.split(key, 6)
        self.paths = tuple(p for p in couplings() if p[0] < ins and p[2] < outs)
        self.radial = [
            eqx.nn.Linear(8, 64, use_bias=False, key=keys[0]),
            eqx.nn.Linear(64, len(self.paths) * width, use_bias=False, key=keys[1]),
        ]
        shape = width, width
        self.enter = jax.random.normal(keys[2], (ins, *shape)) * width**-0.5
        self.leave = jax.random.normal(keys[3], (outs, *shape)) * width**-0.5
        n = min(ins, outs)
        self.skip = jax.random.normal(keys[4], (n, *shape)) * width**-0.5
        self.gates = eqx.nn.Linear(width, 2 * width, key=keys[5])

    def __call__(
        self, h: list[Any], kernels: Any, basis: Any, senders: Any, receivers: Any
    ) -> list[Any]:
        atoms, width = len(h[0]), h[0].shape[-1]
        sent = [(x @ w)[senders] for x, w in zip(h, self.enter, strict=True)]
        r = jax.nn.silu(basis @ self.radial[0].weight.T) @ self.radial[1].weight.T
        r = r.reshape(len(r), len(self.paths), 1, width)
        found = [0.0] * len(self.leave)
        for i, path in enumerate(self.paths):
            made = jnp.einsum("eac,eam->emc", sent[path[0]], kernels[path])
            found[path[2]] += made * r[:, i]
        new = []
        for degree, x in enumerate(found):
            x = jax.ops.segment_sum(x, receivers, atoms) / 4
            x = x @ self.leave[degree]
            if degree < len(self.skip):
                x = x + h[degree] @ self.skip[degree]
            new.append(x)
        gates = jax.nn.sigmoid(new[0] @ self.gates.weight.T + self.gates.bias)
        gates = jnp.split(gates, 2, -1)
        rest = [x * g for x, g in zip(new[1:], gates, strict=False)]
        return [jax.nn.silu(new[0]), *rest]


class Equivariant(eqx.Module):
    embed: jax.Array
    layers: list[TensorProduct]
    last: list[eqx.nn.Linear]

    def __init__(self, species: int, width: int, key: Any) -> None:
        keys = jax.random.split(key, 6)
        self.embed = jax.random.normal(keys[0], (species, width))
        degrees = (1, 3), (3, 3), (3, 1)
        self.layers = [
            TensorProduct(width, *d, k) for d, k in zip(degrees, keys[1:4], strict=True)
        ]
        self.last = [
            eqx.nn.Linear(width, width // 2, key=keys[4]),
            eqx.nn.Linear(width // 2, 1, key=keys[5]),
        ]

    def __call__(self, positions: Any, species: Any, edges: Any) -> Any:
        """Energies of atoms; places, harmonics and distances are float32."""
        dtype, (senders, receivers) = self.embed.dtype, edges
        apart = positions[receivers] - positions[senders]
        distance = jnp.sqrt((apart**2).sum(-1, keepdims=True) + 1e-6)
        seen = harmonics(apart / distance)
        short = jnp.clip(distance / 5, 0, 1)
        fall = 1 - 28 * short**6 + 48 * short**7 - 21 * short**8
        basis = jnp.sin(jnp.pi * jnp.arange(1, 9) * short) / distance * fall
        kernels = {
            path: jnp.einsum("eb,abm->eam", seen[path[1]], c).astype(dtype)
            for path, c in couplings().items()
        }
        h = [self.embed[species][:, None]]
        for layer in self.layers:
            h = layer(h, kernels, basis.astype(dtype), senders, receivers)
        x = jax.nn.silu(h[0][:, 0] @ self.last[0].weight.T + self.last[0].bias)
        return f32(x @ self.last[1].weight.T + self.last[1].bias)[:, 0]


def equivariant(
    dtype: Any,
    atoms: int = 1024,
    edges: int = 16384,
    molecules: int = 32,
    species: int = 16,
    width: int = 64,
) -> Workload:
    """NequIP: energies of molecules, and forces, which are its derivatives."""
    shapes = eqx.filter_eval_shape(Equivariant, species, width, jax.random.key(0))
    _, static = eqx.partition(shapes, lambda x: hasattr(x, "shape"))

    def init(key: Any) -> Any:
        return eqx.filter(Equivariant(species, width, key), eqx.is_array), ()

    def loss(params: Any, state: Any, x: Any) -> Any:
        model = eqx.combine(cast(params, dtype), static)

        def energy(positions: Any) -> Any:
            each = model(positions, x["species"], x["edges"])
            whole = jax.ops.segment_sum(each, x["molecule"], molecules)
            return whole.sum(), whole

        slope, whole = jax.grad(energy, has_aux=True)(x["positions"])
        of_energy = optax.huber_loss(whole, x["energy"], delta=0.01).mean()
        apart = ((slope + x["forces"]) ** 2).sum(-1)
        return of_energy + 100 * jnp.sqrt(apart + 1e-12).mean(), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 5)
        return {
            "positions": 2 * jax.random.normal(keys[0], (atoms, 3)),
            "species": jax.random.randint(keys[1], (atoms,), 0, species),
            "edges": jax.random.randint(keys[2], (2, edges), 0, atoms),
            "molecule": jnp.arange(atoms) * molecules // atoms,
            "energy": jax.random.normal(keys[3], (molecules,)),
            "forces": jax.random.normal(keys[4], (atoms, 3)),
        }

    return Workload(init, loss, batch, optax.amsgrad(1e-2))


# ---- a vocoder, Haiku


class WeightNormed(hk.Module):
    """A convolution whose weight has a direction and a length, both float32."""

    def __init__(
        self,
        outs: int,
        kernel: tuple[int, ...],
        dtype: Any,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.outs, self.kernel, self.dtype, self.stride = outs, kernel, dtype, stride
        self.dilation, self.groups, self.transposed = dilation, groups, transposed

    def __call__(self, x: Any) -> Any:
        n = len(self.kernel)
        shape = *self.kernel, x.shape[-1] // self.groups, self.outs
        v = hk.get_parameter("v", shape, init=hk.initializers.VarianceScaling())
        g = hk.get_parameter("g", (self.outs,), init=jnp.ones)
        length = jnp.sqrt((v**2).sum(tuple(range(n + 1))) + 1e-12)
        w = (v * (g / length)).astype(self.dtype)
        numbers = ("NWC", "WIO", "NWC") if n == 1 else ("NHWC", "HWIO", "NHWC")
        strides = (self.stride, 1)[:n]
        if self.transposed:
            x = jax.lax.conv_transpose(x, w, strides, "SAME", dimension_numbers=numbers)
        else:
            x = jax.lax.conv_general_dilated(
                *(x, w, strides, "SAME"),
                rhs_dilation=(self.dilation, 1)[:n],
                feature_group_count=self.groups,
                dimension_numbers=numbers,
            )
        return x + hk.get_parameter("b", (self.outs,), init=jnp.zeros).astype(x.dtype)


def leaky(x: Any) -> Any:
    return jax.nn.leaky_relu(x, 0.1)


def mel_filters(count: int, bins: int) -> Any:
    """Triangles, f32[bins, count]."""
    ends = 700 * (10 ** (np.linspace(0, 2840, count + 2) / 2595) - 1)
    at, ends = np.linspace(0, 11025, bins)[:, None], ends[None]
    rise = (at - ends[:, :-2]) / (ends[:, 1:-1] - ends[:, :-2])
    fall = (ends[:, 2:] - at) / (ends[:, 2:] - ends[:, 1:-1])
    return np.maximum(0, np.minimum(rise, fall)).astype(np.float32)


def mel_spectrum(x: Any, window: int = 1024, hop: int = 256) -> Any:
    """Logarithms of 80 bands of sounds, f32[size, samples]."""
    edge = (window - hop) // 2
    x = jnp.pad(x, ((0, 0), (edge, edge)), mode="reflect")
    at = jnp.arange(0, x.shape[1] - window + 1, hop)[:, None] + jnp.arange(window)
    spectrum = jnp.fft.rfft(x[:, at] * np.hanning(window).astype(np.float32))
    size = jnp.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-9)
    return jnp.log(jnp.maximum(size @ mel_filters(80, window // 2 + 1), 1e-5))


class Vocoder(NamedTuple):
    """HiFi-GAN: sound of mel spectra, judged in periods and at scales."""

    dtype: Any
    size: int = 16
    frames: int = 32
    width: int = 256
    inner: int = 32
    optimizer: Any = optax.adamw(2e-4, 0.8, 0.99)

    def generator(self, mel: Any) -> Any:
        def conv(n: int, kernel: int, **kw: Any) -> hk.Module:
            return WeightNormed(n, (kernel,), self.dtype, **kw)

        x = conv(self.width, 7)(mel.astype(self.dtype))
        for i, rate in enumerate((8, 8, 4)):
            outs = self.width >> (i + 1)
            x = conv(outs, 2 * rate, stride=rate, transposed=True)(leaky(x))
            total = 0.0
            for kernel in (3, 7):
                h = x
                for dilation in (1, 3):
                    h = h + conv(outs, kernel, dilation=dilation)(leaky(h))
                total = total + h
            x = total / 2
        x = conv(1, 7)(jax.nn.leaky_relu(x, 0.01))
        return jnp.tanh(f32(x[..., 0]))

    def judge(self, sound: Any) -> list[list[Any]]:
        """What each layer of each judge makes of sounds; last its verdict."""
        dtype, n, found = self.dtype, self.inner, []
        sound = sound.astype(dtype)
        for period in (2, 3, 5):
            more = -sound.shape[1] % period
            x = jnp.pad(sound, ((0, 0), (0, more)), mode="reflect")
            x, seen = x.reshape(len(x), -1, period, 1), []
            for outs in (n, 4 * n, 8 * n, 16 * n):
                x = leaky(WeightNormed(outs, (5, 1), dtype, stride=3)(x))
                seen.append(x)
            found.append([*seen, WeightNormed(1, (3, 1), dtype)(x)])
        x = sound[..., None]
        for scale in range(2):
            if scale:
                x = x.reshape(len(x), -1, 2, 1).mean(2)
            h, seen = x, []
            layers = (
                *((2 * n, 15, 1, 1), (4 * n, 41, 4, 4)),
                *((8 * n, 41, 4, 16), (16 * n, 5, 1, 1)),
            )
            for outs, kernel, stride, groups in layers:
                conv = WeightNormed(
                    outs, (kernel,), dtype, stride=stride, groups=groups
                )
                h = leaky(conv(h))
                seen.append(h)
            found.append([*seen, WeightNormed(1, (3,), dtype)(h)])
        return found

    def networks(self) -> tuple[Any, Any]:
        return tuple(
            hk.without_apply_rng(hk.transform(f)) for f in (self.generator, self.judge)
        )

    def step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        generator, judge = self.networks()
        mel, sound = batch

        def judged(params_d: Any, fake: Any) -> Any:
            both = judge.apply(params_d, jnp.concatenate([sound, fake]))
            return [[jnp.split(x, 2) for x in seen] for seen in both]

        def loss_d(params_d: Any, fake: Any) -> Any:
            total = 0.0
            for *_, (real, made) in judged(params_d, fake):
                total += ((f32(real) - 1) ** 2).mean() + (f32(made) ** 2).mean()
            return total

        def loss_g(params_g: Any, params_d: Any) -> Any:
            fake = generator.apply(params_g, mel)
            total = 45 * jnp.abs(mel_spectrum(fake) - mel_spectrum(sound)).mean()
            for *features, (_, made) in judged(params_d, fake):
                total += ((f32(made) - 1) ** 2).mean()
                for a, b in features:
                    total += 2 * jnp.abs(f32(jax.lax.stop_gradient(a)) - f32(b)).mean()
            return total

        fake = generator.apply(params["g"], mel)
        value_d, grads = jax.value_and_grad(loss_d)(params["d"], fake)
        updates, opt_d = self.optimizer.update(grads, opt_state["d"], params["d"])
        params_d = optax.apply_updates(params["d"], updates)
        value_g, grads = jax.value_and_grad(loss_g)(params["g"], params_d)
        updates, opt_g = self.optimizer.update(grads, opt_state["g"], params["g"])
        params_g = optax.apply_updates(params["g"], updates)
        params, opt_state = {"g": params_g, "d": params_d}, {"g": opt_g, "d": opt_d}
        return params, opt_state, (value_d, value_g)

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        generator, judge = self.networks()
        mel = jax.random.normal(key, (self.size, self.frames, 80))
        sound = jax.random.uniform(key, (self.size, 256 * self.frames), minval=-1.0)
        params = {
            "g": generator.init(key, mel[:1]),
            "d": judge.init(key, sound[:1]),
        }
        opt_state = {name: self.optimizer.init(p) for name, p in params.items()}
        return params, opt_state, (mel, sound)


# ---- an equilibrium, Linen


class EquilibriumCell(nn.Module):
    dtype: Any
    width: int
    inner: int

    @nn.compact
    def __call__(self, z: Any, x: Any) -> Any:
        def conv(n: int) -> nn.Module:
            init = nn.initializers.normal(0.01)
            return nn.Conv(
                n, (3, 3), use_bias=False, kernel_init=init, dtype=self.dtype
            )

        def norm(x: Any) -> Any:
            return nn.GroupNorm(8, dtype=self.dtype)(x)

        z = z.astype(self.dtype)
        h = norm(nn.relu(conv(self.inner)(z)))
        h = norm(x + conv(self.width)(h))
        return norm(nn.relu(z + h))


class EquilibriumEnds(nn.Module):
    dtype: Any
    width: int
    classes: int

    def setup(self) -> None:
        self.enter = nn.Conv(self.width, (3, 3), dtype=self.dtype)
        self.norms = [nn.GroupNorm(8, dtype=self.dtype) for _ in range(2)]
        self.leave = nn.Dense(self.classes, dtype=self.dtype)

    def first(self, images: Any) -> Any:
        return self.norms[0](self.enter(images.astype(self.dtype)))

    def last(self, z: Any) -> Any:
        z = self.norms[1](z.astype(self.dtype))
        size, rows, columns, width = z.shape
        z = f32(z).reshape(size, rows // 8, 8, columns // 8, 8, width).mean((2, 4))
        return f32(self.leave(z.astype(self.dtype).reshape(size, -1)))

    def __call__(self, images: Any) -> Any:
        return self.last(self.first(images))


def anderson(f: Any, z: Any, memory: int, limit: int, tolerance: float) -> Any:
    """A fixed point, from a mixture of the last iterates; all in float32."""
    size, shape = len(z), z.shape

    def of(z: Any) -> Any:
        return f32(f(z.reshape(shape))).reshape(size, -1)

    z = f32(z).reshape(size, -1)
    first = of(z)
    second = of(first)
    empty = jnp.zeros((size, memory, z.shape[1]))
    points = empty.at[:, 0].set(z).at[:, 1].set(first)
    values = empty.at[:, 0].set(first).at[:, 1].set(second)

    def more(carry: Any) -> Any:
        k, _, _, apart = carry
        return (k < limit) & (apart > tolerance)

    def one(carry: Any) -> Any:
        k, points, values, _ = carry
        used = (jnp.arange(memory) < k).astype(jnp.float32)
        g = (values - points) * used[:, None]
        gram = jnp.einsum("bmn,bkn->bmk", g, g)
        gram = gram / (gram.trace(axis1=1, axis2=2)[:, None, None] + 1e-9)
        ones = jnp.broadcast_to(used, (size, memory))[..., None]
        a = jnp.linalg.solve(gram + 1e-4 * jnp.eye(memory), ones)[..., 0] * used
        a = a / a.sum(1, keepdims=True)
        z = jnp.einsum("bm,bmn->bn", a, values)
        value = of(z)
        at = k % memory
        points = jax.lax.dynamic_update_index_in_dim(points, z, at, 1)
        values = jax.lax.dynamic_update_index_in_dim(values, value, at, 1)
        apart = jnp.linalg.norm(value - z) / (1e-5 + jnp.linalg.norm(value))
        return k + 1, points, values, apart

    carry = jnp.int32(2), points, values, jnp.float32(1)
    k, _, values, _ = jax.lax.while_loop(more, one, carry)
    found = jax.lax.dynamic_index_in_dim(values, (k - 1) % memory, 1, keepdims=False)
    return found.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fixed_point(f: Any, solve: Any, params: Any, x: Any) -> Any:
    """Where `f(params, z, x)` is z."""
    return solve(lambda z: f(params, z, x), jnp.zeros(x.shape))


def fixed_point_forward(f: Any, solve: Any, params: Any, x: Any) -> Any:
    z = fixed_point(f, solve, params, x)
    return z, (params, x, z)


def fixed_point_backward(f: Any, solve: Any, kept: Any, ct: Any) -> Any:
    params, x, z = kept
    value, of_z = jax.vjp(lambda z: f(params, z, x), z)
    # the system of the implicit function theorem, by the same solver
    u = solve(lambda u: of_z(u.astype(value.dtype))[0] + ct, jnp.zeros_like(ct))
    _, of_rest = jax.vjp(lambda params, x: f(params, z, x), params, x)
    return of_rest(u.astype(value.dtype))


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


def equilibrium(
    dtype: Any,
    size: int = 64,
    side: int = 32,
    width: int = 48,
    inner: int = 64,
    memory: int = 5,
    limit: int = 25,
) -> Workload:
    """DEQ: a layer that is the fixed point of another one; classes of pictures."""
    cell, ends = EquilibriumCell(dtype, width, inner), EquilibriumEnds(dtype, width, 10)
    solve = functools.partial(anderson, memory=memory, limit=limit, tolerance=1e-2)

    def init(key: Any) -> Any:
        image, z = jnp.zeros((1, side, side, 3)), jnp.zeros((1, side, side, width))
        a, b = jax.random.split(key)
        return {"cell": cell.init(a, z, z)["params"], "ends": ends.init(b, image)}, ()

    def f(params: Any, z: Any, x: Any) -> Any:
        return cell.apply({"params": params}, z, x)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, labels = batch
        x = ends.apply(params["ends"], images, method="first")
        z = fixed_point(f, solve, params["cell"], x)
        logits = ends.apply(params["ends"], z, method="last")
        return cross_entropy(logits, labels).mean(), state

    def batch(key: Any) -> Any:
        images = jax.random.normal(key, (size, side, side, 3))
        return images, jax.random.randint(key, (size,), 0, 10)

    rates = optax.cosine_decay_schedule(1e-3, 100000)
    return Workload(init, loss, batch, optax.adam(rates))


# ---- shifted windows, Linen


class WindowAttention(nn.Module):
    """Cosines among the pixels of a window, and biases by a network of distances."""

    dtype: Any
    heads: int
    window: int
    shift: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        size, side, _, width = x.shape
        w, n, heads = self.window, side // self.window, self.heads
        if self.shift:
            x = jnp.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.reshape(size, n, w, n, w, width).swapaxes(2, 3)
        x = x.reshape(size, n * n, w * w, width)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(x)
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:3], 3, heads, -1), 3, 0)

        def unit(x: Any) -> Any:
            x = f32(x)
            x = x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)
            return x.astype(self.dtype)

        scale = self.param("scale", lambda _: jnp.full((heads, 1, 1), np.log(10.0)))
        scale = jnp.exp(jnp.minimum(scale, np.log(100.0)))
        scores = f32(jnp.einsum("bnqhd,bnkhd->bnhqk", unit(q), unit(k))) * scale
        scores = scores + self.biases()
        if self.shift:
            scores = scores + self.apart(n)[:, None]
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bnhqk,bnkhd->bnqhd", weights, v)
        h = nn.Dense(width, dtype=self.dtype)(h.reshape(x.shape))
        h = h.reshape(size, n, n, w, w, width).swapaxes(2, 3)
        h = h.reshape(size, side, side, width)
        return jnp.roll(h, (self.shift, self.shift), (1, 2)) if self.shift else h

    def biases(self) -> Any:
        """Of pairs of pixels of a window, f32[heads, pixels, pixels]."""
        w = self.window
        line = np.arange(1 - w, w) / (w - 1) * 8
        line = np.sign(line) * np.log2(np.abs(line) + 1) / 3
        table = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
        h = nn.relu(nn.Dense(512)(jnp.asarray(table, jnp.float32)))
        h = 16 * nn.sigmoid(nn.Dense(self.heads, use_bias=False)(h))
        at = np.stack(np.meshgrid(np.arange(w), np.arange(w), indexing="ij"), -1)
        at = at.reshape(-1, 2)
        apart = at[:, None] - at[None] + w - 1
        return h[apart[..., 0] * (2 * w - 1) + apart[..., 1]].transpose(2, 0, 1)

    def apart(self, n: int) -> Any:
        """What hides pixels that are not neighbours, f32[windows, pixels, pixels]."""
        w, side = self.window, n * self.window
        band = np.digitize(np.arange(side), [side - w, side - self.shift])
        region = band[:, None] * 3 + band
        region = region.reshape(n, w, n, w).swapaxes(1, 2).reshape(n * n, w * w)
        hidden = region[:, :, None] != region[:, None]
        return jnp.where(hidden, -100.0, 0.0)


class ShiftedWindows(nn.Module):
    """Two stages, whose blocks have norms behind them, and are skipped at random."""

    dtype: Any
    width: int
    window: int
    classes: int

    @nn.compact
    def __call__(self, images: Any, key: Any) -> Any:
        dtype, count = self.dtype, 0

        def norm(x: Any) -> Any:
            return nn.LayerNorm(dtype=dtype)(x)

        def sometimes(h: Any) -> Any:
            nonlocal count
            count += 1
            keep = 1 - 0.02 * count
            shape = len(h), 1, 1, 1
            kept = jax.random.bernoulli(jax.random.fold_in(key, count), keep, shape)
            return h * (kept / keep).astype(dtype)

        x = nn.Conv(self.width, (4, 4), (4, 4), dtype=dtype)(images.astype(dtype))
        x = norm(x)
        for stage in range(2):
            if stage:
                size, side, _, width = x.shape
                x = x.reshape(size, side // 2, 2, side // 2, 2, width).swapaxes(2, 3)
                x = x.reshape(size, side // 2, side // 2, 4 * width)
                x = norm(nn.Dense(2 * width, use_bias=False, dtype=dtype)(x))
            width = x.shape[-1]
            for shift in (0, self.window // 2):
                h = WindowAttention(dtype, width // 32, self.window, shift)(x)
                x = x + sometimes(norm(h))
                h = nn.gelu(nn.Dense(4 * width, dtype=dtype)(x), approximate=False)
                x = x + sometimes(norm(nn.Dense(width, dtype=dtype)(h)))
        x = f32(norm(x)).mean((1, 2)).astype(dtype)
        return f32(nn.Dense(self.classes, dtype=dtype)(x))


def shifted_windows(
    dtype: Any,
    size: int = 64,
    side: int = 128,
    width: int = 96,
    window: int = 8,
    classes: int = 1000,
) -> Workload:
    """Swin V2 with mixed pictures and labels."""

    def loss(apply: Any, batch: Any) -> Any:
        images, labels, part, key = batch
        images = part * images + (1 - part) * images[::-1]
        labels = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
        labels = part * labels + (1 - part) * labels[::-1]
        return optax.softmax_cross_entropy(apply(images, key), labels).mean()

    def batch(key: Any) -> Any:
        images = jax.random.normal(key, (size, side, side, 3))
        labels = jax.random.randint(key, (size,), 0, classes)
        return images, labels, jax.random.beta(key, 0.8, 0.8), key

    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(1e-3))
    return of_linen(
        ShiftedWindows(dtype, width, window, classes),
        (jnp.zeros((1, side, side, 3)), jax.random.key(0)),
        loss,
        batch,
        tx,
    )


# ---- segments of long texts, plain JAX


def layer_norm(p: Any, x: Any) -> Any:
    """Statistics in float32; the result is of the type of what is read."""
    h = f32(x)
    h = h - h.mean(-1, keepdims=True)
    h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5)
    return (h * p["scale"] + p["shift"]).astype(x.dtype)


def norm_of(width: int) -> Any:
    return {"scale": jnp.ones((width,)), "shift": jnp.zeros((width,))}


def segments(
    dtype: Any,
    size: int = 8,
    length: int = 512,
    memory: int = 512,
    width: int = 512,
    layers: int = 3,
    cutoffs: tuple[int, ...] = (2048, 6144, 16384),
) -> Workload:
    """Transformer-XL: what layers held before is remembered; an adaptive softmax."""
    heads, starts = width // 64, (0, *cutoffs[:-1])
    sizes = [b - a for a, b in zip(starts, cutoffs, strict=True)]

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 8 * layers + 10))

        def weight(*shape: int) -> Any:
            return 0.02 * jax.random.normal(next(keys), shape)

        def layer() -> Any:
            return {
                "q": weight(width, width),
                "kv": weight(width, 2 * width),
                "r": weight(width, width),
                "out": weight(width, width),
                "up": weight(width, 4 * width),
                "down": weight(4 * width, width),
                "norms": [norm_of(width), norm_of(width)],
            }

        params = {
            # rarer words have fewer features
            "tables": [weight(n, width >> 2 * i) for i, n in enumerate(sizes)],
            "project": [weight(width >> 2 * i, width) for i in range(len(sizes))],
            "tails": weight(len(sizes) - 1, width),
            "bias": jnp.zeros((cutoffs[-1] + len(sizes) - 1,)),
            "u": weight(heads, 64),
            "v": weight(heads, 64),
            "layers": [layer() for _ in range(layers)],
        }
        return params, jnp.zeros((layers, size, memory, width))

    def shifted(x: Any) -> Any:
        """Places relative to keys from places relative to queries."""
        *lead, q, k = x.shape
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0)))
        return x.reshape(*lead, k + 1, q)[:, :, 1:].reshape(*lead, q, k)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, key = batch
        ids, labels = ids[:, :-1], ids[:, 1:]
        p = cast(params, dtype, lambda path: "norms" in path or "bias" in path)
        keys = iter(jax.random.split(key, 2 * layers + 1))

        def dropped(x: Any) -> Any:
            kept = jax.random.bernoulli(next(keys), 0.9, x.shape)
            return jnp.where(kept, x / jnp.asarray(0.9, x.dtype), 0)

        x = 0
        for i, (low, high) in enumerate(zip(starts, cutoffs, strict=True)):
            own = (ids >= low) & (ids < high)
            at = jnp.clip(ids - low, 0, high - low - 1)
            found = p["tables"][i][at] @ p["project"][i]
            x = x + jnp.where(own[..., None], found, 0)
        x = dropped(x * jnp.asarray(width**0.5, dtype))

        keys_seen = memory + length
        ago = jnp.arange(keys_seen - 1, -1, -1.0)
        angles = ago[:, None] * 1e4 ** -(jnp.arange(width // 2) / (width // 2))
        places = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
        hidden = jnp.arange(keys_seen) > jnp.arange(length)[:, None] + memory
        remembered = []
        for layer, before in zip(p["layers"], state, strict=True):
            remembered.append(jnp.concatenate([before, f32(x)], 1)[:, -memory:])
            both = jnp.concatenate([before.astype(dtype), x], 1)
            q = (x @ layer["q"]).reshape(size, length, heads, 64)
            k, v = jnp.split(both @ layer["kv"], 2, -1)
            k, v = (y.reshape(size, keys_seen, heads, 64) for y in (k, v))
            r = (places @ layer["r"]).reshape(keys_seen, heads, 64)
            content = jnp.einsum("bqhd,bkhd->bhqk", q + p["u"], k)
            place = shifted(jnp.einsum("bqhd,khd->bhqk", q + p["v"], r))
            scores = (f32(content) + f32(place)) / 8
            scores = jnp.where(hidden, -1e30, scores)
            weights = jax.nn.softmax(scores).astype(dtype)
            h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = layer_norm(layer["norms"][0], x + dropped(h @ layer["out"]))
            h = jax.nn.relu(x @ layer["up"]) @ layer["down"]
            x = layer_norm(layer["norms"][1], x + dropped(h))

        bias, tails = p["bias"], len(sizes) - 1
        first = jnp.concatenate([p["tables"][0] @ p["project"][0], p["tails"]])
        logits = f32(x @ first.T) + bias[: sizes[0] + tails]
        log = jax.nn.log_softmax(logits)
        label = jnp.minimum(labels, sizes[0] - 1)
        total = jnp.take_along_axis(log, label[..., None], -1)[..., 0]
        for i in range(1, tails + 1):
            low, high = starts[i], cutoffs[i]
            own = (labels >= low) & (labels < high)
            h = x @ p["project"][i].T
            logits = f32(h @ p["tables"][i].T) + bias[tails + low : tails + high]
            at = jnp.clip(labels - low, 0, high - low - 1)
            each = log[..., sizes[0] + i - 1] - cross_entropy(logits, at)
            total = jnp.where(own, each, total)
        return -total.mean(), jax.lax.stop_gradient(jnp.stack(remembered))

    def batch(key: Any) -> Any:
        shape = size, length + 1
        return jax.random.randint(key, shape, 0, cutoffs[-1]), key

    rates = optax.cosine_decay_schedule(2.5e-4, 200000)
    tx = optax.chain(optax.clip_by_global_norm(0.25), optax.adam(rates))
    return Workload(init, loss, batch, tx)


# ---- learning to learn, plain JAX


def meta_learning(
    dtype: Any,
    tasks: int = 4,
    classes: int = 5,
    shots: int = 5,
    asked: int = 10,
    side: int = 80,
    width: int = 32,
    steps: int = 3,
) -> Workload:
    """MAML with learnt rates: a gradient through steps of gradient descent."""

    def init(key: Any) -> Any:
        keys = jax.random.split(key, 5)
        net = {"layers": []}
        for i in range(4):
            shape = 3, 3, 3 if i == 0 else width, width
            w = jax.random.normal(keys[i], shape) * (9 * shape[2] / 2) ** -0.5
            norm = {"scale": jnp.ones((width,)), "shift": jnp.zeros((width,))}
            net["layers"].append({"w": w, "norm": norm})
        ins = (side // 16) ** 2 * width
        net["last"] = jax.random.normal(keys[4], (ins, classes)) * ins**-0.5
        net["bias"] = jnp.zeros((classes,))
        return {"net": net, "rates": jax.tree.map(lambda x: 0.01 + 0 * x, net)}, ()

    def network(net: Any, x: Any) -> Any:
        x = x.astype(dtype)
        for layer in net["layers"]:
            x = jax.lax.conv_general_dilated(
                *(x, layer["w"].astype(dtype), (1, 1), "SAME"),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            h = f32(x)  # statistics of the batch at hand, always
            mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
            h = (h - mean) * jax.lax.rsqrt(var + 1e-5)
            h = h * layer["norm"]["scale"] + layer["norm"]["shift"]
            x = jax.nn.relu(h.astype(dtype))
            size, n = len(x), x.shape[1] // 2
            x = x.reshape(size, n, 2, n, 2, width).max((2, 4))
        x = x.reshape(len(x), -1) @ net["last"].astype(dtype)
        return f32(x) + net["bias"]

    def of_net(net: Any, seen: Any) -> Any:
        images, labels = seen
        return cross_entropy(network(net, images), labels).mean()

    def of_task(params: Any, shown: Any, asked: Any) -> Any:
        @jax.checkpoint
        def one(net: Any, _: Any) -> Any:
            grads = jax.grad(of_net)(net, shown)
            down = lambda w, r, g: w - r * g  # noqa: E731
            net = jax.tree.map(down, net, params["rates"], grads)
            return net, of_net(net, asked)

        net, losses = jax.lax.scan(one, params["net"], None, steps)
        # each step's network is asked, the last ones most
        weights = jnp.arange(1.0, steps + 1)
        return (losses * weights).sum() / weights.sum()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        return jax.vmap(of_task, (None, 0, 0))(params, *batch).mean(), state

    def batch(key: Any) -> Any:
        def of(count: int) -> Any:
            images = jax.random.normal(key, (tasks, classes * count, side, side, 3))
            labels = jnp.tile(jnp.arange(classes), (tasks, count))
            return images, labels

        return of(shots), of(asked)

    tx = optax.chain(optax.clip(10.0), optax.adam(1e-3))
    return Workload(init, loss, batch, tx)


# ---- reversible layers, plain JAX


def random_features(x: Any, directions: Any, query: bool) -> Any:
    """Positive ones, whose products are the softmax's on average; in float32."""
    x = f32(x) * x.shape[-1] ** -0.25
    seen = jnp.einsum("blhd,md->blhm", x, directions)
    seen = seen - (x**2).sum(-1, keepdims=True) / 2
    most = seen.max(-1 if query else (1, 3), keepdims=True)
    return jnp.exp(seen - jax.lax.stop_gradient(most)) + 1e-4


def of_attention(p: Any, x: Any, directions: Any, dtype: Any) -> Any:
    """FAVOR+: linear in the length. Reads and returns a float32 stream."""
    h = layer_norm(p["norm"], x).astype(dtype)
    q, k, v = jnp.split(h @ p["qkv"].astype(dtype), 3, -1)
    q, k, v = (y.reshape(*y.shape[:2], -1, 64) for y in (q, k, v))
    q = random_features(q, directions, True)
    k = random_features(k, directions, False)
    total = 1 / jnp.einsum("blhm,bhm->blh", q, k.sum(1))
    memory = jnp.einsum("blhm,blhd->bhmd", k.astype(dtype), v)
    h = jnp.einsum("blhm,bhmd->blhd", q.astype(dtype), memory)
    h = h * total[..., None].astype(dtype)
    return f32(h.reshape(x.shape) @ p["out"].astype(dtype))


def of_network(p: Any, x: Any, dtype: Any) -> Any:
    h = layer_norm(p["norm"], x).astype(dtype)
    h = jax.nn.gelu(h @ p["up"].astype(dtype) + p["bias"].astype(dtype))
    return f32(h @ p["down"].astype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reversed_layers(dtype: Any, params: Any, directions: Any, streams: Any) -> Any:
    """Two float32 streams, which take turns; the backward pass runs them back."""

    def one(streams: Any, p: Any) -> Any:
        a, b = streams
        a = a + of_attention(p["attend"], b, directions, dtype)
        b = b + of_network(p["network"], a, dtype)
        return (a, b), None

    return jax.lax.scan(one, streams, params)[0]


def reversed_forward(dtype: Any, params: Any, directions: Any, streams: Any) -> Any:
    streams = reversed_layers(dtype, params, directions, streams)
    return streams, (params, directions, streams)


def reversed_backward(dtype: Any, kept: Any, cts: Any) -> Any:
    params, directions, streams = kept

    def one(carry: Any, p: Any) -> Any:
        (a, b), (ct_a, ct_b) = carry
        h, vjp = jax.vjp(lambda p, x: of_network(p, x, dtype), p["network"], a)
        b = b - h
        ct_network, more = vjp(ct_b)
        ct_a = ct_a + more
        h, vjp = jax.vjp(
            lambda p, x: of_attention(p, x, directions, dtype), p["attend"], b
        )
        a = a - h
        ct_attend, more = vjp(ct_a)
        ct_b = ct_b + more
        return ((a, b), (ct_a, ct_b)), {"attend": ct_attend, "network": ct_network}

    (_, cts), grads = jax.lax.scan(one, (streams, cts), params, reverse=True)
    return grads, jnp.zeros_like(directions), cts


reversed_layers.defvjp(reversed_forward, reversed_backward)


def reversible(
    dtype: Any,
    size: int = 8,
    length: int = 2048,
    width: int = 512,
    layers: int = 6,
    features: int = 128,
    letters: int = 32,
) -> Workload:
    """A reversible Performer: hidden letters of proteins."""

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 8))

        def weight(*shape: int) -> Any:
            return jax.random.normal(next(keys), (layers, *shape)) * shape[0] ** -0.5

        norm = jax.tree.map(lambda x: jnp.tile(x, (layers, 1)), norm_of(width))
        params = {
            "layers": {
                "attend": {
                    "norm": norm,
                    "qkv": weight(width, 3 * width),
                    "out": weight(width, width),
                },
                "network": {
                    "norm": norm,
                    "up": weight(width, 4 * width),
                    "bias": jnp.zeros((layers, 4 * width)),
                    "down": weight(4 * width, width),
                },
            },
            "embed": 0.02 * jax.random.normal(next(keys), (letters, width)),
            "places": 0.02 * jax.random.normal(next(keys), (length, width)),
            "norm": norm_of(width),
        }
        # orthogonal directions, which no one learns
        blocks = jax.random.normal(next(keys), (features // 64, 64, 64))
        directions = jnp.linalg.qr(blocks)[0].reshape(features, 64) * 8
        return params, directions

    def loss(params: Any, directions: Any, batch: Any) -> Any:
        ids, labels, hidden = batch
        x = params["embed"][ids] + params["places"]
        a, b = reversed_layers(dtype, params["layers"], directions, (x, x))
        x = layer_norm(params["norm"], (a + b) / 2).astype(dtype)
        logits = f32(x @ params["embed"].astype(dtype).T)
        each = jnp.where(hidden, cross_entropy(logits, labels), 0)
        return each.sum() / jnp.maximum(hidden.sum(), 1), directions

    def batch(key: Any) -> Any:
        labels = jax.random.randint(key, (size, length), 1, letters)
        hidden = jax.random.bernoulli(key, 0.15, labels.shape)
        return jnp.where(hidden, 0, labels), labels, hidden

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return Workload(init, loss, batch, tx)


# ---- no norms, Haiku


class Standardized(hk.Module):
    """A convolution of weights without mean and of unit size, in float32."""

    def __init__(
        self, outs: int, kernel: int, dtype: Any, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.outs, self.kernel, self.dtype = outs, kernel, dtype
        self.stride, self.groups = stride, groups

    def __call__(self, x: Any) -> Any:
        shape = self.kernel, self.kernel, x.shape[-1] // self.groups, self.outs
        w = hk.get_parameter("w", shape, init=hk.initializers.VarianceScaling())
        gain = hk.get_parameter("gain", (self.outs,), init=jnp.ones)
        mean, var = w.mean((0, 1, 2)), w.var((0, 1, 2))
        scale = jax.lax.rsqrt(jnp.maximum(var * np.prod(shape[:3]), 1e-4)) * gain
        w = (w * scale - mean * scale).astype(self.dtype)
        x = jax.lax.conv_general_dilated(
            *(x, w, (self.stride, self.stride), "SAME"),
            feature_group_count=self.groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return x + hk.get_parameter("b", (self.outs,), init=jnp.zeros).astype(x.dtype)


def normalizer_free(
    dtype: Any,
    size: int = 64,
    side: int = 128,
    width: int = 256,
    group: int = 64,
    depths: tuple[int, ...] = (1, 2, 2),
    classes: int = 1000,
) -> Workload:
    """NFNet: no norms, standardized weights, gradients clipped unit by unit."""

    def act(x: Any) -> Any:
        return jax.nn.gelu(x) * jnp.asarray(1.7015043497085571, x.dtype)

    def block(x: Any, outs: int, stride: int, beta: float, keep: float) -> Any:
        inner = outs // 2

        def conv(n: int, kernel: int, **kw: Any) -> hk.Module:
            return Standardized(n, kernel, dtype, **kw)

        h = act(x) * jnp.asarray(beta, dtype)
        if stride > 1 or x.shape[-1] != outs:
            short = h
            if stride > 1:
                n, rows, columns, ins = h.shape
                short = h.reshape(n, rows // 2, 2, columns // 2, 2, ins).mean((2, 4))
            x = conv(outs, 1)(short)
        h = act(conv(inner, 1)(h))
        h = act(conv(inner, 3, stride=stride, groups=inner // group)(h))
        h = act(conv(inner, 3, groups=inner // group)(h))
        h = conv(outs, 1)(h)
        s = f32(h).mean((1, 2)).astype(dtype)
        s = hk.Linear(outs)(jax.nn.relu(hk.Linear(outs // 2)(s)))
        h = 2 * jax.nn.sigmoid(s)[:, None, None] * h
        kept = jax.random.bernoulli(hk.next_rng_key(), keep, (len(h), 1, 1, 1))
        gain = hk.get_parameter("skip_gain", (), init=jnp.zeros)
        return x + h * (kept / keep * gain * 0.2).astype(dtype)

    def network(x: Any) -> Any:
        x = Standardized(16, 3, dtype, stride=2)(x)
        for n in (32, 64):
            x = Standardized(n, 3, dtype)(act(x))
        x = Standardized(width // 2, 3, dtype, stride=2)(act(x))
        expected, outs, count = 1.0, width, 0
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride, count = 2 if stage and i == 0 else 1, count + 1
                x = block(x, outs, stride, expected**-0.5, 1 - 0.04 * count)
                expected = (1.0 if i == 0 else expected) + 0.2**2
            outs *= 2
        x = act(Standardized(outs, 1, dtype)(x))
        x = f32(x).mean((1, 2)).astype(dtype)
        kept = jax.random.bernoulli(hk.next_rng_key(), 0.8, x.shape)
        x = jnp.where(kept, x / jnp.asarray(0.8, dtype), 0)
        return hk.Linear(classes, w_init=hk.initializers.RandomNormal(0.01))(x)

    net = hk.transform(network)

    def init(key: Any) -> Any:
        return net.init(key, jnp.zeros((1, side, side, 3))), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        images, labels, key = batch
        # standardized before they are cast
        half = cast(params, dtype, lambda path: "linear" not in path)
        logits = f32(net.apply(half, key, images.astype(dtype)))
        labels = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean(), state

    def batch(key: Any) -> Any:
        images = jax.random.normal(key, (size, side, side, 3))
        return images, jax.random.randint(key, (size,), 0, classes), key

    tx = optax.chain(
        optax.adaptive_grad_clip(0.01),
        optax.add_decayed_weights(2e-5),
        optax.sgd(0.1, momentum=0.9, nesterov=True),
    )
    return Workload(init, loss, batch, tx)


# ---- what is clicked next, NNX


class Transducer(nnx.Module):
    """HSTU: attention by SiLU without a softmax, biased by places and times."""

    def __init__(self, width: int, length: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(a: int, b: int, bias: bool) -> nnx.Module:
            return nnx.Linear(a, b, use_bias=bias, dtype=dtype, rngs=rngs)

        self.norms = nnx.List(
            [nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.enter = linear(width, 4 * width, False)
        self.leave = linear(width, width, True)
        normal = nnx.initializers.normal(0.02)
        self.places = nnx.Param(normal(rngs.params(), (2 * length - 1,)))
        self.times = nnx.Param(normal(rngs.params(), (129,)))
        self.dtype, self.dropout = dtype, nnx.Dropout(0.2)

    def __call__(self, x: Any, buckets: Any, mask: Any, key: Any) -> Any:
        size, length, width = x.shape
        h = nnx.silu(self.enter(self.norms[0](x)))
        u, v, q, k = jnp.split(h, 4, -1)
        v, q, k = (y.reshape(size, length, -1, 64) for y in (v, q, k))
        apart = jnp.arange(length)[:, None] - jnp.arange(length) + length - 1
        places = self.places[...].astype(self.dtype)[apart]
        bias = places + self.times[...].astype(self.dtype)[buckets]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias[:, None]
        weights = jnp.where(mask[:, None], nnx.silu(scores) / length, 0)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        h = self.dropout(u * self.norms[1](h), rngs=key, deterministic=False)
        return x + self.leave(h)


class Sequences(nnx.Module):
    def __init__(
        self,
        items: int,
        width: int,
        length: int,
        layers: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.items = nnx.Embed(items, width, dtype=dtype, rngs=rngs)
        self.ratings = nnx.Embed(6, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [Transducer(width, length, dtype, rngs) for _ in range(layers)]
        )

    def __call__(self, ids: Any, ratings: Any, times: Any, key: Any) -> Any:
        x = self.items(ids) + self.ratings(ratings)
        length = ids.shape[1]
        apart = jnp.abs(times[:, :, None] - times[:, None]).astype(jnp.float32)
        buckets = jnp.log(jnp.maximum(apart, 1)) / 0.301
        buckets = jnp.clip(buckets.astype(jnp.int32), 0, 128)
        mask = jnp.tril(jnp.ones((length, length), bool)) & (ids > 0)[:, None]
        for i, layer in enumerate(self.layers):
            x = layer(x, buckets, mask, jax.random.fold_in(key, i))
        return x


def sequences(
    dtype: Any,
    size: int = 32,
    length: int = 256,
    width: int = 256,
    layers: int = 4,
    items: int = 60000,
    negatives: int = 1024,
) -> Workload:
    """The next item, beside sampled others, by HSTU; scores are cosines."""

    def make(key: Any) -> Sequences:
        return Sequences(items, width, length, layers, dtype, nnx.Rngs(params=key))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))

    def init(key: Any) -> Any:
        return nnx.split(make(key))[1], ()

    def unit(x: Any) -> Any:
        x = f32(x)
        return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        ids, ratings, times, others, log_rates, key = batch
        model = nnx.merge(graph, params)
        x = model(ids[:, :-1], ratings[:, :-1], times[:, :-1], key)
        x, wanted = unit(x), ids[:, 1:]
        right = unit(model.items(wanted))
        wrong = unit(model.items(others)).astype(dtype)
        first = (x * right).sum(-1, keepdims=True) / 0.05
        rest = f32(jnp.einsum("bld,nd->bln", x.astype(dtype), wrong)) / 0.05
        # of what is sampled often less is made
        rest = rest - log_rates
        rest = jnp.where(wanted[..., None] == others, -5e4, rest)
        logits = jnp.concatenate([first, rest], -1)
        each = jax.nn.logsumexp(logits, -1) - first[..., 0]
        counted = wanted > 0
        each = jnp.where(counted, each, 0)
        return each.sum() / jnp.maximum(counted.sum(), 1), state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        ids = jax.random.randint(keys[0], (size, length + 1), 0, items)
        ratings = jax.random.randint(keys[1], ids.shape, 0, 6)
        times = jax.random.randint(keys[2], ids.shape, 0, 10000).cumsum(1)
        others = jax.random.randint(keys[3], (negatives,), 1, items)
        return ids, ratings, times, others, jnp.zeros((negatives,)), key

    return Workload(init, loss, batch, optax.adamw(1e-3, b2=0.98, weight_decay=0.0))


# ---- actors and a learner, Haiku


def actors(
    dtype: Any,
    size: int = 32,
    length: int = 20,
    rows: int = 72,
    columns: int = 96,
    actions: int = 15,
    width: int = 256,
) -> Workload:
    """IMPALA: what actors did is corrected for what the learner would do (V-trace)."""

    def lstm(carry: Any, x: Any) -> Any:
        """The cell is float32; what is multiplied is half."""
        h, c = carry
        gates = hk.Linear(4 * width, name="core")(jnp.concatenate([x, h], -1))
        i, g, f, o = jnp.split(f32(gates), 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(dtype)
        return (h, c), h

    def network(frames: Any, played: Any, rewards: Any, begins: Any, core: Any) -> Any:
        """Logits and values, f32[length + 1, size, ...]."""
        x = frames.reshape(-1, rows, columns, 3).astype(dtype) / 255
        for n in (16, 32, 32):
            x = hk.Conv2D(n, 3)(x)
            x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
            for _ in range(2):
                h = hk.Conv2D(n, 3)(jax.nn.relu(x))
                x = x + hk.Conv2D(n, 3)(jax.nn.relu(h))
        x = hk.Linear(256)(jax.nn.relu(x).reshape(len(x), -1))
        x = jax.nn.relu(x).reshape(*frames.shape[:2], 256)
        played = jax.nn.one_hot(played, actions, dtype=dtype)
        rewards = jnp.clip(rewards, -1, 1)[..., None].astype(dtype)
        x = jnp.concatenate([x, played, rewards], -1)

        def one(core: Any, seen: Any) -> Any:
            x, begins = seen
            forget = lambda y: jnp.where(begins[:, None], 0, y)  # noqa: E731
            return lstm(jax.tree.map(forget, core), x)

        h, c = core
        core, x = hk.scan(one, (h.astype(dtype), c), (x, begins))
        logits = hk.Linear(actions, name="policy")(x)
        values = hk.Linear(1, name="value")(x)[..., 0]
        return f32(logits), f32(values), jax.tree.map(f32, core)

    net = hk.without_apply_rng(hk.transform(network))

    def init(key: Any) -> Any:
        core = (jnp.zeros((size, width)),) * 2
        seen = (
            jnp.zeros((1, size, rows, columns, 3)),
            jnp.zeros((1, size), jnp.int32),
            jnp.zeros((1, size)),
            jnp.zeros((1, size), bool),
        )
        return net.init(key, *seen, core), ()

    def loss(params: Any, state: Any, batch: Any) -> Any:
        frames, played, rewards, begins, before, core = batch
        half = cast(params, dtype)
        last = jnp.concatenate([played[:1], played])
        seen = jnp.concatenate([rewards[:1], rewards])
        logits, values, _ = net.apply(half, frames, last, seen, begins, core)

        def log_of(logits: Any) -> Any:
            log = jax.nn.log_softmax(logits)
            return jnp.take_along_axis(log, played[..., None], -1)[..., 0]

        log = log_of(logits[:-1])
        ratios = jax.lax.stop_gradient(jnp.exp(log - log_of(before)))
        clipped = jnp.minimum(ratios, 1)
        fixed = jax.lax.stop_gradient(values)
        discounts = jnp.where(begins[1:], 0, 0.99)
        rewards = jnp.clip(rewards, -1, 1)
        deltas = clipped * (rewards + discounts * fixed[1:] - fixed[:-1])

        def back(total: Any, seen: Any) -> Any:
            delta, discount, ratio = seen
            total = delta + discount * ratio * total
            return total, total

        first = jnp.zeros((size,))
        _, more = jax.lax.scan(back, first, (deltas, discounts, clipped), reverse=True)
        targets = fixed[:-1] + more
        after = jnp.concatenate([targets[1:], fixed[-1:]])
        gain = clipped * (rewards + discounts * after - fixed[:-1])
        probabilities = jax.nn.softmax(logits[:-1])
        entropy = -(probabilities * jax.nn.log_softmax(logits[:-1])).sum()
        of_values = 0.5 * ((targets - values[:-1]) ** 2).sum()
        return -(log * gain).sum() + 0.5 * of_values - 0.01 * entropy, state

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 5)
        shape = length + 1, size, rows, columns, 3
        frames = jax.random.randint(keys[0], shape, 0, 256).astype(jnp.uint8)
        return (
            frames,
            jax.random.randint(keys[1], (length, size), 0, actions),
            jax.random.normal(keys[2], (length, size)),
            jax.random.bernoulli(keys[3], 0.02, (length + 1, size)),
            jax.random.normal(keys[4], (length, size, actions)),
            (jnp.zeros((size, width)), jnp.zeros((size, width))),
        )

    rates = optax.linear_schedule(6e-4, 0.0, 1000000)
    tx = optax.chain(
        optax.clip_by_global_norm(40.0), optax.rmsprop(rates, decay=0.99, eps=0.1)
    )
    return Workload(init, loss, batch, tx)


# ---- depths of a text's tokens, NNX


class DepthBlock(nnx.Module):
    """Attention and a gated network, of some of the places of a text."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        def linear(a: int, b: int) -> nnx.Module:
            return nnx.Linear(a, b, use_bias=False, dtype=dtype, rngs=rngs)

        self.norms = nnx.List(
            [nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)]
        )
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 6 * width), linear(3 * width, width)
        self.dtype = dtype

    def __call__(self, x: Any, places: Any) -> Any:
        """What is added to the tokens at these places, i32[size, count]."""
        q, k, v = jnp.split(self.qkv(self.norms[0](x)), 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], -1, 64) for y in (q, k, v))
        angles = places[..., None, None] * 1e4 ** -(jnp.arange(32) / 32)
        sin, cos = jnp.sin(angles), jnp.cos(angles)

        def rotate(x: Any) -> Any:
            a, b = jnp.split(f32(x), 2, -1)
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            return x.astype(self.dtype)

        scores = f32(jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k))) / 8
        mask = places[:, :, None] >= places[:, None]
        scores = jnp.where(mask[:, None], scores, -1e30)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        h = self.out(h.reshape(x.shape))
        gate, up = jnp.split(self.up(self.norms[1](x + h)), 2, -1)
        return h + self.down(nnx.silu(gate) * up)


class Depths(nnx.Module):
    """Every other block reads an eighth of the tokens, those that it chooses."""

    def __init__(
        self, width: int, layers: int, vocabulary: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([DepthBlock(width, dtype, rngs) for _ in range(layers)])
        n = layers // 2
        # float32, as routers are
        self.routers = nnx.List([nnx.Linear(width, 1, rngs=rngs) for _ in range(n)])
        self.guesses = nnx.List(
            [
                nnx.List(
                    [
                        nnx.Linear(width, width // 4, dtype=dtype, rngs=rngs),
                        nnx.Linear(width // 4, 1, dtype=dtype, rngs=rngs),
                    ]
                )
                for _ in range(n)
            ]
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, ids: Any) -> tuple[Any, Any]:
        """Logits, and the loss of what guesses what will be chosen."""
        x, extra = self.embed(ids), 0.0
        size, length = ids.shape
        places = jnp.broadcast_to(jnp.arange(length), ids.shape)
        for i, block in enumerate(self.blocks):
            if i % 2 == 0:
                x = x + block(x, places)
                continue
            router, guess = self.routers[i // 2], self.guesses[i // 2]
            score = router(f32(x))[..., 0]
            _, chosen = jax.lax.top_k(score, length // 8)
            chosen = jnp.sort(chosen, -1)
            weight = jax.nn.sigmoid(jnp.take_along_axis(score, chosen, 1))
            part = jnp.take_along_axis(x, chosen[..., None], 1)
            more = block(part, chosen) * weight[..., None].astype(self.dtype)
            rows = jnp.arange(size)[:, None]
            hit = jnp.zeros(ids.shape).at[rows, chosen].set(1.0)
            h = nnx.silu(guess[0](jax.lax.stop_gradient(x)))
            found = f32(guess[1](h))[..., 0]
            extra += optax.sigmoid_binary_cross_entropy(found, hit).mean()
            x = x.at[rows, chosen].add(more)
        return f32(self.embed.attend(self.norm(x))), extra


def depths(
    dtype: Any,
    size: int = 4,
    length: int = 1024,
    width: int = 512,
    layers: int = 4,
    vocabulary: int = 16384,
) -> Workload:
    """Mixture-of-Depths: a decoder some of whose blocks skip most tokens."""

    def make(key: Any) -> Depths:
        return Depths(width, layers, vocabulary, dtype, nnx.Rngs(key))

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param)

    def init(key: Any) -> Any:
        return nnx.state(make(key), nnx.Param), ()

    def loss(params: Any, state: Any, ids: Any) -> Any:
        logits, extra = nnx.merge(graph, params)(ids[:, :-1])
        return cross_entropy(logits, ids[:, 1:]).mean() + 0.01 * extra, state

    def batch(key: Any) -> Any:
        return jax.random.randint(key, (size, length + 1), 0, vocabulary)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    )
    return Workload(init, loss, batch, tx)


# ---- sparse features of activations, plain JAX


class SparseFeatures(NamedTuple):
    """A top-k autoencoder of activations; what is never active helps with the rest."""

    dtype: Any
    size: int = 4096
    width: int = 768
    features: int = 16384
    active: int = 32
    revived: int = 256
    optimizer: Any = optax.adam(1e-4, eps=6.25e-10)

    def loss(self, params: Any, idle: Any, x: Any) -> Any:
        p = cast(params, self.dtype, lambda path: "shift" in path)
        half = (x - params["shift"]).astype(self.dtype)
        before = half @ p["encode"] + p["bias"]

        def decoded(before: Any, count: int) -> Any:
            values, at = jax.lax.top_k(before, count)
            rows = jnp.arange(len(before))[:, None]
            code = jnp.zeros_like(before).at[rows, at].set(jax.nn.relu(values))
            return f32(code @ p["decode"]), code

        out, code = decoded(before, self.active)
        rest = x - params["shift"] - out
        size = ((x - x.mean(0)) ** 2).sum(-1).mean()
        value = (rest**2).sum(-1).mean() / size
        # the idle ones, of what is left
        asleep = jnp.where(idle > 1000, before, -jnp.inf)
        asleep = jnp.where(jnp.isfinite(asleep), asleep, 0)
        again, _ = decoded(asleep, self.revived)
        left = jax.lax.stop_gradient(rest)
        extra = ((left - again) ** 2).sum(-1).mean() / (left**2).sum(-1).mean()
        idle = jnp.where((code > 0).any(0), 0, idle + 1)
        return value + jnp.nan_to_num(extra) / 32, idle

    def step(self, params: Any, opt_state: Any, idle: Any, x: Any) -> Any:
        (value, idle), grads = jax.value_and_grad(self.loss, has_aux=True)(
            params, idle, x
        )
        # directions are of length one, and move along the sphere
        w, g = params["decode"], grads["decode"]
        g = g - (g * w).sum(-1, keepdims=True) * w
        grads = {**grads, "decode": g}
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        w = params["decode"]
        w = w / jnp.linalg.norm(w, axis=-1, keepdims=True)
        return {**params, "decode": w}, opt_state, idle, value

    def arguments(self) -> Any:
        return jax.eval_shape(self.make, jax.random.key(0))

    def make(self, key: Any) -> Any:
        a, b = jax.random.split(key)
        decode = jax.random.normal(a, (self.features, self.width))
        decode = decode / jnp.linalg.norm(decode, axis=-1, keepdims=True)
        params = {
            "encode": decode.T,
            "bias": jnp.zeros((self.features,)),
            "decode": decode,
            "shift": jnp.zeros((self.width,)),
        }
        idle = jnp.zeros((self.features,), jnp.int32)
        x = jax.random.normal(b, (self.size, self.width))
        return params, self.optimizer.init(params), idle, x
