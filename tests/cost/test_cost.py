"""`report.cost`: rows, what is shown of them, and bad input."""

import re

import jax
import jax.numpy as jnp
import pytest
from described import arguments, step

import jmp_rewrite as jmpr
from jmp_rewrite._cost import Cost
from jmp_rewrite._cost.store import Compiled

OOM = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory "
    "on HBM, the total memory required for HLO temporaries (46.73G) exceeds available "
    "HBM (15.75G). HLO module: jit_step.\nSee https://openxla.org/xla/errors/error_1000"
)


def test_rows_of_float32_and_the_policy(report, compiler):
    cost = report.cost("v5e", "NVIDIA H200")
    assert isinstance(cost, Cost)
    assert cost.rows[0]._fields == (
        "device",
        "policy",
        "argument_bytes",
        "temporary_bytes",
        "peak_bytes",
        "fits",
        "bytes_accessed",
        "estimated_cycles",
        "compiler",
    )
    first, second, third, fourth = cost.rows
    assert first == (
        "TPU v5e",
        "float32",
        1000,
        600,
        1700,
        True,
        4000,
        1000,
        "libtpu 1.2",
    )
    assert second[1:6] == ("mixed_bfloat16", 1000, 300, 1400, True)
    assert third.device == fourth.device == "NVIDIA H200"
    assert third.compiler == "jax-cuda13-pjrt 1.2"
    assert third.bytes_accessed == 2 * 8 * 128 * 4  # counted in the text


def test_figures_without_a_source_are_none(report, compiler):
    def silent(job, usual):
        answer = usual.answer | {"accessed": float(2**63), "peak": None}
        text = usual.text.replace('"estimated_cycles":"1000"', "")
        return Compiled(text, answer)

    compiler.answers = silent
    row = report.cost("v5e", policies="float32").rows[0]
    assert row.bytes_accessed is None and row.estimated_cycles is None
    assert row.peak_bytes == 1000 + (600 - 500) + 600  # before JAX 0.11
    assert row.fits


def test_policies(report, compiler):
    cost = report.cost("v5e", policies=["mixed_float16", "float32", "mixed_float16"])
    assert [row.policy for row in cost.rows] == ["mixed_float16", "float32"]
    assert "f16" in compiler.jobs[0].lowered.text
    for one in ("mixed_float16", jnp.float16, jnp.dtype("float16")):
        cost = report.cost("v5e", policies=one)
        assert [row.policy for row in cost.rows] == ["mixed_float16"]
    policy = jmpr.Policy("mixed_bfloat16", rules={"tanh": "deny"})
    cost = report.cost("v5e", policies=[policy])
    assert cost.rows[0].policy == repr(policy)
    own = jmpr.explain(step.__wrapped__.__wrapped__, "float32")(*arguments())
    assert [row.policy for row in own.cost("v5e").rows] == ["float32"]


def test_the_program_is_the_rewritten_one(report, compiler):
    report.cost("v5e")
    plain, half = (job.lowered.text for job in compiler.jobs)
    assert "bf16" not in plain
    assert re.search(r"dot_general.*tensor<\d+x\d+xbf16>", half)


def test_a_report_on_arrays_holds_none(compiler):
    params, batch = jax.tree.map(lambda x: jnp.ones(x.shape), arguments())
    report = jmpr.explain(step)(params, batch)
    leaves = jax.tree.leaves(report.subject.call[1:4])
    assert leaves and not any(isinstance(x, jax.Array) for x in leaves)
    assert report.cost("v5e").rows == jmpr.explain(step)(*arguments()).cost("v5e").rows


def test_the_table(report, compiler):
    text = str(report.cost("v5e", "h200"))
    assert "step: what compilers estimate, nothing was run" in text
    lines = text.splitlines()
    first = "TPU v5e float32 1 kB 600 B 1.7 kB yes 4 kB 0.001"
    assert lines[4].split() == first.split()
    assert lines[6].split() == "ratio 1.00 0.50 0.82 0.50 1.00".split()
    for word in ("libtpu 1.2", "no times", "75 %", "No argument is donated"):
        assert word in text.replace("\n", " ")


def test_no_time_is_claimed(report, compiler):
    text = str(report.cost("v5e", "h200"))
    assert not re.search(r"\d\s*(ms|s|us|seconds|hours|\$)\b", text)


def test_donation_is_said(compiler):
    donating = jax.jit(step.__wrapped__, donate_argnums=0)
    cost = jmpr.explain(donating)(*arguments()).cost("v5e")
    assert "2 of 4 arrays of the arguments are donated." in str(cost)


def test_html_and_picture(report, compiler, tmp_path):
    cost = report.cost("v5e", "h200")
    page = cost._repr_html_()
    assert page.count("<tr>") == 7 and "TPU v5e" in page and "http" not in page
    cost.save_html(tmp_path / "cost.html")
    assert page in (tmp_path / "cost.html").read_text()
    figure = cost.plot()
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["TPU v5e\nmixed_bfloat16", "NVIDIA H200\nmixed_bfloat16"]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths[:2] == [0.5, 0.5]  # temporary memory on both
    figure.savefig(tmp_path / "cost.png")
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it


def test_a_plot_needs_matplotlib(report, compiler, monkeypatch):
    cost = report.cost("v5e")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"cost\.plot\(\) needs matplotlib: pip"):
        cost.plot()


