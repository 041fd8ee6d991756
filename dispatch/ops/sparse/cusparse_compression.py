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
    from dispatch.device.layout import Layout
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
    """DenseToSparse. To count, COO does, which has no offsets that an analysis could write.

    The library looks at tiles of 32 by 32. Along the lines of A the elements come out in order, across them those of
    several tiles come as the tiles are done: A is turned first where its lines are not those of the result.
    """
    layout, counts = request.a.layout, request.op == "dense_nnz"
    by_rows = leading(layout, by_rows=True) is not None
    place, ld = request.place_of("a"), leading(layout, by_rows=by_rows)
    if not counts:
        by_rows = request.format != SparseFormat.CSC
        ld = leading(layout, by_rows=by_rows)
        if ld is None:
            place, ld = _turned(layout, steps, by_rows=by_rows)
    if ld is None:
        raise WorkerFailed(f"a is neither row-major nor column-major: {layout}")
    kind = layout.dtype.cuda
    source = DenseMatrix(layout.shape, ld, kind, place, steps.placeholder, by_rows=by_rows)
    if counts:
        said = Sparse(int(SparseFormat.COO), layout.shape, 0, 0, (1, 1), kind, 4, 4, 0, 0, 0)
    else:
        places = [request.place_of(name) for name in request.writes]
        item = request.layout_of("out_rows").dtype.itemsize
        said = Sparse(int(request.format), layout.shape, request.nnz, 0, (1, 1), kind, item, item, *places)
    steps.append(Conversion(steps.executor, source, said, request.place_of("out") if counts else None))
    return steps.plan(capture_safe=False)


def _turned(layout: Layout, steps: Steps, *, by_rows: bool) -> tuple[int, int]:
    """A copied into the plan's memory in the other order: the place of that, and the leading dimension."""
    m, n = layout.shape
    ld = n if by_rows else m
    place = steps.room(layout.size * layout.dtype.itemsize)
    strides = (ld, 1) if by_rows else (1, ld)
    source = Matrix(Place(0), layout.dtype, m, n, *layout.strides)  # a is the first of all operands
    steps.copy(source, Matrix(Place(place), layout.dtype, m, n, *strides))
    return place, ld


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
