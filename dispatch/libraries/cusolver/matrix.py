"""Matrices as LAPACK's routines take them: where one is, or each of a batch, and how far rows and columns are apart.

Pure arithmetic over layouts; nothing here calls a library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.keys import Dtype

__all__ = ["Matrix", "Place", "batch_step", "count_of", "matrix_of"]

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where something is: in an operand, by its position in a plan's addresses, so many bytes behind its beginning.

    `step` is how many bytes further the same of the next matrix of a batch is.
    """

    operand: int
    offset: int = 0
    step: int = 0


class Matrix(NamedTuple):
    """A matrix, or a batch of them: `row` and `col` are the elements from one row, or column, to the next."""

    place: Place
    dtype: Dtype
    rows: int
    cols: int
    row: int
    col: int

    @property
    def mT(self) -> Matrix:  # as arrays have it
        """The transposed matrix, in the same memory."""
        return self._replace(rows=self.cols, cols=self.rows, row=self.col, col=self.row)

    @property
    def by_columns(self) -> bool:
        """Whether a routine can take it: columns one behind another, each dense."""
        return (self.row == 1 or self.rows == 1) and (self.cols == 1 or self.col >= max(1, self.rows))

    @property
    def ld(self) -> int:
        """The leading dimension of a matrix that is `by_columns`."""
        return max(1, self.rows) if self.cols == 1 else self.col

    def columns(self, count: int) -> Matrix:
        """Its first columns."""
        return self._replace(cols=count)

    def lines(self, count: int) -> Matrix:
        """Its first rows."""
        return self._replace(rows=count)


def count_of(shape: Shape) -> int:
    """How many matrices some leading axes hold."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def batch_step(shape: Shape, strides: Shape) -> int | None:
    """The elements from one matrix of some leading axes to the next; None where it is not the same everywhere."""
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
    """An operand as a matrix; its last axis as the one column of a matrix, if it is a `vector`."""
    shape, strides = layout.shape, layout.strides
    if vector:
        shape, strides = (*shape, 1), (*strides, max(1, layout.shape[-1]))
    step = batch_step(shape[:-2], strides[:-2]) or 0
    place = Place(operand, 0, step * layout.dtype.itemsize)
    return Matrix(place, layout.dtype, *shape[-2:], *strides[-2:])
