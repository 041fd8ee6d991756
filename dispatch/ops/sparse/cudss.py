"""Direct solves by cuDSS: what is copied so that columns lie one behind another, and the factors of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.libraries.cudss.factors import Factors, Said
from dispatch.libraries.cusolver.copies import Copy, Keep
from dispatch.libraries.cusolver.matrix import Matrix, Place
from dispatch.ops.sparse.direct import SparseKind
from dispatch.ops.sparse.rules import leading

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["plan"]

GENERAL, SYMMETRIC, HERMITIAN, SPD, HPD = range(5)  # cudssMatrixType_t
VALUES, ROWS, COLUMNS, B, OUT, INFO, STAMP = range(7)


def plan(request: SpsolveRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    return CudssPlan(request, executor, row)


def kind_of(request: SpsolveRequest) -> int:
    """A cudssMatrixType_t; a real Hermitian matrix is a symmetric one."""
    is_complex = request.values.dtype.is_complex
    kinds = {
        SparseKind.GEN: GENERAL,
        SparseKind.SYM: SYMMETRIC,
        SparseKind.HER: HERMITIAN if is_complex else SYMMETRIC,
        SparseKind.POS: HPD if is_complex else SPD,
    }
    return kinds[SparseKind(request.assume_a)]  # type: ignore[arg-type]  # it is a member since it was checked


class CudssPlan(Plan):
    """A copy of b where its columns are not dense, and the solve."""

    __slots__ = ("_copy", "_executor", "_factors", "_keeps", "_memory")

    def __init__(self, request: SpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._keeps = executor, request.form.pattern is not None
        n, dtype = request.form.shape[0], request.values.dtype
        layouts = [request.layout_of(name) for name in ("b", "out")]
        sides = 1 if len(layouts[0].shape) == 1 else layouts[0].shape[1]
        ld_b, ld_x = (_leading(layout) for layout in layouts)
        self._copy: Copy | None = None
        if ld_b is None:
            self._memory = executor.device.allocate(n * sides * dtype.itemsize, executor.stream)
            strides = layouts[0].strides if sides > 1 or len(layouts[0].shape) > 1 else (layouts[0].strides[0], 1)
            source = Matrix(Place(0), dtype, n, sides, *strides)
            self._copy = Copy(executor, source, Matrix(Place(1), dtype, n, sides, 1, n), 1, Keep.ALL, conj=False)
        said = Said(
            n=n,
            nnz=request.values.shape[0],
            sides=sides,
            ld=(n if ld_b is None else ld_b, ld_x or n),
            offset_bytes=request.rows.dtype.itemsize,
            index_bytes=request.columns.dtype.itemsize,
            value_type=dtype.cuda,
            kind=kind_of(request),
            view=0 if request.uplo is None else 1 + int(request.uplo),  # type: ignore[arg-type]  # as above
            base=request.form.base,
        )
        self._factors = Factors(executor, said, executor.workspace.c_ptr.value or 0)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        given: Any = arguments
        b = given[B]
        if self._copy is not None:
            self._copy.enqueue((b, self._memory.base))
            b = self._memory.base
        stamp = None if given[STAMP] < 0 else given[STAMP]
        pattern = given[ROWS], given[COLUMNS]
        self._factors.solve(pattern, given[VALUES], b, given[OUT], stamp, keeps=self._keeps)
        driver.cuMemsetD32Async(given[INFO], self._factors.info & 0xFFFFFFFF, 1, self._executor.target.value)


def _leading(layout: Any) -> int | None:
    """The leading dimension of columns that lie one behind another; None for other layouts."""
    if len(layout.shape) == 1:
        size: int = layout.shape[0]
        return size if layout.strides[0] == 1 or size == 1 else None
    return leading(layout, by_rows=False)
