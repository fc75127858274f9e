"""The law of accuracy over random programs that multiply an error.

The quick suite judges always the same ones. For others, shrunk where they break the
law: `python tests/amplification.py 1000 --seed 5000`.
"""

import amplification
import jax
import numpy as np
import pytest
from amplification import OPS, Program, Statement, breaks, code, draw, failures, shrink
from amplifying import POLICIES

QUICK, SLOW, BATCH = 200, 1000, 20
# What is off by more than beside a careful expert may be off by this many times that.
FAR = 4.0


# In float16, off by 1.6 to 2.6 times what a careful expert's are, and within the law
# beside most: gradients at a moved point in an iterated state, taken outside, and an
# attention in one, traced by JAX 0.10.
BESIDE_CAREFUL = {50, 170}


def check(seeds):
    for seed in seeds:
        careful, usual = breaks(seed)
        for found in usual if seed in BESIDE_CAREFUL else careful:
            assert found is None, said(found, seed)
    jax.clear_caches()


def said(found, seed, careful=True):
    found = shrink(found, careful)
    verdicts = "; ".join(map(str, found.verdicts))
    where = f"seed {seed}, {found.policy} on {found.device}"
    return f"{where}: {verdicts}\n{code(found.program)}"


@pytest.mark.breadth
@pytest.mark.parametrize("first", range(0, QUICK, BATCH))
def test_random_programs(first):
    check(range(first, first + BATCH))


@pytest.mark.slow
def test_more_random_programs():
    """None breaks the law beside most experts, and few do so beside a careful one.

    These (docs/precision.md says which) are off by little more than the limit, and
    never non-finite alone.
    """
    beside_careful = []
    for seed in range(QUICK, QUICK + SLOW):
        careful, usual = breaks(seed)
        for found in usual:
            assert found is None, said(found, seed, careful=False)
        beside_careful += [(seed, found) for found in careful if found is not None]
        if seed % BATCH == 0:
            jax.clear_caches()
    assert len({seed for seed, _ in beside_careful}) <= SLOW / 100
    for seed, found in beside_careful:
        far = [v for v in found.verdicts if not v.ours <= FAR * v.limit]
        assert not far or all(np.isnan(v.hand) for v in far), said(found, seed)


@pytest.mark.slow
def test_programs_are_reasonable():
    """Of nine programs in ten by hand computes something, and all kinds are drawn."""
    programs = [draw(seed) for seed in range(40)]
    skipped = sum(None in failures(p, POLICIES[:1], []) for p in programs)
    assert skipped <= len(programs) / 10
    assert {p.form for p in programs} == set(amplification.FORMS)


# ---- programs that broke the law once


def steps(op, origin, body, operands=("a", "w2"), form="forward"):
    """Returns a program that updates a state that comes from somewhere."""
    inner = Statement("v2", body, operands)
    block = (origin, Statement("v3", op, ("v1", "x"), (inner,)))
    return Program(block, ("v3",), form)


def chain(*names, form="forward"):
    """Returns a program in which each op reads what the one before it gives."""
    block, before = [], "x"
    for i, name in enumerate(names):
        others = ("w2",) * (len(OPS[name].takes) - 1)
        block.append(Statement(f"v{i}", name, (before, *others)))
        before = f"v{i}"
    return Program(tuple(block), (before,), form)


