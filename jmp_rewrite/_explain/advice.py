"""What a performance engineer would say of a rewritten program."""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jmp_rewrite import _cost
from jmp_rewrite._devices import why_auto_is_float32
from jmp_rewrite._explain import residuals
from jmp_rewrite._explain.reasons import INTERNAL, NONE
from jmp_rewrite._explain.rows import Equation
from jmp_rewrite._policy import Policy
from jmp_rewrite._rules import PRODUCTS
from jmp_rewrite._units import bytes_text, count_text, flops_text

# Half products run on tensor cores at full speed if their dimensions are multiples of 8
# (NVIDIA, "Matrix Multiplication Background User's Guide", section 4).
_TENSOR_CORES = 8
# A TPU's registers and matrix units are 128 lanes wide (JAX, "Pallas TPU", "Array
# layouts").
_LANES = 128
# A product below 1e8 operations takes less than 5 us, which is what starting a kernel
# takes, at the 19.5 TFLOP/s of float32 on an A100 (NVIDIA A100 datasheet).
_SMALL_PRODUCT = 10**8
# Products and values below these shares are not worth a word.
_SHARE = 0.01
# What only a cast of the user's brings to half.
_WIDE = frozenset({"float64", "complex64", "complex128"})
_FULL_SHARE = 0.05
_AT_MOST = 3
# The reason of products that make updates of gradients, in `_precision/pins.py`.
_OPTIMIZER = "a product of the optimizer"


class Facts(NamedTuple):
    """What advice is given on.

    Attributes:
      policy: that was explained.
      rows: of the rewritten program.
      folded: layer -> its name, repeated layers named alike.
      is_unscaled: whether it holds a backward pass, and certainly no loss scale.
      rewritten: the half dtype of what a `mixed_precision` inside has made; or "".
      left_alone: what is not rewritten, as a sentence each.
      unused_rules: keys of the policy's rules that are in no equation.
      unused_scopes: patterns of the policy that matched nothing.
      costs: what compilers have said of it, if they were asked.
      hazards: what the compute dtype cannot resolve, as a sentence each.
    """

    policy: Policy
    rows: Sequence[Equation]
    folded: dict[str, str]
    is_unscaled: bool
    rewritten: str
    left_alone: Sequence[str]
    unused_rules: Sequence[str]
    unused_scopes: Sequence[str]
    costs: Sequence[_cost.CostRow] = ()
    hazards: Sequence[str] = ()


def advice(facts: Facts) -> list[str]:
    """Returns advice as sentences, the most urgent first."""
    if facts.rewritten:
        return [s for check in _CHECKS for s in check(facts)]
    if facts.policy.name == "auto" and (why := why_auto_is_float32()):
        return [
            f"{why}: nothing is half. To see what a TPU or a GPU would get: "
            'explain(fun, "mixed_bfloat16").'
        ]
    if facts.policy.compute_dtype == "float32":
        return ["The policy is float32, so nothing is half."]
    return [sentence for check in _CHECKS for sentence in check(facts)]


def _rewritten(facts: Facts) -> Iterator[str]:
    if facts.rewritten:
        yield (
            "A mixed_precision inside has rewritten a part of this already, to "
            f"{facts.rewritten}: its equations are shown as they are, and the policy, "
            "casts and what was stored before are not theirs. Explain the decorated "
            "function by itself, or decorate the whole step."
        )


def _loss_scale(facts: Facts) -> Iterator[str]:
    own = facts.policy
    is_half = own.compute_dtype.name == "float16" and own.loss_scale is not None
    if (is_half or facts.rewritten == "float16") and facts.is_unscaled:
        yield (
            "Scale the loss: gradients below 6e-8 are zero in float16. Return "
            "scale_loss(loss, opt_state) from the loss, and wrap the optimizer in "
            "loss_scaling(...)."
        )


def _hazards(facts: Facts) -> Iterator[str]:
    yield from facts.hazards[:_AT_MOST]


def _softmax(facts: Facts) -> Iterator[str]:
    found = [
        r
        for r in facts.rows
        if r.primitive == "exp" and _is_half(r) and r.category != INTERNAL
    ]
    if found:
        yield (
            f"A softmax in {found[0].dtype}: exp {_where(found)} computes in half, "
            "which turns rounding of its operand into a factor. Keep it float32: drop "
            "the rule, or cast its operand."
        )


