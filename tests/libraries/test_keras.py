"""Keras 3 on JAX: scopes by layer, `fit`, and a model of `keras.applications`."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, dtypes_in, eqns, products, relative_error, trace
from stacks import cross_entropy, digits

from jmp_rewrite import Policy, mixed_precision

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

BF16 = "mixed_bfloat16"


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def classifier():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(32, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.1),
            layers.Dense(16, activation="gelu", name="second"),
            layers.Dense(10, name="head"),
        ]
    )


def values(variables):
    return [v.value for v in variables]


def gradient(model):
    def loss_fn(params, stats, x, y):
        logits, stats = model.stateless_call(params, stats, x, training=True)
        return cross_entropy(logits, y), stats

    return jax.grad(loss_fn, has_aux=True)


def arguments(model, rows=8):
    x, y = digits()
    params, stats = model.trainable_variables, model.non_trainable_variables
    return values(params), values(stats), x[:rows], y[:rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "full"),
    [("second", 3), ("first", 2), ("^(first|head)$", 5), ("norm", 0)],
)
def test_scopes_are_names_of_layers(pattern, full):
    """Keras' `dtype="float32"` of one layer, forward and backward."""
    model = classifier()
    policy = Policy(BF16, scopes={pattern: "float32"})
    rewritten = trace(mixed_precision(gradient(model), policy), *arguments(model))
    found = [dtypes_in(e)[0] for e in products(rewritten)]
    assert len(found) == 8 and found.count("float32") == full


@functools.cache
def losses_of_fit(policy):
    x, y = digits()
    model = classifier()
    adam = keras.optimizers.Adam(3e-3)
    if policy == "mixed_float16":
        adam = keras.optimizers.LossScaleOptimizer(adam)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adam, loss, metrics=["accuracy"])
    model.train_step = mixed_precision(model.train_step, policy)
    log = model.fit(x[:1500], y[:1500], batch_size=125, epochs=4, verbose=0)
    assert {v.dtype for v in model.weights} <= {"float32", "uint32"}
    return log.history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BF16, "mixed_float16"])
def test_fit(policy):
    """`fit` runs the decorated `train_step`; Keras' own loss scaling is used."""
    losses = losses_of_fit(policy)
    assert losses[-1] < 0.5 * losses[0]
    # As in test_stacks.py: three times the difference that was seen.
    np.testing.assert_allclose(losses, losses_of_fit("float32"), rtol=0.045)


@pytest.mark.slow
def test_a_step_decorated_after_fit_is_heard():
    """Keras goes on with the step that it has compiled, until the next `compile`."""
    x, y = digits()

    def fit(run):
        run(x[:64], y[:64], batch_size=64, verbose=0)

    model = classifier()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model.fit)
    mixed_precision(model.train_step, BF16)  # not used, and nobody asked for it
    fit(model.fit)
    model.train_step = mixed_precision(model.train_step, BF16)
    with pytest.warns(UserWarning, match=r"call model\.compile") as heard:
        fit(model.fit)
    assert [w.filename for w in heard] == [__file__]
    fit(model.fit)  # it is heard once


@pytest.mark.slow
def test_a_step_decorated_before_compile_is_not():
    x, y = digits()
    model = classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    model.fit(x[:64], y[:64], batch_size=64, verbose=0)
    model.train_step = mixed_precision(model.train_step, BF16)
    model.compile("sgd", loss)
    model.fit(x[:64], y[:64], batch_size=64, verbose=0)


def test_fit_is_half():
    model = classifier()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step = mixed_precision(model.train_step, BF16)
    x, y = digits()
    model.optimizer.build(model.trainable_variables)
    state = (
        values(model.trainable_variables),
        values(model.non_trainable_variables),
        values(model.optimizer.variables),
        values(model.metrics_variables),
    )
    rewritten = trace(lambda *s: step(s, (x[:8], y[:8])), *state)
    found = [d for e in products(rewritten) for d in dtypes_in(e)]
    assert len(found) == 16 and set(found) == {"bfloat16"}


@pytest.mark.slow
def test_applications(monkeypatch):
    """MobileNet: every convolution is half, every statistic and update float32."""
    zeros = lambda self, shape, dtype=None: np.zeros(shape, "f4")  # noqa: E731
    monkeypatch.setattr(keras.initializers.GlorotUniform, "__call__", zeros)  # fast
    model = keras.applications.MobileNet(
        (32, 32, 3),
        alpha=0.25,
        weights=None,
        classes=10,
        classifier_activation=None,
    )
    params, stats, _, y = arguments(model)
    x = np.zeros((8, 32, 32, 3), "f4")
    grad = gradient(model)

    def step(params, stats, x, y):
        grads, stats = grad(params, stats, x, y)
        return optax.apply_updates(params, grads), stats

    policy = Policy(BF16, scopes={"conv_pw_13$": "float32"})
    rewritten = trace(mixed_precision(step, policy), params, stats, x, y)
    found = [tuple(dtypes_in(e)) for e in products(rewritten)]
    assert len(found) == 83 and found.count(("float32",) * 2) == 3
    assert found.count(("bfloat16",) * 2) == 80
    for eqn in eqns(rewritten, "reduce_sum", "rsqrt"):
        assert "bfloat16" not in dtypes_in(eqn)
    assert {v.aval.dtype for v in rewritten.jaxpr.outvars} <= {
        jnp.dtype("float32"),
        jnp.dtype("uint32"),
    }


@pytest.mark.slow
def test_keras_s_own_policy_is_left_alone():
    """A layer that Keras runs in half stays as it is, and gives the same values."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(4, dtype="mixed_bfloat16")]
    )
    params, stats, x, _ = arguments(model)
    apply = lambda *a: model.stateless_call(*a)[0]  # noqa: E731
    plain, half = apply(params, stats, x), mixed_precision(apply, BF16)
    result = half(params, stats, x)
    assert result.dtype == plain.dtype
    assert relative_error(arrays(result), arrays(plain)) == 0
