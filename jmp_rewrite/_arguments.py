"""A call's arguments and results: what is traced, what is passed on as it is.

Leaves that are no arrays, and what `static_argnums` names, are hidden from JAX in tree
nodes without leaves. Modules of Flax NNX, which change in place, are taken apart.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util

from jmp_rewrite import _compat
from jmp_rewrite._source import innermost, name_of


class Hidden:
    """A tree node without leaves, for what is passed on as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


tree_util.register_pytree_node(Hidden, lambda x: ((), x), lambda x, _: x)


def hide(tree: Any) -> Any:
    """Hides the leaves of a tree that are no arrays, and are not hidden yet."""

    def hidden(x: Any) -> Any:
        return x if _is_traced(x) or isinstance(x, Hidden) else Hidden(x)

    return tree_util.tree_map(hidden, tree)


def show_types(tree: Any) -> Any:
    """Shows the types that stand for arrays, where nothing is computed."""

    def show(x: Any) -> Any:
        is_type = isinstance(x, Hidden) and isinstance(x.value, jax.ShapeDtypeStruct)
        return x.value if is_type else x

    return tree_util.tree_map(show, tree, is_leaf=lambda x: isinstance(x, Hidden))


def _is_traced(leaf: Any) -> bool:
    return _compat.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct)


def show(tree: Any) -> Any:
    return tree_util.tree_map(
        lambda x: x.value if isinstance(x, Hidden) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Hidden),
    )


class Static(NamedTuple):
    """Which arguments of a function are passed on as they are.

    Attributes:
      numbers: positions; one may lie beyond those of the signature only where the
        function takes any number of arguments.
      names: names.
      declared: how many positional arguments the signature names.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    declared: int

    @classmethod
    def of(cls, fun: Any, static_argnums: Any, static_argnames: Any) -> Static:
        """Reads `static_argnums` and `static_argnames` of a function."""
        numbers = _as_tuple(static_argnums, int, "static_argnums")
        names = _as_tuple(static_argnames, str, "static_argnames")
        if not numbers and not names:
            return cls((), (), 0)
        parameters = _parameters_of(fun)
        kinds = [p.kind for p in parameters]
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        if _VAR_POSITIONAL not in kinds:
            numbers = tuple(_position(fun, n, positional) for n in numbers)
        if _VAR_KEYWORD not in kinds:
            for name in names:
                _check_name(fun, name, parameters)
        numbers += tuple(i for i, p in enumerate(positional) if p.name in names)
        names += tuple(
            p.name
            for i, p in enumerate(positional)
            if i in numbers and p.kind is not _POSITIONAL_ONLY
        )
        return cls(numbers, names, len(positional))

    def hide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call's arguments with what is static hidden."""
        hidden = list(args)
        for number in self.numbers:
            position = number + len(args) if number < 0 else number
            if 0 <= position < len(args):
                hidden[position] = Hidden(args[position])
            elif not 0 <= number < self.declared:
                raise ValueError(
                    f"static_argnums expected positions of arguments of the call, "
                    f"which has {len(args)}, got {number}."
                )
        named = {k: Hidden(v) if k in self.names else v for k, v in kwargs.items()}
        return tuple(hidden), named


