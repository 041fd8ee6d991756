"""A ReduceRequest carried out by `cudnnReduceTensor`.

Axes are merged as far as memory allows. Where some are kept, cuDNN 9.19 is slow in whatever order they are described:
0.4 ms for the rows or the columns of 4096 by 4096 f32 on an H200, which torch sums in 0.03; to one number 0.03. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnreducetensor.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.cudnn.calls import CallPlan, NothingPlan, Operand, Scratch, number
from dispatch.cudnn.handle import handle_of
from dispatch.cudnn.tensors import DTYPES, Descriptor, tensor
from dispatch.keys import F32, F64
from dispatch.ops.reduction.rules import axes_of

if TYPE_CHECKING:
    from dispatch.lane import CudaLane
    from dispatch.ops.reduction.request import ReduceRequest
    from dispatch.request import Plan
    from dispatch.row import Row

__all__ = ["plan"]

PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN
INDICES = cudnn.cudnnReduceTensorIndices_t
BITS_32 = cudnn.cudnnIndicesType_t.CUDNN_32BIT_INDICES


def plan(request: ReduceRequest, lane: CudaLane, row: Row) -> Plan:
    """The plan of a request; nothing is launched where there is no element."""
    out = request.layout_of("out")
    if out.size == 0:
        return NothingPlan(row)
    axes = axes_of(request)
    x = tensor(request.x.dtype, [axis.extent for axis in axes], [axis.strides[0] for axis in axes])
    kept = [1 if axis.group else axis.extent for axis in axes]
    y = tensor(out.dtype, kept, [1 if axis.group else axis.strides[1] for axis in axes])
    sums = F64 if request.x.dtype is F64 else F32
    reduction = Descriptor("ReduceTensor")
    kind = INDICES.CUDNN_REDUCE_TENSOR_FLATTENED_INDICES if request.indices else INDICES.CUDNN_REDUCE_TENSOR_NO_INDICES
    operation = cudnn.cudnnReduceTensorOp_t(request.reduce)
    cudnn.cudnnSetReduceTensorDescriptor(reduction.handle, operation, DTYPES[sums], PROPAGATE, kind, BITS_32)
    handle, size = handle_of(lane).follow(), ctypes.c_size_t()
    cudnn.cudnnGetReductionWorkspaceSize(handle, reduction.handle, x.handle, y.handle, ctypes.byref(size))
    scratch = Scratch(lane, size.value)
    places = (Operand(2), ctypes.c_size_t(4 * out.size)) if request.indices else (None, ctypes.c_size_t(0))
    arguments = (
        *(reduction, *places, scratch.c_ptr, size),
        *(number(1, sums), x, Operand(0), number(0, sums), y, Operand(1)),
    )
    return CallPlan(lane, row, cudnn.cudnnReduceTensor, arguments, (scratch,))
