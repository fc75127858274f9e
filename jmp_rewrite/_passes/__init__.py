"""Passes: program with explicit casts -> program, one file each, in one order."""

from jmp_rewrite._passes.by_device import TPU, Where, by_device, resolve
from jmp_rewrite._passes.optimize import PASSES, REASONS, Optimized, optimize
from jmp_rewrite._passes.program import CASTS, Pass, Program
from jmp_rewrite._passes.switch import Choice, current, use_passes

__all__ = [
    "CASTS",
    "Choice",
    "Optimized",
    "PASSES",
    "Pass",
    "Program",
    "REASONS",
    "TPU",
    "Where",
    "by_device",
    "current",
    "optimize",
    "resolve",
    "use_passes",
]
