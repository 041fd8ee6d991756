"""The rows of grouped_matmul for `cublasGemmGroupedBatchedEx`.

They come after CUTLASS's and cuBLASLt's rows; only these rows have f32 and f64. They take lists of products, whose
extents are known on the host. cuBLAS 13.1 refuses f32 results of 16-bit operands. `run_on` names the machines on which
all cases of a row have passed.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F16, F32, F64, Arch, Compute
from dispatch.ops.grouped_matmul import cublas_plan, numpy_plan
from dispatch.ops.grouped_matmul.rules import (
    by_16_bytes,
    dense_lines,
    host_alpha,
    no_config,
    no_fast_accum,
    only_alpha,
    only_lists,
    some_elements,
    steps_of_32_bits,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

RULES = (
    *(only_lists, dense_lines, aligned, some_elements, no_fast_accum, only_alpha, host_alpha),
    *(no_config, steps_of_32_bits),
)
RULES_16 = (by_16_bytes, *RULES)  # the alignment that NVIDIA requires where tensor cores are used
SM80, V12, H200 = Arch(80), (12, 9), ("H200",)
COMP_32F, COMP_64F, TF32 = Compute.COMPUTE_32F, Compute.COMPUTE_64F, Compute.COMPUTE_32F_FAST_TF32
EX = ("cublas", "cublasGemmGroupedBatchedEx", cublas_plan)

GPU_ROWS = (
#       op                 a     b     c     d      compute   rules     min_, max_, min_version, calls, run_on
    Row("grouped_matmul", (F16,  F16,  F16,  F16),  COMP_32F, RULES_16, SM80, None, V12, *EX, H200),
    Row("grouped_matmul", (BF16, BF16, BF16, BF16), COMP_32F, RULES_16, SM80, None, V12, *EX, H200),
    Row("grouped_matmul", (F32,  F32,  F32,  F32),  COMP_32F, RULES,    SM80, None, V12, *EX, H200),
    Row("grouped_matmul", (F32,  F32,  F32,  F32),  TF32,     RULES_16, SM80, None, V12, *EX, H200),
    Row("grouped_matmul", (F64,  F64,  F64,  F64),  COMP_64F, RULES,    SM80, None, V12, *EX, H200),
)
# fmt: on

HOST_ROWS = tuple(
    on_host(row, numpy_plan, library="numpy-cublas", function="matmul", stands_for="cublas") for row in GPU_ROWS
)

ROWS = stated((*GPU_ROWS, *HOST_ROWS))
