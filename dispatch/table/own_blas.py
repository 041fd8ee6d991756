"""The rows of BLAS by kernels of this library, compiled by NVRTC: for large dense vectors and symmetric matrices.

`axpy` has no row in f64: for 16.8M elements cuBLAS took 133 µs on an H100, and the kernel 143 µs.
"""

from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Arch, Compute
from dispatch.ops.blas import numpy_blas
from dispatch.ops.blas.level1_kernels import large_and_dense, own_level1
from dispatch.ops.blas.symmetric_kernels import large_and_in_lines, own_symmetric
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

COMP_64F, COMP_32F = Compute.COMPUTE_64F, Compute.COMPUTE_32F
SM75, SM80 = Arch(75), Arch(80)  # the oldest target of NVRTC 13; bf16 instructions exist from sm_80 on
RULES = (large_and_dense,)
LINES = (large_and_in_lines,)
# fmt: off
AXPY = ("own", "axpy", own_level1, ("H100",), None, "large")
NRM2 = ("own", "nrm2", own_level1, ("H100",), None, "large")
SYMV = ("own", "symmetric", own_symmetric, ("H100",), None, "large")

GPU_ROWS = (
#       op       x     result   compute    rules
#                                                 min_arch, max_arch, min_version, calls, run_on, fusion, variant
    Row("axpy", (F32,  F32),   COMP_32F,  RULES,  SM75, None, (), *AXPY),
    Row("axpy", (F16,  F16),   COMP_32F,  RULES,  SM75, None, (), *AXPY),
    Row("axpy", (BF16, BF16),  COMP_32F,  RULES,  SM80, None, (), *AXPY),
    Row("nrm2", (F32,  F32),   COMP_32F,  RULES,  SM75, None, (), *NRM2),
    Row("nrm2", (F64,  F64),   COMP_64F,  RULES,  SM75, None, (), *NRM2),
    Row("nrm2", (C64,  F32),   COMP_32F,  RULES,  SM75, None, (), *NRM2),
    Row("nrm2", (C128, F64),   COMP_64F,  RULES,  SM75, None, (), *NRM2),
    Row("nrm2", (F16,  F16),   COMP_32F,  RULES,  SM75, None, (), *NRM2),
    Row("nrm2", (BF16, BF16),  COMP_32F,  RULES,  SM80, None, (), *NRM2),
    Row("symv", (F32,  F32),   COMP_32F,  LINES,  SM75, None, (), *SYMV),
    Row("symv", (F64,  F64),   COMP_64F,  LINES,  SM75, None, (), *SYMV),
    Row("symv", (C64,  C64),   COMP_32F,  LINES,  SM75, None, (), *SYMV),
    Row("symv", (C128, C128),  COMP_64F,  LINES,  SM75, None, (), *SYMV),
    Row("hemv", (C64,  C64),   COMP_32F,  LINES,  SM75, None, (), *SYMV),
    Row("hemv", (C128, C128),  COMP_64F,  LINES,  SM75, None, (), *SYMV),
)
# fmt: on
HOST_ROWS = tuple(on_host(row, numpy_blas, stands_for="own") for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
