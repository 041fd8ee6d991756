"""The softmax requests carried out by `cudnnSoftmaxForward` and `cudnnSoftmaxBackward`.

The axis becomes the channels of a tensor of four or five axes, and the others, merged where memory allows it, the rest.
Follows https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnsoftmaxforward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.core.axes import Axis
from dispatch.libraries.cudnn.calls import CallPlan, NoOpPlan, Operand, number
from dispatch.libraries.cudnn.tensors import tensor
from dispatch.ops.softmax.request import SoftmaxBwdRequest
from dispatch.ops.softmax.rules import axes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudnn.tensors import Descriptor
    from dispatch.ops.softmax.request import SoftmaxRequest

__all__ = ["plan"]

INSTANCE = cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_INSTANCE
CHANNEL = cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_CHANNEL


def plan(request: SoftmaxRequest | SoftmaxBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; nothing is launched where there is no element."""
    if request.layout_of("out").size == 0:
        return NoOpPlan(row)
    if isinstance(request, SoftmaxBwdRequest):
        return _backward(request, executor, row)
    return _forward(request, executor, row)


def _forward(request: SoftmaxRequest, executor: CudaExecutor, row: Row) -> Plan:
    mode, (x, y) = _describe((request.x.layout, request.layout_of("out")), request.axis)
    dtype = request.x.dtype
    arguments = (int(request.algorithm), mode, number(1, dtype), x, Operand(0), number(0, dtype), y, Operand(1))
    return CallPlan(executor, row, cudnn.cudnnSoftmaxForward, arguments)


def _backward(request: SoftmaxBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    layouts = (request.y.layout, request.dy.layout, request.layout_of("out"))
    mode, (y, dy, dx) = _describe(layouts, request.axis)
    dtype = request.y.dtype
    arguments = (
        *(int(request.algorithm), mode, number(1, dtype), y, Operand(0), dy, Operand(1)),
        *(number(0, dtype), dx, Operand(2)),
    )
    return CallPlan(executor, row, cudnn.cudnnSoftmaxBackward, arguments)


def _describe(layouts: Sequence[Layout], axis: int) -> tuple[int, list[Descriptor]]:
    """The mode, and a descriptor for each tensor."""
    summed, others = axes_of(layouts, axis)
    images, *space = others or [Axis(1, (1,) * len(layouts), False)]
    ordered = (images, summed, *space)
    descriptors = [
        tensor(layout.dtype, [axis.extent for axis in ordered], [axis.strides[number] for axis in ordered])
        for number, layout in enumerate(layouts)
    ]
    # Over the channels alone, or over all of an image: the same without axes of space, and the latter is faster.
    return (CHANNEL if space else INSTANCE), descriptors
