"""Graphs, potentials and recurrences of the second zoo."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.common import Workload, at_least_float32

ATOMS, EDGES, SPECIES, WIDTH = 1024, 16384, 8, 128


class Potential(nn.Module):
    """Continuous-filter convolutions (as SchNet's): energy of atoms at positions."""

    dtype: Any

    @nn.compact
    def __call__(self, positions: Any, species: Any, edges: Any) -> Any:
        senders, receivers = edges
        apart = positions[senders] - positions[receivers]
        distance = jnp.sqrt(jnp.sum(apart**2, -1) + 1e-8)
        centres = jnp.linspace(0.0, 5.0, 64)
        basis = jnp.exp(-10.0 * (distance[:, None] - centres) ** 2)
        cutoff = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(distance, 5.0) / 5.0) + 1.0)

        def dense(width: int, **options: Any) -> nn.Module:
            return nn.Dense(width, dtype=self.dtype, **options)

        h = nn.Embed(SPECIES, WIDTH, dtype=self.dtype)(species)
        for _ in range(3):
            filters = dense(WIDTH)(nn.softplus(dense(WIDTH)(basis)))
            filters = filters * cutoff[:, None].astype(filters.dtype)
            messages = dense(WIDTH, use_bias=False)(h)[senders] * filters
            gathered = jax.ops.segment_sum(messages, receivers, ATOMS)
            h = h + dense(WIDTH)(nn.softplus(dense(WIDTH)(gathered)))
        atomic = dense(1)(nn.softplus(dense(WIDTH // 2)(h)))
        return atomic.astype(jnp.float32).sum()


def potential(dtype: Any) -> Workload:
    """An interatomic potential that is trained on energies and forces."""
    model = Potential(dtype)

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 5)
        return {
            "positions": jax.random.normal(keys[0], (ATOMS, 3)),
            "species": jax.random.randint(keys[1], (ATOMS,), 0, SPECIES),
            "edges": jax.random.randint(keys[2], (2, EDGES), 0, ATOMS),
            "energy": jax.random.normal(keys[3]),
            "forces": jax.random.normal(keys[4], (ATOMS, 3)),
        }

    def init(key: Any) -> Any:
        x = batch(key)
        return model.init(key, x["positions"], x["species"], x["edges"])["params"], ()

    def loss(params: Any, state: Any, x: Any) -> Any:
        def energy(positions: Any) -> Any:
            return model.apply({"params": params}, positions, x["species"], x["edges"])

        value, slope = jax.value_and_grad(energy)(x["positions"])
        forces = jnp.mean((-slope - x["forces"]) ** 2)
        return ((value - x["energy"]) / ATOMS) ** 2 + 10.0 * forces, state

    return Workload(init, loss, batch, optax.adamw(1e-3))


# ---- a graph network


class Interactions(nn.Module):
    """An encoder, message passing with residuals on nodes and edges, a decoder."""

    dtype: Any

    @nn.compact
    def __call__(self, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        def mlp(x: Any) -> Any:
            for _ in range(2):
                x = nn.relu(nn.Dense(WIDTH, dtype=self.dtype)(x))
            x = nn.Dense(WIDTH, dtype=self.dtype)(x)
            return nn.LayerNorm(dtype=self.dtype)(x)

        nodes, edges = mlp(nodes), mlp(edges)
        for _ in range(3):
            ends = [nodes[senders], nodes[receivers]]
            new = mlp(jnp.concatenate([edges, *ends], -1))
            received = jax.ops.segment_sum(new, receivers, ATOMS)
            nodes = nodes + mlp(jnp.concatenate([nodes, received], -1))
            edges = edges + new
        return nn.Dense(3, dtype=self.dtype)(nodes)


def graph_network(dtype: Any) -> Workload:
    """A learnt simulator: accelerations of particles from their neighbours."""
    model = Interactions(dtype)

    def batch(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        edges = jax.random.randint(keys[0], (2, EDGES), 0, ATOMS)
        features = (
            jax.random.normal(keys[1], (ATOMS, 16)),
            jax.random.normal(keys[2], (EDGES, 4)),
            *edges,
        )
        return features, jax.random.normal(keys[3], (ATOMS, 3))

    def init(key: Any) -> Any:
        return model.init(key, *batch(key)[0])["params"], ()

    def loss(params: Any, state: Any, x: Any) -> Any:
        features, target = x
        out = at_least_float32(model.apply({"params": params}, *features))
        return jnp.mean((out - target) ** 2), state

    return Workload(init, loss, batch, optax.adam(1e-4))
