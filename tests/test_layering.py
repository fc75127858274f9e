"""Imports run one way, from data to decision to doing, and every module has a place."""

import ast
import pathlib

import pytest

import jmp_rewrite

PACKAGE = pathlib.Path(jmp_rewrite.__file__).parent

# A module imports only from modules above it. `__init__` hands on what stands above.
ORDER = (
    "_rules",
    "_compat",
    "_on_device",
    "_products",
    "_devices",
    "_policy",
    "_scopes",
    "_holders",
    "_graph",
    "_build_inner",
    "_build",
    "_state",
    "_place",
    "_pin",
    "_storage",
    "_again",
    "_sums",
    "_unstacked",
    "_attention",
    "_parts",
    "_waiting",
    "_plan",
    "_parameters",
    "_cast",
    "_demand",
    "_emit",
    "_derivatives",
    "_emit_sums",
    "_emit_inner",
    "_rewrite",
    "_nnx",
    "_transform",
    "_loss_scale_leaves",
    "_loss_scale_state",
    "_loss_scale_step",
    "_loss_scale_schedule",
    "_loss_scale",
    "_train",
    "_units",
    "_source",
    "_measure",
    "_provenance",
    "_reasons",
    "_walk",
    "_rows",
    "_summary",
    "_advice",
    "_document",
    "_report_text",
    "_report_html",
    "_report_plot",
    "_report",
    "_explain",
    "_counts",
    "_lines",
    "_blame",
    "_candidates",
    "_diagnosis_text",
    "_diagnosis_html",
    "_distance",
    "_diagnosis_plot",
    "_overrides",
    "_sentences",
    "_diagnosis",
    "_evaluate",
    "_float32",
    "_lockstep_rows",
    "_pair",
    "_lockstep",
    "_findings",
    "_lockstep_states",
    "_lockstep_loops",
    "_lockstep_inner",
    "_results",
    "_diagnose",
    "__init__",
    "_demo",
    "_demo_report",
    "__main__",
)

# Loss scaling knows nothing of the rewrite, nor the rewrite of it.
LOSS_SCALING = tuple(m for m in ORDER if m.startswith("_loss_scale"))
REWRITE = ORDER[: ORDER.index(LOSS_SCALING[0])]

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def imported_modules(source: str) -> set[str]:
    """The package's modules that a source imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= _own(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= _from_package(node)
    return found


def _own(dotted: str) -> set[str]:
    package, _, module = dotted.partition(".")
    return {module.split(".")[0] or "__init__"} if package == "jmp_rewrite" else set()


def _from_package(node: ast.ImportFrom) -> set[str]:
    if node.module != "jmp_rewrite":
        return _own(node.module or "")
    names = {alias.name for alias in node.names}
    modules = {name for name in names if name.startswith("_")}
    return modules | ({"__init__"} if names - modules else set())


def imports(module: str) -> set[str]:
    return imported_modules((PACKAGE / f"{module}.py").read_text())


def test_every_module_has_a_place():
    assert set(MODULES) <= set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("module", MODULES)
def test_imports_come_from_above(module):
    assert imports(module) <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", MODULES)
def test_loss_scaling_and_rewrite_are_strangers(module):
    strangers = REWRITE if module in LOSS_SCALING else ()
    strangers = LOSS_SCALING if module in REWRITE else strangers
    assert not imports(module) & set(strangers)


def test_all_forms_of_import_are_seen():
    source = """
import jmp_rewrite._rules
import jax.numpy as jnp
from jmp_rewrite import _graph, Policy
def f():
    from jmp_rewrite._policy import Policy
"""
    assert imported_modules(source) == {"_rules", "_graph", "__init__", "_policy"}


def test_importing_starts_no_backend(run_python):
    code = """
import jax, jmp_rewrite
jax.config.update("jax_platforms", "no such platform")
try:
    jax.devices()
except RuntimeError as error:
    assert "no such platform" in str(error)
else:
    raise SystemExit("a backend was up already")
"""
    assert run_python("-c", code).returncode == 0