def _loss(facts: Facts) -> Iterator[str]:
    found = [
        r
        for r in facts.rows
        if r.primitive.startswith("reduce_")
        and r.results[0].endswith("[]")
        and r.operands[0].startswith(("bf16", "f16"))
        and r.phase == "forward"
        and r.category != INTERNAL
    ]
    if found:
        yield (
            f"A loss in half: {found[0].primitive} {_where(found)} reads "
            f"{found[0].operands[0]} and gives one number. Compute the loss in float32."
        )


def _is_half(row: Equation) -> bool:
    return row.dtype in residuals.HALVES


def _is_own_half(row: Equation) -> bool:
    """Whether the function itself computes this equation in half."""
    return _is_half(row) and row.category == NONE


def _where(rows: Sequence[Equation]) -> str:
    first = rows[0]
    others = len({r.line for r in rows}) - 1
    more = f" and {count_text(others, 'more line')}" if others else ""
    place = f"at {first.line}" if first.line else f"in {first.layer}"
    return place + more


def _no_products(facts: Facts) -> Iterator[str]:
    if not any(row.primitive in PRODUCTS or _is_half(row) for row in facts.rows):
        yield "There is no matrix multiplication or convolution, so nothing is half."


def _already_half(facts: Facts) -> Iterator[str]:
    rows = [row for row in facts.rows if row.flops and _is_own_half(row)]
    share = _share(facts, rows)
    if share >= _FULL_SHARE:
        rest = "there is nothing to rewrite" if share == 1 else "they stay as they are"
        yield (
            f"{share:.0%} of the operations of matrix multiplications are "
            f"{rows[0].dtype} in the function itself, {_where(rows)}: {rest}."
        )


def _full_products(facts: Facts) -> Iterator[str]:
    is_bfloat16 = facts.policy.compute_dtype.name == "bfloat16"
    reasons: dict[tuple[str, str], list[Equation]] = {}
    for row in facts.rows:
        if row.flops and not _is_half(row):
            reason = row.reason.removeprefix("full: ")
            if row.dtype in _WIDE:
                reason = f"{row.dtype} is left alone"
                reason += (
                    "" if "complex" in row.dtype else "; cast to float32 to use half"
                )
            reasons.setdefault((row.dtype, reason), []).append(row)
    for (dtype, reason), rows in reasons.items():
        share = _share(facts, rows)
        if share >= _FULL_SHARE:
            yield (
                f"{share:.0%} of the operations of matrix multiplications stay "
                f"{dtype}, {_where(rows)}: {reason}."
                + (_freed(facts, rows) if reason == _OPTIMIZER and is_bfloat16 else "")
            )


def _freed(facts: Facts, rows: Sequence[Equation]) -> str:
    """Says which scope brings an optimizer's products to half.

    Muon's authors run its Newton-Schulz iteration in bfloat16 (K. Jordan et al., "Muon:
    An optimizer for hidden layers in neural networks", 2024).
    """
    scope = os.path.commonprefix([row.scope.split("/") for row in rows])
    others = [r.scope.split("/") for r in facts.rows if r.flops and r not in rows]
    is_own = scope != [""] and not any(p[: len(scope)] == scope for p in others)
    name = "/".join(scope) if scope and is_own else "optimizer"
    where = "" if name != "optimizer" else f' with jax.named_scope("{name}") around it'
    return (
        " That is safe. An optimizer that is made for half, as Muon is, runs in "
        f'bfloat16{where} under a policy of scopes={{"{name}": "half"}}.'
    )


def _share(facts: Facts, rows: Sequence[Equation]) -> float:
    """The share of these rows in the operations of all matrix multiplications."""
    total = sum(row.flops for row in facts.rows)
    return sum(row.flops for row in rows) / total if total else 0.0


def _left_alone(facts: Facts) -> Iterator[str]:
    sentences = list(dict.fromkeys(map(str, facts.left_alone)))
    for sentence in sentences[:_AT_MOST]:
        yield f"{sentence}. What it reads and makes is float32."
    if len(sentences) > _AT_MOST:
        more = len(sentences) - _AT_MOST
        yield f"{more} more like it are in report.not_rewritten."


