"""`for_inference`: a forward function whose weights and state are stored in half."""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax import tree_util

from jmp_rewrite import _compat, _rewrite, _transform
from jmp_rewrite._arguments import (
    Flat,
    Hidden,
    changed,
    hide,
    merged,
    not_a_function,
    pure_call,
    same_places,
    show,
    show_types,
    user_result,
    wraps,
)
from jmp_rewrite._emit import Storage, Stored, is_move, store
from jmp_rewrite._graph import FLOAT32, REWRITTEN, Value, is_float32, is_half
from jmp_rewrite._inference import report as _report
from jmp_rewrite._inference.places import (
    STATE,
    Leaf,
    Numbers,
    check_call,
    leaves_of,
    result_leaves,
)
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._precision import NO_PRODUCT, Label, Plan, lookups
from jmp_rewrite._source import check_kind, name_of, user_level, where

P = ParamSpec("P")
R = TypeVar("R")


def for_inference(
    fun: Callable[P, R],
    policy: PolicyLike = None,
    *,
    weights: int | Iterable[int] = 0,
    state: Mapping[int, int] | None = None,
) -> Inference[P, R]:
    """Serves a function with its weights, and its state, stored in half.

    `mixed_precision` leaves arguments as they are, so that weights take the memory of
    float32, and a decoding step reads all of it. This is `mixed_precision` for a
    function that nobody differentiates, with a method that stores in half what nothing
    reads before it is rounded. As far as weights go, the results are those of
    `mixed_precision(fun, policy)` to the last bit.

    Args:
      fun: a forward function, decorated by `mixed_precision` or not.
      policy: a `Policy`, a string or a dtype; None for the default policy. That of a
        decorated `fun` decides inside it, as wherever two policies nest.
      weights: the number of the argument that holds the weights, or several. Trees of
        arrays; other leaves pass through.
      state: number of an argument -> number of the result that takes its place in the
        next call, such as a key-value cache: `{1: 0}`. Both are trees of the same
        arrays. A result that is no tuple has the number 0.

    Returns:
      A function of the same signature, with two methods. `store(*args)` returns the
      arguments, with weights and state in half where that changes nothing. The function
      takes stored and unstored arguments, and returns a state in the dtypes in which it
      came in (rounded, where a loop stacks it).
      `report(*args)` says what is stored and what is not, and why. Arguments may be
      `jax.ShapeDtypeStruct` for both.

    Raises:
      TypeError: if `fun` is no function, a number is none, weights hold no array, or a
        leaf of the state is no array.
      ValueError: for an argument or a result that there is not, a state whose result is
        another tree or has other shapes or dtypes, or arguments that were stored under
        another policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> def apply(params, x):
      ...     return (x * params["scale"]) @ params["w"]
      >>> params = {"w": jnp.ones((4, 4)), "scale": jnp.ones((1, 4))}
      >>> serve = jmpr.for_inference(apply, "mixed_bfloat16")
      >>> params, x = serve.store(params, jnp.ones((2, 4)))
      >>> str(params["w"].dtype), str(params["scale"].dtype)
      ('bfloat16', 'float32')
      >>> jax.jit(serve)(params, x).dtype
      dtype('float32')
    """
    if not callable(fun):
        raise TypeError(
            f"for_inference expected a function, got {not_a_function(fun)}."
        )
    return Inference(fun, policy, weights, state)


class _Call(NamedTuple):
    """A call as it was traced.

    Attributes:
      traced: it, with all that is stored as float32.
      leaves: its arrays.
      types: of each, what the function was traced with.
      kept: number of a result -> of the array whose place it takes in the next call.
      own: the half arrays among weights and state that are the function's own.
    """

    traced: _rewrite.Traced
    leaves: list[Leaf]
    types: list[Any]
    kept: dict[int, int]
    own: frozenset[int]


