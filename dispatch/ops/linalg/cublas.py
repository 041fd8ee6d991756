"""Factorizations and systems of many small matrices by cuBLAS: one call for all; cuSOLVER needs a call per matrix.

Memory layouts are those of cusolver.py. LU and QR of cuBLAS overwrite their operands, so the plans copy them;
`trsmBatched` writes the solutions of triangular systems directly to the result. A kernel of this library factorizes
singular matrices again, because `getrfBatched` leaves them incomplete. Follows
https://docs.nvidia.com/cuda/cublas/#blas-like-extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cublas.batched import ConvertPivots, FormQ, batched_call
from dispatch.libraries.cublas.singular import RefactorizeSingular
from dispatch.libraries.cusolver.calls import LETTERS
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.ops.linalg.cusolver import (
    LOWER,
    OP_N,
    OPERATIONS,
    UPPER,
    LinalgSteps,
    cho_solve,
    raw_qr,
    solve_positive_definite,
)
from dispatch.ops.linalg.request import (
    LuFactorRequest,
    LuSolveRequest,
    MatrixKind,
    QrMode,
    QrRequest,
    SolveRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

OP_C = cb.cublasOperation_t.CUBLAS_OP_C
LEFT, NOT_UNIT = cb.cublasSideMode_t.CUBLAS_SIDE_LEFT, cb.cublasDiagType_t.CUBLAS_DIAG_NON_UNIT
PIVOT_BYTES = 4


class BatchedSteps(LinalgSteps):
    """The steps of a plan that calls cuBLAS."""

    def batched(self, routine: str, *arguments: Any) -> None:
        """Call a routine once for all matrices; the batch size is appended to the arguments."""
        name = f"cublas{LETTERS[self.dtype]}{routine}Batched"
        self._steps.append(batched_call(self.executor, name, (*arguments, self.batch)))

    def narrow_pivots(self, n: int) -> OperandPointer:
        """Memory for cuBLAS's 32-bit pivots of all matrices, contiguous."""
        return self.scratch(n * PIVOT_BYTES)._replace(batch_stride=0)

    def convert_pivots(self, source: OperandPointer, target: OperandPointer, n: int, *, widen: bool) -> None:
        """Convert pivots between 32 and 64 bits."""
        self._steps.append(ConvertPivots(self.executor, source, target, n * self.batch, widen=widen))

    def refactorize_singular(self, a: Matrix, lu: Matrix, pivots: OperandPointer, info: OperandPointer) -> None:
        """Factorize singular matrices, which cuBLAS factorizes only in part."""
        self._steps.append(RefactorizeSingular(self.executor, a, lu, pivots, info, self.batch))

    def solve_cholesky(self, c: Matrix, x: Matrix, *, lower: bool) -> None:
        """`trsmBatched` with L and then with Lᴴ, or with Uᴴ and then with U."""
        one = np.ones(1, c.dtype.numpy)
        lists = (self.pointers(c), c.ld, self.pointers(x), x.ld)
        for trans in (OP_N, OP_C) if lower else (OP_C, OP_N):
            self.batched("trsm", LEFT, LOWER if lower else UPPER, trans, NOT_UNIT, c.rows, x.cols, one, *lists)

    def form_q(self, factors: Matrix, tau: OperandPointer, q: Matrix) -> None:
        """Form Q from Householder vectors."""
        self._steps.append(FormQ(self.executor, factors, tau, q, self.batch))


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request over several small, non-empty matrices; the rules of the rows ensure this."""
    return MAKERS[request.op](request, BatchedSteps(request, executor, row))


# -- LU ---------------------------------------------------------------------------------------------------------------
def lu_factor(request: LuFactorRequest, steps: BatchedSteps) -> Plan:
    """Copy A into the result, column-major, factorize it there, complete singular matrices, and widen the pivots."""
    del request
    a, out = steps.matrix("a"), steps.matrix("out")
    target = steps.target(out)
    if target is out and (a.row_stride, a.col_stride, a.pointer.batch_stride) == (
        target.row_stride,
        target.col_stride,
        target.pointer.batch_stride,
    ):
        original = steps.scratch_matrix(a.dtype, a.rows, a.cols)  # the result may be A itself
        steps.copy(a, original)
        a = original
    steps.copy(a, target)
    pivots = factor_lu(steps, target)
    steps.refactorize_singular(a, target, pivots, steps.vector("info"))
    steps.convert_pivots(pivots, steps.vector("pivots"), target.rows, widen=True)
    steps.finish(target, out)
    return steps.plan(capture_safe=True)


def factor_lu(steps: BatchedSteps, a: Matrix) -> OperandPointer:
    """`getrfBatched`; returns the pivots."""
    pivots = steps.narrow_pivots(a.rows)
    steps.batched("getrf", a.rows, steps.pointers(a), a.ld, pivots, steps.vector("info")._replace(batch_stride=0))
    return pivots


def lu_solve(request: LuSolveRequest, steps: BatchedSteps) -> Plan:
    """Copy b into the result and solve there, with 32-bit pivots."""
    lu, out = steps.column_major(steps.matrix("lu")), steps.matrix("out")
    pivots = steps.narrow_pivots(lu.rows)
    steps.convert_pivots(steps.vector("pivots"), pivots, lu.rows, widen=False)
    x = steps.target(out)
    steps.copy(steps.matrix("b"), x)
    solve_lu_batched(steps, lu, pivots, x, OPERATIONS[request.trans])
    steps.finish(x, out)
    return steps.plan(capture_safe=True)


def solve_lu_batched(
    steps: BatchedSteps, lu: Matrix, pivots: OperandPointer, x: Matrix, trans: cb.cublasOperation_t
) -> None:
    """`getrsBatched`, which reports invalid arguments on the host."""
    host_info = np.zeros(1, np.int32)
    lists = (steps.pointers(lu), lu.ld, pivots, steps.pointers(x), x.ld)
    steps.batched("getrs", trans, lu.rows, x.cols, *lists, host_info)


def solve(request: SolveRequest, steps: BatchedSteps) -> Plan:
    """Factorize a copy of A, and solve in the result."""
    a, out = steps.matrix("a"), steps.matrix("out")
    copy = steps.scratch_matrix(a.dtype, a.rows, a.cols)
    if request.assume_a is MatrixKind.POS:
        solve_positive_definite(request, steps, copy)
    else:
        x = steps.target(out)
        steps.copy(a, copy)
        pivots = factor_lu(steps, copy)
        steps.copy(steps.matrix("b"), x)
        solve_lu_batched(steps, copy, pivots, x, OP_N)
        steps.finish(x, out)
    steps.fill_nan_where(steps.vector("info"), out)
    return steps.plan(capture_safe=True)


# -- QR ---------------------------------------------------------------------------------------------------------------
def qr(request: QrRequest, steps: BatchedSteps) -> Plan:
    """Factorize a copy of A, copy R out of it, and form Q from the Householder vectors."""
    a = steps.matrix("a")
    least = min(a.rows, a.cols)
    if request.mode is QrMode.RAW:
        return raw_qr(steps, factor_qr)
    target, tau = steps.scratch_matrix(a.dtype, a.rows, a.cols), steps.scratch(least * a.dtype.itemsize)
    r = steps.matrix("r")
    steps.copy(a, target)
    factor_qr(steps, target, tau)
    steps.copy(target.first_rows(r.rows), r, CopyMode.UPPER)
    if request.mode is not QrMode.R:
        steps.form_q(target, tau, steps.matrix("q"))
    return steps.plan(capture_safe=True)


def factor_qr(steps: BatchedSteps, a: Matrix, tau: OperandPointer) -> None:
    """`geqrfBatched`, which reports invalid arguments on the host."""
    least = min(a.rows, a.cols)
    factors = Matrix(tau, a.dtype, least, 1, 1, least)
    host_info = np.zeros(1, np.int32)
    steps.batched("geqrf", a.rows, a.cols, steps.pointers(a), a.ld, steps.pointers(factors), host_info)


MAKERS: dict[str, Callable[[Any, BatchedSteps], Plan]] = {
    "cho_solve": cho_solve,
    "lu_factor": lu_factor,
    "lu_solve": lu_solve,
    "solve": solve,
    "qr": qr,
}
