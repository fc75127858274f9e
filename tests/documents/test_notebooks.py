"""The notebooks run top to bottom on a CPU, and are kept in one form."""

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
import urllib.error
import urllib.request

import nbformat
import numpy as np
import pytest

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


@each
def test_runs_top_to_bottom(name, run_python, tmp_path):
    # In a process of its own, in which the kernel's client may warn and hold sockets.
    ran = run_python(str(FOLDER / "refresh.py"), "--to", str(tmp_path), name)
    assert ran.returncode == 0, ran.stderr
    assert "wrote to stderr" not in ran.stderr, ran.stderr
    executed = [c for c in read(name, tmp_path).cells if c.cell_type == "code"]
    assert [c.source for c in executed] == [c.source for c in code(name)]
    shown = [[o.output_type for o in c.outputs] for c in executed]
    assert shown == [[o.output_type for o in c.outputs] for c in code(name)]


@each
def test_is_kept_in_one_form(name):
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook.metadata == {**ACCELERATORS[name], "kernelspec": kernel}
    for cell in notebook.cells:
        assert cell.id == hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        assert set(cell.metadata) <= {"tags"}
    for cell in code(name):
        assert cell.execution_count is None
        for output in cell.outputs:
            assert output.get("execution_count") is None
            assert not output.get("metadata")


@each
def test_what_a_reader_sees_is_kept(name):
    outputs = [o for cell in code(name) for o in cell.outputs]
    assert {o.output_type for o in outputs} <= {"stream", "display_data"}
    assert all(o.name == "stdout" for o in outputs if o.output_type == "stream")
    assert sum(bool(text_of(cell).strip()) for cell in code(name)) >= 10
    for picture in (o.data["image/png"] for o in outputs if "data" in o):
        assert len(picture) <= 40_000
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert "\x1b" not in "".join(map(text_of, code(name)))  # no colors of a terminal


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
def test_what_is_printed_is_asserted(name):
    cells = code(name)
    for cell, following in zip(cells, [*cells[1:], cells[-1]], strict=True):
        if text_of(cell).strip():
            near = ast.walk(ast.parse(cell.source + "\n" + following.source))
            assert any(isinstance(node, ast.Assert) for node in near), cell.source


@each
def test_cells_for_a_tpu_stand_alone(name):
    found = {"__name__": name}
    for cell in code(name):
        if "tpu" in cell.metadata.get("tags", []):
            exec(compile(cell.source, name, "exec"), found)
    assert "make_step" in found or "train_step" in found


def test_numbers_of_the_compiler_are_those_it_gave():
    rows = json.loads(RESULTS.read_text())["notebooks"]
    assert all(row["ok"] for programs in rows.values() for row in programs.values())
    full, half, double = (
        rows["quickstart"][f"{policy}, batch {batch}"]
        for policy, batch in (
            ("float32", 8192),
            ("mixed_bfloat16", 8192),
            ("mixed_bfloat16", 16384),
        )
    )
    numbers = [full["mb_temp"], half["mb_temp"], full["mcycles"], half["mcycles"]]
    numbers += [double["mb_temp"], full["mb_temp"]]
    text = re.sub(r"\(\[.*?\]\(.*?\)", "", prose("quickstart"))
    cited = re.findall(r"\d+\.\d{3}|\d+\.\d(?= MB)", text)
    assert list(map(float, cited)) == numbers


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
    assert install(monkeypatch, tmp_path, here=plugin) == [[ours, *jax]]


# ---- the data cell


def data_cell(name):
    return next(c.source for c in code(name) if "def load_images" in c.source)


def functions_of_the_data_cell(expected_hash=None):
    """The data cell's functions; with another hash of what is downloaded."""
    imports, data = code("quickstart")[1].source, data_cell("quickstart")
    functions = data[: data.index("\nimages = ")]
    if expected_hash:
        functions = re.sub(r'"[0-9a-f]{64}"', f'"{expected_hash}"', functions)
    found = {}
    exec(imports + "\n" + functions, found)
    return found


@pytest.fixture
def mnist(monkeypatch):
    """A small file in MNIST's form, instead of the network."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, size in (("train", 50), ("test", 20)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (size, 28, 28), np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, 10, size, np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)

    class Response(io.BytesIO):
        headers = {"Content-Length": str(len(file.getvalue()))}

    monkeypatch.delenv("JMP_REWRITE_OFFLINE", raising=False)
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda url, timeout: Response(file.getvalue())
    )
    return hashlib.sha256(file.getvalue()).hexdigest()


def test_the_data_cell_is_the_same():
    assert data_cell("quickstart") == data_cell("float16_and_loss_scaling")


def test_mnist_is_downloaded_with_progress(mnist, capsys):
    images = functions_of_the_data_cell(mnist)["load_images"]()
    assert images.name == "MNIST"
    assert images.train["image"].shape == (50, 784)
    assert images.test["label"].shape == (20,)
    assert 0.9 < images.train["image"].max() <= 1
    assert capsys.readouterr().out.endswith("\rMNIST: 100%\n")


def test_a_damaged_download_is_not_used(mnist, capsys):
    assert functions_of_the_data_cell()["load_images"]().name == "digits"
    assert "the downloaded file is damaged" in capsys.readouterr().out


def test_without_a_network_the_digits_are_used(monkeypatch, capsys):
    def unreachable(url, timeout):
        assert timeout <= 5
        raise urllib.error.URLError("no network")

    monkeypatch.delenv("JMP_REWRITE_OFFLINE", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    images = functions_of_the_data_cell()["load_images"]()
    assert images.name == "digits"
    assert "no network" in capsys.readouterr().out


def test_batches_are_whole_and_go_round(monkeypatch):
    monkeypatch.setenv("JMP_REWRITE_OFFLINE", "1")
    found = functions_of_the_data_cell()
    images = found["Images"](
        "few", {"image": np.eye(10, dtype=np.float32), "label": np.arange(10)}, {}
    )
    made = [b["label"].tolist() for b in found["batches"](images, 4, steps=5)]
    again = [b["label"].tolist() for b in found["batches"](images, 4, steps=5)]
    assert made == again
    assert all(len(set(labels)) == 4 for labels in made)
    assert not set(made[0]) & set(made[1])
