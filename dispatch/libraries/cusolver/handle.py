"""The cuSOLVER handle of an executor: one for each, there from its first cuSOLVER plan on, shared by its plans.

Plans ask `handle_of(executor)` for it and call `follow()` before they enqueue. Handles never cross threads, as
executors do not. This module runs no operation.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cudabind._fork import anew
from cudabind.errors import CudaError
from cudabind.sys import cusolverDn as dn
from dispatch.device.stream import QuietStream, relaxed
from dispatch.errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "Settings", "handle_of"]

NAME = "cusolverDn"


class Settings:
    """Choices of a routine in host memory, destroyed with this object: `cusolverDnParams_t`, or those of Jacobi's."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, kind: str, create: str, destroy: str) -> None:
        last: Any = getattr(dn, destroy)
        self._destroy: Callable[[Any], int] = last.unchecked
        self.handle: Any = getattr(dn, kind)()
        getattr(dn, create)(ctypes.byref(self.handle))

    def set(self, function: str, value: float) -> None:
        """Make a choice, by the library's function for it."""
        getattr(dn, function)(self.handle, value)

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle and not sys.is_finalizing():
            self._destroy(handle)


class Handle:
    """A `cusolverDnHandle_t` on the stream of one executor, and the choices of the 64-bit interface: none are made.

    Guarantees: given back exactly once, as its executor is closed or goes, and then another executor's, behind the work
    of the first. It is destroyed with its device: to destroy one waits for the whole context. Where the device is lost
    nothing is destroyed: there is no context left to do it in.
    """

    __slots__ = ("_device", "_last", "_memory", "_stream", "_target", "c_handle", "params")

    def __init__(self, executor: CudaExecutor) -> None:
        self.c_handle = dn.cusolverDnHandle_t()
        self._device, self._target = executor.device, executor.target
        self._memory: weakref.WeakValueDictionary[tuple[str, int], Storage] = weakref.WeakValueDictionary()
        self._stream: int | None = -1  # none that exists
        self._last = executor.stream.stream if isinstance(executor.stream, QuietStream) else executor.stream
        self.params = Settings("cusolverDnParams_t", "cusolverDnCreateParams", "cusolverDnDestroyParams")
        try:
            self.c_handle, _ = executor.device.idle[NAME].pop()
        except IndexError:
            with executor.device.context, relaxed():
                dn.cusolverDnCreate(self.c_handle)
        else:
            executor.stream.wait_for_uses(executor.device.releases.side)
        self.follow()

    def follow(self) -> dn.cusolverDnHandle_t:
        """The handle, on the stream that the executor's plans enqueue on now: its own, or a recorder's."""
        stream = self._target.value
        if stream != self._stream:
            dn.cusolverDnSetStream(self.c_handle, dn.cudaStream_t(stream))
            self._stream = stream
        return self.c_handle

    def memory(self, executor: CudaExecutor, purpose: str, nbytes: int) -> Storage | None:
        """So many bytes for a purpose, shared by the executor's plans, which run one after the other; None for none.

        Each power of 2 is allocated once, and there as long as a plan keeps it.
        """
        if not nbytes:
            return None
        size = 1 << (nbytes - 1).bit_length()
        storage = self._memory.get((purpose, size))
        if storage is None:
            storage = self._memory[purpose, size] = executor.device.allocate(size, executor.stream)
        return storage

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        if self.c_handle.value and self._device.fault is None:
            with suppress(CudaError, DispatchError):  # of a stream under capture, whose work is not run as yet
                self._device.releases.side.wait_for_uses(self._last)
            self._device.idle[NAME].append((self.c_handle, dn.cusolverDnDestroy.unchecked))
        self.c_handle = dn.cusolverDnHandle_t()

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._device.alive:
            self.close()


_handles: weakref.WeakKeyDictionary[CudaExecutor, Handle] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # finalizers may come in between
anew(sys.modules[__name__], "_lock", threading.RLock)


def handle_of(executor: CudaExecutor) -> Handle:
    """The one handle of an executor that is open; only the executor's own thread may ask."""
    executor.check()
    with _lock:
        found = _handles.get(executor)
    if found is None:
        found = Handle(executor)
        executor.at_close.append(found.close)
        with _lock:
            _handles[executor] = found
    return found
