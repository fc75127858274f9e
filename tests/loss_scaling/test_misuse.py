"""Steps that scale what they do not unscale draw one warning; right ones none.

`filterwarnings = error` makes a failure of every warning, so each right step here, and
each in the other tests, is one that must stay silent.
"""

import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jmp_rewrite import (
    Policy,
    explain,
    loss_scale_state,
    loss_scaling,
    mixed_precision,
    scale_loss,
    unscale,
)


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


PARAMS = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 2))}
BATCH = jnp.ones((8, 4))
SGD = loss_scaling(optax.sgd(0.1))


def mse(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def scaled_grads(params, opt_state, x):
    return jax.grad(lambda p: scale_loss(mse(p, x), opt_state))(params)


def plain_grads(params, opt_state, x):
    return jax.grad(mse)(params, x)


def applied(params, grads, opt_state, tx=SGD, **kwargs):
    updates, opt_state = tx.update(grads, opt_state, params, **kwargs)
    return optax.apply_updates(params, updates), opt_state


update = applied  # see `through`


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))


def clip(grads, largest=1.0):
    tx = optax.clip_by_global_norm(largest)
    return tx.update(grads, tx.init(grads))[0]


def accumulated(grads_of):
    """The mean of the gradients of several microbatches, in a scan."""

    def grads(params, opt_state, x):
        def body(total, row):
            new = grads_of(params, opt_state, row)
            return jax.tree.map(jnp.add, total, new), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(body, zeros, x.reshape(4, 2, 4))
        return jax.tree.map(lambda g: g / 4, total)

    return grads


def step_of(grads_of, between=lambda grads, opt_state: grads, tx=SGD, **kwargs):
    def step(params, opt_state, x):
        grads = between(grads_of(params, opt_state, x), opt_state)
        return update(params, grads, opt_state, tx, **kwargs)

    return tx, step


def by_hand(params, opt_state, x):
    scale = loss_scale_state(opt_state).loss_scale
    return jax.grad(lambda p: mse(p, x) * scale)(params)


def clipped_by_true_norm(grads, opt_state):
    """Scaled gradients times min(1, 1 / norm of the true ones)."""
    true = norm(grads) / loss_scale_state(opt_state).loss_scale
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / true), grads)


def times_scale(grads, opt_state):
    scale = loss_scale_state(opt_state).loss_scale
    return jax.tree.map(lambda g: g * scale, grads)


def of(loss):
    """The gradients of a loss that scales itself."""
    return lambda params, state, x: jax.grad(loss)(params, state, x)


def penalty(params):
    return sum(jnp.sum(p**2) for p in params.values())


def scaled_in_a_loss(params, opt_state, x):
    return 2 * scale_loss(mse(params, x), opt_state)


def with_rule(rule):
    """A scaled loss whose backward rule returns this for `v`: no gradient."""

    @jax.custom_vjp
    def product(h, v):
        return h @ v

    product.defvjp(lambda h, v: (h @ v, (h, v)), lambda hv, g: (g @ hv[1].T, rule(*hv)))

    def loss(params, opt_state, x):
        h = product(jnp.tanh(x @ params["w"]), params["v"])
        return scale_loss(jnp.mean(h**2), opt_state)

    return step_of(of(loss))


def with_cotangent(rule, jit=lambda f: f):
    """A scaled loss of a layer whose backward rule does this with the cotangent."""

    @jax.custom_vjp
    def same(h, scale):
        return h

    same.defvjp(lambda h, scale: (h, scale), lambda scale, g: (rule(g, scale), None))

    @jit
    def loss(params, opt_state, x):
        h = same(jnp.tanh(x @ params["w"]), loss_scale_state(opt_state).loss_scale)
        return scale_loss(jnp.mean(jax.nn.relu(h @ params["v"]) ** 2), opt_state)

    return step_of(of(loss))


def moved(params, grads, by=0.05):
    return jax.tree.map(lambda p, g: p + by * g, params, grads)


def ascended(grads_of, outer=scaled_grads):
    """The gradients where a gradient has moved the parameters to, as SAM's."""

    def grads(params, opt_state, x):
        return outer(moved(params, grads_of(params, opt_state, x)), opt_state, x)

    return grads


def adapted(grads_of, steps=1):
    """The gradients through inner steps, as MAML's."""

    def loss(params, opt_state, x):
        def body(p, _):
            return moved(p, grads_of(p, opt_state, x), -0.05), None

        if steps == 1:
            params, _ = body(params, None)
        else:
            params, _ = jax.lax.scan(body, params, None, steps)
        return scale_loss(mse(params, x), opt_state)

    return of(loss)


