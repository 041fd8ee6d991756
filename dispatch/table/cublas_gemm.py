"""The rows of matmul for cuBLAS's gemm functions.

They come after cuBLASLt's and CUTLASS's rows: a request reaches them by `library="cublas"`, by autotune, or by a
compute type that only they have. Sums in f16 (COMPUTE_16F) are so imprecise that no check could detect a result that is
wrong by 1%, so their cases use integers, whose sums are exact. On an H100 cuBLAS 13.1 runs BF16X9 with its f32
kernels, and FIXED with its f64 kernels: the results are bit for bit the same.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from dataclasses import replace

from dispatch.core.fusion import Fusion
from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import IEEE, stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, I8, I32, Arch, Compute
from dispatch.ops.matmul import cublas_matmul, numpy_matmul
from dispatch.ops.matmul.rules import lines_by_4, no_fast_accum, no_scales, whole_workspace
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

COMP_32F, COMP_64F, COMP_32I = Compute.COMPUTE_32F, Compute.COMPUTE_64F, Compute.COMPUTE_32I
COMP_16F = Compute.COMPUTE_16F
FAST_TF32, FAST_16BF, FAST_16F = Compute.COMPUTE_32F_FAST_TF32, Compute.COMPUTE_32F_FAST_16BF, Compute.COMPUTE_32F_FAST_16F
BF16X9, FIXED = Compute.COMPUTE_32F_EMULATED_16BFX9, Compute.COMPUTE_64F_EMULATED_FIXEDPOINT

ALONE = Fusion(((), ()))  # no bias, no aux, no epilogue
PLAIN = (aligned, whole_workspace, no_fast_accum, no_scales)
INT8  = (lines_by_4, *PLAIN)
SM80  = Arch(80)
V12, V13_1 = (12, 9), (13, 1)
EX    = ("cublas", "cublasGemmEx", cublas_matmul, ("H100",))
AS_F32 = "as precise as f32; computed in f32 where the library expects that to be faster or the GPU has no emulation"
AS_F64 = "as precise as f64; computed in f64 where the library expects that to be faster or the GPU has no emulation"

GPU_ROWS = (
#       op        a     b     c     d       compute    rules  min_arch, max_arch, min_version, calls, run_on, fusion
    Row("matmul", (F64,  F64,  F64,  F64),  COMP_64F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F32,  F32,  F32,  F32),  COMP_32F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F32,  F32,  F32,  F32),  FAST_TF32, PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F32,  F32,  F32,  F32),  FAST_16BF, PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F32,  F32,  F32,  F32),  FAST_16F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F32,  F32,  F32,  F32),  BF16X9,    PLAIN, SM80, None, V12,   *EX, fusion=ALONE, note=AS_F32),
    Row("matmul", (F64,  F64,  F64,  F64),  FIXED,     PLAIN, SM80, None, V13_1, *EX, fusion=ALONE, note=AS_F64),
    Row("matmul", (F16,  F16,  F16,  F16),  COMP_32F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F16,  F16,  F16,  F16),  COMP_16F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (F16,  F16,  F32,  F32),  COMP_32F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (BF16, BF16, BF16, BF16), COMP_32F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (BF16, BF16, F32,  F32),  COMP_32F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (I8,   I8,   I32,  I32),  COMP_32I,  INT8,  SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (C64,  C64,  C64,  C64),  COMP_32F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (C64,  C64,  C64,  C64),  FAST_TF32, PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (C64,  C64,  C64,  C64),  FAST_16BF, PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (C64,  C64,  C64,  C64),  FAST_16F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (C64,  C64,  C64,  C64),  BF16X9,    PLAIN, SM80, None, V12,   *EX, fusion=ALONE, note=AS_F32),
    Row("matmul", (C128, C128, C128, C128), COMP_64F,  PLAIN, SM80, None, V12,   *EX, fusion=ALONE),
    Row("matmul", (C128, C128, C128, C128), FIXED,     PLAIN, SM80, None, V13_1, *EX, fusion=ALONE, note=AS_F64),
)
# fmt: on

HOST_ROWS = tuple(
    on_host(row, numpy_matmul, library="numpy-cublas", function="matmul", stands_for="cublas") for row in GPU_ROWS
)
UNREAD = f"{IEEE}; NaN times an alpha of 0 depends on the kernel"
ROWS = stated(replace(row, nonfinite="" if row.dtypes[-1] is I32 else UNREAD) for row in (*GPU_ROWS, *HOST_ROWS))
