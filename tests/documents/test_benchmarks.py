"""Each benchmark that takes options starts: it finds its modules, and says them."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = [
    path.relative_to(ROOT)
    for folder in ("benchmarks", "tests/libraries", "tests/diagnose")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "ArgumentParser(" in path.read_text() and "tensorflow" not in path.stem
]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_it_starts(script):
    command = [sys.executable, str(script), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
