"""`Diagnosis`: what `diagnose` found, and what to do about it."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jmp_rewrite._diagnose import html, text
from jmp_rewrite._diagnose import plot as _diagnosis_plot
from jmp_rewrite._diagnose.blame import Finding
from jmp_rewrite._diagnose.candidates import Override, candidates, with_overrides
from jmp_rewrite._diagnose.counts import SPOILT
from jmp_rewrite._diagnose.distance import LOWEST
from jmp_rewrite._diagnose.progress import stage
from jmp_rewrite._diagnose.sentences import sentence
from jmp_rewrite._diagnose.smallest import smallest
from jmp_rewrite._policy import Policy
from jmp_rewrite._rules import RULES

# A share of the gradients' values that is worth scaling the loss for.
_UNDERFLOWS = 0.05
# float16's smallest number above zero, and the largest scale of `loss_scaling`, as
# powers of two.
_SMALLEST, _LARGEST_SCALE = -24, 24


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """What half precision does to a program, equation by equation.

    `print` shows it, a notebook shows a table, and `plot` draws it.

    Attributes:
      name: the function's.
      diagnosed: the policy under which it ran.
      equations: a `Finding` for each equation in which the two programs can differ, the
        worst first. Its attributes are among others `line` (with `file` and `number`),
        `scope`, `primitive`, `backward`, `error` (against the reference: the mean of
        the elements' own relative errors, or that of the norm if it is larger; so it
        may be many times the error of a result that is the same array),
        `introduced` (against the same equation in float32 on its own operands),
        `overflowed`, `underflowed` and `nonfinite` (how many values), `iteration` (of
        the loops around, in which most error appeared, innermost first) and `blame`.
      results: path of a result -> its error: the norm of the difference over the norm
        of the reference. A result that is an argument with a small change, as new
        parameters are, is judged by the change. Inf where something is Inf or NaN that
        should not be, or where the program does not come to an end.
      noise: paths of results that are rounding noise in float32 already, or state that
        such a gradient changes; their error is 0.
      tolerance: the error that is fine.
      spoilt: the first equation of the reference itself that makes an Inf or NaN which
        reaches a result, or for which it skips the step; None if there is none, or
        nobody knows where.
      is_spoilt: whether the reference itself returns Inf or NaN.
      is_skipped: whether the reference itself skips the step, by `loss_scaling`.
      endless: loops that float32 had left long before the program was stopped in them,
        a sentence each.
      spoilt_arguments: arguments that hold Inf or NaN.
      gradients: f32[80], how many values of the products of the backward pass have a
        magnitude of 2**-60, 2**-59 and so on; a sample of large arrays.
      loss_scale: the loss scale among the arguments; None if there is none.
      in_order: all findings in program order, those without a difference too.
      paths: for each parameter its path; None for optimizer state.
      run: policy -> the largest error of a result when the program runs under it.
      tried: the policies that were run on the way to `policy`.
      tried_errors: the largest error of a result under each of these.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_rewrite import diagnose
      >>> x = jnp.full((8, 8), 20.0)
      >>> diagnosis = diagnose(lambda x: jnp.square(x @ x) @ x, "mixed_float16")(x)
      >>> diagnosis.worst.primitive, diagnosis.error > diagnosis.tolerance
      ('square', True)
    """

    name: str
    diagnosed: Policy
    equations: list[Finding]
    results: Mapping[str, float]
    noise: Sequence[str]
    tolerance: float
    spoilt: Finding | None
    is_spoilt: bool
    is_skipped: bool
    endless: Sequence[str]
    spoilt_arguments: Sequence[str]
    gradients: np.ndarray
    loss_scale: float | None
    in_order: list[Finding]
    paths: Sequence[str | None]
    run: Callable[[Policy], float]
    tried: list[Policy] = dataclasses.field(default_factory=list)
    tried_errors: list[float] = dataclasses.field(default_factory=list)

    @property
    def error(self) -> float:
        """The largest error of a result, by norm: see `results`."""
        return max(self.results.values(), default=0.0)

    @property
    def worst(self) -> Finding | None:
        """The equation that is most to blame; None if no result has an error."""
        first = self.equations[0] if self.equations else None
        return first if first is not None and first.blame > 0 else None

    @property
    def first_nonfinite(self) -> Finding | None:
        """The first equation with an Inf or NaN that the reference has not got.

        An equation of a loop may stand before the one from which it has it, an
        iteration earlier: it is the one in which it appears.
        """
        spoilt = [f for f in self.in_order if f.nonfinite]
        first = spoilt[0] if spoilt else None
        if first is None or first.overflowed or not first.iteration:
            return first
        makers = [f for f in spoilt if f.overflowed and f.iteration]
        return makers[0] if makers else first

    @functools.cached_property
    def policy(self) -> Policy | None:
        """The policy with a smallest set of overrides that meets the tolerance.

        Without any of the overrides that it adds it would not. It is found by running
        the program again, a few times where one layer is to blame, and what is returned
        has been run: `policy_error` is its error. None if no overrides help, because
        the program casts to half itself, or the tolerance is below what two runs in
        float32 differ by; the policy that was diagnosed if that one
        meets the tolerance. None as well if gradients vanish or overflow and `scaling`
        is the fix: overrides would do it by switching half precision off. And None if
        the program does not come to an end.
        """
        if self.error <= self.tolerance:
            return self.diagnosed
        if self.scaling or self.endless:
            return None
        ranked = candidates(self.in_order, self.equations, self.paths, RULES)
        found = smallest(ranked, self._is_enough)
        return None if found is None else with_overrides(self.diagnosed, found)

    @property
    def policy_error(self) -> float:
        """The largest error of a result under `policy`."""
        if self.policy is None or self.policy == self.diagnosed:
            return self.error
        return self.run(self.policy)

    def _is_enough(self, overrides: list[Override]) -> bool:
        if not overrides:
            return self.error <= self.tolerance
        policy = with_overrides(self.diagnosed, overrides)
        self.tried.append(policy)
        with stage(f"searching the fewest overrides that help, run {len(self.tried)}"):
            error = self.run(policy)
        self.tried_errors.append(error)
        return error <= self.tolerance

    @property
    def advice(self) -> list[str]:
        """What else there is to say, a sentence each."""
        unscaled = self.loss_scale in (None, 1.0)
        about = self.scaling or (self._vanish() if unscaled else self._overflow())
        advice = [self.about_reference, *self.endless, about]
        if not any(f.is_half for f in self.in_order):
            advice.append("nothing runs in half precision under this policy")
        if self.noise:
            advice.append(
                f"{len(self.noise)} results are rounding noise in float32 already and "
                f"are not judged: {_some(self.noise)}"
            )
        return [a for a in advice if a]

    @property
    def about_reference(self) -> str:
        """Says where the program is Inf or NaN in float32 too; "" if it is not.

        Of a step that it skips, the gradients are, and no result shows it.
        """
        if not (self.is_spoilt or self.is_skipped):
            return ""
        what = "results" if self.is_spoilt else "the step is skipped: gradients"
        where = f", from {self.spoilt.line} on" if self.spoilt else ""
        said = f"in float32 as well {what} are Inf or NaN{where}: no policy mends that"
        if not self.spoilt_arguments:
            return said
        some = _some(self.spoilt_arguments)
        return f"{said}; among the arguments some are so already ({some})"

    @property
    def scaling(self) -> str:
        """How to scale the loss, if that is the fix; "" if not.

        It is where gradients vanish, but not where Inf or NaN appear, which a larger
        scale makes more (one that no result shows, as of a norm of zero that clipping
        divides by and then leaves, is none); and where gradients overflow that are
        scaled up.
        """
        if self.error <= self.tolerance or self.endless:
            return ""
        if self.worst is not None and not self.worst.backward:
            return ""
        is_spoilt = self.loss_scale is not None or self.error >= SPOILT
        overflows = is_spoilt and self.first_nonfinite is not None
        return self._overflow() if overflows else self._vanish()

    def _vanish(self) -> str:
        """Says whether gradients vanish that a larger scale of the loss would keep."""
        powers = np.flatnonzero(self.gradients) + LOWEST
        halves = {f.dtype for f in self.in_order if f.is_half}
        if "float16" not in halves or not len(powers):
            return ""
        lost = self.gradients[: _SMALLEST - LOWEST].sum() / self.gradients.sum()
        # Those of the scaled loss, the largest of which may go up to 2**15.
        scale = 1.0 if self.loss_scale is None else self.loss_scale
        larger = 14 - int(powers[-1])
        if lost < _UNDERFLOWS or larger < 1 or scale >= 2.0**_LARGEST_SCALE:
            return ""
        fits = min(round(math.log2(scale)) + larger, _LARGEST_SCALE)
        if scale != 1.0:
            return (
                f"{lost:.0%} of the gradients vanish in float16 at the loss scale "
                f"{scale:g}: a scale of 2**{fits} fits; give it to jmpr.loss_scaling "
                "as `loss_scale`, or as `init_scale` of a dynamic one"
            )
        return (
            f"{lost:.0%} of the gradients vanish in float16, and the loss is not "
            "scaled: wrap the optimizer in jmpr.loss_scaling(...), and return "
            "jmpr.scale_loss(loss, opt_state) from the loss function; a scale of "
            f"2**{fits} fits"
        )

    def _overflow(self) -> str:
        """Says whether gradients overflow because the loss is scaled up."""
        first = self.first_nonfinite
        is_late = first is not None and first.backward
        if not is_late or self.loss_scale is None or self.loss_scale <= 1.0:
            return ""
        return (
            f"gradients overflow at the loss scale {self.loss_scale:g}: a dynamic "
            "scale skips such a step and halves itself, again and again where it has "
            "to; diagnose a step with the state that it comes to"
        )

    def why(self, finding: Finding) -> str:
        """Returns a sentence on one of `equations`."""
        return sentence(finding, self.in_order)

    def plot(self) -> Any:
        """Draws the error by depth, and the magnitudes of the gradients.

        Returns:
          A Matplotlib figure: `diagnosis.plot().savefig("diagnosis.png")`.

        Raises:
          ImportError: if Matplotlib is not installed.
        """
        return _diagnosis_plot.figure(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the diagnosis as one HTML file, which needs no network.

        Args:
          path: of the file to write.
        """
        pathlib.Path(path).write_text(html.page(self), encoding="utf-8")

    def __str__(self) -> str:
        return text.text(self)

    def __repr__(self) -> str:
        worst = self.worst.line if self.worst else None
        return f"<Diagnosis of {self.name}: error {self.error:.2g}, worst {worst}>"

    def _repr_html_(self) -> str:
        return html.notebook(self)


def _some(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
