"""refit: writes new weights of a prepared call over the old ones, in the order of the call's stream.

`BoundCall.refit` calls it. Nothing is compiled, captured or allocated: work enqueued before reads the old weights, work
enqueued after reads the new ones. This module never changes a request.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.checks import as_array
from dispatch.device.cuda import CudaDevice
from dispatch.device.device import Device
from dispatch.device.frameworks.framework import ForeignStorage
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from dispatch.core.request import Request
    from dispatch.execute.executor import Executor

__all__ = ["refit"]


def refit(executor: Executor, request: Request, operands: dict[str, Any]) -> None:
    """Overwrite operands that a request reads, by name, with tensors or arrays of exactly the same shape and dtype.

    Raises BadRequest for a name that is not an operand it reads, for another shape or dtype, and for another device.
    """
    executor.check()
    read = {name: tensor for name, tensor, written in request.tensors() if not written}
    pairs = []
    for name, source in operands.items():
        target = read.get(name)
        if target is None:
            raise BadRequest(name, "a name that is not an operand of this call", f"one of {', '.join(read)}")
        new = source  # NumPy's arrays must match in dtype and byte order; arrays of other libraries are read first
        if not isinstance(source, (Tensor, np.ndarray)) and framework_of(type(source)) is not None:
            new = Device.read(name, source, executor.device)
        pairs.append((target, new))
        _check(name, target, new)
    targets = [target for target, _ in pairs]
    with executor.device.context:
        _overwrite(executor, pairs, targets)
    for storage in {target.storage for target in targets}:
        if isinstance(storage, ForeignStorage):
            storage.framework.written(storage.keep)


def _overwrite(executor: Executor, pairs: list[tuple[Tensor, Any]], targets: list[Tensor]) -> None:
    for target, source in [(target, _apart(executor, source, targets)) for target, source in pairs]:
        if executor.device.is_host or not isinstance(source, Tensor):
            _from_host(executor, target, source)
        else:
            target.storage.use(executor.stream, write=True)
            source.storage.use(executor.stream, write=False)
            _copy(target, source, executor.stream.c_handle.value or 0)
            if isinstance(executor.device, CudaDevice) and executor.stream.capture():
                executor.device.graphs.keep(executor.stream, target.storage, source.storage)


def _check(name: str, target: Tensor, source: Any) -> None:
    if isinstance(source, Tensor):
        target.device.check(source)
        if source.device is not target.device:
            raise BadRequest(name, f"a tensor on {source.device!r}", f"a tensor on {target.device!r}, or an array")
        actual = (source.shape, source.dtype)
    else:
        array = as_array(name, source)
        actual = (array.shape, Dtype.by_numpy.get(array.dtype))  # type: ignore[assignment]  # None: unknown dtype
    if actual != (target.shape, target.dtype):
        raise BadRequest(
            name, f"{actual[1]}{list(actual[0])}", f"{target.layout}, because a refit changes only the numbers"
        )
    if target.layout.meets_itself:
        raise BadRequest(name, f"a view {target.layout}", "elements that have different addresses")
    if target.layout.readonly:
        raise BadRequest(name, "read-only memory", "writable memory, because a refit overwrites it")


def _apart(executor: Executor, source: Any, targets: list[Tensor]) -> Any:
    """A source, or a copy of it if its bytes overlap those of a target, as `b.T` overlaps b."""
    if not isinstance(source, Tensor):
        return source
    low, high = source.ptr + source.layout.low, source.ptr + source.layout.high
    if not any(low < to.ptr + to.layout.high and to.ptr + to.layout.low < high for to in targets):
        return source
    return executor.clone(source) if isinstance(executor, CudaExecutor) else source.numpy()


def _from_host(executor: Executor, target: Tensor, source: Any) -> None:
    """Copy an array to the target on the executor's stream; the array may be changed once this returns."""
    with executor.stream:
        target.device.copy_in(target, np.asarray(source))


def _copy(target: Tensor, source: Tensor, stream: int) -> None:
    """Enqueue the copy between two tensors of one shape: one copy if both are dense in the same order, else several."""
    one, other = target.layout, source.layout
    # Only axes of several elements, from the largest stride of the target to the smallest.
    axes = sorted(
        (axis for axis, extent in enumerate(one.shape) if extent > 1), key=lambda axis: -abs(one.strides[axis])
    )
    shape = [one.shape[axis] for axis in axes]
    to, of = ([layout.strides[axis] for axis in axes] for layout in (one, other))
    if not target.size:
        return
    if to == of and [abs(step) for step in to] == list(c_strides(tuple(shape))):
        driver.cuMemcpyDtoDAsync(target.ptr + one.low, source.ptr + other.low, target.nbytes, stream)
        return
    item = target.dtype.itemsize
    if not item:
        raise BadRequest("refit", str(other), f"packed elements with the layout of {one}")
    if to[-1] != 1 or of[-1] != 1:  # no line is dense in both: each line is a single element
        shape, to, of = [*shape, 1], [*to, 1], [*of, 1]
    count, width = (shape[-2] if len(shape) > 1 else 1), shape[-1] * item
    pitches = (to[-2] * item, of[-2] * item) if count > 1 else (width, width)
    for index in product(*map(range, shape[:-2])):
        ends = [
            tensor.ptr + item * sum(i * step for i, step in zip(index, strides, strict=False))
            for tensor, strides in ((target, to), (source, of))
        ]
        _lines(ends, pitches, width, count, stream)


def _lines(ends: list[int], pitches: tuple[int, int], width: int, count: int, stream: int) -> None:
    """Copy `count` lines of `width` bytes from the second address to the first: in one call if pitches allow it."""
    if min(pitches) < width:
        for line in range(count):
            to, of = (end + line * pitch for end, pitch in zip(ends, pitches, strict=True))
            driver.cuMemcpyDtoDAsync(to, of, width, stream)
        return
    copy, kind = driver.CUDA_MEMCPY2D(), driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstMemoryType = copy.srcMemoryType = kind
    copy.dstDevice, copy.srcDevice = ends
    copy.dstPitch, copy.srcPitch = pitches
    copy.WidthInBytes, copy.Height = width, count
    driver.cuMemcpy2DAsync(copy, stream)
