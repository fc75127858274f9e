"""The printed report: a document laid out as text that fits a terminal."""

from __future__ import annotations

import io
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from jmp_rewrite._explain.document import Document, Table, document
from jmp_rewrite._explain.listing import listing
from jmp_rewrite._explain.rows import Equation

_WIDTHS = (60, 160)  # of the text, whatever the terminal's
_WITHOUT_TERMINAL = 100
_LABELS = 18  # width of what stands in front of facts
_MANY = 100
_EQUATIONS = "Equations, in program order"


def render(report: Any, width: int | None = None, *, equations: bool = True) -> str:
    """Lays a report out as text, without colors.

    Args:
      report: the report.
      width: in characters; None for the terminal's, 100 where there is none.
      equations: whether to list all equations behind the summary.
    """
    if width is None:
        columns = shutil.get_terminal_size((_WITHOUT_TERMINAL, 24)).columns
        width = min(max(columns, _WIDTHS[0]), _WIDTHS[1])
    parts = document(report, equations=equations)
    try:
        from rich.console import Console
    except ImportError:
        lines: Iterator[str] = _plain(parts, width)
    else:
        out = io.StringIO()
        console = Console(file=out, width=width, color_system=None, force_jupyter=False)
        for part in rich_parts(parts):
            console.print(part)
        lines = iter(out.getvalue().splitlines())
    listed = _listed(parts.equations, width)
    return "\n".join(line.rstrip() for line in [*lines, *listed]) + "\n"


def _listed(equations: Sequence[Equation], width: int) -> Iterator[str]:
    if equations:
        yield from ("", _EQUATIONS, "")
        for row in listing(equations, width):
            yield from row.lines
        yield from _after(equations)


def _after(equations: Sequence[Equation]) -> Iterator[str]:
    """Says behind very many rows what has scrolled away."""
    if len(equations) > _MANY:
        yield from ("", f"  {len(equations):,} equations")
        yield "  report.text(equations=False): the summary alone"
        yield "  report.save_html(path): a page to sort and search them"


# ---- with rich


def rich_parts(parts: Document) -> Iterator[Any]:
    """Yields what rich prints of all but the equations."""
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    yield Text(f"{parts.title}\n", style="bold")
    facts = Grid.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="dim")
    for label, value in parts.facts:
        facts.add_row(label, Text(value))
    yield Padding(facts, (0, 0, 0, 2))
    if parts.advice:
        yield Text("\nAdvice", style="bold")
        listed = Grid.grid(padding=(0, 1))
        for number, sentence in enumerate(parts.advice, 1):
            listed.add_row(f"{number}.", Text(sentence))
        yield Padding(listed, (0, 0, 0, 2))
    for table in parts.tables:
        yield Text(f"\n{table.title}", style="bold")
        yield _rich_table(table)
        if table.note:
            yield Text(f"  {table.note}", style="dim")


def rich_rows(equations: Sequence[Equation], width: int) -> Iterator[Any]:
    """Yields what rich prints of the equations, with the reasons in color."""
    from rich.text import Text

    if not equations:
        return
    yield Text(f"\n{_EQUATIONS}\n", style="bold")
    rows = listing(equations, width)
    for row in itertools.islice(rows, 2):  # the head
        yield Text("\n".join(row.lines), style="dim")
    for row, equation in zip(rows, equations, strict=True):
        text = Text("\n".join(row.lines))
        at = 0
        for line in row.lines:
            text.stylize(_style(equation.reason), at + row.start, at + len(line))
            at += len(line) + 1
        yield text
    for line in _after(equations):
        yield Text(line, style="dim")


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        if column.share > 0:
            grid.add_column(column.title, ratio=column.share, overflow="fold")
        elif column.share:
            grid.add_column(column.title, no_wrap=True)
        else:
            grid.add_column(column.title, no_wrap=True, justify="right")
    for row in table.rows:
        grid.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    return grid


def _style(cell: str) -> str:
    """Colors cells as the HTML report does."""
    colors = {"half: ": "green", "full: ": "yellow", "cast: ": "magenta"}
    return next((c for start, c in colors.items() if cell.startswith(start)), "")


# ---- without


def _plain(parts: Document, width: int) -> Iterator[str]:
    yield from (parts.title, "")
    for label, value in parts.facts:
        yield from _hanging(f"  {label:<{_LABELS}}", value, width)
    if parts.advice:
        yield from ("", "Advice")
    for number, sentence in enumerate(parts.advice, 1):
        yield from _hanging(f"  {number}. ", sentence, width)
    for table in parts.tables:
        yield from ("", table.title, "")
        yield from _plain_table(table, width)
        if table.note:
            yield from ("", f"  {table.note}")


def _hanging(head: str, text: str, width: int) -> Iterator[str]:
    """Wraps a text, with its first line after a head."""
    lines = textwrap.wrap(text, width - len(head)) or [""]
    for start, line in zip(
        itertools.chain([head], itertools.repeat(" " * len(head))), lines, strict=False
    ):
        yield start + line


def _plain_table(table: Table, width: int) -> Iterator[str]:
    head = [c.title for c in table.columns]
    widths = _column_widths(table, width)
    for row in [head, *table.rows]:
        wrapped = [
            [
                part
                for line in cell.split("\n")
                for part in textwrap.wrap(line, w) or [""]
            ]
            for cell, w in zip(row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            cells = [
                part.ljust(w) if column.share else part.rjust(w)
                for part, w, column in zip(parts, widths, table.columns, strict=True)
            ]
            yield "  " + "  ".join(cells)
        if row is head:
            yield "  " + "  ".join("-" * w for w in widths)


def _column_widths(table: Table, width: int) -> list[int]:
    """Gives numbers and words what they need, and shares out the rest."""
    cells = [[c.title for c in table.columns], *table.rows]
    needs = [
        max(len(line) for row in cells for line in row[i].split("\n"))
        for i in range(len(table.columns))
    ]
    fixed = sum(n for n, c in zip(needs, table.columns, strict=True) if c.share <= 0)
    free = width - 2 * len(needs) - fixed
    shares = sum(c.share for c in table.columns if c.share > 0)
    widths = [
        max(free * c.share // shares, 8) if c.share > 0 else need
        for need, c in zip(needs, table.columns, strict=True)
    ]
    while sum(widths) + 2 * len(widths) > width:  # then numbers are wrapped as well
        widths[widths.index(max(widths))] -= 1
    return widths
