"""Imports run one way: from data to decision to doing to the front."""

import ast
import pathlib

import pytest

import jmp_rewrite

PACKAGE = pathlib.Path(jmp_rewrite.__file__).parent

# A room imports from itself and from rooms above it; `__init__` hands names on.
ROOMS = (
    "_rules",
    "_collector",
    "_compat",
    "_source",
    "_units",
    "_devices",
    "_misuse",
    "_spelling",
    "_policy",
    "_graph",
    "_precision",
    "_passes",
    "_emit",
    "_linen",
    "_nnx",
    "_keras",
    "_arguments",
    "_rewrite",
    "_transform",
    "_inference",
    "_loss_scaling",
    "_train",
    "_cost",
    "_explain",
    "_diagnose",
    "__init__",
    "_demo",
    "__main__",
)
# Loss scaling knows nothing of the rewrite, nor the rewrite of it.
REWRITE = {
    "_graph",
    "_precision",
    "_passes",
    "_emit",
    "_rewrite",
    "_transform",
    "_arguments",
    "_inference",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path):
    """The rooms that a file imports from, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for package, *rest in (name.split(".") for name in names):
            if package == "jmp_rewrite":
                room = rest[0] if rest else "__init__"
                found.add(room if room.startswith("_") else "__init__")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_from_rooms_above(path):
    room = room_of(path)
    above = set(ROOMS[: ROOMS.index(room) + 1])
    below = {other for other in imports(path) if other not in above}
    assert not below
    if room == "_loss_scaling":
        assert not imports(path) & REWRITE
    if room in REWRITE:
        assert "_loss_scaling" not in imports(path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_are_entered_through_their_doors(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            package, _, rest = (node.module or "").partition(".")
            room, _, inside = rest.partition(".")
            if package == "jmp_rewrite" and inside and room != room_of(path):
                pytest.fail(f"{node.module}: import it from {package}.{room}")


def test_few_files_lie_beside_the_rooms():
    assert len(list(PACKAGE.glob("*.py"))) <= 15


@pytest.mark.slow
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
