"""Precision by scope, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmp_rewrite._cost import figure as figures
from jmp_rewrite._explain.summary import Scope
from jmp_rewrite._units import bytes_text, count_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCOPES = 16
# As in the HTML report; told apart with red-green blindness, and in gray.
_COLORS = {"half": "#0e8a7d", "float32": "#dd8a0b", "registers": "#b9bdc6"}


def plot(title: str, scopes: Sequence[Scope]) -> Figure:
    """Draws the bytes of half and float32 values that are stored, a bar a scope.

    What stays in registers is gray.

    Args:
      title: of the picture.
      scopes: the largest first.

    Raises:
      ImportError: if matplotlib is missing.
    """
    shown = list(scopes[:_SCOPES])[::-1]
    size = 8, 1.4 + 0.3 * max(len(shown), 2)
    figure = figures.new("report.plot()", figsize=size, dpi=120)
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    left = [0] * len(shown)
    sizes = {
        "half": [s.half for s in shown],
        "float32": [s.full for s in shown],
        "registers": [s.register for s in shown],
    }
    for name, widths in sizes.items():
        axes.barh(
            [s.title for s in shown], widths, left=left, color=_COLORS[name], label=name
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_title(title, loc="left")
    axes.set_xlabel("bytes of values")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: bytes_text(int(x))))
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.02)
    axes.legend(edgecolor="none", framealpha=0.9, loc="lower right")
    if more := len(scopes) - len(shown):
        axes.annotate(
            f"and {count_text(more, 'smaller scope')}",
            (1, 0),
            xycoords="figure fraction",
            xytext=(-8, 8),
            textcoords="offset points",
            ha="right",
            color="0.4",
        )
    return figure
