"""A cost as text: a table, and whose word each number is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from jmp_rewrite._units import bytes_text

COLUMNS = (
    "device",
    "policy",
    "held",
    "temporary",
    "peak",
    "fits",
    "accessed",
    "Mcycles",
)
_WORDS = 2  # columns of words; the others are numbers
_WIDTH = 100
# Of these rows there are ratios.
_FIGURES = (
    "argument_bytes",
    "temporary_bytes",
    "peak_bytes",
    "bytes_accessed",
    "estimated_cycles",
)


def render(cost: Any) -> str:
    """Lays a cost out as text."""
    lines = [title(cost), "", *_table(COLUMNS, list(table(cost))), ""]
    for note in notes(cost):
        lines += textwrap.wrap(note, _WIDTH)
    return "\n".join(lines) + "\n"


def title(cost: Any) -> str:
    """Returns the lines above the table."""
    return f"{cost.name}: what compilers estimate, nothing was run"


def table(cost: Any) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each row, and after a device's rows their ratios."""
    previous = None
    for first, row in zip(firsts(cost.rows), cost.rows, strict=True):
        device = row.device if row.device != previous else ""
        previous = row.device
        yield (device, row.policy, *_cells(row))
        if row is not first and row.fits and first.fits:
            yield ("", "  ratio", *_ratios(row, first))


def firsts(rows: Sequence[Any]) -> list[Any]:
    """Returns for each row the first one of its device."""
    first: dict[str, Any] = {}
    return [first.setdefault(row.device, row) for row in rows]


def _cells(row: Any) -> tuple[str, ...]:
    fits = {True: "yes", False: "no", None: ""}[row.fits]
    cycles = row.estimated_cycles
    return (
        _bytes(row.argument_bytes),
        _bytes(row.temporary_bytes),
        _bytes(row.peak_bytes),
        fits,
        _bytes(row.bytes_accessed),
        f"{cycles / 1e6:,.3g}" if cycles is not None else "",
    )


def _bytes(size: int | None) -> str:
    return "" if size is None else bytes_text(size)


def _ratios(row: Any, first: Any) -> tuple[str, ...]:
    values = []
    for name in _FIGURES:
        own, other = getattr(row, name), getattr(first, name)
        values.append(f"{own / other:.2f}" if own is not None and other else "")
    return (*values[:3], "", *values[3:])


def notes(cost: Any) -> Iterator[str]:
    """Yields what there is to say under the table."""
    for row, found in zip(cost.rows, cost.estimates, strict=True):
        where = f"{row.device}, {row.policy}"
        if found.problem:
            yield f"{where}: {found.problem}."
        if found.largest:
            listed = "; ".join(_buffer(b) for b in found.largest)
            yield f"{where}: the largest values are {listed}."
        if found.collectives:
            moved = ", ".join(
                f"{kind} {dtype} {bytes_text(size)}"
                for (kind, dtype), size in found.collectives.items()
            )
            yield f"{where}: a device's part in collectives: {moved}."
    yield from _words(cost)
    yield _donation(cost)


def _buffer(buffer: Any) -> str:
    line = f" at {buffer.line}" if buffer.line else ""
    return f"{bytes_text(round(buffer.bytes))} {buffer.array}{line}"


def _words(cost: Any) -> Iterator[str]:
    by = ", ".join(dict.fromkeys(row.compiler for row in cost.rows))
    yield f"By {by}, ahead of time; figures are of one device."
    platforms = {t.platform for t in cost._targets}
    if "tpu" in platforms:
        yield (
            "TPUs: memory and fits are the compiler's own verdict; cycles are its "
            "estimates, of kernels alone, and no times."
        )
    if "cuda" in platforms:
        yield (
            "GPUs: fits compares the peak with all of the device's memory (JAX itself "
            "takes 75 % of it unless told otherwise); bytes are counted in the "
            "compiled program; nobody knows the time."
        )


def _donation(cost: Any) -> str:
    donated = cost._subject.placement[0]
    if not any(donated):
        return (
            "No argument is donated: with jax.jit(..., donate_argnums=...) around the "
            "function, results take the memory of arguments."
        )
    return f"{sum(donated)} of {len(donated)} arrays of the arguments are donated."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if i < _WORDS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if row is head:
            yield "  ".join("-" * width for width in widths)


BATCH_COLUMNS = ("device", "policy", "batch", "too large", "compilations")


def batches(found: Any) -> str:
    """Lays the largest batches out as text."""
    rows = [
        (
            row.device,
            row.policy,
            _count(row.batch),
            _count(row.too_large),
            str(row.compilations),
        )
        for row in found.rows
    ]
    lines = [
        f"{found.name}: the largest batch that compilers let through",
        "",
        *_table(BATCH_COLUMNS, rows),
        "",
    ]
    for row in found.rows:
        tried = ", ".join(
            f"{n:,} {'fits' if ok else 'does not'}" for n, ok in row.tried
        )
        note = f"{row.device}, {row.policy}: tried {tried or 'nothing'}."
        note += f" {row.problem}." if row.problem else ""
        lines += textwrap.wrap(note, _WIDTH)
    return "\n".join(lines) + "\n"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
