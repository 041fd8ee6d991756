"""Polar decompositions by singular values: of A = W·S·Vᴴ, U is W·Vᴴ, and P is V·S·Vᴴ or W·S·Wᴴ.

A wide matrix is taken by its adjoint, whose U is the adjoint one and whose P is that of the other side. cuSOLVER has
`Xpolar` from 12.4 on, and `gesvd` in every version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cusolver.calls import real_of
from dispatch.libraries.cusolver.copies import Keep
from dispatch.ops.linalg.cusolver import PLAIN
from dispatch.ops.linalg.cusolver_derived import copied, decompose, is_tall, multiply, vector
from dispatch.ops.linalg.operands import Operands
from dispatch.ops.linalg.polar import PolarSide

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.linalg.polar import PolarRequest

__all__ = ["plan"]

ADJOINT = cb.cublasOperation_t.CUBLAS_OP_C


def plan(request: PolarRequest, executor: CudaExecutor, row: Row) -> Plan:
    """`gesvd` of A or of its adjoint, and two products."""
    steps = Operands(request, executor, row)
    a, u, p, info = steps.matrix("a"), steps.matrix("u"), steps.matrix("p"), steps.vector("info")
    if not request.a.size:
        steps.copy(p, p, Keep.NONE)
        return steps.idle()
    tall = is_tall(a)
    copy = copied(steps, a) if tall else copied(steps, a.mT, conj=True)
    found = decompose(steps, copy, vector(steps, real_of(a.dtype), copy.cols), info)
    # P has what stands on its side of A as its eigenvectors, here in rows.
    of_columns = (request.side is PolarSide.RIGHT) == tall
    rows = copied(steps, found.vh) if of_columns else copied(steps, found.u.mT, conj=True)
    steps.launch("scale_rows", a.dtype, rows.rows * rows.cols, rows, rows.rows, rows.cols, found.s, copy.cols)
    made = steps.target(p)
    multiply(steps, (found.vh, ADJOINT) if of_columns else (found.u, PLAIN), (rows, PLAIN), made, 1.0, 0.0)
    steps.finish(made, p)
    turned = steps.target(u) if tall else steps.scratch_matrix(a.dtype, a.cols, a.rows)
    multiply(steps, (found.u, PLAIN), (found.vh, PLAIN), turned, 1.0, 0.0)
    if tall:
        steps.finish(turned, u)
    else:
        steps.copy(turned.mT, u, conj=True)
    steps.spoil(info, u, p)
    return steps.plan(capture_safe=False)
