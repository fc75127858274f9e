"""A diagnosis as one HTML page in the style of the report, without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import jax

from jmp_rewrite._diagnose.text import (
    COLUMNS,
    LEGEND,
    cells,
    place,
    summary,
    worst_lines,
)
from jmp_rewrite._explain import framed, style, tile

_LINES = 30


def page(d: Any) -> str:
    """Returns the diagnosis as an HTML page."""
    name = escape(d.name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Diagnosis of {name}</title><style>{style()}</style></head><body><main>"
        f"<header><h1>{name}</h1><p>diagnosed under <code>{escape(repr(d.diagnosed))}"
        f"</code></p></header>"
        f'<section class="tiles" aria-label="Summary">{"".join(_tiles(d))}</section>'
        f"{_said(d)}{_fix(d)}{_table(d)}"
        f"<footer>jmp_rewrite, JAX {jax.__version__}</footer></main></body></html>"
    )


def notebook(d: Any) -> str:
    """Returns the page in a frame, so that its styles stay its own."""
    return framed(page(d), "mixed precision diagnosis", 560)


def _tiles(d: Any) -> Iterator[str]:
    verdict = "within" if d.error <= d.tolerance else "above"
    what = "largest error of a result (by norm)"
    yield tile(f"{d.error:.2g}", f"{what}, {verdict} the tolerance of {d.tolerance:g}")
    if d.worst:
        yield tile(str(d.worst.line) or d.worst.primitive, "the line to look at first")
    lost = sum(f.overflowed for f in d.equations if f.blame)
    if lost:
        yield tile(f"{lost:,}", "values overflow where it harms a result")
    yield tile(f"{len(d.equations):,}", "equations in which the two programs differ")


def _said(d: Any) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in summary(d)[1:])
    return f'<section><h2>Findings</h2><ol class="advice">{items}</ol></section>'


def _fix(d: Any) -> str:
    if d.error <= d.tolerance or d.policy is None:
        return ""
    return (
        f"<section><h2>Fix</h2><p>Tested: the largest error is {d.policy_error:.2g} "
        'under this policy.</p><pre style="white-space:pre-wrap"><code>policy = jmpr.'
        f"{escape(repr(d.policy))}</code></pre></section>"
    )


def _table(d: Any) -> str:
    groups = worst_lines(d.equations, _LINES)
    if not groups:
        return ""
    head = "".join(_cell("th", name, i) for i, name in enumerate(COLUMNS))
    rows = "".join(
        f'<tr title="{escape(place(g.worst))}">'
        + "".join(_cell("td", c, i) for i, c in enumerate(cells(g)))
        + f'<td class="wide">{escape(d.why(g.worst))}</td></tr>'
        for g in groups
    )
    return (
        f'<section><h2>Lines, the worst first</h2><p class="dim">{escape(LEGEND)}.</p>'
        f'<div class="card scroll"><table><thead><tr>{head}<th>what happened</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div></section>"
    )


def _cell(tag: str, content: str, column: int) -> str:
    kind = "" if column < 3 else ' class="n"'
    return f"<{tag}{kind}>{escape(content)}</{tag}>"
