"""Which equation is to blame: where an error appears that reaches a result.

An error that an equation hands on is none of its own. What counts is what appears in
it, whether it rounds, overflows or makes a small error large; and how much of that is
left on the way to some result, because a saturated mask or a lost tail of a softmax
does no harm. A small error that is made large is the fault of what has rounded: there
float32 helps. Plain data in, plain data out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jmp_rewrite._diagnose.counts import UNKNOWN, Counts
from jmp_rewrite._rules import PRODUCTS
from jmp_rewrite._source import Line

# A quotient, a logarithm or a power of what vanished is wrong because of what vanished.
_UNDEFINED_AT_ZERO = frozenset({"div", "integer_pow", "log", "log2", "pow", "rsqrt"})
# An error of which not even half came with the operands appears here.
_MOSTLY = 0.5
# An error has grown in small steps if it is so many times what came in.
_STEPWISE = 2.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """What happened at one equation.

    Attributes:
      index: its place in program order.
      primitive: its name, as `jax.make_jaxpr` prints it.
      line: the user's source line.
      scope: the path of name scopes, joined by "/".
      backward: whether it belongs to a backward pass.
      is_half: whether it computes in half or rounds its result to half.
      kind: "equation", "argument", "cast" (of a result, for the sake of a reader),
        "carry" or "branches".
      dtype: what the rewritten program computes or rounds it in.
      counts: what was counted; None where both programs compute the same.
      iteration: the iterations of the loops around in which most error appeared,
        innermost first.
      reads: the findings that made its operands.
      terms: of a sum or a choice of two, the findings that made them; -1 for what both
        programs have.
      of: for a cast the finding whose value it rounds; -1 if none.
      carried: for a carry the finding that made what an iteration hands on.
      reader: for a cast the primitive of the equation that asked for it; `line`,
        `scope` and `primitive` are those of what it rounds.
      reader_line: its line.
      reader_scope: its scope.
      blame: how much error appears here, or is made of what is rounded here, and
        reaches a result: 0..1, more where Inf or NaN appears.
      grown: the finding that makes its rounding error large; -1 if none does.
    """

    index: int
    primitive: str
    line: Line
    scope: str = ""
    backward: bool = False
    is_half: bool = False
    kind: str = "equation"
    dtype: str = ""
    counts: Counts | None = None
    iteration: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    terms: tuple[int, ...] = ()
    of: int = -1
    carried: int = -1
    reader: str = ""
    reader_line: Line = Line()
    reader_scope: str = ""
    blame: float = 0.0
    grown: int = -1

    def replace(self, **changes: Any) -> Finding:
        """Returns a finding that differs in some attributes."""
        return dataclasses.replace(self, **changes)

    @property
    def error(self) -> float:
        """Its error against the reference, 0..1; 2 more with new Inf or NaN."""
        return self.counts.error if self.counts else 0.0

    @property
    def introduced(self) -> float:
        """Its error against the same equation in float32 on its own operands."""
        return self.counts.introduced if self.counts else 0.0

    @property
    def overflowed(self) -> int:
        """How many values became Inf or NaN here, and would not in float32."""
        return round(self.counts.overflowed) if self.counts else 0

    @property
    def underflowed(self) -> int:
        """How many values became zero here, and would not in float32."""
        return round(self.counts.underflowed) if self.counts else 0

    @property
    def nonfinite(self) -> int:
        """How many values are Inf or NaN, and are finite in the reference."""
        return round(self.counts.nonfinite) if self.counts else 0

    def brought_by(self, source: int) -> float:
        """Returns the error that one finding of `reads` brings, if that is known."""
        if not self.counts or source not in self.terms:
            return UNKNOWN
        sides = zip(self.terms, (self.counts.left, self.counts.right), strict=True)
        return max(brought for term, brought in sides if term == source)


def blame(findings: Sequence[Finding], results: Mapping[int, float]) -> list[Finding]:
    """Returns the findings with their blame, worst first.

    Args:
      findings: in program order; `index` is the place in the list.
      results: finding -> error of the result that it makes, as `Finding.error` counts.
    """
    errors = _errors(findings)
    harm = _harm(findings, errors, results)
    own = [min(f.counts.appeared, harm[f.index]) if f.counts else 0.0 for f in findings]
    grown = _blame_roundings(findings, own)
    for leader, growth in _growths(findings, errors):
        own[leader] = max(own[leader], min(growth, harm[leader]))
    spoilt = {
        f.index
        for f in findings
        if f.counts and f.counts.nonfinite and own[f.index] >= _MOSTLY
    }
    for finding in findings:
        cause = _vanished_before(findings, finding)
        if cause is not None:
            own[cause] = max(own[cause], own[finding.index])
            spoilt |= {cause} if finding.index in spoilt else set()
    blamed = [
        f.replace(blame=b, grown=grown.get(f.index, -1))
        for f, b in zip(findings, own, strict=True)
    ]
    return sorted(blamed, key=lambda f: _worst_first(f, f.index in spoilt))


def _worst_first(finding: Finding, is_spoilt: bool) -> tuple[int, ...]:
    """Orders by blame, and of equals, to a factor of two, by what appears.

    What makes Inf and NaN comes before everything else, and the first one is the worst.
    """
    if finding.blame <= 0:
        introduced = finding.counts.introduced if finding.counts else 0.0
        return (2, -_power(introduced), finding.index)
    if is_spoilt:
        return (0, finding.index)
    appeared = finding.counts.appeared if finding.counts else 0.0
    return (1, -_power(finding.blame), -_power(appeared), finding.index)


def _power(x: float) -> int:
    """Returns the nearest power of two, as its exponent."""
    return round(math.log2(x)) if x > 0 else -200


def _errors(findings: Sequence[Finding]) -> list[float]:
    """Returns the error of each finding; a carry has that of what is handed on."""
    errors = [f.error for f in findings]
    for finding in findings:
        if finding.kind == "carry":
            own = [finding.carried] if finding.carried >= 0 else []
            ends = [*finding.reads, *own]
            errors[finding.index] = max((errors[i] for i in ends), default=0.0)
    return errors


def _harm(
    findings: Sequence[Finding], errors: Sequence[float], results: Mapping[int, float]
) -> list[float]:
    """Returns how much error from each finding can be left in a result.

    That is the least error on a way to a result, along the way where that is largest.
    An error of a result is that of `results`: of a parameter after a step, for example,
    the error of the step. What brings an error there is as much larger.
    """
    harm = [results.get(f.index, 0.0) for f in findings]
    pairs = list(zip(errors, harm, strict=True))
    larger = [h / e if h > e > 0 else 1.0 for e, h in pairs]
    errors = [max(pair) for pair in pairs]
    changed = True
    while changed:  # a second time for what goes around a loop
        changed = False
        for finding in reversed(findings):
            through_all = min(errors[finding.index], harm[finding.index])
            for source in finding.reads:
                brought = finding.brought_by(source) * larger[finding.index]
                through = min(through_all, brought)
                if through > harm[source]:
                    harm[source] = through
                    changed = changed or finding.kind == "carry"
            if finding.kind == "carry" and finding.carried >= 0:
                if through_all > harm[finding.carried]:
                    harm[finding.carried] = through_all
                    changed = True
    return harm


def _blame_roundings(findings: Sequence[Finding], own: list[float]) -> dict[int, int]:
    """Hands the blame for a rounding error made large to what has rounded.

    Returns:
      A finding that has rounded -> the one that makes its error large.
    """
    grown: dict[int, int] = {}
    for finding in findings:
        index = finding.index
        if own[index] <= 0 or not _is_amplifier(finding):
            continue
        source = rounded_before(finding, findings)
        if source is None or own[index] < own[source.index]:
            continue
        own[source.index], grown[source.index] = own[index], index
        own[index] = min(own[index], finding.introduced)
    return grown


def _is_amplifier(finding: Finding) -> bool:
    """Whether a finding's error is, for the most part, one of its operands grown."""
    counts = finding.counts
    if counts is None or counts.nonfinite or finding.kind != "equation":
        return False
    return counts.introduced < _MOSTLY * counts.appeared


