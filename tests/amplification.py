"""Random programs that multiply an error of rounding, judged by the law of `judge.py`.

`python tests/amplification.py 1000 --seed 5` draws a thousand programs, and prints each
that breaks the law, shrunk, as code that `laws/test_amplification.py` can hold. What is
off by more than the law allows beside a careful expert alone (`by_hand`) is counted
apart.
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from amplification_ops import ARGUMENTS, FORWARD_ONLY, NESTED, OPS, WEIGHTS, arguments
from amplifying import POLICIES, scalar, trace
from by_hand import DEVICES, DTYPES
from judge import DRAWS, Judge, Verdict

from jmp_rewrite import mixed_precision, mixed_precision_jaxpr

f32 = np.float32
FORMS = ("forward", "forward", "gradient", "outside", "step")
# Blocks of these are differentiated.
DIFFERENTIATES = ("descent", "gradient")
# What shrinking puts in the place of a value of a class.
SIMPLEST = {"u": "x", "L": "level"}
# Seconds after which a program hangs.
LONGEST = 120
# By hand is off by more than this: the program says nothing.
UNREASONABLE = 0.2


class Statement(NamedTuple):
    """`target = op(*operands)`, and for what steps or branches a block of its own."""

    target: str
    op: str
    operands: tuple[str, ...]
    body: tuple[Any, ...] = ()


class Program(NamedTuple):
    """Statements in order, and the names of what they return.

    Attributes:
      block: the statements.
      returns: names of values.
      form: how it is judged, one of `FORMS`.
    """

    block: tuple[Statement, ...]
    returns: tuple[str, ...]
    form: str = "forward"


# ---- what a program means


def function(program: Program) -> Callable[..., Any]:
    """Returns the function of `arguments(seed)` that a program stands for."""

    def run(*args: Any) -> Any:
        env = dict(zip(ARGUMENTS, args, strict=True))
        _run(program.block, env)
        return [env[name] for name in program.returns]

    return run


def _run(block: tuple[Statement, ...], env: dict[str, Any]) -> None:
    for target, op, operands, body in block:
        values = [env[name] for name in operands]
        if body:
            inner = _body(body, env)
            env[target] = NESTED[op].fun(inner, *values)
        else:
            env[target] = OPS[op].fun(env, *values)


def _body(body: tuple[Statement, ...], env: dict[str, Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        inner = {**env, "a": a, "b": b}
        _run(body, inner)
        return jax.numpy.tanh(inner[body[-1].target])

    return run


def _gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss of a program and its gradients."""
    return jax.value_and_grad(scalar(fun), tuple(range(len(WEIGHTS))))