def unscaled_grads(params, opt_state, x):
    return unscale(scaled_grads(params, opt_state, x), opt_state)


def normalized(params, opt_state, x):
    grads = scaled_grads(params, opt_state, x)
    return jax.tree.map(lambda g: g / (norm(grads) + 1e-12), grads)


def with_penalty(inner, penalty):
    """A scaled loss with a penalty on a gradient by the inputs."""

    def loss(params, opt_state, x):
        slope = jax.grad(lambda x: inner(mse(params, x), opt_state))(x)
        return scale_loss(mse(params, x) + penalty(norm(slope)), opt_state)

    return step_of(of(loss))


def with_unscaled_penalty(params, opt_state, x):
    def loss(p):
        slope = jax.grad(lambda x: scale_loss(mse(p, x), opt_state))(x)
        steepness = norm(unscale(slope, opt_state))
        return scale_loss(mse(p, x) + (steepness - 1) ** 2, opt_state)

    return jax.grad(loss)(params)


def embedded(params, x):
    """A loss with a lookup, a softmax and a maximum."""
    table = jnp.concatenate([params["w"], params["w"]])[jnp.arange(8)]
    h = jax.nn.relu(jax.nn.softmax(table * x) @ params["v"]).max(0)
    return jnp.mean(jax.nn.log_softmax(h) ** 2)


def adapted_lookup(jit=lambda f: f):
    def grads(params, opt_state, x):
        def loss(p):
            return scale_loss(embedded(p, x), opt_state)

        @jit
        def outer(p):
            return loss(moved(p, unscale(jax.grad(loss)(p), opt_state), -0.05))

        return jax.grad(outer)(params)

    return grads


def reptile(params, opt_state, x):
    ahead = moved(params, unscaled_grads(params, opt_state, x), -0.05)
    return jax.tree.map(jnp.subtract, params, ahead)


class Two:
    """The states of two optimizers; one for each of two networks."""

    def __init__(self, tx):
        self.init = lambda params: (tx.init(params), tx.init(params))


def two(grads_of, tx=SGD, **kwargs):
    """A step of a second network behind that of a first one."""

    def step(params, states, x):
        first = scaled_grads(params, states[0], x)
        second = grads_of(params, states, x)
        moved, state = update(params, first, states[0], tx)
        new, other = update(params, second, states[1], tx, **kwargs)
        return (moved, new), (state, other)

    return Two(tx), step


def in_turns(which):
    """A step whose second loss reads what the first update has moved."""

    def step(params, states, x):
        grads = scaled_grads(params, states[0], x)
        params, first = update(params, grads, states[0])
        grads = scaled_grads(params, which(first, states[1]), x)
        params, second = update(params, grads, states[1])
        return params, (first, second)

    return Two(SGD), step


def of_one_scale(params, states, x):
    """One loss feeds two updates."""
    first, second = states
    second = second._replace(loss_scale=first.loss_scale)
    grads = scaled_grads(params, first, x)
    moved, first = update(params, grads, first)
    new, second = update(params, grads, second)
    return (moved, new), (first, second)


def with_adaptive_weight(params, opt_state, x):
    """Two losses, the second as large as its gradient's norm says, as in a VQ-GAN."""
    first = scaled_grads(params, opt_state, x)
    second = jax.grad(lambda p: scale_loss(penalty(p), opt_state))(params)
    weight = jnp.clip(norm(first) / (norm(second) + 1e-4), 0.0, 1e4)
    weight = jax.lax.stop_gradient(weight)
    return jax.grad(lambda p: scale_loss(mse(p, x) + weight * penalty(p), opt_state))(
        params
    )


CLIP_INSIDE = optax.chain(optax.clip_by_global_norm(1.0), SGD)
FIXED = loss_scaling(optax.sgd(0.1), 1024.0)

