"""`diagnose`: which line loses what in half precision, and what to do about it."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from jmp_rewrite import _compat, _rewrite, _transform
from jmp_rewrite._arguments import Flat, not_a_function, wraps
from jmp_rewrite._diagnose import shadow as _shadow
from jmp_rewrite._diagnose.blame import Finding, blame
from jmp_rewrite._diagnose.calls import HANDLERS
from jmp_rewrite._diagnose.counts import SPOILT
from jmp_rewrite._diagnose.diagnosis import Diagnosis
from jmp_rewrite._diagnose.evaluate import evaluate
from jmp_rewrite._diagnose.findings import findings_of
from jmp_rewrite._diagnose.numbers import Numbers
from jmp_rewrite._diagnose.progress import stage
from jmp_rewrite._diagnose.results import Reference, is_finite
from jmp_rewrite._loss_scaling import LossScaleState, find_states
from jmp_rewrite._passes import resolve
from jmp_rewrite._policy import Policy, PolicyLike, as_policy
from jmp_rewrite._precision import parameters
from jmp_rewrite._source import check_kind, name_of, where

# Rounding noise stays below: in bfloat16 the first step of Adam, which divides each
# gradient by its own size, is off by 0.12 in a transformer without any fault.
_TOLERANCE = 0.25


P = ParamSpec("P")


def diagnose(
    fun: Callable[P, Any],
    policy: PolicyLike = None,
    *,
    tolerance: float | None = None,
) -> Callable[P, Diagnosis]:
    """Finds out which line makes a program wrong in half precision.

    Runs the function on the arguments of a call, rewritten by the policy as it is
    compiled, equation by equation, and beside each value its float32 shadow: what it
    would be without any rounding, the function's own casts to half included. For each
    equation it counts how far the two are apart, which values overflowed, and which
    vanished. Where an error appears is told from
    where it is only handed on: blamed is what appears at an equation and reaches a
    result. Loops name the iteration, and a backward pass is part of the program, so
    that a whole train step is what to diagnose.

    It runs outside of `jax.jit`, on real arguments, and takes about six times as long
    as the float32 run outside of `jax.jit`, in about twice its memory. Callbacks run
    several times. Everything is rounded that an accelerator rounds, on a CPU too, which
    by itself reads some values before they are rounded.

    Args:
      fun: the function, with or without `mixed_precision` and `jax.jit` around it.
      policy: what to run it under; None for that of a decorated `fun`, otherwise for
        the default policy.
      tolerance: the error of a result, relative to its norm, that is fine; None for
        0.25, which rounding does not reach and a fault does.

    Returns:
      A function of the same arguments that returns a `Diagnosis`. Print it first; its
      `policy` adds to the policy the fewest `scopes` and `rules` that bring the error
      under the tolerance.

    Raises:
      TypeError: if `fun` is no function, or it is called inside a transformation or on
        shapes in place of arrays.
      ValueError: for an unknown policy, or a tolerance that is no number above 0.

    It says on standard error what it is doing, if that takes longer than a moment;
    `diagnosis.policy`, which `print` asks for, runs the program again.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_rewrite as jmpr
      >>> def f(params, x):
      ...     with jax.named_scope("layer"):
      ...         h = jnp.square(x @ params["w"])
      ...         return h @ params["v"]
      >>> params = {"w": 100 * jnp.eye(8), "v": jnp.ones((8, 8))}
      >>> diagnosis = jmpr.diagnose(f, "mixed_float16")(params, 3 * jnp.ones((2, 8)))
      >>> diagnosis.worst.primitive, diagnosis.worst.overflowed
      ('square', 16)
      >>> diagnosis.policy
      Policy('mixed_float16', scopes={'layer': 'float32'})
    """
    if not callable(fun):
        raise TypeError(
            f"diagnose expected a function, got {not_a_function(fun)}: "
            "call it as diagnose(fun, policy)(*args)."
        )
    if tolerance is not None and not _is_tolerance(tolerance):
        raise ValueError(
            f"diagnose expected a tolerance above 0, or None, got {tolerance!r}."
        )
    inner = _transform.undecorated(fun)
    check_kind(inner.fun, "diagnose")
    plain = inner.fun
    given = inner.policy if policy is None else as_policy(policy)

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Diagnosis:
        _check_arrays((args, kwargs))
        chosen = as_policy(given)
        whole = inner.received(args, kwargs)
        traced = _rewrite.trace_types(plain, *whole, inner.hide, chosen)
        program = _Program(traced)
        mesh = _compat.explicit_mesh(traced.arrays)
        with jax.debug_nans(False), jax.debug_infs(False), mesh:
            return _diagnosis(
                name_of(plain).rpartition("<locals>.")[2],
                program,
                chosen,
                _TOLERANCE if tolerance is None else float(tolerance),
            )

    return wraps(plain, wrapped)


def _check_arrays(arguments: Any) -> None:
    leaves = jax.tree.leaves(arguments)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            "diagnose runs the program to see its numbers, so it needs arrays, but got "
            "jax.ShapeDtypeStruct: pass arrays, or use jmp_rewrite.explain, which "
            "takes shapes."
        )


def _is_tolerance(given: Any) -> bool:
    if isinstance(given, bool) or not isinstance(given, (int, float, np.number)):
        return False
    return bool(math.isfinite(given) and given > 0)


def _copied(x: Any) -> Any:
    return x.copy() if isinstance(x, (np.ndarray, jax.Array)) else x


class _Program:
    """A traced call, that is run under one policy after the other."""

    def __init__(self, traced: _rewrite.Traced) -> None:
        if any(isinstance(x, jax.core.Tracer) for x in traced.arrays):
            raise TypeError(
                "diagnose runs a program to see its numbers, but it was called inside "
                "jax.jit, jax.grad or another transformation: call it outside, on "
                "arrays, with the transformation inside the function."
            )
        # Copies: it runs again when it is printed. Before that a step may be given its
        # arguments to keep, or a buffer another batch.
        self.traced = traced._replace(arrays=list(map(_copied, traced.arrays)))

    def rewritten(self, policy: Policy) -> tuple[Any, Sequence[Any], Numbers]:
        """Rewrites the program as accelerators run it, with all roundings.

        A CPU reads some values before they are rounded.

        Returns:
          A closed jaxpr, those of its arguments that come before the call's, and the
          numbers that it may hold rounded.
        """
        closed = self.traced.closed
        if policy.compute_dtype == np.float32:
            return closed, (), Numbers()
        plan = _rewrite.decide_traced(self.traced, policy)
        rewritten = _rewrite.optimized(plan).closed
        resolved = resolve(rewritten, "", required=False)
        return resolved, _compat.constants(closed), Numbers(plan.graph.nodes)

    def run(self, policy: Policy) -> list[Any]:
        """Runs the program as a policy rewrites it."""
        with jax.debug_nans(False), jax.debug_infs(False):
            closed, consts, _ = self.rewritten(policy)
            with _compat.explicit_mesh(self.traced.arrays):
                return evaluate(closed, [*consts, *_fresh(self.traced.arrays)])

    def reference(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs the program in float32, what it makes half itself too."""
        return _shadow.unrounded(self.traced.closed, _fresh(arrays), HANDLERS)


