"""Decides which values are float32, which are half, and where one is rounded."""

from jmp_rewrite._precision import decide, parameters, pinning
from jmp_rewrite._precision.cost import ENDS_KERNEL, FLOAT32_BYTES, HALF_BYTES, ONE_LINE
from jmp_rewrite._precision.decide import Label, Plan
from jmp_rewrite._precision.endings import Ending, unreachable
from jmp_rewrite._precision.origins import lookups
from jmp_rewrite._precision.parameters import ParameterPath, key_names
from jmp_rewrite._precision.pins import NO_PRODUCT, Pins
from jmp_rewrite._precision.whole_step import (
    is_unscaled,
    is_whole_step,
    rewritten_dtype,
)

__all__ = [
    "ENDS_KERNEL",
    "Ending",
    "FLOAT32_BYTES",
    "HALF_BYTES",
    "Label",
    "NO_PRODUCT",
    "ONE_LINE",
    "ParameterPath",
    "Pins",
    "Plan",
    "decide",
    "is_unscaled",
    "is_whole_step",
    "key_names",
    "lookups",
    "parameters",
    "pinning",
    "rewritten_dtype",
    "unreachable",
]
