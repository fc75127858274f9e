"""`mixed_precision`: a function in, the same function in mixed precision out.

Trace, decide, emit. This is the only place that knows of pytrees.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util
from jax.extend import core as jex
from jax.extend import source_info_util

from jmp_rewrite import _compat, _graph, _parameters, _pin, _place, _plan, _rewrite
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._rules import Category
from jmp_rewrite._scopes import REWRITTEN

_LOGGER = logging.getLogger("jmp_rewrite")


class Arguments(NamedTuple):
    """The arguments of one call, arrays apart from what is passed as it is.

    Attributes:
      leaves: all leaves of `(args, kwargs)`.
      tree: their tree structure.
      arrays: indices of the leaves that are traced.
    """

    leaves: list[Any]
    tree: Any
    arrays: list[int]

    @property
    def traced(self) -> list[Any]:
        """The arrays."""
        return [self.leaves[i] for i in self.arrays]

    def merge(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns `(args, kwargs)` with other arrays in their places."""
        leaves = list(self.leaves)
        for i, x in zip(self.arrays, arrays, strict=True):
            leaves[i] = x
        return tree_util.tree_unflatten(self.tree, leaves)


class Traced(NamedTuple):
    """A function traced for one call.

    Attributes:
      closed: its closed jaxpr.
      paths: for each of its parameters the path in its argument, keys joined by "/";
        None for optimizer state.
      rebuild: makes the function's result from the jaxpr's results.
    """

    closed: Any
    paths: list[str | None]
    rebuild: Callable[[Sequence[Any]], Any]


class _Static:
    """A leaf that hides what `static_argnums` and `static_argnames` name."""

    def __init__(self, value: Any) -> None:
        self.value = value


def mixed_precision(
    fun: Any = None,
    policy: PolicyLike = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """Runs a function in mixed precision, with the results' dtypes unchanged.

    Matrix products and convolutions run on half operands and accumulate in float32;
    what is safe in half between them runs in half; everything else, above all the
    train state, stays float32. The function is traced to a jaxpr, every equation is
    given a precision (inside loops, branches, checkpoints and custom derivative rules
    too), and the program is emitted again with casts at the boundaries.

    Put it around a whole train step (forward, backward, optimizer update, metrics) and
    inside `jax.jit`; or around a loss or a forward function that is differentiated
    afterwards. Both give float32 gradients for float32 parameters. A whole step is
    faster, because a weight is then cast once a step. It traces at each call, as
    `jax.grad` does.

    Args:
      fun: the function. Its arguments and results are pytrees; leaves that are no
        arrays pass through as they are. Only float32 arrays are ever rounded.
      policy: a `Policy`, a string such as "mixed_bfloat16", or a dtype; None for the
        default policy (see `set_policy`). It may also stand in the place of `fun`, in
        the decorator `@mixed_precision("mixed_float16")`.
      static_argnums: positions of arguments that are passed on as they are, even if
        they are arrays.
      static_argnames: names of such keyword arguments.

    Returns:
      A function of the same signature, whose result has the same tree structure,
      shapes, dtypes and weak types.

    Raises:
      TypeError: if `fun` is neither callable nor a policy, or a static argument is
        named by something else than an integer or a string.
      ValueError: for an unknown policy, or a static argument that the call lacks.

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
    if fun is None or (not callable(fun) or isinstance(fun, type(np.float32))):
        given = policy if fun is None else _only_policy(fun, policy)
        return functools.partial(
            mixed_precision, policy=given, static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    fixed = None if policy is None else as_policy(policy)
    numbers = _as_tuple(static_argnums, int, "static_argnums")
    names = _as_tuple(static_argnames, str, "static_argnames")

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = as_policy(fixed)
        if chosen.compute_dtype == np.float32:
            with jax.named_scope(REWRITTEN):
                return fun(*args, **kwargs)
        arguments = _arguments(args, kwargs, numbers, names)
        traced = _trace(fun, arguments)
        plan = decide(traced.closed, chosen, traced.paths)
        with jax.named_scope(REWRITTEN):
            consts = _compat.constants(traced.closed)
            results = _rewrite.run(plan, consts, arguments.traced)
        return traced.rebuild(results)

    return _wraps(fun, wrapped)


def _only_policy(fun: Any, policy: PolicyLike) -> Policy:
    """Reads the policy of `@mixed_precision("...")`."""
    if policy is not None:
        raise TypeError(
            f"mixed_precision expected a function as its first argument, got {fun!r}."
        )
    try:
        return as_policy(fun)
    except TypeError:
        raise TypeError(
            "mixed_precision expected a function or a policy as its first argument, "
            f"got {fun!r} of type {type(fun).__name__}."
        ) from None


def _as_tuple(given: Any, kind: type, name: str) -> tuple[Any, ...]:
    items = (given,) if isinstance(given, kind) else given
    try:
        items = tuple(items)
    except TypeError:
        items = (given,)
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise TypeError(
                f"{name} expected {kind.__name__} or an iterable of {kind.__name__}, "
                f"got {item!r} of type {type(item).__name__}."
            )
    return items


def _wraps(fun: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.wraps` for anything callable, partial objects and modules too."""
    wrapped.__wrapped__ = fun  # type: ignore[attr-defined]
    inner = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    names = [n for n in functools.WRAPPER_ASSIGNMENTS if hasattr(inner, n)]
    wrapper = functools.update_wrapper(wrapped, inner, assigned=names, updated=())
    wrapper.__wrapped__ = fun  # type: ignore[attr-defined]
    if hasattr(inner, "__dict__") and inner is fun and not isinstance(fun, type):
        if callable(fun) and type(fun).__name__ == "function":
            wrapper.__dict__.update(
                {k: v for k, v in vars(fun).items() if k != "__wrapped__"}
            )
    return wrapper


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[int],
               names: Sequence[str]) -> Arguments:
    """Flattens a call's arguments."""
    hidden = list(args)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"static_argnums names argument {number}, but the call has "
                f"{len(args)} positional arguments."
            )
        hidden[number] = _Static(args[number])
    named = {k: _Static(v) if k in names else v for k, v in kwargs.items()}
    leaves, tree = tree_util.tree_flatten((tuple(hidden), named))
    arrays = [i for i, x in enumerate(leaves) if _compat.is_array(x)]
    return Arguments(leaves, tree, arrays)


