"""The documentation says what is so: names, examples, tests, links and numbers."""

import ast
import doctest
import functools
import inspect
import json
import os
import pathlib
import re
import types

import jax.numpy as jnp
import pytest
from test_readme import README, ROOT, blocks
from test_readme import users_jax as users_jax

import jmp_rewrite

PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_PYTHON = [page for page in PAGES if blocks("python", page.read_text())]
PUBLIC = {
    name: value
    for name, value in vars(jmp_rewrite).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
}
CLASSES = [name for name, value in PUBLIC.items() if inspect.isclass(value)]


def name_of(path):
    return str(path.relative_to(ROOT))


# ---- the reference


def referred():
    """Returns what the pages of the reference are made from: dotted names."""
    text = "".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md"))
    return re.findall(r"^\.\. auto(?:function|class):: ([\w.]+)", text, re.MULTILINE)


def test_every_public_name_is_in_the_reference_once():
    names = [n for n in referred() if n.count(".") == 1]
    assert sorted(names) == sorted(f"jmp_rewrite.{name}" for name in PUBLIC)


@pytest.mark.parametrize("dotted", referred())
def test_names_in_the_reference_exist(dotted):
    value = functools.reduce(getattr, dotted.split(".")[1:], jmp_rewrite)
    assert inspect.getdoc(value)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    """`--doctest-modules` runs it."""
    value = inspect.unwrap(PUBLIC[name])
    module = inspect.getmodule(value)
    (test, *_) = doctest.DocTestFinder(recurse=False).find(value, module=module)
    assert any(example.want for example in test.examples)
    assert inspect.getsourcefile(value).startswith(str(ROOT / "jmp_rewrite"))


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_attribute_is_described(name):
    own = inspect.getdoc(PUBLIC[name])
    fields = getattr(PUBLIC[name], "__annotations__", {})
    for attribute, value in vars(PUBLIC[name]).items():
        if attribute.startswith("_") or attribute in fields:
            continue
        is_member = isinstance(value, PUBLIC[name])  # of an enumeration
        described = f"`{attribute}`" in own if is_member else inspect.getdoc(value)
        assert described, attribute
    for field in fields:
        assert field.startswith("_") or re.search(rf"^ *{field}: ", own, re.M), field


# ---- what the pages say


@pytest.mark.slow
@pytest.mark.breadth
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run_in_order(page, users_jax, tmp_path, monkeypatch):
    text = page.read_text()
    for module in ("flax", "keras"):
        if re.search(rf"^(?:from|import) {module}\b", text, re.MULTILINE):
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # a page may set variables
    namespace: dict = {"__name__": page.stem}
    for block in blocks("python", text):
        assert max(map(len, block.splitlines())) <= 88
        exec(compile(block, str(page), "exec"), namespace)


@functools.cache
def known_tests():
    """Returns each test with the files that it stands in."""
    found: dict[str, list[pathlib.Path]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(path)
    return found


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=name_of,
)
def test_every_test_that_is_named_exists(page):
    names = re.findall(
        r"`(?:tests/)?(?:\w+/)*(test_\w+)(\.py)?(?:\[\w+\])?`", page.read_text()
    )
    for name, is_file in names:
        if is_file:
            assert any((ROOT / "tests").rglob(f"{name}.py")), name
        else:
            assert name in known_tests(), name


def test_stacks_that_are_named_exist():
    import stacks

    known = {make.__name__ for make in stacks.STACKS}
    text = (ROOT / "docs" / "maintainers.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `\[(\w+)\]`.*\| `\[(\w+)\]` \|", text, re.MULTILINE)
    assert {a for a, _ in rows} == {b for _, b in rows} == known


