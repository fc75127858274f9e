"""The sums over keys in an attention's backward pass, taken over its features."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jmp_rewrite import _compat
from jmp_rewrite._graph import elements
from jmp_rewrite._passes.by_device import LANES, TPU, Where
from jmp_rewrite._passes.edit import Body, Editor
from jmp_rewrite._passes.match import is_float, is_float32, is_half_product
from jmp_rewrite._passes.program import CASTS, ROUNDING
from jmp_rewrite._rules import IDENTITIES

# These change nothing but the order of dimensions, and how a value is rounded.
_SAME = IDENTITIES | CASTS | {"name"}
# A name for each dimension: those of what is summed up count from 0, those of features
# follow, and those that are not known yet are negative.
_Names = tuple[int, ...]

# A product of more is not taken apart: one of powers has as many as there are ways.
_MOST_FACTORS = 64


def attention_feature_sums(editor: Editor) -> None:
    """An attention's sum over keys is taken over its features, before the product.

    Of `o = p v`, where `p` is a softmax, the backward pass needs the product
    `dp = do v'` and, for each query, the sum of `dp p` over the keys. As long as that
    sum is not there, nothing that is made of `dp` is: the product has to be written,
    and both products that read what is made of it compute that anew. But

        sum_k dp_k p_k  =  sum_k (sum_d do_d v_kd) p_k  =  sum_d do_d o_d

    is a sum of what is there before the product, of fewer terms. The rest is then
    computed in the product's own kernel, so that it is written once, and is no
    difference of rounded values. Source: FlashAttention (Dao et al., 2022, section B.2
    and algorithm 4), which takes it of half `o` and `do` as well.

    On TPUs, in whole train steps.

    Gain: ViT 8 % fewer cycles on a TPU v5e (`benchmarks/NOTES.md`, 45).
    """
    for body in editor.bodies:
        found = _Found(editor, body)
        for index in found.sums():
            how = found.feature_sum(index)
            if how is not None:
                _take(editor, body, index, how)


def _take(editor: Editor, body: Body, index: int, how: FeatureSum) -> None:
    (out,) = body.eqns[index].outvars
    operands = (how.cotangent, how.output, *how.factors)
    if any(_compat.lays_out(v.aval.sharding) for v in (out, *operands)):
        return
    branches = {Where((TPU,)): _over_features}
    editor.choose_instead(body, out, operands, branches, layout=how.layout)


def _over_features(
    stored: Any, first: Any, second: Any, *factors: Any, layout: SumLayout
) -> list[Any]:
    second = lax.transpose(_float32(second), layout.order)
    total = lax.reduce_sum(lax.mul(_float32(first), second), layout.features)
    total = lax.transpose(total, layout.rows)
    if layout.number != 1:
        total = total * np.float32(layout.number)
    how = zip(layout.keys, layout.factors, layout.divides, strict=True)
    for x, (keys, order, divides) in zip(factors, how, strict=True):
        for dim in reversed(keys):
            x = lax.index_in_dim(x, 0, dim, keepdims=False)
        x = _float32(lax.transpose(x, order) if order else x)
        total = total / x if divides else total * x
    return [total]


def _float32(x: Any) -> Any:
    return x if x.dtype == np.float32 else _compat.convert(x, np.float32)


class SumLayout(NamedTuple):
    """How a sum over features is taken of the product of two arrays.

    Attributes:
      order: the dimensions of the second array, in the order of those of the first.
      features: those of the first that are summed over.
      rows: the order of the others in the result.
      keys: of each factor the dimensions along which all its numbers are the same.
      factors: of each factor the order of its others; empty for a number.
      divides: whether it is a divisor.
      number: another factor.
    """

    order: tuple[int, ...]
    features: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    factors: tuple[tuple[int, ...], ...]
    divides: tuple[bool, ...]
    number: float


class FeatureSum(NamedTuple):
    """How a sum over keys is taken over features.

    Attributes:
      cotangent: the variable of `do`, half.
      output: the variable of `o`, half.
      factors: variables by which the sum is multiplied or divided.
      layout: how their dimensions lie.
    """

    cotangent: Any
    output: Any
    factors: tuple[Any, ...]
    layout: SumLayout


class _Factor(NamedTuple):
    """A part of a product of arrays, or of a quotient."""

    var: Any
    names: _Names
    divides: bool


class _Terms(NamedTuple):
    """A product of arrays, taken apart.

    Attributes:
      factors: the arrays.
      number: the product of the numbers in it.
    """

    factors: list[_Factor]
    number: float


class _Found:
    """The products and sums of a body."""

    def __init__(self, editor: Editor, body: Body) -> None:
        self._editor, self._body, self._eqns = editor, body, body.eqns
        self._maker = body.maker
        self._outputs: dict[Any, list[tuple[int, int]]] = {}

    def sums(self) -> list[int]:
        """Returns the float32 sums of a backward pass, if it has products."""
        products = [i for i, _ in self._body.find("dot_general") if self._is_product(i)]
        late = [i for i in products if self._is_late(i)]
        if not late or len(late) == len(products):
            return []
        for index in products:
            (out,) = self._eqns[index].outvars
            if not self._is_late(index) and out.aval.dtype == self._editor.half:
                for position, var in enumerate(self._eqns[index].invars):
                    root, _ = self._root(var, _in_order(var))
                    self._outputs.setdefault(root, []).append((index, position))
        return [i for i, _ in self._body.find("reduce_sum") if self._is_sum(i)]

    def _is_product(self, index: int) -> bool:
        eqn = self._eqns[index]
        if eqn.primitive.name != "dot_general":
            return False
        if _compat.lays_out(eqn.params["out_sharding"]):
            return False
        return is_half_product(eqn, self._editor.half) and not any(
            hasattr(v, "val") for v in eqn.invars
        )

    def _is_late(self, index: int) -> bool:
        return self._editor.is_backward(self._body, index)

    def _is_sum(self, index: int) -> bool:
        """Whether it is a sum of a backward pass whose float32 nobody asked for."""
        (operand,), (out,) = self._eqns[index].invars, self._eqns[index].outvars
        if not is_float32(out) or hasattr(operand, "val"):
            return False
        if not self._is_late(index) or self._editor.was_here(self._body, out):
            return False
        reads = self._body.reads(out)
        rounds = any(
            self._eqns[i].primitive.name == ROUNDING for i, _ in reads if i >= 0
        )
        return not rounds and not self._editor.is_asked(self._body, index)

    # ---- what a value is made of

    def _root(self, var: Any, names: _Names) -> tuple[Any, _Names]:
        """Returns the variable that this one is a transpose of, and its dimensions."""
        while var in self._maker:
            eqn = self._eqns[self._maker[var]]
            if eqn.primitive.name not in ("transpose", *_SAME):
                break
            (before,) = eqn.invars
            if hasattr(before, "val") or not is_float(before):
                break
            if eqn.primitive.name == "transpose":
                names = _permuted(names, eqn.params["permutation"])
            var = before
        return var, names

    def _terms(self, var: Any, names: _Names) -> _Terms:
        """Takes a product of arrays apart, as far as it is one, and not of too many."""
        factors: list[_Factor] = []
        number = 1.0
        whole = _Factor(var, names, False)
        left = [whole]
        while left:
            if len(factors) > _MOST_FACTORS:
                return _Terms([whole], 1.0)
            var, names, divides = left.pop()
            if hasattr(var, "val"):
                value = float(var.val) if not names else math.nan
                number = number / value if divides and value else number * value
                continue
            var, names = self._root(var, names)
            eqn = self._eqns[self._maker[var]] if var in self._maker else None
            if eqn is None or not _multiplies(eqn):
                factors.append(_Factor(var, names, divides))
                continue
            name = eqn.primitive.name
            number = -number if name == "neg" else number
            dims = [names if v.aval.ndim else () for v in eqn.invars]
            if name == "dot_general":
                dims = _operand_names(eqn, names, ())
            for position, atom in enumerate(eqn.invars):
                below = name == "div" and position == 1
                left.append(_Factor(atom, dims[position], divides != below))
        return _Terms(factors, number)

    def _is_constant(self, factor: _Factor, keys: set[int]) -> bool:
        """Whether a factor is the same for all keys."""
        shape = factor.var.aval.shape
        along = [i for i, name in enumerate(factor.names) if name in keys]
        if all(shape[i] == 1 for i in along):
            return True
        index = self._maker.get(factor.var, -1)
        if index < 0 or self._eqns[index].primitive.name != "broadcast_in_dim":
            return False
        eqn = self._eqns[index]
        of = list(eqn.params["broadcast_dimensions"])
        operand = eqn.invars[0].aval.shape
        return all(i not in of or operand[of.index(i)] == 1 for i in along)

    def _is_sum_of_exponentials(self, var: Any) -> bool:
        """Whether a value is a softmax's divisor, neither zero nor infinite."""
        while var in self._maker:
            eqn = self._eqns[self._maker[var]]
            if eqn.primitive.name == "reduce_sum":
                root, _ = self._root(eqn.invars[0], _in_order(eqn.invars[0]))
                index = self._maker.get(root, -1)
                return index >= 0 and self._eqns[index].primitive.name == "exp"
            if eqn.primitive.name not in ("broadcast_in_dim", "reshape", *_SAME):
                return False
            (var, *_) = eqn.invars
            if hasattr(var, "val"):
                return False
        return False

    # ---- the sum

    def feature_sum(self, index: int) -> FeatureSum | None:
        """Returns how a sum is taken over features; None if it cannot be."""
        eqn = self._eqns[index]
        (operand,) = eqn.invars
        keys = set(eqn.params["axes"])
        if _compat.lays_out(eqn.params["out_sharding"]):
            return None
        if math.prod(operand.aval.shape[k] for k in keys) < LANES:
            return None
        terms = self._terms(operand, _in_order(operand))
        for factor in terms.factors:
            made = self._maker.get(factor.var, -1)
            if made < 0 or factor.divides or not self._is_product(made):
                continue
            shape = factor.var.aval.shape
            whole = shape == tuple(operand.aval.shape[n] for n in factor.names)
            if not self._is_late(made) or not whole:
                continue  # it is the same for several rows
            others = _Terms([f for f in terms.factors if f is not factor], terms.number)
            for position in (0, 1):
                found = self._over(self._eqns[made], position, factor, others, keys)
                if found is not None:
                    return found
        return None

    def _over(
        self, eqn: Any, position: int, dp: _Factor, others: _Terms, keys: set[int]
    ) -> FeatureSum | None:
        """Tries an operand of the product `dp` as the values `v`."""
        count = len(dp.names)
        contracted, _ = eqn.params["dimension_numbers"]
        features = tuple(range(count, count + len(contracted[0])))
        operands = _operand_names(eqn, dp.names, features)
        v, cotangent = eqn.invars[position], eqn.invars[1 - position]
        if not keys <= set(operands[position]) or keys & set(operands[1 - position]):
            return None
        root, names = self._root(v, operands[position])
        for index, at in self._outputs.get(root, ()):
            forward = self._eqns[index]
            _, own = self._root(forward.invars[at], _in_order(forward.invars[at]))
            labels = tuple(names[own.index(d)] for d in range(len(names)))
            matched = self._forward(forward, at, labels, keys, others)
            if matched is None:
                continue
            output, factors, number = matched
            (result,) = forward.outvars
            is_less = elements([result.aval]) < elements([eqn.outvars[0].aval])
            rows = set(range(count)) - keys
            whole = all(not f.names or rows <= set(f.names) for f in factors)
            mine = zip(operands[1 - position], cotangent.aval.shape, strict=True)
            theirs = zip(output, result.aval.shape, strict=True)
            if is_less and whole and sorted(mine) == sorted(theirs):
                layout = _layout(
                    operands[1 - position], output, count, keys, factors, number
                )
                read = tuple(f.var for f in factors)
                return FeatureSum(cotangent, result, read, layout)
        return None

    def _forward(
        self, eqn: Any, at: int, names: _Names, keys: set[int], others: _Terms
    ) -> tuple[_Names, list[_Factor], float] | None:
        """Matches a product `p v`.

        Args:
          eqn: the product.
          at: which operand is `v`.
          names: the names of the dimensions of `v`.
          keys: the names of the dimensions over which the sum is taken.
          others: what `dp` is multiplied by in that sum.

        Returns:
          The names of the dimensions of `o`, by what the sum over features is
          multiplied, and the number by which it is.
        """
        contracted, batch = eqn.params["dimension_numbers"]
        if {names[d] for d in contracted[at]} != keys:
            return None
        p = eqn.invars[1 - at]
        of_p: list[int] = [-1 - d for d in range(p.aval.ndim)]
        for mine, theirs in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
            (to, by) = (mine, theirs) if at else (theirs, mine)
            of_p[to] = names[by]
        terms = self._terms(p, tuple(of_p))
        wanted, rest = self._apart(others, keys)
        given, inverse = self._apart(terms, keys)
        known = _same_factors(given, wanted)
        if known is None or not terms.number or not math.isfinite(others.number):
            return None
        inverse = [f._replace(names=_known(f.names, known)) for f in inverse]
        rest, inverse = _without_common(rest, inverse)
        if not all(f.divides and self._is_sum_of_exponentials(f.var) for f in inverse):
            return None
        factors = [*rest, *(f._replace(divides=False) for f in inverse)]
        free = [d for d in range(len(names)) if d not in (*contracted[at], *batch[at])]
        of_v = [names[d] for d in free]
        own = [
            known.get(of_p[d], of_p[d])
            for d in range(p.aval.ndim)
            if d not in (*contracted[1 - at], *batch[1 - at])
        ]
        first, second = (of_v, own) if at == 0 else (own, of_v)
        output = (*(names[d] for d in batch[at]), *first, *second)
        number = others.number / terms.number
        if min(output) < 0 or not math.isfinite(number):
            return None
        return output, factors, number

    def _apart(
        self, terms: _Terms, keys: set[int]
    ) -> tuple[list[_Factor], list[_Factor]]:
        """Returns the factors that depend on the keys, and those that do not."""
        fixed = [f for f in terms.factors if self._is_constant(f, keys)]
        return [f for f in terms.factors if f not in fixed], fixed


