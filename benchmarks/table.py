"""Tables of the results, written into the READMEs, and the bars that they have to meet.

    python benchmarks/table.py benchmarks/results/compare-jax0.12.json
        [--write] [--bars]

`--write` puts the comparison with float32 into `README.md`, and the comparison with
bfloat16 by hand and all rows into `benchmarks/README.md`, between the markers
`<!-- benchmarks: begin -->` and `<!-- benchmarks: end -->`.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
REPOSITORY = "https://github.com/jmp-rewrite/jmp_rewrite/blob/main"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

TITLES = {
    "mlp": "MLP (8192 x 4096 units)",
    "gpt2": "GPT-2 small (8 x 512)",
    "resnet50": "ResNet-50 (64 x 224)",
    "vit": "ViT-B/16 (64 x 224)",
    "bert": "BERT-base (16 x 128)",
    "scan": "scan over checkpointed layers (8 x 512)",
    "lstm": "bidirectional LSTM (64 x 256)",
    "unet": "U-Net (32 x 64)",
}
MODES = {
    "float32": "float32",
    "matmul_precision": "`default_matmul_precision`",
    "by_hand": "by hand",
    "jmp": "jmp",
    "mpx": "MPX",
    "propagation": "propagation",
    "ours": "jmp_rewrite",
}
DEVICES = {"v5e": "TPU v5e", "v6e": "TPU v6e", "h200": "H200"}

# What stands in a column: on a TPU cycles and bytes accessed, on a GPU bytes written.
TIME = {"v5e": "mcycles", "v6e": "mcycles"}
BYTES = {"v5e": "gb_accessed", "v6e": "gb_accessed", "h200": "gb_written"}

# Why ours costs more than by hand, where it does. Numbers are those of NOTES.md.
REASONS = {
    ("mlp", "v5e", "cycles"): "the same kernels with the same windows (30)",
    (
        "scan",
        "h200",
        "bytes",
    ): "the embedding's cotangents are added up in float32, and "
    "XLA:GPU transposes a cotangent after its cast (40)",
    ("unet", "v5e", "bytes"): "cotangents of the upsampling are added up in float32, "
    "and written for it",
    ("unet", "h200", "bytes"): "what is written early, to be held in half, is written "
    "in addition (37)",
}

# Measured times: what the row is called, and its file in `results/`.
MEASURED = {
    "MLP, JAX 0.12": "cpu-jax0.12.json",
    "MLP, JAX 0.10": "cpu-jax0.10.json",
    "two layers of GPT-2, JAX 0.12": "cpu-gpt2-jax0.12.json",
    "two layers of GPT-2, JAX 0.10": "cpu-gpt2-jax0.10.json",
}

Results = dict[str, Any]


def ratio(results: Results, model: str, target: str, what: str, to: str) -> float:
    """Ours by another mode's; NaN where one of them is missing."""
    by_mode = results["rows"].get(model, {}).get(target, {})
    try:
        return by_mode["ours"][what] / by_mode[to][what]
    except (KeyError, TypeError, ZeroDivisionError):
        return math.nan


def error_ratio(results: Results, model: str) -> float:
    """The gradients' error, ours by by hand's."""
    errors = results.get("accuracy", {}).get(model, {})
    try:
        return errors["ours"]["gradients"] / errors["by_hand"]["gradients"]
    except (KeyError, ZeroDivisionError):
        return math.nan


def mean(ratios: Iterable[float]) -> float:
    """The geometric mean of those that are there."""
    there = [r for r in ratios if not math.isnan(r)]
    return statistics.geometric_mean(there) if there else math.nan


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(x: float | None, digits: int = 2) -> str:
    """A cell."""
    return "" if x is None or math.isnan(x) else f"{x:.{digits}f}"


def summary(results: Results) -> str:
    """Ours by by hand's, a row a model."""
    columns = [
        (title, _column(results, target, what, "by_hand"))
        for target, what, title in _columns(results)
    ]
    columns.append(("gradient error", lambda model: error_ratio(results, model)))
    return _ratios(results, columns)


