"""The main job's training: Keras' mixed precision guide, in JAX, on real digits.

The guide is TensorFlow's "Mixed precision" (docs/site/en/guide/keras/mixed_precision):
flatten, two wide dense layers, logits; RMSprop; every policy from the same weights.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Var
from sklearn import datasets, model_selection

import jmp_rewrite as jmpr

Params = list[dict[str, jax.Array]]
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Course:
    """What is trained, and for how long; the same for every policy.

    Attributes:
      units: width of both hidden layers.
      epochs: passes over the training images.
      batch_size: images a step; what is left of an epoch is dropped.
      seed: decides the split, the weights and the order of the images.
      force_overflow: step whose loss is weighted by infinity in runs with loss
        scaling; None for no step.
      learning_rate: RMSprop's. At Keras' default, 1e-3, the accuracy jumps by up to
        10 points between two epochs in float32 too, which would hide the comparison.
      growth_interval: finite steps before the loss scale grows. The library's
        default, 2000, is longer than this course.
    """

    units: int
    epochs: int = 30
    batch_size: int = 256
    seed: int = 0
    force_overflow: int | None = None
    learning_rate: float = 3e-4
    growth_interval: int = 20


class Digits(NamedTuple):
    """Handwritten digits: images f32[n, 8, 8] from 0 to 1, labels i32[n]."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray

    def steps_per_epoch(self, course: Course) -> int:
        """Number of whole batches."""
        return len(self.train_labels) // course.batch_size


@dataclasses.dataclass
class Run:
    """What one policy's training showed, a value a step or a value an epoch."""

    policy: str
    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)
    scaled: bool = False
    test_loss: float = float("nan")
    activation_bytes: int = 0


def load_digits(seed: int) -> Digits:
    """Reads scikit-learn's 1,797 digits and keeps a fifth for the test."""
    digits = datasets.load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    return Digits(
        *model_selection.train_test_split(
            images, labels, test_size=0.2, stratify=labels, random_state=seed
        )
    )


def init_params(seed: int, units: int) -> Params:
    """Draws the weights of the three layers (He et al. 2015, equation 10)."""
    sizes = [(64, units), (units, units), (units, 10)]
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    normal = jax.nn.initializers.he_normal()
    return [
        {"w": normal(key, size, jnp.float32), "b": jnp.zeros((size[1],), jnp.float32)}
        for key, size in zip(keys, sizes, strict=True)
    ]


def forward(params: Params, images: jax.Array) -> jax.Array:
    """Computes the logits: f32[B, 8, 8] -> f32[B, 10]."""
    x = images.reshape(images.shape[0], -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None, :])
    return x @ params[-1]["w"] + params[-1]["b"][None, :]


def cross_entropy(params: Params, batch: Batch) -> jax.Array:
    """Averages the negative log-likelihood of the labels: f32[]."""
    logits = forward(params, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean() * batch["weight"]


def metrics(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy on a batch: f32[], f32[]."""
    guesses = forward(params, batch["image"]).argmax(-1)
    return cross_entropy(params, batch), (guesses == batch["label"]).mean()


def make_step(
    tx: optax.GradientTransformationExtraArgs, policy: jmpr.Policy
) -> Callable[..., Any]:
    """Builds the jitted train step: a whole step under ``policy``."""

    @jax.jit
    @jmpr.mixed_precision(policy)
    def train_step(params, opt_state, batch):
        def loss_fn(params):
            return jmpr.scale_loss(cross_entropy(params, batch), opt_state)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def make_batch(images: np.ndarray, labels: np.ndarray, weight: float = 1.0) -> Batch:
    """Puts a batch on the device, with the weight of its loss."""
    batch = {"image": images, "label": labels, "weight": np.float32(weight)}
    return jax.device_put(batch)


def batches(digits: Digits, course: Course, epoch: int) -> Iterator[np.ndarray]:
    """Yields the indices of an epoch's batches, the same for every policy."""
    rng = np.random.default_rng([course.seed, epoch])
    order = rng.permutation(len(digits.train_labels))
    for step in range(digits.steps_per_epoch(course)):
        yield order[step * course.batch_size :][: course.batch_size]


def activation_bytes(policy: jmpr.Policy, params: Params, batch: Batch) -> int:
    """Counts what the forward pass keeps for the backward pass, in bytes.

    Counted are the residuals of ``jax.vjp`` of the rewritten loss that depend on the
    batch, each once; parameters, their half copies and the batch itself are not
    activations. XLA may recompute some of them.
    """

    def residuals(params: Params, batch: Batch) -> list[Any]:
        loss = jmpr.mixed_precision(cross_entropy, policy)
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, batch), params)[1])

    jaxpr: Any = jax.make_jaxpr(residuals)(params, batch).jaxpr
    inputs = set(jaxpr.invars[len(jax.tree.leaves(params)) :])
    reached = set(inputs)
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    kept = {v for v in jaxpr.outvars if isinstance(v, Var) and v in reached} - inputs
    avals: list[Any] = [v.aval for v in kept]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def train(
    name: str, digits: Digits, course: Course, progress: Callable[[Run], None]
) -> Run:
    """Trains one policy from the course's initial weights, and measures it.

    Args:
      name: the policy, for example ``"mixed_bfloat16"``.
      digits: the images.
      course: everything that the policies share.
      progress: called with the run after every step.

    Returns:
      The run, with everything that the table and the figure show.
    """
    policy = jmpr.Policy(name)
    tx = jmpr.loss_scaling(
        optax.rmsprop(course.learning_rate),
        policy.loss_scale,
        growth_interval=course.growth_interval,
    )
    params = init_params(course.seed, course.units)
    opt_state = tx.init(params)
    train_step = make_step(tx, policy)
    evaluate = jax.jit(jmpr.mixed_precision(metrics, policy))
    test = make_batch(digits.test_images, digits.test_labels)

    run = Run(name, scaled=policy.loss_scale is not None)
    run.activation_bytes = activation_bytes(
        policy, params, next(_epoch(digits, course, run, 0))
    )
    for epoch in range(course.epochs):
        for batch in _epoch(digits, course, run, epoch):
            start = time.perf_counter()
            params, opt_state, loss = jax.block_until_ready(
                train_step(params, opt_state, batch)
            )
            run.step_ms.append(1e3 * (time.perf_counter() - start))
            state = jmpr.loss_scale_state(opt_state)
            run.losses.append(float(loss))
            run.scales.append(float(state.loss_scale))
            run.skipped.append(not state.last_step_finite)
            progress(run)
        loss, accuracy = evaluate(params, test)
        run.test_loss = float(loss)
        run.accuracies.append(float(accuracy))
    return run


def _epoch(digits: Digits, course: Course, run: Run, epoch: int) -> Iterator[Batch]:
    """Yields an epoch's batches; the one that is to overflow weighs infinity."""
    for indices in batches(digits, course, epoch):
        forced = run.scaled and len(run.losses) == course.force_overflow
        images, labels = digits.train_images[indices], digits.train_labels[indices]
        yield make_batch(images, labels, np.inf if forced else 1.0)
