"""A report as a title, facts, advice and tables, before it is laid out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jmp_rewrite._explain import summary
from jmp_rewrite._explain.rows import Equation
from jmp_rewrite._units import bytes_text, count_text, flops_text

# Tables of more rows than these are cut; the rest is in `report.equations`.
_SCOPES, _LARGEST = 24, 5


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      title: what stands above it.
      share: how many parts of the free width it gets; 0 for a number and -1 for a
        word, which get what they need.
    """

    title: str
    share: int = 0


class Table(NamedTuple):
    """A table, and a line under it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Document(NamedTuple):
    """A report before it is laid out.

    Attributes:
      title: what is explained, and under which policy.
      facts: a label and a sentence each.
      advice: sentences.
      tables: short ones.
      equations: all of them, or none.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    advice: Sequence[str]
    tables: Sequence[Table]
    equations: Sequence[Equation]


def document(report: Any, *, equations: bool = True) -> Document:
    """Puts a report together, without a layout."""
    largest, found = _largest(report), _scopes(report)
    return Document(
        f"{report.name} under {report.policy!r}",
        list(_facts(report)),
        report.advice,
        [largest, found] if largest.rows else [found],
        report.equations if equations else (),
    )


def _served(report: Any) -> Iterator[tuple[str, str]]:
    """What inference needs to know of a forward function."""
    if report.serving is None:
        return
    for title, held in zip(("weights", "caches"), report.serving, strict=True):
        if held.before:
            saved = held.before - held.after
            stored = f"; for_inference stores them in {bytes_text(held.after)}"
            yield (
                title,
                f"{bytes_text(held.before)} of float32{stored if saved else ''}",
            )


def _facts(report: Any) -> Iterator[tuple[str, str]]:
    yield from _served(report)
    if report.flops:
        yield (
            "matmuls in half",
            f"{report.half_flops:.1%} of {flops_text(report.flops)}",
        )
    moved = (
        f", {bytes_text(report.cast_bytes)} read and written" if report.casts else ""
    )
    yield "casts", f"{report.casts:,}{moved}"
    before, after = report.residual_bytes_before, report.residual_bytes
    if before:
        change = f"{after / before - 1:+.0%}"
        yield (
            "backward reads",
            f"at most {bytes_text(after)} of forward values, {bytes_text(before)} in "
            f"float32 ({change}), before XLA fuses and rematerializes",
        )
    if report.weight_copy_bytes:
        yield "half weights", f"{bytes_text(report.weight_copy_bytes)} of copies"
    counts: dict[str, int] = {}
    for row in report.equations:
        counts[row.category] = counts.get(row.category, 0) + 1
    order = sorted(counts, key=lambda c: (-counts[c], c))
    listed = ", ".join(f"{counts[c]:,} {c}" for c in order)
    yield "equations", f"{len(report.equations):,}: {listed}"
    for left in report.not_rewritten[:_LARGEST]:
        at = f" at {left.line}" if left.line else ""
        yield "left alone", f"{left.primitive}{at}: {left.reason}"


def _largest(report: Any) -> Table:
    columns = (Column("bytes"), *_GROUP)
    groups = summary.largest_full(report.equations, report.layers)
    rows = [(bytes_text(g.stored_bytes), *_cells(g)) for g in groups[:_LARGEST]]
    title = "Largest values stored in float32 (optimizer update excluded)"
    return Table(title, columns, rows)


_GROUP = (
    Column("equation", 6),
    Column("list", -1),
    Column("where", 6),
    Column("reason", 7),
)


def _cells(group: summary.Group) -> tuple[str, ...]:
    first = group.first
    return (
        f"{first.primitive}\n{group.value}",
        f"{first.category}\n{first.dtype}",
        f"{group.layer}\n{first.line}",
        first.reason,
    )


def _scopes(report: Any) -> Table:
    columns = (
        Column("scope", 1),
        Column("equations"),
        Column("matmuls"),
        Column("in half"),
        Column("half"),
        Column("float32"),
        Column("registers"),
        Column("casts"),
    )
    found = summary.scopes(report.equations, report.layers)
    rows = [
        (
            s.title,
            f"{s.equations:,}",
            flops_text(s.flops) if s.flops else "",
            f"{s.half_flops / s.flops:.0%}" if s.flops else "",
            bytes_text(s.half) if s.half else "",
            bytes_text(s.full) if s.full else "",
            bytes_text(s.register) if s.register else "",
            f"{s.casts:,}" if s.casts else "",
        )
        for s in found[:_SCOPES]
    ]
    more = len(found) - _SCOPES
    note = "registers: fused, never written to memory"
    note += f"; and {count_text(more, 'smaller scope')}" if more > 0 else ""
    return Table("Scopes, by bytes of the values that they store", columns, rows, note)
