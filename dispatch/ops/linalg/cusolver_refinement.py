"""Systems and least squares by iterative refinement: plans of cuSOLVER's IRS routines, which wait for the GPU.

The routines write the number of steps to host memory before they return. Two results are corrected here, because
cuSOLVER 12.0 reports a status of 0 also for a singular matrix, and for a matrix with NaN, where x is b. Follows
https://docs.nvidia.com/cuda/cusolver/#cusolverdnirsxgesv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cudabind.sys.cublas_types import cublasOperation_t
from cudabind.sys.cusolverDn import cusolverIRSRefinement_t, cusolverPrecType_t
from dispatch.keys import C64, C128, F32, F64, member
from dispatch.libraries.cusolver.calls import HostNumbers
from dispatch.libraries.cusolver.handle import Settings
from dispatch.libraries.cusolver.reductions import Reduce
from dispatch.ops.linalg.cusolver import PIVOT_BYTES, factor_lu
from dispatch.ops.linalg.cusolver_derived import (
    as_column,
    has_residuals,
    lstsq_by_qr,
    multiply,
    product_operand,
    reduce,
    scratch_copy,
)
from dispatch.ops.linalg.refined import (
    FactorPrecision,
    RefinedLstsqRequest,
    RefinedSolveRequest,
    Refinement,
    precision_of,
)
from dispatch.ops.linalg.steps import LinalgSteps
from dispatch.ops.linalg.triangles import solve_lu

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

OP_N = cublasOperation_t.CUBLAS_OP_N
OVERFLOWED = -5  # the number of steps if a value was not finite even in the matrix's own precision
PRECISIONS = cusolverPrecType_t
MAIN = {
    F32: PRECISIONS.CUSOLVER_R_32F,
    F64: PRECISIONS.CUSOLVER_R_64F,
    C64: PRECISIONS.CUSOLVER_C_32F,
    C128: PRECISIONS.CUSOLVER_C_64F,
}
LOWEST = {  # for real and for complex matrices
    FactorPrecision.F32: (PRECISIONS.CUSOLVER_R_32F, PRECISIONS.CUSOLVER_C_32F),
    FactorPrecision.TF32: (PRECISIONS.CUSOLVER_R_TF32, PRECISIONS.CUSOLVER_C_TF32),
    FactorPrecision.BF16: (PRECISIONS.CUSOLVER_R_16BF, PRECISIONS.CUSOLVER_C_16BF),
    FactorPrecision.F16: (PRECISIONS.CUSOLVER_R_16F, PRECISIONS.CUSOLVER_C_16F),
}
METHODS = {
    Refinement.GMRES: cusolverIRSRefinement_t.CUSOLVER_IRS_REFINE_GMRES,
    Refinement.CLASSICAL: cusolverIRSRefinement_t.CUSOLVER_IRS_REFINE_CLASSICAL,
}


def plan(request: RefinedSolveRequest | RefinedLstsqRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The routine over copies of A and b, into scratch memory; the solution is copied to the result."""
    # Workspace must not be queried during a capture either.
    executor.refuse_capture("a refinement, which waits for the GPU", always=True)
    steps = LinalgSteps(request, executor, row)
    a, b, out, info = steps.matrix("a"), steps.matrix("b"), steps.matrix("out"), steps.vector("info")
    has_residual = isinstance(request, RefinedLstsqRequest) and has_residuals(a)
    if not (request.a.size and request.b.size):
        if has_residual and b.cols:
            reduce(steps, b, steps.vector("residuals"), Reduce.SQUARES)
        return steps.idle()
    flags = steps.flag_nonfinite(a, b)
    factors, right_side = scratch_copy(steps, a), scratch_copy(steps, b)
    x = steps.scratch_matrix(a.dtype, a.cols, b.cols)
    is_system = isinstance(request, RefinedSolveRequest)
    extents = (a.rows, b.cols) if is_system else (a.rows, a.cols, b.cols)
    operands = (factors.pointer, factors.ld, right_side.pointer, right_side.ld, x.pointer, x.ld)
    iterations = HostNumbers(steps.batch, np.int32)
    infos = Settings("cusolverDnIRSInfos_t", "cusolverDnIRSInfosCreate", "cusolverDnIRSInfosDestroy")
    steps.call_refined(
        row.function, settings_of(request, b.cols), infos, extents, *operands, trailing=(iterations, info)
    )
    with steps.only_where(iterations, OVERFLOWED):
        steps.copy(a, factors)
        if is_system:
            pivots = steps.scratch(a.rows * PIVOT_BYTES)
            factor_lu(steps, factors, pivots, info)
            solve_lu(steps, factors, pivots, b, x)
        else:
            lstsq_by_qr(steps, a, b, x, info)
    steps.upload(iterations, steps.vector("iterations"))
    steps.fill_nan_where(flags, x)
    if has_residual:
        residual, squares = scratch_copy(steps, b), steps.vector("residuals")
        multiply(steps, product_operand(steps, a), (x, OP_N), residual, -1.0, 1.0)
        reduce(steps, residual, squares, Reduce.SQUARES)
        steps.fill_nan_where(info, as_column(squares, request.layout_of("residuals").dtype, b.cols))
    steps.copy(x, out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=False)


def settings_of(request: RefinedSolveRequest | RefinedLstsqRequest, sides: int) -> Settings:
    """The settings of the routine; falling back to the matrix's own precision is its default."""
    rows, columns = request.a.shape[-2:]
    usual = Refinement.GMRES if sides == 1 and rows == columns else Refinement.CLASSICAL
    method = usual if request.refinement is None else member(request.refinement)
    dtype = request.a.dtype
    settings = Settings("cusolverDnIRSParams_t", "cusolverDnIRSParamsCreate", "cusolverDnIRSParamsDestroy")
    settings.set("cusolverDnIRSParamsSetRefinementSolver", METHODS[method])
    settings.set("cusolverDnIRSParamsSetSolverMainPrecision", MAIN[dtype])
    settings.set("cusolverDnIRSParamsSetSolverLowestPrecision", LOWEST[precision_of(request)][dtype.is_complex])
    settings.set("cusolverDnIRSParamsSetMaxIters", request.max_iterations)
    return settings
