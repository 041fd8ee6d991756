"""Softmax and log-softmax along one axis, and their gradients: `softmax` and `softmax_bwd`.

`SoftmaxRequest` and `SoftmaxBwdRequest` are the requests; `cudnn_softmax` and `numpy_softmax` carry them out,
`reference` says what is right, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.softmax.request import SoftmaxAlgorithm, SoftmaxBwdRequest, SoftmaxRequest
from dispatch.request import run

if TYPE_CHECKING:
    from dispatch.cudnn.formulas import Results
    from dispatch.lane import CudaLane, Lane
    from dispatch.ops.softmax.trials import SoftmaxCase
    from dispatch.request import Plan
    from dispatch.row import Row
    from dispatch.tensor import Tensor

__all__ = [
    "SoftmaxAlgorithm",
    "SoftmaxBwdRequest",
    "SoftmaxRequest",
    "cases",
    "cudnn_softmax",
    "numpy_softmax",
    "reference",
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


def cudnn_softmax(request: SoftmaxRequest | SoftmaxBwdRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in `cudnnSoftmaxForward` or `cudnnSoftmaxBackward`."""
    from dispatch.ops.softmax import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, lane, row)


def numpy_softmax(request: SoftmaxRequest | SoftmaxBwdRequest, lane: Lane, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.cudnn.formulas import numpy_plan
    from dispatch.ops.softmax.formulas import evaluate

    return numpy_plan(evaluate, request, lane, row)


def reference(request: SoftmaxRequest | SoftmaxBwdRequest) -> Results:
    """The output of a request in float64, by name."""
    from dispatch.cudnn.formulas import EXACT
    from dispatch.ops.softmax.formulas import evaluate

    return evaluate(request, EXACT)


def cases(row: Row) -> list[SoftmaxCase]:
    """The cases that a row of the table is tried with."""
    from dispatch.ops.softmax import trials

    return trials.cases(row)
