"""Dense linear algebra: Cholesky, LU and QR factorizations, systems of equations, eigenvalues and singular values.

Matrices are the last two axes; leading axes are a batch. The work is done by cuSOLVER's 64-bit interface, by its older
interface for routines that only that one has, by cuBLAS's batched routines for many small matrices, or on the host by
LAPACK through SciPy. The files: base, request and spectral (the requests), cusolver, cusolver_spectral and cublas (the
plans), reference (the correct results), rules, cases; and functions, which check the status of each routine: users know
them as `dispatch.linalg`.
"""

from __future__ import annotations

from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.linalg.derived import (
    DetRequest,
    InverseKind,
    InvRequest,
    LstsqDriver,
    LstsqRequest,
    MatrixNormRequest,
    MatrixRankRequest,
    NormOrder,
    PinvRequest,
    SlogdetRequest,
)
from dispatch.ops.linalg.eig import EigRequest, RandomizedSvdRequest
from dispatch.ops.linalg.exponential import ExpmRequest
from dispatch.ops.linalg.multiply import QrMultiplyRequest, QrSide
from dispatch.ops.linalg.polar import PolarRequest
from dispatch.ops.linalg.reference import scipy_linalg as scipy_linalg
from dispatch.ops.linalg.refined import FactorPrecision, RefinedLstsqRequest, RefinedSolveRequest, Refinement
from dispatch.ops.linalg.reflectors import OrgqrRequest, OrmqrRequest
from dispatch.ops.linalg.request import (
    CholeskyRequest,
    ChoSolveRequest,
    LuFactorRequest,
    LuSolveRequest,
    MatrixKind,
    QrMode,
    QrRequest,
    SolveRequest,
)
from dispatch.ops.linalg.spectral import EighDriver, EighRequest, GeneralizedEighRequest, SvdDriver, SvdRequest
from dispatch.ops.linalg.symmetric import LdlRequest, LdlSolveRequest

__all__ = [
    "ChoSolveRequest",
    "CholeskyRequest",
    "DetRequest",
    "EigRequest",
    "EighDriver",
    "EighRequest",
    "ExpmRequest",
    "FactorPrecision",
    "GeneralizedEighRequest",
    "InvRequest",
    "InverseKind",
    "LdlRequest",
    "LdlSolveRequest",
    "LstsqDriver",
    "LstsqRequest",
    "LuFactorRequest",
    "LuSolveRequest",
    "MatrixKind",
    "MatrixNormRequest",
    "MatrixRankRequest",
    "NormOrder",
    "OrgqrRequest",
    "OrmqrRequest",
    "PinvRequest",
    "PolarRequest",
    "QrMode",
    "QrMultiplyRequest",
    "QrRequest",
    "QrSide",
    "RandomizedSvdRequest",
    "RefinedLstsqRequest",
    "RefinedSolveRequest",
    "Refinement",
    "SlogdetRequest",
    "SolveRequest",
    "SvdDriver",
    "SvdRequest",
    "cho_solve",
    "cholesky",
    "det",
    "eig",
    "eigh",
    "expm",
    "generalized_eigh",
    "inv",
    "ldl",
    "ldl_solve",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "matrix_norm",
    "matrix_rank",
    "orgqr",
    "ormqr",
    "pinv",
    "polar",
    "qr",
    "qr_multiply",
    "randomized_svd",
    "refined_lstsq",
    "refined_solve",
    "slogdet",
    "solve",
    "svd",
]

cusolver_linalg = plan_call(
    "cusolver_linalg",
    "dispatch.ops.linalg.cusolver",
    "A plan that ends in cuSOLVER's routine; Refused where NVRTC is missing, which compiles the copies between calls.",
)
own_linalg = plan_call(
    "own_linalg",
    "dispatch.ops.linalg.own_small",
    "A plan of one kernel of this library over small matrices; Refused where NVRTC is missing.",
)
cublas_linalg = plan_call(
    "cublas_linalg",
    "dispatch.ops.linalg.cublas",
    "A plan that ends in cuBLAS's batched routine; Refused where NVRTC is missing.",
)
cublas_derived = plan_call(
    "cublas_derived",
    "dispatch.ops.linalg.cublas_derived",
    "A plan of cuBLAS's batched inverse or least squares; Refused where NVRTC is missing.",
)
cusolver_eigen = plan_call(
    "cusolver_eigen",
    "dispatch.ops.linalg.cusolver_spectral",
    "A plan that ends in the routine of the request's driver; Refused where NVRTC is missing.",
)
cusolver_derived = plan_call(
    "cusolver_derived",
    "dispatch.ops.linalg.cusolver_derived",
    "A plan of a factorization and of products and sums behind it; Refused where NVRTC is missing.",
)
cusolver_polar = plan_call(
    "cusolver_polar",
    "dispatch.ops.linalg.cusolver_polar",
    "A plan of singular values and products of their vectors; Refused where NVRTC is missing.",
)
cusolver_refined = plan_call(
    "cusolver_refined",
    "dispatch.ops.linalg.cusolver_refinement",
    "A plan that ends in cuSOLVER's iterative refinement, which waits; Refused where NVRTC is missing.",
)
refined_solve = request_function(RefinedSolveRequest, "refined_solve")
refined_lstsq = request_function(RefinedLstsqRequest, "refined_lstsq")
cusolver_expm = plan_call(
    "cusolver_expm",
    "dispatch.ops.linalg.cusolver_exponential",
    "A plan of cuBLAS's products and a system of equations among them; Refused where NVRTC is missing.",
)
cholesky = request_function(CholeskyRequest, "cholesky")
cho_solve = request_function(ChoSolveRequest, "cho_solve")
lu_factor = request_function(LuFactorRequest, "lu_factor")
lu_solve = request_function(LuSolveRequest, "lu_solve")
solve = request_function(SolveRequest, "solve")
qr = request_function(QrRequest, "qr")
qr_multiply = request_function(QrMultiplyRequest, "qr_multiply")
orgqr = request_function(OrgqrRequest, "orgqr")
ormqr = request_function(OrmqrRequest, "ormqr")
ldl = request_function(LdlRequest, "ldl")
ldl_solve = request_function(LdlSolveRequest, "ldl_solve")
eigh = request_function(EighRequest, "eigh")
generalized_eigh = request_function(GeneralizedEighRequest, "generalized_eigh")
eig = request_function(EigRequest, "eig")
randomized_svd = request_function(RandomizedSvdRequest, "randomized_svd")
svd = request_function(SvdRequest, "svd")
inv = request_function(InvRequest, "inv")
det = request_function(DetRequest, "det")
slogdet = request_function(SlogdetRequest, "slogdet")
matrix_norm = request_function(MatrixNormRequest, "matrix_norm")
matrix_rank = request_function(MatrixRankRequest, "matrix_rank")
pinv = request_function(PinvRequest, "pinv")
polar = request_function(PolarRequest, "polar")
lstsq = request_function(LstsqRequest, "lstsq")
expm = request_function(ExpmRequest, "expm")
