"""The rows by graphs of cuDNN's backend: convolution, attention and norms.

`table.py` imports this file when one of its ops is first looked up. `run_on` names the machines on which all cases of a
row have passed; it is empty where no machine has run them yet.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from typing import Any

from dispatch.core.fusion import Fusion
from dispatch.core.layouts import at_16_bytes
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F8E4M3, F16, F32, F64, I8, Arch, Compute
from dispatch.ops.conv import cudnn_conv, numpy_conv
from dispatch.ops.conv.rules import (
    dense_filter,
    dense_nhwc,
    exact_tanh,
    fixed_epilogue,
    fp8_form,
    fuses_in_nhwc,
    gaps_in_one_order,
    no_tree,
    nothing_fused,
    something_fused,
)
from dispatch.ops.graph import cudnn_graph, numpy_graph
from dispatch.ops.norm import cudnn_norm, numpy_norm
from dispatch.ops.norm.rules import (
    bias_by_channel,
    channels_by_16_bytes,
    dense_order,
    grouped,
    instance_first,
    last_by_running,
    ungrouped,
)
from dispatch.ops.sdpa import cudnn_sdpa, numpy_sdpa
from dispatch.ops.sdpa.rules import (
    bounds,
    fp8_limits,
    heads_by_8,
    is_packed,
    not_packed,
    one_bias_gradient,
    scale_above_0,
    tokens_by_16_bytes,
    two_scores,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

COMP_64F, COMP_32F, COMP_32I, FAST_TF32 = Compute.COMPUTE_64F, Compute.COMPUTE_32F, Compute.COMPUTE_32I, Compute.COMPUTE_32F_FAST_TF32
SM75, SM80, SM90 = Arch(75), Arch(80), Arch(90)
V9, V9_10, V9_16 = (9, 0), (9, 10, 2), (9, 16)  # attention has known bugs before 9.10.2 and 9.16
ALONE_BY16 = (no_tree, at_16_bytes, gaps_in_one_order)
CONV = ("cudnn", "cudnnBackendExecute", cudnn_conv)
SDPA = ("cudnn", "cudnnBackendExecute", cudnn_sdpa)
MASK = (scale_above_0, at_16_bytes, tokens_by_16_bytes, heads_by_8, bounds)
PADDED, PACKED = (*MASK, not_packed), (*MASK, is_packed)
GRADIENT = (one_bias_gradient, two_scores)
DRAWN = ("cudnn", "cudnnBackendExecute", cudnn_graph)
EACH = (at_16_bytes, dense_order, channels_by_16_bytes, ungrouped)
NORM = ("cudnn", "cudnnBackendExecute", cudnn_norm)
H200 = ("H200",)

GPU_ROWS = (
#       op                 x | dy   w | x   result   compute    rules                                                                                     fusion: bias, z
#                                                                                                                        min_arch, max_arch, min_version, calls, run_on
    Row("conv_fwd",        (F64,    F64,    F64),    COMP_64F,  (*ALONE_BY16, dense_filter, fixed_epilogue, exact_tanh), SM75, None, V9,    *CONV,  H200, Fusion(((F64,), (F64,)))),
    Row("conv_fwd",        (F32,    F32,    F32),    COMP_32F,  (*ALONE_BY16, dense_filter, fuses_in_nhwc, exact_tanh),  SM75, None, V9,    *CONV,  H200, Fusion(((F32,), (F32,)))),
    Row("conv_fwd",        (F32,    F32,    F32),    FAST_TF32, (*ALONE_BY16, dense_filter, fuses_in_nhwc, exact_tanh),  SM80, None, V9,    *CONV,  H200, Fusion(((F32,), (F32,)))),
    Row("conv_fwd",        (F16,    F16,    F16),    COMP_32F,  (*ALONE_BY16, dense_filter, fuses_in_nhwc, exact_tanh),  SM75, None, V9,    *CONV,  H200, Fusion(((F16,), (F16,)))),
    Row("conv_fwd",        (BF16,   BF16,   BF16),   COMP_32F,  (*ALONE_BY16, dense_filter, fuses_in_nhwc, exact_tanh),  SM80, None, V9,    *CONV,  H200, Fusion(((BF16,), (BF16,)))),
    Row("conv_fwd",        (I8,     I8,     I8),     COMP_32I,  (*ALONE_BY16, dense_filter, nothing_fused),              SM75, None, V9,    *CONV,  H200, Fusion(((), ()))),
    Row("conv_fwd",        (I8,     I8,     F32),    COMP_32I,  (*ALONE_BY16, dense_nhwc, nothing_fused),                SM75, None, V9,    *CONV,  H200, Fusion(((), ()))),
    Row("conv_fwd",        (I8,     I8,     I8),     COMP_32I,  (*ALONE_BY16, dense_nhwc, something_fused),              SM80, None, V9,    *CONV,  H200, Fusion(((F32,), (I8, F32))), variant="fused"),
    Row("conv_fwd",        (I8,     I8,     F32),    COMP_32I,  (*ALONE_BY16, dense_nhwc, something_fused),              SM80, None, V9,    *CONV,  H200, Fusion(((F32,), (I8, F32))), variant="fused"),
    Row("conv_fwd",        (F8E4M3, F8E4M3, BF16),   COMP_32F,  (*ALONE_BY16, dense_nhwc, fp8_form),                     SM90, None, V9,    *CONV,  H200, Fusion(((BF16,), (BF16,)))),
    Row("conv_fwd",        (F8E4M3, F8E4M3, F16),    COMP_32F,  (*ALONE_BY16, dense_nhwc, fp8_form),                     SM90, None, V9,    *CONV,  H200, Fusion(((F16,), (F16,)))),
    Row("conv_fwd",        (F8E4M3, F8E4M3, F32),    COMP_32F,  (*ALONE_BY16, dense_nhwc, fp8_form),                     SM90, None, V9,    *CONV,  H200, Fusion(((F32,), (F32,)))),
    Row("conv_bwd_data",   (F64,    F64,    F64),    COMP_64F,  (*ALONE_BY16, dense_filter),                             SM75, None, V9,    *CONV,  H200),
    Row("conv_bwd_data",   (F32,    F32,    F32),    COMP_32F,  (*ALONE_BY16, dense_filter),                             SM75, None, V9,    *CONV,  H200),
    Row("conv_bwd_data",   (F32,    F32,    F32),    FAST_TF32, (*ALONE_BY16, dense_filter),                             SM80, None, V9,    *CONV,  H200),
    Row("conv_bwd_data",   (F16,    F16,    F16),    COMP_32F,  (*ALONE_BY16, dense_filter),                             SM75, None, V9,    *CONV,  H200),
    Row("conv_bwd_data",   (BF16,   BF16,   BF16),   COMP_32F,  (*ALONE_BY16, dense_filter),                             SM80, None, V9,    *CONV,  H200),
    Row("conv_bwd_filter", (F64,    F64,    F64),    COMP_64F,  (*ALONE_BY16, dense_filter),                             SM75, None, V9,    *CONV,  H200),
    Row("conv_bwd_filter", (F32,    F32,    F32),    COMP_32F,  (*ALONE_BY16, dense_filter),                             SM75, None, V9,    *CONV,  H200),
    Row("conv_bwd_filter", (F32,    F32,    F32),    FAST_TF32, (*ALONE_BY16, dense_filter),                             SM80, None, V9,    *CONV,  H200),
    Row("conv_bwd_filter", (F16,    F16,    F16),    COMP_32F,  (*ALONE_BY16, dense_filter),                             SM75, None, V9,    *CONV,  H200),
    Row("conv_bwd_filter", (BF16,   BF16,   BF16),   COMP_32F,  (*ALONE_BY16, dense_filter),                             SM80, None, V9,    *CONV,  H200),
#                          q       k       out                                                                                                            fusion: bias
    Row("sdpa_fwd",        (F16,    F16,    F16),    COMP_32F,  PADDED,                                                  SM80, None, V9_10, *SDPA,  H200, Fusion(((F16,),))),
    Row("sdpa_fwd",        (F16,    F16,    F16),    COMP_32F,  PACKED,                                                  SM90, None, V9_10, *SDPA,  H200, Fusion(((F16,),)),           variant="packed"),
    Row("sdpa_fwd",        (BF16,   BF16,   BF16),   COMP_32F,  PADDED,                                                  SM80, None, V9_10, *SDPA,  H200, Fusion(((BF16,),))),
    Row("sdpa_fwd",        (BF16,   BF16,   BF16),   COMP_32F,  PACKED,                                                  SM90, None, V9_10, *SDPA,  H200, Fusion(((BF16,),)),          variant="packed"),
    Row("sdpa_fwd",        (F8E4M3, F8E4M3, F8E4M3), COMP_32F,  (scale_above_0, at_16_bytes, fp8_limits),                SM90, None, V9_10, *SDPA,  H200, Fusion(((),))),
    Row("sdpa_bwd",        (F16,    F16,    F16),    COMP_32F,  (*PADDED, *GRADIENT),                                    SM80, None, V9_16, *SDPA,  H200, Fusion(((F16,),))),
    Row("sdpa_bwd",        (F16,    F16,    F16),    COMP_32F,  (*PACKED, *GRADIENT),                                    SM90, None, V9_16, *SDPA,  H200, Fusion(((F16,),)),           variant="packed"),
    Row("sdpa_bwd",        (BF16,   BF16,   BF16),   COMP_32F,  (*PADDED, *GRADIENT),                                    SM80, None, V9_16, *SDPA,  H200, Fusion(((BF16,),))),
    Row("sdpa_bwd",        (BF16,   BF16,   BF16),   COMP_32F,  (*PACKED, *GRADIENT),                                    SM90, None, V9_16, *SDPA,  H200, Fusion(((BF16,),)),          variant="packed"),
#                          x       y                                                                                                                      fusion: scale, bias
    Row("norm_fwd",        (F32,    F32),            COMP_32F,  (*EACH, bias_by_channel, last_by_running),               SM80, None, V9,    *NORM,  H200, Fusion(((F32,),))),
    Row("norm_fwd",        (F32,    F32),            COMP_32F,  (at_16_bytes, dense_order, grouped),                     SM80, None, V9,    *NORM,  H200, Fusion(((F32,),)),           variant="groups"),
    Row("norm_fwd",        (F16,    F16),            COMP_32F,  (*EACH, bias_by_channel, last_by_running),               SM80, None, V9,    *NORM,  H200, Fusion(((F32, F16),))),
    Row("norm_fwd",        (F16,    F16),            COMP_32F,  (at_16_bytes, dense_order, grouped),                     SM80, None, V9,    *NORM,  H200, Fusion(((F32,),)),           variant="groups"),
    Row("norm_fwd",        (BF16,   BF16),           COMP_32F,  (*EACH, bias_by_channel, last_by_running),               SM80, None, V9,    *NORM,  H200, Fusion(((F32, BF16),))),
    Row("norm_fwd",        (BF16,   BF16),           COMP_32F,  (at_16_bytes, dense_order, grouped),                     SM80, None, V9,    *NORM,  H200, Fusion(((F32,),)),           variant="groups"),
    Row("norm_bwd",        (F32,    F32),            COMP_32F,  (*EACH, instance_first),                                 SM80, None, V9,    *NORM,  H200, Fusion(((F32,),))),
    Row("norm_bwd",        (F32,    F32),            COMP_32F,  (at_16_bytes, dense_order, grouped),                     SM80, None, V9,    *NORM,  H200, Fusion(((F32,),)),           variant="groups"),
    Row("norm_bwd",        (F16,    F16),            COMP_32F,  (*EACH, instance_first),                                 SM80, None, V9,    *NORM,  H200, Fusion(((F32, F16),))),
    Row("norm_bwd",        (F16,    F16),            COMP_32F,  (at_16_bytes, dense_order, grouped),                     SM80, None, V9,    *NORM,  H200, Fusion(((F32,),)),           variant="groups"),
    Row("norm_bwd",        (BF16,   BF16),           COMP_32F,  (*EACH, instance_first),                                 SM80, None, V9,    *NORM,  H200, Fusion(((F32, BF16),))),
    Row("norm_bwd",        (BF16,   BF16),           COMP_32F,  (at_16_bytes, dense_order, grouped),                     SM80, None, V9,    *NORM,  H200, Fusion(((F32,),)),           variant="groups"),
#                          compute
    Row("cudnn_graph",     (F32,),                   COMP_32F,  (),                                                      SM75, None, V9,    *DRAWN, H200,                              note="SIN, COS and TAN of huge arguments (1e10) are those of 0"),
    Row("cudnn_graph",     (F64,),                   COMP_64F,  (),                                                      SM75, None, V9,    *DRAWN, H200),
)

NUMPY: dict[Any, Any] = {cudnn_conv: numpy_conv, cudnn_graph: numpy_graph, cudnn_norm: numpy_norm, cudnn_sdpa: numpy_sdpa}
HOST_ROWS = tuple(
    on_host(row, NUMPY[row.call], stands_for=row.library)
    for row in GPU_ROWS
)

ROWS = stated((*GPU_ROWS, *HOST_ROWS))
