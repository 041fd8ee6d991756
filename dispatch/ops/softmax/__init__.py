"""Softmax and log-softmax along one axis, and their gradients: `softmax` and `softmax_bwd`.

`SoftmaxRequest` and `SoftmaxBwdRequest` are the requests; `cudnn_softmax` and `numpy_softmax` carry them out,
`reference` says what is right, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import run
from dispatch.ops.softmax.request import SoftmaxAlgorithm, SoftmaxBwdRequest, SoftmaxRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "SoftmaxAlgorithm",
    "SoftmaxBwdRequest",
    "SoftmaxRequest",
    "cudnn_softmax",
    "numpy_softmax",
    "softmax",
    "softmax_bwd",
]

ACCURATE = SoftmaxAlgorithm.ACCURATE


def softmax(x: Tensor, *, axis: int = -1, algorithm: SoftmaxAlgorithm = ACCURATE, out: Tensor | None = None) -> Tensor:
    """Softmax of x along an axis (or its logarithm, by LOG), on the current stream; returns without waiting.

    x has any shape; y has its shape and dtype. Raises BadRequest for operands that do not fit, NoRow where no library
    takes them.
    """
    result: Tensor = run(SoftmaxRequest(x, axis, algorithm, out))
    return result


def softmax_bwd(
    y: Tensor, dy: Tensor, *, axis: int = -1, algorithm: SoftmaxAlgorithm = ACCURATE, out: Tensor | None = None
) -> Tensor:
    """The gradient of `softmax`: dx from its result y and the gradient dy, both of one shape and dtype."""
    result: Tensor = run(SoftmaxBwdRequest(y, dy, axis, algorithm, out))
    return result


def cudnn_softmax(request: SoftmaxRequest | SoftmaxBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnSoftmaxForward` or `cudnnSoftmaxBackward`."""
    from dispatch.ops.softmax import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_softmax(request: SoftmaxRequest | SoftmaxBwdRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.softmax.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
