"""Where an equation stands: its name-scope path, and the marks that the library sets.

JAX keeps the name stack of an equation relative to the jaxpr that holds it, and
`grad`, `vmap`, `scan` and custom rules carry it along. So a mark that is set as a
name scope while a program is traced is still there in its backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax

from jmp_rewrite import _compat
from jmp_rewrite._graph import region
from jmp_rewrite._policy import Policy
from jmp_rewrite._source import (
    SCALED,
    UNSCALED,
    UPDATED,
    check_kind,
    user_level,
)

REWRITTEN = "jmp_rewrite.mixed_precision"
FULL_PRECISION = "jmp_rewrite.full_precision"
# The casts around a half-precision function; the number of the call follows.
HALF_PRECISION = "jmp_rewrite.half_precision:"
# What a pass puts in; the name of the pass follows.
PASS = "jmp_rewrite.pass:"
_MARKS = (
    *(REWRITTEN, FULL_PRECISION, HALF_PRECISION, PASS),
    *(SCALED, UNSCALED, UPDATED),
)
# Scopes that JAX itself adds around recomputed code; no user wrote them.
_RECOMPUTATION = "rematted_computation"
_RECOMPUTED = frozenset({"checkpoint", _RECOMPUTATION})


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      path: the user's scopes, outermost first, joined by "/".
      backward: whether reverse-mode differentiation made the equation.
      recomputed: whether the backward pass computes it once more (`jax.checkpoint`).
      rewritten: whether an inner `mixed_precision` has decided already.
      full: whether `full_precision` covers it.
      call: the number of the `half_precision` call whose operand or result it casts;
        -1 if it is no such cast.
    """

    path: str = ""
    backward: bool = False
    recomputed: bool = False
    rewritten: bool = False
    full: bool = False
    call: int = -1


TOP = Place()  # of a whole program


def inner_place(outer: Place, elements: tuple[Any, ...]) -> Place:
    """Returns the place of an equation with these name-stack elements in `outer`."""
    if not elements:
        return outer
    # A scope and a transformation of one name are equal tuples.
    return _inner_place(outer, elements, tuple(map(type, elements)))


@functools.lru_cache(maxsize=8192)
def _inner_place(outer: Place, elements: tuple[Any, ...], _: Any) -> Place:
    names = [
        part for e in elements if _compat.is_scope(e) for part in e.name.split("/")
    ]
    transforms = [e.name for e in elements if not _compat.is_scope(e)]
    own = [n for n in names if n not in _RECOMPUTED and not n.startswith(_MARKS)]
    return Place(
        "/".join(([outer.path] if outer.path else []) + own),
        outer.backward or "transpose" in transforms,
        outer.recomputed or _RECOMPUTATION in names,
        outer.rewritten or REWRITTEN in names,
        outer.full or FULL_PRECISION in names,
        max([outer.call, *map(_call_of, names)]),
    )


def _call_of(name: str) -> int:
    is_cast = name.startswith(HALF_PRECISION)
    return int(name.removeprefix(HALF_PRECISION)) if is_cast else -1


P = ParamSpec("P")
R = TypeVar("R")


class _Entered(threading.local):
    """The scopes of `full_precision` that a thread has entered."""

    def __init__(self) -> None:
        self.scopes: list[contextlib.ExitStack] = []


_ENTERED = _Entered()


class _FullPrecision:
    """The context manager and decorator that `full_precision` returns.

    It may be entered several times, inside itself and in several threads as well.
    """

    def __enter__(self) -> None:
        scopes = contextlib.ExitStack()
        scopes.enter_context(jax.named_scope(FULL_PRECISION))
        scopes.enter_context(region.in_full_precision())
        _ENTERED.scopes.append(scopes)

    def __exit__(self, *exc: Any) -> None:
        _ENTERED.scopes.pop().__exit__(*exc)

    def __call__(self, fun: Callable[P, R]) -> Callable[P, R]:
        return _in_full_precision(fun)


def _in_full_precision(fun: Callable[P, R]) -> Callable[P, R]:
    if not callable(fun):
        raise TypeError(
            "full_precision expected a function to decorate, got "
            f"{type(fun).__name__}. Use `with full_precision():` around code that is "
            "traced."
        )
    check_kind(fun, "full_precision")

    # What a function carries is copied; the fields of a module are no business here.
    @functools.wraps(fun, updated=("__dict__",) if inspect.isfunction(fun) else ())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(FULL_PRECISION), region.in_full_precision():
            return fun(*args, **kwargs)

    return wrapped


@overload
def full_precision(fun: Callable[P, R]) -> Callable[P, R]: ...


@overload
def full_precision(fun: None = None) -> _FullPrecision: ...


def full_precision(fun: Callable[..., Any] | None = None) -> Any:
    """Keeps the original dtypes of everything that is traced inside.

    Use it for a computation that must not run in half precision, forward or backward:
    a loss with a delicate cancellation, a solver, a metric. It wins over `scopes`,
    `rules` and the rule table.

    It is a name scope, so it acts while code is traced: put it inside the decorated
    function, not around a call of a function that is jitted already. Like every name
    scope it is not part of `jax.jit`'s cache key.

    Args:
      fun: the function to decorate, or None for the context manager.

    Returns:
      The decorated function, or an object that is a context manager and a decorator.

    Raises:
      TypeError: if `fun` is not a function, or runs after the call, as a generator.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> @jmpr.mixed_precision("mixed_bfloat16")
      ... def f(x, w):
      ...     with jmpr.full_precision():
      ...         logits = x @ w
      ...     return logits @ w
      >>> x = jnp.ones((2, 2))
      >>> report = jmpr.explain(f)(x, x)
      >>> [row.dtype for row in report.equations if row.primitive == "dot_general"]
      ['float32', 'bfloat16']
    """
    return _FullPrecision() if fun is None else _in_full_precision(fun)


def matched(policy: Policy, paths: Iterable[str]) -> frozenset[str]:
    """Returns the patterns of a policy that are found in one of these scope paths."""
    if not policy.scopes:
        return frozenset()
    distinct = set(paths)
    return frozenset(
        pattern
        for pattern in policy.scopes
        if any(map(re.compile(pattern).search, distinct))
    )


class _Same:
    """A policy as a key of a cache, equal to itself alone."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __hash__(self) -> int:
        return id(self.policy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.policy is other.policy


@functools.lru_cache(maxsize=64)
def _matched_before(policy: _Same) -> set[str]:
    """Returns the patterns that matched something, or that were reported, until now."""
    return set()


def report_unused(policy: Policy, used: frozenset[str]) -> None:
    """Warns once of each pattern of a policy object's `scopes` that matched nothing.

    Args:
      policy: the policy. What matched in one program is not missed in the next, as a
        train step and an evaluation share a policy.
      used: the patterns that matched something in this program.
    """
    if not policy.scopes:
        return
    known = _matched_before(_Same(policy))
    unused = [p for p in policy.scopes if p not in used and p not in known]
    known.update(policy.scopes)
    for pattern in unused:
        warnings.warn(
            f"expected the pattern {pattern!r} of scopes to be in a name scope or "
            "in a parameter's path, but it matched nothing: look at the names that "
            "print(jmp_rewrite.explain(fun)(*args)) shows, or set one with "
            "jax.named_scope",
            stacklevel=user_level(),
        )
