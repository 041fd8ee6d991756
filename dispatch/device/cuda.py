"""The GPU as a device: primary context, streams, stream-ordered memory, and driver errors.

`device()` makes one per GPU. The primary context is shared with torch, CuPy and JAX, so pointers pass freely between
them. Memory comes from this device's own pool (memory_pool.py). releases.py frees it after all streams that used it;
block_cache.py caches some blocks for the next allocation of the same size.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cudabind import driver
from dispatch.device.block_cache import UNIT_BITS, BlockCache
from dispatch.device.callers_graph import CallersGraphs
from dispatch.device.context import Context
from dispatch.device.device import Device
from dispatch.device.dlpack import exported, release_consumed
from dispatch.device.external import ExternalStream, ExternalStreams
from dispatch.device.gpus import FORKED, count_gpus
from dispatch.device.host_copies import HostCopies
from dispatch.device.host_memory import array_kind
from dispatch.device.memory_pool import MemoryPool
from dispatch.device.recordings import LOST, Recordings
from dispatch.device.releases import Releases
from dispatch.device.storage import Storage
from dispatch.device.stream import RELAXED, DeviceStream, QuietStream, Stream, current, exchange_mode, relaxed
from dispatch.errors import BadRequest, DeviceFault, DeviceUnavailable, OutOfMemory
from dispatch.keys import Arch

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.async_copy import Copy
    from dispatch.device.block_cache import FreeList
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor


__all__ = ["CudaDevice"]

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
STUCK = 64  # 1/64 of the GPU's memory may be held for streams that are never used again; beyond that, synchronize
UNIT = 1 << UNIT_BITS
_of_parents: list[Any] = []  # in a forked child: keeps the parent's objects, so that no finalizer calls the driver


class CudaDevice(Device):
    """One GPU of this process, through its primary context; DeviceUnavailable if the driver or the GPU is missing."""

    is_host = False
    context: Context

    def __init__(self, ordinal: int, generation: int) -> None:
        count = count_gpus(ordinal)
        self.handle = driver.cuDeviceGet(ordinal)
        self.is_alone = count == 1
        self.context = Context(self, self.handle)
        self.activate()
        kinds = driver.CUdevice_attribute
        major = self.attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self.attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        super().__init__(f"cuda:{ordinal}", ordinal, Arch(major * 10 + minor), generation)
        self.model = driver.cuDeviceGetName(96, self.handle).split(b"\0")[0].decode()
        self.l2_bytes = self.attribute(kinds.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        self._pool = MemoryPool(ordinal)
        self._events: deque[ctypes.c_void_p] = deque()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # those created here
        self._retained = deque([self.handle])  # until `close` has released the primary context
        self._copies = HostCopies(self)
        self.recordings = Recordings()
        self.graphs = CallersGraphs(self)
        self.releases = Releases(self, self.stream(), self.graphs)
        self.blocks = BlockCache(self.releases.side, self.releases.free_block, _release)
        self.externals = ExternalStreams(self, self.releases)
        self.quiet = self.stream()  # waits for no other stream; calls are prepared on it while the caller captures
        # Libraries' handles that no executor uses, to be reused: destroying one waits for the whole context.
        self.idle: defaultdict[str, deque[tuple[Any, Callable[[Any], object]]]] = defaultdict(deque)
        self._most_stuck = int(driver.cuDeviceTotalMem(self.handle)) // STUCK

    def attribute(self, kind: Any) -> int:
        """One `CUdevice_attribute` of the GPU."""
        return int(driver.cuDeviceGetAttribute(kind, self.handle))

    def activate(self) -> None:
        self.context.provide()

    def after_fork(self) -> None:
        super().after_fork()
        self.blocks.lose()
        executors = self.executors()
        _of_parents.append((self.__dict__.copy(), executors, [executor.__dict__.copy() for executor in executors]))
        if self.fault is None:
            self.fault = DeviceUnavailable(f"{self.name} cannot be used in this process: {FORKED}")
        for executor in executors:
            executor.lose()

    # -- streams and events ---------------------------------------------------------------------------------------
    def stream(self, *, high_priority: bool = False) -> Stream:
        """A new stream that does not wait for the legacy default stream."""
        self.check()
        with self.context:  # 1 is CU_STREAM_NON_BLOCKING; the driver clamps the priority to its range
            handle = driver.cuStreamCreateWithPriority(1, -99 if high_priority else 0)
        stream: Stream = DeviceStream(self, int(handle), owned=True)
        with self._lock:
            self._streams.add(stream)
        return stream

    def external(self, handle: int) -> ExternalStream:
        if not current.executors:  # a thread such as autograd's may have no context yet, which default streams need
            self.activate()
        return self.externals.named(handle)

    def event(self) -> ctypes.c_void_p:
        """An event without timing, from a pool; `recycle` returns it."""
        try:
            return self._events.pop()
        except IndexError:
            with self.context:
                return ctypes.c_void_p(int(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def recycle(self, event: ctypes.c_void_p) -> None:
        self._events.append(event)

    def recorded(self, stream: Stream) -> ctypes.c_void_p:
        event = self.event()
        with stream.context:
            status = driver.cuEventRecord.unchecked(event, stream.c_handle)
        if status:
            self.fail(status, "cuEventRecord")
        return event

    def synchronize(self) -> None:
        """Wait for all work on the GPU, of other libraries too; raises the error that it ended in.

        It ends active captures of other libraries, as `torch.cuda.synchronize` does, but none of this library.
        """
        self.check()
        self.refuse_capture("to wait for the device")
        self._collect()
        gathered, unmarked = self.releases.gather(), self.externals.unmarked()
        try:
            status = self.context.wait(self.recordings)
        except BaseException:
            self.releases.put_back(gathered)
            raise
        if status:
            self.releases.put_back(gathered)
            self.fail(status, "cuCtxSynchronize")
        for stream, since in unmarked:
            if stream.unmarked == since:
                stream.unmarked = 0
        self.releases.done(gathered)

    def refuse_capture(self, what: str, stream: Stream | None = None) -> None:
        """BadRequest if `stream`, or this thread's current one, is under the caller's capture."""
        if self._is_captured(stream):
            hint = "call it outside of the capture"
            raise BadRequest("stream", "a stream under capture", f"one that is not under capture, {what}", hint)

    def fail(self, status: int, function: str) -> NoReturn:
        error = driver.error(function, status)
        if status == OUT_OF_MEMORY:
            raise OutOfMemory(f"{self.name} ({self.model}) is out of memory; {self.memory()}") from error
        if error.sticky:
            if self.fault is None:
                self.fault = DeviceFault(
                    f"{self.name} is lost to this process: {error}. A process cannot recover from a CUDA fault:"
                    " restart the process, or run the work in a child process"
                )
            self.blocks.lose()
            for executor in self.executors():
                executor.lose()
            raise self.fault from error
        raise error

    def memory(self) -> str:
        """How much of the GPU's memory is free, as text."""
        with self.context:
            free, total = driver.cuMemGetInfo()
        return f"{free / 2**20:,.0f} of {total / 2**20:,.0f} MiB are free"

    def _is_captured(self, stream: Stream | None = None) -> bool:
        executor = current.executor
        if stream is None and executor is not None and executor.stream.device is self:
            stream = executor.stream
        return stream is not None and stream.external and not stream.closed and stream.is_capturing()

    def bytes_in_use(self) -> int | None:
        if not self.alive or self.fault is not None:
            return None
        release_consumed(everything=True)
        self.blocks.flush()
        with relaxed():
            self.releases.collect()
            return self._pool.bytes_in_use()

    def withdraw(self, stream: Stream) -> None:
        self.blocks.withdraw(stream)

    def retire(self, stream: Stream) -> None:
        # When the whole device is collected as garbage, the side stream may be destroyed already.
        side = self.releases.side
        if self.alive and self.fault is None and not side.closed and not (stream.external and stream.is_capturing()):
            side.wait_for_handle(stream.c_handle)

    def dispose(self, handle: ctypes.c_void_p) -> None:
        if self.alive and self.fault is None and not self.releases.side.closed:
            self.releases.closed_handles.append(handle)
        else:
            driver.cuStreamDestroy.unchecked(handle)

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        if not stream.external:
            blocks: FreeList | None = stream.free_lists.get((nbytes + UNIT - 1) >> UNIT_BITS)
            if blocks is None or not blocks.bases:
                return self._allocate_on(nbytes, stream, self.blocks.wanted(stream, nbytes))
            if exported:
                release_consumed()
            if self.releases.pending:
                self._collect()
            try:
                base = blocks.bases.pop()
            except IndexError:  # another thread or a finalizer has taken the last block
                return self._allocate_on(nbytes, stream)
            blocks.was_used = True
            return Storage(self, base, nbytes, stream, blocks.take_back)
        if isinstance(stream, QuietStream):
            return self._allocate_for(stream.stream, nbytes)
        if stream.is_capturing():
            storage = self._allocate_for(stream, nbytes)
            self.graphs.keep(stream, storage)
            return storage
        with stream.context:
            return self._allocate_on(nbytes, stream)

    def _allocate_on(self, nbytes: int, stream: Stream, blocks: FreeList | None = None) -> Storage:
        """Memory from the pool; when it is freed, it goes to `blocks` if given, else back to the pool."""
        if exported:
            release_consumed()
        ptr = ctypes.c_uint64()
        size_bytes = nbytes or 1 if blocks is None else blocks.nbytes
        size = ctypes.c_size_t(size_bytes)  # an unchecked call would pass a plain int as a C int, of 32 bits
        mode = ctypes.byref(ctypes.c_int(RELAXED))  # `with relaxed():`, inlined, because the block took 0.3 us longer
        exchange = exchange_mode()
        exchange(mode)
        try:
            self.releases.collect()
            status = self._pool.take(ptr, size, stream)
        finally:
            exchange(mode)
        if status == OUT_OF_MEMORY:
            status = self._allocate_again(ptr, size, stream)
        elif self.releases.stuck > self._most_stuck and not self._is_captured():
            self.synchronize()
        if status:
            self.fail(status, "cuMemAllocFromPoolAsync")
        return Storage(self, ptr.value, nbytes, stream, _release if blocks is None else blocks.take_back)

    def _allocate_again(self, ptr: ctypes.c_uint64, size: ctypes.c_size_t, stream: Stream) -> int:
        status = OUT_OF_MEMORY
        if self.blocks.flush():
            status = self._allocate_now(ptr, size, stream)
        if status != OUT_OF_MEMORY or self._is_captured():
            return status  # waiting for the device would end the caller's capture
        self.trim()
        return self._allocate_now(ptr, size, stream)

    def _allocate_now(self, ptr: ctypes.c_uint64, size: ctypes.c_size_t, stream: Stream) -> int:
        with relaxed():
            self.releases.collect()
            return self._pool.take(ptr, size, stream)

    def _allocate_for(self, stream: Stream, nbytes: int) -> Storage:
        """Memory for a stream that the caller captures: allocated at once, outside of the caller's graph."""
        with relaxed():
            storage = self._allocate_on(nbytes, self.quiet)
            self.quiet.synchronize()
        storage.owner = storage.writer = stream
        return storage

    def trim(self) -> None:
        """Return the pool's unused memory to the system, once all streams are done with it."""
        release_consumed(everything=True)
        self.blocks.flush()
        with relaxed():
            self.releases.collect()
            self.synchronize()
            self.releases.side.synchronize()
            self.releases.collect()
            self._pool.trim()
            self._copies.pinned.trim()

    def park(self, storage: Storage) -> None:
        self.releases.give_back(storage)

    def keep_until(self, event: ctypes.c_void_p, keep: Any) -> None:
        self.releases.keep_until(event, keep)

    # -- copies ---------------------------------------------------------------------------------------------------
    def copy_in(self, tensor: Tensor, array: Array) -> None:
        self._copies.copy_in(tensor, array)

    def copy_out(self, tensor: Tensor) -> Array:
        return self._copies.copy_out(tensor)

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        self.check()
        self._collect()
        return self._copies.pinned.array(*array_kind(shape, dtype))

    def _collect(self) -> None:
        with relaxed():
            self.releases.collect()

    def copy_in_async(self, tensor: Tensor, array: Array) -> Copy:
        self.check_written(tensor)
        self.refuse_capture("to copy from the host")
        self._collect()
        return self._copies.copy_in_async(tensor, array)

    def copy_out_async(self, tensor: Tensor, out: Array | None) -> Copy:
        self.refuse_capture("to copy to the host")
        self._collect()
        return self._copies.copy_out_async(tensor, out) or super().copy_out_async(tensor, out)

    def clear(self, ptr: int, nbytes: int, tensor: Tensor) -> None:
        stream = self.executor().stream
        tensor.storage.use(stream, write=True)
        if nbytes:
            size = ctypes.c_size_t(nbytes)
            with self.context:
                status = driver.cuMemsetD8Async.unchecked(ctypes.c_uint64(ptr), 0, size, stream.c_handle)
            if status:
                self.fail(status, "cuMemsetD8Async")
            if stream.external and stream.is_capturing():
                self.graphs.keep(stream, tensor.storage)

    def close(self) -> None:
        """As for every device; if it was interrupted, or refused because of a capture, call it again to finish."""
        super().close()
        if self.fault is not None:
            return
        try:
            handle = self._retained.pop()
        except IndexError:  # already done, or another thread is doing it
            return
        try:
            self._give_back()
        except BaseException:
            self._retained.append(handle)
            raise
        if not self._copies.pinned.in_use:  # else users' page-locked arrays would be freed with the context
            driver.cuDevicePrimaryCtxRelease(handle)

    def _give_back(self) -> None:
        """Wait for all work, then destroy everything that this device has created; remaining objects use no handle."""
        with self.recordings.exclude(), relaxed(), self.context:
            status = driver.cuCtxSynchronize.unchecked()
            if status in LOST:
                hint = "call close() again after the capture has ended"
                raise BadRequest(
                    "close", f"{self}, on which another library captures", "a device without captures", hint
                )
            if status:
                self.fail(status, "cuCtxSynchronize")
            self.blocks.lose()
            self.releases.abandon()
            self._destroy_handles()
            self._pool.destroy()  # frees all its memory: the tensors become stale
            self._destroy_events()

    def _destroy_handles(self) -> None:
        for handles in self.idle.values():
            while handles:
                handle, destroy = handles.pop()
                destroy(handle)
        self.releases.destroy(len(self.releases.closed_handles))
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            if not stream.closed:
                stream.closed = True
                driver.cuStreamDestroy.unchecked(stream.c_handle)

    def _destroy_events(self) -> None:
        while self._events:
            driver.cuEventDestroy.unchecked(self._events.pop())


def _release(storage: Storage) -> None:
    """Free a storage after all streams that used it, including those of other libraries."""
    device = storage.device
    if isinstance(device, CudaDevice) and device.alive and device.fault is None:  # else it was freed with the pool
        device.releases.free(storage)
