"""Devices of a child: the parent's memory, mapped at addresses of this process.

`child_main.py` makes one, and attaches the chunks that the parent announces. Memory that a request needs besides its
operands comes from the child's own pools, and is freed with the child.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.device.cuda import CudaDevice
from dispatch.device.device import Device
from dispatch.device.host import HostDevice
from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor
from dispatch.keys import Dtype
from dispatch.supervise.process.chunks import Chunk, FileMapping, GpuMapping

if TYPE_CHECKING:
    from dispatch.supervise.process.messages import TensorLocation

__all__ = ["AttachedCuda", "AttachedHost", "make_attached_device"]

_generations = itertools.count(1)


class _Attached(Device):
    """The base class of AttachedHost and AttachedCuda: the parent's chunks, mapped in this process."""

    def _init_chunks(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        # By block. Requests keep the storages that they use alive; an unused storage needs no ordering of streams.
        self._storages: weakref.WeakValueDictionary[tuple[int, int], Storage] = weakref.WeakValueDictionary()

    def attach(self, number: int, nbytes: int, fd: int) -> None:
        """Map a chunk of the parent, and close its descriptor."""
        try:
            self.chunks[number] = Chunk(self._map(nbytes, fd), -1)
        finally:
            os.close(fd)

    def detach(self, number: int) -> None:
        """Unmap a chunk that the parent frees; no present or future request uses it.

        Requests that are still defined here do not keep it mapped, although their storages exist; views of it do.
        """
        chunk = self.chunks.pop(number)
        for each in self._storages.valuerefs():
            storage = each()
            if storage is not None and each.key[0] == number:
                storage.keep = None
        chunk.close()

    def _map(self, nbytes: int, fd: int) -> FileMapping | GpuMapping:
        raise NotImplementedError

    def tensor_at(
        self, location: TensorLocation, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], readonly: bool
    ) -> Tensor:
        """The tensor at a location of the shared memory."""
        storage = self.block(location[0], location[1], location[2])
        ptr = storage.base + location[3]
        return Tensor(storage, ptr, self.layout(Dtype.by_name[dtype], shape, strides, ptr, readonly))

    def block(self, chunk: int, offset: int, nbytes: int) -> Storage:
        """The storage of a block, the same for all tensors in it, which orders the streams that use it."""
        storage = self._storages.get((chunk, offset))
        if storage is None:
            mapped = self.chunks[chunk]
            base = mapped.base + offset
            storage = Storage(self, base, nbytes, self.executor().stream, _free_nothing, mapped.mapping)
            self._storages[chunk, offset] = storage
        elif storage.nbytes < nbytes:  # the parent has freed and reused a block that a request here still has
            storage.nbytes = nbytes
        return storage


def _free_nothing(storage: Storage) -> None:
    """Nothing to free: the memory is the parent's."""


class AttachedHost(_Attached, HostDevice):
    """The host in a child, with the parent's memory."""

    def __init__(self) -> None:
        HostDevice.__init__(self, next(_generations))
        self._init_chunks()

    def _map(self, nbytes: int, fd: int) -> FileMapping:
        return FileMapping(nbytes, fd)


class AttachedCuda(_Attached, CudaDevice):
    """A GPU in a child, with the parent's memory; workspaces and similar memory come from the child's own pool."""

    def __init__(self, ordinal: int) -> None:
        CudaDevice.__init__(self, ordinal, next(_generations))
        self._init_chunks()

    def _map(self, nbytes: int, fd: int) -> GpuMapping:
        self.activate()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = driver.cuMemImportFromShareableHandle(fd, kind)
        try:
            return GpuMapping(nbytes, handle, self.ordinal)
        finally:
            driver.cuMemRelease(handle)  # the mapping holds the memory


def make_attached_device(name: str) -> AttachedHost | AttachedCuda:
    """The child's device for "host" or "cuda:N"."""
    return AttachedHost() if name == "host" else AttachedCuda(int(name.partition(":")[2] or 0))
