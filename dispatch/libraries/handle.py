"""A library's handle for an executor: created for its first plan, shared by its plans, and reused by later executors.

cuDNN and cuSOLVER enqueue on the stream that is set in a handle. A plan gets the handle by `handle_of(executor)`, and
calls `follow()` before it enqueues. Like an executor, a handle is used by one thread at a time.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind.errors import CudaError
from dispatch.device.stream import QuietStream, relaxed
from dispatch.errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from dispatch.device.cuda import CudaDevice
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["StreamHandle", "lent"]


class StreamHandle(ABC):
    """A handle on the stream of one executor.

    Guarantees: when its executor is closed or collected, the handle is returned to the device exactly once; the next
    executor that uses it waits for the work of the first. Handles are destroyed with their device, because destroying
    a used handle waits for the whole context, which would end the captures of other threads. On a lost device nothing
    is destroyed, because its context is gone.
    """

    __slots__ = ("_device", "_last", "_stream", "_target", "c_handle")

    name: ClassVar[str]  # of the library
    kind: ClassVar[Any]  # the ctypes type of the handle

    def __init__(self, executor: CudaExecutor) -> None:
        self.c_handle = self.kind()
        self._device, self._target = executor.device, executor.target
        self._stream: int | None = -1  # the stream that is set in the handle; none yet
        self._last = executor.stream.stream if isinstance(executor.stream, QuietStream) else executor.stream
        try:
            self.c_handle, _ = executor.device.idle[self.name].pop()
        except IndexError:
            with executor.device.context, relaxed():
                self.make(executor)
        else:
            executor.stream.wait_for_uses(executor.device.releases.side)
        self.follow()

    def make(self, executor: CudaExecutor) -> None:
        """Create the handle in the executor's context; raises the library's error."""
        self.create(self.c_handle)

    @staticmethod
    @abstractmethod
    def create(c_handle: Any) -> None:
        """Call the library's function that creates a handle; raises its error."""

    @staticmethod
    @abstractmethod
    def destroy(c_handle: Any) -> int:
        """Call the library's function that destroys a handle; returns its status."""

    @staticmethod
    @abstractmethod
    def set_stream(c_handle: Any, stream: int | None) -> None:
        """Set the stream that the library enqueues on; raises its error."""

    @classmethod
    def of(cls, executor: CudaExecutor) -> Self:
        """The handle of an open executor; only the executor's own thread may call this."""
        executor.check()
        found: Self | None = executor.handles.get(cls.name)
        if found is None:
            found = executor.handles[cls.name] = cls(executor)
            executor.at_close.append(found.close)
        return found

    def follow(self) -> Any:
        """The handle, set to the stream that plans enqueue on now: the executor's own, or a recorder's."""
        stream = self._target.value
        if stream != self._stream:
            self.set_stream(self.c_handle, stream)
            self._stream = stream
        return self.c_handle

    def close(self) -> None:
        """Return the handle to the device; a second call does nothing."""
        if self.c_handle.value and self._device.fault is None:
            with suppress(CudaError, DispatchError):  # a stream under capture, whose work has not run yet
                self._device.releases.side.wait_for_uses(self._last)
            self._device.idle[self.name].append((self.c_handle, self.destroy))
        self.c_handle = self.kind()

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._device.alive:
            self.close()


def lent(executor: CudaExecutor, name: str, make: Callable[[], Any], destroy: Callable[[Any], int]) -> Any:
    """A handle that a closed executor has returned, or a new one; this executor returns it when it is closed.

    Handles are destroyed with the device, because destroying one ends all captures.
    """
    try:
        c_handle, _ = executor.device.idle[name].pop()
    except IndexError:
        with executor.device.context:
            c_handle = make()
    # The arguments do not keep the executor alive.
    executor.at_close.append(partial(_give_back, executor.device, name, c_handle, destroy))
    return c_handle


def _give_back(device: CudaDevice, name: str, c_handle: Any, destroy: Callable[[Any], int]) -> None:
    if device.fault is None:
        device.idle[name].append((c_handle, destroy))
