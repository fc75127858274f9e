"""Which primitive runs in which precision: one table, pure data, no JAX.

The four words and most of the entries are TensorFlow's
(`tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h`, TensorFlow 2.21).
TensorFlow judges fused ops and a jaxpr shows their parts, so a softmax is here an
`exp`, a `reduce_sum` and a `div`; the tests list where the two tables differ and why.

To add a primitive, add one line to one block of `_BLOCKS`. The block's title is the
reason that a report prints for it; `opaque` begins the titles of what is left alone
as a whole.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np


class Category(enum.Enum):
    """What half precision does to a primitive.

    Source: `tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h`.

    - `ALLOW`: always runs on half operands. These are matrix multiplications and
      convolutions, where half precision is safe and where most of the time is spent.
    - `INFER`: safe in half precision, unless its input comes from a `DENY` operation.
    - `DENY`: always float32: the result could overflow or lose too much precision, or
      half operands would mean something else. `INFER` and `CLEAR` operations after it
      stay float32 too, up to the next `ALLOW`.
    - `CLEAR`: no numerical effect; follows its neighbors' precision.

    Example:
        >>> default_rules("bfloat16")["dot_general"]
        <Category.ALLOW: 'allow'>
        >>> Category("deny") is Category.DENY
        True
    """

    ALLOW = "allow"
    INFER = "infer"
    DENY = "deny"
    CLEAR = "clear"

    __hash__ = object.__hash__  # in C; that of `enum` hashes the name, in Python


ALLOW, INFER, DENY, CLEAR = Category

_BLOCKS: Mapping[str, Mapping[str, Category]] = MappingProxyType(
    {
        "a matrix product: runs on half operands": {
            "conv_general_dilated": ALLOW,
            "dot_general": ALLOW,
            "ragged_dot_general": ALLOW,
        },
        # Denied: the range is left soon, or a rounded operand shows in
        # the result. TensorFlow leaves what it does not list (sin, lgamma) in float32.
        "loses too much in half precision": {
            "acos": DENY,  # steep at 1
            "acosh": DENY,  # steep at 1
            "asin": DENY,  # steep at 1
            "atanh": DENY,  # infinite at 1
            "bessel_i0e": DENY,
            "bessel_i1e": DENY,
            "cos": DENY,  # bfloat16 is spaced by 2 > pi/2 from 256 on
            "cosh": DENY,  # grows as exp
            "digamma": DENY,
            "erf_inv": DENY,  # infinite at 1
            "exp": DENY,  # x*eps relative error; float16: x <= 11.09 = ln 65504
            "exp2": DENY,  # float16: x <= 15.99 = log2 65504
            "expm1": DENY,  # TensorFlow: Expm1
            "igamma": DENY,
            "igamma_grad_a": DENY,
            "igammac": DENY,
            "lgamma": DENY,  # grows as x log x; XLA computes it in float32 anyway
            "polygamma": DENY,
            "pow": DENY,  # TensorFlow: Pow
            "regularized_incomplete_beta": DENY,
            "sin": DENY,  # bfloat16 is spaced by 2 > pi/2 from 256 on
            "sinh": DENY,  # grows as exp
            "tan": DENY,  # poles
            "zeta": DENY,
        },
        # TensorFlow's float16 list denies Sum and Mean, its bfloat16 list infers them.
        "a sum: its terms are kept and accumulated in float32": {
            "cumlogsumexp": DENY,
            "cumprod": DENY,  # and out of float16's range after 16 factors of 2
            "cumsum": DENY,
            "psum": DENY,  # TensorFlow has no collective in its lists
            "psum_invariant": DENY,
            "reduce_scatter": DENY,
            "reduce_sum": DENY,  # TensorFlow: Sum, Mean, L2Loss
            "reduce_window_sum": DENY,  # TensorFlow: AvgPool, infer
            "scatter-add": DENY,  # XLA:CPU: 8192 ones add up to 256 in bfloat16
            "scatter-mul": DENY,
            "scatter-sub": DENY,
            "unreduced_psum": DENY,
            "unreduced_reduce_scatter": DENY,
        },
        "safe unless downstream of a denied value": {
            "add": INFER,
            "add_any": INFER,  # sums cotangents, two at a time
            "asinh": INFER,
            "atan": INFER,
            "atan2": INFER,
            "cbrt": INFER,
            "div": INFER,
            "erf": INFER,
            "erfc": INFER,
            "integer_pow": INFER,  # float16: denied, see FLOAT16
            "log": INFER,
            "log1p": INFER,
            "log2": INFER,
            "logistic": INFER,
            "mul": INFER,
            "one_minus_square": INFER,  # 1 - x*x, for the derivative of tanh
            "polynomial": INFER,  # float16: denied, see FLOAT16
            "reduce_prod": INFER,  # float16: denied, see FLOAT16
            "rem": INFER,
            "rsqrt": INFER,  # float16: denied, see FLOAT16
            "sqrt": INFER,
            "square": INFER,  # float16: denied, see FLOAT16
            "sub": INFER,
            "tanh": INFER,
        },
        # Exact on half values: they are moved, chosen, compared or rounded further.
        "has no numerical effect: moves, selects or compares": {
            "abs": CLEAR,
            "approx_top_k": CLEAR,
            "argmax": CLEAR,
            "argmin": CLEAR,
            "broadcast_in_dim": CLEAR,
            "ceil": CLEAR,
            "clamp": CLEAR,
            "concatenate": CLEAR,
            "convert_element_type": CLEAR,  # its two dtypes decide
            "copy": CLEAR,
            "cummax": CLEAR,
            "cummin": CLEAR,
            "dce_sink": CLEAR,
            "device_put": CLEAR,  # cast after: a cast of a host operand stays there
            "dynamic_slice": CLEAR,
            "dynamic_update_slice": CLEAR,
            "empty": CLEAR,  # a source: full, since no product is upstream of it
            "empty2": CLEAR,  # as empty
            "eq": CLEAR,
            "eq_to": CLEAR,  # the _to ones order totally: NaN after infinity
            "floor": CLEAR,
            "gather": CLEAR,
            "ge": CLEAR,
            "gt": CLEAR,
            "is_finite": CLEAR,
            "le": CLEAR,
            "le_to": CLEAR,
            "lt": CLEAR,
            "lt_to": CLEAR,
            "max": CLEAR,
            "min": CLEAR,
            "name": CLEAR,  # checkpoint_name: what it saves may be half
            "ne": CLEAR,
            "neg": CLEAR,
            "optimization_barrier": CLEAR,
            "pad": CLEAR,
            "reduce_max": CLEAR,
            "reduce_min": CLEAR,
            "reduce_window_max": CLEAR,
            "reduce_window_min": CLEAR,
            "reshape": CLEAR,
            "rev": CLEAR,
            "round": CLEAR,
            "scatter": CLEAR,  # opaque where it has an update_jaxpr: at[].apply
            "scatter-max": CLEAR,
            "scatter-min": CLEAR,
            "select_and_gather_add": CLEAR,  # TensorFlow: MaxPoolGradGrad
            "select_and_scatter_add": CLEAR,  # TensorFlow: MaxPoolGrad
            "select_n": CLEAR,
            "sign": CLEAR,
            "slice": CLEAR,
            "sort": CLEAR,  # half keys make ties
            "split": CLEAR,
            "squeeze": CLEAR,
            "stack": CLEAR,
            "stop_gradient": CLEAR,
            "tie": CLEAR,
            "tile": CLEAR,
            "top_k": CLEAR,  # TensorFlow: TopK
            "transpose": CLEAR,
            "unstack": CLEAR,
            "zeros_like": CLEAR,  # of a symbolic zero
        },
        "moves data between devices": {
            "all_gather": CLEAR,
            "all_gather_invariant": CLEAR,
            "all_gather_reduced": CLEAR,
            "all_to_all": CLEAR,
            "layout_constraint": CLEAR,
            "pbroadcast": CLEAR,
            "pbroadcast_dynamic": CLEAR,
            "pmax": CLEAR,
            "pmin": CLEAR,
            "ppermute": CLEAR,
            "preduced": CLEAR,
            "pvary": CLEAR,  # it and the casts say what varies over a mesh axis
            "ragged_all_to_all": CLEAR,
            "reduced_vary_cast": CLEAR,
            "reduced_vary_cast_p": CLEAR,  # the name before 0.12
            "relayout": CLEAR,
            "reshard": CLEAR,
            "shard_alike": CLEAR,  # 0.10
            "sharding_constraint": CLEAR,
            "unreduced_pmax": CLEAR,
            "unreduced_pmin": CLEAR,
            "vary_unreduced_cast": CLEAR,
            "vary_unreduced_cast_p": CLEAR,  # the name before 0.12
            "xla_metadata_value": CLEAR,
        },
        "works on integers or booleans, never on floats": {
            "and": CLEAR,
            "axis_index": CLEAR,
            "clz": CLEAR,
            "dim_as_value": CLEAR,
            "dimension_size": CLEAR,
            "lu_pivots_to_permutation": CLEAR,
            "mulhi": CLEAR,
            "not": CLEAR,
            "or": CLEAR,
            "platform_index": CLEAR,
            "population_count": CLEAR,
            "reduce_and": CLEAR,
            "reduce_or": CLEAR,
            "reduce_xor": CLEAR,
            "shift_left": CLEAR,
            "shift_right_arithmetic": CLEAR,
            "shift_right_logical": CLEAR,
            "xor": CLEAR,
        },
        # TensorFlow: While, Switch, Merge, Enter, Exit and Identity are clear.
        "holds programs that are rewritten inside": {
            "call": CLEAR,  # 0.10; 0.11 and later: eval_jaxpr
            "closed_call": CLEAR,  # 0.10; 0.11 and later: eval_jaxpr
            "compute_on": CLEAR,
            "cond": CLEAR,
            "custom_jvp_call": CLEAR,
            "custom_vjp_call": CLEAR,
            "custom_vmap_call": CLEAR,
            "eval_jaxpr": CLEAR,
            "jit": CLEAR,
            "program_order": CLEAR,
            "remat2": CLEAR,  # jax.checkpoint
            "scan": CLEAR,
            "shard_map": CLEAR,
            "while": CLEAR,  # TensorFlow: While, StatelessWhile
            "xla_metadata_call": CLEAR,
        },
        "depends on the dtype: in half it would mean something else": {
            "bitcast_convert_type": DENY,  # the width is its meaning
            "complex": DENY,  # there is no half complex dtype
            "conj": DENY,  # of a real operand: makes it complex
            "from_edtype": DENY,
            "imag": DENY,
            "iota": DENY,  # exact only to 256 in bfloat16 and 2048 in float16
            "nextafter": DENY,  # a step is an eps
            "real": DENY,
            "reduce_precision": DENY,  # 8, 23 bits: no-op, jax#22244
            "to_edtype": DENY,
        },
        "draws random bits: half would change the stream": {
            "iota_2x32_shape": DENY,
            "philox2x32": DENY,
            "philox4x32": DENY,
            "random_bits": DENY,
            "random_clone": DENY,
            "random_fold_in": DENY,
            "random_gamma": DENY,
            "random_seed": DENY,
            "random_split": DENY,
            "random_unwrap": DENY,
            "random_wrap": DENY,
            "rng_bit_generator": DENY,
            "rng_uniform": DENY,
            "threefry2x32": DENY,
            "threefry4x32": DENY,
        },
        # XLA and LAPACK refuse 16 bits for most of these, by an error or at lowering.
        "linear algebra or Fourier transform: needs float32": {
            "cholesky": DENY,
            "cholesky_update": DENY,
            "custom_linear_solve": DENY,  # holds jaxprs with an LU or Cholesky inside
            "eig": DENY,
            "eigh": DENY,
            "fft": DENY,
            "geqp3": DENY,
            "geqrf": DENY,
            "hessenberg": DENY,
            "householder_product": DENY,
            "lu": DENY,
            "ormqr": DENY,
            "qr": DENY,
            "schur": DENY,
            "spsolve": DENY,
            "svd": DENY,
            "symmetric_product": DENY,
            "triangular_solve": DENY,
            "tridiagonal": DENY,
            "tridiagonal_solve": DENY,
        },
        "opaque: holds a function that is typed for its original dtypes": {
            "call_exported": DENY,
            "call_hi_primitive": DENY,  # accepts a wrong dtype silently
            "call_hi_primitive_linearized": DENY,
            "call_tf": DENY,  # jax2tf: a TensorFlow function is traced for its dtypes
            "composite": DENY,  # a named decomposition that a backend may replace
            "core_map": DENY,
            "custom_fusion": DENY,
            "custom_jvp_call_jaxpr": DENY,
            "custom_lin": DENY,
            "custom_partitioning": DENY,
            "fused_call": DENY,
            "fusible": DENY,
            "jaxpr_call": DENY,
            "linear_call": DENY,  # its transpose is a Python function
            "mpmd_map": DENY,
            "reduce": DENY,  # generic: its jaxpr takes scalars of the old dtype
            "reduce_window": DENY,  # generic, as reduce
            "remat_opt": DENY,
            "run_scoped": DENY,
            "select_and_scatter": DENY,  # generic, as reduce
        },
        "opaque: talks to the host, checks, or has an effect": {
            "add_dependency": DENY,
            "after_all": DENY,
            "assert_consumed_value": DENY,
            "buffer_callback": DENY,
            "check": DENY,
            "consume": DENY,
            "create_token": DENY,
            "debug_callback": DENY,
            "debug_print": DENY,
            "global_array_to_host_local_array": DENY,
            "host_local_array_to_global_array": DENY,
            "inspect_sharding": DENY,
            "io_callback": DENY,
            "pure_callback": DENY,  # the host function expects its dtypes
            "shape_assertion": DENY,
            "stage": DENY,
            "unreachable": DENY,
        },
        "opaque: part of a transfer in flight, whose dtype is fixed": {
            "all_gather_done": DENY,
            "all_gather_reduced_start": DENY,
            "all_gather_start": DENY,
            "all_to_all_done": DENY,
            "all_to_all_start": DENY,
            "pbroadcast_done": DENY,
            "pbroadcast_start": DENY,
            "ppermute_done": DENY,
            "ppermute_start": DENY,
            "precv": DENY,
            "psend": DENY,
            "psum_done": DENY,
            "psum_invariant_start": DENY,
            "psum_start": DENY,
            "reduce_scatter_done": DENY,
            "reduce_scatter_start": DENY,
            "unreduced_psum_start": DENY,
            "unreduced_reduce_scatter_start": DENY,
        },
        "opaque: reads or writes a reference, whose dtype is fixed": {
            "accum_grad_in_ref": DENY,
            "addupdate": DENY,
            "box_get": DENY,
            "box_set": DENY,
            "broadcast_to": DENY,
            "create_linear": DENY,
            "empty_ref": DENY,
            "free_ref": DENY,
            "freeze": DENY,
            "get": DENY,
            "log_extend": DENY,
            "log_read": DENY,
            "new_box": DENY,
            "new_log": DENY,
            "new_ref": DENY,
            "pin": DENY,
            "run_state": DENY,
            "swap": DENY,
            "unpin": DENY,
            "with_memory_space_constraint": DENY,
        },
        # jax.experimental.sparse.
        "opaque: a sparse operation": {
            "bcoo_dot_general": DENY,
            "bcoo_dot_general_sampled": DENY,
            "bcoo_extract": DENY,
            "bcoo_fromdense": DENY,
            "bcoo_sort_indices": DENY,
            "bcoo_spdot_general": DENY,
            "bcoo_sum_duplicates": DENY,
            "bcoo_todense": DENY,
            "bcoo_transpose": DENY,
            "bcsr_dot_general": DENY,
            "bcsr_extract": DENY,
            "bcsr_fromdense": DENY,
            "bcsr_todense": DENY,
            "coo_fromdense": DENY,
            "coo_matmat": DENY,
            "coo_matvec": DENY,
            "coo_spmm": DENY,
            "coo_spmv": DENY,
            "coo_todense": DENY,
            "csr_fromdense": DENY,
            "csr_matmat": DENY,
            "csr_matvec": DENY,
            "csr_spmm": DENY,
            "csr_spmv": DENY,
            "csr_todense": DENY,
            "todense": DENY,
        },
        # Calls out of XLA: kernels and libraries with their own operand dtypes.
        "opaque: a kernel that is typed for its original dtypes": {
            "cudnn_fusion": DENY,
            "dot_product_attention_bwd": DENY,
            "dot_product_attention_bwd_wrapper": DENY,
            "dot_product_attention_fp8_bwd": DENY,
            "dot_product_attention_fp8_bwd_wrapper": DENY,
            "dot_product_attention_fp8_fwd": DENY,
            "dot_product_attention_fp8_fwd_wrapper": DENY,
            "dot_product_attention_fwd": DENY,  # cuDNN: its operands are half already
            "dot_product_attention_fwd_wrapper": DENY,
            "ffi_call": DENY,
            "mosaic_gpu_p": DENY,
            "pallas_call": DENY,  # written for the dtypes that it was given
            "rnn_bwd": DENY,
            "rnn_fwd": DENY,
            "scaled_dot": DENY,  # carries 8-bit operands and their scales
            "scaled_matmul": DENY,  # carries 8-bit operands and their scales
            "scaled_matmul_wrapper": DENY,
            "tpu_custom_call": DENY,
        },
        # These stand inside Pallas, Mosaic and Triton kernels and thunky programs.
        "opaque: an instruction inside a kernel": {
            "_copysign": DENY,
            "all_reduce_ffs": DENY,
            "all_reduce_population_count": DENY,
            "async_copy_scales_to_tmem": DENY,
            "async_copy_smem_to_tmem": DENY,
            "async_copy_sparse_metadata_to_tmem": DENY,
            "async_load": DENY,
            "async_prefetch": DENY,
            "async_store_smem": DENY,
            "async_store_tmem": DENY,
            "atomic_cas": DENY,
            "atomic_rmw": DENY,
            "barrier": DENY,
            "barrier_arrive": DENY,
            "barrier_arrive_and_wait": DENY,
            "barrier_test": DENY,
            "barrier_wait": DENY,
            "bitcast": DENY,
            "commit_group": DENY,
            "commit_smem": DENY,
            "commit_tmem": DENY,
            "conv": DENY,
            "copy_gmem_to_smem": DENY,
            "copy_smem_to_gmem": DENY,
            "debug_barrier": DENY,
            "debug_barrier_p": DENY,
            "delay": DENY,
            "dma_start": DENY,
            "dma_wait": DENY,
            "einshape_lo": DENY,
            "elementwise_inline_asm": DENY,
            "elementwise_inline_asm_p": DENY,
            "emit_pipeline": DENY,
            "get_barrier_semaphore": DENY,
            "get_global": DENY,
            "griddepcontrol_launch_dependents": DENY,
            "griddepcontrol_wait": DENY,
            "has_memory_space": DENY,
            "inline_mgpu": DENY,
            "inline_mgpu_p": DENY,
            "layout_cast": DENY,
            "load": DENY,
            "masked_cummax": DENY,
            "masked_cummin": DENY,
            "masked_cumsum": DENY,
            "masked_load": DENY,
            "masked_sort": DENY,
            "masked_swap": DENY,
            "matmul_acc_lhs": DENY,
            "matmul_lhs_fifo": DENY,
            "matmul_pop": DENY,
            "matmul_pop_fifo": DENY,
            "matmul_push_rhs": DENY,
            "max_contiguous": DENY,
            "mgpu_atomic_store": DENY,
            "mma": DENY,
            "mosaic_gpu_reduce_max": DENY,
            "mosaic_gpu_reduce_min": DENY,
            "mosaic_gpu_reduce_prod": DENY,
            "mosaic_gpu_reduce_sum": DENY,
            "multimem_load_reduce": DENY,
            "multimem_store": DENY,
            "multiple_of": DENY,
            "num_programs": DENY,
            "pack": DENY,
            "pack_dtype": DENY,
            "pack_elementwise": DENY,
            "parallel_loop": DENY,
            "pipeline_body": DENY,
            "print_layout": DENY,
            "prng_join": DENY,
            "prng_random_bits": DENY,
            "prng_seed": DENY,
            "prng_split": DENY,
            "program_id": DENY,
            "query_cluster_cancel": DENY,
            "reciprocal": DENY,
            "remove_memory_space": DENY,
            "roll": DENY,
            "sc_fetch_and_add": DENY,
            "scan_count": DENY,
            "semaphore_read": DENY,
            "semaphore_signal": DENY,
            "semaphore_signal_multicast": DENY,
            "semaphore_signal_parallel": DENY,
            "semaphore_wait": DENY,
            "set_max_registers": DENY,
            "set_max_registers_p": DENY,
            "stochastic_round": DENY,
            "store": DENY,
            "tcgen05_commit_arrive": DENY,
            "tcgen05_mma": DENY,
            "thunky.all_gather": DENY,
            "thunky.all_reduce": DENY,
            "thunky.all_to_all": DENY,
            "thunky.async_done": DENY,
            "thunky.async_start": DENY,
            "thunky.call_jax": DENY,
            "thunky.call_thunky_nested": DENY,
            "thunky.collective_group": DENY,
            "thunky.collective_permute": DENY,
            "thunky.cond": DENY,
            "thunky.copy": DENY,
            "thunky.custom_call": DENY,
            "thunky.inline_constant": DENY,
            "thunky.memset": DENY,
            "thunky.memzero": DENY,
            "thunky.ptx_kernel": DENY,
            "thunky.reduce_scatter": DENY,
            "thunky.while": DENY,
            "trace_value": DENY,
            "try_cluster_cancel": DENY,
            "unique": DENY,
            "unpack": DENY,
            "unpack_dtype": DENY,
            "unpack_elementwise": DENY,
            "wait_gmem_to_smem": DENY,
            "wait_load_tmem": DENY,
            "wait_smem_to_gmem": DENY,
            "wgmma": DENY,
            "wgmma_accumulator_deref": DENY,
            "wgmma_accumulator_deref_p": DENY,
            "wgmma_accumulator_store": DENY,
            "wgmma_accumulator_store_p": DENY,
            "wgmma_ref": DENY,
            "wgmma_wait": DENY,
        },
    }
)

RULES: Mapping[str, Category] = MappingProxyType(
    {name: category for block in _BLOCKS.values() for name, category in block.items()}
)
"""Primitive name, as a printed jaxpr shows it, to category; bfloat16 uses it as it is.

