"""What `for_inference` stores in half, and what it does not, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jmp_rewrite._units import bytes_text


class Leaf(NamedTuple):
    """An array of the weights or of the state.

    Attributes:
      path: its place in the arguments, keys joined by "/"; the argument's number first.
      kind: "weight" or "state".
      shape: its shape.
      before: its dtype as the function takes it.
      after: the dtype in which it is stored.
      bytes_before: its bytes in the one.
      bytes_after: its bytes in the other.
      reason: why it is stored so.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    reason: str


@dataclasses.dataclass(frozen=True)
class InferenceReport:
    """Which leaves are stored in half, and which stay as they are, and why.

    Attributes:
      name: the function's name.
      policy: the policy, as it is written.
      leaves: all leaves of weights and state, in the order of the arguments.
      captured_bytes: bytes of the float32 arrays that the function captures, as a
        closure or a bound method does, and that would be stored in half as weights.
        They are no arguments, and stored nowhere.
    """

    name: str
    policy: str
    leaves: tuple[Leaf, ...]
    captured_bytes: int = 0

    @property
    def bytes_before(self) -> int:
        """Bytes of weights and state as the function takes them."""
        return sum(x.bytes_before for x in self.leaves)

    @property
    def bytes_after(self) -> int:
        """Bytes of weights and state as they are stored."""
        return sum(x.bytes_after for x in self.leaves)

    @property
    def stored(self) -> tuple[Leaf, ...]:
        """The leaves that are stored in half."""
        return tuple(x for x in self.leaves if x.after != x.before)

    @property
    def kept(self) -> tuple[Leaf, ...]:
        """The leaves that stay as they are, the largest first."""
        kept = (x for x in self.leaves if x.after == x.before)
        return tuple(sorted(kept, key=_order))

    def __str__(self) -> str:
        lines = [f"{self.name} for inference under {self.policy}", ""]
        for kind, title in (("weight", "weights"), ("state", "state")):
            own = [x for x in self.leaves if x.kind == kind]
            if own:
                before = _bytes_text(sum(x.bytes_before for x in own))
                after = _bytes_text(sum(x.bytes_after for x in own))
                count = sum(x.after != x.before for x in own)
                lines.append(
                    f"  {title:8} {before} -> {after}, "
                    f"{count} of {len(own)} arrays stored in half"
                )
        if self.kept:
            lines += ["", "Not stored in half", ""]
            width = max(len(x.path) for x in self.kept)
            lines += [
                f"  {x.path:{width}}  {x.before}{list(x.shape)}  {x.reason}"
                for x in self.kept
            ]
        if told := captured_text(self.captured_bytes):
            lines += ["", f"  {told}"]
        return "\n".join(lines)


def captured_text(size: int) -> str:
    """Returns what is said of arrays that a function captures; nothing of none."""
    if not size:
        return ""
    return (
        f"{bytes_text(size)} of float32 arrays that the function captures are not "
        "stored: give them as an argument, and name it in weights"
    )


def _order(leaf: Leaf) -> float:
    """The largest first; a size of symbolic dimensions may be any."""
    size = leaf.bytes_before
    return -size if isinstance(size, int) else -math.inf


def _bytes_text(size: int) -> str:
    """Returns bytes with a prefix; of symbolic dimensions their expression."""
    return bytes_text(size) if isinstance(size, int) else f"{size} B"
