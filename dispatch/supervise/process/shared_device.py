"""Devices whose memory outlives a process: the parent makes it, children map it.

The supervisor owns a SharedHost or SharedCuda and gives it to users as `sup.device`; a child has the same chunks
attached (`child_device.py`). The parent only copies; it runs no kernel. What may be half written is marked here, too.
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
from dispatch.device.dlpack import lent, take_back
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

__all__ = ["SharedCuda", "SharedHost", "shared"]

LET_GO_SECONDS = 1.0  # that the children have to unmap what the parent gives back; one that is stopped never does

_generations = itertools.count(1)


class CopyExecutor(Executor):
    """What a thread of the parent holds: a stream to copy on. Requests run in the child."""

    def plan(self, request: Request) -> NoReturn:
        self.check()
        hint = "sup.submit(request), or make the tensors on dispatch.device()"
        raise BadRequest("request", f"tensors of {self.device!r}", "those of a device that runs in this process", hint)

    run = plan


class _SharedMemory(Device):
    """What is common to SharedHost and SharedCuda: chunks, blocks, and the marks on what may be half written."""

    def _begin(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self._numbers = itertools.count()
        self.allocator = BlockAllocator(self._grow)
        # Called with a file descriptor, its users are to hold that until no child maps what is no longer in `chunks`.
        self.on_chunks: Callable[[int | None], None] | None = None
        self.taints = 0
        self._local = threading.local()
        self._dropped = weakref.finalize(self, _close_all, self.chunks)
        self._dropped.atexit = False  # the process takes its memory with it; the driver may be gone by then
        self._marks: weakref.WeakKeyDictionary[Storage, list[tuple[int, int, str]]] = weakref.WeakKeyDictionary()

    def after_fork(self) -> None:
        """In a forked child: what was there is shared with the parent, as files are; what is made here is not.

        The parent goes on to hand out its blocks, and its children map only what it tells them of.
        """
        super().after_fork()
        self.allocator = BlockAllocator(self._grow)
        self.on_chunks = None

    def _make_chunk(self, nbytes: int) -> Chunk:
        raise NotImplementedError

    def _grow(self, nbytes: int) -> tuple[int, int]:
        chunk = self._make_chunk(nbytes)
        number = next(self._numbers)
        self.chunks[number] = chunk
        try:
            self.check()  # behind the line above: who closes the device meanwhile sees the chunk, or is seen here
            if self.on_chunks is not None:
                self.on_chunks(None)
        except BaseException:
            self.chunks.pop(number, None)
            chunk.close()
            raise
        return number, chunk.nbytes

    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        if lent:
            take_back()
        allocator = self.allocator
        block = self._take(allocator, nbytes)
        chunk = self.chunks.get(block.chunk)
        mapping = None if chunk is None else chunk.mapping
        if chunk is None or mapping is None:
            allocator.give(block)
            self.check()
            raise Closed(f"{self.name} was closed while memory was asked of it")
        # The storage holds the mapping, and every view the storage: a view outlives the device, and its memory with it.
        return Storage(self, chunk.base + block.offset, nbytes, stream, partial(_give_back, allocator, mapping), block)

    def _take(self, allocator: BlockAllocator, nbytes: int) -> Block:
        try:
            return allocator.take(nbytes)
        except OutOfMemory:
            gc.collect()  # tensors in cycles hold memory, too
            take_back(everything=True)
        try:
            return allocator.take(nbytes, growth=0)
        except OutOfMemory:
            self.trim()  # none of the empty chunks is large enough, but their memory may do for one that is
        return allocator.take(nbytes, growth=0)

    def trim(self) -> None:
        """Give the chunks that no tensor lies in back to the system, as soon as the children have let go of them."""
        gc.collect()  # tensors in cycles hold memory, too
        take_back(everything=True)
        held = list(self.chunks)
        self.allocator.empty_chunks()
        # Asked for behind `held`: what is missing here was forgotten, now or by one cut short.
        used = self.allocator.chunks()
        gone = {number: self.chunks.pop(number) for number in held if number not in used and number in self.chunks}
        try:
            if gone and self.on_chunks is not None:
                _until_closed(self.on_chunks)
        finally:
            _close_all(gone)

    def bytes_in_use(self) -> int | None:
        take_back(everything=True)
        return self.allocator.bytes_in_use()

    def executor(self, stream: Stream | None = None) -> Any:
        """The calling thread's executor, which dies with the device; others outlive theirs only with the thread."""
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

    # -- what may be half written ---------------------------------------------------------------------------------
    def taint(self, tensor: Tensor, why: str) -> None:
        """Mark what a failed request may have half written."""
        low, high = _span(tensor)
        if low < high:
            self._marks.setdefault(tensor.storage, []).append((low, high, why))
            self.taints = len(self._marks)

    def overwritten(self, tensor: Tensor) -> None:
        """Take the marks off what was written anew, where the tensor is dense: of another, what lies between is not."""
        marks = self._marks.get(tensor.storage)
        if not marks or tensor.nbytes < tensor.layout.high - tensor.layout.low:
            return
        low, high = _span(tensor)
        left = []
        for start, end, why in marks:
            pieces = ((start, min(end, low), why), (max(start, high), end, why))
            left += [piece for piece in pieces if piece[0] < piece[1]]
        if left:
            self._marks[tensor.storage] = left
        else:
            del self._marks[tensor.storage]
        self.taints = len(self._marks)

    def tainted(self, tensor: Tensor) -> TaintedTensor | None:
        """The error for reading a tensor that may be half written."""
        low, high = _span(tensor)
        for start, end, why in self._marks.get(tensor.storage, ()):
            if start < high and low < end:
                return TaintedTensor(f"{tensor.layout} may be half written: {why}. Overwrite it: x.copy_from(array)")
        return None

    def refusal(self, request: Request) -> TaintedTensor | None:
        """The error for running a request that reads what may be half written."""
        read = (tensor for _, tensor, is_written in request.tensors() if not is_written)
        return next(filter(None, map(self.tainted, read)), None)

    def look(self, tensor: Tensor) -> None:
        """Raise for a tensor that must not be read."""
        error = self.tainted(tensor) if self.taints else None
        if error is not None:
            raise error


