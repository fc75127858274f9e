"""Trace, decide, emit, optimize: from a function to its rewritten program."""

from jmp_rewrite._rewrite.decide import decide as decide
from jmp_rewrite._rewrite.decide import decide_quietly as decide_quietly
from jmp_rewrite._rewrite.decide import decide_traced as decide_traced
from jmp_rewrite._rewrite.optimize import emitted as emitted
from jmp_rewrite._rewrite.optimize import finished as finished
from jmp_rewrite._rewrite.optimize import optimized as optimized
from jmp_rewrite._rewrite.optimize import run as run
from jmp_rewrite._rewrite.trace import trace_call as trace_call
from jmp_rewrite._rewrite.trace import trace_for as trace_for
from jmp_rewrite._rewrite.trace import trace_types as trace_types
from jmp_rewrite._rewrite.traced import Traced as Traced
