"""What policies cost on devices, by float32, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jmp_rewrite._cost import figure as figures
from jmp_rewrite._cost import text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURES = {
    "temporary_bytes": "temporary memory",
    "peak_bytes": "peak memory",
    "bytes_accessed": "bytes accessed",
    "estimated_cycles": "estimated cycles",
}
# Told apart with red-green blindness, and in gray.
_COLORS = ("#0e8a7d", "#dd8a0b", "#9a3ec6", "#4a6fd0")


def plot(cost: Any) -> Figure:
    """Draws each figure by that of the first policy, a group of bars a device.

    Raises:
      ImportError: if matplotlib is missing.
    """
    pairs = [
        (row, first)
        for row, first in zip(cost.rows, text.firsts(cost.rows), strict=True)
        if row is not first
    ] or [(row, row) for row in cost.rows]
    size = 8, 1.6 + 0.8 * len(pairs)
    figure = figures.new("cost.plot()", figsize=size, dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    height = 0.8 / len(_FIGURES)
    for n, (name, title) in enumerate(_FIGURES.items()):
        places = [i + (n - 1.5) * height for i in range(len(pairs))]
        widths = [_ratio(row, first, name) for row, first in pairs]
        axes.barh(places, widths, height, color=_COLORS[n], label=title)
    axes.axvline(1, color="0.4", linewidth=1)
    labels = [f"{row.device}\n{row.policy}" for row, _ in pairs]
    axes.set_yticks(range(len(pairs)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"by {pairs[0][1].policy}, as the compilers estimate")
    axes.set_title(cost.name, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_FIGURES), frameon=False)
    return figure


def _ratio(row: Any, first: Any, name: str) -> float:
    own, other = getattr(row, name), getattr(first, name)
    return own / other if own is not None and other else float("nan")
