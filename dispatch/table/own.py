"""The rows of ops with kernels of our own, compiled by NVRTC."""

# fmt: off
from __future__ import annotations

from typing import Any

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import IEEE, stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F16, F32, F64, I8, Arch, Compute
from dispatch.ops.attention_merge import numpy_attention_merge, nvrtc_attention_merge
from dispatch.ops.gated import numpy_gated, nvrtc_gated, six_axes
from dispatch.ops.reduction import numpy_reduce
from dispatch.ops.reduction.of_one import nvrtc_of_one, of_one
from dispatch.ops.rope import numpy_rope, nvrtc_rope
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

COMP_64F, COMP_32F = Compute.COMPUTE_64F, Compute.COMPUTE_32F
SM75, SM80 = Arch(75), Arch(80)  # the oldest target of NVRTC 13; bf16 instructions exist from sm_80 on

H100      = ("H100",)
ROPE      = ("own", "rope",                 nvrtc_rope, H100)
MERGE     = ("own", "attention_merge",      nvrtc_attention_merge, ("H200",))
GATED     = ("own", "gated_activation",     nvrtc_gated, H100)
OF_ONE    = ("own", "reduce_of_one",        nvrtc_of_one, ("H200",))
NOTES: dict[str, Any] = {"variant": "of one", "nonfinite": IEEE}
GATED_BWD = ("own", "gated_activation_bwd", nvrtc_gated, H100)

GPU_ROWS = (
#       op                      first result   compute    rules
#                                                                     min_arch, max_arch, min_version, calls, run_on
    Row("rope",                 (F64,  F64),   COMP_64F,  (aligned,),  SM75, None, (), *ROPE),
    Row("rope",                 (F32,  F32),   COMP_32F,  (aligned,),  SM75, None, (), *ROPE),
    Row("rope",                 (F16,  F16),   COMP_32F,  (aligned,),  SM75, None, (), *ROPE),
    Row("rope",                 (BF16, BF16),  COMP_32F,  (aligned,),  SM80, None, (), *ROPE),
    Row("gated_activation",     (F64,  F64),   COMP_64F,  (six_axes,), SM75, None, (), *GATED),
    Row("gated_activation",     (F32,  F32),   COMP_32F,  (six_axes,), SM75, None, (), *GATED),
    Row("gated_activation",     (F16,  F16),   COMP_32F,  (six_axes,), SM75, None, (), *GATED),
    Row("gated_activation",     (BF16, BF16),  COMP_32F,  (six_axes,), SM80, None, (), *GATED),
    Row("gated_activation_bwd", (F64,  F64),   COMP_64F,  (six_axes,), SM75, None, (), *GATED_BWD),
    Row("gated_activation_bwd", (F32,  F32),   COMP_32F,  (six_axes,), SM75, None, (), *GATED_BWD),
    Row("gated_activation_bwd", (F16,  F16),   COMP_32F,  (six_axes,), SM75, None, (), *GATED_BWD),
    Row("gated_activation_bwd", (BF16, BF16),  COMP_32F,  (six_axes,), SM80, None, (), *GATED_BWD),
    Row("reduce",               (F64,  F64),   COMP_64F,  (of_one,),   SM75, None, (), *OF_ONE, **NOTES),
    Row("reduce",               (F32,  F32),   COMP_32F,  (of_one,),   SM75, None, (), *OF_ONE, **NOTES),
    Row("reduce",               (F32,  F16),   COMP_32F,  (of_one,),   SM75, None, (), *OF_ONE, **NOTES),
    Row("reduce",               (F16,  F16),   COMP_32F,  (of_one,),   SM75, None, (), *OF_ONE, **NOTES),
    Row("reduce",               (F16,  F32),   COMP_32F,  (of_one,),   SM75, None, (), *OF_ONE, **NOTES),
    Row("reduce",               (BF16, F32),   COMP_32F,  (of_one,),   SM80, None, (), *OF_ONE, **NOTES),
    Row("reduce",               (I8,   F32),   COMP_32F,  (of_one,),   SM75, None, (), *OF_ONE, **NOTES),
#       op             a,    b,    out     compute    rules
    Row("attention_merge", (F16,  F16,  F32),   COMP_32F, (aligned,), SM75, None, (), *MERGE),
    Row("attention_merge", (F16,  F16,  F16),   COMP_32F, (aligned,), SM75, None, (), *MERGE),
    Row("attention_merge", (F32,  F16,  F32),   COMP_32F, (aligned,), SM75, None, (), *MERGE),
    Row("attention_merge", (F32,  F16,  F16),   COMP_32F, (aligned,), SM75, None, (), *MERGE),
    Row("attention_merge", (BF16, BF16, F32),   COMP_32F, (aligned,), SM80, None, (), *MERGE),
    Row("attention_merge", (BF16, BF16, BF16),  COMP_32F, (aligned,), SM80, None, (), *MERGE),
    Row("attention_merge", (F32,  BF16, F32),   COMP_32F, (aligned,), SM80, None, (), *MERGE),
    Row("attention_merge", (F32,  BF16, BF16),  COMP_32F, (aligned,), SM80, None, (), *MERGE),
    Row("attention_merge", (F32,  F32,  F32),   COMP_32F, (aligned,), SM75, None, (), *MERGE),
)
# fmt: on
NUMPY: dict[Any, Any] = {
    nvrtc_rope: numpy_rope,
    nvrtc_gated: numpy_gated,
    nvrtc_of_one: numpy_reduce,
    nvrtc_attention_merge: numpy_attention_merge,
}
ROWS = stated((*GPU_ROWS, *(on_host(row, NUMPY[row.call]) for row in GPU_ROWS)))
