"""Linear algebra over many small matrices: rows of cuBLAS's batched routines, before cuSOLVER's.

Our own kernel runs after `getrfBatched`, for singular matrices.
"""

from __future__ import annotations

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.ops.linalg import cublas_derived, cublas_linalg, scipy_linalg
from dispatch.ops.linalg.rules import (
    by_lu_or_cholesky,
    even_batches,
    general,
    many_small,
    of_full_rank,
    several_right_sides,
    square,
    tall,
    up_to_32,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75 = Arch(75)
V12 = (12, 9)
H100 = ("H100",)
LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
SMALL = (many_small, aligned, even_batches)
MANY, TINY = "of many", "of many, up to 32"
# fmt: off
ROUTINES = (
#    op           routine          rules                             call            variant run_on
    ("cho_solve", "trsmBatched",   (*SMALL, several_right_sides), cublas_linalg,  MANY, H100),
    ("lu_factor", "getrfBatched",  (*SMALL, square),              cublas_linalg,  MANY, H100),
    ("lu_solve",  "getrsBatched",  SMALL,                         cublas_linalg,  MANY, H100),
    ("solve",     "getrsBatched",  (*SMALL, by_lu_or_cholesky),   cublas_linalg,  MANY, H100),
    ("qr",        "geqrfBatched",  SMALL,                         cublas_linalg,  MANY, H100),
    ("inv",       "matinvBatched", (*SMALL, general, up_to_32),   cublas_derived, TINY, H100),
    ("inv",       "getriBatched",  (*SMALL, general),             cublas_derived, MANY, H100),
    ("lstsq",     "gelsBatched",   (*SMALL, of_full_rank, tall),  cublas_derived, MANY, H100),
    ("expm",      "getrsBatched",  SMALL,                         cublas_derived, MANY, H100),
)
# fmt: on

GPU_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=rules,
        min_arch=SM75,
        max_arch=None,
        min_version=V12,
        library="cublas",
        function=f"cublas{letter}{routine}",
        call=call,
        run_on=run_on,
        variant=variant,
    )
    for op, routine, rules, call, variant, run_on in ROUTINES
    for dtype, letter in LETTERS.items()
)
HOST_ROWS = tuple(on_host(row, scipy_linalg, library="scipy", stands_for="cublas") for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
