"""The largest batch that fits, by the compilers' verdict."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import arguments, step
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_rewrite as jmpr
from jmp_rewrite._cost import batch, devices
from jmp_rewrite._cost.estimate import Estimate
from jmp_rewrite._cost.store import Compiled

MEMORY = 16e9


def searched(memory_of, size=64, unit=1, says_peak=True):
    """Runs a search against a device on which a batch takes some memory."""
    search = batch._search(size, unit, MEMORY)
    size = next(search)
    while True:
        need = memory_of(size)
        answer = Estimate(fits=True, peak_bytes=need)
        if need > MEMORY:
            over = need / MEMORY if says_peak else None
            answer = Estimate(fits=False, over=over)
        try:
            size = search.send(answer)
        except StopIteration as end:
            return end.value


@given(
    st.floats(0, 8e9),
    st.floats(1e3, 4e9),
    st.integers(1, 4096),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)
def test_a_straight_line(fixed, each, size, unit, says_peak):
    found = searched(lambda n: fixed + each * n, size, unit, says_peak)
    largest = int((MEMORY - fixed) / each) // unit * unit
    sizes = [n for n, _ in found.tried]
    assert len(sizes) == len(set(sizes)) <= 8
    assert all(n % unit == 0 and n > 0 for n in sizes)
    assert all(fits == (fixed + each * n <= MEMORY) for n, fits in found.tried)
    if found.batch is None:
        assert largest < found.too_large
        return
    assert found.batch <= largest
    if found.tried[0][1]:  # then a line needs no more than a guess and its neighbors
        assert found.batch >= largest - max(unit, 0.05 * largest)


@given(st.floats(0.4, 0.95), st.floats(1e5, 1e8))
def test_a_compiler_that_takes_less_when_memory_is_tight(bend, each):
    def memory_of(n):
        straight = each * n
        return straight if straight < bend * MEMORY else bend * MEMORY + 0.6 * (
            straight - bend * MEMORY
        )  # fmt: skip

    found = searched(memory_of)
    assert memory_of(found.batch) <= MEMORY
    assert found.too_large is None or memory_of(found.too_large) > MEMORY
    assert memory_of(found.batch) > 0.8 * MEMORY


def test_nothing_fits():
    found = searched(lambda n: 2 * MEMORY, size=32)
    assert found.batch is None and found.too_large == 1
    assert [n for n, _ in found.tried] == [8, 4, 2, 1]


def test_a_problem_ends_the_search():
    search = batch._search(64, 1, MEMORY)
    next(search)
    with pytest.raises(StopIteration) as end:
        search.send(Estimate(problem="not compiled within the time limit of 5 s"))
    assert end.value.value.problem.startswith("not compiled")


# ---- which arguments


def subject(fun, *args, **kwargs):
    return jmpr.explain(fun, "float32")(*args, **kwargs).subject


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("uses_nnx", [False, True])
def test_the_batch_is_what_has_one_size_and_is_no_state(uses_nnx):
    if uses_nnx:
        importlib.import_module("flax.nnx")  # what is returned is nested then
    assert batch.batch_arguments(subject(step, *arguments()), 0, None) == [1]

    def update(stacked, x, y, count):
        return stacked + x.mean() + y.mean(), count + 1

    found = subject(update, array(4, 8), array(32, 2), array(32), array())
    assert batch.batch_arguments(found, 0, None) == [1, 2]
    assert batch.batch_arguments(found, 0, 1) == [1]
    assert batch.batch_arguments(found, 0, -2) == [2]
    assert batch.batch_arguments(found, 0, np.int64(1)) == [1]
    with pytest.raises(TypeError, match="got 1.5"):
        batch.batch_arguments(found, 0, 1.5)


def test_a_batch_that_is_given_by_name():
    def fun(table, x, *, y):
        return x @ table + y

    for rows in (32, 16):  # with a table of as many rows nobody could tell by sizes
        found = subject(fun, array(16, 4), y=array(rows, 1), x=array(rows, 16))
        assert batch.batch_arguments(found, 0, 1) == ["x"]
    found = subject(fun, array(16, 4), y=array(32, 1), x=array(32, 16))
    with pytest.raises(
        ValueError, match=r"\[0\] of size 16 or \['x', 'y'\] of size 32"
    ):
        batch.batch_arguments(found, 0, None)
    assert batch.present(found, ["x", "y"], 0) == (32, 1)
    larger = batch.with_batch(found, ["x", "y"], 0, 64)
    assert larger.call.args[0].shape == (16, 4)
    assert larger.call.kwargs["x"].shape == (64, 16)
    assert larger.call.kwargs["y"].shape == (64, 1)


@pytest.mark.parametrize(
    ("axis", "argnums", "message"),
    [
        (
            0,
            None,
            r"might be \[1\] of size 16 or \[0\] of size 32 along axis 0\. "
            r"Say it, as in argnums=1\.",
        ),
        (-1, None, "axis expected 0 or more, got -1"),
        (5, None, "no argument's arrays all have one size along axis 5"),
        (0, 7, "argnums expected positions of the 2 positional arguments of .*, got 7"),
        (9, None, r"along axis 9\. Say it with argnums\."),
        (0, [], r"argnums expected positions .* got \[\]"),
        (3, 0, r"expected arrays with an axis 3 in the arguments \[0\]"),
    ],
)
def test_a_batch_that_is_not_clear(compiler, axis, argnums, message):
    report = jmpr.explain(lambda x, w: x @ w, "float32")(array(32, 16), array(16, 4))
    cost = report.cost("v5e")
    with pytest.raises(ValueError, match=message):
        cost.largest_batch(axis, argnums=argnums)


def test_numbers_of_arguments_come_in_any_collection():
    found = subject(lambda x, w: x @ w, array(32, 16), array(16, 4))
    for argnums in (0, (0,), [0], {0}, jnp.array(0).item()):
        assert batch.batch_arguments(found, 0, argnums) == [0]
    for argnums in ("x", 0.5, {"x"}):
        with pytest.raises(TypeError, match="argnums expected an integer or a"):
            batch.batch_arguments(found, 0, argnums)


# ---- with a compiler


def rows_of(job):
    return int(job.lowered.text.partition("%arg2: tensor<")[2].partition("x")[0])


@pytest.mark.slow
def test_rows_and_what_was_tried(report, compiler):
    def answers(job, usual):
        need = rows_of(job) * (2 if "bf16" in job.lowered.text else 4) * 2**20
        if job.target.platform == "tpu" and need > job.target.memory:
            text = f"({need / 2**30:.2f}G) exceeds available HBM (16.00G)"
            return Compiled("", {"error": f"RESOURCE_EXHAUSTED: {text}"})
        return Compiled(usual.text, usual.answer | {"peak": need})

    compiler.answers = answers
    cost = report.cost("v5e", "h200")
    found = cost.largest_batch()
    assert [row[:2] for row in found.rows] == [row[:2] for row in cost.rows]
    for row in found.rows:
        memory = devices.target(row.device).memory
        exact = memory / (2**20 * (4 if row.policy == "float32" else 2))
        assert 0.95 * exact <= row.batch <= exact and row.compilations <= 8
        assert (row.batch, True) in row.tried and (row.too_large, False) in row.tried
    text = str(found)
    assert "TPU v5e, float32: tried 8 fits, 16 fits, " in text


def test_a_function_that_wants_other_batches(compiler):
    def fun(w, x):
        if x.shape[0] % 32:
            raise ValueError("the batch must be a multiple of 32\nas ever")
        return x @ w

    report = jmpr.explain(fun, "float32")(array(16, 4), array(64, 16))
    [row] = report.cost("v5e").largest_batch(argnums=1).rows
    assert row.batch is None and row.tried == ()
    assert row.problem == (
        "a batch of 16: ValueError: the batch must be a multiple of 32"
    )


def test_a_sharded_batch_is_a_multiple_of_its_shards(compiler):
    mesh = AbstractMesh((8,), ("data",))

    def placed(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    w, x = placed((16, 4), P()), placed((64, 16), P("data"))
    found = subject(lambda w, x: x @ w, w, x)
    assert batch.present(found, [1], 0) == (64, 8)
    larger = batch.with_batch(found, [1], 0, 128)
    assert larger.call.args[1].shape == (128, 16)
    assert larger.call.args[1].sharding.spec == P("data")
