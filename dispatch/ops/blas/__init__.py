"""BLAS: dense linear algebra by cuBLAS, or NumPy on the host, in the words of https://www.netlib.org/blas/.

`level3.py` has the requests of matrices with matrices. Matrices are row-major or column-major, and may be views:
transposed, offset, with lines apart. Of symmetric, Hermitian and triangular ones the named triangle alone is read.
"""

from __future__ import annotations

from dispatch.core.host_plan import numpy_call
from dispatch.core.request_function import request_function
from dispatch.ops.blas.choices import DiagType, FillMode, Operation, SideMode
from dispatch.ops.blas.level3 import (
    DgmmRequest,
    GeamRequest,
    HemmRequest,
    Her2kRequest,
    HerkRequest,
    HerkxRequest,
    SymmRequest,
    Syr2kRequest,
    SyrkRequest,
    SyrkxRequest,
    TrmmRequest,
    TrsmRequest,
)
from dispatch.ops.blas.reference3 import evaluate

__all__ = ["DiagType", "FillMode", "Operation", "SideMode"]
__all__ += ["DgmmRequest", "GeamRequest", "HemmRequest", "Her2kRequest", "HerkRequest", "HerkxRequest"]
__all__ += ["SymmRequest", "Syr2kRequest", "SyrkRequest", "SyrkxRequest", "TrmmRequest", "TrsmRequest"]
__all__ += ["dgmm", "geam", "hemm", "her2k", "herk", "herkx", "symm", "syr2k", "syrk", "syrkx", "trmm", "trsm"]

symm, hemm = request_function(SymmRequest, "symm"), request_function(HemmRequest, "hemm")
syrk, herk = request_function(SyrkRequest, "syrk"), request_function(HerkRequest, "herk")
syr2k, her2k = request_function(Syr2kRequest, "syr2k"), request_function(Her2kRequest, "her2k")
syrkx, herkx = request_function(SyrkxRequest, "syrkx"), request_function(HerkxRequest, "herkx")
trmm, trsm = request_function(TrmmRequest, "trmm"), request_function(TrsmRequest, "trsm")
geam, dgmm = request_function(GeamRequest, "geam"), request_function(DgmmRequest, "dgmm")
numpy_blas = numpy_call(evaluate)
