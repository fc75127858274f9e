"""Finds a smallest set of overrides that is good enough, by trying.

Nothing here knows what an override is: the candidates come ranked, and a test tells
whether a set of them is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(
    candidates: Sequence[T], is_enough: Callable[[list[T]], bool]
) -> list[T] | None:
    """Returns a set of candidates that is enough, and from which none can be left out.

    The best candidates are tried first, twice as many each time; then ever smaller
    parts of them are left out (Zeller and Hildebrandt, Simplifying and Isolating
    Failure-Inducing Input, IEEE Transactions on Software Engineering 28, 2002).

    Args:
      candidates: the best first.
      is_enough: tells whether a set is enough. It need not be monotone: what is
        returned has been tried, and so has leaving out each one of it.

    Returns:
      The set, in the order of the candidates; None if all of them are not enough.

    Example:
      >>> smallest("abcdef", lambda kept: {"b", "e"} <= set(kept))
      ['b', 'e']
    """
    known: dict[tuple[int, ...], bool] = {}

    def enough(kept: Sequence[int]) -> bool:
        key = tuple(kept)
        if key not in known:
            known[key] = is_enough([candidates[i] for i in key])
        return known[key]

    count = 0
    while not enough(range(count)):
        if count == len(candidates):
            return None
        count = min(max(1, 2 * count), len(candidates))
    return [candidates[i] for i in _reduced(list(range(count)), enough)]


def _reduced(kept: list[int], enough: Callable[[Sequence[int]], bool]) -> list[int]:
    """Leaves out parts, the worst first, from halves down to single ones."""
    size = max(1, len(kept) // 2)
    while True:
        before = len(kept)
        parts = [kept[i : i + size] for i in range(0, before, size)]
        for part in reversed(parts):
            rest = [i for i in kept if i not in part]
            if enough(rest):
                kept = rest
        if size == 1 and len(kept) == before:
            return kept
        size = max(1, size // 2)
