"""What the softmax requests mean, in NumPy: for the host rows in their own precision, in f64 as the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, Results, values
from dispatch.ops.softmax.request import SoftmaxAlgorithm, SoftmaxBwdRequest

if TYPE_CHECKING:
    from dispatch.ops.softmax.request import SoftmaxRequest

__all__ = ["evaluate", "reference"]


def evaluate(request: SoftmaxRequest | SoftmaxBwdRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    return backward(request, work) if isinstance(request, SoftmaxBwdRequest) else forward(request, work)


def forward(request: SoftmaxRequest, work: np.dtype[Any]) -> Results:
    """y along the axis; the largest is subtracted first unless the algorithm is FAST."""
    x, axis = values(request.x, work), request.axis
    if request.x.size == 0:
        return {"out": x}
    if request.algorithm is not SoftmaxAlgorithm.FAST:
        x = x - x.max(axis=axis, keepdims=True)
    powers = np.exp(x)
    total = powers.sum(axis=axis, keepdims=True)
    if request.algorithm is SoftmaxAlgorithm.LOG:
        return {"out": x - np.log(total)}
    return {"out": powers / total}


def backward(request: SoftmaxBwdRequest, work: np.dtype[Any]) -> Results:
    """dx = y · (dy - Σ y · dy), or dy - exp(y) · Σ dy for the logarithm."""
    y, dy, axis = values(request.y, work), values(request.dy, work), request.axis
    if request.algorithm is SoftmaxAlgorithm.LOG:
        return {"out": dy - np.exp(y) * dy.sum(axis=axis, keepdims=True)}
    return {"out": y * (dy - (y * dy).sum(axis=axis, keepdims=True))}


def reference(request: SoftmaxRequest | SoftmaxBwdRequest) -> Results:
    """The output of a request in float64, by name."""
    return evaluate(request, EXACT)
