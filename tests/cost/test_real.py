"""The real compilers, where they are installed: small programs, seconds each."""

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from described import arguments, step
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_rewrite as jmpr
from jmp_rewrite._cost import devices

needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)
needs_gpu = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None
    or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs jax-cuda13-plugin",
)


@pytest.mark.slow
@needs_tpu
def test_a_tpu(report, capfd):
    jnp.zeros(2).block_until_ready()  # another backend has been used
    plain, half = report.cost("v5e").rows
    assert plain.fits and half.fits
    assert plain.argument_bytes > 4 * (16 * 64 + 64 * 8 + 32 * 16 + 32 * 8)
    assert plain.estimated_cycles > 0 and plain.bytes_accessed > plain.argument_bytes
    assert plain.compiler.startswith("libtpu ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@needs_gpu
def test_a_gpu(report, capfd):
    plain, half = report.cost("H200").rows
    assert plain.fits and plain.estimated_cycles is None
    # Exactly its arguments, each to 256 bytes at most.
    arrays = 4 * (16 * 64 + 64 * 8 + 32 * 16 + 32 * 8)
    assert arrays <= plain.argument_bytes <= arrays + 4 * 256
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@needs_tpu
def test_every_generation_of_tpus(report):
    names = [n for n in devices.names() if n.startswith("TPU")]
    rows = report.cost(*names, policies="mixed_bfloat16").rows
    assert [row.fits for row in rows] == [True] * len(names)


@pytest.mark.slow
@needs_gpu
def test_every_gpu(report):
    names = [n for n in devices.names() if n.startswith("NVIDIA")]
    rows = report.cost(*names, policies="mixed_bfloat16").rows
    assert [row.fits for row in rows] == [True] * len(names)


@needs_tpu
def test_a_batch_that_does_not_fit():
    cost = jmpr.explain(step)(*arguments(rows=10**9)).cost("v5e", policies="float32")
    assert cost.rows[0].fits is False
    assert "exceeds available HBM (15.75G)" in str(cost).replace("\n", " ")
    assert cost.estimates[0].over > 1


@pytest.mark.slow
@needs_gpu
def test_a_gpu_does_not_say_that_it_does_not_fit():
    cost = jmpr.explain(step)(*arguments(rows=10**9)).cost("h200", policies="float32")
    assert cost.rows[0].fits is False
    assert "is more than the 151 GB of NVIDIA H200" in str(cost).replace("\n", " ")
    assert cost.estimates[0].largest[0].line.startswith("described.py:")


@pytest.mark.slow
@needs_tpu
def test_a_loop_is_counted_by_its_trips():
    def loop(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=50)[0]

    def once(x, w):
        return jnp.tanh(x @ w)

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    cycles = [
        jmpr.explain(fun, "float32")(x, x).cost("v5e").rows[0].estimated_cycles
        for fun in (loop, once)
    ]
    assert 25 * cycles[1] < cycles[0] < 75 * cycles[1]


@pytest.mark.slow
@needs_tpu
def test_collectives_of_a_sharded_step():
    mesh = AbstractMesh((4,), ("data",))

    def placed(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    w, x = placed((1024, 1024), P("data")), placed((64, 1024), P("data"))
    cost = jmpr.explain(lambda w, x: x @ w, "float32")(w, x).cost("v5e:2x2")
    gathered = sum(
        size
        for (kind, _), size in cost.estimates[0].collectives.items()
        if kind == "all-gather"
    )
    assert gathered in (2 * 1024 * 1024, 4 * 1024 * 1024)  # as bfloat16 or float32
    assert cost.rows[0].argument_bytes < 4 * (1024 * 1024 + 64 * 1024) / 2


@pytest.mark.slow
@needs_tpu
def test_two_processes_at_once(own_cache, tmp_path):
    code = """
import sys
import jax, jax.numpy as jnp
import jmp_rewrite as jmpr
x = jax.ShapeDtypeStruct((int(sys.argv[1]), 64), jnp.float32)
row = jmpr.explain(lambda x: x @ x.T, "float32")(x).cost("v5e").rows[0]
print(row.fits)
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rows)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rows in (128, 256)
    ]
    assert [p.communicate(timeout=300) for p in started] == [("True\n", "")] * 2


@pytest.mark.slow
@needs_tpu
def test_inside_a_notebook():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    code = """
import jax, jax.numpy as jnp
import jmp_rewrite as jmpr
x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
jmpr.explain(lambda x: x @ x, "mixed_bfloat16")(x).cost("v5e")
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=300).execute()
    *printed, shown = book.cells[0].outputs
    assert "<table" in shown.data["text/html"]
    # A progress bar, or without ipywidgets a line.
    text = "".join(o.text for o in printed if o.output_type == "stream")
    lines = [line.strip() for line in text.split("\r") if line.strip()]
    assert all(line.startswith("compiling for") for line in lines)
    assert "Warning" not in str(printed)