It covers every primitive of JAX 0.10.2 to 0.12. A name that several primitives share
(Pallas has its own `get`) means the one of `jax.lax`.
"""

FLOAT16: Mapping[str, Category] = MappingProxyType(
    {
        # float16 holds 6.0e-8 to 65504, bfloat16 has float32's range of 1e-38 to 3e38.
        "integer_pow": DENY,  # x**3 leaves the range outside 3.9e-3 .. 40.3
        "polynomial": DENY,  # powers of its variable, as integer_pow
        "reduce_prod": DENY,  # 16 factors of 2 are too many; TensorFlow infers Prod
        "rsqrt": DENY,  # an argument below 6.0e-8 becomes 0, and the result infinite
        "square": DENY,  # leaves the range outside 2.4e-4 .. 255.9
    }
)
"""What float16 does differently from `RULES`.

Source: `auto_mixed_precision_lists.h` leaves Rsqrt, Square and SquaredDifference out of
the float16 list of GPUs and infers them in the bfloat16 list.
"""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "exp": "exp overflows float16 above 11.09 and turns rounding into a factor",
        "exp2": "exp2 overflows float16 above 15.99 and turns rounding into a factor",
        "expm1": "expm1 overflows float16 above 11.09 and turns rounding into a factor",
        "pow": "pow leaves float16's range quickly and multiplies relative errors",
        "cos": "cos loses its phase: bfloat16 is spaced by 2 from 256 on",
        "sin": "sin loses its phase: bfloat16 is spaced by 2 from 256 on",
        "integer_pow": "a power leaves float16's range: x**3 above 40.3",
        "polynomial": "a power leaves float16's range: x**3 above 40.3",
        "reduce_prod": "a product of many factors leaves float16's range",
        "rsqrt": "rsqrt is infinite where its argument underflows float16, below 6e-8",
        "square": "a square leaves float16's range: above 255.9 and below 2.4e-4",
        "iota": "iota is exact only to 256 in bfloat16 and to 2048 in float16",
        "random_gamma": "the dtype is part of the random stream",
        "reduce_precision": "an explicit rounding is obeyed",
    }
)
"""Why a primitive is denied, where its block's title says too little."""

