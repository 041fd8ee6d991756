"""Systems with five diagonals by cuSPARSE, which overwrites all that it is given: it works on copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.matrix import Matrix, Place
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
BY_QR = 0  # the one algorithm that there is


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without any system there is nothing to do."""
    steps = SortSteps(executor, row, len(request.reads) + len(request.writes))
    n, batch = request.d.shape
    if not batch:
        return steps.idle()
    dtype, size = request.d.dtype, n * batch
    step, work = -(-size * dtype.itemsize // ROUND) * ROUND, steps.scratch(0)

    def column(place: Place) -> Matrix:
        return Matrix(place, dtype, size, 1, 1, size)

    copies = [Place(work, number * step) for number in range(len(DIAGONALS))]
    for name, copy in zip(DIAGONALS, copies, strict=True):
        steps.copy(column(Place(request.place_of(name))), column(copy))
    out = Place(request.place_of("out"))
    steps.copy(column(Place(request.place_of("b"))), column(out))
    function, given = f"cusparse{LETTERS[dtype]}gpsvInterleavedBatch", (BY_QR, n, *copies, out, batch)
    buffer = Call(executor, function, given).buffer_size("_bufferSizeExt")
    steps.scratch(len(copies) * step + buffer)
    steps.append(Call(executor, function, (*given, Place(work, len(copies) * step))))
    return steps.plan(capture_safe=True)
