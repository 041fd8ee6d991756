"""Eigenvalues and singular values by cuSOLVER: plans of `cudabind.sys.cusolverDn` calls.

A row-major Hermitian matrix is the conjugate of the column-major one. GESVD does not support wide matrices: a wide one
is transposed, and U and V are exchanged. Follows
https://docs.nvidia.com/cuda/cusolver/#dense-eigenvalue-solver-reference-64-bit-api.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys.cusolver_types import cusolverEigMode_t
from dispatch.libraries.cusolver.calls import LETTERS, HostNumbers, cuda_type, real_of
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.matrix import Matrix
from dispatch.ops.linalg.cusolver import LOWER, UPPER, LinalgSteps
from dispatch.ops.linalg.cusolver_eig import eig, randomized
from dispatch.ops.linalg.cusolver_jacobi import eigen_settings, singular_settings
from dispatch.ops.linalg.cusolver_subset import eigh_subset, generalized
from dispatch.ops.linalg.drivers import JACOBI_OF_MANY, driver_of
from dispatch.ops.linalg.spectral import EighDriver, EighRequest, SvdDriver, SvdRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import OperandPointer

__all__ = ["plan"]

VALUES_ONLY, WITH_VECTORS = cusolverEigMode_t.CUSOLVER_EIG_MODE_NOVECTOR, cusolverEigMode_t.CUSOLVER_EIG_MODE_VECTOR
MAX_ELEMENTS = 2**31 - 1  # the limit of `syevBatched`, over all matrices
ALL, SOME, NONE = ord("A"), ord("S"), ord("N")


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without elements no routine is called."""
    steps = LinalgSteps(request, executor, row)
    if request.a.size:
        return MAKERS[request.op](request, steps)
    if request.op == "svd" and request.compute_uv and request.full_matrices:
        # Without singular values any orthonormal vectors are correct: the unit vectors, as in NumPy.
        steps.identity(steps.matrix("u"))
        steps.identity(steps.matrix("vh"))
    return steps.idle()


# -- eigenvalues ------------------------------------------------------------------------------------------------------
def eigh(request: EighRequest, steps: LinalgSteps) -> Plan:
    """Copy the triangle to the memory of the vectors, or to scratch memory, where the routine overwrites it."""
    if request.subset_by_index is not None or request.subset_by_value is not None:
        return eigh_subset(request, steps)
    a, w, info = steps.matrix("a"), steps.vector("w"), steps.vector("info")
    in_rows = a.mT.is_column_major and not a.is_column_major
    source, lower = (a.mT, not request.lower) if in_rows else (a, request.lower)
    vectors = None if request.eigvals_only else steps.matrix("v")
    target = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    if vectors is not None and (vectors.row_stride, vectors.col_stride, vectors.pointer.batch_stride) == (
        1,
        target.col_stride,
        target.pointer.batch_stride,
    ):
        target = vectors
    elif vectors is not None and steps.batch == 1:
        target = steps.target(vectors)
    steps.copy(source, target, CopyMode.LOWER if lower else CopyMode.UPPER, conj=in_rows)
    results = [column(steps, "w", a.rows), *([] if vectors is None else [vectors])]
    mode, uplo = VALUES_ONLY if vectors is None else WITH_VECTORS, LOWER if lower else UPPER
    # For a batch with NaN syevj of cuSOLVER 12.0 gives finite numbers and a status of 0; and for a 1x1 matrix every
    # routine gives the vector 1, whatever the element.
    is_jacobi = driver_of(steps.row) is EighDriver.SYEVJ
    flags = steps.flag_nonfinite(target) if is_jacobi or a.rows == 1 else None
    if is_jacobi:
        jacobi(steps, mode, uplo, target, w, info)
    else:
        kind = cuda_type(a.dtype)
        arguments = (mode, uplo, a.rows, kind, target.pointer, target.ld, cuda_type(real_of(a.dtype)), w, kind)
        if steps.batch > 1 and target.ld * target.cols * steps.batch <= MAX_ELEMENTS:
            trailing = (steps.batch,)
            steps.call_x("cusolverDnXsyevBatched", *arguments, info=info, trailing=trailing, count=1)
        else:
            steps.call_x("cusolverDnXsyevd", *arguments, info=info)
    if vectors is not None:
        steps.finish(target, vectors)
    for marks in (info, *([] if flags is None else [flags])):
        steps.fill_nan_where(marks, *results)
    return steps.plan(capture_safe=False)


