"""The notebooks show what a run shows, and are kept in one form."""

import ast
import base64
import hashlib
import importlib.util
import io
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import nbformat
import numpy as np
import pytest
from PIL import Image  # matplotlib brings it

import jmp_rewrite

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
RESULTS = ROOT / "benchmarks" / "results" / "notebooks-v5e.json"
COLAB = "https://colab.research.google.com"
REPOSITORY = "jmp-rewrite/jmp_rewrite"
NAMES = ("quickstart", "float16_and_loss_scaling", "how_it_works")
ACCELERATORS = {
    "quickstart": {"accelerator": "TPU", "colab": {"gpuType": "V5E1"}},
    "float16_and_loss_scaling": {"accelerator": "GPU", "colab": {"gpuType": "T4"}},
    "how_it_works": {},
}


def read(name, folder=FOLDER):
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


NOTEBOOKS = {name: read(name) for name in NAMES}


def code(name):
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"]


def prose(name):
    cells = NOTEBOOKS[name].cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def text_of(cell):
    return "".join(o.get("text", "") for o in cell.outputs)


each = pytest.mark.parametrize("name", NAMES)


def test_these_are_all():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


# ---- what is shown is what a run shows

NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")


def words(text):
    return NUMBER.sub("#", text).split()


def numbers(text):
    return [float(x) for x in NUMBER.findall(text)]


