"""Page-locked host memory; copies between it and a GPU run at full speed and asynchronously.

`Device.pinned` returns NumPy arrays over it, from a pool; pageable memory is copied through such an array.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.device.block_allocator import BlockAllocator
from dispatch.device.stream import relaxed
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from dispatch.device.block_allocator import Block
    from dispatch.device.device import Device
    from dispatch.device.layout import Array

__all__ = ["PinnedPool"]

PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts


class _Page:
    """One allocation of page-locked memory; it lives as long as the pool, or an array in it, refers to it."""

    __slots__ = ("base", "nbytes")

    def __init__(self, device: Device, nbytes: int) -> None:
        self.base, self.nbytes = 0, nbytes
        where = ctypes.c_void_p()
        with device.context, relaxed():
            status = driver.cuMemHostAlloc.unchecked(ctypes.byref(where), ctypes.c_size_t(nbytes), PORTABLE)
        if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
            raise OutOfMemory(f"the host cannot lock {nbytes / 2**20:,.0f} MiB of memory for {device}")
        if status:
            device.fail(status, "cuMemHostAlloc")
        self.base = where.value or 0

    def __del__(self) -> None:
        if self.base and not sys.is_finalizing():
            with relaxed():  # the call waits for copies; after a fault it fails
                driver.cuMemFreeHost.unchecked(ctypes.c_void_p(self.base))


class _Lease:
    """Owns the block of an array, and keeps its pool and page alive; gives the block back when it dies."""

    __slots__ = ("block", "page", "pool")

    def __init__(self, pool: PinnedPool, page: _Page, block: Block) -> None:
        self.pool, self.page, self.block = pool, page, block

    def __del__(self) -> None:
        self.pool.allocator.give(self.block)


class PinnedPool:
    """The page-locked memory of one device; memory given back is reused, and freed by `trim`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._numbers = itertools.count()
        self._pages: dict[int, _Page] = {}
        self.allocator = BlockAllocator(self._grow)

    def _grow(self, nbytes: int) -> tuple[int, int]:
        number = next(self._numbers)
        self._pages[number] = _Page(self._device, nbytes)
        return number, nbytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialized C-order array; its memory returns to the pool when the last view of it dies."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        block = self.allocator.take(nbytes)
        page = self._pages[block.chunk]
        window = (ctypes.c_uint8 * nbytes).from_address(page.base + block.offset)
        window.lease = _Lease(self, page, block)  # type: ignore[attr-defined]  # a ctypes array takes attributes
        array: Array = np.ndarray(shape, dtype, memoryview(window))
        return array

    def holds(self, address: int) -> bool:
        """Whether an address is in this memory, so that copies from and to it do not wait."""
        return any(page.base <= address < page.base + page.nbytes for page in list(self._pages.values()))

    @property
    def in_use(self) -> bool:
        """Whether there are arrays in this memory."""
        self.trim()
        return bool(self._pages)

    def trim(self) -> None:
        """Free the pages that no array uses."""
        for number in self.allocator.empty_chunks():
            del self._pages[number]
