"""The GPU as a device: primary context, stream-ordered memory pool, copies, and what a driver status means.

`device()` makes one per GPU. The primary context is shared with torch, CuPy and JAX, so pointers pass freely between
them. Memory comes from a pool of this device's own; freeing is ordered behind every stream that used it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np

from cudabind import driver
from cudabind.errors import CudaError
from dispatch.context import Context
from dispatch.device import Device, array_kind
from dispatch.errors import BadRequest, DeviceFault, DeviceUnavailable, OutOfMemory
from dispatch.keys import Arch
from dispatch.pinned import Copy, PinnedPool
from dispatch.stream import DEFAULTS, Stream, relaxed
from dispatch.tensor import Array, Storage, Tensor, c_strides, check_dense, packed, unpacked

__all__ = ["CudaDevice", "device_of_pointer", "is_available"]

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@cache
def is_available() -> bool:
    """Whether there is a driver and at least one GPU that it can use."""
    try:
        driver.cuInit(0)
        return int(driver.cuDeviceGetCount()) > 0
    except CudaError:
        return False


def device_of_pointer(ptr: int) -> int:
    """The number of the GPU that a device pointer belongs to."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(driver.cuPointerGetAttribute(attribute, ptr))


class CudaDevice(Device):
    """One GPU of this process, through its primary context; DeviceUnavailable where driver or GPU is missing."""

    is_host = False
    here: Context

    def __init__(self, ordinal: int, generation: int) -> None:
        try:
            driver.cuInit(0)
            count = int(driver.cuDeviceGetCount())
        except CudaError as error:
            raise DeviceUnavailable(
                f"cuda:{ordinal} needs an NVIDIA driver and GPU. Use device('host') without"
            ) from error
        if ordinal >= count:
            raise DeviceUnavailable(f"there is no cuda:{ordinal}; this machine has {count} GPU(s), numbered from 0")
        self.handle = driver.cuDeviceGet(ordinal)
        self.is_alone = count == 1
        self.here = Context(self)
        self.activate()
        kinds = driver.CUdevice_attribute
        major = self.attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self.attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        super().__init__(f"cuda:{ordinal}", ordinal, Arch(major * 10 + minor), generation)
        self.model = driver.cuDeviceGetName(96, self.handle).split(b"\0")[0].decode()
        self.l2_bytes = self.attribute(kinds.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        self._pool = self._make_pool(ordinal)
        self._events: deque[ctypes.c_void_p] = deque()
        self._deferred: deque[tuple[int, Stream]] = deque()
        self._parked: deque[tuple[list[ctypes.c_void_p], Any]] = deque()
        self._pinned = PinnedPool(self)
        self._side = self.stream()  # allocations made while the caller captures its own stream

    def attribute(self, kind: Any) -> int:
        """One `CUdevice_attribute` of the GPU."""
        return int(driver.cuDeviceGetAttribute(kind, self.handle))

    def _make_pool(self, ordinal: int) -> ctypes.c_void_p:
        """A pool that keeps what is freed: the driver's default gives it back at every synchronization."""
        props = driver.CUmemPoolProps()
        props.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = ordinal
        pool = driver.cuMemPoolCreate(props)
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(2**64 - 1))
        return ctypes.c_void_p(int(pool))

    def activate(self) -> None:
        self.here.provide()

    # -- streams and events ---------------------------------------------------------------------------------------
    def stream(self) -> Stream:
        """A new stream that does not wait for the legacy default stream."""
        with self.here:
            handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return Stream(self, int(handle), owned=True)

    def event(self) -> ctypes.c_void_p:
        """An event without timing, to be given back with `recycle`."""
        try:
            return self._events.pop()
        except IndexError:
            with self.here:
                return ctypes.c_void_p(int(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def recycle(self, event: ctypes.c_void_p) -> None:
        self._events.append(event)

    def synchronize(self) -> None:
        self.check()
        with self.here:
            status = driver.cuCtxSynchronize.unchecked()
        if status:
            self.fail(status, "cuCtxSynchronize")

    def fail(self, status: int, function: str) -> NoReturn:
        error = driver.error(function, status)
        if status == OUT_OF_MEMORY:
            raise OutOfMemory(f"{self.name} ({self.model}) is out of memory; {self.memory()}") from error
        if error.sticky:
            if self.fault is None:
                self.fault = DeviceFault(
                    f"{self.name} is lost to this process: {error}. A CUDA fault cannot be healed inside its process:"
                    " restart it, or run the work in a child process"
                )
            for lane in self.lanes():
                lane.lose()
            raise self.fault from error
        raise error

    def memory(self) -> str:
        """What of the GPU's memory is free, in words."""
        with self.here:
            free, total = driver.cuMemGetInfo()
        return f"{free / 2**20:,.0f} of {total / 2**20:,.0f} MiB are free"

    def bytes_in_use(self) -> int | None:
        used = ctypes.c_uint64()
        kind = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        if not self.alive or driver.cuMemPoolGetAttribute.unchecked(self._pool, int(kind), ctypes.byref(used)):
            return None  # counting raises nothing: a fault is told to those who wait for results
        return used.value

    def retire(self, stream: Stream) -> None:
        # Where the whole device is collected as garbage, the side stream may have gone first: its handle is dead then.
        if self.alive and self.fault is None and not self._side.closed:
            self._side.wait_for_handle(stream.c_handle)

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        if not stream.foreign:
            return self._allocate_on(nbytes, stream)
        if stream.is_capturing():
            # An allocation on a stream under capture would belong to the caller's graph and live only as it runs.
            with relaxed():
                storage = self._allocate_on(nbytes, self._side)
                self._side.synchronize()
            return storage
        with stream.here:
            return self._allocate_on(nbytes, stream)

    def _allocate_on(self, nbytes: int, stream: Stream) -> Storage:
        self._unpark()
        ptr = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes or 1)  # bare calls take a plain int for a C int, of 32 bits
        status = _allocate(ctypes.byref(ptr), size, self._pool, stream.c_handle)
        if status == OUT_OF_MEMORY:
            self.trim()
            status = _allocate(ctypes.byref(ptr), size, self._pool, stream.c_handle)
        if status:
            self.fail(status, "cuMemAllocFromPoolAsync")
        return Storage(self, ptr.value, nbytes, stream, _release)

    def trim(self) -> None:
        """Give what the pool holds but no tensor uses back to the system, once all streams are done with it."""
        self._free_deferred()
        self.synchronize()
        self._unpark()
        driver.cuMemPoolTrimTo(int(self._pool.value or 0), 0)
        self._pinned.trim()

    def _free_deferred(self) -> None:
        for _ in range(len(self._deferred)):
            ptr, stream = self._deferred.popleft()
            self._free(ptr, stream)

    def _free(self, ptr: int, stream: Stream) -> None:
        """Free behind a stream; not while it is captured, when the free would become part of the caller's graph."""
        if stream.closed:
            stream = self._side
        if not stream.foreign:
            driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(ptr), stream.c_handle)
        elif stream.is_capturing():
            self._deferred.append((ptr, stream))
        else:
            with stream.here:
                driver.cuMemFreeAsync.unchecked(ctypes.c_uint64(ptr), stream.c_handle)

    def park(self, storage: Storage) -> None:
        """Keep another library's memory until our streams are done with it; its own order knows nothing of them."""
        events = [self._recorded(stream) for stream in storage.users() if not stream.done()]
        if events:
            self._parked.append((events, storage.keep))

    def keep_until(self, event: ctypes.c_void_p, keep: Any) -> None:
        """Keep what a copy reads or writes until it has ended, where nobody waits for that."""
        self._parked.append(([event], keep))

    def _unpark(self) -> None:
        """Give parked memory back whose last use is done; looked at as new memory is asked for."""
        for _ in range(len(self._parked)):
            events, _ = self._parked[0]
            if any(driver.cuEventQuery.unchecked_holding_gil(event) for event in events):
                return
            self._events.extend(self._parked.popleft()[0])

    # -- copies ---------------------------------------------------------------------------------------------------
    def copy_in(self, tensor: Tensor, array: Array) -> None:
        stream = self.lane().stream
        if 0 in (stride for stride, extent in zip(tensor.layout.strides, tensor.shape, strict=True) if extent > 1):
            raise BadRequest(
                "tensor", str(tensor.layout), "memory of its own for every element", "it is a broadcast view"
            )
        tensor.storage.use(stream, write=True)
        for ptr, part, pitch in _pieces(tensor, packed(tensor, array)):
            dense = np.ascontiguousarray(part)
            self._copy(stream, ptr, pitch, dense, into=True)
            if self._pinned.holds(dense.ctypes.data):
                stream.synchronize()  # of other memory the driver has made a copy by now

    def copy_out(self, tensor: Tensor) -> Array:
        broadcast = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.layout.strides)
        if any(stride == 0 < extent - 1 for stride, extent in zip(tensor.layout.strides, tensor.shape, strict=True)):
            one = self.copy_out(tensor[broadcast])
            return np.array(np.broadcast_to(one, tensor.shape))
        stream = self.lane().stream
        tensor.storage.use(stream, write=False)
        array = np.empty(tensor.shape, tensor.dtype.numpy)
        target = array
        if tensor.dtype.bits == 4:
            check_dense(tensor)
            target = np.empty((tensor.size + 1) // 2, np.uint8)
        for ptr, part, pitch in _pieces(tensor, target):
            dense = part if part.flags.c_contiguous else np.empty(part.shape, part.dtype)
            self._copy(stream, ptr, pitch, dense, into=False)
            stream.synchronize()
            if dense is not part:
                part[...] = dense
        stream.synchronize()
        return array if target is array else unpacked(tensor, target)

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        self.check()
        self._unpark()
        return self._pinned.array(*array_kind(shape, dtype))

    def copy_in_async(self, tensor: Tensor, array: Array) -> Copy:
        self._unpark()
        pool, kind = self._pinned, tensor.dtype.numpy
        source = array
        if array.dtype != kind or not array.flags.c_contiguous or not pool.holds(array.ctypes.data):
            source = pool.array(array.shape, kind)
            source[...] = array
        pieces = _whole(tensor, source)
        if pieces is None:
            self.copy_in(tensor, source)
            return Copy(None, None, tensor)
        stream = self.lane().stream
        tensor.storage.use(stream, write=True)
        self._copy(stream, *pieces, into=True)
        return Copy(self, self._recorded(stream), tensor, source)

    def copy_out_async(self, tensor: Tensor, out: Array | None) -> Copy:
        self._unpark()
        pool = self._pinned
        direct = out is not None and pool.holds(out.ctypes.data)
        target = out if out is not None and direct else pool.array(tensor.shape, tensor.dtype.numpy)
        pieces = _whole(tensor, target)
        if pieces is None:
            return super().copy_out_async(tensor, out)
        stream = self.lane().stream
        tensor.storage.use(stream, write=False)
        self._copy(stream, *pieces, into=False)
        finish = None if direct or out is None else partial(np.copyto, out, target)
        return Copy(self, self._recorded(stream), target if out is None else out, (tensor, target), finish)

    def _recorded(self, stream: Stream) -> ctypes.c_void_p:
        """An event behind what is enqueued on a stream so far."""
        event = self.event()
        with stream.here:
            status = driver.cuEventRecord.unchecked(event, stream.c_handle)
        if status:
            self.fail(status, "cuEventRecord")
        return event

    def _copy(self, stream: Stream, ptr: int, pitch: int, array: Array, *, into: bool) -> None:
        """Enqueue one copy between a dense host array and the device: of all of it, or of its rows at a pitch."""
        if array.size == 0:
            return
        with self.here:
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
                self.fail(status, "cuMemcpyHtoDAsync" if into else "cuMemcpyDtoHAsync")
            return
        copy = driver.CUDA_MEMCPY2D()
        kinds = driver.CUmemorytype
        for side, is_device in (("dst", into), ("src", not into)):
            setattr(copy, f"{side}MemoryType", kinds.CU_MEMORYTYPE_DEVICE if is_device else kinds.CU_MEMORYTYPE_HOST)
            setattr(copy, f"{side}Device" if is_device else f"{side}Host", ptr if is_device else host)
            setattr(copy, f"{side}Pitch", pitch if is_device else array.shape[1] * array.itemsize)
        copy.WidthInBytes, copy.Height = array.shape[1] * array.itemsize, array.shape[0]
        driver.cuMemcpy2DAsync(copy, int(stream.c_handle.value or 0))

    def fill_zero(self, tensor: Tensor) -> None:
        stream = self.lane().stream
        tensor.storage.use(stream, write=True)
        if tensor.nbytes:
            size = ctypes.c_size_t(tensor.nbytes)
            with self.here:
                status = driver.cuMemsetD8Async.unchecked(ctypes.c_uint64(tensor.ptr), 0, size, stream.c_handle)
            if status:
                self.fail(status, "cuMemsetD8Async")

    def close(self) -> None:
        was_alive = self.alive
        super().close()
        if was_alive and self.fault is None:
            with self.here:
                driver.cuCtxSynchronize()
            driver.cuMemPoolDestroy(int(self._pool.value or 0))  # its memory goes with it: the tensors are stale
            for event in self._events:
                driver.cuEventDestroy(int(event.value or 0))
            self._events.clear()
            if not self._pinned.in_use:  # else arrays of the users would go with the context
                driver.cuDevicePrimaryCtxRelease(self.handle)


def _allocate(*arguments: Any) -> int:
    return int(driver.cuMemAllocFromPoolAsync.unchecked(*arguments))


def _release(storage: Storage) -> None:
    """Free a storage behind all streams that used it, those of other libraries included."""
    device = storage.device
    if not isinstance(device, CudaDevice) or not device.alive or device.fault is not None:
        return  # the pool is gone, and this memory with it
    users = storage.users()
    # The side stream is behind every stream that is closed.
    stream = device._side if any(user.closed for user in users) else storage.writer
    for user in users:
        stream.wait_for(user)
    for handle in storage.lent:
        if handle in DEFAULTS:  # no objects, which somebody could have destroyed
            stream.wait_for_handle(ctypes.c_void_p(handle))
        else:  # a stream of theirs may be gone by now, and a dead handle must not be touched: wait for everything
            if not device.here.push():
                driver.cuCtxSynchronize.unchecked()
                device.here.pop()
            break
    device._free(storage.base, stream)


def _whole(tensor: Tensor, array: Array) -> tuple[int, int, Array] | None:
    """The one dense piece that a copy of a tensor in C order is: (pointer, pitch, array); None where it is not one."""
    if not tensor.layout.is_contiguous or tensor.dtype.bits == 4:
        return None
    return tensor.ptr, 0, array


def _pieces(tensor: Tensor, array: Array) -> list[tuple[int, Array, int]]:
    """Cut a copy into (pointer, part of the host array, pitch): one dense piece of pitch 0, or rows by outer index.

    The axes are taken from the largest stride to the smallest, all of them forward, so that a transposed or reversed
    tensor is dense as well.
    """
    layout = tensor.layout
    if layout.size == 0:
        return []
    if layout.dtype.bits == 4:
        return [(tensor.ptr, array, 0)]
    item = layout.dtype.itemsize
    base = tensor.ptr + layout.low
    forward: list[Any] = [slice(None, None, -1 if stride < 0 else 1) for stride in layout.strides]
    forward.append(...)  # the dots keep an array of no axes an array
    array = array[tuple(forward)]
    order = sorted(range(len(layout.shape)), key=lambda axis: -abs(layout.strides[axis]))
    array = array.transpose(order)
    shape = [layout.shape[axis] for axis in order]
    strides = [abs(layout.strides[axis]) for axis in order]
    if all(
        extent == 1 or stride == step
        for extent, stride, step in zip(shape, strides, c_strides(tuple(shape)), strict=True)
    ):
        return [(base, array, 0)]
    if strides[-1] != 1:  # no axis is dense: single elements, one to a row
        array, shape, strides = array[..., None], [*shape, 1], [*strides, 1]
    pieces = []
    for index in itertools.product(*map(range, shape[:-2])):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
        pieces.append((base + offset * item, array[index], strides[-2] * item))
    return pieces
