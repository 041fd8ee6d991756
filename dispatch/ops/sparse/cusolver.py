"""Direct solves by cuSOLVER, one right-hand side after another: QR, or Cholesky for a positive definite A."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.copies import Copy, CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusolver.sparse import SparseSolve
from dispatch.ops.sparse.direct import SparseKind

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["plan"]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
VALUES, ROWS, COLUMNS, B, OUT, INFO, _ = range(7)


def plan(request: SpsolveRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    return SparseSolvePlan(request, executor, row)


class SparseSolvePlan(Plan):
    """A copy of b into columns in the plan's memory, and a solve for each; nothing is kept between calls."""

    __slots__ = ("_copy", "_executor", "_is_positive", "_memory", "_solve", "_steps")

    def __init__(self, request: SpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor = executor
        n, dtype = request.form.shape[0], request.values.dtype
        b, out = (request.layout_of(name) for name in ("b", "out"))
        nrhs = b.shape[1] if len(b.shape) > 1 else 1
        strides = b.strides if len(b.shape) > 1 else (b.strides[0], 1)
        self._memory = executor.device.allocate(n * nrhs * dtype.itemsize, executor.stream)
        target = Matrix(OperandPointer(1), dtype, n, nrhs, 1, n)
        self._copy = Copy(
            executor, Matrix(OperandPointer(0), dtype, n, nrhs, *strides), target, 1, CopyMode.ALL, conj=False
        )
        between = (n, out.strides[1] if len(out.shape) > 1 else n)
        self._steps = [tuple(k * step * dtype.itemsize for step in between) for k in range(nrhs)]
        self._is_positive = request.assume_a is SparseKind.POS
        name = f"cusolverSp{LETTERS[dtype]}csrlsv{'chol' if self._is_positive else 'qr'}"
        self._solve = SparseSolve(executor, name, n, request.values.shape[0], request.form.base)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        args: Any = arguments
        self._copy.enqueue((args[B], self._memory.base))
        matrix, failed = (args[VALUES], args[ROWS], args[COLUMNS]), -1
        for source, target in self._steps:
            failed = self._solve.solve(*matrix, self._memory.base + source, args[OUT] + target)
            if failed >= 0:
                break
        info = 0 if failed < 0 else failed + 1 if self._is_positive else -1
        driver.cuMemsetD32Async(args[INFO], info & 0xFFFFFFFF, 1, self._executor.target.value)
