"""The cuDNN handle of an executor: one for each, there from its first cuDNN plan on, shared by its plans, given back
after.

Plans ask `handle_of(executor)` for it and call `follow()` before they enqueue. Handles never cross threads,
as executors do not. This module runs no operation.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from cudabind._fork import anew
from cudabind.errors import CudaError
from cudabind.sys import cudnn
from dispatch.device.stream import QuietStream, relaxed
from dispatch.errors import DispatchError

if TYPE_CHECKING:
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.workspace import Workspace

__all__ = ["Handle", "Scratch", "handle_of", "last_error"]

MESSAGE_BYTES = 4096


class Scratch(NamedTuple):
    """Workspace: where it begins, and what keeps it there."""

    c_ptr: ctypes.c_void_p
    keep: Storage | Workspace


class Handle:
    """A `cudnnHandle_t` on the stream of one executor.

    Guarantees: given back exactly once, as its executor is closed or goes, and then another executor's, behind the work
    of the first. It is destroyed with its device: to destroy one that was used waits for the whole context, which ends
    captures of others. Where the device is lost nothing is destroyed: there is no context left to do it in.
    """

    __slots__ = ("_between", "_device", "_last", "_scratch", "_stream", "_target", "c_handle")

    def __init__(self, executor: CudaExecutor) -> None:
        self.c_handle = cudnn.cudnnHandle_t()
        self._device = executor.device
        self._target = executor.target
        self._scratch: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        self._between: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        self._stream: int | None = -1  # none that exists
        self._last = executor.stream.stream if isinstance(executor.stream, QuietStream) else executor.stream
        try:
            self.c_handle, _ = executor.device.idle["cudnn"].pop()
        except IndexError:
            with executor.device.context, relaxed():
                cudnn.cudnnCreate(self.c_handle)
        else:
            executor.stream.wait_for_uses(executor.device.releases.side)
        self.follow()

    def follow(self) -> cudnn.cudnnHandle_t:
        """The handle, on the stream that the executor's plans enqueue on now: its own, or a recorder's."""
        stream = self._target.value
        if stream != self._stream:
            cudnn.cudnnSetStream(self.c_handle, cudnn.cudaStream_t(stream))
            self._stream = stream
        return self.c_handle

    def scratch(self, executor: CudaExecutor, nbytes: int) -> Scratch:
        """So many bytes of workspace, shared by the executor's plans, which run one after the other.

        Small ones are the executor's own; each larger power of 2 is allocated once and there as long as a plan keeps
        it. (A recurrent network wants 16 MiB for each direction, however small it is: 33.5 MiB for two in cuDNN 9.19.)
        """
        if nbytes <= executor.workspace.nbytes:
            return Scratch(executor.workspace.c_ptr, executor.workspace)
        return self._shared(self._scratch, executor, nbytes)

    def between(self, executor: CudaExecutor, nbytes: int) -> Scratch:
        """So many bytes for what one graph of a plan leaves to the next, shared likewise; no graph's workspace."""
        return self._shared(self._between, executor, max(nbytes, 1))

    @staticmethod
    def _shared(known: weakref.WeakValueDictionary[int, Storage], executor: CudaExecutor, nbytes: int) -> Scratch:
        size = 1 << (nbytes - 1).bit_length()
        storage = known.get(size)
        if storage is None:
            storage = known[size] = executor.device.allocate(size, executor.stream)
        return Scratch(ctypes.c_void_p(storage.base), storage)

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        if self.c_handle.value and self._device.fault is None:
            with suppress(CudaError, DispatchError):  # of a stream under capture, whose work is not run as yet
                self._device.releases.side.wait_for_uses(self._last)
            self._device.idle["cudnn"].append((self.c_handle, cudnn.cudnnDestroy.unchecked))
        self.c_handle = cudnn.cudnnHandle_t()

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


def last_error() -> str:
    """What cuDNN says of the last call that failed in this thread, in one line; "" where it says nothing."""
    text = ctypes.create_string_buffer(MESSAGE_BYTES)
    cudnn.cudnnGetLastErrorString(text, MESSAGE_BYTES)
    return " ".join(text.value.decode(errors="replace").split())
