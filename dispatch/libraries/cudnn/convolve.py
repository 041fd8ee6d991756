"""Convolution and its two gradients in NumPy, tap by tap, in any number of dimensions and any precision.

`reference.py` and the host rows use it. Tensors are (N, C, spatial…), filters (K, C / groups, spatial…); the operation
is cross-correlation (CUDNN_CROSS_CORRELATION). It calls no library.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Array

__all__ = ["Steps", "backward_data", "backward_filter", "forward", "output_shape"]

Shape = tuple[int, ...]


class Steps(NamedTuple):
    """Padding before and after, stride and dilation of each spatial axis."""

    pre: Shape
    post: Shape
    stride: Shape
    dilation: Shape


def output_shape(x: Shape, w: Shape, steps: Steps) -> Shape:
    """The shape of the forward's result; an extent is 0 or less if the filter does not fit."""
    spatial = (
        (extent + before + after - (size - 1) * dilation - 1) // stride + 1
        for extent, size, before, after, stride, dilation in zip(x[2:], w[2:], *steps, strict=True)
    )
    return (x[0], w[0], *spatial)


def _taps(w: Shape, out: Shape, steps: Steps) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each tap of the filter, with the slices of the padded input that it is multiplied with."""
    for tap in product(*map(range, w[2:])):
        starts = [place * dilation for place, dilation in zip(tap, steps.dilation, strict=True)]
        yield (
            tap,
            tuple(
                slice(start, start + (extent - 1) * stride + 1, stride)
                for start, extent, stride in zip(starts, out[2:], steps.stride, strict=True)
            ),
        )


def _at(places: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index into the last axes."""
    return (..., *places)


def _grouped(x: Array, groups: int) -> Array:
    """(N, C, …) as (groups, C / groups, N · …)."""
    n, c = x.shape[:2]
    flat = x.reshape(n, groups, c // groups, -1)
    return np.ascontiguousarray(flat.transpose(1, 2, 0, 3)).reshape(groups, c // groups, -1)


def _ungrouped(flat: Array, n: int, spatial: Shape) -> Array:
    groups, c, _ = flat.shape
    tensor: Array = flat.reshape(groups, c, n, -1).transpose(2, 0, 1, 3).reshape(n, groups * c, *spatial)
    return tensor


def _padded(x: Array, steps: Steps) -> Array:
    return np.pad(x, ((0, 0), (0, 0), *zip(steps.pre, steps.post, strict=True)))


def forward(x: Array, w: Array, steps: Steps) -> Array:
    """Y from X and W, in the precision of its operands."""
    groups = x.shape[1] // w.shape[1]
    out = output_shape(x.shape, w.shape, steps)
    padded = _padded(x, steps)
    filters = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    total: Array = np.zeros((groups, w.shape[0] // groups, out[0] * int(np.prod(out[2:]))), x.dtype)
    for tap, places in _taps(w.shape, out, steps):
        total += filters[_at(tap)] @ _grouped(padded[_at(places)], groups)
    return _ungrouped(total, out[0], out[2:])


def backward_data(dy: Array, w: Array, x_shape: Shape, steps: Steps) -> Array:
    """DX from DY and W."""
    groups = x_shape[1] // w.shape[1]
    extents = [e + before + after for e, before, after in zip(x_shape[2:], steps.pre, steps.post, strict=True)]
    padded: Array = np.zeros((*x_shape[:2], *extents), dy.dtype)
    filters = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    flat = _grouped(dy, groups)
    for tap, places in _taps(w.shape, dy.shape, steps):
        part = filters[_at(tap)].transpose(0, 2, 1) @ flat
        padded[_at(places)] += _ungrouped(part, x_shape[0], dy.shape[2:])
    inside = tuple(slice(before, before + extent) for before, extent in zip(steps.pre, x_shape[2:], strict=True))
    dx: Array = padded[_at(inside)]
    return dx


def backward_filter(dy: Array, x: Array, w_shape: Shape, steps: Steps) -> Array:
    """DW from DY and X."""
    groups = x.shape[1] // w_shape[1]
    padded = _padded(x, steps)
    flat = _grouped(dy, groups)
    dw: Array = np.zeros(w_shape, dy.dtype)
    grouped = dw.reshape(groups, w_shape[0] // groups, *w_shape[1:])
    for tap, places in _taps(w_shape, dy.shape, steps):
        grouped[_at(tap)] = flat @ _grouped(padded[_at(places)], groups).transpose(0, 2, 1)
    return dw