def _step(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a whole step of SGD with momentum; momenta are like the weights."""

    def step(*args: Any) -> Any:
        count = len(WEIGHTS)
        value, grads = _gradient(fun)(*args)
        momenta = [f32(0.9) * w + g for w, g in zip(args, grads, strict=False)]
        new = [w - f32(1e-3) * m for w, m in zip(args[:count], momenta, strict=True)]
        return new, momenta, value

    return step


# ---- how they are drawn


def draw(seed: int) -> Program:
    """Returns a program of two to seven statements; loops are rarely in loops."""
    rng = random.Random(seed)
    names = iter(f"v{i}" for i in range(1000))
    classes = {n: c for n, c in ARGUMENTS.items() if c in ("u", "L")}
    depth = 1 + (rng.random() < 0.1)
    block = _draw_block(rng, names, classes, rng.randint(2, 7), depth)
    made = [s.target for s in block]
    returns = {made[-1], rng.choice(made)}
    form = rng.choice(FORMS)
    if FORWARD_ONLY & _ops(block):
        form = FORMS[0]
    return Program(block, tuple(sorted(returns)), form)


def _ops(block: tuple[Statement, ...]) -> set[str]:
    return {s.op for s in block}.union(*(_ops(s.body) for s in block))


def _draw_block(
    rng: random.Random,
    names: Iterator[str],
    classes: dict[str, str],
    length: int,
    depth: int,
) -> tuple[Statement, ...]:
    classes, block = dict(classes), []
    for _ in range(length):
        nested = depth and rng.random() < 0.25
        table = NESTED if nested else OPS
        group = rng.choice(sorted({op.group for op in table.values()}))
        op = rng.choice(sorted(n for n, o in table.items() if o.group == group))
        picks = [_pick(rng, classes, c) for c in table[op].takes]
        if any(p is None for p in picks):
            continue
        body: tuple[Any, ...] = ()
        if nested:
            inner = {**classes, "a": "u", "b": "u"}
            body = _draw_block(rng, names, inner, rng.randint(1, 3), depth - 1)
            if not body or _gives(body[-1]) != "u":
                continue
            if FORWARD_ONLY & _ops(body) and op.startswith(DIFFERENTIATES):
                continue
            if not _reads(body, "a"):
                first = body[0]
                if OPS.get(first.op) is None or OPS[first.op].takes[:1] != "u":
                    continue
                first = first._replace(operands=("a", *first.operands[1:]))
                body = (first, *body[1:])
        block.append(Statement(next(names), op, tuple(picks), body))
        classes[block[-1].target] = table[op].gives
    return tuple(block) or (Statement(next(names), "linear", ("x", "w1")),)


def _gives(statement: Statement) -> str:
    return (NESTED if statement.body else OPS)[statement.op].gives


def _reads(block: tuple[Statement, ...], name: str) -> bool:
    return any(name in s.operands or _reads(s.body, name) for s in block)


def _pick(rng: random.Random, classes: dict[str, str], kind: str) -> str | None:
    """Picks a value of a class, of the last ones more often."""
    fitting = [name for name, c in classes.items() if c == kind]
    if not fitting:
        return None
    made = [name for name in fitting if name not in ARGUMENTS][-3:]
    return rng.choice(made if made and rng.random() < 0.7 else fitting)


# ---- how they are judged


class Failure(NamedTuple):
    """A program that breaks the law, where, and what it was judged with."""

    program: Program
    policy: str
    device: str
    verdicts: list[Verdict]


def judge(program: Program, careful: bool = True) -> Judge | None:
    """Returns the judge of a program; None if it is no reasonable one."""
    fun, args = function(program), arguments(0)
    shapes = {"forward": fun, "step": _step(fun)}
    closed = trace(shapes.get(program.form, _gradient(fun)), args)
    outside = program.form == "outside" and not careful
    found = Judge(closed, lambda seed: list(arguments(seed)), careful, outside)
    return found if _is_reasonable(found, "reference") else None


def failures(
    program: Program,
    policies: Sequence[str] = POLICIES,
    devices: Sequence[str] = DEVICES,
    careful: bool = True,
) -> Iterator[Failure | None]:
    """Yields what breaks the law; None for each policy under which by hand does."""
    judged = judge(program, careful)
    for policy in policies:
        half = DTYPES[policy]
        if judged is None or not _is_reasonable(judged, half):
            yield None
            continue
        rewritten = _rewritten(program, judged.closed, policy)
        for device in devices:
            verdicts = judged.verdicts(policy, device, rewritten)
            if not all(v.holds or _says_nothing(v.hand) for v in verdicts):
                yield Failure(program, policy, device, verdicts)


def _rewritten(program: Program, closed: Any, policy: str) -> Any:
    if program.form == "outside":
        fun = mixed_precision(function(program), policy)
        return trace(_gradient(fun), arguments(0))
    return mixed_precision_jaxpr(closed, policy)


def _says_nothing(hand: float) -> bool:
    """Whether by hand is non-finite or off by far, in all draws that were judged."""
    return bool(np.isnan(hand)) or hand >= UNREASONABLE


def _is_reasonable(judged: Judge, half: Any) -> bool:
    """Whether float64 or half precision by hand computes something."""
    try:
        errors = judged.errors(half)
    except RuntimeError:  # a loop that does not end
        return False
    outs = [judged.results(half, s) for s in range(DRAWS[0])]
    finite = all(np.isfinite(x).all() for out in outs for x in out)
    return finite and max(errors) < UNREASONABLE


# ---- how they are shrunk


def shrink(failure: Failure, careful: bool = True, tries: int = 100) -> Failure:
    """Returns a smaller program that breaks the law under the same policy and device.

    Statements are dropped and what reads them reads their operands; blocks of loops are
    shrunk too; a gradient becomes a forward pass, if that fails as well.
    """
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for program in _smaller(failure.program):
            tries -= 1
            if tries < 0:
                break
            try:
                found = [
                    f
                    for f in failures(
                        program, [failure.policy], [failure.device], careful
                    )
                    if f is not None
                ]
            except (TypeError, ValueError, KeyError):
                continue  # it reads what is no longer there
            if found:
                failure, smaller = found[0], True
                break
    return failure


def _smaller(program: Program) -> Iterator[Program]:
    block, returns, form = program
    if form in ("step", "outside"):
        yield program._replace(form="gradient")
    if form != "forward":
        yield program._replace(form="forward")
    if len(returns) > 1:
        for name in returns:
            yield program._replace(returns=(name,))
    used = _used(block, returns)
    if len(used) < len(block):
        yield program._replace(block=used)
    for i in reversed(range(len(block))):
        if block[i].target in returns:
            for name in block[i].operands:
                if name not in ARGUMENTS:
                    new = tuple(sorted({name, *returns} - {block[i].target}))
                    yield program._replace(returns=new)
    for smaller in _smaller_blocks(block, _classes(block)):
        if all(any(s.target == r for s in smaller) for r in returns):
            yield program._replace(block=smaller)


def _used(
    block: tuple[Statement, ...], names: tuple[str, ...]
) -> tuple[Statement, ...]:
    needed, kept = set(names), []
    for s in reversed(block):
        if s.target in needed:
            kept.append(s)
            needed |= _read(s)
    return tuple(reversed(kept))


def _read(statement: Statement) -> set[str]:
    return {*statement.operands}.union(*map(_read, statement.body))


def _classes(block: tuple[Statement, ...]) -> dict[str, str]:
    """Returns the class of each value, those of arguments too."""
    found = {**ARGUMENTS, "a": "u", "b": "u"}
    for s in block:
        found |= {**_classes(s.body), s.target: _gives(s)}
    return found


def _smaller_blocks(
    block: tuple[Statement, ...], classes: dict[str, str]
) -> Iterator[tuple[Statement, ...]]:
    for i, s in reversed(list(enumerate(block))):
        before, after = block[:i], block[i + 1 :]
        for name in dict.fromkeys(s.operands):
            if classes[name] == classes[s.target]:
                rest = (*before, *after)
                yield tuple(_renamed(other, s.target, name) for other in rest)
        for body in _smaller_blocks(s.body, classes):
            if body:
                yield (*before, s._replace(body=body), *after)
        for j, name in enumerate(s.operands):
            simple = SIMPLEST.get(classes[name])
            if simple and name not in (simple, "a") and name not in WEIGHTS:
                operands = (*s.operands[:j], simple, *s.operands[j + 1 :])
                yield (*before, s._replace(operands=operands), *after)


def _renamed(s: Statement, old: str, new: str) -> Statement:
    operands = tuple(new if name == old else name for name in s.operands)
    return s._replace(
        operands=operands, body=tuple(_renamed(b, old, new) for b in s.body)
    )


# ---- what is printed


def code(program: Program) -> str:
    """Returns a program as an expression that makes it."""

    def block(statements: Any, indent: str) -> str:
        inner = indent + "    "
        lines = []
        for s in statements:
            body = f", {block(s.body, inner)}" if s.body else ""
            lines.append(
                f"{inner}Statement({s.target!r}, {s.op!r}, {s.operands!r}{body}),\n"
            )
        return "(\n" + "".join(lines) + indent + ")"

    return (
        f"Program(\n    {block(program.block, '    ')},\n"
        f"    {program.returns!r},\n    {program.form!r},\n)"
    )


def kind(failure: Failure) -> str:
    """Names what a shrunk program is made of."""

    def names(block: Any) -> str:
        return " ".join(s.op + (f"[{names(s.body)}]" if s.body else "") for s in block)

    return f"{failure.program.form}: {names(failure.program.block)}"


def main() -> None:
    """Draws and judges programs, and prints what breaks the law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--careful", action="store_true", help="shrink these as well")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _hang)
    counts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    start = time.time()
    for i in range(options.count):
        seed = options.seed + i
        found = _judged(seed, counts)
        for failure, careful in found[-1:]:
            if careful and not options.careful:
                print(f"# seed {seed}, beside a careful expert: {failure.verdicts}")
                continue
            if not options.no_shrink:
                failure = shrink(failure, careful)
            kinds[kind(failure)] += 1
            print(f"\n# seed {seed}: {failure.policy} on {failure.device}")
            print(f"# {'; '.join(map(str, failure.verdicts))}")
            print(code(failure.program), flush=True)
        if i % 500 == 499:
            jax.clear_caches()  # a long run would fill the memory
            rate = (i + 1) / (time.time() - start)
            print(f"{i + 1} programs, {rate:.1f}/s, {dict(counts)}", file=sys.stderr)
    print(f"\n{options.count} programs from seed {options.seed}: {dict(counts)}")
    for name, count in kinds.most_common():
        print(f"{count:5} {name}")


def _hang(*_: Any) -> None:
    raise TimeoutError(f"it took more than {LONGEST} seconds")


def breaks(seed: int) -> tuple[list[Failure | None], list[Failure | None]]:
    """Judges a program under one policy, on a CPU and one accelerator.

    Returns:
      What breaks the law beside a careful expert, and of that what does so beside any.
    """
    rng = random.Random(seed)
    policy, accelerator = rng.choice(POLICIES), rng.choice(DEVICES[1:])
    how = draw(seed), [policy], ["cpu", accelerator]
    found = list(failures(*how))
    return found, list(failures(*how, careful=False)) if any(found) else []


def _judged(seed: int, counts: collections.Counter[str]) -> list[tuple[Failure, bool]]:
    """Judges a program and counts it; returns failures, and who is the expert."""
    policy = random.Random(seed).choice(POLICIES)
    signal.alarm(LONGEST)
    try:
        found, usual = breaks(seed)
    except Exception as error:  # a fuzzer goes on
        print(f"\n# seed {seed} under {policy} raised {error!r:.200}", flush=True)
        counts[f"raised {type(error).__name__}: {str(error)[:80]}"] += 1
        return []
    finally:
        signal.alarm(0)
    broken = [(f, False) for f in usual if f is not None]
    counts["skipped" if None in found else "judged"] += 1
    counts["break the law"] += bool(broken)
    if broken:
        return broken
    beside = [(f, True) for f in found if f is not None]
    counts["beside a careful expert"] += bool(beside)
    return beside


if __name__ == "__main__":
    main()