WRONG = {
    "forgotten": ("return jmp_rewrite.scale_loss", step_of(plain_grads)),
    "forgotten, fixed scale": (
        "return jmp_rewrite.scale_loss",
        step_of(plain_grads, tx=FIXED),
    ),
    "forgotten, accumulated": (
        "return jmp_rewrite.scale_loss",
        step_of(accumulated(plain_grads)),
    ),
    "forgotten, unscaled": (
        "return jmp_rewrite.scale_loss",
        step_of(plain_grads, unscale, grads_unscaled=True),
    ),
    "forgotten, jitted gradient": (
        "return jmp_rewrite.scale_loss",
        step_of(lambda p, s, x: jax.jit(jax.grad(mse))(p, x)),
    ),
    "divided twice": ("grads_unscaled=True", step_of(scaled_grads, unscale)),
    "divided twice, clipped": (
        "grads_unscaled=True",
        step_of(scaled_grads, lambda g, s: clip(unscale(g, s))),
    ),
    "divided twice, accumulated": (
        "grads_unscaled=True",
        step_of(accumulated(scaled_grads), unscale),
    ),
    "not unscaled": (
        "leave out grads_unscaled",
        step_of(scaled_grads, grads_unscaled=True),
    ),
    "clipped": ("put loss_scaling outside", step_of(scaled_grads, tx=CLIP_INSIDE)),
    "clipped by block": (
        "put loss_scaling outside",
        step_of(scaled_grads, tx=optax.chain(optax.clip_by_block_rms(1.0), SGD)),
    ),
    "clipped, then unscaled": (
        "put loss_scaling outside",
        step_of(
            scaled_grads, lambda g, s: unscale(clip(g), s), grads_unscaled=True
        ),
    ),
    "clipped by value": (
        "put loss_scaling outside",
        step_of(
            scaled_grads, lambda g, s: jax.tree.map(lambda x: jnp.clip(x, -1, 1), g)
        ),
    ),
    "made finite by optax": (
        "before this update looks for it",
        step_of(scaled_grads, tx=optax.chain(optax.zero_nans(), SGD)),
    ),
    "made finite": (
        "before this update looks for it",
        step_of(scaled_grads, lambda g, s: jax.tree.map(jnp.nan_to_num, g)),
    ),
    "made finite all at once": (
        "before this update looks for it",
        step_of(
            scaled_grads,
            lambda g, s: jax.tree.map(
                lambda x: jnp.where(jnp.isfinite(norm(g)), x, 0.0), g
            ),
        ),
    ),
    "clipped by parameters": (
        "put loss_scaling outside",
        step_of(scaled_grads, tx=optax.chain(optax.adaptive_grad_clip(0.1), SGD)),
    ),
    "optimizer before": (
        "put it inside, as in loss_scaling(optax.adam",
        step_of(scaled_grads, tx=optax.chain(optax.adam(0.1), loss_scaling())),
    ),
    "signs before": (
        "put it inside, as in loss_scaling(optax.adam",
        step_of(scaled_grads, tx=optax.chain(optax.lion(0.1), loss_scaling())),
    ),
    "decay before": (
        "put loss_scaling outside",
        step_of(scaled_grads, tx=optax.chain(optax.add_decayed_weights(1e-4), SGD)),
    ),
    "clipped, accumulated": (
        "put loss_scaling outside",
        step_of(accumulated(scaled_grads), lambda g, s: clip(g)),
    ),
    "forgotten, a jitted gradient that is given the state": (
        "return jmp_rewrite.scale_loss",
        step_of(jax.jit(plain_grads)),
    ),
    "a term is not scaled": (
        "pass the whole loss",
        step_of(of(lambda p, s, x: scale_loss(mse(p, x), s) + penalty(p))),
    ),
    "the loss of one parameter is not scaled": (
        "the loss of some of these parameters",
        step_of(
            lambda p, s, x: {
                "w": scaled_grads(p, s, x)["w"], "v": plain_grads(p, s, x)["v"]
            }
        ),
    ),
    "a rule returns a step in place of a gradient": (
        "the loss of some of these parameters",
        with_rule(lambda h, v: v - jnp.mean(h)),
    ),
    "a rule clips": (
        "a backward rule (jax.custom_vjp) compares",
        with_cotangent(lambda g, s: jnp.clip(g, -1.0, 1.0)),
    ),
    "a jitted rule clips": (
        "a backward rule (jax.custom_vjp) compares",
        with_cotangent(lambda g, s: jnp.clip(g, -1.0, 1.0), jax.jit),
    ),
    "a checkpointed rule clips by the norm": (
        "a backward rule (jax.custom_vjp) compares",
        with_cotangent(
            lambda g, s: g * jnp.minimum(1.0, 1.0 / norm(g)), jax.checkpoint
        ),
    ),
    "a rule chooses by the norm": (
        "a backward rule (jax.custom_vjp) compares",
        with_cotangent(lambda g, s: jnp.where(norm(g) > 1.0, g / norm(g), g)),
    ),
    "gradients of two losses": (
        "put loss_scaling outside",
        step_of(
            lambda p, s, x: jax.tree.map(
                jnp.add, scaled_grads(p, s, x), jax.grad(penalty)(p)
            )
        ),
    ),
    "a scaled gradient ascends": (
        "moves parameters inside of this step", step_of(ascended(scaled_grads))
    ),
    "a scaled gradient ascends, jitted": (
        "moves parameters inside of this step",
        step_of(jax.jit(ascended(scaled_grads))),
    ),
    "a scaled gradient ascends, jitted gradients": (
        "moves parameters inside of this step",
        step_of(ascended(jax.jit(scaled_grads), jax.jit(scaled_grads))),
    ),
    "a scaled gradient ascends, accumulated": (
        "moves parameters inside of this step",
        step_of(accumulated(ascended(scaled_grads))),
    ),
    "a scaled gradient ascends, then unscaled": (
        "moves parameters inside of this step",
        step_of(ascended(scaled_grads), unscale, grads_unscaled=True),
    ),
    "an inner step of a scaled gradient": (
        "moves parameters inside of this step", step_of(adapted(scaled_grads))
    ),
    "an inner step, jitted": (
        "moves parameters inside of this step",
        step_of(adapted(jax.jit(scaled_grads))),
    ),
    "inner steps of a scaled gradient": (
        "moves parameters inside of this step", step_of(adapted(scaled_grads, 3))
    ),
    "an inner step behind an unscaled one": (
        "moves parameters inside of this step",
        step_of(ascended(unscaled_grads, ascended(scaled_grads))),
    ),
    "a penalty on a scaled gradient": (
        "as in a gradient penalty", with_penalty(scale_loss, lambda n: (n - 1) ** 2)
    ),
    "the scale of another state": (
        "another state", two(lambda p, s, x: scaled_grads(p, s[0], x))
    ),
    "the scale of another state, jitted": (
        "another state",
        two(lambda p, s, x: jax.jit(lambda p, s: scaled_grads(p, s[0], x))(p, s)),
    ),
    "the scale of another state, accumulated": (
        "another state",
        two(lambda p, s, x: accumulated(scaled_grads)(p, s[0], x)),
    ),
    "the scale of another state, checkpointed": (
        "another state",
        two(
            lambda p, s, x: jax.grad(
                jax.checkpoint(lambda p: scale_loss(mse(p, x), s[0]))
            )(p)
        ),
    ),
    "the scale of another state, not unscaled": (
        "leave out grads_unscaled",
        two(lambda p, s, x: scaled_grads(p, s[0], x), grads_unscaled=True),
    ),
    "two losses of a state each": (
        "another state",
        two(
            lambda p, s, x: jax.grad(
                lambda p: scale_loss(mse(p, x), s[0]) + scale_loss(penalty(p), s[1])
            )(p)
        ),
    ),
    "the new scale of another state": (
        "another state", in_turns(lambda first, second: first)
    ),
    "scaled twice": (
        "went through scale_loss twice",
        step_of(of(lambda p, s, x: scale_loss(scaled_in_a_loss(p, s, x), s))),
    ),
}  # fmt: skip

