"""What the main job shows at the end: a table of the policies and their curves."""

import itertools
import math
import pathlib
import statistics
from collections.abc import Sequence

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from jmp_rewrite._demo.train import Run
from jmp_rewrite._devices import fast_dtypes
from jmp_rewrite._policy import Policy

COLUMNS = (
    "policy",
    "test\nloss",
    "test\naccuracy",
    "ms a\nstep",
    "activation\nbytes",
    "skipped\nsteps",
    "final\nscale",
)


def table(runs: Sequence[Run]) -> Table:
    """Lists the runs, one row a policy; times are medians and include no compiling.

    It fits a terminal of 80 columns.
    """
    title = "Keras' mixed precision guide on handwritten digits"
    result = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True)
    for column in COLUMNS:
        left = column == "policy"
        result.add_column(column, justify="left" if left else "right", no_wrap=True)
    for run in runs:
        result.add_row(*_row(run))
    return result


def _row(run: Run) -> list[str]:
    # The first step compiles, and the second may: its arguments come from the first.
    warm = run.step_ms[2:] or run.step_ms
    return [
        run.policy,
        f"{run.test_loss:.4f}",
        f"{run.accuracies[-1]:.1%}",
        f"{statistics.median(warm):.2f}",
        f"{run.activation_bytes:,}",
        str(sum(run.skipped)),
        f"{run.scales[-1]:,.10g}" if run.scaled else "-",
    ]


def slow_note(policies: Sequence[str]) -> str | None:
    """Says why half precision is not faster on this device, where it is not."""
    chosen = [Policy(name) for name in policies]
    device = jax.local_devices()[0]
    fast = {str(dtype) for dtype in (*fast_dtypes(device), "float32")}
    slow = list(dict.fromkeys(str(p.compute_dtype) for p in chosen))
    slow = [dtype for dtype in slow if dtype not in fast]
    if not slow:
        return None
    kind = (
        device.device_kind.upper() if device.platform == "cpu" else device.device_kind
    )
    return (
        f"This {kind} has no instructions for {' or '.join(slow)} matrix "
        "multiplication: expect no speedup here. What falls is the bytes of "
        "activations; a TPU or a GPU with tensor cores is faster as well."
    )


def save_figure(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Draws loss, accuracy and, where there is one, the loss scale, as a PNG."""
    scaled = [run for run in runs if run.scaled]
    figure = Figure(figsize=(13 if scaled else 9, 3.6), dpi=120, layout="constrained")
    loss, accuracy, *rest = figure.subplots(1, 3 if scaled else 2)
    for run, style in zip(runs, itertools.cycle(["-", "--", ":"])):
        losses = [v if math.isfinite(v) else math.nan for v in run.losses]
        loss.plot(losses, style)
        epochs = range(1, len(run.accuracies) + 1)
        accuracy.plot(epochs, run.accuracies, style, marker=".", label=run.policy)
    loss.set(title="training loss", xlabel="step", yscale="log")
    accuracy.set(title="test accuracy", xlabel="epoch")
    accuracy.xaxis.set_major_locator(MaxNLocator(integer=True))
    accuracy.legend(loc="lower right")
    for axis in rest:
        _draw_scale(axis, runs)
    figure.savefig(path, format="png")


def _draw_scale(axis: Axes, runs: Sequence[Run]) -> None:
    """Draws the loss scales in their runs' colors, and marks the skipped steps."""
    for index, run in enumerate(runs):
        if run.scaled:
            steps, color = range(len(run.scales)), f"C{index}"
            axis.step(steps, run.scales, color=color, where="post")
            skipped = [step for step in steps if run.skipped[step]]
            marks = [run.scales[step] for step in skipped]
            axis.plot(skipped, marks, "x", color="black", label="skipped step")
            if skipped:
                axis.legend(loc="best")
    axis.set_yscale("log", base=2)
    axis.set(title="loss scale", xlabel="step")
