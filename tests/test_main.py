"""The command line: the main job on tiny settings, what it shows, its errors."""

import dataclasses
import io
import math
import re
import sys

import jax
import matplotlib.image
import numpy as np
import pytest
import rich.console

import jmp_rewrite
from jmp_rewrite.__main__ import main
from jmp_rewrite._demo import report, train
from jmp_rewrite._passes import PASSES
from jmp_rewrite._policy import Policy
from jmp_rewrite._rules.table import default_rules

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]
TINY = ["--units", "16", "--epochs", "2", "--batch-size", "256"]
FORCED = 3  # of 2 * 5 steps


@pytest.fixture(scope="module")
def digits():
    return train.load_digits(0)


@pytest.fixture(scope="module")
def runs(digits):
    course = train.Course(units=16, epochs=2, force_overflow=FORCED)
    return {p: train.train(p, digits, course, lambda run: None) for p in POLICIES}


def panels_with_curves(path, panels):
    """Counts the panels with something colored in them: axes and texts are gray."""
    rgb = matplotlib.image.imread(path)[..., :3]
    colored = rgb.max(-1) - rgb.min(-1) > 0.2
    return sum(bool(p.sum() > 100) for p in np.array_split(colored, panels, axis=1))


@pytest.mark.slow
def test_job_prints_a_row_a_policy_and_draws(run_python, tmp_path):
    ran = run_python("-m", "jmp_rewrite", *TINY, "--force-overflow", str(FORCED))
    assert ran.returncode == 0, ran.stderr
    for word in " ".join(report.COLUMNS).split():
        assert word in ran.stdout
    found = [line.split() for line in ran.stdout.splitlines() if "%  " in line]
    rows = {policy: rest for policy, *rest in found if policy in POLICIES}
    assert list(rows) == POLICIES
    assert [row[4] for row in rows.values()] == ["0", "0", "1"]
    assert "This CPU has no instructions for" in ran.stdout
    assert panels_with_curves(tmp_path / "jmp_rewrite.png", panels=3) == 3


@pytest.mark.slow
def test_the_table_fits_80_columns_with_whole_words(runs):
    change = {"activation_bytes": 2_699_524, "scales": [2.0**24]}  # of the whole job
    large = [dataclasses.replace(run, **change) for run in runs.values()]
    out = io.StringIO()
    rich.console.Console(file=out, width=80).print(report.table(large))
    head = " ".join(out.getvalue().partition("─")[0].split())
    for word in " ".join(report.COLUMNS).split():
        assert f" {word}" in head
    assert "…" not in out.getvalue() and "16,777,216" in out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "curves.png"])
def test_out_is_a_directory_or_a_file(tmp_path, capsys, given):
    main([*TINY, "--policies", "float32", "--out", str(tmp_path / given)])
    written = tmp_path / (given or "jmp_rewrite.png")
    assert written.exists()
    assert str(written) in capsys.readouterr().out


@pytest.mark.slow
def test_every_policy_learns_from_the_same_start(runs):
    first = [run.losses[0] for run in runs.values()]
    np.testing.assert_allclose(first, first[0], rtol=2**-6)  # 2 units of bfloat16
    for run in runs.values():
        assert run.losses[-1] < run.losses[0]
        assert len(run.losses) == len(run.step_ms) == 10
        assert len(run.accuracies) == 2


def test_forced_overflow_is_skipped_and_training_recovers(runs):
    run = runs["mixed_float16"]
    assert [step for step, skipped in enumerate(run.skipped) if skipped] == [FORCED]
    assert math.isinf(run.losses[FORCED])
    assert run.scales[FORCED] == run.scales[FORCED - 1] / 2
    assert np.isfinite(run.losses[FORCED + 1 :]).all()
    assert math.isfinite(run.test_loss)


def test_nothing_overflows_where_no_loss_is_scaled(runs):
    for name in POLICIES[:2]:
        assert not runs[name].scaled
        assert not any(runs[name].skipped)
        assert np.isfinite(runs[name].losses).all()


@pytest.mark.slow
def test_loss_scale_grows_within_the_course(digits):
    course = train.Course(units=16, epochs=1, growth_interval=2)
    run = train.train("mixed_float16", digits, course, lambda run: None)
    assert run.scales == [2.0**e for e in (15, 16, 16, 17, 17)]


def test_a_course_is_the_same_twice(digits, runs):
    course = train.Course(units=16, epochs=2, force_overflow=FORCED)
    again = train.train("float32", digits, course, lambda run: None)
    assert again.losses == runs["float32"].losses


@pytest.mark.slow
def test_activations_are_what_depends_on_the_batch(digits):
    units, size = 512, 4
    params = train.init_params(0, units)
    batch = train.make_batch(digits.train_images[:size], digits.train_labels[:size])
    full, half = (
        train.activation_bytes(Policy(name), params, batch)
        for name in ("float32", "mixed_bfloat16")
    )
    hidden = 2 * size * units  # values of both hidden layers
    weights = params[1]["w"].nbytes  # the backward pass reads them, half ones too
    assert hidden * 4 <= full < weights
    assert hidden * 2 <= half <= full - hidden * 2 < weights // 2


@pytest.mark.slow
def test_scale_is_drawn_only_where_there_is_one(runs, tmp_path):
    for name, panels in (("float32", 2), ("mixed_float16", 3)):
        path = tmp_path / f"{name}.png"
        report.save_figure([runs[name]], path)
        assert panels_with_curves(path, panels) == panels


