"""Factorizations and systems of equations by cuSOLVER's 64-bit interface: plans of `cudabind.sys.cusolverDn` calls.

LAPACK reads columns. Matrices in rows are copied with their rows and columns exchanged, as the routines overwrite what
they are given anyway. Of a Hermitian matrix the lower triangle by columns is factorized, which cuSOLVER does in little
more than half the time that it takes for the upper one; where that one is read its adjoint is copied. Follows
https://docs.nvidia.com/cuda/cusolver/#dense-linear-solver-reference-64-bit-api.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cusolver.calls import LETTERS, cuda_type
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.matrix import Matrix
from dispatch.ops.linalg import cusolver_symmetric as symmetric
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
from dispatch.ops.linalg.steps import LOWER, MAX_BATCHED_ROWS, UPPER, LinalgSteps
from dispatch.ops.linalg.triangles import solve_lu

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import OperandPointer

__all__ = ["LOWER", "UPPER", "LinalgSteps", "plan"]

OP_N, OP_T = cb.cublasOperation_t.CUBLAS_OP_N, cb.cublasOperation_t.CUBLAS_OP_T
OPERATIONS = (OP_N, OP_T, cb.cublasOperation_t.CUBLAS_OP_C)
PIVOT_BYTES = 8


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; nothing but a status is written where there is no element."""
    steps = LinalgSteps(request, executor, row)
    if not all(request.layout_of(name).size for name in request.reads):
        if request.op == "qr" and request.mode is QrMode.COMPLETE:
            steps.identity(steps.matrix("q"))
        return steps.idle()
    return MAKERS[request.op](request, steps)


# -- Cholesky ---------------------------------------------------------------------------------------------------------
def cholesky(request: CholeskyRequest, steps: LinalgSteps) -> Plan:
    """Copy the triangle, with zeros beside it, to where a lower one lies by columns, and factorize it there.

    U is, transposed, the L of the transposed matrix. A result that lies the other way is made in scratch memory, but
    of one large matrix that is overwritten, whose transpose `potrf` takes as an upper triangle: it takes longer then.
    """
    a, wanted, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    if not request.lower:
        a, wanted = a.mT, wanted.mT
    many = is_batched(steps, wanted)
    if request.is_in_place and not many and wanted.mT.is_column_major and not wanted.is_column_major:
        steps.copy(a, wanted, CopyMode.LOWER)
        factor_cholesky(steps, wanted.mT, info, UPPER)  # conj(A) = Lᵀᴴ·Lᵀ
    else:
        made = steps.target(wanted)
        steps.copy(a, made, CopyMode.LOWER)
        factor_cholesky(steps, made, info)
        if many or made != wanted:
            steps.copy(made, wanted, CopyMode.LOWER)
    steps.fill_nan_where(info, wanted)
    return steps.plan(capture_safe=True)


def copy_lower(steps: LinalgSteps, a: Matrix, target: Matrix, *, lower: bool) -> None:
    """The lower triangle of a Hermitian matrix, of which one triangle is read: `potrf` is fastest with it."""
    steps.copy(a if lower else a.mT, target, CopyMode.LOWER, conj=not lower)


def is_batched(steps: LinalgSteps, a: Matrix) -> bool:
    """Whether `potrfBatched` factorizes the matrices, which takes the other triangle for its workspace."""
    return steps.batch > 1 and a.rows <= MAX_BATCHED_ROWS


def factor_cholesky(steps: LinalgSteps, a: Matrix, info: OperandPointer, uplo: cb.cublasFillMode_t = LOWER) -> None:
    """`potrf` over each matrix, or all at once where they are small."""
    kind = cuda_type(a.dtype)
    if is_batched(steps, a):
        name = f"cusolverDn{LETTERS[a.dtype]}potrfBatched"
        steps.call(name, uplo, a.rows, steps.pointers(a), a.ld, info._replace(batch_stride=0), steps.batch, count=1)
        return
    steps.call_x("cusolverDnXpotrf", uplo, a.rows, kind, a.pointer, a.ld, kind, info=info)


def cho_solve(request: ChoSolveRequest, steps: LinalgSteps) -> Plan:
    """Copy b into the result and solve there."""
    c, lower, wanted = steps.matrix("c"), request.lower, steps.matrix("out")
    if c.mT.is_column_major and not c.is_column_major and not c.dtype.is_complex:
        c, lower = c.mT, not lower
    elif not c.is_column_major:
        made = steps.target(c)
        copy_lower(steps, c, made, lower=lower)  # L = Uᴴ
        c, lower = made, True
    x = steps.target(wanted)
    steps.copy(steps.matrix("b"), x)
    steps.solve_cholesky(c, x, lower=lower)
    steps.finish(x, wanted)
    return steps.plan(capture_safe=True)


# -- LU ---------------------------------------------------------------------------------------------------------------
def lu_factor(request: LuFactorRequest, steps: LinalgSteps) -> Plan:
    """Copy A into the result, by columns, and factorize it there."""
    del request
    wanted = steps.matrix("out")
    made = steps.target(wanted)
    steps.copy(steps.matrix("a"), made)
    factor_lu(steps, made, steps.vector("pivots"), steps.vector("info"))
    steps.finish(made, wanted)
    return steps.plan(capture_safe=True)


