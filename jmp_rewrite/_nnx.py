"""Flax NNX modules as arguments and results, as `nnx.jit` takes them.

A function that changes a module in place is a function from arrays to arrays once its
modules are split into a structure and a state: the changes come back as results, and
are written into the caller's modules. Structure and shared references may change, too.

This module imports Flax, so nothing imports it before a program has done so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx
from jax import tree_util

from jmp_rewrite._precision import ParameterPath, key_names

_TAG = "jmp_rewrite.mixed_precision"
# Flax 0.10 and 0.11 know no `Pytree`: what is no module of theirs must still run.
_PYTREE = nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object


class _Parts:
    """A module taken apart: a tree node whose leaves are the module's arrays."""

    def __init__(self, graphdef: Any, paths: Any, structure: Any, leaves: Any) -> None:
        self.graphdef = graphdef
        self.paths = paths
        self.structure = structure
        self.leaves = leaves

    @classmethod
    def of(cls, graphdef: Any, state: Any) -> _Parts:
        """Takes apart what `nnx.split` returns."""
        flat, structure = tree_util.tree_flatten_with_path(state)
        paths = tuple(_path(keys) for keys, _ in flat)
        return cls(graphdef, paths, structure, tuple(leaf for _, leaf in flat))

    @property
    def state(self) -> Any:
        return tree_util.tree_unflatten(self.structure, self.leaves)


tree_util.register_pytree_with_keys(
    _Parts,
    lambda x: (
        tuple(zip(x.paths, x.leaves, strict=True)),
        (x.graphdef, x.paths, x.structure),
    ),
    lambda aux, leaves: _Parts(*aux, leaves),
)


def _path(keys: tuple[Any, ...]) -> ParameterPath:
    """Returns a leaf's path in its module; the variable around it is no part of it."""
    variable = tree_util.GetAttrKey("value")
    return ParameterPath(
        tuple(name for k in keys if k != variable for name in key_names(k))
    )


