"""The reader of compiled programs counts what loops do, and what is no number."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_rewrite._cost import hlo, liveness

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


@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        ("%less = pred[] compare(%j, %limit), direction=LT", 256),
        ("%less = pred[] fusion(%j), kind=kLoop, calls=%fused", 256),
        ("%less = pred[] compare(%j, %limit), direction=LE", 257),
    ],
)
def test_iterations_of_a_tpu_loop(condition, trips):
    module = hlo.parse(LOOP.replace("CONDITION", condition))
    assert module.cycles() == trips * 12


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({"%zero = s32[] constant(0)": "%zero = s32[] constant(250)"}, 6),
        ({"constant(1)": "constant(100)"}, 3),
        ({"constant(0)": "constant(1)", "add(%i, %one)": "multiply(%i, %i)"}, 1),
        ({"constant(0)": "constant(1)", "add(%i, %one)": "add(%i, %i)"}, 8),
        ({"LT": "GT", "constant(0)": "constant(300)", "add": "subtract"}, 44),
        ({"constant(1)": "constant(-1)", "LT": "GT", "constant(0)": "constant(9)"}, 1),
        ({"s32": "f32", "(1)": "(0.1)", "(256)": "(1000)"}, 10001),  # as float32 adds
        ({"constant(256)": "constant(3000000)"}, 3000000),
        # What nobody knows:
        ({"add(%i, %one)": "add(%i, %i)"}, 1),  # it never ends
        ({"add(%i, %one)": "negate(%i)"}, 1),
        ({"%one = s32[] constant(1)": "%one = s32[] fft(%x)"}, 1),
        ({"tuple(%zero, %z)": "tuple(%made, %z)"}, 1),
        ({"tuple(%next, %y)": "tuple(%y, %y)"}, 1),
        ({"condition=%cond, ": ""}, 1),
    ],
)
def test_iterations_are_those_that_the_text_proves(changes, trips):
    """The start and the step count, not the limit alone."""
    text = whole(LOOP).replace("%zero = s32", "%made = s32[] fft(%z)\n  %zero = s32")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    module = hlo.parse(text)
    (loop,) = (i for i in module.computations["main"].values() if i.opcode == "while")
    assert module.trips(loop) == trips


def test_iterations_of_a_loop_whose_step_is_carried():
    """XLA:TPU carries constants beside the counter, and copies it."""
    text = whole(LOOP).replace("(s32[], f32[4])", "(s32[], f32[4], s32[])")
    for old, new in {
        "%one = s32[] constant(1)": "%one = s32[] get-tuple-element(%p), index=2",
        "add(%i, %one)": "fusion(%i, %one), kind=kLoop, calls=%sum",
        "tuple(%next, %y)": "tuple(%next, %y, %one)",
        "tuple(%zero, %z)": "tuple(%start0, %z, %step)",
        "%zero = s32[] constant(0)": "%zero = s32[] constant(0)\n"
        "  %start0 = s32[] copy(%zero)\n  %step = s32[] constant(64)",
        "%fused (": "%sum (k: s32[], s: s32[]) -> s32[] {\n"
        "  %k = s32[] parameter(0)\n  %s = s32[] parameter(1)\n"
        "  ROOT %both = s32[] add(%k, %s)\n}\n\n%fused (",
    }.items():
        assert old in text
        text = text.replace(old, new, 1)
    module = hlo.parse(text)
    (loop,) = (i for i in module.computations["main"].values() if i.opcode == "while")
    assert module.trips(loop) == 4


def test_iterations_of_a_compiled_loop():
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


def whole(text):
    """The loop with a condition that is read."""
    less = "%less = pred[] compare(%j, %limit), direction=LT"
    return text.replace("CONDITION", less)


def test_a_number_that_overflowed_is_no_estimate():
    text = whole(LOOP).replace(
        '"estimated_cycles":"10"', f'"estimated_cycles":"{2**63}"'
    )
    assert hlo.parse(text).cycles() == 256 * 2


def test_bytes_of_a_loop_are_counted_by_its_trips():
    module = hlo.parse(whole(LOOP))
    # Of each iteration: a comparison, the counter, and four floats.
    assert module.bytes_written() == 256 * (1 + 4 + 16)
    assert module.bytes_read() == 256 * (8 + 8 + 16)
    assert module.bytes_repeated() == 255 * (9 + 12 + 32)


NESTED = """HloModule jit_f

%inner (a: f32[64,8], n: s32[]) -> f32[8] {
  %a = f32[64,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,8]{1,0} dynamic-slice(%a, %n, %zero), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%row)
}

%outer (x: f32[64,8], m: s32[], y: f32[8]) -> f32[8] {
  %x = f32[64,8]{1,0} parameter(0)
  %m = s32[] parameter(1)
  %y = f32[8]{0} parameter(2)
  %first = f32[8]{0} fusion(%x, %m), kind=kLoop, calls=%inner
  %again = f32[8]{0} fusion(%x, %m), kind=kLoop, calls=%inner
  %sum = f32[8]{0} add(%first, %again)
  ROOT %total = f32[8]{0} add(%sum, %y)
}

