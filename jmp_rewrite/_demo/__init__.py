"""The demo of the command line."""

from jmp_rewrite._demo import report, train
from jmp_rewrite._demo.train import Course, Digits, Run

__all__ = [
    "Course",
    "Digits",
    "Run",
    "report",
    "train",
]
