"""New weights for a prepared call: written over the old ones, in their memory and in the order of the call's stream.

`BoundCall.refit` comes here. Nothing is compiled, captured or allocated anew: what was enqueued before reads the old
weights, what is enqueued after reads the new ones. This room never changes a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.errors import BadRequest
from dispatch.keys import Dtype
from dispatch.tensor import Tensor

if TYPE_CHECKING:
    from dispatch.lane import Lane
    from dispatch.request import Request

__all__ = ["refit"]


def refit(lane: Lane, request: Request, operands: dict[str, Any]) -> None:
    """Overwrite operands that a request reads, by name, with tensors or arrays of the very same shape and dtype.

    Raises BadRequest for a name that is no operand it reads, for another shape or dtype, and for another device.
    """
    lane.check()
    read = {name: tensor for name, tensor, written in request.tensors() if not written}
    pairs = []
    for name, source in operands.items():
        target = read.get(name)
        if target is None:
            raise BadRequest(name, "no operand that this call reads", f"one of {', '.join(read)}")
        pairs.append((target, source))
        _check(name, target, source)
    with lane.device.here:
        for target, source in pairs:
            if lane.device.is_host or not isinstance(source, Tensor):
                _from_host(lane, target, source)
            else:
                target.storage.use(lane.stream, write=True)
                source.storage.use(lane.stream, write=False)
                _copy(target, source, lane.stream.c_handle.value or 0)


def _check(name: str, target: Tensor, source: Any) -> None:
    if isinstance(source, Tensor):
        target.device.check(source)
        if source.device is not target.device:
            raise BadRequest(name, f"a tensor on {source.device!r}", f"one on {target.device!r}, or an array")
        given = (source.shape, source.dtype)
    else:
        array = np.asarray(source)
        given = (array.shape, Dtype.by_numpy.get(array.dtype))  # type: ignore[assignment]  # None is no dtype of ours
    if given != (target.shape, target.dtype):
        raise BadRequest(name, f"{given[1]}{list(given[0])}", f"{target.layout}: a refit changes numbers and no more")
    if target.layout.readonly:
        raise BadRequest(name, "read-only memory", "memory that may be written, so that it can be refitted")


def _from_host(lane: Lane, target: Tensor, source: Any) -> None:
    """Copy an array in, on the lane's stream; of pageable memory the driver has made a copy when this returns."""
    with lane.stream:
        target.device.copy_in(target, np.asarray(source))


def _copy(target: Tensor, source: Tensor, stream: int) -> None:
    """Enqueue the copy between two tensors of one shape: at once where both are dense alike, else line by line."""
    dense = target.layout.high - target.layout.low == target.nbytes
    if target.layout.strides == source.layout.strides and dense:
        driver.cuMemcpyDtoDAsync(target.ptr + target.layout.low, source.ptr + source.layout.low, target.nbytes, stream)
    elif target.ndim > 2:
        for index in range(target.shape[0]):
            _copy(target[index], source[index], stream)
    elif target.ndim == 2 and 1 in (target.layout.strides[0], target.layout.strides[1]):
        _lines(target, source, stream)
    else:
        raise BadRequest("refit", str(source.layout), f"steps as those of {target.layout}")


def _lines(target: Tensor, source: Tensor, stream: int) -> None:
    """One copy of all the lines of a matrix, at the pitch of each side."""
    by_row = target.layout.strides[1] == 1
    one, other = (target, source) if by_row else (target.mT, source.mT)
    if other.layout.strides[1] != 1 and other.shape[1] > 1:
        raise BadRequest("refit", str(source.layout), f"dense lines as those of {target.layout}")
    copy, item = driver.CUDA_MEMCPY2D(), one.dtype.itemsize
    kind = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstMemoryType = copy.srcMemoryType = kind
    copy.dstDevice, copy.srcDevice = one.ptr, other.ptr
    copy.dstPitch, copy.srcPitch = (max(t.layout.strides[0], t.shape[1]) * item for t in (one, other))
    copy.WidthInBytes, copy.Height = one.shape[1] * item, one.shape[0]
    driver.cuMemcpy2DAsync(copy, stream)