ENTRY %main (stack: f32[64,8], i: s32[], z: f32[8]) -> f32[8] {
  %stack = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = f32[8]{0} parameter(2)
  ROOT %r = f32[8]{0} fusion(%stack, %i, %z), kind=kOutput, calls=%outer
}
"""


def test_a_fusion_inside_of_a_fusion_reads_what_it_slices():
    module = hlo.parse(NESTED)
    rows, number, other = 2 * 32, 4, 32
    assert module.bytes_read() == rows + number + other
    whole = NESTED.replace("add(%first, %again)", "add(%first, %x)")
    assert hlo.parse(whole).bytes_read() == 64 * 32 + number + other


COLLECTIVES = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %y = f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8]) tuple(%next, %y)
}

%cond (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

%fused (u: bf16[4]) -> bf16[16] {
  %u = bf16[4]{0} parameter(0)
  ROOT %g = bf16[16]{0} all-gather(%u), channel_id=2, dimensions={0}
}

ENTRY %main (z: f32[8], w: bf16[4]) -> (f32[2], bf16[16], bf16[16]) {
  %z = f32[8]{0} parameter(0)
  %w = bf16[4]{0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]) tuple(%zero, %z)
  %loop = (s32[], f32[8]) while(%start), condition=%cond, body=%body
  %out = f32[8]{0} get-tuple-element(%loop), index=1
  %part = f32[2]{0} reduce-scatter(%out), channel_id=3, dimensions={0}, to_apply=%add
  %many = bf16[16]{0} fusion(%w), kind=kCustom, calls=%fused
  %begun = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%w), channel_id=4
  %more = bf16[16]{0} all-gather-done(%begun)
  ROOT %r = (f32[2], bf16[16], bf16[16]) tuple(%part, %many, %more)
}
"""


def test_collectives_by_kind_and_dtype():
    assert hlo.parse(COLLECTIVES).collectives() == {
        ("all-reduce", "f32"): 5 * 8 * 4,
        ("reduce-scatter", "f32"): 8 * 4,
        ("all-gather", "bf16"): 2 * 16 * 2,
    }


SCATTER = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (z: f32[8,4], i: s32[ROWS,1], u: bf16[ROWS,4]) -> f32[8,4] {
  %z = f32[8,4]{1,0} parameter(0)
  %i = s32[ROWS,1]{1,0} parameter(1)
  %u = bf16[ROWS,4]{1,0} parameter(2)
  %wide = f32[ROWS,4]{1,0} convert(%u)
  ROOT %s = f32[8,4]{1,0} scatter(%z, %i, %wide), to_apply=%add
}

ENTRY %main (z: f32[8,4], i: s32[ROWS,1], u: bf16[ROWS,4]) -> f32[8,4] {
  %z = f32[8,4]{1,0} parameter(0)
  %i = s32[ROWS,1]{1,0} parameter(1)
  %u = bf16[ROWS,4]{1,0} parameter(2)
  ROOT %s = f32[8,4]{1,0} fusion(%z, %i, %u), kind=kInput, calls=%fused
}
"""


@pytest.mark.parametrize(("rows", "written"), [(3, 3 * 4 * 4), (100, 8 * 4 * 4)])
def test_a_scatter_writes_its_updates_or_its_result(rows, written):
    module = hlo.parse(SCATTER.replace("ROWS", str(rows)))
    assert module.bytes_written() == written


UPDATE = """HloModule jit_f

%fused (z: f32[512,4], u: f32[1,4], i: s32[]) -> f32[512,4] {
  %z = f32[512,4]{1,0} parameter(0)
  %u = f32[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %s = f32[512,4]{1,0} dynamic-update-slice(%z, %u, %i, %zero)
}

ENTRY %main (z: f32[512,4], u: f32[1,4], i: s32[]) -> f32[512,4] {
  %z = f32[512,4]{1,0} parameter(0)
  %u = f32[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  START
}
"""
AT_ONCE = "ROOT %s = f32[512,4]{1,0} fusion(%z, %u, %i), kind=kLoop, calls=%fused"
LATER = """%b = ((f32[512,4]{1,0}, f32[1,4]{1,0}, s32[]), f32[512,4]{1,0}, u32[]) \
fusion-start(%z, %u, %i), kind=kLoop, calls=%fused
  ROOT %s = f32[512,4]{1,0} fusion-done(%b)"""


@pytest.mark.parametrize("start", [AT_ONCE, LATER], ids=["at once", "later"])
def test_an_update_in_place_reads_and_writes_what_is_updated(start):
    """Also one that XLA:GPU starts, and goes on."""
    module = hlo.parse(UPDATE.replace("START", start))
    assert (module.bytes_read(), module.bytes_written()) == (20, 16)


HOLDS = """HloModule jit_f

%small (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %q = f32[4]{0} sine(%p)
}

%large (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  %wide = f32[1000]{0} fft(%r)
  ROOT %s = f32[4]{0} fft(%wide)
}

%test (u: f32[4]) -> pred[] {
  %u = f32[4]{0} parameter(0)
  ROOT %v = pred[] fft(%u)
}

ENTRY %main (x: f32[4], c: pred[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = pred[] parameter(1)
  %before = f32[100]{0} fft(%x)
  RUNS
  ROOT %z = f32[4]{0} fft(%y, %before)
}
"""


@pytest.mark.parametrize(
    "runs",
    [
        "while(%x), condition=%test, body=%large",
        "conditional(%c, %x, %x), true_computation=%large, false_computation=%small",
        "conditional(%c, %x, %x), true_computation=%small, false_computation=%large",
        "conditional(%c, %x, %x), branch_computations={%small, %large}",
        "call(%x), to_apply=%large",
    ],
)
def test_the_largest_of_what_an_instruction_runs_is_alive(runs):
    module = hlo.parse(HOLDS.replace("RUNS", f"%y = f32[4]{{0}} {runs}"))
    held = [b.instruction.name for b in liveness.peak(module).buffers]
    assert "wide" in held and "before" in held
