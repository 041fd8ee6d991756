"""Chunks: large pieces of memory that several processes map, by a file descriptor of theirs.

On the host a chunk is a memory file without a name, on a GPU physical memory: both are gone when the last process that
holds them is. `memory.py` makes them in the parent, `attached.py` maps them in a child.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any

from cudabind import driver

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Chunk", "mapped_file", "mapped_gpu"]


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


def mapped_file(nbytes: int, fd: int) -> Chunk:
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


def mapped_gpu(nbytes: int, fd: int, handle: Any, ordinal: int) -> Chunk:
    """Map physical memory of a GPU into this process's addresses."""
    base = int(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
    driver.cuMemMap(base, nbytes, 0, handle, 0)
    driver.cuMemSetAccess(base, nbytes, [_access(ordinal)], 1)

    def undo() -> None:
        driver.cuMemUnmap(base, nbytes)
        driver.cuMemAddressFree(base, nbytes)
        driver.cuMemRelease(handle)

    return Chunk(base, nbytes, fd, undo)
