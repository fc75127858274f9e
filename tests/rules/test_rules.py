"""The rule table against the running JAX and against TensorFlow's lists."""

import ast
import inspect
import json
import subprocess
import sys
from collections import Counter

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import Primitive, primitives

from jmp_rewrite._rules import table as _rules
from jmp_rewrite._rules.table import (
    ACCUMULATES,
    FLOAT16,
    REASONS,
    RULES,
    Category,
    default_rules,
    reason,
)

ALLOW, INFER, DENY, CLEAR = Category

# Prints the name of every primitive that JAX defines, after importing all of JAX.
LIST_PRIMITIVES = """
import gc, importlib, json, pkgutil, warnings
warnings.simplefilter("ignore")
from jax.extend.core import Primitive
for name in ("jax._src", "jax.experimental", "jax.extend", "jax.scipy"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + ".", lambda _: None):
        if "cloud_tpu_init" in module.name or module.name.endswith("_test"):
            continue
        try:
            importlib.import_module(module.name)
        except Exception:  # what needs a package that is not installed
            pass
print(json.dumps([p.name for p in gc.get_objects() if isinstance(p, Primitive)]))
"""

# Names in the table that some supported JAX does not define: what was removed or
# renamed by 0.12, then what came after 0.10.2.
UNTIL_0_11 = """
    box_get box_set call closed_call core_map debug_barrier_p elementwise_inline_asm_p
    fusible inline_mgpu_p jaxpr_call log_extend log_read new_box new_log pbroadcast_done
    pbroadcast_start psum_start reduced_vary_cast_p set_max_registers_p shard_alike
    unique unreduced_psum_start unreduced_reduce_scatter_start vary_unreduced_cast_p
    wgmma_accumulator_deref_p wgmma_accumulator_store_p
""".split()
SINCE_0_11 = """
    barrier_arrive_and_wait conv debug_barrier elementwise_inline_asm has_memory_space
    inline_mgpu log2 matmul_lhs_fifo matmul_pop_fifo mma mosaic_gpu_reduce_max
    mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum one_minus_square
    pbroadcast_dynamic polynomial program_order reduced_vary_cast relayout scan_count
    set_max_registers store thunky.all_gather thunky.all_reduce thunky.all_to_all
    thunky.async_done thunky.async_start thunky.call_jax thunky.call_thunky_nested
    thunky.collective_group thunky.collective_permute thunky.cond thunky.copy
    thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
    thunky.ptx_kernel thunky.reduce_scatter thunky.while unreduced_pmax unreduced_pmin
    vary_unreduced_cast wait_gmem_to_smem wgmma_accumulator_deref
    wgmma_accumulator_store
""".split()
# What stands in modules that need a package which is no part of JAX: TensorFlow.
NEEDS_MORE = ["call_tf"]