def factor_lu(steps: LinalgSteps, a: Matrix, pivots: OperandPointer, info: OperandPointer) -> None:
    """`getrf` over each matrix; of one that is not finite all factors become NaN.

    cuSOLVER 12.0's can leave finite numbers alone of a matrix with NaN, with a status of 0.
    """
    kind, flags = cuda_type(a.dtype), steps.flag_nonfinite(a)
    steps.call_x(
        "cusolverDnXgetrf", a.rows, a.cols, kind, a.pointer, a.ld, pivots, kind, info=info, not_in_query=pivots
    )
    steps.fill_nan_where(flags, a)


def lu_solve(request: LuSolveRequest, steps: LinalgSteps) -> Plan:
    """Solve with both triangles; the factors are copied where their columns are not dense."""
    lu = steps.matrix("lu")
    if not lu.is_column_major:
        made = steps.target(lu)
        steps.copy(lu, made)
        lu = made
    solve_lu(steps, lu, steps.vector("pivots"), steps.matrix("b"), steps.matrix("out"), OPERATIONS[request.trans])
    return steps.plan(capture_safe=True)


def solve(request: SolveRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of A, and solve in the result.

    The transposed matrix would do as well, and need no exchange of rows and columns; but of a singular one it has other
    pivots, and the status would not be that of `lu_factor`.
    """
    if request.assume_a not in (MatrixKind.GEN, MatrixKind.POS):
        return symmetric.solve(request, steps)
    a, wanted, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    copy = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    if request.assume_a is MatrixKind.POS:
        x = steps.target(wanted)
        copy_lower(steps, a, copy, lower=request.lower)
        factor_cholesky(steps, copy, info)
        steps.copy(steps.matrix("b"), x)
        steps.solve_cholesky(copy, x, lower=True)
        steps.finish(x, wanted)
    else:
        pivots = steps.scratch(a.rows * PIVOT_BYTES)
        steps.copy(a, copy)
        factor_lu(steps, copy, pivots, info)
        solve_lu(steps, copy, pivots, steps.matrix("b"), wanted)
    steps.fill_nan_where(info, wanted)
    return steps.plan(capture_safe=True)


# -- QR ---------------------------------------------------------------------------------------------------------------
def qr(request: QrRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of A where Q is to be, or in scratch memory; copy R out of it; make Q of what is left."""
    a = steps.matrix("a")
    least = min(a.rows, a.cols)
    if request.mode is QrMode.RAW:
        wanted = steps.matrix("h")
        made = steps.target(wanted)
        steps.copy(a, made)
        factor_qr(steps, made, steps.vector("tau"))
        steps.finish(made, wanted)
        return steps.plan(capture_safe=True)
    tau, r = steps.scratch(least * a.dtype.itemsize), steps.matrix("r")
    if request.mode is QrMode.R:
        made = steps.scratch_matrix(a.dtype, a.rows, a.cols)
        steps.copy(a, made)
        factor_qr(steps, made, tau)
        steps.copy(made.first_rows(least), r, CopyMode.UPPER)
        return steps.plan(capture_safe=True)
    q = steps.matrix("q")
    most = max(a.cols, q.cols)
    room = steps.scratch_matrix(a.dtype, a.rows, most) if most > q.cols else steps.target(q)
    factors, made = room.first_columns(a.cols), room.first_columns(q.cols)
    steps.copy(a, factors)
    factor_qr(steps, factors, tau)
    steps.copy(factors.first_rows(r.rows), r, CopyMode.UPPER)
    name = "ungqr" if a.dtype.is_complex else "orgqr"
    given = (q.rows, q.cols, least, made.pointer, made.ld, tau)
    steps.call_with_work(f"cusolverDn{LETTERS[a.dtype]}{name}", a.dtype, *given, info=steps.ignored_info())
    steps.finish(made, q)
    return steps.plan(capture_safe=True)


def factor_qr(steps: LinalgSteps, a: Matrix, tau: OperandPointer) -> None:
    """`geqrf` over each matrix; of one that is not finite all of R and the reflections become NaN.

    cuSOLVER 12.0's gives 0 for the reflection of a column with NaN, which LAPACK's does not: R may be finite then.
    """
    kind, least, flags = cuda_type(a.dtype), min(a.rows, a.cols), steps.flag_nonfinite(a)
    given = (a.rows, a.cols, kind, a.pointer, a.ld, kind, tau, kind)
    steps.call_x("cusolverDnXgeqrf", *given, info=steps.ignored_info())
    steps.fill_nan_where(flags, a, Matrix(tau, a.dtype, least, 1, 1, max(1, least)))


MAKERS: dict[str, Callable[[Any, LinalgSteps], Plan]] = {
    "cholesky": cholesky,
    "cho_solve": cho_solve,
    "lu_factor": lu_factor,
    "lu_solve": lu_solve,
    "solve": solve,
    "ldl": symmetric.ldl,
    "ldl_solve": symmetric.ldl_solve,
    "qr": qr,
}
