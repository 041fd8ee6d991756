"""The rows of ops around sparse matrices whose kernels are this library's own, compiled by NVRTC. Rows, and nothing
else.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, I64, Arch
from dispatch.ops.sparse import own_compression_plan, own_product_plan, own_sampled_plan
from dispatch.ops.sparse.check import nvrtc_check
from dispatch.ops.sparse.reference import numpy_check, numpy_compressed, numpy_dense_count, scipy_sparse
from dispatch.ops.sparse.rules import adjacent_rows, aligned, few_elements, formats_of_dense, open_algorithm, results
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80 = Arch(75), Arch(80)
RULES = (aligned, results)
SAMPLED = (aligned, formats_of_dense, results)
ADJACENT = (aligned, adjacent_rows, open_algorithm, few_elements)
DTYPES = (F32, F64, C64, C128, F16, BF16)

H100 = ("H100",)
CHECK = ("own", "check_indices", nvrtc_check, H100)
COUNT = ("own", "count_elements", own_compression_plan, H100)
FILL  = ("own", "fill_elements", own_compression_plan, H100)
SAMPLE = ("own", "sample_products", own_sampled_plan, ("H200",), None, "any format")
MULTIPLY = ("own", "multiply_rows", own_product_plan, ("H200",), None, "adjacent rows")
ON_HOST = {"sparse_check": numpy_check, "dense_nnz": numpy_dense_count, "dense_to_sparse": numpy_compressed}

GPU_ROWS = (
#   op, (values, out), compute, rules, min_arch, max_arch, min_version, calls
    *(Row("sparse_check",    (one, I64), None, RULES, SM75, None, (), *CHECK) for one in DTYPES),
    *(Row("dense_nnz",       (one, I64), None, RULES, SM75, None, (), *COUNT) for one in DTYPES),
    *(Row("dense_to_sparse", (one, one), None, RULES, SM75, None, (), *FILL) for one in DTYPES),
)
SAMPLING = (
    *(Row("sddmm",           (one, one), None, SAMPLED, SM75, None, (), *SAMPLE) for one in DTYPES),
)
PRODUCTS = (
    *(Row("sparse_mv",       (one, one), None, ADJACENT, SM75, None, (), *MULTIPLY) for one in (F32, F64, C64, C128)),
    *(Row("sparse_mv",       (F16, one), None, ADJACENT, SM75, None, (), *MULTIPLY) for one in (F16, F32)),
    *(Row("sparse_mv",       (BF16, one), None, ADJACENT, SM80, None, (), *MULTIPLY) for one in (BF16, F32)),
)
# fmt: on
ON_SCIPY = tuple(on_host(row, scipy_sparse, library="scipy", stands_for="own") for row in (*SAMPLING, *PRODUCTS))
ROWS = stated((*GPU_ROWS, *SAMPLING, *PRODUCTS, *(on_host(row, ON_HOST[row.op]) for row in GPU_ROWS), *ON_SCIPY))
