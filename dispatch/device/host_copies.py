"""Copies between tensors of a GPU and the host, synchronous or asynchronous, from and to memory of any kind.

cuda.py makes one HostCopies for each GPU. Copies are enqueued on the current stream of the calling thread;
strided_copy.py splits strided tensors into pieces, pinned.py has the page-locked memory.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cudabind import driver
from dispatch.checks import convert_array
from dispatch.device.async_copy import Copy
from dispatch.device.failed_collectives import check_not_failed
from dispatch.device.host_memory import check_dense, host_memory, needing_memory, unpacked
from dispatch.device.pinned import PinnedPool
from dispatch.device.strided_copy import pieces, whole

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """The copies of one GPU to and from the host; `pinned` is the pool of its page-locked memory.

    For asynchronous copies the device checks beforehand that the tensor may be written and the stream is not under
    capture; for synchronous copies this class checks it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pinned = PinnedPool(device)

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        """Overwrite a tensor with an array of its shape and dtype."""
        self._device.check_written(tensor, array)
        stream = self._device.executor().stream
        self._device.refuse_capture("to copy from the host", stream)
        array = self._device.packed(tensor, array)
        tensor.storage.use(stream, write=True)
        for ptr, part, pitch in pieces(tensor, array):
            with needing_memory:
                dense = np.ascontiguousarray(part)
            self._copy(stream, ptr, pitch, dense, into=True)
            if self._is_locked(dense.ctypes.data):
                stream.synchronize()  # pageable memory was already copied; page-locked memory is read later

    def _is_locked(self, address: int) -> bool:
        """Whether memory is page-locked, by this or another library: asynchronous copies then read it later."""
        kind, attribute = ctypes.c_uint(), driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        with self._device.context:
            status = driver.cuPointerGetAttribute.unchecked(
                ctypes.byref(kind), ctypes.c_int(int(attribute)), ctypes.c_uint64(address)
            )
        return bool(status == 0)

    def copy_out(self, tensor: Tensor) -> Array:
        """The elements of a tensor as a new array; waits for what writes it."""
        broadcast = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.layout.strides)
        if any(stride == 0 < extent - 1 for stride, extent in zip(tensor.layout.strides, tensor.shape, strict=True)):
            one = self._device.copy_out(tensor[broadcast])
            array = host_memory(tensor.shape, tensor.dtype.numpy)
            array[...] = one
            return array
        stream = self._device.executor().stream
        self._device.refuse_capture("to copy to the host", stream)
        tensor.storage.use(stream, write=False)
        array = host_memory(tensor.shape, tensor.dtype.numpy)
        target = array
        if tensor.dtype.bits == 4:
            check_dense(tensor)
            target = np.empty((tensor.size + 1) // 2, np.uint8)
        # While the driver copies to pageable memory it blocks other threads of the context, so wait before the copy.
        stream.synchronize()
        for ptr, part, pitch in pieces(tensor, target):
            dense = part if part.flags.c_contiguous else host_memory(part.shape, part.dtype)
            self._copy(stream, ptr, pitch, dense, into=False)
            stream.synchronize()
            if dense is not part:
                part[...] = dense
        stream.synchronize()
        check_not_failed(self._device)
        return array if target is array else unpacked(tensor, target)

    def copy_in_async(self, tensor: Tensor, array: Array) -> Copy:
        """Begin `copy_in` of an array of any dtype; if that needs several copies, they are done when this returns."""
        pool, kind = self.pinned, tensor.dtype.numpy
        source = array
        if array.dtype != kind or not array.flags.c_contiguous or not pool.holds(array.ctypes.data):
            source = pool.array(array.shape, kind)
            with needing_memory:
                source[...] = convert_array("source", array, tensor.dtype)
        piece = whole(tensor, source)
        if piece is None:
            self._device.copy_in(tensor, source)
            return Copy(None, None, tensor)
        stream = self._device.executor().stream
        tensor.storage.use(stream, write=True)
        try:
            self._copy(stream, *piece, into=True)
            return Copy(self._device, self._device.recorded(stream), tensor, source)
        except BaseException:  # no event, or Ctrl-C: the source's memory must not be reused while it is still read
            stream.synchronize()
            raise

    def copy_out_async(self, tensor: Tensor, out: Array | None) -> Copy | None:
        """Begin `copy_out`, into `out` if given; None for a tensor that cannot be copied asynchronously."""
        pool = self.pinned
        direct = out is not None and pool.holds(out.ctypes.data)
        target = out if out is not None and direct else pool.array(tensor.shape, tensor.dtype.numpy)
        piece = whole(tensor, target)
        if piece is None:
            return None
        stream = self._device.executor().stream
        tensor.storage.use(stream, write=False)
        finish = None if direct or out is None else partial(np.copyto, out, target)
        try:
            self._copy(stream, *piece, into=False)
            return Copy(
                self._device, self._device.recorded(stream), target if out is None else out, (tensor, target), finish
            )
        except BaseException:  # as above
            stream.synchronize()
            raise

    def _copy(self, stream: Stream, ptr: int, pitch: int, array: Array, *, into: bool) -> None:
        """Enqueue one copy between a dense host array and the device: whole if the pitch is 0, else row by row."""
        if array.size == 0:
            return
        with self._device.context:
            self._copy_here(stream, ptr, pitch, array, into=into)

    def _copy_here(self, stream: Stream, ptr: int, pitch: int, array: Array, *, into: bool) -> None:
        host = array.ctypes.data
        if pitch == 0:
            device_side, host_side, size = ctypes.c_uint64(ptr), ctypes.c_void_p(host), ctypes.c_size_t(array.nbytes)
            if into:
                status = driver.cuMemcpyHtoDAsync.unchecked(device_side, host_side, size, stream.c_handle)
            else:
                status = driver.cuMemcpyDtoHAsync.unchecked(host_side, device_side, size, stream.c_handle)
            if status:
                self._device.fail(status, "cuMemcpyHtoDAsync" if into else "cuMemcpyDtoHAsync")
            return
        copy = driver.CUDA_MEMCPY2D()
        kinds = driver.CUmemorytype
        for side, is_device in (("dst", into), ("src", not into)):
            setattr(copy, f"{side}MemoryType", kinds.CU_MEMORYTYPE_DEVICE if is_device else kinds.CU_MEMORYTYPE_HOST)
            setattr(copy, f"{side}Device" if is_device else f"{side}Host", ptr if is_device else host)
            setattr(copy, f"{side}Pitch", pitch if is_device else array.shape[1] * array.itemsize)
        copy.WidthInBytes, copy.Height = array.shape[1] * array.itemsize, array.shape[0]
        driver.cuMemcpy2DAsync(copy, int(stream.c_handle.value or 0))
