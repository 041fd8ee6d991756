"""Direct solves by cuSOLVER's refactorization: the host finds ordering and fill once, the GPU factorizes values again.

SuperLU orders the first matrix and permutes its rows; the GPU keeps that ordering for other values at the same places.
If it meets a pivot of 0, the host orders those values, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.errors import Refused
from dispatch.libraries.cusolver.copies import Copy, CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusolver.refactor import Pattern, Refactorization
from dispatch.ops.sparse.reference import NEEDS_SCIPY
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["order_of", "plan"]

VALUES, ROWS, COLUMNS, B, OUT, INFO, STAMP = range(7)
SINGULAR = -1
INDEX_BYTES = 4
NULL_STREAM = None  # the stream that the library uses


def plan(request: SpsolveRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused without SciPy, which orders the first matrix."""
    try:
        import scipy.sparse.linalg  # noqa: F401  # looked for now, used by the plan
    except ImportError as error:
        raise Refused(NEEDS_SCIPY, Kind.RULE) from error
    return RefactorPlan(request, executor, row)


def order_of(a: Any) -> tuple[Pattern, Pattern, Array, Array] | None:
    """L without its diagonal, U, and the orders p and q of L·U = A[p][:, q]; None if a matrix is singular.

    L and U have all places that any values at A's places may fill. SuperLU leaves out elements whose result is 0, so
    the fill is computed by factorizing positive numbers, whose elimination never results in 0.
    """
    import scipy.sparse as sp
    from scipy.sparse.linalg import splu

    try:
        first = splu(a.tocsc())
    except RuntimeError:  # exactly singular
        return None
    p, q = np.argsort(first.perm_r), np.argsort(first.perm_c)
    ordered = a[p][:, q].tocsr()
    n = ordered.shape[0]
    away = sp.csr_array((np.full(ordered.nnz, -1.0), ordered.indices, ordered.indptr), ordered.shape)
    away.setdiag(0)
    away.eliminate_zeros()
    dominant = (away + sp.diags_array(np.full(n, n + 1.0))).tocsc()  # an M-matrix: its off-diagonal elements only grow
    fill = splu(dominant, permc_spec="NATURAL", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    p, q = p[np.argsort(fill.perm_r)], q[np.argsort(fill.perm_c)]
    low, high = sp.tril(fill.L, -1).tocsr(), sp.triu(fill.U).tocsr()
    return pattern_of(low), pattern_of(high), p.astype(np.int32), q.astype(np.int32)


def pattern_of(matrix: Any) -> Pattern:
    """The parts of a SciPy matrix in CSR, as the library expects them."""
    matrix.sort_indices()
    kinds = ((matrix.indptr, np.int32), (matrix.indices, np.int32), (matrix.data, np.float64))
    return Pattern(*(np.ascontiguousarray(part, kind) for part, kind in kinds))


class RefactorPlan(Plan):
    """A copy of b into x, and a solve for each column in place; the plan keeps the host's ordering."""

    __slots__ = (
        "_copy",
        "_executor",
        "_factors",
        "_is_factorized",
        "_n",
        "_nnz",
        "_order",
        "_ordered_pattern",
        "_stamp",
        "_steps",
        "_work",
    )

    def __init__(self, request: SpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor = executor
        self._factors: Any = None  # a Refactorization, after the host has ordered a matrix
        self._ordered_pattern: Any = None  # the addresses of the pattern that was ordered
        self._stamp: Any = None  # the stamp of the factorized values
        self._is_factorized = False
        n, dtype = request.form.shape[0], request.values.dtype
        self._n, self._nnz = n, request.values.shape[0]
        b, out = (request.layout_of(name) for name in ("b", "out"))
        nrhs = b.shape[1] if len(b.shape) > 1 else 1
        strides = [one.strides if len(one.shape) > 1 else (one.strides[0], n) for one in (b, out)]
        source, target = (Matrix(OperandPointer(place), dtype, n, nrhs, *strides[place]) for place in range(2))
        self._copy = Copy(executor, source, target, 1, CopyMode.ALL, conj=False)
        self._steps = [side * strides[1][1] * dtype.itemsize for side in range(nrhs)]
        self._order = executor.device.allocate(2 * n * INDEX_BYTES, executor.stream)
        self._work = executor.device.allocate(n * dtype.itemsize, executor.stream)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        args: Any = arguments
        stream = self._executor.target.value
        self._copy.enqueue((args[B], args[OUT]))
        driver.cuStreamSynchronize(stream)
        self._factorize(args[VALUES], (args[ROWS], args[COLUMNS]), args[STAMP])
        if self._is_factorized:
            p, q = self._orders
            for step in self._steps:
                self._factors.solve(p, q, self._work.base, args[OUT] + step)
            driver.cuStreamSynchronize(NULL_STREAM)
        driver.cuMemsetD32Async(args[INFO], (0 if self._is_factorized else SINGULAR) & 0xFFFFFFFF, 1, stream)

    @property
    def _orders(self) -> tuple[int, int]:
        base: int = self._order.base
        return base, base + self._n * INDEX_BYTES

    def _factorize(self, values: Any, pattern: tuple[Any, Any], stamp: Any) -> None:
        """Factorize unless the values are the same, with the present ordering as long as that works."""
        values_key = stamp, values
        if self._ordered_pattern == pattern and self._stamp == values_key:
            return
        self._stamp, self._is_factorized = None, False
        if self._ordered_pattern == pattern and self._factors is not None:
            self._is_factorized = self._refactor(values, pattern)
        if not self._is_factorized:
            self._ordered_pattern = None
            if self._order_on_host(values, pattern):
                self._is_factorized = self._refactor(values, pattern)
            self._ordered_pattern = pattern
        self._stamp = values_key

    def _refactor(self, values: Any, pattern: tuple[Any, Any]) -> bool:
        done: bool = self._factors.refactor(self._nnz, *pattern, values, *self._orders)
        driver.cuStreamSynchronize(NULL_STREAM)
        return done

    def _order_on_host(self, values: Any, pattern: tuple[Any, Any]) -> bool:
        """Order the matrix on the host, for the GPU to use; returns whether the host could factorize it."""
        import scipy.sparse as sp

        self._factors = None
        sizes = (self._n + 1, np.int32), (self._nnz, np.int32), (self._nnz, np.float64)
        parts = [np.empty(count, kind) for count, kind in sizes]
        stream = self._executor.target.value
        for part, source in zip(parts, (*pattern, values), strict=True):
            driver.cuMemcpyDtoHAsync(part.ctypes.data, source, part.nbytes, stream)
        driver.cuStreamSynchronize(stream)
        a = Pattern(*parts)
        ordered = order_of(sp.csr_array((a.values, a.columns, a.offsets), (self._n, self._n)))
        if ordered is None:
            return False
        low, high, p, q = ordered
        for target, order in zip(self._orders, (p, q), strict=True):
            driver.cuMemcpyHtoDAsync(target, order.ctypes.data, order.nbytes, stream)
        driver.cuStreamSynchronize(stream)
        self._factors = Refactorization(self._executor, a, low, high, p, q)
        return True
