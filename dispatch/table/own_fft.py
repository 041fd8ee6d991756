"""The rows of ops around Fourier transforms with kernels of our own, compiled by NVRTC."""

# fmt: off
from __future__ import annotations

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import IEEE, NONE
from dispatch.core.row import Row
from dispatch.keys import BF16, BOOL, C64, C128, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32, U64, Arch
from dispatch.ops.fft.roll import numpy_roll, nvrtc_roll, twelve_axes
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75 = Arch(75)
RULES = (aligned, twelve_axes)
FLOATS = (F64, F32, F16, BF16, F8E4M3, F8E5M2, C64, C128)
WHOLE  = (I8, U8, I32, U32, I64, U64, BOOL)
H100 = ("H100",)
ROLL   = ("own", "roll", nvrtc_roll, H100)

GPU_ROWS = (
    *(Row("roll", (dtype, dtype), None, RULES, SM75, None, (), *ROLL, nonfinite=IEEE) for dtype in FLOATS),
    *(Row("roll", (dtype, dtype), None, RULES, SM75, None, (), *ROLL, nonfinite=NONE) for dtype in WHOLE),
)
# fmt: on
ROWS = (*GPU_ROWS, *(on_host(row, numpy_roll) for row in GPU_ROWS))
