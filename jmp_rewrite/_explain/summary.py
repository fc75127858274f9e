"""Puts rows together: by scope, and equations that say the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jmp_rewrite._explain import residuals
from jmp_rewrite._explain.reasons import CALL, CAST, INSERTED, INTERNAL, NONE
from jmp_rewrite._explain.rows import Equation

# Names that differ in their numbers are one line of a table from this many on.
_MANY = 3
_WORD = re.compile(r"[\w.\[\]]+$")
_NUMBER = re.compile(r"\d+")


class Scope(NamedTuple):
    """What equations of one scope do together.

    Attributes:
      name: the scope; "*" stands for the numbers of repeated layers.
      repeats: how many scopes the name stands for.
      equations: how many there are.
      flops: multiplications and additions of products.
      half_flops: those on half operands.
      half: bytes of half values that are stored.
      full: bytes of float32 values that are stored.
      register: bytes of half and float32 values that are not.
      casts: how many casts there are.
    """

    name: str
    repeats: int
    equations: int
    flops: int
    half_flops: int
    half: int
    full: int
    register: int
    casts: int

    @property
    def title(self) -> str:
        """The name, and how many scopes it stands for."""
        return self.name + (f"  ×{self.repeats}" if self.repeats > 1 else "")

    @property
    def bytes(self) -> int:
        """Bytes of the half and float32 values that are stored."""
        return self.half + self.full


class Group(NamedTuple):
    """Equations that say the same: the same kind of line in each of several layers.

    Attributes:
      first: the first of them.
      layer: their scope, "*" for the numbers of repeated layers.
      times: how many there are.
      bytes: bytes of their results together.
      stored_bytes: those of them that are stored.
    """

    first: Equation
    layer: str
    times: int
    bytes: int
    stored_bytes: int

    @property
    def value(self) -> str:
        """What they make: how many values, of which type."""
        count = f"{self.times} × " if self.times > 1 else ""
        return count + " ".join(self.first.results)


def fold(paths: Iterable[str]) -> dict[str, str]:
    """Names the scopes of repeated layers alike: `h_0/attn`, ..., `h_11/attn`.

    The name of the model, which all scopes have in front, is left out.

    Args:
      paths: of scopes, "/" between names.

    Returns:
      Path -> the path with "*" in place of the numbers that three or more names differ
      in.

    Example:
      >>> sorted(set(fold(["h_0/fc", "h_1/fc", "h_2/fc", "ln_1"]).values()))
      ['h_*/fc', 'ln_1']
    """
    folded: dict[str, str] = {}
    split = [(path, path.split("/")) for path in sorted(set(paths))]
    _fold(split, "", folded)
    roots = {parts[0] for _, parts in split if len(parts) > 1}
    named = all(parts[1][:1].isalpha() for _, parts in split if len(parts) > 1)
    if len(roots) != 1 or not named:
        return folded
    root = f"{roots.pop()}/"
    return {path: name.removeprefix(root) for path, name in folded.items()}


def _fold(
    members: Sequence[tuple[str, list[str]]], prefix: str, folded: dict[str, str]
) -> None:
    heads = {parts[0] for _, parts in members}
    alike: dict[str, set[str]] = {}
    for head in heads:
        if _WORD.match(head):
            alike.setdefault(_NUMBER.sub("*", head), set()).add(head)
    for star, names in alike.items():  # Haiku numbers from the second on: mlp, mlp_1
        names |= {star.removesuffix("_*")} & heads
    many = {
        n: star for star, names in alike.items() if len(names) >= _MANY for n in names
    }
    groups: dict[str, list[tuple[str, list[str]]]] = {}
    for path, parts in members:
        name = prefix + many.get(parts[0], parts[0])
        if len(parts) == 1:
            folded[path] = name
        else:
            groups.setdefault(name, []).append((path, parts[1:]))
    for name, group in groups.items():
        _fold(group, f"{name}/", folded)


def scopes(rows: Sequence[Equation], folded: dict[str, str]) -> list[Scope]:
    """Sums up each scope, the one with the most stored bytes first."""
    members: dict[str, list[Equation]] = {}
    for row in rows:
        if row.category != INTERNAL:
            members.setdefault(folded[row.layer], []).append(row)
    return sorted(
        (_scope(name, found) for name, found in members.items()),
        key=lambda s: (-s.bytes, -s.flops, -s.register, s.name),
    )


def _scope(name: str, rows: Sequence[Equation]) -> Scope:
    sizes = {"half": 0, "full": 0, "register": 0, "other": 0}
    for row in rows:
        sizes[row.memory] += row.stored_bytes or row.bytes
    return Scope(
        name,
        len({row.layer for row in rows}),
        len(rows),
        sum(row.flops for row in rows),
        sum(row.flops for row in rows if row.dtype in residuals.HALVES),
        sizes["half"],
        sizes["full"],
        sizes["register"],
        sum(row.category == CAST for row in rows),
    )


def is_shown(row: Equation) -> bool:
    """Whether a table shows a row: it has a float32 or half value of its own."""
    return row.category not in (CALL, INSERTED, INTERNAL) and not (
        row.category == NONE and row.kind == "other"
    )


def groups(rows: Sequence[Equation], folded: dict[str, str]) -> list[Group]:
    """Groups equations that say the same, the largest group first."""
    members: dict[object, list[Equation]] = {}
    for row in rows:
        key = (
            folded[row.layer],
            row.phase,
            row.file,
            row.line,
            row.primitive,
            row.dtype,
            row.results,
            row.reason,
            row.memory,
        )
        members.setdefault(key, []).append(row)
    found = [group(same, folded[same[0].layer]) for same in members.values()]
    return sorted(found, key=lambda g: (-g.stored_bytes, -g.bytes))


def group(same: Sequence[Equation], layer: str) -> Group:
    """Makes one group of equations that say the same."""
    stored = sum(r.stored_bytes for r in same)
    return Group(same[0], layer, len(same), sum(r.bytes for r in same), stored)


def largest_full(rows: Sequence[Equation], folded: dict[str, str]) -> list[Group]:
    """Returns the largest values that are stored in float32, the largest first.

    Left out are those of updates, and gradients that half matrix multiplications make.
    """
    full = [r for r in rows if r.memory == "full" and is_shown(r)]
    stay = [r for r in full if r.phase != "update" and r.dtype not in residuals.HALVES]
    return groups(stay, folded)