def front(results: Results) -> str:
    """Ours by float32's: what README shows first."""
    columns = [
        (title, _column(results, target, what, "float32"))
        for target, what, title in _columns(results)
        if target == "h200" or not title.endswith("bytes")
    ]
    slow = [
        f"{TITLES[model].partition(' (')[0]} on a {title.removesuffix(' cycles')} "
        f"({number(of(model))})"
        for title, of in columns
        for model in TITLES
        if title.endswith("cycles") and of(model) > 1
    ]
    by_hand = [
        f"{number(mean(column(model) for model in TITLES))} of {words}"
        for words, column in (
            ("its cycles", _column(results, "v5e", "mcycles", "by_hand")),
            ("its memory", _column(results, "v5e", "mb_temp", "by_hand")),
        )
    ]
    made = f"JAX {results['versions']['jax']}, {results['date']}"
    note = (
        f"Compiler estimates of one training step, not measured times ({made}): cycles "
        "by the TPU compiler, bytes written by the GPU compiler, and the peak of "
        f"temporary memory. **Not faster: {' and '.join(slow)}.** Against bfloat16 "
        f"written by hand, with Flax' `dtype=`, the step takes {' and '.join(by_hand)} "
        f"on a TPU v5e ([all figures]({REPOSITORY}/benchmarks/README.md))."
    )
    table = _ratios(results, columns)
    for title in TITLES.values():  # sizes are in the benchmarks' own README
        table = table.replace(f"| {title} |", f"| {title.partition(' (')[0]} |")
    return f"{table}\n\n{note}\n\n{measured()}"


def measured() -> str:
    """Measured times on a CPU."""
    rows, about = [], {}
    for title, file in MEASURED.items():
        about = json.loads((HERE / "results" / file).read_text())
        modes = about["modes"]
        ms = [f"{modes[mode]['ms']:.0f}" for mode in ("float32", "by_hand", "ours")]
        rows.append([title, *ms, number(modes["ours"]["of_float32"])])
    head = ["ms a step", "float32", "bfloat16 by hand", "jmp_rewrite", "ratio"]
    note = (
        f"Measured on a CPU ({about['cores']} cores of an Intel Xeon with AMX, "
        f"{about['date']}); the ratio is jmp_rewrite to float32."
    )
    return f"{note}\n\n{markdown(head, rows)}"


def above(results: Results) -> str:
    """Where ours costs more than by hand, and why."""
    lines = []
    for model in (m for m in TITLES if m in results["rows"]):
        for target, what, title in _columns(results):
            value = number(ratio(results, model, target, what, "by_hand"))
            if value and float(value) > 1:
                key = model, target, title.rpartition(" ")[2]
                reason = REASONS.get(key, "not looked into yet")
                lines.append(f"- **{TITLES[model]}, {title}: {value}**: {reason}.")
    return "\n".join(lines)


def _columns(results: Results) -> list[tuple[str, str, str]]:
    """Target, what is compared, and the column's title."""
    return [
        (target, what, f"{DEVICES[target]} {title}")
        for target in (t for t in DEVICES if _has(results, t))
        for what, title in (
            (TIME.get(target), "cycles"),
            (BYTES[target], "bytes"),
            ("mb_temp", "memory"),
        )
        if what
    ]


def _column(
    results: Results, target: str, what: str, to: str
) -> Callable[[str], float]:
    return lambda model: ratio(results, model, target, what, to)


def _ratios(
    results: Results, columns: Sequence[tuple[str, Callable[[str], float]]]
) -> str:
    models = [m for m in TITLES if m in results["rows"]]
    rows = [[TITLES[m], *(number(f(m)) for _, f in columns)] for m in models]
    means = [number(mean(f(m) for m in models)) for _, f in columns]
    return markdown(["", *(t for t, _ in columns)], [*rows, ["geometric mean", *means]])


def _has(results: Results, target: str) -> bool:
    return any(target in by_target for by_target in results["rows"].values())


