"""Matrices sorted by cuSPARSE: indices are copied to the result and sorted there, then values are permuted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.sorting import SortSteps
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; for a matrix without elements it copies the rows.

    A sort is never captured in a graph: after one capture, cusparseCreateIdentityPermutation returns
    CUSPARSE_STATUS_INTERNAL_ERROR for the rest of the process.
    """
    steps = SortSteps(executor, row, len(request.reads) + len(request.writes))
    count, place = request.values.shape[0], request.place_of
    # The library reads 16 bytes at once: unaligned parts are sorted in workspace, and copied.
    parts = {name: steps.aligned_operand(request.layout_of(name), place(name)) for name in request.writes}
    for name in ("rows", "columns"):
        steps.copy(_column(request, name), parts[f"out_{name}"])
    if count:
        base = request.form.base if request.form.format == SparseFormat.CSR else None
        m, n = request.form.shape
        values, rows, columns = (parts[name].pointer.operand for name in request.writes)
        steps.sort_indices((m, n, count), rows, columns, base)
        steps.permute_values(count, request.values.dtype.cuda, place("values"), values)
    for name, part in parts.items():
        steps.copy(part, _column(request, name))
    return steps.plan(capture_safe=not count)


def _column(request: Any, name: str) -> Matrix:
    layout = request.layout_of(name)
    size = layout.size
    return Matrix(OperandPointer(request.place_of(name)), layout.dtype, size, 1, 1, max(1, size))
