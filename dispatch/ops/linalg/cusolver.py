"""Factorizations and systems of equations by cuSOLVER's 64-bit interface: plans of `cudabind.sys.cusolverDn` calls.

LAPACK is column-major. Row-major matrices are copied to column-major ones, since the routines overwrite their operands
and a copy is needed anyway. Cholesky factorizes the lower triangle of a column-major Hermitian matrix: cuSOLVER needs
little more than half the time of the upper triangle; if the request reads the upper triangle, its adjoint is copied.
Follows https://docs.nvidia.com/cuda/cusolver/#dense-linear-solver-reference-64-bit-api.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

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

S = TypeVar("S", bound=LinalgSteps)

OP_N, OP_T = cb.cublasOperation_t.CUBLAS_OP_N, cb.cublasOperation_t.CUBLAS_OP_T
OPERATIONS = (OP_N, OP_T, cb.cublasOperation_t.CUBLAS_OP_C)
PIVOT_BYTES = 8


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; if there are no elements only a status is written."""
    steps = LinalgSteps(request, executor, row)
    if not all(request.layout_of(name).size for name in request.reads):
        if request.op == "qr" and request.mode is QrMode.COMPLETE:
            steps.identity(steps.matrix("q"))
        return steps.idle()
    return MAKERS[request.op](request, steps)


# -- Cholesky ---------------------------------------------------------------------------------------------------------
def cholesky(request: CholeskyRequest, steps: LinalgSteps) -> Plan:
    """Copy the triangle, with zeros in the other one, to a column-major lower triangle, and factorize it there.

    U is the transpose of the L of the transposed matrix. A result of the other order is computed in scratch memory. The
    exception is one large matrix that is overwritten: `potrf` factorizes its transpose as an upper triangle, which
    takes longer.
    """
    a, out, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    if not request.lower:
        a, out = a.mT, out.mT
    many = is_batched(steps, out)
    if request.is_in_place and not many and out.mT.is_column_major and not out.is_column_major:
        steps.copy(a, out, CopyMode.LOWER)
        factor_cholesky(steps, out.mT, info, UPPER)  # conj(A) = Lᵀᴴ·Lᵀ
    else:
        target = steps.target(out)
        steps.copy(a, target, CopyMode.LOWER)
        factor_cholesky(steps, target, info)
        if many or target != out:
            steps.copy(target, out, CopyMode.LOWER)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=True)


def copy_lower(steps: LinalgSteps, a: Matrix, target: Matrix, *, lower: bool) -> None:
    """Copy one triangle of a Hermitian matrix as a lower triangle, for which `potrf` is fastest."""
    steps.copy(a if lower else a.mT, target, CopyMode.LOWER, conj=not lower)


def is_batched(steps: LinalgSteps, a: Matrix) -> bool:
    """Whether `potrfBatched` factorizes the matrices; it uses the other triangle as workspace."""
    return steps.batch > 1 and a.rows <= MAX_BATCHED_ROWS


def factor_cholesky(steps: LinalgSteps, a: Matrix, info: OperandPointer, uplo: cb.cublasFillMode_t = LOWER) -> None:
    """`potrf` over each matrix, or one batched call if they are small."""
    kind = cuda_type(a.dtype)
    if is_batched(steps, a):
        name = f"cusolverDn{LETTERS[a.dtype]}potrfBatched"
        steps.call(name, uplo, a.rows, steps.pointers(a), a.ld, info._replace(batch_stride=0), steps.batch, count=1)
        return
    steps.call_x("cusolverDnXpotrf", uplo, a.rows, kind, a.pointer, a.ld, kind, info=info)


def cho_solve(request: ChoSolveRequest, steps: LinalgSteps) -> Plan:
    """Copy b into the result and solve there."""
    c, lower, out = steps.matrix("c"), request.lower, steps.matrix("out")
    if c.mT.is_column_major and not c.is_column_major and not c.dtype.is_complex:
        c, lower = c.mT, not lower
    elif not c.is_column_major:
        factor = steps.target(c)
        copy_lower(steps, c, factor, lower=lower)  # L = Uᴴ
        c, lower = factor, True
    x = steps.target(out)
    steps.copy(steps.matrix("b"), x)
    steps.solve_cholesky(c, x, lower=lower)
    steps.finish(x, out)
    return steps.plan(capture_safe=True)


# -- LU ---------------------------------------------------------------------------------------------------------------
def lu_factor(request: LuFactorRequest, steps: LinalgSteps) -> Plan:
    """Copy A into the result, column-major, and factorize it there."""
    del request
    out = steps.matrix("out")
    target = steps.target(out)
    steps.copy(steps.matrix("a"), target)
    factor_lu(steps, target, steps.vector("pivots"), steps.vector("info"))
    steps.finish(target, out)
    return steps.plan(capture_safe=True)


