"""What two compiled programs of one model write, side by side.

    PYTHONPATH=. python benchmarks/buffers.py --model gpt2 --target h200
        [--modes by_hand ours] [--dtype f32] [--peak] [--by size|difference] [--limit N]

Three tables: bytes written by dtype and scope; what both write or hold by scope, op
and shape, with the source line; casts that stand alone. Numbers in scopes are shown as
`*`, so that the layers of a model are one row (`--layers` keeps them apart). With
`--peak` it is what is alive at the peak of temporary memory instead of all that is
written. It compiles what `compare.py` has not compiled yet.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from programs import Key, compiled

from jmp_rewrite._cost import hlo, liveness

_TRANSFORMS = re.compile(r"^(jit|jvp|transpose|vmap|checkpoint|rematted_computation)\b")


class Line(NamedTuple):
    """One buffer as it is shown: where it comes from, what it is, how much."""

    phase: str
    scope: str
    op: str
    shape: str
    dtype: str
    bytes: float
    times: int
    source: str


def where(op_name: str, layers: bool) -> tuple[str, str, str]:
    """Splits an op's name into forward, backward or update, scope and primitive."""
    backward = "transpose(" in op_name
    parts = [p for p in op_name.split("/") if "mixed_precision" not in p]
    op = parts.pop() if parts else ""
    inside = False
    path = []
    for part in parts:
        inner = re.findall(r"(?:jvp|transpose|vmap)\(*([^()]*)\)", part)
        inside = inside or part.startswith(("jvp", "transpose"))
        if inner:
            path += [p for p in inner if p]
        elif not _TRANSFORMS.match(part):
            path.append(part)
    scope = "/".join(path)
    if not layers:
        scope = re.sub(r"\d+", "*", scope)
    phase = "bwd" if backward else "fwd" if inside else "rest"
    return phase, scope, op


def written(module: hlo.Module, layers: bool) -> list[Line]:
    """All arrays that the program's kernels write."""
    return [
        _line(module, k.instruction, a, k.times, layers)
        for k in module.kernels()
        for a in module.written(k.instruction)
    ]


def held(module: hlo.Module, layers: bool) -> list[Line]:
    """The temporary arrays that are alive at the peak."""
    return [
        _line(module, b.instruction, b.array, 1, layers)
        for b in liveness.peak(module).buffers
    ]


def _line(
    module: hlo.Module, i: hlo.Instruction, a: hlo.Array, times: int, layers: bool
) -> Line:
    shape = ",".join(map(str, a.shape))
    place = where(_op_name(module, i), layers)
    return Line(*place, shape, a.dtype, a.bytes * times, times, _source(module, i))


def _op_name(module: hlo.Module, i: hlo.Instruction) -> str:
    """An instruction's scope, or that of the last one inside the fusion."""
    if i.op_name or i.fused not in module.computations:
        return i.op_name
    names = [x.op_name for x in module.computations[i.fused].values() if x.op_name]
    return names[-1] if names else ""


def _source(module: hlo.Module, i: hlo.Instruction) -> str:
    return module.source(i)


def print_totals(lines: dict[str, list[Line]], depth: int) -> None:
    """Prints bytes by dtype, and by phase, scope and dtype."""
    totals: dict[tuple[str, ...], collections.Counter[str]] = {}
    for mode, found in lines.items():
        for x in found:
            scope = "/".join(x.scope.split("/")[:depth])
            for key in ((x.dtype,), (x.phase, scope, x.dtype)):
                totals.setdefault(key, collections.Counter())[mode] += x.bytes
    print(f"{'MB':60}" + "".join(f"{m:>14}" for m in lines))
    for size in (1, 3):
        chosen = [(k, v) for k, v in totals.items() if len(k) == size]
        for key, by_mode in sorted(chosen, key=lambda kv: -max(kv[1].values())):
            if max(by_mode.values()) > 1e6:
                numbers = "".join(f"{by_mode[m] / 1e6:14.1f}" for m in lines)
                print(f"{' '.join(key):60}{numbers}")
        print()


