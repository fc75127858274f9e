"""The one primitive that chooses by device, where a program is lowered.

Compilers differ in what they fuse and what they write. A rewritten program is one text
for all of them; `by_device` has a branch for some devices, and elsewhere is the
identity of its first operands. A program for several platforms at once is for none.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jmp_rewrite import _compat
from jmp_rewrite._rules import held_jaxprs, with_held
from jmp_rewrite._spelling import DEVICE_ALIASES, short_device_name

# As `_compat.is_for` tells devices: platforms, and generations of TPUs.
CPU, GPU, TPU = "cpu", "cuda", "tpu"
TPU_V5E, TPU_V6E = "TPU v5 lite", "TPU v6 lite"
# Of a TPU's registers: the last dimension of an array in memory is a multiple.
LANES = 128

# The devices for which a program can be made elsewhere, and what each is.
DEVICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "CPU": (CPU,),
        "NVIDIA A100": (GPU,),
        "NVIDIA A100 40GB": (GPU,),
        "NVIDIA B200": (GPU,),
        "NVIDIA GPU": (GPU,),
        "NVIDIA H100": (GPU,),
        "NVIDIA H100 PCIe": (GPU,),
        "NVIDIA H200": (GPU,),
        "NVIDIA L4": (GPU,),
        "NVIDIA RTX A6000": (GPU,),
        "NVIDIA T4": (GPU,),
        "NVIDIA V100": (GPU,),
        "TPU v2": (TPU, "TPU v2"),
        "TPU v3": (TPU, "TPU v3"),
        "TPU v4": (TPU, "TPU v4"),
        "TPU v5e": (TPU, TPU_V5E),
        "TPU v5p": (TPU, "TPU v5"),
        "TPU v6e": (TPU, TPU_V6E),
        "TPU7x": (TPU, "TPU7x"),
    }
)


class Where(NamedTuple):
    """Where a branch is taken.

    Attributes:
      devices: platforms, as "cuda", and generations of TPUs, as "TPU v5 lite".
      holds: what must be true of the program there: "", "one device", or "whole arrays"
        (its devices hold whole arrays, as each in a `shard_map` does).
    """

    devices: tuple[str, ...]
    holds: str = ""

    def matches(self, context: Any) -> bool:
        """Whether a program that is lowered in this context takes the branch."""
        is_for = _compat.is_for(context, self.devices)
        return is_for and _CONDITIONS[self.holds](context)


_CONDITIONS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "": lambda context: True,
        "one device": _compat.is_for_one_device,
        "whole arrays": _compat.holds_whole_arrays,
    }
)


class Branch(NamedTuple):
    """What some devices compute.

    Attributes:
      where: the devices.
      jaxpr: a closed jaxpr of all operands of the equation.
    """

    where: Where
    jaxpr: Any


# What JAX calls them.
_PLATFORMS = {"cuda": "NVIDIA GPU", "tpu": "TPU v5e"}


def device_of(name: str) -> tuple[str, ...]:
    """Returns the platform and generation of a device, as `Where.devices` names them.

    Raises:
      ValueError: for an unknown device.
    """
    by_name = {short_device_name(known): known for known in DEVICES}
    short = short_device_name(str(name))
    if found := {**by_name, **DEVICE_ALIASES}.get(short):
        return DEVICES[found]
    near = difflib.get_close_matches(short, by_name, n=1, cutoff=0.3)
    nearest = _PLATFORMS.get(str(name).lower()) or (near and by_name[near[0]])
    hint = f"; did you mean {nearest!r}?" if nearest else "."
    raise ValueError(
        f"expected one of the devices {', '.join(DEVICES)}, got {name!r}{hint}"
    )


def by_device(
    stored: Sequence[Any],
    operands: Sequence[Any],
    branches: Mapping[Where, Callable[..., Sequence[Any]]],
    required: bool = False,
    forward_only: bool = False,
) -> list[Any]:
    """Reads values; some devices compute them in another way.

    Args:
      stored: what all other devices read.
      operands: what else the branches need.
      branches: where -> what is computed there of `stored` and `operands`, of the same
        types as `stored`. The first one that matches is taken.
      required: whether a device cannot run the program without its branch.
      forward_only: whether it is for programs that nobody differentiates: where
        somebody does, all devices read what is stored.
    """
    values = [*stored, *operands]
    types = [jax.typeof(x) for x in values]
    traced = tuple(
        Branch(where, jax.make_jaxpr(fun)(*types)) for where, fun in branches.items()
    )
    return _bind(
        values,
        branches=traced,
        results=len(stored),
        required=required,
        forward_only=forward_only,
    )


def _bind(values: Sequence[Any], **params: Any) -> list[Any]:
    return list(BY_DEVICE.bind(*values, **params))


def _primitive() -> jex.Primitive:
    primitive = jex.Primitive("by_device")
    primitive.multiple_results = True

    def run(*xs: Any, branches: tuple[Branch, ...], results: int, **_: Any) -> Any:
        platform = _compat.default_platform()
        for where, jaxpr in branches:
            if platform in where.devices and not where.holds:
                return _compat.evaluate(jaxpr, xs)
        return list(xs[:results])

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        # On all devices the derivative is that of what most read.
        count = params["results"]
        outs = primals[:count] if params["forward_only"] else _bind(primals, **params)
        return list(outs), list(tangents[:count])

    def transpose(cts: Any, *xs: Any, **params: Any) -> Any:
        return [*cts, *[None] * (len(xs) - len(cts))]

    def batched(xs: Any, axes: Any, *, branches: Any, **params: Any) -> Any:
        moved = jax.vmap(lambda *xs: xs, axes)(*xs)
        types = [jax.typeof(x) for x in moved]
        mapped = tuple(
            Branch(b.where, jax.make_jaxpr(jax.vmap(jex.jaxpr_as_fun(b.jaxpr)))(*types))
            for b in branches
        )
        outs = _bind(moved, branches=mapped, **params)
        return outs, [0] * len(outs)

    def lower(ctx: Any, *xs: Any, branches: Any, results: int, **_: Any) -> Any:
        for where, jaxpr in branches:
            if where.matches(ctx.module_context):
                fun = jex.jaxpr_as_fun(jaxpr)
                return mlir.lower_fun(fun, multiple_results=True)(ctx, *xs)
        return list(xs[:results])

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda *avals, results, **_: list(avals[:results]))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, lower)
    return primitive


BY_DEVICE = _primitive()


def resolve(closed: Any, device: str, required: bool = True) -> Any:
    """Returns the program that one device is given, without a choice.

    Args:
      closed: a closed jaxpr.
      device: the device, one that holds the whole program; "" for none of them.
      required: whether also choices without which another device cannot run it.
    """
    names = frozenset(device_of(device)) if device else frozenset[str]()
    return _Resolving(names, required).jaxpr(closed)


class _Resolving:
    """Writes the equations of a branch, or nothing, in place of each choice."""

    def __init__(self, names: frozenset[str], required: bool) -> None:
        self._names, self._required = names, required
        self._known: dict[int, tuple[Any, Any]] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:  # kept with it, or its number is used again
            self._known[id(jaxpr)] = jaxpr, self._resolved(jaxpr)
        return self._known[id(jaxpr)][1]

    def _resolved(self, jaxpr: Any) -> Any:
        body = _compat.open_jaxpr(jaxpr)
        same: dict[Any, Any] = {}
        eqns: list[Any] = []
        for eqn in body.eqns:
            eqns += self._equations(eqn, same)
        outvars = [_read(same, v) for v in body.outvars]
        unchanged = len(eqns) == len(body.eqns) and all(
            map(operator.is_, eqns, body.eqns)
        )
        if unchanged and all(map(operator.is_, outvars, body.outvars)):
            return jaxpr
        return _compat.with_body(jaxpr, eqns=eqns, outvars=outvars)

    def _equations(self, eqn: Any, same: dict[Any, Any]) -> list[Any]:
        invars = [_read(same, v) for v in eqn.invars]
        if eqn.primitive is BY_DEVICE and (
            self._required or not eqn.params["required"]
        ):
            outs, eqns = self._chosen(eqn, invars, same)
            same.update(zip(eqn.outvars, outs, strict=True))
            return eqns
        eqn = with_held(eqn, map(self.jaxpr, held_jaxprs(eqn)))
        is_same = all(map(operator.is_, invars, eqn.invars))
        return [eqn if is_same else eqn.replace(invars=invars)]

    def _chosen(
        self, eqn: Any, invars: list[Any], same: dict[Any, Any]
    ) -> tuple[list[Any], list[Any]]:
        for where, jaxpr in eqn.params["branches"]:
            if not self._names.isdisjoint(where.devices):
                own, outs = inlined(jaxpr, invars, eqn)
                eqns = [e for inner in own for e in self._equations(inner, same)]
                return [_read(same, v) for v in outs], eqns
        return invars[: eqn.params["results"]], []


def inlined(
    closed: Any, operands: Sequence[Any], like: Any
) -> tuple[list[Any], list[Any]]:
    """Returns a jaxpr's equations, with fresh variables, and its results.

    Args:
      closed: a closed jaxpr; its constants are literals.
      operands: what its parameters are.
      like: the equation whose source line and name stack they get, before their own.
    """
    body = _compat.open_jaxpr(closed)
    env = dict(zip(body.invars, operands, strict=True))
    info, eqns = like.source_info, []
    for eqn in body.eqns:
        outvars = [jex.Var(v.aval) for v in eqn.outvars]
        invars = [_read(env, v) for v in eqn.invars]
        env.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(
            eqn.replace(invars=invars, outvars=outvars, source_info=info, ctx=like.ctx)
        )
    return eqns, [_read(env, v) for v in body.outvars]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom if hasattr(atom, "val") else env.get(atom, atom)
