"""The programs that the rewrite makes, in short: what does a change of source change?

    PYTHONPATH=. python benchmarks/snapshot.py [--write] [--only NAME ...]

For the small models of the benchmarks and the programs of the tests, under both half
policies, each program is resolved for each device, and what no result needs is dropped.
Kept is how often each primitive occurs with which dtypes, the carries of loops, and a
hash of the data flow, in which neither order nor repetition of equations counts.
Without `--write` the differences to what is kept are printed, and the exit status says
whether there are any.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import hashlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]  # both have `programs`

import jax  # noqa: E402
import models  # noqa: E402
import programs  # noqa: E402
from jax.interpreters import partial_eval as pe  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # for the programs on a mesh
KEPT = HERE / "results" / "snapshot-jax{version}.tsv.gz"
POLICIES = ("mixed_bfloat16", "mixed_float16")
# "" is a program for several platforms at once.
DEVICES = ("", "CPU", "NVIDIA GPU", "TPU v4", "TPU v5e", "TPU v6e")


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _held(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in sorted(params):
        value = params[key]
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_open(item), "eqns"):
                yield key, item


def _type(aval: Any) -> str:
    return str(getattr(aval, "dtype", aval))


class _Short:
    """A program in short: counts, and the hash of its data flow."""

    def __init__(self, closed: Any) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._known: dict[int, str] = {}
        self.flow = self._body(closed)

    def _body(self, jaxpr: Any) -> str:
        body = _open(jaxpr)
        if id(jaxpr) in self._known:
            return self._known[id(jaxpr)]
        body, used = pe.dce_jaxpr(body, [True] * len(body.outvars))
        env: dict[Any, str] = {}
        first = [*body.constvars, *body.invars]
        env.update((v, f"p{i}") for i, v in enumerate(first))
        for eqn in body.eqns:
            self._equation(eqn, env)
        outs = [self._read(env, v) for v in body.outvars]
        outs.append(str(list(used)))
        self._known[id(jaxpr)] = _hash(*outs)
        return self._known[id(jaxpr)]

    def _equation(self, eqn: Any, env: dict[Any, str]) -> None:
        name = eqn.primitive.name
        ins = " ".join(_type(v.aval) for v in eqn.invars)
        outs = " ".join(_type(v.aval) for v in eqn.outvars)
        self.counts[f"{name} {ins if len(ins) < 80 else _hash(ins)} -> {outs}"] += 1
        if name in ("scan", "while"):
            self.counts[f"{name} carries {outs}"] += 1
        held = [f"{key}={self._body(j)}" for key, j in _held(eqn.params)]
        keys = {key for key, _ in _held(eqn.params)}
        params = [
            f"{k}={_stable(eqn.params[k])}"
            for k in sorted(eqn.params)
            if k not in keys and not k.startswith("ft_")  # the same in another form
        ]
        reads = [self._read(env, v) for v in eqn.invars]
        made = _hash(name, *params, *held, *reads)
        env.update((v, f"{made}.{i}") for i, v in enumerate(eqn.outvars))

    def _read(self, env: dict[Any, str], atom: Any) -> str:
        if hasattr(atom, "val"):
            return f"{atom.val!r}:{atom.aval}"
        return f"{env[atom]}:{_type(atom.aval)}{getattr(atom.aval, 'shape', '')}"


def _stable(value: Any) -> str:
    """A parameter as text, without the places of functions in memory."""
    if isinstance(value, type):
        value = jax.numpy.dtype(value)
    return re.sub(r"0x[0-9a-f]+|\d+>", "", str(value)) if not callable(value) else "fun"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Names, functions and arguments."""
    for name in models.NAMES:
        module = models.load(name)
        workload = module.make(jax.numpy.float32, module.SMALL)
        yield f"model {name}", workload.step, workload.arguments()
        if name in ("mlp", "gpt2"):
            args = workload.arguments()
            yield f"model {name} forward", workload.loss, (args[0], *args[2:])
    for program in programs.PROGRAMS:
        yield f"program {program.name}", _arrays_of(program.fun), program.args()


def _arrays_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns the arrays of another one's result."""

    def arrays(*args: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(fun(*args)) if hasattr(x, "dtype")]

    return arrays


def resolved_by_passes(
    fun: Callable[..., Any], policy: str, args: Any
) -> Iterator[tuple[str, Any]]:
    """The program of each device: traced once, and resolved."""
    from jmp_rewrite import mixed_precision
    from jmp_rewrite._passes.by_device import resolve

    closed = jax.make_jaxpr(mixed_precision(fun, policy))(*args)
    for device in DEVICES:
        yield device, resolve(closed, device)


def lines(make: Any = resolved_by_passes, only: Any = ()) -> Iterator[str]:
    """The snapshot, line by line."""
    for name, fun, args in cases():
        if only and not any(o in name for o in only):
            continue
        print(name, file=sys.stderr, flush=True)
        for policy in POLICIES:
            base: Any = None
            for device, closed in make(fun, policy, args):
                short = _Short(closed)
                head = f"{name}\t{policy}\t{device or 'any'}"
                yield f"{head}\tflow\t{short.flow}"
                keys = sorted({*short.counts, *(base or ())})
                for key in keys:
                    number = short.counts[key]
                    if base is None or base[key] != number:
                        yield f"{head}\t{key}\t{number}"
                base = short.counts if base is None else base


def main() -> int:
    """Prints the differences, or keeps the snapshot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the snapshot")
    parser.add_argument("--only", nargs="*", default=(), help="parts of names")
    options = parser.parse_args()
    version = ".".join(jax.__version__.split(".")[:2])
    path = pathlib.Path(str(KEPT).format(version=version))
    made = list(lines(only=options.only))
    if options.write:
        with contextlib.closing(gzip.GzipFile(path, "w", mtime=0)) as out:
            out.write(("\n".join(made) + "\n").encode())
        return 0
    before = gzip.decompress(path.read_bytes()).decode().splitlines()
    if options.only:
        before = [b for b in before if any(o in b.split("\t")[0] for o in options.only)]
    gone, new = set(before) - set(made), set(made) - set(before)
    for line in sorted([*(f"- {x}" for x in gone), *(f"+ {x}" for x in new)], key=_key):
        print(line)
    return bool(gone or new)


def _key(line: str) -> tuple[str, ...]:
    return (*line[2:].split("\t")[:4], line)


if __name__ == "__main__":
    sys.exit(main())