def pixels(picture):
    """A picture as its gray values, small enough for fonts not to matter."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("L")
    return np.asarray(image.resize((48, 32)), np.float32)


def compare(shown, kept, tags, exactly):
    """Holds an output that a run shows against the one that is kept."""
    assert shown.output_type == kept.output_type
    if "varies" in tags or not exactly:
        return
    if "text" in kept:
        assert words(shown.text) == words(kept.text)
        if "times" not in tags:
            close = pytest.approx(numbers(kept.text), rel=0.15, abs=0.06, nan_ok=True)
            assert numbers(shown.text) == close, shown.text
        return
    assert set(shown.data) == set(kept.data)
    if "image/png" in kept.data:
        a, b = (pixels(o.data["image/png"]) for o in (shown, kept))
        assert np.abs(a - b).mean() < 12
    if "text/html" in kept.data:
        a, b = (len(o.data["text/html"]) for o in (shown, kept))
        assert a == pytest.approx(b, rel=0.05)


CHECK = "import jmp_rewrite; print(jmp_rewrite.check_device('mixed_bfloat16'))"


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@each
def test_runs_and_shows_what_is_kept(name, run_python, tmp_path):
    """Words, numbers and pictures; numbers on the JAX version that made them.

    Cells with the tag `times` print times, those with `varies` the machine.
    """
    # In a process of its own, in which the kernel's client may warn and hold sockets.
    ran = run_python(str(FOLDER / "refresh.py"), "--to", str(tmp_path), name)
    assert ran.returncode == 0, ran.stderr
    is_fast = jmp_rewrite.check_device("mixed_bfloat16").ok
    wrote = f"{name}: a cell wrote to stderr: "
    lines = [x for x in ran.stderr.splitlines() if "wrote to stderr" in x]
    # Of a device that is slow the library warns, in a process with one of them.
    warned = [] if is_fast else run_python("-c", CHECK).stdout.splitlines()
    assert not {x.removeprefix(wrote) for x in lines}.difference(warned), ran.stderr
    executed = [c for c in read(name, tmp_path).cells if c.cell_type == "code"]
    assert [c.source for c in executed] == [c.source for c in code(name)]
    made_here = NOTEBOOKS[name].metadata.jax == ".".join(jax.__version__.split(".")[:2])
    exactly = made_here and is_fast
    for shown, kept in zip(executed, code(name), strict=True):
        for a, b in zip(shown.outputs, kept.outputs, strict=True):
            compare(a, b, kept.metadata.get("tags", []), exactly)


# ---- its form


@each
def test_is_kept_in_one_form(name):
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    version = {"jax": notebook.metadata.jax}
    assert notebook.metadata == {**ACCELERATORS[name], **version, "kernelspec": kernel}
    for cell in notebook.cells:
        assert cell.id == hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        assert set(cell.metadata) <= {"tags", "cellView", "jupyter"}
    for cell in code(name):
        assert cell.execution_count is None
        for output in cell.outputs:
            assert output.get("execution_count") is None
            assert not output.get("metadata")


@each
def test_displayed_output_is_kept(name):
    outputs = [o for cell in code(name) for o in cell.outputs]
    kinds = {o.output_type for o in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert all(o.name == "stdout" for o in outputs if o.output_type == "stream")
    assert sum(bool(cell.outputs) for cell in code(name)) >= 10
    shown = [o.data for o in outputs if "data" in o]
    pictures = [data["image/png"] for data in shown if "image/png" in data]
    for picture in pictures:
        assert len(picture) <= 60_000
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert len(pictures) >= (1 if name == "how_it_works" else 3)
    assert "\x1b" not in "".join(map(text_of, code(name)))  # no colors of a terminal


def test_the_quick_start_shows_the_report():
    shown = [o.data for c in code("quickstart") for o in c.outputs if "data" in o]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert len(pages) == 1 and pages[0].startswith("<iframe")
    assert len(pages[0]) <= 400_000


@each
def test_a_reader_meets_no_tests_and_no_long_code(name):
    for cell in code(name):
        if "source_hidden" in cell.metadata.get("jupyter", {}):
            assert cell.source.startswith("# @title ")  # Colab shows the title alone
            continue
        assert cell.source.count("\n") < 50
        nodes = ast.walk(ast.parse(cell.source))
        assert not any(isinstance(node, ast.Assert) for node in nodes), cell.source


@each
def test_it_says_what_to_choose_and_how_long_it_takes(name):
    text = prose(name)
    assert "**Runtime.**" in text and "minute" in text
    runtime = {"TPU": "Change runtime type > v5e-1 TPU", "GPU": "type > T4 GPU"}
    kind = ACCELERATORS[name].get("accelerator")
    assert runtime.get(kind, "Any: TPU, GPU or CPU") in text
    assert "In a checkout, or where `jmp_rewrite` is installed, it does nothing" in text


@each
def test_the_badge_points_at_the_notebook_itself(name):
    target = f"{COLAB}/github/{REPOSITORY}/blob/main/notebooks/{name}.ipynb"
    assert f"({COLAB}/assets/colab-badge.svg)]({target})" in (
        NOTEBOOKS[name].cells[0].source
    )
    assert prose(name).count(COLAB) == 2


@each
def test_links_into_the_repository_exist(name):
    here = re.findall(r"\]\((?!https?:)([^)#]+)", prose(name))
    there = re.findall(rf"github.com/{REPOSITORY}/blob/main/([^)#]+)", prose(name))
    for path in [FOLDER / p for p in here] + [ROOT / p for p in there]:
        assert path.exists(), path


@each
def test_no_power_is_taken_for_bold(name):
    assert not re.search(r"\d\*\*-?\d", prose(name))


@each
def test_cells_for_a_tpu_stand_alone(name, monkeypatch):
    if name == "quickstart":
        pytest.importorskip("flax")
    module = types.ModuleType(f"notebook_{name}")  # Flax looks a class's module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cell in code(name):
        if "tpu" in cell.metadata.get("tags", []):
            exec(compile(cell.source, name, "exec"), vars(module))
    assert hasattr(module, "make_step") or hasattr(module, "train_step")


def test_numbers_of_the_compiler_are_those_it_gave():
    """In the table of the quick start, and in the picture beside it."""
    rows = json.loads(RESULTS.read_text())["notebooks"]
    assert all(row["ok"] for programs in rows.values() for row in programs.values())
    full, half = (rows["quickstart"][p] for p in ("float32", "mixed_bfloat16"))
    table = [
        f"| temporary memory | {full['mb_temp']:.0f} MB | {half['mb_temp']:.0f} MB "
        f"| {half['mb_temp'] / full['mb_temp']:.2f} |",
        f"| cycles | {full['mcycles']:.1f} million | {half['mcycles']:.1f} million "
        f"| {half['mcycles'] / full['mcycles']:.2f} |",
    ]
    assert "\n".join(table) in prose("quickstart")
    (drawn,) = [c.source for c in code("quickstart") if "of a TPU v5e" in c.source]
    for row in (full, half):
        assert f"({row['mb_temp']:.0f}, {row['mcycles']:.1f})" in drawn
    assert half["mb_temp"] < full["mb_temp"] and half["mcycles"] < full["mcycles"]


# ---- the install cell


def install(monkeypatch, folder, here=()):
    """Runs the install cell where only the modules `here` are; what pip is given."""
    commands = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in here else None
    )
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: commands.append(command)
    )
    exec(code(NAMES[0])[0].source, {})
    return [command[5:] for command in commands]


def test_the_install_cell_comes_first_and_is_the_same():
    first = {code(name)[0].source for name in NAMES}
    assert len(first) == 1
    assert "pip" in first.pop()


def test_where_the_package_is_nothing_is_installed(monkeypatch, tmp_path):
    before = list(sys.path)
    assert install(monkeypatch, tmp_path, here=["jmp_rewrite"]) == []
    assert sys.path == before


def test_in_a_checkout_its_own_package_is_taken(monkeypatch):
    assert install(monkeypatch, FOLDER) == []
    assert sys.path[0] == str(ROOT.resolve())


@pytest.mark.parametrize(
    "plugin, jax",
    [
        ((), []),
        (("libtpu",), ["jax[tpu]"]),
        (("jax_cuda12_plugin",), ["jax[cuda12]"]),
    ],
)
def test_elsewhere_it_is_installed_with_the_devices_plugin(
    monkeypatch, tmp_path, plugin, jax
):
    ours = f"jmp_rewrite[demo] @ git+https://github.com/{REPOSITORY}"
    assert install(monkeypatch, tmp_path, here=plugin) == [[ours, "flax", *jax]]
