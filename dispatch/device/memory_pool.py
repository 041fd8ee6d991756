"""A stream-ordered memory pool of this library's own, one for each GPU.

It keeps freed memory, whereas the driver's default pool returns it at every synchronization. cuda.py allocates from it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.device.stream import relaxed

if TYPE_CHECKING:
    from dispatch.device.stream import Stream

__all__ = ["MemoryPool"]


class MemoryPool:
    """A `CUmemoryPool` on one GPU; `c_handle` is the handle for ctypes calls."""

    __slots__ = ("c_handle",)

    def __init__(self, ordinal: int) -> None:
        props = driver.CUmemPoolProps()
        props.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = ordinal
        with relaxed():
            pool = driver.cuMemPoolCreate(props)
            threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(2**64 - 1))
        self.c_handle = ctypes.c_void_p(int(pool))

    @property
    def handle(self) -> int:
        """The `CUmemoryPool` as an integer."""
        return self.c_handle.value or 0

    def take(self, ptr: ctypes.c_uint64, size: ctypes.c_size_t, stream: Stream) -> int:
        """Allocate `size` bytes on a stream and write their address to `ptr`; returns the driver's status."""
        status: int = driver.cuMemAllocFromPoolAsync.unchecked(ctypes.byref(ptr), size, self.c_handle, stream.c_handle)
        return status

    def bytes_in_use(self) -> int | None:
        """The bytes allocated from it; None after a fault, which is reported to callers that wait for results."""
        used = ctypes.c_uint64()
        kind = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        status = driver.cuMemPoolGetAttribute.unchecked(self.c_handle, int(kind), ctypes.byref(used))
        return None if status else used.value

    def trim(self) -> None:
        """Return free memory to the system."""
        driver.cuMemPoolTrimTo(self.handle, 0)

    def destroy(self) -> None:
        """Destroy the pool and all its memory, including what is allocated."""
        driver.cuMemPoolDestroy(self.handle)
