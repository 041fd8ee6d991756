"""Rows as offsets or as indices, by cuSPARSE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Call, Steps

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without rows or elements it writes zeros, or nothing."""
    steps = Steps(executor, row, len(request.reads) + len(request.writes))
    if not request.rows.size or getattr(request, "nnz", 1) == 0:
        return _fill_zeros(request, steps)
    return _convert(request, steps)


def _fill_zeros(request: Any, steps: Steps) -> Plan:
    """Write the result for no elements: a count of 0, or offsets that are all 0."""
    for name in request.writes:
        size = request.layout_of(name).size
        if not size:
            continue
        target = Matrix(OperandPointer(request.place_of(name)), request.layout_of(name).dtype, size, 1, 1, max(1, size))
        steps.fill_zeros(target)
    return steps.plan(capture_safe=True)


def _convert(request: Any, steps: Steps) -> Plan:
    """Xcoo2csr or Xcsr2coo."""
    rows, out = OperandPointer(0), OperandPointer(1)
    base = cusparse.cusparseIndexBase_t(request.base)
    if request.op == "coo2csr":
        steps.append(Call(steps.executor, "cusparseXcoo2csr", (rows, request.rows.size, request.m, out, base)))
    else:
        lines = request.rows.size - 1
        steps.append(Call(steps.executor, "cusparseXcsr2coo", (rows, request.nnz, lines, out, base)))
    return steps.plan(capture_safe=True)
