"""Flags in the host's memory on which streams of several GPUs, and of several processes of one machine, wait.

Flags in a GPU's memory can be written only through the driver. While one thread of the process waits inside the driver,
for a copy to pageable memory for example, no other thread can enter it: with two H200, a rank whose partner had been
killed waited for ever, and so did the thread that should have set its flags. Any thread can write host memory; NCCL
also ends its kernels by a flag in host memory. Follows the CUDA driver's documentation of cuMemHostRegister and of
stream memory operations.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.device.stream import relaxed

if TYPE_CHECKING:
    from dispatch.device.cuda import CudaDevice

__all__ = ["FLAG_BYTES", "TOKEN_BYTES", "HostFlags"]

PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP
FLAG_BYTES = 4  # bytes of one flag
TOKEN_BYTES = 16  # at the end of the file, to distinguish it from another file with the same descriptor number


class HostFlags:
    """An anonymous memory file of flags, mapped in this process and for the GPUs; flags are 0 until they are set.

    Attributes:
        array: the flags, u32.
        address: their address for the GPUs.
        pid, fd: the process and descriptor by which this user's other processes open the file, while this object lives.
        token: bytes that no other file has.
    """

    def __init__(self, device: CudaDevice, count: int) -> None:
        fd = os.memfd_create("dispatch flags", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _nbytes(count))
            self._map(device, fd, count)
        except BaseException:
            os.close(fd)
            raise
        self._tail[:] = self.token = secrets.token_bytes(TOKEN_BYTES)

    def _map(self, device: CudaDevice, fd: int, count: int) -> None:
        self.pid, self.fd, self.token, self._device = os.getpid(), fd, b"", device
        self._mapping = mapping = mmap.mmap(fd, _nbytes(count))
        self.array = np.frombuffer(mapping, np.uint32, count)
        self._tail = memoryview(mapping)[count * FLAG_BYTES : count * FLAG_BYTES + TOKEN_BYTES]
        self._host = self.array.ctypes.data
        with device.context, relaxed():
            driver.cuMemHostRegister(self._host, len(mapping), PORTABLE_MAPPED)
            self.address = int(driver.cuMemHostGetDevicePointer(self._host, 0))

    @classmethod
    def open_remote(cls, device: CudaDevice, pid: int, fd: int, count: int, token: bytes) -> HostFlags:
        """The flags of another process; OSError if its file cannot be opened, as across containers."""
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own_fd).st_size != _nbytes(count) or os.pread(own_fd, TOKEN_BYTES, count * FLAG_BYTES) != token:
                raise FileNotFoundError(f"file descriptor {fd} of process {pid} is another file")
            flags = cls.__new__(cls)
            flags._map(device, own_fd, count)
            flags.token = token
        except BaseException:
            os.close(own_fd)
            raise
        return flags

    def __del__(self) -> None:
        if not getattr(self, "address", 0) or sys.is_finalizing() or self.pid != os.getpid():
            return
        # The driver unmaps nothing before the GPU is idle, and blocks the calling thread until then: use another one.
        arguments = (self._device, self._host, self.fd, self._mapping, self.array)
        threading.Thread(target=_unregister, args=arguments, name="flags free", daemon=True).start()


def _nbytes(count: int) -> int:
    return -(-(count * FLAG_BYTES + TOKEN_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _unregister(device: Any, host: int, fd: int, *_mapped: Any) -> None:
    """Unregister the memory; the mapping is dropped when the thread ends, after that."""
    if device.alive:
        with device.context, relaxed():
            driver.cuMemHostUnregister.unchecked(ctypes.c_void_p(host))
    os.close(fd)
