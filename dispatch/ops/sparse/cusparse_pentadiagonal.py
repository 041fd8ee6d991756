"""Systems with five diagonals by cuSPARSE, which overwrites its operands, and memory beyond them: it works on copies.

On an H100 a solve with three unknowns writes one row more than the right-hand sides have. So copies have spare rows, as
many as the outermost diagonal is off the main one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.sorting import SortSteps
from dispatch.ops.sparse.pentadiagonal import DIAGONALS

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
ROUND = 256  # bytes
SPARE = max(DIAGONALS.values())  # rows
BY_QR = 0  # the only algorithm


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without any system it does nothing."""
    steps = SortSteps(executor, row, len(request.reads) + len(request.writes))
    n, batch = request.d.shape
    if not batch:
        return steps.idle_plan()
    dtype, size = request.d.dtype, n * batch
    step, work = -(-(n + SPARE) * batch * dtype.itemsize // ROUND) * ROUND, steps.scratch(0)

    def column(place: OperandPointer) -> Matrix:
        return Matrix(place, dtype, size, 1, 1, size)

    names = (*DIAGONALS, "b")
    copies = [OperandPointer(work, number * step) for number in range(len(names))]
    for name, copy in zip(names, copies, strict=True):
        steps.copy(column(OperandPointer(request.place_of(name))), column(copy))
    function, arguments = f"cusparse{LETTERS[dtype]}gpsvInterleavedBatch", (BY_QR, n, *copies, batch)
    buffer = Call(executor, function, arguments).buffer_size("_bufferSizeExt")
    steps.scratch(len(copies) * step + buffer)
    steps.append(Call(executor, function, (*arguments, OperandPointer(work, len(copies) * step))))
    steps.copy(column(copies[-1]), column(OperandPointer(request.place_of("out"))))
    return steps.plan(capture_safe=True)
