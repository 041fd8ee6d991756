"""The exponential of a matrix by scaling and squaring: products by cuBLAS, one system of equations by LU.

Higham, The scaling and squaring method for the matrix exponential revisited (2005): Padé's approximant of degree 13 in
double precision, of degree 7 in single precision. The number of squarings follows from the norm, which stays on the
device. Therefore all rounds are enqueued, and a kernel keeps the result of a round only for matrices that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import F32, I32
from dispatch.libraries.cusolver.exponential import SOURCE
from dispatch.libraries.cusolver.reductions import Reduce
from dispatch.ops.linalg.base import real_of
from dispatch.ops.linalg.cusolver import OP_N, PIVOT_BYTES, LinalgSteps, factor_lu
from dispatch.ops.linalg.cusolver_derived import as_column, multiply, reduce, scratch_copy, scratch_vector
from dispatch.ops.linalg.exponential import THETA
from dispatch.ops.linalg.triangles import solve_lu

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
    from dispatch.ops.linalg.exponential import ExpmRequest

__all__ = ["expm_steps", "plan"]

ELEMENTS_PER_BLOCK = 2048  # elements per block; most launches have nothing to do


def plan(request: ExpmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; cuSOLVER solves its system."""
    steps = LinalgSteps(request, executor, row)
    return expm_steps(request, steps, lambda q, p: solve_by_lu(steps, q, p)) if request.a.size else steps.idle()


def solve_by_lu(steps: LinalgSteps, q: Matrix, p: Matrix) -> None:
    """Q⁻¹·P in P's memory, and the status of LU."""
    pivots = steps.scratch(q.rows * PIVOT_BYTES)
    factor_lu(steps, q, pivots, steps.vector("info"))
    solve_lu(steps, q, pivots, p, p)


def expm_steps(request: ExpmRequest, steps: LinalgSteps, solve: Callable[[Matrix, Matrix], None]) -> Plan:
    """The steps for non-empty matrices; `solve` replaces P by Q⁻¹·P and writes LU's status to info.

    A row-major result is computed as the exponential of the transposed matrix.
    """
    a, out, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    norm = one_norm(steps, a)
    if out.mT.is_column_major and not out.is_column_major:
        a, out = a.mT, out.mT
    n, dtype = a.rows, a.dtype
    scaled, x = scratch_copy(steps, a), steps.target(out)
    squarings, status = scratch_vector(steps, I32, 1), scratch_vector(steps, I32, 1)
    arguments = (scaled.pointer, n, norm, THETA[real_of(dtype)], request.squarings, squarings, status)
    launch(steps, "scale_to", n, dtype, *arguments)
    second, denominator = pade_quotient(steps, scaled, x)
    solve(denominator, x)
    for number in range(request.squarings):
        product(steps, x, x, second)
        launch(steps, "keep_squares", n, dtype, n, squarings, number, second.pointer, x)
    steps.launch("join_status", dtype, 1, status, info, source=SOURCE)
    steps.finish(x, out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=True)


def one_norm(steps: LinalgSteps, a: Matrix) -> OperandPointer:
    """The largest absolute column sum, in scratch memory."""
    real = real_of(a.dtype)
    sums, norm = scratch_vector(steps, real, a.cols), scratch_vector(steps, real, 1)
    reduce(steps, a, sums, Reduce.SUM)
    reduce(steps, as_column(sums, real, a.cols), norm, Reduce.MAX)
    return norm


def pade_quotient(steps: LinalgSteps, a: Matrix, x: Matrix) -> tuple[Matrix, Matrix]:
    """Padé's numerator V + U in x; returns memory that is free for reuse and the denominator V - U."""
    n, dtype = a.rows, a.dtype
    second, fourth, sixth, odd, even = (steps.scratch_matrix(dtype, n, n) for _ in range(5))
    product(steps, a, a, second)
    product(steps, second, second, fourth)
    product(steps, fourth, second, sixth)
    launch(steps, "pade_sums", n, dtype, n, *(one.pointer for one in (second, fourth, sixth, odd, even)))
    if real_of(dtype) is not F32:  # the sums of higher powers, in the memory of the lower ones
        product(steps, sixth, second, odd, beta=1.0)
        product(steps, sixth, fourth, even, beta=1.0)
    product(steps, a, odd, x)
    launch(steps, "sum_and_difference", n, dtype, n, x, even.pointer)
    return second, even


def product(steps: LinalgSteps, first: Matrix, second: Matrix, out: Matrix, beta: float = 0.0) -> None:
    """out = first · second + beta · out."""
    multiply(steps, (first, OP_N), (second, OP_N), out, 1.0, beta)


def launch(steps: LinalgSteps, name: str, n: int, dtype: Any, *arguments: Any) -> None:
    """A kernel over all elements of square matrices."""
    steps.launch(name, dtype, n * n, *arguments, per_block=ELEMENTS_PER_BLOCK, source=SOURCE)