def everything(results: Results) -> str:
    """All rows, a table a target."""
    parts = []
    for target in (t for t in DEVICES if _has(results, t)):
        head = ["model", "mode"]
        head += ["Mcycles", "GB accessed"] if target in TIME else ["GB written"]
        head += ["MB temporary", "casts", "loss error", "gradient error", "compile s"]
        rows = []
        for model in (m for m in TITLES if target in results["rows"].get(m, {})):
            by_mode = results["rows"][model][target]
            for mode in (m for m in MODES if m in by_mode):
                rows.append(_row(results, model, target, mode))
        parts.append(f"**{DEVICES[target]}** ({results['baselines'][target]})")
        parts.append(markdown(head, rows))
    return "\n\n".join(parts)


def _row(results: Results, model: str, target: str, mode: str) -> list[str]:
    cells = results["rows"][model][target][mode]
    errors = results.get("accuracy", {}).get(model, {}).get(mode, {})
    row = [TITLES[model], MODES[mode]]
    if "error" in cells:
        return [*row, "does not compile"]
    row += [number(cells[TIME[target]], 1)] if target in TIME else []
    row += [number(cells[BYTES[target]], 1), number(cells["mb_temp"], 0)]
    row += [str(cells["casts"]), number(errors.get("loss"), 4)]
    return [*row, number(errors.get("gradients")), number(cells["seconds"], 0)]


def bars(results: Results) -> str:
    """Each bar, whether it is met, and by what it is missed."""
    models = [m for m in TITLES if m in results["rows"]]

    def of(target: str, what: str, to: str = "by_hand") -> dict[str, float]:
        found = {m: ratio(results, m, target, what, to) for m in models}
        return {m: r for m, r in found.items() if not math.isnan(r)}

    errors = {m: error_ratio(results, m) for m in models}
    against = {m: r for m, r in of("v5e", "mb_temp", "float32").items()
               if m in ("resnet50", "vit")}  # fmt: skip
    lines = [
        _bar("v5e cycles, mean", mean(of("v5e", "mcycles").values()), 0.92),
        *_each("v5e cycles", of("v5e", "mcycles"), 1.02),
        _bar("v5e bytes, mean", mean(of("v5e", "gb_accessed").values()), 1.00),
        _bar("h200 bytes, mean", mean(of("h200", "gb_written").values()), 1.00),
        _bar("v5e memory, mean", mean(of("v5e", "mb_temp").values()), 0.90),
        *_each("v5e memory", of("v5e", "mb_temp"), 1.02),
        _bar("h200 memory, mean", mean(of("h200", "mb_temp").values()), 0.97),
        *_each("h200 memory", of("h200", "mb_temp"), 1.02),
        *_each("gradient error", errors, 1.00),
        *_each("v5e memory, of float32", against, 0.60),
        *_each("h200 memory, of float32",
               {m: ratio(results, m, "h200", "mb_temp", "float32")
                for m in ("resnet50", "vit")}, 0.60),
    ]  # fmt: skip
    return "\n".join(lines)


def _bar(name: str, value: float, limit: float) -> str:
    verdict = "?" if math.isnan(value) else "met" if value <= limit else "MISSED"
    return f"{verdict:7} {name:36} {value:.3f} <= {limit:.2f}"


def _each(name: str, values: dict[str, float], limit: float) -> list[str]:
    return [_bar(f"{name}, {model}", value, limit) for model, value in values.items()]


def texts(results: Results) -> dict[pathlib.Path, str]:
    """What stands between the markers of each README."""
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    note = f"{results['date']}; {versions}."
    why = f"Where it costs more than by hand, and why:\n\n{above(results)}"
    parts = [summary(results), why, everything(results), note]
    return {
        HERE.parent / "README.md": front(results),
        HERE / "README.md": "\n\n".join(parts),
    }


def write(file: pathlib.Path, text: str) -> None:
    """Replaces what stands between the markers.

    Raises:
      ValueError: if the file does not have them.
    """
    before, begin, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected the markers {BEGIN} and {END} in {file}")
    file.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results")
    parser.add_argument("--write", action="store_true", help="into the READMEs")
    parser.add_argument("--bars", action="store_true", help="print the bars alone")
    options = parser.parse_args()
    results = json.loads(pathlib.Path(options.results).read_text())
    if options.bars:
        print(bars(results))
        return
    print(*texts(results).values(), bars(results), sep="\n\n")
    if options.write:
        for file, text in texts(results).items():
            write(file, text)


if __name__ == "__main__":
    main()
