"""The cuSOLVER handle of an executor, with the memory that plans share, and settings of routines."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind.sys import cusolverDn as dn
from dispatch.execute.shared_memory import shared
from dispatch.libraries.finalizer import finalizer
from dispatch.libraries.handle import StreamHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "Settings", "handle_of"]


class Settings:
    """Settings of a routine in host memory, destroyed with this object: `cusolverDnParams_t`, or Jacobi's."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, kind: str, create: str, destroy: str) -> None:
        last: Any = getattr(dn, destroy)
        self._destroy: Callable[[Any], int] = last.unchecked
        self.handle: Any = getattr(dn, kind)()
        getattr(dn, create)(ctypes.byref(self.handle))

    def set(self, function: str, value: float) -> None:
        """Change a setting, with the library's function for it."""
        getattr(dn, function)(self.handle, value)

    @finalizer
    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle:
            self._destroy(handle)


class Handle(StreamHandle):
    """A `cusolverDnHandle_t` on the stream of one executor, and the default settings of the 64-bit interface."""

    __slots__ = ("params",)

    name: ClassVar[str] = "cusolverDn"
    kind = dn.cusolverDnHandle_t

    def __init__(self, executor: CudaExecutor) -> None:
        super().__init__(executor)
        self.params = Settings("cusolverDnParams_t", "cusolverDnCreateParams", "cusolverDnDestroyParams")

    @staticmethod
    def create(c_handle: dn.cusolverDnHandle_t) -> None:
        dn.cusolverDnCreate(c_handle)

    @staticmethod
    def destroy(c_handle: dn.cusolverDnHandle_t) -> int:
        status: int = dn.cusolverDnDestroy.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: dn.cusolverDnHandle_t, stream: int | None) -> None:
        dn.cusolverDnSetStream(c_handle, dn.cudaStream_t(stream))

    def memory(self, executor: CudaExecutor, purpose: str, nbytes: int) -> Storage | None:
        """`nbytes` for a purpose, shared by the executor's plans, which run one after the other; None for 0 bytes."""
        return shared(executor, nbytes, f"{self.name} {purpose}")


handle_of = Handle.of
