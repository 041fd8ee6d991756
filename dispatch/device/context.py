"""Context: a device's CUDA context, which a thread makes current by a `with` block.

The driver uses the current context to create objects (streams, events, handles, modules), for copies and for work on
default streams; other calls take the context of their stream, event or pool. cuda.py makes one Context for each GPU.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING
from weakref import proxy

from cudabind import driver
from cudabind.errors import SymbolNotFound
from dispatch.device.stream import relaxed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.device import Device
    from dispatch.device.recordings import Recordings

__all__ = ["Context"]


class Context:
    """`with context:` makes it the current context in the block, then restores the previous one, as torch requires.

    The driver keeps a stack of contexts for each thread, so one object serves all threads, and blocks may be nested.
    `push` and `pop` are the two steps, for callers that must not raise; they return the driver's status.
    """

    __slots__ = ("_device", "handle", "pop", "push")

    def __init__(self, device: Device, gpu: int) -> None:
        self._device = proxy(device)
        self.handle = driver.cuDevicePrimaryCtxRetain(gpu)
        context = ctypes.c_void_p(int(self.handle))
        self.push: Callable[[], int] = partial(driver.cuCtxPushCurrent.unchecked_holding_gil, context)
        self.pop: Callable[[], int] = partial(
            driver.cuCtxPopCurrent.unchecked_holding_gil, ctypes.byref(ctypes.c_void_p())
        )
        if device.is_alone:  # no other context to restore; restoring would take as long again (0.3 us)
            self.push, self.pop = partial(driver.cuCtxSetCurrent.unchecked_holding_gil, context), _nothing

    def __enter__(self) -> None:
        status = self.push()
        if status:
            self._device.fail(status, "cuCtxPushCurrent")

    def __exit__(self, *_: object) -> None:
        self.pop()

    def provide(self) -> None:
        """Make it the thread's current context permanently, if the thread has none or one that was destroyed."""
        if driver.cuCtxGetDevice.unchecked(ctypes.byref(ctypes.c_int())):
            driver.cuCtxSetCurrent(self.handle)

    def wait(self, recordings: Recordings) -> int:
        """Wait by an event for all work of the context, also of other libraries; returns the driver's status.

        Recording that event would end active recordings, so the method first waits until there are none.
        """
        event = self._device.event()
        try:
            with recordings.exclude(), self:
                status = driver.cuCtxRecordEvent.unchecked(ctypes.c_void_p(int(self.handle)), event)
            if not status:
                with relaxed():
                    status = driver.cuEventSynchronize.unchecked(event)
        except SymbolNotFound:  # a driver from before CUDA 12.5
            with recordings.exclude(), self:
                status = driver.cuCtxSynchronize.unchecked()
        finally:
            self._device.recycle(event)
        return int(status)


def _nothing() -> int:
    return 0
