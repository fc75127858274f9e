"""What `explain` returns: figures, rows and advice, each worked out when asked for."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend import core as jex

from jmp_rewrite import _compat, _cost, _passes, _rewrite
from jmp_rewrite._explain import advice as _advice
from jmp_rewrite._explain import html, provenance, residuals, rows, summary
from jmp_rewrite._explain import plot as _report_plot
from jmp_rewrite._explain import text as _text
from jmp_rewrite._explain.document import document
from jmp_rewrite._explain.hazards import hazards
from jmp_rewrite._explain.reasons import CAST
from jmp_rewrite._explain.residuals import Residuals
from jmp_rewrite._explain.rows import Equation
from jmp_rewrite._explain.serving import Serving, serving
from jmp_rewrite._explain.stored import stored
from jmp_rewrite._explain.walk import Draft, walk
from jmp_rewrite._graph import Graph, reached
from jmp_rewrite._policy import Policy, PolicyLike
from jmp_rewrite._precision import (
    Plan,
    is_unscaled,
    parameters,
    pinning,
    rewritten_dtype,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOGGER = logging.getLogger("jmp_rewrite")


class Decision(NamedTuple):
    """What `explain` knows after the function was traced and decided for.

    Attributes:
      name: the function's.
      policy: that was explained.
      closed: the original program.
      graph: of the original program.
      plan: what is done with it; None under a float32 policy.
      arguments: for each parameter its path, None for optimizer state.
      results: for each result its path.
      unused_scopes: patterns of the policy that matched nothing.
      weights: how many arrays the first argument has.
      call: that was explained, with types in place of arrays.
      under: traces the same call under another policy: a function may ask for it.
    """

    name: str
    policy: Policy
    closed: Any
    graph: Graph
    plan: Plan | None
    arguments: Sequence[str | None]
    results: Sequence[str]
    unused_scopes: Sequence[str]
    weights: int
    call: _cost.Call
    under: Callable[[Policy], _rewrite.Traced]


class LeftAlone(NamedTuple):
    """Something that is not rewritten.

    Attributes:
      primitive: its name.
      line: the user's source line, such as "model.py:41".
      scope: the path of name scopes.
      reason: why it is left alone.
    """

    primitive: str
    line: str
    scope: str
    reason: str

    @property
    def sentence(self) -> str:
        """The same as a sentence, without a full stop."""
        where = f" at {self.line}" if self.line else ""
        return f"{self.primitive}{where} is left alone: {self.reason}"


class Report:
    """What mixed precision does to a function, and why; `explain` makes it.

    `print(report)` shows a summary, advice, the largest values that are stored in
    float32, a table of scopes, and a row for each equation with its reason;
    `report.text(equations=False)` leaves out these rows. A notebook shows the page that
    `save_html` writes. Nothing here holds an array; figures are worked out when they
    are asked for, and kept.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jmp_rewrite import explain
      >>> x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
      >>> report = explain(lambda x, w: jnp.exp(x @ w), "mixed_bfloat16")(x, x)
      >>> print(report.half_flops, report.casts)
      1.0 2
      >>> print([e.reason for e in report.equations if e.primitive == "exp"])
      ['full: exp overflows float16 above 11.09 and turns rounding into a factor']
    """

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._costs: list[_cost.CostRow] = []
        self._choice = _passes.current()

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._decision.name

    @property
    def policy(self) -> Policy:
        """The policy that is explained."""
        return self._decision.policy

    # ---- the program

    @property
    def jaxpr(self) -> Any:
        """The rewritten program, a closed jaxpr, as `mixed_precision` makes it."""
        return self._emitted.closed

    @functools.cached_property
    def _emitted(self) -> provenance.Emitted:
        plan = self._decision.plan
        if plan is None:
            return provenance.Emitted(self._decision.closed, {})
        return provenance.emit(plan, self._choice)

    @functools.cached_property
    def _drafts(self) -> list[Draft]:
        decision = self._decision
        return walk(decision.graph, decision.plan, self._emitted)

    @functools.cached_property
    def equations(self) -> list[Equation]:
        """A row for each equation of `jaxpr` and of the jaxprs that it holds.

        They come in program order. A function that is called very often has its rows
        once, with the trips of all calls.
        """
        return rows.rows(
            self._drafts,
            self._decision.plan,
            self._labels,
            stored(self._emitted.program),
        )

    @property
    def _labels(self) -> rows.Labels:
        graph, layers = self._decision.graph, {}
        if not all(rows.names_layer(n.place.path) for n in graph.nodes):
            paths = self._decision.arguments, self._decision.results
            layers = parameters.layers(graph, *paths)
        return rows.Labels(layers, _late(graph))

    @functools.cached_property
    def layers(self) -> dict[str, str]:
        """What tables call each `layer` of the equations: repeated layers are alike."""
        return summary.fold(row.layer for row in self.equations)

    @property
    def passes(self) -> Mapping[str, int]:
        """The passes that did something, with how often; see `use_passes`."""
        return self._emitted.passes

    # ---- figures

    @functools.cached_property
    def flops(self) -> int:
        """Multiplications and additions of all products, trips of loops counted."""
        return sum(row.flops for row in self.equations)

    @functools.cached_property
    def half_flops(self) -> float:
        """The share of `flops` whose operands are half, 0 to 1; 0 without products."""
        half = sum(r.flops for r in self.equations if r.dtype in residuals.HALVES)
        return half / self.flops if self.flops else 0.0

    @functools.cached_property
    def casts(self) -> int:
        """How many casts between float32 and half the rewrite has put in."""
        return sum(row.category == CAST for row in self.equations)

    @functools.cached_property
    def cast_bytes(self) -> int:
        """Bytes that these casts read and write, trips of loops counted.

        It is a bound: XLA computes most casts together with what makes or reads them.
        """
        written = {"half": 0, "full": 0}
        for row in self.equations:
            if row.category == CAST:
                is_half = row.dtype in residuals.HALVES
                written["half" if is_half else "full"] += row.bytes
        return 3 * written["half"] + 3 * written["full"] // 2

    @property
    def residual_bytes(self) -> int:
        """Bytes of the forward values that the backward pass reads, an upper bound.

        It is read off the program, before XLA fuses and rematerializes: a compiled
        program holds fewer bytes at a time. Of a function without a backward pass they
        are the residuals of its `jax.vjp`, and 0 where it has no derivative. Arguments
        and their copies do not count.
        """
        return self._residuals[1].activations

    @property
    def residual_bytes_before(self) -> int:
        """The same of the original program."""
        return self._residuals[0].activations

    @property
    def weight_copy_bytes(self) -> int:
        """Bytes of rounded copies of arguments that the backward pass reads."""
        before, after = self._residuals
        return max(0, after.copies - before.copies)

    @functools.cached_property
    def _residuals(self) -> tuple[Residuals, Residuals]:
        closed = self._decision.closed
        if self._backward.is_in(closed):
            measure = self._backward.residuals
        else:
            measure = _vjp_residuals
        return measure(closed), measure(self.jaxpr)

    @functools.cached_property
    def serving(self) -> Serving | None:
        """What a forward function holds from call to call: weights and caches.

        None for a function with a backward pass, and under float32. With each come its
        bytes `before`, in float32, and `after`, as `for_inference` stores them.
        """
        decision = self._decision
        if decision.plan is None or self._backward.is_in(decision.closed):
            return None
        return serving(decision.plan, decision.weights)

    @functools.cached_property
    def _backward(self) -> residuals.BackwardPass:
        return residuals.BackwardPass()

    # ---- on devices

    def cost(
        self,
        *devices: str,
        policies: PolicyLike | Sequence[PolicyLike] = None,
        time_limit: float = _cost.TIME_LIMIT,
    ) -> _cost.Cost:
        """Says what the function costs on devices that you need not hold.

        Whether it fits, how much memory and how many bytes it takes, and on TPUs how
        many cycles, in float32 and under the policy: by the devices' own compilers,
        ahead of time. Each program is compiled in a process of its own, which takes
        from seconds to minutes and is remembered on disk. TPUs need the package
        `libtpu`, NVIDIA GPUs `jax-cuda13-plugin` and `jax-cuda13-pjrt`; no such device
        is needed, and no environment variable.

        Arguments that `jax.jit` donates are donated, and arrays whose shardings are
        over a mesh stay sharded: such a program is estimated for a topology of as many
        devices, "TPU v5e:4x4".

        Args:
          *devices: their names: "TPU v2", ..., "TPU v6e", "TPU7x", "NVIDIA T4", "NVIDIA
            L4", "NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA B200"; also as
            people write them, "v5e" or "h100".
          policies: to compare, or one; None for float32 and the report's own.
          time_limit: seconds for each compilation.

        Returns:
          A `Cost`: print it. Its `rows` are named tuples, and `largest_batch` searches
          the largest batch that fits.

        Raises:
          ImportError: if a compiler is not installed.
          TypeError: for a device that is no name.
          ValueError: for an unknown device or policy, for none, or for a topology of
            another number of devices than the program's.
        """
        found = _cost.cost(self.subject, devices, policies, time_limit)
        self._costs += found.rows
        self.__dict__.pop("advice", None)  # it takes up what is known now
        return found

    @property
    def subject(self) -> _cost.Subject:
        """What `cost` estimates."""
        decision = self._decision
        return _cost.Subject(self.name, self.policy, self._rewritten, decision.call)

    def _rewritten(self, policy: Policy) -> Any:
        """Returns the program as a policy rewrites it, a closed jaxpr."""
        if policy == self.policy:
            return self.jaxpr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were heard when it was explained
            traced = self._decision.under(policy)
        _, plan, _ = _rewrite.decide_quietly(traced, policy)
        return provenance.emit(plan, self._choice).closed if plan else traced.closed

    # ---- words

    @functools.cached_property
    def not_rewritten(self) -> list[LeftAlone]:
        """What is left alone: kernels, callbacks, primitives without a rule."""
        plan = self._decision.plan
        if plan is None:
            return []
        lines = {id(d.origin): str(d.line) for d in self._drafts if d.origin}
        known = pinning.left_alone(plan.graph, plan.pins)
        found = [(eqn, place.path, why) for eqn, place, why, _ in known]
        held = {id(eqn) for eqn, _, _ in found}
        for node, category in zip(plan.graph.nodes, plan.pins.categories, strict=True):
            unknown = category is None and not node.place.rewritten
            if unknown and id(node.eqn) not in held:
                found.append((node.eqn, node.place.path, "no rule for it"))
        return [
            LeftAlone(eqn.primitive.name, lines.get(id(eqn), ""), path, why)
            for eqn, path, why in found
        ]

    @functools.cached_property
    def advice(self) -> list[str]:
        """What a performance engineer would say, the most urgent first."""
        decision = self._decision
        used = {row.primitive for row in self.equations}
        used |= {node.name for node in decision.graph.nodes}
        rules = [str(getattr(r, "name", r)) for r in decision.policy.rules]
        return _advice.advice(
            _advice.Facts(
                policy=decision.policy,
                rows=self.equations,
                folded=self.layers,
                is_unscaled=is_unscaled(decision.graph),
                rewritten=rewritten_dtype(decision.graph),
                left_alone=[left.sentence for left in self.not_rewritten],
                unused_rules=[r for r in rules if r not in used],
                unused_scopes=decision.unused_scopes,
                costs=list(dict.fromkeys(self._costs)),
                hazards=self._hazards(),
            )
        )

    def _hazards(self) -> list[str]:
        plan = self._decision.plan
        if plan is None:
            return []
        lines = {id(d.origin): str(d.line) for d in self._drafts if d.origin}
        return hazards(plan, lambda eqn: lines.get(id(eqn), ""))

    # ---- shown

    def text(self, *, equations: bool = True) -> str:
        """Returns the text that `print` shows.

        Args:
          equations: whether to list all equations behind the summary. Of a large model
            these are thousands of rows: `report.text(equations=False)` is the summary
            alone, and the page of `save_html` can be sorted and searched.
        """
        return _text.render(self, equations=equations)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Report on {self.name} under {self.policy!r}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        parts = document(self)
        yield from _text.rich_parts(parts)
        yield from _text.rich_rows(parts.equations, options.max_width)

    def _repr_html_(self) -> str:
        return html.notebook(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one HTML file, which needs no network.

        It has a map of the program, the scopes, and all equations, to be sorted and
        searched.

        Args:
          path: of the file to write.
        """
        pathlib.Path(path).write_text(html.page(self), encoding="utf-8")

    def plot(self) -> Figure:
        """Draws the bytes of half and float32 values that are stored, a bar a scope.

        What stays in registers is gray.

        Returns:
          A matplotlib figure: a notebook shows it, `savefig` keeps it.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        title = f"{self.name} under {self.policy!r}"
        return _report_plot.plot(title, summary.scopes(self.equations, self.layers))


def _late(graph: Graph) -> frozenset[int]:
    """Returns the nodes of backward passes, and those of updates after them.

    An update's node follows from a backward pass, or leads to such a node and to no
    backward pass: the weight decay of a parameter.
    """
    backward = [n.index for n in graph.nodes if n.place.backward]
    after = reached(backward, graph.consumers())
    before = reached(backward, graph.predecessors())
    return frozenset(after | (reached(after, graph.predecessors()) - before))


def _vjp_residuals(closed: Any) -> Residuals:
    fun = jex.jaxpr_as_fun(closed)
    avals = [v.aval for v in _compat.open_jaxpr(closed).invars]
    try:
        return residuals.vjp_residuals(fun, avals)
    except Exception as error:  # derivative rules are anyone's code, or do not exist
        _LOGGER.debug("no residuals: %s", error)
        return Residuals(0, 0)