def _unused(facts: Facts) -> Iterator[str]:
    for rule in facts.unused_rules:
        yield f"The rule for {rule!r} was not used: no equation has this primitive."
    for pattern in facts.unused_scopes:
        yield (
            f"The scope {pattern!r} was not used: no name scope and no parameter's "
            "path has it. The column 'scope' shows the names that there are."
        )


def _small_products(facts: Facts) -> Iterator[str]:
    products = [row for row in facts.rows if row.flops and not _is_own_half(row)]
    total = sum(row.flops for row in products)
    small = [row for row in products if row.flops // row.trips < _SMALL_PRODUCT]
    if products and sum(row.flops for row in small) > total / 2:
        largest = max(row.flops // row.trips for row in products)
        yield (
            "The matrix multiplications are too small to gain: the largest has "
            f"{flops_text(largest)}, and starting a kernel takes as long as "
            f"{flops_text(_SMALL_PRODUCT)}. A larger batch or wider layers would "
            "change that."
        )


def _dimensions(facts: Facts) -> Iterator[str]:
    found: dict[tuple[str, int], int] = {}
    for row in facts.rows:
        if row.flops and _is_half(row) and row.phase != "backward":
            for size in _missing(row):
                key = (facts.folded[row.layer], size)
                found[key] = found.get(key, 0) + row.flops
    least = _SHARE * sum(row.flops for row in facts.rows)
    worst = sorted(
        (key for key, flops in found.items() if flops >= least),
        key=lambda key: (key[1] % _TENSOR_CORES == 0, -found[key], key),
    )
    for layer, size in worst[:_AT_MOST]:
        yield f"{layer}: {_padding(size)}"
    if len(worst) > _AT_MOST:
        yield f"{count_text(len(worst) - _AT_MOST, 'more dimension')} like these."


def _missing(row: Equation) -> set[int]:
    """Returns the dimensions of a product that miss the multiples."""
    odd = {s for s in row.dimensions if s > _TENSOR_CORES and s % _TENSOR_CORES}
    return odd | {s for s in row.dimensions[-2:] if s > _LANES and s % _LANES}


def _padding(size: int) -> str:
    cores, lanes = (-(-size // n) * n for n in (_TENSOR_CORES, _LANES))
    if size % _TENSOR_CORES == 0:
        misses, padded = "128 (TPU)", f"{lanes}"
    elif size < _LANES:
        misses, padded = "8 (GPU)", f"{cores}"
    else:
        padded = f"{cores} or {lanes}" if cores < lanes else f"{lanes}"
        misses = "8 (GPU) and 128 (TPU)"
    return f"a dimension of {size} misses multiples of {misses}: pad it to {padded}."


def _costs(facts: Facts) -> Iterator[str]:
    """What compilers said of the policy beside float32."""
    plain = {row.device: row for row in facts.costs if row.policy == "float32"}
    own = _cost.policy_text(facts.policy)
    for row in facts.costs:
        before = plain.get(row.device)
        if row.policy != own or before is None or None in (row.fits, before.fits):
            continue
        yield from _verdict(row, before)
        if row.estimated_cycles and before.estimated_cycles:
            ratio = row.estimated_cycles / before.estimated_cycles
            if ratio >= 1:
                yield (
                    f"On {row.device} half precision buys no speed: {row.compiler} "
                    f"estimates {ratio:.2f} of float32's cycles."
                )


def _verdict(row: _cost.CostRow, before: _cost.CostRow) -> Iterator[str]:
    if not row.fits:
        yield f"It does not fit on {row.device}, by {row.compiler}."
    elif not before.fits:
        yield f"It fits on {row.device}, and in float32 does not, by {row.compiler}."
    elif row.peak_bytes and before.peak_bytes:
        yield (
            f"On {row.device} the peak of memory is {bytes_text(row.peak_bytes)}, in "
            f"float32 {bytes_text(before.peak_bytes)}, by {row.compiler}."
        )


_CHECKS = (
    _rewritten,
    _loss_scale,
    _hazards,
    _softmax,
    _loss,
    _no_products,
    _already_half,
    _full_products,
    _left_alone,
    _unused,
    _small_products,
    _dimensions,
    _costs,
)