# TensorFlow's lists where a TensorFlow op is one JAX primitive: category, primitive,
# TensorFlow's op. auto_mixed_precision_lists.h, TensorFlow 2.21; "*" is both lists.
TENSORFLOW = [
    ("*", ALLOW, "dot_general", "MatMul, BatchMatMul[V2], Einsum"),
    ("*", ALLOW, "conv_general_dilated", "Conv2D, Conv3D, their Backprop*, Depthwise*"),
    ("*", INFER, "add", "Add, AddV2, BiasAdd"),
    ("*", INFER, "add_any", "AddN"),
    ("*", INFER, "div", "RealDiv, Inv, Reciprocal"),
    ("*", INFER, "erf", "Erf"),
    ("*", INFER, "erfc", "Erfc"),
    ("*", INFER, "log", "Log"),
    ("*", INFER, "log1p", "Log1p"),
    ("*", INFER, "logistic", "Sigmoid"),
    ("*", INFER, "mul", "Mul"),
    ("*", INFER, "reduce_prod", "Prod"),
    ("*", INFER, "reduce_window_sum", "AvgPool, AvgPool3D"),
    ("*", INFER, "sqrt", "Sqrt"),
    ("*", INFER, "sub", "Sub"),
    ("*", INFER, "tanh", "Tanh"),
    ("bfloat16", INFER, "reduce_sum", "Sum, Mean"),
    ("bfloat16", INFER, "rsqrt", "Rsqrt"),
    ("bfloat16", INFER, "square", "Square, SquaredDifference"),
    ("*", DENY, "exp", "Exp"),
    ("*", DENY, "expm1", "Expm1"),
    ("*", DENY, "pow", "Pow"),
    ("float16", DENY, "reduce_sum", "Sum, Mean, L2Loss"),
    ("*", CLEAR, "abs", "Abs"),
    ("*", CLEAR, "argmax", "ArgMax"),
    ("*", CLEAR, "argmin", "ArgMin"),
    ("*", CLEAR, "broadcast_in_dim", "BroadcastTo, ExpandDims, Fill"),
    ("*", CLEAR, "ceil", "Ceil"),
    ("*", CLEAR, "clamp", "ClipByValue"),
    ("*", CLEAR, "concatenate", "Concat, ConcatV2, Pack"),
    ("*", CLEAR, "cond", "Switch, Merge"),
    ("*", CLEAR, "copy", "Snapshot, Identity"),
    ("*", CLEAR, "cummax", "Max"),
    ("*", CLEAR, "dynamic_slice", "Slice, TensorListGetItem"),
    ("*", CLEAR, "dynamic_update_slice", "TensorListSetItem"),
    ("*", CLEAR, "eq", "Equal"),
    ("*", CLEAR, "floor", "Floor"),
    ("*", CLEAR, "gather", "Gather, GatherNd, GatherV2"),
    ("*", CLEAR, "ge", "GreaterEqual"),
    ("*", CLEAR, "gt", "Greater"),
    ("*", CLEAR, "is_finite", "IsFinite"),
    ("*", CLEAR, "jit", "Identity, IdentityN"),
    ("*", CLEAR, "le", "LessEqual"),
    ("*", CLEAR, "lt", "Less"),
    ("*", CLEAR, "max", "Maximum, Relu"),
    ("*", CLEAR, "min", "Minimum"),
    ("*", CLEAR, "ne", "NotEqual"),
    ("*", CLEAR, "neg", "Neg"),
    ("*", CLEAR, "optimization_barrier", "IdentityN"),
    ("*", CLEAR, "pad", "Pad, PadV2"),
    ("*", CLEAR, "reduce_max", "Max"),
    ("*", CLEAR, "reduce_min", "Min"),
    ("*", CLEAR, "reduce_window_max", "MaxPool, MaxPoolV2, MaxPool3D"),
    ("*", CLEAR, "reshape", "Reshape"),
    ("*", CLEAR, "rev", "Reverse, ReverseV2"),
    ("*", CLEAR, "round", "Round"),
    ("*", CLEAR, "scan", "Enter, Merge, Switch, NextIteration, Exit"),
    ("*", CLEAR, "scatter", "DynamicStitch, TensorListScatter"),
    ("*", CLEAR, "select_and_gather_add", "MaxPoolGradGrad"),
    ("*", CLEAR, "select_and_scatter_add", "MaxPoolGrad, MaxPool3DGrad"),
    ("*", CLEAR, "select_n", "Select, SelectV2"),
    ("*", CLEAR, "sign", "Sign"),
    ("*", CLEAR, "slice", "Slice, StridedSlice"),
    ("*", CLEAR, "split", "Split, SplitV"),
    ("*", CLEAR, "squeeze", "Squeeze"),
    ("*", CLEAR, "stop_gradient", "StopGradient, PreventGradient"),
    ("*", CLEAR, "tile", "Tile"),
    ("*", CLEAR, "top_k", "TopK, TopKV2"),
    ("*", CLEAR, "transpose", "Transpose"),
    ("*", CLEAR, "unstack", "Unpack"),
    ("*", CLEAR, "while", "While, StatelessWhile"),
    ("*", CLEAR, "zeros_like", "ZerosLike"),
]
# Where the table departs on purpose, and why.
DEPARTS = {
    ("float16", "reduce_prod"): "a product leaves float16's range as a power does",
    ("float16", "reduce_window_sum"): "a jaxpr's window is any sum, not only a mean",
    ("bfloat16", "reduce_window_sum"): "sums are denied until accuracy is measured",
    ("bfloat16", "reduce_sum"): "sums are denied until accuracy is measured",
}


