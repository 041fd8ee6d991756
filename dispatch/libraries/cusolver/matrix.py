"""Matrices as LAPACK arguments: a pointer, extents and strides, including the stride of a batch.

Pure arithmetic over layouts; no library is called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.keys import Dtype

__all__ = ["Matrix", "OperandPointer", "batch_step", "count_of", "matrix_of"]

Shape = tuple[int, ...]


class OperandPointer(NamedTuple):
    """A pointer into an operand of a plan; each run computes its address.

    Attributes:
        operand: the operand's index in the addresses of a run.
        offset: bytes from the operand's address.
        batch_stride: bytes from here to the same element of the next matrix of a batch.
    """

    operand: int
    offset: int = 0
    batch_stride: int = 0


class Matrix(NamedTuple):
    """A matrix, or a batch of them; strides are in elements."""

    pointer: OperandPointer
    dtype: Dtype
    rows: int
    cols: int
    row_stride: int
    col_stride: int

    @property
    def mT(self) -> Matrix:  # the name that arrays use
        """The transposed matrix, in the same memory."""
        return self._replace(rows=self.cols, cols=self.rows, row_stride=self.col_stride, col_stride=self.row_stride)

    @property
    def is_column_major(self) -> bool:
        """Whether a LAPACK routine supports it: each column is dense, and the columns do not overlap."""
        return (self.row_stride == 1 or self.rows == 1) and (self.cols == 1 or self.col_stride >= max(1, self.rows))

    @property
    def ld(self) -> int:
        """The leading dimension of a column-major matrix."""
        return max(1, self.rows) if self.cols == 1 else self.col_stride

    def first_columns(self, count: int) -> Matrix:
        """Its first columns."""
        return self._replace(cols=count)

    def first_rows(self, count: int) -> Matrix:
        """Its first rows."""
        return self._replace(rows=count)


def count_of(shape: Shape) -> int:
    """The number of matrices along some leading axes."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def batch_step(shape: Shape, strides: Shape) -> int | None:
    """The distance in elements between matrices along some leading axes; None if it is not constant."""
    step: int | None = None
    reach = 0
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            continue
        if step is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * extent
    return step or 0


def matrix_of(layout: Layout, operand: int, *, vector: bool = False) -> Matrix:
    """An operand as a matrix; for a `vector` the last axis becomes the only column."""
    shape, strides = layout.shape, layout.strides
    if vector:
        shape, strides = (*shape, 1), (*strides, max(1, layout.shape[-1]))
    step = batch_step(shape[:-2], strides[:-2]) or 0
    pointer = OperandPointer(operand, 0, step * layout.dtype.itemsize)
    return Matrix(pointer, layout.dtype, *shape[-2:], *strides[-2:])
