"""Which overrides could undo an error: what the search of `diagnosis.policy` tries.

An override changes what runs in half. So for a finding that is float32 itself, a
softmax of large logits, the candidates are those of the half equations before it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jmp_rewrite._diagnose.blame import Finding
from jmp_rewrite._policy import Policy
from jmp_rewrite._rules import PRODUCTS, Category

# Half equations that are looked at behind one that is to blame: those of a layer.
_BEHIND = 8
# Matrix multiplications that make more than one layer, with their backward pass.
_LAYERS = 6
# Findings to blame whose neighbourhood is searched before everything else is.
_WORST = 16


class Override(NamedTuple):
    """A line of a policy: `scopes[key] = "float32"` or `rules[key] = "deny"`."""

    kind: str
    key: str


def with_overrides(policy: Policy, overrides: Iterable[Override]) -> Policy:
    """Returns the policy with overrides added to its own."""
    scopes, rules = dict(policy.scopes), dict(policy.rules)
    for kind, key in overrides:
        if kind == "scopes":
            scopes[key] = "float32"
        else:
            rules[key] = Category.DENY
    return policy.replace(scopes=scopes, rules=rules)


def candidates(
    findings: Sequence[Finding],
    worst_first: Sequence[Finding],
    paths: Sequence[str | None],
    rules: Iterable[str],
) -> list[Override]:
    """Returns the possible overrides, the most promising first.

    Args:
      findings: in program order.
      worst_first: the same, by blame.
      paths: of each argument the path in its tree; None for optimizer state.
      rules: the primitives that have a rule.
    """
    search = _Search(findings, paths, frozenset(rules))
    blamed = [f for f in worst_first if f.blame > 0]
    near = [o for f in blamed[:_WORST] for o in search.near(f)]
    near.sort(key=search.is_broad)
    everything = [o for f in (*blamed, *findings) for o in search.own(f)]
    return list(dict.fromkeys([*near, *everything, *search.rules(blamed)]))


class _Search:
    def __init__(
        self,
        findings: Sequence[Finding],
        paths: Sequence[str | None],
        known: frozenset[str],
    ) -> None:
        self._findings = findings
        self._paths = paths
        self._known = known
        self._scopes = {f.scope for f in findings} | {f.reader_scope for f in findings}
        self._products = [
            f.scope for f in findings if f.is_half and f.primitive in PRODUCTS
        ]

    def near(self, finding: Finding) -> Iterator[Override]:
        """Yields what could undo what went wrong at one finding, the nearest first."""
        queue, seen, halves = deque([finding]), {finding.index}, 0
        while queue and halves < _BEHIND:
            current = queue.popleft()
            halves += current.is_half
            yield from self.own(current)
            for source in current.reads:
                if source not in seen:
                    seen.add(source)
                    queue.append(self._findings[source])

    def own(self, finding: Finding) -> Iterator[Override]:
        """Yields what makes one finding float32."""
        if not finding.is_half:
            return
        # What rounds the result is the reader, so the reader's scope comes first.
        for scope in dict.fromkeys([finding.reader_scope, finding.scope]):
            if scope:
                yield Override("scopes", self._pattern(scope))
        yield from (Override("scopes", p) for p in self._parameters(finding))
        if finding.kind == "equation" and finding.primitive in self._known:
            if not finding.primitive.startswith(("dot_general", "conv_general")):
                yield Override("rules", finding.primitive)

    def is_broad(self, override: Override) -> bool:
        """Whether an override takes most of a model with it: the class of its layers.

        What is narrower is tried before, and a program of a few products has no layers.
        """
        if override.kind != "scopes" or len(self._products) < _LAYERS:
            return False
        found = sum(bool(re.search(override.key, s)) for s in self._products)
        return 2 * found > len(self._products)

    def rules(self, blamed: Sequence[Finding]) -> Iterator[Override]:
        """Yields the layers around, and at last whole primitives."""
        for finding in blamed:
            parts = finding.scope.split("/")
            for length in range(len(parts) - 1, 0, -1):
                yield Override("scopes", self._pattern("/".join(parts[:length])))
        for finding in (*blamed, *self._findings):
            if finding.is_half and finding.kind == "equation":
                if finding.primitive in self._known:
                    yield Override("rules", finding.primitive)

    def _parameters(self, finding: Finding) -> Iterator[str]:
        """Yields patterns for the parameters that an equation or its casts read."""
        for source in (*finding.reads, finding.index):
            other = self._findings[source]
            if other.kind == "cast" and other.of >= 0:
                other = self._findings[other.of]
            path = self._paths[other.of] if other.kind == "argument" else None
            if path:
                yield f"^{re.escape(path)}$"

    def _pattern(self, scope: str) -> str:
        """Returns the plainest pattern that finds a scope and what is inside it."""
        plain = re.escape(scope).replace(r"\-", "-")
        found = {s for s in self._scopes if re.search(plain, s)}
        inside = {s for s in self._scopes if s == scope or s.startswith(f"{scope}/")}
        return plain if found == inside else f"^{plain}(/|$)"