def test_the_report_that_is_shown_begins_as_a_report(users_jax, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "explain.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # the page's width, on any terminal
    namespace: dict = {"__name__": "explain"}
    exec(compile(blocks("python", text)[0], "train.py", "exec"), namespace)
    (shown,) = blocks("text", text)
    report = str(namespace["report"]).splitlines()
    assert shown.strip().splitlines() == report[: len(shown.strip().splitlines())]


@pytest.mark.slow
def test_the_diagnosis_that_is_shown_begins_as_one(users_jax):
    """Its words: errors are those of the processor."""
    text = (ROOT / "docs" / "diagnose.md").read_text()
    namespace: dict = {"__name__": "diagnose"}
    script, search, *_ = blocks("python", text)
    for code in (script, search):
        exec(compile(code.lstrip(), "train.py", "exec"), namespace)
    args = (namespace[name] for name in ("params", "opt_state", "batch"))
    diagnosis = str(jmp_rewrite.diagnose(namespace["train_step"])(*args))
    (shown,) = blocks("text", text)
    found, said = (
        re.sub(r"[\d.,]+(?:e\+\d+)?", "#", x).split()
        for x in (diagnosis.partition("\n\n")[0], shown)
    )
    assert found == said


RULES = ("maintainers", "precision", "decisions")
GUIDES = [page for page in PAGES if page.stem not in RULES]


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md"], ids=name_of)
def test_guides_name_no_tests(page):
    """Those are on the maintainers' page."""
    assert not re.findall(r"`test_\w+", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_exist(page):
    for target in re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_commits_that_are_named_have_a_title():
    """A hash alone says nothing to who reads it outside of the repository."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    shown = re.findall(r"`git show ([0-9a-f]{7})`(, \*[^*]+\*)?", text)
    assert len(shown) == 2 and all(title for _, title in shown)


# ---- numbers


def test_numbers_of_loss_scaling():
    parameters = inspect.signature(jmp_rewrite.loss_scaling).parameters
    default = {name: p.default for name, p in parameters.items()}
    text = (ROOT / "docs" / "loss_scaling.md").read_text()
    interval = default["growth_interval"]
    assert f"After {interval} finite steps in a row the scale is doubled" in text
    assert f"{interval} finite steps in a row double it" in README
    assert "between 2^-14 and 2^24" in text
    assert (default["min_scale"], default["max_scale"]) == (2.0**-14, 2.0**24)
    assert (default["growth_factor"], default["backoff_factor"]) == (2.0, 0.5)
    assert "below 2^-24" in README
    assert float(jnp.finfo(jnp.float16).smallest_subnormal) == 2.0**-24


def test_255_9_is_where_a_square_leaves_float16():
    assert "above 255.9" in README
    limit = float(jnp.finfo(jnp.float16).max)
    assert 255.9**2 < limit < 256.0**2


def test_sizes_of_collectives_are_those_of_the_results():
    text = (ROOT / "docs" / "many_devices.md").read_text()
    ways = {
        'float32, `precision="highest"`': ("layers", "float32, highest"),
        "float32, default precision": ("layers", "float32"),
        'step under `"mixed_bfloat16"`': ("layers", "mixed_bfloat16"),
        'step under `"mixed_float16"`': ("layers", "mixed_float16"),
        'loss alone under `"mixed_bfloat16"`, `jax.grad` outside': (
            "layers",
            "mixed_bfloat16, loss alone",
        ),
        "by hand in bfloat16, `jax.grad` outside": (
            "layers, by hand",
            "bfloat16 by hand",
        ),
    }
    for title, (model, way) in ways.items():
        cells = []
        for target in ("v5e-4x4", "cpu"):
            path = ROOT / "benchmarks" / "results" / f"collectives-{target}.json"
            (row,) = [
                r
                for r in json.loads(path.read_text())["bytes"]
                if (r["model"], r["way"]) == (model, way)
            ]
            ((kind, reduced),) = [
                (k.removeprefix("reduced "), v)
                for k, v in row.items()
                if k.startswith("reduced")
            ]
            gathered, reduced = (int(v) >> 20 for v in (row["gathered"], reduced))
            cells += [f"{gathered}", f"{reduced} ({kind})"]
        assert f"| {title} | {' | '.join(cells)} |" in text
