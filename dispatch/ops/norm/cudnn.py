"""The plan of a normalization request with cuDNN's backend. `plan` serves the table's GPU rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.libraries.cudnn.engines import Policy
from dispatch.libraries.cudnn.graph_sequence import bind_sequence
from dispatch.libraries.cudnn.plan import WORKSPACE, bind
from dispatch.ops.norm.graph import lower_to_graph
from dispatch.ops.norm.group import group_norm_steps

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.norm.request import NormRequest

__all__ = ["plan", "policy_of"]


def policy_of(request: NormRequest, row: Row) -> Policy:
    """Norms are computed in f32 for all dtypes of x."""
    del row
    return Policy(workspace=WORKSPACE if request.workspace is None else request.workspace)


def plan(request: NormRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor; Refused with cuDNN's message if no engine supports it."""
    if request.by_group:
        return bind_sequence(request, executor, row, group_norm_steps(request), policy_of(request, row))
    graph, places = lower_to_graph(request)
    return bind(request, executor, row, graph, places, policy_of(request, row), autotune=request.autotune)
