"""Devices whose memory outlives child processes: the parent allocates it, children map it.

The supervisor owns a SharedHost or SharedCuda, which is `sup.device`; a child maps the same chunks (`child_device.py`).
The parent only copies; it runs no kernel. The device also records which memory is tainted: a failed request may have
left it half written.
"""

from __future__ import annotations

import gc
import itertools
import os
import select
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from cudabind import driver
from dispatch.device.block_allocator import Block, BlockAllocator
from dispatch.device.cuda import CudaDevice
from dispatch.device.device import Device
from dispatch.device.dlpack import exported, release_consumed
from dispatch.device.host import HostDevice
from dispatch.device.storage import Storage
from dispatch.device.stream import current, relaxed
from dispatch.errors import BadRequest, Closed, OutOfMemory, TaintedTensor
from dispatch.execute.executor import Executor
from dispatch.supervise.process.chunks import file_chunk, gpu_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Request
    from dispatch.device.async_copy import Copy
    from dispatch.device.layout import Array
    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor
    from dispatch.supervise.process.chunks import Chunk

__all__ = ["SharedCuda", "SharedHost", "make_shared_device"]

UNMAP_SECONDS = 1.0  # seconds within which children should unmap freed chunks; a stopped child never does

_generations = itertools.count(1)


class CopyExecutor(Executor):
    """The executor of a thread of the parent: only a stream for copies. Requests run in the child."""

    def plan(self, request: Request) -> NoReturn:
        self.check()
        hint = "call sup.submit(request), or create the tensors on dispatch.device()"
        raise BadRequest("request", f"tensors of {self.device!r}", "tensors of a device of this process", hint)

    run = plan

    @property
    def target(self) -> NoReturn:
        """The stream that a library's handle would need."""
        hint = "use dispatch.device() for it, and copy the result"
        raise BadRequest("device", repr(self.device), "a device of this process", hint)