@pytest.fixture(scope="module")
def running():
    command = [sys.executable, "-c", LIST_PRIMITIVES]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr
    return set(json.loads(printed.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_every_primitive_of_the_running_jax_has_a_line(running):
    public = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    assert len(running) > 400 and len(public) > 150  # the walk found them
    assert (running | public) - set(RULES) == set()


@pytest.mark.slow
def test_every_name_exists_in_a_supported_jax(running):
    assert set(RULES) - running <= {*UNTIL_0_11, *SINCE_0_11, *NEEDS_MORE}
    assert {*UNTIL_0_11, *SINCE_0_11, *NEEDS_MORE} <= set(RULES)


def table_literals():
    """Yields the keys of every dict literal of the module, in its order."""
    for node in ast.walk(ast.parse(inspect.getsource(_rules))):
        if isinstance(node, ast.Dict):
            yield [key.value for key in node.keys if isinstance(key, ast.Constant)]


def test_no_primitive_has_two_lines():
    blocks = [keys for keys in table_literals() if set(keys) <= set(RULES)]
    override = [list(FLOAT16), list(REASONS)]
    names = Counter(name for keys in blocks if keys not in override for name in keys)
    assert [name for name, count in names.items() if count > 1] == []
    assert set(names) == set(RULES)
    for keys in table_literals():
        assert len(set(keys)) == len(keys)


def test_blocks_are_alphabetical():
    for keys in table_literals():
        if keys and set(keys) <= set(RULES) and keys != list(REASONS):
            assert keys == sorted(keys)


def test_small_tables_name_primitives_of_the_large_one():
    for names in (FLOAT16, REASONS, ACCUMULATES):
        assert set(names) <= set(RULES)


def test_float16_denies_more_than_bfloat16():
    assert FLOAT16
    for name, category in FLOAT16.items():
        assert (category, RULES[name]) == (DENY, INFER), name
        assert name in REASONS, f"{name} is denied in float16, and nothing says why"


def test_numbers_in_the_reasons_are_float16s():
    top = float(np.finfo(np.float16).max)
    assert np.log(top) == pytest.approx(11.09, abs=5e-3)
    assert np.log2(top) == pytest.approx(15.999, abs=1e-3)
    assert np.sqrt(top) == pytest.approx(255.9, abs=5e-2)
    assert np.cbrt(top) == pytest.approx(40.3, abs=5e-2)
    tiny = float(np.finfo(np.float16).smallest_subnormal)
    assert tiny == pytest.approx(6.0e-8, rel=1e-2)
    assert np.sqrt(tiny) == pytest.approx(2.4e-4, rel=2e-2)
    assert np.cbrt(tiny) == pytest.approx(3.9e-3, rel=1e-2)


@pytest.mark.parametrize("name", ["mul", "exp", "square", "reshape", "dot_general"])
def test_float32_has_the_table_of_bfloat16(name):
    assert default_rules("float32")[name] is default_rules("bfloat16")[name]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_agrees_with_tensorflow(dtype):
    rules = default_rules(dtype)
    listed = [entry for entry in TENSORFLOW if entry[0] in ("*", dtype)]
    differs = {(dtype, n) for _, category, n, _ in listed if rules[n] != category}
    assert differs == {key for key in DEPARTS if key[0] == dtype}


def test_primitives_off_tensorflow_s_float16_list_are_full_there():
    for name in ("rsqrt", "square"):
        assert default_rules("float16")[name] is DENY


@pytest.mark.parametrize(
    "name", ["reduce_sum", "cumsum", "psum", "scatter-add", "reduce_scatter"]
)
def test_sums_are_denied_and_accumulate_in_float32(name):
    assert name in ACCUMULATES
    assert default_rules("float16")[name] is default_rules("bfloat16")[name] is DENY


def test_only_products_are_allowed():
    allowed = {name for name, category in RULES.items() if category is ALLOW}
    assert allowed == {"dot_general", "conv_general_dilated", "ragged_dot_general"}


@pytest.mark.parametrize(
    "spelling",
    ["float16", "mixed_float16", "fp16", np.float16, jnp.float16, np.dtype("float16")],
)
def test_default_rules_reads_every_spelling_of_float16(spelling):
    assert default_rules(spelling) == {**RULES, **FLOAT16}


@pytest.mark.parametrize(
    "spelling",
    ["bfloat16", "mixed_bfloat16", "bf16", ml_dtypes.bfloat16, jnp.bfloat16, "float32"],
)
def test_default_rules_of_bfloat16_and_float32_is_the_table(spelling):
    assert default_rules(spelling) == dict(RULES)


def test_default_rules_is_fresh():
    default_rules("float16")["exp"] = ALLOW
    assert default_rules("float16")["exp"] is DENY


@pytest.mark.parametrize("wrong", ["float64", "half", "auto", np.float64, np.int8, int])
def test_unknown_compute_dtype(wrong):
    with pytest.raises(ValueError, match="one of 'bfloat16', 'float16', 'float32'"):
        default_rules(wrong)


@pytest.mark.parametrize("wrong", [None, 3, object()])
def test_no_compute_dtype(wrong):
    with pytest.raises(TypeError, match="expected a compute dtype.* got"):
        default_rules(wrong)


def test_tables_are_read_only():
    for table in (RULES, FLOAT16, REASONS):
        with pytest.raises(TypeError, match="does not support item assignment"):
            table["exp"] = ALLOW


@pytest.mark.parametrize(
    ("name", "category", "expected"),
    [
        ("exp", DENY, "overflows float16 above 11.09"),
        ("dot_general", ALLOW, "matrix product"),
        ("pallas_call", DENY, "opaque"),
        ("square", INFER, "safe unless"),
        ("square", DENY, "leaves float16's range"),
        ("exp", INFER, "safe unless"),
        ("mul", DENY, "never half"),
        ("no_such_primitive", CLEAR, "no numerical effect"),
    ],
)
def test_reason(name, category, expected):
    assert expected in reason(name, category)


@pytest.mark.slow
def test_rules_import_no_jax(run_python):
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('rules', {_rules.__file__!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "assert 'numpy' in sys.modules and 'jax' not in sys.modules"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
