"""Direct solves by cuDSS: copies of right-hand sides that are not column-major, and the factors of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.libraries.cudss.factors import Factors, SolverSettings, SystemSpec
from dispatch.libraries.cusolver.copies import Copy, CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.ops.sparse.direct import SparseKind
from dispatch.ops.sparse.rules import is_dense_batch, leading_dimension

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["CudssPlan", "Run", "kind_of"]

GENERAL, SYMMETRIC, HERMITIAN, SPD, HPD = range(5)  # cudssMatrixType_t
VALUES, ROWS, COLUMNS, B, OUT, INFO, STAMP = range(7)


def kind_of(assume_a: SparseKind | str, dtype: Dtype) -> int:
    """A cudssMatrixType_t; a real Hermitian matrix is a symmetric one."""
    is_complex = dtype.is_complex
    kinds = {
        SparseKind.GEN: GENERAL,
        SparseKind.SYM: SYMMETRIC,
        SparseKind.HER: HERMITIAN if is_complex else SYMMETRIC,
        SparseKind.POS: HPD if is_complex else SPD,
    }
    return kinds[SparseKind(assume_a)]  # type: ignore[arg-type]  # it is a member since it was checked


class Run(NamedTuple):
    """The addresses of a run, and the stamp of its values; b is column-major."""

    pattern: tuple[Any, Any]
    values: Any
    b: Any
    x: Any
    stamp: int | None


class CudssPlan(Plan):
    """A copy of b if it is not column-major, and the solve."""

    __slots__ = ("_batch", "_copy", "_executor", "_factors", "_keeps", "_memory", "_settings", "_spec")

    def __init__(self, request: SpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._keeps = executor, request.form.pattern is not None
        n, dtype = request.form.shape[0], request.values.dtype
        self._batch: int = getattr(request, "batch", 1)
        is_batch = request.values.ndim > 1
        b, out = (request.layout_of(name) for name in ("b", "out"))
        between, strides, nrhs = _columns(b, is_batch=is_batch)
        ld_b, ld_x = (_leading(layout, is_batch=is_batch) for layout in (b, out))
        self._copy: Copy | None = None
        if ld_b is None:
            size = dtype.itemsize
            self._memory = executor.device.allocate(self._batch * n * nrhs * size, executor.stream)
            source = Matrix(OperandPointer(0, 0, between * size), dtype, n, nrhs, *strides)
            target = Matrix(OperandPointer(1, 0, n * nrhs * size), dtype, n, nrhs, 1, n)
            self._copy = Copy(executor, source, target, self._batch, CopyMode.ALL, conj=False)
        self._spec = SystemSpec(
            n=n,
            nnz=request.values.shape[-1],
            nrhs=nrhs,
            ld=(n if ld_b is None else ld_b, ld_x or n),
            offset_bytes=request.rows.dtype.itemsize,
            index_bytes=request.columns.dtype.itemsize,
            value_type=dtype.cuda,
            kind=kind_of(request.assume_a, dtype),
            view=0 if request.uplo is None else 1 + int(request.uplo),
            base=request.form.base,
        )
        self._settings = SolverSettings(self._batch, request.is_hybrid, request.device_memory, request.refinements or 0)
        self._factors = self.first_factors(request)

    def first_factors(self, request: SpsolveRequest) -> Factors:
        """The factors that the plan solves with."""
        del request
        return self.factors(self._spec, self._settings)

    def factors(self, spec: SystemSpec, settings: SolverSettings) -> Factors:
        """New factors for the plan."""
        return Factors(self._executor, spec, self._executor.workspace.c_ptr.value or 0, settings)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        args: Any = arguments
        b = args[B]
        if self._copy is not None:
            self._copy.enqueue((b, self._memory.base))
            b = self._memory.base
        stamp = None if args[STAMP] < 0 else args[STAMP]
        self.solve(Run((args[ROWS], args[COLUMNS]), args[VALUES], b, args[OUT], stamp), args[INFO])

    def solve(self, run: Run, info: Any) -> None:
        """Solve, and write the status."""
        self._factors.solve(*run, keeps=self._keeps)
        self.write_status(info, self._factors.info)

    def write_status(self, info: Any, status: int, count: int = 1) -> None:
        """Write a status, or the same one several times."""
        driver.cuMemsetD32Async(info, status & 0xFFFFFFFF, count, self._executor.target.value)


def _columns(layout: Layout, *, is_batch: bool) -> tuple[int, tuple[int, int], int]:
    """The strides between matrices, rows and columns; and the number of columns."""
    between = layout.strides[0] if is_batch else 0
    shape, strides = layout.shape[is_batch:], layout.strides[is_batch:]
    if len(shape) == 1:
        return between, (strides[0], 1), 1
    return between, (strides[0], strides[1]), shape[1]


def _leading(layout: Layout, *, is_batch: bool) -> int | None:
    """The leading dimension of contiguous columns; None for other layouts.

    The matrices of a batch must be contiguous, too, without gaps between their columns.
    """
    if is_batch:
        return layout.shape[1] if is_dense_batch(layout) else None
    if len(layout.shape) == 1:
        size: int = layout.shape[0]
        return size if layout.strides[0] == 1 or size == 1 else None
    return leading_dimension(layout, by_rows=False)
