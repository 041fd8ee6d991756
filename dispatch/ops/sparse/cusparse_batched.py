"""Batches of products by cuSPARSE's SpMM: descriptors of one matrix, and the strides to the next one.

There is a call for each matrix if each A in CSR has its own row offsets, or is transposed: for such a batch cuSPARSE
12.6 uses the first one's offsets for all, with every algorithm (seen on an H100 and an H200). The same holds if the
library cannot express the strides: those of a shared pattern with elements for each matrix, because columns and values
have one stride in CSR (cusparseCsrSetStridedBatch), as have all three parts in COO (cusparseCooSetStridedBatch); for
CSC and BSR it has no strides. 16-bit sums, which algorithms round at each addition, are f32 and rounded at the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.core.matrix_choices import Operation
from dispatch.errors import WorkerFailed
from dispatch.keys import F32, HALF
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Call, RepeatedCall
from dispatch.libraries.cusparse.descriptors import DenseMatrix, SparseMatrix, SparseSpec
from dispatch.ops.sparse.algorithms import SpmmAlgorithm
from dispatch.ops.sparse.batched_rules import axes_of, nnz_of
from dispatch.ops.sparse.cusparse import PARTS, PlanMaker
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.rules import first_matrix_layout, leading_dimension

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

MAX_BATCHES = 65_535  # of a call of cusparseSpMM, according to its documentation
VECTOR = 16  # bytes: the alignment of sums


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; with autotune, the plan with the fastest algorithm."""
    if request.autotune and not request.algorithm:
        from dispatch.ops.sparse.tune import fastest_plan  # few requests are tuned

        return fastest_plan(request, executor, lambda tried: BatchPlanMaker(tried, executor, row).plan())
    return BatchPlanMaker(request, executor, row).plan()


