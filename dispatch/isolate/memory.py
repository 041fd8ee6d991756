"""Devices whose memory outlives a process: the parent makes it, children map it.

The supervisor owns a SharedHost or SharedCuda and gives it to users as `sup.device`; the child attaches the same chunks
to an AttachedHost or AttachedCuda. On the host a chunk is a memory file without a name, on a GPU physical memory with a
file descriptor: both are gone when the last process that holds them is. The parent only copies; it runs no kernel.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import select
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from cudabind import driver
from cudabind.errors import CudaError
from dispatch.cuda import OUT_OF_MEMORY, CudaDevice
from dispatch.device import Device, HostDevice
from dispatch.errors import BadRequest, OutOfMemory, TaintedTensor
from dispatch.isolate.arena import Arena, Block
from dispatch.keys import Dtype
from dispatch.lane import Lane
from dispatch.stream import current
from dispatch.tensor import Array, Storage, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.isolate.wire import Place
    from dispatch.pinned import Copy
    from dispatch.request import Request
    from dispatch.stream import Stream

__all__ = ["AttachedCuda", "AttachedHost", "Chunk", "Shared", "SharedCuda", "SharedHost", "attached", "shared"]

LET_GO_SECONDS = 1.0  # that the children have to unmap what the parent gives back; one that is stopped never does

_generations = itertools.count(1)


class Chunk:
    """A large piece of memory with a file descriptor; `base` is where this process has it."""

    __slots__ = ("base", "fd", "nbytes", "undo")

    def __init__(self, base: int, nbytes: int, fd: int, undo: Callable[[], object]) -> None:
        self.base, self.nbytes, self.fd, self.undo = base, nbytes, fd, undo

    def close(self) -> None:
        """Let this process's hold on it go."""
        self.undo()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _mapped_file(nbytes: int, fd: int) -> Chunk:
    """Map a memory file; the mapping goes when nothing points into it any more."""
    mapping = mmap.mmap(fd, nbytes)
    window = (ctypes.c_char * nbytes).from_buffer(mapping)
    held = [window, mapping]
    return Chunk(ctypes.addressof(window), nbytes, fd, held.clear)


def _access(ordinal: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _mapped_gpu(nbytes: int, fd: int, handle: Any, ordinal: int) -> Chunk:
    """Map physical memory of a GPU into this process's addresses."""
    base = int(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
    driver.cuMemMap(base, nbytes, 0, handle, 0)
    driver.cuMemSetAccess(base, nbytes, [_access(ordinal)], 1)

    def undo() -> None:
        driver.cuMemUnmap(base, nbytes)
        driver.cuMemAddressFree(base, nbytes)
        driver.cuMemRelease(handle)

    return Chunk(base, nbytes, fd, undo)


class CopyLane(Lane):
    """What a thread of the parent holds: a stream to copy on. Requests run in the child."""

    def plan(self, request: Request) -> NoReturn:
        self.check()
        hint = "sup.submit(request), or make the tensors on dispatch.device()"
        raise BadRequest("request", f"tensors of {self.device!r}", "those of a device that runs in this process", hint)

    run = plan


class Shared(Protocol):
    """What the parent's crew needs of its device: the memory, and a word when there are other chunks than before."""

    chunks: dict[int, Chunk]
    arena: Arena
    on_chunks: Callable[[int | None], None] | None
    taints: int

    def check(self, *tensors: Tensor) -> None: ...


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
        try:
            block = self.arena.take(nbytes)
        except OutOfMemory:
            self.trim()
            block = self.arena.take(nbytes, growth=0)
        base = self.chunks[block.chunk].base + block.offset
        return Storage(self, base, nbytes, stream, partial(_give_back, self.arena), block)

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
        return _mapped_file(nbytes, fd)

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
        self.activate()
        nbytes = -(-nbytes // self._granularity) * self._granularity
        try:
            handle = driver.cuMemCreate(nbytes, self._props, 0)
        except CudaError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(f"{self.name} ({self.model}) is out of memory; {self.memory()}") from error
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        fd = int(driver.cuMemExportToShareableHandle(handle, kind, 0))
        return _mapped_gpu(nbytes, fd, handle, self.ordinal)

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
        self.activate()
        _Memory.trim(self)
        CudaDevice.trim(self)

    def close(self) -> None:
        if self.alive and self.fault is None:
            self.activate()
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


# -- in the child -------------------------------------------------------------------------------------------------
class _Attached(Device):
    """What is common to AttachedHost and AttachedCuda: the parent's chunks at this process's addresses."""

    def _begin(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        # By block. Those that requests here use are kept by them; of the others nothing is left to be ordered.
        self._storages: weakref.WeakValueDictionary[tuple[int, int], Storage] = weakref.WeakValueDictionary()

    def attach(self, number: int, nbytes: int, fd: int) -> None:
        """Map a chunk of the parent's."""
        self.chunks[number] = self._map(nbytes, fd)

    def detach(self, number: int) -> None:
        """Let go of a chunk that the parent gives back: no request that is here, or will come, uses it."""
        self.chunks.pop(number).close()

    def _map(self, nbytes: int, fd: int) -> Chunk:
        raise NotImplementedError

    def at(self, place: Place, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], readonly: bool) -> Tensor:
        """The tensor at a place of the shared memory."""
        storage = self.block(place[0], place[1], place[2])
        ptr = storage.base + place[3]
        return Tensor(storage, ptr, self.layout(Dtype.by_name[dtype], shape, strides, ptr, readonly))

    def block(self, chunk: int, offset: int, nbytes: int) -> Storage:
        """The storage of a block: the same for all tensors in it, so that streams are ordered by their use of it."""
        storage = self._storages.get((chunk, offset))
        if storage is None:
            base = self.chunks[chunk].base + offset
            storage = Storage(self, base, nbytes, self.lane().stream, _keep)
            self._storages[chunk, offset] = storage
        return storage


def _keep(storage: Storage) -> None:
    """The memory is the parent's."""


class AttachedHost(_Attached, HostDevice):
    """The host in a child, with the parent's memory."""

    def __init__(self) -> None:
        HostDevice.__init__(self, next(_generations))
        self._begin()

    def _map(self, nbytes: int, fd: int) -> Chunk:
        return _mapped_file(nbytes, fd)


class AttachedCuda(_Attached, CudaDevice):
    """A GPU in a child, with the parent's memory; workspaces and the like come from a pool of the child's own."""

    def __init__(self, ordinal: int) -> None:
        CudaDevice.__init__(self, ordinal, next(_generations))
        self._begin()

    def _map(self, nbytes: int, fd: int) -> Chunk:
        self.activate()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = driver.cuMemImportFromShareableHandle(fd, kind)
        os.close(fd)  # the handle holds the memory
        return _mapped_gpu(nbytes, -1, handle, self.ordinal)


def shared(name: str) -> SharedHost | SharedCuda:
    """A device of the parent's for "host" or "cuda:N"."""
    return SharedHost() if name == "host" else SharedCuda(int(name.partition(":")[2] or 0))


def attached(name: str) -> AttachedHost | AttachedCuda:
    """A device of the child's for "host" or "cuda:N"."""
    return AttachedHost() if name == "host" else AttachedCuda(int(name.partition(":")[2] or 0))
