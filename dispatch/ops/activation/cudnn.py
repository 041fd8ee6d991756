"""The activation requests carried out by `cudnnActivationForward` and `cudnnActivationBackward`.

The axes are merged as far as memory allows, so that nearly every tensor is one axis to cuDNN. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnactivationforward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.libraries.cudnn.calls import CallPlan, NoOpPlan, Operand, number
from dispatch.libraries.cudnn.tensors import Descriptor, tensor
from dispatch.ops.activation.request import ActivationBwdRequest, ActivationMode
from dispatch.ops.activation.rules import axes_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.activation.request import ActivationRequest

__all__ = ["plan"]

PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN


def plan(request: ActivationRequest | ActivationBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of either request; nothing is launched where there is no element."""
    if request.x.size == 0:
        return NoOpPlan(row)
    dtype = request.x.dtype
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    axes = axes_of(layouts)
    extents = [axis.extent for axis in axes]
    described = [tensor(dtype, extents, [axis.strides[i] for axis in axes]) for i in range(len(layouts))]
    one, zero, function = number(1, dtype), number(0, dtype), _function(request.mode, request.coef)
    if isinstance(request, ActivationBwdRequest):
        x, y, dy, dx = described
        operands = (y, Operand(1), dy, Operand(2), x, Operand(0), zero, dx, Operand(3))
        return CallPlan(executor, row, cudnn.cudnnActivationBackward, (function, one, *operands))
    x, y = described
    return CallPlan(executor, row, cudnn.cudnnActivationForward, (function, one, x, Operand(0), zero, y, Operand(1)))


def _function(mode: ActivationMode, coef: float) -> Descriptor:
    made = Descriptor("Activation")
    cudnn.cudnnSetActivationDescriptor(made.handle, cudnn.cudnnActivationMode_t(mode), PROPAGATE, coef)
    if mode is ActivationMode.SWISH:
        cudnn.cudnnSetActivationDescriptorSwishBeta(made.handle, coef)
    return made
