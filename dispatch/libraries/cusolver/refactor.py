"""cuSOLVER's refactorization: the factors of matrices of one pattern, with an ordering and fill-in found on the host.

It has no stream: its calls run on the null stream, so callers must wait before and after. NVIDIA has deprecated it in
favour of cuDSS. Follows https://docs.nvidia.com/cuda/cusolver/#cusolverrf-refactorization.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.sys import cusolver_types, cusolverRf
from dispatch.libraries.finalizer import Held

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Pattern", "Refactorization"]

ZERO_PIVOT = int(cusolver_types.cusolverStatus_t.CUSOLVER_STATUS_ZERO_PIVOT)


def at(address: int) -> ctypes.c_void_p:
    """An address as an argument of the library."""
    return ctypes.c_void_p(address)


class Pattern(NamedTuple):
    """A matrix in CSR on the host: i32 offsets and columns from 0 on, and f64 values."""

    offsets: Array
    columns: Array
    values: Array

    @property
    def given(self) -> tuple[Any, ...]:
        """The number of elements and the addresses of the parts, as arguments of the library."""
        return len(self.values), *(at(part.ctypes.data) for part in self)


class Refactorization:
    """A `cusolverRfHandle_t`: L·U = A[p][:, q] of a pattern, L without its unit diagonal."""

    __slots__ = ("_executor", "_held", "_n")

    def __init__(self, executor: CudaExecutor, a: Pattern, low: Pattern, high: Pattern, p: Array, q: Array) -> None:
        self._executor, self._n = executor, len(p)
        self._held = Held(cusolverRf.cusolverRfHandle_t(), cusolverRf.cusolverRfDestroy)
        handle: Any = self._held.c
        cusolverRf.cusolverRfCreate(handle)
        csr = cusolverRf.cusolverRfMatrixFormat_t.CUSOLVERRF_MATRIX_FORMAT_CSR
        ones = cusolverRf.cusolverRfUnitDiagonal_t.CUSOLVERRF_UNIT_DIAGONAL_ASSUMED_L
        cusolverRf.cusolverRfSetMatrixFormat(handle, csr, ones)
        order = at(p.ctypes.data), at(q.ctypes.data)
        self._check(cusolverRf.cusolverRfSetupHost, self._n, *a.given, *low.given, *high.given, *order, handle)
        self._check(cusolverRf.cusolverRfAnalyze, handle)

    def refactor(self, nnz: int, rows: int, columns: int, values: int, p: int, q: int) -> bool:
        """Factorize the values at these addresses; False if a pivot is 0 in the fixed ordering."""
        addresses = map(at, (rows, columns, values, p, q))
        self._check(cusolverRf.cusolverRfResetValues, self._n, nnz, *addresses, self._held.c)
        function: Any = cusolverRf.cusolverRfRefactor
        status = function.unchecked(self._held.c)
        if status not in (0, ZERO_PIVOT):
            self._failed(function, status)
        return bool(status == 0)

    def solve(self, p: int, q: int, work: int, x: int) -> None:
        """Overwrite a right-hand side with its solution."""
        self._check(cusolverRf.cusolverRfSolve, self._held.c, at(p), at(q), 1, at(work), self._n, at(x), self._n)

    def _check(self, function: Any, *given: Any) -> None:
        status = function.unchecked(*given)
        if status:
            self._failed(function, status)

    def _failed(self, function: Any, status: int) -> None:
        self._executor.stream.done()  # raises DeviceFault if the device is lost
        raise function.error(status)
