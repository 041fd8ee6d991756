"""A normalization request carried out by cuDNN's backend: its graphs and the plan. The table's GPU rows end here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.cudnn.engines import Policy
from dispatch.cudnn.plan import WORKSPACE, bind
from dispatch.cudnn.steps import bind_steps
from dispatch.ops.norm.describe import describe
from dispatch.ops.norm.group import draw

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
    if request.by_group:
        return bind_steps(request, lane, row, draw(request), policy_of(request, row))
    graph, places = describe(request)
    return bind(request, lane, row, graph, places, policy_of(request, row), autotune=request.autotune)
