"""Weights that are cast before they are gathered."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import given, is_call, made_inside
from jmp_rewrite._passes.program import CASTS
from jmp_rewrite._rules import EXACT


def sharded_casts(editor: Editor) -> None:
    """A sharding constraint on a cast weight is not moved to the weight.

    XLA's partitioners give a constraint's operand the constraint's sharding where it
    has none of its own, as the result of a cast has. A weight that is sharded (FSDP)
    would then be gathered in float32 and cast after that (jax-ml/jax#23543). A
    constraint that leaves everything open is one of its own.

    On all devices.

    Gain: half the bytes of an all-gather.
    """
    for body, index, eqn in editor.find("sharding_constraint"):
        (x,), sharding = eqn.invars, eqn.params["sharding"]
        if x.aval.dtype != editor.half or not isinstance(sharding, NamedSharding):
            continue
        if sharding.memory_kind not in (None, "device"):  # it is a transfer as well
            continue
        if editor.was_here(body, x) or not _is_cast_argument(body, x):
            continue
        (own,) = editor.insert(body, index, _open, x, mesh=sharding.mesh)
        editor.read(body, index, 0, own)


def _is_cast_argument(
    body: Body, atom: Any, calls: tuple[tuple[Body, int], ...] = ()
) -> bool:
    """Whether a value holds nothing but numbers of arguments of the program."""
    if hasattr(atom, "val"):
        return False
    index = body.maker.get(atom, -1)
    if index < 0:
        if atom not in body.parameter or not body.calls:
            return True  # a constant, or an argument of the program
        sources = given(body, atom, calls=calls)
        is_cast = (_is_cast_argument(*source, calls[:-1]) for source in sources)
        return bool(sources) and all(is_cast)
    eqn = body.eqns[index]
    if is_call(eqn):
        position = eqn.outvars.index(atom)
        inside, within = made_inside(body, index, position), (*calls, (body, index))
        return all(_is_cast_argument(*made, within) for made in inside)
    moves = eqn.primitive.name in EXACT | CASTS
    floats = [v for v in eqn.invars if v.aval.dtype.kind not in "biu"]
    return (
        moves
        and bool(floats)
        and all(_is_cast_argument(body, v, calls) for v in floats)
    )


def _open(x: Any, *, mesh: Any) -> Any:
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
    return [lax.with_sharding_constraint(x, NamedSharding(mesh, spec))]
