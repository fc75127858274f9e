"""A cost as a table for a notebook, and as a page: no script, no network."""

from __future__ import annotations

from html import escape
from typing import Any

from jmp_rewrite._cost import text

_STYLE = (
    "border-collapse:collapse;font-variant-numeric:tabular-nums;"
    "font-size:0.9em;color:inherit;background:transparent"
)
_CELL = "padding:0.15em 0.7em;border-bottom:1px solid rgba(128,128,128,0.35)"


def table(cost: Any) -> str:
    """Returns the table and what stands under it."""
    head = "".join(_cell("th", name, i) for i, name in enumerate(text.COLUMNS))
    rows = "".join(
        f"<tr>{''.join(_cell('td', cell, i) for i, cell in enumerate(row))}</tr>"
        for row in text.table(cost)
    )
    said = "".join(f"<div>{escape(note)}</div>" for note in text.notes(cost))
    return (
        f"<div><div><b>{escape(text.title(cost))}</b></div>"
        f'<div style="overflow-x:auto"><table style="{_STYLE}">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{said}</div>"
    )


def page(cost: Any) -> str:
    """Returns the same as an HTML page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(text.title(cost))}</title>"
        '<body style="font-family:system-ui,sans-serif;margin:2em">'
        f"{table(cost)}</body></html>\n"
    )


def _cell(tag: str, content: str, column: int) -> str:
    align = "left" if column < 2 else "right"
    return (
        f'<{tag} style="{_CELL};text-align:{align}">{escape(content.strip())}</{tag}>'
    )
