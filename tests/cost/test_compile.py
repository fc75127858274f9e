"""Each program has a process of its own, which ends, and whose result is kept."""

import contextlib
import functools
import gzip
import json
import os
import re
import sys
import threading
import time

import pytest
from described import arguments, step

import jmp_rewrite as jmpr
from jmp_rewrite._cost import compile as compiling
from jmp_rewrite._cost import devices, program, store
from jmp_rewrite._cost.compile import Job, compile_jobs, compiled_by, in_child

# A child that answers with what it was asked, and prints as compilers do.
ANSWERS = """
import gzip, json, pathlib, sys
folder = pathlib.Path(sys.argv[-1])
request = json.loads((folder / "request.json").read_text())
print("W0000 noise"); print("more noise", file=sys.stderr)
answer = {"asked": request, "module": len((folder / "module").read_bytes())}
gzip.open(folder / "program.gz", "wt").write("the text")
(folder / "answer.json").write_text(json.dumps(answer))
"""
FAILS = ANSWERS.replace("answer = {", 'answer = {"error": WHY} or {')


def job(rows=32, device="v5e", policy="float32"):
    subject = jmpr.explain(step)(*arguments(rows)).subject
    on = devices.target(device)
    return Job(on, program.lower(subject.program(jmpr.Policy(policy)), on))


@pytest.fixture
def child(installed):
    """Puts another program in the place of the child's."""
    with contextlib.ExitStack() as stack:

        def runs(code):
            command = (sys.executable, "-c", code)
            run = functools.partial(in_child, command=command)
            stack.enter_context(compiled_by(run))

        yield runs


def test_a_child_is_asked_and_its_noise_not_heard(child, capfd):
    child(ANSWERS)
    [found] = compile_jobs([job(device="TPU v4")], 60)
    assert found.text == "the text"
    asked = found.answer["asked"]
    assert (asked["platform"], asked["topology"]) == ("tpu", "v4:2x2x1")
    assert asked["options"] == {"chip_config_name": "megacore"}
    assert found.answer["module"] == len(job(device="TPU v4").lowered.module)
    assert capfd.readouterr() == ("", "")


def test_the_child_has_the_environment_and_the_parent_has_not(child, monkeypatch):
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    child(
        ANSWERS.replace("answer = {", 'import os\nanswer = {"env": dict(os.environ), ')
    )
    [found] = compile_jobs([job()], 60)
    environment = found.answer["env"]
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert "TPU_WORKER_ID" not in os.environ


def test_equal_programs_are_compiled_once_and_kept(child, own_cache):
    child(ANSWERS)
    first = compile_jobs([job(), job(), job(policy="mixed_bfloat16")], 60)
    assert first[0] == first[1] != first[2] or len(list(own_cache.glob("*.gz"))) == 2
    child("raise SystemExit('asked again')")
    assert compile_jobs([job()], 60)[0] == first[0]
    fresh = compile_jobs([job()], 60, fresh=True)[0]
    assert "asked again" in fresh.answer["error"]


def test_cache_keys_depend_on_device_version_and_flags(installed, monkeypatch):
    names = {job().name, job(device="v6e").name, job(rows=64).name}
    names.add(job()._replace(options=(("a", "1"),)).name)
    monkeypatch.setenv("XLA_FLAGS", "--xla_something")
    names.add(job().name)
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda name: "1.3")
    names.add(job().name)
    assert len(names) == 6


@pytest.mark.slow
def test_a_child_that_takes_too_long_is_killed(child, tmp_path):
    file = tmp_path / "pid"
    child(f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); "
          "time.sleep(600)")  # fmt: skip
    start = time.monotonic()
    [found] = compile_jobs([job()], 3.0)
    assert found.answer["error"] == "not compiled within the time limit of 3 s"
    assert time.monotonic() - start < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", r"process ended \(SIGABRT\): it printed nothing"),
        ("raise SystemExit('no memory\\n left')", r"\(exit code 1\):  ?left"),
    ],
)
def test_a_child_that_dies_is_a_line(child, code, message):
    child(code)
    [found] = compile_jobs([job()], 60)
    assert re.search(message, found.answer["error"])


def test_an_error_is_not_kept_but_a_verdict_is(child, own_cache):
    child(FAILS.replace("WHY", "'INTERNAL: broken'"))
    [found] = compile_jobs([job()], 60)
    assert found.answer["error"] == "INTERNAL: broken" and not list(own_cache.glob("*"))
    child(FAILS.replace("WHY", "'RESOURCE_EXHAUSTED: (2G) exceeds (1G)'"))
    [found] = compile_jobs([job()], 60)
    assert compiling.is_too_large(found.answer) and list(own_cache.glob("*.gz"))


def test_an_interruption_ends_the_children(child, monkeypatch):
    child("import time; time.sleep(600)")
    started = []
    original = compiling.subprocess.Popen

    def popen(*args, **kwargs):
        started.append(original(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(compiling.subprocess, "Popen", popen)

    def interrupt(index):
        raise KeyboardInterrupt

    quick = job()
    store.save(quick.name, store.Compiled("", {"peak": 1}))
    with pytest.raises(KeyboardInterrupt):
        compile_jobs([quick, job(rows=64), job(rows=128)], 600, interrupt)
    assert all(process.returncode is not None for process in started)
    assert not [t for t in threading.enumerate() if "ThreadPool" in t.name]


@pytest.mark.slow
def test_a_child_ends_with_its_parent(run_python, tmp_path):
    """Its input closes."""
    (tmp_path / "request.json").write_text("{}")
    code = """
import pathlib, threading
from jmp_rewrite._cost import child
pathlib.Path("module").write_bytes(b"")
child.main(pathlib.Path("."), lambda *a: threading.Event().wait(600))
"""
    done = run_python("-c", code)
    assert done.returncode == 1 and not (tmp_path / "answer.json").exists()


def test_the_cache_is_bounded(own_cache):
    for n in range(10):
        text = os.urandom(500).hex()
        store.save(f"program{n}", store.Compiled(text, {"n": n}), most_bytes=3000)
        for path in own_cache.glob(f"program{n}.*"):
            os.utime(path, (n, n))
    kept = [n for n in range(10) if store.load(f"program{n}") is not None]
    assert 9 in kept and 0 not in kept and kept == sorted(kept)


def test_a_broken_file_is_compiled_again(own_cache):
    store.save("a", store.Compiled("text", {"n": 1}))
    assert store.load("a") == store.Compiled("text", {"n": 1})
    (own_cache / "a.gz").write_bytes(gzip.compress(b"text")[:-6])
    assert store.load("a") is None
    packed = gzip.compress(b"text" * 100)
    (own_cache / "a.gz").write_bytes(packed[:12] + b"\xff" * 8 + packed[20:])
    assert store.load("a") is None
    (own_cache / "b.json").write_text(json.dumps({}))
    assert store.load("b") is None


def test_no_home_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setattr(store.tempfile, "gettempdir", lambda: str(tmp_path))
    store.save("a", store.Compiled("text", {}))
    assert store.load("a") is not None
