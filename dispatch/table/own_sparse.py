"""The rows of ops around sparse matrices whose kernels are this library's own, compiled by NVRTC. Rows, and nothing
else.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import NONE
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, I64, Arch
from dispatch.ops.sparse.check import nvrtc_check
from dispatch.ops.sparse.reference import numpy_check
from dispatch.ops.sparse.rules import aligned, results
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75 = Arch(75)
CHECK = ("own", "check_indices", nvrtc_check)
DTYPES = (F32, F64, C64, C128, F16, BF16)

GPU_ROWS = tuple(
    Row("sparse_check", (one, I64), None, (aligned, results), SM75, None, (), *CHECK, nonfinite=NONE) for one in DTYPES
)
# fmt: on
ROWS = (*GPU_ROWS, *(on_host(row, numpy_check) for row in GPU_ROWS))
