"""Conversion of matrices to sliced and blocked ELL: `dispatch.sparse.tosell` and `toblocked_ell`.

They are converted on the host once, and multiplied on their device any number of times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from dispatch.checks import check_int, names_arguments
from dispatch.device.device import Device
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest, BadType, type_shown
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.matrix_reference import coordinates
from dispatch.ops.sparse.sources import is_sparse, sparse_tensor
from dispatch.ops.sparse.tensor import SparseTensor, as_tensor

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = [
    "BlockedEllMatrix",
    "Elements",
    "SlicedEllMatrix",
    "blocks_of",
    "elements_of",
    "elements_of_dense",
    "slices_of",
    "toblocked_ell",
    "tosell",
]

MAX_SIZE = 2**20


class Elements(NamedTuple):
    """The stored elements of a matrix, on the host, row by row, including zeros, and duplicates, which are added up."""

    row: Array
    column: Array
    values: Array
    shape: tuple[int, int]


class SlicedEllMatrix(NamedTuple):
    """A matrix in sliced ELL: `a @ x` is the request `sell_mv`."""

    values: Tensor
    offsets: Tensor
    columns: Tensor
    shape: tuple[int, int]
    slice_size: int
    nnz: int

    def __matmul__(self, x: Any) -> Any:
        check_operand("x", x, 1, self.shape[1])
        parts = (self.values, self.offsets, self.columns)
        return ops.sell_mv(*parts, x, m=self.shape[0], slice_size=self.slice_size, nnz=self.nnz)

    def __rmatmul__(self, x: Any) -> NoReturn:
        raise TypeError(f"sliced ELL cannot be the right operand of @ for {type_shown(x)}: use tosell(transpose) @ x")

    def __array__(self, *_given: Any, **_choices: Any) -> NoReturn:
        raise TypeError("a SlicedEllMatrix cannot be converted to a NumPy array: use a @ x")


class BlockedEllMatrix(NamedTuple):
    """A matrix in blocked ELL: `a @ b` is the request `blocked_ell_mm`."""

    values: Tensor
    columns: Tensor
    shape: tuple[int, int]
    block: int

    def __matmul__(self, b: Any) -> Any:
        check_operand("b", b, 2, self.shape[1])
        return ops.blocked_ell_mm(self.values, self.columns, b)

    def __rmatmul__(self, b: Any) -> NoReturn:
        raise TypeError(
            f"blocked ELL cannot be the right operand of @ for {type_shown(b)}: use toblocked_ell(transpose) @ b.T"
        )

    def __array__(self, *_given: Any, **_choices: Any) -> NoReturn:
        raise TypeError("a BlockedEllMatrix cannot be converted to a NumPy array: use a @ b")


# The operators of NumPy and of tensors defer to theirs; the body of a named tuple takes no such attributes.
SlicedEllMatrix.__array_ufunc__ = BlockedEllMatrix.__array_ufunc__ = None  # type: ignore[attr-defined]
SlicedEllMatrix.multiplies_tensors = BlockedEllMatrix.multiplies_tensors = True  # type: ignore[attr-defined]


def check_operand(name: str, given: Any, axes: int, rows: int) -> None:
    """BadRequest unless an operand has so many axes and rows; BadType if it has no shape."""
    shape = getattr(given, "shape", None)
    what = f"a vector of {rows} elements" if axes == 1 else f"a matrix of {rows} rows"
    if not isinstance(shape, tuple):
        raise BadType(name, type_shown(given), what, "dev.array(x)")
    if len(shape) != axes or shape[0] != rows:
        raise BadRequest(name, f"shape {tuple(shape)}", what)


@names_arguments
def tosell(matrix: Any, *, slice_size: int = 32, device: Device | str | None = None) -> SlicedEllMatrix:
    """A dense or a sparse matrix in sliced ELL on a device; if `device` is left out, on the matrix's own.

    All stored elements of a sparse matrix are converted, including zeros and duplicates; of a dense one the nonzeros.
    """
    check_int("slice_size", slice_size, 1, MAX_SIZE)
    elements, home = elements_of(matrix, device)
    values, offsets, columns = slices_of(elements, slice_size, np.int32)
    on_device, ends, places = map(home.array, (values, offsets, columns))
    return SlicedEllMatrix(on_device, ends, places, elements.shape, slice_size, len(elements.row))


@names_arguments
def toblocked_ell(matrix: Any, *, block: int = 16, device: Device | str | None = None) -> BlockedEllMatrix:
    """A dense or a sparse matrix in blocked ELL on a device; if `device` is left out, on its own. See `tosell`.

    `block` is a power of 2, 2 or more.
    """
    check_int("block", block, 2, MAX_SIZE)
    if block & (block - 1):
        raise BadRequest("block", str(block), "a power of 2")
    elements, home = elements_of(matrix, device)
    if any(extent % block or not extent for extent in elements.shape):
        raise BadRequest("matrix", f"shape {elements.shape}", f"whole blocks of {block}", "pad it with zeros")
    values, columns = blocks_of(elements, block, np.int32)
    return BlockedEllMatrix(home.array(values), home.array(columns), elements.shape, block)


def elements_of(matrix: Any, device: Device | str | None = None) -> tuple[Elements, Device]:
    """The stored elements of a matrix, on the host, and the target device."""
    named = device if device is None or isinstance(device, Device) else device_of(device)
    if hasattr(matrix, "tocsr") and str(getattr(matrix, "format", "")).upper() not in SparseFormat.__members__:
        matrix = matrix.tocsr()  # SciPy's other formats
    if is_sparse(matrix):
        matrix = sparse_tensor(matrix)
    if isinstance(matrix, SparseTensor):
        return elements_of_sparse(matrix), matrix.device if named is None else named
    dense = as_tensor("matrix", np.asarray(matrix) if isinstance(matrix, (list, tuple)) else matrix)
    if dense.ndim != 2:
        raise BadRequest("matrix", f"shape {dense.shape}", "a matrix, with two axes")
    return elements_of_dense(dense.numpy()), dense.device if named is None else named


def elements_of_sparse(matrix: SparseTensor) -> Elements:
    """The stored elements of a SparseTensor, row by row."""
    row, column = coordinates(matrix.form, matrix.rows.numpy(), matrix.columns.numpy())
    high, wide = matrix.form.block
    if (high, wide) != (1, 1):
        row = (row[:, None, None] * high + np.arange(high)[:, None] + 0 * np.arange(wide)).ravel()
        column = (column[:, None, None] * wide + 0 * np.arange(high)[:, None] + np.arange(wide)).ravel()
    order = np.argsort(row, kind="stable")
    return Elements(row[order], column[order], matrix.values.numpy().reshape(-1)[order], matrix.shape)


def elements_of_dense(dense: Array) -> Elements:
    """The elements of a dense matrix that are not 0."""
    row, column = np.nonzero(dense)
    return Elements(row, column, dense[row, column], (dense.shape[0], dense.shape[1]))


def positions_in_line(line: Array, count: int) -> tuple[Array, Array]:
    """The number of elements in each of so many sorted lines, and each element's index within its line."""
    lengths = np.bincount(line, minlength=count)
    return lengths, np.arange(len(line)) - np.concatenate([[0], np.cumsum(lengths)])[line]


