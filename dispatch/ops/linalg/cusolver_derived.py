"""Inverses, determinants, norms, ranks and least squares: cuSOLVER's factorizations, followed by cuBLAS's products.

Kernels of this library run between the calls, so the host reads no results and nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cusolver.calls import LETTERS, cuda_type, real_of
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusolver.reductions import Reduce
from dispatch.ops.linalg.cusolver import (
    LOWER,
    OP_N,
    OP_T,
    PIVOT_BYTES,
    UPPER,
    LinalgSteps,
    copy_lower,
    factor_cholesky,
    factor_lu,
    factor_qr,
)
from dispatch.ops.linalg.cusolver_multiply import qr_multiply
from dispatch.ops.linalg.cusolver_reflectors import apply_q, orgqr, ormqr
from dispatch.ops.linalg.derived import InverseKind, InvRequest, LstsqDriver, LstsqRequest, NormOrder
from dispatch.ops.linalg.multiply import QrSide
from dispatch.ops.linalg.triangles import invert_lu

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["plan"]

OP_C = cb.cublasOperation_t.CUBLAS_OP_C
LEFT, NON_UNIT = cb.cublasSideMode_t.CUBLAS_SIDE_LEFT, cb.cublasDiagType_t.CUBLAS_DIAG_NON_UNIT
SOME, NONE = ord("S"), ord("N")
RANK_BYTES = 8


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    return MAKERS[request.op](request, LinalgSteps(request, executor, row))


# -- shared by the plans -----------------------------------------------------------------------------------------------
def is_tall(a: Matrix) -> bool:
    """Whether a matrix has as many rows as columns, or more."""
    return a.rows >= a.cols


def scratch_copy(steps: LinalgSteps, source: Matrix, *, conj: bool = False) -> Matrix:
    """A column-major copy in scratch memory that a routine may overwrite."""
    copy = steps.scratch_matrix(source.dtype, source.rows, source.cols)
    steps.copy(source, copy, conj=conj)
    return copy


def product_operand(steps: LinalgSteps, a: Matrix) -> tuple[Matrix, Any]:
    """A matrix as the operand of a product, and whether it is transposed; copied if not row- or column-major."""
    if a.is_column_major:
        return a, OP_N
    return (a.mT, OP_T) if a.mT.is_column_major else (scratch_copy(steps, a), OP_N)


def multiply(
    steps: LinalgSteps, first: tuple[Matrix, Any], second: tuple[Matrix, Any], out: Matrix, alpha: float, beta: float
) -> None:
    """out = alpha · first · second + beta · out for each matrix of the batch; all are column-major."""
    (a, operation_a), (b, operation_b) = first, second
    inner = a.cols if operation_a is OP_N else a.rows
    size = out.dtype.itemsize
    read = [part for one in (a, b) for part in (one.pointer, one.ld, one.pointer.batch_stride // size)]
    extents = (out.rows, out.cols, inner)
    arguments = (*extents, alpha, *read, beta, out.pointer, out.ld, out.pointer.batch_stride // size, steps.batch)
    steps.blas("gemmStridedBatched", out.dtype, operation_a, operation_b, *arguments)


def scratch_vector(steps: LinalgSteps, dtype: Dtype, size: int) -> OperandPointer:
    """Scratch memory for dense vectors of `size` numbers, one per matrix."""
    return steps.scratch(size * dtype.itemsize)


def as_column(place: OperandPointer, dtype: Dtype, size: int) -> Matrix:
    """A dense vector as a matrix of one column."""
    return Matrix(place, dtype, size, 1, 1, max(1, size))


class Decomposition(NamedTuple):
    """U, s and Vᴴ of a matrix with at least as many rows as columns; U without the columns that are multiplied by 0."""

    u: Matrix
    s: OperandPointer
    vh: Matrix


def decompose(
    steps: LinalgSteps, a: Matrix, s: OperandPointer, info: OperandPointer, *, vectors: bool = True
) -> Decomposition:
    """`gesvd` of a matrix, which it may overwrite; NaN if it did not converge, or the matrix is not finite."""
    flags = steps.zero_nonfinite(a)
    kind, real = cuda_type(a.dtype), real_of(a.dtype)
    u = steps.scratch_matrix(a.dtype, a.rows, a.cols if vectors else 1)
    vh = steps.scratch_matrix(a.dtype, a.cols, a.cols if vectors else 1)
    job = SOME if vectors else NONE
    arguments = (job, job, a.rows, a.cols, kind, a.pointer, a.ld, cuda_type(real), s)
    steps.call_x("cusolverDnXgesvd", *arguments, kind, u.pointer, u.ld, kind, vh.pointer, vh.ld, kind, info=info)
    results = (as_column(s, real, a.cols), *((u, vh) if vectors else ()))
    for marks in (flags, info):
        steps.fill_nan_where(marks, *results)
    return Decomposition(u, s, vh)


def relative_cutoff(request: Any) -> float:
    """The fraction of the largest singular value up to which others count as 0."""
    if request.rtol is not None:
        return float(request.rtol)
    return float(max(request.a.shape[-2:]) * np.finfo(real_of(request.a.dtype).numpy).eps)


# -- inverses ---------------------------------------------------------------------------------------------------------
def inverse(request: InvRequest, steps: LinalgSteps) -> Plan:
    """By the method for the matrix kind `assume_a`."""
    if not request.a.size:
        return steps.idle()
    out, info = steps.matrix("out"), steps.vector("info")
    target = steps.target(out)
    if request.assume_a is InverseKind.GEN:
        invert_general(steps, target, info)
    elif request.assume_a is InverseKind.POS:
        invert_positive(steps, target, info, lower=request.lower)
    else:
        invert_triangle(steps, target, info, lower=request.assume_a is InverseKind.LOWER)
    steps.finish(target, out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=request.assume_a in (InverseKind.GEN, InverseKind.POS))


def invert_general(steps: LinalgSteps, out: Matrix, info: OperandPointer) -> None:
    """The solution of A·X = I."""
    copy = scratch_copy(steps, steps.matrix("a"))
    pivots = steps.scratch(copy.rows * PIVOT_BYTES)
    factor_lu(steps, copy, pivots, info)
    invert_lu(steps, copy, pivots, out)


def invert_positive(steps: LinalgSteps, out: Matrix, info: OperandPointer, *, lower: bool) -> None:
    """`potri` of the factor, which writes one triangle; the other one is filled with its conjugate."""
    copy_lower(steps, steps.matrix("a"), out, lower=lower)
    factor_cholesky(steps, out, info)
    arguments = (LOWER, out.rows, out.pointer, out.ld)
    steps.call_with_work(f"cusolverDn{LETTERS[out.dtype]}potri", out.dtype, *arguments, info=steps.ignored_info())
    steps.copy(out.mT, out, CopyMode.STRICT_UPPER, conj=True)


def invert_triangle(steps: LinalgSteps, out: Matrix, info: OperandPointer, *, lower: bool) -> None:
    """`trtri` of the triangle; the other triangle has zeros."""
    kind = cuda_type(out.dtype)
    steps.copy(steps.matrix("a"), out, CopyMode.LOWER if lower else CopyMode.UPPER)
    arguments = (LOWER if lower else UPPER, NON_UNIT, out.rows, kind, out.pointer, out.ld)
    steps.call_x("cusolverDnXtrtri", *arguments, info=steps.ignored_info(), params=False)
    steps.launch("first_zero", out.dtype, 1, steps.matrix("a"), out.rows, info)


# -- determinants -----------------------------------------------------------------------------------------------------
def determinant(request: Any, steps: LinalgSteps) -> Plan:
    """The product of U's diagonal, with a sign for each row exchange; NaN if the matrix is not finite, as U is then."""
    a, n = steps.matrix("a"), request.a.shape[-1]
    names = request.writes
    lu, pivots = steps.scratch_matrix(a.dtype, n, n), steps.scratch(n * PIVOT_BYTES)
    if request.a.size:
        steps.copy(a, lu)
        factor_lu(steps, lu, pivots, steps.scratch(4))
    out, logarithm = steps.vector(names[0]), steps.vector(names[1]) if len(names) > 1 else None
    steps.launch("determinant", a.dtype, 1, lu, n, pivots, out, logarithm)
    return steps.plan(capture_safe=bool(request.a.size), idle=not request.a.size)


