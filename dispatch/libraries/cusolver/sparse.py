"""cuSOLVER's solvers for sparse matrices: the handle, and calls that factorize, solve for one vector and wait.

NVIDIA has deprecated them in favour of cuDSS. Follows https://docs.nvidia.com/cuda/cusolver/#cusolversp-t-csrlsvqr.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind.sys import cusolverSp, cusparse
from dispatch.libraries.finalizer import Held
from dispatch.libraries.handle import StreamHandle

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "SparseSolve", "handle_of"]

REORDER = 1  # symrcm, which reduces fill-in


class Handle(StreamHandle):
    """A `cusolverSpHandle_t` on the stream of one executor."""

    __slots__ = ()

    name: ClassVar[str] = "cusolverSp"
    kind = cusolverSp.cusolverSpHandle_t

    @staticmethod
    def create(c_handle: cusolverSp.cusolverSpHandle_t) -> None:
        cusolverSp.cusolverSpCreate(c_handle)

    @staticmethod
    def destroy(c_handle: cusolverSp.cusolverSpHandle_t) -> int:
        status: int = cusolverSp.cusolverSpDestroy.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: cusolverSp.cusolverSpHandle_t, stream: int | None) -> None:
        cusolverSp.cusolverSpSetStream(c_handle, cusolverSp.cudaStream_t(stream))


handle_of = Handle.of
"""The one handle of an executor."""


class SparseSolve:
    """A solve by `csrlsvqr` or `csrlsvchol`, for a matrix with both triangles and 32-bit indices."""

    __slots__ = ("_descriptor", "_executor", "_name", "_sizes")

    def __init__(self, executor: CudaExecutor, name: str, n: int, nnz: int, base: int) -> None:
        self._executor, self._name, self._sizes = executor, name, (n, nnz)
        self._descriptor = Held(cusparse.cusparseMatDescr_t(), cusparse.cusparseDestroyMatDescr)
        cusparse.cusparseCreateMatDescr(self._descriptor.c)
        cusparse.cusparseSetMatIndexBase(self._descriptor.c, cusparse.cusparseIndexBase_t(base))

    def solve(self, values: Any, rows: Any, columns: Any, b: Any, x: Any) -> int:
        """Solve at these addresses, and wait: returns -1, or the row at which the factorization failed."""
        function: Any = getattr(cusolverSp, self._name)
        failed = ctypes.c_int32(-1)
        addresses = [ctypes.c_void_p(one) for one in (values, rows, columns, b)]
        choices = 0.0, REORDER, ctypes.c_void_p(x), ctypes.byref(failed)
        handle = handle_of(self._executor).follow()
        status = function.unchecked(handle, *self._sizes, self._descriptor.c, *addresses, *choices)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)
        return failed.value
