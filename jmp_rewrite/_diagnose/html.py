"""A diagnosis as a table for a notebook: one element, no script, no network."""

from __future__ import annotations

from html import escape
from typing import Any

from jmp_rewrite._diagnose.text import COLUMNS, cells, summary, worst_lines

_LINES = 30
_STYLE = (
    "border-collapse:collapse;font-variant-numeric:tabular-nums;"
    "font-size:0.9em;color:inherit;background:transparent"
)
_CELL = "padding:0.15em 0.7em;border-bottom:1px solid rgba(128,128,128,0.35)"


def html(d: Any) -> str:
    """Returns the summary and the worst lines; hovering over a line says why."""
    said = "".join(f"<div>{escape(line)}</div>" for line in summary(d))
    head = "".join(_cell("th", name, i) for i, name in enumerate(COLUMNS))
    rows = []
    for group in worst_lines(d.equations, _LINES):
        own = "".join(_cell("td", c, i) for i, c in enumerate(cells(group)))
        rows.append(f'<tr title="{escape(d.why(group.worst))}">{own}</tr>')
    return (
        f"<div>{said}{_policy(d)}"
        f'<div style="overflow-x:auto"><table style="{_STYLE}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "</div>"
    )


def _cell(tag: str, content: str, column: int) -> str:
    align = "left" if column < 3 else "right"
    return f'<{tag} style="{_CELL};text-align:{align}">{escape(content)}</{tag}>'


def _policy(d: Any) -> str:
    if d.error <= d.tolerance or d.policy is None:
        return ""
    return f"<pre>policy = jmpr.{escape(repr(d.policy))}</pre>"
