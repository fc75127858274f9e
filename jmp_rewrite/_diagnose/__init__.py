"""Finds the line that loses precision."""

from jmp_rewrite._diagnose.diagnose import diagnose
from jmp_rewrite._diagnose.diagnosis import Diagnosis

__all__ = [
    "Diagnosis",
    "diagnose",
]