_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_POSITIONAL = (_POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


def _as_tuple(given: Any, kind: type, name: str) -> tuple[Any, ...]:
    expected = f"{name} expected {kind.__name__} or an iterable of {kind.__name__}, "
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        given = (given,)
    items = []
    for item in given:
        if kind is int and not isinstance(item, bool) and hasattr(item, "__index__"):
            item = operator.index(item)
        if not isinstance(item, kind) or isinstance(item, bool):
            raise TypeError(f"{expected}got {item!r} of type {type(item).__name__}.")
        items.append(item)
    return tuple(items)


def _parameters_of(fun: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # functions of C tell nothing: anything may be
        return [
            inspect.Parameter("args", _VAR_POSITIONAL),
            inspect.Parameter("kwargs", _VAR_KEYWORD),
        ]


def _position(fun: Any, number: int, positional: Sequence[Any]) -> int:
    count = len(positional)
    if not -count <= number < count:
        raise ValueError(
            f"static_argnums expected positions of the {count} positional arguments "
            f"{_listed(positional)} of {name_of(fun)}, got {number}."
        )
    return number % count


def _check_name(fun: Any, name: str, parameters: Sequence[Any]) -> None:
    known = [
        p
        for p in parameters
        if p.kind not in (_POSITIONAL_ONLY, _VAR_POSITIONAL, _VAR_KEYWORD)
    ]
    names = [p.name for p in known]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"static_argnames expected names of arguments {_listed(known)} of "
            f"{name_of(fun)}, got {name!r}{hint}"
        )


def _listed(parameters: Sequence[Any]) -> str:
    return f"({', '.join(p.name for p in parameters)})"


class Flat(NamedTuple):
    """A tree that is not put together: its nodes may take nothing but arrays.

    Attributes:
      structure: the tree's.
      paths: of each leaf its keys, outermost first.
      types: of each leaf.
    """

    structure: Any
    paths: tuple[tuple[Any, ...], ...]
    types: tuple[Any, ...]

    def parts(self) -> list[Flat]:
        """Returns the elements of a tuple or list; nothing of anything else."""
        kind, _ = self.structure.node_data() or (object, None)
        if not issubclass(kind, (tuple, list)):
            return []
        parts, start = [], 0
        for inner in self.structure.children():
            at = slice(start, start := start + inner.num_leaves)
            paths = tuple(path[1:] for path in self.paths[at])
            parts.append(Flat(inner, paths, self.types[at]))
        return parts


def not_a_function(given: Any) -> str:
    """Returns how an error describes what came in place of a function."""
    leaves = [x for x in tree_util.tree_leaves(given) if _is_traced(x)]
    if not leaves:
        return f"{given!r} of type {type(given).__name__}"
    is_one = len(leaves) == 1 and leaves[0] is given
    dtype, shape = leaves[0].dtype, list(leaves[0].shape)
    what = (
        f"an array, {dtype}{shape}" if is_one else f"a {type(given).__name__} of arrays"
    )
    return f"{what}: was the function called? Give the function itself"


def wraps(fun: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.wraps` for anything callable, partial objects and modules too."""
    inner = innermost(fun)
    # What a function carries is copied; the fields of a module are no business here.
    updated = ("__dict__",) if inspect.isfunction(fun) else ()
    functools.update_wrapper(wrapped, inner, updated=updated)
    wrapped.__wrapped__ = fun  # type: ignore[attr-defined]
    return wrapped


def pure_call(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> contextlib.AbstractContextManager[tuple[Any, Any, Any, Callable[[Any], Any]]]:
    """Makes a call one of a function of trees, whose arguments do not change.

    Returns:
      A context manager that gives a function, its arguments, its keyword arguments,
      and what makes `fun`'s result of the function's result. They are `fun` itself and
      what was given, unless Flax NNX is in use: its modules change in place.
    """
    if "flax.nnx" in sys.modules:
        from jmp_rewrite import _nnx  # it imports Flax

        return _nnx.split(fun, args, kwargs, wraps)
    return contextlib.nullcontext((fun, args, kwargs, lambda result: result))


def call_of_arrays(
    fun: Callable[..., Any], args: Any, kwargs: Any, call: Callable[..., Any]
) -> Any:
    """Calls a function; of a method of a Flax Linen module, one of its variables.

    Args:
      fun: the function.
      args: its arguments.
      kwargs: its arguments by name.
      call: what calls it: `(fun, args, kwargs) -> result`.
    """
    if "flax.linen" in sys.modules:
        from jmp_rewrite import _linen  # it imports Flax

        if _linen.is_bound(args):
            return _linen.call(fun, args, kwargs, call)
    return call(fun, args, kwargs)


def user_result(results: Flat) -> tuple[Flat, int]:
    """Returns the result of `fun` itself, of the result of a `pure_call`.

    With it comes the number of arrays before it: changes of modules.
    """
    if "flax.nnx" not in sys.modules:
        return results, 0
    changes, result = results.parts()
    return result, len(changes.types)


def changed(arguments: Any, results: Flat) -> dict[int, int]:
    """Returns which results of a `pure_call` are changes of modules among arguments.

    Args:
      arguments: of the function that `pure_call` gives.
      results: its results.

    Returns:
      Number of an array among the results -> of the array that it takes the place of.
    """
    if "flax.nnx" not in sys.modules:
        return {}
    leaves = tree_util.tree_leaves_with_path(arguments)
    places = {path: i for i, (path, _) in enumerate(leaves)}
    old = [leaf for _, leaf in leaves]
    changes, _ = results.parts()
    return {
        i: places[path]
        for i, (path, new) in enumerate(zip(changes.paths, changes.types, strict=True))
        if path in places
        and new.shape == old[places[path]].shape
        and new.dtype == old[places[path]].dtype
    }


def same_places(old: Any, new: Any) -> list[int] | None:
    """Returns for each leaf of a tree which leaf of another one has its place.

    Args:
      old: the structure of the other one, among the arguments of a `pure_call`.
      new: the structure of the tree, among its results. A module that is among the
        arguments, too, is changed there, and has no leaves.

    Returns:
      The numbers of the leaves; None if the trees differ.
    """
    found: list[int] = []
    stack = [(old, new, 0)]
    while stack:
        before, after, first = stack.pop()
        if before == after:
            found += range(first, first + before.num_leaves)
            continue
        pair = before.node_data(), after.node_data()
        if None in pair or pair[0][0] is not pair[1][0]:
            return None
        (kind, one), (_, other) = pair
        if is_same := _is_same_module(kind, one, other):
            found += range(first, first + after.num_leaves)
            continue
        children = before.children(), after.children()
        if is_same is False or one != other or len({*map(len, children)}) > 1:
            return None
        inner = []
        for each in zip(*children, strict=True):
            inner.append((*each, first))
            first += each[0].num_leaves
        stack += reversed(inner)
    return found


def _is_same_module(kind: type, old: Any, new: Any) -> bool | None:
    """Whether two nodes are one module, or hold the same; None if they are none."""
    if "flax.nnx" not in sys.modules:
        return None
    from jmp_rewrite import _nnx  # it imports Flax

    return _nnx.is_same(old, new) if _nnx.is_module(kind) else None


def merged(args: Any) -> Any:
    """Returns arguments of a `pure_call` as `fun` takes them, in new modules."""
    if "flax.nnx" not in sys.modules:
        return args
    from jmp_rewrite import _nnx  # it imports Flax

    return _nnx.merged(args)


def mapped(fun: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the leaves of a tree; modules come out as new ones.

    `tree_map` would make two of what such modules share.
    """
    with pure_call(fun, (tree,), {}) as (_, args, _, _):
        return merged(tree_util.tree_map(fun, args))[0]
