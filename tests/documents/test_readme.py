"""What README shows works: its Python blocks run, its commands are those of CI."""

import importlib.util
import json
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
REPOSITORY = "https://github.com/jmp-rewrite/jmp_rewrite"
COLAB = "https://colab.research.google.com"
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    """The code blocks in a language, padded so that tracebacks name its lines."""
    fences = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [
        "\n" * (text.count("\n", 0, fence.start()) + 1) + fence[1] for fence in fences
    ]


@pytest.fixture
def users_jax():
    """JAX's own defaults: README is for users, who have not made JAX strict."""
    strict = {
        name: getattr(jax.config, name)
        for name in ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    }
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    for name, value in strict.items():
        jax.config.update(name, value)


@pytest.mark.slow
def test_python_blocks_run_in_order(users_jax, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, str(ROOT / "README.md"), "exec"), namespace)
    assert namespace["jax"] is jax


def test_every_line_fits_a_screen():
    code = "".join(blocks("python") + blocks("bash"))
    assert max(map(len, code.splitlines())) <= 88


def test_first_the_job_then_the_tests_as_ci_runs_them():
    script = (ROOT / ".ci" / "run").read_text()
    commands = [line.strip() for line in "".join(blocks("bash")).split("\n")]
    job, tests = [line for line in commands if line][:2]
    assert job.endswith(" && python -m jmp_rewrite")
    for command in tests.split(" && "):
        assert command in script


def test_links_are_absolute_and_exist():
    """A package index shows README without the repository around it."""
    assert not re.findall(r"\]\((?!https?:|#)", README)
    targets = re.findall(rf"\({REPOSITORY}/(?:blob|tree)/main/([^)#]+)", README)
    colab = rf"\({COLAB}/github/[^/]+/[^/]+/blob/main/([^)#]+)"
    for target in [*targets, *re.findall(colab, README)]:
        assert (ROOT / target).exists(), target
    assert len(targets) > 10


@pytest.mark.parametrize("path", ["README.md", "benchmarks/README.md"])
def test_the_tables_are_those_of_the_results(path):
    """`python benchmarks/table.py FILE --write` writes them."""
    file = ROOT / "benchmarks" / "table.py"
    spec = importlib.util.spec_from_file_location("benchmarks_table", file)
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    results = ROOT / "benchmarks" / "results" / "compare-jax0.12.json"
    text = table.texts(json.loads(results.read_text()))[ROOT / path]
    shown = (ROOT / path).read_text().partition(table.BEGIN)[2].partition(table.END)[0]
    assert shown.strip() == text
