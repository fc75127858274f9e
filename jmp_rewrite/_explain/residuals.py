"""What equations cost: operations of products, bytes of values, bytes of residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jmp_rewrite import _compat
from jmp_rewrite._precision import ENDS_KERNEL
from jmp_rewrite._rules import CALLS, COSTLY, PRODUCTS, VIEWS, held_jaxprs

HALVES = frozenset({"bfloat16", "float16"})

# What is made of arguments by these alone is their copy, and no activation.
CASTS = frozenset({"convert_element_type", "saturating_cast"})
_COPIES = VIEWS | {
    "convert_element_type",
    "saturating_cast",
    "sharding_constraint",
    "transpose",
}


def nbytes(aval: Any) -> int:
    """Returns the bytes of a value of a type; 0 for references, keys and tokens."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    shape = getattr(aval, "shape", ())
    known = all(isinstance(d, int) for d in shape)
    known = known and not _compat.is_reference(aval)
    return math.prod(shape) * itemsize if known else 0


def dimensions(eqn: Any) -> tuple[int, int, int]:
    """Returns the sizes (m, k, n) of a product as one matrix product.

    A batch of products is as large as one of its members. In a convolution k counts the
    input features and the elements of the window.
    """
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        out = eqn.outvars[0].aval.shape
        spec = eqn.params["dimension_numbers"]
        features = rhs[spec.rhs_spec[0]]
        k = math.prod(rhs) // max(features, 1)
        return math.prod(out) // max(out[spec.out_spec[1]], 1), k, features
    (contract, rhs_contract), (batch, rhs_batch) = _dot_dimensions(eqn)
    k = math.prod(lhs[d] for d in contract)
    m = math.prod(lhs) // max(k * math.prod(lhs[d] for d in batch), 1)
    groups = _group_dimensions(eqn)
    used = {*rhs_contract, *rhs_batch, *groups}
    return m, k, math.prod(s for d, s in enumerate(rhs) if d not in used)


def _dot_dimensions(eqn: Any) -> Any:
    if eqn.primitive.name == "ragged_dot_general":
        return eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return eqn.params["dimension_numbers"]


def _group_dimensions(eqn: Any) -> tuple[int, ...]:
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    return () if numbers is None else tuple(numbers.rhs_group_dimensions)


def aligned_dimensions(eqn: Any) -> tuple[int, ...]:
    """Returns the sizes that should be multiples of what a matrix unit takes.

    Those of a matrix product are its rows, and last its features: the contracted ones
    and those of the result. Those of a convolution are its features, in and out.
    """
    if eqn.primitive.name not in PRODUCTS:
        return ()
    m, k, n = dimensions(eqn)
    if eqn.primitive.name != "conv_general_dilated":
        return m, k, n
    return eqn.invars[1].aval.shape[eqn.params["dimension_numbers"].rhs_spec[1]], n


