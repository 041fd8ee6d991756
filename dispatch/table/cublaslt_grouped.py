"""The rows of grouped_matmul by `cublasLtMatmul` with grouped layouts; they come after CUTLASS's.

The library has grouped layouts from 13.2 on, for Hopper from 13.4 on, and for fp8 on Hopper from 13.5 on. There are
reports that versions before 13.5 read out of bounds at some alignments (pytorch/pytorch#196645). `run_on` names the
machines on which all cases of a row have passed.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F8E4M3, F16, F32, Arch, Compute
from dispatch.ops.grouped_matmul import cublaslt_plan, numpy_plan
from dispatch.ops.grouped_matmul.rules import (
    by_16_bytes,
    k_dense,
    no_config,
    no_fast_accum,
    one_order,
    only_alpha,
    rows_dense,
    some_elements,
    steps_of_32_bits,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

RULES = (by_16_bytes, rows_dense, one_order, some_elements, no_fast_accum, only_alpha, no_config, steps_of_32_bits)
RULES_8 = (by_16_bytes, rows_dense, some_elements, k_dense, only_alpha, no_config, steps_of_32_bits)
SM90, COMP_32F = Arch(90), Compute.COMPUTE_32F
LT, H100 = ("cublasLt", "cublasLtMatmul", cublaslt_plan), ("H100",)  # with cuBLASLt 13.10

GPU_ROWS = (
#       op                 a       b       c     d      compute   rules    min_, max_arch, min_version, calls, run_on
    Row("grouped_matmul", (F16,    F16,    F16,  F16),  COMP_32F, RULES,   SM90, SM90, (13, 5), *LT, H100),
    Row("grouped_matmul", (F16,    F16,    F32,  F32),  COMP_32F, RULES,   SM90, SM90, (13, 5), *LT, H100),
    Row("grouped_matmul", (BF16,   BF16,   BF16, BF16), COMP_32F, RULES,   SM90, SM90, (13, 5), *LT, H100),
    Row("grouped_matmul", (BF16,   BF16,   F32,  F32),  COMP_32F, RULES,   SM90, SM90, (13, 5), *LT, H100),
    Row("grouped_matmul", (F8E4M3, F8E4M3, BF16, BF16), COMP_32F, RULES_8, SM90, SM90, (13, 5), *LT, H100),
)

HOST_ROWS = tuple(
    on_host(row, numpy_plan, library="numpy-cublaslt", function="matmul", stands_for="cublasLt")
    for row in GPU_ROWS
)

ROWS = stated((*GPU_ROWS, *HOST_ROWS))
