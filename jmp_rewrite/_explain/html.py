"""The report as one HTML file that needs no network."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jmp_rewrite._explain import summary
from jmp_rewrite._explain.rows import Equation
from jmp_rewrite._units import bytes_text, count_text, flops_text

_LARGEST = 10
# Columns of words are kept as indices into a list of the distinct ones.
_WORDS = (
    "primitive",
    "category",
    "kind",
    "memory",
    "dtype",
    "reason",
    "line",
    "file",
    "scope",
    "layer",
    "phase",
    "operands",
    "results",
)
_NUMBERS = ("trips", "flops", "bytes", "stored_bytes")


def page(report: Any) -> str:
    """Returns the report as an HTML page."""
    parts = {
        "title": html.escape(f"{report.name} in mixed precision"),
        "name": html.escape(report.name),
        "policy": html.escape(repr(report.policy)),
        "tiles": "".join(_tiles(report)),
        "advice": _advice(report.advice),
        "largest": _largest(report),
        "scopes": _scopes(report),
        "footer": html.escape(f"jmp_rewrite, JAX {jax.__version__}"),
        "data": _data(report.equations),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template())


def _template() -> str:
    file = importlib.resources.files("jmp_rewrite._explain").joinpath("report.html")
    return file.read_text(encoding="utf-8")


def style() -> str:
    """Returns the style sheet of the page."""
    return _template().partition("<style>")[2].partition("</style>")[0]


def notebook(report: Any) -> str:
    """Returns the page in a frame, so that its styles stay its own."""
    return framed(page(report), "mixed precision report", 720)


def framed(page: str, title: str, height: int) -> str:
    """Returns a page in a frame of a notebook."""
    return (
        f'<iframe style="width: 100%; height: {height}px; border: 0" title="{title}" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def _data(rows: Sequence[Equation]) -> str:
    """Returns the rows column by column, as JSON that may stand in a script."""
    words: dict[str, list[str]] = {}
    columns: dict[str, list[int]] = {}
    for name in _WORDS:
        index: dict[str, int] = {}
        columns[name] = [index.setdefault(_text(r, name), len(index)) for r in rows]
        words[name] = list(index)
    for name in _NUMBERS:
        columns[name] = [getattr(r, name) for r in rows]
    text = json.dumps({"words": words, "rows": columns}, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _text(row: Equation, name: str) -> str:
    value = getattr(row, name)
    return value if isinstance(value, str) else " ".join(value)


def _tiles(report: Any) -> Iterator[str]:
    half, full = (
        sum(r.stored_bytes for r in report.equations if r.memory == memory)
        for memory in ("half", "full")
    )
    if report.flops:
        rest = report.flops * (1 - report.half_flops)
        bar = _bar([("half", report.flops - rest), ("full", rest)])
        what = f"of {flops_text(report.flops)} in matrix multiplications are half"
        yield tile(f"{report.half_flops:.0%}", what, bar)
    bar = _bar([("half", half), ("full", full)])
    yield tile(bytes_text(half + full), "of stored values: half, float32", bar)
    before, after = report.residual_bytes_before, report.residual_bytes
    if before:
        read = f"at most that the backward pass reads, {bytes_text(before)} in float32"
        bar = _bar([("half", after), ("", max(before - after, 0))])
        yield tile(bytes_text(after), read, bar)
    moved = f", {bytes_text(report.cast_bytes)} read and written"
    yield tile(f"{report.casts:,}", f"casts{moved if report.casts else ''}")
    left = len(report.not_rewritten)
    more = f", {count_text(left, 'kernel or callback')} left alone" if left else ""
    yield tile(f"{len(report.equations):,}", f"equations{more}")


def tile(number: str, what: str, bar: str = "") -> str:
    """Returns a card with a number, and what it is."""
    return (
        f'<div class="tile"><b>{html.escape(number)}</b>'
        f"<span>{html.escape(what)}</span>{bar}</div>"
    )


def _bar(parts: Iterable[tuple[str, float]]) -> str:
    parts = list(parts)
    total = sum(size for _, size in parts) or 1
    inside = "".join(
        f'<i class="{name}" style="width:{100 * size / total:.2f}%"></i>'
        for name, size in parts
        if size and name
    )
    return f'<div class="bar">{inside}</div>'


def _advice(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f'<section><h2>Advice</h2><ol class="advice">{items}</ol></section>'


def _largest(report: Any) -> str:
    groups = summary.largest_full(report.equations, report.layers)[:_LARGEST]
    if not groups:
        return ""
    rows = "".join(
        f'<tr><td class="n">{bytes_text(g.stored_bytes)}</td>'
        f"<td><code>{html.escape(g.value)}</code></td>"
        f'<td class="skip">{html.escape(g.first.primitive)}</td>'
        f'<td class="wide">{html.escape(g.layer)} <code class="dim">'
        f"{html.escape(g.first.line)}</code></td>"
        f'<td class="wide">{html.escape(g.first.reason)}</td></tr>'
        for g in groups
    )
    head = '<th class="n">bytes</th><th>value</th><th>made by</th><th>scope</th>'
    return (
        "<section><h2>Largest values stored in float32</h2>"
        '<p class="dim">The optimizer update is excluded.</p>'
        f'<div class="card scroll"><table class="stack"><thead><tr>{head}'
        f"<th>reason</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _scopes(report: Any) -> str:
    found = summary.scopes(report.equations, report.layers)
    most = max((s.bytes for s in found), default=0) or 1
    rows = "".join(_scope(s, most) for s in found)
    columns = ("scope", "half, float32", "equations", "matmuls", "in half")
    sizes = ("half", "float32", "registers", "casts")
    head = "".join(f"<th>{c}</th>" for c in columns[:2])
    head += "".join(f'<th class="n">{c}</th>' for c in (*columns[2:], *sizes))
    return (
        f"<table data-sort><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _scope(scope: summary.Scope, most: int) -> str:
    bar = _bar([("half", scope.half), ("full", scope.full)])
    width = max(100 * scope.bytes / most, 1)
    share = scope.half_flops / scope.flops if scope.flops else -1
    cells = [
        _number(scope.equations, f"{scope.equations:,}"),
        _number(scope.flops, flops_text(scope.flops) if scope.flops else ""),
        _number(share, f"{share:.0%}" if scope.flops else ""),
        *(
            _number(size, bytes_text(size) if size else "")
            for size in (scope.half, scope.full, scope.register)
        ),
        _number(scope.casts, f"{scope.casts:,}" if scope.casts else ""),
    ]
    return (
        f"<tr><td>{html.escape(scope.title)}</td>"
        f'<td class="bars" data-v="{scope.bytes}">'
        f'<div style="width:{width:.1f}%">{bar}</div></td>'
        f"{''.join(cells)}</tr>"
    )


def _number(value: float, text: str) -> str:
    return f'<td class="n" data-v="{value}">{text}</td>'
