"""Page-locked host memory, which a GPU copies from and to at full speed and while the host does something else.

`Device.pinned` gives NumPy arrays over it, from a pool; `Tensor.copy_from_async` and `Tensor.numpy_async` give Copies.
Pageable memory goes through a staging array of the pool. This module knows events and addresses, not streams' order.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.device.block_allocator import BlockAllocator
from dispatch.device.stream import NOT_READY, relaxed
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from dispatch.device.block_allocator import Block
    from dispatch.device.cuda import CudaDevice
    from dispatch.device.tensor import Array

__all__ = ["Copy", "PinnedPool"]

PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds between looks at a copy that is waited for with a timeout


class _Page:
    """One allocation of page-locked memory; it lives as long as the pool or an array in it."""

    __slots__ = ("base", "nbytes")

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.base, self.nbytes = 0, nbytes
        where = ctypes.c_void_p()
        with device.here, relaxed():
            status = driver.cuMemHostAlloc.unchecked(ctypes.byref(where), ctypes.c_size_t(nbytes), PORTABLE)
        if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
            raise OutOfMemory(f"the host has not {nbytes / 2**20:,.0f} MiB of memory that can be locked for {device}")
        if status:
            device.fail(status, "cuMemHostAlloc")
        self.base = where.value or 0

    def __del__(self) -> None:
        if self.base and not sys.is_finalizing():
            with relaxed():  # it waits for copies; after a fault it fails
                driver.cuMemFreeHost.unchecked(ctypes.c_void_p(self.base))


class _Lease:
    """An array's hold on its block; `pool` and `page` are kept with it."""

    __slots__ = ("block", "page", "pool")

    def __init__(self, pool: PinnedPool, page: _Page, block: Block) -> None:
        self.pool, self.page, self.block = pool, page, block

    def __del__(self) -> None:
        self.pool.arena.give(self.block)


class PinnedPool:
    """The page-locked memory of one device; what is given back is used again, and freed by `trim`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._numbers = itertools.count()
        self._pages: dict[int, _Page] = {}
        self.arena = BlockAllocator(self._grow)

    def _grow(self, nbytes: int) -> tuple[int, int]:
        number = next(self._numbers)
        self._pages[number] = _Page(self._device, nbytes)
        return number, nbytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialized C-order array; its memory goes back to the pool with the last view of it."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        block = self.arena.take(nbytes)
        page = self._pages[block.chunk]
        window = (ctypes.c_uint8 * nbytes).from_address(page.base + block.offset)
        window.lease = _Lease(self, page, block)  # type: ignore[attr-defined]  # a ctypes array takes attributes
        array: Array = np.ndarray(shape, dtype, memoryview(window))
        return array

    def holds(self, address: int) -> bool:
        """Whether an address lies in this memory, so that copies from and to it do not wait."""
        return any(page.base <= address < page.base + page.nbytes for page in list(self._pages.values()))

    @property
    def in_use(self) -> bool:
        """Whether there are arrays in this memory."""
        self.trim()
        return bool(self._pages)

    def trim(self) -> None:
        """Free what no array is in."""
        for number in self.arena.empty_chunks():
            del self._pages[number]


class Copy:
    """A copy between a tensor and the host that is under way; `result()` waits for it and gives what was copied to.

    Until then neither side may be written, and what is copied to may not be read by the host. Work that is enqueued on
    the device meanwhile is ordered behind it. It may be awaited in asyncio. Dropping it does not end the copy.
    """

    __slots__ = ("_device", "_ending", "_event", "_finish", "_keep", "_result")

    def __init__(
        self,
        device: CudaDevice | None,
        event: ctypes.c_void_p | None,
        result: Any,
        keep: Any = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._device, self._event = device, event  # none where it is done
        self._result, self._keep, self._finish = result, keep, finish
        self._ending = threading.RLock()  # several threads may wait; a signal's handler may come in between

    def done(self) -> bool:
        """Whether it has ended; raises what the stream ended in."""
        event = self._event
        if event is None or self._device is None:
            return True
        with relaxed():
            status = driver.cuEventQuery.unchecked_holding_gil(event)
        if status == NOT_READY:
            return False
        if status:
            self._device.fail(status, "cuEventQuery")
        self._end()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the array or tensor that was copied to; TimeoutError after `timeout` seconds."""
        event = self._event
        if event is not None and self._device is not None:
            if timeout is None:
                with relaxed():
                    status = driver.cuEventSynchronize.unchecked(event)
                if status:
                    self._device.fail(status, "cuEventSynchronize")
                self._end()
            else:
                self._wait(timeout)
        return self._result

    def _wait(self, timeout: float) -> None:
        begun = time.monotonic()
        while not self.done():
            waited = time.monotonic() - begun
            if waited >= timeout:
                raise TimeoutError(f"the copy has not ended after {timeout:g} s; it goes on")
            time.sleep(min(max(waited / 4, SHORTEST), LONGEST))

    def _end(self) -> None:
        with self._ending:
            if self._finish is not None:
                self._finish()  # before the event goes: who finds none reads what was copied to
            event, self._event = self._event, None
            if event is not None and self._device is not None:
                self._device.recycle(event)
            self._keep = self._finish = None

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in asyncio, on a thread of the loop's own pool."""
        import asyncio

        if not self.done():
            yield from asyncio.get_running_loop().run_in_executor(None, self.result).__await__()
        return self._result

    def __del__(self) -> None:
        device = self._device
        if self._event is not None and device is not None and device.alive and not sys.is_finalizing():
            device.keep_until(self._event, (self._keep, self._result))

    def __repr__(self) -> str:
        return f"<Copy {'done' if self._event is None else 'under way'}>"
