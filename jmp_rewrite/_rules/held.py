"""Which parameter of which primitive holds a jaxpr, and what is left alone.

This is the only place that knows. To add a primitive that calls a jaxpr once, add a
line to `CALLS`; for anything else add a function beside its siblings in
`_graph/higher_order.py` and in `_emit/higher_order.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

# The parameter that holds the jaxpr of a primitive that calls it once.
CALLS = {
    "call": ("call", "call_jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "compute_on": ("call", "jaxpr"),
    "core_call": ("call", "call_jaxpr"),
    "custom_jvp_call": ("custom_jvp", "call_jaxpr"),
    "custom_vjp_call": ("custom_vjp", "call_jaxpr"),
    "custom_vmap_call": ("custom_vmap", "call"),
    "eval_jaxpr": ("call", "call_jaxpr"),
    "jit": ("call", "jaxpr"),
    "remat2": ("call", "jaxpr"),
    "shard_map": ("shard_map", "jaxpr"),
    "xla_metadata_call": ("call", "jaxpr"),
}

# Primitives that hold a jaxpr, or a kernel, and are left alone: the reason.
LEFT_ALONE = {
    "call_exported": "an exported program has fixed dtypes",
    "call_hi_primitive": "a hijax primitive is typed by its operands' dtypes",
    "call_tf": "a TensorFlow function is traced for its dtypes",
    "composite": "a composite stands for a kernel that is chosen by its name",
    "cudnn_fusion": "a kernel is compiled for its dtypes",
    "custom_linear_solve": "a linear solve needs float32; XLA has no half solvers",
    "custom_partitioning": "its partitioning callbacks are typed by its dtypes",
    "ffi_call": "a foreign function is compiled for its dtypes",
    "io_callback": "a callback expects the dtypes that it was written for",
    "linear_call": "its transpose is a Python function of its dtypes",
    "pallas_call": "a Pallas kernel is written for its dtypes",
    "program_order": "an ordered effect keeps its operands",
    "pure_callback": "a callback expects the dtypes that it was written for",
    "remat_opt": "its optimized rule is a Python function of its dtypes",
    "run_state": "references have fixed dtypes",
    "tpu_custom_call": "a kernel is compiled for its dtypes",
}

# What these make is data although they read none: random numbers, and the results of
# what cannot be looked into.
MAKES_DATA = frozenset({"bitcast_convert_type", *LEFT_ALONE})

# Operands of these are independent of one another: one precision each.
LANES = frozenset({"optimization_barrier"})

_HELD = {
    **{name: (key,) for name, (_, key) in CALLS.items()},
    "cond": ("branches",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
}


def held_parameters(name: str) -> tuple[str, ...]:
    """Returns the parameters of a primitive that hold jaxprs, rewritten inside.

    Each is a jaxpr or a sequence of them.
    """
    return _HELD.get(name, ())


def held_jaxprs(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an equation holds and that are rewritten inside."""
    held: list[Any] = []
    for key in held_parameters(eqn.primitive.name):
        value = eqn.params[key]
        held.extend(value if isinstance(value, (tuple, list)) else (value,))
    return held


def with_held(eqn: Any, jaxprs: Iterable[Any]) -> Any:
    """Returns an equation that holds others in place of its `held_jaxprs`.

    The same object if they are the same.
    """
    new = list(jaxprs)
    if all(map(operator.is_, new, held_jaxprs(eqn))):
        return eqn
    left = iter(new)
    params = dict(eqn.params)
    for key in held_parameters(eqn.primitive.name):
        several = isinstance(params[key], (tuple, list))
        params[key] = tuple(next(left) for _ in params[key]) if several else next(left)
    return eqn.replace(params=params)
