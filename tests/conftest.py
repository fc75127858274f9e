"""Strict JAX on eight CPU devices, set before any backend starts.

A library that changes dtypes must not lean on implicit promotion, so both kinds are
errors here. Users' own models run under JAX's defaults.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles: its time says nothing.
hypothesis.settings.register_profile("jmp_rewrite", deadline=None)
hypothesis.settings.load_profile("jmp_rewrite")
