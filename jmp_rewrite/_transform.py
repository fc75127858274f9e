"""`mixed_precision`: a function in, the same function in mixed precision out.

Trace, decide, emit. Pytrees end here, and in `_arguments.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.extend import core as jex

from jmp_rewrite import _collector, _compat, _keras, _passes
from jmp_rewrite._arguments import (
    Static,
    hide,
    name_of,
    not_a_function,
    pure_call,
    show,
    show_types,
    wraps,
)
from jmp_rewrite._devices import why_auto_is_float32
from jmp_rewrite._emit import Emitter, Later, program, store
from jmp_rewrite._graph import (
    FLOAT32,
    REWRITTEN,
    Place,
    Region,
    build,
    computed_once,
    has_half_precision,
    matched,
    nodes,
    region,
    report_unused,
)
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._precision import decide as _plan
from jmp_rewrite._precision import is_whole_step
from jmp_rewrite._precision import parameters as _parameters
from jmp_rewrite._precision import pinning as _pin
from jmp_rewrite._rules import Category
from jmp_rewrite._source import user_level
from jmp_rewrite._spelling import DTypeLike, PolicyName

_LOGGER = logging.getLogger("jmp_rewrite")


class Traced(NamedTuple):
    """A function traced for one call.

    Attributes:
      closed: its closed jaxpr.
      arrays: the call's arrays, for the jaxpr's parameters.
      arguments: the call's `(args, kwargs)`, what is no array hidden.
      results: the function's result, with types in place of arrays, the rest hidden.
    """

    closed: Any
    arrays: list[Any]
    arguments: Any
    results: Any

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Makes the function's result from the jaxpr's results."""
        return show(
            tree_util.tree_unflatten(tree_util.tree_structure(self.results), arrays)
        )


P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What makes of a function another one of its signature."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, R]:
        """Decorates a function."""


