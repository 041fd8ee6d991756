"""The cuDNN handle of an executor, the workspace that its plans share, and cuDNN's last error message."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from cudabind.sys import cudnn
from dispatch.execute.shared_memory import of_size
from dispatch.libraries.handle import StreamHandle

if TYPE_CHECKING:
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.workspace import Workspace

__all__ = ["Handle", "Scratch", "handle_of", "last_error"]

MESSAGE_BYTES = 4096


class Scratch(NamedTuple):
    """Workspace: its address, and the object that owns it."""

    c_ptr: ctypes.c_void_p
    keep: Storage | Workspace


class Handle(StreamHandle):
    """A `cudnnHandle_t` on the stream of one executor."""

    __slots__ = ()

    name: ClassVar[str] = "cudnn"
    kind = cudnn.cudnnHandle_t

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
        """Workspace of `nbytes` bytes, shared by the executor's plans, which run one after the other.

        Small sizes use the executor's workspace. For larger sizes one block of each power of 2 is allocated, and kept
        as long as a plan uses it. (A recurrent network needs 16 MiB for each direction, however small it is: 33.5 MiB
        for two in cuDNN 9.19.)
        """
        if nbytes <= executor.workspace.nbytes:
            return Scratch(executor.workspace.c_ptr, executor.workspace)
        return _shared(executor, nbytes, self.name)

    def intermediate_memory(self, executor: CudaExecutor, nbytes: int) -> Scratch:
        """Memory for the intermediate tensors of a plan, shared in the same way, but separate from the workspace."""
        return _shared(executor, nbytes, f"{self.name} intermediates")


def _shared(executor: CudaExecutor, nbytes: int, purpose: str) -> Scratch:
    storage = of_size(executor, 1 << (max(nbytes, 1) - 1).bit_length(), purpose)
    return Scratch(ctypes.c_void_p(storage.base), storage)


handle_of = Handle.of


def last_error() -> str:
    """cuDNN's message about the last failed call in this thread, in one line; "" if there is none."""
    text = ctypes.create_string_buffer(MESSAGE_BYTES)
    cudnn.cudnnGetLastErrorString(text, MESSAGE_BYTES)
    return " ".join(text.value.decode(errors="replace").split())
