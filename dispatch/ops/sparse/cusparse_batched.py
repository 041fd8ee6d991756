"""Batches of products by cuSPARSE's SpMM: descriptors of one matrix, and how far the next one is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.errors import WorkerFailed
from dispatch.libraries.cusolver.matrix import Matrix, Place
from dispatch.libraries.cusparse.descriptors import DenseMatrix, Sparse, SparseMatrix
from dispatch.ops.sparse.cusparse import Making
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.rules import leading, matrix_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; of one that is to be tuned, that with the fastest algorithm."""
    if request.autotune and not request.algorithm:
        from dispatch.ops.sparse.tune import fastest_plan  # few requests are tuned

        return fastest_plan(request, executor, lambda tried: MakingBatch(tried, executor, row).batch())
    return MakingBatch(request, executor, row).batch()


class MakingBatch(Making):
    """A batch whose plan is made."""

    def batch(self) -> Plan:
        """SpMM over a batch."""
        request = self.request
        out = request.layout_of("out")
        if not out.size:
            return self.steps.idle()
        if not request.values.shape[-1]:
            self.steps.zeros(self.stack("out"), request.batch)
            return self.steps.plan(capture_safe=True)
        if request.reads_added:
            self.steps.copy(self.stack("c"), self.stack("out"), request.batch)
        by_rows = leading(matrix_of(request, out), by_rows=True) is not None
        c, _ = self.dense_stack("out", by_rows=by_rows)
        b, turn = self.dense_stack("b", by_rows=by_rows)
        given = (self.number("alpha"), self.sparse_stack(), b, self.number("beta"), c, self.kind)
        operations = self.operation(request.trans), cusparse.cusparseOperation_t(turn)
        algorithm = cusparse.cusparseSpMMAlg_t(int(request.algorithm))
        self.steps.call("cusparseSpMM", *operations, *given, algorithm)
        return self.steps.plan(capture_safe=True)

    def stack(self, name: str) -> Matrix:
        """A batch of dense matrices, to be copied."""
        layout = self.request.layout_of(name)
        step, *strides = layout.strides
        place = Place(self.request.place_of(name), step=step * layout.dtype.itemsize)
        return Matrix(place, layout.dtype, *layout.shape[1:], *strides)

    def dense_stack(self, name: str, *, by_rows: bool) -> tuple[DenseMatrix, int]:
        """The descriptor of a batch in one order, and what is done to each matrix then."""
        layout = self.request.layout_of(name)
        one = matrix_of(self.request, layout)
        shape, turn, ld = one.shape, 0, leading(one, by_rows=by_rows)
        if ld is None:  # it is the transpose of one of the wanted order
            shape, turn, ld = shape[::-1], 1, leading(one, by_rows=not by_rows)
        if ld is None:
            raise WorkerFailed(f"{name} is neither row-major nor column-major: {layout}")
        at = self.request.place_of(name), self.steps.placeholder
        made = DenseMatrix((shape[0], shape[1]), ld, layout.dtype.cuda, *at, by_rows=by_rows)
        made.stack(layout.shape[0], layout.strides[0])
        return made, turn

    def sparse_stack(self) -> SparseMatrix:
        """The descriptor of a batch of A; one A for all is 0 apart."""
        request = self.request
        parts = [request.layout_of(name) for name in ("values", "rows", "columns")]
        values, rows, columns = parts
        said = Sparse(
            int(SparseFormat.CSR),
            request.form.shape,
            values.shape[-1],
            request.form.base,
            request.form.block,
            values.dtype.cuda,
            rows.dtype.itemsize,
            columns.dtype.itemsize,
            *(request.place_of(name) for name in ("values", "rows", "columns")),
        )
        made = SparseMatrix(said, self.steps.placeholder)
        apart = [layout.strides[0] if len(layout.shape) > 1 else 0 for layout in (rows, values)]
        made.stack(request.batch, *apart)
        return made
