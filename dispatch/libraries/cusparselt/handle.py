"""The cuSPARSELt handle of an executor, with the memory that its plans share if the workspace is too small.

A handle is a struct that the caller owns, for one device and no stream: each call has its stream as an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparseLt as lt
from dispatch.execute.installed import installed
from dispatch.execute.shared_memory import beyond_workspace
from dispatch.libraries.handle import lent

if TYPE_CHECKING:
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "handle_of", "library_stamp"]

NAME = "cusparseLt"


class Handle:
    """A `cusparseLtHandle_t` of one executor; `c_stream` is the stream on which its plans enqueue, set by `follow`."""

    __slots__ = ("_target", "c", "c_stream")  # an executor that only copies has no target, and no plans

    def __init__(self, executor: CudaExecutor, c_handle: Any) -> None:
        target: Any = getattr(executor, "target", None)
        self._target, self.c = target, c_handle
        self.c_stream: Any = lt.cudaStream_t()

    def follow(self) -> Any:
        """The struct; also sets `c_stream` to the stream on which the executor's plans enqueue now."""
        self.c_stream.value = self._target.value
        return self.c

    def memory(self, executor: CudaExecutor, nbytes: int) -> tuple[Storage | None, int]:
        """So many bytes of workspace and their address, shared by plans that run one after the other."""
        return beyond_workspace(executor, nbytes, NAME)


def handle_of(executor: CudaExecutor) -> Handle:
    """The only handle of an executor; after the executor is closed, another executor of its device reuses it."""
    handle: Handle | None = executor.handles.get(NAME)
    if handle is None:
        c_handle = lent(executor, NAME, _create_handle, lt.cusparseLtDestroy.unchecked)
        handle = executor.handles[NAME] = Handle(executor, c_handle)
    return handle


def _create_handle() -> lt.cusparseLtHandle_t:
    c_handle = lt.cusparseLtHandle_t()
    lt.cusparseLtInit(c_handle)
    return c_handle


def library_stamp(executor: CudaExecutor) -> str:
    """The inputs that determine the layout of compressed matrices: library, version and architecture."""
    # Read from the installed library: an executor that only copies, as in front of a child process, has no versions.
    version = ".".join(map(str, installed[NAME]))
    return f"{NAME} {version} {executor.device.arch}"