def slices_of(found: Elements, size: int, index: Any) -> tuple[Array, Array, Array]:
    """Values, offsets and columns of sliced ELL; the last slice, which may have fewer rows, is padded to full size."""
    row, column, stored, (m, _) = found
    lengths, order = positions_in_line(row, m)
    widths = np.pad(lengths, (0, -m % size)).reshape(-1, size).max(axis=1, initial=0)
    offsets = np.concatenate([[0], np.cumsum(widths * size)])
    values, columns = np.zeros(offsets[-1], stored.dtype), np.full(offsets[-1], -1, index)
    at = offsets[row // size] + order * size + row % size
    values[at], columns[at] = stored, column
    return values, offsets.astype(index), columns


def blocks_of(found: Elements, size: int, index: Any) -> tuple[Array, Array]:
    """Values and columns of blocked ELL, as wide as the longest row of blocks, and at least one block wide."""
    row, column, stored, (m, n) = found
    wide = n // size
    numbers, which = np.unique((row // size) * wide + column // size, return_inverse=True)
    lengths, order = positions_in_line(numbers // wide, m // size)
    width = max(1, int(lengths.max(initial=0)))
    columns = np.full((m // size, width), -1, index)
    columns[numbers // wide, order] = numbers % wide
    sums = np.zeros((m // size, size, width, size), np.complex128 if stored.dtype.kind == "c" else np.float64)
    np.add.at(sums, (row // size, row % size, order[which], column % size), stored.astype(sums.dtype))
    return sums.reshape(m, width * size).astype(stored.dtype), columns
