"""A report on a function that a command line names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_rewrite import _transform
from jmp_rewrite._explain.explain import explain
from jmp_rewrite._explain.report import Report
from jmp_rewrite._policy import Policy

# As a printed jaxpr shows types.
_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "bool": "bool",
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
}
_DEFAULT = "mixed_bfloat16"
_LISTED = 8


def report(
    name: str, shapes: Sequence[str] | None = None, policy: str | None = None
) -> Report:
    """Explains a function that is named, under a policy.

    Args:
      name: "module:function", or "file.py:function".
      shapes: of its arguments, as "f32[8,2]"; None if the function takes none and
        returns what is to be explained and its arguments.
      policy: None for the function's own, or "mixed_bfloat16".

    Raises:
      ImportError: if the module cannot be imported.
      ValueError: if there is no such function, or it does not return that.
    """
    fun = _find(name)
    if shapes is None:
        fun, args = _returned(name, fun)
    else:
        args = tuple(_type(text) for text in shapes)
    own = _transform.undecorated(fun).policy
    chosen = Policy(policy or _DEFAULT) if policy or own is None else own
    return explain(fun, chosen)(*args)


def _find(name: str) -> Callable[..., Any]:
    module, colon, path = name.rpartition(":")
    if not colon or not module or not path:
        raise ValueError(f"expected MODULE:FUNCTION, as in train:job, got {name!r}.")
    found: Any = _module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [n for n in vars(found) if callable(getattr(found, n))]
            known = [n for n in known if not n.startswith("_")]
            near = difflib.get_close_matches(part, known, n=3) or known[:_LISTED]
            raise ValueError(
                f"{module!r} has no function {path!r}; it has: {', '.join(near)}"
                f"{', ...' if len(near) < len(known) else '.'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name!r} is no function but {type(found).__name__}.")
    return found


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(name)
    path = pathlib.Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"there is no file {name!r}.")
    sys.path.insert(0, str(path.parent.resolve()))  # for what it imports
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _returned(name: str, fun: Callable[..., Any]) -> tuple[Any, tuple[Any, ...]]:
    """Calls a function that returns what to explain and its arguments."""
    needed = [
        p.name
        for p in inspect.signature(fun).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"{name!r} takes arguments ({', '.join(needed)}): give their types with "
            "--shapes, as f32[8,2], or name a function that returns (function, "
            "arguments)."
        )
    found = fun()
    if isinstance(found, tuple) and len(found) == 2:
        step, args = found
        if callable(step) and isinstance(args, (tuple, list)):
            return step, tuple(args)
    raise ValueError(
        f"{name!r} expected to return (function, arguments), as in `return train_step, "
        f"(params, opt_state, batch)`, got {type(found).__name__}."
    )


def _type(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", text.replace(" ", ""))
    if match is None or match[1] not in _DTYPES:
        raise ValueError(
            f"expected the type of an array, as f32[8,128] or i32[], got {text!r}."
        )
    shape = tuple(int(n) for n in match[2].split(",") if n)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(_DTYPES[match[1]]))