def _apart(fun: Any) -> tuple[Callable[..., Any], Any]:
    """Returns a function of the modules that `fun` holds, and its arguments; and these.

    They are the object of a method, a module that is called, and those that
    `functools.partial` was given.
    """
    if isinstance(fun, functools.partial):
        given = fun.args, fun.keywords
        inner, held = _apart(fun.func)

        @functools.wraps(inner, updated=())
        def call(modules: Any, *args: Any, **kwargs: Any) -> Any:
            first, named = _with_modules(given, modules[1])
            return inner(modules[0], *first, *args, **{**named, **kwargs})

        return call, (held, _modules_only(given, lambda module: True))
    module = fun.__self__ if inspect.ismethod(fun) else fun
    if isinstance(module, _PYTREE):
        return getattr(fun, "__func__", type(fun).__call__), module

    @functools.wraps(fun, updated=())
    def plain(module: None, *args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return plain, None


@contextlib.contextmanager
def split(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    wraps: Callable[[Any, Any], Any],
) -> Iterator[tuple[Callable[..., Any], Any, Any, Callable[[Any], Any]]]:
    """Makes a call of a function of modules a call of a function of arrays.

    Args:
      fun: the function. It may change its modules, and may itself be one.
      args: its arguments.
      kwargs: its keyword arguments.
      wraps: `(fun, new)` gives a new function the name and signature of `fun`.

    Yields:
      A function of trees of arrays; its arguments and keyword arguments; and what
      makes `fun`'s result from its result and changes the modules.
    """
    call, module = _apart(fun)
    if _modules(module):
        args = (module, *args)
    else:
        call = fun

    def pure(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _merge((args, kwargs), is_inner=True)
        before = {id(x): (x, _contents(x)) for x in _modules((args, kwargs))}
        result = call(*args, **kwargs)
        # What did not change is not written back: it may belong to an outer trace,
        # where NNX lets nobody write. A result may share it, and then has to find it.
        is_needed = bool(_modules(result))

        def is_written(module: Any) -> bool:
            known = before.get(id(module))
            return is_needed or known is None or not _is_same(module, known[1])

        return _split((_modules_only((args, kwargs), is_written), result))

    modules = _modules((args, kwargs))

    def finish(results: Any) -> Any:
        with _unchanged_on_error(modules):
            return _merge(results, is_inner=False)[1]

    with nnx.update_context(_TAG):
        args, kwargs = _split((args, kwargs))
        yield wraps(call, pure), args, kwargs, finish


@contextlib.contextmanager
def _unchanged_on_error(modules: Any) -> Iterator[None]:
    """Leaves modules as they were if NNX does not let them be changed.

    It takes their attributes away before it finds that they belong to an outer trace.
    """
    nodes = (node for _, node in nnx.iter_graph(modules) if isinstance(node, _PYTREE))
    before = [(node, dict(vars(node))) for node in nodes]
    try:
        yield
    except BaseException:
        for node, attributes in before:
            vars(node).clear()
            vars(node).update(attributes)
        raise


def _split(tree: Any) -> Any:
    return nnx.to_tree(
        tree,
        split_fn=lambda ctx, path, prefix, leaf: _Parts.of(*ctx.split(leaf)),
        ctxtag=_TAG,
    )


def _merge(tree: Any, is_inner: bool) -> Any:
    return nnx.from_tree(
        tree,
        merge_fn=lambda ctx, path, prefix, leaf: ctx.merge(leaf.graphdef, leaf.state),
        is_node_leaf=_is_parts,
        is_leaf=_is_parts,
        is_inner=is_inner,
        ctxtag=_TAG,
    )


def is_module(kind: type) -> bool:
    """Whether a tree node is a module that was taken apart."""
    return issubclass(kind, _Parts)


def is_same(old: Any, new: Any) -> bool:
    """Whether a result's module is an argument's, or one that holds the same names.

    Args:
      old: what a `_Parts` among the arguments holds beside its leaves.
      new: what one among the results does.
    """
    (before, paths, _), (after, other_paths, _) = old, new
    if isinstance(_root(after), nnx.graph.NodeRef):
        return bool(_root(after).index == _root(before).index)
    return bool(paths == other_paths)


def _root(graphdef: Any) -> Any:
    """Returns what a graph definition says of the module itself."""
    nodes = getattr(graphdef, "nodes", None)
    return nodes[0] if nodes else graphdef


def merged(tree: Any) -> Any:
    """Puts modules that were taken apart together again, as new ones."""
    return _merge(tree, is_inner=True)


def _is_parts(x: Any) -> bool:
    return isinstance(x, _Parts)


def _is_module(x: Any) -> bool:
    """Whether NNX passes a value by reference, as a module or a variable."""
    return isinstance(x, (_PYTREE, nnx.Variable))


def _modules(tree: Any) -> list[Any]:
    leaves = tree_util.tree_leaves(tree, is_leaf=_is_module)
    return [x for x in leaves if _is_module(x)]


def _contents(module: Any) -> tuple[Any, list[Any]]:
    """Returns the structure of a module and its arrays."""
    graphdef, state = nnx.split(module)
    return graphdef, tree_util.tree_leaves(state)


def _is_same(module: Any, before: tuple[Any, list[Any]]) -> bool:
    """Whether a module still has the same structure and the very same arrays."""
    graphdef, arrays = _contents(module)
    return (
        graphdef == before[0]
        and len(arrays) == len(before[1])
        and all(map(operator.is_, arrays, before[1]))
    )


def _with_modules(tree: Any, modules: Any) -> Any:
    """Returns a tree with other modules in place of its own; see `_modules_only`."""
    return tree_util.tree_map(
        lambda new, old: old if new is None else new,
        modules,
        tree,
        is_leaf=lambda x: x is None or _is_module(x),
    )


def _modules_only(tree: Any, is_written: Callable[[Any], bool]) -> Any:
    """Replaces by None what is no module, and what is not to be written back."""
    return tree_util.tree_map(
        lambda x: x if _is_module(x) and is_written(x) else None,
        tree,
        is_leaf=_is_module,
    )
