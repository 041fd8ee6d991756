"""The pooling requests carried out by `cudnnPoolingForward` and `cudnnPoolingBackward`.

cuDNN pools over two axes of space or three; one axis becomes two, of which the first has one element. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnpoolingforward.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.libraries.cudnn.calls import CallPlan, NoOpPlan, Operand, number
from dispatch.libraries.cudnn.tensors import Descriptor, tensor
from dispatch.ops.pooling.request import PoolingBwdRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.pooling.request import PoolingMode, PoolingRequest, Windows

__all__ = ["plan"]

PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN


def plan(request: PoolingRequest | PoolingBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; nothing is launched where there is no image."""
    if request.x.size == 0:
        return NoOpPlan(row)
    dtype = request.x.dtype
    pool = _pooling(request.windows, request.mode)
    described = [_image(request.layout_of(name)) for name in (*request.reads, *request.writes)]
    one, zero = number(1, dtype), number(0, dtype)
    if isinstance(request, PoolingBwdRequest):
        x, y, dy, dx = described
        operands = (y, Operand(1), dy, Operand(2), x, Operand(0), zero, dx, Operand(3))
        return CallPlan(executor, row, cudnn.cudnnPoolingBackward, (pool, one, *operands))
    x, y = described
    return CallPlan(executor, row, cudnn.cudnnPoolingForward, (pool, one, x, Operand(0), zero, y, Operand(1)))


def _pooling(windows: Windows, mode: PoolingMode) -> Descriptor:
    more = len(windows.window) == 1
    ones, zeros = (1,) * more, (0,) * more
    axes = len(windows.window) + more
    kind = ctypes.c_int32 * axes
    made = Descriptor("Pooling")
    cudnn.cudnnSetPoolingNdDescriptor(
        *(made.handle, cudnn.cudnnPoolingMode_t(mode), PROPAGATE, axes),
        *(kind(*ones, *windows.window), kind(*zeros, *windows.padding), kind(*ones, *windows.stride)),
    )
    return made


def _image(layout: Layout) -> Descriptor:
    """The descriptor of an image; where an axis has one element its stride is what a dense image would have."""
    shape, steps = list(layout.shape), list(layout.strides)
    if len(shape) == 3:  # one axis of space becomes two
        steps.insert(2, shape[2] * steps[2])
        shape.insert(2, 1)
    return tensor(layout.dtype, shape, [max(step, 1) for step in steps])