ACCUMULATES: frozenset[str] = frozenset(
    {
        "cumlogsumexp",
        "cumprod",
        "cumsum",
        "psum",
        "psum_invariant",
        "reduce_prod",
        "reduce_scatter",
        "reduce_sum",
        "reduce_window_sum",
        "scatter-add",
        "scatter-mul",
        "scatter-sub",
        "select_and_scatter_add",
        "unreduced_psum",
        "unreduced_reduce_scatter",
    }
)
"""What accumulates in float32 even where a policy's rule makes it half."""

DECOMPOSITIONS: frozenset[str] = frozenset(
    {
        "cholesky",
        "cholesky_update",
        "custom_linear_solve",
        "eig",
        "eigh",
        "geqp3",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "ormqr",
        "qr",
        "schur",
        "svd",
        "symmetric_product",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    }
)
"""Linear algebra without a half form: what it makes is as exact as float32."""

SHARP: frozenset[str] = DECOMPOSITIONS | frozenset(
    {
        "acos",
        "acosh",
        "asin",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "ceil",
        "cos",
        "cumprod",
        "digamma",
        "erf_inv",
        "floor",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "lgamma",
        "polygamma",
        "reduce_prod",
        "regularized_incomplete_beta",
        "rem",
        "round",
        "sin",
        "tan",
        "zeta",
    }
)
"""What multiplies an error of its operand without a bound, or jumps."""