def flops(eqn: Any) -> int:
    """Returns the multiplications and additions of a product; 0 for all else.

    Every element of the result is a sum of k products. Padding and the zeros of dilated
    convolutions count like any other element.
    """
    if eqn.primitive.name not in PRODUCTS:
        return 0
    m, k, n = dimensions(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        return 2 * m * k * n
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(lhs) * n if m and k else 0


class Residuals(NamedTuple):
    """What a forward pass keeps for the backward pass.

    Attributes:
      activations: bytes of the values that it computes.
      copies: bytes of casts and other copies of arguments, such as half weights.
    """

    activations: int
    copies: int


def operands(eqn: Any) -> list[Any]:
    """Returns the variables that an equation reads, where they are stored."""
    values = eqn.invars
    if eqn.primitive.name == "by_device":
        values = values[: eqn.params["results"]]
    return [v for v in values if not hasattr(v, "val")]


class _Origins:
    """Follows the values of a jaxpr back through views and copies.

    A view is the value that it shows; a copy is a value of its own, but no activation
    if an argument is what was copied.
    """

    def __init__(self, jaxpr: Any) -> None:
        body = _compat.open_jaxpr(jaxpr)
        self.own = {*body.invars, *body.constvars}
        self._views: dict[Any, Any] = {}
        self._copies: dict[Any, set[Any]] = {}  # through all copies
        self._remade: dict[Any, set[Any]] = {}  # through all that is computed again
        self._numbers: set[Any] = set()

    def read(self, eqn: Any) -> list[Any]:
        """Returns the operands of an equation, each seen through its views."""
        return [self._views.get(v, v) for v in operands(eqn)]

    def follow(self, eqn: Any) -> None:
        """Notes whether the results are views or copies of something."""
        sources = self.read(eqn)
        name = eqn.primitive.name
        if self._numbers.issuperset(sources) and not eqn.effects:
            self._numbers.update(
                eqn.outvars
            )  # XLA makes them again where they are read
        elif name == "by_device":
            passed = zip(eqn.outvars, eqn.invars, strict=False)
            variables = ((a, b) for a, b in passed if not hasattr(b, "val"))
            self._views.update((a, self._views.get(b, b)) for a, b in variables)
        elif len(sources) == 1 and name in VIEWS:
            self._views[eqn.outvars[0]] = sources[0]
        elif len(sources) == 1 and name in _COPIES:
            self._copies[eqn.outvars[0]] = self.sources(sources[0])
        elif name in CALLS or name in ("cond", "scan"):
            self._follow_inside(eqn)
        if _is_cheap(eqn):
            made_of = set().union(*map(self.remade, sources))
            # One large value is read in place of another.
            size = nbytes(eqn.outvars[0].aval)
            large = (2 * nbytes(v.aval) >= size for v in made_of - self._numbers)
            if sum(large) == 1:
                self._remade[eqn.outvars[0]] = made_of

    def remade(self, value: Any) -> set[Any]:
        """Returns from what a value is cheaply computed again: itself, if it is not.

        The placement's own view of what is stored, see `_precision/cost.py`.
        """
        value = self._views.get(value, value)
        return self._remade.get(value, {value})

    def _follow_inside(self, eqn: Any) -> None:
        """Notes what a body hands out of what it was given.

        What some branches make of nothing is a copy if it is one in all others: these
        are the zeros of a branch that keeps less than another.
        """
        handed = [_handed_on(eqn, jaxpr) for jaxpr in held_jaxprs(eqn)]
        for var, *branches in zip(eqn.outvars, *handed, strict=True):
            given = [value for branch in branches for value in branch]
            if given and None not in given:
                self._copies[var] = set().union(*map(self.sources, given))

    def handed_out(self, value: Any) -> set[Any]:
        """Returns the sources of what a jaxpr returns; none of a number."""
        is_number = hasattr(value, "val") or value in self._numbers
        return set() if is_number else self.sources(value)

    def sources(self, value: Any) -> set[Any]:
        """Returns what a value may be a copy of, through all copies."""
        value = self._views.get(value, value)
        return self._copies.get(value, {value})

    def measure(self, values: Iterable[Any]) -> Residuals:
        """Measures values, each once."""
        kept = {self._views.get(v, v) for v in values} - self.own - self._numbers
        copies = {v for v in kept if self.sources(v) <= self.own}
        return Residuals(
            sum(nbytes(v.aval) for v in kept - copies),
            sum(nbytes(v.aval) for v in copies),
        )


def _handed_on(eqn: Any, jaxpr: Any) -> list[list[Any]]:
    """Returns for each result of a body which operands it may be; None if it is made.

    None of what is made of numbers alone.
    """
    body = _compat.open_jaxpr(jaxpr)
    inside = _Origins(jaxpr)
    for inner in body.eqns:
        inside.follow(inner)
    operands = eqn.invars[len(eqn.invars) - len(body.invars) :]
    outside = dict(zip(body.invars, operands, strict=True))
    if eqn.primitive.name == "scan":
        num_consts, num_carry = _compat.scan_split(eqn.params)
        for var in body.invars[num_consts : num_consts + num_carry]:
            del outside[var]
    known = {v: x for v, x in outside.items() if not hasattr(x, "val")}
    return [[known.get(v) for v in inside.handed_out(x)] for x in body.outvars]


def _is_cheap(eqn: Any) -> bool:
    """Whether a compiler recomputes an equation where its result is read."""
    name = eqn.primitive.name
    if name in COSTLY or name in ENDS_KERNEL or name in PRODUCTS or eqn.effects:
        return False
    if len(eqn.outvars) != 1 or any(held_jaxprs(eqn)):
        return False
    # A rounded value is stored; what it was rounded from is not computed for it.
    dtype = eqn.outvars[0].aval.dtype
    return not (name in CASTS and str(dtype) in HALVES)


class BackwardPass:
    """Finds the backward passes inside a program, and what they read.

    What reverse-mode differentiation has made is marked in the name stack.
    """

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def is_in(self, closed: Any) -> bool:
        """Whether reverse-mode differentiation made a part of the program."""
        body = _compat.open_jaxpr(closed)
        if body not in self._known:
            self._known[body] = any(
                _is_backward(e) or any(map(self.is_in, held_jaxprs(e)))
                for e in body.eqns
            )
        return self._known[body]

    def residuals(self, closed: Any) -> Residuals:
        """Measures the forward values that the backward pass of a program reads.

        A value that the backward pass sees through a view counts once, with its own
        size; of a loop over train steps one iteration counts.

        Args:
          closed: a program that holds a backward pass.
        """
        body = _compat.open_jaxpr(closed)
        origins = _Origins(closed)
        late: set[Any] = set()  # made by the backward pass, or from what it made
        kept: list[Any] = []
        total = Residuals(0, 0)
        for eqn in body.eqns:
            if _is_backward(eqn):
                read = [v for v in origins.read(eqn) if v not in late]
                if eqn.primitive.name not in PRODUCTS:
                    read = [v for r in read for v in origins.remade(r)]
                kept += read
                late.update(eqn.outvars)
                continue
            inner = [j for j in held_jaxprs(eqn) if self.is_in(j)]
            for jaxpr in inner:
                total = _sum(total, self.residuals(jaxpr))
            if inner or not late.isdisjoint(origins.read(eqn)):
                late.update(eqn.outvars)
            else:
                origins.follow(eqn)
        return _sum(total, origins.measure(kept))


def _is_backward(eqn: Any) -> bool:
    elements = _compat.scope_elements(eqn.source_info.name_stack)
    return any(e.name == "transpose" and not _compat.is_scope(e) for e in elements)


def _sum(one: Residuals, other: Residuals) -> Residuals:
    return Residuals(one.activations + other.activations, one.copies + other.copies)


def vjp_residuals(fun: Callable[..., Any], avals: Iterable[Any]) -> Residuals:
    """Measures what `jax.vjp` of a flat function keeps, as `residuals` does.

    Args:
      fun: takes and returns flat arrays.
      avals: the types of its arguments.
    """

    def kept(*args: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(fun, *args)[1])

    closed = jax.make_jaxpr(kept)(*avals)
    body = _compat.open_jaxpr(closed)
    origins = _Origins(closed)
    for eqn in body.eqns:
        origins.follow(eqn)
    return origins.measure(v for v in body.outvars if not hasattr(v, "val"))
