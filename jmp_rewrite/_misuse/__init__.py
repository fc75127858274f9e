"""Hears train steps that scale what they do not unscale, or the reverse."""

from jmp_rewrite._misuse.judge import update_scope as update_scope
from jmp_rewrite._misuse.judge import warn_in_program as warn_in_program
from jmp_rewrite._misuse.judge import warn_of_misuse as warn_of_misuse