def _trace(fun: Callable[..., Any], arguments: Arguments) -> Traced:
    """Traces `fun` through a fresh function, so that nothing it captured is cached."""
    result: list[tuple[list[Any], Any]] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = arguments.merge(arrays)
        args = tuple(a.value if isinstance(a, _Static) else a for a in args)
        kwargs = {
            k: v.value if isinstance(v, _Static) else v for k, v in kwargs.items()
        }
        leaves, tree = tree_util.tree_flatten(fun(*args, **kwargs))
        result.append(([None if _compat.is_array(x) else x for x in leaves], tree))
        traced = [x for x in leaves if _compat.is_array(x)]
        result[-1] = ([_ARRAY if _compat.is_array(x) else x for x in leaves], tree)
        return traced

    closed = jax.make_jaxpr(flat)(*arguments.traced)
    known, tree = result[-1]

    def rebuild(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if x is _ARRAY else x for x in known]
        return tree_util.tree_unflatten(tree, leaves)

    return Traced(closed, _parameters.paths(arguments), rebuild)


_ARRAY = object()  # stands for an array among a function's results


def decide(closed: Any, policy: Policy, paths: Sequence[str | None] = ()) -> _plan.Plan:
    """Decides for every equation of a program in which precision it runs.

    Args:
      closed: the program, a closed jaxpr.
      policy: what the user asks for.
      paths: of each parameter, as `Traced.paths`.
    """
    table = policy.table()

    def is_opaque(eqn: Any) -> bool:
        rule = policy.rules.get(eqn.primitive, table.get(eqn.primitive.name))
        return rule is Category.DENY

    graph = _graph.build(closed, is_opaque)
    overrides, used = _parameters.overrides(graph, policy, paths)
    pins = _pin.pin(graph, policy, overrides)
    _report(graph, policy, pins.used_scopes | used)
    return _plan.make_plan(
        graph, pins, policy.compute_dtype, _place.propagate,
        lambda rule: decide(rule, policy.replace(scopes={})),
    )


def _report(graph: _graph.Graph, policy: Policy, used: frozenset[str]) -> None:
    """Logs what was left alone; silence is the worst answer."""
    for eqn, place, why in graph.opaque:
        if _graph.reads_float32(eqn):
            where = source_info_util.summarize(eqn.source_info)
            _LOGGER.info(
                "%s at %s%s is not rewritten: %s", eqn.primitive.name, where,
                f" (in {place.path})" if place.path else "", why,
            )
    for pattern in policy.scopes:
        if pattern not in used:
            _parameters.warn_unused(pattern)


def mixed_precision_jaxpr(closed_jaxpr: Any, policy: PolicyLike = None) -> Any:
    """Rewrites a closed jaxpr: the step of `mixed_precision` that needs no function.

    Args:
      closed_jaxpr: the program, as `jax.make_jaxpr` returns it.
      policy: a `Policy`, a string or a dtype; None for the default policy.

    Returns:
      A closed jaxpr with the same parameters and the same types of results. Under
      "float32" it is `closed_jaxpr` itself.

    Raises:
      TypeError: if `closed_jaxpr` is no closed jaxpr.
      ValueError: for an unknown policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> x = jnp.ones((2, 2))
      >>> closed = jax.make_jaxpr(lambda x: x @ x @ x)(x)
      >>> half = jmpr.mixed_precision_jaxpr(closed, "mixed_bfloat16")
      >>> [str(e.invars[0].aval.dtype) for e in half.eqns
      ...  if e.primitive.name == "dot_general"]
      ['bfloat16', 'bfloat16']
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
            return _rewrite.run(plan, consts, args)

    return jax.make_jaxpr(rewritten)(
        *(v.aval for v in _compat.open_jaxpr(closed_jaxpr).invars)
    )
