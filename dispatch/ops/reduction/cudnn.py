"""A ReduceRequest carried out by `cudnnReduceTensor`, or by a graph of cuDNN's backend.

Axes are merged as far as memory allows. Where some are kept, cudnnReduceTensor of 9.19 is slow in whatever order they
are described: 0.4 ms for the rows or the columns of 4096 by 4096 f32 on an H200, which torch sums in 0.03; to one
number 0.03. That is what the graph is for. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnreducetensor.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.keys import F32, F64
from dispatch.libraries.cudnn.calls import CallPlan, NoOpPlan, Operand, number
from dispatch.libraries.cudnn.engines import Policy
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.plan import WORKSPACE, bind
from dispatch.libraries.cudnn.prefill import filled, fills_of
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, tensor
from dispatch.ops.reduction.graph import describe
from dispatch.ops.reduction.rules import axes_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.reduction.request import ReduceRequest

__all__ = ["plan", "plan_sums", "policy_of"]

PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN
INDICES = cudnn.cudnnReduceTensorIndices_t
BITS_32 = cudnn.cudnnIndicesType_t.CUDNN_32BIT_INDICES


def plan(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; nothing is launched where there is no element."""
    out = request.layout_of("out")
    if out.size == 0:
        return NoOpPlan(row)
    axes = axes_of(request)
    x = tensor(request.x.dtype, [axis.extent for axis in axes], [axis.strides[0] for axis in axes])
    kept = [1 if axis.group else axis.extent for axis in axes]
    y = tensor(out.dtype, kept, [1 if axis.group else axis.strides[1] for axis in axes])
    sums = F64 if request.x.dtype is F64 else F32
    reduction = Descriptor("ReduceTensor")
    kind = INDICES.CUDNN_REDUCE_TENSOR_FLATTENED_INDICES if request.indices else INDICES.CUDNN_REDUCE_TENSOR_NO_INDICES
    operation = cudnn.cudnnReduceTensorOp_t(request.reduce)
    cudnn.cudnnSetReduceTensorDescriptor(reduction.handle, operation, DTYPES[sums], PROPAGATE, kind, BITS_32)
    handle, size = handle_of(executor).follow(), ctypes.c_size_t()
    cudnn.cudnnGetReductionWorkspaceSize(handle, reduction.handle, x.handle, y.handle, ctypes.byref(size))
    scratch = handle_of(executor).scratch(executor, size.value)
    places = (Operand(2), ctypes.c_size_t(4 * out.size)) if request.indices else (None, ctypes.c_size_t(0))
    arguments = (
        *(reduction, *places, scratch.c_ptr, size),
        *(number(1, sums), x, Operand(0), number(0, sums), y, Operand(1)),
    )
    return CallPlan(executor, row, cudnn.cudnnReduceTensor, arguments, (scratch,))


def policy_of(request: ReduceRequest, row: Row) -> Policy:
    """Nothing is multiplied, so nothing can become TF32, though the engine's notes speak of tensor cores."""
    del request, row
    return Policy(workspace=WORKSPACE)


def plan_sums(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request that is a graph; Refused with cuDNN's words where no engine takes it."""
    if request.layout_of("out").size == 0:
        return NoOpPlan(row)
    graph, places = describe(request)
    made = bind(request, executor, row, graph, places, policy_of(request, row))
    return filled(executor, made, fills_of(graph, places))
