"""Systems with the factors of LU: rows exchanged by a kernel of this library, and both triangles by cuBLAS's `trsm`.

cuSOLVER's `getrs` does as much, in one and a half times the time for many right sides. Matrices of a batch are called
for one after the other. Follows https://docs.nvidia.com/cuda/cublas/#cublas-t-trsm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cublas.batched import each_call
from dispatch.libraries.cublas.calls import function_name
from dispatch.libraries.cusolver.exchanges import MOST_SHARED, Exchange, OrderRows, Rows
from dispatch.ops.linalg.operands import LOWER, UPPER

if TYPE_CHECKING:
    from dispatch.libraries.cusolver.matrix import Matrix, Place
    from dispatch.ops.linalg.operands import Operands

__all__ = ["invert_lu", "solve_lu"]

LEFT, PLAIN = cb.cublasSideMode_t.CUBLAS_SIDE_LEFT, cb.cublasOperation_t.CUBLAS_OP_N
UNIT, NON_UNIT = cb.cublasDiagType_t.CUBLAS_DIAG_UNIT, cb.cublasDiagType_t.CUBLAS_DIAG_NON_UNIT
NUMBER = 4  # bytes of the number of a row


def solve_lu(
    steps: Operands, lu: Matrix, pivots: Place, b: Matrix, wanted: Matrix, trans: cb.cublasOperation_t = PLAIN
) -> None:
    """The solution where it is wanted, from factors by columns; b may be there, too.

    P·A = L·U. With A the rows of b are exchanged first; with Aᵀ = Uᵀ·Lᵀ·P those of the solution go back at the end.
    """
    order = order_of(steps, lu, pivots)
    if trans == PLAIN:
        is_given = steps.request.out is not None  # type: ignore[attr-defined]
        is_apart = b.place.operand != wanted.place.operand and not (is_given and lie_alike(b, wanted))
        x = steps.target(wanted) if is_apart else steps.scratch_matrix(b.dtype, b.rows, b.cols)
        exchange(steps, b, x, order, Rows.GATHER)
        substitute(steps, lu, x, PLAIN)
        steps.finish(x, wanted)
        return
    x = steps.scratch_matrix(b.dtype, b.rows, b.cols)
    steps.copy(b, x)
    substitute(steps, lu, x, trans)
    exchange(steps, x, wanted, order, Rows.SCATTER)


def invert_lu(steps: Operands, lu: Matrix, pivots: Place, x: Matrix) -> None:
    """The solution for the identity, in x's memory."""
    order = order_of(steps, lu, pivots)
    exchange(steps, x, x, order, Rows.IDENTITY)
    substitute(steps, lu, x, PLAIN)


def lie_alike(one: Matrix, other: Matrix) -> bool:
    """Whether two operands may be one, by how they lie."""
    return (one.row, one.col, one.place.step) == (other.row, other.col, other.place.step)


def order_of(steps: Operands, lu: Matrix, pivots: Place) -> Place:
    """The order of rows that pivots lead to."""
    order = steps.scratch(lu.rows * NUMBER)
    room = steps.scratch(lu.rows * NUMBER) if lu.rows > MOST_SHARED else None
    steps.append(OrderRows(steps.executor, pivots, order, room, lu, steps.batch))
    return order


def exchange(steps: Operands, source: Matrix, target: Matrix, order: Place, kind: Rows) -> None:
    """A copy with its rows in that order."""
    steps.append(Exchange(steps.executor, source, target, order, steps.batch, kind))


def substitute(steps: Operands, lu: Matrix, x: Matrix, trans: cb.cublasOperation_t) -> None:
    """L and then U, or of a transposed matrix U and then L, over each matrix in x's memory."""
    halves = ((LOWER, UNIT), (UPPER, NON_UNIT))
    for uplo, diag in halves if trans == PLAIN else halves[::-1]:
        one: Any = np.ones(1, x.dtype.numpy)
        sizes = (x.rows, x.cols, lu.ld, x.ld)
        given = (LEFT, uplo, trans, diag, x.rows, x.cols, one, lu.place, lu.ld, x.place, x.ld)
        steps.append(each_call(steps.executor, function_name("trsm", x.dtype, sizes), given, steps.batch))