RIGHT = {
    "plain": step_of(scaled_grads),
    "two terms, both scaled": step_of(
        of(lambda p, s, x: scale_loss(mse(p, x), s) + scale_loss(penalty(p), s))
    ),
    "a penalty on a gradient": step_of(
        of(
            lambda p, s, x: scale_loss(
                mse(p, x) + jnp.square(jax.grad(mse, 1)(p, x)).mean(), s
            )
        )
    ),
    "a weight that another gradient gives": step_of(
        lambda p, s, x: jax.tree.map(
            lambda g: g * norm(jax.grad(penalty)(p)), scaled_grads(p, s, x)
        )
    ),
    "a loss for each example": step_of(
        of(lambda p, s, x: scale_loss(jax.vmap(mse, (None, 0))(p, x), s).mean())
    ),
    "accumulated": step_of(accumulated(scaled_grads)),
    "scaled by hand": step_of(by_hand),
    "scaled afterwards": step_of(plain_grads, times_scale),
    "scaled by hand, fixed": step_of(
        lambda p, s, x: jax.grad(lambda p: 1024.0 * mse(p, x))(p), tx=FIXED
    ),
    "a scale of one": step_of(plain_grads, tx=loss_scaling(optax.sgd(0.1), 1.0)),
    "no scale": step_of(plain_grads, tx=loss_scaling(optax.sgd(0.1), None)),
    "unscaled": step_of(scaled_grads, unscale, grads_unscaled=True),
    "unscaled by hand": step_of(
        scaled_grads,
        lambda g, s: jax.tree.map(lambda x: x / loss_scale_state(s).loss_scale, g),
        grads_unscaled=True,
    ),
    "unscaled and clipped": step_of(
        scaled_grads, lambda g, s: clip(unscale(g, s)), grads_unscaled=True
    ),
    "clipped by the true norm": step_of(scaled_grads, clipped_by_true_norm),
    "clipped inside": step_of(
        scaled_grads,
        tx=loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    ),
    "scaled again": step_of(
        scaled_grads, lambda g, s: times_scale(clip(unscale(g, s)), s)
    ),
    "normalized": step_of(
        scaled_grads,
        lambda g, s: jax.tree.map(
            lambda x: x * (norm(g) / (norm(g) + 1e-6)), g
        ),
    ),
    "quantized": step_of(
        scaled_grads,
        lambda g, s: jax.tree.map(
            lambda x: (
                jnp.clip(jnp.round(x / jnp.max(abs(x)) * 127), -127, 127)
                * (jnp.max(abs(x)) / 127)
            ),
            g,
        ),
    ),
    "zeros for NaN": step_of(
        scaled_grads, tx=loss_scaling(optax.chain(optax.zero_nans(), optax.sgd(0.1)))
    ),
    "NaN for all": step_of(
        scaled_grads,
        lambda g, s: jax.tree.map(
            lambda x: jnp.where(jnp.isfinite(norm(g)), x, jnp.nan), g
        ),
    ),
    "less a mean that is finite": step_of(
        scaled_grads,
        lambda g, s: jax.tree.map(
            lambda x: x - jnp.where(jnp.isfinite(x.mean()), x.mean(), 0), g
        ),
    ),
    "neither scaled nor unscaled": step_of(plain_grads, grads_unscaled=True),
    "forward mode": step_of(lambda p, s, x: jax.jacfwd(mse)(p, x)),
    "MultiSteps": step_of(
        scaled_grads, tx=loss_scaling(optax.MultiSteps(optax.adam(0.1), 2))
    ),
    "momentum before": step_of(
        scaled_grads, tx=optax.chain(optax.trace(0.9), SGD)
    ),
    "decay of the same scale": step_of(
        scaled_grads,
        lambda g, s: jax.tree.map(
            lambda g, p: g + 1e-4 * loss_scale_state(s).loss_scale * p, g, PARAMS
        ),
    ),
    "decay behind": step_of(
        scaled_grads,
        tx=optax.chain(
            loss_scaling(), optax.adaptive_grad_clip(0.1), optax.adamw(0.1)
        ),
    ),
    "an unscaled gradient ascends": step_of(ascended(unscaled_grads)),
    "an unscaled gradient ascends, jitted": step_of(
        ascended(jax.jit(unscaled_grads), jax.jit(scaled_grads))
    ),
    "an unscaled gradient ascends, all jitted": step_of(
        jax.jit(ascended(unscaled_grads))
    ),
    "an unscaled gradient ascends, accumulated": step_of(
        accumulated(ascended(unscaled_grads))
    ),
    "a gradient unscaled by hand ascends": step_of(
        ascended(
            lambda p, s, x: jax.tree.map(
                lambda g: g * (1 / loss_scale_state(s).loss_scale),
                scaled_grads(p, s, x),
            )
        )
    ),
    "a gradient of the loss itself ascends": step_of(ascended(plain_grads)),
    "a normalized gradient ascends": step_of(ascended(normalized)),
    "signs of a scaled gradient ascend": step_of(
        ascended(lambda p, s, x: jax.tree.map(jnp.sign, scaled_grads(p, s, x)))
    ),
    "two ascents": step_of(ascended(unscaled_grads, ascended(normalized))),
    "an inner step of the loss itself": step_of(adapted(plain_grads)),
    "an inner step of an unscaled gradient": step_of(adapted(unscaled_grads)),
    "an inner step, all jitted": step_of(jax.jit(adapted(unscaled_grads))),
    "an inner step of an unscaled gradient, jitted": step_of(
        adapted(jax.jit(unscaled_grads))
    ),
    "inner steps of an unscaled gradient": step_of(adapted(unscaled_grads, 3)),
    "inner steps of the loss itself": step_of(adapted(plain_grads, 3)),
    "an inner step of a lookup": step_of(adapted_lookup()),
    "an inner step of a lookup, checkpointed": step_of(
        adapted_lookup(jax.checkpoint)
    ),
    "an inner step is the gradient": step_of(reptile, grads_unscaled=True),
    "an inner step without derivative": step_of(
        adapted(lambda p, s, x: jax.lax.stop_gradient(unscaled_grads(p, s, x)))
    ),
    "a penalty on a gradient of the loss itself": with_penalty(
        lambda loss, state: loss, lambda n: (n - 1) ** 2
    ),
    "a penalty on a gradient of what is divided again": with_penalty(
        lambda loss, state: (
            scale_loss(loss, state) / loss_scale_state(state).loss_scale
        ),
        lambda n: (n - 1) ** 2,
    ),
    "a penalty on an unscaled gradient": step_of(with_unscaled_penalty),
    "a weight that two gradients give": step_of(with_adaptive_weight),
    "two states": two(lambda p, s, x: scaled_grads(p, s[1], x)),
    "two states, jitted": two(
        lambda p, s, x: jax.jit(lambda p, s: scaled_grads(p, s[1], x))(p, s)
    ),
    "two states, accumulated": two(
        lambda p, s, x: accumulated(scaled_grads)(p, s[1], x)
    ),
    "two states, in turns": in_turns(lambda first, second: second),
    "two states of one scale": (Two(SGD), of_one_scale),
    "two states of one number": two(
        lambda p, s, x: scaled_grads(p, s[0], x), tx=FIXED
    ),
    "one loss, unscaled for the other state": two(
        lambda p, s, x: unscale(scaled_grads(p, s[0], x), s[0]), grads_unscaled=True
    ),
    "one loss, scaled anew for the other state": two(
        lambda p, s, x: times_scale(unscale(scaled_grads(p, s[0], x), s[0]), s[1])
    ),
    "a rule returns zeros": with_rule(lambda h, v: jnp.zeros_like(v)),
    "a rule computes zeros": with_rule(
        lambda h, v: -jax.jit(jnp.zeros_like)(v).T.reshape(v.shape) * jnp.mean(h)
    ),
    "a rule clips at the scale": with_cotangent(lambda g, s: jnp.clip(g, -s, s)),
    "a rule hands on what is positive": with_cotangent(
        lambda g, s: jnp.where(g > 0, -g, jnp.maximum(g, 0.0)), jax.checkpoint
    ),
    "a rule replaces NaN": with_cotangent(lambda g, s: jnp.nan_to_num(g)),
    "a rule limits by its own mean": with_cotangent(
        lambda g, s: jnp.minimum(g, 3 * jnp.abs(g).mean()), jax.jit
    ),
    "chain's element": step_of(
        scaled_grads, tx=optax.chain(loss_scaling(), optax.adam(0.1))
    ),
}  # fmt: skip


