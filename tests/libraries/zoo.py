"""Other people's programs under `mixed_precision`: coverage and accuracy.

For each program: the share of matrix FLOPs that run on half operands, the error of
outputs and gradients against float64 (in eps of the compute dtype, global norm) beside
the library's own half-precision mode, and what was not rewritten, with the reason.

    python tests/libraries/zoo.py [--only NAME ...] [--json OUT]

Two decorations are measured: `grad(mixed_precision(loss))` ("loss") and
`mixed_precision(step)` ("step": forward, backward and AdamW).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import math
import os
import time
import traceback
from typing import Any

_QUICK = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_TRACEBACK_FILTERING"] = "off"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + _QUICK

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import zoo_float64  # noqa: E402
import zoo_models  # noqa: E402
from jax.extend import core as jex  # noqa: E402
from jax.extend import source_info_util  # noqa: E402

from jmp_rewrite._policy import as_policy  # noqa: E402
from jmp_rewrite._rewrite import decide  # noqa: E402
from jmp_rewrite._rules.table import Category  # noqa: E402
from jmp_rewrite._transform import mixed_precision  # noqa: E402

POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
# float16 loses small gradients without a loss scale; the own mode gets the same one.
SCALE = {"bfloat16": 1.0, "float16": 128.0}
LIBRARIES = (
    "jax",
    "flax",
    "dm-haiku",
    "equinox",
    "keras",
    "diffrax",
    "numpyro",
    "optax",
    "distrax",
    "rlax",
    "optimistix",
    "evosax",
    "blackjax",
    "flowjax",
    "jraph",
    "transformers",
)
TX = optax.adamw(1e-3)


# ---- matrix FLOPs


def jaxprs_in(params: Any) -> list[Any]:
    """Returns the jaxprs that an equation's parameters hold."""
    found, stack = [], list(params.values())
    while stack:
        item = stack.pop()
        if isinstance(item, (jex.Jaxpr, jex.ClosedJaxpr)):
            found.append(getattr(item, "jaxpr", item))
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found


def product_flops(eqn: Any) -> float:
    """Returns the FLOPs of one product; 0 of anything else."""
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.invars]
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(shapes[0][d] for d in contracted)
        return 2.0 * inner * math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = math.prod(shapes[1]) / shapes[1][numbers.rhs_spec[0]]
        return 2.0 * kernel * math.prod(eqn.outvars[0].aval.shape)
    return 0.0


def flops_by_dtype(jaxpr: Any, trips: float = 1.0) -> collections.Counter[str]:
    """Returns matrix FLOPs by the operands' dtype, loops multiplied out.

    Of a `cond` all branches count equally; a `while` counts once.
    """
    total: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        if flops := product_flops(eqn):
            dtypes = {v.aval.dtype.name for v in eqn.invars[:2]}
            kind = dtypes.pop() if len(dtypes) == 1 else "mixed"
            total[kind] += trips * flops
        inner = jaxprs_in(eqn.params)
        times = (
            trips * eqn.params.get("length", 1)
            if eqn.primitive.name == "scan"
            else (trips / max(len(inner), 1) if eqn.primitive.name == "cond" else trips)
        )
        for body in inner:
            total += flops_by_dtype(body, times)
    return total


def half_share(jaxpr: Any) -> float | None:
    """Returns the share of matrix FLOPs on half operands; None without products."""
    flops = flops_by_dtype(jaxpr)
    whole = sum(flops.values())
    return (flops["bfloat16"] + flops["float16"]) / whole if whole else None


