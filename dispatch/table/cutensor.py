"""The rows of tensor operations over modes by cuTENSOR.

`table.py` imports this file when one of its ops is first looked up. `run_on` names the machines on which all cases of a
row have passed; it is empty where no machine has run them yet. The combinations of dtypes and compute types are those
that https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html lists.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Arch, Compute
from dispatch.ops.contraction import cutensor_modes
from dispatch.ops.contraction.reference import numpy_modes
from dispatch.ops.contraction.rules import (
    compute_asked_for,
    nonnegative_strides,
    only_conjugates,
    result_has_modes,
    strides_along_modes,
    summable,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80, SM90, SM100 = Arch(75), Arch(80), Arch(90), Arch(100)
V2, V23, V25 = (2, 2), (2, 3), (2, 5)
COMP_16F, COMP_32F, COMP_64F = Compute.COMPUTE_16F, Compute.COMPUTE_32F, Compute.COMPUTE_64F
FAST_16F, FAST_16BF = Compute.COMPUTE_32F_FAST_16F, Compute.COMPUTE_32F_FAST_16BF
FAST_TF32, FAST_3XTF32 = Compute.COMPUTE_32F_FAST_TF32, Compute.COMPUTE_32F_FAST_3XTF32
EMUL_9X16BF, EMUL_4X16F = Compute.COMPUTE_32F_EMULATED_16BFX9, Compute.COMPUTE_32F_EMULATED_16FX4
EMUL_8XINT8 = Compute.COMPUTE_64F_EMULATED_FIXEDPOINT
EACH = (nonnegative_strides, only_conjugates)
SUMS = (*EACH, strides_along_modes, summable)
ASKED = (compute_asked_for, *SUMS)
THREE = (*SUMS, result_has_modes)
ASK3 = (compute_asked_for, *THREE)
H100 = ("H100",)
CONTRACT = ("cutensor", "cutensorContract", cutensor_modes, H100)
TRINARY = ("cutensor", "cutensorContractTrinary", cutensor_modes, H100)
REDUCE = ("cutensor", "cutensorReduce", cutensor_modes, H100)
PERMUTE = ("cutensor", "cutensorPermute", cutensor_modes, H100)
BINARY = ("cutensor", "cutensorElementwiseBinaryExecute", cutensor_modes, H100)
TERNARY = ("cutensor", "cutensorElementwiseTrinaryExecute", cutensor_modes, H100)

GPU_ROWS = (
#       op                      operands, result           compute      rules  min_arch, max_arch, min_version, calls
    Row("contract",             (F16, F16, F16),           COMP_32F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (BF16, BF16, BF16),        COMP_32F,    SUMS,  SM80,  None, V2,  *CONTRACT),
    Row("contract",             (F32, F32, F32),           COMP_32F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (F32, F32, F32),           FAST_TF32,   SUMS,  SM80,  None, V2,  *CONTRACT),
    Row("contract",             (F32, F32, F32),           FAST_3XTF32, SUMS,  SM80,  None, V2,  *CONTRACT),
    Row("contract",             (F32, F32, F32),           FAST_16BF,   SUMS,  SM80,  None, V2,  *CONTRACT),
    Row("contract",             (F32, F32, F32),           FAST_16F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (F32, F32, F32),           EMUL_9X16BF, SUMS,  SM90,  None, V23, *CONTRACT),
    Row("contract",             (F32, F32, F32),           EMUL_4X16F,  SUMS,  SM100, None, V25, *CONTRACT[:3]),
    Row("contract",             (F64, F64, F64),           COMP_64F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (F64, F64, F64),           COMP_32F,    ASKED, SM75,  None, V2,  *CONTRACT),
    Row("contract",             (F64, F64, F64),           EMUL_8XINT8, SUMS,  SM90,  None, V25, *CONTRACT),
    Row("contract",             (C64, C64, C64),           COMP_32F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (C64, C64, C64),           FAST_TF32,   SUMS,  SM80,  None, V2,  *CONTRACT),
    Row("contract",             (C64, C64, C64),           FAST_3XTF32, SUMS,  SM80,  None, V2,  *CONTRACT),
    Row("contract",             (C64, C64, C64),           EMUL_9X16BF, SUMS,  SM90,  None, V23, *CONTRACT),
    Row("contract",             (C64, C64, C64),           EMUL_4X16F,  SUMS,  SM100, None, V25, *CONTRACT[:3]),
    Row("contract",             (C128, C128, C128),        COMP_64F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (C128, C128, C128),        COMP_32F,    ASKED, SM75,  None, V2,  *CONTRACT),
    Row("contract",             (C128, C128, C128),        EMUL_8XINT8, SUMS,  SM90,  None, V25, *CONTRACT),
    Row("contract",             (F64, C128, C128),         COMP_64F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract",             (C128, F64, C128),         COMP_64F,    SUMS,  SM75,  None, V2,  *CONTRACT),
    Row("contract_trinary",     (F16, F16, F16, F16),      COMP_32F,    THREE, SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (BF16, BF16, BF16, BF16),  COMP_32F,    THREE, SM80,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      COMP_32F,    THREE, SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      FAST_TF32,   THREE, SM80,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      FAST_3XTF32, THREE, SM80,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      FAST_16BF,   THREE, SM80,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      FAST_16F,    THREE, SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      EMUL_9X16BF, THREE, SM90,  None, V23, *TRINARY),
    Row("contract_trinary",     (F32, F32, F32, F32),      EMUL_4X16F,  THREE, SM100, None, V25, *TRINARY[:3]),
    Row("contract_trinary",     (F64, F64, F64, F64),      COMP_64F,    THREE, SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F64, F64, F64, F64),      COMP_32F,    ASK3,  SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (F64, F64, F64, F64),      EMUL_8XINT8, THREE, SM90,  None, V25, *TRINARY),
    Row("contract_trinary",     (C64, C64, C64, C64),      COMP_32F,    THREE, SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (C64, C64, C64, C64),      FAST_TF32,   THREE, SM80,  None, V2,  *TRINARY),
    Row("contract_trinary",     (C64, C64, C64, C64),      FAST_3XTF32, THREE, SM80,  None, V2,  *TRINARY),
    Row("contract_trinary",     (C64, C64, C64, C64),      EMUL_9X16BF, THREE, SM90,  None, V23, *TRINARY),
    Row("contract_trinary",     (C64, C64, C64, C64),      EMUL_4X16F,  THREE, SM100, None, V25, *TRINARY[:3]),
    Row("contract_trinary",     (C128, C128, C128, C128),  COMP_64F,    THREE, SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (C128, C128, C128, C128),  COMP_32F,    ASK3,  SM75,  None, V2,  *TRINARY),
    Row("contract_trinary",     (C128, C128, C128, C128),  EMUL_8XINT8, THREE, SM90,  None, V25, *TRINARY),
    Row("reduce_modes",         (F16, F16),                COMP_32F,    SUMS,  SM75,  None, V2,  *REDUCE),
    Row("reduce_modes",         (F16, F16),                COMP_16F,    SUMS,  SM75,  None, V2,  *REDUCE),
    Row("reduce_modes",         (BF16, BF16),              COMP_32F,    SUMS,  SM80,  None, V2,  *REDUCE),
    Row("reduce_modes",         (BF16, BF16),              FAST_16BF,   SUMS,  SM80,  None, V2,  *REDUCE),
    Row("reduce_modes",         (F32, F32),                COMP_32F,    SUMS,  SM75,  None, V2,  *REDUCE),
    Row("reduce_modes",         (F64, F64),                COMP_64F,    SUMS,  SM75,  None, V2,  *REDUCE),
    Row("reduce_modes",         (C64, C64),                COMP_32F,    SUMS,  SM75,  None, V2,  *REDUCE),
    Row("reduce_modes",         (C128, C128),              COMP_64F,    SUMS,  SM75,  None, V2,  *REDUCE),
    Row("permute",              (F16, F16),                COMP_32F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (F16, F16),                COMP_16F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (BF16, BF16),              COMP_32F,    EACH,  SM80,  None, V2,  *PERMUTE),
    Row("permute",              (BF16, BF16),              FAST_16BF,   EACH,  SM80,  None, V2,  *PERMUTE),
    Row("permute",              (F32, F32),                COMP_32F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (F64, F64),                COMP_64F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (C64, C64),                COMP_32F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (C128, C128),              COMP_64F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (F16, F32),                COMP_32F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (F32, F16),                COMP_32F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (F32, F64),                COMP_64F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (F64, F32),                COMP_64F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (C64, C128),               COMP_64F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("permute",              (C128, C64),               COMP_64F,    EACH,  SM75,  None, V2,  *PERMUTE),
    Row("elementwise_binary",   (F16, F16),                COMP_32F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (F16, F16),                COMP_16F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (BF16, BF16),              COMP_32F,    EACH,  SM80,  None, V2,  *BINARY),
    Row("elementwise_binary",   (BF16, BF16),              FAST_16BF,   EACH,  SM80,  None, V2,  *BINARY),
    Row("elementwise_binary",   (F32, F32),                COMP_32F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (F64, F64),                COMP_64F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (C64, C64),                COMP_32F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (C128, C128),              COMP_64F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (F32, F16),                COMP_32F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (F64, F32),                COMP_64F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_binary",   (C128, C64),               COMP_64F,    EACH,  SM75,  None, V2,  *BINARY),
    Row("elementwise_trinary",  (F16, F16, F16),           COMP_32F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (F16, F16, F16),           COMP_16F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (BF16, BF16, BF16),        COMP_32F,    EACH,  SM80,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (BF16, BF16, BF16),        FAST_16BF,   EACH,  SM80,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (F32, F32, F32),           COMP_32F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (F64, F64, F64),           COMP_64F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (C64, C64, C64),           COMP_32F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (C128, C128, C128),        COMP_64F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (F32, F32, F16),           COMP_32F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (F64, F64, F32),           COMP_64F,    EACH,  SM75,  None, V2,  *TERNARY),
    Row("elementwise_trinary",  (C128, C128, C64),         COMP_64F,    EACH,  SM75,  None, V2,  *TERNARY),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, numpy_modes, function="einsum", stands_for="cutensor") for row in GPU_ROWS)))