def print_buffers(lines: dict[str, list[Line]], by: str, limit: int) -> None:
    """Prints, for each place and shape, what each mode has there."""
    groups: dict[tuple[str, ...], dict[str, list[Line]]] = {}
    for mode, found in lines.items():
        for x in found:
            by_mode = groups.setdefault((x.phase, x.scope, x.shape), {})
            by_mode.setdefault(mode, []).append(x)

    def size(item: tuple[tuple[str, ...], dict[str, list[Line]]]) -> float:
        sizes = [sum(x.bytes for x in item[1].get(m, [])) for m in lines]
        return abs(sizes[0] - sizes[-1]) if by == "difference" else max(sizes)

    print(f"{'MB':>9} of each mode, place, shape; below: what each mode has")
    for (phase, scope, shape), by_mode in sorted(
        groups.items(), key=size, reverse=True
    )[:limit]:
        sums = " ".join(
            f"{sum(x.bytes for x in by_mode.get(m, [])) / 1e6:9.1f}" for m in lines
        )
        print(f"{sums}  {phase} {scope} [{shape}]")
        for mode in lines:
            print(f"{'':12}{mode:10} {_summary(by_mode.get(mode, []))}")


def _summary(found: Iterable[Line]) -> str:
    counts = collections.Counter((x.dtype, x.op, x.source) for x in found)
    times: collections.Counter[tuple[str, ...]] = collections.Counter()
    for x in found:
        times[x.dtype, x.op, x.source] += x.times
    return "; ".join(
        f"{times[key]}x {key[0]} {key[1]} ({key[2]})" for key, _ in counts.most_common()
    )


def print_lone_casts(modules: dict[str, hlo.Module], limit: int) -> None:
    """Prints the kernels that do nothing but cast."""
    for mode, module in modules.items():
        found: collections.Counter[str] = collections.Counter()
        for kernel in module.lone_converts():
            i = kernel.instruction
            phase, scope, _ = where(_op_name(module, i), False)
            found[f"{phase} {scope} to {i.arrays[0]}"] += int(
                sum(a.bytes for a in i.arrays) * kernel.times
            )
        print(f"casts that stand alone, {mode}: MB written")
        for key, size in found.most_common(limit):
            print(f"{size / 1e6:9.1f}  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--modes", nargs="+", default=["by_hand", "ours"])
    parser.add_argument("--size", choices=["full", "quick"], default="full")
    parser.add_argument("--dtype", help="only this one, such as f32")
    parser.add_argument("--peak", action="store_true", help="what is alive at the peak")
    parser.add_argument("--layers", action="store_true", help="keep layers apart")
    parser.add_argument("--depth", type=int, default=3, help="of scopes in totals")
    parser.add_argument("--by", choices=["size", "difference"], default="difference")
    parser.add_argument("--limit", type=int, default=25)
    parser.add_argument("--files", nargs="+", help="compiled texts, in place of modes")
    options = parser.parse_args()
    texts = {}
    for mode in () if options.files else options.modes:
        key = Key(options.model, mode, options.target, options.size)
        texts[mode] = compiled(key)[0].text
    for file in options.files or ():
        texts[pathlib.Path(file).stem] = pathlib.Path(file).read_text()
    modules = {m: hlo.parse(t) for m, t in texts.items()}
    for mode, module in modules.items():
        p = liveness.peak(module)
        print(
            f"{mode}: peak {p.bytes / 1e6:.1f} MB at {p.at}, {len(p.buffers)} buffers"
        )
    lines = {
        mode: held(m, options.layers) if options.peak else written(m, options.layers)
        for mode, m in modules.items()
    }
    if options.dtype:
        lines = {
            m: [x for x in found if x.dtype == options.dtype]
            for m, found in lines.items()
        }
    print_totals(lines, options.depth)
    print_buffers(lines, options.by, options.limit)
    print()
    print_lone_casts(modules, options.limit)


if __name__ == "__main__":
    main()
