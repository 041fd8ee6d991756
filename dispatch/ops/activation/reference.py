"""What the activation requests mean, in NumPy: for the host rows in their own precision, in f64 as the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, Results, sigmoid, values
from dispatch.ops.activation.request import ActivationBwdRequest, ActivationMode

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.activation.request import ActivationRequest

__all__ = ["evaluate", "passes", "reference"]


def evaluate(request: ActivationRequest | ActivationBwdRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    x, coef = values(request.x, work), work.type(request.coef)
    if isinstance(request, ActivationBwdRequest):
        dy = values(request.dy, work)
        if request.mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):  # a choice: what is dropped may be NaN
            return {"out": np.where(passes(request.mode, x, coef), dy, work.type(0))}
        return {"out": dy * slope(request.mode, x, values(request.y, work), coef)}
    return {"out": forward(request.mode, x, coef)}


def forward(mode: ActivationMode, x: Array, coef: Any) -> Array:
    """f(x)."""
    if mode is ActivationMode.SIGMOID:
        return sigmoid(x)
    if mode is ActivationMode.RELU:
        return np.asarray(np.maximum(x, 0))
    if mode is ActivationMode.TANH:
        return np.asarray(np.tanh(x))
    if mode is ActivationMode.CLIPPED_RELU:
        return np.asarray(np.minimum(np.maximum(x, 0), coef))
    if mode is ActivationMode.ELU:
        return np.asarray(np.where(x > 0, x, coef * np.expm1(np.minimum(x, 0))))
    return np.asarray(x * sigmoid(coef * x))


def passes(mode: ActivationMode, x: Array, coef: Any) -> Array:
    """Where RELU and CLIPPED_RELU pass a gradient on: nowhere at their corners."""
    return np.asarray((x > 0) & (x < coef) if mode is ActivationMode.CLIPPED_RELU else x > 0)


def slope(mode: ActivationMode, x: Array, y: Array, coef: Any) -> Array:
    """f'(x), from y where that says it."""
    if mode is ActivationMode.SIGMOID:
        return np.asarray(y * (1 - y))
    if mode is ActivationMode.TANH:
        return np.asarray(1 - y * y)
    if mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):
        return passes(mode, x, coef).astype(x.dtype)
    if mode is ActivationMode.ELU:
        return np.asarray(np.where(y >= 0, x.dtype.type(1), y + coef))  # cuDNN goes by y
    gate = sigmoid(coef * x)
    return np.asarray(gate * (1 + coef * x * (1 - gate)))


def reference(request: ActivationRequest | ActivationBwdRequest) -> Results:
    """The output of a request in float64, by name."""
    return evaluate(request, EXACT)
