"""Odd uses of `mixed_precision` around, inside and between JAX's transformations.

Each function returns what the use gives and what it should give, in float32; the two
have to agree to a few eps of bfloat16 and in tree, shapes and dtypes.

    python tests/libraries/zoo_uses.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_TRACEBACK_FILTERING"] = "off"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from jmp_rewrite._transform import mixed_precision  # noqa: E402

USES: dict[str, Callable[[], tuple[Any, Any]]] = {}
mixed = mixed_precision("mixed_bfloat16")
X = jax.random.normal(jax.random.key(0), (16, 12))
Y = jax.random.normal(jax.random.key(1), (16, 4))
PARAMS = {
    "w1": 0.3 * jax.random.normal(jax.random.key(2), (12, 24)),
    "b1": jnp.zeros(24),
    "w2": 0.3 * jax.random.normal(jax.random.key(3), (24, 4)),
}
TX = optax.adam(1e-3)


def use(fun: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Adds a use under its function's name."""
    USES[fun.__name__] = fun
    return fun


def net(p: Any, x: Any) -> Any:
    """A network of two layers."""
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]


def loss(p: Any, x: Any, y: Any) -> Any:
    """Its mean squared error."""
    return jnp.mean((net(p, x) - y) ** 2)


def step(p: Any, s: Any, x: Any, y: Any) -> Any:
    """One step of Adam."""
    value, grads = jax.value_and_grad(loss)(p, x, y)
    updates, s = TX.update(grads, s, p)
    return optax.apply_updates(p, updates), s, value, grads


def _seen(out: Any) -> Any:  # an Adam step's parameters move by the sign of a gradient
    return out[2:]


@use
def vmap_outside() -> Any:
    f = lambda f: jax.vmap(f, (None, 0))(PARAMS, X)  # noqa: E731
    return f(mixed(net)), f(net)


@use
def vmap_inside() -> Any:
    def f(p: Any, x: Any) -> Any:
        return jax.vmap(net, (None, 0))(p, x)

    return mixed(f)(PARAMS, X), f(PARAMS, X)


@use
def vmap_of_grad_per_example() -> Any:
    def f(loss: Any) -> Any:
        return jax.vmap(jax.grad(loss), (None, 0, 0))(PARAMS, X, Y)

    return f(mixed(loss)), f(loss)


@use
def vmap_over_models() -> Any:
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    f = lambda f: jax.vmap(jax.grad(f), (0, None, None))(many, X, Y)  # noqa: E731
    return f(mixed(loss)), f(loss)


@use
def grad_of_grad_outside() -> Any:
    def f(loss: Any) -> Any:
        def penalty(p: Any) -> Any:
            g = jax.grad(loss, 1)(p, X, Y)
            return jnp.sum(g**2)

        return jax.grad(penalty)(PARAMS)

    return f(mixed(loss)), f(loss)


@use
def grad_of_grad_inside() -> Any:
    def f(p: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(jax.grad(loss, 1)(p, X, Y) ** 2))(p)

    return mixed(f)(PARAMS), f(PARAMS)


@use
def hessian_vector_product() -> Any:
    def f(loss: Any) -> Any:
        g = lambda p: jax.grad(loss)(p, X, Y)  # noqa: E731
        return jax.jvp(g, (PARAMS,), (PARAMS,))[1]

    return f(mixed(loss)), f(loss)


@use
def hessian_of_bias() -> Any:
    def f(loss: Any) -> Any:
        return jax.hessian(lambda b: loss({**PARAMS, "b1": b}, X, Y))(PARAMS["b1"])

    return f(mixed(loss)), f(loss)


@use
def jacobians() -> Any:
    def f(net: Any) -> Any:
        return jax.jacfwd(net, 1)(PARAMS, X[0]), jax.jacrev(net, 1)(PARAMS, X[0])

    return f(mixed(net)), f(net)


@use
def linearize() -> Any:
    def f(net: Any) -> Any:
        out, tangent = jax.linearize(lambda p: net(p, X), PARAMS)
        return out, tangent(PARAMS)

    return f(mixed(net)), f(net)


@use
def linear_transpose() -> Any:
    def f(m: Any) -> Any:
        return jax.linear_transpose(m(lambda x: x @ PARAMS["w1"]), X)(
            jnp.ones((16, 24))
        )

    return f(mixed), f(lambda f: f)


