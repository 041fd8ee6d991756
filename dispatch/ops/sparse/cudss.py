"""Direct solves by cuDSS: the plan of one system, of one with a refined solution, or of a batch of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.sparse.cudss_batched import BatchedPlan
from dispatch.ops.sparse.cudss_lists import ListPlan
from dispatch.ops.sparse.cudss_refined import RefinedPlan
from dispatch.ops.sparse.cudss_single import CudssPlan
from dispatch.ops.sparse.direct import BatchedSpsolveRequest
from dispatch.ops.sparse.direct_lists import BatchedSpsolveListRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["plan"]


def plan(request: SpsolveRequest | BatchedSpsolveListRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    if isinstance(request, BatchedSpsolveListRequest):
        return ListPlan(request, executor, row)
    if isinstance(request, BatchedSpsolveRequest):
        return BatchedPlan(request, executor, row)
    kind = CudssPlan if request.precision is None else RefinedPlan
    return kind(request, executor, row)