_NAMES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "mixed_bfloat16": "bfloat16",
    "mixed_float16": "float16",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
}

_PHRASES = {
    ALLOW: "runs on half operands",
    INFER: "safe unless downstream of a denied value",
    DENY: "never half",
    CLEAR: "has no numerical effect",
}

_TITLES = {name: title for title, block in _BLOCKS.items() for name in block}


def default_rules(compute_dtype: object) -> dict[str, Category]:
    """Return the whole rule table for a compute dtype.

    Args:
        compute_dtype: `float16`, `bfloat16` or `float32`, as a string, a dtype or a
            scalar type, in short (`"bf16"`, `"fp16"`), or as a policy's name.
            `float32` gives the table of bfloat16, which a float32 policy does not use.

    Returns:
        A new dict from primitive name to `Category`.

    Raises:
        ValueError: for any other dtype or string; the message lists the known ones.
        TypeError: if the argument is not a dtype.

    Example:
        >>> default_rules("mixed_float16")["square"].value
        'deny'
        >>> default_rules("mixed_bfloat16")["square"].value
        'infer'
    """
    overrides = FLOAT16 if dtype_name(compute_dtype) == "float16" else {}
    return {**RULES, **overrides}


def dtype_name(compute_dtype: object) -> str:
    """Return `"float16"`, `"bfloat16"` or `"float32"` for any spelling of a dtype.

    Args:
        compute_dtype: what `default_rules` takes.

    Raises:
        ValueError: for another dtype or string.
        TypeError: for what is no dtype.
    """
    if compute_dtype is None:  # numpy would read it as float64
        raise TypeError(_expected(compute_dtype))
    if isinstance(compute_dtype, str):
        name = compute_dtype
    else:
        try:
            name = np.dtype(compute_dtype).name  # type: ignore[call-overload]
        except TypeError:
            raise TypeError(_expected(compute_dtype)) from None
    if name not in _NAMES:
        raise ValueError(_expected(compute_dtype))
    return _NAMES[name]


