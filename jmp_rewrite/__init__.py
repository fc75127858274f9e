"""Automatic mixed precision for JAX: a function is traced, rewritten and run."""
