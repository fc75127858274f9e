"""The same classifier of handwritten digits in every framework, with its train step.

Each stack is built for a policy and returns three functions. The lines that mixed
precision adds to a step are the decorator, `loss_scaling`, `scale_loss` and, where a
step carries more than parameters and optimizer state, `where_applied`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import datasets

from jmp_rewrite import Policy, loss_scaling, mixed_precision, scale_loss, where_applied

WIDTH, CLASSES, RATE, DROPOUT = 64, 10, 3e-3, 0.1


class Stack(NamedTuple):
    """A framework's train step under one policy.

    Attributes:
      init: makes the state from a seed.
      step: `(state, x, y) -> (state, loss)`, compiled; the state may be changed in
        place.
      predict: `(state, x) -> logits`, in float32.
    """

    init: Callable[[int], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    predict: Callable[[Any, Any], Any]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns 1797 images as f32[1797, 64] in [0, 1], and their labels."""
    data = datasets.load_digits()
    return (data.data / 16).astype("f4"), data.target.astype("i4")


def cross_entropy(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optimizer(policy: Any) -> Any:
    return loss_scaling(optax.adam(RATE), Policy(policy).loss_scale)


def plain_jax(policy: Any) -> Stack:
    """No framework: a dictionary of arrays, a layer norm and a residual block."""
    tx = optimizer(policy)

    def net(params, x):
        h = jax.nn.relu(x @ params["in"])
        normed = jax.nn.standardize(h) * params["scale"]
        h = h + jax.nn.gelu(normed @ params["up"]) @ params["down"]
        return h @ params["out"] + params["bias"]

    def init(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = {
            "in": (64, WIDTH),
            "up": (WIDTH, WIDTH),
            "down": (WIDTH, WIDTH),
            "out": (WIDTH, CLASSES),
        }
        params = {
            name: jax.random.normal(key, shape) / np.sqrt(shape[0])
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        params |= {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(CLASSES)}
        return params, tx.init(params)

    @jax.jit
    @mixed_precision(policy)
    def step(params, opt_state, x, y):
        def loss_fn(params):
            return scale_loss(cross_entropy(net(params, x), y), opt_state)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return Stack(
        init, lambda state, x, y: step(*state, x, y), lambda state, x: net(state[0], x)
    )


def linen(policy: Any) -> Stack:
    """Flax Linen with `TrainState`, batch statistics and dropout."""
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(WIDTH, name="first")(x)
            x = jax.nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
            x = nn.Dropout(DROPOUT, deterministic=not train)(x)
            x = jax.nn.relu(nn.Dense(WIDTH, name="second")(x))
            return nn.Dense(CLASSES, name="head")(x)

    class TrainState(train_state.TrainState):
        batch_stats: Any
        key: Any

    model, tx = Net(), optimizer(policy)

    @jax.jit
    def init(seed):
        key = jax.random.key(seed)
        variables = model.init(key, jnp.zeros((1, 64)), train=False)
        return TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            key=key,
            tx=tx,
        ).replace(step=jnp.zeros([], jnp.int32))  # 0 would be traced once more

    @jax.jit
    @mixed_precision(policy)
    def step(state, x, y):
        def loss_fn(params):
            logits, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(state.key, state.step)},
            )
            loss = scale_loss(cross_entropy(logits, y), state.opt_state)
            return loss, changed["batch_stats"]

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads, batch_stats=stats)
        # Neither the step counter nor the statistics move on a skipped step.
        kept = where_applied(new.opt_state, new, state)
        return kept.replace(opt_state=new.opt_state), loss

    def predict(state, x):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return model.apply(variables, x, train=False)

    return Stack(init, step, predict)