def heard(step, *args):
    """The warnings of tracing a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(step).trace(*args)
    return caught


@pytest.mark.parametrize("policy", [None, "float32", "mixed_float16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_heard_once(name, policy):
    message, (tx, step) = WRONG[name]
    step = step if policy is None else mixed_precision(step, policy)
    (warning,) = heard(step, PARAMS, tx.init(PARAMS), BATCH)
    assert warning.category is UserWarning
    assert message in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not(name, policy):
    tx, step = RIGHT[name]
    step = step if policy is None else mixed_precision(step, policy)
    assert not heard(step, PARAMS, tx.init(PARAMS), BATCH)


def jitted(params, grads, opt_state, tx=SGD, **kwargs):
    """An update in a jitted function of its own, which another one calls."""
    fun = jax.jit(functools.partial(applied, tx=tx, **kwargs))
    return jax.jit(lambda *args: fun(*args))(params, grads, opt_state)


def in_a_branch(params, grads, opt_state, tx=SGD, **kwargs):
    fun = functools.partial(applied, tx=tx, **kwargs)
    operands = params, grads, opt_state
    return jax.lax.cond(True, fun, lambda p, g, s: (p, s), *operands)


CALLED = pytest.mark.parametrize("called", [jitted, in_a_branch])


@pytest.mark.breadth(one_in=2)
@CALLED
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_heard_through_calls(name, called):
    """The update sees parameters alone; the program around it is looked at."""
    message, (tx, step) = WRONG[name]
    (warning,) = heard(through(called, step), PARAMS, tx.init(PARAMS), BATCH)
    assert warning.category is UserWarning
    assert message in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.breadth(one_in=2)
@CALLED
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_through_calls(name, called):
    tx, step = RIGHT[name]
    assert not heard(through(called, step), PARAMS, tx.init(PARAMS), BATCH)


def through(called, step):
    """A step in mixed precision whose update is called in another way."""

    @mixed_precision("mixed_float16")
    def stepped(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "update", called)
            return step(*args)

    return stepped


@pytest.mark.parametrize(("name", "count"), [("forgotten", 1), ("plain", 0)])
def test_a_jitted_update_is_heard_in_a_scan_of_an_ensemble(name, count):
    tx, step = WRONG[name][1] if name in WRONG else RIGHT[name]
    params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    mapped = jax.vmap(through(jitted, step), in_axes=(0, 0, None))

    @mixed_precision("mixed_float16")
    def epoch(params, opt_state, xs):
        def body(carry, x):
            return mapped(*carry, x), None

        return jax.lax.scan(body, (params, opt_state), xs)[0]

    opt_state = jax.vmap(tx.init)(params)
    assert len(heard(epoch, params, opt_state, jnp.stack([BATCH, BATCH]))) == count


def test_a_jitted_step_is_heard_where_it_is_traced_alone():
    tx, step = WRONG["forgotten"][1]
    whole = mixed_precision(jax.jit(step), "mixed_float16")
    assert len(heard(whole, PARAMS, tx.init(PARAMS), BATCH)) == 1


def test_a_jitted_update_that_was_traced_before_is_heard():
    update = jax.jit(applied)
    update(PARAMS, PARAMS, SGD.init(PARAMS))

    @mixed_precision("mixed_float16")
    def step(params, opt_state, x):
        return update(params, plain_grads(params, opt_state, x), opt_state)

    (warning,) = heard(step, PARAMS, SGD.init(PARAMS), BATCH)
    assert "return jmp_rewrite.scale_loss" in str(warning.message)


def test_a_jitted_transformation_is_heard_at_its_call():
    update = jax.jit(SGD.update)

    @mixed_precision("mixed_float16")
    def step(params, opt_state, x):
        return update(plain_grads(params, opt_state, x), opt_state, params)

    (warning,) = heard(step, PARAMS, SGD.init(PARAMS), BATCH)
    assert warning.filename == __file__


@pytest.mark.parametrize(("name", "count"), [("forgotten", 1), ("plain", 0)])
def test_steps_in_a_scan(name, count):
    tx, step = WRONG[name][1] if name in WRONG else RIGHT[name]

    def epoch(params, opt_state, xs):
        def body(carry, x):
            return step(*carry, x), None

        return jax.lax.scan(body, (params, opt_state), xs)[0]

    opt_state = tx.init(PARAMS)
    assert len(heard(epoch, PARAMS, opt_state, jnp.stack([BATCH, BATCH]))) == count


@pytest.mark.parametrize(("name", "count"), [("forgotten", 1), ("plain", 0)])
def test_steps_of_an_ensemble(name, count):
    tx, step = WRONG[name][1] if name in WRONG else RIGHT[name]
    params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    opt_state = jax.vmap(tx.init)(params)
    mapped = jax.vmap(step, in_axes=(0, 0, None))
    assert len(heard(mapped, params, opt_state, BATCH)) == count


@pytest.mark.parametrize("is_scaled", [False, True])
def test_steps_on_many_devices(is_scaled):
    grads_of = scaled_grads if is_scaled else plain_grads

    def step(params, opt_state, x):
        grads = jax.lax.pmean(grads_of(params, opt_state, x), "data")
        return applied(params, grads, opt_state)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
    )
    found = heard(mapped, PARAMS, SGD.init(PARAMS), BATCH)
    assert len(found) == (not is_scaled)


def test_gradients_from_elsewhere_are_not_judged():
    """An update alone: whoever computed the gradients may have scaled the loss."""
    assert not heard(applied, PARAMS, PARAMS, SGD.init(PARAMS))


def test_a_gan_has_two_scales():
    tx = loss_scaling(optax.adam(0.1))

    def step(params, states, x):
        def generator(p):
            return scale_loss(mse(p, x), states[0])

        def critic(p):
            return scale_loss(-mse(p, x), states[1])

        new, first = applied(params, jax.grad(generator)(params), states[0], tx)
        new, second = applied(new, jax.grad(critic)(new), states[1], tx)
        return new, (first, second)

    assert not heard(step, PARAMS, (tx.init(PARAMS), tx.init(PARAMS)), BATCH)


def test_gradients_that_another_state_unscales_are_heard():
    tx, step = two(
        lambda p, s, x: unscale(scaled_grads(p, s[0], x), s[1]), grads_unscaled=True
    )
    (warning,) = heard(step, PARAMS, tx.init(PARAMS), BATCH)
    assert "another state" in str(warning.message)


def test_unrolled_ascents_are_right():
    """In each the gradient is scaled by the state that the step before has left."""
    tx, step = RIGHT["an unscaled gradient ascends"]

    def steps(params, opt_state, x):
        for _ in range(3):
            params, opt_state = step(params, opt_state, x)
        return params, opt_state

    assert not heard(steps, PARAMS, tx.init(PARAMS), BATCH)
    assert not heard(through(jitted, steps), PARAMS, tx.init(PARAMS), BATCH)


def test_unrolled_steps_are_judged_one_by_one():
    def step(params, opt_state, x):
        grads = scaled_grads(params, opt_state, x)
        params, opt_state = applied(params, grads, opt_state)
        grads = unscale(scaled_grads(params, opt_state, x), opt_state)
        return applied(params, grads, opt_state)

    (warning,) = heard(step, PARAMS, SGD.init(PARAMS), BATCH)
    assert "grads_unscaled=True" in str(warning.message)


# ---- neither `scale_loss` nor `loss_scaling`


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("scale", [None, 1024.0, jnp.float32(1024)], ids=repr)
def test_a_float16_step_without_a_loss_scale_is_heard(policy, scale, caplog):
    """Once, in the log; a scale by hand, written down or not, is one."""

    def step(w, x, scale):
        def loss(w):
            found = jnp.square(jnp.tanh(x[0, 0] * (x @ w)) @ w).mean()
            return found if scale is None else found * scale

        return w - jax.grad(loss)(w)

    step.__qualname__ = f"step_{policy}_{scale!r}"  # once for each name
    w = x = jnp.ones((8, 8))
    with caplog.at_level(logging.WARNING, "jmp_rewrite"):
        for _ in range(2):
            half = mixed_precision(functools.partial(step, scale=scale), policy)
            jax.jit(lambda w, x, half=half: half(w, x))(w, x)
    is_wrong = policy == "mixed_float16" and scale is None
    heard = sum("without a loss scale" in r.getMessage() for r in caplog.records)
    assert heard == is_wrong
    report = explain(step, policy)(w, x, scale)
    assert any("Scale the loss" in text for text in report.advice) == is_wrong


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: jnp.sqrt(jnp.square(z).mean()),
        lambda z: jnp.square(z).mean() * jnp.abs(z).mean(),
        lambda z: -jax.nn.log_softmax(z / 0.01)[:, 0].mean(),
        lambda z: (jax.nn.softplus(100 * z) / 100).mean(),
    ],
    ids=["a root", "a product", "a temperature", "a sharp softplus"],
)
def test_what_a_loss_multiplies_by_is_no_scale(loss):
    def step(w, x):
        return w - jax.grad(lambda w: loss(jnp.tanh(x @ w) @ w))(w)

    w = x = jnp.ones((8, 8))
    report = explain(step, "mixed_float16")(w, x)
    assert any("Scale the loss" in text for text in report.advice)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["each example", "vmap", "ensemble"])
def test_a_scaled_float16_step_is_not_told_to_scale(kind, caplog):
    """Of whatever shape the loss is where it is scaled."""

    def loss(params, state, x):
        if kind == "vmap":
            one = lambda x: scale_loss(mse(params, x[None]), state)  # noqa: E731
            return jax.vmap(one)(x).mean()
        return scale_loss(jax.vmap(mse, (None, 0))(params, x), state).mean()

    def step(params, state, x):
        return applied(params, of(loss)(params, state, x), state)

    args = PARAMS, SGD.init(PARAMS), BATCH
    if kind == "ensemble":
        step = jax.vmap(step)
        args = jax.tree.map(lambda a: jnp.stack([a, a]), args)
    with caplog.at_level(logging.WARNING, "jmp_rewrite"):
        jax.jit(mixed_precision(lambda *a: step(*a), "mixed_float16"))(*args)
    assert not caplog.records
    report = explain(step, "mixed_float16")(*args)
    assert not any("Scale the loss" in text for text in report.advice)


@pytest.mark.slow
def test_a_policy_that_wants_no_loss_scale_is_not_told_to_have_one(caplog):
    @mixed_precision(Policy("mixed_float16", loss_scale=None))
    def step_that_means_it(w, x):
        return w - jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ w).mean())(w)

    w = x = jnp.ones((8, 8))
    with caplog.at_level(logging.WARNING, "jmp_rewrite"):
        jax.jit(step_that_means_it)(w, x)
    assert not caplog.records
