"""What a wheel and a source distribution hold, built as an index would get them."""

import email
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

import jmp_rewrite

ROOT = pathlib.Path(jmp_rewrite.__file__).parents[1]
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not a checkout", allow_module_level=True)

ADDRESS = "https://github.com/jmp-rewrite/jmp_rewrite"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def files_of(*folders):
    """The files of the checkout, without what running it leaves behind."""
    found = (path for f in folders for path in (ROOT / f).rglob("*") if path.is_file())
    names = {str(path.relative_to(ROOT)) for path in found}
    return {n for n in names if not re.search(r"__pycache__|\.ipynb_check|\.pyc$", n)}


@pytest.mark.slow
def test_the_wheel_is_the_package(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    held = {n for n in names if ".dist-info/" not in n}
    assert held == files_of("jmp_rewrite")
    assert "jmp_rewrite/py.typed" in held
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_the_wheel_runs(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import jmp_rewrite, jax\n"
        f"assert jmp_rewrite.__file__.startswith({str(tmp_path)!r})\n"
        "x = jax.ShapeDtypeStruct((8, 8), 'float32')\n"
        "report = jmp_rewrite.explain(lambda x: x @ x, 'bf16')(x)\n"
        "report.save_html('report.html')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_the_source_has_all_that_ci_needs(built):
    with tarfile.open(built[1]) as sdist:
        names = {n.partition("/")[2] for n in sdist.getnames()}
    needed = files_of("jmp_rewrite", "tests", "docs", "benchmarks", ".ci")
    needed |= {"LICENSE", "CITATION.cff", "pyproject.toml", "README.md", "CHANGELOG.md"}
    assert needed <= names


def test_the_metadata_says_where_it_lives(metadata):
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls["Homepage"] == urls["Source"] == ADDRESS
    assert {"Documentation", "Issues", "Changelog"} <= set(urls)
    badge = (ROOT / "notebooks" / "quickstart.ipynb").read_text()
    assert ADDRESS.removeprefix("https://") in badge
    assert ADDRESS in (ROOT / "CITATION.cff").read_text()


def test_there_is_one_version(metadata):
    assert metadata["Version"] == jmp_rewrite.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jmp_rewrite.__version__}\n" in citation


def test_metadata_names_supported_versions(metadata):
    from trove_classifiers import classifiers

    assert set(metadata.get_all("Classifier")) <= classifiers
    assert metadata["Requires-Python"] == ">=3.11"
    (jax,) = (r for r in metadata.get_all("Requires-Dist") if r.startswith("jax"))
    assert re.fullmatch(r"jax<0\.\d+,>=0\.\d+", jax)
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_description_is_the_readme(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = (ROOT / "README.md").read_text()
    assert metadata.get_payload(decode=True).decode() == text


def test_the_upper_bound_moves(tmp_path):
    """`.ci/allow_newest_jax` allows the minor version that is installed."""
    from importlib.metadata import version

    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "allow_newest_jax"
    script.write_text((ROOT / ".ci" / "allow_newest_jax").read_text())
    project = tmp_path / "pyproject.toml"
    project.write_text('dependencies = ["jax>=0.5,<0.6", "numpy"]\n')
    subprocess.run([sys.executable, script], check=True)
    minor = int(version("jax").split(".")[1])
    assert project.read_text() == (
        f'dependencies = ["jax>=0.5,<0.{minor + 1}", "numpy"]\n'
    )
