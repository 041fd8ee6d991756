"""The rows of BLAS by cuBLAS: one routine each, for each of its dtypes.

`run_on` names the machines on which all cases of a row have passed.
"""

from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, HALF, I32, Arch, Compute, Dtype
from dispatch.libraries.cublas.calls import function_name
from dispatch.ops.blas import numpy_blas
from dispatch.ops.blas.cublas1 import cublas_level1, steps_fit
from dispatch.ops.blas.cublas2 import cublas_level2, vectors_fit
from dispatch.ops.blas.cublas3 import cublas_level3, matrices_fit
from dispatch.ops.blas.cublas_gemv import half_function
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75 = Arch(75)
V12 = (12, 9)
ALL, REAL, COMPLEX = (F32, F64, C64, C128), (F32, F64), (C64, C128)
WITH_HALF = (*ALL, F16, BF16)
COMPUTE = {F32: Compute.COMPUTE_32F, F64: Compute.COMPUTE_64F, C64: Compute.COMPUTE_32F, C128: Compute.COMPUTE_64F}
COMPUTE |= dict.fromkeys(HALF, Compute.COMPUTE_32F)
# fmt: off
LEVEL3: dict[str, tuple[Dtype, ...]] = {
    "symm":  ALL,  "hemm":  COMPLEX,
    "syrk":  ALL,  "herk":  COMPLEX,
    "syr2k": ALL,  "her2k": COMPLEX,
    "syrkx": ALL,  "herkx": COMPLEX,
    "trmm":  ALL,  "trsm":  ALL,
    "geam":  ALL,  "dgmm":  ALL,
}
LEVEL2: dict[str, tuple[Dtype, ...]] = {
    "gemv":  ALL,  "gbmv":  ALL,
    "symv":  ALL,  "hemv":  COMPLEX,
    "sbmv":  REAL, "hbmv":  COMPLEX,
    "spmv":  REAL, "hpmv":  COMPLEX,
    "trmv":  ALL,  "trsv":  ALL,
    "tbmv":  ALL,  "tbsv":  ALL,
    "tpmv":  ALL,  "tpsv":  ALL,
    "ger":   REAL, "geru":  COMPLEX, "gerc": COMPLEX,
    "syr":   ALL,  "her":   COMPLEX,
    "syr2":  ALL,  "her2":  COMPLEX,
    "spr":   REAL, "hpr":   COMPLEX,
    "spr2":  REAL, "hpr2":  COMPLEX,
}
LEVEL1: dict[str, tuple[Dtype, ...]] = {
    "axpy":  WITH_HALF,      "scal":  WITH_HALF,
    "copy":  ALL,            "swap":  ALL,
    "asum":  ALL,            "nrm2":  WITH_HALF,
    "iamax": ALL,            "iamin": ALL,
    "dot":   (*REAL, *HALF), "dotu":  COMPLEX,  "dotc": COMPLEX,
    "rot":   WITH_HALF,      "rotg":  ALL,
    "rotm":  REAL,           "rotmg": REAL,
}
# fmt: on
LEVELS = (
    (LEVEL3, (matrices_fit,), cublas_level3),
    (LEVEL2, (vectors_fit,), cublas_level2),
    (LEVEL1, (steps_fit,), cublas_level1),
)


def result_of(op: str, dtype: Dtype) -> Dtype:
    """The dtype of a result."""
    if op in ("iamax", "iamin"):
        return I32
    return {C64: F32, C128: F64}.get(dtype, dtype) if op in ("asum", "nrm2", "rotg") else dtype


def function_of(op: str, dtype: Dtype) -> str:
    """The cuBLAS function of an op and a dtype."""
    return function_name(f"{op.capitalize()}Ex" if dtype in HALF else op, dtype)


SIGNATURES = (
    *(
        (op, dtype, result_of(op, dtype), function_of(op, dtype), rules, call)
        for level, rules, call in LEVELS
        for op, dtypes in level.items()
        for dtype in dtypes
    ),
    *(
        ("gemv", dtype, out, f"cublas{half_function(dtype, out)}", (vectors_fit,), cublas_level2)
        for dtype in HALF
        for out in (dtype, F32)
    ),
)
GPU_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, out),
        compute=COMPUTE[dtype],
        rules=rules,
        min_arch=SM75,
        max_arch=None,
        min_version=V12,
        library="cublas",
        function=function,
        call=call,
        run_on=("H100",),
    )
    for op, dtype, out, function, rules, call in SIGNATURES
)
HOST_ROWS = tuple(on_host(row, numpy_blas, stands_for="cublas") for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