class BatchPlanMaker(PlanMaker):
    """Makes the plan of a batch."""

    def plan(self) -> Plan:
        """SpMM over a batch."""
        request = self.request
        out = request.layout_of("out")
        if not out.size:
            return self.steps.idle_plan()
        if not nnz_of(request):
            self.steps.fill_zeros(self.batch_matrix("out"), request.batch)
            return self.steps.plan(capture_safe=True)
        by_rows = leading_dimension(first_matrix_layout(request, out), by_rows=True) is not None
        if out.dtype in HALF:
            sums, place = self.sums_layout(by_rows=by_rows), self.steps.allocate(out.size * F32.itemsize)
        else:
            sums, place = out, request.place_of("out")
        if request.reads_added:
            self.copy_batch(request.layout_of("c"), request.place_of("c"), sums, place)
        c, _ = self.dense_batch(sums, place, by_rows=by_rows)
        b, turn = self.dense_batch(request.layout_of("b"), request.place_of("b"), by_rows=by_rows)
        kind: Callable[..., Call] = Call
        if self.is_one_by_one:
            names = (*PARTS, "b")
            strides = {
                request.place_of(name): self.batch_stride(name) * request.layout_of(name).dtype.itemsize
                for name in names
            }
            strides[place] = (sums.strides[0] if request.batch > 1 else 0) * sums.dtype.itemsize
            kind = partial(RepeatedCall, count=request.batch, strides=strides)
        arguments = (self.factor("alpha"), self.sparse_batch(), b, self.factor("beta"), c, self.kind)
        operations = self.operation(request.trans), cusparse.cusparseOperation_t(turn)
        algorithm = cusparse.cusparseSpMMAlg_t(int(self.algorithm))
        self.steps.call("cusparseSpMM", *operations, *arguments, algorithm, kind=kind)
        if sums is not out:
            self.copy_batch(sums, place, out, request.place_of("out"))
        return self.steps.plan(capture_safe=True)

    def sums_layout(self, *, by_rows: bool) -> Layout:
        """The layout of sums in f32, in the order of the results, with contiguous matrices."""
        count, m, n = self.request.layout_of("out").shape
        strides = (m * n, n, 1) if by_rows else (m * n, 1, m)
        layout: Layout = self.request.device.layout(F32, (count, m, n), strides, VECTOR)
        return layout

    def copy_batch(self, source: Layout, place: int, target: Layout, target_place: int) -> None:
        """Copy a batch; to another dtype matrix by matrix, or as one matrix if they are contiguous."""
        one, other = batch_at(source, place), batch_at(target, target_place)
        if source.dtype is target.dtype:
            self.steps.copy(one, other, source.shape[0])
        elif is_tall(source) and is_tall(target):
            count = source.shape[0]
            self.steps.copy_rounded(one.first_rows(count * one.rows), other.first_rows(count * other.rows))
        else:
            for number in range(source.shape[0]):
                self.steps.copy_rounded(
                    *(each._replace(pointer=nth_place(each.pointer, number)) for each in (one, other))
                )

    @property
    def algorithm(self) -> SpmmAlgorithm:
        """The algorithm of the request; for COO the default is that of NVIDIA's batch sample.

        The library's default for one matrix reads 16 bytes at once, but a matrix of a batch may begin anywhere.
        """
        request = self.request
        is_open = request.algorithm is SpmmAlgorithm.DEFAULT and request.form.format == SparseFormat.COO
        chosen: SpmmAlgorithm = SpmmAlgorithm.COO_ALG4 if is_open else request.algorithm
        return chosen

    @property
    def is_one_by_one(self) -> bool:
        """Whether there is a call for each matrix."""
        request = self.request
        if request.form.format in (SparseFormat.CSC, SparseFormat.BSR):
            return True
        values, rows, columns = map(self.batch_stride, PARTS)
        # For COO with separate indices cuSPARSE 12.6 gave wrong sums on an H200.
        together = columns == values and rows == 0 and (values == 0 or request.form.format != SparseFormat.COO)
        is_valid_stride = values == 0 or values >= request.values.shape[-1]  # else the library refuses the stride
        is_one_call = together and is_valid_stride and request.trans is Operation.N and request.batch <= MAX_BATCHES
        is_one_call = is_one_call and self.batch_stride("b") != 0  # a B for all is not documented
        return request.batch > 1 and not is_one_call

    def batch_stride(self, name: str) -> int:
        """The stride in elements to the next matrix of an operand; 0 if it is shared."""
        layout = self.request.layout_of(name)
        alone = axes_of(self.request, name) if name in PARTS else len(("rows", "columns"))  # axes of one matrix
        return layout.strides[0] if len(layout.shape) > alone and layout.shape[0] > 1 else 0

    def batch_matrix(self, name: str) -> Matrix:
        """A batch of dense matrices, to be copied."""
        return batch_at(self.request.layout_of(name), self.request.place_of(name))

    def dense_batch(self, layout: Layout, place: int, *, by_rows: bool) -> tuple[DenseMatrix, int]:
        """The descriptor of a batch in a given order, and the operation that this order requires."""
        one = first_matrix_layout(self.request, layout)
        shape, turn, ld = one.shape, 0, leading_dimension(one, by_rows=by_rows)
        if ld is None:  # it is the transpose of a matrix of the wanted order
            shape, turn, ld = shape[::-1], 1, leading_dimension(one, by_rows=not by_rows)
        if ld is None:
            raise WorkerFailed(f"an operand is neither row-major nor column-major: {layout}")
        batch = DenseMatrix((shape[0], shape[1]), ld, layout.dtype.cuda, place, self.steps.placeholder, by_rows=by_rows)
        if not self.is_one_by_one:
            batch.set_batch(layout.shape[0], layout.strides[0])
        return batch, turn

    def sparse_batch(self) -> SparseMatrix:
        """The descriptor of a batch of A; a shared A has strides of 0."""
        request = self.request
        values, rows, columns = (request.layout_of(name) for name in PARTS)
        spec = SparseSpec(
            int(request.form.format),
            request.form.shape,
            nnz_of(request),
            request.form.base,
            request.form.block,
            values.dtype.cuda,
            rows.dtype.itemsize,
            columns.dtype.itemsize,
            *(request.place_of(name) for name in PARTS),
        )
        matrix = SparseMatrix(spec, self.steps.placeholder)
        if not self.is_one_by_one:
            matrix.set_batch(request.batch, self.batch_stride("rows"), self.batch_stride("values"))
        return matrix


def batch_at(layout: Layout, operand: int) -> Matrix:
    """A batch of dense matrices of a layout."""
    step, *strides = layout.strides
    place = OperandPointer(operand, batch_stride=step * layout.dtype.itemsize)
    return Matrix(place, layout.dtype, *layout.shape[1:], *strides)


def nth_place(place: OperandPointer, number: int) -> OperandPointer:
    """The place of one matrix of a batch."""
    return OperandPointer(place.operand, place.offset + number * place.batch_stride)


def is_tall(layout: Layout) -> bool:
    """Whether the rows of a batch have one common stride, as in a single tall matrix."""
    (count, rows, _), (step, line, _) = layout.shape, layout.strides
    return count == 1 or step == rows * line
