"""Systems with LU factors: a kernel of this library exchanges the rows, and cuBLAS's `trsm` solves both triangles.

cuSOLVER's `getrs` does the same in one and a half times the time for many right-hand sides. The matrices of a batch are
one call each. Follows https://docs.nvidia.com/cuda/cublas/#cublas-t-trsm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cublas.batched import call_each
from dispatch.libraries.cublas.calls import function_name
from dispatch.libraries.cusolver.row_permutations import MAX_SHARED, PermutationFromPivots, PermuteMode, PermuteRows
from dispatch.ops.linalg.steps import LOWER, UPPER

if TYPE_CHECKING:
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
    from dispatch.ops.linalg.steps import LinalgSteps

__all__ = ["invert_lu", "solve_lu"]

LEFT, OP_N = cb.cublasSideMode_t.CUBLAS_SIDE_LEFT, cb.cublasOperation_t.CUBLAS_OP_N
UNIT, NON_UNIT = cb.cublasDiagType_t.CUBLAS_DIAG_UNIT, cb.cublasDiagType_t.CUBLAS_DIAG_NON_UNIT
NUMBER = 4  # bytes of a row index


def solve_lu(
    steps: LinalgSteps,
    lu: Matrix,
    pivots: OperandPointer,
    b: Matrix,
    wanted: Matrix,
    trans: cb.cublasOperation_t = OP_N,
) -> None:
    """Write the solution to `wanted`, from column-major factors; b may be in the same memory.

    P·A = L·U. With A the rows of b are exchanged first; with Aᵀ = Uᵀ·Lᵀ·P the rows of the solution are exchanged last.
    """
    order = permutation_of(steps, lu, pivots)
    if trans == OP_N:
        is_given = steps.request.out is not None  # type: ignore[attr-defined]
        is_apart = b.pointer.operand != wanted.pointer.operand and not (is_given and have_equal_strides(b, wanted))
        x = steps.target(wanted) if is_apart else steps.scratch_matrix(b.dtype, b.rows, b.cols)
        permute_rows(steps, b, x, order, PermuteMode.GATHER)
        solve_triangles(steps, lu, x, OP_N)
        steps.finish(x, wanted)
        return
    x = steps.scratch_matrix(b.dtype, b.rows, b.cols)
    steps.copy(b, x)
    solve_triangles(steps, lu, x, trans)
    permute_rows(steps, x, wanted, order, PermuteMode.SCATTER)


def invert_lu(steps: LinalgSteps, lu: Matrix, pivots: OperandPointer, x: Matrix) -> None:
    """A⁻¹, the solution for the identity, in x's memory."""
    order = permutation_of(steps, lu, pivots)
    permute_rows(steps, x, x, order, PermuteMode.IDENTITY)
    solve_triangles(steps, lu, x, OP_N)


def have_equal_strides(one: Matrix, other: Matrix) -> bool:
    """Whether two operands have the same strides, so that they may be the same memory."""
    return (one.row_stride, one.col_stride, one.pointer.batch_stride) == (
        other.row_stride,
        other.col_stride,
        other.pointer.batch_stride,
    )


def permutation_of(steps: LinalgSteps, lu: Matrix, pivots: OperandPointer) -> OperandPointer:
    """The row order that results from the pivots."""
    order = steps.scratch(lu.rows * NUMBER)
    scratch = steps.scratch(lu.rows * NUMBER) if lu.rows > MAX_SHARED else None
    steps.append(PermutationFromPivots(steps.executor, pivots, order, scratch, lu, steps.batch))
    return order


def permute_rows(steps: LinalgSteps, source: Matrix, target: Matrix, order: OperandPointer, kind: PermuteMode) -> None:
    """A copy with permuted rows."""
    steps.append(PermuteRows(steps.executor, source, target, order, steps.batch, kind))


def solve_triangles(steps: LinalgSteps, lu: Matrix, x: Matrix, trans: cb.cublasOperation_t) -> None:
    """Solve with L and then U, or for a transposed matrix with U and then L, for each matrix in x's memory."""
    halves = ((LOWER, UNIT), (UPPER, NON_UNIT))
    for uplo, diag in halves if trans == OP_N else halves[::-1]:
        one: Any = np.ones(1, x.dtype.numpy)
        sizes = (x.rows, x.cols, lu.ld, x.ld)
        arguments = (LEFT, uplo, trans, diag, x.rows, x.cols, one, lu.pointer, lu.ld, x.pointer, x.ld)
        steps.append(call_each(steps.executor, function_name("trsm", x.dtype, sizes), arguments, steps.batch))
