"""The operands of a request as matrices and vectors, and steps that plans of several libraries share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cublas_types as cb
from dispatch.libraries.cusolver.calls import FLAG_BYTES, LETTERS, Steps, cuda_type
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer, count_of, matrix_of
from dispatch.libraries.cusolver.spectra import ZeroNonfinite

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.linalg.base import LinalgRequest

__all__ = ["LOWER", "MAX_BATCHED_ROWS", "UPPER", "LinalgSteps"]

LOWER, UPPER = cb.cublasFillMode_t.CUBLAS_FILL_MODE_LOWER, cb.cublasFillMode_t.CUBLAS_FILL_MODE_UPPER
MAX_BATCHED_ROWS = 512  # rows up to which batched routines are used; a larger matrix fills a GPU alone
# Rows up to which `potrsBatched` only reads the factor; for more it overwrites the other triangle (cuSOLVER 12.0).
MAX_READ_ROWS = 64


class LinalgSteps(Steps):
    """The steps of a request's plan, and its operands as matrices."""

    def __init__(self, request: LinalgRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(executor, row, len(request.reads) + len(request.writes), count_of(request.batch))
        self.request = request
        self.dtype = request.matrices.dtype

    def matrix(self, name: str) -> Matrix:
        """An operand as a matrix; a vector has one column."""
        layout = self.request.layout_of(name)
        is_vector = len(layout.shape) == 1
        return matrix_of(layout, self.request.place_of(name), vector=is_vector)

    def vector(self, name: str) -> OperandPointer:
        """A dense vector for each matrix, or a status."""
        layout = self.request.layout_of(name)
        each = layout.shape[len(self.request.batch) :]
        return OperandPointer(self.request.place_of(name), 0, count_of(each) * layout.dtype.itemsize)

    def idle(self) -> Plan:
        """The plan for operands without elements: the status of each matrix is 0."""
        for name in self.request.outputs().keys() & {"count", "info", "iterations"}:
            self.fill_zeros(self.vector(name), self.request.layout_of(name).dtype.itemsize * self.batch)
        return self.plan(capture_safe=False, idle=True)

    def target(self, wanted: Matrix) -> Matrix:
        """A result's own memory if a routine can write it, otherwise scratch memory, which `finish` copies."""
        if wanted.is_column_major:
            return wanted
        return self.scratch_matrix(wanted.dtype, wanted.rows, wanted.cols)

    def column_major(self, matrix: Matrix, mode: CopyMode = CopyMode.ALL) -> Matrix:
        """A matrix itself if a routine can read it, otherwise a column-major copy in scratch memory."""
        if matrix.is_column_major:
            return matrix
        copy = self.scratch_matrix(matrix.dtype, matrix.rows, matrix.cols)
        self.copy(matrix, copy, mode)
        return copy

    def finish(self, made: Matrix, wanted: Matrix) -> None:
        """Copy a result to its memory, if it is not there."""
        if made != wanted:
            self.copy(made, wanted)

    def zero_nonfinite(self, a: Matrix) -> OperandPointer:
        """Replace matrices that are not finite by zeros; returns a flag for each: 1 for these, otherwise 0.

        Of such matrices cuSOLVER 12.0 did not return (`gesvd` of some with one column), ended with an internal error
        that fails the whole batch (`geev`, `gesvdp`, `gesvdr`), or gave finite numbers and a status of 0.
        """
        flags = self.scratch(FLAG_BYTES)
        self.append(ZeroNonfinite(self.executor, a, flags, self.batch))
        return flags

    def solve_cholesky(self, c: Matrix, x: Matrix, *, lower: bool) -> None:
        """Solve with a Cholesky factor: `potrs` over each matrix, or one batched call for one right-hand side each."""
        uplo, kind, info = LOWER if lower else UPPER, cuda_type(c.dtype), self.ignored_info()
        if self.batch > 1 and c.rows <= MAX_BATCHED_ROWS and x.cols == 1:
            if c.rows > MAX_READ_ROWS and c.pointer.operand < len(self.request.reads):
                operand, c = c, self.scratch_matrix(c.dtype, c.rows, c.cols)
                self.copy(operand, c)
            lists = (self.pointers(c), c.ld, self.pointers(x), x.ld)
            name = f"cusolverDn{LETTERS[c.dtype]}potrsBatched"
            self.call(name, uplo, c.rows, 1, *lists, info, self.batch, count=1)
            return
        self.call_params("cusolverDnXpotrs", uplo, c.rows, x.cols, kind, c.pointer, c.ld, kind, x.pointer, x.ld, info)