def nnx(policy: Any) -> Stack:
    """Flax NNX: modules and `nnx.Optimizer`, changed in place inside `nnx.jit`."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
            self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x):
            x = self.dropout(jax.nn.relu(self.norm(self.first(x))))
            return self.head(jax.nn.relu(self.second(x)))

    tx = optimizer(policy)

    def init(seed):
        model = Net(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    @mixed_precision(policy)
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return scale_loss(cross_entropy(model(x), y), optimizer.opt_state)

        old = nnx.as_pure(nnx.state((model, optimizer.step)))
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        new = nnx.as_pure(nnx.state((model, optimizer.step)))
        kept = where_applied(optimizer.opt_state, new, old)
        nnx.update((model, optimizer.step), kept)
        return loss

    def predict(state, x):
        model = nnx.merge(*nnx.split(state[0]))
        model.eval()
        return model(x)

    return Stack(init, lambda state, x, y: (state, step(*state, x, y)), predict)


def haiku(policy: Any) -> Stack:
    """Haiku's `transform_with_state`, with batch statistics and dropout."""
    hk = pytest.importorskip("haiku")

    def net(x, train):
        x = hk.Linear(WIDTH, name="first")(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=train))
        if train:
            x = hk.dropout(hk.next_rng_key(), DROPOUT, x)
        x = jax.nn.relu(hk.Linear(WIDTH, name="second")(x))
        return hk.Linear(CLASSES, name="head")(x)

    model, tx = hk.transform_with_state(net), optimizer(policy)

    @jax.jit
    def init(seed):
        key = jax.random.key(seed)
        params, stats = model.init(key, jnp.zeros((1, 64)), train=True)
        return params, stats, key, tx.init(params)

    @jax.jit
    @mixed_precision(policy)
    def step(params, stats, key, opt_state, x, y):
        def loss_fn(params):
            logits, new = model.apply(params, stats, key, x, train=True)
            return scale_loss(cross_entropy(logits, y), opt_state), new

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = grad_fn(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = new, jax.random.split(key, 1)[0]
        stats, key = where_applied(opt_state, new, (stats, key))
        return (optax.apply_updates(params, updates), stats, key, opt_state), loss

    def predict(state, x):
        return model.apply(*state[:2], None, x, train=False)[0]

    return Stack(init, lambda state, x, y: step(*state, x, y), predict)


def equinox(policy: Any) -> Stack:
    """Equinox: a module with a static field, batch statistics, `filter_jit`."""
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        first: Any
        norm: Any
        dropout: Any
        second: Any
        head: Any
        activation: Callable[..., Any] = eqx.field(static=True)

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.first = eqx.nn.Linear(64, WIDTH, key=keys[0])
            self.norm = eqx.nn.BatchNorm(WIDTH, "batch", momentum=0.9, mode="batch")
            self.dropout = eqx.nn.Dropout(DROPOUT)
            self.second = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
            self.head = eqx.nn.Linear(WIDTH, CLASSES, key=keys[2])
            self.activation = jax.nn.relu

        def __call__(self, x, stats, key):
            x, stats = self.norm(self.first(x), stats)
            x = self.dropout(self.activation(x), key=key)
            return self.head(self.activation(self.second(x))), stats

    tx = optimizer(policy)

    def init(seed):
        key = jax.random.key(seed)
        model, stats = eqx.nn.make_with_state(Net)(key)
        return model, stats, key, tx.init(eqx.filter(model, eqx.is_inexact_array))

    def apply(model, stats, keys, x):
        over = dict(axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return jax.vmap(model, **over)(x, stats, keys)

    @eqx.filter_jit
    @mixed_precision(policy)
    def step(model, stats, key, opt_state, x, y):
        def loss_fn(model):
            keys = jax.random.split(key, len(x))
            logits, new = apply(model, stats, keys, x)
            return scale_loss(cross_entropy(logits, y), opt_state), new

        grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = grad_fn(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = new, jax.random.split(key, 1)[0]
        stats, key = where_applied(opt_state, new, (stats, key))
        return (eqx.apply_updates(model, updates), stats, key, opt_state), loss

    @eqx.filter_jit
    def predict(state, x):
        model = eqx.nn.inference_mode(state[0])
        return apply(model, state[1], jax.random.split(state[2], len(x)), x)[0]

    return Stack(init, lambda state, x, y: step(*state, x, y), predict)


def keras(policy: Any) -> Stack:
    """Keras 3 on JAX through `stateless_call`, with batch statistics and dropout."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend: set KERAS_BACKEND=jax")
    layers = keras.layers
    tx = optimizer(policy)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(WIDTH, name="first"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Dropout(DROPOUT),
            layers.Dense(WIDTH, activation="relu", name="second"),
            layers.Dense(CLASSES, name="head"),
        ]
    )

    def init(seed):
        keras.utils.set_random_seed(seed)
        fresh = keras.models.clone_model(model)
        params = [v.value for v in fresh.trainable_variables]
        return params, [v.value for v in fresh.non_trainable_variables], tx.init(params)

    @jax.jit
    @mixed_precision(policy)
    def step(params, stats, opt_state, x, y):
        def loss_fn(params):
            logits, new = model.stateless_call(params, stats, x, training=True)
            return scale_loss(cross_entropy(logits, y), opt_state), new

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = grad_fn(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        stats = where_applied(opt_state, new, stats)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    def predict(state, x):
        return model.stateless_call(*state[:2], x, training=False)[0]

    return Stack(init, lambda state, x, y: step(*state, x, y), predict)


STACKS = (keras, plain_jax, linen, nnx, haiku, equinox)