def _multiplies(eqn: Any) -> bool:
    """Whether an equation is an elementwise product or quotient.

    Hugging Face masks heads by an `einsum`, which contracts nothing.
    """
    if eqn.primitive.name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
        return not contracted[0]
    return eqn.primitive.name in ("div", "mul", "neg")


def _in_order(var: Any) -> _Names:
    return tuple(range(var.aval.ndim))


def _permuted(names: _Names, permutation: Sequence[int]) -> _Names:
    """Returns the names of what was transposed to have these."""
    before = [0] * len(names)
    for name, dim in zip(names, permutation, strict=True):
        before[dim] = name
    return tuple(before)


def _operand_names(eqn: Any, names: _Names, features: _Names) -> list[_Names]:
    """Returns the names of both operands' dimensions, from those of a product's."""
    contracted, batch = eqn.params["dimension_numbers"]
    taken = len(batch[0])
    found = []
    for position, var in enumerate(eqn.invars):
        own: list[int] = []
        for dim in range(var.aval.ndim):
            if dim in batch[position]:
                own.append(names[list(batch[position]).index(dim)])
            elif dim in contracted[position]:
                own.append(features[list(contracted[position]).index(dim)])
            else:
                own.append(names[taken])
                taken += 1
        found.append(tuple(own))
    return found


