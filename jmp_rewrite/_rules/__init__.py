"""Which primitive runs in which precision: data."""

from jmp_rewrite._rules import table
from jmp_rewrite._rules.attributes import (
    COMPARES,
    COPIES,
    COSTLY,
    EXACT,
    IDENTITIES,
    LINEAR,
    MOVES,
    MOVES_NUMBER,
    PICKS,
    SELECTS,
    VIEWS,
)
from jmp_rewrite._rules.held import (
    CALLS,
    LANES,
    LEFT_ALONE,
    held_jaxprs,
    held_parameters,
)
from jmp_rewrite._rules.table import (
    DECOMPOSITIONS,
    PRODUCTS,
    RULES,
    SHARP,
    Category,
    default_rules,
    dtype_name,
    opaque_reason,
    reason,
)

__all__ = [
    "CALLS",
    "COMPARES",
    "COPIES",
    "MOVES",
    "COSTLY",
    "Category",
    "DECOMPOSITIONS",
    "EXACT",
    "IDENTITIES",
    "LANES",
    "LEFT_ALONE",
    "LINEAR",
    "MOVES_NUMBER",
    "PICKS",
    "PRODUCTS",
    "RULES",
    "SELECTS",
    "SHARP",
    "VIEWS",
    "default_rules",
    "dtype_name",
    "held_jaxprs",
    "held_parameters",
    "opaque_reason",
    "reason",
    "table",
]
