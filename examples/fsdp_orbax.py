"""Train with fully sharded parameters (FSDP) in bfloat16, and resume from orbax.

Usage:
    python examples/fsdp_orbax.py                 # 8 simulated devices on a CPU
    python examples/fsdp_orbax.py --cpu-devices 0 --width 8192 --layers 16 \
        --batch 8192                              # all GPUs or TPUs

Every weight and every moment of AdamW is split over all devices. A weight is cast
before it is gathered, so half as many bytes travel between devices. The state is saved
half-way, restored into the same shardings, and trained on to the same loss.

Expected output (2 CPU cores, JAX 0.12):
    8 devices, each holds (32, 256) of a weight (256, 256)
    step  20  loss 4.5466  saved
    step  40  loss 3.5399
    step  40  loss 3.5399  from the checkpoint
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import jmp_rewrite as jmpr


def init_params(key: jax.Array, layers: int, width: int) -> list[jax.Array]:
    """Returns one square weight a layer, in float32."""
    init = jax.nn.initializers.he_normal()
    return [init(k, (width, width)) for k in jax.random.split(key, layers)]


def make_step(tx: optax.GradientTransformation, policy: str) -> Callable[..., Any]:
    """Returns a jitted step: `(state, batch) -> (state, loss)`."""

    @jax.jit(donate_argnums=0)
    @jmpr.mixed_precision(policy)
    def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            x = batch["x"]
            for weight in params:
                x = x + jax.nn.gelu(x @ weight)
            loss = jnp.mean((x - batch["y"]) ** 2)
            return jmpr.scale_loss(loss, state["opt_state"])

        params, opt_state = state["params"], state["opt_state"]
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, loss

    return train_step


def shardings_of(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Splits the first dimension of every matrix; everything else is replicated."""

    def sharding(x: Any) -> NamedSharding:
        spec = PartitionSpec("data") if x.ndim == 2 else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map(sharding, tree)


def make_batch(seed: int, args: argparse.Namespace, sharding: Any) -> Any:
    """Returns random inputs and a fixed linear function of them, split by rows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((args.batch, args.width), np.float32)
    y = np.roll(x, 1, axis=1)
    return jax.device_put({"x": x, "y": y}, sharding)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Reads the flags; see `train`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--cpu-devices", type=int, default=8, help="0: as they are")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoints", help="folder (default: a temporary one)")
    args = parser.parse_args(argv)
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    with tempfile.TemporaryDirectory() as temporary:
        return train(args, pathlib.Path(args.checkpoints or temporary).resolve())


def train(args: argparse.Namespace, folder: pathlib.Path) -> tuple[float, float]:
    """Trains, restores and trains again; returns the two final losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tx = jmpr.loss_scaling(optax.adamw(1e-3), jmpr.Policy(args.policy).loss_scale)

    def init() -> dict[str, Any]:
        params = init_params(jax.random.key(0), args.layers, args.width)
        return {"params": params, "opt_state": tx.init(params)}

    shapes = jax.eval_shape(init)
    shardings = shardings_of(shapes, mesh)
    state = jax.jit(init, out_shardings=shardings)()
    weight = state["params"][0]
    held = weight.addressable_shards[0].data.shape
    print(f"{mesh.size} devices, each holds {held} of a weight {weight.shape}")

    train_step = make_step(tx, args.policy)
    half = args.steps // 2
    with ocp.StandardCheckpointer() as checkpointer:
        for step in range(1, args.steps + 1):
            state, loss = train_step(state, make_batch(step, args, rows))
            if step == half:
                checkpointer.save(folder / "half", state, force=True)
                checkpointer.wait_until_finished()
                print(f"step {step:3}  loss {loss:.4f}  saved")
        print(f"step {step:3}  loss {loss:.4f}")

        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        )
        state = checkpointer.restore(folder / "half", target)
    for step in range(half + 1, args.steps + 1):
        state, again = train_step(state, make_batch(step, args, rows))
    print(f"step {step:3}  loss {again:.4f}  from the checkpoint")
    return float(loss), float(again)


if __name__ == "__main__":
    main()
