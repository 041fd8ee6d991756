"""The rows of contractions that are matrix products by cuBLASLt after permuting operands.

They come after cuTENSOR's, which take the same requests; `library="cublasLt"` or `autotune=True` reach them. Those of
16 bits and TF32 come before cuTENSOR's (contract_cublaslt.py).
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch, Compute
from dispatch.ops.contraction import permuted_contract
from dispatch.ops.contraction.permuted import permutes
from dispatch.ops.contraction.reference import numpy_modes
from dispatch.ops.contraction.rules import adds_as_precisely, asks_no_kernel, no_operators, nonnegative_strides
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM80 = Arch(80)
V12 = (12, 9)
COMP_32F, COMP_64F, FAST_TF32 = Compute.COMPUTE_32F, Compute.COMPUTE_64F, Compute.COMPUTE_32F_FAST_TF32
RULES = (nonnegative_strides, no_operators, asks_no_kernel, adds_as_precisely, permutes)
LT = ("cublasLt", "cublasLtMatmul", permuted_contract, ("H200",))

GPU_ROWS = (
#       op          a, b, result        compute    rules  min_arch, max_arch, min_version, calls
    Row("contract", (F32,  F32,  F32),  COMP_32F,  RULES, SM80, None, V12, *LT, variant="permuted"),
    Row("contract", (F64,  F64,  F64),  COMP_64F,  RULES, SM80, None, V12, *LT, variant="permuted"),
    Row("contract", (C64,  C64,  C64),  COMP_32F,  RULES, SM80, None, V12, *LT, variant="permuted"),
    Row("contract", (C64,  C64,  C64),  FAST_TF32, RULES, SM80, None, V12, *LT, variant="permuted"),
    Row("contract", (C128, C128, C128), COMP_64F,  RULES, SM80, None, V12, *LT, variant="permuted"),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, numpy_modes, function="einsum", stands_for="cublasLt") for row in GPU_ROWS)))