class _SharedMemory(Device):
    """The base class of SharedHost and SharedCuda: chunks, blocks, and marks on tainted memory."""

    def _init_memory(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self._numbers = itertools.count()
        self.allocator = BlockAllocator(self._grow)
        # Called when `chunks` has changed. A descriptor passed to it is kept open until no child maps dropped chunks.
        self.on_chunks_changed: Callable[[int | None], None] | None = None
        self.taints = 0
        self._local = threading.local()
        self._finalizer = weakref.finalize(self, _close_all, self.chunks)
        self._finalizer.atexit = False  # at exit the system frees the memory; the driver may have ended by then
        self._marks: weakref.WeakKeyDictionary[Storage, list[tuple[int, int, str]]] = weakref.WeakKeyDictionary()

    def after_fork(self) -> None:
        """In a forked child: existing memory stays shared with the parent; start a new allocator for new memory.

        The parent goes on allocating its blocks, and its children map only chunks that it announces.
        """
        super().after_fork()
        self.allocator = BlockAllocator(self._grow)
        self.on_chunks_changed = None

    def _make_chunk(self, nbytes: int) -> Chunk:
        raise NotImplementedError

    def _grow(self, nbytes: int) -> tuple[int, int]:
        chunk = self._make_chunk(nbytes)
        number = next(self._numbers)
        self.chunks[number] = chunk
        try:
            self.check()  # after the line above: a thread that closes the device sees the chunk, or this call raises
            if self.on_chunks_changed is not None:
                self.on_chunks_changed(None)
        except BaseException:
            self.chunks.pop(number, None)
            chunk.close()
            raise
        return number, chunk.nbytes

    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        if exported:
            release_consumed()
        allocator = self.allocator
        block = self._take(allocator, nbytes)
        chunk = self.chunks.get(block.chunk)
        mapping = None if chunk is None else chunk.mapping
        if chunk is None or mapping is None:
            allocator.give(block)
            self.check()
            raise Closed(f"{self.name} was closed during an allocation")
        # The storage keeps the mapping, and every view the storage: views stay valid after the device was closed.
        return Storage(self, chunk.base + block.offset, nbytes, stream, partial(_give_back, allocator, mapping), block)

    def _take(self, allocator: BlockAllocator, nbytes: int) -> Block:
        try:
            return allocator.take(nbytes)
        except OutOfMemory:
            gc.collect()  # tensors in reference cycles hold memory, too
            release_consumed(everything=True)
        try:
            return allocator.take(nbytes, growth=0)
        except OutOfMemory:
            self.trim()  # no empty chunk is large enough; freeing the empty ones may make room for a larger one
        return allocator.take(nbytes, growth=0)

    def trim(self) -> None:
        """Return chunks without tensors to the system, once the children have unmapped them."""
        gc.collect()  # tensors in reference cycles hold memory, too
        release_consumed(everything=True)
        held = list(self.chunks)
        self.allocator.empty_chunks()
        # Read after `held`: a chunk that is missing here was removed, just now or by an interrupted call.
        used = self.allocator.chunks()
        unused = {number: self.chunks.pop(number) for number in held if number not in used and number in self.chunks}
        try:
            if unused and self.on_chunks_changed is not None:
                _call_and_wait(self.on_chunks_changed)
        finally:
            _close_all(unused)

    def bytes_in_use(self) -> int | None:
        release_consumed(everything=True)
        return self.allocator.bytes_in_use()

    def executor(self, stream: Stream | None = None) -> Any:
        """The calling thread's executor; unlike those of other devices it does not outlive the device."""
        present = current.executor
        if stream is None and present is not None and present.stream.device is self:
            present.stream.check()
            return present
        executor = getattr(self._local, "executor", None)
        if executor is None or executor.stream.closed or (stream is not None and executor.stream is not stream):
            self.check()
            executor = CopyExecutor(stream or self.stream())
            self._local.executor = executor
        return executor

    # -- tainted memory -------------------------------------------------------------------------------------------
    def taint(self, tensor: Tensor, why: str) -> None:
        """Mark memory that a failed request may have left half written."""
        low, high = _span(tensor)
        if low < high:
            self._marks.setdefault(tensor.storage, []).append((low, high, why))
            self.taints = len(self._marks)

    def overwritten(self, tensor: Tensor) -> None:
        """Remove the marks of memory that was overwritten; only for dense tensors, because gaps were not written."""
        marks = self._marks.get(tensor.storage)
        if not marks or tensor.nbytes < tensor.layout.high - tensor.layout.low:
            return
        low, high = _span(tensor)
        remaining = []
        for start, end, why in marks:
            pieces = ((start, min(end, low), why), (max(start, high), end, why))
            remaining += [piece for piece in pieces if piece[0] < piece[1]]
        if remaining:
            self._marks[tensor.storage] = remaining
        else:
            del self._marks[tensor.storage]
        self.taints = len(self._marks)

    def taint_error(self, tensor: Tensor) -> TaintedTensor | None:
        """The error for reading a tensor that overlaps tainted memory; None if it does not."""
        low, high = _span(tensor)
        for start, end, why in self._marks.get(tensor.storage, ()):
            if start < high and low < end:
                return TaintedTensor(f"{tensor.layout} may be half written: {why}. Overwrite it: x.copy_from(array)")
        return None

    def refusal(self, request: Request) -> TaintedTensor | None:
        """The error for running a request that reads tainted memory; None if it does not."""
        read = (tensor for _, tensor, is_written in request.tensors() if not is_written)
        return next(filter(None, map(self.taint_error, read)), None)

    def look(self, tensor: Tensor) -> None:
        """Raise TaintedTensor for a tensor that must not be read."""
        error = self.taint_error(tensor) if self.taints else None
        if error is not None:
            raise error


def _call_and_wait(give: Callable[[int | None], None]) -> None:
    """Call `give` with a file descriptor, and wait until all processes that got it have closed it."""
    try:
        read_end, write_end = os.pipe()
    except OSError:  # out of descriptors: do not wait; freeing chunks may free some
        give(None)
        return
    try:
        give(write_end)
    finally:
        os.close(write_end)
        end = select.poll()
        end.register(read_end, 0)  # a hang-up, when the last writing end is closed, is always reported
        end.poll(UNMAP_SECONDS * 1000)
        os.close(read_end)


def _close_all(chunks: dict[int, Chunk]) -> None:
    while chunks:
        chunks.popitem()[1].close()


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.ptr - tensor.storage.base
    return start + tensor.layout.low, start + tensor.layout.high


def _give_back(allocator: BlockAllocator, mapping: object, storage: Storage) -> None:
    block: Block = storage.keep
    device: Any = storage.device
    if storage.lent and device.alive and device.fault is None:  # another library's stream may still use it
        storage.keep = _Lease(allocator, mapping, block)
        device.releases.free(storage)
    else:
        allocator.give(block)


class _Lease:
    """Owns a block and its mapping; returns the block to the allocator when it dies."""

    __slots__ = ("allocator", "block", "mapping")

    def __init__(self, allocator: BlockAllocator, mapping: object, block: Block) -> None:
        self.allocator, self.mapping, self.block = allocator, mapping, block

    def __del__(self) -> None:
        self.allocator.give(self.block)


class SharedHost(_SharedMemory, HostDevice):
    """The host as a device whose memory a child maps."""

    def __init__(self) -> None:
        HostDevice.__init__(self, next(_generations))
        self._init_memory()

    def _make_chunk(self, nbytes: int) -> Chunk:
        return file_chunk(nbytes)

    def view(self, tensor: Tensor) -> Array:
        self.look(tensor)
        return super().view(tensor)

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        self.check_written(tensor, array)
        self.overwritten(tensor)
        super().copy_in(tensor, array)

    def clear(self, ptr: int, nbytes: int, tensor: Tensor) -> None:
        self.overwritten(tensor)
        super().clear(ptr, nbytes, tensor)

    def copy_out(self, tensor: Tensor) -> Array:
        self.look(tensor)
        return super().copy_out(tensor)

    def close(self) -> None:
        super().close()
        self._finalizer()

    def __repr__(self) -> str:
        return f"<{self.name}, shared memory {self.generation}{'' if self.alive else ', closed'}>"


class SharedCuda(_SharedMemory, CudaDevice):
    """A GPU as a device whose memory a child maps; the parent copies on streams of its own, and waits for each copy."""

    def __init__(self, ordinal: int) -> None:
        CudaDevice.__init__(self, ordinal, next(_generations))
        self._init_memory()
        self._props = _properties(ordinal)
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(driver.cuMemGetAllocationGranularity(self._props, minimum))

    def _make_chunk(self, nbytes: int) -> Chunk:
        nbytes = -(-nbytes // self._granularity) * self._granularity
        try:
            return gpu_chunk(nbytes, self._props, self.ordinal, self.context)
        except OutOfMemory as error:
            raise OutOfMemory(f"{self.name} ({self.model}): {error}; {self.memory()}") from error.__cause__

    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        if self.releases.pending:
            with relaxed():
                self.releases.collect()
        if self.releases.stuck > self._most_stuck and not self._is_captured():
            self.synchronize()
        return super().allocate(nbytes, stream)

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        self.check_written(tensor, array)
        self.overwritten(tensor)
        super().copy_in(tensor, array)
        self.executor().stream.synchronize()  # the child's streams cannot wait for this one

    def copy_in_async(self, tensor: Tensor, array: Array) -> Copy:
        self.check_written(tensor)
        self.overwritten(tensor)
        return super().copy_in_async(tensor, array)

    def clear(self, ptr: int, nbytes: int, tensor: Tensor) -> None:
        self.overwritten(tensor)
        super().clear(ptr, nbytes, tensor)
        self.executor().stream.synchronize()

    def copy_out(self, tensor: Tensor) -> Array:
        self.look(tensor)
        return super().copy_out(tensor)

    def trim(self) -> None:
        with self.context:
            CudaDevice.trim(self)  # first: it frees blocks that other libraries have released
            _SharedMemory.trim(self)

    def close(self) -> None:
        super().close()
        self._finalizer()

    def __repr__(self) -> str:
        return f"<{self.name} ({self.arch}), shared memory {self.generation}{'' if self.alive else ', closed'}>"


def _properties(ordinal: int) -> Any:
    props = driver.CUmemAllocationProp()
    props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = ordinal
    return props


def make_shared_device(name: str) -> SharedHost | SharedCuda:
    """The parent's device for "host" or "cuda:N"."""
    return SharedHost() if name == "host" else SharedCuda(int(name.partition(":")[2] or 0))
