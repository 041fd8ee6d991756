"""Normalization and its gradient in NumPy, in a working dtype.

The host rows run it, and in float64 it is the tests' reference. It calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import exactly, values
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest, NormMode

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.ops.norm.request import NormRequest

__all__ = ["broadcast_statistic", "evaluate", "mean_along", "reference", "statistic_result", "statistics"]


def evaluate(request: NormRequest, work: np.dtype[Any]) -> Results:
    """The outputs of a request, by name."""
    if isinstance(request, NormBwdRequest):
        return _backward(request, work)
    return _forward(request, work) if isinstance(request, NormFwdRequest) else {}


def broadcast_statistic(request: NormRequest, statistic: Array) -> Array:
    """A statistic in a shape that broadcasts with x."""
    if request.mode is NormMode.BATCH_NORM:
        return statistic.reshape(1, -1, *(1,) * (request.x.ndim - 2))
    if request.by_group:
        channels = request.x.shape[1]
        per_channel = np.repeat(statistic, channels // request.groups, axis=1)
        return np.asarray(per_channel.reshape(*per_channel.shape, *(1,) * (request.x.ndim - 2)))
    return statistic


def statistic_result(request: NormRequest, statistic: Array) -> Array:
    """A statistic that broadcasts with x, in the shape in which it is returned."""
    if request.by_group:
        statistic = statistic[:, :: request.x.shape[1] // request.groups]
    return statistic.reshape(request.statistics_shape)


def mean_along(request: NormRequest, x: Array) -> Array:
    """The mean over the elements that share a statistic, for an array of x's shape; it broadcasts with x."""
    if request.by_group:
        return broadcast_statistic(request, x.reshape(*request.statistics_shape, -1).mean(axis=-1))
    return np.asarray(x.mean(axis=request.axes, keepdims=True))


def statistics(request: NormRequest, x: Array) -> tuple[Array, Array]:
    """Mean (0 for RMS_NORM) and biased variance, in shapes that broadcast with x."""
    if request.mode is NormMode.RMS_NORM:
        square = mean_along(request, x * x)
        return np.zeros_like(square), square
    mean = mean_along(request, x)
    return mean, mean_along(request, (x - mean) ** 2)


def _forward(request: NormFwdRequest, work: np.dtype[Any]) -> Results:
    x = values(request.x, work)
    if request.by_running:
        mean, variance = (
            broadcast_statistic(request, values(t, work)) for t in (request.running_mean, request.running_var)
        )
    else:
        mean, variance = statistics(request, x)
    inverse = 1 / np.sqrt(variance + work.type(request.epsilon))
    y = (x - mean) * inverse * values(request.scale, work).reshape(request.parameter_shape)
    if request.bias is not None:
        y = y + values(request.bias, work).reshape(request.parameter_shape)
    results = {"out": y}
    if request.training:
        if request.has_mean:
            results["mean_out"] = statistic_result(request, mean)
        results["inv_variance_out"] = statistic_result(request, inverse)
        if request.running_mean is not None:
            results.update(_running(request, mean.ravel(), variance.ravel(), work))
    return results


def _running(request: NormFwdRequest, mean: Array, variance: Array, work: np.dtype[Any]) -> Results:
    """The running statistics, updated with those of this batch; the variance is the unbiased one."""
    count = request.x.layout.size // mean.size
    momentum = work.type(request.momentum)
    fresh = {"mean": mean, "var": variance * work.type(count / max(count - 1, 1))}
    return {
        f"running_{name}_out": (1 - momentum) * values(getattr(request, f"running_{name}"), work) + momentum * new
        for name, new in fresh.items()
    }


def _backward(request: NormBwdRequest, work: np.dtype[Any]) -> Results:
    x, dy = values(request.x, work), values(request.dy, work)
    inverse = broadcast_statistic(request, values(request.inv_variance, work))
    mean = broadcast_statistic(request, values(request.mean, work)) if request.mean is not None else 0
    normal = (x - mean) * inverse
    scaled = dy * values(request.scale, work).reshape(request.parameter_shape)
    along = mean_along(request, scaled * normal)
    level = mean_along(request, scaled) if request.has_mean else 0
    over = tuple(axis for axis in range(x.ndim) if axis != 1) if request.by_channel else _leading(request)
    results = {
        "dx": inverse * (scaled - level - normal * along),
        "dscale": (dy * normal).sum(axis=over).reshape(request.scale.shape),
    }
    if request.bias:
        results["dbias"] = dy.sum(axis=over).reshape(request.scale.shape)
    return results


def _leading(request: NormRequest) -> tuple[int, ...]:
    return tuple(range(request.x.ndim - request.scale.ndim))


reference = exactly(evaluate)
