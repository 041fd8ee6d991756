"""The plan of a convolution request with cuDNN's backend: its graph, and the policy for engines.

`plan` serves the table's GPU rows. Only this file decides in which precision an engine may compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import F32, Compute
from dispatch.libraries.cudnn.engines import Policy
from dispatch.libraries.cudnn.plan import WORKSPACE, bind
from dispatch.ops.conv.graph import lower_to_graph

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["plan", "policy_of"]


def policy_of(request: ConvRequest, row: Row) -> Policy:
    """The policy for engines: f32 stays f32 unless the row is for TF32, which is chosen only on request."""
    tensor_cores = request.dtypes[0] is not F32 or row.compute is Compute.COMPUTE_32F_FAST_TF32
    return Policy(tensor_cores, request.deterministic, WORKSPACE if request.workspace is None else request.workspace)


def plan(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor; Refused with cuDNN's message if no engine supports it."""
    graph, places = lower_to_graph(request)
    return bind(request, executor, row, graph, places, policy_of(request, row), autotune=request.autotune)