def left_full(plan: Any) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the products that stay full (reason -> FLOPs), and what is opaque."""
    products: collections.Counter[str] = collections.Counter()
    unknown: collections.Counter[str] = collections.Counter()
    for node in plan.graph.nodes:
        reason = plan.pins.reason(plan.graph, node.index)
        if "no rule for" in reason:
            unknown[reason] += 1
        if plan.pins.categories[node.index] is not Category.ALLOW:
            continue
        if plan.labels[node.index]:
            continue
        where = source_info_util.summarize(node.eqn.source_info)
        products[f"{node.name} at {_short(where)}: {reason}"] += (
            node.trips * product_flops(node.eqn)
        )
    opaque = collections.Counter(
        f"{eqn.primitive.name}: {why}" for eqn, _, why, _ in plan.graph.opaque
    )
    return dict(products.most_common(12)), dict(opaque + unknown)


def _short(where: str) -> str:
    path, _, rest = where.partition(" ")
    return "/".join(path.split("/")[-3:]) + (" " + rest if rest else "")


# ---- errors


def _float_leaves(tree: Any) -> list[np.ndarray]:
    kept = []
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            wide = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
            kept.append(np.asarray(leaf).astype(wide))
    return kept


def error(tree: Any, reference: Any, dtype: str) -> float:
    """Returns the relative error of the global norm, in eps of `dtype`."""
    ours, exact = _float_leaves(tree), _float_leaves(reference)
    gap = math.sqrt(
        sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in zip(ours, exact, strict=True))
    )
    norm = math.sqrt(sum(float(np.sum(np.abs(b) ** 2)) for b in exact))
    return gap / max(norm, 1e-300) / float(jnp.finfo(dtype).eps)


def _errors(ours: Any, reference: Any, dtype: str) -> list[float]:
    """Returns the errors of outputs, gradients and loss."""
    (value, outputs), grads = ours
    (exact_value, exact_outputs), exact_grads = reference
    return [
        error(outputs, exact_outputs, dtype),
        error(grads, exact_grads, dtype),
        error(value, exact_value, dtype),
    ]


# ---- one program


def _gradient(loss: Any, scale: float) -> Any:
    """Returns (params, batch) -> ((loss, outputs), gradients)."""

    def scaled(params: Any, batch: Any) -> Any:
        value, outputs = loss(params, batch)
        return value * scale, (value, outputs)

    def run(params: Any, batch: Any) -> Any:
        grads, results = jax.grad(scaled, has_aux=True)(params, batch)
        return results, jax.tree.map(lambda g: g / scale, grads)

    return run


def _step(loss: Any, scale: float) -> Any:
    gradient = _gradient(loss, scale)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        results, grads = gradient(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, results, grads

    return step


def _types(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: (tuple(x.shape), str(x.dtype), bool(getattr(x, "weak_type", False))),
        tree,
    )


def _trace(fun: Any, *args: Any) -> Any:
    """Traces through a fresh function; returns the jaxpr and the result's types."""
    return jax.make_jaxpr(lambda *a: fun(*a), return_shape=True)(*args)


def _signature(fun: Any, *args: Any) -> Any:
    closed, shapes = _trace(fun, *args)
    types = [
        (v.shape, str(v.dtype), getattr(v, "weak_type", False))
        for v in closed.out_avals
    ]
    return closed, (jax.tree.structure(shapes), types)


def _law_1(plain: Any, rewritten: Any) -> str:
    if plain[0] != rewritten[0]:
        return "tree differs"
    wrong = [
        f"{a} -> {b}" for a, b in zip(plain[1], rewritten[1], strict=True) if a != b
    ]
    return "; ".join(wrong[:3]) if wrong else "ok"


def measure(case: zoo_models.Case, dtypes: list[str]) -> dict[str, Any]:
    """Runs one program in all its forms."""
    params, batch = case.params, case.batch
    state = TX.init(params)
    plain = _gradient(case.loss, 1.0)
    closed, shapes = _trace(plain, params, batch)
    reference = _reference(plain, closed, shapes, (params, batch))
    base = jax.jit(plain)(params, batch)
    row: dict[str, Any] = {
        "equations": sum(1 for _ in _equations(closed.jaxpr)),
        "matrix_flops": sum(flops_by_dtype(closed.jaxpr).values()),
        "float32_error_in_float32_eps": _errors(base, reference, "float32"),
    }
    for dtype in dtypes:
        row[dtype] = _measure_dtype(case, dtype, params, state, batch, reference)
    return row


def _reference(plain: Any, closed: Any, shapes: Any, args: Any) -> Any:
    """Returns what the program gives in float64.

    Where its jaxpr holds primitives that are Python inside (lineax), its inputs are
    cast to float64 instead.
    """
    try:
        flat = zoo_float64.run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)
    except (TypeError, ValueError):
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, args
            )
            return jax.jit(plain)(*wide)


def _equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in(eqn.params):
            yield from _equations(inner)


