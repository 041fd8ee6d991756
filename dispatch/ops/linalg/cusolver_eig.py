"""Eigenvalues of any square matrix, and randomized singular values, by cuSOLVER's 64-bit interface.

For a real matrix `geev` gives complex eigenvalues, and the real and imaginary parts of a vector in adjacent columns, as
LAPACK does. It has no left eigenvectors: they are computed as the right eigenvectors of Aᴴ, reordered to match A's
eigenvalues. V⁻ᴴ would cost less, but a single ill-conditioned eigenvalue makes V⁻¹ large, and then all rows have an
error of n·eps·‖V⁻¹‖; with Aᴴ the error of each vector depends only on the condition of its own eigenvalue. Follows
https://docs.nvidia.com/cuda/cusolver/#cusolverdnxgeev and #cusolverdnxgesvdr.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cudabind.sys.cusolver_types import cusolverEigMode_t
from dispatch.libraries.cusolver.calls import FLAG_BYTES, cuda_type, real_of
from dispatch.libraries.cusolver.matrix import Matrix
from dispatch.libraries.cusolver.spectra import ComplexVectors, MarkUnconverged, MatchEigenvectors
from dispatch.ops.linalg.eig import complex_of, oversampled

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.libraries.cusolver.matrix import OperandPointer
    from dispatch.ops.linalg.cusolver import LinalgSteps
    from dispatch.ops.linalg.eig import EigRequest, RandomizedSvdRequest

__all__ = ["eig", "randomized"]

VALUES_ONLY, WITH_VECTORS = cusolverEigMode_t.CUSOLVER_EIG_MODE_NOVECTOR, cusolverEigMode_t.CUSOLVER_EIG_MODE_VECTOR
NULL = ctypes.c_void_p()  # for vectors that are not computed
SOME, NONE = ord("S"), ord("N")


def eig(request: EigRequest, steps: LinalgSteps) -> Plan:
    """`geev` over each matrix, on a column-major copy that it overwrites.

    The status of matrices that are not finite is that of a matrix that did not converge. The workspace query alone
    already ends a stream capture in progress.
    """
    steps.executor.refuse_capture("geev, which waits for the GPU", always=True)
    a, w, info = steps.matrix("a"), steps.vector("w"), steps.vector("info")
    dtype = complex_of(a.dtype)
    kind, value_kind = cuda_type(a.dtype), cuda_type(dtype)
    copy = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    steps.copy(a, copy)
    flags = steps.zero_nonfinite(copy)
    results = [Matrix(w, dtype, 1, a.rows, a.rows, 1)]
    arguments = (a.rows, kind, copy.pointer, copy.ld, value_kind, w, kind, NULL, 1, kind)
    if request.eigvals_only:
        steps.call_x("cusolverDnXgeev", VALUES_ONLY, VALUES_ONLY, *arguments, NULL, 1, kind, info=info)
    else:
        results.append(steps.matrix("v"))
        right_eigenvectors(steps, copy, w, info, results[-1])
    if request.left:
        results.append(steps.matrix("vl"))
        others, status = steps.scratch(a.rows * dtype.itemsize), steps.scratch(FLAG_BYTES)
        vectors = steps.scratch_matrix(dtype, a.rows, a.cols)
        steps.copy(a.mT, copy, conj=True)
        steps.zero_nonfinite(copy)
        right_eigenvectors(steps, copy, others, status, vectors)
        steps.append(MatchEigenvectors(steps.executor, w, others, vectors, results[-1], info, status, steps.batch))
    steps.append(MarkUnconverged(steps.executor, info, flags, a, steps.batch))
    steps.fill_nan_where(info, *results)
    return steps.plan(capture_safe=False)


def right_eigenvectors(steps: LinalgSteps, a: Matrix, w: OperandPointer, info: OperandPointer, wanted: Matrix) -> None:
    """`geev` with right eigenvectors over each matrix, which it overwrites."""
    kind, value_kind = cuda_type(a.dtype), cuda_type(wanted.dtype)
    is_real = a.dtype is not wanted.dtype
    vectors = steps.scratch_matrix(a.dtype, a.rows, a.cols) if is_real else steps.target(wanted)
    arguments = (a.rows, kind, a.pointer, a.ld, value_kind, w, kind, NULL, 1, kind, vectors.pointer, vectors.ld, kind)
    steps.call_x("cusolverDnXgeev", VALUES_ONLY, WITH_VECTORS, *arguments, info=info)
    if is_real:
        steps.append(ComplexVectors(steps.executor, w, vectors, wanted, steps.batch))
    else:
        steps.finish(vectors, wanted)


def randomized(request: RandomizedSvdRequest, steps: LinalgSteps) -> Plan:
    """`gesvdr` over a copy of each matrix, which it overwrites; it gives V and needs memory for all singular values."""
    a, info, k, more = steps.matrix("a"), steps.vector("info"), request.rank, oversampled(request)
    real = real_of(a.dtype)
    kind, least = cuda_type(a.dtype), min(a.rows, a.cols)
    copy = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    steps.copy(a, copy)
    flags = steps.zero_nonfinite(copy)
    values = Matrix(steps.scratch(least * real.itemsize), real, 1, least, least, 1)
    left, right = (steps.scratch_matrix(a.dtype, rows, k + more) for rows in (a.rows, a.cols))
    job = SOME if request.compute_uv else NONE
    arguments = (job, job, a.rows, a.cols, k, more, request.iterations, kind, copy.pointer, copy.ld)
    vectors = (kind, left.pointer, left.ld, kind, right.pointer, right.ld)
    steps.call_x("cusolverDnXgesvdr", *arguments, cuda_type(real), values.pointer, *vectors, kind, info=info)
    results = [Matrix(steps.vector("s"), real, 1, k, k, 1)]
    steps.copy(values.first_columns(k), results[0])
    if request.compute_uv:
        results += [steps.matrix("u"), steps.matrix("vh")]
        steps.copy(left.first_columns(k), results[1])
        steps.copy(right.first_columns(k).mT, results[2], conj=True)
    steps.append(MarkUnconverged(steps.executor, info, flags, a, steps.batch))
    steps.fill_nan_where(info, *results)
    return steps.plan(capture_safe=False)
