"""The rows by CUTLASS kernels, compiled by NVRTC.

`table.py` imports this file when one of its ops is first looked up. `run_on` names the machines on which all cases of a
row have passed; it is empty where no machine has run them yet.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from dispatch.core.fusion import Fusion
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, Arch, Compute, Epilogue
from dispatch.ops.conv import cutlass_conv, multistage_conv, numpy_tree_conv
from dispatch.ops.conv import rules as conv
from dispatch.ops.grouped_matmul import cutlass_plan as grouped_plan
from dispatch.ops.grouped_matmul import numpy_plan as grouped_numpy
from dispatch.ops.grouped_matmul.rules import by_16_bytes as by_16
from dispatch.ops.grouped_matmul.rules import k_dense as b_k_dense
from dispatch.ops.grouped_matmul.rules import no_fast_accum as no_fast
from dispatch.ops.grouped_matmul.rules import one_order, rows_dense
from dispatch.ops.grouped_matmul.rules import some_elements as some_groups
from dispatch.ops.matmul import blackwell_matmul, cutlass_matmul, multistage_matmul, numpy_tree_matmul
from dispatch.ops.matmul.cutlass_rules import (
    buildable,
    by_4_bytes,
    by_16_bytes,
    dense_vectors,
    k_dense,
    linear,
    no_fast_accum,
    no_limit,
    one_batch_axis,
    some_elements,
    whole_numbers,
)
from dispatch.ops.matmul.rules import no_scales
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

TF32 = Compute.COMPUTE_32F_FAST_TF32
PLAIN = (some_elements, no_scales, no_limit)
ANY  = (*PLAIN, one_batch_axis, by_16_bytes, dense_vectors, buildable, no_fast_accum)
K    = (*PLAIN, one_batch_axis, by_16_bytes, k_dense, dense_vectors, buildable, no_fast_accum)
K_I  = (*PLAIN, one_batch_axis, by_16_bytes, k_dense, dense_vectors, buildable, no_fast_accum, whole_numbers)
FP8  = (*PLAIN, one_batch_axis, by_16_bytes, k_dense, dense_vectors, buildable)
M_S  = (*PLAIN, one_batch_axis, by_4_bytes, linear, no_fast_accum)
M_I  = (*PLAIN, one_batch_axis, by_4_bytes, linear, no_fast_accum, k_dense, whole_numbers)
B    = (*PLAIN, one_batch_axis, by_16_bytes, linear, no_fast_accum)
B_8  = (*PLAIN, one_batch_axis, by_16_bytes, linear, no_fast_accum, k_dense)
SM80, SM90, SM100, SM120 = Arch(80), Arch(90), Arch(100), Arch(120)
ANY_VERSION: tuple[int, ...] = ()
CUT  = ("cutlass", "GemmUniversal", cutlass_matmul)
CUTB = ("cutlass", "GemmUniversal", blackwell_matmul)
CUT80 = ("cutlass", "DefaultGemmUniversal", multistage_matmul)
H200 = ("H200",)
E = Epilogue
# A bias may have any of these dtypes, for any dtype of D; the named epilogues are translated to trees.
TREES  = Fusion(((F16, BF16, F32), ()), (E.NONE, E.RELU, E.GELU, E.BIAS, E.RELU_BIAS, E.GELU_BIAS), trees=True)
LINEAR = Fusion(((), ()), trees=True)  # rules admit only alpha · acc + beta · C

GPU_ROWS = (
#       op        a       b       c     d         compute   rules
#                                                                min_arch, max_arch, min_version, calls, run_on
    Row("matmul", (F16,    F16,    F16,  F16),    None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F16,    F16,    F32,  F32),    None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F16,    F16,    F16,  F8E4M3), None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F16,    F16,    F16,  I8),     None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (BF16,   BF16,   BF16, BF16),   None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (BF16,   BF16,   F32,  F32),    None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (BF16,   BF16,   BF16, F8E4M3), None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (BF16,   BF16,   BF16, I8),     None,     ANY, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F32,    F32,    F32,  F32),    TF32,     K,   SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (I8,     I8,     I32,  I32),    None,     K_I, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (I8,     I8,     F32,  F32),    None,     K,   SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (I8,     I8,     BF16, BF16),   None,     K,   SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (I8,     I8,     I8,   I8),     None,     K,   SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16),   None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E4M3, F8E4M3, F16,  F16),    None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),    None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E4M3, F8E4M3, BF16, F8E4M3), None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16),   None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E4M3, F8E5M2, F32,  F32),    None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16),   None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E5M2, F8E4M3, F32,  F32),    None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E5M2, F8E5M2, BF16, BF16),   None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F8E5M2, F8E5M2, F32,  F32),    None,     FP8, SM90, SM90, ANY_VERSION, *CUT,   H200, TREES),
    Row("matmul", (F64,    F64,    F64,  F64),    None,     M_S, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
    Row("matmul", (F32,    F32,    F32,  F32),    TF32,     M_S, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
    Row("matmul", (F16,    F16,    F16,  F16),    None,     M_S, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
    Row("matmul", (F16,    F16,    F32,  F32),    None,     M_S, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
    Row("matmul", (BF16,   BF16,   BF16, BF16),   None,     M_S, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
    Row("matmul", (BF16,   BF16,   F32,  F32),    None,     M_S, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
    Row("matmul", (I8,     I8,     I32,  I32),    None,     M_I, SM80, None, ANY_VERSION, *CUT80, H200, LINEAR),
)

# Compiled for Blackwell in tests only: for sm_100, and in fp8 for sm_120, which uses the rows of sm_80 for 16 bits.
BLACKWELL_ROWS = (
    Row("matmul", (F16,    F16,    F16,  F16),  None, B,   SM100, SM100, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (F16,    F16,    F32,  F32),  None, B,   SM100, SM100, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (BF16,   BF16,   BF16, BF16), None, B,   SM100, SM100, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (BF16,   BF16,   F32,  F32),  None, B,   SM100, SM100, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (F8E4M3, F8E4M3, BF16, BF16), None, B_8, SM100, SM120, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (F8E4M3, F8E4M3, F32,  F32),  None, B_8, SM100, SM120, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (F8E4M3, F8E5M2, BF16, BF16), None, B_8, SM100, SM120, ANY_VERSION, *CUTB, fusion=LINEAR),
    Row("matmul", (F8E5M2, F8E4M3, BF16, BF16), None, B_8, SM100, SM120, ANY_VERSION, *CUTB, fusion=LINEAR),
)

GROUPED = (by_16, rows_dense, one_order, some_groups, no_fast)
GROUPED_8 = (by_16, rows_dense, some_groups, b_k_dense)
GROUPED_CUT = ("cutlass", "GemmUniversal", grouped_plan)
GROUPED_ROWS = (
    Row("grouped_matmul", (F16,    F16,    F16,  F16),  None, GROUPED,   SM90, SM90, ANY_VERSION, *GROUPED_CUT, H200),
    Row("grouped_matmul", (F16,    F16,    F32,  F32),  None, GROUPED,   SM90, SM90, ANY_VERSION, *GROUPED_CUT, H200),
    Row("grouped_matmul", (BF16,   BF16,   BF16, BF16), None, GROUPED,   SM90, SM90, ANY_VERSION, *GROUPED_CUT, H200),
    Row("grouped_matmul", (BF16,   BF16,   F32,  F32),  None, GROUPED,   SM90, SM90, ANY_VERSION, *GROUPED_CUT, H200),
    Row("grouped_matmul", (F8E4M3, F8E4M3, BF16, BF16), None, GROUPED_8, SM90, SM90, ANY_VERSION, *GROUPED_CUT, H200),
)

# Convolution by im2col tensor maps; multistage kernels support the strides that these maps cannot express.
IM2COL   = (conv.no_cudnn_choices, conv.one_group, conv.channels_last, conv.by_16_bytes, conv.im2col_limits, conv.dense_vectors, conv.buildable)
IM2COL_D = (*IM2COL, conv.unit_stride)
IM2COL_W = (conv.no_cudnn_choices, conv.one_group, conv.channels_last, conv.by_16_bytes, conv.im2col_limits, conv.scalars_only)
CONV_M   = (conv.no_cudnn_choices, conv.grouped_forward, conv.channels_last, conv.by_4_bytes, conv.multistage_limits, conv.linear)
CONV_MG  = (conv.no_cudnn_choices, conv.one_group, conv.channels_last, conv.by_4_bytes, conv.multistage_limits, conv.linear)
CONV_CUT = ("cutlass", "CollectiveConv", cutlass_conv)
CONV_CUT80 = ("cutlass", "ImplicitGemmConvolution", multistage_conv)
CONV_ROWS = (
#       op                 x | dy w | x result compute   rules                                                 fusion: (bias,) z
#                                                                  min_arch, max_arch, min_version, calls, run_on
    Row("conv_fwd",        (F16,  F16,  F16),  None,     IM2COL,   SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((), (F16,)))),
    Row("conv_fwd",        (BF16, BF16, BF16), None,     IM2COL,   SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((), (BF16,)))),
    Row("conv_fwd",        (F32,  F32,  F32),  TF32,     IM2COL,   SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((), (F32,)))),
    Row("conv_fwd",        (F16,  F16,  F16),  None,     CONV_M,   SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((), (F16,)))),
    Row("conv_fwd",        (BF16, BF16, BF16), None,     CONV_M,   SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((), (BF16,)))),
    Row("conv_fwd",        (F32,  F32,  F32),  TF32,     CONV_M,   SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((), (F32,)))),
    Row("conv_bwd_data",   (F16,  F16,  F16),  None,     IM2COL_D, SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((F16,),))),
    Row("conv_bwd_data",   (BF16, BF16, BF16), None,     IM2COL_D, SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((BF16,),))),
    Row("conv_bwd_data",   (F16,  F16,  F16),  None,     CONV_MG,  SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((F16,),))),
    Row("conv_bwd_data",   (BF16, BF16, BF16), None,     CONV_MG,  SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((BF16,),))),
    Row("conv_bwd_data",   (F32,  F32,  F32),  TF32,     CONV_MG,  SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((F32,),))),
    Row("conv_bwd_filter", (F16,  F16,  F16),  None,     IM2COL_W, SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((F16,),))),
    Row("conv_bwd_filter", (BF16, BF16, BF16), None,     IM2COL_W, SM90, SM90, ANY_VERSION, *CONV_CUT,   H200, Fusion(((BF16,),))),
    Row("conv_bwd_filter", (F16,  F16,  F16),  None,     CONV_MG,  SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((F16,),))),
    Row("conv_bwd_filter", (BF16, BF16, BF16), None,     CONV_MG,  SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((BF16,),))),
    Row("conv_bwd_filter", (F32,  F32,  F32),  TF32,     CONV_MG,  SM80, None, ANY_VERSION, *CONV_CUT80, H200, Fusion(((F32,),))),
)

HOST_ROWS = tuple(
    on_host(row, numpy_tree_matmul, library={SM80: "numpy-multistage", SM90: "numpy-cutlass", SM100: "numpy-blackwell"}[row.min_arch], function="matmul", stands_for="cutlass")
    for row in (*BLACKWELL_ROWS, *GPU_ROWS)
)
GROUPED_HOST_ROWS = tuple(
    on_host(row, grouped_numpy, function="matmul", stands_for="cutlass")
    for row in GROUPED_ROWS
)
CONV_HOST_ROWS = tuple(
    on_host(row, numpy_tree_conv, library="numpy-cutlass" if row.min_arch == SM90 else "numpy-multistage", function="convolve", stands_for="cutlass")
    for row in CONV_ROWS
)

ROWS = stated((*BLACKWELL_ROWS, *GPU_ROWS, *GROUPED_ROWS, *CONV_ROWS, *HOST_ROWS, *GROUPED_HOST_ROWS, *CONV_HOST_ROWS))
