"""Products of matrices in sliced and in blocked ELL as calls of cuSPARSE: SpMV and SpMM by the formats' own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.libraries.cusparse.ell import BlockedEllSpec, EllMatrix, SlicedEllSpec
from dispatch.ops.sparse.cusparse import PlanMaker, is_row_major

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without elements it writes zeros."""
    return EllPlanMaker(request, executor, row).plan()


class EllPlanMaker(PlanMaker):
    """Makes the plan of a request."""

    def plan(self) -> Plan:
        request = self.request
        if not request.layout_of("out").size:
            return self.steps.idle_plan()
        if not request.values.size or not request.x.size if request.op == "sell_mv" else not request.b.size:
            return self.without_elements()
        self.copy_added(request.added)
        return self.by_slices() if request.op == "sell_mv" else self.by_blocks()

    def by_slices(self) -> Plan:
        """SpMV of sliced ELL."""
        request, place = self.request, self.request.place_of
        widths = request.offsets.dtype.itemsize, request.columns.dtype.itemsize
        places = (place("offsets"), place("columns"), place("values"))
        shape, kind = (request.m, request.x.shape[0]), request.values.dtype.cuda
        size = request.values.shape[0]
        spec = SlicedEllSpec(shape, request.nnz, size, request.slice_size, *widths, kind, *places)
        a = EllMatrix(spec, self.steps.placeholder)
        arguments = (self.factor("alpha"), a, self.dense_vector("x"), self.factor("beta"), self.dense_vector("out"))
        algorithm = cusparse.cusparseSpMVAlg_t.CUSPARSE_SPMV_SELL_ALG1
        self.steps.call("cusparseSpMV", cusparse.cusparseOperation_t(0), *arguments, self.kind, algorithm)
        return self.steps.plan(capture_safe=True)

    def by_blocks(self) -> Plan:
        """SpMM of blocked ELL."""
        request, place = self.request, self.request.place_of
        (m, width), n = request.values.shape, request.b.shape[0]
        kind, index = request.values.dtype.cuda, request.columns.dtype.itemsize
        spec = BlockedEllSpec((m, n), request.block, width, index, kind, place("columns"), place("values"))
        a = EllMatrix(spec, self.steps.placeholder)
        by_rows = is_row_major(request.layout_of("out"))
        out, _ = self.dense_matrix("out", like=by_rows)
        b, turn = self.dense_matrix("b", like=by_rows)
        arguments = (self.factor("alpha"), a, b, self.factor("beta"), out, self.kind)
        operations = cusparse.cusparseOperation_t(0), cusparse.cusparseOperation_t(int(turn))
        algorithm = cusparse.cusparseSpMMAlg_t.CUSPARSE_SPMM_BLOCKED_ELL_ALG1
        self.steps.call("cusparseSpMM", *operations, *arguments, algorithm)
        return self.steps.plan(capture_safe=True)
