"""Dense matrices pruned by cuSPARSE, which needs column-major ones: others are copied first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import F32
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.pruning import PruneCriterion, Pruning
from dispatch.libraries.cusparse.sorting import SortSteps
from dispatch.ops.sparse.rules import leading_dimension

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; for a matrix without elements it writes zeros."""
    steps = SortSteps(executor, row, len(request.reads) + len(request.writes))
    layout, place = request.a.layout, request.place_of
    if not layout.size:
        return _fill_zeros(request, steps)
    (m, n), a = layout.shape, place("a")
    ld = leading_dimension(layout, by_rows=False)
    if ld is None:
        a, ld = steps.scratch(layout.size * layout.dtype.itemsize), m
        source = Matrix(OperandPointer(place("a")), layout.dtype, m, n, *layout.strides)
        steps.copy(source, Matrix(OperandPointer(a), layout.dtype, m, n, 1, m))
    criterion = PruneCriterion("S" if layout.dtype is F32 else "D", request.threshold, request.percentage)
    if request.op == "prune_nnz":
        steps.append(Pruning(executor, (m, n), ld, a, criterion, number=place("out")))
    else:
        parts = (place("out_values"), place("out_rows"), place("out_columns"))
        steps.append(Pruning(executor, (m, n), ld, a, criterion, parts=parts, nnz=request.nnz))
    return steps.plan(capture_safe=False)


def _fill_zeros(request: Any, steps: SortSteps) -> Plan:
    """Write a count of 0, or offsets that are all 0."""
    for name in request.writes:
        size = request.layout_of(name).size
        if size:
            steps.fill_zeros(
                Matrix(OperandPointer(request.place_of(name)), request.layout_of(name).dtype, size, 1, 1, size)
            )
    return steps.plan(capture_safe=True)
