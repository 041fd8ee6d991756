"""The rows of sparse ops with kernels of our own, compiled by NVRTC."""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, I64, Arch
from dispatch.ops.sparse import (
    block_jacobi_plan,
    own_block_product_plan,
    own_bsr_plan,
    own_compiled_plan,
    own_compression_plan,
    own_matrix_plan,
    own_product_plan,
    own_sampled_plan,
)
from dispatch.ops.sparse.batched_rules import dense_elements
from dispatch.ops.sparse.block_jacobi_reference import numpy_block_jacobi
from dispatch.ops.sparse.bsr_rules import dense_blocks, large_blocks, only_bsr, untransposed_blocks
from dispatch.ops.sparse.check import nvrtc_check
from dispatch.ops.sparse.compiled_reference import numpy_compiled
from dispatch.ops.sparse.reference import numpy_check, numpy_compressed, numpy_dense_count, scipy_sparse
from dispatch.ops.sparse.rules import (
    adjacent_rows,
    aligned,
    default_algorithm,
    dense_results,
    enough_columns,
    few_elements,
    no_blocks,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80 = Arch(75), Arch(80)
RULES = (aligned, dense_results)
SAMPLED = (aligned, no_blocks, dense_results)
SAMPLES = (aligned, dense_elements)
BLOCKED = (aligned, dense_results, dense_blocks)
OF_BSR  = (aligned, only_bsr)
ADJACENT = (aligned, adjacent_rows, default_algorithm, few_elements)
MATRIX = (aligned, adjacent_rows, default_algorithm, enough_columns)
STACKED = (aligned, adjacent_rows, default_algorithm)
OVER_BLOCKS = (aligned, untransposed_blocks, default_algorithm, large_blocks)
DTYPES = (F32, F64, C64, C128, F16, BF16)

H100 = ("H100",)
CHECK = ("own", "check_indices", nvrtc_check, H100)
COUNT = ("own", "count_elements", own_compression_plan, H100)
FILL  = ("own", "fill_elements", own_compression_plan, H100)
SAMPLE = ("own", "sample_products", own_sampled_plan, ("H200",), None, "any format")
SAMPLE_BATCH = ("own", "sample_products", own_sampled_plan, ("H200",))
COUNT_BLOCKS = ("own", "mark_blocks", own_bsr_plan, ("H200",))
MAKE_BLOCKS = ("own", "fill_blocks", own_bsr_plan, ("H200",))
SPREAD   = ("own", "expand_blocks", own_bsr_plan, ("H200",))
UNPACK   = ("own", "unpack_blocks", own_bsr_plan, ("H200",), None, "blocks")
MULTIPLY = ("own", "multiply_rows", own_product_plan, ("H200",), None, "adjacent rows")
MULTIPLY_MATRIX = ("own", "multiply_over", own_matrix_plan, ("H200",), None, "adjacent rows")
MULTIPLY_BLOCKS = ("own", "multiply_blocks", own_block_product_plan, ("H200",), None, "blocks")
OVER = ("own", "multiply_over", own_compiled_plan, ("H200",), None, "one launch")
WITH_EPILOGUE = ("own", "multiply_rows", own_compiled_plan, ("H200",), None, "one launch")
INVERT = ("own", "invert_blocks", block_jacobi_plan, ("H200",))
ON_HOST = {
    "sparse_check": numpy_check, "dense_nnz": numpy_dense_count, "dense_to_sparse": numpy_compressed,
    "block_jacobi": numpy_block_jacobi,
}

GPU_ROWS = (
#   op, (values, out), compute, rules, min_arch, max_arch, min_version, calls
    *(Row("sparse_check",    (one, I64), None, RULES, SM75, None, (), *CHECK) for one in DTYPES),
    *(Row("dense_nnz",       (one, I64), None, RULES, SM75, None, (), *COUNT) for one in DTYPES),
    *(Row("dense_to_sparse", (one, one), None, RULES, SM75, None, (), *FILL) for one in DTYPES),
    *(Row("block_jacobi",    (one, one), None, RULES, SM75, None, (), *INVERT) for one in (F32, F64, C64, C128)),
)
SAMPLING = (
    *(Row("sddmm",           (one, one), None, SAMPLED, SM75, None, (), *SAMPLE) for one in DTYPES),
    *(Row("sddmm_batched",   (one, one), None, SAMPLES, SM75, None, (), *SAMPLE_BATCH) for one in DTYPES),
)
BLOCKS = (
    *(Row("csr2bsr_nnz",     (one, I64), None, RULES, SM75, None, (), *COUNT_BLOCKS) for one in DTYPES),
    *(Row("csr2bsr",         (one, one), None, BLOCKED, SM75, None, (), *MAKE_BLOCKS) for one in DTYPES),
    *(Row("bsr2csr",         (one, one), None, RULES, SM75, None, (), *SPREAD) for one in DTYPES),
    *(Row("sparse_to_dense", (one, one), None, OF_BSR, SM75, None, (), *UNPACK) for one in DTYPES),
)
PRODUCTS = (
    *(Row("sparse_mv",       (one, one), None, ADJACENT, SM75, None, (), *MULTIPLY) for one in (F32, F64, C64, C128)),
    *(Row("sparse_mv",       (F16, one), None, ADJACENT, SM75, None, (), *MULTIPLY) for one in (F16, F32)),
    *(Row("sparse_mv",       (BF16, one), None, ADJACENT, SM80, None, (), *MULTIPLY) for one in (BF16, F32)),
    *(Row(op,                (one, one), None, rules, SM75, None, (), *MULTIPLY_MATRIX)
      for op, rules in (("spmm", MATRIX), ("spmm_batched", STACKED)) for one in (F32, F64, C64, C128)),
    *(Row(op,                (F16, one), None, rules, SM75, None, (), *MULTIPLY_MATRIX)
      for op, rules in (("spmm", MATRIX), ("spmm_batched", STACKED)) for one in (F16, F32)),
    *(Row(op,                (BF16, one), None, rules, SM80, None, (), *MULTIPLY_MATRIX)
      for op, rules in (("spmm", MATRIX), ("spmm_batched", STACKED)) for one in (BF16, F32)),
    *(Row(op,                (one, one), None, OVER_BLOCKS, SM75, None, (), *MULTIPLY_BLOCKS)
      for op in ("spmm", "spmm_batched") for one in (F32, F64, C64, C128)),
    *(Row(op,                (F16, one), None, OVER_BLOCKS, SM75, None, (), *MULTIPLY_BLOCKS)
      for op in ("spmm", "spmm_batched") for one in (F16, F32)),
    *(Row(op,                (BF16, one), None, OVER_BLOCKS, SM80, None, (), *MULTIPLY_BLOCKS)
      for op in ("spmm", "spmm_batched") for one in (BF16, F32)),
)
# Results of 16 bits may be f32.
OPERATED = tuple(
    Row(op,                  (one, out), None, (aligned,), arch, None, (), *calls)
    for op, calls in (("spmm_op", OVER), ("spmv_op", WITH_EPILOGUE))
    for one, out, arch in (
        *((one, one, SM75) for one in (F32, F64, C64, C128)),
        (F16, F16, SM75), (F16, F32, SM75), (BF16, BF16, SM80), (BF16, F32, SM80),
    )
)
# fmt: on
ON_SCIPY = tuple(
    on_host(row, scipy_sparse, library="scipy", stands_for="own") for row in (*SAMPLING, *BLOCKS, *PRODUCTS)
)
ON_NUMPY = (
    *(on_host(row, ON_HOST[row.op]) for row in GPU_ROWS),
    *(on_host(row, numpy_compiled, stands_for="own") for row in OPERATED),
)
ROWS = stated((*GPU_ROWS, *SAMPLING, *BLOCKS, *PRODUCTS, *OPERATED, *ON_NUMPY, *ON_SCIPY))
