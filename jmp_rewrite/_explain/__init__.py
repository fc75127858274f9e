"""Says what mixed precision does to a function."""

from jmp_rewrite._cost import figure
from jmp_rewrite._explain import named
from jmp_rewrite._explain.explain import explain
from jmp_rewrite._explain.html import framed, style, tile
from jmp_rewrite._explain.report import Report

__all__ = [
    "Report",
    "explain",
    "figure",
    "framed",
    "named",
    "style",
    "tile",
]