def test_a_tpu_program_that_does_not_fit(report, compiler):
    compiler.answers = lambda job, usual: Compiled("", {"error": OOM})
    cost = report.cost("v5e", policies="float32")
    row = cost.rows[0]
    assert (row.fits, row.peak_bytes) == (False, None)
    text = str(cost).replace("\n", " ")
    assert (
        "TPU v5e, float32: does not fit: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (46.73G) exceeds available HBM (15.75G)." in text
    )
    # The largest values are those of the user's lines.
    assert re.search(
        r"the largest values are 8\.19 kB f32\[32,64\] at described\.py:\d+", text
    )


def test_arguments_are_known_without_a_compiler(compiler):
    compiler.answers = lambda job, usual: Compiled("", {"error": OOM})
    types = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2**16, 2**16), (16, 2**16))
    ]
    report = jmpr.explain(lambda w, x, unused: jnp.tanh(x @ w), "bf16")(
        *types, types[0]
    )
    cost = report.cost("v5e", "v5p", policies="float32")
    assert [row.argument_bytes for row in cost.rows] == [2**34 + 2**22] * 2
    text = str(cost).replace("\n", " ")
    assert (
        "TPU v5e, float32: does not fit: the arguments alone take 17.2 GB, and TPU "
        "v5e has 17.2 GB. Ran out of memory on HBM" in text
    )
    assert "TPU v5p, float32: does not fit: Ran out of memory" in text
    assert "the largest values are 17.2 GB f32[65536,65536] (argument); 4.19 MB" in text


def test_a_gpu_program_that_does_not_fit(report, compiler):
    def large(job, usual):
        return Compiled(usual.text, usual.answer | {"peak": 200 * 10**9})

    compiler.answers = large
    cost = report.cost("h200", "b200")
    assert [row.fits for row in cost.rows] == [False, False, False, False]
    cost = report.cost("h200", "b200", policies="float32", time_limit=5)
    assert "the peak of 200 GB is more than the 151 GB of NVIDIA H200" in str(cost)


def test_the_reason_stands_under_the_table(report, compiler):
    errors = {
        "TPU v5e": {"error": "not compiled within the time limit of 5 s", "late": True},
        "TPU v6e": {"error": "XlaRuntimeError: UNIMPLEMENTED: no such\n\n  trace"},
    }
    compiler.answers = lambda job, usual: Compiled("", errors[job.target.name])
    cost = report.cost("v5e", "v6e", policies="float32")
    assert [row.fits for row in cost.rows] == [None, None]
    assert all(value is None for value in cost.rows[0][2:8])
    text = str(cost)
    assert "TPU v5e, float32: not compiled within the time limit of 5 s." in text
    assert "TPU v6e, float32: XlaRuntimeError: UNIMPLEMENTED: no such." in text
    assert "ratio" not in text


@pytest.mark.parametrize(
    ("devices", "options", "error", "message"),
    [
        ([], {}, ValueError, "expected at least one device, as in report.cost"),
        (["v5x"], {}, ValueError, "unknown device 'v5x'; did you mean"),
        ([None], {}, TypeError, "expected the name of a device"),
        (["v5e"], {"policies": []}, ValueError, "expected at least one policy"),
        (["v5e"], {"policies": ["bf17"]}, ValueError, "expected a policy"),
        (["v5e"], {"time_limit": 0}, ValueError, "time_limit expected seconds above 0"),
        (["v5e"], {"time_limit": True}, ValueError, "time_limit expected seconds"),
        (["v5e:4x4"], {}, ValueError, "is for one device, and 'TPU v5e:4x4' is 16"),
    ],
)
def test_bad_input(report, compiler, devices, options, error, message):
    with pytest.raises(error, match=message):
        report.cost(*devices, **options)
    assert not compiler.jobs


def test_no_array_is_no_program(compiler):
    report = jmpr.explain(lambda shape: jnp.ones(shape), "float32")((8, 8))
    with pytest.raises(
        ValueError, match="was explained without an array: give its arg"
    ):
        report.cost("v5e")


def test_a_missing_compiler_is_said_before_anything_is_done(report, monkeypatch):
    import importlib.metadata

    from jmp_rewrite._cost import devices

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(devices.importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="for TPUs is not installed: pip install"):
        report.cost("v5e")


# ---- advice


def test_advice_takes_up_what_compilers_said(compiler):
    def slower(job, usual):
        text = usual.text
        if "bf16" in job.lowered.text:
            text = text.replace('"1000"', '"1200"')
        return Compiled(text, usual.answer)

    compiler.answers = slower
    report = jmpr.explain(step)(*arguments())
    before = report.advice
    assert not any("TPU v5e" in sentence for sentence in before)
    report.cost("v5e")
    assert report.advice == [
        *before,
        "On TPU v5e the peak of memory is 1.4 kB, in float32 1.7 kB, by libtpu 1.2.",
        "On TPU v5e half precision buys no speed: libtpu 1.2 estimates 1.20 of "
        "float32's cycles.",
    ]


def test_advice_on_what_fits(compiler):
    def verdict(job, usual):
        is_half = "bf16" in job.lowered.text
        return usual if is_half else Compiled("", {"error": OOM})

    compiler.answers = verdict
    report = jmpr.explain(step)(*arguments())
    report.cost("v5e")
    assert (
        "It fits on TPU v5e, and in float32 does not, by libtpu 1.2." in report.advice
    )
    compiler.answers = lambda job, usual: Compiled("", {"error": OOM})
    report.cost("v6e")
    assert "It does not fit on TPU v6e, by libtpu 1.2." in report.advice
