"""Devices whose memory outlives a process: the parent makes it, children map it.

The supervisor owns a SharedHost or SharedCuda and gives it to users as `sup.device`; a child has the same chunks
attached (`attached.py`). The parent only copies; it runs no kernel. What may be half written is marked here, too.
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
from cudabind.errors import CudaError
from dispatch.cuda import OUT_OF_MEMORY, CudaDevice
from dispatch.device import Device, HostDevice
from dispatch.errors import BadRequest, OutOfMemory, TaintedTensor
from dispatch.isolate.arena import Arena, Block
from dispatch.isolate.chunks import mapped_file, mapped_gpu
from dispatch.lane import Lane
from dispatch.stream import current
from dispatch.tensor import Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.isolate.chunks import Chunk
    from dispatch.pinned import Copy
    from dispatch.request import Request
    from dispatch.stream import Stream
    from dispatch.tensor import Array, Tensor

__all__ = ["SharedCuda", "SharedHost", "shared"]

LET_GO_SECONDS = 1.0  # that the children have to unmap what the parent gives back; one that is stopped never does

_generations = itertools.count(1)


class CopyLane(Lane):
    """What a thread of the parent holds: a stream to copy on. Requests run in the child."""

    def plan(self, request: Request) -> NoReturn:
        self.check()
        hint = "sup.submit(request), or make the tensors on dispatch.device()"
        raise BadRequest("request", f"tensors of {self.device!r}", "those of a device that runs in this process", hint)

    run = plan


class _Memory(Device):
    """What is common to SharedHost and SharedCuda: chunks, blocks, and the marks on what may be half written."""

    def _begin(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self._numbers = itertools.count()
        self.arena = Arena(self._grow)
        # Called with a file descriptor, its users are to hold that until no child maps what is no longer in `chunks`.
        self.on_chunks: Callable[[int | None], None] | None = None
        self.taints = 0
        self._local = threading.local()
        self._dropped = weakref.finalize(self, _close_all, self.chunks)
        self._dropped.atexit = False  # the process takes its memory with it; the driver may be gone by then
        self._marks: weakref.WeakKeyDictionary[Storage, list[tuple[int, int, str]]] = weakref.WeakKeyDictionary()

    def _make_chunk(self, nbytes: int) -> Chunk:
        raise NotImplementedError

    def _grow(self, nbytes: int) -> tuple[int, int]:
        chunk = self._make_chunk(nbytes)
        number = next(self._numbers)
        self.chunks[number] = chunk
        if self.on_chunks is not None:
            self.on_chunks(None)
        return number, chunk.nbytes

    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        block = self._take(nbytes)
        base = self.chunks[block.chunk].base + block.offset
        return Storage(self, base, nbytes, stream, partial(_give_back, self.arena), block)

    def _take(self, nbytes: int) -> Block:
        try:
            return self.arena.take(nbytes)
        except OutOfMemory:
            gc.collect()  # tensors in cycles hold memory, too
        try:
            return self.arena.take(nbytes, growth=0)
        except OutOfMemory:
            self.trim()  # none of the empty chunks is large enough, but their memory may do for one that is
        return self.arena.take(nbytes, growth=0)

    def trim(self) -> None:
        """Give the chunks that no tensor lies in back to the system, as soon as the children have let go of them."""
        gc.collect()  # tensors in cycles hold memory, too
        gone = [self.chunks.pop(number) for number in self.arena.empty_chunks()]
        if gone and self.on_chunks is not None:
            _until_closed(self.on_chunks)
        for chunk in gone:
            chunk.close()

    def bytes_in_use(self) -> int | None:
        return self.arena.bytes_in_use()

    def lane(self, stream: Stream | None = None) -> Any:
        """The calling thread's lane, which dies with the device; others outlive theirs only with the thread."""
        here = current.lane
        if stream is None and here is not None and here.stream.device is self:
            return here
        lane = getattr(self._local, "lane", None)
        if lane is None or (stream is not None and lane.stream is not stream):
            self.check()
            lane = CopyLane(stream or self.stream())
            self._local.lane = lane
        return lane

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


def _until_closed(give: Callable[[int], None]) -> None:
    """Have a file descriptor given to others, and wait until all of them have closed it."""
    ours, theirs = os.pipe()
    try:
        give(theirs)
    finally:
        os.close(theirs)
        end = select.poll()
        end.register(ours, 0)  # the end of a pipe that nobody can write to any more is told unasked
        end.poll(LET_GO_SECONDS * 1000)
        os.close(ours)


def _close_all(chunks: dict[int, Chunk]) -> None:
    for chunk in chunks.values():
        chunk.close()
    chunks.clear()


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.ptr - tensor.storage.base
    return start + tensor.layout.low, start + tensor.layout.high


def _give_back(arena: Arena, storage: Storage) -> None:
    block: Block = storage.keep
    arena.give(block)


class SharedHost(_Memory, HostDevice):
    """The host as a device whose memory a child maps."""

    def __init__(self) -> None:
        HostDevice.__init__(self, next(_generations))
        self._begin()

    def _make_chunk(self, nbytes: int) -> Chunk:
        fd = os.memfd_create("dispatch", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return mapped_file(nbytes, fd)

    def view(self, tensor: Tensor) -> Array:
        self.look(tensor)
        return super().view(tensor)

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        self.overwritten(tensor)
        super().copy_in(tensor, array)

    def fill_zero(self, tensor: Tensor) -> None:
        self.overwritten(tensor)
        super().fill_zero(tensor)

    def copy_out(self, tensor: Tensor) -> Array:
        self.look(tensor)
        return super().copy_out(tensor)

    def close(self) -> None:
        was_alive = self.alive
        super().close()
        if was_alive:
            self._dropped()

    def __repr__(self) -> str:
        return f"<{self.name}, shared memory {self.generation}{'' if self.alive else ', closed'}>"


class SharedCuda(_Memory, CudaDevice):
    """A GPU as a device whose memory a child maps; the parent copies on streams of its own, and waits for each copy."""

    def __init__(self, ordinal: int) -> None:
        CudaDevice.__init__(self, ordinal, next(_generations))
        self._begin()
        self._props = _properties(ordinal)
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(driver.cuMemGetAllocationGranularity(self._props, minimum))

    def _make_chunk(self, nbytes: int) -> Chunk:
        nbytes = -(-nbytes // self._granularity) * self._granularity
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self.here:
            try:
                handle = driver.cuMemCreate(nbytes, self._props, 0)
            except CudaError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                raise OutOfMemory(f"{self.name} ({self.model}) is out of memory; {self.memory()}") from error
            fd = int(driver.cuMemExportToShareableHandle(handle, kind, 0))
            return mapped_gpu(nbytes, fd, handle, self.ordinal)

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        self.overwritten(tensor)
        super().copy_in(tensor, array)
        self.lane().stream.synchronize()  # the child's streams know nothing of this one

    def copy_in_async(self, tensor: Tensor, array: Array) -> Copy:
        self.overwritten(tensor)
        return super().copy_in_async(tensor, array)

    def fill_zero(self, tensor: Tensor) -> None:
        self.overwritten(tensor)
        super().fill_zero(tensor)
        self.lane().stream.synchronize()

    def copy_out(self, tensor: Tensor) -> Array:
        self.look(tensor)
        return super().copy_out(tensor)

    def trim(self) -> None:
        with self.here:
            _Memory.trim(self)
            CudaDevice.trim(self)

    def close(self) -> None:
        if self.alive and self.fault is None:
            with self.here:
                self._dropped()
        super().close()

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
