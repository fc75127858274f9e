"""A diagnosis as a picture: the error by depth, and how large the gradients are.

The histogram is that of figures 2 and 3 of Micikevicius et al., Mixed Precision
Training, 2018: gradients against the range of float16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jmp_rewrite._diagnose.counts import SPOILT
from jmp_rewrite._diagnose.distance import BINS, LOWEST
from jmp_rewrite._explain import figure as figures

# float16: the smallest subnormal and normal numbers, and what is just above the largest
# (IEEE 754 binary16).
_SUBNORMAL, _NORMAL, _TOO_LARGE = -24, -14, 16
_SHOWN = 1e-9  # errors below are drawn here


def figure(d: Any) -> Any:
    """Draws a diagnosis."""
    has_gradients = bool(np.any(d.gradients))
    panels = 2 if has_gradients else 1
    size = 6.4 * panels, 3.8
    result = figures.new(
        "diagnosis.plot()", figsize=size, dpi=120, layout="constrained"
    )
    axes = result.subplots(1, panels, squeeze=False)[0]
    _draw_depth(axes[0], d)
    if has_gradients:
        _draw_gradients(axes[1], d)
    return result


def _draw_depth(axes: Any, d: Any) -> None:
    """Draws the error of each equation in program order."""
    found = [f for f in d.in_order if f.counts and f.counts.size]
    depth = np.arange(len(found))
    errors = np.array([min(f.error, 1.0) for f in found])
    own = np.array([min(f.introduced, 1.0) for f in found])
    spoilt = np.array([f.error >= SPOILT for f in found], bool)
    axes.semilogy(depth, np.maximum(errors, _SHOWN), lw=0.9, label="error", color="C0")
    rounds = own > 0
    axes.semilogy(
        depth[rounds], own[rounds], ".", ms=3, label="its own", color="C1", alpha=0.8
    )
    if spoilt.any():
        axes.plot(
            depth[spoilt], errors[spoilt], "x", ms=4, color="C3", label="Inf, NaN"
        )
    _mark_backward(axes, found)
    _mark_worst(axes, d, found)
    axes.set(xlabel="equation, in program order", ylabel="relative error, mean or norm")
    axes.set_ylim(bottom=_floor(errors), top=3)
    axes.set_title(f"{d.name}, {d.diagnosed.name}")
    axes.legend(loc="lower right", fontsize=8)


def _floor(errors: np.ndarray) -> float:
    above = errors[errors > _SHOWN]
    return float(above.min()) / 3 if above.size else _SHOWN


def _mark_backward(axes: Any, found: list[Any]) -> None:
    backward = [i for i, f in enumerate(found) if f.backward]
    if backward:
        axes.axvspan(backward[0], backward[-1], color="0.5", alpha=0.12, lw=0)
        axes.text(backward[0], 2.2, " backward", fontsize=8, va="top", color="0.4")


def _mark_worst(axes: Any, d: Any, found: list[Any]) -> None:
    worst = d.worst
    places = [i for i, f in enumerate(found) if worst and f.index == worst.index]
    if not places:
        return
    axes.annotate(
        f"{worst.primitive}, {worst.line}",
        (places[0], min(max(worst.error, _SHOWN), 1.0)),
        xytext=(0.03, 0.9),
        textcoords="axes fraction",
        fontsize=8,
        arrowprops={"arrowstyle": "->", "color": "C3"},
        color="C3",
    )


def _draw_gradients(axes: Any, d: Any) -> None:
    """Draws the magnitudes of the products of the backward pass."""
    shares = 100 * d.gradients / d.gradients.sum()
    powers = np.arange(BINS) + LOWEST
    scale = d.loss_scale or 1.0
    axes.bar(powers, shares, width=1.0, align="edge", color="C0", label="gradients")
    if scale != 1.0:
        shift = math.log2(scale)
        axes.step(
            powers - shift,
            shares,
            where="post",
            color="0.35",
            lw=1,
            ls="--",
            label=f"before scaling by 2**{shift:g}",
        )
    _mark_float16(axes)
    lost = shares[powers < _SUBNORMAL].sum()
    occupied = np.flatnonzero(shares) + LOWEST
    left = min(occupied[0] - (math.log2(scale) if scale > 1 else 0), _SUBNORMAL - 4)
    axes.set_xlim(left - 1, max(occupied[-1] + 2, _TOO_LARGE + 3))
    axes.set(xlabel="log2 of the magnitude", ylabel="% of the gradients' values")
    axes.set_title(f"{lost:.1f} % of the gradients vanish in float16", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)


def _mark_float16(axes: Any) -> None:
    """Marks what float16 cannot hold, and what it holds with fewer digits."""
    axes.axvspan(LOWEST * 2, _SUBNORMAL, color="C3", alpha=0.15, lw=0, label="become 0")
    axes.axvspan(
        _SUBNORMAL, _NORMAL, color="C1", alpha=0.15, lw=0, label="fewer digits"
    )
    axes.axvspan(_TOO_LARGE, 2 * BINS, color="C3", alpha=0.3, lw=0, label="overflow")
