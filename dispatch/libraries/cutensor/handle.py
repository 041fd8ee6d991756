"""The cuTENSOR handle of an executor, and the memory that its plans share if the executor's workspace is too small.

A handle has no stream: each call takes one as an argument. Each executor still has its own handle, for its plan cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cudabind.errors import CutensorError
from cudabind.sys import cutensor
from dispatch.execute.shared_memory import beyond_workspace
from dispatch.libraries.cutensor.failures import failure, free_kept_memory
from dispatch.libraries.handle import StreamHandle

if TYPE_CHECKING:
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "handle_of"]


class Handle(StreamHandle):
    """A `cutensorHandle_t` of one executor."""

    __slots__ = ("c_stream", "has_read_plans")

    name: ClassVar[str] = "cutensor"
    kind = cutensor.cutensorHandle_t

    def __init__(self, executor: CudaExecutor) -> None:
        self.c_stream: Any = cutensor.cudaStream_t()
        self.has_read_plans = False  # see caches.py
        super().__init__(executor)

    def make(self, executor: CudaExecutor) -> None:
        """Create the handle; if that fails for lack of memory, free memory and try again. OutOfMemory if both fail."""
        try:
            self.create(self.c_handle)
        except CutensorError as error:
            self.c_handle = self.kind()  # discard the value that a failed call may have written
            if not free_kept_memory(executor, error):
                raise failure(executor, error) from error
            self._make_again(executor)

    def _make_again(self, executor: CudaExecutor) -> None:
        try:
            self.create(self.c_handle)
        except CutensorError as error:
            self.c_handle = self.kind()
            raise failure(executor, error) from error

    @staticmethod
    def create(c_handle: Any) -> None:
        cutensor.cutensorCreate(c_handle)

    @staticmethod
    def destroy(c_handle: Any) -> int:
        status: int = cutensor.cutensorDestroy.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: Any, stream: int | None) -> None:
        """Does nothing: see `follow`."""

    def follow(self) -> Any:
        """The handle; `c_stream` is the stream that the executor's plans enqueue on now."""
        self.c_stream.value = self._target.value
        return self.c_handle

    def memory(self, executor: CudaExecutor, nbytes: int) -> tuple[Storage | None, int]:
        """A workspace of `nbytes` and its address; plans that run one after the other share it."""
        return beyond_workspace(executor, nbytes, self.name)


handle_of = Handle.of