def _until_closed(give: Callable[[int | None], None]) -> None:
    """Have a file descriptor given to others, and wait until all of them have closed it."""
    try:
        ours, theirs = os.pipe()
    except OSError:  # there are no descriptors left to wait by; what is given back here may free some
        give(None)
        return
    try:
        give(theirs)
    finally:
        os.close(theirs)
        end = select.poll()
        end.register(ours, 0)  # the end of a pipe that nobody can write to any more is told unasked
        end.poll(LET_GO_SECONDS * 1000)
        os.close(ours)


def _close_all(chunks: dict[int, Chunk]) -> None:
    while chunks:
        chunks.popitem()[1].close()


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.ptr - tensor.storage.base
    return start + tensor.layout.low, start + tensor.layout.high


def _give_back(allocator: BlockAllocator, mapping: object, storage: Storage) -> None:
    block: Block = storage.keep
    device: Any = storage.device
    if storage.lent and device.alive and device.fault is None:  # a consumer's stream may still read it, or write
        storage.keep = _Lease(allocator, mapping, block)
        device.releases.free(storage)
    else:
        allocator.give(block)


class _Lease:
    """A block that is given back once nothing holds this, with the mapping that it lies in."""

    __slots__ = ("allocator", "block", "mapping")

    def __init__(self, allocator: BlockAllocator, mapping: object, block: Block) -> None:
        self.allocator, self.mapping, self.block = allocator, mapping, block

    def __del__(self) -> None:
        self.allocator.give(self.block)


class SharedHost(_SharedMemory, HostDevice):
    """The host as a device whose memory a child maps."""

    def __init__(self) -> None:
        HostDevice.__init__(self, next(_generations))
        self._begin()

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
        self._dropped()

    def __repr__(self) -> str:
        return f"<{self.name}, shared memory {self.generation}{'' if self.alive else ', closed'}>"


class SharedCuda(_SharedMemory, CudaDevice):
    """A GPU as a device whose memory a child maps; the parent copies on streams of its own, and waits for each copy."""

    def __init__(self, ordinal: int) -> None:
        CudaDevice.__init__(self, ordinal, next(_generations))
        self._begin()
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
        self.executor().stream.synchronize()  # the child's streams know nothing of this one

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
            CudaDevice.trim(self)  # first, for what consumers are done with goes back to its chunks by that
            _SharedMemory.trim(self)

    def close(self) -> None:
        super().close()
        self._dropped()

    def __repr__(self) -> str:
        return f"<{self.name} ({self.arch}), shared memory {self.generation}{'' if self.alive else ', closed'}>"


def _properties(ordinal: int) -> Any:
    props = driver.CUmemAllocationProp()
    props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = ordinal
    return props


def shared(name: str) -> SharedHost | SharedCuda:
    """A device of the parent's for "host" or "cuda:N"."""
    return SharedHost() if name == "host" else SharedCuda(int(name.partition(":")[2] or 0))
