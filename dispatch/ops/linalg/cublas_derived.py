"""Inverses, least squares and exponentials of many small matrices by cuBLAS: one call, not one per matrix.

Up to 32 rows `matinvBatched` inverts and reads its operand in place. For more rows `getriBatched` inverts the factors
of `getrfBatched`. `gelsBatched` supports systems with at least as many equations as unknowns. The systems of
exponentials are solved by `getrfBatched` and `getrsBatched`. Follows
https://docs.nvidia.com/cuda/cublas/#blas-like-extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.cusolver.calls import real_of
from dispatch.libraries.cusolver.reductions import Reduce
from dispatch.ops.linalg.cublas import BatchedSteps, factor_lu, solve_lu_batched
from dispatch.ops.linalg.cusolver import OP_N
from dispatch.ops.linalg.cusolver_derived import (
    as_column,
    has_residuals,
    multiply,
    product_operand,
    reduce,
    scratch_copy,
)
from dispatch.ops.linalg.cusolver_exponential import expm_steps
from dispatch.ops.linalg.rules import MAX_INVERSE_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request over several small, non-empty matrices; the rules of the rows ensure this."""
    return MAKERS[request.op](BatchedSteps(request, executor, row))


def inverse(steps: BatchedSteps) -> Plan:
    """Invert into the result's own memory if its columns are dense; the operand is not modified.

    The inverse of a row-major matrix is the transposed inverse of its transpose. But for a singular matrix the
    transpose has other pivots, and the status would differ from that of `lu_factor`.
    """
    a, out, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    target = steps.target(out)
    if a.rows <= MAX_INVERSE_ROWS:
        source = steps.column_major(a)
        read = (steps.pointers(source), source.ld)
        steps.batched("matinv", a.rows, *read, steps.pointers(target), target.ld, info._replace(batch_stride=0))
    else:
        factors = scratch_copy(steps, a)
        pivots = factor_lu(steps, factors)
        arguments = (steps.pointers(factors), factors.ld, pivots)
        ignored = steps.ignored_info()  # `getrfBatched` has written the status
        steps.batched("getri", a.rows, *arguments, steps.pointers(target), target.ld, ignored)
    steps.finish(target, out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=True)


def least_squares(steps: BatchedSteps) -> Plan:
    """`gelsBatched` over copies; the content below x is undocumented, so b - A·x is computed separately."""
    a, b, out, info = steps.matrix("a"), steps.matrix("b"), steps.matrix("out"), steps.vector("info")
    factors, x = scratch_copy(steps, a), scratch_copy(steps, b)
    host_info = np.zeros(1, np.int32)  # on the host: whether the arguments are valid
    lists = (steps.pointers(factors), factors.ld, steps.pointers(x), x.ld)
    steps.batched("gels", OP_N, a.rows, a.cols, b.cols, *lists, host_info, info._replace(batch_stride=0))
    solution = x.first_rows(a.cols)
    if has_residuals(a):
        residual, squares = scratch_copy(steps, b), steps.vector("residuals")
        multiply(steps, product_operand(steps, a), (solution, OP_N), residual, -1.0, 1.0)
        reduce(steps, residual, squares, Reduce.SQUARES)
        steps.fill_nan_where(info, as_column(squares, real_of(a.dtype), b.cols))
    steps.copy(solution, out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=True)


def exponentials(steps: BatchedSteps) -> Plan:
    """Scaling and squaring; the systems of equations are one call of each routine."""
    request: Any = steps.request

    def solve(q: Matrix, p: Matrix) -> None:
        solve_lu_batched(steps, q, factor_lu(steps, q), p, OP_N)

    return expm_steps(request, steps, solve)


MAKERS: dict[str, Callable[[BatchedSteps], Plan]] = {
    "inv": inverse,
    "lstsq": least_squares,
    "expm": exponentials,
}
