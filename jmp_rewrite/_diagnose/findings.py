"""Turns what lockstep counted into findings: lines, scopes, and who reads whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jmp_rewrite._diagnose.blame import Finding
from jmp_rewrite._diagnose.counts import Counts
from jmp_rewrite._diagnose.lines import Line, line_of
from jmp_rewrite._diagnose.lockstep import Lockstep
from jmp_rewrite._diagnose.lockstep_rows import Row


def findings_of(
    lockstep: Lockstep, paths: Sequence[str | None]
) -> tuple[list[Finding], np.ndarray]:
    """Returns the findings in program order, and the exponents of the backward pass.

    Args:
      lockstep: what has run.
      paths: of each argument the path in its tree; None for optimizer state.

    Returns:
      The findings; and f32[80], as `distance.exponents` counts them.
    """
    counted = lockstep.frame.by_row()
    exponents = lockstep.frame.arrays(np)[2]
    findings: list[Finding] = []
    for index, row in enumerate(lockstep.rows):
        found = counted.get(index)
        finding = _finding(index, row, findings, paths)
        if found is not None:
            finding = finding.replace(
                counts=Counts(*map(float, found[0])),
                iteration=tuple(int(i) for i in found[1] if i >= 0),
            )
        findings.append(finding)
    return findings, exponents


def _finding(
    index: int, row: Row, before: Sequence[Finding], paths: Sequence[str | None]
) -> Finding:
    if row.kind == "argument":
        name = paths[row.of] or f"argument {row.of}"
        return Finding(index, name, Line(), kind="argument", of=row.of)
    finding = Finding(
        index,
        row.eqn.primitive.name,
        line_of(row.eqn, row.calls),
        row.place.path,
        row.place.backward,
        row.is_half,
        row.kind,
        row.dtype,
        reads=row.reads,
        terms=row.terms,
        of=row.of,
        carried=row.carried,
    )
    if row.kind != "cast":
        return finding
    # A cast is named after what it rounds; of an argument, after what asked for it.
    finding = finding.replace(
        reader=finding.primitive,
        reader_line=finding.line,
        reader_scope=finding.scope,
    )
    origin = before[row.of] if row.of >= 0 else None
    if origin is None or origin.kind == "argument":
        return finding
    return finding.replace(
        primitive=origin.primitive,
        line=origin.line,
        scope=origin.scope,
        backward=origin.backward,
    )
