"""All equations as text: a row each, however many there are."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jmp_rewrite._explain.rows import Equation

_TITLES = ("line", "scope", "primitive", "category", "dtype", "reason")
_AT_MOST = (24, 28, 22)  # of line, scope and primitive, where there is room for them
_AT_LEAST = 8
_REASON = 24
_GAP = "  "


class Listed(NamedTuple):
    """A row, laid out.

    Attributes:
      lines: of text.
      start: the column at which the reason starts.
    """

    lines: Sequence[str]
    start: int


def listing(rows: Sequence[Equation], width: int) -> Iterator[Listed]:
    """Yields a head, and one row for each equation, in program order.

    rich measures every cell of a table before it prints the first, which takes a minute
    for the 10,000 equations of a large model: so this is laid out by hand.

    Args:
      rows: of the report.
      width: in characters.
    """
    cells = [
        (r.line, r.layer, r.primitive, r.category, r.dtype, r.reason) for r in rows
    ]
    widths = _widths(cells, width)
    wrap = functools.cache(_wrap)
    start = len(_GAP) + sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    for row in [_TITLES, tuple("-" * w for w in widths), *cells]:
        wrapped = [wrap(cell, w) for cell, w in zip(row, widths, strict=True)]
        lines = [
            _GAP + _GAP.join(p.ljust(w) for p, w in zip(parts, widths, strict=True))
            for parts in itertools.zip_longest(*wrapped, fillvalue="")
        ]
        yield Listed([line.rstrip() for line in lines], start)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) or [""]


def _widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Gives every column what its longest cell needs, and the reason what is left."""
    *needs, _ = (max(map(len, column)) for column in zip(_TITLES, *cells, strict=True))
    widths = [
        min(n, m) for n, m in itertools.zip_longest(needs, _AT_MOST, fillvalue=99)
    ]
    free = width - len(_GAP) * len(_TITLES)
    while free - sum(widths) < _REASON:
        widest = max(range(len(_AT_MOST)), key=widths.__getitem__)
        if widths[widest] <= _AT_LEAST:
            break
        widths[widest] -= 1
    return [*widths, max(free - sum(widths), _AT_LEAST)]
