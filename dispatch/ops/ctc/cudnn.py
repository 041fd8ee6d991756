"""A CtcRequest carried out by `cudnnCTCLoss_v8`, whose labels and lengths lie on the device.

cuDNN leaves the gradient behind the end of a sequence as it was, so that it is set to 0 before. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html#cudnnctcloss-v8.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.libraries.cudnn.calls import CallPlan, Operand
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, tensor_3d

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.ctc.request import CtcRequest

__all__ = ["plan"]

ALGORITHM = cudnn.cudnnCTCLossAlgo_t
WITH_SOFTMAX = cudnn.cudnnLossNormalizationMode_t.CUDNN_LOSS_NORMALIZATION_SOFTMAX
ZERO = cudnn.cudnnCTCGradMode_t.CUDNN_CTC_ZERO_OOB_GRADIENTS
# Of fewer labels cuDNN's kernel (9.19) writes shared memory beyond what it asked for, says compute-sanitizer: of 4 all
# threads of a warp write, each one of 9 places. It did not of 8 or more, nor of 4 where more were announced.
LEAST_LONGEST = 16
LOGITS, LABELS, LABEL_LENGTHS, INPUT_LENGTHS, LOSSES, GRADIENT = range(6)  # as in the request's arguments()


def plan(request: CtcRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    logits = tensor_3d(request.logits.layout)
    loss = Descriptor("CTCLoss")
    longest = max(request.max_label_length, LEAST_LONGEST)
    cudnn.cudnnSetCTCLossDescriptor_v9(loss.handle, DTYPES[request.logits.dtype], WITH_SOFTMAX, ZERO, longest)
    algorithm = (
        ALGORITHM.CUDNN_CTC_LOSS_ALGO_DETERMINISTIC
        if request.deterministic
        else ALGORITHM.CUDNN_CTC_LOSS_ALGO_NON_DETERMINISTIC
    )
    size = ctypes.c_size_t()
    gradient: Any = logits.handle if request.with_gradient else None
    handle = handle_of(executor).follow()
    cudnn.cudnnGetCTCLossWorkspaceSize_v8(handle, algorithm, loss.handle, logits.handle, gradient, ctypes.byref(size))
    scratch = handle_of(executor).scratch(executor, size.value)
    arguments = (
        *(algorithm, loss, logits, Operand(LOGITS), Operand(LABELS), Operand(LABEL_LENGTHS), Operand(INPUT_LENGTHS)),
        *(Operand(LOSSES), gradient, Operand(GRADIENT), size, scratch.c_ptr),
    )
    zeroed = ((GRADIENT, request.logits.nbytes),) if request.with_gradient else ()
    return CallPlan(executor, row, cudnn.cudnnCTCLoss_v8, arguments, (scratch,), zeroed=zeroed)
