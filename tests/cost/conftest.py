"""Compilers that are not there, and a cache of one's own."""

import pytest
from described import arguments, step

import jmp_rewrite as jmpr
from jmp_rewrite._cost import devices
from jmp_rewrite._cost.compile import compiled_by
from jmp_rewrite._cost.store import Compiled

TEXT = """HloModule jit_step

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  ROOT %y = f32[8,128]{1,0} sine(%x), backend_config={"estimated_cycles":"1000"}
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Programs are kept where nobody else looks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jmp_rewrite" / "cost"


@pytest.fixture
def installed(monkeypatch):
    """Both compilers, by their version alone."""
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "1.2")


@pytest.fixture
def compiler(installed):
    """A compiler that answers what it is told, by the job; the list has its jobs."""
    jobs = []

    def in_child(folder, job, time_limit, children):
        jobs.append(job)
        is_half = "bf16" in job.lowered.text
        answer = {
            "argument": 1000,
            "output": 600,
            "alias": 500,
            "temporary": 300 if is_half else 600,
            "peak": 1400 if is_half else 1700,
            "accessed": 2000.0 if is_half else 4000.0,
            "seconds": 1.5,
        }
        return in_child.answers(job, Compiled(TEXT, answer))

    in_child.answers = lambda job, usual: usual
    in_child.jobs = jobs
    with compiled_by(in_child):
        yield in_child


@pytest.fixture
def report():
    return jmpr.explain(step)(*arguments())