# -- norms and ranks --------------------------------------------------------------------------------------------------
# The reduction of the magnitudes of a column, or of a row, and then the reduction of those results.
SUMS = {
    NormOrder.FRO: (Reduce.ROOT, Reduce.ROOT),
    NormOrder.ONE: (Reduce.SUM, Reduce.MAX),
    NormOrder.MIN_ONE: (Reduce.SUM, Reduce.MIN),
    NormOrder.INF: (Reduce.SUM, Reduce.MAX),
    NormOrder.MIN_INF: (Reduce.SUM, Reduce.MIN),
}
OF_SINGULAR_VALUES = {NormOrder.NUC: Reduce.SUM, NormOrder.TWO: Reduce.MAX, NormOrder.MIN_TWO: Reduce.MIN}


def reduce(steps: LinalgSteps, a: Matrix, out: OperandPointer, kind: Reduce) -> None:
    """One number per column of each matrix, row-major or column-major; the numbers are dense."""
    steps.launch("reduce_columns", a.dtype, a.cols, a, a.rows, a.cols, out, a.cols, kind, per_block=1)


def matrix_norm(request: Any, steps: LinalgSteps) -> Plan:
    """Sums of columns or rows, or the singular values; then one number from them."""
    a, out = steps.matrix("a"), steps.vector("norm")
    real = real_of(a.dtype)
    if request.order in OF_SINGULAR_VALUES and request.a.size:
        source = a if is_tall(a) else a.mT
        s, info = scratch_vector(steps, real, source.cols), steps.scratch(4)
        decompose(steps, scratch_copy(steps, source), s, info, vectors=False)
        reduce(steps, as_column(s, real, source.cols), out, OF_SINGULAR_VALUES[request.order])
        return steps.plan(capture_safe=False)
    across = request.order in (NormOrder.INF, NormOrder.MIN_INF) or (
        request.order is NormOrder.FRO and a.row_stride > a.col_stride
    )
    source = a.mT if across else a
    first, second = SUMS.get(request.order, (Reduce.SUM, Reduce.SUM))
    if not request.a.size:
        source = source._replace(rows=0, cols=1)
        second = Reduce.SUM
    each = scratch_vector(steps, real, source.cols)
    reduce(steps, source, each, first)
    reduce(steps, as_column(each, real, source.cols), out, second)
    return steps.plan(capture_safe=bool(request.a.size), idle=not request.a.size)


