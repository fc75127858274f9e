"""Strict JAX on eight CPU devices, set before any backend starts.

A library that changes dtypes must not lean on implicit promotion, so both kinds are
errors here. Users' own models run under JAX's defaults.
"""

import collections
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("MPLBACKEND", "agg")
# Most of the time goes to compiling programs that run once: LLVM need not optimize what
# XLA made of them, nor split it among threads, which changes no dtype, no fusion and no
# kernel.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Two workers and the next run share what was compiled, however small it is.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles: its time says nothing.
hypothesis.settings.register_profile("jmp_rewrite", deadline=None)
hypothesis.settings.load_profile("jmp_rewrite")


def pytest_collection_finish():
    """Lets the garbage collector look less often, and never at what was imported.

    Tracing makes many objects that live: with Python's thresholds the collector takes
    a seventh of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def clear_caches():
    """Forgets what a file's tests compiled.

    Each compiled program holds memory maps, of which Linux gives a process 65,530.
    """
    yield
    jax.clear_caches()


# What tests marked `passes` run with beside the default: no passes, and the program
# that each kind of device is given. A v4's passes are among those of a v5e.
SWITCHED = {
    "no_passes": ("none", None),
    "CPU": ("all", "CPU"),
    "H200": ("all", "NVIDIA H200"),
    "v5e": ("all", "TPU v5e"),
}


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("passes"):
        metafunc.parametrize("switched", ["all", *SWITCHED], indirect=True)


@pytest.fixture(autouse=True)
def switched(request):
    """Runs a test marked `passes` with other passes, or for another device."""
    name = getattr(request, "param", "all")
    if name == "all":
        yield
        return
    import jmp_rewrite

    passes, device = SWITCHED[name]
    with jmp_rewrite.use_passes(passes, device=device):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves most cases of tests of breadth to the slow ones."""
    unnamed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unnamed:  # another process calls them otherwise, and chooses other cases
        raise pytest.UsageError(f"cases are named by addresses: {unnamed}")
    tests = collections.defaultdict(list)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        marker = item.get_closest_marker("breadth")
        if item.get_closest_marker("slow"):
            continue
        if params.get("switched", "all") != "all":
            tests[item.path, 40].append(item)
        elif marker and params:
            name = item.nodeid.partition("[")[0]
            tests[name, marker.kwargs.get("one_in", 5)].append(item)
    for (_, one_in), cases in tests.items():
        quick = some(cases, one_in)
        for item in cases:
            if item not in quick:
                item.add_marker(pytest.mark.slow)


def some(cases, one_in):
    """Some of a test's cases, the same ones each time, by a checksum of their names.

    Each value of a parameter is among them that has no more values than that.
    """
    cases = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    enough = -(-len(cases) // one_in)
    values = collections.defaultdict(set)
    for item in cases:
        for name, index in item.callspec.indices.items():
            values[name].add(index)
    covered = {name for name, found in values.items() if len(found) <= enough}
    kept, seen = set(), set()
    for item in cases:
        new = {(n, i) for n, i in item.callspec.indices.items() if n in covered}
        if not new <= seen:
            kept.add(item)
            seen |= new
    for item in cases:
        if len(kept) < enough:
            kept.add(item)
    return kept


@pytest.fixture
def run_python(tmp_path):
    """Runs the interpreter in an empty directory, with one CPU device."""

    package = pathlib.Path(importlib.util.find_spec("jmp_rewrite").origin).parent

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        return subprocess.run(
            [sys.executable, "-W", "error", *args],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def optimized(monkeypatch):
    """What trains for a minute runs in less, and as users run it, with LLVM's help."""
    monkeypatch.delenv("XLA_FLAGS")