INVERSE = Statement("v0", "inverse", ("a",))
FOUND = {
    # State was recognized by where it comes from: not by being updated.
    "drawn": steps("unrolled_change", Statement("v1", "draw", ()), "sandwich"),
    "sliced": steps("descent_change", Statement("v1", "slice", ()), "sandwich"),
    "copied": steps("momentum_change", Statement("v1", "row", ()), "gated", ("a",)),
    "factor": steps(
        "momentum_change", Statement("v1", "cholesky", ("x",)), "linear_1", ("a",)
    ),
    "message": steps(
        "unrolled_change", Statement("v1", "messages", ("w1",)), "linear", ("a", "x")
    ),
    "compared": steps(
        "momentum_change", Statement("v1", "compare", ("w1",)), "gated", ("a",)
    ),
    "level": steps("rollout_change", Statement("v1", "level_slice", ()), "sandwich"),
    # The same value was subtracted, rounded and not rounded.
    "nothing": steps(
        "descent_scan_change",
        Statement("v1", "contrastive", ("w2", "x")),
        "squared_error",
        ("x", "x"),
    ),
    # Offsets were added in half, and subtracted again.
    "units": chain("messages", "units", "anomaly"),
    # What lies between an argument and a product was computed in half.
    "rounded": chain("whole"),
    "shifted": Program(
        (
            Statement(
                "v1", "rollout", ("level", "x"), (Statement("v0", "inverse", ("a",)),)
            ),
            Statement("v2", "level_difference", ("v1", "level")),
        ),
        ("v2",),
    ),
    # A cotangent was added to in small steps, and subtracted at the end.
    "cotangent": Program(
        (Statement("v0", "runge_kutta", ("x", "y")),), ("v0",), "gradient"
    ),
    "cotangent_of_a_product": Program(
        (
            Statement("v0", "linear", ("w2", "w1")),
            Statement("v1", "runge_kutta", ("v0", "x")),
        ),
        ("v1",),
        "gradient",
    ),
    "cotangents_in_any_order": Program(
        (
            Statement("v1", "runge_kutta", ("w2", "w2")),
            Statement(
                "v3",
                "scan_change",
                ("v1", "x"),
                (Statement("v2", "attention", ("a",)),),
            ),
        ),
        ("v1", "v3"),
        "gradient",
    ),
    "cotangent_before_layers": Program(
        (
            Statement("v0", "runge_kutta", ("w1", "x")),
            Statement("v1", "linear_2", ("v0",)),
        ),
        ("v1",),
        "gradient",
    ),
    # Exact arrays were rounded with what they were added to.
    "input": Program((Statement("v0", "fixed_point", ("x", "w1")),), ("v0",)),
    # A sum went on adding to what an exact array was added to, without weights.
    "running_sum": Program(
        (
            Statement(
                "v1", "rollout", ("level", "w2"), (Statement("v0", "linear_2", ("x",)),)
            ),
            Statement("v2", "anomaly", ("v1",)),
        ),
        ("v2",),
        "gradient",
    ),
    "sum_without_weights": Program(
        (
            Statement("v0", "correlated", ("x",)),
            Statement(
                "v2",
                "rollout",
                ("level", "v0"),
                (Statement("v1", "divergence", ("b", "a")),),
            ),
            Statement("v3", "anomaly", ("v2",)),
            Statement("v4", "identity", ("v3",)),
        ),
        ("v3",),
    ),
    # The offset was what a loop began with.
    "carried_level": Program(
        (
            Statement(
                "v1",
                "rollout_scan",
                ("level", "w2"),
                (Statement("v0", "squared_distance", ("a", "x")),),
            ),
            Statement("v2", "level_return", ("level", "v1")),
            Statement("v3", "copied", ("v2",)),
        ),
        ("v2",),
    ),
    # One operand of a difference was exact; a logarithm read a quotient.
    "from_exact": Program(
        (
            Statement("v0", "kernel", ("w1", "w1")),
            Statement("v1", "runge_kutta", ("w1", "x")),
            Statement("v2", "log_of_difference", ("v1", "v0")),
        ),
        ("v2",),
        "gradient",
    ),
    "logarithm": Program(
        (
            Statement("v0", "contrastive", ("x", "x")),
            Statement("v1", "odds", ("w2", "v0")),
            Statement("v2", "identity", ("v1",)),
        ),
        ("v2",),
    ),
    # A matrix multiplication's result was updated, and subtracted again.
    "subtracted_again": Program(
        (
            Statement("v0", "messages", ("w2",)),
            Statement(
                "v3",
                "unrolled_change",
                ("v0", "x"),
                (
                    Statement("v1", "inner", ("a", "x")),
                    Statement("v2", "compare", ("w2",)),
                ),
            ),
        ),
        ("v3",),
    ),
    # A gradient added up rounded cotangents: in a step, behind moves, over a few terms.
    "step": Program((Statement("v0", "fixed_point", ("x", "x")),), ("v0",), "step"),
    "sorted": Program(
        (
            Statement("v0", "sort", ("w2",)),
            Statement("v1", "fixed_point", ("v0", "x")),
        ),
        ("v1",),
        "gradient",
    ),
    "vmapped": Program(
        (
            Statement(
                "v1", "vmap", ("x", "x"), (Statement("v0", "runge_kutta", ("x", "a")),)
            ),
        ),
        ("v1",),
        "gradient",
    ),
    # Cotangents cancelled that went into a loop, and one was rounded without a product.
    "into_a_loop": Program(
        (
            Statement("v0", "correlated", ("w2",)),
            Statement(
                "v2", "fori_change", ("v0", "x"), (Statement("v1", "roll", ("a",)),)
            ),
            Statement("v3", "units", ("v2",)),
        ),
        ("v3",),
        "gradient",
    ),
    "without_a_product": Program(
        (
            Statement("v0", "level_log", ("level", "level")),
            Statement("v1", "cumulative_product", ("x",)),
            Statement(
                "v3",
                "descent_scan_state",
                ("v0", "v1"),
                (Statement("v2", "counts", ("a",)),),
            ),
        ),
        ("v3",),
        "gradient",
    ),
    # Both operands of a product were one rounded copy; cotangents added up in half.
    "twice": Program(
        (
            Statement(
                "v2",
                "map",
                ("w1", "x"),
                (
                    Statement("v0", "take", ("x",)),
                    Statement("v1", "linear", ("v0", "v0")),
                ),
            ),
        ),
        ("v2",),
        "outside",
    ),
    # What a number scales that float16 cannot hold was out of its range.
    "scaled": Program(
        (
            Statement("v0", "phases", ("w1",)),
            Statement(
                "v2",
                "layers",
                ("v0", "x"),
                (Statement("v1", "small_product", ("a", "x")),),
            ),
        ),
        ("v2",),
    ),
    # A threshold was picked from rounded values, and compared with unrounded ones.
    "second_largest": Program(
        (
            Statement("v0", "gated_experts", ("w1", "x")),
            Statement("v1", "log_likelihood", ("w2", "v0")),
            Statement("v2", "gated_experts", ("v1", "v1")),
        ),
        ("v2",),
        "gradient",
    ),
    # A statistic was taken off what it is not of.
    "statistic_of_another": Program(
        (
            Statement("v1", "log_likelihood", ("x", "x")),
            Statement(
                "v5",
                "unrolled_change",
                ("v1", "w1"),
                (
                    Statement("v2", "linear", ("x", "a")),
                    Statement("v4", "transport", ("x", "x")),
                ),
            ),
        ),
        ("v5",),
    ),
    # `log1p(-t ** 2)` is the logarithm of a difference.
    "squashed": Program(
        (
            Statement("v0", "laplacian", ("x", "y")),
            Statement(
                "v4",
                "gradient",
                ("v0", "v0"),
                (
                    Statement("v1", "flow", ("a", "b")),
                    Statement("v2", "level_slice", ()),
                    Statement("v3", "contract", ("w2", "v1")),
                ),
            ),
        ),
        ("v4",),
    ),
    # A product was rounded that float32 code alone reads.
    "small": chain("small_product"),
    "decomposed": chain("sandwich", "determinant"),
    "inverse": chain("inverse", form="gradient"),
    "solved": chain("squared_distance", "inverse"),
    "triangle": chain("post_norm", "triangle", "waves"),
    # What a loop carries around was followed for ever.
    "experts": Program(
        (
            Statement("v0", "top", ("y",)),
            Statement("v1", "gated_experts", ("v0", "v0")),
            Statement("v2", "linear_t", ("v1", "v0")),
        ),
        ("v2",),
        "step",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_known_failures_stay_mended(name):
    """Under both policies, on all devices."""
    assert not [str(found) for found in failures(FOUND[name]) if found is not None]


# ---- shrinking


def test_shrinking_keeps_the_failure(monkeypatch):
    """A failure becomes the statement that it is about, and what that reads."""
    program = Program(
        (
            Statement("v0", "tanh", ("x",)),
            Statement("v1", "sort", ("v0",)),
            Statement("v2", "jit", ("v1", "y"), (Statement("v3", "sin", ("a",)),)),
            Statement("v4", "add", ("v2", "v1")),
        ),
        ("v0", "v4"),
        "step",
    )

    def fails(program, policies, devices, careful):
        used = amplification._used(program.block, program.returns)
        if "sort" in {s.op for s in used}:
            yield amplification.Failure(program, policies[0], devices[0], [])

    monkeypatch.setattr(amplification, "failures", fails)
    found = shrink(amplification.Failure(program, POLICIES[0], "cpu", []))
    assert found.program == Program((Statement("v1", "sort", ("x",)),), ("v1",))


def test_code_makes_the_program():
    for seed in range(20):
        program = draw(seed)
        names = {"Program": Program, "Statement": Statement}
        assert eval(code(program), names) == program
