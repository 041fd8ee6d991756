"""Batches of products by cuSPARSE's SpMM: descriptors of one matrix, and how far the next one is.

Where each A in CSR has row offsets of its own, or is transposed, it is a call for each: of such a batch cuSPARSE 12.6
takes the first one's offsets for all, with every algorithm (seen on an H100 and an H200). So it is where the library
has no words for how far the parts are apart: of a pattern for all with elements for each, for columns and values have
one distance in CSR (cusparseCsrSetStridedBatch), and the three parts have in COO (cusparseCooSetStridedBatch).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.core.matrix_choices import Operation
from dispatch.errors import WorkerFailed
from dispatch.libraries.cusolver.matrix import Matrix, Place
from dispatch.libraries.cusparse.calls import Call, RepeatedCall
from dispatch.libraries.cusparse.descriptors import DenseMatrix, Sparse, SparseMatrix
from dispatch.ops.sparse.algorithms import SpmmAlgorithm
from dispatch.ops.sparse.cusparse import PARTS, Making
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.rules import leading, matrix_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

MOST_BATCHES = 65_535  # of a call of cusparseSpMM, as its documentation says


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
        kind: Callable[..., Call] = Call
        if self.is_one_by_one:
            names = (*PARTS, "b", "out")
            apart = {
                request.place_of(name): self.apart(name) * request.layout_of(name).dtype.itemsize for name in names
            }
            kind = partial(RepeatedCall, count=request.batch, apart=apart)
        given = (self.number("alpha"), self.sparse_stack(), b, self.number("beta"), c, self.kind)
        operations = self.operation(request.trans), cusparse.cusparseOperation_t(turn)
        algorithm = cusparse.cusparseSpMMAlg_t(int(self.algorithm))
        self.steps.call("cusparseSpMM", *operations, *given, algorithm, kind=kind)
        return self.steps.plan(capture_safe=True)

    @property
    def algorithm(self) -> SpmmAlgorithm:
        """That of the request; of COO left open the one that NVIDIA's sample of a batch has.

        The library's own choice for one matrix reads 16 bytes at once, and a matrix of a batch begins anywhere.
        """
        request = self.request
        is_open = request.algorithm is SpmmAlgorithm.DEFAULT and request.form.format == SparseFormat.COO
        chosen: SpmmAlgorithm = SpmmAlgorithm.COO_ALG4 if is_open else request.algorithm
        return chosen

    @property
    def is_one_by_one(self) -> bool:
        """Whether there is a call for each matrix."""
        request = self.request
        values, rows, columns = map(self.apart, PARTS)
        # Of indices of their own in COO cuSPARSE 12.6 gave wrong sums on an H200.
        together = columns == values and rows == 0 and (values == 0 or request.form.format != SparseFormat.COO)
        behind = values == 0 or values >= request.values.shape[-1]  # else the library refuses the distance
        is_one_call = together and behind and request.trans is Operation.N and request.batch <= MOST_BATCHES
        return request.batch > 1 and not is_one_call

    def apart(self, name: str) -> int:
        """How many elements further the next matrix of an operand begins; 0 where one is for all."""
        layout = self.request.layout_of(name)
        alone = 1 if name in PARTS else len(("rows", "columns"))  # axes of one matrix
        return layout.strides[0] if len(layout.shape) > alone and layout.shape[0] > 1 else 0

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
        if not self.is_one_by_one:
            made.stack(layout.shape[0], layout.strides[0])
        return made, turn

    def sparse_stack(self) -> SparseMatrix:
        """The descriptor of a batch of A; one A for all is 0 apart."""
        request = self.request
        values, rows, columns = (request.layout_of(name) for name in PARTS)
        said = Sparse(
            int(request.form.format),
            request.form.shape,
            values.shape[-1],
            request.form.base,
            request.form.block,
            values.dtype.cuda,
            rows.dtype.itemsize,
            columns.dtype.itemsize,
            *(request.place_of(name) for name in PARTS),
        )
        made = SparseMatrix(said, self.steps.placeholder)
        if not self.is_one_by_one:
            made.stack(request.batch, self.apart("rows"), self.apart("values"))
        return made
