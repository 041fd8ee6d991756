"""Inverses, least squares and exponentials of many small matrices by cuBLAS: one call, where cuSOLVER takes one each.

Up to 32 rows `matinvBatched` inverts, and reads its operand where it is; beyond, `getriBatched` what `getrfBatched` has
factorized. `gelsBatched` takes systems of as many equations as unknowns or more. Systems of exponentials are those of
`getrfBatched` and `getrsBatched`. Follows https://docs.nvidia.com/cuda/cublas/#blas-like-extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.cusolver.calls import real_of
from dispatch.libraries.cusolver.reductions import Reduce
from dispatch.ops.linalg.cublas import BatchedOperands, eliminate, exchange
from dispatch.ops.linalg.cusolver import PLAIN
from dispatch.ops.linalg.cusolver_derived import as_column, copied, has_residuals, multiply, operand_of, reduce
from dispatch.ops.linalg.cusolver_exponential import exponential
from dispatch.ops.linalg.rules import MOST_INVERTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request over several small matrices with elements, as the rows' rules have it."""
    return MAKERS[request.op](BatchedOperands(request, executor, row))


def inverse(steps: BatchedOperands) -> Plan:
    """Invert into the result's own memory where its columns are dense; the operand stays as it is.

    The inverse of a matrix in rows is that of its transpose, transposed; but of a singular one that has other pivots,
    and the status would not be that of `lu_factor`.
    """
    a, wanted, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    made = steps.target(wanted)
    if a.rows <= MOST_INVERTED:
        source = a if a.by_columns else copied(steps, a)
        read = (steps.pointers(source), source.ld)
        steps.batched("matinv", a.rows, *read, steps.pointers(made), made.ld, info._replace(step=0))
    else:
        factors = copied(steps, a)
        pivots = eliminate(steps, factors)
        given = (steps.pointers(factors), factors.ld, pivots)
        ignored = steps.ignored_info()  # `getrfBatched` has told the status
        steps.batched("getri", a.rows, *given, steps.pointers(made), made.ld, ignored)
    steps.finish(made, wanted)
    steps.spoil(info, wanted)
    return steps.plan(capture_safe=True)


def least_squares(steps: BatchedOperands) -> Plan:
    """`gelsBatched` over copies; what it leaves below x is documented nowhere, so that b - A·x is computed."""
    a, b, out, info = steps.matrix("a"), steps.matrix("b"), steps.matrix("out"), steps.vector("info")
    factors, x = copied(steps, a), copied(steps, b)
    said = np.zeros(1, np.int32)  # on the host: whether the arguments are sound
    lists = (steps.pointers(factors), factors.ld, steps.pointers(x), x.ld)
    steps.batched("gels", PLAIN, a.rows, a.cols, b.cols, *lists, said, info._replace(step=0))
    solution = x.lines(a.cols)
    if has_residuals(a):
        residual, squares = copied(steps, b), steps.vector("residuals")
        multiply(steps, operand_of(steps, a), (solution, PLAIN), residual, -1.0, 1.0)
        reduce(steps, residual, squares, Reduce.SQUARES)
        steps.spoil(info, as_column(squares, real_of(a.dtype), b.cols))
    steps.copy(solution, out)
    steps.spoil(info, out)
    return steps.plan(capture_safe=True)


def exponentials(steps: BatchedOperands) -> Plan:
    """Those by scaling and squaring, whose systems of equations are one call of each routine."""
    request: Any = steps.request

    def solve(q: Matrix, p: Matrix) -> None:
        exchange(steps, q, eliminate(steps, q), p, PLAIN)

    return exponential(request, steps, solve)


MAKERS: dict[str, Callable[[BatchedOperands], Plan]] = {
    "inv": inverse,
    "lstsq": least_squares,
    "expm": exponentials,
}