def matrix_rank(request: Any, steps: LinalgSteps) -> Plan:
    """The number of singular values above the cutoff."""
    a, rank, info = steps.matrix("a"), steps.vector("rank"), steps.vector("info")
    if not request.a.size:
        steps.fill_zeros(rank, RANK_BYTES * steps.batch)
        return steps.idle()
    source = a if is_tall(a) else a.mT
    s = scratch_vector(steps, real_of(a.dtype), source.cols)
    decompose(steps, scratch_copy(steps, source), s, info, vectors=False)
    steps.launch("reciprocals", a.dtype, 1, s, source.cols, relative_cutoff(request), None, rank)
    return steps.plan(capture_safe=False)


# -- least squares ----------------------------------------------------------------------------------------------------
def pseudo_inverse(request: Any, steps: LinalgSteps) -> Plan:
    """V·diag(1/s)·Uᴴ; for a wide matrix it is computed as the transpose of the transposed matrix's inverse."""
    if not request.a.size:
        return steps.idle()
    a, out, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    source, out = (a, out) if is_tall(a) else (a.mT, out.mT)
    real, size = real_of(a.dtype), source.cols
    u, s, vh = decompose(steps, scratch_copy(steps, source), scratch_vector(steps, real, size), info)
    factors = scratch_vector(steps, real, size)
    steps.launch("reciprocals", a.dtype, 1, s, size, relative_cutoff(request), factors, None)
    steps.launch("scale_rows", a.dtype, size * size, vh, size, size, factors, size)
    target = steps.target(out)
    multiply(steps, (vh, OP_C), (u, OP_C), target, 1.0, 0.0)
    steps.finish(target, out)
    return steps.plan(capture_safe=False)


def least_squares(request: LstsqRequest, steps: LinalgSteps) -> Plan:
    """By the driver's method; zeros if there is nothing to solve."""
    a, b, out, info = steps.matrix("a"), steps.matrix("b"), steps.matrix("out"), steps.vector("info")
    if not (request.a.size and request.b.size):
        return empty_lstsq(request, steps, a, b, out)
    if request.driver is LstsqDriver.GELSS:
        x = lstsq_by_svd(request, steps, a, b, info)
        if has_residuals(a):
            residual = scratch_copy(steps, b)
            multiply(steps, product_operand(steps, a), (x, OP_N), residual, -1.0, 1.0)
            reduce(steps, residual, steps.vector("residuals"), Reduce.SQUARES)
        steps.copy(x, out)
        return steps.plan(capture_safe=False)
    lstsq_by_qr(steps, a, b, out, info)
    return steps.plan(capture_safe=True)


def has_residuals(a: Matrix) -> bool:
    """Whether the system has more equations than unknowns; otherwise the residual is only roundoff."""
    return a.rows > a.cols