def _measure_dtype(
    case: zoo_models.Case,
    dtype: str,
    params: Any,
    state: Any,
    batch: Any,
    reference: Any,
) -> dict[str, Any]:
    policy, scale, row = POLICIES[dtype], SCALE[dtype], {}

    def attempt(name: str, fun: Any) -> None:
        try:
            fun()
        except Exception as problem:
            message = f"{type(problem).__name__}: {problem}".splitlines()[0]
            row.setdefault("failures", {})[name] = message[:400]
            traceback.print_exception(problem, limit=-4)

    def forward() -> None:
        _, plain = _signature(case.loss, params, batch)
        decorated = mixed_precision(case.loss, policy)
        start = time.perf_counter()
        loss_jaxpr, types = _signature(decorated, params, batch)
        row["rewrite_s"] = time.perf_counter() - start
        row["loss_law_1"] = _law_1(plain, types)
        row["loss_forward_half"] = half_share(loss_jaxpr.jaxpr)
        gradient = _gradient(decorated, scale)
        closed, types = _signature(gradient, params, batch)
        _, plain = _signature(_gradient(case.loss, scale), params, batch)
        row["grad_law_1"] = _law_1(plain, types)
        row["loss_half"] = half_share(closed.jaxpr)
        results, grads = jax.jit(gradient)(params, batch)
        row["loss_error"] = _errors((results, grads), reference, dtype)
        plan = decide(_trace(case.loss, params, batch)[0], as_policy(policy))
        row["loss_full"], row["loss_opaque"] = left_full(plan)

    def whole() -> None:
        step = _step(case.loss, scale)
        traced, plain = _signature(step, params, state, batch)
        decorated = mixed_precision(step, policy)
        closed, types = _signature(decorated, params, state, batch)
        row["step_law_1"] = _law_1(plain, types)
        row["step_half"] = half_share(closed.jaxpr)
        out = jax.jit(decorated)(params, state, batch)
        _, new_state, results, grads = out
        row["step_error"] = _errors((results, grads), reference, dtype)
        leaves = _float_leaves(new_state)
        kept = all(
            x.dtype == y.dtype
            for x, y in zip(
                jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True
            )
        )
        finite = all(np.isfinite(x).all() for x in leaves)
        exact = _exact_moments(new_state, grads)
        row["state"] = (
            "ok"
            if kept and finite and exact < 1e-6
            else (f"dtypes kept: {kept}, finite: {finite}, moments off by {exact:.1e}")
        )
        plan = decide(traced, as_policy(policy))
        row["step_full"], row["step_opaque"] = left_full(plan)

    def own() -> None:
        loss = case.own(jnp.dtype(dtype))
        gradient = _gradient(loss, scale)
        closed, _ = _signature(gradient, params, batch)
        row["own_half"] = half_share(closed.jaxpr)
        results, grads = jax.jit(gradient)(params, batch)
        row["own_error"] = _errors((results, grads), reference, dtype)

    attempt("loss", forward)
    attempt("step", whole)
    if case.own is not None:
        attempt("own", own)
    return row


def _exact_moments(state: Any, grads: Any) -> float:
    """Compares Adam's first moments with 0.1 times the gradients, relatively."""
    moments, exact = _float_leaves(state[0].mu), _float_leaves(grads)
    gaps = [
        np.max(np.abs(m - 0.1 * g) / (np.abs(0.1 * g) + 1e-30), initial=0)
        for m, g in zip(moments, exact, strict=True)
    ]
    return float(max(gaps, default=0.0))


# ---- the table


def _number(x: Any) -> str:
    return "-" if x is None else f"{x:.3g}"


def _share(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f}"


def print_row(name: str, row: dict[str, Any], dtypes: list[str]) -> None:
    """Prints one program's lines."""
    for dtype in dtypes:
        r = row[dtype]
        loss, step, own = (
            "/".join(map(_number, r.get(f"{form}_error", (None, None))[:2]))
            for form in ("loss", "step", "own")
        )
        laws = {r.get(k, "-") for k in ("loss_law_1", "grad_law_1", "step_law_1")}
        print(
            f"{name:22s} {dtype:8s} {_share(r.get('loss_half')):>6s} "
            f"{_share(r.get('step_half')):>6s} {_share(r.get('own_half')):>6s}  "
            f"{loss:>17s} {step:>17s} "
            f"{own:>17s}  {'ok' if laws == {'ok'} else laws} "
            f"{r.get('state', '-')}",
            flush=True,
        )
        for form, message in r.get("failures", {}).items():
            print(f"    FAILED {form}: {message}")
    r = row[dtypes[0]]
    for text, flops in {**r.get("loss_full", {}), **r.get("step_full", {})}.items():
        print(f"    full: {text} ({flops:.3g} FLOPs)")
    for text, count in r.get("step_opaque", {}).items():
        print(f"    opaque: {text} (x{count})", flush=True)


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Runs the zoo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=None,
        choices=sorted(zoo_models.PROGRAMS),
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=list(POLICIES), default=list(POLICIES)
    )
    parser.add_argument("--json", metavar="OUT", help="where to write the results")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "programs": {},
        "skipped": {},
    }
    if options.json and options.only and os.path.exists(options.json):
        with open(options.json) as file:  # a part is run again
            before = json.load(file)
        report["programs"], report["skipped"] = before["programs"], before["skipped"]
    print(
        f"{'program':22s} {'dtype':8s} {'loss%':>6s} {'step%':>6s} {'own%':>6s}  "
        f"{'loss out/grad':>17s} {'step out/grad':>17s} {'own out/grad':>17s}  "
        "law 1, state"
    )
    for name in options.only or zoo_models.PROGRAMS:
        try:
            case = zoo_models.PROGRAMS[name]()
        except Exception as problem:
            report["skipped"][name] = f"{type(problem).__name__}: {problem}"[:300]
            print(f"{name:22s} skipped: {report['skipped'][name]}", flush=True)
            continue
        try:
            row = measure(case, options.dtype)
        except Exception as problem:
            report["skipped"][name] = f"undecorated: {problem}"[:400]
            print(f"{name:22s} skipped, undecorated: {problem}"[:400], flush=True)
            continue
        report["programs"][name] = row
        report["skipped"].pop(name, None)
        print_row(name, row, options.dtype)
        jax.clear_caches()
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