def _fresh(arrays: Sequence[Any]) -> list[Any]:
    """Returns arguments for one run: what it writes to references stays with it."""
    return [_compat.renewed(x) for x in arrays]


def _endless(eqn: Any, own: int, reference: int, half: str) -> str:
    return (
        f"the loop at {where(eqn)} may never end: float32 left it after {reference:,} "
        f"iterations, {half} was in it after {own:,}; bound the number of iterations, "
        "or run the loop in full_precision()"
    )


def _diagnosis(
    name: str, program: _Program, policy: Policy, tolerance: float
) -> Diagnosis:
    traced = program.traced
    names = _argument_names(traced.arguments)
    with stage(f"running {name} in float32 and under {policy!r}, side by side"):
        closed, consts, numbers = program.rewritten(policy)
        arrays = _fresh(traced.arrays)
        pairs, shadow = _shadow.run(closed, consts, arrays, HANDLERS, numbers=numbers)
    values, gradients = [p.value for p in pairs], [p.gradient for p in pairs]
    rows = [p.row for p in pairs]
    del pairs
    with stage("running it again in float32, to tell rounding noise from faults"):
        exact = program.reference(traced.arrays)
        reference = Reference(exact, traced.arrays, gradients)
        reference.shaken(program.reference)
    errors = reference.errors(values)
    judged = zip(errors, gradients, strict=True)
    if any(tolerance < e < math.inf and g is not None for e, g in judged):
        with stage("running it without rounding, to tell which gradients are noise"):
            reference.shaken_gradients(
                lambda arrays: _shadow.gradients(
                    closed, consts, _fresh(arrays), HANDLERS, numbers=numbers
                )
            )
        errors = reference.errors(values)
    del values
    findings, magnitudes = findings_of(shadow, names)
    harmed: dict[int, float] = {}
    for row, error in zip(rows, errors, strict=True):
        if row >= 0:
            harmed[row] = max(harmed.get(row, 0.0), _as_counted(error))
    results = _told_apart([path or "result" for path in traced.result_paths])
    spoilt = [r for r, bad in zip(rows, reference.is_spoilt, strict=True) if bad]
    flags = _skipped(traced.results, exact, traced.arguments)
    skipped = [rows[i] for i in flags]
    if shadow.endless:  # no result ever comes
        errors = [float("inf")] * len(errors)
    return Diagnosis(
        name=name,
        diagnosed=policy,
        equations=[f for f in blame(findings, harmed) if f.counts],
        results=dict(zip(results, errors, strict=True)),
        noise=[n for n, bad in zip(results, reference.is_noise, strict=True) if bad],
        tolerance=tolerance,
        spoilt=_first_spoilt(findings, spoilt or _tested(findings, skipped)),
        is_spoilt=bool(spoilt),
        is_skipped=bool(skipped),
        endless=[_endless(*loop, policy.compute_dtype.name) for loop in shadow.endless],
        spoilt_arguments=_spoilt_arguments(traced.arrays, names),
        gradients=magnitudes,
        loss_scale=_loss_scale(traced.arguments),
        in_order=findings,
        paths=parameters.argument_paths(traced.arguments),
        run=lambda other: max(reference.errors(program.run(other)), default=0.0),
    )


