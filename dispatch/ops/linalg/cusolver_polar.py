"""Polar decompositions by singular values: if A = W·S·Vᴴ, U is W·Vᴴ, and P is V·S·Vᴴ or W·S·Wᴴ.

A wide matrix is decomposed by its adjoint: U is the adjoint of that U, and P is the P of the other side. cuSOLVER has
`Xpolar` from 12.4 on, and `gesvd` in every version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cusolver.calls import real_of
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.ops.linalg.cusolver import OP_N
from dispatch.ops.linalg.cusolver_derived import decompose, is_tall, multiply, scratch_copy, scratch_vector
from dispatch.ops.linalg.polar import PolarSide
from dispatch.ops.linalg.steps import LinalgSteps

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.linalg.polar import PolarRequest

__all__ = ["plan"]

OP_C = cb.cublasOperation_t.CUBLAS_OP_C


def plan(request: PolarRequest, executor: CudaExecutor, row: Row) -> Plan:
    """`gesvd` of A or of its adjoint, and two products."""
    steps = LinalgSteps(request, executor, row)
    a, u, p, info = steps.matrix("a"), steps.matrix("u"), steps.matrix("p"), steps.vector("info")
    if not request.a.size:
        steps.copy(p, p, CopyMode.ZERO)
        return steps.idle()
    tall = is_tall(a)
    copy = scratch_copy(steps, a) if tall else scratch_copy(steps, a.mT, conj=True)
    factors = decompose(steps, copy, scratch_vector(steps, real_of(a.dtype), copy.cols), info)
    # The eigenvectors of P are the singular vectors of its side of A, here as rows.
    of_columns = (request.side is PolarSide.RIGHT) == tall
    rows = scratch_copy(steps, factors.vh) if of_columns else scratch_copy(steps, factors.u.mT, conj=True)
    steps.launch("scale_rows", a.dtype, rows.rows * rows.cols, rows, rows.rows, rows.cols, factors.s, copy.cols)
    target = steps.target(p)
    multiply(steps, (factors.vh, OP_C) if of_columns else (factors.u, OP_N), (rows, OP_N), target, 1.0, 0.0)
    steps.finish(target, p)
    unitary = steps.target(u) if tall else steps.scratch_matrix(a.dtype, a.cols, a.rows)
    multiply(steps, (factors.u, OP_N), (factors.vh, OP_N), unitary, 1.0, 0.0)
    if tall:
        steps.finish(unitary, u)
    else:
        steps.copy(unitary.mT, u, conj=True)
    return steps.plan(capture_safe=False)
