"""The cuDNN handle of an executor, with the workspace that plans share, and what cuDNN says of its last error."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from cudabind.sys import cudnn
from dispatch.libraries.handle import StreamHandle

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


class Handle(StreamHandle):
    """A `cudnnHandle_t` on the stream of one executor."""

    __slots__ = ("_between", "_scratch")

    name: ClassVar[str] = "cudnn"
    kind = cudnn.cudnnHandle_t

    def __init__(self, executor: CudaExecutor) -> None:
        self._scratch: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        self._between: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        super().__init__(executor)

    @staticmethod
    def create(c_handle: cudnn.cudnnHandle_t) -> None:
        cudnn.cudnnCreate(c_handle)

    @staticmethod
    def destroy(c_handle: cudnn.cudnnHandle_t) -> int:
        status: int = cudnn.cudnnDestroy.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: cudnn.cudnnHandle_t, stream: int | None) -> None:
        cudnn.cudnnSetStream(c_handle, cudnn.cudaStream_t(stream))

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


handle_of = Handle.of


def last_error() -> str:
    """What cuDNN says of the last call that failed in this thread, in one line; "" where it says nothing."""
    text = ctypes.create_string_buffer(MESSAGE_BYTES)
    cudnn.cudnnGetLastErrorString(text, MESSAGE_BYTES)
    return " ".join(text.value.decode(errors="replace").split())