def _argument_names(arguments: Any) -> list[str]:
    """Returns the path of each array in its argument, or which argument it is."""
    keys = [path for path, _ in jax.tree.leaves_with_path(arguments)]
    return [
        "optimizer state"
        if path is None
        else path or f"argument {parameters.key_names(key[1])[0]}"
        for path, key in zip(parameters.argument_paths(arguments), keys, strict=True)
    ]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Numbers what has the same name: a change of argument 0, and the first result."""
    seen = collections.Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return found


def _as_counted(error: float) -> float:
    """Returns an error as `Counts` has it."""
    return min(error, 1.0) + (0.0 if math.isfinite(error) else SPOILT)


def _skipped(results: Flat, values: Sequence[Any], arguments: Any) -> list[int]:
    """Returns the results that say of a step that loss scaling has skipped it.

    A state that the call hands on as it was says that of a step before.
    """
    fields, flag = LossScaleState._fields, "last_step_finite"
    back = fields.index(flag) - fields.index("skipped_steps")
    before = [state.skipped_steps for _, state in find_states(arguments)]
    return [
        number
        for number, path in enumerate(results.paths)
        if any(flag in parameters.key_names(key) for key in path)
        and not np.all(values[number])
        and not any(np.array_equal(values[number - back], skips) for skips in before)
    ]


def _tested(findings: Sequence[Finding], flags: Sequence[int]) -> list[int]:
    """Returns the floats of which some flags tell whether they are finite."""
    found, stack = [], [f for f in flags if f >= 0]
    seen = set(stack)
    while stack:
        finding = findings[stack.pop()]
        if finding.counts is not None and jnp.issubdtype(finding.dtype, np.inexact):
            found.append(finding.index)
            continue
        new = set(finding.reads) - seen - {-1}
        seen |= new
        stack += new
    return found


def _first_spoilt(
    findings: Sequence[Finding], results: Sequence[int]
) -> Finding | None:
    """Returns where the reference's own Inf or NaN in some results come from."""

    def is_spoilt(index: int) -> bool:
        counts = findings[index].counts
        return counts is not None and counts.nonfinite_before > 0

    stack = [r for r in results if is_spoilt(r)]
    seen = set(stack)
    while stack:
        for source in findings[stack.pop()].reads:
            if source not in seen and is_spoilt(source):
                seen.add(source)
                stack.append(source)
    return findings[min(seen)] if seen else None


def _spoilt_arguments(arrays: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Returns the names of the arguments that hold Inf or NaN."""
    spoilt = [n for n, x in zip(names, arrays, strict=True) if not is_finite(x)]
    return list(dict.fromkeys(spoilt))


def _loss_scale(arguments: Any) -> float | None:
    """Returns the loss scale that the arguments hold, if there is one.

    The members of an ensemble have one each: that of the one whose gradients vanish
    first.
    """
    states = find_states(arguments)
    if len(states) != 1:
        return None
    return float(jnp.min(states[0][1].loss_scale))
