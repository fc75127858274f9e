"""To type checkers a decorated function has the signature of the original."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

import jmp_rewrite

CASES = pathlib.Path(__file__).with_name("typed.py")
ROOT = str(pathlib.Path(jmp_rewrite.__file__).parents[1])


def expected():
    """Line -> the type that is revealed there, or "wrong"."""
    found = {}
    for number, line in enumerate(CASES.read_text().splitlines(), 1):
        if "  # " in line:
            found[number] = line.split("  # ")[1]
    assert list(found.values()).count("wrong") == 9 and len(found) == 35
    return found


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.stdout, done.stderr
    return done.stdout


def said_by_mypy(tmp_path):
    pytest.importorskip("mypy")
    text = run(sys.executable, "-m", "mypy", "--no-error-summary", CASES, cwd=ROOT)
    for line in text.splitlines():
        number, kind, message = re.match(r".*?:(\d+): (\w+): (.*)", line).groups()
        if kind == "error":
            yield int(number), "wrong"
        elif revealed := re.match(r'Revealed type is "(?:def )?(.*)"', message):
            yield int(number), re.sub(r"[\w.]+\.(\w+)", r"\1", revealed[1])


def said_by_pyright(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [ROOT]}))
    command = (sys.executable, "-m", "pyright", "--outputjson")
    python = ("--pythonpath", sys.executable)
    text = run(*command, *python, "--project", tmp_path, CASES, cwd=ROOT)
    for said in json.loads(text)["generalDiagnostics"]:
        number = said["range"]["start"]["line"] + 1
        if said["severity"] == "error":
            yield number, "wrong"
        elif revealed := re.match(r'Type of ".*" is "(.*)"', said["message"]):
            yield number, revealed[1]


@pytest.mark.slow
@pytest.mark.parametrize("checker", [said_by_mypy, said_by_pyright])
def test_type_checkers_accept_uses_and_refuse_misuses(checker, tmp_path):
    assert dict(checker(tmp_path)) == expected()
