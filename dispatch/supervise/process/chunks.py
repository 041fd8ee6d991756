"""Chunks: large pieces of memory that several processes map by a file descriptor.

On the host a chunk is an anonymous memory file, on a GPU physical memory; both are freed when the last process that
holds them ends. `shared_device.py` creates them in the parent, `child_device.py` maps them in a child.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.errors import CudaError
from dispatch.device.stream import relaxed
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Chunk", "FileMapping", "GpuMapping", "file_chunk", "gpu_chunk"]

# Errors of the system if address space, memory, or the descriptors of this process or of all processes are exhausted,
# or if a size is too large for a file.
EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EFBIG, errno.EAGAIN)
LARGEST = 2**63 - 1  # bytes of a file
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class FileMapping:
    """A memory file mapped at `base` in this process, as long as this object lives.

    Python's own mmap would keep a second descriptor for each; a process may have 1,024 by default.
    """

    __slots__ = ("base", "nbytes")

    def __init__(self, nbytes: int, fd: int) -> None:
        self.base = 0
        base = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if base == MAP_FAILED:
            raise _os_error("mmap")
        self.base, self.nbytes = base, nbytes

    def __del__(self) -> None:
        if self.base and not sys.is_finalizing():  # at exit the system unmaps everything
            _libc.munmap(self.base, self.nbytes)


class GpuMapping:
    """Physical memory of a GPU mapped at `base`, as long as this object lives; `handle` may be released at once."""

    __slots__ = ("_process", "base", "nbytes")

    def __init__(self, nbytes: int, handle: Any, ordinal: int) -> None:
        self.base = 0
        self.nbytes, self._process = nbytes, os.getpid()
        with ExitStack() as undo:
            base = int(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
            undo.callback(driver.cuMemAddressFree.unchecked, ctypes.c_uint64(base), ctypes.c_size_t(nbytes))
            driver.cuMemMap(base, nbytes, 0, handle, 0)
            undo.callback(driver.cuMemUnmap.unchecked, ctypes.c_uint64(base), ctypes.c_size_t(nbytes))
            driver.cuMemSetAccess(base, nbytes, [_access(ordinal)], 1)
            undo.pop_all()
        self.base = base

    def __del__(self) -> None:
        # After os.fork() the memory belongs to the parent, and the driver takes no calls here.
        if not self.base or sys.is_finalizing() or os.getpid() != self._process:
            return
        base, nbytes = ctypes.c_uint64(self.base), ctypes.c_size_t(self.nbytes)
        with relaxed():  # a thread that captures a graph may be the one that drops the last tensor
            driver.cuMemUnmap.unchecked(base, nbytes)
            driver.cuMemAddressFree.unchecked(base, nbytes)


class Chunk:
    """A large piece of memory: its address in this process, and the descriptor by which other processes map it.

    Guarantees: the memory stays mapped as long as anything refers to `mapping`. So every view keeps that, and nothing
    else needs to know about views.
    """

    __slots__ = ("base", "fd", "mapping", "nbytes")

    def __init__(self, mapping: FileMapping | GpuMapping, fd: int) -> None:
        self.mapping: FileMapping | GpuMapping | None = mapping
        self.base, self.nbytes, self.fd = mapping.base, mapping.nbytes, fd

    def close(self) -> None:
        """Drop the mapping and close the descriptor; a second call does nothing."""
        self.mapping = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def file_chunk(nbytes: int) -> Chunk:
    """A new chunk of host memory; OutOfMemory if memory, descriptors or address space are exhausted."""
    try:
        if nbytes > LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        fd = os.memfd_create("dispatch", os.MFD_CLOEXEC)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            os.ftruncate(fd, nbytes)
            chunk = Chunk(FileMapping(nbytes, fd), fd)
            undo.pop_all()
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        text = f"the host cannot allocate {nbytes / 2**20:,.0f} MiB of memory that processes can share: {error}"
        raise OutOfMemory(text + _HINTS.get(error.errno or 0, "")) from error
    return chunk


_HINTS = {
    errno.EMFILE: "; each such block needs a file descriptor: raise the limit (ulimit -n)",
    errno.ENFILE: "; each such block needs a file descriptor, and the system has no more",
}


def gpu_chunk(nbytes: int, props: Any, ordinal: int, context: AbstractContextManager[None]) -> Chunk:
    """A new chunk of a GPU's memory; OutOfMemory if the GPU has not enough, or no descriptor is free."""
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    with ExitStack() as undo, context:
        try:
            handle = driver.cuMemCreate(nbytes, props, 0)
        except CudaError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(f"less than {nbytes / 2**20:,.0f} MiB of memory are free") from error
        with ExitStack() as handles:
            handles.callback(driver.cuMemRelease, handle)  # a mapping and a descriptor hold the memory themselves
            fd = _export_fd(handle, kind)
            undo.callback(os.close, fd)
            chunk = Chunk(GpuMapping(nbytes, handle, ordinal), fd)
        undo.pop_all()
    return chunk


def _export_fd(handle: Any, kind: Any) -> int:
    try:
        return int(driver.cuMemExportToShareableHandle(handle, kind, 0))
    except CudaError as error:
        try:
            os.close(os.dup(0))
        except OSError as cause:
            if cause.errno not in EXHAUSTED:
                raise error from None
            raise OutOfMemory(f"no file descriptor is free for more memory: {cause}{_HINTS[errno.EMFILE]}") from error
        raise


def _os_error(function: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function}: {os.strerror(number)}")


def _access(ordinal: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
