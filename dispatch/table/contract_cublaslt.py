"""The rows of contractions by cuBLASLt that come before cuTENSOR's.

They take contractions that are matrix products without moving data; and, after permuting operands, those in 16 bits and
TF32, and sums of few terms to a scalar. For TF32 with two modes of 40 summed over, the permuting rows took 56 to 59 us
on an H200, where cuTENSOR 2.8.1 took 74 to 99, and its `algo="ttgt"` 74 to 83; in the other dtypes neither is always
faster, and cuTENSOR's rows come first. `table.py` imports this file when one of its ops is first looked up. `run_on`
names the machines on which all cases of a row have passed; it is empty where no machine has run them yet.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Arch, Compute
from dispatch.ops.contraction import cublaslt_contract, permuted_contract
from dispatch.ops.contraction.permuted import permutes
from dispatch.ops.contraction.product import modes_merge
from dispatch.ops.contraction.reference import numpy_modes
from dispatch.ops.contraction.rules import (
    adds_as_precisely,
    asks_no_kernel,
    few_terms,
    no_operators,
    nonnegative_strides,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM80 = Arch(80)
V12 = (12, 9)
COMP_32F, COMP_64F, FAST_TF32 = Compute.COMPUTE_32F, Compute.COMPUTE_64F, Compute.COMPUTE_32F_FAST_TF32
EACH = (nonnegative_strides, no_operators, asks_no_kernel, adds_as_precisely)
RULES, PERMUTED = (*EACH, modes_merge), (*EACH, permutes)
SCALAR = (*EACH, few_terms, permutes)
H100, H200 = ("H100",), ("H200",)
LT = ("cublasLt", "cublasLtMatmul", cublaslt_contract, H100)
LT_PERMUTED = ("cublasLt", "cublasLtMatmul", permuted_contract)

GPU_ROWS = (
#       op          a, b, result        compute    rules  min_arch, max_arch, min_version, calls
    Row("contract", (F16,  F16,  F16),  COMP_32F,  RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (BF16, BF16, BF16), COMP_32F,  RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (F32,  F32,  F32),  COMP_32F,  RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (F32,  F32,  F32),  FAST_TF32, RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (F64,  F64,  F64),  COMP_64F,  RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (C64,  C64,  C64),  COMP_32F,  RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (C64,  C64,  C64),  FAST_TF32, RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (C128, C128, C128), COMP_64F,  RULES, SM80, None, V12, *LT, variant="product"),
    Row("contract", (F16,  F16,  F16),  COMP_32F,  PERMUTED, SM80, None, V12, *LT_PERMUTED, H200, variant="permuted"),
    Row("contract", (BF16, BF16, BF16), COMP_32F,  PERMUTED, SM80, None, V12, *LT_PERMUTED, H200, variant="permuted"),
    Row("contract", (F32,  F32,  F32),  FAST_TF32, PERMUTED, SM80, None, V12, *LT_PERMUTED, H200, variant="permuted"),
    Row("contract", (F32,  F32,  F32),  COMP_32F,  SCALAR, SM80, None, V12, *LT_PERMUTED, H200, variant="scalar"),
    Row("contract", (F64,  F64,  F64),  COMP_64F,  SCALAR, SM80, None, V12, *LT_PERMUTED, H200, variant="scalar"),
    Row("contract", (C64,  C64,  C64),  COMP_32F,  SCALAR, SM80, None, V12, *LT_PERMUTED, H200, variant="scalar"),
    Row("contract", (C128, C128, C128), COMP_64F,  SCALAR, SM80, None, V12, *LT_PERMUTED, H200, variant="scalar"),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, numpy_modes, function="einsum", stands_for="cublasLt") for row in GPU_ROWS)))
