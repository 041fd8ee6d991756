"""User-defined graphs: any chain of pointwise operations, products, convolutions and reductions that cuDNN fuses.

`Graph` builds a graph, `GraphRequest` is the request, and `cudnn_graph` and `numpy_graph` make its plans. The reference
evaluates the graph itself in NumPy. The files: builder, request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.host_plan import numpy_call
from dispatch.ops.graph.builder import Graph, Node
from dispatch.ops.graph.request import GraphRequest, evaluate

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Graph", "GraphRequest", "Node", "cudnn_graph", "numpy_graph"]


def cudnn_graph(request: GraphRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `cudnnBackendExecute`; Refused with cuDNN's reason if no engine supports the graph."""
    from dispatch.libraries.cudnn.engines import Policy  # at first use: importing `dispatch` binds no library
    from dispatch.libraries.cudnn.plan import WORKSPACE, bind
    from dispatch.libraries.cudnn.prefill import reduction_fills, with_prefill

    policy = Policy(request.tf32 or not request.multiplies_f32, request.deterministic, WORKSPACE)
    fills = reduction_fills(request.graph, request.places)
    bound_plan = bind(request, executor, row, request.graph, request.places, policy, autotune=request.autotune)
    return with_prefill(executor, bound_plan, fills)


numpy_graph = numpy_call(evaluate)
numpy_graph.__module__, numpy_graph.__qualname__ = __name__, "numpy_graph"  # public, so that pickle finds it
