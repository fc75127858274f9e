"""What is said of a finding: one sentence that a reader can act on."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from jmp_rewrite._diagnose.blame import Finding, rounded_before
from jmp_rewrite._diagnose.counts import SPOILT, Counts

# A share of lost values, or an error, that is worth a word.
_MANY = 0.01
# An error that is so many times what came in is an amplified one.
_AMPLIFIED = 4.0


def sentence(finding: Finding, findings: Sequence[Finding]) -> str:
    """Returns a sentence on one equation.

    Args:
      finding: the finding.
      findings: all, in program order.
    """
    counts = finding.counts
    if counts is None:
        return "both programs compute the same"
    if finding.kind == "branches":
        return "the programs took different branches, or left the loop at other times"
    what = _subject(finding, findings)
    if finding.overflowed:
        return f"{what}: {_overflow(finding, counts)}"
    if counts.underflowed >= _MANY * counts.size:
        return f"{what}: {_vanish(finding, counts)}"
    came_in = max((findings[i].error for i in finding.reads), default=0.0)
    if counts.nonfinite:
        made = "hands Inf or NaN on" if came_in >= SPOILT else "becomes Inf or NaN"
        return f"{what}: {_of(counts.nonfinite, counts)}: {made}"
    by = findings[finding.grown] if finding.grown >= 0 else finding
    if by.error > finding.error:
        times = by.error / max(finding.error, 1e-9)
        rounded = f"{what}: its rounding error of {finding.error:.2%}"
        return f"{rounded} becomes {times:.0f} times as large in {_at(by)}"
    if counts.introduced >= max(_MANY, counts.error / 2):
        return f"{what}: off by {counts.introduced:.1%} in {finding.dtype}"
    if finding.blame > 2 * counts.appeared:
        return f"{what}: step by step its error grows to {finding.error:.1%}"
    if finding.error > _AMPLIFIED * came_in > 0:
        times = finding.error / came_in
        source = rounded_before(finding, findings)
        of = _at(source) if source else "its operands"
        return f"{what}: makes the error of {of} {times:.0f} times as large"
    if counts.underflowed:
        return f"{what}: {_vanish(finding, counts)}"
    if finding.is_half:
        return f"{what}: rounded to {finding.dtype}, off by {counts.introduced:.2%}"
    return f"{what}: hands an error of {finding.error:.2%} on"


def _subject(finding: Finding, findings: Sequence[Finding]) -> str:
    """Returns the subject of a finding: an equation, or a cast of its result."""
    if finding.kind != "cast":
        return finding.primitive
    origin = findings[finding.of] if finding.of >= 0 else None
    what = finding.primitive if origin else "a constant"
    if origin and origin.kind == "argument":
        what = origin.primitive
    what = f"{what}, rounded for {finding.reader}"
    if finding.reader_line == finding.line:
        return what
    return f"{what} at {finding.reader_line}"


def _overflow(finding: Finding, counts: Counts) -> str:
    lost = _of(counts.overflowed, counts)
    ends = float(ml_dtypes.finfo(np.dtype(finding.dtype)).max)
    return (
        f"{lost} overflow, {finding.dtype} ends at {ends:.6g} "
        f"and they go up to {counts.largest:.3g}"
    )


def _vanish(finding: Finding, counts: Counts) -> str:
    lost = _of(counts.underflowed, counts)
    return f"{lost} vanish, {finding.dtype} begins at {_least(finding)}"


def _of(count: float, counts: Counts) -> str:
    return f"{round(count):,} of {round(counts.size):,} values"


def _least(finding: Finding) -> str:
    return f"{float(ml_dtypes.finfo(np.dtype(finding.dtype)).smallest_subnormal):.2g}"


def _at(finding: Finding) -> str:
    """Returns the subject of a finding, with its line."""
    line = finding.line
    return f"{finding.primitive} at {line}" if line.file else finding.primitive
