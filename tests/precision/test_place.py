"""The placement is TensorFlow's, to the node: what its own pass answered is the judge.

`golden/` holds the answers of TensorFlow 2.21's auto_mixed_precision pass to all
linear chains of up to four ops (w allow, g infer, c clear, b deny, n unlisted; upper
case where the op became half) and to 320 while loops.
"""

import csv
import itertools
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_rewrite._precision.placement import (
    BareGraph,
    Storage,
    cheapest,
    propagate,
    prune,
)
from jmp_rewrite._rules.table import Category

CATEGORIES = {
    "w": Category.ALLOW,
    "g": Category.INFER,
    "c": Category.CLEAR,
    "b": Category.DENY,
    "n": None,
}
GOLDEN = pathlib.Path(__file__).parent / "golden"


def rows(name):
    with open(GOLDEN / name) as lines:
        header, *body = csv.reader(lines, delimiter="\t")
    return header, body


def graph_of(kinds, edges, carries=()):
    """Builds a bare graph from category letters and (source, reader) edges."""
    predecessors = [[] for _ in kinds]
    successors = [[] for _ in kinds]
    for source, reader in edges:
        predecessors[reader].append(source)
        successors[source].append(reader)
    categories = [CATEGORIES[k] for k in kinds]
    return BareGraph(categories, predecessors, successors, carries)


def chain(kinds):
    return graph_of(kinds, [(i, i + 1) for i in range(len(kinds) - 1)])


def painted(kinds, half):
    return "".join(k.upper() if h else k for k, h in zip(kinds, half, strict=True))


def casts_of_chain(kinds, half):
    """Counts the casts of a chain: one for each value and direction.

    Products and infer ops have a second operand, a float32 constant of their own; the
    chain reads a float32 constant and its result is fetched in float32.
    """
    count = 0
    before = False  # what comes in is float32
    for kind, is_half in zip(kinds, half, strict=True):
        count += is_half != before
        count += is_half and kind in "wg"
        before = is_half
    return count + before


@pytest.mark.parametrize("column", [1, 3], ids=["float16", "bfloat16"])
def test_chains_are_tensorflows(column):
    """All 780 chains: the dtype of every node and the number of casts."""
    _, body = rows("chains.tsv")
    assert len(body) == 780
    for row in body:
        kinds = row[0]
        half = propagate(chain(kinds))
        assert painted(kinds, half) == row[column], kinds
        assert casts_of_chain(kinds, half) == int(row[column + 1]), kinds


def loop_graph(first, body, last):
    """Builds Enter, Merge, Switch, the body, NextIteration, Exit as TensorFlow does."""
    kinds = [*first, "c", "c", "c", *body, "c", "c", *last]
    n = len(first)
    enter, merge, switch = n, n + 1, n + 2
    next_iteration = switch + len(body) + 1
    leave = next_iteration + 1
    edges = [(i, i + 1) for i in range(next_iteration)]
    edges += [(next_iteration, merge), (switch, leave)]
    edges += [(i, i + 1) for i in range(leave, len(kinds) - 1)]
    joints = [enter, merge, switch, next_iteration, leave]
    return graph_of(kinds, edges, [(next_iteration, merge)]), joints


def test_loops_are_tensorflows():
    """All 320 while loops: the dtype of every op and of every joint."""
    _, body = rows("loops.tsv")
    assert len(body) == 320
    for row in body:
        first, inside, last = row[:3]
        graph, joints = loop_graph(first, inside, last)
        half = propagate(graph)
        n, m = len(first), len(inside)
        assert painted(first, half[:n]) == row[3], row
        assert painted(inside, half[n + 3 : n + 3 + m]) == row[4], row
        assert painted(last, half[n + m + 5 :]) == row[5], row
        assert ["HALF" if half[j] else "FLOAT" for j in joints] == row[6:11], row


def test_nothing_is_half_without_a_product():
    """A program without allow nodes stays as it is."""
    assert propagate(chain("gcbg")) == [False] * 4


def test_deny_wins_over_a_half_operand():
    """add(product, exp) is float32: any denied operand decides."""
    graph = graph_of("wbg", [(0, 2), (1, 2)])
    assert propagate(graph) == [True, False, False]


def pruned(kinds, edges, returned=(), sinks=(), carries=()):
    graph = graph_of(kinds, edges, carries)
    labels = prune(graph, propagate(graph), (), (), returned, sinks)
    return painted(kinds, labels)


