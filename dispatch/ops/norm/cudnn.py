"""A normalization request carried out by cuDNN's backend: its graph and the plan. The table's GPU rows end here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.cudnn.engines import Policy
from dispatch.cudnn.plan import WORKSPACE, bind
from dispatch.ops.norm.describe import describe

if TYPE_CHECKING:
    from dispatch.lane import CudaLane
    from dispatch.ops.norm.request import NormRequest
    from dispatch.request import Plan
    from dispatch.row import Row

__all__ = ["plan", "policy_of"]


def policy_of(request: NormRequest, row: Row) -> Policy:
    """Norms are computed in f32, whatever x is."""
    del row
    return Policy(workspace=WORKSPACE if request.workspace is None else request.workspace)


def plan(request: NormRequest, lane: CudaLane, row: Row) -> Plan:
    """Bind a request to a lane; Refused with cuDNN's words where no engine takes it."""
    graph, places = describe(request)
    return bind(request, lane, row, graph, places, policy_of(request, row), autotune=request.autotune)
