"""Words in the host's memory by which streams of several GPUs, and of several processes of one machine, wait.

Words in a GPU's memory are written by the driver alone, and while a thread of the process waits within it, for a copy
to pageable memory say, the driver lets nobody else in: with two H200 a rank whose partner had been killed waited for
good, and the thread that was to set its words with it. The host's own memory any thread writes, as NCCL's kernels are
ended by a flag there. Follows the CUDA driver's documentation of cuMemHostRegister and of stream memory operations.
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

__all__ = ["TOKEN_BYTES", "WORD", "HostWords"]

FOR_ALL_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP
WORD = 4  # bytes
TOKEN_BYTES = 16  # which stand behind the words, and tell a file from another of the same number


class HostWords:
    """A file of words without a name, mapped here and into what GPUs reach: 0 but where somebody has set them.

    Attributes:
        array: the words, u32.
        address: where the GPUs have them.
        pid, fd: where another process of this user finds the file, as long as this is there.
        token: what no other file has.
    """

    def __init__(self, device: CudaDevice, count: int) -> None:
        fd = os.memfd_create("dispatch words", os.MFD_CLOEXEC)
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
        self._tail = memoryview(mapping)[count * WORD : count * WORD + TOKEN_BYTES]
        self._host = self.array.ctypes.data
        with device.context, relaxed():
            driver.cuMemHostRegister(self._host, len(mapping), FOR_ALL_MAPPED)
            self.address = int(driver.cuMemHostGetDevicePointer(self._host, 0))

    @classmethod
    def of_another(cls, device: CudaDevice, pid: int, fd: int, count: int, token: bytes) -> HostWords:
        """Those of another process; OSError where its file cannot be had, as across containers."""
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_size != _nbytes(count) or os.pread(own, TOKEN_BYTES, count * WORD) != token:
                raise FileNotFoundError(f"process {pid} has another file of number {fd}")
            words = cls.__new__(cls)
            words._map(device, own, count)
            words.token = token
        except BaseException:
            os.close(own)
            raise
        return words

    def __del__(self) -> None:
        if not getattr(self, "address", 0) or sys.is_finalizing() or self.pid != os.getpid():
            return
        # The driver unmaps nothing before the GPU is idle, and holds up whoever calls it meanwhile: not this thread.
        left = (self._device, self._host, self.fd, self._mapping, self.array)
        threading.Thread(target=_let_go, args=left, name="words free", daemon=True).start()


def _nbytes(count: int) -> int:
    return -(-(count * WORD + TOKEN_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _let_go(device: Any, host: int, fd: int, *_mapped: Any) -> None:
    """What was mapped goes as the thread ends, behind the driver's part."""
    if device.alive:
        with device.context, relaxed():
            driver.cuMemHostUnregister.unchecked(ctypes.c_void_p(host))
    os.close(fd)
