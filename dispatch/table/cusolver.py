"""The rows of linear algebra for cuSOLVER's dense routines.

`table.py` names this file and imports it at first use. The last column names the GPUs on which a row's cases have
passed; it is empty where none has run them yet.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, I64, Arch
from dispatch.ops.linalg import (
    cusolver_derived,
    cusolver_eigen,
    cusolver_expm,
    cusolver_linalg,
    cusolver_polar,
    cusolver_refined,
    scipy_linalg,
)
from dispatch.ops.linalg.drivers import by_gesvd, by_gesvda, by_gesvdj, by_gesvdp, by_syevd, by_syevd_of_many, by_syevj
from dispatch.ops.linalg.rules import (
    economical,
    even_batches,
    gmres_of_square,
    hermitian,
    many_small,
    not_hermitian,
    whole_spectrum,
)
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75 = Arch(75)
V11_7 = (11, 7)
V12_4 = (12, 4)
BLAS_V12_9 = (12, 9)
OF_HERMITIAN = "Hermitian"
RULES = (aligned, even_batches)
H100 = ("H100",)
BY_SYEVD = (*RULES, by_syevd)
BY_SYEVJ = (*RULES, by_syevj, whole_spectrum)
BY_GESVD = (*RULES, by_gesvd)
LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
SYM   = (*RULES, not_hermitian)
HER   = (*RULES, hermitian)
CHOLESKY  = ("cusolverDn", "cusolverDnXpotrf", cusolver_linalg, H100)
CHO_SOLVE = ("cusolverDn", "cusolverDnXpotrs", cusolver_linalg, H100)
LU_FACTOR = ("cusolverDn", "cusolverDnXgetrf", cusolver_linalg)
SLU_SOLVE = ("cublas",     "cublasStrsm_v2",   cusolver_linalg, H100)
DLU_SOLVE = ("cublas",     "cublasDtrsm_v2",   cusolver_linalg, H100)
CLU_SOLVE = ("cublas",     "cublasCtrsm_v2",   cusolver_linalg, H100)
ZLU_SOLVE = ("cublas",     "cublasZtrsm_v2",   cusolver_linalg, H100)
SSYTRF    = ("cusolverDn", "cusolverDnSsytrf", cusolver_linalg, H100)
DSYTRF    = ("cusolverDn", "cusolverDnDsytrf", cusolver_linalg, H100)
CSYTRF    = ("cusolverDn", "cusolverDnCsytrf", cusolver_linalg, H100)
ZSYTRF    = ("cusolverDn", "cusolverDnZsytrf", cusolver_linalg, H100)
SYTRS     = ("cusolverDn", "cusolverDnXsytrs", cusolver_linalg, H100)
HETRF     = ("cusolverDn", "cusolverDnXhetrf", cusolver_linalg)
HETRS     = ("cusolverDn", "cusolverDnXhetrs", cusolver_linalg)
QR        = ("cusolverDn", "cusolverDnXgeqrf", cusolver_linalg, H100)
EIGH      = ("cusolverDn", "cusolverDnXsyevd", cusolver_eigen, H100)
SSYGVD    = ("cusolverDn", "cusolverDnSsygvd", cusolver_eigen, H100)
DSYGVD    = ("cusolverDn", "cusolverDnDsygvd", cusolver_eigen, H100)
CHEGVD    = ("cusolverDn", "cusolverDnChegvd", cusolver_eigen, H100)
ZHEGVD    = ("cusolverDn", "cusolverDnZhegvd", cusolver_eigen, H100)
EIG       = ("cusolverDn", "cusolverDnXgeev",  cusolver_eigen, H100)
GESVDR    = ("cusolverDn", "cusolverDnXgesvdr", cusolver_eigen, H100)
SVD       = ("cusolverDn", "cusolverDnXgesvd", cusolver_eigen, H100)
QR_MULTIPLY = ("cusolverDn", "cusolverDnXgeqrf", cusolver_derived, H100)
SORGQR    = ("cusolverDn", "cusolverDnSorgqr", cusolver_derived, H100)
DORGQR    = ("cusolverDn", "cusolverDnDorgqr", cusolver_derived, H100)
CORGQR    = ("cusolverDn", "cusolverDnCungqr", cusolver_derived, H100)
ZORGQR    = ("cusolverDn", "cusolverDnZungqr", cusolver_derived, H100)
SORMQR    = ("cusolverDn", "cusolverDnSormqr", cusolver_derived, H100)
DORMQR    = ("cusolverDn", "cusolverDnDormqr", cusolver_derived, H100)
CORMQR    = ("cusolverDn", "cusolverDnCunmqr", cusolver_derived, H100)
ZORMQR    = ("cusolverDn", "cusolverDnZunmqr", cusolver_derived, H100)
POLAR     = ("cusolverDn", "cusolverDnXgesvd", cusolver_polar, H100)
EXPM      = ("cusolverDn", "cusolverDnXgetrf", cusolver_expm, H100)
INV       = ("cusolverDn", "cusolverDnXgetrf", cusolver_derived, H100)
DET       = ("cusolverDn", "cusolverDnXgetrf", cusolver_derived, H100)
OF_SVD    = ("cusolverDn", "cusolverDnXgesvd", cusolver_derived, H100)

GPU_ROWS = (
#       op           of            compute rules  min_arch, max_arch, min_version, calls, run_on
    Row("cholesky",  (F32,  F32),  None,   RULES, SM75, None, V11_7, *CHOLESKY),
    Row("cholesky",  (F64,  F64),  None,   RULES, SM75, None, V11_7, *CHOLESKY),
    Row("cholesky",  (C64,  C64),  None,   RULES, SM75, None, V11_7, *CHOLESKY),
    Row("cholesky",  (C128, C128), None,   RULES, SM75, None, V11_7, *CHOLESKY),
    Row("cho_solve", (F32,  F32),  None,   RULES, SM75, None, V11_7, *CHO_SOLVE),
    Row("cho_solve", (F64,  F64),  None,   RULES, SM75, None, V11_7, *CHO_SOLVE),
    Row("cho_solve", (C64,  C64),  None,   RULES, SM75, None, V11_7, *CHO_SOLVE),
    Row("cho_solve", (C128, C128), None,   RULES, SM75, None, V11_7, *CHO_SOLVE),
    Row("lu_factor", (F32,  F32),  None,   RULES, SM75, None, V11_7, *LU_FACTOR, H100),
    Row("lu_factor", (F64,  F64),  None,   RULES, SM75, None, V11_7, *LU_FACTOR, H100),
    Row("lu_factor", (C64,  C64),  None,   RULES, SM75, None, V11_7, *LU_FACTOR, H100),
    Row("lu_factor", (C128, C128), None,   RULES, SM75, None, V11_7, *LU_FACTOR, H100),
    Row("lu_solve",  (F32,  F32),  None,   RULES, SM75, None, BLAS_V12_9, *SLU_SOLVE),
    Row("lu_solve",  (F64,  F64),  None,   RULES, SM75, None, BLAS_V12_9, *DLU_SOLVE),
    Row("lu_solve",  (C64,  C64),  None,   RULES, SM75, None, BLAS_V12_9, *CLU_SOLVE),
    Row("lu_solve",  (C128, C128), None,   RULES, SM75, None, BLAS_V12_9, *ZLU_SOLVE),
    Row("solve",     (F32,  F32),  None,   RULES, SM75, None, V11_7, *LU_FACTOR, H100),
    Row("solve",     (F64,  F64),  None,   RULES, SM75, None, V11_7, *LU_FACTOR, H100),
    Row("solve",     (C64,  C64),  None,   SYM,   SM75, None, V11_7, *LU_FACTOR, H100),
    Row("solve",     (C128, C128), None,   SYM,   SM75, None, V11_7, *LU_FACTOR),  # one case has not run since its fix
    Row("solve",     (C64,  C64),  None,   HER,   SM75, None, V12_4, *HETRS, variant=OF_HERMITIAN),
    Row("solve",     (C128, C128), None,   HER,   SM75, None, V12_4, *HETRS, variant=OF_HERMITIAN),
    Row("ldl",       (F32,  F32),  None,   RULES, SM75, None, V11_7, *SSYTRF),
    Row("ldl",       (F64,  F64),  None,   RULES, SM75, None, V11_7, *DSYTRF),
    Row("ldl",       (C64,  C64),  None,   SYM,   SM75, None, V11_7, *CSYTRF),
    Row("ldl",       (C128, C128), None,   SYM,   SM75, None, V11_7, *ZSYTRF),
    Row("ldl",       (C64,  C64),  None,   HER,   SM75, None, V12_4, *HETRF, variant=OF_HERMITIAN),
    Row("ldl",       (C128, C128), None,   HER,   SM75, None, V12_4, *HETRF, variant=OF_HERMITIAN),
    Row("ldl_solve", (F32,  F32),  None,   RULES, SM75, None, V11_7, *SYTRS),
    Row("ldl_solve", (F64,  F64),  None,   RULES, SM75, None, V11_7, *SYTRS),
    Row("ldl_solve", (C64,  C64),  None,   SYM,   SM75, None, V11_7, *SYTRS),
    Row("ldl_solve", (C128, C128), None,   SYM,   SM75, None, V11_7, *SYTRS),
    Row("ldl_solve", (C64,  C64),  None,   HER,   SM75, None, V12_4, *HETRS, variant=OF_HERMITIAN),
    Row("ldl_solve", (C128, C128), None,   HER,   SM75, None, V12_4, *HETRS, variant=OF_HERMITIAN),
    Row("qr",        (F32,  F32),  None,   RULES, SM75, None, V11_7, *QR),
    Row("qr",        (F64,  F64),  None,   RULES, SM75, None, V11_7, *QR),
    Row("qr",        (C64,  C64),  None,   RULES, SM75, None, V11_7, *QR),
    Row("qr",        (C128, C128), None,   RULES, SM75, None, V11_7, *QR),
    Row("eigh",      (F32,  F32),  None,   BY_SYEVD, SM75, None, V11_7, *EIGH),
    Row("eigh",      (F64,  F64),  None,   BY_SYEVD, SM75, None, V11_7, *EIGH),
    Row("eigh",      (C64,  C64),  None,   BY_SYEVD, SM75, None, V11_7, *EIGH),
    Row("eigh",      (C128, C128), None,   BY_SYEVD, SM75, None, V11_7, *EIGH),
    Row("generalized_eigh", (F32, F32), None, BY_SYEVD, SM75, None, V11_7, *SSYGVD),
    Row("generalized_eigh", (F64, F64), None, BY_SYEVD, SM75, None, V11_7, *DSYGVD),
    Row("generalized_eigh", (C64, C64), None, BY_SYEVD, SM75, None, V11_7, *CHEGVD),
    Row("generalized_eigh", (C128, C128), None, BY_SYEVD, SM75, None, V11_7, *ZHEGVD),
    Row("svd",       (F32,  F32),  None,   BY_GESVD, SM75, None, V11_7, *SVD),
    Row("svd",       (F64,  F64),  None,   BY_GESVD, SM75, None, V11_7, *SVD),
    Row("svd",       (C64,  C64),  None,   BY_GESVD, SM75, None, V11_7, *SVD),
    Row("svd",       (C128, C128), None,   BY_GESVD, SM75, None, V11_7, *SVD),
    Row("eig", (F32, C64), None, RULES, SM75, None, V11_7, *EIG),
    Row("eig", (F64, C128), None, RULES, SM75, None, V11_7, *EIG),
    Row("eig", (C64, C64), None, RULES, SM75, None, V11_7, *EIG),
    Row("eig", (C128, C128), None, RULES, SM75, None, V11_7, *EIG),
    Row("randomized_svd", (F32, F32), None, RULES, SM75, None, V11_7, *GESVDR),
    Row("randomized_svd", (F64, F64), None, RULES, SM75, None, V11_7, *GESVDR),
    Row("randomized_svd", (C64, C64), None, RULES, SM75, None, V11_7, *GESVDR),
    Row("randomized_svd", (C128, C128), None, RULES, SM75, None, V11_7, *GESVDR),
    Row("qr_multiply", (F32, F32), None, RULES, SM75, None, V11_7, *QR_MULTIPLY),
    Row("qr_multiply", (F64, F64), None, RULES, SM75, None, V11_7, *QR_MULTIPLY),
    Row("qr_multiply", (C64, C64), None, RULES, SM75, None, V11_7, *QR_MULTIPLY),
    Row("qr_multiply", (C128, C128), None, RULES, SM75, None, V11_7, *QR_MULTIPLY),
    Row("orgqr",     (F32, F32), None, RULES, SM75, None, V11_7, *SORGQR),
    Row("orgqr",     (F64, F64), None, RULES, SM75, None, V11_7, *DORGQR),
    Row("orgqr",     (C64, C64), None, RULES, SM75, None, V11_7, *CORGQR),
    Row("orgqr",     (C128, C128), None, RULES, SM75, None, V11_7, *ZORGQR),
    Row("ormqr",     (F32, F32), None, RULES, SM75, None, V11_7, *SORMQR),
    Row("ormqr",     (F64, F64), None, RULES, SM75, None, V11_7, *DORMQR),
    Row("ormqr",     (C64, C64), None, RULES, SM75, None, V11_7, *CORMQR),
    Row("ormqr",     (C128, C128), None, RULES, SM75, None, V11_7, *ZORMQR),
    Row("expm",      (F32,  F32),  None,   RULES, SM75, None, V11_7, *EXPM),
    Row("expm",      (F64,  F64),  None,   RULES, SM75, None, V11_7, *EXPM),
    Row("expm",      (C64,  C64),  None,   RULES, SM75, None, V11_7, *EXPM),
    Row("expm",      (C128, C128), None,   RULES, SM75, None, V11_7, *EXPM),
    Row("inv",       (F32,  F32),  None,   RULES, SM75, None, V11_7, *INV),
    Row("inv",       (F64,  F64),  None,   RULES, SM75, None, V11_7, *INV),
    Row("inv",       (C64,  C64),  None,   RULES, SM75, None, V11_7, *INV),
    Row("inv",       (C128, C128), None,   RULES, SM75, None, V11_7, *INV),
    Row("det",       (F32,  F32),  None,   RULES, SM75, None, V11_7, *DET),
    Row("det",       (F64,  F64),  None,   RULES, SM75, None, V11_7, *DET),
    Row("det",       (C64,  C64),  None,   RULES, SM75, None, V11_7, *DET),
    Row("det",       (C128, C128), None,   RULES, SM75, None, V11_7, *DET),
    Row("slogdet",   (F32,  F32),  None,   RULES, SM75, None, V11_7, *DET),
    Row("slogdet",   (F64,  F64),  None,   RULES, SM75, None, V11_7, *DET),
    Row("slogdet",   (C64,  C64),  None,   RULES, SM75, None, V11_7, *DET),
    Row("slogdet",   (C128, C128), None,   RULES, SM75, None, V11_7, *DET),
    Row("matrix_norm", (F32,  F32),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_norm", (F64,  F64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_norm", (C64,  C64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_norm", (C128, C128), None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_rank", (F32,  I64),   None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_rank", (F64,  I64),   None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_rank", (C64,  I64),   None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("matrix_rank", (C128, I64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("pinv",      (F32,  F32),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("pinv",      (F64,  F64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("pinv",      (C64,  C64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("pinv",      (C128, C128), None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("polar",     (F32,  F32),  None,   RULES, SM75, None, V11_7, *POLAR),
    Row("polar",     (F64,  F64),  None,   RULES, SM75, None, V11_7, *POLAR),
    Row("polar",     (C64,  C64),  None,   RULES, SM75, None, V11_7, *POLAR),
    Row("polar",     (C128, C128), None,   RULES, SM75, None, V11_7, *POLAR),
    Row("lstsq",     (F32,  F32),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("lstsq",     (F64,  F64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("lstsq",     (C64,  C64),  None,   RULES, SM75, None, V11_7, *OF_SVD),
    Row("lstsq",     (C128, C128), None,   RULES, SM75, None, V11_7, *OF_SVD),
)
# The other drivers of an op: their rules, and their routines for a real and for a complex matrix.
OTHERS = {
    ("eigh",             "syevj"):  (BY_SYEVJ,                         "{}syevj",                "{}heevj"),
    ("generalized_eigh", "syevj"):  (BY_SYEVJ,                         "{}sygvj",                "{}hegvj"),
    ("svd",              "gesvdj"): ((*RULES, by_gesvdj),              "{}gesvdj",               "{}gesvdj"),
    ("svd",              "gesvdp"): ((*RULES, by_gesvdp),              "Xgesvdp",                "Xgesvdp"),
    ("svd",              "gesvda"): ((*RULES, by_gesvda, economical),  "{}gesvdaStridedBatched", "{}gesvdaStridedBatched"),
}
# fmt: on
DRIVER_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=rules,
        min_arch=SM75,
        max_arch=None,
        min_version=V11_7,
        library="cusolverDn",
        function=f"cusolverDn{(of_complex if dtype.is_complex else of_real).format(letter)}",
        call=cusolver_eigen,
        run_on=H100,
        variant=driver,
    )
    for (op, driver), (rules, of_real, of_complex) in OTHERS.items()
    for dtype, letter in LETTERS.items()
)
# It comes after the other rows, whose routines every version has; autotune compares it with them.
MANY_ROWS = tuple(
    Row(
        op="generalized_eigh",
        dtypes=(dtype, dtype),
        compute=None,
        rules=(*RULES, by_syevd_of_many, whole_spectrum, many_small),
        min_arch=SM75,
        max_arch=None,
        min_version=V12_4,
        library="cusolverDn",
        function="cusolverDnXsygvStridedBatched",
        call=cusolver_eigen,
        variant="of many",
    )
    for dtype in LETTERS
)
REFINED_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=rules,
        min_arch=Arch(80),
        max_arch=None,
        min_version=V11_7,
        library="cusolverDn",
        function=f"cusolverDnIRS{routine}",
        call=cusolver_refined,
        run_on=H100,
    )
    for op, routine, rules in (
        ("refined_solve", "Xgesv", RULES),
        ("refined_lstsq", "Xgels", (*RULES, gmres_of_square)),
    )
    for dtype in LETTERS
)

ROWS = stated(
    (
        *GPU_ROWS,
        *DRIVER_ROWS,
        *MANY_ROWS,
        *REFINED_ROWS,
        *(on_host(row, scipy_linalg, library="scipy") for row in (*GPU_ROWS, *DRIVER_ROWS, *MANY_ROWS, *REFINED_ROWS)),
    )
)