def _same_factors(given: list[_Factor], wanted: list[_Factor]) -> dict[int, int] | None:
    """Returns the unknown names if both are the same factors; None if not."""
    if len(given) != len(wanted):
        return None
    known: dict[int, int] = {}
    left = list(wanted)
    for factor in given:
        alike = [w for w in left if w.var is factor.var and w.divides == factor.divides]
        if len(alike) != 1:  # a square is not taken apart
            return None
        left.remove(alike[0])
        for mine, theirs in zip(factor.names, alike[0].names, strict=True):
            if known.setdefault(mine, theirs) != theirs or (
                mine >= 0 and mine != theirs
            ):
                return None
    return {k: v for k, v in known.items() if k < 0}


def _known(names: _Names, known: dict[int, int]) -> _Names:
    return tuple(known.get(n, n) for n in names)


def _without_common(
    first: list[_Factor], second: list[_Factor]
) -> tuple[list[_Factor], list[_Factor]]:
    """Returns two products without what is a factor of both."""
    one, two = collections.Counter(first), collections.Counter(second)
    common = one & two
    return list((one - common).elements()), list((two - common).elements())


def _layout(
    cotangent: _Names,
    output: _Names,
    count: int,
    keys: set[int],
    factors: list[_Factor],
    number: float,
) -> SumLayout:
    """Returns how the dimensions lie.

    Args:
      cotangent: the names of the dimensions of `do`.
      output: those of `o`.
      count: how many dimensions have what is summed over keys.
      keys: those over which it is.
      factors: by what the sum over features is multiplied.
      number: the number by which it is.
    """
    rows = [n for n in range(count) if n not in keys]
    left = [n for n in cotangent if n < count]
    return SumLayout(
        order=tuple(output.index(n) for n in cotangent),
        features=tuple(i for i, n in enumerate(cotangent) if n >= count),
        rows=tuple(left.index(n) for n in rows),
        keys=tuple(
            tuple(i for i, n in enumerate(f.names) if n in keys) for f in factors
        ),
        factors=tuple(
            tuple([n for n in f.names if n not in keys].index(n) for n in rows)
            if f.names
            else ()
            for f in factors
        ),
        divides=tuple(f.divides for f in factors),
        number=number,
    )
