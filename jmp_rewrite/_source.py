"""What the user wrote: functions, and the own line of an equation, past libraries.

JAX keeps the Python frames that made an equation. The innermost one outside of JAX
itself is often a line of Flax or optax; what a reader wants is the line of the model.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from jmp_rewrite import _compat

# The name scope of the multiplication by the loss scale.
SCALED = "jmp_rewrite.scale_loss"
# That of the division by it.
UNSCALED = "jmp_rewrite.unscale"
# That in which an update looks at its gradients, where it does not see who made them;
# the loss scale follows, if it is a fixed number.
UPDATED = "jmp_rewrite.update:"

# Libraries whose lines say less than those of their callers.
_LIBRARIES = (
    "chex",
    "einops",
    "equinox",
    "flax",
    "haiku",
    "jax",
    "jaxlib",
    "jaxtyping",
    "jmp_rewrite",
    "keras",
    "optax",
)


def check_kind(fun: Any, by: str) -> None:
    """Refuses what a call does not run: a generator, a coroutine, a module's class.

    Raises:
      TypeError: that names it, and what was to be decorated by `by`.
    """
    what = ""
    if inspect.isclass(fun) and any("__call__" in vars(c) for c in fun.__mro__):
        what = "class, whose objects are called: decorate its method __call__"
    elif inspect.isclass(fun) and not _is_container(fun):
        what = "class: decorate the methods that compute"
    elif isinstance(fun, staticmethod):
        what = f"static method: put @staticmethod above @{by}"
    elif isinstance(fun, classmethod):
        what = f"class method: put @classmethod above @{by}"
    elif inspect.isgeneratorfunction(fun) or inspect.isasyncgenfunction(fun):
        what = "generator, which runs after the call: decorate what it calls"
    elif inspect.iscoroutinefunction(fun):
        what = "coroutine, which runs after the call: decorate what it calls"
    if what:
        raise TypeError(f"{by} expected a function, got {name_of(fun)}, a {what}.")


def _is_container(kind: type) -> bool:
    """Whether a class makes a container of what it is given, as a named tuple."""
    return issubclass(kind, (tuple, list, dict)) or is_dataclass(kind)


def name_of(fun: Any) -> str:
    inner = innermost(fun)
    return getattr(inner, "__qualname__", type(inner).__name__)


def innermost(fun: Any) -> Any:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun


def is_scaling(eqn: Any) -> bool:
    """Whether an equation multiplies a cotangent by the loss scale."""
    return scope_with(SCALED, eqn) is not None


def scope_with(mark: str, eqn: Any) -> str | None:
    """Returns the name of a scope around an equation with a mark in it, if any has."""
    elements = _compat.scope_elements(eqn.source_info.name_stack)
    scopes = (e.name for e in elements if _compat.is_scope(e))
    return next((name for name in scopes if mark in name), None)


def user_level() -> int:
    """Returns the `stacklevel` for a warning at the innermost line of a user's.

    It is called in the argument of `warnings.warn`: frames of this library, of those
    above and of Python are not the user's. `warnings.warn(skip_file_prefixes=...)`
    does a part of it from Python 3.12 on.
    """
    lines = Lines()
    level, frame = 1, sys._getframe(1)
    while frame.f_back and lines.is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


class Line(NamedTuple):
    """A line of somebody's source.

    Attributes:
      file: its path; "" if unknown.
      number: of the line, from 1.
      function: the qualified name of the function that it stands in.
    """

    file: str = ""
    number: int = 0
    function: str = ""

    def __str__(self) -> str:
        """Returns the line as reports show it, `model.py:41`; "" if it is unknown."""
        if not self.file:
            return ""
        folder, name = os.path.split(self.file)
        if name == "__init__.py":
            name = f"{os.path.basename(folder)}/{name}"
        if "ipykernel" in folder or name.startswith("<ipython"):
            name = "cell"
        return f"{name}:{self.number}"


UNKNOWN = Line()


class Caller(NamedTuple):
    """An equation that holds the jaxpr in which another one stands.

    Attributes:
      eqn: the equation.
      outer: the equation that holds this one; None at the top.
    """

    eqn: Any
    outer: Caller | None


def where(*eqns: Any, unknown: str = "an unknown line") -> str:
    """Returns the user's line of an equation, and of what it stands in, outwards."""
    caller = None
    for eqn in reversed(eqns[1:]):
        caller = Caller(eqn, caller)
    return str(Lines().of(eqns[0], caller)) or unknown


@functools.cache
def _standard_library() -> str:
    return sysconfig.get_paths()["stdlib"] + os.sep


class Lines:
    """Finds the lines of equations, and remembers what it found."""

    def __init__(self) -> None:
        self._skip: dict[str, bool] = {}
        self._known: dict[tuple[str, tuple[Any, int]], Line] = {}
        modules = (sys.modules.get(name) for name in _LIBRARIES)
        self._libraries = tuple(
            path + os.sep for m in modules for path in getattr(m, "__path__", ())
        )
        self._jax = os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep
        self._own = os.path.dirname(__file__) + os.sep
        self._python = _standard_library()

    def of(self, eqn: Any, caller: Caller | None) -> Line:
        """Returns the user's line of an equation that stands inside `caller`.

        Inside a jaxpr JAX keeps the frames below its function alone, since it may have
        many callers: those of a `jax.numpy` function have no line of the user's.
        """
        first = eqn
        while True:
            if frame := self._frame(eqn, self.is_library):
                return self._line(eqn, frame)
            if caller is None:
                break
            eqn, caller = caller.eqn, caller.outer
        frame = self._frame(first, self._is_jax)
        return self._line(first, frame) if frame else UNKNOWN

    def _frame(self, eqn: Any, skips: Callable[[str], bool]) -> tuple[Any, int] | None:
        frames = _compat.frames(eqn)
        return next((f for f in frames if not skips(f[0].co_filename)), None)

    def _line(self, eqn: Any, frame: tuple[Any, int]) -> Line:
        code = frame[0]
        key = code.co_filename, frame  # equal code of two files is equal
        if key not in self._known:
            number = _compat.frame_line(eqn, *frame)
            self._known[key] = Line(code.co_filename, number, code.co_qualname)
        return self._known[key]

    def is_library(self, name: str) -> bool:
        if name not in self._skip:
            in_python = name.startswith(self._python) and "-packages" not in name
            own = name.startswith(("<frozen", *self._libraries))
            self._skip[name] = in_python or own
        return self._skip[name]

    def _is_jax(self, name: str) -> bool:
        return name.startswith((self._jax, self._own, "<frozen"))
