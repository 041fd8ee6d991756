"""Splits copies of strided tensors into pieces that one driver call can copy: dense ones, or rows with a pitch.

host_copies.py uses it to copy between a tensor and the host; this module copies nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dispatch.device.layout import c_strides

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["pieces", "whole"]


def whole(tensor: Tensor, array: Array) -> tuple[int, int, Array] | None:
    """The single dense piece, (pointer, pitch 0, array), of a tensor in C order; None for other tensors."""
    if not tensor.layout.is_contiguous or tensor.dtype.bits == 4:
        return None
    return tensor.ptr, 0, array


def pieces(tensor: Tensor, array: Array) -> list[tuple[int, Array, int]]:
    """Cut a copy into (pointer, part of the host array, pitch): one dense piece of pitch 0, or rows by outer index.

    The axes are ordered from the largest stride to the smallest, and negative strides are reversed, so that a
    transposed or reversed tensor counts as dense.
    """
    layout = tensor.layout
    if layout.size == 0:
        return []
    if layout.dtype.bits == 4:
        return [(tensor.ptr, array, 0)]
    item = layout.dtype.itemsize
    base = tensor.ptr + layout.low
    forward: list[Any] = [slice(None, None, -1 if stride < 0 else 1) for stride in layout.strides]
    forward.append(...)  # with the ellipsis an array without axes stays an array
    array = array[tuple(forward)]
    # The stride of an axis of one element is arbitrary, and must not be used as a pitch.
    alone = [axis for axis, extent in enumerate(layout.shape) if extent == 1]
    others = [axis for axis, extent in enumerate(layout.shape) if extent > 1]
    order = sorted(others, key=lambda axis: -abs(layout.strides[axis]))
    first: tuple[Any, ...] = (*(0 for _ in alone), ...)
    array = array.transpose([*alone, *order])[first]
    shape = [layout.shape[axis] for axis in order]
    strides = [abs(layout.strides[axis]) for axis in order]
    if strides == list(c_strides(tuple(shape))):
        return [(base, array, 0)]
    overlaps = len(strides) > 1 and strides[-2] < shape[-1]  # rows of another library's sliding window
    if strides[-1] != 1 or overlaps:  # no axis is dense: copy rows of one element
        array, shape, strides = array[..., None], [*shape, 1], [*strides, 1]
    cut = []
    for index in itertools.product(*map(range, shape[:-2])):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
        cut.append((base + offset * item, array[index], strides[-2] * item))
    return cut