def factor_lu(steps: LinalgSteps, a: Matrix, pivots: OperandPointer, info: OperandPointer) -> None:
    """`getrf` over each matrix; if a matrix is not finite all its factors become NaN.

    For a matrix with NaN cuSOLVER 12.0 can return only finite numbers and a status of 0.
    """
    kind, flags = cuda_type(a.dtype), steps.flag_nonfinite(a)
    steps.call_x(
        "cusolverDnXgetrf", a.rows, a.cols, kind, a.pointer, a.ld, pivots, kind, info=info, not_in_query=pivots
    )
    steps.fill_nan_where(flags, a)


def lu_solve(request: LuSolveRequest, steps: LinalgSteps) -> Plan:
    """Solve with both triangles; the factors are copied if their columns are not dense."""
    lu = steps.column_major(steps.matrix("lu"))
    solve_lu(steps, lu, steps.vector("pivots"), steps.matrix("b"), steps.matrix("out"), OPERATIONS[request.trans])
    return steps.plan(capture_safe=True)


def solve(request: SolveRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of A, and solve in the result.

    The transposed matrix would also do, without a change of memory order. But for a singular matrix it has other
    pivots, and the status would differ from that of `lu_factor`.
    """
    if request.assume_a not in (MatrixKind.GEN, MatrixKind.POS):
        return symmetric.solve(request, steps)
    a, out, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    copy = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    if request.assume_a is MatrixKind.POS:
        solve_positive_definite(request, steps, copy)
    else:
        pivots = steps.scratch(a.rows * PIVOT_BYTES)
        steps.copy(a, copy)
        factor_lu(steps, copy, pivots, info)
        solve_lu(steps, copy, pivots, steps.matrix("b"), out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=True)


def solve_positive_definite(request: SolveRequest, steps: LinalgSteps, copy: Matrix) -> None:
    """Copy the triangle to scratch memory, factorize it there, and solve in the result."""
    out = steps.matrix("out")
    x = steps.target(out)
    copy_lower(steps, steps.matrix("a"), copy, lower=request.lower)
    factor_cholesky(steps, copy, steps.vector("info"))
    steps.copy(steps.matrix("b"), x)
    steps.solve_cholesky(copy, x, lower=True)
    steps.finish(x, out)


# -- QR ---------------------------------------------------------------------------------------------------------------
def qr(request: QrRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of A in Q's memory, or in scratch memory; copy R out of it; form Q."""
    a = steps.matrix("a")
    least = min(a.rows, a.cols)
    if request.mode is QrMode.RAW:
        return raw_qr(steps, factor_qr)
    tau, r = steps.scratch(least * a.dtype.itemsize), steps.matrix("r")
    if request.mode is QrMode.R:
        target = steps.scratch_matrix(a.dtype, a.rows, a.cols)
        steps.copy(a, target)
        factor_qr(steps, target, tau)
        steps.copy(target.first_rows(least), r, CopyMode.UPPER)
        return steps.plan(capture_safe=True)
    q = steps.matrix("q")
    most = max(a.cols, q.cols)
    memory = steps.scratch_matrix(a.dtype, a.rows, most) if most > q.cols else steps.target(q)
    factors, target = memory.first_columns(a.cols), memory.first_columns(q.cols)
    steps.copy(a, factors)
    factor_qr(steps, factors, tau)
    steps.copy(factors.first_rows(r.rows), r, CopyMode.UPPER)
    name = "ungqr" if a.dtype.is_complex else "orgqr"
    arguments = (q.rows, q.cols, least, target.pointer, target.ld, tau)
    steps.call_with_work(f"cusolverDn{LETTERS[a.dtype]}{name}", a.dtype, *arguments, info=steps.ignored_info())
    steps.finish(target, q)
    return steps.plan(capture_safe=True)


def raw_qr(steps: S, factor: Callable[[S, Matrix, OperandPointer], None]) -> Plan:
    """Copy A into the result and factorize it there; nothing else is made of the Householder vectors."""
    h = steps.matrix("h")
    target = steps.target(h)
    steps.copy(steps.matrix("a"), target)
    factor(steps, target, steps.vector("tau"))
    steps.finish(target, h)
    return steps.plan(capture_safe=True)


def factor_qr(steps: LinalgSteps, a: Matrix, tau: OperandPointer) -> None:
    """`geqrf` over each matrix; if a matrix is not finite all of R and the reflections become NaN.

    For a column with NaN cuSOLVER 12.0 gives a reflection of 0, unlike LAPACK: R may then be finite.
    """
    kind, least, flags = cuda_type(a.dtype), min(a.rows, a.cols), steps.flag_nonfinite(a)
    arguments = (a.rows, a.cols, kind, a.pointer, a.ld, kind, tau, kind)
    steps.call_x("cusolverDnXgeqrf", *arguments, info=steps.ignored_info())
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
