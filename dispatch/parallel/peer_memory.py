"""Memory of a rank's GPU that ranks in other processes of the machine can access.

Follows the CUDA driver's documentation of interprocess communication.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.device.stream import relaxed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Allocation", "ImportedMemory", "IpcHandle"]

LAZY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
MAX_SPARE_BYTES = 2 << 30  # bytes that are kept for reuse

_spare: list[_Spare] = []
_spare_lock = threading.Lock()


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Allocation:
    """Memory of a rank of this process.

    The driver frees memory only when the whole GPU is idle, and until then no thread can launch in this context. So
    when this object dies, memory that all other ranks have finished using is kept for the next communicator. A separate
    thread frees other memory, such as that of a failed communicator or of a graph.

    Attributes:
        used_flags: the flags that the other ranks set when they have finished; None until the memory shall be kept.
    """

    def __init__(self, device: Any, nbytes: int) -> None:
        self.device, self.address, self.nbytes = device, 0, nbytes
        self.used_flags: NDArray[np.uint32] | None = None
        with _spare_lock:  # several ranks may be threads of this process
            fitting = [each for each in _spare if each.device is device and nbytes <= each.nbytes <= 4 * nbytes]
            spare = min(fitting, key=lambda each: each.nbytes, default=None)
            if spare is not None:
                _spare.remove(spare)
        if spare is not None:
            self.address, self.nbytes = spare.address, spare.nbytes
        else:
            with device.context, relaxed():
                self.address = int(driver.cuMemAlloc(nbytes))

    def __del__(self) -> None:
        if not self.address or not self.device.alive or sys.is_finalizing():
            return
        spare = _Spare(self.device, self.address, self.nbytes)
        # After all work of this rank's streams, so the flags are those of its last block.
        is_spare = self.used_flags is not None and bool(self.used_flags.all())
        if is_spare and self.nbytes + sum(each.nbytes for each in _spare) <= MAX_SPARE_BYTES:
            _spare.append(spare)
        else:
            threading.Thread(target=spare.free, name="peers free", daemon=True).start()


class _Spare(NamedTuple):
    device: Any
    address: int
    nbytes: int

    def free(self) -> None:
        with self.device.context, relaxed():
            driver.cuMemFree.unchecked(ctypes.c_uint64(self.address))


class ImportedMemory:
    """Memory of another process, mapped into this one."""

    def __init__(self, device: Any, handle: bytes) -> None:
        self._device, self.address = device, 0
        address, c_handle = ctypes.c_uint64(), IpcHandle.from_buffer_copy(handle)
        with device.context, relaxed():
            status = driver.cuIpcOpenMemHandle.unchecked(ctypes.byref(address), c_handle, ctypes.c_uint(LAZY))
        if status:
            raise driver.error("cuIpcOpenMemHandle", status)
        self.address = address.value

    def __del__(self) -> None:
        if self.address and self._device.alive and not sys.is_finalizing():
            with self._device.context, relaxed():
                driver.cuIpcCloseMemHandle.unchecked(ctypes.c_uint64(self.address))
