"""The rows of Fourier transforms for cuFFT.

`table.py` names this file and imports it at first use. The last column names the GPUs on which a row's cases have
passed; it is empty where none has run them yet.
"""

# fmt: off
from __future__ import annotations

from typing import Any

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, BOOL, C64, C128, F16, F32, F64, I8, I32, I64, U8, U32, U64, Arch
from dispatch.ops.fft import cufft_callback_dft, cufft_cosine, cufft_dft, cufft_half_dft
from dispatch.ops.fft.callback_dft import numpy_callback_dft
from dispatch.ops.fft.cosine import scipy_cosine
from dispatch.ops.fft.half import numpy_half_dft, side_by_side
from dispatch.ops.fft.reference import numpy_dft
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80 = Arch(75), Arch(80)
V11 = (11, 0)
RULES = (aligned,)
H100, H200 = ("H100",), ("H200",)
EXEC = ("cufft", "cufftXtExec", cufft_dft, H100)
FUSED = ("cufft", "cufftXtSetJITCallback", cufft_callback_dft, H100)
HALF = ("cufft", "cufftXtExec", cufft_half_dft)
PAIRS = (aligned, side_by_side)
COSINE = ("cufft", "cufftXtExec", cufft_cosine, H100)

GPU_ROWS = (
#       op      a, out        compute rules min_arch, max_arch, min_version, calls, run_on
    Row("dft", (C64,  C64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (C128, C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (F32,  C64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (F64,  C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (C64,  F32),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (C128, F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (F32,  F32),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (F64,  F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (F16,  C64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (BF16, C64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (I8,   C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (U8,   C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (I32,  C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (U32,  C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (I64,  C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (U64,  C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (BOOL, C128),  None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (I8,   F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (U8,   F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (I32,  F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (U32,  F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (I64,  F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (U64,  F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("dft", (BOOL, F64),   None, RULES, SM75, None, V11, *EXEC),
    Row("callback_dft", (C64,  C64),  None, RULES, SM75, None, V11, *FUSED),
    Row("callback_dft", (C128, C128), None, RULES, SM75, None, V11, *FUSED),
    Row("callback_dft", (F32,  C64),  None, RULES, SM75, None, V11, *FUSED),
    Row("callback_dft", (F64,  C128), None, RULES, SM75, None, V11, *FUSED),
    Row("callback_dft", (C64,  F32),  None, RULES, SM75, None, V11, *FUSED),
    Row("callback_dft", (C128, F64),  None, RULES, SM75, None, V11, *FUSED),
    Row("half_dft", (F16,  F16),  None, PAIRS, SM75, None, V11, *HALF, H200),
    Row("half_dft", (BF16, BF16), None, PAIRS, SM80, None, V11, *HALF, H200),
    Row("dct", (F32,  F32),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (F64,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (C64,  C64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (C128, C128),  None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (F16,  F32),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (BF16, F32),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (I8,   F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (U8,   F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (I32,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (U32,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (I64,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (U64,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dct", (BOOL, F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (F32,  F32),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (F64,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (C64,  C64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (C128, C128),  None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (F16,  F32),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (BF16, F32),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (I8,   F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (U8,   F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (I32,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (U32,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (I64,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (U64,  F64),   None, RULES, SM75, None, V11, *COSINE),
    Row("dst", (BOOL, F64),   None, RULES, SM75, None, V11, *COSINE),
)
# fmt: on
HOST: dict[Any, Any] = {
    cufft_dft: numpy_dft,
    cufft_callback_dft: numpy_callback_dft,
    cufft_half_dft: numpy_half_dft,
    cufft_cosine: scipy_cosine,
}
ROWS = stated((*GPU_ROWS, *(on_host(row, HOST[row.call]) for row in GPU_ROWS)))
