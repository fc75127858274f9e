"""All passes, in order, and what runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jmp_rewrite._passes.attention_feature_sums import attention_feature_sums
from jmp_rewrite._passes.bias_in_convolution import bias_in_convolution
from jmp_rewrite._passes.by_device import resolve
from jmp_rewrite._passes.cpu_convolutions import cpu_convolutions
from jmp_rewrite._passes.cpu_products import cpu_products
from jmp_rewrite._passes.cpu_shield import cpu_shield
from jmp_rewrite._passes.cudnn_convolutions import cudnn_convolutions
from jmp_rewrite._passes.edit import Editor
from jmp_rewrite._passes.epilogue_in_product import epilogue_in_product
from jmp_rewrite._passes.gather_first import gather_first
from jmp_rewrite._passes.keep_rounding import keep_rounding
from jmp_rewrite._passes.live_ranges import live_ranges
from jmp_rewrite._passes.narrow_products import narrow_products
from jmp_rewrite._passes.program import ROUNDING, Pass, Program
from jmp_rewrite._passes.read_before_rounding import read_before_rounding
from jmp_rewrite._passes.recompute_activations import recompute_activations
from jmp_rewrite._passes.recompute_logistic import recompute_logistic
from jmp_rewrite._passes.recompute_stacks import recompute_stacks
from jmp_rewrite._passes.round_last_gradients import round_last_gradients
from jmp_rewrite._passes.scatter_as_select import scatter_as_select
from jmp_rewrite._passes.scatter_as_sum import scatter_as_sum
from jmp_rewrite._passes.sharded_casts import sharded_casts
from jmp_rewrite._passes.softmax_derivative import softmax_derivative
from jmp_rewrite._passes.softmax_from_quotient import softmax_from_quotient
from jmp_rewrite._passes.softmax_in_one_kernel import softmax_in_one_kernel
from jmp_rewrite._passes.softmax_rounded import softmax_rounded
from jmp_rewrite._passes.softplus_derivative import softplus_derivative
from jmp_rewrite._passes.split_before_reshape import split_before_reshape
from jmp_rewrite._passes.sum_of_scattered import sum_of_scattered
from jmp_rewrite._passes.sums_behind_loops import sums_behind_loops
from jmp_rewrite._passes.transpose_operands import transpose_operands
from jmp_rewrite._rules import COSTLY

PASSES: tuple[Pass, ...] = (
    Pass(
        sums_behind_loops,
        ("all",),
        "order of sums",
        frozenset({"scan"}),
    ),
    Pass(
        recompute_stacks,
        ("all",),
        "rounding",
        frozenset({"scan"}),
    ),
    Pass(
        softplus_derivative,
        ("all",),
        "rounding",
        frozenset({"log1p"}),
    ),
    Pass(
        split_before_reshape,
        ("all",),
        "order of sums",
        frozenset({"reshape"}),
        whole_steps_only=False,
    ),
    Pass(
        transpose_operands,
        ("all",),
        "order of sums",
        frozenset({"transpose"}),
        whole_steps_only=False,
    ),
    Pass(
        sharded_casts,
        ("all",),
        "nothing",
        frozenset({"sharding_constraint"}),
        whole_steps_only=False,
    ),
    Pass(
        sum_of_scattered,
        ("TPU",),
        "order of sums",
        frozenset({"scatter", "scatter-add"}),
    ),
    Pass(
        gather_first,
        ("TPU",),
        "order of sums",
        frozenset({"gather"}),
    ),
    Pass(
        scatter_as_select,
        ("all",),
        "nothing",
        frozenset({"scatter", "scatter-add"}),
    ),
    Pass(
        scatter_as_sum,
        ("all",),
        "order of sums",
        frozenset({"scatter-add"}),
    ),
    Pass(
        attention_feature_sums,
        ("TPU",),
        "rounding",
        frozenset({"reduce_sum"}),
    ),
    Pass(
        softmax_in_one_kernel,
        ("TPU v5e", "TPU v6e"),
        "nothing",
        frozenset({"reduce_max"}),
        whole_steps_only=False,
    ),
    Pass(
        softmax_rounded,
        ("TPU v5e", "TPU v6e"),
        "rounding",
        frozenset({"exp"}),
        whole_steps_only=False,
    ),
    Pass(
        recompute_logistic,
        ("NVIDIA",),
        "rounding",
        frozenset({"logistic"}),
    ),
    Pass(
        read_before_rounding,
        ("CPU",),
        "rounding",
        frozenset({ROUNDING}),
        whole_steps_only=False,
    ),
    Pass(
        softmax_derivative,
        ("all",),
        "rounding",
        frozenset({"exp"}),
        whole_steps_only=False,
    ),
    Pass(
        softmax_from_quotient,
        ("NVIDIA",),
        "rounding",
        frozenset({"exp"}),
    ),
    Pass(
        recompute_activations,
        ("NVIDIA", "TPU v5e"),
        "rounding",
        frozenset({"erf", "erfc", "tanh"}),
    ),
    Pass(
        narrow_products,
        ("TPU",),
        "rounding",
        frozenset({"dot_general"}),
    ),
    Pass(
        live_ranges,
        ("NVIDIA",),
        "nothing",
        frozenset({"scatter-add", "slice", "split"}),
    ),
    Pass(
        cpu_products,
        ("CPU",),
        "order of sums",
        frozenset({"dot_general"}),
        whole_steps_only=False,
    ),
    Pass(
        cpu_convolutions,
        ("CPU",),
        "rounding",
        frozenset({"conv_general_dilated"}),
        whole_steps_only=False,
    ),
    Pass(
        cpu_shield,
        ("all",),
        "order of sums",
        frozenset({"dot_general"}),
        whole_steps_only=False,
        required=True,
    ),
    Pass(
        bias_in_convolution,
        ("NVIDIA",),
        "rounding",
        frozenset({"conv_general_dilated"}),
        whole_steps_only=False,
    ),
    Pass(
        epilogue_in_product,
        ("NVIDIA",),
        "rounding",
        frozenset({"dot_general"}),
    ),
    Pass(
        cudnn_convolutions,
        ("NVIDIA",),
        "rounding",
        frozenset({"conv_general_dilated"}),
        whole_steps_only=False,
    ),
    Pass(
        round_last_gradients,
        ("NVIDIA",),
        "rounding",
        frozenset({"dot_general"}),
    ),
    Pass(
        keep_rounding,
        ("NVIDIA",),
        "nothing",
        frozenset({ROUNDING}) | COSTLY,
        whole_steps_only=False,
    ),
)


REASONS: Mapping[str, str] = MappingProxyType({p.name: p.reason for p in PASSES})


class Optimized(NamedTuple):
    """A program after its passes.

    Attributes:
      closed: a closed jaxpr.
      done: name of a pass -> how often it has edited; those that have.
    """

    closed: Any
    done: Mapping[str, int] = MappingProxyType({})


def optimize(
    program: Program, passes: Sequence[Pass] = PASSES, device: str | None = None
) -> Optimized:
    """Runs passes over a program.

    Args:
      program: a program with explicit casts.
      passes: those that run, in order; the required ones among all run in any case.
      device: the device whose program is made, without a choice; None for a program
        that chooses where it is lowered.
    """
    editor = Editor(program)
    for own in PASSES:
        wanted = own in passes or own.required
        fits = program.whole_step or not own.whole_steps_only
        if wanted and fits and editor.has(own.looks_for):
            editor.run(own.name, own.run)
    closed, done = editor.finish(plain=True), dict(editor.done)
    if device is not None:
        closed = resolve(closed, device, required=False)
        done = {p.name: done[p.name] for p in PASSES if p.name in done and p.on(device)}
    return Optimized(closed, MappingProxyType(done))
