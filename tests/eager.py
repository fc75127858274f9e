"""Evaluates a closed jaxpr op by op: loops and branches are those of Python.

No compiler sees more than one op, so none keeps more digits than a value's dtype has.
`Evaluator` runs a program in the dtypes that it names; those of `by_hand.py` hold its
values in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.extend import core as jex
from kernels import KERNELS, cast

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
HALVES = frozenset({BF16, F16})
# Equations that are calls, and the parameter that holds the jaxpr.
CALLS = {
    "call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "eval_jaxpr": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",  # JAX < 0.11
    "remat2": "jaxpr",
}
_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
    "scatter-mul": lax.scatter_mul,
    "scatter-sub": lax.scatter_sub,
}
# A loop that runs longer than this waits for what rounding hides from it.
MOST_ITERATIONS = 10_000


def is_key(x: Any) -> bool:
    """Whether an array holds keys of random numbers."""
    if type(x) is np.ndarray:
        return False
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def array(x: Any) -> Any:
    """Returns a NumPy array; keys of random numbers stay what they are."""
    return x if is_key(x) else np.asarray(x)


class Evaluator:
    """Runs jaxprs in the dtypes that they name.

    A subclass says how it holds a value that comes from outside (`hold`), a literal, a
    carry and a result, and how it computes.
    """

    def __call__(self, closed: Any, args: Sequence[Any]) -> list[np.ndarray]:
        """Returns the results of a closed jaxpr, as arrays."""
        with np.errstate(all="ignore"):
            held = [self.hold(array(x)) for x in args]
            return [self.result(x) for x in self.run(closed, held)]

    # ---- what subclasses change

    def hold(self, x: Any) -> Any:
        return x

    def literal(self, x: Any) -> Any:
        return self.hold(x)

    def result(self, x: Any) -> Any:
        return x

    def carry(self, x: Any) -> Any:
        return x

    def number(self, x: Any) -> Any:
        return x

    def index(self, x: Any, i: int) -> Any:
        return x[i]

    def stack(self, xs: Sequence[Any], aval: Any) -> Any:
        return np.stack(xs) if len(xs) else np.zeros(aval.shape, aval.dtype)

    def compute(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Computes one op in the dtypes of its variables; half ones through float32."""
        kernel = KERNELS.get(eqn.primitive.name)
        if kernel is None or any(map(is_key, values)):
            return bind(eqn, values, eqn.params)
        wide = [x.astype(F32) if x.dtype in HALVES else x for x in values]
        outs = kernel(eqn.params, *wide)
        outs = outs if type(outs) is list else [outs]
        pairs = zip(outs, eqn.outvars, strict=True)
        return [cast(np.asarray(x), v.aval.dtype) for x, v in pairs]

    # ---- jaxprs, calls, loops and branches

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        consts = [self.hold(array(c)) for c in getattr(jaxpr, "consts", ())]
        env = dict(zip([*body.constvars, *body.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            if type(atom) is jex.Literal:
                return self.literal(np.asarray(atom.val, atom.aval.dtype))
            return env[atom]

        for eqn in body.eqns:
            outs = self.equation(eqn, [read(v) for v in eqn.invars])
            for var, x in zip(eqn.outvars, outs, strict=True):
                env[var] = x
        return [read(v) for v in body.outvars]

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in CALLS:
            return self.call(eqn, values)
        if name in ("scan", "while", "cond", "custom_linear_solve"):
            return getattr(self, name + "_")(eqn.params, values)
        if name == "debug_callback":
            return []
        return self.compute(eqn, values)

    def call(self, eqn: Any, values: list[Any]) -> list[Any]:
        return self.run(eqn.params[CALLS[eqn.primitive.name]], values)

    def scan_(self, params: Any, values: list[Any]) -> list[Any]:
        consts, carries = scan_split(params)
        body, last = params["jaxpr"], consts + carries
        state = [self.carry(x) for x in values[consts:last]]
        stacks: list[Any] = []
        for i in range(params["length"]):
            at = params["length"] - 1 - i if params["reverse"] else i
            xs = [self.index(x, at) for x in values[last:]]
            outs = self.run(body, [*values[:consts], *state, *xs])
            state = [self.carry(x) for x in outs[:carries]]
            stacks.append(outs[carries:])
        if params["reverse"]:
            stacks.reverse()
        avals = body.out_avals[carries:]
        empty = [a.update(shape=(0, *a.shape)) for a in avals]
        columns = zip(*stacks, strict=True) if stacks else [[] for _ in avals]
        ys = [self.stack(c, a) for c, a in zip(columns, empty, strict=True)]
        return [*state, *ys]

    def while_(self, params: Any, values: list[Any]) -> list[Any]:
        split = params["cond_nconsts"]
        first = split + params["body_nconsts"]
        state = [self.carry(x) for x in values[first:]]
        for _ in range(MOST_ITERATIONS):
            (more,) = self.run(params["cond_jaxpr"], [*values[:split], *state])
            if not self.number(more):
                return state
            outs = self.run(params["body_jaxpr"], [*values[split:first], *state])
            state = [self.carry(x) for x in outs]
        raise RuntimeError(f"a while loop ran {MOST_ITERATIONS} iterations")

    def cond_(self, params: Any, values: list[Any]) -> list[Any]:
        branches = params["branches"]
        which = min(max(int(self.number(values[0])), 0), len(branches) - 1)
        return [self.carry(x) for x in self.run(branches[which], values[1:])]

    def custom_linear_solve_(self, params: Any, values: list[Any]) -> list[Any]:
        lengths, jaxprs = params["const_lengths"], params["jaxprs"]
        start = lengths.matvec + lengths.vecmat
        total = start + lengths.solve + lengths.transpose_solve
        consts = values[start : start + lengths.solve]
        return self.run(jaxprs.solve, [*consts, *values[total:]])


def scan_split(params: Any) -> tuple[int, int]:
    """Returns the number of constants and of carries of a `scan`."""
    if "num_carry" in params:  # JAX < 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def bind(eqn: Any, values: Sequence[Any], params: Any) -> list[Any]:
    """Runs one op by eager JAX."""
    scatter = _SCATTERS.get(eqn.primitive.name)
    if scatter is not None:  # holds a jaxpr of its dtype
        names = ("indices_are_sorted", "unique_indices", "mode")
        options = {k: params[k] for k in names}
        return [array(scatter(*values, params["dimension_numbers"], **options))]
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return [array(x) for x in (outs if eqn.primitive.multiple_results else [outs])]
