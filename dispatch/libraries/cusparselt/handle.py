"""The cuSPARSELt handle of an executor, with the memory that its plans share where the workspace is too small.

A handle is a struct that the caller owns, for one device and no stream: each call is passed its stream.
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
    """A `cusparseLtHandle_t` of one executor; `c_stream` is where the executor's plans enqueue, once it is followed."""

    __slots__ = ("_target", "c", "c_stream")  # an executor that only copies has no target, and no plans

    def __init__(self, executor: CudaExecutor, c_handle: Any) -> None:
        target: Any = getattr(executor, "target", None)
        self._target, self.c = target, c_handle
        self.c_stream: Any = lt.cudaStream_t()

    def follow(self) -> Any:
        """The struct; `c_stream` is the stream that the executor's plans enqueue on now."""
        self.c_stream.value = self._target.value
        return self.c

    def memory(self, executor: CudaExecutor, nbytes: int) -> tuple[Storage | None, int]:
        """So many bytes of workspace and their address, shared by plans that run one after the other."""
        return beyond_workspace(executor, nbytes, NAME)


def handle_of(executor: CudaExecutor) -> Handle:
    """The one handle of an executor; once that is closed, another executor's of its device."""
    found: Handle | None = executor.handles.get(NAME)
    if found is None:
        c_handle = lent(executor, NAME, _create_handle, lt.cusparseLtDestroy.unchecked)
        found = executor.handles[NAME] = Handle(executor, c_handle)
    return found


def _create_handle() -> lt.cusparseLtHandle_t:
    c_handle = lt.cusparseLtHandle_t()
    lt.cusparseLtInit(c_handle)
    return c_handle


def library_stamp(executor: CudaExecutor) -> str:
    """What decides the layout of the matrices that an executor compresses: library, version and architecture."""
    # Asked of what is installed: an executor that only copies, as before a process of its own, knows no versions.
    version = ".".join(map(str, installed[NAME]))
    return f"{NAME} {version} {executor.device.arch}"
