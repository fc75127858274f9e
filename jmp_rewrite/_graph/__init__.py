"""The program as one graph; judges nothing."""

from jmp_rewrite._graph import build, nodes, region
from jmp_rewrite._graph.equal import computed_once
from jmp_rewrite._graph.half import compute_dtype, half_precision, has_half_precision
from jmp_rewrite._graph.nodes import (
    KERNEL_OPERAND,
    KERNEL_RESULT,
    Graph,
    Inner,
    Instance,
    Loop,
    Node,
    Opaque,
    Value,
    elements,
    is_float32,
    is_half,
    reached,
    reads_float32,
)
from jmp_rewrite._graph.region import FLOAT32, Region
from jmp_rewrite._graph.scopes import (
    FULL_PRECISION,
    PASS,
    REWRITTEN,
    TOP,
    Place,
    full_precision,
    inner_place,
    matched,
    report_unused,
)

__all__ = [
    "FLOAT32",
    "FULL_PRECISION",
    "Graph",
    "Inner",
    "Instance",
    "KERNEL_OPERAND",
    "KERNEL_RESULT",
    "Loop",
    "Node",
    "Opaque",
    "PASS",
    "Place",
    "REWRITTEN",
    "Region",
    "TOP",
    "Value",
    "build",
    "compute_dtype",
    "computed_once",
    "elements",
    "full_precision",
    "half_precision",
    "has_half_precision",
    "inner_place",
    "is_float32",
    "is_half",
    "matched",
    "nodes",
    "reached",
    "reads_float32",
    "region",
    "report_unused",
]