def column(steps: LinalgSteps, name: str, size: int) -> Matrix:
    """A dense vector of real numbers as a matrix of one column."""
    return Matrix(steps.vector(name), real_of(steps.dtype), size, 1, 1, size)


def jacobi(steps: LinalgSteps, mode: Any, uplo: Any, a: Matrix, w: OperandPointer, info: OperandPointer) -> None:
    """`syevj`; several matrices are one batched call."""
    settings = eigen_settings(a.dtype)
    name = f"cusolverDn{LETTERS[a.dtype]}{'heevj' if a.dtype.is_complex else 'syevj'}"
    arguments = (mode, uplo, a.rows, a.pointer, a.ld, w)
    if steps.batch > 1:
        behind = (settings, steps.batch)
        steps.call_with_work(f"{name}Batched", a.dtype, *arguments, info=info, trailing=behind, count=1)
    else:
        steps.call_with_work(name, a.dtype, *arguments, info=info, trailing=(settings,))


# -- singular values --------------------------------------------------------------------------------------------------
def svd(request: SvdRequest, steps: LinalgSteps) -> Plan:
    """Copy A, or its transpose if it is wide, to scratch memory, which the routine overwrites."""
    source, is_wide = tall_matrix(steps)
    copy = steps.scratch_matrix(source.dtype, source.rows, source.cols)
    steps.copy(source, copy)
    flags = steps.zero_nonfinite(copy)
    DRIVERS[driver_of(steps.row)](request, steps, copy, is_wide)
    vectors = [steps.matrix("u"), steps.matrix("vh")] if request.compute_uv else []
    results = (column(steps, "s", source.cols), *vectors)
    for marks in (flags, steps.vector("info")):
        steps.fill_nan_where(marks, *results)
    return steps.plan(capture_safe=False)


def tall_matrix(steps: LinalgSteps) -> tuple[Matrix, bool]:
    """A, or its transpose if it is wide, and whether it is wide."""
    a = steps.matrix("a")
    return (a.mT, True) if a.rows < a.cols else (a, False)


def wanted_vectors(steps: LinalgSteps, *, is_wide: bool) -> tuple[Matrix, Matrix]:
    """The targets of the left vectors, as columns, and of the right vectors, as rows, of the decomposed matrix.

    If Aᵀ = U'·S·V'ᴴ, the transposes of these two are Vᴴ and U of A.
    """
    u, vh = steps.matrix("u"), steps.matrix("vh")
    return (vh.mT, u.mT) if is_wide else (u, vh)


def by_qr(request: SvdRequest, steps: LinalgSteps, a: Matrix, is_wide: bool) -> None:
    """`gesvd`, which gives Vᴴ."""
    kind, real = cuda_type(a.dtype), cuda_type(real_of(a.dtype))
    s, info = steps.vector("s"), steps.vector("info")
    if not request.compute_uv:
        unused = steps.scratch_matrix(a.dtype, 1, 1)
        left, right, job = unused, unused, NONE
        lds = a.rows, a.cols
    else:
        vectors = wanted_vectors(steps, is_wide=is_wide)
        left, right = map(steps.target, vectors)
        job = ALL if request.full_matrices else SOME
        lds = left.ld, right.ld
    arguments = (job, job, a.rows, a.cols, kind, a.pointer, a.ld, real, s)
    steps.call_x(
        "cusolverDnXgesvd", *arguments, kind, left.pointer, lds[0], kind, right.pointer, lds[1], kind, info=info
    )
    if request.compute_uv:
        steps.finish(left, vectors[0])
        steps.finish(right, vectors[1])


