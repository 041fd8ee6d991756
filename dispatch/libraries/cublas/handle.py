"""The cuBLAS handle of an executor: created at its first routine, and reused by another executor after it is closed.

Scalars are read from host memory, f32 is not rounded to TF32, partial sums are added in the compute type, and sums are
the same in every run: no atomics. The workspace belongs to the executor, so calls do not allocate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cublas
from dispatch.libraries.handle import lent

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["MATH", "Handle", "handle_of"]

NAME = "cublas"
# DEFAULT_MATH, except that partial sums are not rounded to the result's dtype; code that changes the mode restores it.
MATH = cublas.cublasMath_t.CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION


class Handle:
    """A `cublasHandle_t` and the stream and workspace that were last set; it does not reference an executor."""

    __slots__ = ("_current", "c_handle")

    def __init__(self, c_handle: cublas.cublasHandle_t) -> None:
        self.c_handle = c_handle
        self._current: tuple[int | None, int | None] = (-1, -1)  # not a valid stream and workspace

    def follow(self, executor: CudaExecutor, *, on_device: bool = False) -> cublas.cublasHandle_t:
        """The handle, on the stream that plans currently enqueue on: the executor's own, or a recorder's.

        With `on_device` scalars are read and written on the device, until the next call of this method.
        """
        workspace = executor.workspace
        setting = (executor.target.value, workspace.c_ptr.value)
        if setting != self._current:
            self._current = (-1, -1)  # an interrupt may occur before both are set
            cublas.cublasSetStream(self.c_handle, cublas.cudaStream_t(executor.target.value))
            # After the stream, because setting the stream resets the workspace to cuBLAS's own.
            cublas.cublasSetWorkspace(self.c_handle, workspace.c_ptr, workspace.nbytes)
            self._current = setting
        mode = cublas.cublasPointerMode_t
        cublas.cublasSetPointerMode(
            self.c_handle, mode.CUBLAS_POINTER_MODE_DEVICE if on_device else mode.CUBLAS_POINTER_MODE_HOST
        )
        return self.c_handle


def handle_of(executor: CudaExecutor) -> Handle:
    """The handle of an executor; destroying a handle ends all captures, so it is reused by another executor."""
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