# NumPy's scalar types are callable as well, and mean a dtype here.
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
    if fun is None or _is_policy(fun) or not callable(fun):
        return functools.partial(
            mixed_precision,
            policy=policy if fun is None else _only_policy(fun, policy),
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    fixed = None if policy is None else as_policy(policy)
    static = Static.of(fun, static_argnums, static_argnames)
    calls = _EagerCalls(fun)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = as_policy(fixed)
        arguments = static.hide(args, kwargs)
        if chosen.compute_dtype == np.float32:
            if chosen.name == "auto":
                _log_auto()
            with jax.named_scope(REWRITTEN), region.tracing(Region(chosen)):
                return fun(*args, **kwargs)
        with pure_call(fun, *arguments) as (pure, pure_args, pure_kwargs, finish):
            rebuild, results = _rewritten(pure, pure_args, pure_kwargs, chosen)
            calls.count(results)
            return finish(rebuild(results))

    wraps(fun, wrapped)
    _keras.watch(fun, wrapped)
    wrapped.decorated = Decorated(wrapped, fun, fixed, static.hide)  # type: ignore[attr-defined]
    return wrapped


def _rewritten(
    fun: Callable[..., Any], args: Any, kwargs: Any, policy: Policy
) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """Runs a function rewritten; returns its arrays, and what puts them together."""
    traced = trace_call(fun, args, kwargs, policy)
    with _collector.held():
        plan = decide_traced(traced, policy)
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
        is_eager = any(map(_compat.is_concrete, results))
        if not is_eager or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return
        self._number += 1
        if self._number == 2:
            name = name_of(self._fun).rpartition("<locals>.")[2]
            warnings.warn(
                f"mixed_precision traces {name} again at each call, because it is "
                "called outside of jax.jit: put @jax.jit above @mixed_precision, or "
                f"write jax.jit(mixed_precision({name}))",
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
    """

    wrapped: Callable[..., Any]
    fun: Callable[..., Any]
    policy: Policy | None
    hide: Callable[[tuple[Any, ...], dict[str, Any]], Any]


def undecorated(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Policy | None]:
    """Returns what `mixed_precision` decorates, inside `jax.jit` too, and its policy.

    Anything else is returned as it is, with None.
    """
    inner = fun
    while hasattr(inner, "lower") and hasattr(inner, "__wrapped__"):  # jax.jit
        inner = inner.__wrapped__
    given = getattr(inner, "decorated", None)
    if not isinstance(given, Decorated) or given.wrapped is not inner:
        return fun, None
    return given.fun, given.policy


def trace_call(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | None = None,
) -> Traced:
    """Traces a function for one call.

    Args:
      fun: the function.
      args: positional arguments.
      kwargs: arguments by name.
      policy: what will rewrite the program; None if nothing will.
    """
    return trace_for(policy, fun, *hide((args, kwargs)))


def _is_policy(given: Any) -> bool:
    """Tells a policy from a function; dtypes may be classes, and those are callable."""
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


_TRACED = (
    "mixed_precision traces a function as jax.jit does: branch with jax.lax.cond or "
    "jnp.where, or name the arguments that decide in static_argnums or static_argnames."
)


def trace_for(
    policy: Policy | None, fun: Callable[..., Any], args: Any, kwargs: Any
) -> Traced:
    """Traces a function that a policy will rewrite.

    A call of a half-precision function sees the scopes that it stands in from the
    innermost loop or jitted function on. If one further out, or the path of a
    parameter, makes the call float32, the function is traced anew, and told so.
    """
    if policy is None:
        return _trace_hidden(fun, args, kwargs)
    here = Region(policy)
    while True:
        with region.tracing(here):
            traced = _trace_hidden(fun, args, kwargs)
        found = _calls_in_float32(traced, policy)
        if found <= here.in_float32:
            return traced
        known = here.in_float32 | found if here.again else frozenset()
        here = here._replace(in_float32=known, again=next(_AGAIN))


_AGAIN = itertools.count(1)


def _calls_in_float32(traced: Traced, policy: Policy) -> frozenset[int]:
    """Returns the half-precision calls that should have been traced in float32."""
    if not policy.scopes or policy.compute_dtype == FLOAT32:
        return frozenset()
    if not has_half_precision(traced.closed):
        return frozenset()
    graph, plan, _ = decide_quietly(traced, policy)
    assert plan is not None
    return frozenset(
        node.place.call
        for node in graph.nodes
        if node.name == nodes.KERNEL_OPERAND
        and node.place.call >= 0
        and not node.place.rewritten
        and plan.pins.is_asked_full(node.index)
    )


def _trace_hidden(fun: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
    """Traces `fun` through a fresh function, so that nothing it captured is cached."""

    def fresh(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = show((args, kwargs))
        return hide(fun(*args, **kwargs))

    # Errors then name the user's function and its arguments, as those of jax.jit do.
    wraps(fun, fresh)
    try:
        closed, results = jax.make_jaxpr(fresh, return_shape=True)(*args, **kwargs)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(_TRACED)
        raise
    arguments = (args, kwargs)
    return Traced(closed, tree_util.tree_leaves(arguments), arguments, results)


def trace_types(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hide_static: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
    policy: Policy | None = None,
) -> Traced:
    """Traces `fun` for a call whose arrays may be given as `jax.ShapeDtypeStruct`.

    Args:
      fun: the function.
      args: positional arguments.
      kwargs: arguments by name.
      hide_static: `Decorated.hide`; None if no argument is static.
      policy: what will rewrite the program; None if nothing will.
    """
    arguments = (args, kwargs) if hide_static is None else hide_static(args, kwargs)
    with pure_call(fun, *arguments) as (pure, pure_args, pure_kwargs, _):
        given = show_types(hide((pure_args, pure_kwargs)))
        return trace_for(policy, pure, *given)


def decide_quietly(
    traced: Traced, policy: Policy
) -> tuple[nodes.Graph, _plan.Plan | None, list[str]]:
    """Decides for a traced function, and warns of nothing.

    Returns:
      The program, what is done with it (None under a float32 policy), and the patterns
      of `scopes` that matched nothing.
    """
    if policy.compute_dtype == np.float32:
        return build.build(traced.closed), None, []
    plan, used = _decide(
        traced.closed,
        policy,
        Place(),
        _parameters.argument_paths(traced.arguments),
        _parameters.result_paths(traced.results),
    )
    # Inside derivative rules, which nobody has traced yet, there may be more scopes.
    known = [] if plan.graph.has_backward_rules else policy.scopes
    return plan.graph, plan, [p for p in known if p not in used]


def decide_traced(traced: Traced, policy: Policy) -> _plan.Plan:
    """Decides for a traced function; `scopes` know the paths of its parameters."""
    values = [*traced.arrays, *_compat.constants(traced.closed)]
    differentiated = any(map(_compat.is_being_differentiated, values))
    if not policy.scopes:
        return decide(traced.closed, policy, differentiated=differentiated)
    return decide(
        traced.closed,
        policy,
        _parameters.argument_paths(traced.arguments),
        _parameters.result_paths(traced.results),
        differentiated,
    )


def decide(
    closed: Any,
    policy: Policy,
    arguments: Sequence[str | None] = (),
    results: Sequence[str] = (),
    differentiated: bool = False,
) -> _plan.Plan:
    """Decides for every equation of a program in which precision it runs.

    Args:
      closed: the program, a closed jaxpr.
      policy: what the user asks for.
      arguments: for each parameter the path in its argument, keys joined by "/"; None
        for optimizer state.
      results: for each result its path.
      differentiated: whether the program is being differentiated from outside.
    """
    plan, used = _decide(closed, policy, Place(), arguments, results, differentiated)
    if not plan.graph.has_backward_rules:  # a scope may be inside one
        report_unused(policy, used)
    return plan


@_collector.held()
def _decide(
    closed: Any,
    policy: Policy,
    place: Place,
    arguments: Sequence[str | None] = (),
    results: Sequence[str] = (),
    differentiated: bool = False,
    placement: _plan.Placement = _plan.cheapest,
) -> tuple[_plan.Plan, frozenset[str]]:
    """Decides for a program that stands somewhere, a derivative rule in its scope."""
    table = policy.table()

    def is_opaque(eqn: Any) -> bool:
        return table.get(eqn.primitive.name) is Category.DENY

    # bfloat16 has float32's range: it rounds no positive number to 0.
    by_sign = policy.compute_dtype != np.float16
    by_path = bool(policy.scopes)

    def graph_of(closed: Any) -> nodes.Graph:
        dtype = policy.compute_dtype
        return build.build(closed, is_opaque, place, by_path, by_sign, dtype)

    graph = graph_of(closed)
    whole_step = not differentiated and is_whole_step(graph)
    if whole_step:
        merged = computed_once(closed, by_path)
        if merged is not closed:
            graph = graph_of(merged)
            whole_step = is_whole_step(graph)
    overrides, used = _parameters.overrides(graph, policy, arguments, results)
    pins = _pin.pin(graph, policy, overrides, whole_step)
    _log_opaque(_pin.left_alone(graph, pins))
    plan = _plan.make_plan(
        graph,
        pins,
        policy.compute_dtype,
        placement,
        # A rule is no whole step: what it computes again must round as it did before.
        lambda rule, place: _decide(
            rule,
            policy,
            place,
            differentiated=True,
            placement=_plan.products,
        )[0],
    )
    plan.region, plan.is_differentiated = Region(policy), differentiated
    return plan, used | matched(policy, (n.place.path for n in graph.nodes))


@_collector.held()
def optimized(
    plan: _plan.Plan,
    choice: _passes.Choice | None = None,
    emitter_type: type[Emitter] = Emitter,
) -> _passes.Optimized:
    """Emits a program and runs the passes over it.

    Args:
      plan: the program, and what is done with each equation.
      choice: the passes; None for those that are switched on now.
      emitter_type: what emits the equations.

    Returns:
      A closed jaxpr of the program's constants and arguments, and what was done.
    """
    choice = _passes.current() if choice is None else choice
    explicit = emitted(plan, choice, emitter_type)
    done = finished(plan, explicit, choice)
    if not _may_store(plan):
        return done
    stored = store(explicit, plan.half).closed
    if stored is explicit:
        return done
    less = finished(plan, stored, choice)
    return less._replace(closed=_unless_differentiated(less.closed, done.closed))


def emitted(
    plan: _plan.Plan,
    choice: _passes.Choice | None = None,
    emitter_type: type[Emitter] = Emitter,
) -> Any:
    """Emits a program with explicit casts, before any pass; see `optimized`."""
    choice = _passes.current() if choice is None else choice
    again = functools.partial(run, choice=choice, emitter_type=emitter_type)
    later = Later(again, functools.partial(_finish, plan.half, choice))
    return program.emit(plan, later, emitter_type)


def finished(
    plan: _plan.Plan, explicit: Any, choice: _passes.Choice | None = None
) -> _passes.Optimized:
    """Runs the passes over a program with explicit casts; see `optimized`."""
    choice = _passes.current() if choice is None else choice
    explicit = _passes.Program(explicit, plan.half, plan.pins.whole_step)
    return _passes.optimize(explicit, choice.passes, choice.device)


def _may_store(plan: _plan.Plan) -> bool:
    """Whether what loops carry may be stored as `store` does it."""
    is_forward = not (plan.pins.whole_step or plan.is_differentiated)
    return bool(plan.graph.loops) and is_forward


def _unless_differentiated(closed: Any, original: Any) -> Any:
    """Returns a program that is another one where somebody differentiates it.

    Cotangents of what a loop carries in half would be added up in half.

    Args:
      closed: the program, a closed jaxpr.
      original: the other one, of the same types.
    """
    if not _has_derivative(original):
        return closed
    if closed.effects:  # custom derivatives allow few
        return original

    @jax.custom_jvp
    def inference(*args: Any) -> list[Any]:
        return _compat.evaluate(closed, args)

    @inference.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        def fun(*args: Any) -> list[Any]:
            return _compat.evaluate(original, args)

        return jax.jvp(fun, primals, tangents)

    return jax.make_jaxpr(inference)(*original.in_avals)


def _has_derivative(closed: Any) -> bool:
    """Whether a program returns a number that has a derivative."""
    dtypes = (getattr(a, "dtype", np.dtype(bool)) for a in closed.out_avals)
    return any(jnp.issubdtype(d, jnp.inexact) for d in dtypes)


def _finish(
    half: np.dtype,
    choice: _passes.Choice,
    fun: Callable[..., list[Any]],
    args: Sequence[Any],
) -> list[Any]:
    """Runs a function that emits equations itself, in no whole step, with the passes.

    It holds no program: JAX keeps derivative rules longer than the tracers in one.
    """
    closed = jax.make_jaxpr(fun)(*map(jax.typeof, args))
    explicit = _passes.Program(closed, half, False)
    optimized = _passes.optimize(explicit, choice.passes, choice.device)
    return _compat.evaluate(optimized.closed, args)


def run(
    plan: _plan.Plan,
    consts: Sequence[Any],
    args: Sequence[Any],
    choice: _passes.Choice | None = None,
    emitter_type: type[Emitter] = Emitter,
) -> list[Any]:
    """Runs a program rewritten, on its constants and arguments; see `optimized`."""
    closed = optimized(plan, choice, emitter_type).closed
    return _compat.evaluate(closed, [*consts, *args])


def _log_opaque(left_alone: Sequence[nodes.Opaque]) -> None:
    """Logs what was left alone; silence is the worst answer."""
    for eqn, place, why, where in left_alone:
        _LOGGER.info(
            "%s at %s%s is not rewritten: %s",
            eqn.primitive.name,
            where,
            f" (in {place.path})" if place.path else "",
            why,
        )


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