def by_jacobi(request: SvdRequest, steps: LinalgSteps, a: Matrix, is_wide: bool) -> None:
    """`gesvdj`, which gives V; several small matrices are one batched call, with full U and V."""
    settings = singular_settings()
    name, info = f"cusolverDn{LETTERS[a.dtype]}gesvdj", steps.vector("info")
    mode, s = WITH_VECTORS if request.compute_uv else VALUES_ONLY, steps.vector("s")
    is_batched = steps.batch > 1 and a.rows <= JACOBI_OF_MANY
    is_full = request.full_matrices or is_batched
    left = steps.scratch_matrix(a.dtype, a.rows, a.rows if is_full else a.cols)
    right = steps.scratch_matrix(a.dtype, a.cols, a.cols)
    arguments = (a.rows, a.cols, a.pointer, a.ld, s, left.pointer, left.ld, right.pointer, right.ld)
    if is_batched:
        behind = (settings, steps.batch)
        steps.call_with_work(f"{name}Batched", a.dtype, mode, *arguments, info=info, trailing=behind, count=1)
    else:
        econ = int(not is_full)
        steps.call_with_work(name, a.dtype, mode, econ, *arguments, info=info, trailing=(settings,))
    if request.compute_uv:
        write_vectors(steps, left, right, is_wide=is_wide)


def by_polar(request: SvdRequest, steps: LinalgSteps, a: Matrix, is_wide: bool) -> None:
    """`gesvdp`, which gives V; `gesvd` repeats the whole batch if `gesvdp` has perturbed a matrix.

    The polar decomposition fails if a singular value is close to 0. cuSOLVER then adds a small matrix and reports this
    in a number, but not in the status: for random matrices of 1024 rows in f32 all singular values were 1.2e3, 20 times
    too large for the largest of them, with an info of 0.
    """
    kind, real = cuda_type(a.dtype), cuda_type(real_of(a.dtype))
    s, info = steps.vector("s"), steps.vector("info")
    left = steps.scratch_matrix(a.dtype, a.rows, a.rows if request.full_matrices else a.cols)
    right = steps.scratch_matrix(a.dtype, a.cols, a.cols)
    mode, econ = WITH_VECTORS if request.compute_uv else VALUES_ONLY, int(not request.full_matrices)
    arguments = (mode, econ, a.rows, a.cols, kind, a.pointer, a.ld, real, s)
    vectors = (kind, left.pointer, left.ld, kind, right.pointer, right.ld)
    perturbations = HostNumbers(steps.batch, np.float64)
    steps.call_x("cusolverDnXgesvdp", *arguments, *vectors, kind, info=info, trailing=(perturbations,))
    if request.compute_uv:
        write_vectors(steps, left, right, is_wide=is_wide)
    with steps.only_where(perturbations):
        steps.copy(tall_matrix(steps)[0], a)
        steps.zero_nonfinite(a)
        by_qr(request, steps, a, is_wide)


def by_products(request: SvdRequest, steps: LinalgSteps, a: Matrix, is_wide: bool) -> None:
    """`gesvda`, one call for all matrices, which gives V; the norms of the residuals are not computed."""
    name, info = f"cusolverDn{LETTERS[a.dtype]}gesvdaStridedBatched", steps.vector("info")._replace(batch_stride=0)
    mode, k = WITH_VECTORS if request.compute_uv else VALUES_ONLY, a.cols
    left, right = (steps.scratch_matrix(a.dtype, rows, k) for rows in (a.rows, k))
    arguments = (mode, k, a.rows, a.cols, a.pointer, a.ld, a.ld * a.cols, steps.vector("s"), k)
    vectors = (left.pointer, left.ld, left.ld * k, right.pointer, right.ld, right.ld * k)
    steps.call_with_work(name, a.dtype, *arguments, *vectors, info=info, trailing=(None, steps.batch), count=1)
    if request.compute_uv:
        write_vectors(steps, left, right, is_wide=is_wide)


def write_vectors(steps: LinalgSteps, left: Matrix, right: Matrix, *, is_wide: bool) -> None:
    """Copy U' and V'ᴴ to the results."""
    in_columns, in_rows = wanted_vectors(steps, is_wide=is_wide)
    steps.copy(left.first_columns(in_columns.cols), in_columns)
    steps.copy(right.mT, in_rows, conj=True)


DRIVERS: dict[Any, Callable[[SvdRequest, LinalgSteps, Matrix, bool], None]] = {
    SvdDriver.GESVD: by_qr,
    SvdDriver.GESVDJ: by_jacobi,
    SvdDriver.GESVDP: by_polar,
    SvdDriver.GESVDA: by_products,
}
MAKERS: dict[str, Callable[[Any, LinalgSteps], Plan]] = {
    "eig": eig,
    "eigh": eigh,
    "generalized_eigh": generalized,
    "randomized_svd": randomized,
    "svd": svd,
}
