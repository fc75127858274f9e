"""Compiles programs in processes of their own, several beside each other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import gzip
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jmp_rewrite._cost import store
from jmp_rewrite._cost.child import ENVIRONMENT
from jmp_rewrite._cost.devices import Target, compiler
from jmp_rewrite._cost.program import Lowered
from jmp_rewrite._cost.store import Compiled

# So many compilers at once at most: each has its own threads, and may take gigabytes.
_AT_ONCE = 4
# What changes a compiler's output beside the program.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ROOT = str(pathlib.Path(__file__).parents[2])


class Job(NamedTuple):
    """A program to compile.

    Attributes:
      target: the devices it is for.
      lowered: the program.
      options: the compiler's, as (name, value).
    """

    target: Target
    lowered: Lowered
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """What its result is kept under."""
        target = self.target
        flags = [os.environ.get(flag, "") for flag in _FLAGS]
        versions = [jax.__version__, compiler(target.platform)]
        described = [target.topology, *(f"{k}={v}" for k, v in target.options)]
        options = [f"{k}={v}" for k, v in self.options]
        return store.key(self.lowered.text, *versions, *described, *flags, *options)


class Children:
    """The processes that compile now, so that none outlives an interruption."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    @contextlib.contextmanager
    def started(self, command: Sequence[str], **options: Any) -> Iterator[Any]:
        with self._lock:
            if self._is_over:
                raise RuntimeError("interrupted")
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._processes.add(process)
        try:
            yield process
        finally:
            _kill(process)
            with self._lock:
                self._processes.discard(process)

    def end(self) -> None:
        """Ends all of them, and lets none start."""
        with self._lock:
            self._is_over = True
            for process in self._processes:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def compile_jobs(
    jobs: Sequence[Job],
    time_limit: float,
    done: Callable[[int], None] = lambda index: None,
    fresh: bool = False,
) -> list[Compiled]:
    """Compiles programs, each in a process of its own unless its result is kept.

    Args:
      jobs: what to compile; equal programs are compiled once.
      time_limit: seconds for each.
      done: called with the index of each that is ready.
      fresh: whether to compile what is kept, too.

    Returns:
      A result for each. One that was not compiled has the reason as "error".
    """
    children, run = Children(), _RUN.get()
    at_once = max(1, min(_AT_ONCE, (os.cpu_count() or 2) // 2))
    names = [job.name for job in jobs]
    pool = concurrent.futures.ThreadPoolExecutor(at_once)
    try:
        by_name = {
            name: pool.submit(_compile, run, name, job, time_limit, children, fresh)
            for name, job in zip(names, jobs, strict=True)
        }
        results = []
        for index, name in enumerate(names):
            results.append(by_name[name].result())
            done(index)
        return results
    finally:
        children.end()
        pool.shutdown(cancel_futures=True)


def _compile(
    run: Run,
    name: str,
    job: Job,
    time_limit: float,
    children: Children,
    fresh: bool,
) -> Compiled:
    found = None if fresh else store.load(name)
    if found is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="jmp_rewrite-") as folder:
        found = run(pathlib.Path(folder), job, time_limit, children)
    if "error" not in found.answer or is_too_large(found.answer):
        store.save(name, found)
    return found


def is_too_large(answer: dict[str, Any]) -> bool:
    """Whether a compiler said that a program does not fit into the device's memory."""
    return "RESOURCE_EXHAUSTED" in answer.get("error", "")


def in_child(
    folder: pathlib.Path,
    job: Job,
    time_limit: float,
    children: Children,
    command: Sequence[str] = (sys.executable, "-m", "jmp_rewrite._cost.child"),
) -> Compiled:
    """Compiles a program in a process of its own.

    Args:
      folder: an empty one, for what the two say to each other.
      job: the program.
      time_limit: seconds after which the process is killed.
      children: those that run now.
      command: what runs there, before the folder's name.
    """
    (folder / "module").write_bytes(job.lowered.module)
    (folder / "request.json").write_text(json.dumps(_request(job)))
    with (
        open(folder / "printed", "wb") as printed,
        children.started(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            env=_environment(),
            cwd=folder,
        ) as process,
    ):
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            why = f"not compiled within the time limit of {time_limit:g} s"
            return Compiled("", {"error": why, "late": True})
    answer = folder / "answer.json"
    if not answer.exists():
        return Compiled("", {"error": _how_it_ended(process, folder / "printed")})
    with gzip.open(folder / "program.gz", "rt") as file:
        return Compiled(file.read(), json.loads(answer.read_text()))


Run = Callable[[pathlib.Path, Job, float, Children], Compiled]
_RUN: contextvars.ContextVar[Run] = contextvars.ContextVar("run", default=in_child)


@contextlib.contextmanager
def compiled_by(run: Run) -> Iterator[None]:
    """Compiles with another function than `in_child`, of the same arguments."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def _request(job: Job) -> dict[str, Any]:
    target, lowered = job.target, job.lowered
    return {
        "platform": target.platform,
        "topology": target.topology,
        "options": dict(target.options),
        "devices": lowered.devices,
        "mesh": lowered.mesh,
        "free_parameters": lowered.free[0],
        "free_results": lowered.free[1],
        "compiler_options": dict(job.options),
    }


def _environment() -> dict[str, str]:
    """Returns the child's environment: nothing is asked of the user's own."""
    paths = [_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(p for p in paths if p)
    return os.environ | ENVIRONMENT | {"PYTHONPATH": path}


def _how_it_ended(process: Any, printed: pathlib.Path) -> str:
    """Says in a line why a child left no answer."""
    lines = printed.read_text(errors="replace").strip().splitlines()
    last = re.sub(r"\s+", " ", lines[-1])[:300] if lines else "it printed nothing"
    code = process.returncode
    how = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            how = signal.Signals(-code).name
    return f"the compiler's process ended ({how}): {last}"
