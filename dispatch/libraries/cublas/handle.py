"""The cuBLAS handle of an executor: made at its first routine, another executor's once it is closed.

Numbers are read on the host, f32 is not rounded to TF32, parts of a sum are added up in the compute type, and sums are
the same in every run: no atomics. The workspace is the executor's, so that no call allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cublas
from dispatch.libraries.handle import lent

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["MATH", "Handle", "handle_of"]

NAME = "cublas"
# DEFAULT_MATH, but that parts of a sum are not rounded to the dtype of the result; who sets another sets it back.
MATH = cublas.cublasMath_t.CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION


class Handle:
    """A `cublasHandle_t` and the stream and workspace that it was told last; it holds no executor."""

    __slots__ = ("_current", "c_handle")

    def __init__(self, c_handle: cublas.cublasHandle_t) -> None:
        self.c_handle = c_handle
        self._current: tuple[int | None, int | None] = (-1, -1)  # none that exist

    def follow(self, executor: CudaExecutor, *, on_device: bool = False) -> cublas.cublasHandle_t:
        """The handle, on the stream that plans enqueue on now: the executor's own, or a recorder's.

        With `on_device` numbers are read and written on the device, until the next call of this.
        """
        workspace = executor.workspace
        wanted = (executor.target.value, workspace.c_ptr.value)
        if wanted != self._current:
            self._current = (-1, -1)  # as an interrupt may come in between
            cublas.cublasSetStream(self.c_handle, cublas.cudaStream_t(executor.target.value))
            # Behind the stream, which sets the workspace back to cuBLAS's own.
            cublas.cublasSetWorkspace(self.c_handle, workspace.c_ptr, workspace.nbytes)
            self._current = wanted
        mode = cublas.cublasPointerMode_t
        cublas.cublasSetPointerMode(
            self.c_handle, mode.CUBLAS_POINTER_MODE_DEVICE if on_device else mode.CUBLAS_POINTER_MODE_HOST
        )
        return self.c_handle


def handle_of(executor: CudaExecutor) -> Handle:
    """The handle of an executor; to destroy one ends all captures, so it serves another one afterwards."""
    handle: Handle | None = executor.handles.get(NAME)
    if handle is None:
        handle = executor.handles[NAME] = Handle(lent(executor, NAME, _create, cublas.cublasDestroy.unchecked))
    return handle


def _create() -> cublas.cublasHandle_t:
    c_handle = cublas.cublasHandle_t()
    cublas.cublasCreate(c_handle)
    cublas.cublasSetMathMode(c_handle, MATH)
    cublas.cublasSetAtomicsMode(c_handle, cublas.cublasAtomicsMode_t.CUBLAS_ATOMICS_NOT_ALLOWED)
    return c_handle
