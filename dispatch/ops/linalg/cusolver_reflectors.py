"""Q from reflectors, and products with it: `orgqr` or `ungqr`, `ormqr` or `unmqr`, over each matrix.

Follows https://docs.nvidia.com/cuda/cusolver/#cusolverdn-t-orgqr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cusolver.calls import LETTERS
from dispatch.ops.linalg.cusolver import OP_N, OP_T
from dispatch.ops.linalg.multiply import QrSide

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
    from dispatch.ops.linalg.reflectors import OrgqrRequest, OrmqrRequest
    from dispatch.ops.linalg.steps import LinalgSteps

__all__ = ["apply_q", "orgqr", "ormqr"]

LEFT, RIGHT = cb.cublasSideMode_t.CUBLAS_SIDE_LEFT, cb.cublasSideMode_t.CUBLAS_SIDE_RIGHT
OP_C = cb.cublasOperation_t.CUBLAS_OP_C


def orgqr(request: OrgqrRequest, steps: LinalgSteps) -> Plan:
    """Copy the reflectors to Q's memory, where the routine overwrites them."""
    h, q, count = steps.matrix("h"), steps.matrix("q"), request.tau.shape[-1]
    if not count or not steps.batch:
        steps.identity(q)
        return steps.idle()
    target = steps.target(q)
    steps.copy(h.first_columns(count), target.first_columns(count))
    name = f"cusolverDn{LETTERS[h.dtype]}{'ungqr' if h.dtype.is_complex else 'orgqr'}"
    arguments = (target.rows, target.cols, count, target.pointer, target.ld, steps.vector("tau"))
    steps.call_with_work(name, h.dtype, *arguments, info=steps.ignored_info())
    steps.finish(target, q)
    return steps.plan(capture_safe=True)


def ormqr(request: OrmqrRequest, steps: LinalgSteps) -> Plan:
    """Copy C into the result and multiply it there; reflectors are read in place unless they are row-major."""
    h, c, out, count = steps.matrix("h"), steps.matrix("c"), steps.matrix("out"), request.tau.shape[-1]
    if not count or not request.c.size:
        steps.copy(c, out)
        return steps.idle()
    factors = h.first_columns(count)
    if not h.is_column_major:
        factors = steps.scratch_matrix(h.dtype, h.rows, count)
        steps.copy(h.first_columns(count), factors)
    target = steps.target(out)
    steps.copy(c, target)
    apply_q(steps, factors, steps.vector("tau"), target, side=request.side, adjoint=request.adjoint)
    steps.finish(target, out)
    return steps.plan(capture_safe=True)


def apply_q(
    steps: LinalgSteps, factors: Matrix, tau: OperandPointer, c: Matrix, *, side: Any, adjoint: bool = False
) -> None:
    """`ormqr` or `unmqr`: Q·C or C·Q, or with the adjoint of Q, in C's memory."""
    is_complex = c.dtype.is_complex
    name = f"cusolverDn{LETTERS[c.dtype]}{'unmqr' if is_complex else 'ormqr'}"
    operation = (OP_C if is_complex else OP_T) if adjoint else OP_N
    arguments = (LEFT if side is QrSide.LEFT else RIGHT, operation, c.rows, c.cols, factors.cols)
    places = (factors.pointer, factors.ld, tau, c.pointer, c.ld)
    steps.call_with_work(name, c.dtype, *arguments, *places, info=steps.ignored_info())
