"""Peer access between GPUs, and copies of strided tensors between and within them, one driver call for pitched rows.

Both tensors have the same shape and dtype, and strides above 0. The caller orders the streams.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor

__all__ = ["PitchedRows", "copy", "enable_peer_access", "rows_of"]

Shape = tuple[int, ...]
MAX_PITCH = 2**31 - 1  # bytes: CU_DEVICE_ATTRIBUTE_MAX_PITCH


def enable_peer_access(devices: Sequence[Any]) -> None:
    """Let each GPU access the memory of the others; nothing changes if it can already, or never can."""
    for device in devices:
        with device.context:
            for other in devices:
                if other is not device:
                    driver.cuCtxEnablePeerAccess.unchecked(ctypes.c_void_p(int(other.context.handle)), ctypes.c_uint(0))


class PitchedRows(NamedTuple):
    """`count` rows of `width` bytes: their first offset in both memories, and the pitch in both, in bytes."""

    rows: int
    width: int
    source: int
    target: int
    source_pitch: int
    target_pitch: int


class _CopyAxis(NamedTuple):
    extent: int
    source: int
    target: int


def rows_of(shape: Shape, source: Shape, target: Shape, itemsize: int) -> Iterator[PitchedRows]:
    """The rows of a copy between two memories of these strides, in elements."""
    if 0 in shape:
        return
    axes = [_CopyAxis(*one) for one in zip(shape, source, target, strict=True) if one[0] > 1]
    axes.sort(key=lambda axis: -axis.target)
    merged: list[_CopyAxis] = []
    for axis in axes:
        before = merged[-1] if merged else None
        if before and (before.source, before.target) == (axis.source * axis.extent, axis.target * axis.extent):
            merged[-1] = axis._replace(extent=before.extent * axis.extent)
        else:
            merged.append(axis)
    inner = merged.pop() if merged and merged[-1][1:] == (1, 1) else _CopyAxis(1, 1, 1)
    rows = merged.pop() if merged else _CopyAxis(1, inner.extent, inner.extent)
    width, pitches = inner.extent * itemsize, (rows.source * itemsize, rows.target * itemsize)
    if max(pitches) > MAX_PITCH or min(pitches) < width:  # a single row has no pitch
        merged.append(rows)
        rows, pitches = _CopyAxis(1, inner.extent, inner.extent), (width, width)
    for place in itertools.product(*(range(axis.extent) for axis in merged)):
        first, second = (
            sum(at * axis[side] for at, axis in zip(place, merged, strict=True)) * itemsize for side in (1, 2)
        )
        yield PitchedRows(rows.extent, width, first, second, *pitches)


def copy(source: Tensor, target: Tensor, stream: Stream) -> None:
    """Enqueue a copy on a stream of one of the tensors' GPUs."""
    first, second = source.layout, target.layout
    device: Any = stream.device
    with device.context:
        for rows in rows_of(source.shape, first.strides, second.strides, source.dtype.itemsize):
            begins = rows._replace(source=source.ptr + rows.source, target=target.ptr + rows.target)
            (_dense if rows.rows == 1 else _pitched)(begins, source, target, stream)


def _dense(rows: PitchedRows, source: Tensor, target: Tensor, stream: Stream) -> None:
    to, at, size = ctypes.c_uint64(rows.target), ctypes.c_uint64(rows.source), ctypes.c_size_t(rows.width)
    device: Any = stream.device
    if source.device is target.device:
        name, status = "cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync.unchecked(to, at, size, stream.c_handle)
    else:
        target_context, source_context = (ctypes.c_void_p(_context(one)) for one in (target, source))
        status = driver.cuMemcpyPeerAsync.unchecked(to, target_context, at, source_context, size, stream.c_handle)
        name = "cuMemcpyPeerAsync"
    if status:
        device.fail(status, name)


def _pitched(rows: PitchedRows, source: Tensor, target: Tensor, stream: Stream) -> None:
    is_near = source.device is target.device
    call = driver.CUDA_MEMCPY2D() if is_near else driver.CUDA_MEMCPY3D_PEER()
    kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    call.srcMemoryType, call.srcDevice, call.srcPitch = kind, rows.source, rows.source_pitch
    call.dstMemoryType, call.dstDevice, call.dstPitch = kind, rows.target, rows.target_pitch
    call.WidthInBytes, call.Height = rows.width, rows.rows
    if is_near:
        driver.cuMemcpy2DAsync(call, int(stream.c_handle.value or 0))
        return
    call.srcContext, call.dstContext = _context(source), _context(target)
    call.srcHeight = call.dstHeight = rows.rows
    call.Depth = 1
    driver.cuMemcpy3DPeerAsync(call, int(stream.c_handle.value or 0))


def _context(tensor: Tensor) -> int:
    device: Any = tensor.device
    return int(device.context.handle)