def test_the_figure_has_whole_epochs_and_hides_no_curve(runs, tmp_path, monkeypatch):
    drawn = []

    class Kept(report.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            drawn.append(self)

    monkeypatch.setattr(report, "Figure", Kept)
    run = runs["mixed_float16"]
    few = dataclasses.replace(run, accuracies=[0.1, 0.2, 0.3])
    report.save_figure([few], tmp_path / "few.png")
    _, accuracy, scale = drawn[0].axes
    low, high = accuracy.get_xlim()
    assert [t for t in accuracy.get_xticks() if low <= t <= high] == [1, 2, 3]
    box = scale.get_legend().get_window_extent()
    curve = scale.transData.transform(list(enumerate(run.scales)))
    assert not any(box.contains(*point) for point in curve)


BAD_ARGUMENTS = {
    "--units 0": r"--units: expected an integer of at least 1, got '0'",
    "--units many": r"--units: expected an integer of at least 1, got 'many'",
    "--epochs -1": r"--epochs: expected an integer of at least 1, got '-1'",
    "--seed -1": r"--seed: expected an integer of at least 0, got '-1'",
    "--seed 4294967296": r"expected an integer of at most 4294967295, got '4294967296'",
    "--batch-size 1438": r"--batch-size must be at most 1437",
    "--policies float32,float8": r"--policies: .*float8",
    "--out no/such/directory.png": r"--out: no/such is no directory",
    "--out curves.jpg": r"--out: curves.jpg is no directory and no .png file",
    "--force-overflow 150": r"--force-overflow must be below 150",
    "--force-overflow 1 --policies float32": r"--force-overflow needs .*mixed_float16",
    "--unit 3": r"unrecognized arguments: --unit 3",
    "rule": r"one of the commands rules, .*, got 'rule': did you mean 'rules'",
    "train": r"one of the commands rules, devices, passes, estimate, got 'train' ",
    "rules --dtype int8": r"--dtype: expected a policy: .* got 'int8'",
    "rules --dtype float32": r"--dtype: expected bfloat16 or float16, got 'float32'",
    "devices --policy fast": r"--policy: .*fast",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert re.search(BAD_ARGUMENTS[arguments], printed.err)


COMMANDS = [[], ["rules"], ["devices"], ["passes"], ["estimate"]]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_help_is_everywhere(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: python -m jmp_rewrite" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib", "rich"])
def test_missing_extras_are_one_line(missing, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stopped:
        main(TINY)
    printed = capsys.readouterr()
    assert stopped.value.code == 1
    assert printed.err.count("\n") == 1
    assert re.search(rf"needs {missing}: pip install .*\[demo\]", printed.err)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rules_lists_every_primitive(dtype, capsys):
    main(["rules", "--dtype", dtype])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rules = default_rules(dtype)
    assert {name: category for category, name, *_ in lines} == {
        name: category.name for name, category in rules.items()
    }
    assert all(reason for _, _, *reason in lines)


@pytest.mark.parametrize("short", ["bf16", "mixed_bfloat16"])
def test_rules_reads_every_name_of_a_dtype(short, capsys):
    main(["rules", "--dtype", short])
    found = capsys.readouterr().out
    main(["rules", "--dtype", "bfloat16"])
    assert found == capsys.readouterr().out


@pytest.mark.slow
def test_devices_says_it_once(run_python):
    ran = run_python("-m", "jmp_rewrite", "devices", "--policy", "fp16")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("compatibility check (mixed_float16)") == 1


@pytest.mark.slow
def test_rules_and_devices_need_no_extras(run_python):
    blocked = "import sys; sys.modules.update(sklearn=None, matplotlib=None, rich=None)"
    for command in ("rules", "devices"):
        ran = run_python(
            "-c",
            f"{blocked}; from jmp_rewrite.__main__ import main; main(['{command}'])",
        )
        assert ran.returncode == 0, ran.stderr


def test_devices_judges_the_policy(capsys):
    main(["devices", "--policy", "mixed_float16"])
    assert "mixed_float16" in capsys.readouterr().out


def test_devices_judges_both_half_types_where_auto_is_float32(capsys, monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "0")
    main(["devices"])
    printed = capsys.readouterr().out
    assert printed.startswith("'auto' means float32 on this device (cpu), because")
    for dtype in ("bfloat16", "float16"):
        assert f"check (mixed_{dtype}): WARNING" in printed
        assert f"no instructions for {dtype} matrix multiplication" in printed
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", "1")
    main(["devices"])
    assert "check (mixed_bfloat16): OK" in capsys.readouterr().out


@pytest.mark.parametrize("native", [False, True])
def test_the_table_says_why_half_is_slow(native, monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_CPU_BFLOAT16", str(int(native)))
    slow = "float16" if native else "bfloat16 or float16"
    note = report.slow_note(POLICIES)
    assert note.startswith(f"This CPU has no instructions for {slow} matrix mult")
    assert report.slow_note(["float32"]) is None
    assert (report.slow_note(["mixed_bfloat16"]) is None) == native


@pytest.mark.parametrize("argv", ["--version", "--epochs 1 --version"])
def test_version_wherever_it_stands(capsys, argv):
    with pytest.raises(SystemExit, match="^0$"):
        main(argv.split())
    printed = capsys.readouterr().out
    assert printed == f"jmp_rewrite {jmp_rewrite.__version__}, JAX {jax.__version__}\n"


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(run_python):
    closed = "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
    ran = run_python(
        "-c", f"{closed}; from jmp_rewrite.__main__ import main; main(['rules'])"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_passes_say_what_they_gain(capsys):
    main(["passes"])
    printed = " ".join(capsys.readouterr().out.split())
    for own in PASSES:
        assert own.gain
        assert f"{own.reason}. Gain: {own.gain}." in printed
