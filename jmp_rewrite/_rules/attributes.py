"""What else is asked about primitives: what they cost, move, pick and compare."""

from __future__ import annotations

from jmp_rewrite._rules.table import RULES, Category

# Arithmetic that compilers do not do twice.
COSTLY = frozenset(
    {
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "cos",
        "cosh",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "logistic",
        "pow",
        "sin",
        "sinh",
        "tan",
        "tanh",
    }
)

# Exponentials, and logarithms, to any base.
EXPONENTIALS = frozenset({"exp", "exp2"})
LOGARITHMS = frozenset({"log", "log2"})

# The results of these are elements of their operands.
PICKS = frozenset(
    {
        "approx_top_k",
        "broadcast_in_dim",
        "clamp",
        "cummax",
        "cummin",
        "dynamic_update_slice",
        "expand_dims",
        "max",
        "min",
        "pmax",
        "pmin",
        "reduce_max",
        "reduce_min",
        "reduce_window_max",
        "reduce_window_min",
        "reshape",
        "scatter",
        "scatter-max",
        "scatter-min",
        "select_n",
        "sort",
        "squeeze",
        "stack",
        "stop_gradient",
        "tile",
        "top_k",
        "transpose",
        "unstack",
    }
)

# These add values together, element by element; `add_any` adds cotangents.
ADDS = frozenset({"add", "add_any"})
SUMS = ADDS | {"sub"}

SUMS_OVER_DEVICES = frozenset(
    {
        "psum",
        "psum_invariant",
        "reduce_scatter",
        "unreduced_psum",
        "unreduced_reduce_scatter",
    }
)

# These put values beside each other.
JOINS = frozenset({"concatenate", "stack"})

# These read parts of their operand.
TAKES_APART = frozenset({"dynamic_slice", "slice", "split", "unstack"})

# These ask which elements are the same.
COMPARES = frozenset({"eq", "ne"})

# These choose what to add up by which element of a window is the largest: derivatives
# of pools.
CHOOSES = frozenset({"select_and_gather_add", "select_and_scatter_add"})

# These ask which of two is the larger one.
ORDERS = frozenset({"ge", "gt", "le", "lt"})
COMPARISONS = COMPARES | ORDERS | {"is_finite"}

# These compute no new numbers: half operands make an exact half result.
EXACT = frozenset(name for name, c in RULES.items() if c is Category.CLEAR)

# The results of these are their operands.
IDENTITIES = frozenset({"copy", "copy_p", "stop_gradient"})

# Results of these are views of their operand, or numbers that XLA repeats where they
# are read: they are kept as their operand, if at all.
VIEWS = IDENTITIES | {
    "broadcast_in_dim",
    "expand_dims",
    "name",
    "pvary",
    "reshape",
    "squeeze",
}

# Each element of the operands is one of the results: nothing is computed or left out.
MOVES = (VIEWS - {"broadcast_in_dim"}) | {
    "concatenate",
    "device_put",
    "optimization_barrier",
    "reshard",
    "rev",
    "sharding_constraint",
    "split",
    "stack",
    "transpose",
    "unstack",
}

# Each element of a result is one of the operands: some may be left out or repeated.
COPIES = MOVES | {
    "all_gather",
    "all_to_all",
    "broadcast_in_dim",
    "dynamic_slice",
    "gather",
    "pad",
    "ppermute",
    "slice",
    "tile",
}

# The same of several operands; but a `scatter` may compute as well.
SELECTS = COPIES | {"dynamic_update_slice", "scatter", "select_n"}

# Compilers compute these in the kernel that reads them, in each if there are several.
# No collective is among them, and nothing that is not as cheap.
ARITHMETIC = (VIEWS - {"copy_p", "pvary"}) | {
    "abs",
    "add",
    "add_any",
    "clamp",
    "convert_element_type",
    "div",
    "integer_pow",
    "max",
    "min",
    "mul",
    "neg",
    "one_minus_square",
    "polynomial",
    "select_n",
    "sign",
    "sqrt",
    "square",
    "sub",
    "transpose",
}

# Each element of a result is computed of the elements that stand there.
ELEMENTWISE = (ARITHMETIC - VIEWS - {"convert_element_type", "transpose"}) | COSTLY
ELEMENTWISE |= {"ceil", "floor", "rem", "round", "rsqrt"}

# A sum is the same before these as after them.
LINEAR = (MOVES - {"device_put", "optimization_barrier"}) | {
    "add",
    "add_any",
    "neg",
    "slice",
    "sub",
}

# Of an operand whose elements are all one number, results of these are that number.
MOVES_NUMBER = (VIEWS - {"name", "pvary"}) | {"convert_element_type", "transpose"}
