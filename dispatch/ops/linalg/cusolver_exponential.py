"""The exponential of a matrix by scaling and squaring: products by cuBLAS, one system of equations by LU.

Higham, The scaling and squaring method for the matrix exponential revisited (2005): Padé's approximant of degree 13 in
double precision, of degree 7 in single precision. How often a matrix is squared follows from its norm, which stays on
the device: all rounds are enqueued, and a kernel keeps what a round makes of those matrices that it is for.
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

ELEMENTS_PER_BLOCK = 2048  # elements of a block of a kernel, which mostly has nothing to do


def plan(request: ExpmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request whose system is solved by cuSOLVER."""
    steps = LinalgSteps(request, executor, row)
    return expm_steps(request, steps, lambda q, p: solve_by_lu(steps, q, p)) if request.a.size else steps.idle()


def solve_by_lu(steps: LinalgSteps, q: Matrix, p: Matrix) -> None:
    """Q⁻¹·P in P's memory, and the status of LU."""
    pivots = steps.scratch(q.rows * PIVOT_BYTES)
    factor_lu(steps, q, pivots, steps.vector("info"))
    solve_lu(steps, q, pivots, p, p)


def expm_steps(request: ExpmRequest, steps: LinalgSteps, solve: Callable[[Matrix, Matrix], None]) -> Plan:
    """The steps for matrices with elements; `solve` makes Q⁻¹·P of Q and P in P's memory, and LU's status in info.

    What is wanted in rows is made as the exponential of the transposed matrix.
    """
    a, wanted, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    norm = one_norm(steps, a)
    if wanted.mT.is_column_major and not wanted.is_column_major:
        a, wanted = a.mT, wanted.mT
    n, dtype = a.rows, a.dtype
    scaled, x = scratch_copy(steps, a), steps.target(wanted)
    squarings, status = scratch_vector(steps, I32, 1), scratch_vector(steps, I32, 1)
    given = (scaled.pointer, n, norm, THETA[real_of(dtype)], request.squarings, squarings, status)
    launch(steps, "scale_to", n, dtype, *given)
    second, denominator = pade_quotient(steps, scaled, x)
    solve(denominator, x)
    for number in range(request.squarings):
        product(steps, x, x, second)
        launch(steps, "keep_squares", n, dtype, n, squarings, number, second.pointer, x)
    steps.launch("join_status", dtype, 1, status, info, source=SOURCE)
    steps.finish(x, wanted)
    steps.fill_nan_where(info, wanted)
    return steps.plan(capture_safe=True)


def one_norm(steps: LinalgSteps, a: Matrix) -> OperandPointer:
    """The largest sum of magnitudes of a column, in scratch memory."""
    real = real_of(a.dtype)
    sums, norm = scratch_vector(steps, real, a.cols), scratch_vector(steps, real, 1)
    reduce(steps, a, sums, Reduce.SUM)
    reduce(steps, as_column(sums, real, a.cols), norm, Reduce.MAX)
    return norm


def pade_quotient(steps: LinalgSteps, a: Matrix, x: Matrix) -> tuple[Matrix, Matrix]:
    """Padé's numerator V + U in x, and behind it memory that is free again and the denominator V - U."""
    n, dtype = a.rows, a.dtype
    second, fourth, sixth, odd, even = (steps.scratch_matrix(dtype, n, n) for _ in range(5))
    product(steps, a, a, second)
    product(steps, second, second, fourth)
    product(steps, fourth, second, sixth)
    launch(steps, "pade_sums", n, dtype, n, *(one.pointer for one in (second, fourth, sixth, odd, even)))
    if real_of(dtype) is not F32:  # the sums of higher powers, which stand where lower ones did
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
