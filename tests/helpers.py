"""Looking into jaxprs, and comparing trees with their types."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
EPS = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}  # half the spacing at 1
HALF = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


def open_jaxpr(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def walk(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all that it holds."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from walk(inner)


def eqns(jaxpr: Any, *names: str) -> list[Any]:
    """Returns the equations with one of these names, everywhere inside."""
    return [e for e in walk(jaxpr) if e.primitive.name in names]


def choices(jaxpr: Any, name: str = "") -> list[Any]:
    """Returns the equations that choose by device, maybe those of one pass."""
    scope = f"jmp_rewrite.pass:{name}"
    found = eqns(jaxpr, "by_device")
    return [e for e in found if scope in str(e.source_info.name_stack)]


def devices_of(eqn: Any) -> tuple[str, ...]:
    """Returns the devices that compute something else."""
    return tuple(d for b in eqn.params["branches"] for d in b.where.devices)


def names_in(eqn: Any) -> list[str]:
    """Returns the primitives of what the first of these devices computes."""
    body = open_jaxpr(eqn.params["branches"][0].jaxpr)
    return [e.primitive.name for e in body.eqns]


def products(jaxpr: Any) -> list[Any]:
    return eqns(jaxpr, *PRODUCTS)


def dtypes_in(eqn: Any) -> list[str]:
    return [str(v.aval.dtype) for v in eqn.invars]


def dtypes_out(eqn: Any) -> list[str]:
    return [str(v.aval.dtype) for v in eqn.outvars]


def trace(fun: Any, *args: Any) -> Any:
    """Returns the jaxpr of a function, through a fresh one that no cache knows."""
    return jax.make_jaxpr(lambda *a: fun(*a))(*args)


def arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, (jax.Array, np.ndarray))]


def same_types(one: Any, other: Any) -> None:
    """Asserts equal trees, shapes, dtypes and weak types; other leaves are equal."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if not isinstance(x, jax.Array):
            assert x == y
            continue
        a, b = jax.typeof(x), jax.typeof(y)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def relative_error(value: Any, reference: Any) -> float:
    """Returns the norm of the difference over the norm of the reference."""
    pairs = [
        (np.asarray(x, np.float64), np.asarray(y, np.float64))
        for x, y in zip(arrays(value), arrays(reference), strict=True)
        if np.issubdtype(np.asarray(y).dtype, np.floating)
        or str(x.dtype) in ("bfloat16", "float16")
    ]
    error = sum(float(np.sum((x - y) ** 2)) for x, y in pairs)
    norm = sum(float(np.sum(y**2)) for _, y in pairs)
    return float(np.sqrt(error / norm)) if norm else 0.0


def shape_of(jaxpr: Any) -> list[Any]:
    """Returns the structure of a jaxpr without names of variables and places."""
    jaxpr = open_jaxpr(jaxpr)
    numbers = {}

    def atom(a):
        if hasattr(a, "val"):
            return ("literal", str(a.val), str(a.aval))
        return (numbers.setdefault(a, len(numbers)), str(a.aval))

    lines = [[atom(v) for v in [*jaxpr.constvars, *jaxpr.invars]]]
    for eqn in jaxpr.eqns:
        inner = [shape_of(j) for j in jex.jaxprs_in_params(eqn.params)]
        names = sorted(k for k in eqn.params)
        lines.append(
            (
                eqn.primitive.name,
                names,
                [atom(v) for v in eqn.invars],
                [atom(v) for v in eqn.outvars],
                inner,
            )
        )
    return [*lines, [atom(v) for v in jaxpr.outvars]]


def bit_equal(one: Any, other: Any) -> None:
    """Asserts equal trees, to the bit."""
    same_types(one, other)
    for x, y in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def two_processes(folder: Any, source: str, devices: int, *args: str) -> list[str]:
    """Runs a program in two processes on localhost, each with so many CPU devices.

    It is given its rank, the coordinator's address and `args`.

    Returns:
      The lines that begin with "step", the same ones from both.
    """
    worker = folder / "worker.py"
    worker.write_text(textwrap.dedent(source))
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    env.pop("XLA_FLAGS", None)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (os.getcwd(), *sys.path) if p)
    members = [
        subprocess.Popen(
            [sys.executable, worker, rank, address, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in ("0", "1")
    ]
    try:
        outputs = [m.communicate(timeout=120) for m in members]
    finally:
        for member in members:
            member.kill()
    assert [m.returncode for m in members] == [0, 0], outputs
    rows = [[r for r in out.splitlines() if r.startswith("step")] for out, _ in outputs]
    assert rows[0] == rows[1]
    return rows[0]
