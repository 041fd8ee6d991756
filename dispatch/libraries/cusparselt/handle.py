"""The cuSPARSELt handle of an executor, with the memory that its plans share where the workspace is too small.

A handle is a struct of the caller's, has no stream, and is of one device: each call is told its stream.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparseLt as lt
from dispatch.execute.installed import installed

if TYPE_CHECKING:
    from dispatch.device.cuda import CudaDevice
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "handle_of", "stamp_of"]

NAME = "cusparseLt"


class Handle:
    """A `cusparseLtHandle_t` of one executor; `c_stream` is where the executor's plans enqueue, once it is followed."""

    __slots__ = ("_memory", "_target", "c", "c_stream")  # an executor that only copies has no target, and no plans

    def __init__(self, executor: CudaExecutor, c_handle: Any) -> None:
        self._memory: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        target: Any = getattr(executor, "target", None)
        self._target, self.c = target, c_handle
        self.c_stream: Any = lt.cudaStream_t()

    def follow(self) -> Any:
        """The struct; `c_stream` is the stream that the executor's plans enqueue on now."""
        self.c_stream.value = self._target.value
        return self.c

    def memory(self, executor: CudaExecutor, nbytes: int) -> tuple[Storage | None, int]:
        """So many bytes to work in and their address, which plans that run one after the other share.

        Beyond the executor's workspace each power of 2 is allocated once, and there as long as a plan keeps it.
        """
        workspace = executor.workspace
        if nbytes <= workspace.nbytes:
            return None, int(workspace.c_ptr.value or 0)
        size = 1 << (nbytes - 1).bit_length()
        storage = self._memory.get(size)
        if storage is None:
            storage = self._memory[size] = executor.device.allocate(size, executor.stream)
        return storage, storage.base


def handle_of(executor: CudaExecutor) -> Handle:
    """The one handle of an executor; once that is closed, another executor's of its device."""
    found: Handle | None = executor.handles.get(NAME)
    if found is None:
        try:
            c_handle, _ = executor.device.idle[NAME].pop()
        except IndexError:
            c_handle = lt.cusparseLtHandle_t()
            with executor.device.context:
                lt.cusparseLtInit(c_handle)
        found = executor.handles[NAME] = Handle(executor, c_handle)
        executor.at_close.append(partial(_give_back, executor.device, c_handle))  # which keeps no executor alive
    return found


def _give_back(device: CudaDevice, c_handle: Any) -> None:
    if device.fault is None:
        device.idle[NAME].append((c_handle, lt.cusparseLtDestroy.unchecked))


def stamp_of(executor: CudaExecutor) -> str:
    """What lays out the matrices that an executor compresses: the library, its version, and the architecture."""
    # Asked of what is installed: an executor that only copies, as before a process of its own, knows no versions.
    version = ".".join(map(str, installed[NAME]))
    return f"{NAME} {version} {executor.device.arch}"
