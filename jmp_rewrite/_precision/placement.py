"""Where the values that may be half are half.

`propagate` is the placement: a function from a bare graph (categories, edges, carries)
to a label for each node, that knows nothing of JAX and can be exchanged. It is
TensorFlow's algorithm (tensorflow/core/grappler/optimizers/auto_mixed_precision.cc).
`prune` then takes back labels that buy nothing; it is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from jmp_rewrite._graph import reached
from jmp_rewrite._rules import Category


class BareGraph(NamedTuple):
    """What a placement has to know of a program.

    Attributes:
      categories: of each node, in program order; None for what stays float32 but
        denies nothing downstream (a wall).
      predecessors: for each node the nodes that it reads.
      successors: for each node the nodes that read it.
      carries: (what an iteration hands on, what the next one receives) of each carry.
    """

    categories: Sequence[Category | None]
    predecessors: Sequence[Sequence[int]]
    successors: Sequence[Sequence[int]]
    carries: Sequence[tuple[int, int]] = ()


def propagate(graph: BareGraph) -> list[bool]:
    """Labels nodes half (True) as TensorFlow's pass paints them.

    1. Every allow node is half. 2. Deny floods forward from deny nodes through infer
    nodes, and through clear nodes that lead to an infer or deny node. 3. What lies
    between allow nodes is half. 4. An infer node that reads half, and no denied node,
    is half, in one sweep in program order. 5. Half floods in both directions
    through clear nodes. 6. A carry is half only if both its ends are.

    Args:
      graph: the bare graph.

    Returns:
      For each node whether it runs in half precision.
    """
    categories = graph.categories
    allowed = [n for n, c in enumerate(categories) if c is Category.ALLOW]
    if not allowed:
        return [False] * len(categories)
    denied = _denied(graph)

    def may(node: int, *of: Category) -> bool:
        return categories[node] in of and node not in denied

    passes = (Category.CLEAR, Category.INFER)
    ahead = reached(allowed, graph.successors, lambda n: may(n, *passes))
    half = reached(allowed, graph.predecessors, ahead.__contains__)
    for node in range(len(categories)):
        reads = graph.predecessors[node]
        if node not in half and may(node, Category.INFER):
            if any(n in half for n in reads) and not any(n in denied for n in reads):
                half.add(node)
    around = zip(graph.predecessors, graph.successors, strict=True)
    both = [[*before, *behind] for before, behind in around]
    half = reached(half, both, lambda n: may(n, Category.CLEAR))
    _agree(graph.carries, half)
    return [n in half for n in range(len(categories))]


def _denied(graph: BareGraph) -> set[int]:
    """Returns the deny nodes and all that they deny downstream."""
    categories = graph.categories
    tells = {
        n for n, c in enumerate(categories) if c in (Category.DENY, Category.INFER)
    }
    leads = reached(
        tells, graph.predecessors, lambda n: categories[n] is Category.CLEAR
    )
    denied = {n for n, c in enumerate(categories) if c is Category.DENY}
    return reached(denied, graph.successors, leads.__contains__)


def _agree(carries: Sequence[tuple[int, int]], half: set[int]) -> None:
    """Gives what an iteration hands on the label of what the next one receives."""
    for handed_on, received in carries:
        if received in half:
            half.add(handed_on)
        else:
            half.discard(handed_on)


def prune(
    graph: BareGraph,
    half: Sequence[bool],
    emits_full: Container[int],
    reads_full: Container[int],
    returned: Container[int],
    sinks: Container[int],
) -> list[bool]:
    """Takes back what the placement made half without use.

    TensorFlow paints what follows a matrix product up to the next deny node, and
    clear nodes in front of one. Two kinds of such nodes gain nothing and lose digits:

    - a node that no half node reads: its readers cast its result back at once, so the
      interior of a softmax, a variance or a loss is float32;
    - a node that reads no half node, and that some float32 node reads as well: the
      cast belongs on the edge to the half reader (a reshaped target of a loss).

    Args:
      graph: the bare graph.
      half: the placement's labels.
      emits_full: matrix products whose result is float32.
      reads_full: nodes that compute in float32 even where their result is half.
      returned: nodes whose value the program returns, in float32.
      sinks: clear nodes without a float32 result (comparisons): they are exact in half
        where all that they read is half.

    Returns:
      The labels that are left.
    """
    pruning = _Pruning(graph, list(half), emits_full, reads_full, returned, sinks)
    while pruning.sweep():
        pass
    return pruning.labels


@dataclasses.dataclass(eq=False)
class _Pruning:
    """The labels while they are pruned."""

    graph: BareGraph
    labels: list[bool]
    emits_full: Container[int]
    reads_full: Container[int]
    returned: Container[int]
    sinks: Container[int]

    def __post_init__(self) -> None:
        graph = self.graph
        self.born: set[int] = set()
        self.received = dict(graph.carries)
        self.pairs: dict[int, tuple[int, ...]] = {}
        for handed_on, received in graph.carries:
            around = (*graph.predecessors[handed_on], *graph.successors[received])
            self.pairs[received] = (handed_on, *around)
            self.pairs[handed_on] = (received, *around)

    def sweep(self) -> bool:
        """Takes back what can be told from what is born half now."""
        self.born = self._born_half()
        work = list(range(len(self.labels)))
        changed = False
        while work:
            node = work.pop()
            if self.labels[node] and not self.keeps(node):
                self.labels[node] = False
                changed = True
                work.extend(self.graph.predecessors[node])
                work.extend(self.graph.successors[node])
                work.extend(self.pairs.get(node, ()))
        return changed

    def _born_half(self) -> set[int]:
        """Returns the nodes that are half because of a product, not for a reader."""
        roots = {
            n
            for n, c in enumerate(self.graph.categories)
            if c is Category.ALLOW and self.labels[n] and n not in self.emits_full
        }
        labels = self.labels
        return reached(
            roots,
            self.graph.successors,
            lambda n: labels[n] and n not in self.emits_full,
        )

    def keeps(self, node: int) -> bool:
        """Whether a half node is half to some use."""
        if self.graph.categories[node] is Category.ALLOW:
            return True
        if node in self.received:
            return self.labels[self.received[node]]
        sources = self._sources(node)
        if node in self.sinks:
            return bool(sources) and all(n in self.born for n in sources)
        readers = self.graph.successors[node]
        reads = [
            self.labels[n] and n not in self.reads_full and n not in self.sinks
            for n in readers
        ]
        if not any(reads):
            return False
        if any(n in self.born for n in sources):
            return True
        return node not in self.returned and all(reads)

    def _sources(self, node: int) -> list[int]:
        """Returns the nodes that one reads; a carry reads the end of an iteration."""
        sources: list[int] = []
        for source in self.graph.predecessors[node]:
            if source in self.received:
                sources.extend(self.graph.predecessors[source])
            else:
                sources.append(source)
        return sources


class Storage(NamedTuple):
    """What it costs to store the results of a program in half or in float32.

    Attributes:
      saved: bytes that a half result of each node saves; negative where it costs.
      edges: (node, node, cost) of pairs that should agree, and the cost if they do not.
      may: whether a node's result may be half.
      ties: pairs of nodes that must agree.
      needs: (node, other) of nodes that may be half only if the other one is.
    """

    saved: Sequence[int]
    edges: Sequence[tuple[int, int, int]]
    may: Sequence[bool]
    ties: Sequence[tuple[int, int]] = ()
    needs: Sequence[tuple[int, int]] = ()

    def cost(self, half: Sequence[bool]) -> int:
        """Returns the cost of a labelling; the smallest one is the best."""
        kept = sum(s for s, h in zip(self.saved, half, strict=True) if not h)
        return kept + sum(c for a, b, c in self.edges if half[a] != half[b])


# SciPy's flows are 32-bit; two capacities are added at most.
_LARGEST_CAPACITY = 2**29
# The cost of an edge that is in no cut.
_NEVER = -1


def cheapest(storage: Storage) -> list[bool]:
    """Labels nodes half (True) so that the cost is smallest: a minimum cut.

    Nodes on the side of the source are half. A node that saves bytes hangs on the
    source, one that costs bytes on the sink, and an edge between two nodes carries what
    it costs to part them. Ties are one vertex; what may not be half is the sink. Of
    several cheapest labellings it is the one with the fewest half nodes.

    Costs are exact up to 2**29 within what hangs together, and rounded to as many
    digits beyond.
    """
    size = len(storage.may)
    source, sink = size, size + 1
    vertex = _vertices(storage, sink)
    terminals = [
        (source, vertex[n], saved) if saved > 0 else (vertex[n], sink, -saved)
        for n, saved in enumerate(storage.saved)
    ]
    between = [(vertex[a], vertex[b], cost) for a, b, cost in storage.edges]
    edges = [*terminals, *between, *((b, a, cost) for a, b, cost in between)]
    edges = [e for e in edges if e[0] != e[1] and e[2] > 0 and e[0] != sink]
    # What must be float32 costs the same in all labellings; SciPy would add it up.
    edges = [e for e in edges if e[:2] != (source, sink)]
    if not edges:
        return [False] * size
    needs = {(vertex[a], vertex[b], _NEVER) for a, b in storage.needs}
    edges += [e for e in needs if e[0] != e[1] and e[0] != sink]
    half = _source_side(np.array(edges, np.float64), source, sink)
    return [v in half for v in vertex]


def _vertices(storage: Storage, sink: int) -> list[int]:
    """Returns for each node its vertex of the flow network; ties share one."""
    leader = list(range(len(storage.may)))

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for a, b in storage.ties:
        leader[find(a)] = find(b)
    full = {find(n) for n, may in enumerate(storage.may) if not may}
    return [sink if find(n) in full else find(n) for n in range(len(leader))]


def _source_side(edges: np.ndarray, source: int, sink: int) -> set[int]:
    """Returns the vertices that stay with the source in the smallest minimum cut."""
    shape = (sink + 1, sink + 1)
    (rows, columns), exact = edges[:, :2].T.astype(np.int64), edges[:, 2]
    parts = _parts(rows, columns, source, sink)
    part = parts[np.where(rows == source, columns, rows)]
    largest = np.zeros(parts.max() + 1)
    np.maximum.at(largest, part, exact)
    scale = np.minimum(1.0, _LARGEST_CAPACITY / largest[part])
    capacities = np.maximum(1, np.round(exact * scale)).astype(np.int32)
    capacities[exact == _NEVER] = 2 * _LARGEST_CAPACITY
    network = sparse.csr_matrix((capacities, (rows, columns)), shape=shape)
    residual = network - csgraph.maximum_flow(network, source, sink).flow
    residual.eliminate_zeros()
    return set(csgraph.breadth_first_order(residual, source, return_predecessors=False))


def _parts(rows: np.ndarray, columns: np.ndarray, source: int, sink: int) -> np.ndarray:
    """Returns for each vertex the part of the network, less source and sink."""
    inside = (rows != source) & (columns != sink)
    ones = np.ones(int(inside.sum()), np.int8)
    links = (ones, (rows[inside], columns[inside]))
    network = sparse.csr_matrix(links, shape=(sink + 1, sink + 1))
    return csgraph.connected_components(network, directed=False)[1]