@use
def checkpoint_outside() -> Any:
    f = lambda f: jax.grad(jax.checkpoint(f))(PARAMS, X, Y)  # noqa: E731
    return f(mixed(loss)), f(loss)


@use
def checkpoint_policy_inside() -> Any:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def f(p: Any, x: Any, y: Any) -> Any:
        h = jax.checkpoint(net, policy=policy)(p, x)
        return jnp.mean((h - y) ** 2)

    g = lambda f: jax.grad(f)(PARAMS, X, Y)  # noqa: E731
    return g(mixed(f)), g(f)


@use
def scan_of_steps_inside() -> Any:
    def epoch(p: Any, s: Any, xs: Any, ys: Any) -> Any:
        def body(c: Any, b: Any) -> Any:
            p, s, value, _ = step(*c, *b)
            return (p, s), value

        (p, s), values = jax.lax.scan(body, (p, s), (xs, ys))
        return p, s, values, loss(p, X, Y)

    args = PARAMS, TX.init(PARAMS), X.reshape(4, 4, 12), Y.reshape(4, 4, 4)
    return _seen(mixed(epoch)(*args)), _seen(epoch(*args))


@use
def scan_of_steps_outside() -> Any:
    def epoch(step: Any) -> Any:
        def body(c: Any, b: Any) -> Any:
            p, s, value, _ = step(*c, *b)
            return (p, s), value

        batches = X.reshape(4, 4, 12), Y.reshape(4, 4, 4)
        (_, s), values = jax.lax.scan(body, (PARAMS, TX.init(PARAMS)), batches)
        return s[0].count, values

    return epoch(mixed(step)), epoch(step)


