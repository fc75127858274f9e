"""Passes: program with explicit casts -> program, one file each, in one order."""

from jmp_rewrite._passes.optimize import PASSES as PASSES
from jmp_rewrite._passes.optimize import REASONS as REASONS
from jmp_rewrite._passes.optimize import Optimized as Optimized
from jmp_rewrite._passes.optimize import optimize as optimize
from jmp_rewrite._passes.program import SCOPE as SCOPE
from jmp_rewrite._passes.program import Pass as Pass
from jmp_rewrite._passes.program import Program as Program
from jmp_rewrite._passes.switch import Choice as Choice
from jmp_rewrite._passes.switch import current as current
from jmp_rewrite._passes.switch import use_passes as use_passes
