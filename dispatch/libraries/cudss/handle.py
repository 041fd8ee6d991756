"""The cuDSS handle of an executor."""

from __future__ import annotations

from typing import ClassVar

from cudabind.sys import cudss
from dispatch.libraries.handle import StreamHandle

__all__ = ["Handle", "handle_of"]


class Handle(StreamHandle):
    """A `cudssHandle_t` on the stream of one executor."""

    __slots__ = ()

    name: ClassVar[str] = "cudss"
    kind = cudss.cudssHandle_t

    @staticmethod
    def create(c_handle: cudss.cudssHandle_t) -> None:
        cudss.cudssCreate(c_handle)

    @staticmethod
    def destroy(c_handle: cudss.cudssHandle_t) -> int:
        status: int = cudss.cudssDestroy.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: cudss.cudssHandle_t, stream: int | None) -> None:
        cudss.cudssSetStream(c_handle, cudss.cudaStream_t(stream))


handle_of = Handle.of
"""The only handle of an executor."""