def rounded_before(finding: Finding, findings: Sequence[Finding]) -> Finding | None:
    """Returns the rounding that brings most error to a finding.

    What only hands the error on, a quotient by a temperature for example, is passed. A
    product has had its operands rounded, whatever it adds itself.
    """
    at, seen = finding, {finding.index}
    while True:
        sources = [i for i in at.reads if i not in seen and findings[i].error > 0]
        if not sources:
            return None
        brought = {i: min(findings[i].error, at.brought_by(i)) for i in sources}
        at = findings[max(sources, key=brought.__getitem__)]
        seen.add(at.index)
        if at.is_half and (at.introduced > 0 or at.primitive in PRODUCTS):
            return at


def _growths(
    findings: Sequence[Finding], errors: Sequence[float]
) -> list[tuple[int, float]]:
    """Finds lines whose error grows in many small steps: a sum that Python unrolls.

    Returns:
      (the finding with the line's largest error, how much it grew) for each line where
      no single equation explains half of the growth.
    """
    groups: dict[tuple[Line, str, bool], list[Finding]] = {}
    for finding in findings:
        if finding.counts:
            key = (finding.line, finding.scope, finding.backward)
            groups.setdefault(key, []).append(finding)
    growths = []
    for group in groups.values():
        own = {f.index for f in group}
        last = max(group, key=lambda f: errors[f.index])
        entered = _entered(findings, errors, own, group)
        growth = errors[last.index] - _STEPWISE * entered
        if growth * _MOSTLY > max(f.counts.appeared for f in group if f.counts):
            growths.append((last.index, growth))
    return growths


def _entered(
    findings: Sequence[Finding],
    errors: Sequence[float],
    own: set[int],
    group: Sequence[Finding],
) -> float:
    """Returns the largest error that a group of findings reads from outside."""
    outside = 0.0
    for finding in group:
        for source in finding.reads:
            if source in own:
                continue
            carry = findings[source]
            if carry.kind == "carry" and carry.carried in own:
                outside = max([outside, *(errors[i] for i in carry.reads)])
            else:
                outside = max(outside, errors[source])
    return outside


def _vanished_before(findings: Sequence[Finding], finding: Finding) -> int | None:
    """Returns where something vanished that a quotient or logarithm has missed."""
    counts = finding.counts
    if counts is None or finding.primitive not in _UNDEFINED_AT_ZERO:
        return None
    if counts.introduced >= _MOSTLY * counts.appeared:
        return None  # its own rounding
    found, seen = None, {finding.index}
    stack = [finding.index]
    while stack:
        for source in findings[stack.pop()].reads:
            other = findings[source].counts
            if source not in seen and other and other.zeroed > 0:
                seen.add(source)
                stack.append(source)
                if other.underflowed > 0 and (found is None or source < found):
                    found = source
    return found
