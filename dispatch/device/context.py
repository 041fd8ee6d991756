"""A device's CUDA context, and when it is the current one of a thread.

What is made (streams, events, handles, modules), copied between tensors, or enqueued on a default stream, belongs to
the context that is current; other calls find it by their stream, event or pool. cuda.py makes one Context for each GPU.
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
    """`with context:` has it be the current one, and then again that which was: torch's choice of a GPU is kept there.

    The driver keeps what was, for each thread, so one object serves all threads and may be entered again inside.
    `push` and `pop` are the two steps, for who must not raise or cannot wait; they give the driver's status.
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
        if device.is_alone:  # there is nothing to go back to, which takes as long again (0.3 us)
            self.push, self.pop = partial(driver.cuCtxSetCurrent.unchecked_holding_gil, context), _nothing

    def __enter__(self) -> None:
        status = self.push()
        if status:
            self._device.fail(status, "cuCtxPushCurrent")

    def __exit__(self, *_: object) -> None:
        self.pop()

    def provide(self) -> None:
        """Make it the current one of the calling thread for good, where that has none, or one that is destroyed."""
        if driver.cuCtxGetDevice.unchecked(ctypes.byref(ctypes.c_int())):
            driver.cuCtxSetCurrent(self.handle)

    def wait(self, event: ctypes.c_void_p, recordings: Recordings) -> int:
        """Wait for all its work, by an event. That would end recordings as it begins, so then there must be none."""
        try:
            with recordings.none(), self:
                status = driver.cuCtxRecordEvent.unchecked(ctypes.c_void_p(int(self.handle)), event)
            if not status:
                with relaxed():
                    status = driver.cuEventSynchronize.unchecked(event)
        except SymbolNotFound:  # a driver from before CUDA 12.5
            with recordings.none(), self:
                status = driver.cuCtxSynchronize.unchecked()
        return int(status)


def _nothing() -> int:
    return 0