def empty_lstsq(request: LstsqRequest, steps: LinalgSteps, a: Matrix, b: Matrix, out: Matrix) -> Plan:
    """x is 0 and the residual is b, for any number of rows. The matrix may still have singular values."""
    if out.rows and out.cols:
        steps.copy(out, out, CopyMode.ZERO)
    if b.cols and has_residuals(a):
        reduce(steps, b, steps.vector("residuals"), Reduce.SQUARES)
    if request.driver is LstsqDriver.GELSS and request.a.size:
        source = a if is_tall(a) else a.mT
        s = decompose(steps, scratch_copy(steps, source), steps.vector("s"), steps.vector("info"), vectors=False).s
        steps.launch("reciprocals", a.dtype, 1, s, source.cols, relative_cutoff(request), None, steps.vector("rank"))
        return steps.plan(capture_safe=False)
    if request.driver is LstsqDriver.GELSS:
        steps.fill_zeros(steps.vector("rank"), RANK_BYTES * steps.batch)
    return steps.idle()


def lstsq_by_svd(request: LstsqRequest, steps: LinalgSteps, a: Matrix, b: Matrix, info: OperandPointer) -> Matrix:
    """V·diag(1/s)·Uᴴ·b; a wide matrix uses the factors of Aᴴ."""
    tall = is_tall(a)
    copy = scratch_copy(steps, a) if tall else scratch_copy(steps, a.mT, conj=True)
    real, size = real_of(a.dtype), copy.cols
    u, s, vh = decompose(steps, copy, steps.vector("s"), info)
    factors = scratch_vector(steps, real, size)
    steps.launch("reciprocals", a.dtype, 1, s, size, relative_cutoff(request), factors, steps.vector("rank"))
    right_side = steps.column_major(b)
    inner, x = (steps.scratch_matrix(a.dtype, rows, b.cols) for rows in (size, a.cols))
    multiply(steps, (u, OP_C) if tall else (vh, OP_N), (right_side, OP_N), inner, 1.0, 0.0)
    steps.launch("scale_rows", a.dtype, size * b.cols, inner, size, b.cols, factors, size)
    multiply(steps, (vh, OP_C) if tall else (u, OP_N), (inner, OP_N), x, 1.0, 0.0)
    return x


def lstsq_by_qr(steps: LinalgSteps, a: Matrix, b: Matrix, out: Matrix, info: OperandPointer) -> None:
    """R⁻¹·Qᴴ·b; a wide matrix uses Q·R⁻ᴴ·b with the factors of Aᴴ."""
    tall = is_tall(a)
    factors = scratch_copy(steps, a) if tall else scratch_copy(steps, a.mT, conj=True)
    size = factors.cols
    tau = scratch_vector(steps, a.dtype, size)
    factor_qr(steps, factors, tau)
    steps.launch("first_zero", a.dtype, 1, factors, size, info)
    x = steps.scratch_matrix(a.dtype, factors.rows, b.cols)
    if tall:
        steps.copy(b, x)
        apply_q(steps, factors, tau, x, side=QrSide.LEFT, adjoint=True)
        solve_triangle(steps, factors, x.first_rows(size), OP_N)
    else:
        steps.copy(x, x, CopyMode.ZERO)
        steps.copy(b, x.first_rows(size))
        solve_triangle(steps, factors, x.first_rows(size), OP_C)
        apply_q(steps, factors, tau, x, side=QrSide.LEFT)
    if has_residuals(a):
        behind = x.pointer._replace(offset=x.pointer.offset + size * x.dtype.itemsize)
        residuals = steps.vector("residuals")
        reduce(steps, x._replace(pointer=behind, rows=x.rows - size), residuals, Reduce.SQUARES)
        steps.fill_nan_where(info, as_column(residuals, real_of(a.dtype), b.cols))
    steps.copy(x.first_rows(out.rows), out)
    steps.fill_nan_where(info, out)


def solve_triangle(steps: LinalgSteps, r: Matrix, x: Matrix, operation: Any) -> None:
    """R⁻¹·x or R⁻ᴴ·x, in x's memory."""
    arguments = (LEFT, UPPER, operation, NON_UNIT, x.rows, x.cols, 1.0)
    if steps.batch == 1:
        steps.blas("trsm", x.dtype, *arguments, r.pointer, r.ld, x.pointer, x.ld)
    else:
        steps.blas("trsmBatched", x.dtype, *arguments, steps.pointers(r), r.ld, steps.pointers(x), x.ld, steps.batch)


MAKERS: dict[str, Callable[[Any, LinalgSteps], Plan]] = {
    "inv": inverse,
    "det": determinant,
    "slogdet": determinant,
    "matrix_norm": matrix_norm,
    "matrix_rank": matrix_rank,
    "pinv": pseudo_inverse,
    "lstsq": least_squares,
    "qr_multiply": qr_multiply,
    "orgqr": orgqr,
    "ormqr": ormqr,
}