@use
def fori_loop_of_steps() -> Any:
    def train(p: Any, s: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            return step(*c, X, Y)[:2]

        p, s = jax.lax.fori_loop(0, 3, body, (p, s))
        return loss(p, X, Y)

    args = PARAMS, TX.init(PARAMS)
    return mixed(train)(*args), train(*args)


@use
def donation() -> Any:
    f = jax.jit(mixed(step), donate_argnums=(0, 1))
    copy = jax.tree.map(jnp.copy, (PARAMS, TX.init(PARAMS)))
    out = f(*copy, X, Y)
    return _seen(out), _seen(step(PARAMS, TX.init(PARAMS), X, Y))


@use
def jit_inside_and_outside() -> Any:
    inner = jax.jit(net)

    def f(p: Any, x: Any) -> Any:
        return inner(p, x) + inner(p, 2 * x)

    return jax.jit(mixed(f))(PARAMS, X), f(PARAMS, X)


@use
def nested_decorations() -> Any:
    f = mixed_precision(lambda p, x: mixed(net)(p, x) @ p["w2"].T, "mixed_float16")
    return f(PARAMS, X), net(PARAMS, X) @ PARAMS["w2"].T


@use
def aot_lower_compile() -> Any:
    f = jax.jit(mixed(loss))
    return f.lower(PARAMS, X, Y).compile()(PARAMS, X, Y), loss(PARAMS, X, Y)


@use
def export_and_call() -> Any:
    from jax import export

    blob = export.export(jax.jit(mixed(net)))(PARAMS, X).serialize()
    return export.deserialize(blob).call(PARAMS, X), net(PARAMS, X)


@use
def export_symbolic_shapes() -> Any:
    from jax import export

    (b,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((b, 12), jnp.float32)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    exported = export.export(jax.jit(mixed(net)))(types, shape)
    return exported.call(PARAMS, X), net(PARAMS, X)


def _mesh(kind: str = "Auto") -> Any:
    return jax.make_mesh((4,), ("d",), (getattr(jax.sharding.AxisType, kind),))


@use
def explicit_sharding() -> Any:
    with jax.set_mesh(_mesh("Explicit")):
        x = jax.device_put(X, jax.P("d"))
        p = jax.device_put(PARAMS, jax.P())
        f = lambda f: jax.jit(jax.grad(lambda x: jnp.mean(f(p, x) ** 2)))(x)  # noqa: E731
        return f(mixed(net)), f(net)


@use
def sharded_jit() -> Any:
    mesh = _mesh()
    spec = jax.sharding.NamedSharding(mesh, jax.P("d"))
    x, y = jax.device_put((X, Y), spec)
    return (jax.jit(jax.grad(mixed(loss)))(PARAMS, x, y), jax.grad(loss)(PARAMS, X, Y))


def _data_parallel(loss: Any) -> Any:
    mesh = _mesh()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(jax.P(), jax.P("d"), jax.P("d")),
        out_specs=(jax.P(), jax.P()),
    )
    def f(p: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jax.lax.pmean(loss(p, x, y), "d"))(
            p
        )
        return value, grads

    return f


@use
def shard_map_outside() -> Any:
    return (
        jax.jit(_data_parallel(mixed(loss)))(PARAMS, X, Y),
        jax.value_and_grad(loss)(PARAMS, X, Y),
    )


@use
def shard_map_inside() -> Any:
    return (
        jax.jit(mixed(_data_parallel(loss)))(PARAMS, X, Y),
        jax.value_and_grad(loss)(PARAMS, X, Y),
    )


@use
def pmap_inside() -> Any:
    def f(p: Any, x: Any) -> Any:
        return jax.pmap(net, in_axes=(None, 0))(p, x)

    x = X.reshape(4, 4, 12)
    return mixed(f)(PARAMS, x), f(PARAMS, x)


@use
def nnx_jit() -> Any:
    from flax import nnx

    def make() -> Any:
        model = nnx.Sequential(
            nnx.Linear(12, 24, rngs=nnx.Rngs(0)),
            nnx.relu,
            nnx.BatchNorm(24, rngs=nnx.Rngs(0)),
            nnx.Linear(24, 4, rngs=nnx.Rngs(1)),
        )
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def train(wrap: Any) -> Any:
        model, optimizer = make()

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            graph, params, rest = nnx.split(model, nnx.Param, ...)

            def f(params: Any, rest: Any, x: Any, y: Any) -> Any:
                m = nnx.merge(graph, params, rest, copy=True)
                value = jnp.mean((m(x) - y) ** 2)
                return value, nnx.state(m, nnx.BatchStat)

            (value, stats), grads = jax.value_and_grad(wrap(f), has_aux=True)(
                params, rest, x, y
            )
            nnx.update(model, stats)
            optimizer.update(model, grads)
            return value

        values = [step(model, optimizer, X, Y) for _ in range(2)]
        return values, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    return train(mixed), train(lambda f: f)


@use
def nnx_module_as_argument() -> Any:
    from flax import nnx

    model = nnx.Linear(12, 4, rngs=nnx.Rngs(0))

    def f(model: Any, x: Any) -> Any:
        return model(x)

    return nnx.jit(mixed(f))(model, X), f(model, X)


@use
def nnx_value_and_grad_of_decorated() -> Any:
    from flax import nnx

    model = nnx.Linear(12, 4, rngs=nnx.Rngs(0))

    def f(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    g = lambda f: nnx.to_pure_dict(nnx.grad(f)(model, X, Y))  # noqa: E731
    return g(mixed(f)), g(f)


@use
def linen_apply_bound_method() -> Any:
    import flax.linen as nn

    module = nn.Dense(4)
    variables = module.init(jax.random.key(0), X)
    return mixed(module.apply)(variables, X), module.apply(variables, X)


@use
def linen_apply_mutable_method_kwarg() -> Any:
    import flax.linen as nn

    module = nn.BatchNorm(use_running_average=False)
    variables = module.init(jax.random.key(0), X)
    f = lambda m: m(module.apply)(variables, X, mutable=["batch_stats"])  # noqa: E731
    return f(mixed), f(lambda f: f)


@use
def eqx_filter_jit() -> Any:
    import equinox as eqx

    model = eqx.nn.MLP(12, 4, 24, 2, key=jax.random.key(0))

    def f(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def g(f: Any) -> Any:
        grads = eqx.filter_jit(eqx.filter_grad(f))(model, X, Y)
        return eqx.filter(grads, eqx.is_array)

    return g(mixed(f)), g(f)


@use
def eqx_filter_jit_inside() -> Any:
    import equinox as eqx

    model = eqx.nn.MLP(12, 4, 24, 2, key=jax.random.key(0))

    def f(model: Any, x: Any) -> Any:
        return eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(model, x)

    return mixed(f)(model, X), f(model, X)


@use
def eqx_module_is_decorated() -> Any:
    import equinox as eqx

    model = eqx.nn.MLP(12, 4, 24, 2, key=jax.random.key(0))
    return mixed(model)(X[0]), model(X[0])


@use
def eqx_returns_module() -> Any:
    import equinox as eqx

    model = eqx.nn.MLP(12, 4, 24, 2, key=jax.random.key(0))

    def f(model: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, grads)

    return (
        eqx.filter(mixed(f)(model, X), eqx.is_array),
        eqx.filter(f(model, X), eqx.is_array),
    )


@use
def eqx_stateful_batchnorm() -> Any:
    import equinox as eqx

    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(12, "b", mode="batch")
    linear = eqx.nn.Linear(12, 4, key=jax.random.key(0))

    def f(model: Any, linear: Any, state: Any, x: Any) -> Any:
        h, state = jax.vmap(model, (0, None), (0, None), axis_name="b")(x, state)
        return jax.vmap(linear)(h), jax.tree.leaves(state)

    args = model, linear, state, X
    return eqx.filter_jit(mixed(f))(*args), f(*args)


@use
def haiku_while_and_cond() -> Any:
    import haiku as hk

    def f(x: Any) -> Any:
        layer = hk.Linear(12)
        y = layer(x)
        y = hk.fori_loop(0, 3, lambda i, y: jnp.tanh(layer(y)), y)
        return hk.cond(y.sum() > 0, layer, lambda y: 2 * layer(y), y)

    net = hk.without_apply_rng(hk.transform(f))
    params = net.init(jax.random.key(0), X)
    return mixed(net.apply)(params, X), net.apply(params, X)


@use
def optax_multisteps() -> Any:
    tx = optax.MultiSteps(optax.adam(1e-3), 2)

    def f(p: Any, s: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(p, x, y)
        updates, s = tx.update(grads, s, p)
        return s.acc_grads, s.mini_step

    args = PARAMS, tx.init(PARAMS), X, Y
    return mixed(f)(*args), f(*args)


@use
def optax_lbfgs() -> Any:
    tx = optax.lbfgs()

    def f(p: Any, s: Any) -> Any:
        fun = lambda p: loss(p, X, Y)  # noqa: E731
        value, grads = optax.value_and_grad_from_state(fun)(p, state=s)
        updates, s = tx.update(grads, s, p, value=value, grad=grads, value_fn=fun)
        return value, grads

    args = PARAMS, tx.init(PARAMS)
    return jax.jit(mixed(f))(*args), f(*args)


@use
def optax_muon() -> Any:
    tx = optax.contrib.muon(1e-3)

    def f(p: Any, s: Any) -> Any:
        grads = jax.grad(loss)(p, X, Y)
        updates, s = tx.update(grads, s, p)
        return s, grads

    args = PARAMS, tx.init(PARAMS)
    return jax.jit(mixed(f))(*args), f(*args)


@use
def optax_adafactor_and_sam() -> Any:
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adafactor(1e-3, min_dim_size_to_factor=4)
    )

    def f(p: Any, s: Any) -> Any:
        grads = jax.grad(loss)(p, X, Y)
        near = optax.apply_updates(p, optax.tree.scale(0.05, grads))
        grads = jax.grad(loss)(near, X, Y)
        return tx.update(grads, s, p)[1]

    args = PARAMS, tx.init(PARAMS)
    return jax.jit(mixed(f))(*args), f(*args)


@use
def custom_rules() -> Any:
    @jax.custom_vjp
    def clip(x: Any, w: Any) -> Any:
        return x @ w

    clip.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda r, g: (jnp.clip(g, -1, 1) @ r[1].T, r[0].T @ g),
    )

    @jax.custom_jvp
    def softer(x: Any) -> Any:
        return jnp.log1p(jnp.exp(x))

    softer.defjvp(lambda p, t: (softer(*p), jax.nn.sigmoid(p[0]) * t[0]))

    def f(p: Any) -> Any:
        return jnp.mean(softer(clip(clip(X, p["w1"]), p["w2"])) ** 2)

    def out(m: Any) -> Any:
        return (
            jax.grad(m(f))(PARAMS),
            m(jax.grad(f))(PARAMS),
            jax.vmap(m(lambda x: softer(clip(x, PARAMS["w1"]))))(X[:, None]),
        )

    return out(mixed), out(lambda f: f)


@use
def callbacks_and_debug() -> Any:
    def f(p: Any, x: Any) -> Any:
        h = net(p, x)
        jax.debug.callback(lambda a: None, h)
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        g = jax.pure_callback(lambda a: np.float32(2) * np.asarray(a), shape, h)
        return g @ p["w2"].T

    return jax.jit(mixed(f))(PARAMS, X), f(PARAMS, X)


@use
def refs() -> Any:
    def f(p: Any, x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((16, 4)))
        ref[...] += net(p, x)
        ref[...] += net(p, 2 * x)
        return jax.freeze(ref) if hasattr(jax, "freeze") else ref[...]

    return jax.jit(mixed(f))(PARAMS, X), jax.jit(f)(PARAMS, X)


@use
def ref_argument() -> Any:
    def f(p: Any, x: Any, ref: Any) -> Any:
        h = net(p, x)
        ref[...] = h
        return h.sum()

    def g(f: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((16, 4)))
        out = jax.jit(f)(PARAMS, X, ref)
        return out, ref[...]

    return g(mixed(f)), g(f)


@use
def complex_and_integer_parts() -> Any:
    def f(p: Any, x: Any) -> Any:
        h = net(p, x)
        spectrum = jnp.fft.fft(h) @ jnp.ones((4, 4), jnp.complex64)
        return {
            "s": spectrum,
            "top": jnp.argmax(h, -1),
            "abs": jnp.abs(spectrum),
            "none": None,
            "flag": h.sum() > 1e9,
        }

    return mixed(f)(PARAMS, X), f(PARAMS, X)


@use
def static_results_and_arguments() -> Any:
    def f(p: Any, x: Any, *, name: str, act: Any, n: int) -> Any:
        for _ in range(n):
            x = act(x @ p["w1"]) @ p["w1"].T
        return {"x": x, "n": n}

    call = lambda f: f(PARAMS, X, name="a", act=jax.nn.silu, n=2)  # noqa: E731
    return call(mixed(f)), call(f)


@use
def closed_over_tracers() -> Any:
    def f(m: Any) -> Any:
        def outer(p: Any) -> Any:
            return m(lambda x: net(p, x))(X).sum()

        return jax.jit(jax.grad(outer))(PARAMS)

    return f(mixed), f(lambda f: f)


@use
def under_x64() -> Any:
    with jax.enable_x64(True):
        p = {k: v.astype(jnp.float64) for k, v in PARAMS.items()}

        def f(p: Any, q: Any, x: Any) -> Any:
            return net(p, x.astype(jnp.float64)), net(q, x)

        return mixed(f)(p, PARAMS, X), f(p, PARAMS, X)


@use
def strict_promotion() -> Any:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        w = PARAMS["w1"][:, :12]
        f = lambda x: jax.nn.softmax(jax.nn.relu(x @ w) @ w)  # noqa: E731
        return jax.grad(lambda x: mixed(f)(x)[0, 0])(X), (
            jax.grad(lambda x: f(x)[0, 0])(X)
        )


@use
def debug_nans() -> Any:
    with jax.debug_nans(True):
        return jax.jit(mixed(loss))(PARAMS, X, Y), loss(PARAMS, X, Y)


@use
def tracer_leaks() -> Any:
    with jax.checking_leaks():
        return (
            jax.jit(jax.grad(mixed(loss)))(PARAMS, X, Y),
            jax.grad(loss)(PARAMS, X, Y),
        )


@use
def checkify_outside() -> Any:
    from jax.experimental import checkify

    def f(p: Any, x: Any) -> Any:
        h = net(p, x)
        checkify.check(jnp.all(jnp.isfinite(h)), "not finite")
        return h

    def g(f: Any) -> Any:
        err, out = jax.jit(checkify.checkify(f))(PARAMS, X)
        err.throw()
        return out

    return g(mixed(f)), g(f)


@use
def checkify_inside() -> Any:
    from jax.experimental import checkify

    def f(p: Any, x: Any) -> Any:
        err, out = checkify.checkify(net, errors=checkify.float_checks)(p, x)
        return out

    return jax.jit(mixed(f))(PARAMS, X), net(PARAMS, X)


@use
def associative_scan_and_map() -> Any:
    def f(x: Any) -> Any:
        m = jax.vmap(lambda r: r[:12, None] * r[None, :12] / 12)(x)
        products = jax.lax.associative_scan(jnp.matmul, m)
        return jax.lax.map(lambda a: a @ PARAMS["w1"], products, batch_size=4)

    return jax.jit(mixed(f))(X), f(X)


@use
def switch_and_while() -> Any:
    def f(p: Any, x: Any, i: Any) -> Any:
        branches = [
            lambda h: h @ p["w2"],
            lambda h: jnp.exp(-h @ p["w2"]),
            lambda h: jnp.zeros((16, 4)),
        ]
        h = jnp.tanh(x @ p["w1"])
        out = jax.lax.switch(i, branches, h)
        return jax.lax.while_loop(
            lambda s: jnp.sum(s**2) > 1,
            lambda s: 0.5 * (s @ p["w2"].T @ p["w2"]) / 8,
            out,
        )

    args = PARAMS, X, jnp.int32(1)
    return jax.jit(mixed(f))(*args), f(*args)


@use
def dot_product_attention() -> Any:
    q = jax.random.normal(jax.random.key(5), (2, 8, 4, 16))

    def f(q: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q, is_causal=True)

    return (
        jax.grad(lambda q: mixed(f)(q).sum() ** 2)(q),
        jax.grad(lambda q: f(q).sum() ** 2)(q),
    )


@use
def custom_vmap() -> Any:
    @jax.custom_batching.custom_vmap
    def f(x: Any) -> Any:
        return x @ PARAMS["w1"]

    @f.def_vmap
    def _(size: Any, batched: Any, x: Any) -> Any:
        return x @ PARAMS["w1"], True

    g = lambda m: (m(f)(X), jax.vmap(m(lambda x: f(x)))(X))  # noqa: E731
    return g(mixed), g(lambda f: f)


@use
def composite() -> Any:
    @functools.partial(jax.lax.composite, name="my.layer")
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    def f(p: Any, x: Any) -> Any:
        return layer(x, p["w1"]) @ p["w2"]

    return jax.jit(mixed(f))(PARAMS, X), f(PARAMS, X)


def _everywhere(f: Any) -> Any:
    """The value; the gradient of the decorated; the decorated gradient."""
    g = jax.grad(lambda p, x: jnp.mean(jax.tree.leaves(f(p, x))[0] ** 2))

    def call(m: Any) -> Any:
        h = m(f)
        outer = jax.grad(lambda p, x: jnp.mean(jax.tree.leaves(h(p, x))[0] ** 2))
        return h(PARAMS, X), outer(PARAMS, X), jax.jit(m(g))(PARAMS, X)

    return call(mixed), call(lambda f: f)


@use
def mixture_of_experts_ragged_dot() -> Any:
    experts = 0.3 * jax.random.normal(jax.random.key(4), (3, 24, 4))

    def f(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w1"])
        return jax.lax.ragged_dot(h, experts * p["w2"].sum(), jnp.array([5, 4, 7]))

    return _everywhere(f)


@use
def mixture_of_experts_top_k() -> Any:
    experts = 0.3 * jax.random.normal(jax.random.key(4), (4, 12, 24))

    def f(p: Any, x: Any) -> Any:
        weight, index = jax.lax.top_k(jax.nn.softmax(3 * x[:, :4]), 2)
        h = jnp.einsum("bi,bkio->bko", x, experts[index])
        return jnp.einsum("bko,bk->bo", jax.nn.gelu(h + p["w1"][0]), weight) @ p["w2"]

    return _everywhere(f)


@use
def sparse_bcoo() -> Any:
    from jax.experimental import sparse

    a = sparse.BCOO.fromdense((X > 0.5) * X)

    def f(p: Any, x: Any) -> Any:
        return jnp.tanh(a @ p["w1"]) @ p["w2"]

    return _everywhere(f)


@use
def odeint() -> Any:
    from jax.experimental.ode import odeint

    def f(p: Any, x: Any) -> Any:
        def field(y: Any, t: Any, p: Any) -> Any:
            return jnp.tanh(y @ p["w1"]) @ p["w1"].T * 0.1 - y

        return odeint(field, x, jnp.linspace(0.0, 1.0, 3), p, rtol=1e-3)

    return _everywhere(f)


@use
def conjugate_gradient() -> Any:
    def f(p: Any, x: Any) -> Any:
        m = p["w1"] @ p["w1"].T + jnp.eye(12)
        return jax.scipy.sparse.linalg.cg(lambda v: m @ v, x[0], maxiter=30)[0]

    return _everywhere(f)


@use
def linear_algebra() -> Any:
    def f(p: Any, x: Any) -> Any:
        m = p["w1"] @ p["w1"].T + jnp.eye(12)
        q, r = jnp.linalg.qr(m)
        return (
            jnp.linalg.eigvalsh(m),
            jnp.linalg.cholesky(m),
            q @ r,
            jnp.linalg.slogdet(m)[1],
            jnp.linalg.inv(m) @ x.T,
        )

    return _everywhere(f)


@use
def matrix_power_iteration() -> Any:
    def f(p: Any, x: Any) -> Any:  # spectral normalization
        def body(v: Any, _: Any) -> Any:
            v = p["w1"] @ (p["w1"].T @ v)
            return v / jnp.linalg.norm(v), None

        v, _ = jax.lax.scan(body, jnp.ones(12) / 12**0.5, None, length=10)
        sigma = jnp.linalg.norm(p["w1"].T @ v)
        return x @ (p["w1"] / sigma)

    return _everywhere(f)


@use
def custom_root() -> Any:
    def f(p: Any, x: Any) -> Any:
        m = p["w1"] @ p["w1"].T / 4 + jnp.eye(12)
        return jax.lax.custom_root(
            lambda v: m @ v - x[0],
            x[0],
            lambda g, v: jnp.linalg.solve(m, x[0]),
            lambda g, b: jnp.linalg.solve(jax.jacobian(g)(b), b),
        )

    return _everywhere(f)


@use
def convolutions_of_all_kinds() -> Any:
    x = jax.random.normal(jax.random.key(5), (2, 8, 8, 4))
    k = 0.3 * jax.random.normal(jax.random.key(6), (3, 3, 2, 8))
    numbers = ("NHWC", "HWIO", "NHWC")

    def f(p: Any, _: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x,
            k * p["w2"][0, 0],
            (1, 1),
            "SAME",
            rhs_dilation=(2, 2),
            feature_group_count=2,
            dimension_numbers=numbers,
        )
        z = jax.lax.conv_transpose(y, 0.3 * jnp.tile(k, (1, 1, 4, 1)), (2, 2), "SAME")
        patches = jax.lax.conv_general_dilated_patches(
            z, (3, 3), (2, 2), "VALID", dimension_numbers=numbers
        )
        return patches.mean((1, 2)) @ jnp.tile(p["w1"], (6, 1)), z

    return _everywhere(f)


@use
def recurrent_dropout_and_sampling() -> Any:
    def f(p: Any, x: Any) -> Any:
        def body(c: Any, k: Any) -> Any:
            h = jnp.tanh(c @ p["w1"]) @ p["w1"].T
            h = jnp.where(jax.random.bernoulli(k, 0.8, h.shape), h / 0.8, 0)
            return 0.5 * c + 0.1 * h, jax.random.normal(k) * h.sum()

        c, samples = jax.lax.scan(body, x, jax.random.split(jax.random.key(0), 6))
        return c, samples, jax.random.uniform(jax.random.key(1), (4,))

    return _everywhere(f)


@use
def pallas_kernel_between() -> Any:
    from jax.experimental import pallas as pl

    def kernel(x: Any, o: Any) -> None:
        o[...] = x[...] * 2

    def f(p: Any, x: Any) -> Any:
        h = x @ p["w1"]
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        h = pl.pallas_call(kernel, out_shape=shape, interpret=True)(h)
        return h @ p["w2"]

    return mixed(f)(PARAMS, X), f(PARAMS, X)


@use
def gradient_accumulation_in_a_scan() -> Any:
    def f(p: Any, x: Any, y: Any) -> Any:
        def body(total: Any, batch: Any) -> Any:
            g = jax.grad(loss)(p, *batch)
            return jax.tree.map(jnp.add, total, g), None

        zero = jax.tree.map(jnp.zeros_like, p)
        return jax.lax.scan(body, zero, (x.reshape(4, 4, 12), y.reshape(4, 4, 4)))[0]

    return jax.jit(mixed(f))(PARAMS, X, Y), f(PARAMS, X, Y)


@use
def maml() -> Any:
    def inner(p: Any) -> Any:
        for _ in range(2):
            p = optax.apply_updates(
                p, optax.tree.scale(-0.1, jax.grad(loss)(p, X[:8], Y[:8]))
            )
        return loss(p, X[8:], Y[8:])

    f = lambda m: (jax.grad(m(inner))(PARAMS), m(jax.grad(inner))(PARAMS))  # noqa: E731
    return f(mixed), f(lambda f: f)


@use
def physics_informed() -> Any:
    def residual(p: Any, x: Any) -> Any:  # a Laplacian of the network
        u = lambda x: net(p, x)[0]  # noqa: E731
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(x)
        return jnp.mean(laplacian**2)

    def f(m: Any) -> Any:
        return jax.grad(m(residual))(PARAMS, X), m(jax.grad(residual))(PARAMS, X)

    return f(mixed), f(lambda f: f)


@use
def inner_gradient_over_many_steps() -> Any:
    def f(w: Any) -> Any:  # a weight's cotangent is a sum over iterations
        total, _ = jax.lax.scan(
            lambda c, _: (c + jnp.sum(jnp.ones((1, 8)) @ w), None),
            0.0,
            None,
            length=4096,
        )
        return total + 1e-6 * jnp.sum(
            jax.grad(lambda z: jnp.sum((z @ w) ** 2))(jnp.ones((2, 8)))
        )

    w = jnp.ones((8, 8))
    return jax.grad(mixed(f))(w), jax.grad(f)(w)


@use
def equinox_loop_keeps_its_state() -> Any:
    import equinox as eqx

    w = jax.random.normal(jax.random.key(0), (12, 12)) / 3

    def f(w: Any, y: Any) -> Any:
        def body(c: Any) -> Any:
            return c[0] + 1, c[1] + 2.0**-12 * jnp.ones_like(c[1] @ w)

        return eqx.internal.while_loop(
            lambda c: c[0] < 256,
            body,
            (0, jnp.copy(y)),
            kind="checkpointed",
            max_steps=256,
        )[1]

    one = jnp.ones((4, 12))
    return mixed(f)(w, one) - one, f(w, one) - one


@use
def profiler_dump_of_jaxpr_text() -> Any:
    text = str(jax.make_jaxpr(jax.grad(mixed(loss)))(PARAMS, X, Y))
    with tempfile.TemporaryFile("w") as file:
        file.write(text)
    return jnp.float32("bf16" in text), jnp.float32(1)


def check(got: Any, expected: Any) -> str:
    """Compares a result with what it should be; returns "ok" or what is wrong."""
    if jax.tree.structure(got) != jax.tree.structure(expected):
        return f"tree {jax.tree.structure(got)}"[:200]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if getattr(a, "dtype", None) != getattr(b, "dtype", None):
            return f"dtype {a.dtype}, not {b.dtype}"
        if getattr(a, "shape", None) != getattr(b, "shape", None):
            return f"shape {a.shape}, not {b.shape}"
        a, b = np.asarray(a, np.complex128), np.asarray(b, np.complex128)
        gap = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        if not gap < 0.04:
            return f"relative error {gap:.2g}"
    return "ok"


def main() -> None:
    """Runs the uses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(USES), metavar="NAME")
    options = parser.parse_args()
    bad = 0
    for name in options.only or USES:
        try:
            verdict = check(*USES[name]())
        except ImportError as problem:
            verdict = f"skipped: {problem}"
        except Exception as problem:
            verdict = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
            if options.only:
                traceback.print_exc()
        bad += not verdict.startswith(("ok", "skipped"))
        print(f"{name:36s} {verdict}", flush=True)
    print(f"jax {jax.__version__}: {bad} of {len(options.only or USES)} failed")


if __name__ == "__main__":
    main()
