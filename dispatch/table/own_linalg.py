"""The rows of linear algebra of small matrices with kernels of our own, compiled by NVRTC.

They come before cuBLAS's and cuSOLVER's rows, which a request reaches by `library=` or `autotune=True`.
"""

from __future__ import annotations

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.ops.linalg import own_linalg, scipy_linalg
from dispatch.ops.linalg.rules import (
    by_lu_or_cholesky,
    even_batches,
    few_right_sides,
    general,
    square,
    up_to_64,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75 = Arch(75)  # the oldest target of NVRTC 13
SMALL = (aligned, even_batches, up_to_64)
# fmt: off
RULES = {
    "cholesky":  SMALL,
    "cho_solve": (*SMALL, few_right_sides),
    "lu_factor": (*SMALL, square),
    "lu_solve":  (*SMALL, few_right_sides),
    "solve":     (*SMALL, few_right_sides, by_lu_or_cholesky),
    "inv":       (*SMALL, general),
}
# fmt: on
ALL = (F32, F64, C64, C128)

GPU_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=rules,
        min_arch=SM75,
        max_arch=None,
        min_version=(),
        library="own",
        function=op,
        call=own_linalg,
        run_on=("H100",),
        variant="small",
    )
    for op, rules in RULES.items()
    for dtype in ALL
)
HOST_ROWS = tuple(on_host(row, scipy_linalg, library="scipy", stands_for="own") for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
