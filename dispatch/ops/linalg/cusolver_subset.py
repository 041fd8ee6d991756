"""Some of the eigenvalues of a Hermitian matrix, and the eigenvalues of a pair of matrices, by cuSOLVER.

The routines write the number of eigenvalues that they found to host memory before they return. Matrices are copied to
scratch memory, column-major, and the eigenvalues and vectors from there to the results. Follows
https://docs.nvidia.com/cuda/cusolver/#cusolverdn-t-sygvdx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cudabind.sys.cusolver_types import cusolverEigMode_t
from cudabind.sys.cusolverDn import cusolverEigRange_t, cusolverEigType_t
from dispatch.libraries.cusolver.calls import LETTERS, HostNumbers, cuda_type, real_of
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.matrix import Matrix
from dispatch.libraries.cusolver.spectra import ConvertSygvjStatus, FillNanAfterFound
from dispatch.ops.linalg.cusolver import LOWER, UPPER
from dispatch.ops.linalg.cusolver_jacobi import eigen_settings
from dispatch.ops.linalg.drivers import driver_of
from dispatch.ops.linalg.spectral import EighDriver
from dispatch.ops.linalg.subset import found_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.keys import Dtype
    from dispatch.libraries.cusolver.matrix import OperandPointer
    from dispatch.ops.linalg.cusolver import LinalgSteps
    from dispatch.ops.linalg.spectral import EighRequest, GeneralizedEighRequest

__all__ = ["eigh_subset", "generalized"]

SYGV_BATCHED = "cusolverDnXsygvStridedBatched"
BY_INDEX, BY_VALUE = cusolverEigRange_t.CUSOLVER_EIG_RANGE_I, cusolverEigRange_t.CUSOLVER_EIG_RANGE_V


class Bounds(NamedTuple):
    """The selected eigenvalues as the routines' arguments: indices from 1 on, or values in (low, high]."""

    kind: cusolverEigRange_t
    low: float
    high: float
    first: int
    last: int


def bounds(request: EighRequest | GeneralizedEighRequest, dtype: Dtype) -> Bounds:
    """The bounds of a request's subset; infinite bounds become the largest finite numbers of its precision."""
    if request.subset_by_index is not None:
        first, last = request.subset_by_index
        return Bounds(BY_INDEX, 0.0, 0.0, first + 1, last + 1)
    most = float(np.finfo(dtype.numpy).max)
    low, high = (min(max(value, -most), most) for value in request.subset_by_value or (-most, most))
    return Bounds(BY_VALUE, low, high, 0, 0)


def eigh_subset(request: EighRequest, steps: LinalgSteps) -> Plan:
    """`syevdx` over each matrix."""
    a, info = steps.matrix("a"), steps.vector("info")
    in_rows = a.mT.is_column_major and not a.is_column_major
    source, lower = (a.mT, not request.lower) if in_rows else (a, request.lower)
    matrix = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    steps.copy(source, matrix, CopyMode.LOWER if lower else CopyMode.UPPER, conj=in_rows)
    flags = flag_single(steps, matrix)
    real = real_of(a.dtype)
    kind, real_kind, subset = cuda_type(a.dtype), cuda_type(real), bounds(request, real)
    values, counts = scratch_values(steps, a.rows), HostNumbers(steps.batch)
    low, high = (np.array([value], real.numpy) for value in (subset.low, subset.high))
    arguments = (mode_of(request), subset.kind, LOWER if lower else UPPER, a.rows, kind, matrix.pointer, matrix.ld)
    range_arguments = (low, high, subset.first, subset.last, counts)
    steps.call_x("cusolverDnXsyevdx", *arguments, *range_arguments, real_kind, values.pointer, kind, info=info)
    return write_results(request, steps, values, matrix, flags, counts)


def flag_single(steps: LinalgSteps, *matrices: Matrix) -> OperandPointer | None:
    """Flags of 1x1 matrices that are not finite: cuSOLVER 12.0 gives the vector 1, whatever the element."""
    return steps.flag_nonfinite(*matrices) if matrices[0].rows == 1 else None


