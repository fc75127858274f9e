"""The search for a smallest set: against trying every set."""

import itertools

import pytest

from jmp_rewrite._diagnose.smallest import smallest


def subsets(items):
    for size in range(len(items) + 1):
        yield from map(set, itertools.combinations(items, size))


@pytest.mark.parametrize("needed", list(subsets("abcde")))
def test_the_smallest_set_of_overrides_is_found(needed):
    assert smallest("abcde", needed.issubset) == sorted(needed)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_can_be_left_out(seed):
    """Any set of enough sets, closed or not: no element of the answer is idle."""
    enough = [
        frozenset(s)
        for i, s in enumerate(subsets("abcde"))
        if s and (i * 2654435761 + seed * 40503) % 7 < 2
    ]
    found = smallest("abcde", lambda kept: frozenset(kept) in enough)
    if found is None:
        assert frozenset("abcde") not in enough
        return
    assert frozenset(found) in enough
    assert all(frozenset(found) - {x} not in enough for x in found)


def test_no_set_is_tried_twice():
    tried = []

    def is_enough(kept):
        tried.append(tuple(kept))
        return {2, 5} <= set(kept)

    assert smallest(range(9), is_enough) == [2, 5]
    assert len(tried) == len(set(tried))


def test_the_first_candidate_costs_two_runs():
    tried = []
    assert smallest(range(1000), lambda kept: tried.append(kept) or 0 in kept) == [0]
    assert len(tried) == 2


def test_not_even_all_are_enough():
    assert smallest("ab", lambda kept: False) is None
    assert smallest("", lambda kept: False) is None
    assert smallest("", lambda kept: True) == []