class _Program(NamedTuple):
    """A call, made ready to run.

    Attributes:
      call: as it was traced.
      plan: what is done with each equation.
      stored: the program, with what is stored in half.
      first: the number of the first array among the program's arguments.
      mixed: the arguments that are left as they are.
    """

    call: _Call
    plan: Plan
    stored: Stored
    first: int
    mixed: frozenset[int]

    @property
    def leaves(self) -> list[Leaf]:
        """The arrays of the call."""
        return self.call.leaves

    def is_stored(self, leaf: int) -> bool:
        """Whether an array of the call is stored in half."""
        return self.first + leaf in self.stored.arguments

    def is_widened(self, leaf: int) -> bool:
        """Whether an array comes in half, where the program takes float32."""
        is_full = self.first + leaf in self.stored.why_not
        return is_full and is_half(self.leaves[leaf].value)


class Inference(Generic[P, R]):
    """What `for_inference` returns: a function, with `store` and `report`."""

    def __init__(self, fun: Any, policy: PolicyLike, weights: Any, state: Any) -> None:
        self._given = fun, policy
        inner = _transform.undecorated(fun)
        plain, own = inner.bound, inner.policy
        check_kind(plain, "for_inference")
        self._fun, self._hide = plain, inner.hide_own
        given = None if policy is None else as_policy(policy)
        self._policy = given if own is None else own  # an inner policy decides inside
        self._numbers = Numbers.of(plain, weights, state)
        wraps(plain, self)  # type: ignore[arg-type]
        # So that `explain` and `diagnose` know the policy.
        self.decorated = _transform.Decorated(
            self, self._of_stored(), self._policy, lambda args, kwargs: (args, kwargs)
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function, on stored or unstored arguments."""
        policy = as_policy(self._policy)
        given, named = self._bound(args, kwargs)
        with pure_call(self._fun, given, named) as (pure, pargs, pkwargs, finish):
            tree = hide((pargs, pkwargs))
            hidden = len(pargs) - len(given)
            if policy.compute_dtype != FLOAT32:
                program = self._program(policy, pure, tree, hidden, as_given=True)
                with jax.named_scope(REWRITTEN):
                    results = _run(program)
                return finish(program.call.traced.rebuild(results))
            self._of_float32(policy, pure, tree, hidden)
        return _transform.mixed_precision(self._fun, policy)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds it as a method is bound; `weights` and `state` count the object."""
        weights, state = self._numbers
        if instance is None:
            return self
        if 0 in (*weights, *state):  # the object's own: Class.method.store(object, ...)
            return MethodType(self, instance)
        fun, policy = self._given
        behind = [n - 1 for n in weights], {n - 1: r for n, r in state.items()}
        return Inference(MethodType(fun, instance), policy, *behind)

    def store(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        """Returns the arguments, with weights and state in half where possible.

        A leaf is stored if nothing reads it before it is rounded. What is stored
        already stays as it is.

        Args:
          *args: the function's arguments, arrays or `jax.ShapeDtypeStruct`.
          **kwargs: arguments by name; those that stand at a position are returned
            there.
        """
        policy = as_policy(self._policy)
        given, named = self._bound(args, kwargs)
        with pure_call(self._fun, given, named) as (pure, pargs, pkwargs, _):
            tree = show_types(hide((pargs, pkwargs)))
            hidden = len(pargs) - len(given)
            if policy.compute_dtype == FLOAT32:
                self._of_float32(policy, pure, tree, hidden)
                return tuple(merged(show(tree[0])))[hidden:]
            program = self._program(policy, pure, tree, hidden)
            self._warn_of_captured(program)
            half = program.plan.half
            values = {id(x.value): x.value for x in program.leaves}
            narrow = functools.cache(lambda i: _in_half(values[i], half))
            stored = [  # what stands in several places, as tied weights, stays one
                narrow(id(x.value)) if program.is_stored(i) else x.value
                for i, x in enumerate(program.leaves)
            ]
            new, _ = tree_util.tree_unflatten(tree_util.tree_structure(tree), stored)
            return tuple(merged(show(new)))[hidden:]

    def report(self, *args: P.args, **kwargs: P.kwargs) -> _report.InferenceReport:
        """Says which leaves are stored in half and which stay as they are, and why.

        Args:
          *args: the function's arguments, arrays or `jax.ShapeDtypeStruct`.
          **kwargs: arguments by name.
        """
        policy = as_policy(self._policy)
        given, named = self._bound(args, kwargs)
        with pure_call(self._fun, given, named) as (pure, pargs, pkwargs, _):
            tree = show_types(hide((pargs, pkwargs)))
            hidden = len(pargs) - len(given)
            if policy.compute_dtype == FLOAT32:
                leaves = self._of_float32(policy, pure, tree, hidden)
                own = (x for x in leaves if x.kind)
                rows = [_row(x, x.value.dtype, "the policy is float32") for x in own]
                captured = 0
            else:
                program = self._program(policy, pure, tree, hidden)
                rows, captured = _rows(program), _captured_bytes(program.plan)
        name = name_of(self._fun).rpartition("<locals>.")[2]
        return _report.InferenceReport(name, repr(policy), tuple(rows), captured)

    def _warn_of_captured(self, program: _Program) -> None:
        """Warns where what takes most of the memory is no argument."""
        captured = _captured_bytes(program.plan)
        given = sum(x.bytes_before for x in _rows(program))
        if isinstance(given, int) and captured > given:
            told = _report.captured_text(captured)
            warnings.warn(f"{name_of(self._fun)}: {told}.", stacklevel=user_level())

    # ---- arguments

    def _of_stored(self) -> Callable[..., Any]:
        """Returns the function of stored arguments, of which it widens what is."""
        numbers = {*self._numbers.weights, *self._numbers.state}

        @functools.wraps(self._fun, updated=())
        def of_stored(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._placed(args, kwargs)
            halves = {i for i, x in enumerate(args) if i in numbers and _holds_half(x)}
            if not halves:
                return self._fun(*args, **kwargs)
            stored = self._stored_arrays(args, kwargs)

            def shown(x: Any) -> Any:
                return _in_float32(x) if id(x) in stored else x

            args = tuple(
                tree_util.tree_map(shown, x) if i in halves else x
                for i, x in enumerate(args)
            )
            return self._fun(*args, **kwargs)

        return of_stored

    def _stored_arrays(self, args: Any, kwargs: Any) -> set[int]:
        """Returns which arrays of a call came in half and are not the function's own.

        They are told by their `id`.
        """
        policy = as_policy(self._policy)
        given, named = self._bound(args, kwargs)
        if policy.compute_dtype == FLOAT32:
            return set()
        with pure_call(self._fun, given, named) as (pure, pargs, pkwargs, _):
            tree = hide((pargs, pkwargs))
            hidden = len(pargs) - len(given)
            call = self._traced(policy, pure, tree, hidden)
        return {
            id(x.value)
            for i, x in enumerate(call.leaves)
            if x.kind and is_half(x.value) and i not in call.own
        }

    def _bound(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call's arguments at their positions, what is static hidden."""
        args, kwargs = self._placed(args, kwargs)
        check_call(self._fun, self._numbers, args)
        return self._hide(tuple(args), dict(kwargs))

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns a call's arguments with those given by name at their positions."""
        if kwargs:
            try:
                bound = inspect.signature(self._fun).bind(*args, **kwargs)
            except ValueError:  # a function of C tells nothing
                return args, kwargs
            last = max(*self._numbers.weights, *self._numbers.state, -1, -1)
            if last >= len(bound.args):  # there are defaults before it
                bound.apply_defaults()
            return bound.args, bound.kwargs
        return args, kwargs

    def _leaves(self, tree: Any, hidden: int) -> list[Leaf]:
        """Returns the arrays of a call, once weights and state are seen to be some."""
        for number in (*self._numbers.weights, *self._numbers.state):
            self._check_arrays(number, tree[0][number + hidden])
        return leaves_of(tree, self._numbers, hidden)

    def _check_arrays(self, number: int, argument: Any) -> None:
        is_state = number in self._numbers.state
        leaves = tree_util.tree_leaves(
            argument, is_leaf=lambda x: isinstance(x, Hidden)
        )
        wrong = [x.value for x in leaves if isinstance(x, Hidden)]
        if wrong and (is_state or len(wrong) == len(leaves)):
            raise TypeError(
                f"expected arrays in argument {number} of {name_of(self._fun)}, its "
                f"{'state' if is_state else 'weights'}, got {wrong[0]!r} of type "
                f"{type(wrong[0]).__name__}."
            )

    def _of_float32(self, policy: Policy, pure: Any, tree: Any, hidden: int) -> Any:
        """Returns the arrays of a call under float32: nothing was stored for that."""
        leaves = self._leaves(tree, hidden)
        if any(x.kind and is_half(x.value) for x in leaves):
            self._traced(policy, pure, tree, hidden)
        return leaves

    # ---- the program

    def _traced(
        self,
        policy: Policy,
        pure: Any,
        tree: Any,
        hidden: int,
    ) -> _Call:
        """Traces a call with what is stored as float32.

        What is half already among weights and state has been stored, but for what the
        function does not take as float32: that is its own.

        Args:
          policy: of the function.
          pure: the function of trees of arrays.
          tree: its arguments.
          hidden: how many arguments stand before those of the user's call.
        """
        leaves = self._leaves(tree, hidden)
        halves = [i for i, x in enumerate(leaves) if x.kind and is_half(x.value)]

        def call(own: frozenset[int]) -> _Call:
            widened = {*halves} - own
            types = [
                _type_of(x.value, FLOAT32) if i in widened else x.value
                for i, x in enumerate(leaves)
            ]
            shown = tree_util.tree_unflatten(tree_util.tree_structure(tree), types)
            traced = _rewrite.trace_for(policy, pure, *shown)
            kept = self._kept(traced, hidden)
            traced = traced._replace(arrays=[x.value for x in leaves])
            return _Call(traced, leaves, types, kept, own)

        by_argument = itertools.groupby(halves, lambda i: leaves[i].number)
        found = _with_own([list(each) for _, each in by_argument], call)
        for leaf in (leaves[i] for i in halves if i not in found.own):
            if leaf.value.dtype != policy.compute_dtype:
                raise ValueError(
                    f"{leaf.path} of {name_of(self._fun)} is {leaf.value.dtype}, and "
                    f"the policy is {policy!r}: it counts as stored under another "
                    "policy. Give the float32 arrays to store(...) again."
                )
        return found

    def _program(
        self,
        policy: Policy,
        pure: Any,
        tree: Any,
        hidden: int,
        as_given: bool = False,
    ) -> _Program:
        """Traces a call with its weights and state in float32, and stores them.

        What is stored is widened where this call reads it unrounded: another shape, or
        another function of the same weights, may ask for that.

        Args:
          policy: of the function.
          pure: the function of trees of arrays.
          tree: its arguments.
          hidden: how many arguments stand before those of the user's call.
          as_given: whether to leave in float32 what comes in float32.
        """
        call = self._traced(policy, pure, tree, hidden)
        program = self._stored(policy, call, as_given)
        if as_given or self._is_taken(policy, pure, tree, hidden, program):
            return program
        mixed = frozenset(call.leaves[i].number for i in call.own)
        return self._stored(policy, call, as_given, mixed)

    def _is_taken(
        self, policy: Policy, pure: Any, tree: Any, hidden: int, program: _Program
    ) -> bool:
        """Whether the next call tells what is stored from the function's own."""
        own = program.call.own
        if not own:
            return True
        types = [
            _type_of(x.value, program.plan.half if program.is_stored(i) else None)
            for i, x in enumerate(program.leaves)
        ]
        stored = tree_util.tree_unflatten(tree_util.tree_structure(tree), types)
        try:
            return self._traced(policy, pure, stored, hidden).own == own
        except Exception:
            return False

    def _stored(
        self,
        policy: Policy,
        call: _Call,
        as_given: bool,
        mixed: frozenset[int] = frozenset(),
    ) -> _Program:
        plan = _rewrite.decide_traced(call.traced, policy)
        first = len(_compat.constvars(call.traced.closed))
        wanted = (
            i
            for i, (x, t) in enumerate(zip(call.leaves, call.types, strict=True))
            if x.kind
            and x.number not in mixed
            and is_float32(t)
            and not (as_given and is_float32(x.value))
        )
        storage = Storage(
            frozenset(first + i for i in wanted),
            {r: first + i for r, i in call.kept.items()},
        )
        result = store(_rewrite.emitted(plan), plan.half, storage)
        return _Program(call, plan, result, first, mixed)

    def _kept(self, traced: _rewrite.Traced, hidden: int) -> dict[int, int]:
        """Returns for each result that takes a place in the next call the leaf's."""
        args, _ = traced.arguments
        kept = changed(traced.arguments, traced.results)
        results, ahead = user_result(traced.results)
        for number, result in self._numbers.state.items():
            before, new = result_leaves(results, result, self._fun)
            old = args[number + hidden]
            start = len(tree_util.tree_leaves(args[: number + hidden]))
            places = self._check_state(number, result, old, new)
            for i, place in enumerate(places):
                kept[ahead + before + i] = start + place
        return kept

    def _check_state(self, number: int, result: int, old: Any, new: Flat) -> list[int]:
        """Returns for each array of a result the one of the state whose place it takes.

        Raises:
          ValueError: if their trees, shapes or dtypes differ.
        """
        where = f"argument {number} of {name_of(self._fun)} and result {result}"
        names, structure = tree_util.tree_flatten_with_path(old)
        places = same_places(structure, new.structure)
        if places is None:
            apart = _apart([path for path, _ in names], new.paths)
            raise ValueError(
                f"{where}, which takes its place in the next call, expected the same "
                f"tree, got {apart or f'{structure} and {new.structure}'}."
            )
        for place, y in zip(places, new.types, strict=True):
            path, x = names[place]
            if x.shape != y.shape or x.dtype != y.dtype:
                raise ValueError(
                    f"{where}, which takes its place in the next call, expected the "
                    f"same arrays, got {x.dtype}{list(x.shape)} and "
                    f"{y.dtype}{list(y.shape)} at {tree_util.keystr(path) or 'it'}."
                )
        return places


def _apart(old: Iterable[Any], new: Iterable[Any]) -> str:
    """Returns in words which arrays one of two trees alone has, by their paths."""
    before, after = ([tree_util.keystr(p) for p in paths] for paths in (old, new))
    apart = []
    for here, other, which in ((before, after, "argument"), (after, before, "result")):
        alone = [path or "an array" for path in here if path not in other]
        if alone:
            more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
            apart.append(f"{', '.join(alone[:3])}{more} in the {which} alone")
    return " and ".join(apart)


def _captured_bytes(plan: Plan) -> int:
    """Returns the bytes of captured arrays that would be stored if they were given.

    These are the float32 ones that nothing reads before they are rounded.
    """
    nodes = plan.graph.nodes
    trips = {x.token: x.length for x in plan.graph.loops}
    sizes: dict[int, int] = {}
    unrounded = [_source(v) for v in plan.graph.results]
    moves: dict[int, list[int]] = {}
    for node in nodes:
        sources = [_source(v) for v in node.inputs]
        for source, value in zip(sources, node.inputs, strict=True):
            is_array = value.aval.shape or value.slice_of
            if value.argument < -1 and is_array:
                size = value.size * math.prod(trips[t] for t in value.slice_of)
                sizes[source] = max(size, sizes.get(source, 0))
        label = plan.labels[node.index]
        if is_move(node, plan.half):
            if label is Label.FLOAT32:
                moves[node.index] = sources
        elif label in (Label.FLOAT32, Label.ROUNDED):
            unrounded += sources
    while unrounded:
        source = unrounded.pop()
        sizes.pop(source, None)
        unrounded += moves.pop(source, ())
    return sum(sizes.values()) * FLOAT32.itemsize


def _source(value: Value) -> int:
    """Returns the node of a value, or the number of an array, below zero."""
    return value.node if value.node >= 0 else value.argument


def _run(program: _Program) -> list[Any]:
    """Runs a program on its arrays; what comes in half so returns."""
    finished = _rewrite.finished(program.plan, program.stored.closed)
    consts = _compat.constants(program.call.traced.closed)
    arrays = [
        _in_float32(x.value) if program.is_widened(i) else x.value
        for i, x in enumerate(program.leaves)
    ]
    results = _compat.evaluate(finished.closed, [*consts, *arrays])
    half = program.plan.half
    widened = {i for i, leaf in program.call.kept.items() if program.is_widened(leaf)}
    return [_in_half(x, half) if i in widened else x for i, x in enumerate(results)]


def _with_own(
    arguments: Iterable[Sequence[int]], call: Callable[[frozenset[int]], _Call]
) -> _Call:
    """Traces a call with the fewest half arrays as they are.

    Args:
      arguments: of each argument the numbers of its half arrays.
      call: traces it, given those that stay as they are.

    Raises:
      Exception: what the function raises on float32 arrays, if it does not take half
        ones either.
    """
    refusals: list[Exception] = []

    @functools.cache
    def attempt(own: frozenset[int]) -> _Call | None:
        try:
            return call(own)
        except Exception as error:  # whatever it raises, it does not take that
            refusals.append(error)
            return None

    own: frozenset[int] = frozenset()
    if (found := attempt(own)) is not None:
        return found
    several = (*arguments, list(itertools.chain(*arguments)))
    taken = (each for each in several if attempt(frozenset(each)) is not None)
    left: Sequence[int] = next(taken, ())
    if not left:
        raise refusals[0]
    while (found := attempt(own)) is None:  # one more of those that are left
        fewest = bisect.bisect_left(
            range(1, len(left)),
            True,
            key=lambda n: attempt(own.union(left[:n])) is not None,
        )
        own, left = own | {left[fewest]}, left[:fewest]
    return found


def _in_half(x: Any, half: np.dtype) -> Any:
    if x.dtype == half:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=half, weak_type=False)
    return _compat.convert(x, half)


def _holds_half(tree: Any) -> bool:
    return any(map(is_half, tree_util.tree_leaves(tree)))


def _in_float32(x: Any) -> Any:
    return _compat.convert(x, FLOAT32) if is_half(x) else x


def _type_of(x: Any, dtype: Any = None) -> Any:
    """Returns the type of an array, in its own dtype or in another one."""
    dtype = x.dtype if dtype is None else dtype
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=_sharding(x))


def _sharding(x: Any) -> Any:
    """Returns the sharding that is a part of an array's type, if there is one."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else sharding


def _rows(program: _Program) -> list[_report.Leaf]:
    reasons = _Reasons(program)
    rows = []
    for i, leaf in enumerate(program.leaves):
        if leaf.kind is None:
            continue
        is_stored = program.is_stored(i) or program.is_widened(i)
        dtype = program.plan.half if is_stored else leaf.value.dtype
        rows.append(_row(leaf, dtype, reasons.of(i), is_stored))
    return rows


def _row(leaf: Leaf, dtype: Any, reason: str, is_stored: bool = False) -> _report.Leaf:
    before = FLOAT32 if is_stored else leaf.value.dtype
    size = math.prod(leaf.value.shape)
    return _report.Leaf(
        leaf.path,
        leaf.kind or "",
        tuple(leaf.value.shape),
        str(before),
        str(dtype),
        size * before.itemsize,
        size * dtype.itemsize,
        reason,
    )


class _Reasons:
    """Says of each leaf why it is stored, or why it is not."""

    def __init__(self, program: _Program) -> None:
        self._program = program
        plan = program.plan
        self._why = {
            (n.name, id(n.eqn.source_info.traceback)): plan.pins.full[n.index]
            for n in plan.graph.nodes
            if n.eqn is not None and plan.pins.full[n.index]
        }
        rows = (plan.graph.nodes[n].inputs[0] for n in lookups(plan.graph))
        self._tables = {v.argument for v in rows if v.node < 0}

    def of(self, leaf: int) -> str:
        """Returns the reason, as a sentence."""
        number = self._program.first + leaf
        stored = self._program.stored
        if number in stored.arguments:
            return "all that read it round it"
        if number in stored.unread:
            return "nothing reads it"
        if leaf in self._program.call.own:
            return "the function takes it in half alone"
        if self._program.leaves[leaf].number in self._program.mixed:
            return (
                "its argument holds arrays that the function takes in half alone, and "
                "it would not be told from them"
            )
        if number not in stored.why_not:
            return "it is no float32 array"
        eqn = stored.why_not[number]
        if eqn is None:
            is_state = self._program.leaves[leaf].kind == STATE
            return "it is returned" + (" by another result" if is_state else "")
        key = (eqn.primitive.name, id(eqn.source_info.traceback))
        reason = self._why.get(key) or ""
        why = reason.removeprefix("full: ")
        said = f"{eqn.primitive.name} reads it unrounded at {where(eqn)}"
        said += f" ({why})" if why else ""
        if self._program.is_widened(leaf):
            return f"stored for another call; here {said}"
        if leaf in self._tables and reason != NO_PRODUCT:
            said += '; a scope "half" that names it would store it in half'
        return said
