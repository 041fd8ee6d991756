"""The choice between cuBLAS's plans of a matmul request: strided calls, or one call with arrays of pointers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dispatch.errors import Refused
from dispatch.keys import Compute
from dispatch.ops.matmul.cublas import GemmPlan
from dispatch.ops.matmul.cublas_pointers import PointerGemmPlan, is_suitable
from dispatch.ops.matmul.empty import EmptyPlan
from dispatch.ops.matmul.lower import lower
from dispatch.ops.matmul.scales import scale_dtype

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["plan"]


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor; Refused where cuBLAS says that it has no kernel for it."""
    if 0 in request.shape:
        return EmptyPlan(request, executor, row)
    compute = row.compute or Compute.COMPUTE_32F
    lowered, scale = lower(request, compute), scale_dtype(request.a.dtype, compute)
    if len(lowered.offsets) > 1:
        sizes = (request.a.dtype.itemsize, request.b.dtype.itemsize, request.d_dtype.itemsize)
        if is_suitable(lowered, compute, sizes):
            with suppress(Refused):  # the library may still have a kernel for single calls
                return _checked_plan(PointerGemmPlan(executor, row, lowered, scale, sizes), request)
    return _checked_plan(GemmPlan(executor, row, lowered, scale), request)


def _checked_plan(plan: GemmPlan, request: MatmulRequest) -> GemmPlan:
    """The plan, with the copy of a separate C; Refused where the library has no kernel for it."""
    if request.c is not None and request.has_beta and not request.c_is_out:
        plan.add_c(request.d_dtype)
    plan.check_supported()
    return plan
