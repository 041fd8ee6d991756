"""BLAS: dense linear algebra by cuBLAS, or by NumPy on the host, with the names of https://www.netlib.org/blas/.

`level3.py` has the requests of matrices with matrices, `level2.py` and `level2_outer.py` those of matrices with
vectors, `level1.py` and `rotations.py` those of vectors. Matrices are row-major or column-major, and may be views:
transposed, offset, with gaps between rows or columns. Only the named triangle of symmetric, Hermitian and triangular
matrices is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.host_plan import numpy_call
from dispatch.core.request_function import request_function
from dispatch.ops.blas import reference1, reference2, reference3
from dispatch.ops.blas.choices import DiagType, FillMode, Operation, SideMode
from dispatch.ops.blas.level1 import (
    AsumRequest,
    AxpyRequest,
    CopyRequest,
    DotcRequest,
    DotRequest,
    DotuRequest,
    IamaxRequest,
    IaminRequest,
    Nrm2Request,
    ScalRequest,
    SwapRequest,
)
from dispatch.ops.blas.level2 import (
    GbmvRequest,
    GemvRequest,
    HbmvRequest,
    HemvRequest,
    HpmvRequest,
    SbmvRequest,
    SpmvRequest,
    SymvRequest,
    TbmvRequest,
    TbsvRequest,
    TpmvRequest,
    TpsvRequest,
    TrmvRequest,
    TrsvRequest,
)
from dispatch.ops.blas.level2_outer import (
    GercRequest,
    GerRequest,
    GeruRequest,
    Her2Request,
    HerRequest,
    Hpr2Request,
    HprRequest,
    Spr2Request,
    SprRequest,
    Syr2Request,
    SyrRequest,
)
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
from dispatch.ops.blas.rotations import RotgRequest, RotmgRequest, RotmRequest, RotRequest

if TYPE_CHECKING:
    import numpy as np

    from dispatch.core.host_plan import Results

__all__ = ["DiagType", "FillMode", "Operation", "SideMode"]
__all__ += ["DgmmRequest", "GeamRequest", "HemmRequest", "Her2kRequest", "HerkRequest", "HerkxRequest"]
__all__ += ["SymmRequest", "Syr2kRequest", "SyrkRequest", "SyrkxRequest", "TrmmRequest", "TrsmRequest"]
__all__ += ["dgmm", "geam", "hemm", "her2k", "herk", "herkx", "symm", "syr2k", "syrk", "syrkx", "trmm", "trsm"]
__all__ += ["GbmvRequest", "GemvRequest", "HbmvRequest", "HemvRequest", "HpmvRequest", "SbmvRequest", "SpmvRequest"]
__all__ += ["SymvRequest", "TbmvRequest", "TbsvRequest", "TpmvRequest", "TpsvRequest", "TrmvRequest", "TrsvRequest"]
__all__ += ["GerRequest", "GercRequest", "GeruRequest", "Her2Request", "HerRequest", "Hpr2Request", "HprRequest"]
__all__ += ["Spr2Request", "SprRequest", "Syr2Request", "SyrRequest"]
__all__ += ["gbmv", "gemv", "hbmv", "hemv", "hpmv", "sbmv", "spmv", "symv"]
__all__ += ["tbmv", "tbsv", "tpmv", "tpsv", "trmv", "trsv"]
__all__ += ["ger", "gerc", "geru", "her", "her2", "hpr", "hpr2", "spr", "spr2", "syr", "syr2"]

__all__ += ["AsumRequest", "AxpyRequest", "DotRequest", "DotcRequest", "DotuRequest", "IamaxRequest", "IaminRequest"]
__all__ += ["Nrm2Request", "ScalRequest", "asum", "axpy", "dot", "dotc", "dotu", "iamax", "iamin", "nrm2", "scal"]
__all__ += ["CopyRequest", "RotRequest", "RotgRequest", "RotmRequest", "RotmgRequest", "SwapRequest"]
__all__ += ["copy", "rot", "rotg", "rotm", "rotmg", "swap"]


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request of any level, in a working dtype."""
    if request.op in reference3.ROUTINES:
        return reference3.evaluate(request, work)
    if request.op in reference1.ROUTINES:
        return reference1.evaluate(request, work)
    return reference2.evaluate(request, work)


numpy_blas = numpy_call(evaluate)

symm, hemm = request_function(SymmRequest, "symm"), request_function(HemmRequest, "hemm")
syrk, herk = request_function(SyrkRequest, "syrk"), request_function(HerkRequest, "herk")
syr2k, her2k = request_function(Syr2kRequest, "syr2k"), request_function(Her2kRequest, "her2k")
syrkx, herkx = request_function(SyrkxRequest, "syrkx"), request_function(HerkxRequest, "herkx")
trmm, trsm = request_function(TrmmRequest, "trmm"), request_function(TrsmRequest, "trsm")
geam, dgmm = request_function(GeamRequest, "geam"), request_function(DgmmRequest, "dgmm")

gemv, gbmv = request_function(GemvRequest, "gemv"), request_function(GbmvRequest, "gbmv")
symv, hemv = request_function(SymvRequest, "symv"), request_function(HemvRequest, "hemv")
sbmv, hbmv = request_function(SbmvRequest, "sbmv"), request_function(HbmvRequest, "hbmv")
spmv, hpmv = request_function(SpmvRequest, "spmv"), request_function(HpmvRequest, "hpmv")
trmv, trsv = request_function(TrmvRequest, "trmv"), request_function(TrsvRequest, "trsv")
tbmv, tbsv = request_function(TbmvRequest, "tbmv"), request_function(TbsvRequest, "tbsv")
tpmv, tpsv = request_function(TpmvRequest, "tpmv"), request_function(TpsvRequest, "tpsv")

ger, geru, gerc = (
    request_function(GerRequest, "ger"),
    request_function(GeruRequest, "geru"),
    request_function(GercRequest, "gerc"),
)
syr, her = request_function(SyrRequest, "syr"), request_function(HerRequest, "her")
syr2, her2 = request_function(Syr2Request, "syr2"), request_function(Her2Request, "her2")
spr, hpr = request_function(SprRequest, "spr"), request_function(HprRequest, "hpr")
spr2, hpr2 = request_function(Spr2Request, "spr2"), request_function(Hpr2Request, "hpr2")

axpy, scal = request_function(AxpyRequest, "axpy"), request_function(ScalRequest, "scal")
asum, nrm2 = request_function(AsumRequest, "asum"), request_function(Nrm2Request, "nrm2")
iamax, iamin = request_function(IamaxRequest, "iamax"), request_function(IaminRequest, "iamin")
copy, swap = request_function(CopyRequest, "copy"), request_function(SwapRequest, "swap")
rot, rotg = request_function(RotRequest, "rot"), request_function(RotgRequest, "rotg")
rotm, rotmg = request_function(RotmRequest, "rotm"), request_function(RotmgRequest, "rotmg")
dot, dotu, dotc = (
    request_function(DotRequest, "dot"),
    request_function(DotuRequest, "dotu"),
    request_function(DotcRequest, "dotc"),
)
