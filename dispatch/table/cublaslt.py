"""The rows of matmul by cuBLASLt: one for each combination that cublasLtMatmul takes.

`select.py` tries them from top to bottom, and the first that takes a request runs it; `core/row.py` documents the
columns; the functions are in `ops/matmul`. `run_on` names the machines on which `cublasLtMatmulAlgoGetHeuristic`
accepts a row and all its cases pass; it is empty where no machine has run them yet.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.fusion import Fusion
from dispatch.core.row import Row
from dispatch.keys import (
    BF16,
    C64,
    C128,
    F4E2M1,
    F8E4M3,
    F8E5M2,
    F16,
    F32,
    F64,
    I8,
    I32,
    Arch,
    Compute,
    Epilogue,
    ScaleMode,
)
from dispatch.ops.matmul import cublaslt_matmul, exact_gelu_matmul, numpy_matmul
from dispatch.ops.matmul.rules import (
    aligned_factors,
    aligned_vectors,
    bgrad_order,
    bytes_by_16,
    extents_by_4,
    fp8_aux_scales,
    fp8_d_scales,
    full_precision,
    gelu_asked,
    k_by_32,
    k_dense,
    no_fast_accum,
    no_scales,
    one_product,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

E = Epilogue
ALL     = tuple(E)
FORWARD = (E.NONE, E.RELU, E.GELU, E.BIAS, E.RELU_BIAS, E.GELU_BIAS)
NO_BG   = tuple(e for e in E if e not in (E.BGRADA, E.BGRADB))                        # fp8 has no gradient of its operands
TO_F32  = (*FORWARD, E.RELU_AUX, E.RELU_AUX_BIAS, E.GELU_AUX, E.DRELU, E.DGELU)       # fp8 -> f32
TO_FP8  = (*FORWARD, E.RELU_AUX, E.RELU_AUX_BIAS, E.GELU_AUX, E.GELU_AUX_BIAS)        # fp8 -> fp8
SCALED  = (*FORWARD, E.RELU_AUX, E.DRELU, E.DGELU, E.DRELU_BGRAD, E.DGELU_BGRAD)      # scales by vector or block
GELUS   = tuple(e for e in E if e.activation == "gelu")
S_F32   = (E.NONE, E.RELU, E.GELU, E.RELU_AUX, E.DRELU, E.DGELU)                      # the same -> f32

COMP_64F, COMP_32F, COMP_32I = Compute.COMPUTE_64F, Compute.COMPUTE_32F, Compute.COMPUTE_32I
COMP_16F = Compute.COMPUTE_16F
FAST_TF32, FAST_16BF, FAST_16F = Compute.COMPUTE_32F_FAST_TF32, Compute.COMPUTE_32F_FAST_16BF, Compute.COMPUTE_32F_FAST_16F

M = ScaleMode
TENSOR   = ((None, None), (M.SCALAR_32F, None), (None, M.SCALAR_32F), (M.SCALAR_32F, M.SCALAR_32F))
OUTER    = ((M.OUTER_VEC_32F, M.OUTER_VEC_32F),)
VEC_VEC  = ((M.VEC128_32F, M.VEC128_32F),)
VEC_BLK  = ((M.VEC128_32F, M.BLK128x128_32F),)
BLK_VEC  = ((M.BLK128x128_32F, M.VEC128_32F),)
MX       = ((M.VEC32_UE8M0, M.VEC32_UE8M0),)
NV       = ((M.VEC16_UE4M3, M.VEC16_UE4M3),)

PLAIN  = (no_fast_accum, no_scales)
FLOAT  = (bgrad_order, aligned_vectors, *PLAIN)
EXACT  = (full_precision, aligned_vectors, *PLAIN)                                                     # f64: GELU with the precision of the sums
DOUBLE = (gelu_asked, *FLOAT)                                                         # f64: the library's GELU
INT8   = (extents_by_4, no_fast_accum, no_scales)
FP8    = (k_dense, bytes_by_16, aligned_vectors, fp8_d_scales)
FP8_D  = (k_dense, bytes_by_16, aligned_vectors, fp8_aux_scales)
FP8_V  = (k_dense, bytes_by_16, aligned_vectors, fp8_d_scales, one_product)
FP8_B  = (*FP8_V, aligned_factors, no_fast_accum)
BLOCKS = (*FP8_V, aligned_factors, k_by_32, no_fast_accum)

SM80, SM90, SM100 = Arch(80), Arch(90), Arch(100)
LT   = ("cublasLt", "cublasLtMatmul", cublaslt_matmul)
LT_G = ("cublasLt", "cublasLtMatmul", exact_gelu_matmul)
H200 = ("H200",)
BEHIND = "GELU and its gradient are computed by a kernel of this library after the product"
ROUGH  = "GELU and its gradient have an error of up to 3e-10 times their argument"
NEAR   = "GELU has an error of up to 5e-6 times its argument, its gradient of 2e-5"
V12  = (12, 9)

GPU_ROWS = (
#       op        a       b       c     d         compute    rules                                  fusion: bias, aux of GELU; epilogues; scales
#                                                                    min_arch, max_arch, min_version, calls, run_on
    Row("matmul", (F64,    F64,    F64,  F64),    COMP_64F,  DOUBLE, SM80,  None, V12, *LT,   H200, Fusion(((F64,), (F64,)),        ALL),                note=ROUGH),
    Row("matmul", (F32,    F32,    F32,  F32),    COMP_32F,  FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F32,), (F32,)),        ALL),                note=NEAR),
    Row("matmul", (F32,    F32,    F32,  F32),    FAST_TF32, FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F32,), (F32,)),        ALL)),
    Row("matmul", (F32,    F32,    F32,  F32),    FAST_16BF, FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F32,), (F32,)),        ALL)),
    Row("matmul", (F32,    F32,    F32,  F32),    FAST_16F,  FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F32,), (F32,)),        ALL)),
    Row("matmul", (F16,    F16,    F16,  F16),    COMP_32F,  FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        ALL)),
    Row("matmul", (F16,    F16,    F16,  F16),    COMP_16F,  PLAIN,  SM80,  None, V12, *LT,   ("H100",), Fusion(((F16,), (F16,)))),
    Row("matmul", (F16,    F16,    F32,  F32),    COMP_32F,  FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F32,), (F32,)),        ALL),                note=NEAR),
    Row("matmul", (BF16,   BF16,   BF16, BF16),   COMP_32F,  FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      ALL)),
    Row("matmul", (BF16,   BF16,   F32,  F32),    COMP_32F,  FLOAT,  SM80,  None, V12, *LT,   H200, Fusion(((F32,), (F32,)),        ALL),                note=NEAR),
    Row("matmul", (I8,     I8,     I32,  I32),    COMP_32I,  INT8,   SM80,  None, V12, *LT,   H200, Fusion(((I32,), (I32,)))),
    Row("matmul", (C64,    C64,    C64,  C64),    COMP_32F,  PLAIN,  SM80,  None, V12, *LT,   H200, Fusion(((C64,), (C64,)))),
    Row("matmul", (C64,    C64,    C64,  C64),    FAST_TF32, PLAIN,  SM80,  None, V12, *LT,   H200, Fusion(((C64,), (C64,)))),
    Row("matmul", (C64,    C64,    C64,  C64),    FAST_16BF, PLAIN,  SM80,  None, V12, *LT,   H200, Fusion(((C64,), (C64,)))),
    Row("matmul", (C64,    C64,    C64,  C64),    FAST_16F,  PLAIN,  SM80,  None, V12, *LT,   H200, Fusion(((C64,), (C64,)))),
    Row("matmul", (C128,   C128,   C128, C128),   COMP_64F,  PLAIN,  SM80,  None, V12, *LT,   H200, Fusion(((C128,), (C128,)))),
    Row("matmul", (F64,    F64,    F64,  F64),    COMP_64F,  EXACT,  SM80,  None, V12, *LT_G, H200, Fusion(((F64,), (F64,)),        GELUS),              variant="exact GELU", note=BEHIND),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      NO_BG,   TENSOR)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        NO_BG,   TENSOR)),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       TO_F32,  TENSOR)),
    Row("matmul", (F8E4M3, F8E4M3, BF16, F8E4M3), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      TO_FP8,  TENSOR)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F8E4M3), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16, F8E4M3)), TO_FP8,  TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      NO_BG,   TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F16),    COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        NO_BG,   TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       TO_F32,  TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, F8E4M3), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      TO_FP8,  TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, F8E5M2), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      TO_FP8,  TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F8E4M3), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        TO_FP8,  TENSOR)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F8E5M2), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        TO_FP8,  TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      NO_BG,   TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F16),    COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        NO_BG,   TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    COMP_32F,  FP8,    SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       TO_F32,  TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, F8E4M3), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      TO_FP8,  TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, F8E5M2), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      TO_FP8,  TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F8E4M3), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        TO_FP8,  TENSOR)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F8E5M2), COMP_32F,  FP8_D,  SM90,  None, V12, *LT,   H200, Fusion(((F16,), (F16,)),        TO_FP8,  TENSOR)),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  OUTER)),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  VEC_VEC)),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  VEC_BLK)),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  BLK_VEC)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  OUTER)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  VEC_VEC)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  VEC_BLK)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  BLK_VEC)),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   OUTER)),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   VEC_VEC)),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   VEC_BLK)),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   BLK_VEC)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  OUTER)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  VEC_VEC)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  VEC_BLK)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  BLK_VEC)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F16),    COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  OUTER)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  VEC_VEC)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  VEC_BLK)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  BLK_VEC)),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   OUTER)),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   VEC_VEC)),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   VEC_BLK)),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   BLK_VEC)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  OUTER)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  VEC_VEC)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  VEC_BLK)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (BF16,)),      SCALED,  BLK_VEC)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F16),    COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  OUTER)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  VEC_VEC)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  VEC_BLK)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F16),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((F16,), (F16,)),        SCALED,  BLK_VEC)),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    COMP_32F,  FP8_V,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   OUTER)),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   VEC_VEC)),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   VEC_BLK)),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    COMP_32F,  FP8_B,  SM90,  SM90, V12, *LT,   H200, Fusion(((BF16,), (F32,)),       S_F32,   BLK_VEC)),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (BF16,)),      FORWARD, MX)),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (BF16,)),      FORWARD, MX)),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (BF16,)),      FORWARD, MX)),
    Row("matmul", (F4E2M1, F4E2M1, BF16, BF16),   COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (BF16,)),      FORWARD, NV)),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((F16,), (F16,)),        FORWARD, MX)),
    Row("matmul", (F8E4M3, F8E5M2, F16,  F16),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((F16,), (F16,)),        FORWARD, MX)),
    Row("matmul", (F8E5M2, F8E4M3, F16,  F16),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((F16,), (F16,)),        FORWARD, MX)),
    Row("matmul", (F4E2M1, F4E2M1, F16,  F16),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((F16,), (F16,)),        FORWARD, NV)),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (F32,)),       FORWARD, MX)),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (F32,)),       FORWARD, MX)),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (F32,)),       FORWARD, MX)),
    Row("matmul", (F4E2M1, F4E2M1, F32,  F32),    COMP_32F,  BLOCKS, SM100, None, V12, *LT,         fusion=Fusion(((BF16,), (F32,)),       FORWARD, NV)),
)
# fmt: on

HOST_ROWS = tuple(on_host(row, numpy_matmul, function="matmul", stands_for="cublasLt") for row in GPU_ROWS)

ROWS = (*GPU_ROWS, *HOST_ROWS)
