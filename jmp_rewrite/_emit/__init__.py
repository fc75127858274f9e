"""Makes the program with explicit casts."""

from jmp_rewrite._emit import program
from jmp_rewrite._emit.emit import Cell, Emitter
from jmp_rewrite._emit.later import Later
from jmp_rewrite._emit.rounded import argument, is_move, node_of, results_of
from jmp_rewrite._emit.store import Storage, Stored, store

__all__ = [
    "Cell",
    "Emitter",
    "Later",
    "Storage",
    "Stored",
    "argument",
    "is_move",
    "node_of",
    "program",
    "results_of",
    "store",
]
