"""The workspace of an executor: scratch memory that the calls on its stream share, one after the other.

Its address is fixed for the life of the executor, because captured graphs contain it. Its size is fixed, too, so that
plans can choose an algorithm by it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.stream import Stream

__all__ = ["Workspace", "workspace_bytes"]

MIB = 1 << 20


def workspace_bytes(arch: int) -> int:
    """The size that cuBLASLt's documentation recommends: 32 MiB from Hopper on, 4 MiB before."""
    return 32 * MIB if arch >= 90 else 4 * MIB


class Workspace:
    """Scratch memory of an executor, allocated on its stream."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.nbytes = workspace_bytes(device.arch)
        self._storage = device.allocate(self.nbytes, stream)
        self.c_ptr = ctypes.c_void_p(self._storage.base)