def line(kinds):
    return [(i, i + 1) for i in range(len(kinds) - 1)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("wgb", "Wgb"),  # the bias before a softmax belongs to its interior
        ("wcgb", "Wcgb"),
        ("wgw", "WGW"),  # between products it is kept
        ("wgbgw", "WgbgW"),
        ("cw", "CW"),  # a weight is cast before it is transposed
        ("wgg", "Wgg"),  # nobody reads it in half
    ],
)
def test_pruned_chains(kinds, expected):
    """What no half node reads is float32."""
    assert pruned(kinds, line(kinds)) == expected


def test_a_shared_argument_is_cast_on_the_edge():
    """A reshaped target that the loss reads too is not rounded for the product."""
    assert pruned("cwg", [(0, 1), (0, 2)]) == "cWg"


def test_a_returned_argument_is_not_rounded():
    """What the program returns as well stays float32."""
    assert pruned("cw", [(0, 1)], returned={0}) == "cW"


def test_a_comparison_follows_what_it_reads():
    """A comparison is half where its operand is, and only there."""
    edges = [(0, 1), (1, 2), (1, 3)]
    assert pruned("wcwc", edges, sinks={3}) == "WCWC"
    assert pruned("cwc", [(0, 1), (0, 2)], sinks={2}) == "cWc"


def test_a_carry_that_float32_reads_is_float32():
    """A carry made in float32 is half only if all readers are products."""
    # 0 received, 1 product, 2 wall, 3 handed on
    edges = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert pruned("cwnc", edges, carries=[(3, 0)]) == "CWnC"
    both = [*edges, (0, 2)]
    assert pruned("cwnc", both, carries=[(3, 0)]) == "cWnc"


@st.composite
def storages(draw, largest):
    """Programs of up to seven nodes; each cost is up to `largest`."""
    size = draw(st.integers(1, 7))
    node = st.integers(0, size - 1)
    price = st.one_of(st.integers(0, 9), st.integers(0, largest))
    saved = draw(
        st.lists(
            st.builds(lambda p, negative: -p if negative else p, price, st.booleans()),
            min_size=size,
            max_size=size,
        )
    )
    edges = draw(st.lists(st.tuples(node, node, price), max_size=10))
    may = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ties = draw(st.lists(st.tuples(node, node), max_size=2))
    needs = draw(st.lists(st.tuples(node, node), max_size=2))
    return Storage(saved, edges, may, ties, needs)


def brute_force(storage):
    """All labellings, the cheapest first; of equal ones that with the fewest half."""
    allowed = [
        half
        for half in itertools.product([False, True], repeat=len(storage.may))
        if all(may or not h for may, h in zip(storage.may, half, strict=True))
        and all(half[a] == half[b] for a, b in storage.ties)
        and all(half[b] or not half[a] for a, b in storage.needs)
    ]
    return min(allowed, key=lambda half: (storage.cost(half), sum(half)))


@pytest.mark.slow
@settings(max_examples=600, deadline=None, derandomize=True)
@given(storages(largest=2**26))
def test_the_placement_is_the_cheapest(storage):
    """A minimum cut is what trying all labellings finds."""
    assert cheapest(storage) == list(brute_force(storage))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(storages(largest=2**44))
def test_the_placement_of_large_programs(storage):
    """Terabytes do not fit into 32 bits: what is lost are the last of 29 digits."""
    best, found = storage.cost(brute_force(storage)), storage.cost(cheapest(storage))
    largest = max([*map(abs, storage.saved), *(c for *_, c in storage.edges)])
    assert best <= found <= best + 40 * largest / 2**29


def test_a_cut_is_by_the_smallest_cost():
    """Rounding a shared source once is cheaper than each of what is moved from it."""
    edges = [(0, 1, 3), (0, 2, 3)]
    storage = Storage([-4, 8, 8], edges, [True] * 3)
    assert cheapest(storage) == [True] * 3
    assert cheapest(storage._replace(saved=[-9, 8, 8])) == [False, True, True]
    assert cheapest(storage._replace(saved=[-9, 2, 2])) == [False] * 3
    assert cheapest(storage._replace(may=[True, True, False])) == [False, True, False]
    assert (
        cheapest(storage._replace(ties=[(1, 2)], may=[True, True, False]))
        == [False] * 3
    )
    needs = storage._replace(needs=[(1, 2)], edges=[])
    assert cheapest(needs) == [False, True, True]
    assert cheapest(needs._replace(saved=[-4, 8, -9])) == [False] * 3
    assert cheapest(needs._replace(saved=[-4, -9, 8])) == [False, False, True]
