"""A program as a compiler is given it: lowered for a device that is not there."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._cost.devices import Target

# Prints and the like: they have no results, and are no matter of the device's.
_SILENT = frozenset({"debug_callback", "debug_print"})
# No compiler knows what these do outside of this process.
_CALLBACKS = frozenset({"io_callback", "pure_callback"})


class Program(NamedTuple):
    """A program and how its arrays lie.

    Attributes:
      name: the function's.
      closed: a closed jaxpr.
      donated: whether each parameter's memory may be used for results.
      shardings: of each parameter; None if it lies on one device.
      out_shardings: of each result; None if the compiler may choose.
    """

    name: str
    closed: Any
    donated: Sequence[bool]
    shardings: Sequence[Any]
    out_shardings: Sequence[Any]


class Lowered(NamedTuple):
    """A program for one kind of device.

    Attributes:
      text: StableHLO without source lines, by which results are kept.
      module: the same with source lines, as bytecode.
      devices: for how many it is.
      mesh: the shape of its mesh; empty for one device.
      free: which parameters and results the partitioner may place as it likes.
    """

    text: str
    module: bytes
    devices: int
    mesh: list[int]
    free: tuple[list[bool], list[bool]]


def lower(program: Program, target: Target) -> Lowered:
    """Lowers a program for a device that this process need not have.

    Raises:
      ValueError: if it holds a callback whose result it needs, or is for another number
        of devices than the target has.
    """
    closed = _without_prints(program.closed)
    fun = jex.jaxpr_as_fun(closed)

    def run(*args: Any) -> Any:  # a fresh function: nothing of another device is cached
        return fun(*args)

    run.__name__ = run.__qualname__ = program.name or "program"
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(closed.in_avals, program.shardings, strict=True)
    ]
    donated = tuple(i for i, given in enumerate(program.donated) if given)
    jitted = jax.jit(
        run, donate_argnums=donated, out_shardings=list(program.out_shardings)
    )
    with _quiet_start(), _compat.lowering_for(target.kind), warnings.catch_warnings():
        # That a donated buffer is of no use is for the user's own compilation to say.
        warnings.simplefilter("ignore")
        lowered = _compat.lower(jitted.trace(*types), target.platform)
    module = lowered.compiler_ir("stablehlo")
    if module is None:
        raise ValueError(f"{program.name} cannot be lowered to StableHLO.")
    count = module.operation.attributes["mhlo.num_partitions"].value
    _check_count(program.name, count, target)
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return Lowered(
        lowered.as_text(),
        out.getvalue(),
        count,
        _mesh_shape(program, count),
        _compat.unplaced(lowered),
    )


def _mesh_shape(program: Program, count: int) -> list[int]:
    """Returns the shape of the mesh that the arguments lie on."""
    for sharding in program.shardings:
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and mesh.size == count > 1:
            return list(mesh.axis_sizes)
    return []


def _check_count(name: str, count: int, target: Target) -> None:
    if count == target.devices:
        return
    devices = "one device" if target.devices == 1 else f"{target.devices} devices"
    raise ValueError(
        f"{name} is for {count} devices by the shardings of its arguments, and "
        f"{target.name!r} is {devices}: name a topology of {count}, as 'TPU v5e:4x4' "
        "is one of 16."
        if count > 1
        else f"{name} is for one device, and {target.name!r} is {devices}: give its "
        "arguments shardings over a mesh of that many, or name one device."
    )


def _without_prints(jaxpr: Any) -> Any:
    """Leaves out what only prints.

    Raises:
      ValueError: for a callback whose result is needed.
    """
    body = _compat.open_jaxpr(jaxpr)
    eqns = []
    for eqn in body.eqns:
        name = eqn.primitive.name
        if name in _SILENT:
            continue
        if name in _CALLBACKS:
            raise ValueError(
                f"the program calls Python ({name}), which no compiler knows without "
                "the process: leave it out to estimate the rest."
            )
        params = {k: _inside(v) for k, v in eqn.params.items()}
        changed = any(params[k] is not v for k, v in eqn.params.items())
        eqns.append(eqn.replace(params=params) if changed else eqn)
    is_same = len(eqns) == len(body.eqns) and all(map(_is, eqns, body.eqns))
    return jaxpr if is_same else _compat.with_body(jaxpr, eqns=eqns)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _inside(value: Any) -> Any:
    if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
        return _without_prints(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        new = [_inside(v) for v in value]
        return value if all(map(_is, new, value)) else type(value)(new)
    return value


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Starts JAX's backends, if they are not up, without what their plugins print.

    Lowering needs some backend, and the plugins of devices that are not there complain
    to standard error, from Python and from C.
    """
    if not _compat.is_started():
        with _silence():
            jax.devices()
    yield


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    sys.stderr.flush()
    with tempfile.TemporaryFile() as sink, contextlib.redirect_stderr(io.StringIO()):
        kept = os.dup(2)
        try:
            os.dup2(sink.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
