"""Turns what was counted into findings: lines, scopes, and who reads whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jmp_rewrite._diagnose.blame import Finding
from jmp_rewrite._diagnose.counts import Counts
from jmp_rewrite._diagnose.rows import Row
from jmp_rewrite._diagnose.shadow import Shadow
from jmp_rewrite._source import Line, Lines


def findings_of(
    shadow: Shadow, names: Sequence[str]
) -> tuple[list[Finding], np.ndarray]:
    """Returns the findings in program order, and the exponents of the backward pass.

    Args:
      shadow: what has run.
      names: of each argument, as a person knows it.

    Returns:
      The findings; and f32[80], as `distance.exponents` counts them.
    """
    counted, exponents = shadow.frame.by_row()
    lines = Lines()
    findings: list[Finding] = []
    for index, row in enumerate(shadow.rows):
        found = counted.get(index)
        finding = _finding(index, row, findings, names, lines)
        if found is not None:
            finding = finding.replace(
                counts=Counts(*map(float, found[0])),
                iteration=tuple(int(i) for i in found[1] if i >= 0),
            )
        findings.append(finding)
    return findings, exponents


def _finding(
    index: int,
    row: Row,
    before: Sequence[Finding],
    names: Sequence[str],
    lines: Lines,
) -> Finding:
    if row.kind == "argument":
        return Finding(index, names[row.of], Line(), kind="argument", of=row.of)
    finding = Finding(
        index,
        row.eqn.primitive.name,
        lines.of(row.eqn, row.caller),
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
    if row.reader is not None:
        name = row.reader.eqn.primitive.name
        line = lines.of(row.reader.eqn, row.reader.outer)
        finding = finding.replace(
            primitive=name,
            line=line,
            reader=name,
            reader_line=line,
            reader_scope=row.reader_scope or finding.scope,
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
