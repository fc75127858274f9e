"""A diagnosis as text: what to do first, then the worst lines as a table."""

from __future__ import annotations

import importlib.util
import io
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmp_rewrite._diagnose.blame import Finding

# Lines that the table shows; `diagnosis.equations` has the rest.
_LINES = 12
COLUMNS = ("line", "scope", "equation", "error", "own", "lost", "blame")
LEGEND = (
    "error: against float32, the mean of the values' own relative errors, those near "
    "zero too, or that of the norm if it is larger (of results it is that of the norm "
    "alone); own: what the equation itself adds; lost: values that overflow or vanish "
    "in it; blame: how much of what it adds reaches a result; "
    "\u2190: backward pass; +n: n more equations of the line"
)
# The columns on the left, of words, and how wide each is at least.
_WORDS = (14, 10, 14)


class Group(NamedTuple):
    """The findings of one line: the worst of them, and how many others there are."""

    worst: Finding
    others: int


def text(d: Any) -> str:
    """Returns a diagnosis for a terminal of the width that this one has."""
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    head = [
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False)
        for line in summary(d)
    ]
    groups = worst_lines(d.equations)
    table = _table(groups, width)
    legend = textwrap.fill(LEGEND, width) if table else ""
    return "\n".join([*head, *_policy_lines(d), "", table, "", legend]).rstrip()


def summary(d: Any) -> list[str]:
    """Returns the lines of the report."""
    verdict = "within" if d.error <= d.tolerance else "above"
    path, error = max(d.results.items(), key=lambda r: r[1], default=("", 0.0))
    judged = "other results" if d.is_spoilt else "results"
    lines = [
        f"{d.name} under {d.diagnosed!r}",
        *filter(None, [d.about_reference]),
        *d.endless,
        f"largest error of the {judged} (by norm): {error:.2g}"
        + (f" in {path!r}" if error else "")
        + f", {verdict} the tolerance of {d.tolerance:g}",
    ]
    if d.scaling:
        lines.append(f"fix: {d.scaling}")
    if d.worst:
        lines.append(f"worst: {place(d.worst)}: {d.why(d.worst)}")
    first = d.first_nonfinite
    if first and d.worst and first.index != d.worst.index:
        lines.append(f"first Inf or NaN: {place(first)}: {d.why(first)}")
    said = (d.about_reference, d.scaling, *d.endless)
    return [*lines, *(a for a in d.advice if a not in said)]


def _policy_lines(d: Any) -> list[str]:
    if d.error <= d.tolerance or d.scaling or d.endless:
        return []
    if d.policy is None:
        said = "no scopes or rules bring it under: "
        if not d.tried_errors:
            return [said + "the program rounds to half itself"]
        return [
            f"{said}the least of {len(d.tried)} runs is {min(d.tried_errors):.2g}. The "
            "program rounds to half itself, or two runs in float32 differ by as much."
        ]
    runs = f"{len(d.tried)} run{'s' if len(d.tried) > 1 else ''}"
    return [
        f"fix, tested in {runs} (error {d.policy_error:.2g}):",
        f"    policy = jmpr.{d.policy!r}",
    ]


def place(finding: Finding) -> str:
    """Returns where a finding is: line, scope, direction and iteration."""
    parts = [f"in {finding.scope}"] if finding.scope else []
    parts += ["backward"] if finding.backward else []
    if finding.iteration:
        parts.append(f"iteration {', '.join(map(str, finding.iteration[::-1]))}")
    inside = f" ({'; '.join(parts)})" if parts else ""
    return f"{finding.line if finding.line.file else 'an unknown line'}{inside}"


def worst_lines(equations: Sequence[Finding], most: int = _LINES) -> list[Group]:
    """Returns the worst lines of the program, each with its worst finding."""
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in equations:
        key = (finding.line, finding.scope, finding.backward)
        groups.setdefault(key, []).append(finding)
    return [Group(g[0], len(g) - 1) for g in list(groups.values())[:most]]


def cells(group: Group) -> list[str]:
    """Returns a row of the table, as `COLUMNS` names them."""
    finding = group.worst
    where = ",".join(map(str, finding.iteration[::-1]))
    words = [
        "\u2190" if finding.backward else "",
        finding.primitive,
        f"\u2192 {finding.dtype}" if finding.kind == "cast" else "",
        f"+{group.others}" if group.others else "",
    ]
    lost = [
        f"{finding.overflowed:,} inf" if finding.overflowed else "",
        f"{finding.underflowed:,} zero" if finding.underflowed else "",
    ]
    return [
        f"{finding.line}" + (f" [{where}]" if where else ""),
        finding.scope,
        " ".join(filter(None, words)),
        "inf" if finding.nonfinite else f"{finding.error:.1e}",
        "inf" if finding.overflowed else f"{finding.introduced:.1e}",
        next(filter(None, lost), ""),
        f"{finding.blame:.1e}" if finding.blame else "",
    ]


def _table(groups: Sequence[Group], width: int) -> str:
    rows = [list(COLUMNS), *(cells(g) for g in groups)]
    if len(rows) == 1:
        return ""
    widths = _widths(rows, width)
    fitted = [[_fitted(c, w) for c, w in zip(r, widths, strict=True)] for r in rows]
    if importlib.util.find_spec("rich"):
        return _rich_table(fitted, width)
    return "\n".join(_plain_row(row, widths) for row in fitted)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Returns the columns' widths: words give way, the longest first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 3 * len(widths) > width:
        spare = [w - least for w, least in zip(widths, _WORDS, strict=False)]
        longest = spare.index(max(spare))
        if spare[longest] <= 0:
            break
        widths[longest] -= 1
    return widths


def _fitted(cell: str, width: int) -> str:
    """Cuts a cell in front: the end of a path says most."""
    return cell if len(cell) <= width else "\u2026" + cell[len(cell) - width + 1 :]


def _rich_table(rows: Sequence[Sequence[str]], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(rows[0]):
        side: Any = "left" if number < len(_WORDS) else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        color_system=None,
        highlight=False,
        force_jupyter=False,
        markup=False,  # the brackets of a scope's name are its own
        emoji=False,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _plain_row(row: Sequence[str], widths: Sequence[int]) -> str:
    shown = [
        cell.ljust(w) if i < len(_WORDS) else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(shown).rstrip()
