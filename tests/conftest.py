"""Strict JAX on eight CPU devices, set before any backend starts.

A library that changes dtypes must not lean on implicit promotion, so both kinds are
errors here. Users' own models run under JAX's defaults.
"""

import os
import subprocess
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles: its time says nothing.
hypothesis.settings.register_profile("jmp_rewrite", deadline=None)
hypothesis.settings.load_profile("jmp_rewrite")


@pytest.fixture
def run_python(tmp_path):
    """Runs the interpreter in an empty directory, with one CPU device."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", *args]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    return run
