"""Programs are lowered for a device that is not there."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import arguments, step
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_rewrite as jmpr
from jmp_rewrite._cost import devices, program
from jmp_rewrite._passes.by_device import GPU, TPU, TPU_V5E, TPU_V6E, Where, by_device

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
X16 = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def lowered(fun, *args, device="TPU v5e"):
    subject = jmpr.explain(fun, "float32")(*args).subject
    on = devices.target(device)
    return program.lower(subject.program(subject.policy), on)


def test_the_device_chooses_its_form():
    """A generation of TPUs, which a process without one has to be told."""

    def chosen(on):
        def fun(x):
            return by_device([x], [], {Where((on,)): lambda x: [x + 5]})[0]

        found = {
            d: lowered(fun, X, device=d).text for d in ("v5e", "v6e", "v5p", "h200")
        }
        return {d for d, text in found.items() if "return %arg0" not in text}

    assert chosen(TPU_V5E) == {"v5e"}
    assert chosen(TPU_V6E) == {"v6e"}
    assert chosen(GPU) == {"h200"}
    assert chosen(TPU) == {"v5e", "v6e", "v5p"}


def test_a_process_without_the_device_lowers_as_before():
    def fun(x):
        return by_device([x], [], {Where((TPU_V5E,)): lambda x: [x + 5]})[0]

    assert "return %arg0" not in lowered(fun, X).text
    assert "return %arg0" in jax.jit(fun).lower(X).as_text()


def test_prints_are_left_out():
    def fun(x):
        jax.debug.print("{x}", x=x)

        def body(c, _):
            jax.debug.print("in a loop {c}", c=c)
            return c + 1, None

        return jax.lax.scan(body, x, length=3)[0]

    assert "custom_call" not in lowered(fun, X).text


def test_a_callback_is_said():
    def fun(x):
        return jax.pure_callback(np.sin, X, x)

    with pytest.raises(ValueError, match=r"calls Python \(pure_callback\), which no"):
        lowered(fun, X)


def test_donated_arguments_are_donated():
    def donations(jitted):
        subject = jmpr.explain(jitted)(*arguments()).subject
        on = devices.target("v5e")
        text = program.lower(subject.program(subject.policy), on).text
        return text.count("tf.aliasing_output")

    plain = step.__wrapped__
    assert donations(step) == donations(plain) == 0
    assert donations(jax.jit(plain, donate_argnums=0)) == 2
    assert donations(jax.jit(plain, donate_argnames="params")) == 2
    donating = jax.jit(plain, donate_argnums=0)
    assert donations(functools.partial(donating)) == 2

    @functools.partial(jax.jit, donate_argnums=0)
    def with_a_number(*args):
        return plain(*args), 3

    assert donations(with_a_number) == 2


def test_both_policies_have_the_same_parameters():
    subject = jmpr.explain(step)(*arguments()).subject
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        made = subject.program(jmpr.Policy(policy))
        assert len(made.closed.in_avals) == len(made.donated) == 4
        halves = {"bf16" in str(made.closed), "f16" in str(made.closed)}
        assert halves != {False} or policy == "float32"


def products(w, x):
    return jnp.tanh(x @ w) @ w


class Linear(nnx.Module):
    """A module that one may decorate a method of."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((16, 16)))

    def __call__(self, x):
        return products(self.w[...], x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    @functools.partial(jax.jit, donate_argnums=1)
    @jmpr.mixed_precision("mixed_bfloat16")
    def apply(self, x):
        return products(self.w, x)


W = np.ones((16, 16), np.float32)
HALF = jmpr.mixed_precision(products, "mixed_bfloat16")
JITTED = functools.partial(jax.jit, donate_argnums=0)


@pytest.mark.parametrize(
    ("fun", "donated"),
    [
        (functools.partial(JITTED(HALF), W), [True, False]),
        (JITTED(functools.partial(HALF, W)), [False, True]),
        (functools.partial(JITTED(products), W), [False]),  # what it adds is constant
        (Model(W).apply, [False, True]),
        (nnx.jit(jmpr.mixed_precision(Linear().__call__, "bf16")), [False, False]),
    ],
)
def test_what_jit_was_told_is_of_the_programs_parameters(fun, donated):
    """Whatever a partial or a method adds, in front of the jit or behind it."""
    made = jmpr.explain(fun)(X).subject.program(jmpr.Policy("float32"))
    assert list(made.donated) == donated
    assert len(made.shardings) == len(made.closed.in_avals) == len(donated)


@pytest.mark.parametrize("is_decorated", [True, False])
def test_a_keyword_in_the_place_of_a_bound_one_is_a_parameter(is_decorated):
    def fun(x, *, w):
        return products(w, x)

    inner = jmpr.mixed_precision(fun, "mixed_bfloat16") if is_decorated else fun
    jitted = jax.jit(functools.partial(inner, w=2 * W), donate_argnames="w")
    other = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    made = jmpr.explain(jitted)(X, w=other).subject.program(jmpr.Policy("float32"))
    assert sorted(made.donated) == [False, True] and len(made.closed.in_avals) == 2


def test_numbers_that_jit_makes_arrays_of_are_parameters():
    @functools.partial(jax.jit, donate_argnums=0)
    def fun(x, factor):
        return x * factor

    made = jmpr.explain(fun, "float32")(X, 2.0).subject.program(jmpr.Policy("float32"))
    assert list(made.donated) == [True, False]


def test_what_modules_share_is_one_parameter():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = self.last = Linear()

        def __call__(self, x):
            return self.last(self.first(x))

    def fun(model, x):
        return model(x)

    for given in (fun, nnx.jit(fun)):
        subject = jmpr.explain(given, "mixed_bfloat16")(Tied(), X).subject
        for policy in ("float32", "mixed_bfloat16"):
            made = subject.program(jmpr.Policy(policy))
            assert len(made.donated) == len(made.closed.in_avals) == 2


def test_a_program_is_traced_under_its_own_policy():
    @jmpr.half_precision
    def kernel(x):
        return x @ x

    def fun(x):
        return kernel(x) + jnp.zeros((), jmpr.compute_dtype()).astype(jnp.float32)

    subject = jmpr.explain(fun, "mixed_bfloat16")(X16).subject
    for policy, half in (
        ("float32", set()),
        ("mixed_bfloat16", {"bf16"}),
        ("mixed_float16", {"f16"}),
    ):
        text = str(subject.program(jmpr.Policy(policy)).closed)
        assert set(re.findall(r"\bb?f16(?=\[)", text)) == half


MESH = AbstractMesh((8,), ("data",))


def sharded(shape, spec):
    sharding = NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def test_arguments_over_a_mesh():
    w, x = sharded((16, 16), P("data")), sharded((64, 16), P("data"))
    found = lowered(lambda w, x: x @ w, w, x, device="v5e:2x4")
    assert found.devices == 8 and found.mesh == [8]
    assert "num_partitions = 8" in found.text


def test_shardings_that_jit_was_told():
    devices_here = jax.make_mesh((8,), ("data",))
    rows = NamedSharding(devices_here, P("data"))
    fun = jax.jit(lambda x: x + 1, in_shardings=rows, out_shardings=rows)
    assert lowered(fun, X, device="v5e:2x4").devices == 8


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "v5e",
            r"is for 8 devices by the shardings .* 'TPU v5e' is one device: name a",
        ),
        ("v5e:4x4", "'TPU v5e:4x4' is 16 devices: name a topology of 8"),
    ],
)
def test_a_topology_of_another_size(device, message):
    with pytest.raises(ValueError, match=message):
        lowered(lambda x: x + 1, sharded((64, 16), P("data")), device=device)


def test_one_device_is_no_topology():
    with pytest.raises(ValueError, match="is for one device, and 'TPU v5e:2x2' is 4"):
        lowered(lambda x: x + 1, X, device="v5e:2x2")


@pytest.mark.slow
def test_no_backend_is_heard(run_python):
    """What a plugin prints while it fails to start is not ours to show."""
    code = """
import logging, os, sys
import jax, jax.numpy as jnp
import jmp_rewrite as jmpr
from jmp_rewrite._cost import devices, program
from jmp_rewrite._cost.program import _silence
x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
subject = jmpr.explain(lambda x: x @ x, "float32")(x).subject
with _silence():
    os.write(2, b"from C")
    print("from Python", file=sys.stderr)
program.lower(subject.program(subject.policy), devices.target("v5e"))
os.write(2, b"heard")
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "heard")
