"""Systems of equations with three diagonals by gtsv2, which overwrites the right-hand sides with the solution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Steps
from dispatch.ops.sparse.rules import leading_dimension

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.tridiagonal import GtsvRequest

__all__ = ["plan"]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}


def plan(request: GtsvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: copy b to x, and solve the systems there."""
    steps = Steps(executor, row, len(request.reads) + 1)
    if not request.b.size:
        return steps.idle_plan()
    layout, out = request.layout_of("out"), request.place_of("out")
    source, target = (_matrix(one, place) for one, place in ((request.b.layout, 3), (layout, out)))
    steps.copy(source, target)
    places = [OperandPointer(request.place_of(name)) for name in ("dl", "d", "du")]
    n, name = request.d.shape[-1], f"cusparse{LETTERS[request.d.dtype]}gtsv2"
    if request.is_batch:
        strides = (request.d.shape[0], n)
        steps.call(f"{name}StridedBatch", n, *places, OperandPointer(out), *strides, size="_bufferSizeExt")
        return steps.plan(capture_safe=True)
    columns = layout.shape[1] if len(layout.shape) == 2 else 1
    ld = leading_dimension(layout, by_rows=False) if len(layout.shape) == 2 else n
    kind = name if request.pivoting else f"{name}_nopivot"
    steps.call(kind, n, columns, *places, OperandPointer(out), ld, size="_bufferSizeExt")
    return steps.plan(capture_safe=True)


def _matrix(layout: Any, operand: int) -> Matrix:
    if len(layout.shape) == 2:
        return Matrix(OperandPointer(operand), layout.dtype, *layout.shape, *layout.strides)
    step = layout.strides[0] if layout.size > 1 else 1
    return Matrix(OperandPointer(operand), layout.dtype, layout.size, 1, step, max(1, layout.size))
