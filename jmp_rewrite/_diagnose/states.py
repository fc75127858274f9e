"""What loops and branches hand on: values and shadows, as arrays.

A pair knows more than its arrays: its row. So it is taken apart where a jaxpr is traced
or an iteration ends, and put together on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.extend import core as jex

from jmp_rewrite import _compat
from jmp_rewrite._diagnose.counts import WIDTH, joined
from jmp_rewrite._diagnose.distance import BINS, Measured, measure
from jmp_rewrite._diagnose.evaluate import evaluate
from jmp_rewrite._diagnose.pair import ZERO, Pair
from jmp_rewrite._diagnose.shadow import Shadow

# (value, shadow, error): arrays, none of a weak type.
State = tuple[Any, Any, Any]


def state_of(e: Shadow, pair: Pair) -> State:
    """Returns the arrays of a pair as a loop carries them."""
    error = _compat.vary(_strong(pair.error), e.axes)
    return _strong(pair.value), _strong(pair.shadow), error


def error_of(pair: Pair) -> Any:
    """Measures the error of a float value: f32[]."""
    if not jnp.issubdtype(pair.shadow.dtype, np.inexact):
        return ZERO
    return measure(Measured([pair.value], [pair.shadow]))[0]


def chosen(on: tuple[Any, Any], new: State, old: State) -> State:
    """Keeps the values of what has left a loop: the program, or its shadow.

    Under `vmap` each of a batch leaves for itself: the condition has its dimensions,
    which come first in all that the loop carries.
    """
    value = lax.select_n(_as_wide(on[0], old[0]), old[0], new[0])
    shadow = lax.select_n(_as_wide(on[1], old[1]), old[1], new[1])
    return value, shadow, new[2]


def _as_wide(on: Any, carried: Any) -> Any:
    if not on.shape:
        return on
    return lax.broadcast_in_dim(on, carried.shape, range(on.ndim))


def is_traced(tree: Any) -> bool:
    """Whether any leaf is a tracer."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def compiled(fun: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that is compiled as a whole, with all of its roundings.

    XLA may take float32 -> half -> float32 for nothing, on GPUs and on the CPU, and so
    leave out what is to be diagnosed.
    """
    if is_traced(args):
        return fun(*args)
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    run = jax.jit(
        lambda consts, leaves: evaluate(closed, leaves, consts=consts),
        compiler_options={"xla_allow_excess_precision": False},
    )
    flat = run(_compat.constants(closed), tree_util.tree_leaves(args))
    return tree_util.tree_unflatten(tree_util.tree_structure(shapes), flat)


def types_of(tree: Any) -> Any:
    """Returns the types of arrays."""
    return jax.tree.map(jax.typeof, tree)


def varying(e: Shadow, tree: Any) -> Any:
    """Makes what is counted one type, however much of it varies over a mesh."""
    return jax.tree.map(lambda x: _compat.vary(x, e.axes), tree)


def _strong(x: Any) -> Any:
    """Returns an array without a weak type, which a loop's carry has to keep."""
    if not isinstance(x, jax.Array):
        x = jnp.asarray(x)
    weak = getattr(jax.typeof(x), "weak_type", False)
    return _compat.convert(x, x.dtype) if weak else x


class Carry:
    """The carries of a loop."""

    def __init__(self, e: Shadow, pairs: Sequence[Pair]) -> None:
        self._e = e
        self._entered = [p.row for p in pairs]
        self._rows = [e.add("carry", [p.row], slot) for slot, p in enumerate(pairs)]
        self.start = [state_of(e, p) for p in pairs]

    def enter(self, states: Sequence[State]) -> list[Pair]:
        """Returns the carries that an iteration receives, as pairs."""
        return [Pair(*s, row) for s, row in zip(states, self._rows, strict=True)]

    def leave(self, pairs: Sequence[Pair]) -> list[State]:
        """Returns the carries of an iteration."""
        for row, pair in zip(self._rows, pairs, strict=True):
            self._e.rows[row].carried = pair.row
        return [state_of(self._e, p) for p in pairs]

    def results(self, states: Sequence[State]) -> list[Pair]:
        """Returns the carries of the last iteration, or of none what has entered."""
        carried = [self._e.rows[row].carried for row in self._rows]
        made = [c if c >= 0 else e for c, e in zip(carried, self._entered, strict=True)]
        return [Pair(*s, row) for s, row in zip(states, made, strict=True)]


class Traced:
    """A jaxpr of values and shadows, with what is counted in it."""

    def __init__(self, e: Shadow, fun: Callable[..., Any], *types: Any) -> None:
        self._e = e
        with e.counting() as frame:
            closed, shapes = jax.make_jaxpr(
                lambda *args: (fun(*args), varying(e, frame.arrays())),
                return_shape=True,
            )(*types)
        self._rows = frame.rows
        self._run = jex.jaxpr_as_fun(closed)
        self._tree = tree_util.tree_structure(shapes)
        self._depth = shapes[1][1].shape[1]

    def __call__(self, *args: Any) -> Any:
        """Returns (results, what was counted)."""
        flat = self._run(*tree_util.tree_leaves(args))
        return tree_util.tree_unflatten(self._tree, flat)

    def nothing(self, loops: int = 0) -> Any:
        """Returns the counts before the first of so many loops around."""
        n = len(self._rows)
        counts = jnp.zeros((n, WIDTH), np.float32)
        where = jnp.full((n, self._depth + loops), -1, np.int32)
        return varying(self._e, (counts, where, jnp.zeros(BINS, np.float32)))

    def merge(self, counted: Any, new: Any, iteration: Any) -> Any:
        """Adds one more iteration of a loop."""
        here = jnp.full((len(self._rows), 1), iteration, np.int32)
        there = jnp.concatenate([new[1], varying(self._e, here)], axis=1)
        counts, where = joined(counted[0], counted[1], new[0], there, jnp)
        return counts, where, counted[2] + new[2]

    def keep(self, counted: Any) -> None:
        """Hands what was counted to the jaxpr around."""
        counts, where, exponents = counted
        self._e.frame.blocks.append((self._rows, counts, where))
        self._e.frame.exponents.append(exponents)
