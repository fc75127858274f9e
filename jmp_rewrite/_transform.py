"""`mixed_precision`: a function in, the same function in mixed precision out.

What is done to the program stands in `_rewrite`.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jmp_rewrite import _collector, _compat, _keras
from jmp_rewrite._arguments import (
    Static,
    call_of_arrays,
    mapped,
    not_a_function,
    pure_call,
    wraps,
)
from jmp_rewrite._devices import why_auto_is_float32
from jmp_rewrite._graph import REWRITTEN, Region, region
from jmp_rewrite._misuse import warn_in_program
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._precision import is_unscaled, unreachable
from jmp_rewrite._rewrite import decide, decide_traced, run, trace_call
from jmp_rewrite._source import check_kind, name_of, user_level, where
from jmp_rewrite._spelling import DTypeLike, PolicyName

_LOGGER = logging.getLogger("jmp_rewrite")


P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What makes of a function another one of its signature."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, R]:
        """Decorates a function."""


# Scalar types of NumPy and JAX are callable as well, and mean a dtype here.
@overload
def mixed_precision(  # type: ignore[overload-overlap]
    fun: Policy | PolicyName | DTypeLike | None = None,
    policy: None = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Decorator: ...


@overload
def mixed_precision(
    *,
    policy: PolicyLike,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Decorator: ...


@overload
def mixed_precision(
    fun: Callable[P, R],
    policy: PolicyLike = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[P, R]: ...


def mixed_precision(
    fun: Any = None,
    policy: PolicyLike = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Runs a function in mixed precision, with the results' dtypes unchanged.

    Matrix multiplications and convolutions run on half operands and accumulate in
    float32. Operations between them run in half precision where that is safe and saves
    memory. Everything else, above all the train state, stays float32. The function is
    traced to a jaxpr, every equation is given a precision (inside loops, branches,
    checkpoints and custom derivative rules too), and the program is emitted again with
    casts at the boundaries.

    Put it around a whole train step (forward, backward, optimizer update, metrics) and
    inside `jax.jit`; or around a loss or a forward function that is differentiated
    afterwards. Both give float32 gradients for float32 parameters. A whole step is
    faster, because each weight is then cast only once. The function is traced at each
    call, as by `jax.grad`, so put `jax.jit` outside.

    Args:
      fun: the function. Its arguments and results are pytrees; non-array
        leaves pass through as they are. Only float32 arrays are ever rounded.
      policy: a `Policy`, a string such as "mixed_bfloat16", or a dtype; None for the
        default policy (see `set_policy`). It may also take the place of `fun`, as in
        the decorator `@mixed_precision("mixed_float16")`.
      static_argnums: positions of arguments that are passed on as they are, even if
        they are arrays.
      static_argnames: names of such arguments. As in `jax.jit`, a position and its
        name mean the same argument, however the call passes it.

    Returns:
      A function of the same signature, whose result has the same tree structure,
      shapes, dtypes and weak types.

    Raises:
      TypeError: if `fun` is neither callable nor a policy, or a static argument is
        given as anything other than an integer or a string.
      ValueError: for an unknown policy, or a static argument that `fun` or the call
        does not have.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> @jax.jit
      ... @jmpr.mixed_precision("mixed_bfloat16")
      ... def f(x, w):
      ...     return jnp.tanh(x @ w) @ w
      >>> f(jnp.ones((2, 4)), jnp.ones((4, 4))).dtype
      dtype('float32')

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    if isinstance(fun, classmethod):
        check_kind(fun, "mixed_precision")  # which is not callable
    if fun is None or _is_policy(fun) or not callable(fun):
        chosen = policy if fun is None else _only_policy(fun, policy)
        return functools.partial(_decorate, chosen, static_argnums, static_argnames)
    check_kind(fun, "mixed_precision")
    fixed = None if policy is None else as_policy(policy)
    static = Static.of(fun, static_argnums, static_argnames)
    calls = _EagerCalls(fun)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = as_policy(fixed)
        arguments = static.hide(args, kwargs)
        around = region.current()
        if around is not None and around.policy == chosen and not around.full:
            return fun(*args, **kwargs)  # what is around it decides the same, of more
        if chosen.compute_dtype == np.float32:
            if chosen.name == "auto":
                _log_auto()
            with jax.named_scope(REWRITTEN), region.tracing(Region(chosen)):
                return fun(*args, **kwargs)

        def rewritten(fun: Any, args: Any, kwargs: Any) -> Any:
            with pure_call(fun, args, kwargs) as (pure, args, kwargs, finish):
                rebuild, results = _rewritten(pure, args, kwargs, chosen)
                calls.count(results)
                return finish(rebuild(results))

        return call_of_arrays(fun, *arguments, rewritten)

    wraps(fun, wrapped)
    _keras.watch(fun, wrapped)
    wrapped.decorated = Decorated(wrapped, fun, fixed, static.hide)  # type: ignore[attr-defined]
    return wrapped


def _rewritten(
    fun: Callable[..., Any], args: Any, kwargs: Any, policy: Policy
) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """Runs a function rewritten; returns its arrays, and what puts them together."""
    traced = trace_call(fun, args, kwargs, policy)
    warn_in_program(traced.closed, judged=REWRITTEN)
    with _collector.held():
        plan = decide_traced(traced, policy)
        is_half = policy.compute_dtype == np.float16 and policy.loss_scale is not None
        if is_half and plan.rewrites and is_unscaled(plan.graph):
            _log_unscaled(name_of(fun))
        for ending in unreachable(plan):
            if ending.tolerance is not None and not ending.is_bounded:
                line = where(ending.node.eqn, unknown=f"a line of {name_of(fun)}")
                _log_endless(line, ending.tolerance, plan.half.name)
        with jax.named_scope(REWRITTEN):
            consts = _compat.constants(traced.closed)
            results = run(plan, consts, traced.arrays)
        rebuild = traced._replace(closed=None, arrays=[]).rebuild
        del plan, traced  # or the collector would look at all of it
    return rebuild, results


@functools.cache
def _log_auto() -> None:
    """Logs, once, that nothing is half where nobody has said so."""
    _LOGGER.warning(
        "%s: nothing runs in half precision. Name a policy, such as "
        "mixed_precision('mixed_bfloat16'), to run it all the same.",
        why_auto_is_float32(),
    )


@functools.lru_cache
def _log_unscaled(name: str) -> None:
    """Logs, once, that gradients in float16 are not scaled."""
    _LOGGER.warning(
        "%s: gradients in float16 without a loss scale: what is below 6e-8 is zero. "
        "Return scale_loss(loss, opt_state) from the loss and wrap the optimizer in "
        "loss_scaling(...), or use mixed_bfloat16, which needs none. A policy with "
        "loss_scale=None says that it is meant.",
        name,
    )


@functools.lru_cache
def _log_endless(line: str, tolerance: float, half: str) -> None:
    """Logs, once, that a loop waits for what half precision may never reach."""
    _LOGGER.warning(
        "A while_loop at %s waits for a value below %g, which differences of %s values "
        "may reach late or never: bound the number of iterations, or run the loop in "
        "full_precision().",
        *(line, tolerance, half),
    )


class _EagerCalls:
    """Counts calls of a decorated function outside of `jax.jit`; warns of the second.

    Each of them traces the function and compiles its equations one by one: 300 times
    the time of the jitted function, for a small train step on a CPU.
    """

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._fun = fun
        self._number = 0

    def count(self, results: Sequence[Any]) -> None:
        """Counts a call that has made these arrays."""
        # Under `jit` a constant that the function returns is concrete as well.
        is_eager = bool(results) and all(map(_compat.is_concrete, results))
        if not is_eager or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return
        self._number += 1
        if self._number == 2:
            name = name_of(self._fun).rpartition("<locals>.")[2]
            advice = (
                "put @jax.jit above @mixed_precision, or write "
                f"jax.jit(mixed_precision({name}))"
            )
            if "." in name:  # a method: its object is no array
                advice = "jit what calls it, a function of arrays"
            warnings.warn(
                f"mixed_precision traces {name} again at each call, because it is "
                f"called outside of jax.jit: {advice}",
                stacklevel=user_level(),
            )


class Decorated(NamedTuple):
    """What `mixed_precision` was given, kept as an attribute of what it returns.

    Attributes:
      wrapped: what it returned. Functions that wrap it copy its attributes: this tells
        it from them.
      fun: the function.
      policy: the policy, or None for the default one.
      hide: returns a call's arguments with what is static, or no array, hidden.
      args: arguments that stand before those of a call: the object of a bound method,
        and what `functools.partial` was given.
      named: arguments by name that it was given.
      jits: each `jax.jit` that a call goes through.
    """

    wrapped: Callable[..., Any]
    fun: Callable[..., Any]
    policy: Policy | None
    hide: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = MappingProxyType({})
    jits: tuple[_Jit, ...] = ()

    @property
    def bound(self) -> Callable[..., Any]:
        """The function of a call's own arguments."""
        if not (self.args or self.named):
            return self.fun
        return functools.partial(self.fun, *self.args, **self.named)

    def hide_own(
        self, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `bound`, with what is static hidden."""
        hidden, named = self.hide(*self.whole(args, kwargs))
        return hidden[len(self.args) :], {name: named[name] for name in kwargs}

    def whole(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `fun` that a call stands for."""
        return (*self.args, *args), {**self.named, **kwargs}

    def received(
        self, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments that `fun` gets of a call: `jit` passes on arrays."""
        args, named = self.whole(args, kwargs)
        for jit in self._jits(kwargs):
            args, named = jit.arrays(args, named)
        return args, named

    def jitted(self, kwargs: Any) -> Callable[..., Any] | None:
        """Returns the outermost `jax.jit` as a function of the arguments of `fun`.

        It makes nothing of the arguments that are added behind it, unless a call names
        others in their place.

        Args:
          kwargs: the arguments that a call names.

        Returns:
          None if there is no `jax.jit`.
        """
        jits = self._jits(kwargs)
        return jits[0].of_all if jits else None

    def _jits(self, kwargs: Any) -> list[_Jit]:
        """Returns what a call goes through: what it names itself goes through all."""
        return [j._replace(named=j.named - kwargs.keys()) for j in self.jits]


class _Jit(NamedTuple):
    """A `jax.jit`, which makes arrays of Python's and NumPy's numbers.

    Attributes:
      fun: what it returned.
      static: positions of static arguments, among those that go through it, and names;
        None if it makes no arrays, as that of Equinox.
      inside: how many arguments are added behind it, in front of those.
      named: names of the arguments that are added behind it.
    """

    fun: Callable[..., Any]
    static: tuple[tuple[int, ...], tuple[str, ...]] | None
    inside: int = 0
    named: frozenset[str] = frozenset()

    def arrays(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with arrays for what goes through it and is not static."""
        if self.static is None:
            return args, dict(named)
        numbers, names = self.static
        count = len(args) - self.inside
        kept = {self.inside + (n if n >= 0 else n + count) for n in numbers}
        kept.update(range(self.inside))
        places = [i for i in range(len(args)) if i not in kept]
        through = named.keys() - self.named.union(names)
        # What modules share is one thing in all of them.
        given = _arrays(([args[i] for i in places], {k: named[k] for k in through}))
        new = dict(zip(places, given[0], strict=True))
        return tuple(new.get(i, x) for i, x in enumerate(args)), {**named, **given[1]}

    def of_all(self, *args: Any, **named: Any) -> Any:
        """Calls it with those of all arguments that go through it."""
        named = {name: x for name, x in named.items() if name not in self.named}
        return self.fun(*args[self.inside :], **named)


def _arrays(tree: Any) -> Any:
    """Makes arrays of the numbers of a tree, with weak types of Python's, as `jit`."""

    def array(x: Any) -> Any:
        is_number = isinstance(x, (bool, int, float, complex, np.generic))
        return jnp.asarray(x) if is_number else x

    return mapped(array, tree)


# What `jax.jit`, `equinox.filter_jit` and `flax.nnx.jit` return.
_JITTED = frozenset({"PjitFunction", "_JitWrapper", "JitWrapped"})


def undecorated(fun: Any) -> Decorated:
    """Returns what `mixed_precision` was given to make `fun`.

    `jit`, `functools.partial` and the binding of a method are looked through. Of
    anything else that is the function itself, without a policy.
    """
    inner: Any = fun
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    jits: list[_Jit] = []
    while True:
        first: tuple[Any, ...] = ()
        added: dict[str, Any] = {}
        if _is_jitted(inner):
            jits.append(_Jit(inner, _compat.static_arguments(inner)))
            inner = inner.__wrapped__
        elif isinstance(inner, MethodType):
            inner, first = inner.__func__, (inner.__self__,)
        elif isinstance(inner, functools.partial):
            inner, first, added = inner.func, inner.args, inner.keywords
        else:
            break
        new = added.keys() - named.keys()
        jits = [
            j._replace(inside=j.inside + len(first), named=j.named | new) for j in jits
        ]
        args, named = (*first, *args), {**added, **named}
    given = getattr(inner, "decorated", None)
    if isinstance(given, Decorated) and given.wrapped is inner:
        return given._replace(args=args, named=named, jits=tuple(jits))
    static = _compat.static_arguments(fun) if _is_jitted(fun) else None
    own = (_Jit(fun, static),) if jits or hasattr(inner, "lower") else ()
    return Decorated(fun, fun, None, lambda args, kwargs: (args, kwargs), jits=own)


def _is_jitted(fun: Any) -> bool:
    return type(fun).__name__ in _JITTED and hasattr(fun, "__wrapped__")


def _decorate(policy: PolicyLike, numbers: Any, names: Any, fun: Any) -> Any:
    """Decorates a function as `@mixed_precision("...")` does."""
    if not (callable(fun) or isinstance(fun, classmethod)):
        given = not_a_function(fun)
        raise TypeError(
            f"mixed_precision expected a function to decorate, got {given}."
        )
    return mixed_precision(fun, policy, static_argnums=numbers, static_argnames=names)


def _is_policy(given: Any) -> bool:
    """Whether a value is a policy, no function; dtypes may be callable classes."""
    if isinstance(given, type):
        is_numpy = issubclass(given, (np.generic, bool, int, float, complex))
        return is_numpy or type(given) is type(jnp.float32)
    return isinstance(given, (Policy, str, np.dtype))


def _only_policy(fun: Any, policy: PolicyLike) -> Policy:
    """Reads the policy of `@mixed_precision("...")`."""
    if policy is not None:
        raise TypeError(
            "mixed_precision expected a function as its first argument beside the "
            f"policy {policy!r}, got {not_a_function(fun)}."
        )
    try:
        return as_policy(fun)
    except TypeError:
        raise TypeError(
            "mixed_precision expected a function or a policy as its first argument, "
            f"got {not_a_function(fun)}."
        ) from None


def mixed_precision_jaxpr(closed_jaxpr: Any, policy: PolicyLike = None) -> Any:
    """Rewrites a closed jaxpr to mixed precision, as `mixed_precision` does a function.

    Args:
      closed_jaxpr: the program, as `jax.make_jaxpr` returns it.
      policy: a `Policy`, a string or a dtype; None for the default policy.

    Returns:
      A closed jaxpr with the same parameters and the same types of results. Under
      "float32" it is `closed_jaxpr` itself.

    Raises:
      TypeError: if `closed_jaxpr` is not a `ClosedJaxpr`.
      ValueError: for an unknown policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> x = jnp.ones((2, 2))
      >>> closed = jax.make_jaxpr(lambda x: x @ x @ x)(x)
      >>> half = jmpr.mixed_precision_jaxpr(closed, "mixed_bfloat16")
      >>> first = next(e for e in half.eqns if e.primitive.name == "dot_general")
      >>> [str(v.aval.dtype) for v in (*first.invars, *first.outvars)]
      ['bfloat16', 'bfloat16', 'bfloat16']
      >>> half.out_avals == closed.out_avals
      True
    """
    if not isinstance(closed_jaxpr, jex.ClosedJaxpr):
        raise TypeError(
            "mixed_precision_jaxpr expected a closed jaxpr, as jax.make_jaxpr returns "
            f"it, got {type(closed_jaxpr).__name__}."
        )
    chosen = as_policy(policy)
    if chosen.compute_dtype == np.float32:
        return closed_jaxpr
    plan = decide(closed_jaxpr, chosen)
    if not plan.rewrites:
        return closed_jaxpr
    consts = _compat.constants(closed_jaxpr)

    def rewritten(*args: Any) -> list[Any]:
        with jax.named_scope(REWRITTEN):
            return run(plan, consts, args)

    before = _compat.open_jaxpr(closed_jaxpr)
    half = jax.make_jaxpr(rewritten)(*(v.aval for v in before.invars))
    after = _compat.open_jaxpr(half).replace(debug_info=before.debug_info)
    return half.replace(jaxpr=after) if hasattr(half, "jaxpr") else after
