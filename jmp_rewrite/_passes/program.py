"""What a pass is, and what it is given: the contract of this room.

A program is an ordinary closed jaxpr in which every rounding is written down. Of what
was decided before, a pass knows what it sees there:

- A value is stored rounded if it is half: the result of `rounding[dtype, into]`, which
  stands behind the equation whose result it rounds for all that reads it, or of an
  equation that computes in half. Every other cast to half, a `convert_element_type` or
  a `saturating_cast`, is of an operand, or was the user's own. Widening is a plain
  cast. After the passes a rounding becomes the cast `into`.
- A product of half operands has a half or a float32 result, its dtype.
- Float32 that a user asked for stands in the name scope of `full_precision`, and so do
  sums that a product could hold and that may not be rounded (`Plan.asked`). A pass that
  rounds or computes again leaves it alone.
- Backward and recomputed equations are told by the name stack (`Editor.is_backward`).

A pass edits through `Editor` alone. What it inserts is traced from a small function and
stands in the name scope `PASS + name`, from which `explain` reads its reason. What is
good on some devices alone is a `by_device`: its first operands are what every other
device reads, so that without the pass, and in float32, it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jmp_rewrite._passes.edit import Editor

# Primitives that round a result, and all that cast.
ROUNDING = "rounding"
CASTS = frozenset({ROUNDING, "convert_element_type", "saturating_cast"})

Changes = Literal["nothing", "order of sums", "rounding"]


class Program(NamedTuple):
    """A program with explicit casts.

    Attributes:
      closed: a closed jaxpr without constants: captured arrays are arguments.
      half: the compute dtype.
      whole_step: whether it is a whole train step, which nobody differentiates.
    """

    closed: Any
    half: np.dtype
    whole_step: bool


class Pass(NamedTuple):
    """A remedy for compilers.

    Its contract, tested over all passes and programs: the types of the results stay;
    the jaxpr checks; a program without the pattern comes back as the same object;
    applied twice it changes nothing more; values change as declared and on the named
    devices alone; the result can be mapped over, differentiated and sharded.

    Attributes:
      run: edits a program. Its name is that of the pass. Its docstring says what, why,
        where, and the measured gain, a paragraph each; the first sentence is the reason
        that `explain` prints.
      devices: on which the program differs: names of `by_device.DEVICES`, or their
        beginnings ("TPU" for all TPUs); ("all",) if everywhere.
      changes: what may differ there: "nothing" (equal to the bit), "order of sums", or
        "rounding" (a value is rounded once more or once less).
      looks_for: primitives without any of which there is nothing to do.
      whole_steps_only: whether it is for whole train steps alone. Other programs are
        differentiated, vectorized or put together afterwards.
      required: whether a program does not run on some backend without it: it runs
        whatever the switch says.
    """

    run: Callable[[Editor], None]
    devices: tuple[str, ...]
    changes: Changes
    looks_for: frozenset[str]
    whole_steps_only: bool = True
    required: bool = False

    def on(self, device: str) -> bool:
        """Whether the program of a device, a name of `by_device.DEVICES`, differs."""
        return any(kind == "all" or device.startswith(kind) for kind in self.devices)

    @property
    def name(self) -> str:
        """What switches it off, and what `explain` prints."""
        return self.run.__name__

    @property
    def reason(self) -> str:
        """Its first sentence."""
        text = " ".join((self.run.__doc__ or "").split())
        return text.partition(". ")[0].rstrip(".")

    @property
    def gain(self) -> str:
        """What was measured, the last paragraph of its docstring."""
        text = " ".join((self.run.__doc__ or "").split())
        return text.partition("Gain: ")[2].rstrip(".")
