"""Direct solves by cuDSS: the plan of one system, of one whose solution is refined, or of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.sparse.cudss_batched import BatchedPlan
from dispatch.ops.sparse.cudss_refined import RefinedPlan
from dispatch.ops.sparse.cudss_single import CudssPlan
from dispatch.ops.sparse.direct import BatchedSpsolveRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["plan"]


def plan(request: SpsolveRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    if isinstance(request, BatchedSpsolveRequest):
        return BatchedPlan(request, executor, row)
    kind = CudssPlan if request.precision is None else RefinedPlan
    return kind(request, executor, row)
