"""Copy: an asynchronous copy between a tensor and the host.

`Tensor.copy_from_async` and `Tensor.numpy_async` return one. It holds the event recorded after the copy, and the memory
that must live until then; host_copies.py enqueues the copy.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.device.failed_collectives import check_not_failed
from dispatch.device.stream import NOT_READY, relaxed

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Generator

    from dispatch.device.device import Device

__all__ = ["Copy"]

SHORTEST, LONGEST = 20e-6, 1e-3  # seconds between polls while waiting with a timeout


class Copy:
    """An asynchronous copy between a tensor and the host; `result()` waits and returns the target of the copy.

    Until then the host must not write to the source or the target, nor read the target. Work that is enqueued on the
    device meanwhile is ordered after the copy. It may be awaited in asyncio. Dropping the object does not end the copy.
    """

    __slots__ = ("_device", "_ending", "_event", "_finish", "_keep", "_result")

    def __init__(
        self,
        device: Device | None,
        event: ctypes.c_void_p | None,
        result: Any,
        keep: Any = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._device, self._event = device, event  # None if the copy is already done
        self._result, self._keep, self._finish = result, keep, finish
        self._ending = threading.RLock()  # several threads may wait; a signal handler may run inside it

    def done(self) -> bool:
        """Whether the copy has ended; raises the error that the stream ended in."""
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
        """Wait and return the array or tensor that was copied to; TimeoutError after `timeout` seconds."""
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
            check_not_failed(self._device)
        return self._result

    def _wait(self, timeout: float) -> None:
        begun = time.monotonic()
        while not self.done():
            waited = time.monotonic() - begun
            if waited >= timeout:
                raise TimeoutError(f"the copy has not completed after {timeout:g} s; it continues")
            time.sleep(min(max(waited / 4, SHORTEST), LONGEST))

    def _end(self) -> None:
        with self._ending:
            if self._finish is not None:
                self._finish()  # before the event is cleared: a thread that finds none reads the target at once
            event, self._event = self._event, None
            if event is not None and self._device is not None:
                self._device.recycle(event)
            self._keep = self._finish = None

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in asyncio, on a thread of the event loop's default pool."""
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
