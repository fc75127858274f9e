"""Which line of the user's an equation comes from.

JAX traces `jnp.var` and its kind once and keeps the jaxpr, with the source line of the
first call. So inside a function that is not the user's own, the line is that of the
call.
"""

from __future__ import annotations

import functools
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex

from jmp_rewrite import _compat

UNKNOWN = "an unknown line"


class Line(NamedTuple):
    """A source line: file, number and function.

    Attributes:
      file: its whole path; "" if unknown.
      number: from 1 on; 0 if unknown.
      function: the name of the function that it stands in.
    """

    file: str = ""
    number: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{pathlib.Path(self.file).name}:{self.number}" if self.file else UNKNOWN


_JAX = str(pathlib.Path(jax.__file__).parent)
_OWN = str(pathlib.Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)


def line_of(eqn: Any, calls: Sequence[Any] = ()) -> Line:
    """Returns the user's line of an equation.

    Args:
      eqn: the equation.
      calls: the equations whose jaxprs hold it, outermost first.
    """
    chain = [*calls, eqn]
    depth = 0
    while depth < len(calls) and _holds_users_code(calls[depth]):
        depth += 1
    for candidate in (*chain[depth::-1], *chain[depth + 1 :]):
        if line := _line(candidate.source_info.traceback):
            return line
    return Line()


def _line(traceback: Any) -> Line | None:
    """Returns the innermost frame of the user's own, else of another library."""
    if traceback is None:
        return None
    other = None
    for frame in traceback.frames:
        if _is_users(frame.file_name):
            return Line(frame.file_name, frame.line_num, frame.function_name)
        if other is None and not _is_hidden(frame.file_name):
            other = Line(frame.file_name, frame.line_num, frame.function_name)
    return other


def _holds_users_code(eqn: Any) -> bool:
    """Tells whether what an equation holds was written by the user."""
    for held in jex.jaxprs_in_params(eqn.params):
        info = getattr(_compat.open_jaxpr(held), "debug_info", None)
        # "name at file:line"; None where JAX has lost it.
        source = getattr(info, "func_src_info", None) or ""
        _, _, where = source.rpartition(" at ")
        if where and not _is_users(where.rpartition(":")[0]):
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _is_hidden(file: str) -> bool:
    """Tells JAX's and this library's own files."""
    return file.startswith(("<frozen", _JAX, _OWN))


@functools.lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    return not _is_hidden(file) and not file.startswith(_LIBRARIES)
