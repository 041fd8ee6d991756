"""Pooling over one, two or three axes of space, and its gradient: `pooling` and `pooling_bwd`.

`PoolingRequest` and `PoolingBwdRequest` are the requests; `cudnn_pooling` and `numpy_pooling` carry them out,
`reference` says what is right, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import run
from dispatch.ops.pooling.request import PoolingBwdRequest, PoolingMode, PoolingRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.ops.pooling.request import Steps

__all__ = [
    "PoolingBwdRequest",
    "PoolingMode",
    "PoolingRequest",
    "cudnn_pooling",
    "numpy_pooling",
    "pooling",
    "pooling_bwd",
]

MAX = PoolingMode.MAX


def pooling(
    x: Tensor,
    window: Steps,
    *,
    mode: PoolingMode = MAX,
    stride: Steps | None = None,
    padding: Steps = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The largest or the average of every window of x, on the current stream; returns without waiting.

    x is (images, channels, 1 to 3 axes of space), NCHW or NHWC by its strides; y has
    (space + 2 · padding - window) // stride + 1 places along every axis. Raises BadRequest for windows that do not fit,
    NoRow where no library takes the tensors.
    """
    result: Tensor = run(PoolingRequest(x, window, mode, stride, padding, out))
    return result


def pooling_bwd(
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    window: Steps,
    *,
    mode: PoolingMode = MAX,
    stride: Steps | None = None,
    padding: Steps = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of `pooling`: dx from x, its result y and the gradient dy; the choices are those of the forward."""
    result: Tensor = run(PoolingBwdRequest(x, y, dy, window, mode, stride, padding, out))
    return result


def cudnn_pooling(request: PoolingRequest | PoolingBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnPoolingForward` or `cudnnPoolingBackward`."""
    from dispatch.ops.pooling import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_pooling(request: PoolingRequest | PoolingBwdRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.pooling.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
