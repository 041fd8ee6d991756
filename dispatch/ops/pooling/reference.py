"""What the pooling requests mean, in NumPy: for the host rows in their own precision, in f64 as the reference."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dispatch.core.host_plan import EXACT, Results, largest, values
from dispatch.ops.pooling.request import PoolingBwdRequest, PoolingMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Array
    from dispatch.ops.pooling.request import PoolingRequest, Windows

__all__ = ["backward", "evaluate", "reference"]


def evaluate(request: PoolingRequest | PoolingBwdRequest, work: np.dtype[Any]) -> Results:
    """The output of a request by name, computed in a working dtype."""
    if request.x.size == 0:
        return {"out": np.zeros(request.layout_of("out").shape, work)}
    if isinstance(request, PoolingBwdRequest):
        return {"out": backward(request, values(request.dy, work))}
    return {"out": forward(request, work)}


def _cut(x: Array, windows: Windows, fill: float) -> Array:
    """The windows of an image padded with a number: (images, channels, places…, window…)."""
    around = [(0, 0), (0, 0), *((pad, pad) for pad in windows.padding)]
    axes = tuple(range(2, x.ndim))
    cut = sliding_window_view(np.pad(x, around, constant_values=fill), windows.window, axis=axes)
    steps: Any = (..., *(slice(None, None, step) for step in windows.stride), *(slice(None),) * len(axes))
    return np.asarray(cut[steps])


def _counts(request: PoolingRequest | PoolingBwdRequest, work: np.dtype[Any]) -> Array:
    """What the averages divide by, for every place: the window's size, or its elements that are in the image."""
    windows = request.windows
    if request.mode is PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING:
        return np.asarray(np.prod(windows.window), work)
    inside = np.ones((1, 1, *request.x.shape[2:]), work)
    space = tuple(range(-len(windows.window), 0))
    return np.asarray(_cut(inside, windows, 0.0).sum(axis=space))


def forward(request: PoolingRequest, work: np.dtype[Any]) -> Array:
    """y."""
    x = values(request.x, work)
    space = tuple(range(-len(request.windows.window), 0))
    if request.mode.is_max:
        found = _cut(x, request.windows, -np.inf).max(axis=space)
        if request.x.dtype.numpy.kind == "i":
            return np.asarray(found)
        return np.asarray(np.maximum(found, work.type(-largest(request.x.dtype))))  # which cuDNN starts from; NaN stays
    return np.asarray(_cut(x, request.windows, 0.0).sum(axis=space) / _counts(request, work))


def backward(request: PoolingBwdRequest, dy: Array) -> Array:
    """dx: every place of y gives its share to each element of its window, or all of it to the first of the largest.

    NaN is larger than any number, and what pads the image is none of its elements.
    """
    windows, work = request.windows, dy.dtype
    axes = len(windows.window)
    if request.mode.is_max:
        x = values(request.x, work)
        cut, real = (_lines(_cut(one, windows, pad), axes) for one, pad in ((x, -np.inf), (np.ones_like(x), 0)))
        best = cut.max(axis=-1, keepdims=True)
        first = (((cut == best) | np.isnan(cut)) & (real > 0)).argmax(axis=-1)
    else:
        dy = dy / _counts(request, work)
    padded = [extent + 2 * pad for extent, pad in zip(request.x.shape[2:], windows.padding, strict=True)]
    dx = np.zeros((*request.x.shape[:2], *padded), work)
    for number, places in enumerate(_places(windows, dy.shape[2:])):
        dx[places] += np.where(first == number, dy, 0) if request.mode.is_max else dy
    inside = zip(request.x.shape[2:], windows.padding, strict=True)
    image: Any = (..., *(slice(pad, pad + extent) for extent, pad in inside))
    return np.asarray(dx[image])


def _lines(cut: Array, axes: int) -> Array:
    """Windows with all their elements along one axis."""
    return cut.reshape(*cut.shape[:-axes], int(np.prod(cut.shape[-axes:])))


def _places(windows: Windows, shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """For each element of a window, where in the padded image it is for all places of y."""
    for offsets in product(*map(range, windows.window)):
        steps = zip(offsets, windows.stride, shape, strict=True)
        yield (..., *(slice(first, first + (count - 1) * step + 1, step) for first, step, count in steps))


def reference(request: PoolingRequest | PoolingBwdRequest) -> Results:
    """The output of a request in float64, by name."""
    return evaluate(request, EXACT)
