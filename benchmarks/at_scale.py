"""Train steps over many chips, by the TPU's compiler: memory and what is on the wire.

    PYTHONPATH=. python benchmarks/at_scale.py [--programs NAME ...] [--json FILE]

Nothing is run. Each program is compiled for a described topology in float32, in
bfloat16 by hand (`astype` in the layer, as Flax' `dtype=` does it), decorated, and
decorated with gradients reduced in half. All figures are of one chip and one step:
estimated cycles, temporary memory, and the bytes of collectives by kind and dtype.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import devices  # noqa: F401  it chooses the backend, so it comes before jax
import jax
import jax.numpy as jnp
import optax
import results
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_rewrite as jmpr
from jmp_rewrite._cost import hlo
from jmp_rewrite._cost.compile import Job, compile_jobs
from jmp_rewrite._cost.devices import target as target_of
from jmp_rewrite._cost.estimate import estimate
from jmp_rewrite._cost.program import Program, lower

TIME_LIMIT = 7200.0
# Losses, counters and norms' scales are smaller than this, a chip.
LEAST = 2**14


class Scaled(NamedTuple):
    """A train step and how its arrays lie.

    Attributes:
      topology: of the devices.
      step: `(params, opt_state, batch) -> (params, opt_state, loss)`.
      arguments: shapes, dtypes and shardings of the arguments.
    """

    topology: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def mesh_of(**sizes: int) -> AbstractMesh:
    """A mesh of devices that nobody holds."""
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def train_step(loss: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """The step of a loss and an optimizer."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def placed(mesh: Any, params: Any, specs: Any, tx: Any, batch: Any) -> tuple[Any, ...]:
    """Arguments of a step: moments lie as their parameters, the rest is copied."""

    def lay(x: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = optax.tree.map_params(
        tx,
        lay,
        jax.eval_shape(tx.init, params),
        specs,
        transform_non_params=lambda x: lay(x, P()),
    )
    return jax.tree.map(lay, params, specs), state, batch


# ---- a decoder


class Sizes(NamedTuple):
    """Of a decoder with RMSNorm, rotary positions and SwiGLU."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    length: int


def normed(x: Any, scale: Any, dtype: Any) -> Any:
    """RMSNorm in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(dtype)


def rotated(x: Any) -> Any:
    """Rotary position embeddings of `[batch, length, heads, size]`."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def decoder(
    sizes: Sizes, topology: str, mesh: Any, batch: int, specs: Any, dtype: Any
) -> Scaled:
    """A scanned, checkpointed decoder; `specs` says how each weight is sharded."""
    rows = NamedSharding(mesh, P("data"))
    d, f, n = sizes.width, sizes.hidden, sizes.layers

    def shapes() -> Any:
        make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        layer = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d)}
        layer |= {"gate": (d, f), "up": (d, f), "down": (f, d)}
        layers = {name: make((n, *shape)) for name, shape in layer.items()}
        layers |= {"first": make((n, d)), "second": make((n, d))}
        embedding = make((sizes.vocabulary, d))
        return {"embed": embedding, "layers": layers, "head": embedding}

    def block(x: Any, w: Any) -> Any:
        def product(x: Any, name: str) -> Any:
            return x @ w[name].astype(dtype)

        def heads(y: Any) -> Any:
            return y.reshape(*y.shape[:2], sizes.heads, -1)

        h = normed(x, w["first"], dtype)
        q, k, v = (heads(product(h, name)) for name in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", rotated(q), rotated(k))
        seen = jnp.tri(sizes.length, dtype=bool)
        scores = scores.astype(jnp.float32) * (d // sizes.heads) ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(dtype)
        out = jnp.einsum("bhts,bshd->bthd", weights, v)
        x = x + product(out.reshape(x.shape), "o")
        h = normed(x, w["second"], dtype)
        h = jax.nn.silu(product(h, "gate")) * product(h, "up")
        return lax.with_sharding_constraint(x + product(h, "down"), rows), None

    def loss(params: Any, ids: Any) -> Any:
        x = params["embed"].astype(dtype)[ids[:, :-1]]
        x = lax.with_sharding_constraint(x, rows)
        x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = (x @ params["head"].astype(dtype).T).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels
        return found(logits, ids[:, 1:]).mean()

    tx = optax.adamw(3e-4)
    ids = jax.ShapeDtypeStruct((batch, sizes.length + 1), jnp.int32, sharding=rows)
    params = shapes()
    arguments = placed(mesh, params, specs(params), tx, ids)
    return Scaled(topology, train_step(loss, tx), arguments)


def fsdp(dtype: Any) -> Scaled:
    """6.7 billion parameters over 256 chips, a sequence of 2,048 each."""
    mesh = mesh_of(data=256)
    sizes = Sizes(32, 4096, 11008, 32, 32000, 2048)

    def spec(x: Any) -> Any:
        return P(*([None] * (x.ndim - 2)), "data") if x.shape[-2] % 256 == 0 else P()

    def specs(params: Any) -> Any:
        return jax.tree.map(spec, params)

    return decoder(sizes, "v5e:16x16", mesh, 256, specs, dtype)


def tensor_parallel(dtype: Any) -> Scaled:
    """1.3 billion parameters: weights over 4 chips by columns or rows, and over 4."""
    mesh = mesh_of(data=4, model=4)
    sizes = Sizes(24, 2048, 5504, 16, 32000, 1024)

    def specs(params: Any) -> Any:
        def spec(path: Any, x: Any) -> Any:
            name = path[-1].key
            if name in ("embed", "head"):
                return P("model", "data")
            if name in ("first", "second"):
                return P()
            by_rows = name in ("o", "down")
            return P(None, "model", "data") if by_rows else P(None, "data", "model")

        return jax.tree_util.tree_map_with_path(spec, params)

    return decoder(sizes, "v5e:4x4", mesh, 16, specs, dtype)


# ---- a pipeline


def pipeline(dtype: Any) -> Scaled:
    """16 stages of two layers; 32 microbatches go from chip to chip."""
    mesh, stages, microbatches, rows, width = mesh_of(stage=16), 16, 32, 512, 2048
    forth = [(i, (i + 1) % stages) for i in range(stages)]

    def layer(w: Any, x: Any) -> Any:
        h = jax.nn.gelu(x @ w["up"].astype(dtype))
        return x + h @ w["down"].astype(dtype)

    def run(w: Any, x: Any) -> Any:
        stage = lax.axis_index("stage")

        def tick(carry: Any, t: Any) -> Any:
            came = lax.ppermute(carry, "stage", forth)
            new = lax.dynamic_index_in_dim(x, t % microbatches, keepdims=False)
            y = jnp.where(stage == 0, new.astype(dtype), came)
            for i in range(2):
                y = layer(jax.tree.map(lambda a, i=i: a[i], w), y)
            return y, y

        start = lax.pcast(jnp.zeros((rows, width), dtype), "stage", to="varying")
        _, out = lax.scan(tick, start, jnp.arange(microbatches + stages - 1))
        out = out[stages - 1 :].astype(jnp.float32)
        return lax.psum(jnp.where(stage == stages - 1, out, 0.0), "stage")

    net = jax.shard_map(
        jax.checkpoint(run), mesh=mesh, in_specs=(P("stage"), P()), out_specs=P()
    )

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        x = x.astype(dtype) @ params["first"].astype(dtype)
        out = net(params["stages"], x).astype(dtype) @ params["last"].astype(dtype)
        return jnp.mean((out.astype(jnp.float32) - y) ** 2)

    tx = optax.adam(1e-3)
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {
        "stages": {
            "up": make((2 * stages, width, 4 * width)),
            "down": make((2 * stages, 4 * width, width)),
        },
        "first": make((256, width)),
        "last": make((width, 256)),
    }
    x = make((microbatches, rows, 256), sharding=NamedSharding(mesh, P()))
    layout = {"up": P("stage"), "down": P("stage")}
    specs = {"stages": layout, "first": P(), "last": P()}
    arguments = placed(mesh, params, specs, tx, (x, x))
    return Scaled("v5e:4x4", train_step(loss, tx), arguments)


# ---- experts


def experts(dtype: Any) -> Scaled:
    """An expert a chip; rows go to their experts and back by `all_to_all`."""
    mesh, count, rows, width = mesh_of(expert=16), 16, 2048, 1024

    def run(w: Any, x: Any) -> Any:
        x = x @ w["first"].astype(dtype)
        for i in range(4):
            h = x.astype(jnp.float32)
            gates = jax.nn.softmax(h @ w["router"][i])
            best = gates.argmax(-1)
            order = jnp.argsort(best)
            sent = x[order].reshape(count, rows // count, width).astype(dtype)
            got = lax.all_to_all(sent, "expert", 0, 0).reshape(rows, width)
            y = jax.nn.gelu(got @ w["up"][i, 0].astype(dtype))
            y = (y @ w["down"][i, 0].astype(dtype)).reshape(sent.shape)
            back = lax.all_to_all(y, "expert", 0, 0).reshape(rows, width)
            gate = jnp.take_along_axis(gates, best[:, None], -1).astype(dtype)
            x = x + gate * jnp.zeros_like(back).at[order].set(back)
        return x @ w["last"].astype(dtype)

    layout = {"router": P(), "up": P(None, "expert"), "down": P(None, "expert")}
    layout |= {"first": P(), "last": P()}
    net = jax.shard_map(
        run, mesh=mesh, in_specs=(layout, P("expert")), out_specs=P("expert")
    )

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        return jnp.mean((net(params, x.astype(dtype)).astype(jnp.float32) - y) ** 2)

    tx = optax.adam(1e-3)
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {
        "router": make((4, width, count)),
        "up": make((4, count, width, 4 * width)),
        "down": make((4, count, 4 * width, width)),
        "first": make((256, width)),
        "last": make((width, 256)),
    }
    x = make((count * rows, 256), sharding=NamedSharding(mesh, P("expert")))
    arguments = placed(mesh, params, layout, tx, (x, x))
    return Scaled("v5e:4x4", train_step(loss, tx), arguments)


PROGRAMS = {
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "experts": experts,
}
POLICY = jmpr.Policy("mixed_bfloat16")
WAYS = {
    "float32": (jnp.float32, None),
    "by hand": (jnp.bfloat16, None),
    "ours": (jnp.float32, POLICY),
    "ours, reduced in half": (
        jnp.float32,
        jmpr.Policy("mixed_bfloat16", reduce_dtype="bfloat16"),
    ),
}


def row(name: str, way: str) -> dict[str, Any]:
    """What the compiler says of a program written in one way."""
    dtype, policy = WAYS[way]
    topology, step, arguments = PROGRAMS[name](dtype)
    if policy is not None:
        step = jmpr.mixed_precision(step, policy)
    start = time.perf_counter()
    closed = jax.make_jaxpr(lambda *a: step(*a))(*arguments)
    traced = time.perf_counter() - start
    leaves = jax.tree.leaves(arguments)
    kept = jax.tree.leaves(arguments[:-1])
    shardings = [x.sharding for x in leaves]
    out = [x.sharding for x in kept]
    program = Program(
        name,
        closed,
        [i < len(kept) for i in range(len(leaves))],
        shardings,
        [*out, *[None] * (len(closed.out_avals) - len(out))],
    )
    on = target_of(f"TPU {topology}")
    start = time.perf_counter()
    lowered = lower(program, on)
    [found] = compile_jobs([Job(on, lowered)], TIME_LIMIT)
    if "error" in found.answer:
        return {"error": found.answer["error"]}
    seen = estimate(found, on)
    moved = hlo.parse(found.text).collectives(LEAST)
    return {
        "mcycles": seen.estimated_cycles and seen.estimated_cycles / 1e6,
        "mb_temp": seen.temporary_bytes / 1e6,
        "gb_accessed": seen.bytes_accessed and seen.bytes_accessed / 1e9,
        "seconds_to_trace": round(traced, 2),
        "seconds_to_compile": round(time.perf_counter() - start, 1),
        "mb_moved": {
            f"{kind} {dtype}": round(size / 1e6, 2)
            for (kind, dtype), size in sorted(moved.items())
        },
    }


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--json", metavar="FILE", help="add the rows to this file")
    options = parser.parse_args()
    for name in options.programs:
        for way in options.ways:
            found = row(name, way)
            print(f"{name:16}{way:24}{found}", flush=True)
            if options.json:
                results.merge(options.json, "rows", {name: {way: found}})


if __name__ == "__main__":
    main()
