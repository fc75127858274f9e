"""The benchmarks' reader of compiled programs counts what loops do."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

FILE = pathlib.Path(__file__).parents[1] / "benchmarks" / "hlo.py"

# As XLA:TPU writes it: no trip count, and a condition that may be a fusion.
LOOP = """HloModule jit_f

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), backend_config={"estimated_cycles":"2"}
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %y = f32[4]{0} sine(%x), backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[4]) tuple(%next, %y)
}

%fused (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %many = s32[] constant(256)
  ROOT %less = pred[] compare(%a, %many), direction=LT
}

%cond (q: (s32[], f32[4])) -> pred[] {
  %q = (s32[], f32[4]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(256)
  ROOT CONDITION
}

ENTRY %main (z: f32[4]) -> f32[4] {
  %z = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]) tuple(%zero, %z)
  %loop = (s32[], f32[4]) while(%start), condition=%cond, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture(scope="module")
def hlo():
    spec = importlib.util.spec_from_file_location("benchmarks_hlo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        ("%less = pred[] compare(%j, %limit), direction=LT", 256),
        ("%less = pred[] fusion(%j), kind=kLoop, calls=%fused", 256),
        ("%less = pred[] compare(%j, %limit), direction=GT", 1),
    ],
)
def test_iterations_of_a_tpu_loop(hlo, condition, trips):
    module = hlo.parse(LOOP.replace("CONDITION", condition))
    assert module.cycles() == trips * 12


def test_iterations_of_a_compiled_loop(hlo):
    def fun(x):
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, length=37)[0]

    text = jax.jit(fun).lower(jnp.ones(3)).compile().as_text()
    module = hlo.parse(text)
    loops = [
        i
        for c in module.computations.values()
        for i in c.values()
        if i.opcode == "while"
    ]
    assert [module.trips(i) for i in loops] == [37]
