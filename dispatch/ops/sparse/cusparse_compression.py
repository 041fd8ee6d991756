"""Dense matrices made sparse, and rows as offsets or as indices, by cuSPARSE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.errors import WorkerFailed
from dispatch.libraries.cusolver.matrix import Matrix, Place
from dispatch.libraries.cusparse.calls import Call, Steps
from dispatch.libraries.cusparse.dense import Conversion
from dispatch.libraries.cusparse.descriptors import DenseMatrix, Sparse
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.rules import leading

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; one without rows or elements is zeros, or nothing."""
    steps = Steps(executor, row, len(request.reads) + len(request.writes))
    if not getattr(request, request.reads[0]).size or getattr(request, "nnz", 1) == 0:
        return _zeros(request, steps)
    return _of_lines(request, steps) if request.op in ("coo2csr", "csr2coo") else _of_dense(request, steps)


def _zeros(request: Any, steps: Steps) -> Plan:
    """What is written where there is nothing to be found: a count of 0, and offsets that all are."""
    for name in request.writes:
        size = request.layout_of(name).size
        if not size:
            continue
        target = Matrix(Place(request.place_of(name)), request.layout_of(name).dtype, size, 1, 1, max(1, size))
        steps.zeros(target)
    return steps.plan(capture_safe=True)


def _of_dense(request: Any, steps: Steps) -> Plan:
    """DenseToSparse. To count, COO does, which has no offsets that an analysis could write."""
    layout, counts = request.a.layout, request.op == "dense_nnz"
    by_rows = leading(layout, by_rows=True) is not None
    ld = leading(layout, by_rows=by_rows)
    if ld is None:
        raise WorkerFailed(f"a is neither row-major nor column-major: {layout}")
    kind = layout.dtype.cuda
    source = DenseMatrix(layout.shape, ld, kind, request.place_of("a"), steps.placeholder, by_rows=by_rows)
    if counts:
        said = Sparse(int(SparseFormat.COO), layout.shape, 0, 0, (1, 1), kind, 4, 4, 0, 0, 0)
    else:
        places = [request.place_of(name) for name in request.writes]
        item = request.layout_of("out_rows").dtype.itemsize
        said = Sparse(int(request.format), layout.shape, request.nnz, 0, (1, 1), kind, item, item, *places)
    steps.append(Conversion(steps.executor, source, said, request.place_of("out") if counts else None))
    return steps.plan(capture_safe=False)


def _of_lines(request: Any, steps: Steps) -> Plan:
    """Xcoo2csr or Xcsr2coo."""
    rows, out = Place(0), Place(1)
    base = cusparse.cusparseIndexBase_t(request.base)
    if request.op == "coo2csr":
        steps.append(Call(steps.executor, "cusparseXcoo2csr", (rows, request.rows.size, request.m, out, base)))
    else:
        lines = request.rows.size - 1
        steps.append(Call(steps.executor, "cusparseXcsr2coo", (rows, request.nnz, lines, out, base)))
    return steps.plan(capture_safe=True)
