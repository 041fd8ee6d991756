"""The rows of sparse linear algebra for cuSPARSE.

`run_on` names the GPUs on which a row has passed all its cases.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, I32, I64, Arch
from dispatch.ops.sparse import (
    batched_plan,
    batched_rules,
    compiled_plan,
    compression_plan,
    cusparse_plan,
    ell_plan,
    ell_rules,
    gpsv_plan,
    gtsv_plan,
    incomplete_plan,
    pruning_plan,
    rules,
    sorting_plan,
    vectors_plan,
)
from dispatch.ops.sparse.compiled_reference import numpy_compiled
from dispatch.ops.sparse.ell_reference import numpy_ell
from dispatch.ops.sparse.incomplete_reference import numpy_incomplete
from dispatch.ops.sparse.pentadiagonal import adjacent
from dispatch.ops.sparse.pruning_reference import numpy_pruning
from dispatch.ops.sparse.reference import scipy_sparse
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80 = Arch(75), Arch(80)
V12 = (12, 5)
V12_9_4 = (12, 9, 4)  # has SpMVOp with the arguments bound here; those of 12.7.2 differ
V12_5_4 = (12, 5, 4)  # earlier versions of SpMV rely on data of a previous call in the workspace, which plans share
ALL = (F32, F64, C64, C128)
EXCHANGED = (F32, F64, C64, C128, F16, BF16)  # by csr2csc
ANY      = (rules.aligned, rules.elements_where_needed, rules.index_dtypes, rules.dense_results)
PAIRS    = (*ANY, rules.spgemm_reuse)
DENSE_A  = (rules.aligned, rules.dense_orders, rules.dense_results)
VECTOR   = (*ANY, rules.square_blocks, rules.dense_vectors)
MATRIX   = (*ANY, rules.square_blocks, rules.dense_orders, rules.csr_alg3_formats)
STACKED  = (rules.aligned, batched_rules.in_csr, rules.index_dtypes, rules.dense_batch_orders)
STACKED_CSC = (rules.aligned, batched_rules.in_csc, rules.index_dtypes, rules.dense_batch_orders)
STACKED_BSR = (rules.aligned, batched_rules.in_bsr, rules.index_dtypes, rules.square_blocks, rules.dense_batch_orders)
STACKED_COO = (
    rules.aligned, batched_rules.in_coo, rules.index_dtypes, rules.dense_batch_orders, batched_rules.batch_algorithm
)
SAMPLED  = (*ANY, rules.only_csr, rules.dense_orders)
SOLVE    = (*ANY, rules.triangular_formats, rules.dense_vectors)
SOLVES   = (*ANY, rules.triangular_formats, rules.dense_orders)
UNPACK   = (*ANY, rules.no_blocks, rules.dense_orders)
SOME     = (rules.aligned, rules.dense_results, rules.sparse_vectors)
THREE    = (rules.aligned, rules.dense_results, rules.tridiagonal)
LINES    = (rules.aligned, rules.dense_results, rules.i32_count, rules.base_zero_if_empty)
SLICES   = (rules.aligned, rules.dense_vectors, ell_rules.added_elements)
BLOCKED  = (
    rules.dense_orders, ell_rules.added_elements, ell_rules.power_of_2_blocks, rules.i32_columns,
    ell_rules.aligned_blocks,
)
SORTED   = (rules.aligned, rules.i32_indices, rules.dense_results)
EXCHANGE = (rules.aligned, rules.elements_where_needed, rules.i32_indices, rules.dense_results)

H100, H200 = ("H100",), ("H200",)
SPMV     = ("cusparse", "cusparseSpMV", cusparse_plan, H100)
SPMM     = ("cusparse", "cusparseSpMM", cusparse_plan, H100)
BATCHED  = ("cusparse", "cusparseSpMM", batched_plan, H200)
BATCHED_COO = ("cusparse", "cusparseSpMM", batched_plan, H200, None, "COO")
SELL_MV  = ("cusparse", "cusparseSpMV", ell_plan, H100)
ELL_MM   = ("cusparse", "cusparseSpMM", ell_plan)
S_COUNT  = ("cusparse", "cusparseSpruneDense2csrNnz", pruning_plan, H100)
D_COUNT  = ("cusparse", "cusparseDpruneDense2csrNnz", pruning_plan, H100)
S_PRUNE  = ("cusparse", "cusparseSpruneDense2csr", pruning_plan, H100)
D_PRUNE  = ("cusparse", "cusparseDpruneDense2csr", pruning_plan, H100)
GPSV     = (rules.aligned, adjacent)
GPSV_S   = ("cusparse", "cusparseSgpsvInterleavedBatch", gpsv_plan, H100)
GPSV_D   = ("cusparse", "cusparseDgpsvInterleavedBatch", gpsv_plan, H100)
GPSV_C   = ("cusparse", "cusparseCgpsvInterleavedBatch", gpsv_plan, H100)
GPSV_Z   = ("cusparse", "cusparseZgpsvInterleavedBatch", gpsv_plan, H100)
SORT     = ("cusparse", "cusparseXcoosortByRow", sorting_plan, H100)
SDDMM    = ("cusparse", "cusparseSDDMM", cusparse_plan, H100)
SPSV     = ("cusparse", "cusparseSpSV_solve", cusparse_plan, H100)
SPSM     = ("cusparse", "cusparseSpSM_solve", cusparse_plan, H100)
SPGEMM   = ("cusparse", "cusparseSpGEMM_copy", cusparse_plan, H100)
COUNTS   = ("cusparse", "cusparseSpGEMM_compute", cusparse_plan, H100)
DENSE    = ("cusparse", "cusparseSparseToDense", cusparse_plan, H100)
CSR2CSC  = ("cusparse", "cusparseCsr2cscEx2", cusparse_plan)
GATHER   = ("cusparse", "cusparseGather", vectors_plan, H100)
SCATTER  = ("cusparse", "cusparseScatter", vectors_plan, H100)
AXPBY    = ("cusparse", "cusparseAxpby", vectors_plan, H100)
SPVV     = ("cusparse", "cusparseSpVV", vectors_plan, H100)
ROT      = ("cusparse", "cusparseRot", vectors_plan, H200)
SPMM_OP  = ("cusparse", "cusparseSpMMOp", compiled_plan, H200)
SPMV_OP  = ("cusparse", "cusparseSpMVOp", compiled_plan, H200)
GTSV_S   = ("cusparse", "cusparseSgtsv2", gtsv_plan, H100)
GTSV_D   = ("cusparse", "cusparseDgtsv2", gtsv_plan, H100)
GTSV_C   = ("cusparse", "cusparseCgtsv2", gtsv_plan, H100)
GTSV_Z   = ("cusparse", "cusparseZgtsv2", gtsv_plan, H100)
COO2CSR  = ("cusparse", "cusparseXcoo2csr", compression_plan, H100)
CSR2COO  = ("cusparse", "cusparseXcsr2coo", compression_plan, H100)

STACKS = (
    (STACKED, ("cusparse", "cusparseSpMM", batched_plan, H200)),
    (STACKED_CSC, ("cusparse", "cusparseSpMM", batched_plan, H200, None, "CSC")),
    (STACKED_COO, ("cusparse", "cusparseSpMM", batched_plan, H200, None, "COO")),
    (STACKED_BSR, ("cusparse", "cusparseSpMM", batched_plan, H200, None, "BSR")),
)

GPU_ROWS = (
#   op, (values, out), compute, rules, min_arch, max_arch, min_version, calls
    *(Row("sparse_mv",       (one, one), None, VECTOR,   SM75, None, V12_5_4, *SPMV) for one in ALL),
    Row("sparse_mv",         (F16, F16), None, VECTOR,   SM75, None, V12_5_4, *SPMV),
    Row("sparse_mv",         (F16, F32), None, VECTOR,   SM75, None, V12_5_4, *SPMV),
    Row("sparse_mv",         (BF16, BF16), None, VECTOR,   SM80, None, V12_5_4, *SPMV),
    Row("sparse_mv",         (BF16, F32), None, VECTOR,   SM80, None, V12_5_4, *SPMV),
    *(Row("spmm",            (one, one), None, MATRIX,   SM75, None, V12, *SPMM) for one in ALL),
    Row("spmm",              (F16, F16), None, MATRIX,   SM75, None, V12, *SPMM),
    Row("spmm",              (F16, F32), None, MATRIX,   SM75, None, V12, *SPMM),
    Row("spmm",              (BF16, BF16), None, MATRIX,   SM80, None, V12, *SPMM),
    Row("spmm",              (BF16, F32), None, MATRIX,   SM80, None, V12, *SPMM),
    *(Row("spmm_batched",    (one, one), None, STACKED,  SM75, None, V12, *BATCHED) for one in ALL),
    *(Row("spmm_batched",    (one, one), None, STACKED_COO, SM75, None, V12, *BATCHED_COO) for one in ALL),
    *(Row("spmm_batched",    (one, one), None, wanted, SM75, None, V12, *calls)
      for wanted, calls in (STACKS[1], STACKS[3]) for one in ALL),
    *(Row("spmm_batched",    (F16, one), None, wanted, SM75, None, V12, *calls)
      for wanted, calls in STACKS for one in (F16, F32)),
    *(Row("spmm_batched",    (BF16, one), None, wanted, SM80, None, V12, *calls)
      for wanted, calls in STACKS for one in (BF16, F32)),
    *(Row("sddmm",           (one, one), None, SAMPLED,  SM75, None, V12, *SDDMM) for one in ALL),
    *(Row("spsv",            (one, one), None, SOLVE,    SM75, None, V12, *SPSV) for one in ALL),
    *(Row("spsm",            (one, one), None, SOLVES,   SM75, None, V12, *SPSM) for one in ALL),
    *(Row("spgemm",          (one, one), None, PAIRS,    SM75, None, V12, *SPGEMM) for one in ALL),
    *(Row("spgemm_nnz",      (one, I64), None, PAIRS,    SM75, None, V12, *COUNTS) for one in ALL),
    *(Row("sparse_to_dense", (one, one), None, UNPACK,   SM75, None, V12, *DENSE) for one in (*ALL, F16, BF16)),
    *(Row("csr2csc",         (one, one), None, EXCHANGE, SM75, None, V12, *CSR2CSC, H100) for one in EXCHANGED),
    *(Row("sparse_gather",   (one, one), None, SOME,     SM75, None, V12, *GATHER) for one in (*ALL, F16, BF16)),
    *(Row("sparse_scatter",  (one, one), None, SOME,     SM75, None, V12, *SCATTER) for one in (*ALL, F16, BF16)),
    *(Row("sparse_axpby",    (one, one), None, SOME,     SM75, None, V12, *AXPBY) for one in ALL),
    *(Row("spvv",            (one, one), None, SOME,     SM75, None, V12, *SPVV) for one in ALL),
    *(Row("sparse_rot",      (one, one), None, SOME,     SM75, None, V12, *ROT) for one in (*ALL, F16)),
    Row("sparse_rot",        (BF16, BF16), None, SOME,     SM80, None, V12, *ROT),
    *(Row("sparse_sort",     (one, one), None, SORTED,   SM75, None, V12, *SORT) for one in (*ALL, F16, BF16)),
    Row("gpsv",              (F32, F32), None, GPSV,     SM75, None, V12, *GPSV_S),
    Row("gpsv",              (F64, F64), None, GPSV,     SM75, None, V12, *GPSV_D),
    Row("gpsv",              (C64, C64), None, GPSV,     SM75, None, V12, *GPSV_C),
    Row("gpsv",              (C128, C128), None, GPSV,   SM75, None, V12, *GPSV_Z),
    Row("gtsv",              (F32, F32), None, THREE,    SM75, None, V12, *GTSV_S),
    Row("gtsv",              (F64, F64), None, THREE,    SM75, None, V12, *GTSV_D),
    Row("gtsv",              (C64, C64), None, THREE,    SM75, None, V12, *GTSV_C),
    Row("gtsv",              (C128, C128), None, THREE,  SM75, None, V12, *GTSV_Z),
    Row("coo2csr",           (I32, I32), None, LINES,    SM75, None, V12, *COO2CSR),
    Row("csr2coo",           (I32, I32), None, LINES,    SM75, None, V12, *CSR2COO),
)
ELL_ROWS = (
    *(Row("sell_mv",        (one, one), None, SLICES,  SM75, None, V12, *SELL_MV) for one in ALL),
    Row("sell_mv",          (F16, F16), None, SLICES,  SM75, None, V12, *SELL_MV),
    Row("sell_mv",          (F16, F32), None, SLICES,  SM75, None, V12, *SELL_MV),
    Row("sell_mv",          (BF16, BF16), None, SLICES,  SM80, None, V12, *SELL_MV),
    Row("sell_mv",          (BF16, F32), None, SLICES,  SM80, None, V12, *SELL_MV),
    Row("blocked_ell_mm",   (F32, F32), None, BLOCKED, SM80, None, V12, *ELL_MM, H100),
    Row("blocked_ell_mm",   (F64, F64), None, BLOCKED, SM80, None, V12, *ELL_MM, H100),
    Row("blocked_ell_mm",   (F16, F16), None, BLOCKED, SM75, None, V12, *ELL_MM, H100),
    Row("blocked_ell_mm",   (BF16, BF16), None, BLOCKED, SM80, None, V12, *ELL_MM, H100),
)
PRUNE_ROWS = (
    Row("prune_nnz",        (F32, I64), None, DENSE_A, SM75, None, V12, *S_COUNT),
    Row("prune_nnz",        (F64, I64), None, DENSE_A, SM75, None, V12, *D_COUNT),
    Row("prune_to_csr",     (F32, F32), None, DENSE_A, SM75, None, V12, *S_PRUNE),
    Row("prune_to_csr",     (F64, F64), None, DENSE_A, SM75, None, V12, *D_PRUNE),
)
OVER_ANY = (rules.aligned, rules.with_elements, rules.same_index_dtype)
OF_SUMS  = (rules.aligned, rules.with_elements, rules.base_zero, rules.i32_columns, rules.dense_vectors)
COMPILED_ROWS = (
    *(Row("spmm_op", (one, one), None, OVER_ANY, SM75, None, V12, *SPMM_OP) for one in ALL),
    Row("spmm_op",   (F16, F16), None, OVER_ANY, SM75, None, V12, *SPMM_OP),
    Row("spmm_op",   (F16, F32), None, OVER_ANY, SM75, None, V12, *SPMM_OP),
    Row("spmm_op",   (BF16, BF16), None, OVER_ANY, SM80, None, V12, *SPMM_OP),
    Row("spmm_op",   (BF16, F32), None, OVER_ANY, SM80, None, V12, *SPMM_OP),
    *(Row("spmv_op", (one, one), None, OF_SUMS, SM75, None, V12_9_4, *SPMV_OP) for one in (F32, F64)),
)
PIVOTS = (rules.aligned, rules.i32_indices, rules.dense_results, rules.with_elements)
LETTERS = tuple(zip(ALL, "SDCZ", strict=True))
FACTOR_ROWS = (
    *(Row("ilu0", (one, one), None, PIVOTS, SM75, None, V12, "cusparse", f"cusparse{x}csrilu02", incomplete_plan, H100)
      for one, x in LETTERS),
    *(Row("ic0",  (one, one), None, PIVOTS, SM75, None, V12, "cusparse", f"cusparse{x}csric02", incomplete_plan, H200)
      for one, x in LETTERS),
)
# fmt: on
ON_NUMPY = (
    *(on_host(row, numpy_compiled, stands_for="cusparse") for row in COMPILED_ROWS),
    *(on_host(row, numpy_incomplete, stands_for="cusparse") for row in FACTOR_ROWS),
    *(on_host(row, numpy_ell, stands_for="cusparse") for row in ELL_ROWS),
    *(on_host(row, numpy_pruning, stands_for="cusparse") for row in PRUNE_ROWS),
)
ON_SCIPY = tuple(on_host(row, scipy_sparse, library="scipy", stands_for="cusparse") for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *ELL_ROWS, *PRUNE_ROWS, *FACTOR_ROWS, *COMPILED_ROWS, *ON_NUMPY, *ON_SCIPY))
