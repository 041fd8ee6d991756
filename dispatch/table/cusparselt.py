"""The rows of structured (2:4) matrices by cuSPARSELt.

`run_on` names the machines on which all cases of a row have passed.
"""

# fmt: off
from __future__ import annotations

from itertools import product

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, I8, I32, U8, Arch, Compute
from dispatch.ops.structured import cusparselt_plan, rules
from dispatch.ops.structured.reference import numpy_structured
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM80, SM89, SM90 = Arch(80), Arch(89), Arch(90)
V08 = (0, 8)
SUM16, SUM32, TF32, WHOLE = (
    Compute.COMPUTE_16F, Compute.COMPUTE_32F, Compute.COMPUTE_32F_FAST_TF32, Compute.COMPUTE_32I
)
PRUNED     = (rules.aligned, rules.matrix_order, rules.same_layout)
CHECKED    = (rules.aligned, rules.matrix_order, rules.contiguous_batch)
COMPRESSED = (rules.aligned, rules.matrix_order, rules.contiguous)
MULTIPLIED = (
    rules.aligned, rules.operand_orders, rules.separate_results, rules.dense_vectors, rules.factor_vectors,
    rules.gelu_dtypes, rules.columns_of_f32, rules.safe_kernels,
)

H100, H200 = ("H100",), ("H200",)
PRUNE    = ("cusparseLt", "cusparseLtSpMMAPrune2", cusparselt_plan, H100)
CHECK    = ("cusparseLt", "cusparseLtSpMMAPruneCheck2", cusparselt_plan, H100)
COMPRESS = ("cusparseLt", "cusparseLtSpMMACompress2", cusparselt_plan, H100)
MATMUL   = ("cusparseLt", "cusparseLtMatmul", cusparselt_plan)

KINDS = ((F16, SM80), (BF16, SM80), (F32, SM80), (I8, SM80), (F8E4M3, SM89), (F8E5M2, SM89))
FP8, HALF, WIDE = (F8E4M3, F8E5M2), (F16, BF16), (F16, BF16, F32)

GPU_ROWS = (
#   op, (a, b, c, d), compute, rules, min_arch, max_arch, min_version, calls
    *(Row("prune_2_4",    (one, one), None, PRUNED,     arch, None, V08, *PRUNE) for one, arch in KINDS),
    *(Row("check_2_4",    (one, I32), None, CHECKED,    arch, None, V08, *CHECK) for one, arch in KINDS),
    *(Row("compress_2_4", (one, U8),  None, COMPRESSED, arch, None, V08, *COMPRESS) for one, arch in KINDS),
    Row("matmul_2_4", (F16, F16, F16, F16),     SUM32, MULTIPLIED, SM80, None, V08, *MATMUL, H100),
    Row("matmul_2_4", (F16, F16, F16, F16),     SUM16, MULTIPLIED, SM90, SM90, V08, *MATMUL, H100),
    Row("matmul_2_4", (BF16, BF16, BF16, BF16), SUM32, MULTIPLIED, SM80, None, V08, *MATMUL, H100),
    Row("matmul_2_4", (F32, F32, F32, F32),     TF32,  MULTIPLIED, SM80, None, V08, *MATMUL, H200),
    *(Row("matmul_2_4", (I8, I8, d, d), WHOLE,  MULTIPLIED, SM80, None, V08, *MATMUL, H100) for d in (I8, I32)),
    *(Row("matmul_2_4", (I8, I8, d, d), WHOLE,  MULTIPLIED, SM80, None, V08, *MATMUL, H200) for d in (F16, BF16)),
    *(Row("matmul_2_4", (a, a, d, d),   SUM32,  MULTIPLIED, SM89, None, V08, *MATMUL, H100)
      for a, d in product(FP8, WIDE)),
    *(Row("matmul_2_4", (a, a, c, a),   SUM32,  MULTIPLIED, SM89, None, V08, *MATMUL, H100)
      for a, c in product(FP8, HALF)),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, numpy_structured, stands_for="cusparseLt") for row in GPU_ROWS)))