def reason(name: str, category: Category) -> str:
    """Return why a primitive has a category, as a short phrase for a report.

    Args:
        name: a primitive's name; one without a line in the table is fine.
        category: what the table in use says of it, which a policy may have changed.

    Example:
        >>> reason("reshape", Category.CLEAR)
        'has no numerical effect: moves, selects or compares'
        >>> reason("square", Category.DENY)
        "a square leaves float16's range: above 255.9 and below 2.4e-4"
    """
    if category is DENY and name in REASONS:
        return REASONS[name]
    if RULES.get(name) is category:
        return _TITLES[name]
    return _PHRASES[category]


# Matrix products and convolutions: what half precision is fast for.
PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})

# What stands under the other opaque titles does nothing that half would make cheaper.
_NAMED = (
    "opaque: holds a function",
    "opaque: reads or writes a reference",
    "opaque: a sparse operation",
    "opaque: a kernel",
)


def opaque_reason(name: str) -> str | None:
    """Return why a primitive is left alone as a whole; None if it is not, or for good.

    Args:
        name: a primitive's name.

    Example:
        >>> opaque_reason("bcoo_dot_general")
        'a sparse operation'
    """
    title = _TITLES.get(name, "")
    return title.removeprefix("opaque: ") if title.startswith(_NAMED) else None


def _expected(got: object) -> str:
    known = ", ".join(repr(name) for name in _NAMES)
    return f"expected a compute dtype, one of {known} or such a dtype, got {got!r}"