def generalized(request: GeneralizedEighRequest, steps: LinalgSteps) -> Plan:
    """`sygvd`, `sygvdx` or `sygvj` over each pair of matrices, or one batched call from 12.4 on.

    Both matrices are read from the same triangle.
    """
    a, b, info = steps.matrix("a"), steps.matrix("b"), steps.vector("info")
    matrix, factor = (steps.scratch_matrix(a.dtype, a.rows, a.cols) for _ in range(2))
    part = CopyMode.LOWER if request.lower else CopyMode.UPPER
    steps.copy(a, matrix, part)
    steps.copy(b, factor, part)
    flags = flag_single(steps, matrix, factor)
    uplo, problem = LOWER if request.lower else UPPER, cusolverEigType_t(request.itype)
    name = f"cusolverDn{LETTERS[a.dtype]}{'he' if a.dtype.is_complex else 'sy'}"
    values, pair = scratch_values(steps, a.rows), (a.rows, matrix.pointer, matrix.ld, factor.pointer, factor.ld)
    mode = mode_of(request)
    if request.subset_by_index is not None or request.subset_by_value is not None:
        subset, counts = bounds(request, real_of(a.dtype)), HostNumbers(steps.batch)
        range_arguments = (subset.low, subset.high, subset.first, subset.last, counts, values.pointer)
        steps.call_with_work(
            f"{name}gvdx", a.dtype, problem, mode, subset.kind, uplo, *pair, *range_arguments, info=info
        )
        return write_results(request, steps, values, matrix, flags, counts)
    arguments = (problem, mode, uplo, *pair, values.pointer)
    if steps.row.function == SYGV_BATCHED:
        kind, real = cuda_type(a.dtype), cuda_type(values.dtype)
        step = matrix.ld * matrix.cols
        matrices = (kind, matrix.pointer, matrix.ld, step, kind, factor.pointer, factor.ld, step)
        trailing = (real, values.pointer, a.rows, kind, steps.batch)
        steps.call_x(SYGV_BATCHED, problem, mode, uplo, a.rows, *matrices, *trailing, info=info, count=1)
    elif driver_of(steps.row) is EighDriver.SYEVJ:
        steps.call_with_work(f"{name}gvj", a.dtype, *arguments, info=info, trailing=(eigen_settings(a.dtype),))
        steps.append(ConvertSygvjStatus(steps.executor, info, matrix, steps.batch))
    else:
        steps.call_with_work(f"{name}gvd", a.dtype, *arguments, info=info)
    return write_results(request, steps, values, matrix, flags, None)


def mode_of(request: EighRequest | GeneralizedEighRequest) -> cusolverEigMode_t:
    """Whether the vectors are computed."""
    mode = cusolverEigMode_t
    return mode.CUSOLVER_EIG_MODE_NOVECTOR if request.eigvals_only else mode.CUSOLVER_EIG_MODE_VECTOR


def scratch_values(steps: LinalgSteps, n: int) -> Matrix:
    """Memory for all eigenvalues, in one row: routines may write all of them."""
    real = real_of(steps.dtype)
    return Matrix(steps.scratch(n * real.itemsize), real, 1, n, n, 1)


def write_results(
    request: EighRequest | GeneralizedEighRequest,
    steps: LinalgSteps,
    values: Matrix,
    made: Matrix,
    flags: OperandPointer | None,
    found: Any,
) -> Plan:
    """Copy the eigenvalues and vectors to the results, with NaN after them, and NaN for matrices that failed."""
    k = found_of(request)
    results = [(values.first_columns(k), Matrix(steps.vector("w"), values.dtype, 1, k, k, 1))]
    if not request.eigvals_only:
        results.append((made.first_columns(k), steps.matrix("v")))
    if request.subset_by_value is not None:
        steps.upload(found, steps.vector("count"))
    for source, target in results:
        steps.copy(source, target)
        if request.subset_by_value is not None:
            steps.append(FillNanAfterFound(steps.executor, steps.vector("count"), target, steps.batch))
    for marks in (steps.vector("info"), *([] if flags is None else [flags])):
        steps.fill_nan_where(marks, *(target for _, target in results))
    return steps.plan(capture_safe=False)
