"""A library's handle of an executor: there from its first plan on, shared by its plans, given back after.

cuDNN's and cuSOLVER's are on the stream of the executor. A plan asks `handle_of(executor)` for it and calls `follow()`
before it enqueues. Handles never cross threads, as executors do not. This module runs no operation.
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

    Guarantees: given back exactly once, as its executor is closed or goes, and then another executor's, behind the work
    of the first. It is destroyed with its device: to destroy one that was used waits for the whole context, which ends
    captures of others. Where the device is lost nothing is destroyed: there is no context left to do it in.
    """

    __slots__ = ("_device", "_last", "_stream", "_target", "c_handle")

    name: ClassVar[str]  # of the library
    kind: ClassVar[Any]  # the handle's type in ctypes

    def __init__(self, executor: CudaExecutor) -> None:
        self.c_handle = self.kind()
        self._device, self._target = executor.device, executor.target
        self._stream: int | None = -1  # none that exists
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
        """Create the handle, in the executor's context; the library's error."""
        self.create(self.c_handle)

    @staticmethod
    @abstractmethod
    def create(c_handle: Any) -> None:
        """Make what the handle stands for; the library's error."""

    @staticmethod
    @abstractmethod
    def destroy(c_handle: Any) -> int:
        """Its end, with the library's status."""

    @staticmethod
    @abstractmethod
    def set_stream(c_handle: Any, stream: int | None) -> None:
        """Have it enqueue there; the library's error."""

    @classmethod
    def of(cls, executor: CudaExecutor) -> Self:
        """The one handle of an executor that is open; only the executor's own thread may ask."""
        executor.check()
        found: Self | None = executor.handles.get(cls.name)
        if found is None:
            found = executor.handles[cls.name] = cls(executor)
            executor.at_close.append(found.close)
        return found

    def follow(self) -> Any:
        """The handle, on the stream that the executor's plans enqueue on now: its own, or a recorder's."""
        stream = self._target.value
        if stream != self._stream:
            self.set_stream(self.c_handle, stream)
            self._stream = stream
        return self.c_handle

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        if self.c_handle.value and self._device.fault is None:
            with suppress(CudaError, DispatchError):  # of a stream under capture, whose work is not run as yet
                self._device.releases.side.wait_for_uses(self._last)
            self._device.idle[self.name].append((self.c_handle, self.destroy))
        self.c_handle = self.kind()

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._device.alive:
            self.close()


def lent(executor: CudaExecutor, name: str, make: Callable[[], Any], destroy: Callable[[Any], int]) -> Any:
    """A handle that an executor has left, or else a new one, until this executor is closed: then another has it.

    To destroy one ends all captures, so that goes with the device.
    """
    try:
        c_handle, _ = executor.device.idle[name].pop()
    except IndexError:
        with executor.device.context:
            c_handle = make()
    # Which keeps no executor alive.
    executor.at_close.append(partial(_give_back, executor.device, name, c_handle, destroy))
    return c_handle


def _give_back(device: CudaDevice, name: str, c_handle: Any, destroy: Callable[[Any], int]) -> None:
    if device.fault is None:
        device.idle[name].append((c_handle, destroy))
